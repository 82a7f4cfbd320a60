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
