//! Ending a test that hangs.

use std::io::{self, Write};
use std::panic::Location;
use std::process;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

/// Runs `f`, and ends the whole process with a message if it is not done within `limit`.
///
/// A hung thread cannot be stopped from outside, so the process is aborted. The servers die with it.
#[track_caller]
pub fn within<T>(limit: Duration, f: impl FnOnce() -> T) -> T {
    let place = Location::caller();
    let test = thread::current().name().unwrap_or("?").to_owned();
    // Dropped to call the watcher off, also by a panic of `f`.
    let (leash, called_off) = mpsc::channel::<()>();
    let watch = move || {
        if called_off.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
            // Not `eprintln!`, which the test harness captures and the abort would lose.
            let message = format!(
                "\nwatchdog: `{test}` was not done within {limit:?} ({place}); ending the process"
            );
            let _ = writeln!(io::stderr(), "{message}");
            process::abort();
        }
    };
    let name = "watchdog".to_owned();
    let watcher = thread::Builder::new().name(name).spawn(watch);
    let watcher = watcher.expect("a thread for the watchdog");
    let _end = End(Some((leash, watcher)));
    f()
}

/// Ends the watcher, so that tests which count threads do not see it.
struct End(Option<(mpsc::Sender<()>, thread::JoinHandle<()>)>);

impl Drop for End {
    fn drop(&mut self) {
        if let Some((leash, watcher)) = self.0.take() {
            drop(leash);
            let _ = watcher.join();
        }
    }
}
