//! What a contender leaves behind that did not go in an orderly way.

use std::time::{Duration, Instant};

use crate::support::{
    HANG, PATIENCE, Verbs, contender, factory, granted, line, long_seat, name, refused, session,
    soon,
};
use contend::backend::{OnRefusal, Purpose};
use contend::{ErrorKind, Lease, Moment};
use testbed::{Direction, Proxy, ZooKeeperEnsemble, ZooKeeperServer, wait_until, within};
use zookeeper::{Acl, Permission, ZooKeeper};

/// So long that nothing here can be explained by an expiry.
const LONG: Duration = Duration::from_secs(50);
const T: Duration = Duration::from_secs(3);

/// An owner that could not renew has the transition to wind down in. It asked again meanwhile, stands behind its own
/// past, and is stopped then: its callback may still be at work, so no other contender may lead before its time.
#[test]
fn node_of_a_past_ownership_stays_until_its_lease_ends() {
    within(HANG, || {
        let server = ZooKeeperServer::start();
        let mutex = name("winds-down");
        let reader = session(server.addr(), LONG);
        let (ours, theirs) = (factory(server.addr(), LONG), factory(server.addr(), LONG));
        let lease = Lease::new(Duration::from_millis(200), Duration::from_secs(15)).unwrap();
        let mut owner = contender(&ours, &mutex, "owner", lease, Purpose::Lead);
        let until = granted(&mut *owner, OnRefusal::Enqueue).until.unwrap();
        let node = line(&reader, &mutex);
        wait_until(PATIENCE, "its belief has ended", || until < Moment::now());
        refused(&mut *owner, OnRefusal::Enqueue);
        assert_eq!(line(&reader, &mutex).len(), 2);
        owner.withdraw(soon()).unwrap();
        drop(owner);
        // One that this machine kept from its work for the whole transition shows nothing.
        if Moment::now() < until + lease.transition() - Duration::from_secs(5) {
            assert_eq!(line(&reader, &mutex), node);
            refused(&mut *long_seat(&theirs, &mutex, "other"), OnRefusal::Leave);
        }
        wait_until(PATIENCE, "the lease is over", || {
            line(&reader, &mutex).is_empty()
        });
        assert!(until + lease.transition() <= Moment::now());
    });
}

/// The creation is still on its way when its contender has given up, the connection is lost, and the
/// session has been taken up over another one, where nothing is found to clean up. What arrives after
/// that makes no node: a server that takes a session up ends the connection it had before, and one that
/// hears of it from elsewhere says that the session has moved.
#[test]
fn late_creation_leaves_no_ghost() {
    within(HANG * 2, || {
        let alone = ZooKeeperServer::start();
        let ensemble = ZooKeeperEnsemble::start();
        let (one, other) = (ensemble.node(0).addr(), ensemble.node(1).addr());
        for (here, there) in [(alone.addr(), alone.addr()), (one, other), (other, one)] {
            let (near, far) = (Proxy::to(here), Proxy::to(there));
            far.refuse();
            let mutex = name("late");
            let ours = factory(format!("{},{}", near.addr(), far.addr()), T);
            let reader = session(here, LONG);
            let mut contender = long_seat(&ours, &mutex, "a");
            // The parents, so that the next request is the creation.
            let fence = granted(&mut *contender, OnRefusal::Leave).owner.fence();
            contender.release(fence, soon()).unwrap();

            near.black_hole(Direction::ToServer);
            let by = Moment::now() + Duration::from_millis(50);
            let error = contender.acquire(OnRefusal::Leave, by).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
            contender.withdraw(by).unwrap();
            far.pass();
            let mut elsewhere = long_seat(&ours, &name("elsewhere"), "a");
            wait_until(PATIENCE, "another connection serves the session", || {
                elsewhere.acquire(OnRefusal::Leave, soon()).is_ok()
            });
            // Over that connection the search for the ghost was answered before the attempt was.
            let before = near.bytes_to_server();
            near.pass();
            wait_until(PATIENCE, "what was held has arrived", || near.live() == 0);
            println!("{} bytes came late", near.bytes_to_server() - before);
            // The same way as the late creation took, and behind it.
            reader.sync(soon()).unwrap();
            assert_eq!(line(&reader, &mutex), Vec::<String>::new());
        }
    });
}

/// An operator takes away the right to delete the nodes of a mutex, and gives it back. Meanwhile neither the node with
/// which an owner stepped down nor the one behind it is forgotten: only this session would ever remove them.
#[test]
fn refused_deletions_are_made_up_for() {
    within(HANG, || {
        let server = ZooKeeperServer::start();
        let mutex = name("may-not");
        let reader = session(server.addr(), LONG);
        let ours = factory(server.addr(), LONG);
        let lease = Lease::new(Duration::from_millis(200), Duration::from_secs(1)).unwrap();
        let mut owner = contender(&ours, &mutex, "owner", lease, Purpose::Lead);
        let until = granted(&mut *owner, OnRefusal::Enqueue).until.unwrap();
        let stale = line(&reader, &mutex);
        let operator = ZooKeeper::connect(&server.addr().to_string(), LONG, |_| {}).unwrap();
        let allow = |permissions: Permission| {
            let acl = vec![Acl::new(permissions, "world", "anyone")];
            let path = format!("/simba/{mutex}");
            operator.set_acl(&path, acl, None).unwrap();
        };
        allow(Permission::READ | Permission::CREATE | Permission::ADMIN);
        let over = until + lease.transition();
        wait_until(PATIENCE, "its lease is over", || over < Moment::now());
        // It stands behind its own past, and waits for that to go.
        refused(&mut *owner, OnRefusal::Enqueue);
        let error = owner.withdraw(soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
        let both = line(&reader, &mutex);
        assert!(both.len() == 2 && both.contains(&stale[0]), "{both:?}");
        allow(Permission::ALL);
        wait_until(PATIENCE, "both nodes go", || {
            line(&reader, &mutex).is_empty()
        });
    });
}

/// Neither the attempt nor the way out is answered, but the server makes the node when it goes on. The
/// session lives, and so does the locker: only the locker can take it away.
#[test]
fn unanswered_try_blocks_no_later_one() {
    within(HANG, || {
        let server = ZooKeeperServer::start();
        let (ours, theirs) = (factory(server.addr(), LONG), factory(server.addr(), LONG));
        let mutex = name("ghost");
        let short = |factory: &contend::Factory| {
            let locker = factory.locker(&mutex).ttl(Duration::from_secs(2));
            locker.build().unwrap()
        };
        let (ours, theirs) = (short(&ours), short(&theirs));
        // Connected, and the parents are there.
        drop(ours.try_lock_for(PATIENCE).unwrap());
        drop(theirs.try_lock_for(PATIENCE).unwrap());

        server.pause();
        let failed = ours.try_lock().unwrap_err();
        println!("not locked: {failed}");
        server.resume();
        let began = Instant::now();
        let guard = theirs
            .try_lock_for(LONG / 2)
            .expect("no ghost of the attempt is left");
        println!("locked by the other after {:?}", began.elapsed());
        guard.unlock().unwrap();
        drop(ours.try_lock_for(PATIENCE).unwrap());
    });
}
