//! `Locker`: reads like `std::sync::Mutex`, and excludes every other process too.
//!
//! A locker owns a runner. The thread that locks drives it until it owns, the timer while the guard lives, and the
//! thread that unlocks until it is released.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::guard::{Guard, GuardAll, Locked};
use super::tenure::Tenure;
use super::thread_queue::ThreadQueue;
use crate::backend::{Contender, OnRefusal, Purpose};
use crate::cancel::{Cancel, cancelled};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::factory;
use crate::id::{Hold, LiveId};
use crate::lease::Lease;
use crate::machine::contention::{Change, Step};
use crate::ownership::{Loss, Ownership};
use crate::parker::{Parker, Unparked};
use crate::probe::LossReason;
use crate::runner::{Done, Runner};
use crate::service::settings::{Settings, Validated, contender_setters};
use crate::shared::Shared;
use crate::thread::Local;
use crate::timer::Next;
use crate::virtual_time::try_lock_for;

/// A lock that one contender at a time can hold, across processes and machines.
///
/// Cheap to clone. Threads that share a locker (or clones of it) queue up in the process, in the order in
/// which they came, and only the first contends on the backend. Without contention, locking costs one
/// acquire on the backend and unlocking one release, and nothing else.
///
/// Locking twice from one thread returns [`ErrorKind::Reentrant`], whatever lockers of the mutex are
/// used: an error, not a deadlock.
///
/// A guard is renewed in the background for as long as it lives. Its lease may still end (the server was
/// unreachable, the process was paused), and nothing can then stop the holder. So check
/// [`Guard::is_valid`] or [`Guard::lost`] if you hold a lock for long, and check the
/// [fence](Guard::fence) in the resource that you protect.
///
/// ```
/// let factory = contend::connect("memory://locker-doc")?;
/// let locker = factory.locker("reports").build()?;
///
/// let guard = locker.lock()?;
/// assert!(guard.is_valid());
/// assert!(locker.try_lock().is_err()); // already ours: an error, not a deadlock
/// drop(guard);
///
/// let fence = locker.with_lock(|guard| guard.fence())?; // locks and unlocks
/// println!("done, fence {fence}");
/// # Ok::<(), contend::Error>(())
/// ```
#[derive(Clone)]
pub struct Locker {
    inner: Local<Arc<Inner>>,
}

/// What a locker, its clones and its guard share.
pub(super) struct Inner {
    pub(super) contender: Contender,
    /// What the guard reads: never locked across a call.
    pub(super) shared: Arc<Shared>,
    /// Locked across calls: by the thread that locks, by the timer's that renews, by the one that unlocks.
    pub(super) runner: Mutex<Runner>,
    parker: Parker,
    pub(super) queue: Arc<ThreadQueue>,
    /// For how long a lease is passed from thread to thread before it is released.
    local_handoff: Option<Duration>,
    max_hold: Option<Duration>,
    cancel: Option<Cancel>,
    factory: Arc<factory::Core>,
    _live: LiveId,
}

/// How long a call waits for the lock.
#[derive(Clone, Copy)]
enum Wait {
    /// One try.
    No,
    Until(Moment, Duration),
    Forever,
}

impl Locker {
    /// Waits for the lock, for as long as it takes.
    ///
    /// If the backend cannot be reached, the call keeps trying, which is logged. To bound the wait, use
    /// [`try_lock_for`](Locker::try_lock_for) or a [`Cancel`].
    ///
    /// ```
    /// let factory = contend::connect("memory://lock-doc")?;
    /// let guard = factory.locker("reports").build()?.lock()?;
    /// println!("alone, with fence {}", guard.fence());
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Reentrant` if this thread already holds it; `Cancelled`; errors that a retry cannot fix, such as
    /// `Denied` or `Misconfigured`; `Forked` in a child process.
    pub fn lock(&self) -> Result<Guard> {
        self.lock_by(Wait::Forever, None)
    }

    /// Waits for the lock until `cancel` is cancelled, or [the locker's own](LockerBuilder::cancel).
    ///
    /// ```
    /// use contend::{Cancel, ErrorKind};
    /// use std::thread;
    ///
    /// let factory = contend::connect("memory://lock-until-cancelled-doc")?;
    /// let held = factory.locker("reports").build()?.lock()?;
    /// let (waiting, cancel) = (factory.locker("reports").build()?, Cancel::new());
    /// let waits = thread::spawn({
    ///     let cancel = cancel.clone();
    ///     move || waiting.lock_until_cancelled(&cancel).map(drop)
    /// });
    /// cancel.cancel();
    /// assert_eq!(waits.join().unwrap().unwrap_err().kind(), ErrorKind::Cancelled);
    /// # drop(held);
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`lock`](Locker::lock).
    pub fn lock_until_cancelled(&self, cancel: &Cancel) -> Result<Guard> {
        self.lock_by(Wait::Forever, Some(cancel))
    }

    /// Takes the lock if it is free. Makes a single attempt, which neither enters the queue nor
    /// subscribes to anything. Returns within a quarter of the ttl, at most 2 s, even if the backend hangs.
    ///
    /// ```
    /// use contend::ErrorKind;
    /// use std::thread;
    ///
    /// let factory = contend::connect("memory://try-lock-doc")?;
    /// let ours = factory.locker("reports").id("a").build()?;
    /// let theirs = factory.locker("reports").id("b").build()?;
    ///
    /// let guard = ours.try_lock()?;
    /// let refused = thread::spawn(move || theirs.try_lock().map(drop).unwrap_err());
    /// let error = refused.join().unwrap();
    /// assert_eq!(error.kind(), ErrorKind::Held);
    /// assert_eq!(error.to_string(), r#"reports: held by "a""#);
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Held`, with a message that names the holder; `Reentrant` if the holder is this thread; any error
    /// of the backend.
    pub fn try_lock(&self) -> Result<Guard> {
        self.lock_by(Wait::No, None)
    }

    /// Waits for the lock for at most `timeout`. A request that was sent is waited for: the call returns within
    /// `timeout` and a quarter of the ttl, at most 2 s more, even if the backend hangs.
    ///
    /// ```
    /// use std::thread;
    /// use std::time::Duration;
    ///
    /// let factory = contend::connect("memory://try-lock-for-doc")?;
    /// let ours = factory.locker("reports").id("a").build()?;
    /// let theirs = factory.locker("reports").id("b").build()?;
    ///
    /// let guard = ours.lock()?;
    /// let timeout = Duration::from_millis(20);
    /// let waits = thread::spawn(move || theirs.try_lock_for(timeout).map(drop));
    /// let error = waits.join().unwrap().unwrap_err();
    /// let message = r#"reports: held by "a", and was not free within 20ms"#;
    /// assert_eq!(error.to_string(), message);
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Held`, with a message that names the holder; `Reentrant` if the holder is this thread;
    /// `Cancelled`; the error of the backend if it lasted until the timeout, or if a retry cannot fix it.
    pub fn try_lock_for(&self, timeout: Duration) -> Result<Guard> {
        self.lock_by(Wait::Until(Moment::now() + timeout, timeout), None)
    }

    /// Runs `work` under the lock and passes it the guard. A panic in `work` releases the lock.
    ///
    /// ```
    /// let factory = contend::connect("memory://with-lock-doc")?;
    /// let locker = factory.locker("reports").build()?;
    /// let fence = locker.with_lock(|guard| guard.fence())?;
    /// assert!(fence < locker.with_lock(|guard| guard.fence())?);
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`lock`](Locker::lock), without having run `work`; and `Lost` if the lock was no longer
    /// certainly held when `work` had ended: it ran, but perhaps not exclusively. Its result is then
    /// dropped.
    pub fn with_lock<T>(&self, work: impl FnOnce(&Guard) -> T) -> Result<T> {
        let guard = self.lock()?;
        let value = work(&guard);
        let is_held = guard.is_valid();
        is_held.then_some(value).ok_or_else(|| lost(self.mutex()))
    }

    /// Returns the mutex that this locker locks.
    ///
    /// ```
    /// let factory = contend::connect("memory://locker-mutex-doc")?;
    /// let locker = factory.locker("reports").id("host-7").build()?;
    /// assert_eq!((locker.mutex(), locker.id()), ("reports", "host-7"));
    /// # Ok::<(), contend::Error>(())
    /// ```
    #[must_use]
    pub fn mutex(&self) -> &str {
        self.inner.here().map_or("", |inner| &inner.contender.mutex)
    }

    /// Returns the id that this locker contends under.
    #[must_use]
    pub fn id(&self) -> &str {
        self.inner.here().map_or("", |inner| &inner.contender.id)
    }

    fn lock_by(&self, wait: Wait, cancel: Option<&Cancel>) -> Result<Guard> {
        self.lock_as_one_of(wait, cancel, Arc::default())
    }

    /// Locks, as one of several whose first loss is that of all.
    fn lock_as_one_of(
        &self,
        wait: Wait,
        cancel: Option<&Cancel>,
        loss: Arc<Loss>,
    ) -> Result<Guard> {
        let locked = self.inner.get()?.lock(wait, cancel, loss)?;
        Ok(Guard::new(&self.inner, locked))
    }
}

fn lost(mutex: &str) -> Error {
    Error::new(
        ErrorKind::Lost,
        format!(
            "{mutex}: the lock was lost before it was given up; another contender may have had it"
        ),
    )
}

impl Inner {
    pub(super) fn request_limit(&self) -> Duration {
        self.contender.lease.request_limit()
    }

    /// Tells this locker from others in a queue that they share.
    fn number(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    fn lock(
        self: &Arc<Inner>,
        wait: Wait,
        cancel: Option<&Cancel>,
        loss: Arc<Loss>,
    ) -> Result<Locked> {
        let start = Moment::now();
        let hold = Hold::new(&self.factory.registry, &self.contender.mutex)?;
        let cancels: Vec<&Cancel> = cancel.into_iter().chain(&self.cancel).collect();
        let tenure = self.lock_in_turn(start, wait, &cancels, &loss);
        self.factory.probe.tell(|probe| {
            let waited = Moment::now() - start;
            probe.waited(&self.contender.mutex, waited, tenure.is_ok());
        });
        let tenure = tenure?;
        Ok(Locked {
            inner: Arc::clone(self),
            ownership: Ownership::new(&self.shared, tenure.fence, loss),
            tenure,
            hold: Some(hold),
        })
    }

    fn lock_in_turn(
        self: &Arc<Inner>,
        start: Moment,
        wait: Wait,
        cancels: &[&Cancel],
        loss: &Arc<Loss>,
    ) -> Result<Arc<Tenure>> {
        let mutex = &self.contender.mutex;
        let deadline = match wait {
            Wait::No => start,
            Wait::Until(deadline, _) => deadline,
            Wait::Forever => Moment::FAR,
        };
        let turn = self.queue.enter(self.number(), deadline, cancels);
        let (turn, handed) = turn.ok_or_else(|| self.not_in_turn(wait, cancels))?;
        let renew_until = || self.max_hold.map_or(Moment::FAR, |it| Moment::now() + it);
        if let Some(tenure) = handed {
            if tenure.pass_to(self, Arc::clone(loss), renew_until()) {
                turn.keep();
                if is_cancelled(cancels) {
                    let _ = self.unlock(&tenure, Moment::FAR);
                    return Err(cancelled(mutex));
                }
                return Ok(tenure);
            }
            // Lost on the way.
            if let Some(task) = tenure.task() {
                self.factory.timer.remove(task);
            }
        }
        // A renewal of the last guard may hang.
        let runner = self.runner.try_lock();
        let runner = runner.or_else(|| try_lock_for(&self.runner, deadline.remaining()));
        let mut runner = runner.ok_or_else(|| {
            let message = "not locked: an earlier call to the backend has not ended yet";
            Error::new(ErrorKind::Timeout, message).context(mutex)
        })?;
        let tenure = match self.acquire(&mut runner, wait, deadline, cancels) {
            Ok(fence) => {
                let tenure = Tenure::new(self, fence, Arc::clone(loss), renew_until());
                self.keep(&mut runner, &tenure).map(|()| tenure)
            }
            Err(error) => Err(error),
        };
        match &tenure {
            Ok(_) => turn.keep(),
            Err(_) => {
                let cancelled_at = cancels.iter().filter_map(|it| it.cancelled_at()).min();
                let end = deadline.min(cancelled_at.unwrap_or(Moment::FAR));
                let by = end.min(Moment::now()) + self.request_limit();
                runner.step_down(LossReason::Released);
                if Moment::now() < by
                    && let Err(error) = runner.leave(by)
                {
                    log::debug!("{mutex}: what is left runs out: {error}");
                }
            }
        }
        tenure
    }

    /// Drives the runner until this contender owns, and returns the fence.
    fn acquire(
        &self,
        runner: &mut Runner,
        wait: Wait,
        deadline: Moment,
        cancels: &[&Cancel],
    ) -> Result<u64> {
        let mutex = &self.contender.mutex;
        let mut watched = Vec::new();
        let mut failed = None;
        // An unlock that gave up may have left a belief.
        runner.step_down(LossReason::Released);
        let first = match wait {
            Wait::Until(..) | Wait::Forever if runner.met_others() => OnRefusal::Enqueue,
            _ => OnRefusal::Leave,
        };
        runner.contend_at(Moment::now(), first);
        loop {
            if is_cancelled(cancels) {
                return Err(cancelled(mutex));
            }
            match runner.step() {
                Done::Called {
                    change: Some(Change::Acquired(state)),
                    ..
                } => return Ok(state.after().fence()),
                Done::Called {
                    error: Some(error), ..
                } if !error.is_transient() => return Err(not_locked(mutex, error)),
                Done::Called { error, .. } => failed = error,
                Done::Wait(until) => {
                    if watched.is_empty() {
                        let unparker = self.parker.unparker();
                        watched.extend(cancels.iter().map(|it| it.watch(&unparker)));
                    }
                    if self.parker.park(until.min(deadline)) == Unparked::Wake {
                        runner.woken();
                    }
                }
            }
            if deadline <= Moment::now() {
                return Err(match failed {
                    Some(error) => not_locked(mutex, error),
                    None => self.refused(runner, wait),
                });
            }
        }
    }

    /// Has the timer renew what was acquired.
    fn keep(&self, runner: &mut Runner, tenure: &Arc<Tenure>) -> Result<()> {
        let now = Moment::now();
        let at = match runner.machine().step(now) {
            Step::Wait { until } => until,
            _ => now,
        };
        let ends = runner.machine().belief().map_or(now, |(until, _)| until);
        let timer = &self.factory.timer;
        let task = timer.add(Arc::clone(tenure) as _, Next { at, ends });
        let task = task.map_err(|error| error.context(&self.contender.mutex))?;
        tenure.set_task(task);
        Ok(())
    }

    /// Releases the lock, or passes it on, until `by` and within the request limit.
    pub(super) fn unlock(&self, tenure: &Arc<Tenure>, by: Moment) -> Result<()> {
        let Contender { mutex, .. } = &self.contender;
        if !tenure.take_turn() {
            // Its lease ended long ago, and the runner may be another thread's by now.
            return Err(lost(mutex));
        }
        let is_valid = || !self.shared.valid_for(tenure.fence).is_zero();
        let mut turn = self.queue.resume();
        if let Some(limit) = self.local_handoff
            && Moment::now() < tenure.granted_at + limit
            && is_valid()
        {
            match turn.hand_on(self.number(), tenure) {
                Ok(()) => return Ok(()),
                Err(kept) => turn = kept,
            }
        }
        if let Some(task) = tenure.task() {
            self.factory.timer.remove(task);
        }
        if self.shared.last_error().is_some() && !is_valid() {
            // The backend does not answer, and its holder has nothing to gain from waiting for it.
            return Err(lost(mutex));
        }
        let by = by.min(Moment::now() + self.request_limit());
        let runner = self.runner.try_lock();
        let runner = runner.or_else(|| try_lock_for(&self.runner, by.remaining()));
        let Some(mut runner) = runner else {
            tenure.release_later();
            let message =
                format!("{mutex}: a renewal hangs; the lock is released after it, or runs out");
            return Err(Error::new(ErrorKind::Timeout, message));
        };
        let was_valid = is_valid();
        runner.step_down(LossReason::Released);
        let released = runner.leave(by);
        drop((runner, turn));
        match released {
            Ok(true) if was_valid => Ok(()),
            Err(error) if was_valid => Err(error.context(format!("{mutex}: perhaps not released"))),
            _ => Err(lost(mutex)),
        }
    }

    /// Why a thread did not have its turn.
    fn not_in_turn(&self, wait: Wait, cancels: &[&Cancel]) -> Error {
        let Contender { mutex, id, .. } = &self.contender;
        if is_cancelled(cancels) {
            return cancelled(mutex);
        }
        if self.shared.fence().is_some() {
            return held(mutex, &format!("held by {id:?}, by another thread"), wait);
        }
        match self.shared.last_error() {
            Some(error) => not_locked(mutex, error),
            None => held(mutex, "another thread waits for it too", wait),
        }
    }

    fn refused(&self, runner: &mut Runner, wait: Wait) -> Error {
        let holder = match runner.machine().seen().owner_id() {
            "" => "kept for another contender, or granted too late".to_owned(),
            holder => format!("held by {holder:?}"),
        };
        held(&self.contender.mutex, &holder, wait)
    }
}

fn is_cancelled(cancels: &[&Cancel]) -> bool {
    cancels.iter().any(|it| it.is_cancelled())
}

/// The error for a lock of which the server could not be asked.
fn not_locked(mutex: &str, error: Error) -> Error {
    error.context(format_args!("{mutex}: not locked"))
}

/// The error for a lock that another contender or thread has.
fn held(mutex: &str, holder: &str, wait: Wait) -> Error {
    let waited = match wait {
        Wait::Until(_, timeout) => format!(", and was not free within {timeout:?}"),
        Wait::No | Wait::Forever => String::new(),
    };
    Error::new(ErrorKind::Held, format!("{mutex}: {holder}{waited}"))
}

/// Builds a [`Locker`]. `build` validates all options and does no I/O.
///
/// ```
/// use std::time::Duration;
///
/// let factory = contend::connect("memory://locker-builder-doc")?;
/// let locker = factory
///     .locker("reports")
///     .ttl(Duration::from_secs(5))
///     .transition(Duration::from_secs(2))
///     .max_hold(Duration::from_secs(600))
///     .build()?;
/// assert_eq!(locker.mutex(), "reports");
/// # Ok::<(), contend::Error>(())
/// ```
#[derive(Debug)]
#[must_use]
pub struct LockerBuilder {
    settings: Settings,
    local_handoff: Option<Duration>,
    max_hold: Option<Duration>,
    cancel: Option<Cancel>,
}

impl LockerBuilder {
    contender_setters!();

    pub(crate) fn new(factory: Result<Arc<factory::Core>>, mutex: Arc<str>) -> LockerBuilder {
        LockerBuilder {
            settings: Settings::new(factory, mutex),
            local_handoff: None,
            max_hold: None,
            cancel: None,
        }
    }

    /// Sets how long a guard is renewed. After that its lease runs out, and the guard is [lost](Guard::lost) at
    /// the end of the ttl. A stuck holder then blocks others for a limited time. Defaults to as long as the guard
    /// lives.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// let factory = contend::connect("memory://max-hold-doc?ttl=300ms")?;
    /// let limit = Duration::from_millis(1);
    /// let guard = factory.locker("reports").max_hold(limit).build()?.lock()?;
    /// assert!(guard.lost().recv().is_err()); // closed at the end of the ttl
    /// assert!(!guard.is_valid());
    /// # Ok::<(), contend::Error>(())
    /// ```
    pub fn max_hold(mut self, max_hold: Duration) -> LockerBuilder {
        self.max_hold = Some(max_hold);
        self
    }

    /// Lets threads that share the locker pass the lease on without asking the backend, until `limit` after the
    /// grant. Other processes wait for that long. The guards share the fence of the lease. Defaults to never.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// let factory = contend::connect("memory://local-handoff-doc")?;
    /// let limit = Duration::from_millis(50);
    /// let locker = factory.locker("counters").local_handoff(limit).build()?;
    /// std::thread::scope(|scope| {
    ///     for _ in 0..4 {
    ///         scope.spawn(|| locker.with_lock(|guard| println!("fence {}", guard.fence())));
    ///     }
    /// });
    /// # Ok::<(), contend::Error>(())
    /// ```
    pub fn local_handoff(mut self, limit: Duration) -> LockerBuilder {
        self.local_handoff = Some(limit);
        self
    }

    /// Ends every blocked call of the locker when `cancel` is cancelled.
    ///
    /// ```
    /// use contend::{Cancel, ErrorKind};
    ///
    /// let factory = contend::connect("memory://locker-cancel-doc")?;
    /// let stopping = Cancel::new(); // for all lockers of the program
    /// let locker = factory.locker("reports").cancel(&stopping).build()?;
    /// stopping.cancel();
    /// assert_eq!(locker.lock().unwrap_err().kind(), ErrorKind::Cancelled);
    /// # Ok::<(), contend::Error>(())
    /// ```
    pub fn cancel(mut self, cancel: &Cancel) -> LockerBuilder {
        self.cancel = Some(cancel.clone());
        self
    }

    /// Builds the locker.
    ///
    /// ```
    /// let factory = contend::connect("memory://locker-build-doc")?;
    /// let locker = factory.locker("reports").build()?;
    /// assert!(factory.locker("a name with {braces}").build().is_err());
    /// # drop(locker);
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// # Errors
    /// `InvalidInput` for a name, id or duration that is not allowed, `DuplicateContender` for an id that
    /// this factory already contends under, `Forked` in a child process.
    pub fn build(self) -> Result<Locker> {
        if self.max_hold.is_some_and(|max_hold| max_hold.is_zero()) {
            return Err(Error::invalid(
                "a max_hold of zero is not possible; leave it out to hold for as long as the guard lives",
            ));
        }
        let Validated {
            factory,
            contender,
            period,
            live,
        } = self.settings.validate(Purpose::Lock)?;
        let (shared, parker) = (Arc::<Shared>::default(), Parker::new());
        let start = Moment::now();
        let unparker = parker.unparker();
        let runner = Runner::new(&factory, &contender, period, start, &shared, unparker)?;
        Ok(Locker {
            inner: Local::new(Arc::new(Inner {
                queue: factory.thread_queue(&contender.mutex),
                contender,
                shared,
                runner: Mutex::new(runner),
                parker,
                local_handoff: self.local_handoff,
                max_hold: self.max_hold,
                cancel: self.cancel,
                factory,
                _live: live,
            })),
        })
    }
}

impl fmt::Debug for Locker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let realm = self.inner.here().map(|inner| inner.factory.backend.realm());
        f.debug_struct("Locker")
            .field("realm", &realm.unwrap_or_default())
            .field("mutex", &self.mutex())
            .field("id", &self.id())
            .finish_non_exhaustive()
    }
}

/// Locks several mutexes together: all of them, or none.
///
/// Names are sorted and each is locked once, so that two callers that name the same mutexes in a
/// different order cannot deadlock. One timeout applies to all of them.
///
/// ```
/// use std::time::Duration;
///
/// let factory = contend::connect("memory://lock-all-builder-doc")?;
/// let guard = factory
///     .lock_all(["account-7", "account-3"])
///     .ttl(Duration::from_secs(5))
///     .try_lock_for(Duration::from_secs(1))?;
/// assert!(guard.is_valid() && guard.fence("account-3").is_some());
/// # Ok::<(), contend::Error>(())
/// ```
#[derive(Debug)]
#[must_use]
pub struct LockAllBuilder {
    factory: Result<Arc<factory::Core>>,
    mutexes: BTreeSet<Arc<str>>,
    ttl: Option<Duration>,
    transition: Option<Duration>,
    cancel: Option<Cancel>,
}

impl LockAllBuilder {
    pub(crate) fn new(
        factory: Result<Arc<factory::Core>>,
        mutexes: BTreeSet<Arc<str>>,
    ) -> LockAllBuilder {
        LockAllBuilder {
            factory,
            mutexes,
            ttl: None,
            transition: None,
            cancel: None,
        }
    }

    /// Sets how long the locks are valid without a renewal. Defaults to the ttl of the factory, which
    /// defaults to 10 s.
    pub fn ttl(mut self, ttl: Duration) -> LockAllBuilder {
        self.ttl = Some(ttl);
        self
    }

    /// Sets how long after the ttl no other contender can lock. Defaults to the transition of the factory, which
    /// defaults to 6 s.
    pub fn transition(mut self, transition: Duration) -> LockAllBuilder {
        self.transition = Some(transition);
        self
    }

    /// Ends the wait when `cancel` is cancelled.
    pub fn cancel(mut self, cancel: &Cancel) -> LockAllBuilder {
        self.cancel = Some(cancel.clone());
        self
    }

    /// Waits for all locks, for as long as it takes.
    ///
    /// ```
    /// let factory = contend::connect("memory://lock-all-doc")?;
    /// let both = factory.lock_all(["account-7", "account-3"]).lock()?;
    /// println!("{:?}", both.fences());
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Locker::lock`], for the first mutex that fails; then none is locked.
    pub fn lock(self) -> Result<GuardAll> {
        self.lock_by(Wait::Forever)
    }

    /// Takes all locks if all are free.
    ///
    /// ```
    /// let factory = contend::connect("memory://try-lock-all-doc")?;
    /// let taken = factory.locker("account-7").build()?.lock()?.detach();
    /// assert!(factory.lock_all(["account-3", "account-7"]).try_lock().is_err());
    /// assert!(!factory.owner("account-3")?.has_owner()); // none was kept
    /// # drop(taken);
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Locker::try_lock`], for the first mutex that fails; then none is locked.
    pub fn try_lock(self) -> Result<GuardAll> {
        self.lock_by(Wait::No)
    }

    /// Waits for all locks, for at most `timeout`.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// let factory = contend::connect("memory://try-lock-all-for-doc")?;
    /// let both = factory.lock_all(["account-7", "account-3"]);
    /// let both = both.try_lock_for(Duration::from_secs(5))?; // for both together
    /// # drop(both);
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Locker::try_lock_for`], for the first mutex that fails; then none is locked.
    pub fn try_lock_for(self, timeout: Duration) -> Result<GuardAll> {
        self.lock_by(Wait::Until(Moment::now() + timeout, timeout))
    }

    fn lease(&self) -> Result<Lease> {
        let lease = self.factory.as_ref().map_err(Clone::clone)?.lease;
        Lease::new(
            self.ttl.unwrap_or(lease.ttl()),
            self.transition.unwrap_or(lease.transition()),
        )
    }

    fn lock_by(self, wait: Wait) -> Result<GuardAll> {
        let lease = self.lease()?;
        let factory = self.factory?;
        if self.mutexes.is_empty() {
            return Err(Error::invalid(
                "lock_all was given no mutex; give it at least one",
            ));
        }
        let loss = Arc::default();
        let mut lockers = Vec::with_capacity(self.mutexes.len());
        for mutex in self.mutexes {
            let builder = LockerBuilder::new(Ok(Arc::clone(&factory)), mutex);
            let builder = builder.ttl(lease.ttl()).transition(lease.transition());
            lockers.push(builder.build()?);
        }
        let mut guards = Vec::with_capacity(lockers.len());
        // The first is asked for in any case.
        let ask_by = match wait {
            Wait::No => Moment::now() + lease.request_limit(),
            Wait::Until(deadline, _) => deadline,
            Wait::Forever => Moment::FAR,
        };
        for locker in &lockers {
            let locked = if !guards.is_empty() && ask_by <= Moment::now() {
                let message = format!("{}: not tried in time", locker.mutex());
                Err(Error::new(ErrorKind::Timeout, message))
            } else {
                locker.lock_as_one_of(wait, self.cancel.as_ref(), Arc::clone(&loss))
            };
            match locked {
                Ok(guard) => guards.push(guard),
                Err(error) => {
                    let _ = GuardAll::new(guards, loss).end();
                    return Err(error);
                }
            }
        }
        let mut all = GuardAll::new(guards, loss);
        if !all.is_valid() {
            // The first was lost while the last was waited for.
            let _ = all.end();
            return Err(lost("lock_all"));
        }
        Ok(all)
    }
}
