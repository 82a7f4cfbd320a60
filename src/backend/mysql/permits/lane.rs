//! Lanes: calls of one factory for the same semaphores share a transaction.
//!
//! A call that finds its [`Lane`] without a leader leads. It waits for a connection, carries out in one
//! [`Transaction`] what has queued up meanwhile, and leaves the replies in the lane. So the number of connections and
//! of lock waits on the server does not grow with the number of threads, and under load a commit is shared by many.
//!
//! A shared transaction is tried once. If it fails, each of its calls goes on alone, on its own thread.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::sql::which;
use super::transaction::Transaction;
use super::{MysqlPermits, Session};
use crate::backend::permit_store::{Counts, GrantId, Outcome, Release, Request};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};

/// Enough to make the commit cheap, few enough to keep the transaction short.
const MAX_BATCH: usize = 64;

/// Beyond this number, lanes that are not in use are forgotten.
const MAX_IDLE_LANES: usize = 256;

/// What a call wants of a lane.
#[derive(Clone)]
pub(super) enum Job {
    Acquire(Arc<Request>),
    /// A grant with a token.
    Release(Arc<GrantId>),
}

impl Job {
    fn external_id(&self) -> &str {
        match self {
            Job::Acquire(request) => &request.external_id,
            Job::Release(grant) => &grant.external_id,
        }
    }

    pub(super) fn permits(&self) -> &Counts {
        match self {
            Job::Acquire(request) => &request.permits,
            Job::Release(grant) => &grant.permits,
        }
    }
}

pub(super) enum Reply {
    Acquired(Outcome),
    Released(Release, Counts),
}

/// A reply, and whether other calls shared the transaction and may be why it failed.
pub(super) type Shared = (Result<Reply>, bool);

/// All lanes of a factory, by their semaphores.
#[derive(Default)]
pub(super) struct Lanes(Mutex<HashMap<Vec<Arc<str>>, Arc<Lane>>>);

impl Lanes {
    /// Returns the lane of the semaphores of a request, which are sorted.
    pub(super) fn of(&self, permits: &Counts) -> Arc<Lane> {
        let names = names(permits);
        let mut lanes = self.0.lock();
        if lanes.len() >= MAX_IDLE_LANES {
            lanes.retain(|_, lane| Arc::strong_count(lane) > 1);
        }
        Arc::clone(lanes.entry(names).or_default())
    }
}

/// The way to one set of semaphores.
#[derive(Default)]
pub(super) struct Lane {
    line: Mutex<Line>,
    /// There are replies, and the next call may lead.
    changed: Condvar,
}

#[derive(Default)]
struct Line {
    next: u64,
    /// Calls that are not in a transaction yet.
    queue: VecDeque<(u64, Job)>,
    replies: HashMap<u64, Shared>,
    /// A call waits for a connection, or its transaction is under way. Meanwhile others queue up.
    is_led: bool,
}

impl Line {
    /// The next jobs. Of two with one external id, the second waits for what the first one gets.
    fn take(&mut self) -> Vec<(u64, Job)> {
        let mut batch: Vec<(u64, Job)> = Vec::new();
        for (number, job) in std::mem::take(&mut self.queue) {
            let id = job.external_id();
            let is_later = batch.iter().any(|(_, other)| other.external_id() == id);
            if is_later || batch.len() >= MAX_BATCH {
                self.queue.push_back((number, job));
            } else {
                batch.push((number, job));
            }
        }
        batch
    }
}

impl Lane {
    /// Has `job` carried out by this thread, or by the one that leads. Nothing is sent if there is no connection, or
    /// no turn, by `by`.
    pub(super) fn submit(&self, store: &MysqlPermits, job: Job, by: Moment) -> Shared {
        let mut line = self.line.lock();
        let number = line.next;
        line.next += 1;
        line.queue.push_back((number, job));
        loop {
            if let Some(reply) = line.replies.remove(&number) {
                return reply;
            }
            let mut queue = line.queue.iter();
            match queue.position(|(other, _)| *other == number) {
                // In a transaction, which has a limit of its own.
                None => self.changed.wait(&mut line),
                Some(_) if !line.is_led => {
                    line.is_led = true;
                    let led = MutexGuard::unlocked(&mut line, || self.lead(store, number, by));
                    if let Err(error) = led {
                        return (Err(error), false);
                    }
                }
                Some(at) if by.remaining().is_zero() => {
                    line.queue.remove(at);
                    return (Err(no_turn()), false);
                }
                Some(_) => drop(self.changed.wait_for(&mut line, by.remaining())),
            }
        }
    }

    /// Carries out one transaction.
    ///
    /// # Errors
    /// There was no connection in time. The other calls may have more time than this one.
    fn lead(&self, store: &MysqlPermits, number: u64, by: Moment) -> Result<()> {
        let mut turn = Turn {
            lane: self,
            batch: Vec::new(),
            replies: Vec::new(),
        };
        let mut session = store.session(by).inspect_err(|_| {
            // Before another call leads, which would carry it out.
            let mut line = self.line.lock();
            line.queue.retain(|(other, _)| *other != number);
        })?;
        turn.batch = self.line.lock().take();
        let jobs: Vec<Job> = turn.batch.iter().map(|(_, job)| job.clone()).collect();
        turn.replies = match session.carry_out(&jobs) {
            Ok(replies) => replies,
            Err(error) => jobs.iter().map(|_| Err(error.clone())).collect(),
        };
        Ok(())
    }
}

/// The time for which one call leads a lane. Each call of its batch gets a reply, also if it panics.
struct Turn<'a> {
    lane: &'a Lane,
    batch: Vec<(u64, Job)>,
    replies: Vec<Result<Reply>>,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let is_shared = self.batch.len() > 1;
        let mut replies = self.replies.drain(..);
        let mut line = self.lane.line.lock();
        for (number, _) in &self.batch {
            let reply = replies.next().unwrap_or_else(|| Err(no_reply()));
            line.replies.insert(*number, (reply, is_shared));
        }
        line.is_led = false;
        self.lane.changed.notify_all();
    }
}

impl Session<'_> {
    /// Carries out jobs on the same semaphores: a release alone with a single statement, others in one transaction.
    pub(super) fn carry_out(&mut self, jobs: &[Job]) -> Result<Vec<Result<Reply>>> {
        if let [Job::Release(grant)] = jobs {
            let (release, freed) = self.release(grant)?;
            return Ok(vec![Ok(Reply::Released(release, freed))]);
        }
        let Some(first) = jobs.first() else {
            return Ok(Vec::new());
        };
        let (mut requests, mut releases) = (Vec::new(), Vec::new());
        for job in jobs {
            match job {
                Job::Acquire(request) => requests.push(Arc::clone(request)),
                Job::Release(grant) => releases.push(which(grant)),
            }
        }
        let transaction = Transaction {
            names: &names(first.permits()),
            release: (!releases.is_empty()).then(|| releases.join(" OR ")),
            requests: &requests,
        };
        let done = transaction.run(self)?;
        let mut acquired = done.acquired.into_iter();
        let replies = jobs.iter().map(|job| match job {
            Job::Acquire(_) => {
                let outcome = acquired.next().unwrap_or_else(|| Err(no_reply()));
                outcome.map(Reply::Acquired)
            }
            Job::Release(grant) => {
                let mut released = done.released.iter();
                match released.any(|row| row.external_id == grant.external_id) {
                    true => Ok(Reply::Released(Release::Released, grant.permits.clone())),
                    false => Err(passed_over()),
                }
            }
        });
        Ok(replies.collect())
    }
}

/// The names of the semaphores.
fn names(permits: &Counts) -> Vec<Arc<str>> {
    permits.iter().map(|(name, _)| Arc::clone(name)).collect()
}

fn no_turn() -> Error {
    let text = "no turn in time: many requests of this process wait for the same semaphores; nothing was sent";
    Error::new(ErrorKind::Timeout, text).not_sent()
}

/// A release by itself tells which of the two it was.
fn passed_over() -> Error {
    let text = "not held by that grant, or locked by another transaction";
    Error::new(ErrorKind::Unavailable, text).not_sent()
}

pub(super) fn no_reply() -> Error {
    let text = "the transaction that this request was part of ended without a reply for it";
    Error::new(ErrorKind::Panicked, text)
}
