//! One ownership of a locker, from the grant to the release.

use super::holding::Holding;
use super::rota::Due;
use crate::backend::Seat;
use crate::clock::Moment;
use crate::contention::{Change, Contention, Step};

pub(super) struct Cycle {
    pub(super) contention: Contention,
    pub(super) fence: u64,
    /// From here on the lease is left to run out.
    pub(super) renew_until: Moment,
    /// Whether the last renewal failed.
    pub(super) failed: bool,
    /// Where the renewer's list has this.
    pub(super) due: Option<Due>,
}

impl Cycle {
    /// Drives an ownership on, by one call at most. `None`: it is over.
    pub(super) fn advance(
        &mut self,
        of: &Holding,
        seat: &mut Box<dyn Seat>,
        others: Moment,
    ) -> Option<Due> {
        loop {
            match of.decide(&mut self.contention, Contention::step) {
                Step::Announce(Change::Released(_)) => {
                    log::warn!(
                        "{}: {} lost the lock: not renewed in time, or taken away",
                        of.place().mutex,
                        of.place().id
                    );
                    of.loss().tell();
                    return None;
                }
                Step::Announce(_) => {}
                Step::Renew { fence, by } => {
                    let sent = Moment::now();
                    let (until, _) = self.contention.belief()?;
                    if self.renew_until <= sent {
                        return Some(of.due(until, until, false));
                    }
                    let renewal = of.note(seat.renew(fence, by.min(others)));
                    self.failed = renewal.is_err();
                    of.decide(&mut self.contention, |contention, now| {
                        contention.renewed(sent, now, renewal.ok(), rand::random());
                    });
                }
                Step::Wait { until: at } => {
                    let (until, _) = self.contention.belief()?;
                    return Some(of.due(at, until, self.failed));
                }
                // Only what does not own acquires or releases, and losing has ended this above.
                _ => return None,
            }
        }
    }
}
