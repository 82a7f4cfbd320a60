//! Clocks that run at a rate of their own over the one true time of a schedule.

use std::time::Duration;

use contend::Moment;

/// Nanoseconds of true time since the schedule began.
pub type True = u64;

pub const MS: u64 = 1_000_000;

/// Shows `offset` at the true time `from`, and goes on at its rate, in whole nanoseconds.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    pub offset: u64,
    /// Nanoseconds shown per million true ones.
    pub rate: u64,
    pub from: True,
}

impl Clock {
    pub fn shows(self, now: True) -> u64 {
        let passed = u128::from(now - self.from) * u128::from(self.rate) / 1_000_000;
        self.offset + passed as u64
    }

    /// The first true time at which this clock shows `reading` or more.
    pub fn reaches(self, reading: u64) -> True {
        let shown = reading.saturating_sub(self.offset);
        // `Moment::FAR` saturates to some hours, which no schedule lasts.
        self.from + shown.saturating_mul(1_000_000).div_ceil(self.rate)
    }

    pub fn moment(self, now: True) -> Moment {
        Moment::from_origin(Duration::from_nanos(self.shows(now)))
    }

    pub fn reaches_moment(self, moment: Moment) -> True {
        self.reaches(moment.since_origin().as_nanos() as u64)
    }
}

pub fn nanos(duration: Duration) -> u64 {
    duration.as_nanos() as u64
}

pub fn millis(duration: Duration) -> u64 {
    duration.as_millis() as u64
}
