//! When runs are due: by example, over changes of clocks, and over many thousand random histories.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::*;

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

const fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

fn at(ms: u64) -> Clocks {
    Clocks {
        boot: BEFORE_BOOT + Duration::from_millis(ms),
        wall: Duration::from_millis(ms),
    }
}

fn plan(schedule: &Schedule, now_ms: u64, age: Option<Duration>) -> Plan {
    schedule.check().unwrap();
    Plan::new(schedule, at(now_ms), age, 0.0)
}

#[test]
fn unrecorded_schedule_begins_after_initial_delay() {
    for schedule in [Schedule::every(secs(10)), Schedule::with_delay(secs(10))] {
        let mut first = plan(&schedule.initial_delay(secs(3)), 50_000, None);
        assert_eq!(first.wait(at(50_000)), secs(3));
        assert_eq!(first.wait(at(52_000)), secs(1));
        assert_eq!(first.late(at(53_250)), ms(250));
        assert_eq!(first.due(at(53_250)), secs(53));
        assert_eq!(first.due(at(52_000)), secs(53));
    }
}

/// Period less age. The age may be more than the machine has been up.
#[test]
fn new_leader_goes_on() {
    for schedule in [Schedule::every(secs(10)), Schedule::with_delay(secs(10))] {
        let schedule = schedule.initial_delay(secs(3));
        assert_eq!(
            plan(&schedule, 5_000, Some(secs(4))).wait(at(5_000)),
            secs(6)
        );
        assert_eq!(
            plan(&schedule, 5_000, Some(ms(0))).wait(at(5_000)),
            secs(10)
        );
        assert_eq!(
            plan(&schedule, 5_000, Some(secs(99))).wait(at(5_000)),
            ms(0)
        );
        assert_eq!(
            plan(&schedule, 5_000, Some(secs(10))).wait(at(5_000)),
            ms(0)
        );
    }
}

#[test]
fn late_run_moves_the_beat() {
    let mut plan = plan(&Schedule::every(secs(1)), 1_000, None);
    assert_eq!(plan.wait(at(1_000)), ms(0));
    plan.ran((at(1_000), at(1_300)), 0.0);
    assert_eq!(plan.wait(at(1_300)), ms(700));
    // A tenth late: the beat stays.
    plan.ran((at(2_100), at(2_100)), 0.0);
    assert_eq!(plan.wait(at(2_100)), ms(900));
    // Overrun: the next one begins at once, and the following ones keep their distance from it.
    plan.ran((at(3_000), at(4_400)), 0.0);
    assert_eq!(plan.wait(at(4_400)), ms(0));
    assert_eq!(plan.late(at(4_400)), ms(400));
    plan.ran((at(4_400), at(4_500)), 0.0);
    assert_eq!(plan.wait(at(4_500)), ms(900));
    // One run for forty that were missed.
    plan.ran((at(45_400), at(45_500)), 0.0);
    assert_eq!(plan.wait(at(45_500)), ms(900));
}

#[test]
fn skipped_runs_keep_the_beat() {
    let schedule = Schedule::every(secs(100)).missed(Missed::Skip);
    // A new leader, 2.3 periods after the last run.
    assert_eq!(
        plan(&schedule, 5_000, Some(secs(230))).wait(at(5_000)),
        secs(70)
    );
    // Just in time counts.
    let mut late = plan(&schedule, 5_000, Some(ms(200_900)));
    assert_eq!(late.wait(at(5_000)), ms(0));
    late.ran((at(5_000), at(6_000)), 0.0);
    assert_eq!(late.wait(at(6_000)), ms(98_100));
    // Suspended while it waits.
    assert_eq!(late.wait(at(259_100)), ms(45_000));
    assert_eq!(late.late(at(304_100)), ms(0));
    // A run that takes too long.
    late.ran((at(304_100), at(520_000)), 0.0);
    assert_eq!(late.wait(at(520_000)), ms(84_100));
}

#[test]
fn delay_counts_from_the_end() {
    let mut plan = plan(&Schedule::with_delay(secs(1)), 1_000, None);
    plan.ran((at(1_000), at(5_030)), 0.0);
    assert_eq!(plan.wait(at(5_030)), secs(1));
}

#[test]
fn runs_are_at_least_so_far_apart() {
    let nightly = Schedule::daily_at("02:30", "UTC").unwrap();
    let nightly = nightly.at_least(secs(12 * 3600));
    // It ran at 20:00.
    let two = secs(2 * 3600);
    let mut tonight = Plan::new(&nightly, at(2 * 3_600_000), Some(secs(6 * 3600)), 0.0);
    assert_eq!(tonight.wait(at(2 * 3_600_000)), secs(6 * 3600));
    let clocks = Clocks {
        boot: BEFORE_BOOT + two + secs(6 * 3600),
        wall: two + secs(6 * 3600),
    };
    assert_eq!(tonight.wait(clocks), ms(0));
    let mut delay = plan(
        &Schedule::with_delay(secs(1)).at_least(secs(5)),
        1_000,
        None,
    );
    delay.ran((at(1_000), at(2_000)), 0.0);
    assert_eq!(delay.wait(at(2_000)), secs(5));
}

#[test]
fn jitter_does_not_add_up() {
    let schedule = Schedule::every(secs(10)).jitter(secs(4));
    let mut plan = Plan::new(&schedule, at(0), None, 0.5);
    assert_eq!(plan.wait(at(0)), secs(2));
    assert_eq!(plan.late(at(2_000)), ms(0));
    plan.ran((at(2_000), at(2_500)), 0.25);
    assert_eq!(plan.wait(at(2_500)), ms(8_500));
    plan.ran((at(11_000), at(11_500)), 0.0);
    assert_eq!(plan.wait(at(11_500)), ms(8_500));
}

#[test]
fn short_periods_are_not_recorded() {
    let every = |period| Schedule::every(period);
    assert!(!every(ms(999)).is_recorded());
    assert!(every(ms(1_000)).is_recorded());
    assert!(every(ms(10)).at_least(secs(1)).is_recorded());
    let weekly = Schedule::weekly_at([Weekday::Friday], "1:00", "UTC").unwrap();
    assert!(weekly.is_recorded());
}

#[test]
fn mistakes_are_refused() {
    for (schedule, says) in [
        (Schedule::every(ms(0)), "never rest"),
        (Schedule::with_delay(ms(0)), "never rest"),
        (Schedule::every(Duration::MAX), "366 days"),
        (
            Schedule::every(secs(1)).initial_delay(Duration::MAX),
            "366 days",
        ),
        (Schedule::every(secs(1)).at_least(Duration::MAX), "366 days"),
        (
            Schedule::every(secs(1)).jitter(Duration::MAX),
            "less than the period",
        ),
        (
            Schedule::every(secs(1)).jitter(secs(1)),
            "less than the period",
        ),
        (
            Schedule::with_delay(secs(1)).missed(Missed::Skip),
            "leave out",
        ),
    ] {
        let error = schedule.check().unwrap_err();
        assert!(error.to_string().contains(says), "{error}");
    }
    for (time, zone, says) in [
        ("24:00", "UTC", "not a time of day"),
        ("2:60", "UTC", "not a time of day"),
        ("2", "UTC", "not a time of day"),
        ("+2:30", "UTC", "not a time of day"),
        ("2:30:00:00", "UTC", "not a time of day"),
        ("", "UTC", "not a time of day"),
        ("2:30", "+26:00", "time zone"),
        ("2:30", "+", "time zone"),
        ("2:30", "", "time zone"),
        ("2:30", "Mars/Olympus", "time zone"),
    ] {
        let error = Schedule::daily_at(time, zone).unwrap_err();
        assert!(error.to_string().contains(says), "{time} {zone}: {error}");
    }
    assert!(Schedule::weekly_at([], "2:30", "UTC").is_err());
    assert_eq!("Mon".parse::<Weekday>().unwrap(), Weekday::Monday);
    assert_eq!("sunday".parse::<Weekday>().unwrap(), Weekday::Sunday);
    assert!("so".parse::<Weekday>().is_err());
}

/// 2026-03-01T00:00:00Z, a Sunday.
const MARCH: u64 = 1_772_323_200;

#[test]
fn times_of_day_are_those_of_the_zone() {
    let times = |zone: &str| TimeOfDay::new(Weekday::ALL, "02:30", zone).unwrap();
    let hours = |hours: f64| Duration::from_secs_f64(MARCH as f64 + hours * 3600.0);
    assert_eq!(times("UTC").after(hours(0.0)), hours(2.5));
    assert_eq!(times("UTC").after(hours(2.5)), hours(26.5));
    assert_eq!(times("+05:30").after(hours(0.0)), hours(21.0));
    assert_eq!(times("-08:00").after(hours(0.0)), hours(10.5));
    assert_eq!(times("+14:00").after(hours(0.0)), hours(12.5));
    let weekly = TimeOfDay::new([Weekday::Sunday], "02:30", "UTC").unwrap();
    assert_eq!(weekly.after(hours(0.0)), hours(2.5));
    assert_eq!(weekly.after(hours(2.5)), hours(2.5 + 7.0 * 24.0));
    let two = TimeOfDay::new([Weekday::Tuesday, Weekday::Saturday], "02:30", "UTC").unwrap();
    assert_eq!(two.after(hours(0.0)), hours(2.5 + 48.0));
    assert_eq!(two.after(hours(2.5 + 48.0)), hours(2.5 + 6.0 * 24.0));
}

#[test]
fn missed_times_are_made_up_or_skipped() {
    let clocks = |hours: f64| Clocks {
        boot: BEFORE_BOOT + Duration::from_secs_f64(hours * 3600.0),
        wall: Duration::from_secs_f64(MARCH as f64 + hours * 3600.0),
    };
    let hours = |hours: f64| Duration::from_secs_f64(hours * 3600.0);
    let nightly = Schedule::daily_at("02:30", "UTC").unwrap();
    // The last run was yesterday's; no process led until nine.
    let mut late = Plan::new(&nightly, clocks(9.0), Some(hours(30.5)), 0.0);
    assert_eq!(late.wait(clocks(9.0)), ms(0));
    assert_eq!(late.late(clocks(9.0)), hours(6.5));
    assert_eq!(late.due(clocks(9.0)), clocks(2.5).wall);
    late.ran((clocks(9.0), clocks(9.5)), 0.0);
    assert_eq!(late.wait(clocks(9.5)), hours(17.0));
    // For a week: one run, not seven.
    let mut late = Plan::new(&nightly, clocks(170.0), Some(hours(200.0)), 0.0);
    assert_eq!(late.wait(clocks(170.0)), ms(0));
    late.ran((clocks(170.0), clocks(170.0)), 0.0);
    assert_eq!(late.wait(clocks(170.0)), hours(0.5));
    let skips = nightly.clone().missed(Missed::Skip);
    let mut skipped = Plan::new(&skips, clocks(9.0), Some(hours(30.5)), 0.0);
    assert_eq!(skipped.wait(clocks(9.0)), hours(17.5));
    // A fail-over in that very moment is no missed run.
    let mut just = Plan::new(&skips, clocks(2.505), Some(hours(24.0)), 0.0);
    assert_eq!(just.wait(clocks(2.505)), ms(0));
    // Without a record nothing counts as missed.
    let mut new = Plan::new(&nightly, clocks(9.0), None, 0.0);
    assert_eq!(new.wait(clocks(9.0)), hours(17.5));
}

/// Thursday's record is four days old on Monday, and must still tell that Monday's run was missed.
#[test]
fn missed_monday_is_made_up_for() {
    let clocks = |hours: u64| Clocks {
        boot: BEFORE_BOOT + secs(hours * 3600),
        wall: secs(MARCH + hours * 3600),
    };
    let days = [Weekday::Monday, Weekday::Thursday];
    let weekly = Schedule::weekly_at(days, "02:00", "UTC").unwrap();
    // Monday 02:00 is hour 26; the run of Thursday before was 96 hours earlier.
    let mut late = Plan::new(&weekly, clocks(30), Some(secs(100 * 3600)), 0.0);
    assert_eq!(late.wait(clocks(30)), ms(0));
    assert_eq!(late.late(clocks(30)), secs(4 * 3600));
    late.ran((clocks(30), clocks(30)), 0.0);
    assert_eq!(late.wait(clocks(30)), secs(68 * 3600));
}

#[test]
fn differing_clocks_run_nothing_twice() {
    let clocks = |seconds: u64| Clocks {
        boot: BEFORE_BOOT + secs(seconds),
        wall: secs(MARCH + seconds),
    };
    let nightly = Schedule::daily_at("02:30", "UTC").unwrap();
    let due = 9_000;
    // It ran five seconds ago on a host whose clock is 40 s ahead of ours.
    let mut other = Plan::new(&nightly, clocks(due - 35), Some(secs(5)), 0.0);
    assert_eq!(other.wait(clocks(due - 35)), secs(DAY + 35));
    // Our own clock is set back by an hour after the run.
    let mut same = Plan::new(&nightly, clocks(0), None, 0.0);
    assert_eq!(same.wait(clocks(due)), ms(0));
    same.ran((clocks(due), clocks(due + 1)), 0.0);
    assert_eq!(same.wait(clocks(due - 3600)), secs(DAY + 3600));
    // Set forward while it waits: it is due.
    assert_eq!(same.wait(clocks(due + DAY)), ms(0));
}

/// Runs `days` days of a schedule from `start`, with an injected clock, and returns when runs began.
#[cfg(feature = "timezones")]
fn runs(time: &str, zone: &str, start: &str, days: u64) -> Vec<String> {
    let zone_of_test = jiff::tz::TimeZone::get(zone).unwrap();
    let start: jiff::Timestamp = start.parse().unwrap();
    let start = u64::try_from(start.as_second()).unwrap();
    let schedule = Schedule::daily_at(time, zone).unwrap();
    let clocks = |seconds: u64| Clocks {
        boot: BEFORE_BOOT + secs(seconds),
        wall: secs(start + seconds),
    };
    let mut now = 0;
    let mut plan = Plan::new(&schedule, clocks(now), None, 0.0);
    let mut began = Vec::new();
    loop {
        let wait = plan.wait(clocks(now)).as_secs();
        if now + wait > days * DAY {
            return began;
        }
        // In slices, as the worker waits.
        now += wait.min(1_000);
        if plan.wait(clocks(now)).is_zero() {
            let instant =
                jiff::Timestamp::from_second(i64::try_from(start + now).unwrap()).unwrap();
            began.push(zone_of_test.to_datetime(instant).to_string());
            plan.ran((clocks(now), clocks(now + 1)), 0.0);
            // Another leader takes over at once, now and then.
            if now % 2 == 0 {
                plan = Plan::new(&schedule, clocks(now + 60), Some(secs(60)), 0.0);
            }
        }
    }
}

#[cfg(feature = "timezones")]
#[test]
fn gap_delays_the_run() {
    assert_eq!(
        runs("02:30", "Europe/Berlin", "2026-03-27T12:00:00Z", 4),
        [
            "2026-03-28T02:30:00",
            "2026-03-29T03:30:00",
            "2026-03-30T02:30:00",
            "2026-03-31T02:30:00",
        ]
    );
    // A time outside the gap does not notice.
    assert_eq!(
        runs("03:00", "Europe/Berlin", "2026-03-28T12:00:00Z", 2),
        ["2026-03-29T03:00:00", "2026-03-30T03:00:00"]
    );
    // A whole day that never was has no run of its own.
    assert_eq!(
        runs("02:30", "Pacific/Apia", "2011-12-29T20:00:00Z", 2),
        ["2011-12-31T02:30:00", "2012-01-01T02:30:00"]
    );
}

#[cfg(feature = "timezones")]
#[test]
fn fold_runs_once() {
    assert_eq!(
        runs("02:30", "Europe/Berlin", "2026-10-23T12:00:00Z", 4),
        [
            "2026-10-24T02:30:00",
            "2026-10-25T02:30:00",
            "2026-10-26T02:30:00",
            "2026-10-27T02:30:00",
        ]
    );
    let clocks = |seconds: u64| Duration::from_secs(seconds);
    let time = TimeOfDay::new(Weekday::ALL, "02:30", "Europe/Berlin").unwrap();
    // 2026-10-25: 00:30Z is the first 02:30, 01:30Z the second.
    let midnight: jiff::Timestamp = "2026-10-25T00:00:00Z".parse().unwrap();
    let midnight = u64::try_from(midnight.as_second()).unwrap();
    assert_eq!(time.after(clocks(midnight)), clocks(midnight + 1_800));
    assert_eq!(
        time.after(clocks(midnight + 1_800)),
        clocks(midnight + 1_800 + 25 * 3600)
    );
}

/// One run in a random history; times in true time.
#[derive(Clone, Copy, Debug)]
struct Run {
    began: Duration,
    ended: Duration,
    recorded: bool,
}

/// A history: leaders come and go, on machines that were started at different times, whose calls are
/// late, whose runs take long, and which die between runs and in them.
fn history(schedule: &Schedule, dice: &mut StdRng) {
    let period = schedule.period();
    let fixed_delay = matches!(schedule.times, Times::WithDelay(_));
    let closest = match (&schedule.times, schedule.missed) {
        (Times::Every(_), Missed::Once) => period - schedule.tolerance() - schedule.jitter,
        (Times::Every(_), Missed::Skip) => period - schedule.tolerance() - schedule.jitter,
        (Times::WithDelay(_), _) => period,
        (Times::OfDay(_), _) => Duration::ZERO,
    };
    let mut now = secs(40 * DAY) + dice.random_range(ms(0)..secs(DAY));
    let mut record: Option<Duration> = None;
    let mut last: Option<Run> = None;
    for leader in 0..dice.random_range(2..8) {
        let leads_at = now;
        // Up for longer or shorter than the age of the last run; a wall clock that is off.
        let up = now - dice.random_range(ms(0)..secs(30 * DAY));
        let skew = dice.random_range(0..40_000);
        let clocks = |true_time: Duration| Clocks {
            boot: BEFORE_BOOT + (true_time - up),
            wall: true_time + ms(skew) - ms(20_000),
        };
        let leaves_at = now + period.mul_f64(dice.random_range(0.0..6.0));
        let age = record.map(|record| now - record);
        let mut plan = Plan::new(schedule, clocks(now), age, dice.random());
        let (mut paused, mut pauses) = (Duration::ZERO, 0);
        loop {
            // Mostly punctual, sometimes paused.
            let wait = plan.wait(clocks(now));
            if !wait.is_zero() {
                let late = match dice.random_range(0..10) {
                    0 => period.mul_f64(dice.random_range(0.0..3.0)),
                    _ => ms(dice.random_range(0..5)),
                };
                paused += late;
                pauses += 1;
                if now + wait + late > leaves_at {
                    now = now.max(leaves_at);
                    break;
                }
                now += wait + late;
                continue;
            }
            let began = now;
            let took = period.mul_f64(match dice.random_range(0..6) {
                0 => dice.random_range(0.0..2.5),
                _ => dice.random_range(0.0..0.4),
            });
            let dies = dice.random_range(0..8) == 0;
            let run = Run {
                began,
                ended: began + took,
                recorded: !(dies && fixed_delay),
            };
            if let Some(last) = last {
                let told = format!("leader {leader} of {schedule:?}: {last:?}, then {run:?}");
                let since = if fixed_delay { last.ended } else { last.began };
                if last.recorded {
                    assert!(began - since >= closest, "too close: {told}");
                    assert!(began - since >= schedule.at_least, "too close: {told}");
                }
                if !matches!(schedule.times, Times::OfDay(_)) {
                    let apart = period.max(schedule.at_least) + schedule.jitter;
                    let due = match record {
                        Some(record) => record + apart,
                        None => leads_at + schedule.initial_delay + apart,
                    };
                    let mut latest = due.max(last.ended).max(leads_at + schedule.jitter) + paused;
                    if schedule.missed == Missed::Skip {
                        // At most one beat is left out for each pause.
                        latest += (period + schedule.tolerance() + schedule.jitter) * (pauses + 1);
                    }
                    assert!(began <= latest + ms(10), "too far: {told} by {latest:?}");
                }
            }
            now = run.ended;
            if schedule.is_recorded() && run.recorded {
                record = Some(if fixed_delay { run.ended } else { run.began });
            }
            last = Some(run);
            if dies {
                break;
            }
            plan.ran((clocks(began), clocks(now)), dice.random());
            (paused, pauses) = (Duration::ZERO, 0);
        }
        // The fail-over.
        now += period.mul_f64(dice.random_range(0.0..1.5));
    }
}

/// Never two runs closer than promised, never a gap longer than the period and the fail-over.
#[test]
fn any_history_keeps_its_promises() {
    for seed in 0..100_000 {
        let mut dice = StdRng::seed_from_u64(seed);
        let period = ms(dice.random_range(1_000..100_000_000));
        let fraction = |dice: &mut StdRng| match dice.random_range(0..3) {
            0 => period.mul_f64(dice.random_range(0.0..0.8)),
            _ => Duration::ZERO,
        };
        let schedule = match dice.random_range(0..3) {
            0 => Schedule::every(period),
            1 => Schedule::with_delay(period),
            _ => Schedule::every(period).missed(Missed::Skip),
        };
        let schedule = schedule
            .jitter(fraction(&mut dice))
            .at_least(fraction(&mut dice))
            .initial_delay(fraction(&mut dice));
        schedule.check().unwrap();
        let told = std::panic::catch_unwind(move || history(&schedule, &mut dice));
        assert!(told.is_ok(), "seed {seed}");
    }
}

/// A time of day is run once a day whatever happens, and not at all only without a leader or if it was skipped.
#[test]
fn any_history_runs_a_time_of_day_once() {
    for seed in 0..3_000 {
        let mut dice = StdRng::seed_from_u64(seed);
        let schedule = Schedule::daily_at("02:30", "UTC").unwrap();
        let schedule = match dice.random_range(0..2) {
            0 => schedule,
            _ => schedule.missed(Missed::Skip),
        };
        let mut now = secs(MARCH) + ms(dice.random_range(0..DAY * 1_000));
        let mut record: Option<Duration> = None;
        let mut per_day = std::collections::HashMap::<u64, u32>::new();
        for _ in 0..30 {
            let skew = ms(dice.random_range(0..50_000));
            let clocks = |true_time: Duration| Clocks {
                boot: BEFORE_BOOT + (true_time - secs(MARCH)),
                wall: true_time + skew - ms(25_000),
            };
            let age = record.map(|record| now - record);
            let mut plan = Plan::new(&schedule, clocks(now), age, 0.0);
            let leaves_at = now + ms(dice.random_range(0..60 * 3_600_000));
            loop {
                let wait = plan.wait(clocks(now));
                if now + wait > leaves_at {
                    now = leaves_at;
                    break;
                }
                now += wait + ms(dice.random_range(0..5));
                if !plan.wait(clocks(now)).is_zero() {
                    continue;
                }
                record = Some(now);
                let due = plan.due(clocks(now)).as_secs() / DAY;
                let runs = per_day.entry(due).or_default();
                *runs += 1;
                assert_eq!(*runs, 1, "seed {seed}: day {due}");
                let began = now;
                now += ms(dice.random_range(0..3_600_000));
                plan.ran((clocks(began), clocks(now)), 0.0);
            }
            // Rolled over at once, mostly; sometimes there is no leader for days.
            now += match dice.random_range(0..4) {
                0 => ms(dice.random_range(0..50 * 3_600_000)),
                _ => ms(dice.random_range(0..2_000)),
            };
        }
    }
}
