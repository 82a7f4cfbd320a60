//! The way of events to their listeners: a bounded queue that never blocks the worker, and a thread or
//! an executor that takes them to callbacks.
//!
//! A slow or panicking callback never delays a renewal, and a receiver that does not read costs whole
//! pairs, never half of one.

use std::cell::Cell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded};
use parking_lot::Mutex;

use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::event::{Audience, Event, EventKind, Events};
use crate::owner::MutexState;
use crate::parker::Unparker;
use crate::thread::{self, Thread};
use crate::virtual_time::Condvar;

/// How often a worker looks whether a receiver that fell behind has made room.
pub(crate) const CATCH_UP: Duration = Duration::from_millis(20);

/// The smallest queue: a pair, and the slot that is kept free for a Released.
const MIN_CAPACITY: usize = 2;

/// The largest queue.
const MAX_CAPACITY: usize = 1 << 20;

/// A job for an [`Executor`].
pub type Job = Box<dyn FnOnce() + Send>;

/// Runs the callbacks of a service instead of a separate thread, for example on a thread pool of the
/// caller.
///
/// It should run every job, on any thread other than the one that submits it: that one is the service's
/// worker, and a callback that runs there delays its renewals. If a job is dropped, its events are only
/// delayed: the next job delivers them.
pub type Executor = Arc<dyn Fn(Job) + Send + Sync>;

/// Where events are taken to.
pub(crate) type Target = Arc<dyn Fn(&Event) + Send + Sync>;

/// A closure, and the kind of event that it wants.
type Callback = (EventKind, Mutex<Box<dyn FnMut(&Event) + Send>>);

/// How a service under construction will be listened to: what the builders have in common.
pub(crate) struct DeliverySettings {
    pub(crate) capacity: usize,
    pub(crate) failures: bool,
    callbacks: Vec<Callback>,
    /// A type of the caller's own.
    pub(crate) own: Option<Target>,
    pub(crate) executor: Option<Executor>,
}

impl DeliverySettings {
    pub(crate) fn on(&mut self, kind: EventKind, callback: impl FnMut(&Event) + Send + 'static) {
        self.failures |= kind == EventKind::Failed;
        self.callbacks.push((kind, Mutex::new(Box::new(callback))));
    }

    pub(crate) fn callbacks(self, factory: Option<Executor>) -> Result<Recipient> {
        let capacity = self.capacity()?;
        let (own, callbacks) = (self.own, self.callbacks);
        if own.is_none() && callbacks.is_empty() {
            return Ok(Recipient::Nobody);
        }
        let target = move |event: &Event| {
            if let Some(own) = &own {
                own(event);
            }
            for (_, callback) in callbacks.iter().filter(|(kind, _)| *kind == event.kind) {
                (callback.lock())(event);
            }
        };
        Ok(Recipient::Callbacks {
            target: Arc::new(target),
            executor: self.executor.or(factory),
            capacity,
            failures: self.failures,
        })
    }

    pub(crate) fn channel(self) -> Result<(Recipient, Events)> {
        if self.own.is_some() || !self.callbacks.is_empty() {
            return Err(Error::invalid(
                "a service has either callbacks or a channel: give no callbacks, or call build()",
            ));
        }
        let (queue, receiver) = EventQueue::new(self.capacity()?, self.failures);
        let (events, audience) = Events::new(receiver);
        let recipient = Recipient::Channel {
            queue: Arc::new(Mutex::new(queue)),
            audience: Arc::new(audience),
        };
        Ok((recipient, events))
    }

    fn capacity(&self) -> Result<usize> {
        if self.capacity > MAX_CAPACITY {
            return Err(Error::invalid(format!(
                "event_capacity {} is too large; use at most {MAX_CAPACITY}",
                self.capacity
            )));
        }
        Ok(self.capacity)
    }
}

impl Default for DeliverySettings {
    fn default() -> DeliverySettings {
        DeliverySettings {
            capacity: 256,
            failures: false,
            callbacks: Vec::new(),
            own: None,
            executor: None,
        }
    }
}

impl fmt::Debug for DeliverySettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeliverySettings")
            .field("capacity", &self.capacity)
            .field("failures", &self.failures)
            .field("callbacks", &self.callbacks.len())
            .finish_non_exhaustive()
    }
}

/// The setters of a builder whose field `delivery` is a [`DeliverySettings`].
macro_rules! delivery_setters {
    () => {
        /// Sets how many events are queued for a receiver or callback that is slow. Defaults to 256. A number
        /// below 2 counts as 2; one above 1048576 is refused when the service is built.
        pub fn event_capacity(mut self, capacity: usize) -> Self {
            self.delivery.capacity = capacity;
            self
        }

        /// Sets whether errors of the backend are also sent as events. Defaults to `false`.
        pub fn failures(mut self, failures: bool) -> Self {
            self.delivery.failures = failures;
            self
        }

        /// Calls `callback` when another owner was seen, or the mutex was seen to be free.
        pub fn on_owner_changed(
            mut self,
            callback: impl FnMut(&$crate::Event) + Send + 'static,
        ) -> Self {
            self.delivery.on($crate::EventKind::OwnerChanged, callback);
            self
        }

        /// Calls `callback` when the error of the backend changes.
        pub fn on_failure(mut self, callback: impl FnMut(&$crate::Event) + Send + 'static) -> Self {
            self.delivery.on($crate::EventKind::Failed, callback);
            self
        }

        /// Sets the executor that runs the callbacks. Defaults to that of the factory, or else to a
        /// separate thread.
        pub fn executor(mut self, executor: $crate::Executor) -> Self {
            self.delivery.executor = Some(executor);
            self
        }
    };
}
pub(crate) use delivery_setters;

/// Who listens to a service.
pub(crate) enum Recipient {
    /// A receiver that the caller holds; it outlives restarts.
    Channel {
        queue: Arc<Mutex<EventQueue>>,
        audience: Arc<Audience>,
    },
    /// Callbacks; every run has a carrier of its own.
    Callbacks {
        target: Target,
        executor: Option<Executor>,
        capacity: usize,
        failures: bool,
    },
    /// Nobody.
    Nobody,
}

/// One run's delivery of events.
#[allow(clippy::large_enum_variant)] // one for each service
pub(crate) enum Delivery {
    Channel {
        queue: Arc<Mutex<EventQueue>>,
        audience: Arc<Audience>,
    },
    Callbacks {
        queue: EventQueue,
        carrier: Carrier,
    },
    Nobody,
}

impl Recipient {
    /// Whether nobody can receive any more: a receiver that was dropped does not come back.
    pub(crate) fn is_abandoned(&self) -> bool {
        matches!(self, Recipient::Channel { audience, .. } if audience.is_gone())
    }

    pub(crate) fn open(&self, mutex: &str) -> Result<Delivery> {
        Ok(match self {
            Recipient::Channel { queue, audience } => Delivery::Channel {
                queue: Arc::clone(queue),
                audience: Arc::clone(audience),
            },
            Recipient::Callbacks {
                target,
                executor,
                capacity,
                failures,
            } => {
                let (queue, events) = EventQueue::new(*capacity, *failures);
                let carrier = Carrier::start(mutex, events, Arc::clone(target), executor.clone())?;
                Delivery::Callbacks { queue, carrier }
            }
            Recipient::Nobody => Delivery::Nobody,
        })
    }
}

impl Delivery {
    /// The carrier's number, to know a callback that calls its own service; 0 without one.
    pub(crate) fn number(&self) -> u64 {
        match self {
            Delivery::Callbacks { carrier, .. } => carrier.round.number,
            _ => 0,
        }
    }

    pub(crate) fn deliver(&mut self, event: Event) {
        match self {
            Delivery::Channel { queue, .. } => queue.lock().push(event),
            Delivery::Callbacks { queue, carrier } => {
                queue.push(event);
                carrier.nudge();
            }
            Delivery::Nobody => {}
        }
    }

    /// Whether something is held back for want of room. Sends it if there is some now.
    pub(crate) fn is_behind(&mut self) -> bool {
        match self {
            Delivery::Channel { queue, .. } => !queue.lock().catch_up(),
            Delivery::Callbacks { queue, carrier } => {
                let behind = !queue.catch_up();
                carrier.nudge();
                behind || carrier.is_waiting()
            }
            Delivery::Nobody => false,
        }
    }

    /// Whether nobody can receive any more.
    pub(crate) fn is_abandoned(&self) -> bool {
        matches!(self, Delivery::Channel { audience, .. } if audience.is_gone())
    }

    /// Has `unparker` told when nobody can receive any more.
    pub(crate) fn tell_when_abandoned(&self, unparker: Unparker) {
        if let Delivery::Channel { audience, .. } = self {
            audience.wake(unparker);
        }
    }

    /// Waits until callbacks have run for all that was delivered, but not beyond `deadline`.
    pub(crate) fn settle(&mut self, deadline: Moment) -> bool {
        match self {
            Delivery::Callbacks { queue, carrier } => carrier.settle(queue.sent, deadline),
            _ => true,
        }
    }

    /// Ends delivery: nothing comes after this. Waits for a callback that runs, and until `deadline` for
    /// an executor to begin the rest.
    pub(crate) fn close(self, deadline: Moment) {
        if let Delivery::Callbacks { queue, carrier } = self {
            let sent = queue.sent;
            drop(queue);
            carrier.finish(sent, deadline);
        }
    }
}

/// Why a service whose receiver was dropped ends by itself.
pub(crate) fn abandoned(who: impl fmt::Display, so: &str) -> Error {
    Error::new(
        ErrorKind::InvalidState,
        format!("{who}: the receiver of its events was dropped, so {so}"),
    )
}

/// The bounded way out of a worker: it never blocks, never breaks a pair, and counts what it drops.
///
/// A crossbeam channel cannot be edited from its sending side without racing the receiver, so what is
/// dropped is dropped *before* it enters: an Acquired goes in only where there is room for its Released
/// too. For a receiver that does not read, whole pairs are left out until there is room again, and the
/// next event says how many were missed.
#[derive(Debug)]
pub(crate) struct EventQueue {
    sender: Sender<Event>,
    /// The newest event that found no room: an Acquired whose Released has not come, or what the
    /// owner changed to.
    held_back: Option<Event>,
    missed: u64,
    /// How many events went into the channel.
    sent: u64,
    /// Whether an error is an event too.
    failures: bool,
}

impl EventQueue {
    fn new(capacity: usize, failures: bool) -> (EventQueue, Receiver<Event>) {
        let (sender, receiver) = bounded(capacity.max(MIN_CAPACITY));
        let queue = EventQueue {
            sender,
            held_back: None,
            missed: 0,
            sent: 0,
            failures,
        };
        (queue, receiver)
    }

    fn push(&mut self, event: Event) {
        if event.kind == EventKind::Failed && !self.failures {
            return;
        }
        self.catch_up();
        let held_back = self.held_back.as_ref().map(|held_back| held_back.kind);
        match (event.kind, held_back) {
            // Its Acquired never went out: the pair goes.
            (EventKind::Released, Some(EventKind::Acquired)) => {
                self.held_back = None;
                self.missed += 2;
            }
            // Its slot was kept free when the Acquired went in.
            (EventKind::Released, _) => {
                self.drop_held_back();
                self.send(event);
            }
            (_, None) if self.has_room() => self.send(event),
            (EventKind::Failed, _) => self.missed += 1,
            (EventKind::OwnerChanged, Some(EventKind::OwnerChanged)) => self.merge(event),
            _ => {
                self.drop_held_back();
                self.held_back = Some(event);
            }
        }
    }

    /// Sends what was held back if there is room now. `true`: nothing is held back any more.
    fn catch_up(&mut self) -> bool {
        if self.held_back.is_some()
            && self.has_room()
            && let Some(event) = self.held_back.take()
        {
            self.send(event);
        }
        self.held_back.is_none()
    }

    /// Whether an event fits and leaves a slot for a Released. Only this side adds, so room stays.
    fn has_room(&self) -> bool {
        let capacity = self.sender.capacity().unwrap_or(usize::MAX);
        self.sender.len() + MIN_CAPACITY <= capacity
    }

    fn send(&mut self, mut event: Event) {
        event.missed = std::mem::take(&mut self.missed);
        // Fails only where the receiver is gone: then nobody wants to know.
        let _ = self.sender.try_send(event);
        self.sent += 1;
    }

    fn drop_held_back(&mut self) {
        if self.held_back.take().is_some() {
            self.missed += 1;
        }
    }

    /// Two changes of somebody else's ownership that nobody read become one.
    fn merge(&mut self, mut event: Event) {
        if let Some(earlier) = self.held_back.take() {
            let before = earlier.state.before().clone();
            event.state = MutexState::new(before, event.state.after().clone());
            self.missed += 1;
        }
        self.held_back = Some(event);
    }
}

/// Takes the events of one run to callbacks, off the worker.
pub(crate) struct Carrier {
    round: Arc<Round>,
    by: By,
}

/// What callbacks run on.
enum By {
    Thread(Thread),
    Executor(Executor),
}

struct Round {
    /// Tells this run from others, to know a callback that calls its own service.
    number: u64,
    events: Receiver<Event>,
    target: Target,
    progress: Mutex<Progress>,
    changed: Condvar,
}

#[derive(Default)]
struct Progress {
    /// How many events were taken to the callbacks.
    count: u64,
    /// A callback runs now.
    running: bool,
    /// No callback begins any more.
    over: bool,
    /// The number of the executor's job that is on its way, or runs.
    scheduled: Option<u64>,
    /// How many jobs there were for the executor.
    jobs: u64,
}

thread_local! {
    /// The run whose callback this thread is in.
    static INSIDE: Cell<u64> = const { Cell::new(0) };
}

/// Whether the calling thread runs a callback of the run with this number.
pub(crate) fn is_inside(number: u64) -> bool {
    number != 0 && INSIDE.get() == number
}

/// A job on its way: one that the executor drops makes way for the next.
struct Scheduled {
    round: Arc<Round>,
    number: u64,
}

impl Drop for Scheduled {
    fn drop(&mut self) {
        let mut progress = self.round.progress.lock();
        // One that ran has made way already, and the next may run by now: a third beside it would overtake it.
        if progress.scheduled == Some(self.number) {
            progress.scheduled = None;
        }
        self.round.changed.notify_all();
    }
}

impl Carrier {
    fn start(
        mutex: &str,
        events: Receiver<Event>,
        target: Target,
        executor: Option<Executor>,
    ) -> Result<Carrier> {
        static NUMBERS: AtomicU64 = AtomicU64::new(1);
        let round = Arc::new(Round {
            number: NUMBERS.fetch_add(1, Ordering::Relaxed),
            events,
            target,
            progress: Mutex::default(),
            changed: Condvar::new(),
        });
        let by = match executor {
            Some(executor) => By::Executor(executor),
            None => {
                let round = Arc::clone(&round);
                By::Thread(thread::start(format!("callbacks of {mutex}"), move || {
                    // Ends when the worker drops its end of the channel.
                    for event in &round.events {
                        round.carry(&event);
                    }
                })?)
            }
        };
        Ok(Carrier { round, by })
    }

    /// Sees to it that the events in the channel are taken to the callbacks.
    fn nudge(&self) {
        let By::Executor(executor) = &self.by else {
            return;
        };
        let Some(scheduled) = self.schedule() else {
            return;
        };
        let job: Job = Box::new(move || scheduled.round.drain());
        if catch_unwind(AssertUnwindSafe(|| executor(job))).is_err() {
            log::error!("an executor panicked instead of taking a callback");
        }
    }

    /// A job for what is in the channel; `None` if nothing is, or if one is on its way.
    fn schedule(&self) -> Option<Scheduled> {
        // Looked at and set under one lock: `drain` lets go of it only with an empty channel.
        let mut progress = self.round.progress.lock();
        if progress.scheduled.is_some() || self.round.events.is_empty() {
            return None;
        }
        progress.jobs += 1;
        progress.scheduled = Some(progress.jobs);
        Some(Scheduled {
            number: progress.jobs,
            round: Arc::clone(&self.round),
        })
    }

    /// Whether events wait for an executor that has not taken them, or has dropped them.
    fn is_waiting(&self) -> bool {
        matches!(self.by, By::Executor(_)) && !self.round.events.is_empty()
    }

    /// Waits until `count` events were taken to the callbacks. `false`: not by `deadline`.
    fn settle(&self, count: u64, deadline: Moment) -> bool {
        loop {
            self.nudge();
            let mut progress = self.round.progress.lock();
            if progress.count >= count {
                return true;
            }
            let left = deadline.remaining();
            if left.is_zero() {
                return false;
            }
            // A job that the executor dropped is given again.
            self.round
                .changed
                .wait_for(&mut progress, left.min(CATCH_UP));
        }
    }

    /// Waits until the last of `count` events was taken to the callbacks, however long one runs; the
    /// sender must be gone already. What an executor has not begun by `deadline`, or as long after the last
    /// callback, is dropped.
    fn finish(mut self, count: u64, deadline: Moment) {
        if let By::Thread(thread) = &mut self.by {
            thread.join(Moment::FAR);
            return;
        }
        let patience = deadline.remaining();
        let mut deadline = deadline;
        let mut done = 0;
        while !self.settle(count, deadline) {
            let mut progress = self.round.progress.lock();
            if !progress.running && progress.count == done {
                // The executor has begun none of what is left.
                progress.over = true;
                return;
            }
            // One that runs keeps the rest waiting: that is not the executor's fault, and Released must
            // not be left out for it.
            while progress.running {
                self.round.changed.wait(&mut progress);
            }
            done = progress.count;
            deadline = Moment::now() + patience;
        }
    }
}

impl Round {
    fn carry(&self, event: &Event) {
        {
            let mut progress = self.progress.lock();
            if progress.over {
                return;
            }
            progress.running = true;
        }
        let outer = INSIDE.replace(self.number);
        if catch_unwind(AssertUnwindSafe(|| (self.target)(event))).is_err() {
            log::error!(
                "{}: a callback panicked at {}; the next event still comes",
                event.mutex,
                event.kind
            );
        }
        INSIDE.set(outer);
        let mut progress = self.progress.lock();
        progress.running = false;
        progress.count += 1;
        self.changed.notify_all();
    }

    fn drain(&self) {
        loop {
            for event in self.events.try_iter() {
                self.carry(&event);
            }
            // An event that comes after this look finds nothing scheduled.
            let mut progress = self.progress.lock();
            if self.events.is_empty() {
                progress.scheduled = None;
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::owner::MutexOwner;
    use rand::rngs::SmallRng;
    use rand::{RngExt, SeedableRng};
    use std::sync::Arc;

    fn event(kind: EventKind, fence: u64) -> Event {
        let owner = MutexOwner::new(format!("{fence}"), 0, 0, 0, fence);
        let state = match kind {
            EventKind::Released => MutexState::new(owner, MutexOwner::NONE),
            _ => MutexState::new(MutexOwner::NONE, owner),
        };
        Event::new(kind, &Arc::from("m"), state)
    }

    /// Whatever the receiver does, it sees pairs that alternate, every event is seen or counted as
    /// missed, and the sender never blocks.
    #[test]
    fn pairs_stay_whole_and_every_loss_is_counted_for_any_reader() {
        for seed in 0..2_000 {
            let mut dice = SmallRng::seed_from_u64(seed);
            let (mut queue, receiver) = EventQueue::new(dice.random_range(0..9), true);
            let (mut sent, mut seen, mut owned) = (0, 0, None);
            let mut expected = None;
            let mut check = |event: Event| {
                seen += 1 + event.missed;
                match event.kind {
                    EventKind::Acquired => {
                        assert_eq!(expected, None, "seed {seed}");
                        expected = event.fence();
                    }
                    EventKind::Released => {
                        assert_eq!(expected, event.fence(), "seed {seed}");
                        expected = None;
                    }
                    _ => {}
                }
            };
            for fence in 1..200 {
                let kind = match owned {
                    Some(_) if dice.random_bool(0.2) => EventKind::Failed,
                    Some(_) => EventKind::Released,
                    None if dice.random_bool(0.3) => EventKind::OwnerChanged,
                    None => EventKind::Acquired,
                };
                let fence = owned.unwrap_or(fence);
                match kind {
                    EventKind::Acquired => owned = Some(fence),
                    EventKind::Released => owned = None,
                    _ => {}
                }
                queue.push(event(kind, fence));
                sent += 1;
                if dice.random_bool(0.3) {
                    for _ in 0..dice.random_range(0..6) {
                        receiver.try_recv().into_iter().for_each(&mut check);
                    }
                }
            }
            loop {
                receiver.try_iter().for_each(&mut check);
                if queue.catch_up() && receiver.is_empty() {
                    break;
                }
            }
            assert_eq!(seen + queue.missed, sent, "seed {seed}");
        }
    }

    /// Review core 2 and 5: an executor that drops jobs, or takes them at any time, costs no event.
    #[test]
    fn no_event_is_lost_whatever_the_executor_does_with_its_jobs() {
        use std::sync::atomic::AtomicUsize;
        let (jobs, to_run) = crossbeam_channel::unbounded::<Job>();
        let runs = std::thread::spawn(move || to_run.iter().for_each(|job| job()));
        let given = AtomicUsize::new(0);
        let executor: Executor = Arc::new(move |job| {
            if given.fetch_add(1, Ordering::Relaxed) % 3 == 1 {
                drop(job);
            } else {
                let _ = jobs.send(job);
            }
        });
        let seen = Arc::new(AtomicUsize::new(0));
        let target: Target = {
            let seen = Arc::clone(&seen);
            Arc::new(move |_: &Event| {
                seen.fetch_add(1, Ordering::Relaxed);
            })
        };
        let (mut queue, events) = EventQueue::new(1 << 10, true);
        let carrier = Carrier::start("m", events, target, Some(executor)).unwrap();
        for fence in 0..200_000 {
            queue.push(event(EventKind::Acquired, fence));
            carrier.nudge();
            queue.push(event(EventKind::Released, fence));
            carrier.nudge();
            if fence % 100 == 0 {
                let by = Moment::now() + Duration::from_secs(60);
                assert!(carrier.settle(queue.sent, by), "lost at {fence}");
            }
        }
        let sent = queue.sent;
        drop(queue);
        carrier.finish(sent, Moment::now() + Duration::from_secs(60));
        assert_eq!(seen.load(Ordering::Relaxed) as u64, sent);
        drop(runs);
    }

    /// Rule "events are ordered": a job that had taken its events, but was not dropped yet, made way for another one
    /// beside the one that ran by then. On an executor of several threads callbacks overlapped and changed places.
    #[test]
    fn a_job_that_is_dropped_late_makes_way_for_none_beside_the_next() {
        let target: Target = Arc::new(|_: &Event| ());
        let (mut queue, events) = EventQueue::new(1 << 10, true);
        let executor: Executor = Arc::new(drop);
        let carrier = Carrier::start("m", events, target, Some(executor)).unwrap();
        queue.push(event(EventKind::Acquired, 1));
        let first = carrier.schedule().unwrap();
        assert!(carrier.schedule().is_none(), "it has not run yet");
        first.round.drain();
        queue.push(event(EventKind::Released, 1));
        let second = carrier.schedule().unwrap();
        drop(first);
        assert!(carrier.schedule().is_none(), "the second has not run yet");
        drop(second);
        assert!(
            carrier.schedule().is_some(),
            "it was dropped and did not run"
        );
    }
}
