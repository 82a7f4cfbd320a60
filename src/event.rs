//! What a listener is told.

use std::sync::Arc;

use crate::error::Error;
use crate::state::MutexState;

/// A change of ownership, or trouble, of one service.
///
/// Per service, Acquired and Released alternate strictly, and each comes exactly once.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Event {
    /// What happened.
    pub kind: EventKind,
    /// The mutex it happened to.
    pub mutex: Arc<str>,
    /// Who owned before, and who owns after. For a failure: the state as it was.
    pub state: MutexState,
    /// What went wrong, for [`EventKind::Failed`].
    pub error: Option<Error>,
    /// How many events before this one were dropped because nobody read them: complete pairs of
    /// Acquired and Released, and changes that a later one made obsolete.
    pub missed: u64,
}

/// The kinds of [`Event`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum EventKind {
    /// This contender became the owner.
    Acquired,
    /// This contender ceased to be the owner.
    Released,
    /// Another owner was seen, or that there is none.
    OwnerChanged,
    /// The backend cannot be used; the service keeps trying. Only for who asked for failures.
    Failed,
}

impl Event {
    pub(crate) fn new(kind: EventKind, mutex: &Arc<str>, state: MutexState) -> Event {
        Event {
            kind,
            mutex: Arc::clone(mutex),
            state,
            error: None,
            missed: 0,
        }
    }

    /// The fence of the ownership that this event is about: that which began, ended, or was seen.
    #[must_use]
    pub fn fence(&self) -> Option<u64> {
        let owner = match self.kind {
            EventKind::Released => self.state.before(),
            _ => self.state.after(),
        };
        (!owner.owner_id().is_empty()).then(|| owner.fence())
    }
}
