//! Our spot in the line of contenders: how it is taken, found again, looked at and given up.

use std::sync::Arc;

use super::Core;
use super::ask::{Answers, Ask, unexpected};
use super::message::{Code, Mode, Reply, Request, Stat};
use super::orphan::Orphan;
use super::path::{Member, ancestry, line_up, node_path, protection};
use super::session::Session;
use super::watches::{Alarm, Sentinel};
use crate::clock::Moment;
use crate::error::Result;

pub(super) struct Spot {
    core: Arc<Core>,
    /// The contender, whose id the node holds.
    id: Arc<str>,
    /// The node of the mutex.
    pub(super) mutex_path: String,
    pub(super) alarm: Arc<Alarm>,
    pub(super) node: Option<Node>,
    /// A creation whose answer is not there: the node may or may not exist.
    unsure: Option<Unsure>,
    /// A node with which we have owned and no longer do: it goes before another one is made.
    stale: Option<String>,
    /// The last creation found no parent to be under.
    parents_missing: bool,
}

/// Our node.
pub(super) struct Node {
    /// The session it lives and dies with.
    pub(super) session: Arc<Session>,
    pub(super) name: String,
    pub(super) path: String,
    pub(super) czxid: i64,
    pub(super) ctime: i64,
    /// The connection over which we last saw the line.
    pub(super) epoch: u64,
    /// Owned with this node: not again after stepping down, the fence would be the same.
    pub(super) granted: Option<Granted>,
    pub(super) own: Option<Arc<Sentinel>>,
    pub(super) predecessor: Option<Predecessor>,
}

pub(super) struct Granted {
    pub(super) acquired_at: Option<i64>,
    /// The latest end of belief that we gave out.
    pub(super) until: Moment,
}

pub(super) struct Predecessor {
    pub(super) sentinel: Arc<Sentinel>,
    /// It led when we looked: when it is gone, we lead.
    pub(super) led: bool,
}

struct Unsure {
    session: Arc<Session>,
    protection: String,
}

/// The contenders, as seen over one connection.
pub(super) struct Line {
    pub(super) members: Vec<Member>,
    pub(super) epoch: u64,
}

impl Spot {
    pub(super) fn new(core: Arc<Core>, id: Arc<str>, mutex_path: String) -> Spot {
        Spot {
            core,
            id,
            mutex_path,
            alarm: Arc::default(),
            node: None,
            unsure: None,
            stale: None,
            parents_missing: false,
        }
    }

    /// Drops what no longer counts: nodes of an ended session, a deleted one, and one with which we
    /// have owned before.
    pub(super) fn forget_the_past(&mut self, session: &Arc<Session>) {
        let present = |other: &Arc<Session>| Arc::ptr_eq(other, session);
        self.unsure.take_if(|unsure| !present(&unsure.session));
        self.parents_missing = false;
        if let Some(node) = self.node.take()
            && present(&node.session)
            && !node.own.as_ref().is_some_and(|own| own.is_gone())
        {
            match node.granted {
                Some(_) => self.stale = Some(node.path),
                None => self.node = Some(node),
            }
        }
    }

    /// One step towards a node of ours and a line to find it in: `None` asks for another one.
    pub(super) fn step(&mut self, session: &Arc<Session>, by: Moment) -> Result<Option<Line>> {
        if self.node.is_some() {
            self.look_again(session, by)
        } else if self.unsure.is_some() {
            self.search(session, by)
        } else {
            self.enter(session, by)
        }
    }

    /// Makes our node and reads the line, in one round trip. `None`: the parents are missing, because
    /// nobody was here before or because the server has tidied up.
    fn enter(&mut self, session: &Arc<Session>, by: Moment) -> Result<Option<Line>> {
        let stale = self.stale.take();
        let parents: Vec<String> = if self.parents_missing {
            ancestry(&self.mutex_path).map(str::to_owned).collect()
        } else {
            Vec::new()
        };
        let protection = protection();
        let mut asks = Vec::new();
        if let Some(path) = &stale {
            asks.push(Request::Delete { path: path.clone() }.into());
        }
        asks.extend(parents.iter().map(|path| self.parent(path).into()));
        asks.push(
            Request::Create {
                path: node_path(&self.mutex_path, &protection),
                data: self.id.as_bytes().to_vec(),
                mode: Mode::EphemeralSequential,
                acl: self.core.config.acl,
            }
            .into(),
        );
        asks.push(self.list().into());
        // From here on the node may exist, whatever happens.
        self.unsure = Some(Unsure {
            session: Arc::clone(session),
            protection,
        });
        let mut answers = session.call(asks, by).inspect_err(|_| {
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
        // A no to a parent matters only if our node finds none to be under: who may not create in the
        // root is told so even where the node below it exists.
        let mut refused = None;
        for path in parents {
            if let Err(code) = answers.next()?
                && code != Code::NODE_EXISTS
                && code != Code::NO_NODE
            {
                refused.get_or_insert(code.error(&path));
            }
        }
        let created = answers.next()?;
        self.unsure = None;
        match created {
            Ok(Reply::Created(path, stat)) => {
                session.learn_clock(stat.ctime, answers.sent);
                let name = path.rsplit('/').next().unwrap_or_default().to_owned();
                self.node = Some(Node::new(session, name, path, stat, answers.epoch));
                self.line(&mut answers)
            }
            Ok(_) => Err(unexpected()),
            Err(Code::NO_NODE) => {
                self.parents_missing = true;
                refused.map_or(Ok(None), Err)
            }
            Err(code) => Err(code.error(&self.mutex_path)),
        }
    }

    /// Curator's containers; the nodes above them, of the chroot, belong to somebody else.
    fn parent(&self, path: &str) -> Request {
        let ours = path.len() >= self.core.config.chroot.len() + "/simba".len();
        Request::Create {
            path: path.to_owned(),
            data: Vec::new(),
            mode: if ours {
                Mode::Container
            } else {
                Mode::Persistent
            },
            acl: self.core.config.acl,
        }
    }

    /// Looks for the node whose creation was not answered. After a `sync`: the server that we talk to
    /// now may be behind the one that made it.
    fn search(&mut self, session: &Arc<Session>, by: Moment) -> Result<Option<Line>> {
        let Some(unsure) = &self.unsure else {
            return Ok(None);
        };
        let asks = vec![Request::Sync.into(), self.list().into()];
        let mut answers = session.call(asks, by)?;
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
        let mut answers = session.call(vec![Ask::watch(&path, &own)], by)?;
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
        let mut node = Node::new(session, name.clone(), path, stat, answers.epoch);
        node.own = Some(own);
        self.node = Some(node);
        Ok(line)
    }

    /// Reads the line in which we stand. `None`: not even the mutex is there.
    fn look_again(&mut self, session: &Session, by: Moment) -> Result<Option<Line>> {
        let Some(node) = &self.node else {
            return Ok(None);
        };
        let mut asks = vec![self.list().into()];
        let moved = session.look(|state| state.epoch != node.epoch);
        if moved {
            // Another server, that may be behind: no leader by its word before it has caught up.
            asks.insert(0, Request::Sync.into());
        }
        let mut answers = session.call(asks, by)?;
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

    /// Deletes a node and waits for it; where that fails, the session does it when it can.
    pub(super) fn delete(node: Node, by: Moment) -> Result<bool> {
        if node.session.state().is_over() {
            return Ok(false);
        }
        let path = node.path.clone();
        let session = Arc::clone(&node.session);
        // Its watches go first: nobody is to be rung for what we do ourselves.
        drop(node);
        session.end_lease(&path);
        let request = Request::Delete { path: path.clone() };
        let outcome = session
            .call(vec![request.into()], by)
            .and_then(|mut answers| answers.next())
            .inspect_err(|_| session.abandon(Orphan::Node(path.clone())))?;
        match outcome {
            Ok(_) => Ok(true),
            Err(Code::NO_NODE) => Ok(false),
            Err(code) => Err(code.error(&path)),
        }
    }

    /// Leaves everything to the session: it deletes what there is, as soon as it can.
    pub(super) fn abandon(&mut self) {
        self.abandon_unsure();
        if let Some(node) = self.node.take() {
            node.session.abandon(Orphan::Node(node.path));
        }
    }

    pub(super) fn abandon_unsure(&mut self) {
        if let Some(unsure) = self.unsure.take() {
            unsure.session.abandon(Orphan::Protected {
                mutex_path: self.mutex_path.clone(),
                protection: unsure.protection,
            });
        }
    }
}

impl Node {
    fn new(session: &Arc<Session>, name: String, path: String, stat: Stat, epoch: u64) -> Node {
        Node {
            session: Arc::clone(session),
            name,
            path,
            czxid: stat.czxid,
            ctime: stat.ctime,
            epoch,
            granted: None,
            own: None,
            predecessor: None,
        }
    }

    pub(super) fn holds(&self, fence: u64) -> bool {
        self.granted.is_some() && u64::try_from(self.czxid) == Ok(fence)
    }
}
