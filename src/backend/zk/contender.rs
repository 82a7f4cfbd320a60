//! A contender for one mutex: a node in the line, and at most two watches.
//!
//! Round trips: an attempt is one (the creation and the list of children travel together, and the
//! server works on them in order), a release is one, a renewal none. A waiter that stood second takes
//! over when it hears that the first is gone, without asking anything: nodes before ours can only
//! disappear.

use std::sync::Arc;
use std::time::Duration;

use super::node::{Entry, Look, Standing, Term};
use super::path::Line;
use super::session::{Known, Leader, Session, Sessions, unexpected};
use crate::backend::{
    Attempt, Contender, Grant, OnRefusal, Purpose, RawContender, Refusal, Renewal,
};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::owner::MutexOwner;
use crate::parker::Unparker;

/// How often an attempt starts over because nodes came and went meanwhile.
const ROUNDS: usize = 32;

pub(super) struct ZkContender {
    sessions: Arc<Sessions>,
    contender: Contender,
    mutex_path: Arc<str>,
    wake: Arc<Unparker>,
    entry: Entry,
}

impl ZkContender {
    pub(super) fn new(
        sessions: Arc<Sessions>,
        contender: &Contender,
        mutex_path: Arc<str>,
        wake: &Unparker,
    ) -> ZkContender {
        ZkContender {
            entry: Entry::new(
                Arc::clone(&sessions),
                Arc::clone(&contender.id),
                Arc::clone(&mutex_path),
            ),
            sessions,
            contender: contender.clone(),
            mutex_path,
            wake: Arc::new(wake.clone()),
        }
    }

    fn try_acquire(
        &mut self,
        session: &Arc<Session>,
        on_refusal: OnRefusal,
        by: Moment,
    ) -> Result<Attempt> {
        if let Some(rest) = self.winding_down() {
            return Ok(Attempt::Refused(Refusal {
                owner: MutexOwner::NONE,
                retry_in: rest,
                asked: false,
            }));
        }
        self.entry.forget_the_past(session);
        for _ in 0..ROUNDS {
            let line = match self.entry.standing() {
                Standing::Out => {
                    if on_refusal == OnRefusal::Leave
                        && let Some(leader) = self.held_by(session, by)?
                    {
                        return Ok(self.refused(session, Some(leader)));
                    }
                    self.entry.enter(session, by)?;
                    continue;
                }
                Standing::Entering(_) => self.entry.resolve(by)?,
                Standing::Unsure { .. } => self.entry.search(&self.wake, by)?,
                Standing::In(node) if node.takes_over() => return self.grant(session, None),
                Standing::In(node) if node.must_read_line() => None,
                Standing::In(_) => {
                    let refresh = self.contender.lease.total() / 2;
                    let purpose = self.contender.purpose;
                    let Some(node) = self.entry.node_mut() else {
                        continue;
                    };
                    match node.look(&self.mutex_path, purpose, refresh, by)? {
                        Look::Waits(leader) if on_refusal == OnRefusal::Enqueue => {
                            return Ok(self.refused(session, leader));
                        }
                        Look::Waits(_) => None,
                        Look::ReadLine => None,
                        Look::Deleted => {
                            self.entry.forget_node();
                            continue;
                        }
                    }
                }
            };
            let Some(node) = self.entry.node() else {
                continue;
            };
            if node.takes_over() {
                return self.grant(session, None);
            }
            let epoch = session.look(|protocol| protocol.epoch());
            let line = match line {
                Some(line) => line,
                None => match session.line(&self.mutex_path, by)? {
                    Some(line) => line,
                    None => {
                        // Not even the mutex is there.
                        self.entry.forget_node();
                        continue;
                    }
                },
            };
            if let Some(attempt) = self.placed(session, &line, epoch, on_refusal, by)? {
                return Ok(attempt);
            }
        }
        Err(Error::new(
            ErrorKind::Unavailable,
            "nodes come and go faster than they can be read",
        ))
    }

    /// Acts on where our node stands. `None`: there is more to ask.
    fn placed(
        &mut self,
        session: &Arc<Session>,
        line: &Line,
        epoch: u64,
        on_refusal: OnRefusal,
        by: Moment,
    ) -> Result<Option<Attempt>> {
        let Some(node) = self.entry.node_mut() else {
            return Ok(None);
        };
        match node.position(line) {
            // Deleted by somebody else.
            None => {
                self.entry.forget_node();
                Ok(None)
            }
            Some(0) => {
                let at_once = node.came_first().then_some(node.stat().ctime);
                self.grant(session, at_once).map(Some)
            }
            Some(_) if on_refusal == OnRefusal::Leave => self.leave(session, line, by).map(Some),
            Some(position) => {
                node.stand_behind(line, position, epoch, &self.mutex_path, &self.wake, by)?;
                Ok(None)
            }
        }
    }

    /// Who leads, for one that takes the mutex only if nobody does: it looks before it writes, so that a
    /// try that fails makes no node. Not where the mutex was free when this session looked last: then a
    /// look would only double the cost of a lock that nobody else wants.
    fn held_by(&self, session: &Arc<Session>, by: Moment) -> Result<Option<Leader>> {
        if matches!(session.known(&self.mutex_path), Some(Known::Free)) {
            return Ok(None);
        }
        let line = session.line(&self.mutex_path, by)?.unwrap_or_default();
        if line.first().is_none() {
            session.learn(&self.mutex_path, Known::Free);
        }
        self.first_of(session, &line, by)
    }

    /// Who leads by `line`: as the session knows it, or read now. `None`: nobody, or gone by now, or not
    /// for us to read.
    fn first_of(&self, session: &Session, line: &Line, by: Moment) -> Result<Option<Leader>> {
        let Some(first) = line.first() else {
            return Ok(None);
        };
        let known = session.known_leader(&self.mutex_path);
        if let Some(known) = known.filter(|known| known.name == first.name) {
            return Ok(Some(known));
        }
        let leader = match session.node(&self.mutex_path, &first.name, by) {
            Err(error) if error.kind() == ErrorKind::Denied => None,
            other => other?,
        };
        if let Some(leader) = &leader {
            session.learn(&self.mutex_path, Known::Led(leader.clone()));
        }
        Ok(leader)
    }

    /// What is left of the transition after we stepped down. Until it is over our old node stays: the
    /// next in line leads when it goes, and our owner's work may still be winding down.
    fn winding_down(&self) -> Option<Duration> {
        let node = self.entry.node()?;
        let term = node.term()?;
        let rest = (term.until + self.contender.lease.transition()).remaining();
        (!node.is_session_over() && !node.is_deleted() && !rest.is_zero()).then_some(rest)
    }

    /// We lead. `acquired_at`: since when, where it was at once; otherwise since now.
    fn grant(&mut self, session: &Session, acquired_at: Option<i64>) -> Result<Attempt> {
        let until = self.belief(session)?;
        let (lease, purpose) = (self.contender.lease, self.contender.purpose);
        let Some(node) = self.entry.node_mut() else {
            return Err(unexpected());
        };
        node.leads();
        if purpose == Purpose::Lead {
            // Not waited for: it costs the owner nothing, and fires if the node is gone already.
            node.watch_own(&self.wake)?;
        }
        session.act(|protocol| protocol.begin_lease(node.path(), until + lease.transition()));
        session.learn(
            &self.mutex_path,
            Known::Led(node.leader(&self.contender.id)),
        );
        let czxid = node.stat().czxid;
        let owner = self.ours(session, acquired_at, czxid, until);
        if let Some(node) = self.entry.node_mut() {
            node.set_term(Term {
                // Fixed from now on, so that every renewal names the same moment.
                acquired_at: i64::try_from(owner.acquired_at()).ok(),
                until,
            });
        }
        Ok(Attempt::Granted(Grant {
            owner,
            until: Some(until),
        }))
    }

    /// Until when we may believe: the session certainly lives, and the transition is left. A sixth of the
    /// session timeout at least, whatever transition is asked for: heartbeats cannot tell everything.
    fn belief(&self, session: &Session) -> Result<Moment> {
        let now = Moment::now();
        self.end_of_belief(session)
            .map(|until| until.min(now + self.contender.lease.belief()))
            .filter(|until| *until > now)
            .ok_or_else(|| {
                Error::new(
                    ErrorKind::Timeout,
                    "no heartbeat has been acknowledged for so long that the session may be over",
                )
            })
    }

    fn end_of_belief(&self, session: &Session) -> Option<Moment> {
        let (alive_until, timeout) =
            session.look(|protocol| (protocol.alive_until(), protocol.timeout()));
        let transition = self.contender.lease.transition().max(timeout / 6);
        alive_until.map(|alive| alive - transition)
    }

    fn ours(
        &self,
        session: &Session,
        acquired_at: Option<i64>,
        czxid: i64,
        until: Moment,
    ) -> MutexOwner {
        // Renewals come at a third of what is left of the belief. By two thirds one has failed: then
        // the ttl is over, and an owner that is no longer sure can be told from one that is.
        let left = until.remaining();
        let ttl = left * 2 / 3;
        let total = left + self.contender.lease.transition();
        session.owner(&self.contender.id, acquired_at, czxid, (ttl, total))
    }

    /// Not first, and not willing to wait: leaves no trace.
    fn leave(&mut self, session: &Arc<Session>, line: &Line, by: Moment) -> Result<Attempt> {
        let Some(node) = self.entry.take_node(|_| true) else {
            return Err(unexpected());
        };
        // The session learns it, so that the next one looks before it writes.
        let leader = match self.first_of(session, line, by) {
            Ok(leader) => leader,
            Err(error) => {
                node.abandon();
                return Err(error);
            }
        };
        node.delete(by)?;
        Ok(self.refused(session, leader))
    }

    fn refused(&self, session: &Session, leader: Option<Leader>) -> Attempt {
        let lease = self.contender.lease;
        Attempt::Refused(Refusal {
            owner: session.owner_of(leader.as_ref(), lease),
            retry_in: lease.total(),
            asked: true,
        })
    }

    /// A caller that is told "unknown" is woken when there is something new to say.
    fn or_wake_later<T>(&self, session: &Session, result: Result<T>) -> Result<T> {
        if result.is_err() {
            session.wake_on_news(&self.wake);
        }
        result
    }
}

impl RawContender for ZkContender {
    fn acquire(&mut self, on_refusal: OnRefusal, by: Moment) -> Result<Attempt> {
        let session = self.sessions.session()?;
        let result = self.try_acquire(&session, on_refusal, by);
        if result.is_err() && on_refusal == OnRefusal::Leave {
            // Its caller may never come back, and a node has no lease of its own.
            self.entry.abandon();
        }
        self.or_wake_later(&session, result)
    }

    fn renew(&mut self, fence: u64, _by: Moment) -> Result<Renewal> {
        let lost = Ok(Renewal::Lost(MutexOwner::NONE));
        let transition = self.contender.lease.transition();
        let now = Moment::now();
        let Some((node, term)) = self
            .entry
            .node_mut()
            .filter(|node| node.holds(fence))
            .and_then(|node| node.term().map(|term| (node, term)))
        else {
            return lost;
        };
        if term.until + transition <= now {
            // The node may still be there, but the lease has run out: the next attempt replaces it.
            return lost;
        }
        if node.is_session_over() || node.is_deleted() {
            self.entry.forget_node();
            return lost;
        }
        let session = Arc::clone(node.session());
        // For a short purpose that turned out long, and where somebody wrote to our node.
        let watched = node.watch_own(&self.wake);
        let path = node.path().to_owned();
        let czxid = node.stat().czxid;
        self.or_wake_later(&session, watched)?;
        if self
            .end_of_belief(&session)
            .is_some_and(|end| end < term.until)
        {
            // It never moves back but where a server keeps the session for less than it was opened with.
            return lost;
        }
        let until = self.belief(&session);
        let until = self.or_wake_later(&session, until)?;
        if until <= term.until && session.look(|protocol| protocol.is_in_doubt(now)) {
            let error = Error::new(
                ErrorKind::Unreachable,
                format!(
                    "{}: no server acknowledges the session's heartbeat",
                    self.sessions.config.realm
                ),
            );
            return self.or_wake_later(&session, Err(error));
        }
        if !session.act(|protocol| protocol.renew_lease(&path, until + transition)) {
            return lost;
        }
        if let Some(node) = self.entry.node_mut() {
            node.set_term(Term {
                until: term.until.max(until),
                ..term
            });
        }
        Ok(Renewal::Renewed(Grant {
            owner: self.ours(&session, term.acquired_at, czxid, until),
            until: Some(until),
        }))
    }

    fn release(&mut self, fence: u64, by: Moment) -> Result<bool> {
        let Some(node) = self.entry.take_node(|node| node.holds(fence)) else {
            return Ok(false);
        };
        let session = Arc::clone(node.session());
        let released = node.delete(by)?;
        session.learn(&self.mutex_path, Known::Free);
        Ok(released)
    }

    fn withdraw(&mut self, by: Moment) -> Result<()> {
        self.entry.abandon_creation();
        if self.winding_down().is_some() {
            // Not released: the owner's work has not ended. The node goes when the lease is over, or
            // with the contender, which lives until the last callback has returned.
            return Ok(());
        }
        match self.entry.take_node(|_| true) {
            Some(node) => node.delete(by).map(drop),
            None => Ok(()),
        }
    }
}

impl Drop for ZkContender {
    fn drop(&mut self) {
        self.entry.abandon();
    }
}
