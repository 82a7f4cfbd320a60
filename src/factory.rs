//! `Factory`: where services, observers and lockers on one backend come from.

use std::sync::Arc;
use std::time::Duration;

use crate::backend::Backend;
use crate::contender::{MutexContender, MutexRetriever};
use crate::error::Result;
use crate::fork::Origin;
use crate::lease::Lease;
use crate::locker::{LockerBuilder, Renewer};
use crate::scheduler::SchedulerBuilder;
use crate::service::{ContendBuilder, ObserveBuilder};

/// A backend and the lease that its contenders ask for. Cheap to clone; shared by any number of
/// services, and alive for as long as one of them is.
#[derive(Clone, Debug)]
pub struct Factory {
    backend: Arc<dyn Backend>,
    lease: Lease,
    initial_delay: Duration,
    origin: Origin,
    renewer: Arc<Renewer>,
}

impl Factory {
    /// A factory on `backend`, for backends of one's own; those of this crate have builders.
    #[must_use]
    pub fn new(backend: Arc<dyn Backend>, lease: Lease) -> Factory {
        Factory {
            backend,
            lease,
            initial_delay: Duration::ZERO,
            origin: Origin::here(),
            renewer: Arc::new(Renewer::new()),
        }
    }

    /// Lets services that contend make their first attempt so long after their start, unless they are
    /// told otherwise. Default: none.
    #[must_use]
    pub fn with_initial_delay(mut self, initial_delay: Duration) -> Factory {
        self.initial_delay = initial_delay;
        self
    }

    /// How long after its start a service of this factory makes its first attempt, unless told otherwise.
    #[must_use]
    pub fn initial_delay(&self) -> Duration {
        self.initial_delay
    }

    /// Where the mutexes are, without credentials.
    #[must_use]
    pub fn realm(&self) -> &str {
        self.backend.realm()
    }

    /// The lease that services of this factory ask for unless told otherwise.
    #[must_use]
    pub fn lease(&self) -> Lease {
        self.lease
    }

    /// Begins a service that contends for `mutex`.
    pub fn contend(&self, mutex: &str) -> ContendBuilder {
        ContendBuilder::new(self.clone(), mutex)
    }

    /// Begins a service that contends as a type of one's own, which brings the mutex and the id.
    pub fn contend_as(&self, contender: impl MutexContender + 'static) -> ContendBuilder {
        ContendBuilder::contender(self.clone(), contender)
    }

    /// Begins a service that follows who owns `mutex`, without contending.
    pub fn observe(&self, mutex: &str) -> ObserveBuilder {
        ObserveBuilder::new(self.clone(), mutex)
    }

    /// Begins a service that tells a type of one's own, which brings the mutex, who owns it.
    pub fn observe_as(&self, retriever: impl MutexRetriever + 'static) -> ObserveBuilder {
        ObserveBuilder::retriever(self.clone(), retriever)
    }

    /// Begins a locker: a lock with a guard, for one at a time in a section.
    ///
    /// ```
    /// let factory = contend::connect("memory://factory-locker-doc")?;
    /// let locker = factory.locker("invoices").build()?;
    /// let guard = locker.lock()?;
    /// println!("alone, with fence {}", guard.fence());
    /// # Ok::<(), contend::Error>(())
    /// ```
    pub fn locker(&self, mutex: &str) -> LockerBuilder {
        LockerBuilder::new(self.clone(), mutex)
    }

    /// Begins a scheduler: work at a fixed rate or with a fixed delay, on the leader only.
    ///
    /// ```
    /// use contend::ScheduleConfig;
    /// use std::time::Duration;
    ///
    /// let factory = contend::connect("memory://factory-scheduler-doc")?;
    /// let every_minute = ScheduleConfig::rate(Duration::ZERO, Duration::from_secs(60));
    /// let scheduler = factory.scheduler("clean-up").build(every_minute, |context| {
    ///     println!("cleaning up with fence {}", context.fence());
    ///     Ok(())
    /// })?;
    /// scheduler.start()?;
    /// # Ok::<(), contend::Error>(())
    /// ```
    pub fn scheduler(&self, mutex: &str) -> SchedulerBuilder {
        SchedulerBuilder::new(self.clone(), mutex)
    }

    /// What renews the guards of this factory's lockers.
    pub(crate) fn renewer(&self) -> &Renewer {
        &self.renewer
    }

    /// The backend, for who wraps one or drives a seat by hand.
    ///
    /// # Errors
    /// `Forked` in a child process that inherited this factory.
    pub fn backend(&self) -> Result<&Arc<dyn Backend>> {
        self.origin.check()?;
        Ok(&self.backend)
    }
}

#[cfg(test)]
impl Factory {
    /// This factory as a child process sees it.
    pub(crate) fn seen_from_a_child(&mut self) {
        self.origin = Origin::elsewhere();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    /// Rule 12. A real `fork` needs `unsafe`; what a child sees is another process id.
    #[test]
    fn a_child_process_is_refused_and_waits_for_nobody() {
        let mut factory = crate::memory::factory("fork", Lease::default());
        factory.seen_from_a_child();
        for error in [
            factory.backend().unwrap_err(),
            factory.contend("m").build().unwrap_err(),
            factory.observe("m").build().unwrap_err(),
            factory.locker("m").build().unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::Forked);
            assert!(error.to_string().contains("connect again"), "{error}");
        }
    }
}
