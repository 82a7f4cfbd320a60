//! Threads: one way to start and to join one, and what a `fork` does to them.
//!
//! A `fork` copies memory but neither threads nor the right to use a connection. What was made by the
//! parent must be refused in the child, and must not be dropped there. A drop would wait for threads
//! that do not exist and for locks that stay locked, or close the parent's connections.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{self, ThreadId};

use parking_lot::Mutex;

use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::virtual_time::Condvar;

/// A thread that was started and can be waited for, but not for ever.
#[derive(Debug)]
pub(crate) struct Thread {
    id: ThreadId,
    handle: Option<thread::JoinHandle<()>>,
    end: Arc<End>,
}

#[derive(Debug, Default)]
struct End {
    over: Mutex<bool>,
    changed: Condvar,
}

/// Says that the thread is over, even if it panicked.
struct Ends(Arc<End>);

impl Drop for Ends {
    fn drop(&mut self) {
        *self.0.over.lock() = true;
        self.0.changed.notify_all();
    }
}

/// Starts a thread called `name`. A panic in `body` is logged and ends the thread.
///
/// # Errors
/// `Unavailable` where the system allows no more threads.
pub(crate) fn start(
    name: impl Into<String>,
    body: impl FnOnce() + Send + 'static,
) -> Result<Thread> {
    let name = name.into();
    let end = Arc::new(End::default());
    let ends = Ends(Arc::clone(&end));
    #[cfg(feature = "unstable")]
    if let Some(time) = crate::virtual_time::current() {
        let run = Box::new(move || run(body, ends));
        return Ok(Thread {
            id: time.start(&name, run),
            handle: None,
            end,
        });
    }
    let handle = thread::Builder::new()
        .name(name.clone())
        .spawn(move || run(body, ends))
        .map_err(|error| {
            Error::new(
                ErrorKind::Unavailable,
                format!("{name}: cannot start a thread; the system allows no more of them"),
            )
            .with_source(error)
        })?;
    Ok(Thread {
        id: handle.thread().id(),
        handle: Some(handle),
        end,
    })
}

fn run(body: impl FnOnce(), ends: Ends) {
    let _ends = ends;
    if catch_unwind(AssertUnwindSafe(body)).is_err() {
        let current = thread::current();
        log::error!(
            "the thread {:?} panicked and is over",
            current.name().unwrap_or_default()
        );
    }
}

impl Thread {
    /// Waits until the thread is over. Returns `false` if it is not by `deadline`, or if the calling
    /// thread is this one; it then ends by itself.
    pub(crate) fn join(&mut self, deadline: Moment) -> bool {
        if self.id == thread::current().id() {
            return false;
        }
        let mut over = self.end.over.lock();
        while !*over {
            let left = deadline.remaining();
            if left.is_zero() {
                return false;
            }
            self.end.changed.wait_for(&mut over, left);
        }
        drop(over);
        if let Some(handle) = self.handle.take() {
            let _ = handle.join();
        }
        true
    }

    /// Returns `true` if the thread is over.
    pub(crate) fn is_over(&self) -> bool {
        *self.end.over.lock()
    }
}

/// A value that belongs to the process that made it: refused, and left alone, in a forked child.
///
/// Held by the fronts, so that nothing below them needs to know about processes.
pub(crate) struct Local<T> {
    /// `None` once it was taken out.
    value: Option<T>,
    pid: u32,
}

impl<T> Local<T> {
    pub(crate) fn new(value: T) -> Local<T> {
        Local {
            value: Some(value),
            pid: std::process::id(),
        }
    }

    /// The value.
    ///
    /// # Errors
    /// `Forked` in a child process.
    pub(crate) fn get(&self) -> Result<&T> {
        self.here().ok_or_else(|| {
            Error::new(
                ErrorKind::Forked,
                "this was made by the parent process; connect again after a fork",
            )
        })
    }

    /// The value; `None` in a child process.
    pub(crate) fn here(&self) -> Option<&T> {
        self.value.as_ref().filter(|_| self.is_here())
    }

    /// The value, to be changed; `None` in a child process.
    pub(crate) fn here_mut(&mut self) -> Option<&mut T> {
        let is_here = self.is_here();
        self.value.as_mut().filter(|_| is_here)
    }

    /// Takes the value out, once.
    ///
    /// # Errors
    /// `Forked` in a child process.
    pub(crate) fn take(&mut self) -> Result<Option<T>> {
        // Asking for the process is a system call.
        if self.value.is_some() {
            self.get()?;
        }
        Ok(self.value.take())
    }

    /// Another value of the same process, which was just [asked for](Local::get).
    pub(crate) fn with<U>(&self, value: U) -> Local<U> {
        Local {
            value: Some(value),
            pid: self.pid,
        }
    }

    fn is_here(&self) -> bool {
        self.pid == std::process::id()
    }
}

impl<T: Clone> Clone for Local<T> {
    fn clone(&self) -> Local<T> {
        Local {
            value: self.value.clone(),
            pid: self.pid,
        }
    }
}

impl<T> Drop for Local<T> {
    fn drop(&mut self) {
        if self.value.is_some() && !self.is_here() {
            std::mem::forget(self.value.take());
        }
    }
}

impl<T: fmt::Debug> fmt::Debug for Local<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.here() {
            Some(value) => value.fmt(f),
            None => f.write_str("(of the parent process)"),
        }
    }
}

#[cfg(test)]
impl<T> Local<T> {
    /// This value as a child process sees it.
    pub(crate) fn seen_from_a_child(&mut self) {
        self.pid = self.pid.wrapping_add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn join_has_an_end() {
        let (send, receive) = crossbeam_channel::bounded::<()>(0);
        let mut waits = start("waits", move || {
            let _ = receive.recv();
        })
        .unwrap();
        assert!(!waits.join(Moment::now() + Duration::from_millis(5)));
        drop(send);
        assert!(waits.join(Moment::now() + Duration::from_secs(60)));
        let mut panics = start("panics", || std::panic::resume_unwind(Box::new(()))).unwrap();
        assert!(panics.join(Moment::now() + Duration::from_secs(60)));
    }

    /// A real `fork` needs `unsafe`; what a child sees is another pid.
    #[test]
    fn child_does_not_use_its_parents() {
        let shared = Arc::new(());
        let mut local = Local::new(Arc::clone(&shared));
        assert!(local.get().is_ok());
        local.seen_from_a_child();
        assert_eq!(local.get().unwrap_err().kind(), ErrorKind::Forked);
        drop(local);
        assert_eq!(Arc::strong_count(&shared), 2, "left alone");
    }
}
