//! One process of contenders: a service, lockers, permits and a schedule, each of which writes down what it believes
//! and works on the registers while it does.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use contend::semaphore::PermitRequest;
use contend::{
    Cancel, ErrorKind, EventKind, Events, Factory, Guard, Locker, MutexContendService, Schedule,
    Status,
};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::SetOnDrop;
use crate::history::{Journal, Kind, Nanos, Record, nanos, now};
use crate::hooked::{self, Call, When};
use crate::planted::{self, Bug};
use crate::register::RegisterClient;

/// The mutex that services lead with.
pub const LED: &str = "led";
/// The mutex that lockers lock.
pub const LOCKED: &str = "locked";
/// Another one, which is locked alone and together with the first.
pub const SECOND: &str = "second";
/// The mutex of the schedule, and its period.
pub const SCHEDULED: &str = "scheduled";
pub const PERIOD: Duration = Duration::from_millis(1_500);

/// The semaphores where the backend has them, and their capacities.
pub const SEMAPHORES: [(&str, u32); 2] = [("few", 3), ("pair", 2)];
/// How long permits last without a renewal.
pub const PERMIT_TTL: Duration = Duration::from_millis(2_000);

/// How often a belief is looked at.
const SAMPLE: Duration = Duration::from_millis(3);
/// How often it is written down while nothing changes.
const WRITE_DOWN: Nanos = 20_000_000;
/// Until when a lease is handed on inside a process, and how many threads share its locker.
const HAND_OFF: Duration = Duration::from_millis(150);
const SHARERS: usize = 3;

/// What a process is to do.
#[derive(Clone, Debug)]
pub struct Assignment {
    /// `NUMBER.INCARNATION`.
    pub process: String,
    pub url: String,
    pub journal: PathBuf,
    pub register: SocketAddr,
    pub seed: u64,
    /// Whether it contends under the same ids after a restart.
    pub fixed_ids: bool,
    pub plant: Option<Bug>,
}

impl Assignment {
    /// The variable of the environment that brings it to a process.
    pub const VARIABLE: &'static str = "CONTEND_CAMPAIGN_ASSIGNMENT";

    /// As text, for the environment.
    pub fn to_text(&self) -> String {
        let lines = [
            self.process.clone(),
            self.url.clone(),
            self.journal.display().to_string(),
            self.register.to_string(),
            self.seed.to_string(),
            self.fixed_ids.to_string(),
            self.plant.map_or("", Bug::name).to_owned(),
        ];
        lines.join("\n")
    }

    /// From that text.
    pub fn from_text(text: &str) -> Option<Assignment> {
        let mut lines = text.split('\n');
        Some(Assignment {
            process: lines.next()?.to_owned(),
            url: lines.next()?.to_owned(),
            journal: lines.next()?.into(),
            register: lines.next()?.parse().ok()?,
            seed: lines.next()?.parse().ok()?,
            fixed_ids: lines.next()?.parse().ok()?,
            plant: Bug::named(lines.next()?),
        })
    }

    fn number(&self) -> usize {
        let (number, _) = self.process.split_once('.').expect("an incarnation");
        number.parse().expect("a number")
    }

    /// Below the first token of this incarnation: 2^32 follow. Not by the process id, which the system uses again.
    fn tokens(&self) -> u64 {
        let (_, incarnation) = self.process.split_once('.').expect("an incarnation");
        let incarnation: u64 = incarnation.parse().expect("a number");
        (self.number() as u64) << 48 | incarnation << 32
    }

    fn id(&self, contender: &str) -> String {
        match self.fixed_ids {
            true => format!("{}-{contender}", self.number()),
            false => format!("{}-{contender}", self.process),
        }
    }
}

/// Runs a process to its end, which is that of its standard input.
pub fn main(assignment: &Assignment) {
    let journal = Journal::open(&assignment.journal).expect("the journal can be opened");
    let journal: &'static Journal = Box::leak(Box::new(journal));
    let _ = log::set_logger(Box::leak(Box::new(Remarks(journal))));
    log::set_max_level(log::LevelFilter::Info);
    let factory = contend::connect(&assignment.url).expect("a URL of the campaign");
    run(assignment, &factory, journal, until_input_ends());
}

/// A flag that is set when the standard input of this process ends.
pub fn until_input_ends() -> &'static AtomicBool {
    let stop: &'static AtomicBool = Box::leak(Box::default());
    thread::spawn(|| {
        let _ = io::copy(&mut io::stdin(), &mut io::sink());
        stop.store(true, Ordering::SeqCst);
    });
    stop
}

/// Logs of the library go to the journal as remarks.
struct Remarks(&'static Journal);

impl log::Log for Remarks {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        metadata.target().starts_with("contend")
    }

    fn log(&self, record: &log::Record<'_>) {
        if self.enabled(record.metadata()) {
            let remark = format!("{} {}", record.level(), record.args());
            self.0.remark(&remark);
        }
    }

    fn flush(&self) {}
}

/// Contends until `stop`, and gives everything back.
pub fn run(assignment: &Assignment, factory: &Factory, journal: &Journal, stop: &AtomicBool) {
    let factory = match assignment.plant {
        Some(bug) => planted::plant(factory, bug),
        None => factory.clone(),
    };
    let process = Process {
        assignment,
        factory,
        journal,
        turns: AtomicU64::new(0),
        stop,
    };
    process.contend();
    journal.remark("stopped");
}

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// Builds something under an id that a predecessor may still have for a moment: on memory a restart stays in the
/// process.
fn when_free<T>(build: impl Fn() -> contend::Result<T>) -> T {
    let until = now() + 20_000_000_000;
    loop {
        match build() {
            Ok(built) => return built,
            Err(error) => {
                let again = error.kind() == ErrorKind::DuplicateContender && now() < until;
                assert!(again, "{error}");
                thread::sleep(SAMPLE);
            }
        }
    }
}

struct Process<'a> {
    assignment: &'a Assignment,
    factory: Factory,
    journal: &'a Journal,
    /// How many guards its lockers got.
    turns: AtomicU64,
    stop: &'a AtomicBool,
}

impl Process<'_> {
    fn contend(&self) {
        thread::scope(|scope| {
            scope.spawn(|| self.lead());
            scope.spawn(|| self.schedule());
            scope.spawn(|| self.lock_both());
            let id = self.assignment.id("locker");
            let locker = when_free(|| self.factory.locker(LOCKED).id(&id).build());
            scope.spawn(move || self.lock(&locker, "locker", 0));
            // In every other process, threads that share a locker want the second mutex.
            let mutex = [LOCKED, SECOND][self.assignment.number() % 2];
            let id = self.assignment.id("shared");
            let shared = || self.factory.locker(mutex).id(&id).local_handoff(HAND_OFF);
            let shared = when_free(|| shared().build());
            for number in 0..SHARERS {
                let shared = shared.clone();
                scope.spawn(move || self.lock(&shared, "shared", number));
            }
            for number in 0..2 {
                scope.spawn(move || self.hold_permits(number));
            }
        });
    }

    fn is_over(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }

    fn who(&self, contender: &str) -> String {
        format!("{}/{contender}", self.assignment.process)
    }

    /// Chance for one of its threads, from the seed and the name of the thread.
    fn random(&self, name: &str) -> StdRng {
        let salt = name.bytes().fold(0, |salt: u64, byte| {
            salt.wrapping_mul(257).wrapping_add(byte.into())
        });
        StdRng::seed_from_u64(self.assignment.seed ^ salt)
    }

    fn registers(&self) -> RegisterClient {
        let (addr, number) = (self.assignment.register, self.assignment.number());
        RegisterClient::connect(addr, number).expect("the register")
    }

    fn witness(&self, who: &str, mutex: &'static str) -> Witness<'_> {
        Witness {
            journal: self.journal,
            who: who.to_owned(),
            what: mutex,
            count: 0,
            after: now(),
            current: None,
        }
    }

    /// A service that leads for a while, resigns or is stopped, and leads again.
    fn lead(&self) {
        let mut random = self.random("lead");
        let (who, id) = (self.who("service"), self.assignment.id("service"));
        let (service, events) = when_free(|| self.factory.contend(LED).id(&id).channel());
        let mut witness = self.witness(&who, LED);
        let ttl = nanos(self.factory.lease().ttl());
        let stop = |witness: &mut Witness<'_>| {
            self.stop(&who, || service.stop());
            witness.owns_not(now());
            self.write_events(&who, &events);
        };
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| self.work_while_leading(&service, &over));
            let _over = SetOnDrop(&over);
            while !self.is_over() {
                if service.status() != Status::Running
                    && let Err(error) = service.start()
                {
                    // It said that it could not stop in time, and is at it still.
                    self.journal.remark(&format!("{who}: start: {error}"));
                    thread::sleep(SAMPLE);
                    continue;
                }
                let until = now() + random.random_range(1_000_000_000..8_000_000_000);
                while now() < until && !self.is_over() {
                    let began = now();
                    match service.fence() {
                        Some(fence) => witness.owns(fence, began, now(), began),
                        None => witness.owns_not_yet(began, ttl),
                    }
                    self.write_events(&who, &events);
                    thread::sleep(SAMPLE);
                }
                if random.random_range(0..3) == 0 && !self.is_over() {
                    if let Err(error) = service.resign_for(ms(random.random_range(0..500))) {
                        self.journal.remark(&format!("{who}: resign: {error}"));
                    }
                    // It contends again when it has rested, which may be by now.
                    witness.owns_not_yet(now(), ttl);
                    // Mostly it goes on; sometimes it is stopped while it rests or asks again.
                    if random.random_range(0..3) > 0 {
                        continue;
                    }
                }
                stop(&mut witness);
                if service.is_owner() {
                    self.journal.misbehaved(&who, "owns after stop");
                }
            }
            if service.status() != Status::Initial {
                stop(&mut witness);
            }
        });
    }

    fn write_events(&self, who: &str, events: &Events) {
        for event in events.try_iter() {
            let kind = match event.kind {
                EventKind::Acquired => Kind::Acquired,
                EventKind::Released => Kind::Released,
                _ => continue,
            };
            let record = Record::new(kind, who, LED).number(event.missed).at(now());
            self.journal
                .write(&record.fence(event.fence().unwrap_or(0)));
        }
    }

    fn work_while_leading(&self, service: &MutexContendService, over: &AtomicBool) {
        let mut random = self.random("work");
        let mut registers = self.registers();
        while !over.load(Ordering::SeqCst) {
            match service.fence() {
                Some(fence) => {
                    let think = ms(random.random_range(1..20));
                    self.write_both(&mut registers, LED, fence, think);
                }
                None => thread::sleep(SAMPLE),
            }
        }
    }

    /// Reads both registers of a mutex, thinks, and writes: as most programs would, without looking again in between
    /// whether the lock is still held.
    fn write_both(&self, client: &mut RegisterClient, mutex: &str, fence: u64, think: Duration) {
        static TOKENS: AtomicU64 = AtomicU64::new(0);
        let registers = [format!("fenced-{mutex}"), format!("plain-{mutex}")];
        let mut outcome = || -> io::Result<()> {
            let bases = [
                client.read(&registers[0], fence)?,
                client.read(&registers[1], fence)?,
            ];
            thread::sleep(think);
            for (register, base) in registers.iter().zip(bases) {
                let Some(base) = base else { continue };
                // Unlike in every other process, and never 0.
                let token = self.assignment.tokens() | (TOKENS.fetch_add(1, Ordering::Relaxed) + 1);
                if client.write(register, fence, base, token)? {
                    let record = Record::new(Kind::Acknowledged, "", register);
                    self.journal.write(&record.number(token));
                }
            }
            Ok(())
        };
        if let Err(error) = outcome() {
            self.journal.remark(&format!("register: {error}"));
        }
    }

    /// Stops something. A process that is paused meanwhile may miss the bound of a stop, but not time and again.
    fn stop(&self, who: &str, stop: impl Fn() -> contend::Result<()>) {
        if let Err(error) = stop().or_else(|_| stop()).or_else(|_| stop()) {
            self.journal.misbehaved(who, &format!("stop: {error}"));
        }
    }

    /// Locks in every way there is. Threads may share the locker; each has turns of the same contender.
    fn lock(&self, locker: &Locker, contender: &str, thread: usize) {
        let mut random = self.random(&format!("{contender}{thread}"));
        let mutex = [LOCKED, SECOND]
            .into_iter()
            .find(|it| *it == locker.mutex());
        let mutex = mutex.expect("one of the two");
        let mut registers = self.registers();
        while !self.is_over() {
            let turn = self.turns.fetch_add(1, Ordering::Relaxed);
            let who = self.who(&format!("{contender}#{turn}"));
            let witness = self.witness(&who, mutex);
            let locked = match random.random_range(0..10) {
                0..3 => locker.try_lock(),
                3..5 => locker.try_lock_for(ms(random.random_range(1..400))),
                5..7 => lock_until_cancelled(locker, ms(random.random_range(0..400))),
                _ => locker.try_lock_for(ms(random.random_range(1_000..4_000))),
            };
            let guard = match locked {
                Ok(guard) => guard,
                Err(error) => {
                    self.remark_failure(&who, &error);
                    thread::sleep(ms(random.random_range(1..40)));
                    continue;
                }
            };
            // Mostly short; sometimes longer than the ttl, so that it must be renewed.
            let hold = ms(match random.random_range(0..40) {
                0 => random.random_range(1_000..2_500),
                1..8 => random.random_range(50..300),
                _ => random.random_range(0..30),
            });
            let held: (&dyn Fn() -> _, &dyn Fn(&str) -> _) =
                (&|| guard.valid_for(), &|_| guard.fence());
            self.hold(&mut [witness], hold, held, |mutex, fence| {
                let think = ms(random.random_range(0..8));
                self.write_both(&mut registers, mutex, fence, think);
            });
            drop(guard);
            if random.random_range(0..4) == 0 {
                thread::sleep(ms(random.random_range(0..30)));
            }
        }
    }

    fn remark_failure(&self, who: &str, error: &contend::Error) {
        use ErrorKind::{Cancelled, Exhausted, Held};
        if !matches!(error.kind(), Held | Cancelled | Exhausted) {
            self.journal.remark(&format!("{who}: {error}"));
        }
    }

    /// Works under what is held for as long as `hold`, or until it is lost.
    fn hold(
        &self,
        witnesses: &mut [Witness<'_>],
        hold: Duration,
        (valid_for, fence): (&dyn Fn() -> Duration, &dyn Fn(&str) -> u64),
        mut work: impl FnMut(&'static str, u64),
    ) {
        let until = now() + nanos(hold);
        loop {
            let began = now();
            let valid = valid_for();
            let ended = now();
            if valid.is_zero() {
                self.journal.remark(&format!("{}: lost", witnesses[0].who));
                break;
            }
            for witness in &mut *witnesses {
                let fence = fence(witness.what);
                witness.owns(fence, began, ended, began + nanos(valid));
            }
            if ended >= until {
                break;
            }
            for witness in &*witnesses {
                work(witness.what, fence(witness.what));
            }
        }
        for witness in witnesses {
            witness.flush();
            let record = Record::new(Kind::GaveUp, &witness.who, witness.what);
            self.journal
                .write(&record.fence(fence(witness.what)).at(now()));
        }
    }

    /// Both mutexes at once, or none.
    fn lock_both(&self) {
        let mut random = self.random("both");
        let who = self.who("both");
        let mut registers = self.registers();
        while !self.is_over() {
            thread::sleep(ms(random.random_range(50..400)));
            let mut witnesses = [LOCKED, SECOND].map(|mutex| self.witness(&who, mutex));
            let both = self.factory.lock_all([SECOND, LOCKED]);
            let locked = match random.random_range(0..3) {
                0 => both.try_lock(),
                _ => both.try_lock_for(ms(random.random_range(100..3_000))),
            };
            match locked {
                Ok(guard) => {
                    let hold = ms(random.random_range(0..40));
                    let fence = |mutex: &str| guard.fence(mutex).unwrap_or(0);
                    let held: (&dyn Fn() -> _, &dyn Fn(&str) -> _) =
                        (&|| guard.valid_for(), &fence);
                    self.hold(&mut witnesses, hold, held, |mutex, fence| {
                        let think = ms(random.random_range(0..8));
                        self.write_both(&mut registers, mutex, fence, think);
                    });
                }
                Err(error) => self.remark_failure(&who, &error),
            }
        }
    }

    /// Permits of one or both semaphores, where the backend has semaphores.
    fn hold_permits(&self, thread: usize) {
        let Ok(semaphores) = self.factory.semaphores() else {
            return;
        };
        let who = self.who(&format!("permits{thread}"));
        let mut random = self.random(&who);
        for number in 0_u64.. {
            if self.is_over() {
                return;
            }
            // Under a name of its own, or under one that a killed predecessor may have held: taken over then.
            let request = match random.random_range(0..4) {
                0 => PermitRequest::new(format!("{who}-{number}")),
                1 => PermitRequest::new(format!("p{}-{thread}", self.assignment.number())),
                _ => PermitRequest::generated(),
            };
            let mut wanted = vec![(SEMAPHORES[0].0, random.random_range(1..=2))];
            if random.random_range(0..3) == 0 {
                wanted.push((SEMAPHORES[1].0, 1));
            }
            let request = request.ttl(PERMIT_TTL);
            let permits = wanted.iter();
            let request = permits.fold(request, |request, (name, count)| {
                request.permits(*name, *count)
            });
            let guard = match semaphores.guard(&request, ms(random.random_range(0..1_500))) {
                Ok(guard) => guard,
                Err(error) => {
                    self.remark_failure(&who, &error);
                    thread::sleep(ms(random.random_range(1..50)));
                    continue;
                }
            };
            let hold = ms(match random.random_range(0..10) {
                0 => random.random_range(1_000..4_000),
                _ => random.random_range(0..200),
            });
            let mut witnesses: Vec<Witness<'_>> = wanted
                .iter()
                .map(|&(semaphore, count)| Witness {
                    count,
                    ..self.witness(&who, semaphore)
                })
                .collect();
            let fence = |semaphore: &str| guard.fence(semaphore).unwrap_or(0);
            let held: (&dyn Fn() -> _, &dyn Fn(&str) -> _) = (&|| guard.valid_for(), &fence);
            self.hold(&mut witnesses, hold, held, |_, _| thread::sleep(SAMPLE));
            drop(guard);
        }
    }

    /// A schedule whose runs are written down.
    fn schedule(&self) {
        let (who, id) = (self.who("schedule"), self.assignment.id("schedule"));
        // What is done outlives no scope, so it is sent to this thread.
        let (facts, told) = crossbeam_channel::unbounded();
        let recorded = facts.clone();
        let factory = hooked::around(&self.factory, move |when, call, _, _| {
            if let (When::After, Call::RunRecorded(fence)) = (when, call) {
                let record = Record::new(Kind::Recorded, "", SCHEDULED).fence(fence);
                let _ = recorded.send(record.at(now()));
            }
            Ok(())
        });
        let scheduler = when_free(|| {
            let (facts, who) = (facts.clone(), who.clone());
            let scheduler = factory.scheduler(SCHEDULED).id(&id);
            scheduler.build(Schedule::with_delay(PERIOD), move |context| {
                let record = Record::new(Kind::Run, &who, SCHEDULED).fence(context.fence());
                let _ = facts.send(record.at(now()));
            })
        });
        scheduler.start().expect("a scheduler that is not running");
        while !self.is_over() {
            if let Ok(fact) = told.recv_timeout(Duration::from_millis(20)) {
                self.journal.write(&fact);
            }
        }
        self.stop(&who, || scheduler.stop());
        told.try_iter().for_each(|fact| self.journal.write(&fact));
    }
}

/// Waits for a lock, and cancels the wait after some time, wherever it is then.
fn lock_until_cancelled(locker: &Locker, after: Duration) -> contend::Result<Guard> {
    let cancel = Cancel::new();
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(after);
            cancel.cancel();
        });
        locker.lock_until_cancelled(&cancel)
    })
}

/// What one contender believes, written down as rarely as it may be.
struct Witness<'a> {
    journal: &'a Journal,
    who: String,
    what: &'static str,
    /// Of a semaphore, how many permits.
    count: u32,
    /// The last time at which it surely did not own the present fence.
    after: Nanos,
    /// What it believes, and when that was written down.
    current: Option<(Record, Nanos)>,
}

impl Witness<'_> {
    /// It was asked between `began` and `ended`, and owned with this fence until `until` at least.
    fn owns(&mut self, fence: u64, began: Nanos, ended: Nanos, until: Nanos) {
        let after = std::mem::replace(&mut self.after, began);
        match &mut self.current {
            Some((belief, written)) if belief.fence == fence => {
                belief.until = belief.until.max(until);
                if ended - *written < WRITE_DOWN {
                    return;
                }
            }
            _ => {
                self.flush();
                let belief = Record::new(Kind::Belief, &self.who, self.what).fence(fence);
                let belief = belief.number(self.count.into());
                self.current = Some((belief.after(after).at(ended).until(until), 0));
            }
        }
        self.flush();
    }

    /// It was asked at `began` or later, and did not own; nor had it asked the backend.
    fn owns_not(&mut self, began: Nanos) {
        self.after = began;
        self.flush();
        self.current = None;
    }

    /// It was asked at `began` or later, and did not own, but may have been granted the mutex already by a reply that
    /// is on its way: not longer than a ttl, after which the reply changes nothing.
    fn owns_not_yet(&mut self, began: Nanos, ttl: Nanos) {
        self.owns_not(self.after.max(began.saturating_sub(ttl)));
    }

    fn flush(&mut self) {
        if let Some((belief, written)) = &mut self.current {
            *written = now();
            self.journal.write(belief);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history;

    #[test]
    fn unowned_service_may_have_asked() {
        let folder = testbed::TempDir::new();
        let journal = Journal::open(&folder.path().join("a.log")).unwrap();
        let mut witness = Witness {
            journal: &journal,
            who: "a/s".to_owned(),
            what: LED,
            count: 0,
            after: 100,
            current: None,
        };
        let ttl = 50;
        // Not before it was started, though.
        for (seen, fence) in [(120, 1), (200, 2), (400, 3), (420, 4)] {
            witness.owns_not_yet(seen, ttl);
            witness.owns(fence, seen + 1, seen + 2, seen + 1);
        }
        // It was stopped: nothing is on its way.
        witness.owns_not(500);
        witness.owns_not_yet(510, ttl);
        witness.owns(5, 511, 512, 511);
        let mut afters: Vec<(u64, Nanos)> = history::read(folder.path())
            .unwrap()
            .iter()
            .map(|belief| (belief.fence, belief.after))
            .collect();
        afters.dedup();
        // While it believed it did not ask: the end of the last ownership counts, too.
        assert_eq!(afters, [(1, 100), (2, 150), (3, 350), (4, 401), (5, 500)]);
    }
}
