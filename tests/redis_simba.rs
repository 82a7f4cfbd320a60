//! A contender that speaks Simba's Redis protocol, written by hand from its documentation on a plain
//! client, takes turns with ours.

#![cfg(feature = "redis")]

use std::time::{Duration, Instant};

use contend::redis::Builder;
use contend::{EventKind, Factory};
use ground::{RedisServer, wait_until, within};
use redis::{Commands, Connection};

const PATIENCE: Duration = Duration::from_secs(20);

/// Simba's side: `SET NX PX` to acquire, a queue by whole seconds, `released@@` to the one it picks.
struct Simba {
    commands: Connection,
    messages: Connection,
    key: String,
    id: String,
}

impl Simba {
    fn new(server: &RedisServer, mutex: &str, id: &str) -> Simba {
        let client = redis::Client::open(server.url()).unwrap();
        let mut simba = Simba {
            commands: client.get_connection().unwrap(),
            messages: client.get_connection().unwrap(),
            key: format!("simba:{{{mutex}}}"),
            id: id.to_owned(),
        };
        simba.messages.set_read_timeout(Some(PATIENCE)).unwrap();
        for channel in [simba.key.clone(), format!("{}:{id}", simba.key)] {
            let subscribe = redis::cmd("SUBSCRIBE").arg(channel).get_packed_command();
            simba.messages.send_packed_command(&subscribe).unwrap();
            simba.messages.recv_response().unwrap();
        }
        simba
    }

    fn acquire(&mut self) -> bool {
        let taken: Option<String> = redis::cmd("SET")
            .arg(&self.key)
            .arg(&self.id)
            .arg("NX")
            .arg("PX")
            .arg(16_000)
            .query(&mut self.commands)
            .unwrap();
        if taken.is_some() {
            let said = format!("acquired@@{}", self.id);
            let _: i64 = self.commands.publish(&self.key, said).unwrap();
            return true;
        }
        let (seconds, _): (String, String) = redis::cmd("TIME").query(&mut self.commands).unwrap();
        let _: i64 = redis::cmd("ZADD")
            .arg(format!("{}:contender", self.key))
            .arg("NX")
            .arg(seconds)
            .arg(&self.id)
            .query(&mut self.commands)
            .unwrap();
        false
    }

    fn release(&mut self) {
        assert_eq!(self.owner(), self.id);
        let _: i64 = self.commands.del(&self.key).unwrap();
        let queue = format!("{}:contender", self.key);
        let next: Vec<String> = self.commands.zrevrange(&queue, -1, -1).unwrap();
        if let Some(next) = next.first() {
            let _: i64 = self.commands.zrem(&queue, next).unwrap();
            let channel = format!("{}:{next}", self.key);
            let said = format!("released@@{}", self.id);
            let _: i64 = self.commands.publish(channel, said).unwrap();
        }
    }

    fn owner(&mut self) -> String {
        let owner: Option<String> = self.commands.get(&self.key).unwrap();
        owner.unwrap_or_default()
    }

    /// Waits for its turn. Any other message than Simba's two is an error, as it is there.
    fn wait_for_turn(&mut self) -> String {
        loop {
            let message = self.messages.recv_response().unwrap();
            let (_, _, said): (String, String, String) = redis::from_redis_value(message).unwrap();
            match said.split_once("@@") {
                Some(("acquired", _)) => {}
                Some(("released", by)) => return by.to_owned(),
                _ => panic!("Simba does not know {said:?}"),
            }
        }
    }

    fn queued(&mut self, id: &str) -> bool {
        let queue = format!("{}:contender", self.key);
        let score: Option<f64> = self.commands.zscore(queue, id).unwrap();
        score.is_some()
    }
}

/// With a claim time in which nobody loses its turn on a busy machine.
fn factory(server: &RedisServer) -> Factory {
    Builder::new(server.addr().to_string())
        .claim(Duration::from_secs(30))
        .build()
        .unwrap()
}

#[test]
fn a_simba_contender_and_ours_take_turns() {
    within(Duration::from_secs(60), || {
        let server = RedisServer::start();
        let factory = factory(&server);
        let mut simba = Simba::new(&server, "turns", "1:7@10.0.0.9");
        assert!(simba.acquire());
        let (ours, events) = factory.contend("turns").id("ours").channel().unwrap();
        ours.start().unwrap();
        let next = |kind| loop {
            let event = events.recv_timeout(PATIENCE).unwrap();
            if event.kind == kind {
                return event;
            }
        };
        wait_until(PATIENCE, "ours sees who owns", || {
            ours.state().after().is_owner("1:7@10.0.0.9")
        });
        assert_eq!(ours.state().after().fence(), 0, "Simba has no fences");
        let mut last_fence = 0;
        let began = Instant::now();
        for round in 0..20 {
            wait_until(PATIENCE, "ours waits", || simba.queued("ours"));
            simba.release();
            let fence = next(EventKind::Acquired).fence().unwrap();
            assert!(fence > last_fence, "round {round}");
            last_fence = fence;
            assert!(!simba.acquire(), "round {round}: ours owns");
            ours.stop().unwrap();
            ours.start().unwrap();
            assert_eq!(simba.wait_for_turn(), "ours");
            assert!(simba.acquire(), "round {round}: it was kept for Simba");
        }
        assert!(!simba.queued("1:7@10.0.0.9"), "an owner does not wait");
        // Each turn was announced: nobody sat out a claim time, let alone a lease.
        assert!(
            began.elapsed() < Duration::from_secs(28),
            "{:?}",
            began.elapsed()
        );
    });
}

#[test]
fn whole_seconds_and_ours_stand_in_one_queue() {
    within(Duration::from_secs(60), || {
        let server = RedisServer::start();
        let factory = factory(&server);
        let (owner, events) = factory.contend("queue").id("owner").channel().unwrap();
        owner.start().unwrap();
        events.recv_timeout(PATIENCE).unwrap();
        let mut simba = Simba::new(&server, "queue", "simba");
        let first = factory.contend("queue").id("first").build().unwrap();
        first.start().unwrap();
        wait_until(PATIENCE, "the first waits", || simba.queued("first"));
        // Two seconds later, as both count: time itself is the subject.
        std::thread::sleep(Duration::from_millis(1_100));
        assert!(!simba.acquire());
        std::thread::sleep(Duration::from_millis(1_100));
        let last = factory.contend("queue").id("last").build().unwrap();
        last.start().unwrap();
        wait_until(PATIENCE, "the last waits", || simba.queued("last"));

        owner.stop().unwrap();
        wait_until(PATIENCE, "the first owns", || first.is_owner());
        first.stop().unwrap();
        assert_eq!(simba.wait_for_turn(), "first");
        assert!(simba.acquire());
        simba.release();
        wait_until(PATIENCE, "the last owns", || last.is_owner());
    });
}

/// Simba takes whom it wakes out of the queue: that one must not have to line up again.
#[test]
fn who_was_woken_by_simba_owns_before_those_behind_it() {
    within(Duration::from_secs(60), || {
        let server = RedisServer::start();
        let factories = [factory(&server), factory(&server)];
        let mut simba = Simba::new(&server, "place", "simba");
        for round in 0..5 {
            assert!(simba.acquire(), "round {round}");
            let waiters = [0, 1].map(|number| {
                let id = format!("waiter-{number}");
                let waiter = factories[number].contend("place").id(&id);
                let (waiter, events) = waiter.channel().unwrap();
                waiter.start().unwrap();
                wait_until(PATIENCE, "it waits", || simba.queued(&id));
                (waiter, events)
            });
            let acquired = |number: usize| {
                while waiters[number].1.recv_timeout(PATIENCE).unwrap().kind != EventKind::Acquired
                {
                }
            };
            simba.release();
            acquired(0);
            assert!(!waiters[1].0.is_owner() && simba.queued("waiter-1"));
            waiters[0].0.stop().unwrap();
            acquired(1);
            waiters[1].0.stop().unwrap();
        }
    });
}

/// Simba knows no reservations. It costs the one who was told its turn, but not its place.
#[test]
fn who_lost_its_turn_to_simba_keeps_its_place() {
    use contend::backend::{Attempt, Entry, Hold, Place};
    use contend::{Bell, Lease, Moment, Ring};
    within(Duration::from_secs(60), || {
        let server = RedisServer::start();
        let factory = factory(&server);
        let mut simba = Simba::new(&server, "barge", "simba");
        let seat = |id: &str| {
            let place = Place {
                mutex: "barge".into(),
                id: id.into(),
                lease: Lease::default(),
                hold: Hold::Short,
            };
            factory.backend().unwrap().seat(&place).unwrap()
        };
        let soon = || Moment::now() + Duration::from_secs(20);
        let (mut owner, mut first, mut second) = (seat("owner"), seat("first"), seat("second"));
        let bells = [Bell::new(), Bell::new()];
        let Attempt::Granted(grant) = owner.acquire(Entry::Try, soon()).unwrap() else {
            panic!("refused");
        };
        first.listen(&bells[0].waker(), soon()).unwrap();
        first.acquire(Entry::Queue, soon()).unwrap();
        second.listen(&bells[1].waker(), soon()).unwrap();
        second.acquire(Entry::Queue, soon()).unwrap();
        owner.release(grant.owner.fence(), soon()).unwrap();
        // Not asleep: for one who sleeps, the attempt would be under way by now.
        wait_until(PATIENCE, "the first is told", || {
            bells[0].wait(Moment::now()) == Ring::Wake
        });
        assert!(simba.acquire(), "it barges in");
        let Attempt::Refused(refusal) = first.acquire(Entry::Queue, soon()).unwrap() else {
            panic!("two owners");
        };
        assert!(refusal.owner.is_owner("simba"));
        simba.release();
        assert_eq!(bells[0].wait(Moment::now() + PATIENCE), Ring::Wake);
        let attempt = first.acquire(Entry::Queue, soon()).unwrap();
        assert!(matches!(attempt, Attempt::Granted(_)), "{attempt:?}");
    });
}
