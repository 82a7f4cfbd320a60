//! What many callers cost: a server that is slower than they ask, many mutexes in rotation, many names looked at.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::support::{
    CREATOR, HANG, PATIENCE, Verbs, builder, factory, name, number, packets, soon,
};
use contend::zk::Mode;
use contend::{ErrorKind, Parker};
use testbed::{ZooKeeperServer, wait_until, within};

const T: Duration = Duration::from_secs(10);
const LONG: Duration = Duration::from_secs(50);

/// A way to a server on which replies pass one by one, `per_second` while it is slow.
struct Throttle {
    addr: SocketAddr,
    slow: Arc<AtomicBool>,
}

impl Throttle {
    fn to(server: SocketAddr, per_second: u32) -> Throttle {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap();
        let slow = Arc::new(AtomicBool::new(false));
        let is_slow = Arc::clone(&slow);
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let client = client.unwrap();
                let server = TcpStream::connect(server).unwrap();
                server.set_nodelay(true).unwrap();
                let (from, to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
                std::thread::spawn(move || std::io::copy(&mut &from, &mut &to));
                let is_slow = Arc::clone(&is_slow);
                std::thread::spawn(move || pass_frames(&server, &client, &is_slow, per_second));
            }
        });
        Throttle { addr, slow }
    }
}

fn pass_frames(mut from: &TcpStream, mut to: &TcpStream, slow: &AtomicBool, per_second: u32) {
    let mut next = Instant::now();
    loop {
        let mut frame = vec![0; 4];
        if from.read_exact(&mut frame).is_err() {
            let _ = to.shutdown(std::net::Shutdown::Both);
            return;
        }
        let length = u32::from_be_bytes([frame[0], frame[1], frame[2], frame[3]]);
        frame.resize(4 + length as usize, 0);
        if from.read_exact(&mut frame[4..]).is_err() {
            return;
        }
        if slow.load(Ordering::Relaxed) {
            next = next.max(Instant::now()) + Duration::from_secs(1) / per_second;
            std::thread::sleep(next.saturating_duration_since(Instant::now()));
        }
        if to.write_all(&frame).is_err() {
            return;
        }
    }
}

/// `CONTEND_LOAD_THREADS` callers (300 by default) try for `CONTEND_LOAD_SECONDS` (6 by default).
#[test]
fn request_of_caller_that_gave_up_is_not_sent() {
    let callers = number("CONTEND_LOAD_THREADS", 300);
    let span = Duration::from_secs(number("CONTEND_LOAD_SECONDS", 6));
    within(HANG * 3 + span * 2, || {
        let server = ZooKeeperServer::start();
        let throttle = Throttle::to(server.addr(), 200);
        let (holder, ours) = (factory(server.addr(), LONG), factory(throttle.addr, T));
        let mutex = name("slow");
        let holders: Vec<_> = (0..callers)
            .map(|number| holder.locker(format!("{mutex}-{number}")).build().unwrap())
            .collect();
        let guards: Vec<_> = holders
            .iter()
            .map(|holder| holder.try_lock_for(PATIENCE).unwrap())
            .collect();
        let free = ours.locker(name("free")).build().unwrap();
        drop(free.try_lock_for(PATIENCE).unwrap());
        throttle.slow.store(true, Ordering::Relaxed);
        let limit = Duration::from_millis(300);
        for asks in ["try_lock_for", "ping"] {
            let over = Instant::now() + span;
            std::thread::scope(|scope| {
                for number in 0..callers {
                    let locker = ours.locker(format!("{mutex}-{number}")).build().unwrap();
                    let ours = &ours;
                    scope.spawn(move || {
                        while Instant::now() < over {
                            if asks == "ping" {
                                let _ = ours.ping(limit);
                            } else {
                                assert!(locker.try_lock_for(limit).is_err(), "the mutex is held");
                            }
                        }
                    });
                }
            });
            let stopped = Instant::now();
            drop(free.try_lock_for(HANG).unwrap());
            let took = stopped.elapsed();
            println!(
                "{callers} callers of {asks} for {span:?}: the first lock {took:?} after they stopped"
            );
            assert!(took < Duration::from_secs(4), "{asks}: {took:?}");
        }
        drop(guards);
    });
}

/// What a lock costs does not depend on how many mutexes are in rotation.
#[test]
fn many_mutexes_in_rotation_cost_no_more_each() {
    within(HANG * 2, || {
        let server = ZooKeeperServer::start();
        let ours = factory(server.addr(), LONG);
        let per_lock = [900, 1_100].map(|count| {
            let mutex = name("rotation");
            let lockers: Vec<_> = (0..count)
                .map(|number| ours.locker(format!("{mutex}-{number}")).build().unwrap())
                .collect();
            let round = || {
                for locker in &lockers {
                    drop(locker.try_lock_for(PATIENCE).unwrap());
                }
            };
            round();
            let asked = packets(&server);
            round();
            (packets(&server) - asked) as f64 / f64::from(count)
        });
        println!("requests per lock with 900 and 1,100 mutexes: {per_lock:.2?}");
        assert!(per_lock[1] < per_lock[0] + 0.5, "{per_lock:?}");
    });
}

/// `CONTEND_LOAD_NAMES` says how many mutexes are looked at (3,000 by default).
#[test]
fn dropped_observer_leaves_no_watch() {
    let names = number("CONTEND_LOAD_NAMES", 3_000);
    within(HANG * 2, || {
        let server = ZooKeeperServer::start();
        let ours = factory(server.addr(), Duration::from_secs(6));
        let wake = Parker::new().unparker();
        let backend = ours.backend().unwrap();
        for number in 0..names {
            let mutex = format!("never-{number}").into();
            let mut observer = backend.observer(&mutex, &wake).unwrap();
            observer.observe(soon()).unwrap();
        }
        let watches = || {
            let answer = server.four_letter("wchs").unwrap();
            let total = answer
                .lines()
                .find_map(|line| line.strip_prefix("Total watches:"));
            total.unwrap().trim().parse::<u64>().unwrap()
        };
        println!("{names} names: {} watches at once", watches());
        wait_until(Duration::from_secs(20), "few watches are left", || {
            watches() < 300
        });
    });
}

/// A leader whose node may be listed but not read leads all the same.
#[test]
fn try_writes_nothing_where_the_leader_may_not_be_read() {
    within(HANG, || {
        let server = ZooKeeperServer::start();
        let mutex = name("hidden");
        let ours = factory(server.addr(), LONG);
        let locker = ours.locker(&mutex).build().unwrap();
        // The parents are there, and every client may create below.
        drop(locker.try_lock_for(PATIENCE).unwrap());
        let other = builder(server.addr(), LONG).digest("other", "s3cret");
        let other = other.session().unwrap();
        let node = format!("/simba/{mutex}/_c_other-latch-");
        other
            .create_for(CREATOR, &node, b"other", Mode::EphemeralSequential, soon())
            .unwrap();
        let zxid = || {
            let answer = server.four_letter("srvr").unwrap();
            let zxid = answer
                .lines()
                .find_map(|line| line.strip_prefix("Zxid: 0x"));
            u64::from_str_radix(zxid.unwrap().trim(), 16).unwrap()
        };
        // The locker remembers that the mutex was free: its first try may write.
        locker.try_lock().map(drop).unwrap_err();
        let before = zxid();
        let tries = 50;
        for _ in 0..tries {
            let error = locker.try_lock().map(drop).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Held, "{error}");
        }
        // Some heartbeats are transactions, too.
        let written = zxid() - before;
        assert!(written < tries / 2, "{written} changes by {tries} tries");
    });
}
