//! The memory backend: the conformance suite, and what only it promises.

use std::sync::LazyLock;
use std::time::Instant;

use crate::conformance::{PATIENCE, Subject, lease, ms, next, started, wait_for_owner};
use contend::backend::{Contender, OnRefusal, Purpose};
use contend::semaphore::PermitRequest;
use contend::{ErrorKind, EventKind, Factory, Moment, Parker};

/// Keeps the registry while no test has a factory, as a server outlives its clients.
static SERVER: LazyLock<Factory> = LazyLock::new(factory);

fn factory() -> Factory {
    contend::memory::factory("conformance", lease())
}

conformance!(Subject {
    factory: Box::new(|| {
        LazyLock::force(&SERVER);
        factory()
    }),
    ordered: true,
});

/// The same, with lockers that queue in the process.
mod one_per_process {
    use super::*;
    use crate::conformance::hooked;

    static SERVER: LazyLock<Factory> = LazyLock::new(factory);

    fn factory() -> Factory {
        contend::memory::factory("one-per-process", lease())
    }

    conformance!(Subject {
        factory: Box::new(|| {
            LazyLock::force(&SERVER);
            hooked::one_per_process(&factory())
        }),
        ordered: true,
    });
}

#[test]
fn registries_of_different_names_are_apart() {
    let one = contend::connect("memory://one").unwrap();
    let two = contend::connect("memory://two").unwrap();
    let again = contend::connect("memory://one").unwrap();
    let (a, in_one) = started(&one, "m", "a");
    let (b, in_two) = started(&two, "m", "a");
    next(&in_one, EventKind::Acquired);
    next(&in_two, EventKind::Acquired);
    let (c, _events) = started(&again, "m", "c");
    wait_for_owner(&c, "a");
    assert!(a.is_owner() && b.is_owner() && !c.is_owner());
}

/// A registry that was dropped has lost its memory, but fences still grow.
#[test]
fn fences_grow_over_a_dropped_registry() {
    let mut last = None;
    for _ in 0..3 {
        let factory = contend::connect("memory://forgetful").unwrap();
        let (service, events) = started(&factory, "m", "a");
        let fence = next(&events, EventKind::Acquired).fence();
        assert!(fence > last, "{fence:?} after {last:?}");
        last = fence;
        drop((service, factory));
    }
}

#[test]
fn wrong_urls_are_refused_with_help() {
    for (url, says) in [
        ("memory://?tll=2s", "known are: ttl, transition"),
        ("memory://?ttl=2", "a number and a unit"),
        ("memory://?ttl=0s", "at least 26ms"),
        ("memory://user:pw@x", "memory://NAME"),
        ("etcd://x", "redis://"),
        ("nonsense", "scheme://"),
    ] {
        let error = contend::connect(url).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{url}");
        assert!(error.to_string().contains(says), "{url}: {error}");
    }
    let factory = contend::connect("memory://?ttl=3s&transition=1s").unwrap();
    assert_eq!(factory.lease().total().as_secs(), 4);
}

/// Those of a holder that is dead, as far as the backend can tell, come back after its ttl and a quarter of it.
#[test]
fn permits_are_counted_and_come_back() {
    let factory = contend::connect("memory://permits").unwrap();
    let semaphores = factory.semaphores().unwrap();
    semaphores.create("s", 2).unwrap();
    let one = |id: &str| PermitRequest::new(id).permits("s", 1).ttl(ms(2_000));
    let held = semaphores.guard(&one("held"), ms(0)).unwrap();
    // Without a guard, no thread renews it.
    let began = Instant::now();
    semaphores.acquire(&one("dead")).unwrap();
    let full = semaphores.guard(&one("next"), ms(0)).map(drop);
    assert_eq!(full.unwrap_err().kind(), ErrorKind::Exhausted);
    let next = semaphores.guard(&one("next"), PATIENCE).unwrap();
    assert!(began.elapsed() >= ms(2_490), "{:?}", began.elapsed());
    assert!(held.is_valid() && next.is_valid());
}

/// As a server notices that a connection is gone: the place went with the unparker that tells whose it is.
#[test]
fn dropped_contender_leaves_the_queue() {
    let factory = contend::memory::factory("handle-withdraw", lease());
    let handle = contend::memory::handle("handle-withdraw");
    let _owner = factory.locker("m").build().unwrap().lock().unwrap();
    let contender = Contender {
        mutex: "m".into(),
        id: "waits".into(),
        lease: lease(),
        purpose: Purpose::Lead,
    };
    let (parker, by) = (Parker::new(), Moment::now() + lease().ttl());
    let backend = factory.backend().unwrap();
    let mut waits = backend.contender(&contender, &parker.unparker()).unwrap();
    waits.acquire(OnRefusal::Enqueue, by).unwrap();
    assert_eq!(factory.participants("m").unwrap().len(), 1);
    handle.set_unreachable(true);
    waits.withdraw(by).unwrap_err();
    handle.set_unreachable(false);
    drop(waits);
    assert!(factory.participants("m").unwrap().is_empty());
}
