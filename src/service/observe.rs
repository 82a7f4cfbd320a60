//! `MutexRetrievalService`: follows who owns a mutex, without contending for it.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use super::callbacks::MutexRetriever;
use super::delivery::{Delivery, DeliverySettings, Recipient, abandoned, delivery_setters};
use super::lifecycle::{Lifecycle, service_getters};
use crate::backend::{RawObserver, View};
use crate::clock::{self, Moment};
use crate::error::{Error, ErrorKind, Result};
use crate::event::{Event, EventKind, Events};
use crate::factory;
use crate::machine::period::ContendPeriod;
use crate::name::check_mutex;
use crate::owner::{MutexOwner, MutexState};
use crate::parker::{Parker, Unparker};
use crate::shared::Shared;
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
    factory: Arc<factory::Core>,
    mutex: Arc<str>,
    recipient: Recipient,
    shared: Arc<Shared>,
    lifecycle: Lifecycle,
}

impl MutexRetrievalService {
    service_getters!();

    /// Starts following the owner. Returns at once.
    ///
    /// ```
    /// let factory = contend::connect("memory://observe-start-doc")?;
    /// let observer = factory
    ///     .observe("demo")
    ///     .on_owner_changed(|event| println!("owned by {:?}", event.state.after().owner_id()))
    ///     .build()?;
    /// observer.start()?;
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// # Errors
    /// `InvalidState` unless the status is `Initial`, or if the receiver of its events was dropped;
    /// `Unavailable` if the system cannot start another thread; `Forked` in a child process.
    pub fn start(&self) -> Result<()> {
        let inner = self.inner.get()?;
        let name = format!("observe {}", inner.mutex);
        inner.lifecycle.start(name, |parker| {
            if inner.recipient.is_abandoned() {
                return Err(abandoned(&inner.mutex));
            }
            inner.shared.clear();
            let delivery = inner.recipient.open(&inner.mutex)?;
            let worker = Worker {
                raw: inner
                    .factory
                    .backend
                    .observer(&inner.mutex, &parker.unparker())?,
                unparker: parker.unparker(),
                factory: Arc::clone(&inner.factory),
                mutex: Arc::clone(&inner.mutex),
                shared: Arc::clone(&inner.shared),
                delivery,
                seen: None,
                failures: 0,
            };
            Ok(move |parker: Parker| worker.run(&parker))
        })
    }

    /// Stops following the owner and ends the thread; nothing is delivered after this returns. If called
    /// from one of the service's own callbacks, it returns at once.
    ///
    /// ```
    /// let factory = contend::connect("memory://observe-stop-doc")?;
    /// let (observer, owners) = factory.observe("demo").channel()?;
    /// observer.start()?;
    /// owners.recv().unwrap(); // the first look
    /// observer.stop()?;
    /// assert!(owners.is_empty());
    /// # Ok::<(), contend::Error>(())
    /// ```
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
        let deadline = Moment::now() + bound;
        self.lifecycle.stop(&self.mutex, deadline, || {})
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
///
/// ```
/// let factory = contend::connect("memory://observe-builder-doc")?;
/// let observer = factory
///     .observe("nightly-report")
///     .on_owner_changed(|event| println!("owned by {:?}", event.state.after().owner_id()))
///     .on_failure(|event| println!("{:?}", event.error))
///     .build()?;
/// observer.start()?;
/// # Ok::<(), contend::Error>(())
/// ```
#[derive(Debug)]
#[must_use]
pub struct ObserveBuilder {
    factory: Result<Arc<factory::Core>>,
    mutex: Arc<str>,
    delivery: DeliverySettings,
}

impl ObserveBuilder {
    delivery_setters!();

    pub(crate) fn new(factory: Result<Arc<factory::Core>>, mutex: Arc<str>) -> ObserveBuilder {
        ObserveBuilder {
            factory,
            mutex,
            delivery: DeliverySettings::default(),
        }
    }

    pub(crate) fn retriever(
        factory: Result<Arc<factory::Core>>,
        retriever: impl MutexRetriever + 'static,
    ) -> ObserveBuilder {
        let mut builder = ObserveBuilder::new(factory, retriever.mutex().into());
        builder.delivery.own = Some(Arc::new(move |event: &Event| retriever.notify_owner(event)));
        builder
    }

    /// Builds the service with the callbacks that were set, if any.
    ///
    /// ```
    /// let factory = contend::connect("memory://observe-build-doc")?;
    /// let observer = factory.observe("demo").build()?; // without callbacks: ask `state`
    /// observer.start()?;
    /// println!("owned by {:?}", observer.state().after().owner_id());
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// # Errors
    /// `InvalidInput` for a name that is not allowed, `Forked` in a child process.
    pub fn build(mut self) -> Result<MutexRetrievalService> {
        let executor = self.factory.as_ref().ok();
        let executor = executor.and_then(|factory| factory.executor.get().cloned());
        let recipient = std::mem::take(&mut self.delivery).callbacks(executor)?;
        self.finish(recipient)
    }

    /// Builds the service and returns it with the receiver of its events, which can be used in
    /// crossbeam's `select!`. The receiver survives restarts and is disconnected when the service is
    /// dropped.
    ///
    /// ```
    /// let factory = contend::connect("memory://observe-channel-doc")?;
    /// let (observer, owners) = factory.observe("demo").channel()?;
    /// observer.start()?;
    /// let guard = factory.locker("demo").id("a").build()?.lock()?;
    /// let owner = owners.iter().find(|event| event.state.after().has_owner()).unwrap();
    /// assert_eq!(owner.state.after().owner_id(), "a");
    /// # drop(guard);
    /// # Ok::<(), contend::Error>(())
    /// ```
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
        let unparker = Parker::new().unparker();
        factory.backend.observer(&self.mutex, &unparker)?;
        let inner = Inner {
            factory,
            mutex: self.mutex,
            lifecycle: Lifecycle::new(&recipient),
            recipient,
            shared: Arc::default(),
        };
        Ok(MutexRetrievalService {
            inner: Local::new(Arc::new(inner)),
        })
    }
}

/// The state of one run. It belongs to the worker thread alone.
struct Worker {
    raw: Box<dyn RawObserver>,
    unparker: Unparker,
    factory: Arc<factory::Core>,
    mutex: Arc<str>,
    shared: Arc<Shared>,
    delivery: Delivery,
    /// `None` until the first look.
    seen: Option<MutexOwner>,
    failures: u32,
}

impl Worker {
    fn run(mut self, parker: &Parker) {
        while !parker.is_stopped() && !self.delivery.is_abandoned() {
            let look_again = self.observe();
            self.delivery.catch_up();
            parker.park(look_again);
        }
        if !parker.is_stopped() {
            let error = abandoned(format_args!("{}: observer", self.mutex));
            log::warn!("{error}");
            self.shared.fail(error);
        }
        self.delivery.close();
    }

    /// Looks, tells what has changed, and says when to look again.
    fn observe(&mut self) -> Moment {
        let period = ContendPeriod::new(self.factory.lease);
        match self.call() {
            Ok(View { owner, look_in }) => {
                self.failures = 0;
                self.see(owner);
                period.next_attempt(Moment::now(), look_in, clock::roll())
            }
            Err(error) => {
                self.failures = self.failures.saturating_add(1);
                log::debug!("{}: observer: {error}", self.mutex);
                Moment::now() + period.attempt_backoff(self.failures, clock::roll())
            }
        }
    }

    /// What the first look sees is news too: that it is free, or that it is not.
    fn see(&mut self, owner: MutexOwner) {
        let changed = self.seen.as_ref().is_none_or(|before| {
            before.owner_id() != owner.owner_id()
                || (owner.fence() != 0 && before.fence() != owner.fence())
        });
        let before = self.seen.replace(owner.clone()).unwrap_or_default();
        if changed {
            let state = MutexState::new(before, owner);
            self.shared.set_state(state.clone());
            let event = Event::new(EventKind::OwnerChanged, &self.mutex, state);
            self.delivery.deliver(event);
        } else {
            self.shared.refresh(&owner);
        }
    }

    /// Makes a call and notes whether it was answered. After a panic the backend's side is made anew.
    fn call(&mut self) -> Result<View> {
        let sent = Moment::now();
        let by = sent + self.factory.lease.request_limit();
        let raw = &mut *self.raw;
        let outcome = catch_unwind(AssertUnwindSafe(|| raw.observe(by))).unwrap_or_else(|_| {
            let made = self.factory.backend.observer(&self.mutex, &self.unparker);
            let _ = catch_unwind(AssertUnwindSafe(|| made.map(|raw| self.raw = raw)));
            Err(Error::new(ErrorKind::Panicked, "the backend panicked"))
        });
        let error = outcome.as_ref().err();
        let who = format_args!("{}: observer", self.mutex);
        if self.factory.note(&self.shared, who, sent, error) {
            let mut event = Event::new(EventKind::Failed, &self.mutex, self.shared.state());
            event.error = error.cloned();
            self.delivery.deliver(event);
        }
        outcome
    }
}
