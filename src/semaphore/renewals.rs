//! What a factory's guards hold: renewed in batches, by the factory's `Background`.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded};
use parking_lot::Mutex;

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
        list.kept.insert(number, kept);
        match list.entry {
            Some(entry) => background.hasten(entry, due),
            None => match background.add(Arc::clone(self) as Arc<dyn Renewable>, due) {
                Ok(entry) => list.entry = Some(entry),
                Err(error) => {
                    list.kept.remove(&number);
                    return Err(error);
                }
            },
        }
        Ok(number)
    }

    pub(super) fn remove(&self, number: u64) {
        self.list.lock().kept.remove(&number);
    }

    /// Ends the belief of those whose time has passed, and takes what is due.
    fn take(&self) -> Vec<(u64, Arc<Keep>)> {
        let mut list = self.list.lock();
        let now = Moment::now();
        list.kept.retain(|_, kept| {
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
        let due = list.kept.iter().filter(|(_, kept)| kept.due <= now);
        let mut due: Vec<(u64, Arc<Keep>)> = due
            .map(|(number, kept)| (*number, Arc::clone(&kept.keep)))
            .collect();
        // Those that end first come first.
        due.sort_by_key(|(_, keep)| keep.until());
        due.truncate(BATCH);
        due
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
        let mut list = self.list.lock();
        for kept in std::mem::take(&mut list.kept).into_values() {
            kept.keep.end();
        }
        list.entry = None;
    }
}
