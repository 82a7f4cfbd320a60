//! The simulator: many small worlds, each with a few processes, clocks that drift, a network that loses,
//! repeats, delays and reorders, processes that pause, crash, stop and come back, and a model of a backend.
//! The services, lockers, observers and background threads are the real ones, each of their threads a real
//! one, in virtual time. Deterministic per seed.
//!
//! `CONTEND_SCHEDULES=n` plays n seeds instead of the default number, `CONTEND_FIRST=n` begins with another
//! one than 0; `CONTEND_SEED=n cargo test --test simulator` replays one and prints what happened in it.

// What the library must not do, a test may: there a panic is the verdict.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod backend;
mod clock;
mod dice;
mod model;
mod monitor;
mod plan;
mod plant;
mod process;
mod rules;
mod runner;
mod stage;
mod tally;
mod world;

use std::time::Instant;

use crate::plant::Plant;
use crate::runner::{hunt, replay, run};

/// How many schedules a test run plays.
const SCHEDULES: u64 = 100_000;

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
    let first = variable("CONTEND_FIRST").unwrap_or(0);
    let schedules = variable("CONTEND_SCHEDULES").unwrap_or(SCHEDULES);
    let began = Instant::now();
    let (found, tally) = run(Plant::None, first, first + schedules);
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

/// Seeds that broke a rule once, which the default number of schedules may not reach.
#[test]
fn no_seed_that_broke_a_rule_before_does_so_again() {
    for seed in [156_933, 501_272, 1_066_114, 1_126_571, 3_982_953] {
        let violation = replay(seed, Plant::None).0;
        assert!(violation.is_none(), "seed {seed}: {violation:?}");
    }
}

#[test]
fn a_schedule_is_the_same_every_time() {
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
    forgetting_to_raise_the_fence_is_caught: KeepsFence;
    a_release_that_names_only_the_id_is_caught: ReleasesById;
    a_renewal_that_can_shorten_a_lease_is_caught: ShortensLease;
    adopting_without_the_full_lease_is_caught: AdoptsWithoutLease;
    an_adoption_that_can_shorten_a_lease_is_caught: ShortensOnAdoption;
    clocks_beyond_the_allowance_are_caught: DriftsTooFar;
}
