//! A rival in another language: a process that is told what to do, one line at a time, and answers
//! with one line of numbers.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{ChildStdin, ChildStdout, Command};
use std::time::Duration;

use ground::{Output, Process};

use crate::measure::{Subject, hold};

pub struct Worker {
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    round: usize,
    _process: Process,
}

impl Worker {
    /// Starts it; its first line is its version.
    pub fn start(
        interpreter: &str,
        script: &str,
        rival: &str,
        port: u16,
    ) -> Result<(String, Worker), String> {
        let script = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("others")
            .join(script);
        let mut command = Command::new(interpreter);
        command.arg(script).arg(rival).arg(port.to_string());
        let process = Process::spawn(&command, &Output::Pipe).map_err(|error| error.to_string())?;
        let (Some(input), Some(output)) = (process.take_stdin(), process.take_stdout()) else {
            return Err("no pipes".to_owned());
        };
        let mut worker = Worker {
            input,
            output: BufReader::new(output),
            round: 0,
            _process: process,
        };
        let version = worker.line();
        if version.is_empty() {
            return Err("it ended at once".to_owned());
        }
        Ok((version, worker))
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        let _ = self.output.read_line(&mut line);
        line.trim().to_owned()
    }

    fn ask(&mut self, order: &str) -> Vec<f64> {
        writeln!(self.input, "{order}").unwrap();
        self.input.flush().unwrap();
        let answer = self.line();
        assert!(!answer.is_empty(), "{order}: no answer");
        answer
            .split_whitespace()
            .map(|number| number.parse().unwrap())
            .collect()
    }
}

fn micros(numbers: Vec<f64>) -> Vec<Duration> {
    numbers
        .into_iter()
        .map(|number| Duration::from_secs_f64(number.max(0.0) / 1e6))
        .collect()
}

impl Subject for Worker {
    fn cycles(&mut self, count: usize) -> Vec<Duration> {
        micros(self.ask(&format!("cycles {count}")))
    }

    fn hand_offs(&mut self, count: usize) -> Vec<Duration> {
        let start = self.round * count;
        self.round += 1;
        let holds: Vec<String> = (start..start + count)
            .map(|number| hold(number).as_micros().to_string())
            .collect();
        micros(self.ask(&format!("handoffs {}", holds.join(" "))))
    }

    fn eight(&mut self, span: Duration) -> Vec<u64> {
        self.ask(&format!("eight {}", span.as_secs_f64()))
            .into_iter()
            .map(|count| count as u64)
            .collect()
    }
}
