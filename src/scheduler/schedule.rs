//! `Scheduler`: runs work at its times while this process leads.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::config::ScheduleConfig;
use super::rounds::{Rounds, Work};
use super::term::Term;
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::service::{Lifecycle, MutexContendService, Status};

/// Runs work at a fixed rate or with a fixed delay, on whichever process leads.
///
/// Run it in as many processes as you like: one of them works, and when it goes another one goes on. Work
/// is never running in two of them at once as long as it heeds [`Context::cancelled`](super::Context::cancelled)
/// within the transition; a fence keeps out work that does not.
///
/// ```
/// use contend::ScheduleConfig;
/// use std::time::Duration;
///
/// let factory = contend::connect("memory://scheduler-doc")?;
/// let (done, runs) = crossbeam_channel::unbounded();
/// let scheduler = factory
///     .scheduler("clean-up")
///     .build(
///         ScheduleConfig::rate(Duration::ZERO, Duration::from_millis(10)),
///         move |context| {
///             assert!(context.is_leader());
///             done.send(context.fence())?;
///             Ok(())
///         },
///     )?;
/// scheduler.start()?;
///
/// let fence = runs.recv().unwrap();
/// assert_eq!(runs.recv().unwrap(), fence); // the same leadership
/// scheduler.stop()?;
/// assert!(!scheduler.is_leader());
/// # Ok::<(), contend::Error>(())
/// ```
pub struct Scheduler {
    service: Arc<MutexContendService>,
    term: Arc<Term>,
    config: ScheduleConfig,
    work: Arc<Mutex<Work>>,
    stop_within: Duration,
    lifecycle: Lifecycle,
}

impl Scheduler {
    pub(super) fn new(
        service: MutexContendService,
        term: Arc<Term>,
        config: ScheduleConfig,
        work: Work,
        stop_within: Duration,
    ) -> Scheduler {
        Scheduler {
            service: Arc::new(service),
            term,
            config,
            work: Arc::new(Mutex::new(work)),
            stop_within,
            lifecycle: Lifecycle::new(),
        }
    }

    /// Starts to contend for the leadership. Returns at once.
    ///
    /// # Errors
    /// `InvalidState` unless the status is `Initial`; `Unavailable` where the system has no thread left;
    /// `Forked` in a child process.
    pub fn start(&self) -> Result<()> {
        let name = format!("schedule {}", self.mutex());
        self.lifecycle.start(name, || {
            self.service.start()?;
            let rounds = Rounds {
                service: Arc::clone(&self.service),
                term: Arc::clone(&self.term),
                config: self.config,
                work: Arc::clone(&self.work),
            };
            Ok((move |bell| rounds.run(&bell), 0))
        })
    }

    /// Begins no more work, waits for what runs, gives the leadership back and ends the threads.
    ///
    /// Running work sees that it is [`cancelled`](super::Context::cancelled), and goes on as the leader
    /// until it returns. Called from inside the work, this returns at once, and all that happens after
    /// the work has returned. Stopping what is not started does nothing.
    ///
    /// # Errors
    /// `Timeout` where the work did not end within
    /// [`stop_within`](super::SchedulerBuilder::stop_within): from then on the lease is no longer
    /// renewed. It is released when the work ends, or runs out before. It is never released under
    /// running work.
    pub fn stop(&self) -> Result<()> {
        let by = Moment::now() + self.stop_within;
        let stopped = self.lifecycle.stop(self.mutex(), by);
        match &stopped {
            Err(error) if error.kind() == ErrorKind::Timeout => {}
            _ => return stopped,
        }
        if !self.term.is_running() {
            // The work has ended; what is left is the service's own way out, which has a bound.
            let by = Moment::now() + self.service.stop_bound();
            return self.lifecycle.stop(self.mutex(), by);
        }
        // Without waiting for it: renewal ends here, and the way out waits for the work by itself.
        let _ = self.service.stop_by(Moment::now());
        Err(Error::new(
            ErrorKind::Timeout,
            format!(
                "{}: the scheduled work still runs {:?} after it was told to stop; leadership is not \
                 renewed any more, and is given up when the work ends or its lease does",
                self.mutex(),
                self.stop_within
            ),
        ))
    }

    /// The mutex that the leader owns.
    #[must_use]
    pub fn mutex(&self) -> &str {
        self.service.mutex()
    }

    /// The id contended under.
    #[must_use]
    pub fn id(&self) -> &str {
        self.service.id()
    }

    /// Whether this process leads: right at the moment of the call.
    #[must_use]
    pub fn is_leader(&self) -> bool {
        self.service.is_owner()
    }

    /// The fence of the present leadership; `None` unless this process leads.
    #[must_use]
    pub fn fence(&self) -> Option<u64> {
        self.service.fence()
    }

    /// Where the scheduler is in its life.
    #[must_use]
    pub fn status(&self) -> Status {
        self.lifecycle.status()
    }

    /// The trouble that the scheduler has with its backend; `None` once that answers again.
    #[must_use]
    pub fn last_error(&self) -> Option<Error> {
        self.service.last_error()
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        if let Err(error) = self.stop() {
            log::warn!("{}: dropped without a clean stop: {error}", self.mutex());
        }
    }
}

impl fmt::Debug for Scheduler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scheduler")
            .field("mutex", &self.mutex())
            .field("id", &self.id())
            .field("config", &self.config)
            .field("status", &self.status())
            .field("fence", &self.fence())
            .finish_non_exhaustive()
    }
}
