//! A contender's place in the line: one ephemeral sequential node, and at most two watches.
//!
//! Round trips: an attempt is one (the creation and the list of children travel together, and the
//! server works on them in order), a release is one, a renewal none. A waiter that stood second takes
//! over on the word that the first is gone, without asking anything: nodes before ours can only
//! disappear.

use std::sync::Arc;
use std::time::Duration;

use super::message::{Code, Mode, Reply, Request};
use super::orphan::Orphan;
use super::path::{Member, ancestry, line_up, mutex_path, node_path, protection};
use super::session::{Answers, Session, unexpected};
use super::watches::{Alarm, Sentinel};
use super::{Core, owner};
use crate::backend::{Attempt, Entry, Grant, Hold, Place, Refusal, Renewal, Seat};
use crate::bell::Waker;
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::owner::MutexOwner;

/// How often an attempt starts over because nodes came and went under its hands.
const ROUNDS: usize = 16;

pub(super) struct Latch {
    core: Arc<Core>,
    place: Place,
    /// The node of the mutex.
    mutex_path: String,
    alarm: Arc<Alarm>,
    node: Option<Node>,
    /// A creation whose answer is not there: the node may or may not exist.
    unsure: Option<Unsure>,
}

/// Our node.
struct Node {
    /// The session it lives and dies with.
    session: Arc<Session>,
    name: String,
    path: String,
    czxid: i64,
    ctime: i64,
    /// The connection over which we last saw the line.
    epoch: u64,
    /// Owned with this node: not again after stepping down, the fence would be the same.
    granted: Option<Granted>,
    own: Option<Arc<Sentinel>>,
    predecessor: Option<Predecessor>,
}

struct Granted {
    acquired_at: Option<i64>,
}

struct Predecessor {
    sentinel: Arc<Sentinel>,
    /// It led when we looked: when it is gone, we lead.
    led: bool,
}

struct Unsure {
    session: Arc<Session>,
    protection: String,
}

/// The contenders, as seen over one connection.
struct Line {
    members: Vec<Member>,
    epoch: u64,
}

impl Latch {
    pub(super) fn new(core: Arc<Core>, place: &Place) -> Latch {
        Latch {
            mutex_path: mutex_path(&core.config.chroot, &place.mutex),
            core,
            place: place.clone(),
            alarm: Arc::default(),
            node: None,
            unsure: None,
        }
    }

    fn try_acquire(&mut self, session: &Arc<Session>, entry: Entry, by: Moment) -> Result<Attempt> {
        let mut stale = self.forget_the_past(session);
        if self.takes_over(session) {
            return self.grant(session, None);
        }
        let mut parents_missing = false;
        for _ in 0..ROUNDS {
            let line = if self.node.is_some() {
                self.look_again(session, by)?
            } else if self.unsure.is_some() {
                self.search(session, by)?
            } else {
                let stale = stale.take();
                match self.enter(session, stale, parents_missing, by)? {
                    Some(line) => Some(line),
                    // Nobody was here before, or the server has tidied up.
                    None => {
                        parents_missing = true;
                        None
                    }
                }
            };
            let (Some(line), Some(node)) = (line, &mut self.node) else {
                continue;
            };
            node.epoch = line.epoch;
            let position = line
                .members
                .iter()
                .position(|member| member.name == node.name);
            match position {
                // Deleted by somebody else.
                None => self.node = None,
                Some(0) => {
                    let at_once = node.predecessor.is_none().then_some(node.ctime);
                    return self.grant(session, at_once);
                }
                Some(position) => {
                    let attempt = match entry {
                        Entry::Try => Some(self.leave(session, &line, by)?),
                        Entry::Queue => self.stand_behind(session, &line, position, by)?,
                    };
                    if let Some(attempt) = attempt {
                        return Ok(attempt);
                    }
                }
            }
        }
        Err(Error::new(
            ErrorKind::Unavailable,
            "nodes come and go faster than they can be read",
        ))
    }

    /// Drops what no longer counts. Returns the path of a node with which we have owned: it must go
    /// before a new one is made.
    fn forget_the_past(&mut self, session: &Arc<Session>) -> Option<String> {
        self.unsure
            .take_if(|unsure| !Arc::ptr_eq(&unsure.session, session));
        let node = self.node.take()?;
        let deleted = node.own.as_ref().is_some_and(|own| own.is_gone());
        if !Arc::ptr_eq(&node.session, session) || deleted {
            return None;
        }
        if node.granted.is_some() {
            return Some(node.path);
        }
        self.node = Some(node);
        None
    }

    /// Whether we lead by what we were told: the leader that we stood behind is gone, and our own
    /// node is not. Only over the same connection: after another one, the line is read anew.
    fn takes_over(&self, session: &Session) -> bool {
        self.node.as_ref().is_some_and(|node| {
            node.predecessor
                .as_ref()
                .is_some_and(|before| before.led && before.sentinel.is_gone())
                && node.own.as_ref().is_some_and(|own| !own.has_fired())
                && session.look(|state| state.is_connected() && state.epoch == node.epoch)
        })
    }

    /// Makes our node and reads the line. `None`: the parents are missing.
    fn enter(
        &mut self,
        session: &Arc<Session>,
        stale: Option<String>,
        parents_missing: bool,
        by: Moment,
    ) -> Result<Option<Line>> {
        let acl = self.core.config.acl;
        let mut requests = Vec::new();
        if let Some(path) = &stale {
            requests.push((Request::Delete { path: path.clone() }, None));
        }
        let mut parents = Vec::new();
        if parents_missing {
            parents.extend(ancestry(&self.mutex_path).map(str::to_owned));
        }
        for path in &parents {
            // Curator's containers; the nodes above belong to somebody else.
            let ours = path.len() >= self.core.config.chroot.len() + "/simba".len();
            requests.push((
                Request::Create {
                    path: path.clone(),
                    data: Vec::new(),
                    mode: if ours {
                        Mode::Container
                    } else {
                        Mode::Persistent
                    },
                    acl,
                },
                None,
            ));
        }
        let protection = protection();
        requests.push((
            Request::Create {
                path: node_path(&self.mutex_path, &protection),
                data: self.place.id.as_bytes().to_vec(),
                mode: Mode::EphemeralSequential,
                acl,
            },
            None,
        ));
        requests.push((self.list(), None));
        self.unsure = Some(Unsure {
            session: Arc::clone(session),
            protection,
        });
        let mut answers = session.call(requests, by).inspect_err(|_| {
            if let Some(path) = &stale {
                session.abandon(Orphan::Node(path.clone()));
            }
        })?;
        if let Some(path) = stale
            && let Err(code) = answers.next()?
            && code != Code::NO_NODE
        {
            return Err(code.error(&path));
        }
        for path in parents {
            match answers.next()? {
                Ok(_) | Err(Code::NODE_EXISTS | Code::NO_NODE) => {}
                Err(code) => return self.cannot_enter(&path, code),
            }
        }
        let (path, stat) = match answers.next()? {
            Ok(Reply::Created(path, stat)) => (path, stat),
            Ok(_) => return Err(unexpected()),
            Err(Code::NO_NODE) if !parents_missing => {
                self.unsure = None;
                return Ok(None);
            }
            Err(code) => {
                let path = self.mutex_path.clone();
                return self.cannot_enter(&path, code);
            }
        };
        self.unsure = None;
        session.learn_clock(stat.ctime, answers.sent);
        self.node = Some(Node {
            session: Arc::clone(session),
            name: path.rsplit('/').next().unwrap_or_default().to_owned(),
            path,
            czxid: stat.czxid,
            ctime: stat.ctime,
            epoch: answers.epoch,
            granted: None,
            own: None,
            predecessor: None,
        });
        self.line(&mut answers)
    }

    /// The server's no: there is no node of ours.
    fn cannot_enter(&mut self, path: &str, code: Code) -> Result<Option<Line>> {
        self.unsure = None;
        Err(code.error(path))
    }

    /// Looks for the node whose creation was not answered. After a `sync`: the server that we talk to
    /// now may be behind the one that made it.
    fn search(&mut self, session: &Arc<Session>, by: Moment) -> Result<Option<Line>> {
        let Some(unsure) = &self.unsure else {
            return Ok(None);
        };
        let requests = vec![(Request::Sync, None), (self.list(), None)];
        let mut answers = session.call(requests, by)?;
        let _synced = answers.next()?;
        let line = self.line(&mut answers)?;
        let found = line.as_ref().and_then(|line| {
            line.members
                .iter()
                .find(|member| member.name.starts_with(&unsure.protection))
        });
        let Some(Member { name, .. }) = found else {
            self.unsure = None;
            return Ok(None);
        };
        let path = format!("{}/{name}", self.mutex_path);
        let own = Sentinel::new(&self.alarm);
        let lookout = (path.clone(), Arc::clone(&own));
        let request = Request::Data {
            path: path.clone(),
            watch: true,
        };
        let mut answers = session.call(vec![(request, Some(&lookout))], by)?;
        let stat = match answers.next()? {
            Ok(Reply::Data(_, stat)) => stat,
            Ok(_) => return Err(unexpected()),
            Err(Code::NO_NODE) => {
                self.unsure = None;
                return Ok(None);
            }
            Err(code) => return Err(code.error(&path)),
        };
        self.unsure = None;
        if stat.ephemeral_owner != session.id() {
            // It ends with another session, and tells nothing about ours.
            return Ok(None);
        }
        self.node = Some(Node {
            session: Arc::clone(session),
            name: name.clone(),
            path,
            czxid: stat.czxid,
            ctime: stat.ctime,
            epoch: answers.epoch,
            granted: None,
            own: Some(own),
            predecessor: None,
        });
        Ok(line)
    }

    /// Reads the line in which we stand. `None`: not even the mutex is there.
    fn look_again(&mut self, session: &Session, by: Moment) -> Result<Option<Line>> {
        let Some(node) = &self.node else {
            return Ok(None);
        };
        let mut requests = vec![(self.list(), None)];
        let moved = session.look(|state| state.epoch != node.epoch);
        if moved {
            // Another server, that may be behind: no leader by its word before it has caught up.
            requests.insert(0, (Request::Sync, None));
        }
        let mut answers = session.call(requests, by)?;
        if moved {
            let _synced = answers.next()?;
        }
        let line = self.line(&mut answers)?;
        if !moved && answers.epoch != node.epoch {
            // The connection changed just now: once more, with the `sync`.
            return Ok(None);
        }
        if line.is_none() {
            self.node = None;
        }
        Ok(line)
    }

    fn list(&self) -> Request {
        Request::Children {
            path: self.mutex_path.clone(),
            watch: false,
        }
    }

    fn line(&self, answers: &mut Answers) -> Result<Option<Line>> {
        match answers.next()? {
            Ok(Reply::Children(names)) => Ok(Some(Line {
                members: line_up(names),
                epoch: answers.epoch,
            })),
            Ok(_) => Err(unexpected()),
            Err(Code::NO_NODE) => Ok(None),
            Err(code) => Err(code.error(&self.mutex_path)),
        }
    }

    /// We lead. `acquired_at`: since when, where it was at once; otherwise since now.
    fn grant(&mut self, session: &Session, acquired_at: Option<i64>) -> Result<Attempt> {
        let until = self.belief(session)?;
        let Some(node) = &mut self.node else {
            return Err(unexpected());
        };
        node.predecessor = None;
        if node.own.is_none() && self.place.hold == Hold::Long {
            // Not waited for: it costs the owner nothing, and fires if the node is gone already.
            let own = Sentinel::new(&self.alarm);
            session.look_out(&node.path, &own);
            node.own = Some(own);
        }
        node.granted = Some(Granted { acquired_at });
        let owner = self.ours(session, until);
        if let Some(Node {
            granted: Some(granted),
            ..
        }) = &mut self.node
        {
            // Fixed from now on, so that every renewal names the same moment.
            granted.acquired_at = i64::try_from(owner.acquired_at()).ok();
        }
        Ok(Attempt::Granted(Grant {
            owner,
            until: Some(until),
        }))
    }

    /// Until when we may believe: the session certainly lives, and the transition is left.
    fn belief(&self, session: &Session) -> Result<Moment> {
        let now = Moment::now();
        let lease = self.place.lease;
        let (alive_until, timeout) =
            session.look(|state| (state.pulse.alive_until(), state.pulse.timeout()));
        // Where the server granted a shorter session than the lease counts on, the transition shrinks
        // with it; what two clocks can drift apart always stays.
        let drift = timeout / 100 + Duration::from_millis(5);
        let transition = lease.transition().min(timeout / 3).max(drift);
        alive_until
            .map(|alive| (alive - transition).min(now + lease.belief()))
            .filter(|until| *until > now)
            .ok_or_else(|| {
                Error::new(
                    ErrorKind::Timeout,
                    "no heartbeat has been acknowledged for so long that the session may be over",
                )
            })
    }

    fn ours(&self, session: &Session, until: Moment) -> MutexOwner {
        let (acquired_at, czxid) = self.node.as_ref().map_or((None, 0), |node| {
            let granted = node.granted.as_ref();
            (granted.and_then(|granted| granted.acquired_at), node.czxid)
        });
        // Renewals come at a third of what is left of the belief. By two thirds one has failed: then
        // the ttl is over, and an owner that is no longer sure can be told from one that is.
        let left = until.remaining();
        let ttl = left * 2 / 3;
        let total = left + self.place.lease.transition();
        owner(session, &self.place.id, acquired_at, czxid, (ttl, total))
    }

    /// Not first, and not willing to wait: leaves no trace, and asks who leads on the way out.
    fn leave(&mut self, session: &Session, line: &Line, by: Moment) -> Result<Attempt> {
        let Some(node) = self.node.take() else {
            return Err(unexpected());
        };
        let path = node.path;
        let requests = vec![
            (Request::Delete { path: path.clone() }, None),
            (self.first(line), None),
        ];
        let mut answers = session
            .call(requests, by)
            .inspect_err(|_| session.abandon(Orphan::Node(path.clone())))?;
        match answers.next()? {
            Ok(_) | Err(Code::NO_NODE) => {}
            Err(code) => return Err(code.error(&path)),
        }
        let owner = self.leader(session, answers.next()?)?;
        Ok(self.refused(owner))
    }

    /// Watches the node before ours and, the first time, our own. `None`: one of them is gone.
    fn stand_behind(
        &mut self,
        session: &Session,
        line: &Line,
        position: usize,
        by: Moment,
    ) -> Result<Option<Attempt>> {
        let first = self.first(line);
        let Some(node) = &mut self.node else {
            return Ok(None);
        };
        let Some(before) = line.members.get(position - 1) else {
            return Ok(None);
        };
        let sentinel = Sentinel::new(&self.alarm);
        let predecessor = (
            format!("{}/{}", self.mutex_path, before.name),
            Arc::clone(&sentinel),
        );
        let watch = |path: &str| Request::Data {
            path: path.to_owned(),
            watch: true,
        };
        let led = position == 1;
        let own = match node.own.take() {
            Some(own) if !own.has_fired() => (None, own),
            _ => {
                let own = Sentinel::new(&self.alarm);
                (Some((node.path.clone(), Arc::clone(&own))), own)
            }
        };
        let (new_own, own) = own;
        let mut requests = vec![(watch(&predecessor.0), Some(&predecessor))];
        if let Some(new_own) = &new_own {
            requests.push((watch(&new_own.0), Some(new_own)));
        }
        if !led {
            requests.push((first, None));
        }
        let mut answers = session.call(requests, by)?;
        let seen = answers.next()?;
        if new_own.is_some() {
            match answers.next()? {
                Ok(_) => {}
                Err(Code::NO_NODE) => {
                    self.node = None;
                    return Ok(None);
                }
                Err(code) => return Err(code.error(&node.path)),
            }
        }
        node.own = Some(own);
        match &seen {
            Ok(_) => node.predecessor = Some(Predecessor { sentinel, led }),
            Err(Code::NO_NODE) => return Ok(None),
            Err(code) => return Err(code.error(&predecessor.0)),
        }
        let leader = if led { seen } else { answers.next()? };
        let owner = self.leader(session, leader)?;
        Ok(Some(self.refused(owner)))
    }

    /// Asks for the node that leads.
    fn first(&self, line: &Line) -> Request {
        let name = line.members.first().map_or("", |first| &first.name);
        Request::Data {
            path: format!("{}/{name}", self.mutex_path),
            watch: false,
        }
    }

    fn leader(&self, session: &Session, answer: Result<Reply, Code>) -> Result<MutexOwner> {
        match answer {
            Ok(Reply::Data(id, stat)) => Ok(owner(
                session,
                &String::from_utf8_lossy(&id),
                Some(stat.ctime),
                stat.czxid,
                (self.place.lease.ttl(), self.place.lease.total()),
            )),
            Ok(_) => Err(unexpected()),
            // Gone by now, or not for us to read.
            Err(_) => Ok(MutexOwner::NONE),
        }
    }

    fn refused(&self, owner: MutexOwner) -> Attempt {
        Attempt::Refused(Refusal {
            owner,
            retry_in: self.place.lease.total(),
        })
    }

    /// Deletes a node and waits for it; where that fails, the session does it when it can.
    fn delete(&self, node: Node, by: Moment) -> Result<bool> {
        if node.session.state().is_over() {
            return Ok(false);
        }
        let path = node.path.clone();
        let session = Arc::clone(&node.session);
        // Its watches go first: nobody is to be rung for what we do ourselves.
        drop(node);
        let request = Request::Delete { path: path.clone() };
        let outcome = session
            .call(vec![(request, None)], by)
            .and_then(|mut answers| answers.next())
            .inspect_err(|_| session.abandon(Orphan::Node(path.clone())))?;
        match outcome {
            Ok(_) => Ok(true),
            Err(Code::NO_NODE) => Ok(false),
            Err(code) => Err(code.error(&path)),
        }
    }

    fn abandon_unsure(&mut self) {
        if let Some(unsure) = self.unsure.take() {
            unsure.session.abandon(Orphan::Protected {
                mutex_path: self.mutex_path.clone(),
                protection: unsure.protection,
            });
        }
    }

    /// Whoever is told "unknown" is rung when there is something new to say.
    fn or_ring_later<T>(&self, session: &Session, result: Result<T>) -> Result<T> {
        if result.is_err() && self.alarm.is_set() {
            session.ring_later(&self.alarm);
        }
        result
    }
}

impl Seat for Latch {
    fn listen(&mut self, waker: &Waker, _by: Moment) -> Result<()> {
        // The watches are set by `acquire`, each together with the look that it guards.
        self.alarm.set(Some(waker));
        Ok(())
    }

    fn acquire(&mut self, entry: Entry, by: Moment) -> Result<Attempt> {
        let session = self.core.session()?;
        let result = self.try_acquire(&session, entry, by);
        self.or_ring_later(&session, result)
    }

    fn renew(&mut self, fence: u64, _by: Moment) -> Result<Renewal> {
        self.core.origin.check()?;
        let lost = Ok(Renewal::Lost(MutexOwner::NONE));
        let Some(node) = self.node.as_mut().filter(|node| node.holds(fence)) else {
            return lost;
        };
        let session = Arc::clone(&node.session);
        if session.state().is_over() || node.own.as_ref().is_some_and(|own| own.is_gone()) {
            self.node = None;
            return lost;
        }
        if node.own.as_ref().is_none_or(|own| own.has_fired()) {
            // A short hold that turned out long, or somebody wrote to our node.
            let own = Sentinel::new(&self.alarm);
            session.look_out(&node.path, &own);
            node.own = Some(own);
        }
        let late =
            session.look(|state| !state.is_connected() || state.pulse.is_late(Moment::now()));
        let result = if late {
            Err(Error::new(
                ErrorKind::Unreachable,
                format!(
                    "{}: no server acknowledges the session's heartbeat",
                    self.core.config.realm
                ),
            ))
        } else {
            self.belief(&session)
        };
        let until = self.or_ring_later(&session, result)?;
        Ok(Renewal::Renewed(Grant {
            owner: self.ours(&session, until),
            until: Some(until),
        }))
    }

    fn release(&mut self, fence: u64, by: Moment) -> Result<bool> {
        self.core.origin.check()?;
        match self.node.take_if(|node| node.holds(fence)) {
            Some(node) => self.delete(node, by),
            None => Ok(false),
        }
    }

    fn withdraw(&mut self, by: Moment) -> Result<()> {
        self.core.origin.check()?;
        self.alarm.set(None);
        self.abandon_unsure();
        match self.node.take() {
            Some(node) => self.delete(node, by).map(drop),
            None => Ok(()),
        }
    }
}

impl Node {
    fn holds(&self, fence: u64) -> bool {
        self.granted.is_some() && u64::try_from(self.czxid) == Ok(fence)
    }
}

impl Drop for Latch {
    fn drop(&mut self) {
        if !self.core.origin.is_here() {
            return;
        }
        self.alarm.set(None);
        self.abandon_unsure();
        if let Some(node) = self.node.take() {
            node.session.abandon(Orphan::Node(node.path));
        }
    }
}
