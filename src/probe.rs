//! `Probe`: is told what happens inside a factory (grants, renewals, losses, connections), for metrics.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::error::Error;

/// Receives notifications of what a factory's services, lockers, schedulers and semaphores do.
///
/// Every method does nothing by default, so an implementation defines only the methods that it needs.
/// Methods are called from worker threads and from callers' threads, between requests: they must return
/// at once, and neither stop a service nor have it resign. A panic in one is caught and logged.
///
/// ```
/// use contend::{LossReason, Probe};
/// use std::sync::Arc;
/// use std::time::Duration;
///
/// struct Losses;
///
/// impl Probe for Losses {
///     fn lost(&self, mutex: &str, _id: &str, _: u64, held: Duration, why: LossReason) {
///         println!("{mutex}: held for {held:?}, {why}");
///     }
/// }
///
/// let factory = contend::connect("memory://probe-doc")?.with_probe(Arc::new(Losses));
/// factory.locker("reports").build()?.lock()?.unlock()?;
/// # Ok::<(), contend::Error>(())
/// ```
#[allow(unused_variables)]
pub trait Probe: Send + Sync {
    /// Called when an attempt to acquire `mutex` has ended, which took `took`.
    fn acquire(&self, mutex: &str, outcome: AcquireOutcome<'_>, took: Duration) {}

    /// Called when a renewal of the lease on `mutex` has ended, which took `took`.
    fn renew(&self, mutex: &str, outcome: RenewOutcome<'_>, took: Duration) {}

    /// Called when a contender became the owner of `mutex`.
    fn gained(&self, mutex: &str, id: &str, fence: u64) {}

    /// Called when a contender stopped owning `mutex` after `held`, which counts to the end of its lease at most,
    /// however late that is noticed.
    fn lost(&self, mutex: &str, id: &str, fence: u64, held: Duration, reason: LossReason) {}

    /// Called when a `lock` call on `mutex` returned after `waited`, with or without the lock.
    fn waited(&self, mutex: &str, waited: Duration, locked: bool) {}

    /// Called when a contender that was woken became the owner of `mutex`, this long after the wake-up.
    fn handed_off(&self, mutex: &str, took: Duration) {}

    /// Called when a connection to the backend was opened.
    fn connected(&self) {}

    /// Called when a connection to the backend was lost or could not be opened.
    fn disconnected(&self, error: &Error) {}

    /// Called when a scheduled run of `mutex` ended.
    fn scheduled_run(&self, mutex: &str, outcome: RunOutcomeKind, late: Duration, took: Duration) {}

    /// Called when guards of this process hold `count` more permits of `semaphore`, or fewer if it is negative. Permits
    /// count from the grant of their guard to its end, lost or not. Those acquired without a guard do not count.
    fn permits(&self, semaphore: &str, count: i64) {}

    /// Called when an acquire found `semaphore` exhausted.
    fn exhausted(&self, semaphore: &str) {}
}

/// The outcome of an attempt to acquire.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum AcquireOutcome<'a> {
    /// The contender owns the mutex.
    Granted,
    /// Another contender owns it, or comes first.
    Refused,
    /// No request could be sent to the backend, or it did not answer.
    Failed(&'a Error),
}

/// The outcome of a renewal.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum RenewOutcome<'a> {
    /// The lease was renewed.
    Renewed,
    /// The contender no longer owns the mutex.
    Lost,
    /// No request could be sent to the backend, or it did not answer.
    Failed(&'a Error),
}

/// Why an ownership ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LossReason {
    /// The owner gave it up: stopped, resigned, unlocked or dropped.
    Released,
    /// The lease ended without a renewal.
    Expired,
    /// The backend reported that the mutex is free or has another owner: it was taken away, deleted or
    /// revoked.
    TakenAway,
    /// The backend panicked.
    Panicked,
}

/// The outcome of a scheduled run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RunOutcomeKind {
    /// The work returned `Ok`.
    Ok,
    /// The work returned an error.
    Failed,
    /// The work panicked.
    Panicked,
    /// The scheduler was stopped while the work ran.
    Cancelled,
    /// Leadership was lost while the work ran.
    Lost,
}

impl fmt::Display for LossReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            LossReason::Released => "released",
            LossReason::Expired => "the lease ended without a renewal",
            LossReason::TakenAway => "taken away",
            LossReason::Panicked => "the backend panicked",
        })
    }
}

/// A probe, or none. Costs a branch where there is none.
#[derive(Clone, Default)]
pub(crate) struct Probed(Arc<OnceLock<Arc<dyn Probe>>>);

impl Probed {
    /// Sets the probe of all clones. `false`: there was one.
    pub(crate) fn set(&self, probe: Arc<dyn Probe>) -> bool {
        self.0.set(probe).is_ok()
    }

    pub(crate) fn is_some(&self) -> bool {
        self.0.get().is_some()
    }

    /// Tells the probe, if there is one. A probe that panics must not end a worker.
    pub(crate) fn tell(&self, what: impl FnOnce(&dyn Probe)) {
        if let Some(probe) = self.0.get() {
            let told = std::panic::AssertUnwindSafe(|| what(&**probe));
            if std::panic::catch_unwind(told).is_err() {
                log::error!("a probe panicked; its other calls still come");
            }
        }
    }
}

impl fmt::Debug for Probed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_some() { "Probe" } else { "no probe" })
    }
}
