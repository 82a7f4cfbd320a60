//! Waiting for a permit: first come, first served among the waiters of a process.
//!
//! A waiter is at the front if nobody who came before it wants one of the same semaphores. Only those
//! at the front look, with a plain read that locks nothing, at an interval that grows; everybody else
//! sleeps. A release by this process wakes them at once. So the load on the server depends on how many
//! semaphores are waited for, and not on how many wait.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::answer::{Acquisition, Exhausted};
use super::core::Core;
use super::request::Wish;
use super::store::{columns, first, quote_all};
use crate::bell::Bell;
use crate::clock::Moment;
use crate::error::Result;

/// The first pause between two looks, and the longest.
const SHORT: Duration = Duration::from_millis(10);
const LONG: Duration = Duration::from_millis(200);

/// Those of this process who wait, in the order in which they came.
#[derive(Debug, Default)]
pub(super) struct WaitList {
    waiters: Mutex<Vec<Arc<Waiter>>>,
}

struct Waiter {
    names: Vec<Arc<str>>,
    bell: Bell,
}

impl std::fmt::Debug for Waiter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Waiter")
            .field("names", &self.names)
            .finish_non_exhaustive()
    }
}

impl Waiter {
    fn overlaps(&self, names: &[Arc<str>]) -> bool {
        self.names.iter().any(|name| names.contains(name))
    }
}

impl WaitList {
    /// Something of these semaphores was given back: whoever is at the front should look.
    pub(super) fn wake(&self, names: &[Arc<str>]) {
        for waiter in self.waiters.lock().iter() {
            if waiter.overlaps(names) {
                waiter.bell.waker().wake();
            }
        }
    }

    fn is_waited_for(&self, names: &[Arc<str>]) -> bool {
        let waiters = self.waiters.lock();
        waiters.iter().any(|waiter| waiter.overlaps(names))
    }

    fn join(&self, names: Vec<Arc<str>>) -> Place<'_> {
        let waiter = Arc::new(Waiter {
            names,
            bell: Bell::new(),
        });
        self.waiters.lock().push(Arc::clone(&waiter));
        Place { list: self, waiter }
    }
}

/// A place in the list; leaves it when dropped, and lets those behind move up.
struct Place<'a> {
    list: &'a WaitList,
    waiter: Arc<Waiter>,
}

impl Place<'_> {
    fn is_front(&self) -> bool {
        let waiters = self.list.waiters.lock();
        waiters
            .iter()
            .take_while(|other| !Arc::ptr_eq(other, &self.waiter))
            .all(|other| !other.overlaps(&self.waiter.names))
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut waiters = self.list.waiters.lock();
        waiters.retain(|other| !Arc::ptr_eq(other, &self.waiter));
        drop(waiters);
        self.list.wake(&self.waiter.names);
    }
}

impl Core {
    /// As `acquire`, but waits up to `timeout` for what is exhausted.
    pub(super) fn acquire_timeout(
        &self,
        wish: &Arc<Wish>,
        timeout: Duration,
    ) -> Result<Acquisition> {
        let deadline = Moment::now() + timeout;
        let names = wish.names();
        let mut seen = None;
        // Whoever waits already comes first.
        if timeout.is_zero() || !self.waiting.is_waited_for(&names) {
            match self.acquire(wish)? {
                Acquisition::Exhausted(exhausted) => seen = Some(exhausted),
                answer => return Ok(answer),
            }
        }
        let place = self.waiting.join(names);
        let mut interval = SHORT;
        loop {
            let front = place.is_front();
            let now = Moment::now();
            if now >= deadline
                && let Some(exhausted) = seen
            {
                return Ok(Acquisition::Exhausted(exhausted));
            }
            if front || now >= deadline {
                match self.shortage(wish) {
                    Ok(Some(exhausted)) => seen = Some(exhausted),
                    // It fits, or a try has to say what is wrong.
                    Ok(None) | Err(_) => match self.acquire(wish)? {
                        Acquisition::Exhausted(exhausted) => seen = Some(exhausted),
                        answer => return Ok(answer),
                    },
                }
                if Moment::now() >= deadline {
                    continue;
                }
            }
            let jittered = interval.mul_f64(0.75 + rand::random::<f64>() / 2.0);
            let until = if front {
                deadline.min(Moment::now() + jittered)
            } else {
                deadline
            };
            interval = match place.waiter.bell.wait(until) {
                crate::bell::Ring::Silence => (interval * 2).min(LONG),
                _ => SHORT,
            };
        }
    }

    /// The first semaphore with too little left for the wish, as far as a look can tell.
    fn shortage(&self, wish: &Wish) -> Result<Option<Exhausted>> {
        let statement = format!(
            "SELECT name, capacity, used FROM semaphore WHERE name IN ({})",
            quote_all(wish.names())
        );
        let answer = first(self.store.send_alone(&statement)?)?;
        let mut found: Vec<(String, u32, i64)> = Vec::with_capacity(answer.rows.len());
        for row in answer.rows {
            found.push(columns(row)?);
        }
        for (name, wanted) in &wish.permits {
            let Some((_, capacity, used)) = found.iter().find(|(other, ..)| **other == **name)
            else {
                // No such semaphore: the acquire says so.
                return Ok(None);
            };
            // More than it can ever have: the acquire says that, too.
            if wanted <= capacity && used + i64::from(*wanted) > i64::from(*capacity) {
                return Ok(Some(Exhausted {
                    semaphore: Arc::clone(name),
                    capacity: *capacity,
                    held: u64::try_from(*used).unwrap_or(0),
                    wanted: *wanted,
                }));
            }
        }
        Ok(None)
    }
}
