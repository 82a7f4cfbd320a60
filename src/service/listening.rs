//! How a service under construction will be listened to: what both builders have in common.

use std::fmt;
use std::sync::Arc;

use crossbeam_channel::Receiver;

use super::courier::{Executor, Target};
use super::delivery::Listener;
use crate::contender::Callbacks;
use crate::error::{Error, Result};
use crate::event::{Event, EventKind};

pub(super) struct Listening {
    pub(super) capacity: usize,
    pub(super) failures: bool,
    pub(super) callbacks: Callbacks,
    /// A type of the caller's own.
    pub(super) own: Option<Target>,
    pub(super) executor: Option<Executor>,
}

impl Listening {
    pub(super) fn on(&mut self, kind: EventKind, callback: impl FnMut(&Event) + Send + 'static) {
        self.failures |= kind == EventKind::Failed;
        self.callbacks.on(kind, callback);
    }

    pub(super) fn callbacks(self) -> Listener {
        let target: Option<Target> = match (self.own, self.callbacks.into_target()) {
            (Some(own), Some(callbacks)) => Some(Arc::new(move |event: &Event| {
                own(event);
                callbacks(event);
            })),
            (own, callbacks) => own.or(callbacks),
        };
        match target {
            Some(target) => Listener::Callbacks {
                target,
                executor: self.executor,
                capacity: self.capacity,
            },
            None => Listener::Nobody,
        }
    }

    pub(super) fn channel(self) -> Result<(Listener, Receiver<Event>)> {
        if self.own.is_some() || !self.callbacks.is_empty() {
            return Err(Error::invalid(
                "a service has either callbacks or a channel: give no callbacks, or call build()",
            ));
        }
        Ok(Listener::channel(self.capacity))
    }
}

impl Default for Listening {
    fn default() -> Listening {
        Listening {
            capacity: 256,
            failures: false,
            callbacks: Callbacks::default(),
            own: None,
            executor: None,
        }
    }
}

impl fmt::Debug for Listening {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listening")
            .field("capacity", &self.capacity)
            .field("failures", &self.failures)
            .field("callbacks", &self.callbacks)
            .finish_non_exhaustive()
    }
}
