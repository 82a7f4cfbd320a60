//! The `contend` command as a program, for tests that need processes of their own.

use std::path::PathBuf;
use std::process::Command;

/// Returns the program. Cargo has built it where its features are on; otherwise it is built now.
pub fn path() -> PathBuf {
    if let Some(path) = option_env!("CARGO_BIN_EXE_contend") {
        return path.into();
    }
    let profile = if cfg!(debug_assertions) {
        "test"
    } else {
        "release"
    };
    let status = Command::new(env!("CARGO"))
        // As everywhere: with other features, its dependencies would be built again.
        .args(["build", "--quiet", "--workspace", "--profile", profile])
        .args(["--bin", "contend", "--all-features"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .status()
        .expect("cargo runs");
    assert!(status.success(), "the contend command does not build");
    let mut path = std::env::current_exe().expect("a test knows itself");
    path.pop();
    path.pop();
    path.join("contend")
}
