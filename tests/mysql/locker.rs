//! Lockers with the lease that people use, and a patience that is shorter: of themselves, or of the
//! holder before them.

use crate::server;

use std::thread;
use std::time::{Duration, Instant};

use crate::conformance::{PATIENCE, elsewhere};
use crate::server::{HANG, database, ms, operator};
use contend::backend::{Attempt, Contender, OnRefusal, Purpose};
use contend::{ErrorKind, Factory, Lease, Moment, Parker};
use mysql::prelude::Queryable;
use testbed::{Proxy, within};

fn connect(url: &str) -> Factory {
    contend::connect(&format!("{url}?ttl=60s&transition=30s")).unwrap()
}

#[test]
fn a_short_timeout_is_enough_for_a_free_lock_and_to_learn_who_holds_another() {
    within(HANG, || {
        let url = database();
        let (ours, theirs) = (connect(&url), connect(&url));
        // The subject is a statement's time, not that of the first log-in.
        theirs.ping(PATIENCE).unwrap();
        let locker = theirs.locker("m").id("theirs").build().unwrap();
        for timeout in [1, 100, 700] {
            let guard = locker.try_lock_for(ms(timeout)).unwrap();
            guard.unlock().unwrap();
        }
        let _guard = ours.locker("m").id("ours").build().unwrap().lock().unwrap();
        for timeout in [1, 100, 700] {
            let error = elsewhere(|| locker.try_lock_for(ms(timeout)).map(drop).unwrap_err());
            assert_eq!(error.kind(), ErrorKind::Held, "{timeout} ms: {error}");
            assert!(error.to_string().contains("\"ours\""), "{error}");
        }
    });
}

#[test]
fn a_server_that_is_not_there_is_named_as_the_reason_whatever_the_timeout() {
    within(HANG, || {
        let port = testbed::Port::free();
        let factory = contend::connect(&format!("mysql://root@127.0.0.1:{}/app", port.number()));
        let locker = factory.unwrap().locker("m").build().unwrap();
        for timeout in [ms(100), ms(1_000)] {
            let error = locker.try_lock_for(timeout).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
        }
    });
}

/// From the unlock to the waiter's lock, after a hold that is long for a section and short for a lease.
fn hand_off(holder: &Factory, waiter: &Factory, purpose: Duration) -> Duration {
    let (a, b) = (
        holder.locker("m").build().unwrap(),
        waiter.locker("m").build().unwrap(),
    );
    let guard = a.lock().unwrap();
    let waiter = thread::spawn(move || {
        let guard = b.lock().unwrap();
        let at = Instant::now();
        drop(guard);
        at
    });
    thread::sleep(purpose);
    guard.unlock().unwrap();
    let released = Instant::now();
    waiter.join().unwrap().saturating_duration_since(released)
}

/// A wake-up is not waited for longer than a hand-over takes, however long the hold before it was.
#[test]
fn a_long_hold_is_followed_at_once_in_the_same_process_and_soon_in_another() {
    within(HANG, || {
        let hold = ms(2_000);
        let url = database();
        let (one, two) = (connect(&url), connect(&url));
        let same = hand_off(&one, &one, hold);
        let other = hand_off(&one, &two, hold);
        println!("same process: {same:?}, another: {other:?}");
        // Well below the poll interval, at which a lost wake-up would be made up for.
        assert!(same < ms(700), "{same:?}");
        assert!(other < ms(800), "{other:?}");
    });
}

/// Rule 5: who may own without knowing it asks the row, and not those who wait for the same mutex.
#[test]
fn a_lease_whose_grant_was_lost_is_adopted_although_others_wait() {
    within(HANG, || {
        let server = server::start();
        let proxy = Proxy::to(server.addr());
        let mut conn = operator(&server.url(""));
        conn.query_drop("CREATE DATABASE g").unwrap();
        conn.query_drop("USE g").unwrap();
        conn.query_drop(contend::mysql::INIT_SQL).unwrap();
        let (direct, port) = (server.url("g"), server.addr().port().to_string());
        let factory = contend::connect(&direct.replace(&port, &proxy.port().to_string())).unwrap();
        let backend = factory.backend().unwrap();
        let contender = |id: &str| {
            let place = Contender {
                mutex: "m".into(),
                id: id.into(),
                lease: Lease::default(),
                purpose: Purpose::Lock,
            };
            backend
                .contender(&place, &Parker::new().unparker())
                .unwrap()
        };
        let by = || Moment::now() + Duration::from_secs(20);
        let (mut first, mut unsure, mut other) =
            (contender("first"), contender("unsure"), contender("other"));
        let Attempt::Granted(grant) = first.acquire(OnRefusal::Leave, by()).unwrap() else {
            panic!("nobody else is there");
        };
        assert!(first.release(grant.owner.fence(), by()).unwrap());
        proxy.lose_reply_to(b"unsure");
        unsure.acquire(OnRefusal::Leave, by()).unwrap_err();
        let attempt = other.acquire(OnRefusal::Enqueue, by()).unwrap();
        let Attempt::Refused(refusal) = attempt else {
            panic!("the lost reply was a grant: {attempt:?}");
        };
        assert_eq!(refusal.owner.owner_id(), "unsure");
        let attempt = unsure.acquire(OnRefusal::Enqueue, by()).unwrap();
        let Attempt::Granted(grant) = attempt else {
            panic!("it is its own: {attempt:?}");
        };
        assert!(unsure.release(grant.owner.fence(), by()).unwrap());
    });
}
