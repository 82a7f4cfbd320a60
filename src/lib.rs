//! Distributed mutexes with ownership events, for programs without an async runtime.
//!
//! ```
//! use contend::EventKind;
//!
//! let factory = contend::connect("memory://")?; // or redis://..., mysql://..., zk://...
//! let (service, events) = factory.contend("nightly-report").channel()?;
//! service.start()?; // a thread of its own acquires, renews and tells
//!
//! let event = events.recv().unwrap();
//! assert_eq!(event.kind, EventKind::Acquired);
//! println!("leading with fence {:?}", event.fence());
//!
//! service.stop()?; // Released is heard before anybody else can lead
//! # Ok::<(), contend::Error>(())
//! ```
//!
//! | for | use |
//! |---|---|
//! | exactly one of us leads, and is told when it begins and ends | [`Factory::contend`] |
//! | knowing who leads, without contending | [`Factory::observe`] |
//! | at most N at once, over several resources | `contend::Semaphores` (feature `mysql`) |
//! | one at a time in a section of code, with a guard | [`Factory::locker`] |
//! | work at a fixed rate or with a fixed delay, on the leader only | [`Factory::scheduler`] |
//!
//! | Cargo feature | URL | |
//! |---|---|---|
//! | always there | `memory://NAME` | inside one process: tests, development, a first run |
//! | `redis` | `redis://`, `redis+cluster://`, with `tls` also `rediss://` | hand-off by pub/sub |
//! | `mysql` | `mysql://` | one table; MySQL 8.0+, MariaDB 10.6+ |
//! | `zk` | `zk://a:2181,b:2181/chroot` | shares Curator's leader latch |
//!
//! # What is promised
//! An owner believes that it owns until its ttl ends, counted on its own boot-time clock from before
//! the request was sent; nobody else can own before ttl and transition have passed on the backend. So
//! never two of them believe at once, as long as local clocks drift apart by less than 1%, the backend
//! keeps what it acknowledged, and its clock does not jump. Where that may fail (a Redis that restarts
//! empty, asynchronous failover, a restored snapshot, an operator who deletes the row), pass the
//! [`fence`](MutexContendService::fence) to what you protect, and let it refuse a smaller one than it
//! has seen.

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

pub mod backend;
mod bell;
mod clock;
mod contender;
pub mod contention;
mod duration;
mod error;
mod event;
mod factory;
mod fork;
mod id;
mod lease;
mod locker;
mod name;
pub mod observation;
mod owner;
mod period;
mod scheduler;
#[cfg(feature = "mysql")]
pub mod semaphore;
mod service;
mod state;
// Memory has neither hosts nor numbers in its URL.
#[cfg_attr(
    not(any(feature = "mysql", feature = "redis", feature = "zk")),
    allow(dead_code)
)]
mod url;

pub use backend::memory;
#[cfg(feature = "mysql")]
pub use backend::mysql;
#[cfg(feature = "redis")]
pub use backend::redis;
#[cfg(feature = "zk")]
pub use backend::zk;
pub use bell::{Bell, Ring, Waker};
pub use clock::Moment;
pub use contender::{MutexContender, MutexRetriever};
pub use duration::parse_duration;
pub use error::{Error, ErrorKind, Result};
pub use event::{Event, EventKind};
pub use factory::Factory;
pub use id::ContenderIdGenerator;
pub use lease::Lease;
pub use locker::{Guard, Locker, LockerBuilder};
pub use owner::MutexOwner;
pub use period::ContendPeriod;
pub use scheduler::{Context, ScheduleConfig, Scheduler, SchedulerBuilder};
#[cfg(feature = "mysql")]
pub use semaphore::{PermitRequest, Semaphores};
pub use service::{
    ContendBuilder, Executor, Job, MutexContendService, MutexRetrievalService, ObserveBuilder,
    Status,
};
pub use state::MutexState;

/// The factory for the backend that `url` names.
///
/// Does no I/O: a server that cannot be reached, or refuses us, shows with the first lock, or in a
/// service's [`last_error`](MutexContendService::last_error).
///
/// # Errors
/// `InvalidInput` for a URL that is not understood, `FeatureDisabled` for a backend whose Cargo
/// feature is off.
pub fn connect(url: &str) -> Result<Factory> {
    backend::connect(url)
}

/// The programs in the README compile and, where they need no server, run.
#[cfg(all(doctest, feature = "mysql"))]
#[doc = include_str!("../README.md")]
struct Readme;
