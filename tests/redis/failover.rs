//! A Redis cluster whose masters change.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::conformance::{HANG, PATIENCE, lease, next, started, wait_for_owner};
use contend::backend::{Attempt, Contender, OnRefusal, Purpose};
use contend::redis::Builder;
use contend::{EventKind, Factory, Moment};
use testbed::{RedisCluster, wait_until, within};

fn factory(cluster: &RedisCluster) -> Factory {
    Builder::cluster(cluster.addresses())
        .ttl(lease().ttl())
        .transition(lease().transition())
        .build()
        .unwrap()
}

/// Threads that acquire and release all the time, each its own mutex, and do not mind errors.
struct Load {
    stop: Arc<AtomicBool>,
    turns: Vec<Arc<AtomicU64>>,
    threads: Vec<JoinHandle<()>>,
}

impl Load {
    fn on(factory: &Factory) -> Load {
        let stop = Arc::new(AtomicBool::new(false));
        let turns: Vec<Arc<AtomicU64>> = (0..6).map(|_| Arc::default()).collect();
        let threads = turns
            .iter()
            .enumerate()
            .map(|(number, turns)| {
                let place = Contender {
                    mutex: format!("load-{number}").into(),
                    id: "a".into(),
                    lease: lease(),
                    purpose: Purpose::Lock,
                };
                let backend = factory.backend().unwrap();
                let mut contender = backend
                    .contender(&place, &contend::Parker::new().unparker())
                    .unwrap();
                let (stop, turns) = (Arc::clone(&stop), Arc::clone(turns));
                std::thread::spawn(move || {
                    let soon = || Moment::now() + lease().request_limit();
                    let mut last = 0;
                    while !stop.load(Ordering::Relaxed) {
                        let Ok(Attempt::Granted(grant)) =
                            contender.acquire(OnRefusal::Leave, soon())
                        else {
                            std::thread::sleep(Duration::from_millis(5));
                            continue;
                        };
                        assert!(grant.owner.fence() > last, "fences grow");
                        last = grant.owner.fence();
                        if contender.release(last, soon()).is_ok() {
                            turns.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                })
            })
            .collect();
        let load = Load {
            stop,
            turns,
            threads,
        };
        load.wait_for_turns();
        load
    }

    fn wait_for_turns(&self) {
        for turns in &self.turns {
            let before = turns.load(Ordering::Relaxed);
            wait_until(PATIENCE, "the load goes on", || {
                turns.load(Ordering::Relaxed) > before + 10
            });
        }
    }

    fn goes_on(self) {
        self.wait_for_turns();
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads {
            thread.join().unwrap();
        }
    }
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
        let load = Load::on(&factory);
        let killed = cluster.masters()[0];
        cluster.kill(killed);
        let began = Instant::now();
        wait_until(PATIENCE, "every mutex has an owner", || {
            pairs
                .iter()
                .all(|((a, _), (b, _), _)| a.is_owner() != b.is_owner())
                && began.elapsed() > lease().total()
        });
        load.goes_on();
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
        let observer = factory.observe("m").build().unwrap();
        observer.start().unwrap();
        wait_until(PATIENCE, "the observer sees the owner", || {
            observer.state().after().is_owner("a")
        });
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
        for channel in ["simba:{m}:a", "simba:{m}:b", "simba:{m}!handed"] {
            wait_until(PATIENCE, "everybody listens on the new master", || {
                let listeners = cluster.node(heir).cli(&["PUBSUB", "NUMSUB", channel]);
                listeners.lines().last() == Some("1")
            });
        }
        assert!(owner.is_owner() && owner.fence() == first);
        let began = Instant::now();
        owner.stop().unwrap();
        let second = next(&in_waiter, EventKind::Acquired).fence();
        assert!(
            began.elapsed() < Duration::from_secs(12),
            "{:?}",
            began.elapsed()
        );
        assert!(second > first);
        wait_until(PATIENCE, "the observer sees the next owner", || {
            observer.state().after().is_owner("b")
        });
    });
}
