//! The acquisition of a sleeping waiter is sent by whoever hears that its turn has come: what that
//! changes for the waiter, and what it must not change for anybody else.

#![cfg(feature = "redis")]

use std::thread;
use std::time::Duration;

use contend::backend::{Attempt, Entry, Grant, Hold, Place, Seat};
use contend::redis::Builder;
use contend::{Bell, Factory, Lease, Moment, Ring};
use ground::{Proxy, RedisServer, wait_until, within};

const PATIENCE: Duration = Duration::from_secs(40);
const HANG: Duration = Duration::from_secs(120);

fn soon() -> Moment {
    Moment::now() + Duration::from_secs(20)
}

fn seat(factory: &Factory, id: &str) -> Box<dyn Seat> {
    let place = Place {
        mutex: "m".into(),
        id: id.into(),
        lease: Lease::default(),
        hold: Hold::Short,
    };
    factory.backend().unwrap().seat(&place).unwrap()
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
    owner: Box<dyn Seat>,
    fence: u64,
    waiter: Box<dyn Seat>,
    bell: Bell,
}

impl Pair {
    fn new() -> Pair {
        let server = RedisServer::start();
        let proxy = Proxy::to(server.addr());
        let factory = |address: String| {
            // Nobody loses its turn because the machine is busy.
            let factory = Builder::new(address).claim(Duration::from_secs(30));
            factory.build().unwrap()
        };
        let mut owner = seat(&factory(server.addr().to_string()), "owner");
        let fence = granted(owner.acquire(Entry::Try, soon())).owner.fence();
        let mut waiter = seat(&factory(proxy.addr().to_string()), "waiter");
        let bell = Bell::new();
        waiter.listen(&bell.waker(), soon()).unwrap();
        let attempt = waiter.acquire(Entry::Queue, soon()).unwrap();
        assert!(matches!(attempt, Attempt::Refused(_)), "{attempt:?}");
        Pair {
            server,
            proxy,
            owner,
            fence,
            waiter,
            bell,
        }
    }

    /// Releases while the waiter sleeps. It is up again afterwards, and has done nothing yet.
    fn hand_over(&mut self) {
        thread::scope(|scope| {
            let bell = &self.bell;
            let sleeper = scope.spawn(|| bell.wait(Moment::now() + PATIENCE));
            wait_until(PATIENCE, "the waiter sleeps", || bell.waker().is_awaited());
            assert!(self.owner.release(self.fence, soon()).unwrap());
            assert_eq!(sleeper.join().unwrap(), Ring::Wake);
        });
    }

    fn in_the_mutex(&self) -> String {
        self.server.cli(&["GET", "simba:{m}"]).trim().to_owned()
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
        let grant = granted(pair.waiter.acquire(Entry::Queue, soon()));
        let believed = grant.until.expect("not from this call") - began;
        let most = Lease::default().belief() - Duration::from_millis(650);
        assert!(believed < most, "{believed:?}");
        let fence = grant.owner.fence();
        assert!(fence > pair.fence);
        assert!(pair.waiter.release(fence, soon()).unwrap());
        // What comes next is an ordinary attempt.
        let grant = granted(pair.waiter.acquire(Entry::Queue, soon()));
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
        granted(pair.owner.acquire(Entry::Try, soon()));
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
        assert!(pair.waiter.acquire(Entry::Queue, soon()).is_err());
        assert_eq!(pair.proxy.lost_replies(), 1);
        let grant = granted(pair.waiter.acquire(Entry::Queue, soon()));
        assert!(grant.owner.fence() > pair.fence && grant.until.is_none());
    });
}

#[test]
fn a_lost_reply_to_it_keeps_nobody_from_withdrawing() {
    within(HANG, || {
        let mut pair = Pair::new();
        pair.proxy.lose_reply_to(b"EVALSHA");
        pair.hand_over();
        pair.wait_for("waiter");
        pair.waiter.withdraw(soon()).unwrap();
        assert_eq!(pair.in_the_mutex(), "");
        granted(pair.owner.acquire(Entry::Try, soon()));
    });
}

#[test]
fn a_server_that_forgot_the_script_gets_it_again() {
    within(HANG, || {
        let mut pair = Pair::new();
        pair.server.cli(&["SCRIPT", "FLUSH"]);
        pair.hand_over();
        let grant = granted(pair.waiter.acquire(Entry::Queue, soon()));
        assert!(grant.owner.fence() > pair.fence);
        assert_eq!(pair.in_the_mutex(), "waiter");
    });
}

/// One whose thread does something else is told, and nothing is done in its name: it might not come.
#[test]
fn nothing_is_acquired_for_a_waiter_that_does_not_sleep() {
    within(HANG, || {
        let mut pair = Pair::new();
        assert!(pair.owner.release(pair.fence, soon()).unwrap());
        wait_until(PATIENCE, "it is told", || {
            pair.bell.wait(Moment::now()) == Ring::Wake
        });
        assert_eq!(pair.in_the_mutex(), "");
        let grant = granted(pair.waiter.acquire(Entry::Queue, soon()));
        assert!(grant.until.is_none());
    });
}

/// A place in the queue, a connection: all of it is left to be used by others.
#[test]
fn a_seat_that_is_dropped_with_a_reply_to_come_poisons_no_connection() {
    within(HANG, || {
        let server = RedisServer::start();
        let factory = Builder::new(server.addr().to_string()).pool(1);
        let factory = factory.build().unwrap();
        let other = Builder::new(server.addr().to_string()).build().unwrap();
        let mut owner = seat(&other, "owner");
        for round in 0..5 {
            let fence = granted(owner.acquire(Entry::Try, soon())).owner.fence();
            let id = format!("waiter-{round}");
            let mut waiter = seat(&factory, &id);
            let bell = Bell::new();
            waiter.listen(&bell.waker(), soon()).unwrap();
            waiter.acquire(Entry::Queue, soon()).unwrap();
            thread::scope(|scope| {
                let sleeper = scope.spawn(|| bell.wait(Moment::now() + PATIENCE));
                wait_until(PATIENCE, "the waiter sleeps", || bell.waker().is_awaited());
                assert!(owner.release(fence, soon()).unwrap());
                assert_eq!(sleeper.join().unwrap(), Ring::Wake);
            });
            drop(waiter);
            // The same id comes again, on whatever connection there is, and adopts.
            let mut again = seat(&factory, &id);
            let grant = granted(again.acquire(Entry::Try, soon()));
            assert!(again.release(grant.owner.fence(), soon()).unwrap());
        }
    });
}
