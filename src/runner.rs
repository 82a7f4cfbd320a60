//! Performs a contender's steps on its backend, through its `RawContender`.
//!
//! A service's worker owns one. A locker's is used in turn by the thread that locks, the timer's that renews and the
//! thread that unlocks. A step makes at most one attempt or renewal. Every call is counted from before it was sent;
//! a panic in one ends belief.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use crate::backend::{
    Attempt, Contender, Grant, OnRefusal, Purpose, RawContender, Refusal, Renewal,
};
use crate::clock::{self, Moment};
use crate::error::{Error, ErrorKind, Result};
use crate::factory;
use crate::machine::contention::{Change, Contention, Failure, Step};
use crate::machine::period::ContendPeriod;
use crate::owner::MutexOwner;
use crate::parker::Unparker;
use crate::probe::{AcquireOutcome, LossReason, RenewOutcome};
use crate::shared::Shared;

/// What a step came to.
#[derive(Debug)]
pub(crate) enum Done {
    /// A call was made: what it changed, and why it failed. A panic does both.
    Called {
        change: Option<Change>,
        error: Option<Error>,
    },
    /// There is nothing to do before then, unless woken.
    Wait(Moment),
}

pub(crate) struct Runner {
    raw: Box<dyn RawContender>,
    factory: Arc<factory::Core>,
    contender: Contender,
    unparker: Unparker,
    machine: Contention,
    shared: Arc<Shared>,
    /// This id was found to own under another fence: look before an attempt adopts that.
    doubled: bool,
    /// An attempt was refused since the queue was left: queueing at once saves a call.
    met_others: bool,
    /// The error with which trouble began, until the front has asked for it.
    trouble: Option<Error>,
    gained_at: Moment,
    woken_at: Option<Moment>,
}

impl Runner {
    /// Makes a contender that tries at `start` for the first time. The backend wakes `unparker`.
    pub(crate) fn new(
        factory: &Arc<factory::Core>,
        contender: &Contender,
        period: ContendPeriod,
        start: Moment,
        shared: &Arc<Shared>,
        unparker: Unparker,
    ) -> Result<Runner> {
        let id = Arc::clone(&contender.id);
        Ok(Runner {
            raw: factory.backend.contender(contender, &unparker)?,
            factory: Arc::clone(factory),
            machine: Contention::new(id, contender.lease, period, start),
            contender: contender.clone(),
            shared: Arc::clone(shared),
            unparker,
            doubled: false,
            met_others: false,
            trouble: None,
            gained_at: start,
            woken_at: None,
        })
    }

    /// Does what is due.
    pub(crate) fn step(&mut self) -> Done {
        match self.machine.step(Moment::now()) {
            Step::Acquire { on_refusal, by } => self.acquire(on_refusal, by),
            Step::Renew { fence, by } => self.renew(fence, by),
            Step::StepDown => Done::Called {
                change: self.step_down(LossReason::Expired),
                error: None,
            },
            Step::Wait { until } => Done::Wait(until),
        }
    }

    /// The backend woke this contender.
    pub(crate) fn woken(&mut self) {
        let now = Moment::now();
        if self.machine.woken(now) {
            self.woken_at = Some(now);
        }
    }

    /// Contends from `at` on. `first`: what a refusal of the first attempt leaves.
    pub(crate) fn contend_at(&mut self, at: Moment, first: OnRefusal) {
        self.woken_at = None;
        self.machine.contend_at(at, first);
    }

    /// Ends belief; the lease is still to be released.
    pub(crate) fn step_down(&mut self, reason: LossReason) -> Option<Change> {
        self.machine.belief()?;
        self.decide(|machine, now| machine.step_down(now, reason))
    }

    /// Gives up what the backend may keep for us, until `by`. `Ok(false)`: there was no lease to release.
    pub(crate) fn leave(&mut self, by: Moment) -> Result<bool> {
        let mut released = false;
        match self.try_leave(&mut released, by) {
            // Once more: perhaps only a pooled connection was stale.
            Err(error) if Moment::now() < by => {
                self.try_leave(&mut released, by)?;
                // "There was none" may be what the first release did.
                if released { Ok(true) } else { Err(error) }
            }
            first => first.map(|()| released),
        }
    }

    fn try_leave(&mut self, released: &mut bool, by: Moment) -> Result<()> {
        if self.machine.residue().unsure && !self.doubled {
            // The reply to an attempt was lost: adopt what it left, to know its fence.
            let attempt = self.call(|raw| raw.acquire(OnRefusal::Leave, by))?;
            let residue = self.machine.residue();
            residue.unsure = false;
            residue.fence = match attempt {
                Attempt::Granted(Grant { owner, .. }) => Some(owner.fence()),
                Attempt::Refused(_) => None,
            };
        }
        if let Some(fence) = self.machine.residue().fence {
            *released = self.call(|raw| raw.release(fence, by))?;
            self.machine.residue().fence = None;
        }
        if self.machine.residue().queued {
            // It may ask nothing.
            self.call_for(|raw| raw.withdraw(by), false)?;
            self.machine.residue().queued = false;
            self.met_others = false;
        }
        Ok(())
    }

    /// The error with which trouble began, once.
    pub(crate) fn take_trouble(&mut self) -> Option<Error> {
        self.trouble.take()
    }

    pub(crate) fn met_others(&self) -> bool {
        self.met_others
    }

    pub(crate) fn machine(&mut self) -> &mut Contention {
        &mut self.machine
    }

    pub(crate) fn contender(&self) -> &Contender {
        &self.contender
    }

    /// Lets the machine decide and publishes what it believes then, as one step. The clock is read under the lock
    /// of the readers, so a deadline that one of them saw passed is not extended.
    fn decide(
        &mut self,
        decide: impl FnOnce(&mut Contention, Moment) -> Option<Change>,
    ) -> Option<Change> {
        let (change, now, before) = {
            let mut belief = self.shared.belief();
            let (before, now) = (*belief, Moment::now());
            let change = decide(&mut self.machine, now);
            *belief = self.machine.belief();
            (change, now, before)
        };
        if let Some(change) = &change {
            self.account(change, now, before.map(|(until, _)| until));
        }
        change
    }

    fn acquire(&mut self, on_refusal: OnRefusal, by: Moment) -> Done {
        let sent = Moment::now();
        let attempt = match self.double(by) {
            Ok(Some(refusal)) => Ok(Attempt::Refused(refusal)),
            Ok(None) => self.call(|raw| raw.acquire(on_refusal, by)),
            Err(error) => Err(error),
        };
        self.factory.probe.tell(|probe| {
            let outcome = match &attempt {
                Ok(Attempt::Granted(_)) => AcquireOutcome::Granted,
                Ok(Attempt::Refused(_)) => AcquireOutcome::Refused,
                Err(error) => AcquireOutcome::Failed(error),
            };
            probe.acquire(&self.contender.mutex, outcome, Moment::now() - sent);
        });
        self.met_others |= matches!(attempt, Ok(Attempt::Refused(_)));
        let granted = matches!(attempt, Ok(Attempt::Granted(_)));
        let (outcome, error) = split(attempt);
        let roll = clock::roll();
        let change = self.decide(|machine, now| machine.acquired(sent, now, outcome, roll));
        if granted && self.contender.purpose == Purpose::Lock {
            // The grant took it out of the queue. A service withdraws again when it stops: a late attempt may have
            // re-queued it.
            self.machine.residue().queued = false;
        }
        Done::Called { change, error }
    }

    /// Looks before it adopts, if another process was met that uses this id: a refusal while that one owns.
    fn double(&mut self, by: Moment) -> Result<Option<Refusal>> {
        if !self.doubled {
            return Ok(None);
        }
        let (factory, mutex) = (Arc::clone(&self.factory), Arc::clone(&self.contender.mutex));
        let owner = self.call(|_| factory.backend.owner(&mutex, by))?;
        self.doubled = owner.is_owner(&self.contender.id);
        let left = owner.transition_at().saturating_sub(owner.backend_now());
        Ok(self.doubled.then_some(Refusal {
            owner,
            retry_in: Duration::from_millis(left + 1),
        }))
    }

    fn renew(&mut self, fence: u64, by: Moment) -> Done {
        let sent = Moment::now();
        let renewal = self.call(|raw| raw.renew(fence, by));
        self.factory.probe.tell(|probe| {
            let outcome = match &renewal {
                Ok(Renewal::Renewed(_)) => RenewOutcome::Renewed,
                Ok(Renewal::Lost(_)) => RenewOutcome::Lost,
                Err(error) => RenewOutcome::Failed(error),
            };
            probe.renew(&self.contender.mutex, outcome, Moment::now() - sent);
        });
        if let Ok(Renewal::Lost(owner)) = &renewal {
            self.doubled = self.met_double(owner);
        }
        let (outcome, error) = split(renewal);
        let roll = clock::roll();
        let change = self.decide(|machine, now| machine.renewed(sent, now, outcome, roll));
        if self.machine.belief().is_some() {
            self.shared.refresh(self.machine.seen());
        }
        Done::Called { change, error }
    }

    fn met_double(&self, owner: &MutexOwner) -> bool {
        let Contender { mutex, id, .. } = &self.contender;
        let doubled = owner.is_owner(id);
        if doubled {
            log::error!(
                "{mutex}: {id} owns with fence {}, which this contender was not granted: does another process use \
                 this id? Give every contender an id of its own, or leave the id out",
                owner.fence()
            );
        }
        doubled
    }

    fn call<T>(&mut self, call: impl FnOnce(&mut dyn RawContender) -> Result<T>) -> Result<T> {
        self.call_for(call, true)
    }

    /// Makes a call. After a panic the backend's side is made anew. `is_answer`: success shows that the server answers.
    fn call_for<T>(
        &mut self,
        call: impl FnOnce(&mut dyn RawContender) -> Result<T>,
        is_answer: bool,
    ) -> Result<T> {
        let sent = Moment::now();
        let raw = &mut *self.raw;
        let outcome = catch_unwind(AssertUnwindSafe(|| call(raw))).unwrap_or_else(|_| {
            let backend = &self.factory.backend;
            let made = backend.contender(&self.contender, &self.unparker);
            // What panicked once may panic when it is dropped, too.
            let _ = catch_unwind(AssertUnwindSafe(|| made.map(|raw| self.raw = raw)));
            Err(Error::new(ErrorKind::Panicked, "the backend panicked"))
        });
        if is_answer || outcome.is_err() {
            let who = format_args!("{}: {}", self.contender.mutex, self.contender.id);
            let error = outcome.as_ref().err();
            if self.factory.note(&self.shared, who, sent, error) {
                self.trouble = error.cloned();
            }
        }
        outcome
    }

    /// Logs a change of ownership and tells the probe. `until`: the end of the belief that it ended.
    fn account(&mut self, change: &Change, now: Moment, until: Option<Moment>) {
        let Contender {
            mutex, id, purpose, ..
        } = &self.contender;
        let probe = &self.factory.probe;
        let level = match purpose {
            Purpose::Lead => log::Level::Info,
            Purpose::Lock => log::Level::Debug,
        };
        match change {
            Change::Acquired(state) => {
                let fence = state.after().fence();
                self.gained_at = now;
                log::log!(level, "{mutex}: {id} acquired, fence {fence}");
                probe.tell(|probe| probe.gained(mutex, id, fence));
                if let Some(woken_at) = self.woken_at.take() {
                    let took = self.gained_at - woken_at;
                    probe.tell(|probe| probe.handed_off(mutex, took));
                }
            }
            Change::Released(state, reason) => {
                let fence = state.before().fence();
                // A process that was stopped notices late that its belief has ended.
                let held = now.min(until.unwrap_or(Moment::FAR)) - self.gained_at;
                if *reason == LossReason::Released {
                    log::log!(
                        level,
                        "{mutex}: {id} gives up fence {fence} after {held:.1?}"
                    );
                } else {
                    log::warn!("{mutex}: {id} lost fence {fence} after {held:.1?}: {reason}");
                }
                probe.tell(|probe| probe.lost(mutex, id, fence, held, *reason));
            }
            Change::OwnerChanged(state) => {
                let owner = state.after().owner_id();
                log::log!(level, "{mutex}: {id} waits, the owner is {owner:?}");
            }
        }
    }
}

fn split<T>(outcome: Result<T>) -> (Result<T, Failure>, Option<Error>) {
    match outcome {
        Ok(value) => (Ok(value), None),
        Err(error) => {
            let failure = match error.kind() {
                ErrorKind::Panicked => Failure::Panicked,
                _ if error.is_not_sent() => Failure::NotSent,
                _ => Failure::Unknown,
            };
            (Err(failure), Some(error))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lease::Lease;

    /// A deadline that a reader saw passed is not extended: a decision reads the clock under the readers' lock.
    #[test]
    fn decision_reads_clock_under_the_readers_lock() {
        let lease = Lease::default();
        let factory = crate::memory::factory("decision-reads-clock", lease);
        let contender = Contender {
            mutex: "m".into(),
            id: "a".into(),
            lease,
            purpose: Purpose::Lead,
        };
        let (shared, parker) = (Arc::default(), crate::parker::Parker::new());
        let mut runner = Runner::new(
            &factory.core().unwrap(),
            &contender,
            ContendPeriod::new(lease),
            Moment::now(),
            &shared,
            parker.unparker(),
        )
        .unwrap();
        let (sends, decided) = crossbeam_channel::unbounded();
        std::thread::scope(|scope| {
            let belief = shared.belief();
            scope.spawn(|| {
                runner.decide(|_, now| {
                    let _ = sends.send(now);
                    None
                })
            });
            let early = decided.recv_timeout(Duration::from_millis(100));
            assert!(early.is_err(), "a decision without the lock");
            let told = Moment::now();
            drop(belief);
            assert!(told <= decided.recv_timeout(Duration::from_secs(60)).unwrap());
        });
    }
}
