//! A contender for one mutex: a node in the line, and at most two watches.
//!
//! Round trips: an attempt is one (the creation and the list of children travel together, and the
//! server works on them in order), a release is one, a renewal none. A waiter that stood second takes
//! over when it hears that the first is gone, without asking anything: nodes before its own can only
//! disappear.

use std::cmp::Ordering;
use std::sync::Arc;

use super::message::{Code, Mode, Reply, Request, Stat};
use super::path::{Line, Member, ROOT, ancestry, node_path};
use super::protocol::Ask;
use super::session::{Call, Leader, Session, Sessions, unexpected};
use super::watches::Watch;
use crate::backend::{
    Attempt, Contender, Grant, OnRefusal, Purpose, RawContender, Refusal, Renewal,
};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::lease::Lease;
use crate::owner::MutexOwner;
use crate::parker::Unparker;

/// How often an attempt starts over because nodes came and went meanwhile.
const ROUNDS: usize = 32;

pub(super) struct ZkContender {
    sessions: Arc<Sessions>,
    contender: Contender,
    mutex_path: Arc<str>,
    wake: Arc<Unparker>,
    /// Our node was asked for, and the answer did not come in time.
    entering: Option<Entering>,
    node: Option<Node>,
    /// This contender found the mutex free: it need not look before it writes.
    likely_free: bool,
}

/// A node that was asked for, with the nodes above it. It is waited for however long it takes: a busy server that were
/// asked anew by all that wait would never catch up.
struct Entering {
    session: Arc<Session>,
    call: Arc<Call>,
    parents: Vec<Request>,
}

/// A contender's node.
struct Node {
    /// The session it lives and dies with.
    session: Arc<Session>,
    member: Member,
    path: String,
    stat: Stat,
    /// The watch on the node itself: an operator may delete it.
    own: Option<Arc<Watch>>,
    /// The node before this one, if there was one.
    before: Option<Before>,
    leader: Option<Leader>,
    term: Option<Term>,
}

/// The node before a contender's, as it was seen over the connection with the number `epoch`.
struct Before {
    watch: Arc<Watch>,
    /// It led: when it is gone, the contender leads.
    leads: bool,
    epoch: u64,
}

/// An ownership. Its node is not used for another one, which would have the same fence.
#[derive(Clone, Copy)]
struct Term {
    acquired_at: Option<i64>,
}

impl Node {
    fn new(session: &Arc<Session>, path: String, stat: Stat) -> Result<Node> {
        let name = path.rsplit('/').next().unwrap_or_default().to_owned();
        Ok(Node {
            session: Arc::clone(session),
            member: Member::read(name).ok_or_else(unexpected)?,
            path,
            stat,
            own: None,
            before: None,
            leader: None,
            term: None,
        })
    }

    fn is_gone(&self) -> bool {
        self.own.as_ref().is_some_and(|own| own.is_gone()) || self.session.protocol().is_over()
    }

    fn is_watched(&self) -> bool {
        self.own.as_ref().is_some_and(|own| own.is_set())
    }

    fn holds(&self, fence: u64) -> bool {
        self.term.is_some() && u64::try_from(self.stat.czxid) == Ok(fence)
    }

    /// Whether this node leads by what was told: the leader before it is gone, and it is not. Only over the same
    /// connection: after another one events come one by one, and the line must be read.
    fn takes_over(&self) -> bool {
        self.before.as_ref().is_some_and(|before| {
            before.leads
                && before.watch.is_gone()
                && self.is_watched()
                && self.session.protocol().serves(before.epoch)
        })
    }

    /// Whether nothing happened to this node and the one before it, by what was told.
    fn is_waiting(&self) -> bool {
        self.before.as_ref().is_some_and(|before| {
            before.watch.is_set()
                && self.is_watched()
                && self.session.protocol().serves(before.epoch)
        })
    }

    /// One small question in the place of the whole line: who leads? `None`: the line has to be read.
    fn ask_for_leader(&self, by: Moment) -> Result<Option<Leader>> {
        let Some(Leader { path, .. }) = &self.leader else {
            return Ok(None);
        };
        Leader::read(path, self.session.one(Request::Data(path.clone()), by)?)
    }

    /// Watches the node itself, unless that is done. Returns `false` if it is gone.
    fn watch_own(&mut self, wake: &Arc<Unparker>, by: Moment) -> Result<bool> {
        if self.is_watched() {
            return Ok(true);
        }
        let own = Watch::new(wake);
        let read = Ask::watch(Request::Data(self.path.clone()), &own);
        let outcome = self.session.one(read, by)?;
        // Where the server refuses, the next renewal asks again.
        self.own = Some(own);
        Ok(outcome != Err(Code::NO_NODE))
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
        self.forget_the_past(session);
        let leaves = on_refusal == OnRefusal::Leave;
        // Looks before it writes, so that a try that fails makes no node. Not where the mutex was free the last time:
        // then a look would only double the cost of a lock without rivals.
        if leaves
            && self.node.is_none()
            && self.entering.is_none()
            && !self.likely_free
            && let Some(leader) = session.leader(&self.mutex_path, by)?
        {
            return Ok(self.refused(session, Some(&leader)));
        }
        for _ in 0..ROUNDS {
            // Taken before anything is read: one that is too old only costs a question.
            let epoch = session.protocol().epoch;
            let line = match &mut self.node {
                Some(node) if node.takes_over() => None,
                Some(node) if !leaves && node.is_waiting() => match node.ask_for_leader(by)? {
                    Some(leader) => {
                        let leader = node.leader.insert(leader).clone();
                        return Ok(self.refused(session, Some(&leader)));
                    }
                    None => Some(session.line(&self.mutex_path, by)?),
                },
                Some(_) => Some(session.line(&self.mutex_path, by)?),
                None => {
                    let (node, line) = self.enter(session, by)?;
                    self.node = Some(node);
                    Some(line)
                }
            };
            let Some(node) = &self.node else { continue };
            let place = line.map(|line| (line.position(&node.member), line));
            match place {
                None | Some((Some(0), _)) => {
                    if let Some(grant) = self.grant(session, by)? {
                        return Ok(Attempt::Granted(grant));
                    }
                }
                // Deleted by an operator.
                Some((None, _)) => self.discard(),
                Some((_, line)) if leaves => {
                    let leader = match line.first() {
                        Some(first) => {
                            let path = self.path(first);
                            Leader::read(&path, session.one(Request::Data(path.clone()), by)?)?
                        }
                        None => None,
                    };
                    self.delete(by)?;
                    return Ok(self.refused(session, leader.as_ref()));
                }
                Some((Some(position), line)) => {
                    if self.stand_behind(&line, position, epoch, by)? {
                        let leader = self.node.as_ref().and_then(|node| node.leader.clone());
                        return Ok(self.refused(session, leader.as_ref()));
                    }
                }
            }
        }
        Err(Error::new(
            ErrorKind::Unavailable,
            "nodes come and go faster than they can be read",
        ))
    }

    /// Lets go of a node with which this contender has owned: the session deletes it when its lease ends, and the next
    /// node stands behind it until then. Also of one that is gone.
    fn forget_the_past(&mut self, session: &Arc<Session>) {
        self.entering
            .take_if(|entering| !Arc::ptr_eq(&entering.session, session));
        let Some(node) = &self.node else { return };
        if !Arc::ptr_eq(&node.session, session) || node.is_gone() {
            self.discard();
        } else if node.term.is_some() {
            self.node = None;
        }
    }

    /// Makes a node and reads the line, in one round trip.
    fn enter(&mut self, session: &Arc<Session>, by: Moment) -> Result<(Node, Arc<Line>)> {
        let mut parents = Vec::new();
        loop {
            let entering = match self.entering.take() {
                Some(entering) => entering,
                None => self.ask_to_enter(session, parents, by)?,
            };
            let Some(answers) = session.finish(&entering.call, by)? else {
                self.entering = Some(entering);
                return Err(session.late());
            };
            let mut answers = answers.into_iter();
            let mut refused = None;
            for (parent, outcome) in entering.parents.iter().zip(answers.by_ref()) {
                match outcome {
                    Ok(_) | Err(Code::NODE_EXISTS | Code::NO_NODE) => {}
                    Err(code) => refused = refused.or(Some(code.error(parent.path()))),
                }
            }
            match (answers.next(), answers.next()) {
                (Some(Ok(Reply::Created(path, stat))), Some(line)) => {
                    session.learn_clock(stat.ctime, entering.call.sent);
                    return match line {
                        Ok(Reply::Line(line)) => Ok((Node::new(session, path, stat)?, line)),
                        other => {
                            session.discard(&path);
                            Err(other.map_or_else(|code| code.error(&path), |_| unexpected()))
                        }
                    };
                }
                // A refused parent is an error only if the node then finds none to be under: a user that may not
                // create in the root is told so even where the node below it exists.
                (Some(Err(Code::NO_NODE)), _) => match refused {
                    Some(error) => return Err(error),
                    None => parents = self.parents(),
                },
                (Some(Err(code)), _) => return Err(code.error(&self.mutex_path)),
                _ => return Err(unexpected()),
            }
        }
    }

    fn ask_to_enter(
        &self,
        session: &Arc<Session>,
        parents: Vec<Request>,
        by: Moment,
    ) -> Result<Entering> {
        let acl = self.sessions.config.acl.permissions();
        let path = node_path(&self.mutex_path, &session.protocol().protection);
        let id = self.contender.id.as_bytes();
        let create = Request::create(&path, id, Mode::EphemeralSequential, acl);
        let line = Request::Line(self.mutex_path.to_string());
        let asks = parents.iter().cloned().chain([create, line]);
        Ok(Entering {
            call: session.start(asks.map(Ask::from).collect(), by)?,
            session: Arc::clone(session),
            parents,
        })
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

    /// Watches the node before this contender's and its own, and reads who leads. Returns `false` if one of the two is
    /// gone.
    fn stand_behind(
        &mut self,
        line: &Line,
        position: usize,
        epoch: u64,
        by: Moment,
    ) -> Result<bool> {
        let before = position.checked_sub(1).and_then(|at| line.get(at));
        let (Some(before), Some(first)) = (before, line.first()) else {
            return Ok(false);
        };
        let (before, first) = (self.path(before), self.path(first));
        let Some(node) = &mut self.node else {
            return Ok(false);
        };
        let (watch, own) = (Watch::new(&self.wake), Watch::new(&self.wake));
        let asks = [
            Ask::watch(Request::Data(before.clone()), &watch),
            Ask::watch(Request::Data(node.path.clone()), &own),
            Request::Data(first.clone()).into(),
        ];
        // Before the answers are there: if they come late, the next look need not ask for all of it again.
        node.own = Some(own);
        node.leader = Some(Leader::unread(&first));
        node.before = Some(Before {
            leads: before == first,
            watch,
            epoch,
        });
        let [to_before, to_own, to_first] = node.session.call(asks, by)?;
        for (outcome, path) in [(to_before, &before), (to_own, &node.path)] {
            match outcome {
                Ok(_) => {}
                Err(Code::NO_NODE) => return Ok(false),
                Err(code) => return Err(code.error(path)),
            }
        }
        node.leader = Leader::read(&first, to_first)?;
        Ok(true)
    }

    /// Grants the ownership to this contender, which leads. `None`: its node is gone.
    fn grant(&mut self, session: &Session, by: Moment) -> Result<Option<Grant>> {
        let Some(node) = &mut self.node else {
            return Ok(None);
        };
        let lease = self.contender.lease;
        // A service is told at once when an operator deletes its node; for the length of a lock that would cost too much.
        let there = self.contender.purpose == Purpose::Lock || node.watch_own(&self.wake, by)?;
        let until = belief(session, lease)?;
        if !there || !hold(node, until + lease.transition()) {
            self.discard();
            return Ok(None);
        }
        let at_once = node.before.is_none().then_some(node.stat.ctime);
        let owner = ours(node, &self.contender, at_once, until);
        node.term = Some(Term {
            // Fixed from now on, so that every renewal names the same moment.
            acquired_at: i64::try_from(owner.acquired_at()).ok(),
        });
        self.likely_free = true;
        let until = Some(until);
        Ok(Some(Grant { owner, until }))
    }

    fn path(&self, member: &Member) -> String {
        format!("{}/{}", self.mutex_path, member.name)
    }

    fn refused(&mut self, session: &Session, leader: Option<&Leader>) -> Attempt {
        self.likely_free = false;
        let lease = self.contender.lease;
        Attempt::Refused(Refusal {
            owner: session.owner_of(leader, lease),
            retry_in: lease.total(),
            asked: true,
        })
    }

    /// Leaves the deletion of the node to the session.
    fn discard(&mut self) {
        if let Some(Entering { session, call, .. }) = self.entering.take() {
            session.give_up(&call);
        }
        if let Some(Node { session, path, .. }) = self.node.take() {
            session.discard(&path);
        }
    }

    /// Leaves a node that has owned, and was not released, to the session, which deletes it when its lease ends: the
    /// owner's work may not have ended.
    fn leave_owned(&mut self) {
        self.node.take_if(|node| node.term.is_some());
    }

    /// Deletes the node and waits for it; where that fails, the session does it when it can. `false`: it was gone.
    fn delete(&mut self, by: Moment) -> Result<bool> {
        // Its watches go first: a deletion of its own wakes no thread.
        let Some(Node { session, path, .. }) = self.node.take() else {
            return Ok(false);
        };
        if session.protocol().is_over() {
            return Ok(false);
        }
        let asked = session.one(Request::Delete(path.clone()), by);
        match asked.inspect_err(|_| session.discard(&path))? {
            Ok(_) => Ok(true),
            Err(Code::NO_NODE) => Ok(false),
            Err(code) => Err(code.error(&path)),
        }
    }
}

/// Keeps an owned node until then. `false`: it is not held any more.
fn hold(node: &Node, until: Moment) -> bool {
    let mut protocol = node.session.protocol();
    protocol.hold(&node.path, until, Moment::now())
}

/// Until when an owner may believe: the session certainly lives, and the transition is left. A sixth of the
/// session timeout at least, whatever transition is asked for: heartbeats cannot tell everything.
fn belief(session: &Session, lease: Lease) -> Result<Moment> {
    let now = Moment::now();
    let transition = lease.transition().max(session.timeout() / 6);
    session
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

/// The snapshot of a contender's own ownership.
fn ours(node: &Node, contender: &Contender, acquired_at: Option<i64>, until: Moment) -> MutexOwner {
    // Renewals come at a third of what is left of the belief. By two thirds one has failed: then
    // the ttl is over, and an owner that is no longer sure can be told from one that is.
    let left = until.remaining();
    let left = (left * 2 / 3, left + contender.lease.transition());
    let fence = node.stat.czxid;
    node.session.owner(&contender.id, acquired_at, fence, left)
}

impl RawContender for ZkContender {
    fn acquire(&mut self, on_refusal: OnRefusal, by: Moment) -> Result<Attempt> {
        let session = self.sessions.session()?;
        let attempt = self.try_acquire(&session, on_refusal, by);
        attempt.map_err(|error| {
            if on_refusal == OnRefusal::Leave {
                // Its caller may never come back, and a node has no lease of its own.
                self.discard();
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
        let lost = Ok(Renewal::Lost(MutexOwner::NONE));
        let lease = self.contender.lease;
        let node = self.node.as_mut();
        let held = node.filter(|node| node.holds(fence) && !node.is_gone());
        let Some((node, term)) = held.and_then(|node| node.term.map(|term| (node, term))) else {
            return lost;
        };
        let session = Arc::clone(&node.session);
        let until = session
            .connected(Moment::now())
            .map(drop)
            // For a short purpose that turned out long, and where another client wrote to the node.
            .and_then(|()| node.watch_own(&self.wake, by))
            .and_then(|there| there.then(|| belief(&session, lease)).transpose())
            .inspect_err(|_| session.wake_when_serving(&self.wake))?;
        let Some(until) = until.filter(|until| hold(node, *until + lease.transition())) else {
            return lost;
        };
        Ok(Renewal::Renewed(Grant {
            owner: ours(node, &self.contender, term.acquired_at, until),
            until: Some(until),
        }))
    }

    fn release(&mut self, fence: u64, by: Moment) -> Result<bool> {
        if !self.node.as_ref().is_some_and(|node| node.holds(fence)) {
            return Ok(false);
        }
        self.delete(by)
    }

    fn withdraw(&mut self, by: Moment) -> Result<()> {
        self.leave_owned();
        if self.entering.is_some() {
            self.discard();
        }
        self.delete(by).map(drop)
    }
}

impl Drop for ZkContender {
    fn drop(&mut self) {
        self.leave_owned();
        self.discard();
    }
}
