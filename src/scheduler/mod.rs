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
