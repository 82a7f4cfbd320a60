//! `ThreadQueue`: threads that share a locker pass here one at a time, in the order in which they came.
//! What waits here costs the backend nothing.

use std::collections::VecDeque;

use parking_lot::Mutex;

use crate::cancel::Cancel;
use crate::clock::Moment;
use crate::parker::{Parker, Unparked, Unparker};

#[derive(Debug, Default)]
pub(super) struct ThreadQueue {
    turns: Mutex<Turns>,
}

#[derive(Debug, Default)]
struct Turns {
    /// A thread has passed and not left.
    taken: bool,
    /// The longest wait first.
    waiting: VecDeque<Unparker>,
}

/// Why a thread did not pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Blocked {
    /// Another one did, and did not leave in time.
    Busy,
    Cancelled,
}

/// A turn; given to the next thread on drop, whatever happens.
#[derive(Debug)]
#[must_use]
pub(super) struct Turn<'a>(&'a ThreadQueue);

impl Turn<'_> {
    /// Keeps the turn until it is [taken up](ThreadQueue::resume) again.
    pub(super) fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.leave();
    }
}

impl ThreadQueue {
    /// Waits for a turn until `deadline`, or until one of `cancels` is cancelled.
    pub(super) fn enter(&self, deadline: Moment, cancels: &[&Cancel]) -> Result<Turn<'_>, Blocked> {
        let parker = {
            let mut turns = self.turns.lock();
            if !turns.taken {
                turns.taken = true;
                return Ok(Turn(self));
            }
            let parker = Parker::new();
            turns.waiting.push_back(parker.unparker());
            parker
        };
        let unparker = parker.unparker();
        let _watched: Vec<_> = cancels.iter().map(|it| it.watch(&unparker)).collect();
        loop {
            let unparked = parker.park(deadline);
            let mut turns = self.turns.lock();
            let place = turns.waiting.iter().position(|it| it.same(&unparker));
            let Some(place) = place else {
                // The turn came, maybe between the end of the wait and this look.
                return Ok(Turn(self));
            };
            let cancelled = cancels.iter().any(|it| it.is_cancelled());
            if cancelled || unparked == Unparked::Timeout {
                turns.waiting.remove(place);
                return Err(if cancelled {
                    Blocked::Cancelled
                } else {
                    Blocked::Busy
                });
            }
        }
    }

    /// Takes up a turn that was kept, on any thread.
    pub(super) fn resume(&self) -> Turn<'_> {
        Turn(self)
    }

    /// Hands the turn to the next thread: nobody who comes now can get in between.
    fn leave(&self) {
        let mut turns = self.turns.lock();
        match turns.waiting.pop_front() {
            Some(next) => next.unpark(),
            None => turns.taken = false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::thread;
    use std::time::{Duration, Instant};

    fn soon() -> Moment {
        Moment::now() + Duration::from_secs(60)
    }

    fn waiting(queue: &ThreadQueue, count: usize) {
        let limit = Instant::now() + Duration::from_secs(60);
        while queue.turns.lock().waiting.len() != count {
            assert!(Instant::now() < limit);
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn threads_pass_in_the_order_in_which_they_came() {
        let queue = Arc::new(ThreadQueue::default());
        let order = Arc::new(Mutex::new(Vec::new()));
        let turn = queue.enter(soon(), &[]).unwrap();
        let threads: Vec<_> = (0..8)
            .map(|number| {
                let thread = thread::spawn({
                    let (queue, order) = (Arc::clone(&queue), Arc::clone(&order));
                    move || {
                        let turn = queue.enter(soon(), &[]).unwrap();
                        order.lock().push(number);
                        drop(turn);
                    }
                });
                waiting(&queue, number + 1);
                thread
            })
            .collect();
        drop(turn);
        threads
            .into_iter()
            .for_each(|thread| thread.join().unwrap());
        assert_eq!(*order.lock(), (0..8).collect::<Vec<_>>());
        assert!(!queue.turns.lock().taken);
    }

    #[test]
    fn whoever_gives_up_or_is_cancelled_is_passed_over() {
        let queue = Arc::new(ThreadQueue::default());
        queue.enter(soon(), &[]).unwrap().keep();
        assert_eq!(queue.enter(Moment::now(), &[]).unwrap_err(), Blocked::Busy);
        let cancel = Cancel::new();
        let waits = thread::spawn({
            let (queue, cancel) = (Arc::clone(&queue), cancel.clone());
            move || queue.enter(soon(), &[&cancel]).map(drop).unwrap_err()
        });
        waiting(&queue, 1);
        cancel.cancel();
        assert_eq!(waits.join().unwrap(), Blocked::Cancelled);
        drop(queue.resume());
        let turns = queue.turns.lock();
        assert!(!turns.taken && turns.waiting.is_empty());
    }
}
