//! What is common to all hand-offs: a waiter on a thread of its own, and when it was granted.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use contend::{EventKind, Factory, Locker, MutexContendService};

/// When somebody who was told to go on was done.
pub struct Waiter {
    go: Option<Sender<()>>,
    done: Receiver<Instant>,
    thread: Option<JoinHandle<()>>,
}

impl Waiter {
    /// `wait` waits for the lock, says when it had it, and gives it back.
    pub fn new(mut wait: impl FnMut() -> Instant + Send + 'static) -> Waiter {
        let (go, going) = channel();
        let (done_out, done) = channel();
        let thread = std::thread::spawn(move || {
            while going.recv().is_ok() {
                if done_out.send(wait()).is_err() {
                    return;
                }
            }
        });
        Waiter {
            go: Some(go),
            done,
            thread: Some(thread),
        }
    }

    /// Lets it wait.
    pub fn go(&self) {
        self.go.as_ref().unwrap().send(()).unwrap();
    }

    /// When it had the lock.
    pub fn done(&self) -> Instant {
        self.done.recv_timeout(PATIENCE).unwrap()
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        self.go = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

const PATIENCE: Duration = Duration::from_secs(60);

/// Two lockers that hand over: `unlock` of the one to `lock` of the other.
pub struct Lockers {
    owner: Locker,
    waiter: Waiter,
}

impl Lockers {
    pub fn new(factory: &Factory, mutex: &str) -> Lockers {
        Lockers::between([factory, factory], mutex)
    }

    /// From a locker of the first factory to one of the second.
    pub fn between([from, to]: [&Factory; 2], mutex: &str) -> Lockers {
        let locker = to.locker(mutex).id("b").build().unwrap();
        Lockers {
            owner: from.locker(mutex).id("a").build().unwrap(),
            waiter: Waiter::new(move || {
                let guard = locker.lock().unwrap();
                let at = Instant::now();
                guard.unlock().unwrap();
                at
            }),
        }
    }

    /// `queued`: returns once the waiter stands in the queue.
    pub fn hand_off(&mut self, queued: impl FnOnce()) -> Duration {
        let guard = self.owner.lock().unwrap();
        self.waiter.go();
        queued();
        asleep();
        let began = Instant::now();
        guard.unlock().unwrap();
        self.waiter.done() - began
    }
}

/// Two services that hand over: `stop` of the one to the Acquired that the other's receiver has. Each receiver
/// has a thread that waits for it, as in two programs: `stop` goes on after the release, until its thread ended.
pub struct Services {
    services: [(MutexContendService, Receiver<Instant>); 2],
    owner: usize,
}

impl Services {
    pub fn new(factory: &Factory, mutex: &str) -> Services {
        Services::between([factory, factory], mutex)
    }

    /// Between two factories, to and fro.
    pub fn between([a, b]: [&Factory; 2], mutex: &str) -> Services {
        let service = |factory: &Factory, id| {
            let (service, events) = factory.contend(mutex).id(id).channel().unwrap();
            let (acquired, acquired_at) = channel();
            std::thread::spawn(move || {
                while let Ok(event) = events.recv() {
                    if event.kind == EventKind::Acquired && acquired.send(Instant::now()).is_err() {
                        return;
                    }
                }
            });
            (service, acquired_at)
        };
        let services = Services {
            services: [service(a, "a"), service(b, "b")],
            owner: 0,
        };
        services.services[0].0.start().unwrap();
        services.acquired(0);
        services
    }

    pub fn hand_off(&mut self) -> Duration {
        let (owner, waiter) = (self.owner, 1 - self.owner);
        let id = self.services[owner].0.id().to_owned();
        self.services[waiter].0.start().unwrap();
        let limit = Instant::now() + PATIENCE;
        while !self.services[waiter].0.state().after().is_owner(&id) {
            assert!(Instant::now() < limit, "the waiter does not wait");
            std::thread::yield_now();
        }
        asleep();
        let began = Instant::now();
        self.services[owner].0.stop().unwrap();
        self.owner = waiter;
        self.acquired(waiter) - began
    }

    fn acquired(&self, index: usize) -> Instant {
        self.services[index].1.recv_timeout(PATIENCE).unwrap()
    }
}

/// Until a waiter that has been refused sleeps in its wait.
pub fn asleep() {
    std::thread::sleep(Duration::from_micros(300));
}
