//! `contend schedule`: how its commands end, and how it ends itself.

use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use testbed::{TempDir, wait_until, within};

use crate::backends::HANG;
use crate::program::{PATIENCE, Program, field};

/// A deploy does not cut a backup short: leadership is renewed until the command has ended.
#[test]
fn stopped_schedule_lets_its_command_finish() {
    within(HANG, || {
        let folder = TempDir::new();
        let end = folder.path().join("end");
        let script = "echo begun; until [ -e \"$0\" ]; do sleep 0.05; done; echo done; exit 7";
        let args = [
            "schedule",
            "m",
            "--every",
            "1h",
            "--ttl",
            "1s",
            "--transition",
            "1s",
            "--json",
        ];
        let command = ["--", "sh", "-c", script, end.to_str().unwrap()];
        let mut schedule = Program::start("memory://", &[&args[..], &command].concat());
        schedule.says("begun");
        schedule.signal(rustix::process::Signal::TERM);
        // Longer than the whole lease: without renewals, or with a SIGTERM, the command would be gone.
        thread::sleep(Duration::from_millis(2_500));
        std::fs::write(&end, "").unwrap();
        schedule.says("done");
        let (exit, lines) = schedule.ends();
        let ended = lines.iter().find(|line| line.contains("\"ended\""));
        let code = ended.map(|line| field(line, "code"));
        assert_eq!((exit, code), (0, Some("7")), "{lines:#?}");
    });
}

#[test]
fn stop_within_ends_command() {
    within(HANG, || {
        let clean = "trap 'exit 0' TERM; echo begun; while :; do sleep 0.05; done";
        let plain = "echo begun; exec sleep 60";
        let deaf = "trap '' TERM; echo begun; while :; do sleep 0.05; done";
        for (script, code) in [(clean, "0"), (plain, "143"), (deaf, "137")] {
            let args = [
                "schedule",
                "m",
                "--every",
                "1h",
                "--transition",
                "2s",
                "--json",
            ];
            let command = ["--stop-within", "300ms", "--", "sh", "-c", script];
            let mut schedule = Program::start("memory://", &[&args[..], &command].concat());
            schedule.says("begun");
            let (exit, lines) = schedule.terminate();
            let ended = lines.iter().find(|line| line.contains("\"ended\""));
            let said = ended.map(|line| field(line, "code"));
            assert_eq!((exit, said), (0, Some(code)), "{lines:#?}");
        }
    });
}

#[test]
fn schedule_runs_on_its_days_alone() {
    within(HANG, || {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        // Long enough for two programs to start on a busy machine.
        let soon = now.as_secs() + 8;
        let second = soon % 86_400;
        let time = format!(
            "{:02}:{:02}:{:02}",
            second / 3600,
            second / 60 % 60,
            second % 60
        );
        // 1970-01-01 was a Thursday.
        let mut days = ["thu", "fri", "sat", "sun", "mon", "tue", "wed"];
        days.rotate_left(usize::try_from(soon / 86_400 % 7).unwrap());
        let start = |mutex, days: &[&str]| {
            let days = days.join(",");
            let args = [
                "schedule",
                mutex,
                "--daily-at",
                &time,
                "--days",
                &days,
                "--json",
            ];
            Program::start("memory://", &args)
        };
        let mut others = start("others", &days[1..]);
        others.says("\"started\"");
        start("today", &days[..1]).says("\"run\"");
        let (code, lines) = others.terminate();
        assert_eq!(code, 0, "{lines:#?}");
        assert!(!lines.concat().contains("\"run\""), "{lines:#?}");
    });
}

#[test]
fn failed_command_is_reported_once() {
    within(HANG, || {
        for (command, code, failure) in [("false", "1", "ended"), ("/none", "127", "/none")] {
            let args = ["schedule", "m", "--every", "1h", "--json", "--", command];
            let mut schedule = Program::start("memory://", &args);
            schedule.says(failure);
            let (_, lines) = schedule.terminate();
            let said = lines.iter().filter(|line| line.contains(failure));
            assert_eq!(said.count(), 1, "{lines:#?}");
            let ended = lines.iter().find(|line| line.contains("\"ended\""));
            assert_eq!(ended.map(|line| field(line, "code")), Some(code));
        }
    });
}

/// The reader of its lines has gone: a command runs on all the same, and without one there is nothing to do.
#[test]
fn schedule_without_reader() {
    within(HANG, || {
        let schedule = ["schedule", "m", "--every", "100ms"];
        assert_eq!(
            Program::start_unread("memory://", &schedule).ends().0,
            128 + 13
        );
        let folder = TempDir::new();
        let runs = folder.path().join("runs");
        let command = [
            "--",
            "sh",
            "-c",
            "echo run >> \"$0\"",
            runs.to_str().unwrap(),
        ];
        let schedule = Program::start_unread("memory://", &[&schedule[..], &command].concat());
        wait_until(PATIENCE, "it runs again and again", || {
            std::fs::read_to_string(&runs).is_ok_and(|text| text.lines().count() >= 5)
        });
        assert_eq!(schedule.terminate().0, 0);
    });
}
