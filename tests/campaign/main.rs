//! The fault campaign: processes that contend on a real server, a nemesis that tries to make two of them believe at
//! once, and a checker over what each of them wrote down.
//!
//! `./tests/run campaign --backend redis --minutes 5 --seed 7` runs it by hand. Here every backend gets some seconds,
//! and bugs are planted, which the checker must find.

// What the library must not do, a test may: there a panic is the verdict.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod campaign;
mod checker;
mod contender;
mod fleet;
mod ground;
mod history;
#[path = "../conformance/hooked.rs"]
mod hooked;
mod masters;
mod memory_weather;
mod planted;
mod register;
mod stage;

use std::fs::OpenOptions;
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use campaign::{Outcome, Plan};
use contender::Assignment;
use ground::{Fault, Ground};
use parking_lot::{Mutex, MutexGuard};
use planted::Bug;

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

/// Writes a line to the file that `tests/run` shows at its end.
fn conclude(line: &str) {
    println!("{line}");
    if let Some(path) = std::env::var_os("CONTEND_CAMPAIGN_VERDICT") {
        let file = OpenOptions::new().create(true).append(true).open(path);
        writeln!(file.unwrap(), "{line}").unwrap();
    }
}

/// Runs a campaign and prints what came of it.
fn run(plan: &Plan) -> Outcome {
    let outcome = testbed::within(plan.lasts + HANG, || campaign::run(plan));
    for violation in outcome.verdict.violations.iter().take(20) {
        println!("{violation:?}");
    }
    conclude(&outcome.to_string());
    if !outcome.held() {
        println!("journals: {}", outcome.folder.display());
    }
    outcome
}

/// The plan of a campaign in a test run.
fn short(ground: Ground) -> Plan {
    Plan {
        ground,
        lasts: SECONDS,
        seed: rand::random_range(0..1_000_000),
        processes: PROCESSES,
        plant: None,
    }
}

fn holds(ground: Ground) {
    let _place = place();
    // In the same time, less happens on a busy machine: it is given more then.
    let is_enough = (1..=3).any(|times| {
        let plan = Plan {
            lasts: SECONDS * times,
            ..short(ground)
        };
        let outcome = run(&plan);
        let verdict = &outcome.verdict;
        assert!(outcome.held(), "{outcome}");
        // Sentinel's nemesis does not go on before the master was replaced; a node of a cluster may be back earlier.
        let had = |fault: &str| verdict.faults.contains_key(fault);
        let replaced = had(&Fault::FailOver.name()) || had(&Fault::Kill.name());
        if ground == Ground::RedisSentinel && replaced {
            assert!(had(masters::MASTER_CHANGE), "{outcome}");
        }
        let (fenced, unfenced) = (verdict.fenced.0, verdict.unfenced.0);
        let worked = [verdict.handed_on, verdict.recorded, fenced, unfenced];
        verdict.acquisitions > 20 && worked.iter().all(|count| *count > 0)
    });
    assert!(is_enough, "{ground}: too little happens to prove anything");
}

/// Runs campaigns with a bug in the backend until the checker has seen it, and says how many it took.
fn is_caught(ground: Ground, bug: Bug) {
    let _place = place();
    for attempt in 1..=8 {
        let plan = Plan {
            // Of two, the other one is the next: no third one's claim time comes first.
            processes: if bug == Bug::LeaseFromReply {
                2
            } else {
                PROCESSES
            },
            plant: Some(bug),
            ..short(ground)
        };
        let violations = run(&plan).verdict.violations;
        let seen = violations.iter().filter(|it| bug.breaks(it.0)).count();
        if seen > 0 {
            let name = bug.name();
            println!("{ground}: {name} is caught, {seen} times in campaign {attempt}");
            return;
        }
    }
    panic!("{ground}: {} was not noticed", bug.name());
}

macro_rules! campaigns {
    ($($name:ident: $check:ident($($argument:expr),+);)+) => {$(
        #[test]
        fn $name() {
            $check($($argument),+);
        }
    )+};
}

campaigns! {
    memory_holds: holds(Ground::Memory);
    redis_holds: holds(Ground::Redis);
    redis_cluster_holds: holds(Ground::RedisCluster);
    redis_sentinel_holds: holds(Ground::RedisSentinel);
    mysql_holds: holds(Ground::MySql);
    mysql_polling_holds: holds(Ground::MySqlPolling);
    zk_holds: holds(Ground::Zk);
    zk_ensemble_holds: holds(Ground::ZkEnsemble);
    lease_from_the_reply_is_caught: is_caught(Ground::Memory, Bug::LeaseFromReply);
    unchecked_release_is_caught: is_caught(Ground::Memory, Bug::ReleaseUnchecked);
    repeated_fence_is_caught: is_caught(Ground::Memory, Bug::FenceRepeats);
    unclaimed_hand_over_is_caught: is_caught(Ground::Memory, Bug::HandOverUnclaimed);
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
    lasts: Duration,
    seed: u64,
    beside: usize,
}

fn asked() -> Asked {
    let text = std::env::var("CONTEND_CAMPAIGN").unwrap_or_default();
    let words: Vec<&str> = text.split_whitespace().collect();
    let mut asked = Asked {
        grounds: Vec::new(),
        lasts: Duration::from_secs(60),
        seed: rand::random_range(0..1_000_000),
        beside: 2,
    };
    for pair in words.chunks(2) {
        let [option, value] = pair else {
            panic!("{:?} needs a value", pair[0]);
        };
        let number = || value.parse::<f64>().expect("a number");
        match *option {
            "--backend" => asked.grounds.push(value.parse().expect("a backend")),
            "--minutes" => asked.lasts = Duration::from_secs_f64(number() * 60.0),
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
    let next = || grounds.lock().next();
    thread::scope(|scope| {
        for _ in 0..asked.beside {
            scope.spawn(|| {
                while let Some(ground) = next() {
                    let plan = Plan {
                        lasts: asked.lasts,
                        seed: asked.seed,
                        ..short(ground)
                    };
                    if !run(&plan).held() {
                        broken.lock().push(ground.name());
                    }
                }
            });
        }
    });
    let broken = broken.into_inner();
    assert!(broken.is_empty(), "a promise was broken on {broken:?}");
}
