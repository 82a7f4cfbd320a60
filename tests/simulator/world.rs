//! One schedule: true time, the events in it, and the faults that its seed brings.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

use crate::clock::{MS, True};
use crate::dice::Dice;
use crate::model::{Answer, Id, Model};
use crate::monitor::{Monitor, Violation};
use crate::network::Request;
use crate::plan::Plan;
use crate::plant::Plant;
use crate::process::{Doing, Process};
use crate::tally::Tally;

pub struct World {
    pub now: True,
    pub plan: Plan,
    pub plant: Plant,
    pub dice: Dice,
    pub model: Model,
    pub processes: Vec<Process>,
    /// Every contender id there ever was.
    pub ids: Vec<Arc<str>>,
    pub monitor: Monitor,
    pub tally: Tally,
    /// Faults still happen.
    pub faulty: bool,
    /// Everybody has been told to stop for good.
    pub finale: bool,
    pub server_down_until: True,
    /// The request just executed was granted.
    pub granted: bool,
    /// The call that got the present lease.
    pub granted_to: u32,
    /// When somebody owned first after the faults had stopped.
    pub owned_at: Option<True>,
    /// The longest ordinary delay.
    pub short: u64,
    queue: BinaryHeap<Reverse<Due>>,
    pushed: u64,
    over: bool,
    lines: Option<Vec<String>>,
}

#[derive(Clone, Copy, Debug)]
pub enum Event {
    /// A request reaches the backend.
    Arrive(Request),
    /// It is executed, with the backend's clock as it was on arrival.
    Execute(Request, u64),
    /// The answer to a call reaches its process.
    Reply(usize, u32, Answer),
    /// The end of a call. `true`: a reply that is there too may still win.
    Timeout(usize, u32, bool),
    /// What a process waited for.
    Timer(usize, u32),
    Wake(Id),
    Fault(Fault),
}

#[derive(Clone, Copy, Debug)]
pub enum Fault {
    Start(usize),
    Stop(usize),
    Pause(usize),
    Crash(usize),
    /// A ring for no reason.
    Unparked(usize),
    /// The backend restarts empty.
    LoseMemory,
    /// The backend's clock is corrected by what the allowance has left: 5 ms, less the millisecond
    /// that truncation takes.
    CorrectClock,
    /// No more faults.
    Heal,
    /// Somebody must own by now; all are told to stop.
    Curtain,
    End,
}

/// A fault that strikes one process.
type Strike = fn(usize) -> Fault;

struct Due {
    at: True,
    order: u64,
    event: Event,
}

impl World {
    pub fn new(seed: u64, plant: Plant, only: Option<&'static str>, traced: bool) -> World {
        let mut dice = Dice::new(seed);
        let plan = Plan::draw(&mut dice, plant);
        let ids: Vec<Arc<str>> = (0..plan.leases.len()).map(name).collect();
        let processes = plan.leases.iter().zip(&plan.clocks).enumerate();
        let processes = processes
            .map(|(id, (&lease, &clock))| Process::new(id, clock, lease, &mut dice))
            .collect();
        let mut world = World {
            now: 0,
            short: plan.shortest_ttl() / 64,
            model: Model::new(plan.server, plan.habits, plant),
            plan,
            plant,
            dice,
            processes,
            ids,
            monitor: Monitor::new(only),
            tally: Tally::default(),
            faulty: true,
            finale: false,
            server_down_until: 0,
            granted: false,
            granted_to: 0,
            owned_at: None,
            queue: BinaryHeap::with_capacity(64),
            pushed: 0,
            over: false,
            lines: traced.then(Vec::new),
        };
        world.draw_faults();
        world
    }

    /// Runs to the end, or to the first violation.
    pub fn run(&mut self) -> Option<Violation> {
        while let Some(Reverse(due)) = self.queue.pop() {
            self.now = due.at;
            self.tally.events += 1;
            self.handle(due.event);
            if self.monitor.violation.is_none() {
                self.check();
            }
            if self.over || self.monitor.violation.is_some() {
                break;
            }
        }
        self.tally.schedules += 1;
        self.monitor.violation.take()
    }

    pub fn lines(self) -> Vec<String> {
        self.lines.unwrap_or_default()
    }

    pub fn trace(&mut self, line: impl FnOnce(&World) -> String) {
        if self.lines.is_some() {
            let line = format!("{:>12.6} s  {}", self.now as f64 / 1e9, line(self));
            self.lines.get_or_insert_default().push(line);
        }
    }

    pub fn push(&mut self, at: True, event: Event) {
        self.pushed += 1;
        let order = self.pushed;
        let at = at.max(self.now);
        self.queue.push(Reverse(Due { at, order, event }));
    }

    /// Whether a request of this contender may still reach the backend.
    pub fn is_under_way(&self, id: Id) -> bool {
        self.queue.iter().any(|due| match due.0.event {
            Event::Arrive(request) | Event::Execute(request, _) => request.id == id,
            _ => false,
        })
    }

    fn draw_faults(&mut self) {
        let end = self.plan.faults_end;
        for p in 0..self.processes.len() {
            let at = self.dice.below(self.plan.shortest_ttl());
            self.push(at, Event::Fault(Fault::Start(p)));
        }
        let kinds: [(Strike, &[u64]); 4] = [
            (Fault::Pause, &[0, 0, 1, 2]),
            (Fault::Crash, &[0, 0, 1, 2]),
            (Fault::Stop, &[0, 1, 2, 4]),
            (Fault::Unparked, &[0, 0, 1, 3]),
        ];
        for (kind, counts) in kinds {
            for _ in 0..self.dice.pick(counts) {
                let p = self.dice.below(self.processes.len() as u64) as usize;
                let at = self.dice.below(end);
                self.push(at, Event::Fault(kind(p)));
            }
        }
        for (fault, permille) in [(Fault::LoseMemory, 120), (Fault::CorrectClock, 500)] {
            if self.dice.chance(permille) {
                let at = self.dice.below(end);
                self.push(at, Event::Fault(fault));
            }
        }
        self.push(end, Event::Fault(Fault::Heal));
        let (plan, count) = (&self.plan, self.processes.len());
        let about = format!(
            "{count} processes, leases {:?}, server {:?}, clocks {:?}, {:?}, session: {}",
            plan.leases, plan.server, plan.clocks, plan.habits, plan.session
        );
        self.trace(|_| about);
    }

    fn handle(&mut self, event: Event) {
        let (Event::Reply(p, ..) | Event::Timeout(p, ..) | Event::Timer(p, _)) = event else {
            return match event {
                Event::Arrive(request) => self.arrive(request),
                Event::Execute(request, reading) => self.execute(request, reading),
                Event::Wake(id) => self.wake(id),
                Event::Fault(fault) => self.strike(fault),
                _ => {}
            };
        };
        let paused_until = self.processes[p].paused_until;
        if self.now < paused_until {
            return self.push(paused_until, event);
        }
        if matches!(event, Event::Reply(..)) && self.pauses_on_reply(p, &event) {
            // Between the arrival of a reply and what is done about it.
            return self.push(self.processes[p].paused_until, event);
        }
        match (event, self.processes[p].doing.clone()) {
            (Event::Reply(_, number, answer), Doing::Calling(call)) if call.number == number => {
                self.finish(p, call, answer);
                self.drive(p);
            }
            (Event::Reply(..), _) => self.tally.ignored_replies += 1,
            (Event::Timeout(_, number, gives_way), Doing::Calling(call))
                if call.number == number =>
            {
                if gives_way && self.now == paused_until && self.dice.chance(500) {
                    // Both are there after a pause: a read finds the reply before it looks at the clock.
                    return self.push(self.now, Event::Timeout(p, number, false));
                }
                self.tally.timeouts += 1;
                self.finish(p, call, Answer::Failed);
                self.drive(p);
            }
            (Event::Timer(_, number), doing) if number == self.processes[p].timers => match doing {
                Doing::Ready | Doing::Waiting => self.drive(p),
                Doing::Decided(step) => {
                    if !self.call(p, &step) {
                        self.drive(p);
                    }
                }
                Doing::Calling(_) | Doing::Nothing => {}
            },
            _ => {}
        }
    }

    fn wake(&mut self, id: Id) {
        let listens = |process: &Process| process.id == id && process.listening;
        let Some(p) = self.processes.iter().position(listens) else {
            return;
        };
        let process = &mut self.processes[p];
        if self.now < process.paused_until {
            let at = process.paused_until;
            return self.push(at, Event::Wake(id));
        }
        if matches!(process.doing, Doing::Waiting) {
            self.be_woken(p);
            self.drive(p);
        } else {
            process.woken = true;
        }
    }

    fn strike(&mut self, fault: Fault) {
        self.trace(|_| format!("{fault:?}"));
        match fault {
            Fault::Start(p) => {
                if self.processes[p].machine.is_none() && !self.finale {
                    self.start(p);
                }
            }
            Fault::Stop(p) => self.ask_to_stop(p),
            Fault::Pause(p) => {
                self.pause(p);
            }
            Fault::Crash(p) => self.crash(p),
            Fault::Unparked(p) => self.wake(self.processes[p].id),
            Fault::LoseMemory => {
                self.tally.memory_losses += 1;
                self.note_memory_loss();
                self.model.lose_memory();
                // Longer than a fence may run ahead of the clock, and than any statement waits.
                let down = MS + self.dice.below(self.plan.longest_ttl());
                self.server_down_until = (self.now + down).min(self.plan.faults_end);
                self.queue
                    .retain(|due| !matches!(due.0.event, Event::Execute(..)));
            }
            Fault::CorrectClock => {
                self.model.clock.offset += 4 * MS;
            }
            Fault::Heal => {
                self.faulty = false;
                // Some stop just when they can reach the backend again, with trouble behind them.
                for p in 0..self.processes.len() {
                    if self.dice.chance(300) {
                        let at = self.now + self.dice.below(self.plan.shortest_ttl() / 2);
                        self.push(at, Event::Fault(Fault::Stop(p)));
                    }
                }
                let patience = self.plan.patience(self.ids.len() as u64);
                self.push(self.plan.calm + patience, Event::Fault(Fault::Curtain));
            }
            Fault::Curtain => {
                self.check_liveness();
                let waited = self
                    .owned_at
                    .unwrap_or(self.now)
                    .saturating_sub(self.plan.calm);
                let patience = self.now - self.plan.calm;
                self.tally.slowest = waited * 1000 / patience;
                self.finale = true;
                for p in 0..self.processes.len() {
                    self.ask_to_stop(p);
                }
                self.push(self.now + self.plan.longest_ttl(), Event::Fault(Fault::End));
            }
            Fault::End => {
                self.check_traces();
                self.over = true;
            }
        }
    }

    fn ask_to_stop(&mut self, p: usize) {
        let process = &mut self.processes[p];
        if process.machine.is_none() || std::mem::replace(&mut process.stop_asked, true) {
            return;
        }
        // The parker ends a wait; a pause lasts.
        if matches!(process.doing, Doing::Waiting) {
            process.doing = Doing::Ready;
            let at = self.now.max(process.paused_until);
            self.set_timer(p, at);
        }
    }

    fn crash(&mut self, p: usize) {
        if self.processes[p].machine.is_none() {
            return;
        }
        self.tally.crashes += 1;
        self.note_crash(p);
        let renamed = self.dice.chance(400);
        if renamed {
            self.tally.new_ids += 1;
            self.ids.push(name(self.ids.len()));
        }
        let process = &mut self.processes[p];
        process.machine = None;
        process.doing = Doing::Nothing;
        process.paused_until = 0;
        if renamed {
            process.id = self.ids.len() - 1;
        }
        let down = self.dice.below(self.plan.longest_total());
        let at = (self.now + down).min(self.plan.faults_end);
        self.push(at, Event::Fault(Fault::Start(p)));
    }
}

fn name(number: usize) -> Arc<str> {
    // At most four processes and two crashes.
    ["a", "b", "c", "d", "e", "f", "g", "h"][number].into()
}

impl PartialEq for Due {
    fn eq(&self, other: &Due) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Due {}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Due) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Due {
    fn cmp(&self, other: &Due) -> std::cmp::Ordering {
        (self.at, self.order).cmp(&(other.at, other.order))
    }
}
