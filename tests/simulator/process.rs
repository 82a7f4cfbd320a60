//! One process with one contender: what it holds in its memory, and what the monitor knows of it.

use std::time::Duration;

use contend::machine::contention::{Contention, Step};
use contend::{ContendPeriod, Lease, Moment};

use crate::clock::{Clock, True, nanos};
use crate::dice::Dice;
use crate::model::{Ask, Id};
use crate::monitor::Belief;

pub struct Process {
    pub clock: Clock,
    pub id: Id,
    pub lease: Lease,
    pub period: ContendPeriod,
    /// `None`: crashed, stopped, or not started yet.
    pub machine: Option<Contention>,
    pub doing: Doing,
    /// Counts over all incarnations, so that what belongs to an earlier one is known.
    pub calls: u32,
    /// The calls of earlier incarnations.
    pub old_calls: u32,
    pub timers: u32,
    pub woken: bool,
    pub listening: bool,
    pub stop_asked: bool,
    pub paused_until: True,
    // From here on: what the monitor knows of this process.
    pub belief: Option<Belief>,
    /// The highest fence of a belief that has ended.
    pub spent: u64,
    /// The fence with which Acquired was announced last, until Released is.
    pub announced: Option<u64>,
    /// The fence announced last, Released or not.
    pub last_announced: u64,
    /// When belief had ended at the latest.
    pub due: True,
    /// Whether the last belief ended by its deadline.
    pub timed_out: bool,
    /// The send time and the fence of the last grant that the driver was told of.
    pub granted: Option<(Moment, u64)>,
    /// A grant that the machine was told of, until it is announced or given back.
    pub untold: Option<u64>,
    /// The fence of the last renewal, if it failed.
    pub failed_renewal: Option<u64>,
    /// The fence of the last release.
    pub last_release: Option<u64>,
    pub woken_at: Option<True>,
    /// The backend's last word was that this contender owns nothing.
    pub refused: bool,
    /// Told to stop in the calm, with nothing sent before that still under way.
    pub stops_clean: bool,
    /// What must be left of the transition when belief ends, whatever the clocks do.
    pub wind_down: u64,
}

#[derive(Clone, Debug)]
pub enum Doing {
    /// About to ask for the next step.
    Ready,
    /// About to do a step that was decided before.
    Decided(Step),
    Calling(Call),
    Waiting,
    Nothing,
}

#[derive(Clone, Copy, Debug)]
pub struct Call {
    pub number: u32,
    pub ask: Ask,
    pub sent: Moment,
}

impl Process {
    pub fn new(id: Id, clock: Clock, lease: Lease, dice: &mut Dice) -> Process {
        let mut process = Process {
            clock,
            id,
            lease,
            period: ContendPeriod::new(lease),
            machine: None,
            doing: Doing::Nothing,
            calls: 0,
            old_calls: 0,
            timers: 0,
            woken: false,
            listening: false,
            stop_asked: false,
            paused_until: 0,
            belief: None,
            spent: 0,
            announced: None,
            last_announced: 0,
            due: 0,
            timed_out: false,
            granted: None,
            untold: None,
            failed_renewal: None,
            last_release: None,
            woken_at: None,
            refused: false,
            stops_clean: false,
            wind_down: 0,
        };
        process.set_lease(lease, dice);
        process
    }

    /// With a renewal as early as by default, or anywhere up to the latest allowed.
    pub fn set_lease(&mut self, lease: Lease, dice: &mut Dice) {
        self.lease = lease;
        self.period = ContendPeriod::new(lease);
        if dice.chance(400) {
            let latest = nanos(lease.belief() - lease.call_budget());
            let after = Duration::from_nanos(dice.between(latest / 10, latest));
            self.period = self.period.renew_after(after).expect("within its bounds");
        }
        // What the lease allows two clocks to drift apart.
        let allowance = lease.total() / 100 + Duration::from_millis(5);
        self.wind_down = nanos(lease.transition().saturating_sub(allowance));
    }
}
