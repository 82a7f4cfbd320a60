//! `Factory`: where services, observers, lockers and schedulers on one backend come from.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use parking_lot::Mutex;

use crate::backend::{Backend, Participant};
use crate::clock::Moment;
use crate::error::{Error, Result};
use crate::health::Health;
use crate::id::Registry;
use crate::lease::Lease;
use crate::locker::{LockAllBuilder, LockerBuilder, ThreadQueue};
use crate::name::check_mutex;
use crate::owner::MutexOwner;
use crate::probe::{Probe, Probed};
use crate::scheduler::SchedulerBuilder;
use crate::semaphore::{Semaphores, SharedSemaphores};
use crate::service::{ContendBuilder, Executor, MutexContender, MutexRetriever, ObserveBuilder};
use crate::shared::{Link, Shared};
use crate::thread::Local;
use crate::timer::Timer;

/// How long inspection waits for an answer.
const INSPECTION_LIMIT: Duration = Duration::from_secs(2);

/// Creates services, lockers, schedulers and semaphores on one backend, with a common lease. Cheap to
/// clone; shared by any number of services and lockers, which keep working when it is dropped.
///
/// ```
/// let factory = contend::connect("memory://factory-doc?ttl=5s&transition=1s")?;
/// let locker = factory.locker("invoices").build()?; // each front has a builder
/// let service = factory.contend("nightly-report").build()?;
/// assert_eq!(factory.lease().ttl(), std::time::Duration::from_secs(5));
/// # Ok::<(), contend::Error>(())
/// ```
#[derive(Clone)]
pub struct Factory {
    core: Local<Arc<Core>>,
}

/// What everything that a factory makes shares. Dropped from top to bottom: first the threads that use
/// the backend.
pub(crate) struct Core {
    pub(crate) timer: Timer,
    pub(crate) link: Mutex<Link>,
    /// The ids and the holds of this factory.
    pub(crate) registry: Arc<Registry>,
    /// One for each mutex, where the backend wants lockers to queue here.
    queues: Mutex<HashMap<Arc<str>, Weak<ThreadQueue>>>,
    /// Shared by all handles on the semaphores.
    semaphores: Mutex<Weak<SharedSemaphores>>,
    pub(crate) initial_delay: Mutex<Duration>,
    pub(crate) executor: OnceLock<Executor>,
    pub(crate) probe: Probed,
    pub(crate) lease: Lease,
    pub(crate) backend: Arc<dyn Backend>,
}

impl Core {
    /// Notes how a call that `who` sent at `sent` ended, and logs when trouble begins and ends. `true`: it began.
    pub(crate) fn note(
        &self,
        shared: &Shared,
        who: impl fmt::Display,
        sent: Moment,
        error: Option<&Error>,
    ) -> bool {
        let now = Moment::now();
        self.link.lock().note(sent, now, error);
        match (shared.note(sent, now, error), error) {
            (true, Some(error)) => log::warn!("{who}: {error}; trying again"),
            (true, None) => log::info!("{who}: the backend answers again"),
            (false, _) => return false,
        }
        error.is_some()
    }

    /// Where the threads of a locker queue: alone, or with the other lockers of the mutex.
    pub(crate) fn thread_queue(&self, mutex: &Arc<str>) -> Arc<ThreadQueue> {
        if !self.backend.one_per_process() {
            return Arc::default();
        }
        let mut queues = self.queues.lock();
        queues.retain(|_, queue| queue.strong_count() > 0);
        let queue = queues
            .get(mutex)
            .and_then(Weak::upgrade)
            .unwrap_or_default();
        queues.insert(Arc::clone(mutex), Arc::downgrade(&queue));
        queue
    }
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Factory")
            .field("realm", &self.backend.realm())
            .field("lease", &self.lease)
            .finish_non_exhaustive()
    }
}

impl Factory {
    /// Makes a factory on a backend of your own.
    #[cfg(feature = "unstable")]
    #[must_use]
    pub fn new(backend: Arc<dyn Backend>, lease: Lease) -> Factory {
        Factory::over(backend, lease)
    }

    pub(crate) fn over(backend: Arc<dyn Backend>, lease: Lease) -> Factory {
        Factory {
            core: Local::new(Arc::new(Core {
                timer: Timer::new(lease.request_limit()),
                link: Mutex::default(),
                registry: Arc::default(),
                queues: Mutex::default(),
                semaphores: Mutex::default(),
                initial_delay: Mutex::default(),
                executor: OnceLock::new(),
                probe: Probed::default(),
                lease,
                backend,
            })),
        }
    }

    /// Sets the delay before a service's first attempt. Defaults to zero.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// // A process that was just started leaves the mutex to one whose caches are warm.
    /// let factory = contend::connect("memory://with-initial-delay-doc")?;
    /// let factory = factory.with_initial_delay(Duration::from_secs(30));
    /// let service = factory.contend("demo").build()?;
    /// service.start()?;
    /// assert!(!service.is_owner());
    /// # Ok::<(), contend::Error>(())
    /// ```
    #[must_use]
    pub fn with_initial_delay(self, initial_delay: Duration) -> Factory {
        if let Ok(inner) = self.core() {
            *inner.initial_delay.lock() = initial_delay;
        }
        self
    }

    /// Sets the executor that runs the callbacks of all services. Defaults to a thread for each service.
    /// Only the first call has an effect.
    ///
    /// ```
    /// use contend::{Executor, Job};
    /// use std::sync::Arc;
    ///
    /// let (jobs, queue) = contend::crossbeam_channel::unbounded::<Job>();
    /// std::thread::spawn(move || queue.iter().for_each(|job| job())); // a pool of one thread
    /// let executor: Executor = Arc::new(move |job| jobs.send(job).unwrap_or_default());
    ///
    /// let factory = contend::connect("memory://with-executor-doc")?.with_executor(executor);
    /// let service = factory.contend("demo").on_acquired(|_| println!("leading")).build()?;
    /// service.start()?;
    /// # Ok::<(), contend::Error>(())
    /// ```
    #[must_use]
    pub fn with_executor(self, executor: Executor) -> Factory {
        if let Ok(inner) = self.core() {
            let _ = inner.executor.set(executor);
        }
        self
    }

    /// Sets the probe that is notified of what this factory's services, lockers, schedulers and
    /// semaphores do. Defaults to none. Set it before creating any of them; only the first call has an
    /// effect.
    ///
    /// ```
    /// use contend::{LossReason, Probe};
    /// use std::sync::Arc;
    /// use std::time::Duration;
    ///
    /// struct Losses;
    ///
    /// impl Probe for Losses {
    ///     fn lost(&self, mutex: &str, _id: &str, _: u64, held: Duration, why: LossReason) {
    ///         println!("{mutex}: held for {held:?}, {why}");
    ///     }
    /// }
    ///
    /// let factory = contend::connect("memory://with-probe-doc")?.with_probe(Arc::new(Losses));
    /// factory.locker("reports").build()?.lock()?.unlock()?;
    /// # Ok::<(), contend::Error>(())
    /// ```
    #[must_use]
    pub fn with_probe(self, probe: Arc<dyn Probe>) -> Factory {
        if let Ok(inner) = self.core()
            && inner.probe.set(Arc::clone(&probe))
        {
            inner.backend.set_probe(probe);
        }
        self
    }

    /// Returns the location of the mutexes, without credentials.
    ///
    /// ```
    /// let factory = contend::connect("memory://realm-doc")?;
    /// assert_eq!(factory.realm(), "memory://realm-doc");
    /// # Ok::<(), contend::Error>(())
    /// ```
    #[must_use]
    pub fn realm(&self) -> &str {
        self.core.here().map_or("", |core| core.backend.realm())
    }

    /// Returns the lease that contenders of this factory use by default.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// let factory = contend::connect("memory://lease-doc?ttl=5s&transition=1s")?;
    /// assert_eq!(factory.lease().total(), Duration::from_secs(6));
    /// # Ok::<(), contend::Error>(())
    /// ```
    #[must_use]
    pub fn lease(&self) -> Lease {
        self.core()
            .map_or_else(|_| Lease::default(), |inner| inner.lease)
    }

    /// Returns a builder for a service that contends for `mutex`.
    ///
    /// ```
    /// let factory = contend::connect("memory://factory-contend-doc")?;
    /// let service = factory
    ///     .contend("nightly-report")
    ///     .on_acquired(|event| println!("leading with fence {:?}", event.fence()))
    ///     .on_released(|_| println!("no longer leading"))
    ///     .build()?;
    /// service.start()?;
    /// # Ok::<(), contend::Error>(())
    /// ```
    pub fn contend(&self, mutex: impl AsRef<str>) -> ContendBuilder {
        ContendBuilder::new(self.core(), mutex.as_ref().into())
    }

    /// Returns a builder for a service that contends as `contender`, a type of your own that provides the
    /// mutex and the id.
    pub fn contend_as(&self, contender: impl MutexContender + 'static) -> ContendBuilder {
        ContendBuilder::contender(self.core(), contender)
    }

    /// Returns a builder for a service that follows who owns `mutex`, without contending.
    ///
    /// ```
    /// let factory = contend::connect("memory://factory-observe-doc")?;
    /// let (observer, owners) = factory.observe("nightly-report").channel()?;
    /// observer.start()?;
    /// let event = owners.recv().unwrap(); // the first look is always reported
    /// assert!(!event.state.after().has_owner());
    /// # Ok::<(), contend::Error>(())
    /// ```
    pub fn observe(&self, mutex: impl AsRef<str>) -> ObserveBuilder {
        ObserveBuilder::new(self.core(), mutex.as_ref().into())
    }

    /// Returns a builder for a service that notifies `retriever`, a type of your own that provides the
    /// mutex, of who owns it.
    pub fn observe_as(&self, retriever: impl MutexRetriever + 'static) -> ObserveBuilder {
        ObserveBuilder::retriever(self.core(), retriever)
    }

    /// Returns a builder for a locker: a blocking lock with a guard.
    ///
    /// ```
    /// let factory = contend::connect("memory://factory-locker-doc")?;
    /// let locker = factory.locker("invoices").build()?;
    /// let guard = locker.lock()?;
    /// println!("alone, with fence {}", guard.fence());
    /// # Ok::<(), contend::Error>(())
    /// ```
    pub fn locker(&self, mutex: impl AsRef<str>) -> LockerBuilder {
        LockerBuilder::new(self.core(), mutex.as_ref().into())
    }

    /// Returns a builder that locks several mutexes together: all of them, or none.
    ///
    /// ```
    /// let factory = contend::connect("memory://factory-lock-all-doc")?;
    /// let guard = factory.lock_all(["accounts/7", "accounts/3"]).lock()?;
    /// println!("alone with both, fences {:?}", guard.fences());
    /// # Ok::<(), contend::Error>(())
    /// ```
    pub fn lock_all<N: AsRef<str>>(&self, mutexes: impl IntoIterator<Item = N>) -> LockAllBuilder {
        LockAllBuilder::new(
            self.core(),
            mutexes
                .into_iter()
                .map(|name| name.as_ref().into())
                .collect(),
        )
    }

    /// Returns the counting semaphores on this backend, which admit at most N at once, over one or more
    /// resources. All handles of a factory share one waiting order. They run on MySQL, Redis and memory.
    ///
    /// ```
    /// use contend::semaphore::PermitRequest;
    /// use std::time::Duration;
    ///
    /// let factory = contend::connect("memory://factory-semaphores-doc")?;
    /// let semaphores = factory.semaphores()?;
    /// semaphores.create("downloads", 5)?;
    /// let request = PermitRequest::generated().permits("downloads", 1);
    /// let guard = semaphores.guard(&request, Duration::from_secs(10))?;
    /// println!("one of five, with fence {:?}", guard.fence("downloads"));
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Unsupported` on ZooKeeper; `Forked` in a child process.
    pub fn semaphores(&self) -> Result<Semaphores> {
        let core = self.core()?;
        let mut known = core.semaphores.lock();
        let shared = match known.upgrade() {
            Some(shared) => shared,
            None => SharedSemaphores::new(&core)?,
        };
        *known = Arc::downgrade(&shared);
        Ok(Semaphores::new(shared))
    }

    /// Returns a builder for a scheduler: work that runs at its times, on the leader only.
    ///
    /// ```
    /// use contend::Schedule;
    /// use std::time::Duration;
    ///
    /// let factory = contend::connect("memory://factory-scheduler-doc")?;
    /// let every_minute = Schedule::every(Duration::from_secs(60));
    /// // Runs for as long as `scheduler` lives.
    /// let scheduler = factory.scheduler("clean-up").start(every_minute, |context| {
    ///     println!("cleaning up with fence {}", context.fence());
    /// })?;
    /// # Ok::<(), contend::Error>(())
    /// ```
    pub fn scheduler(&self, mutex: impl AsRef<str>) -> SchedulerBuilder {
        SchedulerBuilder::new(self, mutex.as_ref().into())
    }

    /// Sends a request to the backend, to fail fast if it cannot be reached or refuses access.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// let factory = contend::connect("memory://ping-doc")?;
    /// factory.ping(Duration::from_secs(1))?;
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// On MySQL the request is for the mutex table, which `create_table=true` creates if it is missing; until the
    /// table has been seen, a server that hangs takes up the whole timeout.
    ///
    /// # Errors
    /// Why the backend cannot be used: among others `Unreachable`, `Denied`, and `Misconfigured` if the table is
    /// missing.
    pub fn ping(&self, timeout: Duration) -> Result<()> {
        let core = self.core()?;
        let sent = Moment::now();
        let outcome = core.backend.ping(sent + timeout);
        let error = outcome.as_ref().err();
        core.link.lock().note(sent, Moment::now(), error);
        outcome
    }

    /// Returns the health of the backend and of this factory's services, as far as they have found out.
    /// Does no I/O: what has not been tried yet is not fine.
    ///
    /// ```
    /// let factory = contend::connect("memory://factory-health-doc")?;
    /// println!("{}", factory.health().to_json());
    /// # Ok::<(), contend::Error>(())
    /// ```
    #[must_use]
    pub fn health(&self) -> Health {
        match self.core() {
            Ok(core) => Health::new(&*core.backend, core.link.lock().clone()),
            Err(error) => Health::unusable(error),
        }
    }

    /// Reads who owns `mutex`: the owner, its fence, since when, and until when the lease lasts.
    ///
    /// ```
    /// let factory = contend::connect("memory://factory-owner-doc")?;
    /// let guard = factory.locker("invoices").id("a").build()?.lock()?;
    /// let owner = factory.owner("invoices")?;
    /// assert_eq!((owner.owner_id(), owner.fence()), ("a", guard.fence()));
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// # Errors
    /// `InvalidInput` for a name that is not allowed; any error of the backend.
    pub fn owner(&self, mutex: impl AsRef<str>) -> Result<MutexOwner> {
        self.inspect(mutex, |backend, mutex, by| backend.owner(mutex, by))
    }

    /// Reads who waits for `mutex`, in order, as far as the backend knows.
    ///
    /// ```
    /// let factory = contend::connect("memory://participants-doc")?;
    /// let guard = factory.locker("invoices").build()?.lock()?;
    /// for waiter in factory.participants("invoices")? {
    ///     println!("{} waits since {:?}", waiter.id, waiter.since);
    /// }
    /// # drop(guard);
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`owner`](Factory::owner).
    pub fn participants(&self, mutex: impl AsRef<str>) -> Result<Vec<Participant>> {
        self.inspect(mutex, |backend, mutex, by| backend.participants(mutex, by))
    }

    /// Reads the names of the mutexes that have an owner or a waiter, sorted.
    ///
    /// ```
    /// let factory = contend::connect("memory://list-doc")?;
    /// let guard = factory.locker("invoices").build()?.lock()?;
    /// for mutex in factory.list()? {
    ///     println!("{mutex}: owned by {:?}", factory.owner(&mutex)?.owner_id());
    /// }
    /// # drop(guard);
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// # Errors
    /// Any error of the backend.
    pub fn list(&self) -> Result<Vec<Arc<str>>> {
        self.core()?.backend.list(Moment::now() + INSPECTION_LIMIT)
    }

    /// Frees `mutex` at once if its owner has this `fence`, for operators who must remove an owner.
    /// Returns `false` if there is no such ownership.
    ///
    /// ```
    /// let factory = contend::connect("memory://factory-revoke-doc")?;
    /// let guard = factory.locker("invoices").build()?.lock()?;
    /// assert!(factory.revoke("invoices", guard.fence())?);
    /// assert!(guard.unlock().is_err()); // lost
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// The owner learns of it and steps down: a service at once on Redis, ZooKeeper and in memory, otherwise at its
    /// next renewal, after a third of its ttl. Until it does, two contenders may believe that they own, and only a
    /// checked fence keeps them apart.
    ///
    /// # Errors
    /// As [`owner`](Factory::owner).
    pub fn revoke(&self, mutex: impl AsRef<str>, fence: u64) -> Result<bool> {
        self.inspect(mutex, |backend, mutex, by| backend.revoke(mutex, fence, by))
    }

    fn inspect<T>(
        &self,
        mutex: impl AsRef<str>,
        look: impl FnOnce(&dyn Backend, &Arc<str>, Moment) -> Result<T>,
    ) -> Result<T> {
        let inner = self.core()?;
        let mutex: Arc<str> = mutex.as_ref().into();
        check_mutex(&mutex)?;
        look(&*inner.backend, &mutex, Moment::now() + INSPECTION_LIMIT)
    }

    /// Returns the backend, to wrap it or to drive it by hand.
    ///
    /// # Errors
    /// `Forked` in a child process that inherited this factory.
    #[cfg(feature = "unstable")]
    pub fn backend(&self) -> Result<Arc<dyn Backend>> {
        Ok(Arc::clone(&self.core()?.backend))
    }

    /// What everything that this factory makes shares.
    pub(crate) fn core(&self) -> Result<Arc<Core>> {
        self.core.get().map(Arc::clone)
    }
}

impl fmt::Debug for Factory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.core.here() {
            Some(core) => core.fmt(f),
            None => f.write_str("Factory (of the parent process)"),
        }
    }
}

#[cfg(test)]
impl Factory {
    /// This factory as a child process sees it.
    pub(crate) fn seen_from_a_child(&mut self) {
        self.core.seen_from_a_child();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    /// A real `fork` needs `unsafe`; what a child sees is another pid.
    #[test]
    fn child_process_is_refused() {
        let mut factory = crate::memory::factory("fork", Lease::default());
        factory.seen_from_a_child();
        for error in [
            factory.core().map(drop).unwrap_err(),
            factory.contend("m").build().map(drop).unwrap_err(),
            factory.observe("m").build().map(drop).unwrap_err(),
            factory.locker("m").build().map(drop).unwrap_err(),
            factory.ping(Duration::ZERO).unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::Forked);
            assert!(error.to_string().contains("connect again"), "{error}");
        }
    }
}
