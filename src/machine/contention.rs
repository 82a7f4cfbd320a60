//! The contention machine: what a contender does next, and what it may believe.
//!
//! Pure: no I/O, no clock, no randomness. Time, outcomes and dice come in as arguments; one [`Step`]
//! comes out. The runner performs the steps. The safety rules live here and nowhere else:
//!
//! - belief is counted from before the request was sent, and a deadline once passed never revives;
//! - an owner that cannot renew steps down at its deadline, and contends again;
//! - a grant that comes too late is given back, never announced;
//! - on giving up on purpose, Released is announced before the release is sent;
//! - whoever meets its own id under another fence stands back until that is gone.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use crate::backend::{Attempt, Grant, OnRefusal, Renewal, View};
use crate::clock::Moment;
use crate::lease::Lease;
use crate::machine::period::ContendPeriod;
use crate::owner::{MutexOwner, MutexState};
use crate::probe::LossReason;

/// The most by which leaving may delay a stop.
const LEAVING: Duration = Duration::from_secs(1);

/// What to do next.
#[derive(Clone, Debug)]
pub enum Step {
    /// Tell the listeners.
    Announce(Change),
    /// Call `acquire` and report through [`Contention::acquired`].
    Acquire {
        /// Whether a refusal leaves a place in the queue.
        on_refusal: OnRefusal,
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
    /// Call `withdraw` and report through [`Contention::withdrawn`].
    Withdraw {
        /// When the call must have returned.
        by: Moment,
    },
    /// Look who owns the mutex, without contending, and report through [`Contention::observed`].
    Observe {
        /// When the call must have returned.
        by: Moment,
    },
    /// Sleep until then, unless woken.
    Wait {
        /// When to ask for the next step.
        until: Moment,
    },
    /// Nothing is left to do.
    Over,
}

/// A change of ownership, to be announced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// This contender became the owner.
    Acquired(MutexState),
    /// This contender ceased to be the owner.
    Released(MutexState, LossReason),
    /// Somebody else's ownership, or its end, was seen.
    OwnerChanged(MutexState),
    /// Another process contends under this contender's id, and owns.
    Double(MutexOwner),
}

/// Why a call has no outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// Nothing was sent: nothing happened.
    NotAsked,
    /// It may have happened, or may still happen.
    Unknown,
    /// The backend panicked: its outcome is unknown, and nothing it said before is believed any more.
    Panicked,
}

/// One contender's part in the contention for one mutex.
#[derive(Debug)]
pub struct Contention {
    id: Arc<str>,
    lease: Lease,
    period: ContendPeriod,
    phase: Phase,
    /// What this contender believes it owns.
    owned: Option<Owned>,
    /// A grant that came too late and is still to be given back.
    give_back: Option<u64>,
    /// The end of the transition of the last belief: whoever heard Released winds down until then.
    winding_down: Moment,
    /// A lease of ours that the backend may still keep although we believe in it no more. Leaving
    /// releases it; otherwise the next acquisition adopts it.
    leftover: Option<Leftover>,
    /// An acquisition without a known outcome may have left a lease of unknown fence.
    unsure: bool,
    /// A release found nothing under its fence, which was acquired then: a repeated request of ours may have
    /// raised it, or a double has the mutex. Whoever leaves looks before it adopts.
    doubtful: Option<u64>,
    /// Until when such an acquisition may still come in late and raise the fence of our own lease.
    late_until: Moment,
    /// This contender may stand in the backend's queue.
    entered: bool,
    /// A locker, which contends again and again and keeps its subscription from one time to the next.
    comes_again: bool,
    /// Whether the next attempt leaves a place in the queue if it is refused.
    on_refusal: OnRefusal,
    /// Another process owns under our id, with this fence: look, and do not contend.
    standing_back: Option<u64>,
    /// The last ownership was taken by our own id, soon after it had begun. Once, that may have been a
    /// repeated request of our own; twice in a row, it is a double.
    suspected: bool,
    /// The last owner seen, ourselves included.
    seen: MutexOwner,
    next_try: Moment,
    /// No wake-up leads to an attempt before this: whoever resigned rests.
    rests_until: Moment,
    failures: u32,
    news: VecDeque<Change>,
}

#[derive(Clone, Copy, Debug)]
enum Phase {
    Contending,
    Leaving {
        /// Until when leaving may take, fixed by the first call it needs.
        by: Option<Moment>,
        then: Then,
    },
}

#[derive(Clone, Copy, Debug)]
enum Then {
    End,
    /// Contends again after a rest.
    Rejoin(Duration),
}

#[derive(Debug)]
struct Owned {
    fence: u64,
    /// The end of belief.
    until: Moment,
    renew_at: Moment,
    /// No renewal before this: one call follows another, never at once.
    not_before: Moment,
    /// When the backend has let go of what it acknowledged.
    gone_at: Moment,
}

#[derive(Debug)]
struct Leftover {
    fence: u64,
    /// On the backend's clock, in epoch ms.
    acquired_at: u64,
    gone_at: Moment,
}

impl Contention {
    /// Makes a contender that tries at `start` for the first time, and queues.
    #[must_use]
    pub fn new(id: Arc<str>, lease: Lease, period: ContendPeriod, start: Moment) -> Contention {
        Contention {
            id,
            lease,
            period,
            phase: Phase::Contending,
            owned: None,
            give_back: None,
            winding_down: start,
            leftover: None,
            unsure: false,
            doubtful: None,
            late_until: Moment::from_origin(Duration::ZERO),
            entered: false,
            comes_again: false,
            on_refusal: OnRefusal::Enqueue,
            standing_back: None,
            suspected: false,
            seen: MutexOwner::NONE,
            next_try: start,
            rests_until: start,
            failures: 0,
            news: VecDeque::with_capacity(4),
        }
    }

    /// Contends anew after [`stop`](Contention::stop), taking over what is left from before. The first
    /// attempt does as `first` says if it is refused; those after it queue.
    pub fn begin(&mut self, now: Moment, first: OnRefusal) {
        self.news.clear();
        // An ownership whose holder is gone, but which could not be given up yet: the attempt adopts it.
        self.step_down(now, LossReason::Released);
        self.phase = Phase::Contending;
        self.comes_again = true;
        self.on_refusal = first;
        self.next_try = now;
        self.failures = 0;
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
    /// outcome has prolonged it. `None` if nobody winds down any more.
    #[must_use]
    pub fn gone_at(&self, now: Moment) -> Option<Moment> {
        let owned = self.owned.as_ref().map(|owned| owned.gone_at);
        let left = self.leftover.as_ref().map(|leftover| leftover.gone_at);
        // A lease of unknown fence may be what raised the fence of the last one, and took it away.
        let unsure = self.unsure && now < self.winding_down;
        owned.or(left).or(unsure.then_some(self.winding_down))
    }

    /// Begins to leave: ownership is given up, and the queue is left.
    pub fn stop(&mut self) {
        self.phase = match self.phase {
            Phase::Leaving { by, .. } => Phase::Leaving {
                by,
                then: Then::End,
            },
            Phase::Contending => Phase::Leaving {
                by: None,
                then: Then::End,
            },
        };
    }

    /// Leaves, or leaves once more where the last time left traces, until `by`.
    pub fn leave_by(&mut self, now: Moment, by: Moment) {
        self.failures = 0;
        self.phase = Phase::Leaving {
            by: Some(by.min(now + self.lease.call_budget())),
            then: Then::End,
        };
    }

    /// Gives ownership and the place in the queue up, and contends again after `rest`.
    pub fn resign(&mut self, rest: Duration) {
        if let Phase::Contending = self.phase {
            self.phase = Phase::Leaving {
                by: None,
                then: Then::Rejoin(rest),
            };
        }
    }

    /// Leaves what the backend may still keep for us to run out by itself: work under it has not ended,
    /// and nobody else may begin before its time.
    pub fn abandon(&mut self) {
        self.leftover = None;
        self.give_back = None;
        self.unsure = false;
        self.doubtful = None;
    }

    /// Whether this contender owns, and that was announced.
    #[must_use]
    pub fn is_announced(&self) -> bool {
        let waiting = matches!(self.news.back(), Some(Change::Acquired(_)));
        self.owned.is_some() && !waiting
    }

    /// Whether [`stop`](Contention::stop) or [`resign`](Contention::resign) was called and is under way.
    #[must_use]
    pub fn is_leaving(&self) -> bool {
        matches!(self.phase, Phase::Leaving { .. })
    }

    /// The fence of a lease that the backend may still keep although this contender believes in it no more.
    #[must_use]
    pub fn leftover(&self) -> Option<u64> {
        self.leftover.as_ref().map(|leftover| leftover.fence)
    }

    /// Whether the backend may keep something of this contender although it owns nothing.
    #[must_use]
    pub fn has_traces(&self) -> bool {
        let ours = self.leftover.is_some() || self.give_back.is_some() || self.unsure;
        ours || self.doubtful.is_some() || self.entered
    }

    /// Whether there is something to announce.
    #[must_use]
    pub fn has_news(&self) -> bool {
        !self.news.is_empty()
    }

    /// When there is something to do, as far as is known.
    #[must_use]
    pub fn due(&self) -> Moment {
        match &self.owned {
            Some(owned) => owned.renew_at.min(owned.until),
            None => self.next_try,
        }
    }

    /// Whether the last call failed.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.failures > 0
    }

    /// The fence with which another process owns under this contender's id.
    #[must_use]
    pub fn stands_back_from(&self) -> Option<u64> {
        self.standing_back
    }

    /// What to do at `now`.
    pub fn step(&mut self, now: Moment) -> Step {
        if let Some(owned) = &self.owned {
            if owned.until <= now {
                self.step_down(now, LossReason::Expired);
            } else if self.is_leaving() {
                self.step_down(now, LossReason::Released);
            }
        }
        if let Some(change) = self.news.pop_front() {
            return Step::Announce(change);
        }
        if let Some(fence) = self.give_back {
            if !self.is_leaving() && now < self.winding_down {
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
        if let Phase::Leaving { by, then } = self.phase {
            let step = self.leave(now, by, then);
            if let (Step::Over, Then::Rejoin(rest)) = (&step, then) {
                self.phase = Phase::Contending;
                self.failures = 0;
                self.next_try = now + rest;
                self.rests_until = self.next_try;
                return Step::Wait {
                    until: self.next_try,
                };
            }
            return step;
        }
        let by = now + self.lease.call_budget();
        match &self.owned {
            Some(owned) if owned.renew_at <= now => Step::Renew {
                fence: owned.fence,
                // A call that could outlast belief would keep the worker from stepping down in time.
                by: owned.until.min(by),
            },
            Some(owned) => Step::Wait {
                until: owned.renew_at.min(owned.until),
            },
            None if now < self.next_try => Step::Wait {
                until: self.next_try,
            },
            None if self.standing_back.is_some() => Step::Observe { by },
            None => Step::Acquire {
                on_refusal: self.on_refusal,
                by,
            },
        }
    }

    /// The backend unparked us: a contender tries, an owner checks.
    pub fn woken(&mut self, now: Moment) {
        match &mut self.owned {
            Some(owned) => owned.renew_at = owned.renew_at.min(now.max(owned.not_before)),
            None => self.next_try = self.next_try.min(now.max(self.rests_until)),
        }
    }

    /// An `acquire` is about to be sent: from here on it may leave something.
    pub fn acquiring(&mut self, on_refusal: OnRefusal) {
        self.entered |= on_refusal == OnRefusal::Enqueue;
    }

    /// An `acquire` that was begun at `sent` is over at `now`.
    pub fn acquired(
        &mut self,
        sent: Moment,
        now: Moment,
        attempt: Result<Attempt, Failure>,
        roll: f64,
    ) {
        let queued = self.on_refusal == OnRefusal::Enqueue;
        self.on_refusal = OnRefusal::Enqueue;
        match attempt {
            Ok(Attempt::Granted(grant)) => {
                self.unsure = false;
                self.doubtful = None;
                self.leftover = None;
                // The grant took it out of the queue, unless an attempt that is still on its way puts it
                // back: whoever comes again sees to that then, others withdraw when they leave.
                self.entered &= !self.comes_again || now < self.late_until;
                self.granted(sent, now, grant);
            }
            Ok(Attempt::Refused(refusal)) => {
                if refusal.asked {
                    // Somebody else's. What asked the server nothing does not prove that.
                    self.doubtful = None;
                    self.unsure = false;
                    self.leftover = None;
                }
                self.failures = 0;
                self.see(refusal.owner);
                self.next_try = if queued {
                    self.period.next_attempt(now, refusal.retry_in, roll)
                } else {
                    // It stands in no queue yet: it enters now, not when the lease seen has ended.
                    now
                };
            }
            Err(failure) => {
                if failure != Failure::NotAsked {
                    self.unsure = true;
                    self.late_until = gone_at(now, self.lease);
                }
                self.failed(now, roll);
            }
        }
    }

    /// A `renew` that was begun at `sent` is over at `now`.
    pub fn renewed(
        &mut self,
        sent: Moment,
        now: Moment,
        renewal: Result<Renewal, Failure>,
        roll: f64,
    ) {
        let Some(owned) = &mut self.owned else {
            return;
        };
        if owned.until <= now {
            // Too late, whatever it says: the deadline has passed, and `step` will step down.
            return;
        }
        owned.not_before = now + self.period.shortest_pause();
        match renewal {
            Ok(Renewal::Renewed(grant)) if grant.owner.fence() == owned.fence => {
                let from = grant.until.map_or(sent, |_| now);
                let until = grant.until.unwrap_or(sent + self.lease.belief());
                owned.until = owned.until.max(until);
                let next = self.period.next_renewal(from, owned.until);
                owned.renew_at = next.max(owned.not_before);
                owned.gone_at = owned.gone_at.max(gone_at(now, self.lease));
                self.failures = 0;
                self.suspected = false;
                self.seen = grant.owner;
            }
            Ok(Renewal::Renewed(Grant { owner, .. }) | Renewal::Lost(owner)) => {
                // A late attempt of our own, or a repeated request, raises the fence too: that is no double.
                let since = owner.acquired_at().saturating_sub(self.seen.acquired_at());
                let taken_by_our_id = owner.is_owner(&self.id)
                    && owner.fence() != owned.fence
                    && self.late_until <= now;
                let soon = within_one_call(since, self.lease);
                let double = taken_by_our_id && (self.suspected || !soon);
                self.suspected = taken_by_our_id && !double;
                self.step_down(now, LossReason::TakenAway);
                self.leftover = None;
                if double {
                    self.standing_back = Some(owner.fence());
                    self.next_try = now + self.period.attempt_backoff(1, roll);
                    self.news.push_back(Change::Double(owner));
                } else {
                    self.see(owner);
                }
            }
            Err(Failure::Panicked) => self.step_down(now, LossReason::Panicked),
            Err(_) => {
                self.failures = self.failures.saturating_add(1);
                owned.renew_at = now + self.period.renewal_backoff(self.failures, roll);
            }
        }
    }

    /// A `release` is over.
    pub fn released(&mut self, now: Moment, released: Result<bool, Failure>, roll: f64) {
        let gave_back = self.give_back.take();
        match released {
            Ok(found) => {
                let leftover = self.leftover.take();
                self.suspected &= !found;
                // Not there, and no earlier release of ours took it: a late or repeated acquire of ours may
                // have raised the fence, or a double has it. Whoever leaves looks which; but one that has
                // tried since, and had no answer, adopts what that try may have left.
                let raised = !found && (gave_back.is_some() || self.failures == 0);
                if raised && !self.unsure {
                    self.doubtful = leftover.map(|leftover| leftover.acquired_at);
                }
                self.failures = 0;
            }
            // A give-back that failed is tried again only on leaving: until then the next acquisition
            // finds out, by adopting what is left.
            Err(_) if gave_back.is_some() && !self.is_leaving() => {}
            Err(_) => self.failed(now, roll),
        }
    }

    /// A `withdraw` is over.
    pub fn withdrawn(&mut self, now: Moment, withdrawn: Result<bool, Failure>, roll: f64) {
        match withdrawn {
            Ok(_) => self.entered = false,
            Err(_) => self.failed(now, roll),
        }
    }

    /// A look at the mutex by one that stands back, or that doubts what its release found, is over.
    pub fn observed(&mut self, now: Moment, view: Result<View, Failure>, roll: f64) {
        match view {
            Ok(view) => {
                self.failures = 0;
                let mut doubled = view.owner.is_owner(&self.id);
                if let Some(acquired_at) = self.doubtful.take() {
                    let since = view.owner.acquired_at().saturating_sub(acquired_at);
                    let repeated = within_one_call(since, self.lease);
                    self.unsure |= doubled && repeated;
                    // A double's is not ours to release: its holder believes in it.
                    doubled &= !repeated;
                }
                self.standing_back = doubled.then(|| view.owner.fence());
                self.next_try = if doubled {
                    now + self.period.attempt_backoff(u32::MAX, roll)
                } else {
                    now
                };
                self.see(view.owner);
            }
            Err(_) => self.failed(now, roll),
        }
    }

    /// A call failed: the next one comes after a pause, a short one where somebody leaves and has little time.
    fn failed(&mut self, now: Moment, roll: f64) {
        self.failures = self.failures.saturating_add(1);
        let pause = match self.phase {
            Phase::Contending => self.period.attempt_backoff(self.failures, roll),
            Phase::Leaving { .. } => self.period.renewal_backoff(self.failures, roll),
        };
        self.next_try = now + pause;
    }

    fn granted(&mut self, sent: Moment, now: Moment, grant: Grant) {
        let from = grant.until.map_or(sent, |_| now);
        let until = grant.until.unwrap_or(sent + self.lease.belief());
        let fence = grant.owner.fence();
        let gone_at = gone_at(now, self.lease);
        if until <= now || self.is_leaving() {
            self.leftover = Some(Leftover {
                fence,
                acquired_at: grant.owner.acquired_at(),
                gone_at,
            });
            if !self.is_leaving() {
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
            not_before: now + self.period.shortest_pause(),
            gone_at,
        });
        let before = std::mem::replace(&mut self.seen, grant.owner.clone());
        // Our id left behind by a lost reply is not a previous owner.
        let before = if before.is_owner(&self.id) {
            MutexOwner::NONE
        } else {
            before
        };
        self.news
            .push_back(Change::Acquired(MutexState::new(before, grant.owner)));
    }

    fn step_down(&mut self, now: Moment, reason: LossReason) {
        let Some(owned) = self.owned.take() else {
            return;
        };
        self.leftover = Some(Leftover {
            fence: owned.fence,
            acquired_at: self.seen.acquired_at(),
            gone_at: owned.gone_at,
        });
        self.failures = 0;
        self.next_try = now;
        if let Some(Change::Acquired(state)) = self.news.back() {
            // A pause or a stop came between the grant and its announcement: too late to say that we
            // own, while somebody else may. As if the reply itself had come too late.
            self.seen = state.before().clone();
            self.news.pop_back();
            if !self.is_leaving() {
                self.give_back = Some(owned.fence);
            }
            return;
        }
        self.winding_down = owned.until + self.lease.transition();
        let before = std::mem::replace(&mut self.seen, MutexOwner::NONE);
        let state = MutexState::new(before, MutexOwner::NONE);
        self.news.push_back(Change::Released(state, reason));
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

    /// The way out: release what may be left, leave the queue, all within a short time. What does not
    /// succeed by then is the background's.
    fn leave(&mut self, now: Moment, by: Option<Moment>, then: Then) -> Step {
        let by = by.unwrap_or_else(|| {
            // The first call on the way out does not wait for what went wrong before.
            self.failures = 0;
            now + self.lease.call_budget().min(LEAVING)
        });
        self.phase = Phase::Leaving { by: Some(by), then };
        if by <= now {
            return Step::Over;
        }
        if self.failures > 0 && now < self.next_try && self.has_traces() {
            return Step::Wait {
                until: self.next_try.min(by),
            };
        }
        if let Some(leftover) = &self.leftover {
            // Also where it should be gone by now: a renewal of unknown outcome may have prolonged it.
            let fence = leftover.fence;
            return Step::Release { fence, by };
        }
        if self.doubtful.is_some() {
            return Step::Observe { by };
        }
        if self.unsure {
            // What a timed-out attempt left would block the mutex for a whole lease: adopt it, to be
            // able to release it.
            return Step::Acquire {
                on_refusal: OnRefusal::Leave,
                by,
            };
        }
        if self.entered {
            return Step::Withdraw { by };
        }
        Step::Over
    }
}

/// Whether so many ms after an acquisition of ours a repeated request of ours may have raised the fence.
fn within_one_call(since: u64, lease: Lease) -> bool {
    u128::from(since) <= lease.call_budget().as_millis()
}

/// From a reply at `now` on, the backend keeps the lease for at most this long, drift included.
fn gone_at(now: Moment, lease: Lease) -> Moment {
    now + lease.total() + lease.drift_allowance()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Moment {
        Moment::from_origin(Duration::from_millis(ms))
    }

    fn granted(fence: u64) -> Result<Attempt, Failure> {
        let owner = MutexOwner::new("a", 0, 0, 0, fence);
        Ok(Attempt::Granted(Grant { owner, until: None }))
    }

    fn owner_at(lease: Lease, now: Moment, fence: u64) -> Contention {
        let mut machine = Contention::new(Arc::from("a"), lease, ContendPeriod::new(lease), now);
        machine.acquired(now, now, granted(fence), 0.0);
        assert!(matches!(
            machine.step(now),
            Step::Announce(Change::Acquired(_))
        ));
        machine
    }

    /// Review core 1: a renewal that took longer than `renew_after` was followed by the next at once,
    /// without end.
    #[test]
    fn a_slow_renewal_is_not_followed_by_the_next_at_once() {
        let lease = Lease::default();
        let mut machine = owner_at(lease, at(0), 7);
        let owner = MutexOwner::new("a", 0, 0, 0, 7);
        let renewed = Ok(Renewal::Renewed(Grant { owner, until: None }));
        machine.woken(at(1));
        assert!(matches!(machine.step(at(4_000)), Step::Renew { .. }));
        machine.renewed(at(4_000), at(8_000), renewed, 0.0);
        let Step::Wait { until } = machine.step(at(8_000)) else {
            panic!("it renews again at once");
        };
        assert!(until > at(8_100));
        machine.woken(at(8_001));
        assert!(matches!(machine.step(at(8_001)), Step::Wait { .. }));
    }

    /// A refusal proves that the lease is somebody else's by now: nothing is left to release.
    #[test]
    fn a_refusal_leaves_nothing_to_release() {
        let (lease, late) = (Lease::default(), at(60_000));
        let mut machine = owner_at(lease, at(0), 7);
        let step = machine.step(late);
        assert!(matches!(step, Step::Announce(Change::Released(..))));
        assert!(machine.has_traces());
        let refusal = crate::backend::Refusal {
            owner: MutexOwner::new("b", 0, 0, 0, 8),
            retry_in: Duration::from_secs(1),
            asked: true,
        };
        machine.acquired(late, late, Ok(Attempt::Refused(refusal)), 0.0);
        assert!(!machine.has_traces());
    }

    /// Rule "every claim carries its fence".
    #[test]
    fn a_renewal_with_another_fence_ends_belief() {
        let mut machine = owner_at(Lease::default(), at(0), 7);
        let owner = MutexOwner::new("a", 0, 0, 0, 8);
        let renewed = Ok(Renewal::Renewed(Grant { owner, until: None }));
        machine.renewed(at(10), at(11), renewed, 0.0);
        assert_eq!(machine.belief(), None);
        assert!(!machine.has_traces(), "the lease with fence 7 is gone");
    }

    /// Rule "one id, one contender".
    #[test]
    fn a_double_is_told_and_stood_back_from_until_it_is_gone() {
        let mut machine = owner_at(Lease::default(), at(0), 7);
        let double = MutexOwner::new("a", 3_000, 0, 0, 9);
        machine.renewed(at(10), at(11), Ok(Renewal::Lost(double.clone())), 0.0);
        assert!(matches!(
            machine.step(at(11)),
            Step::Announce(Change::Released(_, LossReason::TakenAway))
        ));
        assert!(matches!(
            machine.step(at(11)),
            Step::Announce(Change::Double(_))
        ));
        let view = |owner| {
            Ok(View {
                owner,
                look_in: Duration::ZERO,
            })
        };
        for second in 1..5 {
            let now = at(second * 10_000);
            assert!(matches!(machine.step(now), Step::Observe { .. }));
            machine.observed(now, view(double.clone()), 0.0);
        }
        assert!(matches!(machine.step(at(90_000)), Step::Observe { .. }));
        machine.observed(at(90_000), view(MutexOwner::NONE), 0.0);
        assert!(matches!(machine.step(at(90_000)), Step::Acquire { .. }));
    }

    /// A late attempt of our own raises the fence as a double would.
    #[test]
    fn our_own_late_attempt_is_no_double() {
        let lease = Lease::default();
        let mut machine = Contention::new(Arc::from("a"), lease, ContendPeriod::new(lease), at(0));
        machine.acquired(at(0), at(10), Err(Failure::Unknown), 0.0);
        machine.acquired(at(100), at(101), granted(7), 0.0);
        machine.step(at(101));
        let late = MutexOwner::new("a", 3_000, 0, 0, 9);
        machine.renewed(at(200), at(201), Ok(Renewal::Lost(late)), 0.0);
        assert_eq!(machine.stands_back_from(), None);
    }

    /// Two processes with one id that began within one call's time of each other took turns for ever: each
    /// took the other for a repeated request of its own.
    #[test]
    fn a_repeated_request_of_our_own_is_no_double_but_the_second_in_a_row_is() {
        let mut machine = owner_at(Lease::default(), at(0), 7);
        let repeated = |fence| Ok(Renewal::Lost(MutexOwner::new("a", 10, 0, 0, fence)));
        machine.renewed(at(200), at(201), repeated(9), 0.0);
        assert_eq!(machine.stands_back_from(), None);
        machine.acquired(at(300), at(301), granted(10), 0.0);
        while matches!(machine.step(at(301)), Step::Announce(_)) {}
        machine.renewed(at(400), at(401), repeated(11), 0.0);
        assert!(machine.stands_back_from().is_some());
    }

    /// What a try without an answer may have left, a lease later, is no double: it is adopted, not stood back from.
    #[test]
    fn whoever_tried_without_an_answer_after_its_lease_adopts_what_that_left() {
        let mut machine = owner_at(Lease::default(), at(0), 7);
        let step = machine.step(at(12_000));
        assert!(matches!(step, Step::Announce(Change::Released(..))));
        machine.acquired(at(12_000), at(12_000), Err(Failure::Unknown), 0.0);
        machine.stop();
        machine.failures = 0;
        assert!(matches!(
            machine.step(at(12_500)),
            Step::Release { fence: 7, .. }
        ));
        machine.released(at(12_500), Ok(false), 0.0);
        let step = machine.step(at(12_600));
        assert!(matches!(step, Step::Acquire { .. }), "{step:?}");
    }

    /// Adopting it, to be able to release it, freed the mutex under a double that believed in it.
    #[test]
    fn whoever_leaves_adopts_its_own_repeated_request_and_leaves_a_double_alone() {
        let cases = [(10, true), (3_000, false)];
        for (lost_reply, (taken_at, ours)) in [false, true]
            .map(|lost| cases.map(|it| (lost, it)))
            .concat()
        {
            let lease = Lease::default();
            let mut machine =
                Contention::new(Arc::from("a"), lease, ContendPeriod::new(lease), at(0));
            if lost_reply {
                machine.acquired(at(0), at(0), Err(Failure::Unknown), 0.0);
            }
            machine.acquired(at(0), at(0), granted(7), 0.0);
            while matches!(machine.step(at(0)), Step::Announce(_)) {}
            machine.stop();
            while matches!(machine.step(at(4_000)), Step::Announce(_)) {}
            machine.released(at(4_000), Ok(false), 0.0);
            assert!(machine.has_traces());
            assert!(matches!(machine.step(at(4_000)), Step::Observe { .. }));
            let view = View {
                owner: MutexOwner::new("a", taken_at, 0, 0, 9),
                look_in: Duration::ZERO,
            };
            machine.observed(at(4_000), Ok(view), 0.0);
            assert_eq!(machine.has_traces(), ours);
            assert_eq!(machine.stands_back_from(), (!ours).then_some(9));
            let step = machine.step(at(4_000));
            assert_eq!(matches!(step, Step::Acquire { .. }), ours, "{step:?}");
        }
    }

    /// Rule "an owner that cannot renew steps down": a backend in trouble is not flooded.
    #[test]
    fn what_failed_is_not_repeated_at_once() {
        let lease = Lease::default();
        let mut machine = Contention::new(Arc::from("a"), lease, ContendPeriod::new(lease), at(0));
        for failures in 1..10 {
            machine.acquired(at(0), at(10), Err(Failure::Unknown), 0.0);
            let Step::Wait { until } = machine.step(at(10)) else {
                panic!("it tries again at once");
            };
            assert!(until >= at(10 + 25 * failures), "{failures}: {until:?}");
        }
        let mut machine = owner_at(lease, at(0), 7);
        machine.renewed(at(4_000), at(4_001), Err(Failure::Unknown), 0.0);
        assert!(matches!(machine.step(at(4_001)), Step::Wait { until } if until > at(4_050)));
    }

    #[test]
    fn what_was_not_asked_leaves_nothing_to_clean_up() {
        let lease = Lease::default();
        let mut machine = Contention::new(Arc::from("a"), lease, ContendPeriod::new(lease), at(0));
        machine.acquired(at(0), at(10), Err(Failure::NotAsked), 0.0);
        assert!(!machine.has_traces());
        machine.stop();
        assert!(matches!(machine.step(at(11)), Step::Over));
        machine.acquired(at(0), at(10), Err(Failure::Unknown), 0.0);
        assert!(machine.has_traces());
    }

    #[test]
    fn whoever_resigns_releases_rests_and_contends_again() {
        let mut machine = owner_at(Lease::default(), at(0), 7);
        machine.resign(Duration::from_secs(5));
        assert!(matches!(
            machine.step(at(10)),
            Step::Announce(Change::Released(_, LossReason::Released))
        ));
        assert!(matches!(
            machine.step(at(10)),
            Step::Release { fence: 7, .. }
        ));
        machine.released(at(20), Ok(true), 0.0);
        assert!(matches!(machine.step(at(20)), Step::Wait { until } if until == at(5_020)));
        assert!(matches!(machine.step(at(5_020)), Step::Acquire { .. }));
    }

    /// A wake-up that was on its way when it resigned ended the rest at once.
    #[test]
    fn whoever_rests_is_not_woken() {
        let mut machine = owner_at(Lease::default(), at(0), 7);
        machine.resign(Duration::from_secs(5));
        while matches!(machine.step(at(10)), Step::Announce(_)) {}
        machine.released(at(20), Ok(true), 0.0);
        assert!(matches!(machine.step(at(20)), Step::Wait { until } if until == at(5_020)));
        machine.woken(at(30));
        let step = machine.step(at(30));
        assert!(
            matches!(step, Step::Wait { until } if until == at(5_020)),
            "{step:?}"
        );
        assert!(matches!(machine.step(at(5_020)), Step::Acquire { .. }));
        // After the rest it is woken as ever.
        let refusal = crate::backend::Refusal {
            owner: MutexOwner::new("b", 0, 0, 0, 8),
            retry_in: Duration::from_secs(10),
            asked: true,
        };
        machine.acquired(at(5_020), at(5_021), Ok(Attempt::Refused(refusal)), 0.0);
        while matches!(machine.step(at(5_021)), Step::Announce(_)) {}
        machine.woken(at(5_100));
        assert!(matches!(machine.step(at(5_100)), Step::Acquire { .. }));
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
            Step::Announce(Change::Released(..))
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
