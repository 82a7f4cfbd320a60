//! `?replicas=N`: a grant counts once so many replicas have it.

use contend::backend::{Attempt, OnRefusal};
use contend::redis::Builder;
use contend::{ErrorKind, Factory, Lease, Moment};
use testbed::{RedisServer, wait_until, within};

use crate::driven::{Driven, HANG, PATIENCE, ms};

/// A master, two replicas that keep up with it, and a factory that asks for both.
fn two_replicas() -> (RedisServer, [RedisServer; 2], Factory) {
    let master = RedisServer::start();
    let port = master.port().to_string();
    let replica = || RedisServer::start_with(&["--replicaof", "127.0.0.1", &port]);
    let replicas = [replica(), replica()];
    wait_until(PATIENCE, "both keep up", || {
        master.cli(&["WAIT", "2", "100"]).trim() == "2"
            && master
                .cli(&["INFO", "replication"])
                .matches("state=online")
                .count()
                == 2
    });
    let builder = Builder::new(master.addr().to_string()).replicas(2);
    (master, replicas, builder.build().unwrap())
}

fn short() -> Lease {
    Lease::new(ms(4_000), ms(2_000)).unwrap()
}

#[test]
fn grant_counts_once_the_replicas_have_it() {
    within(HANG, || {
        let (master, replicas, factory) = two_replicas();
        let mut contender = Driven::with(&factory, "m", "a", short());
        let fence = contender.own();
        for replica in &replicas {
            assert_eq!(replica.cli(&["GET", "simba:{m}"]).trim(), "a");
        }
        contender.release(fence);
        replicas[0].pause();
        // Refused in the time of one request, and given back.
        let began = Moment::now();
        let by = began + short().request_limit();
        let refusal = match contender.raw.acquire(OnRefusal::Enqueue, by).unwrap() {
            Attempt::Refused(refusal) => refusal,
            Attempt::Granted(grant) => panic!("one replica is paused: {grant:?}"),
        };
        assert!(
            Moment::now() < by + ms(500),
            "it took {:?}",
            Moment::now() - began
        );
        assert!(!refusal.owner.has_owner() && refusal.retry_in > ms(0));
        assert_eq!(master.cli(&["EXISTS", "simba:{m}"]).trim(), "0");
        replicas[0].resume();
        let later = contender.owns_within(PATIENCE).owner.fence();
        assert!(later > fence);
    });
}

/// Off, it asks nothing, and takes no right to `WAIT`.
#[test]
fn replicas_are_not_asked_unless_wanted() {
    within(HANG, || {
        let server = RedisServer::start();
        let waits = || {
            server
                .cli(&["INFO", "commandstats"])
                .contains("cmdstat_wait:")
        };
        let plain = contend::connect(&server.url()).unwrap();
        let mut contender = Driven::at(&plain, "m", "a");
        let fence = contender.own();
        contender.release(fence);
        assert!(!waits());
        let asking = contend::connect(&format!("{}?replicas=1", server.url())).unwrap();
        let by = Moment::now() + ms(4_000);
        let refused = Driven::at(&asking, "m", "a")
            .raw
            .acquire(OnRefusal::Leave, by);
        assert!(
            matches!(refused, Ok(Attempt::Refused(_))),
            "no replica: {refused:?}"
        );
        assert!(waits());
        let locker = asking.locker("m").build().unwrap();
        let locked = locker.try_lock_for(ms(100)).map(drop);
        assert_eq!(locked.unwrap_err().kind(), ErrorKind::Held);
    });
}
