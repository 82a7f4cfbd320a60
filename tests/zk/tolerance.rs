//! What an owner bears without losing its leadership: see `heartbeat.rs`.
//!
//! By the rules, belief ends T - T/100 - 5 ms - T/6 after the send of the newest heartbeat that counts, which
//! is T/4 + T/24 and two round trips old at most while all is well. So an owner bears 0.52 T without an
//! answer (792 ms with T = 1.5 s), and round trips of T/4. Of that, T/4 + T/24 pass before a silent server
//! is left.
//!
//! T is 4 s: on a busy machine, 1.5 s shows the machine.

use std::net::TcpListener;
use std::sync::Arc;
use std::thread::sleep;
use std::time::Duration;

use crate::support::{HANG, PATIENCE, Rivals, builder, factory, name, wait_leads};
use contend::{EventKind, Factory, Moment, zk};
use testbed::{Direction, Proxy, ZooKeeperEnsemble, ZooKeeperServer, wait_until, within};

const T: Duration = Duration::from_secs(4);

/// A leader and a waiter: the leader leads through `strike`, which is a fault and its end.
#[track_caller]
fn costs_nothing(what: &str, leader: &Factory, waiter: &Factory, strike: impl FnOnce()) {
    let mutex = name("tolerance");
    let (first, events) = leader.contend(&mutex).id("leader").channel().unwrap();
    let second = waiter.contend(&mutex).id("waiter").build().unwrap();
    first.start().unwrap();
    wait_leads(&first);
    second.start().unwrap();
    let rivals = Rivals::watch(vec![Arc::new(first), Arc::new(second)]);
    // Heartbeats have taken over from the handshake.
    sleep(T / 2);
    strike();
    sleep(T / 2);
    let is_lost = events
        .try_iter()
        .any(|event| event.kind == EventKind::Released);
    assert!(!is_lost && rivals.services[0].is_owner(), "{what}");
    for service in &rivals.services {
        service.stop().unwrap();
    }
    rivals.judge();
}

#[test]
fn pause_of_two_fifths_of_the_timeout_costs_nothing() {
    within(HANG, || {
        let server = ZooKeeperServer::start();
        let [leader, waiter] = [(); 2].map(|()| factory(server.addr(), T));
        costs_nothing("server paused for 0.4 T", &leader, &waiter, || {
            server.pause();
            sleep(T * 2 / 5);
            server.resume();
        });
    });
}

#[test]
fn late_replies_cost_nothing() {
    within(HANG, || {
        let server = ZooKeeperServer::start();
        let proxy = Proxy::to(server.addr());
        let (leader, waiter) = (factory(proxy.addr(), T), factory(server.addr(), T));
        costs_nothing("replies 0.1 T late for 2 T", &leader, &waiter, || {
            proxy.delay_replies(T / 10);
            sleep(T * 2);
            proxy.pass();
        });
    });
}

/// One client whose connection goes through a proxy to one of the followers.
struct ThroughFollower {
    proxies: Vec<Proxy>,
    follower: usize,
    factory: Factory,
}

impl ThroughFollower {
    fn new(ensemble: &ZooKeeperEnsemble) -> ThroughFollower {
        let leader = ensemble.wait_leader();
        let proxies: Vec<Proxy> = ensemble
            .nodes()
            .iter()
            .map(|node| Proxy::to(node.addr()))
            .collect();
        let hosts: Vec<String> = proxies.iter().map(|p| p.addr().to_string()).collect();
        proxies[leader].refuse();
        let factory = builder(hosts.join(","), T).build().unwrap();
        let mut follower = None;
        wait_until(PATIENCE, "it is connected to a follower", || {
            follower = (0..3).find(|index| *index != leader && proxies[*index].live() > 0);
            factory.ping(PATIENCE).is_ok() && follower.is_some()
        });
        proxies[leader].pass();
        ThroughFollower {
            proxies,
            follower: follower.unwrap(),
            factory,
        }
    }
}

#[test]
fn fault_of_one_member_costs_nothing() {
    within(HANG * 2, || {
        let ensemble = ZooKeeperEnsemble::start_proxied();
        for fault in ["silent", "killed", "paused", "cut off from its leader"] {
            ensemble.wait_whole();
            let client = ThroughFollower::new(&ensemble);
            let leader = ensemble.node(ensemble.wait_leader()).addr();
            let what = format!("member {fault} for T");
            costs_nothing(&what, &client.factory, &factory(leader, T), || {
                let follower = client.follower;
                let (proxy, node) = (&client.proxies[follower], ensemble.node(follower));
                match fault {
                    "silent" => proxy.black_hole(Direction::Both),
                    "killed" => node.kill(),
                    "paused" => node.pause(),
                    _ => ensemble.cut_off(follower),
                }
                sleep(T);
                match fault {
                    "silent" => proxy.pass(),
                    "killed" => node.start(),
                    "paused" => node.resume(),
                    _ => ensemble.heal(follower),
                }
            });
        }
    });
}

/// A server that accepts and does not serve must not be all that is tried. It is left after T/4.
#[test]
fn silent_address_is_left_for_the_next() {
    within(HANG, || {
        let server = ZooKeeperServer::start();
        for _ in 0..4 {
            let silent = TcpListener::bind("127.0.0.1:0").unwrap();
            let hosts = format!("{},{}", silent.local_addr().unwrap(), server.addr());
            let ours = zk::Builder::new(hosts).session_timeout(T).build().unwrap();
            let locker = ours.locker(name("silent")).build().unwrap();
            drop(locker.try_lock_for(PATIENCE).unwrap());
        }
    });
}

/// The whole transition is left for winding down, even where the old leader could hand over at
/// once, because its requests get through and only the answers are lost.
#[test]
fn next_leader_waits_for_the_transition() {
    within(HANG, || {
        let server = ZooKeeperServer::start();
        let proxy = Proxy::to(server.addr());
        let factories = [factory(proxy.addr(), T), factory(server.addr(), T)];
        let rivals = Rivals::start(&factories, "transition");
        proxy.black_hole(Direction::ToClient);
        // From the last look that saw the one lead to the first that sees the other: what a slow machine
        // adds is on the safe side.
        let (mut last_led, mut was_unsure) = (Moment::now(), false);
        wait_until(PATIENCE, "the waiter leads", || {
            let now = Moment::now();
            if rivals.services[0].is_owner() {
                was_unsure |= !rivals.services[0].is_in_ttl();
                last_led = now;
            }
            rivals.services[1].is_owner()
        });
        assert!(was_unsure, "it never said that it was not sure");
        let between = Moment::now() - last_led;
        println!("the next led {between:?} after the last");
        let transition = factories[0].lease().transition();
        assert!(between > transition, "{between:?}");
        proxy.pass();
        rivals.judge();
    });
}
