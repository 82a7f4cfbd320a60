//! ZooKeeper, beside *bare*: the requests of a latch, in the same order, on a plain socket (`zk_wire.rs`); beside
//! *floor*, the cheapest requests that exclude; and beside the `zookeeper` crate, an independent client
//! that sends them one by one.
#![allow(missing_docs)]

mod common;
#[path = "common/zk_wire.rs"]
mod zk_wire;

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use common::eight::{Cycle, contended_8, lockers};
use common::hand_off::{Lockers, Services, Waiter, asleep};
use common::{beside, in_turns, timed};
use contend::backend::{Attempt, Contender, OnRefusal, Purpose, Renewal};
use contend::{Factory, Moment, Parker};
use criterion::Criterion;
use testbed::ZooKeeperServer;
use zk_wire::{EPHEMERAL, EPHEMERAL_SEQUENTIAL, PERSISTENT, Wire};
use zookeeper::{Acl, CreateMode, ZooKeeper, ZooKeeperExt};

static SERVER: LazyLock<ZooKeeperServer> = LazyLock::new(ZooKeeperServer::start);

const LONG: Duration = Duration::from_secs(60);

/// What our nodes are called, less the number.
const NODE: &str = "_c_0b6e7a2c-6c1f-4f0e-9f43-0c2f5a2d7e11-latch-";

fn main() {
    let mut criterion = common::criterion();
    lock_cycle(&mut criterion);
    renew(&mut criterion);
    hand_off(&mut criterion);
    contended(&mut criterion);
    criterion.final_summary();
    SERVER.kill();
}

fn lock_cycle(criterion: &mut Criterion) {
    let sides = ["bare", "contend", "floor", "zookeeper_crate"];
    beside(criterion, "zk", "lock_cycle", sides, |budget| {
        let mut floor = Wire::connect(SERVER.addr());
        let mut bare = Bare::at("bare");
        let factory = factory();
        let locker = factory.locker("ours").build().unwrap();
        let peer = Peer::at("/peer");
        in_turns(
            budget,
            10,
            [
                &mut || timed(|| bare.cycle()),
                &mut || timed(|| drop(locker.lock().unwrap())),
                &mut || timed(|| least(&mut floor)),
                &mut || timed(|| peer.cycle()),
            ],
        )
    });
}

/// The least that excludes at all: one node under a fixed name, which a second one cannot create. No line,
/// so nobody knows whose turn is next.
fn least(wire: &mut Wire) {
    wire.create("/floor", b"0:1@127.0.0.1", EPHEMERAL);
    wire.send();
    wire.created();
    wire.delete("/floor");
    wire.send();
    wire.receive();
}

/// Ours asks nothing: the session's heartbeats renew for all. *Bare* is what one of those costs.
fn renew(criterion: &mut Criterion) {
    beside(criterion, "zk", "renew", ["bare", "contend"], |budget| {
        let mut bare = Wire::connect(SERVER.addr());
        let factory = factory();
        let place = Contender {
            mutex: "renewed".into(),
            id: "a".into(),
            lease: factory.lease(),
            purpose: Purpose::Lead,
        };
        let mut contender = factory
            .backend()
            .unwrap()
            .contender(&place, &Parker::new().unparker())
            .unwrap();
        let Attempt::Granted(grant) = contender.acquire(OnRefusal::Leave, soon()).unwrap() else {
            panic!("nobody else is there");
        };
        let fence = grant.owner.fence();
        let tapes = in_turns(
            budget,
            10,
            [
                &mut || {
                    timed(|| {
                        bare.sync();
                        bare.send();
                        bare.receive();
                    })
                },
                &mut || {
                    timed(|| {
                        let renewal = contender.renew(fence, soon()).unwrap();
                        assert!(matches!(renewal, Renewal::Renewed(_)));
                    })
                },
            ],
        );
        contender.release(fence, soon()).unwrap();
        tapes
    });
}

fn hand_off(criterion: &mut Criterion) {
    let sides = ["bare", "contend", "service", "apart"];
    beside(criterion, "zk", "handoff", sides, |budget| {
        let factory = factory();
        let mut bare = BareHandOff::new();
        let mut lockers = Lockers::new(&factory, "lockers");
        let mut services = Services::new(&factory, "services");
        // Over two sessions, as between two processes.
        let other = self::factory();
        let mut apart = Lockers::between([&factory, &other], "apart");
        let mut line_apart = Wire::connect(SERVER.addr());
        let mut line = Wire::connect(SERVER.addr());
        in_turns(
            budget,
            1,
            [
                &mut || bare.hand_off(),
                &mut || lockers.hand_off(|| in_line(&mut line, "/simba/lockers", 2)),
                &mut || services.hand_off(),
                &mut || apart.hand_off(|| in_line(&mut line_apart, "/simba/apart", 2)),
            ],
        )
    });
}

/// Returns once so many stand in line, and the last one watches the one before it, which takes a round
/// trip more. Not much later: *bare* does not wait longer either, and after a pause of some milliseconds
/// machine and server take twice as long for the very same requests.
fn in_line(wire: &mut Wire, mutex: &str, count: usize) {
    let limit = Instant::now() + LONG;
    loop {
        wire.children(mutex);
        wire.send();
        if wire.names().len() == count {
            return asleep();
        }
        assert!(Instant::now() < limit, "the waiter does not wait");
    }
}

/// *bare* is eight plain contenders that ask what Curator's latch asks: five requests a cycle. Ours asks two more when
/// it lines up: who leads, for the error of a wait that ends in vain, and for a watch on its own node. *alone* is one
/// contender that no other disturbs, and that hands over to none.
fn contended(criterion: &mut Criterion) {
    let sides = ["alone", "bare", "contend"];
    beside(criterion, "zk", "contended_8", sides, |budget| {
        let alone = |mutex: &str, _| -> Cycle {
            let mut bare = Bare::at(mutex);
            Box::new(move || bare.cycle())
        };
        let plain = |mutex: &str, _| -> Cycle {
            let mut bare = Bare::at(mutex);
            Box::new(move || bare.contend())
        };
        let ours = lockers(factory());
        contended_8("zk", budget, [(1, &alone), (8, &plain), (8, &ours)])
    });
}

/// With its session there: what it costs to open one is no lock's price.
fn factory() -> Factory {
    let factory = contend::connect(&SERVER.url()).unwrap();
    drop(factory.locker("warm-up").build().unwrap().lock().unwrap());
    factory
}

fn soon() -> Moment {
    Moment::now() + Duration::from_secs(10)
}

/// One contender: its node and the line in one go, and the deletion.
struct Bare {
    wire: Wire,
    mutex: String,
    node: String,
}

impl Bare {
    fn at(mutex: &str) -> Bare {
        let mut wire = Wire::connect(SERVER.addr());
        let mutex = format!("/{mutex}");
        wire.create(&mutex, b"", PERSISTENT);
        wire.send();
        wire.receive();
        Bare {
            wire,
            node: format!("{mutex}/{NODE}"),
            mutex,
        }
    }

    fn cycle(&mut self) {
        let path = self.enter();
        self.wire.delete(&path);
        self.wire.send();
        self.wire.receive();
    }

    fn enter(&mut self) -> String {
        self.line_up().0
    }

    /// Our node, and those in line, the first one first.
    fn line_up(&mut self) -> (String, Vec<String>) {
        self.wire
            .create(&self.node, b"0:1@127.0.0.1", EPHEMERAL_SEQUENTIAL);
        self.wire.children(&self.mutex);
        self.wire.send();
        let path = self.wire.created();
        let mut line = self.wire.names();
        line.sort();
        (path, line)
    }

    /// A cycle among others: waits for the node before its own to go, and for nothing if it is first.
    fn contend(&mut self) {
        let (path, mut line) = self.line_up();
        loop {
            let own = line.iter().position(|name| path.ends_with(name.as_str()));
            let place = own.expect("only its contender deletes a node");
            if place == 0 {
                break;
            }
            let before = format!("{}/{}", self.mutex, line[place - 1]);
            self.wire.watch(&before);
            self.wire.send();
            // Gone already: no event comes.
            if !self.wire.receive().is_empty() {
                self.wire.receive();
            }
            if place == 1 {
                break;
            }
            self.wire.children(&self.mutex);
            self.wire.send();
            line = self.wire.names();
            line.sort();
        }
        self.wire.delete(&path);
        self.wire.send();
        self.wire.receive();
    }
}

/// The deletion of a node, and the watch of it on another connection: nothing more is asked there.
struct BareHandOff {
    owner: Bare,
    watch: std::sync::mpsc::Sender<String>,
    waiter: Waiter,
    watching: std::sync::mpsc::Receiver<()>,
}

impl BareHandOff {
    fn new() -> BareHandOff {
        let owner = Bare::at("bare-handoff");
        let mut wire = Wire::connect(SERVER.addr());
        let (watch, paths) = std::sync::mpsc::channel::<String>();
        let (watching_out, watching) = std::sync::mpsc::channel();
        BareHandOff {
            owner,
            watch,
            watching,
            waiter: Waiter::new(move || {
                wire.watch(&paths.recv().unwrap());
                wire.send();
                wire.receive();
                watching_out.send(()).unwrap();
                wire.receive();
                Instant::now()
            }),
        }
    }

    fn hand_off(&mut self) -> Duration {
        let path = self.owner.enter();
        self.waiter.go();
        self.watch.send(path.clone()).unwrap();
        self.watching.recv().unwrap();
        asleep();
        let began = Instant::now();
        self.owner.wire.delete(&path);
        self.owner.wire.send();
        self.owner.wire.receive();
        self.waiter.done() - began
    }
}

/// The same requests through the `zookeeper` crate.
struct Peer {
    client: ZooKeeper,
    mutex: String,
}

impl Peer {
    fn at(mutex: &str) -> Peer {
        let client = ZooKeeper::connect(&SERVER.addr().to_string(), LONG, |_| {}).unwrap();
        client.ensure_path(mutex).unwrap();
        Peer {
            client,
            mutex: mutex.to_owned(),
        }
    }

    fn cycle(&self) {
        let node = self
            .client
            .create(
                &format!("{}/{NODE}", self.mutex),
                b"0:1@127.0.0.1".to_vec(),
                Acl::open_unsafe().clone(),
                CreateMode::EphemeralSequential,
            )
            .unwrap();
        self.client.get_children(&self.mutex, false).unwrap();
        self.client.delete(&node, None).unwrap();
    }
}
