//! The bounded way out of a worker: it never blocks, never breaks a pair, and counts what it drops.
//!
//! A crossbeam channel cannot be edited from its sending side without racing the receiver, so what is
//! dropped is dropped *before* it enters: an Acquired goes in only where there is room for its Released
//! too. For a receiver that does not read, whole pairs are left out until there is room again, and the
//! next event says how many were missed.

use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded};

use crate::event::{Event, EventKind};
use crate::state::MutexState;

/// How often a worker looks whether a receiver that fell behind has made room.
pub(crate) const CATCH_UP: Duration = Duration::from_millis(20);

/// The smallest channel: a pair, and the slot that is kept free for a Released.
pub(crate) const MIN_CAPACITY: usize = 2;

#[derive(Debug)]
pub(crate) struct Outbox {
    sender: Sender<Event>,
    /// The newest event that found no room: an Acquired whose Released has not come, or what the
    /// owner changed to.
    held_back: Option<Event>,
    missed: u64,
    /// How many events went into the channel.
    sent: u64,
}

impl Outbox {
    pub(crate) fn new(capacity: usize) -> (Outbox, Receiver<Event>) {
        let (sender, receiver) = bounded(capacity.max(MIN_CAPACITY));
        let outbox = Outbox {
            sender,
            held_back: None,
            missed: 0,
            sent: 0,
        };
        (outbox, receiver)
    }

    pub(crate) fn push(&mut self, event: Event) {
        self.catch_up();
        let held_back = self.held_back.as_ref().map(|held_back| held_back.kind);
        match (event.kind, held_back) {
            // Its Acquired never went out: the pair goes.
            (EventKind::Released, Some(EventKind::Acquired)) => {
                self.held_back = None;
                self.missed += 2;
            }
            // Its slot was kept free when the Acquired went in.
            (EventKind::Released, _) => {
                self.drop_held_back();
                self.send(event);
            }
            (_, None) if self.has_room() => self.send(event),
            (EventKind::Failed, _) => self.missed += 1,
            (EventKind::OwnerChanged, Some(EventKind::OwnerChanged)) => self.merge(event),
            _ => {
                self.drop_held_back();
                self.held_back = Some(event);
            }
        }
    }

    /// Sends what was held back if there is room now. `true`: nothing is held back any more.
    pub(crate) fn catch_up(&mut self) -> bool {
        if self.held_back.is_some()
            && self.has_room()
            && let Some(event) = self.held_back.take()
        {
            self.send(event);
        }
        self.held_back.is_none()
    }

    /// How many events went into the channel so far.
    pub(crate) fn sent(&self) -> u64 {
        self.sent
    }

    /// Whether an event fits and leaves a slot for a Released. Only this side adds, so room stays.
    fn has_room(&self) -> bool {
        let capacity = self.sender.capacity().unwrap_or(usize::MAX);
        self.sender.len() + MIN_CAPACITY <= capacity
    }

    fn send(&mut self, mut event: Event) {
        event.missed = std::mem::take(&mut self.missed);
        // Fails only where the receiver is gone: then nobody wants to know.
        let _ = self.sender.try_send(event);
        self.sent += 1;
    }

    fn drop_held_back(&mut self) {
        if self.held_back.take().is_some() {
            self.missed += 1;
        }
    }

    /// Two changes of somebody else's ownership that nobody read become one.
    fn merge(&mut self, mut event: Event) {
        if let Some(earlier) = self.held_back.take() {
            let before = earlier.state.before().clone();
            event.state = MutexState::new(before, event.state.after().clone());
            self.missed += 1;
        }
        self.held_back = Some(event);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::owner::MutexOwner;
    use rand::rngs::SmallRng;
    use rand::{RngExt, SeedableRng};
    use std::sync::Arc;

    fn event(kind: EventKind, fence: u64) -> Event {
        let owner = MutexOwner::new(format!("{fence}"), 0, 0, 0, fence);
        let state = match kind {
            EventKind::Released => MutexState::new(owner, MutexOwner::NONE),
            _ => MutexState::new(MutexOwner::NONE, owner),
        };
        Event::new(kind, &Arc::from("m"), state)
    }

    /// Whatever the receiver does, it sees pairs that alternate, every event is seen or counted as
    /// missed, and the sender never blocks.
    #[test]
    fn pairs_stay_whole_and_every_loss_is_counted_for_any_reader() {
        for seed in 0..2_000 {
            let mut dice = SmallRng::seed_from_u64(seed);
            let (mut outbox, receiver) = Outbox::new(dice.random_range(0..9));
            let (mut sent, mut seen, mut owned) = (0, 0, None);
            let mut expected = None;
            let mut check = |event: Event| {
                seen += 1 + event.missed;
                match event.kind {
                    EventKind::Acquired => {
                        assert_eq!(expected, None, "seed {seed}");
                        expected = event.fence();
                    }
                    EventKind::Released => {
                        assert_eq!(expected, event.fence(), "seed {seed}");
                        expected = None;
                    }
                    _ => {}
                }
            };
            for fence in 1..200 {
                let kind = match owned {
                    Some(_) if dice.random_bool(0.2) => EventKind::Failed,
                    Some(_) => EventKind::Released,
                    None if dice.random_bool(0.3) => EventKind::OwnerChanged,
                    None => EventKind::Acquired,
                };
                let fence = owned.unwrap_or(fence);
                match kind {
                    EventKind::Acquired => owned = Some(fence),
                    EventKind::Released => owned = None,
                    _ => {}
                }
                outbox.push(event(kind, fence));
                sent += 1;
                if dice.random_bool(0.3) {
                    for _ in 0..dice.random_range(0..6) {
                        receiver.try_recv().into_iter().for_each(&mut check);
                    }
                }
            }
            loop {
                receiver.try_iter().for_each(&mut check);
                if outbox.catch_up() && receiver.is_empty() {
                    break;
                }
            }
            assert_eq!(seen + outbox.missed, sent, "seed {seed}");
        }
    }
}
