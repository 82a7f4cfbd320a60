//! The poller: one thread per factory that looks at the rows which nobody can be woken for, all of
//! them with one statement, on behalf of every contender and observer that asked.
//!
//! A contender is rung when its mutex is free, the one that waits longest first; an observer when the
//! row is not the one it saw. Rows that changed lately are looked at often, rows that do not change
//! ever more seldom, down to once per poll interval: the cost of waiting is one plain SELECT per
//! interval for a whole process, and short holds are noticed after a fraction of their length.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::store::{Row, Store};
use crate::bell::Waker;
use crate::clock::Moment;
use crate::error::Result;
use crate::fork::Origin;

/// The first pause between two looks at a row that changed; each is half as long again.
const FIRST_LOOK: Duration = Duration::from_millis(2);

/// How long the contender that was rung first has the free mutex to itself.
const CLAIM: Duration = Duration::from_millis(100);

/// How many rows one statement reads at most.
const BATCH: usize = 64;

/// How long dropping waits for the thread: it ends at once unless the server hangs.
const FAREWELL: Duration = Duration::from_secs(2);

/// The poller of one factory.
pub(super) struct Poller {
    shared: Arc<Shared>,
    ended: Receiver<()>,
    origin: Origin,
}

struct Shared {
    store: Arc<Store>,
    /// The longest pause between two looks.
    interval: Duration,
    watched: Mutex<Watched>,
    changed: Condvar,
}

#[derive(Default)]
struct Watched {
    mutexes: HashMap<Arc<str>, Watch>,
    next_ticket: u64,
    running: bool,
    closed: bool,
    /// Held by the thread for as long as it lives.
    alive: Option<Sender<()>>,
}

/// One mutex that is looked at.
struct Watch {
    contenders: Vec<(u64, Waker)>,
    observers: Vec<(u64, Waker, Seen)>,
    next_look: Moment,
    pause: Duration,
    /// The row at the last look.
    last: Option<Seen>,
    /// Since when it has been seen free.
    free_since: Option<Moment>,
}

/// What tells one state of a row from another: the version, and whether its owner still owns.
pub(super) type Seen = (u64, bool);

/// A place in the poller's list; taken out when dropped.
pub(super) struct Ticket {
    shared: Arc<Shared>,
    mutex: Arc<str>,
    number: u64,
    origin: Origin,
}

impl Poller {
    pub(super) fn new(store: Arc<Store>, interval: Duration) -> Poller {
        let (alive, ended) = crossbeam_channel::bounded(0);
        Poller {
            shared: Arc::new(Shared {
                store,
                interval: interval.max(FIRST_LOOK),
                watched: Mutex::new(Watched {
                    alive: Some(alive),
                    ..Watched::default()
                }),
                changed: Condvar::new(),
            }),
            ended,
            origin: Origin::here(),
        }
    }

    /// Rings `waker` when the mutex is free, after those that asked before.
    pub(super) fn wait_free(&self, mutex: &Arc<str>, waker: &Waker) -> Result<Ticket> {
        self.join(mutex, |watch, number| {
            watch.contenders.push((number, waker.clone()));
        })
    }

    /// Rings `waker` when the row is not the one that was `seen`.
    pub(super) fn observe(&self, mutex: &Arc<str>, waker: &Waker) -> Result<Ticket> {
        self.join(mutex, |watch, number| {
            watch.observers.push((number, waker.clone(), (0, false)));
        })
    }

    /// This process changed the row: look at once.
    pub(super) fn touch(&self, mutex: &Arc<str>) {
        if !self.origin.is_here() {
            return;
        }
        let mut watched = self.shared.watched.lock();
        if let Some(watch) = watched.mutexes.get_mut(mutex) {
            watch.look_soon();
            self.shared.changed.notify_all();
        }
    }

    fn join(&self, mutex: &Arc<str>, enter: impl FnOnce(&mut Watch, u64)) -> Result<Ticket> {
        self.origin.check()?;
        let mut watched = self.shared.watched.lock();
        watched.next_ticket += 1;
        let number = watched.next_ticket;
        let watch = watched
            .mutexes
            .entry(Arc::clone(mutex))
            .or_insert_with(Watch::new);
        enter(watch, number);
        watch.look_soon();
        if !watched.running
            && !watched.closed
            && let Some(alive) = watched.alive.clone()
        {
            let shared = Arc::clone(&self.shared);
            let spawned = thread::Builder::new()
                .name("contend-mysql-poller".to_owned())
                .spawn(move || {
                    shared.serve();
                    drop(alive);
                });
            match spawned {
                Ok(_) => watched.running = true,
                Err(error) => log::warn!("no thread to poll with, contenders go by time: {error}"),
            }
        }
        self.shared.changed.notify_all();
        Ok(Ticket {
            shared: Arc::clone(&self.shared),
            mutex: Arc::clone(mutex),
            number,
            origin: self.origin,
        })
    }
}

impl Ticket {
    /// An observer saw the row like this: ring it for any other state.
    pub(super) fn saw(&self, seen: Seen) {
        if !self.origin.is_here() {
            return;
        }
        let mut watched = self.shared.watched.lock();
        if let Some(watch) = watched.mutexes.get_mut(&self.mutex) {
            for (number, _, known) in &mut watch.observers {
                if *number == self.number {
                    *known = seen;
                }
            }
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if !self.origin.is_here() {
            // Of the parent's list, whose lock the parent's thread may have held at the fork.
            std::mem::forget(Arc::clone(&self.shared));
            return;
        }
        let mut watched = self.shared.watched.lock();
        if let Some(watch) = watched.mutexes.get_mut(&self.mutex) {
            watch
                .contenders
                .retain(|(number, _)| *number != self.number);
            watch
                .observers
                .retain(|(number, ..)| *number != self.number);
            if watch.contenders.is_empty() && watch.observers.is_empty() {
                watched.mutexes.remove(&self.mutex);
            } else {
                // Whoever is first now may have been rung for by this one.
                watch.free_since = None;
                watch.look_soon();
                self.shared.changed.notify_all();
            }
        }
    }
}

impl Shared {
    fn serve(&self) {
        let mut watched = self.watched.lock();
        while !watched.closed {
            let now = Moment::now();
            let due = watched.due(now);
            if due.is_empty() {
                watched.sleep(&self.changed, now);
                continue;
            }
            // Nobody waits for the lock while a statement runs.
            let rows = MutexGuard::unlocked(&mut watched, || self.read(&due));
            let now = Moment::now();
            for mutex in &due {
                if let Some(watch) = watched.mutexes.get_mut(mutex) {
                    match &rows {
                        Some(rows) => watch.look(rows.get(&**mutex), now, self.interval),
                        // The contenders find out by themselves, and know how to back off.
                        None => watch.next_look = now + self.interval,
                    }
                }
            }
        }
        watched.running = false;
    }

    fn read(&self, mutexes: &[Arc<str>]) -> Option<HashMap<String, Row>> {
        let by = Moment::now() + self.store.pool.patience() * 2;
        let rows = self
            .store
            .pool
            .checkout_as_waiter(by)
            .and_then(|mut link| self.store.read_many(&mut link, mutexes, by));
        rows.inspect_err(|error| log::debug!("polling failed: {error}"))
            .ok()
    }
}

impl Watched {
    fn due(&self, now: Moment) -> Vec<Arc<str>> {
        if self.mutexes.values().all(|watch| watch.next_look > now) {
            return Vec::new();
        }
        // What would be due soon comes along: rows that do not change end up in one statement.
        let due = self
            .mutexes
            .iter()
            .filter(|(_, watch)| watch.next_look <= now + watch.pause / 8);
        due.take(BATCH)
            .map(|(mutex, _)| Arc::clone(mutex))
            .collect()
    }
}

trait Sleep {
    fn sleep(&mut self, changed: &Condvar, now: Moment);
}

impl Sleep for MutexGuard<'_, Watched> {
    fn sleep(&mut self, changed: &Condvar, now: Moment) {
        let next = self.mutexes.values().map(|watch| watch.next_look).min();
        match next {
            Some(next) => {
                changed.wait_for(self, next - now);
            }
            None => changed.wait(self),
        }
    }
}

impl Watch {
    fn new() -> Watch {
        Watch {
            contenders: Vec::new(),
            observers: Vec::new(),
            next_look: Moment::now(),
            pause: FIRST_LOOK,
            last: None,
            free_since: None,
        }
    }

    fn look_soon(&mut self) {
        self.pause = FIRST_LOOK;
        self.next_look = self.next_look.min(Moment::now() + FIRST_LOOK);
    }

    /// Rings whom it concerns, and decides when to look again.
    fn look(&mut self, row: Option<&Row>, now: Moment, interval: Duration) {
        let seen = row.map_or((0, false), Row::seen);
        let free = !seen.1;
        for (_, waker, known) in &mut self.observers {
            if *known != seen {
                *known = seen;
                waker.wake();
            }
        }
        if free {
            // The first alone, so that they come in order; the rest only if it does not come.
            let since = *self.free_since.get_or_insert(now);
            let late = now - since > CLAIM;
            let count = if late { self.contenders.len() } else { 1 };
            for (_, waker) in self.contenders.iter().take(count) {
                waker.wake();
            }
        } else {
            self.free_since = None;
        }
        self.pause = if self.last == Some(seen) {
            (self.pause * 3 / 2).min(interval)
        } else {
            FIRST_LOOK
        };
        self.last = Some(seen);
        self.next_look = now + self.pause;
        // A lease that ends by itself is noticed when it ends.
        if let Some(row) = row
            && !free
        {
            let left = Duration::from_millis(row.transition_at.saturating_sub(row.now_ms) + 1);
            self.next_look = self.next_look.min(now + left);
        }
    }
}

impl Drop for Poller {
    fn drop(&mut self) {
        if !self.origin.is_here() {
            std::mem::forget(Arc::clone(&self.shared));
            return;
        }
        {
            let mut watched = self.shared.watched.lock();
            watched.closed = true;
            watched.alive = None;
            self.shared.changed.notify_all();
        }
        if self.ended.recv_timeout(FAREWELL) == Err(RecvTimeoutError::Timeout) {
            log::warn!("the polling thread has not ended; it does when the server answers");
        }
    }
}

impl fmt::Debug for Poller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Poller")
    }
}

impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ticket")
            .field("mutex", &self.mutex)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::mysql::store::unreachable;
    use crate::bell::Bell;
    use crate::error::ErrorKind;

    /// Rule 12: in a child the thread that held the lock at the fork will never give it back.
    #[test]
    fn a_child_process_drops_tickets_and_their_poller_while_the_list_is_locked() {
        let bell = Bell::new();
        let mut poller = Poller::new(Arc::new(unreachable()), Duration::from_secs(1));
        let mutex = Arc::from("m");
        let mut ticket = poller.observe(&mutex, &bell.waker()).unwrap();
        poller.origin = Origin::elsewhere();
        ticket.origin = poller.origin;
        let (dropped, done) = crossbeam_channel::bounded(1);
        thread::spawn(move || {
            std::mem::forget(poller.shared.watched.lock());
            poller.touch(&mutex);
            ticket.saw((1, true));
            drop(ticket);
            let refused = poller.wait_free(&mutex, &bell.waker());
            assert_eq!(refused.unwrap_err().kind(), ErrorKind::Forked);
            drop(poller);
            dropped.send(())
        });
        done.recv_timeout(Duration::from_secs(30)).unwrap();
    }
}
