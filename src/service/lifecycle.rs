//! The life of a worker thread: started, stopped, restarted, and never waited for without an end.

use std::fmt;
use std::sync::Arc;
use std::thread::{self, JoinHandle, ThreadId};

use parking_lot::{Condvar, Mutex};

use super::courier;
use crate::bell::Bell;
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::fork::Origin;

/// Where a service is in its life: `Initial -> Starting -> Running -> Stopping -> Initial`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Status {
    /// Not started, or stopped.
    Initial,
    /// Its thread is being started.
    Starting,
    /// At work.
    Running,
    /// Giving back what it holds.
    Stopping,
}

impl Status {
    /// Starting or running.
    #[must_use]
    pub fn is_active(self) -> bool {
        matches!(self, Status::Starting | Status::Running)
    }
}

pub(crate) struct Lifecycle {
    stage: Arc<Stage>,
    thread: Mutex<Option<JoinHandle<()>>>,
    origin: Origin,
}

struct Stage {
    run: Mutex<Run>,
    changed: Condvar,
}

struct Run {
    status: Status,
    /// Counts the starts, so that who waits for the end of one run is not held up by the next.
    number: u64,
    bell: Bell,
    /// The number of the courier whose callbacks belong to this run.
    courier: u64,
    /// The worker's thread, once it runs: known from the inside, before `start` has its handle.
    worker: Option<ThreadId>,
}

/// Says `Initial` when the worker is over, even if it panicked.
struct Over(Arc<Stage>);

impl Drop for Over {
    fn drop(&mut self) {
        self.0.run.lock().status = Status::Initial;
        self.0.changed.notify_all();
    }
}

impl Lifecycle {
    pub(crate) fn new() -> Lifecycle {
        Lifecycle {
            stage: Arc::new(Stage {
                run: Mutex::new(Run {
                    status: Status::Initial,
                    number: 0,
                    bell: Bell::new(),
                    courier: 0,
                    worker: None,
                }),
                changed: Condvar::new(),
            }),
            thread: Mutex::new(None),
            origin: Origin::here(),
        }
    }

    pub(crate) fn status(&self) -> Status {
        self.stage.run.lock().status
    }

    /// Runs what `prepare` returns on a thread called `name`. `courier` is the number of the courier
    /// that the run's callbacks come from.
    pub(crate) fn start<W>(
        &self,
        name: String,
        prepare: impl FnOnce() -> Result<(W, u64)>,
    ) -> Result<()>
    where
        W: FnOnce(Bell) + Send + 'static,
    {
        self.origin.check()?;
        {
            let mut run = self.stage.run.lock();
            if run.status != Status::Initial {
                return Err(Error::new(
                    ErrorKind::InvalidState,
                    format!(
                        "{name}: already started, now {:?}; stop it before starting it again",
                        run.status
                    ),
                ));
            }
            run.status = Status::Starting;
            run.number += 1;
            run.bell = Bell::new();
            run.courier = 0;
            run.worker = None;
        }
        let over = Over(Arc::clone(&self.stage));
        let (work, courier) = prepare()?;
        let bell = {
            let mut run = self.stage.run.lock();
            run.courier = courier;
            run.bell.clone()
        };
        let thread = thread::Builder::new().name(name.clone()).spawn(move || {
            {
                let mut run = over.0.run.lock();
                run.worker = Some(thread::current().id());
                if run.status == Status::Starting {
                    run.status = Status::Running;
                }
            }
            work(bell);
        });
        match thread {
            Ok(thread) => {
                // The last run's thread is over, or about to be: it has said `Initial`.
                *self.thread.lock() = Some(thread);
                Ok(())
            }
            Err(error) => Err(Error::new(
                ErrorKind::Unavailable,
                format!("{name}: cannot start a thread; the system allows no more of them"),
            )
            .with_source(error)),
        }
    }

    /// Asks the worker to stop, and waits for it until `deadline`; not from inside one of its callbacks,
    /// nor on its own thread.
    pub(crate) fn stop(&self, name: &str, deadline: Moment) -> Result<()> {
        self.origin.check()?;
        let mut run = self.stage.run.lock();
        if run.status != Status::Initial {
            run.status = Status::Stopping;
            run.bell.stop();
            if courier::is_inside(run.courier) || run.worker == Some(thread::current().id()) {
                return Ok(());
            }
        }
        let number = run.number;
        while run.status != Status::Initial && run.number == number {
            let left = deadline.remaining();
            if left.is_zero() {
                return Err(Error::new(
                    ErrorKind::Timeout,
                    format!(
                        "{name}: still stopping; its thread ends by itself when its call or callback does"
                    ),
                ));
            }
            self.stage.changed.wait_for(&mut run, left);
        }
        if run.status == Status::Initial {
            // No start can come in between: the handle is that of a worker that is over.
            let thread = self.thread.lock().take();
            drop(run);
            if let Some(thread) = thread
                && thread.thread().id() != thread::current().id()
            {
                let _ = thread.join();
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Lifecycle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.status())
    }
}
