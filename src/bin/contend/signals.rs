//! Signals as messages.

use std::thread::{self, JoinHandle};

use contend::Cancel;
use crossbeam_channel::{Receiver, Sender, bounded, never, select, unbounded};
use signal_hook::consts::SIGCHLD;

use crate::console::Console;

/// Returns the signals as they come. From here on they do not end this program.
pub fn receive(signals: &[i32], console: &Console) -> Receiver<i32> {
    let (sender, receiver) = unbounded();
    match signal_hook::iterator::Signals::new(signals) {
        Ok(mut signals) => {
            thread::spawn(move || {
                for signal in signals.forever() {
                    if sender.send(signal).is_err() {
                        break;
                    }
                }
            });
            receiver
        }
        Err(error) => {
            // Without them the lease still runs out by itself.
            console.log(&format!("signals are not handled: {error}"));
            never()
        }
    }
}

/// A wait that a signal cancels.
pub struct Cancelling {
    over: Sender<()>,
    thread: JoinHandle<Option<i32>>,
}

/// Cancels when a signal comes.
pub fn cancel_on(signals: &Receiver<i32>, cancel: &Cancel) -> Cancelling {
    let (over, is_over) = bounded(0);
    let (signals, cancel) = (signals.clone(), cancel.clone());
    let thread = thread::spawn(move || {
        loop {
            select! {
                recv(signals) -> signal => match signal {
                    Ok(SIGCHLD) => {}
                    Ok(signal) => {
                        cancel.cancel();
                        return Some(signal);
                    }
                    Err(_) => return None,
                },
                recv(is_over) -> _ => return None,
            }
        }
    });
    Cancelling { over, thread }
}

impl Cancelling {
    /// Ends it: later signals are left to others. Returns the signal that came.
    pub fn end(self) -> Option<i32> {
        drop(self.over);
        self.thread.join().unwrap_or_default()
    }
}
