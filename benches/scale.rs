//! What 1, 10, 100 and 1,000 services on one factory take, and how that grows: threads, memory, server
//! connections, requests and processor time while idle, the time to start and stop all of them, and
//! the time until all have a new owner when their process is killed.
//!
//! `cargo bench --all-features --bench scale [-- BACKEND...]`; the rows are kept for the report.
//!
//! The services run in a child process, so that its memory is theirs; a second one stands by when the
//! first is killed.
#![allow(missing_docs)]

mod common;

use std::io::{BufRead, BufReader, Write};
use std::process::{ChildStdin, ChildStdout, Command};
use std::time::{Duration, Instant};

use contend::MutexContendService;
use testbed::{Output, Process, cpu_time, rss_kib, threads};

/// Short, so that a failover (ttl + transition) does not take all day. Requests while idle come at a
/// third of the ttl.
const LEASE: &str = "ttl=4s&transition=2s";

const PATIENCE: Duration = Duration::from_secs(60);

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [role, url, mutexes, count] = &arguments[..]
        && role == "--crew"
    {
        crew(url, mutexes, count.parse().unwrap());
        return;
    }
    let smoke = !arguments.iter().any(|argument| argument == "--bench")
        || arguments.iter().any(|argument| argument == "--test");
    let wanted: Vec<&String> = arguments
        .iter()
        .filter(|argument| !argument.starts_with("--"))
        .collect();
    let sizes: &[usize] = if smoke { &[1] } else { &[1, 10, 100, 1_000] };
    let idle = Duration::from_secs(if smoke { 1 } else { 4 });
    println!(
        "| backend | services | threads | RSS MiB | connections | requests/s idle | CPU % idle, ours | CPU % idle, server | start s | stop s | failover s |\n\
         |---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    );
    for name in ["memory", "redis", "mysql", "zk"] {
        if !wanted.is_empty() && !wanted.iter().any(|wanted| *wanted == name) {
            continue;
        }
        let Some(server) = Server::start(name) else {
            continue;
        };
        let rows: Vec<String> = sizes
            .iter()
            .map(|&count| measure(&server, name, count, idle))
            .collect();
        common::fact(&format!("scale-{name}"), rows.join("\n"));
    }
}

fn measure(server: &Server, name: &str, count: usize, idle: Duration) -> String {
    let mut crew = Crew::start(&server.url(), &format!("idle-{count}"), count);
    crew.hear("own");
    let start = crew.seconds();
    let (threads, rss) = (threads(crew.pid()), rss_kib(crew.pid()));
    let connections = server.connections();
    let (requests, ours, theirs, began) = (
        server.requests(),
        cpu_time(crew.pid()),
        server.cpu(),
        Instant::now(),
    );
    std::thread::sleep(idle);
    let span = began.elapsed().as_secs_f64();
    let per_second = (server.requests() - requests) / span;
    let percent = |before: Duration, after: Duration| (after - before).as_secs_f64() / span * 100.0;
    let (ours, theirs) = (
        percent(ours, cpu_time(crew.pid())),
        percent(theirs, server.cpu()),
    );
    crew.tell("stop");
    crew.hear("stopped");
    let stop = crew.seconds();
    drop(crew);
    // What lives in a process dies with it.
    let failover = if name == "memory" {
        "–".to_owned()
    } else {
        format!("{:.2}", failover(server, count))
    };
    format!(
        "| {name} | {count} | {threads} | {:.1} | {connections} | {per_second:.1} | {ours:.1} | {theirs:.1} | {start:.2} | {stop:.2} | {failover} |",
        rss as f64 / 1024.0,
    )
}

/// From the death of the owners' process until the last mutex has a new owner.
fn failover(server: &Server, count: usize) -> f64 {
    let mutexes = format!("orphaned-{count}");
    let mut owners = Crew::start(&server.url(), &mutexes, count);
    owners.hear("own");
    let mut heirs = Crew::start(&server.url(), &mutexes, count);
    heirs.hear("wait");
    let began = Instant::now();
    owners.process.kill();
    heirs.hear("own");
    began.elapsed().as_secs_f64()
}

/// The child: so many services, each for a mutex of its own. It says when all wait or own.
fn crew(url: &str, mutexes: &str, count: usize) {
    let factory = contend::connect(url).unwrap();
    let service = |number| factory.contend(format!("{mutexes}-{number}")).build();
    let services: Vec<MutexContendService> =
        (0..count).map(|number| service(number).unwrap()).collect();
    let began = Instant::now();
    for service in &services {
        service.start().unwrap();
    }
    let all = |what: &str, condition: &dyn Fn(&MutexContendService) -> bool| {
        while !services.iter().all(condition) {
            std::thread::sleep(Duration::from_millis(2));
        }
        println!("{what} {}", began.elapsed().as_secs_f64());
    };
    all("wait", &|service| service.state().after().has_owner());
    all("own", &|service| service.is_owner());
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let began = Instant::now();
    for service in &services {
        service.stop().unwrap();
    }
    println!("stopped {}", began.elapsed().as_secs_f64());
}

/// The parent's end of a child.
struct Crew {
    process: Process,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    last: f64,
}

impl Crew {
    fn start(url: &str, mutexes: &str, count: usize) -> Crew {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--crew", url, mutexes, &count.to_string()]);
        let process = Process::spawn(&command, &Output::Pipe).unwrap();
        Crew {
            input: process.take_stdin().unwrap(),
            output: BufReader::new(process.take_stdout().unwrap()),
            process,
            last: 0.0,
        }
    }

    fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Waits until it says so.
    fn hear(&mut self, word: &str) {
        let watchdog = testbed::Watchdog::start(PATIENCE);
        loop {
            let mut line = String::new();
            let read = self.output.read_line(&mut line).unwrap();
            assert!(read > 0, "the crew has ended before it said {word:?}");
            let mut words = line.split_whitespace();
            if words.next() == Some(word) {
                self.last = words.next().unwrap().parse().unwrap();
                break;
            }
        }
        drop(watchdog);
    }

    /// How long what it last said took.
    fn seconds(&self) -> f64 {
        self.last
    }

    fn tell(&mut self, word: &str) {
        writeln!(self.input, "{word}").unwrap();
    }
}

/// The server of a backend, and what it says about itself.
// One of it in a run.
#[allow(clippy::large_enum_variant)]
enum Server {
    Memory,
    #[cfg(feature = "redis")]
    Redis(testbed::RedisServer),
    #[cfg(feature = "mysql")]
    MySql(testbed::MariaDbServer),
    #[cfg(feature = "zk")]
    ZooKeeper(testbed::ZooKeeperServer),
}

impl Server {
    /// `None` where its feature is off.
    fn start(name: &str) -> Option<Server> {
        match name {
            "memory" => Some(Server::Memory),
            #[cfg(feature = "redis")]
            "redis" => Some(Server::Redis(testbed::RedisServer::start())),
            #[cfg(feature = "mysql")]
            "mysql" => {
                let server = testbed::MariaDbServer::start();
                server.create_database("scale");
                server.sql(&format!("USE scale; {}", contend::mysql::INIT_SQL));
                Some(Server::MySql(server))
            }
            #[cfg(feature = "zk")]
            "zk" => Some(Server::ZooKeeper(testbed::ZooKeeperServer::start())),
            _ => None,
        }
    }

    fn url(&self) -> String {
        match self {
            Server::Memory => format!("memory://?{LEASE}"),
            #[cfg(feature = "redis")]
            Server::Redis(server) => format!("{}?{LEASE}", server.url()),
            #[cfg(feature = "mysql")]
            Server::MySql(server) => format!("{}?{LEASE}", server.url("scale")),
            #[cfg(feature = "zk")]
            Server::ZooKeeper(server) => format!("{}?session_timeout=6s", server.url()),
        }
    }

    fn connections(&self) -> usize {
        match self {
            Server::Memory => 0,
            #[cfg(feature = "redis")]
            Server::Redis(server) => {
                let list = server.cli(&["CLIENT", "LIST"]);
                let all = list.lines().filter(|line| line.contains("id="));
                all.filter(|line| !line.contains("cmd=client")).count()
            }
            #[cfg(feature = "mysql")]
            Server::MySql(server) => server
                .sql(
                    "SELECT COUNT(*) FROM information_schema.processlist \
                     WHERE id <> CONNECTION_ID() AND user <> 'system user'",
                )
                .trim()
                .parse()
                .unwrap(),
            #[cfg(feature = "zk")]
            Server::ZooKeeper(server) => {
                let answer = server.four_letter("cons").unwrap();
                answer.lines().filter(|line| line.contains("sid=")).count()
            }
        }
    }

    /// What clients have asked so far; our own questions for this number are not worth mentioning.
    fn requests(&self) -> f64 {
        match self {
            Server::Memory => 0.0,
            #[cfg(feature = "redis")]
            Server::Redis(server) => {
                // Not those that the scripts make themselves.
                let info = server.cli(&["INFO", "commandstats"]);
                [
                    "eval",
                    "evalsha",
                    "subscribe",
                    "unsubscribe",
                    "ping",
                    "hello",
                ]
                .iter()
                .map(|command| number(&info, &format!("cmdstat_{command}:calls=")))
                .sum()
            }
            #[cfg(feature = "mysql")]
            Server::MySql(server) => {
                let status = server.sql("SHOW GLOBAL STATUS LIKE 'Questions'");
                number(&status, "Questions\t")
            }
            #[cfg(feature = "zk")]
            Server::ZooKeeper(server) => {
                let answer = server.four_letter("mntr").unwrap();
                number(&answer, "zk_packets_received\t")
            }
        }
    }

    fn cpu(&self) -> Duration {
        match self {
            Server::Memory => Duration::ZERO,
            #[cfg(feature = "redis")]
            Server::Redis(server) => cpu_time(server.pid()),
            #[cfg(feature = "mysql")]
            Server::MySql(server) => cpu_time(server.pid()),
            #[cfg(feature = "zk")]
            Server::ZooKeeper(server) => cpu_time(server.pid()),
        }
    }
}

/// The number that stands behind `label`, or zero.
#[cfg(any(feature = "redis", feature = "mysql", feature = "zk"))]
fn number(text: &str, label: &str) -> f64 {
    text.lines()
        .find_map(|line| line.trim().strip_prefix(label))
        .and_then(|rest| rest.split([',', '\t', ' ']).next()?.parse().ok())
        .unwrap_or(0.0)
}
