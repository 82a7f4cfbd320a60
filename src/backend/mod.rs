//! The contract between contend and a technology that keeps mutexes, and the list of those there are.
//!
//! A backend is a folder here and a line in `SCHEMES`. Nothing above this module names one, and no
//! backend names another.
//!
//! # What a backend may assume
//! - Names, ids and leases were checked (`name.rs`, `lease.rs`).
//! - A [`Seat`] or [`Watch`] is used by one thread at a time.
//! - Whoever acquires through a seat calls [`Seat::listen`] before it waits, and tries once more
//!   between listening and waiting.
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

use crate::bell::Waker;
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::factory::Factory;
use crate::lease::Lease;
use crate::owner::MutexOwner;
use crate::url::Url;

pub mod memory;
#[cfg(feature = "mysql")]
pub mod mysql;
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

/// Every URL scheme: the Cargo feature it needs, and what connects it where that feature is on.
const SCHEMES: &[(&str, &str, Option<Connect>)] = &[
    ("memory", "", Some(memory::connect)),
    ("redis", "redis", connect_with!("redis", redis::connect)),
    ("rediss", "redis", connect_with!("redis", redis::connect)),
    (
        "redis+cluster",
        "redis",
        connect_with!("redis", redis::connect),
    ),
    ("mysql", "mysql", connect_with!("mysql", mysql::connect)),
    ("zk", "zk", connect_with!("zk", zk::connect)),
];

type Connect = fn(&Url) -> Result<Factory>;

/// One technology that keeps mutexes: a pool, a session or a registry, shared by many seats.
///
/// Dropping the last reference closes what the backend holds and joins its threads, within a bound.
pub trait Backend: fmt::Debug + Send + Sync {
    /// Where the mutexes are: the same text for two backends exactly if they share their mutexes, as
    /// far as one process can know. Goes into messages and logs, so it never contains a credential.
    fn realm(&self) -> &str;

    /// A contender's place at a mutex. Does no I/O, so it works while the server is away; refuses what
    /// this backend can tell at once that it could not keep.
    ///
    /// # Errors
    /// `InvalidInput`.
    fn seat(&self, place: &Place) -> Result<Box<dyn Seat>>;

    /// A place to look from. Does no I/O.
    ///
    /// # Errors
    /// `InvalidInput`.
    fn watch(&self, mutex: &Arc<str>) -> Result<Box<dyn Watch>>;
}

/// Which mutex, for whom, for how long.
#[derive(Clone, Debug)]
pub struct Place {
    /// The mutex.
    pub mutex: Arc<str>,
    /// The contender.
    pub id: Arc<str>,
    /// What an acquisition and a renewal grant.
    pub lease: Lease,
    /// What the mutex is wanted for.
    pub hold: Hold,
}

/// How long an ownership is meant to last: a hint for what is worth preparing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hold {
    /// A service leads for as long as it can: preparing a fast hand-off pays.
    Long,
    /// A locker holds for the length of a critical section: an extra request would double its cost.
    Short,
}

/// A contender's place at one mutex. It holds no lock across calls and starts no thread of its own.
///
/// Dropping a seat ends its subscription, and does nothing that blocks.
pub trait Seat: Send {
    /// From now on `waker` rings when a waiting contender should try again, and when an owner should
    /// check (by renewing) whether it still owns; not on account of what this seat itself did.
    /// Called again with the same waker, it does nothing. It returns once nothing can be missed.
    ///
    /// # Errors
    /// `Unreachable` and the like; the caller tries again later and goes by time until then.
    fn listen(&mut self, waker: &Waker, by: Moment) -> Result<()>;

    /// Tries to become the owner. Idempotent for this id: where the backend already names it as owner
    /// (the ghost of an attempt whose reply was lost, or the rest of a lease that was not renewed),
    /// that lease is adopted, with a higher fence and the full length, and never to an earlier end.
    ///
    /// # Errors
    /// Any; the outcome counts as unknown.
    fn acquire(&mut self, entry: Entry, by: Moment) -> Result<Attempt>;

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

    /// Leaves the queue and the subscription, passing on what was reserved for this contender: no
    /// trace is left. Owns nothing when called.
    ///
    /// # Errors
    /// Any; what is left then goes away by itself in time.
    fn withdraw(&mut self, by: Moment) -> Result<()>;
}

/// Whether a refused attempt leaves a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// Take it if it is free, and leave no trace if it is not.
    Try,
    /// Take it, or stand in the queue for it.
    Queue,
}

/// What became of an attempt to acquire.
#[derive(Clone, Debug)]
pub enum Attempt {
    /// We own it.
    Granted(Grant),
    /// Somebody else does, or comes first.
    Refused(Refusal),
}

/// An ownership, fresh from the backend. The fence is the owner's.
#[derive(Clone, Debug)]
pub struct Grant {
    /// The snapshot with our id.
    pub owner: MutexOwner,
    /// `None`: the lease counts from the moment the call began. `Some`: the backend knows until when it
    /// may be believed, because something else keeps it alive (a ZooKeeper session) or because the
    /// request was sent before the call.
    pub until: Option<Moment>,
}

/// Why we do not own.
#[derive(Clone, Debug)]
pub struct Refusal {
    /// Who owns, as far as the backend told; `NONE` while the mutex is reserved for somebody.
    pub owner: MutexOwner,
    /// When to try again if nobody rings before: the end of the lease or reservation seen, or the
    /// interval at which this backend must be polled. Never far beyond the lease.
    pub retry_in: Duration,
}

/// What became of a renewal.
#[derive(Clone, Debug)]
pub enum Renewal {
    /// We own it still, with the same fence.
    Renewed(Grant),
    /// We do not: who does, as far as the backend told.
    Lost(MutexOwner),
}

/// An observer's place at one mutex.
pub trait Watch: Send {
    /// From now on `waker` rings when the owner may have changed. As [`Seat::listen`].
    ///
    /// # Errors
    /// As [`Seat::listen`].
    fn listen(&mut self, waker: &Waker, by: Moment) -> Result<()>;

    /// Who owns the mutex now. Locks nothing and leaves no trace.
    ///
    /// # Errors
    /// Any.
    fn observe(&mut self, by: Moment) -> Result<Sight>;
}

/// What an observer saw.
#[derive(Clone, Debug)]
pub struct Sight {
    /// The owner.
    pub owner: MutexOwner,
    /// When to look again if nobody rings before.
    pub again_in: Duration,
}

/// Connects by URL.
pub(crate) fn connect(text: &str) -> Result<Factory> {
    let url = Url::parse(text)?;
    match SCHEMES.iter().find(|(scheme, ..)| *scheme == url.scheme) {
        Some((_, _, Some(connect))) => connect(&url),
        Some((scheme, feature, None)) => Err(Error::new(
            ErrorKind::FeatureDisabled,
            format!(
                "a {scheme}:// URL needs the Cargo feature {feature:?}: \
                 contend = {{ version = \"{}\", features = [{feature:?}] }}",
                env!("CARGO_PKG_VERSION"),
            ),
        )),
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
