//! How a holder learns that it lost the lock.

use crossbeam_channel::{Receiver, Sender, unbounded};
use parking_lot::Mutex;

/// More receivers of one guard than this are not alive at once.
const MOST_RECEIVERS: usize = 1_000;

/// The loss of one guard. One channel for all receivers, with a message for each of them: a guard may
/// be asked for a receiver in every round of a loop.
#[derive(Debug, Default)]
pub(super) struct Loss {
    notes: Mutex<Notes>,
}

#[derive(Debug, Default)]
struct Notes {
    channel: Option<(Sender<()>, Receiver<()>)>,
    receivers: usize,
    lost: bool,
}

impl Loss {
    pub(super) fn receiver(&self) -> Receiver<()> {
        let mut notes = self.notes.lock();
        let lost = notes.lost;
        notes.receivers += 1;
        let (sender, receiver) = notes.channel.get_or_insert_with(unbounded);
        if lost {
            let _ = sender.send(());
        }
        receiver.clone()
    }

    /// Tells every receiver, those still to come included.
    pub(super) fn tell(&self) {
        let mut notes = self.notes.lock();
        notes.lost = true;
        if let Some((sender, _)) = &notes.channel {
            for _ in 0..notes.receivers.min(MOST_RECEIVERS) {
                let _ = sender.send(());
            }
        }
    }

    /// The guard is over: its receivers hear no more from it, and the next guard's begin anew.
    pub(super) fn reset(&self) {
        *self.notes.lock() = Notes::default();
    }
}
