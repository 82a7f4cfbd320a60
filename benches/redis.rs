//! Redis, beside *bare*: `EVALSHA` of the very same scripts (`lua/`), in the same order, on plain
//! connections of the driver; and beside *floor*: `SET NX PX` and a compare-and-delete script, which exclude,
//! and do nothing else.
#![allow(missing_docs)]

mod common;

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use common::eight::{Cycle, contended_8, lockers};
use common::hand_off::{Lockers, Services, Waiter, asleep};
use common::{beside, in_turns, timed};
use contend::backend::{Attempt, Contender, OnRefusal, Purpose, Renewal};
use contend::{Factory, Lease, Moment};
use criterion::Criterion;
use redis::{Connection, Script, Value};
use testbed::RedisServer;

static SERVER: LazyLock<RedisServer> = LazyLock::new(RedisServer::start);

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
    beside(
        criterion,
        "redis",
        "lock_cycle",
        ["bare", "contend", "floor"],
        |budget| {
            let mut bare = Bare::at("bare", "0:1@127.0.0.1");
            let mut floor = Floor::new();
            let locker = factory().locker("ours").build().unwrap();
            in_turns(
                budget,
                20,
                [
                    &mut || timed(|| bare.cycle()),
                    &mut || timed(|| drop(locker.lock().unwrap())),
                    &mut || timed(|| floor.cycle()),
                ],
            )
        },
    );
    server_time();
}

/// Prints what the server itself spends on a cycle, by its own count: steady on a busy machine, too.
fn server_time() {
    const CYCLES: u32 = 20_000;
    let mut operator = plain();
    let mut evalsha = |work: &mut dyn FnMut()| {
        redis::cmd("CONFIG")
            .arg("RESETSTAT")
            .exec(&mut operator)
            .unwrap();
        for _ in 0..CYCLES {
            work();
        }
        let stats: String = (redis::cmd("INFO").arg("commandstats"))
            .query(&mut operator)
            .unwrap();
        let usec = stats
            .lines()
            .find_map(|line| line.strip_prefix("cmdstat_evalsha:"))
            .and_then(|line| {
                line.split("usec=")
                    .nth(1)?
                    .split(',')
                    .next()?
                    .parse::<f64>()
                    .ok()
            });
        usec.unwrap_or_default() / f64::from(CYCLES)
    };
    let locker = factory().locker("server-time").build().unwrap();
    let mut floor = Floor::new();
    let ours = evalsha(&mut || drop(locker.lock().unwrap()));
    let least = evalsha(&mut || floor.cycle());
    println!(
        "redis/server_time: EVALSHA {ours:.1} us a cycle; compare-and-delete alone {least:.1} us"
    );
}

fn renew(criterion: &mut Criterion) {
    beside(criterion, "redis", "renew", ["bare", "contend"], |budget| {
        let mut bare = Bare::at("bare", "a");
        let fence_of_bare = bare.acquire("").unwrap();
        let place = Contender {
            mutex: "renewed".into(),
            id: "a".into(),
            lease: Lease::default(),
            purpose: Purpose::Lead,
        };
        let factory = factory();
        let mut contender = factory.backend().unwrap().contender(&place).unwrap();
        let Attempt::Granted(grant) = contender.acquire(OnRefusal::Leave, soon()).unwrap() else {
            panic!("nobody else is there");
        };
        let fence = grant.owner.fence();
        let tapes = in_turns(
            budget,
            20,
            [&mut || timed(|| bare.renew(fence_of_bare)), &mut || {
                timed(|| {
                    let renewal = contender.renew(fence, soon()).unwrap();
                    assert!(matches!(renewal, Renewal::Renewed(_)));
                })
            }],
        );
        bare.release(fence_of_bare);
        contender.release(fence, soon()).unwrap();
        tapes
    });
}

fn hand_off(criterion: &mut Criterion) {
    let sides = ["bare", "contend", "service"];
    beside(criterion, "redis", "handoff", sides, |budget| {
        let factory = factory();
        let mut bare = BareHandOff::new("bare-handoff");
        let mut lockers = Lockers::new(&factory, "lockers");
        let mut services = Services::new(&factory, "services");
        let mut operator = plain();
        in_turns(
            budget,
            1,
            [
                &mut || bare.hand_off(),
                &mut || lockers.hand_off(|| queued(&mut operator, "lockers", "b")),
                &mut || services.hand_off(),
            ],
        )
    });
}

/// *bare* is eight plain contenders with the same scripts in the same order; *alone* is one that nobody
/// disturbs, and that hands over to nobody.
fn contended(criterion: &mut Criterion) {
    let sides = ["alone", "bare", "contend"];
    beside(criterion, "redis", "contended_8", sides, |budget| {
        let alone = |mutex: &str, _| -> Cycle {
            let mut bare = Bare::at(mutex, "a");
            Box::new(move || bare.cycle())
        };
        let ours = lockers(factory());
        contended_8(
            "redis",
            budget,
            [(1, &alone), (8, &plain_contender), (8, &ours)],
        )
    });
}

/// Queues, waits for its message, acquires, releases.
fn plain_contender(mutex: &str, number: usize) -> Cycle {
    let id = format!("c{number}");
    let mut bare = Bare::at(mutex, &id);
    let mut messages = plain();
    let subscribe = redis::cmd("SUBSCRIBE")
        .arg(format!("simba:{{{mutex}}}:{id}"))
        .get_packed_command();
    messages.send_packed_command(&subscribe).unwrap();
    messages.recv_response().unwrap();
    Box::new(move || {
        let fence = loop {
            if let Some(fence) = bare.acquire("0") {
                break fence;
            }
            messages.recv_response().unwrap();
        };
        bare.release(fence);
    })
}

fn factory() -> Factory {
    contend::connect(&SERVER.url()).unwrap()
}

fn soon() -> Moment {
    Moment::now() + Duration::from_millis(2_500)
}

/// The scripts as they are sent, on a plain connection.
struct Bare {
    connection: Connection,
    acquire: Script,
    renew: Script,
    release: Script,
    keys: [String; 4],
    id: String,
}

impl Bare {
    fn at(mutex: &str, id: &str) -> Bare {
        const HAND_OVER: &str = include_str!("../lua/hand_over.lua");
        let script = |text: &str| Script::new(&text.replace("--@hand_over\n", HAND_OVER));
        let key = format!("simba:{{{mutex}}}");
        Bare {
            connection: plain(),
            acquire: script(include_str!("../lua/acquire.lua")),
            renew: script(include_str!("../lua/renew.lua")),
            release: script(include_str!("../lua/release.lua")),
            keys: [
                key.clone(),
                format!("{key}:token"),
                format!("{key}:fence"),
                format!("{key}:contender"),
            ],
            id: id.to_owned(),
        }
    }

    fn cycle(&mut self) {
        let fence = self.acquire("").unwrap();
        self.release(fence);
    }

    fn acquire(&mut self, entry: &str) -> Option<u64> {
        let value: Value = self
            .acquire
            .key(&self.keys)
            .arg(&[&self.id, "16000", "500", "3616000", "1", entry, "0"])
            .invoke(&mut self.connection)
            .unwrap();
        match value {
            Value::Array(fields) => match fields[0] {
                Value::Int(fence @ 1..) => u64::try_from(fence).ok(),
                _ => None,
            },
            _ => None,
        }
    }

    fn renew(&mut self, fence: u64) {
        let value: Vec<Value> = self
            .renew
            .key(&self.keys[..3])
            .arg(&[&self.id, "16000", "3616000", &fence.to_string()])
            .invoke(&mut self.connection)
            .unwrap();
        assert_eq!(value[0], Value::Int(1));
    }

    fn release(&mut self, fence: u64) {
        let done: i64 = self
            .release
            .key(&[&self.keys[0], &self.keys[1], &self.keys[3]])
            .arg(&[&self.id, "500", "1", "0", &fence.to_string()])
            .invoke(&mut self.connection)
            .unwrap();
        assert_eq!(done, 1);
    }
}

/// What other libraries send: it excludes, and does nothing else.
struct Floor {
    connection: Connection,
    delete: Script,
}

impl Floor {
    fn new() -> Floor {
        Floor {
            connection: plain(),
            delete: Script::new(
                "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0",
            ),
        }
    }

    fn cycle(&mut self) {
        let taken: Option<String> = redis::cmd("SET")
            .arg(&["floor", "0:1@127.0.0.1", "NX", "PX", "16000"])
            .query(&mut self.connection)
            .unwrap();
        assert!(taken.is_some());
        let deleted: i64 = self
            .delete
            .key("floor")
            .arg("0:1@127.0.0.1")
            .invoke(&mut self.connection)
            .unwrap();
        assert_eq!(deleted, 1);
    }
}

/// Release script, message to a blocked reader, acquire script by that one.
struct BareHandOff {
    owner: Bare,
    queue: Bare,
    waiter: Waiter,
}

impl BareHandOff {
    fn new(mutex: &str) -> BareHandOff {
        let mut messages = plain();
        let subscribe = redis::cmd("SUBSCRIBE")
            .arg(format!("simba:{{{mutex}}}:b"))
            .get_packed_command();
        messages.send_packed_command(&subscribe).unwrap();
        messages.recv_response().unwrap();
        let mut next = Bare::at(mutex, "b");
        BareHandOff {
            owner: Bare::at(mutex, "a"),
            queue: Bare::at(mutex, "b"),
            waiter: Waiter::new(move || {
                messages.recv_response().unwrap();
                let fence = next.acquire("0").unwrap();
                let at = Instant::now();
                next.release(fence);
                at
            }),
        }
    }

    fn hand_off(&mut self) -> Duration {
        let fence = self.owner.acquire("").unwrap();
        assert!(self.queue.acquire("0").is_none());
        self.waiter.go();
        asleep();
        let began = Instant::now();
        self.owner.release(fence);
        self.waiter.done() - began
    }
}

/// Returns once `id` stands in the queue of `mutex`.
fn queued(operator: &mut Connection, mutex: &str, id: &str) {
    let mut score = redis::cmd("ZSCORE");
    score.arg(format!("simba:{{{mutex}}}:contender")).arg(id);
    let limit = Instant::now() + Duration::from_secs(60);
    while score.query::<Option<f64>>(operator).unwrap().is_none() {
        assert!(Instant::now() < limit, "nobody queues");
    }
}

fn plain() -> Connection {
    let info = redis::IntoConnectionInfo::into_connection_info(SERVER.url())
        .unwrap()
        .set_tcp_settings(redis::io::tcp::TcpSettings::default().set_nodelay(true));
    redis::Client::open(info).unwrap().get_connection().unwrap()
}
