//! `VirtualTime`: simulated clocks and threads, for the simulator.
//!
//! Every place where a thread of the core, the services and the lockers blocks goes through a [`Condvar`], [`try_lock_for`] or
//! [`recv_timeout`] of this module. Outside of a simulation, and always without the feature `unstable`,
//! they are those of parking_lot and crossbeam.

use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError};
use parking_lot::{Mutex, MutexGuard};

#[cfg(feature = "unstable")]
pub(crate) use simulated::{Condvar, current};
#[cfg(feature = "unstable")]
pub use simulated::{VirtualTime, enter};

#[cfg(not(feature = "unstable"))]
pub(crate) use parking_lot::Condvar;

/// Locks `mutex` unless that takes longer than `patience`.
pub(crate) fn try_lock_for<T>(mutex: &Mutex<T>, patience: Duration) -> Option<MutexGuard<'_, T>> {
    #[cfg(feature = "unstable")]
    if let Some(time) = current() {
        return simulated::poll(&*time, patience, || mutex.try_lock());
    }
    mutex.try_lock_for(patience)
}

/// Receives a message unless that takes longer than `patience`.
pub(crate) fn recv_timeout<T>(
    receiver: &Receiver<T>,
    patience: Duration,
) -> Result<T, RecvTimeoutError> {
    #[cfg(feature = "unstable")]
    if let Some(time) = current() {
        use crossbeam_channel::TryRecvError;
        let received = simulated::poll(&*time, patience, || match receiver.try_recv() {
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => Some(Err(RecvTimeoutError::Disconnected)),
            Ok(message) => Some(Ok(message)),
        });
        return received.unwrap_or(Err(RecvTimeoutError::Timeout));
    }
    receiver.recv_timeout(patience)
}

#[cfg(feature = "unstable")]
mod simulated {
    use std::cell::RefCell;
    use std::fmt;
    use std::sync::Arc;
    use std::thread::ThreadId;
    use std::time::Duration;

    use parking_lot::MutexGuard;

    use crate::clock::Moment;

    /// A simulated clock and the threads that live by it, of which one runs at a time.
    pub trait VirtualTime: Send + Sync {
        /// Reads the clock of the calling thread.
        fn now(&self) -> Moment;

        /// Returns a number from 0 up to but not including 1.
        fn roll(&self) -> f64;

        /// Blocks the calling thread until `key` is notified, or until the clock shows `until`.
        fn wait(&self, key: usize, until: Moment);

        /// Ends the waits for `key`.
        fn notify(&self, key: usize);

        /// Runs `body` on a simulated thread.
        fn start(&self, name: &str, body: Box<dyn FnOnce() + Send>) -> ThreadId;
    }

    impl fmt::Debug for dyn VirtualTime {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("VirtualTime")
        }
    }

    thread_local! {
        static CURRENT: RefCell<Option<Arc<dyn VirtualTime>>> = const { RefCell::new(None) };
    }

    /// Lets the calling thread live by `time`, or by real time again. Returns what it lived by before.
    pub fn enter(time: Option<Arc<dyn VirtualTime>>) -> Option<Arc<dyn VirtualTime>> {
        CURRENT.replace(time)
    }

    pub(crate) fn current() -> Option<Arc<dyn VirtualTime>> {
        CURRENT.try_with(|current| current.borrow().clone()).ok()?
    }

    /// Looks again and again, ever less often, until there is something or `patience` is over.
    pub(super) fn poll<T>(
        time: &dyn VirtualTime,
        patience: Duration,
        mut look: impl FnMut() -> Option<T>,
    ) -> Option<T> {
        let deadline = time.now() + patience;
        let mut pause = Duration::from_micros(100);
        loop {
            if let Some(found) = look() {
                return Some(found);
            }
            if deadline <= time.now() {
                return None;
            }
            time.wait(0, deadline.min(time.now() + pause));
            pause = (pause * 2).min(Duration::from_millis(20));
        }
    }

    /// A condition variable that a simulated thread waits for in virtual time.
    #[derive(Debug, Default)]
    pub(crate) struct Condvar {
        real: parking_lot::Condvar,
    }

    impl Condvar {
        pub(crate) fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
            match current() {
                Some(time) => MutexGuard::unlocked(guard, || time.wait(self.key(), Moment::FAR)),
                None => self.real.wait(guard),
            }
        }

        pub(crate) fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, patience: Duration) {
            match current() {
                Some(time) => MutexGuard::unlocked(guard, || {
                    time.wait(self.key(), time.now() + patience);
                }),
                None => {
                    self.real.wait_for(guard, patience);
                }
            }
        }

        pub(crate) fn notify_all(&self) {
            match current() {
                Some(time) => time.notify(self.key()),
                None => {
                    self.real.notify_all();
                }
            }
        }

        /// Tells it from all others that live at the same time.
        fn key(&self) -> usize {
            std::ptr::from_ref(self).addr()
        }
    }
}
