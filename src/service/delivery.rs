//! Brings events to their listeners: a bounded queue that never blocks the worker, and a thread or an executor that
//! calls the callbacks.
//!
//! A slow or panicking callback never delays a renewal. A receiver that does not read misses whole pairs of Acquired
//! and Released, never half of one.

use std::cell::Cell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};

use crossbeam_channel::{Receiver, Sender, TryRecvError, bounded};
use parking_lot::Mutex;

use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::event::{Event, EventKind, Events};
use crate::owner::MutexState;
use crate::thread::{self, Thread};
use crate::virtual_time::{Condvar, recv_timeout};

/// The smallest queue: a pair, and the slot that is kept free for a Released.
const MIN_CAPACITY: usize = 2;

/// The largest queue.
const MAX_CAPACITY: usize = 1 << 20;

/// A job for an [`Executor`].
pub type Job = Box<dyn FnOnce() + Send>;

/// Runs the callbacks of a service instead of a separate thread, for example on a thread pool of the
/// caller.
///
/// Every job is one event; the next comes when it is over. A job that the executor drops runs on the service's own
/// callback thread instead.
pub type Executor = Arc<dyn Fn(Job) + Send + Sync>;

/// Where events are taken to.
pub(crate) type Target = Arc<dyn Fn(&Event) + Send + Sync>;

/// A closure, and the kind of event that it wants.
type Callback = (EventKind, Mutex<Box<dyn FnMut(&Event) + Send>>);

/// How a service under construction delivers its events: what the builders have in common.
pub(crate) struct DeliverySettings {
    pub(crate) capacity: usize,
    pub(crate) failures: bool,
    callbacks: Vec<Callback>,
    /// A type of the caller's own.
    pub(crate) own: Option<Target>,
}

impl DeliverySettings {
    pub(crate) fn on(&mut self, kind: EventKind, callback: impl FnMut(&Event) + Send + 'static) {
        self.failures |= kind == EventKind::Failed;
        self.callbacks.push((kind, Mutex::new(Box::new(callback))));
    }

    pub(crate) fn callbacks(self, executor: Option<Executor>) -> Result<Recipient> {
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
        Ok(Recipient::Callbacks(Arc::new(Callbacks {
            target: Box::new(target),
            executor,
            capacity: self.capacity,
            failures: self.failures,
        })))
    }

    pub(crate) fn channel(self) -> Result<(Recipient, Events)> {
        if self.own.is_some() || !self.callbacks.is_empty() {
            return Err(Error::invalid(
                "a service has either callbacks or a channel: give no callbacks, or call build()",
            ));
        }
        let (queue, receiver) = EventQueue::new(self.capacity, self.failures);
        let (events, listener) = Events::new(receiver);
        let queue = Arc::new(Mutex::new(queue));
        Ok((Recipient::Channel(queue, listener), events))
    }
}

impl Default for DeliverySettings {
    fn default() -> DeliverySettings {
        DeliverySettings {
            capacity: 256,
            failures: false,
            callbacks: Vec::new(),
            own: None,
        }
    }
}

impl fmt::Debug for DeliverySettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeliverySettings").finish_non_exhaustive()
    }
}

/// The setters of a builder whose field `delivery` is a [`DeliverySettings`].
macro_rules! delivery_setters {
    () => {
        /// Sets how many events are queued for a receiver or callback that is slow: from 2 to 1048576, the nearest
        /// of them otherwise. Defaults to 256.
        ///
        /// ```
        /// let factory = contend::connect("memory://event-capacity-doc")?;
        /// // A reader that comes late misses whole pairs of Acquired and Released.
        /// let (service, events) = factory.contend("demo").event_capacity(16).channel()?;
        /// service.start()?;
        /// assert_eq!(events.recv().unwrap().missed, 0);
        /// # Ok::<(), contend::Error>(())
        /// ```
        pub fn event_capacity(mut self, capacity: usize) -> Self {
            self.delivery.capacity = capacity;
            self
        }

        /// Sets whether errors of the backend are also sent as events. Defaults to `false`.
        ///
        /// ```
        /// use contend::{EventKind, memory};
        ///
        /// let factory = contend::connect("memory://failures-doc")?;
        /// memory::handle("failures-doc").set_unreachable(true);
        /// let (service, events) = factory.contend("demo").failures(true).channel()?;
        /// service.start()?;
        /// let event = events.recv().unwrap();
        /// assert_eq!(event.kind, EventKind::Failed);
        /// println!("{:?}", event.error);
        /// # Ok::<(), contend::Error>(())
        /// ```
        pub fn failures(mut self, failures: bool) -> Self {
            self.delivery.failures = failures;
            self
        }

        /// Calls `callback` when another owner was seen, or the mutex was seen to be free.
        ///
        /// ```
        /// let factory = contend::connect("memory://on-owner-changed-doc")?;
        /// let service = factory
        ///     .contend("demo")
        ///     .on_owner_changed(|event| println!("{:?} leads", event.state.after().owner_id()))
        ///     .build()?;
        /// service.start()?;
        /// # Ok::<(), contend::Error>(())
        /// ```
        pub fn on_owner_changed(
            mut self,
            callback: impl FnMut(&$crate::Event) + Send + 'static,
        ) -> Self {
            self.delivery.on($crate::EventKind::OwnerChanged, callback);
            self
        }

        /// Calls `callback` when the error of the backend changes.
        ///
        /// ```
        /// let factory = contend::connect("memory://on-failure-doc")?;
        /// let service = factory
        ///     .contend("demo")
        ///     .on_failure(|event| println!("{:?}", event.error))
        ///     .build()?;
        /// service.start()?;
        /// # Ok::<(), contend::Error>(())
        /// ```
        pub fn on_failure(mut self, callback: impl FnMut(&$crate::Event) + Send + 'static) -> Self {
            self.delivery.on($crate::EventKind::Failed, callback);
            self
        }
    };
}
pub(crate) use delivery_setters;

/// Who listens to a service.
pub(crate) enum Recipient {
    /// A receiver that the caller holds; it outlives restarts.
    Channel(Arc<Mutex<EventQueue>>, Weak<()>),
    /// Callbacks; every run has a thread of its own for them.
    Callbacks(Arc<Callbacks>),
    Nobody,
}

/// One run's delivery of events.
#[derive(Default)]
pub(crate) struct Delivery {
    queue: Option<Arc<Mutex<EventQueue>>>,
    listener: Option<Weak<()>>,
    thread: Option<CallbackThread>,
}

impl Recipient {
    /// Whether the receiver was dropped, which is for good.
    pub(crate) fn is_abandoned(&self) -> bool {
        matches!(self, Recipient::Channel(_, listener) if listener.strong_count() == 0)
    }

    /// Tells its callbacks from those of others; 0 without any.
    pub(crate) fn number(&self) -> usize {
        match self {
            Recipient::Callbacks(callbacks) => Arc::as_ptr(callbacks).addr(),
            Recipient::Channel(..) | Recipient::Nobody => 0,
        }
    }

    pub(crate) fn open(&self, mutex: &str) -> Result<Delivery> {
        Ok(match self {
            Recipient::Channel(queue, listener) => Delivery {
                queue: Some(Arc::clone(queue)),
                listener: Some(Weak::clone(listener)),
                thread: None,
            },
            Recipient::Callbacks(callbacks) => {
                let (queue, events) = EventQueue::new(callbacks.capacity, callbacks.failures);
                Delivery {
                    queue: Some(Arc::new(Mutex::new(queue))),
                    listener: None,
                    thread: Some(CallbackThread::start(mutex, events, callbacks)?),
                }
            }
            Recipient::Nobody => Delivery::default(),
        })
    }
}

impl Delivery {
    pub(crate) fn deliver(&self, event: Event) {
        if let Some(queue) = &self.queue {
            queue.lock().push(event);
            self.notify();
        }
    }

    /// Sends what was held back, if there is room by now.
    pub(crate) fn catch_up(&self) {
        if let Some(queue) = &self.queue
            && queue.lock().catch_up()
        {
            self.notify();
        }
    }

    fn notify(&self) {
        if let Some(thread) = &self.thread {
            thread.progress.notify();
        }
    }

    /// Whether the receiver was dropped.
    pub(crate) fn is_abandoned(&self) -> bool {
        let listener = self.listener.as_ref();
        listener.is_some_and(|listener| listener.strong_count() == 0)
    }

    /// Waits until callbacks have returned for all that was delivered. `false`: not by `deadline`.
    pub(crate) fn settle(&self, deadline: Moment) -> bool {
        match (&self.queue, &self.thread) {
            (Some(queue), Some(thread)) => {
                let sent = queue.lock().sent;
                thread.progress.wait_for(sent, deadline)
            }
            _ => true,
        }
    }

    /// Ends delivery, and waits for the callbacks of what was delivered, however long they run.
    pub(crate) fn close(mut self) {
        self.end();
        if let Some(thread) = &mut self.thread {
            thread.thread.join(Moment::FAR);
        }
    }

    fn end(&mut self) {
        self.queue = None;
        self.notify();
    }
}

impl Drop for Delivery {
    fn drop(&mut self) {
        self.end();
    }
}

/// Why a service whose receiver was dropped is not started, or ends by itself.
pub(crate) fn abandoned(who: impl fmt::Display) -> Error {
    Error::new(
        ErrorKind::InvalidState,
        format!(
            "{who}: the receiver of its events was dropped; keep it, or build a contender with \
             lead_without_listener(true)"
        ),
    )
}

/// The bounded way out of a worker: it never blocks, never breaks a pair, and counts what it drops.
///
/// A crossbeam channel cannot be edited from its sending side without racing the receiver. So what is dropped
/// is dropped *before* it enters: an Acquired goes in only where there is room for its Released too. For a
/// receiver that does not read, whole pairs are left out until there is room again, and the next event says
/// how many were missed.
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
        let (sender, receiver) = bounded(capacity.clamp(MIN_CAPACITY, MAX_CAPACITY));
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

    /// Sends what was held back if there is room now. `true`: there was something, and it is sent.
    fn catch_up(&mut self) -> bool {
        let sends = self.held_back.is_some() && self.has_room();
        if sends && let Some(event) = self.held_back.take() {
            self.send(event);
        }
        sends
    }

    /// Whether an event fits and leaves a slot for a Released. Only this side adds, so room stays.
    fn has_room(&self) -> bool {
        let capacity = self.sender.capacity().unwrap_or(usize::MAX);
        self.sender.len() + MIN_CAPACITY <= capacity
    }

    fn send(&mut self, mut event: Event) {
        event.missed = std::mem::take(&mut self.missed);
        // Fails only if the receiver was dropped: then the event has no reader.
        let _ = self.sender.try_send(event);
        self.sent += 1;
    }

    fn drop_held_back(&mut self) {
        if self.held_back.take().is_some() {
            self.missed += 1;
        }
    }

    /// Makes one change of owner out of two that were not read.
    fn merge(&mut self, mut event: Event) {
        if let Some(earlier) = self.held_back.take() {
            let before = earlier.state.before().clone();
            event.state = MutexState::new(before, event.state.after().clone());
            self.missed += 1;
        }
        self.held_back = Some(event);
    }
}

/// The thread on which the callbacks of one run are called, or from which they are given to an executor.
struct CallbackThread {
    thread: Thread,
    progress: Arc<Progress>,
}

/// How many events the callbacks have returned for.
#[derive(Default)]
struct Progress {
    done: Mutex<u64>,
    /// An event was sent, the run is over, or a callback has returned.
    changed: Condvar,
}

thread_local! {
    /// The number of the callbacks of which this thread runs one.
    static INSIDE: Cell<usize> = const { Cell::new(0) };
}

/// Whether the calling thread runs one of the callbacks with this number.
pub(crate) fn is_inside(number: usize) -> bool {
    number != 0 && INSIDE.get() == number
}

impl CallbackThread {
    fn start(
        mutex: &str,
        events: Receiver<Event>,
        callbacks: &Arc<Callbacks>,
    ) -> Result<CallbackThread> {
        let progress = Arc::<Progress>::default();
        let (callbacks, told) = (Arc::clone(callbacks), Arc::clone(&progress));
        let thread = thread::start(format!("callbacks of {mutex}"), move || {
            while let Some(event) = told.next(&events) {
                callbacks.call(Arc::new(event));
                *told.done.lock() += 1;
                told.changed.notify_all();
            }
        })?;
        Ok(CallbackThread { thread, progress })
    }
}

impl Progress {
    /// The next event; `None` when the worker has dropped its end of the channel.
    fn next(&self, events: &Receiver<Event>) -> Option<Event> {
        let mut done = self.done.lock();
        loop {
            match events.try_recv() {
                Ok(event) => return Some(event),
                Err(TryRecvError::Disconnected) => return None,
                Err(TryRecvError::Empty) => self.changed.wait(&mut done),
            }
        }
    }

    fn notify(&self) {
        // Under the lock: the thread is not between its look at the channel and its wait.
        let _done = self.done.lock();
        self.changed.notify_all();
    }

    fn wait_for(&self, sent: u64, deadline: Moment) -> bool {
        let mut done = self.done.lock();
        while *done < sent && !deadline.remaining().is_zero() {
            self.changed.wait_for(&mut done, deadline.remaining());
        }
        *done >= sent
    }
}

/// The callbacks of a service, and what they run on.
pub(crate) struct Callbacks {
    target: Box<dyn Fn(&Event) + Send + Sync>,
    executor: Option<Executor>,
    capacity: usize,
    failures: bool,
}

impl Callbacks {
    /// Calls the callbacks and returns when they have.
    fn call(self: &Arc<Callbacks>, event: Arc<Event>) {
        if let Some(executor) = &self.executor {
            let (ran, over) = bounded(1);
            let (callbacks, its_event) = (Arc::clone(self), Arc::clone(&event));
            let job = Box::new(move || {
                callbacks.run(&its_event);
                let _ = ran.send(());
            });
            if catch_unwind(AssertUnwindSafe(|| executor(job))).is_err() {
                log::error!("{}: the executor panicked", event.mutex);
            }
            if recv_timeout(&over, Moment::FAR.remaining()).is_ok() {
                return;
            }
            // The executor dropped the job: every event has its callback.
        }
        self.run(&event);
    }

    fn run(&self, event: &Event) {
        let outer = INSIDE.replace(std::ptr::from_ref(self).addr());
        if catch_unwind(AssertUnwindSafe(|| (self.target)(event))).is_err() {
            log::error!("{}: a callback panicked at {}", event.mutex, event.kind);
        }
        INSIDE.set(outer);
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
    fn pairs_stay_whole_and_counted() {
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
                queue.catch_up();
                if queue.held_back.is_none() && receiver.is_empty() {
                    break;
                }
            }
            assert_eq!(seen + queue.missed, sent, "seed {seed}");
        }
    }
}
