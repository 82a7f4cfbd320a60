//! Facts about names, ids and leases.

use std::time::Duration;

use contend::{ErrorKind, EventKind};

use super::{Subject, ms, name, next, started};

pub fn bad_input_is_refused(subject: &Subject) {
    let factory = subject.factory();
    let long = "m".repeat(67);
    for bad in [
        "",
        " a",
        "a ",
        "\ta",
        "a\nb",
        "a\0b",
        "{a}",
        "a}",
        long.as_str(),
    ] {
        for error in [
            factory.contend(bad).build().unwrap_err(),
            factory.observe(bad).build().unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{bad:?}");
            assert!(error.to_string().contains("1 to 66 bytes"), "{error}");
        }
    }
    let long = "i".repeat(129);
    for bad in ["", " a", "a ", "a\rb", "{", "a@@b", long.as_str()] {
        let error = factory.contend("m").id(bad).build().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{bad:?}");
    }
    for (ttl, transition) in [
        (ms(0), ms(100)),
        (ms(5), ms(100)),
        (Duration::MAX, Duration::MAX),
        (ms(1000), Duration::MAX),
    ] {
        let error = factory
            .contend("m")
            .ttl(ttl)
            .transition(transition)
            .build()
            .unwrap_err();
        assert_eq!(
            error.kind(),
            ErrorKind::InvalidInput,
            "{ttl:?} {transition:?}"
        );
        assert!(error.to_string().contains("ttl"), "{error}");
    }
    for renew_after in [ms(0), factory.lease().ttl(), Duration::MAX] {
        let error = factory
            .contend("m")
            .renew_after(renew_after)
            .build()
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{renew_after:?}");
    }
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
