//! What a worker has to say: changes of ownership and trouble, to the board, the log and the listeners.

use std::sync::Arc;

use super::board::Board;
use super::delivery::Delivery;
use crate::error::Result;
use crate::event::{Event, EventKind};
use crate::state::MutexState;

pub(super) struct Report {
    pub(super) mutex: Arc<str>,
    /// The contender's id, or that it is an observer: for the log.
    pub(super) who: Arc<str>,
    pub(super) board: Arc<Board>,
    pub(super) delivery: Delivery,
    /// Whether trouble is an event too.
    pub(super) failures: bool,
}

impl Report {
    pub(super) fn announce(&mut self, kind: EventKind, state: MutexState) {
        self.board.set_state(state.clone());
        self.delivery.deliver(Event::new(kind, &self.mutex, state));
    }

    /// As `outcome`; but while nobody rings us, success elsewhere does not mean that all is well.
    pub(super) fn outcome_while<T>(&mut self, listening: bool, outcome: Result<T>) -> Option<T> {
        match outcome {
            Ok(value) if !listening => Some(value),
            outcome => self.outcome(outcome),
        }
    }

    /// Takes note of what became of a call, and says so when the trouble is not the one there was.
    pub(super) fn outcome<T>(&mut self, outcome: Result<T>) -> Option<T> {
        let changed = self.board.note(outcome.as_ref().err());
        match outcome {
            Ok(value) => {
                if changed {
                    log::info!("{}: {}: the backend answers again", self.mutex, self.who);
                }
                Some(value)
            }
            Err(error) => {
                if changed {
                    log::warn!("{}: {}: {error}", self.mutex, self.who);
                    if self.failures {
                        let mut event =
                            Event::new(EventKind::Failed, &self.mutex, self.board.state());
                        event.error = Some(error);
                        self.delivery.deliver(event);
                    }
                }
                None
            }
        }
    }
}
