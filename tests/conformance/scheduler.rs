//! Facts about schedulers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use contend::{Context, Factory, Missed, RunOutcomeKind, Schedule, Scheduler};
use crossbeam_channel::{Receiver, unbounded};
use testbed::wait_until;

use super::hooked::failing;
use super::{PATIENCE, Subject, ms, name};

pub fn one_leader_works_and_fails_over(subject: &Subject) {
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
                // So that two that work at once meet.
                thread::sleep(ms(3));
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
        wait_until(PATIENCE, "one of them works", || {
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
        // Six periods.
        thread::sleep(ms(30));
        assert_eq!(runs.len(), after, "nothing runs after stop");
    }
}

/// The next leader would work beside it, were leadership given back before the work has ended.
pub fn stop_leads_until_work_has_ended(subject: &Subject) {
    let mutex = name("stop-waits");
    let lease = subject.factory().lease();
    let inside = Arc::new(AtomicI64::new(0));
    let (sender, begun) = unbounded();
    let long = {
        let inside = Arc::clone(&inside);
        often(&subject.factory(), &mutex, move |context| {
            inside.fetch_add(1, Ordering::SeqCst);
            sender.send(()).unwrap();
            wait_until(PATIENCE, "it is told to stop", || context.is_cancelled());
            // It takes longer than a lease to stop, and leads on meanwhile.
            let until = Instant::now() + lease.total() + lease.ttl();
            while Instant::now() < until {
                assert!(context.is_leader());
                thread::sleep(ms(10));
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

/// Rule 2, for work: it is told at the end of the ttl, and begins no more until it leads again.
pub fn lost_leadership_cancels_work(subject: &Subject) {
    let mutex = name("cancelled");
    let (factory, broken) = failing(&subject.factory());
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
                wait_until(PATIENCE, "it is cancelled", || context.is_cancelled());
                told.send(context.is_leader()).unwrap();
            }
        })
    };
    scheduler.start().unwrap();
    let fence = begun.recv_timeout(PATIENCE).unwrap();
    broken.on();
    let began = Instant::now();
    assert!(!cancelled.recv_timeout(PATIENCE).unwrap());
    assert!(!scheduler.is_leader());
    // Told in time: the backend keeps the lease through the transition, and no other scheduler leads yet.
    println!(
        "{mutex}: cancelled {:?} after the last renewal could be made",
        began.elapsed()
    );
    let before = runs.load(Ordering::SeqCst);
    // Twenty periods.
    thread::sleep(ms(100));
    assert_eq!(
        runs.load(Ordering::SeqCst),
        before,
        "nothing runs without a leader"
    );

    broken.off();
    wait_until(PATIENCE, "it leads and works again", || {
        runs.load(Ordering::SeqCst) > before && scheduler.fence() > Some(fence)
    });
    scheduler.stop().unwrap();
}

/// The schedule belongs to the mutex. Three processes, rolled over within a period.
pub fn new_leader_keeps_the_beat(subject: &Subject) {
    let mutex = name("goes-on");
    let period = Duration::from_secs(2);
    let (sender, runs) = unbounded();
    let last = Arc::new(AtomicU64::new(0));
    let mut deadline = None;
    while runs.len() < 4 {
        let (sender, last) = (sender.clone(), Arc::clone(&last));
        // A factory of its own each: a process that was started.
        let factory = subject.factory();
        let scheduler = factory
            .scheduler(&mutex)
            .start(Schedule::every(period), move |context| {
                assert!(last.swap(context.fence(), Ordering::SeqCst) <= context.fence());
                sender.send(Instant::now())
            })
            .unwrap();
        wait_until(PATIENCE, "it leads", || scheduler.is_leader());
        // The first leader may have waited for the servers to start.
        let deadline = *deadline.get_or_insert_with(|| Instant::now() + PATIENCE);
        assert!(Instant::now() < deadline, "only {} runs", runs.len());
        // Far less than a period: several processes lead in each.
        thread::sleep(ms(300));
        scheduler.stop().unwrap();
    }
    let runs: Vec<Instant> = runs.try_iter().collect();
    let gaps: Vec<Duration> = runs.windows(2).map(|pair| pair[1] - pair[0]).collect();
    println!("{mutex}: {} runs, {gaps:?} apart", runs.len());
    assert!(
        gaps.iter().all(|gap| *gap >= period - NEARLY),
        "{gaps:?} with a period of {period:?}"
    );
}

/// The same with a fixed delay: counted from the end of the last leader's run.
pub fn new_leader_rests_after_last_run(subject: &Subject) {
    let mutex = name("rests");
    let delay = ms(1_500);
    let (sender, ends) = unbounded();
    let first = subject.factory();
    let first = first
        .scheduler(&mutex)
        .start(Schedule::with_delay(delay), move |_| {
            // Counted from its begin, the delay would be over so much earlier.
            thread::sleep(ms(700));
            sender.send(Instant::now())
        })
        .unwrap();
    let ended = ends.recv_timeout(PATIENCE).unwrap();
    first.stop().unwrap();
    let (sender, begins) = unbounded();
    let second = subject.factory();
    let second = second
        .scheduler(&mutex)
        .start(Schedule::with_delay(delay), move |_| {
            sender.send(Instant::now())
        })
        .unwrap();
    let begun = begins.recv_timeout(PATIENCE).unwrap();
    assert!(begun - ended >= delay - NEARLY, "{:?}", begun - ended);
    second.stop().unwrap();
}

/// A run's leadership is its own: an earlier run neither sees the next one nor goes on in it, and what
/// begins in it has its fence.
pub fn lost_work_ends_with_its_leadership(subject: &Subject) {
    let mutex = name("later");
    let factory = subject.factory();
    let (sender, contexts) = unbounded();
    let (let_go, held) = crossbeam_channel::bounded::<()>(0);
    let (tell, outcomes) = unbounded();
    let scheduler = factory
        .scheduler(&mutex)
        .on_outcome(move |report| tell.send((report.fence, report.kind)).unwrap())
        .start(Schedule::every(ms(5)), move |context| {
            sender.send(context.clone()).unwrap();
            // Waits on both: the test, and being told.
            crossbeam_channel::select! {
                recv(held) -> _ => {}
                recv(context.cancelled()) -> _ => {}
            }
        })
        .unwrap();
    let first: Context = contexts.recv_timeout(PATIENCE).unwrap();
    assert!(first.is_leader() && !first.is_cancelled());
    assert!(first.deadline() > Instant::now());
    assert!(factory.revoke(&mutex, first.fence()).unwrap());
    // Told at once, or with its next renewal where an owner is not notified.
    let (fence, kind) = outcomes.recv_timeout(PATIENCE).unwrap();
    assert_eq!((fence, kind), (first.fence(), RunOutcomeKind::Lost));
    let second: Context = contexts.recv_timeout(PATIENCE).unwrap();
    assert!(second.fence() > first.fence());
    assert!(second.is_leader() && !second.is_cancelled());
    assert!(!first.is_leader() && first.is_cancelled());
    assert!(first.deadline() <= Instant::now());
    drop(let_go);
    scheduler.stop().unwrap();
}

/// What [`Missed::Skip`] leaves out, a new leader leaves out too.
pub fn new_leader_skips_what_was_missed(subject: &Subject) {
    let mutex = name("skips");
    let period = Duration::from_secs(3);
    let schedule = Schedule::every(period).missed(Missed::Skip);
    let start = || {
        let (sender, runs) = unbounded();
        let scheduler = subject
            .factory()
            .scheduler(&mutex)
            .start(schedule.clone(), move |_| sender.send(Instant::now()))
            .unwrap();
        (scheduler, runs)
    };
    let (first, runs) = start();
    let begun = runs.recv_timeout(PATIENCE).unwrap();
    first.stop().unwrap();
    // Half a period too late: more than the second that is forgiven.
    thread::sleep((begun + period + period / 2).saturating_duration_since(Instant::now()));
    let (second, runs) = start();
    let again = runs.recv_timeout(PATIENCE).unwrap();
    assert!(again - begun >= period * 2 - NEARLY, "{:?}", again - begun);
    second.stop().unwrap();
}

/// How much closer than the period two runs may come. The time of a run is taken in its work, which a busy
/// machine begins late: by 122 ms with 28 threads for two processors.
const NEARLY: Duration = ms(400);

fn often(
    factory: &Factory,
    mutex: &str,
    mut work: impl FnMut(&Context) + Send + 'static,
) -> Scheduler {
    let scheduler = factory.scheduler(mutex);
    scheduler
        .build(Schedule::every(ms(5)), move |context| work(context))
        .unwrap()
}
