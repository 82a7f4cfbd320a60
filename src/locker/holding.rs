//! One locker's seat at its mutex, and the cycle of acquiring, renewing and releasing through it.
//!
//! What to do next is the contention machine's decision, as in a service; here is the loop around it,
//! which three threads take turns in: the one that locks, the renewer, and the one that unlocks.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use super::cycle::Cycle;
use super::desk::Desk;
use super::loss::Loss;
use super::renewer::Renewer;
use super::rota::{Due, Rota};
use crate::backend::{Entry, Place, Seat};
use crate::bell::Ring;
use crate::clock::Moment;
use crate::contention::{Change, Contention, Step};
use crate::error::{Error, ErrorKind, Result};
use crate::period::ContendPeriod;
use crate::service::Board;

/// What a call to the backend is given even where the caller's timeout is nearer: a free lock must not be
/// missed because a connection had to be opened first.
const SHORTEST_CALL: Duration = Duration::from_millis(500);

pub(super) struct Holding {
    number: u64,
    place: Place,
    period: ContendPeriod,
    max_hold: Option<Duration>,
    /// What the guard reads: never locked across a call.
    board: Board,
    /// How the guard is told when belief ends before it does.
    loss: Loss,
    /// Locked across calls. The turnstile keeps other lockers away, so only the renewer and the thread
    /// that locks or unlocks meet here.
    desk: Mutex<Desk>,
}

impl Holding {
    pub(super) fn new(
        place: Place,
        period: ContendPeriod,
        max_hold: Option<Duration>,
        seat: Box<dyn Seat>,
    ) -> Holding {
        static NUMBERS: AtomicU64 = AtomicU64::new(0);
        Holding {
            number: NUMBERS.fetch_add(1, Ordering::Relaxed),
            place,
            period,
            max_hold,
            board: Board::default(),
            loss: Loss::default(),
            desk: Mutex::new(Desk::new(seat)),
        }
    }

    pub(super) fn number(&self) -> u64 {
        self.number
    }

    pub(super) fn place(&self) -> &Place {
        &self.place
    }

    pub(super) fn board(&self) -> &Board {
        &self.board
    }

    pub(super) fn loss(&self) -> &Loss {
        &self.loss
    }

    /// Becomes the owner and returns the fence: in one try without a deadline, else by waiting for it.
    /// The deadline is that of the caller's `timeout`.
    ///
    /// The first try is one call: nothing is subscribed or queued until there is, or has been, somebody
    /// to wait for.
    pub(super) fn acquire(
        self: &Arc<Holding>,
        renewer: &Renewer,
        deadline: Option<Moment>,
        timeout: Option<Duration>,
    ) -> Result<u64> {
        let mut desk = self.desk.lock();
        let start = Moment::now();
        let id = Arc::clone(&self.place.id);
        let mut contention = Contention::new(id, self.place.lease, self.period, start);
        let mut by = self.call_by(start + self.place.lease.call_budget(), deadline);
        let mut queued = false;
        // Whoever listens from an earlier cycle has met others here. It queues at once: that saves a
        // round trip where they still are, and costs none where they are not.
        if desk.listening
            && deadline.is_some()
            && let Step::Acquire { by: latest, .. } = self.decide(&mut contention, Contention::step)
        {
            by = self.call_by(latest, deadline);
            queued = true;
            // What rang before this attempt, the attempt sees by itself.
            desk.bell.wait(start);
        }
        let entry = if queued { Entry::Queue } else { Entry::Try };
        let mut outcome = desk.attempt(self, &mut contention, entry, by);
        if !queued && outcome.is_ok() && contention.belief().is_none() {
            // Refused, it stands in no queue yet: it enters now, not when the lease seen has ended.
            contention.woken(start);
        }
        loop {
            let hopeless = outcome.as_ref().is_err_and(|error| !error.is_transient());
            let late = deadline.is_none_or(|deadline| deadline <= Moment::now());
            if (hopeless || late) && contention.belief().is_none() {
                // The caller learns why it has no lock, not what became of its traces.
                let traced = queued || outcome.is_err();
                let _ = desk.leave(self, &mut contention, traced, None);
                return Err(self.refusal(outcome.err(), &contention, timeout));
            }
            match self.decide(&mut contention, Contention::step) {
                Step::Acquire { entry, by } => {
                    let by = self.call_by(by, deadline);
                    queued = true;
                    desk.listen(self, by);
                    // What rang before this attempt, the attempt sees by itself.
                    desk.bell.wait(start);
                    outcome = desk.attempt(self, &mut contention, entry, by);
                }
                Step::Release { fence, by } => {
                    let _ = desk.give_back(self, &mut contention, fence, by);
                }
                Step::Wait { until } => {
                    let until = until.min(deadline.unwrap_or(Moment::FAR));
                    if desk.bell.wait(until) == Ring::Wake {
                        self.decide(&mut contention, Contention::woken);
                    }
                }
                // Not before the machine says so: a pause may have come between the grant and here.
                Step::Announce(Change::Acquired(state)) => {
                    let fence = state.after().fence();
                    return self.begin(renewer, desk, contention, fence);
                }
                // Nobody listens to other changes, and the machine renews or stops only what owns or
                // leaves.
                Step::Announce(_) | Step::Renew { .. } | Step::Withdraw { .. } | Step::Stopped => {}
            }
        }
    }

    /// Ends the ownership. `Ok(true)`: the lease was still ours when the backend ended it.
    pub(super) fn release(&self, renewer: &Renewer) -> Result<bool> {
        let mut desk = self.desk.lock();
        let Some(mut cycle) = desk.cycle.take() else {
            return Ok(false);
        };
        if let Some(due) = cycle.due.take() {
            renewer.remove(self.number, due);
        }
        self.loss.reset();
        // The grant took it out of the queue.
        desk.leave(self, &mut cycle.contention, false, Some(cycle.fence))
    }

    /// The renewer's visit: renews if it is time, tells the holder if belief has ended, and enters the
    /// next visit. `others`: when somebody else must be told something, so that no call lasts longer.
    pub(super) fn tend(self: &Arc<Holding>, rota: &Mutex<Rota>, others: Moment) {
        // A busy desk is that of a guard on its way out, or in, and then entered later: whoever leaves a
        // desk to the renewer enters it when the desk is free.
        let Some(mut desk) = self.desk.try_lock() else {
            return;
        };
        let Desk { seat, cycle, .. } = &mut *desk;
        let Some(cycle) = cycle else {
            return;
        };
        if let Some(due) = cycle.due.take() {
            rota.lock().remove(self.number, due);
        }
        cycle.due = cycle.advance(self, seat, others);
        if let Some(due) = cycle.due {
            self.enter(rota.lock(), desk, due);
        }
    }

    /// Enters the next visit. With the list locked the desk is let go of: so nobody comes to it too early,
    /// finds it busy and forgets it, and nobody ends the guard before its entry is there to be removed.
    fn enter(
        self: &Arc<Holding>,
        mut rota: MutexGuard<'_, Rota>,
        desk: MutexGuard<'_, Desk>,
        due: Due,
    ) {
        drop(desk);
        rota.insert(self, due);
    }

    /// A quarter of the transition may pass before a holder is told: three are left to stop in.
    pub(super) fn due(&self, at: Moment, until: Moment, again: bool) -> Due {
        Due {
            at,
            tell_by: until + self.place.lease.transition() / 4,
            again,
        }
    }

    fn begin(
        self: &Arc<Holding>,
        renewer: &Renewer,
        mut desk: MutexGuard<'_, Desk>,
        contention: Contention,
        fence: u64,
    ) -> Result<u64> {
        let mut cycle = Cycle {
            contention,
            fence,
            renew_until: self
                .max_hold
                .map_or(Moment::FAR, |max_hold| Moment::now() + max_hold),
            failed: false,
            due: None,
        };
        // As a rule this makes no call: nothing is due yet.
        cycle.due = cycle.advance(self, &mut desk.seat, Moment::FAR);
        let Some(due) = cycle.due else {
            desk.cycle = Some(cycle);
            return Ok(fence);
        };
        match renewer.rota() {
            Ok(rota) => {
                desk.cycle = Some(cycle);
                self.enter(rota, desk, due);
                Ok(fence)
            }
            Err(error) => {
                let _ = desk.leave(self, &mut cycle.contention, false, None);
                Err(error.context(&self.place.mutex))
            }
        }
    }

    pub(super) fn decide<T>(
        &self,
        contention: &mut Contention,
        decide: impl FnOnce(&mut Contention, Moment) -> T,
    ) -> T {
        self.board.decide(contention, decide)
    }

    /// One log line per change of trouble.
    pub(super) fn note<T>(&self, outcome: Result<T>) -> Result<T> {
        let changed = self.board.note(outcome.as_ref().err());
        if let (true, Err(error)) = (changed, &outcome) {
            log::warn!("{}: {}: {error}", self.place.mutex, self.place.id);
        }
        outcome
    }

    fn call_by(&self, by: Moment, deadline: Option<Moment>) -> Moment {
        match deadline {
            Some(deadline) => by.min(deadline.max(Moment::now() + SHORTEST_CALL)),
            None => by,
        }
    }

    /// Why there is no lock: the trouble, if there was some, or who holds it.
    fn refusal(
        &self,
        trouble: Option<Error>,
        contention: &Contention,
        timeout: Option<Duration>,
    ) -> Error {
        let mutex = &self.place.mutex;
        if let Some(error) = trouble {
            return error.context(format_args!("{mutex}: not locked"));
        }
        let holder = match contention.seen().owner_id() {
            "" => "kept for a contender that waits for it, or granted too late".to_owned(),
            holder => format!("held by {holder:?}"),
        };
        held(mutex, &holder, timeout)
    }
}

/// The error for a lock that somebody else has.
pub(super) fn held(mutex: &str, holder: &str, waited: Option<Duration>) -> Error {
    let waited = waited.map_or(String::new(), |waited| {
        format!(", and was not free within {waited:?}")
    });
    Error::new(ErrorKind::Held, format!("{mutex}: {holder}{waited}"))
}

impl fmt::Debug for Holding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Holding")
            .field("mutex", &self.place.mutex)
            .field("id", &self.place.id)
            .field("fence", &self.board.fence())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize};
    use std::thread;

    use super::*;
    use crate::backend::Hold;
    use crate::lease::Lease;

    /// The renewer here is one that comes as soon as there is an entry, due or not: often before the
    /// thread that locked, or the visit before, is quite done with the desk.
    #[test]
    fn a_guard_that_is_seen_to_at_once_is_not_forgotten() {
        let place = Place {
            mutex: Arc::from("m"),
            id: Arc::from("a"),
            lease: Lease::default(),
            hold: Hold::Short,
        };
        let factory = crate::memory::factory("holding-at-once", place.lease);
        let seat = factory.backend().unwrap().seat(&place).unwrap();
        let period = ContendPeriod::new(place.lease);
        let holding = Arc::new(Holding::new(place, period, None, seat));
        let renewer = Renewer::new();
        let (visits, over) = (AtomicUsize::new(0), AtomicBool::new(false));
        let rounds = || {
            for round in 0..60_000 {
                holding.acquire(&renewer, None, None).unwrap();
                let (enough, by) = (visits.load(Ordering::SeqCst) + 20, Moment::now());
                while visits.load(Ordering::SeqCst) < enough {
                    if by + Duration::from_secs(5) < Moment::now() {
                        return Err(format!("forgotten in round {round}"));
                    }
                    thread::yield_now();
                }
                holding.release(&renewer).unwrap();
            }
            Ok(())
        };
        let outcome = thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !over.load(Ordering::SeqCst) {
                        let visit = renewer.rota().unwrap().pop(Moment::FAR);
                        if let Some(visit) = visit {
                            visit.holding.tend(renewer.list(), visit.others);
                            visits.fetch_add(1, Ordering::SeqCst);
                        }
                    }
                });
            }
            let outcome = rounds();
            over.store(true, Ordering::SeqCst);
            outcome
        });
        assert_eq!(outcome, Ok(()));
    }
}
