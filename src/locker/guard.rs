//! `Guard`: a held lock.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::Receiver;

use super::lock::Inner;
use crate::error::Result;

/// A held lock, renewed in the background; dropping it releases.
///
/// It may be sent to another thread and dropped there. Whether a thread locks what it holds is judged by
/// the thread that locked.
///
/// ```
/// use std::time::Duration;
///
/// let factory = contend::connect("memory://guard-doc")?;
/// let locker = factory.locker("reports").build()?;
/// let guard = locker.lock()?;
///
/// let lost = guard.lost();
/// for page in 0..3 {
///     if lost.try_recv().is_ok() {
///         break; // the rest of the transition is left to stop in
///     }
///     // write the page; whoever stores it refuses a fence smaller than it has seen
///     let _ = (page, guard.fence());
/// }
/// assert!(guard.valid_for() > Duration::from_secs(5));
/// assert!(guard.unlock()?); // ours to the end
/// # Ok::<(), contend::Error>(())
/// ```
#[must_use = "an unused guard unlocks at once"]
pub struct Guard {
    inner: Arc<Inner>,
    fence: u64,
    over: bool,
}

impl Guard {
    pub(super) fn new(inner: Arc<Inner>, fence: u64) -> Guard {
        Guard {
            inner,
            fence,
            over: false,
        }
    }

    /// The fence of this ownership: larger than that of every earlier one of the same mutex.
    ///
    /// Pass it to whatever you protect, and let that refuse a smaller one than it has seen: then even
    /// what this library assumes about clocks and servers need not hold.
    #[must_use]
    pub fn fence(&self) -> u64 {
        self.fence
    }

    /// Whether the lock is surely ours: right at the moment of the call, even while renewal is blocked,
    /// the backend is gone or the machine has slept. Once false, it stays false.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        self.inner.holding.board().fence() == Some(self.fence)
    }

    /// How long the lock is surely ours without a further renewal; zero once it is not.
    #[must_use]
    pub fn valid_for(&self) -> Duration {
        self.inner.holding.board().valid_for()
    }

    /// A receiver of one message, sent at the end of the ttl when renewal failed, or as soon as the
    /// backend says that the lock is somebody else's. The transition is the time to stop in: nobody else
    /// can lock before it has ended. At most a quarter of it may have passed when the message comes,
    /// where calls to the backend hang.
    ///
    /// Each call returns a receiver of its own, usable in crossbeam's `select!`. It is disconnected,
    /// without a message, when the guard was dropped before.
    #[must_use]
    pub fn lost(&self) -> Receiver<()> {
        self.inner.holding.loss().receiver()
    }

    /// Releases the lock, and says whether it was still ours to release.
    ///
    /// `false`: the lease had ended or been taken away before, so what was done under the lock may not
    /// have been done alone.
    ///
    /// # Errors
    /// Trouble with the backend, such that the outcome is unknown. The lease then ends by itself; the
    /// guard is gone either way.
    pub fn unlock(mut self) -> Result<bool> {
        self.end()
    }

    fn end(&mut self) -> Result<bool> {
        if std::mem::replace(&mut self.over, true) {
            return Ok(false);
        }
        // In a child process the lock is still the parent's.
        self.inner.factory.backend()?;
        let _turn = self.inner.turnstile.resume();
        self.inner.holding.release(self.inner.factory.renewer())
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            let mutex = &self.inner.holding.place().mutex;
            log::warn!("{mutex}: released without an answer, the lease ends by itself: {error}");
        }
    }
}

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guard")
            .field("mutex", &self.inner.holding.place().mutex)
            .field("id", &self.inner.holding.place().id)
            .field("fence", &self.fence)
            .field("valid_for", &self.valid_for())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;
    use crate::lease::Lease;
    use crate::locker::Locker;

    /// Rule 12: the lock is the parent's still, and the parent's threads may hold the locks in the way.
    #[test]
    fn a_guard_that_ends_in_a_child_process_releases_nothing() {
        let factory = crate::memory::factory("guard-fork", Lease::default());
        let mut guard = factory.locker("m").build().unwrap().lock().unwrap();
        let inner = Arc::get_mut(&mut guard.inner).unwrap();
        inner.factory.seen_from_a_child();
        assert_eq!(guard.unlock().unwrap_err().kind(), ErrorKind::Forked);
        let other = factory.locker("m").build().unwrap();
        assert_eq!(other.try_lock().unwrap_err().kind(), ErrorKind::Held);
    }

    #[test]
    fn lockers_and_guards_go_between_threads() {
        fn shared<T: Send + Sync + 'static>() {}
        shared::<Locker>();
        shared::<Guard>();
    }
}
