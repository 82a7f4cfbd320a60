//! The observer's machine: when to look, and what to tell. Pure, as `contention.rs`.

use crate::backend::View;
use crate::clock::Moment;
use crate::lease::Lease;
use crate::machine::period::ContendPeriod;
use crate::owner::{MutexOwner, MutexState};

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
    /// Sleep until then, unless woken.
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
    /// `None` until the first look.
    seen: Option<MutexOwner>,
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
            seen: None,
            news: None,
            next_look: start,
            failures: 0,
        }
    }

    /// The owner as last seen.
    #[must_use]
    pub fn seen(&self) -> Option<&MutexOwner> {
        self.seen.as_ref()
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
    pub fn observed(&mut self, now: Moment, view: Option<View>, roll: f64) {
        match view {
            Some(view) => {
                self.failures = 0;
                self.next_look = self.period.next_attempt(now, view.look_in, roll);
                // What the first look sees is news too: that it is free, or that it is not.
                let changed = self.seen.as_ref().is_none_or(|before| {
                    before.owner_id() != view.owner.owner_id()
                        || (view.owner.fence() != 0 && before.fence() != view.owner.fence())
                });
                let before = self.seen.replace(view.owner.clone()).unwrap_or_default();
                if changed {
                    self.news = Some(MutexState::new(before, view.owner));
                }
            }
            None => {
                self.failures = self.failures.saturating_add(1);
                self.next_look = now + self.period.attempt_backoff(self.failures, roll);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn another_owner_and_a_new_term_are_news_and_a_renewal_is_not() {
        let start = Moment::from_origin(Duration::ZERO);
        let mut observation = Observation::new(Lease::default(), start);
        let mut look = |owner| {
            let look_in = Duration::from_secs(1);
            observation.observed(start, Some(View { owner, look_in }), 0.0);
            matches!(observation.step(start), Look::Announce(_))
        };
        let owner = |id, ttl_at, fence| MutexOwner::new(id, 0, ttl_at, ttl_at, fence);
        assert!(look(MutexOwner::NONE), "the first look");
        assert!(!look(MutexOwner::NONE));
        assert!(look(owner("a", 10, 7)));
        assert!(!look(owner("a", 20, 7)), "a renewal");
        assert!(look(owner("a", 30, 8)), "a new term");
        assert!(look(owner("b", 40, 9)));
        assert!(look(MutexOwner::NONE));
    }
}
