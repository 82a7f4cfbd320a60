//! The terms on which one contends on ZooKeeper: names, URLs, ACLs, and leases that fit a session.

use std::sync::LazyLock;
use std::time::Duration;

use crate::support::{
    CREATOR, HANG, PATIENCE, Verbs, builder, contender, factory, granted, line, long_seat, name,
    session, soon,
};
use contend::backend::{OnRefusal, Purpose};
use contend::zk::Mode;
use contend::{ErrorKind, Lease, Moment};
use testbed::{ZooKeeperServer, wait_until, within};

static SERVER: LazyLock<ZooKeeperServer> = LazyLock::new(ZooKeeperServer::start);

const T: Duration = Duration::from_secs(3);
const LONG: Duration = Duration::from_secs(50);

/// As Curator has them.
#[test]
fn names_nest_and_what_is_no_contender_is_ignored() {
    within(HANG, || {
        let factory = factory(SERVER.addr(), LONG);
        let reader = session(SERVER.addr(), LONG);
        let salt = name("n");
        let mutexes = [
            salt.clone(),
            format!("{salt}/b"),
            format!("{salt}/b/c"),
            format!("100%{salt}"),
            format!("a%2Fb{salt}"),
            format!("a.b{salt}"),
        ];
        let mut contenders: Vec<_> = mutexes
            .iter()
            .map(|mutex| {
                let mut contender = long_seat(&factory, mutex, "a");
                let fence = granted(&mut *contender, OnRefusal::Leave).owner.fence();
                (contender, fence)
            })
            .collect();
        for mutex in &mutexes {
            let latches = line(&reader, mutex);
            let latches = latches.iter().filter(|name| name.contains("-latch-"));
            assert_eq!(latches.count(), 1, "{mutex}");
        }
        // A foreign node in between changes nothing.
        reader
            .create(&format!("/simba/{salt}/0"), b"", Mode::Persistent, soon())
            .unwrap();
        let fence = granted(
            &mut *long_seat(&factory, &format!("{salt}/0"), "a"),
            OnRefusal::Leave,
        );
        assert!(fence.owner.fence() > 0);
        let (outer, fence) = &mut contenders[0];
        assert!(outer.release(*fence, soon()).unwrap());
        granted(&mut *long_seat(&factory, &salt, "b"), OnRefusal::Leave);
        for bad in ["/a", "a/", "a//b", ".", "a/..", "a/latch-0000000001"] {
            let error = factory.contend(bad).build().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{bad}");
            assert!(error.to_string().contains("such as a or a/b"), "{error}");
            assert!(factory.observe(bad).build().is_err(), "{bad}");
        }
    });
}

#[test]
fn contender_need_not_be_allowed_to_create_above() {
    within(HANG, || {
        let chroot = format!("/{}", name("narrow"));
        let operator = builder(SERVER.addr(), LONG).digest("operator", "s3cret");
        let operator = operator.session().unwrap();
        operator
            .create_for(CREATOR, &chroot, b"", Mode::Persistent, soon())
            .unwrap();
        let guest = builder(SERVER.addr(), LONG)
            .chroot(&chroot)
            .build()
            .unwrap();
        let mut contender = long_seat(&guest, "demo", "guest");
        let error = contender.acquire(OnRefusal::Leave, soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
        operator
            .create(&format!("{chroot}/simba"), b"", Mode::Persistent, soon())
            .unwrap();
        granted(&mut *contender, OnRefusal::Leave);
    });
}

#[test]
fn lease_beyond_the_session_is_refused() {
    within(HANG, || {
        let factory = factory(SERVER.addr(), T);
        for (ttl, transition) in [(3_000, 100), (1_000, 1_600)] {
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
        let mut contender = contender(&factory, &name("lease"), "a", lease, Purpose::Lead);
        let before = Moment::now();
        let grant = granted(&mut *contender, OnRefusal::Leave);
        let until = grant.until.unwrap();
        assert!(until > before && until <= Moment::now() + lease.ttl());
    });
}

/// A lease that the server would cut short is no lease: the limit is named.
#[test]
fn shorter_session_is_refused() {
    within(HANG, || {
        let server = ZooKeeperServer::start_with(&["maxSessionTimeout=2000"], &[]);
        let long = factory(server.addr(), Duration::from_secs(20));
        let error = long_seat(&long, "m", "a")
            .acquire(OnRefusal::Leave, soon())
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Misconfigured, "{error}");
        assert!(error.to_string().contains("2s at most"), "{error}");
        let fits = factory(server.addr(), Duration::from_secs(2));
        granted(&mut *long_seat(&fits, "m", "a"), OnRefusal::Leave);
        // The sessions that were refused were closed at once: each attempt leaves none behind.
        drop(long);
        wait_until(PATIENCE, "one session is left", || {
            let dump = server.four_letter("dump").unwrap();
            dump.lines().filter(|line| line.starts_with("0x")).count() <= 1
        });
    });
}

/// `/simba` itself does not belong to the first user.
#[test]
fn users_share_the_root_and_not_a_mutex() {
    within(HANG, || {
        let chroot = format!("/{}", name("users"));
        let user = |user: &str| {
            builder(SERVER.addr(), LONG)
                .chroot(&chroot)
                .digest(user, "s3cret")
                .build()
                .unwrap()
        };
        let (one, two) = (user("one"), user("two"));
        granted(&mut *long_seat(&one, "ones", "a"), OnRefusal::Leave);
        granted(&mut *long_seat(&two, "twos", "a"), OnRefusal::Leave);
        let error = long_seat(&two, "ones", "b")
            .acquire(OnRefusal::Leave, soon())
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    });
}

/// Answers whatever it is asked with `answer`, and closes the connection.
fn stranger(answer: &'static [u8]) -> std::net::SocketAddr {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let mut client = client.unwrap();
            let _ = std::io::Read::read(&mut client, &mut [0; 1024]);
            let _ = std::io::Write::write_all(&mut client, answer);
        }
    });
    address
}

/// What answers or closes the connection is known at once, however long a handshake may take. One that closes it
/// may be a ZooKeeper server that has no quorum; one that says something else is none, and is not tried again.
#[test]
fn server_of_another_kind_is_known_at_once() {
    within(HANG, || {
        let http = stranger(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n");
        let closes = "closed the connection without an answer; it does not serve now, or is not a \
                      ZooKeeper server";
        let asks = "is this a ZooKeeper server?";
        for (address, kind, says) in [
            (stranger(b""), ErrorKind::Unreachable, closes),
            (http, ErrorKind::Protocol, asks),
        ] {
            // A quarter of it is the time for a handshake.
            let ours = factory(address, HANG * 4);
            let began = Moment::now();
            let ping = ours.ping(PATIENCE).unwrap_err();
            let tried = ours.locker("m").build().unwrap().try_lock();
            assert!(Moment::now() - began < PATIENCE / 2, "{ping}");
            for error in [ping, tried.map(drop).unwrap_err()] {
                assert_eq!(error.kind(), kind, "{error}");
                let text = error.to_string();
                assert!(text.contains(says), "{text}");
                assert!(text.contains(&address.to_string()), "{text}");
            }
        }
    });
}
