//! The Redis backend, on servers that the tests start.

// What the library must not do, a test may: there a panic is the verdict.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, dead_code)]

#[macro_use]
#[path = "../conformance/mod.rs"]
mod conformance;
mod clock;
mod cluster;
mod driven;
mod early_acquire;
mod errors;
mod faults;
mod one_server;
mod protocol;
mod replicas;
mod sentinel;
mod settings;
mod simba;
mod slots;
mod subscriber;
#[cfg(feature = "tls")]
mod tls;
