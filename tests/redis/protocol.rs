//! Redis, contender by contender: what the scripts promise, without a service around them.

use std::sync::{Arc, LazyLock};
use std::time::Instant;

use contend::backend::{OnRefusal, Renewal};
use contend::redis::Builder;
use contend::{Factory, Lease, Moment, Parker, Unparked};
use testbed::{Direction, Proxy, RedisServer, wait_until, within};

use crate::driven::{Driven, HANG, PATIENCE, ms, soon};

static SERVER: LazyLock<RedisServer> = LazyLock::new(RedisServer::start);

fn builder() -> Builder {
    Builder::new(SERVER.addr().to_string())
}

fn factory() -> Factory {
    builder().build().unwrap()
}

fn name(fact: &str) -> String {
    format!("{fact}-{:08x}", rand::random::<u32>())
}

fn keys(mutex: &str) -> Vec<String> {
    let pattern = format!("simba:{{{mutex}}}*");
    let found = SERVER.cli(&["KEYS", &pattern]);
    found
        .lines()
        .map(str::to_owned)
        .filter(|key| !key.is_empty())
        .collect()
}

#[test]
fn what_lies_on_the_server_is_simbas_and_expires() {
    within(HANG, || {
        let mutex = name("layout");
        let factory = factory();
        let mut owner = Driven::at(&factory, &mutex, "0:12@10.0.0.1");
        let fence = owner.own();
        Driven::at(&factory, &mutex, "waiter").refused(OnRefusal::Enqueue);
        let key = format!("simba:{{{mutex}}}");
        assert_eq!(SERVER.cli(&["GET", &key]).trim(), "0:12@10.0.0.1");
        let left: u64 = SERVER.cli(&["PTTL", &key]).trim().parse().unwrap();
        assert!(
            (10_000..=16_000).contains(&left),
            "ttl + transition: {left}"
        );
        let score = SERVER.cli(&["ZSCORE", &format!("{key}:contender"), "waiter"]);
        let now: f64 = SERVER
            .cli(&["TIME"])
            .lines()
            .next()
            .unwrap()
            .parse()
            .unwrap();
        let waited = now - score.trim().parse::<f64>().unwrap();
        assert!(waited.abs() < 60.0, "seconds, as Simba counts: {score}");
        assert_eq!(keys(&mutex).len(), 4);
        for key in keys(&mutex) {
            let left: i64 = SERVER.cli(&["PTTL", &key]).trim().parse().unwrap();
            assert!(left > 0, "{key} would stay for ever");
        }
        let channel = format!("{key}:waiter");
        wait_until(PATIENCE, "it is unsubscribed", || {
            SERVER.cli(&["PUBSUB", "NUMSUB", &channel]).lines().last() == Some("0")
        });
        owner.release(fence);
        // No process listens for the waiter: it is forgotten.
        assert_eq!(keys(&mutex), [format!("{key}:fence")]);
    });
}

/// Rule 5, and 9.
#[test]
fn only_the_fence_that_was_granted_renews_and_releases() {
    within(HANG, || {
        let mutex = name("fence");
        let mut a = Driven::at(&factory(), &mutex, "a");
        let fence = a.own();
        for wrong in [0, fence - 1, fence + 1, u64::MAX] {
            let renewal = a.raw.renew(wrong, soon()).unwrap();
            assert!(matches!(renewal, Renewal::Lost(owner) if owner.fence() == fence));
            assert!(!a.raw.release(wrong, soon()).unwrap());
        }
        assert!(matches!(
            a.raw.renew(fence, soon()).unwrap(),
            Renewal::Renewed(grant) if grant.owner.fence() == fence
        ));
        a.release(fence);
        // Renew creates nothing.
        let renewal = a.raw.renew(fence, soon()).unwrap();
        assert!(matches!(renewal, Renewal::Lost(owner) if owner.owner_id().is_empty()));
        assert!(!a.raw.release(fence, soon()).unwrap());
        let mut last = fence;
        for _ in 0..200 {
            let fence = a.own();
            assert!(fence > last);
            last = fence;
            a.release(fence);
        }
    });
}

/// Rule "every claim carries its fence". The reply is lost with its connection, and what was granted is
/// adopted on another one within the same call.
#[test]
fn a_lost_reply_is_adopted_with_a_higher_fence_and_the_full_lease() {
    within(HANG, || {
        let mutex = name("ghost");
        let proxy = Proxy::to(SERVER.addr());
        let through = Builder::new(proxy.addr().to_string()).build().unwrap();
        let mut a = Driven::at(&through, &mutex, "a");
        let fence = a.own();
        a.release(fence);
        proxy.lose_reply_to(b"EVALSHA");
        let adopted = a.own();
        assert_eq!(proxy.lost_replies(), 1);
        assert!(adopted > fence, "{adopted} after {fence}");
        let key = format!("simba:{{{mutex}}}");
        let token = || -> u64 {
            let token = SERVER.cli(&["GET", &format!("{key}:token")]);
            token.trim().parse().unwrap()
        };
        assert_eq!(token(), adopted);
        SERVER.cli(&["PEXPIRE", &key, "9000"]);
        let again = a.own();
        assert!(again > adopted, "{again} after {adopted}");
        let left: u64 = SERVER.cli(&["PTTL", &key]).trim().parse().unwrap();
        assert!(left > 9_000, "{left}");
        SERVER.cli(&["PEXPIRE", &key, "30000"]);
        let last = a.own();
        let left: u64 = SERVER.cli(&["PTTL", &key]).trim().parse().unwrap();
        assert!(left > 20_000, "an adoption ends nothing earlier: {left}");
        assert!(!a.raw.release(adopted, soon()).unwrap());
        a.release(last);
    });
}

/// Rules 3 and 5: the server comes to it when nobody waits for it any more.
#[test]
fn a_request_that_comes_too_late_does_nothing() {
    within(HANG, || {
        let server = RedisServer::start();
        let factory = Builder::new(server.addr().to_string()).build().unwrap();
        let mut a = Driven::at(&factory, "late", "a");
        let fence = a.own();
        a.release(fence);
        server.pause();
        assert!(
            a.raw
                .acquire(OnRefusal::Enqueue, Moment::now() + ms(200))
                .is_err()
        );
        // Time itself is the subject: the deadline must have passed on the server's clock, too.
        std::thread::sleep(ms(1_500));
        server.resume();
        assert_eq!(server.cli(&["GET", "simba:{late}"]).trim(), "");
        assert_eq!(server.cli(&["ZCARD", "simba:{late}:contender"]).trim(), "0");
        let fence = a.own();
        a.release(fence);
    });
}

#[test]
fn the_order_is_strict_also_for_a_releaser_that_comes_straight_back() {
    within(HANG, || {
        let mutex = name("order");
        let factories = [factory(), factory()];
        let mut owner = Driven::at(&factories[0], &mutex, "owner");
        let mut fence = owner.own();
        let mut waiters: Vec<_> = (0..4)
            .map(|number| {
                let mut waiter =
                    Driven::at(&factories[number % 2], &mutex, &format!("waiter-{number}"));
                waiter.queue();
                waiter
            })
            .collect();
        for waiter in &mut waiters {
            owner.release(fence);
            owner.refused(OnRefusal::Leave);
            fence = waiter.take_turn().owner.fence();
            assert!(owner.refused(OnRefusal::Leave).owner.has_owner());
            std::mem::swap(&mut owner, waiter);
        }
    });
}

/// As a process that dies: its connections are gone, its place in the queue is not.
#[test]
fn a_dead_waiter_is_passed_over_at_once() {
    within(HANG, || {
        let mutex = name("dead");
        let factory = factory();
        let mut owner = Driven::at(&factory, &mutex, "owner");
        let fence = owner.own();
        let dying = self::factory();
        for number in 0..3 {
            let mut waiter = Driven::at(&dying, &mutex, &format!("dying-{number}"));
            waiter.queue();
        }
        drop(dying);
        for number in 0..3 {
            wait_until(PATIENCE, "the server knows that they are gone", || {
                let channel = format!("simba:{{{mutex}}}:dying-{number}");
                SERVER.cli(&["PUBSUB", "NUMSUB", &channel]).lines().last() == Some("0")
            });
        }
        let mut next = Driven::at(&factory, &mutex, "next");
        next.queue();
        let queue = format!("simba:{{{mutex}}}:contender");
        assert_eq!(SERVER.cli(&["ZCARD", &queue]).trim(), "4");
        owner.release(fence);
        let released = Instant::now();
        next.take_turn();
        assert!(released.elapsed() < ms(8_000), "{:?}", released.elapsed());
        assert_eq!(SERVER.cli(&["ZCARD", &queue]).trim(), "0");
    });
}

#[test]
fn a_hand_over_that_is_not_claimed_passes_on_and_the_next_is_told() {
    within(HANG, || {
        let mutex = name("unclaimed");
        let factory = factory();
        let mut owner = Driven::at(&factory, &mutex, "owner");
        let fence = owner.own();
        let proxy = Proxy::to(SERVER.addr());
        let asleep = Builder::new(proxy.addr().to_string()).build().unwrap();
        let mut sleeper = Driven::at(&asleep, &mutex, "sleeper");
        sleeper.queue();
        proxy.black_hole(Direction::Both);
        let mut next = Driven::at(&factory, &mutex, "next");
        assert!(next.queue().retry_in > ms(9_000));
        owner.release(fence);
        let released = Instant::now();
        next.take_turn();
        let waited = released.elapsed();
        // Not the lease of 16 s that it saw.
        assert!((ms(490)..ms(10_000)).contains(&waited), "{waited:?}");
        proxy.pass();
        // It stands where it stood: next after the present owner.
        assert!(sleeper.refused(OnRefusal::Enqueue).owner.is_owner("next"));
    });
}

#[test]
fn a_waiter_that_withdraws_passes_its_turn_on_and_leaves_no_trace() {
    within(HANG, || {
        let mutex = name("withdraw");
        let factory = factory();
        let mut owner = Driven::at(&factory, &mutex, "owner");
        let fence = owner.own();
        let mut first = Driven::at(&factory, &mutex, "first");
        first.queue();
        let mut second = Driven::at(&factory, &mutex, "second");
        second.queue();
        owner.release(fence);
        // Not asleep: its turn has come, and nothing more was done about it.
        wait_until(PATIENCE, "the first is told", || {
            first.parker.park(Moment::now()) == Unparked::Wake
        });
        first.raw.withdraw(soon()).unwrap();
        let fence = second.take_turn().owner.fence();
        first.queue();
        first.raw.withdraw(soon()).unwrap();
        second.release(fence);
        assert_eq!(keys(&mutex), [format!("simba:{{{mutex}}}:fence")]);
        // Nothing is handed over, nobody waits.
        let fence = owner.own();
        owner.release(fence);
        wait_until(PATIENCE, "nobody listens for who withdrew", || {
            let channel = format!("simba:{{{mutex}}}:first");
            SERVER.cli(&["PUBSUB", "NUMSUB", &channel]).lines().last() == Some("0")
        });
    });
}

/// Whoever comes by first when a lease has run out: the one who waited longest owns.
#[test]
fn a_lease_that_runs_out_goes_to_the_longest_waiter() {
    within(HANG, || {
        let mutex = name("expiry");
        let factory = factory();
        let lease = Lease::new(ms(2_000), ms(1_000)).unwrap();
        Driven::with(&factory, &mutex, "dead", lease).own();
        let mut first = Driven::at(&factory, &mutex, "first");
        first.queue();
        let mut second = Driven::at(&factory, &mutex, "second");
        let refusal = second.queue();
        assert!(refusal.retry_in <= ms(3_001), "{refusal:?}");
        std::thread::sleep(refusal.retry_in);
        let mut passer_by = Driven::at(&factory, &mutex, "passer-by");
        passer_by.refused(OnRefusal::Leave);
        second.refused(OnRefusal::Enqueue);
        first.take_turn();
    });
}

#[test]
fn a_flushed_script_cache_and_a_flushed_server_are_no_obstacle() {
    within(HANG, || {
        let server = RedisServer::start();
        let factory = Builder::new(server.addr().to_string()).build().unwrap();
        let mut a = Driven::at(&factory, "flush", "a");
        let first = a.own();
        server.cli(&["SCRIPT", "FLUSH"]);
        assert!(matches!(
            a.raw.renew(first, soon()).unwrap(),
            Renewal::Renewed(_)
        ));
        server.cli(&["FLUSHALL"]);
        assert!(matches!(
            a.raw.renew(first, soon()).unwrap(),
            Renewal::Lost(_)
        ));
        let second = a.own();
        assert!(second > first, "{second} after {first}");
    });
}

#[test]
fn an_acquire_and_a_release_are_one_command_each() {
    within(HANG, || {
        let server = RedisServer::start();
        let factory = Builder::new(server.addr().to_string()).build().unwrap();
        let mut a = Driven::at(&factory, "count", "a");
        let fence = a.own();
        a.release(fence);
        server.cli(&["CONFIG", "RESETSTAT"]);
        for _ in 0..100 {
            let fence = a.own();
            a.release(fence);
        }
        let stats = server.cli(&["INFO", "commandstats"]);
        let calls = |command: &str| {
            let line = stats
                .lines()
                .find(|line| line.starts_with(&format!("cmdstat_{command}:")));
            line.map_or(0, |line| {
                let calls = line.split(['=', ',']).nth(1).unwrap();
                calls.parse::<u64>().unwrap()
            })
        };
        assert_eq!(calls("evalsha"), 200, "{stats}");
        for command in ["ping", "eval", "script|load", "client|setinfo", "select"] {
            assert_eq!(calls(command), 0, "{command}: {stats}");
        }
    });
}

#[test]
fn an_observer_is_rung_and_sees_what_the_owner_has() {
    within(HANG, || {
        let mutex = name("observe");
        let factory = factory();
        let shared: Arc<str> = mutex.as_str().into();
        let (backend, parker) = (factory.backend().unwrap(), Parker::new());
        let mut watch = backend.observer(&shared, &parker.unparker()).unwrap();
        assert!(!watch.observe(soon()).unwrap().owner.has_owner());
        let mut a = Driven::at(&self::factory(), &mutex, "a");
        let fence = a.own();
        assert_eq!(parker.park(Moment::now() + PATIENCE), Unparked::Wake);
        let sight = watch.observe(soon()).unwrap();
        assert!(sight.owner.is_in_ttl_of("a") && sight.owner.fence() == fence);
        assert_eq!(sight.owner.transition_at() - sight.owner.ttl_at(), 6_000);
        assert!(sight.look_in <= ms(16_001), "{sight:?}");
        a.release(fence);
        assert_eq!(parker.park(Moment::now() + PATIENCE), Unparked::Wake);
        assert!(!watch.observe(soon()).unwrap().owner.has_owner());
    });
}
