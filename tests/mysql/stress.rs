//! Three processes with four contenders each, on one mutex and on four, who give up, are killed and lose
//! their connections: never two owners, and fences grow. Seconds by default; `CONTEND_STRESS_SECONDS=600`
//! for the long run.

use std::io::{BufRead, BufReader};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use crate::processes;
use crate::server::{database, ms, operator};
use contend::ErrorKind;
use mysql::prelude::Queryable;
use rand::RngExt;
use testbed::{Output, Process, within};

const CHILD: &str = "CONTEND_STRESS_CHILD";

/// The size of a test, from the environment.
pub fn size(variable: &str, default: u64) -> u64 {
    let size = std::env::var(variable);
    size.ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(default)
}

/// Not a test of its own: what the processes of the tests do.
#[test]
fn child() {
    let Ok(settings) = std::env::var(CHILD) else {
        return;
    };
    let settings: Vec<&str> = settings.split(' ').collect();
    let [role, url, count, seconds] = settings[..] else {
        panic!("{settings:?}");
    };
    let (count, seconds) = (count.parse().unwrap(), seconds.parse().unwrap());
    match role {
        "stress" => stress(url, count, seconds),
        "turns" => processes::take_turns(url, count, seconds),
        _ => processes::wait(url, count),
    }
}

fn stress(url: &str, mutexes: usize, seconds: u64) {
    let factory = contend::connect(&format!("{url}?ttl=4s&transition=2s")).unwrap();
    let end = Instant::now() + Duration::from_secs(seconds);
    let results: Vec<(usize, Duration, usize)> = thread::scope(|scope| {
        let contenders: Vec<_> = (0..4)
            .map(|number| {
                let factory = factory.clone();
                scope.spawn(move || contender(url, &factory, number, mutexes, end))
            })
            .collect();
        contenders
            .into_iter()
            .map(|contender| contender.join().unwrap())
            .collect()
    });
    let locks: Vec<usize> = results.iter().map(|result| result.0).collect();
    let longest = results.iter().map(|result| result.1).max().unwrap();
    let gave_up: usize = results.iter().map(|result| result.2).sum();
    println!(
        "RESULT {} {} {gave_up}",
        locks.iter().sum::<usize>(),
        longest.as_millis()
    );
}

fn contender(
    url: &str,
    factory: &contend::Factory,
    number: usize,
    mutexes: usize,
    end: Instant,
) -> (usize, Duration, usize) {
    let mut log = operator(url);
    let mut rng = rand::rng();
    let who = format!("{}-{number}", std::process::id());
    let lockers: Vec<_> = (0..mutexes)
        .map(|m| {
            factory
                .locker(format!("m{m}"))
                .id(format!("{who}-{m}"))
                .build()
                .unwrap()
        })
        .collect();
    let (mut locks, mut longest, mut gave_up) = (0, Duration::ZERO, 0);
    while Instant::now() < end {
        let mutex = rng.random_range(0..mutexes);
        let hasty = rng.random_bool(0.3);
        let timeout = if hasty {
            ms(rng.random_range(1..40))
        } else {
            Duration::from_secs(20)
        };
        let began = Instant::now();
        let guard = match lockers[mutex].try_lock_for(timeout) {
            Ok(guard) => guard,
            Err(error) => {
                assert!(error.is_transient(), "{error:?}");
                gave_up += usize::from(error.kind() == ErrorKind::Held);
                continue;
            }
        };
        if !hasty {
            longest = longest.max(began.elapsed());
        }
        locks += 1;
        let mark = "INSERT INTO log (mutex, who, fence, entered) VALUES (?, ?, ?, ?)";
        log.exec_drop(mark, (mutex, &who, guard.fence(), 1))
            .unwrap();
        thread::sleep(Duration::from_micros(rng.random_range(0..4_000)));
        let valid = guard.is_valid();
        log.exec_drop(
            mark,
            (mutex, &who, guard.fence(), if valid { 0 } else { 2 }),
        )
        .unwrap();
        drop(guard);
    }
    (locks, longest, gave_up)
}

/// Starts a process that plays a role with `count` mutexes or lockers.
pub fn spawn(role: &str, url: &str, count: usize, seconds: u64) -> Process {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "stress::child", "--nocapture"])
        .env(CHILD, format!("{role} {url} {count} {seconds}"));
    Process::spawn(&command, &Output::Pipe).unwrap()
}

/// Rules "belief ends on the local clock" and "fences strictly grow", over processes.
#[test]
fn processes_that_give_up_die_and_lose_connections_exclude_each_other() {
    let seconds = size("CONTEND_STRESS_SECONDS", 8);
    within(Duration::from_secs(seconds * 2 + 180), || {
        for mutexes in [1, 4] {
            run(mutexes, seconds / 2);
        }
    });
}

fn run(mutexes: usize, seconds: u64) {
    let url = database();
    let mut conn = operator(&url);
    conn.query_drop(
        "CREATE TABLE log (n BIGINT AUTO_INCREMENT PRIMARY KEY, mutex INT, who VARCHAR(64), \
         fence BIGINT UNSIGNED, entered INT)",
    )
    .unwrap();
    let end = Instant::now() + Duration::from_secs(seconds);
    let mut processes: Vec<Process> = (0..3)
        .map(|_| spawn("stress", &url, mutexes, seconds))
        .collect();
    let mut dead = Vec::new();
    let mut rng = rand::rng();
    let (mut kills, mut cuts) = (0, 0);
    while Instant::now() + ms(1_500) < end {
        thread::sleep(ms(rng.random_range(400..1_200)));
        if rng.random_bool(0.4) {
            let victim = rng.random_range(0..processes.len());
            let left = end
                .saturating_duration_since(Instant::now())
                .as_secs()
                .max(1);
            let killed =
                std::mem::replace(&mut processes[victim], spawn("stress", &url, mutexes, left));
            dead.push(killed.pid());
            killed.kill();
            kills += 1;
        } else {
            // Half of the connections that wait, or hold the name that is waited for.
            let waits: Vec<String> = conn
                .query(
                    "SELECT info FROM information_schema.processlist \
                     WHERE info LIKE 'SELECT GET_LOCK(%contend:wait:%'",
                )
                .unwrap();
            for statement in waits {
                let token = statement
                    .split("contend:wait:")
                    .nth(1)
                    .map(|rest| &rest[..18]);
                let Some(token) = token else { continue };
                for name in ["contend:", "contend:wait:"] {
                    if rng.random_bool(0.5) {
                        let sql = format!("KILL CONNECTION IS_USED_LOCK('{name}{token}')");
                        cuts += usize::from(conn.query_drop(sql).is_ok());
                    }
                }
            }
        }
    }
    let (mut locks, mut longest, mut gave_up) = (0, 0, 0);
    for process in &processes {
        let output = BufReader::new(process.take_stdout().unwrap());
        let result = output
            .lines()
            .map_while(Result::ok)
            .filter(|line| line.contains("RESULT"))
            .last();
        let result = result.expect("a process that was not killed reports");
        let numbers: Vec<u64> = result
            .split("RESULT")
            .nth(1)
            .unwrap()
            .split_whitespace()
            .map(|number| number.parse().unwrap())
            .collect();
        locks += numbers[0];
        longest = longest.max(numbers[1]);
        gave_up += numbers[2];
    }
    let overlaps = check(&mut conn, &dead);
    println!(
        "{mutexes} mutexes, {seconds} s, {kills} processes killed, {cuts} connections cut: {locks} locks \
         of the survivors, {gave_up} gave up, longest wait {longest} ms, overlaps {overlaps}"
    );
    assert_eq!(overlaps, 0);
    assert!(locks > 20, "{locks}");
    assert!(longest < 15_000, "{longest} ms");
    testbed::wait_until(Duration::from_secs(30), "nobody is left in a row", || {
        let left: Option<u64> = conn
            .query_first("SELECT COUNT(*) FROM simba_mutex WHERE waiters <> '' AND owner_id = ''")
            .unwrap();
        left == Some(0)
    });
}

/// How many entered while another one that lives was inside, or with a fence that did not grow.
fn check(conn: &mut mysql::Conn, dead: &[u32]) -> usize {
    let rows: Vec<(usize, String, u64, i64)> = conn
        .query("SELECT mutex, who, fence, entered FROM log ORDER BY n")
        .unwrap();
    let mut inside: std::collections::HashMap<usize, String> = Default::default();
    let mut fences: std::collections::HashMap<usize, u64> = Default::default();
    let mut overlaps = 0;
    for (mutex, who, fence, entered) in rows {
        if entered != 1 {
            inside.remove(&mutex);
            continue;
        }
        if let Some(other) = inside.get(&mutex) {
            let pid: u32 = other.split('-').next().unwrap().parse().unwrap();
            overlaps += usize::from(!dead.contains(&pid));
        }
        let last = fences.insert(mutex, fence).unwrap_or(0);
        overlaps += usize::from(fence <= last);
        inside.insert(mutex, who);
    }
    overlaps
}
