//! A contender for one mutex: a node in the line, and at most two watches.
//!
//! Round trips: an attempt is one (the creation and the list of children travel together, and the
//! server works on them in order), a release is one, a renewal none. A waiter that stood second takes
//! over when it hears that the first is gone, without asking anything: nodes before its own can only
//! disappear.

use std::cmp::Ordering;
use std::sync::Arc;

use super::message::{Code, Mode, Outcome, Reply, Request, Stat, found};
use super::path::{Line, ROOT, ancestry, node_path};
use super::protocol::Ask;
use super::session::{Call, Leader, Session, Sessions};
use super::watches::Watch;
use crate::backend::{
    Attempt, Contender, Grant, OnRefusal, Purpose, RawContender, Refusal, Renewal,
};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::lease::Lease;
use crate::owner::MutexOwner;
use crate::parker::Unparker;

pub(super) struct ZkContender {
    sessions: Arc<Sessions>,
    contender: Contender,
    mutex_path: Arc<str>,
    wake: Arc<Unparker>,
    /// Our node was asked for, and the answer did not come in time. It is waited for however long it takes: a busy
    /// server that were asked anew by all that wait would never catch up.
    entering: Option<Call>,
    node: Option<Node>,
    /// This contender found the mutex free: it need not look before it writes.
    likely_free: bool,
}

/// A contender's node. When it is dropped, the session deletes it: at once, or at the end of the lease if the contender
/// owns with it, because the owner's work may not have ended.
struct Node {
    /// The session it lives and dies with.
    session: Arc<Session>,
    path: String,
    stat: Stat,
    /// The watch on the node itself: an operator may delete it.
    own: Option<Arc<Watch>>,
    /// The node before this one, if there was one.
    before: Option<Before>,
    /// When the contender acquired with it, by the servers' clock. The node is not used for another ownership, which
    /// would have the same fence.
    acquired_at: Option<u64>,
}

/// The node before a contender's.
struct Before {
    watch: Arc<Watch>,
    /// The path of the node that led.
    leader: String,
    /// It led itself: when it is gone, the contender leads.
    leads: bool,
}

impl Node {
    fn name(&self) -> &str {
        self.path.rsplit('/').next().unwrap_or_default()
    }

    fn is_gone(&self) -> bool {
        self.own.as_ref().is_some_and(|own| own.is_gone()) || self.session.protocol().is_over()
    }

    fn holds(&self, fence: u64) -> bool {
        self.acquired_at.is_some() && self.stat.czxid == fence
    }

    /// The node before this one, if all that happened to this one was told: then it is there. After another connection
    /// the line must be read.
    fn before(&self) -> Option<&Before> {
        let is_there = self.own.as_ref().is_some_and(|own| own.is_set());
        self.before.as_ref().filter(|_| is_there)
    }

    /// Whether this node leads by what was told: the leader before it is gone, and it is not.
    fn takes_over(&self) -> bool {
        let before = self.before();
        before.is_some_and(|before| before.leads && before.watch.is_gone())
    }

    /// Watches the node itself, unless that is done. Returns `false` if it is gone.
    fn watch_own(&mut self, wake: &Arc<Unparker>, by: Moment) -> Result<bool> {
        if self.own.as_ref().is_some_and(|own| own.is_kept()) {
            return Ok(true);
        }
        // Where the server refuses, the next renewal asks again.
        let own = self.own.insert(Watch::new(wake));
        let read = Ask::new(Request::Data(self.path.clone()), Some(own));
        Ok(self.session.ask(read, by)? != Err(Code::NO_NODE))
    }

    /// Watches the node at `before` and this one, and reads the leader, which may be gone by then. `None` if one of the
    /// two is gone.
    fn stand_behind(
        &mut self,
        before: String,
        leader: &str,
        wake: &Arc<Unparker>,
        by: Moment,
    ) -> Result<Option<Outcome>> {
        let (watch, own) = (Watch::new(wake), Watch::new(wake));
        let asks = [
            Ask::new(Request::Data(before.clone()), Some(&watch)),
            Ask::new(Request::Data(self.path.clone()), Some(&own)),
            Request::Data(leader.to_owned()).into(),
        ];
        // Before the answers are there: if they come late, the next look need not ask for all of it again.
        self.own = Some(own);
        self.before = Some(Before {
            watch,
            leads: before == leader,
            leader: leader.to_owned(),
        });
        let [to_before, to_own, to_leader] = self.session.call(asks, by)?;
        let before_is_there = found(to_before, &before)?.is_some();
        let own_is_there = found(to_own, &self.path)?.is_some();
        Ok((before_is_there && own_is_there).then_some(to_leader))
    }

    /// Until when an owner may believe: the session certainly lives, and the transition is left. A sixth of the
    /// session timeout at least, whatever transition is asked for: heartbeats cannot tell everything.
    fn belief(&self, lease: Lease) -> Result<Moment> {
        let now = Moment::now();
        let protocol = self.session.protocol();
        let transition = lease.transition().max(protocol.timeout() / 6);
        protocol
            .alive_until()
            .map(|alive| (alive - transition).min(now + lease.belief()))
            .filter(|until| *until > now)
            .ok_or_else(|| {
                Error::new(
                    ErrorKind::Timeout,
                    "no heartbeat has been acknowledged for so long that the session may be over",
                )
            })
    }

    /// Founds or prolongs the ownership. `None`: the node is gone.
    fn grant(&mut self, contender: &Contender) -> Result<Option<Grant>> {
        let transition = contender.lease.transition();
        let until = self.belief(contender.lease)?;
        let (now, end) = (Moment::now(), until + transition);
        let held = self.session.protocol().hold(&self.path, end, now);
        if !held {
            return Ok(None);
        }
        // Fixed from now on, so that every renewal names the same moment.
        let acquired_at = *self.acquired_at.get_or_insert_with(|| match self.before {
            Some(_) => self.session.servers_ms(),
            None => self.stat.ctime,
        });
        // Renewals come at a third of what is left of the belief. By two thirds one has failed: then
        // the ttl is over, and an owner that is no longer sure can be told from one that is.
        let left = until - now;
        let left = (left * 2 / 3, left + transition);
        let id = Arc::clone(&contender.id);
        let owner = self.session.owner(id, acquired_at, self.stat.czxid, left);
        let until = Some(until);
        Ok(Some(Grant { owner, until }))
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if self.acquired_at.is_none() {
            self.session.discard(&self.path);
        }
    }
}

impl ZkContender {
    pub(super) fn new(
        sessions: Arc<Sessions>,
        contender: &Contender,
        mutex_path: Arc<str>,
        wake: &Unparker,
    ) -> ZkContender {
        ZkContender {
            sessions,
            contender: contender.clone(),
            mutex_path,
            wake: Arc::new(wake.clone()),
            entering: None,
            node: None,
            likely_free: false,
        }
    }

    fn try_acquire(
        &mut self,
        session: &Arc<Session>,
        on_refusal: OnRefusal,
        by: Moment,
    ) -> Result<Attempt> {
        self.entering.take_if(|call| !call.is_of(session));
        // The next node stands behind one with which this contender owned, until its lease ends.
        (self.node).take_if(|node| node.is_gone() || node.acquired_at.is_some());
        // Looks before it writes, so that a try that fails makes no node. Not where the mutex was free the last time:
        // then a look would only double the cost of a lock without rivals.
        if on_refusal == OnRefusal::Leave
            && self.node.is_none()
            && self.entering.is_none()
            && !self.likely_free
            && let Some(leader) = session.leader(&self.mutex_path, None, by)?
        {
            return Ok(self.refused(session, Some(leader)));
        }
        // Every second round at least asks the server, which ends with `by`.
        loop {
            if let Some(attempt) = self.look(session, on_refusal, by)? {
                return Ok(attempt);
            }
        }
    }

    /// Finds out where this contender stands. `None`: nodes came or went meanwhile.
    fn look(
        &mut self,
        session: &Arc<Session>,
        on_refusal: OnRefusal,
        by: Moment,
    ) -> Result<Option<Attempt>> {
        let leaves = on_refusal == OnRefusal::Leave;
        let line = match &self.node {
            Some(node) if node.takes_over() => return self.lead(by),
            Some(node) => {
                // One small question in the place of the whole line: who leads?
                if !leaves
                    && let Some(before) = node.before()
                    && before.watch.is_set()
                    && let Some(leader) = session.read(before.leader.clone(), None, by)?
                {
                    return Ok(Some(self.refused(session, Some(leader))));
                }
                session.line(&self.mutex_path, by)?
            }
            None => self.enter(session, by)?,
        };
        let Some(node) = &mut self.node else {
            return Ok(None);
        };
        let Some(place) = line.members.iter().position(|name| name == node.name()) else {
            // Deleted by an operator.
            self.node = None;
            return Ok(None);
        };
        let before = place.checked_sub(1).and_then(|at| line.members.get(at));
        let (Some(before), Some(first)) = (before, line.members.first()) else {
            return self.lead(by);
        };
        let path = |name: &String| format!("{}/{name}", self.mutex_path);
        let (before, first) = (path(before), path(first));
        if leaves {
            // The session deletes the node before it reads who leads.
            self.node = None;
            let leader = session.read(first, None, by)?;
            return Ok(Some(self.refused(session, leader)));
        }
        let Some(read) = node.stand_behind(before, &first, &self.wake, by)? else {
            return Ok(None);
        };
        let leader = Leader::new(first, read)?;
        // A lock may change hands faster than one can ask who holds it. A service asks again, to tell it.
        if leader.is_none() && self.contender.purpose == Purpose::Lead {
            return Ok(None);
        }
        Ok(Some(self.refused(session, leader)))
    }

    /// Makes a node and reads the line, in one round trip.
    fn enter(&mut self, session: &Arc<Session>, by: Moment) -> Result<Arc<Line>> {
        let mut parents = Vec::new();
        loop {
            let mut call = match self.entering.take() {
                Some(call) => call,
                None => {
                    let asks = parents.into_iter().chain(self.entry(session));
                    session.start(asks.map(Ask::from).collect(), by)?
                }
            };
            let Some(mut outcomes) = call.wait(by)? else {
                self.entering = Some(call);
                return Err(session.late());
            };
            let (Some(line), Some(created)) = (outcomes.pop(), outcomes.pop()) else {
                return Err(session.late());
            };
            if let Some(Reply { path, stat, .. }) = found(created, &self.mutex_path)? {
                session.learn_clock(stat.ctime, call.sent);
                let node = Node {
                    session: Arc::clone(session),
                    path,
                    stat,
                    own: None,
                    before: None,
                    acquired_at: None,
                };
                let line = line.map_err(|code| code.error(&node.path))?.line;
                self.node = Some(node);
                return Ok(line);
            }
            // A refused parent is an error only if the node then finds none to be under: a user that may not
            // create in the root is told so even where the node below it exists.
            parents = self.parents();
            for (parent, outcome) in parents.iter().zip(outcomes) {
                match outcome {
                    Ok(_) | Err(Code::NODE_EXISTS | Code::NO_NODE) => {}
                    Err(code) => return Err(code.error(parent.path())),
                }
            }
        }
    }

    fn entry(&self, session: &Session) -> [Request; 2] {
        let acl = self.sessions.config.acl.permissions();
        let path = node_path(&self.mutex_path, &session.protocol().protection);
        let id = self.contender.id.as_bytes();
        let create = Request::create(&path, id, Mode::EphemeralSequential, acl);
        [create, Request::Children(self.mutex_path.to_string())]
    }

    /// Curator's containers; the nodes above them, of the chroot, are not the mutexes' own.
    fn parents(&self) -> Vec<Request> {
        let acl = self.sessions.config.acl;
        let root = self.sessions.config.chroot.len() + ROOT.len();
        let parent = |path: &str| {
            let (mode, acl) = match path.len().cmp(&root) {
                Ordering::Less => (Mode::Persistent, acl.permissions_above()),
                Ordering::Equal => (Mode::Container, acl.permissions_above()),
                Ordering::Greater => (Mode::Container, acl.permissions()),
            };
            Request::create(path, b"", mode, acl)
        };
        ancestry(&self.mutex_path).map(parent).collect()
    }

    /// Grants the ownership to this contender, which leads.
    fn lead(&mut self, by: Moment) -> Result<Option<Attempt>> {
        self.likely_free = true;
        // A service is told at once when an operator deletes its node; for the length of a lock that would cost too much.
        let grant = self.grant(self.contender.purpose == Purpose::Lead, by)?;
        Ok(grant.map(Attempt::Granted))
    }

    /// Founds or prolongs the ownership; `watched`: of a node that is watched. `None`: the node is gone.
    fn grant(&mut self, watched: bool, by: Moment) -> Result<Option<Grant>> {
        if let Some(node) = &mut self.node
            && (!watched || node.watch_own(&self.wake, by)?)
            && let Some(grant) = node.grant(&self.contender)?
        {
            return Ok(Some(grant));
        }
        self.node = None;
        Ok(None)
    }

    fn refused(&mut self, session: &Session, leader: Option<Leader>) -> Attempt {
        self.likely_free = false;
        let lease = self.contender.lease;
        Attempt::Refused(Refusal {
            // A leader that may not be read leads all the same.
            owner: session.owner_of(leader, lease).unwrap_or_default(),
            retry_in: lease.total(),
        })
    }

    /// Deletes the node and waits for it; where that fails, the session does it when it can. `false`: it was gone.
    fn delete(&mut self, by: Moment) -> Result<bool> {
        let Some(mut node) = self.node.take() else {
            return Ok(false);
        };
        // Its watches go first: a deletion of its own wakes no thread. Nor does a lease keep it any more.
        (node.own, node.before, node.acquired_at) = (None, None, None);
        if node.session.protocol().is_over() {
            return Ok(false);
        }
        let delete = Request::Delete(node.path.clone());
        Ok(node.session.find(delete, by)?.is_some())
    }
}

impl RawContender for ZkContender {
    fn acquire(&mut self, on_refusal: OnRefusal, by: Moment) -> Result<Attempt> {
        let session = self.sessions.session()?;
        let attempt = self.try_acquire(&session, on_refusal, by);
        attempt.map_err(|error| {
            if on_refusal == OnRefusal::Leave {
                // Its caller may never come back, and a node has no lease of its own.
                (self.entering, self.node) = (None, None);
            }
            session.wake_when_serving(&self.wake);
            // There is a node to give up, whatever failed after it was made.
            match self.node.is_some() || self.entering.is_some() {
                true => error.perhaps_sent(),
                false => error,
            }
        })
    }

    fn renew(&mut self, fence: u64, by: Moment) -> Result<Renewal> {
        let held = (self.node.as_ref()).filter(|node| node.holds(fence) && !node.is_gone());
        let Some(node) = held else {
            return Ok(Renewal::Lost(MutexOwner::NONE));
        };
        let session = Arc::clone(&node.session);
        let grant = session
            .connected(Moment::now())
            .map(drop)
            // For a short purpose that turned out long, and where another client wrote to the node.
            .and_then(|()| self.grant(true, by))
            .inspect_err(|_| session.wake_when_serving(&self.wake))?;
        Ok(grant.map_or(Renewal::Lost(MutexOwner::NONE), Renewal::Renewed))
    }

    fn release(&mut self, fence: u64, by: Moment) -> Result<bool> {
        if !self.node.as_ref().is_some_and(|node| node.holds(fence)) {
            return Ok(false);
        }
        self.delete(by)
    }

    fn withdraw(&mut self, by: Moment) -> Result<()> {
        self.entering = None;
        // A node that has owned, and was not released, stays until its lease ends.
        self.node.take_if(|node| node.acquired_at.is_some());
        self.delete(by).map(drop)
    }
}
