//! Lanes: calls of one factory for the same semaphores share a transaction.
//!
//! A call that finds its [`Lane`] without a leader leads. It waits for a connection, carries out in one
//! [`Transaction`] what has queued up meanwhile, and tells each call its reply. So the number of connections and
//! of lock waits on the server does not grow with the number of threads, and under load a commit is shared by many.
//!
//! A shared transaction is tried once. If it fails, each of its calls goes on alone, on its own thread.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use crossbeam_channel::{Receiver, Sender, bounded};
use parking_lot::Mutex;

use super::MysqlPermits;
use super::session::Session;
use super::sql::which;
use super::transaction::Transaction;
use crate::backend::permit_store::{Counts, GrantId, Outcome, Released, Request};
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
    Released(Released),
}

/// A reply, and whether other calls shared the transaction and may be why it failed.
pub(super) type Shared = (Result<Reply>, bool);

/// What a call that waits is told.
enum Told {
    Reply(Shared),
    /// It leads from now on.
    Lead,
}

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
}

#[derive(Default)]
struct Line {
    next: u64,
    /// Calls that are not in a transaction yet.
    queue: VecDeque<Seat>,
    /// The first of the queue leads, or was told to, or its transaction is under way. Meanwhile others queue up, which
    /// makes batches larger.
    is_led: bool,
}

/// A call; its reply is missing if this is dropped without one.
struct Seat {
    number: u64,
    job: Job,
    tell: Sender<Told>,
}

impl Line {
    /// The next jobs, at most `most`. Of two with one external id, the second waits for what the first one gets.
    fn take(&mut self, most: usize) -> Vec<Seat> {
        let mut batch: Vec<Seat> = Vec::new();
        for seat in std::mem::take(&mut self.queue) {
            let id = seat.job.external_id();
            let is_later = batch.iter().any(|other| other.job.external_id() == id);
            if is_later || batch.len() >= most {
                self.queue.push_back(seat);
            } else {
                batch.push(seat);
            }
        }
        batch
    }
}

impl Lane {
    /// Has `job` carried out by this thread, or by the one that leads. Nothing is sent if there is no connection, or
    /// no turn, by `by`.
    pub(super) fn submit(&self, store: &MysqlPermits, job: Job, by: Moment) -> Shared {
        // One message to lead, and one reply.
        let (tell, told) = bounded(2);
        let mut line = self.line.lock();
        let number = line.next;
        line.next += 1;
        line.queue.push_back(Seat { number, job, tell });
        let is_led = std::mem::replace(&mut line.is_led, true);
        drop(line);
        let mut message = match is_led {
            true => self.wait(number, &told, by),
            false => Some(Told::Lead),
        };
        if matches!(message, Some(Told::Lead)) {
            self.lead(store, by);
            message = told.recv().ok();
        }
        match message {
            Some(Told::Reply(reply)) => reply,
            _ => (Err(no_reply()), false),
        }
    }

    /// Waits for a message; without a limit once the call is in a transaction, which has one of its own.
    fn wait(&self, number: u64, told: &Receiver<Told>, by: Moment) -> Option<Told> {
        if let Ok(message) = told.recv_timeout(by.remaining()) {
            return Some(message);
        }
        let mut line = self.line.lock();
        // The lead is passed on under this lock: it may have come just now.
        if let Ok(message) = told.try_recv() {
            return Some(message);
        }
        if let Some(at) = line.queue.iter().position(|seat| seat.number == number) {
            line.queue.remove(at);
            return Some(Told::Reply((Err(no_turn()), false)));
        }
        drop(line);
        told.recv().ok()
    }

    /// Carries out one transaction. Without a connection in time, only the call that leads fails: others may have more
    /// time.
    fn lead(&self, store: &MysqlPermits, by: Moment) {
        let lead = Lead(self);
        let session = store.session(by);
        let most = if session.is_ok() { MAX_BATCH } else { 1 };
        let batch = self.line.lock().take(most);
        let jobs: Vec<Job> = batch.iter().map(|seat| seat.job.clone()).collect();
        let replies = session.and_then(|mut session| session.carry_out(&jobs));
        // No call waits for another one to wake; the next leader comes first.
        drop(lead);
        let replies =
            replies.unwrap_or_else(|error| jobs.iter().map(|_| Err(error.clone())).collect());
        for (seat, reply) in batch.iter().zip(replies) {
            let _ = seat.tell.send(Told::Reply((reply, batch.len() > 1)));
        }
    }
}

/// The lead of a lane; passed on when it is dropped.
struct Lead<'a>(&'a Lane);

impl Drop for Lead<'_> {
    fn drop(&mut self) {
        let mut line = self.0.line.lock();
        match line.queue.front() {
            Some(next) => drop(next.tell.send(Told::Lead)),
            None => line.is_led = false,
        }
    }
}

impl Session<'_> {
    /// Carries out jobs on the same semaphores: a release alone with a single statement, others in one transaction.
    pub(super) fn carry_out(&mut self, jobs: &[Job]) -> Result<Vec<Result<Reply>>> {
        if let [Job::Release(grant)] = jobs {
            return Ok(vec![self.release(grant).map(Reply::Released)]);
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
                    true => Ok(Reply::Released(Released::Permits(grant.permits.clone()))),
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
