//! The fault campaign: processes that contend on a real server, a nemesis that tries to make two of them
//! believe at once, and a checker over what each of them wrote down.
//!
//! `./tests/run campaign --backend redis --minutes 5 --seed 7` runs it by hand. Here every backend gets
//! some seconds, and a bug is planted in each, which the checker must find.

// What the library must not do, a test may: there a panic is the verdict.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, dead_code)]

mod campaign;
mod checker;
mod contender;
mod fleet;
mod history;
#[path = "../conformance/hooked.rs"]
mod hooked;
mod masters;
mod memory_weather;
mod planted;
mod promises;
mod register;
mod soak;
mod stage;

use std::fs::OpenOptions;
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use campaign::{Outcome, Plan};
use contender::Assignment;
use parking_lot::{Mutex, MutexGuard};
use planted::Bug;
use stage::{Fault, Ground};

/// Two campaigns at a time: one leaves the machine idle for most of the time, three are too many for two cores.
static PLACES: [Mutex<()>; 2] = [const { Mutex::new(()) }; 2];

/// Waits for a place.
fn place() -> MutexGuard<'static, ()> {
    loop {
        if let Some(place) = PLACES.iter().find_map(Mutex::try_lock) {
            return place;
        }
        thread::sleep(Duration::from_millis(50));
    }
}

/// Sets a flag when it is dropped, also by a panic: a thread that waits for it would keep its scope from ending.
struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// The faults of a campaign in a test run.
const SECONDS: Duration = Duration::from_secs(8);
const PROCESSES: usize = 4;

/// When a campaign that hangs is ended, on top of the time that it is to take.
const HANG: Duration = Duration::from_secs(240);

/// Runs a campaign and prints what came of it, also to the file that the caller asked for.
fn run(plan: &Plan) -> Outcome {
    let outcome = testbed::within(plan.lasts + HANG, || campaign::run(plan));
    for violation in outcome.verdict.violations.iter().take(20) {
        println!("{violation}");
    }
    println!("{outcome}");
    if !outcome.held() {
        println!("journals: {}", outcome.folder.display());
    }
    if let Some(path) = std::env::var_os("CONTEND_CAMPAIGN_VERDICT") {
        let mut file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
            .unwrap();
        writeln!(file, "{outcome}").unwrap();
    }
    outcome
}

fn holds(ground: Ground) {
    let _place = place();
    let outcome = run(&Plan {
        ground,
        lasts: SECONDS,
        seed: rand::random_range(0..1_000_000),
        processes: PROCESSES,
        plant: None,
    });
    assert!(outcome.held(), "{outcome}");
    assert!(outcome.verdict.acquisitions > 20, "{outcome}");
    assert!(outcome.verdict.recorded > 0, "{outcome}");
    // Sentinel's nemesis does not go on before the master was replaced; a node of a cluster may be back earlier.
    let had = |fault: &str| outcome.verdict.faults.contains_key(fault);
    let replaced = had(Fault::FailOver.name()) || had(Fault::MemberKill.name());
    if ground == Ground::RedisSentinel && replaced {
        assert!(had(masters::MASTER_CHANGE), "{outcome}");
    }
}

#[test]
fn memory_holds() {
    holds(Ground::Memory);
}

#[test]
fn redis_holds() {
    holds(Ground::Redis);
}

#[test]
fn redis_cluster_holds() {
    holds(Ground::RedisCluster);
}

#[test]
fn redis_sentinel_holds() {
    holds(Ground::RedisSentinel);
}

#[test]
fn mysql_holds() {
    holds(Ground::MySql);
}

#[test]
fn mysql_polling_holds() {
    holds(Ground::MySqlPolling);
}

#[test]
fn zk_holds() {
    holds(Ground::Zk);
}

#[test]
fn zk_ensemble_holds() {
    holds(Ground::ZkEnsemble);
}

/// Runs campaigns with a bug in the backend until the checker has seen it, and says how many it took.
fn is_caught(ground: Ground, bug: Bug) {
    let _place = place();
    for attempt in 1..=8 {
        let outcome = run(&Plan {
            ground,
            lasts: SECONDS,
            seed: rand::random_range(0..1_000_000),
            // Of two, the other one is the next: nobody's claim time comes first.
            processes: if bug == Bug::LeaseFromReply {
                2
            } else {
                PROCESSES
            },
            plant: Some(bug),
        });
        let seen = outcome.verdict.count(|found| bug.shows_as(found));
        if seen > 0 {
            println!(
                "{ground}: {} is caught, {seen} times in campaign {attempt}",
                bug.name()
            );
            return;
        }
    }
    panic!("{ground}: nobody noticed {}", bug.name());
}

#[test]
fn a_lease_taken_from_the_reply_is_caught() {
    is_caught(Ground::Memory, Bug::LeaseFromReply);
}

#[test]
fn a_release_without_owner_check_is_caught() {
    is_caught(Ground::Memory, Bug::ReleaseUnchecked);
}

#[test]
fn a_fence_that_repeats_is_caught() {
    is_caught(Ground::Memory, Bug::FenceRepeats);
}

#[test]
fn a_hand_over_believed_before_it_is_claimed_is_caught() {
    is_caught(Ground::Memory, Bug::HandOverUnclaimed);
}

/// All bugs in all backends: `CONTEND_CAMPAIGN="--backend redis" cargo test ... -- --ignored every_bug`.
#[test]
#[ignore = "by hand: ./tests/run campaign --planted --backend B"]
fn every_bug_is_caught() {
    for ground in asked().grounds {
        for bug in Bug::ALL {
            is_caught(ground, bug);
        }
    }
}

/// A process of contenders.
#[test]
#[ignore = "started by a campaign"]
fn contender() {
    let text = std::env::var(Assignment::VARIABLE).expect("an assignment");
    contender::main(&Assignment::from_text(&text).expect("a whole assignment"));
}

/// What the command line of `tests/run` asks for.
struct Asked {
    grounds: Vec<Ground>,
    minutes: f64,
    seed: u64,
    beside: usize,
}

fn asked() -> Asked {
    let text = std::env::var("CONTEND_CAMPAIGN").unwrap_or_default();
    let words: Vec<&str> = text.split_whitespace().collect();
    let mut asked = Asked {
        grounds: Vec::new(),
        minutes: 1.0,
        seed: rand::random_range(0..1_000_000),
        beside: 2,
    };
    for pair in words.chunks(2) {
        let [option, value] = pair else {
            panic!("{:?} needs a value", pair[0]);
        };
        match *option {
            "--backend" => {
                let ground = value.parse().unwrap_or_else(|error| panic!("{error}"));
                asked.grounds.push(ground);
            }
            "--minutes" => asked.minutes = value.parse().expect("a number of minutes"),
            "--seed" => asked.seed = value.parse().expect("a number as seed"),
            "--beside" => asked.beside = value.parse().expect("a number of campaigns"),
            other => panic!("unknown option {other}"),
        }
    }
    if asked.grounds.is_empty() {
        asked.grounds.extend(Ground::ALL);
    }
    asked
}

/// `./tests/run campaign --backend B --minutes N --seed S`.
#[test]
#[ignore = "by hand: ./tests/run campaign --minutes N"]
fn by_hand() {
    let asked = asked();
    let grounds = Mutex::new(asked.grounds.into_iter());
    let broken = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..asked.beside {
            scope.spawn(|| {
                while let Some(ground) = { grounds.lock().next() } {
                    let outcome = run(&Plan {
                        ground,
                        lasts: Duration::from_secs_f64(asked.minutes * 60.0),
                        seed: asked.seed,
                        processes: PROCESSES,
                        plant: None,
                    });
                    if !outcome.held() {
                        broken.lock().push(ground.name());
                    }
                }
            });
        }
    });
    let broken = broken.into_inner();
    assert!(broken.is_empty(), "a promise was broken on {broken:?}");
}

/// The process that a soak watches.
#[test]
#[ignore = "started by a soak"]
fn soaked() {
    soak::main();
}

/// `./tests/run campaign --soak --backend B --minutes N`.
#[test]
#[ignore = "by hand: ./tests/run campaign --soak --minutes N"]
fn soak_by_hand() {
    let asked = asked();
    let lasts = Duration::from_secs_f64(asked.minutes * 60.0);
    let mut grown = Vec::new();
    // Beside each other: each is idle for most of the time.
    thread::scope(|scope| {
        let soaks: Vec<_> = asked
            .grounds
            .iter()
            // Those on whose server leftovers can be counted.
            .filter(|ground| matches!(ground, Ground::Redis | Ground::MySql | Ground::Zk))
            .map(|&ground| scope.spawn(move || soak::run(ground, lasts, asked.seed)))
            .collect();
        for soak in soaks {
            let soaked = soak.join().expect("a soak");
            let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR"))
                .join(format!("soak-{}.svg", soaked.ground));
            let path = soaked.write_svg(&path).unwrap();
            let table = soaked.table();
            println!("{table}plot: {}", path.display());
            if let Some(path) = std::env::var_os("CONTEND_CAMPAIGN_VERDICT") {
                let mut file = OpenOptions::new()
                    .create(true)
                    .append(true)
                    .open(path)
                    .unwrap();
                writeln!(file, "{table}").unwrap();
            }
            for name in soaked.grown() {
                grown.push(format!("{}: {name}", soaked.ground));
            }
        }
    });
    assert!(grown.is_empty(), "what grew: {grown:?}");
}
