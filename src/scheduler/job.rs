//! `ScheduledJob`: the work of a scheduler, and the loop that runs and records it. The loop is the Acquired callback of
//! the scheduler's service. So it has a thread of its own, never delays a renewal, and the service sends no
//! release before it has returned, up to the end of the lease.

use std::error::Error as StdError;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crossbeam_channel::{Receiver, TryRecvError};
use parking_lot::{Condvar, Mutex};

use super::schedule::{Clocks, Plan, Schedule};
use super::scheduler::RunReport;
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::event::Event;
use crate::factory::Core;
use crate::ownership::Ownership;
use crate::service::MutexContendService;

/// How long the record of a run is kept: longer than the longest period.
const RECORD_KEPT: Duration = Duration::from_secs(400 * 24 * 3600);

/// The longest single wait. For a run: the wall clock may be set, the machine may be suspended, leadership may be lost.
/// For the backend: a call that failed is made again.
const SLICE: Duration = Duration::from_secs(1);

/// The error that work returns, and what a panic in it is turned into.
pub(super) type WorkError = Box<dyn StdError + Send + Sync>;

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
#[derive(Clone, Debug)]
pub struct Context {
    mutex: Arc<str>,
    ownership: Ownership,
    cancelled: Receiver<()>,
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
    ///
    /// ```
    /// use contend::Context;
    ///
    /// fn write_report(context: &Context) {
    ///     let fence = context.fence();
    ///     println!("UPDATE report SET fence = {fence} WHERE id = 1 AND fence <= {fence}");
    /// }
    /// ```
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
    ///
    /// ```
    /// use contend::Context;
    ///
    /// fn clean_up(context: &Context) {
    ///     for table in ["a", "b", "c"] {
    ///         if context.is_cancelled() {
    ///             return; // the rest is left for the next run
    ///         }
    ///         println!("cleaning up {table}");
    ///     }
    /// }
    /// ```
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

    /// Waits before the next call to the backend, or until cancelled.
    fn pause(&self) {
        let _ = self.cancelled.recv_timeout(SLICE);
    }

    /// Returns when this run was due by the wall clock; `None` if [`run_now`](super::Scheduler::run_now)
    /// requested it.
    #[must_use]
    pub fn due(&self) -> Option<SystemTime> {
        self.due
    }

    /// Returns how late this run began: after a fail-over, a run that took too long or a pause.
    #[must_use]
    pub fn late(&self) -> Duration {
        self.late
    }
}

/// Scheduled work, and what its loop shares with the threads that call the scheduler.
pub(super) struct ScheduledJob {
    pub(super) factory: Arc<Core>,
    pub(super) request_limit: Duration,
    pub(super) schedule: Schedule,
    pub(super) work: Mutex<Work>,
    pub(super) control: Mutex<Control>,
    /// Something in `control` has changed.
    pub(super) changed: Condvar,
}

pub(super) struct Work {
    pub(super) run: Box<dyn FnMut(&Context) -> std::result::Result<(), WorkError> + Send>,
    pub(super) on_outcome: Box<dyn FnMut(&RunReport) + Send>,
}

#[derive(Default)]
pub(super) struct Control {
    /// From the start to the stop, so that the loop can stop it after its last run.
    pub(super) service: Option<MutexContendService>,
    pub(super) stopping: bool,
    /// The present leadership, for as long as its loop runs.
    leadership: Option<Ownership>,
    run_requested: bool,
    pub(super) next_run: Option<SystemTime>,
}

impl ScheduledJob {
    /// Cancels the running work, and lets no other begin.
    pub(super) fn request_stop(&self) {
        let mut control = self.control.lock();
        control.stopping = true;
        if let Some(leadership) = &control.leadership {
            leadership.end();
        }
        self.changed.notify_all();
    }

    /// Waits until no loop runs. `false`: one still does after `limit`.
    pub(super) fn wait_until_idle(&self, limit: Duration) -> bool {
        let is_busy = |control: &mut Control| control.stopping && control.leadership.is_some();
        let mut control = self.control.lock();
        self.changed.wait_while_for(&mut control, is_busy, limit);
        !is_busy(&mut control)
    }

    /// Requests a run. Returns `false` if this process does not lead.
    pub(super) fn request_run(&self) -> bool {
        let mut control = self.control.lock();
        let leadership = control.leadership.as_ref();
        let leads = !control.stopping && leadership.is_some_and(Ownership::is_valid);
        control.run_requested |= leads;
        self.changed.notify_all();
        leads
    }

    /// The Acquired callback: returns when the leadership ends, or at a stop.
    pub(super) fn lead(&self, event: &Event) {
        let Some(context) = self.begin(event) else {
            return;
        };
        if let Some(age) = self.age_of_last_run(&context) {
            let mut plan = Plan::new(&self.schedule, Clocks::read(), age, rand::random());
            while let Some(run) = self.wait(&mut plan, &context) {
                match self.run(&run) {
                    Some(times) if run.due.is_some() => plan.ran(times, rand::random()),
                    Some(_) => {}
                    // The leadership is over, or about to be.
                    None => context.pause(),
                }
            }
        }
        self.end();
    }

    fn begin(&self, event: &Event) -> Option<Context> {
        let mut control = self.control.lock();
        let service = control.service.as_ref().filter(|_| !control.stopping)?;
        let ownership = service.ownership(event.fence()?)?;
        control.run_requested = false;
        control.leadership = Some(ownership.clone());
        Some(Context {
            mutex: Arc::clone(&event.mutex),
            cancelled: ownership.lost(),
            ownership,
            due: None,
            late: Duration::ZERO,
        })
    }

    fn end(&self) {
        let mut control = self.control.lock();
        (control.leadership, control.next_run) = (None, None);
        self.changed.notify_all();
        if control.stopping
            && let Some(service) = control.service.take()
        {
            drop(control);
            // From inside a callback: this only asks.
            let _ = service.stop();
        }
    }

    /// Asks how long ago the last run was, until there is an answer. `None`: stopped, or not the leader.
    fn age_of_last_run(&self, context: &Context) -> Option<Option<Duration>> {
        let (backend, mutex) = (&self.factory.backend, &context.mutex);
        let what = "cannot read when the last run was";
        while self.schedule.is_recorded() {
            match self.ask(mutex, what, |by| backend.last_run(mutex, by)) {
                Err(error) if error.is_transient() => context.pause(),
                // What is refused is not known: none is assumed.
                age => return Some(age.ok().flatten()),
            }
            if context.is_cancelled() {
                return None;
            }
        }
        Some(None)
    }

    /// Waits for the next run. `None`: stopped, or not the leader.
    fn wait(&self, plan: &mut Plan, context: &Context) -> Option<Context> {
        let mut control = self.control.lock();
        while !context.is_cancelled() {
            let now = Clocks::read();
            let wait = plan.wait(now);
            let due = UNIX_EPOCH + plan.due(now);
            control.next_run = Some(due);
            let mut run = context.clone();
            if std::mem::take(&mut control.run_requested) {
                return Some(run);
            }
            if wait.is_zero() {
                (run.due, run.late) = (Some(due), plan.late(now));
                return Some(run);
            }
            self.changed.wait_for(&mut control, wait.min(SLICE));
        }
        None
    }

    /// Makes a run, and says when it began and ended. `None`: this process does not lead.
    fn run(&self, context: &Context) -> Option<(Clocks, Clocks)> {
        let is_recorded = context.due.is_some() && self.schedule.is_recorded();
        let at_the_end = self.schedule.counts_from_end();
        if is_recorded && !at_the_end && !self.record(context) {
            return None;
        }
        // After the record: the next run keeps its distance even if the write is slow.
        let began = Clocks::read();
        // A slow write must not start a run in a later leadership.
        if !context.is_leader() {
            return None;
        }
        let mut work = self.work.lock();
        let result = catch_unwind(AssertUnwindSafe(|| (work.run)(context)));
        let took = Clocks::read().boot - began.boot;
        if is_recorded && at_the_end {
            // Also after a stop that gave up waiting: the release has waited for the work.
            self.record(context);
        }
        let ended = Clocks::read();
        let report = RunReport::new(context, took, result);
        report.log();
        self.factory.probe.tell(|probe| {
            probe.scheduled_run(&report.mutex, report.kind, report.late, took);
        });
        if catch_unwind(AssertUnwindSafe(|| (work.on_outcome)(&report))).is_err() {
            let mutex = &report.mutex;
            log::error!("{mutex}: on_outcome panicked; the schedule goes on");
        }
        Some((began, ended))
    }

    /// Records a run. Returns `false` if the backend says that this leadership is over; a failure is logged, and
    /// the work runs all the same.
    fn record(&self, context: &Context) -> bool {
        let what = "cannot record a run; the work runs all the same";
        let (backend, mutex, fence) = (&self.factory.backend, &context.mutex, context.fence());
        let record = |by| backend.record_run(mutex, fence, RECORD_KEPT, by);
        self.ask(mutex, what, record).unwrap_or(true)
    }

    /// Makes a call to the backend, and logs it if that fails.
    fn ask<T>(&self, mutex: &str, what: &str, call: impl FnOnce(Moment) -> Result<T>) -> Result<T> {
        let by = Moment::now() + self.request_limit;
        let answer = catch_unwind(AssertUnwindSafe(|| call(by)))
            .unwrap_or_else(|_| Err(Error::new(ErrorKind::Panicked, "the backend panicked")));
        answer.inspect_err(|error| log::warn!("{mutex}: {what}: {}", chain(error)))
    }
}

/// An error and its sources in one line.
pub(super) fn chain(error: &(dyn StdError + 'static)) -> String {
    let causes = std::iter::successors(Some(error), |error| (*error).source());
    let causes: Vec<String> = causes.map(ToString::to_string).collect();
    causes.join(": ")
}
