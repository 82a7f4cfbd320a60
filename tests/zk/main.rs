//! The ZooKeeper backend, on servers that the tests start.

// What the library must not do, a test may: there a panic is the verdict.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, dead_code)]

#[macro_use]
#[path = "../conformance/mod.rs"]
mod conformance;
mod client;
mod contender;
mod cost;
mod curator;
mod cut_off;
mod ensemble;
mod ensemble_faults;
mod faults;
mod leftovers;
mod load;
mod locker;
mod one_server;
mod outage;
mod peer;
mod restored;
mod settings;
mod storm;
mod support;
mod tolerance;
