//! Distributed mutexes with ownership events.

pub mod backend;
mod bell;
mod clock;
mod duration;
mod error;
mod factory;
mod fork;
mod lease;
mod name;
mod owner;
mod state;
mod url;

pub use backend::memory;
#[cfg(feature = "zk")]
pub use backend::zk;
pub use bell::{Bell, Ring, Waker};
pub use clock::Moment;
pub use duration::parse_duration;
pub use error::{Error, ErrorKind, Result};
pub use factory::Factory;
pub use lease::Lease;
pub use owner::MutexOwner;
pub use state::MutexState;

/// Connects to the backend that `url` names.
///
/// # Errors
/// `InvalidInput` for a URL that is not understood, `FeatureDisabled` for a backend whose Cargo
/// feature is off.
pub fn connect(url: &str) -> Result<Factory> {
    backend::connect(url)
}
