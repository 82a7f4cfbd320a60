//! Distributed mutexes with ownership events.

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
mod name;
pub mod observation;
mod owner;
mod period;
mod service;
mod state;
// Memory has neither hosts nor numbers in its URL.
#[cfg_attr(
    not(any(feature = "mysql", feature = "redis", feature = "zk")),
    allow(dead_code)
)]
mod url;

pub use backend::memory;
pub use bell::{Bell, Ring, Waker};
pub use clock::Moment;
pub use contender::{MutexContender, MutexRetriever};
pub use duration::parse_duration;
pub use error::{Error, ErrorKind, Result};
pub use event::{Event, EventKind};
pub use factory::Factory;
pub use id::ContenderIdGenerator;
pub use lease::Lease;
pub use owner::MutexOwner;
pub use period::ContendPeriod;
pub use service::{
    ContendBuilder, Executor, Job, MutexContendService, MutexRetrievalService, ObserveBuilder,
    Status,
};
pub use state::MutexState;

/// Connects to the backend that `url` names.
///
/// # Errors
/// `InvalidInput` for a URL that is not understood, `FeatureDisabled` for a backend whose Cargo
/// feature is off.
pub fn connect(url: &str) -> Result<Factory> {
    backend::connect(url)
}
