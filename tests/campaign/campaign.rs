//! One campaign: processes on a backend, a nemesis, and the verdict on what they wrote down.

use std::fmt;
use std::fs;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::checker::{self, Promise, Rule, Verdict};
use crate::contender::{LED, LOCKED, PERIOD, PERMIT_TTL, SECOND, SEMAPHORES};
use crate::fleet::Fleet;
use crate::ground::{Fault, Ground};
use crate::history::{self, ALL, Journal, Kind, Record, now};
use crate::masters::Watch;
use crate::planted::Bug;
use crate::register::RegisterServer;
use crate::stage::Stage;

/// What is to be done.
#[derive(Clone, Debug)]
pub struct Plan {
    pub ground: Ground,
    /// How long faults come.
    pub lasts: Duration,
    /// Decides what the nemesis does and what the contenders do. Real processes on a real machine make of it what they
    /// will: the same seed is the same plan, not the same history.
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
    /// Whether all rules held.
    pub fn held(&self) -> bool {
        self.verdict.violations.is_empty()
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (plan, it) = (&self.plan, &self.verdict);
        let plant = plan
            .plant
            .map_or(String::new(), |bug| format!(" with {} planted", bug.name()));
        let count: usize = it.faults.values().sum();
        let faults = it
            .faults
            .iter()
            .map(|(kind, count)| format!("{kind} {count}"));
        let faults = faults.collect::<Vec<_>>().join(", ");
        write!(
            f,
            "campaign {}{plant}: {} acquisitions ({} handed on), {count} faults ({faults}), ",
            plan.ground, it.acquisitions, it.handed_on,
        )?;
        write!(
            f,
            "{} overlaps ({} excused), {} violations in all, ",
            it.count(Rule::NoOverlap),
            it.excused,
            it.violations.len(),
        )?;
        write!(
            f,
            "fenced writes lost {} of {}, unfenced losses {} of {}, ",
            it.fenced.1, it.fenced.0, it.unfenced.1, it.unfenced.0,
        )?;
        write!(
            f,
            "{} scheduled runs ({} recorded, {} gaps judged), {} guards of permits, ",
            it.runs, it.recorded, it.gaps, it.permit_guards,
        )?;
        write!(
            f,
            "an owner {:.2} s after the faults, seed {}: {}",
            it.owner_after.as_secs_f64(),
            plan.seed,
            if self.held() { "held" } else { "BROKEN" },
        )
    }
}

/// After the faults there is an owner when the lease of a dead one has run out, the slowest back-off of those that wait
/// has passed, and a hand-over that no waiter claims is void; and a machine that does other things as well has had its
/// time.
pub fn owner_within(ground: Ground) -> Duration {
    let lease = ground.lease();
    let poll = Duration::from_secs(1);
    let claim = contend::backend::CLAIM_TIME;
    lease.total() + lease.ttl() / 2 + poll + claim + Duration::from_secs(4)
}

/// What is promised on a backend.
fn promise(ground: Ground) -> Promise {
    let capacities = SEMAPHORES.map(|(name, capacity)| (name.to_owned(), capacity.into()));
    Promise {
        ttl: ground.lease().ttl(),
        owner_within: owner_within(ground),
        contended: [LED, LOCKED, SECOND].map(str::to_owned).to_vec(),
        period: PERIOD,
        runs_by_wall_clock: matches!(ground, Ground::Zk | Ground::ZkEnsemble),
        capacities: capacities.into(),
        permit_ttl: PERMIT_TTL,
    }
}

/// Runs a campaign.
pub fn run(plan: &Plan) -> Outcome {
    let plant = plan.plant.map_or("", Bug::name);
    let name = format!("campaign-{}-{}{plant}", plan.ground, plan.seed);
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).expect("a folder for the journals");
    let journal = Journal::open(&folder.join("nemesis.log")).expect("a journal");
    let registers = RegisterServer::start();
    let stage = Stage::start(plan.ground, plan.processes);
    // The logs of servers have wall-clock times.
    let wall = SystemTime::now().duration_since(UNIX_EPOCH);
    journal.remark(&format!("wall clock {wall:?}"));
    let nemesis = Nemesis {
        plan,
        stage: &stage,
        registers: &registers,
        journal: &journal,
        end: Instant::now() + plan.ground.lease().ttl() + plan.lasts,
    };
    Watch::new(&stage, &journal).during(|| {
        let fleet = Fleet::start(plan, &stage, &registers, &folder, &journal);
        nemesis.torment(&fleet);
        fleet.stop();
        drop(fleet);
        if let Err(what) = stage.permits_are_back() {
            journal.misbehaved("semaphores", &what);
        }
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

/// Torments servers and processes at the same time.
struct Nemesis<'a> {
    plan: &'a Plan,
    stage: &'a Stage,
    registers: &'a RegisterServer,
    journal: &'a Journal,
    end: Instant,
}

fn ms(random: &mut StdRng, from: u64, to: u64) -> Duration {
    Duration::from_millis(random.random_range(from..to))
}

impl Nemesis<'_> {
    /// Lets the faults come, and waits until the processes have recovered.
    fn torment(&self, fleet: &Fleet<'_>) {
        let plan = self.plan;
        // In the quiet first all processes find their places.
        thread::sleep(plan.ground.lease().ttl());
        thread::scope(|scope| {
            scope.spawn(|| self.torment_servers());
            // That bug shows in a moment between two healthy processes, which are left alone.
            if plan.plant != Some(Bug::LeaseFromReply) {
                self.torment_processes(fleet);
            }
        });
        self.stage.heal();
        let healed = Record::new(Kind::Healed, "", "");
        self.journal.write(&healed.at(now()));
        if plan.plant.is_none() {
            let recovery = plan.ground.lease().total() * 2 + Duration::from_secs(2);
            thread::sleep(owner_within(plan.ground).min(recovery));
        }
    }

    /// The process that most likely owns one of the mutexes.
    fn aim(&self, random: &mut StdRng) -> Option<usize> {
        let mutex = [LED, LED, LOCKED][random.random_range(0..3)];
        self.registers.last_reader(&format!("fenced-{mutex}"))
    }

    fn draw(&self, random: &mut StdRng) -> Fault {
        if let Some(provoking) = self.plan.plant.and_then(Bug::provoked_by)
            && random.random_range(0..3) > 0
        {
            return provoking;
        }
        let faults = self.plan.ground.faults();
        let weight: u32 = faults.iter().map(|(_, weight)| weight).sum();
        let mut roll = random.random_range(0..weight);
        let drawn = faults.into_iter().find(|(_, weight)| {
            let found = roll < *weight;
            roll = roll.saturating_sub(*weight);
            found
        });
        drawn.expect("a roll below the sum").0
    }

    /// Faults of servers and network, one after the other.
    fn torment_servers(&self) {
        let mut random = StdRng::seed_from_u64(self.plan.seed);
        while Instant::now() < self.end {
            let (fault, aim) = (self.draw(&mut random), self.aim(&mut random));
            self.journal.remark(&format!("begins {fault:?}"));
            let begin = now();
            if let Some(hit) = self.stage.suffer(fault, aim, &mut random) {
                let kind = match fault.is_fence_only() {
                    true => Kind::FenceOnlyFault,
                    false => Kind::Fault,
                };
                let record = Record::new(kind, &fault.name(), hit).at(begin);
                self.journal.write(&record.until(now()));
            }
            thread::sleep(ms(&mut random, 50, 900));
        }
    }

    /// Faults of processes.
    fn torment_processes(&self, fleet: &Fleet<'_>) {
        let mut random = StdRng::seed_from_u64(self.plan.seed ^ 0x5eed);
        let ground = self.plan.ground;
        let total = u64::try_from(ground.lease().total().as_millis()).unwrap_or(u64::MAX);
        while Instant::now() < self.end {
            let mut victim = random.random_range(0..fleet.len());
            if random.random_range(0..2) == 0 {
                victim = self.aim(&mut random).unwrap_or(victim);
            }
            let begin = now();
            let memory = ground == Ground::Memory;
            let kind = match random.random_range(0..10) {
                0..3 => {
                    fleet.kill(victim, ms(&mut random, 0, total));
                    if memory { "restart" } else { "kill" }
                }
                3..7 if !memory => {
                    fleet.pause(victim, ms(&mut random, total / 2, total * 3 / 2));
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
            let record = Record::new(Kind::Fault, kind, ALL).at(begin);
            self.journal.write(&record.until(now()));
            thread::sleep(ms(&mut random, 200, 1_500));
        }
    }
}
