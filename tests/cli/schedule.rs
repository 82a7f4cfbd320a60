//! `contend schedule`: how its commands end, and how it ends itself.

use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::process::Signal;
use testbed::{TempDir, within};

use crate::program::{HANG, Program, field};

/// The code in the only line about a command's end.
fn code_in(lines: &[String]) -> &str {
    let mut ended = lines.iter().filter(|line| line.contains("\"ended\""));
    let code = field(ended.next().expect("it ended"), "code");
    assert!(ended.next().is_none(), "{lines:#?}");
    code
}

/// A deploy does not cut a backup short: leadership is renewed until the command has ended.
#[test]
fn stopped_schedule_lets_its_command_finish() {
    within(HANG, || {
        let folder = TempDir::new();
        let end = folder.path().join("end");
        let script = "echo begun; until [ -e END ]; do sleep 0.05; done; echo done; exit 7";
        let script = script.replace("END", end.to_str().unwrap());
        let line = "schedule m --every 1h --ttl 1s --transition 1s --json";
        let mut schedule = Program::start_script("memory://", line, &script);
        schedule.says("begun");
        schedule.signal(Signal::TERM);
        // Longer than the whole lease: without renewals, or with a SIGTERM, the command would be gone.
        thread::sleep(Duration::from_millis(2_500));
        std::fs::write(&end, "").unwrap();
        schedule.says("done");
        let (exit, lines) = schedule.ends();
        assert_eq!((exit, code_in(&lines)), (0, "7"), "{lines:#?}");
    });
}

#[test]
fn stop_within_ends_command() {
    within(HANG, || {
        let clean = "trap 'exit 0' TERM; echo begun; while :; do sleep 0.05; done";
        let plain = "echo begun; exec sleep 60";
        let deaf = "trap '' TERM; echo begun; while :; do sleep 0.05; done";
        for (script, code) in [(clean, "0"), (plain, "143"), (deaf, "137")] {
            let line = "schedule m --every 1h --transition 2s --json --stop-within 300ms";
            let mut schedule = Program::start_script("memory://", line, script);
            schedule.says("begun");
            let (exit, lines) = schedule.terminate();
            assert_eq!((exit, code_in(&lines)), (0, code), "{lines:#?}");
        }
    });
}

#[test]
fn schedule_runs_on_its_days_alone() {
    within(HANG, || {
        let now = || {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
            now.as_secs()
        };
        // Seconds in which two programs start. A busy machine that needs more is given more.
        let mut lead = 4;
        let others = loop {
            let soon = now() + lead;
            let second = soon % 86_400;
            let time = [second / 3600, second / 60 % 60, second % 60];
            let time = time.map(|part| format!("{part:02}")).join(":");
            // 1970-01-01 was a Thursday.
            let mut days = ["thu", "fri", "sat", "sun", "mon", "tue", "wed"];
            days.rotate_left(usize::try_from(soon / 86_400 % 7).unwrap());
            let start = |mutex, days: &[&str]| {
                let days = days.join(",");
                let line = format!("schedule {mutex} --daily-at {time} --days {days} --json");
                let mut program = Program::start("memory://", &line);
                program.says("\"started\"");
                program
            };
            let others = start("others", &days[1..]);
            let mut today = start("today", &days[..1]);
            if now() + 2 <= soon {
                today.says("\"run\"");
                break others;
            }
            lead *= 2;
        };
        let (code, lines) = others.terminate();
        assert_eq!(code, 0, "{lines:#?}");
        assert!(!lines.concat().contains("\"run\""), "{lines:#?}");
    });
}

#[test]
fn failed_command_is_reported_once() {
    within(HANG, || {
        for (command, code, failure) in [("false", "1", "ended"), ("/none", "127", "/none")] {
            let line = format!("schedule m --every 1h --json -- {command}");
            let mut schedule = Program::start("memory://", &line);
            schedule.says(failure);
            let (_, lines) = schedule.terminate();
            let said = lines.iter().filter(|line| line.contains(failure));
            assert_eq!((said.count(), code_in(&lines)), (1, code), "{lines:#?}");
        }
    });
}
