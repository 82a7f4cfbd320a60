//! Counting semaphores: at most N at once, across any number of threads, processes and machines.
//!
//! A semaphore is a named capacity. A [`PermitRequest`] takes permits from one or more of them, all or
//! none. A [`PermitGuard`] holds permits, renews them in the background, and gives them back when it is
//! dropped. Semaphores are stored in tables of a MySQL or MariaDB server, or in the memory of one process
//! for tests and development.
//!
//! ```
//! use contend::semaphore::PermitRequest;
//! use std::time::Duration;
//!
//! let factory = contend::connect("memory://semaphore-doc")?; // or mysql://user:password@host/database
//! let semaphores = factory.semaphores()?;
//! semaphores.create_tables()?;
//! semaphores.create("backup", 2)?;
//!
//! let request = PermitRequest::generated().permits("backup", 1);
//! let guard = semaphores.guard(&request, Duration::from_secs(5))?; // waits up to five seconds
//! println!("working with fence {:?}", guard.fence("backup"));
//! drop(guard); // released
//! # Ok::<(), contend::Error>(())
//! ```
//!
//! # What is promised
//! - Never more than the capacity is granted, whatever crashes.
//! - A guard is valid until its ttl ends without a renewal, counted on the local boot-time clock from
//!   before the request was sent. Its permits are granted to nobody else before the ttl and a quarter of
//!   it have passed on the server: that quarter is the time to stop.
//! - Permits of a crashed process come back automatically: an acquire that finds a semaphore exhausted
//!   takes back what has expired.
//! - Every grant has a [fence](PermitGuard::fence), larger than those of all earlier grants of the same
//!   semaphore. With a capacity of 1, pass it to the resource that you protect, and reject any write whose
//!   fence is lower than the highest seen, as with a lock. With a larger capacity several valid holders have
//!   different fences, and that check would reject all but the newest: there a fence identifies a grant, for
//!   example in a log, or to distinguish a later grant of the same request from an earlier one.
//!
//! # Waiting
//! Requests of one factory are served in the order in which they came, each as soon as its own
//! semaphores allow it; a request that waits for one semaphore does not block requests for another.
//! Between processes there is no order: they poll, every 50 ms while permits change hands, and less and
//! less often, finally every `poll_interval`, while nothing changes.

mod acquire;
mod doubts;
mod guard;
mod maintenance;
mod noted_store;
mod outcome;
mod plain_permits;
mod renewals;
mod request;
mod semaphores;
#[cfg(test)]
mod stand_in;
mod wait_list;

pub use self::guard::PermitGuard;
pub use self::maintenance::{Maintenance, MaintenanceBuilder};
pub use self::outcome::{Acquisition, Liveness};
pub use self::request::{PermitRequest, Wait};
pub use self::semaphores::Semaphores;
pub use crate::backend::permit_store::{
    CapacityChange, Discrepancy, Exhausted, Holder, Permit, PermitRenewal, Reason, Release,
    RequestStatus, Swept, Usage,
};
