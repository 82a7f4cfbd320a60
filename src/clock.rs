//! Local time, on the boot-time clock only.
//!
//! Every local deadline in this crate is a [`Moment`]. The boot-time clock goes on while the machine
//! is suspended, so a lease that ran out during a sleep is known to have run out. A step of the wall
//! clock does not change it. No other module may read a clock.

use std::fmt;
use std::ops::{Add, Sub};
use std::time::Duration;

/// A point of local time on the boot-time clock.
///
/// Only comparable inside one boot of one machine: never send one to a backend.
///
/// ```
/// use contend::Moment;
/// use std::time::Duration;
///
/// let start = Moment::now();
/// let deadline = start + Duration::from_secs(10);
/// assert!(start < deadline);
/// assert_eq!(deadline - start, Duration::from_secs(10));
/// assert_eq!(start - deadline, Duration::ZERO); // saturates, never panics
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Moment {
    /// Nanoseconds since an origin that is fixed for this boot.
    nanos: u64,
}

impl Moment {
    /// Later than every deadline.
    pub const FAR: Moment = Moment { nanos: u64::MAX };

    /// Reads the boot-time clock (the monotonic clock where there is none).
    #[must_use]
    pub fn now() -> Moment {
        #[cfg(feature = "unstable")]
        if let Some(time) = crate::virtual_time::current() {
            return time.now();
        }
        Moment {
            nanos: boot_nanos(),
        }
    }

    /// The moment that lies `since_origin` after the clock's origin: for simulated time.
    #[must_use]
    pub fn from_origin(since_origin: Duration) -> Moment {
        Moment {
            nanos: saturating_nanos(since_origin),
        }
    }

    /// Time since the clock's origin.
    #[must_use]
    pub fn since_origin(self) -> Duration {
        Duration::from_nanos(self.nanos)
    }

    /// How long it is from now until this moment; zero once it has passed.
    #[must_use]
    pub fn remaining(self) -> Duration {
        self - Moment::now()
    }
}

impl Add<Duration> for Moment {
    type Output = Moment;

    /// Saturates at [`Moment::FAR`].
    fn add(self, rhs: Duration) -> Moment {
        Moment {
            nanos: self.nanos.saturating_add(saturating_nanos(rhs)),
        }
    }
}

impl Sub<Duration> for Moment {
    type Output = Moment;

    /// Saturates at the clock's origin.
    fn sub(self, rhs: Duration) -> Moment {
        Moment {
            nanos: self.nanos.saturating_sub(saturating_nanos(rhs)),
        }
    }
}

impl Sub for Moment {
    type Output = Duration;

    /// Zero where `rhs` is the later one.
    fn sub(self, rhs: Moment) -> Duration {
        Duration::from_nanos(self.nanos.saturating_sub(rhs.nanos))
    }
}

impl fmt::Debug for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "boot+{:?}", self.since_origin())
    }
}

/// A random number from 0 up to but not including 1.
pub(crate) fn roll() -> f64 {
    #[cfg(feature = "unstable")]
    if let Some(time) = crate::virtual_time::current() {
        return time.roll();
    }
    rand::random()
}

fn saturating_nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(any(target_os = "linux", target_os = "android"))]
fn boot_nanos() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    (time.tv_sec as u64)
        .saturating_mul(1_000_000_000)
        .saturating_add(time.tv_nsec as u64)
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn boot_nanos() -> u64 {
    use std::sync::OnceLock;
    use std::time::Instant;
    static ORIGIN: OnceLock<Instant> = OnceLock::new();
    saturating_nanos(ORIGIN.get_or_init(Instant::now).elapsed())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arithmetic_saturates_instead_of_panicking() {
        let now = Moment::now();
        assert_eq!(now + Duration::MAX, Moment::FAR);
        assert_eq!(now - Duration::MAX, Moment::from_origin(Duration::ZERO));
        assert_eq!(now - Moment::FAR, Duration::ZERO);
    }
}
