//! What counts the threads, files or allocations of its process: each test runs in a process of its own.

// What the library must not do, a test may: there a panic is the verdict.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, dead_code)]

#[macro_use]
#[path = "../conformance/mod.rs"]
mod conformance;
#[macro_use]
mod process;
mod decide;
mod front_threads;
#[cfg(feature = "mysql")]
#[path = "../mysql/server.rs"]
mod mysql_ground;
#[cfg(feature = "mysql")]
mod mysql_threads;
#[cfg(feature = "redis")]
mod redis_threads;
mod scale;
mod waits;
