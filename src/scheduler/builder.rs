//! Builds a `Scheduler`.

use std::sync::Arc;
use std::time::Duration;

use super::config::ScheduleConfig;
use super::context::Context;
use super::schedule::Scheduler;
use super::term::Term;
use crate::error::Result;
use crate::factory::Factory;
use crate::id::ContenderIdGenerator;
use crate::service::ContendBuilder;

/// Builds a [`Scheduler`]. Everything is checked at the end, before anything happens.
///
/// ```
/// use contend::ScheduleConfig;
/// use std::time::Duration;
///
/// let factory = contend::connect("memory://scheduler-builder-doc")?;
/// let scheduler = factory
///     .scheduler("clean-up")
///     .ttl(Duration::from_secs(5))
///     .transition(Duration::from_secs(20)) // what running work may need to stop
///     .stop_within(Duration::from_secs(60))
///     .build(
///         ScheduleConfig::delay(Duration::ZERO, Duration::from_secs(300)),
///         |_| Ok(()),
///     )?;
/// assert_eq!(scheduler.mutex(), "clean-up");
/// # Ok::<(), contend::Error>(())
/// ```
#[derive(Debug)]
#[must_use]
pub struct SchedulerBuilder {
    contend: ContendBuilder,
    stop_within: Duration,
}

impl SchedulerBuilder {
    pub(crate) fn new(factory: Factory, mutex: &str) -> SchedulerBuilder {
        SchedulerBuilder {
            contend: ContendBuilder::new(factory, mutex),
            stop_within: Duration::from_secs(30),
        }
    }

    /// The id to contend under. Default: a generated one. No other contender of the mutex, in any
    /// process, may have it.
    pub fn id(mut self, id: &str) -> SchedulerBuilder {
        self.contend = self.contend.id(id);
        self
    }

    /// How to generate an id. Default: [`ContenderIdGenerator::Host`].
    pub fn id_generator(mut self, ids: ContenderIdGenerator) -> SchedulerBuilder {
        self.contend = self.contend.id_generator(ids);
        self
    }

    /// How long this process may believe it leads without a renewal. Default: the factory's, 10 s.
    pub fn ttl(mut self, ttl: Duration) -> SchedulerBuilder {
        self.contend = self.contend.ttl(ttl);
        self
    }

    /// How long after the ttl nobody else can lead: the time for running work to stop in. Default: the
    /// factory's, 6 s.
    pub fn transition(mut self, transition: Duration) -> SchedulerBuilder {
        self.contend = self.contend.transition(transition);
        self
    }

    /// How long after a grant the lease is renewed. Default: a third of the ttl.
    pub fn renew_after(mut self, renew_after: Duration) -> SchedulerBuilder {
        self.contend = self.contend.renew_after(renew_after);
        self
    }

    /// Over how long contenders spread their attempts when a lease has ended. Default: a twentieth of
    /// the ttl, at most 50 ms.
    pub fn jitter(mut self, jitter: Duration) -> SchedulerBuilder {
        self.contend = self.contend.jitter(jitter);
        self
    }

    /// How long [`Scheduler::stop`] waits for running work. Default: 30 s.
    pub fn stop_within(mut self, stop_within: Duration) -> SchedulerBuilder {
        self.stop_within = stop_within;
        self
    }

    /// The scheduler of `work`. An error that the work returns and a panic in it are logged, and the
    /// schedule goes on.
    ///
    /// # Errors
    /// `InvalidInput` for a name, id, duration or period that is not allowed, `DuplicateContender` for an
    /// id that this process contends under already, `Forked` in a child process.
    pub fn build(
        self,
        config: ScheduleConfig,
        work: impl FnMut(
            &Context,
        )
            -> std::result::Result<(), Box<dyn std::error::Error + Send + Sync + 'static>>
        + Send
        + 'static,
    ) -> Result<Scheduler> {
        config.check()?;
        let term = Arc::new(Term::default());
        let (begin, end) = (Arc::clone(&term), Arc::clone(&term));
        let service = self
            .contend
            .on_acquired(move |event| begin.begin(event.fence()))
            .on_released(move |_| end.end())
            .build()?;
        Ok(Scheduler::new(
            service,
            term,
            config,
            Box::new(work),
            self.stop_within,
        ))
    }
}
