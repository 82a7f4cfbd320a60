//! Failed attempts in an outage: nothing is left behind, neither here nor on the server that comes back.
//!
//! `CONTEND_OUTAGE_TRIES` says how many attempts fail (20,000 by default).

use std::time::{Duration, Instant};

use crate::support::{HANG, PATIENCE, factory, name, number, packets};
use testbed::{Proxy, ZooKeeperServer, rss_kib, wait_until, within};

const T: Duration = Duration::from_secs(9);

/// Each failure left an orphan for a node that was never asked for, and 20,000 of them
/// made 40,067 requests on reconnect and kept the first lock waiting for 8.6 s.
#[test]
fn failed_tries_leave_nothing_to_clean_up() {
    let tries = number("CONTEND_OUTAGE_TRIES", 20_000);
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
        let began = Instant::now();
        for _ in 0..tries {
            let error = locker.try_lock().unwrap_err();
            assert!(error.is_not_sent(), "{error}");
        }
        let (took, grown) = (
            began.elapsed(),
            rss_kib(std::process::id()).saturating_sub(before),
        );
        let asked = packets(&server);
        proxy.pass();
        let back = Instant::now();
        drop(locker.try_lock_for(PATIENCE).unwrap());
        let first = back.elapsed();
        let requests = packets(&server) - asked;
        println!(
            "{tries} failed tries in {took:?}: {grown} KiB more, {requests} requests on reconnect, the \
             first lock after {first:?}"
        );
        assert!(requests < 200, "{requests} requests on reconnect");
        assert!(grown < 20_000, "{grown} KiB more");
    });
}

/// A try that fails makes no node. Nothing is written: the server's counter of changes
/// stands still.
#[test]
fn a_try_that_fails_writes_nothing() {
    within(HANG, || {
        let server = ZooKeeperServer::start();
        let zxid = || {
            let answer = server.four_letter("srvr").unwrap();
            let line = answer.lines().find(|line| line.starts_with("Zxid: "));
            line.unwrap().to_owned()
        };
        let (ours, theirs) = (factory(server.addr(), T), factory(server.addr(), T));
        let mutex = name("no-write");
        let owner = theirs.locker(&mutex).build().unwrap();
        let tries = ours.locker(&mutex).build().unwrap();
        let guard = owner.try_lock_for(PATIENCE).unwrap();
        // Connected.
        drop(
            ours.locker(name("x"))
                .build()
                .unwrap()
                .try_lock_for(PATIENCE)
                .unwrap(),
        );
        let before = zxid();
        for _ in 0..5 {
            let elsewhere = || tries.try_lock().map(drop).unwrap_err();
            let error = std::thread::scope(|scope| scope.spawn(elsewhere).join().unwrap());
            assert_eq!(error.kind(), contend::ErrorKind::Held, "{error}");
        }
        assert_eq!(zxid(), before);
        drop(guard);
        drop(tries.try_lock_for(PATIENCE).unwrap());
    });
}
