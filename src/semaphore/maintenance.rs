//! `Maintenance`: sweeps and removals in the background, by one process at a time.

use std::fmt;
use std::time::Duration;

use super::request::Liveness;
use super::semaphores::{SWEEP_LIMIT, Semaphores};
use crate::backend::permit_store::{Purge, Sweep, log_swept};
use crate::clock::Moment;
use crate::error::{Error, Result};
use crate::factory::Factory;
use crate::scheduler::{Context, Schedule, Scheduler};

/// How long dropping waits for a task that is under way.
const STOP_WITHIN: Duration = Duration::from_secs(1);

const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(24 * 3600);

/// Builds a [`Maintenance`]: what is done, how often, and how old things must be.
///
/// Permits of a crashed process come back without it when they are needed: an acquire that finds a
/// semaphore exhausted takes back what has expired. Maintenance is for permits without a ttl, for
/// semaphores without requests, and for rows that are no longer needed.
///
/// ```
/// use contend::semaphore::Liveness;
/// use std::time::Duration;
///
/// let factory = contend::connect("memory://maintenance-builder-doc")?;
/// let maintenance = factory
///     .semaphores()?
///     .maintenance()
///     .orphan_interval(Duration::from_secs(60))
///     .liveness(|owner| match owner {
///         "host-7" => Liveness::Dead, // as the inventory says
///         _ => Liveness::Unknown,
///     })
///     .start(&factory)?;
/// # drop(maintenance);
/// # Ok::<(), contend::Error>(())
/// ```
#[must_use]
pub struct MaintenanceBuilder {
    semaphores: Semaphores,
    mutex: String,
    orphan_interval: Duration,
    request_interval: Duration,
    history_interval: Duration,
    stale_after: Duration,
    request_age: Duration,
    history_age: Duration,
    batch: usize,
    liveness: Option<Box<dyn FnMut(&str) -> Liveness + Send>>,
}

impl MaintenanceBuilder {
    pub(super) fn new(semaphores: Semaphores) -> MaintenanceBuilder {
        MaintenanceBuilder {
            semaphores,
            mutex: "contend-semaphore-maintenance".to_owned(),
            orphan_interval: 5 * MINUTE,
            request_interval: 4 * HOUR,
            history_interval: DAY,
            stale_after: DAY,
            request_age: 7 * DAY,
            history_age: 30 * DAY,
            batch: 800,
            liveness: None,
        }
    }

    /// Sets the mutex whose owner does the work. Defaults to `contend-semaphore-maintenance`. Processes
    /// that maintain the semaphores of different databases with one factory need different mutexes.
    ///
    /// ```
    /// let factory = contend::connect("memory://maintenance-mutex-doc")?;
    /// let maintenance = factory.semaphores()?.maintenance().mutex("keep-jobs");
    /// let maintenance = maintenance.start(&factory)?;
    /// # drop(maintenance);
    /// # Ok::<(), contend::Error>(())
    /// ```
    pub fn mutex(mut self, mutex: &str) -> MaintenanceBuilder {
        self.mutex = mutex.to_owned();
        self
    }

    /// Sets how often permits that expired, became stale or belong to dead owners are taken back.
    /// Defaults to 5 minutes.
    pub fn orphan_interval(mut self, interval: Duration) -> MaintenanceBuilder {
        self.orphan_interval = interval;
        self
    }

    /// Sets how often old requests are deleted. Defaults to 4 hours.
    pub fn request_interval(mut self, interval: Duration) -> MaintenanceBuilder {
        self.request_interval = interval;
        self
    }

    /// Sets how often old history is deleted, and the counters are compared with the permits.
    /// Defaults to 24 hours.
    pub fn history_interval(mut self, interval: Duration) -> MaintenanceBuilder {
        self.history_interval = interval;
        self
    }

    /// Sets how long after its last renewal a permit is stale. A permit whose ttl plus a quarter has not passed
    /// is left alone: its holder may still believe that it has it. Defaults to 24 hours.
    pub fn stale_after(mut self, age: Duration) -> MaintenanceBuilder {
        self.stale_after = age;
        self
    }

    /// Sets how long a released request is kept and its external id is remembered. Defaults to 7 days.
    pub fn request_age(mut self, age: Duration) -> MaintenanceBuilder {
        self.request_age = age;
        self
    }

    /// Sets how long a capacity change is kept. Defaults to 30 days.
    pub fn history_age(mut self, age: Duration) -> MaintenanceBuilder {
        self.history_age = age;
        self
    }

    /// Sets how many rows are deleted in one transaction. Defaults to 800.
    pub fn batch(mut self, rows: usize) -> MaintenanceBuilder {
        self.batch = rows;
        self
    }

    /// Sets the function that is called for each owner of a held permit, on the maintenance thread. If it
    /// panics, that owner's permits are left alone. Defaults to none.
    ///
    /// ```
    /// use contend::semaphore::Liveness;
    ///
    /// let factory = contend::connect("memory://liveness-doc")?;
    /// let hosts = ["host-7", "host-8"]; // as the inventory says
    /// let maintenance = factory.semaphores()?.maintenance();
    /// let maintenance = maintenance.liveness(move |owner| match hosts.contains(&owner) {
    ///     true => Liveness::Alive,
    ///     false => Liveness::Dead,
    /// });
    /// let maintenance = maintenance.start(&factory)?;
    /// # drop(maintenance);
    /// # Ok::<(), contend::Error>(())
    /// ```
    pub fn liveness(
        mut self,
        liveness: impl FnMut(&str) -> Liveness + Send + 'static,
    ) -> MaintenanceBuilder {
        self.liveness = Some(Box::new(liveness));
        self
    }

    /// Contends for the mutex with `factory`, and does the work while this process leads.
    ///
    /// # Errors
    /// `InvalidInput` for an interval or batch of zero, or a mutex name that is not allowed;
    /// `Unavailable` if the system cannot start another thread.
    pub fn start(self, factory: &Factory) -> Result<Maintenance> {
        let intervals = [
            self.orphan_interval,
            self.request_interval,
            self.history_interval,
        ];
        if self.batch == 0 || intervals.iter().any(Duration::is_zero) {
            return Err(Error::invalid(
                "an interval or a batch of zero would never rest",
            ));
        }
        let scheduler = factory.scheduler(&self.mutex).stop_within(STOP_WITHIN);
        let schedule = Schedule::with_delay(self.orphan_interval);
        let mut tasks = Tasks {
            requests_due: Moment::now(),
            history_due: Moment::now(),
            settings: self,
        };
        let scheduler = scheduler.start(schedule, move |context| tasks.perform(context))?;
        Ok(Maintenance { scheduler })
    }
}

impl fmt::Debug for MaintenanceBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MaintenanceBuilder")
            .field("mutex", &self.mutex)
            .finish_non_exhaustive()
    }
}

/// Maintenance that runs in the background until it is dropped.
///
/// Any number of processes may run it: the leader does the work. Two leaders at once would do no harm,
/// because every statement checks its own condition.
#[must_use = "dropping it ends maintenance"]
#[derive(Debug)]
pub struct Maintenance {
    scheduler: Scheduler,
}

impl Maintenance {
    /// Returns `true` if this process is the one that does the work.
    #[must_use]
    pub fn is_leader(&self) -> bool {
        self.scheduler.is_leader()
    }
}

/// What runs at the orphan interval: the other tasks are done when they are due.
struct Tasks {
    settings: MaintenanceBuilder,
    requests_due: Moment,
    history_due: Moment,
}

impl Tasks {
    /// # Errors
    /// Any; what is left is done at the next interval.
    fn perform(&mut self, context: &Context) -> Result<()> {
        let settings = &mut self.settings;
        let shared = settings.semaphores.shared.get()?;
        let mut swept = shared.sweep(&Sweep::Expired)?;
        if let Some(liveness) = &mut settings.liveness {
            swept.extend(shared.sweep_dead(liveness)?);
        }
        swept.extend(shared.sweep(&Sweep::Stale(settings.stale_after))?);
        for one in swept {
            log_swept([&one.external_id], one.reason);
        }
        let purge = |what, age| {
            let go_on = || !context.is_cancelled();
            shared.purge(what, age, settings.batch, go_on)
        };
        if self.requests_due <= Moment::now() {
            purge(Purge::Requests, settings.request_age)?;
            self.requests_due = Moment::now() + settings.request_interval;
        }
        if self.history_due <= Moment::now() {
            purge(Purge::History, settings.history_age)?;
            shared.retried(SWEEP_LIMIT, |store, by| store.audit(true, by))?;
            self.history_due = Moment::now() + settings.history_interval;
        }
        Ok(())
    }
}
