//! Where a locker's calls to the backend are made, by one thread at a time: its seat, the bell that the
//! seat rings, and the present ownership.

use super::cycle::Cycle;
use super::holding::Holding;
use crate::backend::{Attempt, Entry, Seat};
use crate::bell::Bell;
use crate::clock::Moment;
use crate::contention::{Contention, Step};
use crate::error::Result;

pub(super) struct Desk {
    pub(super) seat: Box<dyn Seat>,
    pub(super) bell: Bell,
    /// Whether the backend rings the bell. Kept from one contended cycle to the next, so that each does
    /// not pay for a subscription.
    pub(super) listening: bool,
    /// The present ownership; `None` between two.
    pub(super) cycle: Option<Cycle>,
}

impl Desk {
    pub(super) fn new(seat: Box<dyn Seat>) -> Desk {
        Desk {
            seat,
            bell: Bell::new(),
            listening: false,
            cycle: None,
        }
    }

    /// The way out: release what may be left, and withdraw if `traced`: in the queue, or after an attempt
    /// of unknown outcome. The machine bounds it by one call's budget. Says what became of the lease with
    /// the fence `ours`.
    pub(super) fn leave(
        &mut self,
        of: &Holding,
        contention: &mut Contention,
        mut traced: bool,
        ours: Option<u64>,
    ) -> Result<bool> {
        contention.stop();
        let mut released = Ok(false);
        loop {
            match of.decide(contention, Contention::step) {
                Step::Acquire { entry, by } => {
                    traced |= self.attempt(of, contention, entry, by).is_err();
                }
                Step::Release { fence, by } => {
                    let outcome = self.give_back(of, contention, fence, by);
                    // After an attempt of unknown outcome, "there was none" may be that one's success.
                    let guess = matches!((&released, &outcome), (Err(_), Ok(false)));
                    if ours == Some(fence) && !guess {
                        released = outcome;
                    }
                }
                Step::Withdraw { by } if traced => {
                    self.withdraw(of, by);
                    traced = false;
                }
                Step::Wait { until } => {
                    self.bell.wait_stopping(until);
                }
                Step::Stopped => {
                    if traced {
                        // No time is left to wait for it, but the seat must hear of it: where a lease
                        // lasts as long as a session does, what an unanswered attempt has left would
                        // block the mutex for as long as this locker lives.
                        self.withdraw(of, Moment::now());
                    }
                    return released;
                }
                Step::Announce(_) | Step::Renew { .. } | Step::Withdraw { .. } => {}
            }
        }
    }

    fn withdraw(&mut self, of: &Holding, by: Moment) {
        let withdrawn = self.seat.withdraw(by);
        let _ = of.note(withdrawn);
        self.listening = false;
    }

    /// `Err`: the outcome is unknown. `Ok`: the machine knows it.
    pub(super) fn attempt(
        &mut self,
        of: &Holding,
        contention: &mut Contention,
        entry: Entry,
        by: Moment,
    ) -> Result<()> {
        let sent = Moment::now();
        let mut attempt = of.note(self.seat.acquire(entry, by));
        if let Ok(Attempt::Refused(refusal)) = &mut attempt
            && !self.listening
        {
            // Deaf to wake-ups, it must go by time.
            refusal.retry_in = refusal.retry_in.min(of.place().lease.call_budget());
        }
        let (attempt, outcome) = match attempt {
            Ok(attempt) => (Some(attempt), Ok(())),
            Err(error) => (None, Err(error)),
        };
        of.decide(contention, |contention, now| {
            contention.acquired(sent, now, attempt, rand::random());
        });
        outcome
    }

    /// Subscribed first, no wake-up can fall between the next attempt and the wait after it.
    pub(super) fn listen(&mut self, of: &Holding, by: Moment) {
        if !self.listening {
            let waker = self.bell.waker();
            self.listening = of.note(self.seat.listen(&waker, by)).is_ok();
        }
    }

    pub(super) fn give_back(
        &mut self,
        of: &Holding,
        contention: &mut Contention,
        fence: u64,
        by: Moment,
    ) -> Result<bool> {
        let outcome = of.note(self.seat.release(fence, by));
        let released = outcome.as_ref().ok().copied();
        of.decide(contention, |contention, now| {
            contention.released(now, released, rand::random());
        });
        outcome
    }
}
