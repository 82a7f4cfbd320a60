//! Facts about schedulers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use contend::{Context, ErrorKind, Factory, ScheduleConfig, Scheduler, Status};
use crossbeam_channel::{Receiver, unbounded};
use ground::wait_until;

use super::{Faulty, PATIENCE, Subject, name};

pub fn scheduled_work_runs_on_one_leader_and_fails_over(subject: &Subject) {
    let mutex = name("fail-over");
    let inside = Arc::new(AtomicI64::new(0));
    let schedulers: Vec<(Scheduler, Receiver<u64>, Arc<AtomicBool>)> = (0..3)
        .map(|_| {
            let (sender, runs) = unbounded();
            let inside = Arc::clone(&inside);
            let works = Arc::new(AtomicBool::new(false));
            let working = Arc::clone(&works);
            let scheduler = often(&subject.factory(), &mutex, move |context| {
                assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                working.store(true, Ordering::SeqCst);
                thread::sleep(Duration::from_millis(3));
                working.store(false, Ordering::SeqCst);
                inside.fetch_sub(1, Ordering::SeqCst);
                sender.send(context.fence()).unwrap();
            });
            scheduler.start().unwrap();
            (scheduler, runs, works)
        })
        .collect();
    let mut last = 0;
    let mut left: Vec<_> = schedulers.iter().collect();
    while !left.is_empty() {
        wait_until(PATIENCE, "somebody works", || {
            left.iter().any(|(_, runs, _)| !runs.is_empty())
        });
        let leader = left
            .iter()
            .position(|(_, runs, _)| !runs.is_empty())
            .unwrap();
        let (scheduler, runs, works) = left.remove(leader);
        let fence = runs.recv().unwrap();
        assert!(fence > last);
        last = fence;
        for _ in 0..3 {
            assert_eq!(runs.recv_timeout(PATIENCE).unwrap(), fence);
        }
        assert!(left.iter().all(|(_, runs, _)| runs.is_empty()));
        assert_eq!(scheduler.fence(), Some(fence));
        scheduler.stop().unwrap();
        assert!(!scheduler.is_leader());
        let after = runs.len();
        assert!(!works.load(Ordering::SeqCst), "stop waited for it");
        thread::sleep(Duration::from_millis(30));
        assert_eq!(runs.len(), after, "nothing runs after stop");
    }
}

/// The next leader would work beside it, were leadership given back before the work has ended.
pub fn stop_keeps_leading_until_running_work_has_ended(subject: &Subject) {
    let mutex = name("stop-waits");
    let lease = subject.factory().lease();
    let inside = Arc::new(AtomicI64::new(0));
    let (sender, begun) = unbounded();
    let long = {
        let inside = Arc::clone(&inside);
        often(&subject.factory(), &mutex, move |context| {
            inside.fetch_add(1, Ordering::SeqCst);
            sender.send(()).unwrap();
            wait_until(PATIENCE, "it is told to stop", || context.cancelled());
            // It takes longer than a lease to stop, and leads on meanwhile.
            let until = Instant::now() + lease.total() + lease.ttl();
            while Instant::now() < until {
                assert!(context.is_leader());
                thread::sleep(Duration::from_millis(10));
            }
            inside.fetch_sub(1, Ordering::SeqCst);
        })
    };
    long.start().unwrap();
    begun.recv_timeout(PATIENCE).unwrap();
    let (sender, runs) = unbounded();
    let other = {
        let inside = Arc::clone(&inside);
        often(&subject.factory(), &mutex, move |_| {
            sender.send(inside.load(Ordering::SeqCst)).unwrap();
        })
    };
    other.start().unwrap();
    long.stop().unwrap();
    assert_eq!(inside.load(Ordering::SeqCst), 0);
    assert_eq!(runs.recv_timeout(PATIENCE).unwrap(), 0);
}

pub fn a_restarted_scheduler_works_again(subject: &Subject) {
    let mutex = name("again");
    let (sender, runs) = unbounded();
    let scheduler = often(&subject.factory(), &mutex, move |context| {
        sender.send(context.fence()).unwrap();
    });
    let mut last = 0;
    for _ in 0..3 {
        assert_eq!(scheduler.status(), Status::Initial);
        scheduler.start().unwrap();
        let error = scheduler.start().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidState);
        let fence = runs.recv_timeout(PATIENCE).unwrap();
        assert!(fence > last);
        last = fence;
        scheduler.stop().unwrap();
        scheduler.stop().unwrap();
        while runs.try_recv().is_ok() {}
    }
}

pub fn work_that_fails_or_panics_runs_again(subject: &Subject) {
    let mutex = name("fails");
    let runs = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&runs);
    let config = ScheduleConfig::delay(Duration::ZERO, Duration::from_millis(5));
    let scheduler = subject.factory().scheduler(&mutex);
    let scheduler = scheduler
        .build(config, move |_| {
            match counted.fetch_add(1, Ordering::SeqCst) % 3 {
                0 => Err("on purpose".into()),
                1 => std::panic::resume_unwind(Box::new("on purpose")),
                _ => Ok(()),
            }
        })
        .unwrap();
    scheduler.start().unwrap();
    wait_until(PATIENCE, "seven runs", || runs.load(Ordering::SeqCst) >= 7);
    scheduler.stop().unwrap();
}

/// Rule 2, for work: it is told at the end of the ttl, and begins no more until it leads again.
pub fn work_is_cancelled_when_leadership_is_lost(subject: &Subject) {
    let mutex = name("cancelled");
    let (factory, broken) = Faulty::around(&subject.factory());
    let (sender, begun) = unbounded();
    let (told, cancelled) = unbounded();
    let long = Arc::new(AtomicBool::new(true));
    let runs = Arc::new(AtomicU64::new(0));
    let scheduler = {
        let (long, runs) = (Arc::clone(&long), Arc::clone(&runs));
        often(&factory, &mutex, move |context| {
            runs.fetch_add(1, Ordering::SeqCst);
            if long.swap(false, Ordering::SeqCst) {
                sender.send(context.fence()).unwrap();
                wait_until(PATIENCE, "it is cancelled", || context.cancelled());
                told.send(context.is_leader()).unwrap();
            }
        })
    };
    scheduler.start().unwrap();
    let fence = begun.recv_timeout(PATIENCE).unwrap();
    broken.store(true, Ordering::SeqCst);
    let began = Instant::now();
    assert!(!cancelled.recv_timeout(PATIENCE).unwrap());
    assert!(!scheduler.is_leader());
    // Told in time: the backend keeps the lease through the transition, and nobody else leads yet.
    println!(
        "{mutex}: cancelled {:?} after the last renewal could be made",
        began.elapsed()
    );
    let before = runs.load(Ordering::SeqCst);
    thread::sleep(Duration::from_millis(100));
    assert_eq!(
        runs.load(Ordering::SeqCst),
        before,
        "nobody leads, nothing runs"
    );

    broken.store(false, Ordering::SeqCst);
    wait_until(PATIENCE, "it leads and works again", || {
        runs.load(Ordering::SeqCst) > before && scheduler.fence() > Some(fence)
    });
    scheduler.stop().unwrap();
}

fn often(
    factory: &Factory,
    mutex: &str,
    mut work: impl FnMut(&Context) + Send + 'static,
) -> Scheduler {
    let config = ScheduleConfig::rate(Duration::ZERO, Duration::from_millis(5));
    let scheduler = factory.scheduler(mutex);
    scheduler
        .build(config, move |context| {
            work(context);
            Ok(())
        })
        .unwrap()
}
