//! The mutexes of one registry and the rules by which they change hands.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::{Mutex, MutexGuard};

use super::permits::Permits;
use crate::backend::{
    Attempt, CLAIM_TIME, Contender, Grant, OnRefusal, Participant, Refusal, Renewal, View,
};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::owner::MutexOwner;
use crate::parker::Unparker;

/// How long an observer of a free mutex waits for a change before it looks again.
const IDLE: Duration = Duration::from_secs(60);

/// Below this many names the registry neither sweeps nor shrinks.
const FEW: usize = 1_024;

/// The mutexes of one registry. Only names that somebody uses are kept: fences come from a counter of
/// the whole process, so that forgetting a name does not let its fences fall.
#[derive(Debug, Default)]
pub(super) struct Registry {
    pub(super) permits: Permits,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    mutexes: HashMap<Arc<str>, Entry>,
    /// Every call fails, for tests.
    unreachable: bool,
    /// At how many names those whose lease or record has run out are looked for.
    sweep_at: usize,
}

/// One mutex.
#[derive(Debug, Default)]
struct Entry {
    holder: Holder,
    /// Waiting contenders, the longest wait first.
    queue: VecDeque<Waiter>,
    /// Observers, unparked at every change of owner.
    observers: Vec<Unparker>,
    last_run: Option<Run>,
}

/// Whose the mutex is.
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
    pub(super) fn ping(&self) -> Result<()> {
        self.reach().map(drop)
    }

    pub(super) fn is_unreachable(&self) -> bool {
        self.table.lock().unreachable
    }

    /// Makes every call fail, or lets all of them work again. Unparks everybody, as a connection does that is
    /// lost or opened anew.
    pub(super) fn set_unreachable(&self, unreachable: bool) {
        let mut table = self.table.lock();
        if std::mem::replace(&mut table.unreachable, unreachable) != unreachable {
            for entry in table.mutexes.values() {
                entry.unpark_everybody();
            }
        }
    }

    pub(super) fn acquire(
        &self,
        contender: &Contender,
        on_refusal: OnRefusal,
        unparker: &Unparker,
    ) -> Result<Attempt> {
        let mut table = self.reach()?;
        let now = now();
        let entry = table.entry(&contender.mutex, now);
        if entry.admits(&contender.id) {
            let owner = entry.grant(contender, unparker, now);
            return Ok(Attempt::Granted(Grant { owner, until: None }));
        }
        if on_refusal == OnRefusal::Enqueue {
            entry.enqueue(&contender.id, unparker, now);
        }
        Ok(Attempt::Refused(Refusal {
            owner: entry.owner(now),
            retry_in: Duration::from_millis(entry.free_at(now).saturating_sub(now.ms) + 1),
            asked: true,
        }))
    }

    pub(super) fn renew(&self, contender: &Contender, fence: u64) -> Result<Renewal> {
        let mut table = self.reach()?;
        let now = now();
        Ok(table.look(&contender.mutex, now, |entry| {
            match entry.owned_by(contender, fence) {
                Some(ownership) => {
                    ownership.extend(contender, now);
                    Renewal::Renewed(Grant {
                        owner: entry.owner(now),
                        until: None,
                    })
                }
                None => Renewal::Lost(entry.owner(now)),
            }
        }))
    }

    pub(super) fn release(&self, contender: &Contender, fence: u64) -> Result<bool> {
        let mut table = self.reach()?;
        let now = now();
        Ok(table.look(&contender.mutex, now, |entry| {
            let owned = entry.owned_by(contender, fence).is_some();
            if owned {
                entry.free(now);
            }
            owned
        }))
    }

    pub(super) fn withdraw(&self, contender: &Contender) -> Result<()> {
        let now = now();
        self.reach()?.look(&contender.mutex, now, |entry| {
            entry.forget(&contender.id, now);
        });
        Ok(())
    }

    /// As [`withdraw`](Registry::withdraw), also while the registry is unreachable: a server notices
    /// that a connection is gone without being asked. Whoever contends under the id by now, with another
    /// `unparker`, keeps its place.
    pub(super) fn disconnect(&self, contender: &Contender, unparker: &Unparker) {
        let now = now();
        self.table.lock().look(&contender.mutex, now, |entry| {
            let ours =
                |waiter: &Waiter| waiter.id == contender.id && waiter.unparker.same(unparker);
            let is_ours = entry.waiters().any(ours);
            if is_ours {
                entry.forget(&contender.id, now);
            }
        });
    }

    pub(super) fn last_run(&self, mutex: &Arc<str>) -> Result<Option<Duration>> {
        let mut table = self.reach()?;
        let now = now();
        Ok(table.look(mutex, now, |entry| {
            entry.last_run.as_ref().map(|run| now.local - run.at)
        }))
    }

    pub(super) fn record_run(&self, mutex: &Arc<str>, fence: u64, keep: Duration) -> Result<bool> {
        let mut table = self.reach()?;
        let now = now();
        Ok(table.look(mutex, now, |entry| {
            let owned = matches!(&entry.holder, Holder::Owner(it) if it.fence == fence);
            if owned {
                entry.last_run = Some(Run {
                    at: now.local,
                    keep_until: now.local + keep,
                });
            }
            owned
        }))
    }

    pub(super) fn owner(&self, mutex: &Arc<str>) -> Result<MutexOwner> {
        let now = now();
        Ok(self.reach()?.look(mutex, now, |entry| entry.owner(now)))
    }

    pub(super) fn participants(&self, mutex: &Arc<str>) -> Result<Vec<Participant>> {
        Ok(self.reach()?.look(mutex, now(), |entry| {
            entry
                .waiters()
                .map(|waiter| Participant::new(Arc::clone(&waiter.id), Some(waiter.since_ms)))
                .collect()
        }))
    }

    pub(super) fn list(&self) -> Result<Vec<Arc<str>>> {
        let mut table = self.reach()?;
        table.sweep(now());
        let held = table
            .mutexes
            .iter()
            .filter(|(_, entry)| !matches!(entry.holder, Holder::Nobody));
        let mut names: Vec<Arc<str>> = held.map(|(name, _)| Arc::clone(name)).collect();
        names.sort_unstable();
        Ok(names)
    }

    pub(super) fn revoke(&self, mutex: &Arc<str>, fence: u64) -> Result<bool> {
        let mut table = self.reach()?;
        let now = now();
        Ok(table.look(mutex, now, |entry| match &entry.holder {
            Holder::Owner(ownership) if ownership.fence == fence => {
                ownership.unparker.unpark();
                entry.free(now);
                true
            }
            _ => false,
        }))
    }

    /// Has `unparker` unparked at every change, and says who owns now.
    pub(super) fn observe(&self, mutex: &Arc<str>, unparker: &Unparker) -> Result<View> {
        let mut table = self.reach()?;
        let now = now();
        let entry = table.entry(mutex, now);
        if !entry.observers.iter().any(|known| known.same(unparker)) {
            entry.observers.push(unparker.clone());
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

    pub(super) fn ignore(&self, mutex: &Arc<str>, unparker: &Unparker) {
        self.table.lock().look(mutex, now(), |entry| {
            entry.observers.retain(|known| !known.same(unparker));
        });
    }

    #[cfg(test)]
    fn names(&self) -> usize {
        self.table.lock().mutexes.len()
    }

    fn reach(&self) -> Result<MutexGuard<'_, Table>> {
        let table = self.table.lock();
        if table.unreachable {
            return Err(Error::new(
                ErrorKind::Unreachable,
                "the memory backend was made unreachable by a test",
            )
            .not_sent());
        }
        Ok(table)
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
    fn look<T>(&mut self, mutex: &Arc<str>, now: Now, ask: impl FnOnce(&mut Entry) -> T) -> T {
        let Some(entry) = self.mutexes.get_mut(mutex) else {
            return ask(&mut Entry::default());
        };
        entry.expire(now);
        let answer = ask(entry);
        if entry.is_unused() {
            self.mutexes.remove(mutex);
            if self.mutexes.capacity() > FEW && self.mutexes.len() < self.mutexes.capacity() / 8 {
                self.mutexes.shrink_to(self.mutexes.len() * 2);
            }
        }
        answer
    }

    /// Forgets what ran out without anybody looking. Once per doubling, so it costs nothing to speak of.
    fn sweep(&mut self, now: Now) {
        self.mutexes.retain(|_, entry| {
            entry.expire(now);
            !entry.is_unused()
        });
        self.sweep_at = self.mutexes.len() * 2;
    }
}

impl Entry {
    /// Lets leases, hand-overs and records that ran out go, and hands a free mutex to the next in the
    /// queue.
    fn expire(&mut self, now: Now) {
        match &self.holder {
            Holder::Owner(ownership) if ownership.transition_at < now.ms => self.free(now),
            // Not claimed in time: whoever it was handed to has lost its place.
            Holder::HandedTo { until_ms, .. } if *until_ms < now.ms => self.hand_on(now),
            Holder::Nobody if !self.queue.is_empty() => self.hand_on(now),
            _ => {}
        }
        if self
            .last_run
            .as_ref()
            .is_some_and(|run| run.keep_until < now.local)
        {
            self.last_run = None;
        }
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

    /// Keeps the mutex for the first of the queue, so that nobody barges in, and wakes it.
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

    /// Those who wait, in order. Whom the mutex was handed to is the first until it claims it.
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

    /// Takes a waiter out of the queue, and what was handed to it out of its hands.
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

    fn owner(&self, now: Now) -> MutexOwner {
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

    /// When the mutex can be had, if nobody releases or claims it before.
    fn free_at(&self, now: Now) -> u64 {
        match &self.holder {
            Holder::Nobody => now.ms,
            Holder::HandedTo { until_ms, .. } => *until_ms,
            Holder::Owner(ownership) => ownership.transition_at,
        }
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

    fn unpark_everybody(&self) {
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

    fn contender(mutex: &str, ttl_ms: u64) -> Contender {
        Contender {
            mutex: mutex.into(),
            id: "a".into(),
            lease: Lease::new(Duration::from_millis(ttl_ms), Duration::ZERO).unwrap(),
            purpose: Purpose::Lock,
        }
    }

    fn granted(attempt: Attempt) -> MutexOwner {
        match attempt {
            Attempt::Granted(grant) => grant.owner,
            Attempt::Refused(refusal) => panic!("{refusal:?}"),
        }
    }

    /// `id` as a contender of `m`.
    fn named(id: &str) -> Contender {
        Contender {
            id: id.into(),
            ..contender("m", 60_000)
        }
    }

    /// `a` owns, `b` and `c` wait with a parker each.
    fn two_wait(registry: &Registry) -> (u64, Parker, Parker) {
        let attempt = registry.acquire(&named("a"), OnRefusal::Leave, &Parker::new().unparker());
        let (b, c) = (Parker::new(), Parker::new());
        for (id, parker) in [("b", &b), ("c", &c)] {
            let unparker = parker.unparker();
            let attempt = registry.acquire(&named(id), OnRefusal::Enqueue, &unparker);
            assert!(matches!(attempt.unwrap(), Attempt::Refused(_)));
        }
        (granted(attempt.unwrap()).fence(), b, c)
    }

    #[test]
    fn a_hand_over_that_is_not_claimed_in_time_goes_to_the_next() {
        let registry = Registry::default();
        let (fence, b, c) = two_wait(&registry);
        assert!(registry.release(&named("a"), fence).unwrap());
        assert_eq!(b.park(Moment::now()), Unparked::Wake);
        assert_eq!(c.park(Moment::now()), Unparked::Timeout);
        std::thread::sleep(CLAIM_TIME + Duration::from_millis(5));
        let late = registry.acquire(&named("d"), OnRefusal::Leave, &Parker::new().unparker());
        assert!(matches!(late.unwrap(), Attempt::Refused(_)));
        assert_eq!(c.park(Moment::now()), Unparked::Wake);
        granted(
            registry
                .acquire(&named("c"), OnRefusal::Leave, &Parker::new().unparker())
                .unwrap(),
        );
    }

    #[test]
    fn whoever_withdraws_hands_on_at_once_what_was_handed_to_it() {
        for by_dropping in [false, true] {
            let registry = Registry::default();
            let (fence, b, c) = two_wait(&registry);
            assert!(registry.release(&named("a"), fence).unwrap());
            if by_dropping {
                registry.disconnect(&named("b"), &b.unparker());
            } else {
                registry.withdraw(&named("b")).unwrap();
            }
            assert_eq!(c.park(Moment::now()), Unparked::Wake);
        }
    }

    #[test]
    fn dropping_a_contender_takes_nobody_elses_place_away() {
        let registry = Registry::default();
        let (_, b, _) = two_wait(&registry);
        registry.disconnect(&named("b"), &Parker::new().unparker());
        let waiting = || registry.participants(&"m".into()).unwrap().len();
        assert_eq!(waiting(), 2);
        registry.disconnect(&named("b"), &b.unparker());
        assert_eq!(waiting(), 1);
    }

    /// Rule "fences strictly grow", for names that were forgotten in between.
    #[test]
    fn a_name_that_nobody_uses_is_forgotten_and_its_fences_still_grow() {
        let registry = Registry::default();
        let mut last = 0;
        for number in 0..10_000 {
            let contender = contender(&format!("mutex-{}", number % 3), 60_000);
            let owner = granted(
                registry
                    .acquire(&contender, OnRefusal::Leave, &Parker::new().unparker())
                    .unwrap(),
            );
            assert!(owner.fence() > last);
            last = owner.fence();
            assert!(registry.release(&contender, last).unwrap());
            assert_eq!(registry.names(), 0);
        }
    }

    /// Rule "fences strictly grow": within a microsecond, too.
    #[test]
    fn fences_grow_faster_than_the_clock() {
        let now = now();
        let first = next_fence(now);
        assert!(next_fence(now) > first);
    }

    #[test]
    fn names_whose_lease_ran_out_unseen_are_forgotten_too() {
        let registry = Registry::default();
        for number in 0..20 * FEW {
            let contender = contender(&format!("mutex-{number}"), 26);
            granted(
                registry
                    .acquire(&contender, OnRefusal::Leave, &Parker::new().unparker())
                    .unwrap(),
            );
            if number % FEW == 0 {
                std::thread::sleep(Duration::from_millis(30));
            }
        }
        assert!(registry.names() <= 4 * FEW, "{}", registry.names());
        std::thread::sleep(Duration::from_millis(30));
        assert!(registry.list().unwrap().is_empty());
        assert_eq!(registry.names(), 0);
    }

    #[test]
    fn a_recorded_run_is_kept_for_as_long_as_asked() {
        let registry = Registry::default();
        let contender = contender("m", 60_000);
        let fence = granted(
            registry
                .acquire(&contender, OnRefusal::Leave, &Parker::new().unparker())
                .unwrap(),
        )
        .fence();
        let keep = Duration::from_millis(30);
        assert!(registry.record_run(&contender.mutex, fence, keep).unwrap());
        assert!(registry.release(&contender, fence).unwrap());
        assert_eq!(registry.names(), 1);
        std::thread::sleep(keep * 2);
        assert_eq!(registry.last_run(&contender.mutex).unwrap(), None);
        assert_eq!(registry.names(), 0);
    }

    /// Rule "every claim carries its fence": a run that began before the adoption is not the new owner's.
    #[test]
    fn a_stale_fence_records_no_run() {
        let registry = Registry::default();
        let contender = contender("m", 60_000);
        let acquire = || {
            granted(
                registry
                    .acquire(&contender, OnRefusal::Leave, &Parker::new().unparker())
                    .unwrap(),
            )
        };
        let (stale, fence) = (acquire().fence(), acquire().fence());
        let record = |fence| registry.record_run(&contender.mutex, fence, Duration::from_secs(60));
        assert!(!record(stale).unwrap());
        assert_eq!(registry.last_run(&contender.mutex).unwrap(), None);
        assert!(record(fence).unwrap());
    }

    /// Rule "every claim carries its fence": what is adopted is set anew, and never shortened.
    #[test]
    fn an_adoption_never_moves_an_end_backwards() {
        let registry = Registry::default();
        let (long, short) = (contender("m", 60_000), contender("m", 1_000));
        let first = granted(
            registry
                .acquire(&long, OnRefusal::Leave, &Parker::new().unparker())
                .unwrap(),
        );
        let second = granted(
            registry
                .acquire(&short, OnRefusal::Leave, &Parker::new().unparker())
                .unwrap(),
        );
        assert!(second.fence() > first.fence());
        assert!(second.ttl_at() >= first.ttl_at());
        assert!(second.transition_at() >= first.transition_at());
        assert!(matches!(
            registry.renew(&long, first.fence()).unwrap(),
            Renewal::Lost(_)
        ));
    }
}
