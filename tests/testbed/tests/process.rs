//! A child process obeys, and never outlives us.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::time::Duration;

use testbed::{Output, Process, is_alive, wait_until, within};

const LIMIT: Duration = Duration::from_secs(60);

fn victim(what: &str) -> Process {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ground-victim"));
    command.arg(what);
    Process::spawn(&command, &Output::Pipe).unwrap()
}

/// Also one that was started by a thread that has ended.
#[test]
fn servers_die_with_their_killed_parent() {
    within(2 * LIMIT, || {
        for what in ["redis", "mariadb", "zookeeper", "short-thread"] {
            let victim = victim(what);
            let mut line = String::new();
            let mut stdout = BufReader::new(victim.take_stdout().unwrap());
            stdout.read_line(&mut line).unwrap();
            let (pid, _port) = line.trim().split_once(' ').expect("a pid and a port");
            let pid = pid.parse().unwrap();
            assert!(is_alive(pid), "the server is there");
            victim.kill();
            wait_until(LIMIT, "the server is gone", || !is_alive(pid));
        }
    });
}

#[test]
fn paused_process_stands_still() {
    within(2 * LIMIT, || {
        let victim = victim("echo");
        let mut stdin = victim.take_stdin().unwrap();
        let mut stdout = BufReader::new(victim.take_stdout().unwrap());
        let mut hears = |text: &str| {
            let mut line = String::new();
            stdout.read_line(&mut line).unwrap();
            assert_eq!(line, text);
        };
        stdin.write_all(b"one\n").unwrap();
        hears("one\n");

        victim.pause();
        assert!(victim.is_running());
        let before = testbed::cpu_time(victim.pid());
        stdin.write_all(b"two\n").unwrap();
        assert_eq!(victim.wait(Duration::from_millis(50)), None);
        assert_eq!(testbed::cpu_time(victim.pid()), before);
        victim.resume();
        hears("two\n");
    });
}

#[test]
fn paused_process_can_be_terminated_and_killed() {
    within(2 * LIMIT, || {
        let terminated = victim("echo");
        terminated.pause();
        assert_eq!(terminated.terminate(LIMIT).signal(), Some(15));
        let killed = victim("echo");
        killed.pause();
        killed.kill();
        assert_eq!(killed.wait(LIMIT).unwrap().signal(), Some(9));
        // And nothing happens to a process that has ended.
        killed.kill();
        killed.resume();
        let dropped = victim("echo");
        let pid = dropped.pid();
        drop(dropped);
        assert!(!is_alive(pid));
    });
}

#[test]
fn hung_test_ends_and_says_where() {
    assert_eq!(within(LIMIT, || 42), 42);
    let mut command = Command::new(env!("CARGO_BIN_EXE_ground-victim"));
    let output = command.arg("hang").output().unwrap();
    assert!(!output.status.success());
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        message.contains("`main` was not done within 200ms"),
        "{message}"
    );
    assert!(message.contains("ground-victim.rs:"), "{message}");
}
