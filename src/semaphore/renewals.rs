//! What a factory's guards hold: renewed in batches, by the factory's `Background`.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded};
use parking_lot::{Mutex, MutexGuard};

use crate::backend::permit_store::{Held, PermitStore, Renewed};
use crate::background::{Background, Due, EntryId, Next, Renewable};
use crate::clock::Moment;
use crate::error::Result;
use crate::lease::Lease;

/// So many requests are renewed with one call.
const BATCH: usize = 200;

/// The longest call, however long the ttl.
const MAX_CALL: Duration = Duration::from_secs(5);

/// The shortest pause between two visits.
const REST: Duration = Duration::from_millis(5);

/// What a guard and the thread that renews it both know.
#[derive(Debug)]
pub(super) struct Keep {
    pub(super) lease: Lease,
    /// Who can be asked whether it is alive.
    pub(super) owner: Option<Arc<str>>,
    state: Mutex<Belief>,
    /// Disconnected by the loss.
    lost: Receiver<()>,
}

#[derive(Debug)]
struct Belief {
    held: Arc<Held>,
    /// Until when the permits are surely ours; in the past once they are lost.
    until: Moment,
    /// Dropped by the loss, and with the guard: every receiver hears that.
    alarm: Option<Sender<()>>,
}

impl Keep {
    pub(super) fn new(held: Held, owner: Option<Arc<str>>, lease: Lease, until: Moment) -> Keep {
        let (alarm, lost) = bounded(0);
        Keep {
            lease,
            owner,
            state: Mutex::new(Belief {
                held: Arc::new(held),
                until,
                alarm: Some(alarm),
            }),
            lost,
        }
    }

    pub(super) fn held(&self) -> Arc<Held> {
        Arc::clone(&self.state.lock().held)
    }

    pub(super) fn set_held(&self, held: Held) {
        self.state.lock().held = Arc::new(held);
    }

    pub(super) fn valid_for(&self) -> Duration {
        self.state.lock().until.remaining()
    }

    pub(super) fn until(&self) -> Moment {
        self.state.lock().until
    }

    pub(super) fn lost(&self) -> Receiver<()> {
        self.lost.clone()
    }

    /// Ends belief for good. Returns `true` the first time.
    pub(super) fn end(&self) -> bool {
        let mut belief = self.state.lock();
        belief.until = Moment::from_origin(Duration::ZERO);
        belief.alarm.take().is_some()
    }

    /// Extends belief; a deadline once passed never revives.
    fn renew(&self, until: Moment) -> bool {
        let mut belief = self.state.lock();
        let valid = Moment::now() < belief.until;
        if valid {
            belief.until = until.max(belief.until);
        }
        valid
    }
}

/// All permits that guards of a factory hold.
#[derive(Debug)]
pub(super) struct Renewals {
    store: Arc<dyn PermitStore>,
    list: Mutex<List>,
}

#[derive(Debug, Default)]
struct List {
    kept: HashMap<u64, Kept>,
    next: u64,
    /// The entry in the list of `Background`, while there is something to renew.
    entry: Option<EntryId>,
    /// That of `Telling`, likewise.
    telling: Option<EntryId>,
    /// The last call failed: one log line per change of trouble.
    troubled: bool,
}

#[derive(Debug)]
struct Kept {
    keep: Arc<Keep>,
    due: Moment,
    /// Its request was locked by somebody else.
    busy: bool,
}

impl List {
    /// Ends the belief of those whose time has passed.
    fn tell(&mut self, now: Moment) {
        self.kept.retain(|_, kept| {
            let valid = now < kept.keep.until();
            // Not where its belief was ended on purpose.
            if !valid && kept.keep.end() {
                log::warn!(
                    "the permits of {:?} could not be renewed in time: lost",
                    kept.keep.held().external_id
                );
            }
            valid
        });
    }

    fn due(&self, again: bool) -> Option<Due> {
        let at = self.kept.values().map(|kept| kept.due).min()?;
        let tell_by = self.kept.values().map(|kept| kept.keep.until()).min()?;
        let call = self.kept.values().map(|it| it.keep.lease.call_budget());
        Some(Due {
            at: at.max(Moment::now() + REST),
            tell_by: tell_by.max(Moment::now() + REST),
            again,
            call: call.min()?.min(MAX_CALL),
        })
    }
}

impl Renewals {
    pub(super) fn new(store: Arc<dyn PermitStore>) -> Renewals {
        Renewals {
            store,
            list: Mutex::default(),
        }
    }

    /// Renews `keep` at every third of its ttl until it is removed or lost.
    pub(super) fn add(
        self: &Arc<Renewals>,
        keep: &Arc<Keep>,
        background: &Background,
    ) -> Result<u64> {
        let mut list = self.list.lock();
        let number = list.next;
        list.next += 1;
        let belief = keep.valid_for().min(keep.lease.ttl());
        let kept = Kept {
            keep: Arc::clone(keep),
            due: Moment::now() + belief / 3,
            busy: false,
        };
        let due = Due {
            at: kept.due,
            tell_by: keep.until(),
            again: false,
            call: keep.lease.call_budget().min(MAX_CALL),
        };
        match list.entry {
            Some(entry) => background.hasten(entry, due),
            None => list.entry = Some(background.add(Arc::clone(self) as _, due)?),
        }
        let due = telling_due(due);
        match list.telling {
            Some(entry) => background.hasten(entry, due),
            None => {
                let telling = Arc::new(Telling(Arc::clone(self)));
                list.telling = Some(background.add(telling, due)?);
            }
        }
        list.kept.insert(number, kept);
        Ok(number)
    }

    pub(super) fn remove(&self, number: u64) {
        self.list.lock().kept.remove(&number);
    }

    /// Tells those whose time has passed, and takes what is due.
    fn take(&self) -> Vec<(u64, Arc<Keep>)> {
        let mut list = self.list.lock();
        let now = Moment::now();
        list.tell(now);
        let due = list.kept.iter().filter(|(_, kept)| kept.due <= now);
        let mut due: Vec<(u64, Arc<Keep>)> = due
            .map(|(number, kept)| (*number, Arc::clone(&kept.keep)))
            .collect();
        // Those that end first come first.
        due.sort_by_key(|(_, keep)| keep.until());
        due.truncate(BATCH);
        due
    }

    /// Ends the belief of all of them.
    fn end_all(&self) -> MutexGuard<'_, List> {
        let mut list = self.list.lock();
        for kept in std::mem::take(&mut list.kept).into_values() {
            kept.keep.end();
        }
        list
    }

    fn settle(&self, due: &[(u64, Arc<Keep>)], sent: Moment, outcome: &Result<Vec<Renewed>>) {
        let mut list = self.list.lock();
        match outcome {
            Ok(_) => list.troubled = false,
            Err(error) if !std::mem::replace(&mut list.troubled, true) => {
                log::warn!("cannot renew {} requests for permits: {error}", due.len());
            }
            Err(_) => {}
        }
        for (index, (number, keep)) in due.iter().enumerate() {
            let renewed = match outcome {
                Ok(renewed) => renewed.get(index).copied().unwrap_or(Renewed::Busy),
                Err(_) => Renewed::Busy,
            };
            let ttl = keep.lease.ttl();
            match renewed {
                Renewed::Yes if keep.renew(sent + keep.lease.belief()) => {
                    if let Some(kept) = list.kept.get_mut(number) {
                        kept.due = sent + ttl / 3;
                        kept.busy = false;
                    }
                }
                // Too late for belief: the guard gives back what it finds.
                Renewed::Yes | Renewed::Lost => {
                    keep.end();
                    if list.kept.remove(number).is_some() && renewed == Renewed::Lost {
                        log::warn!(
                            "the permits of {:?} were released or taken over while a guard held them",
                            keep.held().external_id
                        );
                    }
                }
                Renewed::Busy => {
                    if let Some(kept) = list.kept.get_mut(number) {
                        kept.due = Moment::now() + (ttl / 16).max(REST * 2);
                        if outcome.is_ok() && !std::mem::replace(&mut kept.busy, true) {
                            log::warn!(
                                "cannot renew the permits of {:?}: somebody has the request locked",
                                keep.held().external_id
                            );
                        }
                    }
                }
            }
        }
    }
}

/// Tells holders that their belief has ended, also while a call to renew hangs: without a call of its own,
/// and so on whichever thread of `Background` is free.
struct Telling(Arc<Renewals>);

/// When somebody must be told, if it is not renewed by then. It bounds no call of the others: most are renewed, and
/// a call that is cut short whenever one of many ends would renew none of the rest.
fn telling_due(due: Due) -> Due {
    Due {
        at: due.tell_by,
        tell_by: Moment::FAR,
        again: false,
        ..due
    }
}

impl Renewable for Telling {
    fn label(&self) -> String {
        self.0.label()
    }

    fn visit(&self, _: Moment) -> Next {
        let mut list = self.0.list.lock();
        list.tell(Moment::now());
        match list.due(false) {
            Some(due) => Next::At(telling_due(due)),
            None => {
                list.telling = None;
                Next::Over
            }
        }
    }

    fn panicked(&self) {
        self.0.end_all().telling = None;
    }
}

impl Renewable for Renewals {
    fn label(&self) -> String {
        format!("permits on {}", self.store.realm())
    }

    fn visit(&self, by: Moment) -> Next {
        let due = self.take();
        let mut failed = false;
        if !due.is_empty() {
            let held: Vec<Arc<Held>> = due.iter().map(|(_, keep)| keep.held()).collect();
            let sent = Moment::now();
            let outcome = self.store.renew(&held, by);
            failed = outcome.is_err();
            self.settle(&due, sent, &outcome);
        }
        let mut list = self.list.lock();
        match list.due(failed) {
            Some(due) => Next::At(due),
            None => {
                list.entry = None;
                Next::Over
            }
        }
    }

    fn panicked(&self) {
        self.end_all().entry = None;
    }
}

#[cfg(test)]
mod tests {
    use crossbeam_channel::RecvTimeoutError;

    use super::super::stand_in::{StandIn, stand_in};
    use super::*;
    use crate::backend::permit_store::Failure;
    use crate::error::{Error, ErrorKind};

    const PATIENCE: Duration = Duration::from_secs(10);

    /// An attack: those whose belief ended during a call that hung heard of it after that call, when the
    /// quarter of the ttl to stop in was almost over.
    #[test]
    fn a_call_that_hangs_keeps_nobody_from_being_told() {
        let StandIn { shared, let_go, .. } = stand_in(
            || Err(Failure::known(Error::new(ErrorKind::Unreachable, "away"))),
            false,
        );
        let ttl = Duration::from_millis(600);
        let lease = Lease::new(ttl, ttl / 4).unwrap();
        let keeps: Vec<Arc<Keep>> = (0..10)
            .map(|number| {
                let held = Held {
                    external_id: Arc::from(number.to_string()),
                    request_id: 1,
                    token: 1,
                    permits: Vec::new(),
                };
                // One ends after the other.
                let until = Moment::now() + ttl + Duration::from_millis(20) * number;
                let keep = Arc::new(Keep::new(held, None, lease, until));
                let background = &shared.factory.background;
                shared.renewals.add(&keep, background).unwrap();
                keep
            })
            .collect();
        for keep in &keeps {
            let told = keep.lost().recv_timeout(PATIENCE);
            assert_eq!(told, Err(RecvTimeoutError::Disconnected), "{keep:?}");
            assert!(keep.valid_for().is_zero());
        }
        drop(let_go);
    }
}
