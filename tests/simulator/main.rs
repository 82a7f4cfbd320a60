//! The simulator: many small worlds, each with a few contenders, clocks that drift, a network that
//! loses, repeats, delays and reorders, processes that pause, crash, stop and come back, and a model
//! of a backend. The library's contention machine runs in them unchanged; `monitor.rs` holds the
//! rules against every event. Single-threaded and deterministic per seed.
//!
//! `CONTEND_SCHEDULES=n` runs seeds 0 up to n instead of the default number;
//! `CONTEND_SEED=n cargo test --test simulator` replays one and prints what happened in it.

mod clock;
mod dice;
mod model;
mod monitor;
mod network;
mod plan;
mod plant;
mod process;
mod runner;
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
    let schedules = variable("CONTEND_SCHEDULES").unwrap_or(SCHEDULES);
    let began = Instant::now();
    let (found, tally) = run(Plant::None, schedules);
    for (name, count) in tally.rows() {
        println!("{name:>16} {count:>12}");
    }
    println!("{:>16} {:>12.1?}", "wall time", began.elapsed());
    if let Some((seed, violation)) = found {
        let (_, lines, _) = replay(seed, Plant::None);
        println!("{}", lines.join("\n"));
        panic!("seed {seed}: {violation:?}; replay with CONTEND_SEED={seed}");
    }
    // Per hundred schedules: far below what happens, far above nothing.
    let least = [
        (tally.events, 5_000),
        (tally.grants, 400),
        (tally.adoptions, 20),
        (tally.renewals, 400),
        (tally.acquired, 200),
        (tally.step_downs, 40),
        (tally.given_up, 50),
        (tally.give_backs, 4),
        (tally.stale_requests, 10),
        (tally.timeouts, 100),
        (tally.ignored_replies, 50),
        (tally.lost_messages, 100),
        (tally.duplicates, 50),
        (tally.late_messages, 50),
        (tally.pauses, 50),
        (tally.crashes, 20),
        (tally.stops, 100),
        (tally.new_ids, 10),
        (tally.memory_losses, 5),
        (tally.exempt_beliefs, 4),
        (tally.lost_wakes, 5),
    ];
    if schedules >= 1_000 {
        for (at, (count, least)) in least.into_iter().enumerate() {
            assert!(
                count >= schedules / 100 * least,
                "row {at}: only {count}; see the table above"
            );
        }
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
    renewing_from_the_reply_is_caught: RenewsFromReply;
    not_stepping_down_on_errors_is_caught: IgnoresErrors;
    announcing_a_late_grant_is_caught: AnnouncesLateGrant;
    forgetting_to_raise_the_fence_is_caught: KeepsFence;
    a_release_that_names_only_the_id_is_caught: ReleasesById;
    a_renewal_that_can_shorten_a_lease_is_caught: ShortensLease;
    a_deadline_that_revives_is_caught: RevivesDeadline;
    adopting_without_the_full_lease_is_caught: AdoptsWithoutLease;
    a_release_sent_before_released_is_told_is_caught: ReleasesBeforeTelling;
    leaving_without_a_release_is_caught: LeavesWithoutRelease;
}
