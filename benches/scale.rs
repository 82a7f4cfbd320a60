//! How cost grows: with the services and the lockers of one process, with the waiters of one mutex and with
//! the processes that contend for it.
//!
//! `cargo bench --features redis,mysql,zk --bench scale [-- PART... BACKEND...] [-- --quick]`, where PART is
//! one of services, lockers, waiters, processes. Rows are printed, and kept as JSON for the report.
//!
//! What is measured runs in child processes, so that its threads, memory and processor time are its own.
#![allow(missing_docs)]

mod common;

use std::io::{BufRead, BufReader, Write};
use std::process::{ChildStdin, ChildStdout, Command};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use contend::{Factory, Guard, MutexContendService};
use testbed::{Output, Process, cpu_time, rss_kib, threads};

/// For services: short, so that a failover (ttl + transition) does not take all day.
const SHORT_LEASE: &str = "ttl=4s&transition=2s";
const SHORT_TTL_S: f64 = 4.0;

/// For the others: the default.
const LEASE: &str = "ttl=10s&transition=6s";
const TTL_S: f64 = 10.0;

const PATIENCE: Duration = Duration::from_secs(60);

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [role, part, url, mutex, count] = &arguments[..]
        && role == "--child"
    {
        child(part, url, mutex, count.parse().unwrap());
        return;
    }
    let has = |flag: &str| arguments.iter().any(|argument| argument == flag);
    let smoke = !has("--bench") || has("--test");
    let size = if smoke {
        Size::Smoke
    } else if has("--quick") {
        Size::Quick
    } else {
        Size::Full
    };
    let chosen = |names: &[&'static str]| -> Vec<&'static str> {
        let some: Vec<&str> = names.iter().copied().filter(|name| has(name)).collect();
        if some.is_empty() {
            names.to_vec()
        } else {
            some
        }
    };
    let parts = chosen(&["services", "lockers", "waiters", "processes"]);
    for name in chosen(&["memory", "redis", "mysql", "zk"]) {
        let Some(server) = Server::start(name) else {
            continue;
        };
        for &part in &parts {
            // What lives in a process cannot be shared by several.
            if name == "memory" && part == "processes" {
                continue;
            }
            let rows: Vec<String> = sizes(part, size)
                .iter()
                .map(|&count| {
                    let began = Instant::now();
                    let row = match part {
                        "services" => services(&server, name, count, size),
                        "lockers" => lockers(&server, count, size),
                        "waiters" => waiters(&server, name, count, size),
                        _ => processes(&server, count, size),
                    };
                    println!("{part} on {name}, {:.1?}: {row}", began.elapsed());
                    row
                })
                .collect();
            common::fact(
                &format!("scale-{part}-{name}"),
                format_args!("[{}]", rows.join(", ")),
            );
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Size {
    Smoke,
    Quick,
    Full,
}

impl Size {
    /// How long idle cost is looked at: more than the time between two renewals, a third of the ttl.
    fn idle(self, ttl_s: f64) -> Duration {
        match self {
            Size::Smoke => Duration::from_millis(200),
            Size::Quick => Duration::from_secs(1),
            Size::Full => Duration::from_secs_f64(ttl_s * 0.4),
        }
    }
}

fn sizes(part: &str, size: Size) -> &'static [usize] {
    match (size, part) {
        (Size::Smoke, _) => &[1],
        (Size::Quick, "processes") => &[1, 4],
        (Size::Quick, _) => &[1, 100],
        (Size::Full, "lockers") => &[1, 10, 100, 1_000, 10_000],
        (Size::Full, "processes") => &[1, 2, 4, 8, 16],
        (Size::Full, _) => &[1, 10, 100, 1_000],
    }
}

/// What was used between two looks.
struct Usage {
    began: Instant,
    requests: f64,
    ours: Duration,
    server: Duration,
}

impl Usage {
    fn of(server: &Server, children: &[Child]) -> Usage {
        Usage {
            began: Instant::now(),
            requests: server.requests(),
            ours: children.iter().map(|child| cpu_time(child.pid())).sum(),
            server: server.cpu(),
        }
    }

    /// Requests a second, and the percentage of a core that the children and the server used.
    fn since(server: &Server, children: &[Child], before: &Usage) -> String {
        let now = Usage::of(server, children);
        let span = (now.began - before.began).as_secs_f64();
        let percent = |before: Duration, after: Duration| {
            after.saturating_sub(before).as_secs_f64() / span * 100.0
        };
        format!(
            "\"requests_per_s\": {:.1}, \"cpu\": {:.2}, \"server_cpu\": {:.2}",
            (now.requests - before.requests) / span,
            percent(before.ours, now.ours),
            percent(before.server, now.server),
        )
    }
}

/// Threads, memory, connections and idle cost of a child that has what it should have.
fn idle(server: &Server, child: Child, span: Duration) -> (String, Child) {
    let (threads, rss) = (threads(child.pid()), rss_kib(child.pid()));
    let connections = server.connections();
    let children = [child];
    let before = Usage::of(server, &children);
    std::thread::sleep(span);
    let used = Usage::since(server, &children, &before);
    let [child] = children;
    let row = format!(
        "\"threads\": {threads}, \"rss_mib\": {:.1}, \"connections\": {connections}, {used}",
        rss as f64 / 1024.0
    );
    (row, child)
}

/// Services of one factory, each the owner of a mutex of its own.
fn services(server: &Server, name: &str, count: usize, size: Size) -> String {
    let url = server.url(SHORT_LEASE);
    let mut child = Child::start("services", &url, &format!("idle-{count}"), count);
    let start = child.hear("own");
    let (row, mut child) = idle(server, child, size.idle(SHORT_TTL_S));
    child.tell("stop");
    let stop = child.hear("stopped");
    drop(child);
    // It takes a whole lease each time: of the first and the last.
    let failover = if name == "memory" || size != Size::Full || (2..1_000).contains(&count) {
        "null".to_owned()
    } else {
        format!("{:.2}", failover(&url, count))
    };
    format!(
        "{{\"count\": {count}, {row}, \"start_s\": {start:.3}, \"stop_s\": {stop:.3}, \"failover_s\": {failover}}}"
    )
}

/// From the death of the owners' process until the last mutex has a new owner.
fn failover(url: &str, count: usize) -> f64 {
    let mutexes = format!("orphaned-{count}");
    let mut owners = Child::start("services", url, &mutexes, count);
    owners.hear("own");
    let mut heirs = Child::start("services", url, &mutexes, count);
    heirs.hear("wait");
    let began = Instant::now();
    owners.process.kill();
    heirs.hear("own");
    began.elapsed().as_secs_f64()
}

/// Lockers of one factory, each with a guard that is renewed.
fn lockers(server: &Server, count: usize, size: Size) -> String {
    let url = server.url(LEASE);
    let mut child = Child::start("lockers", &url, &format!("held-{count}"), count);
    let start = child.hear("own");
    let (row, mut child) = idle(server, child, size.idle(TTL_S));
    child.tell("stop");
    let lost = child.hear("lost");
    let stop = child.hear("stopped");
    format!(
        "{{\"count\": {count}, {row}, \"start_s\": {start:.3}, \"stop_s\": {stop:.3}, \"lost\": {lost}}}"
    )
}

/// Lockers that wait for one mutex, in two processes: what that costs while nothing happens, and how long
/// each hand-off takes once the owner unlocks and each waiter hands on at once.
fn waiters(server: &Server, name: &str, count: usize, size: Size) -> String {
    let url = server.url(LEASE);
    let mutex = format!("queue-{count}");
    let first = count.div_ceil(2);
    let crews = if name == "memory" {
        vec![count]
    } else {
        vec![first, count - first]
    };
    let mut children: Vec<Child> = crews
        .into_iter()
        .filter(|count| *count > 0)
        .map(|count| Child::start("waiters", &url, &mutex, count))
        .collect();
    let factory = contend::connect(&url).unwrap();
    let (rounds, settle) = match (size, count) {
        (Size::Full, 0..=1) => (30, 50),
        (Size::Full, 2..=10) => (10, 100),
        (Size::Full, 11..=100) => (4, 500),
        (Size::Full, _) => (1, 2_500),
        _ => (2, 100),
    };
    let owner = factory.locker(&mutex).build().unwrap();
    let mut took = Vec::new();
    let mut waiting = String::new();
    let (mut cpu, mut hand_offs) = (Duration::ZERO, 0);
    for round in 0..rounds {
        // Of the memory backend, the waiters' process is the only one that has the mutex.
        let guard = (name != "memory").then(|| owner.lock().unwrap());
        for child in &mut children {
            child.tell("go");
            child.hear("going");
        }
        std::thread::sleep(Duration::from_millis(settle));
        if round == 0 {
            let before = Usage::of(server, &children);
            std::thread::sleep(size.idle(TTL_S) / 2);
            waiting = Usage::since(server, &children, &before);
        }
        let before = server.cpu();
        // When each began to hold, and when it began to unlock.
        let mut holds: Vec<(u128, u128)> = Vec::new();
        match guard {
            Some(guard) => {
                holds.push((0, now()));
                guard.unlock().unwrap();
            }
            None => children[0].tell("unlock"),
        }
        for child in &mut children {
            holds.extend(child.holds());
        }
        cpu += server.cpu() - before;
        hand_offs += count;
        holds.sort_unstable();
        took.extend(
            holds
                .windows(2)
                .map(|pair| pair[1].0.saturating_sub(pair[0].1)),
        );
    }
    took.sort_unstable();
    let last = took.len().saturating_sub(1);
    let at = |quantile: f64| {
        took.get((last as f64 * quantile) as usize)
            .copied()
            .unwrap_or(0)
    };
    format!(
        "{{\"count\": {count}, {waiting}, \"p50_us\": {:.1}, \"p99_us\": {:.1}, \"most_us\": {:.1}, \"server_cpu_us\": {:.1}}}",
        at(0.5) as f64 / 1e3,
        at(0.99) as f64 / 1e3,
        at(1.0) as f64 / 1e3,
        cpu.as_secs_f64() * 1e6 / hand_offs as f64,
    )
}

/// Processes that lock and unlock one mutex as fast as they can.
fn processes(server: &Server, count: usize, size: Size) -> String {
    let url = server.url(LEASE);
    let span = match size {
        Size::Full => Duration::from_secs(1),
        _ => Duration::from_millis(500),
    };
    let mut children: Vec<Child> = (0..count)
        .map(|_| Child::start("processes", &url, &format!("shared-{count}"), 1))
        .collect();
    for child in &mut children {
        child.hear("ready");
    }
    for child in &mut children {
        child.tell("go");
    }
    // Until all of them wait in the queue.
    std::thread::sleep(span / 4);
    let before = Usage::of(server, &children);
    for child in &mut children {
        child.tell("count");
    }
    std::thread::sleep(span);
    let used = Usage::since(server, &children, &before);
    for child in &mut children {
        child.tell("stop");
    }
    let counts: Vec<f64> = children.iter_mut().map(|child| child.hear("had")).collect();
    let most = counts.iter().copied().fold(0.0, f64::max);
    let least = counts.iter().copied().fold(f64::INFINITY, f64::min);
    format!(
        "{{\"count\": {count}, {used}, \"locks_per_s\": {:.1}, \"most_least\": {:.3}}}",
        counts.iter().sum::<f64>() / span.as_secs_f64(),
        most / least.max(1.0),
    )
}

fn now() -> u128 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.unwrap_or_default().as_nanos()
}

/// The other side of [`Child`].
fn child(part: &str, url: &str, mutex: &str, count: usize) {
    let factory = contend::connect(url).unwrap();
    match part {
        "services" => serve(&factory, mutex, count),
        "lockers" => hold(&factory, mutex, count),
        "waiters" => wait(&factory, mutex, count),
        _ => cycle(&factory, mutex),
    }
}

fn order() -> Option<String> {
    let mut line = String::new();
    let read = std::io::stdin().read_line(&mut line).unwrap();
    (read > 0).then(|| line.trim().to_owned())
}

/// Says when all services wait, and when all own.
fn serve(factory: &Factory, mutexes: &str, count: usize) {
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
    order();
    let began = Instant::now();
    for service in &services {
        service.stop().unwrap();
    }
    println!("stopped {}", began.elapsed().as_secs_f64());
}

fn hold(factory: &Factory, mutexes: &str, count: usize) {
    let began = Instant::now();
    let guards: Vec<Guard> = (0..count)
        .map(|number| {
            let locker = factory.locker(format!("{mutexes}-{number}")).build();
            locker.unwrap().lock().unwrap()
        })
        .collect();
    println!("own {}", began.elapsed().as_secs_f64());
    order();
    let lost = guards.iter().filter(|guard| !guard.is_valid()).count();
    println!("lost {lost}");
    let began = Instant::now();
    drop(guards);
    println!("stopped {}", began.elapsed().as_secs_f64());
}

/// Each waiter locks once for every `go`, and unlocks at once.
fn wait(factory: &Factory, mutex: &str, count: usize) {
    let memory = factory.realm().starts_with("memory");
    let lockers: Vec<_> = (0..count)
        .map(|_| factory.locker(mutex).build().unwrap())
        .collect();
    let owner = factory.locker(mutex).build().unwrap();
    while order().is_some() {
        let guard = memory.then(|| owner.lock().unwrap());
        let holds: Vec<(u128, u128)> = std::thread::scope(|scope| {
            let threads: Vec<_> = lockers
                .iter()
                .map(|locker| {
                    scope.spawn(move || {
                        let guard = locker.lock().unwrap();
                        let began = now();
                        let ended = now();
                        guard.unlock().unwrap();
                        (began, ended)
                    })
                })
                .collect();
            println!("going 0");
            let mut holds = Vec::new();
            if let Some(guard) = guard {
                order();
                holds.push((0, now()));
                guard.unlock().unwrap();
            }
            holds.extend(threads.into_iter().map(|thread| thread.join().unwrap()));
            holds
        });
        let holds: Vec<String> = holds.iter().map(|(a, b)| format!("{a}-{b}")).collect();
        println!("holds {}", holds.join(" "));
    }
}

fn cycle(factory: &Factory, mutex: &str) {
    let locker = factory.locker(mutex).build().unwrap();
    println!("ready 0");
    order();
    let (orders, ordered) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        while let Some(order) = order() {
            let _ = orders.send(order);
        }
    });
    let mut had: Option<u64> = None;
    loop {
        drop(locker.lock().unwrap());
        had = had.map(|had| had + 1);
        match ordered.try_recv() {
            Ok(order) if order == "count" => had = Some(0),
            Ok(_) => break,
            Err(_) => {}
        }
    }
    println!("had {}", had.unwrap_or(0));
}

/// A process of ours, told what to do line by line.
struct Child {
    process: Process,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Child {
    fn start(part: &str, url: &str, mutex: &str, count: usize) -> Child {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--child", part, url, mutex, &count.to_string()]);
        let process = Process::spawn(&command, &Output::Pipe).unwrap();
        Child {
            input: process.take_stdin().unwrap(),
            output: BufReader::new(process.take_stdout().unwrap()),
            process,
        }
    }

    fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Waits for a line that begins with `word`, and returns the rest of it.
    fn line(&mut self, word: &str) -> String {
        testbed::within(PATIENCE, || {
            loop {
                let mut line = String::new();
                let read = self.output.read_line(&mut line).unwrap();
                assert!(read > 0, "the child has ended before it said {word:?}");
                if let Some(rest) = line.strip_prefix(word) {
                    return rest.trim().to_owned();
                }
            }
        })
    }

    fn hear(&mut self, word: &str) -> f64 {
        self.line(word).parse().unwrap()
    }

    fn holds(&mut self) -> Vec<(u128, u128)> {
        let line = self.line("holds");
        let pairs = line.split(' ').filter_map(|pair| pair.split_once('-'));
        pairs
            .map(|(a, b)| (a.parse().unwrap(), b.parse().unwrap()))
            .collect()
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

    fn url(&self, lease: &str) -> String {
        match self {
            Server::Memory => format!("memory://?{lease}"),
            #[cfg(feature = "redis")]
            Server::Redis(server) => format!("{}?{lease}", server.url()),
            #[cfg(feature = "mysql")]
            Server::MySql(server) => format!("{}?{lease}", server.url("scale")),
            #[cfg(feature = "zk")]
            Server::ZooKeeper(server) => format!("{}?{lease}", server.url()),
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
