//! contend beside the locks that others use on the same servers: one machine, in turns.
//!
//! ```text
//! rivals ROUND.json NUMBER [--quick] [redis] [mysql] [zk]    one round of everybody, and what came out of it
//! rivals --as BACKEND RIVAL URL                              one of the Rust ones, told what to do
//! ```
//!
//! `benches/report` builds this, runs as many rounds as it wants and draws them. The interpreters of those in
//! other languages are named by `RIVALS_PYTHON`, `RIVALS_NODE` and `RIVALS_CLASSPATH` (for Java).
//!
//! Everybody is a process of its own and every contender in it has connections of its own, with the
//! settings that its documentation begins with (each says which). Whoever does not start, breaks or
//! does not answer in time is ended and written down with the reason.

mod measure;
mod rivals;
mod worker;

use std::time::Duration;

use measure::{Outcome, Plan, Subject};
use testbed::{MariaDbServer, RedisServer, ZooKeeperServer};
use worker::Worker;

/// Who is measured on which backend, ourselves first.
const RIVALS: [(&str, &[&str]); 3] = [
    (
        "redis",
        &[
            "contend",
            "rslock",
            "redlock",
            "distributed-lock",
            "redis-py",
            "npm redlock",
            "npm redis-semaphore",
        ],
    ),
    ("mysql", &["contend", "GET_LOCK", "Simba's statements"]),
    ("zk", &["contend", "kazoo", "Curator"]),
];

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [role, backend, rival, url] = &arguments[..]
        && role == "--as"
    {
        worker::serve(backend, rival, url);
        return;
    }
    let [file, round, rest @ ..] = &arguments[..] else {
        panic!("rivals ROUND.json NUMBER [--quick] [redis] [mysql] [zk]");
    };
    let round: usize = round.parse().expect("the number of the round");
    let named = |word: &str| rest.iter().any(|argument| argument == word);
    let plan = Plan::new(named("--quick"));
    let all = !RIVALS.iter().any(|(backend, _)| named(backend));
    let mut lines = Vec::new();
    for (backend, names) in RIVALS {
        if !all && !named(backend) {
            continue;
        }
        let mut outcomes = match backend {
            "redis" => {
                let server = RedisServer::start();
                race(backend, names, &server.url(), round, plan)
            }
            "mysql" => {
                let server = MariaDbServer::start();
                let url = server.create_database("rivals");
                server.sql(&format!("USE rivals; {}", contend::mysql::INIT_SQL));
                race(backend, names, &url, round, plan)
            }
            _ => {
                let server = ZooKeeperServer::start();
                race(backend, names, &server.url(), round, plan)
            }
        };
        // As they are listed, whoever's turn it was first.
        outcomes.sort_by_key(|outcome| outcome.place);
        lines.extend(outcomes.iter().map(Outcome::json));
    }
    std::fs::write(file, format!("[\n{}\n]\n", lines.join(",\n"))).unwrap();
}

fn race(backend: &str, names: &[&str], url: &str, round: usize, plan: Plan) -> Vec<Outcome> {
    let mut subjects: Vec<(Outcome, Option<Worker>)> = names
        .iter()
        .enumerate()
        .map(|(place, name)| match Worker::start(backend, name, url) {
            Ok((introduction, worker)) => (
                Outcome::new(backend, name, place, introduction),
                Some(worker),
            ),
            Err(reason) => (Outcome::missing(backend, name, place, reason), None),
        })
        .collect();
    // Nobody is always the first, or always behind the same.
    let first = round % subjects.len();
    subjects.rotate_left(first);
    eprintln!("round {round}, {backend}");
    for _ in 0..plan.turns {
        each(&mut subjects, |outcome, subject| {
            outcome.cycles.extend(subject.cycles(plan.cycles)?);
            Ok(())
        });
    }
    let holds: Vec<Duration> = (0..plan.hand_offs)
        .map(|number| measure::hold(round * plan.hand_offs + number))
        .collect();
    each(&mut subjects, |outcome, subject| {
        if outcome.introduction.waits {
            outcome.hand_offs.extend(subject.hand_offs(&holds)?);
        }
        Ok(())
    });
    each(&mut subjects, |outcome, subject| {
        if outcome.introduction.waits {
            outcome.eight = subject.eight(plan.settle, plan.span)?;
            outcome.seconds = plan.span.as_secs_f64();
        }
        Ok(())
    });
    subjects.into_iter().map(|(outcome, _)| outcome).collect()
}

fn each(
    subjects: &mut [(Outcome, Option<Worker>)],
    measure: impl Fn(&mut Outcome, &mut dyn Subject) -> Result<(), String>,
) {
    for (outcome, worker) in subjects {
        let Some(subject) = worker else {
            continue;
        };
        if let Err(reason) = measure(outcome, subject) {
            eprintln!("{}: {reason}", outcome.name);
            outcome.failed = Some(reason);
            // Ends it: it takes no time of the others any more.
            *worker = None;
        }
    }
}
