//! The rivals that are Rust crates, and ourselves: one file each.

mod contend;
mod distributed_lock;
mod redlock;
mod rslock;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use crate::measure::{Subject, hold};

/// How long a lock may be held without a renewal: the same for everybody.
const TTL: Duration = Duration::from_secs(10);

/// One who locks and unlocks.
pub trait Contender: Send {
    fn lock(&mut self);
    fn unlock(&mut self);
}

/// Makes contenders for a mutex, each with connections of its own.
pub trait Rival {
    fn contender(&self, mutex: &str) -> Box<dyn Contender>;
}

/// Everybody's name, version and maker.
pub fn all(url: &str) -> Vec<(&'static str, String, Box<dyn Rival>)> {
    let runtime = Arc::new(
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap(),
    );
    let url = url.to_owned();
    vec![
        (
            "contend",
            env!("VERSION_OF_CONTEND").to_owned(),
            Box::new(contend::Ours { url: url.clone() }),
        ),
        (
            "rslock",
            env!("VERSION_OF_RSLOCK").to_owned(),
            Box::new(rslock::RsLock {
                url: url.clone(),
                runtime: Arc::clone(&runtime),
            }),
        ),
        (
            "redlock",
            env!("VERSION_OF_REDLOCK").to_owned(),
            Box::new(redlock::Red { url: url.clone() }),
        ),
        (
            "distributed-lock",
            env!("VERSION_OF_DISTRIBUTED_LOCK_REDIS").to_owned(),
            Box::new(distributed_lock::Distributed { url, runtime }),
        ),
    ]
}

/// Contenders on threads of this process.
pub struct InProcess {
    rival: Box<dyn Rival>,
    alone: Box<dyn Contender>,
    round: usize,
}

impl InProcess {
    pub fn new(rival: Box<dyn Rival>) -> InProcess {
        InProcess {
            alone: rival.contender("alone"),
            rival,
            round: 0,
        }
    }
}

impl Subject for InProcess {
    fn cycles(&mut self, count: usize) -> Vec<Duration> {
        let contender = &mut self.alone;
        let mut cycle = || {
            let began = Instant::now();
            contender.lock();
            contender.unlock();
            began.elapsed()
        };
        // The first pays for the connection.
        cycle();
        (0..count).map(|_| cycle()).collect()
    }

    fn hand_offs(&mut self, count: usize) -> Vec<Duration> {
        let mutex = "handed-over";
        let mut owner = self.rival.contender(mutex);
        let mut waiter = self.rival.contender(mutex);
        let (go, going) = channel::<()>();
        let (done_out, done) = channel();
        let thread = std::thread::spawn(move || {
            while going.recv().is_ok() {
                waiter.lock();
                let at = Instant::now();
                waiter.unlock();
                done_out.send(at).unwrap();
            }
        });
        let mut hand_off = |number| {
            owner.lock();
            go.send(()).unwrap();
            std::thread::sleep(hold(number));
            let began = Instant::now();
            owner.unlock();
            let at: Instant = done.recv().unwrap();
            at.saturating_duration_since(began)
        };
        if self.round == 0 {
            hand_off(0);
        }
        let start = self.round * count;
        self.round += 1;
        let took = (start..start + count).map(hand_off).collect();
        drop(go);
        thread.join().unwrap();
        took
    }

    fn eight(&mut self, span: Duration) -> Vec<u64> {
        let over = Arc::new(AtomicBool::new(false));
        let start = Arc::new(Barrier::new(9));
        let threads: Vec<_> = (0..8)
            .map(|_| {
                let mut contender = self.rival.contender("eight");
                let (over, start) = (Arc::clone(&over), Arc::clone(&start));
                std::thread::spawn(move || {
                    let mut count = 0;
                    start.wait();
                    while !over.load(Ordering::Relaxed) {
                        contender.lock();
                        count += u64::from(!over.load(Ordering::Relaxed));
                        contender.unlock();
                    }
                    count
                })
            })
            .collect();
        start.wait();
        std::thread::sleep(span);
        over.store(true, Ordering::Relaxed);
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    }
}
