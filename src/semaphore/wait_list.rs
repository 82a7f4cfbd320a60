//! `WaitList`: who of one factory waits for which semaphores, in the order in which they came.
//!
//! Pure: it says who should do what, and wakes them; it asks no store and reads no clock.
//!
//! A waiting request *claims* the semaphore that it was last found short of, or all of its semaphores
//! while it has not tried yet. It may try while none that came before it claims one of its
//! semaphores. So requests for one semaphore are served in order, only the first of them polls, and one
//! that waits for another semaphore is in nobody's way.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;

use crate::backend::permit_store::{Exhausted, Wish};
use crate::parker::{Parker, Unparker};

/// All waiting requests of a factory.
#[derive(Debug, Default)]
pub(super) struct WaitList {
    queue: Mutex<Waiters>,
}

#[derive(Debug, Default)]
struct Waiters {
    waiters: VecDeque<Waiter>,
    next: u64,
    /// Capacity and held permits of the semaphores waited for, as they were last seen.
    seen: HashMap<Arc<str>, (u32, u64)>,
}

#[derive(Debug)]
struct Waiter {
    number: u64,
    permits: Vec<(Arc<str>, u32)>,
    /// The semaphore that it was found short of, which those who came later leave to it; all of its
    /// semaphores while it has not tried yet.
    short_of: Option<Arc<str>>,
    advice: Advice,
    unparker: Unparker,
}

/// What a waiter should do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Advice {
    /// Wait: others come first.
    Stay,
    /// It comes first now, and tries from time to time.
    Poll,
    /// Try at once: there is room for it, or something changed that may be enough.
    Try,
}

impl Waiter {
    fn wanted(&self, name: &str) -> Option<u32> {
        let wanted = self.permits.iter().find(|(own, _)| **own == *name);
        wanted.map(|(_, count)| *count)
    }

    fn claims(&self, name: &str) -> bool {
        match &self.short_of {
            None => self.wanted(name).is_some(),
            Some(own) => **own == *name,
        }
    }

    fn claimed(&self) -> impl Iterator<Item = Arc<str>> {
        let names = self.permits.iter().map(|(name, _)| name);
        names.filter(|name| self.claims(name)).cloned()
    }

    fn wants_any(&self, claimed: &HashSet<Arc<str>>) -> bool {
        self.permits.iter().any(|(name, _)| claimed.contains(name))
    }

    fn advise(&mut self, advice: Advice) {
        if advice > self.advice {
            self.advice = advice;
            self.unparker.unpark();
        }
    }
}

impl Waiters {
    fn position(&self, number: u64) -> Option<usize> {
        self.waiters
            .binary_search_by_key(&number, |waiter| waiter.number)
            .ok()
    }

    fn get_mut(&mut self, number: u64) -> Option<&mut Waiter> {
        let at = self.position(number)?;
        self.waiters.get_mut(at)
    }

    /// `by` has let go of `names`: unparks every waiter that is the first for one of them now.
    fn advance(&mut self, names: &[Arc<str>], by: u64) {
        let mut claimed: HashSet<Arc<str>> = HashSet::new();
        for waiter in &mut self.waiters {
            let first = !waiter.wants_any(&claimed);
            let concerned = names.iter().any(|name| waiter.wanted(name).is_some());
            if first && concerned && waiter.number != by {
                // One that waits for a single semaphore knows what it is short of.
                let knows = waiter.short_of.is_some() || waiter.permits.len() == 1;
                waiter.advise(if knows { Advice::Poll } else { Advice::Try });
            }
            claimed.extend(waiter.claimed());
            if names.iter().all(|name| claimed.contains(name)) {
                return;
            }
        }
    }

    /// Tells those for whom there is room in `name` now, in order, and nobody else: those who come after
    /// one that must wait for another semaphore wait with it.
    fn room(&mut self, name: &str, mut room: u64) {
        let mut claimed: HashSet<Arc<str>> = HashSet::new();
        let mut first = true;
        for waiter in &mut self.waiters {
            let blocked = waiter.wants_any(&claimed);
            if waiter.claims(name) {
                let wanted = u64::from(waiter.wanted(name).unwrap_or(0));
                if blocked || wanted > room {
                    if first && !blocked {
                        // Together with what was free before it may be enough.
                        waiter.advise(Advice::Try);
                    }
                    return;
                }
                room -= wanted;
                first = false;
                waiter.advise(Advice::Try);
                if room == 0 {
                    return;
                }
            } else {
                claimed.extend(waiter.claimed());
            }
        }
    }
}

impl WaitList {
    /// Returns `true` if nobody waits.
    pub(super) fn is_empty(&self) -> bool {
        self.queue.lock().waiters.is_empty()
    }

    /// Returns `true` if somebody waits for one of these semaphores.
    pub(super) fn is_claimed(&self, wish: &Wish) -> bool {
        let queue = self.queue.lock();
        queue
            .waiters
            .iter()
            .any(|waiter| wish.permits.iter().any(|(name, _)| waiter.claims(name)))
    }

    /// Joins the end of the list.
    pub(super) fn join(&self, wish: &Wish, parker: &Parker) -> Turn<'_> {
        let mut queue = self.queue.lock();
        let number = queue.next;
        queue.next += 1;
        queue.waiters.push_back(Waiter {
            number,
            permits: wish.permits.clone(),
            short_of: None,
            advice: Advice::Stay,
            unparker: parker.unparker(),
        });
        drop(queue);
        Turn { list: self, number }
    }

    /// Something of these semaphores was given back.
    pub(super) fn released<'a>(&self, permits: impl IntoIterator<Item = (&'a str, u32)>) {
        let mut queue = self.queue.lock();
        if queue.waiters.is_empty() {
            return;
        }
        for (name, count) in permits {
            queue.room(name, u64::from(count));
        }
    }

    /// A semaphore changed in a way that is not known here, such as its capacity.
    pub(super) fn changed(&self, name: &str) {
        self.queue.lock().room(name, 0);
    }

    /// So much is left in these semaphores after a grant.
    pub(super) fn left<'a>(&self, free: impl IntoIterator<Item = (&'a str, u64)>) {
        let mut queue = self.queue.lock();
        for (name, free) in free {
            if free > 0 {
                queue.room(name, free);
            }
        }
    }
}

/// A waiter's turn in the list; given up when it is dropped.
#[derive(Debug)]
pub(super) struct Turn<'a> {
    list: &'a WaitList,
    number: u64,
}

impl Turn<'_> {
    /// Takes the advice for this waiter. `Poll` or more only if nobody comes before it.
    pub(super) fn advice(&self) -> Advice {
        let mut queue = self.list.queue.lock();
        let advice = queue.get_mut(self.number).map(|it| &mut it.advice);
        advice.map_or(Advice::Stay, |it| std::mem::replace(it, Advice::Stay))
    }

    /// Returns `true` if none that came before claims a semaphore of this waiter.
    pub(super) fn is_first(&self) -> bool {
        let queue = self.list.queue.lock();
        let at = queue.position(self.number);
        let Some(own) = at.and_then(|at| queue.waiters.get(at)) else {
            return false;
        };
        let mut before = queue.waiters.iter().take_while(|it| it.number < own.number);
        !before.any(|other| own.permits.iter().any(|(name, _)| other.claims(name)))
    }

    /// This waiter was found short of a semaphore: it claims only that one from now on.
    pub(super) fn short_of(&self, exhausted: &Exhausted) {
        let mut queue = self.list.queue.lock();
        queue.seen.insert(
            Arc::clone(&exhausted.semaphore),
            (exhausted.capacity, exhausted.held),
        );
        let Some(waiter) = queue.get_mut(self.number) else {
            return;
        };
        let mut freed: Vec<Arc<str>> = waiter.claimed().collect();
        freed.retain(|name| *name != exhausted.semaphore);
        waiter.short_of = Some(Arc::clone(&exhausted.semaphore));
        if !freed.is_empty() {
            queue.advance(&freed, self.number);
        }
    }

    /// What the semaphores were last seen short of, for one that never came first.
    pub(super) fn seen(&self, wish: &Wish) -> Option<Exhausted> {
        let queue = self.list.queue.lock();
        wish.permits.iter().find_map(|(name, wanted)| {
            let (capacity, held) = queue.seen.get(name)?;
            Some(Exhausted {
                semaphore: Arc::clone(name),
                capacity: *capacity,
                held: *held,
                wanted: *wanted,
            })
        })
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut queue = self.list.queue.lock();
        let at = queue.position(self.number);
        let Some(waiter) = at.and_then(|at| queue.waiters.remove(at)) else {
            return;
        };
        if queue.waiters.is_empty() {
            queue.seen.clear();
            return;
        }
        if waiter.advice >= Advice::Try {
            // It leaves without having done what it was told: the next one does.
            for (name, count) in &waiter.permits {
                if waiter.claims(name) {
                    queue.room(name, u64::from(*count));
                }
            }
        }
        let claimed: Vec<Arc<str>> = waiter.claimed().collect();
        queue.advance(&claimed, self.number);
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use super::super::request::PermitRequest;
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    fn wish(permits: &[(&str, u32)]) -> Wish {
        Wish {
            external_id: Arc::from("id"),
            owner: None,
            ttl: None,
            permits: permits.iter().map(|(n, c)| (Arc::from(*n), *c)).collect(),
        }
    }

    fn short(name: &str) -> Exhausted {
        seen(name, 1, 1, 1)
    }

    fn seen(name: &str, capacity: u32, held: u64, wanted: u32) -> Exhausted {
        Exhausted {
            semaphore: Arc::from(name),
            capacity,
            held,
            wanted,
        }
    }

    /// Review C11: a release wakes only whom it can serve.
    #[test]
    fn one_permit_given_back_wakes_one_of_a_thousand() {
        let list = WaitList::default();
        let parker = Parker::new();
        let places: Vec<Turn<'_>> = (0..1000)
            .map(|_| list.join(&wish(&[("a", 1)]), &parker))
            .collect();
        places[0].short_of(&short("a"));
        list.released([("a", 1)]);
        let advice: Vec<Advice> = places.iter().map(Turn::advice).collect();
        assert_eq!(advice[0], Advice::Try);
        assert!(advice[1..].iter().all(|advice| *advice == Advice::Stay));
        list.released([("a", 3)]);
        let woken = |place: &&Turn<'_>| place.advice() == Advice::Try;
        assert_eq!(places.iter().filter(woken).count(), 3);
    }

    /// Review C11: many waiters on one permit, each served once, in the order in which they came.
    #[test]
    fn many_waiters_of_one_permit_are_served_in_order() {
        let factory = crate::connect("memory://many-waiters").unwrap();
        let semaphores = factory.semaphores().unwrap();
        semaphores.create("a", 1).unwrap();
        let request = PermitRequest::generated().permits("a", 1);
        let first = semaphores.guard(&request, Duration::ZERO).unwrap();
        let list = &semaphores.shared.get().unwrap().waiting;
        let order = Mutex::new(Vec::new());
        thread::scope(|scope| {
            for number in 0..200 {
                let (semaphores, order, request) = (&semaphores, &order, &request);
                scope.spawn(move || {
                    let guard = semaphores.guard(request, PATIENCE).unwrap();
                    order.lock().push(number);
                    drop(guard);
                });
                testbed::wait_until(PATIENCE, "it waits", || {
                    list.queue.lock().waiters.len() > number
                });
            }
            drop(first);
        });
        assert_eq!(order.into_inner(), (0..200).collect::<Vec<_>>());
        assert_eq!(semaphores.usage("a").unwrap().held, 0);
    }

    /// Review C12: who waits for (a, b) and is short of a is not in the way of b's takers.
    #[test]
    fn a_waiter_claims_only_what_it_is_short_of() {
        let list = WaitList::default();
        let parker = Parker::new();
        let both = list.join(&wish(&[("a", 1), ("b", 1)]), &parker);
        let b = list.join(&wish(&[("b", 1)]), &parker);
        let a = list.join(&wish(&[("a", 1)]), &parker);
        assert!(both.is_first() && !b.is_first() && !a.is_first());
        both.short_of(&short("a"));
        assert!(b.is_first() && !a.is_first());
        assert_eq!(b.advice(), Advice::Poll);
        list.released([("b", 1)]);
        assert_eq!((both.advice(), b.advice()), (Advice::Stay, Advice::Try));
        // A release of a is for the one that came first, and then for the other.
        list.released([("a", 1)]);
        assert_eq!((both.advice(), a.advice()), (Advice::Try, Advice::Stay));
        drop(both);
        assert!(a.is_first());
        assert_eq!(a.advice(), Advice::Poll);
    }

    #[test]
    fn one_that_leaves_passes_on_what_it_was_told() {
        let list = WaitList::default();
        let parker = Parker::new();
        let one = list.join(&wish(&[("a", 2)]), &parker);
        let two = list.join(&wish(&[("a", 1)]), &parker);
        list.released([("a", 2)]);
        assert_eq!(two.advice(), Advice::Stay);
        drop(one);
        assert_eq!(two.advice(), Advice::Try);
    }

    #[test]
    fn room_in_one_semaphore_is_not_offered_to_one_that_must_wait_for_another() {
        let list = WaitList::default();
        let parker = Parker::new();
        let a = list.join(&wish(&[("a", 1)]), &parker);
        let both = list.join(&wish(&[("a", 1), ("b", 1)]), &parker);
        a.short_of(&short("a"));
        list.released([("a", 1), ("b", 1)]);
        assert_eq!((a.advice(), both.advice()), (Advice::Try, Advice::Stay));
    }

    #[test]
    fn a_large_wish_is_not_overtaken_by_small_ones() {
        let list = WaitList::default();
        let parker = Parker::new();
        let large = list.join(&wish(&[("a", 5)]), &parker);
        let small = list.join(&wish(&[("a", 1)]), &parker);
        list.released([("a", 1)]);
        assert_eq!(
            (large.advice(), small.advice()),
            (Advice::Try, Advice::Stay)
        );
        large.short_of(&seen("a", 5, 4, 5));
        assert_eq!(small.advice(), Advice::Stay);
        assert_eq!(small.seen(&wish(&[("a", 1)])).unwrap().held, 4);
    }
}
