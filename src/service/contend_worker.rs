//! The loop around the contention machine: it does what the machine says, and tells it what came of it.

use std::sync::Arc;
use std::time::Duration;

use super::claim::Claim;
use super::outbox::CATCH_UP;
use super::report::Report;
use crate::backend::{Attempt, Entry, Seat};
use crate::bell::{Bell, Ring};
use crate::clock::Moment;
use crate::contention::{Change, Contention, Step};
use crate::event::EventKind;
use crate::lease::Lease;

/// How long an executor may leave the last callbacks unstarted.
const PATIENCE: Duration = Duration::from_secs(1);

/// The state of one run. It belongs to the worker thread alone.
pub(super) struct Worker {
    pub(super) seat: Box<dyn Seat>,
    pub(super) lease: Lease,
    pub(super) contention: Contention,
    pub(super) report: Report,
    /// Whether the backend rings our bell.
    pub(super) listening: bool,
    /// The id is taken for as long as somebody contends under it, even if the service was dropped.
    pub(super) _claim: Arc<Claim>,
}

impl Worker {
    pub(super) fn run(mut self, bell: &Bell) {
        loop {
            if bell.is_stopped() && !self.contention.is_leaving() {
                // Whoever lost the mutex just now still winds down in the transition, and leaving
                // releases what is left of the lease, or what was granted anew but not announced yet.
                if !self.contention.is_announced() {
                    self.settle();
                }
                self.contention.stop();
            }
            match self.decide(Contention::step) {
                Step::Announce(change) => self.announce(change),
                Step::Acquire { entry, by } => self.acquire(bell, entry, by),
                Step::Renew { fence, by } => self.renew(fence, by),
                Step::Release { fence, by } => {
                    let released = self.seat.release(fence, by);
                    let released = self.report.outcome(released);
                    self.decide(|contention, now| {
                        contention.released(now, released, rand::random())
                    });
                }
                Step::Withdraw { by } => {
                    let withdrawn = self.seat.withdraw(by);
                    self.report.outcome(withdrawn);
                }
                Step::Wait { until } => self.wait(bell, until),
                Step::Stopped => break,
            }
        }
        // While a callback runs on, the service is still stopping: `stop` says so in time, and no second
        // run begins beside it.
        self.report.delivery.close(Moment::now() + PATIENCE);
    }

    fn decide<T>(&mut self, decide: impl FnOnce(&mut Contention, Moment) -> T) -> T {
        self.report.board.decide(&mut self.contention, decide)
    }

    fn acquire(&mut self, bell: &Bell, entry: Entry, by: Moment) {
        // Subscribed first, no wake-up can fall between this attempt and the wait after it.
        if !self.listening && !self.contention.is_leaving() {
            let listening = self.seat.listen(&bell.waker(), half(by));
            self.listening = self.report.outcome(listening).is_some();
        }
        let sent = Moment::now();
        let attempt = self.seat.acquire(entry, by);
        let mut attempt = self.report.outcome_while(self.listening, attempt);
        if let Some(Attempt::Refused(refusal)) = &mut attempt
            && !self.listening
        {
            // Deaf to wake-ups, it must go by time.
            refusal.retry_in = refusal.retry_in.min(self.lease.call_budget());
        }
        self.decide(|contention, now| contention.acquired(sent, now, attempt, rand::random()));
    }

    fn renew(&mut self, fence: u64, by: Moment) {
        let sent = Moment::now();
        let renewal = self.seat.renew(fence, by);
        let renewal = self.report.outcome(renewal);
        self.decide(|contention, now| contention.renewed(sent, now, renewal, rand::random()));
        if self.contention.belief().is_some() {
            self.report.board.refresh(self.contention.seen());
        }
    }

    fn wait(&mut self, bell: &Bell, mut until: Moment) {
        if self.report.delivery.is_behind() {
            until = until.min(Moment::now() + CATCH_UP);
        }
        let ring = if self.contention.is_leaving() {
            bell.wait_stopping(until)
        } else {
            bell.wait(until)
        };
        if ring == Ring::Wake {
            self.decide(Contention::woken);
        }
    }

    fn announce(&mut self, change: Change) {
        match change {
            Change::Acquired(state) => self.report.announce(EventKind::Acquired, state),
            Change::OwnerChanged(state) => self.report.announce(EventKind::OwnerChanged, state),
            Change::Released(state) => {
                self.report.announce(EventKind::Released, state);
                // On giving up on purpose the release waits for the callback, so that the next owner
                // does not begin while the last one winds down.
                if self.contention.is_leaving() {
                    self.settle();
                }
            }
        }
    }

    /// Waits until callbacks have run for all that was delivered, up to the end of the lease. One that
    /// runs on keeps the lease from being released: what is left of it is its time to stop in.
    fn settle(&mut self) {
        if let Some(gone_at) = self.contention.gone_at()
            && !self.report.delivery.settle(gone_at)
        {
            log::warn!(
                "{}: the callback for Released outlasted the lease; somebody else may own by now",
                self.report.mutex
            );
            self.contention.abandon();
        }
    }
}

/// A moment half way to `by`: a subscriber that hangs leaves time for the attempt itself.
pub(super) fn half(by: Moment) -> Moment {
    by - by.remaining() / 2
}
