//! What an owner bears without losing its leadership: DESIGN "zk", and review/zk.md 6 and 7.
//!
//! `CONTEND_RUNS` says how often each fault comes (1 by default), `CONTEND_T_MS` the session timeout (6 s
//! by default: on a busy machine 1.5 s shows the machine). Faults are shares of it.

use std::time::Duration;

use crate::zk_support::{HANG, PATIENCE, factory, name, number, wait_leads};
use contend::{EventKind, Factory};
use testbed::{Proxy, ZooKeeperEnsemble, ZooKeeperServer, within};

fn timeout() -> Duration {
    Duration::from_millis(number("CONTEND_T_MS", 6_000))
}

fn runs() -> u64 {
    number("CONTEND_RUNS", 1)
}

/// A leader and a waiter; `fault` strikes and heals again. Returns how often the leader was released.
fn released(factories: &[Factory; 2], fault: impl FnOnce()) -> usize {
    let mutex = name("tolerance");
    let (leader, events) = factories[0].contend(&mutex).id("leader").channel().unwrap();
    let waiter = factories[1].contend(&mutex).id("waiter").build().unwrap();
    leader.start().unwrap();
    wait_leads(&leader);
    waiter.start().unwrap();
    // Heartbeats have taken over from the handshake.
    std::thread::sleep(timeout() / 2);
    fault();
    std::thread::sleep(timeout());
    let lost = events
        .try_iter()
        .filter(|event| event.kind == EventKind::Released)
        .count();
    if lost == 0 {
        assert!(leader.is_owner() && !waiter.is_owner());
    }
    waiter.stop().unwrap();
    leader.stop().unwrap();
    lost
}

fn report(what: &str, lost: &[usize]) {
    let total: usize = lost.iter().sum();
    println!(
        "{what}, T = {:?}: {total} Released in {} runs",
        timeout(),
        lost.len()
    );
    assert_eq!(total, 0, "{what}: {lost:?}");
}

#[test]
fn a_server_paused_for_two_fifths_of_the_timeout_costs_nothing() {
    within(HANG * 4, || {
        let server = ZooKeeperServer::start();
        let lost: Vec<usize> = (0..runs())
            .map(|_| {
                let factories = [(); 2].map(|()| factory(server.addr(), timeout()));
                released(&factories, || {
                    server.pause();
                    std::thread::sleep(timeout() * 2 / 5);
                    server.resume();
                })
            })
            .collect();
        report("server paused for 0.4 T", &lost);
    });
}

#[test]
fn replies_a_tenth_of_the_timeout_late_cost_nothing() {
    within(HANG * 4, || {
        let server = ZooKeeperServer::start();
        let lost: Vec<usize> = (0..runs())
            .map(|_| {
                let proxy = Proxy::to(server.addr());
                let factories = [
                    factory(proxy.addr(), timeout()),
                    factory(server.addr(), timeout()),
                ];
                released(&factories, || {
                    proxy.delay(timeout() / 20);
                    std::thread::sleep(timeout() * 2);
                    proxy.pass();
                })
            })
            .collect();
        report("round trips 0.1 T longer for 2 T", &lost);
    });
}

#[test]
fn a_member_that_goes_silent_is_left_in_time() {
    within(HANG * 4, || {
        let ensemble = ZooKeeperEnsemble::start();
        let lost: Vec<usize> = (0..runs())
            .map(|_| {
                let silent = ensemble.followers()[0];
                let proxy = Proxy::to(ensemble.node(silent).addr());
                // Through the member that goes silent, or the proxy before it, as chance has it.
                let mut hosts = ensemble.addresses();
                hosts[silent] = proxy.addr().to_string();
                let hosts = hosts.join(",");
                let factories = [(); 2].map(|()| factory(&hosts, timeout()));
                released(&factories, || {
                    proxy.black_hole(testbed::Direction::Both);
                    std::thread::sleep(timeout());
                    proxy.pass();
                })
            })
            .collect();
        report("one member of three silent for T", &lost);
    });
}

/// review/zk.md 3: a server that accepts and does not serve must not be all that is tried.
#[test]
#[ignore = "not seen to end yet: to be looked at"]
fn an_address_that_accepts_and_does_not_serve_is_left_for_the_next() {
    within(HANG, || {
        let server = ZooKeeperServer::start();
        for _ in 0..6 {
            let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            let hosts = format!("{},{}", silent.local_addr().unwrap(), server.addr());
            let ours = factory(hosts, Duration::from_secs(4));
            let locker = ours.locker(name("silent")).build().unwrap();
            drop(locker.try_lock_for(PATIENCE).unwrap());
        }
    });
}
