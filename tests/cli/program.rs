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

/// `contend` with its server in the environment.
pub fn contend(url: &str, args: &[&str]) -> Command {
    let mut command = Command::new(CONTEND);
    command.args(args).env("CONTEND_URL", url);
    command
}

/// Runs it to its end: exit code, standard output and standard error.
pub fn run(url: &str, args: &[&str]) -> (i32, String, String) {
    let mut command = contend(url, args);
    // A program that does not end by itself fails here, and does not hang.
    let output = within(PATIENCE, || command.stdin(Stdio::null()).output());
    let output: Output = output.expect("contend runs");
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

/// A running `contend`, killed on drop.
pub struct Program {
    child: Child,
    lines: Receiver<String>,
    seen: Vec<String>,
}

impl Program {
    pub fn start(url: &str, args: &[&str]) -> Program {
        let (mut child, sender, lines) = Program::spawn(url, args);
        read(child.stdout.take().expect("a pipe"), sender.clone());
        read(child.stderr.take().expect("a pipe"), sender);
        Program {
            child,
            lines,
            seen: Vec::new(),
        }
    }

    /// Starts it with streams whose readers have gone away.
    pub fn start_unread(url: &str, args: &[&str]) -> Program {
        let (mut child, _, lines) = Program::spawn(url, args);
        drop((child.stdout.take(), child.stderr.take()));
        Program {
            child,
            lines,
            seen: Vec::new(),
        }
    }

    fn spawn(url: &str, args: &[&str]) -> (Child, Sender<String>, Receiver<String>) {
        // It does not outlive the test that started it, however that ends.
        let child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "--", CONTEND])
            .args(args)
            .env("CONTEND_URL", url)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("contend starts");
        let (sender, lines) = unbounded();
        (child, sender, lines)
    }

    /// The next line, of either stream, that contains `text`.
    #[track_caller]
    pub fn says(&mut self, text: &str) -> String {
        self.says_within(PATIENCE, text)
            .unwrap_or_else(|| panic!("it did not say {text:?}, but {:#?}", self.seen))
    }

    /// As `says`, or `None` if it does not within `limit`.
    pub fn says_within(&mut self, limit: Duration, text: &str) -> Option<String> {
        let end = Instant::now() + limit;
        while let Ok(line) = self.lines.recv_deadline(end) {
            self.seen.push(line.clone());
            if line.contains(text) {
                return Some(line);
            }
        }
        None
    }

    /// The next line of either stream; `None` if there is none by `end`.
    pub fn next_by(&mut self, end: Instant) -> Option<String> {
        let line = self.lines.recv_deadline(end).ok()?;
        self.seen.push(line.clone());
        Some(line)
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
