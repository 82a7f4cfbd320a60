//! Semaphores on a Redis cluster.

use std::thread;

use contend::semaphore::{PermitRequest, Semaphores};
use testbed::{RedisCluster, within};

use crate::ground::{PATIENCE, connect, want};
use crate::mysql_ground::{HANG, ms};

const KEY: &str = "simba:permits:{simba}:counts";

/// Acquires of several semaphores, waits, renewals and releases, by two processes.
fn use_it(here: &Semaphores, elsewhere: &Semaphores) {
    for name in ["a", "b"] {
        here.create(name, 1).unwrap();
    }
    let both = PermitRequest::generated()
        .permits("a", 1)
        .permits("b", 1)
        .ttl(ms(2_000));
    let held = here.guard(&both, PATIENCE).unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| elsewhere.guard(&both, PATIENCE).unwrap());
        // Longer than the ttl: it is renewed.
        thread::sleep(ms(2_500));
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
        let guard = here.guard(&want("moved", "a", 1).ttl(ms(2_000)), PATIENCE);
        let guard = guard.unwrap();
        let elsewhere = connect(&cluster.url());
        thread::scope(|scope| {
            let waiting = scope.spawn(|| elsewhere.guard(&want("next", "a", 1), PATIENCE).unwrap());
            thread::sleep(ms(300)); // it waits
            let from = cluster.master_of(KEY, 0);
            let masters = cluster.masters();
            let to = *masters.iter().find(|it| **it != from).unwrap();
            // Time for the renewals to meet it on its way, with all keys here and with all keys there.
            cluster.move_slot(KEY, to, || thread::sleep(ms(500)));
            assert_eq!(cluster.master_of(KEY, from), to);
            thread::sleep(ms(2_500)); // longer than the ttl: it is renewed
            assert!(guard.is_valid(), "the permits were lost with the slot");
            guard.release().unwrap();
            waiting.join().unwrap().release().unwrap();
        });
        use_it(&here, &elsewhere);
    });
}
