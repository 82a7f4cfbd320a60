//! `Ownership`: one ownership as its holder sees it. Shared by guards, services and the runs of a schedule.

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded};
use parking_lot::Mutex;

use crate::shared::Shared;

#[derive(Clone, Debug)]
pub(crate) struct Ownership {
    shared: Arc<Shared>,
    fence: u64,
    loss: Arc<Loss>,
}

impl Ownership {
    /// `loss` is closed by the thread that notices the end.
    pub(crate) fn new(shared: &Arc<Shared>, fence: u64, loss: Arc<Loss>) -> Ownership {
        Ownership {
            shared: Arc::clone(shared),
            fence,
            loss,
        }
    }

    pub(crate) fn fence(&self) -> u64 {
        self.fence
    }

    pub(crate) fn is_valid(&self) -> bool {
        !self.valid_for().is_zero()
    }

    /// How long it certainly lasts without another renewal; zero once it is over.
    pub(crate) fn valid_for(&self) -> Duration {
        self.shared.valid_for(self.fence)
    }

    /// A receiver that is closed at the end.
    pub(crate) fn lost(&self) -> Receiver<()> {
        self.loss.receiver()
    }

    pub(crate) fn end(&self) {
        self.loss.close();
    }
}

/// A channel that is closed when an ownership ends. Nothing is ever sent.
#[derive(Debug, Default)]
pub(crate) struct Loss {
    channel: Mutex<Channel>,
}

#[derive(Debug, Default)]
enum Channel {
    /// No receiver was asked for; most guards have none.
    #[default]
    Unused,
    Open {
        _sender: Sender<()>,
        receiver: Receiver<()>,
    },
    Closed,
}

impl Loss {
    pub(crate) fn close(&self) {
        *self.channel.lock() = Channel::Closed;
    }

    pub(crate) fn receiver(&self) -> Receiver<()> {
        let mut channel = self.channel.lock();
        if matches!(*channel, Channel::Unused) {
            let (_sender, receiver) = bounded(0);
            *channel = Channel::Open { _sender, receiver };
        }
        match &*channel {
            Channel::Open { receiver, .. } => receiver.clone(),
            Channel::Unused | Channel::Closed => bounded(0).1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loss_closes_every_receiver() {
        let loss = Loss::default();
        let receivers: Vec<_> = (0..5).map(|_| loss.receiver()).collect();
        assert!(
            receivers
                .iter()
                .all(|it| it.try_recv().unwrap_err().is_empty())
        );
        loss.close();
        for receiver in receivers.iter().chain([&loss.receiver()]) {
            assert!(receiver.try_recv().unwrap_err().is_disconnected());
        }
    }
}
