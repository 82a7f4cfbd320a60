//! `MutexContendService`: contends for a mutex on a thread of its own for as long as it runs.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::callbacks::MutexContender;
use super::delivery::{Delivery, DeliverySettings, Recipient, abandoned, delivery_setters};
use super::lifecycle::{Lifecycle, service_getters};
use super::settings::{Settings, Validated, contender_setters};
use crate::backend::{Contender, OnRefusal, Purpose};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::event::{Event, EventKind, Events};
use crate::factory;
use crate::id::LiveId;
use crate::machine::contention::Change;
use crate::machine::period::ContendPeriod;
use crate::ownership::Ownership;
use crate::parker::{Parker, Unparked};
use crate::probe::LossReason;
use crate::runner::{Done, Runner};
use crate::shared::Shared;
use crate::thread::Local;
use crate::virtual_time::try_lock_for;

/// Contends for one mutex, as one contender, from `start` to `stop`.
///
/// Its worker thread acquires, renews, waits and contends again after a loss. All methods may be called
/// from any thread, and only `stop`, `resign`, `resign_for` and dropping wait for the backend. Clones
/// refer to the same service, which stops when the last one is dropped.
///
/// ```
/// use contend::EventKind;
///
/// let factory = contend::connect("memory://contend-service-doc")?;
/// let (service, events) = factory.contend("demo").id("a").channel()?;
/// service.start()?;
///
/// let event = events.recv().unwrap();
/// assert_eq!(event.kind, EventKind::Acquired);
/// assert!(service.is_owner());
/// assert_eq!(service.fence(), event.fence());
///
/// service.stop()?;
/// assert!(!service.is_owner());
/// assert_eq!(events.recv().unwrap().kind, EventKind::Released);
/// # Ok::<(), contend::Error>(())
/// ```
#[derive(Clone)]
#[must_use = "a service does nothing until it is started, and stops when it is dropped"]
pub struct MutexContendService {
    inner: Local<Arc<Inner>>,
}

pub(crate) struct Inner {
    factory: Arc<factory::Core>,
    contender: Contender,
    period: ContendPeriod,
    lead_without_listener: bool,
    recipient: Recipient,
    shared: Arc<Shared>,
    lifecycle: Lifecycle,
    run: Arc<Run>,
    /// Keeps the id from being used twice for as long as the service lives.
    live: Arc<LiveId>,
}

/// What the worker's thread shares with those that stop the service or resign.
#[derive(Default)]
struct Run {
    /// Locked by its thread for each step. A caller that stops the service or resigns locks it to give up in its own
    /// thread, which sends the release without a change of threads. `None` once the run is over.
    worker: Mutex<Option<Worker>>,
    /// What a callback asked for. It cannot wait for the worker, which waits for it.
    resign: Mutex<Option<Resign>>,
}

struct Resign {
    asked_at: Moment,
    rest: Duration,
}

impl MutexContendService {
    service_getters!();

    /// Starts contending. Returns at once: if the backend cannot be reached, the service keeps trying;
    /// see [`last_error`](MutexContendService::last_error).
    ///
    /// ```
    /// let factory = contend::connect("memory://start-doc")?;
    /// let service = factory.contend("demo").build()?;
    /// service.start()?;
    /// assert!(service.is_active());
    /// assert!(service.start().is_err()); // it is started already
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// # Errors
    /// `InvalidState` unless the status is `Initial`, or if the receiver of its events was dropped;
    /// `Unavailable` if the system cannot start another thread; `Forked` in a child process.
    pub fn start(&self) -> Result<()> {
        let inner = self.inner.get()?;
        let name = format!("contend {}", inner.contender.mutex);
        inner.lifecycle.start(name, |parker| {
            if !inner.lead_without_listener && inner.recipient.is_abandoned() {
                return Err(abandoned(&inner.contender.mutex));
            }
            inner.shared.clear();
            inner.run.resign.lock().take();
            let delivery = inner.recipient.open(&inner.contender.mutex)?;
            let worker = Worker {
                runner: Runner::new(
                    &inner.factory,
                    &inner.contender,
                    inner.period,
                    Moment::now() + *inner.factory.initial_delay.lock(),
                    &inner.shared,
                    parker.unparker(),
                )?,
                shared: Arc::clone(&inner.shared),
                delivery,
                parker: parker.clone(),
                lead_without_listener: inner.lead_without_listener,
                has_given_up: false,
                _live: Arc::clone(&inner.live),
            };
            *inner.run.worker.lock() = Some(worker);
            let run = Arc::clone(&inner.run);
            Ok(move |parker: Parker| run.work(&parker))
        })
    }

    /// Gives up the mutex, leaves the queue and ends the thread. If the service owns the mutex, Released
    /// is delivered and its callback has run before the release is sent; nothing is delivered after this
    /// returns.
    ///
    /// If the backend does not answer, this still returns `Ok` within the request limit: this service no longer
    /// owns the mutex. A warning is logged, and the next owner has to wait for the lease to end.
    ///
    /// With a channel, Released is only queued by then, and perhaps not read yet: end your work before you
    /// stop, because the next owner may lead as soon as this returns.
    ///
    /// If called from one of the service's own callbacks, it returns at once, and the service stops after
    /// the callback has returned. Stopping a service that is not started does nothing.
    ///
    /// ```
    /// let factory = contend::connect("memory://stop-doc")?;
    /// let (service, events) = factory.contend("demo").channel()?;
    /// service.start()?;
    /// let first = events.recv().unwrap().fence();
    ///
    /// service.stop()?;
    /// assert_eq!(events.recv().unwrap().fence(), first); // Released
    /// service.start()?; // contends anew
    /// assert!(events.recv().unwrap().fence() > first);
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Timeout` if a callback hangs beyond the end of the lease: the thread then ends when the callback
    /// does.
    pub fn stop(&self) -> Result<()> {
        self.inner.get()?.stop()
    }

    /// Gives up the mutex as [`stop`](MutexContendService::stop) does, but stays started and rejoins the
    /// end of the queue at once.
    ///
    /// ```
    /// let factory = contend::connect("memory://resign-doc")?;
    /// let (a, events) = factory.contend("demo").id("a").channel()?;
    /// a.start()?;
    /// let first = events.recv().unwrap().fence();
    /// a.resign()?; // no other contender waits, so it leads again, with a higher fence
    /// events.recv().unwrap();
    /// assert!(events.recv().unwrap().fence() > first);
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// Called from one of the service's own callbacks, it returns at once, as `stop` does.
    ///
    /// # Errors
    /// `InvalidState` unless it is started; `Timeout` if an earlier call to the backend hangs. An error of the backend if
    /// the release was not answered: the service no longer owns the mutex, and the next owner may have to wait for the
    /// lease to end. A callback that hangs is waited for until then.
    pub fn resign(&self) -> Result<()> {
        self.resign_for(Duration::ZERO)
    }

    /// Gives up the mutex as [`resign`](MutexContendService::resign) does, and rejoins the queue after
    /// `rest`.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// let factory = contend::connect("memory://resign-for-doc")?;
    /// let (service, events) = factory.contend("demo").channel()?;
    /// service.start()?;
    /// events.recv().unwrap(); // Acquired
    /// service.resign_for(Duration::from_secs(60))?; // time for another contender
    /// assert!(service.is_active() && !service.is_owner());
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`resign`](MutexContendService::resign).
    pub fn resign_for(&self, rest: Duration) -> Result<()> {
        let inner = self.inner.get()?;
        let asked = Resign {
            asked_at: Moment::now(),
            rest,
        };
        let unparker = inner.lifecycle.unparker();
        let unparker = unparker.ok_or_else(|| inner.not_started())?;
        if inner.lifecycle.is_inside() {
            *inner.run.resign.lock() = Some(asked);
            unparker.unpark();
            return Ok(());
        }
        let mut slot = try_lock_for(&inner.run.worker, inner.stop_bound()).ok_or_else(|| {
            let message = format!("{}: not resigned; an earlier call hangs", self.mutex());
            Error::new(ErrorKind::Timeout, message)
        })?;
        match slot.as_mut() {
            Some(worker) if !worker.parker.is_stopped() => {
                worker.parker.unparker().unpark();
                worker.resign(asked)
            }
            _ => Err(inner.not_started()),
        }
    }

    /// Returns the mutex that this service contends for.
    ///
    /// ```
    /// let factory = contend::connect("memory://service-mutex-doc")?;
    /// let service = factory.contend("nightly-report").id("host-7").build()?;
    /// assert_eq!((service.mutex(), service.id()), ("nightly-report", "host-7"));
    /// # Ok::<(), contend::Error>(())
    /// ```
    #[must_use]
    pub fn mutex(&self) -> &str {
        self.inner.here().map_or("", |inner| &inner.contender.mutex)
    }

    /// Returns the id that this service contends under.
    #[must_use]
    pub fn id(&self) -> &str {
        self.inner.here().map_or("", |inner| &inner.contender.id)
    }

    /// Returns `true` if this contender owns the mutex at the moment of the call. This is correct even
    /// while the worker is blocked or the backend is unreachable, and after the machine was suspended.
    ///
    /// ```
    /// let factory = contend::connect("memory://is-owner-doc")?;
    /// let (service, events) = factory.contend("demo").channel()?;
    /// assert!(!service.is_owner());
    /// service.start()?;
    /// events.recv().unwrap(); // Acquired
    /// assert!(service.is_owner());
    /// # Ok::<(), contend::Error>(())
    /// ```
    #[must_use]
    pub fn is_owner(&self) -> bool {
        self.fence().is_some()
    }

    /// Returns `true` if this contender owns the mutex and the backend has confirmed it within a ttl.
    /// It differs from `is_owner` only if something other than the ttl keeps an ownership alive (a
    /// ZooKeeper session).
    #[must_use]
    pub fn is_in_ttl(&self) -> bool {
        self.is_owner() && self.state().is_in_ttl(self.id())
    }

    /// Returns the fence of the current ownership; `None` if this contender does not own the mutex.
    ///
    /// Pass it to the resource that you protect, and let it reject any write whose fence is lower than
    /// the highest it has seen. The resource is then protected even if this library's assumptions about
    /// clocks and servers do not hold.
    ///
    /// ```
    /// let factory = contend::connect("memory://fence-doc")?;
    /// let (service, events) = factory.contend("demo").channel()?;
    /// service.start()?;
    /// events.recv().unwrap(); // Acquired
    /// if let Some(fence) = service.fence() {
    ///     println!("UPDATE report SET fence = {fence} WHERE id = 1 AND fence <= {fence}");
    /// }
    /// # Ok::<(), contend::Error>(())
    /// ```
    #[must_use]
    pub fn fence(&self) -> Option<u64> {
        self.inner.here()?.shared.fence()
    }

    /// Returns how long this contender certainly owns the mutex without another renewal; zero if it does
    /// not own it.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// let factory = contend::connect("memory://valid-for-doc")?;
    /// let (service, events) = factory.contend("demo").channel()?;
    /// service.start()?;
    /// events.recv().unwrap(); // Acquired
    /// let step = Duration::from_secs(2);
    /// if service.valid_for() > step {
    ///     println!("there is time for one more step");
    /// }
    /// # Ok::<(), contend::Error>(())
    /// ```
    #[must_use]
    pub fn valid_for(&self) -> Duration {
        let ownership = self.fence().and_then(|fence| self.ownership(fence));
        ownership.map_or(Duration::ZERO, |ownership| ownership.valid_for())
    }

    /// The ownership with this fence, if it lasts.
    pub(crate) fn ownership(&self, fence: u64) -> Option<Ownership> {
        self.inner.here()?.shared.ownership(fence)
    }

    /// Returns `true` on the thread of one of this service's callbacks.
    pub(crate) fn is_inside_callback(&self) -> bool {
        let inner = self.inner.here();
        inner.is_some_and(|inner| inner.lifecycle.is_inside())
    }

    /// Asks the worker to stop, and does not wait for it.
    pub(crate) fn request_stop(&self) {
        if let Some(inner) = self.inner.here() {
            let mutex = &inner.contender.mutex;
            let _ = inner.lifecycle.stop(mutex, Moment::now(), || {});
        }
    }
}

impl Inner {
    /// Gives up in the calling thread if the worker sleeps; otherwise the worker does when its call is over.
    fn stop(&self) -> Result<()> {
        let deadline = Moment::now() + self.stop_bound();
        let mutex = &self.contender.mutex;
        self.lifecycle.stop(mutex, deadline, || {
            // By now it may be the worker of the next run.
            if let Some(mut slot) = try_lock_for(&self.run.worker, Duration::ZERO)
                && let Some(worker) = slot.as_mut().filter(|it| it.parker.is_stopped())
            {
                worker.finish();
            }
        })
    }

    /// The running call, the callbacks up to the end of the lease, and the way out.
    fn stop_bound(&self) -> Duration {
        let lease = self.contender.lease;
        lease.total() + lease.drift_allowance() + 2 * lease.request_limit() + Duration::from_secs(1)
    }

    fn not_started(&self) -> Error {
        Error::new(
            ErrorKind::InvalidState,
            format!("{}: the service is not started", self.contender.mutex),
        )
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Err(error) = self.stop() {
            log::warn!(
                "{}: dropped without a clean stop: {error}",
                self.contender.mutex
            );
        }
    }
}

impl fmt::Debug for MutexContendService {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let realm = self.inner.here().map(|inner| inner.factory.backend.realm());
        f.debug_struct("MutexContendService")
            .field("realm", &realm.unwrap_or_default())
            .field("mutex", &self.mutex())
            .field("id", &self.id())
            .field("status", &self.status())
            .field("fence", &self.fence())
            .finish()
    }
}

/// Builds a [`MutexContendService`]. `build` and `channel` validate all options and do no I/O.
///
/// ```
/// use std::time::Duration;
///
/// let factory = contend::connect("memory://contend-builder-doc")?;
/// let (service, events) = factory
///     .contend("nightly-report")
///     .id("host-7")
///     .ttl(Duration::from_secs(30))
///     .transition(Duration::from_secs(20))
///     .channel()?;
/// assert_eq!(service.id(), "host-7");
/// # Ok::<(), contend::Error>(())
/// ```
#[derive(Debug)]
#[must_use]
pub struct ContendBuilder {
    pub(crate) settings: Settings,
    lead_without_listener: bool,
    delivery: DeliverySettings,
}

impl ContendBuilder {
    contender_setters!();
    delivery_setters!();

    pub(crate) fn new(factory: Result<Arc<factory::Core>>, mutex: Arc<str>) -> ContendBuilder {
        ContendBuilder {
            settings: Settings::new(factory, mutex),
            lead_without_listener: false,
            delivery: DeliverySettings::default(),
        }
    }

    pub(crate) fn contender(
        factory: Result<Arc<factory::Core>>,
        contender: impl MutexContender + 'static,
    ) -> ContendBuilder {
        let mut builder =
            ContendBuilder::new(factory, contender.mutex().into()).id(contender.contender_id());
        builder.delivery.own = Some(Arc::new(move |event: &Event| contender.notify_owner(event)));
        builder
    }

    /// Sets whether the service keeps leading after the receiver of its events was dropped. Defaults to
    /// `false`: the service then steps down for good, because the program cannot act on its events.
    ///
    /// ```
    /// let factory = contend::connect("memory://lead-without-listener-doc")?;
    /// let (service, events) = factory.contend("demo").lead_without_listener(true).channel()?;
    /// service.start()?;
    /// drop(events); // from here on, the program asks `is_owner`
    /// # Ok::<(), contend::Error>(())
    /// ```
    pub fn lead_without_listener(mut self, lead: bool) -> ContendBuilder {
        self.lead_without_listener = lead;
        self
    }

    /// Calls `callback` when this contender becomes the owner.
    ///
    /// ```
    /// let factory = contend::connect("memory://on-acquired-doc")?;
    /// let service = factory
    ///     .contend("demo")
    ///     .on_acquired(|event| println!("leading with fence {:?}", event.fence()))
    ///     .build()?;
    /// service.start()?;
    /// # Ok::<(), contend::Error>(())
    /// ```
    pub fn on_acquired(mut self, callback: impl FnMut(&Event) + Send + 'static) -> ContendBuilder {
        self.delivery.on(EventKind::Acquired, callback);
        self
    }

    /// Calls `callback` when this contender stops being the owner. As long as the lease lasts, no other contender
    /// becomes the owner before it returns.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use std::sync::atomic::{AtomicBool, Ordering};
    ///
    /// let factory = contend::connect("memory://on-released-doc")?;
    /// let leads = Arc::new(AtomicBool::new(false)); // the work looks at this
    /// let (begin, end) = (Arc::clone(&leads), leads);
    /// let service = factory
    ///     .contend("demo")
    ///     .on_acquired(move |_| begin.store(true, Ordering::Release))
    ///     .on_released(move |_| end.store(false, Ordering::Release))
    ///     .build()?;
    /// service.start()?;
    /// # Ok::<(), contend::Error>(())
    /// ```
    pub fn on_released(mut self, callback: impl FnMut(&Event) + Send + 'static) -> ContendBuilder {
        self.delivery.on(EventKind::Released, callback);
        self
    }

    /// Builds the service with the callbacks that were set, if any.
    ///
    /// ```
    /// let factory = contend::connect("memory://contend-build-doc")?;
    /// let service = factory.contend("demo").build()?; // without callbacks: ask `is_owner`
    /// let error = factory.contend("demo").id(service.id()).build().unwrap_err();
    /// assert_eq!(error.kind(), contend::ErrorKind::DuplicateContender);
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// # Errors
    /// `InvalidInput` for a name, id or duration that is not allowed, `DuplicateContender` for an id that
    /// this factory already contends under, `Forked` in a child process.
    pub fn build(mut self) -> Result<MutexContendService> {
        let executor = self.settings.factory.as_ref().ok();
        let executor = executor.and_then(|factory| factory.executor.get().cloned());
        let recipient = std::mem::take(&mut self.delivery).callbacks(executor)?;
        self.finish(recipient)
    }

    /// Builds the service with callbacks that never run on the factory's executor: they may block for long.
    pub(crate) fn build_on_own_thread(mut self) -> Result<MutexContendService> {
        let recipient = std::mem::take(&mut self.delivery).callbacks(None)?;
        self.finish(recipient)
    }

    /// Builds the service and returns it with the receiver of its events, which can be used in
    /// crossbeam's `select!`. The receiver survives restarts and is disconnected when the service is
    /// dropped.
    ///
    /// ```
    /// use contend::EventKind;
    ///
    /// let factory = contend::connect("memory://contend-channel-doc")?;
    /// let (service, events) = factory.contend("demo").channel()?;
    /// service.start()?;
    /// assert_eq!(events.recv().unwrap().kind, EventKind::Acquired);
    /// service.stop()?;
    /// assert_eq!(events.recv().unwrap().kind, EventKind::Released);
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`build`](ContendBuilder::build); and `InvalidInput` if callbacks were set too.
    pub fn channel(mut self) -> Result<(MutexContendService, Events)> {
        let (recipient, events) = std::mem::take(&mut self.delivery).channel()?;
        Ok((self.finish(recipient)?, events))
    }

    fn finish(self, recipient: Recipient) -> Result<MutexContendService> {
        let Validated {
            factory,
            contender,
            period,
            live,
        } = self.settings.validate(Purpose::Lead)?;
        let inner = Inner {
            contender,
            period,
            lead_without_listener: self.lead_without_listener,
            lifecycle: Lifecycle::new(&recipient),
            recipient,
            shared: Arc::default(),
            run: Arc::default(),
            live: Arc::new(live),
            factory,
        };
        Ok(MutexContendService {
            inner: Local::new(Arc::new(inner)),
        })
    }
}

/// The state of one run.
struct Worker {
    runner: Runner,
    shared: Arc<Shared>,
    delivery: Delivery,
    parker: Parker,
    lead_without_listener: bool,
    /// It gave up for the last time.
    has_given_up: bool,
    /// The id is taken for as long as the worker lives, even if the service was dropped.
    _live: Arc<LiveId>,
}

impl Run {
    /// What the worker's thread does.
    fn work(&self, parker: &Parker) {
        let mut woken = false;
        while let Some(mut slot) = try_lock_for(&self.worker, Duration::MAX)
            && let Some(worker) = slot.as_mut()
            && worker.continues()
        {
            // Not locked meanwhile: a callback that the worker waits for may resign again.
            let resign = self.resign.lock().take();
            if let Some(asked) = resign {
                let _ = worker
                    .resign(asked)
                    .inspect_err(|error| log::warn!("{error}"));
                continue;
            }
            let until = worker.step(woken);
            drop(slot);
            woken = until.is_some_and(|until| parker.park(until) == Unparked::Wake);
        }
        let taken = try_lock_for(&self.worker, Duration::MAX).and_then(|mut slot| slot.take());
        let Some(mut worker) = taken else { return };
        worker.finish();
        if !parker.is_stopped() {
            worker.say_abandoned();
        }
        // The runner is dropped after this: on ZooKeeper its drop gives up the place in the queue.
        worker.delivery.close();
    }
}

impl Worker {
    fn continues(&self) -> bool {
        !self.parker.is_stopped() && (self.lead_without_listener || !self.delivery.is_abandoned())
    }

    /// Takes one step. Returns until when there is nothing to do.
    fn step(&mut self, woken: bool) -> Option<Moment> {
        if woken {
            self.runner.woken();
        }
        let until = match self.runner.step() {
            Done::Called { change, .. } => {
                self.announce(change);
                None
            }
            Done::Wait(until) => Some(until),
        };
        self.report();
        self.delivery.catch_up();
        until
    }

    fn resign(&mut self, asked: Resign) -> Result<()> {
        let released = self.give_up(asked.asked_at);
        let at = Moment::now() + asked.rest;
        self.runner.contend_at(at, OnRefusal::Enqueue);
        released
    }

    /// Gives up for the last time.
    fn finish(&mut self) {
        let asked_at = self.parker.stopped_at().unwrap_or_else(Moment::now);
        if !std::mem::replace(&mut self.has_given_up, true)
            && let Err(error) = self.give_up(asked_at)
        {
            log::warn!("{error}");
        }
    }

    /// Released is delivered and its callback has returned before the release is sent, up to the end of the lease. A
    /// call that was under way at `asked_at` and the release share one request limit.
    fn give_up(&mut self, asked_at: Moment) -> Result<()> {
        let spent = Moment::now() - asked_at;
        let released = self.runner.step_down(LossReason::Released);
        self.announce(released);
        let Contender {
            mutex, id, lease, ..
        } = self.runner.contender().clone();
        let lease_end = self.runner.machine().lease_end();
        let residue = *self.runner.machine().residue();
        let has_lease = residue.fence.is_some() || (residue.unsure && Moment::now() < lease_end);
        if has_lease && !self.delivery.settle(lease_end) {
            log::warn!(
                "{mutex}: the callback for Released outlasted the lease; another contender may own by now"
            );
        }
        let left = self
            .runner
            .leave(Moment::now() + lease.request_limit().saturating_sub(spent));
        left.map(drop).map_err(|error| {
            let what = format_args!("{mutex}: {id}: not released; the lease ends by itself");
            error.context(what)
        })
    }

    /// After the last call: its answer would be taken for the end of this trouble.
    fn say_abandoned(&self) {
        let Contender { mutex, id, .. } = self.runner.contender();
        let error = abandoned(format_args!("{mutex}: {id}"));
        log::error!("{error}");
        self.shared.fail(error);
    }

    fn announce(&mut self, change: Option<Change>) {
        let (kind, state) = match change {
            Some(Change::Acquired(state)) => (EventKind::Acquired, state),
            Some(Change::Released(state, _)) => (EventKind::Released, state),
            Some(Change::OwnerChanged(state)) => (EventKind::OwnerChanged, state),
            None => return,
        };
        if kind == EventKind::Released {
            self.shared.end_ownership();
        }
        self.shared.set_state(state.clone());
        let mutex = &self.runner.contender().mutex;
        self.delivery.deliver(Event::new(kind, mutex, state));
    }

    fn report(&mut self) {
        if let Some(error) = self.runner.take_trouble() {
            let mutex = &self.runner.contender().mutex;
            let mut event = Event::new(EventKind::Failed, mutex, self.shared.state());
            event.error = Some(error);
            self.delivery.deliver(event);
        }
    }
}
