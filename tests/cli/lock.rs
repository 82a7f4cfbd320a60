//! `contend lock`: processes, signals and a server that goes away.

use crate::CONTEND;

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use testbed::{Output, Process, RedisServer, TempDir, is_alive, wait_until, within};

use crate::program::run;

const HANG: Duration = Duration::from_secs(120);
const PATIENCE: Duration = Duration::from_secs(40);

const TTL: Duration = Duration::from_millis(2_000);
const TRANSITION: Duration = Duration::from_millis(2_000);

/// `lock` on this server, running a shell script.
fn lock(server: &RedisServer, options: &[&str], script: &str) -> Process {
    let mut command = Command::new(CONTEND);
    command
        .args(["lock", "--url", &server.url(), "m"])
        .args(["--ttl", "2s", "--transition", "2s"])
        .args(options)
        .args(["--", "sh", "-c", script]);
    Process::spawn(&command, &Output::Pipe).unwrap()
}

/// The next line that the command writes, or "" at its end.
fn line(process: &Process) -> String {
    let mut line = String::new();
    let mut stdout = BufReader::new(process.take_stdout().unwrap());
    stdout.read_line(&mut line).unwrap();
    line.trim().to_owned()
}

fn code(process: &Process) -> Option<i32> {
    let status = process.wait(PATIENCE).expect("it ends");
    status.code()
}

#[test]
fn processes_exclude_each_other() {
    const TURNS: usize = 10;
    within(HANG, || {
        let server = RedisServer::start();
        let folder = TempDir::new();
        let script = format!(
            "cd {} && mkdir inside || echo overlap >> overlaps; echo $CONTEND_FENCE >> fences; \
             sleep 0.02; rmdir inside",
            folder.path().display()
        );
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for _ in 0..TURNS {
                        assert_eq!(
                            code(&lock(&server, &["--timeout", "30s"], &script)),
                            Some(0)
                        );
                    }
                });
            }
        });
        assert!(!folder.path().join("overlaps").exists());
        let fences = fs::read_to_string(folder.path().join("fences")).unwrap();
        let fences: Vec<u64> = fences.lines().map(|fence| fence.parse().unwrap()).collect();
        assert_eq!(fences.len(), 2 * TURNS);
        assert!(fences.is_sorted_by(|a, b| a < b), "{fences:?}");
    });
}

#[test]
fn exit_code_is_the_commands() {
    within(HANG, || {
        let server = RedisServer::start();
        assert_eq!(code(&lock(&server, &[], "exit 7")), Some(7));
        assert_eq!(code(&lock(&server, &[], "kill -TERM $$")), Some(128 + 15));

        let holder = lock(&server, &["--id", "the-holder"], "echo in; exec sleep 60");
        assert_eq!(line(&holder), "in");
        let refused = ["lock", "m", "--timeout", "300ms", "--", "true"];
        let (code_of_refused, _, err) = run(&server.url(), &refused);
        assert_eq!(code_of_refused, 75);
        assert_eq!(
            err,
            "contend: waiting: m: held by \"the-holder\"\n\
             contend: m: held by \"the-holder\", and was not free within 300ms\n"
        );
        // A signal is passed on to the command, and what it exits with comes back.
        assert_eq!(holder.terminate(PATIENCE).code(), Some(128 + 15));
        assert_eq!(code(&lock(&server, &["--timeout", "1s"], "true")), Some(0));
    });
}

/// Its command does not outlive it: it is gone before another process can be in.
#[test]
fn killed_holder_lets_next_in() {
    within(HANG, || {
        let server = RedisServer::start();
        let holder = lock(&server, &[], "sh -c 'echo $$; exec sleep 60'; true");
        let sleeper: u32 = line(&holder).parse().unwrap();
        let next = lock(&server, &[], "echo in");
        // In the queue, that is: nothing tells from outside, and it may come later just as well.
        thread::sleep(Duration::from_millis(500));
        assert!(is_alive(sleeper));
        let killed = Instant::now();
        holder.kill();
        wait_until(TTL, "its command was ended too", || !is_alive(sleeper));
        assert_eq!(line(&next), "in");
        let took = killed.elapsed();
        println!(
            "in {took:?} after the kill; ttl + transition is {:?}",
            TTL + TRANSITION
        );
        assert!(took < TTL + TRANSITION + Duration::from_secs(1), "{took:?}");
        assert_eq!(code(&next), Some(0));
    });
}

/// Rule 2: told at the end of the ttl, ended before the transition is over.
#[test]
fn lost_server_ends_command() {
    within(HANG, || {
        for (script, is_deaf) in [
            ("echo $$; exec sleep 60", false),
            ("trap '' TERM; echo $$; sleep 60; sleep 60", true),
        ] {
            let server = RedisServer::start();
            let holder = lock(&server, &[], script);
            let command: u32 = line(&holder).parse().unwrap();
            let lost = Instant::now();
            server.kill();
            wait_until(PATIENCE, "the command has ended", || !is_alive(command));
            let took = lost.elapsed();
            println!("ended {took:?} after the server was killed; deaf to SIGTERM: {is_deaf}");
            // The lease was renewed at the latest when the server died.
            assert!(took < TTL + TRANSITION, "{took:?}");
            assert_eq!(code(&holder), Some(76));
        }
    });
}

/// A command that is deaf to SIGTERM is gone before another process can lead.
#[test]
fn lost_leadership_ends_scheduled_command() {
    within(HANG, || {
        let server = RedisServer::start();
        let mut command = Command::new(CONTEND);
        command
            .args([
                "schedule",
                "m",
                "--every",
                "1h",
                "--ttl",
                "2s",
                "--transition",
                "2s",
            ])
            .args([
                "--",
                "sh",
                "-c",
                "trap '' TERM; echo $$; sleep 60; sleep 60",
            ])
            .env("CONTEND_URL", server.url());
        let leader = Process::spawn(&command, &Output::Pipe).unwrap();
        let pid: u32 = line(&leader).parse().unwrap();
        let lost = Instant::now();
        server.kill();
        wait_until(PATIENCE, "the command has ended", || !is_alive(pid));
        let took = lost.elapsed();
        println!("ended {took:?} after the server was killed");
        assert!(took < TTL + TRANSITION, "{took:?}");
        assert_eq!(leader.terminate(PATIENCE).code(), Some(0));
    });
}
