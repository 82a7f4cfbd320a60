//! Semaphores in the memory of one process: the same rules as in the tables, behind one lock.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use super::mutexes::{Registry, now};
use crate::backend::permit_store::{
    Call, CapacityChange, Decision, Exhausted, Failure, Grant, Held, HeldPermit, Holder, Permit,
    PermitRenewal, PermitStore, Reason, Recognised, Release, Renewed, RequestStatus, StoreTime,
    Sweep, Swept, Usage, Wish, free, no_such_semaphore, reclaim_after, semaphore_in_use,
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
    requests: HashMap<Arc<str>, Request>,
    history: Vec<CapacityChange>,
    /// The last number given to anything.
    last_id: u64,
}

#[derive(Debug)]
struct Semaphore {
    id: u64,
    capacity: u32,
    used: i64,
}

#[derive(Debug)]
struct Request {
    id: u64,
    token: u64,
    owner: Option<Arc<str>>,
    ttl: Option<Duration>,
    /// Whether its permits are held.
    held: bool,
    /// Those it holds; once released, those it held last.
    permits: Vec<HeldPermit>,
    created: Moment,
    /// The last renewal; once released, the release.
    updated: Moment,
    updated_micros: StoreTime,
}

impl Request {
    fn expires(&self) -> Option<Moment> {
        self.ttl.map(|ttl| self.updated + ttl)
    }

    fn reclaim_at(&self) -> Option<Moment> {
        self.ttl.map(|ttl| self.updated + reclaim_after(ttl))
    }

    fn is_reclaimable(&self, now: Moment) -> bool {
        self.held && self.reclaim_at().is_some_and(|at| at <= now)
    }

    fn renew(&mut self) {
        let now = now();
        self.updated = now.local;
        self.updated_micros = now.micros;
    }

    fn status(&self) -> RequestStatus {
        let expires = self.expires().filter(|_| self.held);
        RequestStatus {
            held: self.held,
            permits: self.permits.iter().map(HeldPermit::to_permit).collect(),
            owner: self.owner.clone(),
            ttl: self.ttl,
            expires_in: expires.map(|at| at - Moment::now()),
        }
    }

    /// Whether it is held by that grant.
    fn holds(&self, held: &Held) -> bool {
        self.held && self.token == held.token
    }

    fn to_held(&self, external_id: &Arc<str>) -> Held {
        Held {
            external_id: Arc::clone(external_id),
            request_id: self.id,
            token: self.token,
            permits: self.permits.clone(),
        }
    }
}

impl State {
    fn next_id(&mut self) -> u64 {
        // As in the tables, a fence survives a restart: it is never below the time.
        self.last_id = (self.last_id + 1).max(now().micros);
        self.last_id
    }

    /// The capacity of a semaphore, and what is held of it.
    fn semaphore(&self, name: &str) -> Option<(u32, i64)> {
        let semaphore = self.semaphores.get(name);
        semaphore.map(|semaphore| (semaphore.capacity, semaphore.used))
    }

    /// Refuses the wish for now, with the next time and the newest fence of what is held of its semaphores.
    fn exhausted(&self, wish: &Wish, exhausted: Exhausted) -> Decision {
        let wanted = |it: &&HeldPermit| wish.wants(&it.semaphore);
        let held = self.requests.values().filter(|request| request.held);
        let held = held.filter(|it| it.permits.iter().any(|it| wanted(&it)));
        let next = held.clone().filter_map(Request::reclaim_at).min();
        let permits = held.flat_map(|it| it.permits.iter().filter(wanted));
        Decision::Exhausted {
            exhausted,
            next_reclaim: next.map(|at| at - Moment::now()),
            newest: permits.map(|permit| permit.id).max(),
        }
    }

    fn count(&mut self, permits: &[HeldPermit], sign: i64) {
        for permit in permits {
            if let Some(semaphore) = self.semaphores.get_mut(&permit.semaphore)
                && semaphore.id == permit.semaphore_id
            {
                semaphore.used += sign * i64::from(permit.count);
            }
        }
    }

    /// Releases a request if `which` says so; what it held.
    fn release(
        &mut self,
        external_id: &str,
        which: impl FnOnce(&Request) -> bool,
    ) -> Option<Vec<Permit>> {
        let request = self.requests.get_mut(external_id)?;
        if !request.held || !which(request) {
            return None;
        }
        request.held = false;
        request.renew();
        let permits = request.permits.clone();
        self.count(&permits, -1);
        Some(permits.iter().map(HeldPermit::to_permit).collect())
    }

    fn sweep(&mut self, reason: Reason, which: impl Fn(&Request) -> bool) -> Vec<Swept> {
        let found: Vec<Arc<str>> = self
            .requests
            .iter()
            .filter(|(_, request)| request.held && which(request))
            .map(|(id, _)| Arc::clone(id))
            .collect();
        let mut swept = Vec::new();
        for id in found {
            let owner = self.requests.get(&id).and_then(|it| it.owner.clone());
            if let Some(permits) = self.release(&id, |_| true) {
                swept.push(Swept {
                    external_id: id,
                    owner,
                    permits,
                    reason,
                });
            }
        }
        swept
    }

    fn acquire(&mut self, call: &Call, sent: Moment) -> Decision {
        let wish = &call.wish;
        if let Some(request) = self.requests.get(&wish.external_id) {
            let status = request.status();
            let remaining = status.expires_in;
            return match call.recognise(request.token, status) {
                Recognised::Decided(decision) => decision,
                Recognised::Ours => {
                    let held = request.to_held(&wish.external_id);
                    Decision::Granted(self.grant(wish, held, sent, remaining))
                }
                Recognised::TakeOver => {
                    self.release(&wish.external_id, |_| true);
                    self.insert(call, sent)
                }
            };
        }
        match wish.shortage(|name| self.semaphore(name)) {
            Err(error) => Decision::Refused(error),
            Ok(Some(exhausted)) => self.exhausted(wish, exhausted),
            Ok(None) => self.insert(call, sent),
        }
    }

    fn insert(&mut self, call: &Call, sent: Moment) -> Decision {
        let wish = &call.wish;
        let before = self.requests.remove(&wish.external_id);
        let id = before
            .as_ref()
            .map_or_else(|| self.next_id(), |request| request.id);
        let mut permits = Vec::with_capacity(wish.permits.len());
        for (name, count) in &wish.permits {
            let permit_id = self.next_id();
            let Some(semaphore) = self.semaphores.get(name) else {
                return Decision::Refused(no_such_semaphore(name));
            };
            permits.push(HeldPermit {
                id: permit_id,
                semaphore_id: semaphore.id,
                semaphore: Arc::clone(name),
                count: *count,
            });
        }
        self.count(&permits, 1);
        let now = now();
        let request = Request {
            id,
            token: call.token,
            owner: wish.owner.clone(),
            ttl: wish.ttl,
            held: true,
            permits,
            created: before.map_or(now.local, |request| request.created),
            updated: now.local,
            updated_micros: now.micros,
        };
        let held = request.to_held(&wish.external_id);
        self.requests.insert(Arc::clone(&wish.external_id), request);
        Decision::Granted(self.grant(wish, held, sent, wish.ttl))
    }

    fn grant(&self, wish: &Wish, held: Held, sent: Moment, remaining: Option<Duration>) -> Grant {
        Grant {
            held,
            sent,
            remaining,
            free: wish.free(|name| self.semaphore(name)),
        }
    }
}

impl MemoryPermits {
    pub(super) fn new(realm: String, registry: Arc<Registry>) -> MemoryPermits {
        MemoryPermits { realm, registry }
    }

    fn state(&self) -> Result<MutexGuard<'_, State>> {
        self.registry.ping()?;
        Ok(self.registry.permits.state.lock())
    }
}

impl PermitStore for MemoryPermits {
    fn realm(&self) -> &str {
        &self.realm
    }

    fn patience(&self) -> Duration {
        Duration::ZERO
    }

    fn min_ttl(&self) -> Duration {
        Duration::from_millis(100)
    }

    fn poll_interval(&self) -> Duration {
        POLL_INTERVAL
    }

    fn create_tables(&self, _by: Moment) -> Result<()> {
        self.registry.ping()
    }

    fn create(&self, name: &str, capacity: u32, _by: Moment) -> Result<bool> {
        let mut state = self.state()?;
        if state.semaphores.contains_key(name) {
            return Ok(false);
        }
        let semaphore = Semaphore {
            id: state.next_id(),
            capacity,
            used: 0,
        };
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
            let count = |request: &Request| -> u64 {
                let own = request.permits.iter().filter(|p| p.semaphore_id == it.id);
                own.map(|permit| u64::from(permit.count)).sum()
            };
            let held = state.requests.values().filter(|request| request.held);
            let expired = held.clone().filter(|request| request.is_reclaimable(now));
            let requests = held.filter(|request| count(request) > 0);
            Usage {
                semaphore: Arc::clone(known),
                capacity: it.capacity,
                held: u64::try_from(it.used).unwrap_or(0),
                expired: expired.map(count).sum(),
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
        for (external_id, request) in &state.requests {
            let permits = request.permits.iter();
            for permit in permits.filter(|it| request.held && &*it.semaphore == name) {
                holders.push(Holder {
                    external_id: Arc::clone(external_id),
                    owner: request.owner.clone(),
                    count: permit.count,
                    fence: permit.id,
                    held_for: Moment::now() - request.created,
                    expires_in: request.status().expires_in,
                });
            }
        }
        holders.sort_by_key(|holder| holder.fence);
        Ok(holders)
    }

    fn status(&self, external_id: &str, _by: Moment) -> Result<Option<RequestStatus>> {
        let state = self.state()?;
        Ok(state.requests.get(external_id).map(Request::status))
    }

    fn acquire(&self, call: &Arc<Call>, _by: Moment) -> Result<Decision, Failure> {
        // Before the lock, which others may hold: belief is counted from here.
        let sent = Moment::now();
        let mut state = self.state().map_err(Failure::known)?;
        let decision = state.acquire(call, sent);
        if !matches!(decision, Decision::Exhausted { .. }) {
            return Ok(decision);
        }
        let now = Moment::now();
        let touches = |request: &Request| {
            request.is_reclaimable(now)
                && request
                    .permits
                    .iter()
                    .any(|it| call.wish.wants(&it.semaphore))
        };
        let swept = state.sweep(Reason::Expired, touches);
        if swept.is_empty() {
            return Ok(decision);
        }
        let decision = state.acquire(call, sent);
        drop(state);
        swept.iter().for_each(Swept::log);
        Ok(decision)
    }

    fn renew(&self, held: &[Arc<Held>], _by: Moment) -> Result<Vec<Renewed>> {
        let mut state = self.state()?;
        let renew = |held: &Arc<Held>| match state.requests.get_mut(&held.external_id) {
            Some(request) if request.holds(held) => {
                request.renew();
                Renewed::Yes
            }
            _ => Renewed::Lost,
        };
        Ok(held.iter().map(renew).collect())
    }

    fn release(&self, held: &Arc<Held>, _by: Moment) -> Result<bool> {
        let mut state = self.state()?;
        let released = state.release(&held.external_id, |request| request.holds(held));
        Ok(released.is_some())
    }

    fn release_part(
        &self,
        held: &Held,
        permit: &HeldPermit,
        left: u32,
        _by: Moment,
    ) -> Result<bool> {
        let mut state = self.state()?;
        let request = state.requests.get_mut(&held.external_id);
        let Some(request) = request.filter(|request| request.holds(held)) else {
            return Ok(false);
        };
        let own = request.permits.iter_mut().find(|own| own.id == permit.id);
        let Some(own) = own.filter(|own| own.count > left) else {
            return Ok(false);
        };
        let freed = HeldPermit {
            count: std::mem::replace(&mut own.count, left) - left,
            ..permit.clone()
        };
        request.permits.retain(|own| own.count > 0);
        state.count(&[freed], -1);
        Ok(true)
    }

    fn release_request(&self, external_id: &str, _by: Moment) -> Result<Release> {
        let mut state = self.state()?;
        if state.release(external_id, |_| true).is_some() {
            return Ok(Release::Released);
        }
        Ok(match state.requests.contains_key(external_id) {
            true => Release::AlreadyReleased,
            false => Release::Unknown,
        })
    }

    fn renew_request(&self, external_id: &str, _by: Moment) -> Result<PermitRenewal> {
        let mut state = self.state()?;
        Ok(match state.requests.get_mut(external_id) {
            Some(request) if request.held => {
                request.renew();
                PermitRenewal::Renewed
            }
            Some(_) => PermitRenewal::AlreadyReleased,
            None => PermitRenewal::Unknown,
        })
    }

    fn bury(&self, external_id: &str, tokens: &[u64], _by: Moment) -> Result<bool> {
        let mut state = self.state()?;
        let released = state.release(external_id, |request| tokens.contains(&request.token));
        Ok(released.is_some())
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
                it.owner.as_ref() == Some(owner) && it.updated_micros <= *before
            }),
        })
    }

    fn owners(&self, _by: Moment) -> Result<(Vec<Arc<str>>, StoreTime)> {
        let state = self.state()?;
        let held = state.requests.values().filter(|request| request.held);
        let mut owners: Vec<Arc<str>> = held.filter_map(|it| it.owner.clone()).collect();
        owners.sort();
        owners.dedup();
        Ok((owners, now().micros))
    }

    fn delete_requests(&self, age: Duration, batch: usize, _by: Moment) -> Result<u64> {
        let mut state = self.state()?;
        let now = Moment::now();
        let old: Vec<Arc<str>> = state
            .requests
            .iter()
            .filter(|(_, request)| !request.held && request.updated + age <= now)
            .map(|(id, _)| Arc::clone(id))
            .take(batch)
            .collect();
        for id in &old {
            state.requests.remove(id);
        }
        Ok(old.len() as u64)
    }

    fn delete_history(&self, age: Duration, batch: usize, _by: Moment) -> Result<u64> {
        let mut state = self.state()?;
        let before = now()
            .ms
            .saturating_sub(u64::try_from(age.as_millis()).unwrap_or(u64::MAX));
        let old = state.history.iter().take(batch);
        let count = old.take_while(|it| it.changed_at <= before).count();
        state.history.drain(..count);
        Ok(count as u64)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;

    use super::*;
    use crate::backend::permit_store::OnHeld;

    /// Rule "belief ends on the local boot-time clock, counted from before the request was sent": whoever waited
    /// for the lock counted it from after the grant.
    #[test]
    fn belief_is_counted_from_before_the_lock() {
        let registry = Arc::new(Registry::default());
        let store = MemoryPermits::new("memory://sent".to_owned(), Arc::clone(&registry));
        store.create("a", 1_000_000, Moment::FAR).unwrap();
        let deadline = Moment::now() + Duration::from_secs(20);
        let mut number = 0;
        let mut is_before = || {
            number += 1;
            let call = Arc::new(Call {
                wish: Wish {
                    external_id: Arc::from(number.to_string()),
                    owner: None,
                    ttl: Some(Duration::from_secs(1)),
                    permits: vec![(Arc::from("a"), 1)],
                },
                token: number,
                former: Vec::new(),
                on_held: OnHeld::Report,
            });
            let begins = AtomicBool::new(false);
            thread::scope(|scope| {
                let state = registry.permits.state.lock();
                let waits = scope.spawn(|| {
                    begins.store(true, Ordering::SeqCst);
                    store.acquire(&call, Moment::FAR).unwrap()
                });
                while !begins.load(Ordering::SeqCst) {
                    thread::yield_now();
                }
                thread::yield_now();
                let unlocked = Moment::now();
                drop(state);
                match waits.join().unwrap() {
                    Decision::Granted(grant) => grant.sent <= unlocked,
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
