//! One run's delivery of events: through the caller's channel, or by a courier to callbacks.

use std::sync::Arc;

use crossbeam_channel::Receiver;
use parking_lot::Mutex;

use super::courier::{Courier, Executor, Target};
use super::outbox::Outbox;
use crate::clock::Moment;
use crate::error::Result;
use crate::event::Event;

/// Who listens to a service.
pub(crate) enum Listener {
    /// A receiver that the caller holds; it outlives restarts.
    Channel(Arc<Mutex<Outbox>>),
    /// Callbacks; every run has a courier of its own.
    Callbacks {
        target: Target,
        executor: Option<Executor>,
        capacity: usize,
    },
    /// Nobody.
    Nobody,
}

/// How a worker delivers.
pub(crate) struct Delivery {
    outbox: Option<Arc<Mutex<Outbox>>>,
    courier: Option<Courier>,
}

impl Listener {
    pub(crate) fn channel(capacity: usize) -> (Listener, Receiver<Event>) {
        let (outbox, receiver) = Outbox::new(capacity);
        (Listener::Channel(Arc::new(Mutex::new(outbox))), receiver)
    }

    pub(crate) fn open(&self, mutex: &str) -> Result<Delivery> {
        let (outbox, courier) = match self {
            Listener::Channel(outbox) => (Some(Arc::clone(outbox)), None),
            Listener::Callbacks {
                target,
                executor,
                capacity,
            } => {
                let (outbox, events) = Outbox::new(*capacity);
                let courier = Courier::start(mutex, events, Arc::clone(target), executor.clone())?;
                (Some(Arc::new(Mutex::new(outbox))), Some(courier))
            }
            Listener::Nobody => (None, None),
        };
        Ok(Delivery { outbox, courier })
    }
}

impl Delivery {
    /// The courier's number, to know a callback that calls its own service; 0 without one.
    pub(crate) fn number(&self) -> u64 {
        self.courier.as_ref().map_or(0, Courier::number)
    }

    pub(crate) fn deliver(&mut self, event: Event) {
        let Some(outbox) = &self.outbox else {
            return;
        };
        outbox.lock().push(event);
        if let Some(courier) = &self.courier {
            courier.nudge();
        }
    }

    /// Whether something is held back for want of room. Sends it if there is some now.
    pub(crate) fn is_behind(&mut self) -> bool {
        let Some(outbox) = &self.outbox else {
            return false;
        };
        let behind = !outbox.lock().catch_up();
        if !behind && let Some(courier) = &self.courier {
            courier.nudge();
        }
        behind
    }

    /// Waits until callbacks have run for all that was delivered, but not beyond `deadline`.
    pub(crate) fn settle(&mut self, deadline: Moment) -> bool {
        match (&self.courier, &self.outbox) {
            (Some(courier), Some(outbox)) => {
                let sent = outbox.lock().sent();
                courier.settle(sent, deadline)
            }
            _ => true,
        }
    }

    /// Ends delivery: nothing comes after this, and the courier is gone. Waits for a callback that runs,
    /// and until `deadline` for an executor to begin the rest.
    pub(crate) fn close(mut self, deadline: Moment) {
        let sent = self.outbox.take().map_or(0, |outbox| outbox.lock().sent());
        if let Some(courier) = self.courier.take() {
            courier.finish(sent, deadline);
        }
    }
}
