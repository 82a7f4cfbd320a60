//! The services, each a worker thread around a machine, and what they are made of.

mod board;
mod claim;
mod contend;
mod contend_builder;
mod contend_worker;
mod courier;
mod delivery;
mod lifecycle;
mod listening;
mod outbox;
mod report;
mod retrieval;
mod retrieval_builder;
mod retrieval_worker;
mod terms;

pub(crate) use board::Board;
pub(crate) use claim::Claim;
pub use contend::MutexContendService;
pub use contend_builder::ContendBuilder;
pub(crate) use courier::Target;
pub use courier::{Executor, Job};
pub(crate) use lifecycle::Lifecycle;
pub use lifecycle::Status;
pub use retrieval::MutexRetrievalService;
pub use retrieval_builder::ObserveBuilder;
pub(crate) use terms::{Settled, Terms};
