//! The rules, held against everything that happens. The monitor sees true time, every process and the
//! backend at once; it uses nothing that the machine says about itself but its belief and its news.

use contend::Moment;
use contend::machine::contention::{Change, Contention, Step};

use crate::clock::True;
use crate::model::{Ask, Held, Id};
use crate::rules::{
    ALTERNATE, BUDGET, FENCE, GIVE_BACK, LATE, LIVE, OUTLIVES, OVERDUE, REVIVE, SHORTEN,
    TELL_FIRST, TOUCH, TRACE, TWO, WIND_DOWN,
};
use crate::world::World;

#[derive(Clone, Copy, Debug)]
pub struct Belief {
    pub fence: u64,
    pub until: Moment,
    /// The first true time at which it holds no more.
    pub end: True,
    /// Counted already as exempt.
    counted: bool,
}

#[derive(Debug)]
pub struct Violation {
    pub rule: &'static str,
    pub what: String,
}

/// What the monitor knows of the mutex as a whole.
pub struct Monitor {
    /// The only rule to hold, to see how far a bug gets that others would have stopped.
    only: Option<&'static str>,
    highest_grant: u64,
    highest_announced: u64,
    /// The highest fence that the backend has forgotten.
    forgotten: u64,
    pub violation: Option<Violation>,
}

impl Monitor {
    pub fn new(only: Option<&'static str>) -> Monitor {
        Monitor {
            only,
            highest_grant: 0,
            highest_announced: 0,
            forgotten: 0,
            violation: None,
        }
    }
}

impl World {
    pub fn violate(&mut self, rule: &'static str, what: String) {
        if self.monitor.only.is_some_and(|only| only != rule) {
            return;
        }
        self.trace(|_| format!("VIOLATION: {rule}: {what}"));
        self.monitor
            .violation
            .get_or_insert(Violation { rule, what });
    }

    /// After every event.
    pub fn check(&mut self) {
        let mut believer = None;
        for p in 0..self.processes.len() {
            let process = &mut self.processes[p];
            if process.announced.is_some() {
                let end = process.belief.map_or(process.due, |belief| belief.end);
                if self.now > end.max(process.paused_until) {
                    let what = format!("P{p} was due at {end} and says nothing");
                    self.violate(OVERDUE, what);
                }
            }
            let process = &mut self.processes[p];
            let Some(belief) = &mut process.belief else {
                continue;
            };
            if belief.end <= self.now {
                continue;
            }
            if belief.fence <= self.monitor.forgotten {
                let counted = std::mem::replace(&mut belief.counted, true);
                self.tally.exempt_beliefs += u64::from(!counted);
                continue;
            }
            if let Some(other) = believer.replace(p) {
                self.violate(TWO, format!("P{other} and P{p} both believe"));
            }
            self.check_lease(p);
        }
        if believer.is_some() && !self.faulty {
            self.owned_at.get_or_insert(self.now);
        }
    }

    /// The lease behind a belief that holds.
    fn check_lease(&mut self, p: usize) {
        let process = &self.processes[p];
        let (Some(belief), held) = (process.belief, self.model.lease) else {
            return;
        };
        let ours = |held: &Held| held.id == process.id && held.fence >= belief.fence;
        let Some(free_at) = held.filter(ours).map(|held| self.model.free_at(&held)) else {
            let what = format!("P{p} has {belief:?}, the backend {held:?}");
            return self.violate(OUTLIVES, what);
        };
        let server = self.model.clock;
        if free_at < belief.end {
            let what = format!("P{p} has {belief:?}, the backend {held:?} until {free_at}");
            self.violate(OUTLIVES, what);
        } else if server.shows(belief.end) + process.wind_down > server.shows(free_at) {
            let what = format!("P{p} has {belief:?}, the backend {held:?} until {free_at}");
            self.violate(WIND_DOWN, what);
        }
    }

    /// The machine of `p` decided.
    pub fn note_step(&mut self, p: usize, step: &Step, now: Moment) {
        let process = &self.processes[p];
        let (Step::Acquire { by, .. }
        | Step::Renew { by, .. }
        | Step::Release { by, .. }
        | Step::Withdraw { by }) = *step
        else {
            return;
        };
        if let Some(fence) = process.untold
            && !matches!(*step, Step::Release { fence: released, .. } if released == fence)
            && !process.stop_asked
        {
            let what = format!("P{p} was granted {fence}, and now: {step:?}");
            self.violate(GIVE_BACK, what);
        }
        let process = &mut self.processes[p];
        process.untold = None;
        if matches!(step, Step::Acquire { .. }) && process.woken_at == Some(self.now) {
            self.tally.woken += 1;
        }
        let deadline = process.belief.map_or(Moment::FAR, |belief| belief.until);
        if by > deadline || by > now + process.lease.call_budget() {
            self.violate(BUDGET, format!("P{p} at {now:?}: {step:?}"));
        }
    }

    /// After every word with the machine of `p`.
    pub fn note_belief(&mut self, p: usize) {
        let now = self.now;
        let process = &mut self.processes[p];
        let belief = process
            .machine
            .as_ref()
            .and_then(|machine| machine.belief());
        let old = process.belief;
        if belief == old.map(|old| (old.until, old.fence)) {
            return;
        }
        let new = belief.map(|(until, fence)| Belief {
            fence,
            until,
            end: process.clock.reaches_moment(until),
            counted: false,
        });
        process.belief = new;
        if let Some(old) = old {
            let same = new.filter(|new| new.fence == old.fence);
            if same.is_none() {
                process.spent = process.spent.max(old.fence);
                process.due = old.end.min(now);
                process.timed_out = old.end <= now;
            } else if old.end <= now && same.is_some_and(|new| now < new.end) {
                let what = format!("P{p} goes from {old:?} to {new:?} at {now}");
                return self.violate(REVIVE, what);
            }
        }
        if let Some(new) = new
            && new.fence <= process.spent
        {
            let what = format!("P{p} believes {new:?}, after {}", process.spent);
            self.violate(REVIVE, what);
        }
    }

    /// The machine of `p` says to tell the listeners.
    pub fn note_announcement(&mut self, p: usize, change: &Change) {
        let now = self.now;
        let process = &mut self.processes[p];
        let id = &*self.ids[process.id];
        let believes = process.belief.filter(|belief| now < belief.end);
        match change {
            Change::Acquired(state) => {
                let fence = state.after().fence();
                self.tally.acquired += 1;
                let again = process.announced.replace(fence);
                process.untold = None;
                if again.is_some() || !state.is_owner(id) || state.before().is_owner(id) {
                    let what = format!("P{p} announces {state:?} after {again:?}");
                    return self.violate(ALTERNATE, what);
                }
                let local = process.clock.moment(now);
                let fresh = process.granted.is_some_and(|(sent, granted)| {
                    granted == fence && local < sent + process.lease.belief()
                });
                if !fresh || believes.is_none_or(|belief| belief.fence != fence) {
                    let what = format!("P{p} announces {state:?} with {:?}", process.belief);
                    return self.violate(LATE, what);
                }
                let before = std::mem::replace(&mut process.last_announced, fence);
                let exempt = fence <= self.monitor.forgotten;
                if fence <= before || (!exempt && fence <= self.monitor.highest_announced) {
                    let highest = self.monitor.highest_announced;
                    let what = format!("P{p} announces {fence} after {before}, all: {highest}");
                    return self.violate(FENCE, what);
                }
                self.monitor.highest_announced = self.monitor.highest_announced.max(fence);
            }
            Change::Released(state, _) => {
                let fence = process.announced.take();
                if fence != Some(state.before().fence()) || believes.is_some() {
                    let what = format!("P{p} announces {state:?} after {fence:?}");
                    return self.violate(ALTERNATE, what);
                }
                if process.timed_out {
                    self.tally.step_downs += 1;
                } else {
                    self.tally.given_up += 1;
                }
            }
            Change::Double(_) => {}
            Change::OwnerChanged(state) => {
                if process.announced.is_some() || state.is_owner(id) {
                    let what = format!("P{p} announces {state:?} as owner");
                    self.violate(ALTERNATE, what);
                }
            }
        }
    }

    /// A release is about to be sent.
    pub fn note_release(&mut self, p: usize, fence: u64) {
        let process = &mut self.processes[p];
        let again = process.last_release.replace(fence) == Some(fence);
        self.tally.release_retries += u64::from(again);
        self.tally.give_backs += u64::from(!process.stop_asked);
        let believes = process.belief.is_some_and(|belief| self.now < belief.end);
        if believes || process.announced.is_some() {
            let what = format!("P{p} releases {fence}, announced: {:?}", process.announced);
            self.violate(TELL_FIRST, what);
        }
    }

    /// The machine of `p` has nothing left to do.
    pub fn note_end(&mut self, p: usize) {
        let process = &self.processes[p];
        if process.announced.is_some() || process.belief.is_some() {
            let what = format!("P{p} stopped with {:?} announced", process.announced);
            self.violate(ALTERNATE, what);
        }
    }

    /// The process is gone, and so is what it believed.
    pub fn note_crash(&mut self, p: usize) {
        let process = &mut self.processes[p];
        if let Some(belief) = process.belief.take() {
            process.spent = process.spent.max(belief.fence);
        }
        process.announced = None;
        process.untold = None;
    }

    pub fn note_memory_loss(&mut self) {
        self.monitor.forgotten = self.monitor.highest_grant;
    }

    /// The backend did what `id` asked, and its lease was `before` and is now another or the same.
    pub fn note_execution(&mut self, id: Id, ask: Ask, before: Option<Held>) {
        let after = self.model.lease;
        if let (Ask::Renew(fence) | Ask::Release(fence), Some(held)) = (ask, before)
            && held.fence != fence
        {
            self.tally.stale_requests += 1;
        }
        if let Ask::Acquire(_) = ask {
            // Even a grant that changes nothing is one: told by its answer, not by its effect.
        } else if before == after {
            return;
        }
        let says =
            |what: &str| format!("{what}: id {id} asked {ask:?}, {before:?} became {after:?}");
        match ask {
            Ask::Acquire(_) => {
                let Some(held) = after.filter(|_| self.granted) else {
                    if before != after {
                        self.violate(TOUCH, says("refused"));
                    }
                    return;
                };
                self.tally.grants += 1;
                self.tally.adoptions += u64::from(before.is_some());
                if held.id != id || before.is_some_and(|held| held.id != id) {
                    self.violate(TOUCH, says("stolen"));
                } else if held.fence <= self.monitor.highest_grant {
                    self.violate(FENCE, says("not raised"));
                }
                self.monitor.highest_grant = self.monitor.highest_grant.max(held.fence);
            }
            Ask::Renew(fence) => {
                self.tally.renewals += 1;
                match (before, after) {
                    (before, Some(after)) if after.fence == fence && after.id == id => {
                        if before.is_some_and(|before| {
                            before.fence != fence
                                || after.transition_at < before.transition_at
                                || after.ttl_at < before.ttl_at
                        }) {
                            self.violate(SHORTEN, says("moved back"));
                        }
                    }
                    _ => self.violate(TOUCH, says("renewed another")),
                }
            }
            Ask::Release(fence) => {
                if after.is_some() || before.is_none_or(|held| (held.id, held.fence) != (id, fence))
                {
                    self.violate(TOUCH, says("released another"));
                }
            }
            Ask::Withdraw | Ask::Observe => self.violate(TOUCH, says("withdrawn")),
        }
    }

    /// The machine of `p` is about to be told to stop, if somebody asked for that.
    pub fn note_stop(&mut self, p: usize) {
        let process = &self.processes[p];
        let told = |machine: &Contention| machine.is_leaving();
        if process.stop_asked && !process.machine.as_ref().is_some_and(told) {
            let clean = !self.faulty && !self.is_under_way(process.id);
            self.processes[p].stops_clean = clean;
        }
    }

    /// A process has stopped.
    pub fn check_stop(&mut self, p: usize) {
        let process = &mut self.processes[p];
        let (id, old_calls) = (process.id, process.old_calls);
        if !std::mem::take(&mut process.stops_clean) || process.calls == old_calls {
            return;
        }
        self.tally.clean_stops += u64::from(!self.finale);
        self.model.expire(self.model.clock.shows(self.now));
        self.pass_on_wake();
        let held = self.model.lease.is_some_and(|held| held.id == id);
        let unknowable = held && (self.granted_to <= old_calls || self.processes[p].refused);
        if self.model.knows(id) && !unknowable {
            let what = format!("P{p} has stopped, the backend has {:?}", self.model.lease);
            self.violate(TRACE, what);
        }
    }

    /// At the end of the calm.
    pub fn check_liveness(&mut self) {
        let now = self.now;
        let owns = |belief: Option<Belief>| belief.is_some_and(|belief| now < belief.end);
        if !self.processes.iter().any(|process| owns(process.belief)) {
            let what = format!("the backend has {:?}", self.model.lease);
            self.violate(LIVE, what);
        }
    }

    /// At the end of all.
    pub fn check_traces(&mut self) {
        for p in 0..self.processes.len() {
            let process = &self.processes[p];
            if process.machine.is_some() || self.model.knows(process.id) {
                let what = format!(
                    "P{p} is {:?}, the backend has {:?}",
                    process.doing, self.model.lease
                );
                return self.violate(TRACE, what);
            }
        }
    }
}
