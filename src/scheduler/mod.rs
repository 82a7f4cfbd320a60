//! The scheduler: work that runs at its times, on the leader only.
//!
//! - `schedule`: the front, and `builder`, which makes one.
//! - `config`: when the work runs.
//! - `context`: what the work is told.
//! - `rounds`: the loop that runs it, and `term`, what it knows of the leadership.

mod builder;
mod config;
mod context;
mod rounds;
mod schedule;
mod term;

pub use builder::SchedulerBuilder;
pub use config::ScheduleConfig;
pub use context::Context;
pub use schedule::Scheduler;
