//! The renewer's list: whom to see to, and when.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::holding::Holding;
use crate::bell::Waker;
use crate::clock::Moment;

/// One entry per guard: two ordered keys, so that thousands of guards cost a look-up each and no scan.
pub(super) struct Rota {
    /// By when they are due; with when they must be told.
    due: BTreeMap<(Moment, u64), (Arc<Holding>, Moment)>,
    /// By when they must be told; with when they are due.
    tell_by: BTreeMap<(Moment, u64), Moment>,
    /// What the renewer sleeps for, and how to wake it.
    pub(super) sleeps_until: Moment,
    pub(super) waker: Option<Waker>,
    /// Whether the renewer's thread was started.
    pub(super) started: bool,
}

/// When to see to a guard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Due {
    /// When its machine has something to do.
    pub(super) at: Moment,
    /// When its holder must have been told at the latest that belief has ended, if it ends.
    pub(super) tell_by: Moment,
}

impl Rota {
    pub(super) fn new() -> Rota {
        Rota {
            due: BTreeMap::new(),
            tell_by: BTreeMap::new(),
            sleeps_until: Moment::FAR,
            waker: None,
            started: false,
        }
    }

    /// Enters a guard. The renewer is woken only if this is due before what it sleeps for: a cycle that
    /// ends before its first renewal never wakes anybody.
    pub(super) fn insert(&mut self, holding: &Arc<Holding>, due: Due) {
        let number = holding.number();
        self.due
            .insert((due.at, number), (Arc::clone(holding), due.tell_by));
        self.tell_by.insert((due.tell_by, number), due.at);
        if due.at < self.sleeps_until {
            self.sleeps_until = due.at;
            if let Some(waker) = &self.waker {
                waker.wake();
            }
        }
    }

    pub(super) fn remove(&mut self, number: u64, due: Due) {
        self.due.remove(&(due.at, number));
        self.tell_by.remove(&(due.tell_by, number));
    }

    /// Takes out a guard that is due, and says until when a call for it may last on account of the
    /// others. Who must be told comes before who only wants to be renewed.
    pub(super) fn pop(&mut self, now: Moment) -> Option<(Arc<Holding>, Moment)> {
        let overdue = self
            .tell_by
            .first_key_value()
            .filter(|((tell_by, _), _)| *tell_by <= now)
            .map(|((_, number), at)| (*at, *number));
        let key = overdue.or_else(|| self.due.first_key_value().map(|(key, _)| *key))?;
        if key.0 > now {
            return None;
        }
        let (holding, tell_by) = self.due.remove(&key)?;
        self.tell_by.remove(&(tell_by, key.1));
        let others = self.tell_by.first_key_value();
        let others = others.map_or(Moment::FAR, |((tell_by, _), _)| *tell_by);
        Some((holding, others))
    }

    /// When the next guard is due.
    pub(super) fn next(&self) -> Moment {
        let first = self.due.first_key_value();
        first.map_or(Moment::FAR, |((at, _), _)| *at)
    }
}
