//! A running `contend`, whose lines are read as they come.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, unbounded};
use rustix::process::{Pid, Signal, kill_process};
use testbed::within;

use crate::CONTEND;

/// How long anything may take that is not expected to hang.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// When a hung test is ended.
pub const HANG: Duration = Duration::from_secs(240);

/// `contend` with its server in the environment; `line` has its arguments.
pub fn contend(url: &str, line: &str) -> Command {
    let mut command = Command::new(CONTEND);
    command.args(line.split_whitespace());
    command.env("CONTEND_URL", url).stdin(Stdio::null());
    command
}

/// Runs it to its end: exit code, standard output and standard error.
pub fn run(url: &str, line: &str) -> (i32, String, String) {
    end_of(&mut contend(url, line))
}

/// The same with a shell script as its command.
pub fn run_script(url: &str, line: &str, script: &str) -> (i32, String, String) {
    end_of(contend(url, line).args(["--", "sh", "-c", script]))
}

fn end_of(command: &mut Command) -> (i32, String, String) {
    // A program that does not end by itself fails here, and does not hang.
    let output: Output = within(PATIENCE, || command.output()).expect("contend runs");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("it writes text");
    let code = output.status.code().expect("it exits");
    (code, text(output.stdout), text(output.stderr))
}

/// The text or number behind `"name":` in a line of `--json`.
pub fn field<'a>(line: &'a str, name: &str) -> &'a str {
    let (_, rest) = line
        .split_once(&format!("\"{name}\":"))
        .unwrap_or_else(|| panic!("no {name} in {line}"));
    rest.split([',', '}']).next().unwrap().trim_matches('"')
}

/// The number behind `"name":`.
pub fn number(line: &str, name: &str) -> u64 {
    field(line, name).parse().expect("a number")
}

/// A running `contend`, killed on drop.
pub struct Program {
    child: Child,
    lines: Receiver<String>,
    seen: Vec<String>,
}

impl Program {
    pub fn start(url: &str, line: &str) -> Program {
        Program::spawn(url, line, &[])
    }

    /// Starts it with a shell script as its command.
    pub fn start_script(url: &str, line: &str, script: &str) -> Program {
        Program::spawn(url, line, &["--", "sh", "-c", script])
    }

    fn spawn(url: &str, line: &str, command: &[&str]) -> Program {
        // It does not outlive the test that started it, however that ends.
        let mut child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "--", CONTEND])
            .args(line.split_whitespace().chain(command.iter().copied()))
            .env("CONTEND_URL", url)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("contend starts");
        let (sender, lines) = unbounded();
        read(child.stdout.take().expect("a pipe"), sender.clone());
        read(child.stderr.take().expect("a pipe"), sender);
        Program {
            child,
            lines,
            seen: Vec::new(),
        }
    }

    /// The next line, of either stream, that contains `text`.
    #[track_caller]
    pub fn says(&mut self, text: &str) -> String {
        let end = Instant::now() + PATIENCE;
        while let Ok(line) = self.lines.recv_deadline(end) {
            self.seen.push(line.clone());
            if line.contains(text) {
                return line;
            }
        }
        panic!("it did not say {text:?}, but {:#?}", self.seen)
    }

    /// The number behind `text` in the next line that contains it.
    #[track_caller]
    pub fn says_number(&mut self, text: &str) -> u64 {
        let line = self.says(text);
        let (_, rest) = line.split_once(text).expect("it is in the line");
        let number = rest.split(|c: char| !c.is_ascii_digit()).next();
        number.unwrap_or_default().parse().expect("a number")
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("it is there");
    }

    /// Waits for its end: its exit code (128 + n for a signal) and all lines it wrote.
    #[track_caller]
    pub fn ends(mut self) -> (i32, Vec<String>) {
        let end = Instant::now() + PATIENCE;
        while let Ok(line) = self.lines.recv_deadline(end) {
            self.seen.push(line);
        }
        assert!(Instant::now() < end, "it did not end: {:#?}", self.seen);
        let status = self.child.wait().expect("it ends");
        let code = status.code().or(status.signal().map(|signal| 128 + signal));
        (code.expect("a code"), std::mem::take(&mut self.seen))
    }

    /// Ends it with SIGTERM.
    #[track_caller]
    pub fn terminate(self) -> (i32, Vec<String>) {
        self.signal(Signal::TERM);
        self.ends()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn read(stream: impl Read + Send + 'static, sender: Sender<String>) {
    thread::spawn(move || {
        for line in BufReader::new(stream).lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                break;
            }
        }
    });
}
