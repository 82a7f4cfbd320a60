//! Services, lockers and schedulers on the memory backend: no server is needed.

// What the library must not do, a test may: there a panic is the verdict.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[macro_use]
#[path = "../conformance/mod.rs"]
mod conformance;
mod belief;
mod deadlines;
mod handoff;
mod health;
mod identity;
mod locker;
mod probe;
mod scheduler;
mod service;
mod wall_clock;
