//! One thread per factory renews for all its guards. It starts with the first guard, ends with the
//! factory, and sleeps through cycles that are over before their first renewal.
//!
//! Where calls hang, up to three helpers work on the same list, so that those guards that can be renewed
//! are. A helper starts when the list falls behind, when a renewal that failed is about to be repeated, or
//! when one call could last longer than another guard's lease; it ends when there was no such trouble for a
//! while.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use super::rota::{Due, MOST_WORKERS, Rota, Visit};
use crate::bell::{Bell, Ring};
use crate::clock::Moment;
use crate::error::Result;
use crate::fork::Origin;
use crate::service::Lifecycle;

/// How long dropping a factory waits for the threads. No guard is left then, so no call is under way.
const JOIN: Duration = Duration::from_secs(5);

/// How long helpers stay after the last trouble.
const CALM: Duration = Duration::from_secs(10);

pub(crate) struct Renewer {
    crew: Arc<Crew>,
    origin: Origin,
}

/// The list, and who works on it: the first of them always, the others where calls hang.
struct Crew {
    rota: Mutex<Rota>,
    workers: [Lifecycle; MOST_WORKERS],
}

impl Renewer {
    pub(crate) fn new() -> Renewer {
        Renewer {
            crew: Arc::new(Crew {
                rota: Mutex::new(Rota::new()),
                workers: std::array::from_fn(|_| Lifecycle::new()),
            }),
            origin: Origin::here(),
        }
    }

    /// The list, with somebody who works on it.
    pub(super) fn rota(&self) -> Result<MutexGuard<'_, Rota>> {
        let mut rota = self.crew.rota.lock();
        if !rota.started.contains(&true) {
            self.crew.start(&mut rota, 0)?;
        }
        Ok(rota)
    }

    pub(super) fn remove(&self, number: u64, due: Due) {
        self.crew.rota.lock().remove(number, due);
    }
}

#[cfg(test)]
impl Renewer {
    /// The list as the workers have it.
    pub(super) fn list(&self) -> &Mutex<Rota> {
        &self.crew.rota
    }
}

impl Drop for Renewer {
    fn drop(&mut self) {
        // In a child process, a lock that a thread of the parent held stays locked for ever.
        if !self.origin.is_here() {
            return;
        }
        self.crew.rota.lock().closed = true;
        let by = Moment::now() + JOIN;
        for worker in &self.crew.workers {
            if let Err(error) = worker.stop("lock renewal", by) {
                log::warn!("a factory was dropped without a clean end: {error}");
            }
        }
    }
}

impl fmt::Debug for Renewer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Renewer").field(&self.crew.workers).finish()
    }
}

impl Crew {
    fn start(self: &Arc<Crew>, rota: &mut Rota, number: usize) -> Result<()> {
        let (Some(worker), Some(started)) =
            (self.workers.get(number), rota.started.get_mut(number))
        else {
            return Ok(());
        };
        let name = match number {
            0 => "lock renewal".to_owned(),
            helper => format!("lock renewal {helper}"),
        };
        let crew = Arc::clone(self);
        worker.start(name, || Ok((move |bell: Bell| crew.run(number, &bell), 0)))?;
        *started = true;
        Ok(())
    }

    fn run(self: &Arc<Crew>, number: usize, bell: &Bell) {
        // A helper comes because there is a backlog, and takes it for what it is.
        let mut up_since = Moment::now() - if number > 0 { CALM } else { Duration::ZERO };
        loop {
            let (visit, until) = {
                let mut rota = self.rota.lock();
                let now = Moment::now();
                rota.is_up(number);
                let visit = rota.pop(now);
                let mut until = rota.next();
                match &visit {
                    Some(visit) => self.reinforce(&mut rota, visit, up_since, now),
                    None if number > 0 && rota.calm_at <= now => {
                        if let Some(started) = rota.started.get_mut(number) {
                            *started = false;
                        }
                        return;
                    }
                    None => {
                        if number > 0 {
                            until = until.min(rota.calm_at);
                        }
                        rota.sleeps(number, until, bell.waker());
                    }
                }
                (visit, until)
            };
            match visit {
                Some(Visit {
                    holding,
                    due,
                    others,
                }) => {
                    // A backend of the caller's own that panics costs its guard, not everybody's renewal.
                    let tended = AssertUnwindSafe(|| holding.tend(&self.rota, others));
                    if catch_unwind(tended).is_err() {
                        log::error!("{}: renewal panicked", holding.place().mutex);
                        holding.loss().tell();
                    }
                    self.rota.lock().visited(due);
                }
                None if bell.wait(until) == Ring::Stop => return,
                None => up_since = Moment::now(),
            }
        }
    }

    /// Sees to it that somebody looks out for the others during a visit, while there is trouble: a renewal
    /// failed, a visit came late because another took long, or its call could eat another's lease. Without
    /// such trouble one thread is enough, and the first call that hangs costs the others the time of one.
    fn reinforce(self: &Arc<Crew>, rota: &mut Rota, visit: &Visit, up_since: Moment, now: Moment) {
        // What came late because the machine slept is nobody's fault.
        let late = now - visit.due.at.max(up_since);
        let budget = visit.holding.place().lease.call_budget();
        let behind = late > budget / 4;
        // A call for a long lease may last longer than a short one has left.
        let tight = visit.others < now + budget * 2;
        if behind || tight || visit.due.again {
            rota.calm_at = now + CALM;
        }
        if now < rota.calm_at
            && let Some(number) = rota.missing()
            && let Err(error) = self.start(rota, number)
        {
            log::debug!("no helper for renewals that hang: {error}");
        }
    }
}
