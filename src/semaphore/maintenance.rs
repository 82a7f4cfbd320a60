//! `Maintenance`: sweeps and removals in the background, by one process at a time.

use std::fmt;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::check::repair;
use super::cleanup::{old_history, old_requests};
use super::core::Core;
use super::sweep::{Liveness, Swept};
use crate::bell::{Bell, Ring};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::factory::Factory;
use crate::fork::Origin;
use crate::service::MutexContendService;

/// The pause after a task that failed.
const RETRY: Duration = Duration::from_secs(10);

type Callback = Box<dyn FnMut(&str) -> Liveness + Send>;

/// Sets maintenance up: what is done, how often, and how old things must be.
#[must_use]
pub struct MaintenanceBuilder {
    core: Arc<Core>,
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

const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(24 * 3600);

impl MaintenanceBuilder {
    pub(super) fn new(core: &Arc<Core>) -> MaintenanceBuilder {
        MaintenanceBuilder {
            core: Arc::clone(core),
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

    /// The mutex that decides who does it. Default: `contend-semaphore-maintenance`. Processes that
    /// maintain the semaphores of different databases with one factory need different ones.
    pub fn mutex(mut self, mutex: &str) -> MaintenanceBuilder {
        self.mutex = mutex.to_owned();
        self
    }

    /// How often permits that expired, went stale or belong to the dead are taken back.
    /// Default: 5 minutes.
    pub fn orphan_interval(mut self, interval: Duration) -> MaintenanceBuilder {
        self.plan.orphan_interval = interval;
        self
    }

    /// How often old requests are deleted. Default: 4 hours.
    pub fn request_interval(mut self, interval: Duration) -> MaintenanceBuilder {
        self.plan.request_interval = interval;
        self
    }

    /// How often old history is deleted, and the counters are compared with the permits.
    /// Default: 24 hours.
    pub fn history_interval(mut self, interval: Duration) -> MaintenanceBuilder {
        self.plan.history_interval = interval;
        self
    }

    /// How long after its last renewal a permit is stale, whatever its ttl. Default: 24 hours.
    pub fn stale_after(mut self, age: Duration) -> MaintenanceBuilder {
        self.plan.stale_after = age;
        self
    }

    /// How long a released request is kept, and with it the memory of its external id.
    /// Default: 7 days.
    pub fn request_age(mut self, age: Duration) -> MaintenanceBuilder {
        self.plan.request_age = age;
        self
    }

    /// How long a change of a capacity is kept. Default: 30 days.
    pub fn history_age(mut self, age: Duration) -> MaintenanceBuilder {
        self.plan.history_age = age;
        self
    }

    /// How many rows are deleted in one transaction. Default: 800.
    pub fn batch(mut self, rows: usize) -> MaintenanceBuilder {
        self.plan.batch = rows;
        self
    }

    /// Asked about each owner of a held permit, on the maintenance thread. Default: nobody is asked.
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
    /// `Unavailable` where the system has no thread left.
    pub fn start(self, factory: &Factory) -> Result<Maintenance> {
        let plan = self.plan;
        if plan.batch == 0
            || [
                plan.orphan_interval,
                plan.request_interval,
                plan.history_interval,
            ]
            .iter()
            .any(Duration::is_zero)
        {
            return Err(Error::invalid(
                "an interval or a batch of zero would never rest",
            ));
        }
        let bell = Bell::new();
        let waker = bell.waker();
        let service = factory
            .contend(&self.mutex)
            .on_acquired(move |_| waker.wake())
            .build()?;
        service.start()?;
        let service = Arc::new(service);
        let worker = Worker {
            core: self.core,
            service: Arc::clone(&service),
            bell: bell.clone(),
            plan,
        };
        let thread = thread::Builder::new()
            .name("contend-semaphore-maintenance".to_owned())
            .spawn(move || worker.work())
            .map_err(|error| {
                Error::new(
                    ErrorKind::Unavailable,
                    "the system has no thread left for maintenance",
                )
                .with_source(error)
            })?;
        Ok(Maintenance {
            service,
            bell,
            thread: Some(thread),
            origin: Origin::here(),
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

/// Maintenance that goes on in the background until it is dropped.
///
/// Any number of processes may run it: the leader does the work. Two that believe to lead at once would
/// do no harm, every statement checks its reason itself.
pub struct Maintenance {
    service: Arc<MutexContendService>,
    bell: Bell,
    thread: Option<JoinHandle<()>>,
    origin: Origin,
}

impl Maintenance {
    /// Whether this process is the one that does it.
    #[must_use]
    pub fn is_leader(&self) -> bool {
        self.service.is_owner()
    }

    /// The service that contends for leadership.
    #[must_use]
    pub fn service(&self) -> &MutexContendService {
        &self.service
    }
}

impl Drop for Maintenance {
    fn drop(&mut self) {
        self.bell.stop();
        if let Some(thread) = self.thread.take()
            && self.origin.is_here()
        {
            let _ = thread.join();
        }
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
    core: Arc<Core>,
    service: Arc<MutexContendService>,
    bell: Bell,
    plan: Plan,
}

/// When each task is due.
#[derive(Clone, Copy)]
struct Due {
    orphans: Moment,
    requests: Moment,
    history: Moment,
}

impl Worker {
    fn work(mut self) {
        let mut led = false;
        let mut due = Due::now();
        loop {
            let leads = self.service.is_owner();
            if leads && !led {
                // What the leader before us did, and when, is not known: all of it is due.
                due = Due::now();
            }
            led = leads;
            if leads {
                self.orphans(&mut due.orphans);
                self.requests(&mut due.requests);
                self.history(&mut due.history);
            }
            let until = if self.service.is_owner() {
                due.orphans.min(due.requests).min(due.history)
            } else {
                Moment::FAR
            };
            if self.bell.wait(until) == Ring::Stop {
                return;
            }
        }
    }

    fn orphans(&mut self, due: &mut Moment) {
        if Moment::now() < *due {
            return;
        }
        let core = &self.core;
        let mut sweep = || -> Result<Vec<Swept>> {
            let mut swept = core.sweep_expired()?;
            if let Some(liveness) = &mut self.plan.liveness {
                swept.extend(core.sweep_dead(liveness)?);
            }
            swept.extend(core.sweep_stale(self.plan.stale_after)?);
            Ok(swept)
        };
        *due = match sweep() {
            Ok(swept) => {
                for one in swept {
                    log::info!(
                        "took the permits of {:?} back: {:?}",
                        one.external_id,
                        one.reason
                    );
                }
                Moment::now() + self.plan.orphan_interval
            }
            Err(error) => failed("take permits back", &error, self.plan.orphan_interval),
        };
    }

    fn requests(&mut self, due: &mut Moment) {
        if Moment::now() < *due {
            return;
        }
        let mut go_on = || self.service.is_owner() && !self.bell.is_stopped();
        let (age, batch) = (self.plan.request_age, self.plan.batch);
        *due = match old_requests(&self.core.store, age, batch, &mut go_on) {
            Ok(deleted) => {
                log::debug!("deleted {deleted} old requests");
                Moment::now() + self.plan.request_interval
            }
            Err(error) => failed("delete old requests", &error, self.plan.request_interval),
        };
    }

    fn history(&mut self, due: &mut Moment) {
        if Moment::now() < *due {
            return;
        }
        let mut go_on = || self.service.is_owner() && !self.bell.is_stopped();
        let (age, batch) = (self.plan.history_age, self.plan.batch);
        let outcome = old_history(&self.core.store, age, batch, &mut go_on)
            .and_then(|deleted| repair(&self.core.store).map(|_| deleted));
        *due = match outcome {
            Ok(deleted) => {
                log::debug!("deleted {deleted} old changes of capacities");
                Moment::now() + self.plan.history_interval
            }
            Err(error) => failed("delete old history", &error, self.plan.history_interval),
        };
    }
}

impl Due {
    fn now() -> Due {
        let now = Moment::now();
        Due {
            orphans: now,
            requests: now,
            history: now,
        }
    }
}

fn failed(what: &str, error: &Error, interval: Duration) -> Moment {
    log::warn!("semaphore maintenance could not {what}: {error}");
    Moment::now() + interval.min(RETRY)
}
