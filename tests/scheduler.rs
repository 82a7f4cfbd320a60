//! What a scheduler does with work that is slow, stuck or calls back.

#[path = "conformance/hooked.rs"]
mod hooked;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use contend::backend::Entry;
use contend::{Error, ErrorKind, Lease, ScheduleConfig, Scheduler, Status};
use crossbeam_channel::{bounded, unbounded};
use ground::{wait_until, within};
use hooked::{Call, When};
use parking_lot::Mutex;

/// When a hung test is ended.
const HANG: Duration = Duration::from_secs(120);

/// How long a condition may take to come true on a busy machine.
const PATIENCE: Duration = Duration::from_secs(40);

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// A bound makes stop return; the lease is not released while the work runs, nor renewed.
#[test]
fn stop_gives_up_on_stuck_work_and_leaves_the_lease_to_run_out() {
    within(HANG, || {
        let lease = Lease::new(ms(1_000), ms(1_000)).unwrap();
        let memory = contend::memory::factory("stuck-work", lease);
        let (factory, calls) = hooked::counting(&memory);
        let (sender, begun) = unbounded();
        let (let_go, held) = bounded::<()>(0);
        let scheduler = factory.scheduler("m").id("stuck").stop_within(ms(100));
        let scheduler = scheduler
            .build(ScheduleConfig::rate(ms(0), ms(5)), move |context| {
                sender.send(context.fence())?;
                let _ = held.recv();
                Ok(())
            })
            .unwrap();
        scheduler.start().unwrap();
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

        // Somebody else leads when the lease has run out: nobody released it.
        let next = memory.locker("m").ttl(ms(20_000)).build().unwrap();
        let next = next.try_lock_for(PATIENCE).unwrap();
        assert!(next.fence() > fence);
        assert!(!calls.lock().contains(&Call::Release));

        drop(let_go);
        wait_until(PATIENCE, "its threads have ended", || {
            scheduler.status() == Status::Initial
        });
        // What is released now, if anything, is a lease that is gone: it touches nobody else's.
        assert!(next.is_valid() && next.unlock().unwrap());
        scheduler.start().unwrap();
        assert!(begun.recv_timeout(PATIENCE).unwrap() > fence);
        scheduler.stop().unwrap();
    });
}

/// Stuck work that ends in time lets the next leader in at once.
#[test]
fn work_that_ends_after_stop_gave_up_still_releases() {
    within(HANG, || {
        let lease = Lease::new(ms(20_000), ms(20_000)).unwrap();
        let factory = contend::memory::factory("late-end", lease);
        let (sender, begun) = unbounded();
        let (let_go, held) = bounded::<()>(0);
        let scheduler = factory.scheduler("m").stop_within(ms(50));
        let scheduler = scheduler
            .build(ScheduleConfig::rate(ms(0), ms(5)), move |_| {
                sender.send(())?;
                let _ = held.recv();
                Ok(())
            })
            .unwrap();
        scheduler.start().unwrap();
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
fn a_stop_after_a_loss_releases_nothing_under_running_work() {
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
        let (sender, begun) = unbounded();
        let (let_go, held) = bounded::<()>(0);
        let scheduler = factory.scheduler("m").stop_within(ms(300));
        let scheduler = scheduler
            .build(ScheduleConfig::rate(ms(0), ms(5)), move |_| {
                sender.send(())?;
                let _ = held.recv();
                Ok(())
            })
            .unwrap();
        scheduler.start().unwrap();
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
        drop(let_go);
        scheduler.stop().unwrap();
        assert_eq!(released.load(Ordering::SeqCst), 1);
        drop(memory.locker("m").build().unwrap().try_lock().unwrap());
    });
}

#[test]
fn stop_from_inside_the_work_returns_and_gives_leadership_back_after_it() {
    within(HANG, || {
        let factory = contend::memory::factory("inside", Lease::default());
        let slot: Arc<Mutex<Option<Arc<Scheduler>>>> = Arc::default();
        let own = Arc::clone(&slot);
        let (sender, stopped) = unbounded();
        let scheduler = factory
            .scheduler("m")
            .build(ScheduleConfig::delay(ms(0), ms(5)), move |context| {
                let scheduler = own.lock().take().ok_or("a second run")?;
                let stopped = scheduler.stop();
                sender.send((stopped.is_ok(), context.cancelled(), context.is_leader()))?;
                Ok(())
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
fn a_fixed_rate_does_not_pile_up_what_it_missed() {
    within(HANG, || {
        let factory = contend::memory::factory("pile", Lease::default());
        let (sender, begun) = unbounded();
        let (free_out, free) = bounded(1);
        let slow = AtomicBool::new(true);
        let scheduler = factory
            .scheduler("m")
            .build(ScheduleConfig::rate(ms(0), ms(100)), move |_| {
                sender.send(Instant::now())?;
                if slow.swap(false, Ordering::SeqCst) {
                    thread::sleep(ms(2_050));
                    free_out.send(Instant::now())?;
                }
                Ok(())
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
fn a_fixed_delay_rests_between_runs_and_an_initial_delay_comes_first() {
    within(HANG, || {
        let factory = contend::memory::factory("rest", Lease::default());
        let (sender, begun) = unbounded();
        let started = Instant::now();
        let scheduler = factory
            .scheduler("m")
            .build(ScheduleConfig::delay(ms(200), ms(100)), move |_| {
                sender.send(Instant::now())?;
                thread::sleep(ms(50));
                Ok(())
            })
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
            .build(ScheduleConfig::rate(ms(0), ms(3_600_000)), |_| Ok(()))
            .unwrap();
        scheduler_of_an_hour.start().unwrap();
        wait_until(PATIENCE, "it leads", || scheduler_of_an_hour.is_leader());
        scheduler_of_an_hour.stop().unwrap();
        scheduler.stop().unwrap();
    });
}

#[test]
fn dropping_a_scheduler_stops_it() {
    within(HANG, || {
        let factory = contend::memory::factory("drop", Lease::default());
        let runs = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&runs);
        let scheduler = factory
            .scheduler("m")
            .build(ScheduleConfig::rate(ms(0), ms(2)), move |_| {
                counted.fetch_add(1, Ordering::SeqCst);
                Ok(())
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
fn a_scheduler_that_waits_is_a_contender_in_the_queue() {
    within(HANG, || {
        let memory = contend::memory::factory("waits", Lease::default());
        let guard = memory.locker("m").build().unwrap();
        let guard = guard.lock().unwrap();
        let (factory, calls) = hooked::counting(&memory);
        let scheduler = factory
            .scheduler("m")
            .build(ScheduleConfig::rate(ms(0), ms(2)), |_| Ok(()))
            .unwrap();
        scheduler.start().unwrap();
        let queued = [Call::Listen, Call::Acquire(Entry::Queue)];
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
    for config in [
        ScheduleConfig::rate(ms(0), ms(0)),
        ScheduleConfig::delay(ms(1), ms(0)),
    ] {
        let refused = factory.scheduler("m").build(config, |_| Ok(()));
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::InvalidInput);
    }
    let hourly = ScheduleConfig::rate(ms(0), ms(3_600_000));
    let refused = factory.scheduler("{m}").build(hourly, |_| Ok(()));
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::InvalidInput);
}
