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

impl Turnstile {
    /// Waits for a turn until `deadline`; not at all without one.
    pub(super) fn enter(&self, deadline: Option<Moment>) -> Result<(), Blocked> {
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
    pub(super) fn leave(&self) {
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
        turnstile.enter(None).unwrap();
        let threads: Vec<_> = (0..8)
            .map(|number| {
                let (turnstile, order) = (Arc::clone(&turnstile), Arc::clone(&order));
                let thread = thread::spawn({
                    let turnstile = Arc::clone(&turnstile);
                    move || {
                        turnstile.enter(soon()).unwrap();
                        order.lock().push(number);
                        turnstile.leave();
                    }
                });
                waiting(&turnstile, number + 1);
                thread
            })
            .collect();
        turnstile.leave();
        threads
            .into_iter()
            .for_each(|thread| thread.join().unwrap());
        assert_eq!(*order.lock(), (0..8).collect::<Vec<_>>());
        assert!(turnstile.turns.lock().inside.is_none());
    }

    #[test]
    fn a_thread_that_gives_up_is_passed_over_and_one_inside_is_told() {
        let turnstile = Arc::new(Turnstile::default());
        turnstile.enter(None).unwrap();
        assert_eq!(turnstile.enter(soon()), Err(Blocked::BySelf));
        let other = {
            let turnstile = Arc::clone(&turnstile);
            thread::spawn(move || {
                let at_once = turnstile.enter(None);
                let soon = turnstile.enter(Some(Moment::now() + Duration::from_millis(20)));
                (at_once, soon)
            })
        };
        let (at_once, soon) = other.join().unwrap();
        assert_eq!(
            (at_once, soon),
            (Err(Blocked::ByOther), Err(Blocked::ByOther))
        );
        turnstile.leave();
        let turns = turnstile.turns.lock();
        assert!(turns.inside.is_none() && turns.waiting.is_empty());
    }
}
