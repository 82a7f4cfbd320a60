//! The simulator: many small worlds, each with a few contenders, clocks that drift, a network that
//! loses, repeats, delays and reorders, processes that pause, crash, stop and come back, and a model
//! of a backend. Deterministic per seed.
//!
//! `loops` runs the real services, lockers and observers, with all their threads, in virtual time. The
//! rest runs the contention machine alone, step by step, against stricter rules, with bugs planted in the
//! model of the backend.
//!
//! `CONTEND_SCHEDULES=n` runs seeds 0 up to n instead of the default number;
//! `CONTEND_SEED=n cargo test --test simulator` replays one and prints what happened in it.

// What the library must not do, a test may: there a panic is the verdict.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod clock;
mod dice;
mod loops;
mod model;
mod monitor;
mod network;
mod plan;
mod plant;
mod process;
mod rules;
mod runner;
mod tally;
mod worker;
mod world;

use std::time::Instant;

use crate::plant::Plant;
use crate::rules::TWO;
use crate::runner::{hunt, hunt_damage, replay, run};

/// How many schedules a test run plays.
const SCHEDULES: u64 = 100_000;

/// Within how many schedules a planted bug must do its damage.
const DAMAGE: u64 = 10_000;

/// Within how many schedules a planted bug must be found.
const HUNT: u64 = 5_000;

fn variable(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    Some(
        value
            .parse()
            .unwrap_or_else(|_| panic!("{name}={value} is not a number")),
    )
}

#[test]
fn no_schedule_breaks_a_rule() {
    if let Some(seed) = variable("CONTEND_SEED") {
        let (violation, lines, tally) = replay(seed, Plant::None);
        println!("{}", lines.join("\n"));
        println!("seed {seed}: {violation:?}, {} events", tally.events);
        assert!(violation.is_none(), "seed {seed}: {violation:?}");
        return;
    }
    let schedules = variable("CONTEND_SCHEDULES").unwrap_or(SCHEDULES);
    let began = Instant::now();
    let (found, tally) = run(Plant::None, None, schedules);
    for (name, count) in tally.rows() {
        println!("{name:>16} {count:>12}");
    }
    println!("{:>16} {:>12.1?}", "wall time", began.elapsed());
    if let Some((seed, violation)) = found {
        let (_, lines, _) = replay(seed, Plant::None);
        println!("{}", lines.join("\n"));
        panic!("seed {seed}: {violation:?}; replay with CONTEND_SEED={seed}");
    }
    // Per hundred schedules: about a third of what happens.
    let least = [
        ("events", 9_000),
        ("grants", 120),
        ("adoptions", 40),
        ("renewals", 1_000),
        ("saved", 30),
        ("woken", 40),
        ("acquired", 80),
        ("step_downs", 20),
        ("given_up", 50),
        ("give_backs", 1),
        ("stale_requests", 15),
        ("timeouts", 200),
        ("ignored_replies", 100),
        ("lost_messages", 200),
        ("duplicates", 60),
        ("late_messages", 100),
        ("pauses", 100),
        ("crashes", 20),
        ("stops", 130),
        ("release_retries", 1),
        ("clean_stops", 25),
        ("new_ids", 8),
        ("memory_losses", 4),
        ("exempt_beliefs", 3),
        ("lost_wakes", 7),
    ];
    let rows = tally.rows();
    for (name, least) in least {
        let count = rows.iter().find(|row| row.0 == name).map_or(0, |row| row.1);
        let least = schedules / 10_000 * 100 * least;
        assert!(count >= least, "{name}: {count}, expected {least} and more");
    }
}

#[test]
fn a_schedule_of_the_machine_is_the_same_every_time() {
    for seed in 0..50 {
        assert_eq!(
            replay(seed, Plant::None).1,
            replay(seed, Plant::None).1,
            "seed {seed}"
        );
    }
}

macro_rules! planted {
    ($($name:ident: $plant:ident;)*) => {$(
        #[test]
        fn $name() {
            hunt(Plant::$plant, HUNT);
        }
    )*};
}

planted! {
    renewing_from_the_reply_is_caught: RenewsFromReply;
    not_stepping_down_on_errors_is_caught: IgnoresErrors;
    announcing_a_late_grant_is_caught: AnnouncesLateGrant;
    forgetting_to_raise_the_fence_is_caught: KeepsFence;
    a_release_that_names_only_the_id_is_caught: ReleasesById;
    a_renewal_that_can_shorten_a_lease_is_caught: ShortensLease;
    a_deadline_that_revives_is_caught: RevivesDeadline;
    adopting_without_the_full_lease_is_caught: AdoptsWithoutLease;
    an_adoption_that_can_shorten_a_lease_is_caught: ShortensOnAdoption;
    clocks_beyond_the_allowance_are_caught: DriftsTooFar;
    a_release_sent_before_released_is_told_is_caught: ReleasesBeforeTelling;
    leaving_without_a_release_is_caught: LeavesWithoutRelease;
}

/// The rules nearer to a bug only see it earlier: left alone, it ends here. (A deadline that revives does
/// not: its renewal is in the backend's lease. It makes `is_owner` say no, then yes, about one fence.)
#[test]
fn the_planted_bugs_make_two_believe_at_once() {
    for plant in [
        Plant::RenewsFromReply,
        Plant::IgnoresErrors,
        Plant::AnnouncesLateGrant,
        Plant::KeepsFence,
        Plant::ReleasesById,
        Plant::ShortensLease,
        Plant::AdoptsWithoutLease,
        Plant::ShortensOnAdoption,
    ] {
        hunt_damage(plant, TWO, DAMAGE);
    }
}

/// How many schedules of the real loops a test run plays.
const LOOPS: u64 = 100_000;

#[test]
fn no_schedule_of_the_real_loops_breaks_a_rule() {
    if let Some(seed) = variable("CONTEND_SEED") {
        let (violation, lines, tally) = loops::replay(seed);
        println!("{}", lines.join("\n"));
        println!("seed {seed}: {violation:?}, {} events", tally.events);
        assert!(violation.is_none(), "seed {seed}: {violation:?}");
        return;
    }
    let first = variable("CONTEND_FIRST").unwrap_or(0);
    let schedules = variable("CONTEND_SCHEDULES").unwrap_or(LOOPS);
    let began = Instant::now();
    let (found, tally) = loops::run(first, first + schedules);
    for (name, count) in tally.rows() {
        println!("{name:>16} {count:>12}");
    }
    println!("{:>16} {:>12.1?}", "wall time", began.elapsed());
    if let Some((seed, violation)) = found {
        panic!("seed {seed}: {violation:?}; replay with CONTEND_SEED={seed}");
    }
    // A simulator in which something never happens proves nothing about it.
    if schedules >= 1_000 {
        for (name, count) in tally.rows() {
            assert!(count > schedules / 1_000, "{name}: {count}");
        }
    }
}

#[test]
fn a_schedule_of_the_real_loops_is_the_same_every_time() {
    for seed in 0..50 {
        assert_eq!(loops::replay(seed).1, loops::replay(seed).1, "seed {seed}");
    }
}
