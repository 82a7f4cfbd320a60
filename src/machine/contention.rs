//! What a contender does next, and what it may believe. Pure: time, outcomes and dice come in as arguments.
//!
//! ```text
//!           ┌── granted ────────────────────────────────────┐
//!           │                                               ▼
//!        waiting                                          owning
//!  tries when woken, or when              renews after a third of the ttl
//!  the lease that it saw ends                               │
//!           ▲                                               │
//!           └── deadline, taken away, given up, panic ──────┘
//! ```

use std::sync::Arc;

use crate::backend::{Attempt, Grant, OnRefusal, Renewal};
use crate::clock::Moment;
use crate::lease::Lease;
use crate::machine::period::ContendPeriod;
use crate::owner::{MutexOwner, MutexState};
use crate::probe::LossReason;

/// What to do next.
#[derive(Clone, Copy, Debug)]
pub enum Step {
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
    /// Belief has ended: call [`Contention::step_down`].
    StepDown,
    /// Sleep until then, unless woken.
    Wait {
        /// When to ask for the next step.
        until: Moment,
    },
}

/// A change of ownership, to be announced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// This contender became the owner.
    Acquired(MutexState),
    /// This contender ceased to be the owner.
    Released(MutexState, LossReason),
    /// Another owner was seen, or that there is none.
    OwnerChanged(MutexState),
}

/// Why a call has no outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// Nothing was sent, so nothing happened.
    NotSent,
    /// It may have happened, or may still happen.
    Unknown,
    /// The backend panicked: what it said before is not believed any more.
    Panicked,
}

/// What the backend may keep for this contender, whatever it believes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Residue {
    /// The fence of the last grant, until it is released or seen to be gone.
    pub fence: Option<u64>,
    /// An attempt had no answer: there may be a lease whose fence is not known.
    pub unsure: bool,
    /// There may be an entry in the queue.
    pub queued: bool,
}

/// One contender's part in the contention for one mutex.
#[derive(Debug)]
pub struct Contention {
    id: Arc<str>,
    lease: Lease,
    period: ContendPeriod,
    belief: Option<Belief>,
    residue: Residue,
    /// When the backend has surely let go of the last lease that it acknowledged.
    lease_end: Moment,
    seen: MutexOwner,
    on_refusal: OnRefusal,
    next_try: Moment,
    /// No wake-up leads to an attempt before this.
    rest_until: Moment,
    failures: u32,
}

#[derive(Debug)]
struct Belief {
    fence: u64,
    until: Moment,
    renew_at: Moment,
    /// No renewal before this, also if woken: one call never follows another at once.
    not_before: Moment,
}

impl Contention {
    /// Creates a contender that tries at `start` for the first time, and queues.
    pub fn new(id: Arc<str>, lease: Lease, period: ContendPeriod, start: Moment) -> Contention {
        Contention {
            id,
            lease,
            period,
            belief: None,
            residue: Residue::default(),
            lease_end: start,
            seen: MutexOwner::NONE,
            on_refusal: OnRefusal::Enqueue,
            next_try: start,
            rest_until: start,
            failures: 0,
        }
    }

    /// Tries at `at`, and not before if woken. What is left from before is adopted.
    pub fn contend_at(&mut self, at: Moment, first: OnRefusal) {
        self.on_refusal = first;
        self.next_try = at;
        self.rest_until = at;
        self.failures = 0;
    }

    /// The end of belief, which may have passed, and the fence.
    pub fn belief(&self) -> Option<(Moment, u64)> {
        self.belief
            .as_ref()
            .map(|belief| (belief.until, belief.fence))
    }

    /// The last owner seen, this contender included.
    pub fn seen(&self) -> &MutexOwner {
        &self.seen
    }

    /// What the backend may keep.
    pub fn residue(&mut self) -> &mut Residue {
        &mut self.residue
    }

    /// When the backend has surely let go of the last lease that it acknowledged.
    pub fn lease_end(&self) -> Moment {
        self.lease_end
    }

    /// What to do at `now`.
    pub fn step(&self, now: Moment) -> Step {
        let by = now + self.lease.request_limit();
        match &self.belief {
            Some(belief) if belief.until <= now => Step::StepDown,
            Some(belief) if belief.renew_at <= now => Step::Renew {
                fence: belief.fence,
                // A call that outlasts belief would keep its thread from stepping down in time.
                by: by.min(belief.until),
            },
            Some(belief) => Step::Wait {
                until: belief.renew_at.min(belief.until),
            },
            None if now < self.next_try => Step::Wait {
                until: self.next_try,
            },
            None => Step::Acquire {
                on_refusal: self.on_refusal,
                by,
            },
        }
    }

    /// The backend woke this contender: a waiter tries, an owner checks. Returns `true` if that brings its next attempt
    /// forward.
    pub fn woken(&mut self, now: Moment) -> bool {
        if let Some(belief) = &mut self.belief {
            belief.renew_at = belief.renew_at.min(now.max(belief.not_before));
            return false;
        }
        let before = self.next_try;
        self.next_try = before.min(now.max(self.rest_until));
        self.next_try < before
    }

    /// An `acquire` that was sent at `sent` ended at `now`.
    pub fn acquired(
        &mut self,
        sent: Moment,
        now: Moment,
        outcome: Result<Attempt, Failure>,
        roll: f64,
    ) -> Option<Change> {
        let on_refusal = std::mem::replace(&mut self.on_refusal, OnRefusal::Enqueue);
        let is_sent = !matches!(outcome, Err(Failure::NotSent));
        self.residue.queued |= is_sent && on_refusal == OnRefusal::Enqueue;
        match outcome {
            Ok(Attempt::Granted(grant)) => self.granted(sent, now, grant),
            Ok(Attempt::Refused(refusal)) => {
                // The backend keeps nothing for this contender, or it would have been adopted.
                self.residue.fence = None;
                self.residue.unsure = false;
                self.failures = 0;
                self.next_try = match on_refusal {
                    OnRefusal::Enqueue => self.period.next_attempt(now, refusal.retry_in, roll),
                    OnRefusal::Leave => now,
                };
                self.see(refusal.owner)
            }
            Err(failure) => {
                self.residue.unsure |= failure != Failure::NotSent;
                self.failures = self.failures.saturating_add(1);
                self.next_try = now + self.period.attempt_backoff(self.failures, roll);
                None
            }
        }
    }

    fn granted(&mut self, sent: Moment, now: Moment, grant: Grant) -> Option<Change> {
        let from = grant.until.map_or(sent, |_| now);
        let until = grant.until.unwrap_or(sent + self.lease.belief());
        let fence = grant.owner.fence();
        self.residue.fence = Some(fence);
        self.residue.unsure = false;
        self.lease_end = self.end_of_lease(now);
        self.next_try = now;
        if until <= now {
            // Too late to be believed. The next attempt adopts it, or leaving releases it.
            self.failures = self.failures.saturating_add(1);
            return None;
        }
        self.failures = 0;
        self.belief = Some(Belief {
            fence,
            until,
            renew_at: self.period.next_renewal(from, until),
            not_before: now + self.period.shortest_pause(),
        });
        let before = std::mem::replace(&mut self.seen, grant.owner.clone());
        let before = Some(before).filter(|before| !before.is_owner(&self.id));
        let state = MutexState::new(before.unwrap_or_default(), grant.owner);
        Some(Change::Acquired(state))
    }

    /// A `renew` that was sent at `sent` ended at `now`.
    pub fn renewed(
        &mut self,
        sent: Moment,
        now: Moment,
        outcome: Result<Renewal, Failure>,
        roll: f64,
    ) -> Option<Change> {
        let lease_end = self.end_of_lease(now);
        // An answer that comes after the deadline changes nothing: `step` says StepDown.
        let belief = self.belief.as_mut().filter(|belief| now < belief.until)?;
        belief.not_before = now + self.period.shortest_pause();
        match outcome {
            Ok(Renewal::Renewed(grant)) if grant.owner.fence() == belief.fence => {
                let from = grant.until.map_or(sent, |_| now);
                let until = grant.until.unwrap_or(sent + self.lease.belief());
                belief.until = belief.until.max(until);
                let next = self.period.next_renewal(from, belief.until);
                belief.renew_at = next.max(belief.not_before);
                self.lease_end = lease_end;
                self.failures = 0;
                self.seen = grant.owner;
                None
            }
            Ok(Renewal::Renewed(_) | Renewal::Lost(_)) => {
                self.residue.fence = None;
                self.step_down(now, LossReason::TakenAway)
            }
            Err(Failure::Panicked) => self.step_down(now, LossReason::Panicked),
            Err(_) => {
                self.failures = self.failures.saturating_add(1);
                belief.renew_at = now + self.period.renewal_backoff(self.failures, roll);
                None
            }
        }
    }

    /// Ends belief. The lease stays, to be released or adopted.
    pub fn step_down(&mut self, now: Moment, reason: LossReason) -> Option<Change> {
        self.belief.take()?;
        self.failures = 0;
        self.next_try = now;
        let before = std::mem::take(&mut self.seen);
        let state = MutexState::new(before, MutexOwner::NONE);
        Some(Change::Released(state, reason))
    }

    /// Remembers an owner that was seen. Another contender's ownership is news.
    fn see(&mut self, owner: MutexOwner) -> Option<Change> {
        if owner.is_owner(&self.id) {
            return None;
        }
        let before = std::mem::replace(&mut self.seen, owner.clone());
        let changed = before.owner_id() != owner.owner_id();
        changed.then(|| Change::OwnerChanged(MutexState::new(before, owner)))
    }

    fn end_of_lease(&self, now: Moment) -> Moment {
        now + self.lease.total() + self.lease.drift_allowance()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn renewal_with_another_fence_ends_belief() {
        let lease = Lease::new(Duration::from_secs(10), Duration::from_secs(6)).unwrap();
        let now = Moment::now();
        let mut machine = Contention::new("a".into(), lease, ContendPeriod::new(lease), now);
        let grant = |fence| Grant {
            owner: MutexOwner::new("a", 0, 10_000, 16_000, fence),
            until: None,
        };
        machine.acquired(now, now, Ok(Attempt::Granted(grant(1))), 0.0);
        assert_eq!(machine.belief(), Some((now + lease.belief(), 1)));
        let change = machine.renewed(now, now, Ok(Renewal::Renewed(grant(2))), 0.0);
        assert!(
            matches!(change, Some(Change::Released(_, LossReason::TakenAway))),
            "{change:?}"
        );
        assert_eq!(machine.belief(), None);
    }
}
