//! Lockers with the lease that people use, and a patience that is shorter: of themselves, or of the
//! holder before them.

use std::thread;
use std::time::{Duration, Instant};

use crate::conformance::{PATIENCE, elsewhere};
use crate::server::{HANG, database, ms};
use contend::{ErrorKind, Factory};
use testbed::within;

fn connect(url: &str) -> Factory {
    contend::connect(&format!("{url}?ttl=60s&transition=30s")).unwrap()
}

#[test]
fn short_timeout_is_enough_to_lock_and_to_learn_the_holder() {
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
fn long_hold_is_followed_at_once() {
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
