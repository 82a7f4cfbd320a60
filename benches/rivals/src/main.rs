//! contend beside the locks that others use on Redis: one server, one machine, in turns.
//!
//! ```text
//! peers ROUND.json NUMBER [--quick] [PYTHON NODE]    one round of everybody, and what came out of it
//! peers --as RIVAL PORT                              one of the Rust ones, told what to do
//! ```
//!
//! `benches/report` builds this, runs as many rounds as it wants and draws them. PYTHON and NODE are
//! interpreters with the packages of `others/`.
//!
//! Everybody is a process of its own and every contender in it has connections of its own, with the
//! settings that its documentation begins with (each says which). Whoever does not start, breaks or
//! does not answer in time is ended and written down with the reason.

mod measure;
mod rivals;
mod worker;

use std::time::Duration;

use testbed::RedisServer;
use measure::{Outcome, Plan, Subject};
use worker::Worker;

fn main() {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [role, rival, port] = &arguments[..]
        && role == "--as"
    {
        worker::serve(rival, port);
        return;
    }
    let quick = arguments.iter().any(|argument| argument == "--quick");
    arguments.retain(|argument| argument != "--quick");
    let [file, round, interpreters @ ..] = &arguments[..] else {
        panic!("peers ROUND.json NUMBER [--quick] [PYTHON NODE]");
    };
    let round: usize = round.parse().expect("the number of the round");
    let server = RedisServer::start();
    let mut outcomes = race(&server, round, Plan::new(quick), interpreters);
    // As they are listed, whoever's turn it was first.
    outcomes.sort_by_key(|outcome| outcome.place);
    let lines: Vec<String> = outcomes.iter().map(Outcome::json).collect();
    std::fs::write(file, format!("[\n{}\n]\n", lines.join(",\n"))).unwrap();
}

fn race(server: &RedisServer, round: usize, plan: Plan, interpreters: &[String]) -> Vec<Outcome> {
    let mut subjects: Vec<(Outcome, Option<Worker>)> = Vec::new();
    let mut join = |name: &str, started: Result<(String, String, Worker), String>| {
        let place = subjects.len();
        subjects.push(match started {
            Ok((version, setting, worker)) => {
                (Outcome::new(name, place, version, setting), Some(worker))
            }
            Err(reason) => (Outcome::missing(name, place, reason), None),
        });
    };
    for name in rivals::NAMES {
        join(name, Worker::of_ours(name, server.port()));
    }
    for (number, script, names) in [
        (0, "redis_py.py", &["redis-py"][..]),
        (1, "npm.js", &["npm redlock", "npm redis-semaphore"][..]),
    ] {
        for name in names {
            let started = match interpreters.get(number) {
                Some(interpreter) => Worker::of_theirs(interpreter, script, name, server.port()),
                None => Err("no interpreter was given".to_owned()),
            };
            join(name, started);
        }
    }
    // Nobody is always the first, or always behind the same.
    let first = round % subjects.len();
    subjects.rotate_left(first);
    eprintln!("round {round}");
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
        outcome.hand_offs.extend(subject.hand_offs(&holds)?);
        Ok(())
    });
    each(&mut subjects, |outcome, subject| {
        outcome.eight = subject.eight(plan.settle, plan.span)?;
        outcome.seconds = plan.span.as_secs_f64();
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
