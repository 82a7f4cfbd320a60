//! What a new backend takes: this file. A toy that keeps its mutexes in a map, written against the
//! contract from outside of the crate, and put through the suite that every backend passes.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use contend::backend::{
    Attempt, Backend, CLAIM_TIME, Contender, Grant, OnRefusal, Participant, RawContender,
    RawObserver, Refusal, Renewal, View,
};
use contend::{Factory, Moment, MutexOwner, Result, Unparker};
use parking_lot::Mutex;

use crate::conformance::{Subject, lease};

static MUTEXES: LazyLock<Mutexes> = LazyLock::new(Mutexes::default);

conformance!(Subject {
    factory: Box::new(|| Factory::new(Arc::new(Toy::default()), lease())),
    ordered: true,
});

/// The same, with lockers that queue in the process.
mod one_per_process {
    use super::*;

    conformance!(Subject {
        factory: Box::new(|| {
            let toy = Toy {
                one_per_process: true,
            };
            Factory::new(Arc::new(toy), lease())
        }),
        ordered: true,
    });
}

type Mutexes = Mutex<HashMap<Arc<str>, Entry>>;

#[derive(Default)]
struct Entry {
    owner: MutexOwner,
    /// Handed to this contender, until then.
    handed: Option<(Arc<str>, u64)>,
    /// In order; with who is to be woken.
    waiting: Vec<(Arc<str>, Option<Unparker>, u64)>,
    owner_unparker: Option<Unparker>,
    observers: Vec<Unparker>,
    last_fence: u64,
    run_at: Option<u64>,
}

fn now_us() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    now.as_micros() as u64
}

fn now_ms() -> u64 {
    now_us() / 1_000
}

impl Entry {
    /// Lets go of what has ended, and hands a free mutex to the first that waits.
    fn tick(&mut self) {
        let now = now_ms();
        let free = self.owner.owner_id().is_empty();
        if !free && self.owner.transition_at() < now {
            self.free();
        }
        if self.handed.as_ref().is_some_and(|(_, until)| *until < now) {
            self.handed = None;
        }
        if self.owner.owner_id().is_empty() && self.handed.is_none() && !self.waiting.is_empty() {
            let (id, unparker, _) = self.waiting.remove(0);
            self.handed = Some((id, now + CLAIM_TIME.as_millis() as u64));
            unparker.iter().for_each(Unparker::unpark);
        }
    }

    fn free(&mut self) {
        self.owner = MutexOwner::NONE;
        self.owner_unparker = None;
        self.observers.iter().for_each(Unparker::unpark);
    }

    fn seen(&self) -> MutexOwner {
        self.owner.clone().observed_at(now_ms(), Moment::now())
    }

    fn set_lease(&mut self, contender: &Contender, acquired_at: u64, fence: u64) -> Grant {
        let (now, lease) = (now_ms(), contender.lease);
        let end = |after: Duration, old: u64| old.max(now + after.as_millis() as u64);
        let ours = self.owner.is_owner(&contender.id);
        let (ttl_at, transition_at) = match ours {
            true => (self.owner.ttl_at(), self.owner.transition_at()),
            false => (0, 0),
        };
        self.owner = MutexOwner::new(
            Arc::clone(&contender.id),
            acquired_at,
            end(lease.ttl(), ttl_at),
            end(lease.total(), transition_at),
            fence,
        );
        Grant {
            owner: self.seen(),
            until: None,
        }
    }

    fn is_owned(&self, id: &str, fence: u64) -> bool {
        self.owner.is_owner(id) && self.owner.fence() == fence
    }
}

fn entry<T>(mutex: &Arc<str>, look: impl FnOnce(&mut Entry) -> T) -> T {
    let mut mutexes = MUTEXES.lock();
    let entry = mutexes.entry(Arc::clone(mutex)).or_default();
    entry.tick();
    let out = look(entry);
    entry.tick();
    out
}

#[derive(Debug, Default)]
struct Toy {
    one_per_process: bool,
}

impl Backend for Toy {
    fn realm(&self) -> &str {
        "toy://"
    }

    fn contender(&self, contender: &Contender, wake: &Unparker) -> Result<Box<dyn RawContender>> {
        Ok(Box::new(ToyContender {
            contender: contender.clone(),
            unparker: wake.clone(),
        }))
    }

    fn observer(&self, mutex: &Arc<str>, wake: &Unparker) -> Result<Box<dyn RawObserver>> {
        entry(mutex, |entry| entry.observers.push(wake.clone()));
        Ok(Box::new(ToyObserver(Arc::clone(mutex))))
    }

    fn one_per_process(&self) -> bool {
        self.one_per_process
    }

    fn last_run(&self, mutex: &Arc<str>, _: Moment) -> Result<Option<Duration>> {
        let age = |at: u64| Duration::from_millis(now_ms().saturating_sub(at));
        Ok(entry(mutex, |entry| entry.run_at.map(age)))
    }

    fn record_run(&self, mutex: &Arc<str>, fence: u64, _: Duration, _: Moment) -> Result<bool> {
        Ok(entry(mutex, |entry| {
            let found = !entry.owner.owner_id().is_empty() && entry.owner.fence() == fence;
            if found {
                entry.run_at = Some(now_ms());
            }
            found
        }))
    }

    fn ping(&self, _: Moment) -> Result<()> {
        Ok(())
    }

    fn owner(&self, mutex: &Arc<str>, _: Moment) -> Result<MutexOwner> {
        Ok(entry(mutex, |entry| entry.seen()))
    }

    fn participants(&self, mutex: &Arc<str>, _: Moment) -> Result<Vec<Participant>> {
        let participant =
            |(id, _, since): &(Arc<str>, _, u64)| Participant::new(Arc::clone(id), Some(*since));
        Ok(entry(mutex, |it| {
            it.waiting.iter().map(participant).collect()
        }))
    }

    fn list(&self, _: Moment) -> Result<Vec<Arc<str>>> {
        let mut mutexes = MUTEXES.lock();
        mutexes.values_mut().for_each(Entry::tick);
        let used = |entry: &Entry| {
            !entry.owner.owner_id().is_empty()
                || entry.handed.is_some()
                || !entry.waiting.is_empty()
        };
        let mut names: Vec<_> = mutexes
            .iter()
            .filter(|(_, entry)| used(entry))
            .map(|(name, _)| Arc::clone(name))
            .collect();
        names.sort_unstable();
        Ok(names)
    }

    fn revoke(&self, mutex: &Arc<str>, fence: u64, _: Moment) -> Result<bool> {
        Ok(entry(mutex, |entry| {
            let id = entry.owner.owner_id().to_owned();
            let found = !id.is_empty() && entry.is_owned(&id, fence);
            if found {
                entry.owner_unparker.iter().for_each(Unparker::unpark);
                entry.free();
            }
            found
        }))
    }
}

struct ToyContender {
    contender: Contender,
    unparker: Unparker,
}

impl ToyContender {
    fn entry<T>(&self, look: impl FnOnce(&mut Entry) -> T) -> T {
        entry(&self.contender.mutex, look)
    }
}

impl RawContender for ToyContender {
    fn acquire(&mut self, on_refusal: OnRefusal, _: Moment) -> Result<Attempt> {
        Ok(self.entry(|entry| {
            let id = &self.contender.id;
            let ours = entry.owner.is_owner(id);
            let handed = entry.handed.as_ref();
            let may = handed.is_none_or(|(handed, _)| handed == id);
            if ours || (entry.owner.owner_id().is_empty() && may) {
                entry.handed = None;
                entry.waiting.retain(|(waiting, ..)| waiting != id);
                entry.last_fence = now_us().max(entry.last_fence + 1);
                let grant = entry.set_lease(&self.contender, now_ms(), entry.last_fence);
                entry.owner_unparker = Some(self.unparker.clone());
                entry.observers.iter().for_each(Unparker::unpark);
                return Attempt::Granted(grant);
            }
            let waits = entry.waiting.iter().any(|(waiting, ..)| waiting == id);
            if on_refusal == OnRefusal::Enqueue && !waits {
                let place = (Arc::clone(id), Some(self.unparker.clone()), now_ms());
                entry.waiting.push(place);
            }
            let end = handed.map_or(entry.owner.transition_at(), |(_, until)| *until);
            let left = Duration::from_millis(end.saturating_sub(now_ms()) + 1);
            Attempt::Refused(Refusal {
                owner: entry.seen(),
                retry_in: left,
            })
        }))
    }

    fn renew(&mut self, fence: u64, _: Moment) -> Result<Renewal> {
        Ok(self.entry(|entry| {
            if !entry.is_owned(&self.contender.id, fence) {
                return Renewal::Lost(entry.seen());
            }
            let acquired_at = entry.owner.acquired_at();
            Renewal::Renewed(entry.set_lease(&self.contender, acquired_at, fence))
        }))
    }

    fn release(&mut self, fence: u64, _: Moment) -> Result<bool> {
        Ok(self.entry(|entry| {
            let found = entry.is_owned(&self.contender.id, fence);
            if found {
                entry.free();
            }
            found
        }))
    }

    fn withdraw(&mut self, _: Moment) -> Result<()> {
        self.entry(|entry| {
            let id = &self.contender.id;
            entry.waiting.retain(|(waiting, ..)| waiting != id);
            entry.handed.take_if(|(handed, _)| handed == id);
        });
        Ok(())
    }
}

impl Drop for ToyContender {
    fn drop(&mut self) {
        let _ = self.withdraw(Moment::now());
    }
}

struct ToyObserver(Arc<str>);

impl RawObserver for ToyObserver {
    fn observe(&mut self, _: Moment) -> Result<View> {
        Ok(entry(&self.0, |entry| View {
            owner: entry.seen(),
            look_in: Duration::from_millis(200),
        }))
    }
}
