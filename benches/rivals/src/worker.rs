//! Somebody who is measured, as a process: it is told what to do, one line at a time, and answers with
//! one line of numbers, or with `error: REASON`. Its first line is its version, a tab and its setting, and,
//! where it cannot wait for a lock, another tab and `alone`.

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write as _};
use std::path::Path;
use std::process::{ChildStdin, Command};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use testbed::{Output, Process};

use crate::measure::{Introduction, Subject};
use crate::rivals;

/// How long anybody may take for its first line.
const START: Duration = Duration::from_secs(20);

/// How long anybody may take for an answer: several times what the slowest of them takes.
const LIMIT: Duration = Duration::from_secs(20);

pub struct Worker {
    input: ChildStdin,
    lines: Receiver<String>,
    _process: Process,
}

impl Worker {
    /// Starts somebody by name.
    pub fn start(backend: &str, name: &str, url: &str) -> Result<(Introduction, Worker), String> {
        let address = url.split("://").nth(1).unwrap_or(url);
        let address = address.split(['/', '?']).next().unwrap_or(address);
        let port = address.rsplit(':').next().unwrap_or_default();
        let others = Path::new(env!("CARGO_MANIFEST_DIR")).join("others");
        let interpreter = |variable: &str| {
            let value = std::env::var_os(variable).filter(|value| !value.is_empty());
            value.ok_or_else(|| format!("{variable} is not set"))
        };
        let mut command;
        match name {
            "redis-py" | "kazoo" => {
                command = Command::new(interpreter("RIVALS_PYTHON")?);
                command.arg(others.join("locks.py")).arg(name).arg(port);
            }
            "npm redlock" | "npm redis-semaphore" => {
                command = Command::new(interpreter("RIVALS_NODE")?);
                command.arg(others.join("npm.js")).arg(name).arg(port);
            }
            "Curator" => {
                command = Command::new("java");
                command.arg("-cp").arg(interpreter("RIVALS_CLASSPATH")?);
                command.arg("Curator").arg(address);
            }
            // One of the Rust ones: this program again.
            _ => {
                let program = std::env::current_exe().map_err(|error| error.to_string())?;
                command = Command::new(program);
                command.args(["--as", backend, name, url]);
            }
        }
        Worker::spawn(&command)
    }

    fn spawn(command: &Command) -> Result<(Introduction, Worker), String> {
        let process = Process::spawn(command, &Output::Pipe).map_err(|error| error.to_string())?;
        let (Some(input), Some(output)) = (process.take_stdin(), process.take_stdout()) else {
            return Err("it has no pipes".to_owned());
        };
        let (sender, lines) = channel();
        // Ends with the process.
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        let worker = Worker {
            input,
            lines,
            _process: process,
        };
        let first = worker.line(START)?;
        let mut fields = first.split('\t').map(str::to_owned);
        let introduction = Introduction {
            version: fields.next().unwrap_or_default(),
            setting: fields.next().unwrap_or_default(),
            waits: fields.next().is_none(),
        };
        Ok((introduction, worker))
    }

    fn line(&self, limit: Duration) -> Result<String, String> {
        let line = self
            .lines
            .recv_timeout(limit)
            .map_err(|error| match error {
                RecvTimeoutError::Timeout => format!("no answer within {} s", limit.as_secs()),
                RecvTimeoutError::Disconnected => "it ended without an answer".to_owned(),
            })?;
        match line.strip_prefix("error: ") {
            Some(reason) => Err(reason.to_owned()),
            None => Ok(line),
        }
    }

    fn ask(&mut self, order: &str, count: usize) -> Result<Vec<f64>, String> {
        writeln!(self.input, "{order}")
            .and_then(|()| self.input.flush())
            .map_err(|error| format!("it takes no orders: {error}"))?;
        let answer = self.line(LIMIT)?;
        let numbers: Vec<f64> = answer
            .split_whitespace()
            .filter_map(|number| number.parse().ok())
            .collect();
        if numbers.len() == count {
            Ok(numbers)
        } else {
            Err(format!("it answered {answer:?}"))
        }
    }
}

impl Subject for Worker {
    fn cycles(&mut self, count: usize) -> Result<Vec<f64>, String> {
        self.ask(&format!("cycles {count}"), count)
    }

    fn hand_offs(&mut self, holds: &[Duration]) -> Result<Vec<f64>, String> {
        let mut order = "handoffs".to_owned();
        for hold in holds {
            let _ = write!(order, " {}", hold.as_micros());
        }
        self.ask(&order, holds.len())
    }

    fn eight(&mut self, settle: Duration, span: Duration) -> Result<Vec<u64>, String> {
        let (settle, span) = (settle.as_secs_f64(), span.as_secs_f64());
        let counts = self.ask(&format!("eight {settle} {span}"), 8)?;
        Ok(counts.into_iter().map(|count| count as u64).collect())
    }
}

/// The other end, for the Rust ones: follows orders until there are no more.
pub fn serve(backend: &str, rival: &str, url: &str) {
    // On whatever thread: the reason is the answer.
    std::panic::set_hook(Box::new(|panic| {
        let reason = panic.to_string();
        println!("error: {}", reason.lines().last().unwrap_or_default());
        std::process::exit(1);
    }));
    let mut subject = rivals::subject(backend, rival, url);
    let alone = if subject.waits { "" } else { "\talone" };
    println!("{}\t{}{alone}", subject.version, subject.setting);
    for line in std::io::stdin().lines().map_while(Result::ok) {
        let mut words = line.split_whitespace();
        let order = words.next().unwrap_or_default();
        let numbers: Vec<f64> = words.map(|word| word.parse().unwrap()).collect();
        let answer: Vec<String> = match (order, &numbers[..]) {
            ("cycles", [count]) => strings(&subject.cycles(*count as usize)),
            ("handoffs", holds) => strings(&subject.hand_offs(holds)),
            ("eight", [settle, span]) => strings(&subject.eight(*settle, *span)),
            _ => panic!("{line:?} is no order"),
        };
        println!("{}", answer.join(" "));
    }
}

fn strings(numbers: &[impl ToString]) -> Vec<String> {
    numbers.iter().map(ToString::to_string).collect()
}
