//! `ThreadQueue`: threads that share a locker pass here one at a time, in the order in which they came.
//! A thread that waits here costs the backend nothing.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;

use super::tenure::Tenure;
use crate::cancel::Cancel;
use crate::clock::Moment;
use crate::parker::{Parker, Unparked, Unparker};

#[derive(Debug, Default)]
pub(crate) struct ThreadQueue {
    turns: Mutex<Turns>,
}

#[derive(Debug, Default)]
struct Turns {
    /// A thread has passed and not left.
    taken: bool,
    /// The threads that wait, the longest wait first; each with its locker.
    waiting: VecDeque<(Unparker, usize)>,
    /// The lease that comes with the turn that was just given.
    handed: Option<Arc<Tenure>>,
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

    /// Gives the turn, and the lease, to the next thread, if that one uses the same locker.
    pub(super) fn hand_on(self, locker: usize, tenure: &Arc<Tenure>) -> Result<(), Self> {
        let next = {
            let mut turns = self.0.turns.lock();
            if turns.waiting.front().is_none_or(|(_, its)| *its != locker) {
                drop(turns);
                return Err(self);
            }
            turns.handed = Some(Arc::clone(tenure));
            turns.waiting.pop_front()
        };
        if let Some((next, _)) = next {
            next.unpark();
        }
        self.keep();
        Ok(())
    }
}

impl Drop for Turn<'_> {
    /// Hands the turn to the next thread: one that comes now cannot get in between.
    fn drop(&mut self) {
        let mut turns = self.0.turns.lock();
        match turns.waiting.pop_front() {
            Some((next, _)) => next.unpark(),
            None => turns.taken = false,
        }
    }
}

impl ThreadQueue {
    /// Waits for a turn until `deadline`, or until one of `cancels` is cancelled. Returns it with the lease that
    /// came with it, if any.
    pub(super) fn enter(
        &self,
        locker: usize,
        deadline: Moment,
        cancels: &[&Cancel],
    ) -> Option<(Turn<'_>, Option<Arc<Tenure>>)> {
        let parker = {
            let mut turns = self.turns.lock();
            if !turns.taken {
                turns.taken = true;
                return Some((Turn(self), None));
            }
            let parker = Parker::new();
            turns.waiting.push_back((parker.unparker(), locker));
            parker
        };
        let unparker = parker.unparker();
        let _watched: Vec<_> = cancels.iter().map(|it| it.watch(&unparker)).collect();
        loop {
            let unparked = parker.park(deadline);
            let mut turns = self.turns.lock();
            let place = turns.waiting.iter().position(|(it, _)| it.same(&unparker));
            let Some(place) = place else {
                // The turn came, maybe between the end of the wait and this look.
                return Some((Turn(self), turns.handed.take()));
            };
            if unparked == Unparked::Timeout || cancels.iter().any(|it| it.is_cancelled()) {
                turns.waiting.remove(place);
                return None;
            }
        }
    }

    /// Takes up a turn that was kept, on any thread.
    pub(super) fn resume(&self) -> Turn<'_> {
        Turn(self)
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
    fn threads_pass_in_order() {
        let queue = Arc::new(ThreadQueue::default());
        let order = Arc::new(Mutex::new(Vec::new()));
        let turn = queue.enter(0, soon(), &[]).unwrap().0;
        let threads: Vec<_> = (0..8)
            .map(|number| {
                let thread = thread::spawn({
                    let (queue, order) = (Arc::clone(&queue), Arc::clone(&order));
                    move || {
                        let turn = queue.enter(0, soon(), &[]).unwrap().0;
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
    fn waiter_that_gives_up_is_passed_over() {
        let queue = Arc::new(ThreadQueue::default());
        queue.enter(0, soon(), &[]).unwrap().0.keep();
        assert!(queue.enter(0, Moment::now(), &[]).is_none());
        let cancel = Cancel::new();
        let waits = thread::spawn({
            let (queue, cancel) = (Arc::clone(&queue), cancel.clone());
            move || queue.enter(0, soon(), &[&cancel]).is_none()
        });
        waiting(&queue, 1);
        cancel.cancel();
        assert!(waits.join().unwrap());
        drop(queue.resume());
        let turns = queue.turns.lock();
        assert!(!turns.taken && turns.waiting.is_empty());
    }
}
