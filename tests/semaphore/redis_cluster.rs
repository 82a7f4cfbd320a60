//! Semaphores on a Redis cluster.

use std::thread;
use std::time::Duration;

use contend::semaphore::{PermitRequest, Semaphores};
use testbed::{RedisCluster, within};

use crate::ground::{connect, want};
use crate::mysql_ground::{HANG, ms};

const PATIENCE: Duration = Duration::from_secs(60);
const KEY: &str = "simba:permits:{simba}:counts";

/// Acquires of several semaphores, waits, renewals and releases, by two processes.
fn use_it(here: &Semaphores, elsewhere: &Semaphores) {
    for name in ["a", "b"] {
        here.create(name, 1).unwrap();
    }
    let both = PermitRequest::generated()
        .permits("a", 1)
        .permits("b", 1)
        .ttl(ms(1_000));
    let held = here.guard(&both, PATIENCE).unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| elsewhere.guard(&both, PATIENCE).unwrap());
        // Longer than the ttl: it is renewed.
        thread::sleep(ms(1_500));
        assert!(held.is_valid() && !waiting.is_finished());
        let fence = held.fence("b");
        held.release().unwrap();
        let next = waiting.join().unwrap();
        assert!(next.fence("b") > fence);
        next.release().unwrap();
    });
    assert_eq!(here.usage("a").unwrap().held, 0);
    assert_eq!(here.check().unwrap(), []);
}

#[test]
fn cluster_acquires_renews_and_releases() {
    within(HANG, || {
        let cluster = RedisCluster::start();
        let here = connect(&cluster.url());
        use_it(&here, &connect(&cluster.url()));
        // The slot moves while a guard holds a permit, and the message still comes.
        let guard = here.guard(&want("moved", "a", 1).ttl(ms(1_000)), PATIENCE);
        let guard = guard.unwrap();
        let elsewhere = connect(&cluster.url());
        thread::scope(|scope| {
            let waiting = scope.spawn(|| elsewhere.guard(&want("next", "a", 1), PATIENCE).unwrap());
            thread::sleep(ms(300)); // it waits
            move_slot(&cluster);
            thread::sleep(ms(1_500)); // longer than the ttl: it is renewed
            assert!(guard.is_valid(), "the permits were lost with the slot");
            guard.release().unwrap();
            waiting.join().unwrap().release().unwrap();
        });
        use_it(&here, &elsewhere);
    });
}

/// Moves the slot of the semaphores from its master to another one, slowly.
fn move_slot(cluster: &RedisCluster) {
    let from = cluster.master_of(KEY, 0);
    let masters = cluster.masters();
    let to = *masters.iter().find(|it| **it != from).unwrap();
    let slot = cluster.node(0).cli(&["CLUSTER", "KEYSLOT", KEY]);
    let ids = [from, to].map(|node| cluster.node(node).cli(&["CLUSTER", "MYID"]));
    let set = |node: usize, state: &str, id: &str| {
        let words = ["CLUSTER", "SETSLOT", slot.trim(), state, id.trim()];
        assert_eq!(cluster.node(node).cli(&words).trim(), "OK");
    };
    set(to, "IMPORTING", &ids[0]);
    set(from, "MIGRATING", &ids[1]);
    thread::sleep(ms(500)); // on its way, with all keys here
    let keys = cluster
        .node(from)
        .cli(&["CLUSTER", "GETKEYSINSLOT", slot.trim(), "100"]);
    let port = cluster.node(to).port().to_string();
    let mut migrate = vec!["MIGRATE", "127.0.0.1", &port, "", "0", "5000", "KEYS"];
    migrate.extend(keys.lines());
    assert_eq!(cluster.node(from).cli(&migrate).trim(), "OK");
    thread::sleep(ms(500)); // with all keys there
    for node in [to, from] {
        set(node, "NODE", &ids[1]);
    }
}
