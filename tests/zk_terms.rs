//! The terms on which one contends on ZooKeeper: names, URLs, ACLs, and leases that fit a session.
#![cfg(feature = "zk")]

mod zk_support;

use std::sync::LazyLock;
use std::time::Duration;

use contend::backend::{Attempt, Entry, Hold, Renewal};
use contend::zk::{Acl, Mode};
use contend::{ErrorKind, Lease, Moment};
use ground::{ZooKeeperServer, wait_until, within};
use zk_support::{
    HANG, PATIENCE, builder, factory, granted, line, long_seat, name, seat, session, soon,
};

static SERVER: LazyLock<ZooKeeperServer> = LazyLock::new(ZooKeeperServer::start);

const T: Duration = Duration::from_secs(3);
const LONG: Duration = Duration::from_secs(50);

#[test]
fn names_are_encoded_and_stay_inside() {
    within(HANG, || {
        let factory = factory(SERVER.addr(), LONG);
        let reader = session(SERVER.addr(), LONG);
        let salt = name("n");
        for (mutex, node) in [
            (format!("a/b{salt}"), format!("a%2Fb{salt}")),
            (format!("100%{salt}"), format!("100%25{salt}")),
            ("..".to_owned(), "%2E%2E".to_owned()),
            (format!("a.b{salt}"), format!("a.b{salt}")),
            (format!("\u{1f512}{salt}"), format!("%F0%9F%94%92{salt}")),
        ] {
            let mut seat = long_seat(&factory, &mutex, "a");
            granted(&mut *seat, Entry::Try);
            assert_eq!(line(&reader, &node).len(), 1, "{mutex}");
        }
    });
}

#[test]
fn a_url_with_everything_works_and_hides_its_password() {
    within(HANG, || {
        let chroot = name("app");
        let url = format!(
            "zk://me:s3cret@{}/{chroot}/x?session_timeout=30s",
            SERVER.addr()
        );
        let factory = contend::connect(&url).unwrap();
        let mut owner = long_seat(&factory, "demo", "a");
        granted(&mut *owner, Entry::Try);
        let stranger = builder(SERVER.addr(), LONG)
            .chroot(format!("/{chroot}/x"))
            .build()
            .unwrap();
        let mut outside = long_seat(&stranger, "demo", "b");
        let error = outside.acquire(Entry::Try, soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
        assert!(!error.is_transient());
        assert!(!format!("{factory:?}{error:?}").contains("s3cret"));
        assert!(!factory.realm().contains("me"));
    });
}

#[test]
fn who_may_not_create_above_may_still_contend_below() {
    within(HANG, || {
        let chroot = format!("/{}", name("narrow"));
        let operator = |acl| {
            builder(SERVER.addr(), LONG)
                .digest("operator", "s3cret")
                .acl(acl)
                .session()
                .unwrap()
        };
        operator(Acl::CreatorAll)
            .create(&chroot, b"", Mode::Persistent, soon())
            .unwrap();
        let guest = builder(SERVER.addr(), LONG)
            .chroot(&chroot)
            .build()
            .unwrap();
        let mut seat = long_seat(&guest, "demo", "guest");
        let error = seat.acquire(Entry::Try, soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
        operator(Acl::Open)
            .create(&format!("{chroot}/simba"), b"", Mode::Persistent, soon())
            .unwrap();
        granted(&mut *seat, Entry::Try);
    });
}

#[test]
fn a_lease_that_no_session_could_keep_is_refused() {
    within(HANG, || {
        let factory = factory(SERVER.addr(), T);
        for (ttl, transition) in [(3_000, 100), (1_000, 1_500)] {
            let error = factory
                .contend("x")
                .ttl(Duration::from_millis(ttl))
                .transition(Duration::from_millis(transition))
                .build()
                .unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput);
            assert!(error.to_string().contains("session_timeout"), "{error}");
        }
        let lease = Lease::new(Duration::from_millis(500), Duration::from_millis(300)).unwrap();
        let mut seat = seat(&factory, &name("lease"), "a", lease, Hold::Long);
        let before = Moment::now();
        let grant = granted(&mut *seat, Entry::Try);
        let until = grant.until.unwrap();
        assert!(until > before && until <= Moment::now() + lease.ttl());
    });
}

#[test]
fn a_lease_that_ran_out_is_not_renewed() {
    within(HANG, || {
        let mutex = name("ran-out");
        let factory = factory(SERVER.addr(), LONG);
        let reader = session(SERVER.addr(), LONG);
        let lease = Lease::new(Duration::from_secs(1), Duration::from_millis(500)).unwrap();
        let mut seat = seat(&factory, &mutex, "a", lease, Hold::Long);
        let first = granted(&mut *seat, Entry::Queue);
        let fence = first.owner.fence();
        wait_until(PATIENCE, "the lease has run out", || {
            Moment::now() > first.until.unwrap() + lease.transition()
        });
        assert!(matches!(
            seat.renew(fence, soon()).unwrap(),
            Renewal::Lost(_)
        ));
        let again = granted(&mut *seat, Entry::Queue);
        assert!(again.owner.fence() > fence);
        assert_eq!(line(&reader, &mutex).len(), 1);
    });
}

#[test]
fn a_shorter_session_than_asked_for_shortens_belief() {
    within(HANG, || {
        let server = ZooKeeperServer::start_with(&["maxSessionTimeout=2000"], &[]);
        let factory = factory(server.addr(), Duration::from_secs(20));
        let mut seat = long_seat(&factory, "m", "a");
        let grant = granted(&mut *seat, Entry::Try);
        assert!(grant.until.unwrap() < Moment::now() + Duration::from_secs(2));
        let attempt: Attempt = long_seat(&factory, "m", "b")
            .acquire(Entry::Try, soon())
            .unwrap();
        assert!(matches!(attempt, Attempt::Refused(_)));
    });
}
