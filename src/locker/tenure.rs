//! `Tenure`: one lease that a locker holds, from the grant to the release. The timer renews it.

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;

use super::locker::Inner;
use crate::clock::Moment;
use crate::machine::contention::Change;
use crate::ownership::Loss;
use crate::probe::LossReason;
use crate::runner::Done;
use crate::timer::{Next, Task, TaskId};

/// How soon a renewal that finds the runner in use comes again.
const BUSY: Duration = Duration::from_millis(5);

pub(super) struct Tenure {
    inner: Weak<Inner>,
    pub(super) fence: u64,
    pub(super) granted_at: Moment,
    holder: Mutex<Holder>,
}

/// The guard that has the lease. A local hand-off replaces it.
struct Holder {
    loss: Arc<Loss>,
    /// From here on the lease is left to run out.
    renew_until: Moment,
    /// The guard has the turn still: it was not dropped, and its lease has not ended.
    has_turn: bool,
    /// The guard was dropped while a renewal hung, which is to release the lease.
    is_dropped: bool,
    task: Option<TaskId>,
}

impl Tenure {
    pub(super) fn new(
        inner: &Arc<Inner>,
        fence: u64,
        loss: Arc<Loss>,
        renew_until: Moment,
    ) -> Arc<Tenure> {
        Arc::new(Tenure {
            inner: Arc::downgrade(inner),
            fence,
            granted_at: Moment::now(),
            holder: Mutex::new(Holder {
                loss,
                renew_until,
                has_turn: true,
                is_dropped: false,
                task: None,
            }),
        })
    }

    pub(super) fn set_task(&self, task: TaskId) {
        self.holder.lock().task = Some(task);
    }

    pub(super) fn task(&self) -> Option<TaskId> {
        self.holder.lock().task
    }

    /// Gives the lease to another guard of the locker; `false` if it is over, or is not renewed any more.
    pub(super) fn pass_to(&self, inner: &Inner, loss: Arc<Loss>, renew_until: Moment) -> bool {
        let mut holder = self.holder.lock();
        // Under the lock: a loss after this look closes the new guard's channel.
        let is_renewed = Moment::now() < holder.renew_until;
        let is_valid = is_renewed && !inner.shared.valid_for(self.fence).is_zero();
        if is_valid {
            holder.loss = loss;
            holder.renew_until = renew_until;
            holder.has_turn = true;
        }
        is_valid
    }

    /// Takes the turn from the guard, once.
    pub(super) fn take_turn(&self) -> bool {
        std::mem::take(&mut self.holder.lock().has_turn)
    }

    /// Leaves the release to the renewal that hangs.
    pub(super) fn release_later(&self) {
        self.holder.lock().is_dropped = true;
    }
}

impl Task for Tenure {
    fn run(&self) -> Option<Next> {
        let inner = self.inner.upgrade()?;
        let Some(mut runner) = inner.runner.try_lock() else {
            return Some(Next::at(Moment::now() + BUSY));
        };
        loop {
            let belief = runner.machine().belief();
            let Some((until, _)) = belief.filter(|(_, fence)| *fence == self.fence) else {
                self.holder.lock().loss.close();
                // The transition is the guard's to wind down in: the next thread of this locker would adopt the lease.
                let lease_end = runner.machine().lease_end();
                if Moment::now() < lease_end {
                    return Some(Next::at(lease_end));
                }
                drop(runner);
                if self.take_turn() {
                    drop(inner.queue.resume());
                }
                return None;
            };
            let renew_until = self.holder.lock().renew_until;
            if renew_until <= Moment::now() && Moment::now() < until {
                return Some(Next::at(until));
            }
            match runner.step() {
                Done::Called {
                    change: Some(Change::Released(..)),
                    ..
                } => {}
                Done::Called { .. } if self.holder.lock().is_dropped => {
                    runner.step_down(LossReason::Released);
                    let by = Moment::now() + inner.contender.lease.request_limit();
                    if let Err(error) = runner.leave(by) {
                        log::warn!("{}: not released: {error}", inner.contender.mutex);
                    }
                    return None;
                }
                Done::Called { .. } => {}
                Done::Wait(at) => return Some(Next { at, ends: until }),
            }
        }
    }

    fn panicked(&self) {
        self.holder.lock().loss.close();
    }
}

impl fmt::Debug for Tenure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tenure({})", self.fence)
    }
}
