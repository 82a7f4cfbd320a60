//! Combining: requests of one process for the same semaphores share a transaction.
//!
//! Whoever comes first to a [`Lane`] leads: it waits for a connection, takes all who have come
//! meanwhile into one [`batch`], and hands the lead to the next one that waits. So the number of
//! connections and of lock waits on the server does not grow with the number of threads, and under load
//! a commit is shared by many. Another set of semaphores has another lane, and another transaction.
//!
//! A batch is tried once. If it fails, everybody in it goes on alone, on its own thread: so whoever
//! made it fail harms nobody else.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use super::batch::{self, Decision, Held, Setback};
use super::release;
use super::request::Wish;
use super::store::Store;
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};

/// So many share a transaction at most: enough to make the commit cheap, few enough to keep it short.
const MAX_BATCH: usize = 64;

/// Lanes are forgotten beyond this number, if nobody is in them.
const MAX_IDLE_LANES: usize = 256;

/// What somebody wants of a lane.
#[derive(Clone, Debug)]
pub(super) enum Job {
    Acquire(Arc<Wish>),
    Release {
        external_id: Arc<str>,
        held: Arc<Held>,
    },
}

impl Job {
    fn external_id(&self) -> &Arc<str> {
        match self {
            Job::Acquire(wish) => &wish.external_id,
            Job::Release { external_id, .. } => external_id,
        }
    }
}

/// What came of a job.
#[derive(Clone, Debug)]
pub(super) enum Verdict {
    Decided(Decision),
    /// Whether the release changed something.
    Released(bool),
    /// Try it alone.
    Alone(Setback),
}

#[derive(Debug)]
enum Notice {
    /// It is this one's turn to lead.
    Lead,
    Done(Result<Verdict>),
}

/// Somebody who waits.
#[derive(Debug)]
struct Ticket {
    job: Job,
    notice: Mutex<Option<Notice>>,
    given: Condvar,
}

impl Ticket {
    fn give(&self, notice: Notice) {
        let mut slot = self.notice.lock();
        if !matches!(*slot, Some(Notice::Done(_))) {
            *slot = Some(notice);
        }
        self.given.notify_one();
    }
}

/// All lanes of a process.
#[derive(Debug, Default)]
pub(super) struct Lanes {
    lanes: Mutex<HashMap<Vec<Arc<str>>, Arc<Lane>>>,
}

impl Lanes {
    /// The lane of these semaphores, which are sorted.
    pub(super) fn of(&self, names: &[Arc<str>]) -> Arc<Lane> {
        let mut lanes = self.lanes.lock();
        if let Some(lane) = lanes.get(names) {
            return Arc::clone(lane);
        }
        if lanes.len() >= MAX_IDLE_LANES {
            lanes.retain(|_, lane| Arc::strong_count(lane) > 1);
        }
        let lane = Arc::new(Lane {
            names: names.to_vec(),
            state: Mutex::default(),
        });
        lanes.insert(names.to_vec(), Arc::clone(&lane));
        lane
    }
}

/// The way to one set of semaphores.
#[derive(Debug)]
pub(super) struct Lane {
    names: Vec<Arc<str>>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<Arc<Ticket>>,
    led: bool,
}

impl Lane {
    /// Has the job done, by oneself or by whoever leads.
    ///
    /// # Errors
    /// Nothing was sent: there was no connection, or no turn within the lock wait.
    pub(super) fn submit(&self, store: &Store, job: Job) -> Result<Verdict> {
        let ticket = Arc::new(Ticket {
            job,
            notice: Mutex::new(None),
            given: Condvar::new(),
        });
        let leads = {
            let mut state = self.state.lock();
            state.queue.push_back(Arc::clone(&ticket));
            !std::mem::replace(&mut state.led, true)
        };
        if !leads && let Some(outcome) = self.follow(store, &ticket) {
            return outcome;
        }
        self.lead(store);
        let notice = ticket.notice.lock().take();
        match notice {
            Some(Notice::Done(outcome)) => outcome,
            _ => Err(abandoned()),
        }
    }

    /// Waits for a verdict; `None` if it is our turn to lead instead.
    fn follow(&self, store: &Store, ticket: &Arc<Ticket>) -> Option<Result<Verdict>> {
        let deadline = Moment::now() + store.lock_wait();
        let mut in_queue = true;
        loop {
            let mut slot = ticket.notice.lock();
            loop {
                match slot.take() {
                    Some(Notice::Lead) => return None,
                    Some(Notice::Done(outcome)) => return Some(outcome),
                    None => {}
                }
                let left = deadline.remaining();
                if in_queue && left.is_zero() {
                    break;
                }
                if in_queue {
                    ticket.given.wait_for(&mut slot, left);
                } else {
                    // In a batch: whoever carries it out is bounded by its own timeouts.
                    ticket.given.wait(&mut slot);
                }
            }
            drop(slot);
            // Lane before ticket, as everywhere: the lead may have been given to us just now.
            let mut state = self.state.lock();
            if matches!(*ticket.notice.lock(), Some(Notice::Lead)) {
                continue;
            }
            let before = state.queue.len();
            state.queue.retain(|other| !Arc::ptr_eq(other, ticket));
            if state.queue.len() < before {
                return Some(Err(Error::new(
                    ErrorKind::Timeout,
                    format!(
                        "{:?} had no turn within {:?}: too many requests of this process wait for the \
                         same semaphores; nothing was sent",
                        ticket.job.external_id(),
                        store.lock_wait()
                    ),
                )));
            }
            in_queue = false;
        }
    }

    /// Carries one batch out, the own job among it, and passes the lead on.
    fn lead(&self, store: &Store) {
        // Passes the lead on whatever happens: nobody may wait for a leader that is gone.
        let mut reign = Reign {
            lane: self,
            batch: Vec::new(),
        };
        let mut link = match store.checkout() {
            Ok(link) => link,
            Err(error) => {
                // Everybody here would wait for the same connection in vain.
                let queue = std::mem::take(&mut self.state.lock().queue);
                for ticket in queue {
                    ticket.give(Notice::Done(Err(error.clone())));
                }
                return;
            }
        };
        reign.batch = self.take();
        let mut releases = Vec::new();
        let mut wishes = Vec::new();
        for ticket in &reign.batch {
            match &ticket.job {
                Job::Acquire(wish) => wishes.push(Arc::clone(wish)),
                Job::Release { held, .. } => releases.push(Arc::clone(held)),
            }
        }
        let outcome = match (&*releases, &*wishes) {
            // Nobody to share with: a single statement does it.
            ([held], []) => release::by_request_id(store, &mut link, held.request_id)
                .map(|released| batch::Outcome {
                    released: vec![released],
                    decisions: Vec::new(),
                })
                .map_err(Setback::known),
            _ => batch::run(store, &mut link, &self.names, &releases, &wishes),
        };
        drop(link);
        match outcome {
            Ok(outcome) => {
                let mut released = outcome.released.into_iter();
                let mut decisions = outcome.decisions.into_iter();
                for ticket in &reign.batch {
                    let verdict = match &ticket.job {
                        Job::Acquire(_) => decisions.next().map(Verdict::Decided),
                        Job::Release { .. } => released.next().map(Verdict::Released),
                    };
                    ticket.give(Notice::Done(verdict.ok_or_else(abandoned)));
                }
            }
            Err(setback) => {
                for ticket in &reign.batch {
                    ticket.give(Notice::Done(Ok(Verdict::Alone(setback.clone()))));
                }
            }
        }
    }

    /// The next batch, from the front of the queue. Of two with the same external id the second waits,
    /// to be told what the first one got.
    fn take(&self) -> Vec<Arc<Ticket>> {
        let mut state = self.state.lock();
        let mut batch: Vec<Arc<Ticket>> = Vec::new();
        let mut later = VecDeque::new();
        while let Some(ticket) = state.queue.pop_front() {
            let id = ticket.job.external_id();
            let taken = batch.iter().any(|other| other.job.external_id() == id);
            if taken || batch.len() >= MAX_BATCH {
                later.push_back(ticket);
            } else {
                batch.push(ticket);
            }
        }
        state.queue = later;
        batch
    }
}

/// The time for which one thread leads a lane.
struct Reign<'a> {
    lane: &'a Lane,
    batch: Vec<Arc<Ticket>>,
}

impl Drop for Reign<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let setback = Setback {
                unknown: true,
                ..Setback::known(abandoned())
            };
            for ticket in &self.batch {
                ticket.give(Notice::Done(Ok(Verdict::Alone(setback.clone()))));
            }
        }
        let mut state = self.lane.state.lock();
        match state.queue.front() {
            Some(next) => next.give(Notice::Lead),
            None => state.led = false,
        }
    }
}

fn abandoned() -> Error {
    Error::new(
        ErrorKind::Protocol,
        "the transaction that this request was part of ended without an answer for it",
    )
}
