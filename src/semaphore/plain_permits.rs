//! What this process acquired without a guard, and a probe counts, until this process learns of its end.

use std::collections::BTreeMap;
use std::process;
use std::sync::Arc;

use parking_lot::Mutex;

use super::semaphores::SharedSemaphores;
use crate::backend::permit_store::Held;
use crate::probe::Probed;

/// More requests than this are not counted: of what others release nothing is heard here, and it must not fill
/// the memory.
const MOST: usize = 10_000;

/// The process too: a forked child has the parent's memory, and acquired nothing of it.
type Key = (u32, String, Arc<str>);

/// By the realm of their store and their external id, as any factory of the process may release them.
static COUNTED: Mutex<BTreeMap<Key, Counted>> = Mutex::new(BTreeMap::new());

/// Permits that a probe was told of.
struct Counted {
    probe: Probed,
    permits: Vec<(Arc<str>, u32)>,
}

impl Counted {
    fn tell(&self, sign: i64) {
        for (name, count) in &self.permits {
            self.probe
                .tell(|probe| probe.permits(name, sign * i64::from(*count)));
        }
    }
}

impl SharedSemaphores {
    /// Counts permits that this process acquired without a guard.
    pub(super) fn count_plain(&self, held: &Held) {
        if !self.probe.is_some() {
            return;
        }
        // What was counted under the id before has ended: it could not be acquired otherwise.
        self.uncount_plain(&held.external_id);
        let permits = held.permits.iter();
        let new = Counted {
            probe: self.probe.clone(),
            permits: permits
                .map(|it| (Arc::clone(&it.semaphore), it.count))
                .collect(),
        };
        // Before it is in the list, where its end may be told.
        new.tell(1);
        let mut counted = COUNTED.lock();
        let refused = match counted.len() < MOST {
            true => counted.insert(self.key(&held.external_id), new),
            false => Some(new),
        };
        drop(counted);
        if let Some(refused) = refused {
            refused.tell(-1);
        }
    }

    /// Whatever this process acquired without a guard under an external id has ended, or is a guard's now.
    pub(super) fn uncount_plain(&self, external_id: &Arc<str>) {
        let ended = {
            let mut counted = COUNTED.lock();
            match counted.is_empty() {
                true => None,
                false => counted.remove(&self.key(external_id)),
            }
        };
        if let Some(ended) = ended {
            ended.tell(-1);
        }
    }

    fn key(&self, external_id: &Arc<str>) -> Key {
        let realm = self.store.realm().to_owned();
        (process::id(), realm, Arc::clone(external_id))
    }
}
