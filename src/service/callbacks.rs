//! `MutexContender` and `MutexRetriever`: the callbacks of a type of your own.

use crate::event::{Event, EventKind};

/// Follows who owns a mutex, without contending for it.
pub trait MutexRetriever: Send + Sync {
    /// Returns the mutex to follow.
    fn mutex(&self) -> &str;

    /// Called when the owner changed, and for errors of the backend if
    /// [`failures`](crate::ObserveBuilder::failures) is on. Runs on a separate thread of the service, or on the
    /// executor it was given.
    fn notify_owner(&self, event: &Event);
}

/// Contends for a mutex, and is notified when it becomes the owner and when it stops being the owner.
///
/// Callbacks run one after the other on a separate thread of the service, or on the executor it was
/// given; they may be slow, panic, or stop the service.
pub trait MutexContender: Send + Sync {
    /// Returns the mutex to contend for.
    fn mutex(&self) -> &str;

    /// Returns this contender's id. No other contender of the mutex may have it.
    fn contender_id(&self) -> &str;

    /// Called when this contender became the owner. Logs by default.
    fn on_acquired(&self, event: &Event) {
        log::info!(
            "{}: {} acquired, fence {:?}",
            event.mutex,
            self.contender_id(),
            event.fence()
        );
    }

    /// Called when this contender stopped being the owner. Nobody else becomes the owner before this
    /// returns, as long as the lease lasts. Logs by default.
    fn on_released(&self, event: &Event) {
        log::info!(
            "{}: {} released, fence {:?}",
            event.mutex,
            self.contender_id(),
            event.fence()
        );
    }

    /// Called for every event. By default, it calls [`on_acquired`](MutexContender::on_acquired) and
    /// [`on_released`](MutexContender::on_released).
    fn notify_owner(&self, event: &Event) {
        match event.kind {
            EventKind::Acquired => self.on_acquired(event),
            EventKind::Released => self.on_released(event),
            _ => {}
        }
    }
}
