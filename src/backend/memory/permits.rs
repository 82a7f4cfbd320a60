//! Semaphores in the memory of one process: the same rules as in the tables, behind one lock.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use super::mutexes::{Registry, now};
use crate::backend::permit_store::{
    CapacityChange, Grant, GrantId, Holder, Outcome, Permit, PermitStore, Purge, Reason,
    Recognised, Released, Renewed, Request, RequestStatus, StoreTime, Sweep, Swept, Usage, free,
    no_such_semaphore, reclaim_after, semaphore_in_use,
};
use crate::clock::Moment;
use crate::error::Result;

/// How often a waiting request looks for what another factory of this process released.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// The semaphores of one registry.
#[derive(Debug, Default)]
pub(super) struct Permits {
    state: Mutex<State>,
}

/// A handle of one factory on the semaphores of a registry.
#[derive(Debug)]
pub(super) struct MemoryPermits {
    realm: String,
    registry: Arc<Registry>,
}

#[derive(Debug, Default)]
struct State {
    semaphores: BTreeMap<Arc<str>, Semaphore>,
    requests: HashMap<Arc<str>, Record>,
    history: Vec<CapacityChange>,
    last_fence: u64,
}

#[derive(Debug)]
struct Semaphore {
    capacity: u32,
    used: i64,
}

/// What is known of a request.
#[derive(Debug)]
struct Record {
    token: u64,
    /// With the permits it holds; once released, those it held last.
    status: RequestStatus,
    created: Moment,
    /// The last renewal; once released, the release.
    updated: Moment,
}

impl Record {
    fn reclaim_at(&self) -> Option<Moment> {
        let ttl = self.status.ttl;
        ttl.map(|ttl| self.updated + reclaim_after(ttl))
    }

    fn is_reclaimable(&self, now: Moment) -> bool {
        self.reclaim_at().is_some_and(|at| at <= now)
    }

    fn status(&self) -> RequestStatus {
        let ttl = self.status.ttl.filter(|_| self.status.held);
        RequestStatus {
            expires_in: ttl.map(|ttl| self.updated + ttl - Moment::now()),
            ..self.status.clone()
        }
    }

    fn count_of(&self, semaphore: &str) -> u64 {
        let permits = self.status.permits.iter();
        let own = permits.filter(|it| *it.semaphore == *semaphore);
        own.map(|permit| u64::from(permit.count)).sum()
    }
}

impl State {
    fn next_fence(&mut self) -> u64 {
        // Never below the time, so that it grows across restarts.
        self.last_fence = (self.last_fence + 1).max(now().micros);
        self.last_fence
    }

    /// The capacity of a semaphore, and what is held of it.
    fn semaphore(&self, name: &str) -> Option<(u32, i64)> {
        let semaphore = self.semaphores.get(name);
        semaphore.map(|semaphore| (semaphore.capacity, semaphore.used))
    }

    fn held(&self) -> impl Iterator<Item = (&Arc<str>, &Record)> {
        self.requests.iter().filter(|(_, it)| it.status.held)
    }

    fn count(&mut self, permits: &[Permit], sign: i64) {
        for permit in permits {
            if let Some(semaphore) = self.semaphores.get_mut(&permit.semaphore) {
                semaphore.used += sign * i64::from(permit.count);
            }
        }
    }

    /// Releases what a request holds, if it holds anything.
    fn release(&mut self, external_id: &str) -> Vec<Permit> {
        let record = self.requests.get_mut(external_id);
        let Some(record) = record.filter(|record| record.status.held) else {
            return Vec::new();
        };
        record.status.held = false;
        record.updated = Moment::now();
        let permits = record.status.permits.clone();
        self.count(&permits, -1);
        permits
    }

    fn sweep(&mut self, reason: Reason, which: impl Fn(&Record) -> bool) -> Vec<Swept> {
        let found: Vec<(Arc<str>, Option<Arc<str>>)> = self
            .held()
            .filter(|(_, record)| which(record))
            .map(|(id, record)| (Arc::clone(id), record.status.owner.clone()))
            .collect();
        let swept = found.into_iter().map(|(external_id, owner)| Swept {
            permits: self.release(&external_id),
            external_id,
            owner,
            reason,
        });
        swept.collect()
    }

    fn acquire(&mut self, request: &Request, sent: Moment) -> Result<Outcome> {
        if let Some(record) = self.requests.get(&request.external_id) {
            let status = record.status();
            let remaining = status.expires_in;
            return Ok(match request.recognise(record.token, status)? {
                Recognised::Known(status) => Outcome::Known(status),
                Recognised::Own => {
                    let permits = record.status.permits.clone();
                    Outcome::Granted(self.grant(request, permits, sent, remaining))
                }
                Recognised::TakeOver => {
                    self.release(&request.external_id);
                    self.insert(request, sent)
                }
            });
        }
        Ok(match request.shortage(|name| self.semaphore(name))? {
            Some(exhausted) => Outcome::Exhausted(exhausted),
            None => self.insert(request, sent),
        })
    }

    fn insert(&mut self, request: &Request, sent: Moment) -> Outcome {
        let before = self.requests.remove(&request.external_id);
        let mut permits = Vec::with_capacity(request.permits.len());
        for (name, count) in &request.permits {
            permits.push(Permit {
                semaphore: Arc::clone(name),
                count: *count,
                fence: self.next_fence(),
            });
        }
        self.count(&permits, 1);
        let now = Moment::now();
        let status = RequestStatus {
            held: true,
            permits: permits.clone(),
            owner: request.owner.clone(),
            ttl: request.ttl,
            expires_in: None,
        };
        let record = Record {
            token: request.token,
            status,
            created: before.map_or(now, |record| record.created),
            updated: now,
        };
        self.requests
            .insert(Arc::clone(&request.external_id), record);
        Outcome::Granted(self.grant(request, permits, sent, request.ttl))
    }

    fn grant(
        &self,
        request: &Request,
        permits: Vec<Permit>,
        sent: Moment,
        remaining: Option<Duration>,
    ) -> Grant {
        Grant {
            permits,
            sent,
            remaining,
            free: request.free(|name| self.semaphore(name)),
        }
    }
}

impl MemoryPermits {
    pub(super) fn new(realm: String, registry: Arc<Registry>) -> MemoryPermits {
        MemoryPermits { realm, registry }
    }

    fn state(&self) -> Result<MutexGuard<'_, State>> {
        self.registry.reach().map(drop)?;
        Ok(self.registry.permits.state.lock())
    }
}

impl PermitStore for MemoryPermits {
    fn realm(&self) -> &str {
        &self.realm
    }

    fn min_ttl(&self) -> Duration {
        Duration::from_millis(100)
    }

    fn poll_interval(&self) -> Duration {
        POLL_INTERVAL
    }

    fn create_tables(&self, _by: Moment) -> Result<()> {
        self.registry.reach().map(drop)
    }

    fn create(&self, name: &str, capacity: u32, _by: Moment) -> Result<bool> {
        let mut state = self.state()?;
        if state.semaphores.contains_key(name) {
            return Ok(false);
        }
        let semaphore = Semaphore { capacity, used: 0 };
        state.semaphores.insert(Arc::from(name), semaphore);
        Ok(true)
    }

    fn set_capacity(
        &self,
        name: &str,
        capacity: u32,
        changed_by: Option<&str>,
        _by: Moment,
    ) -> Result<u32> {
        let mut state = self.state()?;
        let semaphore = state
            .semaphores
            .get_mut(name)
            .ok_or_else(|| no_such_semaphore(name))?;
        let old = std::mem::replace(&mut semaphore.capacity, capacity);
        if old != capacity {
            let change = CapacityChange {
                semaphore: Arc::from(name),
                changed_by: changed_by.map(Arc::from),
                changed_at: now().ms,
                from: old,
                to: capacity,
            };
            state.history.push(change);
        }
        Ok(old)
    }

    fn history(&self, name: &str, _by: Moment) -> Result<Vec<CapacityChange>> {
        let state = self.state()?;
        let changes = state.history.iter().filter(|it| &*it.semaphore == name);
        Ok(changes.cloned().collect())
    }

    fn delete(&self, name: &str, _by: Moment) -> Result<bool> {
        let mut state = self.state()?;
        match state.semaphores.get(name) {
            None => Ok(false),
            Some(semaphore) if semaphore.used != 0 => {
                Err(semaphore_in_use(name, semaphore.used, semaphore.capacity))
            }
            Some(_) => Ok(state.semaphores.remove(name).is_some()),
        }
    }

    fn usage(&self, name: Option<&str>, _by: Moment) -> Result<Vec<Usage>> {
        let state = self.state()?;
        let now = Moment::now();
        let wanted = |known: &str| name.is_none_or(|name| name == known);
        let usage = |(known, it): (&Arc<str>, &Semaphore)| {
            let held = || state.held().map(|(_, record)| record);
            let expired = held().filter(|record| record.is_reclaimable(now));
            let requests = held().filter(|record| record.count_of(known) > 0);
            Usage {
                semaphore: Arc::clone(known),
                capacity: it.capacity,
                held: u64::try_from(it.used).unwrap_or(0),
                expired: expired.map(|record| record.count_of(known)).sum(),
                free: free(it.capacity, it.used),
                requests: requests.count() as u64,
            }
        };
        let found = state.semaphores.iter().filter(|(known, _)| wanted(known));
        Ok(found.map(usage).collect())
    }

    fn holders(&self, name: &str, _by: Moment) -> Result<Vec<Holder>> {
        let state = self.state()?;
        if !state.semaphores.contains_key(name) {
            return Err(no_such_semaphore(name));
        }
        let mut holders = Vec::new();
        for (external_id, record) in state.held() {
            let permits = record.status.permits.iter();
            for permit in permits.filter(|it| *it.semaphore == *name) {
                holders.push(Holder {
                    external_id: Arc::clone(external_id),
                    owner: record.status.owner.clone(),
                    count: permit.count,
                    fence: permit.fence,
                    held_for: Moment::now() - record.created,
                    expires_in: record.status().expires_in,
                });
            }
        }
        holders.sort_by_key(|holder| holder.fence);
        Ok(holders)
    }

    fn status(&self, external_id: &str, _by: Moment) -> Result<Option<RequestStatus>> {
        let state = self.state()?;
        Ok(state.requests.get(external_id).map(Record::status))
    }

    fn acquire(&self, request: &Arc<Request>, _by: Moment) -> Result<Outcome> {
        // Before the lock, which others may hold: belief is counted from here.
        let sent = Moment::now();
        let mut state = self.state()?;
        let outcome = state.acquire(request, sent)?;
        if !matches!(outcome, Outcome::Exhausted(_)) {
            return Ok(outcome);
        }
        let now = Moment::now();
        let swept = state.sweep(Reason::Expired, |record| {
            let mut permits = record.status.permits.iter();
            record.is_reclaimable(now) && permits.any(|it| request.wants(&it.semaphore))
        });
        if swept.is_empty() {
            return Ok(outcome);
        }
        let outcome = state.acquire(request, sent);
        drop(state);
        swept.iter().for_each(Swept::log);
        outcome
    }

    fn renew(&self, grants: &[GrantId], _by: Moment) -> Result<Vec<Renewed>> {
        let mut state = self.state()?;
        let renew = |grant: &GrantId| match state.requests.get_mut(&grant.external_id) {
            Some(record) if record.status.held && grant.names(record.token) => {
                record.updated = Moment::now();
                Renewed::Yes
            }
            Some(_) => Renewed::Lost,
            None => Renewed::Unknown,
        };
        Ok(grants.iter().map(renew).collect())
    }

    fn release(&self, grant: &GrantId, _by: Moment) -> Result<Released> {
        let mut state = self.state()?;
        let Some(record) = state.requests.get(&grant.external_id) else {
            return Ok(Released::Unknown);
        };
        if !record.status.held || !grant.names(record.token) {
            return Ok(Released::AlreadyReleased);
        }
        let permits = state.release(&grant.external_id);
        let counts = permits.into_iter().map(|it| (it.semaphore, it.count));
        Ok(Released::Permits(counts.collect()))
    }

    fn sweep(&self, sweep: &Sweep, _by: Moment) -> Result<Vec<Swept>> {
        let mut state = self.state()?;
        let now = Moment::now();
        Ok(match sweep {
            Sweep::Expired => state.sweep(Reason::Expired, |it| it.is_reclaimable(now)),
            Sweep::Stale(age) => state.sweep(Reason::Stale, |it| {
                it.updated + *age <= now && it.reclaim_at().is_none_or(|at| at <= now)
            }),
            Sweep::Owner(owner, before) => state.sweep(Reason::OwnerDead, |it| {
                it.status.owner.as_ref() == Some(owner) && micros(it.updated) <= *before
            }),
        })
    }

    fn owners(&self, _by: Moment) -> Result<(Vec<Arc<str>>, StoreTime)> {
        let state = self.state()?;
        let owners = state.held().filter_map(|(_, it)| it.status.owner.clone());
        let mut owners: Vec<Arc<str>> = owners.collect();
        owners.sort();
        owners.dedup();
        Ok((owners, micros(Moment::now())))
    }

    fn purge(&self, what: Purge, age: Duration, batch: usize, _by: Moment) -> Result<u64> {
        let mut state = self.state()?;
        if what == Purge::History {
            let age = u64::try_from(age.as_millis()).unwrap_or(u64::MAX);
            let before = now().ms.saturating_sub(age);
            let old = state.history.iter().take(batch);
            let count = old.take_while(|it| it.changed_at <= before).count();
            state.history.drain(..count);
            return Ok(count as u64);
        }
        let now = Moment::now();
        let old: Vec<Arc<str>> = state
            .requests
            .iter()
            .filter(|(_, it)| !it.status.held && it.updated + age <= now)
            .map(|(id, _)| Arc::clone(id))
            .take(batch)
            .collect();
        for id in &old {
            state.requests.remove(id);
        }
        Ok(old.len() as u64)
    }
}

/// The store's clock: the local boot-time clock.
fn micros(at: Moment) -> StoreTime {
    u64::try_from(at.since_origin().as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;

    use super::*;

    /// Belief ends on the local clock, counted from before the request was sent.
    #[test]
    fn belief_is_counted_from_before_the_lock() {
        let registry = Arc::new(Registry::default());
        let store = MemoryPermits::new("memory://sent".to_owned(), Arc::clone(&registry));
        store.create("a", 1_000_000, Moment::FAR).unwrap();
        let deadline = Moment::now() + Duration::from_secs(20);
        let mut number = 0;
        let mut is_before = || {
            number += 1;
            let request = Arc::new(Request {
                external_id: Arc::from(number.to_string()),
                owner: None,
                ttl: Some(Duration::from_secs(1)),
                permits: vec![(Arc::from("a"), 1)],
                token: number,
                take_over: false,
                generated: false,
            });
            let begins = AtomicBool::new(false);
            thread::scope(|scope| {
                let state = registry.permits.state.lock();
                let waits = scope.spawn(|| {
                    begins.store(true, Ordering::SeqCst);
                    store.acquire(&request, Moment::FAR).unwrap()
                });
                while !begins.load(Ordering::SeqCst) {
                    thread::yield_now();
                }
                thread::yield_now();
                let unlocked = Moment::now();
                drop(state);
                match waits.join().unwrap() {
                    Outcome::Granted(grant) => grant.sent <= unlocked,
                    _ => false,
                }
            })
        };
        // The thread may ask only after the lock is free: that says nothing.
        while !is_before() {
            assert!(
                !deadline.remaining().is_zero(),
                "not once in {number} times"
            );
        }
    }
}
