//! What counts the threads or the processor time of its process: each test runs in a process of its own.

// What the library must not do, a test may: there a panic is the verdict.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, dead_code)]

#[macro_use]
#[path = "../conformance/mod.rs"]
mod conformance;
#[macro_use]
mod process;
mod dropped;
mod front_threads;
#[cfg(any(feature = "redis", feature = "mysql", feature = "zk"))]
mod waits;
