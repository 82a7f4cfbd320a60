//! The life of a worker thread: started, stopped, restarted, and never waited for without an end.

use std::fmt;
use std::sync::Arc;
use std::thread::ThreadId;

use parking_lot::Mutex;

use super::delivery::{self, Recipient};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::parker::{Parker, Unparker};
use crate::thread::{self, Thread};
use crate::virtual_time::Condvar;

/// The status of a service: `Initial -> Starting -> Running -> Stopping -> Initial`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Status {
    /// Not started, or stopped.
    #[default]
    Initial,
    /// Its thread is being started.
    Starting,
    /// Its thread is running.
    Running,
    /// It is giving back what it holds.
    Stopping,
}

impl Status {
    /// Returns `true` for `Starting` and `Running`.
    ///
    /// ```
    /// use contend::Status;
    ///
    /// assert!(Status::Running.is_active() && !Status::Stopping.is_active());
    /// ```
    #[must_use]
    pub fn is_active(self) -> bool {
        matches!(self, Status::Starting | Status::Running)
    }
}

/// What can be asked of every service whose field `inner` has a `lifecycle` and a `shared`.
macro_rules! service_getters {
    () => {
        /// Returns the status of the service.
        ///
        /// ```
        /// use contend::Status;
        ///
        /// let factory = contend::connect("memory://status-doc")?;
        /// let service = factory.contend("demo").build()?;
        /// assert_eq!(service.status(), Status::Initial);
        /// service.start()?;
        /// assert!(matches!(service.status(), Status::Starting | Status::Running));
        /// # Ok::<(), contend::Error>(())
        /// ```
        #[must_use]
        pub fn status(&self) -> $crate::Status {
            self.inner
                .here()
                .map_or($crate::Status::Initial, |inner| inner.lifecycle.status())
        }

        /// Returns `true` if the status is `Starting` or `Running`.
        #[must_use]
        pub fn is_active(&self) -> bool {
            self.status().is_active()
        }

        /// Returns `true` if the status is `Running`.
        #[must_use]
        pub fn running(&self) -> bool {
            self.status() == $crate::Status::Running
        }

        /// Returns the last change of ownership that the service saw.
        ///
        /// ```
        /// let factory = contend::connect("memory://state-doc")?;
        /// let (service, events) = factory.contend("demo").id("a").channel()?;
        /// service.start()?;
        /// events.recv().unwrap(); // Acquired
        /// assert!(service.state().is_owner("a"));
        /// # Ok::<(), contend::Error>(())
        /// ```
        #[must_use]
        pub fn state(&self) -> $crate::MutexState {
            self.inner
                .here()
                .map_or($crate::MutexState::NONE, |inner| inner.shared.state())
        }

        /// Returns the error of the backend, or why the service stepped down for good. Returns `None` once that has
        /// passed, and before the first call (see [`contact`](Self::contact)).
        ///
        /// ```
        /// let factory = contend::connect("memory://last-error-doc")?;
        /// let service = factory.contend("demo").build()?;
        /// service.start()?;
        /// if let Some(error) = service.last_error() {
        ///     println!("not leading, because {error}");
        /// }
        /// # Ok::<(), contend::Error>(())
        /// ```
        #[must_use]
        pub fn last_error(&self) -> Option<$crate::Error> {
            self.inner.here()?.shared.last_error()
        }

        /// Returns whether the service's calls are answered. Distinguishes "not tried yet" from "fine".
        ///
        /// ```
        /// use contend::Contact;
        ///
        /// let factory = contend::connect("memory://contact-doc")?;
        /// let service = factory.contend("demo").build()?;
        /// match service.contact() {
        ///     Contact::Failing { error, lasting } => println!("{error}, for {lasting:?} now"),
        ///     contact => println!("{contact:?}"),
        /// }
        /// # Ok::<(), contend::Error>(())
        /// ```
        #[must_use]
        pub fn contact(&self) -> $crate::Contact {
            self.inner
                .here()
                .map_or($crate::Contact::Untried, |inner| inner.shared.contact())
        }
    };
}
pub(crate) use service_getters;

pub(crate) struct Lifecycle {
    stage: Arc<Stage>,
    thread: Mutex<Option<Thread>>,
    /// Tells its callbacks from those of others.
    callbacks: usize,
}

/// What a worker and its handle share.
#[derive(Default)]
struct Stage {
    run: Mutex<Run>,
    changed: Condvar,
}

#[derive(Default)]
struct Run {
    status: Status,
    /// Counts the starts: a wait for the end of one run is not held up by the next.
    number: u64,
    parker: Parker,
    /// The worker's thread, once it runs: known from the inside, before `start` has its handle.
    worker: Option<ThreadId>,
}

/// Sets `Initial` when the worker is over, even if it panicked.
struct Over(Arc<Stage>);

impl Drop for Over {
    fn drop(&mut self) {
        self.0.run.lock().status = Status::Initial;
        self.0.changed.notify_all();
    }
}

impl Lifecycle {
    pub(crate) fn new(recipient: &Recipient) -> Lifecycle {
        Lifecycle {
            stage: Arc::default(),
            thread: Mutex::default(),
            callbacks: recipient.number(),
        }
    }

    pub(crate) fn status(&self) -> Status {
        self.stage.run.lock().status
    }

    /// Runs what `prepare` returns on a thread called `name`.
    pub(crate) fn start<W>(
        &self,
        name: String,
        prepare: impl FnOnce(&Parker) -> Result<W>,
    ) -> Result<()>
    where
        W: FnOnce(Parker) + Send + 'static,
    {
        let parker = {
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
            *run = Run {
                status: Status::Starting,
                number: run.number + 1,
                ..Run::default()
            };
            run.parker.clone()
        };
        let over = Over(Arc::clone(&self.stage));
        let work = prepare(&parker)?;
        let thread = thread::start(name, move || {
            {
                let mut run = over.0.run.lock();
                run.worker = Some(std::thread::current().id());
                if run.status == Status::Starting {
                    run.status = Status::Running;
                }
            }
            work(parker);
        })?;
        // The last run's thread is over, or about to be: it has said `Initial`.
        *self.thread.lock() = Some(thread);
        Ok(())
    }

    /// The present worker's parker, to send it a message; `None` where there is none, or it is stopping.
    pub(crate) fn unparker(&self) -> Option<Unparker> {
        let run = self.stage.run.lock();
        run.status.is_active().then(|| run.parker.unparker())
    }

    /// Whether the calling thread is the worker, or runs one of its callbacks.
    pub(crate) fn is_inside(&self) -> bool {
        delivery::is_inside(self.callbacks)
            || self.stage.run.lock().worker == Some(std::thread::current().id())
    }

    /// Asks the worker to stop, lets the caller `help` before the worker hears of it, and waits for it until `deadline`;
    /// not from inside one of its callbacks, nor on its own thread.
    pub(crate) fn stop(&self, name: &str, deadline: Moment, help: impl FnOnce()) -> Result<()> {
        let inside = self.is_inside();
        let mut run = self.stage.run.lock();
        let number = run.number;
        if run.status != Status::Initial {
            run.status = Status::Stopping;
            let parker = run.parker.clone();
            if inside {
                parker.stop();
                return Ok(());
            }
            parker.mark_stopped();
            drop(run);
            help();
            parker.stop();
            run = self.stage.run.lock();
        }
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
            if let Some(mut thread) = thread {
                thread.join(deadline);
            }
        }
        Ok(())
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Status::Initial => "initial",
            Status::Starting => "starting",
            Status::Running => "running",
            Status::Stopping => "stopping",
        })
    }
}
