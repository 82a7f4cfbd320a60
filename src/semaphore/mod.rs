//! Counting semaphores in the tables of a MySQL or MariaDB server: at most N at once, over any number
//! of processes and machines.
//!
//! A semaphore is a capacity with a name. A [`PermitRequest`] takes permits from one or more of them,
//! all or none, under an *external id* that its caller chose, so that repeating it is safe. Where there
//! is not enough left, the answer says so at once, or after a wait if the caller wants one.
//!
//! # What keeps it right
//! - The rows of the semaphores are locked, in the order of their names, before anything is decided.
//! - What is held is counted in the semaphore's own row, in the transaction that changes the permits:
//!   an acquire costs the same with ten permits held as with a hundred thousand, and a crash leaves
//!   both or neither. [`Semaphores::check`] compares them.
//! - A request goes from acquired to released and never back; a counter is lowered by whoever made
//!   that change, and nobody else.
//! - An acquire whose outcome cannot be learned leaves a tombstone under its external id.
//! - Requests of one process for the same semaphores share a transaction, see `combine.rs`.
//!
//! # What a ttl is, and what it is not
//! A ttl brings the permits of a crashed process back; it does not keep a slow one from believing that
//! it holds what was taken back. Pass the [`fence`](Permit::fence) to what you protect, and let it
//! refuse a smaller one than it has seen.
//!
//! # Round trips
//! Two for an acquire and one for a release, if nobody else wants the semaphore; two for all that is
//! combined.

mod acquire;
mod answer;
mod batch;
mod builder;
mod catalogue;
mod check;
mod cleanup;
mod combine;
mod core;
mod guard;
mod keeper;
mod maintenance;
mod record;
mod release;
mod request;
mod retry;
mod semaphores;
mod store;
mod sweep;
mod wait;

pub use answer::{
    Acquisition, CapacityChange, Exhausted, Permit, PermitRenewal, Release, RequestStatus, Usage,
};
pub use builder::SemaphoresBuilder;
pub use check::Discrepancy;
pub use guard::PermitGuard;
pub use maintenance::{Maintenance, MaintenanceBuilder};
pub use request::PermitRequest;
pub use semaphores::Semaphores;
pub use store::INIT_SQL;
pub use sweep::{Liveness, Reason, Swept};
