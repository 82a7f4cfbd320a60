//! `Maintenance`: sweeps and removals in the background, by one process at a time.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use super::outcome::Liveness;
use super::semaphores::{SWEEP_LIMIT, Semaphores, SharedSemaphores};
use crate::backend::permit_store::{Purge, Sweep, Swept};
use crate::clock::Moment;
use crate::error::{Error, Result};
use crate::factory::Factory;
use crate::parker::{Parker, Unparked};
use crate::service::MutexContendService;
use crate::thread::{self, Local, Thread};

/// The pause after a task that failed.
const RETRY: Duration = Duration::from_secs(10);

/// How long dropping waits for a task that is under way.
const FAREWELL: Duration = Duration::from_secs(1);

const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(24 * 3600);

type Callback = Box<dyn FnMut(&str) -> Liveness + Send>;

/// Builds a [`Maintenance`]: what is done, how often, and how old things must be.
///
/// Permits of a crashed process come back without it when they are needed: an acquire that finds a
/// semaphore exhausted takes back what has expired. Maintenance is for permits without a ttl, for
/// semaphores without requests, and for rows that are no longer needed.
#[must_use]
pub struct MaintenanceBuilder {
    semaphores: Semaphores,
    mutex: String,
    plan: Plan,
}

/// Intervals, ages and the callback.
struct Plan {
    orphan_interval: Duration,
    request_interval: Duration,
    history_interval: Duration,
    stale_after: Duration,
    request_age: Duration,
    history_age: Duration,
    batch: usize,
    liveness: Option<Callback>,
}

impl MaintenanceBuilder {
    pub(super) fn new(semaphores: Semaphores) -> MaintenanceBuilder {
        MaintenanceBuilder {
            semaphores,
            mutex: "contend-semaphore-maintenance".to_owned(),
            plan: Plan {
                orphan_interval: 5 * MINUTE,
                request_interval: 4 * HOUR,
                history_interval: DAY,
                stale_after: DAY,
                request_age: 7 * DAY,
                history_age: 30 * DAY,
                batch: 800,
                liveness: None,
            },
        }
    }

    /// Sets the mutex whose owner does the work. Defaults to `contend-semaphore-maintenance`. Processes
    /// that maintain the semaphores of different databases with one factory need different mutexes.
    pub fn mutex(mut self, mutex: &str) -> MaintenanceBuilder {
        self.mutex = mutex.to_owned();
        self
    }

    /// Sets how often permits that expired, became stale or belong to dead owners are taken back.
    /// Defaults to 5 minutes.
    pub fn orphan_interval(mut self, interval: Duration) -> MaintenanceBuilder {
        self.plan.orphan_interval = interval;
        self
    }

    /// Sets how often old requests are deleted. Defaults to 4 hours.
    pub fn request_interval(mut self, interval: Duration) -> MaintenanceBuilder {
        self.plan.request_interval = interval;
        self
    }

    /// Sets how often old history is deleted, and the counters are compared with the permits.
    /// Defaults to 24 hours.
    pub fn history_interval(mut self, interval: Duration) -> MaintenanceBuilder {
        self.plan.history_interval = interval;
        self
    }

    /// Sets how long after its last renewal a permit is stale. A permit whose ttl plus a quarter has not passed
    /// is left alone: its holder may still believe that it has it. Defaults to 24 hours.
    pub fn stale_after(mut self, age: Duration) -> MaintenanceBuilder {
        self.plan.stale_after = age;
        self
    }

    /// Sets how long a released request is kept and its external id is remembered. Defaults to 7 days.
    pub fn request_age(mut self, age: Duration) -> MaintenanceBuilder {
        self.plan.request_age = age;
        self
    }

    /// Sets how long a capacity change is kept. Defaults to 30 days.
    pub fn history_age(mut self, age: Duration) -> MaintenanceBuilder {
        self.plan.history_age = age;
        self
    }

    /// Sets how many rows are deleted in one transaction. Defaults to 800.
    pub fn batch(mut self, rows: usize) -> MaintenanceBuilder {
        self.plan.batch = rows;
        self
    }

    /// Sets the function that is called for each owner of a held permit, on the maintenance thread. If it
    /// panics, that owner's permits are left alone. Defaults to none.
    pub fn liveness(
        mut self,
        liveness: impl FnMut(&str) -> Liveness + Send + 'static,
    ) -> MaintenanceBuilder {
        self.plan.liveness = Some(Box::new(liveness));
        self
    }

    /// Starts a thread that contends for the mutex with `factory` and does the work while it leads.
    ///
    /// # Errors
    /// `InvalidInput` for an interval or batch of zero, or a mutex name that is not allowed;
    /// `Unavailable` if the system cannot start another thread.
    pub fn start(self, factory: &Factory) -> Result<Maintenance> {
        let plan = self.plan;
        let intervals = [
            plan.orphan_interval,
            plan.request_interval,
            plan.history_interval,
        ];
        if plan.batch == 0 || intervals.iter().any(Duration::is_zero) {
            return Err(Error::invalid(
                "an interval or a batch of zero would never rest",
            ));
        }
        let shared = Arc::clone(self.semaphores.shared.get()?);
        let parker = Parker::new();
        let unparker = parker.unparker();
        let service = factory
            .contend(&self.mutex)
            .on_acquired(move |_| unparker.unpark())
            .build()?;
        service.start()?;
        let service = Arc::new(service);
        let worker = Worker {
            shared,
            service: Arc::clone(&service),
            parker: parker.clone(),
            plan,
        };
        let thread = thread::start("contend-semaphore-maintenance", move || worker.work())?;
        Ok(Maintenance {
            running: Local::new(Running {
                service,
                parker,
                thread,
            }),
        })
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
pub struct Maintenance {
    running: Local<Running>,
}

struct Running {
    service: Arc<MutexContendService>,
    parker: Parker,
    thread: Thread,
}

impl Maintenance {
    /// Returns `true` if this process is the one that does the work.
    #[must_use]
    pub fn is_leader(&self) -> bool {
        self.running.here().is_some_and(|it| it.service.is_owner())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.parker.stop();
        self.thread.join(Moment::now() + FAREWELL);
    }
}

impl fmt::Debug for Maintenance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Maintenance")
            .field("is_leader", &self.is_leader())
            .finish_non_exhaustive()
    }
}

struct Worker {
    shared: Arc<SharedSemaphores>,
    service: Arc<MutexContendService>,
    parker: Parker,
    plan: Plan,
}

/// What is done: in this order, each at its own interval.
#[derive(Clone, Copy, Debug)]
enum Task {
    /// Take permits back.
    Orphans,
    /// Delete old requests.
    Requests,
    /// Delete old history, and compare the counters with the permits.
    History,
}

impl Worker {
    fn work(mut self) {
        let mut led = false;
        let tasks = [Task::Orphans, Task::Requests, Task::History];
        let mut due = tasks.map(|_| Moment::now());
        loop {
            let leads = self.service.is_owner();
            if leads && !led {
                // What the leader before us did, and when, is not known: all of it is due.
                due = tasks.map(|_| Moment::now());
            }
            led = leads;
            for (task, due) in tasks.into_iter().zip(&mut due) {
                if leads && *due <= Moment::now() {
                    // The service would lead on without this thread.
                    let performed = catch_unwind(AssertUnwindSafe(|| self.perform(task)));
                    *due = Moment::now() + self.pause_after(task, performed);
                }
            }
            let first = due.iter().min().copied();
            let until = first.filter(|_| self.service.is_owner());
            if self.parker.park(until.unwrap_or(Moment::FAR)) == Unparked::Stop {
                return;
            }
        }
    }

    /// Performs a task. Returns how much it came to.
    fn perform(&mut self, task: Task) -> Result<u64> {
        let (plan, shared) = (&mut self.plan, &self.shared);
        let go_on = || self.service.is_owner() && !self.parker.is_stopped();
        let purge = |what, age, batch| shared.purge(what, age, batch, go_on);
        match task {
            Task::Orphans => take_back(shared, plan),
            Task::Requests => purge(Purge::Requests, plan.request_age, plan.batch),
            Task::History => {
                let deleted = purge(Purge::History, plan.history_age, plan.batch)?;
                shared.retried(SWEEP_LIMIT, |store, by| store.audit(true, by))?;
                Ok(deleted)
            }
        }
    }

    /// Returns how long to wait after a task that came to this, before the next time.
    fn pause_after(&self, task: Task, performed: std::thread::Result<Result<u64>>) -> Duration {
        let interval = match task {
            Task::Orphans => self.plan.orphan_interval,
            Task::Requests => self.plan.request_interval,
            Task::History => self.plan.history_interval,
        };
        match performed {
            Ok(Ok(count)) => {
                log::debug!("semaphore maintenance: {task:?}, {count}");
                return interval;
            }
            Ok(Err(error)) => log::warn!("semaphore maintenance failed ({task:?}): {error}"),
            Err(_) => log::error!("semaphore maintenance panicked ({task:?}); it is repeated"),
        }
        interval.min(RETRY)
    }
}

fn take_back(shared: &SharedSemaphores, plan: &mut Plan) -> Result<u64> {
    let mut swept = shared.sweep(&Sweep::Expired)?;
    if let Some(liveness) = &mut plan.liveness {
        swept.extend(shared.sweep_dead(liveness)?);
    }
    swept.extend(shared.sweep(&Sweep::Stale(plan.stale_after))?);
    swept.iter().for_each(Swept::log);
    Ok(swept.len() as u64)
}
