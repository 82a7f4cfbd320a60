//! Facts about a backend's own contract: [`RawContender`] and [`Backend`] driven by hand, without the
//! fronts, whose care would hide what a backend does wrong.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use contend::backend::{
    Attempt, Backend, CLAIM_TIME, Contender, OnRefusal, Purpose, RawContender, Renewal,
};
use contend::{Lease, Moment, MutexOwner, Parker, Result, Unparked, Wakeups};
use testbed::wait_until;

use super::{PATIENCE, Subject, ms, name};

/// What two clocks may differ in the age of a run: the server's resolution, or the writer's wall clock.
const CLOCKS: Duration = Duration::from_millis(50);

/// How often a fact that must be seen within the claim time is tried on a busy machine.
const ROUNDS: usize = 30;

pub fn stale_fence_touches_nothing(subject: &Subject) {
    let mutex = name("stale-fence");
    let mut owner = Side::new(subject, &mutex, "owner");
    let first = owner.granted(OnRefusal::Enqueue).fence();
    assert!(owner.release(first));
    assert!(!owner.release(first), "released twice");
    let second = owner.granted(OnRefusal::Enqueue).fence();
    assert!(second > first);
    let mut other = Side::new(subject, &mutex, "other");
    for stale in [first, second + 1] {
        assert!(owner.lost(stale), "a renewal by the fence {stale}");
        assert!(!owner.release(stale), "a release by the fence {stale}");
    }
    assert!(other.lost(second), "a renewal of another's lease");
    assert!(!other.release(second), "a release of another's lease");
    let seen = other.backend.owner(&other.mutex, by()).unwrap();
    assert!(seen.is_owner("owner"), "{seen:?}");
    assert_eq!(seen.fence(), second);
    assert_eq!(owner.renewed(second).fence(), second);
    assert!(owner.release(second));
    assert!(owner.lost(second), "a renewal of what was released");
}

/// What ran out is not brought back.
pub fn expired_lease_is_not_renewed(subject: &Subject) {
    if subject.is_kept_by_a_session() {
        return;
    }
    let mutex = name("ran-out");
    let lease = Lease::new(ms(200), ms(100)).unwrap();
    let mut owner = Side::with_lease(subject, &mutex, "owner", lease);
    let first = owner.granted(OnRefusal::Leave).fence();
    let mut other = Side::new(subject, &mutex, "other");
    let mut second = None;
    wait_until(PATIENCE, "the lease has run out", || {
        second = other.try_acquire(OnRefusal::Leave);
        second.is_some()
    });
    let second = second.unwrap().fence();
    assert!(second > first);
    assert!(owner.lost(first), "another contender owns it");
    assert!(!owner.release(first));
    assert!(other.release(second));
    // It was not taken, and still it is over.
    let third = owner.granted(OnRefusal::Leave).fence();
    // The server's clock may be behind by what it rounds.
    thread::sleep(lease.total() + ms(200));
    assert!(owner.lost(third), "it is free");
    assert!(!owner.release(third));
}

/// A free mutex that was handed to a waiter is not another's for the claim time.
pub fn hand_over_is_kept_for_its_waiter(subject: &Subject) {
    if !subject.ordered {
        return;
    }
    let mut owner = Side::new(subject, &name("barging"), "owner");
    let mut next = owner.peer(subject, "next");
    let mut barger = owner.peer(subject, "barger");
    seen_within_the_claim_time(|round| {
        let fence = owner.granted(OnRefusal::Enqueue).fence();
        next.queue_up();
        let began = Instant::now();
        assert!(owner.release(fence));
        let barged = barger.try_acquire(OnRefusal::Leave);
        let in_time = began.elapsed() < CLAIM_TIME * 3 / 4;
        assert!(
            barged.is_none() || !in_time,
            "round {round}: {barged:?} came before the waiter, {:?} after the release",
            began.elapsed()
        );
        if let Some(barged) = barged {
            assert!(barger.release(barged.fence()));
        }
        let claimed = next.granted_soon();
        assert!(claimed.fence() > fence);
        assert!(next.release(claimed.fence()));
        in_time
    });
}

pub fn withdrawn_waiter_hands_on(subject: &Subject) {
    let mut owner = Side::new(subject, &name("withdraws"), "owner");
    let mut quitter = owner.peer(subject, "quitter");
    let mut next = owner.peer(subject, "next");
    seen_within_the_claim_time(|_| {
        let fence = owner.granted(OnRefusal::Enqueue).fence();
        quitter.queue_up();
        next.queue_up();
        let began = Instant::now();
        assert!(owner.release(fence));
        quitter.raw.withdraw(by()).unwrap();
        let claimed = next.granted_soon();
        let in_time = began.elapsed() < CLAIM_TIME * 3 / 4;
        assert!(claimed.fence() > fence);
        assert!(next.release(claimed.fence()));
        in_time
    });
}

/// A second acquisition under the owner's id adopts the lease,
/// so that what was sent under the first one touches nothing any more.
pub fn adoption_raises_the_fence(subject: &Subject) {
    if subject.is_kept_by_a_session() {
        return;
    }
    let mutex = name("adoption");
    let mut owner = Side::new(subject, &mutex, "owner");
    let first = owner.granted(OnRefusal::Enqueue);
    // The attempt whose reply was lost is made again.
    let second = owner.granted(OnRefusal::Enqueue);
    assert!(second.fence() > first.fence());
    assert!(second.ttl_at() >= first.ttl_at(), "an end moved back");
    assert!(owner.lost(first.fence()));
    assert!(!owner.release(first.fence()));
    assert_eq!(owner.renewed(second.fence()).fence(), second.fence());
    assert!(owner.release(second.fence()));
}

pub fn owner_alone_records_a_run(subject: &Subject) {
    let mutex = name("record");
    let mut owner = Side::new(subject, &mutex, "owner");
    let mut other = owner.peer(subject, "other");
    assert_eq!(other.last_run(), None);
    let first = owner.granted(OnRefusal::Enqueue).fence();
    assert_eq!(owner.last_run(), None);
    assert!(!owner.record(first + 1), "a fence that was never granted");
    assert_eq!(owner.last_run(), None, "nothing was recorded");
    assert!(owner.record(first));
    assert!(owner.last_run().is_some());
    assert!(owner.release(first));
    assert!(!owner.record(first), "recorded after the release");
    let second = other.granted(OnRefusal::Enqueue).fence();
    assert!(!owner.record(first), "recorded in another's term");
    assert!(other.last_run().is_some(), "it outlives the leader");
    assert!(other.record(second));
    assert!(other.release(second));
}

pub fn last_run_has_its_age(subject: &Subject) {
    let mutex = name("age");
    let mut owner = Side::new(subject, &mutex, "owner");
    let mut other = owner.peer(subject, "other");
    let fence = owner.granted(OnRefusal::Enqueue).fence();
    for _ in 0..2 {
        let before = Instant::now();
        assert!(owner.record(fence));
        let after = Instant::now();
        // So that it has an age.
        thread::sleep(ms(300));
        for side in [&mut owner, &mut other] {
            let at_least = after.elapsed().saturating_sub(CLOCKS);
            let age = side.last_run().unwrap();
            let at_most = before.elapsed() + CLOCKS;
            assert!(
                (at_least..=at_most).contains(&age),
                "{age:?}, not {at_least:?} to {at_most:?}"
            );
        }
    }
    assert!(owner.release(fence));
}

/// `revoke` frees at once and hands on; the owner learns of it at its next look.
pub fn revoked_owner_loses_to_the_next(subject: &Subject) {
    let mutex = name("revoke");
    let mut owner = Side::new(subject, &mutex, "owner");
    let mut next = owner.peer(subject, "next");
    let backend = Arc::clone(&owner.backend);
    assert!(!backend.revoke(&owner.mutex, 1, by()).unwrap());
    let fence = owner.granted(OnRefusal::Enqueue).fence();
    next.queue_up();
    assert!(!backend.revoke(&owner.mutex, fence + 1, by()).unwrap());
    owner.renewed(fence);
    assert!(backend.revoke(&owner.mutex, fence, by()).unwrap());
    assert!(!backend.revoke(&owner.mutex, fence, by()).unwrap());
    if subject.notifies_owners() {
        assert_eq!(owner.parker.park(by()), Unparked::Wake);
    }
    let began = Instant::now();
    let claimed = next.granted_soon();
    assert!(claimed.fence() > fence);
    assert!(began.elapsed() < LEASE.0, "it waited for the lease to end");
    assert!(owner.lost(fence));
    assert!(!owner.release(fence));
    assert!(!owner.record(fence));
    assert!(next.release(claimed.fence()));
}

pub fn inspection_shows_owner_and_queue(subject: &Subject) {
    let mutex = name("inspect");
    let mut owner = Side::new(subject, &mutex, "owner");
    let backend = Arc::clone(&owner.backend);
    let mutex: Arc<str> = mutex.into();
    backend.ping(by()).unwrap();
    assert!(!backend.owner(&mutex, by()).unwrap().has_owner());
    assert!(backend.participants(&mutex, by()).unwrap().is_empty());
    assert!(!backend.list(by()).unwrap().contains(&mutex));

    let fence = owner.granted(OnRefusal::Enqueue).fence();
    let ids = ["c", "a", "b"];
    let mut waiters: Vec<Side> = ids.iter().map(|id| owner.peer(subject, id)).collect();
    for waiter in &mut waiters {
        waiter.queue_up();
    }
    let seen = backend.owner(&mutex, by()).unwrap();
    assert!(seen.is_owner("owner"), "{seen:?}");
    assert_eq!(seen.fence(), fence);
    let list = backend.list(by()).unwrap();
    assert!(list.contains(&mutex));
    assert!(list.is_sorted(), "{list:?}");
    let participants = backend.participants(&mutex, by()).unwrap();
    let mut seen: Vec<&str> = participants.iter().map(|p| &*p.id).collect();
    if subject.queues_by_id() {
        assert_eq!(seen, ids);
    } else if subject.ordered {
        seen.dedup();
        assert_eq!(seen.len(), ids.len(), "{participants:?}");
    }

    for waiter in &mut waiters {
        waiter.raw.withdraw(by()).unwrap();
    }
    wait_until(PATIENCE, "nothing is left of those who left", || {
        backend.participants(&mutex, by()).unwrap().is_empty()
    });
    assert!(owner.release(fence));
    assert!(!backend.owner(&mutex, by()).unwrap().has_owner());
    assert!(!backend.list(by()).unwrap().contains(&mutex));
}

/// Ttl and transition of the contenders here: nothing in these facts waits for them to end.
const LEASE: (Duration, Duration) = (ms(20_000), ms(10_000));

/// One contender, driven by hand, with a factory of its own (as another process has).
struct Side {
    mutex: Arc<str>,
    backend: Arc<dyn Backend>,
    raw: Box<dyn RawContender>,
    parker: Parker,
    /// Keeps what the backend needs alive.
    _factory: contend::Factory,
}

impl Side {
    fn new(subject: &Subject, mutex: &str, id: &str) -> Side {
        let lease = Lease::new(LEASE.0, LEASE.1).unwrap();
        Side::with_lease(subject, mutex, id, lease)
    }

    fn with_lease(subject: &Subject, mutex: &str, id: &str, lease: Lease) -> Side {
        let factory = subject.factory();
        let backend = factory.backend().unwrap();
        // A backend whose leases are a session's has its own.
        let lease = if subject.is_kept_by_a_session() {
            factory.lease()
        } else {
            lease
        };
        let contender = Contender {
            mutex: mutex.into(),
            id: id.into(),
            lease,
            purpose: Purpose::Lead,
        };
        let parker = Parker::new();
        Side {
            mutex: Arc::clone(&contender.mutex),
            raw: backend.contender(&contender, &parker.unparker()).unwrap(),
            backend,
            parker,
            _factory: factory,
        }
    }

    /// Another contender for the same mutex, of another process.
    fn peer(&self, subject: &Subject, id: &str) -> Side {
        Side::new(subject, &self.mutex, id)
    }

    /// Makes a call that may fail while connections are being opened.
    fn insist<T>(&mut self, mut call: impl FnMut(&mut dyn RawContender) -> Result<T>) -> T {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match call(&mut *self.raw) {
                Ok(answer) => return answer,
                Err(error) if error.is_transient() && Instant::now() < deadline => {
                    thread::sleep(ms(10));
                }
                Err(error) => panic!("{error:?}"),
            }
        }
    }

    fn try_acquire(&mut self, on_refusal: OnRefusal) -> Option<MutexOwner> {
        match self.insist(|raw| raw.acquire(on_refusal, by())) {
            Attempt::Granted(grant) => Some(grant.owner),
            Attempt::Refused(_) => None,
        }
    }

    /// Acquires what is free.
    fn granted(&mut self, on_refusal: OnRefusal) -> MutexOwner {
        let owner = self.try_acquire(on_refusal);
        owner.unwrap_or_else(|| panic!("{}: refused", self.mutex))
    }

    /// Acquires what was handed over, or is about to be.
    fn granted_soon(&mut self) -> MutexOwner {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(owner) = self.try_acquire(OnRefusal::Enqueue) {
                return owner;
            }
            assert!(Instant::now() < deadline, "{}: refused", self.mutex);
            self.parker.park(Moment::now() + ms(20));
        }
    }

    /// Is refused and waits. On MySQL the first waiter of a factory stands in the queue once it can be woken.
    fn queue_up(&mut self) {
        let queue_up = |side: &mut Side| {
            let owner = side.try_acquire(OnRefusal::Enqueue);
            assert!(owner.is_none(), "{}: granted to a waiter", side.mutex);
        };
        let backend = Arc::clone(&self.backend);
        let is_untried = || backend.condition().wakeups == Wakeups::Untried;
        let is_first = is_untried();
        queue_up(self);
        if backend.realm().starts_with("mysql") && is_first {
            wait_until(PATIENCE, "it can be woken", || !is_untried());
            queue_up(self);
        }
    }

    fn renewed(&mut self, fence: u64) -> MutexOwner {
        match self.insist(|raw| raw.renew(fence, by())) {
            Renewal::Renewed(grant) => grant.owner,
            Renewal::Lost(owner) => panic!("{}: lost to {owner:?}", self.mutex),
        }
    }

    fn lost(&mut self, fence: u64) -> bool {
        let renewal = self.insist(|raw| raw.renew(fence, by()));
        matches!(renewal, Renewal::Lost(_))
    }

    fn release(&mut self, fence: u64) -> bool {
        self.raw.release(fence, by()).unwrap()
    }

    fn last_run(&mut self) -> Option<Duration> {
        self.backend.last_run(&self.mutex, by()).unwrap()
    }

    fn record(&mut self, fence: u64) -> bool {
        self.backend
            .record_run(&self.mutex, fence, Duration::from_secs(60), by())
            .unwrap()
    }
}

/// Repeats a round until it was seen to happen within the claim time.
fn seen_within_the_claim_time(mut round: impl FnMut(usize) -> bool) {
    assert!(
        (0..ROUNDS).any(&mut round),
        "not within the claim time in {ROUNDS} rounds"
    );
}

fn by() -> Moment {
    Moment::now() + Duration::from_secs(10)
}
