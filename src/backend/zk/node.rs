//! A contender's node in the line: how it is made, found again, placed behind another and given up.

use std::sync::Arc;
use std::time::Duration;

use super::message::{Code, Mode, Permissions, Reply, Request, Stat};
use super::path::{Line, Member, ROOT, ancestry, node_path, protection};
use super::protocol::{Answer, Ask};
use super::session::{Call, Known, Leader, Session, Sessions, unexpected};
use super::watches::Watch;
use crate::backend::Purpose;
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::parker::Unparker;

/// Where a contender stands.
pub(super) enum Standing {
    /// It has no node.
    Out,
    /// Its node was asked for. The answer is due, and is waited for however often it takes.
    Entering(Creation),
    /// Its node was asked for, and the connection was lost before the answer came.
    Unsure {
        session: Arc<Session>,
        protection: String,
        path: String,
    },
    In(Box<Node>),
}

/// A node that was asked for.
pub(super) struct Creation {
    session: Arc<Session>,
    call: Arc<Call>,
    protection: String,
    /// What was asked for: the node's path without its number.
    path: String,
    /// A node that was to be deleted with it.
    stale: Option<String>,
    /// The nodes above that were to be made with it.
    parents: Vec<String>,
}

impl Creation {
    /// The index of the creation among the requests.
    fn index(&self) -> usize {
        usize::from(self.stale.is_some()) + self.parents.len()
    }
}

/// A contender's way into the line.
pub(super) struct Entry {
    sessions: Arc<Sessions>,
    /// The contender's id, which the node holds.
    id: Arc<str>,
    /// The node of the mutex.
    mutex_path: Arc<str>,
    standing: Standing,
    /// A node with which we have owned and no longer do: it goes before another one is made.
    stale: Option<String>,
    /// The last creation found no parent to be under.
    parents_missing: bool,
}

impl Entry {
    pub(super) fn new(sessions: Arc<Sessions>, id: Arc<str>, mutex_path: Arc<str>) -> Entry {
        Entry {
            sessions,
            id,
            mutex_path,
            standing: Standing::Out,
            stale: None,
            parents_missing: false,
        }
    }

    pub(super) fn standing(&self) -> &Standing {
        &self.standing
    }

    pub(super) fn node(&self) -> Option<&Node> {
        match &self.standing {
            Standing::In(node) => Some(node),
            _ => None,
        }
    }

    pub(super) fn node_mut(&mut self) -> Option<&mut Node> {
        match &mut self.standing {
            Standing::In(node) => Some(node),
            _ => None,
        }
    }

    /// Takes the node out, if there is one and it is `wanted`.
    pub(super) fn take_node(&mut self, wanted: impl FnOnce(&Node) -> bool) -> Option<Box<Node>> {
        if !self.node().is_some_and(wanted) {
            return None;
        }
        match std::mem::replace(&mut self.standing, Standing::Out) {
            Standing::In(node) => Some(node),
            _ => None,
        }
    }

    /// The node is gone.
    pub(super) fn forget_node(&mut self) {
        self.take_node(|_| true);
    }

    /// Drops what no longer counts: what belongs to an ended session, a deleted node, and one with which
    /// we have owned before.
    pub(super) fn forget_the_past(&mut self, session: &Arc<Session>) {
        self.parents_missing = false;
        let present = |other: &Arc<Session>| Arc::ptr_eq(other, session);
        let keep = match &self.standing {
            Standing::Out => true,
            Standing::Entering(creation) => present(&creation.session),
            Standing::Unsure { session, .. } => present(session),
            Standing::In(node) => {
                let ours = present(&node.session) && !node.is_deleted();
                if ours && node.term.is_some() {
                    self.stale = Some(node.path.clone());
                }
                ours && node.term.is_none()
            }
        };
        if !keep {
            self.standing = Standing::Out;
        }
        if self
            .stale
            .as_ref()
            .is_some_and(|_| session.look(|protocol| protocol.phase().is_over()))
        {
            self.stale = None;
        }
    }

    /// Asks for our node, and for the line, in one round trip.
    pub(super) fn enter(&mut self, session: &Arc<Session>, by: Moment) -> Result<()> {
        let stale = self.stale.clone();
        let parents: Vec<String> = if self.parents_missing {
            ancestry(&self.mutex_path).map(str::to_owned).collect()
        } else {
            Vec::new()
        };
        let protection = protection();
        let path = node_path(&self.mutex_path, &protection);
        let mut asks: Vec<Ask> = stale.iter().map(|path| Ask::delete(path)).collect();
        asks.extend(parents.iter().map(|path| Ask::from(self.parent(path))));
        asks.push(Ask::create(Request::Create {
            path: path.clone(),
            data: self.id.as_bytes().to_vec(),
            mode: Mode::EphemeralSequential,
            permissions: Permissions::Of(self.sessions.config.acl),
        }));
        asks.push(Ask::line(&self.mutex_path));
        let call = session.ask(asks, by)?;
        // From here on the session sees to it that the stale node goes.
        self.stale = None;
        self.standing = Standing::Entering(Creation {
            session: Arc::clone(session),
            call,
            protection,
            path,
            stale,
            parents,
        });
        Ok(())
    }

    /// Waits for the answer to [`enter`](Entry::enter). `None`: there is no node yet, because the nodes
    /// above it were missing or the answer was lost.
    pub(super) fn resolve(&mut self, by: Moment) -> Result<Option<Arc<Line>>> {
        let Standing::Entering(creation) = &self.standing else {
            return Ok(None);
        };
        let finished = creation.session.finish(&creation.call, by);
        if finished.is_err() && creation.call.is_due() {
            // Asked, and not answered yet: it is not asked again.
            return finished.map(|_| None);
        }
        let Standing::Entering(creation) = std::mem::replace(&mut self.standing, Standing::Out)
        else {
            return Ok(None);
        };
        let mut answers = match finished {
            Ok(answers) => answers,
            Err(error) => {
                self.standing = match creation.call.answer_to(creation.index()) {
                    Some(Answer::Replied(Ok(Reply::Created(path, stat)))) => Standing::In(
                        Node::new(&creation.session, path, stat, creation.call.epoch)?,
                    ),
                    Some(Answer::Lost { handed: true }) => Standing::Unsure {
                        session: creation.session,
                        protection: creation.protection,
                        path: creation.path,
                    },
                    _ => Standing::Out,
                };
                return Err(error);
            }
        };
        // The session asks again until it is gone. Said only once the new node is known to be ours: it was
        // made all the same, behind the stale one.
        let mut kept = None;
        if let Some(path) = &creation.stale
            && let Err(code) = answers.next()?
            && code != Code::NO_NODE
            && code != Code::THROTTLED
        {
            kept = Some(code.error(path));
        }
        // A no to a parent matters only if our node finds none to be under: a user that may not create in
        // the root is told so even where the node below it exists.
        let mut refused = None;
        for path in &creation.parents {
            if let Err(code) = answers.next()?
                && code != Code::NODE_EXISTS
                && code != Code::NO_NODE
            {
                refused.get_or_insert(code.error(path));
            }
        }
        match answers.next()? {
            Ok(Reply::Created(path, stat)) => {
                creation.session.learn_clock(stat.ctime, creation.call.sent);
                let node = Node::new(&creation.session, path, stat, creation.call.epoch)?;
                self.standing = Standing::In(node);
                if let Some(kept) = kept {
                    return Err(kept);
                }
                match answers.next()? {
                    Ok(Reply::Line(line)) => Ok(Some(line)),
                    Ok(_) => Err(unexpected()),
                    Err(Code::NO_NODE) => Ok(None),
                    Err(code) => Err(code.error(&self.mutex_path)),
                }
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
        let root = self.sessions.config.chroot.len() + ROOT.len();
        Request::Create {
            path: path.to_owned(),
            data: Vec::new(),
            mode: if path.len() >= root {
                Mode::Container
            } else {
                Mode::Persistent
            },
            permissions: if path.len() > root {
                Permissions::Of(self.sessions.config.acl)
            } else {
                Permissions::above(self.sessions.config.acl)
            },
        }
    }

    /// Looks for the node whose creation was not answered. The server that we talk to now has caught up
    /// with the one that may have made it: the first request of every connection is a beat.
    pub(super) fn search(&mut self, wake: &Arc<Unparker>, by: Moment) -> Result<Option<Arc<Line>>> {
        let Standing::Unsure {
            session,
            protection,
            ..
        } = &self.standing
        else {
            return Ok(None);
        };
        let session = Arc::clone(session);
        // Asked before the list: what is read over a later connection is not older.
        let epoch = session.look(|protocol| protocol.epoch());
        let line = session.line(&self.mutex_path, by)?.unwrap_or_default();
        let Some(member) = line.find(protection) else {
            self.standing = Standing::Out;
            return Ok(None);
        };
        let path = format!("{}/{}", self.mutex_path, member.name);
        let own = Watch::new(wake);
        match session.one(Ask::watch(&path, &own), by)? {
            // One of another session ends with that, and says nothing about ours.
            Ok(Reply::Data(_, stat)) if stat.ephemeral_owner == session.id() => {
                let mut node = Node::new(&session, path, stat, epoch)?;
                node.own = Some(own);
                self.standing = Standing::In(node);
                Ok(Some(line))
            }
            Ok(Reply::Data(..)) | Err(Code::NO_NODE) => {
                self.standing = Standing::Out;
                Ok(None)
            }
            Ok(_) => Err(unexpected()),
            Err(code) => Err(code.error(&path)),
        }
    }

    /// Leaves everything to the session: it deletes what there is, as soon as it can.
    pub(super) fn abandon(&mut self) {
        self.abandon_creation();
        if let Some(node) = self.take_node(|_| true) {
            node.abandon();
        }
    }

    /// As [`abandon`](Entry::abandon), for a node that may exist or come to exist.
    pub(super) fn abandon_creation(&mut self) {
        match &self.standing {
            Standing::Entering(creation) => {
                creation
                    .session
                    .cancel_creation(&creation.call, creation.index(), &creation.path);
            }
            Standing::Unsure { session, path, .. } => {
                session.act(|protocol| protocol.abandon_creation(path));
            }
            Standing::Out | Standing::In(_) => return,
        }
        self.standing = Standing::Out;
    }
}

/// A contender's node.
pub(super) struct Node {
    /// The session it lives and dies with.
    session: Arc<Session>,
    member: Member,
    path: String,
    stat: Stat,
    /// The connection over which we last saw the line.
    epoch: u64,
    /// The watch on the node itself: an operator may delete it.
    own: Option<Arc<Watch>>,
    place: Place,
    /// Owned with this node: not again after stepping down, the fence would be the same.
    term: Option<Term>,
}

/// An ownership.
#[derive(Clone, Copy)]
pub(super) struct Term {
    pub(super) acquired_at: Option<i64>,
    /// The latest end of belief that we gave out.
    pub(super) until: Moment,
}

/// What is known of the node before ours.
enum Place {
    /// The line has to be read.
    Unknown,
    /// The node before ours was asked for. The answer is due.
    Asking(Asking),
    Behind(Predecessor),
}

struct Asking {
    call: Arc<Call>,
    before: Predecessor,
    /// The watch on our own node that was asked for with it.
    own: Option<Arc<Watch>>,
    watches_before: bool,
    /// The leader whose data was asked for.
    leader: Option<Member>,
}

struct Predecessor {
    name: String,
    path: String,
    watch: Arc<Watch>,
    /// It led when we looked: when it is gone, we lead.
    led: bool,
    /// The pending `exists` for it; `true` if that call asks for the leader as well.
    poll: Option<(Arc<Call>, bool)>,
}

/// What a look from behind came to.
pub(super) enum Look {
    /// Another node leads.
    Waits(Option<Leader>),
    /// The line has to be read again.
    ReadLine,
    /// Our own node is gone.
    Deleted,
}

impl Node {
    fn new(session: &Arc<Session>, path: String, stat: Stat, epoch: u64) -> Result<Box<Node>> {
        let name = path.rsplit('/').next().unwrap_or_default().to_owned();
        let member = Member::read(name).ok_or_else(unexpected)?;
        Ok(Box::new(Node {
            session: Arc::clone(session),
            member,
            path,
            stat,
            epoch,
            own: None,
            place: Place::Unknown,
            term: None,
        }))
    }

    pub(super) fn session(&self) -> &Arc<Session> {
        &self.session
    }

    pub(super) fn path(&self) -> &str {
        &self.path
    }

    pub(super) fn stat(&self) -> Stat {
        self.stat
    }

    pub(super) fn term(&self) -> Option<Term> {
        self.term
    }

    pub(super) fn set_term(&mut self, term: Term) {
        self.term = Some(term);
    }

    pub(super) fn holds(&self, fence: u64) -> bool {
        self.term.is_some() && u64::try_from(self.stat.czxid) == Ok(fence)
    }

    /// As the leader of its mutex.
    pub(super) fn leader(&self, id: &Arc<str>) -> Leader {
        Leader {
            name: self.member.name.clone(),
            id: Arc::clone(id),
            stat: self.stat,
            seen: Moment::now(),
        }
    }

    pub(super) fn is_deleted(&self) -> bool {
        self.own.as_ref().is_some_and(|own| own.is_gone())
    }

    pub(super) fn is_session_over(&self) -> bool {
        self.session.look(|protocol| protocol.phase().is_over())
    }

    pub(super) fn position(&self, line: &Line) -> Option<usize> {
        line.position(&self.member)
    }

    /// Whether we led from the first look at the line.
    pub(super) fn came_first(&self) -> bool {
        matches!(self.place, Place::Unknown)
    }

    /// We lead: nobody is before us any more.
    pub(super) fn leads(&mut self) {
        self.place = Place::Unknown;
    }

    /// Whether we lead by what we were told: the leader that we stood behind is gone, and our own
    /// node is not. Only over the same connection: after another one, the line is read anew.
    pub(super) fn takes_over(&self) -> bool {
        let Place::Behind(before) = &self.place else {
            return false;
        };
        before.led
            && before.watch.is_gone()
            && self.own.as_ref().is_some_and(|own| own.is_confirmed())
            && self
                .session
                .look(|protocol| protocol.is_connected() && protocol.epoch() == self.epoch)
    }

    /// Whether the line must be read before anything else is done.
    pub(super) fn must_read_line(&self) -> bool {
        match &self.place {
            Place::Unknown => true,
            Place::Asking(_) => false,
            Place::Behind(before) => {
                !before.watch.is_confirmed()
                    || !self.own.as_ref().is_some_and(|own| own.is_confirmed())
                    || (before.poll.is_none()
                        && self.session.look(|protocol| protocol.epoch()) != self.epoch)
            }
        }
    }

    /// Watches the node before ours and our own, unless that is done, and reads who leads, unless that
    /// is known. Asks; [`look`](Node::look) waits for the answer.
    pub(super) fn stand_behind(
        &mut self,
        line: &Line,
        position: usize,
        epoch: u64,
        mutex_path: &Arc<str>,
        wake: &Arc<Unparker>,
        by: Moment,
    ) -> Result<()> {
        let (Some(before), Some(first)) = (
            position.checked_sub(1).and_then(|at| line.get(at)),
            line.first(),
        ) else {
            return Ok(());
        };
        self.epoch = epoch;
        let led = position == 1;
        let mut asks = Vec::new();
        let kept = match std::mem::replace(&mut self.place, Place::Unknown) {
            Place::Behind(known) if known.name == before.name && known.watch.is_confirmed() => {
                Some(known.watch)
            }
            _ => None,
        };
        let path = format!("{mutex_path}/{}", before.name);
        let watches_before = kept.is_none();
        let watch = kept.unwrap_or_else(|| Watch::new(wake));
        if watches_before {
            asks.push(Ask::watch(&path, &watch));
        }
        let confirmed = self.own.as_ref().is_some_and(|own| own.is_confirmed());
        let own = (!confirmed).then(|| Watch::new(wake));
        if let Some(own) = &own {
            asks.push(Ask::watch(&self.path, own));
        }
        let known = self.session.known_leader(mutex_path);
        let known = known.is_some_and(|leader| leader.name == first.name);
        let leader = (!(known || led && watches_before)).then(|| first.clone());
        if let Some(leader) = &leader {
            asks.push(Request::Data(format!("{mutex_path}/{}", leader.name)).into());
        }
        let before = Predecessor {
            name: before.name.clone(),
            path,
            watch,
            led,
            poll: None,
        };
        if asks.is_empty() {
            self.place = Place::Behind(before);
            return Ok(());
        }
        let call = self.session.ask(asks, by)?;
        self.place = Place::Asking(Asking {
            call,
            before,
            own,
            watches_before,
            leader,
        });
        Ok(())
    }

    /// Waits for what was asked, or asks whether the node before ours is still there.
    pub(super) fn look(
        &mut self,
        mutex_path: &Arc<str>,
        purpose: Purpose,
        refresh: Duration,
        by: Moment,
    ) -> Result<Look> {
        match std::mem::replace(&mut self.place, Place::Unknown) {
            Place::Unknown => Ok(Look::ReadLine),
            Place::Asking(asking) => self.asked(asking, mutex_path, by),
            Place::Behind(before) => self.poll(before, mutex_path, purpose, refresh, by),
        }
    }

    fn asked(&mut self, asking: Asking, mutex_path: &Arc<str>, by: Moment) -> Result<Look> {
        let mut answers = match self.session.finish(&asking.call, by) {
            Ok(answers) => answers,
            Err(error) => {
                if asking.call.is_due() {
                    self.place = Place::Asking(asking);
                }
                return Err(error);
            }
        };
        let mut leader = None;
        if asking.watches_before {
            match answers.next()? {
                Ok(Reply::Data(id, stat)) if asking.before.led => {
                    leader = Some(Leader::new(&asking.before.name, &id, stat));
                }
                Ok(_) => {}
                Err(Code::NO_NODE) => return Ok(Look::ReadLine),
                Err(code) => return Err(code.error(&asking.before.path)),
            }
        }
        if let Some(own) = asking.own {
            match answers.next()? {
                Ok(_) => self.own = Some(own),
                Err(Code::NO_NODE) => return Ok(Look::Deleted),
                Err(code) => return Err(code.error(&self.path)),
            }
        }
        if let Some(member) = asking.leader {
            match answers.next()? {
                Ok(Reply::Data(id, stat)) => leader = Some(Leader::new(&member.name, &id, stat)),
                Ok(_) => return Err(unexpected()),
                // Gone by now, or not for us to read.
                Err(_) => {}
            }
        }
        if let Some(leader) = leader {
            self.session.learn(mutex_path, Known::Led(leader));
        }
        self.place = Place::Behind(asking.before);
        Ok(Look::Waits(self.session.known_leader(mutex_path)))
    }

    /// One small question, instead of the whole line: with a confirmed watch nothing is missed. Services
    /// show who leads, so one of the session's looks after the leader from time to time.
    fn poll(
        &mut self,
        mut before: Predecessor,
        mutex_path: &Arc<str>,
        purpose: Purpose,
        refresh: Duration,
        by: Moment,
    ) -> Result<Look> {
        let exists = |path: String| Ask::from(Request::Exists(path));
        let (call, asks_leader) = match before.poll.take() {
            Some(poll) => poll,
            None => {
                let mut asks = vec![exists(before.path.clone())];
                let now = Moment::now();
                if let Some(mut leader) = self.session.known_leader(mutex_path)
                    && purpose == Purpose::Lead
                    && leader.name != before.name
                    && leader.seen + refresh <= now
                {
                    asks.push(exists(format!("{mutex_path}/{}", leader.name)));
                    // The others of the session need not ask.
                    leader.seen = now;
                    self.session.learn(mutex_path, Known::Led(leader));
                }
                let asks_leader = asks.len() > 1;
                match self.session.ask(asks, by) {
                    Ok(call) => (call, asks_leader),
                    Err(error) => {
                        self.place = Place::Behind(before);
                        return Err(error);
                    }
                }
            }
        };
        let mut answers = match self.session.finish(&call, by) {
            Ok(answers) => answers,
            Err(error) => {
                if call.is_due() {
                    before.poll = Some((call, asks_leader));
                }
                self.place = Place::Behind(before);
                return Err(error);
            }
        };
        match answers.next()? {
            Ok(_) => {}
            Err(Code::NO_NODE) => {
                // The event came before the answer.
                self.place = Place::Behind(before);
                return Ok(Look::ReadLine);
            }
            Err(code) => {
                let error = code.error(&before.path);
                self.place = Place::Behind(before);
                return Err(error);
            }
        }
        let leader_gone = asks_leader && answers.next()? == Err(Code::NO_NODE);
        self.place = Place::Behind(before);
        if leader_gone {
            return Ok(Look::ReadLine);
        }
        Ok(Look::Waits(self.session.known_leader(mutex_path)))
    }

    /// Watches our own node, unless that is done or on its way, without waiting.
    ///
    /// # Errors
    /// If the server refused to keep the watch: until it does, a deletion would not be noticed.
    pub(super) fn watch_own(&mut self, wake: &Arc<Unparker>) -> Result<()> {
        let own = self.own.as_ref();
        if own.is_some_and(|own| own.is_confirmed() || own.is_due()) {
            return Ok(());
        }
        let refused = own.is_some_and(|own| own.is_refused());
        let own = Watch::new(wake);
        self.session
            .act(|protocol| protocol.watch(&self.path, &own));
        self.own = Some(own);
        if refused {
            return Err(Error::new(
                ErrorKind::Unavailable,
                format!(
                    "{}: the server did not let us watch our own node",
                    self.path
                ),
            ));
        }
        Ok(())
    }

    /// Deletes the node and waits for it; where that fails, the session does it when it can.
    pub(super) fn delete(self, by: Moment) -> Result<bool> {
        if self.is_session_over() {
            return Ok(false);
        }
        let (session, path) = (Arc::clone(&self.session), self.path.clone());
        // Its watches go first: nobody is to be woken for what we do ourselves.
        drop(self);
        session.act(|protocol| protocol.end_lease(&path));
        let call = match session.ask(vec![Ask::delete(&path)], by) {
            Ok(call) => call,
            Err(error) => {
                session.act(|protocol| protocol.abandon(path));
                return Err(error);
            }
        };
        match session.finish(&call, by)?.next()? {
            Ok(_) => Ok(true),
            Err(Code::NO_NODE) => Ok(false),
            Err(code) => Err(code.error(&path)),
        }
    }

    pub(super) fn abandon(self) {
        let (session, path) = (Arc::clone(&self.session), self.path.clone());
        drop(self);
        session.act(|protocol| protocol.abandon(path));
    }
}
