//! Waits that end on a server that is paused, with a long ttl. Prints what each took; with `--nocapture` as a table.

#[cfg(feature = "redis")]
use std::thread;
use std::time::Duration;
#[cfg(feature = "redis")]
use std::time::Instant;

use testbed::within;

use crate::conformance::outage::calls_end;

const HANG: Duration = Duration::from_secs(150);

/// Every call that a caller waits for, while the server does not answer and the ttl is 60 s.
fn paused(backend: &str, url: &str, pause: impl FnOnce()) {
    let url = format!("{url}?ttl=60s&transition=1s");
    calls_end(backend, contend::connect(&url).unwrap(), pause);
}

#[cfg(feature = "redis")]
alone! {
    fn waits_end_on_redis() {
        within(HANG, || {
            let server = testbed::RedisServer::start();
            paused("redis", &server.url(), || server.pause());
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
            paused("mysql", &url, || server.pause());
        });
    }
}

#[cfg(feature = "zk")]
alone! {
    fn waits_end_on_zk() {
        within(HANG, || {
            let server = testbed::ZooKeeperServer::start_with(&["maxSessionTimeout=120000"], &[]);
            paused("zk", &server.url(), || server.pause());
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
                // While they wait: their time is not over yet.
                thread::sleep(Duration::from_millis(1_000));
                let (took, used) = (began.elapsed(), cpu() - used);
                assert!(used < took / 2, "{used:?} in {took:?}");
            });
            server.resume();
        });
    }
}
