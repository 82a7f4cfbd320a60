//! The threads behind the fronts. It counts those of the process.

use std::fs;
use std::time::Instant;

use crate::conformance::hooked::{self, Call};
use crate::conformance::{HANG, PATIENCE, ms};
use contend::{ErrorKind, Guard, Lease, Locker, Status};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use testbed::{threads, wait_until, within};

/// A thread that was joined is counted for a moment longer.
#[track_caller]
fn has_threads(count: usize) {
    let me = std::process::id();
    wait_until(PATIENCE, "so many threads", || threads(me) == count);
}

/// Does something while no thread can be started: its stack does not fit in the memory that the process may map.
fn without_threads<T>(work: impl FnOnce() -> T) -> T {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let mapped = status.lines().find_map(|line| line.strip_prefix("VmSize:"));
    let mapped = mapped.and_then(|size| size.trim().strip_suffix(" kB"));
    let mapped: u64 = mapped.unwrap().parse().unwrap();
    let before = getrlimit(Resource::As);
    let tight = Rlimit {
        current: Some((mapped + 1_024) * 1_024),
        ..before
    };
    setrlimit(Resource::As, tight).unwrap();
    let done = work();
    setrlimit(Resource::As, before).unwrap();
    done
}

alone! {
    fn service_without_a_thread_names_its_mutex() {
        let factory = contend::memory::factory("no-threads", Lease::default());
        let service = factory.contend("reports").on_acquired(|_| {}).build().unwrap();
        let error = without_threads(|| service.start()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        let message = error.to_string();
        assert!(message.starts_with("callbacks of reports: cannot start a thread"), "{message}");
        // It can be started once there is room.
        assert_eq!(service.status(), Status::Initial);
        service.start().unwrap();
        wait_until(PATIENCE, "it leads", || service.is_owner());
    }
}

alone! {
    fn two_threads_renew_all_guards_and_none_is_left_behind() {
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
