//! The MySQL backend, on servers that the tests start.

// What the library must not do, a test may: there a panic is the verdict.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, dead_code)]

#[macro_use]
#[path = "../conformance/mod.rs"]
mod conformance;
mod faults;
mod one_server;
mod processes;
mod server;
mod table;
#[path = "../tool/mod.rs"]
mod tool;
mod waiting;
