//! `Locker`: reads like `std::sync::Mutex`, and excludes every other process too.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::guard::Guard;
use super::holding::{Holding, held};
use super::turnstile::{Blocked, Turnstile};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::factory::Factory;
use crate::service::{Claim, Settled};

/// A lock that one contender at a time holds, wherever it runs.
///
/// Cheap to clone. Threads that share a locker (or clones of it) queue up in the process, in the order
/// in which they came, before one of them goes to the backend. Uncontended, locking costs the backend's
/// own acquire and unlocking its release, and nothing else.
///
/// A thread that locks what it holds already is told so, where it goes through the same locker or a clone
/// of it; another locker of the same mutex is another contender, and waits.
///
/// A guard is renewed in the background for as long as it lives. Nothing can stop a holder whose lease
/// ran out all the same (the server was gone, the process was paused), so whoever holds for long looks at
/// [`Guard::is_valid`] or [`Guard::lost`], and whatever is protected checks the [fence](Guard::fence).
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
/// let sum = locker.with_lock(|fence| 40 + 2 * u64::from(fence > 0))?;
/// assert_eq!(sum, 42);
/// # Ok::<(), contend::Error>(())
/// ```
#[derive(Clone)]
pub struct Locker {
    inner: Arc<Inner>,
}

/// What a locker, its clones and its guard share.
pub(super) struct Inner {
    pub(super) holding: Arc<Holding>,
    pub(super) turnstile: Turnstile,
    pub(super) factory: Factory,
    /// Keeps the id from being used twice for as long as the locker or a guard lives.
    _claim: Claim,
}

impl Locker {
    pub(super) fn new(
        factory: Factory,
        settled: Settled,
        max_hold: Option<Duration>,
    ) -> Result<Locker> {
        let seat = settled.backend.seat(&settled.place)?;
        let holding = Holding::new(settled.place, settled.period, max_hold, seat);
        Ok(Locker {
            inner: Arc::new(Inner {
                holding: Arc::new(holding),
                turnstile: Turnstile::default(),
                factory,
                _claim: settled.claim,
            }),
        })
    }

    /// Waits for the lock, for as long as it takes.
    ///
    /// A backend that cannot be reached is tried again and again. Where that must have an end, use
    /// [`try_lock_for`](Locker::try_lock_for).
    ///
    /// # Errors
    /// `Reentrant` where this thread holds it already; what waiting cannot mend, such as `Denied` or
    /// `Misconfigured`; `Forked` in a child process.
    pub fn lock(&self) -> Result<Guard> {
        self.lock_by(Some(Moment::FAR), None)
    }

    /// Takes the lock if it is free: one try, which enters no queue and subscribes to nothing.
    ///
    /// ```
    /// use contend::ErrorKind;
    ///
    /// let factory = contend::connect("memory://try-lock-doc")?;
    /// let ours = factory.locker("reports").id("a").build()?;
    /// let theirs = factory.locker("reports").id("b").build()?;
    ///
    /// let guard = ours.try_lock()?;
    /// let error = theirs.try_lock().unwrap_err();
    /// assert_eq!(error.kind(), ErrorKind::Held);
    /// assert_eq!(error.to_string(), r#"reports: held by "a""#);
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Held`, with a message that names the holder; `Reentrant` where it is this thread; any trouble
    /// with the backend.
    pub fn try_lock(&self) -> Result<Guard> {
        self.lock_by(None, None)
    }

    /// Waits for the lock until `timeout` has passed; then no trace of the attempt is left.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// let factory = contend::connect("memory://try-lock-for-doc")?;
    /// let ours = factory.locker("reports").id("a").build()?;
    /// let theirs = factory.locker("reports").id("b").build()?;
    ///
    /// let guard = ours.lock()?;
    /// let error = theirs.try_lock_for(Duration::from_millis(20)).unwrap_err();
    /// assert_eq!(error.to_string(), r#"reports: held by "a", and was not free within 20ms"#);
    ///
    /// drop(guard);
    /// theirs.try_lock_for(Duration::from_millis(20))?;
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// A backend that does not answer may delay the return: a call is given at least half a second (on
    /// MySQL a quarter of the ttl), and cleaning up after one of unknown outcome up to a quarter of the ttl.
    ///
    /// # Errors
    /// `Held`, with a message that names the holder; `Reentrant` where it is this thread; the trouble
    /// with the backend that lasted until the end, or that waiting cannot mend.
    pub fn try_lock_for(&self, timeout: Duration) -> Result<Guard> {
        self.lock_by(Some(Moment::now() + timeout), Some(timeout))
    }

    /// Runs `work` under the lock, and gives it the fence. A panic in it releases the lock.
    ///
    /// ```
    /// let factory = contend::connect("memory://with-lock-doc")?;
    /// let locker = factory.locker("reports").build()?;
    /// let fence = locker.with_lock(|fence| fence)?;
    /// assert!(fence < locker.with_lock(|fence| fence)?);
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`lock`](Locker::lock), without having run `work`; and `Lost` where the lock was no longer
    /// surely ours when `work` had ended: it ran, but maybe not alone. What it returned is dropped then.
    pub fn with_lock<T>(&self, work: impl FnOnce(u64) -> T) -> Result<T> {
        let guard = self.lock()?;
        let value = work(guard.fence());
        if guard.is_valid() {
            return Ok(value);
        }
        Err(Error::new(
            ErrorKind::Lost,
            format!(
                "{}: the lock was lost before the work under it had ended; somebody else may have it",
                self.mutex()
            ),
        ))
    }

    /// The mutex locked.
    #[must_use]
    pub fn mutex(&self) -> &str {
        &self.inner.holding.place().mutex
    }

    /// The id contended under.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.inner.holding.place().id
    }

    fn lock_by(&self, deadline: Option<Moment>, timeout: Option<Duration>) -> Result<Guard> {
        // After a fork, a lock that a thread of the parent held stays locked for ever.
        self.inner.factory.backend()?;
        let turn = self.inner.turnstile.enter(deadline);
        let turn = turn.map_err(|blocked| self.blocked(blocked, timeout))?;
        let renewer = self.inner.factory.renewer();
        let fence = self.inner.holding.acquire(renewer, deadline, timeout)?;
        // The guard's from here on.
        turn.keep();
        Ok(Guard::new(Arc::clone(&self.inner), fence))
    }

    fn blocked(&self, blocked: Blocked, timeout: Option<Duration>) -> Error {
        match blocked {
            Blocked::BySelf => Error::new(
                ErrorKind::Reentrant,
                format!(
                    "{}: this thread holds the lock already and would wait for itself; \
                     drop its guard first, or pass it on",
                    self.mutex()
                ),
            ),
            Blocked::ByOther => {
                let holder = format!("held by {:?}, by another thread of this process", self.id());
                held(self.mutex(), &holder, timeout)
            }
        }
    }
}

impl fmt::Debug for Locker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Locker")
            .field("realm", &self.inner.factory.realm())
            .field("mutex", &self.mutex())
            .field("id", &self.id())
            .finish_non_exhaustive()
    }
}
