//! How long an owner may believe, and how long after that no other contender may own.

use std::fmt;
use std::time::Duration;

use crate::error::{Error, Result};

/// The two durations of every ownership.
///
/// `ttl` is how long an owner may believe that it owns without a renewal. `transition` is the time after
/// it in which no other contender can acquire: the owner winds down its work. The backend keeps the
/// mutex for the sum of both.
///
/// ```
/// use contend::Lease;
/// use std::time::Duration;
///
/// let lease = Lease::new(Duration::from_secs(10), Duration::from_secs(6))?;
/// assert_eq!(lease, Lease::default());
/// assert_eq!(lease.total(), Duration::from_secs(16));
/// assert!(Lease::new(Duration::ZERO, Duration::from_secs(6)).is_err());
/// # Ok::<(), contend::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease {
    ttl: Duration,
    transition: Duration,
}

impl Lease {
    /// The shortest [`belief`](Lease::belief) that leaves room for a renewal and its retries.
    pub const MIN_BELIEF: Duration = Duration::from_millis(20);

    /// The longest sum of ttl and transition: longer than any practical lease, and safe in every
    /// backend's arithmetic.
    pub const MAX_TOTAL: Duration = Duration::from_secs(366 * 24 * 3600);

    /// Creates a lease of `ttl` and `transition`.
    ///
    /// ```
    /// use contend::Lease;
    /// use std::time::Duration;
    ///
    /// let lease = Lease::new(Duration::from_secs(5), Duration::from_secs(1))?;
    /// assert_eq!(lease.to_string(), "5s+1s");
    /// let too_short = Lease::new(Duration::from_millis(5), Duration::ZERO);
    /// assert!(too_short.is_err()); // no renewal could be done in time
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// # Errors
    /// `InvalidInput` for a ttl of zero or too short to be renewed, and for a sum above
    /// [`Lease::MAX_TOTAL`]. Backends count whole milliseconds, so a finer value is refused too.
    pub fn new(ttl: Duration, transition: Duration) -> Result<Lease> {
        let lease = Lease { ttl, transition };
        let total = ttl.checked_add(transition).unwrap_or(Duration::MAX);
        if total > Lease::MAX_TOTAL {
            return Err(Error::invalid(format!(
                "ttl {ttl:?} + transition {transition:?} is too long; the sum may be at most 366 days"
            )));
        }
        let whole = |d: Duration| d.subsec_nanos().is_multiple_of(1_000_000);
        if !whole(ttl) || !whole(transition) {
            return Err(Error::invalid(format!(
                "ttl {ttl:?} and transition {transition:?} must be whole milliseconds"
            )));
        }
        if lease.belief() < Lease::MIN_BELIEF {
            // With 26 ms there is room for the drift, whatever the transition.
            return Err(Error::invalid(format!(
                "ttl {ttl:?} is too short to renew in; use at least 26ms"
            )));
        }
        Ok(lease)
    }

    /// Returns how long an owner may believe that it owns without a renewal.
    #[must_use]
    pub fn ttl(self) -> Duration {
        self.ttl
    }

    /// Returns how long after the ttl no other contender can acquire.
    #[must_use]
    pub fn transition(self) -> Duration {
        self.transition
    }

    /// Returns `ttl + transition`: how long the backend keeps the mutex for its owner.
    ///
    /// ```
    /// use contend::Lease;
    /// use std::time::Duration;
    ///
    /// // So long is a mutex without an owner after a crash.
    /// assert_eq!(Lease::default().total(), Duration::from_secs(16));
    /// ```
    #[must_use]
    pub fn total(self) -> Duration {
        self.ttl + self.transition
    }

    /// Returns how long after *sending* the request that was granted the owner may believe that it owns:
    /// the ttl, less the clock drift that the transition does not absorb.
    ///
    /// ```
    /// use contend::Lease;
    /// use std::time::Duration;
    ///
    /// let ttl = Duration::from_secs(10);
    /// assert_eq!(Lease::new(ttl, Duration::from_secs(6))?.belief(), ttl);
    /// assert!(Lease::new(ttl, Duration::ZERO)?.belief() < ttl); // nothing absorbs the drift
    /// # Ok::<(), contend::Error>(())
    /// ```
    #[must_use]
    pub fn belief(self) -> Duration {
        self.ttl.saturating_sub(self.drift_beyond_transition())
    }

    /// Returns how long one request to the backend may take, from asking for a connection to the reply: a
    /// quarter of the ttl, at most 2 s. The only time limit on requests.
    ///
    /// ```
    /// use contend::Lease;
    /// use std::time::Duration;
    ///
    /// assert_eq!(Lease::default().request_limit(), Duration::from_secs(2));
    /// let short = Lease::new(Duration::from_secs(1), Duration::from_secs(1))?;
    /// assert_eq!(short.request_limit(), Duration::from_millis(250));
    /// # Ok::<(), contend::Error>(())
    /// ```
    #[must_use]
    pub fn request_limit(self) -> Duration {
        (self.ttl / 4).min(Duration::from_secs(2))
    }

    /// A transition absorbs the drift; a short one absorbs only a part.
    fn drift_beyond_transition(self) -> Duration {
        self.drift_allowance().saturating_sub(self.transition)
    }

    /// What two clocks may drift apart in one lease: 1% of it and 5 ms. The only place that knows.
    pub(crate) fn drift_allowance(self) -> Duration {
        self.ttl.saturating_add(self.transition) / 100 + Duration::from_millis(5)
    }
}

impl fmt::Display for Lease {
    /// Writes ttl and transition, such as `10s+6s`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}+{:?}", self.ttl, self.transition)
    }
}

impl Default for Lease {
    /// ttl 10 s, transition 6 s.
    fn default() -> Lease {
        Lease {
            ttl: Duration::from_secs(10),
            transition: Duration::from_secs(6),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn long_transition_absorbs_drift() {
        assert_eq!(Lease::default().belief(), Duration::from_secs(10));
        // 1% of 10 s + 5 ms = 105 ms of drift; without a transition the belief pays for all of it.
        assert_eq!(Lease::new(ms(10_000), ms(0)).unwrap().belief(), ms(9_895));
    }

    #[test]
    fn what_cannot_work_is_refused() {
        for (ttl, transition) in [
            (ms(0), ms(6000)),
            (ms(19), ms(1000)),
            (ms(20), ms(0)),
            (Duration::MAX, ms(1)),
            (ms(1000), Duration::MAX),
            (Duration::from_micros(1_000_500), ms(0)),
        ] {
            let error = Lease::new(ttl, transition).unwrap_err();
            assert_eq!(error.kind(), crate::ErrorKind::InvalidInput, "{ttl:?}");
        }
        assert!(Lease::new(ms(20), ms(100)).is_ok());
    }

    /// The ttl that the message names is accepted, whatever the transition.
    #[test]
    fn advised_ttl_is_allowed() {
        for transition in 0..10 {
            let error = Lease::new(ms(19), ms(transition)).unwrap_err();
            assert!(error.to_string().ends_with("at least 26ms"), "{error}");
            Lease::new(ms(26), ms(transition)).unwrap();
        }
    }
}
