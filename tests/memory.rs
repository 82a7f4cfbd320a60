//! The memory backend: the conformance suite, and what only it promises.

mod conformance;

use conformance::{Subject, lease};
use contend::{ErrorKind, EventKind};

conformance!(Subject {
    factory: Box::new(|| contend::memory::factory("conformance", lease())),
    ordered: true,
});

#[test]
fn registries_of_different_names_are_different_places() {
    let one = contend::connect("memory://one").unwrap();
    let two = contend::connect("memory://two").unwrap();
    let again = contend::connect("memory://one").unwrap();
    let (a, in_one) = conformance::started(&one, "m", "a");
    let (b, in_two) = conformance::started(&two, "m", "a");
    conformance::next(&in_one, EventKind::Acquired);
    conformance::next(&in_two, EventKind::Acquired);
    let (c, _events) = conformance::started(&again, "m", "c");
    conformance::wait_for_owner(&c, "a");
    assert!(a.is_owner() && b.is_owner() && !c.is_owner());
}

/// Rule 9: a registry that was dropped has lost its memory, but fences still grow.
#[test]
fn fences_grow_from_a_dropped_registry_to_the_next_of_its_name() {
    let mut last = None;
    for _ in 0..3 {
        let factory = contend::connect("memory://forgetful").unwrap();
        let (service, events) = conformance::started(&factory, "m", "a");
        let fence = conformance::next(&events, EventKind::Acquired).fence();
        assert!(fence > last, "{fence:?} after {last:?}");
        last = fence;
        drop((service, factory));
    }
}

#[test]
fn urls_that_are_wrong_are_refused_with_what_is_right() {
    for (url, kind, says) in [
        (
            "memory://?tll=2s",
            ErrorKind::InvalidInput,
            "known are: ttl, transition",
        ),
        (
            "memory://?ttl=2",
            ErrorKind::InvalidInput,
            "a number and a unit",
        ),
        ("memory://?ttl=0s", ErrorKind::InvalidInput, "too small"),
        (
            "memory://user:pw@x",
            ErrorKind::InvalidInput,
            "memory://NAME",
        ),
        ("etcd://x", ErrorKind::InvalidInput, "redis://"),
        ("nonsense", ErrorKind::InvalidInput, "scheme://"),
    ] {
        let error = contend::connect(url).unwrap_err();
        assert_eq!(error.kind(), kind, "{url}");
        assert!(error.to_string().contains(says), "{url}: {error}");
    }
    let factory = contend::connect("memory://?ttl=3s&transition=1s").unwrap();
    assert_eq!(factory.lease().total().as_secs(), 4);
}

#[cfg(not(feature = "redis"))]
#[test]
fn a_backend_whose_feature_is_off_names_the_feature() {
    let error = contend::connect("redis://127.0.0.1").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::FeatureDisabled);
    assert!(
        error.to_string().contains("features = [\"redis\"]"),
        "{error}"
    );
}
