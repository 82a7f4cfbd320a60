//! The mutexes of one registry and the rules by which they change hands.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;

use crate::backend::{Attempt, Grant, Place, Refusal, Renewal, Sight};
use crate::bell::Waker;
use crate::clock::Moment;
use crate::owner::MutexOwner;

/// How long a freed mutex is kept for the waiter it was reserved for. Generous: a waiter here is a
/// thread of this process that was just woken, and one that gives up says so.
const CLAIM_MS: u64 = 1_000;

/// How long an observer of a free mutex looks away if nobody rings.
const IDLE: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
pub(super) struct Registry {
    mutexes: Mutex<HashMap<Arc<str>, Entry>>,
}

/// One mutex. Kept for as long as the registry: its last fence must not be forgotten.
#[derive(Debug, Default)]
struct Entry {
    owned: Option<Owned>,
    last_fence: u64,
    /// Waiting contenders, the longest wait first.
    queue: VecDeque<Waiter>,
    /// Who may take the free mutex before everybody else, and until when.
    reserved: Option<(Arc<str>, u64)>,
    /// Observers, rung at every change of owner.
    watchers: Vec<Waker>,
}

#[derive(Debug)]
struct Owned {
    id: Arc<str>,
    fence: u64,
    acquired_at: u64,
    ttl_at: u64,
    transition_at: u64,
}

#[derive(Debug)]
struct Waiter {
    id: Arc<str>,
    waker: Option<Waker>,
}

impl Registry {
    /// `queue`: enter the queue if refused, to be woken by the waker, if there is one.
    pub(super) fn acquire(&self, place: &Place, queue: Option<Option<&Waker>>) -> Attempt {
        let mut mutexes = self.mutexes.lock();
        let entry = mutexes.entry(Arc::clone(&place.mutex)).or_default();
        let now = now();
        entry.expire(now.ms);
        let ours = entry
            .owned
            .as_ref()
            .is_some_and(|owned| owned.id == place.id);
        if ours || (entry.owned.is_none() && entry.comes_next(&place.id)) {
            return Attempt::Granted(Grant {
                owner: entry.take(place, now),
                until: None,
            });
        }
        if let Some(waker) = queue {
            entry.enqueue(&place.id, waker);
        }
        let free_at = match (&entry.owned, &entry.reserved) {
            (Some(owned), _) => owned.transition_at,
            (None, Some((_, until))) => *until,
            (None, None) => now.ms,
        };
        Attempt::Refused(Refusal {
            owner: entry.owner(now),
            retry_in: Duration::from_millis(free_at.saturating_sub(now.ms) + 1),
        })
    }

    pub(super) fn renew(&self, place: &Place, fence: u64) -> Renewal {
        let mut mutexes = self.mutexes.lock();
        let now = now();
        let Some(entry) = mutexes.get_mut(&place.mutex) else {
            return Renewal::Lost(MutexOwner::NONE);
        };
        entry.expire(now.ms);
        match entry.owned_by(place, fence) {
            Some(owned) => {
                owned.set_lease(place, now.ms);
                Renewal::Renewed(Grant {
                    owner: entry.owner(now),
                    until: None,
                })
            }
            None => Renewal::Lost(entry.owner(now)),
        }
    }

    pub(super) fn release(&self, place: &Place, fence: u64) -> bool {
        let mut mutexes = self.mutexes.lock();
        let now = now();
        let Some(entry) = mutexes.get_mut(&place.mutex) else {
            return false;
        };
        entry.expire(now.ms);
        if entry.owned_by(place, fence).is_none() {
            return false;
        }
        entry.owned = None;
        entry.ring_watchers();
        entry.hand_on(now.ms);
        true
    }

    pub(super) fn withdraw(&self, place: &Place) {
        let mut mutexes = self.mutexes.lock();
        if let Some(entry) = mutexes.get_mut(&place.mutex) {
            entry.forget(&place.id);
            entry.expire(now().ms);
        }
    }

    pub(super) fn observe(&self, mutex: &Arc<str>) -> Sight {
        let mut mutexes = self.mutexes.lock();
        let now = now();
        let Some(entry) = mutexes.get_mut(mutex) else {
            return Sight {
                owner: MutexOwner::NONE,
                again_in: IDLE,
            };
        };
        entry.expire(now.ms);
        Sight {
            owner: entry.owner(now),
            again_in: entry.owned.as_ref().map_or(IDLE, |owned| {
                Duration::from_millis(owned.transition_at.saturating_sub(now.ms) + 1)
            }),
        }
    }

    pub(super) fn watch(&self, mutex: &Arc<str>, waker: &Waker) {
        let mut mutexes = self.mutexes.lock();
        let entry = mutexes.entry(Arc::clone(mutex)).or_default();
        entry.watchers.push(waker.clone());
    }

    pub(super) fn ignore(&self, mutex: &Arc<str>, waker: &Waker) {
        let mut mutexes = self.mutexes.lock();
        if let Some(entry) = mutexes.get_mut(mutex) {
            entry.watchers.retain(|known| !known.same(waker));
        }
    }
}

impl Entry {
    /// Lets run-out leases and reservations go, and offers a free mutex to the next in the queue.
    fn expire(&mut self, now_ms: u64) {
        if self
            .owned
            .as_ref()
            .is_some_and(|owned| owned.transition_at < now_ms)
        {
            self.owned = None;
            self.ring_watchers();
        }
        if let Some((id, until)) = &self.reserved
            && *until < now_ms
        {
            // Did not claim in time: it has lost its place, and enters again at the end.
            let id = Arc::clone(id);
            self.forget(&id);
        }
        if self.owned.is_none() && self.reserved.is_none() {
            self.hand_on(now_ms);
        }
    }

    /// Whether a free mutex is for `id`: reserved for it, or for nobody.
    fn comes_next(&self, id: &Arc<str>) -> bool {
        self.reserved.as_ref().is_none_or(|(first, _)| first == id)
    }

    /// Reserves the free mutex for the first in the queue, so that nobody barges in, and wakes it.
    fn hand_on(&mut self, now_ms: u64) {
        if let Some(first) = self.queue.front() {
            self.reserved = Some((Arc::clone(&first.id), now_ms + CLAIM_MS));
            if let Some(waker) = &first.waker {
                waker.wake();
            }
        }
    }

    fn take(&mut self, place: &Place, now: Now) -> MutexOwner {
        self.forget(&place.id);
        self.last_fence = now.micros.max(self.last_fence + 1);
        let mut owned = Owned {
            id: Arc::clone(&place.id),
            fence: self.last_fence,
            acquired_at: now.ms,
            ttl_at: 0,
            transition_at: 0,
        };
        owned.set_lease(place, now.ms);
        self.owned = Some(owned);
        self.ring_watchers();
        self.owner(now)
    }

    fn enqueue(&mut self, id: &Arc<str>, waker: Option<&Waker>) {
        match self.queue.iter_mut().find(|waiter| waiter.id == *id) {
            Some(waiter) => waiter.waker = waker.cloned(),
            None => self.queue.push_back(Waiter {
                id: Arc::clone(id),
                waker: waker.cloned(),
            }),
        }
    }

    fn forget(&mut self, id: &Arc<str>) {
        self.queue.retain(|waiter| waiter.id != *id);
        if self.reserved.as_ref().is_some_and(|(first, _)| first == id) {
            self.reserved = None;
        }
    }

    fn owned_by(&mut self, place: &Place, fence: u64) -> Option<&mut Owned> {
        self.owned
            .as_mut()
            .filter(|owned| owned.id == place.id && owned.fence == fence)
    }

    fn owner(&self, now: Now) -> MutexOwner {
        self.owned.as_ref().map_or(MutexOwner::NONE, |owned| {
            MutexOwner::new(
                Arc::clone(&owned.id),
                owned.acquired_at,
                owned.ttl_at,
                owned.transition_at,
                owned.fence,
            )
            .observed_at(now.ms, now.local)
        })
    }

    fn ring_watchers(&self) {
        for waker in &self.watchers {
            waker.wake();
        }
    }
}

impl Owned {
    /// Never moves an end backwards: two renewals may arrive in the wrong order.
    fn set_lease(&mut self, place: &Place, now_ms: u64) {
        let ms = |duration: Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
        self.ttl_at = self.ttl_at.max(now_ms + ms(place.lease.ttl()));
        self.transition_at = self.transition_at.max(now_ms + ms(place.lease.total()));
    }
}

/// The registries' clock: epoch time as it was when first asked, carried on by the boot-time clock.
/// One for the process, so that fences grow from a dropped registry to the next one of its name.
#[derive(Clone, Copy)]
struct Now {
    ms: u64,
    micros: u64,
    local: Moment,
}

fn now() -> Now {
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
