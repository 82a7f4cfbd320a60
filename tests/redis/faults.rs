//! Redis in trouble: servers killed, restarted and flushed, connections cut, replies lost.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use contend::backend::{OnRefusal, Renewal};
use contend::redis::Builder;
use contend::{Error, ErrorKind, EventKind, Factory, Lease, Moment, Probe};
use testbed::{Proxy, RedisServer, wait_until, within};

use crate::conformance::{lease, next, outage, started, wait_for_owner};
use crate::driven::{Driven, HANG, PATIENCE, factory, listeners, ms, soon};

/// What a machine that has other things to do may add to any time.
const SLOW: Duration = Duration::from_secs(5);

fn with_lease(address: impl ToString, lease: Lease) -> Factory {
    let builder = Builder::new(address.to_string())
        .ttl(lease.ttl())
        .transition(lease.transition());
    builder.build().unwrap()
}

#[test]
fn waiter_without_messages_is_told_all_the_same() {
    within(HANG, || {
        let server = RedisServer::start();
        let factory = factory(server.addr());
        let (mut owner, mut in_owner) = started(&factory, "m", "a");
        next(&in_owner, EventKind::Acquired);
        for round in 0..5 {
            let (waiter, in_waiter) = started(&factory, "m", &format!("waiter-{round}"));
            wait_for_owner(&waiter, owner.id());
            let killed = server.cli(&["CLIENT", "KILL", "TYPE", "pubsub"]);
            assert_eq!(killed.trim(), "1");
            let began = Instant::now();
            owner.stop().unwrap();
            next(&in_waiter, EventKind::Acquired);
            // Not at the end of the lease (16 s) that it saw.
            assert!(began.elapsed() < ms(12_000), "{:?}", began.elapsed());
            (owner, in_owner) = (waiter, in_waiter);
        }
        drop(in_owner);
    });
}

#[test]
fn server_that_lost_its_data_gives_a_larger_fence() {
    within(HANG, || {
        let server = RedisServer::start();
        let (a, events) = started(&with_lease(server.addr(), lease()), "m", "a");
        let mut last = next(&events, EventKind::Acquired).fence();
        for restarts in [true, false, true] {
            let began = Instant::now();
            if restarts {
                server.restart();
            } else {
                server.cli(&["FLUSHALL"]);
            }
            next(&events, EventKind::Released);
            // The next renewal notices.
            let took = began.elapsed();
            assert!(took < lease().ttl() + SLOW, "{took:?}");
            let again = next(&events, EventKind::Acquired).fence();
            assert!(again > last, "{again:?} after {last:?}");
            last = again;
        }
        assert!(a.is_owner());
    });
}

/// A kernel ends a socket's wait up to an eighth late, which `try_lock` must not. Eight at once, as how late depends on
/// the moment; and again, as a busy machine is late by itself.
#[test]
fn try_lock_ends_in_time_although_the_kernel_rounds_up() {
    within(HANG, || {
        let server = RedisServer::start();
        // And what it takes until a thread runs again; an eighth are 250 ms.
        let bound = Lease::default().request_limit() + ms(50);
        wait_until(PATIENCE, "none of eight outlasts its time", || {
            let lockers: Vec<_> = (0..8)
                .map(|number| {
                    let locker = factory(server.addr()).locker(format!("m{number}"));
                    let locker = locker.build().unwrap();
                    locker.lock().unwrap().unlock().unwrap();
                    locker
                })
                .collect();
            server.pause();
            let took: Vec<_> = thread::scope(|scope| {
                let calls = lockers.iter().map(|locker| {
                    thread::sleep(ms(30));
                    scope.spawn(|| {
                        let began = Instant::now();
                        let error = locker.try_lock().unwrap_err();
                        assert_eq!(error.kind(), ErrorKind::Timeout, "{error:?}");
                        began.elapsed()
                    })
                });
                let calls: Vec<_> = calls.collect();
                calls.into_iter().map(|it| it.join().unwrap()).collect()
            });
            server.resume();
            println!("of {bound:?}: {took:?}");
            took.iter().all(|took| *took <= bound)
        });
    });
}

/// Unlocking has less time than locking: what it sets on the socket must not stay for the next lock, which
/// gave up on a slow server after a third of its time.
#[test]
fn slow_server_has_the_time_of_a_lock_after_an_unlock() {
    within(HANG, || {
        let server = RedisServer::start();
        let proxy = Proxy::to(server.addr());
        let locker = factory(proxy.addr()).locker("m").build().unwrap();
        for _ in 0..2 {
            locker.lock().unwrap().unlock().unwrap();
        }
        // Longer than an unlock waits, and well below the time of a lock.
        proxy.delay_replies(ms(1_000));
        let guard = locker.try_lock().unwrap();
        proxy.pass();
        guard.unlock().unwrap();
    });
}

/// Those who wait cannot use up the connections that an owner needs.
#[test]
fn crowd_does_not_keep_an_owner_from_renewing() {
    within(HANG, || {
        let server = RedisServer::start();
        let proxy = Proxy::to(server.addr());
        let factory = Builder::new(proxy.addr().to_string()).pool_size(4);
        let factory = factory.build().unwrap();
        let by = || Moment::now() + Duration::from_secs(60);
        let mut owner = Driven::at(&factory, "m", "owner");
        let fence = owner.own();
        // A round trip of 600 ms, and 60 that want one at once: 12 s for three connections.
        proxy.delay(ms(300));
        let crowd: Vec<_> = (0..60)
            .map(|number| {
                let mut one = Driven::at(&factory, "m", &format!("{number}"));
                thread::spawn(move || one.raw.acquire(OnRefusal::Leave, by()).unwrap())
            })
            .collect();
        thread::sleep(ms(300)); // they ask
        let began = Instant::now();
        let renewal = owner.raw.renew(fence, by()).unwrap();
        assert!(matches!(renewal, Renewal::Renewed(_)));
        assert!(began.elapsed() < ms(8_000), "{:?}", began.elapsed());
        assert!(crowd.iter().any(|thread| !thread.is_finished()));
        for thread in crowd {
            thread.join().unwrap();
        }
        assert!(proxy.accepted() <= 4, "{}", proxy.accepted());
    });
}

/// A waiter asks nothing until the lease of the owner ends; health shows the outage all the same.
#[test]
fn outage_shows_in_the_health_of_a_waiting_service() {
    within(HANG, || {
        let server = RedisServer::start();
        outage::shows_in_the_health_of_a_waiting_service(
            &server.url(),
            || server.kill(),
            || server.start(),
        );
    });
}

/// The reply to an acquire is lost, and the retry finds no connection: the outcome is unknown, although the retry was
/// not sent.
#[test]
fn lost_reply_is_adopted_by_the_next_lock() {
    within(HANG, || {
        let server = RedisServer::start();
        let proxy = Proxy::to(server.addr());
        // One connection: a second one, opened meanwhile, would serve the retry.
        let factory = Builder::new(proxy.addr().to_string())
            .ttl(ms(60_000))
            .transition(ms(6_000))
            .pool_size(1);
        let locker = factory.build().unwrap().locker("m").build().unwrap();
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
        let guard = locker.try_lock_for(ms(30_000)).unwrap();
        guard.unlock().unwrap();
        assert_eq!(server.cli(&["EXISTS", "simba:{m}"]).trim(), "0");
    });
}

/// A waiter must hear of the next release, which another server publishes by then.
#[test]
fn subscription_leaves_a_server_that_became_a_replica() {
    within(HANG, || {
        let (server, other) = (RedisServer::start(), RedisServer::start());
        let factory = factory(server.addr());
        let mut owner = Driven::at(&factory, "m", "a");
        let fence = owner.own();
        let _waiter = started(&factory, "m", "b");
        wait_until(PATIENCE, "it listens", || {
            listeners(&server, "simba:{m}") == 1
        });
        let listener = || server.cli(&["CLIENT", "LIST", "TYPE", "pubsub"]);
        let id = |list: String| list.split_once(' ').map(|(id, _)| id.to_owned());
        let before = id(listener());
        server.cli(&["REPLICAOF", "127.0.0.1", &other.port().to_string()]);
        assert!(owner.raw.renew(fence, soon()).is_err());
        wait_until(PATIENCE, "another connection listens", || {
            let present = id(listener());
            present.is_some() && present != before
        });
    });
}

/// What a probe is told of connections: opened ones, and broken ones.
#[derive(Default)]
struct Counts(AtomicUsize, AtomicUsize);

impl Probe for Counts {
    fn connected(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }

    fn disconnected(&self, _: &Error) {
        self.1.fetch_add(1, Ordering::SeqCst);
    }
}

/// A call on a connection that was closed meanwhile is made on another one. A probe hears of both.
#[test]
fn closed_connections_fail_no_call() {
    within(HANG, || {
        let server = RedisServer::start_with(&["--timeout", "1"]);
        // One connection: no other one is being opened when all are killed.
        let factory = Builder::new(server.addr().to_string()).pool_size(1);
        let (factory, counts) = (factory.build().unwrap(), Arc::new(Counts::default()));
        factory
            .backend()
            .unwrap()
            .set_probe(Arc::clone(&counts) as Arc<_>);
        let mut a = Driven::at(&factory, "m", "a");
        let mut fence = a.own();
        let kill = || server.cli(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
        let renews = |a: &mut Driven, fence| {
            let renewal = a.raw.renew(fence, soon()).unwrap();
            matches!(renewal, Renewal::Renewed(_))
        };
        for _ in 0..3 {
            kill();
            assert!(renews(&mut a, fence));
            kill();
            a.release(fence);
            kill();
            let next = a.own();
            assert!(next > fence);
            fence = next;
        }
        let (opened, broken) = (&counts.0, &counts.1);
        assert!(opened.load(Ordering::SeqCst) >= 9 && broken.load(Ordering::SeqCst) >= 9);
        // The server closes what idles for a second.
        wait_until(PATIENCE, "it has closed all of them", || {
            let list = server.cli(&["CLIENT", "LIST", "TYPE", "normal"]);
            list.lines().all(|line| line.contains("cmd=client"))
        });
        assert!(renews(&mut a, fence));
        server.restart();
        assert!(!renews(&mut a, fence));
        assert!(a.own() > fence);
    });
}
