//! A caller's timeout bounds its call, and a wait has an end, whatever hangs.

use std::thread;
use std::time::{Duration, Instant};

use crate::conformance::hooked::{self, Call, Switch, When, no_answer};
use crate::conformance::{HANG, PATIENCE, closed, elsewhere, memory, ms, next, outage};
use contend::{Cancel, Error, ErrorKind, EventKind, Factory};
use testbed::{wait_until, within};

/// What a loaded machine may add to a bound; far below what a missing bound costs.
const SLACK: Duration = ms(4_000);

fn none_is_left(memory: &Factory) {
    let is_empty = || memory.list().unwrap().is_empty();
    wait_until(PATIENCE, "none is left", is_empty);
}

#[test]
fn calls_end_while_the_backend_hangs() {
    within(HANG, || {
        let (factory, hung) = hooked::hanging(&memory(60_000, 60_000), |_, _| true);
        outage::calls_end("memory", factory, move || hung.on());
    });
}

/// No other leads before the lease has ended, so it must not say that it is released.
#[test]
fn resigning_while_calls_hang_says_not_released() {
    within(HANG, || {
        let (factory, hung) = hooked::hanging(&memory(8_000, 60_000), |_, _| true);
        let service = factory.contend("m").build().unwrap();
        service.start().unwrap();
        wait_until(PATIENCE, "it leads", || service.is_owner());
        let first = service.fence();
        hung.on();
        let error = service.resign().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
        assert!(error.to_string().contains("not released"), "{error}");
        assert!(!service.is_owner() && service.running());
        // What is left is adopted as soon as there are answers.
        hung.off();
        wait_until(PATIENCE, "it leads again", || service.is_owner());
        assert!(service.fence() > first);
        service.resign().unwrap();
    });
}

/// A panic in a backend is announced like any loss.
#[test]
fn panicking_renewal_ends_belief_alone() {
    within(HANG, || {
        let panics = Switch::default();
        let panicking = panics.clone();
        let factory = hooked::around(&memory(3_000, 1_000), move |when, call, _, _| {
            // Once: what ends belief is the panic, not a deadline that passes without a renewal.
            if (when, call) == (When::Before, Call::Renew) && panicking.take() {
                std::panic::resume_unwind(Box::new("on purpose"));
            }
            Ok(())
        });
        let builder = factory.contend("m").id("a").renew_after(ms(200));
        let (service, events) = builder.channel().unwrap();
        service.start().unwrap();
        let first = next(&events, EventKind::Acquired);
        panics.on();
        let released = next(&events, EventKind::Released);
        assert_eq!(released.fence(), first.fence());
        let again = next(&events, EventKind::Acquired);
        assert!(again.fence() > first.fence() && service.running());
        assert_eq!(service.fence(), again.fence());
    });
}

/// A hundred blocked lockers, some of them behind another thread of their own. Some have a second cancel: one of the two
/// is enough.
#[test]
fn cancel_ends_every_wait_at_once() {
    within(HANG, || {
        let memory = memory(60_000, 1_000);
        let guard = memory.locker("m").build().unwrap().lock().unwrap();
        let cancel = Cancel::new();
        let shared = memory.locker("m").cancel(&cancel).build().unwrap();
        let waits: Vec<_> = (0..100)
            .map(|number| {
                let with = |cancel| memory.locker("m").cancel(cancel).build().unwrap();
                let (locker, of_call) = match number % 4 {
                    0 => (shared.clone(), None),
                    1 => (with(&cancel), Some(Cancel::new())),
                    2 => (with(&Cancel::new()), Some(cancel.clone())),
                    _ => (with(&cancel), None),
                };
                thread::spawn(move || {
                    let locked = match of_call {
                        Some(cancel) => locker.lock_until_cancelled(&cancel),
                        None => locker.lock(),
                    };
                    locked.map(drop).unwrap_err().kind()
                })
            })
            .collect();
        wait_until(PATIENCE, "they wait", || {
            memory.participants("m").unwrap().len() == 76
        });
        let began = Instant::now();
        cancel.cancel();
        for wait in waits {
            assert_eq!(wait.join().unwrap(), ErrorKind::Cancelled);
        }
        assert!(began.elapsed() < SLACK, "{:?}", began.elapsed());
        assert!(memory.participants("m").unwrap().is_empty());
        let error = shared.lock().map(drop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Reentrant, "this thread holds it");
        let error = elsewhere(|| shared.lock().map(drop)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Cancelled, "it stays cancelled");
        drop(guard);
    });
}

/// A request that was sent is waited for: else each try would be cut off, and leave a lease to the next.
#[test]
fn cancellable_wait_lets_requests_finish() {
    within(HANG, || {
        let factory = hooked::around(&memory(60_000, 1_000), |when, call, _, by| {
            if when == When::After && matches!(call, Call::Acquire(_)) {
                let left = by.remaining();
                // Less than a request limit.
                thread::sleep(left.min(ms(1_300)));
                if left < ms(1_300) {
                    return Err(no_answer());
                }
            }
            Ok(())
        });
        let locker = factory.locker("m").build().unwrap();
        let guard = locker.lock_until_cancelled(&Cancel::new()).unwrap();
        guard.unlock().unwrap();
    });
}

#[test]
fn lock_all_is_lost_with_one() {
    within(HANG, || {
        let memory = memory(2_000, 2_000);
        let fails = Switch::default();
        let failing = fails.clone();
        let factory = hooked::around(&memory, move |when, call, place, _| {
            let acquires = when == When::Before && matches!(call, Call::Acquire(_));
            if acquires && &*place.mutex == "b" && failing.is_on() {
                return Err(Error::new(ErrorKind::Denied, "on request"));
            }
            Ok(())
        });
        fails.on();
        let error = factory.lock_all(["c", "a", "b"]).lock().map(drop);
        assert_eq!(error.unwrap_err().kind(), ErrorKind::Denied);
        assert!(memory.list().unwrap().is_empty(), "a was given back");
        fails.off();
        let guard = factory.lock_all(["c", "a", "b", "a"]).lock().unwrap();
        let (lost, fence) = (guard.lost(), guard.fence("b").unwrap());
        assert!(memory.revoke("b", fence).unwrap());
        closed(&lost);
        assert!(!guard.is_valid());
        assert_eq!(guard.unlock().unwrap_err().kind(), ErrorKind::Lost);
        assert!(memory.list().unwrap().is_empty());
        assert!(factory.lock_all(Vec::<&str>::new()).lock().is_err());
    });
}

#[test]
fn lock_all_keeps_its_timeout() {
    within(HANG, || {
        let memory = memory(20_000, 2_000);
        let slow = hooked::around(&memory, |when, _, _, _| {
            if when == When::Before {
                // Sixty of these take longer than the timeout.
                thread::sleep(ms(50));
            }
            Ok(())
        });
        let names: Vec<String> = (0..60).map(|number| format!("m{number:02}")).collect();
        let began = Instant::now();
        let outcome = slow.lock_all(&names).try_lock_for(ms(100));
        let took = began.elapsed();
        assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Timeout);
        // One limit to try, one to give back, and what a busy machine adds: without a bound it takes 6 s.
        assert!(took < ms(100 + 2 * 2_000 + 1_000), "{took:?}");
        none_is_left(&memory);
    });
}

/// One node of a cluster hangs: the renewals of its guards take all the threads of the timer.
#[test]
fn hung_guards_cost_healthy_ones_nothing() {
    within(HANG, || {
        let hangs = |call, place: &contend::backend::Contender| {
            call == Call::Renew && place.mutex.starts_with("hung")
        };
        let (factory, hung) = hooked::hanging(&memory(8_000, 2_000), hangs);
        let lock = |mutex: String, ttl| {
            let locker = factory.locker(mutex).ttl(ms(ttl)).renew_after(ms(2_600));
            locker.build().unwrap().lock().unwrap()
        };
        let (mut stuck, mut healthy) = (Vec::new(), Vec::new());
        for number in 0..300 {
            stuck.push(lock(format!("hung-{number}"), 60_000));
            if number % 20 == 10 {
                healthy.push(lock(format!("healthy-{number}"), 8_000));
            }
            // Spread, so that renewals are due one after the other.
            thread::sleep(ms(8));
        }
        hung.on();
        // Long enough for each healthy guard to be lost if it is not renewed.
        let until = Instant::now() + ms(12_000);
        while Instant::now() < until {
            let lost = healthy.iter().filter(|guard| !guard.is_valid()).count();
            assert_eq!(lost, 0, "of {} healthy guards", healthy.len());
            thread::sleep(ms(100));
        }
        hung.off();
        drop(stuck);
    });
}
