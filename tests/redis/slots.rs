//! A Redis cluster whose slots and masters move, and some of whose nodes hang or have forgotten the others.

use std::net::TcpListener;
use std::thread;
use std::time::Instant;

use contend::backend::{Attempt, OnRefusal, Renewal};
use contend::redis::Builder;
use contend::{EventKind, Factory, Moment};
use testbed::{RedisCluster, wait_until, within};

use crate::conformance::{lease, next, started, wait_for_owner};
use crate::driven::{Driven, HANG, PATIENCE, listeners, ms, soon};

fn factory(cluster: &RedisCluster) -> Factory {
    let factory = Builder::cluster(cluster.addresses())
        .ttl(lease().ttl())
        .transition(lease().transition());
    factory.build().unwrap()
}

/// The ids of two masters that know each other: the one that has the key, and another.
fn two_masters(cluster: &RedisCluster, key: &str) -> (usize, usize) {
    let from = cluster.master_of(key, 0);
    let to = cluster
        .masters()
        .into_iter()
        .find(|it| *it != from)
        .unwrap();
    (from, to)
}

fn node_id(cluster: &RedisCluster, index: usize) -> String {
    cluster
        .node(index)
        .cli(&["CLUSTER", "MYID"])
        .trim()
        .to_owned()
}

/// The replica of this master.
fn replica_of(cluster: &RedisCluster, master: usize) -> usize {
    let port = cluster.node(master).port().to_string();
    let role = |index: usize| cluster.node(index).cli(&["ROLE"]);
    let mut replicas = cluster.replicas().into_iter();
    let found = replicas.find(|&it| role(it).lines().nth(2) == Some(port.as_str()));
    found.unwrap()
}

/// Makes the replica of the master that has the mutex `m` a master. Returns both.
fn fail_over(cluster: &RedisCluster) -> (usize, usize) {
    let master = cluster.master_of("simba:{m}", 0);
    let heir = replica_of(cluster, master);
    let said = cluster.node(heir).cli(&["CLUSTER", "FAILOVER"]);
    assert_eq!(said.trim(), "OK");
    wait_until(PATIENCE, "the replica took over", || {
        cluster.masters().contains(&heir)
    });
    (master, heir)
}

fn slot_of(cluster: &RedisCluster, key: &str) -> String {
    let slot = cluster.node(0).cli(&["CLUSTER", "KEYSLOT", key]);
    slot.trim().to_owned()
}

/// A mutex in a slot that is on its way is renewed and released all the same.
#[test]
fn slot_on_its_way_unseats_no_owner() {
    within(HANG, || {
        let cluster = RedisCluster::start();
        let factory = factory(&cluster);
        let (from, to) = two_masters(&cluster, "simba:{m}");
        let slot = slot_of(&cluster, "simba:{m}");
        let (source, target) = (cluster.node(from), cluster.node(to));
        let mut owner = Driven::with(&factory, "m", "owner", lease());
        let fence = owner.own();
        let mut renewed = || {
            let renewal = owner.raw.renew(fence, soon()).unwrap();
            assert!(matches!(renewal, Renewal::Renewed(_)), "{renewal:?}");
        };
        renewed();
        let setslot = |node: &testbed::RedisServer, state: &str, id: usize| {
            let id = node_id(&cluster, id);
            let said = node.cli(&["CLUSTER", "SETSLOT", &slot, state, &id]);
            assert_eq!(said.trim(), "OK");
        };
        setslot(target, "IMPORTING", from);
        setslot(source, "MIGRATING", to);
        // No key has moved: the source answers.
        renewed();
        let port = target.port().to_string();
        let keys = source.cli(&["CLUSTER", "GETKEYSINSLOT", &slot, "100"]);
        assert_eq!(keys.lines().count(), 3, "{keys}");
        let mut migrate = vec!["MIGRATE", "127.0.0.1", &port, "", "0", "5000", "KEYS"];
        migrate.extend(keys.lines());
        assert_eq!(source.cli(&migrate).trim(), "OK");
        // All have: the target does, after ASKING.
        renewed();
        // And it can be released, although the queue is nowhere.
        assert!(owner.raw.release(fence, soon()).unwrap());
        for index in cluster.masters() {
            setslot(cluster.node(index), "NODE", to);
        }
        let mut other = Driven::with(&factory, "m", "other", lease());
        let end = Moment::now() + PATIENCE;
        let second = loop {
            match other.raw.acquire(OnRefusal::Leave, soon()) {
                Ok(Attempt::Granted(grant)) => break grant.owner.fence(),
                other => assert!(!end.remaining().is_zero(), "{other:?}"),
            }
            thread::sleep(ms(10));
        };
        assert!(second > fence, "{second} after {fence}");
    });
}

/// One isolated node does not take the whole factory down.
#[test]
fn node_that_forgot_the_others_stops_no_mutex() {
    within(HANG, || {
        let cluster = RedisCluster::start_with(&["--enable-debug-command", "local"]);
        let factory = factory(&cluster);
        let mutexes: Vec<String> = (0..6).map(|number| format!("m{number}")).collect();
        let mut contenders: Vec<_> = mutexes
            .iter()
            .map(|mutex| Driven::with(&factory, mutex, "a", lease()))
            .collect();
        for contender in &mut contenders {
            let fence = contender.own();
            contender.release(fence);
        }
        // It forgets all others, its replica takes over, and the other five say that all is well.
        let victim = cluster.master_of("simba:{m0}", 0);
        let heir = replica_of(&cluster, victim);
        let ids: Vec<String> = (0..6).map(|index| node_id(&cluster, index)).collect();
        // Deaf to packets of all types: the others would ask a Valkey 9.1 that forgot them whether it is there, hear
        // from it whom to forget, and forget each other too.
        let deaf = ["DEBUG", "DROP-CLUSTER-PACKET-FILTER", "-2"];
        assert_eq!(cluster.node(victim).cli(&deaf).trim(), "OK");
        // In one go: since 7.2 a node passes on whom it forgot to those that it still knows.
        let mut forget = redis::pipe();
        forget.atomic();
        for (index, id) in ids.iter().enumerate() {
            if index != victim {
                forget.cmd("CLUSTER").arg("FORGET").arg(id);
            }
        }
        let client = redis::Client::open(cluster.node(victim).url()).unwrap();
        forget.exec(&mut client.get_connection().unwrap()).unwrap();
        let said = cluster.node(heir).cli(&["CLUSTER", "FAILOVER", "TAKEOVER"]);
        assert_eq!(said.trim(), "OK");
        for index in (0..6).filter(|index| *index != victim) {
            wait_until(PATIENCE, "the others know the new master", || {
                let node = cluster.node(index);
                node.cli(&["CLUSTER", "INFO"]).contains("cluster_state:ok")
                    && node
                        .cli(&["CLUSTER", "NODES"])
                        .lines()
                        .any(|line| line.starts_with(&ids[heir]) && line.contains("master"))
            });
        }
        let map = cluster.node(victim).cli(&["CLUSTER", "NODES"]);
        assert_eq!(map.lines().count(), 1, "it does not stand alone:\n{map}");
        for (contender, mutex) in contenders.iter_mut().zip(&mutexes) {
            let end = Instant::now() + PATIENCE;
            loop {
                let by = Moment::now() + lease().request_limit();
                match contender.raw.acquire(OnRefusal::Leave, by) {
                    Ok(Attempt::Granted(grant)) => {
                        contender.raw.release(grant.owner.fence(), by).unwrap();
                        break;
                    }
                    other => assert!(Instant::now() < end, "{mutex}: {other:?}"),
                }
                thread::sleep(ms(20));
            }
        }
    });
}

/// How many connections the nodes have accepted, those of this question included.
fn accepted(cluster: &RedisCluster) -> usize {
    let of = |node: &testbed::RedisServer| -> usize {
        let stats = node.cli(&["INFO", "stats"]);
        let mut lines = stats.lines();
        let count = lines.find_map(|line| line.strip_prefix("total_connections_received:"));
        count.unwrap().trim().parse().unwrap()
    };
    cluster.nodes().iter().map(of).sum()
}

/// An error that says nothing about the slots is no reason to ask for them again.
#[test]
fn full_memory_opens_no_connections() {
    within(HANG, || {
        let cluster = RedisCluster::start();
        let factory = factory(&cluster);
        let mut one = Driven::with(&factory, "m", "a", lease());
        let fence = one.own();
        one.release(fence);
        let limit = |bytes: &str| {
            for node in cluster.nodes() {
                node.cli(&["CONFIG", "SET", "maxmemory", bytes]);
            }
        };
        limit("1");
        let before = accepted(&cluster);
        let end = Instant::now() + ms(2_000);
        while Instant::now() < end {
            let error = one.raw.acquire(OnRefusal::Leave, soon()).unwrap_err();
            assert!(error.to_string().contains("raise maxmemory"), "{error}");
            thread::sleep(ms(10));
        }
        // Those of the question itself, and a few that replace what was idle.
        let opened = accepted(&cluster) - before - cluster.nodes().len();
        assert!(opened <= 6, "{opened} connections in 2 s");
        limit("0");
    });
}

/// A node that answers nothing must not take the time of those whose mutexes lie elsewhere.
#[test]
fn hung_node_costs_others_no_renewal() {
    within(HANG, || {
        let cluster = RedisCluster::start();
        let factory = factory(&cluster);
        let hung = cluster.master_of("simba:{m0}", 0);
        let elsewhere = (1..100).map(|number| format!("m{number}"));
        let elsewhere = elsewhere
            .into_iter()
            .find(|it| cluster.master_of(&format!("simba:{{{it}}}"), 0) != hung)
            .unwrap();
        let mut victim = Driven::at(&factory, "m0", "a");
        victim.own();
        let mut owner = Driven::at(&factory, &elsewhere, "a");
        let fence = owner.own();
        cluster.node(hung).pause();
        for _ in 0..5 {
            // Makes the map stale.
            let by = Moment::now() + ms(200);
            let _ = victim.raw.acquire(OnRefusal::Leave, by);
            let by = Moment::now() + contend::Lease::default().request_limit();
            let renewal = owner.raw.renew(fence, by).unwrap();
            assert!(matches!(renewal, Renewal::Renewed(_)), "{renewal:?}");
        }
        cluster.node(hung).resume();
    });
}

#[test]
fn moved_mutex_takes_its_waiters_along() {
    within(HANG, || {
        let cluster = RedisCluster::start();
        // A lease that does not end during the test.
        let factory = Builder::cluster(cluster.addresses()).build().unwrap();
        let (owner, in_owner) = started(&factory, "m", "a");
        let first = next(&in_owner, EventKind::Acquired).fence();
        let (waiter, in_waiter) = started(&factory, "m", "b");
        wait_for_owner(&waiter, "a");
        let observer = factory.observe("m").build().unwrap();
        observer.start().unwrap();
        wait_until(PATIENCE, "the observer sees the owner", || {
            observer.state().after().is_owner("a")
        });
        let (_, heir) = fail_over(&cluster);
        cluster.wait_ok();
        for channel in ["simba:{m}:a", "simba:{m}:b", "simba:{m}!handed"] {
            wait_until(PATIENCE, "all listen on the new master", || {
                listeners(cluster.node(heir), channel) == 1
            });
        }
        assert!(owner.is_owner() && owner.fence() == first);
        let began = Instant::now();
        owner.stop().unwrap();
        let second = next(&in_waiter, EventKind::Acquired).fence();
        assert!(began.elapsed() < ms(12_000), "{:?}", began.elapsed());
        assert!(second > first);
        wait_until(PATIENCE, "the observer sees the next owner", || {
            observer.state().after().is_owner("b")
        });
    });
}

/// `contend status` does not fail after a move of a slot.
#[test]
fn inspection_follows_a_failover() {
    within(HANG, || {
        let cluster = RedisCluster::start();
        let factory = factory(&cluster);
        let mut owner = Driven::with(&factory, "m", "owner", lease());
        owner.own();
        Driven::with(&factory, "m", "waiter", lease()).queue();
        let waiters = || factory.participants("m").map(|it| it.len());
        assert_eq!(waiters().unwrap(), 1);
        let (master, _) = fail_over(&cluster);
        wait_until(PATIENCE, "the old master knows it", || {
            cluster.node(master).cli(&["ROLE"]).starts_with("slave")
        });
        assert_eq!(waiters().unwrap(), 1, "MOVED is followed");
    });
}

/// Health tells what is known, also before there is a map of the slots.
#[test]
fn health_asks_no_node() {
    let node = TcpListener::bind("127.0.0.1:0").unwrap();
    node.set_nonblocking(true).unwrap();
    let factory = Builder::cluster([node.local_addr().unwrap().to_string()]);
    let factory = factory.build().unwrap();
    for _ in 0..5 {
        let _ = factory.health();
        thread::sleep(ms(50)); // a connection would take far less
    }
    assert!(node.accept().is_err(), "it connected");
}
