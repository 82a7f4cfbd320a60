//! Turn-taking with a client that does by hand what Curator's LeaderLatch does.

use std::sync::LazyLock;
use std::time::Duration;

use crate::support::{
    HANG, PATIENCE, Verbs, factory, granted, line, name, refused, session, soon, woken_seat,
};
use contend::zk::{Mode, Request, Session};
use contend::{Moment, Unparked, backend::OnRefusal};
use testbed::{ZooKeeperServer, wait_until, within};

static SERVER: LazyLock<ZooKeeperServer> = LazyLock::new(ZooKeeperServer::start);

const LONG: Duration = Duration::from_secs(50);

/// Makes Curator's node, below a mutex that is there.
fn enter(peer: &Session, mutex: &str, id: &str) -> String {
    let node = format!("/simba/{mutex}/_c_0b6e7a2c-6c1f-4f0e-9f43-0c2f5a2d7e11-latch-");
    let made = peer.create(&node, id.as_bytes(), Mode::EphemeralSequential, soon());
    made.unwrap().0
}

/// A session, and a mutex without a contender.
fn peer(fact: &str) -> (Session, String) {
    let (peer, mutex) = (session(SERVER.addr(), LONG), name(fact));
    for path in ["/simba".to_owned(), format!("/simba/{mutex}")] {
        // Another test may have made it.
        let _ = peer.create(&path, b"", Mode::Persistent, soon());
    }
    (peer, mutex)
}

#[test]
fn leadership_passes_both_ways() {
    within(HANG, || {
        let (peer, mutex) = peer("turns");
        let ours = factory(SERVER.addr(), LONG);
        let service = ours.contend(&mutex).id("ours").build().unwrap();
        let (observer, _seen) = ours.observe(&mutex).channel().unwrap();
        observer.start().unwrap();
        let mut last = 0;
        let mut theirs = enter(&peer, &mutex, "theirs");
        for _ in 0..10 {
            service.start().unwrap();
            wait_until(PATIENCE, "ours sees theirs lead", || {
                service.state().after().is_owner("theirs")
                    && observer.state().after().is_owner("theirs")
            });
            assert!(!service.is_owner());
            peer.delete(&theirs, soon()).unwrap();
            wait_until(PATIENCE, "ours leads", || service.is_owner());
            assert!(service.fence().unwrap() > last);
            last = service.fence().unwrap();
            theirs = enter(&peer, &mutex, "theirs");
            wait_until(PATIENCE, "the observer sees ours", || {
                observer.state().after().is_owner("ours")
            });
            service.stop().unwrap();
            assert_eq!(line(&peer, &mutex).len(), 1, "theirs is next");
        }
    });
}

#[test]
fn written_node_makes_no_waiter_lead() {
    within(HANG, || {
        let (peer, mutex) = peer("writes");
        let node = enter(&peer, &mutex, "theirs");
        let factory = factory(SERVER.addr(), LONG);
        let (mut contender, parker) = woken_seat(&factory, &mutex, "ours");
        let owner = refused(&mut *contender, OnRefusal::Enqueue);
        assert_eq!(owner.owner_id(), "theirs");
        let write = Request::Multi {
            check: node.clone(),
            write: Some((node.clone(), b"still theirs".to_vec())),
        };
        peer.done(write, soon()).unwrap();
        // The watch is used up: that rings, but is no reason to lead.
        assert_eq!(parker.park(soon()), Unparked::Wake);
        let owner = refused(&mut *contender, OnRefusal::Enqueue);
        assert_eq!(owner.owner_id(), "still theirs");
        assert_eq!(parker.park(Moment::now()), Unparked::Timeout);
        peer.delete(&node, soon()).unwrap();
        assert_eq!(parker.park(soon()), Unparked::Wake);
        granted(&mut *contender, OnRefusal::Enqueue);
    });
}
