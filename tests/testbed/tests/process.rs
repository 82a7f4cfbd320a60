//! A child process obeys, and never outlives us.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::time::Duration;

use testbed::{Output, Process, Watchdog, is_alive, wait_until};

const LIMIT: Duration = Duration::from_secs(60);

fn victim(what: &str) -> Process {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ground-victim"));
    command.arg(what);
    Process::spawn(&command, &Output::Pipe).unwrap()
}

/// Kills a process with a server in it, and waits for the server to be gone.
fn dies_with_its_parent(what: &str) {
    let _watchdog = Watchdog::start(2 * LIMIT);
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

#[test]
fn a_redis_dies_with_its_killed_parent() {
    dies_with_its_parent("redis");
}

#[test]
fn a_mariadb_dies_with_its_killed_parent() {
    dies_with_its_parent("mariadb");
}

#[test]
fn a_zookeeper_dies_with_its_killed_parent() {
    dies_with_its_parent("zookeeper");
}

#[test]
fn a_server_outlives_the_thread_that_started_it_and_dies_with_the_process() {
    dies_with_its_parent("short-thread");
}

#[test]
fn a_paused_process_stands_still_until_it_is_resumed() {
    let _watchdog = Watchdog::start(2 * LIMIT);
    let victim = victim("echo");
    let mut stdin = victim.take_stdin().unwrap();
    let mut stdout = BufReader::new(victim.take_stdout().unwrap());
    let mut line = String::new();
    stdin.write_all(b"one\n").unwrap();
    stdout.read_line(&mut line).unwrap();
    assert_eq!(line, "one\n");

    victim.pause();
    assert!(victim.is_running());
    let before = testbed::cpu_time(victim.pid());
    stdin.write_all(b"two\n").unwrap();
    assert_eq!(victim.wait(Duration::from_millis(50)), None);
    assert_eq!(testbed::cpu_time(victim.pid()), before);

    victim.resume();
    line.clear();
    stdout.read_line(&mut line).unwrap();
    assert_eq!(line, "two\n");
}

#[test]
fn a_paused_process_can_be_terminated_and_killed() {
    let _watchdog = Watchdog::start(2 * LIMIT);
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
}

#[test]
fn a_dropped_process_is_gone() {
    let victim = victim("echo");
    let pid = victim.pid();
    assert!(is_alive(pid));
    drop(victim);
    assert!(!is_alive(pid));
}

#[test]
fn a_hung_test_ends_by_itself_and_says_where() {
    let output = Command::new(env!("CARGO_BIN_EXE_ground-victim"))
        .arg("hang")
        .output()
        .unwrap();
    assert!(!output.status.success());
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        message.contains("`main` was not done within 200ms"),
        "{message}"
    );
    assert!(message.contains("ground-victim.rs:"), "{message}");
}

#[test]
fn work_done_in_time_is_left_alone() {
    assert_eq!(testbed::within(LIMIT, || 42), 42);
}
