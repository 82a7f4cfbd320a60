//! Lanes: calls of one factory for the same semaphores share a transaction.
//!
//! A call that finds its [`Lane`] without a leader leads. It waits for a connection, carries out in one
//! [`Transaction`] what has queued up meanwhile, and leaves the replies in the lane. So the number of connections and
//! of lock waits on the server does not grow with the number of threads, and under load a commit is shared by many.
//!
//! A shared transaction is tried once. If it fails, each of its calls goes on alone, on its own thread.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use super::MysqlPermits;
use super::session::Session;
use super::sql::quote;
use super::transaction::Transaction;
use crate::backend::permit_store::{GrantId, Outcome, Released, Request};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};

/// Enough to make the commit cheap, few enough to keep the transaction short.
const MAX_BATCH: usize = 64;

/// Beyond this number, lanes that are not in use are forgotten.
const MAX_IDLE_LANES: usize = 256;

/// What a call wants of a lane.
#[derive(Debug)]
pub(super) enum Job {
    Acquire(Arc<Request>),
    Release(GrantId),
}

impl Job {
    fn external_id(&self) -> &str {
        match self {
            Job::Acquire(request) => &request.external_id,
            Job::Release(grant) => &grant.external_id,
        }
    }
}

/// What it is told.
#[derive(Debug)]
pub(super) enum Reply {
    Acquired(Outcome),
    Released(Released),
    /// Not held by that grant, or locked by another transaction: a release by itself tells.
    NotReleased,
}

/// A reply, and whether other calls shared the transaction and may be why it failed.
pub(super) type Shared = (Result<Reply>, bool);

/// All lanes of a factory, by their semaphores.
#[derive(Debug, Default)]
pub(super) struct Lanes(Mutex<HashMap<Vec<Arc<str>>, Arc<Lane>>>);

impl Lanes {
    /// Returns the lane of these semaphores, which are sorted.
    pub(super) fn of(&self, names: &[Arc<str>]) -> Arc<Lane> {
        let mut lanes = self.0.lock();
        if let Some(lane) = lanes.get(names) {
            return Arc::clone(lane);
        }
        if lanes.len() >= MAX_IDLE_LANES {
            lanes.retain(|_, lane| Arc::strong_count(lane) > 1);
        }
        let lane = Arc::new(Lane {
            names: names.to_vec(),
            line: Mutex::default(),
        });
        lanes.insert(names.to_vec(), Arc::clone(&lane));
        lane
    }
}

/// The way to one set of semaphores.
#[derive(Debug)]
pub(super) struct Lane {
    names: Vec<Arc<str>>,
    line: Mutex<Line>,
}

#[derive(Debug, Default)]
struct Line {
    next: u64,
    /// Calls that are not in a transaction yet.
    queue: VecDeque<Seat>,
    replies: HashMap<u64, Shared>,
    /// The call that leads, or is to lead once it wakes. Meanwhile others queue up, which makes batches larger.
    leader: Option<u64>,
}

#[derive(Debug)]
struct Seat {
    ticket: u64,
    job: Job,
    told: Arc<Condvar>,
}

impl Line {
    fn is_queued(&self, ticket: u64) -> bool {
        self.queue.iter().any(|seat| seat.ticket == ticket)
    }

    /// The next jobs. Of two with one external id, the second waits for what the first one gets.
    fn take(&mut self) -> Vec<Seat> {
        let mut batch: Vec<Seat> = Vec::new();
        for seat in std::mem::take(&mut self.queue) {
            let id = seat.job.external_id();
            let is_later = batch.iter().any(|other| other.job.external_id() == id);
            if is_later || batch.len() >= MAX_BATCH {
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
        let told = Arc::new(Condvar::new());
        let mut line = self.line.lock();
        let ticket = line.next;
        line.next += 1;
        line.queue.push_back(Seat {
            ticket,
            job,
            told: Arc::clone(&told),
        });
        loop {
            if let Some(reply) = line.replies.remove(&ticket) {
                return reply;
            }
            if !line.is_queued(ticket) {
                // In a transaction, which has a limit of its own.
                told.wait(&mut line);
            } else if line.leader.is_some_and(|leader| leader != ticket) {
                let left = by.remaining();
                if left.is_zero() {
                    line.queue.retain(|seat| seat.ticket != ticket);
                    return (Err(no_turn()), false);
                }
                told.wait_for(&mut line, left);
            } else {
                line.leader = Some(ticket);
                drop(line);
                let led = self.lead(store, ticket, by);
                if let Err(error) = led {
                    return (Err(error), false);
                }
                line = self.line.lock();
            }
        }
    }

    /// Carries out one transaction.
    ///
    /// # Errors
    /// There was no connection in time. The other calls may have more time than this one.
    fn lead(&self, store: &MysqlPermits, ticket: u64, by: Moment) -> Result<()> {
        let mut turn = Turn {
            lane: self,
            batch: Vec::new(),
            replies: Vec::new(),
        };
        let mut session = store.session(by).inspect_err(|_| {
            let mut line = self.line.lock();
            line.queue.retain(|seat| seat.ticket != ticket);
        })?;
        turn.batch = self.line.lock().take();
        turn.replies = match self.carry_out(&mut session, &turn.batch) {
            Ok(replies) => replies,
            Err(error) => turn.batch.iter().map(|_| Err(error.clone())).collect(),
        };
        Ok(())
    }

    fn carry_out(&self, session: &mut Session<'_>, batch: &[Seat]) -> Result<Vec<Result<Reply>>> {
        // Alone: a single statement does it.
        if let [seat] = batch
            && let Job::Release(grant) = &seat.job
        {
            let released = session.release(grant)?;
            return Ok(vec![Ok(Reply::Released(released))]);
        }
        let (mut requests, mut grants) = (Vec::new(), Vec::new());
        for seat in batch {
            match &seat.job {
                Job::Acquire(request) => requests.push(Arc::clone(request)),
                Job::Release(grant) => grants.push(which(grant)),
            }
        }
        let transaction = Transaction {
            names: &self.names,
            release: (!grants.is_empty()).then(|| grants.join(" OR ")),
            requests: &requests,
        };
        let done = transaction.run(session)?;
        let mut acquired = done.acquired.into_iter();
        let replies = batch.iter().map(|seat| match &seat.job {
            Job::Acquire(_) => match acquired.next() {
                Some(outcome) => outcome.map(Reply::Acquired),
                None => Err(no_reply()),
            },
            Job::Release(grant) => {
                let mut released = done.released.iter();
                Ok(
                    match released.any(|row| row.external_id == grant.external_id) {
                        true => Reply::Released(Released::Permits(grant.permits.clone())),
                        false => Reply::NotReleased,
                    },
                )
            }
        });
        Ok(replies.collect())
    }
}

/// A condition on `r` that names a grant, or whatever its request holds.
pub(super) fn which(grant: &GrantId) -> String {
    let id = quote(&grant.external_id);
    match grant.token {
        Some(token) => format!("(r.external_id = {id} AND r.token = {token})"),
        None => format!("r.external_id = {id}"),
    }
}

/// The time for which one call leads a lane. Each call of its batch gets a reply, also if it panics.
struct Turn<'a> {
    lane: &'a Lane,
    batch: Vec<Seat>,
    replies: Vec<Result<Reply>>,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let is_shared = self.batch.len() > 1;
        let mut replies = std::mem::take(&mut self.replies).into_iter();
        let mut line = self.lane.line.lock();
        for seat in &self.batch {
            let reply = replies.next().unwrap_or_else(|| Err(no_reply()));
            line.replies.insert(seat.ticket, (reply, is_shared));
        }
        line.leader = line.queue.front().map(|seat| seat.ticket);
        let next = line.queue.front().map(|seat| Arc::clone(&seat.told));
        // Unlocked, so that no call waits for another one to wake. The next leader comes first.
        drop(line);
        let told = self.batch.iter().map(|seat| &seat.told);
        for told in next.iter().chain(told) {
            told.notify_one();
        }
    }
}

fn no_turn() -> Error {
    let text = "no turn in time: many requests of this process wait for the same semaphores; nothing was sent";
    Error::new(ErrorKind::Timeout, text).not_sent()
}

pub(super) fn no_reply() -> Error {
    let text = "the transaction that this request was part of ended without a reply for it";
    Error::new(ErrorKind::Panicked, text)
}
