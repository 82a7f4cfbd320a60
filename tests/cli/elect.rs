//! `contend elect`: processes whose output is compared line by line.

use crate::CONTEND;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::process::Command;
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use testbed::{Output, Process, RedisServer, TempDir, within};

use crate::program::{Program, run};

const HANG: Duration = Duration::from_secs(120);
const PATIENCE: Duration = Duration::from_secs(60);

fn elect(server: &RedisServer, id: &str, options: &[&str]) -> Process {
    let mut command = Command::new(CONTEND);
    command
        .args([
            "elect",
            "--url",
            &server.url(),
            "--mutex",
            "m",
            "--id",
            id,
            "--json",
        ])
        .args(options);
    Process::spawn(&command, &Output::Pipe).unwrap()
}

/// The text or number behind `"name":` in a line of `--json`.
fn field<'a>(line: &'a str, name: &str) -> &'a str {
    let (_, rest) = line.split_once(&format!("\"{name}\":")).expect(name);
    rest.split([',', '}']).next().unwrap().trim_matches('"')
}

/// Ends well, having printed this.
fn output(process: &Process) -> Vec<String> {
    let mut text = String::new();
    let mut stdout = process.take_stdout().unwrap();
    stdout.read_to_string(&mut text).unwrap();
    let status = process.wait(PATIENCE).expect("it ends");
    assert_eq!(status.code(), Some(0), "{text}");
    text.lines().map(str::to_owned).collect()
}

#[test]
fn by_the_times_that_are_printed_nobody_leads_before_the_last_leader_was_released() {
    within(HANG, || {
        let server = RedisServer::start();
        let processes =
            ["a", "b", "c"].map(|id| elect(&server, id, &["--lead", "20ms", "--for", "4s"]));
        // All are read at once: a full pipe would hold its contender up.
        let outputs = processes.map(|process| thread::spawn(move || output(&process)));
        // By fence: a leadership may be shorter than the millisecond in which it begins and ends.
        let mut terms: BTreeMap<u64, Vec<(String, String, u64)>> = BTreeMap::new();
        for line in outputs.into_iter().flat_map(|lines| lines.join().unwrap()) {
            let (who, event) = (field(&line, "contender"), field(&line, "event"));
            if let "acquired" | "released" = event {
                let fence = field(&line, "fence").parse().unwrap();
                let at = field(&line, "at_ms").parse().unwrap();
                let term = terms.entry(fence).or_default();
                term.push((who.to_owned(), event.to_owned(), at));
            }
        }
        let mut free_since = 0;
        for (fence, term) in &terms {
            let [(first, began, since), (second, ended, until)] = &term[..] else {
                panic!("fence {fence}: {term:?}");
            };
            assert_eq!((began.as_str(), ended.as_str()), ("acquired", "released"));
            assert_eq!(first, second, "fence {fence}: {term:?}");
            assert!(*since >= free_since, "fence {fence}: {terms:?}");
            free_since = *until;
        }
        for id in ["a", "b", "c"] {
            assert!(terms.values().any(|term| term[0].0 == id), "{terms:?}");
        }
    });
}

#[test]
fn a_leader_told_to_end_releases_first() {
    within(HANG, || {
        let server = RedisServer::start();
        // A lease that would outlast the patience of this test.
        let forever = ["--ttl", "600s", "--transition", "1s"];
        let first = elect(&server, "first", &forever);
        let stdout = BufReader::new(first.take_stdout().unwrap());
        let mut events = stdout.lines().map(|line| line.unwrap());
        assert!(events.any(|line| field(&line, "event") == "acquired"));
        assert_eq!(first.terminate(PATIENCE).code(), Some(0));
        let second = elect(&server, "second", &["--ttl", "600s", "--for", "1s"]);
        let events: Vec<String> = output(&second)
            .iter()
            .map(|line| field(line, "event").to_owned())
            .collect();
        assert_eq!(events, ["started", "acquired", "released", "stopped"]);
    });
}

/// The command takes the signal too, but it was meant for contend: the command is not started again.
#[test]
fn a_signal_while_the_command_is_being_ended_ends_the_election() {
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
fn what_was_started_with_nohup_survives_the_end_of_its_terminal() {
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

#[test]
fn the_summary_is_a_table_however_long_the_ids_are() {
    within(HANG, || {
        let id = "a-contender-of-a-long-name";
        let elect = ["elect", "--contenders", "12", "--for", "300ms", "--id", id];
        for args in [&elect[..], &elect[..5]] {
            let (code, out, err) = run("memory://", args);
            assert_eq!(code, 0, "{err}");
            let table: Vec<&str> = out
                .lines()
                .skip_while(|line| !line.starts_with("contender "))
                .take_while(|line| !line.is_empty())
                .collect();
            assert_eq!(table.len(), 13, "{out}");
            // Numbers and their heads end at the same place.
            let ends = |line: &str| {
                let cut = line.strip_suffix(" s").unwrap_or(line);
                let turns = cut.rsplit_once(' ').unwrap().0.trim_end().len();
                (turns, line.len())
            };
            for line in &table {
                assert_eq!(ends(line), ends(table[0]), "{out}");
            }
        }
    });
}
