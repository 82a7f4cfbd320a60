//! What many callers cost: contenders, mutexes, failed tries.

use std::time::{Duration, Instant};

use crate::conformance::elsewhere;
use crate::support::{
    CREATOR, HANG, PATIENCE, Verbs, builder, factory, line, name, packets, session, soon,
};
use contend::zk::Mode;
use contend::{ErrorKind, Parker};
use testbed::{Proxy, ZooKeeperServer, cpu_load, rss_kib, wait_until, within};

const T: Duration = Duration::from_secs(9);
const LONG: Duration = Duration::from_secs(50);

/// The server's counter of changes.
fn zxid(server: &ZooKeeperServer) -> u64 {
    let answer = server.four_letter("srvr").unwrap();
    let zxid = answer
        .lines()
        .find_map(|line| line.strip_prefix("Zxid: 0x"));
    u64::from_str_radix(zxid.unwrap().trim(), 16).unwrap()
}

/// What a lock costs does not depend on how many mutexes are in rotation.
#[test]
fn more_mutexes_cost_no_more_each() {
    within(HANG * 2, || {
        let server = ZooKeeperServer::start();
        let ours = factory(server.addr(), LONG);
        let per_lock = [900, 1_100].map(|count| {
            let mutex = name("rotation");
            let lockers: Vec<_> = (0..count)
                .map(|number| ours.locker(format!("{mutex}-{number}")).build().unwrap())
                .collect();
            let round = || {
                for locker in &lockers {
                    drop(locker.try_lock_for(PATIENCE).unwrap());
                }
            };
            round();
            let asked = packets(&server);
            round();
            (packets(&server) - asked) as f64 / f64::from(count)
        });
        println!("requests per lock with 900 and 1,100 mutexes: {per_lock:.2?}");
        assert!(per_lock[1] < per_lock[0] + 0.5, "{per_lock:?}");
    });
}

/// A server keeps the watches on names that never exist until it is told.
#[test]
fn dropped_observer_leaves_no_watch() {
    within(HANG * 2, || {
        let server = ZooKeeperServer::start();
        let ours = factory(server.addr(), LONG);
        let (backend, wake) = (ours.backend().unwrap(), Parker::new().unparker());
        for number in 0..1_500 {
            let mutex = format!("never-{number}").into();
            let mut observer = backend.observer(&mutex, &wake).unwrap();
            observer.observe(soon()).unwrap();
        }
        wait_until(PATIENCE, "few watches are left", || {
            let answer = server.four_letter("wchs").unwrap();
            let mut lines = answer.lines();
            let total = lines.find_map(|line| line.strip_prefix("Total watches:"));
            total.unwrap().trim().parse::<u64>().unwrap() < 300
        });
    });
}

/// On busy processors. When 150 started together, each read the whole line again and again, until the server died;
/// and idle they polled quadratically.
#[test]
fn many_contenders_share_a_session_and_ask_little() {
    let (count, timeout) = (150, Duration::from_secs(6));
    within(HANG * 3, || {
        let server = ZooKeeperServer::start();
        let proxy = Proxy::to(server.addr());
        let ours = factory(proxy.addr(), timeout);
        let mutex = name("storm");
        let reader = session(server.addr(), Duration::from_secs(60));
        let load = cpu_load(2);
        let asked = packets(&server);
        let began = Instant::now();
        let services: Vec<_> = (0..count)
            .map(|number| {
                let id = format!("c{number}");
                let service = ours.contend(&mutex).id(&id).build().unwrap();
                service.start().unwrap();
                service
            })
            .collect();
        wait_until(PATIENCE, "one leads", || {
            services.iter().any(|service| service.is_owner())
        });
        let led = began.elapsed();
        wait_until(PATIENCE * 2, "all stand in line", || {
            line(&reader, &mutex).len() == services.len()
        });
        let in_line = began.elapsed();
        wait_until(PATIENCE * 2, "all know who leads", || {
            services
                .iter()
                .all(|service| service.is_owner() || service.state().after().has_owner())
        });
        // The reader's own, and heartbeats, are among them.
        let each = (packets(&server) - asked) as f64 / f64::from(count);
        println!(
            "{count} contenders, T = {timeout:?}: a leader after {led:?}, all in line after {in_line:?}, {each:.1} \
             requests each, server alive: {}",
            server.is_running()
        );
        wait_until(PATIENCE, "they share a connection", || proxy.live() == 1);
        assert!(each < 15.0, "{each} requests each");
        assert!(server.is_running());
        drop(load);
        // Idle, for longer than it takes until each has looked again.
        let span = timeout * 2;
        let (asked, bytes) = (packets(&server), proxy.bytes_to_client());
        std::thread::sleep(span);
        let requests = (packets(&server) - asked) as f64 / span.as_secs_f64();
        let rate = (proxy.bytes_to_client() - bytes) as f64 / span.as_secs_f64();
        println!("idle: {requests:.0} requests/s, {rate:.0} bytes/s to the client");
        let looks = f64::from(count) / timeout.as_secs_f64();
        let beats = 2.0 * 24.0 / timeout.as_secs_f64();
        assert!(
            requests < 3.0 * (looks + beats) + 20.0,
            "{requests} requests/s"
        );
        assert!(rate < 200.0 * requests + 20_000.0, "{rate} bytes/s");
    });
}

/// Each failure left an orphan for a node that was never asked for, and 20,000 of them
/// made 40,067 requests on reconnect and kept the first lock waiting for 8.6 s.
#[test]
fn failed_tries_leave_nothing() {
    let tries = 20_000;
    within(HANG * 3, || {
        let server = ZooKeeperServer::start();
        let proxy = Proxy::to(server.addr());
        let ours = factory(proxy.addr(), T);
        let locker = ours.locker(name("outage")).build().unwrap();
        drop(locker.try_lock_for(PATIENCE).unwrap());
        proxy.refuse();
        proxy.cut();
        wait_until(PATIENCE, "the outage is known", || {
            locker.try_lock().is_err_and(|error| error.is_not_sent())
        });
        let before = rss_kib(std::process::id());
        for _ in 0..tries {
            let error = locker.try_lock().unwrap_err();
            assert!(error.is_not_sent(), "{error}");
        }
        let grown = rss_kib(std::process::id()).saturating_sub(before);
        let asked = packets(&server);
        proxy.pass();
        drop(locker.try_lock_for(PATIENCE).unwrap());
        let requests = packets(&server) - asked;
        println!("{tries} failed tries: {grown} KiB more, {requests} requests on reconnect");
        assert!(requests < 200, "{requests} requests on reconnect");
        assert!(grown < 20_000, "{grown} KiB more");
    });
}

/// A try that fails makes no node. A leader whose node may be listed but not read leads all the same.
#[test]
fn refused_try_writes_nothing() {
    within(HANG, || {
        let server = ZooKeeperServer::start();
        let mutex = name("hidden");
        let ours = factory(server.addr(), LONG);
        let locker = ours.locker(&mutex).build().unwrap();
        // The parents are there, and every client may create below.
        drop(locker.try_lock_for(PATIENCE).unwrap());
        let theirs = factory(server.addr(), LONG).locker(&mutex).build().unwrap();
        let guard = theirs.try_lock_for(PATIENCE).unwrap();
        let refused = || elsewhere(|| locker.try_lock().map(drop).unwrap_err());
        let tries_write_little = |tries: u64| {
            // The locker remembers that the mutex was free: its first try may write.
            refused();
            let before = zxid(&server);
            for _ in 0..tries {
                let error = refused();
                assert_eq!(error.kind(), ErrorKind::Held, "{error}");
            }
            // Some heartbeats are transactions, too.
            let written = zxid(&server) - before;
            assert!(written < tries / 2, "{written} changes by {tries} tries");
        };
        tries_write_little(50);
        drop(guard);
        drop(locker.try_lock_for(PATIENCE).unwrap());
        let other = builder(server.addr(), LONG).digest("other", "s3cret");
        let other = other.session().unwrap();
        let node = format!("/simba/{mutex}/_c_other-latch-");
        other
            .create_for(CREATOR, &node, b"other", Mode::EphemeralSequential, soon())
            .unwrap();
        tries_write_little(50);
    });
}
