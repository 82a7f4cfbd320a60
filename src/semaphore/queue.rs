//! `WaitQueue`: the requests of one factory that wait for permits, in the order of their arrival.
//!
//! A waiting request stands in one line: that of the semaphore it was last found short of. It keeps its number when
//! it moves, so it comes before later ones there too. Only the first of a line polls; the others wait until permits
//! come back that are enough for them.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use parking_lot::Mutex;

use crate::backend::permit_store::{Exhausted, Request, Standing};
use crate::parker::{Parker, Unparker};

#[derive(Debug, Default)]
pub(super) struct WaitQueue {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    /// By semaphore; none is empty.
    lines: HashMap<Arc<str>, Line>,
}

/// The requests that wait for one semaphore, by number.
#[derive(Debug, Default)]
struct Line(BTreeMap<u64, Waiting>);

#[derive(Debug)]
struct Waiting {
    wanted: u32,
    /// It should try: permits may have come back for it.
    called: bool,
    unparker: Unparker,
}

impl Line {
    fn is_first(&self, number: u64) -> bool {
        self.0.keys().next() == Some(&number)
    }

    /// Calls the requests that `room` permits are enough for, in order; the first one in any case, because some may
    /// have been free before.
    fn call(&mut self, room: u64) {
        let mut left = Some(room);
        for (at, waiting) in self.0.values_mut().enumerate() {
            left = left.and_then(|left| left.checked_sub(u64::from(waiting.wanted)));
            if at > 0 && left.is_none() {
                return;
            }
            waiting.called = true;
            waiting.unparker.unpark();
        }
    }
}

/// What a waiting request should do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// Try now.
    Try,
    /// Try from time to time: it is the first of its line, or in none.
    Poll,
    /// Wait: others come first.
    Stay,
}

impl WaitQueue {
    /// Takes a number. A request for a semaphore that others wait for stands behind them.
    pub(super) fn join<'a>(&'a self, request: &'a Request, parker: &Parker) -> Place<'a> {
        let mut state = self.state.lock();
        let number = state.next;
        state.next += 1;
        let mut place = Place {
            queue: self,
            request,
            number,
            line: None,
            unparker: parker.unparker(),
        };
        let mut names = request.permits.iter().map(|(name, _)| name);
        if let Some(busy) = names.find(|name| state.lines.contains_key(*name)) {
            place.enter(&mut state, busy);
        }
        place
    }

    /// Permits came back, or a capacity changed.
    pub(super) fn released<'a>(&self, permits: impl IntoIterator<Item = (&'a str, u64)>) {
        let mut state = self.state.lock();
        for (name, count) in permits {
            if let Some(line) = state.lines.get_mut(name) {
                line.call(count);
            }
        }
    }
}

/// A request's place; given up when it is dropped.
pub(super) struct Place<'a> {
    queue: &'a WaitQueue,
    request: &'a Request,
    number: u64,
    line: Option<Arc<str>>,
    unparker: Unparker,
}

impl Place<'_> {
    /// Whether it stands in a line.
    pub(super) fn waits(&self) -> bool {
        self.line.is_some()
    }

    pub(super) fn turn(&self) -> Turn {
        let mut state = self.queue.state.lock();
        let line = self
            .line
            .as_ref()
            .and_then(|name| state.lines.get_mut(name));
        let Some(line) = line else {
            return Turn::Poll;
        };
        let own = line.0.get_mut(&self.number);
        if own.is_some_and(|own| std::mem::take(&mut own.called)) {
            Turn::Try
        } else if line.is_first(self.number) {
            Turn::Poll
        } else {
            Turn::Stay
        }
    }

    /// The request was found short of a semaphore. The first of a line is called at once: permits may have come back
    /// between its try and this.
    pub(super) fn move_to(&mut self, short: &Exhausted) {
        if self.line.as_ref() != Some(&short.semaphore) {
            self.leave(true);
            let queue = self.queue;
            self.enter(&mut queue.state.lock(), &short.semaphore);
        }
    }

    /// What a line on the server is told of it.
    pub(super) fn standing(&self) -> Standing {
        let state = self.queue.state.lock();
        let line = self.line.as_ref().and_then(|name| state.lines.get(name));
        Standing {
            line: self.line.clone(),
            others: line.is_some_and(|line| line.0.len() > 1),
        }
    }

    /// Gives the place up. Returns the semaphore in whose line no request waits any more.
    pub(super) fn give_up(mut self) -> Option<Arc<str>> {
        let name = self.line.clone()?;
        self.leave(true);
        let empty = !self.queue.state.lock().lines.contains_key(&name);
        empty.then_some(name)
    }

    /// The request was granted and left so much of each of its semaphores. The next of its line is called if the server
    /// has no place for it.
    pub(super) fn granted(mut self, free: &[u64], next_has_place: bool) {
        self.leave(!next_has_place);
        let names = self.request.permits.iter().map(|(name, _)| &**name);
        let left = names.zip(free.iter().copied());
        self.queue.released(left.filter(|(_, free)| *free > 0));
    }

    fn wanted(&self, name: &str) -> u32 {
        let mut permits = self.request.permits.iter();
        let own = permits.find(|(own, _)| **own == *name);
        own.map_or(0, |(_, count)| *count)
    }

    fn enter(&mut self, state: &mut State, name: &Arc<str>) {
        let waiting = Waiting {
            wanted: self.wanted(name),
            called: false,
            unparker: self.unparker.clone(),
        };
        let line = state.lines.entry(Arc::clone(name)).or_default();
        line.0.insert(self.number, waiting);
        if line.is_first(self.number) {
            line.call(0);
        }
        self.line = Some(Arc::clone(name));
    }

    /// Leaves its line. If it may not have used what it was called for, the next one is called.
    fn leave(&mut self, unused: bool) {
        let Some(name) = self.line.take() else { return };
        let mut state = self.queue.state.lock();
        let Some(line) = state.lines.get_mut(&name) else {
            return;
        };
        let first = line.is_first(self.number);
        let own = line.0.remove(&self.number);
        let called = own.is_some_and(|own| own.called);
        if line.0.is_empty() {
            state.lines.remove(&name);
        } else if called || unused && first {
            line.call(0);
        } else if first && let Some(next) = line.0.values().next() {
            // It polls from now on.
            next.unparker.unpark();
        }
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.leave(true);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(permits: &[(&str, u32)]) -> Request {
        Request {
            external_id: Arc::from("id"),
            owner: None,
            ttl: None,
            permits: permits
                .iter()
                .map(|(name, count)| (Arc::from(*name), *count))
                .collect(),
            token: 0,
            take_over: false,
            generated: true,
        }
    }

    fn short(semaphore: &str) -> Exhausted {
        Exhausted {
            semaphore: Arc::from(semaphore),
            capacity: 1,
            held: 1,
            wanted: 1,
        }
    }

    /// Joins, and has tried in vain.
    fn waits<'a>(queue: &'a WaitQueue, request: &'a Request, name: &str) -> Place<'a> {
        let mut place = queue.join(request, &Parker::new());
        place.move_to(&short(name));
        place.turn();
        place
    }

    /// Bug 4: what came back between the first try and the queue was found 50 ms later.
    #[test]
    fn first_in_line_tries_again_after_joining() {
        let (queue, one) = (WaitQueue::default(), request(&[("a", 1)]));
        let mut first = queue.join(&one, &Parker::new());
        assert_eq!(first.turn(), Turn::Poll);
        queue.released([("a", 1)]);
        first.move_to(&short("a"));
        assert_eq!(first.turn(), Turn::Try);
        assert_eq!(first.turn(), Turn::Poll);
        let second = queue.join(&one, &Parker::new());
        assert_eq!(second.turn(), Turn::Stay);
    }

    #[test]
    fn release_calls_those_it_suffices_for_in_order() {
        let queue = WaitQueue::default();
        let (one, two) = (request(&[("a", 1)]), request(&[("a", 2)]));
        let places = [&one, &two, &one].map(|it| waits(&queue, it, "a"));
        queue.released([("a", 2)]);
        assert_eq!(
            places.each_ref().map(Place::turn),
            [Turn::Try, Turn::Stay, Turn::Stay]
        );
        queue.released([("a", 3)]);
        assert_eq!(
            places.each_ref().map(Place::turn),
            [Turn::Try, Turn::Try, Turn::Stay]
        );
        queue.released([("b", 3)]);
        assert_eq!(
            places.each_ref().map(Place::turn),
            [Turn::Poll, Turn::Stay, Turn::Stay]
        );
    }

    #[test]
    fn moving_keeps_the_number_and_frees_the_line() {
        let queue = WaitQueue::default();
        let (both, other) = (request(&[("a", 1), ("b", 1)]), request(&[("b", 1)]));
        let mut first = waits(&queue, &both, "a");
        let second = waits(&queue, &other, "b");
        assert_eq!(second.turn(), Turn::Poll);
        first.move_to(&short("b"));
        assert_eq!(first.turn(), Turn::Try);
        assert_eq!(second.turn(), Turn::Stay);
        assert!(!queue.state.lock().lines.contains_key("a"));
    }

    #[test]
    fn giving_up_calls_the_next_and_a_grant_only_if_permits_are_left() {
        let (queue, one) = (WaitQueue::default(), request(&[("a", 1)]));
        let [first, second, third, fourth] = [(); 4].map(|()| waits(&queue, &one, "a"));
        first.granted(&[0], true);
        assert_eq!(second.turn(), Turn::Poll);
        second.granted(&[1], true);
        assert_eq!(third.turn(), Turn::Try);
        queue.released([("a", 1)]);
        drop(third);
        assert_eq!(fourth.turn(), Turn::Try);
        // The server has no place for the next one.
        let [first, second] = [(); 2].map(|()| waits(&queue, &one, "a"));
        drop(fourth);
        first.turn();
        first.granted(&[0], false);
        assert_eq!(second.turn(), Turn::Try);
        assert_eq!(second.give_up().as_deref(), Some("a"));
        assert!(queue.state.lock().lines.is_empty());
    }
}
