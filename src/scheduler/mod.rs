//! The scheduler: work that runs at its times, on the leader only.
//!
//! - `scheduler`: the front, its builder and what it reports.
//! - `schedule`: when runs are due, without clocks or threads.
//! - `worker`: the loop that runs the work and records it, and what the work is told.

mod schedule;
#[allow(clippy::module_inception)]
mod scheduler;
mod worker;

pub use schedule::{Missed, Schedule, Weekday};
pub use scheduler::{RunReport, Scheduler, SchedulerBuilder, WorkResult};
pub use worker::Context;

/// Review core 8: a scheduler that is dropped at the semicolon runs nothing, and the compiler warns of it.
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
