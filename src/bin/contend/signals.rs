//! Signals as messages.

use std::thread;

use contend::{Cancel, Error};
use crossbeam_channel::{Receiver, never, unbounded};
use signal_hook::consts::SIGCHLD;
use signal_hook::iterator::Signals;

use crate::exit::Failure;

/// Returns these signals as they come, and what the first that does not come from a child cancels. From here on
/// they do not end this program.
pub fn receive(signals: &[i32]) -> (Receiver<i32>, Cancel) {
    let (sender, receiver) = unbounded();
    let cancel = Cancel::new();
    let Ok(mut signals) = Signals::new(signals) else {
        // They end this program, and the lease runs out by itself.
        return (never(), cancel);
    };
    let cancels = cancel.clone();
    thread::spawn(move || {
        for signal in signals.forever() {
            // First: a wait that is cancelled finds its signal.
            let _ = sender.send(signal);
            if signal != SIGCHLD {
                cancels.cancel();
            }
        }
    });
    (receiver, cancel)
}

/// Returns what a wait came to, unless a signal ended it. What came just then is released by dropping it.
pub fn unless_told<T>(signals: &Receiver<i32>, outcome: Result<T, Error>) -> Result<T, Failure> {
    match signals.try_iter().find(|signal| *signal != SIGCHLD) {
        Some(signal) => Err(Failure::signal(signal)),
        None => Ok(outcome?),
    }
}
