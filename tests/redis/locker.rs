//! What a locker leaves on a real server, and what it sends there.

use std::thread;
use std::time::{Duration, Instant};

use contend::{ErrorKind, Factory, Lease};
use testbed::{Direction, Proxy, RedisServer, wait_until, within};

const HANG: Duration = Duration::from_secs(120);
const PATIENCE: Duration = Duration::from_secs(40);

fn factory(url: &str) -> Factory {
    contend::connect(url).unwrap()
}

/// How many scripts the server has run.
fn scripts(server: &RedisServer) -> u64 {
    let stats = server.cli(&["INFO", "commandstats"]);
    stats
        .lines()
        .filter_map(|line| line.strip_prefix("cmdstat_eval"))
        .filter_map(|line| line.split("calls=").nth(1)?.split(',').next())
        .map(|calls| calls.parse::<u64>().unwrap())
        .sum()
}

#[test]
fn an_uncontended_cycle_is_two_scripts_and_nothing_is_subscribed() {
    within(HANG, || {
        let server = RedisServer::start();
        let factory = factory(&server.url());
        let locker = factory.locker("m").id("ours").build().unwrap();
        drop(locker.lock().unwrap());
        let before = scripts(&server);
        for _ in 0..500 {
            drop(locker.lock().unwrap());
        }
        assert_eq!(scripts(&server) - before, 1_000);
        assert_eq!(
            server
                .cli(&["PUBSUB", "NUMSUB", "simba:{m}:ours"])
                .split_whitespace()
                .last(),
            Some("0")
        );
        assert_eq!(
            server
                .cli(&["EXISTS", "simba:{m}", "simba:{m}:contender"])
                .trim(),
            "0"
        );
    });
}

#[test]
fn a_lock_that_timed_out_leaves_no_queue_entry_and_no_subscription() {
    within(HANG, || {
        let server = RedisServer::start();
        let ours = factory(&server.url()).locker("m").build().unwrap();
        let theirs = factory(&server.url());
        let theirs = theirs.locker("m").id("theirs").build().unwrap();
        let guard = ours.lock().unwrap();
        let in_queue = || server.cli(&["ZSCORE", "simba:{m}:contender", "theirs"]);
        let subscribed = || {
            let count = server.cli(&["PUBSUB", "NUMSUB", "simba:{m}:theirs"]);
            count.split_whitespace().last() != Some("0")
        };
        let waiting = thread::spawn({
            let theirs = theirs.clone();
            move || theirs.try_lock_for(Duration::from_secs(8)).map(drop)
        });
        wait_until(PATIENCE, "it waits, queued and subscribed", || {
            !in_queue().trim().is_empty() && subscribed()
        });
        let error = waiting.join().unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Held);
        assert_eq!(in_queue().trim(), "");
        wait_until(PATIENCE, "the subscription has ended", || !subscribed());
        guard.unlock().unwrap();
    });
}

#[test]
fn a_server_that_does_not_answer_does_not_hold_a_timed_lock_for_long() {
    within(HANG, || {
        let server = RedisServer::start();
        let proxy = Proxy::to(server.addr());
        let lease = Lease::new(Duration::from_secs(4), Duration::from_secs(1)).unwrap();
        let factory = contend::redis::Builder::new(proxy.addr().to_string());
        let factory = factory
            .ttl(lease.ttl())
            .transition(lease.transition())
            .build()
            .unwrap();
        let locker = factory.locker("m").build().unwrap();
        drop(locker.lock().unwrap());
        proxy.black_hole(Direction::ToClient);
        let began = Instant::now();
        let error = locker.try_lock_for(Duration::from_millis(300)).unwrap_err();
        let took = began.elapsed();
        println!("{error} after {took:?}");
        assert!(
            error.is_transient() && error.kind() != ErrorKind::Held,
            "{error}"
        );
        // Half a second for the call, a quarter of the ttl to clean up.
        assert!(
            took < Duration::from_millis(500 + 1_000 + 8_000),
            "{took:?}"
        );
        proxy.pass();
        drop(locker.try_lock_for(PATIENCE).unwrap());
    });
}

/// A guard outlasts a server that was away for less than its ttl.
#[test]
fn a_guard_survives_a_short_absence_of_the_server() {
    within(HANG, || {
        let server = RedisServer::start();
        let proxy = Proxy::to(server.addr());
        let lease = Lease::new(Duration::from_secs(12), Duration::from_secs(2)).unwrap();
        let factory = contend::redis::Builder::new(proxy.addr().to_string());
        let factory = factory
            .ttl(lease.ttl())
            .transition(lease.transition())
            .build()
            .unwrap();
        let locker = factory.locker("m").build().unwrap();
        let guard = locker.lock().unwrap();
        let fence = guard.fence();
        proxy.refuse();
        proxy.reset();
        thread::sleep(Duration::from_millis(3_000));
        assert!(guard.is_valid());
        proxy.pass();
        thread::sleep(lease.ttl());
        assert!(guard.is_valid() && guard.fence() == fence);
        guard.unlock().unwrap();
    });
}

/// The reply to an acquire is lost, and the retry finds no connection: the outcome is unknown, although the retry was
/// not sent.
#[test]
fn a_lost_reply_is_adopted_by_the_next_lock() {
    within(HANG, || {
        let server = RedisServer::start();
        let proxy = Proxy::to(server.addr());
        let lease = Lease::new(Duration::from_secs(60), Duration::from_secs(6)).unwrap();
        let factory = contend::redis::Builder::new(proxy.addr().to_string());
        // One connection: a second one, opened meanwhile, would serve the retry.
        let factory = factory
            .ttl(lease.ttl())
            .transition(lease.transition())
            .pool_size(1)
            .build()
            .unwrap();
        let locker = factory.locker("m").build().unwrap();
        // An idle connection is what is retried.
        drop(locker.lock().unwrap());
        proxy.lose_reply_to(b"EVALSHA");
        proxy.refuse();
        let error = locker.try_lock().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
        assert!(!error.is_not_sent());
        assert_eq!(proxy.lost_replies(), 1);
        assert_eq!(server.cli(&["EXISTS", "simba:{m}"]).trim(), "1");
        proxy.pass();
        let guard = locker.try_lock_for(lease.ttl() / 2).unwrap();
        guard.unlock().unwrap();
        assert_eq!(server.cli(&["EXISTS", "simba:{m}"]).trim(), "0");
    });
}

/// An attack: what took the lock away often closes the connections too, a restart without data for one. The
/// release was sent twice then, and what the second one did not find was said to be released.
#[test]
fn unlocking_what_was_taken_away_is_no_success_where_the_connection_was_closed() {
    within(HANG, || {
        let server = RedisServer::start();
        let factory = |id: &str| {
            let factory = contend::redis::Builder::new(server.addr().to_string());
            let factory = factory.build().unwrap();
            let locker = factory.locker("m").id(id).build().unwrap();
            (factory, locker)
        };
        let (_ours, our) = factory("ours");
        let (_theirs, their) = factory("theirs");
        let guard = our.lock().unwrap();
        server.cli(&["FLUSHALL"]);
        let other = std::thread::scope(|scope| scope.spawn(|| their.lock()).join().unwrap());
        let other = other.unwrap();
        server.cli(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
        guard.unlock().unwrap_err();
        assert!(other.is_valid());
        other.unlock().unwrap();
    });
}
