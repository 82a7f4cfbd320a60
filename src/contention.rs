//! The contention machine: what a contender does next, and what it may believe.
//!
//! Pure: no I/O, no clock, no randomness. Time, outcomes and dice come in as arguments; one [`Step`]
//! comes out. The worker thread (`contend_service.rs`) is the thin loop around it, the simulator in
//! `tests/` another one. The safety rules of the crate live here and nowhere else:
//!
//! - belief is counted from before the request was sent, and a deadline once passed never revives;
//! - an owner that cannot renew steps down at its deadline, and contends again;
//! - a grant that comes too late is given back, never announced;
//! - on giving up on purpose, Released is announced before the release is sent.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use crate::backend::{Attempt, Entry, Grant, Renewal};
use crate::clock::Moment;
use crate::lease::Lease;
use crate::owner::MutexOwner;
use crate::period::ContendPeriod;
use crate::state::MutexState;

/// What to do next.
#[derive(Clone, Debug)]
pub enum Step {
    /// Tell the listeners.
    Announce(Change),
    /// Call `acquire` and report through [`Contention::acquired`].
    Acquire {
        /// Whether a refusal leaves a place in the queue.
        entry: Entry,
        /// When the call must have returned.
        by: Moment,
    },
    /// Call `renew` and report through [`Contention::renewed`].
    Renew {
        /// The fence to name.
        fence: u64,
        /// When the call must have returned.
        by: Moment,
    },
    /// Call `release` and report through [`Contention::released`].
    Release {
        /// The fence to name.
        fence: u64,
        /// When the call must have returned.
        by: Moment,
    },
    /// Call `withdraw`; its outcome changes nothing.
    Withdraw {
        /// When the call must have returned.
        by: Moment,
    },
    /// Sleep until then, unless somebody rings.
    Wait {
        /// When to ask for the next step.
        until: Moment,
    },
    /// Nothing is left to do.
    Stopped,
}

/// A change of ownership, to be announced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// This contender became the owner.
    Acquired(MutexState),
    /// This contender ceased to be the owner.
    Released(MutexState),
    /// Somebody else's ownership, or its end, was seen.
    OwnerChanged(MutexState),
}

/// One contender's part in the contention for one mutex.
#[derive(Debug)]
pub struct Contention {
    id: Arc<str>,
    lease: Lease,
    period: ContendPeriod,
    /// What this contender believes it owns.
    owned: Option<Owned>,
    /// A grant that came too late and is still to be given back.
    give_back: Option<u64>,
    /// The end of the transition of the last belief: whoever heard Released winds down until then.
    winding_down: Moment,
    /// A lease of ours that the backend may still keep although we believe in it no more. A stop
    /// releases it; otherwise the next acquisition adopts it.
    leftover: Option<Leftover>,
    /// An acquisition without a known outcome may have left a lease of unknown fence.
    unsure: bool,
    /// This contender may stand in the backend's queue.
    entered: bool,
    /// The last owner seen, ourselves included.
    seen: MutexOwner,
    next_try: Moment,
    failures: u32,
    /// `Some` once told to stop: until when leaving may take, fixed by the first call it needs.
    leaving: Option<Option<Moment>>,
    news: VecDeque<Change>,
}

#[derive(Debug)]
struct Owned {
    fence: u64,
    /// The end of belief.
    until: Moment,
    renew_at: Moment,
    /// When the backend has let go of what it acknowledged.
    gone_at: Moment,
}

#[derive(Debug)]
struct Leftover {
    fence: u64,
    gone_at: Moment,
}

impl Contention {
    /// A contender that tries at `start` for the first time.
    #[must_use]
    pub fn new(id: Arc<str>, lease: Lease, period: ContendPeriod, start: Moment) -> Contention {
        Contention {
            id,
            lease,
            period,
            owned: None,
            give_back: None,
            winding_down: start,
            leftover: None,
            unsure: false,
            entered: false,
            seen: MutexOwner::NONE,
            next_try: start,
            failures: 0,
            leaving: None,
            news: VecDeque::with_capacity(4),
        }
    }

    /// Until when this contender may believe that it owns, and with which fence. The end may have
    /// passed: whoever asks compares it with the clock.
    #[must_use]
    pub fn belief(&self) -> Option<(Moment, u64)> {
        self.owned.as_ref().map(|owned| (owned.until, owned.fence))
    }

    /// The owner as this contender last saw it.
    #[must_use]
    pub fn seen(&self) -> &MutexOwner {
        &self.seen
    }

    /// When the backend lets go of the lease that was last owned or given up, unless a renewal of unknown
    /// outcome has prolonged it.
    #[must_use]
    pub fn gone_at(&self) -> Option<Moment> {
        let owned = self.owned.as_ref().map(|owned| owned.gone_at);
        owned.or(self.leftover.as_ref().map(|leftover| leftover.gone_at))
    }

    /// Begins to leave: ownership is given up, and the queue is left.
    pub fn stop(&mut self) {
        self.leaving.get_or_insert(None);
    }

    /// Leaves what the backend may still keep for us to run out by itself: work under it has not ended,
    /// and nobody else may begin before its time.
    pub fn abandon(&mut self) {
        self.leftover = None;
        self.give_back = None;
        self.unsure = false;
    }

    /// Whether this contender owns, and that was announced.
    #[must_use]
    pub fn is_announced(&self) -> bool {
        let waiting = matches!(self.news.back(), Some(Change::Acquired(_)));
        self.owned.is_some() && !waiting
    }

    /// Whether [`stop`](Contention::stop) was called.
    #[must_use]
    pub fn is_leaving(&self) -> bool {
        self.leaving.is_some()
    }

    /// What to do at `now`.
    pub fn step(&mut self, now: Moment) -> Step {
        if let Some(owned) = &self.owned
            && (self.leaving.is_some() || owned.until <= now)
        {
            self.step_down(now);
        }
        if let Some(change) = self.news.pop_front() {
            return Step::Announce(change);
        }
        if let Some(fence) = self.give_back {
            if self.leaving.is_none() && now < self.winding_down {
                // It adopted the lease whose belief has ended: nobody else may own before its
                // transition has passed, and so long this grant keeps the mutex for it.
                return Step::Wait {
                    until: self.winding_down,
                };
            }
            return Step::Release {
                fence,
                by: now + self.lease.call_budget(),
            };
        }
        if self.leaving.is_some() {
            return self.leave(now);
        }
        match &self.owned {
            Some(owned) if owned.renew_at <= now => Step::Renew {
                fence: owned.fence,
                // A call that could outlast belief would keep the worker from stepping down in time.
                by: owned.until.min(now + self.lease.call_budget()),
            },
            Some(owned) => Step::Wait {
                until: owned.renew_at.min(owned.until),
            },
            None if self.next_try <= now => {
                self.entered = true;
                Step::Acquire {
                    entry: Entry::Queue,
                    by: now + self.lease.call_budget(),
                }
            }
            None => Step::Wait {
                until: self.next_try,
            },
        }
    }

    /// The backend rang: a contender tries, an owner checks.
    pub fn woken(&mut self, now: Moment) {
        match &mut self.owned {
            Some(owned) => owned.renew_at = owned.renew_at.min(now),
            None => self.next_try = self.next_try.min(now),
        }
    }

    /// An `acquire` that was begun at `sent` is over at `now`. `None`: it failed, its outcome is unknown.
    pub fn acquired(&mut self, sent: Moment, now: Moment, attempt: Option<Attempt>, roll: f64) {
        match attempt {
            Some(Attempt::Granted(grant)) => {
                self.unsure = false;
                self.leftover = None;
                self.granted(sent, now, grant);
            }
            Some(Attempt::Refused(refusal)) => {
                self.unsure = false;
                self.failures = 0;
                self.leftover = None;
                self.see(refusal.owner);
                self.next_try = self.period.next_attempt(now, refusal.retry_in, roll);
            }
            None => {
                self.unsure = self.leaving.is_none();
                self.failures = self.failures.saturating_add(1);
                self.next_try = now + self.period.attempt_backoff(self.failures, roll);
            }
        }
    }

    /// A `renew` that was begun at `sent` is over at `now`. `None`: it failed, its outcome is unknown.
    pub fn renewed(&mut self, sent: Moment, now: Moment, renewal: Option<Renewal>, roll: f64) {
        let Some(owned) = &mut self.owned else {
            return;
        };
        if owned.until <= now {
            // Too late, whatever it says: the deadline has passed, and `step` will step down.
            return;
        }
        match renewal {
            Some(Renewal::Renewed(grant)) if grant.owner.fence() == owned.fence => {
                let from = grant.until.map_or(sent, |_| now);
                let until = grant.until.unwrap_or(sent + self.lease.belief());
                owned.until = owned.until.max(until);
                owned.renew_at = self.period.next_renewal(from, owned.until);
                owned.gone_at = owned.gone_at.max(gone_at(now, self.lease));
                self.failures = 0;
                self.seen = grant.owner;
            }
            Some(Renewal::Renewed(Grant { owner, .. }) | Renewal::Lost(owner)) => {
                self.step_down(now);
                self.leftover = None;
                self.see(owner);
            }
            None => {
                self.failures = self.failures.saturating_add(1);
                owned.renew_at = now + self.period.renewal_backoff(self.failures, roll);
            }
        }
    }

    /// A `release` is over. `None`: it failed, its outcome is unknown.
    pub fn released(&mut self, now: Moment, released: Option<bool>, roll: f64) {
        let gave_back = self.give_back.take().is_some();
        match released {
            Some(found) => {
                self.leftover = None;
                // Not there, and no earlier release of ours took it: an acquire that timed out may have
                // come in late and raised the fence. On leaving, that ghost is adopted too.
                self.unsure |= !found && (gave_back || self.failures == 0);
            }
            // A give-back whose outcome is unknown is tried again only on leaving: until then the next
            // acquisition finds out, by adopting what is left.
            None if gave_back => {}
            None => {
                self.failures = self.failures.saturating_add(1);
                self.next_try = now + self.period.renewal_backoff(self.failures, roll);
            }
        }
        if gave_back {
            self.next_try = self.next_try.max(now);
        }
    }

    fn granted(&mut self, sent: Moment, now: Moment, grant: Grant) {
        let from = grant.until.map_or(sent, |_| now);
        let until = grant.until.unwrap_or(sent + self.lease.belief());
        let fence = grant.owner.fence();
        let gone_at = gone_at(now, self.lease);
        if until <= now || self.leaving.is_some() {
            self.leftover = Some(Leftover { fence, gone_at });
            if self.leaving.is_none() {
                self.give_back = Some(fence);
                self.failures = self.failures.saturating_add(1);
                self.next_try = now;
            }
            return;
        }
        self.failures = 0;
        self.owned = Some(Owned {
            fence,
            until,
            renew_at: self.period.next_renewal(from, until),
            gone_at,
        });
        // The backend took us out of the queue when it granted.
        self.entered = true;
        let before = std::mem::replace(&mut self.seen, grant.owner.clone());
        // Seeing one's own ghost is not having owned.
        let before = if before.is_owner(&self.id) {
            MutexOwner::NONE
        } else {
            before
        };
        self.news
            .push_back(Change::Acquired(MutexState::new(before, grant.owner)));
    }

    fn step_down(&mut self, now: Moment) {
        let Some(owned) = self.owned.take() else {
            return;
        };
        self.leftover = Some(Leftover {
            fence: owned.fence,
            gone_at: owned.gone_at,
        });
        self.failures = 0;
        self.next_try = now;
        if let Some(Change::Acquired(state)) = self.news.back() {
            // A pause or a stop came between the grant and its announcement: too late to say that we
            // own, while somebody else may. As if the reply itself had come too late.
            self.seen = state.before().clone();
            self.news.pop_back();
            if self.leaving.is_none() {
                self.give_back = Some(owned.fence);
            }
            return;
        }
        self.winding_down = owned.until + self.lease.transition();
        let before = std::mem::replace(&mut self.seen, MutexOwner::NONE);
        self.news
            .push_back(Change::Released(MutexState::new(before, MutexOwner::NONE)));
    }

    /// Remembers the owner seen; somebody else's is news.
    fn see(&mut self, owner: MutexOwner) {
        if owner.is_owner(&self.id) {
            return;
        }
        if owner.owner_id() != self.seen.owner_id() {
            let state = MutexState::new(self.seen.clone(), owner.clone());
            self.news.push_back(Change::OwnerChanged(state));
        }
        self.seen = owner;
    }

    /// The way out: release what may be left, leave the queue, all within one call's budget.
    fn leave(&mut self, now: Moment) -> Step {
        let by = match self.leaving {
            Some(Some(by)) => by,
            _ => {
                // The first call on the way out does not wait for what went wrong before.
                self.failures = 0;
                let by = now + self.lease.call_budget();
                self.leaving = Some(Some(by));
                by
            }
        };
        if by <= now {
            return Step::Stopped;
        }
        if let Some(leftover) = &self.leftover {
            if self.failures > 0 && now < self.next_try {
                return Step::Wait {
                    until: self.next_try.min(by),
                };
            }
            // Also where it should be gone by now: a renewal of unknown outcome may have prolonged it.
            let fence = leftover.fence;
            return Step::Release { fence, by };
        }
        if std::mem::take(&mut self.unsure) {
            // The ghost of a timed-out attempt would block the mutex for a whole lease: adopt it, to
            // be able to release it.
            return Step::Acquire {
                entry: Entry::Try,
                by,
            };
        }
        if std::mem::take(&mut self.entered) {
            return Step::Withdraw { by };
        }
        Step::Stopped
    }
}

/// From a reply at `now` on, the backend keeps the lease for at most this long, drift included.
fn gone_at(now: Moment, lease: Lease) -> Moment {
    now + lease.total() + lease.total() / 100 + Duration::from_millis(5)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Moment {
        Moment::from_origin(Duration::from_millis(ms))
    }

    fn granted(fence: u64) -> Option<Attempt> {
        let owner = MutexOwner::new("a", 0, 0, 0, fence);
        Some(Attempt::Granted(Grant { owner, until: None }))
    }

    /// Rules 2 and 3 together: the listener of the first ownership still winds down when the adoption of
    /// its lease comes back too late.
    #[test]
    fn a_late_adoption_is_given_back_only_when_the_transition_is_over() {
        let lease = Lease::new(Duration::from_millis(1000), Duration::from_millis(600)).unwrap();
        let mut machine = Contention::new(Arc::from("a"), lease, ContendPeriod::new(lease), at(0));
        machine.acquired(at(0), at(1), granted(7), 0.0);
        assert!(matches!(
            machine.step(at(1)),
            Step::Announce(Change::Acquired(_))
        ));
        assert!(matches!(
            machine.step(at(1000)),
            Step::Announce(Change::Released(_))
        ));
        assert!(matches!(machine.step(at(1000)), Step::Acquire { .. }));
        machine.acquired(at(100), at(1200), granted(8), 0.0);
        assert!(matches!(machine.step(at(1200)), Step::Wait { until } if until == at(1600)));
        machine.woken(at(1300));
        assert!(matches!(machine.step(at(1300)), Step::Wait { until } if until == at(1600)));
        assert!(matches!(
            machine.step(at(1600)),
            Step::Release { fence: 8, .. }
        ));
    }
}
