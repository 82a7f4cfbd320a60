//! One schedule: true time, the events in it, the faults that its seed brings, and who can run.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use contend::{Cancel, Lease, Moment, Unparker};

use crate::clock::{MS, True};
use crate::dice::Dice;
use crate::model::{Answer, Ask, Id, Model};
use crate::monitor::{Monitor, Notes, Violation};
use crate::plan::Plan;
use crate::plant::Plant;
use crate::process::{Process, Role};
use crate::rules::SPIN;
use crate::stage::DRIVER;
use crate::tally::Tally;

/// More than any schedule needs.
const MOST_EVENTS: u64 = 40_000;

/// No wait ends after this.
const NEVER: True = 1 << 52;

pub struct World {
    pub now: True,
    pub plan: Plan,
    pub dice: Dice,
    pub model: Model,
    pub processes: Vec<Arc<Process>>,
    pub notes: Vec<Notes>,
    pub monitor: Monitor,
    pub tally: Tally,
    /// Faults still happen.
    pub faulty: bool,
    /// All have been told to stop for good.
    pub finale: bool,
    pub owned_at: Option<True>,
    /// Something has happened since the rules were last held against it.
    changed: bool,
    server_down_until: True,
    short: u64,
    listeners: Vec<(usize, Id, Unparker)>,
    slots: Vec<Slot>,
    ready: VecDeque<usize>,
    /// By time, and in the order in which they were pushed.
    queue: BTreeMap<(True, u64), Event>,
    pushed: u64,
    calls: u32,
    events: u64,
    ids: Vec<Arc<str>>,
    aborted: bool,
    /// Threads are left that will never end.
    pub stuck: bool,
    lines: Option<Vec<String>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    Stop,
    Resign,
    Cancel,
}

/// What the stage does for the world, with the world let go of.
pub enum Action {
    Unpark(Unparker),
    Start(Arc<Process>),
    /// By a thread of this process.
    Cancel(Arc<Process>, Cancel),
}

struct Slot {
    state: State,
    process: usize,
    /// Tells a timer of an earlier wait from one of this.
    ticket: u64,
    answer: Answer,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Idle,
    Ready,
    Running,
    Waiting { key: usize },
    Calling(u32),
}

/// A request under way: it outlives the call, and the process, that sent it.
#[derive(Clone, Copy, Debug)]
struct Request {
    seat: usize,
    call: u32,
    id: Id,
    lease: Lease,
    ask: Ask,
    /// When its sender has given it up.
    end: True,
}

#[derive(Clone, Copy, Debug)]
enum Event {
    Arrive(Request),
    Execute(Request, u64),
    Reply(usize, u32, Answer),
    Timer(usize, u64),
    Wake(Id),
    Fault(Fault),
}

#[derive(Clone, Copy, Debug)]
enum Fault {
    Start(usize),
    Order(usize, Order),
    Pause(usize),
    Crash(usize),
    Unparked(usize),
    LoseMemory,
    CorrectClock,
    Heal,
    Curtain,
}

impl World {
    pub fn new(seed: u64, plant: Plant, traced: bool) -> World {
        let mut dice = Dice::new(seed);
        let plan = Plan::draw(&mut dice, plant);
        let count = plan.leases.len();
        let mut world = World {
            now: 0,
            short: plan.shortest_ttl() / 64,
            model: Model::new(plan.server, plan.habits, plant),
            plan,
            dice,
            processes: Vec::new(),
            notes: Vec::new(),
            monitor: Monitor::default(),
            tally: Tally::default(),
            faulty: true,
            finale: false,
            owned_at: None,
            changed: true,
            server_down_until: 0,
            listeners: Vec::new(),
            slots: vec![Slot::new(0)],
            ready: VecDeque::new(),
            queue: BTreeMap::new(),
            pushed: 0,
            calls: 0,
            events: 0,
            ids: Vec::new(),
            aborted: false,
            stuck: false,
            lines: traced.then(Vec::new),
        };
        world.add(Role::Operator, 0, None);
        for number in 0..count {
            let locks = number > 0 && world.dice.chance(500);
            let role = if locks { Role::Locker } else { Role::Service };
            world.add(role, number, None);
        }
        if world.dice.chance(250) {
            world.add(Role::Observer, 0, None);
        }
        world.draw_faults();
        world
    }

    /// Adds a process with the clock and lease of this number; with the id of an earlier one, or a new
    /// one.
    fn add(&mut self, role: Role, like: usize, id: Option<Id>) -> usize {
        let number = self.processes.len();
        let id = id.unwrap_or_else(|| {
            self.ids.push(format!("id{}", self.ids.len()).into());
            self.ids.len() - 1
        });
        let (lease, clock) = (self.plan.leases[like], self.plan.clocks[like]);
        let name = Arc::clone(&self.ids[id]);
        let process = Process::new(number, role, like, id, &name, lease, clock);
        self.processes.push(process);
        self.notes.push(Notes::new(lease));
        number
    }

    fn draw_faults(&mut self) {
        let end = self.plan.faults_end;
        let count = self.processes.len() as u64 - 1;
        for number in 1..=count as usize {
            let at = self.dice.below(self.plan.shortest_ttl());
            self.push(at, Event::Fault(Fault::Start(number)));
        }
        type Strike = fn(usize) -> Fault;
        let kinds: [(Strike, &[u64]); 6] = [
            (Fault::Pause, &[0, 0, 1, 2]),
            (Fault::Crash, &[0, 0, 1, 2]),
            (|p| Fault::Order(p, Order::Stop), &[0, 1, 1, 2]),
            (|p| Fault::Order(p, Order::Resign), &[0, 0, 1, 1]),
            (|p| Fault::Order(p, Order::Cancel), &[0, 1, 2, 4]),
            (Fault::Unparked, &[0, 0, 1, 3]),
        ];
        for (kind, counts) in kinds {
            for _ in 0..self.dice.pick(counts) {
                let number = 1 + self.dice.below(count) as usize;
                let at = self.dice.below(end);
                self.push(at, Event::Fault(kind(number)));
            }
        }
        for (fault, permille) in [(Fault::LoseMemory, 120), (Fault::CorrectClock, 500)] {
            if self.dice.chance(permille) {
                let at = self.dice.below(end);
                self.push(at, Event::Fault(fault));
            }
        }
        self.push(end, Event::Fault(Fault::Heal));
        let plan = &self.plan;
        let about = format!(
            "leases {:?}, server {:?}, clocks {:?}, {:?}, session: {}, roles {:?}",
            plan.leases,
            plan.server,
            plan.clocks,
            plan.habits,
            plan.session,
            self.processes.iter().map(|it| it.role).collect::<Vec<_>>(),
        );
        self.trace(|_| about);
    }

    pub fn lines(&mut self) -> Vec<String> {
        self.lines.take().unwrap_or_default()
    }

    pub fn trace(&mut self, line: impl FnOnce(&World) -> String) {
        if self.lines.is_some() {
            let line = format!("{:>12.6} s  {}", self.now as f64 / 1e9, line(self));
            self.lines.get_or_insert_default().push(line);
        }
    }

    fn push(&mut self, at: True, event: Event) {
        self.pushed += 1;
        self.queue.insert((at.max(self.now), self.pushed), event);
    }

    pub fn process(&self, number: usize) -> Arc<Process> {
        Arc::clone(&self.processes[number])
    }

    pub fn name(&self, id: Id) -> Arc<str> {
        Arc::clone(&self.ids[id])
    }

    // Threads.

    /// The driver waits for the end.
    pub fn sit(&mut self) {
        self.slots[DRIVER].state = State::Waiting { key: 0 };
    }

    /// A free seat for a thread of this process.
    pub fn seat(&mut self, process: usize) -> usize {
        let free = |slot: &Slot| slot.state == State::Idle;
        let number = self.slots.iter().skip(1).position(free).map_or_else(
            || {
                self.slots.push(Slot::new(process));
                self.slots.len() - 1
            },
            |place| place + 1,
        );
        self.slots[number].process = process;
        self.make_ready(number);
        number
    }

    /// A thread is over.
    pub fn rest(&mut self, number: usize) {
        self.slots[number].state = State::Idle;
        self.look_for_the_end();
    }

    fn look_for_the_end(&mut self) {
        let idle = |slot: &Slot| slot.state == State::Idle;
        if self.finale && self.slots.iter().skip(1).all(idle) {
            self.check_traces();
            self.end();
        }
    }

    fn end(&mut self) {
        if matches!(self.slots[DRIVER].state, State::Waiting { .. }) {
            self.make_ready(DRIVER);
        }
    }

    fn make_ready(&mut self, number: usize) {
        let slot = &mut self.slots[number];
        slot.state = State::Ready;
        slot.ticket += 1;
        self.ready.push_back(number);
    }

    pub fn wait(&mut self, me: usize, key: usize, at: True) {
        let slot = &mut self.slots[me];
        slot.state = State::Waiting { key };
        slot.ticket += 1;
        let ticket = slot.ticket;
        if at < NEVER {
            self.push(at, Event::Timer(me, ticket));
        }
    }

    pub fn notify(&mut self, key: usize) {
        for number in 1..self.slots.len() {
            if key != 0 && self.slots[number].state == (State::Waiting { key }) {
                self.make_ready(number);
            }
        }
    }

    /// The next thread that can run.
    pub fn next_ready(&mut self) -> Option<usize> {
        while let Some(number) = self.ready.pop_front() {
            let paused_until = self.notes[self.slots[number].process].paused_until;
            if self.now < paused_until && number != DRIVER {
                self.wait(number, 0, paused_until);
                continue;
            }
            self.slots[number].state = State::Running;
            self.changed = true;
            return Some(number);
        }
        None
    }

    // Time.

    /// Plays one event, and says what is to be done about it.
    pub fn play(&mut self) -> Vec<Action> {
        let mut actions = Vec::new();
        // Time alone makes no process believe, and takes no lease away.
        if self.monitor.violation.is_none() && std::mem::take(&mut self.changed) {
            self.check();
        }
        if self.monitor.violation.is_some() && !self.aborted {
            self.aborted = true;
            self.finale = true;
            self.faulty = false;
            for number in 1..self.processes.len() {
                self.crash(number, &mut actions);
            }
            self.look_for_the_end();
            return actions;
        }
        let Some(((at, _), event)) = self.queue.pop_first() else {
            let waits = self.slots.iter().map(|slot| slot.state).collect::<Vec<_>>();
            self.violate(SPIN, format!("nothing is left to happen: {waits:?}"));
            self.stuck = true;
            self.end();
            return actions;
        };
        self.now = at;
        self.events += 1;
        self.tally.events += 1;
        if self.events == MOST_EVENTS {
            self.violate(SPIN, "too many events".to_owned());
        }
        if self.events == MOST_EVENTS * 3 {
            self.stuck = true;
            self.end();
        }
        match event {
            Event::Arrive(request) => self.arrive(request),
            Event::Execute(request, reading) => self.execute(request, reading),
            Event::Reply(number, call, answer) => self.reply(number, call, answer),
            Event::Timer(number, ticket) => {
                let slot = &mut self.slots[number];
                if slot.ticket == ticket {
                    if let State::Calling(_) = slot.state {
                        slot.answer = Answer::Failed;
                        self.tally.timeouts += 1;
                    }
                    self.make_ready(number);
                }
            }
            Event::Wake(id) => self.wake(|_, its| its == id, &mut actions),
            Event::Fault(fault) => self.strike(fault, &mut actions),
        }
        actions
    }

    fn strike(&mut self, fault: Fault, actions: &mut Vec<Action>) {
        self.trace(|_| format!("{fault:?}"));
        match fault {
            Fault::Start(number) => {
                if !self.finale {
                    actions.push(Action::Start(self.process(number)));
                    self.notes[number].started = true;
                }
            }
            Fault::Order(number, order) => self.order(number, order, actions),
            Fault::Pause(number) => {
                self.pause(number);
            }
            Fault::Crash(number) => {
                if self.notes[number].started && !self.processes[number].is_crashed() {
                    self.tally.crashes += 1;
                    self.crash(number, actions);
                    let old = self.process(number);
                    let renamed = self.dice.chance(400);
                    let id = (!renamed).then_some(old.id);
                    let new = self.add(old.role, old.like, id);
                    let down = self.dice.below(self.plan.longest_total());
                    let at = (self.now + down).min(self.plan.faults_end);
                    self.push(at, Event::Fault(Fault::Start(new)));
                }
            }
            Fault::Unparked(number) => self.wake(|its, _| its == number, actions),
            Fault::LoseMemory => {
                self.tally.memory_losses += 1;
                self.note_memory_loss();
                self.model.lose_memory();
                // Longer than a fence may run ahead of the clock, and than any statement waits.
                let down = MS + self.dice.below(self.plan.longest_ttl());
                self.server_down_until = (self.now + down).min(self.plan.faults_end);
                self.queue
                    .retain(|_, event| !matches!(event, Event::Execute(..)));
            }
            Fault::CorrectClock => self.model.clock.offset += 4 * MS,
            Fault::Heal => {
                self.faulty = false;
                for number in 1..self.processes.len() {
                    if self.dice.chance(300) {
                        let at = self.now + self.dice.below(self.plan.shortest_ttl() / 2);
                        self.push(at, Event::Fault(Fault::Order(number, Order::Stop)));
                    }
                }
                let patience =
                    self.plan.patience(self.ids.len() as u64) + self.plan.longest_total();
                self.push(self.plan.calm + patience, Event::Fault(Fault::Curtain));
            }
            Fault::Curtain => {
                self.check_liveness();
                self.finale = true;
                for number in 1..self.processes.len() {
                    self.order(number, Order::Cancel, actions);
                    self.order(number, Order::Stop, actions);
                }
                self.look_for_the_end();
            }
        }
    }

    fn order(&mut self, number: usize, order: Order, actions: &mut Vec<Action>) {
        if order == Order::Cancel {
            if let Some(cancel) = self.notes[number].cancel.take() {
                self.notes[number].cancelled_at = Some(self.now);
                actions.push(Action::Cancel(self.process(number), cancel));
            }
            return;
        }
        if self.processes[number].role != Role::Locker {
            self.notes[number].orders.push_back(order);
            self.notify(number);
        }
    }

    fn crash(&mut self, number: usize, actions: &mut Vec<Action>) {
        if self.processes[number].is_crashed() {
            return;
        }
        // What is left of it waits for nothing.
        if let Some(cancel) = self.notes[number].cancel.take() {
            actions.push(Action::Cancel(self.process(number), cancel));
        }
        self.processes[number].crash(self.now);
        self.notes[number].crash();
        self.listeners.retain(|(its, ..)| *its != number);
        for slot in 1..self.slots.len() {
            let state = self.slots[slot].state;
            if self.slots[slot].process == number
                && matches!(state, State::Waiting { .. } | State::Calling(_))
            {
                // Its clock runs another way now: it looks anew.
                self.slots[slot].answer = Answer::Failed;
                self.make_ready(slot);
            }
        }
    }

    /// Maybe a pause of a process begins here.
    pub fn pauses(&mut self, number: usize) -> bool {
        let running = !self.processes[number].is_crashed() && number != 0;
        self.faulty && running && self.dice.chance(self.plan.pause / 2) && self.pause(number)
    }

    fn pause(&mut self, number: usize) -> bool {
        let total = self.plan.longest_total();
        let longest = self.dice.pick(&[total / 50, total / 2, total, total * 2]);
        let until = self.now + 1 + self.dice.below(longest);
        let until = until.min(self.plan.faults_end);
        if until <= self.now || self.processes[number].is_crashed() {
            return false;
        }
        let notes = &mut self.notes[number];
        notes.paused_until = notes.paused_until.max(until);
        notes.pauses += 1;
        self.tally.pauses += 1;
        self.trace(|w| {
            format!(
                "P{number} is paused until {:?}",
                w.notes[number].paused_until
            )
        });
        true
    }

    // The network.

    /// Begins a call. `false`: it is over already.
    pub fn begin_call(&mut self, me: usize, process: usize, ask: Ask, by: Moment) -> bool {
        let clock = self.processes[process].clock();
        self.calls += 1;
        let call = self.calls;
        let request = Request {
            seat: me,
            call,
            id: self.processes[process].id,
            lease: self.processes[process].lease,
            ask,
            end: clock.reaches_moment(by),
        };
        let in_time = clock.moment(self.now) < by;
        if !in_time {
            // A backend starts nothing then; one that sends it all the same must do no harm.
            self.tally.timeouts += 1;
            if self.dice.chance(500) {
                self.send(process, request);
            }
            return false;
        }
        let slot = &mut self.slots[me];
        slot.state = State::Calling(call);
        slot.ticket += 1;
        slot.answer = Answer::Failed;
        let ticket = slot.ticket;
        self.trace(|_| format!("P{process} asks {ask:?} by {by:?}"));
        self.send(process, request);
        self.push(request.end, Event::Timer(me, ticket));
        true
    }

    pub fn take_answer(&mut self, me: usize) -> Answer {
        std::mem::replace(&mut self.slots[me].answer, Answer::Failed)
    }

    fn send(&mut self, process: usize, request: Request) {
        if self.faulty && self.dice.chance(self.plan.failure) {
            let at = self.now + self.short_delay();
            self.push(at, Event::Reply(request.seat, request.call, Answer::Failed));
        }
        let twice = self.faulty && self.dice.chance(self.plan.duplication);
        self.tally.duplicates += u64::from(twice);
        for _ in 0..=u64::from(twice) {
            if let Some(at) = self.arrival(process) {
                self.push(at, Event::Arrive(request));
            }
        }
    }

    fn arrive(&mut self, request: Request) {
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

    fn execute(&mut self, request: Request, reading: u64) {
        if self.now < self.server_down_until {
            return;
        }
        let Request {
            seat,
            call,
            id,
            lease,
            ask,
            end,
        } = request;
        self.changed = true;
        self.model.expire(reading);
        let before = self.model.lease;
        let queued = self.model.is_queued(id);
        let answer = self.model.execute(id, lease, ask, reading);
        let awaited = matches!(self.slots[seat].state, State::Calling(its) if its == call);
        if !queued && !awaited && !self.listeners.iter().any(|(_, its, _)| *its == id) {
            // Overtaken by its own withdrawal: a waiter without a listener is forgotten.
            self.model.forget_dead(id);
        }
        self.note_execution(id, ask, answer, before, end < self.now);
        self.trace(|w| format!("backend: {} asks {ask:?}: {answer:?}", w.ids[id]));
        // The way back of a request whose thread has gone on to another process does not matter.
        let process = self.slots[seat].process;
        if let Some(at) = self.arrival(process) {
            self.push(at, Event::Reply(seat, call, answer));
        }
        self.pass_on_wake();
    }

    /// Wake-ups are lossy: they are a hint.
    fn pass_on_wake(&mut self) {
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

    fn reply(&mut self, number: usize, call: u32, answer: Answer) {
        let slot = &mut self.slots[number];
        if slot.state == State::Calling(call) {
            slot.answer = answer;
            self.make_ready(number);
        } else {
            self.tally.ignored_replies += 1;
        }
    }

    fn wake(&mut self, whom: impl Fn(usize, Id) -> bool, actions: &mut Vec<Action>) {
        let now = self.now;
        for (number, id, unparker) in &self.listeners {
            if whom(*number, *id) {
                self.notes[*number].woken(now);
                actions.push(Action::Unpark(unparker.clone()));
            }
        }
    }

    pub fn subscribe(&mut self, number: usize, id: Id, unparker: &Unparker) {
        self.listeners.push((number, id, unparker.clone()));
    }

    pub fn unsubscribe(&mut self, number: usize) {
        self.listeners.retain(|(its, ..)| *its != number);
    }

    /// When a message that leaves now arrives; `None`: never.
    fn arrival(&mut self, process: usize) -> Option<True> {
        let mut at = self.now + self.short_delay();
        if self.faulty {
            let like = self.processes[process].like;
            if self.dice.chance(self.plan.loss) || self.plan.is_cut(like, self.now) {
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

    pub fn short_delay(&mut self) -> u64 {
        let longest = if self.dice.chance(300) {
            10_000
        } else {
            self.short
        };
        1 + self.dice.below(longest)
    }

    pub fn take_violation(&mut self) -> Option<Violation> {
        self.monitor.violation.take()
    }
}

impl Slot {
    fn new(process: usize) -> Slot {
        Slot {
            state: State::Idle,
            process,
            ticket: 0,
            answer: Answer::Failed,
        }
    }
}
