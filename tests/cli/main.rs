//! The `contend` command: processes, on servers that the tests start.

// What the library must not do, a test may: there a panic is the verdict.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, dead_code)]

mod backends;
mod elect;
mod lock;
mod mistakes;
#[path = "../mysql/server.rs"]
mod mysql_ground;
mod program;
mod schedule;
mod semaphore;

/// The command, which cargo has built with the features of these tests.
const CONTEND: &str = env!("CARGO_BIN_EXE_contend");
