//! The threads behind the fronts. It counts those of the process.

use std::time::Instant;

use crate::conformance::hooked::{self, Call};
use crate::conformance::{HANG, PATIENCE, ms};
use contend::{Guard, Lease, Locker};
use testbed::{threads, wait_until, within};

/// A thread that was joined is counted for a moment longer.
#[track_caller]
fn has_threads(count: usize) {
    let me = std::process::id();
    wait_until(PATIENCE, "so many threads", || threads(me) == count);
}

alone! {
    fn two_threads_renew_all_guards() {
        within(HANG, || {
            let me = std::process::id();
            let before = threads(me);
            let lease = Lease::new(ms(3_000), ms(1_500)).unwrap();
            let factory = contend::memory::factory("threads", lease);
            let lockers: Vec<Locker> = (0..200)
                .map(|number| factory.locker(format!("m-{number}")).build().unwrap())
                .collect();
            has_threads(before); // a locker has no thread
            let guards: Vec<Guard> = lockers
                .iter()
                .map(|locker| locker.lock().unwrap())
                .collect();
            has_threads(before + 1);
            let until = Instant::now() + lease.total();
            while Instant::now() < until {
                assert!(guards.iter().all(Guard::is_valid));
                std::thread::sleep(ms(10));
            }
            has_threads(before + 2);
            for guard in guards {
                guard.unlock().unwrap();
            }
            drop(lockers);
            has_threads(before + 2); // they go with the factory
            drop(factory);
            has_threads(before);

            // The last of factory, locker and guard ends it.
            let factory = contend::memory::factory("threads", lease);
            let locker = factory.locker("m").build().unwrap();
            let guard = locker.lock().unwrap();
            drop((factory, locker));
            assert!(guard.is_valid());
            has_threads(before + 1);
            drop(guard);
            has_threads(before);

            helpers_come_where_renewals_hang_and_go_again(before);
        });
    }
}

fn helpers_come_where_renewals_hang_and_go_again(before: usize) {
    let me = std::process::id();
    let lease = Lease::new(ms(2_000), ms(2_000)).unwrap();
    let memory = contend::memory::factory("helpers", lease);
    let (factory, hung) = hooked::hanging(&memory, |call, _| call == Call::Renew);
    let lock = |number| {
        let locker = factory.locker(format!("m-{number}")).build().unwrap();
        locker.lock().unwrap()
    };
    hung.on();
    let guards: Vec<Guard> = (0..8).map(lock).collect();
    let mut most = 0;
    wait_until(PATIENCE, "all guards are lost", || {
        most = most.max(threads(me));
        !guards.iter().any(Guard::is_valid)
    });
    assert!(
        most <= before + 9,
        "one for each and one that watches, not {most}"
    );
    hung.off();
    drop(guards);
    let guard = lock(8);
    wait_until(PATIENCE, "the helpers have gone", || {
        threads(me) <= before + 2
    });
    assert!(guard.is_valid());

    // Those that are still there go with the factory.
    hung.on();
    let other = lock(9);
    wait_until(PATIENCE, "a helper has come", || threads(me) > before + 2);
    drop((guard, other, factory, memory));
    has_threads(before);
}
