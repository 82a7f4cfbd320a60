//! Another wall clock for one process.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The wall clock that a process sees, which can be stepped while it runs. Its monotonic clocks are the real ones.
#[derive(Debug)]
pub struct FakeClock {
    library: PathBuf,
    file: PathBuf,
}

impl FakeClock {
    /// A clock that is right, kept in `file`, which may be there from an earlier process.
    ///
    /// # Panics
    /// When libfaketime is not installed.
    pub fn new(file: &Path) -> Self {
        let folders = fs::read_dir("/usr/lib").expect("/usr/lib is readable");
        let mut libraries = folders
            .flatten()
            .map(|entry| entry.path().join("faketime/libfaketimeMT.so.1"));
        let library = libraries.find(|path| path.exists()).expect(
            "libfaketime is missing: install the Debian package libfaketime, or run ./tests/run",
        );
        let clock = Self {
            library,
            file: file.to_owned(),
        };
        if !file.exists() {
            clock.step(0);
        }
        clock
    }

    /// Shows it to the process that `command` starts.
    pub fn show(&self, command: &mut Command) {
        command
            .env("LD_PRELOAD", &self.library)
            .env("FAKETIME_TIMESTAMP_FILE", &self.file)
            .env("FAKETIME_NO_CACHE", "1")
            .env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
    }

    /// From now on it is so many seconds ahead of the true one.
    pub fn step(&self, offset_s: i64) {
        fs::write(&self.file, format!("{offset_s:+}")).expect("the clock can be set");
    }
}
