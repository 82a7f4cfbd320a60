//! `WaitQueue`: the requests of one factory that wait for permits, in the order of their arrival.
//!
//! A waiting request stands in one line: that of the semaphore it was last found short of. It keeps its number when
//! it moves, so it comes before later ones there too. Only the first of a line polls; the others wait until permits
//! come back that are enough for them.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use parking_lot::Mutex;

use crate::backend::permit_store::{Request, Standing};
use crate::parker::{Parker, Unparker};

#[derive(Default)]
pub(super) struct WaitQueue {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    next: u64,
    /// By semaphore; none is empty.
    lines: HashMap<Arc<str>, Line>,
}

/// The requests that wait for one semaphore, by number.
type Line = BTreeMap<u64, Waiting>;

struct Waiting {
    wanted: u32,
    /// It should try: permits may have come back for it.
    called: bool,
    unparker: Unparker,
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

    /// Permits came back, or a capacity grew: calls the requests that these permits are enough for, in order. The first
    /// one is called in any case, because some may have been free before.
    pub(super) fn released(&self, name: &str, permits: u64) {
        if let Some(line) = self.state.lock().lines.get_mut(name) {
            call(line, permits);
        }
    }
}

fn call(line: &mut Line, permits: u64) {
    let mut left = Some(permits);
    for (at, waiting) in line.values_mut().enumerate() {
        left = left.and_then(|left| left.checked_sub(u64::from(waiting.wanted)));
        if at > 0 && left.is_none() {
            return;
        }
        waiting.called = true;
        waiting.unparker.unpark();
    }
}

/// A request's place; given up when it is dropped.
pub(super) struct Place<'a> {
    queue: &'a WaitQueue,
    request: &'a Request,
    number: u64,
    /// The semaphore in whose line it stands.
    line: Option<Arc<str>>,
    unparker: Unparker,
}

impl Place<'_> {
    /// What to do now. A call is answered once.
    pub(super) fn turn(&self) -> Turn {
        let mut state = self.queue.state.lock();
        let line = self.line.as_ref().and_then(|it| state.lines.get_mut(it));
        let Some(line) = line else {
            return Turn::Poll;
        };
        let is_first = line.keys().next() == Some(&self.number);
        let own = line.get_mut(&self.number);
        match own.is_some_and(|own| std::mem::take(&mut own.called)) {
            true => Turn::Try,
            false if is_first => Turn::Poll,
            false => Turn::Stay,
        }
    }

    /// What the server is told of it.
    pub(super) fn standing(&self) -> Standing {
        let state = self.queue.state.lock();
        let line = self.line.as_ref().and_then(|name| state.lines.get(name));
        Standing {
            line: self.line.clone(),
            others: line.is_some_and(|line| line.len() > 1),
        }
    }

    /// The request was found short of `semaphore`. The first of a line is called at once: permits may have come back
    /// between its try and this.
    pub(super) fn move_to(&mut self, semaphore: &Arc<str>) {
        if self.line.as_ref() != Some(semaphore) {
            self.leave(false);
            let queue = self.queue;
            self.enter(&mut queue.state.lock(), semaphore);
        }
    }

    /// The request was granted and left so much of each of its semaphores.
    pub(super) fn granted(mut self, free: &[u64]) {
        self.leave(true);
        for ((name, _), free) in self.request.permits.iter().zip(free) {
            if *free > 0 {
                self.queue.released(name, *free);
            }
        }
    }

    /// Gives the place up. Returns the semaphore in whose line no request waits any more.
    pub(super) fn give_up(mut self) -> Option<Arc<str>> {
        self.leave(false)
    }

    fn enter(&mut self, state: &mut State, name: &Arc<str>) {
        let mut permits = self.request.permits.iter();
        let own = permits.find(|(own, _)| own == name);
        let line = state.lines.entry(Arc::clone(name)).or_default();
        let waiting = Waiting {
            wanted: own.map_or(0, |(_, count)| *count),
            called: line.keys().next().is_none_or(|first| *first > self.number),
            unparker: self.unparker.clone(),
        };
        line.insert(self.number, waiting);
        self.line = Some(Arc::clone(name));
    }

    /// Leaves the line; returns its semaphore if it is empty now. Unless the request was granted what it was called for,
    /// the next one is called.
    fn leave(&mut self, is_granted: bool) -> Option<Arc<str>> {
        let name = self.line.take()?;
        let mut state = self.queue.state.lock();
        let line = state.lines.get_mut(&name)?;
        let was_first = line.keys().next() == Some(&self.number);
        let was_called = line.remove(&self.number).is_some_and(|own| own.called);
        let Some(next) = line.values().next() else {
            state.lines.remove(&name);
            return Some(name);
        };
        if was_called || was_first && !is_granted {
            call(line, 0);
        } else if was_first {
            // It polls from now on.
            next.unparker.unpark();
        }
        None
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.leave(false);
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

    /// Joins, and has tried in vain.
    fn waits<'a>(queue: &'a WaitQueue, request: &'a Request, name: &str) -> Place<'a> {
        let mut place = queue.join(request, &Parker::new());
        place.move_to(&Arc::from(name));
        place.turn();
        place
    }

    /// Bug 4: what came back between the first try and the queue was found 50 ms later.
    #[test]
    fn first_in_line_tries_again_after_joining() {
        let (queue, one) = (WaitQueue::default(), request(&[("a", 1)]));
        let mut first = queue.join(&one, &Parker::new());
        assert_eq!(first.turn(), Turn::Poll);
        queue.released("a", 1);
        first.move_to(&Arc::from("a"));
        assert_eq!(first.turn(), Turn::Try);
        assert_eq!(first.turn(), Turn::Poll);
        let second = queue.join(&one, &Parker::new());
        assert_eq!(second.turn(), Turn::Stay);
    }

    #[test]
    fn release_calls_waiters_in_order() {
        let queue = WaitQueue::default();
        let (one, two) = (request(&[("a", 1)]), request(&[("a", 2)]));
        let places = [&one, &two, &one].map(|it| waits(&queue, it, "a"));
        queue.released("a", 2);
        assert_eq!(
            places.each_ref().map(Place::turn),
            [Turn::Try, Turn::Stay, Turn::Stay]
        );
        queue.released("a", 3);
        assert_eq!(
            places.each_ref().map(Place::turn),
            [Turn::Try, Turn::Try, Turn::Stay]
        );
        queue.released("b", 3);
        assert_eq!(
            places.each_ref().map(Place::turn),
            [Turn::Poll, Turn::Stay, Turn::Stay]
        );
    }

    #[test]
    fn moving_keeps_the_number() {
        let queue = WaitQueue::default();
        let (both, other) = (request(&[("a", 1), ("b", 1)]), request(&[("b", 1)]));
        let mut first = waits(&queue, &both, "a");
        let second = waits(&queue, &other, "b");
        assert_eq!(second.turn(), Turn::Poll);
        first.move_to(&Arc::from("b"));
        assert_eq!(first.turn(), Turn::Try);
        assert_eq!(second.turn(), Turn::Stay);
        assert!(!queue.state.lock().lines.contains_key("a"));
    }

    #[test]
    fn giving_up_calls_the_next() {
        let (queue, one) = (WaitQueue::default(), request(&[("a", 1)]));
        let [first, second, third, fourth] = [(); 4].map(|()| waits(&queue, &one, "a"));
        first.granted(&[0]);
        assert_eq!(second.turn(), Turn::Poll);
        second.granted(&[1]);
        assert_eq!(third.turn(), Turn::Try);
        queue.released("a", 1);
        drop(third);
        assert_eq!(fourth.turn(), Turn::Try);
        assert_eq!(fourth.give_up().as_deref(), Some("a"));
        assert!(queue.state.lock().lines.is_empty());
    }
}
