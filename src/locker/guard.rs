//! `Guard`: a held lock; and `GuardAll`, several of them.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, bounded};

use super::locker::Inner;
use super::tenure::Tenure;
use crate::clock::Moment;
use crate::error::{ErrorKind, Result};
use crate::id::Hold;
use crate::ownership::{Loss, Ownership};
use crate::thread::Local;

/// A held lock, renewed in the background and released when dropped.
///
/// It may be sent to another thread and dropped there. The thread that locked still counts as the holder, and
/// must not lock the mutex again, unless the guard was [detached](Guard::detach).
///
/// ```
/// use std::time::Duration;
///
/// let factory = contend::connect("memory://guard-doc")?;
/// let locker = factory.locker("reports").build()?;
/// let guard = locker.lock()?;
///
/// for page in 0..3 {
///     if !guard.is_valid() {
///         break; // the rest of the transition is left to stop in
///     }
///     // write the page; the store rejects a fence lower than the highest it has seen
///     let _ = (page, guard.fence());
/// }
/// assert!(guard.valid_for() > Duration::from_secs(5));
/// guard.unlock()?; // an error here would say that it was lost
/// # Ok::<(), contend::Error>(())
/// ```
#[must_use = "an unused guard unlocks at once; bind it to a name: `let _guard = ..`"]
pub struct Guard {
    /// Taken out when it is over.
    held: Local<Locked>,
    mutex: Arc<str>,
    fence: u64,
}

/// What a guard keeps while it lives.
pub(super) struct Locked {
    pub(super) inner: Arc<Inner>,
    pub(super) tenure: Arc<Tenure>,
    pub(super) ownership: Ownership,
    /// The thread that locked may not lock the mutex again while this lives.
    pub(super) hold: Option<Hold>,
}

impl Guard {
    /// Makes the guard of what `locker` has locked.
    pub(super) fn new(locker: &Local<Arc<Inner>>, locked: Locked) -> Guard {
        Guard {
            mutex: Arc::clone(&locked.inner.contender.mutex),
            fence: locked.tenure.fence,
            held: locker.with(locked),
        }
    }

    /// Returns the mutex that is locked.
    ///
    /// ```
    /// let factory = contend::connect("memory://guard-mutex-doc")?;
    /// let guard = factory.locker("reports").build()?.lock()?;
    /// assert_eq!(guard.mutex(), "reports");
    /// # Ok::<(), contend::Error>(())
    /// ```
    #[must_use]
    pub fn mutex(&self) -> &str {
        &self.mutex
    }

    /// Returns the fence of this ownership: larger than that of every earlier one of the same mutex.
    ///
    /// Pass it to the resource that you protect, and let it reject any write whose fence is lower than
    /// the highest it has seen. The resource is then protected even if this library's assumptions about
    /// clocks and servers do not hold.
    ///
    /// ```
    /// let factory = contend::connect("memory://guard-fence-doc")?;
    /// let locker = factory.locker("reports").build()?;
    /// let guard = locker.lock()?;
    /// let fence = guard.fence();
    /// println!("UPDATE report SET fence = {fence} WHERE id = 1 AND fence <= {fence}");
    /// drop(guard);
    /// assert!(locker.lock()?.fence() > fence);
    /// # Ok::<(), contend::Error>(())
    /// ```
    #[must_use]
    pub fn fence(&self) -> u64 {
        self.fence
    }

    /// Returns `true` if the lock is certainly held at the moment of the call. This is correct even while
    /// renewal is blocked or the backend is unreachable, and after the machine was suspended. Once
    /// `false`, it stays `false`.
    ///
    /// ```
    /// let factory = contend::connect("memory://guard-is-valid-doc")?;
    /// let guard = factory.locker("reports").build()?.lock()?;
    /// for page in 0..3 {
    ///     if !guard.is_valid() {
    ///         break; // it was lost: the transition is the time to stop
    ///     }
    ///     println!("page {page}");
    /// }
    /// # Ok::<(), contend::Error>(())
    /// ```
    #[must_use]
    pub fn is_valid(&self) -> bool {
        !self.valid_for().is_zero()
    }

    /// Returns how long the lock is certainly held without another renewal; zero once it is not.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// let factory = contend::connect("memory://guard-valid-for-doc")?;
    /// let guard = factory.locker("reports").build()?.lock()?;
    /// let step = Duration::from_secs(2);
    /// if guard.valid_for() > step {
    ///     println!("there is time for one more step");
    /// }
    /// # Ok::<(), contend::Error>(())
    /// ```
    #[must_use]
    pub fn valid_for(&self) -> Duration {
        self.locked()
            .map_or(Duration::ZERO, |locked| locked.ownership.valid_for())
    }

    /// Returns a receiver that is closed when the lock is lost: at the end of the ttl if renewal failed,
    /// or as soon as the backend reports that it is not held any more. Its `recv` then returns an error;
    /// no message is ever sent. It is also closed when the guard is dropped.
    ///
    /// The transition is the time to stop: no other contender can lock before it has ended. All receivers are closed;
    /// they can be used in crossbeam's `select!`.
    ///
    /// ```
    /// use contend::crossbeam_channel::{select, tick};
    /// use std::time::Duration;
    ///
    /// let factory = contend::connect("memory://lost-doc")?;
    /// let guard = factory.locker("reports").build()?.lock()?;
    /// let (lost, pages) = (guard.lost(), tick(Duration::from_millis(1)));
    /// for page in 0..3 {
    ///     select! {
    ///         recv(lost) -> _ => break, // stop the work
    ///         recv(pages) -> _ => println!("page {page}"),
    ///     }
    /// }
    /// # Ok::<(), contend::Error>(())
    /// ```
    #[must_use]
    pub fn lost(&self) -> Receiver<()> {
        self.locked()
            .map_or_else(|| bounded(0).1, |locked| locked.ownership.lost())
    }

    /// Releases the lock.
    ///
    /// ```
    /// let factory = contend::connect("memory://unlock-doc")?;
    /// let guard = factory.locker("reports").build()?.lock()?;
    /// match guard.unlock() {
    ///     Ok(()) => println!("alone to the end"),
    ///     Err(error) => println!("perhaps not: {error}"),
    /// }
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Lost` if the lease had ended or been taken away before: the work under the lock may not have been
    /// exclusive. An error of the backend if the outcome is unknown: the lease then ends by itself. The guard is
    /// consumed either way.
    pub fn unlock(mut self) -> Result<()> {
        self.end(Moment::FAR)
    }

    /// Detaches the guard from the thread that locked, which may then lock the mutex again and wait for it.
    ///
    /// For a guard that outlives the work of its thread: one that a thread pool, or `spawn_blocking` of an async
    /// runtime, has locked for another thread.
    ///
    /// ```
    /// let factory = contend::connect("memory://detach-doc")?;
    /// let locker = factory.locker("reports").build()?;
    /// let guard = locker.lock()?.detach();
    /// let error = locker.try_lock().unwrap_err();
    /// assert_eq!(error.kind(), contend::ErrorKind::Held); // and not `Reentrant`
    /// # Ok::<(), contend::Error>(())
    /// ```
    pub fn detach(mut self) -> Guard {
        if let Some(locked) = self.held.here_mut() {
            locked.hold = None;
        }
        self
    }

    fn locked(&self) -> Option<&Locked> {
        self.held.here()
    }

    fn end(&mut self, by: Moment) -> Result<()> {
        // In a child process the lock is still the parent's.
        let Some(locked) = self.held.take()? else {
            return Ok(());
        };
        let ended = locked.inner.unlock(&locked.tenure, by);
        locked.ownership.end();
        ended
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Err(error) = self.end(Moment::FAR)
            && error.kind() != ErrorKind::Lost
        {
            // A loss was logged when it came.
            log::warn!("{error}");
        }
    }
}

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guard")
            .field("mutex", &self.mutex)
            .field("fence", &self.fence)
            .field("valid_for", &self.valid_for())
            .finish()
    }
}

/// Several held locks, acquired all or none; dropping it releases all of them.
///
/// ```
/// let factory = contend::connect("memory://guard-all-doc")?;
/// let both = factory.lock_all(["account-7", "account-3"]).lock()?;
/// assert!(both.is_valid());
/// println!("{:?}", both.fences()); // sorted by name
/// both.unlock()?;
/// # Ok::<(), contend::Error>(())
/// ```
#[must_use = "an unused guard unlocks at once; bind it to a name: `let _guard = ..`"]
#[derive(Debug)]
pub struct GuardAll {
    guards: Vec<Guard>,
    loss: Arc<Loss>,
}

impl GuardAll {
    pub(super) fn new(guards: Vec<Guard>, loss: Arc<Loss>) -> GuardAll {
        GuardAll { guards, loss }
    }

    /// Returns the fence of one of the mutexes; `None` if it is not among them.
    ///
    /// ```
    /// let factory = contend::connect("memory://guard-all-fence-doc")?;
    /// let both = factory.lock_all(["account-7", "account-3"]).lock()?;
    /// assert!(both.fence("account-7").is_some());
    /// assert!(both.fence("account-8").is_none());
    /// # Ok::<(), contend::Error>(())
    /// ```
    #[must_use]
    pub fn fence(&self, mutex: &str) -> Option<u64> {
        let guard = self.guards.iter().find(|guard| guard.mutex() == mutex);
        guard.map(Guard::fence)
    }

    /// Returns the mutexes in sorted order, each with its fence.
    ///
    /// ```
    /// let factory = contend::connect("memory://guard-all-fences-doc")?;
    /// let both = factory.lock_all(["account-7", "account-3"]).lock()?;
    /// for (mutex, fence) in both.fences() {
    ///     println!("{mutex}: fence {fence}");
    /// }
    /// # Ok::<(), contend::Error>(())
    /// ```
    #[must_use]
    pub fn fences(&self) -> Vec<(&str, u64)> {
        let fences = self.guards.iter();
        fences.map(|guard| (guard.mutex(), guard.fence())).collect()
    }

    /// Returns `true` if all locks are certainly held. See [`Guard::is_valid`].
    #[must_use]
    pub fn is_valid(&self) -> bool {
        self.guards.iter().all(Guard::is_valid)
    }

    /// Returns how long all locks are certainly held without another renewal.
    #[must_use]
    pub fn valid_for(&self) -> Duration {
        let left = self.guards.iter().map(Guard::valid_for).min();
        left.unwrap_or(Duration::ZERO)
    }

    /// Returns a receiver that is closed when the first of the locks is lost. See [`Guard::lost`].
    ///
    /// ```
    /// let factory = contend::connect("memory://guard-all-lost-doc?ttl=1500ms")?;
    /// let both = factory.lock_all(["account-7", "account-3"]).lock()?;
    /// assert!(contend::memory::handle("guard-all-lost-doc").revoke("account-7"));
    /// assert!(both.lost().recv().is_err()); // one loss ends both
    /// assert!(!both.is_valid());
    /// # Ok::<(), contend::Error>(())
    /// ```
    #[must_use]
    pub fn lost(&self) -> Receiver<()> {
        self.loss.receiver()
    }

    /// Releases all locks.
    ///
    /// # Errors
    /// As [`Guard::unlock`], for the first lock that fails; all are released.
    pub fn unlock(mut self) -> Result<()> {
        self.end()
    }

    /// Releases all in the reverse of the order in which they were locked, within one request limit.
    pub(super) fn end(&mut self) -> Result<()> {
        let limits = self
            .guards
            .iter()
            .filter_map(|it| Some(it.locked()?.inner.request_limit()));
        let by = Moment::now() + limits.max().unwrap_or_default();
        let mut ended = Ok(());
        while let Some(mut guard) = self.guards.pop() {
            let one = guard.end(by);
            ended = ended.and(one);
        }
        ended
    }
}

impl Drop for GuardAll {
    fn drop(&mut self) {
        if let Err(error) = self.end()
            && error.kind() != ErrorKind::Lost
        {
            log::warn!("{error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::lease::Lease;

    /// The lock still belongs to the parent, whose threads may hold the locks in the way.
    #[test]
    fn guard_in_a_child_process_releases_nothing() {
        let factory = crate::memory::factory("guard-fork", Lease::default());
        let locker = factory.locker("m").build().unwrap();
        let mut guard = locker.lock().unwrap();
        guard.held.seen_from_a_child();
        assert!(!guard.is_valid());
        assert_eq!(guard.unlock().unwrap_err().kind(), ErrorKind::Forked);
        let other = factory.locker("m").build().unwrap();
        let held = std::thread::spawn(move || other.try_lock().map(drop).unwrap_err().kind());
        assert_eq!(held.join().unwrap(), ErrorKind::Held);
    }
}
