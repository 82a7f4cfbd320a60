//! What the guards of a factory hold: renewed in batches, on the factory's `Timer`.

use std::collections::HashMap;
use std::iter;
use std::sync::{Arc, Weak};
use std::time::Duration;

use crossbeam_channel::Receiver;
use parking_lot::Mutex;

use super::semaphores::{RELEASE_PAUSE, SharedSemaphores};
use crate::backend::permit_store::{Grant, GrantId, Permit, PermitRenewal, Request};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::lease::Lease;
use crate::ownership::Loss;
use crate::timer::{Next, Task, TaskId, Timer};

/// So many requests are renewed with one call.
const BATCH: usize = 200;

/// What a guard and the tasks that renew it both know.
pub(super) struct Hold {
    pub(super) grant: GrantId,
    /// In the order of the semaphores' names.
    pub(super) permits: Vec<Permit>,
    pub(super) lease: Lease,
    belief: Mutex<Belief>,
    loss: Loss,
}

struct Belief {
    /// Until when the permits are surely held; `None` once that has ended.
    until: Option<Moment>,
    /// When it is renewed next.
    due: Moment,
}

impl Hold {
    pub(super) fn new(request: &Request, grant: Grant, lease: Lease) -> Hold {
        let remaining = grant.remaining.unwrap_or(Duration::ZERO);
        let until = grant.sent + remaining.min(lease.belief());
        let belief = Belief {
            until: Some(until),
            due: Moment::now() + until.remaining() / 3,
        };
        Hold {
            grant: request.grant_id(),
            permits: grant.permits,
            lease,
            belief: Mutex::new(belief),
            loss: Loss::default(),
        }
    }

    pub(super) fn valid_for(&self) -> Duration {
        let until = self.belief.lock().until;
        until.map_or(Duration::ZERO, Moment::remaining)
    }

    pub(super) fn lost(&self) -> Receiver<()> {
        self.loss.receiver()
    }

    /// Ends belief for good. Returns `true` if it lasted until now.
    pub(super) fn end(&self) -> bool {
        let until = self.belief.lock().until.take();
        self.loss.close();
        until.is_some_and(|until| Moment::now() < until)
    }

    /// When there is something to do: it is due, or belief ends. `None` once that has ended.
    fn next(&self) -> Option<Next> {
        let belief = self.belief.lock();
        let ends = belief.until?;
        let at = belief.due.min(ends);
        Some(Next { at, ends })
    }

    /// Takes it into a batch if it is due, or will be soon. Until the call is over, no other batch takes it.
    fn take(&self, now: Moment) -> bool {
        let mut belief = self.belief.lock();
        let soon = now + self.lease.ttl() / 12;
        let is_due = belief.until.is_some_and(|until| now < until) && belief.due <= soon;
        if is_due {
            // Beyond what a batch takes along.
            belief.due = now + self.lease.request_limit().max(self.lease.ttl() / 8);
        }
        is_due
    }

    /// What a renewal that was sent at `sent` came to; `None` for an error.
    fn settle(&self, sent: Moment, renewed: Option<PermitRenewal>) {
        let ttl = self.lease.ttl();
        let mut belief = self.belief.lock();
        let Some(until) = belief.until else { return };
        match renewed {
            // The clock is read under the lock: a deadline that was seen to pass never revives.
            Some(PermitRenewal::Renewed) if Moment::now() < until => {
                belief.until = Some(until.max(sent + self.lease.belief()));
                belief.due = sent + ttl / 3;
            }
            // Its own task ends it.
            Some(PermitRenewal::Renewed) => {}
            Some(PermitRenewal::AlreadyReleased | PermitRenewal::Unknown) => {
                drop(belief);
                self.end();
                log::warn!(
                    "the permits of {:?} were released or taken over while a guard held them",
                    self.grant.external_id
                );
            }
            None => belief.due = Moment::now() + ttl / 16,
        }
    }
}

/// All that guards of a factory hold, by the task of each.
#[derive(Default)]
pub(super) struct Holds(Mutex<HashMap<TaskId, Arc<Hold>>>);

impl Holds {
    /// Renews `hold` after every third of its ttl, until it is removed or lost.
    ///
    /// # Errors
    /// `Timeout` if it has ended already; `Unavailable` if the system allows no more threads.
    pub(super) fn add(shared: &Arc<SharedSemaphores>, hold: &Arc<Hold>) -> Result<TaskId> {
        if hold.valid_for().is_zero() {
            let text = "the permits were granted too late to be held; they are given back";
            return Err(Error::new(ErrorKind::Timeout, text));
        }
        let keep = Arc::new(Keep {
            shared: Arc::downgrade(shared),
            hold: Arc::clone(hold),
        });
        let next = hold.next().unwrap_or(Next::at(Moment::now()));
        let task = shared.core.timer.add(keep, next)?;
        shared.holds.0.lock().insert(task, Arc::clone(hold));
        Ok(task)
    }

    pub(super) fn remove(&self, task: TaskId, timer: &Timer) {
        self.0.lock().remove(&task);
        timer.remove(task);
    }

    /// Ends the belief of what `which` names: it is given back without its guard.
    pub(super) fn end(&self, which: impl Fn(&Hold) -> bool) {
        let list = self.0.lock();
        for hold in list.values().filter(|hold| which(hold)) {
            hold.end();
        }
    }

    /// Renews `own`, and with it others that are due or will be soon. Takes no longer than belief in `own` lasts.
    fn renew(&self, own: &Arc<Hold>, shared: &SharedSemaphores) {
        let now = Moment::now();
        let list = self.0.lock();
        let due = iter::once(own).chain(list.values());
        let due = due.filter(|hold| hold.take(now)).take(BATCH);
        let due: Vec<Arc<Hold>> = due.cloned().collect();
        drop(list);
        let limit = due.iter().map(|hold| hold.lease.request_limit()).min();
        let Some(limit) = limit.map(|limit| limit.min(own.valid_for())) else {
            return;
        };
        let grants: Vec<GrantId> = due.iter().map(|hold| hold.grant.clone()).collect();
        let sent = Moment::now();
        let renewed = shared.call(limit, |store, by| store.renew(&grants, by));
        let renewed = renewed.unwrap_or_default().into_iter();
        for (hold, renewed) in due.iter().zip(renewed.chain(iter::repeat(None))) {
            hold.settle(sent, renewed);
        }
    }
}

/// Renews a hold, and with it all others that are due; ends belief in it in time.
struct Keep {
    shared: Weak<SharedSemaphores>,
    hold: Arc<Hold>,
}

impl Task for Keep {
    fn run(&self) -> Option<Next> {
        let shared = self.shared.upgrade()?;
        let next = self.hold.next()?;
        if next.ends.remaining().is_zero() {
            self.hold.end();
            log::warn!(
                "the permits of {:?} could not be renewed in time: lost",
                self.hold.grant.external_id
            );
        } else if next.at.remaining().is_zero() {
            shared.holds.renew(&self.hold, &shared);
        }
        self.hold.next()
    }

    fn panicked(&self) {
        self.hold.end();
    }
}

/// Releases a grant with one attempt that reaches the server.
pub(super) struct ReleaseOnce {
    pub(super) shared: Arc<SharedSemaphores>,
    pub(super) grant: GrantId,
    /// Its permits have ended by then.
    pub(super) until: Moment,
}

impl Task for ReleaseOnce {
    fn run(&self) -> Option<Next> {
        // One at a time: many that hang together would keep the timer from renewals.
        if let Some(_turn) = self.shared.releasing.try_lock()
            && !self.shared.give_back(&self.grant).err()?.is_not_sent()
        {
            return None;
        }
        let again = !self.until.remaining().is_zero();
        again.then(|| Next::at(Moment::now() + RELEASE_PAUSE))
    }

    fn panicked(&self) {}
}
