//! `contend elect`: processes whose output is compared line by line.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use testbed::{Output, Process, RedisServer, TempDir, within};

use crate::CONTEND;
use crate::backends::HANG;
use crate::program::{PATIENCE, Program, field, run};

/// By the times that are printed, no process leads before the last leader has released.
#[test]
fn printed_leaderships_do_not_overlap() {
    within(HANG, || {
        let server = RedisServer::start();
        let start = |id| Program::start(&server.url(), &["elect", "m", "--id", id, "--json"]);
        let mut ids = ["a", "b", "c"].into_iter().cycle();
        let mut leader = start(ids.next().unwrap());
        let mut times = Vec::new();
        let mut fences = Vec::new();
        let mut acquired = leader.says("\"acquired\"");
        for _ in 0..4 {
            let mut next = start(ids.next().unwrap());
            next.says("\"started\"");
            times.push(field(&acquired, "at_ms").parse::<u64>().unwrap());
            fences.push(field(&acquired, "fence").parse::<u64>().unwrap());
            let (code, lines) = leader.terminate();
            assert_eq!(code, 0, "{lines:#?}");
            let [.., released, stopped] = &lines[..] else {
                panic!("{lines:#?}")
            };
            assert_eq!(field(released, "event"), "released");
            assert_eq!(field(stopped, "event"), "stopped");
            assert_eq!(field(released, "fence"), field(&acquired, "fence"));
            times.push(field(released, "at_ms").parse().unwrap());
            acquired = next.says("\"acquired\"");
            leader = next;
        }
        assert!(times.is_sorted(), "{times:?}");
        assert!(fences.is_sorted_by(|a, b| a < b), "{fences:?}");
    });
}

/// The command takes the signal too, but it was meant for contend: the command is not started again.
#[test]
fn signal_while_command_is_ended_ends_election() {
    within(HANG, || {
        let server = RedisServer::start();
        let folder = TempDir::new();
        let end = folder.path().join("end");
        let script = "trap 'echo told' TERM; echo runs; until [ -e \"$0\" ]; do sleep 0.05; done";
        let elect = ["elect", "m", "--transition", "60s", "--", "sh", "-c"];
        let file = end.to_str().unwrap();
        let url = server.url();
        let mut leader = Program::start(&url, &[&elect[..], &[script, file]].concat());
        leader.says("runs");
        let (_, status, _) = run(&url, &["status", "m", "--json"]);
        let fence = field(&status, "fence");
        assert_eq!(run(&url, &["revoke", "m", "--fence", fence]).0, 0);
        leader.says("told");
        leader.signal(Signal::TERM);
        // By the signal that was passed on: contend has it.
        leader.says("told");
        std::fs::write(&end, "").unwrap();
        let (code, lines) = leader.ends();
        assert_eq!(code, 0, "{lines:#?}");
        let runs = lines.iter().filter(|line| *line == "runs").count();
        assert_eq!(runs, 1, "{lines:#?}");
    });
}

#[test]
fn nohup_survives_its_terminal() {
    within(HANG, || {
        let server = RedisServer::start();
        let url = server.url();
        // As nohup does, but whatever the streams of this test are.
        let mut command = Command::new("sh");
        let nohup = "trap '' HUP; exec \"$0\" elect m --json";
        command
            .args(["-c", nohup, CONTEND])
            .env("CONTEND_URL", &url);
        let leader = Process::spawn(&command, &Output::Pipe).unwrap();
        let stdout = BufReader::new(leader.take_stdout().unwrap());
        let mut lines = stdout.lines().map(|line| line.unwrap());
        let mut acquires = || {
            let line = lines.find(|line| field(line, "event") == "acquired");
            let line = line.expect("it goes on");
            field(&line, "fence").to_owned()
        };
        let fence = acquires();
        let pid = Pid::from_raw(i32::try_from(leader.pid()).unwrap()).unwrap();
        kill_process(pid, Signal::HUP).unwrap();
        // A leader that was ended does not lead again.
        assert_eq!(run(&url, &["revoke", "m", "--fence", &fence]).0, 0);
        assert_ne!(acquires(), fence);
        assert_eq!(leader.terminate(PATIENCE).code(), Some(0));
    });
}

/// A leader whose lines are not read any more steps down, in order.
#[test]
fn unread_election_ends() {
    within(HANG, || {
        let server = RedisServer::start();
        let url = server.url();
        let mut shell = Command::new("sh")
            .args(["-c", &format!("{CONTEND} elect unread | head -n 1")])
            .env("CONTEND_URL", &url)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        // The shell waits for both sides of the pipe.
        assert!(shell.wait().unwrap().success());
        let (_, out, _) = run(&url, &["status", "unread", "--json"]);
        assert_eq!(field(&out, "owner"), "null", "{out}");
    });
}
