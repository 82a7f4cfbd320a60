//! How a waiting worker is reached: one bell, rung by the backend (look again) or by a caller (stop).

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::clock::Moment;

/// The worker's end: it sleeps on this, and on nothing else.
#[derive(Clone, Default)]
pub struct Bell {
    inner: Arc<Inner>,
}

/// The backend's end of a [`Bell`]: "something changed, look again".
///
/// Ringing never blocks and may happen from any thread, at any time, any number of times: rings that
/// nobody has answered yet count as one, and one that comes while the worker is busy is kept for it.
#[derive(Clone)]
pub struct Waker {
    inner: Arc<Inner>,
}

#[derive(Default)]
struct Inner {
    rings: Mutex<Rings>,
    changed: Condvar,
}

#[derive(Clone, Copy, Default)]
struct Rings {
    woken: bool,
    stopped: bool,
    /// How many sleep on it at the moment: the worker, or nobody.
    sleepers: usize,
}

/// Why a wait on a [`Bell`] ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ring {
    /// Somebody asked the worker to stop. Stays so until the bell is thrown away.
    Stop,
    /// The backend says that something changed.
    Wake,
    /// Nothing happened in time.
    Silence,
}

impl Bell {
    /// A silent bell.
    #[must_use]
    pub fn new() -> Bell {
        Bell::default()
    }

    /// The end that is given to a backend.
    #[must_use]
    pub fn waker(&self) -> Waker {
        Waker {
            inner: Arc::clone(&self.inner),
        }
    }

    /// Asks the worker to stop.
    pub fn stop(&self) {
        self.inner.rings.lock().stopped = true;
        self.inner.changed.notify_all();
    }

    /// Whether somebody asked to stop.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.inner.rings.lock().stopped
    }

    /// Sleeps until somebody rings, or until `deadline`. A wake-up is consumed, a stop is not.
    pub fn wait(&self, deadline: Moment) -> Ring {
        self.sleep(deadline, true)
    }

    /// Sleeps until a wake-up or `deadline`, for one who has been told to stop already.
    pub fn wait_stopping(&self, deadline: Moment) -> Ring {
        self.sleep(deadline, false)
    }

    fn sleep(&self, deadline: Moment, heed_stop: bool) -> Ring {
        let mut rings = self.inner.rings.lock();
        loop {
            if heed_stop && rings.stopped {
                return Ring::Stop;
            }
            if rings.woken {
                rings.woken = false;
                return Ring::Wake;
            }
            let left = deadline.remaining();
            if left.is_zero() {
                return Ring::Silence;
            }
            // The condition variable's own arithmetic must not overflow on a far deadline.
            let left = left.min(Duration::from_secs(3600));
            rings.sleepers += 1;
            self.inner.changed.wait_for(&mut rings, left);
            rings.sleepers -= 1;
        }
    }
}

impl Waker {
    /// Rings: the worker looks again as soon as it can.
    pub fn wake(&self) {
        let before = std::mem::replace(&mut self.inner.rings.lock().woken, true);
        if !before {
            // Not with the lock held: whoever wakes up needs it first of all.
            self.inner.changed.notify_all();
        }
    }

    /// Whether somebody sleeps on the bell who was not told to stop: it would answer a ring at once.
    #[must_use]
    pub fn is_awaited(&self) -> bool {
        let rings = self.inner.rings.lock();
        rings.sleepers > 0 && !rings.stopped
    }

    /// Whether both ends belong to the same bell.
    #[must_use]
    pub fn same(&self, other: &Waker) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }
}

impl fmt::Debug for Bell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Bell")
    }
}

impl fmt::Debug for Waker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Waker")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_before_the_wait_is_kept_and_many_count_as_one() {
        let bell = Bell::new();
        bell.waker().wake();
        bell.waker().wake();
        assert_eq!(bell.wait(Moment::now()), Ring::Wake);
        assert_eq!(bell.wait(Moment::now()), Ring::Silence);
    }

    #[test]
    fn stop_stays_and_comes_first() {
        let bell = Bell::new();
        bell.waker().wake();
        bell.stop();
        assert_eq!(bell.wait(Moment::FAR), Ring::Stop);
        assert_eq!(bell.wait(Moment::FAR), Ring::Stop);
        assert_eq!(bell.wait_stopping(Moment::FAR), Ring::Wake);
    }
}
