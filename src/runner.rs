//! Performs the contention machine's steps on one [`RawContender`], and is the only caller of one.
//!
//! A service owns a runner and drives it from its worker thread; a locker owns one that the thread that
//! locks, the background and the thread that unlocks take turns with. A visit makes at most one call
//! to the backend. Every call is counted from before it was sent, a panic in it ends belief, and its
//! outcome is noted, logged and told to the probe here, so that no front does it in its own way.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use crate::backend::{
    Attempt, Backend, Contender, OnRefusal, Purpose, RawContender, RawObserver, Refusal, Renewal,
};
use crate::background::{CleanUp, Cleaned};
use crate::clock::{self, Moment};
use crate::error::{Error, ErrorKind, Result};
use crate::id::LiveId;
use crate::machine::contention::{Change, Contention, Failure, Step};
use crate::machine::period::ContendPeriod;
use crate::owner::MutexOwner;
use crate::parker::{Parker, Unparker};
use crate::probe::{AcquireOutcome, LossReason, Probed, RenewOutcome};
use crate::snapshot::{ErrorChange, Snapshot};

/// What a visit came to.
#[derive(Debug)]
pub(crate) enum Visit {
    /// Tell the listeners, and visit again.
    Announce(Change),
    /// A call was made: visit again.
    Called(Called),
    /// Visit again then, or when woken.
    Wait { until: Moment },
    /// Nothing is left to do.
    Over,
}

/// The call that a visit made.
#[derive(Debug)]
pub(crate) enum Called {
    Listen(Option<Error>),
    /// `None`: granted, or refused.
    Acquire(Option<Error>),
    Renew,
    /// `true`: the lease was ours to release.
    Release {
        fence: u64,
        outcome: Result<bool>,
    },
    Withdraw,
    Observe(Option<Error>),
}

/// Whether the backend wakes us.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hearing {
    Deaf,
    /// Listening failed just now: the attempt comes first, then listening again.
    Failed,
    Listening,
}

pub(crate) struct Runner {
    backend: Arc<dyn Backend>,
    contender: Contender,
    raw: Box<dyn RawContender>,
    /// Made for a contender that stands back from its double.
    observer: Option<Box<dyn RawObserver>>,
    machine: Contention,
    snapshot: Arc<Snapshot>,
    probe: Probed,
    hearing: Hearing,
    /// An owner that could not listen tries again, once after each renewal: it needs no wake-ups, but says that it
    /// has none for as long as that is so.
    listen_again: bool,
    /// Errors are not logged, because the caller gets them returned.
    quiet: bool,
    /// An error that listeners who asked for failures are still to be told of.
    unreported: Option<Error>,
    gained_at: Moment,
    /// The end of the last belief, as far as it was renewed.
    believed_until: Moment,
    woken_at: Option<Moment>,
    /// It was logged that it waits, once until it owns.
    waits: bool,
}

impl Runner {
    /// Makes a contender that tries at `start` for the first time.
    pub(crate) fn new(
        backend: &Arc<dyn Backend>,
        contender: &Contender,
        period: ContendPeriod,
        start: Moment,
        snapshot: &Arc<Snapshot>,
        probe: &Probed,
    ) -> Result<Runner> {
        let id = Arc::clone(&contender.id);
        Ok(Runner {
            raw: backend.contender(contender)?,
            backend: Arc::clone(backend),
            machine: Contention::new(id, contender.lease, period, start),
            contender: contender.clone(),
            observer: None,
            snapshot: Arc::clone(snapshot),
            probe: probe.clone(),
            hearing: Hearing::Deaf,
            listen_again: false,
            quiet: false,
            unreported: None,
            gained_at: start,
            believed_until: start,
            woken_at: None,
            waits: false,
        })
    }

    /// Makes at most one call, which is over before `limit`, and says what to do next. Once it listens,
    /// the backend wakes `unparker`.
    pub(crate) fn visit(&mut self, unparker: &Unparker, limit: Moment) -> Visit {
        let (step, now) = self.decide(|machine, now| (machine.step(now), now));
        match step {
            Step::Announce(change) => {
                self.account(&change, now);
                Visit::Announce(change)
            }
            // Subscribed first, no wake-up can fall between the attempt and the wait after it.
            Step::Acquire {
                on_refusal: OnRefusal::Enqueue,
                by,
            } if self.hearing == Hearing::Deaf && !self.machine.is_leaving() => {
                Visit::Called(self.listen(unparker, by.min(limit)))
            }
            Step::Acquire { on_refusal, by } => {
                Visit::Called(self.acquire(on_refusal, by.min(limit)))
            }
            Step::Renew { fence, by } => Visit::Called(self.renew(fence, by.min(limit))),
            Step::Release { fence, by } => Visit::Called(self.release(fence, by.min(limit))),
            Step::Withdraw { by } => Visit::Called(self.withdraw(by.min(limit))),
            Step::Observe { by } => Visit::Called(self.observe(by.min(limit))),
            Step::Wait { until } if self.listen_again && !self.machine.is_leaving() => {
                self.listen_again = false;
                let by = now + self.contender.lease.call_budget();
                Visit::Called(self.listen(unparker, by.min(until).min(limit)))
            }
            Step::Wait { until } => Visit::Wait { until },
            Step::Over => Visit::Over,
        }
    }

    /// The backend woke us.
    pub(crate) fn woken(&mut self) {
        if self.machine.belief().is_none() {
            self.woken_at = Some(Moment::now());
        }
        self.decide(Contention::woken);
    }

    /// Contends anew, taking over what is left from before. Where the backend wakes us still, others
    /// have been met here, and queueing at once saves a round trip; else the first attempt leaves no
    /// trace if it is refused.
    pub(crate) fn begin(&mut self, may_queue: bool) {
        let listening = may_queue && self.hearing == Hearing::Listening;
        let first = if listening {
            OnRefusal::Enqueue
        } else {
            OnRefusal::Leave
        };
        self.woken_at = None;
        self.decide(|machine, now| machine.begin(now, first));
    }

    pub(crate) fn stop(&mut self) {
        self.machine.stop();
    }

    pub(crate) fn resign(&mut self, rest: Duration) {
        self.machine.resign(rest);
    }

    /// See [`Contention::abandon`].
    pub(crate) fn abandon(&mut self) {
        self.machine.abandon();
    }

    /// Gives up what is owned or left, with calls that end before `limit`. Says what became of the
    /// lease with the fence `ours`; traces may remain.
    pub(crate) fn leave(
        &mut self,
        parker: &Parker,
        ours: Option<u64>,
        limit: Moment,
    ) -> Result<bool> {
        let unparker = &parker.unparker();
        let mut now = Moment::now();
        self.machine.leave_by(now, limit);
        let mut released = Ok(false);
        while now < limit {
            let visit = self.visit(unparker, limit);
            let announced = matches!(visit, Visit::Announce(_));
            match visit {
                Visit::Called(Called::Release { fence, outcome }) if ours == Some(fence) => {
                    // After an attempt of unknown outcome, "there was none" may be that one's success.
                    if !matches!((&released, &outcome), (Err(_), Ok(false))) {
                        released = outcome;
                    }
                }
                // Whoever gives up a lease tries again before it leaves that to the background.
                Visit::Wait { until } if ours.is_some() && until < limit => {
                    parker.park_stopping(until);
                }
                Visit::Wait { .. } | Visit::Over => break,
                Visit::Announce(_) | Visit::Called(_) => {}
            }
            if !announced {
                now = Moment::now();
            }
        }
        released
    }

    /// Logs errors of the backend only where nobody is told of them by a returned error.
    pub(crate) fn quiet(&mut self, quiet: bool) {
        self.quiet = quiet;
    }

    /// An error that is new since the last time it was asked for.
    pub(crate) fn take_error(&mut self) -> Option<Error> {
        self.unreported.take()
    }

    pub(crate) fn belief(&self) -> Option<(Moment, u64)> {
        self.machine.belief()
    }

    pub(crate) fn seen(&self) -> &MutexOwner {
        self.machine.seen()
    }

    pub(crate) fn machine(&self) -> &Contention {
        &self.machine
    }

    pub(crate) fn contender(&self) -> &Contender {
        &self.contender
    }

    /// Reads the age of the last recorded run of the mutex's schedule.
    pub(crate) fn last_run(&mut self, by: Moment) -> Result<Option<Duration>> {
        self.guarded(|raw| raw.last_run(by))
    }

    /// Records a run under `fence`.
    pub(crate) fn record_run(&mut self, fence: u64, keep: Duration, by: Moment) -> Result<bool> {
        self.guarded(|raw| raw.record_run(fence, keep, by))
    }

    /// Lets the machine decide, and publishes what it believes then, as one step: the clock is read
    /// under the lock of those who read.
    fn decide<T>(&mut self, decide: impl FnOnce(&mut Contention, Moment) -> T) -> T {
        let mut belief = self.snapshot.belief();
        let decision = decide(&mut self.machine, Moment::now());
        *belief = self.machine.belief();
        if let Some((until, _)) = *belief {
            self.believed_until = until;
        }
        decision
    }

    /// Subscribes in at most half of the time, so that a subscription that hangs leaves the rest for the attempt.
    fn listen(&mut self, unparker: &Unparker, by: Moment) -> Called {
        let half = by - by.remaining() / 2;
        let sent = Moment::now();
        let outcome = self.guarded(|raw| raw.listen(unparker, half));
        self.hearing = match outcome {
            Ok(()) => Hearing::Listening,
            Err(_) => Hearing::Failed,
        };
        let change = self.snapshot.note_listen(sent, outcome.as_ref().copied());
        self.report(change, outcome.as_ref().err());
        Called::Listen(outcome.err())
    }

    fn acquire(&mut self, on_refusal: OnRefusal, by: Moment) -> Called {
        self.machine.acquiring(on_refusal);
        let sent = Moment::now();
        let mut attempt = self.guarded(|raw| raw.acquire(on_refusal, by));
        if let Ok(Attempt::Refused(refusal)) = &mut attempt
            && self.hearing != Hearing::Listening
        {
            // Nobody wakes us: go by time.
            refusal.retry_in = refusal.retry_in.min(self.contender.lease.call_budget());
        }
        self.snapshot.count(|stats| {
            stats.attempts += 1;
            stats.granted += u64::from(matches!(attempt, Ok(Attempt::Granted(_))));
            stats.failed_attempts += u64::from(attempt.is_err());
        });
        let mutex = &self.contender.mutex;
        self.probe.tell(|probe| {
            let outcome = match &attempt {
                Ok(Attempt::Granted(_)) => AcquireOutcome::Granted,
                Ok(Attempt::Refused(_)) => AcquireOutcome::Refused,
                Err(error) => AcquireOutcome::Failed(error),
            };
            probe.acquire(mutex, outcome, Moment::now() - sent);
        });
        if self.hearing == Hearing::Failed {
            self.hearing = Hearing::Deaf;
        }
        if self.contender.purpose == Purpose::Lock && matches!(attempt, Ok(Attempt::Granted(_))) {
            // Who holds a lock waits for nothing; its locker subscribes anew when it has to wait again.
            self.snapshot.needs_no_wakeups();
        }
        let failed_at = self.snapshot.failed_at();
        let (attempt, error) = self.settle(sent, attempt, |attempt| match attempt {
            Attempt::Granted(_) => true,
            // Or another contender of this process has asked since we failed.
            Attempt::Refused(Refusal { owner, asked, .. }) => {
                *asked || failed_at.is_some_and(|at| owner.is_observed_after(at))
            }
        });
        let roll = clock::roll();
        self.decide(|machine, now| machine.acquired(sent, now, attempt, roll));
        Called::Acquire(error)
    }

    fn renew(&mut self, fence: u64, by: Moment) -> Called {
        let sent = Moment::now();
        let renewal = self.guarded(|raw| raw.renew(fence, by));
        let took = Moment::now() - sent;
        self.snapshot.count(|stats| {
            stats.renewals += 1;
            stats.failed_renewals += u64::from(renewal.is_err());
        });
        log::trace!(
            "{}: {}: renewal of fence {fence} took {took:?}, {}",
            self.contender.mutex,
            self.contender.id,
            if renewal.is_ok() {
                "answered"
            } else {
                "failed"
            }
        );
        let mutex = Arc::clone(&self.contender.mutex);
        self.probe.tell(|probe| {
            let outcome = match &renewal {
                Ok(Renewal::Renewed(_)) => RenewOutcome::Renewed,
                Ok(Renewal::Lost(_)) => RenewOutcome::Lost,
                Err(error) => RenewOutcome::Failed(error),
            };
            probe.renew(&mutex, outcome, took);
        });
        let (renewal, _) = self.settle(sent, renewal, |_| true);
        let roll = clock::roll();
        self.decide(|machine, now| machine.renewed(sent, now, renewal, roll));
        if self.machine.belief().is_some() {
            self.snapshot.refresh(self.machine.seen());
            self.listen_again = self.contender.purpose == Purpose::Lead && self.snapshot.is_deaf();
        }
        Called::Renew
    }

    fn release(&mut self, fence: u64, by: Moment) -> Called {
        let sent = Moment::now();
        let outcome = self.guarded(|raw| raw.release(fence, by));
        // That there is nothing to release may be known without asking: on ZooKeeper, once the node is left to the
        // session to delete.
        let (released, _) = self.settle(sent, outcome.clone(), |released| *released);
        let roll = clock::roll();
        self.decide(|machine, now| machine.released(now, released, roll));
        Called::Release { fence, outcome }
    }

    fn withdraw(&mut self, by: Moment) -> Called {
        let sent = Moment::now();
        let outcome = self.guarded(|raw| raw.withdraw(by));
        self.hearing = Hearing::Deaf;
        let (withdrawn, _) = self.settle(sent, outcome, |asked| *asked);
        let roll = clock::roll();
        self.decide(|machine, now| machine.withdrawn(now, withdrawn, roll));
        Called::Withdraw
    }

    fn observe(&mut self, by: Moment) -> Called {
        let sent = Moment::now();
        let view = match self.observer.take() {
            Some(observer) => Ok(observer),
            None => self.backend.observer(&self.contender.mutex),
        };
        let view = view.and_then(|mut observer| {
            let observe = AssertUnwindSafe(|| observer.observe(by));
            let view = catch_unwind(observe).unwrap_or_else(|_| Err(panicked()))?;
            self.observer = Some(observer);
            Ok(view)
        });
        let (view, error) = self.settle(sent, view, |_| true);
        let roll = clock::roll();
        self.decide(|machine, now| machine.observed(now, view, roll));
        let Contender { mutex, id, .. } = &self.contender;
        let double = self.machine.stands_back_from();
        let double = double.map(|fence| self::double(mutex, id, fence));
        self.snapshot.note_double(double.as_ref());
        Called::Observe(error)
    }

    /// Makes a call. One that panics is over for good, and so is the contender that it was made on.
    fn guarded<T>(&mut self, call: impl FnOnce(&mut dyn RawContender) -> Result<T>) -> Result<T> {
        let raw = &mut *self.raw;
        catch_unwind(AssertUnwindSafe(|| call(raw))).unwrap_or_else(|_| {
            self.hearing = Hearing::Deaf;
            // What panicked once may panic when it is dropped, too.
            let _ = catch_unwind(AssertUnwindSafe(|| {
                if let Ok(raw) = self.backend.contender(&self.contender) {
                    self.raw = raw;
                }
            }));
            Err(panicked())
        })
    }

    /// Notes and reports what became of a call. `asked`: whether the server answered anything.
    fn settle<T>(
        &mut self,
        sent: Moment,
        outcome: Result<T>,
        asked: impl FnOnce(&T) -> bool,
    ) -> (std::result::Result<T, Failure>, Option<Error>) {
        let change = self.snapshot.note_call(sent, outcome.as_ref().map(asked));
        self.report(change, outcome.as_ref().err());
        match outcome {
            Ok(value) => (Ok(value), None),
            Err(error) => {
                let failure = match error.kind() {
                    ErrorKind::Panicked => Failure::Panicked,
                    _ if error.asked_nothing() => Failure::NotAsked,
                    _ => Failure::Unknown,
                };
                (Err(failure), Some(error))
            }
        }
    }

    /// One log line per change. What was logged is logged as over, also by a call that logs no errors.
    fn report(&mut self, change: ErrorChange, error: Option<&Error>) {
        let Contender { mutex, id, .. } = &self.contender;
        match (change, error) {
            (ErrorChange::New, Some(error)) => {
                // A `lock()` waits without an end, but gives up on what a retry cannot fix, and returns it.
                let gives_up = self.contender.purpose == Purpose::Lock
                    && !error.is_transient()
                    && self.machine.belief().is_none()
                    && !self.machine.is_leaving();
                if self.quiet || gives_up {
                    self.snapshot.unsay(error.kind());
                } else {
                    log::warn!("{mutex}: {id}: {error}; trying again");
                }
                self.unreported = Some(error.clone());
            }
            (ErrorChange::Over, _) => log::info!("{mutex}: {id}: the backend answers again"),
            _ => {}
        }
    }

    /// Logs and counts a change of ownership.
    fn account(&mut self, change: &Change, now: Moment) {
        let Contender {
            mutex, id, purpose, ..
        } = &self.contender;
        let level = match purpose {
            Purpose::Lead => log::Level::Info,
            Purpose::Lock => log::Level::Debug,
        };
        match change {
            Change::Acquired(state) => {
                let fence = state.after().fence();
                self.gained_at = now;
                self.waits = false;
                self.snapshot.count(|stats| stats.gained += 1);
                log::log!(level, "{mutex}: {id} acquired, fence {fence}");
                self.probe.tell(|probe| probe.gained(mutex, id, fence));
                if let Some(woken_at) = self.woken_at.take() {
                    let took = self.gained_at - woken_at;
                    self.probe.tell(|probe| probe.handed_off(mutex, took));
                }
            }
            Change::Released(state, reason) => {
                let fence = state.before().fence();
                // A process that was stopped notices late that its belief has ended.
                let held = now.min(self.believed_until) - self.gained_at;
                let given_up = *reason == LossReason::Released;
                self.snapshot
                    .count(|stats| stats.lost += u64::from(!given_up));
                if given_up {
                    // The release is still to be sent.
                    log::log!(
                        level,
                        "{mutex}: {id} gives up, fence {fence}, held for {held:.1?}"
                    );
                } else {
                    log::warn!(
                        "{mutex}: {id} released, fence {fence}, held for {held:.1?}: {reason}"
                    );
                }
                self.probe
                    .tell(|probe| probe.lost(mutex, id, fence, held, *reason));
            }
            Change::Double(owner) => {
                let error = double(mutex, id, owner.fence());
                log::error!("{error}");
                self.snapshot.note_double(Some(&error));
                self.unreported = Some(error);
            }
            Change::OwnerChanged(state) => {
                let owner = state.after();
                // Or a service that finds the lease of a killed one seems to do nothing for as long as that lasts.
                // Not of a locker, which may be refused without waiting, nor of who only looks while it leaves.
                let waits = *purpose == Purpose::Lead && !self.machine.is_leaving();
                if waits && owner.has_owner() && !self.waits {
                    self.waits = true;
                    let left = owner.transition_at().saturating_sub(owner.backend_now());
                    log::info!(
                        "{mutex}: {id} waits; owned by {:?}, fence {}, whose lease ends in {:.1?} unless renewed",
                        owner.owner_id(),
                        owner.fence(),
                        Duration::from_millis(left)
                    );
                }
            }
        }
    }
}

/// What a service that has stopped may have left on the server.
pub(crate) struct Left {
    pub(crate) runner: Runner,
    /// The run that left it, and the present one: cleaning up adopts what stands under the id, which
    /// must never be the lease of a later run. Locked during an attempt, and to begin a run.
    pub(crate) run: u64,
    pub(crate) present: Arc<Mutex<u64>>,
    /// The id is taken meanwhile.
    pub(crate) _live: Arc<LiveId>,
}

impl CleanUp for Left {
    fn label(&self) -> String {
        self.runner.contender.mutex.to_string()
    }

    fn attempt(&mut self, by: Moment) -> Cleaned {
        let present = crate::virtual_time::lock(&self.present);
        if *present != self.run {
            return Cleaned::Done;
        }
        let _ = self.runner.leave(&Parker::new(), None, by);
        if self.runner.machine.has_traces() {
            Cleaned::Again(Duration::from_millis(500))
        } else {
            Cleaned::Done
        }
    }
}

/// The error of a contender whose id another process uses too.
pub(crate) fn double(mutex: &str, id: &str, fence: u64) -> Error {
    Error::new(
        ErrorKind::DuplicateContender,
        format!(
            "{mutex}: another process contends as {id:?} too, and owns with fence {fence}; give every \
             contender an id of its own, or leave the id out. This one stands back until that one is gone"
        ),
    )
}

fn panicked() -> Error {
    Error::new(
        ErrorKind::Panicked,
        "the backend panicked; please report it with the panic's message",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lease::Lease;

    /// A runner on a registry of its own, and what others read of it.
    fn runner(registry: &str) -> (Runner, Arc<Snapshot>) {
        let lease = Lease::default();
        let factory = crate::memory::factory(registry, lease);
        let contender = Contender {
            mutex: "m".into(),
            id: "a".into(),
            lease,
            purpose: Purpose::Lead,
        };
        let snapshot = Arc::default();
        let runner = Runner::new(
            &factory.inner().unwrap().backend,
            &contender,
            ContendPeriod::new(lease),
            Moment::now(),
            &snapshot,
            &Probed::default(),
        );
        (runner.unwrap(), snapshot)
    }

    /// Rule "trouble is visible": a subscription that found no free connection says nothing about the server, but it
    /// is missing all the same, and its error would stay for as long as the owner owns.
    #[cfg(any(feature = "redis", feature = "mysql"))]
    #[test]
    fn an_owner_that_had_no_connection_to_listen_with_tries_again() {
        let (mut runner, snapshot) = runner("no-connection-to-listen-with");
        let parker = Parker::new();
        let unparker = parker.unparker();
        let until = |runner: &mut Runner, is_it: fn(&Visit) -> bool| {
            let end = Moment::now() + Duration::from_secs(60);
            loop {
                assert!(!end.remaining().is_zero(), "it never came");
                let visit = runner.visit(&unparker, Moment::FAR);
                if is_it(&visit) {
                    return;
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        until(&mut runner, |visit| matches!(visit, Visit::Wait { .. }));
        assert!(runner.belief().is_some());
        let busy = Error::new(ErrorKind::Timeout, "all connections were in use");
        let _ = snapshot.note_listen(Moment::now(), Err(&busy.proving_nothing()));
        assert!(snapshot.last_error().is_some());
        runner.woken();
        until(&mut runner, |visit| {
            matches!(visit, Visit::Called(Called::Renew))
        });
        until(&mut runner, |visit| {
            matches!(
                visit,
                Visit::Called(Called::Listen(None)) | Visit::Wait { .. }
            )
        });
        assert!(snapshot.last_error().is_none());
    }

    /// Rule "a deadline once passed never revives": whoever has been told that it has passed read the clock under
    /// the lock. A decision that read it before could renew what was said to be over.
    #[test]
    fn a_decision_reads_the_clock_after_everything_that_was_told_before() {
        let (mut runner, snapshot) = runner("a-decision-reads-the-clock");
        let (sends, decided) = crossbeam_channel::unbounded();
        std::thread::scope(|scope| {
            let belief = snapshot.belief();
            scope.spawn(|| {
                let at = runner.decide(|_, now| now);
                let _ = sends.send(at);
            });
            let early = decided.recv_timeout(Duration::from_millis(100));
            assert!(early.is_err(), "a decision without the lock");
            let told = Moment::now();
            drop(belief);
            assert!(told <= decided.recv_timeout(Duration::from_secs(60)).unwrap());
        });
    }
}
