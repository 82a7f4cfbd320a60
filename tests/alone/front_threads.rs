//! The threads behind the fronts. It counts those of the process.

use crate::conformance::hooked;

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::conformance::hooked::{Call, When};
use contend::{Error, ErrorKind, Guard, Lease, Locker, Status};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use testbed::{threads, wait_until, within};

const PATIENCE: Duration = Duration::from_secs(40);

/// How often the thread that renews went to sleep so far.
fn renewer_wakes() -> u64 {
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    tasks
        .map(|task| task.unwrap().path())
        .filter(|task| {
            fs::read_to_string(task.join("comm")).is_ok_and(|comm| comm == "contend-timer\n")
        })
        .map(|task| {
            let status = fs::read_to_string(task.join("status")).unwrap();
            let switches = status
                .lines()
                .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
            switches.unwrap().trim().parse::<u64>().unwrap()
        })
        .sum()
}

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
    /// Review core 10: "cannot start a thread for callbacks" named no mutex.
    fn a_service_that_gets_no_thread_for_its_callbacks_names_the_mutex() {
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
    fn one_thread_renews_all_guards_of_a_factory_and_nothing_is_left_behind() {
        within(Duration::from_secs(120), || {
            let me = std::process::id();
            let before = threads(me);
            let lease = Lease::new(Duration::from_millis(1_500), Duration::from_millis(1_500)).unwrap();
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
                std::thread::sleep(Duration::from_millis(10));
            }
            has_threads(before + 2);
            for guard in guards {
                guard.unlock().unwrap();
            }
            // Cycles that are over before their first renewal do not wake it.
            let wakes = renewer_wakes();
            let began = Instant::now();
            for _ in 0..20_000 {
                drop(lockers[0].lock().unwrap());
            }
            let (wakes, took) = (renewer_wakes() - wakes, began.elapsed());
            println!("20,000 cycles in {took:?}: the renewer woke {wakes} times");
            assert!(wakes < 200, "{wakes}");
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
    let stuck = Arc::new(AtomicBool::new(true));
    let is_stuck = Arc::clone(&stuck);
    let lease = Lease::new(Duration::from_secs(2), Duration::from_secs(2)).unwrap();
    let memory = contend::memory::factory("helpers", lease);
    let factory = hooked::around(&memory, move |when, call, _, by| {
        if when == When::Before && call == Call::Renew && is_stuck.load(Ordering::SeqCst) {
            std::thread::sleep(by.remaining());
            return Err(Error::new(ErrorKind::Timeout, "on request"));
        }
        Ok(())
    });
    let lock = |number| {
        let locker = factory.locker(format!("m-{number}")).build().unwrap();
        locker.lock().unwrap()
    };
    let guards: Vec<Guard> = (0..8).map(lock).collect();
    let mut most = 0;
    wait_until(PATIENCE, "all guards are lost", || {
        most = most.max(threads(me));
        !guards.iter().any(Guard::is_valid)
    });
    println!("most threads: {}", most - before);
    assert!(most <= before + 9, "one for each and one that watches");
    stuck.store(false, Ordering::SeqCst);
    drop(guards);
    let guard = lock(8);
    wait_until(PATIENCE, "the helpers have gone", || {
        threads(me) <= before + 2
    });
    assert!(guard.is_valid());

    // Those that are still there go with the factory.
    stuck.store(true, Ordering::SeqCst);
    let other = lock(9);
    wait_until(PATIENCE, "a helper has come", || threads(me) > before + 2);
    drop((guard, other, factory, memory));
    has_threads(before);
}
