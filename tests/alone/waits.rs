//! Waits that end: on a server that is paused, with a long ttl, and when they are cancelled. Prints what each took;
//! with `--nocapture` as a table.

use std::thread;
use std::time::{Duration, Instant};

use contend::{Cancel, ErrorKind};
use testbed::{threads, wait_until, within};

use crate::conformance::PATIENCE;
use crate::conformance::outage::{bounded, calls_end};

const HANG: Duration = Duration::from_secs(150);

/// How many lockers are cancelled.
const LOCKERS: usize = 100;

/// Every call that a caller waits for, while the server does not answer and the ttl is 60 s.
fn paused(backend: &str, url: &str, pause: impl FnOnce()) {
    let url = format!("{url}?ttl=60s&transition=1s");
    calls_end(backend, contend::connect(&url).unwrap(), pause);
}

/// A hundred lockers wait in threads of their own, and are cancelled.
fn cancelled(backend: &str, url: &str, places: usize) {
    let before = threads(std::process::id());
    let factory = contend::connect(url).unwrap();
    let watcher = contend::connect(url).unwrap();
    // Of another factory: on MySQL the lockers of one queue behind each other, and not on the server.
    let guard = watcher.locker("queue").build().unwrap().lock().unwrap();
    let cancel = Cancel::new();
    let waits: Vec<_> = (0..LOCKERS)
        .map(|_| {
            let locker = factory.locker("queue").cancel(&cancel).build().unwrap();
            thread::spawn(move || {
                let kind = locker.lock().map(drop).unwrap_err().kind();
                (kind, Instant::now())
            })
        })
        .collect();
    // Those in the queue as the server sees them.
    let left = || watcher.participants("queue").unwrap().len();
    wait_until(PATIENCE, "all of them wait", || left() == places);
    let began = Instant::now();
    cancel.cancel();
    for wait in waits {
        let (kind, at) = wait.join().unwrap();
        assert_eq!(kind, ErrorKind::Cancelled);
        bounded(backend, "cancel", Duration::ZERO, at - began, "cancelled");
    }
    wait_until(PATIENCE, "the queue is empty", || left() == 0);
    assert!(guard.is_valid());
    guard.unlock().unwrap();
    drop((factory, watcher));
    wait_until(PATIENCE, "no thread is left", || {
        threads(std::process::id()) <= before
    });
}

alone! {
    fn waits_end_on_memory() {
        within(HANG, || cancelled("memory", "memory://waits", LOCKERS));
    }
}

#[cfg(feature = "redis")]
alone! {
    fn waits_end_on_redis() {
        within(HANG, || {
            let server = testbed::RedisServer::start();
            let url = server.url();
            cancelled("redis", &url, LOCKERS);
            let keys = server.cli(&["KEYS", "*queue*"]);
            assert!(!keys.contains(":contender"), "{keys}");
            paused("redis", &url, || server.pause());
        });
    }
}

#[cfg(feature = "mysql")]
alone! {
    fn waits_end_on_mysql() {
        within(HANG, || {
            let server = testbed::MariaDbServer::start();
            let url = server.create_database("waits");
            server.sql(&format!("USE waits; {}", contend::mysql::INIT_SQL));
            // One for the process: its contenders queue behind it.
            cancelled("mysql", &url, 1);
            wait_until(PATIENCE, "no connection waits", || {
                let waiting = "FROM information_schema.processlist WHERE state = 'User lock'";
                server.sql(&format!("SELECT COUNT(*) {waiting}")) == "0"
            });
            paused("mysql", &url, || server.pause());
        });
    }
}

#[cfg(feature = "zk")]
alone! {
    fn waits_end_on_zk() {
        within(HANG, || {
            let server = testbed::ZooKeeperServer::start_with(&["maxSessionTimeout=120000"], &[]);
            let url = server.url();
            cancelled("zk", &url, LOCKERS);
            paused("zk", &url, || server.pause());
        });
    }
}

/// What this process has used of the processors.
#[cfg(feature = "redis")]
fn cpu() -> Duration {
    use rustix::time::{ClockId, clock_gettime};
    clock_gettime(ClockId::ProcessCPUTime).try_into().unwrap()
}

#[cfg(feature = "redis")]
alone! {
    /// Else those that wait in an outage would keep each other from working on after it.
    fn thousand_waiters_use_little_cpu() {
        within(HANG, || {
            let server = testbed::RedisServer::start();
            let factory = contend::connect(&format!("{}?ttl=60s", server.url())).unwrap();
            factory.ping(Duration::from_secs(20)).unwrap();
            server.pause();
            thread::scope(|scope| {
                for number in 0..1_000 {
                    let locker = factory.locker(format!("m-{number}")).build().unwrap();
                    scope.spawn(move || locker.try_lock_for(Duration::from_secs(4)).is_err());
                }
                // Until all have begun, and have looked a few times.
                thread::sleep(Duration::from_millis(1_500));
                let (began, used) = (Instant::now(), cpu());
                thread::sleep(Duration::from_millis(1_000));
                let (took, used) = (began.elapsed(), cpu() - used);
                assert!(used < took / 2, "{used:?} in {took:?}");
            });
            server.resume();
        });
    }
}
