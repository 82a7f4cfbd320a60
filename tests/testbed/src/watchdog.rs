//! Ending a test that hangs.

use std::io::{self, Write};
use std::panic::Location;
use std::process;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Ends the whole process if it is not dropped in time.
///
/// A hung thread cannot be stopped from outside, so the process is aborted, after a message. The
/// servers die with it.
#[derive(Debug)]
pub struct Watchdog {
    /// Dropped to call the watcher off.
    leash: Option<mpsc::Sender<()>>,
    watcher: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// Starts to watch: from now on, `limit` until the process is aborted.
    #[track_caller]
    pub fn start(limit: Duration) -> Self {
        let place = Location::caller();
        let test = thread::current().name().unwrap_or("?").to_owned();
        let (leash, called_off) = mpsc::channel::<()>();
        let watcher = thread::Builder::new()
            .name("watchdog".to_owned())
            .spawn(move || {
                if called_off.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
                    // Not `eprintln!`, which the test harness captures and the abort would lose.
                    let _ = writeln!(
                        io::stderr(),
                        "\nwatchdog: `{test}` was not done within {limit:?} ({place}); ending the process"
                    );
                    process::abort();
                }
            })
            .expect("a thread for the watchdog");
        Self {
            leash: Some(leash),
            watcher: Some(watcher),
        }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.leash = None;
        if let Some(watcher) = self.watcher.take() {
            let _ = watcher.join();
        }
    }
}

/// Runs `f` and aborts the process, with a message, if it is not done within `limit`.
#[track_caller]
pub fn within<T>(limit: Duration, f: impl FnOnce() -> T) -> T {
    let _watchdog = Watchdog::start(limit);
    f()
}
