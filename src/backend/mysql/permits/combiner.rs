//! Combining: calls of one factory for the same semaphores share a transaction.
//!
//! Whoever comes first to a [`CombinerLane`] leads: it waits for a connection, takes all who have come
//! meanwhile into one [`Transaction`], and hands the lead to the next one that waits. So the number of
//! connections and of lock waits on the server does not grow with the number of threads, and under load a
//! commit is shared by many. Another set of semaphores has another lane, and another transaction.
//!
//! A shared transaction is tried once. If it fails, everybody in it goes on alone, on its own thread: so
//! whoever made it fail harms nobody else.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use super::MysqlPermits;
use super::transaction::{Answers, Freed};
use crate::backend::permit_store::{GrantId, Outcome, Released, Request};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind};
use crate::pool::Lane;

/// So many share a transaction at most: enough to make the commit cheap, few enough to keep it short.
const MAX_BATCH: usize = 64;

/// Lanes are forgotten beyond this number, if nobody is in them.
const MAX_IDLE_LANES: usize = 256;

/// What somebody wants of a lane.
#[derive(Clone, Debug)]
pub(super) enum Job {
    Acquire(Arc<Request>),
    Release(Arc<GrantId>),
}

impl Job {
    fn external_id(&self) -> &Arc<str> {
        match self {
            Job::Acquire(request) => &request.external_id,
            Job::Release(grant) => &grant.external_id,
        }
    }
}

/// What came of a job.
#[derive(Clone, Debug)]
pub(super) enum Verdict {
    Acquired(Outcome),
    Released(Freed),
    Failed {
        error: Error,
        /// Others were part of it, who may be the reason.
        shared: bool,
    },
}

#[derive(Debug)]
enum Notice {
    /// It is this one's turn to lead.
    Lead,
    Done(Verdict),
}

/// Somebody who waits for a verdict.
#[derive(Debug)]
struct Entrant {
    job: Job,
    notice: Mutex<Option<Notice>>,
    given: Condvar,
}

impl Entrant {
    fn give(&self, notice: Notice) {
        let mut slot = self.notice.lock();
        if !matches!(*slot, Some(Notice::Done(_))) {
            *slot = Some(notice);
        }
        self.given.notify_one();
    }
}

/// All lanes of a factory.
#[derive(Debug, Default)]
pub(super) struct Combiner {
    lanes: Mutex<HashMap<Vec<Arc<str>>, Arc<CombinerLane>>>,
}

impl Combiner {
    /// The lane of these semaphores, which are sorted.
    pub(super) fn lane(&self, names: Vec<Arc<str>>) -> Arc<CombinerLane> {
        let mut lanes = self.lanes.lock();
        if let Some(lane) = lanes.get(&names) {
            return Arc::clone(lane);
        }
        if lanes.len() >= MAX_IDLE_LANES {
            lanes.retain(|_, lane| Arc::strong_count(lane) > 1);
        }
        let lane = Arc::new(CombinerLane {
            names: names.clone(),
            line: Mutex::default(),
        });
        lanes.insert(names, Arc::clone(&lane));
        lane
    }
}

/// The way to one set of semaphores.
#[derive(Debug)]
pub(super) struct CombinerLane {
    names: Vec<Arc<str>>,
    line: Mutex<Line>,
}

#[derive(Debug, Default)]
struct Line {
    queue: VecDeque<Arc<Entrant>>,
    led: bool,
}

impl CombinerLane {
    /// Has the job done, by oneself or by whoever leads. Nothing is sent if there is no connection, or no
    /// turn, by `by`.
    pub(super) fn submit(&self, store: &MysqlPermits, job: Job, by: Moment) -> Verdict {
        let entrant = Arc::new(Entrant {
            job,
            notice: Mutex::new(None),
            given: Condvar::new(),
        });
        let leads = {
            let mut line = self.line.lock();
            line.queue.push_back(Arc::clone(&entrant));
            !std::mem::replace(&mut line.led, true)
        };
        if !leads && let Some(verdict) = self.follow(&entrant, by) {
            return verdict;
        }
        self.lead(store, by);
        let notice = entrant.notice.lock().take();
        match notice {
            Some(Notice::Done(verdict)) => verdict,
            _ => no_verdict(),
        }
    }

    /// Waits for a verdict; `None` if it is our turn to lead instead.
    fn follow(&self, entrant: &Arc<Entrant>, by: Moment) -> Option<Verdict> {
        let mut in_queue = true;
        loop {
            let mut slot = entrant.notice.lock();
            loop {
                match slot.take() {
                    Some(Notice::Lead) => return None,
                    Some(Notice::Done(verdict)) => return Some(verdict),
                    None => {}
                }
                let left = by.remaining();
                if in_queue && left.is_zero() {
                    break;
                }
                if in_queue {
                    entrant.given.wait_for(&mut slot, left);
                } else {
                    // In a transaction: whoever carries it out is bounded by its own timeouts.
                    entrant.given.wait(&mut slot);
                }
            }
            drop(slot);
            // Lane before entrant, as everywhere: the lead may have been given to us just now.
            let mut line = self.line.lock();
            if matches!(*entrant.notice.lock(), Some(Notice::Lead)) {
                continue;
            }
            let before = line.queue.len();
            line.queue.retain(|other| !Arc::ptr_eq(other, entrant));
            if line.queue.len() < before {
                let error = Error::new(
                    ErrorKind::Timeout,
                    "no turn in time: many requests of this process wait for the same semaphores; nothing \
                     was sent",
                )
                .not_sent();
                return Some(Verdict::Failed {
                    error,
                    shared: false,
                });
            }
            in_queue = false;
        }
    }

    /// Carries one transaction out, the own job among it, and passes the lead on.
    fn lead(&self, store: &MysqlPermits, by: Moment) {
        // Passes the lead on whatever happens: nobody may wait for a leader that is gone.
        let mut reign = Reign {
            lane: self,
            batch: Vec::new(),
        };
        let mut connection = match store.rows.pool.checkout(Lane::Other, by) {
            Ok(connection) => connection,
            Err(error) => {
                // The others may have more time than this one.
                reign.batch = self.take(1);
                for entrant in &reign.batch {
                    entrant.give(Notice::Done(Verdict::Failed {
                        error: error.clone(),
                        shared: false,
                    }));
                }
                return;
            }
        };
        reign.batch = self.take(MAX_BATCH);
        let mut releases = Vec::new();
        let mut requests = Vec::new();
        for entrant in &reign.batch {
            match &entrant.job {
                Job::Acquire(request) => requests.push(Arc::clone(request)),
                Job::Release(grant) => releases.push(Arc::clone(grant)),
            }
        }
        let shared = reign.batch.len() > 1;
        let outcome = match (&*releases, &*requests) {
            // Alone: a single statement does it.
            ([grant], []) => {
                let released = store.release_on(&mut connection, grant);
                let freed = released.map(|released| match released {
                    Released::Permits(_) => Freed::Yes,
                    Released::AlreadyReleased | Released::Unknown => Freed::No,
                });
                Ok(Answers {
                    released: vec![freed],
                    acquired: Vec::new(),
                })
            }
            _ => store.transaction(&mut connection, &self.names, &releases, &requests),
        };
        drop(connection);
        let failed = |error: Error| Verdict::Failed { error, shared };
        match outcome {
            Ok(outcome) => {
                let mut released = outcome.released.into_iter();
                let mut acquired = outcome.acquired.into_iter();
                for entrant in &reign.batch {
                    let verdict = match &entrant.job {
                        Job::Acquire(_) => acquired
                            .next()
                            .map(|it| it.map_or_else(failed, Verdict::Acquired)),
                        Job::Release(_) => released
                            .next()
                            .map(|it| it.map_or_else(failed, Verdict::Released)),
                    };
                    entrant.give(Notice::Done(verdict.unwrap_or_else(no_verdict)));
                }
            }
            Err(error) => {
                for entrant in &reign.batch {
                    entrant.give(Notice::Done(failed(error.clone())));
                }
            }
        }
    }

    /// The next jobs, from the front of the queue. Of two with the same external id the second waits, to
    /// be told what the first one got.
    fn take(&self, most: usize) -> Vec<Arc<Entrant>> {
        let mut line = self.line.lock();
        let mut batch: Vec<Arc<Entrant>> = Vec::new();
        let mut later = VecDeque::new();
        while let Some(entrant) = line.queue.pop_front() {
            let id = entrant.job.external_id();
            let taken = batch.iter().any(|other| other.job.external_id() == id);
            if taken || batch.len() >= most {
                later.push_back(entrant);
            } else {
                batch.push(entrant);
            }
        }
        line.queue = later;
        batch
    }
}

/// The time for which one thread leads a lane.
struct Reign<'a> {
    lane: &'a CombinerLane,
    batch: Vec<Arc<Entrant>>,
}

impl Drop for Reign<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for entrant in &self.batch {
                entrant.give(Notice::Done(no_verdict()));
            }
        }
        let mut line = self.lane.line.lock();
        match line.queue.front() {
            Some(next) => next.give(Notice::Lead),
            None => line.led = false,
        }
    }
}

fn no_verdict() -> Verdict {
    Verdict::Failed {
        error: Error::new(
            ErrorKind::Panicked,
            "the transaction that this request was part of ended without an answer for it",
        ),
        shared: true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Callers say for which request they ask: it was named twice.
    #[test]
    fn an_error_does_not_name_its_request() {
        let entrant = Arc::new(Entrant {
            job: Job::Release(Arc::new(GrantId::any("job"))),
            notice: Mutex::new(None),
            given: Condvar::new(),
        });
        let lane = Combiner::default().lane(Vec::new());
        lane.line.lock().queue.push_back(Arc::clone(&entrant));
        match lane.follow(&entrant, Moment::now()) {
            Some(Verdict::Failed { error, .. }) => {
                let message = error.to_string();
                assert!(message.contains("no turn in time"), "{message}");
                assert!(!message.contains("job"), "{message}");
            }
            other => panic!("{other:?}"),
        }
    }
}
