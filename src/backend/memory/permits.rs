//! Semaphores in the memory of one process: the same rules as in the tables, behind one lock.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use super::mutexes::{Registry, now};
use crate::backend::permit_store::{
    CapacityChange, Counts, Grant, GrantId, Holder, Outcome, Permit, PermitRenewal, PermitStore,
    Purge, Reason, Recognised, Release, Request, RequestStatus, Standing, StoreTime, Sweep, Swept,
    Usage, counts, free, log_swept, no_such_semaphore, reclaim_after, semaphore_in_use,
};
use crate::clock::Moment;
use crate::error::Result;

/// The semaphores of one registry.
pub(super) type Permits = Mutex<State>;

/// A handle of one factory on the semaphores of a registry.
pub(super) struct MemoryPermits {
    realm: String,
    registry: Arc<Registry>,
}

#[derive(Debug, Default)]
pub(super) struct State {
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
    /// When its permits may be taken back; never without a ttl.
    fn reclaim_at(&self) -> Option<Moment> {
        let ttl = self.status.ttl;
        ttl.map(|ttl| self.updated + reclaim_after(ttl))
    }

    fn status(&self) -> RequestStatus {
        let ttl = self.status.ttl.filter(|_| self.status.held);
        RequestStatus {
            expires_in: ttl.map(|ttl| self.updated + ttl - Moment::now()),
            ..self.status.clone()
        }
    }

    fn permit_of(&self, semaphore: &str) -> Option<&Permit> {
        let mut permits = self.status.permits.iter();
        permits.find(|permit| *permit.semaphore == *semaphore)
    }

    fn is_of(&self, sweep: &Sweep, now: Moment) -> bool {
        let is_expired = self.reclaim_at().is_some_and(|at| at <= now);
        match sweep {
            Sweep::Expired => is_expired,
            Sweep::Stale(age) => {
                self.updated + *age <= now && (is_expired || self.status.ttl.is_none())
            }
            Sweep::Owner(owner, before) => {
                self.status.owner.as_ref() == Some(owner) && micros(self.updated) <= *before
            }
        }
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

    /// Releases what the sweep is for, among the requests of which `also` is true.
    fn sweep(&mut self, sweep: &Sweep, also: impl Fn(&Record) -> bool) -> Vec<Swept> {
        let now = Moment::now();
        let found = self
            .held()
            .filter(|(_, it)| it.is_of(sweep, now) && also(it));
        let found: Vec<_> = found
            .map(|(id, record)| (Arc::clone(id), record.status.owner.clone()))
            .collect();
        let swept = found.into_iter().map(|(external_id, owner)| Swept {
            permits: self.release(&external_id),
            external_id,
            owner,
            reason: sweep.reason(),
        });
        swept.collect()
    }

    fn acquire(&mut self, request: &Request, sent: Moment) -> Result<Outcome> {
        if let Some(record) = self.requests.get(&request.external_id) {
            let status = record.status();
            let remaining = status.expires_in;
            return Ok(match request.recognise(record.token, status)? {
                Recognised::Known(status) => Outcome::Known(status),
                Recognised::Own => self.grant(request, sent, remaining),
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
        let before = self.requests.get(&request.external_id);
        let now = Moment::now();
        let created = before.map_or(now, |record| record.created);
        let permits = request.permits.iter().map(|(name, count)| Permit {
            semaphore: Arc::clone(name),
            count: *count,
            fence: self.next_fence(),
        });
        let permits: Vec<Permit> = permits.collect();
        self.count(&permits, 1);
        let record = Record {
            token: request.token,
            status: RequestStatus {
                held: true,
                permits,
                owner: request.owner.clone(),
                ttl: request.ttl,
                expires_in: None,
            },
            created,
            updated: now,
        };
        self.requests
            .insert(Arc::clone(&request.external_id), record);
        self.grant(request, sent, request.ttl)
    }

    /// What the request holds, as it is told to its caller.
    fn grant(&self, request: &Request, sent: Moment, remaining: Option<Duration>) -> Outcome {
        let record = self.requests.get(&request.external_id);
        Outcome::Granted(Grant {
            permits: record.map_or_else(Vec::new, |it| it.status.permits.clone()),
            sent,
            remaining,
            free: request.free(|name| self.semaphore(name)),
        })
    }
}

impl MemoryPermits {
    pub(super) fn new(realm: String, registry: Arc<Registry>) -> MemoryPermits {
        MemoryPermits { realm, registry }
    }

    fn state(&self) -> Result<MutexGuard<'_, State>> {
        self.registry.reach().map(drop)?;
        Ok(self.registry.permits.lock())
    }
}

impl PermitStore for MemoryPermits {
    fn realm(&self) -> &str {
        &self.realm
    }

    fn create(&self, name: &str, capacity: u32, _by: Moment) -> Result<bool> {
        let mut state = self.state()?;
        let is_new = !state.semaphores.contains_key(name);
        if is_new {
            let semaphore = Semaphore { capacity, used: 0 };
            state.semaphores.insert(Arc::from(name), semaphore);
        }
        Ok(is_new)
    }

    fn set_capacity(&self, name: &str, to: u32, who: Option<&str>, _by: Moment) -> Result<u32> {
        let mut state = self.state()?;
        let semaphore = state.semaphores.get_mut(name);
        let semaphore = semaphore.ok_or_else(|| no_such_semaphore(name))?;
        let old = std::mem::replace(&mut semaphore.capacity, to);
        if old != to {
            state.history.push(CapacityChange {
                semaphore: Arc::from(name),
                changed_by: who.map(Arc::from),
                changed_at: now().ms,
                from: old,
                to,
            });
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
        match state.semaphore(name) {
            Some((capacity, used)) if used != 0 => Err(semaphore_in_use(name, used, capacity)),
            _ => Ok(state.semaphores.remove(name).is_some()),
        }
    }

    fn usage(&self, name: Option<&str>, _by: Moment) -> Result<Vec<Usage>> {
        let state = self.state()?;
        let now = Moment::now();
        let usage = |(known, it): (&Arc<str>, &Semaphore)| {
            let (mut expired, mut requests) = (0, 0);
            for (_, record) in state.held() {
                if let Some(permit) = record.permit_of(known) {
                    requests += 1;
                    if record.is_of(&Sweep::Expired, now) {
                        expired += u64::from(permit.count);
                    }
                }
            }
            Usage {
                semaphore: Arc::clone(known),
                capacity: it.capacity,
                held: u64::try_from(it.used).unwrap_or(0),
                expired,
                free: free(it.capacity, it.used),
                requests,
            }
        };
        let found = state.semaphores.iter();
        let found = found.filter(|(known, _)| name.is_none_or(|name| name == &***known));
        Ok(found.map(usage).collect())
    }

    fn holders(&self, name: &str, _by: Moment) -> Result<Vec<Holder>> {
        let state = self.state()?;
        if !state.semaphores.contains_key(name) {
            return Err(no_such_semaphore(name));
        }
        let holder = |(external_id, record): (&Arc<str>, &Record)| {
            let permit = record.permit_of(name)?;
            Some(Holder {
                external_id: Arc::clone(external_id),
                owner: record.status.owner.clone(),
                count: permit.count,
                fence: permit.fence,
                held_for: Moment::now() - record.created,
                expires_in: record.status().expires_in,
            })
        };
        let mut holders: Vec<Holder> = state.held().filter_map(holder).collect();
        holders.sort_by_key(|holder| holder.fence);
        Ok(holders)
    }

    fn status(&self, external_id: &str, _by: Moment) -> Result<Option<RequestStatus>> {
        let state = self.state()?;
        Ok(state.requests.get(external_id).map(Record::status))
    }

    fn acquire(
        &self,
        request: &Arc<Request>,
        _place: Option<&Standing>,
        _by: Moment,
    ) -> Result<Outcome> {
        // Before the lock, which others may hold: belief is counted from here.
        let sent = Moment::now();
        let mut state = self.state()?;
        let outcome = state.acquire(request, sent)?;
        if !matches!(outcome, Outcome::Exhausted(_)) {
            return Ok(outcome);
        }
        let swept = state.sweep(&Sweep::Expired, |record| {
            let mut names = request.permits.iter().map(|(name, _)| name);
            names.any(|name| record.permit_of(name).is_some())
        });
        log_swept(swept.iter().map(|it| &it.external_id), Reason::Expired);
        state.acquire(request, sent)
    }

    fn renew(&self, grants: &[GrantId], _by: Moment) -> Result<Vec<Option<PermitRenewal>>> {
        let mut state = self.state()?;
        let renew = |grant: &GrantId| match state.requests.get_mut(&grant.external_id) {
            Some(record) if record.status.held && grant.names(record.token) => {
                record.updated = Moment::now();
                Some(PermitRenewal::Renewed)
            }
            Some(_) => Some(PermitRenewal::AlreadyReleased),
            None => Some(PermitRenewal::Unknown),
        };
        Ok(grants.iter().map(renew).collect())
    }

    fn release(&self, grant: &GrantId, _by: Moment) -> Result<(Release, Counts)> {
        let mut state = self.state()?;
        Ok(match state.requests.get(&grant.external_id) {
            None => (Release::Unknown, Vec::new()),
            Some(record) if record.status.held && grant.names(record.token) => {
                let freed = counts(&state.release(&grant.external_id));
                (Release::Released, freed)
            }
            Some(_) => (Release::AlreadyReleased, Vec::new()),
        })
    }

    fn sweep(&self, sweep: &Sweep, _by: Moment) -> Result<Vec<Swept>> {
        Ok(self.state()?.sweep(sweep, |_| true))
    }

    fn owners(&self, _by: Moment) -> Result<(Vec<Arc<str>>, StoreTime)> {
        let state = self.state()?;
        let owners = state.held().filter_map(|(_, it)| it.status.owner.clone());
        let owners: BTreeSet<Arc<str>> = owners.collect();
        Ok((owners.into_iter().collect(), micros(Moment::now())))
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
        let old = state.requests.iter();
        let old = old.filter(|(_, it)| !it.status.held && it.updated + age <= now);
        let old: Vec<Arc<str>> = old.map(|(id, _)| Arc::clone(id)).take(batch).collect();
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
                let state = registry.permits.lock();
                let waits = scope.spawn(|| {
                    begins.store(true, Ordering::SeqCst);
                    store.acquire(&request, None, Moment::FAR).unwrap()
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
