//! Facts about lockers and their guards.

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use contend::backend::OnRefusal;
use contend::crossbeam_channel::TryRecvError;
use contend::{Cancel, ErrorKind, EventKind, Locker};
use parking_lot::Mutex;
use testbed::wait_until;

use super::hooked::{self, Call, When, failing};
use super::{PATIENCE, Subject, closed, elsewhere, ms, name, next, started};

pub fn lock_excludes_until_unlocked(subject: &Subject) {
    let mutex = name("lock");
    let (ours, theirs) = two(subject, &mutex);
    let guard = ours.lock().unwrap();
    assert!(guard.is_valid() && guard.fence() > 0);
    assert!(guard.valid_for() > Duration::ZERO);
    let error = elsewhere(|| theirs.try_lock().map(drop)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Held);
    assert_eq!(error.to_string(), format!("{mutex}: held by \"ours\""));

    let (fence, lost) = (guard.fence(), guard.lost());
    guard.unlock().expect("it was ours to the end");
    assert!(lost.recv().is_err(), "the guard is over");
    let guard = theirs.try_lock().unwrap();
    assert!(guard.fence() > fence);
    drop(guard);
    drop(ours.try_lock().unwrap());
}

pub fn unlock_wakes_the_waiter(subject: &Subject) {
    let mutex = name("hand-over");
    let (ours, theirs) = two(subject, &mutex);
    for _ in 0..3 {
        let guard = ours.lock().unwrap();
        let waiting = Waiting::start(&theirs);
        // Longer than a free mutex would have taken.
        thread::sleep(ms(100));
        assert!(!waiting.is_over());
        let unlocked = Instant::now();
        guard.unlock().unwrap();
        waiting.end();
        // Less than the lease, which ends by itself: the unlock woke it, or the poll did.
        let took = unlocked.elapsed();
        assert!(took < subject.factory().lease().ttl(), "{took:?}");
    }
}

pub fn lockers_lock_in_order(subject: &Subject) {
    if !subject.ordered {
        return;
    }
    let mutex = name("order");
    // By id: a locker that stands in the queue already may try again meanwhile.
    let queued = Arc::new(Mutex::new(HashSet::new()));
    let seen = Arc::clone(&queued);
    let factory = hooked::around(&subject.factory(), move |when, call, contender, _| {
        if (when, call) == (When::After, Call::Acquire(OnRefusal::Enqueue)) {
            seen.lock().insert(contender.id.to_string());
        }
        Ok(())
    });
    let order = Arc::new(Mutex::new(Vec::new()));
    let first = factory.locker(&mutex).build().unwrap();
    let guard = first.lock().unwrap();
    let threads: Vec<_> = (0..4)
        .map(|number| {
            let locker = factory.locker(&mutex).build().unwrap();
            let (id, order) = (locker.id().to_owned(), Arc::clone(&order));
            let thread = thread::spawn(move || {
                let guard = locker.lock().unwrap();
                order.lock().push(number);
                drop(guard);
            });
            wait_until(PATIENCE, "it stands in the queue", || {
                let queue = factory.participants(&mutex);
                queued.lock().contains(&id) && queue.is_ok_and(|queue| queue.len() > number)
            });
            thread
        })
        .collect();
    drop(guard);
    threads
        .into_iter()
        .for_each(|thread| thread.join().unwrap());
    assert_eq!(*order.lock(), [0, 1, 2, 3]);
}

/// Threads that share a locker, lockers that share a factory, and factories: one at a time.
pub fn lockers_exclude_each_other(subject: &Subject) {
    const TURNS: u64 = 15;
    let mutex = name("exclude");
    let lockers: Vec<Locker> = (0..2)
        .map(|_| subject.factory())
        .flat_map(|factory| {
            let locker = || factory.locker(&mutex).build().unwrap();
            [locker(), locker()]
        })
        .collect();
    let (inside, counter) = (AtomicI64::new(0), AtomicU64::new(0));
    let last_fence = AtomicU64::new(0);
    thread::scope(|scope| {
        for locker in lockers.iter().chain(&lockers) {
            scope.spawn(|| {
                for _ in 0..TURNS {
                    locker
                        .with_lock(|guard| {
                            let fence = guard.fence();
                            assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                            assert!(last_fence.swap(fence, Ordering::SeqCst) < fence);
                            let seen = counter.load(Ordering::SeqCst);
                            thread::yield_now();
                            counter.store(seen + 1, Ordering::SeqCst);
                            inside.fetch_sub(1, Ordering::SeqCst);
                        })
                        .unwrap();
                }
            });
        }
    });
    assert_eq!(counter.into_inner(), 8 * TURNS);
}

/// The free mutex would be kept for who left a queue entry.
pub fn timed_out_lock_leaves_no_trace(subject: &Subject) {
    let mutex = name("timeout");
    let (ours, theirs) = two(subject, &mutex);
    let third = subject.factory().locker(&mutex).build().unwrap();
    let guard = ours.lock().unwrap();
    let began = Instant::now();
    // Time enough for a slow server to say who holds it.
    let error = elsewhere(|| {
        let timeout = ms(1_500);
        theirs.try_lock_for(timeout).map(drop).unwrap_err()
    });
    assert!(began.elapsed() >= ms(1_500));
    assert_eq!(error.kind(), ErrorKind::Held);
    assert_eq!(
        error.to_string(),
        format!("{mutex}: held by \"ours\", and was not free within 1.5s")
    );
    let observer = subject.factory();
    wait_until(PATIENCE, "the queue is empty", || {
        observer.participants(&mutex).unwrap().is_empty()
    });
    guard.unlock().unwrap();
    third.try_lock().unwrap().unlock().unwrap();
    // And it can wait again.
    drop(theirs.try_lock_for(PATIENCE).unwrap());
}

pub fn guard_is_renewed(subject: &Subject) {
    let mutex = name("renewed");
    let (ours, theirs) = two(subject, &mutex);
    let guard = ours.lock().unwrap();
    let lost = guard.lost();
    let until = Instant::now() + subject.factory().lease().ttl() * 3;
    while Instant::now() < until {
        assert!(guard.is_valid() && guard.valid_for() > Duration::ZERO);
        thread::sleep(ms(20));
    }
    let error = elsewhere(|| theirs.try_lock().map(drop)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Held);
    assert_eq!(lost.try_recv(), Err(TryRecvError::Empty));
    guard.unlock().unwrap();
}

/// The transition is left to stop in.
pub fn unrenewed_guard_is_lost(subject: &Subject) {
    let mutex = name("lost");
    let (factory, broken) = failing(&subject.factory());
    let ours = factory.locker(&mutex).id("ours").build().unwrap();
    let theirs = subject
        .factory()
        .locker(&mutex)
        .id("theirs")
        .build()
        .unwrap();
    let guard = ours.lock().unwrap();
    let (lost, lost_too) = (guard.lost(), guard.lost());
    broken.on();
    let left = guard.valid_for();
    let began = Instant::now();
    closed(&lost);
    let took = began.elapsed();
    assert!(!guard.is_valid() && guard.valid_for().is_zero());
    assert!(took + ms(50) >= left, "{took:?} of {left:?}");
    closed(&lost_too);
    closed(&guard.lost());
    // The lease was not ended: the backend keeps it through the transition. This is the time to stop in.
    let theirs_now = elsewhere(|| theirs.try_lock().map(drop));
    if began.elapsed() < left + factory.lease().transition() / 2 {
        assert_eq!(theirs_now.unwrap_err().kind(), ErrorKind::Held);
    }
    assert_eq!(guard.unlock().unwrap_err().kind(), ErrorKind::Lost);
    broken.off();
    drop(theirs.try_lock_for(PATIENCE).unwrap());
    drop(ours.try_lock_for(PATIENCE).unwrap());
}

pub fn max_hold_ends_a_guard(subject: &Subject) {
    let mutex = name("max-hold");
    let ours = subject.factory().locker(&mutex);
    let max_hold = ms(700);
    let ours = ours.max_hold(max_hold).build().unwrap();
    let theirs = subject.factory().locker(&mutex).build().unwrap();
    let began = Instant::now();
    let guard = ours.lock().unwrap();
    closed(&guard.lost());
    assert!(began.elapsed() >= max_hold && !guard.is_valid());
    // It is stuck, and the world goes on.
    let next = elsewhere(|| theirs.try_lock_for(PATIENCE).unwrap());
    assert!(next.fence() > guard.fence());
    // It never says that it was ours: it is another's.
    assert_eq!(guard.unlock().unwrap_err().kind(), ErrorKind::Lost);
    assert!(next.is_valid());
    next.unlock().unwrap();
}

pub fn panic_releases_the_lock(subject: &Subject) {
    let mutex = name("panic");
    let (ours, theirs) = two(subject, &mutex);
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        ours.with_lock(|_| std::panic::resume_unwind(Box::new("on purpose")))
    }));
    assert!(panicked.is_err());
    assert_eq!(theirs.try_lock_for(PATIENCE).map(drop).ok(), Some(()));
    assert_eq!(ours.with_lock(|_| 7).unwrap(), 7);
}

pub fn reentry_is_an_error(subject: &Subject) {
    let mutex = name("re-entry");
    let factory = subject.factory();
    let locker = factory.locker(&mutex).build().unwrap();
    let guard = locker.lock().unwrap();
    for again in [
        locker.lock(),
        locker.try_lock(),
        locker.try_lock_for(PATIENCE),
    ] {
        let error = again.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Reentrant);
        assert!(error.to_string().contains(&mutex), "{error}");
    }
    // Also through another locker.
    let other = factory.locker(&mutex).build().unwrap();
    assert_eq!(other.lock().unwrap_err().kind(), ErrorKind::Reentrant);
    assert!(guard.is_valid());
    guard.unlock().unwrap();
    drop(other.lock().unwrap());
    drop(locker.try_lock().unwrap());
}

/// All or none, in sorted order, each once, with a fence for each.
pub fn lock_all_is_all_or_none(subject: &Subject) {
    let names = [name("all-b"), name("all-a"), name("all-c")];
    let factory = subject.factory();
    let all = || factory.lock_all(names.iter().chain(&names[..1]));
    let guard = all().lock().unwrap();
    let mut sorted: Vec<&str> = names.iter().map(String::as_str).collect();
    sorted.sort_unstable();
    let fences = guard.fences();
    assert_eq!(fences.iter().map(|it| it.0).collect::<Vec<_>>(), sorted);
    assert!(guard.is_valid() && fences.iter().all(|it| guard.fence(it.0) == Some(it.1)));
    let error = elsewhere(|| all().try_lock().map(drop)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Held);
    guard.unlock().unwrap();

    // One of them is held: none of the others stays locked.
    let last = sorted.last().unwrap();
    let held = factory.locker(last).build().unwrap();
    let held = elsewhere(|| held.lock().unwrap());
    let timeout = ms(1_000);
    let error = all().try_lock_for(timeout).map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Held);
    for mutex in &sorted[..2] {
        let locker = factory.locker(mutex).build().unwrap();
        drop(locker.try_lock_for(PATIENCE).unwrap());
    }
    drop(held);
    all().try_lock_for(PATIENCE).unwrap().unlock().unwrap();
}

/// A blocked `lock()` ends when it is cancelled, leaves nothing and keeps nothing.
pub fn cancel_ends_wait(subject: &Subject) {
    let mutex = name("cancel");
    let (ours, theirs) = two(subject, &mutex);
    let guard = ours.lock().unwrap();
    let cancel = Cancel::new();
    let waits = thread::spawn({
        let (theirs, cancel) = (theirs.clone(), cancel.clone());
        move || theirs.lock_until_cancelled(&cancel).map(drop)
    });
    wait_until(PATIENCE, "it waits", || {
        waits.is_finished() || theirs_waits(subject, &mutex)
    });
    cancel.cancel();
    let error = waits.join().unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Cancelled);
    guard.unlock().unwrap();
    // The free mutex would be kept for who left a queue entry.
    let third = subject.factory().locker(&mutex).build().unwrap();
    drop(third.try_lock_for(PATIENCE).unwrap());
    drop(theirs.try_lock_for(PATIENCE).unwrap());
}

fn theirs_waits(subject: &Subject, mutex: &str) -> bool {
    if !subject.ordered {
        // A locker that polls leaves no trace that could be seen.
        thread::sleep(ms(300));
        return true;
    }
    let participants = subject.factory().participants(mutex);
    participants.is_ok_and(|waiting| !waiting.is_empty())
}

pub fn other_thread_drops_a_guard(subject: &Subject) {
    let mutex = name("sent");
    let (ours, theirs) = two(subject, &mutex);
    let guard = ours.lock().unwrap();
    let unlocked = thread::spawn(move || guard.unlock()).join();
    unlocked.unwrap().unwrap();
    drop(theirs.try_lock_for(PATIENCE).unwrap());
    drop(ours.try_lock_for(PATIENCE).unwrap());
}

pub fn locker_and_service_take_turns(subject: &Subject) {
    let mutex = name("turns");
    let factory = subject.factory();
    let (service, events) = started(&factory, &mutex, "service");
    let led = next(&events, EventKind::Acquired).fence();
    let locker = subject.factory().locker(&mutex).build().unwrap();
    let error = locker.try_lock().unwrap_err();
    assert_eq!(error.to_string(), format!("{mutex}: held by \"service\""));
    let waiting = Waiting::start(&locker);
    service.stop().unwrap();
    let fence = waiting.end();
    assert!(Some(fence) > led);
    let guard = locker.lock().unwrap();
    service.start().unwrap();
    super::wait_for_owner(&service, locker.id());
    drop(guard);
    let leads = events
        .iter()
        .find(|event| event.kind == EventKind::Acquired);
    assert!(leads.unwrap().fence() > Some(fence));
}

pub fn fronts_share_ids(subject: &Subject) {
    let mutex = name("one-id");
    let factory = subject.factory();
    let service = factory.contend(&mutex).id("a").build().unwrap();
    for error in [
        factory.locker(&mutex).id("a").build().unwrap_err(),
        factory.contend(&mutex).id("a").build().unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::DuplicateContender);
    }
    assert!(factory.contend(&mutex).id("b").build().is_ok());
    drop(service);
    let locker = factory.locker(&mutex).id("a").build().unwrap();
    let guard = locker.lock().unwrap();
    drop(locker);
    let error = factory
        .contend(&mutex)
        .id("a")
        .build()
        .map(drop)
        .unwrap_err();
    assert_eq!(
        error.kind(),
        ErrorKind::DuplicateContender,
        "its guard lives"
    );
    drop(guard);
    drop(factory.contend(&mutex).id("a").build().unwrap());
}

fn two(subject: &Subject, mutex: &str) -> (Locker, Locker) {
    let locker = |id| subject.factory().locker(mutex).id(id).build().unwrap();
    (locker("ours"), locker("theirs"))
}

/// A thread that waits for a lock and gives it back at once.
struct Waiting {
    thread: thread::JoinHandle<u64>,
}

impl Waiting {
    fn start(locker: &Locker) -> Waiting {
        let locker = locker.clone();
        let thread = thread::spawn(move || locker.with_lock(|guard| guard.fence()).unwrap());
        Waiting { thread }
    }

    fn is_over(&self) -> bool {
        self.thread.is_finished()
    }

    fn end(self) -> u64 {
        wait_until(PATIENCE, "the waiting locker locked", || self.is_over());
        self.thread.join().unwrap()
    }
}
