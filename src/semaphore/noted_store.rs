//! `NotedStore`: a store whose calls count for the health of its factory, as those of lockers do.

use std::sync::Arc;
use std::time::Duration;

use crate::backend::permit_store::{
    Call, CapacityChange, Decision, Discrepancy, Failure, Held, HeldPermit, Holder, PermitRenewal,
    PermitStore, Release, Renewed, RequestStatus, StoreTime, Sweep, Swept, Usage,
};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::snapshot::Snapshot;

/// Around the store, and not at its callers: a renewal, a clean-up and a call that its caller has given up on are
/// noted like any other.
#[derive(Debug)]
pub(super) struct NotedStore {
    pub(super) store: Arc<dyn PermitStore>,
    pub(super) snapshot: Arc<Snapshot>,
}

impl NotedStore {
    fn note<T>(&self, call: impl FnOnce(&dyn PermitStore) -> Result<T>) -> Result<T> {
        let sent = Moment::now();
        let outcome = call(&*self.store);
        self.settle(sent, outcome.as_ref().err());
        outcome
    }

    fn settle(&self, sent: Moment, error: Option<&Error>) {
        let failed = error.filter(|error| !is_answer(error));
        self.snapshot.note_call(sent, failed.map_or(Ok(true), Err));
    }
}

/// Returns `true` if the server has said so.
fn is_answer(error: &Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::NotFound | ErrorKind::Conflict | ErrorKind::InvalidState
    )
}

impl PermitStore for NotedStore {
    fn realm(&self) -> &str {
        self.store.realm()
    }
    fn patience(&self) -> Duration {
        self.store.patience()
    }
    fn min_ttl(&self) -> Duration {
        self.store.min_ttl()
    }
    fn poll_interval(&self) -> Duration {
        self.store.poll_interval()
    }
    fn create_tables(&self, by: Moment) -> Result<()> {
        self.note(|store| store.create_tables(by))
    }
    fn create(&self, name: &str, capacity: u32, by: Moment) -> Result<bool> {
        self.note(|store| store.create(name, capacity, by))
    }
    fn set_capacity(
        &self,
        name: &str,
        capacity: u32,
        changed_by: Option<&str>,
        by: Moment,
    ) -> Result<u32> {
        self.note(|store| store.set_capacity(name, capacity, changed_by, by))
    }
    fn history(&self, name: &str, by: Moment) -> Result<Vec<CapacityChange>> {
        self.note(|store| store.history(name, by))
    }
    fn delete(&self, name: &str, by: Moment) -> Result<bool> {
        self.note(|store| store.delete(name, by))
    }
    fn usage(&self, name: Option<&str>, by: Moment) -> Result<Vec<Usage>> {
        self.note(|store| store.usage(name, by))
    }
    fn holders(&self, name: &str, by: Moment) -> Result<Vec<Holder>> {
        self.note(|store| store.holders(name, by))
    }
    fn status(&self, external_id: &str, by: Moment) -> Result<Option<RequestStatus>> {
        self.note(|store| store.status(external_id, by))
    }
    fn acquire(&self, call: &Arc<Call>, by: Moment) -> Result<Decision, Failure> {
        let sent = Moment::now();
        let outcome = self.store.acquire(call, by);
        self.settle(sent, outcome.as_ref().err().map(|failure| &failure.error));
        outcome
    }
    fn renew(&self, held: &[Arc<Held>], by: Moment) -> Result<Vec<Renewed>> {
        self.note(|store| store.renew(held, by))
    }
    fn release(&self, held: &Arc<Held>, by: Moment) -> Result<bool> {
        self.note(|store| store.release(held, by))
    }
    fn release_part(
        &self,
        held: &Held,
        permit: &HeldPermit,
        left: u32,
        by: Moment,
    ) -> Result<bool> {
        self.note(|store| store.release_part(held, permit, left, by))
    }
    fn release_request(&self, external_id: &str, by: Moment) -> Result<Release> {
        self.note(|store| store.release_request(external_id, by))
    }
    fn renew_request(&self, external_id: &str, by: Moment) -> Result<PermitRenewal> {
        self.note(|store| store.renew_request(external_id, by))
    }
    fn bury(&self, external_id: &str, tokens: &[u64], by: Moment) -> Result<bool> {
        self.note(|store| store.bury(external_id, tokens, by))
    }
    fn sweep(&self, sweep: &Sweep, by: Moment) -> Result<Vec<Swept>> {
        self.note(|store| store.sweep(sweep, by))
    }
    fn owners(&self, by: Moment) -> Result<(Vec<Arc<str>>, StoreTime)> {
        self.note(|store| store.owners(by))
    }
    fn delete_requests(&self, age: Duration, batch: usize, by: Moment) -> Result<u64> {
        self.note(|store| store.delete_requests(age, batch, by))
    }
    fn delete_history(&self, age: Duration, batch: usize, by: Moment) -> Result<u64> {
        self.note(|store| store.delete_history(age, batch, by))
    }
    fn check(&self, by: Moment) -> Result<Vec<Discrepancy>> {
        self.note(|store| store.check(by))
    }
    fn repair(&self, by: Moment) -> Result<Vec<Discrepancy>> {
        self.note(|store| store.repair(by))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lease::Lease;
    use crate::memory;

    #[test]
    fn what_was_answered_is_no_trouble_and_ends_it() {
        let factory = memory::factory("noted", Lease::default());
        let snapshot = Arc::<Snapshot>::default();
        let store = NotedStore {
            store: factory.inner().unwrap().backend.permits().unwrap(),
            snapshot: Arc::clone(&snapshot),
        };
        let by = Moment::FAR;
        let fails = || {
            memory::handle("noted").set_unreachable(true);
            store.usage(None, by).unwrap_err();
            memory::handle("noted").set_unreachable(false);
            assert!(snapshot.failed_call().is_some());
        };
        fails();
        store.create("a", 1, by).unwrap();
        assert!(snapshot.failed_call().is_none());
        fails();
        let missing = store.holders("none", by).unwrap_err();
        assert_eq!(missing.kind(), ErrorKind::NotFound);
        assert!(snapshot.failed_call().is_none());
    }
}
