//! `Schedule`: when runs are due. Pure: clocks, the age of the last run and dice are given.
//!
//! [`Plan`] is a schedule at work in one leadership. It is made from the age of the last run, asked how
//! long to wait, and told when a run began and ended.

use std::collections::BTreeSet;
use std::str::FromStr;
use std::time::{Duration, SystemTime};

use jiff::civil::Time;
use jiff::fmt::temporal::DateTimeParser;
use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp, ToSpan};

use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};

/// The longest duration in a schedule: a wait beyond it is a mistake.
const LONGEST: Duration = Duration::from_secs(366 * DAY);

/// The shortest period.
const SHORTEST: Duration = Duration::from_millis(1);

/// Runs of shorter periods are not recorded: the write would cost more than the run that it saves.
const MIN_RECORDED_PERIOD: Duration = Duration::from_secs(1);

/// The tolerance of a period is a tenth of it, at most this.
const MAX_TOLERANCE: Duration = Duration::from_secs(1);

/// The tolerance of a time of day. It covers clocks of two hosts that differ: a run recorded less than this
/// before its time was the run of that time.
const TOLERANCE_OF_DAY: Duration = Duration::from_secs(60);

/// What the boot-time clock is counted from: earlier than any run on record.
const BEFORE_BOOT: Duration = Duration::from_secs(100 * 366 * DAY);

const DAY: u64 = 24 * 3600;

/// The times at which scheduled work runs.
///
/// The times belong to the mutex, not to the process that leads: the last run is kept on the backend, and
/// a new leader continues from there. Runs with a period below one second are not recorded; a new leader
/// then begins after its [`initial_delay`](Schedule::initial_delay).
///
/// ```
/// use contend::{Missed, Schedule, Weekday};
/// use std::time::Duration;
///
/// let minute = Duration::from_secs(60);
/// // Runs begin a minute apart.
/// let poll = Schedule::every(minute);
/// // A minute of rest after each run.
/// let gently = Schedule::with_delay(minute).initial_delay(minute);
/// // Every night; a night that was missed is not made up for in the morning.
/// let nightly = Schedule::daily_at("02:30", "UTC")?.missed(Missed::Skip);
/// let weekly = Schedule::weekly_at([Weekday::Saturday], "04:00", "+01:00")?;
/// # Ok::<(), contend::Error>(())
/// ```
///
/// # How far apart runs are
/// | | two runs are never closer than | the next run begins at the latest |
/// |---|---|---|
/// | [`every`](Schedule::every) | the period, less a tenth of it (at most 1 s) and less the jitter, from beginning to beginning | a period after the last one began, or when a new leader leads, and the jitter |
/// | [`with_delay`](Schedule::with_delay) | the period, from end to beginning | a period after the last one ended, or when a new leader leads, and the jitter |
/// | [`daily_at`](Schedule::daily_at), [`weekly_at`](Schedule::weekly_at) | [`at_least`](Schedule::at_least) | at its time, or when a new leader leads, and the jitter |
///
/// Exceptions:
/// - A run that could not be recorded is unknown to a new leader, which may begin the next one too early. The failure
///   is logged. The same holds if a leader dies in a run with a fixed delay.
/// - If leadership is lost, or the process dies, after a run was recorded and before it began, that run is
///   skipped: the next one begins a period later.
/// - A new leader may begin a run early by the time that the answer to the record took. The record has the server's
///   time of the write, and the work begins after the answer.
/// - [`Missed::Skip`] skips runs.
/// - Clocks of two hosts may differ. A run recorded less than a minute before a time of day counts, for a new
///   leader, as the run of that time, even if it made up for an earlier one.
/// - If the backend does not answer when the last run was, a new leader asks again every second and runs nothing
///   before. If the backend refuses to tell, that counts as "no run yet".
/// - On ZooKeeper the servers remove the node of the mutex, and with it the record, about a minute after the last
///   contender has left. If all processes were stopped for that long, they begin as if there had been no run.
/// - On ZooKeeper the age of a run is measured by the hosts' wall clocks and by the clock of the ZooKeeper leader. The
///   smaller age counts. So one wrong clock makes a new leader's first run late, by at most a period; it is early only
///   if both are wrong.
#[derive(Clone, Debug, PartialEq)]
#[must_use]
pub struct Schedule {
    times: Times,
    initial_delay: Duration,
    jitter: Duration,
    missed: Missed,
    at_least: Duration,
}

#[derive(Clone, Debug, PartialEq)]
enum Times {
    Every(Duration),
    WithDelay(Duration),
    OfDay(TimeOfDay),
}

/// What happens to runs that could not begin in time: no process led, the last run took too long, or the
/// machine was paused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Missed {
    /// One run makes up for all of them, as soon as it can begin.
    #[default]
    Once,
    /// They are skipped, and the next run begins at its scheduled time. A run counts as missed once it is
    /// late by more than a tenth of the period (at most 1 s), or by a minute if it has a time of day.
    Skip,
}

impl Schedule {
    /// Creates a schedule whose runs begin `period` apart, at a fixed rate. A run that is late by more than a
    /// tenth of the period (at most 1 s) shifts the following ones, unless missed runs are skipped.
    ///
    /// ```
    /// use contend::Schedule;
    /// use std::time::Duration;
    ///
    /// let hourly = Schedule::every(Duration::from_secs(3600));
    /// ```
    pub fn every(period: Duration) -> Schedule {
        Schedule::new(Times::Every(period))
    }

    /// Creates a schedule whose runs begin `period` after the last one ended.
    ///
    /// ```
    /// use contend::Schedule;
    /// use std::time::Duration;
    ///
    /// let five_minutes_after_each = Schedule::with_delay(Duration::from_secs(300));
    /// ```
    pub fn with_delay(period: Duration) -> Schedule {
        Schedule::new(Times::WithDelay(period))
    }

    /// Creates a schedule with a run every day at `time`, such as `"02:30"`, in `zone`.
    ///
    /// `zone` is `"UTC"` or an offset such as `"+05:30"`. With the feature `timezones` it may be a name
    /// such as `"Europe/Berlin"`, or `"local"` for the zone of the system; without it, the crate depends
    /// on no time zone data.
    ///
    /// If clocks are set forward past `time`, the run begins later by as much (02:30 becomes 03:30); if they
    /// are set back past it, the run begins the first time and not the second. So there is one run a day.
    /// Times are those of the wall clock of the process that leads.
    ///
    /// ```
    /// use contend::Schedule;
    ///
    /// let nightly = Schedule::daily_at("02:30", "UTC")?;
    /// assert!(Schedule::daily_at("25:00", "UTC").is_err());
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// # Errors
    /// `InvalidInput` for an invalid time or zone, `FeatureDisabled` for a name without the feature
    /// `timezones`.
    pub fn daily_at(time: &str, zone: &str) -> Result<Schedule> {
        Schedule::weekly_at(Weekday::ALL, time, zone)
    }

    /// Creates a schedule with a run on each of `days` at `time` in `zone`; see
    /// [`daily_at`](Schedule::daily_at).
    ///
    /// ```
    /// use contend::{Schedule, Weekday};
    ///
    /// let days = [Weekday::Monday, Weekday::Thursday];
    /// let twice_a_week = Schedule::weekly_at(days, "06:00", "+01:00")?;
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`daily_at`](Schedule::daily_at), and `InvalidInput` if `days` is empty.
    pub fn weekly_at(
        days: impl IntoIterator<Item = Weekday>,
        time: &str,
        zone: &str,
    ) -> Result<Schedule> {
        let time = TimeOfDay::new(days, time, zone)?;
        Ok(Schedule::new(Times::OfDay(time)))
    }

    fn new(times: Times) -> Schedule {
        Schedule {
            times,
            initial_delay: Duration::ZERO,
            jitter: Duration::ZERO,
            missed: Missed::default(),
            at_least: Duration::ZERO,
        }
    }

    /// Sets how long after becoming the leader a process begins the first run, if no run is recorded.
    /// Defaults to zero. With times of day, the first run is at the first such time after the delay.
    ///
    /// ```
    /// use contend::Schedule;
    /// use std::time::Duration;
    ///
    /// let minute = Duration::from_secs(60);
    /// let after_the_start = Schedule::every(60 * minute).initial_delay(minute);
    /// ```
    pub fn initial_delay(mut self, initial_delay: Duration) -> Schedule {
        self.initial_delay = initial_delay;
        self
    }

    /// Sets the maximum random delay of runs: each is delayed by a different time between zero and
    /// `jitter`, so that many schedules do not begin at once. Must be shorter than the period. Defaults
    /// to zero.
    ///
    /// ```
    /// use contend::Schedule;
    /// use std::time::Duration;
    ///
    /// let spread = Schedule::daily_at("00:00", "UTC")?.jitter(Duration::from_secs(600));
    /// # Ok::<(), contend::Error>(())
    /// ```
    pub fn jitter(mut self, jitter: Duration) -> Schedule {
        self.jitter = jitter;
        self
    }

    /// Sets what happens to missed runs. Defaults to [`Missed::Once`]. A fixed delay has no times that
    /// could be missed: its next run begins as soon as it can.
    ///
    /// ```
    /// use contend::{Missed, Schedule};
    ///
    /// let at_night_or_not_at_all = Schedule::daily_at("02:30", "UTC")?.missed(Missed::Skip);
    /// # Ok::<(), contend::Error>(())
    /// ```
    pub fn missed(mut self, missed: Missed) -> Schedule {
        self.missed = missed;
        self
    }

    /// Sets the minimum time between two runs, whatever else is set, counted from the beginning of the
    /// last one (with a fixed delay, from its end). Defaults to zero.
    ///
    /// ```
    /// use contend::Schedule;
    /// use std::time::Duration;
    ///
    /// // A run that makes up for a missed one keeps six hours from the next.
    /// let six_hours = Duration::from_secs(6 * 3600);
    /// let nightly = Schedule::daily_at("02:30", "UTC")?.at_least(six_hours);
    /// # Ok::<(), contend::Error>(())
    /// ```
    pub fn at_least(mut self, at_least: Duration) -> Schedule {
        self.at_least = at_least;
        self
    }

    /// Returns an error that says what is wrong with the schedule, if anything is.
    pub(super) fn check(&self) -> Result<()> {
        let period = self.period();
        let wrong = if period < SHORTEST {
            format!("a period of {period:?} would never rest; at least {SHORTEST:?} is needed")
        } else if period.max(self.initial_delay).max(self.at_least) > LONGEST {
            "period, initial_delay and at_least may be 366 days at most".to_owned()
        } else if self.jitter >= period {
            let jitter = self.jitter;
            format!("a jitter of {jitter:?} must be less than the period of {period:?}")
        } else if self.missed == Missed::Skip && self.counts_from_end() {
            "a fixed delay has no times that could be skipped; leave out Missed::Skip".to_owned()
        } else {
            return Ok(());
        };
        Err(Error::invalid(format!("the schedule: {wrong}")))
    }

    /// Whether runs are recorded: so is the end of a run with a fixed delay, and the beginning of another.
    pub(super) fn is_recorded(&self) -> bool {
        self.period().max(self.at_least) >= MIN_RECORDED_PERIOD
    }

    /// Whether the next run keeps its distance from the end of the last one.
    pub(super) fn counts_from_end(&self) -> bool {
        matches!(self.times, Times::WithDelay(_))
    }

    /// The time between two runs, give or take a change of clocks.
    fn period(&self) -> Duration {
        match &self.times {
            Times::Every(period) | Times::WithDelay(period) => *period,
            Times::OfDay(time) if time.days.len() == 1 => Duration::from_secs(7 * DAY),
            Times::OfDay(_) => Duration::from_secs(DAY),
        }
    }

    /// How late a run may begin without moving the beat, or being missed.
    fn tolerance(&self) -> Duration {
        match &self.times {
            Times::Every(period) | Times::WithDelay(period) => MAX_TOLERANCE.min(*period / 10),
            Times::OfDay(_) => TOLERANCE_OF_DAY,
        }
    }

    /// The clock on which runs are due: a period on the boot-time clock, a time of day on the wall clock.
    fn clock(&self, clocks: Clocks) -> Duration {
        match self.times {
            Times::Every(_) | Times::WithDelay(_) => clocks.boot,
            Times::OfDay(_) => clocks.wall,
        }
    }
}

/// What the clocks say.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clocks {
    /// The boot-time clock, counted from long before the boot: the last run may have been before it.
    pub(super) boot: Duration,
    /// The wall clock, as time since the epoch.
    pub(super) wall: Duration,
}

impl Clocks {
    pub(super) fn read() -> Clocks {
        let wall = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        Clocks {
            boot: BEFORE_BOOT + Moment::now().since_origin(),
            wall: wall.unwrap_or_default(),
        }
    }
}

/// A schedule at work in one leadership.
#[derive(Debug)]
pub(super) struct Plan {
    schedule: Schedule,
    /// When the next run is due, on the schedule's clock.
    due: Duration,
    /// By how much the next run is put off at random.
    delay: Duration,
    /// When the last run is long enough ago, on the boot-time clock.
    apart_at: Duration,
}

impl Plan {
    /// Begins a leadership, `age` after the last run that was recorded.
    pub(super) fn new(schedule: &Schedule, now: Clocks, age: Option<Duration>, dice: f64) -> Plan {
        let (boot, now) = (now.boot, schedule.clock(now));
        let due = match (&schedule.times, age.map(|age| now.saturating_sub(age))) {
            (Times::OfDay(time), Some(last)) => time.after(last + TOLERANCE_OF_DAY),
            (Times::OfDay(time), None) => time.after(now + schedule.initial_delay),
            (_, Some(last)) => last + schedule.period(),
            (_, None) => now + schedule.initial_delay,
        };
        let apart = age.map_or(Duration::ZERO, |age| schedule.at_least.saturating_sub(age));
        Plan {
            due,
            delay: schedule.jitter.mul_f64(dice),
            apart_at: boot + apart,
            schedule: schedule.clone(),
        }
    }

    /// Returns how long to wait for the next run; zero if it is to begin now. Leaves runs out that were
    /// missed, if that is what the schedule asks for.
    pub(super) fn wait(&mut self, clocks: Clocks) -> Duration {
        let schedule = &self.schedule;
        let now = schedule.clock(clocks);
        let not_missed = now.saturating_sub(schedule.tolerance() + schedule.jitter);
        if schedule.missed == Missed::Skip && self.due < not_missed {
            self.due = match &schedule.times {
                Times::OfDay(time) => time.after(not_missed),
                Times::Every(period) | Times::WithDelay(period) => {
                    let behind = (not_missed - self.due).as_nanos();
                    let skipped = behind.next_multiple_of(period.as_nanos());
                    self.due + Duration::from_nanos(u64::try_from(skipped).unwrap_or(u64::MAX))
                }
            };
        }
        let apart = self.apart_at.saturating_sub(clocks.boot);
        (self.due + self.delay).saturating_sub(now).max(apart)
    }

    /// Returns how late the next run is, if it begins now.
    pub(super) fn late(&self, clocks: Clocks) -> Duration {
        let now = self.schedule.clock(clocks);
        now.saturating_sub(self.due + self.delay)
    }

    /// Returns when the next run is due, as time since the epoch.
    pub(super) fn due(&self, clocks: Clocks) -> Duration {
        (clocks.wall + self.due).saturating_sub(self.schedule.clock(clocks))
    }

    /// Goes on to the run after the one that began and ended.
    pub(super) fn ran(&mut self, (began, ended): (Clocks, Clocks), dice: f64) {
        let late = self.late(began);
        let schedule = &self.schedule;
        let keeps_beat = schedule.missed == Missed::Skip || late <= schedule.tolerance();
        let counts_from_end = schedule.counts_from_end();
        let last = if counts_from_end { ended } else { began }.boot;
        self.due = match &schedule.times {
            Times::Every(period) if keeps_beat => self.due + *period,
            Times::Every(period) => self.due + late + *period,
            Times::WithDelay(period) => last + *period,
            Times::OfDay(time) => time.after(self.due.max(began.wall)),
        };
        self.delay = schedule.jitter.mul_f64(dice);
        self.apart_at = last + schedule.at_least;
    }
}

/// A day of the week.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Weekday {
    Monday,
    Tuesday,
    Wednesday,
    Thursday,
    Friday,
    Saturday,
    Sunday,
}

impl Weekday {
    /// All days, beginning with Monday.
    pub const ALL: [Weekday; 7] = {
        use Weekday::*;
        [
            Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday,
        ]
    };
}

impl FromStr for Weekday {
    type Err = Error;

    /// Parses an English name, or its first three letters, in any case.
    fn from_str(text: &str) -> Result<Weekday> {
        let mut days = Weekday::ALL.into_iter();
        let found = days.find(|day| {
            let name = format!("{day:?}");
            name.eq_ignore_ascii_case(text) || name[..3].eq_ignore_ascii_case(text)
        });
        let help = "is not a day of the week; write one such as monday or mon";
        found.ok_or_else(|| Error::invalid(format!("{text:?} {help}")))
    }
}

/// A time of day on some days of the week, in a time zone.
#[derive(Clone, Debug, PartialEq)]
struct TimeOfDay {
    /// Counted from Monday.
    days: BTreeSet<i8>,
    time: Time,
    zone: TimeZone,
}

impl TimeOfDay {
    fn new(days: impl IntoIterator<Item = Weekday>, time: &str, zone: &str) -> Result<TimeOfDay> {
        let days: BTreeSet<i8> = days.into_iter().map(|day| day as i8).collect();
        if days.is_empty() {
            return Err(Error::invalid("a weekly schedule needs a day of the week"));
        }
        let parsed = Time::strptime("%H:%M", time).or_else(|_| Time::strptime("%H:%M:%S", time));
        let help = "is not a time of day; write hours and minutes, such as 02:30 or 14:00:30";
        Ok(TimeOfDay {
            days,
            time: parsed
                .map_err(|error| Error::invalid(format!("{time:?} {help}")).with_source(error))?,
            zone: parse_zone(zone)?,
        })
    }

    /// The first such time after `wall`, both as time since the epoch. In a gap of the clocks it is later by the
    /// gap; where the clocks show it twice, it is the first.
    fn after(&self, wall: Duration) -> Duration {
        let instant = SignedDuration::try_from(wall).and_then(Timestamp::from_duration);
        let instant = instant.unwrap_or(Timestamp::MAX);
        let today = self.zone.to_datetime(instant).date();
        // From yesterday, whose time a gap may move past midnight, to the same day next week and a day more.
        let dates = today.saturating_sub(1.day()).series(1.day()).take(10);
        dates
            .filter(|date| self.days.contains(&date.weekday().to_monday_zero_offset()))
            .filter_map(|date| self.zone.to_timestamp(date.to_datetime(self.time)).ok())
            .filter_map(|instant| Duration::try_from(instant.as_duration()).ok())
            .find(|instant| *instant > wall)
            .unwrap_or(Duration::MAX / 4)
    }
}

fn parse_zone(name: &str) -> Result<TimeZone> {
    let is_offset = name.starts_with(['+', '-']);
    let zone = match name {
        "UTC" | "utc" | "Z" => return Ok(TimeZone::UTC),
        _ if !is_offset && !cfg!(feature = "timezones") => {
            let help = "needs the Cargo feature \"timezones\"; without it, write UTC or an offset such as +05:30";
            let message = format!("the time zone {name:?} {help}");
            return Err(Error::new(ErrorKind::FeatureDisabled, message));
        }
        "local" => TimeZone::try_system(),
        _ => DateTimeParser::new().parse_time_zone(name),
    };
    let help = "write UTC, local, an offset such as +05:30 or a name such as Europe/Berlin";
    zone.map_err(|error| {
        Error::invalid(format!("unknown time zone {name:?}; {help}")).with_source(error)
    })
}

#[cfg(test)]
mod tests;
