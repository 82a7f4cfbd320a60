//! `ScheduleConfig`: when the work runs.

use std::time::Duration;

use crate::clock::Moment;
use crate::error::{Error, Result};

/// When scheduled work runs, counted from the moment at which this process became the leader.
///
/// ```
/// use contend::ScheduleConfig;
/// use std::time::Duration;
///
/// // Every minute, counted from the start of the leadership.
/// let rate = ScheduleConfig::rate(Duration::ZERO, Duration::from_secs(60));
/// // A minute of rest after each run.
/// let delay = ScheduleConfig::delay(Duration::from_secs(5), Duration::from_secs(60));
/// assert_eq!(rate.period(), delay.period());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScheduleConfig {
    initial_delay: Duration,
    period: Duration,
    pace: Pace,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pace {
    Rate,
    Delay,
}

impl ScheduleConfig {
    /// Runs begin `period` apart. A run that could not begin in time, because the last one took too long
    /// or the machine was paused, begins as soon as it can; those missed before it are left out.
    #[must_use]
    pub fn rate(initial_delay: Duration, period: Duration) -> ScheduleConfig {
        ScheduleConfig {
            initial_delay,
            period,
            pace: Pace::Rate,
        }
    }

    /// A run begins `period` after the last one ended.
    #[must_use]
    pub fn delay(initial_delay: Duration, period: Duration) -> ScheduleConfig {
        ScheduleConfig {
            initial_delay,
            period,
            pace: Pace::Delay,
        }
    }

    /// How long after becoming the leader the first run begins.
    #[must_use]
    pub fn initial_delay(&self) -> Duration {
        self.initial_delay
    }

    /// The time between the beginnings of two runs, or between an end and the next beginning.
    #[must_use]
    pub fn period(&self) -> Duration {
        self.period
    }

    pub(super) fn check(&self) -> Result<()> {
        if self.period.is_zero() {
            return Err(Error::invalid(
                "a schedule with a period of zero would never rest; give it a period",
            ));
        }
        Ok(())
    }

    /// The first run of a leadership that began at `start`.
    pub(super) fn first(&self, start: Moment) -> Moment {
        start + self.initial_delay
    }

    /// The run after the one that was due at `due` and ended at `ended`.
    pub(super) fn next(&self, due: Moment, ended: Moment) -> Moment {
        match self.pace {
            Pace::Delay => ended + self.period,
            Pace::Rate => {
                let late = (ended - due).as_nanos();
                // At least one step; beyond that to the last one that has passed.
                let steps = (late / self.period.as_nanos().max(1)).max(1);
                match u32::try_from(steps) {
                    Ok(steps) => due + self.period.saturating_mul(steps),
                    Err(_) => ended,
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn at(ms: u64) -> Moment {
        Moment::from_origin(Duration::from_millis(ms))
    }

    #[test]
    fn a_rate_keeps_its_beat_and_runs_once_for_all_it_missed() {
        let config = ScheduleConfig::rate(ms(5), ms(100));
        assert_eq!(config.first(at(1_000)), at(1_005));
        assert_eq!(config.next(at(1_000), at(1_030)), at(1_100));
        assert_eq!(config.next(at(1_000), at(1_100)), at(1_100));
        // Overrun: the run of 1100 begins late, at 1130, and the beat stays.
        assert_eq!(config.next(at(1_000), at(1_130)), at(1_100));
        assert_eq!(config.next(at(1_100), at(1_160)), at(1_200));
        // Paused for 40 beats: one run, then on with the beat.
        assert_eq!(config.next(at(1_000), at(5_030)), at(5_000));
        assert_eq!(config.next(at(5_000), at(5_040)), at(5_100));
    }

    #[test]
    fn a_delay_rests_after_the_end() {
        let config = ScheduleConfig::delay(ms(0), ms(100));
        assert_eq!(config.next(at(1_000), at(5_030)), at(5_130));
    }

    #[test]
    fn extremes_are_refused_or_harmless() {
        assert!(ScheduleConfig::rate(ms(0), ms(0)).check().is_err());
        let fast = ScheduleConfig::rate(ms(0), Duration::from_nanos(1));
        assert_eq!(fast.next(at(0), at(1_000_000)), at(1_000_000));
        let slow = ScheduleConfig::rate(Duration::MAX, Duration::MAX);
        assert_eq!(slow.first(at(1)), Moment::FAR);
        assert_eq!(slow.next(at(1), at(2)), Moment::FAR);
    }
}
