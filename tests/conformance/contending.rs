//! Facts about owning, waiting and handing over.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use contend::{ErrorKind, Event, EventKind, Events, MutexContendService, Status};
use parking_lot::Mutex;
use testbed::wait_until;

use super::hooked::failing;
use super::{PATIENCE, Subject, ms, name, next, opposite, started, wait_for_owner};

pub fn started_service_owns(subject: &Subject) {
    let mutex = name("start");
    let (service, events) = subject.factory().contend(&mutex).id("a").channel().unwrap();
    assert_eq!(service.status(), Status::Initial);
    assert!(!service.is_owner() && service.fence().is_none() && !service.is_active());

    service.start().unwrap();
    let error = service.start().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidState);
    let acquired = next(&events, EventKind::Acquired);
    assert!(service.is_owner() && service.is_in_ttl() && service.running());
    assert!(acquired.state.is_acquired("a"));
    assert!(acquired.fence().is_some_and(|fence| fence > 0));
    assert_eq!(service.fence(), acquired.fence());
    assert!(service.state().is_owner("a"));
    assert!(service.last_error().is_none());

    service.stop().unwrap();
    assert!(!service.is_owner() && !service.is_in_ttl() && service.fence().is_none());
    assert_eq!(service.status(), Status::Initial);
    let released = next(&events, EventKind::Released);
    assert!(released.state.is_released("a"));
    assert_eq!(released.fence(), acquired.fence());
    service.stop().unwrap();
}

pub fn restarted_service_has_larger_fence(subject: &Subject) {
    let mutex = name("restart");
    let mut last = 0;
    for round in 0..3 {
        // A new factory each round: a process that starts again.
        let (service, events) = subject.factory().contend(&mutex).id("a").channel().unwrap();
        for _ in 0..3 {
            service.start().unwrap();
            let fence = next(&events, EventKind::Acquired).fence().unwrap();
            assert!(fence > last, "round {round}: {fence} after {last}");
            last = fence;
            service.stop().unwrap();
            next(&events, EventKind::Released);
        }
    }
}

pub fn owner_renews(subject: &Subject) {
    let factory = subject.factory();
    let mutex = name("renew");
    let (owner, events) = started(&factory, &mutex, "owner");
    let fence = next(&events, EventKind::Acquired).fence();
    let (waiter, waiting) = started(&subject.factory(), &mutex, "waiter");
    let until = Instant::now() + factory.lease().ttl() * 3;
    while Instant::now() < until {
        assert!(
            owner.is_owner() && owner.is_in_ttl(),
            "{:?}",
            owner.last_error()
        );
        assert_eq!(
            owner.fence(),
            fence,
            "a fence is fixed during one ownership"
        );
        assert!(!waiter.is_owner());
        std::thread::sleep(ms(20));
    }
    only_changes(&events);
    only_changes(&waiting);
}

/// No event is left that says that it owns, or no longer does.
fn only_changes(events: &Events) {
    let is_change = |event: Event| event.kind == EventKind::OwnerChanged;
    assert!(events.try_iter().all(is_change));
}

/// Callbacks count the owners: Released has run before the release is sent, so the count is exact.
pub fn ten_contenders_have_one_owner(subject: &Subject) {
    const TURNS: usize = 30;
    let mutex = name("ten");
    let factories = [subject.factory(), subject.factory()];
    let owners = Arc::new(AtomicI64::new(0));
    let most = Arc::new(AtomicI64::new(0));
    let turns = Arc::new(AtomicUsize::new(0));
    let services: Vec<Arc<MutexContendService>> = (0..10)
        .map(|number| {
            let (up, down) = (Arc::clone(&owners), Arc::clone(&owners));
            let (most, turns) = (Arc::clone(&most), Arc::clone(&turns));
            let service = factories[number % 2]
                .contend(&mutex)
                .id(format!("contender-{number}"))
                .on_acquired(move |_| {
                    most.fetch_max(up.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    turns.fetch_add(1, Ordering::SeqCst);
                })
                .on_released(move |_| {
                    down.fetch_sub(1, Ordering::SeqCst);
                })
                .build()
                .unwrap();
            service.start().unwrap();
            Arc::new(service)
        })
        .collect();
    let deadline = Instant::now() + PATIENCE;
    while turns.load(Ordering::SeqCst) < TURNS {
        assert!(Instant::now() < deadline, "only {turns:?} turns");
        match services.iter().find(|service| service.is_owner()) {
            Some(owner) => {
                owner.stop().unwrap();
                owner.start().unwrap();
            }
            None => std::thread::sleep(ms(1)),
        }
    }
    for service in &services {
        service.stop().unwrap();
    }
    assert_eq!(most.load(Ordering::SeqCst), 1, "owners at once");
    assert_eq!(owners.load(Ordering::SeqCst), 0, "owners after the end");
}

pub fn waiters_own_in_order(subject: &Subject) {
    if !subject.ordered {
        return;
    }
    let mutex = name("order");
    let factories = [subject.factory(), subject.factory()];
    let (first, events) = started(&factories[0], &mutex, "first");
    next(&events, EventKind::Acquired);
    let waiters: Vec<_> = (0..5)
        .map(|number| {
            let waiter = started(&factories[number % 2], &mutex, &format!("waiter-{number}"));
            wait_for_owner(&waiter.0, "first");
            wait_until(PATIENCE, "it stands in the queue", || {
                let queue = factories[0].participants(&mutex);
                queue.is_ok_and(|queue| queue.len() > number)
            });
            waiter
        })
        .collect();
    first.stop().unwrap();
    for (number, (waiter, events)) in waiters.iter().enumerate() {
        next(events, EventKind::Acquired);
        for (later, _) in &waiters[number + 1..] {
            assert!(!later.is_owner(), "{} came before {number}", later.id());
        }
        waiter.stop().unwrap();
    }
}

pub fn released_comes_before_acquired(subject: &Subject) {
    let mutex = name("hand-off");
    let log: Arc<Mutex<Vec<String>>> = Arc::default();
    let factories = [subject.factory(), subject.factory()];
    let services: Vec<_> = ["a", "b"]
        .iter()
        .zip(&factories)
        .map(|(id, factory)| {
            let (acquired, released) = (Arc::clone(&log), Arc::clone(&log));
            factory
                .contend(&mutex)
                .id(id)
                .on_acquired(move |_| acquired.lock().push(format!("+{id}")))
                .on_released(move |_| released.lock().push(format!("-{id}")))
                .build()
                .unwrap()
        })
        .collect();
    services[0].start().unwrap();
    wait_until(PATIENCE, "a owns", || services[0].is_owner());
    services[1].start().unwrap();
    wait_for_owner(&services[1], "a");
    for turn in 0..6 {
        let (owner, waiter) = (&services[turn % 2], &services[(turn + 1) % 2]);
        owner.stop().unwrap();
        wait_until(PATIENCE, "the waiter owns", || waiter.is_owner());
        owner.start().unwrap();
        wait_for_owner(owner, waiter.id());
    }
    services[1].stop().unwrap();
    services[0].stop().unwrap();
    let log = log.lock();
    assert!(log.len() >= 14, "{log:?}");
    for pair in log.chunks(2) {
        assert!(
            pair[0].starts_with('+') && pair[1] == pair[0].replace('+', "-"),
            "{log:?}"
        );
    }
}

pub fn observer_follows_the_owner(subject: &Subject) {
    let mutex = name("observe");
    let (observer, seen) = subject.factory().observe(&mutex).channel().unwrap();
    observer.start().unwrap();
    // "Free" does not look like "unknown".
    let first = next(&seen, EventKind::OwnerChanged);
    assert_eq!(first.state.after().owner_id(), "");
    for id in ["a", "b"] {
        let (service, events) = started(&subject.factory(), &mutex, id);
        let fence = next(&events, EventKind::Acquired).fence();
        wait_until(PATIENCE, "the observer sees the owner", || {
            observer.state().after().is_owner(id) && Some(observer.state().after().fence()) == fence
        });
        service.stop().unwrap();
        wait_until(PATIENCE, "the observer sees that there is none", || {
            observer.state().after().owner_id().is_empty()
        });
    }
    observer.stop().unwrap();
    let owners: Vec<_> = seen
        .try_iter()
        .map(|event| event.state.after().owner_id().to_owned())
        .collect();
    assert_eq!(owners.first().map(String::as_str), Some("a"), "{owners:?}");
    assert_eq!(owners.last().map(String::as_str), Some(""), "{owners:?}");
}

/// It is gone at the deadline without the backend, and comes back with a new fence.
pub fn unrenewed_owner_steps_down(subject: &Subject) {
    let mutex = name("lost");
    let (factory, broken) = failing(&subject.factory());
    let (service, events) = factory
        .contend(&mutex)
        .id("a")
        .failures(true)
        .channel()
        .unwrap();
    service.start().unwrap();
    let first = next(&events, EventKind::Acquired);
    let (waiter, _waiting) = started(&subject.factory(), &mutex, "waiter");
    wait_for_owner(&waiter, "a");

    broken.on();
    let cut = Instant::now();
    let failed = next(&events, EventKind::Failed);
    assert_eq!(failed.error.unwrap().kind(), ErrorKind::Unreachable);
    assert!(service.last_error().is_some());
    let released = next(&events, EventKind::Released);
    assert!(!service.is_owner());
    assert!(
        cut.elapsed() < factory.lease().total(),
        "stepped down only after {:?}",
        cut.elapsed()
    );
    assert_eq!(released.fence(), first.fence());
    waiter.stop().unwrap();

    broken.off();
    let again = next(&events, EventKind::Acquired);
    assert!(again.fence() > first.fence());
    assert!(service.last_error().is_none());
}

/// Well before the lease would have run out.
pub fn dropped_service_releases(subject: &Subject) {
    let mutex = name("drop");
    let (owner, events) = started(&subject.factory(), &mutex, "owner");
    next(&events, EventKind::Acquired);
    let (waiter, waiting) = started(&subject.factory(), &mutex, "waiter");
    wait_for_owner(&waiter, "owner");
    drop(owner);
    next(&events, EventKind::Released);
    assert!(
        events.recv().is_err(),
        "the channel of a dropped service is closed"
    );
    next(&waiting, EventKind::Acquired);
}

pub fn service_stops_at_any_time(subject: &Subject) {
    let mutex = name("stop-any-time");
    let factory = subject.factory();
    let (service, events) = factory.contend(&mutex).id("a").channel().unwrap();
    let mut expected = EventKind::Acquired;
    for round in 0..40 {
        service.start().unwrap();
        if round % 4 == 3 {
            wait_until(PATIENCE, "it owns", || service.is_owner());
        } else {
            // Into another part of its start each time.
            std::thread::sleep(Duration::from_micros(300 * (round % 4)));
        }
        service.stop().unwrap();
        for event in events.try_iter() {
            if event.kind != EventKind::OwnerChanged {
                assert_eq!(event.kind, expected, "round {round}");
                expected = opposite(expected);
            }
        }
        assert_eq!(
            expected,
            EventKind::Acquired,
            "round {round}: a stopped service owns nothing"
        );
    }
    // Nothing of all that is left in the way of the next.
    let began = Instant::now();
    let (_next, events) = started(&factory, &mutex, "b");
    next(&events, EventKind::Acquired);
    assert!(
        began.elapsed() < factory.lease().total(),
        "{:?}",
        began.elapsed()
    );
}

pub fn departed_waiter_is_passed_over(subject: &Subject) {
    let mutex = name("left");
    let factory = subject.factory();
    let (owner, events) = started(&factory, &mutex, "owner");
    next(&events, EventKind::Acquired);
    let (quitter, quitting) = started(&factory, &mutex, "quitter");
    wait_for_owner(&quitter, "owner");
    let (stayer, staying) = started(&factory, &mutex, "stayer");
    wait_for_owner(&stayer, "owner");
    let began = Instant::now();
    quitter.stop().unwrap();
    let took = began.elapsed();
    assert!(took < factory.lease().ttl(), "{took:?}");
    only_changes(&quitting);
    owner.stop().unwrap();
    next(&staying, EventKind::Acquired);
    assert!(stayer.is_owner());
}

/// By mistake, two processes have one id: they must not take the mutex from each other for ever.
pub fn doubles_do_not_alternate(subject: &Subject) {
    let mutex = name("one-id");
    let both = [(); 2].map(|()| {
        let factory = subject.factory();
        let (service, events) = started(&factory, &mutex, "same");
        (factory, service, events)
    });
    let lease = both[0].0.lease();
    // Long enough for ten of their turns.
    std::thread::sleep(lease.ttl() * 10 / 3);
    let kinds = both.iter().flat_map(|it| it.2.try_iter()).map(|it| it.kind);
    let acquired = kinds.filter(|kind| *kind == EventKind::Acquired).count();
    println!("{acquired} acquisitions in {:?}", lease.ttl() * 10 / 3);
    assert!((1..=6).contains(&acquired), "{acquired} acquisitions");
}

/// What is in the channel when `stop` returns is all there is.
pub fn stop_ends_delivery(subject: &Subject) {
    let mutex = name("silence");
    let factory = subject.factory();
    let (service, events) = started(&factory, &mutex, "a");
    next(&events, EventKind::Acquired);
    service.stop().unwrap();
    next(&events, EventKind::Released);
    let (other, others) = started(&factory, &mutex, "b");
    next(&others, EventKind::Acquired);
    other.stop().unwrap();
    assert!(events.is_empty());
}

/// Names that look like something to some backend are just names, and not each other.
pub fn every_name_is_itself(subject: &Subject) {
    let factory = subject.factory();
    let tail = name("x");
    let mut services: Vec<_> = [
        "a/b", "a%2Fb", "a:b", "A:b", "a", "..", "*", "';--", "a b", "naïve", "日本", "a.b", "@@",
        "$1",
    ]
    .iter()
    .map(|head| {
        let mutex = format!("{head}{tail}");
        let (service, events) = started(&factory, &mutex, "o'%/:*");
        let acquired = next(&events, EventKind::Acquired);
        assert!(acquired.state.is_acquired("o'%/:*"), "{mutex}");
        (service, events)
    })
    .collect();
    // The end of one is not that of another.
    let (stopped, _) = services.pop().unwrap();
    stopped.stop().unwrap();
    assert!(
        services.iter().all(|(service, _)| service.is_owner()),
        "one disturbed another"
    );
}
