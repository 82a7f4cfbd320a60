//! What happens to a message between a process and the backend.

use contend::Lease;

use crate::clock::True;
use crate::model::{Answer, Ask, Id};
use crate::process::Call;
use crate::world::{Event, World};

/// A request under way: it outlives the call, and the process, that sent it.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    pub process: usize,
    pub call: u32,
    pub id: Id,
    pub lease: Lease,
    pub ask: Ask,
}

impl World {
    /// Sends a request, once or twice, or not at all. Copies are delayed apart from each other, so a
    /// repeated request may be executed long after its call is over, and requests overtake each other.
    pub fn send(&mut self, p: usize, call: &Call, leaves: True) {
        let request = Request {
            process: p,
            call: call.number,
            id: self.processes[p].id,
            lease: self.processes[p].lease,
            ask: call.ask,
        };
        if self.faulty && self.dice.chance(self.plan.failure) {
            // The connection breaks: the caller knows at once that it knows nothing.
            let at = leaves + self.short_delay();
            self.push(at, Event::Reply(p, call.number, Answer::Failed));
        }
        let twice = self.faulty && self.dice.chance(self.plan.duplication);
        self.tally.duplicates += u64::from(twice);
        for _ in 0..=u64::from(twice) {
            match self.arrival(p, leaves) {
                Some(at) => self.push(at, Event::Arrive(request)),
                None => self.trace(|_| format!("P{p}'s {:?} is lost", request.ask)),
            }
        }
    }

    /// A request has reached the backend.
    pub fn arrive(&mut self, request: Request) {
        if self.now < self.server_down_until {
            self.tally.lost_messages += 1;
            return;
        }
        let reading = self.model.clock.shows(self.now);
        if self.plan.habits.frozen_clock && self.faulty && self.dice.chance(300) {
            // It waits for a lock, with the clock as it is now.
            let wait = self.plan.longest_ttl() / self.dice.pick(&[64, 8, 2]);
            let at = self.now + self.dice.below(wait);
            self.push(at, Event::Execute(request, reading));
        } else {
            self.execute(request, reading);
        }
    }

    /// The backend does what it was asked, with its clock at `reading`, and replies.
    pub fn execute(&mut self, request: Request, reading: u64) {
        if self.now < self.server_down_until {
            return;
        }
        let Request {
            process: p,
            call,
            id,
            lease,
            ask,
        } = request;
        self.model.expire(reading);
        let before = self.model.lease;
        let answer = self.model.execute(id, lease, ask, reading);
        self.granted = matches!(answer, Answer::Granted(..));
        if self.granted {
            self.granted_to = call;
        }
        self.note_execution(id, ask, before);
        self.trace(|w| format!("backend: {} asks {ask:?}: {answer:?}", w.ids[id]));
        if let Some(at) = self.arrival(p, self.now) {
            self.push(at, Event::Reply(p, call, answer));
        }
        self.pass_on_wake();
    }

    /// Wake-ups are lossy: they are a hint.
    pub fn pass_on_wake(&mut self) {
        let Some(id) = self.model.wake.take() else {
            return;
        };
        if self.faulty && self.dice.chance(200) {
            self.tally.lost_wakes += 1;
            return;
        }
        let at = self.now + self.short_delay();
        self.push(at, Event::Wake(id));
    }

    /// When a message that leaves now arrives; `None`: never.
    fn arrival(&mut self, p: usize, leaves: True) -> Option<True> {
        let mut at = leaves + self.short_delay();
        if self.faulty {
            if self.dice.chance(self.plan.loss) || self.plan.is_cut(p, leaves) {
                self.tally.lost_messages += 1;
                return None;
            }
            if self.dice.chance(self.plan.lateness) {
                let total = self.plan.longest_total();
                let longest = self.dice.pick(&[total / 8, total / 2, total, total * 3]);
                at += self.dice.below(longest);
                self.tally.late_messages += 1;
            }
            // The calm begins with nothing under way that was sent before it.
            if at > self.plan.calm {
                self.tally.lost_messages += 1;
                return None;
            }
        }
        Some(at)
    }

    /// Short enough for three round trips inside the budget of one call; often so short that a lease
    /// counts from the very moment of the send, which is where drift matters most.
    fn short_delay(&mut self) -> u64 {
        let longest = if self.dice.chance(300) {
            10_000
        } else {
            self.short
        };
        1 + self.dice.below(longest)
    }
}
