//! The loop around the observer's machine.

use super::contend_worker::half;
use super::outbox::CATCH_UP;
use super::report::Report;
use crate::backend::Watch;
use crate::bell::{Bell, Ring};
use crate::clock::Moment;
use crate::event::EventKind;
use crate::lease::Lease;
use crate::observation::{Look, Observation};

/// The state of one run. It belongs to the worker thread alone.
pub(super) struct Worker {
    pub(super) watch: Box<dyn Watch>,
    pub(super) lease: Lease,
    pub(super) observation: Observation,
    pub(super) report: Report,
    /// Whether the backend rings our bell.
    pub(super) listening: bool,
}

impl Worker {
    pub(super) fn run(mut self, bell: &Bell) {
        while !bell.is_stopped() {
            match self.observation.step(Moment::now()) {
                Look::Announce(state) => self.report.announce(EventKind::OwnerChanged, state),
                Look::Observe { by } => self.observe(bell, by),
                Look::Wait { mut until } => {
                    if self.report.delivery.is_behind() {
                        until = until.min(Moment::now() + CATCH_UP);
                    }
                    if bell.wait(until) == Ring::Wake {
                        self.observation.woken(Moment::now());
                    }
                }
            }
        }
        self.report
            .delivery
            .close(Moment::now() + self.lease.total());
    }

    fn observe(&mut self, bell: &Bell, by: Moment) {
        if !self.listening {
            let listening = self.watch.listen(&bell.waker(), half(by));
            self.listening = self.report.outcome(listening).is_some();
        }
        let sight = self.watch.observe(by);
        let mut sight = self.report.outcome_while(self.listening, sight);
        if let Some(sight) = &mut sight
            && !self.listening
        {
            sight.again_in = sight.again_in.min(self.lease.call_budget());
        }
        self.observation
            .observed(Moment::now(), sight, rand::random());
        self.report.board.refresh(self.observation.seen());
    }
}
