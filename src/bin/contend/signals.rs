//! Signals as messages.

use std::fs;
use std::thread::{self, JoinHandle};

use contend::Cancel;
use crossbeam_channel::{Receiver, Sender, bounded, never, select, unbounded};
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT};

use crate::console::Console;

/// Returns the signals as they come. From here on they do not end this program.
///
/// What whoever started us has told us to ignore stays ignored, as `nohup` does with SIGHUP and a shell with
/// the SIGINT of what runs in its background.
pub fn receive(signals: &[i32], console: &Console) -> Receiver<i32> {
    let (sender, receiver) = unbounded();
    let ignored = ignored();
    let may_be_ignored = |signal| matches!(signal, SIGHUP | SIGINT);
    let heard = signals
        .iter()
        .filter(|&&signal| !(may_be_ignored(signal) && is_in(ignored, signal)));
    match signal_hook::iterator::Signals::new(heard) {
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

/// The set of signals that this process ignores, as a mask; empty where the system does not tell.
fn ignored() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .unwrap_or_default()
}

/// Whether a mask of the system has this signal: they are counted from 1.
fn is_in(mask: u64, signal: i32) -> bool {
    (mask >> (signal - 1)) & 1 == 1
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
