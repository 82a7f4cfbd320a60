//! Carries events to callbacks, off the worker: a slow or panicking callback never delays a renewal.

use std::cell::Cell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};

use crossbeam_channel::Receiver;
use parking_lot::{Condvar, Mutex};

use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::event::Event;

/// A piece of work for an [`Executor`].
pub type Job = Box<dyn FnOnce() + Send>;

/// Runs callbacks for a service instead of a thread of its own, such as a pool the caller has.
/// It must run every job it is given, on any thread but the one that gives it: that is the service's
/// worker, and a callback that runs there delays its renewals.
pub type Executor = Arc<dyn Fn(Job) + Send + Sync>;

/// Where a courier takes events to.
pub(crate) type Target = Arc<dyn Fn(&Event) + Send + Sync>;

/// One run of a service's callbacks.
pub(crate) struct Courier {
    round: Arc<Round>,
    executor: Option<Executor>,
    thread: Option<JoinHandle<()>>,
}

struct Round {
    /// Tells this run from others, to know a callback that calls its own service.
    number: u64,
    events: Receiver<Event>,
    target: Target,
    /// How many events were carried, and whether there will be more.
    carried: Mutex<Carried>,
    changed: Condvar,
    /// A job for the executor is on its way.
    scheduled: AtomicBool,
}

#[derive(Default)]
struct Carried {
    count: u64,
    /// A callback runs now.
    running: bool,
    /// No callback begins any more.
    over: bool,
}

thread_local! {
    /// The run whose callback this thread is in.
    static INSIDE: Cell<u64> = const { Cell::new(0) };
}

impl Courier {
    pub(crate) fn start(
        mutex: &str,
        events: Receiver<Event>,
        target: Target,
        executor: Option<Executor>,
    ) -> Result<Courier> {
        static NUMBERS: AtomicU64 = AtomicU64::new(1);
        let round = Arc::new(Round {
            number: NUMBERS.fetch_add(1, Ordering::Relaxed),
            events,
            target,
            carried: Mutex::default(),
            changed: Condvar::new(),
            scheduled: AtomicBool::new(false),
        });
        let mut thread = None;
        if executor.is_none() {
            let round = Arc::clone(&round);
            let spawned = thread::Builder::new()
                .name(format!("callbacks of {mutex}"))
                .spawn(move || {
                    // Ends when the worker drops its end of the channel.
                    for event in &round.events {
                        round.carry(&event);
                    }
                })
                .map_err(|error| {
                    Error::new(
                        ErrorKind::Unavailable,
                        "cannot start a thread for callbacks",
                    )
                    .with_source(error)
                })?;
            thread = Some(spawned);
        }
        Ok(Courier {
            round,
            executor,
            thread,
        })
    }

    pub(crate) fn number(&self) -> u64 {
        self.round.number
    }

    /// Sees to it that the events in the channel are carried.
    pub(crate) fn nudge(&self) {
        if let Some(executor) = &self.executor
            && !self.round.scheduled.swap(true, Ordering::AcqRel)
        {
            let round = Arc::clone(&self.round);
            let job: Job = Box::new(move || round.drain());
            if catch_unwind(AssertUnwindSafe(|| executor(job))).is_err() {
                log::error!("an executor panicked instead of taking a callback");
                self.round.scheduled.store(false, Ordering::Release);
            }
        }
    }

    /// Waits until `count` events were carried. `false`: not by `deadline`.
    pub(crate) fn settle(&self, count: u64, deadline: Moment) -> bool {
        self.wait(deadline, |carried| carried.count >= count)
    }

    /// Waits until the last of `count` events was carried, however long a callback runs, and joins the
    /// thread; the sender must be gone already. What an executor has not begun by `deadline` is dropped.
    pub(crate) fn finish(mut self, count: u64, deadline: Moment) {
        match self.thread.take() {
            Some(thread) => {
                let _ = thread.join();
            }
            None => {
                self.settle(count, deadline);
                let mut carried = self.round.carried.lock();
                carried.over = true;
                while carried.running {
                    self.round.changed.wait(&mut carried);
                }
            }
        }
    }

    fn wait(&self, deadline: Moment, done: impl Fn(&Carried) -> bool) -> bool {
        let mut carried = self.round.carried.lock();
        while !done(&carried) {
            let left = deadline.remaining();
            if left.is_zero() {
                return false;
            }
            self.round.changed.wait_for(&mut carried, left);
        }
        true
    }
}

/// Whether the calling thread runs a callback of the run with this number.
pub(crate) fn is_inside(number: u64) -> bool {
    number != 0 && INSIDE.get() == number
}

impl Round {
    fn carry(&self, event: &Event) {
        {
            let mut carried = self.carried.lock();
            if carried.over {
                return;
            }
            carried.running = true;
        }
        let outer = INSIDE.replace(self.number);
        if catch_unwind(AssertUnwindSafe(|| (self.target)(event))).is_err() {
            log::error!(
                "{}: a callback panicked at {:?}; the next event still comes",
                event.mutex,
                event.kind
            );
        }
        INSIDE.set(outer);
        let mut carried = self.carried.lock();
        carried.running = false;
        carried.count += 1;
        self.changed.notify_all();
    }

    fn drain(&self) {
        loop {
            for event in self.events.try_iter() {
                self.carry(&event);
            }
            self.scheduled.store(false, Ordering::Release);
            // An event that came after the last look has found `scheduled` set: carry it here.
            if self.events.is_empty() || self.scheduled.swap(true, Ordering::AcqRel) {
                return;
            }
        }
    }
}

impl fmt::Debug for Courier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Courier({})", self.round.number)
    }
}
