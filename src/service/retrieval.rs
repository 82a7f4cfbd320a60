//! `MutexRetrievalService`: follows who owns a mutex, without contending for it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::board::Board;
use super::delivery::Listener;
use super::lifecycle::{Lifecycle, Status};
use super::report::Report;
use super::retrieval_worker::Worker;
use crate::backend::Backend;
use crate::bell::Bell;
use crate::clock::Moment;
use crate::error::{Error, Result};
use crate::lease::Lease;
use crate::observation::Observation;
use crate::state::MutexState;

/// Follows who owns a mutex. It converges on the present owner, and may skip owners in between.
///
/// ```
/// use contend::EventKind;
///
/// let factory = contend::connect("memory://retrieval-doc")?;
/// let (observer, owners) = factory.observe("demo").channel()?;
/// observer.start()?;
///
/// let leader = factory.contend("demo").id("a").build()?;
/// leader.start()?;
///
/// let event = owners.recv().unwrap();
/// assert_eq!(event.kind, EventKind::OwnerChanged);
/// assert_eq!(event.state.after().owner_id(), "a");
/// # Ok::<(), contend::Error>(())
/// ```
pub struct MutexRetrievalService {
    pub(super) backend: Arc<dyn Backend>,
    pub(super) mutex: Arc<str>,
    pub(super) lease: Lease,
    pub(super) failures: bool,
    pub(super) listener: Listener,
    pub(super) board: Arc<Board>,
    pub(super) lifecycle: Lifecycle,
}

impl MutexRetrievalService {
    /// Starts to look. Returns at once.
    ///
    /// # Errors
    /// `InvalidState` unless the status is `Initial`; `Unavailable` where the system has no thread
    /// left; `Forked` in a child process.
    pub fn start(&self) -> Result<()> {
        let name = format!("observe {}", self.mutex);
        self.lifecycle.start(name, || {
            self.board.clear();
            let delivery = self.listener.open(&self.mutex)?;
            let courier = delivery.number();
            let worker = Worker {
                watch: self.backend.watch(&self.mutex)?,
                lease: self.lease,
                observation: Observation::new(self.lease, Moment::now()),
                report: Report {
                    mutex: Arc::clone(&self.mutex),
                    who: Arc::from("observer"),
                    board: Arc::clone(&self.board),
                    delivery,
                    failures: self.failures,
                },
                listening: false,
            };
            Ok((move |bell: Bell| worker.run(&bell), courier))
        })
    }

    /// Stops looking and ends the thread; nothing is delivered after this returns. Called from one of
    /// the service's own callbacks, it returns at once.
    ///
    /// # Errors
    /// `Timeout` where a callback hangs: the thread then ends when the callback does.
    pub fn stop(&self) -> Result<()> {
        let bound = self.lease.total() + Duration::from_secs(2);
        self.lifecycle.stop(&self.mutex, Moment::now() + bound)
    }

    /// The mutex followed.
    #[must_use]
    pub fn mutex(&self) -> &str {
        &self.mutex
    }

    /// The last change of ownership that was seen.
    #[must_use]
    pub fn state(&self) -> MutexState {
        self.board.state()
    }

    /// Where the service is in its life.
    #[must_use]
    pub fn status(&self) -> Status {
        self.lifecycle.status()
    }

    /// Whether the status is `Starting` or `Running`.
    #[must_use]
    pub fn is_active(&self) -> bool {
        self.status().is_active()
    }

    /// Whether the status is `Running`.
    #[must_use]
    pub fn running(&self) -> bool {
        self.status() == Status::Running
    }

    /// The trouble that the service has with its backend; `None` once that answers again.
    #[must_use]
    pub fn last_error(&self) -> Option<Error> {
        self.board.last_error()
    }
}

impl Drop for MutexRetrievalService {
    fn drop(&mut self) {
        if let Err(error) = self.stop() {
            log::warn!("{}: dropped without a clean stop: {error}", self.mutex);
        }
    }
}

impl fmt::Debug for MutexRetrievalService {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MutexRetrievalService")
            .field("realm", &self.backend.realm())
            .field("mutex", &self.mutex)
            .field("status", &self.status())
            .finish()
    }
}
