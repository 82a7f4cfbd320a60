//! `Locker`: reads like `std::sync::Mutex`, and excludes every other process too.
//!
//! A locker owns a runner. The thread that locks drives it until it owns, the background while the guard
//! lives, and the thread that unlocks until it is released. A caller's timeout bounds its call: what is
//! left on the server then is the background's, until the next call takes it over.

use std::collections::{BTreeSet, HashSet};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::ThreadId;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use super::guard::{Guard, GuardAll, Locked, Loss};
use super::thread_queue::{Blocked, ThreadQueue};
use crate::backend::{Contender, Purpose};
use crate::background::{CleanUp, Cleaned, Due, EntryId, Next, Renewable};
use crate::cancel::{Cancel, cancelled};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::factory;
use crate::id::LiveId;
use crate::lease::Lease;
use crate::machine::contention::Change;
use crate::parker::{Parker, Unparked};
use crate::runner::{Called, Runner, Visit, double};
use crate::service::settings::{Settings, Validated, contender_setters};
use crate::snapshot::Snapshot;
use crate::thread::Local;
use crate::virtual_time::try_lock_for;

/// The longest single call of one that waits: where the backend hangs, a wait ends with it when the factory is
/// dropped.
const LONGEST_CALL: Duration = Duration::from_secs(3);

/// The same where the caller may cancel the wait, as long as none was too short.
const CANCELLABLE_CALL: Duration = Duration::from_secs(1);

/// How often one that waits for the background to let go of the runner looks whether it was cancelled.
const LOOK: Duration = Duration::from_millis(20);

/// The least time for the first attempt, however short the caller's timeout.
const SHORTEST_CALL: Duration = Duration::from_millis(80);

/// How far past its timeout a call may run to clean up, if the backend answers.
const TIDY: Duration = Duration::from_millis(100);

/// The longest that unlocking blocks its thread, for all its locks together.
pub(super) const UNLOCK: Duration = Duration::from_millis(800);

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
/// let sum = locker.with_lock(|guard| 40 + 2 * u64::from(guard.is_valid()))?;
/// assert_eq!(sum, 42);
/// # Ok::<(), contend::Error>(())
/// ```
#[derive(Clone)]
pub struct Locker {
    inner: Local<Arc<Inner>>,
}

/// What a locker, its clones and its guard share.
pub(super) struct Inner {
    driver: Arc<Driver>,
    queue: ThreadQueue,
    max_hold: Option<Duration>,
    cancel: Option<Cancel>,
    factory: Arc<factory::Inner>,
}

/// A contender and the runner that drives it: what the background shares too, which must not keep the
/// factory alive.
struct Driver {
    contender: Contender,
    realm: Arc<str>,
    /// What the guard reads: never locked across a call.
    snapshot: Arc<Snapshot>,
    /// Locked across calls.
    driven: Mutex<Driven>,
    /// Counts the calls that lock, so that what is left to the background ends when the next one comes.
    /// Raised with `driven` locked, by whoever has the turn.
    cycle: AtomicU64,
    /// The id is taken for as long as something of it may be left.
    _live: LiveId,
}

struct Driven {
    runner: Runner,
    parker: Parker,
}

impl Driver {
    fn cycle(&self) -> u64 {
        self.cycle.load(Ordering::Relaxed)
    }
}

/// How long a call waits for the lock.
#[derive(Clone, Copy)]
enum Wait {
    /// One try, which is over by then.
    No(Moment),
    Until(Moment, Duration),
    Forever,
}

impl Locker {
    /// Waits for the lock, for as long as it takes.
    ///
    /// If the backend cannot be reached, the call keeps trying, which is logged. To bound the wait, use
    /// [`try_lock_for`](Locker::try_lock_for) or a [`Cancel`].
    ///
    /// # Errors
    /// `Reentrant` if this thread already holds it; `Cancelled`; errors that a retry cannot fix, such as
    /// `Denied` or `Misconfigured`; `Forked` in a child process.
    pub fn lock(&self) -> Result<Guard> {
        self.lock_by(Wait::Forever, None)
    }

    /// Waits for the lock until `cancel` is cancelled, or [the locker's own](LockerBuilder::cancel).
    ///
    /// # Errors
    /// As [`lock`](Locker::lock).
    pub fn lock_until_cancelled(&self, cancel: &Cancel) -> Result<Guard> {
        self.lock_by(Wait::Forever, Some(cancel))
    }

    /// Takes the lock if it is free. Makes a single attempt, which neither enters the queue nor
    /// subscribes to anything. Returns within a quarter of the ttl, even if the backend hangs.
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
    /// let error = thread::spawn(move || theirs.try_lock().map(drop).unwrap_err()).join().unwrap();
    /// assert_eq!(error.kind(), ErrorKind::Held);
    /// assert_eq!(error.to_string(), r#"reports: held by "a", of this process"#);
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Held`, with a message that names the holder; `Reentrant` if the holder is this thread; any error
    /// of the backend.
    pub fn try_lock(&self) -> Result<Guard> {
        let lease = self.inner.get()?.driver.contender.lease;
        self.lock_by(Wait::No(Moment::now() + lease.call_budget()), None)
    }

    /// Waits for the lock for at most `timeout`. Returns within `timeout` plus 200 ms, even if the
    /// backend hangs; whatever an unanswered attempt may have left is cleaned up in the background.
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
    /// let waits = thread::spawn(move || theirs.try_lock_for(Duration::from_millis(20)).map(drop));
    /// let error = waits.join().unwrap().unwrap_err();
    /// let message = r#"reports: held by "a", of this process, and was not free within 20ms"#;
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

    /// Runs `work` under the lock and passes it the guard. If `work` panics, the lock is released.
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
        run(self.lock()?, work)
    }

    /// Runs `work` under the lock as [`with_lock`](Locker::with_lock) does, if the lock can be acquired
    /// within `timeout`.
    ///
    /// # Errors
    /// As [`try_lock_for`](Locker::try_lock_for) and [`with_lock`](Locker::with_lock).
    pub fn with_lock_for<T>(&self, timeout: Duration, work: impl FnOnce(&Guard) -> T) -> Result<T> {
        run(self.try_lock_for(timeout)?, work)
    }

    /// Runs fallible `work` under the lock. Its error is kept separate from that of the lock.
    ///
    /// ```
    /// use contend::WithLockError;
    ///
    /// let factory = contend::connect("memory://try-with-lock-doc")?;
    /// let locker = factory.locker("reports").build()?;
    /// let outcome = locker.try_with_lock(|_| "x".parse::<u32>());
    /// assert!(matches!(outcome, Err(WithLockError::Work(_))));
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Lock` as [`with_lock`](Locker::with_lock); `Work` with what `work` returned.
    pub fn try_with_lock<T, E>(
        &self,
        work: impl FnOnce(&Guard) -> std::result::Result<T, E>,
    ) -> std::result::Result<T, WithLockError<E>> {
        let done = self.with_lock(work).map_err(WithLockError::Lock)?;
        done.map_err(WithLockError::Work)
    }

    /// Runs fallible `work` under the lock, if the lock can be acquired within `timeout`.
    ///
    /// # Errors
    /// As [`try_with_lock`](Locker::try_with_lock).
    pub fn try_with_lock_for<T, E>(
        &self,
        timeout: Duration,
        work: impl FnOnce(&Guard) -> std::result::Result<T, E>,
    ) -> std::result::Result<T, WithLockError<E>> {
        let done = self
            .with_lock_for(timeout, work)
            .map_err(WithLockError::Lock)?;
        done.map_err(WithLockError::Work)
    }

    /// Returns the mutex that this locker locks.
    #[must_use]
    pub fn mutex(&self) -> &str {
        self.inner.here().map_or("", |inner| inner.mutex())
    }

    /// Returns the id that this locker contends under.
    #[must_use]
    pub fn id(&self) -> &str {
        self.inner
            .here()
            .map_or("", |inner| &inner.driver.contender.id)
    }

    fn lock_by(&self, wait: Wait, cancel: Option<&Cancel>) -> Result<Guard> {
        self.lock_as_one_of(wait, cancel, Loss::new())
    }

    /// Locks, as one of several whose first loss is that of all.
    fn lock_as_one_of(
        &self,
        wait: Wait,
        cancel: Option<&Cancel>,
        loss: Arc<Loss>,
    ) -> Result<Guard> {
        let locked = self.inner.get()?.lock_by(wait, cancel, loss)?;
        Ok(Guard::new(&self.inner, locked))
    }
}

fn run<T>(guard: Guard, work: impl FnOnce(&Guard) -> T) -> Result<T> {
    let value = work(&guard);
    if guard.is_valid() {
        return Ok(value);
    }
    Err(lost(guard.mutex()))
}

fn lost(mutex: &str) -> Error {
    Error::new(
        ErrorKind::Lost,
        format!("{mutex}: the lock was lost before it was given up; somebody else may have had it"),
    )
}

/// Why work under a lock returned no result.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum WithLockError<E> {
    /// The lock could not be acquired, and the work did not run; or it was [lost](ErrorKind::Lost) while
    /// the work ran.
    Lock(Error),
    /// The work returned an error.
    Work(E),
}

impl<E: fmt::Display> fmt::Display for WithLockError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WithLockError::Lock(error) => error.fmt(f),
            WithLockError::Work(error) => error.fmt(f),
        }
    }
}

impl<E: std::error::Error + 'static> std::error::Error for WithLockError<E> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            WithLockError::Lock(error) => error.source(),
            WithLockError::Work(error) => error.source(),
        }
    }
}

impl Inner {
    pub(super) fn mutex(&self) -> &Arc<str> {
        &self.driver.contender.mutex
    }

    pub(super) fn snapshot(&self) -> &Snapshot {
        &self.driver.snapshot
    }

    fn lock_by(
        self: &Arc<Inner>,
        wait: Wait,
        cancel: Option<&Cancel>,
        loss: Arc<Loss>,
    ) -> Result<Locked> {
        let start = Moment::now();
        let held = Held::enter(&self.driver)?;
        let waits = &self.factory.waits();
        let lock = |cancels: &[&Cancel]| self.lock_in_turn(start, wait, cancels, &loss);
        let locked = match (cancel, self.cancel.as_ref()) {
            (Some(of_the_call), Some(of_the_locker)) => lock(&[waits, of_the_call, of_the_locker]),
            (Some(cancel), None) | (None, Some(cancel)) => lock(&[waits, cancel]),
            (None, None) => lock(&[waits]),
        };
        self.factory.probe().tell(|probe| {
            let waited = Moment::now() - start;
            probe.waited(self.mutex(), waited, locked.is_ok());
        });
        let (fence, entry) = locked?;
        Ok(Locked {
            inner: Arc::clone(self),
            fence,
            entry,
            loss,
            _held: held,
        })
    }

    fn lock_in_turn(
        self: &Arc<Inner>,
        start: Moment,
        wait: Wait,
        cancels: &[&Cancel],
        loss: &Arc<Loss>,
    ) -> Result<(u64, Option<EntryId>)> {
        let (in_turn_by, deadline) = match wait {
            Wait::No(by) => (start, by),
            Wait::Until(deadline, _) => (deadline, deadline),
            Wait::Forever => (Moment::FAR, Moment::FAR),
        };
        let turn = self.queue.enter(in_turn_by, cancels);
        let turn = turn.map_err(|blocked| self.blocked(blocked, wait))?;
        let mut driven = self.drive(deadline, cancels)?;
        self.driver.cycle.fetch_add(1, Ordering::Relaxed);
        let outcome = self.acquire(&mut driven, wait, deadline, cancels);
        match outcome {
            Ok(fence) => {
                let entry = self.keep(&mut driven, fence, loss)?;
                // The guard's from here on.
                turn.keep();
                Ok((fence, entry))
            }
            Err(error) => {
                // The last call may have ended a little late already.
                let by = match wait {
                    Wait::Until(deadline, _) => deadline.max(start + SHORTEST_CALL) + TIDY,
                    Wait::No(by) => by,
                    Wait::Forever => Moment::FAR,
                };
                self.tidy(driven, by);
                Err(self.unless_cut_off(error, start))
            }
        }
    }

    /// What is known of the holder is as old as the last answer. Whoever was cut off while it waited finds out when
    /// it withdraws: then that is the reason, because the mutex may have been free meanwhile.
    fn unless_cut_off(&self, error: Error, start: Moment) -> Error {
        let snapshot = &self.driver.snapshot;
        let failed = snapshot.failed_call().filter(|failed| failed.at > start);
        let Some(failed) = failed.filter(|_| error.kind() == ErrorKind::Held) else {
            return error;
        };
        if failed.error.kind() != ErrorKind::Timeout {
            return not_locked(self.mutex(), failed.error);
        }
        // A withdrawal has little time: an answer that comes too late for it may be one from far away.
        let recent = Moment::now() - self.driver.contender.lease.call_budget();
        if snapshot.answered() > Some(recent) {
            return error;
        }
        let known = format!("{error}, as far as is known: {}", failed.error);
        Error::new(ErrorKind::Held, known)
    }

    /// Takes the runner, in which the background may be in a call that hangs.
    fn drive(&self, by: Moment, cancels: &[&Cancel]) -> Result<MutexGuard<'_, Driven>> {
        let driven = &self.driver.driven;
        let mut free = driven.try_lock();
        loop {
            if let Some(driven) = free {
                return Ok(driven);
            }
            if is_cancelled(cancels) {
                return Err(cancelled(self.mutex()));
            }
            let left = by.remaining();
            if left.is_zero() {
                // Whoever locked has given it up: nobody holds it, nor waits for it.
                let message = "not locked: an earlier call to the backend has not ended yet";
                return Err(Error::new(ErrorKind::Timeout, message).context(self.mutex()));
            }
            free = try_lock_for(driven, left.min(LOOK));
        }
    }

    /// Drives the runner until it owns, and returns the fence.
    ///
    /// The first try is one call: nothing is subscribed or queued until there is, or has been, somebody
    /// to wait for.
    fn acquire(
        &self,
        driven: &mut Driven,
        wait: Wait,
        deadline: Moment,
        cancels: &[&Cancel],
    ) -> Result<u64> {
        let Driven { runner, parker } = driven;
        let unparker = parker.unparker();
        let mut watched = Vec::new();
        // An error is returned, unless the call waits without an end: then nobody else would hear of it.
        runner.quiet(!matches!(wait, Wait::Forever));
        runner.begin(!matches!(wait, Wait::No(_)));
        // A free lock is not missed for want of time to ask once. A single try has a whole call's time anyway.
        let mut once = None;
        let mut failed = None;
        let mut asked = false;
        // The factory's own cancel is always there.
        let mut longest = match cancels.len() {
            0 | 1 => LONGEST_CALL,
            _ => CANCELLABLE_CALL,
        };
        loop {
            let now = Moment::now();
            let once = match wait {
                Wait::Until(..) => *once.get_or_insert(now + SHORTEST_CALL),
                Wait::No(_) | Wait::Forever => deadline,
            };
            if runner.belief().is_none() {
                if is_cancelled(cancels) {
                    return Err(cancelled(self.mutex()));
                }
                if asked && deadline <= now {
                    return Err(self.refused(failed, runner, wait));
                }
                if matches!(wait, Wait::No(by) if by <= now) {
                    // Another lock, or the background, took all the time.
                    return Err(self.not_tried());
                }
            }
            let limit = deadline.max(once).min(now + longest);
            // Pending wake-ups need no draining: the attempt sees what they announced. Cancels were checked above.
            match runner.visit(&unparker, limit) {
                // Not before the machine says so: a pause may have come between the grant and here.
                Visit::Announce(Change::Acquired(state)) => {
                    runner.quiet(false);
                    return Ok(state.after().fence());
                }
                Visit::Announce(_) => {}
                Visit::Called(Called::Acquire(error)) => {
                    asked = true;
                    let hopeless = error.as_ref().is_some_and(|it| !it.is_transient());
                    if error.as_ref().map(Error::kind) == Some(ErrorKind::Timeout) {
                        // The server may be slow: cut off again and again, it would be locked for nobody.
                        longest = LONGEST_CALL;
                    }
                    let owns = runner.belief().is_some();
                    failed = error;
                    if !owns && (hopeless || matches!(wait, Wait::No(_))) {
                        return Err(self.refused(failed, runner, wait));
                    }
                }
                Visit::Called(Called::Observe(failed)) => {
                    if let Some(fence) = runner.machine().stands_back_from() {
                        let Contender { mutex, id, .. } = &self.driver.contender;
                        let double = double(mutex, id, fence);
                        return Err(match failed {
                            Some(why) => Error::new(
                                double.kind(),
                                format!("{double}; whether it is gone could not be seen: {why}"),
                            ),
                            None => double,
                        });
                    }
                }
                Visit::Called(Called::Listen(Some(error))) if !error.is_transient() => {
                    return Err(self.refused(Some(error), runner, wait));
                }
                Visit::Called(_) => {}
                Visit::Wait { until } => {
                    asked = true;
                    // Not before: until here, every round looks at them by itself.
                    if watched.is_empty() {
                        watched.extend(cancels.iter().map(|it| it.watch(&unparker)));
                    }
                    if parker.park(until.min(deadline)) == Unparked::Wake {
                        runner.woken();
                    }
                }
                Visit::Over => return Err(self.refused(failed, runner, wait)),
            }
        }
    }

    /// Has the background renew what was acquired.
    fn keep(
        self: &Arc<Inner>,
        driven: &mut Driven,
        fence: u64,
        loss: &Arc<Loss>,
    ) -> Result<Option<EntryId>> {
        let max_hold = self.max_hold;
        let ownership = Ownership {
            driver: Arc::clone(&self.driver),
            cycle: self.driver.cycle(),
            renew_until: max_hold.map_or(Moment::FAR, |max_hold| Moment::now() + max_hold),
            loss: Arc::clone(loss),
        };
        let Next::At(due) = ownership.next(driven, fence) else {
            loss.close();
            return Ok(None);
        };
        match self.factory.background.add(Arc::new(ownership), due) {
            Ok(entry) => Ok(Some(entry)),
            Err(error) => {
                let Driven { runner, parker } = driven;
                let _ = runner.leave(parker, Some(fence), Moment::now() + UNLOCK);
                Err(error.context(self.mutex()))
            }
        }
    }

    /// Ends the ownership with this fence, by the caller's thread until `by`.
    pub(super) fn end(
        self: &Arc<Inner>,
        fence: u64,
        entry: Option<EntryId>,
        by: Moment,
    ) -> Result<()> {
        let _turn = self.queue.resume();
        if let Some(entry) = entry {
            self.factory.background.remove(entry);
        }
        let snapshot = &self.driver.snapshot;
        let is_lost = snapshot.valid_for(fence).is_zero();
        if is_lost && snapshot.failed_at().is_some() {
            // Its holder waits for nothing: whether the release succeeds changes nothing for it.
            self.clean_up();
            return Err(lost(self.mutex()));
        }
        let now = Moment::now();
        // Among many, the renewal of a lost one may not even have been tried while others hung.
        let patience = if is_lost { TIDY } else { UNLOCK };
        let by = by.min(now + patience.min(self.driver.contender.lease.call_budget()));
        let driven = &self.driver.driven;
        let driven = if by <= now {
            None
        } else {
            driven.try_lock().or_else(|| {
                let half = (by - now) / 2;
                try_lock_for(driven, half).filter(|_| !by.remaining().is_zero())
            })
        };
        let Some(mut driven) = driven else {
            // A renewal hangs, or the lock before this one did: the release is left to the background. Of
            // this cycle: what the next call locks is not the background's to release.
            self.clean_up();
            if is_lost {
                return Err(lost(self.mutex()));
            }
            return Err(Error::new(
                ErrorKind::Timeout,
                format!(
                    "{}: the backend does not answer; the lock is released in the background",
                    self.mutex()
                ),
            ));
        };
        let was_ours = self.driver.snapshot.fence() == Some(fence);
        let Driven { runner, parker } = &mut *driven;
        runner.quiet(true);
        let released = runner.leave(parker, Some(fence), by);
        let is_left = self.tidy(driven, by + TIDY);
        match released {
            Ok(true) if was_ours => Ok(()),
            Ok(false) if was_ours => {
                // No renewal came to notice it.
                let Contender { mutex, id, .. } = &self.driver.contender;
                log::warn!(
                    "{mutex}: {id}: fence {fence} was taken away before it was released; another process may \
                     use this id, an operator may have ended it, or a failover may have lost it"
                );
                Err(lost(mutex))
            }
            Err(error) if was_ours => {
                let what = if is_left {
                    "not released yet, which is left to the background"
                } else {
                    // A later release found nothing: the first one's work, or it was gone before.
                    "whether it was released, or had been lost before, is not known"
                };
                Err(error.context(what).context(self.mutex()))
            }
            _ => Err(lost(self.mutex())),
        }
    }

    /// Removes the traces of what was given up: at once where the backend answers, before `by`, else later. Returns
    /// whether something is left to the background.
    fn tidy(self: &Arc<Inner>, mut driven: MutexGuard<'_, Driven>, by: Moment) -> bool {
        if !driven.runner.machine().has_traces() {
            return false;
        }
        if self.driver.snapshot.failed_at().is_none() {
            let Driven { runner, parker } = &mut *driven;
            let _ = runner.leave(parker, None, by.min(Moment::now() + TIDY));
        }
        let is_left = driven.runner.machine().has_traces();
        if is_left {
            self.clean_up();
        }
        is_left
    }

    /// Leaves what this cycle may have left on the server to the background.
    fn clean_up(&self) {
        let lease = self.driver.contender.lease;
        let job = Leave {
            driver: Arc::clone(&self.driver),
            cycle: self.driver.cycle(),
        };
        let until = Moment::now() + lease.total() + lease.drift_allowance();
        let call = lease.call_budget().min(LONGEST_CALL);
        self.factory.background.clean_up(Box::new(job), call, until);
    }

    /// Why a thread did not have its turn.
    fn blocked(&self, blocked: Blocked, wait: Wait) -> Error {
        let Contender { mutex, id, .. } = &self.driver.contender;
        if blocked == Blocked::Cancelled {
            return cancelled(mutex);
        }
        if self.driver.snapshot.fence().is_some() {
            let holder = format!("held by {id:?}, by another thread of this process");
            return held(mutex, &holder, wait);
        }
        match self.driver.snapshot.last_error() {
            Some(error) => not_locked(mutex, error),
            None => held(
                mutex,
                "another thread of this process waits for it too",
                wait,
            ),
        }
    }

    fn not_tried(&self) -> Error {
        let Contender { mutex, lease, .. } = &self.driver.contender;
        let message = format!("{mutex}: not tried within {:?}", lease.call_budget());
        Error::new(ErrorKind::Timeout, message)
    }

    /// Why there is no lock: the error, if there was one, or who holds it.
    fn refused(&self, failed: Option<Error>, runner: &Runner, wait: Wait) -> Error {
        let mutex = self.mutex();
        if let Some(error) = failed {
            return not_locked(mutex, error);
        }
        let holder = match runner.seen().owner_id() {
            "" => "kept for a contender that waits for it, or granted too late".to_owned(),
            holder if LiveId::is_live(&self.driver.realm, mutex, holder) => {
                format!("held by {holder:?}, of this process")
            }
            holder => format!("held by {holder:?}"),
        };
        held(mutex, &holder, wait)
    }
}

fn is_cancelled(cancels: &[&Cancel]) -> bool {
    cancels.iter().any(|it| it.is_cancelled())
}

/// The error for a lock of which the server could not be asked.
fn not_locked(mutex: &str, error: Error) -> Error {
    error.context(format_args!("{mutex}: not locked"))
}

/// The error for a lock that somebody else has.
fn held(mutex: &str, holder: &str, wait: Wait) -> Error {
    let waited = match wait {
        Wait::Until(_, timeout) => format!(", and was not free within {timeout:?}"),
        Wait::No(_) | Wait::Forever => String::new(),
    };
    Error::new(ErrorKind::Held, format!("{mutex}: {holder}{waited}"))
}

/// One ownership, from the grant to the release: what the background renews.
struct Ownership {
    driver: Arc<Driver>,
    cycle: u64,
    /// From here on the lease is left to run out.
    renew_until: Moment,
    loss: Arc<Loss>,
}

impl Ownership {
    /// When to come again, while the ownership with this fence lasts.
    fn next(&self, driven: &Driven, fence: u64) -> Next {
        let lease = self.driver.contender.lease;
        match driven.runner.belief() {
            Some((until, present)) if present == fence => Next::At(Due {
                at: driven.runner.machine().due().max(self.not_renewed(until)),
                // A quarter of the transition may pass before a holder is told: three are left to stop in.
                tell_by: until + lease.transition() / 4,
                again: driven.runner.machine().has_failed(),
                call: lease.call_budget(),
            }),
            _ => Next::Over,
        }
    }

    /// Where it is not renewed any more, there is nothing to do before the end of belief.
    fn not_renewed(&self, until: Moment) -> Moment {
        if self.renew_until != Moment::FAR && self.renew_until <= Moment::now() {
            until
        } else {
            Moment::from_origin(Duration::ZERO)
        }
    }
}

impl Renewable for Ownership {
    fn label(&self) -> String {
        self.driver.contender.mutex.to_string()
    }

    fn visit(&self, by: Moment) -> Next {
        // Busy: a guard on its way out, which has ended these visits, or is about to.
        let Some(mut driven) = self.driver.driven.try_lock() else {
            return Next::At(Due {
                at: Moment::now() + Duration::from_millis(5),
                tell_by: Moment::FAR,
                again: true,
                call: self.driver.contender.lease.call_budget(),
            });
        };
        let Some((until, fence)) = driven.runner.belief() else {
            return Next::Over;
        };
        if self.driver.cycle() != self.cycle {
            return Next::Over;
        }
        if self.not_renewed(until) > Moment::now() {
            return self.next(&driven, fence);
        }
        let unparker = driven.parker.unparker();
        loop {
            match driven.runner.visit(&unparker, by) {
                Visit::Announce(change) => {
                    if let Change::Released(..) = change {
                        self.loss.close();
                    }
                    // Why it was lost is told now, and not when the guard ends.
                    if driven.runner.belief().is_none() && !driven.runner.machine().has_news() {
                        return Next::Over;
                    }
                }
                // One call, and what it has changed is announced at once.
                Visit::Called(_) if driven.runner.belief().is_none() => {}
                Visit::Called(_) | Visit::Wait { .. } | Visit::Over => {
                    return self.next(&driven, fence);
                }
            }
        }
    }

    fn panicked(&self) {
        self.loss.close();
    }
}

/// Gives up what an attempt of unknown outcome, or a release without an answer, may have left.
struct Leave {
    driver: Arc<Driver>,
    cycle: u64,
}

impl CleanUp for Leave {
    fn label(&self) -> String {
        self.driver.contender.mutex.to_string()
    }

    fn attempt(&mut self, by: Moment) -> Cleaned {
        let Some(mut driven) = try_lock_for(&self.driver.driven, by.remaining()) else {
            return Cleaned::Again(TIDY);
        };
        if self.driver.cycle() != self.cycle {
            // The next call has taken it over.
            return Cleaned::Done;
        }
        let Driven { runner, parker } = &mut *driven;
        let _ = runner.leave(parker, None, by);
        if driven.runner.machine().has_traces() {
            Cleaned::Again(TIDY * 5)
        } else {
            Cleaned::Done
        }
    }
}

/// The process too: a forked child has the parent's memory, and none of its locks.
type HeldKey = (u32, ThreadId, Arc<str>, Arc<str>);

/// The mutexes that threads of this process hold or wait for, whatever locker they use.
static HELD: Mutex<Option<HashSet<HeldKey>>> = Mutex::new(None);

/// A thread's hold on a mutex; ends on drop, on any thread.
pub(super) struct Held(HeldKey);

impl Held {
    fn enter(driver: &Driver) -> Result<Held> {
        let mutex = &driver.contender.mutex;
        let (process, thread) = (std::process::id(), std::thread::current().id());
        let realm = Arc::clone(&driver.realm);
        let key = (process, thread, realm, Arc::clone(mutex));
        if HELD.lock().get_or_insert_default().insert(key.clone()) {
            return Ok(Held(key));
        }
        Err(Error::new(
            ErrorKind::Reentrant,
            format!(
                "{mutex}: this thread holds the lock already and would wait for itself; drop its guard \
                 first, or pass it on"
            ),
        ))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(held) = HELD.lock().as_mut() {
            held.remove(&self.0);
        }
    }
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
    max_hold: Option<Duration>,
    cancel: Option<Cancel>,
}

impl LockerBuilder {
    contender_setters!();

    pub(crate) fn new(factory: Result<Arc<factory::Inner>>, mutex: Arc<str>) -> LockerBuilder {
        LockerBuilder {
            settings: Settings::new(factory, mutex),
            max_hold: None,
            cancel: None,
        }
    }

    /// Sets how long a guard is renewed. After that its lease runs out, and it is [lost](Guard::lost) at
    /// the end of the ttl, so that a stuck holder does not block others forever. Defaults to as long as
    /// the guard lives.
    pub fn max_hold(mut self, max_hold: Duration) -> LockerBuilder {
        self.max_hold = Some(max_hold);
        self
    }

    /// Ends every blocked call of the locker when `cancel` is cancelled.
    pub fn cancel(mut self, cancel: &Cancel) -> LockerBuilder {
        self.cancel = Some(cancel.clone());
        self
    }

    /// Builds the locker.
    ///
    /// # Errors
    /// `InvalidInput` for a name, id or duration that is not allowed, `DuplicateContender` for an id that
    /// this process already contends under, `Forked` in a child process.
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
        let snapshot = Arc::<Snapshot>::default();
        let runner = Runner::new(
            &factory.backend,
            &contender,
            period,
            Moment::now(),
            &snapshot,
            &factory.probe(),
        )?;
        let driver = Driver {
            realm: Arc::from(factory.backend.realm()),
            contender,
            snapshot,
            driven: Mutex::new(Driven {
                runner,
                parker: Parker::new(),
            }),
            cycle: AtomicU64::new(0),
            _live: live,
        };
        let driver = Arc::new(driver);
        factory.registry.count(&driver.snapshot);
        Ok(Locker {
            inner: Local::new(Arc::new(Inner {
                driver,
                queue: ThreadQueue::default(),
                max_hold: self.max_hold,
                cancel: self.cancel,
                factory,
            })),
        })
    }
}

impl fmt::Debug for Locker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let realm = self.inner.here().map(|inner| &*inner.driver.realm);
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
#[derive(Debug)]
#[must_use]
pub struct LockAllBuilder {
    factory: Result<Arc<factory::Inner>>,
    mutexes: BTreeSet<Arc<str>>,
    ttl: Option<Duration>,
    transition: Option<Duration>,
    cancel: Option<Cancel>,
}

impl LockAllBuilder {
    pub(crate) fn new(
        factory: Result<Arc<factory::Inner>>,
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

    /// Sets how long after the ttl nobody else can lock. Defaults to the transition of the factory, which
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
    /// # Errors
    /// As [`Locker::lock`], for the first mutex that fails; then none is locked.
    pub fn lock(self) -> Result<GuardAll> {
        self.lock_by(Wait::Forever)
    }

    /// Takes all locks if all are free.
    ///
    /// # Errors
    /// As [`Locker::try_lock`], for the first mutex that fails; then none is locked.
    pub fn try_lock(self) -> Result<GuardAll> {
        let by = self.lease()?.call_budget();
        self.lock_by(Wait::No(Moment::now() + by))
    }

    /// Waits for all locks, for at most `timeout`.
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
        let loss = Loss::new();
        let mut lockers = Vec::with_capacity(self.mutexes.len());
        for mutex in self.mutexes {
            let builder = LockerBuilder::new(Ok(Arc::clone(&factory)), mutex);
            let builder = builder.ttl(lease.ttl()).transition(lease.transition());
            lockers.push(builder.build()?);
        }
        let mut guards = Vec::with_capacity(lockers.len());
        // One for all of them: each may ask once, but not each beyond the timeout.
        let once = Moment::now() + SHORTEST_CALL;
        // Within the caller's timeout: what takes longer is the background's.
        let give_back_by = || match wait {
            Wait::Until(deadline, _) => deadline.max(once) + TIDY,
            Wait::No(by) => by.min(Moment::now() + TIDY),
            Wait::Forever => Moment::now() + TIDY,
        };
        for locker in &lockers {
            let locked = match wait {
                Wait::Until(deadline, timeout) if deadline.max(once) <= Moment::now() => {
                    let message = format!("{}: not tried within {timeout:?}", locker.mutex());
                    Err(Error::new(ErrorKind::Timeout, message))
                }
                _ => locker.lock_as_one_of(wait, self.cancel.as_ref(), Arc::clone(&loss)),
            };
            match locked {
                Ok(guard) => guards.push(guard),
                Err(error) => {
                    let _ = GuardAll::new(guards, loss).end(give_back_by());
                    return Err(error);
                }
            }
        }
        let mut all = GuardAll::new(guards, loss);
        if !all.is_valid() {
            // The first was lost while the last was waited for.
            let _ = all.end(give_back_by());
            return Err(lost("lock_all"));
        }
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A real `fork` needs `unsafe`; what a child has of its parent is the entry, with another pid in it.
    #[test]
    fn a_child_is_not_refused_a_lock_that_its_parent_holds() {
        let factory = crate::memory::factory("of a parent", Lease::default());
        let locker = factory.locker("m").build().unwrap();
        let driver = &locker.inner.get().unwrap().driver;
        let own = Held::enter(driver).unwrap();
        assert_eq!(own.0.0, std::process::id());
        assert!(Held::enter(driver).is_err());
        let mut parents = own.0.clone();
        parents.0 = parents.0.wrapping_add(1);
        drop(own);
        HELD.lock().get_or_insert_default().insert(parents);
        Held::enter(driver).map(drop).unwrap();
    }
}
