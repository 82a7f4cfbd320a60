//! What everybody may read about a service: a snapshot that its worker publishes.
//!
//! The lock is held for a few instructions and never across I/O. Reader and worker read the clock
//! *inside* it: so once a reader has seen a deadline passed, no renewal can revive it.

use std::time::Duration;

use parking_lot::Mutex;

use crate::clock::Moment;
use crate::contention::Contention;
use crate::error::Error;
use crate::fork::Origin;
use crate::owner::MutexOwner;
use crate::state::MutexState;

#[derive(Debug, Default)]
pub(crate) struct Board {
    notes: Mutex<Notes>,
    /// A child process inherits this memory, but not the ownership.
    origin: Origin,
}

#[derive(Debug, Default)]
struct Notes {
    state: MutexState,
    /// The end of belief, and the fence.
    belief: Option<(Moment, u64)>,
    last_error: Option<Error>,
}

impl Board {
    /// Lets the machine decide, and publishes what it believes then, as one step.
    pub(crate) fn decide<T>(
        &self,
        contention: &mut Contention,
        decide: impl FnOnce(&mut Contention, Moment) -> T,
    ) -> T {
        let mut notes = self.notes.lock();
        let decision = decide(contention, Moment::now());
        notes.belief = contention.belief();
        decision
    }

    /// The fence, if the deadline has not passed.
    pub(crate) fn fence(&self) -> Option<u64> {
        let notes = self.notes.lock();
        let now = Moment::now();
        notes
            .belief
            .filter(|(until, _)| now < *until && self.origin.is_here())
            .map(|(_, fence)| fence)
    }

    /// How long the deadline is away; zero once it has passed.
    pub(crate) fn valid_for(&self) -> Duration {
        let notes = self.notes.lock();
        notes
            .belief
            .filter(|_| self.origin.is_here())
            .map_or(Duration::ZERO, |(until, _)| until.remaining())
    }

    pub(crate) fn state(&self) -> MutexState {
        self.notes.lock().state.clone()
    }

    pub(crate) fn set_state(&self, state: MutexState) {
        self.notes.lock().state = state;
    }

    /// The owner is the same, its lease is not.
    pub(crate) fn refresh(&self, owner: &MutexOwner) {
        let mut notes = self.notes.lock();
        let before = notes.state.after().clone();
        notes.state = MutexState::new(before, owner.clone());
    }

    pub(crate) fn last_error(&self) -> Option<Error> {
        self.notes.lock().last_error.clone()
    }

    /// Notes the outcome of a call. `true`: the trouble is not the one there was.
    pub(crate) fn note(&self, error: Option<&Error>) -> bool {
        let mut notes = self.notes.lock();
        let same = match (&notes.last_error, error) {
            (None, None) => true,
            (Some(old), Some(new)) => old.kind() == new.kind(),
            _ => false,
        };
        if !same || error.is_some() {
            notes.last_error = error.cloned();
        }
        !same
    }

    /// As it was before the first start.
    pub(crate) fn clear(&self) {
        *self.notes.lock() = Notes::default();
    }
}
