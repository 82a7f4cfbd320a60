//! Redis, beside *bare*: `EVALSHA` of the very same scripts (`lua/`), in the same order, on plain
//! connections of the driver; and beside *floor*: `SET NX PX` and a compare-and-delete script, which exclude,
//! and do nothing else.
//!
//! Beside criterion's statistics it prints what the issue asks for, line by line: medians, 99th percentiles and
//! ratios of one recording, the server's own time, and the runs of eight contenders.
#![allow(missing_docs)]

mod common;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::LazyLock;
use std::thread;
use std::time::{Duration, Instant};

use common::eight::{Cycle, contended_8, lockers, together};
use common::hand_off::{Lockers, Services, Waiter, asleep};
use common::{Tape, beside, in_turns, print_beside, timed};
use contend::backend::{Attempt, Contender, OnRefusal, Purpose, Renewal};
use contend::{Factory, Lease, Moment, Parker};
use criterion::Criterion;
use redis::{Connection, Script, Value};
use testbed::RedisServer;

static SERVER: LazyLock<RedisServer> = LazyLock::new(RedisServer::start);

fn main() {
    let mut criterion = common::criterion();
    lock_cycle(&mut criterion);
    lock_cycle_far(&mut criterion);
    renew(&mut criterion);
    hand_off(&mut criterion);
    contended(&mut criterion);
    criterion.final_summary();
    SERVER.kill();
}

fn lock_cycle(criterion: &mut Criterion) {
    beside(criterion, "redis", "lock_cycle", CYCLE, |budget| {
        let tapes = cycles(budget, SERVER.addr());
        print_beside("redis/lock_cycle", CYCLE, &tapes, 2);
        server_time();
        client_time();
        tapes
    });
}

const CYCLE: [&str; 3] = ["bare", "contend", "floor"];

fn cycles(budget: common::Budget, server: SocketAddr) -> [Tape; 3] {
    let mut bare = Bare::on(plain_to(server), "bare", "0:1@127.0.0.1");
    let mut floor = Floor::new(server);
    let factory = contend::connect(&format!("redis://{server}")).unwrap();
    let locker = factory.locker("ours").build().unwrap();
    in_turns(
        budget,
        20,
        [
            &mut || timed(|| bare.cycle()),
            &mut || timed(|| drop(locker.lock().unwrap())),
            &mut || timed(|| floor.cycle()),
        ],
    )
}

/// The same through a proxy that makes a round trip take 200 us.
fn lock_cycle_far(criterion: &mut Criterion) {
    beside(criterion, "redis", "lock_cycle_200us", CYCLE, |budget| {
        let near = round_trip(far_away(Duration::ZERO));
        let each_way = Duration::from_micros(200).saturating_sub(near) / 2;
        let far = far_away(each_way);
        println!(
            "redis/lock_cycle_200us: a round trip takes {:?}",
            round_trip(far)
        );
        let tapes = cycles(budget, far);
        print_beside("redis/lock_cycle_200us", CYCLE, &tapes, 2);
        tapes
    });
}

/// A proxy to the server that delivers every byte so much later. It spins: a sleep is not that exact.
fn far_away(each_way: Duration) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let pass = move |mut from: TcpStream, mut to: TcpStream| {
        let mut bytes = [0; 4096];
        while let Ok(read @ 1..) = from.read(&mut bytes) {
            let began = Instant::now();
            while began.elapsed() < each_way {
                std::hint::spin_loop();
            }
            if to.write_all(&bytes[..read]).is_err() {
                break;
            }
        }
        let _ = to.shutdown(std::net::Shutdown::Both);
    };
    thread::spawn(move || {
        for client in listener.incoming() {
            let client = client.unwrap();
            let server = TcpStream::connect(SERVER.addr()).unwrap();
            for stream in [&client, &server] {
                stream.set_nodelay(true).unwrap();
            }
            let (back, forth) = (client.try_clone().unwrap(), server.try_clone().unwrap());
            thread::spawn(move || pass(client, forth));
            thread::spawn(move || pass(server, back));
        }
    });
    address
}

/// The median of some PINGs.
fn round_trip(server: SocketAddr) -> Duration {
    let mut connection = plain_to(server);
    let mut took: Vec<_> = (0..200)
        .map(|_| timed(|| redis::cmd("PING").exec(&mut connection).unwrap()))
        .collect();
    took.sort();
    took[took.len() / 2]
}

/// Prints what the server itself spends on a cycle, by its own count: steady on a busy machine, too.
fn server_time() {
    let cycles: u32 = if std::env::args().any(|it| it == "--test") {
        100
    } else {
        20_000
    };
    let mut operator = plain();
    let mut evalsha = |work: &mut dyn FnMut()| {
        redis::cmd("CONFIG")
            .arg("RESETSTAT")
            .exec(&mut operator)
            .unwrap();
        for _ in 0..cycles {
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
        usec.unwrap_or_default() / f64::from(cycles)
    };
    let locker = factory().locker("server-time").build().unwrap();
    let mut floor = Floor::new(SERVER.addr());
    let ours = evalsha(&mut || drop(locker.lock().unwrap()));
    let least = evalsha(&mut || floor.cycle());
    println!(
        "redis/server_time: EVALSHA {ours:.1} us a cycle; compare-and-delete alone {least:.1} us"
    );
}

/// Prints what the calling thread itself computes and how often it sleeps in a cycle, by the kernel's count:
/// that tells what a cycle does from what the machine was up to. Nothing where the kernel does not count.
fn client_time() {
    let cycles: u64 = if std::env::args().any(|it| it == "--test") {
        100
    } else {
        2_000
    };
    let read = |file: &str| std::fs::read_to_string(file).unwrap_or_default();
    let counted = || -> Option<[u64; 2]> {
        let times = read("/proc/thread-self/schedstat");
        let status = read("/proc/thread-self/status");
        let sleeps = status
            .lines()
            .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?;
        Some([
            times.split(' ').next()?.parse().ok()?,
            sleeps.trim().parse().ok()?,
        ])
    };
    let locker = factory().locker("client-time").build().unwrap();
    let mut bare = Bare::at("client-time-bare", "0:1@127.0.0.1");
    let mut floor = Floor::new(SERVER.addr());
    let mut spent = [[0; 2]; 3];
    for turn in 0..30 {
        let side = turn % 3;
        let Some(before) = counted() else { return };
        for _ in 0..cycles / 10 {
            match side {
                0 => bare.cycle(),
                1 => drop(locker.lock().unwrap()),
                _ => floor.cycle(),
            }
        }
        let Some(after) = counted() else { return };
        for (sum, (after, before)) in spent[side].iter_mut().zip(after.into_iter().zip(before)) {
            *sum += after - before;
        }
    }
    for (side, [nanos, sleeps]) in CYCLE.into_iter().zip(spent) {
        println!(
            "redis/client_time: {side} {:.1} us and {:.2} sleeps a cycle",
            nanos as f64 / 1e3 / cycles as f64,
            sleeps as f64 / cycles as f64
        );
    }
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
        let tapes = in_turns(
            budget,
            1,
            [
                &mut || bare.hand_off(),
                &mut || lockers.hand_off(|| queued(&mut operator, "lockers", "b")),
                &mut || services.hand_off(),
            ],
        );
        print_beside("redis/handoff", sides, &tapes, 0);
        tapes
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
        let tapes = contended_8(
            "redis",
            budget,
            [(1, &alone), (8, &plain_contender), (8, &ours)],
        );
        eight_by_run(budget.smoke);
        tapes
    });
}

/// Prints locks per second of eight lockers beside those of eight bare contenders, run by run, half a second
/// of the one and half a second of the other in turns. `CONTEND_BENCH_RUNS` is their number.
fn eight_by_run(smoke: bool) {
    let number = |name, default| -> usize {
        let text: Option<String> = std::env::var(name).ok();
        text.map_or(default, |text| text.parse().unwrap())
    };
    let runs = number("CONTEND_BENCH_RUNS", if smoke { 1 } else { 10 });
    let turn = Duration::from_millis(if smoke { 20 } else { 500 });
    let ours = lockers(factory());
    let mut ratios = Vec::new();
    for run in 0..runs {
        let mut had = [[0_u64; 8]; 2];
        for slice in 0..6 {
            let side = slice % 2;
            let make: common::eight::Make<'_> = if side == 0 { &plain_contender } else { &ours };
            let (counts, _) = together(8, make, &format!("run-{run}-{slice}"), turn);
            for (all, one) in had[side].iter_mut().zip(counts) {
                *all += one;
            }
        }
        let [bare, ours] = had.map(|had| had.iter().sum::<u64>() as f64);
        let spread = |had: &[u64; 8]| {
            let (least, most) = (had.iter().min().unwrap(), had.iter().max().unwrap());
            *most as f64 / (*least).max(1) as f64
        };
        let ratio = ours / bare.max(1.0);
        let seconds = turn.as_secs_f64() * 3.0;
        println!(
            "redis/eight: run {run}: bare {:.0}/s (max/min {:.3}), contend {:.0}/s (max/min {:.3}), ratio {ratio:.2}",
            bare / seconds,
            spread(&had[0]),
            ours / seconds,
            spread(&had[1]),
        );
        ratios.push(ratio);
    }
    ratios.sort_by(f64::total_cmp);
    println!(
        "redis/eight: {runs} runs: ratio {:.2} to {:.2}, median {:.2}",
        ratios[0],
        ratios[runs - 1],
        ratios[runs / 2]
    );
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
        Bare::on(plain(), mutex, id)
    }

    fn on(connection: Connection, mutex: &str, id: &str) -> Bare {
        const HAND_OVER: &str = include_str!("../lua/hand_over.lua");
        let script = |text: &str| Script::new(&text.replace("--@hand_over\n", HAND_OVER));
        let key = format!("simba:{{{mutex}}}");
        Bare {
            connection,
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
    fn new(server: SocketAddr) -> Floor {
        Floor {
            connection: plain_to(server),
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
    plain_to(SERVER.addr())
}

fn plain_to(server: SocketAddr) -> Connection {
    let info = redis::IntoConnectionInfo::into_connection_info(format!("redis://{server}"))
        .unwrap()
        .set_tcp_settings(redis::io::tcp::TcpSettings::default().set_nodelay(true));
    redis::Client::open(info).unwrap().get_connection().unwrap()
}
