//! What the loop knows of the leadership: told by the service's callbacks, which wait for running work.

use parking_lot::{Condvar, Mutex};

use crate::bell::Waker;

#[derive(Debug, Default)]
pub(super) struct Term {
    notes: Mutex<Notes>,
    /// Work has ended.
    idle: Condvar,
}

#[derive(Debug, Default)]
struct Notes {
    /// The fence of the present leadership.
    fence: Option<u64>,
    /// Work is running, in this leadership or a past one.
    running: bool,
    /// The loop's bell.
    waker: Option<Waker>,
}

/// Says that work has ended, even if it panicked.
pub(super) struct Running<'a>(&'a Term);

impl Term {
    /// A run of the loop begins: nobody leads yet.
    pub(super) fn open(&self, waker: Waker) {
        let mut notes = self.notes.lock();
        notes.waker = Some(waker);
    }

    /// A leadership began.
    pub(super) fn begin(&self, fence: Option<u64>) {
        let mut notes = self.notes.lock();
        notes.fence = fence;
        notes.ring();
    }

    /// The leadership is over: nothing more begins in it, and what runs has ended when this returns. The
    /// service sends its release after this, so leadership is never given back under running work.
    pub(super) fn end(&self) {
        let mut notes = self.notes.lock();
        notes.fence = None;
        notes.ring();
        while notes.running {
            self.idle.wait(&mut notes);
        }
    }

    /// The fence of the present leadership.
    pub(super) fn fence(&self) -> Option<u64> {
        self.notes.lock().fence
    }

    pub(super) fn is_running(&self) -> bool {
        self.notes.lock().running
    }

    /// Begins to run work, unless the leadership with this fence is over.
    pub(super) fn run(&self, fence: u64) -> Option<Running<'_>> {
        let mut notes = self.notes.lock();
        if notes.fence != Some(fence) {
            return None;
        }
        notes.running = true;
        Some(Running(self))
    }
}

impl Notes {
    fn ring(&self) {
        if let Some(waker) = &self.waker {
            waker.wake();
        }
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.notes.lock().running = false;
        self.0.idle.notify_all();
    }
}
