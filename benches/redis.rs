//! Redis, beside *bare*: `EVALSHA` of the very same scripts (`lua/`), in the same order, on plain
//! connections of the driver.
#![allow(missing_docs)]

mod beside;

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use beside::eight::{Cycle, contended_8, lockers};
use beside::hand_off::{Lockers, Services, Waiter, asleep};
use beside::{beside, in_turns, timed};
use contend::backend::{Attempt, Entry, Hold, Place, Renewal};
use contend::{Factory, Lease, Moment};
use criterion::Criterion;
use ground::RedisServer;
use redis::{Connection, Script, Value};

static SERVER: LazyLock<RedisServer> = LazyLock::new(RedisServer::start);

fn main() {
    let mut criterion = beside::criterion();
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
        ["bare", "contend"],
        |budget| {
            let mut bare = Bare::at("bare", "0:1@127.0.0.1");
            let locker = factory().locker("ours").build().unwrap();
            in_turns(
                budget,
                20,
                [&mut || timed(|| bare.cycle()), &mut || {
                    timed(|| drop(locker.lock().unwrap()))
                }],
            )
        },
    );
}

fn renew(criterion: &mut Criterion) {
    beside(criterion, "redis", "renew", ["bare", "contend"], |budget| {
        let mut bare = Bare::at("bare", "a");
        let fence_of_bare = bare.acquire("try").unwrap();
        let place = Place {
            mutex: "renewed".into(),
            id: "a".into(),
            lease: Lease::default(),
            hold: Hold::Long,
        };
        let factory = factory();
        let mut seat = factory.backend().unwrap().seat(&place).unwrap();
        let Attempt::Granted(grant) = seat.acquire(Entry::Try, soon()).unwrap() else {
            panic!("nobody else is there");
        };
        let fence = grant.owner.fence();
        let tapes = in_turns(
            budget,
            20,
            [&mut || timed(|| bare.renew(fence_of_bare)), &mut || {
                timed(|| {
                    let renewal = seat.renew(fence, soon()).unwrap();
                    assert!(matches!(renewal, Renewal::Renewed(_)));
                })
            }],
        );
        bare.release(fence_of_bare);
        seat.release(fence, soon()).unwrap();
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
            if let Some(fence) = bare.acquire("queue") {
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
    keys: [String; 3],
    id: String,
}

impl Bare {
    fn at(mutex: &str, id: &str) -> Bare {
        const HEAD: &str = include_str!("../lua/mutex.lua");
        let script = |text: &str| Script::new(&format!("{HEAD}\n{text}"));
        let key = format!("simba:{{{mutex}}}");
        Bare {
            connection: plain(),
            acquire: script(include_str!("../lua/acquire.lua")),
            renew: script(include_str!("../lua/renew.lua")),
            release: script(include_str!("../lua/release.lua")),
            keys: [
                key.clone(),
                format!("{key}:contender"),
                format!("{key}:lease"),
            ],
            id: id.to_owned(),
        }
    }

    fn cycle(&mut self) {
        let fence = self.acquire("try").unwrap();
        self.release(fence);
    }

    fn acquire(&mut self, entry: &str) -> Option<u64> {
        let value: Value = self
            .acquire
            .key(&self.keys)
            .arg(&[&self.id, "16000", "6000", "1000", entry, "", "", "0"])
            .invoke(&mut self.connection)
            .unwrap();
        match value {
            Value::Array(fields) if fields[0] == Value::Int(1) => match fields[2] {
                Value::Int(fence) => u64::try_from(fence).ok(),
                _ => None,
            },
            _ => None,
        }
    }

    fn renew(&mut self, fence: u64) {
        let value: Vec<Value> = self
            .renew
            .key(&self.keys)
            .arg(&[&self.id, "16000", &fence.to_string(), "0"])
            .invoke(&mut self.connection)
            .unwrap();
        assert_eq!(value[0], Value::Int(1));
    }

    fn release(&mut self, fence: u64) {
        let done: i64 = self
            .release
            .key(&self.keys)
            .arg(&[&self.id, "1000", &fence.to_string(), "0"])
            .invoke(&mut self.connection)
            .unwrap();
        assert_eq!(done, 1);
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
                let fence = next.acquire("queue").unwrap();
                let at = Instant::now();
                next.release(fence);
                at
            }),
        }
    }

    fn hand_off(&mut self) -> Duration {
        let fence = self.owner.acquire("try").unwrap();
        assert!(self.queue.acquire("queue").is_none());
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
