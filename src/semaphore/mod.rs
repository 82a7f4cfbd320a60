//! Counting semaphores: at most N at once, across any number of threads, processes and machines.
//!
//! A semaphore is a named capacity. A [`PermitRequest`] takes permits from one or more of them, all or
//! none. A [`PermitGuard`] holds permits, renews them in the background, and gives them back when it is
//! dropped. Semaphores are stored in tables of a MySQL or MariaDB server, on Redis, or in the memory of one
//! process for tests and development.
//!
//! ```
//! use contend::semaphore::PermitRequest;
//! use std::time::Duration;
//!
//! let factory = contend::connect("memory://semaphore-doc")?; // or mysql://.., redis://..
//! let semaphores = factory.semaphores()?;
//! semaphores.create_tables()?;
//! semaphores.create("backup", 2)?;
//!
//! let request = PermitRequest::generated().permits("backup", 1);
//! let guard = semaphores.guard(&request, Duration::from_secs(5))?; // waits for up to 5 s
//! println!("working with fence {:?}", guard.fence("backup"));
//! drop(guard); // released
//! # Ok::<(), contend::Error>(())
//! ```
//!
//! # What is promised
//! - Never more than the capacity is granted, whatever crashes.
//! - A guard is valid until its ttl ends without a renewal, counted on the local boot-time clock from
//!   before the request was sent. No other request gets its permits before the ttl and a quarter of
//!   it have passed on the server: that quarter is the time to stop.
//! - Permits of a crashed process come back automatically: an acquire that finds a semaphore exhausted
//!   takes back what has expired.
//! - Every grant has a [fence](PermitGuard::fence), larger than those of all earlier grants of the same
//!   semaphore. With a capacity of 1, pass it to the resource that you protect, and reject any write whose
//!   fence is lower than the highest seen, as with a lock. With a larger capacity, several valid holders have
//!   different fences, and that check would reject all but the newest. There a fence only identifies a grant:
//!   in a log, or to tell a later grant of a request from an earlier one.
//!
//! # Waiting
//! Requests of one factory are served in the order in which they came, each as soon as its own
//! semaphores allow it. A request that waits for one semaphore does not block requests for another.
//! On Redis, processes take turns, and a release tells the next one. Elsewhere there is no order between
//! processes: the first request of each process polls, after 50 ms and then less often, at least every 250 ms.
//!
//! # Time limits
//! A request to the server takes 2 s at most, and 4 s with its retries; on MySQL, where rows are locked, up to 6 s. That
//! is also how far a call may go beyond its timeout. A step of `create_tables`, of a sweep, of a removal or of a check
//! may take 20 s, and 40 s with its retries.
//!
//! # Lost replies
//! A retry with the same external id is the answer: it finds what was granted. What is not asked for again ends with
//! its ttl, or without one by release, liveness or age.

mod acquire;
mod guard;
mod holds;
mod maintenance;
mod queue;
mod request;
mod semaphores;

pub use self::guard::PermitGuard;
pub use self::maintenance::{Maintenance, MaintenanceBuilder};
pub use self::request::{Acquisition, Liveness, PermitRequest, Wait};
pub use self::semaphores::Semaphores;
pub(crate) use self::semaphores::SharedSemaphores;
pub use crate::backend::permit_store::{
    CapacityChange, Discrepancy, Exhausted, Holder, Permit, PermitRenewal, Reason, Release,
    RequestStatus, Swept, Usage,
};
