//! What a service does at the edges: while a callback hangs, a call is under way, or nobody rings.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, OnceLock};
use std::time::{Duration, Instant};

use crate::conformance::hooked::{self, Call, When};
use crate::conformance::{HANG, PATIENCE, name};
use contend::{Error, ErrorKind, Executor, Factory, Lease, MutexContendService, Status};
use parking_lot::Mutex;
use testbed::wait_until;

fn memory(ttl: u64, transition: u64) -> Factory {
    let ms = Duration::from_millis;
    contend::memory::factory("service", Lease::new(ms(ttl), ms(transition)).unwrap())
}

fn unreachable() -> Error {
    Error::new(ErrorKind::Unreachable, "broken on request")
}

/// Rule 7, where it is hardest: the owner missed its deadline, its Released callback winds down, the
/// worker is about to own again, and somebody stops the service.
#[test]
fn a_stop_while_it_acquires_again_releases_nothing_under_a_running_callback() {
    testbed::within(HANG, || {
        let (broken, acquiring) = (
            Arc::new(AtomicBool::new(false)),
            Arc::new(AtomicUsize::new(0)),
        );
        let running = Arc::new(AtomicBool::new(false));
        let under_callback = Arc::new(AtomicUsize::new(0));
        let hook = {
            let (broken, acquiring) = (Arc::clone(&broken), Arc::clone(&acquiring));
            let (running, under_callback) = (Arc::clone(&running), Arc::clone(&under_callback));
            move |when, call, _: &_, _| {
                match (when, call) {
                    (When::Before, Call::Renew) if broken.load(Ordering::SeqCst) => {
                        return Err(unreachable());
                    }
                    (When::Before, Call::Acquire(_)) => {
                        acquiring.fetch_add(1, Ordering::SeqCst);
                        if broken.load(Ordering::SeqCst) {
                            std::thread::sleep(Duration::from_millis(150));
                        }
                    }
                    (When::Before, Call::Release) if running.load(Ordering::SeqCst) => {
                        under_callback.fetch_add(1, Ordering::SeqCst);
                    }
                    _ => {}
                }
                Ok(())
            }
        };
        let factory = hooked::around(&memory(1_000, 3_000), hook);
        let winding = Arc::clone(&running);
        let service = factory
            .contend(name("again"))
            .on_released(move |_| {
                winding.store(true, Ordering::SeqCst);
                std::thread::sleep(Duration::from_millis(1_200));
                winding.store(false, Ordering::SeqCst);
            })
            .build()
            .unwrap();
        service.start().unwrap();
        wait_until(PATIENCE, "it owns", || service.is_owner());
        broken.store(true, Ordering::SeqCst);
        wait_until(PATIENCE, "it acquires again", || {
            acquiring.load(Ordering::SeqCst) >= 2
        });
        service.stop().unwrap();
        assert_eq!(
            under_callback.load(Ordering::SeqCst),
            0,
            "released under a running callback"
        );
        assert!(
            !running.load(Ordering::SeqCst),
            "stop returned while a callback ran"
        );
    });
}

/// A callback that hangs is neither hidden nor joined by a second run.
#[test]
fn stop_reports_a_hanging_callback() {
    testbed::within(HANG, || {
        let hangs = Arc::new(AtomicBool::new(true));
        let inside = Arc::clone(&hangs);
        let factory = memory(300, 200);
        let service = factory
            .contend(name("hang"))
            .on_released(move |_| {
                wait_until(PATIENCE, "the test lets go", || {
                    !inside.load(Ordering::SeqCst)
                });
            })
            .build()
            .unwrap();
        service.start().unwrap();
        wait_until(PATIENCE, "it owns", || service.is_owner());
        assert_eq!(service.stop().unwrap_err().kind(), ErrorKind::Timeout);
        assert_eq!(service.status(), Status::Stopping);
        assert_eq!(service.start().unwrap_err().kind(), ErrorKind::InvalidState);
        hangs.store(false, Ordering::SeqCst);
        // Each `stop` waits for as long as the lease, which is short here.
        wait_until(PATIENCE, "it stops", || service.stop().is_ok());
        service.start().unwrap();
        wait_until(PATIENCE, "it owns again", || service.is_owner());
    });
}

/// Rule 8: an executor that panics costs callbacks, not the service.
#[test]
fn a_panicking_executor_does_not_end_the_service() {
    testbed::within(HANG, || {
        // Not `panic!`, which prints a backtrace first where one is asked for: seconds on a busy machine,
        // and it is the worker that has to print it.
        let executor: Executor =
            Arc::new(|_| std::panic::resume_unwind(Box::new("on purpose: an executor of a test")));
        let service = memory(3_000, 1_000)
            .with_executor(executor)
            .contend(name("executor-panics"))
            .on_acquired(|_| ())
            .build()
            .unwrap();
        service.start().unwrap();
        wait_until(PATIENCE, "it owns", || service.is_owner());
        let fence = service.fence();
        let until = Instant::now() + Duration::from_millis(4_000);
        while Instant::now() < until {
            assert_eq!(service.fence(), fence);
            std::thread::sleep(Duration::from_millis(10));
        }
        service.stop().unwrap();
    });
}

/// Rule 10: the id is in use for as long as somebody contends under it.
#[test]
fn an_id_is_free_only_when_its_worker_is_over() {
    testbed::within(HANG, || {
        let factory = memory(1_000, 500);
        let mutex = name("claim");
        let slot: Arc<Mutex<Option<MutexContendService>>> = Arc::default();
        let (inside, goes_on) = (Arc::clone(&slot), Arc::new(AtomicBool::new(true)));
        let (dropped, runs) = (Arc::new(AtomicBool::new(false)), Arc::clone(&goes_on));
        let gone = Arc::clone(&dropped);
        let service = factory
            .contend(&mutex)
            .id("a")
            .on_acquired(move |_| {
                wait_until(PATIENCE, "the service is there", || inside.lock().is_some());
                drop(inside.lock().take());
                gone.store(true, Ordering::SeqCst);
                wait_until(PATIENCE, "the test lets go", || {
                    !runs.load(Ordering::SeqCst)
                });
            })
            .build()
            .unwrap();
        service.start().unwrap();
        *slot.lock() = Some(service);
        wait_until(PATIENCE, "the callback dropped its service", || {
            dropped.load(Ordering::SeqCst)
        });
        let error = factory.contend(&mutex).id("a").build().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::DuplicateContender);
        goes_on.store(false, Ordering::SeqCst);
        wait_until(PATIENCE, "the id is free", || {
            factory.contend(&mutex).id("a").build().is_ok()
        });
    });
}

/// Review core 10: each callback waits for the other's service, which waits for its own callback. Both end within
/// the bound of a stop: the lease, its drift, a ttl for the call under way and a second for the way out.
#[test]
fn callbacks_that_stop_each_others_service_end_within_the_bound_of_a_stop() {
    testbed::within(HANG, || {
        let factory = memory(1_000, 500);
        let bound = Duration::from_millis(1_500 + 20 + 1_000 + 1_000);
        let pair: Arc<OnceLock<[MutexContendService; 2]>> = Arc::default();
        let both = Arc::new(Barrier::new(2));
        let (told, stops) = crossbeam_channel::unbounded();
        let service = |number: usize| {
            let (pair, both, told) = (Arc::clone(&pair), Arc::clone(&both), told.clone());
            let builder = factory.contend(name("each-other"));
            builder
                .on_acquired(move |_| {
                    both.wait();
                    let (began, other) = (Instant::now(), &pair.get().unwrap()[1 - number]);
                    let stopped = other.stop().map_err(|error| error.kind());
                    told.send((stopped, began.elapsed())).unwrap();
                })
                .build()
                .unwrap()
        };
        let services = pair.get_or_init(|| [service(0), service(1)]);
        services.iter().for_each(|it| it.start().unwrap());
        for _ in services {
            let (stopped, took) = stops.recv_timeout(PATIENCE).unwrap();
            println!("{stopped:?} after {took:?}");
            assert!(matches!(stopped, Ok(()) | Err(ErrorKind::Timeout)));
            assert!(took < bound + Duration::from_secs(1), "{took:?}");
        }
        wait_until(PATIENCE, "both have stopped", || {
            services.iter().all(|it| it.status() == Status::Initial)
        });
    });
}
