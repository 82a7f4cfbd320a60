//! What a locker asks of its backend, and what it makes of answers that are late, lost or wrong.

use crate::conformance::{closed, elsewhere, hooked};

use std::fs;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::conformance::hooked::{Call, When};
use contend::backend::OnRefusal;
use contend::{Error, ErrorKind, Factory, Lease, Moment};
use testbed::{TempDir, wait_until, within};

/// When a hung test is ended.
const HANG: Duration = Duration::from_secs(120);

/// How long a condition may take to come true on a busy machine.
const PATIENCE: Duration = Duration::from_secs(40);

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn memory(name: &str) -> Factory {
    contend::memory::factory(name, Lease::default())
}

fn error(kind: ErrorKind) -> Error {
    Error::new(kind, "on request")
}

#[test]
fn eighty_thousand_increments_of_a_plain_file_are_all_counted() {
    within(HANG, || {
        let folder = TempDir::new();
        // Written in place: cutting a file to length costs a millisecond on some file systems.
        let path = folder.path().join("counter");
        fs::write(&path, 0_u64.to_ne_bytes()).unwrap();
        let open = || {
            fs::OpenOptions::new()
                .read(true)
                .write(true)
                .open(&path)
                .unwrap()
        };
        let read = |file: &fs::File| {
            let mut count = [0; 8];
            file.read_exact_at(&mut count, 0).unwrap();
            u64::from_ne_bytes(count)
        };
        let locker = memory("file").locker("counter").build().unwrap();
        let began = Instant::now();
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let file = open();
                    for _ in 0..10_000 {
                        let increment = || {
                            let next = read(&file) + 1;
                            file.write_all_at(&next.to_ne_bytes(), 0).unwrap();
                        };
                        locker.with_lock(|_| increment()).unwrap();
                    }
                });
            }
        });
        println!("80,000 increments in {:?}", began.elapsed());
        assert_eq!(read(&open()), 80_000);
    });
}

#[test]
fn an_uncontended_cycle_is_one_acquire_and_one_release() {
    within(HANG, || {
        let (factory, calls) = hooked::counting(&memory("count"));
        let locker = factory.locker("m").build().unwrap();
        assert!(calls.lock().is_empty(), "building asks nothing");
        let cycle = [Call::Acquire(OnRefusal::Leave), Call::Release];
        drop(locker.lock().unwrap());
        assert_eq!(calls.lock().split_off(0), cycle);
        locker.try_lock().unwrap().unlock().unwrap();
        assert_eq!(calls.lock().split_off(0), cycle);
        drop(locker.try_lock_for(PATIENCE).unwrap());
        assert_eq!(calls.lock().split_off(0), cycle);
        locker.with_lock(|_| ()).unwrap();
        assert_eq!(calls.lock().split_off(0), cycle);
        for _ in 0..1_000 {
            drop(locker.lock().unwrap());
        }
        assert_eq!(calls.lock().len(), 2_000);
    });
}

#[test]
fn a_refused_try_is_one_call_and_a_wait_subscribes_queues_and_withdraws() {
    within(HANG, || {
        let memory = memory("refused");
        let holder = memory.locker("m").build().unwrap();
        let (factory, calls) = hooked::counting(&memory);
        let locker = factory.locker("m").build().unwrap();
        let guard = holder.lock().unwrap();
        elsewhere(|| locker.try_lock().map(drop)).unwrap_err();
        let refused = Call::Acquire(OnRefusal::Leave);
        assert_eq!(calls.lock().split_off(0), [refused]);

        elsewhere(|| locker.try_lock_for(ms(1_000)).map(drop)).unwrap_err();
        let queued = Call::Acquire(OnRefusal::Enqueue);
        assert_eq!(calls.lock().split_off(0), [queued, Call::Withdraw]);

        let waiting = thread::spawn(move || locker.lock().map(drop));
        wait_until(PATIENCE, "it stands in the queue", || {
            calls.lock().last() == Some(&queued)
        });
        drop(guard);
        waiting.join().unwrap().unwrap();
        // Woken, it tries once more, and that is all: the grant took it out of the queue.
        assert_eq!(
            calls.lock().split_off(0),
            [refused, queued, queued, Call::Release]
        );
    });
}

#[test]
fn threads_of_one_locker_cost_the_backend_no_refusal() {
    within(HANG, || {
        let (factory, calls) = hooked::counting(&memory("threads"));
        let locker = factory.locker("m").build().unwrap();
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..100).for_each(|_| locker.with_lock(|_| ()).unwrap()));
            }
        });
        let calls = calls.lock();
        assert_eq!(calls.len(), 800);
        let cycle = [Call::Acquire(OnRefusal::Leave), Call::Release];
        assert!(calls.chunks(2).all(|calls| calls == cycle));
    });
}

#[test]
fn a_thread_that_waits_for_another_is_told_so_when_its_time_is_up() {
    within(HANG, || {
        let locker = memory("in-process").locker("m").id("a").build().unwrap();
        let _guard = locker.lock().unwrap();
        let other = locker.clone();
        let (at_once, later) = thread::spawn(move || {
            (
                other.try_lock().unwrap_err(),
                other.try_lock_for(ms(50)).unwrap_err(),
            )
        })
        .join()
        .unwrap();
        assert_eq!(
            (at_once.kind(), later.kind()),
            (ErrorKind::Held, ErrorKind::Held)
        );
        assert_eq!(
            later.to_string(),
            "m: held by \"a\", by another thread, and was not free within 50ms"
        );
    });
}

#[test]
fn a_grant_that_comes_too_late_is_given_back() {
    within(HANG, || {
        let lease = Lease::new(ms(3_000), ms(10_000)).unwrap();
        let memory = contend::memory::factory("late", lease);
        let slow = Arc::new(AtomicBool::new(true));
        let (once, granted) = (Arc::clone(&slow), Arc::new(AtomicUsize::new(0)));
        let counted = Arc::clone(&granted);
        let factory = hooked::around(&memory, move |when, call, _, _| {
            if when == When::After && matches!(call, Call::Acquire(_)) {
                counted.fetch_add(1, Ordering::SeqCst);
                if once.swap(false, Ordering::SeqCst) {
                    thread::sleep(ms(3_200));
                }
            }
            Ok(())
        });
        let locker = factory.locker("m").build().unwrap();
        locker.try_lock().unwrap_err();
        slow.store(true, Ordering::SeqCst);
        granted.store(0, Ordering::SeqCst);
        let guard = locker.lock().unwrap();
        assert!(granted.load(Ordering::SeqCst) >= 2, "one late, one in time");
        assert!(guard.is_valid());
    });
}

#[test]
fn the_ghost_of_an_attempt_without_a_reply_is_laid_to_rest() {
    within(HANG, || {
        let memory = memory("ghost");
        let lossy = Arc::new(AtomicBool::new(true));
        let loses = Arc::clone(&lossy);
        let factory = hooked::around(&memory, move |when, call, _, _| {
            let lost = when == When::After
                && matches!(call, Call::Acquire(_))
                && loses.swap(false, Ordering::SeqCst);
            if lost {
                return Err(error(ErrorKind::Timeout));
            }
            Ok(())
        });
        let locker = factory.locker("m").build().unwrap();
        let failed = locker.try_lock().unwrap_err();
        assert_eq!(failed.kind(), ErrorKind::Timeout);
        assert_eq!(failed.to_string(), "m: not locked: on request");
        let other = memory.locker("m").build().unwrap();
        // The try had time left to give it back.
        drop(other.try_lock().expect("nothing is left of it"));

        // A lock that waits adopts it.
        lossy.store(true, Ordering::SeqCst);
        let guard = locker.lock().unwrap();
        assert!(guard.is_valid());
        guard.unlock().unwrap();
    });
}

/// Rule 13.
#[test]
fn lock_outlasts_what_passes_and_gives_up_on_what_does_not() {
    within(HANG, || {
        let failures = Arc::new(AtomicUsize::new(0));
        let kind = Arc::new(parking_lot::Mutex::new(ErrorKind::Unreachable));
        let (left, kinds) = (Arc::clone(&failures), Arc::clone(&kind));
        let factory = hooked::around(&memory("trouble"), move |when, _, _, _| {
            let fails = when == When::Before
                && left
                    .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| {
                        left.checked_sub(1)
                    })
                    .is_ok();
            if fails {
                Err(error(*kinds.lock()))
            } else {
                Ok(())
            }
        });
        let locker = factory.locker("m").build().unwrap();
        failures.store(3, Ordering::SeqCst);
        drop(locker.lock().unwrap());

        for hopeless in [ErrorKind::Denied, ErrorKind::Misconfigured] {
            *kind.lock() = hopeless;
            failures.store(usize::MAX, Ordering::SeqCst);
            assert_eq!(locker.lock().unwrap_err().kind(), hopeless);
        }
        *kind.lock() = ErrorKind::Unreachable;
        let failed = locker.try_lock_for(ms(200)).unwrap_err();
        assert_eq!(failed.kind(), ErrorKind::Unreachable);
        failures.store(0, Ordering::SeqCst);
        drop(locker.try_lock().unwrap());
    });
}

/// Rule 5 makes the repetition harmless: it names the fence.
#[test]
fn a_release_without_an_answer_is_repeated_and_its_outcome_not_guessed() {
    within(HANG, || {
        let memory = memory("release");
        let fails = Arc::new(parking_lot::Mutex::new(None));
        let once = Arc::clone(&fails);
        let factory = hooked::around(&memory, move |when, call, _, _| {
            if call == Call::Release && once.lock().take_if(|at| *at == when).is_some() {
                return Err(error(ErrorKind::Unreachable));
            }
            Ok(())
        });
        let locker = factory.locker("m").build().unwrap();
        let other = memory.locker("m").build().unwrap();

        let guard = locker.lock().unwrap();
        *fails.lock() = Some(When::Before);
        guard.unlock().expect("the second one found the lease");
        drop(other.try_lock().unwrap());

        let guard = locker.lock().unwrap();
        *fails.lock() = Some(When::After);
        let unknown = guard.unlock().unwrap_err();
        assert_eq!(unknown.kind(), ErrorKind::Unreachable);
        // Nothing is left to release: only what became of it is not known.
        let told = unknown.to_string();
        assert!(told.contains("perhaps not released"), "{told}");
        drop(other.try_lock().unwrap());
    });
}

/// A renewal that hangs must not keep the renewer from telling others in time.
#[test]
fn a_renewal_that_hangs_does_not_delay_the_loss_of_another_guard() {
    within(HANG, || {
        let stuck = Arc::new(AtomicBool::new(false));
        let is_stuck = Arc::clone(&stuck);
        let factory = hooked::around(&memory("stuck"), move |when, call, place, by| {
            if when == When::Before && call == Call::Renew && is_stuck.load(Ordering::SeqCst) {
                if &*place.mutex == "slow" {
                    // As a server that does not answer: for as long as the call may take.
                    thread::sleep(by.remaining());
                }
                return Err(error(ErrorKind::Timeout));
            }
            Ok(())
        });
        // Renewed often, its calls may take 15 s each.
        let slow = factory.locker("slow").ttl(ms(60_000)).renew_after(ms(950));
        let slow = slow.build().unwrap();
        let fast = factory.locker("fast").ttl(ms(1_000)).transition(ms(8_000));
        let fast = fast.build().unwrap();
        let slow = slow.lock().unwrap();
        let fast = fast.lock().unwrap();
        let lost = fast.lost();
        stuck.store(true, Ordering::SeqCst);
        let end = Moment::now() + fast.valid_for();
        closed(&lost);
        let late = Moment::now() - end;
        println!("told {late:?} after the end of the ttl; the transition is 8s");
        assert!(late < ms(6_000), "{late:?}");
        assert!(!fast.is_valid() && slow.is_valid());
        stuck.store(false, Ordering::SeqCst);
    });
}

/// Rule 2: what hangs costs its own guards, not those beside them.
#[test]
fn renewals_that_hang_cost_no_other_guard_its_lease() {
    within(HANG, || {
        let lease = Lease::new(ms(5_000), ms(5_000)).unwrap();
        let memory = contend::memory::factory("hung", lease);
        let stuck = Arc::new(AtomicBool::new(true));
        let is_stuck = Arc::clone(&stuck);
        let factory = hooked::around(&memory, move |when, call, place, by| {
            let hangs = when == When::Before
                && call == Call::Renew
                && place.mutex.starts_with("hung")
                && is_stuck.load(Ordering::SeqCst);
            if hangs {
                thread::sleep(by.remaining());
                return Err(error(ErrorKind::Timeout));
            }
            Ok(())
        });
        let lock = |mutex: &str| factory.locker(mutex).build().unwrap().lock().unwrap();
        let hung: Vec<_> = (0..4).map(|n| lock(&format!("hung-{n}"))).collect();
        let healthy = lock("healthy");
        let (mut least, until) = (Duration::MAX, Instant::now() + lease.ttl() * 2);
        while Instant::now() < until {
            least = least.min(healthy.valid_for());
            assert!(healthy.is_valid(), "lost beside guards that hang");
            thread::sleep(ms(5));
        }
        println!("the healthy guard was always valid for {least:?} more");
        assert!(hung.iter().all(|guard| !guard.is_valid()));
        stuck.store(false, Ordering::SeqCst);
        healthy.unlock().unwrap();
    });
}

/// A call for the long lease may take ten seconds, more than the short one lasts.
#[test]
fn a_long_lease_whose_renewal_hangs_costs_no_short_one() {
    within(HANG, || {
        let stuck = Arc::new(AtomicBool::new(true));
        let is_stuck = Arc::clone(&stuck);
        let factory = hooked::around(&memory("long-hung"), move |when, call, place, by| {
            let hangs = when == When::Before && call == Call::Renew && &*place.mutex == "long";
            if hangs && is_stuck.load(Ordering::SeqCst) {
                thread::sleep(by.remaining());
                return Err(error(ErrorKind::Timeout));
            }
            Ok(())
        });
        let long = factory
            .locker("long")
            .ttl(ms(40_000))
            .renew_after(ms(1_000));
        let short = factory.locker("short").ttl(ms(5_000));
        let (long, short) = (long.build().unwrap(), short.build().unwrap());
        let _long = long.lock().unwrap();
        let short = short.lock().unwrap();
        let until = Instant::now() + ms(12_000);
        while Instant::now() < until {
            assert!(short.is_valid(), "lost beside a guard that hangs");
            thread::sleep(ms(5));
        }
        stuck.store(false, Ordering::SeqCst);
    });
}

/// The renewer sleeps for the long one, and is woken for the short one.
#[test]
fn a_short_lease_is_renewed_beside_a_long_one() {
    within(HANG, || {
        let factory = memory("short");
        let long = factory.locker("long").ttl(ms(600_000)).build().unwrap();
        let short = factory.locker("short").ttl(ms(4_000)).build().unwrap();
        let long = long.lock().unwrap();
        thread::sleep(ms(100));
        let short = short.lock().unwrap();
        let until = Instant::now() + ms(6_000);
        while Instant::now() < until {
            assert!(short.is_valid() && long.is_valid());
            thread::sleep(ms(10));
        }
        // And for one that comes when it has nothing to do.
        long.unlock().unwrap();
        short.unlock().unwrap();
        let again = factory.locker("again").ttl(ms(4_000)).build().unwrap();
        thread::sleep(ms(1_000));
        let again = again.lock().unwrap();
        thread::sleep(ms(6_000));
        assert!(again.is_valid());
    });
}

/// Once told that it is over, a guard is never valid again, whatever a late renewal says.
#[test]
fn a_passed_deadline_does_not_revive() {
    within(HANG, || {
        let lease = Lease::new(ms(1_000), ms(10_000)).unwrap();
        let slow = Arc::new(AtomicBool::new(false));
        let is_slow = Arc::clone(&slow);
        let renewed = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&renewed);
        let memory = contend::memory::factory("revive", lease);
        let factory = hooked::around(&memory, move |when, call, _, _| {
            if when == When::After && call == Call::Renew {
                counted.fetch_add(1, Ordering::SeqCst);
                if is_slow.load(Ordering::SeqCst) {
                    thread::sleep(ms(1_500));
                }
            }
            Ok(())
        });
        let locker = factory.locker("m").build().unwrap();
        let guard = locker.lock().unwrap();
        slow.store(true, Ordering::SeqCst);
        let before = renewed.load(Ordering::SeqCst);
        wait_until(PATIENCE, "it is invalid", || !guard.is_valid());
        closed(&guard.lost());
        wait_until(PATIENCE, "a renewal came through", || {
            renewed.load(Ordering::SeqCst) > before
        });
        for _ in 0..50 {
            assert!(!guard.is_valid() && guard.valid_for().is_zero());
            thread::sleep(ms(2));
        }
        assert_eq!(guard.unlock().unwrap_err().kind(), ErrorKind::Lost);
    });
}

#[test]
fn work_under_a_lock_that_was_lost_is_an_error() {
    within(HANG, || {
        let lease = Lease::new(ms(200), ms(200)).unwrap();
        let factory = contend::memory::factory("work", lease);
        let locker = factory.locker("m").max_hold(ms(10)).build().unwrap();
        let failed = locker.with_lock(|_| thread::sleep(ms(500))).unwrap_err();
        assert_eq!(failed.kind(), ErrorKind::Lost);
        assert!(
            failed.to_string().starts_with("m: the lock was lost"),
            "{failed}"
        );
        drop(locker.try_lock_for(PATIENCE).unwrap());
    });
}

/// What is free again is not what was held: it may have been somebody else's meanwhile.
#[test]
fn unlocking_what_was_lost_is_not_unlocking() {
    within(HANG, || {
        let lease = Lease::new(ms(300), ms(100)).unwrap();
        let factory = contend::memory::factory("not-ours", lease);
        let locker = factory.locker("m").max_hold(ms(10)).build().unwrap();
        let guard = locker.lock().unwrap();
        let other = factory.locker("m").ttl(ms(20_000)).build().unwrap();
        elsewhere(|| other.try_lock_for(PATIENCE).unwrap().unlock().unwrap());
        assert_eq!(guard.unlock().unwrap_err().kind(), ErrorKind::Lost);
        drop(other.try_lock().unwrap());
    });
}

/// It may be asked for in every round of a loop, and by many.
#[test]
fn every_receiver_of_a_guard_is_told_that_it_is_lost() {
    within(HANG, || {
        let lease = Lease::new(ms(300), ms(300)).unwrap();
        let factory = contend::memory::factory("told", lease);
        let locker = factory.locker("m").max_hold(ms(10)).build().unwrap();
        let guard = locker.lock().unwrap();
        let receivers: Vec<_> = (0..100).map(|_| guard.lost()).collect();
        receivers.iter().for_each(closed);
        assert!(!guard.is_valid());
        closed(&guard.lost());
    });
}

#[test]
fn a_panic_in_a_backend_costs_one_guard_and_no_turn() {
    within(HANG, || {
        let broken = Arc::new(AtomicBool::new(false));
        let panics = Arc::clone(&broken);
        let factory = hooked::around(&memory("panics"), move |_, _, place, _| {
            if &*place.mutex == "bad" && panics.load(Ordering::SeqCst) {
                std::panic::resume_unwind(Box::new("on purpose"));
            }
            Ok(())
        });
        let quick = |mutex| {
            let locker = factory.locker(mutex).ttl(ms(3_000)).renew_after(ms(50));
            locker.build().unwrap()
        };
        let (bad, good) = (quick("bad"), quick("good"));
        let (guard, other) = (bad.lock().unwrap(), good.lock().unwrap());
        broken.store(true, Ordering::SeqCst);
        closed(&guard.lost());
        assert_eq!(guard.unlock().unwrap_err().kind(), ErrorKind::Lost);
        broken.store(false, Ordering::SeqCst);
        // Its turn was given back, and its lease is adopted.
        drop(bad.try_lock_for(PATIENCE).unwrap());
        thread::sleep(ms(3_200));
        assert!(other.is_valid(), "renewal goes on");
    });
}

#[test]
fn bad_names_and_durations_are_refused() {
    let factory = memory("inputs");
    for locker in [
        factory.locker(""),
        factory.locker("{m}"),
        factory.locker("m").id("a@@b"),
        factory.locker("m").ttl(Duration::ZERO),
        factory.locker("m").max_hold(Duration::ZERO),
        factory.locker("m").renew_after(Duration::from_secs(9)),
    ] {
        assert_eq!(locker.build().unwrap_err().kind(), ErrorKind::InvalidInput);
    }
}
