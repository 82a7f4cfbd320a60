//! The ZooKeeper backend, on servers that the tests start.

// What the library must not do, a test may: there a panic is the verdict.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, dead_code)]

#[macro_use]
#[path = "../conformance/mod.rs"]
mod conformance;
mod client;
mod contender;
mod curator;
mod cut_off;
mod ensemble;
mod leftovers;
mod load;
mod one_server;
mod peer;
mod restored;
mod settings;
mod support;
mod tolerance;
