//! The observer's machine: when to look, and what to tell. Pure, as `contention.rs`.

use crate::backend::Sight;
use crate::clock::Moment;
use crate::lease::Lease;
use crate::owner::MutexOwner;
use crate::period::ContendPeriod;
use crate::state::MutexState;

/// What an observer does next.
#[derive(Clone, Debug)]
pub enum Look {
    /// Tell the listeners.
    Announce(MutexState),
    /// Call `observe` and report through [`Observation::observed`].
    Observe {
        /// When the call must have returned.
        by: Moment,
    },
    /// Sleep until then, unless somebody rings.
    Wait {
        /// When to ask for the next step.
        until: Moment,
    },
}

/// One observer of one mutex.
#[derive(Debug)]
pub struct Observation {
    lease: Lease,
    period: ContendPeriod,
    seen: MutexOwner,
    news: Option<MutexState>,
    next_look: Moment,
    failures: u32,
}

impl Observation {
    /// An observer that looks at `start` for the first time.
    #[must_use]
    pub fn new(lease: Lease, start: Moment) -> Observation {
        Observation {
            lease,
            period: ContendPeriod::new(lease),
            seen: MutexOwner::NONE,
            news: None,
            next_look: start,
            failures: 0,
        }
    }

    /// The owner as last seen.
    #[must_use]
    pub fn seen(&self) -> &MutexOwner {
        &self.seen
    }

    /// What to do at `now`.
    pub fn step(&mut self, now: Moment) -> Look {
        if let Some(state) = self.news.take() {
            Look::Announce(state)
        } else if self.next_look <= now {
            Look::Observe {
                by: now + self.lease.call_budget(),
            }
        } else {
            Look::Wait {
                until: self.next_look,
            }
        }
    }

    /// The backend rang: look again.
    pub fn woken(&mut self, now: Moment) {
        self.next_look = self.next_look.min(now);
    }

    /// An `observe` is over at `now`. `None`: it failed.
    pub fn observed(&mut self, now: Moment, sight: Option<Sight>, roll: f64) {
        match sight {
            Some(sight) => {
                self.failures = 0;
                self.next_look = self.period.next_attempt(now, sight.again_in, roll);
                let before = std::mem::replace(&mut self.seen, sight.owner);
                let changed = before.owner_id() != self.seen.owner_id()
                    || (self.seen.fence() != 0 && before.fence() != self.seen.fence());
                if changed {
                    self.news = Some(MutexState::new(before, self.seen.clone()));
                }
            }
            None => {
                self.failures = self.failures.saturating_add(1);
                self.next_look = now + self.period.attempt_backoff(self.failures, roll);
            }
        }
    }
}
