//! What a scheduler does with work that is slow, stuck or calls back.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::conformance::hooked::{self, Call, When};
use contend::backend::OnRefusal;
use contend::{
    Context, Error, ErrorKind, Factory, Lease, Probe, RunOutcomeKind, Schedule, Scheduler,
    SchedulerBuilder, Status,
};
use crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use parking_lot::Mutex;
use testbed::{wait_until, within};

/// When a hung test is ended.
const HANG: Duration = Duration::from_secs(120);

/// How long a condition may take to come true on a busy machine.
const PATIENCE: Duration = Duration::from_secs(40);

/// A schedule whose second run never comes.
static HOURLY: std::sync::LazyLock<Schedule> =
    std::sync::LazyLock::new(|| Schedule::every(ms(3_600_000)));

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// Starts work that tells its fence and goes on until the sender is dropped.
fn stuck(builder: SchedulerBuilder) -> (Scheduler, Receiver<u64>, Sender<()>) {
    let (sender, begun) = unbounded();
    let (let_go, held) = bounded::<()>(0);
    let scheduler = builder.start(Schedule::every(ms(5)), move |context| {
        sender.send(context.fence()).unwrap();
        let _ = held.recv();
    });
    (scheduler.unwrap(), begun, let_go)
}

/// A bound makes stop return; the lease is not released while the work runs, nor renewed.
#[test]
fn stop_gives_up_on_stuck_work() {
    within(HANG, || {
        let lease = Lease::new(ms(1_000), ms(1_000)).unwrap();
        let memory = contend::memory::factory("stuck-work", lease);
        let started = Instant::now();
        let (scheduler, begun, let_go) =
            stuck(memory.scheduler("m").id("stuck").stop_within(ms(100)));
        let fence = begun.recv_timeout(PATIENCE).unwrap();
        let error = scheduler.stop().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout);
        assert!(
            error.to_string().contains("the scheduled work still runs"),
            "{error}"
        );
        wait_until(PATIENCE, "it has stepped down", || !scheduler.is_leader());
        assert_eq!(
            scheduler.start().unwrap_err().kind(),
            ErrorKind::InvalidState
        );

        // The next one leads when the lease has run out: it was not released.
        let next = memory.locker("m").ttl(ms(20_000)).build().unwrap();
        let next = next.try_lock_for(PATIENCE).unwrap();
        assert!(next.fence() > fence);
        assert!(
            started.elapsed() >= lease.total(),
            "{:?}",
            started.elapsed()
        );

        drop(let_go);
        wait_until(PATIENCE, "its threads have ended", || {
            scheduler.status() == Status::Initial
        });
        // What is released now, if anything, is a lease that is gone: it touches no later one.
        assert!(next.is_valid());
        next.unlock().unwrap();
        scheduler.start().unwrap();
        assert!(begun.recv_timeout(PATIENCE).unwrap() > fence);
        scheduler.stop().unwrap();
    });
}

/// Stuck work that ends in time lets the next leader in at once.
#[test]
fn late_end_of_work_releases() {
    within(HANG, || {
        let lease = Lease::new(ms(20_000), ms(20_000)).unwrap();
        let factory = contend::memory::factory("late-end", lease);
        let (scheduler, begun, let_go) = stuck(factory.scheduler("m").stop_within(ms(50)));
        begun.recv_timeout(PATIENCE).unwrap();
        scheduler.stop().unwrap_err();
        let next = factory.locker("m").build().unwrap();
        next.try_lock().unwrap_err();
        drop(let_go);
        let began = Instant::now();
        drop(next.try_lock_for(PATIENCE).unwrap());
        assert!(began.elapsed() < ms(15_000), "{:?}", began.elapsed());
        scheduler.stop().unwrap();
    });
}

/// The same after a loss: what is left of the lease is the work's time to stop in.
#[test]
fn stop_after_loss_spares_running_work() {
    within(HANG, || {
        let lease = Lease::new(ms(2_000), ms(60_000)).unwrap();
        let memory = contend::memory::factory("loss", lease);
        let (broken, released) = (Arc::new(AtomicBool::new(false)), Arc::default());
        let (is_broken, counted) = (Arc::clone(&broken), Arc::clone(&released));
        let factory = hooked::around(&memory, move |when, call, _, _| {
            if when == When::After && call == Call::Release {
                AtomicUsize::fetch_add(&counted, 1, Ordering::SeqCst);
            }
            let fails = matches!(call, Call::Renew | Call::Acquire(_));
            if fails && is_broken.load(Ordering::SeqCst) {
                return Err(Error::new(ErrorKind::Unreachable, "on request"));
            }
            Ok(())
        });
        let (scheduler, begun, let_go) = stuck(factory.scheduler("m").stop_within(ms(300)));
        begun.recv_timeout(PATIENCE).unwrap();
        broken.store(true, Ordering::SeqCst);
        wait_until(PATIENCE, "leadership is lost", || !scheduler.is_leader());
        scheduler.stop().unwrap_err();
        thread::sleep(ms(300));
        assert_eq!(released.load(Ordering::SeqCst), 0);
        assert_eq!(
            memory
                .locker("m")
                .build()
                .unwrap()
                .try_lock()
                .unwrap_err()
                .kind(),
            ErrorKind::Held
        );
        // The release adopts what the failed attempts may have left.
        broken.store(false, Ordering::SeqCst);
        drop(let_go);
        scheduler.stop().unwrap();
        assert_eq!(released.load(Ordering::SeqCst), 1);
        drop(memory.locker("m").build().unwrap().try_lock().unwrap());
    });
}

#[test]
fn stop_inside_work_takes_effect_after_it() {
    within(HANG, || {
        let factory = contend::memory::factory("inside", Lease::default());
        let slot: Arc<Mutex<Option<Arc<Scheduler>>>> = Arc::default();
        let own = Arc::clone(&slot);
        let (sender, stopped) = unbounded();
        let scheduler = factory
            .scheduler("m")
            .build(Schedule::with_delay(ms(5)), move |context| {
                let scheduler = own.lock().take().expect("a second run");
                let stopped = scheduler.stop();
                sender
                    .send((stopped.is_ok(), context.is_cancelled(), context.is_leader()))
                    .unwrap();
            })
            .unwrap();
        let scheduler = Arc::new(scheduler);
        *slot.lock() = Some(Arc::clone(&scheduler));
        scheduler.start().unwrap();
        assert_eq!(stopped.recv_timeout(PATIENCE).unwrap(), (true, true, true));
        wait_until(PATIENCE, "it has stopped", || {
            scheduler.status() == Status::Initial
        });
        drop(factory.locker("m").build().unwrap().try_lock().unwrap());
    });
}

#[test]
fn fixed_rate_does_not_pile_up() {
    within(HANG, || {
        let factory = contend::memory::factory("pile", Lease::default());
        let (sender, begun) = unbounded();
        let (free_out, free) = bounded(1);
        let slow = AtomicBool::new(true);
        let scheduler = factory
            .scheduler("m")
            .build(Schedule::every(ms(100)), move |_| {
                sender.send(Instant::now()).unwrap();
                if slow.swap(false, Ordering::SeqCst) {
                    thread::sleep(ms(2_050));
                    free_out.send(Instant::now()).unwrap();
                }
            })
            .unwrap();
        scheduler.start().unwrap();
        let times: Vec<Instant> = (0..6)
            .map(|_| begun.recv_timeout(PATIENCE).unwrap())
            .collect();
        assert!(times[1] - times[0] >= ms(2_050));
        // One run for the twenty that were missed, then the beat: the four after it take three periods
        // or more, where a pile would be worked off at once. Counted from when it was free to begin: a
        // run that a busy machine begins late is followed by the next one at once.
        let free = free.recv_timeout(PATIENCE).unwrap();
        assert!(times[5] - free >= ms(300), "{free:?}: {times:?}");
        scheduler.stop().unwrap();
    });
}

#[test]
fn fixed_delay_rests_between_runs() {
    within(HANG, || {
        let factory = contend::memory::factory("rest", Lease::default());
        let (sender, begun) = unbounded();
        let started = Instant::now();
        let scheduler = factory
            .scheduler("m")
            .build(
                Schedule::with_delay(ms(100)).initial_delay(ms(200)),
                move |_| {
                    sender.send(Instant::now()).unwrap();
                    thread::sleep(ms(50));
                },
            )
            .unwrap();
        scheduler.start().unwrap();
        let times: Vec<Instant> = (0..4)
            .map(|_| begun.recv_timeout(PATIENCE).unwrap())
            .collect();
        assert!(times[0] - started >= ms(200));
        assert!(times.windows(2).all(|pair| pair[1] - pair[0] >= ms(150)));
        // Stopping does not wait for the next run.
        let scheduler_of_an_hour = factory
            .scheduler("hour")
            .build(Schedule::every(ms(3_600_000)), |_| {})
            .unwrap();
        scheduler_of_an_hour.start().unwrap();
        wait_until(PATIENCE, "it leads", || scheduler_of_an_hour.is_leader());
        scheduler_of_an_hour.stop().unwrap();
        scheduler.stop().unwrap();
    });
}

#[test]
fn drop_stops() {
    within(HANG, || {
        let factory = contend::memory::factory("drop", Lease::default());
        let runs = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&runs);
        let scheduler = factory
            .scheduler("m")
            .build(Schedule::every(ms(2)), move |_| {
                counted.fetch_add(1, Ordering::SeqCst);
            })
            .unwrap();
        scheduler.start().unwrap();
        wait_until(PATIENCE, "it works", || runs.load(Ordering::SeqCst) > 3);
        drop(scheduler);
        assert_eq!(Arc::strong_count(&runs), 1, "the work is gone too");
        drop(factory.locker("m").build().unwrap().try_lock().unwrap());
    });
}

/// A scheduler that does not lead asks no more of the backend than a waiting service.
#[test]
fn waiting_scheduler_stands_in_the_queue() {
    within(HANG, || {
        let memory = contend::memory::factory("waits", Lease::default());
        let guard = memory.locker("m").build().unwrap();
        let guard = guard.lock().unwrap();
        let (factory, calls) = hooked::counting(&memory);
        let scheduler = factory
            .scheduler("m")
            .build(Schedule::every(ms(2)), |_| {})
            .unwrap();
        scheduler.start().unwrap();
        let queued = [Call::Acquire(OnRefusal::Enqueue)];
        wait_until(PATIENCE, "it waits", || *calls.lock() == queued);
        thread::sleep(ms(100));
        assert_eq!(*calls.lock(), queued);
        drop(guard);
        wait_until(PATIENCE, "it leads", || scheduler.is_leader());
        scheduler.stop().unwrap();
    });
}

#[test]
fn bad_schedules_are_refused() {
    let factory = contend::memory::factory("inputs", Lease::default());
    for schedule in [
        Schedule::every(ms(0)),
        Schedule::with_delay(ms(0)),
        Schedule::every(ms(10)).jitter(Duration::MAX),
    ] {
        let refused = factory.scheduler("m").build(schedule, |_| {});
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::InvalidInput);
    }
    let refused = factory.scheduler("{m}").build(HOURLY.clone(), |_| {});
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::InvalidInput);
}

/// One write per run where the period is worth it, none below a second; and one question per leadership.
#[test]
fn run_is_recorded_once() {
    within(HANG, || {
        let memory = contend::memory::factory("writes", Lease::default());
        let count = |calls: &Mutex<Vec<Call>>, call: Call| {
            calls.lock().iter().filter(|made| **made == call).count()
        };
        for (schedule, recorded) in [
            (Schedule::every(ms(1_000)), true),
            (Schedule::with_delay(ms(1_000)), true),
            (Schedule::every(ms(100)), false),
        ] {
            let (factory, calls) = hooked::counting(&memory);
            let (sender, runs) = unbounded();
            let scheduler = factory
                .scheduler("m")
                .start(schedule, move |_| sender.send(()))
                .unwrap();
            for _ in 0..3 {
                runs.recv_timeout(PATIENCE).unwrap();
            }
            scheduler.stop().unwrap();
            let runs = 3 + runs.len();
            let expected = if recorded { runs } else { 0 };
            assert_eq!(count(&calls, Call::RecordRun), expected);
            assert_eq!(count(&calls, Call::LastRun), usize::from(recorded));
        }
    });
}

/// A write that fails costs the record, not the run.
#[test]
fn unrecorded_work_runs() {
    within(HANG, || {
        let memory = contend::memory::factory("no-record", Lease::default());
        let factory = hooked::around(&memory, |when, call, _, _| match (when, call) {
            (When::Before, Call::RecordRun) => {
                Err(Error::new(ErrorKind::Unavailable, "on request"))
            }
            _ => Ok(()),
        });
        let (sender, runs) = unbounded();
        let scheduler = factory
            .scheduler("m")
            .start(Schedule::every(ms(1_000)), move |_| {
                sender.send(Instant::now())
            })
            .unwrap();
        let first = runs.recv_timeout(PATIENCE).unwrap();
        let second = runs.recv_timeout(PATIENCE).unwrap();
        assert!(second - first >= ms(900), "{:?}", second - first);
        scheduler.stop().unwrap();
    });
}

/// Without an answer a run might have been a moment ago: nothing begins before the backend answers.
#[test]
fn leader_asks_again_for_the_last_run() {
    within(HANG, || {
        let memory = contend::memory::factory("no-answer", Lease::default());
        let asked = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&asked);
        let factory = hooked::around(&memory, move |when, call, _, _| match (when, call) {
            (When::Before, Call::LastRun) if counted.fetch_add(1, Ordering::SeqCst) < 2 => {
                Err(Error::new(ErrorKind::Unavailable, "on request"))
            }
            _ => Ok(()),
        });
        let (sender, runs) = unbounded();
        let counted = Arc::clone(&asked);
        let scheduler = factory
            .scheduler("m")
            .start(HOURLY.clone(), move |_| {
                sender.send(counted.load(Ordering::SeqCst))
            })
            .unwrap();
        assert_eq!(runs.recv_timeout(PATIENCE).unwrap(), 3);
        scheduler.stop().unwrap();
    });
}

/// The backend's word that the leadership is over comes with the record: nothing runs in it.
#[test]
fn refused_record_begins_no_run() {
    within(HANG, || {
        let memory = contend::memory::factory("refused", Lease::default());
        let handle = contend::memory::handle("refused");
        let once = AtomicBool::new(true);
        let (sender, revoked) = unbounded();
        let looks = memory.clone();
        let factory = hooked::around(&memory, move |when, call, _, _| {
            if (when, call) == (When::Before, Call::RecordRun) && once.swap(false, Ordering::SeqCst)
            {
                let owner = looks.owner("m")?;
                assert!(handle.revoke("m"));
                sender.send(owner.fence()).unwrap();
            }
            Ok(())
        });
        let (sender, runs) = unbounded();
        let scheduler = factory
            .scheduler("m")
            .start(Schedule::every(ms(1_000)), move |context| {
                sender.send(context.fence())
            })
            .unwrap();
        let over = revoked.recv_timeout(PATIENCE).unwrap();
        let fence = runs.recv_timeout(PATIENCE).unwrap();
        assert!(fence > over, "a run with the fence {over}, which is over");
        scheduler.stop().unwrap();
    });
}

/// Rule "belief ends on the local boot-time clock", for work: the service's worker hangs in a call, so
/// that nothing says that the leadership is over, and still nothing begins after its deadline.
#[test]
fn nothing_begins_after_the_deadline() {
    within(HANG, || {
        let lease = Lease::new(ms(500), ms(500)).unwrap();
        let memory = contend::memory::factory("hangs", lease);
        let hang = Arc::new(AtomicBool::new(false));
        let hangs = Arc::clone(&hang);
        let (says, hung) = unbounded();
        let factory = hooked::around(&memory, move |when, call, _, _| {
            let renews = (when, call) == (When::Before, Call::Renew);
            if renews && hangs.swap(false, Ordering::SeqCst) {
                let began = Instant::now();
                thread::sleep(ms(2_000));
                says.send((began, Instant::now())).unwrap();
            }
            Ok(())
        });
        let (sender, runs) = unbounded();
        let scheduler = factory
            .scheduler("m")
            .start(Schedule::every(ms(5)), move |context| {
                sender.send((Instant::now(), context.is_leader())).unwrap();
            })
            .unwrap();
        runs.recv_timeout(PATIENCE).unwrap();
        hang.store(true, Ordering::SeqCst);
        let (began, ended) = hung.recv_timeout(PATIENCE).unwrap();
        let hung = began + lease.ttl()..ended;
        let late = runs.try_iter().filter(|(begun, _)| hung.contains(begun));
        let late = late.count();
        assert_eq!(late, 0, "runs that began after the deadline");
        wait_until(PATIENCE, "it leads and works again", || !runs.is_empty());
        scheduler.stop().unwrap();
    });
}

/// A run that is not made is not recorded: the next leader would take it for made. The service's worker hangs
/// in a call, so that nothing says that the leadership is over when the run comes due.
#[test]
fn run_due_after_the_deadline_is_not_recorded() {
    within(HANG, || {
        let (period, lease) = (ms(1_000), Lease::new(ms(400), ms(20_000)).unwrap());
        let memory = contend::memory::factory("unrecorded", lease);
        let hang = Arc::new(AtomicBool::new(false));
        let hangs = Arc::clone(&hang);
        let (says, hung) = unbounded();
        let (let_go, goes_on) = unbounded::<()>();
        let (sends, calls) = unbounded();
        let factory = hooked::around(&memory, move |when, call, _, _| {
            if when == When::Before && call == Call::Renew && hangs.swap(false, Ordering::SeqCst) {
                says.send(()).unwrap();
                let _ = goes_on.recv();
            } else if when == When::Before {
                let _ = sends.send(call);
            }
            Ok(())
        });
        let (sender, runs) = unbounded();
        let scheduler = start(&factory, Schedule::every(period), move |_| {
            let _ = sender.send(Instant::now());
        });
        let first = runs.recv_timeout(PATIENCE).unwrap();
        hang.store(true, Ordering::SeqCst);
        hung.recv_timeout(PATIENCE).unwrap();
        calls.try_iter().for_each(drop);
        // Long enough for belief to end, and for the next run to come due after that.
        let due = first + period + ms(300);
        assert!(runs.recv_deadline(due).is_err(), "a run without belief");
        drop(let_go);
        let acquire = |call: &Call| matches!(call, Call::Acquire(_));
        let mut before = Vec::new();
        while !before.last().is_some_and(acquire) {
            before.push(calls.recv_timeout(PATIENCE).unwrap());
        }
        assert!(!before.contains(&Call::RecordRun), "{before:?}");
        // Led again, the run that came due is made, and recorded then.
        runs.recv_timeout(PATIENCE).unwrap();
        scheduler.stop().unwrap();
    });
}

/// Each kind of outcome, with what came with it, in the hook and in the probe.
#[test]
fn every_outcome_is_reported() {
    #[derive(Debug)]
    struct Outer(std::io::Error);
    impl std::fmt::Display for Outer {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("the outer one")
        }
    }
    impl std::error::Error for Outer {
        fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
            Some(&self.0)
        }
    }
    struct Kinds(crossbeam_channel::Sender<RunOutcomeKind>);
    impl Probe for Kinds {
        fn scheduled_run(&self, _: &str, kind: RunOutcomeKind, _: Duration, took: Duration) {
            assert!(took >= ms(10));
            self.0.send(kind).unwrap();
        }
    }
    within(HANG, || {
        let (sender, probed) = unbounded();
        let factory = contend::memory::factory("outcomes", Lease::default());
        let factory = factory.with_probe(Arc::new(Kinds(sender)));
        let handle = contend::memory::handle("outcomes");
        let (tell, reports) = unbounded();
        let (begin, begun) = unbounded();
        let mut number = 0;
        let scheduler = factory
            .scheduler("m")
            .on_outcome(move |report| {
                let error = report.error.as_ref().map(|error| {
                    let source = error.source().map(ToString::to_string);
                    (error.to_string(), source)
                });
                tell.send((report.kind, error)).unwrap();
                panic!("a hook that panics is called again");
            })
            .build(Schedule::every(ms(5)), move |context: &Context| {
                thread::sleep(ms(10));
                number += 1;
                match number {
                    1 => Ok(()),
                    2 => Err(Outer(std::io::Error::other("the inner one"))),
                    3 => panic!("on purpose"),
                    _ => {
                        begin.send(()).unwrap();
                        // The channel alone tells.
                        let _ = context.cancelled().recv();
                        assert!(context.is_cancelled());
                        Ok(())
                    }
                }
            })
            .unwrap();
        scheduler.start().unwrap();
        let next = || reports.recv_timeout(PATIENCE).unwrap();
        assert_eq!(next(), (RunOutcomeKind::Ok, None));
        let (kind, error) = next();
        assert_eq!(kind, RunOutcomeKind::Failed);
        let inner = Some("the inner one".to_owned());
        assert_eq!(error, Some(("the outer one".to_owned(), inner)));
        let (kind, error) = next();
        assert_eq!(kind, RunOutcomeKind::Panicked);
        assert_eq!(error, Some(("on purpose".to_owned(), None)));
        begun.recv_timeout(PATIENCE).unwrap();
        assert!(handle.revoke("m"));
        assert_eq!(next(), (RunOutcomeKind::Lost, None));
        begun.recv_timeout(PATIENCE).unwrap();
        scheduler.stop().unwrap();
        assert_eq!(next(), (RunOutcomeKind::Cancelled, None));
        assert!(reports.is_empty());
        let kinds: Vec<RunOutcomeKind> = probed.try_iter().collect();
        assert_eq!(
            kinds,
            [
                RunOutcomeKind::Ok,
                RunOutcomeKind::Failed,
                RunOutcomeKind::Panicked,
                RunOutcomeKind::Lost,
                RunOutcomeKind::Cancelled,
            ]
        );
    });
}

#[test]
fn requested_run_changes_no_other() {
    within(HANG, || {
        let memory = contend::memory::factory("asked", Lease::default());
        let (factory, calls) = hooked::counting(&memory);
        let (sender, runs) = unbounded();
        let scheduler = factory
            .scheduler("m")
            .build(HOURLY.clone(), move |context| {
                sender.send((context.due(), context.late()))
            })
            .unwrap();
        assert!(!scheduler.run_now() && scheduler.next_run().is_none());
        scheduler.start().unwrap();
        let (due, late) = runs.recv_timeout(PATIENCE).unwrap();
        let due = due.unwrap();
        let off = due.elapsed().unwrap_or_else(|before| before.duration());
        assert!(off < PATIENCE && late < PATIENCE);
        wait_until(PATIENCE, "the next one is known", || {
            scheduler
                .next_run()
                .is_some_and(|next| next > due + ms(3_599_000))
        });
        let next = scheduler.next_run();
        for _ in 0..3 {
            assert!(scheduler.run_now());
            assert_eq!(runs.recv_timeout(PATIENCE).unwrap(), (None, ms(0)));
        }
        // Once for any number of requests that it has not answered yet.
        let next = next.unwrap();
        let moved = scheduler.next_run().unwrap();
        let moved = moved.duration_since(next).unwrap_or_else(|e| e.duration());
        assert!(moved < ms(500), "by {moved:?}");
        scheduler.stop().unwrap();
        let records = calls
            .lock()
            .iter()
            .filter(|call| **call == Call::RecordRun)
            .count();
        assert_eq!(records, 1);
    });
}

/// A backend that panicked left a scheduler running that ran nothing.
#[test]
fn backend_panic_costs_one_leadership() {
    within(HANG, || {
        let lease = Lease::new(ms(600), ms(300)).unwrap();
        let memory = contend::memory::factory("panics", lease);
        let once = AtomicBool::new(true);
        let factory = hooked::around(&memory, move |when, call, _, _| {
            if (when, call) == (When::Before, Call::Renew) && once.swap(false, Ordering::SeqCst) {
                panic!("on purpose");
            }
            Ok(())
        });
        let (sender, runs) = unbounded();
        let scheduler = factory
            .scheduler("m")
            .start(Schedule::every(ms(20)), move |context| {
                sender.send(context.fence())
            })
            .unwrap();
        let first = runs.recv_timeout(PATIENCE).unwrap();
        wait_until(PATIENCE, "it works in another leadership", || {
            runs.try_iter().any(|fence| fence > first)
        });
        scheduler.stop().unwrap();
    });
}

fn start(
    factory: &Factory,
    schedule: Schedule,
    work: impl FnMut(&Context) + Send + 'static,
) -> Scheduler {
    factory.scheduler("m").start(schedule, work).unwrap()
}
