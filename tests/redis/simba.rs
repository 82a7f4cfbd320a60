//! Contenders that speak Simba's Redis protocols, written by hand from their documentation on a plain
//! client, take turns with ours: those up to 3.1.3, of 3.2 and 3.3, and of 4.x.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use contend::redis::Builder;
use contend::{EventKind, Factory};
use redis::{Connection, Script};
use testbed::{RedisCluster, RedisServer, wait_until, within};

use crate::conformance::{next, started};
use crate::driven::{self, Driven, HANG, PATIENCE, from_env, ms, soon};

/// Which of Simba's protocols.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Up to 3.1.3: a queue by whole seconds, and `released@@` to the one that comes next.
    Queues,
    /// 3.2 and 3.3: no queue; a release deletes it, and tells all.
    Tells,
    /// 4.x: the same, and fences.
    Fences,
}

const KINDS: [Kind; 3] = [Kind::Queues, Kind::Tells, Kind::Fences];

struct Simba {
    kind: Kind,
    commands: Connection,
    messages: Connection,
    acquire: Script,
    release: Script,
    keys: [String; 4],
    id: String,
}

impl Simba {
    fn new(server: &RedisServer, kind: Kind, mutex: &str, id: &str) -> Simba {
        Simba::listening_at(server, server, kind, mutex, id)
    }

    /// Sends its commands to one node of a cluster, and hears its messages from another.
    fn listening_at(
        node: &RedisServer,
        messages: &RedisServer,
        kind: Kind,
        mutex: &str,
        id: &str,
    ) -> Simba {
        let connect = |node: &RedisServer| {
            let client = redis::Client::open(node.url()).unwrap();
            client.get_connection().unwrap()
        };
        let key = format!("simba:{{{mutex}}}");
        let mut simba = Simba {
            kind,
            commands: connect(node),
            messages: connect(messages),
            acquire: Script::new(match kind {
                Kind::Queues => {
                    "if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then
                       redis.call('PUBLISH', KEYS[1], 'acquired@@' .. ARGV[1])
                       return {ARGV[1], ARGV[2], ''}
                     end
                     redis.call('ZADD', KEYS[4], 'NX', redis.call('TIME')[1], ARGV[1])
                     return {redis.call('GET', KEYS[1]), redis.call('PTTL', KEYS[1]), ''}"
                }
                Kind::Tells => {
                    "if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then
                       redis.call('PUBLISH', KEYS[1], 'acquired@@' .. ARGV[1])
                       return {ARGV[1], ARGV[2], ''}
                     end
                     return {redis.call('GET', KEYS[1]), redis.call('PTTL', KEYS[1]), ''}"
                }
                Kind::Fences => {
                    "if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then
                       local fence = redis.call('INCR', KEYS[3])
                       redis.call('SET', KEYS[2], string.format('%.0f', fence), 'PX', ARGV[2])
                       redis.call('PUBLISH', KEYS[1], 'acquired@@' .. ARGV[1])
                       return {ARGV[1], ARGV[2], string.format('%.0f', fence)}
                     end
                     return {redis.call('GET', KEYS[1]), redis.call('PTTL', KEYS[1]), ''}"
                }
            }),
            release: Script::new(match kind {
                Kind::Queues => {
                    "if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
                     redis.call('DEL', KEYS[1])
                     local next = redis.call('ZREVRANGE', KEYS[4], -1, -1)[1]
                     if next then
                       redis.call('ZREM', KEYS[4], next)
                       redis.call('PUBLISH', KEYS[1] .. ':' .. next, 'released@@' .. ARGV[1])
                     end
                     return 1"
                }
                Kind::Tells => {
                    "if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
                     redis.call('DEL', KEYS[1], KEYS[4])
                     redis.call('PUBLISH', KEYS[1], 'released@@' .. ARGV[1])
                     return 1"
                }
                Kind::Fences => {
                    "if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
                     redis.call('DEL', KEYS[1], KEYS[2], KEYS[4])
                     redis.call('PUBLISH', KEYS[1], 'released@@' .. ARGV[1])
                     return 1"
                }
            }),
            keys: [
                key.clone(),
                format!("{key}:token"),
                format!("{key}:fence"),
                format!("{key}:contender"),
            ],
            id: id.to_owned(),
        };
        simba.messages.set_read_timeout(Some(ms(2_000))).unwrap();
        for channel in [key.clone(), format!("{key}:{id}")] {
            let subscribe = redis::cmd("SUBSCRIBE").arg(channel).get_packed_command();
            simba.messages.send_packed_command(&subscribe).unwrap();
            simba.messages.recv_response().unwrap();
        }
        simba
    }

    /// The fence, 0 where there is none, if it owns now.
    fn acquire(&mut self) -> Option<u64> {
        let (owner, _, fence): (Option<String>, i64, String) = self
            .acquire
            .key(&self.keys)
            .arg(&[&self.id, "16000"])
            .invoke(&mut self.commands)
            .unwrap();
        (owner.as_deref() == Some(&self.id)).then(|| fence.parse().unwrap_or_default())
    }

    fn release(&mut self) {
        let done: i64 = self
            .release
            .key(&self.keys)
            .arg(&self.id)
            .invoke(&mut self.commands)
            .unwrap();
        assert_eq!(done, 1, "{} does not own", self.id);
    }

    /// Waits for a release, or for two seconds. Any other message than Simba's two is an error there.
    fn wait(&mut self) {
        loop {
            let Ok(message) = self.messages.recv_response() else {
                // It tries again on its own, as Simba does when a lease ends.
                return;
            };
            let (kind, _, said): (String, String, String) =
                redis::from_redis_value(message).unwrap();
            if kind != "message" {
                continue; // the acknowledgement of a subscription, overtaken by a message
            }
            match said.split_once("@@") {
                Some(("acquired", _)) => {}
                Some(("released", _)) => return,
                _ => panic!("Simba does not know {said:?}"),
            }
        }
    }

    /// Reads until the message on its own channel.
    fn hears_its_turn(&mut self) {
        let own = format!("{}:{}", self.keys[0], self.id);
        loop {
            let message = self.messages.recv_response().expect("its turn");
            let (_, channel, _): (String, String, redis::Value) =
                redis::from_redis_value(message).unwrap();
            if channel == own {
                return;
            }
        }
    }

    fn owns_within(&mut self, patience: Duration) -> u64 {
        let end = Instant::now() + patience;
        loop {
            if let Some(fence) = self.acquire() {
                return fence;
            }
            assert!(Instant::now() < end, "{:?} starves", self.kind);
            self.wait();
        }
    }
}

fn factory(server: &RedisServer) -> Factory {
    let factory = Builder::new(server.addr().to_string()).simba(true);
    factory.build().unwrap()
}

/// Rule "fences strictly grow", over both languages. `CONTEND_TEST_TURNS` is the number of turns of each.
fn takes_turns_with_ours(kind: Kind) {
    let turns = from_env("CONTEND_TEST_TURNS", 40);
    let server = RedisServer::start();
    let factories = [factory(&server), factory(&server)];
    let inside = AtomicBool::new(false);
    let last = AtomicU64::new(0);
    let alone = |fence: u64| {
        assert!(!inside.swap(true, Ordering::SeqCst), "two own at once");
        if fence != 0 {
            let before = last.swap(fence, Ordering::SeqCst);
            assert!(fence > before, "{fence} after {before}");
        }
        thread::sleep(Duration::from_micros(200));
        inside.store(false, Ordering::SeqCst);
    };
    thread::scope(|scope| {
        for (number, factory) in factories.iter().enumerate() {
            scope.spawn(move || {
                let mut ours = Driven::at(factory, "turns", &format!("ours-{number}"));
                for _ in 0..turns {
                    let fence = ours.owns_within(PATIENCE).owner.fence();
                    alone(fence);
                    ours.release(fence);
                }
                ours.raw.withdraw(soon()).unwrap();
            });
        }
        for number in 0..2 {
            let server = &server;
            scope.spawn(move || {
                let mut simba = Simba::new(server, kind, "turns", &format!("{number}:7@10.0.0.9"));
                for _ in 0..turns {
                    let fence = simba.owns_within(PATIENCE);
                    assert_eq!(fence != 0, kind == Kind::Fences);
                    alone(fence);
                    simba.release();
                }
            });
        }
    });
}

#[test]
fn simba_3_1_takes_turns_with_ours() {
    within(HANG, || takes_turns_with_ours(Kind::Queues));
}

#[test]
fn simba_3_2_takes_turns_with_ours() {
    within(HANG, || takes_turns_with_ours(Kind::Tells));
}

#[test]
fn simba_4_takes_turns_and_shares_fences() {
    within(HANG, || takes_turns_with_ours(Kind::Fences));
}

/// PUBLISH counts the receivers of one node: a Simba contender that listens on another one counts as alive all the same,
/// and keeps its place in the queue.
#[test]
fn listener_on_another_node_keeps_its_place() {
    within(HANG, || {
        let cluster = RedisCluster::start();
        let master = cluster.master_of("simba:{m}", 0);
        let factory = Builder::cluster(cluster.addresses()).simba(true);
        let factory = factory.build().unwrap();
        let mut ours = Driven::at(&factory, "m", "ours");
        let mut behind = Driven::at(&factory, "m", "behind");
        for messages in (0..6).filter(|node| *node != master) {
            let mut fence = ours.own();
            while fence.is_multiple_of(8) {
                // This release would be left to those that do not queue.
                ours.release(fence);
                fence = ours.own();
            }
            let id = format!("{messages}:7@10.0.0.9");
            let (node, messages) = (cluster.node(master), cluster.node(messages));
            let mut simba = Simba::listening_at(node, messages, Kind::Queues, "m", &id);
            assert_eq!(simba.acquire(), None);
            behind.queue();
            ours.release(fence);
            simba.hears_its_turn();
            assert!(simba.acquire().is_some(), "another contender came first");
            simba.release();
            let fence = behind.owns_within(PATIENCE).owner.fence();
            behind.release(fence);
        }
    });
}

/// A release wakes the other side, whichever protocol it speaks; without, the lease would be waited for.
#[test]
fn releases_are_heard_both_ways() {
    within(HANG, || {
        for kind in KINDS {
            let server = RedisServer::start();
            let factory = factory(&server);
            let mut simba = Simba::new(&server, kind, "m", "simba");
            simba.acquire().unwrap();
            let (ours, events) = started(&factory, "m", "ours");
            wait_until(PATIENCE, "ours waits", || {
                let place = server.cli(&["ZSCORE", "simba:{m}:contender", "ours"]);
                ours.state().after().is_owner("simba") && !place.trim().is_empty()
            });
            let began = Instant::now();
            simba.release();
            next(&events, EventKind::Acquired);
            let took = began.elapsed();
            assert!(took < ms(8_000), "{kind:?}: {took:?}");
            // And the other way round.
            assert_eq!(simba.acquire(), None);
            ours.stop().unwrap();
            let began = Instant::now();
            simba.owns_within(PATIENCE);
            let took = began.elapsed();
            assert!(took < ms(8_000), "{kind:?}: {took:?}");
        }
    });
}

/// A hand-over stands in the place of the owner: no kind of Simba finds the mutex free.
#[test]
fn simba_does_not_barge_past_a_hand_over() {
    within(HANG, || {
        let server = RedisServer::start();
        let factory = driven::factory(server.addr());
        let mut owner = Driven::at(&factory, "m", "owner");
        let mut waiter = Driven::at(&factory, "m", "waiter");
        let mut simbas = KINDS.map(|kind| Simba::new(&server, kind, "m", &format!("{kind:?}")));
        for _ in 0..20 {
            let fence = owner.own();
            waiter.queue();
            owner.release(fence);
            let handed = Instant::now();
            for simba in &mut simbas {
                let taken = simba.acquire();
                assert!(
                    taken.is_none() || handed.elapsed() > ms(450),
                    "{:?} barged in",
                    simba.kind
                );
                if taken.is_some() {
                    simba.release();
                }
            }
            let fence = waiter.owns_within(PATIENCE).owner.fence();
            waiter.release(fence);
            // What queued above is woken, and not interested.
            server.cli(&["DEL", "simba:{m}:contender"]);
        }
    });
}

/// Without `simba=true` exclusion holds all the same, and the counter expires.
#[test]
fn last_fence_stays_only_in_a_mixed_fleet() {
    within(HANG, || {
        let server = RedisServer::start();
        let left = || -> i64 {
            let left = server.cli(&["PTTL", "simba:{m}:fence"]);
            left.trim().parse().unwrap()
        };
        let mut plain = Driven::at(&driven::factory(server.addr()), "m", "plain");
        let fence = plain.own();
        plain.release(fence);
        let hour = 3_600_000;
        assert!((hour..hour + 16_000).contains(&left()), "{}", left());
        let mut mixed = Driven::at(&factory(&server), "m", "mixed");
        let second = mixed.own();
        assert!(second > fence);
        mixed.release(second);
        assert_eq!(left(), -1);
        let mut simba = Simba::new(&server, Kind::Fences, "m", "simba");
        assert!(simba.acquire().unwrap() > second);
    });
}

/// In a mixed fleet every 8th release is left to those that do not queue.
#[test]
fn busy_lockers_leave_something_for_simba() {
    within(HANG, || {
        let server = RedisServer::start();
        let factory = factory(&server);
        let stop = Arc::new(AtomicBool::new(false));
        let lockers: Vec<_> = (0..4)
            .map(|number| {
                let (factory, stop) = (factory.clone(), Arc::clone(&stop));
                thread::spawn(move || {
                    let mut ours = Driven::at(&factory, "m", &format!("ours-{number}"));
                    let mut turns = 0;
                    while !stop.load(Ordering::Relaxed) {
                        let fence = ours.owns_within(PATIENCE).owner.fence();
                        ours.release(fence);
                        turns += 1;
                    }
                    ours.raw.withdraw(soon()).unwrap();
                    turns
                })
            })
            .collect();
        let mut simba = Simba::new(&server, Kind::Tells, "m", "simba");
        let end = Instant::now() + ms(3_000);
        let mut grants = 0;
        while Instant::now() < end {
            if simba.acquire().is_some() {
                grants += 1;
                simba.release();
            } else {
                simba.wait();
            }
        }
        stop.store(true, Ordering::Relaxed);
        let turns: Vec<u64> = lockers.into_iter().map(|it| it.join().unwrap()).collect();
        assert!(grants > 0, "ours {turns:?}");
        assert!(turns.iter().all(|turns| *turns > 0), "{turns:?}");
    });
}
