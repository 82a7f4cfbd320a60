//! `ContendPeriod`: when to do the next thing.

use std::time::Duration;

use crate::clock::Moment;
use crate::error::{Error, Result};
use crate::lease::Lease;

/// Decides when an owner renews, when a contender tries again, and how both back off after errors.
///
/// An owner renews early, so that several retries fit before its ttl ends. A contender tries when the
/// lease it saw has ended, plus a small jitter. It has neither a clock nor randomness: `roll` is a random
/// number from 0 up to but not including 1.
///
/// ```
/// use contend::{ContendPeriod, Lease};
/// use std::time::Duration;
///
/// let period = ContendPeriod::new(Lease::default()).renew_after(Duration::from_secs(2))?;
/// assert!(period.renew_after(Duration::from_secs(10)).is_err()); // the end of the ttl
/// # Ok::<(), contend::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ContendPeriod {
    lease: Lease,
    renew_after: Duration,
    jitter: Duration,
}

impl ContendPeriod {
    /// Creates the defaults for `lease`. An owner renews after a third of the time that it may believe, which is
    /// the ttl unless the transition is very short. The jitter is a twentieth of the ttl, at most 50 ms.
    #[must_use]
    pub fn new(lease: Lease) -> ContendPeriod {
        ContendPeriod {
            lease,
            renew_after: lease.belief() / 3,
            jitter: (lease.ttl() / 20).min(Duration::from_millis(50)),
        }
    }

    /// Sets how long after a grant the lease is renewed. Defaults to a third of the ttl, or somewhat less if
    /// the transition is very short.
    ///
    /// # Errors
    /// `InvalidInput` if that is shorter than a 64th of the ttl, or so late that no renewal could be done
    /// before the ttl ends.
    pub fn renew_after(mut self, renew_after: Duration) -> Result<ContendPeriod> {
        let soonest = self.shortest_pause();
        let latest = self
            .lease
            .belief()
            .saturating_sub(self.lease.request_limit());
        if renew_after < soonest || renew_after > latest {
            return Err(Error::invalid(format!(
                "renew_after {renew_after:?} does not fit a ttl of {:?}; use {soonest:?} to {latest:?}, so \
                 that the backend is not flooded and one call fits before the ttl ends",
                self.lease.ttl(),
            )));
        }
        self.renew_after = renew_after;
        Ok(self)
    }

    /// Sets the time over which contenders whose wait ended at the same time spread their attempts.
    /// Defaults to a twentieth of the ttl, at most 50 ms.
    ///
    /// # Errors
    /// `InvalidInput` if that is longer than ttl and transition together.
    pub fn jitter(mut self, jitter: Duration) -> Result<ContendPeriod> {
        let longest = self.lease.total();
        if jitter > longest {
            return Err(Error::invalid(format!(
                "jitter {jitter:?} is too long; use at most ttl + transition, {longest:?}"
            )));
        }
        self.jitter = jitter;
        Ok(self)
    }

    /// Returns the shortest time from the end of one renewal to the next, whatever was set.
    #[must_use]
    pub fn shortest_pause(&self) -> Duration {
        (self.lease.ttl() / 64).max(Duration::from_millis(1))
    }

    /// Returns when an owner whose belief lasts from `from` to `until` renews.
    // Its times are of a type that only `unstable` shows.
    #[cfg_attr(not(feature = "unstable"), doc(hidden))]
    #[must_use]
    pub fn next_renewal(&self, from: Moment, until: Moment) -> Moment {
        let share = self.renew_after.as_secs_f64() / self.lease.belief().as_secs_f64();
        from + (until - from).mul_f64(share.clamp(0.0, 1.0))
    }

    /// Returns when a contender that was refused tries again if it is not woken.
    // Its times are of a type that only `unstable` shows.
    #[cfg_attr(not(feature = "unstable"), doc(hidden))]
    #[must_use]
    pub fn next_attempt(&self, now: Moment, retry_in: Duration, roll: f64) -> Moment {
        now + retry_in + self.jitter.mul_f64(roll.clamp(0.0, 1.0))
    }

    /// Returns how long an owner waits after its `failures`-th failed renewal in a row; short compared
    /// with the ttl.
    // What the contention machine asks for; nothing that a user sets.
    #[cfg_attr(not(feature = "unstable"), doc(hidden))]
    #[must_use]
    pub fn renewal_backoff(&self, failures: u32, roll: f64) -> Duration {
        backoff(self.lease.ttl() / 64, self.lease.ttl() / 8, failures, roll)
    }

    /// Returns how long a contender waits after its `failures`-th failed attempt in a row.
    // What the contention machine asks for; nothing that a user sets.
    #[cfg_attr(not(feature = "unstable"), doc(hidden))]
    #[must_use]
    pub fn attempt_backoff(&self, failures: u32, roll: f64) -> Duration {
        let cap = (self.lease.ttl() / 2).clamp(Duration::from_millis(100), Duration::from_secs(5));
        backoff(Duration::from_millis(50), cap, failures, roll)
    }
}

/// Doubles from `base` up to `cap`, and takes between a half and the whole of that.
fn backoff(base: Duration, cap: Duration, failures: u32, roll: f64) -> Duration {
    let doubled = base.saturating_mul(1 << failures.saturating_sub(1).min(20));
    doubled.min(cap).mul_f64(0.5 + roll.clamp(0.0, 1.0) / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owner_renews_at_a_third() {
        let period = ContendPeriod::new(Lease::default());
        let now = Moment::now();
        assert_eq!(
            (period.next_renewal(now, now + Duration::from_secs(10)) - now)
                .as_millis()
                .div_ceil(10),
            334
        );
        let next = period.next_attempt(now, Duration::from_secs(4), 0.5) - now;
        assert_eq!(next, Duration::from_millis(4_025));
    }

    #[test]
    fn extreme_settings_are_refused() {
        let period = ContendPeriod::new(Lease::default());
        let error = period.jitter(Duration::MAX).unwrap_err();
        assert!(
            error.to_string().contains("at most ttl + transition, 16s"),
            "{error}"
        );
        assert!(period.renew_after(Duration::from_millis(7_500)).is_ok());
        for bad in [0, 1, 8_001, 10_000, 11_000] {
            assert!(
                period.renew_after(Duration::from_millis(bad)).is_err(),
                "{bad}"
            );
        }
    }

    #[test]
    fn backoff_grows_to_its_cap() {
        let period = ContendPeriod::new(Lease::default());
        for failures in 1..40 {
            for roll in [0.0, 0.5, 0.999] {
                assert!(period.renewal_backoff(failures, roll) <= Duration::from_millis(1_250));
                assert!(period.attempt_backoff(failures, roll) >= Duration::from_millis(25));
                assert!(period.attempt_backoff(failures, roll) <= Duration::from_secs(5));
            }
        }
    }
}
