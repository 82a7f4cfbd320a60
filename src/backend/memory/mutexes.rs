//! The mutexes of one registry and the rules by which they change hands.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::{Mutex, MutexGuard};

use super::permits::Permits;
use crate::backend::{
    Attempt, CLAIM_TIME, Contender, Grant, OnRefusal, Participant, RawContender, RawObserver,
    Refusal, Renewal, View,
};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::owner::MutexOwner;
use crate::parker::Unparker;

/// How long an observer of a free mutex waits for a change before it looks again.
const IDLE: Duration = Duration::from_secs(60);

/// Below this many names the registry neither sweeps nor shrinks.
const FEW: usize = 1_024;

/// The mutexes of one registry. Only names in use are kept: fences come from a counter of
/// the whole process, so that forgetting a name does not let its fences fall.
#[derive(Debug, Default)]
pub(super) struct Registry {
    pub(super) permits: Permits,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
pub(super) struct Table {
    mutexes: HashMap<Arc<str>, Entry>,
    /// Every call fails, for tests.
    unreachable: bool,
    /// From how many names on unused ones are looked for.
    sweep_at: usize,
}

/// One mutex.
#[derive(Debug, Default)]
pub(super) struct Entry {
    holder: Holder,
    /// Waiting contenders, the longest wait first.
    queue: VecDeque<Waiter>,
    /// Observers, unparked at every change of owner.
    observers: Vec<Unparker>,
    last_run: Option<Run>,
}

/// Who has the mutex.
#[derive(Debug, Default)]
enum Holder {
    #[default]
    Nobody,
    /// Released, and kept for the first of the queue until it claims it.
    HandedTo {
        waiter: Waiter,
        until_ms: u64,
    },
    Owner(Ownership),
}

#[derive(Debug)]
struct Ownership {
    id: Arc<str>,
    fence: u64,
    acquired_at: u64,
    ttl_at: u64,
    transition_at: u64,
    /// Unparked when the ownership is revoked.
    unparker: Unparker,
}

#[derive(Debug)]
struct Waiter {
    id: Arc<str>,
    since_ms: u64,
    unparker: Unparker,
}

/// The last recorded run of a schedule.
#[derive(Debug)]
struct Run {
    at: Moment,
    keep_until: Moment,
}

impl Registry {
    /// Makes every call fail, or lets all of them work again. Unparks all contenders and observers, as a connection
    /// does that is lost or opened anew.
    pub(super) fn set_unreachable(&self, unreachable: bool) {
        let mut table = self.table.lock();
        if std::mem::replace(&mut table.unreachable, unreachable) != unreachable {
            table.mutexes.values().for_each(Entry::unpark_all);
        }
    }

    /// The table, if the registry can be reached.
    pub(super) fn reach(&self) -> Result<MutexGuard<'_, Table>> {
        let table = self.table.lock();
        if table.unreachable {
            let message = "the memory backend was made unreachable by a test";
            return Err(Error::new(ErrorKind::Unreachable, message).not_sent());
        }
        Ok(table)
    }

    /// Asks or changes the entry of `mutex` as it is now.
    pub(super) fn look<T>(
        &self,
        mutex: &Arc<str>,
        ask: impl FnOnce(&mut Entry, Now) -> T,
    ) -> Result<T> {
        Ok(self.reach()?.look(mutex, ask))
    }

    #[cfg(test)]
    fn names(&self) -> usize {
        self.table.lock().mutexes.len()
    }
}

/// A contender of one registry.
pub(super) struct MemoryContender {
    pub(super) registry: Arc<Registry>,
    pub(super) contender: Contender,
    pub(super) unparker: Unparker,
}

impl RawContender for MemoryContender {
    fn acquire(&mut self, on_refusal: OnRefusal, _by: Moment) -> Result<Attempt> {
        let mut table = self.registry.reach()?;
        let now = now();
        let entry = table.entry(&self.contender.mutex, now);
        if entry.admits(&self.contender.id) {
            let owner = entry.grant(&self.contender, &self.unparker, now);
            return Ok(Attempt::Granted(Grant { owner, until: None }));
        }
        if on_refusal == OnRefusal::Enqueue {
            entry.enqueue(&self.contender.id, &self.unparker, now);
        }
        Ok(Attempt::Refused(Refusal {
            owner: entry.owner(now),
            retry_in: Duration::from_millis(entry.free_at(now).saturating_sub(now.ms) + 1),
        }))
    }

    fn renew(&mut self, fence: u64, _by: Moment) -> Result<Renewal> {
        let contender = &self.contender;
        self.registry.look(&contender.mutex, |entry, now| {
            let Some(ownership) = entry.owned_by(contender, fence) else {
                return Renewal::Lost(entry.owner(now));
            };
            ownership.extend(contender, now);
            let owner = entry.owner(now);
            Renewal::Renewed(Grant { owner, until: None })
        })
    }

    fn release(&mut self, fence: u64, _by: Moment) -> Result<bool> {
        let contender = &self.contender;
        self.registry.look(&contender.mutex, |entry, now| {
            let owned = entry.owned_by(contender, fence).is_some();
            if owned {
                entry.free(now);
            }
            owned
        })
    }

    fn withdraw(&mut self, _by: Moment) -> Result<()> {
        let Contender { mutex, id, .. } = &self.contender;
        self.registry
            .look(mutex, |entry, now| entry.forget(id, now))
    }
}

impl Drop for MemoryContender {
    /// Withdraws also while the registry is unreachable: a server notices that a connection is gone without being
    /// asked. A later contender with this id keeps its place.
    fn drop(&mut self) {
        let Contender { mutex, id, .. } = &self.contender;
        let mut table = self.registry.table.lock();
        table.look(mutex, |entry, now| {
            let is_this = |it: &Waiter| it.id == *id && it.unparker.same(&self.unparker);
            if entry.waiters().any(is_this) {
                entry.forget(id, now);
            }
        });
    }
}

/// An observer of one registry.
pub(super) struct MemoryObserver {
    pub(super) registry: Arc<Registry>,
    pub(super) mutex: Arc<str>,
    pub(super) unparker: Unparker,
}

impl RawObserver for MemoryObserver {
    fn observe(&mut self, _by: Moment) -> Result<View> {
        let mut table = self.registry.reach()?;
        let now = now();
        let entry = table.entry(&self.mutex, now);
        if !entry.observers.iter().any(|it| it.same(&self.unparker)) {
            entry.observers.push(self.unparker.clone());
        }
        Ok(View {
            owner: entry.owner(now),
            look_in: match &entry.holder {
                Holder::Owner(ownership) => {
                    Duration::from_millis(ownership.transition_at.saturating_sub(now.ms) + 1)
                }
                Holder::Nobody | Holder::HandedTo { .. } => IDLE,
            },
        })
    }
}

impl Drop for MemoryObserver {
    fn drop(&mut self) {
        self.registry.table.lock().look(&self.mutex, |entry, _| {
            entry.observers.retain(|it| !it.same(&self.unparker));
        });
    }
}

impl Table {
    /// The entry of `mutex` as it is now, made if there is none. The caller puts something into it.
    fn entry(&mut self, mutex: &Arc<str>, now: Now) -> &mut Entry {
        if self.mutexes.len() >= self.sweep_at.max(FEW) && !self.mutexes.contains_key(mutex) {
            self.sweep(now);
        }
        let entry = self.mutexes.entry(Arc::clone(mutex)).or_default();
        entry.expire(now);
        entry
    }

    /// Asks or changes the entry of `mutex` as it is now, and forgets it if nothing is left in it.
    fn look<T>(&mut self, mutex: &Arc<str>, ask: impl FnOnce(&mut Entry, Now) -> T) -> T {
        let now = now();
        let Some(entry) = self.mutexes.get_mut(mutex) else {
            return ask(&mut Entry::default(), now);
        };
        entry.expire(now);
        let answer = ask(entry, now);
        if entry.is_unused() {
            self.mutexes.remove(mutex);
            if self.mutexes.capacity() > FEW && self.mutexes.len() < self.mutexes.capacity() / 8 {
                self.mutexes.shrink_to(self.mutexes.len() * 2);
            }
        }
        answer
    }

    /// The names that have an owner or a waiter, sorted.
    pub(super) fn names(&mut self) -> Vec<Arc<str>> {
        self.sweep(now());
        let held = self.mutexes.iter();
        let held = held.filter(|(_, entry)| !matches!(entry.holder, Holder::Nobody));
        let mut names: Vec<Arc<str>> = held.map(|(name, _)| Arc::clone(name)).collect();
        names.sort_unstable();
        names
    }

    /// Forgets what ran out unseen. Once per doubling, so its cost is small.
    fn sweep(&mut self, now: Now) {
        self.mutexes.retain(|_, entry| {
            entry.expire(now);
            !entry.is_unused()
        });
        self.sweep_at = self.mutexes.len() * 2;
    }
}

impl Entry {
    /// Ends leases, hand-overs and records that ran out, and hands a free mutex to the next in the
    /// queue.
    fn expire(&mut self, now: Now) {
        match &self.holder {
            Holder::Owner(ownership) if ownership.transition_at < now.ms => self.free(now),
            // Not claimed in time: the waiter has lost its place.
            Holder::HandedTo { until_ms, .. } if *until_ms < now.ms => self.hand_on(now),
            Holder::Nobody if !self.queue.is_empty() => self.hand_on(now),
            _ => {}
        }
        self.last_run = self
            .last_run
            .take()
            .filter(|run| now.local <= run.keep_until);
    }

    /// Returns `true` if the mutex is free, or is or was handed to `id`.
    fn admits(&self, id: &Arc<str>) -> bool {
        match &self.holder {
            Holder::Nobody => true,
            Holder::HandedTo { waiter, .. } => waiter.id == *id,
            Holder::Owner(ownership) => ownership.id == *id,
        }
    }

    fn grant(&mut self, contender: &Contender, unparker: &Unparker, now: Now) -> MutexOwner {
        self.queue.retain(|waiter| waiter.id != contender.id);
        // What is adopted ends no earlier than it did.
        let (ttl_at, transition_at) = match &self.holder {
            Holder::Owner(ownership) => (ownership.ttl_at, ownership.transition_at),
            Holder::Nobody | Holder::HandedTo { .. } => (0, 0),
        };
        let mut ownership = Ownership {
            id: Arc::clone(&contender.id),
            fence: next_fence(now),
            acquired_at: now.ms,
            ttl_at,
            transition_at,
            unparker: unparker.clone(),
        };
        ownership.extend(contender, now);
        self.holder = Holder::Owner(ownership);
        self.unpark_observers();
        self.owner(now)
    }

    /// Ends an ownership and hands the mutex on.
    fn free(&mut self, now: Now) {
        self.hand_on(now);
        self.unpark_observers();
    }

    /// Keeps the mutex for the first of the queue, and wakes it.
    fn hand_on(&mut self, now: Now) {
        self.holder = match self.queue.pop_front() {
            None => Holder::Nobody,
            Some(waiter) => {
                waiter.unparker.unpark();
                Holder::HandedTo {
                    waiter,
                    until_ms: now.ms + whole_ms(CLAIM_TIME),
                }
            }
        };
    }

    /// The waiters, in order. The one that the mutex was handed to is the first until it claims it.
    fn waiters(&self) -> impl Iterator<Item = &Waiter> {
        let handed = match &self.holder {
            Holder::HandedTo { waiter, .. } => Some(waiter),
            Holder::Nobody | Holder::Owner(_) => None,
        };
        handed.into_iter().chain(&self.queue)
    }

    fn enqueue(&mut self, id: &Arc<str>, unparker: &Unparker, now: Now) {
        if self.queue.iter().all(|waiter| waiter.id != *id) {
            self.queue.push_back(Waiter {
                id: Arc::clone(id),
                since_ms: now.ms,
                unparker: unparker.clone(),
            });
        }
    }

    /// Takes a waiter out of the queue, and takes back what was handed to it.
    fn forget(&mut self, id: &Arc<str>, now: Now) {
        self.queue.retain(|waiter| waiter.id != *id);
        if let Holder::HandedTo { waiter, .. } = &self.holder
            && waiter.id == *id
        {
            self.holder = Holder::Nobody;
        }
        self.expire(now);
    }

    fn owned_by(&mut self, contender: &Contender, fence: u64) -> Option<&mut Ownership> {
        match &mut self.holder {
            Holder::Owner(ownership)
                if ownership.id == contender.id && ownership.fence == fence =>
            {
                Some(ownership)
            }
            _ => None,
        }
    }

    pub(super) fn owner(&self, now: Now) -> MutexOwner {
        match &self.holder {
            Holder::Owner(ownership) => MutexOwner::new(
                Arc::clone(&ownership.id),
                ownership.acquired_at,
                ownership.ttl_at,
                ownership.transition_at,
                ownership.fence,
            )
            .observed_at(now.ms, now.local),
            Holder::Nobody | Holder::HandedTo { .. } => MutexOwner::NONE,
        }
    }

    /// When the mutex is free at the latest.
    fn free_at(&self, now: Now) -> u64 {
        match &self.holder {
            Holder::Nobody => now.ms,
            Holder::HandedTo { until_ms, .. } => *until_ms,
            Holder::Owner(ownership) => ownership.transition_at,
        }
    }

    pub(super) fn participants(&self) -> Vec<Participant> {
        let waiters = self.waiters();
        waiters
            .map(|it| Participant::new(Arc::clone(&it.id), Some(it.since_ms)))
            .collect()
    }

    /// Frees the mutex, if its owner has this `fence`, and has the owner check.
    pub(super) fn revoke(&mut self, fence: u64, now: Now) -> bool {
        let owned = matches!(&self.holder, Holder::Owner(it) if it.fence == fence);
        if let Holder::Owner(ownership) = &self.holder
            && owned
        {
            ownership.unparker.unpark();
            self.free(now);
        }
        owned
    }

    /// How long ago the last run was.
    pub(super) fn last_run(&self, now: Now) -> Option<Duration> {
        self.last_run.as_ref().map(|run| now.local - run.at)
    }

    pub(super) fn record_run(&mut self, fence: u64, keep: Duration, now: Now) -> bool {
        let owned = matches!(&self.holder, Holder::Owner(it) if it.fence == fence);
        if owned {
            self.last_run = Some(Run {
                at: now.local,
                keep_until: now.local + keep,
            });
        }
        owned
    }

    fn is_unused(&self) -> bool {
        matches!(self.holder, Holder::Nobody)
            && self.queue.is_empty()
            && self.observers.is_empty()
            && self.last_run.is_none()
    }

    fn unpark_observers(&self) {
        for unparker in &self.observers {
            unparker.unpark();
        }
    }

    fn unpark_all(&self) {
        self.unpark_observers();
        if let Holder::Owner(ownership) = &self.holder {
            ownership.unparker.unpark();
        }
        self.waiters().for_each(|waiter| waiter.unparker.unpark());
    }
}

impl Ownership {
    /// Sets the full lease from now on, never to an earlier end.
    fn extend(&mut self, contender: &Contender, now: Now) {
        let (ttl, total) = (contender.lease.ttl(), contender.lease.total());
        self.ttl_at = self.ttl_at.max(now.ms + whole_ms(ttl));
        self.transition_at = self.transition_at.max(now.ms + whole_ms(total));
    }
}

fn whole_ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// The next fence of this process, whatever the mutex and the registry.
fn next_fence(now: Now) -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    let next = |last: u64| now.micros.max(last + 1);
    match LAST.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |last| {
        Some(next(last))
    }) {
        Ok(last) | Err(last) => next(last),
    }
}

/// The registries' clock: epoch time as it was when first read, carried on by the boot-time clock.
#[derive(Clone, Copy)]
pub(super) struct Now {
    pub(super) ms: u64,
    pub(super) micros: u64,
    pub(super) local: Moment,
}

pub(super) fn now() -> Now {
    static ORIGIN: OnceLock<(Duration, Moment)> = OnceLock::new();
    let (epoch, start) = ORIGIN.get_or_init(|| {
        let epoch = SystemTime::now().duration_since(UNIX_EPOCH);
        (epoch.unwrap_or_default(), Moment::now())
    });
    let local = Moment::now();
    let epoch = *epoch + (local - *start);
    Now {
        ms: u64::try_from(epoch.as_millis()).unwrap_or(u64::MAX),
        micros: u64::try_from(epoch.as_micros()).unwrap_or(u64::MAX),
        local,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Purpose;
    use crate::lease::Lease;
    use crate::parker::{Parker, Unparked};

    type Shared = Arc<Registry>;

    /// Contender `id` of `mutex`, without a transition.
    fn contender(registry: &Shared, mutex: &str, id: &str, ttl_ms: u64) -> MemoryContender {
        MemoryContender {
            registry: Arc::clone(registry),
            contender: Contender {
                mutex: mutex.into(),
                id: id.into(),
                lease: Lease::new(Duration::from_millis(ttl_ms), Duration::ZERO).unwrap(),
                purpose: Purpose::Lock,
            },
            unparker: Parker::new().unparker(),
        }
    }

    fn acquire(contender: &mut MemoryContender) -> MutexOwner {
        match contender.acquire(OnRefusal::Leave, Moment::FAR).unwrap() {
            Attempt::Granted(grant) => grant.owner,
            Attempt::Refused(refusal) => panic!("{refusal:?}"),
        }
    }

    fn release(contender: &mut MemoryContender, fence: u64) {
        assert!(contender.release(fence, Moment::FAR).unwrap());
    }

    fn waiter(registry: &Shared, id: &str, parker: &Parker) -> MemoryContender {
        let mut waiter = contender(registry, "m", id, 60_000);
        waiter.unparker = parker.unparker();
        let attempt = waiter.acquire(OnRefusal::Enqueue, Moment::FAR).unwrap();
        assert!(matches!(attempt, Attempt::Refused(_)));
        waiter
    }

    fn waiting(registry: &Shared) -> usize {
        let look = registry.look(&"m".into(), |entry, _| entry.participants());
        look.unwrap().len()
    }

    #[test]
    fn unclaimed_hand_over_goes_to_the_next() {
        let registry = Shared::default();
        let mut a = contender(&registry, "m", "a", 60_000);
        let fence = acquire(&mut a).fence();
        let (b, c) = (Parker::new(), Parker::new());
        let (_b, mut waits) = (waiter(&registry, "b", &b), waiter(&registry, "c", &c));
        release(&mut a, fence);
        assert_eq!(b.park(Moment::now()), Unparked::Wake);
        assert_eq!(c.park(Moment::now()), Unparked::Timeout);
        // A hand-over ends by the clock alone.
        std::thread::sleep(CLAIM_TIME + Duration::from_millis(5));
        let mut d = contender(&registry, "m", "d", 60_000);
        let late = d.acquire(OnRefusal::Leave, Moment::FAR).unwrap();
        assert!(matches!(late, Attempt::Refused(_)));
        assert_eq!(c.park(Moment::now()), Unparked::Wake);
        acquire(&mut waits);
    }

    #[test]
    fn withdrawal_hands_on_at_once() {
        for by_dropping in [false, true] {
            let registry = Shared::default();
            let mut a = contender(&registry, "m", "a", 60_000);
            let fence = acquire(&mut a).fence();
            let (b, c) = (Parker::new(), Parker::new());
            let (mut first, _c) = (waiter(&registry, "b", &b), waiter(&registry, "c", &c));
            release(&mut a, fence);
            if by_dropping {
                drop(first);
            } else {
                first.withdraw(Moment::FAR).unwrap();
            }
            assert_eq!(c.park(Moment::now()), Unparked::Wake);
        }
    }

    #[test]
    fn drop_keeps_the_place_of_a_later_contender_with_the_same_id() {
        let registry = Shared::default();
        acquire(&mut contender(&registry, "m", "a", 60_000));
        let waits = waiter(&registry, "b", &Parker::new());
        drop(contender(&registry, "m", "b", 60_000));
        assert_eq!(waiting(&registry), 1);
        drop(waits);
        assert_eq!(waiting(&registry), 0);
    }

    #[test]
    fn unused_name_is_forgotten_and_its_fences_still_grow() {
        let registry = Shared::default();
        let mut last = 0;
        for number in 0..10_000 {
            let mut contender = contender(&registry, &format!("mutex-{}", number % 3), "a", 60_000);
            let fence = acquire(&mut contender).fence();
            assert!(fence > last);
            last = fence;
            release(&mut contender, fence);
            assert_eq!(registry.names(), 0);
        }
    }

    #[test]
    fn fences_grow_faster_than_the_clock() {
        let now = now();
        let first = next_fence(now);
        assert!(next_fence(now) > first);
    }

    #[test]
    fn names_whose_lease_ran_out_unseen_are_forgotten() {
        let registry = Shared::default();
        for number in 0..20 * FEW {
            acquire(&mut contender(
                &registry,
                &format!("mutex-{number}"),
                "a",
                26,
            ));
            if number % FEW == 0 {
                std::thread::sleep(Duration::from_millis(30));
            }
        }
        assert!(registry.names() <= 4 * FEW, "{}", registry.names());
        std::thread::sleep(Duration::from_millis(30));
        assert!(registry.reach().unwrap().names().is_empty());
        assert_eq!(registry.names(), 0);
    }

    #[test]
    fn record_of_a_run_is_kept_as_long_as_asked() {
        let registry = Shared::default();
        let mut contender = contender(&registry, "m", "a", 60_000);
        let fence = acquire(&mut contender).fence();
        let (mutex, keep) = ("m".into(), Duration::from_millis(30));
        let record = registry.look(&mutex, |entry, now| entry.record_run(fence, keep, now));
        assert!(record.unwrap());
        release(&mut contender, fence);
        assert_eq!(registry.names(), 1);
        std::thread::sleep(keep * 2);
        let last_run = registry.look(&mutex, |entry, now| entry.last_run(now));
        assert_eq!(last_run.unwrap(), None);
        assert_eq!(registry.names(), 0);
    }

    #[test]
    fn stale_fence_records_no_run() {
        let registry = Shared::default();
        let mut contender = contender(&registry, "m", "a", 60_000);
        let stale = acquire(&mut contender).fence();
        let fence = acquire(&mut contender).fence();
        let record = |fence| {
            let keep = Duration::from_secs(60);
            let mutex = "m".into();
            let record = registry.look(&mutex, |entry, now| entry.record_run(fence, keep, now));
            record.unwrap()
        };
        assert!(!record(stale));
        assert!(record(fence));
    }

    #[test]
    fn adoption_never_moves_an_end_backwards() {
        let registry = Shared::default();
        let mut long = contender(&registry, "m", "a", 60_000);
        let first = acquire(&mut long);
        let second = acquire(&mut contender(&registry, "m", "a", 1_000));
        assert!(second.fence() > first.fence());
        assert!(second.ttl_at() >= first.ttl_at());
        assert!(second.transition_at() >= first.transition_at());
        let renewal = long.renew(first.fence(), Moment::FAR).unwrap();
        assert!(matches!(renewal, Renewal::Lost(_)));
    }
}
