//! `MutexContendService`: contends for a mutex on a thread of its own for as long as it runs.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::board::Board;
use super::claim::Claim;
use super::contend_worker::Worker;
use super::delivery::Listener;
use super::lifecycle::{Lifecycle, Status};
use super::report::Report;
use crate::backend::{Backend, Place};
use crate::clock::Moment;
use crate::contention::Contention;
use crate::error::{Error, Result};
use crate::period::ContendPeriod;
use crate::state::MutexState;

/// Contends for one mutex, as one contender, from `start` to `stop`.
///
/// Its worker thread acquires, renews, waits and contends again after a loss. Everything here may be
/// called from any thread, and nothing here waits for the backend but `stop` and dropping.
///
/// ```
/// use contend::EventKind;
///
/// let factory = contend::connect("memory://contend-service-doc")?;
/// let (service, events) = factory.contend("demo").id("a").channel()?;
/// service.start()?;
///
/// let event = events.recv().unwrap();
/// assert_eq!(event.kind, EventKind::Acquired);
/// assert!(service.is_owner());
/// assert_eq!(service.fence(), event.fence());
///
/// service.stop()?;
/// assert!(!service.is_owner());
/// assert_eq!(events.recv().unwrap().kind, EventKind::Released);
/// # Ok::<(), contend::Error>(())
/// ```
pub struct MutexContendService {
    pub(super) backend: Arc<dyn Backend>,
    pub(super) place: Place,
    pub(super) period: ContendPeriod,
    pub(super) initial_delay: Duration,
    pub(super) failures: bool,
    pub(super) listener: Listener,
    pub(super) board: Arc<Board>,
    pub(super) lifecycle: Lifecycle,
    /// Keeps the id from being used twice for as long as the service lives.
    pub(super) claim: Arc<Claim>,
}

impl MutexContendService {
    /// Starts to contend. Returns at once: a backend that cannot be reached is tried again and again,
    /// see [`last_error`](MutexContendService::last_error).
    ///
    /// # Errors
    /// `InvalidState` unless the status is `Initial`; `Unavailable` where the system has no thread
    /// left; `Forked` in a child process.
    pub fn start(&self) -> Result<()> {
        let name = format!("contend {}", self.place.mutex);
        self.lifecycle.start(name, || {
            self.board.clear();
            let delivery = self.listener.open(&self.place.mutex)?;
            let courier = delivery.number();
            let contention = Contention::new(
                Arc::clone(&self.place.id),
                self.place.lease,
                self.period,
                Moment::now() + self.initial_delay,
            );
            let report = Report {
                mutex: Arc::clone(&self.place.mutex),
                who: Arc::clone(&self.place.id),
                board: Arc::clone(&self.board),
                delivery,
                failures: self.failures,
            };
            let worker = Worker {
                seat: self.backend.seat(&self.place)?,
                lease: self.place.lease,
                contention,
                report,
                listening: false,
                _claim: Arc::clone(&self.claim),
            };
            Ok((move |bell| worker.run(&bell), courier))
        })
    }

    /// Gives the mutex up, leaves the queue and ends the thread. An owner's Released is delivered, and
    /// its callback has run, before the release is sent; nothing is delivered after this returns.
    ///
    /// Called from one of the service's own callbacks, it returns at once, and all that happens after
    /// the callback has returned. Stopping what is not started does nothing.
    ///
    /// # Errors
    /// `Timeout` where a callback hangs beyond the lease: the thread then ends when the callback does.
    pub fn stop(&self) -> Result<()> {
        self.stop_by(Moment::now() + self.stop_bound())
    }

    /// How long stopping takes at most: the running call, the callback up to the end of the lease, and
    /// the way out.
    pub(crate) fn stop_bound(&self) -> Duration {
        let lease = self.place.lease;
        lease.total() + lease.total() / 50 + lease.ttl() + Duration::from_secs(1)
    }

    /// As [`stop`](MutexContendService::stop), but waits no longer than this. What is left to do then is
    /// done without the caller.
    pub(crate) fn stop_by(&self, deadline: Moment) -> Result<()> {
        self.lifecycle.stop(&self.place.mutex, deadline)
    }

    /// What everybody may read, for who must not keep the service alive by reading it.
    pub(crate) fn board(&self) -> &Arc<Board> {
        &self.board
    }

    /// The mutex contended for.
    #[must_use]
    pub fn mutex(&self) -> &str {
        &self.place.mutex
    }

    /// The id contended under.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.place.id
    }

    /// Whether this contender owns the mutex: right at the moment of the call, even while the worker
    /// is blocked, the backend is gone or the machine has slept.
    #[must_use]
    pub fn is_owner(&self) -> bool {
        self.fence().is_some()
    }

    /// Whether this contender owns the mutex and is sure of it: as `is_owner`, and false as soon as the
    /// backend has not confirmed it for a ttl. They differ only where something else than the ttl keeps
    /// an ownership alive (a ZooKeeper session).
    #[must_use]
    pub fn is_in_ttl(&self) -> bool {
        self.is_owner() && self.board.state().is_in_ttl(&self.place.id)
    }

    /// The fence of the present ownership; `None` unless this contender owns.
    ///
    /// Pass it to whatever you protect, and let that refuse a smaller one than it has seen: then even
    /// what this library assumes about clocks and servers need not hold.
    #[must_use]
    pub fn fence(&self) -> Option<u64> {
        self.board.fence()
    }

    /// The last change of ownership that this contender saw.
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

impl Drop for MutexContendService {
    fn drop(&mut self) {
        if let Err(error) = self.stop() {
            log::warn!(
                "{}: dropped without a clean stop: {error}",
                self.place.mutex
            );
        }
    }
}

impl fmt::Debug for MutexContendService {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MutexContendService")
            .field("realm", &self.backend.realm())
            .field("mutex", &self.place.mutex)
            .field("id", &self.place.id)
            .field("status", &self.status())
            .field("fence", &self.fence())
            .finish()
    }
}
