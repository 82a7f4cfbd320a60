//! Schedules over processes that come, go and are killed, on every backend that outlives a process.
//!
//! Each process is this binary again, with `child` as its only test. It writes every run, and every
//! warning, into a journal that all processes of a test share.

// What the library must not do, a test may: there a panic is the verdict.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod child;
mod journal;

use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use contend::{Schedule, Weekday};
use zookeeper::{Acl, CreateMode, Permission, ZooKeeper};

use testbed::{MariaDbServer, Output, Process, RedisServer, ZooKeeperServer, wait_until, within};

use journal::{Journal, Run};

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
    journal: Journal,
}

impl Fleet {
    fn new(url: &str, test: &str, period: Duration) -> Fleet {
        static COUNTER: AtomicU32 = AtomicU32::new(0);
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        Fleet {
            url: url.to_owned(),
            mutex: format!("{test}-{number}"),
            period,
            journal: Journal::new(),
        }
    }

    /// Starts a process that runs the schedule; each run takes so long.
    fn start(&self, schedule: &str, takes: Duration) -> Process {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "child::child", "--nocapture", "--test-threads=1"])
            .env(child::URL, &self.url)
            .env(child::MUTEX, &self.mutex)
            .env(child::SCHEDULE, schedule)
            .env(child::PERIOD_MS, self.period.as_millis().to_string())
            .env(child::TAKES_MS, takes.as_millis().to_string())
            .env(child::JOURNAL, self.journal.path());
        Process::spawn(&command, &Output::Pipe).unwrap()
    }

    /// Ends a process in good order.
    fn stop(process: &Process) {
        drop(process.take_stdin());
        let status = process.wait(PATIENCE).expect("it stops");
        assert!(status.success(), "{status}");
    }

    /// Waits for the next run that begins after there were `before` of them.
    fn run_after(&self, before: usize) -> Run {
        wait_until(PATIENCE, "a run begins", || {
            self.journal.runs().len() > before
        });
        self.journal.runs()[before]
    }

    /// A run that could not be recorded, on a busy machine: the next leader does not know of it.
    fn failed_to_record(&self) -> bool {
        let warnings = self.journal.warnings();
        let mut failed = warnings.iter().filter(|line| is_about_records(line));
        failed.any(|line| !line.contains("not available"))
    }

    /// Checks and prints what the journal has.
    fn check(&self, what: &str) {
        let runs = self.journal.runs();
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
        for line in self.journal.warnings() {
            println!("    {line}");
        }
        for pair in runs.windows(2) {
            assert!(pair[1].fence >= pair[0].fence, "{runs:?}");
            let apart = pair[1].began - pair[0].began;
            assert!(
                apart >= self.period - NEARLY
                    || (self.failed_to_record() && pair[0].pid != pair[1].pid),
                "{apart:?} apart: {runs:?}"
            );
        }
    }
}

/// Six processes, one after the other, 1.5 s each: before, a run each.
fn rolling_restarts_keep_the_period(url: &str) {
    let fleet = Fleet::new(url, "rolling", Duration::from_secs(4));
    for _ in 0..6 {
        let process = fleet.start("every", Duration::ZERO);
        thread::sleep(Duration::from_millis(1_500));
        Fleet::stop(&process);
    }
    fleet.check("six processes of 1.5 s each, period 4 s");
    assert!(fleet.journal.runs().len() >= 2);
}

/// The next leader goes on where the dead one was: a period after its last run, or as soon as it leads.
fn a_leader_killed_between_runs_is_followed(url: &str) {
    let fleet = Fleet::new(url, "between", PERIOD);
    let leader = fleet.start("every", Duration::ZERO);
    fleet.run_after(0);
    let next = fleet.start("every", Duration::ZERO);
    let last = fleet.run_after(1);
    thread::sleep(Duration::from_millis(500));
    leader.kill();
    let first = fleet.run_after(2);
    assert_eq!((last.pid, first.pid), (leader.pid(), next.pid()));
    fleet.check("the leader killed 0.5 s after its second run");
    let apart = first.began - last.began;
    assert!(apart <= PERIOD + FAIL_OVER, "{apart:?} apart");
    Fleet::stop(&next);
}

/// At a fixed rate a run is recorded when it begins, so that one in which its leader dies counts.
fn a_leader_killed_in_a_run_is_followed(url: &str) {
    let fleet = Fleet::new(url, "within", PERIOD);
    let leader = fleet.start("every", Duration::from_millis(1_500));
    let last = fleet.run_after(0);
    let next = fleet.start("every", Duration::from_millis(500));
    thread::sleep(Duration::from_millis(700));
    leader.kill();
    let first = fleet.run_after(1);
    assert_eq!((last.pid, first.pid), (leader.pid(), next.pid()));
    fleet.check("the leader killed 0.7 s after a run of 1.5 s began");
    let apart = first.began - last.began;
    assert!(apart <= PERIOD + FAIL_OVER, "{apart:?} apart");
    Fleet::stop(&next);
}

/// A server that keeps what it acknowledged is restarted in the middle: the beat goes on.
fn a_restarted_server_does_not_run_twice(url: &str, restart: impl Fn()) {
    let fleet = Fleet::new(url, "restart", PERIOD);
    let processes = [
        fleet.start("every", Duration::ZERO),
        fleet.start("every", Duration::ZERO),
    ];
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

/// A fixed delay counts from the end, also for the next process.
fn a_delay_is_kept_over_processes(url: &str) {
    let fleet = Fleet::new(url, "delay", PERIOD);
    for number in 0..2 {
        let process = fleet.start("delay", Duration::from_millis(1_000));
        fleet.run_after(number);
        // Told to stop in the run, it ends the run first.
        Fleet::stop(&process);
    }
    let runs = fleet.journal.runs();
    let apart = runs[1].began - runs[0].began;
    fleet.check("two processes, delay 2 s, runs of 1 s");
    assert!(
        apart >= PERIOD + Duration::from_secs(1) - NEARLY,
        "{apart:?}"
    );
}

/// Shows a fact on all backends at once: most of it is waiting.
fn on_every_backend(fact: fn(&str)) {
    at_once([&|| fact(redis_url()), &|| fact(mysql_url()), &|| {
        fact(zk_url())
    }]);
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
    on_every_backend(a_leader_killed_between_runs_is_followed);
}

#[test]
fn killed_in_a_run() {
    on_every_backend(a_leader_killed_in_a_run_is_followed);
}

#[test]
fn fixed_delay() {
    on_every_backend(a_delay_is_kept_over_processes);
}

/// Servers of their own: the others must not be restarted under their tests.
#[test]
fn restarted_server() {
    let redis = || {
        let server = RedisServer::start_with(&["--appendonly", "yes", "--appendfsync", "always"]);
        let url = with_lease(&server.url());
        a_restarted_server_does_not_run_twice(&url, || {
            server.kill();
            thread::sleep(Duration::from_secs(1));
            server.restart();
        });
    };
    let mysql = || {
        let server = MariaDbServer::start();
        let url = server.create_database("schedule");
        let url = with_lease(&format!("{url}?create_table=true"));
        a_restarted_server_does_not_run_twice(&url, || {
            server.kill();
            server.restart();
        });
    };
    let zookeeper = || {
        let server = ZooKeeperServer::start();
        a_restarted_server_does_not_run_twice(&with_lease(&server.url()), || {
            server.kill();
            server.restart();
        });
    };
    at_once([&redis, &mysql, &zookeeper]);
}

/// Thursday's record must still be there on Monday: else a Monday that was missed is not made up for.
#[test]
fn record_outlives_the_longest_gap() {
    let server = RedisServer::start();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let soon = now.as_secs() + 3;
    let (day, second) = (soon / 86_400, soon % 86_400);
    let time = [second / 3600, second / 60 % 60, second % 60].map(|part| format!("{part:02}"));
    // 1970-01-01 was a Thursday.
    let weekday = |day: u64| Weekday::ALL[usize::try_from((day + 3) % 7).unwrap()];
    let days = [weekday(day), weekday(day + 3)];
    let weekly = Schedule::weekly_at(days, &time.join(":"), "UTC").unwrap();
    let factory = contend::connect(&server.url()).unwrap();
    let (sender, runs) = crossbeam_channel::unbounded();
    let scheduler = factory.scheduler("weekly");
    let scheduler = scheduler.start(weekly, move |_| sender.send(())).unwrap();
    runs.recv_timeout(PATIENCE).unwrap();
    let left = server.cli(&["PTTL", "simba:{weekly}:run"]);
    scheduler.stop().unwrap();
    let left = Duration::from_millis(left.trim().parse().unwrap());
    println!("redis: the record of a run is kept for {left:?}");
    assert!(left > Duration::from_secs(366 * 24 * 3600), "{left:?}");
}

/// Whether a warning says that the record of runs cannot be read or written. Both are denied where one key has it.
fn is_about_records(line: &str) -> bool {
    line.contains("cannot record a run") || line.contains("cannot read when the last run was")
}

/// A server that lets us lead, but not write when a run began: the work runs, the log says so once, and a
/// new leader does not know of the run.
fn runs_all_the_same_if_no_run_can_be_recorded(fleet: &Fleet) {
    for runs in [2, 3] {
        let process = fleet.start("every", Duration::ZERO);
        fleet.run_after(runs);
        Fleet::stop(&process);
    }
    fleet.check("record_run fails, two processes");
    let warnings = fleet.journal.warnings();
    let said = warnings.iter().filter(|line| is_about_records(line));
    assert_eq!(said.count(), 2, "once in each process: {warnings:#?}");
}

#[test]
fn record_run_fails() {
    let redis = || {
        let server = RedisServer::start();
        let rule = "ACL SETUSER half on >pw &* +@all ~simba:{*} ~simba:{*}:contender ~simba:{*}:fence \
                    ~simba:{*}:token %R~simba:{*}:run";
        server.cli(&rule.split_whitespace().collect::<Vec<_>>());
        let url = server.url().replace("redis://", "redis://half:pw@");
        let fleet = Fleet::new(&with_lease(&url), "unrecorded", PERIOD);
        runs_all_the_same_if_no_run_can_be_recorded(&fleet);
    };
    // May update every column but that of the last run.
    let mysql = || {
        let server = MariaDbServer::start();
        let url = server.create_database("half");
        let admin = contend::connect(&format!("{url}?create_table=true")).unwrap();
        drop(admin.locker("first").build().unwrap().lock().unwrap());
        let columns = server.sql(
            "SELECT GROUP_CONCAT(column_name) FROM information_schema.columns \
             WHERE table_schema = 'half' AND table_name = 'simba_mutex' AND column_name <> 'run_at'",
        );
        server.sql(&format!(
            "CREATE USER half IDENTIFIED BY 'pw'; \
             GRANT SELECT, INSERT, DELETE, UPDATE ({}) ON half.simba_mutex TO half",
            columns.trim()
        ));
        let (_, address) = url.split_once('@').unwrap();
        let url = with_lease(&format!("mysql://half:pw@{address}"));
        runs_all_the_same_if_no_run_can_be_recorded(&Fleet::new(&url, "unrecorded", PERIOD));
    };
    // The node that carries the last run is another user's: contenders come and go, its data stays.
    let zookeeper = || {
        let server = ZooKeeperServer::start();
        let fleet = Fleet::new(&with_lease(&server.url()), "unrecorded", PERIOD);
        let timeout = Duration::from_secs(10);
        let admin = ZooKeeper::connect(&server.addr().to_string(), timeout, |_| {}).unwrap();
        let acl = Acl::new(
            Permission::READ | Permission::CREATE | Permission::DELETE,
            "world",
            "anyone",
        );
        let open = Acl::open_unsafe().clone();
        admin
            .create("/simba", Vec::new(), open, CreateMode::Persistent)
            .unwrap();
        let path = format!("/simba/{}", fleet.mutex);
        admin
            .create(&path, Vec::new(), vec![acl], CreateMode::Persistent)
            .unwrap();
        runs_all_the_same_if_no_run_can_be_recorded(&fleet);
    };
    at_once([&redis, &mysql, &zookeeper]);
}

fn redis_url() -> &'static str {
    static SERVER: OnceLock<(RedisServer, String)> = OnceLock::new();
    let (_, url) = SERVER.get_or_init(|| {
        let server = RedisServer::start();
        let url = with_lease(&server.url());
        (server, url)
    });
    url
}

fn mysql_url() -> &'static str {
    static SERVER: OnceLock<(MariaDbServer, String)> = OnceLock::new();
    let (_, url) = SERVER.get_or_init(|| {
        let server = MariaDbServer::start();
        let url = server.create_database("schedule");
        let url = with_lease(&format!("{url}?create_table=true"));
        (server, url)
    });
    url
}

fn zk_url() -> &'static str {
    static SERVER: OnceLock<(ZooKeeperServer, String)> = OnceLock::new();
    let (_, url) = SERVER.get_or_init(|| {
        let server = ZooKeeperServer::start();
        let url = with_lease(&server.url());
        (server, url)
    });
    url
}

fn with_lease(url: &str) -> String {
    let separator = if url.contains('?') { '&' } else { '?' };
    let (ttl, transition) = (LEASE.0.as_millis(), LEASE.1.as_millis());
    format!("{url}{separator}ttl={ttl}ms&transition={transition}ms")
}
