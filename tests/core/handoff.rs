//! Local hand-off: threads that share a locker pass the lease on.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::conformance::hooked::{self, Call, When};
use crate::conformance::{HANG, PATIENCE, closed, elsewhere, name};
use contend::{Cancel, ErrorKind, Factory, Lease, Locker};
use testbed::{wait_until, within};

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn memory(ttl: u64, transition: u64) -> Factory {
    let lease = Lease::new(ms(ttl), ms(transition)).unwrap();
    contend::memory::factory(&name("handoff"), lease)
}

/// Cycles per second of `threads` on one locker, each call taking `delay`, and the longest wait.
fn throughput(locker: &Locker, threads: usize, lasting: Duration) -> (f64, Duration) {
    let (count, longest) = (AtomicUsize::new(0), AtomicU64::new(0));
    let inside = AtomicBool::new(false);
    let began = Instant::now();
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while began.elapsed() < lasting {
                    let asked = Instant::now();
                    let guard = locker.lock().unwrap();
                    let waited = asked.elapsed().as_micros() as u64;
                    longest.fetch_max(waited, Ordering::Relaxed);
                    assert!(!inside.swap(true, Ordering::SeqCst), "two inside");
                    assert!(guard.is_valid());
                    inside.store(false, Ordering::SeqCst);
                    guard.unlock().unwrap();
                    count.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    let per_second = count.into_inner() as f64 / began.elapsed().as_secs_f64();
    (per_second, Duration::from_micros(longest.into_inner()))
}

#[test]
fn eight_threads_pass_the_lease_on() {
    within(HANG, || {
        let memory = memory(10_000, 6_000);
        let calls = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&calls);
        let slow = hooked::around(&memory, move |when, _, _, _| {
            if when == When::Before {
                counted.fetch_add(1, Ordering::Relaxed);
                let until = Instant::now() + Duration::from_micros(200);
                thread::sleep(Duration::from_micros(120));
                while Instant::now() < until {
                    thread::yield_now();
                }
            }
            Ok(())
        });
        for limit in [None, Some(10), Some(100), Some(1_000)] {
            let builder = slow.locker("m");
            let builder = match limit {
                Some(limit) => builder.local_handoff(ms(limit)),
                None => builder,
            };
            let locker = builder.build().unwrap();
            calls.store(0, Ordering::Relaxed);
            for threads in [1, 2, 8] {
                let (per_second, longest) = throughput(&locker, threads, ms(1_500));
                println!(
                    "limit {limit:?} ms, {threads} threads: {per_second:.0}/s, longest wait {longest:?}, calls {}",
                    calls.swap(0, Ordering::Relaxed)
                );
            }
        }
    });
}

#[test]
fn two_lockers_share_within_the_limit() {
    within(HANG, || {
        let memory = memory(10_000, 6_000);
        let other = memory.locker("m").build().unwrap();
        let ours = memory.locker("m").local_handoff(ms(50)).build().unwrap();
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    while !over.load(Ordering::SeqCst) {
                        ours.with_lock(|_| thread::sleep(ms(1))).unwrap();
                    }
                });
            }
            thread::sleep(ms(20));
            for _ in 0..10 {
                let began = Instant::now();
                drop(other.lock().unwrap());
                println!("the other locker waited {:?}", began.elapsed());
                assert!(began.elapsed() < ms(1_000));
            }
            over.store(true, Ordering::SeqCst);
        });
    });
}

#[test]
fn guards_share_the_fence_and_each_is_lost_alone() {
    within(HANG, || {
        let memory = memory(1_500, 500);
        let locker = memory.locker("m").local_handoff(PATIENCE).build().unwrap();
        let guard = locker.lock().unwrap();
        let (fence, lost) = (guard.fence(), guard.lost());
        let next = thread::spawn({
            let locker = locker.clone();
            move || locker.lock().unwrap()
        });
        thread::sleep(ms(200));
        guard.unlock().unwrap();
        closed(&lost);
        let next = next.join().unwrap();
        assert_eq!(next.fence(), fence);
        assert!(next.lost().try_recv().unwrap_err().is_empty());
        // The timer goes on renewing it.
        thread::sleep(ms(4_000));
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
        thread::sleep(ms(100));
        cancel.cancel();
        guard.unlock().unwrap();
        let _ = waits.join().unwrap();
        assert!(memory.list().unwrap().is_empty());
        drop(elsewhere(|| memory.locker("m").build().unwrap().try_lock()).unwrap());
    });
}

/// The transition is the holder's, also from threads of the same locker, which would adopt the lease at once.
#[test]
fn transition_of_a_lost_guard_is_left_to_it_by_its_own_locker() {
    within(HANG, || {
        for handoff in [false, true] {
            let memory = memory(600, 1_500);
            let broken = Arc::new(AtomicBool::new(false));
            let breaks = Arc::clone(&broken);
            let factory = hooked::around(&memory, move |when, call, _, _| {
                if (when, call) == (When::Before, Call::Renew) && breaks.load(Ordering::SeqCst) {
                    return Err(contend::Error::new(ErrorKind::Unreachable, "on request"));
                }
                Ok(())
            });
            let builder = factory.locker("m");
            let builder = match handoff {
                true => builder.local_handoff(PATIENCE),
                false => builder,
            };
            let locker = builder.build().unwrap();
            let guard = locker.lock().unwrap();
            broken.store(true, Ordering::SeqCst);
            let next = thread::spawn({
                let locker = locker.clone();
                move || {
                    let next = locker.lock().unwrap();
                    (Instant::now(), next)
                }
            });
            closed(&guard.lost());
            let lost_at = Instant::now();
            let (locked_at, next) = next.join().unwrap();
            let left = locked_at - lost_at;
            println!("the next thread locked {left:?} after the loss, of a transition of 1.5s");
            assert!(left > ms(1_300), "{left:?}");
            // Stuck, it keeps nothing from the next.
            assert!(next.is_valid() && !guard.is_valid());
            assert_eq!(guard.unlock().unwrap_err().kind(), ErrorKind::Lost);
            assert!(next.is_valid());
            broken.store(false, Ordering::SeqCst);
            drop(next);
            wait_until(PATIENCE, "none is left", || {
                memory.list().unwrap().is_empty()
            });
        }
    });
}

/// Real threads, replies that are lost, calls that are slow, holders that are stuck: never two valid guards.
#[test]
fn no_two_guards_are_valid_whatever_fails() {
    use rand::RngExt;
    within(HANG, || {
        let memory = memory(60, 40);
        let faulty = hooked::around(&memory, |when, _, _, by| {
            let mut dice = rand::rng();
            if dice.random_bool(0.02) {
                thread::sleep(by.remaining().min(ms(dice.random_range(0..30))));
            }
            if dice.random_bool(0.03) {
                let _ = when;
                return Err(contend::Error::new(ErrorKind::Timeout, "on request"));
            }
            Ok(())
        });
        let lockers: Vec<Locker> = [Some(5), Some(200), None]
            .into_iter()
            .map(|limit| match limit {
                Some(limit) => faulty.locker("m").local_handoff(ms(limit)).build().unwrap(),
                None => faulty.locker("m").build().unwrap(),
            })
            .collect();
        let alive = parking_lot::Mutex::new(Vec::<Arc<contend::Guard>>::new());
        let (locked, refused, lost) = (
            AtomicUsize::new(0),
            AtomicUsize::new(0),
            AtomicUsize::new(0),
        );
        let until = Instant::now() + Duration::from_secs(12);
        thread::scope(|scope| {
            for thread in 0..9 {
                let (locker, alive) = (&lockers[thread % 3], &alive);
                let (locked, refused, lost) = (&locked, &refused, &lost);
                scope.spawn(move || {
                    while Instant::now() < until {
                        let roll: f64 = rand::random();
                        let cancel = Cancel::new();
                        let guard = match thread {
                            _ if roll < 0.2 => locker.try_lock(),
                            _ if roll < 0.6 => locker.try_lock_for(ms((roll * 100.0) as u64)),
                            _ => thread::scope(|scope| {
                                let cancels = cancel.clone();
                                scope.spawn(move || {
                                    thread::sleep(ms((roll * 50.0) as u64));
                                    cancels.cancel();
                                });
                                locker.lock_until_cancelled(&cancel)
                            }),
                        };
                        let Ok(guard) = guard else {
                            refused.fetch_add(1, Ordering::Relaxed);
                            continue;
                        };
                        locked.fetch_add(1, Ordering::Relaxed);
                        let guard = Arc::new(guard);
                        {
                            let mut alive = alive.lock();
                            for other in alive.iter() {
                                let both = other.is_valid() && guard.is_valid() && other.is_valid();
                                assert!(!both, "two valid guards: {other:?}, {guard:?}");
                            }
                            alive.push(Arc::clone(&guard));
                        }
                        if roll < 0.05 {
                            thread::sleep(ms(250));
                        } else if roll < 0.3 {
                            thread::sleep(ms(2));
                        }
                        alive.lock().retain(|it| !Arc::ptr_eq(it, &guard));
                        let guard = Arc::try_unwrap(guard).unwrap();
                        if guard.unlock().is_err() {
                            lost.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                });
            }
        });
        println!("locked {locked:?}, refused {refused:?}, lost or failed {lost:?}");
        assert!(locked.into_inner() > 500);
        // No turn was lost.
        for locker in &lockers {
            drop(locker.try_lock_for(PATIENCE).unwrap());
        }
    });
}
