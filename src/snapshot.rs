//! `Snapshot`: what other threads read of a contender or observer while its worker is busy or blocked:
//! belief (deadline and fence), the last owner, how the backend is reached (`Contact`) and counters
//! (`Stats`). Not a copy of server data.
//!
//! The lock is held for a few instructions and never across I/O. Reader and worker read the clock
//! *inside* it: so once a reader has seen a deadline passed, no renewal can revive it.

use std::time::Duration;

use parking_lot::{MappedMutexGuard, Mutex, MutexGuard};

use crate::clock::Moment;
use crate::error::{Error, ErrorKind};
use crate::owner::{MutexOwner, MutexState};

#[derive(Debug, Default)]
pub(crate) struct Snapshot {
    notes: Mutex<Notes>,
}

#[derive(Debug, Default)]
struct Notes {
    state: MutexState,
    /// The end of belief, and the fence.
    belief: Option<(Moment, u64)>,
    /// When it was last started; `None` for a locker.
    started: Option<Moment>,
    /// Whether anything was asked since the last start.
    tried: bool,
    /// When a call was answered last.
    answered: Option<Moment>,
    /// How the last call failed, if it did. Stays when the service is started again: nothing was answered since.
    failed: Option<Failed>,
    /// The same, without the calls whose errors say nothing about the backend.
    outage: Option<Failed>,
    /// Why nobody wakes us, if so.
    deaf: Option<Failed>,
    /// Another process owns under our id, which we do not contend under meanwhile.
    double: Option<Failed>,
    /// Why the service stepped down for good, if it did so by itself.
    ended: Option<Error>,
    /// The kinds of error that were said since the backend last answered: each once, however they
    /// alternate.
    said: Vec<ErrorKind>,
    stats: Stats,
}

/// A call that failed, after which none was answered.
#[derive(Clone, Debug)]
pub(crate) struct Failed {
    pub(crate) error: Error,
    /// When the first of those in a row was sent.
    pub(crate) since: Moment,
    /// When this one failed.
    pub(crate) at: Moment,
}

impl Failed {
    /// A failure now of what was `sent` then, after `earlier` ones in a row.
    pub(crate) fn after(earlier: Option<&Failed>, sent: Moment, error: &Error) -> Failed {
        Failed {
            error: error.clone(),
            since: earlier.map_or(sent, |earlier| earlier.since),
            at: Moment::now(),
        }
    }

    /// The same, counted from `moment` on at the earliest.
    pub(crate) fn not_before(mut self, moment: Option<Moment>) -> Failed {
        self.since = self.since.max(moment.unwrap_or(self.since));
        self
    }
}

/// Whether the calls of a service are answered by its backend.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Contact {
    /// No call was made yet.
    Untried,
    /// The last call was answered.
    Fine,
    /// The last call failed, the service cannot be notified of releases, it does not contend because
    /// another process uses its id, or it stepped down for good because the receiver of its events was
    /// dropped.
    Failing {
        /// The error.
        error: Error,
        /// How long that has lasted; if calls fail, since the first of them was sent.
        lasting: Duration,
    },
}

/// What a service or locker has done since it was built.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Attempts to acquire.
    pub attempts: u64,
    /// Attempts that were granted.
    pub granted: u64,
    /// Attempts that failed with an error.
    pub failed_attempts: u64,
    /// Renewals.
    pub renewals: u64,
    /// Renewals that failed with an error.
    pub failed_renewals: u64,
    /// Ownerships that began.
    pub gained: u64,
    /// Ownerships that ended without being given up: expired, taken away, or by a panic.
    pub lost: u64,
}

impl Stats {
    /// Adds up what two have done.
    pub(crate) fn plus(self, other: Stats) -> Stats {
        Stats {
            attempts: self.attempts + other.attempts,
            granted: self.granted + other.granted,
            failed_attempts: self.failed_attempts + other.failed_attempts,
            renewals: self.renewals + other.renewals,
            failed_renewals: self.failed_renewals + other.failed_renewals,
            gained: self.gained + other.gained,
            lost: self.lost + other.lost,
        }
    }
}

/// What a call's outcome changes about the errors there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ErrorChange {
    /// As it was.
    Unchanged,
    /// New: worth a log line and an event.
    New,
    /// Over.
    Over,
}

impl Snapshot {
    /// What is believed, locked: no reader sees it before the guard is dropped.
    pub(crate) fn belief(&self) -> MappedMutexGuard<'_, Option<(Moment, u64)>> {
        MutexGuard::map(self.notes.lock(), |notes| &mut notes.belief)
    }

    /// The fence, if the deadline has not passed.
    pub(crate) fn fence(&self) -> Option<u64> {
        let notes = self.notes.lock();
        let now = Moment::now();
        let (until, fence) = notes.belief?;
        (now < until).then_some(fence)
    }

    /// How long the deadline of the ownership with this fence is away; zero once it has passed.
    pub(crate) fn valid_for(&self, fence: u64) -> Duration {
        let notes = self.notes.lock();
        notes
            .belief
            .filter(|(_, present)| *present == fence)
            .map_or(Duration::ZERO, |(until, _)| until.remaining())
    }

    /// How long the deadline of the present ownership is away; zero if there is none.
    pub(crate) fn remaining(&self) -> Duration {
        let notes = self.notes.lock();
        let belief = notes.belief.as_ref();
        belief.map_or(Duration::ZERO, |(until, _)| until.remaining())
    }

    pub(crate) fn state(&self) -> MutexState {
        self.notes.lock().state.clone()
    }

    pub(crate) fn set_state(&self, state: MutexState) {
        self.notes.lock().state = state;
    }

    /// Publishes a renewed lease. `before` becomes the same owner: it is no change.
    pub(crate) fn refresh(&self, owner: &MutexOwner) {
        let mut notes = self.notes.lock();
        let before = notes.state.after().clone();
        notes.state = MutexState::new(before, owner.clone());
    }

    pub(crate) fn last_error(&self) -> Option<Error> {
        match self.contact() {
            Contact::Failing { error, .. } => Some(error),
            _ => None,
        }
    }

    /// How the backend is reached; an error with wake-ups counts as one.
    pub(crate) fn contact(&self) -> Contact {
        let notes = self.notes.lock();
        if let Some(error) = &notes.ended {
            return Contact::Failing {
                error: error.clone(),
                lasting: Duration::ZERO,
            };
        }
        let failing = || notes.failing().or(notes.deaf.as_ref());
        match notes.double.as_ref().or_else(failing) {
            Some(Failed { error, since, .. }) => Contact::Failing {
                error: error.clone(),
                lasting: Moment::now() - notes.started.map_or(*since, |at| at.max(*since)),
            },
            None if notes.tried => Contact::Fine,
            None => Contact::Untried,
        }
    }

    /// The last call that the backend failed, unless one was answered since. One that had no time or no
    /// connection to ask it says nothing about the backend.
    pub(crate) fn failed_call(&self) -> Option<Failed> {
        self.notes.lock().outage.clone()
    }

    /// When a call was answered last.
    pub(crate) fn answered(&self) -> Option<Moment> {
        self.notes.lock().answered
    }

    /// Why the backend does not wake us, if so; as [`failed_call`](Snapshot::failed_call).
    pub(crate) fn deaf(&self) -> Option<Failed> {
        let deaf = self.notes.lock().deaf.clone();
        deaf.filter(|failed| !failed.error.proves_nothing())
    }

    /// Whether the backend does not wake us, for whatever reason.
    pub(crate) fn is_deaf(&self) -> bool {
        self.notes.lock().deaf.is_some()
    }

    /// Notes why the service steps down for good. Holds until it is started again.
    pub(crate) fn end(&self, error: Error) {
        self.notes.lock().ended = Some(error);
    }

    /// Notes that we stand back from another process with our id, or that we do not any more.
    pub(crate) fn note_double(&self, double: Option<&Error>) {
        let mut notes = self.notes.lock();
        let earlier = notes.double.take();
        let now = Moment::now();
        notes.double = double.map(|error| Failed::after(earlier.as_ref(), now, error));
    }

    /// Notes how a call that was `sent` then ended; one that asked the server nothing proves nothing.
    pub(crate) fn note_call(&self, sent: Moment, outcome: Result<bool, &Error>) -> ErrorChange {
        let mut notes = self.notes.lock();
        match outcome {
            Ok(false) => return ErrorChange::Unchanged,
            Ok(true) => {
                notes.answered = Some(Moment::now());
                notes.failed = None;
                notes.outage = None;
            }
            Err(error) => {
                notes.failed = Some(Failed::after(notes.failed.as_ref(), sent, error));
                if !error.proves_nothing() {
                    notes.outage = Some(Failed::after(notes.outage.as_ref(), sent, error));
                }
            }
        }
        notes.tried = true;
        notes.changes(outcome.err().map(Error::kind))
    }

    /// When the last call failed; `None` if it was answered.
    pub(crate) fn failed_at(&self) -> Option<Moment> {
        self.notes.lock().failing().map(|failed| failed.at)
    }

    /// Notes whether the backend wakes us. Success elsewhere does not mean that it does.
    pub(crate) fn note_listen(&self, sent: Moment, outcome: Result<(), &Error>) -> ErrorChange {
        let mut notes = self.notes.lock();
        let deaf = notes.deaf.take();
        match outcome {
            Ok(()) => notes.tried = true,
            Err(error) => notes.deaf = Some(Failed::after(deaf.as_ref(), sent, error)),
        }
        notes.changes(outcome.err().map(Error::kind))
    }

    /// Forgets that nobody wakes us, because nobody has to.
    pub(crate) fn needs_no_wakeups(&self) {
        self.notes.lock().deaf = None;
    }

    /// An error was not said after all: the next one of its kind is new, and it is not over.
    pub(crate) fn unsay(&self, kind: ErrorKind) {
        self.notes.lock().said.retain(|said| *said != kind);
    }

    pub(crate) fn count(&self, count: impl FnOnce(&mut Stats)) {
        count(&mut self.notes.lock().stats);
    }

    pub(crate) fn stats(&self) -> Stats {
        self.notes.lock().stats
    }

    /// As it was before the first start; the counters go on, and what failed last is what failed last.
    pub(crate) fn clear(&self) {
        let mut notes = self.notes.lock();
        *notes = Notes {
            stats: notes.stats,
            answered: notes.answered,
            failed: notes.failed.take(),
            outage: notes.outage.take(),
            started: Some(Moment::now()),
            ..Notes::default()
        };
    }
}

impl Notes {
    /// How calls fail since the last start.
    fn failing(&self) -> Option<&Failed> {
        self.failed.as_ref().filter(|_| self.tried)
    }

    fn changes(&mut self, failed: Option<ErrorKind>) -> ErrorChange {
        match failed {
            Some(kind) if self.said.contains(&kind) => ErrorChange::Unchanged,
            Some(kind) => {
                self.said.push(kind);
                ErrorChange::New
            }
            None if self.deaf.is_some() || self.failing().is_some() => ErrorChange::Unchanged,
            None if self.said.is_empty() => ErrorChange::Unchanged,
            None => {
                self.said.clear();
                ErrorChange::Over
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(kind: ErrorKind) -> Error {
        Error::new(kind, "x")
    }

    /// Rule "every claim carries its fence": whoever asks in a later ownership about an earlier one is told that it
    /// is over.
    #[test]
    fn a_later_ownership_makes_no_earlier_one_valid() {
        let snapshot = Snapshot::default();
        snapshot.notes.lock().belief = Some((Moment::FAR, 8));
        assert_eq!(snapshot.fence(), Some(8));
        assert!(snapshot.valid_for(8) > Duration::ZERO);
        assert_eq!(snapshot.valid_for(7), Duration::ZERO);
    }

    /// Rule "trouble is visible": once per change, never flapping, and nothing untrue.
    #[test]
    fn an_error_is_said_once_and_is_over_only_when_the_server_has_answered() {
        let snapshot = Snapshot::default();
        assert!(matches!(snapshot.contact(), Contact::Untried));
        let sent = Moment::now();
        let (refused, late) = (error(ErrorKind::Unreachable), error(ErrorKind::Timeout));
        assert_eq!(snapshot.note_call(sent, Err(&refused)), ErrorChange::New);
        assert_eq!(snapshot.note_call(sent, Err(&late)), ErrorChange::New);
        for _ in 0..10 {
            assert_eq!(
                snapshot.note_call(sent, Err(&refused)),
                ErrorChange::Unchanged
            );
            assert_eq!(snapshot.note_call(sent, Err(&late)), ErrorChange::Unchanged);
            assert_eq!(snapshot.note_call(sent, Ok(false)), ErrorChange::Unchanged);
        }
        assert_eq!(snapshot.note_call(sent, Ok(true)), ErrorChange::Over);
        assert_eq!(snapshot.note_call(sent, Ok(true)), ErrorChange::Unchanged);
        // Calls work, wake-ups do not: that is one error, and stays one.
        let denied = error(ErrorKind::Denied);
        assert_eq!(snapshot.note_listen(sent, Err(&denied)), ErrorChange::New);
        for _ in 0..10 {
            assert_eq!(snapshot.note_call(sent, Ok(true)), ErrorChange::Unchanged);
            assert_eq!(
                snapshot.note_listen(sent, Err(&denied)),
                ErrorChange::Unchanged
            );
            assert!(snapshot.last_error().is_some());
        }
        assert_eq!(snapshot.note_listen(sent, Ok(())), ErrorChange::Over);
        assert!(snapshot.last_error().is_none());
    }
}
