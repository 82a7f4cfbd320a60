//! The scheduler: work that runs at its times, on the leader only.
//!
//! ```text
//!  record of the last run    ● 12:00        ● 13:00        ● 14:00        ● 15:00
//!  old process   leads ──────┼──────────────┼──┤ stop()
//!  new process         waits ──────────────────├ leads, reads the record ─┼─────
//! ```
//!
//! - `scheduler`: the front, its builder and what it reports.
//! - `schedule`: when runs are due, without clocks or threads.
//! - `job`: the loop that runs the work and records it, and what the work is told.

mod job;
mod schedule;
#[allow(clippy::module_inception)]
mod scheduler;

pub use job::Context;
pub use schedule::{Missed, Schedule, Weekday};
pub use scheduler::{RunReport, Scheduler, SchedulerBuilder, WorkResult};

/// A scheduler that is dropped at the semicolon runs nothing, and the compiler warns of it.
///
/// ```compile_fail
/// #![deny(unused_must_use)]
/// let factory = contend::connect("memory://semicolon")?;
/// let hourly = contend::Schedule::every(std::time::Duration::from_secs(3600));
/// factory.scheduler("m").start(hourly, |_| {})?;
/// # Ok::<(), contend::Error>(())
/// ```
///
/// The same, kept:
///
/// ```
/// #![deny(unused_must_use)]
/// let factory = contend::connect("memory://semicolon")?;
/// let hourly = contend::Schedule::every(std::time::Duration::from_secs(3600));
/// let _kept = factory.scheduler("m").start(hourly, |_| {})?;
/// # Ok::<(), contend::Error>(())
/// ```
#[cfg(doctest)]
struct DroppedAtTheSemicolon;
