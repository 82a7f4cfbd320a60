//! One process of contenders: a service, lockers and a schedule, each of which writes down what it
//! believes and works on the registers while it does.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use contend::semaphore::PermitRequest;
use contend::{
    Cancel, ErrorKind, EventKind, Factory, Guard, Locker, MutexContendService, Schedule, Status,
};
use crossbeam_channel::Receiver;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::SetOnDrop;
use crate::history::{Journal, Nanos, Record, now};
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
        format!(
            "{}\n{}\n{}\n{}\n{}\n{}\n{}",
            self.process,
            self.url,
            self.journal.display(),
            self.register,
            self.seed,
            self.fixed_ids,
            self.plant.map_or("", Bug::name),
        )
    }

    /// From that text.
    pub fn from_text(text: &str) -> Option<Assignment> {
        let mut lines = text.split('\n');
        Some(Assignment {
            process: lines.next()?.to_owned(),
            url: lines.next()?.to_owned(),
            journal: PathBuf::from(lines.next()?),
            register: lines.next()?.parse().ok()?,
            seed: lines.next()?.parse().ok()?,
            fixed_ids: lines.next()?.parse().ok()?,
            plant: Bug::named(lines.next()?),
        })
    }

    fn number(&self) -> usize {
        let number = self.process.split('.').next();
        number.and_then(|number| number.parse().ok()).unwrap_or(0)
    }

    fn id(&self, contender: &str) -> String {
        let number = self.number();
        if self.fixed_ids {
            format!("{number}-{contender}")
        } else {
            format!("{}-{contender}", self.process)
        }
    }

    fn who(&self, contender: &str) -> String {
        format!("{}/{contender}", self.process)
    }
}

/// Runs a process to its end, which is that of its standard input.
pub fn main(assignment: &Assignment) {
    let journal = Journal::open(&assignment.journal).expect("the journal can be opened");
    let journal: &'static Journal = Box::leak(Box::new(journal));
    let _ = log::set_logger(Box::leak(Box::new(Remarks(journal))));
    log::set_max_level(log::LevelFilter::Info);
    let stop: &'static AtomicBool = Box::leak(Box::default());
    thread::spawn(|| {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        stop.store(true, Ordering::SeqCst);
    });
    let factory = contend::connect(&assignment.url).expect("a URL of the campaign");
    run(assignment, factory, journal, stop);
}

/// Logs of the library go to the journal as remarks.
struct Remarks(&'static Journal);

impl log::Log for Remarks {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        metadata.target().starts_with("contend")
    }

    fn log(&self, record: &log::Record<'_>) {
        if self.enabled(record.metadata()) {
            self.0
                .remark(&format!("{} {}", record.level(), record.args()));
        }
    }

    fn flush(&self) {}
}

/// How long a process got no processor: it was paused, or the machine had other things to do.
struct Stalls {
    /// All of it up to the last beat.
    lost: AtomicU64,
    beat: AtomicU64,
    over: AtomicBool,
}

impl Stalls {
    /// How often it is looked at.
    const BEAT: Nanos = 20_000_000;
    /// What stopping may take longer than it is to, a processor being there all the time.
    const FORGIVEN: Nanos = 500_000_000;

    fn new() -> Stalls {
        Stalls {
            lost: AtomicU64::new(0),
            beat: AtomicU64::new(now()),
            over: AtomicBool::new(false),
        }
    }

    fn measure(&self) {
        while !self.over.load(Ordering::SeqCst) {
            thread::sleep(Duration::from_nanos(Self::BEAT));
            // In this order: whoever reads in between counts too much rather than too little.
            self.lost.store(self.lost(), Ordering::SeqCst);
            self.beat.store(now(), Ordering::SeqCst);
        }
    }

    /// All of it until now, also what the measuring thread has not had the time to see.
    fn lost(&self) -> Nanos {
        let beat = self.beat.load(Ordering::SeqCst);
        let late = now().saturating_sub(beat).saturating_sub(2 * Self::BEAT);
        self.lost.load(Ordering::SeqCst) + late
    }

    /// Stops something, which must not take longer than it says by itself; without a processor it may.
    fn stop(&self, journal: &Journal, who: &str, stop: impl FnOnce() -> contend::Result<()>) {
        let before = self.lost();
        let Err(error) = stop() else { return };
        let lost = self.lost() - before;
        if lost > Self::FORGIVEN {
            journal.remark(&format!(
                "{who}: stop: {error}, without a processor for {lost} ns"
            ));
        } else {
            journal.write(&Record::Misbehaved {
                what: format!("{who}: stop: {error}"),
            });
        }
    }
}

/// Contends until `stop`, and gives everything back.
pub fn run(assignment: &Assignment, factory: Factory, journal: &Journal, stop: &AtomicBool) {
    let factory = match assignment.plant {
        Some(bug) => planted::plant(&factory, bug),
        None => factory,
    };
    let stalls = Stalls::new();
    thread::scope(|scope| {
        scope.spawn(|| stalls.measure());
        let _over = SetOnDrop(&stalls.over);
        thread::scope(|scope| {
            scope.spawn(|| lead(assignment, &factory, (journal, &stalls), stop));
            for number in 0..2 {
                let factory = &factory;
                scope.spawn(move || lock(number, assignment, factory, journal, stop));
            }
            scope.spawn(|| lock_both(assignment, &factory, journal, stop));
            scope.spawn(|| hold_permits(assignment, &factory, journal, stop));
            scope.spawn(|| schedule(assignment, &factory, (journal, &stalls), stop));
        });
    });
    journal.remark("stopped");
}

/// Builds something under an id that a predecessor may still have for a moment: on memory, where a restart
/// stays in the process, the clean-up of its last call keeps the id until it is done (rule 2).
fn when_free<T>(build: impl Fn() -> contend::Result<T>) -> T {
    let until = now() + 20_000_000_000;
    loop {
        match build() {
            Ok(built) => return built,
            Err(error) => {
                let again = error.kind() == contend::ErrorKind::DuplicateContender && now() < until;
                assert!(again, "{error}");
                thread::sleep(SAMPLE);
            }
        }
    }
}

/// What one contender believes, written down as rarely as it may be.
struct Witness<'a> {
    journal: &'a Journal,
    who: String,
    mutex: &'static str,
    /// The last time at which it surely did not own the present fence.
    after: Nanos,
    current: Option<Seen>,
}

struct Seen {
    fence: u64,
    after: Nanos,
    from: Nanos,
    until: Nanos,
    written: Nanos,
}

impl Witness<'_> {
    /// It was asked between `began` and `ended`, and owned with this fence until `until` at least.
    fn owns(&mut self, fence: u64, began: Nanos, ended: Nanos, until: Nanos) {
        let after = std::mem::replace(&mut self.after, began);
        match &mut self.current {
            Some(seen) if seen.fence == fence => {
                seen.until = seen.until.max(until);
                if ended - seen.written < WRITE_DOWN {
                    return;
                }
            }
            _ => {
                self.flush();
                self.current = Some(Seen {
                    fence,
                    after,
                    from: ended,
                    until,
                    written: 0,
                });
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

    /// It was asked at `began` or later, and did not own, but may have been granted the mutex already by a reply
    /// that is on its way: not longer than a ttl, after which the reply changes nothing (rule 3).
    fn owns_not_yet(&mut self, began: Nanos, ttl: Nanos) {
        let after = self.after.max(began.saturating_sub(ttl));
        self.owns_not(after);
    }

    fn flush(&mut self) {
        if let Some(seen) = &mut self.current {
            seen.written = now();
            self.journal.write(&Record::Belief {
                who: self.who.clone(),
                mutex: self.mutex.to_owned(),
                fence: seen.fence,
                after: seen.after,
                from: seen.from,
                until: seen.until,
            });
        }
    }
}

/// A service that leads for a while, gives up, and leads again.
fn lead(
    assignment: &Assignment,
    factory: &Factory,
    (journal, stalls): (&Journal, &Stalls),
    stop: &AtomicBool,
) {
    let mut random = StdRng::seed_from_u64(assignment.seed ^ 0x1ead);
    let who = assignment.who("service");
    let id = assignment.id("service");
    let (service, events) = when_free(|| factory.contend(LED).id(&id).channel());
    let mut witness = Witness {
        journal,
        who: who.clone(),
        mutex: LED,
        after: now(),
        current: None,
    };
    let ttl = u64::try_from(factory.lease().ttl().as_nanos()).unwrap_or(u64::MAX);
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| work_while_leading(assignment, &service, journal, &over));
        while !stop.load(Ordering::SeqCst) {
            if service.status() != Status::Running
                && let Err(error) = service.start()
            {
                // It said that it could not stop in time, and is at it still.
                journal.remark(&format!("{who}: start: {error}"));
                thread::sleep(SAMPLE);
                continue;
            }
            let until = now() + random.random_range(1_000_000_000..8_000_000_000);
            while now() < until && !stop.load(Ordering::SeqCst) {
                let began = now();
                let fence = service.fence();
                let ended = now();
                match fence {
                    Some(fence) => witness.owns(fence, began, ended, began),
                    None => witness.owns_not_yet(began, ttl),
                }
                write_events(journal, &who, &events);
                thread::sleep(SAMPLE);
            }
            if random.random_range(0..3) == 0 && !stop.load(Ordering::SeqCst) {
                let rest = Duration::from_millis(random.random_range(0..500));
                if let Err(error) = service.resign_for(rest) {
                    journal.remark(&format!("{who}: resign: {error}"));
                }
                // It contends again when it has rested, which may be by now.
                witness.owns_not_yet(now(), ttl);
                // Mostly it goes on; sometimes it is stopped while it rests or asks again.
                if random.random_range(0..3) > 0 {
                    continue;
                }
            }
            stalls.stop(journal, &who, || service.stop());
            witness.owns_not(now());
            write_events(journal, &who, &events);
            if service.is_owner() {
                journal.write(&Record::Misbehaved {
                    what: format!("{who}: owns after stop"),
                });
            }
        }
        if service.status() != Status::Initial {
            stalls.stop(journal, &who, || service.stop());
            witness.owns_not(now());
            write_events(journal, &who, &events);
        }
        over.store(true, Ordering::SeqCst);
    });
}

fn write_events(journal: &Journal, who: &str, events: &Receiver<contend::Event>) {
    while let Ok(event) = events.try_recv() {
        let acquired = match event.kind {
            EventKind::Acquired => true,
            EventKind::Released => false,
            _ => continue,
        };
        journal.write(&Record::Event {
            who: who.to_owned(),
            acquired,
            fence: event.fence().unwrap_or(0),
            missed: event.missed,
            at: now(),
        });
    }
}

fn work_while_leading(
    assignment: &Assignment,
    service: &MutexContendService,
    journal: &Journal,
    over: &AtomicBool,
) {
    let mut random = StdRng::seed_from_u64(assignment.seed ^ 0x3031);
    let mut client =
        RegisterClient::connect(assignment.register, assignment.number()).expect("the register");
    while !over.load(Ordering::SeqCst) {
        match service.fence() {
            Some(fence) => {
                let think = Duration::from_millis(random.random_range(1..20));
                write_both(&mut client, journal, LED, fence, think);
            }
            None => thread::sleep(SAMPLE),
        }
    }
}

/// Reads both registers of a mutex, thinks, and writes: as most programs would, without looking again in
/// between whether the lock is still held.
fn write_both(
    client: &mut RegisterClient,
    journal: &Journal,
    mutex: &str,
    fence: u64,
    think: Duration,
) {
    static TOKENS: AtomicU64 = AtomicU64::new(0);
    let registers = [format!("fenced-{mutex}"), format!("plain-{mutex}")];
    let mut outcome = || -> std::io::Result<()> {
        let bases = [
            client.read(&registers[0], fence)?,
            client.read(&registers[1], fence)?,
        ];
        thread::sleep(think);
        for (register, base) in registers.iter().zip(bases) {
            let Some(base) = base else { continue };
            // Unlike in every process: a process, a counter, and never 0.
            let token = (u64::from(std::process::id()) << 32)
                | (TOKENS.fetch_add(1, Ordering::Relaxed) + 1);
            if client.write(register, fence, base, token)? {
                journal.write(&Record::Acknowledged {
                    register: register.clone(),
                    token,
                });
            }
        }
        Ok(())
    };
    if let Err(error) = outcome() {
        journal.remark(&format!("register: {error}"));
    }
}

/// A locker that locks in every way there is.
fn lock(
    number: usize,
    assignment: &Assignment,
    factory: &Factory,
    journal: &Journal,
    stop: &AtomicBool,
) {
    let mut random = StdRng::seed_from_u64(assignment.seed ^ (0x10c7 + number as u64));
    let name = format!("locker{number}");
    let who = assignment.who(&name);
    // The second locker of every other process wants the second mutex.
    let mutex = match (number, assignment.number() % 2) {
        (1, 1) => SECOND,
        _ => LOCKED,
    };
    let id = assignment.id(&name);
    let locker = when_free(|| factory.locker(mutex).id(&id).build());
    let mut client =
        RegisterClient::connect(assignment.register, assignment.number()).expect("the register");
    let mut witness = Witness {
        journal,
        who: who.clone(),
        mutex,
        after: now(),
        current: None,
    };
    let ms = Duration::from_millis;
    while !stop.load(Ordering::SeqCst) {
        witness.owns_not(now());
        let guard = match random.random_range(0..10) {
            0..3 => locker.try_lock(),
            3..5 => locker.try_lock_for(ms(random.random_range(1..400))),
            5..7 => lock_until_cancelled(&locker, ms(random.random_range(0..400))),
            _ => locker.try_lock_for(ms(random.random_range(1_000..4_000))),
        };
        let guard = match guard {
            Ok(guard) => guard,
            Err(error) => {
                if !matches!(error.kind(), ErrorKind::Held | ErrorKind::Cancelled) {
                    journal.remark(&format!("{who}: {error}"));
                }
                thread::sleep(ms(random.random_range(1..40)));
                continue;
            }
        };
        // Mostly short; sometimes longer than the ttl, so that it must be renewed.
        let hold = match random.random_range(0..40) {
            0 => random.random_range(1_000..2_500),
            1..8 => random.random_range(50..300),
            _ => random.random_range(0..30),
        };
        let until = now() + hold * 1_000_000;
        loop {
            let began = now();
            let valid = guard.valid_for();
            let ended = now();
            if valid.is_zero() {
                journal.remark(&format!("{who}: lost {}", guard.fence()));
                break;
            }
            let bound = began + u64::try_from(valid.as_nanos()).unwrap_or(u64::MAX);
            witness.owns(guard.fence(), began, ended, bound);
            if ended >= until {
                break;
            }
            let think = ms(random.random_range(0..8));
            write_both(&mut client, journal, mutex, guard.fence(), think);
        }
        witness.flush();
        journal.write(&Record::GaveUp {
            who: who.clone(),
            mutex: mutex.to_owned(),
            fence: guard.fence(),
            at: now(),
        });
        drop(guard);
        if random.random_range(0..4) == 0 {
            thread::sleep(ms(random.random_range(0..30)));
        }
    }
    witness.owns_not(now());
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

/// Both mutexes at once, or none.
fn lock_both(assignment: &Assignment, factory: &Factory, journal: &Journal, stop: &AtomicBool) {
    let mut random = StdRng::seed_from_u64(assignment.seed ^ 0xb07);
    let who = assignment.who("both");
    let mut client =
        RegisterClient::connect(assignment.register, assignment.number()).expect("the register");
    let mut witnesses = [LOCKED, SECOND].map(|mutex| Witness {
        journal,
        who: who.clone(),
        mutex,
        after: now(),
        current: None,
    });
    let ms = Duration::from_millis;
    while !stop.load(Ordering::SeqCst) {
        thread::sleep(ms(random.random_range(50..400)));
        for witness in &mut witnesses {
            witness.owns_not(now());
        }
        let both = factory.lock_all([SECOND, LOCKED]);
        let guard = match random.random_range(0..3) {
            0 => both.try_lock(),
            _ => both.try_lock_for(ms(random.random_range(100..3_000))),
        };
        let guard = match guard {
            Ok(guard) => guard,
            Err(error) => {
                if error.kind() != contend::ErrorKind::Held {
                    journal.remark(&format!("{who}: {error}"));
                }
                continue;
            }
        };
        let until = now() + random.random_range(0..40_000_000);
        loop {
            let began = now();
            let valid = guard.valid_for();
            let ended = now();
            if valid.is_zero() {
                journal.remark(&format!("{who}: lost"));
                break;
            }
            let bound = began + u64::try_from(valid.as_nanos()).unwrap_or(u64::MAX);
            for witness in &mut witnesses {
                let fence = guard.fence(witness.mutex).unwrap_or(0);
                witness.owns(fence, began, ended, bound);
            }
            if ended >= until {
                break;
            }
            for mutex in [LOCKED, SECOND] {
                let think = ms(random.random_range(0..5));
                let fence = guard.fence(mutex).unwrap_or(0);
                write_both(&mut client, journal, mutex, fence, think);
            }
        }
        for witness in &mut witnesses {
            witness.flush();
            journal.write(&Record::GaveUp {
                who: who.clone(),
                mutex: witness.mutex.to_owned(),
                fence: guard.fence(witness.mutex).unwrap_or(0),
                at: now(),
            });
        }
        drop(guard);
    }
    for witness in &mut witnesses {
        witness.owns_not(now());
    }
}

/// Permits of one or both semaphores, where the backend has semaphores.
fn hold_permits(assignment: &Assignment, factory: &Factory, journal: &Journal, stop: &AtomicBool) {
    let Ok(semaphores) = factory.semaphores() else {
        return;
    };
    let mut random = StdRng::seed_from_u64(assignment.seed ^ 0x9e41);
    let who = assignment.who("permits");
    let ms = Duration::from_millis;
    for number in 0_u64.. {
        if stop.load(Ordering::SeqCst) {
            return;
        }
        // Under a name of its own, or under one that a killed predecessor may have held: taken over then.
        let request = match random.random_range(0..4) {
            0 => PermitRequest::new(format!("{who}-{number}")),
            1 => PermitRequest::new(format!("p{}", assignment.number())),
            _ => PermitRequest::generated(),
        };
        let mut wanted = vec![(SEMAPHORES[0].0, random.random_range(1..=2))];
        if random.random_range(0..3) == 0 {
            wanted.push((SEMAPHORES[1].0, 1));
        }
        let request = wanted
            .iter()
            .fold(request, |request, (name, count)| {
                request.permits(*name, *count)
            })
            .ttl(PERMIT_TTL);
        let guard = match semaphores.guard(&request, ms(random.random_range(0..1_500))) {
            Ok(guard) => guard,
            Err(error) => {
                if error.kind() != contend::ErrorKind::Exhausted {
                    journal.remark(&format!("{who}: {error}"));
                }
                thread::sleep(ms(random.random_range(1..50)));
                continue;
            }
        };
        let hold = match random.random_range(0..10) {
            0 => random.random_range(1_000..4_000),
            _ => random.random_range(0..200),
        };
        let until = now() + hold * 1_000_000;
        loop {
            let began = now();
            let valid = guard.valid_for();
            let ended = now();
            if valid.is_zero() {
                journal.remark(&format!("{who}: lost"));
                break;
            }
            for (semaphore, count) in &wanted {
                journal.write(&Record::Permits {
                    who: who.clone(),
                    semaphore: (*semaphore).to_owned(),
                    count: u64::from(*count),
                    fence: guard.fence(semaphore).unwrap_or(0),
                    from: ended,
                    until: began + u64::try_from(valid.as_nanos()).unwrap_or(u64::MAX),
                });
            }
            if ended >= until {
                break;
            }
            thread::sleep(ms(10));
        }
        for (semaphore, _) in &wanted {
            journal.write(&Record::GavePermitsBack {
                semaphore: (*semaphore).to_owned(),
                fence: guard.fence(semaphore).unwrap_or(0),
                at: now(),
            });
        }
        drop(guard);
    }
}

/// A schedule whose runs are written down.
fn schedule(
    assignment: &Assignment,
    factory: &Factory,
    (journal, stalls): (&Journal, &Stalls),
    stop: &AtomicBool,
) {
    let who = assignment.who("schedule");
    let id = assignment.id("schedule");
    // What is done outlives no scope, so it is sent to this thread.
    let (facts, told) = crossbeam_channel::unbounded();
    let recorded = facts.clone();
    let factory = hooked::around(factory, move |when, call, _, _| {
        if let (When::After, Call::RunRecorded(fence)) = (when, call) {
            let _ = recorded.send(Record::Recorded {
                mutex: SCHEDULED.to_owned(),
                fence,
                at: now(),
            });
        }
        Ok(())
    });
    let schedule = Schedule::with_delay(PERIOD);
    let scheduler = when_free(|| {
        let (facts, who) = (facts.clone(), who.clone());
        factory
            .scheduler(SCHEDULED)
            .id(&id)
            .build(schedule.clone(), move |context| {
                let _ = facts.send(Record::Run {
                    mutex: SCHEDULED.to_owned(),
                    who: who.clone(),
                    fence: context.fence(),
                    at: now(),
                });
            })
    });
    scheduler.start().expect("a scheduler that is not running");
    while !stop.load(Ordering::SeqCst) {
        if let Ok(fact) = told.recv_timeout(Duration::from_millis(20)) {
            journal.write(&fact);
        }
    }
    stalls.stop(journal, &who, || scheduler.stop());
    told.try_iter().for_each(|fact| journal.write(&fact));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history;

    #[test]
    fn a_service_that_does_not_own_yet_may_have_asked_a_ttl_before() {
        let folder = testbed::TempDir::new();
        let journal = Journal::open(&folder.path().join("a.log")).unwrap();
        let mut witness = Witness {
            journal: &journal,
            who: "a/s".to_owned(),
            mutex: LED,
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
        drop(witness);
        let afters: std::collections::BTreeMap<u64, Nanos> = history::read(folder.path())
            .unwrap()
            .into_iter()
            .filter_map(|record| match record {
                Record::Belief { fence, after, .. } => Some((fence, after)),
                _ => None,
            })
            .collect();
        // While it believed it did not ask: the end of the last ownership counts, too.
        assert_eq!(
            afters,
            [(1, 100), (2, 150), (3, 350), (4, 401), (5, 500)].into()
        );
    }

    #[test]
    fn stopping_late_is_forgiven_only_for_want_of_a_processor() {
        let folder = testbed::TempDir::new();
        let journal = Journal::open(&folder.path().join("a.log")).unwrap();
        let late = || contend::connect("nothing://").map(|_| ());
        let stalls = Stalls::new();
        // Nobody measures: as if the thread that does got no processor.
        stalls.stop(&journal, "a/s", || {
            thread::sleep(Duration::from_nanos(Stalls::FORGIVEN + 4 * Stalls::BEAT));
            late()
        });
        assert_eq!(history::read(folder.path()).unwrap(), []);
        stalls.stop(&journal, "a/s", || Ok(()));
        // Again, should it get no processor in this very moment.
        testbed::wait_until(Duration::from_secs(60), "it counts", || {
            stalls.stop(&journal, "a/s", late);
            !history::read(folder.path()).unwrap().is_empty()
        });
        let records = history::read(folder.path()).unwrap();
        assert!(
            matches!(records.as_slice(), [Record::Misbehaved { what }] if what.starts_with("a/s: stop: ")),
            "{records:?}"
        );
        // What was lost once stays lost, and is not lost again.
        let lost = stalls.lost();
        thread::scope(|scope| {
            scope.spawn(|| stalls.measure());
            let _over = SetOnDrop(&stalls.over);
            let beat = stalls.beat.load(Ordering::SeqCst);
            testbed::wait_until(Duration::from_secs(60), "it measures", || {
                stalls.beat.load(Ordering::SeqCst) > beat
            });
        });
        assert!(stalls.lost() >= lost);
    }
}
