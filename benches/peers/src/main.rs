//! contend beside the locks that others use on Redis: one server, one machine, in turns.
//!
//! ```text
//! cargo run --release -- RESULT.json [--quick] [PYTHON NODE]
//! ```
//!
//! PYTHON and NODE are interpreters with the packages of `others/` (`benches/report` installs them);
//! without them those rivals are left out.
//!
//! Each contender has connections of its own, as it would have in a process of its own, and the
//! settings that its documentation begins with.

mod measure;
mod rivals;
mod worker;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use ground::RedisServer;
use measure::{Outcome, Subject};
use rivals::InProcess;
use worker::Worker;

fn main() {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let quick = arguments.iter().any(|argument| argument == "--quick");
    arguments.retain(|argument| argument != "--quick");
    let Some((result, interpreters)) = arguments.split_first() else {
        panic!("where shall the result go?");
    };
    let server = RedisServer::start();
    let mut subjects: Vec<(String, String, Box<dyn Subject>)> = rivals::all(&server.url())
        .into_iter()
        .map(|(name, version, rival)| {
            let subject: Box<dyn Subject> = Box::new(InProcess::new(rival));
            (name.to_owned(), version, subject)
        })
        .collect();
    if let [python, node] = interpreters {
        for (interpreter, script, rivals) in [
            (python, "redis_py.py", &["redis-py"][..]),
            (node, "npm.js", &["npm redlock", "npm redis-semaphore"][..]),
        ] {
            for rival in rivals {
                match Worker::start(interpreter, script, rival, server.port()) {
                    Ok((version, worker)) => {
                        subjects.push(((*rival).to_owned(), version, Box::new(worker)));
                    }
                    Err(error) => eprintln!("{rival} does not run: {error}"),
                }
            }
        }
    }
    let mut outcomes: Vec<Outcome> = subjects.iter().map(|_| Outcome::default()).collect();
    let (rounds, cycles, hand_offs, seconds) = if quick {
        (1, 20, 2, 0.5)
    } else {
        (6, 250, 6, 0.7)
    };
    for round in 0..rounds {
        for ((name, _, subject), outcome) in subjects.iter_mut().zip(&mut outcomes) {
            if outcome.failed {
                continue;
            }
            eprintln!("round {}: {name}", round + 1);
            // A rival that breaks is left out; the others go on.
            let measured = catch_unwind(AssertUnwindSafe(|| {
                outcome.cycles.extend(subject.cycles(cycles));
                outcome.hand_offs.extend(subject.hand_offs(hand_offs));
                let counts = subject.eight(Duration::from_secs_f64(seconds));
                outcome.add_eight(&counts, seconds);
            }));
            outcome.failed = measured.is_err();
        }
    }
    let mut lines = Vec::new();
    for ((name, version, _), outcome) in subjects.iter().zip(&mut outcomes) {
        if outcome.failed {
            eprintln!("{name} broke, and is left out");
            continue;
        }
        lines.push(format!(
            "  {{\"name\": \"{name}\", \"version\": \"{version}\", {}}}",
            outcome.json()
        ));
    }
    let json = format!("[\n{}\n]\n", lines.join(",\n"));
    print!("{json}");
    std::fs::write(result, json).unwrap();
}
