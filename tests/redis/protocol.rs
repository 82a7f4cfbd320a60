//! Redis, contender by contender: what the scripts promise, without a service around them.

use std::sync::LazyLock;
use std::thread;
use std::time::Instant;

use contend::backend::{Attempt, CLAIM_TIME, OnRefusal, Renewal};
use contend::{EventKind, Factory, Lease, Moment};
use redis::Connection;
use testbed::{Direction, Proxy, RedisServer, wait_until, within};

use crate::conformance::{name, next, started, wait_for_owner};
use crate::driven::{Driven, HANG, PATIENCE, calls, factory, listeners, ms, soon};

static SERVER: LazyLock<RedisServer> = LazyLock::new(RedisServer::start);

/// A factory on the shared server.
fn shared() -> Factory {
    factory(SERVER.addr())
}

fn keys(mutex: &str) -> Vec<String> {
    let found = SERVER.cli(&["KEYS", &format!("simba:{{{mutex}}}*")]);
    found
        .lines()
        .map(str::to_owned)
        .filter(|key| !key.is_empty())
        .collect()
}

#[test]
fn keys_are_those_of_simba_and_expire() {
    within(HANG, || {
        let mutex = name("layout");
        let factory = shared();
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
            listeners(&SERVER, &channel) == 0
        });
        owner.release(fence);
        // No process listens for the waiter: it is forgotten.
        assert_eq!(keys(&mutex), [format!("{key}:fence")]);
    });
}

/// Rule "every claim carries its fence". The reply is lost with its connection, and what was granted is
/// adopted on another one within the same call.
#[test]
fn lost_reply_is_adopted_with_the_full_lease() {
    within(HANG, || {
        let mutex = name("ghost");
        let proxy = Proxy::to(SERVER.addr());
        let through = factory(proxy.addr());
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

/// The server comes to it when its caller has given up.
#[test]
fn late_request_does_nothing() {
    within(HANG, || {
        let server = RedisServer::start();
        let factory = factory(server.addr());
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
        thread::sleep(ms(1_500));
        server.resume();
        assert_eq!(server.cli(&["GET", "simba:{late}"]).trim(), "");
        assert_eq!(server.cli(&["ZCARD", "simba:{late}:contender"]).trim(), "0");
        let fence = a.own();
        a.release(fence);
    });
}

/// As processes that died: nothing listens for those that stand in the queue. A script looks at 16 of them.
#[test]
fn dead_waiters_are_passed_over() {
    within(HANG, || {
        let mutex = name("dead");
        let factory = shared();
        let mut owner = Driven::at(&factory, &mutex, "owner");
        let fence = owner.own();
        let queue = format!("simba:{{{mutex}}}:contender");
        for number in 0..40 {
            SERVER.cli(&["ZADD", &queue, "1.5", &format!("dead-{number}")]);
        }
        let mut next = Driven::at(&factory, &mutex, "next");
        next.queue();
        let released = Instant::now();
        owner.release(fence);
        next.take_turn();
        assert!(released.elapsed() < ms(8_000), "{:?}", released.elapsed());
        assert_eq!(SERVER.cli(&["ZCARD", &queue]).trim(), "0");
    });
}

#[test]
fn unclaimed_hand_over_passes_on() {
    within(HANG, || {
        let mutex = name("unclaimed");
        let factory = shared();
        let mut owner = Driven::at(&factory, &mutex, "owner");
        let fence = owner.own();
        let proxy = Proxy::to(SERVER.addr());
        let asleep = crate::driven::factory(proxy.addr());
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

/// Another contender comes by first when a lease has run out.
#[test]
fn expired_lease_goes_to_the_longest_waiter() {
    within(HANG, || {
        let mutex = name("expiry");
        let factory = shared();
        let lease = Lease::new(ms(2_000), ms(1_000)).unwrap();
        Driven::with(&factory, &mutex, "dead", lease).own();
        let mut first = Driven::at(&factory, &mutex, "first");
        first.queue();
        let mut second = Driven::at(&factory, &mutex, "second");
        let refusal = second.queue();
        assert!(refusal.retry_in <= ms(3_001), "{refusal:?}");
        thread::sleep(refusal.retry_in);
        let mut passer_by = Driven::at(&factory, &mutex, "passer-by");
        passer_by.refused(OnRefusal::Leave);
        second.refused(OnRefusal::Enqueue);
        first.take_turn();
    });
}

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

/// Each dark waiter before it costs a live one a claim time, and not the lease that it saw.
#[test]
fn dark_waiters_cost_a_claim_time_each() {
    within(HANG, || {
        let server = RedisServer::start();
        let factory = factory(server.addr());
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
            // And what a busy machine adds; the lease that it saw has 16 s.
            let most = CLAIM_TIME * (dark + 1) + ms(1_000);
            assert!(waited < most, "{dark} dark waiters: {waited:?}");
        }
    });
}

/// After a clock was set back, a hand-over would be kept for the size of the step.
#[test]
fn hand_over_beyond_the_claim_time_is_void() {
    within(HANG, || {
        let server = RedisServer::start();
        let factory = factory(server.addr());
        for command in [
            ["SET", "simba:{m}", "gone", "PX", "600000"],
            ["SET", "simba:{m}:token", "0", "PX", "600000"],
        ] {
            server.cli(&command);
        }
        let backend = factory.backend().unwrap();
        let owner = backend.owner(&"m".into(), soon()).unwrap();
        assert!(!owner.has_owner());
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
        assert!(backend.revoke(&"m".into(), 7, soon()).unwrap());
        assert!(a.owns_within(PATIENCE).owner.fence() > fence);
    });
}

#[test]
fn forgotten_scripts_are_sent_again() {
    within(HANG, || {
        let server = RedisServer::start();
        let mut a = Driven::at(&factory(server.addr()), "m", "a");
        let fence = a.own();
        server.cli(&["SCRIPT", "FLUSH"]);
        let renewal = a.raw.renew(fence, soon()).unwrap();
        assert!(matches!(renewal, Renewal::Renewed(_)), "{renewal:?}");
    });
}

#[test]
fn cycle_is_two_commands_and_no_subscription() {
    within(HANG, || {
        let server = RedisServer::start();
        let factory = factory(server.addr());
        let locker = factory.locker("m").id("a").build().unwrap();
        drop(locker.lock().unwrap());
        server.cli(&["CONFIG", "RESETSTAT"]);
        for _ in 0..100 {
            drop(locker.lock().unwrap());
        }
        assert_eq!(calls(&server, "evalsha:"), 200);
        for other in ["ping:", "eval:", "script|load:", "select:", "subscribe:"] {
            assert_eq!(calls(&server, other), 0, "{other}");
        }
    });
}
