//! `MutexContender` and `MutexRetriever`: the callbacks of a type of your own.

use crate::event::{Event, EventKind};

/// Follows who owns a mutex, without contending for it. Give it to
/// [`Factory::observe_as`](crate::Factory::observe_as).
///
/// ```
/// use contend::{Event, MutexRetriever};
///
/// struct Dashboard;
///
/// impl MutexRetriever for Dashboard {
///     fn mutex(&self) -> &str {
///         "nightly-report"
///     }
///     fn notify_owner(&self, event: &Event) {
///         println!("owned by {:?}", event.state.after().owner_id());
///     }
/// }
///
/// let factory = contend::connect("memory://retriever-doc")?;
/// let observer = factory.observe_as(Dashboard).build()?;
/// observer.start()?;
/// # Ok::<(), contend::Error>(())
/// ```
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
/// given; they may be slow, panic, or stop the service. Give it to
/// [`Factory::contend_as`](crate::Factory::contend_as).
///
/// ```
/// use contend::{Event, MutexContender};
///
/// struct Report;
///
/// impl MutexContender for Report {
///     fn mutex(&self) -> &str {
///         "nightly-report"
///     }
///     fn contender_id(&self) -> &str {
///         "host-7"
///     }
///     fn on_acquired(&self, event: &Event) {
///         println!("leading with fence {:?}", event.fence());
///     }
/// }
///
/// let factory = contend::connect("memory://contender-doc")?;
/// let service = factory.contend_as(Report).build()?;
/// service.start()?;
/// # Ok::<(), contend::Error>(())
/// ```
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

    /// Called when this contender stopped being the owner. As long as the lease lasts, no other contender becomes
    /// the owner before this returns. Logs by default.
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
