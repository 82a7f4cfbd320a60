//! Facts about the ways to listen.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use contend::{Event, EventKind, Executor, Job, MutexContendService, MutexContender, Status};
use parking_lot::Mutex;
use testbed::wait_until;

use super::{PATIENCE, Subject, ms, name, opposite, started, wait_for_owner};

pub fn slow_callback_delays_no_renewal(subject: &Subject) {
    let mutex = name("slow");
    let factory = subject.factory();
    let nap = factory.lease().total() + factory.lease().ttl();
    let done = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&done);
    let service = factory
        .contend(&mutex)
        .on_acquired(move |_| {
            std::thread::sleep(nap);
            count.fetch_add(1, Ordering::SeqCst);
        })
        .build()
        .unwrap();
    service.start().unwrap();
    wait_until(PATIENCE, "it owns", || service.is_owner());
    let fence = service.fence();
    while done.load(Ordering::SeqCst) == 0 {
        assert_eq!(service.fence(), fence, "{:?}", service.last_error());
        std::thread::sleep(ms(10));
    }
    service.stop().unwrap();
}

pub fn panicking_callback_stops_no_other(subject: &Subject) {
    let mutex = name("panic");
    let released = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&released);
    let service = subject
        .factory()
        .contend(&mutex)
        // Not `panic!`: a backtrace can take longer than a lease on a busy machine.
        .on_acquired(|_| std::panic::resume_unwind(Box::new("on purpose: a callback of a test")))
        .on_released(move |_| {
            count.fetch_add(1, Ordering::SeqCst);
        })
        .build()
        .unwrap();
    for round in 1..=2 {
        service.start().unwrap();
        wait_until(PATIENCE, "it owns", || service.is_owner());
        service.stop().unwrap();
        assert_eq!(released.load(Ordering::SeqCst), round);
    }
}

/// `stop` returns after the callback, and no other owns before that.
pub fn next_owner_waits_for_the_callback(subject: &Subject) {
    let mutex = name("wind-down");
    let factory = subject.factory();
    let nap = factory.lease().ttl() / 4;
    let over: Arc<Mutex<Option<Instant>>> = Arc::default();
    let noted = Arc::clone(&over);
    let owner = factory
        .contend(&mutex)
        .id("owner")
        .on_released(move |_| {
            std::thread::sleep(nap);
            *noted.lock() = Some(Instant::now());
        })
        .build()
        .unwrap();
    owner.start().unwrap();
    wait_until(PATIENCE, "the first owns", || owner.is_owner());
    let began: Arc<Mutex<Option<Instant>>> = Arc::default();
    let noted = Arc::clone(&began);
    let waiter = factory
        .contend(&mutex)
        .id("waiter")
        .on_acquired(move |_| *noted.lock() = Some(Instant::now()))
        .build()
        .unwrap();
    waiter.start().unwrap();
    wait_for_owner(&waiter, "owner");
    owner.stop().unwrap();
    let over = over.lock().expect("stop returns after the callback");
    wait_until(PATIENCE, "the waiter owns", || began.lock().is_some());
    assert!(began.lock().unwrap() >= over);
}

/// It does not wait for itself, and the service stops when the callback has returned.
pub fn callback_can_stop_its_service(subject: &Subject) {
    let mutex = name("inside");
    let slot: Arc<Mutex<Option<Arc<MutexContendService>>>> = Arc::default();
    let inside = Arc::clone(&slot);
    let released = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&released);
    let service = subject
        .factory()
        .contend(&mutex)
        .on_acquired(move |_| {
            wait_until(PATIENCE, "the service is there", || inside.lock().is_some());
            let service = inside.lock().clone().unwrap();
            service.stop().unwrap();
        })
        .on_released(move |_| {
            count.fetch_add(1, Ordering::SeqCst);
        })
        .build()
        .unwrap();
    let service = Arc::new(service);
    *slot.lock() = Some(Arc::clone(&service));
    for round in 1..=3 {
        service.start().unwrap();
        wait_until(PATIENCE, "it stopped itself", || {
            service.status() == Status::Initial && released.load(Ordering::SeqCst) == round
        });
    }
    // The closure holds the service that holds the closure.
    slot.lock().take();
}

type Log = Arc<Mutex<Vec<(EventKind, Option<u64>, String)>>>;

struct Own {
    mutex: String,
    log: Log,
}

impl Own {
    fn note(&self, event: &Event) {
        let thread = std::thread::current().name().unwrap_or("").to_owned();
        let note = (event.kind, event.fence(), thread);
        self.log.lock().push(note);
    }
}

impl MutexContender for Own {
    fn mutex(&self) -> &str {
        &self.mutex
    }

    fn contender_id(&self) -> &str {
        "own"
    }

    fn on_acquired(&self, event: &Event) {
        self.note(event);
    }

    fn on_released(&self, event: &Event) {
        self.note(event);
    }
}

pub fn executor_runs_own_callbacks(subject: &Subject) {
    let (jobs, queue) = crossbeam_channel::unbounded::<Job>();
    let pool = std::thread::Builder::new()
        .name("the pool".into())
        .spawn(move || queue.iter().for_each(|job| job()))
        .unwrap();
    let executor: Executor = Arc::new(move |job| jobs.send(job).unwrap());
    let log = Log::default();
    let own = Own {
        mutex: name("executor"),
        log: Arc::clone(&log),
    };
    let factory = subject.factory().with_executor(executor);
    let service = factory.contend_as(own).build().unwrap();
    assert_eq!(service.id(), "own");
    let mut expected = Vec::new();
    for _ in 0..2 {
        service.start().unwrap();
        wait_until(PATIENCE, "it owns", || service.is_owner());
        let fence = service.fence();
        service.stop().unwrap();
        let note = |kind| (kind, fence, "the pool".to_owned());
        expected.extend([EventKind::Acquired, EventKind::Released].map(note));
    }
    drop((service, factory));
    pool.join().unwrap();
    assert_eq!(*log.lock(), expected);
}

/// Bounded, whole pairs go, and the next event says how many.
pub fn full_channel_drops_whole_pairs(subject: &Subject) {
    let mutex = name("missed");
    let factory = subject.factory();
    let (service, events) = factory.contend(&mutex).event_capacity(4).channel().unwrap();
    for _ in 0..8 {
        service.start().unwrap();
        wait_until(PATIENCE, "it owns", || service.is_owner());
        service.stop().unwrap();
    }
    assert!(events.len() <= 4);
    let mut seen = 0;
    let mut expected = EventKind::Acquired;
    for event in events.try_iter() {
        assert_eq!(event.kind, expected);
        expected = opposite(expected);
        seen += 1 + event.missed;
    }
    assert_eq!(
        expected,
        EventKind::Acquired,
        "an Acquired came without its Released"
    );
    service.start().unwrap();
    let event = events.recv_timeout(PATIENCE).unwrap();
    assert_eq!(event.kind, EventKind::Acquired);
    assert!(event.missed > 0);
    assert_eq!(seen + event.missed, 16, "every event was seen or counted");
    drop(service);
    let (_other, others) = started(&factory, &mutex, "other");
    super::next(&others, EventKind::Acquired);
}
