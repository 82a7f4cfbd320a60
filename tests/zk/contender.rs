//! The latch: what stands in the tree, who is woken, and what becomes of nodes without a holder.

use std::sync::{Arc, LazyLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::support::{
    HANG, PATIENCE, Verbs, contender, factory, granted, line, long_seat, name, refused, session,
    soon, woken_seat,
};
use contend::backend::{Attempt, OnRefusal, Purpose, Renewal};
use contend::{ErrorKind, Moment, Unparked};
use testbed::{Proxy, ZooKeeperServer, wait_until, within};

static SERVER: LazyLock<ZooKeeperServer> = LazyLock::new(ZooKeeperServer::start);

const T: Duration = Duration::from_secs(3);
/// So long that nothing here can be explained by a retry or an expiry.
const LONG: Duration = Duration::from_secs(50);

#[test]
fn tree_is_curators() {
    within(HANG, || {
        let mutex = name("layout");
        let factory = factory(SERVER.addr(), LONG);
        let reader = session(SERVER.addr(), LONG);
        let mut contender = long_seat(&factory, &mutex, "contender-1");
        let grant = granted(&mut *contender, OnRefusal::Enqueue);
        let names = line(&reader, &mutex);
        let [node] = names.as_slice() else {
            panic!("{names:?}");
        };
        let (uuid, rest) = node.strip_prefix("_c_").unwrap().split_at(36);
        assert!(uuid.chars().all(|c| c.is_ascii_hexdigit() || c == '-'));
        assert_eq!(rest, "-latch-0000000000");
        let path = format!("/simba/{mutex}/{node}");
        let (data, stat) = reader.get_data(&path, soon()).unwrap();
        assert_eq!(data, b"contender-1");
        assert_ne!(stat.ephemeral_owner, 0);
        assert_eq!(grant.owner.fence(), stat.czxid);
        assert_eq!(grant.owner.acquired_at(), stat.ctime);
        assert!(grant.until.unwrap() > Moment::now());
        assert!(grant.until.unwrap() < Moment::now() + LONG);
        assert!(contender.release(grant.owner.fence(), soon()).unwrap());
        assert!(!contender.release(grant.owner.fence(), soon()).unwrap());
        assert!(line(&reader, &mutex).is_empty());
    });
}

#[test]
fn release_wakes_the_next_alone() {
    within(HANG, || {
        let mutex = name("herd");
        let factories = [factory(SERVER.addr(), LONG), factory(SERVER.addr(), LONG)];
        let mut owner = long_seat(&factories[0], &mutex, "owner");
        let mut fence = granted(&mut *owner, OnRefusal::Enqueue).owner.fence();
        let mut waiters: Vec<_> = (0..6)
            .map(|number| {
                let id = format!("w{number}");
                let (mut contender, parker) = woken_seat(&factories[number % 2], &mutex, &id);
                assert_eq!(
                    refused(&mut *contender, OnRefusal::Enqueue).owner_id(),
                    "owner"
                );
                (contender, parker)
            })
            .collect();
        while !waiters.is_empty() {
            owner.release(fence, soon()).unwrap();
            let (mut next, parker) = waiters.remove(0);
            assert_eq!(parker.park(soon()), Unparked::Wake);
            let grant = granted(&mut *next, OnRefusal::Enqueue);
            assert!(grant.owner.fence() > fence);
            for (_, parker) in &waiters {
                assert_eq!(parker.park(Moment::now()), Unparked::Timeout);
            }
            owner = next;
            fence = grant.owner.fence();
        }
    });
}

/// Its contender goes to the end of the line.
#[test]
fn ghost_of_an_unanswered_attempt_is_deleted() {
    within(HANG, || {
        let mutex = name("ghost");
        let proxy = Proxy::to(SERVER.addr());
        let factory = factory(proxy.addr(), LONG);
        let reader = session(SERVER.addr(), LONG);
        // The parents, so that the next request is the creation.
        let mut first = long_seat(&factory, &mutex, "first");
        let fence = granted(&mut *first, OnRefusal::Leave).owner.fence();
        first.release(fence, soon()).unwrap();

        let (mut contender, parker) = woken_seat(&factory, &mutex, "a");
        proxy.lose_reply_to(b"latch-");
        let error = contender.acquire(OnRefusal::Enqueue, soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
        let ghost = line(&reader, &mutex);
        assert_eq!(ghost.len(), 1, "the creation got through");
        let grant = loop {
            match contender.acquire(OnRefusal::Enqueue, soon()).unwrap() {
                Attempt::Granted(grant) => break grant,
                // It stands behind its ghost, and is woken when that goes.
                Attempt::Refused(_) => assert_eq!(parker.park(soon()), Unparked::Wake),
            }
        };
        let left = line(&reader, &mutex);
        assert!(left.len() == 1 && left != ghost, "{left:?}");
        assert!(grant.owner.fence() > fence);
    });
}

#[test]
fn renewal_tells_a_holder_of_its_deleted_node() {
    within(HANG, || {
        let mutex = name("short");
        let factory = factory(SERVER.addr(), LONG);
        let operator = session(SERVER.addr(), LONG);
        let mut contender = contender(&factory, &mutex, "a", factory.lease(), Purpose::Lock);
        let fence = granted(&mut *contender, OnRefusal::Leave).owner.fence();
        assert!(matches!(
            contender.renew(fence, soon()).unwrap(),
            Renewal::Renewed(_)
        ));
        let node = line(&operator, &mutex).remove(0);
        operator
            .delete(&format!("/simba/{mutex}/{node}"), soon())
            .unwrap();
        wait_until(PATIENCE, "the renewal tells", || {
            matches!(contender.renew(fence, soon()).unwrap(), Renewal::Lost(_))
        });
    });
}

#[test]
fn deleted_waiter_stands_in_line_again() {
    within(HANG, || {
        let mutex = name("middle");
        let factories = [(); 3].map(|()| factory(SERVER.addr(), LONG));
        let operator = session(SERVER.addr(), LONG);
        let services: Vec<_> = factories
            .iter()
            .enumerate()
            .map(|(number, factory)| {
                let id = format!("s{number}");
                let service = factory.contend(&mutex).id(&id).build().unwrap();
                service.start().unwrap();
                wait_until(PATIENCE, "it is in line", || {
                    line(&operator, &mutex).len() == number + 1
                });
                service
            })
            .collect();
        wait_until(PATIENCE, "the first leads", || services[0].is_owner());
        let mut nodes = line(&operator, &mutex);
        nodes.sort_by_key(|node| node.rsplit('-').next().map(str::to_owned));
        operator
            .delete(&format!("/simba/{mutex}/{}", nodes[1]), soon())
            .unwrap();
        wait_until(PATIENCE, "the second is in line again", || {
            let now = line(&operator, &mutex);
            now.len() == 3 && !now.contains(&nodes[1])
        });
        assert!(services[0].is_owner() && !services[1].is_owner() && !services[2].is_owner());
        services[0].stop().unwrap();
        wait_until(PATIENCE, "the third comes before the second now", || {
            services[2].is_owner()
        });
        services[2].stop().unwrap();
        wait_until(PATIENCE, "the second leads", || services[1].is_owner());
    });
}

#[test]
fn reaped_mutex_is_made_again() {
    within(HANG, || {
        let server = ZooKeeperServer::start_with(&[], &["-Dznode.container.checkIntervalMs=100"]);
        let reader = session(server.addr(), LONG);
        let factory = factory(server.addr(), LONG);
        let service = factory.contend("reaped").id("a").build().unwrap();
        let (observer, _seen) = factory.observe("reaped").channel().unwrap();
        observer.start().unwrap();
        let mut last = 0;
        for _ in 0..3 {
            service.start().unwrap();
            wait_until(PATIENCE, "it leads", || service.is_owner());
            assert!(service.fence().unwrap() > last);
            last = service.fence().unwrap();
            wait_until(PATIENCE, "the observer sees it", || {
                observer.state().after().is_owner("a")
            });
            service.stop().unwrap();
            wait_until(PATIENCE, "the server has tidied up", || {
                reader.exists("/simba", soon()).unwrap().is_none()
            });
            wait_until(PATIENCE, "the observer sees no owner", || {
                !observer.state().after().has_owner()
            });
        }
    });
}

#[test]
fn waiter_is_woken_when_the_connection_goes_and_comes() {
    within(HANG, || {
        let mutex = name("away");
        let proxy = Proxy::to(SERVER.addr());
        let (near, far) = (factory(SERVER.addr(), LONG), factory(proxy.addr(), LONG));
        let mut owner = long_seat(&near, &mutex, "owner");
        let fence = granted(&mut *owner, OnRefusal::Enqueue).owner.fence();
        let (mut waiter, parker) = woken_seat(&far, &mutex, "waiter");
        refused(&mut *waiter, OnRefusal::Enqueue);
        proxy.refuse();
        proxy.cut();
        // Long before the retry: its service learns that the server is away.
        assert_eq!(parker.park(soon()), Unparked::Wake);
        waiter.acquire(OnRefusal::Enqueue, soon()).unwrap_err();
        owner.release(fence, soon()).unwrap();
        assert_eq!(parker.park(Moment::now()), Unparked::Timeout);
        proxy.pass();
        // Long before the session or the retry would explain it.
        assert_eq!(parker.park(soon()), Unparked::Wake);
        granted(&mut *waiter, OnRefusal::Enqueue);
    });
}

#[test]
fn services_contend_again_after_their_session_expired() {
    within(HANG, || {
        let proxy = Proxy::to(SERVER.addr());
        let far = factory(proxy.addr(), T);
        let reader = session(SERVER.addr(), LONG);
        let mutexes: Vec<String> = (0..10).map(|_| name("expired")).collect();
        let services: Vec<_> = mutexes
            .iter()
            .flat_map(|mutex| ["a", "b"].map(|id| far.contend(mutex).id(id).build().unwrap()))
            .collect();
        for pair in services.chunks(2) {
            pair[0].start().unwrap();
            wait_until(PATIENCE, "the first leads", || pair[0].is_owner());
            pair[1].start().unwrap();
        }
        let (observer, _seen) = far.observe(&mutexes[0]).channel().unwrap();
        observer.start().unwrap();
        wait_until(PATIENCE, "two are in each line", || {
            mutexes.iter().all(|mutex| line(&reader, mutex).len() == 2)
        });
        let fences: Vec<_> = services.iter().map(|service| service.fence()).collect();
        proxy.refuse();
        proxy.cut();
        wait_until(PATIENCE, "the session is over", || {
            mutexes.iter().all(|mutex| line(&reader, mutex).is_empty())
        });
        assert!(services.iter().all(|service| !service.is_owner()));
        proxy.pass();
        wait_until(PATIENCE, "each mutex has a new leader and a waiter", || {
            services
                .chunks(2)
                .zip(fences.chunks(2))
                .all(|(pair, before)| pair[0].fence().max(pair[1].fence()) > before[0])
                && mutexes.iter().all(|mutex| line(&reader, mutex).len() == 2)
        });
        wait_until(PATIENCE, "the observer sees a leader", || {
            observer.state().after().has_owner()
        });
    });
}

/// A run that another host recorded is as old as the servers say: where its wall clock is behind ours, the
/// next run would begin early, and again with every leader that comes after it.
#[test]
fn a_wall_clock_behind_ours_does_not_make_a_run_look_old() {
    within(HANG, || {
        let mutex = name("clocks");
        let factory = factory(SERVER.addr(), LONG);
        let mut contender = long_seat(&factory, &mutex, "a");
        let fence = granted(&mut *contender, OnRefusal::Enqueue).owner.fence();
        let keep = Duration::from_secs(3_600);
        let (backend, mutex) = (factory.backend().unwrap(), Arc::from(mutex));
        assert!(!backend.record_run(&mutex, fence + 1, keep, soon()).unwrap());
        assert_eq!(backend.last_run(&mutex, soon()).unwrap(), None);
        assert!(backend.record_run(&mutex, fence, keep, soon()).unwrap());
        let address = SERVER.addr().to_string();
        let writer = zookeeper::ZooKeeper::connect(&address, LONG, |_| {}).unwrap();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        for (theirs, what) in [(now - keep, "behind"), (now + keep, "ahead")] {
            let data = theirs.as_millis().to_string().into_bytes();
            let path = format!("/simba/{mutex}");
            writer.set_data(&path, data, None).unwrap();
            let age = backend.last_run(&mutex, soon()).unwrap().unwrap();
            assert!(age < HANG, "written by a clock that is {what}: {age:?}");
        }
    });
}
