//! `Parker` and `Unparker`: how one thread wakes another, or asks it to stop.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use crate::clock::Moment;
use crate::virtual_time::Condvar;

/// The longest single sleep. Condition variables sleep on the monotonic clock, which stands still
/// while the machine is suspended; deadlines are on the boot-time clock, which does not.
pub(crate) const SLICE: Duration = Duration::from_secs(5);

/// A waiting thread's end: it sleeps on this, and on nothing else.
#[derive(Clone, Default)]
pub struct Parker {
    inner: Arc<Inner>,
}

/// The other end of a [`Parker`]: "something changed, look again".
///
/// Unparking never blocks, and may happen from any thread at any time. A call that comes while the thread is
/// busy is kept for it; several count as one.
#[derive(Clone)]
pub struct Unparker {
    inner: Arc<Inner>,
}

#[derive(Default)]
struct Inner {
    calls: Mutex<Calls>,
    changed: Condvar,
}

#[derive(Clone, Copy, Default)]
struct Calls {
    woken: bool,
    stopped_at: Option<Moment>,
}

/// Why a thread is not parked any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unparked {
    /// It was asked to stop. Stays so until the parker is thrown away.
    Stop,
    /// The backend says that something changed.
    Wake,
    /// Nothing happened in time.
    Timeout,
}

impl Parker {
    /// Makes a parker that was not unparked yet.
    #[must_use]
    pub fn new() -> Parker {
        Parker::default()
    }

    /// Returns the other end.
    #[must_use]
    pub fn unparker(&self) -> Unparker {
        Unparker {
            inner: Arc::clone(&self.inner),
        }
    }

    /// Asks the thread to stop.
    pub fn stop(&self) {
        self.mark_stopped();
        self.inner.changed.notify_all();
    }

    /// Marks the thread as stopped without waking it.
    pub(crate) fn mark_stopped(&self) {
        (self.inner.calls.lock().stopped_at).get_or_insert_with(Moment::now);
    }

    /// Returns when it was stopped first.
    pub(crate) fn stopped_at(&self) -> Option<Moment> {
        self.inner.calls.lock().stopped_at
    }

    /// Returns `true` if the thread was asked to stop.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.stopped_at().is_some()
    }

    /// Sleeps until unparked, or until `deadline`. A wake-up is consumed, a stop is not.
    pub fn park(&self, deadline: Moment) -> Unparked {
        let mut calls = self.inner.calls.lock();
        loop {
            if calls.stopped_at.is_some() {
                return Unparked::Stop;
            }
            if std::mem::take(&mut calls.woken) {
                return Unparked::Wake;
            }
            let left = deadline.remaining();
            if left.is_zero() {
                return Unparked::Timeout;
            }
            self.inner.changed.wait_for(&mut calls, left.min(SLICE));
        }
    }
}

impl Unparker {
    /// Makes the thread look again as soon as it can.
    pub fn unpark(&self) {
        let before = std::mem::replace(&mut self.inner.calls.lock().woken, true);
        if !before {
            // Not with the lock held: the thread that wakes up needs it first of all.
            self.inner.changed.notify_all();
        }
    }

    /// Returns `true` if both ends belong to the same parker.
    #[must_use]
    pub fn same(&self, other: &Unparker) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }
}

impl fmt::Debug for Parker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Parker")
    }
}

impl fmt::Debug for Unparker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Unparker")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn early_unparks_count_as_one() {
        let parker = Parker::new();
        parker.unparker().unpark();
        parker.unparker().unpark();
        assert_eq!(parker.park(Moment::now()), Unparked::Wake);
        assert_eq!(parker.park(Moment::now()), Unparked::Timeout);
    }

    #[test]
    fn stop_stays_and_comes_first() {
        let parker = Parker::new();
        parker.unparker().unpark();
        parker.stop();
        assert_eq!(parker.park(Moment::FAR), Unparked::Stop);
        assert_eq!(parker.park(Moment::FAR), Unparked::Stop);
    }
}
