//! Local hand-off: threads that share a locker pass the lease on.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::conformance::{HANG, PATIENCE, closed, elsewhere, hooked, memory, ms};
use contend::{Cancel, ErrorKind, Locker};
use testbed::{wait_until, within};

/// How often eight threads got one locker.
fn locks(locker: &Locker) -> usize {
    let (count, inside) = (AtomicUsize::new(0), AtomicBool::new(false));
    let began = Instant::now();
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                while began.elapsed() < ms(1_500) {
                    let guard = locker.lock().unwrap();
                    assert!(!inside.swap(true, Ordering::SeqCst), "two inside");
                    assert!(guard.is_valid());
                    inside.store(false, Ordering::SeqCst);
                    guard.unlock().unwrap();
                    count.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    count.into_inner()
}

#[test]
fn threads_pass_the_lease_on() {
    within(HANG, || {
        for (limit, calls_per_lock) in [(ms(0), 2.0), (PATIENCE, 0.2)] {
            let (factory, calls) = hooked::counting(&memory(10_000, 6_000));
            let locker = factory.locker("m").local_handoff(limit).build().unwrap();
            let (locks, calls) = (locks(&locker), calls.lock().len());
            println!("limit {limit:?}: {locks} locks, {calls} calls");
            assert!(calls as f64 <= calls_per_lock * locks as f64);
        }
    });
}

#[test]
fn other_locker_waits_for_the_limit() {
    within(HANG, || {
        let memory = memory(10_000, 6_000);
        let other = memory.locker("m").build().unwrap();
        let shared = memory.locker("m").local_handoff(ms(50)).build().unwrap();
        let (over, turns) = (AtomicBool::new(false), AtomicUsize::new(0));
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    while !over.load(Ordering::SeqCst) {
                        shared.with_lock(|_| thread::sleep(ms(1))).unwrap();
                        turns.fetch_add(1, Ordering::SeqCst);
                    }
                });
            }
            wait_until(PATIENCE, "they take turns", || {
                turns.load(Ordering::SeqCst) > 8
            });
            // 50 ms, a hand-over, and what a busy machine adds.
            let bound = ms(5_000);
            let is_late = (0..10).any(|_| other.try_lock_for(bound).is_err());
            over.store(true, Ordering::SeqCst);
            assert!(!is_late, "it did not lock within {bound:?}");
        });
    });
}

/// How long a second thread is given to stand in line, which cannot be seen from outside.
const QUEUES: Duration = ms(200);

#[test]
fn heir_shares_fence_and_is_lost_alone() {
    within(HANG, || {
        let memory = memory(2_500, 500);
        let locker = memory.locker("m").local_handoff(PATIENCE).build().unwrap();
        let guard = locker.lock().unwrap();
        let (fence, lost) = (guard.fence(), guard.lost());
        let heir = locker.clone();
        let next = thread::spawn(move || heir.lock().unwrap());
        thread::sleep(QUEUES);
        guard.unlock().unwrap();
        closed(&lost);
        let next = next.join().unwrap();
        assert_eq!(next.fence(), fence);
        assert!(next.lost().try_recv().unwrap_err().is_empty());
        // The timer goes on renewing it, over two leases.
        thread::sleep(ms(6_000));
        assert!(next.is_valid());
        assert!(memory.revoke("m", fence).unwrap());
        closed(&next.lost());
        assert_eq!(next.unlock().unwrap_err().kind(), ErrorKind::Lost);
        assert!(locker.lock().unwrap().fence() > fence);
    });
}

#[test]
fn cancelled_heir_releases() {
    within(HANG, || {
        let memory = memory(60_000, 500);
        let locker = memory.locker("m").local_handoff(PATIENCE).build().unwrap();
        let guard = locker.lock().unwrap();
        let cancel = Cancel::new();
        let waits = thread::spawn({
            let (locker, cancel) = (locker.clone(), cancel.clone());
            move || locker.lock_until_cancelled(&cancel).map(drop)
        });
        thread::sleep(QUEUES);
        cancel.cancel();
        guard.unlock().unwrap();
        let _ = waits.join().unwrap();
        assert!(memory.list().unwrap().is_empty());
        drop(elsewhere(|| memory.locker("m").build().unwrap().try_lock()).unwrap());
    });
}

/// The transition is the holder's, also from threads of the same locker, which would adopt the lease at once.
#[test]
fn lost_guard_keeps_its_transition() {
    within(HANG, || {
        for limit in [ms(0), PATIENCE] {
            let memory = memory(600, 1_500);
            let (factory, broken) = hooked::renewing_in_vain(&memory);
            let locker = factory.locker("m").local_handoff(limit).build().unwrap();
            let guard = locker.lock().unwrap();
            broken.on();
            let ends_at = Instant::now() + guard.valid_for();
            let heir = locker.clone();
            let next = thread::spawn(move || (heir.lock().unwrap(), Instant::now()));
            closed(&guard.lost());
            let (next, locked_at) = next.join().unwrap();
            let left = locked_at - ends_at;
            assert!(left > ms(1_300), "{left:?} of a transition of 1.5 s");
            // Stuck, it keeps nothing from the next.
            assert!(next.is_valid() && !guard.is_valid());
            assert_eq!(guard.unlock().unwrap_err().kind(), ErrorKind::Lost);
            assert!(next.is_valid());
            broken.off();
            drop(next);
            wait_until(PATIENCE, "none is left", || {
                memory.list().unwrap().is_empty()
            });
        }
    });
}
