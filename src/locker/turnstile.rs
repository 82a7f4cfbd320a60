//! Threads that share a locker pass here one at a time, in the order in which they came. What waits
//! here costs the backend nothing.

use std::collections::VecDeque;
use std::thread::{self, ThreadId};

use parking_lot::Mutex;

use crate::bell::{Bell, Ring, Waker};
use crate::clock::Moment;

#[derive(Debug, Default)]
pub(super) struct Turnstile {
    turns: Mutex<Turns>,
}

#[derive(Debug, Default)]
struct Turns {
    /// The thread that passed last and has not left.
    inside: Option<ThreadId>,
    /// The longest wait first.
    waiting: VecDeque<(ThreadId, Waker)>,
}

/// Why a thread did not pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Blocked {
    /// It is inside already, and would wait for itself.
    BySelf,
    /// Another one is, and did not leave in time.
    ByOther,
}

/// A turn; given to the next thread on drop, whatever happens.
#[derive(Debug)]
#[must_use]
pub(super) struct Turn<'a>(&'a Turnstile);

impl Turn<'_> {
    /// Keeps the turn until it is [taken up](Turnstile::resume) again.
    pub(super) fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.leave();
    }
}

impl Turnstile {
    /// Waits for a turn until `deadline`; not at all without one.
    pub(super) fn enter(&self, deadline: Option<Moment>) -> Result<Turn<'_>, Blocked> {
        self.pass(deadline).map(|()| Turn(self))
    }

    /// Takes up a turn that was kept, on any thread.
    pub(super) fn resume(&self) -> Turn<'_> {
        Turn(self)
    }

    fn pass(&self, deadline: Option<Moment>) -> Result<(), Blocked> {
        let me = thread::current().id();
        let bell = {
            let mut turns = self.turns.lock();
            match turns.inside {
                None => {
                    turns.inside = Some(me);
                    return Ok(());
                }
                Some(thread) if thread == me => return Err(Blocked::BySelf),
                Some(_) if deadline.is_none() => return Err(Blocked::ByOther),
                Some(_) => {}
            }
            let bell = Bell::new();
            turns.waiting.push_back((me, bell.waker()));
            bell
        };
        if bell.wait(deadline.unwrap_or(Moment::FAR)) == Ring::Wake {
            return Ok(());
        }
        let mut turns = self.turns.lock();
        let waker = bell.waker();
        match turns.waiting.iter().position(|(_, w)| w.same(&waker)) {
            Some(place) => {
                turns.waiting.remove(place);
                Err(Blocked::ByOther)
            }
            // The turn came between the end of the wait and this look.
            None => Ok(()),
        }
    }

    /// Hands the turn to the next thread: nobody who comes now can get in between.
    fn leave(&self) {
        let mut turns = self.turns.lock();
        turns.inside = turns.waiting.pop_front().map(|(thread, waker)| {
            waker.wake();
            thread
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    fn soon() -> Option<Moment> {
        Some(Moment::now() + Duration::from_secs(60))
    }

    fn waiting(turnstile: &Turnstile, count: usize) {
        let limit = Instant::now() + Duration::from_secs(60);
        while turnstile.turns.lock().waiting.len() != count {
            assert!(Instant::now() < limit);
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn threads_pass_in_the_order_in_which_they_came() {
        let turnstile = Arc::new(Turnstile::default());
        let order = Arc::new(Mutex::new(Vec::new()));
        let turn = turnstile.enter(None).unwrap();
        let threads: Vec<_> = (0..8)
            .map(|number| {
                let (turnstile, order) = (Arc::clone(&turnstile), Arc::clone(&order));
                let thread = thread::spawn({
                    let turnstile = Arc::clone(&turnstile);
                    move || {
                        let turn = turnstile.enter(soon()).unwrap();
                        order.lock().push(number);
                        drop(turn);
                    }
                });
                waiting(&turnstile, number + 1);
                thread
            })
            .collect();
        drop(turn);
        threads
            .into_iter()
            .for_each(|thread| thread.join().unwrap());
        assert_eq!(*order.lock(), (0..8).collect::<Vec<_>>());
        assert!(turnstile.turns.lock().inside.is_none());
    }

    #[test]
    fn a_thread_that_gives_up_is_passed_over_and_one_inside_is_told() {
        let turnstile = Arc::new(Turnstile::default());
        turnstile.enter(None).unwrap().keep();
        assert_eq!(turnstile.enter(soon()).unwrap_err(), Blocked::BySelf);
        let other = {
            let turnstile = Arc::clone(&turnstile);
            thread::spawn(move || {
                let at_once = turnstile.enter(None).unwrap_err();
                let soon = Some(Moment::now() + Duration::from_millis(20));
                (at_once, turnstile.enter(soon).unwrap_err())
            })
        };
        assert_eq!(other.join().unwrap(), (Blocked::ByOther, Blocked::ByOther));
        drop(turnstile.resume());
        let turns = turnstile.turns.lock();
        assert!(turns.inside.is_none() && turns.waiting.is_empty());
    }
}
