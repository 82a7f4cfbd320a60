//! A long run with light faults: 100 services and 20 lockers in one process, watched from outside. What grows there or
//! on the server leaks.

use std::fmt::Write as _;
use std::fs;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use contend::Factory;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use testbed::{Output, Process};

use crate::contender::until_input_ends;
use crate::ground::{Fault, Ground};
use crate::stage::{Servers, Stage};

const SERVICES: usize = 100;
const LOCKERS: usize = 20;
/// Each mutex has this many contenders.
const PER_MUTEX: usize = 4;

/// How often is looked.
const EVERY: Duration = Duration::from_secs(5);

/// The variable of the environment with the URL for the process that is watched.
const URL: &str = "CONTEND_SOAK_URL";

/// What is watched over time: a name, and a value for each look.
#[derive(Clone, Debug)]
pub struct Series {
    name: &'static str,
    values: Vec<f64>,
}

impl Series {
    /// The averages over the first and the last third.
    fn thirds(&self) -> (f64, f64) {
        let average = |values: &[f64]| values.iter().sum::<f64>() / values.len().max(1) as f64;
        let third = (self.values.len() / 3).max(1);
        let last = &self.values[self.values.len() - third..];
        (average(&self.values[..third]), average(last))
    }

    fn most(&self) -> f64 {
        self.values.iter().copied().fold(f64::MIN, f64::max)
    }
}

/// What a soak showed.
#[derive(Debug)]
pub struct Soaked {
    pub ground: Ground,
    series: Vec<Series>,
    faults: usize,
}

/// Runs a soak for `lasts`.
pub fn run(ground: Ground, lasts: Duration, seed: u64) -> Soaked {
    let stage = Stage::start(ground, 1);
    let mut command = Command::new(std::env::current_exe().expect("a test knows itself"));
    command
        .args(["--exact", "soaked", "--ignored", "--nocapture"])
        .env(URL, stage.url_with(0, "ttl=5000ms&transition=2000ms"));
    let process = Process::spawn(&command, &Output::Pipe).expect("a process to watch");
    if let Some(mut output) = process.take_stdout() {
        thread::spawn(move || std::io::copy(&mut output, &mut std::io::sink()));
    }
    let input = process.take_stdin();
    let over = AtomicBool::new(false);
    let mut series: Vec<Series> = Vec::new();
    let faults = thread::scope(|scope| {
        let faults = scope.spawn(|| light_faults(&stage, seed, &over));
        let began = Instant::now();
        // Until all have found their places, everything grows.
        thread::sleep(Duration::from_secs(15).min(lasts / 4));
        while began.elapsed() < lasts {
            assert!(process.is_running(), "the watched process has ended");
            let mut look = process_facts(process.pid());
            // A server that is paused at this moment answers when it is not.
            look.extend(leftovers(&stage.servers));
            for (index, (name, value)) in look.into_iter().enumerate() {
                if series.len() <= index {
                    let values = Vec::new();
                    series.push(Series { name, values });
                }
                series[index].values.push(value);
            }
            thread::sleep(EVERY.min(lasts / 20));
        }
        over.store(true, Ordering::SeqCst);
        faults.join().expect("the faults")
    });
    drop(input);
    let status = process.wait(Duration::from_secs(60));
    let succeeded = status.is_some_and(|status| status.success());
    assert!(succeeded, "the watched process ended with {status:?}");
    Soaked {
        ground,
        series,
        faults,
    }
}

fn light_faults(stage: &Stage, seed: u64, over: &AtomicBool) -> usize {
    let mut random = StdRng::seed_from_u64(seed);
    let mut count = 0;
    while !over.load(Ordering::SeqCst) {
        let pause = Duration::from_millis(random.random_range(2_000..8_000));
        let until = Instant::now() + pause;
        while Instant::now() < until && !over.load(Ordering::SeqCst) {
            thread::sleep(Duration::from_millis(50));
        }
        let fault = [
            Fault::Cut,
            Fault::Reset,
            Fault::Delay,
            Fault::LoseReply,
            Fault::HoleToClient,
            Fault::FlushScripts,
            Fault::KillSubscribers,
        ][random.random_range(0..7)];
        stage.suffer(fault, Some(0), &mut random);
        count += 1;
    }
    stage.heal();
    count
}

/// Threads, files and memory of a process.
fn process_facts(pid: u32) -> Vec<(&'static str, f64)> {
    let files = fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count);
    vec![
        ("threads", testbed::threads(pid) as f64),
        ("fds", files as f64),
        ("RSS MiB", testbed::rss_kib(pid) as f64 / 1024.0),
    ]
}

/// What there is on the server: queue entries, rows, nodes, subscriptions, connections.
fn leftovers(servers: &Servers) -> Vec<(&'static str, f64)> {
    let number = |text: &str| text.trim().parse::<f64>().unwrap_or(0.0);
    match servers {
        Servers::Redis(server) => {
            let count = |args: &[&str]| server.cli(args).lines().count() as f64;
            let keys = server.cli(&["KEYS", "*:contender"]);
            let queues = keys.lines().map(|key| number(&server.cli(&["ZCARD", key])));
            vec![
                ("keys", count(&["KEYS", "*"])),
                ("queue entries", queues.sum()),
                ("channels", count(&["PUBSUB", "CHANNELS"])),
                ("connections", count(&["CLIENT", "LIST"])),
            ]
        }
        Servers::MySql(server) => {
            let one = |sql: &str| number(&server.sql(&format!("SELECT {sql}")));
            let connected = "COUNT(*) FROM information_schema.processlist WHERE db = 'campaign'";
            let bytes = "COALESCE(SUM(LENGTH(owner_id)), 0) FROM campaign.simba_mutex";
            vec![
                ("rows", one("COUNT(*) FROM campaign.simba_mutex")),
                ("bytes in rows", one(bytes)),
                ("connections", one(connected)),
                (
                    "waiting connections",
                    one(&format!("{connected} AND state = 'User lock'")),
                ),
            ]
        }
        Servers::Zk(server) => {
            let facts = server.four_letter("mntr").unwrap_or_default();
            let fact = |name: &str| {
                let mut lines = facts.lines().filter_map(|line| line.strip_prefix(name));
                lines.next().map_or(0.0, number)
            };
            vec![
                ("nodes", fact("zk_znode_count")),
                ("ephemeral nodes", fact("zk_ephemerals_count")),
                ("watches", fact("zk_watch_count")),
                ("connections", fact("zk_num_alive_connections")),
            ]
        }
        _ => vec![],
    }
}

/// The process that is watched. It ends with its standard input.
pub fn main() {
    let url = std::env::var(URL).expect("a URL");
    let stop = until_input_ends();
    let factory = contend::connect(&url).expect("a URL of the soak");
    thread::scope(|scope| {
        scope.spawn(|| serve(&factory, stop));
        for number in 0..LOCKERS {
            let factory = &factory;
            scope.spawn(move || lock(factory, number, stop));
        }
    });
}

/// Services that lead, and are stopped and started one after the other.
fn serve(factory: &Factory, stop: &AtomicBool) {
    let services = (0..SERVICES).map(|number| {
        let mutex = format!("service-{}", number / PER_MUTEX);
        let (service, events) = factory.contend(&mutex).channel().expect("a service");
        service.start().expect("a new service starts");
        (service, events)
    });
    let services: Vec<_> = services.collect();
    while !stop.load(Ordering::SeqCst) {
        for (_, events) in &services {
            while events.try_recv().is_ok() {}
        }
        if rand::random_range(0..20) == 0 {
            let (service, _) = &services[rand::random_range(0..SERVICES)];
            let _ = service.stop();
            let _ = service.start();
        }
        thread::sleep(Duration::from_millis(50));
    }
}

fn lock(factory: &Factory, number: usize, stop: &AtomicBool) {
    let mutex = format!("locker-{}", number / PER_MUTEX);
    let locker = factory.locker(&mutex).build().expect("a locker");
    while !stop.load(Ordering::SeqCst) {
        if let Ok(guard) = locker.try_lock_for(Duration::from_secs(2)) {
            thread::sleep(Duration::from_millis(rand::random_range(0..10)));
            drop(guard);
        }
        thread::sleep(Duration::from_millis(rand::random_range(10..100)));
    }
}

impl Soaked {
    /// The series that grew: the average of the last third lies above that of the first by more than a tenth and by
    /// more than what comes and goes.
    pub fn grown(&self) -> Vec<&'static str> {
        let grew = |series: &&Series| {
            let (first, last) = series.thirds();
            last > first * 1.1 + self.comes_and_goes(series)
        };
        self.series.iter().filter(grew).map(|it| it.name).collect()
    }

    /// By how much a series may rise without having grown.
    fn comes_and_goes(&self, series: &Series) -> f64 {
        let connections = self.series.iter().find(|it| it.name == "connections");
        match (self.ground, connections) {
            // The MySQL driver reads through a buffer of 4 MiB per connection from its beginning to its end before it
            // uses it again: memory comes to that, slowly, and not beyond.
            (Ground::MySql, Some(connections)) if series.name == "RSS MiB" => {
                4.0 * connections.most()
            }
            _ => 3.0,
        }
    }

    /// A table: each series at the beginning and at the end, and its bounds.
    pub fn table(&self) -> String {
        let mut text = format!(
            "soak {}: {SERVICES} services, {LOCKERS} lockers, {} faults\n\
             | | first third | last third | least | most |\n|---|---|---|---|---|\n",
            self.ground, self.faults,
        );
        for series in &self.series {
            let (first, last) = series.thirds();
            let least = series.values.iter().copied().fold(f64::MAX, f64::min);
            let (name, most) = (series.name, series.most());
            let _ = writeln!(
                text,
                "| {name} | {first:.1} | {last:.1} | {least:.1} | {most:.1} |"
            );
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_is_seen_and_what_comes_and_goes_is_not() {
        let soaked = |value: fn(u32) -> u32| Soaked {
            ground: Ground::Memory,
            series: vec![Series {
                name: "threads",
                values: (0..60).map(|look| f64::from(100 + value(look))).collect(),
            }],
            faults: 0,
        };
        assert_eq!(soaked(|look| look).grown(), ["threads"]);
        let flat = soaked(|look| look % 7);
        assert!(flat.grown().is_empty());
        assert!(flat.table().contains("| threads | 10"));
    }
}
