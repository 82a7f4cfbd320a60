//! The conditions of one schedule, drawn from its dice.

use std::time::Duration;

use contend::Lease;

use crate::clock::{Clock, MS, True, millis, nanos};
use crate::dice::Dice;
use crate::plant::Plant;

pub struct Plan {
    /// One lease per process.
    pub leases: Vec<Lease>,
    pub clocks: Vec<Clock>,
    pub server: Clock,
    /// When faults end, and when the last message sent before that has arrived.
    pub faults_end: True,
    pub calm: True,
    /// How likely each fault is, out of a thousand.
    pub loss: u64,
    pub duplication: u64,
    pub lateness: u64,
    pub failure: u64,
    /// A pause at one of the driver's weak spots.
    pub pause: u64,
    /// Times in which nothing passes between one process (or all) and the backend.
    pub outages: Vec<Outage>,
    /// The backend's habits.
    pub habits: Habits,
    /// The driver knows its end itself, as a ZooKeeper session does, instead of counting from the send.
    pub session: bool,
}

pub struct Outage {
    pub process: Option<usize>,
    pub from: True,
    pub to: True,
}

/// What the contract leaves open, and real servers do differently.
#[derive(Clone, Copy, Debug)]
pub struct Habits {
    /// A statement sees the clock as it was when it arrived, and may wait for a lock after that.
    pub frozen_clock: bool,
    /// A lease still counts in its last millisecond.
    pub keeps_last_ms: bool,
    /// A lease that ran out and was not taken since can still be renewed (a row, not a key).
    pub revives: bool,
    /// How long a freed mutex is kept for the waiter that was woken; 0: not at all.
    pub claim_ms: u64,
}

impl Plan {
    pub fn draw(dice: &mut Dice, plant: Plant) -> Plan {
        let processes = dice.pick(&[2, 2, 3, 3, 4]);
        let common = lease(dice);
        let mixed = dice.chance(250);
        let leases: Vec<Lease> = (0..processes)
            .map(|_| match mixed {
                true => lease_like(dice, common),
                false => common,
            })
            .collect();
        // Rates in hundreds of ppm, so that the edge is met exactly: the server within 0.5% of true
        // time, every local clock within 1% of the server's, which is what the allowance covers.
        let inside = 995_000 + 100 * dice.below(101);
        let server = Clock {
            offset: 1_700_000_000_000 * MS + dice.below(1_000 * MS),
            rate: dice.pick(&[995_000, 1_000_000, 1_005_000, inside]),
            from: 0,
        };
        let clocks = (0..processes)
            .map(|_| {
                let ratio = match dice.below(4) {
                    0 | 1 if plant == Plant::DriftsTooFar => 989_000,
                    0 | 1 => 990_000,
                    2 => 1_010_000,
                    _ => dice.between(991_000, 1_009_000),
                };
                Clock {
                    offset: dice.between(1, 1_000_000) * MS + dice.below(MS),
                    rate: server.rate * ratio / 1_000_000,
                    from: 0,
                }
            })
            .collect();
        let totals = leases.iter().map(|lease| nanos(lease.total()));
        let longest = totals.max().unwrap_or(0);
        let faults_end = longest * dice.between(2, 5) + dice.below(longest);
        let harsh = dice.pick(&[0, 1, 1, 2]);
        let mut rate = |soft: u64, hard: u64| match harsh {
            0 => 0,
            1 => dice.below(soft + 1),
            _ => dice.below(hard + 1),
        };
        let (loss, duplication, lateness) = (rate(60, 300), rate(120, 300), rate(120, 300));
        let (failure, pause) = (rate(40, 150), rate(30, 80));
        let outages = (0..dice.pick(&[0, 0, 1, 1, 2]))
            .map(|_| {
                let from = dice.below(faults_end);
                Outage {
                    process: dice.chance(700).then(|| dice.below(processes) as usize),
                    from,
                    to: from + dice.below(longest * 2),
                }
            })
            .collect();
        let ttls = leases.iter().map(|lease| millis(lease.ttl()));
        let shortest = ttls.min().unwrap_or(0);
        Plan {
            calm: faults_end + longest / 4,
            habits: Habits {
                frozen_clock: dice.chance(500),
                keeps_last_ms: dice.chance(500),
                revives: dice.chance(300),
                claim_ms: dice.pick(&[0, 1 + shortest / 8, 1 + shortest / 2]),
            },
            session: dice.chance(200),
            leases,
            clocks,
            server,
            faults_end,
            loss,
            duplication,
            lateness,
            failure,
            pause,
            outages,
        }
    }

    pub fn shortest_ttl(&self) -> u64 {
        let ttls = self.leases.iter().map(|lease| nanos(lease.ttl()));
        ttls.min().unwrap_or(0)
    }

    pub fn longest_ttl(&self) -> u64 {
        let ttls = self.leases.iter().map(|lease| nanos(lease.ttl()));
        ttls.max().unwrap_or(0)
    }

    pub fn longest_total(&self) -> u64 {
        let totals = self.leases.iter().map(|lease| nanos(lease.total()));
        totals.max().unwrap_or(0)
    }

    /// How long after the calm has begun some process must own at the latest, with `ids` contenders that
    /// ever stood in the queue. The parts: the longest lease that a dead contender may have left, the
    /// mutex offered in vain to every dead waiter, the longest pause after failures, one call that
    /// began before the calm and the way out of a contender that was stopping then.
    pub fn patience(&self, ids: u64) -> u64 {
        let jitter = (self.longest_ttl() / 20).min(50 * MS);
        let backoff = (self.longest_ttl() / 2).clamp(100 * MS, 5_000 * MS);
        let calls = 2 * (self.longest_ttl() / 4);
        let claims = ids * (self.habits.claim_ms * MS + jitter + self.shortest_ttl() / 16);
        (self.longest_total() + claims + jitter + backoff + calls) * 103 / 100
    }

    pub fn is_cut(&self, process: usize, now: True) -> bool {
        self.outages.iter().any(|outage| {
            outage.process.is_none_or(|only| only == process)
                && (outage.from..outage.to).contains(&now)
                && now < self.faults_end
        })
    }
}

/// Long and short ones, with no transition, with one shorter than the allowance for drift, just as
/// long, and longer.
fn lease(dice: &mut Dice) -> Lease {
    loop {
        let ttl = match dice.below(4) {
            0 => dice.between(20, 60),
            1 => dice.between(60, 400),
            2 => dice.between(400, 3_000),
            _ => dice.between(3_000, 10_000),
        };
        let allowance = ttl / 100 + 5;
        let transition = match dice.below(5) {
            0 => 0,
            1 => dice.below(allowance),
            2 => allowance,
            3 => dice.between(allowance, ttl),
            _ => ttl * 6 / 10,
        };
        let ms = Duration::from_millis;
        if let Ok(lease) = Lease::new(ms(ttl), ms(transition)) {
            return lease;
        }
    }
}

/// Another one, near enough in length for both to matter in one schedule.
fn lease_like(dice: &mut Dice, other: Lease) -> Lease {
    loop {
        let drawn = lease(dice);
        if drawn.ttl() <= other.ttl() * 3 && other.ttl() <= drawn.ttl() * 3 {
            return drawn;
        }
    }
}
