//! Distributed locks, leader election, leader-only schedules and counting semaphores, on the MySQL, Redis or
//! ZooKeeper that you already run. Plain synchronous Rust: threads and channels, no async runtime.
//!
//! ```
//! let factory = contend::connect("memory://")?; // or redis://..., mysql://..., zk://...
//! let locker = factory.locker("invoice-4711").build()?;
//!
//! let guard = locker.lock()?; // one process in the world is past this line
//! println!("locked, fence {}", guard.fence());
//! drop(guard);
//! # Ok::<(), contend::Error>(())
//! ```
//!
//! A lock is for a section of code. To lead for as long as the process lives, and to hear when that begins and ends,
//! use a service:
//!
//! ```
//! use contend::EventKind;
//!
//! let factory = contend::connect("memory://")?;
//! let (service, events) = factory.contend("nightly-report").channel()?;
//! service.start()?; // acquires, renews and sends events from its own thread
//!
//! let event = events.recv().unwrap();
//! assert_eq!(event.kind, EventKind::Acquired);
//! println!("leading with fence {:?}", event.fence());
//!
//! service.stop()?; // end the work first: when this returns, the next process may lead
//! # Ok::<(), contend::Error>(())
//! ```
//!
//! # Which one do I want?
//!
//! | I want | use |
//! |---|---|
//! | one process at a time in a section of code | [`Factory::locker`], or [`Factory::lock_all`] for several mutexes |
//! | one process at a time to lead, and to know when that begins and ends | [`Factory::contend`] |
//! | a job that runs every minute, or nightly, on one of my machines | [`Factory::scheduler`] |
//! | at most N at once, possibly over several resources | [`Factory::semaphores`] |
//! | to know who leads, without contending | [`Factory::observe`], [`Factory::owner`] |
//! | to inspect it from outside | [`Factory::health`], [`Factory::list`], [`Probe`], the `contend` command |
//!
//! Create one [`Factory`] per process, by URL with [`connect`] or with a backend's builder, and share it: its
//! connections serve any number of services and lockers.
//!
//! # Backends and features
//!
//! | Cargo feature | URL | |
//! |---|---|---|
//! | always enabled | `memory://NAME` | [`memory`]: inside one process; tests, development, a first run |
//! | `redis` | `redis://`, `redis+cluster://`, `redis+sentinel://`, with `tls` also `rediss://` | Redis 6.2+, Valkey |
//! | `mysql` | `mysql://` | MySQL 8.0+, MariaDB 10.6+ |
//! | `zk` | `zk://a:2181,b:2181/chroot` | ZooKeeper 3.5+, in the layout of Curator's leader latch; no semaphores |
//!
//! `tls` adds TLS to all of them, `timezones` time zones to schedules, `metrics` a bridge to the `metrics`
//! facade, `cli` the `contend` command. Anything behind `unstable` may change in any release.
//!
//! # What is promised
//! `is_owner()` is never true in two processes at once. An owner acts as owner until its ttl ends, counted on its own
//! boot-time clock from before the request was sent. The backend grants the mutex to no other contender before ttl and
//! transition have passed.
//!
//! This assumes that local clocks drift apart by less than 1%, that the backend keeps what it acknowledged, and that its
//! clock does not jump. A Redis that restarts empty, a failover, a restored backup or an operator's delete may break
//! these assumptions. So pass the [`fence`](Guard::fence) to the resource that you protect, and let it reject any write
//! whose fence is lower than the highest it has seen.
//!
//! # Further reading
//! - [How it works](design): the words, the layers, and how each promise is kept.
//! - [What we promise](promises): every guarantee, what it assumes, what breaks it, and the tests that hold it.
//! - [Operations](operations): symptoms and causes, choosing ttl, connections, privileges, sharing a mutex with
//!   Simba or Curator.
//! - The page of each backend's module has its protocol, and its builder with all options.

// docs.rs shows which feature an item needs.
#![cfg_attr(docsrs, feature(doc_cfg))]
// Nothing in the library panics on what a server, a network or a caller can do.
#![cfg_attr(
    not(test),
    warn(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::todo,
        clippy::unimplemented,
        clippy::unreachable
    )
)]

#[cfg(feature = "unstable")]
pub mod backend;
#[cfg(not(feature = "unstable"))]
mod backend;
mod cancel;
mod clock;
mod error;
mod event;
mod factory;
mod health;
mod id;
mod json;
mod lease;
mod locker;
#[cfg(feature = "unstable")]
pub mod machine;
#[cfg(not(feature = "unstable"))]
mod machine;
#[cfg(feature = "metrics")]
mod metrics;
mod name;
mod owner;
mod ownership;
mod parker;
// Each uses what the other does not.
#[cfg(any(feature = "mysql", feature = "redis"))]
#[cfg_attr(not(all(feature = "mysql", feature = "redis")), allow(dead_code))]
mod pool;
mod probe;
mod runner;
mod scheduler;
pub mod semaphore;
mod service;
mod shared;
mod thread;
mod timer;
#[cfg(any(feature = "mysql", feature = "redis", feature = "zk"))]
mod tls;
// Memory has neither hosts nor numbers in its URL.
#[cfg_attr(
    not(all(feature = "mysql", feature = "redis", feature = "zk")),
    allow(unused)
)]
mod url;
mod virtual_time;

pub use backend::memory;
#[cfg(feature = "mysql")]
pub use backend::mysql;
#[cfg(feature = "redis")]
pub use backend::redis;
#[cfg(feature = "zk")]
pub use backend::zk;
pub use backend::{Participant, PoolUse, Wakeups};
pub use cancel::Cancel;
#[cfg(feature = "unstable")]
pub use clock::Moment;
/// The crate whose channels deliver events: its `select!` works on [`Events`] and on [`Guard::lost`].
pub use crossbeam_channel;
pub use error::{Error, ErrorKind, Result};
pub use event::{Event, EventKind, Events};
pub use factory::Factory;
pub use health::Health;
pub use id::ContenderIdGenerator;
pub use lease::Lease;
pub use locker::{Guard, GuardAll, LockAllBuilder, Locker, LockerBuilder};
pub use machine::period::ContendPeriod;
#[cfg(feature = "metrics")]
pub use metrics::MetricsProbe;
pub use owner::{MutexOwner, MutexState};
#[cfg(feature = "unstable")]
pub use parker::{Parker, Unparked, Unparker};
pub use probe::{AcquireOutcome, LossReason, Probe, RenewOutcome, RunOutcomeKind};
pub use scheduler::{
    Context, Missed, RunReport, Schedule, Scheduler, SchedulerBuilder, Weekday, WorkResult,
};
pub use service::{
    ContendBuilder, Executor, Job, MutexContendService, MutexContender, MutexRetrievalService,
    MutexRetriever, ObserveBuilder, Status,
};
pub use shared::Contact;

#[cfg(feature = "unstable")]
pub use virtual_time::{VirtualTime, enter as enter_virtual_time};

pub use url::parse_duration;

/// Creates a factory for the backend at `url`.
///
/// | URL | backend |
/// |---|---|
/// | `memory://`, `memory://NAME` | [`memory`]: this process only |
/// | `redis://user:password@host:6379/0`, `rediss://..`, `redis+cluster://h1,h2`, `redis+sentinel://s1,s2/NAME` | Redis, feature `redis` |
/// | `mysql://user:password@host:3306/database` | MySQL or MariaDB, feature `mysql` |
/// | `zk://a:2181,b:2181/chroot` | ZooKeeper, feature `zk` |
///
/// Options are URL parameters, such as `?ttl=5s&transition=1s`, named after the methods of the backend's builder. An
/// unknown parameter is an error that lists the valid ones. In a user name, password or path, `/`, `?`, `@` and `%` must
/// be percent-encoded.
///
/// Validates the URL and returns without blocking; connections are opened in the background. A server
/// that cannot be reached, or that refuses access, is reported by [`Factory::ping`], by the first lock,
/// or by a service's [`last_error`](MutexContendService::last_error).
///
/// ```
/// let factory = contend::connect("memory://connect-doc?ttl=5s&transition=1s")?;
/// factory.ping(std::time::Duration::from_secs(5))?;
/// # Ok::<(), contend::Error>(())
/// ```
///
/// # Errors
/// `InvalidInput` for an invalid URL, `FeatureDisabled` for a backend whose Cargo feature is off.
pub fn connect(url: &str) -> Result<Factory> {
    backend::connect(url)
}

// On GitHub, the links of these pages lead to files. Here they lead to modules: the first definition of a link counts.
#[cfg_attr(feature = "redis", doc = "[redis]: crate::redis")]
#[cfg_attr(feature = "mysql", doc = "[mysql]: crate::mysql")]
#[cfg_attr(feature = "zk", doc = "[zk]: crate::zk")]
#[doc = "[memory]: crate::memory"]
#[doc = "[What we promise]: crate::promises\n"]
#[doc = include_str!("design.md")]
pub mod design {}

#[doc = "[Operations]: crate::operations\n"]
#[doc = include_str!("promises.md")]
pub mod promises {}

#[doc = include_str!("operations.md")]
pub mod operations {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_users_hold_can_be_sent_and_shared() {
        fn shareable<T: Send + Sync + 'static>() {}
        shareable::<Factory>();
        shareable::<Error>();
        shareable::<Event>();
        shareable::<Events>();
        shareable::<Locker>();
        shareable::<Guard>();
        shareable::<GuardAll>();
        shareable::<MutexContendService>();
        shareable::<MutexRetrievalService>();
        shareable::<Scheduler>();
        shareable::<Cancel>();
        shareable::<Health>();
        shareable::<semaphore::Semaphores>();
        shareable::<semaphore::PermitGuard>();
    }
}

/// The programs in the README compile and, where they need no server, run.
// One of them needs signal-hook, which comes with `cli`.
#[cfg(all(doctest, feature = "cli"))]
#[doc = include_str!("../README.md")]
struct Readme;
