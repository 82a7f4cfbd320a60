//! What the guards of a factory hold: renewed in batches, on the factory's `Timer`.

use std::collections::HashMap;
use std::iter;
use std::sync::{Arc, Weak};
use std::time::Duration;

use crossbeam_channel::Receiver;
use parking_lot::Mutex;

use super::semaphores::{RELEASE_PAUSE, SharedSemaphores};
use crate::backend::permit_store::{GrantId, Permit, Renewed};
use crate::clock::Moment;
use crate::error::Result;
use crate::lease::Lease;
use crate::ownership::Loss;
use crate::timer::{Next, Task, TaskId, Timer};

/// So many requests are renewed with one call.
const BATCH: usize = 200;

/// The shortest pause after a renewal that failed.
const REST: Duration = Duration::from_millis(10);

/// What a guard and the tasks that renew it both know.
#[derive(Debug)]
pub(super) struct Hold {
    pub(super) grant: GrantId,
    /// In the order of the semaphores' names.
    pub(super) permits: Vec<Permit>,
    pub(super) lease: Lease,
    belief: Mutex<Belief>,
    loss: Loss,
}

#[derive(Debug)]
struct Belief {
    /// Until when the permits are surely held; `None` once that has ended.
    until: Option<Moment>,
    /// When it is renewed next.
    due: Moment,
}

impl Belief {
    fn lasts(&self) -> bool {
        self.until.is_some_and(|until| Moment::now() < until)
    }
}

impl Hold {
    pub(super) fn new(grant: GrantId, permits: Vec<Permit>, lease: Lease, until: Moment) -> Hold {
        let belief = Belief {
            until: Some(until),
            due: Moment::now() + until.remaining() / 3,
        };
        Hold {
            grant,
            permits,
            lease,
            belief: Mutex::new(belief),
            loss: Loss::default(),
        }
    }

    pub(super) fn valid_for(&self) -> Duration {
        let belief = self.belief.lock();
        belief.until.map_or(Duration::ZERO, Moment::remaining)
    }

    pub(super) fn until(&self) -> Option<Moment> {
        self.belief.lock().until
    }

    pub(super) fn lost(&self) -> Receiver<()> {
        self.loss.receiver()
    }

    /// Ends belief for good. Returns `true` if it lasted until now.
    pub(super) fn end(&self) -> bool {
        let mut belief = self.belief.lock();
        let valid = belief
            .until
            .take()
            .is_some_and(|until| Moment::now() < until);
        self.loss.close();
        valid
    }

    /// When it is renewed next; `None` once belief has ended.
    fn next(&self) -> Option<Next> {
        let belief = self.belief.lock();
        let (at, ends) = (belief.due, belief.until?);
        belief.lasts().then_some(Next { at, ends })
    }

    /// Takes it into a batch if it is due, or will be soon. Until the call is over, no other batch takes it.
    fn take(&self, now: Moment) -> bool {
        let mut belief = self.belief.lock();
        let due = belief.lasts() && belief.due <= now + self.lease.ttl() / 12;
        if due {
            // Beyond what a batch takes along.
            belief.due = now + self.lease.request_limit().max(self.lease.ttl() / 8);
        }
        due
    }

    /// What a renewal that was sent at `sent` came to; `None` for an error.
    fn settle(&self, sent: Moment, renewed: Option<Renewed>) {
        let ttl = self.lease.ttl();
        let mut belief = self.belief.lock();
        let Some(until) = belief.until else { return };
        match renewed {
            // The clock is read under the lock: a deadline that was seen to pass never revives.
            Some(Renewed::Yes) if Moment::now() < until => {
                belief.until = Some(until.max(sent + self.lease.belief()));
                belief.due = sent + ttl / 3;
            }
            // `Expire` ends it.
            Some(Renewed::Yes) => {}
            Some(Renewed::Lost | Renewed::Unknown) => {
                drop(belief);
                self.end();
                log::warn!(
                    "the permits of {:?} were released or taken over while a guard held them",
                    self.grant.external_id
                );
            }
            Some(Renewed::Busy) | None => belief.due = Moment::now() + (ttl / 16).max(REST),
        }
    }
}

/// All that guards of a factory hold.
#[derive(Debug, Default)]
pub(super) struct Holds {
    /// By its renewal: what is held, and the task that ends belief in it.
    list: Mutex<HashMap<TaskId, (Arc<Hold>, TaskId)>>,
}

impl Holds {
    /// Renews `hold` after every third of its ttl, until it is removed or lost.
    pub(super) fn add(shared: &Arc<SharedSemaphores>, hold: &Arc<Hold>) -> Result<TaskId> {
        let timer = &shared.core.timer;
        let expire = Arc::new(Expire(Arc::clone(hold)));
        let until = hold.until().unwrap_or(Moment::FAR);
        let expire = timer.add(expire, Next::at(until))?;
        let renew = Arc::new(Renew {
            shared: Arc::downgrade(shared),
            hold: Arc::clone(hold),
        });
        // Listed first: its renewal takes it from the list.
        let mut list = shared.holds.list.lock();
        let renew = timer
            .add(renew, hold.next().unwrap_or(Next::at(Moment::FAR)))
            .inspect_err(|_| timer.remove(expire))?;
        list.insert(renew, (Arc::clone(hold), expire));
        Ok(renew)
    }

    pub(super) fn remove(&self, id: TaskId, timer: &Timer) {
        let removed = self.list.lock().remove(&id);
        timer.remove(id);
        if let Some((_, expire)) = removed {
            timer.remove(expire);
        }
    }

    /// Ends the belief of what `which` names: it is given back without its guard.
    pub(super) fn end(&self, which: impl Fn(&Hold) -> bool) {
        let list = self.list.lock();
        for (hold, _) in list.values().filter(|(hold, _)| which(hold)) {
            hold.end();
        }
    }

    /// Renews `own`, and with it others that are due or will be soon.
    fn renew(&self, own: &Arc<Hold>, shared: &SharedSemaphores) {
        let now = Moment::now();
        let list = self.list.lock();
        let others = list.values().map(|(hold, _)| hold);
        let due = iter::once(own).chain(others).filter(|it| it.take(now));
        let due: Vec<Arc<Hold>> = due.take(BATCH).cloned().collect();
        drop(list);
        let Some(limit) = due.iter().map(|hold| hold.lease.request_limit()).min() else {
            return;
        };
        let grants: Vec<GrantId> = due.iter().map(|hold| hold.grant.clone()).collect();
        let sent = Moment::now();
        let renewed = shared.call(limit, |store, by| store.renew(&grants, by));
        for (index, hold) in due.iter().enumerate() {
            let renewed = renewed.as_ref().ok().and_then(|it| it.get(index));
            hold.settle(sent, renewed.copied());
        }
    }
}

/// Renews a hold, and with it all others that are due.
struct Renew {
    shared: Weak<SharedSemaphores>,
    hold: Arc<Hold>,
}

impl Task for Renew {
    fn run(&self) -> Option<Next> {
        let shared = self.shared.upgrade()?;
        if self.hold.next()?.at <= Moment::now() {
            shared.holds.renew(&self.hold, &shared);
        }
        self.hold.next()
    }

    fn panicked(&self) {
        self.hold.end();
    }
}

/// Tells the holder when its belief ends. Makes no call, so a server that hangs does not delay it.
struct Expire(Arc<Hold>);

impl Task for Expire {
    fn run(&self) -> Option<Next> {
        let until = self.0.until()?;
        if Moment::now() < until {
            return Some(Next::at(until));
        }
        self.0.end();
        log::warn!(
            "the permits of {:?} could not be renewed in time: lost",
            self.0.grant.external_id
        );
        None
    }

    fn panicked(&self) {
        self.0.end();
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
        let error = self.shared.give_back(&self.grant).err()?;
        let id = &self.grant.external_id;
        log::debug!("request {id:?}: not released: {error}");
        let again = error.is_not_sent() && !self.until.remaining().is_zero();
        again.then(|| Next::at(Moment::now() + RELEASE_PAUSE))
    }

    fn panicked(&self) {}
}
