//! The callback contracts, for types of one's own; and closures as a ready-made way to fulfil them.

use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;

use super::delivery::Target;
use crate::event::{Event, EventKind};

/// Follows who owns a mutex, without contending for it.
pub trait MutexRetriever: Send + Sync {
    /// The mutex to follow.
    fn mutex(&self) -> &str;

    /// The owner changed. Runs on a thread of the service's own, or on the executor it was given.
    fn notify_owner(&self, event: &Event);
}

/// Contends for a mutex, and is told when it owns it and when no more.
///
/// Callbacks run one after the other on a thread of the service's own, or on the executor it was
/// given; they may be slow, panic, or stop the service.
pub trait MutexContender: Send + Sync {
    /// The mutex to contend for.
    fn mutex(&self) -> &str;

    /// This contender's id: no other contender of the mutex may have it.
    fn contender_id(&self) -> &str;

    /// This contender became the owner. Logs by default.
    fn on_acquired(&self, event: &Event) {
        log::info!(
            "{}: {} acquired, fence {:?}",
            event.mutex,
            self.contender_id(),
            event.fence()
        );
    }

    /// This contender ceased to be the owner: nobody else begins before this returns, as long as the
    /// lease lasts. Logs by default.
    fn on_released(&self, event: &Event) {
        log::info!(
            "{}: {} released, fence {:?}",
            event.mutex,
            self.contender_id(),
            event.fence()
        );
    }

    /// Every event; by default it goes on to [`on_acquired`](MutexContender::on_acquired) and
    /// [`on_released`](MutexContender::on_released).
    fn notify_owner(&self, event: &Event) {
        match event.kind {
            EventKind::Acquired => self.on_acquired(event),
            EventKind::Released => self.on_released(event),
            _ => {}
        }
    }
}

/// Closures by the kind of event they want.
#[derive(Default)]
pub(crate) struct Callbacks {
    list: Vec<(EventKind, Mutex<Callback>)>,
}

type Callback = Box<dyn FnMut(&Event) + Send>;

impl Callbacks {
    pub(crate) fn on(&mut self, kind: EventKind, callback: impl FnMut(&Event) + Send + 'static) {
        self.list.push((kind, Mutex::new(Box::new(callback))));
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// `None` without any.
    pub(crate) fn into_target(self) -> Option<Target> {
        if self.list.is_empty() {
            return None;
        }
        Some(Arc::new(move |event: &Event| {
            for (kind, callback) in &self.list {
                if *kind == event.kind {
                    (callback.lock())(event);
                }
            }
        }))
    }
}

impl fmt::Debug for Callbacks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list()
            .entries(self.list.iter().map(|(kind, _)| kind))
            .finish()
    }
}
