//! The contract between contend and a technology that keeps mutexes, and the list of those there are.
//!
//! A backend is a folder here and a line in `SCHEMES`. Nothing above this module names one, and no
//! backend names another.
//!
//! # What a backend may assume
//! - Names, ids and leases were checked (`name.rs`, `lease.rs`).
//! - A [`RawContender`] or [`RawObserver`] is used by one thread at a time.
//!
//! # What a backend must never do
//! - Outlast `by`, the moment up to which a call may take. What cannot be bounded so tightly must not
//!   be started: return a `Timeout` error instead. Connections are opened by other threads, and the
//!   wait for one counts.
//! - Reuse a connection whose last request has no known outcome, or that says it is read-only.
//! - Say `Granted` or `Renewed` for anything but a fresh, full lease on the backend, counted there
//!   from a time not before the request was sent.
//! - Touch a lease whose fence is not the one that the call names.
//! - Grant the same mutex twice with fences that do not grow: `max(previous + 1, server time)`.
//! - Panic, or show a credential, whatever the server, the network or the caller does.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::factory::Factory;
use crate::lease::Lease;
use crate::owner::MutexOwner;
use crate::parker::Unparker;
use crate::probe::Probe;
use crate::url::Url;

pub use self::permit_store::PermitStore;

pub mod memory;
#[cfg(feature = "mysql")]
pub mod mysql;
pub mod permit_store;
#[cfg(feature = "redis")]
pub mod redis;
#[cfg(feature = "zk")]
pub mod zk;

/// `Some(path)` where the feature is on, and `None` where the path does not exist.
macro_rules! connect_with {
    ($feature:tt, $path:path) => {{
        #[cfg(feature = $feature)]
        let connect: Option<Connect> = Some($path);
        #[cfg(not(feature = $feature))]
        let connect: Option<Connect> = None;
        connect
    }};
}

/// Every URL scheme: the Cargo features it needs, and what connects it where the first of them is on.
const SCHEMES: &[(&str, &[&str], Option<Connect>)] = &[
    ("memory", &[], Some(memory::connect)),
    ("redis", &["redis"], connect_with!("redis", redis::connect)),
    (
        "rediss",
        &["redis", "tls"],
        connect_with!("redis", redis::connect),
    ),
    (
        "redis+cluster",
        &["redis"],
        connect_with!("redis", redis::connect),
    ),
    (
        "redis+sentinel",
        &["redis"],
        connect_with!("redis", redis::connect),
    ),
    ("mysql", &["mysql"], connect_with!("mysql", mysql::connect)),
    ("zk", &["zk"], connect_with!("zk", zk::connect)),
];

/// How long a mutex that was released is kept for the contender it was handed to. One value for all
/// backends and all processes: a shorter one elsewhere would void a valid hand-over.
pub const CLAIM_TIME: Duration = Duration::from_millis(500);

type Connect = fn(&Url) -> Result<Factory>;

/// One technology that keeps mutexes: a pool, a session or a registry, shared by many contenders.
///
/// Dropping the last reference closes what the backend holds and joins its threads, within a second.
pub trait Backend: fmt::Debug + Send + Sync {
    /// Where the mutexes are: the same text for two backends exactly if they share their mutexes, as
    /// far as one process can know. Goes into messages and logs, so it never contains a credential.
    fn realm(&self) -> &str;

    /// Returns a backend's side of a contender. Does no I/O, so it works while the server is away;
    /// refuses what this backend can tell at once that it could not keep.
    ///
    /// Unparks `wake` when a queued contender should try again, and when an owner should check (by renewing)
    /// whether it still owns; not on account of what this contender itself did.
    ///
    /// # Errors
    /// `InvalidInput`.
    fn contender(&self, contender: &Contender, wake: &Unparker) -> Result<Box<dyn RawContender>>;

    /// Returns a backend's side of an observer. Does no I/O.
    ///
    /// # Errors
    /// `InvalidInput`.
    fn observer(&self, mutex: &Arc<str>, wake: &Unparker) -> Result<Box<dyn RawObserver>>;

    /// Returns `true` if the lockers of a process queue in the process, one contender at a time on the server.
    fn one_per_process(&self) -> bool {
        false
    }

    /// Asks the server one question and waits for the answer.
    ///
    /// # Errors
    /// Any; the true cause, such as "connection refused".
    fn ping(&self, by: Moment) -> Result<()> {
        let _ = by;
        Err(unsupported(self.realm(), "ping"))
    }

    /// Reads who owns `mutex` now; `NONE` while it is free or only handed over.
    ///
    /// # Errors
    /// Any.
    fn owner(&self, mutex: &Arc<str>, by: Moment) -> Result<MutexOwner>;

    /// Reads who waits for `mutex`, in order, as far as the backend knows. The owner is not among them.
    ///
    /// # Errors
    /// Any.
    fn participants(&self, mutex: &Arc<str>, by: Moment) -> Result<Vec<Participant>> {
        let _ = (mutex, by);
        Err(unsupported(self.realm(), "participants"))
    }

    /// Reads the names of the mutexes that have an owner or a waiter, sorted.
    ///
    /// # Errors
    /// Any.
    fn list(&self, by: Moment) -> Result<Vec<Arc<str>>> {
        let _ = by;
        Err(unsupported(self.realm(), "list"))
    }

    /// Frees `mutex` at once if its owner has this `fence`, as an operator's delete does, notifies the
    /// owner and hands the mutex on. Returns `false` if there is no such ownership.
    ///
    /// # Errors
    /// Any; the outcome counts as unknown.
    fn revoke(&self, mutex: &Arc<str>, fence: u64, by: Moment) -> Result<bool> {
        let _ = (mutex, fence, by);
        Err(unsupported(self.realm(), "revoke"))
    }

    /// Reads how long ago the last recorded run of the mutex's schedule was, by the backend's clock.
    ///
    /// # Errors
    /// Any.
    fn last_run(&self, mutex: &Arc<str>, by: Moment) -> Result<Option<Duration>> {
        let _ = (mutex, by);
        Err(unsupported(self.realm(), "last_run"))
    }

    /// Records that a run is now, if the owner still has this `fence`; kept for at least `keep`.
    /// Returns `false` if it does not.
    ///
    /// # Errors
    /// Any; the outcome counts as unknown.
    fn record_run(&self, mutex: &Arc<str>, fence: u64, keep: Duration, by: Moment) -> Result<bool> {
        let _ = (mutex, fence, keep, by);
        Err(unsupported(self.realm(), "record_run"))
    }

    /// Returns what keeps the semaphores. Does no I/O.
    ///
    /// # Errors
    /// `Unsupported` where there are none.
    fn permits(&self) -> Result<Arc<dyn PermitStore>> {
        Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "{}: there are no semaphores on this backend; use redis://, mysql:// or memory://",
                self.realm()
            ),
        ))
    }

    /// Returns how waiting contenders learn of a release, and how the connections are used. Does no I/O.
    fn condition(&self) -> Condition {
        Condition::default()
    }

    /// Takes the probe that hears of connections. Called once, before the first contender is made.
    fn set_probe(&self, probe: Arc<dyn Probe>) {
        let _ = probe;
    }
}

/// A contender that waits for a mutex.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Participant {
    /// The contender's id, or what the backend keeps in its place (MySQL: a token).
    pub id: Arc<str>,
    /// Since when it waits, in epoch milliseconds on the backend's clock, if the backend knows.
    pub since: Option<u64>,
}

impl Participant {
    /// Creates a participant.
    pub fn new(id: impl Into<Arc<str>>, since: Option<u64>) -> Participant {
        Participant {
            id: id.into(),
            since,
        }
    }
}

/// What a backend knows about itself without asking the server.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Condition {
    /// How waiting contenders learn that a mutex was released.
    pub wakeups: Wakeups,
    /// The pool of connections, where there is one.
    pub pool: Option<PoolUse>,
}

/// How waiting contenders learn that a mutex was released.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Wakeups {
    /// No contender has waited yet, so it is not known whether wake-ups work.
    #[default]
    Untried,
    /// A release wakes the next contender.
    Working,
    /// Contenders poll; the text says why.
    Polling(Arc<str>),
}

/// The use of a connection pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolUse {
    /// Connections that are open.
    pub open: u32,
    /// Open connections that are not in use.
    pub idle: u32,
    /// The maximum number of connections.
    pub size: u32,
}

impl PoolUse {
    /// Creates a report of a pool's use.
    #[must_use]
    pub fn new(open: u32, idle: u32, size: u32) -> PoolUse {
        PoolUse { open, idle, size }
    }
}

/// Who contends for what: which mutex, under which id, for how long.
#[derive(Clone, Debug)]
pub struct Contender {
    /// The mutex.
    pub mutex: Arc<str>,
    /// The contender's id.
    pub id: Arc<str>,
    /// What an acquisition and a renewal grant.
    pub lease: Lease,
    /// What the mutex is wanted for.
    pub purpose: Purpose,
}

/// What an ownership is for: a hint for what is worth preparing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// A service leads for as long as it can: preparing a fast hand-off pays.
    Lead,
    /// A locker holds for the length of a critical section: an extra request would double its cost.
    Lock,
}

/// A backend's side of a contender for one mutex. It holds no lock across calls and starts no thread
/// of its own.
///
/// Dropping it ends its subscription, and does nothing that blocks.
pub trait RawContender: Send {
    /// Tries to become the owner. Idempotent for this id: if the backend already names it as owner, or has handed the
    /// mutex to it, that is adopted. The reply to an earlier attempt may have been lost, or a lease not renewed. The
    /// adopted lease has a higher fence and the full length, and never an earlier end.
    ///
    /// With [`OnRefusal::Enqueue`] it subscribes first, so that no wake-up falls between the attempt and the wait.
    /// A contender that cannot subscribe still tries, and names a short `retry_in`.
    ///
    /// After `by` the caller does not want the mutex any more. A server that can tell the time refuses a request that
    /// reaches it later, so a late request leaves no lease.
    ///
    /// # Errors
    /// Any; the outcome counts as unknown, unless the error [`is_not_sent`](Error::is_not_sent).
    fn acquire(&mut self, on_refusal: OnRefusal, by: Moment) -> Result<Attempt>;

    /// Sets the lease with this `fence` anew, never to an earlier end. Creates none, and does not bring
    /// back one that ran out.
    ///
    /// # Errors
    /// Any; the outcome counts as unknown, and belief runs on to its old end.
    fn renew(&mut self, fence: u64, by: Moment) -> Result<Renewal>;

    /// Ends the lease with this `fence` and lets the next contender know. `false`: there was none.
    ///
    /// # Errors
    /// Any; the outcome counts as unknown.
    fn release(&mut self, fence: u64, by: Moment) -> Result<bool>;

    /// Leaves the queue and the subscription, passing on what was handed to this contender: no trace is
    /// left. Owns nothing when called.
    ///
    /// # Errors
    /// Any; what is left then goes away by itself in time.
    fn withdraw(&mut self, by: Moment) -> Result<()>;
}

fn unsupported(realm: &str, what: &str) -> Error {
    Error::new(
        ErrorKind::Unsupported,
        format!("{realm}: {what} is not available on this backend"),
    )
}

/// Whether a refused attempt leaves a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnRefusal {
    /// Take it if it is free, and leave no trace if it is not.
    Leave,
    /// Take it, or stand in the queue for it.
    Enqueue,
}

/// The outcome of an attempt to acquire.
#[derive(Clone, Debug)]
pub enum Attempt {
    /// This contender owns it.
    Granted(Grant),
    /// Another contender owns it, or comes first.
    Refused(Refusal),
}

/// An ownership, fresh from the backend. The fence is the owner's.
#[derive(Clone, Debug)]
pub struct Grant {
    /// The snapshot, with the contender's id.
    pub owner: MutexOwner,
    /// `None`: the lease counts from the moment the call began. `Some`: the backend knows until when it
    /// may be believed, because something else keeps it alive (a ZooKeeper session) or because the
    /// request was sent before the call.
    pub until: Option<Moment>,
}

/// Why a contender does not own.
#[derive(Clone, Debug)]
pub struct Refusal {
    /// Who owns, as far as the backend told; `NONE` while the mutex is kept for a waiter.
    pub owner: MutexOwner,
    /// When to try again if not woken before: the end of the lease or hand-over seen, or the
    /// interval at which this backend must be polled. Never far beyond the lease.
    pub retry_in: Duration,
}

/// The outcome of a renewal.
#[derive(Clone, Debug)]
pub enum Renewal {
    /// The contender owns it still, with the same fence.
    Renewed(Grant),
    /// It does not: who does, as far as the backend told.
    Lost(MutexOwner),
}

/// A backend's side of an observer of one mutex.
pub trait RawObserver: Send {
    /// Subscribes to changes of the owner, then reads who owns the mutex now. Leaves no trace.
    ///
    /// # Errors
    /// Any.
    fn observe(&mut self, by: Moment) -> Result<View>;
}

/// What an observer saw.
#[derive(Clone, Debug)]
pub struct View {
    /// The owner.
    pub owner: MutexOwner,
    /// When to look again if not woken before.
    pub look_in: Duration,
}

/// Connects by URL.
pub(crate) fn connect(text: &str) -> Result<Factory> {
    connect_url(&Url::parse(text)?)
}

/// Connects by a URL that was taken apart.
pub(crate) fn connect_url(url: &Url) -> Result<Factory> {
    match SCHEMES.iter().find(|(scheme, ..)| *scheme == url.scheme) {
        Some((_, _, Some(connect))) => connect(url),
        Some((scheme, features, None)) => Err(disabled(scheme, features)),
        None => Err(Error::invalid(format!(
            "unknown backend {:?}; known are: {}",
            url.scheme,
            SCHEMES
                .iter()
                .map(|(scheme, ..)| format!("{scheme}://"))
                .collect::<Vec<_>>()
                .join(", "),
        ))),
    }
}

/// Why a URL of this scheme cannot be used, and what to write into `Cargo.toml`.
fn disabled(scheme: &str, features: &[&str]) -> Error {
    let plural = if features.len() > 1 { "s" } else { "" };
    let named: Vec<_> = features.iter().map(|it| format!("{it:?}")).collect();
    let named = named.join(", ");
    let version = env!("CARGO_PKG_VERSION");
    Error::new(
        ErrorKind::FeatureDisabled,
        format!(
            "a {scheme}:// URL needs the Cargo feature{plural} {named}: \
             contend = {{ version = \"{version}\", features = [{named}] }}"
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scheme_whose_features_are_off_names_all_of_them() {
        for (scheme, says) in [
            ("zk", r#"feature "zk": contend = "#),
            ("rediss", r#"features "redis", "tls": contend = "#),
        ] {
            let known = SCHEMES.iter().find(|(it, ..)| *it == scheme);
            let (_, features, _) = known.unwrap();
            let error = disabled(scheme, features);
            assert_eq!(error.kind(), ErrorKind::FeatureDisabled);
            assert!(error.to_string().contains(says), "{error}");
            let listed = format!("features = {features:?} }}");
            assert!(error.to_string().ends_with(&listed), "{error}");
        }
    }
}
