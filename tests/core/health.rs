//! Health tells "not tried yet" from "fine" and from "failing", without asking the server.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use contend::backend::{
    Attempt, Backend, Contender, OnRefusal, RawContender, RawObserver, Renewal, View,
};
use contend::{
    Contact, Error, ErrorKind, Factory, Lease, Moment, MutexOwner, Result, Unparker, memory,
};
use testbed::{wait_until, within};

const PATIENCE: Duration = Duration::from_secs(30);
const HANG: Duration = Duration::from_secs(100);
const PING: Duration = Duration::from_secs(1);

fn lease() -> Lease {
    Lease::new(Duration::from_millis(600), Duration::from_millis(300)).unwrap()
}

#[test]
fn a_ping_is_enough_to_know() {
    let factory = memory::factory("health-ping", lease());
    let handle = memory::handle("health-ping");
    handle.set_unreachable(true);
    let error = factory.ping(PING).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable);
    let Contact::Failing { error, .. } = factory.health().contact else {
        panic!("{:?}", factory.health());
    };
    assert_eq!(error.kind(), ErrorKind::Unreachable);
    handle.set_unreachable(false);
    factory.ping(PING).unwrap();
    assert!(factory.health().is_fine());
}

#[test]
fn a_services_trouble_shows_while_it_lasts() {
    within(HANG, || {
        let factory = memory::factory("health-trouble", lease());
        let handle = memory::handle("health-trouble");
        let service = factory.contend("m").id("a").build().unwrap();
        let observer = factory.observe("m").build().unwrap();
        service.start().unwrap();
        observer.start().unwrap();
        wait_until(PATIENCE, "all is fine", || {
            service.is_owner() && factory.health().is_fine()
        });
        handle.set_unreachable(true);
        wait_until(PATIENCE, "it fails", || {
            let health = factory.health();
            matches!(health.contact, Contact::Failing { .. }) && !health.is_fine()
        });
        wait_until(PATIENCE, "it has stepped down", || !service.is_owner());
        assert!(matches!(service.contact(), Contact::Failing { .. }));

        handle.set_unreachable(false);
        wait_until(PATIENCE, "all is fine again", || {
            service.is_owner() && factory.health().is_fine()
        });
    });
}

/// A program that only locks was told that all is fine, beside the error that `lock` had returned.
#[test]
fn a_lockers_trouble_shows_until_the_backend_has_answered() {
    let factory = memory::factory("health-locker", lease());
    let handle = memory::handle("health-locker");
    let locker = factory.locker("m").build().unwrap();
    let other = factory.locker("m").build().unwrap();
    let guard = locker.lock().unwrap();
    let held = thread::scope(|scope| {
        let tries = scope.spawn(|| other.try_lock().map(drop).unwrap_err());
        tries.join().unwrap()
    });
    assert_eq!(held.kind(), ErrorKind::Held);
    assert!(factory.health().is_fine());
    drop(guard);

    handle.set_unreachable(true);
    locker.try_lock().map(drop).unwrap_err();
    let is_failing = || {
        let health = factory.health();
        let Contact::Failing { error, .. } = &health.contact else {
            panic!("{health:?}");
        };
        assert_eq!(error.kind(), ErrorKind::Unreachable);
        assert!(!health.is_fine());
    };
    is_failing();
    // Nor is it forgotten with the locker that met it.
    drop(locker);
    for _ in 0..100 {
        drop(factory.locker("m").build().unwrap());
    }
    is_failing();
    handle.set_unreachable(false);
    other.lock().unwrap().unlock().unwrap();
    assert!(factory.health().is_fine());
}

/// A server that does not answer was failing, and fine again when the only service was stopped.
#[test]
fn a_services_trouble_is_not_over_because_it_stops_or_starts() {
    within(HANG, || {
        let factory = memory::factory("health-stopped", lease());
        let handle = memory::handle("health-stopped");
        let factory = factory.with_initial_delay(Duration::from_millis(100));
        let service = factory.contend("m").id("a").build().unwrap();
        service.start().unwrap();
        wait_until(PATIENCE, "it leads", || service.is_owner());
        handle.set_unreachable(true);
        let is_failing = || matches!(factory.health().contact, Contact::Failing { .. });
        wait_until(PATIENCE, "it fails", is_failing);
        service.stop().unwrap();
        assert!(is_failing(), "stopped");
        service.start().unwrap();
        assert!(is_failing(), "started");
        handle.set_unreachable(false);
        wait_until(PATIENCE, "all is fine again", || {
            service.is_owner() && factory.health().is_fine()
        });
    });
}

/// Health asks nothing: where nobody else does, the server may have died since the last answer.
#[test]
fn an_idle_program_is_fine_but_was_not_answered_lately() {
    let factory = memory::factory("health-idle", lease());
    factory.ping(PING).unwrap();
    memory::handle("health-idle").set_unreachable(true);
    let moment = Duration::from_millis(1);
    let is_old = || !factory.health().is_fine_within(moment);
    wait_until(PATIENCE, "the last answer is old", is_old);
    assert!(factory.health().is_fine() && factory.health().is_fine_within(HANG));
    factory.ping(PING).unwrap_err();
    assert!(!factory.health().is_fine_within(HANG));
}

/// How long a call hangs on `Hanging`.
const HANGS: Duration = Duration::from_millis(200);

/// A backend whose calls hang, and fail then.
#[derive(Debug)]
struct Hanging;

fn hang<T>() -> Result<T> {
    thread::sleep(HANGS);
    Err(Error::new(ErrorKind::Timeout, "no answer in time"))
}

impl Backend for Hanging {
    fn realm(&self) -> &str {
        "hanging"
    }
    fn contender(&self, _: &Contender, _: &Unparker) -> Result<Box<dyn RawContender>> {
        Ok(Box::new(Hanging))
    }
    fn observer(&self, _: &Arc<str>, _: &Unparker) -> Result<Box<dyn RawObserver>> {
        Ok(Box::new(Hanging))
    }
    fn ping(&self, _: Moment) -> Result<()> {
        hang()
    }
    fn owner(&self, _: &Arc<str>, _: Moment) -> Result<MutexOwner> {
        hang()
    }
}

impl RawContender for Hanging {
    fn acquire(&mut self, _: OnRefusal, _: Moment) -> Result<Attempt> {
        hang()
    }
    fn renew(&mut self, _: u64, _: Moment) -> Result<Renewal> {
        hang()
    }
    fn release(&mut self, _: u64, _: Moment) -> Result<bool> {
        hang()
    }
    fn withdraw(&mut self, _: Moment) -> Result<()> {
        hang()
    }
}

impl RawObserver for Hanging {
    fn observe(&mut self, _: Moment) -> Result<View> {
        hang()
    }
}

/// It was counted from the end of the first call that failed: an outage looked shorter than it was by as long as that
/// call had hung.
#[test]
fn trouble_lasts_from_when_the_first_call_that_failed_was_sent() {
    within(HANG, || {
        let is_whole = |contact: Contact| match contact {
            Contact::Failing { lasting, .. } => {
                assert!(lasting >= HANGS, "{lasting:?}");
                true
            }
            _ => false,
        };
        let factory = || Factory::new(Arc::new(Hanging), lease());
        let pings = factory();
        pings.ping(HANGS).unwrap_err();
        assert!(is_whole(pings.health().contact));
        let locks = factory();
        let locker = locks.locker("m").build().unwrap();
        locker.try_lock_for(HANGS).map(drop).unwrap_err();
        assert!(is_whole(locks.health().contact));
        let contends = factory();
        let service = contends.contend("m").build().unwrap();
        service.start().unwrap();
        wait_until(PATIENCE, "it fails", || is_whole(service.contact()));
        let observes = factory();
        let observer = observes.observe("m").build().unwrap();
        observer.start().unwrap();
        wait_until(PATIENCE, "it fails", || is_whole(observer.contact()));
    });
}

/// Rule "dropping is stopping": whoever read the health held the service meanwhile, and stopped it in the place of
/// the one that had dropped it.
#[test]
fn a_service_dropped_while_its_health_is_read_has_stopped() {
    within(HANG, || {
        let factory = memory::factory("health-drop", lease());
        // So many that reading takes a while.
        let idle = |number| {
            let service = factory.contend(format!("idle{number}")).build();
            service.unwrap()
        };
        let _idle: Vec<_> = (0..500).map(idle).collect();
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::SeqCst) {
                    let _ = factory.health();
                }
            });
            let dropped = (0..50).map(|_| {
                let service = factory.contend("m").build().unwrap();
                service.start().unwrap();
                wait_until(PATIENCE, "it owns", || service.is_owner());
                drop(service);
                factory.owner("m").unwrap().has_owner()
            });
            let left = dropped.filter(|owned| *owned).count();
            over.store(true, Ordering::SeqCst);
            assert_eq!(left, 0, "dropped, and not stopped");
        });
    });
}
