//! `contend lock`: processes, signals and a server that goes away.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use testbed::{RedisServer, TempDir, is_alive, wait_until, within};

use crate::program::{HANG, PATIENCE, Program, run, run_script};

/// Ttl and transition.
const LEASE: Duration = Duration::from_secs(6);
const LOCK: &str = "lock m --ttl 2s --transition 4s";

fn pid(program: &mut Program) -> u32 {
    u32::try_from(program.says_number("pid ")).unwrap()
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
                        let (code, _, err) = run_script(&server.url(), LOCK, &script);
                        assert_eq!(code, 0, "{err}");
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
        let url = server.url();
        assert_eq!(run_script(&url, LOCK, "exit 7").0, 7);
        assert_eq!(run_script(&url, LOCK, "kill -TERM $$").0, 128 + 15);
        assert_eq!(run(&url, "lock m -- /no/such/program").0, 127);
        assert_eq!(run(&url, "lock m -- /etc/passwd").0, 126);

        let holder = format!("{LOCK} --id the-holder");
        let mut holder = Program::start_script(&url, &holder, "echo in; exec sleep 60");
        holder.says("in");
        let (code, _, err) = run(&url, "lock m --timeout 300ms -- true");
        assert_eq!(code, 75);
        assert_eq!(
            err,
            "contend: waiting: m: held by \"the-holder\"\n\
             contend: m: held by \"the-holder\", and was not free within 300ms\n"
        );
        // A signal is passed on to the command, and what it exits with comes back.
        assert_eq!(holder.terminate().0, 128 + 15);
        assert_eq!(run(&url, "lock m --timeout 1s -- true").0, 0);
    });
}

/// Its command does not outlive it: it is gone before another process can be in.
#[test]
fn killed_holder_lets_next_in() {
    within(HANG, || {
        let server = RedisServer::start();
        let script = "sh -c 'echo pid $$; exec sleep 60'; true";
        let mut holder = Program::start_script(&server.url(), LOCK, script);
        let sleeper = pid(&mut holder);
        let mut next = Program::start_script(&server.url(), LOCK, "echo in");
        next.says("waiting");
        let killed = Instant::now();
        holder.signal(Signal::KILL);
        wait_until(LEASE / 2, "its command was ended too", || {
            !is_alive(sleeper)
        });
        next.says("in");
        let took = killed.elapsed();
        println!("in {took:?} after the kill; the lease is {LEASE:?}");
        assert!(took < LEASE + Duration::from_secs(3), "{took:?}");
        assert_eq!(next.ends().0, 0);
    });
}

/// Told at the end of the ttl, and ended before the transition is over, even if it is deaf to SIGTERM.
#[test]
fn lost_server_ends_command() {
    within(HANG, || {
        let leader = LOCK.replace("lock", "schedule --every 1h");
        let deaf = "trap '' TERM; echo pid $$; sleep 60; sleep 60";
        for (line, script, code) in [
            (LOCK, "echo pid $$; exec sleep 60", 76),
            (LOCK, deaf, 76),
            (&leader, deaf, 0),
        ] {
            let server = RedisServer::start();
            let mut holder = Program::start_script(&server.url(), line, script);
            let command = pid(&mut holder);
            let lost = Instant::now();
            server.kill();
            wait_until(PATIENCE, "the command has ended", || !is_alive(command));
            let took = lost.elapsed();
            println!("{line}: {script}: ended {took:?} after the server was killed");
            // The lease was renewed at the latest when the server died.
            assert!(took < LEASE, "{took:?}");
            let ended = if code == 0 {
                holder.terminate()
            } else {
                holder.ends()
            };
            assert_eq!(ended.0, code, "{:#?}", ended.1);
        }
    });
}
