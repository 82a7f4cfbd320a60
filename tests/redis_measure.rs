//! Redis, measured beside *bare*: the same scripts in the same order on plain connections, in turns
//! with ours so that a busy machine slows both. Not run with the tests:
//!
//! `cargo test --release --features redis --test redis_measure -- --ignored --nocapture --test-threads 1`

#![cfg(feature = "redis")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use contend::backend::{Attempt, Entry, Hold, Place, Seat};
use contend::redis::Builder;
use contend::{Bell, EventKind, Factory, Lease, Moment};
use ground::{RedisServer, cpu_time, rss_kib, threads, wait_until};
use redis::{Connection, Script, Value};

const PATIENCE: Duration = Duration::from_secs(30);

fn soon() -> Moment {
    Moment::now() + Duration::from_millis(2_500)
}

fn factory(server: &RedisServer) -> Factory {
    Builder::new(server.addr().to_string()).build().unwrap()
}

/// Seats of one factory.
struct Contender {
    seat: Box<dyn Seat>,
    bell: Bell,
}

impl Contender {
    fn at(factory: &Factory, mutex: &str, id: &str) -> Contender {
        let place = Place {
            mutex: mutex.into(),
            id: id.into(),
            lease: Lease::default(),
            hold: Hold::Short,
        };
        Contender {
            seat: factory.backend().unwrap().seat(&place).unwrap(),
            bell: Bell::new(),
        }
    }

    fn attempt(&mut self, entry: Entry) -> Option<u64> {
        match self.seat.acquire(entry, soon()).unwrap() {
            Attempt::Granted(grant) => Some(grant.owner.fence()),
            Attempt::Refused(_) => None,
        }
    }

    /// As a locker does it: try, and only then listen and wait.
    fn lock(&mut self) -> u64 {
        if let Some(fence) = self.attempt(Entry::Try) {
            return fence;
        }
        self.seat.listen(&self.bell.waker(), soon()).unwrap();
        loop {
            if let Some(fence) = self.attempt(Entry::Queue) {
                return fence;
            }
            self.bell.wait(Moment::now() + PATIENCE);
        }
    }

    fn release(&mut self, fence: u64) {
        assert!(self.seat.release(fence, soon()).unwrap());
    }
}

/// The scripts as they are sent, on a plain connection.
struct Bare {
    connection: Connection,
    acquire: Script,
    release: Script,
    key: String,
    id: String,
}

impl Bare {
    fn at(server: &RedisServer, mutex: &str, id: &str) -> Bare {
        const HEAD: &str = include_str!("../lua/mutex.lua");
        let script = |text: &str| Script::new(&format!("{HEAD}\n{text}"));
        Bare {
            connection: plain(server),
            acquire: script(include_str!("../lua/acquire.lua")),
            release: script(include_str!("../lua/release.lua")),
            key: format!("simba:{{{mutex}}}"),
            id: id.to_owned(),
        }
    }

    fn acquire(&mut self, entry: &str) -> Option<u64> {
        let value: Value = self
            .acquire
            .key(&[
                self.key.clone(),
                format!("{}:contender", self.key),
                format!("{}:lease", self.key),
            ])
            .arg(&[&self.id, "16000", "6000", "1000", entry, "", "", "0"])
            .invoke(&mut self.connection)
            .unwrap();
        match value {
            Value::Array(fields) if fields[0] == Value::Int(1) => match fields[2] {
                Value::Int(fence) => Some(fence as u64),
                _ => None,
            },
            _ => None,
        }
    }

    fn release(&mut self, fence: u64) {
        let done: i64 = self
            .release
            .key(&[
                self.key.clone(),
                format!("{}:contender", self.key),
                format!("{}:lease", self.key),
            ])
            .arg(&[&self.id, "1000", &fence.to_string(), "0"])
            .invoke(&mut self.connection)
            .unwrap();
        assert_eq!(done, 1);
    }
}

fn plain(server: &RedisServer) -> Connection {
    let info = redis::IntoConnectionInfo::into_connection_info(server.url())
        .unwrap()
        .set_tcp_settings(redis::io::tcp::TcpSettings::default().set_nodelay(true));
    redis::Client::open(info).unwrap().get_connection().unwrap()
}

fn percentiles(name: &str, samples: &mut [Duration]) -> Duration {
    samples.sort();
    let at = |part: usize| samples[samples.len() * part / 100];
    println!(
        "{name}: p50 {:?}, p99 {:?} over {}",
        at(50),
        at(99),
        samples.len()
    );
    at(50)
}

#[test]
#[ignore = "a measurement"]
fn an_uncontended_pair() {
    let server = RedisServer::start();
    let factory = factory(&server);
    let mut ours = Contender::at(&factory, "ours", "0:1@host");
    let mut bare = Bare::at(&server, "bare", "0:1@host");
    let (mut of_ours, mut of_bare) = (Vec::new(), Vec::new());
    for round in 0..200 {
        for _ in 0..100 {
            let began = Instant::now();
            let fence = ours.attempt(Entry::Try).unwrap();
            ours.release(fence);
            of_ours.push(began.elapsed());
        }
        for _ in 0..100 {
            let began = Instant::now();
            let fence = bare.acquire("try").unwrap();
            bare.release(fence);
            of_bare.push(began.elapsed());
        }
        if round == 10 {
            of_ours.clear();
            of_bare.clear();
        }
    }
    let ours = percentiles("uncontended pair, ours", &mut of_ours);
    let bare = percentiles("uncontended pair, bare", &mut of_bare);
    println!(
        "uncontended ratio: {:.3}",
        ours.as_secs_f64() / bare.as_secs_f64()
    );
}

/// One round of the bare hand-off: release script, message, acquire script by another thread.
fn bare_hand_off(
    server: &RedisServer,
    rounds: mpsc::Receiver<()>,
    results: mpsc::Sender<Duration>,
) {
    let mut owner = Bare::at(server, "bare", "a");
    let mut waiter = Bare::at(server, "bare", "b");
    let mut messages = plain(server);
    let subscribe = redis::cmd("SUBSCRIBE")
        .arg("simba:{bare}:b")
        .get_packed_command();
    messages.send_packed_command(&subscribe).unwrap();
    messages.recv_response().unwrap();
    let (ready, told) = mpsc::channel();
    let (fence_out, fence_in) = mpsc::channel();
    let listener = std::thread::spawn(move || {
        while told.recv().is_ok() {
            messages.recv_response().unwrap();
            let fence = waiter.acquire("queue").unwrap();
            let done = Instant::now();
            waiter.release(fence);
            if fence_out.send(done).is_err() {
                break;
            }
        }
    });
    let mut queue = Bare::at(server, "bare", "b");
    while rounds.recv().is_ok() {
        let fence = owner.acquire("try").unwrap();
        assert!(queue.acquire("queue").is_none());
        ready.send(()).unwrap();
        // Until the other thread sleeps in its read, as a waiter does.
        std::thread::sleep(Duration::from_micros(300));
        let began = Instant::now();
        owner.release(fence);
        results.send(fence_in.recv().unwrap() - began).unwrap();
    }
    drop(ready);
    listener.join().unwrap();
}

/// Bare hand-offs on a thread of their own, one at a time.
struct BareHandOffs {
    go: mpsc::Sender<()>,
    done: mpsc::Receiver<Duration>,
    thread: std::thread::JoinHandle<()>,
}

impl BareHandOffs {
    fn at(server: &Arc<RedisServer>) -> BareHandOffs {
        let (go, rounds) = mpsc::channel();
        let (results, done) = mpsc::channel();
        let server = Arc::clone(server);
        let thread = std::thread::spawn(move || bare_hand_off(&server, rounds, results));
        BareHandOffs { go, done, thread }
    }

    fn hand_off(&self) -> Duration {
        self.go.send(()).unwrap();
        self.done.recv().unwrap()
    }

    fn end(self) {
        drop(self.go);
        self.thread.join().unwrap();
    }
}

fn ratio(name: &str, ours: &mut [Duration], bare: &mut [Duration]) {
    let ours = percentiles(&format!("{name}, ours"), ours);
    let bare = percentiles(&format!("{name}, bare"), bare);
    let ratio = ours.as_secs_f64() / bare.as_secs_f64();
    println!("{name}, ratio of p50: {ratio:.3}");
}

#[test]
#[ignore = "a measurement"]
fn a_hand_off() {
    let server = Arc::new(RedisServer::start());
    let factory = factory(&server);
    let mut owner = Contender::at(&factory, "ours", "a");
    let mut waiter = Contender::at(&factory, "ours", "b");
    waiter.seat.listen(&waiter.bell.waker(), soon()).unwrap();
    let (go, started) = mpsc::channel::<()>();
    let (queued_out, queued) = mpsc::channel();
    let (done_out, done) = mpsc::channel();
    let worker = std::thread::spawn(move || {
        while started.recv().is_ok() {
            assert!(waiter.attempt(Entry::Queue).is_none());
            queued_out.send(()).unwrap();
            waiter.bell.wait(Moment::now() + PATIENCE);
            let fence = waiter.attempt(Entry::Queue).unwrap();
            let at = Instant::now();
            waiter.release(fence);
            done_out.send(at).unwrap();
        }
    });
    let bare = BareHandOffs::at(&server);
    let (mut of_ours, mut of_bare) = (Vec::new(), Vec::new());
    for _ in 0..2_000 {
        let fence = owner.attempt(Entry::Try).unwrap();
        go.send(()).unwrap();
        queued.recv().unwrap();
        std::thread::sleep(Duration::from_micros(300));
        let began = Instant::now();
        owner.release(fence);
        of_ours.push(done.recv().unwrap() - began);
        of_bare.push(bare.hand_off());
    }
    drop(go);
    worker.join().unwrap();
    bare.end();
    ratio("hand-off between seats", &mut of_ours, &mut of_bare);
}

#[test]
#[ignore = "a measurement"]
fn a_hand_off_between_lockers() {
    let server = Arc::new(RedisServer::start());
    let factory = factory(&server);
    let owner = factory.locker("ours").id("a").build().unwrap();
    let waiter = factory.locker("ours").id("b").build().unwrap();
    let mut operator = plain(&server);
    let mut queued = redis::cmd("ZSCORE");
    queued.arg("simba:{ours}:contender").arg("b");
    let (go, started) = mpsc::channel::<()>();
    let (done_out, done) = mpsc::channel();
    let worker = std::thread::spawn(move || {
        while started.recv().is_ok() {
            let guard = waiter.lock().unwrap();
            let at = Instant::now();
            guard.unlock().unwrap();
            done_out.send(at).unwrap();
        }
    });
    let bare = BareHandOffs::at(&server);
    let (mut of_ours, mut of_bare) = (Vec::new(), Vec::new());
    for _ in 0..2_000 {
        let guard = owner.lock().unwrap();
        go.send(()).unwrap();
        while queued
            .query::<Option<f64>>(&mut operator)
            .unwrap()
            .is_none()
        {}
        std::thread::sleep(Duration::from_micros(300));
        let began = Instant::now();
        guard.unlock().unwrap();
        of_ours.push(done.recv().unwrap() - began);
        of_bare.push(bare.hand_off());
    }
    drop(go);
    worker.join().unwrap();
    bare.end();
    let name = "hand-off between lockers, unlock() to lock()";
    ratio(name, &mut of_ours, &mut of_bare);
}

#[test]
#[ignore = "a measurement"]
fn a_hand_off_between_services() {
    let server = Arc::new(RedisServer::start());
    let factory = factory(&server);
    let (acquired_out, acquired) = mpsc::channel();
    let services: Vec<_> = ["a", "b"]
        .iter()
        .map(|id| {
            let (service, events) = factory.contend("m").id(id).channel().unwrap();
            // A reader of its own, as the next owner is one in another process.
            let acquired = acquired_out.clone();
            let reader = std::thread::spawn(move || {
                for event in events {
                    if event.kind == EventKind::Acquired {
                        acquired.send(Instant::now()).unwrap();
                    }
                }
            });
            (service, reader)
        })
        .collect();
    services[0].0.start().unwrap();
    acquired.recv_timeout(PATIENCE).unwrap();
    let bare = BareHandOffs::at(&server);
    let (mut of_ours, mut of_bare) = (Vec::new(), Vec::new());
    for turn in 0..2_000 {
        let (owner, waiter) = (turn % 2, (turn + 1) % 2);
        services[waiter].0.start().unwrap();
        let id = services[owner].0.id().to_owned();
        wait_until(PATIENCE, "the waiter waits", || {
            services[waiter].0.state().after().is_owner(&id)
        });
        std::thread::sleep(Duration::from_micros(300));
        let began = Instant::now();
        services[owner].0.stop().unwrap();
        of_ours.push(acquired.recv_timeout(PATIENCE).unwrap() - began);
        of_bare.push(bare.hand_off());
    }
    bare.end();
    let name = "hand-off between services, stop() to Acquired";
    ratio(name, &mut of_ours, &mut of_bare);
    for (service, reader) in services {
        drop(service);
        reader.join().unwrap();
    }
}

#[test]
#[ignore = "a measurement"]
fn eight_contenders_on_one_lock() {
    const SECONDS: u64 = 5;
    let server = RedisServer::start();
    let factory = factory(&server);
    let mut bare = Bare::at(&server, "bare", "a");
    let began = Instant::now();
    let mut pairs = 0_u64;
    while began.elapsed() < Duration::from_secs(SECONDS) {
        let fence = bare.acquire("try").unwrap();
        bare.release(fence);
        pairs += 1;
    }
    println!("bare loop: {} locks/s", pairs / SECONDS);
    let stop = Arc::new(AtomicBool::new(false));
    let workers: Vec<_> = (0..8)
        .map(|number| {
            let mut contender = Contender::at(&factory, "m", &format!("c{number}"));
            let stop = Arc::clone(&stop);
            std::thread::spawn(move || {
                let mut locks = 0_u64;
                while !stop.load(Ordering::Relaxed) {
                    let fence = contender.lock();
                    locks += 1;
                    contender.release(fence);
                }
                contender.seat.withdraw(soon()).unwrap();
                locks
            })
        })
        .collect();
    std::thread::sleep(Duration::from_secs(SECONDS));
    stop.store(true, Ordering::Relaxed);
    let locks: Vec<u64> = workers
        .into_iter()
        .map(|worker| worker.join().unwrap())
        .collect();
    let (least, most) = (locks.iter().min().unwrap(), locks.iter().max().unwrap());
    println!(
        "8 contenders: {} locks/s, max/min {:.3} {locks:?}",
        locks.iter().sum::<u64>() / SECONDS,
        *most as f64 / *least as f64
    );
}

#[test]
#[ignore = "a measurement"]
fn a_dead_and_a_silent_waiter() {
    let server = RedisServer::start();
    let claim = Duration::from_millis(500);
    let factory = Builder::new(server.addr().to_string())
        .claim(claim)
        .build()
        .unwrap();
    let mut dead = Vec::new();
    let mut silent = Vec::new();
    for round in 0..20 {
        for (kind, samples) in [("dead", &mut dead), ("silent", &mut silent)] {
            let mutex = format!("{kind}-{round}");
            let mut owner = Contender::at(&factory, &mutex, "owner");
            let fence = owner.attempt(Entry::Try).unwrap();
            let other = Builder::new(server.addr().to_string()).build().unwrap();
            let mut first = Contender::at(&other, &mutex, "first");
            first.seat.listen(&first.bell.waker(), soon()).unwrap();
            assert!(first.attempt(Entry::Queue).is_none());
            let mut second = Contender::at(&factory, &mutex, "second");
            second.seat.listen(&second.bell.waker(), soon()).unwrap();
            assert!(second.attempt(Entry::Queue).is_none());
            if kind == "dead" {
                drop(first);
                drop(other);
            }
            let began = Instant::now();
            owner.release(fence);
            second.bell.wait(Moment::now() + PATIENCE);
            second.attempt(Entry::Queue).unwrap();
            samples.push(began.elapsed());
        }
    }
    println!(
        "killed before the release: max {:?}",
        dead.iter().max().unwrap()
    );
    println!(
        "told and killed, claim time {claim:?}: max {:?}",
        silent.iter().max().unwrap()
    );
}

#[test]
#[ignore = "a measurement"]
fn a_thousand_services() {
    let server = RedisServer::start();
    let factory = factory(&server);
    let own = std::process::id();
    let before = (threads(own), rss_kib(own));
    let began = Instant::now();
    let services: Vec<_> = (0..1_000)
        .map(|number| {
            let service = factory.contend(&format!("m{number}")).build().unwrap();
            service.start().unwrap();
            service
        })
        .collect();
    wait_until(PATIENCE, "all own", || {
        services.iter().all(|service| service.is_owner())
    });
    println!("1,000 services own after {:?}", began.elapsed());
    println!(
        "threads {} -> {}, RSS {} -> {} KiB",
        before.0,
        threads(own),
        before.1,
        rss_kib(own)
    );
    let list = server.cli(&["CLIENT", "LIST"]);
    println!(
        "connections: {}",
        list.lines()
            .filter(|line| !line.contains("cmd=client"))
            .count()
    );
    server.cli(&["CONFIG", "RESETSTAT"]);
    let cpu = (cpu_time(own), cpu_time(server.pid()));
    std::thread::sleep(Duration::from_secs(10));
    let info = server.cli(&["INFO", "commandstats"]);
    let calls = |command: &str| {
        info.lines()
            .find(|line| line.starts_with(&format!("cmdstat_{command}:")))
            .and_then(|line| line.split(['=', ',']).nth(1)?.parse::<f64>().ok())
            .unwrap_or(0.0)
    };
    println!(
        "idle for 10 s: {:.0} evalsha/s, {:.1} subscribe/s; cpu: we {:.1} %, server {:.1} %",
        calls("evalsha") / 10.0,
        calls("subscribe") / 10.0,
        (cpu_time(own) - cpu.0).as_secs_f64() * 10.0,
        (cpu_time(server.pid()) - cpu.1).as_secs_f64() * 10.0
    );
    let began = Instant::now();
    drop(services);
    println!("all stopped after {:?}", began.elapsed());
}
