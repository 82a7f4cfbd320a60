//! A Redis cluster whose masters change.

#![cfg(feature = "redis")]

mod conformance;

use std::time::{Duration, Instant};

use conformance::{HANG, PATIENCE, lease, next, started, wait_for_owner};
use contend::redis::Builder;
use contend::{EventKind, Factory};
use ground::{RedisCluster, wait_until, within};

fn factory(cluster: &RedisCluster) -> Factory {
    Builder::cluster(cluster.addresses())
        .lease(lease())
        .build()
        .unwrap()
}

/// Asynchronous replication may lose the last write: then only the fence keeps two owners apart, and
/// it must grow all the same.
#[test]
fn services_come_back_by_themselves_after_a_master_was_killed() {
    within(HANG, || {
        let cluster = RedisCluster::start();
        let factory = factory(&cluster);
        // Enough names to have some on every master; a waiter behind each owner.
        let mut pairs: Vec<_> = (0..12)
            .map(|number| {
                let mutex = format!("m{number}");
                let owner = started(&factory, &mutex, "a");
                let fence = next(&owner.1, EventKind::Acquired).fence();
                let waiter = started(&factory, &mutex, "b");
                wait_for_owner(&waiter.0, "a");
                (owner, waiter, fence)
            })
            .collect();
        let killed = cluster.masters()[0];
        cluster.kill(killed);
        let began = Instant::now();
        wait_until(PATIENCE, "every mutex has an owner", || {
            pairs
                .iter()
                .all(|((a, _), (b, _), _)| a.is_owner() != b.is_owner())
                && began.elapsed() > lease().total()
        });
        println!("all owned again {:?} after the kill", began.elapsed());
        for ((a, in_a), (b, in_b), fence) in &mut pairs {
            let (owner, waiter, in_waiter) = if a.is_owner() {
                (&*a, &*b, &*in_b)
            } else {
                (&*b, &*a, &*in_a)
            };
            let present = owner.fence();
            assert!(present >= *fence, "{present:?} after {fence:?}");
            while in_waiter.try_recv().is_ok() {}
            // And they hand over, by message: the waiter listens on the new master.
            wait_for_owner(waiter, owner.id());
            owner.stop().unwrap();
            let handed = next(in_waiter, EventKind::Acquired);
            assert!(handed.fence() > present);
        }
    });
}

#[test]
fn a_mutex_that_moves_to_another_node_takes_its_waiters_along() {
    within(HANG, || {
        let cluster = RedisCluster::start();
        // A lease in which nobody goes by time.
        let factory = Builder::cluster(cluster.addresses()).build().unwrap();
        let (owner, in_owner) = started(&factory, "m", "a");
        let first = next(&in_owner, EventKind::Acquired).fence();
        let (waiter, in_waiter) = started(&factory, "m", "b");
        wait_for_owner(&waiter, "a");
        let before = cluster.master_of("simba:{m}", 0);
        let heir = cluster
            .replicas()
            .into_iter()
            .find(|&index| {
                let port = cluster.node(before).port().to_string();
                cluster.node(index).cli(&["ROLE"]).lines().nth(2) == Some(port.as_str())
            })
            .unwrap();
        assert_eq!(
            cluster.node(heir).cli(&["CLUSTER", "FAILOVER"]).trim(),
            "OK"
        );
        wait_until(PATIENCE, "the replica took over", || {
            cluster.masters().contains(&heir)
        });
        cluster.wait_ok();
        let channel = "simba:{m}:b";
        wait_until(PATIENCE, "the waiter listens on the new master", || {
            cluster
                .node(heir)
                .cli(&["PUBSUB", "NUMSUB", channel])
                .lines()
                .last()
                == Some("1")
        });
        assert!(owner.is_owner() && owner.fence() == first);
        let began = Instant::now();
        owner.stop().unwrap();
        let second = next(&in_waiter, EventKind::Acquired).fence();
        assert!(
            began.elapsed() < Duration::from_secs(5),
            "{:?}",
            began.elapsed()
        );
        assert!(second > first);
    });
}
