//! A hundred schedules of one second in one process for a minute: how late runs begin, what it costs this
//! process, and how many requests a run takes.
//!
//! `cargo bench --all-features --bench schedule [-- memory redis mysql zk]`
#![allow(missing_docs)]
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use contend::{Schedule, Scheduler};
use parking_lot::Mutex;
use testbed::{MariaDbServer, RedisServer, ZooKeeperServer, cpu_time, threads};

const SCHEDULES: usize = 100;
const PERIOD: Duration = Duration::from_secs(1);

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let smoke = !arguments.iter().any(|argument| argument == "--bench")
        || arguments.iter().any(|argument| argument == "--test");
    let wanted: Vec<&str> = arguments
        .iter()
        .map(String::as_str)
        .filter(|argument| !argument.starts_with("--"))
        .collect();
    let length = Duration::from_secs(if smoke { 2 } else { 60 });
    println!(
        "{SCHEDULES} schedules of {PERIOD:?} for {length:?}\n\
         | backend | runs | late p50 | p99 | most | CPU of a core | threads | requests per run |\n\
         |---|--:|--:|--:|--:|--:|--:|--:|"
    );
    let is_wanted = |name: &str| wanted.is_empty() || wanted.contains(&name);
    if is_wanted("memory") {
        measure("memory", "memory://schedules", length, || 0);
    }
    if is_wanted("redis") {
        let server = RedisServer::start();
        measure("redis", &server.url(), length, || {
            // Every request of ours is a script.
            calls(&server, "evalsha")
        });
    }
    if is_wanted("mysql") {
        let server = MariaDbServer::start();
        let url = format!("{}?create_table=true", server.create_database("schedules"));
        // Ours only: the client that asks sends statements too.
        measure("mysql", &url, length, || {
            let sql = "SHOW GLOBAL STATUS WHERE variable_name IN \
                       ('Com_stmt_execute', 'Com_update', 'Com_insert', 'Com_delete')";
            let counts = server.sql(sql);
            let counts = counts.split_whitespace().skip(1).step_by(2);
            counts.map(|count| count.parse::<u64>().unwrap()).sum()
        });
    }
    if is_wanted("zk") {
        let server = ZooKeeperServer::start();
        measure("zk", &server.url(), length, || {
            let stats = server.four_letter("mntr").unwrap();
            let line = stats
                .lines()
                .find(|line| line.starts_with("zk_packets_received"));
            let number = line.and_then(|line| line.split_whitespace().last());
            number.unwrap().parse().unwrap()
        });
    }
}

fn measure(backend: &str, url: &str, length: Duration, requests: impl Fn() -> u64) {
    let factory = contend::connect(url).unwrap();
    let lateness: Arc<Mutex<Vec<Duration>>> = Arc::default();
    let schedulers: Vec<Scheduler> = (0..SCHEDULES)
        .map(|number| {
            let lateness = Arc::clone(&lateness);
            factory
                .scheduler(format!("schedule-{number}"))
                .start(Schedule::every(PERIOD), move |context| {
                    lateness.lock().push(context.late());
                })
                .unwrap()
        })
        .collect();
    while !schedulers.iter().all(Scheduler::is_leader) {
        thread::sleep(Duration::from_millis(10));
    }
    // What they cost when they lead, not how they begin.
    thread::sleep(PERIOD);
    lateness.lock().clear();
    let me = std::process::id();
    let (cpu, asked) = (cpu_time(me), requests());
    thread::sleep(length);
    let mut late = std::mem::take(&mut *lateness.lock());
    let cpu = cpu_time(me) - cpu;
    let asked = requests() - asked;
    let threads = threads(me);
    drop(schedulers);
    late.sort_unstable();
    let at = |percent: usize| late[(late.len() - 1) * percent / 100];
    let runs = late.len();
    println!(
        "| {backend} | {runs} | {:?} | {:?} | {:?} | {:.1}% | {threads} | {:.2} |",
        at(50),
        at(99),
        at(100),
        100.0 * cpu.as_secs_f64() / length.as_secs_f64(),
        asked as f64 / runs as f64,
    );
}

/// How often a Redis server has run a command.
fn calls(server: &RedisServer, command: &str) -> u64 {
    let stats = server.cli(&["INFO", "commandstats"]);
    let prefix = format!("cmdstat_{command}:calls=");
    let line = stats.lines().find_map(|line| line.strip_prefix(&prefix));
    let number = line.and_then(|line| line.split(',').next());
    number.map_or(0, |number| number.parse().unwrap())
}
