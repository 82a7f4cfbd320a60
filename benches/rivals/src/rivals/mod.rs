//! The rivals that are Rust crates, and ourselves: one file each.

mod contend;
mod distributed_lock;
mod mysql;
mod redlock;
mod rslock;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use tokio::runtime::Runtime;

/// How long a lock may be held without a renewal: the same for everybody.
const TTL: Duration = Duration::from_secs(10);

/// One who locks and unlocks.
pub trait Contender: Send {
    fn lock(&mut self);
    fn unlock(&mut self);
}

/// Makes contenders for a mutex, each with connections of its own.
pub trait Rival {
    /// How it waits, and whose choice that is.
    fn setting(&self) -> &'static str;

    /// Whether it can wait for a lock at all, within a time that can be measured.
    fn waits(&self) -> bool {
        true
    }

    fn contender(&self, mutex: &str) -> Box<dyn Contender>;
}

/// The one of this name.
pub fn subject(backend: &str, name: &str, url: &str) -> InProcess {
    let backend = backend.to_owned();
    let url = url.to_owned();
    let (version, rival): (_, Box<dyn Rival>) = match name {
        "contend" => (
            env!("VERSION_OF_CONTEND"),
            Box::new(contend::Ours { backend, url }),
        ),
        "rslock" => (env!("VERSION_OF_RSLOCK"), Box::new(rslock::RsLock { url })),
        "redlock" => (env!("VERSION_OF_REDLOCK"), Box::new(redlock::Red { url })),
        "distributed-lock" => (
            env!("VERSION_OF_DISTRIBUTED_LOCK_REDIS"),
            Box::new(distributed_lock::Distributed { url }),
        ),
        "GET_LOCK" => ("", Box::new(mysql::GetLock { url })),
        "Simba's statements" => ("3.1", Box::new(mysql::Simba { url })),
        other => panic!("{other} is nobody"),
    };
    InProcess {
        version,
        setting: rival.setting(),
        waits: rival.waits(),
        alone: rival.contender("alone"),
        rival,
        round: 0,
    }
}

/// For one contender of an asynchronous rival: it runs in the thread that waits for it, so that no
/// request has to change threads on its way.
fn runtime() -> Runtime {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_all().build().unwrap()
}

/// Contenders on threads of this process.
pub struct InProcess {
    pub version: &'static str,
    pub setting: &'static str,
    pub waits: bool,
    rival: Box<dyn Rival>,
    alone: Box<dyn Contender>,
    round: usize,
}

impl InProcess {
    /// Microseconds of each cycle.
    pub fn cycles(&mut self, count: usize) -> Vec<f64> {
        let contender = &mut self.alone;
        let mut cycle = || {
            let began = Instant::now();
            contender.lock();
            contender.unlock();
            micros(began.elapsed())
        };
        // The first pays for the connection.
        cycle();
        (0..count).map(|_| cycle()).collect()
    }

    /// Holds for so many microseconds each time; microseconds from unlock to the other's lock.
    pub fn hand_offs(&mut self, holds: &[f64]) -> Vec<f64> {
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
        let mut hand_off = |hold: f64| {
            owner.lock();
            go.send(()).unwrap();
            std::thread::sleep(Duration::from_secs_f64(hold / 1e6));
            let began = Instant::now();
            owner.unlock();
            let at: Instant = done.recv().unwrap();
            micros(at.saturating_duration_since(began))
        };
        if self.round == 0 {
            // And here the first pays for two.
            hand_off(20_000.0);
        }
        self.round += 1;
        let took = holds.iter().map(|hold| hand_off(*hold)).collect();
        drop(go);
        thread.join().unwrap();
        took
    }

    /// What each of eight had in `span` seconds, `settle` seconds after all began.
    pub fn eight(&mut self, settle: f64, span: f64) -> Vec<u64> {
        let counting = Arc::new(AtomicBool::new(false));
        let over = Arc::new(AtomicBool::new(false));
        let start = Arc::new(Barrier::new(9));
        let threads: Vec<_> = (0..8)
            .map(|_| {
                let mut contender = self.rival.contender("eight");
                let (over, start) = (Arc::clone(&over), Arc::clone(&start));
                let counting = Arc::clone(&counting);
                std::thread::spawn(move || {
                    let mut count = 0_u64;
                    start.wait();
                    while !over.load(Ordering::Relaxed) {
                        contender.lock();
                        count += u64::from(counting.load(Ordering::Relaxed));
                        contender.unlock();
                    }
                    count
                })
            })
            .collect();
        start.wait();
        std::thread::sleep(Duration::from_secs_f64(settle));
        counting.store(true, Ordering::Relaxed);
        std::thread::sleep(Duration::from_secs_f64(span));
        counting.store(false, Ordering::Relaxed);
        over.store(true, Ordering::Relaxed);
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    }
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}
