//! What other threads read of a contender or observer: its belief, the last owner seen and whether calls are
//! answered. The lock is held for a few instructions. Readers and the worker read the clock *inside* it, so that
//! once a reader has seen a deadline passed, no renewal extends it.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::{MappedMutexGuard, Mutex, MutexGuard};

use crate::clock::Moment;
use crate::error::Error;
use crate::owner::{MutexOwner, MutexState};
use crate::ownership::{Loss, Ownership};

/// Whether calls are answered.
#[derive(Clone, Debug, Default)]
pub(crate) struct Link {
    pub(crate) last_answer: Option<Moment>,
    /// The newest error, and when the first call that failed since the last answer was sent.
    failing: Option<(Error, Moment)>,
}

impl Link {
    /// Notes how a call that was sent at `sent` ended `now`. Returns `true` if trouble began or ended with it.
    pub(crate) fn note(&mut self, sent: Moment, now: Moment, error: Option<&Error>) -> bool {
        match error {
            None => {
                self.last_answer = Some(now);
                self.failing.take().is_some()
            }
            Some(error) => {
                let since = self.failing.as_ref().map_or(sent, |(_, since)| *since);
                self.failing.replace((error.clone(), since)).is_none()
            }
        }
    }

    pub(crate) fn contact(&self) -> Contact {
        match &self.failing {
            Some((error, since)) => Contact::Failing {
                error: error.clone(),
                lasting: Moment::now() - *since,
            },
            None if self.last_answer.is_some() => Contact::Fine,
            None => Contact::Untried,
        }
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
    /// The last call failed, or the service stepped down because the receiver of its events was dropped.
    Failing {
        /// The error.
        error: Error,
        /// How long that has lasted, since the first call that failed was sent.
        lasting: Duration,
    },
}

#[derive(Debug, Default)]
pub(crate) struct Shared {
    parts: Mutex<Parts>,
}

#[derive(Debug, Default)]
struct Parts {
    /// The end of belief, and the fence.
    belief: Option<(Moment, u64)>,
    /// Closed when the ownership that was announced last ends. A guard has one of its own.
    loss: Arc<Loss>,
    state: MutexState,
    link: Link,
}

impl Shared {
    /// What is believed, locked: no reader sees it before the guard is dropped.
    pub(crate) fn belief(&self) -> MappedMutexGuard<'_, Option<(Moment, u64)>> {
        MutexGuard::map(self.parts.lock(), |parts| &mut parts.belief)
    }

    /// The fence, if the deadline has not passed.
    pub(crate) fn fence(&self) -> Option<u64> {
        let belief = self.belief();
        let now = Moment::now();
        belief
            .filter(|(until, _)| now < *until)
            .map(|(_, fence)| fence)
    }

    /// How long the ownership with this fence certainly lasts; zero once it is over.
    pub(crate) fn valid_for(&self, fence: u64) -> Duration {
        let belief = self.belief();
        let belief = belief.filter(|(_, present)| *present == fence);
        belief.map_or(Duration::ZERO, |(until, _)| until.remaining())
    }

    /// The ownership with this fence, if it lasts.
    pub(crate) fn ownership(self: &Arc<Shared>, fence: u64) -> Option<Ownership> {
        let loss = Arc::clone(&self.parts.lock().loss);
        let ownership = Ownership::new(self, fence, loss);
        ownership.is_valid().then_some(ownership)
    }

    /// Tells the holders of the service's ownership that it is over.
    pub(crate) fn end_ownership(&self) {
        std::mem::take(&mut self.parts.lock().loss).close();
    }

    pub(crate) fn state(&self) -> MutexState {
        self.parts.lock().state.clone()
    }

    pub(crate) fn set_state(&self, state: MutexState) {
        self.parts.lock().state = state;
    }

    /// Publishes a renewed lease: the same owner before and after.
    pub(crate) fn refresh(&self, owner: &MutexOwner) {
        let mut parts = self.parts.lock();
        let before = parts.state.after().clone();
        parts.state = MutexState::new(before, owner.clone());
    }

    pub(crate) fn note(&self, sent: Moment, now: Moment, error: Option<&Error>) -> bool {
        self.parts.lock().link.note(sent, now, error)
    }

    pub(crate) fn contact(&self) -> Contact {
        self.parts.lock().link.contact()
    }

    pub(crate) fn last_error(&self) -> Option<Error> {
        let parts = self.parts.lock();
        parts.link.failing.as_ref().map(|(error, _)| error.clone())
    }

    /// Notes why the service steps down for good.
    pub(crate) fn fail(&self, error: Error) {
        self.parts.lock().link.failing = Some((error, Moment::now()));
    }

    /// For a new run: as it was at first.
    pub(crate) fn clear(&self) {
        *self.parts.lock() = Parts::default();
    }
}
