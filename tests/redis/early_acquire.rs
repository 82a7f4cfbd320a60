//! The acquisition of a sleeping waiter is sent by whoever hears that its turn has come: what that
//! changes for the waiter, and what it must not change for anybody else.

use std::thread;
use std::time::Duration;

use contend::backend::{Attempt, Contender, Grant, OnRefusal, Purpose, RawContender};
use contend::redis::Builder;
use contend::{Factory, Lease, Moment, Parker, Unparked};
use testbed::{Proxy, RedisServer, wait_until, within};

const PATIENCE: Duration = Duration::from_secs(40);
const HANG: Duration = Duration::from_secs(120);

fn soon() -> Moment {
    Moment::now() + Duration::from_secs(20)
}

fn contender(factory: &Factory, id: &str, parker: &Parker) -> Box<dyn RawContender> {
    let place = Contender {
        mutex: "m".into(),
        id: id.into(),
        lease: Lease::default(),
        purpose: Purpose::Lock,
    };
    let backend = factory.backend().unwrap();
    backend.contender(&place, &parker.unparker()).unwrap()
}

fn granted(attempt: contend::Result<Attempt>) -> Grant {
    match attempt.unwrap() {
        Attempt::Granted(grant) => grant,
        Attempt::Refused(refusal) => panic!("refused: {refusal:?}"),
    }
}

/// An owner and a waiter on one server, the waiter's connections through a proxy.
struct Pair {
    server: RedisServer,
    proxy: Proxy,
    owner: Box<dyn RawContender>,
    fence: u64,
    waiter: Box<dyn RawContender>,
    parker: Parker,
}

impl Pair {
    fn new() -> Pair {
        let server = RedisServer::start();
        let proxy = Proxy::to(server.addr());
        let factory = |address: String| Builder::new(address).build().unwrap();
        let mut owner = contender(&factory(server.addr().to_string()), "owner", &Parker::new());
        let fence = granted(owner.acquire(OnRefusal::Leave, soon()))
            .owner
            .fence();
        let parker = Parker::new();
        let mut waiter = contender(&factory(proxy.addr().to_string()), "waiter", &parker);
        let attempt = waiter.acquire(OnRefusal::Enqueue, soon()).unwrap();
        assert!(matches!(attempt, Attempt::Refused(_)), "{attempt:?}");
        Pair {
            server,
            proxy,
            owner,
            fence,
            waiter,
            parker,
        }
    }

    /// Releases while the waiter sleeps. It is up again afterwards, and has done nothing yet.
    fn hand_over(&mut self) {
        thread::scope(|scope| {
            let parker = &self.parker;
            let sleeper = scope.spawn(|| parker.park(Moment::now() + PATIENCE));
            assert!(self.owner.release(self.fence, soon()).unwrap());
            assert_eq!(sleeper.join().unwrap(), Unparked::Wake);
        });
    }

    /// Who owns; nobody where the mutex is only handed over.
    fn in_the_mutex(&self) -> String {
        let seen = self.server.cli(&["MGET", "simba:{m}", "simba:{m}:token"]);
        match seen.lines().collect::<Vec<_>>().as_slice() {
            [_, "0"] | [] => String::new(),
            [owner, ..] => (*owner).to_owned(),
        }
    }

    fn wait_for(&self, owner: &str) {
        wait_until(PATIENCE, "the server has the attempt", || {
            self.in_the_mutex() == owner
        });
    }
}

/// Rule 1: belief is counted from before the request was sent, and that was before the call.
#[test]
fn a_sleeping_waiter_owns_at_once_and_believes_from_when_that_was_asked_for() {
    within(HANG, || {
        let mut pair = Pair::new();
        pair.hand_over();
        pair.wait_for("waiter");
        // Time itself is the subject: so much of the lease is gone when the waiter comes for it.
        thread::sleep(Duration::from_millis(700));
        let began = Moment::now();
        let grant = granted(pair.waiter.acquire(OnRefusal::Enqueue, soon()));
        let believed = grant.until.expect("not from this call") - began;
        let most = Lease::default().belief() - Duration::from_millis(650);
        assert!(believed < most, "{believed:?}");
        let fence = grant.owner.fence();
        assert!(fence > pair.fence);
        assert!(pair.waiter.release(fence, soon()).unwrap());
        // What comes next is an ordinary attempt.
        let grant = granted(pair.waiter.acquire(OnRefusal::Enqueue, soon()));
        assert!(grant.until.is_none() && grant.owner.fence() > fence);
    });
}

/// Whoever leaves in that very moment owns without knowing it, and must not keep it.
#[test]
fn a_waiter_that_withdraws_gives_back_what_was_acquired_for_it() {
    within(HANG, || {
        let mut pair = Pair::new();
        pair.hand_over();
        pair.wait_for("waiter");
        pair.waiter.withdraw(soon()).unwrap();
        assert_eq!(pair.in_the_mutex(), "");
        granted(pair.owner.acquire(OnRefusal::Leave, soon()));
    });
}

/// Rule 5: a lost reply leaves a ghost, which is adopted.
#[test]
fn a_lost_reply_to_it_is_a_failed_attempt_and_the_next_one_adopts() {
    within(HANG, || {
        let mut pair = Pair::new();
        pair.proxy.lose_reply_to(b"EVALSHA");
        pair.hand_over();
        pair.wait_for("waiter");
        assert!(pair.waiter.acquire(OnRefusal::Enqueue, soon()).is_err());
        assert_eq!(pair.proxy.lost_replies(), 1);
        let grant = granted(pair.waiter.acquire(OnRefusal::Enqueue, soon()));
        assert!(grant.owner.fence() > pair.fence && grant.until.is_none());
    });
}

#[test]
fn a_server_that_forgot_the_script_gets_it_again() {
    within(HANG, || {
        let mut pair = Pair::new();
        pair.server.cli(&["SCRIPT", "FLUSH"]);
        pair.hand_over();
        let grant = granted(pair.waiter.acquire(OnRefusal::Enqueue, soon()));
        assert!(grant.owner.fence() > pair.fence);
        assert_eq!(pair.in_the_mutex(), "waiter");
    });
}

/// A place in the queue, a connection: all of it is left to be used by others.
#[test]
fn a_seat_that_is_dropped_with_a_reply_to_come_poisons_no_connection() {
    within(HANG, || {
        let server = RedisServer::start();
        let factory = Builder::new(server.addr().to_string()).pool_size(1);
        let factory = factory.build().unwrap();
        let other = Builder::new(server.addr().to_string()).build().unwrap();
        let mut owner = contender(&other, "owner", &Parker::new());
        for round in 0..5 {
            let fence = granted(owner.acquire(OnRefusal::Leave, soon()))
                .owner
                .fence();
            let id = format!("waiter-{round}");
            let parker = Parker::new();
            let mut waiter = contender(&factory, &id, &parker);
            waiter.acquire(OnRefusal::Enqueue, soon()).unwrap();
            // What was under way to the waiter of the last round.
            while parker.park(Moment::now() + Duration::from_millis(100)) == Unparked::Wake {}
            thread::scope(|scope| {
                let sleeper = scope.spawn(|| parker.park(Moment::now() + PATIENCE));
                assert!(owner.release(fence, soon()).unwrap());
                assert_eq!(sleeper.join().unwrap(), Unparked::Wake);
            });
            drop(waiter);
            // The same id comes again, on whatever connection there is, and adopts.
            let mut again = contender(&factory, &id, &Parker::new());
            let grant = granted(again.acquire(OnRefusal::Leave, soon()));
            assert!(again.release(grant.owner.fence(), soon()).unwrap());
        }
    });
}
