//! The memory backend.

// What the library must not do, a test may: there a panic is the verdict.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[macro_use]
#[path = "../conformance/mod.rs"]
mod conformance;
mod conformance_memory;
