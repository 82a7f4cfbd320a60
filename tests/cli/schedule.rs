//! `contend schedule`: how its commands end, and how it ends itself.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use testbed::{TempDir, wait_until, within};

use crate::CONTEND;
use crate::backends::HANG;
use crate::program::{PATIENCE, Program, field};

#[test]
fn a_command_that_ends_because_of_a_stop_is_reported_with_its_own_code() {
    within(HANG, || {
        let clean = "trap 'exit 0' TERM; echo begun; while :; do sleep 0.05; done";
        let own = "trap 'exit 7' TERM; echo begun; while :; do sleep 0.05; done";
        let none = "echo begun; exec sleep 60";
        for (script, code) in [(clean, "0"), (own, "7"), (none, "143")] {
            let args = ["schedule", "m", "--every", "1h", "--", "sh", "-c", script];
            let mut schedule = Program::start("memory://", &args);
            schedule.says("begun");
            let (exit, lines) = schedule.terminate();
            let ended = format!("sh ended with code {code}");
            let is_said = lines.iter().any(|line| line.ends_with(&ended));
            assert!(exit == 0 && is_said, "{exit}: {lines:#?}");

            let mut schedule = Program::start("memory://", &[&["--json"], &args[..]].concat());
            schedule.says("begun");
            let (exit, lines) = schedule.terminate();
            let ended = lines.iter().find(|line| line.contains("\"ended\""));
            let said = ended.map(|line| field(line, "code"));
            assert_eq!((exit, said), (0, Some(code)), "{lines:#?}");
        }
    });
}

/// A `contend schedule` whose output nobody reads any more after the first line of standard output, if it has
/// no command; killed on drop.
struct Unread(Child);

impl Unread {
    fn start(every: &str, command: &[&str]) -> Unread {
        let mut child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "--", CONTEND])
            .args(["schedule", "m", "--every", every])
            .args(command)
            .env("CONTEND_URL", "memory://")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        if command.is_empty() {
            let mut stdout = BufReader::new(child.stdout.take().unwrap());
            let mut lines = String::new();
            // A run begins when it likes: it may come before the line that says it has started.
            for _ in 0..2 {
                stdout.read_line(&mut lines).unwrap();
            }
            assert!(lines.contains("started"), "{lines}");
        }
        drop((child.stdout.take(), child.stderr.take()));
        Unread(child)
    }

    fn terminate(&self) {
        kill_process(Pid::from_child(&self.0), Signal::TERM).unwrap();
    }

    fn code(&mut self) -> Option<i32> {
        wait_until(PATIENCE, "it ends", || self.0.try_wait().unwrap().is_some());
        self.0.wait().unwrap().code()
    }
}

impl Drop for Unread {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_schedule_without_a_command_ends_with_its_reader() {
    within(HANG, || {
        // As `contend schedule | head -2`: SIGPIPE.
        assert_eq!(Unread::start("100ms", &[]).code(), Some(128 + 13));
        // Told to end before it has noticed.
        let mut schedule = Unread::start("1h", &[]);
        schedule.terminate();
        assert_eq!(schedule.code(), Some(0));
    });
}

#[test]
fn a_schedule_with_a_command_runs_it_on_without_a_reader() {
    within(HANG, || {
        let folder = TempDir::new();
        let runs = folder.path().join("runs");
        let script = "echo run >> \"$0\"";
        let command = ["--", "sh", "-c", script, runs.to_str().unwrap()];
        let mut schedule = Unread::start("100ms", &command);
        wait_until(PATIENCE, "it runs again and again", || {
            fs::read_to_string(&runs).is_ok_and(|text| text.lines().count() >= 5)
        });
        schedule.terminate();
        assert_eq!(schedule.code(), Some(0));
    });
}
