//! `Scheduler`: runs work at its times while this process leads. Its builder, and what it reports.

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use log::Level;
use parking_lot::{Condvar, Mutex};

use super::job::{Context, ScheduledJob, Work, WorkError, chain};
use super::schedule::Schedule;
use crate::error::{Error, ErrorKind, Result};
use crate::factory::Factory;
use crate::lease::Lease;
use crate::probe::RunOutcomeKind;
use crate::service::settings::contender_setters;
use crate::service::{ContendBuilder, MutexContendService, Status};
use crate::thread::Local;

/// Runs work on a [`Schedule`], in whichever process leads.
///
/// Start it in as many processes as you like: one of them runs the work, and when it stops, another
/// continues where it left off. Dropping the scheduler stops it, so keep it.
///
/// ```
/// use contend::Schedule;
/// use std::time::Duration;
///
/// let factory = contend::connect("memory://scheduler-doc")?;
/// let (done, runs) = crossbeam_channel::unbounded();
/// let scheduler = factory
///     .scheduler("clean-up")
///     .start(Schedule::every(Duration::from_millis(10)), move |context| {
///         assert!(context.is_leader());
///         done.send(context.fence())
///     })?;
///
/// let fence = runs.recv().unwrap();
/// assert_eq!(runs.recv().unwrap(), fence); // the same leadership
/// scheduler.stop()?;
/// assert!(!scheduler.is_leader());
/// # Ok::<(), contend::Error>(())
/// ```
///
/// # When leadership is lost while work runs
/// The work is cancelled at once: [`Context::is_cancelled`] is `true` and
/// [`Context::cancelled`] is closed as soon as this process no longer leads. The work then has the
/// transition of the lease to stop; no other process leads before that has ended. Work that continues for
/// longer overlaps with that of the next leader. To protect against this, pass [`Context::fence`] to the
/// resource that the work writes to, and let it reject any write whose fence is lower than the highest it
/// has seen.
#[must_use = "a scheduler that is dropped stops"]
pub struct Scheduler {
    service: MutexContendService,
    job: Local<Arc<ScheduledJob>>,
    stop_within: Duration,
}

impl Scheduler {
    /// Starts contending for leadership. Returns at once.
    ///
    /// ```
    /// use contend::Schedule;
    /// use std::time::Duration;
    ///
    /// let factory = contend::connect("memory://scheduler-start-doc")?;
    /// let hourly = Schedule::every(Duration::from_secs(3600));
    /// let builder = factory.scheduler("clean-up");
    /// let scheduler = builder.build(hourly, |_| println!("cleaning up"))?;
    /// scheduler.start()?;
    /// scheduler.stop()?;
    /// scheduler.start()?; // the next run is due an hour after the last one
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// # Errors
    /// `InvalidState` unless the status is `Initial`; `Unavailable` if the system cannot start another
    /// thread; `Forked` in a child process.
    pub fn start(&self) -> Result<()> {
        let job = self.job.get()?;
        // The first Acquired callback waits for this lock.
        let mut control = job.control.lock();
        self.service.start()?;
        control.stopping = false;
        control.service = Some(self.service.clone());
        Ok(())
    }

    /// Begins no more runs, waits for the running one, gives up leadership and ends the threads. A run that
    /// is being recorded at this moment still begins, cancelled from the start, because other processes
    /// count it as made.
    ///
    /// Running work sees that it is [cancelled](Context::is_cancelled), and continues as the leader until
    /// it returns. If called from inside the work, this returns at once, and the scheduler stops after
    /// the work has returned. Stopping a scheduler that is not started does nothing.
    ///
    /// ```
    /// use contend::{Context, Schedule};
    /// use std::time::Duration;
    ///
    /// let factory = contend::connect("memory://scheduler-stop-doc")?;
    /// let (begun, begins) = contend::crossbeam_channel::bounded(1);
    /// let work = move |context: &Context| {
    ///     let _ = begun.send(());
    ///     let _ = context.cancelled().recv(); // closed by the stop
    ///     println!("leaving the rest for the next run");
    /// };
    /// let hourly = Schedule::every(Duration::from_secs(3600));
    /// let scheduler = factory.scheduler("clean-up").start(hourly, work)?;
    /// begins.recv().unwrap();
    /// scheduler.stop()?; // the work has ended when this returns
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Timeout` if the work did not end within [`stop_within`](SchedulerBuilder::stop_within): from then
    /// on the lease is no longer renewed. It is released when the work ends, unless it expires before. It
    /// is never released while the work is running.
    pub fn stop(&self) -> Result<()> {
        let job = self.job.get()?;
        job.request_stop();
        if self.service.is_inside_callback() {
            return Ok(());
        }
        if job.wait_until_idle(self.stop_within) {
            job.control.lock().service = None;
            return self.service.stop();
        }
        // Renewals end here. The release waits for the work by itself.
        self.service.request_stop();
        let (mutex, waited) = (self.service.mutex(), self.stop_within);
        let message = format!(
            "{mutex}: the scheduled work still runs {waited:?} after the stop; leadership is not renewed any \
             more, and ends with the work or with its lease"
        );
        Err(Error::new(ErrorKind::Timeout, message))
    }

    /// Requests a run as soon as possible, outside the schedule: the times of the other runs do not
    /// change, and the run is not recorded. Requests that are still pending count as one. Returns
    /// `false`, and does nothing, if this process does not lead.
    ///
    /// ```
    /// use contend::Schedule;
    ///
    /// let factory = contend::connect("memory://run-now-doc")?;
    /// let (done, runs) = crossbeam_channel::unbounded();
    /// let nightly = Schedule::daily_at("02:30", "UTC")?;
    /// let scheduler = factory
    ///     .scheduler("report")
    ///     .start(nightly, move |context| done.send(context.due()))?;
    /// while !scheduler.run_now() {
    ///     std::thread::yield_now(); // does not lead yet
    /// }
    /// assert_eq!(runs.recv().unwrap(), None);
    /// # Ok::<(), contend::Error>(())
    /// ```
    #[must_use = "nothing runs where this process does not lead"]
    pub fn run_now(&self) -> bool {
        self.job.here().is_some_and(|job| job.request_run())
    }

    /// Returns the mutex that the leader owns.
    #[must_use]
    pub fn mutex(&self) -> &str {
        self.service.mutex()
    }

    /// Returns the id that this scheduler contends under.
    #[must_use]
    pub fn id(&self) -> &str {
        self.service.id()
    }

    /// Returns when the next run is due; `None` unless this process leads.
    ///
    /// ```
    /// use contend::Schedule;
    ///
    /// let factory = contend::connect("memory://next-run-doc")?;
    /// let nightly = Schedule::daily_at("02:30", "UTC")?;
    /// let scheduler = factory.scheduler("report").start(nightly, |_| {})?;
    /// if let Some(next_run) = scheduler.next_run() {
    ///     println!("leading; the next run is due at {next_run:?}");
    /// }
    /// # Ok::<(), contend::Error>(())
    /// ```
    #[must_use]
    pub fn next_run(&self) -> Option<SystemTime> {
        self.job.here()?.control.lock().next_run
    }

    /// Returns `true` if this process leads at the moment of the call.
    #[must_use]
    pub fn is_leader(&self) -> bool {
        self.fence().is_some()
    }

    /// Returns the fence of the current leadership; `None` unless this process leads.
    #[must_use]
    pub fn fence(&self) -> Option<u64> {
        self.service.fence()
    }

    /// Returns the status of the scheduler.
    #[must_use]
    pub fn status(&self) -> Status {
        self.service.status()
    }

    /// Returns the last error of the backend; `None` once it answers again.
    #[must_use]
    pub fn last_error(&self) -> Option<Error> {
        self.service.last_error()
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        match self.stop() {
            Err(error) if error.kind() != ErrorKind::Forked => log::warn!("{error}"),
            _ => {}
        }
    }
}

impl fmt::Debug for Scheduler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (mutex, id, status) = (self.mutex(), self.id(), self.status());
        write!(f, "Scheduler({mutex:?}, {id:?}, {status})")
    }
}

/// Builds a [`Scheduler`]. `build` validates all options and does no I/O.
///
/// The ttl and the transition are those of the leadership: if it is lost, running work has the transition to
/// stop. The jitter is that of contenders; for runs, see [`Schedule::jitter`].
///
/// ```
/// use contend::Schedule;
/// use std::time::Duration;
///
/// let factory = contend::connect("memory://scheduler-builder-doc")?;
/// let scheduler = factory
///     .scheduler("clean-up")
///     .ttl(Duration::from_secs(5))
///     .transition(Duration::from_secs(20)) // what running work may need to stop
///     .stop_within(Duration::from_secs(60))
///     .on_outcome(|report| println!("{:?} after {:?}", report.kind, report.took))
///     .build(Schedule::with_delay(Duration::from_secs(300)), |context| {
///         println!("cleaning up with fence {}", context.fence());
///     })?;
/// scheduler.start()?;
/// assert_eq!(scheduler.mutex(), "clean-up");
/// # Ok::<(), contend::Error>(())
/// ```
#[must_use]
pub struct SchedulerBuilder {
    contend: ContendBuilder,
    stop_within: Duration,
    on_outcome: Box<dyn FnMut(&RunReport) + Send>,
}

impl SchedulerBuilder {
    contender_setters!(contend.settings);

    pub(crate) fn new(factory: &Factory, mutex: Arc<str>) -> SchedulerBuilder {
        SchedulerBuilder {
            contend: ContendBuilder::new(factory.core(), mutex),
            stop_within: Duration::from_secs(30),
            on_outcome: Box::new(|_| {}),
        }
    }

    /// Sets how long [`Scheduler::stop`] waits for running work. Defaults to 30 s.
    ///
    /// ```
    /// use contend::Schedule;
    /// use std::time::Duration;
    ///
    /// let factory = contend::connect("memory://stop-within-doc")?;
    /// let hourly = Schedule::every(Duration::from_secs(3600));
    /// let scheduler = factory
    ///     .scheduler("clean-up")
    ///     .stop_within(Duration::from_secs(300)) // for work that takes minutes
    ///     .start(hourly, |_| println!("cleaning up"))?;
    /// # Ok::<(), contend::Error>(())
    /// ```
    pub fn stop_within(mut self, stop_within: Duration) -> SchedulerBuilder {
        self.stop_within = stop_within;
        self
    }

    /// Sets a callback that is called after each run, on the thread that runs the work. A stop waits for it too.
    /// Failures are logged with or without it. Defaults to none.
    ///
    /// ```
    /// use contend::{RunOutcomeKind, Schedule};
    /// use std::time::Duration;
    ///
    /// let factory = contend::connect("memory://on-outcome-doc")?;
    /// let hourly = Schedule::every(Duration::from_secs(3600));
    /// let scheduler = factory
    ///     .scheduler("clean-up")
    ///     .on_outcome(|report| match report.kind {
    ///         RunOutcomeKind::Ok => println!("ran for {:?}", report.took),
    ///         kind => println!("{kind:?}: {:?}", report.error),
    ///     })
    ///     .start(hourly, |_| println!("cleaning up"))?;
    /// # Ok::<(), contend::Error>(())
    /// ```
    pub fn on_outcome(mut self, on_outcome: impl FnMut(&RunReport) + Send + 'static) -> Self {
        self.on_outcome = Box::new(on_outcome);
        self
    }

    /// Builds a scheduler for `work`, without starting it. Errors and panics of the work are logged and
    /// reported, and the schedule continues.
    ///
    /// ```
    /// use contend::Schedule;
    /// use std::time::Duration;
    ///
    /// let factory = contend::connect("memory://scheduler-build-doc")?;
    /// let hourly = Schedule::every(Duration::from_secs(3600));
    /// let scheduler = factory.scheduler("clean-up").build(hourly, |context| {
    ///     println!("cleaning up with fence {}", context.fence());
    ///     Ok::<(), std::io::Error>(()) // an error would be logged and reported
    /// })?;
    /// assert!(!scheduler.is_leader()); // not started
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// # Errors
    /// `InvalidInput` for a name, id, duration or schedule that is not allowed, `DuplicateContender` for
    /// an id that this factory already contends under, `Forked` in a child process.
    pub fn build<R: WorkResult>(
        self,
        schedule: Schedule,
        mut work: impl FnMut(&Context) -> R + Send + 'static,
    ) -> Result<Scheduler> {
        schedule.check()?;
        let settings = &self.contend.settings;
        let request_limit = Lease::new(settings.ttl, settings.transition)?.request_limit();
        let job = Arc::new(ScheduledJob {
            factory: settings.factory.clone()?,
            request_limit,
            schedule,
            work: Mutex::new(Work {
                run: Box::new(move |context| work(context).into_result()),
                on_outcome: self.on_outcome,
            }),
            control: Mutex::default(),
            changed: Condvar::new(),
        });
        let leads = Arc::clone(&job);
        let service = self.contend.on_acquired(move |event| leads.lead(event));
        Ok(Scheduler {
            // Not on the factory's executor: the callback lasts as long as the leadership.
            service: service.build_on_own_thread()?,
            job: Local::new(job),
            // The loop may be in a call to the backend.
            stop_within: self.stop_within.max(request_limit),
        })
    }

    /// Builds a scheduler for `work` and starts it.
    ///
    /// ```
    /// use contend::Schedule;
    /// use std::time::Duration;
    ///
    /// let factory = contend::connect("memory://scheduler-builder-start-doc")?;
    /// let hourly = Schedule::every(Duration::from_secs(3600));
    /// let scheduler = factory.scheduler("clean-up").start(hourly, |context| {
    ///     println!("cleaning up with fence {}", context.fence());
    /// })?;
    /// scheduler.stop()?;
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`build`](SchedulerBuilder::build) and [`Scheduler::start`].
    pub fn start<R: WorkResult>(
        self,
        schedule: Schedule,
        work: impl FnMut(&Context) -> R + Send + 'static,
    ) -> Result<Scheduler> {
        let scheduler = self.build(schedule, work)?;
        scheduler.start()?;
        Ok(scheduler)
    }
}

impl fmt::Debug for SchedulerBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SchedulerBuilder({:?})", self.contend)
    }
}

/// What scheduled work may return: nothing, or a `Result` whose error converts into a boxed error.
pub trait WorkResult {
    /// Returns the outcome with its error boxed.
    ///
    /// # Errors
    /// The work's own.
    fn into_result(self) -> std::result::Result<(), Box<dyn StdError + Send + Sync>>;
}

impl WorkResult for () {
    fn into_result(self) -> std::result::Result<(), WorkError> {
        Ok(())
    }
}

impl<E: Into<Box<dyn StdError + Send + Sync>>> WorkResult for std::result::Result<(), E> {
    fn into_result(self) -> std::result::Result<(), WorkError> {
        self.map_err(Into::into)
    }
}

/// The outcome of a run of scheduled work.
#[derive(Debug)]
#[non_exhaustive]
pub struct RunReport {
    /// The mutex that the leader owns.
    pub mutex: Arc<str>,
    /// The fence of the leadership that the run began in.
    pub fence: u64,
    /// When the run was due by the wall clock; `None` if it was requested with
    /// [`run_now`](Scheduler::run_now).
    pub due: Option<SystemTime>,
    /// How late it began.
    pub late: Duration,
    /// How long the work took.
    pub took: Duration,
    /// The outcome. Work that was cancelled, or whose leadership was lost, is reported as such whatever
    /// it returned; a panic always as a panic.
    pub kind: RunOutcomeKind,
    /// What the work returned, with its sources, or the message of its panic.
    pub error: Option<Box<dyn StdError + Send + Sync>>,
}

impl RunReport {
    pub(super) fn new(
        context: &Context,
        took: Duration,
        result: std::thread::Result<std::result::Result<(), WorkError>>,
    ) -> RunReport {
        let kind = match &result {
            Err(_) => RunOutcomeKind::Panicked,
            Ok(_) if !context.is_leader() => RunOutcomeKind::Lost,
            Ok(_) if context.is_cancelled() => RunOutcomeKind::Cancelled,
            Ok(Err(_)) => RunOutcomeKind::Failed,
            Ok(Ok(())) => RunOutcomeKind::Ok,
        };
        let result = result.unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<&str>().copied();
            let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
            Err(text.unwrap_or("a panic without a message").into())
        });
        RunReport {
            mutex: context.mutex().into(),
            fence: context.fence(),
            due: context.due(),
            late: context.late(),
            took,
            kind,
            error: result.err(),
        }
    }

    pub(super) fn log(&self) {
        let level = match self.kind {
            RunOutcomeKind::Ok => Level::Debug,
            RunOutcomeKind::Failed | RunOutcomeKind::Panicked => Level::Error,
            RunOutcomeKind::Cancelled => Level::Info,
            RunOutcomeKind::Lost => Level::Warn,
        };
        let (mutex, kind, took) = (&self.mutex, self.kind, self.took);
        let error = self.error.as_deref().map(|error| chain(error));
        let error = error.map_or_else(String::new, |error| format!(": {error}"));
        log::log!(
            level,
            "{mutex}: scheduled work: {kind:?} after {took:?}{error}"
        );
    }
}
