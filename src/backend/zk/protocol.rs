//! `Protocol`: the state of one session and what it does next: bytes and the time come in, bytes and answers
//! go out. No socket, no clock, no thread, so that it is fuzzed and simulated on its own.
//!
//! Replies carry the number of their request and come in order. A call that timed out does not cost the
//! others their connection: its reply is dropped when it comes.
//!
//! **What is sent first.** At most [`WINDOW`] requests are out at a time, and the others wait in a queue here. A
//! request whose caller gave up meanwhile is not sent. Heartbeats pass the queue: a server that works on requests in
//! order answers a beat after a window's worth of work, however many callers ask at once.
//!
//! **What is read once.** The line of a mutex is asked for once at a time, for all callers that want it. A caller
//! that comes while a list is out may have made its node after the server read that list, so it gets the next one.
//!
//! **What is left behind.** All nodes of a session share a prefix, and the session knows which of them are held.
//! Where another one may exist, because a connection was lost or a deletion was refused, a sweep lists the mutex and
//! deletes what has the prefix and is not held. No sweep deletes a held node: replies come in order, so a node that
//! is in a list was made before, and its creation was answered before. After a reconnect, what was still under way
//! over the old connection is refused by the servers.

use std::collections::{HashMap, HashSet, VecDeque};
use std::mem;
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::builder::Config;
use super::heartbeat::{Beat, Heartbeat};
use super::message::{
    Code, Mode, Outcome, Pass, Request, XID_AUTH, XID_EVENT, XID_SET_WATCHES, decode_event,
    decode_head, encode_digest, encode_set_watches,
};
use super::path::protection;
use super::watches::{Kind, Watch, Watches};
use super::wire::{Decoder, Encoder, Frames, MAX_FRAME, malformed};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};

/// How many requests are out at a time, heartbeats not counted.
const WINDOW: usize = 64;

/// The longest answer to a handshake. A server of another kind announces nonsense, and may then wait.
const LONGEST_WELCOME: usize = 1 << 10;

/// The most paths in one `SetWatches`: a server takes a frame of 1 MiB by default.
const SET_WATCHES: usize = 512;

/// How a session stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SessionState {
    /// Not opened yet: no server has answered so far.
    Connecting,
    /// A server answers.
    Connected,
    /// The connection is lost. The session may be alive or not; only a server can tell.
    Suspended,
    /// The session is over, with all its nodes and watches: a server said so, refused it for too long, or the
    /// session's thread panicked. In the last two cases the server keeps the nodes until it times out. Final.
    Expired,
    /// Closed by its owner. Final.
    Closed,
}

/// A request, and the watch that comes with it.
#[derive(Debug)]
pub struct Ask {
    request: Request,
    watch: Option<Weak<Watch>>,
}

impl From<Request> for Ask {
    fn from(request: Request) -> Ask {
        Ask::new(request, None)
    }
}

impl Ask {
    /// Reads a node and watches it from the reply on. `exists` leaves a watch behind where there is no node; reading
    /// data does not.
    pub(super) fn new(request: Request, watch: Option<&Arc<Watch>>) -> Ask {
        let watch = watch.map(Arc::downgrade);
        Ask { request, watch }
    }

    /// The node that it is about.
    pub(super) fn path(&self) -> &str {
        self.request.path()
    }
}

/// A caller of one request.
pub(super) trait Caller {
    /// `false` once the caller has given up.
    fn waits(&self) -> bool;
    /// Takes the answer; an error if the connection was lost.
    fn answer(&self, answer: Result<Outcome>);
}

/// Where the answer to a request goes.
enum To<C> {
    /// One caller, or all that share a list.
    Callers(Vec<C>),
    Heartbeat,
    /// The list of a mutex under which a node of this session may be left.
    Sweep,
    /// No caller waits for it.
    Cleanup,
}

impl<C: Caller> To<C> {
    /// `false` once all callers have given up.
    fn is_wanted(&self) -> bool {
        !matches!(self, To::Callers(callers) if !callers.iter().any(C::waits))
    }
}

/// A request without an answer. `xid`: zero until it is sent.
struct Pending<C> {
    xid: i32,
    ask: Ask,
    to: To<C>,
}

/// How far the session, or its present connection, has come.
enum Stage {
    /// There is no connection.
    Away,
    /// A handshake was sent at `sent`. It and the first beat must be answered by `by`.
    Greeting {
        sent: Moment,
        by: Moment,
    },
    /// The handshake was answered.
    CatchingUp {
        by: Moment,
    },
    /// The first beat was answered: the server has caught up with the leader.
    Serving,
    Over(SessionState),
}

/// The state of one session.
pub(super) struct Protocol<C> {
    config: Arc<Config>,
    stage: Stage,
    /// By which the session is resumed. Its id is zero until the session is opened.
    pass: Pass,
    last_zxid: i64,
    /// Since when servers end the connection instead of answering the handshake.
    refused_since: Option<Moment>,
    heartbeat: Heartbeat,
    /// How many connections have served.
    pub(super) connections_served: u64,
    xid: i32,
    queue: VecDeque<Pending<C>>,
    sent: VecDeque<Pending<C>>,
    /// The mutexes whose line is asked for, with the callers that wait for the next one.
    lists: HashMap<String, Vec<C>>,
    watches: Watches,
    /// How the names of this session's nodes begin, and those of no other session.
    pub(super) protection: String,
    /// This session's nodes that a contender holds. `Some`: owned; deleted at that moment unless renewed.
    held: HashMap<String, Option<Moment>>,
    /// Mutexes under which a node of this session may exist that no contender holds.
    suspects: HashSet<String>,
    frames: Frames,
    out: Encoder,
}

impl<C: Caller> Protocol<C> {
    pub(super) fn new(config: Arc<Config>) -> Protocol<C> {
        Protocol {
            heartbeat: Heartbeat::new(config.session_timeout),
            config,
            stage: Stage::Away,
            pass: Pass::default(),
            last_zxid: 0,
            refused_since: None,
            connections_served: 0,
            xid: 0,
            queue: VecDeque::new(),
            sent: VecDeque::new(),
            lists: HashMap::new(),
            watches: Watches::default(),
            protection: protection(),
            held: HashMap::new(),
            suspects: HashSet::new(),
            frames: Frames::default(),
            out: Encoder::default(),
        }
    }

    pub(super) fn state(&self) -> SessionState {
        match self.stage {
            Stage::Over(how) => how,
            Stage::Serving => SessionState::Connected,
            _ if self.connections_served == 0 => SessionState::Connecting,
            _ => SessionState::Suspended,
        }
    }

    pub(super) fn is_serving(&self) -> bool {
        matches!(self.stage, Stage::Serving)
    }

    pub(super) fn is_over(&self) -> bool {
        matches!(self.stage, Stage::Over(_))
    }

    pub(super) fn timeout(&self) -> Duration {
        self.heartbeat.timeout()
    }

    /// See [`Heartbeat::alive_until`]; `None` once the session is over.
    pub(super) fn alive_until(&self) -> Option<Moment> {
        self.heartbeat.alive_until().filter(|_| !self.is_over())
    }

    /// How long a server has for the handshake: a quarter of T while something may rest on the session.
    pub(super) fn patience(&self, now: Moment) -> Duration {
        let patience = self.timeout() / 4;
        if self.alive_until().is_some_and(|until| until > now) {
            patience
        } else {
            patience.max(self.config.connect_timeout)
        }
    }

    /// Begins a connection, which has to serve by then.
    pub(super) fn begin(&mut self, now: Moment, by: Moment) {
        let timeout_ms = self.config.timeout_ms();
        self.pass.encode(self.last_zxid, timeout_ms, &mut self.out);
        self.stage = Stage::Greeting { sent: now, by };
    }

    /// Takes what the server sent. An error means that the connection has to go.
    pub(super) fn received(&mut self, bytes: &[u8], now: Moment) -> Result<()> {
        self.frames.push(bytes);
        loop {
            let limit = match self.stage {
                Stage::Greeting { .. } => LONGEST_WELCOME,
                Stage::CatchingUp { .. } | Stage::Serving => MAX_FRAME,
                Stage::Away | Stage::Over(_) => return Ok(()),
            };
            let Some(frame) = self.frames.next(limit)? else {
                break;
            };
            match self.stage {
                Stage::Greeting { sent, by } => self.welcomed(&frame, sent, by, now)?,
                _ => self.replied(&frame, now)?,
            }
        }
        self.pump();
        Ok(())
    }

    /// The server closed the connection. During the handshake that is also how a server refuses, without a word and
    /// for ever, a client that has seen more than the server knows: the servers were restored from an older copy.
    /// Once belief is over and they have refused for 4 T, the session is given up for a new one.
    ///
    /// Returns what callers are told.
    pub(super) fn closed_by_server(&mut self, now: Moment) -> Error {
        let what = "the server closed the connection";
        if !matches!(self.stage, Stage::Greeting { .. }) {
            return Error::new(ErrorKind::Unreachable, what);
        }
        let since = *self.refused_since.get_or_insert(now);
        let believed = self.alive_until().is_some_and(|until| until > now);
        if self.pass.id != 0 && !believed && since + self.timeout() * 4 <= now {
            log::error!(
                "{}: servers have refused the session for {:?}; it is given up for a new one. If they were restored \
                 from an older copy, fences may come again",
                self.config.realm,
                now - since,
            );
            self.end(SessionState::Expired);
        }
        // Servers of other kinds do that, and a ZooKeeper server without a quorum: it may pass.
        let hint = "without an answer; it does not serve now, or is not a ZooKeeper server";
        Error::new(ErrorKind::Unreachable, format!("{what} {hint}"))
    }

    /// Does what is due at `now`. An error means that the server has to be left.
    pub(super) fn tick(&mut self, now: Moment) -> Result<()> {
        if self.late_at() <= now {
            return Err(Error::new(
                ErrorKind::Timeout,
                "no answer in time; the server hangs, or is not a ZooKeeper server",
            ));
        }
        if self.heartbeat.due() <= now {
            self.beat(now);
            self.end_leases(now);
            self.sweep();
            for path in self.watches.prune() {
                self.enqueue(Request::Unwatch(path).into(), To::Cleanup);
            }
        }
        self.pump();
        Ok(())
    }

    /// When [`tick`](Protocol::tick) has something to do.
    pub(super) fn wake_at(&self) -> Moment {
        self.heartbeat.due().min(self.late_at())
    }

    /// When a server that has not answered must be left.
    fn late_at(&self) -> Moment {
        let silent_at = self.heartbeat.silent_at();
        match self.stage {
            Stage::Greeting { by, .. } | Stage::CatchingUp { by } => by.min(silent_at),
            _ => silent_at,
        }
    }

    /// Asks on behalf of `caller`. The server works on requests in the order in which they are asked.
    pub(super) fn ask(&mut self, ask: Ask, caller: C) {
        match ask.request {
            Request::Children(path) if ask.watch.is_none() => self.list(path, vec![caller]),
            _ => {
                if let Request::Delete(path) = &ask.request {
                    self.held.remove(path);
                }
                self.enqueue(ask, To::Callers(vec![caller]));
            }
        }
        self.pump();
    }

    /// Prolongs the lease of an owned node. Returns `false` if the node is not held, or its lease is over.
    pub(super) fn hold(&mut self, path: &str, until: Moment, now: Moment) -> bool {
        match self.held.get_mut(path) {
            Some(end) if end.is_none_or(|end| end > now) => {
                *end = (*end).max(Some(until));
                true
            }
            _ => false,
        }
    }

    /// Deletes a node that was held, as soon as a server is there.
    pub(super) fn discard(&mut self, path: &str) {
        if self.held.remove(path).is_some() {
            self.remove(path);
        }
    }

    /// Asks the server to end the session, past the queue. Returns `false` if there is no connection.
    pub(super) fn say_goodbye(&mut self) -> bool {
        if self.is_serving() {
            self.send(Request::Close.into(), To::Cleanup);
        }
        self.is_serving()
    }

    /// The connection is gone, or has to go. The outcome of what was sent over it is unknown.
    pub(super) fn disconnected(&mut self, why: &Error) {
        // Waiters try again, and learn that no server answers.
        self.watches.disconnected();
        if !self.is_over() {
            self.stage = Stage::Away;
        }
        self.frames = Frames::default();
        self.out = Encoder::default();
        self.heartbeat.disconnected();
        let late = mem::take(&mut self.lists).into_values().flatten();
        late.for_each(|caller| caller.answer(Err(why.clone())));
        let sent = mem::take(&mut self.sent);
        for pending in sent.into_iter().chain(mem::take(&mut self.queue)) {
            self.lose(pending, why);
        }
    }

    /// The session is over: `Expired` or `Closed`.
    pub(super) fn end(&mut self, how: SessionState) {
        if self.is_over() {
            return;
        }
        self.stage = Stage::Over(how);
        self.disconnected(&self.over_error());
        self.held.clear();
        self.suspects.clear();
        self.watches = Watches::default();
    }

    /// The bytes to be sent.
    pub(super) fn take_output(&mut self) -> Vec<u8> {
        self.out.take()
    }

    pub(super) fn over_error(&self) -> Error {
        let (kind, what) = match self.stage {
            Stage::Over(SessionState::Expired) => (ErrorKind::Lost, "has expired"),
            _ => (ErrorKind::Closed, "was closed"),
        };
        Error::new(kind, format!("{}: the session {what}", self.config.realm))
    }

    fn welcomed(&mut self, frame: &[u8], sent: Moment, by: Moment, now: Moment) -> Result<()> {
        let (timeout_ms, pass) = Pass::decode(frame)?;
        self.refused_since = None;
        let (asked, realm) = (self.config.session_timeout, &self.config.realm);
        let timeout = Duration::from_millis(u64::try_from(timeout_ms).unwrap_or(0));
        let opened = self.pass.id == 0;
        let none = timeout.is_zero() || pass.id == 0;
        if none && !opened {
            log::warn!("{realm}: the session has expired");
            self.end(SessionState::Expired);
            return Ok(());
        }
        // Another session would come without the nodes of this one, and look as if all were well.
        if none || (!opened && pass.id != self.pass.id) {
            return Err(Error::new(
                ErrorKind::Protocol,
                "the server did not give us the session we asked for",
            ));
        }
        if timeout < asked {
            let error = Error::new(
                ErrorKind::Misconfigured,
                format!(
                    "the server keeps a session for {timeout:?} at most, and {asked:?} is needed (ttl and \
                     transition together); raise maxSessionTimeout (20 ticks by default) on every server, \
                     or ask for less"
                ),
            );
            if opened {
                // Without a goodbye the server would keep the new session until it times out.
                Request::Close.encode(1, false, &mut self.out);
                return Err(error);
            }
            // No goodbye: the session's time is what its owners have to wind down in.
            log::error!("{realm}: the session is given up: {error}");
            self.end(SessionState::Expired);
            return Ok(());
        }
        self.pass = pass;
        self.stage = Stage::CatchingUp { by };
        self.heartbeat.connected(sent, timeout, opened, now);
        if let Some(digest) = &self.config.digest {
            encode_digest(&mut self.out, digest);
        }
        // Before anything is read: the server may be behind the previous one.
        self.beat(now);
        let watches: Vec<_> = self.watches.all().collect();
        for watches in watches.chunks(SET_WATCHES) {
            encode_set_watches(&mut self.out, self.last_zxid, watches);
        }
        Ok(())
    }

    fn beat(&mut self, now: Moment) {
        let request = match self.heartbeat.sent(now) {
            Beat::Sync => Request::Sync,
            Beat::Commit => Request::Multi {
                check: "/".to_owned(),
                write: None,
            },
        };
        self.send(request.into(), To::Heartbeat);
    }

    /// Takes a frame after the handshake.
    fn replied(&mut self, frame: &[u8], now: Moment) -> Result<()> {
        let mut body = Decoder::new(frame);
        let (xid, zxid, code) = decode_head(&mut body)?;
        if xid == XID_EVENT {
            let (path, deleted) = decode_event(body)?;
            self.watches.fire(&path, deleted);
            return Ok(());
        }
        if matches!(xid, XID_AUTH | XID_SET_WATCHES) {
            return match code {
                Code::OK => Ok(()),
                code => Err(code.error("after the handshake")),
            };
        }
        let Some(sent) = self.sent.front().filter(|sent| sent.xid == xid) else {
            return Err(malformed("a reply to something not asked"));
        };
        let outcome = match code {
            Code::OK => sent.ask.request.decode(body)?,
            // The next handshake tells which, and for certain.
            code @ (Code::SESSION_EXPIRED | Code::SESSION_MOVED) => {
                return Err(code.error("a request"));
            }
            code => Err(code),
        };
        self.last_zxid = self.last_zxid.max(zxid);
        // Only now: where decoding failed, its caller learns of the broken connection with the others.
        match self.sent.pop_front() {
            Some(pending) => self.complete(pending, outcome, now),
            None => Ok(()),
        }
    }

    fn complete(&mut self, pending: Pending<C>, outcome: Outcome, now: Moment) -> Result<()> {
        let Pending { ask, to, .. } = pending;
        self.watched(&ask, &outcome);
        match (&ask.request, &outcome) {
            (Request::Create { mode, .. }, Ok(reply)) if *mode == Mode::EphemeralSequential => {
                if to.is_wanted() {
                    self.held.insert(reply.path.clone(), None);
                } else {
                    self.remove(&reply.path);
                }
            }
            (Request::Delete(path), Err(code)) if *code != Code::NO_NODE => {
                let (realm, error) = (&self.config.realm, code.error(path));
                log::debug!("{realm}: cannot delete a node, trying again: {error}");
                self.suspect(path);
            }
            // The server has dropped the watches, too, that were set after this was asked.
            (Request::Unwatch(path), _) => self.watches.fire(path, false),
            _ => {}
        }
        match to {
            To::Callers(callers) => {
                callers.iter().for_each(|it| it.answer(Ok(outcome.clone())));
                self.list_again(&ask);
            }
            To::Heartbeat => match outcome {
                // Where the root may not be read, that was written down as refused.
                Ok(_) | Err(Code::NO_AUTH) => {
                    self.heartbeat.acknowledged(now);
                    if !self.is_serving() {
                        self.stage = Stage::Serving;
                        self.connections_served += 1;
                        self.sweep();
                    }
                }
                Err(code) => return Err(code.error("heartbeat")),
            },
            To::Sweep => self.swept(ask.path(), outcome),
            To::Cleanup => {}
        }
        Ok(())
    }

    /// Registers the watch that was asked for with the request, if the server keeps it.
    fn watched(&mut self, ask: &Ask, outcome: &Outcome) {
        let Some(watch) = &ask.watch else { return };
        let kind = match (&ask.request, outcome) {
            (Request::Data(_) | Request::Exists(_), Ok(_)) => Kind::Data,
            (Request::Exists(_), Err(Code::NO_NODE)) => Kind::Exists,
            (Request::Children(_), Ok(_)) => Kind::Children,
            _ => return,
        };
        self.watches.add(kind, ask.path(), watch);
    }

    fn list(&mut self, path: String, callers: Vec<C>) {
        if let Some(next) = self.lists.get_mut(&path) {
            next.extend(callers);
            return;
        }
        self.lists.insert(path.clone(), Vec::new());
        self.enqueue(Request::Children(path).into(), To::Callers(callers));
    }

    /// A request is done. If it was a list, asks for the next one, if callers wait for it.
    fn list_again(&mut self, ask: &Ask) {
        if let Request::Children(path) = &ask.request
            && let Some(next) = self.lists.remove(path)
            && !next.is_empty()
        {
            self.list(path.clone(), next);
        }
    }

    fn enqueue(&mut self, ask: Ask, to: To<C>) {
        self.queue.push_back(Pending { xid: 0, ask, to });
    }

    /// Sends what the window has room for.
    fn pump(&mut self) {
        while self.is_serving()
            && self.sent.len() < WINDOW + self.heartbeat.unanswered()
            && let Some(Pending { ask, to, .. }) = self.queue.pop_front()
        {
            // A deletion is wanted however long it takes.
            match to.is_wanted() || matches!(ask.request, Request::Delete(_)) {
                true => self.send(ask, to),
                false => self.list_again(&ask),
            }
        }
    }

    fn send(&mut self, ask: Ask, to: To<C>) {
        self.xid = self.xid.checked_add(1).unwrap_or(1);
        let xid = self.xid;
        ask.request.encode(xid, ask.watch.is_some(), &mut self.out);
        self.sent.push_back(Pending { xid, ask, to });
    }

    /// A request will not be answered any more.
    fn lose(&mut self, Pending { xid, ask, to }: Pending<C>, why: &Error) {
        match &ask.request {
            // Only what was sent can have made a node.
            Request::Create { path, .. } if xid != 0 => self.suspect(path),
            Request::Delete(path) => self.suspect(path),
            _ => {}
        }
        match to {
            To::Callers(callers) => callers.iter().for_each(|it| it.answer(Err(why.clone()))),
            To::Sweep => self.sweep_later(ask.path()),
            To::Heartbeat | To::Cleanup => {}
        }
    }

    /// Deletes a node that is not held, as soon as a server is there.
    fn remove(&mut self, path: &str) {
        self.enqueue(Request::Delete(path.to_owned()).into(), To::Cleanup);
        self.pump();
    }

    /// There may be a node of this session at `path` that is not held.
    fn suspect(&mut self, path: &str) {
        if let Some((mutex, name)) = path.rsplit_once('/')
            && name.starts_with(&self.protection)
        {
            self.sweep_later(mutex);
        }
    }

    /// Has the nodes of a mutex looked through at the next beat.
    fn sweep_later(&mut self, mutex: &str) {
        self.suspects.insert(mutex.to_owned());
    }

    fn end_leases(&mut self, now: Moment) {
        let is_over = |end: &Option<Moment>| end.is_some_and(|end| end <= now);
        let over = self.held.extract_if(|_, end| is_over(end));
        for (path, _) in over.collect::<Vec<_>>() {
            self.remove(&path);
        }
    }

    fn sweep(&mut self) {
        for mutex in mem::take(&mut self.suspects) {
            self.enqueue(Request::Children(mutex).into(), To::Sweep);
        }
    }

    fn swept(&mut self, mutex: &str, outcome: Outcome) {
        match outcome {
            Ok(reply) => {
                let ours = |name: &&String| name.starts_with(&self.protection);
                let paths = reply.line.members.iter().filter(ours);
                let mut left: Vec<_> = paths.map(|name| format!("{mutex}/{name}")).collect();
                left.retain(|path| !self.held.contains_key(path));
                left.iter().for_each(|path| self.remove(path));
            }
            Err(Code::NO_NODE) => {}
            Err(_) => self.sweep_later(mutex),
        }
    }
}

#[cfg(test)]
mod tests {
    //! The protocol on its own, driven from a seed against a model of a server: delays, lost connections,
    //! requests thrown out, a follower cut off from its leader, callers that give up at any moment.
    //!
    //! `CONTEND_PROTOCOL_WORLDS` says how many worlds are tried (60 by default); `CONTEND_SEED` repeats one.

    use std::cell::{Cell, RefCell};
    use std::collections::BTreeMap;
    use std::rc::Rc;

    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};

    use super::super::builder::Builder;
    use super::super::message::{Acl, Reply};
    use super::super::path::node_path;
    use super::super::wire::tests::number;
    use super::*;

    const T: u64 = 2_400;
    const MUTEXES: [&str; 2] = ["/simba/a", "/simba/b"];
    const SESSION: i64 = 77;

    fn at(ms: u64) -> Moment {
        Moment::from_origin(Duration::from_millis(ms))
    }

    /// A request of a caller.
    #[derive(Clone)]
    struct Ticket {
        waits: Rc<Cell<bool>>,
        answers: Rc<RefCell<Vec<Result<Outcome>>>>,
    }

    impl Caller for Ticket {
        fn waits(&self) -> bool {
            self.waits.get()
        }

        fn answer(&self, answer: Result<Outcome>) {
            self.answers.borrow_mut().push(answer);
        }
    }

    impl Ticket {
        fn of(waits: &Rc<Cell<bool>>) -> Ticket {
            let (waits, answers) = (Rc::clone(waits), Rc::default());
            Ticket { waits, answers }
        }

        fn reply(&self) -> Option<Reply> {
            let answers = self.answers.borrow();
            answers.first()?.clone().ok()?.ok()
        }
    }

    /// Of a caller that waits.
    fn ticket() -> Ticket {
        Ticket::of(&Rc::new(Cell::new(true)))
    }

    fn protocol() -> Protocol<Ticket> {
        let builder = Builder::new("server").session_timeout(Duration::from_millis(T));
        Protocol::new(Arc::new(builder.config().unwrap()))
    }

    /// A follower and its leader. The follower answers; the leader expires.
    struct Server {
        /// The nodes of the session, and when each was made.
        nodes: BTreeMap<String, i64>,
        sequence: HashMap<String, u32>,
        deleted: Vec<String>,
        zxid: i64,
        /// When the leader last counted the session's timeout anew.
        touched: u64,
        /// When the follower last heard from the client.
        heard: Option<u64>,
        next_report: u64,
        expired: bool,
        /// The follower is cut off from the leader.
        cut: bool,
        frames: Frames,
        greeted: bool,
        /// What waits for the leader to be back.
        backlog: Vec<Vec<u8>>,
        /// Replies on their way, in order, and when each arrives.
        replies: VecDeque<(u64, Vec<u8>)>,
    }

    impl Server {
        fn new() -> Server {
            Server {
                nodes: BTreeMap::new(),
                sequence: HashMap::new(),
                deleted: Vec::new(),
                zxid: 1,
                touched: 0,
                heard: None,
                next_report: 0,
                expired: false,
                cut: false,
                frames: Frames::default(),
                greeted: false,
                backlog: Vec::new(),
                replies: VecDeque::new(),
            }
        }

        fn tick(&mut self, now: u64) {
            if self.next_report <= now {
                // A tick of half the smallest timeout: reports come every quarter of it.
                self.next_report = now + T / 4;
                if self.heard.take_if(|_| !self.cut).is_some() {
                    self.touched = now;
                }
            }
            if !self.expired && self.greeted_once() && self.touched + T < now {
                self.expired = true;
                self.nodes.clear();
            }
        }

        fn greeted_once(&self) -> bool {
            self.zxid > 1
        }

        fn lose_connection(&mut self) {
            self.frames = Frames::default();
            self.greeted = false;
            self.backlog.clear();
            self.replies.clear();
        }

        fn receive(&mut self, bytes: &[u8], now: u64, dice: &mut StdRng) {
            self.frames.push(bytes);
            while let Some(frame) = self.frames.next(MAX_FRAME).unwrap() {
                self.heard = Some(now);
                if self.cut {
                    self.backlog.push(frame);
                } else {
                    self.request(&frame, now, dice);
                }
            }
        }

        fn request(&mut self, frame: &[u8], now: u64, dice: &mut StdRng) {
            let due = now + dice.random_range(0..40);
            let mut body = Decoder::new(frame);
            if !self.greeted {
                self.greeted = true;
                self.replies
                    .push_back((due, welcome(if self.expired { 0 } else { T })));
                self.zxid += 1;
                if !self.expired {
                    self.touched = now;
                }
                return;
            }
            let (xid, op) = (body.int().unwrap(), body.int().unwrap());
            let mut reply = Encoder::default();
            let code = if dice.random_ratio(1, 200) {
                -127
            } else if op == 2 && dice.random_ratio(1, 20) {
                -102
            } else {
                self.perform(op, &mut body, &mut reply)
            };
            let body = match (code, op) {
                (0, 14) => committed(),
                (0, _) => reply.take(),
                _ => Vec::new(),
            };
            let bytes = self::reply(xid, self.zxid, code, &body);
            self.replies.push_back((due, bytes));
        }

        fn perform(&mut self, op: i32, body: &mut Decoder<'_>, out: &mut Encoder) -> i32 {
            let path = match op {
                2 | 3 | 4 | 8 | 15 => body.text().unwrap(),
                _ => String::new(),
            };
            let stat = |out: &mut Encoder, czxid: i64| {
                out.long(czxid);
                (0..3).for_each(|_| _ = out.long(1));
                (0..3).for_each(|_| _ = out.int(0));
                out.long(SESSION);
                (0..2).for_each(|_| _ = out.int(0));
                out.long(1);
            };
            match op {
                15 => {
                    let (parent, _) = path.rsplit_once('/').unwrap();
                    let sequence = self.sequence.entry(parent.to_owned()).or_default();
                    let full = format!("{path}{sequence:010}");
                    *sequence += 1;
                    self.zxid += 1;
                    self.nodes.insert(full.clone(), self.zxid);
                    out.text(&full);
                    stat(out, self.zxid);
                    0
                }
                2 => {
                    self.zxid += 1;
                    if self.nodes.remove(&path).is_some() {
                        self.deleted.push(path);
                        0
                    } else {
                        -101
                    }
                }
                3 | 4 => match self.nodes.get(&path) {
                    None => -101,
                    Some(czxid) => {
                        if op == 4 {
                            out.buffer(b"id");
                        }
                        stat(out, *czxid);
                        0
                    }
                },
                8 => {
                    let below = format!("{path}/");
                    let names: Vec<&str> = self
                        .nodes
                        .keys()
                        .filter_map(|node| node.strip_prefix(&below))
                        .collect();
                    out.int(names.len() as i32);
                    names.iter().for_each(|name| _ = out.text(name));
                    0
                }
                _ => 0,
            }
        }

        /// What has arrived at the client by now.
        fn arrived(&mut self, now: u64) -> Vec<u8> {
            let mut bytes = Vec::new();
            while let Some((due, _)) = self.replies.front()
                && *due <= now
            {
                bytes.extend(self.replies.pop_front().unwrap().1);
            }
            bytes
        }
    }

    /// A call that makes a node and reads the line.
    struct Creation {
        waits: Rc<Cell<bool>>,
        creation: Ticket,
        line: Ticket,
        lease_end: Option<u64>,
    }

    impl Creation {
        fn path(&self) -> Option<String> {
            let created = self.creation.reply()?;
            Some(created.path)
        }

        fn holds(&self, path: &str, now: u64) -> bool {
            self.waits.get()
                && self.path().as_deref() == Some(path)
                && self.lease_end.is_none_or(|end| end > now)
        }

        /// The list was read after the node was made.
        fn judge(&self, seed: u64) {
            if let (Some(path), Some(list)) = (self.path(), self.line.reply()) {
                let made = |name: &String| path.ends_with(name.as_str());
                let seen = list.line.members.iter().any(made);
                assert!(seen, "seed {seed}: a list from before the creation");
            }
        }
    }

    struct World {
        seed: u64,
        dice: StdRng,
        protocol: Protocol<Ticket>,
        server: Server,
        connected: bool,
        creations: Vec<Creation>,
        proofs: u64,
    }

    impl World {
        fn new(seed: u64) -> World {
            World {
                seed,
                dice: StdRng::seed_from_u64(seed),
                protocol: protocol(),
                server: Server::new(),
                connected: false,
                creations: Vec::new(),
                proofs: 0,
            }
        }

        fn step(&mut self, now: u64, calm: bool) {
            self.server.tick(now);
            if self.protocol.is_over() {
                return;
            }
            if !self.connected {
                if calm || self.dice.random_ratio(1, 30) {
                    self.protocol.begin(at(now), at(now + T / 4));
                    self.connected = true;
                } else {
                    return;
                }
            }
            let arrived = self.server.arrived(now);
            let mut outcome = if arrived.is_empty() {
                Ok(())
            } else {
                // However it is cut.
                let cut = self.dice.random_range(0..=arrived.len());
                self.protocol
                    .received(&arrived[..cut], at(now))
                    .and_then(|()| self.protocol.received(&arrived[cut..], at(now)))
            };
            if outcome.is_ok() {
                outcome = self.protocol.tick(at(now));
            }
            if !calm && self.dice.random_ratio(1, 2_000) {
                outcome = Err(lost());
            }
            if !calm && self.protocol.is_serving() {
                self.callers(now);
            }
            let bytes = self.protocol.take_output();
            // What was handed to the socket in a step that fails may get through or not.
            if outcome.is_ok() || (self.dice.random_bool(0.5) && self.server.greeted) {
                self.server.receive(&bytes, now, &mut self.dice);
            }
            if outcome.is_err() {
                self.protocol.disconnected(&lost());
                self.server.lose_connection();
                self.connected = false;
            }
            self.check(now);
        }

        fn callers(&mut self, now: u64) {
            let chosen = self.dice.random_range(0..self.creations.len().max(1));
            match self.dice.random_range(0..60) {
                0 => self.create(),
                1 | 2 if chosen < self.creations.len() => self.give_up(chosen),
                3 if chosen < self.creations.len() => {
                    let lease_end = now + self.dice.random_range(1..T);
                    let creation = &mut self.creations[chosen];
                    if let Some(path) = creation.path()
                        && creation.waits.get()
                        && self.protocol.hold(&path, at(lease_end), at(now))
                    {
                        creation.lease_end = creation.lease_end.max(Some(lease_end));
                    }
                }
                _ => {}
            }
        }

        fn create(&mut self) {
            let mutex = MUTEXES[self.dice.random_range(0..2)];
            let path = node_path(mutex, &self.protocol.protection);
            let mode = Mode::EphemeralSequential;
            let create = Request::create(&path, b"", mode, Acl::Open.permissions());
            let waits = Rc::new(Cell::new(true));
            let (creation, line) = (Ticket::of(&waits), Ticket::of(&waits));
            self.protocol.ask(create.into(), creation.clone());
            let list = Request::Children(mutex.to_owned());
            self.protocol.ask(list.into(), line.clone());
            self.creations.push(Creation {
                waits,
                creation,
                line,
                lease_end: None,
            });
        }

        /// In one of the ways in which a contender lets go of its node.
        fn give_up(&mut self, chosen: usize) {
            let creation = &self.creations[chosen];
            if !creation.waits.replace(false) {
                return;
            }
            creation.judge(self.seed);
            if let Some(path) = creation.path() {
                if self.protocol.is_serving() && self.dice.random_bool(0.5) {
                    self.protocol.ask(Request::Delete(path).into(), ticket());
                } else {
                    self.protocol.discard(&path);
                }
            }
        }

        fn check(&mut self, now: u64) {
            let seed = self.seed;
            for path in self.server.deleted.drain(..) {
                let held = self.creations.iter().any(|it| it.holds(&path, now));
                assert!(
                    !held,
                    "seed {seed}: at {now} ms {path} is held and was deleted"
                );
            }
            // Never longer than the leader keeps it.
            if let Some(until) = self.protocol.alive_until() {
                let kept = at(self.server.touched + T);
                assert!(
                    until <= kept,
                    "seed {seed}: at {now} ms alive until {until:?}, the leader keeps it until {kept:?}"
                );
                self.proofs += 1;
            }
        }

        /// The leader is back. What was held on the way arrives: its pings, which the follower answers with a
        /// report, and what the follower had to pass on. A client that was not let in yet must ask again.
        fn heal(&mut self, now: u64) {
            self.server.cut = false;
            if self.connected && !self.protocol.is_serving() {
                self.protocol.disconnected(&lost());
                self.server.lose_connection();
                self.connected = false;
            }
            if !self.server.expired && self.server.heard.take().is_some() {
                self.server.touched = now;
            }
            for frame in std::mem::take(&mut self.server.backlog) {
                self.server.request(&frame, now, &mut self.dice);
            }
        }

        /// All heals: each caller is answered. All leave: no node is left.
        fn end(mut self, mut now: u64) -> u64 {
            self.heal(now);
            let seed = self.seed;
            let mut calm = |world: &mut World| {
                let until = now + 4 * T;
                while now < until {
                    now += 1;
                    world.step(now, true);
                }
            };
            calm(&mut self);
            for (number, creation) in self.creations.iter().enumerate() {
                for ticket in [&creation.creation, &creation.line] {
                    let (times, waits) = (ticket.answers.borrow().len(), creation.waits.get());
                    let once = times == 1 || times == 0 && !waits;
                    assert!(
                        once,
                        "seed {seed}: call {number} was answered {times} times"
                    );
                }
            }
            (0..self.creations.len()).for_each(|chosen| self.give_up(chosen));
            calm(&mut self);
            let left = &self.server.nodes;
            assert!(left.is_empty(), "seed {seed}: left behind: {left:?}");
            self.proofs
        }
    }

    #[test]
    fn in_any_world_belief_holds_and_only_unheld_nodes_are_deleted() {
        let worlds = number("CONTEND_PROTOCOL_WORLDS", 60);
        let first = number("CONTEND_SEED", rand::rng().random_range(0..u64::MAX / 2));
        println!("CONTEND_SEED={first} CONTEND_PROTOCOL_WORLDS={worlds}");
        let mut proofs = 0;
        for seed in first..first + worlds {
            let mut world = World::new(seed);
            let cut_at = world.dice.random_range(2_000..12_000);
            let healed_at = cut_at + world.dice.random_range(100..2 * T);
            for now in 1..14_000 {
                if now == cut_at {
                    world.server.cut = true;
                }
                if now == healed_at {
                    world.heal(now);
                }
                world.step(now, false);
            }
            proofs += world.end(14_000);
        }
        assert!(proofs > worlds * 1_000, "hardly ever alive: {proofs}");
    }

    fn lost() -> Error {
        Error::new(ErrorKind::Unreachable, "lost")
    }

    /// Drives a protocol through its handshake and its first beat.
    fn served(protocol: &mut Protocol<Ticket>, now: u64) {
        protocol.begin(at(now), at(now + T / 4));
        protocol.take_output();
        protocol.received(&welcome(T), at(now + 1)).unwrap();
        let beat = requests(&protocol.take_output())[0];
        let body = if beat.1 == 14 {
            committed()
        } else {
            Vec::new()
        };
        protocol
            .received(&reply(beat.0, 9, 0, &body), at(now + 2))
            .unwrap();
        assert!(protocol.is_serving());
    }

    fn requests(bytes: &[u8]) -> Vec<(i32, i32)> {
        let mut frames = Frames::default();
        frames.push(bytes);
        let mut list = Vec::new();
        while let Some(frame) = frames.next(MAX_FRAME).unwrap() {
            let mut body = Decoder::new(&frame);
            list.push((body.int().unwrap(), body.int().unwrap()));
        }
        list
    }

    fn names(list: &[&str]) -> Vec<u8> {
        let mut out = Encoder::default();
        out.int(list.len() as i32);
        list.iter().for_each(|name| _ = out.text(name));
        out.take()
    }

    /// The answer to a handshake.
    fn welcome(timeout: u64) -> Vec<u8> {
        let expired = timeout == 0;
        let mut out = Encoder::default();
        out.frame(|out| {
            out.int(0);
            out.int(timeout as i32);
            out.long(if expired { 0 } else { SESSION });
            out.buffer(&[1; 16]);
        });
        out.take()
    }

    fn reply(xid: i32, zxid: i64, code: i32, body: &[u8]) -> Vec<u8> {
        let mut out = Encoder::default();
        out.int(16 + body.len() as i32);
        out.int(xid);
        out.long(zxid);
        out.int(code);
        let mut bytes = out.take();
        bytes.extend(body);
        bytes
    }

    /// The answer to a commit: that of its one operation, and the end.
    fn committed() -> Vec<u8> {
        let mut out = Encoder::default();
        for (op, done, code) in [(13, false, 0), (-1, true, -1)] {
            out.int(op);
            out.bool(done);
            out.int(code);
        }
        out.take()
    }

    fn ok(xid: i32, code: i32) -> Vec<u8> {
        reply(xid, 9, code, &[])
    }

    /// Beats are sent every T/24, answered or not, past the queue.
    #[test]
    fn heartbeats_pass_the_queue() {
        let mut protocol = protocol();
        served(&mut protocol, 0);
        for _ in 0..1_000 {
            protocol.ask(Request::Exists("/x".into()).into(), ticket());
        }
        let sent = requests(&protocol.take_output());
        assert_eq!(sent.len(), 64, "the window");
        for beat in 1..6 {
            protocol.tick(at(1 + beat * T / 24)).unwrap();
            let op = if beat == 3 { 14 } else { 9 };
            assert_eq!(requests(&protocol.take_output()), [(65 + beat as i32, op)]);
        }
        // A server silent for T/4 is left.
        let silent = 1 + T / 24 + T / 4;
        assert!(protocol.tick(at(silent - 1)).is_ok());
        assert!(protocol.tick(at(silent)).is_err());
    }

    /// A slow server would be asked ever more, for callers that are gone.
    #[test]
    fn request_of_caller_that_gave_up_is_not_sent() {
        let mut protocol = protocol();
        served(&mut protocol, 0);
        let waits = Rc::new(Cell::new(true));
        for number in 0..1_000 {
            let request = match number % 3 {
                0 => Request::Data("/x".into()),
                1 => Request::Children(format!("/m{number}")),
                _ => Request::Delete(format!("/m/n{number}")),
            };
            protocol.ask(request.into(), Ticket::of(&waits));
        }
        let sent = requests(&protocol.take_output());
        assert_eq!(sent.len(), 64, "the window");
        waits.set(false);
        protocol.ask(Request::Data("/x".into()).into(), ticket());
        let deletions = 1_000 / 3 - 64 / 3;
        let (mut seen, mut pending) = (Vec::new(), VecDeque::from(sent));
        while let Some((xid, op)) = pending.pop_front() {
            // Refused, whatever it asked.
            protocol.received(&reply(xid, 9, -101, &[]), at(3)).unwrap();
            let next = requests(&protocol.take_output());
            seen.extend(next.iter().map(|(_, op)| *op));
            pending.extend(next);
            assert_ne!(op, 9);
        }
        assert_eq!(seen.iter().filter(|op| **op == 2).count(), deletions);
        assert_eq!(seen.len(), deletions + 1, "{seen:?}");
    }

    /// The first beat of a connection is what lets reads over it be trusted.
    #[test]
    fn connection_whose_beat_fails_is_left() {
        let mut protocol = protocol();
        protocol.begin(at(0), at(T / 4));
        protocol.received(&welcome(T), at(1)).unwrap();
        assert!(!protocol.is_serving());
        assert!(protocol.received(&ok(1, -127), at(2)).is_err());
    }

    /// One list at a time, and the next one for all callers that came meanwhile.
    #[test]
    fn many_callers_share_two_lists() {
        let mut protocol = protocol();
        served(&mut protocol, 0);
        protocol.take_output();
        let tickets: Vec<_> = (0..1_000).map(|_| ticket()).collect();
        for ticket in &tickets {
            protocol.ask(Request::Children("/simba/m".into()).into(), ticket.clone());
        }
        let answered = || tickets.iter().filter(|it| it.reply().is_some()).count();
        assert_eq!(requests(&protocol.take_output()), [(2, 8)]);
        let names = |xid: i32| reply(xid, 9, 0, &names(&["_c_x-latch-0000000001"]));
        protocol.received(&names(2), at(3)).unwrap();
        assert_eq!(answered(), 1);
        assert_eq!(requests(&protocol.take_output()), [(3, 8)]);
        protocol.received(&names(3), at(4)).unwrap();
        assert_eq!(answered(), 1_000);
        assert!(protocol.take_output().is_empty());
    }

    /// As servers do that were restored from an older copy.
    #[test]
    fn session_refused_for_long_is_given_up() {
        let mut protocol = protocol();
        served(&mut protocol, 0);
        for now in (T..20 * T).step_by(T as usize / 4) {
            protocol.disconnected(&lost());
            protocol.begin(at(now), at(now + T / 4));
            protocol.closed_by_server(at(now));
            // For 4 T, first at T.
            let over = now >= 5 * T;
            assert_eq!(protocol.state() == SessionState::Expired, over, "{now}");
            if over {
                return;
            }
        }
    }

    /// It would come without the nodes of this one.
    #[test]
    fn session_of_another_id_is_refused() {
        let mut protocol = protocol();
        served(&mut protocol, 0);
        protocol.disconnected(&lost());
        protocol.begin(at(100), at(100 + T / 4));
        let mut welcome = welcome(T);
        // The last byte of the id, before a password of 16 bytes and its length.
        let place = welcome.len() - 21;
        welcome[place] += 1;
        let error = protocol.received(&welcome, at(101)).unwrap_err();
        assert!(error.to_string().contains("the session we asked for"));
        assert!(protocol.pass.id == SESSION && !protocol.is_serving());
    }

    /// The server drops all watches on the node, also those that were set meanwhile.
    #[test]
    fn forgotten_watches_are_told_and_new_ones_start_over() {
        let mut protocol = protocol();
        served(&mut protocol, 0);
        let wake = Arc::new(crate::parker::Parker::new().unparker());
        let watches: Vec<_> = (0..200).map(|_| Watch::new(&wake)).collect();
        for (number, watch) in watches.iter().enumerate() {
            let watch = Arc::downgrade(watch);
            protocol
                .watches
                .add(Kind::Exists, &format!("/{number}"), &watch);
        }
        drop(watches);
        protocol.tick(at(T / 24 + 1)).unwrap();
        let sent = requests(&protocol.take_output());
        assert!(sent.iter().skip(1).all(|(_, op)| *op == 18), "{sent:?}");
        let again = Watch::new(&wake);
        for number in 0..200 {
            let path = format!("/{number}");
            protocol
                .watches
                .add(Kind::Exists, &path, &Arc::downgrade(&again));
        }
        protocol
            .received(&ok(sent[0].0, 0), at(T / 24 + 2))
            .unwrap();
        assert!(again.is_set());
        protocol
            .received(&ok(sent[1].0, 0), at(T / 24 + 2))
            .unwrap();
        assert!(!again.is_set());
    }

    /// Another server may have a lower `maxSessionTimeout`.
    #[test]
    fn session_that_is_kept_shorter_is_given_up() {
        let mut protocol = protocol();
        served(&mut protocol, 0);
        protocol.disconnected(&lost());
        protocol.begin(at(100), at(100 + T / 4));
        protocol.received(&welcome(T / 2), at(101)).unwrap();
        assert_eq!(protocol.state(), SessionState::Expired);
        assert_eq!(protocol.alive_until(), None);
    }

    #[test]
    fn noise_at_any_stage_is_an_error_at_most() {
        let inputs = number("CONTEND_DECODER_INPUTS", 200_000) / 10;
        let seed = number("CONTEND_SEED", rand::rng().random());
        println!("CONTEND_SEED={seed}");
        let mut dice = StdRng::seed_from_u64(seed);
        let mut protocol = protocol();
        let mut now = 0;
        for _ in 0..inputs {
            now += 1;
            if protocol.is_over() {
                protocol = self::protocol();
            }
            if !protocol.is_serving() {
                protocol.disconnected(&lost());
                if dice.random_bool(0.9) {
                    if protocol.pass.id == 0 || protocol.pass.id == SESSION {
                        served(&mut protocol, now);
                    }
                } else {
                    protocol.begin(at(now), at(now + T));
                }
            }
            if protocol.is_serving() {
                protocol.ask(Request::Children("/m".into()).into(), ticket());
                protocol.ask(Request::Delete("/m/n".into()).into(), ticket());
            }
            let mut bytes = protocol.take_output();
            bytes.truncate(dice.random_range(0..64));
            bytes.extend((0..dice.random_range(0..24)).map(|_| dice.random::<u8>()));
            // Often with a true length and head, so that it gets further than that.
            if dice.random_bool(0.7) {
                let code = [0, 0, 0, -101, -112, -127][dice.random_range(0..6)];
                bytes = reply(dice.random_range(-9..40), dice.random(), code, &bytes);
            }
            if protocol.received(&bytes, at(now)).is_err() || protocol.tick(at(now)).is_err() {
                protocol.disconnected(&lost());
            }
        }
    }

    /// Servers of other kinds that speak first, or answer what they do not understand.
    #[test]
    fn server_of_another_kind_is_known_by_its_first_bytes() {
        let servers: [&[u8]; 5] = [
            b"-ERR unknown command\r\n",
            b"HTTP/1.1 400 Bad Request\r\n",
            // MariaDB and MySQL: a length of three bytes, the low one first, and a number.
            b"\x5a\0\0\0\x0a5.5.5-10.11.6-MariaDB\0",
            b"\xa0\0\0\0\x0a9.7.0\0",
            // A TLS alert: the port is a secure one.
            b"\x15\x03\x03\0\x02\x02\x46",
        ];
        for bytes in servers {
            let mut protocol = protocol();
            protocol.begin(at(0), at(T / 4));
            protocol.take_output();
            let error = protocol.received(&bytes[..4], at(1)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Protocol);
            let text = error.to_string();
            assert!(text.contains("is this a ZooKeeper server?"), "{text}");
        }
    }
}
