//! The threads of one schedule. Each is a real thread, but one runs at a time: one that blocks plays the
//! world on until a thread can go on, and passes the baton to it. So a seed replays exactly.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, Thread, ThreadId};

use contend::{VirtualTime, enter_virtual_time};

use crate::clock::True;
use crate::process::Process;
use crate::rules::SPIN;
use crate::world::{Action, World};

/// The thread that plays schedules and waits for their ends.
pub const DRIVER: usize = 0;

thread_local! {
    static SEAT: Cell<usize> = const { Cell::new(DRIVER) };
}

/// What the threads of one schedule share.
pub struct Stage {
    now: Arc<AtomicU64>,
    world: Mutex<World>,
    pool: Arc<Pool>,
}

/// Threads that are used for one schedule after the other.
pub struct Pool {
    seats: Mutex<Vec<Arc<Seat>>>,
}

struct Seat {
    open: AtomicBool,
    thread: OnceLock<Thread>,
    job: Mutex<Option<Job>>,
}

struct Job {
    stage: Arc<Stage>,
    process: Arc<Process>,
    body: Box<dyn FnOnce() + Send>,
}

impl Seat {
    fn new() -> Arc<Seat> {
        Arc::new(Seat {
            open: AtomicBool::new(false),
            thread: OnceLock::new(),
            job: Mutex::new(None),
        })
    }

    fn open(&self) {
        self.open.store(true, Ordering::Release);
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }

    fn pass(&self) {
        while !self.open.swap(false, Ordering::Acquire) {
            thread::park();
        }
    }
}

impl Pool {
    /// For the calling thread, which drives.
    pub fn new() -> Arc<Pool> {
        let driver = Seat::new();
        let _ = driver.thread.set(thread::current());
        Arc::new(Pool {
            seats: Mutex::new(vec![driver]),
        })
    }

    fn seat(&self, number: usize) -> Arc<Seat> {
        Arc::clone(&self.seats.lock().unwrap()[number])
    }

    fn grow(&self) {
        let mut seats = self.seats.lock().unwrap();
        let number = seats.len();
        let seat = Seat::new();
        let taken = Arc::clone(&seat);
        let handle = thread::spawn(move || {
            SEAT.set(number);
            loop {
                taken.pass();
                let Some(job) = taken.job.lock().unwrap().take() else {
                    return;
                };
                let Job {
                    stage,
                    process,
                    body,
                } = job;
                let number_of_process = process.number;
                enter_virtual_time(Some(process));
                if catch_unwind(AssertUnwindSafe(body)).is_err() {
                    let mut world = stage.lock();
                    world.violate(SPIN, format!("a thread of P{number_of_process} panicked"));
                }
                // A thread that plays the world on wakes others in its name.
                let operator = stage.lock().process(0);
                enter_virtual_time(Some(operator));
                stage.lock().rest(number);
                stage.pass_on(None);
            }
        });
        let _ = seat.thread.set(handle.thread().clone());
        seats.push(seat);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        for seat in self.seats.get_mut().unwrap().iter().skip(1) {
            seat.open();
        }
    }
}

impl Stage {
    pub fn new(world: World, pool: &Arc<Pool>) -> Arc<Stage> {
        Arc::new(Stage {
            now: Arc::default(),
            world: Mutex::new(world),
            pool: Arc::clone(pool),
        })
    }

    /// True time, without a lock.
    pub fn now(&self) -> True {
        self.now.load(Ordering::Relaxed)
    }

    pub fn clock(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.now)
    }

    pub fn lock(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Blocks the calling thread until `key` is notified, or until `at`.
    pub fn wait(self: &Arc<Stage>, key: usize, at: True) {
        let me = SEAT.get();
        self.lock().wait(me, key, at);
        self.pass_on(Some(me));
    }

    /// Blocks the calling thread until its call, which was begun, is over.
    pub fn finish_call(self: &Arc<Stage>) {
        self.pass_on(Some(SEAT.get()));
    }

    pub fn seat() -> usize {
        SEAT.get()
    }

    pub fn notify(&self, key: usize) {
        self.lock().notify(key);
    }

    /// Seats `body` at a free place; it runs when its turn comes.
    pub fn start(
        self: &Arc<Stage>,
        process: &Arc<Process>,
        body: Box<dyn FnOnce() + Send>,
    ) -> ThreadId {
        let number = self.lock().seat(process.number);
        while self.pool.seats.lock().unwrap().len() <= number {
            self.pool.grow();
        }
        let seat = self.pool.seat(number);
        *seat.job.lock().unwrap() = Some(Job {
            stage: Arc::clone(self),
            process: Arc::clone(process),
            body,
        });
        seat.thread
            .get()
            .map_or_else(|| thread::current().id(), Thread::id)
    }

    /// Plays the world until a thread can go on. `me` then waits for its turn.
    fn pass_on(self: &Arc<Stage>, me: Option<usize>) {
        let next = loop {
            let mut world = self.lock();
            if let Some(next) = world.next_ready() {
                break next;
            }
            let actions = world.play();
            self.now.store(world.now, Ordering::Relaxed);
            drop(world);
            for action in actions {
                match action {
                    Action::Unpark(unparker) => unparker.unpark(),
                    Action::Cancel(process, cancel) => {
                        let before = enter_virtual_time(Some(process as Arc<dyn VirtualTime>));
                        cancel.cancel();
                        enter_virtual_time(before);
                    }
                    Action::Start(process) => {
                        process.enter(self);
                        let lives = Arc::clone(&process);
                        self.start(&process, Box::new(move || lives.live()));
                    }
                }
            }
        };
        if me == Some(next) {
            return;
        }
        self.pool.seat(next).open();
        if let Some(me) = me {
            self.pool.seat(me).pass();
        }
    }

    /// Plays from the first thread to the last; called by the driver.
    pub fn play(self: &Arc<Stage>) {
        let operator = self.lock().process(0);
        operator.enter(self);
        let before = enter_virtual_time(Some(operator as Arc<dyn VirtualTime>));
        self.lock().sit();
        self.pass_on(Some(DRIVER));
        enter_virtual_time(before);
    }
}
