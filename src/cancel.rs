//! `Cancel`: ends a wait from another thread.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::clock::Moment;
use crate::error::{Error, ErrorKind};
use crate::parker::Unparker;

/// Ends blocked calls from another thread: `lock`, `lock_all` and waiting acquires of permits.
///
/// Clones share one state. A call that is given a cancelled `Cancel` returns [`ErrorKind::Cancelled`]
/// without waiting; a call that waits returns it at once, leaves the queue and keeps nothing. Once
/// cancelled, it stays cancelled: create a new one for the next wait.
///
/// A request that is under way is waited for, up to its limit: a quarter of the ttl, at most 2 s.
///
/// ```
/// use contend::{Cancel, ErrorKind};
/// use std::thread;
///
/// let factory = contend::connect("memory://cancel-doc")?;
/// let guard = factory.locker("reports").build()?.lock()?;
///
/// let cancel = Cancel::new();
/// let waiting = factory.locker("reports").cancel(&cancel).build()?;
/// let waits = thread::spawn(move || waiting.lock().map(drop));
/// cancel.cancel(); // as from the thread that handles SIGTERM
/// assert_eq!(waits.join().unwrap().unwrap_err().kind(), ErrorKind::Cancelled);
/// # drop(guard);
/// # Ok::<(), contend::Error>(())
/// ```
#[derive(Clone, Default)]
pub struct Cancel {
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    cancelled_at: Option<Moment>,
    next: u64,
    /// Who waits at the moment.
    waiting: HashMap<u64, Unparker>,
}

impl Cancel {
    /// Creates a `Cancel` that is not cancelled.
    #[must_use]
    pub fn new() -> Cancel {
        Cancel::default()
    }

    /// Ends every wait that was given this `Cancel` or a clone of it, now and later.
    ///
    /// ```
    /// use contend::Cancel;
    ///
    /// let cancel = Cancel::new();
    /// let clone = cancel.clone(); // for another thread
    /// clone.cancel();
    /// assert!(cancel.is_cancelled());
    /// ```
    pub fn cancel(&self) {
        let waiting = {
            let mut state = self.state.lock();
            state.cancelled_at.get_or_insert_with(Moment::now);
            std::mem::take(&mut state.waiting)
        };
        for (_, unparker) in waiting {
            unparker.unpark();
        }
    }

    /// Returns `true` if [`cancel`](Cancel::cancel) was called.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.state.lock().cancelled_at.is_some()
    }

    pub(crate) fn cancelled_at(&self) -> Option<Moment> {
        self.state.lock().cancelled_at
    }

    /// Unparks `unparker` on [`cancel`](Cancel::cancel), for as long as the returned value lives; at
    /// once if that has happened already.
    pub(crate) fn watch(&self, unparker: &Unparker) -> Watched {
        let mut state = self.state.lock();
        let number = state.next;
        state.next += 1;
        if state.cancelled_at.is_some() {
            unparker.unpark();
        } else {
            state.waiting.insert(number, unparker.clone());
        }
        Watched {
            cancel: self.clone(),
            number,
        }
    }
}

/// A wait that can be cancelled; dropping it ends that.
pub(crate) struct Watched {
    cancel: Cancel,
    number: u64,
}

impl Drop for Watched {
    fn drop(&mut self) {
        let mut state = self.cancel.state.lock();
        state.waiting.remove(&self.number);
    }
}

/// The error of a wait that was cancelled.
pub(crate) fn cancelled(what: impl fmt::Display) -> Error {
    Error::new(
        ErrorKind::Cancelled,
        format!("{what}: the wait was cancelled; nothing is kept"),
    )
}

impl fmt::Debug for Cancel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cancel")
            .field("is_cancelled", &self.is_cancelled())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parker::{Parker, Unparked};

    #[test]
    fn cancel_reaches_its_waiters_alone() {
        let cancel = Cancel::new();
        let (left, waits, late) = (Parker::new(), Parker::new(), Parker::new());
        drop(cancel.watch(&left.unparker()));
        let _watched = cancel.watch(&waits.unparker());
        cancel.clone().cancel();
        let _late = cancel.watch(&late.unparker());
        assert_eq!(left.park(Moment::now()), Unparked::Timeout);
        assert_eq!(waits.park(Moment::now()), Unparked::Wake);
        assert_eq!(late.park(Moment::now()), Unparked::Wake);
        assert!(cancel.is_cancelled());
    }
}
