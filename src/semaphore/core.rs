//! What all handles on the semaphores of one database share.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use super::batch::Held;
use super::combine::Lanes;
use super::keeper::Keeper;
use super::store::Store;
use super::wait::WaitList;

/// Requests beyond this number are released without sharing a transaction.
const MAX_HOLDINGS: usize = 100_000;

/// Dropped from top to bottom: first the thread that uses the store.
#[derive(Debug)]
pub(super) struct Core {
    pub(super) keeper: Keeper,
    pub(super) lanes: Lanes,
    pub(super) waiting: WaitList,
    pub(super) holdings: Holdings,
    pub(super) store: Arc<Store>,
}

impl Core {
    pub(super) fn new(store: Arc<Store>) -> Core {
        Core {
            keeper: Keeper::new(Arc::clone(&store)),
            lanes: Lanes::default(),
            waiting: WaitList::default(),
            holdings: Holdings::default(),
            store,
        }
    }
}

/// What this process acquired and did not release: so that a release knows its semaphores, and can
/// share a transaction, without asking. Only a memory of what never changes: what is held, the tables say.
#[derive(Debug, Default)]
pub(super) struct Holdings {
    held: Mutex<HashMap<Arc<str>, Arc<Held>>>,
}

impl Holdings {
    pub(super) fn add(&self, external_id: &Arc<str>, held: Held) {
        let mut all = self.held.lock();
        if all.len() < MAX_HOLDINGS {
            all.insert(Arc::clone(external_id), Arc::new(held));
        }
    }

    pub(super) fn get(&self, external_id: &str) -> Option<Arc<Held>> {
        self.held.lock().get(external_id).map(Arc::clone)
    }

    pub(super) fn remove(&self, external_id: &str) {
        self.held.lock().remove(external_id);
    }
}
