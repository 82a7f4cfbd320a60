//! The services, each a worker thread around a machine, and what they are made of.

pub(crate) mod callbacks;
pub(crate) mod contend;
pub(crate) mod delivery;
pub(crate) mod lifecycle;
mod observe;
pub(crate) mod settings;

pub use callbacks::{MutexContender, MutexRetriever};
pub use contend::{ContendBuilder, MutexContendService};
pub use delivery::{Executor, Job};
pub use lifecycle::Status;
pub use observe::{MutexRetrievalService, ObserveBuilder};
