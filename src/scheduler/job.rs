//! `ScheduledJob`: the work of a scheduler, and the loop that runs and records it. The loop is the Acquired callback of
//! the scheduler's service. So it has a thread of its own, never delays a renewal, and the service sends no
//! release before it has returned, up to the end of the lease.

use std::error::Error as StdError;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crossbeam_channel::{Receiver, Select, Sender, TryRecvError, bounded};
use parking_lot::{Condvar, Mutex};

use super::schedule::{Clocks, Plan, Recorded, Schedule};
use super::scheduler::RunReport;
use crate::backend::Backend;
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::ownership::Ownership;
use crate::parker::SLICE;
use crate::probe::{Probed, RunOutcomeKind};
use crate::service::MutexContendService;

/// How long the record of a run is kept: longer than the longest period.
const RECORD_KEPT: Duration = Duration::from_secs(400 * 24 * 3600);

/// How long after a failed call to the backend the next one is made.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// The error that work returns, and what a panic in it is turned into.
pub(super) type WorkError = Box<dyn StdError + Send + Sync>;

/// Scheduled work and the hook that is told of its runs.
pub(super) struct Work {
    pub(super) work: Box<dyn FnMut(&Context) -> std::result::Result<(), WorkError> + Send>,
    pub(super) on_outcome: Option<Box<dyn FnMut(&RunReport) + Send>>,
}

/// Informs a run of scheduled work about itself and the leadership that it runs in.
///
/// Long work should check [`is_cancelled`](Context::is_cancelled) between its steps, or wait on
/// [`cancelled`](Context::cancelled), and pass [`fence`](Context::fence) to what it writes to. Clones can
/// be passed to threads that help with the work.
///
/// ```
/// use contend::{Context, Schedule};
/// use std::time::Duration;
///
/// fn clean_up(context: &Context) -> Result<(), std::io::Error> {
///     for table in ["a", "b", "c"] {
///         if context.is_cancelled() {
///             break; // the rest is left for the next run
///         }
///         println!("cleaning up {table} with fence {}", context.fence());
///     }
///     Ok(())
/// }
///
/// let factory = contend::connect("memory://context-doc")?;
/// let hourly = Schedule::every(Duration::from_secs(3600));
/// let scheduler = factory.scheduler("clean-up").start(hourly, clean_up)?;
/// // It works for as long as `scheduler` lives.
/// scheduler.stop()?;
/// # Ok::<(), contend::Error>(())
/// ```
#[derive(Clone)]
pub struct Context {
    mutex: Arc<str>,
    ownership: Ownership,
    cancelled: Receiver<()>,
    run: Run,
}

/// Which run it is.
#[derive(Clone, Copy, Debug)]
struct Run {
    /// `None`: it was requested.
    due: Option<SystemTime>,
    late: Duration,
}

impl Context {
    /// Returns the mutex that the leader owns.
    #[must_use]
    pub fn mutex(&self) -> &str {
        &self.mutex
    }

    /// Returns the fence of the leadership that this run began in: larger than that of every earlier
    /// leader.
    #[must_use]
    pub fn fence(&self) -> u64 {
        self.ownership.fence()
    }

    /// Returns `true` if the leadership that this run began in still lasts at the moment of the call. If
    /// the backend cannot be reached, leadership ends with the ttl; the transition is then the time left
    /// to stop.
    #[must_use]
    pub fn is_leader(&self) -> bool {
        self.ownership.is_valid()
    }

    /// Returns `true` if the work should stop: leadership was lost, or the scheduler is being stopped and
    /// waits for this run.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        !self.is_leader() || self.cancelled.try_recv() == Err(TryRecvError::Disconnected)
    }

    /// Returns a channel that is closed when the work should stop, for `select!`. Nothing is ever sent
    /// on it.
    ///
    /// ```
    /// use contend::{Context, Schedule};
    /// use crossbeam_channel::{Receiver, select};
    ///
    /// fn drain(context: &Context, jobs: &Receiver<String>) {
    ///     loop {
    ///         select! {
    ///             recv(jobs) -> job => match job {
    ///                 Ok(job) => println!("{job} with fence {}", context.fence()),
    ///                 Err(_) => return,
    ///             },
    ///             recv(context.cancelled()) -> _ => return,
    ///         }
    ///     }
    /// }
    /// ```
    #[must_use]
    pub fn cancelled(&self) -> &Receiver<()> {
        &self.cancelled
    }

    /// Returns the time until which this process leads if the lease is not renewed. Each renewal extends
    /// it; once it has passed, [`is_leader`](Context::is_leader) is `false` for good.
    #[must_use]
    pub fn deadline(&self) -> Instant {
        Instant::now() + self.ownership.valid_for()
    }

    /// Returns when this run was due by the wall clock; `None` if [`run_now`](super::Scheduler::run_now)
    /// requested it.
    #[must_use]
    pub fn due(&self) -> Option<SystemTime> {
        self.run.due
    }

    /// Returns how late this run began: after a fail-over, a run that took too long or a pause.
    #[must_use]
    pub fn late(&self) -> Duration {
        self.run.late
    }

    fn report(&self, result: std::thread::Result<std::result::Result<(), WorkError>>) -> RunReport {
        let (kind, error) = match result {
            Ok(Ok(())) => (RunOutcomeKind::Ok, None),
            Ok(Err(error)) => (RunOutcomeKind::Failed, Some(error)),
            Err(panic) => {
                let text = panic.downcast_ref::<&str>().copied();
                let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
                let text = text.unwrap_or("a panic without a message");
                (RunOutcomeKind::Panicked, Some(text.into()))
            }
        };
        let kind = match kind {
            RunOutcomeKind::Panicked => kind,
            _ if !self.is_leader() => RunOutcomeKind::Lost,
            _ if self.is_cancelled() => RunOutcomeKind::Cancelled,
            _ => kind,
        };
        RunReport {
            mutex: Arc::clone(&self.mutex),
            fence: self.fence(),
            due: self.run.due,
            late: self.run.late,
            took: Duration::ZERO,
            kind,
            error,
        }
    }
}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Context")
            .field("mutex", &self.mutex)
            .field("fence", &self.fence())
            .field("run", &self.run)
            .field("is_leader", &self.is_leader())
            .field("is_cancelled", &self.is_cancelled())
            .finish()
    }
}

pub(super) struct ScheduledJob {
    pub(super) backend: Arc<dyn Backend>,
    pub(super) mutex: Arc<str>,
    pub(super) request_limit: Duration,
    pub(super) schedule: Schedule,
    pub(super) probe: Probed,
    pub(super) work: Mutex<Work>,
    pub(super) control: Mutex<Control>,
    /// A leadership has ended, or its work has.
    pub(super) idle: Condvar,
    /// The last run that this process made itself: known even if the backend has lost its record.
    pub(super) own_last_run: Mutex<Option<Moment>>,
    /// The last call that reads or writes a record has failed. It is logged when that changes.
    pub(super) failing: AtomicBool,
}

/// What the loop and the threads that call the scheduler share.
#[derive(Default)]
pub(super) struct Control {
    /// From the start to the stop. Kept here as well, so that the loop can stop it after its last run.
    pub(super) service: Option<MutexContendService>,
    pub(super) stopping: bool,
    leadership: Option<Leadership>,
}

/// The present leadership, for as long as its loop runs.
struct Leadership {
    ownership: Ownership,
    /// Holds one request at most.
    requests: Sender<()>,
    working: bool,
    next_run: Option<SystemTime>,
}

/// The end of the loop, however it comes.
struct Leading<'a>(&'a ScheduledJob);

impl Drop for Leading<'_> {
    fn drop(&mut self) {
        let mut control = self.0.control.lock();
        control.leadership = None;
        let service = match control.stopping {
            true => control.service.take(),
            false => None,
        };
        drop(control);
        self.0.idle.notify_all();
        // From inside a callback: this only asks.
        let _ = service.map(|service| service.stop());
    }
}

impl ScheduledJob {
    /// Cancels the running work, and lets no other begin.
    pub(super) fn request_stop(&self) {
        let mut control = self.control.lock();
        control.stopping = true;
        if let Some(leadership) = &control.leadership {
            leadership.ownership.end();
        }
    }

    /// Waits until no loop runs. `false`: work has not ended by `deadline`.
    pub(super) fn wait_until_idle(&self, deadline: Moment) -> bool {
        let mut control = self.control.lock();
        while let Some(leadership) = control.leadership.as_ref().filter(|_| control.stopping) {
            // Without work, the loop ends with its call to the backend.
            let left = match leadership.working {
                true => deadline.remaining(),
                false => SLICE,
            };
            if left.is_zero() {
                return false;
            }
            self.idle.wait_for(&mut control, left);
        }
        true
    }

    /// Requests a run. Returns `false` if this process does not lead.
    pub(super) fn request_run(&self) -> bool {
        let control = self.control.lock();
        let leadership = control.leadership.as_ref();
        let leadership = leadership.filter(|it| !control.stopping && it.ownership.is_valid());
        // Fails only if a request is pending.
        leadership.map(|it| it.requests.try_send(())).is_some()
    }

    pub(super) fn next_run(&self) -> Option<SystemTime> {
        self.control.lock().leadership.as_ref()?.next_run
    }

    /// The Acquired callback: returns when the leadership ends, or at a stop.
    pub(super) fn lead(&self, fence: u64) {
        let (sender, requests) = bounded(1);
        let ownership = {
            let mut control = self.control.lock();
            let service = control.service.as_ref().filter(|_| !control.stopping);
            let Some(ownership) = service.and_then(|service| service.ownership(fence)) else {
                return;
            };
            control.leadership = Some(Leadership {
                ownership: ownership.clone(),
                requests: sender,
                working: false,
                next_run: None,
            });
            ownership
        };
        let leading = Leading(self);
        let lost = ownership.lost();
        if let Some(age) = self.last_run(&ownership, &lost) {
            let mut plan = Plan::new(&self.schedule, Clocks::read(), age, rand::random());
            while let Some(run) = self.wait(&mut plan, &ownership, &lost, &requests) {
                match self.run(run, &ownership, &lost) {
                    Some((began, ended)) if run.due.is_some() => {
                        plan.ran(began, ended, rand::random());
                    }
                    Some(_) => {}
                    // The leadership is over, or about to be.
                    None => {
                        let _ = lost.recv_timeout(RETRY_AFTER);
                    }
                }
            }
        }
        drop(leading);
    }

    /// Asks how long ago the last run was, until there is an answer. `None`: stopped, or not the leader.
    fn last_run(&self, ownership: &Ownership, lost: &Receiver<()>) -> Option<Option<Duration>> {
        if self.schedule.recorded() == Recorded::Never {
            return Some(None);
        }
        let age = loop {
            match self.ask(|by| self.backend.last_run(&self.mutex, by)) {
                Ok(age) => break age,
                Err(error) if error.is_transient() => {
                    self.warn("cannot read when the last run was; asking again", &error);
                }
                Err(error) => {
                    self.warn("cannot read when the last run was; none is assumed", &error);
                    break None;
                }
            }
            let _ = lost.recv_timeout(RETRY_AFTER);
            if !self.may_run(ownership) {
                return None;
            }
        };
        let own = self.own_last_run.lock().map(|last| Moment::now() - last);
        Some(own.into_iter().chain(age).min())
    }

    /// Waits for the next run. `None`: stopped, or not the leader.
    fn wait(
        &self,
        plan: &mut Plan,
        ownership: &Ownership,
        lost: &Receiver<()>,
        requests: &Receiver<()>,
    ) -> Option<Run> {
        while self.may_run(ownership) {
            let now = Clocks::read();
            let wait = plan.wait(now);
            let due = UNIX_EPOCH + plan.due(now);
            if let Some(leadership) = &mut self.control.lock().leadership {
                leadership.next_run = Some(due);
            }
            if requests.try_recv().is_ok() {
                return Some(Run {
                    due: None,
                    late: Duration::ZERO,
                });
            }
            if wait.is_zero() {
                return Some(Run {
                    due: Some(due),
                    late: plan.late(now),
                });
            }
            let mut ready = Select::new();
            ready.recv(lost);
            ready.recv(requests);
            // In slices: the wall clock may be set, and a sleep does not count a suspension of the machine.
            let _ = ready.ready_timeout(wait.min(SLICE));
        }
        None
    }

    fn may_run(&self, ownership: &Ownership) -> bool {
        ownership.is_valid() && !self.control.lock().stopping
    }

    /// Runs the work, and says when it began and ended. `None`: this process does not lead.
    fn run(
        &self,
        run: Run,
        ownership: &Ownership,
        lost: &Receiver<()>,
    ) -> Option<(Clocks, Clocks)> {
        let recorded = match run.due {
            Some(_) => self.schedule.recorded(),
            None => Recorded::Never,
        };
        let first = recorded == Recorded::AtTheBeginning;
        if first && !self.record(ownership) {
            return None;
        }
        // After the record: the next run keeps its distance even if the write is slow.
        let began = Clocks::read();
        // A slow write must not start a run in a later leadership.
        if !ownership.is_valid() {
            if first {
                log::warn!(
                    "{}: leadership was lost after a run was recorded and before it began: it is left out",
                    self.mutex
                );
            }
            return None;
        }
        let context = Context {
            mutex: Arc::clone(&self.mutex),
            ownership: ownership.clone(),
            cancelled: lost.clone(),
            run,
        };
        self.set_working(true);
        let mut work = self.work.lock();
        let result = catch_unwind(AssertUnwindSafe(|| (work.work)(&context)));
        let mut report = context.report(result);
        report.took = Moment::now() - began.local;
        if recorded == Recorded::AtTheEnd {
            // Also after a stop that gave up waiting: the release has waited for the work.
            self.record(ownership);
        }
        let ended = Clocks::read();
        match recorded {
            Recorded::Never => {}
            Recorded::AtTheBeginning => *self.own_last_run.lock() = Some(began.local),
            Recorded::AtTheEnd => *self.own_last_run.lock() = Some(ended.local),
        }
        self.tell(&mut work, &report);
        self.set_working(false);
        Some((began, ended))
    }

    fn set_working(&self, working: bool) {
        if let Some(leadership) = &mut self.control.lock().leadership {
            leadership.working = working;
        }
        self.idle.notify_all();
    }

    /// Records a run. Returns `false` if the backend says that this leadership is over; a failure is logged, and
    /// the work runs all the same.
    fn record(&self, ownership: &Ownership) -> bool {
        let fence = ownership.fence();
        let record = |by| self.backend.record_run(&self.mutex, fence, RECORD_KEPT, by);
        match self.ask(record) {
            Ok(recorded) => recorded,
            Err(error) => {
                self.warn("cannot record a run; the work runs all the same", &error);
                true
            }
        }
    }

    /// Makes a call to the backend.
    fn ask<T>(&self, call: impl FnOnce(Moment) -> Result<T>) -> Result<T> {
        let by = Moment::now() + self.request_limit;
        let answer = catch_unwind(AssertUnwindSafe(|| call(by)))
            .unwrap_or_else(|_| Err(Error::new(ErrorKind::Panicked, "the backend panicked")));
        if answer.is_ok() && self.failing.swap(false, Ordering::Relaxed) {
            log::info!("{}: runs are recorded again", self.mutex);
        }
        answer
    }

    fn warn(&self, what: &str, error: &Error) {
        if !self.failing.swap(true, Ordering::Relaxed) {
            log::warn!("{}: {what}: {}", self.mutex, chain(error));
        }
    }

    fn tell(&self, work: &mut Work, report: &RunReport) {
        report.log();
        self.probe.tell(|probe| {
            probe.scheduled_run(&report.mutex, report.kind, report.late, report.took);
        });
        if let Some(on_outcome) = &mut work.on_outcome
            && catch_unwind(AssertUnwindSafe(|| on_outcome(report))).is_err()
        {
            let mutex = &report.mutex;
            log::error!("{mutex}: on_outcome panicked; the schedule goes on");
        }
    }
}

/// An error and its sources in one line.
pub(super) fn chain(error: &(dyn StdError + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}
