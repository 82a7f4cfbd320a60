//! Schedules over processes that come, go and are killed, on every backend that outlives a process.
//!
//! Each process is this binary again, with `child` as its only test. It writes every run, and every
//! warning, into a journal that all processes of a test share.

// What the library must not do, a test may: there a panic is the verdict.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod child;
mod journal;

use std::path::PathBuf;
use std::process::Command;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use contend::Schedule;
use testbed::{
    MariaDbServer, Output, Process, RedisServer, TempDir, ZooKeeperServer, wait_until, within,
};

use journal::Run;

/// When a hung test is ended.
const HANG: Duration = Duration::from_secs(180);

/// How long a condition may take to come true on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// The period, where it is not the subject.
const PERIOD: Duration = Duration::from_secs(2);

/// How much closer than the period two runs may come: a tenth, and what a busy machine adds.
const NEARLY: Duration = Duration::from_millis(250);

/// Ttl and transition: what a leader that was killed takes with it.
const LEASE: (Duration, Duration) = (Duration::from_secs(4), Duration::from_secs(1));

/// The lease that a dead leader leaves behind, or the session that carries it, and a busy machine.
const FAIL_OVER: Duration = Duration::from_secs(25);

/// One journal, and the processes that write to it.
struct Fleet {
    url: String,
    mutex: String,
    period: Duration,
    folder: TempDir,
}

impl Fleet {
    fn new(url: &str, test: &str, period: Duration) -> Fleet {
        static COUNTER: AtomicU32 = AtomicU32::new(0);
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        Fleet {
            url: url.to_owned(),
            mutex: format!("{test}-{number}"),
            period,
            folder: TempDir::new(),
        }
    }

    /// Starts a process that runs the schedule; each run takes so long.
    fn start(&self, takes: Duration) -> Process {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "child::child", "--nocapture", "--test-threads=1"])
            .env(child::URL, &self.url)
            .env(child::MUTEX, &self.mutex)
            .env(child::PERIOD_MS, self.period.as_millis().to_string())
            .env(child::TAKES_MS, takes.as_millis().to_string())
            .env(child::JOURNAL, self.journal());
        Process::spawn(&command, &Output::Pipe).unwrap()
    }

    fn journal(&self) -> PathBuf {
        self.folder.path().join("journal")
    }

    fn runs(&self) -> Vec<Run> {
        journal::runs(&self.journal())
    }

    /// Ends a process in good order.
    fn stop(process: &Process) {
        drop(process.take_stdin());
        let status = process.wait(PATIENCE).expect("it stops");
        assert!(status.success(), "{status}");
    }

    /// Waits for the next run that begins after there were `before` of them.
    fn run_after(&self, before: usize) -> Run {
        wait_until(PATIENCE, "a run begins", || self.runs().len() > before);
        self.runs()[before]
    }

    /// What the log says of runs that could not be recorded: the next leader does not know of them.
    fn unrecorded(&self) -> Vec<String> {
        let mut warnings = journal::warnings(&self.journal());
        let is_unsupported = |line: &String| line.contains("not available on this backend");
        warnings.retain(|line| line.contains("cannot record a run") && !is_unsupported(line));
        warnings
    }

    /// Checks and prints what the journal has.
    fn check(&self, what: &str) {
        let runs = self.runs();
        let first = runs.first().expect("a run").began;
        let at: Vec<String> = runs
            .iter()
            .map(|run| format!("{:.3}", (run.began - first).as_secs_f64()))
            .collect();
        let scheme = self.url.split(':').next().unwrap_or_default();
        println!(
            "{scheme}: {what}: {} runs at {} s",
            runs.len(),
            at.join(", ")
        );
        for line in journal::warnings(&self.journal()) {
            println!("    {line}");
        }
        // A busy machine may not record a run in time.
        let all_recorded = self.unrecorded().is_empty();
        for pair in runs.windows(2) {
            assert!(pair[1].fence >= pair[0].fence, "{runs:?}");
            let apart = pair[1].began - pair[0].began;
            let new_leader = pair[0].pid != pair[1].pid;
            let may_be_early = new_leader && !all_recorded;
            assert!(
                apart >= self.period - NEARLY || may_be_early,
                "{apart:?} apart: {runs:?}"
            );
        }
    }
}

/// Processes one after the other, 1.5 s each: without a record of runs, a run each.
fn rolling_restarts_keep_the_period(url: &str) {
    let fleet = Fleet::new(url, "rolling", Duration::from_secs(4));
    // Of 1.5 s, a busy machine may leave a process none to lead in.
    let deadline = Instant::now() + PATIENCE;
    while fleet.runs().len() < 3 {
        assert!(Instant::now() < deadline, "{:?}", fleet.runs());
        let process = fleet.start(Duration::ZERO);
        thread::sleep(Duration::from_millis(1_500));
        Fleet::stop(&process);
    }
    fleet.check("processes of 1.5 s each, period 4 s");
}

/// The next leader goes on where the dead one was: a period after its last run, or as soon as it leads. A run is
/// recorded when it begins, so that one in which its leader dies counts.
fn killed_leader_is_followed(url: &str, takes: Duration, dies_after: Duration) {
    let fleet = Fleet::new(url, "killed", PERIOD);
    let leader = fleet.start(takes);
    let last = fleet.run_after(0);
    let next = fleet.start(Duration::ZERO);
    thread::sleep(dies_after);
    leader.kill();
    let first = fleet.run_after(1);
    assert_eq!((last.pid, first.pid), (leader.pid(), next.pid()));
    fleet.check(&format!(
        "killed {dies_after:?} after a run of {takes:?} began"
    ));
    let apart = first.began - last.began;
    assert!(apart <= PERIOD + FAIL_OVER, "{apart:?} apart");
    Fleet::stop(&next);
}

/// A server that keeps what it acknowledged is restarted in the middle: the beat goes on.
fn restarted_server_does_not_run_twice(url: &str, restart: impl Fn()) {
    let fleet = Fleet::new(url, "restart", PERIOD);
    let processes = [fleet.start(Duration::ZERO), fleet.start(Duration::ZERO)];
    let last = fleet.run_after(1);
    let down = Instant::now();
    restart();
    println!("    the server was away for {:?}", down.elapsed());
    let next = fleet.run_after(2);
    fleet.check("the server restarted after the second run");
    let apart = next.began - last.began;
    assert!(
        apart <= PERIOD + FAIL_OVER + PATIENCE / 2,
        "{apart:?} apart"
    );
    for process in &processes {
        Fleet::stop(process);
    }
}

/// Shows a fact on all backends at once: most of it is waiting.
fn on_every_backend(fact: impl Fn(&str) + Sync) {
    let (redis, mysql, zk) = (redis_url, mysql_url, zk_url);
    at_once([&|| fact(&redis()), &|| fact(&mysql()), &|| fact(&zk())]);
}

fn at_once(facts: [&(dyn Fn() + Sync); 3]) {
    within(HANG, || {
        thread::scope(|scope| {
            for fact in facts {
                scope.spawn(fact);
            }
        });
    });
}

#[test]
fn rolling_restarts() {
    on_every_backend(rolling_restarts_keep_the_period);
}

#[test]
fn killed_between_runs() {
    let dies_after = Duration::from_millis(500);
    on_every_backend(|url| killed_leader_is_followed(url, Duration::ZERO, dies_after));
}

#[test]
fn killed_in_a_run() {
    let (takes, dies_after) = (Duration::from_millis(1_500), Duration::from_millis(700));
    on_every_backend(|url| killed_leader_is_followed(url, takes, dies_after));
}

/// Servers of their own: the others must not be restarted under their tests.
#[test]
fn restarted_server() {
    let redis = || {
        let server = RedisServer::start_with(&["--appendonly", "yes", "--appendfsync", "always"]);
        let url = with_lease(&server.url());
        restarted_server_does_not_run_twice(&url, || {
            server.kill();
            // As long as the others take to start.
            thread::sleep(Duration::from_secs(1));
            server.restart();
        });
    };
    let mysql = || {
        let server = MariaDbServer::start();
        let url = server.create_database("schedule");
        let url = with_lease(&format!("{url}?create_table=true"));
        restarted_server_does_not_run_twice(&url, || {
            server.kill();
            server.restart();
        });
    };
    let zookeeper = || {
        let server = ZooKeeperServer::start();
        restarted_server_does_not_run_twice(&with_lease(&server.url()), || {
            server.kill();
            server.restart();
        });
    };
    at_once([&redis, &mysql, &zookeeper]);
}

/// The longest gap between two runs is 366 days: else one that was missed is not made up for.
#[test]
fn record_outlives_the_longest_gap() {
    let server = RedisServer::start();
    let factory = contend::connect(&server.url()).unwrap();
    let (sender, runs) = crossbeam_channel::unbounded();
    let schedule = Schedule::every(Duration::from_secs(1));
    let scheduler = factory.scheduler("kept");
    let scheduler = scheduler.start(schedule, move |_| sender.send(())).unwrap();
    runs.recv_timeout(PATIENCE).unwrap();
    let left = server.cli(&["PTTL", "simba:{kept}:run"]);
    scheduler.stop().unwrap();
    let left = Duration::from_millis(left.trim().parse().unwrap());
    assert!(left > Duration::from_secs(366 * 24 * 3600), "{left:?}");
}

/// A server that lets us lead, but not write when a run began: the work runs, the log says so, and a new leader
/// does not know of the run.
#[test]
fn record_run_fails() {
    within(HANG, || {
        let server = RedisServer::start();
        let rule = "ACL SETUSER half on >pw &* +@all ~simba:{*} ~simba:{*}:contender ~simba:{*}:fence \
                    ~simba:{*}:token %R~simba:{*}:run";
        server.cli(&rule.split_whitespace().collect::<Vec<_>>());
        let url = server.url().replace("redis://", "redis://half:pw@");
        let fleet = Fleet::new(&with_lease(&url), "unrecorded", PERIOD);
        for runs in [2, 3] {
            let process = fleet.start(Duration::ZERO);
            fleet.run_after(runs);
            Fleet::stop(&process);
        }
        fleet.check("record_run fails, two processes");
        let unrecorded = fleet.unrecorded().len();
        assert!(unrecorded >= fleet.runs().len(), "{unrecorded}");
    });
}

fn redis_url() -> String {
    static SERVER: LazyLock<RedisServer> = LazyLock::new(RedisServer::start);
    with_lease(&SERVER.url())
}

fn mysql_url() -> String {
    static SERVER: LazyLock<MariaDbServer> = LazyLock::new(MariaDbServer::start);
    static URL: LazyLock<String> = LazyLock::new(|| SERVER.create_database("schedule"));
    with_lease(&format!("{}?create_table=true", *URL))
}

fn zk_url() -> String {
    static SERVER: LazyLock<ZooKeeperServer> = LazyLock::new(ZooKeeperServer::start);
    with_lease(&SERVER.url())
}

fn with_lease(url: &str) -> String {
    let separator = if url.contains('?') { '&' } else { '?' };
    let (ttl, transition) = (LEASE.0.as_millis(), LEASE.1.as_millis());
    format!("{url}{separator}ttl={ttl}ms&transition={transition}ms")
}
