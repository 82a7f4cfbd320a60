//! One thread for what must go on after a call has returned: renewing the permits of guards, and
//! making an end of requests whose outcome nobody could learn.
//!
//! It starts with the first of these and ends with the last handle on the semaphores.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::acquire::tombstone;
use super::record::Record;
use super::release::{Freed, release_alone, renew_all};
use super::store::{Store, explain, first};
use crate::bell::Bell;
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::fork::Origin;

/// So many permits are renewed with one statement.
const MAX_RENEWALS: usize = 200;

/// The pause after a failure.
const PAUSE: Duration = Duration::from_millis(250);

/// What a guard and the keeper both know about its permits.
#[derive(Debug)]
pub(super) struct Belief {
    /// Until when they are surely ours; `FAR` without a ttl, in the past once they are lost.
    until: Mutex<Moment>,
}

impl Belief {
    pub(super) fn new(ttl: Option<Duration>, sent: Moment) -> Belief {
        Belief {
            until: Mutex::new(ttl.map_or(Moment::FAR, |ttl| sent + believable(ttl))),
        }
    }

    pub(super) fn holds(&self) -> bool {
        Moment::now() < *self.until.lock()
    }

    fn renew(&self, until: Moment) {
        let mut current = self.until.lock();
        // A deadline once passed never revives.
        if Moment::now() < *current {
            *current = until.max(*current);
        }
    }

    fn lose(&self) {
        *self.until.lock() = Moment::from_origin(Duration::ZERO);
    }
}

/// A ttl less what two clocks may drift apart in it.
fn believable(ttl: Duration) -> Duration {
    ttl.saturating_sub(ttl / 100 + Duration::from_millis(5))
}

#[derive(Debug)]
struct Renewal {
    external_id: Arc<str>,
    ttl: Duration,
    due: Moment,
    belief: Arc<Belief>,
}

pub(super) struct Keeper {
    shared: Arc<Shared>,
    store: Arc<Store>,
    thread: Mutex<Option<JoinHandle<()>>>,
    origin: Origin,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// Rung when there is something new to do.
    bell: Bell,
    /// Signalled when a burial has ended.
    buried: Condvar,
}

#[derive(Default)]
struct State {
    renewals: HashMap<u64, Renewal>,
    next: u64,
    to_bury: HashSet<Arc<str>>,
    burying: Option<Arc<str>>,
}

impl Keeper {
    pub(super) fn new(store: Arc<Store>) -> Keeper {
        Keeper {
            shared: Arc::default(),
            store,
            thread: Mutex::new(None),
            origin: Origin::here(),
        }
    }

    /// Renews these permits at a third of their ttl until told to forget them.
    pub(super) fn keep(
        &self,
        external_id: &Arc<str>,
        ttl: Duration,
        belief: &Arc<Belief>,
    ) -> Result<u64> {
        self.start()?;
        let mut state = self.shared.state.lock();
        state.next += 1;
        let number = state.next;
        let renewal = Renewal {
            external_id: Arc::clone(external_id),
            ttl,
            due: Moment::now() + ttl / 3,
            belief: Arc::clone(belief),
        };
        state.renewals.insert(number, renewal);
        drop(state);
        self.shared.bell.waker().wake();
        Ok(number)
    }

    /// Renews these permits no more.
    pub(super) fn forget(&self, number: u64) {
        self.shared.state.lock().renewals.remove(&number);
    }

    /// Releases whatever was, or will be, acquired under this external id, as soon as it can.
    pub(super) fn bury(&self, external_id: &Arc<str>) {
        let mut state = self.shared.state.lock();
        state.to_bury.insert(Arc::clone(external_id));
        drop(state);
        if self.start().is_err() {
            log::warn!("no thread to release {external_id:?} later: a sweep has to do it");
        }
        self.shared.bell.waker().wake();
    }

    /// Somebody takes the external id up again: it is left alone from now on.
    pub(super) fn leave(&self, external_id: &str) {
        let mut state = self.shared.state.lock();
        while state.burying.as_deref() == Some(external_id) {
            self.shared.buried.wait(&mut state);
        }
        state.to_bury.remove(external_id);
    }

    fn start(&self) -> Result<()> {
        self.origin.check()?;
        let mut running = self.thread.lock();
        if running.is_some() {
            return Ok(());
        }
        let (shared, store) = (Arc::clone(&self.shared), Arc::clone(&self.store));
        let thread = thread::Builder::new()
            .name("contend-permits".to_owned())
            .spawn(move || shared.work(&store))
            .map_err(|error| {
                Error::new(
                    ErrorKind::Unavailable,
                    "the system has no thread left to renew permits on",
                )
                .with_source(error)
            })?;
        *running = Some(thread);
        Ok(())
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.shared.bell.stop();
        let thread = self.thread.lock().take();
        if let Some(thread) = thread
            && self.origin.is_here()
        {
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for Keeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Keeper")
    }
}

impl Shared {
    fn work(&self, store: &Store) {
        while !self.bell.is_stopped() {
            let well = self.renew(store) & self.bury_all(store);
            let next = {
                let state = self.state.lock();
                let due = state.renewals.values().map(|renewal| renewal.due);
                due.min().unwrap_or(Moment::FAR)
            };
            self.bell
                .wait(if well { next } else { Moment::now() + PAUSE });
        }
        // The last chance; what is left then is for the sweeps.
        if !self.bury_all(store) {
            let left = self.state.lock().to_bury.len();
            log::warn!("{left} requests could not be released: a sweep has to do it");
        }
    }

    /// Renews what is due; `false` if that failed.
    fn renew(&self, store: &Store) -> bool {
        let due: Vec<(u64, Arc<str>)> = {
            let state = self.state.lock();
            let now = Moment::now();
            let due = state.renewals.iter().filter(|(_, it)| it.due <= now);
            due.take(MAX_RENEWALS)
                .map(|(number, renewal)| (*number, Arc::clone(&renewal.external_id)))
                .collect()
        };
        if due.is_empty() {
            return true;
        }
        let ids: Vec<&Arc<str>> = due.iter().map(|(_, id)| id).collect();
        let sent = Moment::now();
        let lost = renew_all(store, &ids).and_then(|renewed| {
            if renewed == ids.len() as u64 {
                return Ok(HashSet::new());
            }
            let records = Record::parse(first(store.send_alone(&Record::statement(&ids))?)?)?;
            let held: HashSet<Arc<str>> = records
                .into_iter()
                .filter(|record| record.held)
                .map(|record| record.external_id)
                .collect();
            let lost = ids.iter().filter(|id| !held.contains(**id));
            Ok(lost.map(|id| Arc::clone(id)).collect())
        });
        let lost: HashSet<Arc<str>> = match lost {
            Ok(lost) => lost,
            Err(error) => {
                log::warn!("cannot renew {} permits: {error}", ids.len());
                return false;
            }
        };
        let mut state = self.state.lock();
        for (number, id) in &due {
            if lost.contains(id) {
                log::warn!("the permits of {id:?} were released while their guard held them");
                if let Some(renewal) = state.renewals.remove(number) {
                    renewal.belief.lose();
                }
            } else if let Some(renewal) = state.renewals.get_mut(number) {
                renewal.due = sent + renewal.ttl / 3;
                renewal.belief.renew(sent + believable(renewal.ttl));
            }
        }
        true
    }

    /// Makes an end of all that is to be buried; `false` if that failed.
    fn bury_all(&self, store: &Store) -> bool {
        loop {
            let id = {
                let mut state = self.state.lock();
                let Some(id) = state.to_bury.iter().next().cloned() else {
                    return true;
                };
                state.to_bury.remove(&id);
                state.burying = Some(Arc::clone(&id));
                id
            };
            let outcome = bury(store, &id);
            let mut state = self.state.lock();
            state.burying = None;
            self.buried.notify_all();
            if let Err(error) = outcome {
                log::warn!("cannot release {id:?} yet: {error}");
                // Who takes it up again waits in `leave`, and takes it out of here.
                state.to_bury.insert(id);
                return false;
            }
        }
    }
}

/// Releases what there is under this external id; where there is nothing, keeps it from coming.
fn bury(store: &Store, external_id: &str) -> Result<()> {
    loop {
        if release_alone(store, external_id)? == Freed::Yes {
            return Ok(());
        }
        let mut link = store.checkout()?;
        match store.send(&mut link, &tombstone(external_id, None)) {
            Ok(_) => return Ok(()),
            Err(fault) if fault.is_duplicate() => {}
            Err(fault) => return Err(explain(fault)),
        }
        drop(link);
        // It came while we looked, or was released before.
        match Record::read(store, external_id)? {
            Some(record) if record.held => {}
            _ => return Ok(()),
        }
    }
}
