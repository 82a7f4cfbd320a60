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

#[test]
fn schedule_is_the_same_every_time() {
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
    kept_fence_is_caught: KeepsFence;
    release_by_id_is_caught: ReleasesById;
    shortening_renewal_is_caught: ShortensLease;
    adoption_without_lease_is_caught: AdoptsWithoutLease;
    shortening_adoption_is_caught: ShortensOnAdoption;
    excessive_drift_is_caught: DriftsTooFar;
}
