//! What a locker asks of its backend, and what it makes of answers that are late, lost or wrong.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::conformance::hooked::{self, Call, Switch, When, no_answer};
use crate::conformance::{HANG, PATIENCE, closed, elsewhere, memory, ms};
use contend::backend::OnRefusal;
use contend::{Error, ErrorKind, Factory, Locker, Moment};
use parking_lot::Mutex;
use testbed::{wait_until, within};

fn locker(factory: &Factory) -> Locker {
    factory.locker("m").build().unwrap()
}

#[test]
fn uncontended_cycle_is_two_calls() {
    within(HANG, || {
        let (factory, calls) = hooked::counting(&memory(10_000, 6_000));
        let locker = locker(&factory);
        assert!(calls.lock().is_empty(), "building asks nothing");
        let cycle = [Call::Acquire(OnRefusal::Leave), Call::Release];
        let ways: [&dyn Fn(); 4] = [
            &|| drop(locker.lock().unwrap()),
            &|| locker.try_lock().unwrap().unlock().unwrap(),
            &|| drop(locker.try_lock_for(PATIENCE).unwrap()),
            &|| locker.with_lock(|_| ()).unwrap(),
        ];
        for lock in ways {
            lock();
            assert_eq!(calls.lock().split_off(0), cycle);
        }
        // Threads that share it cost the backend no refusal.
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..100).for_each(|_| locker.with_lock(|_| ()).unwrap()));
            }
        });
        let calls = calls.lock();
        assert_eq!(calls.len(), 800);
        assert!(calls.chunks(2).all(|calls| calls == cycle));
    });
}

#[test]
fn refused_wait_queues_and_withdraws() {
    within(HANG, || {
        let memory = memory(10_000, 6_000);
        let (factory, calls) = hooked::counting(&memory);
        let waits = locker(&factory);
        let guard = locker(&memory).lock().unwrap();
        elsewhere(|| waits.try_lock().map(drop)).unwrap_err();
        let refused = Call::Acquire(OnRefusal::Leave);
        assert_eq!(calls.lock().split_off(0), [refused]);

        elsewhere(|| waits.try_lock_for(ms(1_000)).map(drop)).unwrap_err();
        let queued = Call::Acquire(OnRefusal::Enqueue);
        assert_eq!(calls.lock().split_off(0), [queued, Call::Withdraw]);

        let waiting = thread::spawn(move || waits.lock().map(drop));
        wait_until(PATIENCE, "it stands in the queue", || {
            calls.lock().last() == Some(&queued)
        });
        drop(guard);
        waiting.join().unwrap().unwrap();
        // Woken, it tries once more, and that is all: the grant took it out of the queue.
        let calls = calls.lock();
        assert_eq!(*calls, [refused, queued, queued, Call::Release]);
    });
}

#[test]
fn late_grant_is_not_returned() {
    within(HANG, || {
        let (slow, granted) = (Switch::default(), Arc::new(AtomicUsize::new(0)));
        let (is_slow, counted) = (slow.clone(), Arc::clone(&granted));
        let factory = hooked::around(&memory(3_000, 10_000), move |when, call, _, _| {
            if when == When::After && matches!(call, Call::Acquire(_)) {
                counted.fetch_add(1, Ordering::SeqCst);
                if is_slow.take() {
                    // Longer than the ttl.
                    thread::sleep(ms(3_200));
                }
            }
            Ok(())
        });
        let locker = locker(&factory);
        slow.on();
        locker.try_lock().unwrap_err();
        slow.on();
        granted.store(0, Ordering::SeqCst);
        let guard = locker.lock().unwrap();
        assert!(granted.load(Ordering::SeqCst) >= 2, "one late, one in time");
        assert!(guard.is_valid());
    });
}

#[test]
fn next_lock_adopts_lost_reply() {
    within(HANG, || {
        let memory = memory(10_000, 6_000);
        let (factory, lossy) = hooked::losing_a_grant(&memory);
        let ours = locker(&factory);
        lossy.on();
        let failed = ours.try_lock().unwrap_err();
        assert_eq!(failed.kind(), ErrorKind::Timeout);
        assert_eq!(failed.to_string(), "m: not locked: no answer on request");
        // The try had time left to give it back.
        let other = locker(&memory);
        drop(other.try_lock().expect("nothing is left of it"));

        lossy.on();
        let guard = ours.lock().unwrap();
        assert!(guard.is_valid());
        guard.unlock().unwrap();
    });
}

/// What may stand in the queue, though the server did not say so, is taken out again.
#[test]
fn unanswered_wait_leaves_no_place() {
    within(HANG, || {
        let memory = memory(10_000, 6_000);
        let factory = hooked::around(&memory, |when, call, _, _| {
            let queues = (when, call) == (When::After, Call::Acquire(OnRefusal::Enqueue));
            if queues { Err(no_answer()) } else { Ok(()) }
        });
        let _guard = locker(&memory).lock().unwrap();
        let waits = locker(&factory);
        elsewhere(|| waits.try_lock_for(ms(300)).map(drop)).unwrap_err();
        assert!(memory.participants("m").unwrap().is_empty());
    });
}

#[test]
fn lock_outlasts_transient_errors_alone() {
    within(HANG, || {
        // How many calls fail, and how.
        let failures = Arc::new(Mutex::new((0, ErrorKind::Unreachable)));
        let left = Arc::clone(&failures);
        let factory = hooked::around(&memory(10_000, 6_000), move |when, _, _, _| {
            let (left, kind) = &mut *left.lock();
            if when == When::Before && *left > 0 {
                *left -= 1;
                return Err(Error::new(*kind, "on request"));
            }
            Ok(())
        });
        let locker = locker(&factory);
        *failures.lock() = (3, ErrorKind::Unreachable);
        drop(locker.lock().unwrap());
        for hopeless in [ErrorKind::Denied, ErrorKind::Misconfigured] {
            *failures.lock() = (usize::MAX, hopeless);
            assert_eq!(locker.lock().unwrap_err().kind(), hopeless);
        }
        *failures.lock() = (usize::MAX, ErrorKind::Unreachable);
        let failed = locker.try_lock_for(ms(200)).unwrap_err();
        assert_eq!(failed.kind(), ErrorKind::Unreachable);
        failures.lock().0 = 0;
        drop(locker.try_lock().unwrap());
    });
}

/// The repetition is harmless: it names the fence.
#[test]
fn unanswered_release_is_repeated_and_not_guessed() {
    within(HANG, || {
        let memory = memory(10_000, 6_000);
        let fails = Arc::new(Mutex::new(None));
        let once = Arc::clone(&fails);
        let factory = hooked::around(&memory, move |when, call, _, _| {
            if call == Call::Release && once.lock().take_if(|at| *at == when).is_some() {
                return Err(Error::new(ErrorKind::Unreachable, "on request"));
            }
            Ok(())
        });
        let (ours, other) = (locker(&factory), locker(&memory));
        let guard = ours.lock().unwrap();
        *fails.lock() = Some(When::Before);
        guard.unlock().expect("the second one found the lease");
        drop(other.try_lock().unwrap());

        let guard = ours.lock().unwrap();
        *fails.lock() = Some(When::After);
        let unknown = guard.unlock().unwrap_err();
        assert_eq!(unknown.kind(), ErrorKind::Unreachable);
        // Nothing is left to release: only what became of it is not known.
        let told = unknown.to_string();
        assert!(told.contains("perhaps not released"), "{told}");
        drop(other.try_lock().unwrap());
    });
}

/// A renewal that hangs must not keep the timer from telling others in time.
#[test]
fn hung_renewal_delays_no_other_loss() {
    within(HANG, || {
        let stuck = Switch::default();
        let is_stuck = stuck.clone();
        let factory = hooked::around(&memory(10_000, 6_000), move |when, call, place, by| {
            if when == When::Before && call == Call::Renew && is_stuck.is_on() {
                if &*place.mutex == "slow" {
                    thread::sleep(by.remaining());
                }
                return Err(no_answer());
            }
            Ok(())
        });
        let slow = factory.locker("slow").ttl(ms(60_000)).renew_after(ms(950));
        let fast = factory.locker("fast").ttl(ms(1_000)).transition(ms(8_000));
        let slow = slow.build().unwrap().lock().unwrap();
        let fast = fast.build().unwrap().lock().unwrap();
        let lost = fast.lost();
        stuck.on();
        let end = Moment::now() + fast.valid_for();
        closed(&lost);
        let late = Moment::now() - end;
        assert!(late < ms(6_000), "told {late:?} after the end of the ttl");
        assert!(!fast.is_valid() && slow.is_valid());
        stuck.off();
    });
}

/// The timer sleeps for the long one, and is woken for the short one.
#[test]
fn short_lease_is_renewed_beside_long() {
    within(HANG, || {
        let factory = memory(10_000, 6_000);
        let lock = |mutex: &str, ttl| {
            let locker = factory.locker(mutex).ttl(ms(ttl)).build().unwrap();
            // The timer falls asleep meanwhile, for what it has.
            thread::sleep(ms(300));
            locker.lock().unwrap()
        };
        let is_renewed = |guard: &contend::Guard| {
            let until = Instant::now() + ms(3_000);
            while Instant::now() < until {
                assert!(guard.is_valid());
                thread::sleep(ms(10));
            }
        };
        let long = lock("long", 600_000);
        let short = lock("short", 2_000);
        is_renewed(&short);
        // And one that comes when it has nothing to do.
        long.unlock().unwrap();
        short.unlock().unwrap();
        is_renewed(&lock("again", 2_000));
    });
}

/// Once told that it is over, a guard is never valid again, whatever a late renewal says.
#[test]
fn passed_deadline_does_not_revive() {
    within(HANG, || {
        let (slow, renewed) = (Switch::default(), Switch::default());
        let (is_slow, comes) = (slow.clone(), renewed.clone());
        let factory = hooked::around(&memory(1_000, 10_000), move |when, call, _, _| {
            if (when, call) == (When::After, Call::Renew) && is_slow.is_on() {
                // Longer than the ttl.
                thread::sleep(ms(1_500));
                comes.on();
            }
            Ok(())
        });
        let guard = locker(&factory).lock().unwrap();
        slow.on();
        closed(&guard.lost());
        wait_until(PATIENCE, "a renewal came through", || renewed.is_on());
        // For a while, in which a late renewal would be believed.
        for _ in 0..50 {
            assert!(!guard.is_valid() && guard.valid_for().is_zero());
            thread::sleep(ms(2));
        }
        assert_eq!(guard.unlock().unwrap_err().kind(), ErrorKind::Lost);
    });
}

#[test]
fn lost_lock_fails_its_work() {
    within(HANG, || {
        let factory = memory(200, 200);
        let locker = factory.locker("m").max_hold(ms(10)).build().unwrap();
        // Far longer than it may be held.
        let failed = locker.with_lock(|_| thread::sleep(ms(500))).unwrap_err();
        assert_eq!(failed.kind(), ErrorKind::Lost);
        let told = failed.to_string();
        assert!(told.starts_with("m: the lock was lost"), "{told}");
        drop(locker.try_lock_for(PATIENCE).unwrap());
    });
}

#[test]
fn panicking_backend_costs_one_guard() {
    within(HANG, || {
        let broken = Switch::default();
        let panics = broken.clone();
        let factory = hooked::around(&memory(10_000, 6_000), move |_, _, place, _| {
            if &*place.mutex == "bad" && panics.is_on() {
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
        broken.on();
        closed(&guard.lost());
        assert_eq!(guard.unlock().unwrap_err().kind(), ErrorKind::Lost);
        broken.off();
        // Its turn was given back, and its lease is adopted.
        drop(bad.try_lock_for(PATIENCE).unwrap());
        // Longer than its ttl: renewal goes on.
        thread::sleep(ms(3_200));
        assert!(other.is_valid());
    });
}

/// The error names the limit.
#[test]
fn bad_settings_are_refused_with_the_limit() {
    let factory = memory(10_000, 6_000);
    let (long_name, long_id) = ("m".repeat(67), "i".repeat(129));
    for bad in ["", " a", "a ", "a\nb", "a\0b", "{a}", "a}", &long_name] {
        for error in [
            factory.locker(bad).build().unwrap_err(),
            factory.contend(bad).build().unwrap_err(),
            factory.observe(bad).build().unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{bad:?}");
            assert!(error.to_string().contains("1 to 66 bytes"), "{error}");
        }
    }
    let m = || factory.locker("m");
    let bad_ids = ["", " a", "a\rb", "{", "a@@b", &long_id].map(|id| (m().id(id), ""));
    for (locker, limit) in bad_ids.into_iter().chain([
        (m().id("~a"), "letter or digit"),
        (m().ttl(ms(0)), "26ms"),
        (m().transition(Duration::MAX), "ttl"),
        (m().max_hold(ms(0)), ""),
        (m().renew_after(Duration::from_secs(9)), ""),
        (m().renew_after(Duration::from_nanos(1)), "156.25ms"),
    ]) {
        let error = locker.build().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        assert!(error.to_string().contains(limit), "{error}");
    }
    let jittery = factory.contend("m").jitter(Duration::MAX).build().map(drop);
    assert!(jittery.unwrap_err().to_string().contains("16s"));
}
