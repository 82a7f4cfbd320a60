//! `MutexRetrievalService`: follows who owns a mutex, without contending for it.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use super::callbacks::MutexRetriever;
use super::delivery::{
    CATCH_UP, Delivery, DeliverySettings, Recipient, abandoned, delivery_setters,
};
use super::lifecycle::{Lifecycle, service_getters};
use crate::backend::RawObserver;
use crate::clock::{self, Moment};
use crate::error::{Error, ErrorKind, Result};
use crate::event::{Event, EventKind, Events};
use crate::factory;
use crate::health::Monitored;
use crate::lease::Lease;
use crate::machine::observation::{Look, Observation};
use crate::name::check_mutex;
use crate::parker::{Parker, Unparked, Unparker};
use crate::snapshot::{ErrorChange, Snapshot};
use crate::thread::Local;

/// Follows who owns a mutex. It converges on the current owner, and may skip owners in between.
///
/// The first event reports what the first look saw, even if the mutex is free, so that "free" can be
/// distinguished from "unknown". Clones refer to the same service, which stops when the last one is
/// dropped.
///
/// ```
/// use contend::EventKind;
///
/// let factory = contend::connect("memory://retrieval-doc")?;
/// let (observer, owners) = factory.observe("demo").channel()?;
/// observer.start()?;
/// assert_eq!(owners.recv().unwrap().state.after().owner_id(), ""); // free
///
/// let leader = factory.contend("demo").id("a").build()?;
/// leader.start()?;
///
/// let event = owners.recv().unwrap();
/// assert_eq!(event.kind, EventKind::OwnerChanged);
/// assert_eq!(event.state.after().owner_id(), "a");
/// # Ok::<(), contend::Error>(())
/// ```
#[derive(Clone)]
#[must_use = "a service does nothing until it is started, and stops when it is dropped"]
pub struct MutexRetrievalService {
    inner: Local<Arc<Inner>>,
}

struct Inner {
    factory: Arc<factory::Inner>,
    mutex: Arc<str>,
    recipient: Recipient,
    snapshot: Arc<Snapshot>,
    lifecycle: Lifecycle,
    _monitored: Arc<Monitored>,
}

impl MutexRetrievalService {
    service_getters!();

    /// Starts following the owner. Returns at once.
    ///
    /// # Errors
    /// `InvalidState` unless the status is `Initial`, or if the receiver of its events was dropped;
    /// `Unavailable` if the system cannot start another thread; `Forked` in a child process.
    pub fn start(&self) -> Result<()> {
        let inner = self.inner.get()?;
        let name = format!("observe {}", inner.mutex);
        inner.lifecycle.start(name, || {
            if inner.recipient.is_abandoned() {
                let so = "nobody would read what it sees. Keep the receiver";
                return Err(abandoned(&inner.mutex, so));
            }
            inner.snapshot.clear();
            let delivery = inner.recipient.open(&inner.mutex)?;
            let carrier = delivery.number();
            let lease = inner.factory.lease;
            let worker = Worker {
                raw: inner.factory.backend.observer(&inner.mutex)?,
                lease,
                observation: Observation::new(lease, Moment::now()),
                mutex: Arc::clone(&inner.mutex),
                snapshot: Arc::clone(&inner.snapshot),
                delivery,
                listening: false,
            };
            Ok((move |parker: Parker| worker.run(&parker), carrier))
        })
    }

    /// Stops following the owner and ends the thread; nothing is delivered after this returns. If called
    /// from one of the service's own callbacks, it returns at once.
    ///
    /// # Errors
    /// `Timeout` if a callback hangs: the thread then ends when the callback does.
    pub fn stop(&self) -> Result<()> {
        self.inner.get()?.stop()
    }

    /// Returns the mutex that this service follows.
    #[must_use]
    pub fn mutex(&self) -> &str {
        self.inner.here().map_or("", |inner| &inner.mutex)
    }
}

impl Inner {
    fn stop(&self) -> Result<()> {
        let bound = self.factory.lease.total() + Duration::from_secs(2);
        self.lifecycle.stop(&self.mutex, Moment::now() + bound)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Err(error) = self.stop() {
            log::warn!("{}: dropped without a clean stop: {error}", self.mutex);
        }
    }
}

impl fmt::Debug for MutexRetrievalService {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MutexRetrievalService")
            .field("mutex", &self.mutex())
            .field("status", &self.status())
            .finish()
    }
}

/// Builds a [`MutexRetrievalService`]. `build` and `channel` validate all options and do no I/O.
#[derive(Debug)]
#[must_use]
pub struct ObserveBuilder {
    factory: Result<Arc<factory::Inner>>,
    mutex: Arc<str>,
    delivery: DeliverySettings,
}

impl ObserveBuilder {
    delivery_setters!();

    pub(crate) fn new(factory: Result<Arc<factory::Inner>>, mutex: Arc<str>) -> ObserveBuilder {
        ObserveBuilder {
            factory,
            mutex,
            delivery: DeliverySettings::default(),
        }
    }

    pub(crate) fn retriever(
        factory: Result<Arc<factory::Inner>>,
        retriever: impl MutexRetriever + 'static,
    ) -> ObserveBuilder {
        let mut builder = ObserveBuilder::new(factory, retriever.mutex().into());
        builder.delivery.own = Some(Arc::new(move |event: &Event| retriever.notify_owner(event)));
        builder
    }

    /// Builds the service with the callbacks that were set, if any.
    ///
    /// # Errors
    /// `InvalidInput` for a name that is not allowed, `Forked` in a child process.
    pub fn build(mut self) -> Result<MutexRetrievalService> {
        let executor = self.factory.as_ref().ok();
        let executor = executor.and_then(|factory| factory.executor());
        let recipient = std::mem::take(&mut self.delivery).callbacks(executor)?;
        self.finish(recipient)
    }

    /// Builds the service and returns it with the receiver of its events, which can be used in
    /// crossbeam's `select!`. The receiver survives restarts and is disconnected when the service is
    /// dropped.
    ///
    /// # Errors
    /// As [`build`](ObserveBuilder::build); and `InvalidInput` if callbacks were set too.
    pub fn channel(mut self) -> Result<(MutexRetrievalService, Events)> {
        let (recipient, events) = std::mem::take(&mut self.delivery).channel()?;
        Ok((self.finish(recipient)?, events))
    }

    fn finish(self, recipient: Recipient) -> Result<MutexRetrievalService> {
        let factory = self.factory?;
        check_mutex(&self.mutex)?;
        // What this backend cannot keep is refused now, not at the start.
        factory.backend.observer(&self.mutex)?;
        let (snapshot, lifecycle) = (Arc::<Snapshot>::default(), Lifecycle::new());
        let monitored = Arc::new(Monitored {
            mutex: Arc::clone(&self.mutex),
            id: None,
            stage: Arc::clone(lifecycle.stage()),
            snapshot: Arc::clone(&snapshot),
        });
        factory.registry.add(&monitored);
        let inner = Inner {
            factory,
            mutex: self.mutex,
            recipient,
            snapshot,
            lifecycle,
            _monitored: monitored,
        };
        Ok(MutexRetrievalService {
            inner: Local::new(Arc::new(inner)),
        })
    }
}

/// The state of one run. It belongs to the worker thread alone.
struct Worker {
    raw: Box<dyn RawObserver>,
    lease: Lease,
    observation: Observation,
    mutex: Arc<str>,
    snapshot: Arc<Snapshot>,
    delivery: Delivery,
    /// Whether the backend wakes us.
    listening: bool,
}

impl Worker {
    fn run(mut self, parker: &Parker) {
        let unparker = parker.unparker();
        self.delivery.tell_when_abandoned(unparker.clone());
        while !parker.is_stopped() && !self.delivery.is_abandoned() {
            match self.observation.step(Moment::now()) {
                Look::Announce(state) => {
                    self.snapshot.set_state(state.clone());
                    let event = Event::new(EventKind::OwnerChanged, &self.mutex, state);
                    self.delivery.deliver(event);
                }
                Look::Observe { by } => self.observe(&unparker, by),
                Look::Wait { mut until } => {
                    if self.delivery.is_behind() {
                        until = until.min(Moment::now() + CATCH_UP);
                    }
                    if parker.park(until) == Unparked::Wake {
                        self.observation.woken(Moment::now());
                    }
                }
            }
        }
        if !parker.is_stopped() {
            let who = format_args!("{}: observer", self.mutex);
            let error = abandoned(who, "nobody reads what it sees: it ends. Keep the receiver");
            log::warn!("{error}");
            self.snapshot.end(error);
        }
        self.delivery.close(Moment::now() + self.lease.total());
    }

    fn observe(&mut self, unparker: &Unparker, by: Moment) {
        if !self.listening {
            // Half of the time: a subscription that hangs leaves some for the look itself.
            let half = by - by.remaining() / 2;
            let sent = Moment::now();
            let listening = self.guarded(|raw| raw.listen(unparker, half));
            self.listening = listening.is_ok();
            let change = self.snapshot.note_listen(sent, listening.as_ref().copied());
            self.report(change, listening.err());
        }
        let sent = Moment::now();
        let view = self.guarded(|raw| raw.observe(by));
        let change = self.snapshot.note_call(sent, view.as_ref().map(|_| true));
        self.report(change, view.as_ref().err().cloned());
        let view = view.ok().map(|mut view| {
            if !self.listening {
                view.look_in = view.look_in.min(self.lease.call_budget());
            }
            view
        });
        self.observation
            .observed(Moment::now(), view, clock::roll());
        if let Some(owner) = self.observation.seen() {
            self.snapshot.refresh(owner);
        }
    }

    fn guarded<T>(&mut self, call: impl FnOnce(&mut dyn RawObserver) -> Result<T>) -> Result<T> {
        let raw = &mut *self.raw;
        catch_unwind(AssertUnwindSafe(|| call(raw)))
            .unwrap_or_else(|_| Err(Error::new(ErrorKind::Panicked, "the backend panicked")))
    }

    fn report(&mut self, change: ErrorChange, error: Option<Error>) {
        let mutex = &self.mutex;
        match (change, error) {
            (ErrorChange::New, Some(error)) => {
                log::warn!("{mutex}: observer: {error}; trying again");
                let mut event = Event::new(EventKind::Failed, mutex, self.snapshot.state());
                event.error = Some(error);
                self.delivery.deliver(event);
            }
            (ErrorChange::Over, _) => log::info!("{mutex}: observer: the backend answers again"),
            _ => {}
        }
    }
}
