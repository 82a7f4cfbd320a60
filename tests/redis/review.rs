//! What a review of the first version found, finding by finding.

use std::thread;
use std::time::{Duration, Instant};

use contend::backend::{Attempt, CLAIM_TIME, OnRefusal, Renewal, Wakeups};
use contend::redis::Builder;
use contend::{ErrorKind, EventKind, Lease};
use redis::Connection;
use testbed::{Proxy, RedisServer, wait_until, within};

use crate::conformance::{next, started, wait_for_owner};
use crate::driven::{Driven, HANG, PATIENCE, from_env, ms, soon};

/// A host that was powered off: its waiters stand in the queue and are subscribed, and never answer.
fn dark_waiter(server: &RedisServer, mutex: &str, id: &str) -> Connection {
    let client = redis::Client::open(server.url()).unwrap();
    let mut connection = client.get_connection().unwrap();
    let place = format!("1000000000.{:06}", rand::random_range(1..1_000_000));
    let queue = format!("simba:{{{mutex}}}:contender");
    server.cli(&["ZADD", &queue, &place, id]);
    let subscribe = redis::cmd("SUBSCRIBE")
        .arg(format!("simba:{{{mutex}}}:{id}"))
        .get_packed_command();
    connection.send_packed_command(&subscribe).unwrap();
    connection.recv_response().unwrap();
    connection
}

/// H3: 1.0 s with one dark waiter, 17.0 s with two, 20.4 s with six.
#[test]
fn a_live_waiter_owns_within_the_claim_time_of_those_dark_ones_before_it() {
    within(HANG, || {
        let server = RedisServer::start();
        let factory = Builder::new(server.addr().to_string()).build().unwrap();
        for dark in [0, 1, 3, 6] {
            let mutex = format!("dark-{dark}");
            let mut owner = Driven::at(&factory, &mutex, "owner");
            let fence = owner.own();
            let _dark: Vec<_> = (0..dark)
                .map(|number| dark_waiter(&server, &mutex, &format!("dark-{number}")))
                .collect();
            let (live, events) = started(&factory, &mutex, "live");
            wait_for_owner(&live, "owner");
            let began = Instant::now();
            owner.release(fence);
            next(&events, EventKind::Acquired);
            let waited = began.elapsed();
            println!("{dark} dark waiters: owned after {waited:?}");
            // And what a busy machine adds; the lease that it saw has 16 s.
            let most = CLAIM_TIME * (dark + 1) + ms(1_000);
            assert!(waited < most, "{dark} dark waiters: {waited:?}");
        }
    });
}

/// M7: 466 ms in one script, with the server blocked. `CONTEND_TEST_DEAD` is their number.
#[test]
fn many_dead_waiters_block_nobody_for_long() {
    within(HANG, || {
        let dead = from_env("CONTEND_TEST_DEAD", 20_000);
        let server = RedisServer::start();
        let factory = Builder::new(server.addr().to_string()).build().unwrap();
        let mut owner = Driven::at(&factory, "m", "owner");
        let fence = owner.own();
        let fill = "for i = 1, ARGV[1] do redis.call('ZADD', KEYS[1], 1000000000.5 + i / 1000000, 'dead-' .. i) end";
        server.cli(&["EVAL", fill, "1", "simba:{m}:contender", &dead.to_string()]);
        let mut live = Driven::at(&factory, "m", "live");
        live.queue();
        server.cli(&["CONFIG", "SET", "slowlog-log-slower-than", "0"]);
        server.cli(&["CONFIG", "SET", "slowlog-max-len", "100000"]);
        server.cli(&["SLOWLOG", "RESET"]);
        let began = Instant::now();
        owner.release(fence);
        let fence = live.owns_within(PATIENCE).owner.fence();
        let waited = began.elapsed();
        let client = redis::Client::open(server.url()).unwrap();
        let log: Vec<redis::Value> = (redis::cmd("SLOWLOG").arg("GET").arg(-1))
            .query(&mut client.get_connection().unwrap())
            .unwrap();
        let mut took: Vec<_> = (log.iter())
            .filter_map(|entry| match entry {
                redis::Value::Array(fields) => match fields[2] {
                    redis::Value::Int(micros) => u64::try_from(micros).ok(),
                    _ => None,
                },
                _ => None,
            })
            .collect();
        took.sort_unstable();
        println!(
            "{dead} dead waiters: owned after {waited:?}, longest command {:?} us",
            took.last()
        );
        // 16 of them in one script. Not the longest: a busy machine may stop the server in any of them.
        assert!(took[took.len() * 9 / 10] < 20_000, "{took:?} us");
        assert_eq!(server.cli(&["ZCARD", "simba:{m}:contender"]).trim(), "0");
        live.release(fence);
    });
}

/// M6: after a clock was set back, a reservation was live for the size of the step.
#[test]
fn a_hand_over_further_ahead_than_the_claim_time_is_void() {
    within(HANG, || {
        let server = RedisServer::start();
        let factory = Builder::new(server.addr().to_string()).build().unwrap();
        for command in [
            ["SET", "simba:{m}", "gone", "PX", "600000"],
            ["SET", "simba:{m}:token", "0", "PX", "600000"],
        ] {
            server.cli(&command);
        }
        assert!(
            !factory
                .backend()
                .unwrap()
                .owner(&"m".into(), soon())
                .unwrap()
                .has_owner()
        );
        let mut a = Driven::at(&factory, "m", "a");
        let fence = a.own();
        a.release(fence);
        // An ownership is not, even under a token that outlived what it was for.
        server.cli(&["SET", "simba:{m}", "other", "PX", "600000"]);
        server.cli(&["SET", "simba:{m}:token", "0", "PX", "400"]);
        let attempt = a.attempt(OnRefusal::Leave);
        assert!(matches!(attempt, Attempt::Refused(_)), "{attempt:?}");
        server.cli(&["SET", "simba:{m}:token", "7", "PX", "600000"]);
        let refusal = a.queue();
        assert!(refusal.owner.is_owner("other") && refusal.owner.fence() == 7);
        // That is what an operator revokes.
        let backend = factory.backend().unwrap();
        assert!(backend.revoke(&"m".into(), 7, soon()).unwrap());
        assert!(a.owns_within(PATIENCE).owner.fence() > fence);
    });
}

/// M4: the first call after the server closed idle connections failed.
#[test]
fn a_call_on_a_connection_that_was_closed_meanwhile_is_made_on_another() {
    within(HANG, || {
        let server = RedisServer::start_with(&["--timeout", "1"]);
        // One connection: no other one is being opened when all are killed.
        let factory = Builder::new(server.addr().to_string()).pool_size(1);
        let factory = factory.build().unwrap();
        let mut a = Driven::at(&factory, "m", "a");
        let mut fence = a.own();
        let killed = || server.cli(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
        for _ in 0..3 {
            killed();
            assert!(matches!(
                a.raw.renew(fence, soon()).unwrap(),
                Renewal::Renewed(_)
            ));
            killed();
            a.release(fence);
            killed();
            let next = a.own();
            assert!(next > fence);
            fence = next;
        }
        // The server closes what idles for a second.
        wait_until(PATIENCE, "it has closed all of them", || {
            let list = server.cli(&["CLIENT", "LIST", "TYPE", "normal"]);
            list.lines()
                .filter(|line| !line.contains("cmd=client"))
                .count()
                == 0
        });
        assert!(matches!(
            a.raw.renew(fence, soon()).unwrap(),
            Renewal::Renewed(_)
        ));
        server.restart();
        assert!(matches!(
            a.raw.renew(fence, soon()).unwrap(),
            Renewal::Lost(_)
        ));
        assert!(a.own() > fence);
    });
}

/// M3: 21 connections for five timed-out locks at a round trip of 60 ms.
#[test]
fn slow_round_trips_throw_no_connection_away() {
    within(HANG, || {
        let server = RedisServer::start();
        let proxy = Proxy::to(server.addr());
        proxy.delay(ms(30));
        let factory = Builder::new(proxy.addr().to_string()).build().unwrap();
        let holder = Builder::new(server.addr().to_string()).build().unwrap();
        let holder = holder.locker("m").build().unwrap();
        let guard = holder.lock().unwrap();
        let locker = factory.locker("m").build().unwrap();
        for _ in 0..5 {
            let refused = thread::scope(|scope| {
                scope
                    .spawn(|| locker.try_lock_for(ms(1_200)).map(|_| ()))
                    .join()
                    .unwrap()
            });
            assert_eq!(refused.unwrap_err().kind(), ErrorKind::Held);
        }
        // The pool may fill while the first connection is opened; and one for messages.
        assert!(proxy.accepted() <= 9, "{} connections", proxy.accepted());
        drop(guard);
    });
}

/// H2: "ERR max number of clients reached" was final.
#[test]
fn a_server_without_room_for_us_is_waited_for() {
    within(HANG, || {
        let server = RedisServer::start();
        server.cli(&["CONFIG", "SET", "maxclients", "2"]);
        let client = redis::Client::open(server.url()).unwrap();
        let full = [
            client.get_connection().unwrap(),
            client.get_connection().unwrap(),
        ];
        let factory = Builder::new(server.addr().to_string()).build().unwrap();
        let mut a = Driven::at(&factory, "m", "a");
        let error = a.raw.acquire(OnRefusal::Leave, soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
        assert!(error.is_transient() && error.is_not_sent());
        assert!(error.to_string().contains("raise maxclients"), "{error}");
        let locker = factory.locker("m").build().unwrap();
        thread::scope(|scope| {
            let waits = scope.spawn(|| locker.lock().map(drop));
            thread::sleep(ms(300));
            assert!(!waits.is_finished(), "it gave up");
            drop(full);
            waits.join().unwrap().unwrap();
        });
    });
}

/// Low: only the connection that said READONLY was thrown away.
#[test]
fn a_server_that_became_a_replica_costs_one_failed_call() {
    within(HANG, || {
        let server = RedisServer::start();
        let other = RedisServer::start();
        let factory = Builder::new(server.addr().to_string()).build().unwrap();
        // Several idle connections.
        thread::scope(|scope| {
            for number in 0..4 {
                let factory = &factory;
                scope.spawn(move || {
                    let mut one = Driven::at(factory, &format!("m{number}"), "a");
                    let fence = one.own();
                    one.release(fence);
                });
            }
        });
        let mut a = Driven::at(&factory, "m", "a");
        let fence = a.own();
        server.cli(&["REPLICAOF", "127.0.0.1", &other.port().to_string()]);
        let error = a.raw.renew(fence, soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
        assert!(
            error.to_string().contains("connect to the master"),
            "{error}"
        );
        server.cli(&["REPLICAOF", "NO", "ONE"]);
        let attempt = a.raw.acquire(OnRefusal::Leave, soon()).unwrap();
        assert!(matches!(attempt, Attempt::Granted(_)));
        let idle = factory.backend().unwrap().condition().pool.unwrap();
        assert!(idle.open <= 2, "{idle:?}");
    });
}

/// M7: every mutex name left a hash of 250 bytes. `CONTEND_TEST_NAMES` is their number.
#[test]
fn a_mutex_that_was_used_leaves_one_key_for_an_hour() {
    within(HANG, || {
        let names = from_env("CONTEND_TEST_NAMES", 1_000);
        let server = RedisServer::start();
        let factory = Builder::new(server.addr().to_string()).build().unwrap();
        let memory = || -> u64 {
            let info = server.cli(&["INFO", "memory"]);
            let line = info
                .lines()
                .find_map(|line| line.strip_prefix("used_memory:"));
            line.unwrap().trim().parse().unwrap()
        };
        let mut warm = Driven::at(&factory, "warm", "a");
        let fence = warm.own();
        warm.release(fence);
        let before = memory();
        for number in 0..names {
            let mut one = Driven::at(&factory, &format!("name-{number}"), "a");
            let fence = one.own();
            one.release(fence);
        }
        let keys: u64 = server.cli(&["DBSIZE"]).trim().parse().unwrap();
        assert_eq!(keys, names + 1);
        let after = memory();
        println!(
            "{names} names: {keys} keys, {} bytes each",
            (after - before) / names
        );
        // An hour later, as the server's own sweep sees it.
        let age = "for _, key in ipairs(redis.call('KEYS', '*')) do
                     redis.call('PEXPIRE', key, redis.call('PTTL', key) - 3616000) end";
        server.cli(&["EVAL", age, "0"]);
        wait_until(PATIENCE, "nothing is left", || {
            server.cli(&["DBSIZE"]).trim() == "0"
        });
        println!(
            "an hour later: {} bytes more than before",
            memory().saturating_sub(before)
        );
    });
}

/// Rule "dropping is stopping"; low: a second for each paused master, one after the other.
#[test]
fn dropping_a_factory_on_a_paused_server_takes_about_a_second() {
    within(HANG, || {
        let server = RedisServer::start();
        let factory = Builder::new(server.addr().to_string()).build().unwrap();
        let mut waiter = Driven::at(&factory, "m", "a");
        waiter.attempt(OnRefusal::Enqueue);
        assert_eq!(
            factory.backend().unwrap().condition().wakeups,
            Wakeups::Working
        );
        drop(waiter);
        server.pause();
        let began = Instant::now();
        drop(factory);
        let took = began.elapsed();
        server.resume();
        assert!(took < Duration::from_secs(6), "{took:?}");
    });
}

/// A service that leads is woken when it is revoked, steps down, and only its fence protects until then.
#[test]
fn a_revoked_leader_steps_down_at_once() {
    within(HANG, || {
        let server = RedisServer::start();
        let lease = Lease::new(ms(60_000), ms(10_000)).unwrap();
        let factory = Builder::new(server.addr().to_string())
            .ttl(lease.ttl())
            .transition(lease.transition());
        let factory = factory.build().unwrap();
        let (leader, events) = started(&factory, "m", "leader");
        let fence = next(&events, EventKind::Acquired).fence().unwrap();
        wait_until(PATIENCE, "it listens", || {
            let count = server.cli(&["PUBSUB", "NUMSUB", "simba:{m}"]);
            count.lines().last() == Some("1")
        });
        let began = Instant::now();
        assert!(
            factory
                .backend()
                .unwrap()
                .revoke(&"m".into(), fence, soon())
                .unwrap()
        );
        next(&events, EventKind::Released);
        assert!(began.elapsed() < ms(15_000), "{:?}", began.elapsed());
        assert!(next(&events, EventKind::Acquired).fence().unwrap() > fence);
        assert!(leader.is_owner());
    });
}
