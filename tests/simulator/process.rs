//! One process: its clock, its threads' way to the stage, and what it does with the library.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::thread::ThreadId;
use std::time::Duration;

use contend::{
    Cancel, Error, ErrorKind, Event, EventKind, Factory, Guard, Job, Lease, Locker, LossReason,
    Moment, MutexContendService, MutexRetrievalService, Probe, VirtualTime,
};

use crate::backend::SimulatedBackend;
use crate::clock::{Clock, True, nanos};
use crate::model::Id;
use crate::rules::{ALTERNATE, BOUND, LATE, OVERDUE, TWO, WIND_DOWN};
use crate::stage::Stage;
use crate::world::Order;

/// How much faster the clock of a crashed process runs: what its threads still do is soon over.
const GHOST: u64 = 1_000_000;

/// What the scheduling of threads may add to a bound.
const SLACK: Duration = Duration::from_millis(10);

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
        let mut factory = factory.clone();
        if stage.lock().dice.chance(300) {
            let process = Arc::clone(self);
            factory = factory.with_executor(Arc::new(move |job: Job| {
                let stage = process.stage();
                let drops = {
                    let mut world = stage.lock();
                    let drops = world.faulty && world.dice.chance(50);
                    world.tally.dropped_jobs += u64::from(drops);
                    drops
                };
                if !drops {
                    stage.start(&process, job);
                }
            }));
        }
        let mut builder = factory.contend("m").id(&*self.name);
        if let Some(after) = self.renew_after() {
            builder = builder.renew_after(after);
        }
        if stage.lock().dice.chance(600) {
            let (one, two) = (Arc::clone(self), Arc::clone(self));
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
            world.violate(ALTERNATE, what);
        }
        world.tally.stops += 1;
    }

    /// Takes its time, in the transition too.
    fn callback(&self, event: &Event) {
        let stage = self.stage();
        let (acquired, fence) = (event.kind == EventKind::Acquired, event.fence());
        let takes = {
            let mut world = stage.lock();
            world.note_callback(self.number, acquired, fence, true);
            let total = nanos(self.lease.total());
            let longest = [1, 1, total / 50, total / 10, total, total * 2];
            let longest = world.dice.pick(&longest);
            world.dice.below(longest)
        };
        self.sleep(takes);
        let mut world = stage.lock();
        world.note_callback(self.number, acquired, fence, false);
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

    /// How often it was paused so far: a bound on time holds while that stays the same.
    fn pauses(&self) -> u64 {
        self.stage().lock().notes[self.number].pauses
    }

    /// Reports a broken rule, unless the process was paused meanwhile or has crashed.
    fn violate(&self, pauses: u64, rule: &'static str, what: impl fmt::Display) {
        if self.pauses() == pauses && !self.is_crashed() {
            let what = format!("P{}: {what}", self.number);
            self.stage().lock().violate(rule, what);
        }
    }

    /// `first`: the thread whose waits are cancelled.
    fn lock_again_and_again(&self, locker: &Locker, first: bool, hands_on: bool) {
        let stage = self.stage();
        let ttl = nanos(self.lease.ttl());
        let limit = self.lease.request_limit();
        while !self.is_over() {
            let cancel = Cancel::new();
            let (kind, timeout) = {
                let mut world = stage.lock();
                if first {
                    world.notes[self.number].cancel = Some(cancel.clone());
                }
                let longest = world.dice.pick(&[ttl / 20, ttl, ttl * 4]);
                let kind = match first {
                    true => world.dice.below(4),
                    false => world.dice.between(2, 3),
                };
                (kind, Duration::from_nanos(world.dice.below(longest)))
            };
            let (pauses, begun) = (self.pauses(), self.local());
            let (locked, bound) = match kind {
                0 | 1 => (locker.lock_until_cancelled(&cancel), None),
                2 => (locker.try_lock_for(timeout), Some(timeout + limit)),
                _ => (locker.try_lock(), Some(limit)),
            };
            let took = self.local() - begun;
            if bound.is_some_and(|bound| took > bound + SLACK) {
                let what = format!("lock {kind} bound {bound:?} took {took:?}");
                self.violate(pauses, BOUND, what);
            }
            match locked {
                Ok(guard) => self.hold(guard, pauses, hands_on),
                Err(error) => self.judge(&error, pauses),
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

    /// Looks at why a lock was not had.
    fn judge(&self, error: &Error, pauses: u64) {
        use ErrorKind::{Cancelled, Held, Panicked, Timeout, Unreachable};
        match error.kind() {
            Held | Timeout | Unreachable | Panicked => {}
            Cancelled => {
                let stage = self.stage();
                let (at, now) = {
                    let mut world = stage.lock();
                    world.tally.cancelled += 1;
                    (world.notes[self.number].cancelled_at, world.now)
                };
                let took = at.map_or(0, |at| now - at);
                if took > nanos(self.lease.request_limit()) * 103 / 100 + nanos(SLACK) {
                    self.violate(pauses, BOUND, format!("cancelling took {took}"));
                }
            }
            _ => self.violate(self.pauses(), BOUND, error),
        }
    }

    fn hold(&self, guard: Guard, pauses: u64, hands_on: bool) {
        let stage = self.stage();
        let ttl = nanos(self.lease.ttl());
        let fence = guard.fence();
        if !guard.is_valid() {
            self.violate(pauses, LATE, format!("lock() returned {guard:?}"));
        }
        let lost = guard.lost();
        let guard = Arc::new(guard);
        self.join(&guard);
        let until = {
            let mut world = stage.lock();
            let longest = world.dice.pick(&[1, ttl / 4, ttl * 3]);
            world.dice.below(longest)
        };
        let until = self.local() + Duration::from_nanos(until);
        // Looks now and then, as one that works does.
        while self.local() < until && !self.is_over() && guard.is_valid() {
            self.sleep((ttl / 4).min(nanos(until - self.local())));
        }
        if !guard.is_valid() {
            let quarter = nanos(self.lease.transition()) / 4;
            self.sleep(quarter + nanos(self.lease.request_limit()) / 8 + nanos(SLACK));
            stage.lock().tally.guards_lost += 1;
            if lost.try_recv().unwrap_err().is_empty() {
                let what = format!("it was not told that {fence} is lost");
                self.violate(pauses, OVERDUE, what);
            }
            let stuck = {
                let mut world = stage.lock();
                world.faulty && world.dice.chance(300)
            };
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
        let guard = Arc::try_unwrap(guard).expect("no other thread has it");
        let (begun, pauses) = (self.local(), self.pauses());
        let ended = guard.unlock();
        let took = self.local() - begun;
        if took > self.lease.request_limit() + SLACK {
            self.violate(pauses, BOUND, format!("unlocking took {took:?}"));
        }
        if let Err(error) = ended {
            use ErrorKind::{Lost, Panicked, Timeout};
            if !matches!(error.kind(), Timeout | Lost | Panicked) {
                self.violate(pauses, BOUND, format!("unlock: {error}"));
            }
        }
    }

    /// Shows a guard to the monitor, beside those that other threads of the process have.
    fn join(&self, guard: &Arc<Guard>) {
        let mut broken = Vec::new();
        if let Front::Guards(guards) = &mut *self.front.lock().unwrap() {
            let stage = self.stage();
            let world = stage.lock();
            if guards.iter().any(|other| other.is_valid()) {
                broken.push((TWO, "two threads have a guard".to_owned()));
            }
            for other in guards.iter() {
                let until = world.notes[self.number].winding_until(other.fence());
                if until.is_some_and(|until| self.local() < until) {
                    let what = format!("{guard:?} while {other:?} winds down until {until:?}");
                    broken.push((WIND_DOWN, what));
                }
            }
            guards.push(Arc::clone(guard));
        }
        for (rule, what) in broken {
            self.violate(self.pauses(), rule, what);
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
        let (stage, belief) = (self.0.stage(), self.0.belief());
        stage.lock().note_gained(self.0.number, fence, belief);
    }

    fn lost(&self, _mutex: &str, _id: &str, fence: u64, _held: Duration, reason: LossReason) {
        let stage = self.0.stage();
        stage.lock().note_lost(self.0.number, fence, reason);
    }
}
