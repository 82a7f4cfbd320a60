//! The examples as programs, for tests that need processes of their own.

#![allow(dead_code)]

use std::path::PathBuf;
use std::process::Command;

/// The program, built with the features of this test: `cargo test --test one` builds no examples.
pub fn path(name: &str) -> PathBuf {
    let features: Vec<&str> = [
        ("mysql", cfg!(feature = "mysql")),
        ("redis", cfg!(feature = "redis")),
        ("zk", cfg!(feature = "zk")),
        ("tls", cfg!(feature = "tls")),
    ]
    .iter()
    .filter_map(|(feature, on)| on.then_some(*feature))
    .collect();
    let profile = if cfg!(debug_assertions) {
        "dev"
    } else {
        "release"
    };
    let status = Command::new(env!("CARGO"))
        .args(["build", "--quiet", "--profile", profile, "--example", name])
        .args(["--features", &features.join(",")])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .status()
        .expect("cargo runs");
    assert!(status.success(), "the example {name} does not build");
    let mut path = std::env::current_exe().expect("a test knows itself");
    path.pop();
    path.pop();
    path.join("examples").join(name)
}
