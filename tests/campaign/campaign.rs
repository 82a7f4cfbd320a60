//! One campaign: processes on a backend, a nemesis, and the verdict on what they wrote down.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::checker::{self, Promise, Verdict, Violation};
use crate::contender::{LED, LOCKED, PERIOD, SECOND, SEMAPHORES};
use crate::fleet::Fleet;
use crate::history::{self, Journal, Record, now};
use crate::masters::Watch;
use crate::planted::Bug;
use crate::register::RegisterServer;
use crate::stage::{Fault, Ground, Hit, Stage};

/// What is to be done.
#[derive(Clone, Debug)]
pub struct Plan {
    pub ground: Ground,
    /// How long faults come.
    pub lasts: Duration,
    /// Decides what the nemesis does and what the contenders do. Real processes on a real machine make
    /// of it what they will: the same seed is the same plan, not the same history.
    pub seed: u64,
    pub processes: usize,
    pub plant: Option<Bug>,
}

/// What came of it.
#[derive(Debug)]
pub struct Outcome {
    pub plan: Plan,
    pub verdict: Verdict,
    /// Where the journals are.
    pub folder: PathBuf,
}

impl Outcome {
    /// Whether everything promised was kept.
    pub fn held(&self) -> bool {
        self.verdict.violations.is_empty()
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = &self.verdict;
        let faults: Vec<String> = verdict
            .faults
            .iter()
            .map(|(kind, count)| format!("{kind} {count}"))
            .collect();
        let overlaps = verdict.count(|found| matches!(found, Violation::Overlap(_)));
        write!(
            f,
            "campaign {}{}: {} acquisitions, {} faults ({}), {overlaps} overlaps ({} excused in {:.0} s of {:.0} s), \
             {} violations in all, fenced writes lost {} of {}, unfenced losses {} of {}, \
             {} scheduled runs ({} recorded, {} gaps judged), {} guards of permits, longest without an owner {:.2} s ({}), an owner {:.2} s after the faults, seed {}: {}",
            self.plan.ground,
            self.plan
                .plant
                .map_or(String::new(), |bug| format!(" with {} planted", bug.name())),
            verdict.acquisitions,
            verdict.faults.values().sum::<usize>(),
            faults.join(", "),
            verdict.excused,
            verdict.excusing.as_secs_f64(),
            verdict.lasted.as_secs_f64(),
            verdict.violations.len(),
            verdict.fenced.1,
            verdict.fenced.0,
            verdict.unfenced.1,
            verdict.unfenced.0,
            verdict.runs,
            verdict.recorded,
            verdict.gaps,
            verdict.permit_guards,
            verdict.longest_without_owner.as_secs_f64(),
            match verdict.without_owner_during.join(", ") {
                none if none.is_empty() => "no fault".to_owned(),
                faults => format!("during {faults}"),
            },
            verdict.owner_after.as_secs_f64(),
            self.plan.seed,
            if self.held() { "held" } else { "BROKEN" },
        )
    }
}

/// After the faults there is an owner when the lease of a dead one has run out, the slowest back-off of
/// those that wait has passed, and a hand-over that nobody claims is void; and a machine that does other
/// things as well has had its time.
pub fn owner_within(ground: Ground) -> Duration {
    let lease = ground.lease();
    let back_off = lease.ttl() / 2;
    let poll = Duration::from_secs(1);
    let claim = contend::backend::CLAIM_TIME;
    lease.total() + back_off + poll + claim + Duration::from_secs(4)
}

/// Runs a campaign.
pub fn run(plan: &Plan) -> Outcome {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!(
        "campaign-{}-{}{}",
        plan.ground,
        plan.seed,
        plan.plant
            .map_or(String::new(), |bug| format!("-{}", bug.name())),
    ));
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).expect("a folder for the journals");
    let journal = Journal::open(&folder.join("nemesis.log")).expect("a journal");
    let registers = RegisterServer::start();
    let stage = Stage::start(plan.ground, plan.processes);
    // The logs of servers have wall-clock times.
    journal.remark(&format!(
        "wall clock {:?}",
        SystemTime::now().duration_since(UNIX_EPOCH)
    ));
    let (servers, places) = stage.replicated();
    let watch = Watch::new(servers, &journal);
    watch.during(places, || {
        torment(plan, &stage, &registers, (&folder, &journal));
    });
    let records = history::read(&folder).expect("the journals can be read");
    let verdict = checker::check(&records, &registers.chains(), &promise(plan.ground));
    if !verdict.violations.is_empty() {
        stage.keep_logs(&folder);
    }
    Outcome {
        plan: plan.clone(),
        verdict,
        folder,
    }
}

/// What is promised on a backend.
fn promise(ground: Ground) -> Promise {
    Promise {
        ttl: ground.lease().ttl(),
        owner_within: owner_within(ground),
        contended: [LED, LOCKED, SECOND].map(str::to_owned).to_vec(),
        led: LED.to_owned(),
        period: Some(PERIOD),
        runs_by_wall_clock: matches!(ground, Ground::Zk | Ground::ZkEnsemble),
        capacities: SEMAPHORES
            .map(|(name, capacity)| (name.to_owned(), u64::from(capacity)))
            .into(),
    }
}

/// Starts processes, lets the faults come, and stops the processes when they have recovered.
fn torment(
    plan: &Plan,
    stage: &Stage,
    registers: &RegisterServer,
    (folder, journal): (&Path, &Journal),
) {
    let fleet = Fleet::start(
        stage,
        registers,
        folder,
        journal,
        (plan.processes, plan.seed, plan.plant),
    );
    // In the quiet first everybody finds its place.
    thread::sleep(plan.ground.lease().ttl());
    let end = Instant::now() + plan.lasts;
    thread::scope(|scope| {
        scope.spawn(|| torment_servers(plan, (stage, registers), journal, end));
        // For a bug that shows in a moment between two healthy processes, they are left alone.
        if plan.plant == Some(Bug::LeaseFromReply) {
            return;
        }
        scope.spawn(|| torment_processes(plan, (&fleet, registers), journal, end));
    });
    stage.heal();
    journal.write(&Record::Healed { at: now() });
    let within = owner_within(plan.ground);
    if plan.plant.is_none() {
        thread::sleep(within.min(plan.ground.lease().total() * 2 + Duration::from_secs(2)));
    }
    fleet.stop();
    drop(fleet);
    if let Err(what) = stage.permits_are_back() {
        journal.write(&Record::Misbehaved { what });
    }
}

/// The process that most likely owns one of the mutexes.
fn aim(registers: &RegisterServer, random: &mut StdRng) -> Option<usize> {
    let mutex = [LED, LED, LOCKED][random.random_range(0..3)];
    registers.last_reader(&format!("fenced-{mutex}"))
}

/// Faults of servers and network, one after the other.
fn torment_servers(
    plan: &Plan,
    (stage, registers): (&Stage, &RegisterServer),
    journal: &Journal,
    end: Instant,
) {
    let mut random = StdRng::seed_from_u64(plan.seed);
    let faults = plan.ground.faults();
    let weight: u32 = faults.iter().map(|(_, weight)| weight).sum();
    while Instant::now() < end && weight > 0 {
        let mut roll = random.random_range(0..weight);
        let fault = faults
            .iter()
            .find_map(|(fault, weight)| {
                if roll < *weight {
                    return Some(*fault);
                }
                roll -= weight;
                None
            })
            .unwrap_or(Fault::Cut);
        let fault = match plan.plant.and_then(Bug::provoked_by) {
            Some(provoking) if random.random_range(0..3) > 0 => provoking,
            _ => fault,
        };
        journal.remark(&format!("begins {}", fault.name()));
        let begin = now();
        if let Some(hit) = stage.suffer(fault, aim(registers, &mut random), &mut random) {
            journal.write(&Record::Fault {
                kind: fault.name().to_owned(),
                fence_only: fault.is_fence_only(),
                mutex: match hit {
                    Hit::All => None,
                    Hit::Mutex(mutex) => Some(mutex.to_owned()),
                },
                begin,
                end: now(),
            });
        }
        thread::sleep(Duration::from_millis(random.random_range(50..900)));
    }
}

/// Faults of processes, at the same time.
fn torment_processes(
    plan: &Plan,
    (fleet, registers): (&Fleet<'_>, &RegisterServer),
    journal: &Journal,
    end: Instant,
) {
    let mut random = StdRng::seed_from_u64(plan.seed ^ 0x5eed);
    let total = u64::try_from(plan.ground.lease().total().as_millis()).unwrap_or(u64::MAX);
    while Instant::now() < end {
        let mut victim = random.random_range(0..fleet.len());
        if random.random_range(0..2) == 0 {
            victim = aim(registers, &mut random).unwrap_or(victim);
        }
        let ms = |random: &mut StdRng, from: u64, to: u64| {
            Duration::from_millis(random.random_range(from..to))
        };
        let begin = now();
        let memory = plan.ground == Ground::Memory;
        let kind = match random.random_range(0..10) {
            0..3 => {
                let down = ms(&mut random, 0, total);
                fleet.kill(victim, down);
                if memory { "restart" } else { "kill" }
            }
            3..7 if !memory => {
                let pause = ms(&mut random, total / 2, total * 3 / 2);
                fleet.pause(victim, pause);
                "pause"
            }
            7.. if !memory => {
                let offset = [3_600, -3_600, 0, 15, -15][random.random_range(0..5)];
                fleet.step_clock(victim, offset);
                "clock-step"
            }
            _ => {
                thread::sleep(ms(&mut random, 100, 1_000));
                continue;
            }
        };
        journal.write(&Record::Fault {
            kind: kind.to_owned(),
            fence_only: false,
            mutex: None,
            begin,
            end: now(),
        });
        thread::sleep(ms(&mut random, 200, 1_500));
    }
}
