//! A caller's timeout bounds its call, and a wait has an end, whatever hangs.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use crate::conformance::hooked::{self, Call, When};
use crate::conformance::{HANG, PATIENCE, closed, elsewhere, name};
use contend::{Cancel, Error, ErrorKind, EventKind, Executor, Factory, Job, Lease, Moment};
use parking_lot::Mutex;
use testbed::{wait_until, within};

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// What a loaded machine may add to a bound of 200 ms; far below what the faults took.
const SLACK: Duration = ms(1_500);

fn factory(ttl: u64, transition: u64) -> Factory {
    let lease = Lease::new(ms(ttl), ms(transition)).unwrap();
    contend::memory::factory(&name("deadlines"), lease)
}

fn silent() -> Error {
    Error::new(ErrorKind::Timeout, "no answer on request")
}

/// A factory whose every call, while the switch is on, takes as long as it may and has no answer.
fn hanging(memory: &Factory) -> (Factory, Arc<AtomicBool>) {
    let hung = Arc::new(AtomicBool::new(false));
    let is_hung = Arc::clone(&hung);
    let factory = hooked::around(memory, move |when, _, _, by| {
        if when == When::Before && is_hung.load(Ordering::SeqCst) {
            thread::sleep(by.remaining());
            return Err(silent());
        }
        Ok(())
    });
    (factory, hung)
}

/// Review core 7: with a ttl of 60 s `try_lock_for(100ms)` took 15.5 s and `try_lock` 30 s. Rule "an
/// owner that cannot renew steps down": a caller's own timeout bounds its whole call.
#[test]
fn timeouts_hold_under_a_long_ttl_while_calls_hang() {
    within(HANG, || {
        let memory = factory(60_000, 1_000);
        let (factory, hung) = hanging(&memory);
        let locker = factory.locker("m").build().unwrap();
        let held = factory.locker("held").build().unwrap().lock().unwrap();
        hung.store(true, Ordering::SeqCst);

        let began = Instant::now();
        let error = locker.try_lock_for(ms(300)).map(drop).unwrap_err();
        assert!(began.elapsed() < ms(2_300) + SLACK, "{:?}", began.elapsed());
        assert_eq!(error.kind(), ErrorKind::Timeout);
        assert!(error.to_string().contains("no answer"), "{error}");

        let began = Instant::now();
        locker.try_lock_for(ms(300)).map(drop).unwrap_err();
        assert!(
            began.elapsed() < ms(2_300) + SLACK,
            "while it is cleaned up"
        );

        let began = Instant::now();
        drop(held);
        assert!(began.elapsed() < ms(2_000) + SLACK, "{:?}", began.elapsed());

        let began = Instant::now();
        drop((locker, factory));
        assert!(began.elapsed() < ms(2_000) + SLACK, "{:?}", began.elapsed());
    });
}

/// Rule "dropping is stopping": whoever stops or drops waits a second for a backend that hangs, whatever the ttl;
/// the lease is the background's then, which gives it back as soon as there are answers.
#[test]
fn a_stop_takes_the_request_limit_while_calls_hang() {
    within(HANG, || {
        let memory = factory(60_000, 60_000);
        let (factory, hung) = hanging(&memory);
        let leads = |mutex: &str| {
            let service = factory.contend(mutex).build().unwrap();
            service.start().unwrap();
            wait_until(PATIENCE, "it leads", || service.is_owner());
            service
        };
        let (stopped, dropped) = (leads("stopped"), leads("dropped"));
        hung.store(true, Ordering::SeqCst);
        let second = ms(2_000) + SLACK;

        let began = Instant::now();
        stopped.stop().unwrap();
        assert!(began.elapsed() < second, "stop: {:?}", began.elapsed());
        let began = Instant::now();
        drop(dropped);
        assert!(began.elapsed() < second, "drop: {:?}", began.elapsed());

        hung.store(true, Ordering::SeqCst);
        let began = Instant::now();
        drop((stopped, factory));
        assert!(began.elapsed() < second, "factory: {:?}", began.elapsed());
    });
}

/// It returned `Ok` although nothing had reached the server: nobody else leads before the lease has ended.
#[test]
fn whoever_resigns_while_calls_hang_is_told_that_nothing_was_released() {
    within(HANG, || {
        let memory = factory(8_000, 60_000);
        let (factory, hung) = hanging(&memory);
        let service = factory.contend("m").build().unwrap();
        service.start().unwrap();
        wait_until(PATIENCE, "it leads", || service.is_owner());
        let first = service.fence();
        hung.store(true, Ordering::SeqCst);
        let error = service.resign().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
        assert!(error.to_string().contains("not released"), "{error}");
        assert!(!service.is_owner() && service.running());
        // What is left is adopted as soon as there are answers.
        hung.store(false, Ordering::SeqCst);
        wait_until(ms(30_000), "it leads again", || service.is_owner());
        assert!(service.fence() > first);
        service.resign().unwrap();
    });
}

/// Review core 1: a renewal slower than `renew_after` hung `lock()` and the guard's drop, and starved
/// the factory's other guards.
#[test]
fn a_renewal_slower_than_its_interval_holds_up_nobody() {
    within(HANG, || {
        let memory = factory(3_000, 3_000);
        let renewals = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&renewals);
        let factory = hooked::around(&memory, move |when, call, contender, _| {
            if (when, call, &*contender.mutex) == (When::Before, Call::Renew, "slow") {
                counted.fetch_add(1, Ordering::SeqCst);
                thread::sleep(ms(80));
            }
            Ok(())
        });
        let slow = factory.locker("slow").renew_after(ms(47));
        let slow = slow.build().unwrap().lock().unwrap();
        let healthy = factory.locker("healthy").build().unwrap().lock().unwrap();
        let until = Instant::now() + ms(7_000);
        while Instant::now() < until {
            assert!(healthy.is_valid() && slow.is_valid());
            thread::sleep(ms(10));
        }
        // 80 ms of call and at least 46 of pause each.
        let renewals = renewals.load(Ordering::SeqCst);
        assert!((5..=60).contains(&renewals), "{renewals} renewals in 7 s");
        let began = Instant::now();
        drop(slow);
        assert!(began.elapsed() < ms(2_000) + SLACK, "{:?}", began.elapsed());
    });
}

/// Review core 10: beside a thread that only waits for an unreachable backend, `try_lock` said that this thread
/// held the mutex.
#[test]
fn nobody_is_said_to_hold_what_a_thread_only_waits_for() {
    within(HANG, || {
        let memory = factory(4_000, 2_000);
        let asked = Arc::new(AtomicUsize::new(0));
        let asks = Arc::clone(&asked);
        let factory = hooked::around(&memory, move |when, call, _, _| {
            if !matches!((when, call), (When::Before, Call::Acquire(_))) {
                return Ok(());
            }
            asks.fetch_add(1, Ordering::SeqCst);
            Err(silent())
        });
        let locker = factory.locker("m").id("me").build().unwrap();
        thread::scope(|scope| {
            let waits = scope.spawn(|| locker.try_lock_for(ms(2_000)).map(drop));
            wait_until(PATIENCE, "the other thread has been refused", || {
                asked.load(Ordering::SeqCst) > 1
            });
            let error = locker.try_lock().map(drop).unwrap_err().to_string();
            assert!(!error.contains("held by"), "{error}");
            assert!(waits.join().unwrap().is_err());
        });
    });
}

/// Review core 5: an executor that dropped one job made a service deaf for the rest of its run.
#[test]
fn an_executor_that_drops_jobs_costs_those_jobs() {
    within(HANG, || {
        let given = AtomicUsize::new(0);
        let executor: Executor = Arc::new(move |job: Job| {
            if given.fetch_add(1, Ordering::SeqCst) >= 5 {
                thread::spawn(job);
            }
        });
        // A long ttl: it is not the next renewal that gives the job again.
        let memory = factory(300_000, 3_000).with_executor(executor);
        let log = Arc::new(Mutex::new(Vec::new()));
        let (gained, lost) = (Arc::clone(&log), Arc::clone(&log));
        let service = memory
            .contend("m")
            .on_acquired(move |event| gained.lock().push(event.kind))
            .on_released(move |event| lost.lock().push(event.kind))
            .build()
            .unwrap();
        service.start().unwrap();
        wait_until(PATIENCE, "the callback ran all the same", || {
            log.lock().len() == 1
        });
        let began = Instant::now();
        service.stop().unwrap();
        assert!(began.elapsed() < SLACK, "{:?}", began.elapsed());
        assert_eq!(*log.lock(), [EventKind::Acquired, EventKind::Released]);
    });
}

/// Rule "a slow or panicking callback": a panic in a backend ends belief, is announced like any loss,
/// and the service goes on trying. (Review core 6: it died in silence, `is_owner()` still true.)
#[test]
fn a_backend_that_panics_ends_belief_and_the_service_goes_on() {
    within(HANG, || {
        let memory = factory(3_000, 1_000);
        let panics = Arc::new(AtomicBool::new(false));
        let panicking = Arc::clone(&panics);
        let factory = hooked::around(&memory, move |when, call, _, _| {
            // Once: what ends belief is the panic, not a deadline that passes without a renewal.
            if (when, call) == (When::Before, Call::Renew)
                && panicking.swap(false, Ordering::SeqCst)
            {
                std::panic::resume_unwind(Box::new("on purpose"));
            }
            Ok(())
        });
        let builder = factory.contend("m").id("a").renew_after(ms(200));
        let (service, events) = builder.channel().unwrap();
        service.start().unwrap();
        let first = crate::conformance::next(&events, EventKind::Acquired);
        panics.store(true, Ordering::SeqCst);
        let released = crate::conformance::next(&events, EventKind::Released);
        assert_eq!(released.fence(), first.fence());
        let again = crate::conformance::next(&events, EventKind::Acquired);
        assert!(again.fence() > first.fence() && service.running());
        assert_eq!(service.fence(), again.fence());
    });
}

/// The error names the limit.
#[test]
fn extreme_settings_are_refused_with_the_limit_named() {
    let memory = factory(10_000, 6_000);
    let contend = || memory.contend("m");
    for (builder, limit) in [
        (contend().jitter(Duration::MAX), "16s"),
        (contend().renew_after(Duration::from_nanos(1)), "156.25ms"),
        (contend().ttl(ms(1)), "26ms"),
        (contend().id("~a"), "letter or digit"),
    ] {
        let error = builder.channel().map(drop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        assert!(error.to_string().contains(limit), "{error}");
    }
}

/// A hundred blocked lockers, and one that waits behind another thread of its own.
#[test]
fn cancelling_ends_every_wait_at_once_and_leaves_nothing() {
    within(HANG, || {
        let memory = factory(60_000, 1_000);
        let guard = memory.locker("m").build().unwrap().lock().unwrap();
        let cancel = Cancel::new();
        let shared = memory.locker("m").cancel(&cancel).build().unwrap();
        let waits: Vec<_> = (0..100)
            .map(|number| {
                let locker = match number % 4 {
                    0 => shared.clone(),
                    _ => memory.locker("m").cancel(&cancel).build().unwrap(),
                };
                thread::spawn(move || locker.lock().map(drop).unwrap_err().kind())
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

/// Whatever fails in between, none stays locked; and the loss of one is the loss of all.
#[test]
fn lock_all_is_all_or_none_and_lost_with_the_first() {
    within(HANG, || {
        let memory = factory(2_000, 2_000);
        let fails = Arc::new(AtomicBool::new(true));
        let failing = Arc::clone(&fails);
        let factory = hooked::around(&memory, move |when, call, contender, _| {
            let hit = when == When::Before && &*contender.mutex == "b";
            let acquires = hit && matches!(call, Call::Acquire(_));
            if acquires && failing.load(Ordering::SeqCst) {
                return Err(Error::new(ErrorKind::Denied, "on request"));
            }
            Ok(())
        });
        let error = factory.lock_all(["c", "a", "b"]).lock().map(drop);
        assert_eq!(error.unwrap_err().kind(), ErrorKind::Denied);
        assert!(memory.list().unwrap().is_empty(), "a was given back");
        fails.store(false, Ordering::SeqCst);
        let guard = factory.lock_all(["c", "a", "b", "a"]).lock().unwrap();
        let lost = guard.lost();
        let fence = guard.fence("b").unwrap();
        assert!(memory.revoke("b", fence).unwrap());
        closed(&lost);
        assert!(!guard.is_valid());
        assert_eq!(guard.unlock().unwrap_err().kind(), ErrorKind::Lost);
        assert!(memory.list().unwrap().is_empty());
        assert!(factory.lock_all(Vec::<&str>::new()).lock().is_err());
    });
}

/// A timeout bounds the call, however many mutexes it is for and however slowly each is answered.
#[test]
fn lock_all_keeps_its_timeout_however_many_there_are() {
    within(HANG, || {
        let memory = factory(20_000, 2_000);
        let slow = hooked::around(&memory, |when, _, _, _| {
            if when == When::Before {
                thread::sleep(ms(50));
            }
            Ok(())
        });
        let names: Vec<String> = (0..60).map(|number| format!("m{number:02}")).collect();
        let began = Instant::now();
        let outcome = slow.lock_all(&names).try_lock_for(ms(100));
        let took = began.elapsed();
        assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Timeout);
        assert!(took < ms(100 + 2 * 2_000), "{took:?}");
        wait_until(PATIENCE, "none is left", || {
            memory.list().unwrap().is_empty()
        });
    });
}

/// Each guard took a second of its own to be dropped.
#[test]
fn many_guards_are_dropped_within_the_time_of_one_where_calls_hang() {
    within(HANG, || {
        let memory = factory(60_000, 1_000);
        let (factory, hung) = hanging(&memory);
        let names: Vec<String> = (0..8).map(|number| format!("m-{number}")).collect();
        let guard = factory.lock_all(&names).lock().unwrap();
        hung.store(true, Ordering::SeqCst);
        let began = Instant::now();
        drop(guard);
        assert!(began.elapsed() < ms(2_000) + SLACK, "{:?}", began.elapsed());
        hung.store(false, Ordering::SeqCst);

        // One of them cannot be had, and the rest cannot be given back.
        let last = memory.locker("m-7").build().unwrap().lock().unwrap();
        let hangs = Arc::clone(&hung);
        let factory = hooked::around(&memory, move |when, call, _, by| {
            if when == When::Before && call == Call::Release && hangs.load(Ordering::SeqCst) {
                thread::sleep(by.remaining());
                return Err(silent());
            }
            Ok(())
        });
        hung.store(true, Ordering::SeqCst);
        let began = Instant::now();
        let error = elsewhere(|| factory.lock_all(&names).try_lock_for(ms(300)).map(drop));
        assert_eq!(error.unwrap_err().kind(), ErrorKind::Held);
        assert!(began.elapsed() < ms(2_300) + SLACK, "{:?}", began.elapsed());
        hung.store(false, Ordering::SeqCst);
        drop(last);
    });
}

/// Each guard that was lost already tried to release for 800 ms when it was dropped: 20 took 11 s.
#[test]
fn guards_that_are_lost_are_dropped_at_once_where_calls_hang() {
    within(HANG, || {
        let memory = factory(3_200, 60_000);
        let (factory, hung) = hanging(&memory);
        let lock = |number| {
            let locker = factory.locker(format!("m-{number}")).build().unwrap();
            locker.lock().unwrap()
        };
        let guards: Vec<_> = (0..8).map(lock).collect();
        hung.store(true, Ordering::SeqCst);
        guards.iter().for_each(|guard| closed(&guard.lost()));
        let began = Instant::now();
        drop(guards);
        assert!(began.elapsed() < SLACK, "{:?}", began.elapsed());
        hung.store(false, Ordering::SeqCst);
    });
}

/// A callback for another owner that ran on was taken for one that winds down: what the attempt had left stayed
/// for a whole lease.
#[test]
fn a_stop_cleans_up_after_an_attempt_without_an_answer_while_a_callback_runs() {
    within(HANG, || {
        let memory = factory(4_000, 60_000);
        let lost = Arc::new(AtomicBool::new(true));
        let is_lost = Arc::clone(&lost);
        let granted = Arc::new(AtomicBool::new(false));
        let is_granted = Arc::clone(&granted);
        let owners = memory.clone();
        let factory = hooked::around(&memory, move |when, call, _, _| {
            let acquires = when == When::After && matches!(call, Call::Acquire(_));
            if acquires && is_lost.load(Ordering::SeqCst) && owners.owner("m")?.is_owner("a") {
                is_granted.store(true, Ordering::SeqCst);
                return Err(silent());
            }
            Ok(())
        });
        let guard = memory.locker("m").build().unwrap().lock().unwrap();
        let (begun, hears) = crossbeam_channel::bounded(8);
        let builder = factory.contend("m").id("a").on_owner_changed(move |_| {
            let _ = begun.send(());
            thread::sleep(ms(2_000));
        });
        let service = builder.build().unwrap();
        service.start().unwrap();
        hears.recv_timeout(PATIENCE).unwrap();
        drop(guard);
        wait_until(PATIENCE, "it owns without knowing", || {
            granted.load(Ordering::SeqCst)
        });
        lost.store(false, Ordering::SeqCst);
        service.stop().unwrap();
        wait_until(ms(20_000), "nothing is left", || {
            memory.list().unwrap().is_empty()
        });
    });
}

/// An attack: on a server slower than the calls of a wait that can be cancelled, each try took what the one before
/// had left, and was cut off: nobody had the lock, and nobody else could.
#[test]
fn a_wait_that_can_be_cancelled_gives_a_slow_server_its_time() {
    within(HANG, || {
        let memory = factory(60_000, 1_000);
        let factory = hooked::around(&memory, |when, call, _, by| {
            if when == When::After && matches!(call, Call::Acquire(_)) {
                let left = by.remaining();
                thread::sleep(left.min(ms(1_300)));
                if left < ms(1_300) {
                    return Err(silent());
                }
            }
            Ok(())
        });
        let locker = factory.locker("m").build().unwrap();
        let guard = locker.lock_until_cancelled(&Cancel::new()).unwrap();
        guard.unlock().unwrap();
    });
}

/// The locker's own was ignored where the call was given one too: at a shutdown the wait went on.
#[test]
fn a_wait_with_two_cancels_is_ended_by_either() {
    within(HANG, || {
        for of_the_locker in [true, false] {
            let memory = factory(60_000, 1_000);
            let _guard = memory.locker("m").build().unwrap().lock().unwrap();
            let (locker_s, call_s) = (Cancel::new(), Cancel::new());
            let locker = memory.locker("m").cancel(&locker_s).build().unwrap();
            let waits = thread::spawn({
                let call_s = call_s.clone();
                move || locker.lock_until_cancelled(&call_s).map(drop)
            });
            wait_until(PATIENCE, "it is queued", || {
                memory.participants("m").unwrap().len() == 1
            });
            let cancel = if of_the_locker { locker_s } else { call_s };
            cancel.cancel();
            wait_until(PATIENCE, "the wait is over", || waits.is_finished());
            let error = waits.join().unwrap().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Cancelled);
        }
    });
}

/// Where a lock was lost while another was waited for, the others were given back with the time of an unlock of
/// its own: the call took 800 ms more than its timeout.
#[test]
fn lock_all_that_lost_one_meanwhile_keeps_its_timeout() {
    within(HANG, || {
        let timeout = ms(3_000);
        let memory = factory(4_000, 4_000);
        let (renews, renewed) = crossbeam_channel::unbounded();
        let (slow, first) = (Arc::new(AtomicBool::new(false)), Arc::new(OnceLock::new()));
        let releases = Arc::new(Mutex::new(Vec::new()));
        let (is_slow, asked) = (Arc::clone(&slow), Arc::clone(&first));
        let seen = Arc::clone(&releases);
        let factory = hooked::around(&memory, move |when, call, contender, by| {
            // By its first call it has looked at the clock.
            let end = *asked.get_or_init(Moment::now) + timeout;
            match (when, call, &*contender.mutex) {
                (When::After, Call::Renew, "a") => renews.send(()).unwrap(),
                // Granted, and the reply comes when the time is up.
                (When::After, Call::Acquire(_), "b") if is_slow.load(Ordering::SeqCst) => {
                    thread::sleep(end.remaining());
                }
                (When::Before, Call::Release, _) => {
                    seen.lock().push((thread::current().id(), by));
                }
                _ => {}
            }
            Ok(())
        });
        let held = memory.locker("b").build().unwrap().lock().unwrap();
        let (caller, error) = thread::scope(|scope| {
            let waits = scope.spawn(|| {
                let locked = factory.lock_all(["a", "b"]).try_lock_for(timeout);
                (thread::current().id(), locked.map(drop).unwrap_err())
            });
            wait_until(PATIENCE, "it waits for b", || {
                memory.participants("b").unwrap().len() == 1
            });
            let fence = memory.owner("a").unwrap().fence();
            assert!(memory.revoke("a", fence).unwrap());
            renewed.recv_timeout(PATIENCE).unwrap();
            slow.store(true, Ordering::SeqCst);
            held.unlock().unwrap();
            waits.join().unwrap()
        });
        assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
        let end = *first.get().unwrap() + timeout + ms(1_000 + 200);
        for (thread, by) in releases.lock().iter() {
            let in_time = *thread != caller || *by <= end;
            assert!(in_time, "a release may take {:?} too long", *by - end);
        }
        wait_until(PATIENCE, "none is left", || {
            memory.list().unwrap().is_empty()
        });
    });
}

/// Asking and cleaning up each had a time of its own beside the quarter of the ttl: 180 ms more in all.
#[test]
fn one_try_makes_no_call_beyond_a_quarter_of_the_ttl() {
    within(HANG, || {
        let memory = factory(2_000, 60_000);
        let slow = Arc::new(AtomicBool::new(false));
        let calls = Arc::new(Mutex::new(Vec::new()));
        let (is_slow, seen) = (Arc::clone(&slow), Arc::clone(&calls));
        let factory = hooked::around(&memory, move |when, call, _, by| {
            match (when, call) {
                (When::Before, _) => {
                    let call = (thread::current().id(), call, Moment::now(), by);
                    seen.lock().push(call);
                    if matches!(call.1, Call::Withdraw) && !is_slow.load(Ordering::SeqCst) {
                        return Err(silent());
                    }
                }
                (When::After, Call::Acquire(_)) if is_slow.load(Ordering::SeqCst) => {
                    thread::sleep(by.remaining());
                }
                _ => {}
            }
            Ok(())
        });
        let none_is_late = |caller| {
            let calls = calls.lock().split_off(0);
            let ours: Vec<_> = calls.iter().filter(|call| call.0 == caller).collect();
            // Before its first call it has looked at the clock.
            // A second one to give back what lock_all has.
            let end = ours[0].2 + 2 * memory.lease().request_limit() + ms(5);
            for (_, call, _, by) in ours {
                assert!(*by <= end, "{call:?}: {:?} too late", *by - end);
            }
        };
        let _guard = memory.locker("a").build().unwrap().lock().unwrap();
        let locker = factory.locker("a").build().unwrap();
        let caller = elsewhere(|| {
            // It does not get out of the queue again: there is something to clean up.
            locker.try_lock_for(ms(100)).map(drop).unwrap_err();
            calls.lock().clear();
            slow.store(true, Ordering::SeqCst);
            locker.try_lock().map(drop).unwrap_err();
            thread::current().id()
        });
        none_is_late(caller);

        let caller = elsewhere(|| {
            // The first takes all the time there is.
            let error = factory.lock_all(["b", "c"]).try_lock().map(drop);
            assert_eq!(error.unwrap_err().kind(), ErrorKind::Timeout);
            thread::current().id()
        });
        none_is_late(caller);
    });
}

/// It was said to be held by another thread, where a renewal hung after its guard was gone.
#[test]
fn nobody_is_said_to_hold_what_waits_for_an_earlier_call() {
    within(HANG, || {
        let memory = factory(60_000, 1_000);
        let (asks, asked) = crossbeam_channel::unbounded();
        let (let_go, hang) = crossbeam_channel::unbounded::<()>();
        let factory = hooked::around(&memory, move |when, call, _, _| {
            if (when, call) == (When::Before, Call::Renew) {
                asks.send(()).unwrap();
                let _ = hang.recv_timeout(PATIENCE);
            }
            Ok(())
        });
        let locker = factory.locker("m").renew_after(ms(950)).build().unwrap();
        let guard = locker.lock().unwrap();
        asked.recv_timeout(PATIENCE).unwrap();
        assert_eq!(guard.unlock().unwrap_err().kind(), ErrorKind::Timeout);
        let error = locker.try_lock_for(ms(100)).map(drop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
        assert!(error.to_string().contains("an earlier call"), "{error}");
        drop(let_go);
        drop(locker.try_lock_for(PATIENCE).unwrap());
    });
}

/// One node of a cluster hangs: the renewals of its guards take all the threads of the timer.
#[test]
fn hung_guards_cost_healthy_ones_nothing() {
    within(HANG, || {
        let hangs = Arc::new(AtomicBool::new(false));
        let is_hung = Arc::clone(&hangs);
        let factory = hooked::around(&factory(8_000, 2_000), move |when, call, place, by| {
            let renews = (when, call) == (When::Before, Call::Renew);
            if renews && place.mutex.starts_with("hung") && is_hung.load(Ordering::SeqCst) {
                thread::sleep(by.remaining());
                return Err(silent());
            }
            Ok(())
        });
        let lock = |mutex: String, ttl| {
            let locker = factory.locker(mutex).ttl(ms(ttl)).renew_after(ms(2_600));
            locker.build().unwrap().lock().unwrap()
        };
        let (mut hung, mut healthy) = (Vec::new(), Vec::new());
        for number in 0..300 {
            hung.push(lock(format!("hung-{number}"), 60_000));
            if number % 20 == 10 {
                healthy.push(lock(format!("healthy-{number}"), 8_000));
            }
            // Spread, so that renewals are due one after the other.
            thread::sleep(ms(8));
        }
        hangs.store(true, Ordering::SeqCst);
        // Long enough for each healthy guard to be lost if it is not renewed.
        let until = Instant::now() + ms(12_000);
        while Instant::now() < until {
            let lost = healthy.iter().filter(|guard| !guard.is_valid()).count();
            assert_eq!(lost, 0, "of {} healthy guards", healthy.len());
            thread::sleep(ms(100));
        }
        hangs.store(false, Ordering::SeqCst);
    });
}
