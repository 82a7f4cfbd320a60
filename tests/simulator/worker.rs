//! The worker loop of the service, cut into events so that time can pass between any two of its lines.

use std::sync::Arc;
use std::time::Duration;

use contend::MutexOwner;
use contend::backend::{Attempt, Grant, OnRefusal, Refusal, Renewal, View};
use contend::machine::contention::{Contention, Failure, Step};

use crate::clock::True;
use crate::model::{Answer, Ask, Held};
use crate::plant::Plant;
use crate::process::{Call, Doing};
use crate::rules::SPIN;
use crate::world::{Event, Fault, World};

impl World {
    /// A new incarnation, with the same id or another.
    pub fn start(&mut self, p: usize) {
        let now = self.now;
        if self.dice.chance(100) {
            // Set up anew, with another lease.
            let lease = self.dice.pick(&self.plan.leases);
            self.processes[p].set_lease(lease, &mut self.dice);
            self.trace(|_| format!("P{p} has now {lease:?}"));
        }
        let process = &mut self.processes[p];
        process.machine = Some(Contention::new(
            Arc::clone(&self.ids[process.id]),
            process.lease,
            process.period,
            process.clock.moment(now),
        ));
        process.doing = Doing::Ready;
        process.woken = false;
        process.listening = false;
        process.stop_asked = false;
        process.untold = None;
        process.old_calls = process.calls;
        self.trace(|w| format!("P{p} starts as {}", w.ids[w.processes[p].id]));
        self.drive(p);
    }

    /// The worker's loop, up to its next wait of any kind.
    pub fn drive(&mut self, p: usize) {
        for _ in 0..64 {
            // Between what the last call brought and the next decision.
            if self.pauses(p) {
                self.processes[p].doing = Doing::Ready;
                self.set_timer(p, self.processes[p].paused_until);
                return;
            }
            self.release_before_telling(p);
            self.note_stop(p);
            let now = self.now;
            let process = &mut self.processes[p];
            let Some(machine) = &mut process.machine else {
                return;
            };
            if process.stop_asked {
                machine.stop();
            }
            let local = process.clock.moment(now);
            let step = machine.step(local);
            self.note_belief(p);
            self.trace(|_| format!("P{p} at {local:?}: {step:?}"));
            self.note_step(p, &step, local);
            match step {
                Step::Announce(change) => self.note_announcement(p, &change),
                Step::Wait { until } => {
                    if std::mem::take(&mut self.processes[p].woken) {
                        self.be_woken(p);
                        continue;
                    }
                    let at = self.processes[p].clock.reaches_moment(until).max(now);
                    self.processes[p].doing = Doing::Waiting;
                    self.set_timer(p, at);
                    return;
                }
                Step::Over => return self.stopped(p),
                // A repeated request that came very late is taken for a double. A look is answered at once.
                Step::Observe { .. } => {
                    self.model.expire(self.model.clock.shows(now));
                    let owner = self.model.lease.map_or(MutexOwner::NONE, |held| {
                        let id = Arc::clone(&self.ids[held.id]);
                        MutexOwner::new(id, held.acquired_at, 0, 0, held.fence)
                    });
                    let look_in = Duration::ZERO;
                    let roll = self.dice.roll();
                    if let Some(machine) = &mut self.processes[p].machine {
                        machine.observed(local, Ok(View { owner, look_in }), roll);
                    }
                }
                call => {
                    // Between the decision and the call.
                    if self.pauses(p) {
                        self.processes[p].doing = Doing::Decided(call);
                        self.set_timer(p, self.processes[p].paused_until);
                        return;
                    }
                    if self.call(p, &call) {
                        return;
                    }
                }
            }
        }
        self.violate(SPIN, format!("P{p} neither waits nor calls"));
    }

    /// Begins a call. `false`: it is over already.
    pub fn call(&mut self, p: usize, step: &Step) -> bool {
        let (ask, by) = match *step {
            Step::Acquire { on_refusal, by } => (Ask::Acquire(on_refusal), by),
            Step::Renew { fence, by } => (Ask::Renew(fence), by),
            Step::Release { fence, by } => (Ask::Release(fence), by),
            Step::Withdraw { by } => (Ask::Withdraw, by),
            _ => return false,
        };
        if let Ask::Release(fence) = ask {
            self.note_release(p, fence);
        }
        if self.plant == Plant::LeavesWithoutRelease
            && self.processes[p].stop_asked
            && ask != Ask::Acquire(OnRefusal::Leave)
        {
            self.stopped(p);
            return true;
        }
        let deaf = self.faulty && self.dice.chance(100);
        let now = self.now;
        let process = &mut self.processes[p];
        if matches!(ask, Ask::Acquire(OnRefusal::Enqueue)) {
            process.listening = process.listening || !deaf;
        }
        if let (Ask::Acquire(on_refusal), Some(machine)) = (ask, &mut process.machine) {
            machine.acquiring(on_refusal);
        }
        let sent = process.clock.moment(now);
        process.calls += 1;
        let call = Call {
            number: process.calls,
            ask,
            sent,
        };
        process.doing = Doing::Calling(call);
        let end = process.clock.reaches_moment(by);
        if by <= sent {
            // Time ran out between the decision and the call. A backend starts nothing then; one that
            // sends it all the same must do no harm.
            if self.dice.chance(500) {
                self.send(p, &call, now);
            }
            self.tally.timeouts += 1;
            self.finish(p, call, Answer::Failed);
            return false;
        }
        // Between reading the clock and sending.
        let leaves = if self.pauses(p) {
            self.processes[p].paused_until
        } else {
            now
        };
        self.send(p, &call, leaves);
        self.push(end, Event::Timeout(p, call.number, true));
        true
    }

    /// A call is over: tells the machine.
    pub fn finish(&mut self, p: usize, call: Call, answer: Answer) {
        let roll = self.dice.roll();
        let plant = self.plant;
        let session = self.plan.session;
        let ids = &self.ids;
        let process = &mut self.processes[p];
        process.doing = Doing::Ready;
        let now = process.clock.moment(self.now);
        let Some(machine) = &mut process.machine else {
            return;
        };
        let belief = process.lease.belief();
        let mut sent = call.sent;
        let owner = |held: Held, ms: u64| {
            let id = Arc::clone(&ids[held.id]);
            let Held {
                acquired_at,
                ttl_at,
                transition_at,
                fence,
                ..
            } = held;
            MutexOwner::new(id, acquired_at, ttl_at, transition_at, fence).observed_at(ms, now)
        };
        let seen = |held: Option<Held>, ms| held.map_or(MutexOwner::NONE, |held| owner(held, ms));
        match answer {
            Answer::Refused(..) | Answer::Lost(..) => process.refused = true,
            Answer::Granted(..) => process.refused = false,
            Answer::Failed if matches!(call.ask, Ask::Acquire(_)) => process.refused = false,
            _ => {}
        }
        match call.ask {
            Ask::Acquire(_) => {
                let attempt = match answer {
                    Answer::Granted(held, ms) => {
                        process.granted = Some((sent, held.fence));
                        process.untold = Some(held.fence);
                        if plant == Plant::AnnouncesLateGrant && sent + belief <= now {
                            sent = now;
                        }
                        Ok(Attempt::Granted(Grant {
                            owner: owner(held, ms),
                            until: session.then(|| sent + belief),
                        }))
                    }
                    Answer::Refused(held, ms, retry_ms) => {
                        let mut retry_in = Duration::from_millis(retry_ms);
                        if !process.listening {
                            // As the worker does: deaf to wake-ups, it goes by time.
                            retry_in = retry_in.min(process.lease.call_budget());
                        }
                        Ok(Attempt::Refused(Refusal {
                            owner: seen(held, ms),
                            retry_in,
                            asked: true,
                        }))
                    }
                    _ => Err(Failure::Unknown),
                };
                machine.acquired(sent, now, attempt, roll);
            }
            Ask::Renew(fence) => {
                let failed = matches!(answer, Answer::Failed);
                let failed =
                    std::mem::replace(&mut process.failed_renewal, failed.then_some(fence));
                let renewal = match answer {
                    Answer::Renewed(held, ms) => {
                        self.tally.saved += u64::from(failed == Some(fence));
                        if plant == Plant::RenewsFromReply {
                            sent = now;
                        }
                        Ok(Renewal::Renewed(Grant {
                            owner: owner(held, ms),
                            until: session.then(|| sent + belief),
                        }))
                    }
                    Answer::Lost(held, ms) => Ok(Renewal::Lost(seen(held, ms))),
                    _ if plant == Plant::IgnoresErrors => {
                        sent = now;
                        Ok(Renewal::Renewed(Grant {
                            owner: machine.seen().clone(),
                            until: None,
                        }))
                    }
                    _ => Err(Failure::Unknown),
                };
                // Planted: the clock as it was when the reply came in, before the pause.
                let read = match plant {
                    Plant::RevivesDeadline => sent + Duration::from_nanos(1),
                    _ => now,
                };
                machine.renewed(sent, read, renewal, roll);
            }
            Ask::Release(_) => {
                let released = match answer {
                    Answer::Released(released) => Ok(released),
                    _ => Err(Failure::Unknown),
                };
                machine.released(now, released, roll);
            }
            Ask::Withdraw | Ask::Observe => {
                let withdrawn = match answer {
                    Answer::Failed => Err(Failure::Unknown),
                    _ => Ok(true),
                };
                machine.withdrawn(now, withdrawn, roll);
            }
        }
        self.note_belief(p);
        self.trace(|_| format!("P{p} at {now:?}: {:?} -> {answer:?}", call.ask));
    }

    /// The backend rang.
    pub fn be_woken(&mut self, p: usize) {
        let process = &mut self.processes[p];
        let now = process.clock.moment(self.now);
        if let Some(machine) = &mut process.machine {
            machine.woken(now);
        }
        process.woken_at = Some(self.now);
        self.trace(|_| format!("P{p} is woken"));
    }

    /// Planted: the release goes out before the machine is told to stop.
    fn release_before_telling(&mut self, p: usize) {
        let process = &mut self.processes[p];
        if self.plant == Plant::ReleasesBeforeTelling
            && process.stop_asked
            && let Some(machine) = &process.machine
            && !machine.is_leaving()
            && let Some((_, fence)) = machine.belief()
        {
            process.calls += 1;
            let call = Call {
                number: process.calls,
                ask: Ask::Release(fence),
                sent: process.clock.moment(self.now),
            };
            self.note_release(p, fence);
            self.send(p, &call, self.now);
        }
    }

    fn stopped(&mut self, p: usize) {
        self.trace(|_| format!("P{p} has stopped"));
        self.note_end(p);
        self.processes[p].machine = None;
        self.check_stop(p);
        self.processes[p].doing = Doing::Nothing;
        self.tally.stops += 1;
        if !self.finale {
            let rest = if self.faulty {
                self.dice.below(self.plan.longest_ttl())
            } else {
                0
            };
            let at = (self.now + rest).min(self.plan.faults_end.max(self.now));
            self.push(at, Event::Fault(Fault::Start(p)));
        }
    }

    pub fn set_timer(&mut self, p: usize, at: True) {
        self.processes[p].timers += 1;
        let number = self.processes[p].timers;
        self.push(at, Event::Timer(p, number));
    }

    /// Maybe a pause begins here. While it lasts the local clock goes on, and nothing else does.
    fn pauses(&mut self, p: usize) -> bool {
        if !self.faulty || !self.dice.chance(self.plan.pause) {
            return false;
        }
        self.pause(p)
    }

    /// As [`pauses`](World::pauses), more often for a grant: only a pause makes one come too late.
    pub fn pauses_on_reply(&mut self, p: usize, event: &Event) -> bool {
        let grant = matches!(event, Event::Reply(_, _, Answer::Granted(..)));
        let permille = self.plan.pause * if grant { 4 } else { 1 };
        self.faulty && self.dice.chance(permille) && self.pause(p)
    }

    pub fn pause(&mut self, p: usize) -> bool {
        let total = self.plan.longest_total();
        let longest = self.dice.pick(&[total / 50, total / 2, total, total * 2]);
        let until = self.now + 1 + self.dice.below(longest);
        let until = until.min(self.plan.faults_end);
        if until <= self.now {
            return false;
        }
        self.processes[p].paused_until = self.processes[p].paused_until.max(until);
        self.tally.pauses += 1;
        self.trace(|w| format!("P{p} is paused until {:?}", w.processes[p].paused_until));
        true
    }
}
