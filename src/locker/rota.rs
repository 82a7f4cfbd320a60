//! The renewer's list: whom to see to, and when.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::holding::Holding;
use crate::bell::Waker;
use crate::clock::Moment;

/// How many threads see to the guards of one factory at most.
pub(super) const MOST_WORKERS: usize = 4;

/// How many of them may repeat what has just failed, and may hang again: one is always left for guards
/// with which nothing is wrong.
const MOST_RETRIES: usize = MOST_WORKERS - 1;

/// One entry per guard: two ordered keys, so that thousands of guards cost a look-up each and no scan.
pub(super) struct Rota {
    /// By when they are due; with when they must be told.
    due: BTreeMap<(Moment, u64), (Arc<Holding>, Moment)>,
    /// Those whose last renewal failed, likewise: they come after all others that are due.
    retries: BTreeMap<(Moment, u64), (Arc<Holding>, Moment)>,
    /// By when they must be told; with when they are due, and whether again.
    tell_by: BTreeMap<(Moment, u64), Due>,
    /// The workers that sleep: what for, and how to wake them.
    sleepers: [Option<(Moment, Waker)>; MOST_WORKERS],
    /// The workers that were started and have not ended.
    pub(super) started: [bool; MOST_WORKERS],
    /// How many of them see to a guard whose last renewal failed.
    retrying: usize,
    /// When no helper is needed any more, if nothing happens until then.
    pub(super) calm_at: Moment,
    /// The factory is gone: nobody is started any more.
    pub(super) closed: bool,
}

/// When to see to a guard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Due {
    /// When its machine has something to do.
    pub(super) at: Moment,
    /// When its holder must have been told at the latest that belief has ended, if it ends.
    pub(super) tell_by: Moment,
    /// Its last renewal failed.
    pub(super) again: bool,
}

/// A guard to see to now.
pub(super) struct Visit {
    pub(super) holding: Arc<Holding>,
    pub(super) due: Due,
    /// Until when a call may last on account of the others.
    pub(super) others: Moment,
}

impl Rota {
    pub(super) fn new() -> Rota {
        Rota {
            due: BTreeMap::new(),
            retries: BTreeMap::new(),
            tell_by: BTreeMap::new(),
            sleepers: [const { None }; MOST_WORKERS],
            started: [false; MOST_WORKERS],
            retrying: 0,
            calm_at: Moment::now(),
            closed: false,
        }
    }

    /// Enters a guard. Workers are woken only if this is due before what they sleep for: a cycle that
    /// ends before its first renewal never wakes anybody.
    pub(super) fn insert(&mut self, holding: &Arc<Holding>, due: Due) {
        let number = holding.number();
        let entry = (Arc::clone(holding), due.tell_by);
        self.list(due.again).insert((due.at, number), entry);
        self.tell_by.insert((due.tell_by, number), due);
        self.wake_for(due.at);
    }

    pub(super) fn remove(&mut self, number: u64, due: Due) {
        self.list(due.again).remove(&(due.at, number));
        self.tell_by.remove(&(due.tell_by, number));
    }

    /// Takes out a guard that is due. Who must be told comes before who only wants to be renewed, and
    /// what may hang again comes last.
    pub(super) fn pop(&mut self, now: Moment) -> Option<Visit> {
        let told_late = self
            .tell_by
            .first_key_value()
            .filter(|((tell_by, _), _)| *tell_by <= now)
            .map(|((_, number), due)| (due.again, (due.at, *number)));
        let (again, key) = told_late
            .or_else(|| first(&self.due, now).map(|key| (false, key)))
            .or_else(|| {
                let key = first(&self.retries, now)?;
                (self.retrying < MOST_RETRIES).then_some((true, key))
            })?;
        let (holding, tell_by) = self.list(again).remove(&key)?;
        self.tell_by.remove(&(tell_by, key.1));
        self.retrying += usize::from(again);
        let others = self.tell_by.first_key_value();
        Some(Visit {
            holding,
            due: Due {
                at: key.0,
                tell_by,
                again,
            },
            others: others.map_or(Moment::FAR, |((tell_by, _), _)| *tell_by),
        })
    }

    /// A visit is over.
    pub(super) fn visited(&mut self, due: Due) {
        if due.again {
            self.retrying = self.retrying.saturating_sub(1);
            if self.retrying + 1 == MOST_RETRIES {
                // Those that sleep did so without regard to who had to wait for this.
                self.wake_for(self.next());
            }
        }
    }

    /// When the next guard is due that a worker without anything to do could see to.
    pub(super) fn next(&self) -> Moment {
        let at = |key: Option<&(Moment, u64)>| key.map_or(Moment::FAR, |(at, _)| *at);
        let mut next = at(self.due.keys().next()).min(at(self.tell_by.keys().next()));
        if self.retrying < MOST_RETRIES {
            next = next.min(at(self.retries.keys().next()));
        }
        next
    }

    /// The worker sleeps from now on. Until it is up again, it is rung for what is due before `until`.
    pub(super) fn sleeps(&mut self, worker: usize, until: Moment, waker: Waker) {
        if let Some(sleeper) = self.sleepers.get_mut(worker) {
            *sleeper = Some((until, waker));
        }
    }

    /// Nobody needs to ring for a worker that is up: it looks again before it sleeps.
    pub(super) fn is_up(&mut self, worker: usize) {
        if let Some(sleeper) = self.sleepers.get_mut(worker) {
            *sleeper = None;
        }
    }

    /// A worker to start, if nobody is left to see to what becomes due next.
    pub(super) fn missing(&self) -> Option<usize> {
        let lookout = self.closed || self.sleepers.iter().any(Option::is_some);
        let free = || self.started.iter().position(|started| !started);
        if lookout { None } else { free() }
    }

    /// All that sleep for longer: the first of them may find work that hangs.
    fn wake_for(&mut self, at: Moment) {
        for (until, waker) in self.sleepers.iter_mut().flatten() {
            if at < *until {
                *until = at;
                waker.wake();
            }
        }
    }

    fn list(&mut self, again: bool) -> &mut BTreeMap<(Moment, u64), (Arc<Holding>, Moment)> {
        if again {
            &mut self.retries
        } else {
            &mut self.due
        }
    }
}

fn first<T>(list: &BTreeMap<(Moment, u64), T>, now: Moment) -> Option<(Moment, u64)> {
    list.keys().next().copied().filter(|(at, _)| *at <= now)
}
