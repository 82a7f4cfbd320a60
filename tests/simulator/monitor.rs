//! Holds the rules against everything that happens. It sees true time, the backend, every call, and of
//! the library only what its users see: fences, validity, events, and how long calls take.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use contend::{Cancel, Lease, LossReason, Moment, VirtualTime, enter_virtual_time};

use crate::clock::{MS, True, nanos};
use crate::model::{Answer, Ask, Held, Id};
use crate::process::{Front, Role};
use crate::rules::*;
use crate::world::{Order, World};

// Read through `Debug`, in the message of a failed test.
#[allow(dead_code)]
#[derive(Debug)]
pub struct Violation {
    pub rule: &'static str,
    pub what: String,
}

#[derive(Default)]
pub struct Monitor {
    pub violation: Option<Violation>,
    highest_grant: u64,
    highest_gained: u64,
    /// The highest fence that the backend has forgotten.
    forgotten: u64,
    /// The fence that was granted last, and when.
    granted: (u64, True),
    /// Whether the request that it was granted to, or adopted from, came after its end.
    granted_late: bool,
}

/// What is known of a process.
#[derive(Default)]
pub struct Notes {
    pub orders: VecDeque<Order>,
    pub cancel: Option<Cancel>,
    pub cancelled_at: Option<True>,
    pub started: bool,
    pub ended: bool,
    pub paused_until: True,
    pub pauses: u64,
    /// It has callbacks.
    pub listens: bool,
    /// The line that was granted the mutex last is subscribed. One of an earlier run may be, too.
    pub hears: bool,
    /// The fence gained last, until its loss is announced.
    pub announced: Option<u64>,
    last_gained: u64,
    belief: Option<(u64, True)>,
    /// The highest fence of a belief that has ended.
    spent: u64,
    /// Until when an answer lets it believe, and in what.
    counted: Option<(u64, Moment)>,
    /// The callback for Acquired has begun, that for Released has not ended.
    open: Option<u64>,
    /// The end of the transition of each belief.
    ends: HashMap<u64, Moment>,
    /// When belief had ended at the latest.
    due: True,
    /// An owner was woken then, and has not asked since.
    woken_at: Option<True>,
    /// What must be left of the transition when belief ends, whatever the clocks do.
    wind_down: u64,
}

impl Notes {
    pub fn new(lease: Lease) -> Notes {
        let allowance = lease.total() / 100 + Duration::from_millis(5);
        Notes {
            wind_down: nanos(lease.transition().saturating_sub(allowance)),
            ..Notes::default()
        }
    }

    pub fn crash(&mut self) {
        self.paused_until = 0;
        self.belief = None;
        self.announced = None;
    }

    /// The end of the transition of a belief.
    pub fn winding_until(&self, fence: u64) -> Option<Moment> {
        self.ends.get(&fence).copied()
    }

    /// The guard is dropped, and another thread may have the lease, with its fence.
    pub fn hand_on(&mut self) {
        self.belief = None;
    }

    pub fn woken(&mut self, now: True) {
        if self.announced.is_some() && self.hears {
            self.woken_at.get_or_insert(now);
        }
    }
}

impl World {
    pub fn violate(&mut self, rule: &'static str, what: String) {
        if self.monitor.violation.is_some() {
            return;
        }
        self.trace(|_| format!("VIOLATION: {rule}: {what}"));
        self.monitor.violation = Some(Violation { rule, what });
    }

    /// Before time goes on.
    pub fn check(&mut self) {
        let mut believer = None;
        for p in 1..self.processes.len() {
            let process = &self.processes[p];
            if process.is_crashed() || process.role == Role::Observer {
                continue;
            }
            let before =
                enter_virtual_time(Some(self.process(p) as std::sync::Arc<dyn VirtualTime>));
            let belief = process.belief();
            enter_virtual_time(before);
            self.check_belief(p, belief);
            let Some((fence, _)) = belief else {
                continue;
            };
            if fence <= self.monitor.forgotten {
                self.tally.exempt += 1;
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

    fn check_belief(&mut self, p: usize, belief: Option<(u64, Duration)>) {
        let now = self.now;
        let process = self.process(p);
        let (clock, lease) = (process.clock(), process.lease);
        let local = clock.moment(now);
        let old = self.notes[p].belief;
        let new = belief.map(|(fence, left)| (fence, clock.reaches_moment(local + left)));
        let notes = &mut self.notes[p];
        notes.belief = new;
        if let Some((fence, left)) = belief {
            let until = local + left;
            notes.ends.insert(fence, until + lease.transition());
            let counted = notes.counted;
            if left.is_zero() || counted.is_none_or(|(its, end)| its != fence || end < until) {
                let what =
                    format!("P{p} believes {fence} for {left:?} at {local:?}, counted {counted:?}");
                return self.violate(COUNTED, what);
            }
            let passed = old.is_some_and(|(its, end)| its == fence && end < now);
            if fence <= notes.spent || passed {
                let what = format!("P{p} believes {fence} after {} or {old:?}", notes.spent);
                return self.violate(REVIVE, what);
            }
        }
        if let Some((fence, end)) = old
            && new.is_none_or(|(its, _)| its != fence)
        {
            notes.spent = notes.spent.max(fence);
            // Kept for the look at what is overdue.
            if new.is_none() && notes.announced == Some(fence) {
                notes.due = end.min(now);
            }
        }
        if process.role == Role::Service
            && let Some(fence) = notes.announced
            && belief.is_none()
            && now > notes.due.max(notes.paused_until)
        {
            let what = format!(
                "P{p}'s {fence} was due at {} and it says nothing",
                notes.due
            );
            self.violate(OVERDUE, what);
        }
        let notes = &self.notes[p];
        if let Some(woken_at) = notes.woken_at
            && process.role == Role::Service
            && notes.announced.is_some()
        {
            // The call under way, the shortest pause, and one more call.
            let patience = 2 * nanos(lease.request_limit()) + nanos(lease.ttl()) / 32;
            if now > woken_at.max(notes.paused_until) + patience * 102 / 100 {
                let what = format!("P{p} was woken at {woken_at} and has not looked");
                self.violate(LOOK, what);
            }
        }
    }

    /// The lease behind a belief that holds.
    fn check_lease(&mut self, p: usize) {
        let (Some((fence, end)), held) = (self.notes[p].belief, self.model.lease) else {
            return;
        };
        let id = self.processes[p].id;
        let ours = |held: &Held| held.id == id && held.fence >= fence;
        let Some(free_at) = held.filter(ours).map(|held| self.model.free_at(&held)) else {
            return self.violate(
                OUTLIVES,
                format!("P{p} believes {fence}, the backend has {held:?}"),
            );
        };
        let server = self.model.clock;
        let what =
            format!("P{p} believes {fence} until {end}, the backend {held:?} until {free_at}");
        if free_at < end {
            self.violate(OUTLIVES, what);
        } else if server.shows(end) + self.notes[p].wind_down > server.shows(free_at) {
            self.violate(WIND_DOWN, what);
        }
    }

    /// A call is about to be made.
    pub fn note_call(
        &mut self,
        p: usize,
        ask: Ask,
        begun: Moment,
        by: Moment,
        belief: Option<(u64, Duration)>,
    ) {
        let lease = self.processes[p].lease;
        let notes = &mut self.notes[p];
        let until = belief.map_or(Moment::FAR, |(_, left)| begun + left);
        if by > begun + lease.request_limit() || by > until {
            return self.violate(
                BUDGET,
                format!("P{p} at {begun:?}: {ask:?} by {by:?}, believes until {until:?}"),
            );
        }
        match ask {
            Ask::Renew(_) => notes.woken_at = None,
            Ask::Release(fence) => {
                self.tally.releases += 1;
                let believes = belief.is_some();
                let winds_down = notes.ends.values().any(|end| begun < *end);
                let tells = notes.listens && notes.open.is_some() && winds_down;
                if notes.announced.is_some() || believes || tells {
                    let what = format!(
                        "P{p} releases {fence}, announced {:?}, callback of {:?} not over",
                        notes.announced, notes.open
                    );
                    self.violate(TELL_FIRST, what);
                }
            }
            _ => {}
        }
    }

    /// A call has ended.
    pub fn note_answer(&mut self, p: usize, ask: Ask, begun: Moment, answer: Answer) {
        let process = self.process(p);
        let notes = &mut self.notes[p];
        let until = begun + process.lease.belief();
        match answer {
            Answer::Granted(held, _) => notes.counted = Some((held.fence, until)),
            Answer::Renewed(held, _) => {
                if let Some((fence, end)) = &mut notes.counted
                    && *fence == held.fence
                {
                    *end = (*end).max(until);
                }
            }
            _ => {}
        }
        self.trace(|_| format!("P{p}: {ask:?} -> {answer:?}"));
    }

    pub fn note_gained(&mut self, p: usize, fence: u64, belief: Option<(u64, Duration)>) {
        if self.processes[p].is_crashed() {
            return;
        }
        self.tally.acquired += 1;
        self.trace(|_| format!("P{p} has gained {fence}"));
        let service = self.processes[p].role == Role::Service;
        let notes = &mut self.notes[p];
        let again = notes.announced.replace(fence);
        let before = std::mem::replace(&mut notes.last_gained, fence);
        notes.due = self.now;
        notes.woken_at = None;
        if again.is_some() {
            return self.violate(ALTERNATE, format!("P{p} gains {fence} after {again:?}"));
        }
        if service && belief.is_none_or(|(its, left)| its != fence || left.is_zero()) {
            return self.violate(
                LATE,
                format!("P{p} announces {fence} and believes {belief:?}"),
            );
        }
        let highest = self.monitor.highest_gained;
        if fence <= before || (fence > self.monitor.forgotten && fence <= highest) {
            return self.violate(
                FENCE,
                format!("P{p} gains {fence} after {before}, all: {highest}"),
            );
        }
        self.monitor.highest_gained = highest.max(fence);
    }

    pub fn note_lost(&mut self, p: usize, fence: u64, reason: LossReason) {
        if self.processes[p].is_crashed() {
            return;
        }
        self.trace(|_| format!("P{p} has lost {fence}: {reason}"));
        match reason {
            LossReason::Expired => self.tally.expired += 1,
            LossReason::Released => self.tally.given_up += 1,
            _ => self.tally.taken_away += 1,
        }
        let announced = self.notes[p].announced.take();
        self.notes[p].woken_at = None;
        if announced != Some(fence) {
            self.violate(ALTERNATE, format!("P{p} loses {fence} after {announced:?}"));
        }
    }

    pub fn note_callback(&mut self, p: usize, acquired: bool, fence: Option<u64>, begins: bool) {
        self.trace(|_| {
            format!("P{p}: callback, acquired: {acquired}, {fence:?}, begins: {begins}")
        });
        let notes = &mut self.notes[p];
        let open = notes.open;
        match (acquired, begins) {
            (true, true) => notes.open = fence,
            (false, false) => notes.open = None,
            _ => {}
        }
        self.tally.callbacks += u64::from(begins);
        let expected = if acquired && begins { None } else { fence };
        if open != expected && !self.processes[p].is_crashed() {
            self.violate(
                ALTERNATE,
                format!("P{p}: callback for {fence:?}, acquired: {acquired}, after {open:?}"),
            );
        }
    }

    pub fn note_memory_loss(&mut self) {
        self.monitor.forgotten = self.monitor.highest_grant;
    }

    pub fn note_execution(
        &mut self,
        id: Id,
        ask: Ask,
        answer: Answer,
        before: Option<Held>,
        late: bool,
    ) {
        match answer {
            Answer::Granted(held, _) => {
                self.tally.grants += 1;
                self.tally.adoptions += u64::from(before.is_some());
                let highest = self.monitor.highest_grant;
                if held.fence <= highest {
                    self.violate(
                        FENCE,
                        format!("id {id} is granted {held:?} after {highest}"),
                    );
                }
                self.monitor.highest_grant = highest.max(held.fence);
                self.monitor.granted = (held.fence, self.now);
                self.monitor.granted_late = late;
            }
            Answer::Renewed(..) => self.tally.renewals += 1,
            _ => {}
        }
        if ask == Ask::Observe {
            self.tally.looks += 1;
        }
    }

    pub fn note_end(&mut self, p: usize) {
        self.notes[p].ended = true;
        self.trace(|_| format!("P{p} has ended"));
    }

    /// At the end of the calm.
    pub fn check_liveness(&mut self) {
        if self.owned_at.is_none() {
            let what = format!("the backend has {:?}", self.model.lease);
            self.violate(LIVE, what);
        }
        let (fence, at) = self.monitor.granted;
        for p in 1..self.processes.len() {
            let process = self.process(p);
            let patience = self.plan.longest_total() + 6 * nanos(process.lease.ttl()) + 2_000 * MS;
            let Front::Observer(observer) = &*process.front.lock().unwrap() else {
                continue;
            };
            let seen = observer.state();
            let fresh = seen.before().fence() == fence || seen.after().fence() == fence;
            if self.notes[p].started && !process.is_crashed() && !fresh && at + patience < self.now
            {
                self.violate(LIVE, format!("P{p} saw {seen:?}, not {fence}"));
            }
        }
    }

    /// At the end of all.
    pub fn check_traces(&mut self) {
        let mut at = self.now;
        if let Some(held) = self.model.lease
            && self.monitor.granted_late
            && self.monitor.granted.0 == held.fence
        {
            // Granted to a request that servers refuse, so late is it: no process can give it back, and
            // it must end by itself within one lease of then.
            let (_, granted_at) = self.monitor.granted;
            let lease = self.plan.longest_total() * 102 / 100 + 2 * MS;
            at = at.max(self.model.free_at(&held).min(granted_at + lease));
        }
        self.model.expire(self.model.clock.shows(at));
        for p in 1..self.processes.len() {
            let process = self.process(p);
            let knows = self.model.knows(process.id);
            if !process.is_crashed() && self.notes[p].started && (knows || !self.notes[p].ended) {
                let what = format!("P{p} is over, the backend has {:?}", self.model.lease);
                return self.violate(TRACE, what);
            }
        }
    }
}
