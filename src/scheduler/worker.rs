//! The loop that runs the work and records it, what it knows of the leadership, and what it tells the
//! work.

use std::any::Any;
use std::cell::Cell;
use std::convert::Infallible;
use std::error::Error as StdError;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crossbeam_channel::{Receiver, Sender, TryRecvError, bounded};
use parking_lot::{Condvar, Mutex};

use super::schedule::{Clocks, Plan, Recorded, Schedule};
use super::scheduler::RunReport;
use crate::clock::Moment;
use crate::error::{Error, ErrorKind};
use crate::parker::{Parker, Unparker};
use crate::probe::{Probed, RunOutcomeKind};
use crate::service::{ContendBuilder, MutexContendService};
use crate::snapshot::Snapshot;

/// The longest sleep before the clocks are read again: the wall clock may be set, and a sleep does not
/// count the time in which the machine is suspended.
const SLICE: Duration = Duration::from_secs(5);

/// How long after a failure the backend is asked again for the last run.
const ASK_AGAIN: Duration = Duration::from_secs(1);

/// The error that work returns, and what a panic in it is turned into.
pub(super) type WorkError = Box<dyn StdError + Send + Sync>;

/// Scheduled work and who hears what became of its runs.
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
    fence: u64,
    snapshot: Arc<Snapshot>,
    cancelled: Receiver<Infallible>,
    run: RunTimes,
}

/// Which run it is.
#[derive(Clone, Copy, Debug)]
struct RunTimes {
    /// `None`: it was asked for.
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
        self.fence
    }

    /// Returns `true` if the leadership that this run began in still lasts at the moment of the call. If
    /// the backend cannot be reached, leadership ends with the ttl; the transition is then the time left
    /// to stop.
    #[must_use]
    pub fn is_leader(&self) -> bool {
        self.snapshot.fence() == Some(self.fence)
    }

    /// Returns `true` if the work should stop: leadership was lost, or the scheduler is being stopped and
    /// waits for this run.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        !self.is_leader() || self.is_told_to_stop()
    }

    fn is_told_to_stop(&self) -> bool {
        self.cancelled.try_recv() == Err(TryRecvError::Disconnected)
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
    pub fn cancelled(&self) -> &Receiver<Infallible> {
        &self.cancelled
    }

    /// Returns the time until which this process leads if the lease is not renewed. Each renewal extends
    /// it; once it has passed, [`is_leader`](Context::is_leader) is `false` for good.
    #[must_use]
    pub fn deadline(&self) -> Instant {
        Instant::now() + self.snapshot.valid_for(self.fence)
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
}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Context")
            .field("mutex", &self.mutex)
            .field("fence", &self.fence)
            .field("run", &self.run)
            .field("is_leader", &self.is_leader())
            .field("is_cancelled", &self.is_cancelled())
            .finish()
    }
}

/// What the loop knows of the leadership, from the service's callbacks, which wait for running work.
#[derive(Debug, Default)]
pub(super) struct Term {
    notes: Mutex<TermState>,
    /// Work has ended.
    idle: Condvar,
}

#[derive(Debug, Default)]
struct TermState {
    leadership: Option<Leadership>,
    /// Work is running, in this leadership or a past one.
    running: bool,
    /// A run was asked for.
    asked: bool,
    /// When the next run is due.
    next_run: Option<SystemTime>,
    /// The loop's parker.
    unparker: Option<Unparker>,
}

#[derive(Debug)]
struct Leadership {
    fence: u64,
    /// Dropped to close the channel that running work may wait on.
    alive: Option<Sender<Infallible>>,
    cancelled: Receiver<Infallible>,
}

/// Says that work has ended, even if it panicked.
struct Running<'a> {
    term: &'a Term,
    cancelled: Receiver<Infallible>,
}

impl Term {
    /// Has the callbacks of a service tell this term.
    pub(super) fn follow(self: &Arc<Term>, service: ContendBuilder) -> ContendBuilder {
        let (begins, ends) = (Arc::clone(self), Arc::clone(self));
        service
            .on_acquired(move |event| begins.begin(event.fence()))
            .on_released(move |_| ends.end())
    }

    /// A leadership began.
    fn begin(&self, fence: Option<u64>) {
        let mut notes = self.notes.lock();
        let (alive, cancelled) = bounded(0);
        notes.leadership = fence.map(|fence| Leadership {
            fence,
            alive: Some(alive),
            cancelled,
        });
        notes.unpark();
    }

    /// The leadership is over: nothing more begins in it, what runs is cancelled, and has ended when this
    /// returns. The service sends its release after this, so leadership is never given back under
    /// running work.
    fn end(&self) {
        let mut notes = self.notes.lock();
        notes.leadership = None;
        notes.asked = false;
        notes.next_run = None;
        notes.unpark();
        while notes.running {
            self.idle.wait(&mut notes);
        }
    }

    /// Cancels what runs, in the leadership that goes on until it has ended.
    pub(super) fn cancel(&self) {
        if let Some(leadership) = &mut self.notes.lock().leadership {
            leadership.alive = None;
        }
    }

    /// Asks for a run. Returns `false` if this process does not lead.
    pub(super) fn ask(&self) -> bool {
        let mut notes = self.notes.lock();
        notes.asked = notes.leadership.is_some();
        notes.unpark();
        notes.asked
    }

    pub(super) fn is_running(&self) -> bool {
        self.notes.lock().running
    }

    pub(super) fn next_run(&self) -> Option<SystemTime> {
        self.notes.lock().next_run
    }

    fn set_next_run(&self, next_run: SystemTime) {
        let mut notes = self.notes.lock();
        if notes.leadership.is_some() {
            notes.next_run = Some(next_run);
        }
    }

    /// The loop begins, on a thread that `unparker` wakes.
    fn open(&self, unparker: Unparker) {
        self.notes.lock().unparker = Some(unparker);
    }

    /// The fence of the present leadership.
    fn fence(&self) -> Option<u64> {
        let notes = self.notes.lock();
        notes.leadership.as_ref().map(|leadership| leadership.fence)
    }

    fn take_asked(&self) -> bool {
        std::mem::take(&mut self.notes.lock().asked)
    }

    /// Begins to run work, unless the leadership with this fence is over.
    fn run(&self, fence: u64) -> Option<Running<'_>> {
        let mut notes = self.notes.lock();
        let leadership = notes.leadership.as_ref();
        let leadership = leadership.filter(|leadership| leadership.fence == fence)?;
        let cancelled = leadership.cancelled.clone();
        notes.running = true;
        Some(Running {
            term: self,
            cancelled,
        })
    }
}

impl TermState {
    fn unpark(&self) {
        if let Some(unparker) = &self.unparker {
            unparker.unpark();
        }
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.term.notes.lock().running = false;
        self.term.idle.notify_all();
    }
}

/// One life of the loop, from start to stop. Dropping it stops the service, even where no thread could
/// be started.
pub(super) struct Worker {
    pub(super) service: MutexContendService,
    pub(super) term: Arc<Term>,
    pub(super) schedule: Schedule,
    pub(super) job: Arc<Mutex<Work>>,
    pub(super) probe: Probed,
    /// The last run that this process made itself: known even if the backend has lost its record.
    pub(super) own_last: Cell<Option<Moment>>,
    /// What went wrong last with the record of runs: said once per change.
    pub(super) failure: Cell<Option<(&'static str, ErrorKind)>>,
}

/// What is known of the last run.
#[derive(Clone, Copy)]
enum Past {
    /// The backend could not be asked, and is asked again at this moment.
    Unknown(Moment),
    /// How long ago it was, if there was one.
    Known(Option<Duration>),
}

impl Worker {
    pub(super) fn run(self, parker: &Parker) {
        self.term.open(parker.unparker());
        while !parker.is_stopped() {
            match self.term.fence() {
                Some(fence) => self.lead(fence, parker),
                None => {
                    parker.park(Moment::FAR);
                }
            }
        }
    }

    /// From the beginning of one leadership to its end, or to the stop.
    fn lead(&self, fence: u64, parker: &Parker) {
        let mut past = self.last_run(fence);
        let mut plan = self.plan(past);
        while self.term.fence() == Some(fence) && !parker.is_stopped() {
            let now = Clocks::read();
            if let Past::Unknown(again) = past
                && now.local >= again
            {
                past = self.last_run(fence);
                if let Past::Known(_) = past {
                    plan = self.plan(past);
                }
                continue;
            }
            let wait = plan.wait(now);
            let asked = self.term.take_asked();
            if !asked && !wait.is_zero() {
                self.term.set_next_run(UNIX_EPOCH + plan.due(now));
                let mut until = now.local + wait.min(SLICE);
                if let Past::Unknown(again) = past {
                    until = until.min(again);
                }
                // Whatever ends the wait: leadership, clocks and plan are looked at again.
                parker.park(until);
                continue;
            }
            let run = RunTimes {
                due: (!asked).then(|| UNIX_EPOCH + plan.due(now)),
                late: if asked {
                    Duration::ZERO
                } else {
                    plan.late(now)
                },
            };
            match self.try_run(fence, run) {
                Some((begun, ended)) if !asked => {
                    plan.ran(begun, ended, rand::random());
                    // Whatever was before it.
                    past = Past::Known(None);
                }
                Some(_) => {}
                // Not the leader any more, which the callback is about to say; or not yet again.
                None => {
                    parker.park(Moment::now() + ASK_AGAIN);
                }
            }
        }
    }

    /// Where the backend does not say when the last run was, it might have begun just now: so that no two
    /// runs come too close, the plan is made on that.
    fn plan(&self, past: Past) -> Plan {
        let age = match past {
            Past::Known(age) => age,
            Past::Unknown(_) => Some(Duration::ZERO),
        };
        Plan::new(&self.schedule, Clocks::read(), age, rand::random())
    }

    /// Asks when the last run was, that of another process or our own.
    fn last_run(&self, fence: u64) -> Past {
        if self.schedule.recorded() == Recorded::Never {
            return Past::Known(None);
        }
        let age = match self.service.last_run(self.by(fence)) {
            Ok(age) => {
                self.works();
                age
            }
            Err(error) if error.kind() == ErrorKind::Unsupported => {
                self.warn(
                    "runs are not recorded, so a new leader does not know when the last one was",
                    &error,
                );
                None
            }
            Err(error) => {
                self.warn("cannot read when the last run was; asking again", &error);
                return Past::Unknown(Moment::now() + ASK_AGAIN);
            }
        };
        let own = self.own_last.get().map(|last| Moment::now() - last);
        Past::Known(own.into_iter().chain(age).min())
    }

    /// Runs the work, and says when it began and ended. `None`: this process does not lead.
    fn try_run(&self, fence: u64, run: RunTimes) -> Option<(Clocks, Clocks)> {
        let recorded = match run.due {
            Some(_) => self.schedule.recorded(),
            None => Recorded::Never,
        };
        let snapshot = self.service.snapshot();
        if snapshot.fence() != Some(fence) {
            return None;
        }
        if recorded == Recorded::AtTheBeginning && !self.record(fence) {
            return None;
        }
        let running = self.term.run(fence);
        // After the write: where that is slow, the next run keeps its distance all the same.
        let begun = Clocks::read();
        let Some(running) = running.filter(|_| snapshot.fence() == Some(fence)) else {
            if recorded == Recorded::AtTheBeginning {
                // Whoever leads next takes it for made, and waits a period.
                let known = match self.failure.get() {
                    None => "was",
                    Some(_) => "may have been",
                };
                log::warn!(
                    "{}: a run {known} recorded, but leadership was lost before it began: it is left out",
                    self.service.mutex()
                );
            }
            return None;
        };
        let context = Context {
            mutex: Arc::from(self.service.mutex()),
            fence,
            snapshot,
            cancelled: running.cancelled.clone(),
            run,
        };
        let mut job = self.job.lock();
        let began = Moment::now();
        let result = catch_unwind(AssertUnwindSafe(|| (job.work)(&context)));
        let took = Moment::now() - began;
        let report = context.report(result, took);
        if recorded == Recorded::AtTheEnd {
            if context.is_leader() {
                self.record(fence);
            }
            if !context.is_leader() {
                // A stop did not wait for the work, but the release does: there is time to write it down.
                let keep = self.schedule.kept();
                self.service.record_last_run(fence, keep);
            }
        }
        let ended = Clocks::read();
        match recorded {
            Recorded::Never => {}
            Recorded::AtTheBeginning => self.own_last.set(Some(begun.local)),
            Recorded::AtTheEnd => self.own_last.set(Some(ended.local)),
        }
        drop(running);
        self.tell(&mut job, &report);
        Some((begun, ended))
    }

    /// Records a run. Returns `false` if this process does not lead; a failure is logged, and the work
    /// runs all the same.
    fn record(&self, fence: u64) -> bool {
        let keep = self.schedule.kept();
        match self.service.record_run(fence, keep, self.by(fence)) {
            Ok(true) => {
                self.works();
                true
            }
            Ok(false) => {
                let mutex = self.service.mutex();
                log::warn!(
                    "{mutex}: the backend says that fence {fence} is over; nothing more runs"
                );
                false
            }
            Err(error) => {
                let what = match self.schedule.recorded() {
                    Recorded::AtTheEnd => {
                        "cannot record a run that has ended; a new leader may begin the next one too early"
                    }
                    _ => "cannot record a run; the work runs all the same",
                };
                self.warn(what, &error);
                true
            }
        }
    }

    /// The end of a call: it must leave the renewals their time.
    fn by(&self, fence: u64) -> Moment {
        Moment::now() + self.service.snapshot().valid_for(fence) / 2
    }

    fn tell(&self, job: &mut Work, report: &RunReport) {
        report.log();
        self.probe.tell(|probe| {
            probe.scheduled_run(&report.mutex, report.kind, report.late, report.took);
        });
        if let Some(on_outcome) = &mut job.on_outcome
            && catch_unwind(AssertUnwindSafe(|| on_outcome(report))).is_err()
        {
            let mutex = &report.mutex;
            log::error!("{mutex}: on_outcome panicked; the schedule goes on");
        }
    }

    /// Says what goes wrong with the record of runs, once per change.
    fn warn(&self, what: &'static str, error: &Error) {
        let failure = Some((what, error.kind()));
        if self.failure.replace(failure) != failure {
            log::warn!("{}: {what}: {}", self.service.mutex(), chain(error));
        }
    }

    /// The backend has answered.
    fn works(&self) {
        if self.failure.take().is_some() {
            log::info!("{}: runs are recorded again", self.service.mutex());
        }
    }
}

impl Context {
    fn report(
        &self,
        result: std::thread::Result<std::result::Result<(), WorkError>>,
        took: Duration,
    ) -> RunReport {
        let (kind, error) = match result {
            Ok(Ok(())) => (RunOutcomeKind::Ok, None),
            Ok(Err(error)) => (RunOutcomeKind::Failed, Some(error)),
            Err(panic) => (RunOutcomeKind::Panicked, Some(message(&*panic).into())),
        };
        let kind = match kind {
            RunOutcomeKind::Panicked => kind,
            _ if !self.is_leader() => RunOutcomeKind::Lost,
            _ if self.is_told_to_stop() => RunOutcomeKind::Cancelled,
            _ => kind,
        };
        RunReport {
            mutex: Arc::clone(&self.mutex),
            fence: self.fence,
            due: self.run.due,
            late: self.run.late,
            took,
            kind,
            error,
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if let Err(error) = self.service.stop() {
            log::warn!("{}: {error}", self.service.mutex());
        }
    }
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("a panic without a message").to_owned()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_begins_in_its_own_leadership_only() {
        let term = Term::default();
        assert!(term.run(1).is_none() && !term.ask());
        term.begin(Some(1));
        assert!(term.run(2).is_none());
        let running = term.run(1).unwrap();
        assert!(term.is_running());
        drop(running);
        term.end();
        assert!(term.run(1).is_none());
        term.begin(Some(2));
        assert!(term.run(1).is_none(), "the plan of an earlier leadership");
        assert!(term.run(2).is_some());
    }

    #[test]
    fn what_runs_is_cancelled_by_a_stop_and_by_the_end() {
        let closed =
            |running: &Running<'_>| running.cancelled.try_recv() == Err(TryRecvError::Disconnected);
        let term = Term::default();
        term.begin(Some(1));
        let running = term.run(1).unwrap();
        assert!(!closed(&running));
        term.cancel();
        assert!(closed(&running));
        assert_eq!(
            term.fence(),
            Some(1),
            "it leads on until the work has ended"
        );
        drop(running);
        term.end();
        term.begin(Some(2));
        let running = term.run(2).unwrap();
        assert!(!closed(&running));
        std::thread::scope(|scope| {
            let (ends, ended) = bounded(1);
            let term = &term;
            scope.spawn(move || {
                term.end();
                ends.send(())
            });
            assert!(running.cancelled.recv().is_err());
            let early = ended.recv_timeout(Duration::from_millis(50));
            assert!(early.is_err(), "the end waits for what runs");
            drop(running);
            ended.recv().unwrap();
        });
    }

    #[test]
    fn a_request_does_not_outlive_its_leadership() {
        let term = Term::default();
        term.begin(Some(1));
        assert!(term.ask());
        term.end();
        term.begin(Some(2));
        assert!(!term.take_asked());
        assert!(term.ask() && term.take_asked() && !term.take_asked());
    }

    static WARNINGS: Mutex<Vec<String>> = Mutex::new(Vec::new());

    struct Warnings;

    impl log::Log for Warnings {
        fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
            metadata.level() <= log::Level::Warn
        }

        fn log(&self, record: &log::Record<'_>) {
            if self.enabled(record.metadata()) {
                WARNINGS.lock().push(record.args().to_string());
            }
        }

        fn flush(&self) {}
    }

    /// The next leader takes it for made and waits a whole period: nobody would know why.
    #[test]
    fn a_run_that_was_recorded_and_left_out_is_warned_of() {
        log::set_logger(&Warnings).unwrap();
        log::set_max_level(log::LevelFilter::Warn);
        let factory = crate::backend::memory::factory("left-out", crate::lease::Lease::default());
        let followed = Arc::new(Term::default());
        let service = followed
            .follow(factory.contend("left-out"))
            .build_blocking();
        let service = service.unwrap();
        service.start().unwrap();
        let leads = || service.fence().is_some();
        testbed::wait_until(Duration::from_secs(40), "it leads", leads);
        let fence = service.fence().unwrap();
        let work = Work {
            work: Box::new(|_| panic!("it runs")),
            on_outcome: None,
        };
        let worker = Worker {
            service,
            // In which the leadership has ended already.
            term: Arc::default(),
            schedule: Schedule::every(Duration::from_secs(3_600)),
            job: Arc::new(Mutex::new(work)),
            probe: Probed::default(),
            own_last: Cell::new(None),
            failure: Cell::new(None),
        };
        let run = RunTimes {
            due: Some(UNIX_EPOCH),
            late: Duration::ZERO,
        };
        assert!(worker.try_run(fence, run).is_none());
        assert!(matches!(worker.last_run(fence), Past::Known(Some(_))));
        let warnings = WARNINGS.lock();
        let told =
            "left-out: a run was recorded, but leadership was lost before it began: it is left out";
        let told = warnings.iter().filter(|line| *line == told);
        assert_eq!(told.count(), 1, "{warnings:?}");
    }
}
