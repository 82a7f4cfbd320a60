//! `MutexContendService`: contends for a mutex on a thread of its own for as long as it runs.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use parking_lot::Mutex;

use super::callbacks::MutexContender;
use super::delivery::{
    CATCH_UP, Delivery, DeliverySettings, Recipient, abandoned, delivery_setters,
};
use super::lifecycle::{Lifecycle, service_getters};
use super::settings::{Settings, Validated, contender_setters};
use crate::backend::{Contender, Purpose};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::event::{Event, EventKind, Events};
use crate::factory;
use crate::health::Monitored;
use crate::id::LiveId;
use crate::machine::contention::Change;
use crate::machine::period::ContendPeriod;
use crate::parker::{Parker, Unparked};
use crate::runner::{Left, Runner, Visit};
use crate::snapshot::{Snapshot, Stats};
use crate::thread::Local;
use crate::virtual_time::{lock, recv_timeout};

/// How long an executor may leave the last callbacks unstarted.
const EXECUTOR_PATIENCE: Duration = Duration::from_secs(1);

/// The longest delay before a first attempt.
const MAX_INITIAL_DELAY: Duration = Duration::from_secs(366 * 24 * 3600);

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
    factory: Arc<factory::Inner>,
    contender: Contender,
    period: ContendPeriod,
    initial_delay: Duration,
    lead_without_listener: bool,
    recipient: Recipient,
    snapshot: Arc<Snapshot>,
    lifecycle: Lifecycle,
    inbox: Arc<Inbox>,
    /// Counts the runs; see [`Left`].
    runs: Arc<Mutex<u64>>,
    /// Keeps the id from being used twice for as long as the service lives.
    live: Arc<LiveId>,
    _monitored: Arc<Monitored>,
}

/// What others ask of the worker: only it may call the backend. `None` while there is no worker to answer.
type Inbox = Mutex<Option<VecDeque<Message>>>;

enum Message {
    Resign {
        rest: Duration,
        done: Sender<Result<()>>,
    },
    /// A call to the backend beside those of the machine.
    Call(Box<dyn FnOnce(&mut Worker) + Send>),
}

impl MutexContendService {
    service_getters!();

    /// Starts contending. Returns at once: if the backend cannot be reached, the service keeps trying;
    /// see [`last_error`](MutexContendService::last_error).
    ///
    /// # Errors
    /// `InvalidState` unless the status is `Initial`, or if the receiver of its events was dropped;
    /// `Unavailable` if the system cannot start another thread; `Forked` in a child process.
    pub fn start(&self) -> Result<()> {
        let inner = self.inner.get()?;
        let name = format!("contend {}", inner.contender.mutex);
        inner.lifecycle.start(name, || {
            if !inner.lead_without_listener && inner.recipient.is_abandoned() {
                let so = "it would lead for nobody. Keep the receiver, or build with lead_without_listener(true)";
                return Err(abandoned(&inner.contender.mutex, so));
            }
            inner.snapshot.clear();
            *inner.inbox.lock() = Some(VecDeque::new());
            let delivery = inner.recipient.open(&inner.contender.mutex)?;
            let carrier = delivery.number();
            let worker = Worker {
                runner: Runner::new(
                    &inner.factory.backend,
                    &inner.contender,
                    inner.period,
                    Moment::now() + inner.initial_delay,
                    &inner.snapshot,
                    &inner.factory.probe(),
                )?,
                snapshot: Arc::clone(&inner.snapshot),
                delivery,
                inbox: Arc::clone(&inner.inbox),
                lead_without_listener: inner.lead_without_listener,
                leaving: Leaving::No,
                runs: Arc::clone(&inner.runs),
                run: 0,
                factory: Arc::clone(&inner.factory),
                live: Arc::clone(&inner.live),
            };
            Ok((move |parker: Parker| worker.run(&parker), carrier))
        })
    }

    /// Gives up the mutex, leaves the queue and ends the thread. If the service owns the mutex, Released
    /// is delivered and its callback has run before the release is sent; nothing is delivered after this
    /// returns.
    ///
    /// If the backend does not answer, this waits for at most a second and still returns `Ok`: this service
    /// no longer owns the mutex. The release is then left to a background thread, which is logged as a
    /// warning, and the next owner may have to wait for the lease to end.
    ///
    /// With a channel, Released is only queued by then, and perhaps not read yet: end your work before you
    /// stop, because the next owner may lead as soon as this returns.
    ///
    /// If called from one of the service's own callbacks, it returns at once, and the service stops after
    /// the callback has returned. Stopping a service that is not started does nothing.
    ///
    /// # Errors
    /// `Timeout` if a callback hangs beyond the end of the lease: the thread then ends when the callback
    /// does.
    pub fn stop(&self) -> Result<()> {
        let inner = self.inner.get()?;
        inner.stop_by(Moment::now() + inner.stop_bound())
    }

    /// Gives up the mutex as [`stop`](MutexContendService::stop) does, but stays started and rejoins the
    /// end of the queue at once.
    ///
    /// ```
    /// let factory = contend::connect("memory://resign-doc")?;
    /// let (a, events) = factory.contend("demo").id("a").channel()?;
    /// a.start()?;
    /// let first = events.recv().unwrap().fence();
    /// a.resign()?; // nobody else waits, so it leads again, with a higher fence
    /// events.recv().unwrap();
    /// assert!(events.recv().unwrap().fence() > first);
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// Called from one of the service's own callbacks, it returns at once, as `stop` does.
    ///
    /// # Errors
    /// `InvalidState` unless it is started; `Timeout` if a callback hangs. An error of the backend if the release
    /// was not answered: the service no longer owns the mutex, but perhaps nobody else can own it before the lease
    /// ends.
    pub fn resign(&self) -> Result<()> {
        self.resign_for(Duration::ZERO)
    }

    /// Gives up the mutex as [`resign`](MutexContendService::resign) does, and rejoins the queue after
    /// `rest`.
    ///
    /// # Errors
    /// As [`resign`](MutexContendService::resign).
    pub fn resign_for(&self, rest: Duration) -> Result<()> {
        let inner = self.inner.get()?;
        let (done, over) = bounded(1);
        inner.send(Message::Resign { rest, done })?;
        if inner.lifecycle.is_inside() {
            return Ok(());
        }
        let late = "still resigning; a callback or the backend hangs";
        inner.wait_for(&over, inner.stop_bound(), late)?
    }

    /// Reads how long ago the last recorded run of this mutex's schedule was. Done by the worker.
    pub(crate) fn last_run(&self, by: Moment) -> Result<Option<Duration>> {
        let inner = self.inner.get()?;
        inner.ask(by, |runner, by| runner.last_run(by))
    }

    /// Records a run, if the owner still has this fence. Done by the worker.
    pub(crate) fn record_run(&self, fence: u64, keep: Duration, by: Moment) -> Result<bool> {
        let inner = self.inner.get()?;
        inner.ask(by, move |runner, by| runner.record_run(fence, keep, by))
    }

    /// Records a run that ended when its leadership was over already. The worker does it before it sends
    /// the release, which waits for the callback for Released: whoever leads next keeps its distance.
    /// Nobody waits for that here, because the worker may wait for the caller.
    pub(crate) fn record_last_run(&self, fence: u64, keep: Duration) {
        let Some(inner) = self.inner.here() else {
            return;
        };
        if let Some(inbox) = inner.inbox.lock().as_mut() {
            let call = move |worker: &mut Worker| worker.record_last_run(fence, keep);
            inbox.push_back(Message::Call(Box::new(call)));
        }
        if let Some(unparker) = inner.lifecycle.unparker() {
            unparker.message();
        }
    }

    /// How long stopping takes at most.
    pub(crate) fn stop_bound(&self) -> Duration {
        self.inner
            .here()
            .map_or(Duration::ZERO, |inner| inner.stop_bound())
    }

    /// As [`stop`](MutexContendService::stop), but waits no longer than this. What is left to do then is
    /// done without the caller.
    pub(crate) fn stop_by(&self, deadline: Moment) -> Result<()> {
        self.inner.get()?.stop_by(deadline)
    }

    /// What other threads may read, for one that must not keep the service alive by reading it.
    pub(crate) fn snapshot(&self) -> Arc<Snapshot> {
        self.inner
            .here()
            .map_or_else(Arc::default, |inner| Arc::clone(&inner.snapshot))
    }

    /// Returns the mutex that this service contends for.
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
    #[must_use]
    pub fn fence(&self) -> Option<u64> {
        self.inner.here()?.snapshot.fence()
    }

    /// Returns how long this contender certainly owns the mutex without another renewal; zero if it does
    /// not own it.
    #[must_use]
    pub fn valid_for(&self) -> Duration {
        self.inner
            .here()
            .map_or(Duration::ZERO, |inner| inner.snapshot.remaining())
    }

    /// Returns what the service has done since it was built.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.inner
            .here()
            .map_or_else(Stats::default, |inner| inner.snapshot.stats())
    }
}

impl Inner {
    fn stop_by(&self, deadline: Moment) -> Result<()> {
        self.lifecycle.stop(&self.contender.mutex, deadline)
    }

    /// The running call, the callback up to the end of the lease, and the way out.
    fn stop_bound(&self) -> Duration {
        let lease = self.contender.lease;
        lease.total() + lease.drift_allowance() + lease.ttl() + Duration::from_secs(1)
    }

    fn send(&self, message: Message) -> Result<()> {
        let unparker = self.lifecycle.unparker();
        let unparker = unparker.ok_or_else(|| self.not_started())?;
        let mut inbox = self.inbox.lock();
        inbox
            .as_mut()
            .ok_or_else(|| self.not_started())?
            .push_back(message);
        unparker.message();
        Ok(())
    }

    fn not_started(&self) -> Error {
        Error::new(
            ErrorKind::InvalidState,
            format!("{}: the service is not started", self.contender.mutex),
        )
    }

    /// Has the worker make a call, and waits for its outcome.
    fn ask<T: Send + 'static>(
        &self,
        by: Moment,
        call: impl FnOnce(&mut Runner, Moment) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (answer, answered) = bounded(1);
        self.send(Message::Call(Box::new(move |worker| {
            let by = worker.within_belief(by);
            let _ = answer.send(call(&mut worker.runner, by));
        })))?;
        self.wait_for(&answered, by.remaining(), "no answer in time")?
    }

    fn wait_for<T>(&self, answered: &Receiver<T>, within: Duration, late: &str) -> Result<T> {
        recv_timeout(answered, within).map_err(|failed| match failed {
            RecvTimeoutError::Disconnected => self.not_started(),
            RecvTimeoutError::Timeout => Error::new(
                ErrorKind::Timeout,
                format!("{}: {late}", self.contender.mutex),
            ),
        })
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Err(error) = self.stop_by(Moment::now() + self.stop_bound()) {
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
#[derive(Debug)]
#[must_use]
pub struct ContendBuilder {
    pub(crate) settings: Settings,
    initial_delay: Option<Duration>,
    lead_without_listener: bool,
    delivery: DeliverySettings,
}

impl ContendBuilder {
    contender_setters!();
    delivery_setters!();

    pub(crate) fn new(factory: Result<Arc<factory::Inner>>, mutex: Arc<str>) -> ContendBuilder {
        ContendBuilder {
            settings: Settings::new(factory, mutex),
            initial_delay: None,
            lead_without_listener: false,
            delivery: DeliverySettings::default(),
        }
    }

    pub(crate) fn contender(
        factory: Result<Arc<factory::Inner>>,
        contender: impl MutexContender + 'static,
    ) -> ContendBuilder {
        let mut builder =
            ContendBuilder::new(factory, contender.mutex().into()).id(contender.contender_id());
        builder.delivery.own = Some(Arc::new(move |event: &Event| contender.notify_owner(event)));
        builder
    }

    /// Sets the delay before the first attempt after `start`. Defaults to that of the factory, which
    /// defaults to zero.
    pub fn initial_delay(mut self, initial_delay: Duration) -> ContendBuilder {
        self.initial_delay = Some(initial_delay);
        self
    }

    /// Sets whether the service keeps leading after the receiver of its events was dropped. Defaults to
    /// `false`: the service then steps down for good, because nobody acts on its events.
    pub fn lead_without_listener(mut self, lead: bool) -> ContendBuilder {
        self.lead_without_listener = lead;
        self
    }

    /// Calls `callback` when this contender becomes the owner.
    pub fn on_acquired(mut self, callback: impl FnMut(&Event) + Send + 'static) -> ContendBuilder {
        self.delivery.on(EventKind::Acquired, callback);
        self
    }

    /// Calls `callback` when this contender stops being the owner. Nobody else becomes the owner before
    /// it returns, as long as the lease lasts.
    pub fn on_released(mut self, callback: impl FnMut(&Event) + Send + 'static) -> ContendBuilder {
        self.delivery.on(EventKind::Released, callback);
        self
    }

    /// Builds the service with the callbacks that were set, if any.
    ///
    /// # Errors
    /// `InvalidInput` for a name, id or duration that is not allowed, `DuplicateContender` for an id that
    /// this process already contends under, `Forked` in a child process.
    pub fn build(mut self) -> Result<MutexContendService> {
        let executor = self.settings.factory.as_ref().ok();
        let executor = executor.and_then(|factory| factory.executor());
        let recipient = std::mem::take(&mut self.delivery).callbacks(executor)?;
        self.finish(recipient)
    }

    /// As [`build`](ContendBuilder::build), with callbacks that may block: on a thread of their own,
    /// whatever executor the factory has.
    pub(crate) fn build_blocking(mut self) -> Result<MutexContendService> {
        let recipient = std::mem::take(&mut self.delivery).callbacks(None)?;
        self.finish(recipient)
    }

    /// Builds the service and returns it with the receiver of its events, which can be used in
    /// crossbeam's `select!`. The receiver survives restarts and is disconnected when the service is
    /// dropped.
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
        let initial_delay = self
            .initial_delay
            .unwrap_or_else(|| factory.initial_delay());
        if initial_delay > MAX_INITIAL_DELAY {
            return Err(Error::invalid(format!(
                "initial_delay {initial_delay:?} is too long; use at most 366 days"
            )));
        }
        let (snapshot, lifecycle) = (Arc::<Snapshot>::default(), Lifecycle::new());
        let monitored = Arc::new(Monitored {
            mutex: Arc::clone(&contender.mutex),
            id: Some(Arc::clone(&contender.id)),
            stage: Arc::clone(lifecycle.stage()),
            snapshot: Arc::clone(&snapshot),
        });
        factory.registry.add(&monitored);
        let inner = Inner {
            contender,
            period,
            initial_delay,
            lead_without_listener: self.lead_without_listener,
            recipient,
            snapshot,
            lifecycle,
            inbox: Arc::default(),
            runs: Arc::default(),
            live: Arc::new(live),
            factory,
            _monitored: monitored,
        };
        Ok(MutexContendService {
            inner: Local::new(Arc::new(inner)),
        })
    }
}

/// The state of one run. It belongs to the worker thread alone.
struct Worker {
    runner: Runner,
    snapshot: Arc<Snapshot>,
    delivery: Delivery,
    inbox: Arc<Inbox>,
    lead_without_listener: bool,
    leaving: Leaving,
    runs: Arc<Mutex<u64>>,
    run: u64,
    factory: Arc<factory::Inner>,
    /// The id is taken for as long as somebody contends under it, even if the service was dropped.
    live: Arc<LiveId>,
}

enum Leaving {
    No,
    /// Until the machine contends again; who waits for that.
    ToRejoin(Vec<Sender<Result<()>>>),
    ForGood,
}

impl Worker {
    fn run(mut self, parker: &Parker) {
        let unparker = parker.unparker();
        self.delivery.tell_when_abandoned(unparker.clone());
        {
            // What the last run left is this one's from here on: its acquisition adopts it.
            let mut runs = lock(&self.runs);
            *runs += 1;
            self.run = *runs;
        }
        loop {
            self.read_messages();
            self.look_whether_to_leave(parker);
            match self.runner.visit(&unparker, Moment::FAR) {
                Visit::Announce(change) => self.announce(change),
                Visit::Called(_) => {}
                Visit::Wait { until } => self.wait(parker, until),
                Visit::Over => break,
            }
            self.report_error();
        }
        // Whoever waits for an answer is told at once that there will be none.
        self.inbox.lock().take();
        self.leaving = Leaving::ForGood;
        if let Some(error) = self.unreleased("yet, which is left to the background") {
            log::warn!("{error}");
        }
        if self.runner.machine().has_traces() {
            // The backend hangs: whoever stops does not wait for it.
            let lease = self.runner.contender().lease;
            let until = Moment::now() + lease.total() + lease.drift_allowance();
            let left = Left {
                runner: self.runner,
                run: self.run,
                present: self.runs,
                _live: self.live,
            };
            let background = &self.factory.background;
            background.clean_up(Box::new(left), lease.call_budget(), until);
        }
        // While a callback runs on, the service is still stopping: `stop` says so in time, and no second
        // run begins beside it.
        self.delivery.close(Moment::now() + EXECUTOR_PATIENCE);
    }

    fn read_messages(&mut self) {
        while let Some(message) = self.next_message() {
            match message {
                Message::Resign { rest, done } => match &mut self.leaving {
                    Leaving::No => {
                        self.wind_down();
                        self.runner.resign(rest);
                        self.leaving = Leaving::ToRejoin(vec![done]);
                    }
                    Leaving::ToRejoin(waiting) => waiting.push(done),
                    Leaving::ForGood => {}
                },
                Message::Call(call) => call(self),
            }
        }
    }

    fn record_last_run(&mut self, fence: u64, keep: Duration) {
        let by = self.within_belief(Moment::FAR);
        let why = match self.runner.record_run(fence, keep, by) {
            Ok(true) => return,
            Ok(false) => "its lease is over".to_owned(),
            Err(error) => error.to_string(),
        };
        log::warn!(
            "{}: the last run of fence {fence} is not recorded, so the next leader may run too early: {why}",
            self.runner.contender().mutex
        );
    }

    fn next_message(&self) -> Option<Message> {
        self.inbox.lock().as_mut()?.pop_front()
    }

    /// No call may outlast belief, nor a single call's budget.
    fn within_belief(&self, by: Moment) -> Moment {
        let until = self.runner.belief().map_or(by, |(until, _)| until.min(by));
        until.min(Moment::now() + self.runner.contender().lease.call_budget())
    }

    fn look_whether_to_leave(&mut self, parker: &Parker) {
        if let Leaving::ForGood = self.leaving {
            return;
        }
        let is_abandoned = !self.lead_without_listener && self.delivery.is_abandoned();
        if is_abandoned && !parker.is_stopped() {
            let Contender { mutex, id, .. } = self.runner.contender();
            let so = "nobody works: it steps down for good. Keep the receiver, or build with \
                      lead_without_listener(true)";
            let error = abandoned(format_args!("{mutex}: {id}"), so);
            log::error!("{error}");
            self.snapshot.end(error);
        }
        if is_abandoned || parker.is_stopped() {
            self.wind_down();
            self.runner.stop();
            self.leaving = Leaving::ForGood;
        }
    }

    /// Whoever lost the mutex just now still winds down in the transition, and leaving releases what is
    /// left of the lease, or what was granted anew but not announced yet.
    fn wind_down(&mut self) {
        if !self.runner.machine().is_announced() {
            self.settle();
        }
    }

    fn wait(&mut self, parker: &Parker, mut until: Moment) {
        if let Leaving::ToRejoin(waiting) = &self.leaving
            && !self.runner.machine().is_leaving()
        {
            let unreleased = self.unreleased("now, and its lease ends by itself");
            if let Some(error) = &unreleased {
                log::warn!("{error}");
            }
            for done in waiting {
                let _ = done.send(unreleased.clone().map_or(Ok(()), Err));
            }
            self.leaving = Leaving::No;
        }
        if self.delivery.is_behind() {
            until = until.min(Moment::now() + CATCH_UP);
        }
        let unparked = match self.leaving {
            Leaving::ForGood => parker.park_stopping(until),
            _ => parker.park(until),
        };
        if unparked == Unparked::Wake {
            self.runner.woken();
        }
    }

    /// The error of a lease that was given up and that the backend may still keep.
    fn unreleased(&self, so: &str) -> Option<Error> {
        let fence = self.runner.machine().leftover()?;
        let failed = self.snapshot.failed_call().map(|failed| failed.error);
        let cause = failed.unwrap_or_else(|| Error::new(ErrorKind::Timeout, "no answer in time"));
        let Contender { mutex, id, .. } = self.runner.contender();
        let what = format_args!("{mutex}: {id}: fence {fence} is not released {so}");
        Some(cause.context(what))
    }

    fn announce(&mut self, change: Change) {
        let (kind, state) = match change {
            Change::Acquired(state) => (EventKind::Acquired, state),
            Change::OwnerChanged(state) => (EventKind::OwnerChanged, state),
            Change::Released(state, _) => (EventKind::Released, state),
            // Told as a failure.
            Change::Double(_) => return,
        };
        self.snapshot.set_state(state.clone());
        let mutex = Arc::clone(&self.runner.contender().mutex);
        self.delivery.deliver(Event::new(kind, &mutex, state));
        // On giving up on purpose the release waits for the callback, so that the next owner does not
        // begin while the last one winds down.
        if kind == EventKind::Released && self.runner.machine().is_leaving() {
            self.settle();
        }
    }

    fn report_error(&mut self) {
        if let Some(error) = self.runner.take_error() {
            let mutex = Arc::clone(&self.runner.contender().mutex);
            let mut event = Event::new(EventKind::Failed, &mutex, self.snapshot.state());
            event.error = Some(error);
            self.delivery.deliver(event);
        }
    }

    /// Waits until callbacks have run for all that was delivered, up to the end of the lease. One that
    /// runs on keeps the lease from being released: what is left of it is its time to stop in.
    fn settle(&mut self) {
        if let Some(gone_at) = self.runner.machine().gone_at(Moment::now())
            && !self.delivery.settle(gone_at)
        {
            log::warn!(
                "{}: the callback for Released outlasted the lease; somebody else may own by now",
                self.runner.contender().mutex
            );
            self.runner.abandon();
        }
    }
}
