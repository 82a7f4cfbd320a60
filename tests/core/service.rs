//! What a service does at the edges: while a callback hangs, a call is under way, or an executor fails.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use crate::conformance::hooked::{self, Call, Switch, When, no_answer};
use crate::conformance::{HANG, PATIENCE, memory, ms};
use contend::{ErrorKind, EventKind, Executor, Job, MutexContendService, Status};
use parking_lot::Mutex;
use testbed::{wait_until, within};

fn start(service: &MutexContendService) {
    service.start().unwrap();
    wait_until(PATIENCE, "it owns", || service.is_owner());
}

/// The worker waits for Released's callback while it serves the first resign.
#[test]
fn callback_of_a_resign_may_resign() {
    within(HANG, || {
        let service = Arc::new(OnceLock::<MutexContendService>::new());
        let took = Arc::new(Mutex::new(Vec::new()));
        let resign = {
            let (service, took) = (Arc::clone(&service), Arc::clone(&took));
            move |rest| {
                let began = Instant::now();
                service.get().unwrap().resign_for(rest).unwrap();
                took.lock().push(began.elapsed());
            }
        };
        let again = resign.clone();
        let builder = memory(60_000, 1_000).contend("m");
        let builder = builder.on_acquired(move |_| resign(Duration::ZERO));
        let builder = builder.on_released(move |_| again(ms(3_600_000)));
        let service = service.get_or_init(|| builder.build().unwrap());
        service.start().unwrap();
        wait_until(PATIENCE, "both have resigned", || took.lock().len() >= 2);
        service.stop().unwrap();
        assert!(took.lock().iter().all(|it| *it < ms(10_000)), "{took:?}");
    });
}

/// The owner missed its deadline, its Released callback winds down, the worker is about to own again, and then the
/// service is stopped.
#[test]
fn stop_releases_nothing_under_a_running_callback() {
    within(HANG, || {
        let (broken, running, released) = <(Switch, Switch, Switch)>::default();
        let acquiring = Arc::new(AtomicUsize::new(0));
        let hook = {
            let (broken, running, released) = (broken.clone(), running.clone(), released.clone());
            let acquiring = Arc::clone(&acquiring);
            move |when, call, _: &_, _| {
                match (when, call) {
                    (When::Before, Call::Renew) if broken.is_on() => return Err(no_answer()),
                    (When::Before, Call::Acquire(_)) => {
                        acquiring.fetch_add(1, Ordering::SeqCst);
                        // So that the stop comes while it is under way.
                        if broken.is_on() {
                            thread::sleep(ms(150));
                        }
                    }
                    (When::Before, Call::Release) if running.is_on() => released.on(),
                    _ => {}
                }
                Ok(())
            }
        };
        let factory = hooked::around(&memory(1_000, 3_000), hook);
        let winding = running.clone();
        let builder = factory.contend("m").on_released(move |_| {
            winding.on();
            // Longer than a ttl: the worker is about to own again meanwhile.
            thread::sleep(ms(1_200));
            winding.off();
        });
        let service = builder.build().unwrap();
        start(&service);
        broken.on();
        wait_until(PATIENCE, "it acquires again", || {
            acquiring.load(Ordering::SeqCst) >= 2
        });
        service.stop().unwrap();
        assert!(!released.is_on(), "released under a running callback");
        assert!(!running.is_on(), "stop returned while a callback ran");
    });
}

/// A callback that hangs is neither hidden nor joined by a second run.
#[test]
fn stop_reports_a_hanging_callback() {
    within(HANG, || {
        let hangs = Switch::default();
        let inside = hangs.clone();
        let factory = memory(300, 200);
        let builder = factory.contend("m").on_released(move |_| {
            wait_until(PATIENCE, "the test lets go", || !inside.is_on());
        });
        let service = builder.build().unwrap();
        start(&service);
        hangs.on();
        assert_eq!(service.stop().unwrap_err().kind(), ErrorKind::Timeout);
        assert_eq!(service.status(), Status::Stopping);
        assert_eq!(service.start().unwrap_err().kind(), ErrorKind::InvalidState);
        hangs.off();
        // Each `stop` waits for as long as the lease, which is short here.
        wait_until(PATIENCE, "it stops", || service.stop().is_ok());
        start(&service);
    });
}

/// Its callbacks run all the same, and the service leads on.
#[test]
fn failing_executor_costs_no_event() {
    within(HANG, || {
        let given = AtomicUsize::new(0);
        let executor: Executor =
            Arc::new(move |job: Job| match given.fetch_add(1, Ordering::SeqCst) {
                // Not `panic!`: the worker would have to print a backtrace, which takes seconds on a busy machine.
                0..3 => std::panic::resume_unwind(Box::new("on purpose")),
                3..6 => drop(job),
                _ => drop(thread::spawn(job)),
            });
        // A long ttl: it is not the next renewal that gives the job again.
        let factory = memory(300_000, 1_000).with_executor(executor);
        let log: Arc<Mutex<Vec<EventKind>>> = Arc::default();
        let (gained, lost) = (Arc::clone(&log), Arc::clone(&log));
        let builder = factory.contend("m");
        let builder = builder.on_acquired(move |event| gained.lock().push(event.kind));
        let builder = builder.on_released(move |event| lost.lock().push(event.kind));
        let service = builder.build().unwrap();
        start(&service);
        wait_until(PATIENCE, "the callback ran", || log.lock().len() == 1);
        service.stop().unwrap();
        assert_eq!(*log.lock(), [EventKind::Acquired, EventKind::Released]);
    });
}

#[test]
fn id_is_free_after_its_worker() {
    within(HANG, || {
        let factory = memory(1_000, 500);
        let slot: Arc<Mutex<Option<MutexContendService>>> = Arc::default();
        let (dropped, goes_on) = <(Switch, Switch)>::default();
        let (inside, gone, runs) = (Arc::clone(&slot), dropped.clone(), goes_on.clone());
        let builder = factory.contend("m").id("a").on_acquired(move |_| {
            wait_until(PATIENCE, "the service is there", || inside.lock().is_some());
            drop(inside.lock().take());
            gone.on();
            wait_until(PATIENCE, "the test lets go", || !runs.is_on());
        });
        goes_on.on();
        let service = builder.build().unwrap();
        service.start().unwrap();
        *slot.lock() = Some(service);
        let is_dropped = || dropped.is_on();
        wait_until(PATIENCE, "the callback dropped its service", is_dropped);
        let error = factory.contend("m").id("a").build().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::DuplicateContender);
        goes_on.off();
        wait_until(PATIENCE, "the id is free", || {
            factory.contend("m").id("a").build().is_ok()
        });
    });
}

/// Each callback waits for the other's service, which waits for its own callback.
#[test]
fn callbacks_that_stop_each_other_end() {
    within(HANG, || {
        let factory = memory(1_000, 500);
        // The lease, its drift, a ttl for the call under way, a second for the way out, and three for a busy machine.
        // Without a bound they would wait for ever.
        let bound = ms(1_500 + 20 + 1_000 + 1_000 + 3_000);
        let pair: Arc<OnceLock<[MutexContendService; 2]>> = Arc::default();
        let both = Arc::new(Barrier::new(2));
        let (told, stops) = crossbeam_channel::unbounded();
        let service = |number: usize| {
            let (pair, both, told) = (Arc::clone(&pair), Arc::clone(&both), told.clone());
            let builder = factory.contend(["m", "n"][number]).on_acquired(move |_| {
                both.wait();
                let (began, other) = (Instant::now(), &pair.get().unwrap()[1 - number]);
                let stopped = other.stop().map_err(|error| error.kind());
                told.send((stopped, began.elapsed())).unwrap();
            });
            builder.build().unwrap()
        };
        let services = pair.get_or_init(|| [service(0), service(1)]);
        services.iter().for_each(|it| it.start().unwrap());
        for _ in services {
            let (stopped, took): (_, Duration) = stops.recv_timeout(PATIENCE).unwrap();
            assert!(matches!(stopped, Ok(()) | Err(ErrorKind::Timeout)));
            assert!(took < bound, "{took:?}");
        }
        wait_until(PATIENCE, "both have stopped", || {
            services.iter().all(|it| it.status() == Status::Initial)
        });
    });
}
