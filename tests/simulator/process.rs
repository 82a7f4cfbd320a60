//! One process: its clock, its threads' way to the stage, and what it does with the library.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::thread::ThreadId;
use std::time::Duration;

use contend::{
    Cancel, ErrorKind, Event, EventKind, Factory, Guard, Job, Lease, Locker, LossReason, Moment,
    MutexContendService, MutexRetrievalService, Probe, VirtualTime,
};

use crate::backend::SimulatedBackend;
use crate::clock::{Clock, MS, True, nanos};
use crate::model::Id;
use crate::rules::{BOUND, LATE};
use crate::stage::Stage;
use crate::world::Order;

/// How much faster the clock of a crashed process runs: what its threads still do is soon over.
const GHOST: u64 = 1_000_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Service,
    Locker,
    Observer,
    /// Plays the schedule; does nothing in it.
    Operator,
}

pub struct Process {
    pub number: usize,
    pub role: Role,
    /// Which of the plan's clocks and leases it has.
    pub like: usize,
    pub id: Id,
    pub name: Arc<str>,
    pub lease: Lease,
    clock: Mutex<Clock>,
    pub crashed: AtomicBool,
    pub front: Mutex<Front>,
    stage: OnceLock<Weak<Stage>>,
    /// True time, as the stage has it.
    now: OnceLock<Arc<AtomicU64>>,
}

/// What the monitor asks for belief.
pub enum Front {
    None,
    Service(MutexContendService),
    /// Those that the threads of a locker have not dropped.
    Guards(Vec<Arc<Guard>>),
    Observer(MutexRetrievalService),
}

impl Process {
    pub fn new(
        number: usize,
        role: Role,
        like: usize,
        id: Id,
        name: &Arc<str>,
        lease: Lease,
        clock: Clock,
    ) -> Arc<Process> {
        Arc::new(Process {
            number,
            role,
            like,
            id,
            name: Arc::clone(name),
            lease,
            clock: Mutex::new(clock),
            crashed: AtomicBool::new(false),
            front: Mutex::new(Front::None),
            stage: OnceLock::new(),
            now: OnceLock::new(),
        })
    }

    pub fn enter(&self, stage: &Arc<Stage>) {
        let _ = self.stage.set(Arc::downgrade(stage));
        let _ = self.now.set(stage.clock());
    }

    pub fn stage(&self) -> Arc<Stage> {
        self.stage
            .get()
            .and_then(Weak::upgrade)
            .expect("the stage outlives its threads")
    }

    pub fn clock(&self) -> Clock {
        *self.clock.lock().unwrap()
    }

    pub fn is_crashed(&self) -> bool {
        self.crashed.load(Ordering::Relaxed)
    }

    /// From here on it touches nothing, and runs out fast.
    pub fn crash(&self, now: True) {
        self.crashed.store(true, Ordering::Relaxed);
        let mut clock = self.clock.lock().unwrap();
        let shown = clock.shows(now);
        let rate = clock.rate * GHOST;
        // `now * rate` must not overflow: from here on it counts from `now`.
        *clock = Clock {
            offset: shown,
            rate,
            from: now,
        };
    }

    /// The fence believed in, and for how long.
    pub fn belief(&self) -> Option<(u64, Duration)> {
        match &*self.front.lock().unwrap() {
            // `is_owner` and the fence count, whatever `valid_for` says.
            Front::Service(service) => Some((service.fence()?, service.valid_for())),
            Front::Guards(guards) => {
                let guard = guards.iter().find(|guard| guard.is_valid())?;
                Some((guard.fence(), guard.valid_for()))
            }
            _ => None,
        }
    }

    pub fn local(&self) -> Moment {
        let now = self.now.get().expect("it has entered a stage");
        self.clock().moment(now.load(Ordering::Relaxed))
    }

    fn show(&self, front: Front) -> Front {
        std::mem::replace(&mut *self.front.lock().unwrap(), front)
    }

    /// Sleeps, unless the process has crashed.
    pub fn sleep(&self, duration: u64) {
        let until = self.local() + Duration::from_nanos(duration);
        while self.local() < until && !self.is_crashed() {
            VirtualTime::wait(self, 0, until);
        }
    }

    fn roll_below(&self, n: u64) -> u64 {
        self.stage().lock().dice.below(n.max(1))
    }

    /// Waits for an order until `until`; `None` then.
    fn order(&self, until: Moment) -> Option<Order> {
        loop {
            if self.is_crashed() {
                return Some(Order::Stop);
            }
            let stage = self.stage();
            if let Some(order) = stage.lock().notes[self.number].orders.pop_front() {
                return Some(order);
            }
            if until <= self.local() {
                return None;
            }
            VirtualTime::wait(self, self.number, until);
        }
    }

    fn is_over(&self) -> bool {
        self.is_crashed() || self.stage().lock().finale
    }

    /// What the process does from its start to its end.
    pub fn live(self: &Arc<Process>) {
        let stage = self.stage();
        let backend = Arc::new(SimulatedBackend::new(self));
        let factory = Factory::new(backend, self.lease).with_probe(Arc::new(Ear(Arc::clone(self))));
        match self.role {
            Role::Service => self.serve(&factory),
            Role::Locker => self.lock(&factory),
            Role::Observer => self.observe(&factory),
            Role::Operator => {}
        }
        drop(factory);
        stage.lock().note_end(self.number);
    }

    fn renew_after(&self) -> Option<Duration> {
        let latest = nanos(self.lease.belief() - self.lease.request_limit());
        let stage = self.stage();
        let mut world = stage.lock();
        let chosen = world.dice.chance(400);
        chosen.then(|| Duration::from_nanos(world.dice.between(latest / 10, latest)))
    }

    fn serve(self: &Arc<Process>, factory: &Factory) {
        let stage = self.stage();
        let mut builder = factory.contend("m").id(&*self.name);
        if let Some(after) = self.renew_after() {
            builder = builder.renew_after(after);
        }
        if stage.lock().dice.chance(600) {
            let (one, two) = (Arc::clone(self), Arc::clone(self));
            let process = Arc::clone(self);
            let executor = move |job: Job| {
                let stage = process.stage();
                let drops = {
                    let mut world = stage.lock();
                    let faulty = world.faulty;
                    world.dice.chance(if faulty { 50 } else { 0 })
                };
                if !drops {
                    stage.start(&process, job);
                }
            };
            if stage.lock().dice.chance(500) {
                drop(factory.clone().with_executor(Arc::new(executor)));
            }
            builder = builder
                .on_acquired(move |event| one.callback(event))
                .on_released(move |event| two.callback(event));
            stage.lock().notes[self.number].listens = true;
        }
        let service = builder.build().expect("a valid service");
        self.show(Front::Service(service.clone()));
        while !self.is_over() {
            service.start().expect("it is stopped");
            let resigns = loop {
                match self.order(Moment::FAR) {
                    Some(Order::Resign) => break true,
                    Some(Order::Stop) | None => break false,
                    Some(Order::Cancel) => {}
                }
            };
            if resigns {
                let rest = Duration::from_nanos(self.roll_below(nanos(self.lease.ttl())));
                let _ = service.resign_for(rest);
            }
            self.stop(&service);
            if self.is_over() {
                break;
            }
            self.sleep(self.roll_below(nanos(self.lease.ttl()) / 2));
        }
        drop(self.show(Front::None));
        drop(service);
    }

    fn stop(&self, service: &MutexContendService) {
        let stage = self.stage();
        // A callback may take longer than `stop` waits.
        while service.stop().is_err() {
            stage.lock().tally.slow_stops += 1;
        }
        let mut world = stage.lock();
        let notes = &world.notes[self.number];
        if notes.announced.is_some() && !self.is_crashed() {
            let what = format!(
                "P{} stopped with {:?} announced",
                self.number, notes.announced
            );
            world.violate(crate::rules::ALTERNATE, what);
        }
        world.tally.stops += 1;
    }

    /// Takes its time, in the transition too.
    fn callback(&self, event: &Event) {
        let stage = self.stage();
        let takes = {
            let mut world = stage.lock();
            world.note_callback(
                self.number,
                event.kind == EventKind::Acquired,
                event.fence(),
                true,
            );
            let longest = nanos(self.lease.total());
            let longest =
                world
                    .dice
                    .pick(&[1, 1, longest / 50, longest / 10, longest, longest * 2]);
            world.dice.below(longest)
        };
        self.sleep(takes);
        let acquired = event.kind == EventKind::Acquired;
        stage
            .lock()
            .note_callback(self.number, acquired, event.fence(), false);
    }

    fn lock(self: &Arc<Process>, factory: &Factory) {
        let stage = self.stage();
        let mut builder = factory.locker("m").id(&*self.name);
        if let Some(after) = self.renew_after() {
            builder = builder.renew_after(after);
        }
        let ttl = nanos(self.lease.ttl());
        let (two, hands_on) = {
            let mut world = stage.lock();
            (world.dice.chance(500), world.dice.chance(500))
        };
        if hands_on {
            let limit = self.roll_below(ttl * 2);
            builder = builder.local_handoff(Duration::from_nanos(limit));
        }
        let locker = builder.build().expect("a valid locker");
        self.show(Front::Guards(Vec::new()));
        let running = Arc::new(AtomicBool::new(two));
        if two {
            let (this, locker, ends) = (Arc::clone(self), locker.clone(), Arc::clone(&running));
            let body = move || {
                this.lock_again_and_again(&locker, false, hands_on);
                drop(locker);
                ends.store(false, Ordering::Relaxed);
            };
            stage.start(self, Box::new(body));
        }
        self.lock_again_and_again(&locker, true, hands_on);
        while running.load(Ordering::Relaxed) {
            VirtualTime::wait(&**self, 0, self.local() + Duration::from_millis(100));
        }
        self.show(Front::None);
    }

    /// `first`: the thread whose waits are cancelled.
    fn lock_again_and_again(&self, locker: &Locker, first: bool, hands_on: bool) {
        let stage = self.stage();
        let ttl = nanos(self.lease.ttl());
        while !self.is_over() {
            let cancel = Cancel::new();
            let (kind, timeout, pauses) = {
                let mut world = stage.lock();
                if first {
                    world.notes[self.number].cancel = Some(cancel.clone());
                }
                let longest = world.dice.pick(&[ttl / 20, ttl, ttl * 4]);
                (
                    if first {
                        world.dice.below(4)
                    } else {
                        world.dice.between(2, 3)
                    },
                    world.dice.below(longest),
                    world.notes[self.number].pauses,
                )
            };
            let timeout = Duration::from_nanos(timeout);
            let begun = self.local();
            let (locked, bound) = match kind {
                0 | 1 => (locker.lock_until_cancelled(&cancel), None),
                2 => (
                    locker.try_lock_for(timeout),
                    Some(timeout + self.lease.request_limit()),
                ),
                _ => (locker.try_lock(), Some(self.lease.request_limit())),
            };
            let calm = |this: &Process| {
                stage.lock().notes[this.number].pauses == pauses && !this.is_crashed()
            };
            if let Some(bound) = bound
                && self.local() > begun + bound + Duration::from_millis(10)
                && calm(self)
            {
                let took = self.local() - begun;
                stage.lock().violate(
                    BOUND,
                    format!(
                        "P{}: lock {kind} bound {bound:?} took {took:?}",
                        self.number
                    ),
                );
            }
            match locked {
                Ok(guard) => self.hold(guard, pauses, hands_on),
                Err(error) => {
                    let expected = matches!(
                        error.kind(),
                        ErrorKind::Held
                            | ErrorKind::Cancelled
                            | ErrorKind::Timeout
                            | ErrorKind::Unreachable
                            | ErrorKind::Panicked
                    );
                    if !expected {
                        stage
                            .lock()
                            .violate(BOUND, format!("P{}: {error}", self.number));
                    }
                    if error.kind() == ErrorKind::Cancelled {
                        let mut world = stage.lock();
                        world.tally.cancelled += 1;
                        if let Some(at) = world.notes[self.number].cancelled_at {
                            let took = world.now - at;
                            let bound = nanos(self.lease.request_limit()) * 103 / 100 + 10 * MS;
                            if took > bound
                                && world.notes[self.number].pauses == pauses
                                && !self.is_crashed()
                            {
                                world.violate(
                                    BOUND,
                                    format!("P{}: cancelling took {took}", self.number),
                                );
                            }
                        }
                    }
                }
            }
            if first {
                stage.lock().notes[self.number].cancelled_at = None;
            }
            if self.is_over() {
                break;
            }
            self.sleep(self.roll_below(ttl / 4));
        }
    }

    fn hold(&self, guard: Guard, pauses: u64, hands_on: bool) {
        let stage = self.stage();
        let fence = guard.fence();
        if !guard.is_valid()
            && stage.lock().notes[self.number].pauses == pauses
            && !self.is_crashed()
        {
            stage
                .lock()
                .violate(LATE, format!("P{}: lock() returned {guard:?}", self.number));
        }
        let lost = guard.lost();
        let guard = Arc::new(guard);
        if let Front::Guards(guards) = &mut *self.front.lock().unwrap() {
            let mut world = stage.lock();
            if guards.iter().any(|other| other.is_valid()) && !self.is_crashed() {
                let what = format!("two threads of P{} have a guard", self.number);
                world.violate(crate::rules::TWO, what);
            }
            for other in guards.iter() {
                let winding = world.notes[self.number].winding_until(other.fence());
                if winding.is_some_and(|until| self.local() < until) && !self.is_crashed() {
                    let what = format!(
                        "P{} has {fence} while another thread winds down {} until {winding:?}",
                        self.number,
                        other.fence()
                    );
                    world.violate(crate::rules::WIND_DOWN, what);
                }
            }
            drop(world);
            guards.push(Arc::clone(&guard));
        }
        let until = self.local()
            + Duration::from_nanos({
                let ttl = nanos(self.lease.ttl());
                let mut world = stage.lock();
                let longest = world.dice.pick(&[1, ttl / 4, ttl * 3]);
                world.dice.below(longest)
            });
        // Looks now and then, as one that works does.
        let step = nanos(self.lease.ttl()) / 4;
        while self.local() < until && !self.is_over() && guard.is_valid() {
            self.sleep(step.min(nanos(until - self.local())));
        }
        if !guard.is_valid() {
            let quarter = nanos(self.lease.transition()) / 4;
            self.sleep(quarter + nanos(self.lease.request_limit()) / 8 + 10 * MS);
            let mut world = stage.lock();
            world.tally.guards_lost += 1;
            if world.notes[self.number].pauses == pauses
                && !self.is_crashed()
                && lost.try_recv().unwrap_err().is_empty()
            {
                world.violate(
                    crate::rules::OVERDUE,
                    format!("P{}: nobody said that {fence} is lost", self.number),
                );
            }
            let stuck = world.faulty && world.dice.chance(300);
            drop(world);
            if stuck {
                self.sleep(2 * nanos(self.lease.total()));
            }
        }
        if hands_on && guard.is_valid() {
            // The next thread may go on with it.
            stage.lock().notes[self.number].hand_on();
        }
        if let Front::Guards(guards) = &mut *self.front.lock().unwrap() {
            guards.retain(|its| !Arc::ptr_eq(its, &guard));
        }
        let guard = Arc::try_unwrap(guard).expect("nobody else has it");
        let begun = self.local();
        let pauses = stage.lock().notes[self.number].pauses;
        let ended = guard.unlock();
        let took = self.local() - begun;
        let mut world = stage.lock();
        if world.notes[self.number].pauses != pauses || self.is_crashed() {
            return;
        }
        if took > self.lease.request_limit() + Duration::from_millis(10) {
            world.violate(BOUND, format!("P{}: unlocking took {took:?}", self.number));
        }
        if let Err(error) = ended
            && !matches!(
                error.kind(),
                ErrorKind::Timeout | ErrorKind::Lost | ErrorKind::Panicked
            )
        {
            world.violate(BOUND, format!("P{}: unlock: {error}", self.number));
        }
    }

    fn observe(self: &Arc<Process>, factory: &Factory) {
        let observer = factory.observe("m").build().expect("a valid observer");
        self.show(Front::Observer(observer.clone()));
        while !self.is_over() {
            observer.start().expect("it is stopped");
            while self.order(Moment::FAR) == Some(Order::Cancel) {}
            // Bounded as every stop, it may have to be repeated after a pause of its worker.
            while observer.stop().is_err() && !self.is_over() {}
        }
        drop(self.show(Front::None));
    }
}

impl VirtualTime for Process {
    fn now(&self) -> Moment {
        self.local()
    }

    /// Between a reply and what is made of it: where a pause hurts.
    fn roll(&self) -> f64 {
        self.maybe_pause();
        self.stage().lock().dice.roll()
    }

    fn wait(&self, key: usize, until: Moment) {
        let at = self.clock().reaches_moment(until);
        self.stage().wait(key, at);
        self.maybe_pause();
    }

    fn notify(&self, key: usize) {
        self.stage().notify(key);
    }

    fn start(&self, _name: &str, body: Box<dyn FnOnce() + Send>) -> ThreadId {
        let stage = self.stage();
        let process = stage.lock().process(self.number);
        stage.start(&process, body)
    }
}

impl Process {
    /// Maybe the whole process is paused here, for a while.
    pub fn maybe_pause(&self) {
        let stage = self.stage();
        if stage.lock().pauses(self.number) {
            let at = stage.now();
            stage.wait(0, at);
        }
    }
}

/// Hears of gains and losses from inside.
struct Ear(Arc<Process>);

impl Probe for Ear {
    fn gained(&self, _mutex: &str, _id: &str, fence: u64) {
        let belief = self.0.belief();
        self.0
            .stage()
            .lock()
            .note_gained(self.0.number, fence, belief);
    }

    fn lost(&self, _mutex: &str, _id: &str, fence: u64, _held: Duration, reason: LossReason) {
        self.0
            .stage()
            .lock()
            .note_lost(self.0.number, fence, reason);
    }
}
