//! The locker: a blocking lock with a guard, for one at a time in a section.

mod guard;
#[allow(clippy::module_inception)]
mod locker;
mod tenure;
mod thread_queue;

pub use guard::{Guard, GuardAll};
pub use locker::{LockAllBuilder, Locker, LockerBuilder};
pub(crate) use thread_queue::ThreadQueue;
