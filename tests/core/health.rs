//! Health tells "not tried yet" from "fine" and from "failing", without asking the server.

use std::time::Duration;

use crate::conformance::{HANG, PATIENCE, elsewhere, ms, name};
use contend::memory::Handle;
use contend::{Contact, ErrorKind, Factory, Lease, memory};
use testbed::{wait_until, within};

const PING: Duration = ms(1_000);

/// A factory, and what makes its registry unreachable.
fn registry() -> (Factory, Handle) {
    let name = name("health");
    let lease = Lease::new(ms(600), ms(300)).unwrap();
    (memory::factory(&name, lease), memory::handle(&name))
}

fn is_failing(factory: &Factory) -> bool {
    let health = factory.health();
    let failing = matches!(&health.contact, Contact::Failing { error, .. } if error.is_transient());
    assert_ne!(failing, health.is_fine(), "{health:?}");
    failing
}

#[test]
fn ping_is_enough_to_know() {
    let (factory, handle) = registry();
    handle.set_unreachable(true);
    let error = factory.ping(PING).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable);
    assert!(is_failing(&factory));
    handle.set_unreachable(false);
    factory.ping(PING).unwrap();
    assert!(!is_failing(&factory));
    // An idle program has no trouble, but its last answer gets old.
    let is_old = || !factory.health().is_fine_within(ms(1));
    wait_until(PATIENCE, "the last answer is old", is_old);
    assert!(factory.health().is_fine_within(HANG));
}

/// Neither a stop nor a start ends it.
#[test]
fn service_trouble_shows_while_it_lasts() {
    within(HANG, || {
        let (factory, handle) = registry();
        let service = factory.contend("m").build().unwrap();
        let observer = factory.observe("m").build().unwrap();
        service.start().unwrap();
        observer.start().unwrap();
        let is_fine = || service.is_owner() && factory.health().is_fine();
        wait_until(PATIENCE, "all is fine", is_fine);
        handle.set_unreachable(true);
        wait_until(PATIENCE, "it fails", || !factory.health().is_fine());
        wait_until(PATIENCE, "it has stepped down", || !service.is_owner());
        assert!(matches!(service.contact(), Contact::Failing { .. }));
        service.stop().unwrap();
        assert!(is_failing(&factory), "stopped");
        service.start().unwrap();
        assert!(is_failing(&factory), "started");
        handle.set_unreachable(false);
        wait_until(PATIENCE, "all is fine again", is_fine);
    });
}

/// It is not forgotten with the locker that met it. To be refused is no trouble.
#[test]
fn locker_trouble_shows_until_an_answer() {
    let (factory, handle) = registry();
    let locker = factory.locker("m").build().unwrap();
    let other = factory.locker("m").build().unwrap();
    let guard = locker.lock().unwrap();
    let held = elsewhere(|| other.try_lock().map(drop).unwrap_err());
    assert_eq!(held.kind(), ErrorKind::Held);
    assert!(factory.health().is_fine());
    drop(guard);

    handle.set_unreachable(true);
    locker.try_lock().map(drop).unwrap_err();
    assert!(is_failing(&factory));
    drop(locker);
    assert!(is_failing(&factory));
    handle.set_unreachable(false);
    other.lock().unwrap().unlock().unwrap();
    assert!(!is_failing(&factory));
}
