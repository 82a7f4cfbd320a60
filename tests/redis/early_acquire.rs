//! The acquisition of a sleeping waiter is sent as soon as its turn is heard of, before the waiter is up: what that
//! changes for the waiter, and what it must not change for others.

use std::thread;

use contend::backend::{Attempt, Grant, OnRefusal};
use contend::redis::Builder;
use contend::{Lease, Moment, Unparked};
use testbed::{Proxy, RedisServer, wait_until, within};

use crate::driven::{Driven, HANG, PATIENCE, factory, ms, soon};

/// An owner and a waiter on one server, the waiter's connections through a proxy.
struct Pair {
    server: RedisServer,
    proxy: Proxy,
    owner: Driven,
    fence: u64,
    waiter: Driven,
}

impl Pair {
    fn new() -> Pair {
        let server = RedisServer::start();
        let proxy = Proxy::to(server.addr());
        let mut owner = Driven::at(&factory(server.addr()), "m", "owner");
        let fence = owner.own();
        let mut waiter = Driven::at(&factory(proxy.addr()), "m", "waiter");
        waiter.queue();
        Pair {
            server,
            proxy,
            owner,
            fence,
            waiter,
        }
    }

    fn hand_over(&mut self) {
        hand_over(&mut self.owner, self.fence, &self.waiter);
    }

    /// The owner; empty where the mutex is only handed over.
    fn in_the_mutex(&self) -> String {
        let seen = self.server.cli(&["MGET", "simba:{m}", "simba:{m}:token"]);
        match seen.lines().collect::<Vec<_>>().as_slice() {
            [_, "0"] | [] => String::new(),
            [owner, ..] => (*owner).to_owned(),
        }
    }

    fn wait_for_the_attempt(&self) {
        wait_until(PATIENCE, "the server has the attempt", || {
            self.in_the_mutex() == "waiter"
        });
    }
}

/// Releases while the waiter sleeps. It is up again afterwards, and has done nothing yet.
fn hand_over(owner: &mut Driven, fence: u64, waiter: &Driven) {
    let parker = &waiter.parker;
    thread::scope(|scope| {
        let sleeper = scope.spawn(|| parker.park(Moment::now() + PATIENCE));
        owner.release(fence);
        assert_eq!(sleeper.join().unwrap(), Unparked::Wake);
    });
}

fn granted(waiter: &mut Driven) -> Grant {
    match waiter.attempt(OnRefusal::Enqueue) {
        Attempt::Granted(grant) => grant,
        Attempt::Refused(refusal) => panic!("refused: {refusal:?}"),
    }
}

/// Belief is counted from before the request was sent, and that was before the call.
#[test]
fn belief_counts_from_the_early_request() {
    within(HANG, || {
        let mut pair = Pair::new();
        pair.hand_over();
        pair.wait_for_the_attempt();
        // Time itself is the subject: so much of the lease is gone when the waiter comes for it.
        thread::sleep(ms(700));
        let began = Moment::now();
        let grant = granted(&mut pair.waiter);
        let believed = grant.until.expect("not from this call") - began;
        assert!(believed < Lease::default().belief() - ms(650));
        let fence = grant.owner.fence();
        assert!(fence > pair.fence);
        pair.waiter.release(fence);
        // What comes next is an ordinary attempt.
        let grant = granted(&mut pair.waiter);
        assert!(grant.until.is_none() && grant.owner.fence() > fence);
    });
}

/// A waiter that leaves in that very moment owns without knowing it.
#[test]
fn withdrawal_gives_back_an_early_grant() {
    within(HANG, || {
        let mut pair = Pair::new();
        pair.hand_over();
        pair.wait_for_the_attempt();
        pair.waiter.raw.withdraw(soon()).unwrap();
        assert_eq!(pair.in_the_mutex(), "");
        pair.owner.own();
    });
}

/// A lost reply leaves a grant that is not known of, and that the next attempt adopts.
#[test]
fn lost_early_reply_is_a_failed_attempt() {
    within(HANG, || {
        let mut pair = Pair::new();
        pair.proxy.lose_reply_to(b"EVALSHA");
        pair.hand_over();
        pair.wait_for_the_attempt();
        let attempt = pair.waiter.raw.acquire(OnRefusal::Enqueue, soon());
        assert!(attempt.is_err(), "{attempt:?}");
        assert_eq!(pair.proxy.lost_replies(), 1);
        let grant = granted(&mut pair.waiter);
        assert!(grant.owner.fence() > pair.fence && grant.until.is_none());
    });
}

/// A contender that is dropped with a reply to come leaves its place and its connection as they were.
#[test]
fn dropped_contender_poisons_no_connection() {
    within(HANG, || {
        let server = RedisServer::start();
        let one = Builder::new(server.addr().to_string()).pool_size(1);
        let one = one.build().unwrap();
        let mut owner = Driven::at(&factory(server.addr()), "m", "owner");
        for round in 0..5 {
            let fence = owner.own();
            let id = format!("waiter-{round}");
            let mut waiter = Driven::at(&one, "m", &id);
            waiter.queue();
            // What was under way to the waiter of the last round.
            while waiter.parker.park(Moment::now() + ms(100)) == Unparked::Wake {}
            hand_over(&mut owner, fence, &waiter);
            drop(waiter);
            // The same id comes again, on whatever connection there is, and adopts.
            let mut again = Driven::at(&one, "m", &id);
            let fence = again.own();
            again.release(fence);
        }
    });
}
