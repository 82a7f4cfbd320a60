//! `Schedule`: when runs are due. Pure: clocks, the age of the last run and dice are given.
//!
//! [`Plan`] is a schedule at work in one leadership. It is made from the age of the last run, asked how
//! long to wait, and told when a run began and ended.

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

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
/// - If recording a run fails, which is logged, or its leader dies in a run with a fixed delay, a new leader
///   does not know of that run, and may begin the next one too early.
/// - If leadership is lost, or the process dies, after a run was recorded and before it began, that run is
///   skipped: the next one begins a period later. If the process is still alive, that is logged.
/// - A new leader may begin a run early by the time that the answer to the record took: the record has the
///   server's time of the write, and the work begins after the answer.
/// - [`Missed::Skip`] skips runs.
/// - Clocks of two hosts may differ. A run recorded less than a minute before a time of day counts, for a new
///   leader, as the run of that time, even if it made up for an earlier one.
/// - If the backend does not answer when the last run was, a new leader asks again every second and runs nothing
///   before. If the backend refuses to tell, that counts as "no run yet".
/// - On ZooKeeper the record is removed with the node of the mutex, which the servers remove about a minute
///   after the last contender has left: if all processes were stopped for that long, they begin as if there had
///   been no run. The age of a run is measured by the hosts' wall clocks and by the clock of the ZooKeeper
///   leader, and the smaller age counts: one wrong clock makes a new leader's first run late, by at most a
///   period; it is early only if both are wrong.
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
    pub fn every(period: Duration) -> Schedule {
        Schedule::new(Times::Every(period))
    }

    /// Creates a schedule whose runs begin `period` after the last one ended.
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
    /// # Errors
    /// `InvalidInput` for an invalid time or zone, `FeatureDisabled` for a name without the feature
    /// `timezones`.
    pub fn daily_at(time: &str, zone: &str) -> Result<Schedule> {
        Schedule::weekly_at(Weekday::ALL, time, zone)
    }

    /// Creates a schedule with a run on each of `days` at `time` in `zone`; see
    /// [`daily_at`](Schedule::daily_at).
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
    pub fn initial_delay(mut self, initial_delay: Duration) -> Schedule {
        self.initial_delay = initial_delay;
        self
    }

    /// Sets the maximum random delay of runs: each is delayed by a different time between zero and
    /// `jitter`, so that many schedules do not begin at once. Must be shorter than the period. Defaults
    /// to zero.
    pub fn jitter(mut self, jitter: Duration) -> Schedule {
        self.jitter = jitter;
        self
    }

    /// Sets what happens to missed runs. Defaults to [`Missed::Once`]. A fixed delay has no times that
    /// could be missed: its next run begins as soon as it can.
    pub fn missed(mut self, missed: Missed) -> Schedule {
        self.missed = missed;
        self
    }

    /// Sets the minimum time between two runs, whatever else is set, counted from the beginning of the
    /// last one (with a fixed delay, from its end). Defaults to zero.
    pub fn at_least(mut self, at_least: Duration) -> Schedule {
        self.at_least = at_least;
        self
    }

    /// Returns an error that says what is wrong with the schedule, if anything is.
    pub(super) fn check(&self) -> Result<()> {
        let period = self.period();
        if period < SHORTEST {
            return Err(Error::invalid(format!(
                "a schedule with a period of {period:?} would never rest; at least {SHORTEST:?}"
            )));
        }
        for (what, duration) in [
            ("period", period),
            ("initial_delay", self.initial_delay),
            ("at_least", self.at_least),
        ] {
            if duration > LONGEST {
                return Err(Error::invalid(format!(
                    "{what} {duration:?} is too long; at most 366 days"
                )));
            }
        }
        if self.jitter >= period {
            return Err(Error::invalid(format!(
                "jitter {:?} must be less than the period of {period:?}",
                self.jitter
            )));
        }
        if self.missed == Missed::Skip && matches!(self.times, Times::WithDelay(_)) {
            return Err(Error::invalid(
                "a schedule with a fixed delay has no times that could be skipped; leave out \
                 Missed::Skip",
            ));
        }
        Ok(())
    }

    /// When a run is recorded.
    pub(super) fn recorded(&self) -> Recorded {
        match self.times {
            _ if self.period().max(self.at_least) < MIN_RECORDED_PERIOD => Recorded::Never,
            Times::WithDelay(_) => Recorded::AtTheEnd,
            Times::Every(_) | Times::OfDay(_) => Recorded::AtTheBeginning,
        }
    }

    /// The time between two runs, give or take a change of clocks.
    fn period(&self) -> Duration {
        match &self.times {
            Times::Every(period) | Times::WithDelay(period) => *period,
            Times::OfDay(time) => time.period(),
        }
    }

    /// How late a run may begin without moving the beat, or being missed.
    fn tolerance(&self) -> Duration {
        match &self.times {
            Times::Every(period) | Times::WithDelay(period) => MAX_TOLERANCE.min(*period / 10),
            Times::OfDay(_) => TOLERANCE_OF_DAY,
        }
    }

    fn random_delay(&self, dice: f64) -> Duration {
        self.jitter.mul_f64(dice.clamp(0.0, 1.0))
    }
}

impl fmt::Display for Schedule {
    /// The schedule in words, such as "every 5s".
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.times {
            Times::Every(period) => write!(f, "every {period:?}"),
            Times::WithDelay(period) => write!(f, "{period:?} after each run"),
            Times::OfDay(time) => time.fmt(f),
        }
    }
}

/// When a run is recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Recorded {
    Never,
    AtTheBeginning,
    AtTheEnd,
}

/// What the clocks say: the boot-time clock, and the wall clock as time since the epoch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clocks {
    pub(super) local: Moment,
    pub(super) wall: Duration,
}

impl Clocks {
    /// Reads both clocks.
    pub(super) fn read() -> Clocks {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH);
        Clocks {
            local: Moment::now(),
            wall: wall.unwrap_or_default(),
        }
    }
}

/// A schedule at work in one leadership.
#[derive(Debug)]
pub(super) struct Plan {
    schedule: Schedule,
    due: Due,
    /// By how much the next run is put off at random.
    delay: Duration,
    /// When the last run is long enough ago.
    apart_at: Moment,
}

/// When a run is due.
#[derive(Clone, Copy, Debug)]
enum Due {
    Boot(Moment),
    /// Time since the epoch: the wall clock may be set during the wait.
    Wall(Duration),
}

impl Plan {
    /// Begins a leadership, `age` after the last run that was recorded.
    pub(super) fn new(schedule: &Schedule, now: Clocks, age: Option<Duration>, dice: f64) -> Plan {
        let due = match (&schedule.times, age) {
            (Times::Every(_) | Times::WithDelay(_), None) => {
                Due::Boot(now.local + schedule.initial_delay)
            }
            (Times::Every(period) | Times::WithDelay(period), Some(age)) => {
                Due::Boot(schedule.first_after(*period, age, now.local))
            }
            (Times::OfDay(time), None) => Due::Wall(time.after(now.wall + schedule.initial_delay)),
            (Times::OfDay(time), Some(age)) => {
                let last = now.wall.saturating_sub(age) + TOLERANCE_OF_DAY;
                Due::Wall(time.after(last))
            }
        };
        let apart = age.map_or(Duration::ZERO, |age| schedule.at_least.saturating_sub(age));
        Plan {
            due,
            delay: schedule.random_delay(dice),
            apart_at: now.local + apart,
            schedule: schedule.clone(),
        }
    }

    /// Returns how long to wait for the next run; zero if it is to begin now. Leaves runs out that were
    /// missed, if that is what the schedule asks for.
    pub(super) fn wait(&mut self, now: Clocks) -> Duration {
        if self.schedule.missed == Missed::Skip {
            self.skip(now);
        }
        let wait = match self.due {
            Due::Boot(due) => due + self.delay - now.local,
            Due::Wall(due) => (due + self.delay).saturating_sub(now.wall),
        };
        wait.max(self.apart_at - now.local)
    }

    /// Goes on to the first run that is not missed.
    fn skip(&mut self, now: Clocks) {
        let grace = self.schedule.tolerance() + self.schedule.jitter;
        self.due = match (&self.schedule.times, self.due) {
            (Times::OfDay(time), Due::Wall(due)) if due + grace < now.wall => {
                Due::Wall(time.after(now.wall.saturating_sub(grace)))
            }
            (Times::Every(period), Due::Boot(due)) if due + grace < now.local => {
                Due::Boot(beat(now.local, now.local - due, *period, grace))
            }
            (_, due) => due,
        };
    }

    /// Returns how late the next run is, if it begins now.
    pub(super) fn late(&self, now: Clocks) -> Duration {
        match self.due {
            Due::Boot(due) => now.local - (due + self.delay),
            Due::Wall(due) => now.wall.saturating_sub(due + self.delay),
        }
    }

    /// Returns when the next run is due, as time since the epoch.
    pub(super) fn due(&self, now: Clocks) -> Duration {
        match self.due {
            Due::Boot(due) => now.wall.saturating_sub(now.local - due) + (due - now.local),
            Due::Wall(due) => due,
        }
    }

    /// Goes on to the run after the one that began and ended.
    pub(super) fn ran(&mut self, begun: Clocks, ended: Clocks, dice: f64) {
        let late = self.late(begun);
        let schedule = &self.schedule;
        self.due = match (&schedule.times, self.due) {
            (Times::Every(period), Due::Boot(due)) => {
                let keeps_beat = schedule.missed == Missed::Skip || late <= schedule.tolerance();
                Due::Boot(if keeps_beat { due } else { due + late } + *period)
            }
            (Times::OfDay(time), Due::Wall(due)) => Due::Wall(time.after(due.max(begun.wall))),
            // A fixed delay; the clock of a due time fits its schedule.
            _ => Due::Boot(ended.local + schedule.period()),
        };
        self.delay = schedule.random_delay(dice);
        let last = match schedule.times {
            Times::WithDelay(_) => ended.local,
            Times::Every(_) | Times::OfDay(_) => begun.local,
        };
        self.apart_at = last + schedule.at_least;
    }
}

impl Schedule {
    /// The first run of a leader at `now`, the last one having been recorded `age` ago. Does not count
    /// back by the age: the machine may have been started after the last run.
    fn first_after(&self, period: Duration, age: Duration, now: Moment) -> Moment {
        match self.missed {
            _ if age < period => now + (period - age),
            Missed::Once => now - (age - period),
            Missed::Skip => beat(now, age, period, self.tolerance() + self.jitter),
        }
    }
}

/// The first beat after one that was `past` ago, by whole periods, that is not missed at `now`.
fn beat(now: Moment, past: Duration, period: Duration, grace: Duration) -> Moment {
    let since_beat = past.as_nanos() % period.as_nanos().max(1);
    let since_beat = Duration::from_nanos(u64::try_from(since_beat).unwrap_or(u64::MAX));
    if since_beat <= grace {
        now - since_beat
    } else {
        now + (period - since_beat)
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
    pub const ALL: [Weekday; 7] = [
        Weekday::Monday,
        Weekday::Tuesday,
        Weekday::Wednesday,
        Weekday::Thursday,
        Weekday::Friday,
        Weekday::Saturday,
        Weekday::Sunday,
    ];
}

impl FromStr for Weekday {
    type Err = Error;

    /// Parses an English name, or its first three letters, in any case.
    fn from_str(text: &str) -> Result<Weekday> {
        let days = Weekday::ALL.into_iter();
        let mut days = days.filter(|day| {
            let name = format!("{day:?}");
            text.eq_ignore_ascii_case(&name) || text.eq_ignore_ascii_case(&name[..3])
        });
        days.next().ok_or_else(|| {
            Error::invalid(format!(
                "{text:?} is not a day of the week; write one such as monday or mon"
            ))
        })
    }
}

/// A time of day on some days of the week, in a time zone.
#[derive(Clone, Debug, PartialEq)]
struct TimeOfDay {
    days: Vec<Weekday>,
    time: Time,
    zone: TimeZone,
    /// The zone as it was given.
    zone_name: String,
}

impl TimeOfDay {
    fn new(days: impl IntoIterator<Item = Weekday>, time: &str, zone: &str) -> Result<TimeOfDay> {
        let mut days: Vec<Weekday> = days.into_iter().collect();
        days.sort_by_key(|day| *day as i8);
        days.dedup();
        if days.is_empty() {
            return Err(Error::invalid("a weekly schedule needs a day of the week"));
        }
        let parsed = Time::strptime("%H:%M", time).or_else(|_| Time::strptime("%H:%M:%S", time));
        Ok(TimeOfDay {
            days,
            time: parsed.map_err(|error| {
                Error::invalid(format!(
                    "{time:?} is not a time of day; write hours and minutes, such as 02:30 or 14:00:30"
                ))
                .with_source(error)
            })?,
            zone: parse_zone(zone)?,
            zone_name: zone.to_owned(),
        })
    }

    fn period(&self) -> Duration {
        let days = if self.days.len() > 1 { 1 } else { 7 };
        Duration::from_secs(days * DAY)
    }

    /// The first such time after `wall`, both as time since the epoch. In a gap of the clocks it is later by the
    /// gap; where the clocks show it twice, it is the first.
    fn after(&self, wall: Duration) -> Duration {
        let instant = SignedDuration::try_from(wall).map(Timestamp::from_duration);
        let instant = instant.map_or(Timestamp::MAX, |instant| instant.unwrap_or(Timestamp::MAX));
        let today = self.zone.to_datetime(instant).date();
        // From yesterday, whose time a gap may move past midnight, to the same day next week and a day more.
        (-1..=8)
            .filter_map(|days| today.checked_add(days.days()).ok())
            .filter(|date| {
                let weekday = date.weekday().to_monday_zero_offset();
                self.days.iter().any(|day| *day as i8 == weekday)
            })
            .filter_map(|date| self.zone.to_timestamp(date.to_datetime(self.time)).ok())
            .filter_map(|instant| Duration::try_from(instant.as_duration()).ok())
            .find(|instant| *instant > wall)
            .unwrap_or(Duration::MAX / 4)
    }
}

impl fmt::Display for TimeOfDay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let days: Vec<String> = self.days.iter().map(|day| format!("{day:?}")).collect();
        let days = match days.len() {
            7 => "daily".to_owned(),
            _ => days.join(", "),
        };
        write!(f, "{days} at {} {}", self.time, self.zone_name)
    }
}

fn parse_zone(name: &str) -> Result<TimeZone> {
    let zone = match name {
        "UTC" | "utc" | "Z" => return Ok(TimeZone::UTC),
        "local" => TimeZone::try_system(),
        _ => DateTimeParser::new().parse_time_zone(name),
    };
    let has_names = cfg!(feature = "timezones");
    match zone {
        Ok(zone) if has_names || name.starts_with(['+', '-']) => Ok(zone),
        Err(error) if has_names || name.starts_with(['+', '-']) => Err(Error::invalid(format!(
            "unknown time zone {name:?}; write UTC, local, an offset such as +05:30 or a name such as \
             Europe/Berlin"
        ))
        .with_source(error)),
        _ => Err(Error::new(
            ErrorKind::FeatureDisabled,
            format!(
                "the time zone {name:?} needs the Cargo feature \"timezones\"; without it, write UTC or an \
                 offset such as +05:30"
            ),
        )),
    }
}

#[cfg(test)]
mod tests;
