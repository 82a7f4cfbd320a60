//! Signals as messages.

use std::thread;

use contend::Cancel;
use crossbeam_channel::{Receiver, bounded, never, select, unbounded};
use signal_hook::consts::SIGCHLD;
use signal_hook::iterator::Signals;

use crate::exit::Failure;

/// Returns these signals as they come. From here on they do not end this program.
pub fn receive(signals: &[i32]) -> Receiver<i32> {
    let (sender, receiver) = unbounded();
    let Ok(mut signals) = Signals::new(signals) else {
        // They end this program, and the lease runs out by itself.
        return never();
    };
    thread::spawn(move || signals.forever().try_for_each(|signal| sender.send(signal)));
    receiver
}

/// Waits for something, until a signal cancels it.
pub fn cancelling<T>(
    signals: &Receiver<i32>,
    wait: impl FnOnce(&Cancel) -> T,
) -> Result<T, Failure> {
    let cancel = Cancel::new();
    let (over, is_over) = bounded::<()>(0);
    thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            loop {
                select! {
                    recv(signals) -> signal => match signal {
                        Ok(SIGCHLD) => {}
                        signal => {
                            cancel.cancel();
                            return signal.ok();
                        }
                    },
                    recv(is_over) -> _ => return None,
                }
            }
        });
        let outcome = wait(&cancel);
        drop(over);
        // What came just then is released by dropping it.
        match watcher.join() {
            Ok(Some(signal)) => Err(Failure::signal(signal)),
            _ => Ok(outcome),
        }
    })
}
