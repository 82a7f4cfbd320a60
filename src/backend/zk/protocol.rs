//! `Protocol`: the state of one session and what it does next: bytes and the time come in, bytes and answers
//! come out. No socket, no clock, no thread, so that it is fuzzed and simulated on its own.
//!
//! Replies carry the number of their request and come in order. A call that timed out does not cost the
//! others their connection: its reply is dropped when it comes.
//!
//! **What is sent first.** At most [`WINDOW`] requests are out at a time, and the others wait in a
//! queue here. Heartbeats do not: a server that works on requests in order answers a beat after a
//! window's worth of work, however many callers ask at once.
//!
//! **What is read once.** The children of a mutex are asked for once at a time, for all callers that want
//! them. A caller that comes while a list is out may have made its node after the server read that
//! list, so it gets the next one.
//!
//! **What is left behind.** A node whose deletion was not confirmed, or whose creation was handed to the
//! socket and not answered while nobody wants it any more, is cleaned up by the next connections, a
//! few requests at a time; what a server refuses is asked for again at the next beat. A creation that
//! never reached the socket made no node.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::builder::Config;
use super::heartbeat::{Beat, Heartbeat};
use super::message::{
    Code, Event, Head, Outcome, Reply, Request, Welcome, XID_AUTH, XID_EVENT, XID_PING,
    XID_SET_WATCHES, encode_auth, encode_hello, encode_set_watches,
};
use super::path::Line;
use super::watches::{Kind, Watch, Watches};
use super::wire::{Decoder, Encoder, Frame, Frames, Malformed};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};

/// How many requests are out at a time, heartbeats not counted.
const WINDOW: usize = 64;

/// How many requests that clean up are out at a time.
const CLEAN_UP: usize = 16;

/// The longest answer to a handshake. A server of another kind announces nonsense, and may then wait.
const LONGEST_WELCOME: usize = 1 << 10;

/// The most bytes of paths in one `SetWatches`: a server takes a frame of 1 MiB by default.
const WATCHES_BYTES: usize = 128 << 10;

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
    /// A server said so: the session is over, with all its nodes and watches. Also after a panic in the
    /// session's thread, where the server keeps the nodes until the session times out. Final.
    Expired,
    /// Closed by its owner. Final.
    Closed,
}

impl SessionState {
    pub(super) fn is_over(self) -> bool {
        matches!(self, SessionState::Expired | SessionState::Closed)
    }
}

/// A request, and what comes with it.
#[derive(Debug)]
pub(super) struct Ask {
    request: Request,
    /// Watches the node from the reply on: registered when the reply is read, because the event may be in
    /// the next frame.
    watch: Option<Weak<Watch>>,
    /// Makes or deletes a contender's node. If the answer is lost, the session sees to it that no node is
    /// left that nobody wants.
    must_settle: bool,
    /// Answered with a [`Line`] that all who ask for it share.
    shared: bool,
}

impl From<Request> for Ask {
    fn from(request: Request) -> Ask {
        Ask {
            request,
            watch: None,
            must_settle: false,
            shared: false,
        }
    }
}

impl Ask {
    /// Reads, and watches the node from the reply on.
    pub(super) fn watching(request: Request, watch: &Arc<Watch>) -> Ask {
        Ask {
            watch: Some(Arc::downgrade(watch)),
            ..Ask::from(request)
        }
    }

    /// Reads a node and watches it. Not `exists`, which leaves a watch behind where there is no node.
    pub(super) fn watch(path: &str, watch: &Arc<Watch>) -> Ask {
        Ask::watching(Request::Data(path.to_owned()), watch)
    }

    /// Reads the contenders for a mutex, together with everybody else who asks for them.
    pub(super) fn line(mutex_path: &str) -> Ask {
        Ask {
            shared: true,
            ..Ask::from(Request::Children(mutex_path.to_owned()))
        }
    }

    /// Makes a contender's node, to whose name the server appends a number.
    pub(super) fn create(request: Request) -> Ask {
        Ask {
            must_settle: true,
            ..Ask::from(request)
        }
    }

    /// Deletes a node of ours for good: where the answer is lost or a refusal, it is tried again until it is
    /// gone.
    pub(super) fn delete(path: &str) -> Ask {
        Ask {
            must_settle: true,
            ..Ask::from(Request::Delete(path.to_owned()))
        }
    }

    fn creates(&self) -> bool {
        self.must_settle && matches!(self.request, Request::Create { .. })
    }

    fn deletes(&self) -> bool {
        self.must_settle && matches!(self.request, Request::Delete(_))
    }
}

/// What became of a request.
#[derive(Clone, Debug)]
pub(super) enum Answer {
    /// The server answered.
    Replied(Outcome),
    /// The connection was lost. `handed`: the request had been handed to the socket, so it may have been
    /// carried out.
    Lost { handed: bool },
}

/// The answer to the request with this index of this call.
#[derive(Debug)]
pub(super) struct Answered {
    pub(super) call: u64,
    pub(super) index: usize,
    pub(super) answer: Answer,
}

/// Where a reply goes.
#[derive(Debug)]
enum To {
    Call {
        call: u64,
        index: usize,
    },
    /// All who asked for the contenders of this mutex.
    Line(String),
    Heartbeat,
    /// The question how far the ensemble is, by which a session that was forgotten is judged.
    Judge,
    /// The deletion of a node that nobody holds any more.
    Removal,
    /// The list in which nodes with these beginnings may be found, which nobody holds any more.
    Search {
        mutex_path: String,
        beginnings: Vec<String>,
    },
    /// Only the watch matters.
    Watch,
}

/// A request without an answer. `xid`: zero until it is sent.
#[derive(Debug)]
struct Pending {
    xid: i32,
    ask: Ask,
    to: To,
}

/// The callers that share a list that is out, and those that came too late for it.
#[derive(Debug, Default)]
struct Listing {
    current: Vec<(u64, usize)>,
    next: Vec<(u64, usize)>,
}

/// How far the present connection has come.
#[derive(Debug)]
enum Stage {
    /// There is none.
    Away,
    /// The server has not answered the first frame. `forgetful`: it was not told what we have seen.
    Handshake {
        sent: Moment,
        by: Moment,
        forgetful: bool,
    },
    /// The server has taken a session up without knowing what we have seen.
    Judging {
        sent: Moment,
        timeout: Duration,
        by: Moment,
    },
    Serving,
}

/// What must be removed, but nobody waits for.
#[derive(Debug, Default)]
struct Abandoned {
    nodes: Vec<String>,
    /// By mutex, the beginnings of names of nodes that may exist: one look per mutex finds them all.
    creations: HashMap<String, Vec<String>>,
    /// What a server has refused, for the next beat: an overloaded one has thrown it out, or an operator has
    /// taken a permission away and may give it back. As long as the session lives, nobody else removes it.
    later: Vec<String>,
    later_creations: Vec<(String, Vec<String>)>,
    /// The paths whose refusal was logged.
    logged: HashSet<String>,
    /// Requests that are out for this.
    out: usize,
}

impl Abandoned {
    fn search_for(&mut self, mutex_path: String, beginnings: Vec<String>) {
        self.creations
            .entry(mutex_path)
            .or_default()
            .extend(beginnings);
    }

    /// A server answered what was asked for `path`. Returns `true` if that is to be asked again.
    fn is_refused(&mut self, path: &str, outcome: &Outcome, realm: &str) -> bool {
        match outcome {
            Ok(_) | Err(Code::NO_NODE) => {
                self.logged.remove(path);
                return false;
            }
            Err(Code::THROTTLED) => {}
            Err(code) if self.logged.insert(path.to_owned()) => log::warn!(
                "{realm}: cannot clean up, which is tried again: {}",
                code.error(path)
            ),
            Err(_) => {}
        }
        true
    }

    fn once_more(&mut self) {
        self.nodes.append(&mut self.later);
        for (mutex_path, beginnings) in std::mem::take(&mut self.later_creations) {
            self.search_for(mutex_path, beginnings);
        }
    }
}

/// The state of one session.
#[derive(Debug)]
pub(super) struct Protocol {
    config: Arc<Config>,
    phase: SessionState,
    stage: Stage,
    /// Zero until the session is opened.
    id: i64,
    password: Vec<u8>,
    last_zxid: i64,
    /// How many servers in a row ended the connection instead of answering the handshake.
    refusals: usize,
    heartbeat: Heartbeat,
    /// The first beat of this connection was answered: the server has caught up with the leader.
    caught_up: bool,
    closing: bool,
    /// Counts connections: what was read over an earlier one may be behind.
    epoch: u64,
    xid: i32,
    queue: VecDeque<Pending>,
    sent: VecDeque<Pending>,
    /// How many of `sent` are no heartbeats.
    requests: usize,
    listings: HashMap<String, Listing>,
    /// Calls whose creation nobody wants any more.
    cancelled: HashSet<u64>,
    watches: Watches,
    abandoned: Abandoned,
    /// The nodes with which we own, and when each lease is over unless it is renewed: the session alone
    /// would keep the node of an owner that renews no more.
    leases: HashMap<String, Moment>,
    /// No lease ends before this.
    lease_check: Moment,
    frames: Frames,
    out: Encoder,
    answers: VecDeque<Answered>,
    news: bool,
}

impl Protocol {
    pub(super) fn new(config: Arc<Config>) -> Protocol {
        Protocol {
            heartbeat: Heartbeat::new(config.session_timeout),
            config,
            phase: SessionState::Connecting,
            stage: Stage::Away,
            id: 0,
            password: Vec::new(),
            last_zxid: 0,
            refusals: 0,
            caught_up: false,
            closing: false,
            epoch: 0,
            xid: 0,
            queue: VecDeque::new(),
            sent: VecDeque::new(),
            requests: 0,
            listings: HashMap::new(),
            cancelled: HashSet::new(),
            watches: Watches::default(),
            abandoned: Abandoned::default(),
            leases: HashMap::new(),
            lease_check: Moment::FAR,
            frames: Frames::default(),
            out: Encoder::default(),
            answers: VecDeque::new(),
            news: false,
        }
    }

    pub(super) fn phase(&self) -> SessionState {
        self.phase
    }

    pub(super) fn is_connected(&self) -> bool {
        self.phase == SessionState::Connected
    }

    /// Whether a server has been asked to let us in and has not answered.
    pub(super) fn is_entering(&self) -> bool {
        matches!(self.stage, Stage::Handshake { .. })
    }

    pub(super) fn id(&self) -> i64 {
        self.id
    }

    pub(super) fn epoch(&self) -> u64 {
        self.epoch
    }

    pub(super) fn timeout(&self) -> Duration {
        self.heartbeat.timeout()
    }

    /// See [`Heartbeat::alive_until`]; `None` once the session is over.
    pub(super) fn alive_until(&self) -> Option<Moment> {
        self.heartbeat
            .alive_until()
            .filter(|_| !self.phase.is_over())
    }

    /// Whether nobody acknowledges heartbeats at `now`.
    pub(super) fn is_in_doubt(&self, now: Moment) -> bool {
        !self.is_connected() || self.heartbeat.is_late(now)
    }

    /// How long a server has to let us in: a quarter of T while something may rest on the session.
    pub(super) fn patience(&self, now: Moment) -> Duration {
        let patience = self.heartbeat.patience();
        if self.alive_until().is_some_and(|until| until > now) {
            patience
        } else {
            patience.max(self.config.connect_timeout)
        }
    }

    /// Begins a connection, which has to serve within `patience`. `addresses`: how many there are.
    pub(super) fn begin(&mut self, now: Moment, patience: Duration, addresses: usize) {
        // It may be what we have seen that makes every server refuse us (each did so twice), because they
        // were restored from an older copy or started without their data. A server that is behind its
        // client closes the connection without a word, for ever. Once nothing can rest on the session any
        // more, it is shown to a server without what we have seen; then there is an answer.
        let forgetful = self.id != 0
            && self.refusals >= 2 * addresses.max(1)
            && self.alive_until().is_none_or(|until| until <= now);
        encode_hello(
            &mut self.out,
            if forgetful { 0 } else { self.last_zxid },
            self.config.timeout_ms(),
            self.id,
            &self.password,
        );
        self.stage = Stage::Handshake {
            sent: now,
            by: now + patience,
            forgetful,
        };
    }

    /// Takes what the server sent. An error means that the connection has to go.
    pub(super) fn received(&mut self, bytes: &[u8], now: Moment) -> Result<()> {
        self.frames.push(bytes);
        loop {
            if matches!(self.stage, Stage::Handshake { .. })
                && self
                    .frames
                    .announced()
                    .is_some_and(|length| length > LONGEST_WELCOME)
            {
                return Err(Error::new(
                    ErrorKind::Protocol,
                    "not a ZooKeeper server's handshake; is this a ZooKeeper server?",
                ));
            }
            let frame = match self.frames.next() {
                Ok(Some(frame)) => frame,
                Ok(None) => break,
                Err(what) => {
                    return Err(Error::new(
                        ErrorKind::Protocol,
                        "the server sent no ZooKeeper frame; is this a ZooKeeper server?",
                    )
                    .with_source(what));
                }
            };
            match self.stage {
                Stage::Away => return Ok(()),
                Stage::Handshake {
                    sent, forgetful, ..
                } => {
                    let (Frame::Whole(frame) | Frame::Oversized(frame)) = frame;
                    self.welcomed(&frame, sent, forgetful, now)?;
                }
                Stage::Judging { .. } | Stage::Serving => self.replied(&frame, now)?,
            }
        }
        self.clean_up();
        self.pump();
        Ok(())
    }

    /// The server closed the connection, or it broke.
    pub(super) fn refused(&mut self) {
        // During the handshake it is also how a server refuses that is behind what we have seen.
        if matches!(self.stage, Stage::Handshake { .. }) {
            self.refusals += 1;
        }
    }

    /// Does what is due at `now`. An error means that the server has to be left.
    pub(super) fn tick(&mut self, now: Moment) -> Result<()> {
        match self.stage {
            Stage::Away => {}
            Stage::Handshake { by, .. } | Stage::Judging { by, .. } => {
                if by <= now {
                    return Err(Error::new(
                        ErrorKind::Timeout,
                        "no answer within the time for a handshake; the server hangs, or is not a ZooKeeper server",
                    ));
                }
            }
            Stage::Serving => {
                if self.heartbeat.silent_at() <= now {
                    return Err(Error::new(
                        ErrorKind::Timeout,
                        format!(
                            "the server acknowledged no heartbeat for {:?}",
                            self.heartbeat.patience()
                        ),
                    ));
                }
                if self.heartbeat.due() <= now && !self.closing {
                    self.beat(now);
                    self.abandoned.once_more();
                }
                self.end_leases(now);
                self.clean_up();
                self.pump();
            }
        }
        Ok(())
    }

    /// When [`tick`](Protocol::tick) has something to do.
    pub(super) fn wake_at(&self) -> Moment {
        match self.stage {
            Stage::Away => Moment::FAR,
            Stage::Handshake { by, .. } | Stage::Judging { by, .. } => by,
            Stage::Serving if self.closing => self.heartbeat.silent_at(),
            Stage::Serving => self
                .heartbeat
                .due()
                .min(self.heartbeat.silent_at())
                .min(self.lease_check),
        }
    }

    /// Asks on behalf of `call`, in this order. Only while connected.
    pub(super) fn ask(&mut self, call: u64, asks: Vec<Ask>) {
        for (index, ask) in asks.into_iter().enumerate() {
            match ask.request {
                Request::Children(path) if ask.shared => self.join_list(path, call, index),
                _ => self.enqueue(ask, To::Call { call, index }),
            }
        }
        self.pump();
    }

    /// Nobody wants the node any more that `call` makes. Only while its creation is not answered.
    pub(super) fn cancel(&mut self, call: u64) {
        self.cancelled.insert(call);
    }

    /// Watches a node that we believe to exist, without anybody waiting: the watch fires if it is gone by
    /// now, too.
    pub(super) fn watch(&mut self, path: &str, watch: &Arc<Watch>) {
        if self.is_connected() {
            self.enqueue(Ask::watch(path, watch), To::Watch);
            self.pump();
        } else {
            self.watch_later(path, &Arc::downgrade(watch));
        }
    }

    /// Deletes a node of ours for which nobody waits, as soon as a server is there.
    pub(super) fn abandon(&mut self, path: String) {
        if !self.phase.is_over() {
            self.leases.remove(&path);
            self.abandoned.nodes.push(path);
            self.clean_up();
            self.pump();
        }
    }

    /// As [`abandon`](Protocol::abandon), for a node that may exist: its creation was handed to the socket
    /// and not answered. `path`: what was asked for.
    pub(super) fn abandon_creation(&mut self, path: &str) {
        if !self.phase.is_over()
            && let Some((mutex_path, beginning)) = path.rsplit_once('/')
        {
            self.abandoned
                .search_for(mutex_path.to_owned(), vec![beginning.to_owned()]);
            self.clean_up();
            self.pump();
        }
    }

    /// The node at `path` goes at `end` unless its lease is renewed before.
    pub(super) fn begin_lease(&mut self, path: &str, end: Moment) {
        self.leases.insert(path.to_owned(), end);
        self.lease_check = self.lease_check.min(end);
    }

    /// Returns `false` if the lease is over and its node is gone or going.
    pub(super) fn renew_lease(&mut self, path: &str, end: Moment) -> bool {
        let lease = self.leases.get_mut(path);
        lease.map(|known| *known = end.max(*known)).is_some()
    }

    pub(super) fn end_lease(&mut self, path: &str) {
        self.leases.remove(path);
    }

    /// Says goodbye on behalf of `call`, past the queue. Returns `false` if there is nobody to say it to.
    pub(super) fn close(&mut self, call: u64) -> bool {
        let first = !std::mem::replace(&mut self.closing, true);
        let says = first && self.is_connected();
        if says {
            self.send(Request::Close.into(), To::Call { call, index: 0 });
        }
        says
    }

    /// The connection is gone, or has to go. What was asked over it has an unknown outcome; what waited in
    /// the queue was not asked.
    pub(super) fn disconnected(&mut self) {
        self.stage = Stage::Away;
        self.frames = Frames::default();
        self.out.clear();
        self.requests = 0;
        self.abandoned.out = 0;
        self.abandoned.once_more();
        self.heartbeat.disconnected();
        if self.is_connected() {
            self.phase = SessionState::Suspended;
            // Those that wait try again, and learn that no server answers.
            self.watches.unpark_all();
        }
        for listing in std::mem::take(&mut self.listings).into_values() {
            for (call, index) in listing.current.into_iter().chain(listing.next) {
                self.answer(call, index, Answer::Lost { handed: false });
            }
        }
        for sent in std::mem::take(&mut self.sent) {
            self.lose(sent, true);
        }
        for queued in std::mem::take(&mut self.queue) {
            self.lose(queued, false);
        }
        self.cancelled.clear();
    }

    /// The session is over: by a server's word (`Expired`) or its owner's (`Closed`).
    pub(super) fn end(&mut self, phase: SessionState) {
        if self.phase.is_over() {
            return;
        }
        self.disconnected();
        self.phase = phase;
        self.abandoned = Abandoned::default();
        self.leases.clear();
        self.lease_check = Moment::FAR;
        self.watches.end();
        self.news = true;
    }

    /// The bytes to be sent.
    pub(super) fn take_output(&mut self) -> Vec<u8> {
        self.out.take()
    }

    pub(super) fn has_output(&self) -> bool {
        !self.out.is_empty()
    }

    /// The next answer to a call.
    pub(super) fn next_answer(&mut self) -> Option<Answered> {
        self.answers.pop_front()
    }

    /// Whether there is something new to say to callers that were told "unknown".
    pub(super) fn take_news(&mut self) -> bool {
        std::mem::take(&mut self.news)
    }

    pub(super) fn over_error(&self) -> Error {
        match self.phase {
            SessionState::Expired => Error::new(
                ErrorKind::Lost,
                format!("{}: the session has expired", self.config.realm),
            ),
            _ => Error::new(
                ErrorKind::Closed,
                format!("{}: the session was closed", self.config.realm),
            ),
        }
    }

    fn welcomed(&mut self, frame: &[u8], sent: Moment, forgetful: bool, now: Moment) -> Result<()> {
        let welcome = Welcome::decode(frame).map_err(|what| {
            Error::new(
                ErrorKind::Protocol,
                "not a ZooKeeper server's handshake; is this a ZooKeeper server?",
            )
            .with_source(what)
        })?;
        self.refusals = 0;
        let timeout = Duration::from_millis(u64::try_from(welcome.timeout_ms).unwrap_or(0));
        let none = timeout.is_zero() || welcome.id == 0;
        if self.id != 0 && none {
            log::warn!("{}: the session has expired", self.config.realm);
            self.end(SessionState::Expired);
            return Ok(());
        }
        // Another session than ours would come without our nodes, and look as if all were well.
        if none || (self.id != 0 && welcome.id != self.id) {
            return Err(Error::new(
                ErrorKind::Protocol,
                "the server did not give us the session we asked for",
            ));
        }
        if welcome.read_only {
            return Err(Error::new(
                ErrorKind::Unavailable,
                "the server is read-only",
            ));
        }
        let asked = self.config.session_timeout;
        if timeout < asked {
            if self.id == 0 {
                // Nobody uses it: without a goodbye the server would keep it until it times out.
                self.goodbye();
            } else {
                // It has told the leader so.
                self.heartbeat.shortened(sent, timeout);
                self.watches.unpark_all();
                self.news = true;
            }
            return Err(Error::new(
                ErrorKind::Misconfigured,
                format!(
                    "the server keeps a session for {timeout:?} at most, and {asked:?} is needed (ttl and \
                     transition together); raise maxSessionTimeout (20 ticks by default) on every server, \
                     or ask for less"
                ),
            ));
        }
        if self.closing {
            self.end(SessionState::Closed);
            // Without it the server would keep our nodes until the session times out.
            self.goodbye();
            return Ok(());
        }
        let opened = self.id == 0;
        self.id = welcome.id;
        self.password = welcome.password;
        if forgetful {
            self.stage = Stage::Judging {
                sent,
                timeout,
                by: now + self.patience(now),
            };
            // Through the leader: a server that merely lags behind has caught up after this.
            self.send(Request::Sync.into(), To::Judge);
            return Ok(());
        }
        self.serve(sent, timeout, opened, now);
        Ok(())
    }

    /// The connection stands: authenticates it, beats, brings the watches back.
    fn serve(&mut self, sent: Moment, timeout: Duration, opened: bool, now: Moment) {
        if self.epoch == 0 && timeout > self.config.session_timeout {
            log::info!(
                "{}: asked for a session timeout of {:?}, got {timeout:?}, the server's minSessionTimeout",
                self.config.realm,
                self.config.session_timeout,
            );
        }
        self.stage = Stage::Serving;
        self.phase = SessionState::Connected;
        self.epoch += 1;
        self.caught_up = false;
        self.news = true;
        self.heartbeat.connected(sent, timeout, opened, now);
        if let Some(digest) = &self.config.digest {
            encode_auth(&mut self.out, "digest", digest);
        }
        // Before anything is read: the server may be behind the one that we talked to before.
        self.beat(now);
        self.encode_watches();
    }

    fn beat(&mut self, now: Moment) {
        let request = match self.heartbeat.sent(now) {
            Beat::Sync => Request::Sync,
            Beat::Commit => Request::Commit,
        };
        self.send(request.into(), To::Heartbeat);
    }

    fn goodbye(&mut self) {
        Request::Close.encode(1, false, &mut self.out);
    }

    fn encode_watches(&mut self) {
        let last_zxid = self.last_zxid;
        let mut bytes = 0;
        let (mut data, mut exists, mut children) = (Vec::new(), Vec::new(), Vec::new());
        for (kind, path) in self.watches.all() {
            match kind {
                Kind::Data => data.push(path),
                Kind::Exists => exists.push(path),
                Kind::Children => children.push(path),
            }
            bytes += path.len() + 4;
            if bytes >= WATCHES_BYTES {
                encode_set_watches(&mut self.out, last_zxid, &data, &exists, &children);
                bytes = 0;
                data.clear();
                exists.clear();
                children.clear();
            }
        }
        if bytes > 0 {
            encode_set_watches(&mut self.out, last_zxid, &data, &exists, &children);
        }
    }

    /// Takes a frame after the handshake.
    fn replied(&mut self, frame: &Frame, now: Moment) -> Result<()> {
        let malformed = |what: Malformed| {
            Error::new(
                ErrorKind::Protocol,
                "the server sent what a ZooKeeper server would not",
            )
            .with_source(what)
        };
        let (bytes, oversized) = match frame {
            Frame::Whole(bytes) => (bytes, false),
            Frame::Oversized(bytes) => (bytes, true),
        };
        let mut body = Decoder::new(bytes);
        let head = Head::decode(&mut body).map_err(malformed)?;
        match head.xid {
            XID_EVENT if !oversized => {
                let event = Event::decode(body).map_err(malformed)?;
                self.watches.fire(event);
                return Ok(());
            }
            XID_PING => return Ok(()),
            XID_AUTH | XID_SET_WATCHES => {
                return match head.code {
                    Code::OK => Ok(()),
                    code => Err(code.error("after the handshake")),
                };
            }
            _ => {}
        }
        let sent = match self.sent.front() {
            Some(sent) if sent.xid == head.xid => self.sent.pop_front(),
            _ => None,
        };
        let Some(sent) = sent else {
            return Err(malformed(Malformed("a reply to something not asked")));
        };
        let decoded = match head.code {
            Code::OK if oversized => Ok(Err(Code::OVERSIZED)),
            Code::OK => sent.ask.request.decode(body).map_err(malformed),
            // The next handshake tells which, and for certain.
            code @ (Code::SESSION_EXPIRED | Code::SESSION_MOVED) => Err(code.error("a request")),
            code => Ok(Err(code)),
        };
        let outcome = match decoded {
            Ok(outcome) => outcome,
            Err(error) => {
                // Not answered: the caller learns of the broken connection with the others.
                self.sent.push_front(sent);
                return Err(error);
            }
        };
        let seen = self.last_zxid;
        self.last_zxid = self.last_zxid.max(head.zxid);
        self.complete(sent, outcome, (head.zxid, seen), now)
    }

    /// `zxids`: how far the server is, and how far we have seen one be.
    fn complete(
        &mut self,
        Pending { ask, to, .. }: Pending,
        outcome: Outcome,
        zxids: (i64, i64),
        now: Moment,
    ) -> Result<()> {
        if !matches!(to, To::Heartbeat | To::Judge) {
            self.requests = self.requests.saturating_sub(1);
        }
        let path = ask.request.path();
        if let Some(weak) = &ask.watch {
            let kind = match (&ask.request, &outcome) {
                (Request::Data(_) | Request::Exists(_), Ok(_)) => Some(Kind::Data),
                (Request::Exists(_), Err(Code::NO_NODE)) => Some(Kind::Exists),
                (Request::Children(_), Ok(_)) => Some(Kind::Children),
                _ => None,
            };
            if let Some(kind) = kind {
                self.watches.add(kind, path.to_owned(), weak);
            }
            if let Some(watch) = weak.upgrade() {
                match (kind, &outcome) {
                    (Some(_), _) => watch.confirm(),
                    (None, Err(Code::NO_NODE)) => watch.fire(true),
                    (None, _) => watch.refuse(),
                }
            }
        }
        let realm = &self.config.realm;
        if ask.deletes() && self.abandoned.is_refused(path, &outcome, realm) {
            self.abandoned.later.push(path.to_owned());
        }
        match to {
            To::Call { call, index } => {
                if ask.creates()
                    && self.cancelled.remove(&call)
                    && let Ok(Reply::Created(path, _)) = &outcome
                {
                    self.abandoned.nodes.push(path.clone());
                }
                self.answer(call, index, Answer::Replied(outcome));
            }
            To::Line(path) => self.listed(path, outcome),
            To::Heartbeat => match outcome {
                // Where the root may not be read, that was written down as refused.
                Ok(_) | Err(Code::NO_AUTH) => {
                    self.caught_up = true;
                    let was_late = self.heartbeat.is_late(now);
                    self.news |= self.heartbeat.acknowledged(now) || was_late;
                }
                Err(code) => {
                    self.heartbeat.failed();
                    if !self.caught_up {
                        // What is read over this connection may be behind what we have seen.
                        return Err(code.error("heartbeat"));
                    }
                }
            },
            To::Judge => return self.judge(outcome, zxids, now),
            To::Removal => self.abandoned.out = self.abandoned.out.saturating_sub(1),
            To::Search {
                mutex_path,
                beginnings,
            } => {
                self.abandoned.out = self.abandoned.out.saturating_sub(1);
                if self.abandoned.is_refused(&mutex_path, &outcome, realm) {
                    let search = (mutex_path, beginnings);
                    self.abandoned.later_creations.push(search);
                } else if let Ok(Reply::Children(names)) = outcome {
                    let beginnings: HashSet<&str> = beginnings.iter().map(String::as_str).collect();
                    let ours = |name: &&String| {
                        let end = name.rfind('-').map_or(0, |dash| dash + 1);
                        let positive = name.get(..end).unwrap_or_default();
                        let negative = positive.strip_suffix('-').unwrap_or_default();
                        beginnings.contains(positive) || beginnings.contains(negative)
                    };
                    let found = names.iter().filter(ours);
                    self.abandoned
                        .nodes
                        .extend(found.map(|name| format!("{mutex_path}/{name}")));
                }
            }
            To::Watch => {}
        }
        Ok(())
    }

    /// The session was taken up without what we have seen. A server that knows less than that was restored
    /// from an older copy: the session, its watches and our memory of its nodes belong to a past that is
    /// gone. One that does not was starting then, and refused everybody.
    fn judge(&mut self, outcome: Outcome, (theirs, ours): (i64, i64), now: Moment) -> Result<()> {
        if let Err(code) = outcome {
            return Err(code.error("sync"));
        }
        let Stage::Judging { sent, timeout, .. } = self.stage else {
            return Ok(());
        };
        if theirs >= ours {
            self.serve(sent, timeout, false, now);
            return Ok(());
        }
        log::error!(
            "{}: the servers have forgotten what they once told us (they are at {theirs:#x}, we have seen \
             {ours:#x}), as after a restore from an older copy; the session is given up for a new one, and \
             fences may come again",
            self.config.realm,
        );
        self.end(SessionState::Expired);
        // Without it the nodes would go when the session times out.
        self.goodbye();
        Ok(())
    }

    fn join_list(&mut self, path: String, call: u64, index: usize) {
        match self.listings.get_mut(&path) {
            Some(listing) => listing.next.push((call, index)),
            None => self.list(path, vec![(call, index)]),
        }
    }

    fn list(&mut self, path: String, current: Vec<(u64, usize)>) {
        self.enqueue(
            Request::Children(path.clone()).into(),
            To::Line(path.clone()),
        );
        let next = Vec::new();
        self.listings.insert(path, Listing { current, next });
    }

    fn listed(&mut self, path: String, outcome: Outcome) {
        let outcome = match outcome {
            Ok(Reply::Children(names)) => Ok(Reply::Line(Arc::new(Line::new(names)))),
            other => other,
        };
        let Listing { current, next } = self.listings.remove(&path).unwrap_or_default();
        for (call, index) in current {
            self.answer(call, index, Answer::Replied(outcome.clone()));
        }
        if !next.is_empty() {
            self.list(path, next);
        }
    }

    fn answer(&mut self, call: u64, index: usize, answer: Answer) {
        self.answers.push_back(Answered {
            call,
            index,
            answer,
        });
    }

    fn enqueue(&mut self, ask: Ask, to: To) {
        self.queue.push_back(Pending { xid: 0, ask, to });
    }

    /// Sends what the window has room for.
    fn pump(&mut self) {
        while matches!(self.stage, Stage::Serving)
            && !self.closing
            && self.requests < WINDOW
            && let Some(Pending { ask, to, .. }) = self.queue.pop_front()
        {
            if let To::Call { call, index } = to
                && ask.creates()
                && self.cancelled.remove(&call)
            {
                self.answer(call, index, Answer::Lost { handed: false });
                continue;
            }
            self.requests += 1;
            self.send(ask, to);
        }
    }

    fn send(&mut self, ask: Ask, to: To) {
        self.xid = self.xid.checked_add(1).unwrap_or(1);
        let xid = self.xid;
        ask.request.encode(xid, ask.watch.is_some(), &mut self.out);
        self.sent.push_back(Pending { xid, ask, to });
    }

    /// A request will not be answered any more.
    fn lose(&mut self, Pending { ask, to, .. }: Pending, handed: bool) {
        let path = ask.request.path();
        if ask.deletes() {
            self.abandoned.nodes.push(path.to_owned());
        }
        match to {
            To::Call { call, index } => {
                if ask.creates() && handed && self.cancelled.contains(&call) {
                    self.abandon_creation(path);
                }
                self.answer(call, index, Answer::Lost { handed });
            }
            To::Search {
                mutex_path,
                beginnings,
            } => self.abandoned.search_for(mutex_path, beginnings),
            // Not confirmed: the next server is told of it with the others, and says at once if the node
            // is gone.
            To::Watch => ask
                .watch
                .iter()
                .for_each(|watch| self.watch_later(path, watch)),
            To::Removal | To::Line(_) | To::Heartbeat | To::Judge => {}
        }
    }

    /// Has the next server keep a watch on a node that we believe to exist.
    fn watch_later(&mut self, path: &str, watch: &Weak<Watch>) {
        self.watches.add(Kind::Data, path.to_owned(), watch);
        if let Some(watch) = watch.upgrade() {
            watch.confirm();
        }
    }

    fn clean_up(&mut self) {
        while matches!(self.stage, Stage::Serving) && self.abandoned.out < CLEAN_UP {
            if let Some(path) = self.abandoned.nodes.pop() {
                self.enqueue(Ask::delete(&path), To::Removal);
            } else if let Some(mutex_path) = self.abandoned.creations.keys().next().cloned() {
                let found = self.abandoned.creations.remove(&mutex_path);
                // The server has caught up with the one that may have made the node: the first request of
                // every connection is a beat.
                self.enqueue(
                    Request::Children(mutex_path.clone()).into(),
                    To::Search {
                        mutex_path,
                        beginnings: found.unwrap_or_default(),
                    },
                );
            } else {
                return;
            }
            self.abandoned.out += 1;
        }
    }

    /// Deletes the nodes of leases that have run out.
    fn end_leases(&mut self, now: Moment) {
        if now < self.lease_check {
            return;
        }
        let over = self.leases.extract_if(|_, end| *end <= now);
        let over: Vec<String> = over.map(|(path, _)| path).collect();
        self.abandoned.nodes.extend(over);
        self.lease_check = self.leases.values().copied().min().unwrap_or(Moment::FAR);
    }
}

#[cfg(test)]
mod tests {
    //! The protocol on its own, driven from a seed against a model of a server: delays, lost connections,
    //! requests thrown out, a follower cut off from its leader, callers that give up at any moment.
    //!
    //! `CONTEND_PROTOCOL_WORLDS` says how many worlds are tried (60 by default); `CONTEND_SEED` repeats one.

    use std::collections::BTreeMap;

    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};

    use super::super::builder::Builder;
    use super::super::message::{Acl, Mode, Permissions};
    use super::super::path::{node_path, protection};
    use super::super::wire::tests::number;
    use super::*;

    const T: u64 = 2_400;
    const MUTEXES: [&str; 2] = ["/simba/a", "/simba/b"];
    const SESSION: i64 = 77;

    fn at(ms: u64) -> Moment {
        Moment::from_origin(Duration::from_millis(ms))
    }

    fn protocol() -> Protocol {
        let builder = Builder::new("server").session_timeout(Duration::from_millis(T));
        Protocol::new(Arc::new(builder.config().unwrap()))
    }

    /// A follower and its leader. The follower answers; the leader expires.
    struct Server {
        /// The nodes of the session, and when each was made.
        nodes: BTreeMap<String, i64>,
        sequence: HashMap<String, u32>,
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
            while let Some(Frame::Whole(frame)) = self.frames.next().unwrap() {
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
                self.replies.push_back((due, welcome(self.expired)));
                self.zxid += 1;
                if !self.expired {
                    self.touched = now;
                }
                return;
            }
            let (xid, op) = (body.int().unwrap(), body.int().unwrap());
            let thrown_out = xid > 0 && op != -11 && dice.random_ratio(1, 200);
            let mut reply = Encoder::default();
            let code = if thrown_out {
                -127
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
                (0..3).for_each(|_| out.long(1));
                (0..3).for_each(|_| out.int(0));
                out.long(SESSION);
                (0..2).for_each(|_| out.int(0));
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
                    out.texts(names.into_iter());
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

    /// A caller's creation: which call it is, what it asked for, and what came of it.
    struct Creation {
        call: u64,
        path: String,
        answers: [Option<Answer>; 2],
        given_up: bool,
    }

    struct World {
        seed: u64,
        dice: StdRng,
        protocol: Protocol,
        server: Server,
        connected: bool,
        creations: Vec<Creation>,
        next_call: u64,
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
                next_call: 0,
                proofs: 0,
            }
        }

        fn step(&mut self, now: u64, calm: bool) {
            self.server.tick(now);
            if self.protocol.phase().is_over() {
                return;
            }
            if !self.connected {
                if calm || self.dice.random_ratio(1, 30) {
                    self.protocol
                        .begin(at(now), Duration::from_millis(T / 4), 1);
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
                outcome = Err(crate::Error::new(crate::ErrorKind::Unreachable, "dice"));
            }
            if !calm && self.protocol.is_connected() {
                self.callers();
            }
            match outcome {
                Ok(()) => {
                    let bytes = self.protocol.take_output();
                    self.server.receive(&bytes, now, &mut self.dice);
                }
                Err(_) => {
                    // What was handed to the socket in this step may get through or not.
                    let bytes = self.protocol.take_output();
                    if self.dice.random_bool(0.5) && self.server.greeted {
                        self.server.receive(&bytes, now, &mut self.dice);
                    }
                    self.protocol.disconnected();
                    self.server.lose_connection();
                    self.connected = false;
                }
            }
            self.collect();
            self.check(now);
        }

        fn callers(&mut self) {
            match self.dice.random_range(0..60) {
                0 => {
                    self.next_call += 1;
                    let mutex = MUTEXES[self.dice.random_range(0..2)];
                    let path = node_path(mutex, &protection());
                    let create = Request::Create {
                        path: path.clone(),
                        data: Vec::new(),
                        mode: Mode::EphemeralSequential,
                        permissions: Permissions::Of(Acl::Open),
                    };
                    let asks = vec![Ask::create(create), Ask::line(mutex)];
                    self.protocol.ask(self.next_call, asks);
                    self.creations.push(Creation {
                        call: self.next_call,
                        path,
                        answers: [None, None],
                        given_up: false,
                    });
                }
                1 | 2 if !self.creations.is_empty() => {
                    let chosen = self.dice.random_range(0..self.creations.len());
                    self.give_up(chosen);
                }
                _ => {}
            }
        }

        fn give_up(&mut self, chosen: usize) {
            // As a session does, which hands out answers under the same lock.
            self.collect();
            let creation = &mut self.creations[chosen];
            if std::mem::replace(&mut creation.given_up, true) {
                return;
            }
            match &creation.answers[0] {
                None => self.protocol.cancel(creation.call),
                Some(Answer::Replied(Ok(Reply::Created(path, _)))) => {
                    self.protocol.abandon(path.clone());
                }
                Some(Answer::Lost { handed: true }) => {
                    self.protocol.abandon_creation(&creation.path)
                }
                Some(_) => {}
            }
        }

        fn collect(&mut self) {
            while let Some(answered) = self.protocol.next_answer() {
                let seed = self.seed;
                let found = self
                    .creations
                    .iter_mut()
                    .find(|creation| creation.call == answered.call);
                let creation = found.unwrap_or_else(|| panic!("seed {seed}: answered nobody"));
                let place = &mut creation.answers[answered.index];
                assert!(place.is_none(), "seed {seed}: answered twice");
                if let (1, Answer::Replied(Ok(Reply::Line(line)))) =
                    (answered.index, &answered.answer)
                {
                    // The list was read after the node was made.
                    let made = match &creation.answers[0] {
                        Some(Answer::Replied(Ok(Reply::Created(path, _)))) => {
                            path.rsplit('/').next()
                        }
                        _ => None,
                    };
                    let seen =
                        made.is_none_or(|name| line.members().iter().any(|m| m.name == name));
                    assert!(
                        seen || creation.given_up,
                        "seed {seed}: a list from before the creation"
                    );
                }
                creation.answers[answered.index] = Some(answered.answer);
            }
        }

        fn check(&mut self, now: u64) {
            let seed = self.seed;
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
        /// report, and what the follower had to pass on. Whoever was not let in yet must ask again.
        fn heal(&mut self, now: u64) {
            self.server.cut = false;
            if self.connected && !self.protocol.is_connected() {
                self.protocol.disconnected();
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

        /// Everything heals and everybody leaves: nothing is left.
        fn end(mut self, mut now: u64) -> u64 {
            self.heal(now);
            (0..self.creations.len()).for_each(|chosen| self.give_up(chosen));
            let until = now + 4 * T;
            while now < until {
                now += 1;
                self.step(now, true);
                if self.protocol.phase() == SessionState::Expired {
                    break;
                }
            }
            let seed = self.seed;
            assert!(
                self.server.nodes.is_empty(),
                "seed {seed}: left behind: {:?}",
                self.server.nodes
            );
            for creation in &self.creations {
                assert!(
                    creation.answers.iter().all(Option::is_some),
                    "seed {seed}: call {} was never answered",
                    creation.call
                );
            }
            self.proofs
        }
    }

    #[test]
    fn in_any_world_belief_holds_answers_come_once_and_nothing_is_left_behind() {
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

    /// Drives a protocol through its handshake; returns what it sent after it.
    fn served(protocol: &mut Protocol, now: u64) -> Vec<u8> {
        protocol.begin(at(now), Duration::from_millis(T / 4), 1);
        protocol.take_output();
        protocol.received(&welcome(false), at(now + 1)).unwrap();
        protocol.tick(at(now + 1)).unwrap();
        protocol.take_output()
    }

    fn requests(bytes: &[u8]) -> Vec<(i32, i32)> {
        let mut frames = Frames::default();
        frames.push(bytes);
        let mut list = Vec::new();
        while let Some(Frame::Whole(frame)) = frames.next().unwrap() {
            let mut body = Decoder::new(&frame);
            list.push((body.int().unwrap(), body.int().unwrap()));
        }
        list
    }

    /// The answer to a handshake.
    fn welcome(expired: bool) -> Vec<u8> {
        let mut out = Encoder::default();
        out.begin();
        out.int(0);
        out.int(if expired { 0 } else { T as i32 });
        out.long(if expired { 0 } else { SESSION });
        out.buffer(&[1; 16]);
        out.bool(false);
        out.end();
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

    /// review/zk.md 2 and 7: beats are sent every T/24, answered or not, past whatever waits.
    #[test]
    fn heartbeats_pass_the_queue_and_do_not_wait_for_each_other() {
        let mut protocol = protocol();
        assert_eq!(requests(&served(&mut protocol, 0)), [(1, 9)]);
        let asks = (0..1_000)
            .map(|_| Request::Exists("/x".into()).into())
            .collect();
        protocol.ask(1, asks);
        let sent = requests(&protocol.take_output());
        assert_eq!(sent.len(), 64, "the window");
        for beat in 1..6 {
            protocol.tick(at(1 + beat * T / 24)).unwrap();
            let op = if beat == 3 { 14 } else { 9 };
            assert_eq!(requests(&protocol.take_output()), [(65 + beat as i32, op)]);
        }
        // A server silent for T/4 is left.
        assert!(protocol.tick(at(T / 4)).is_ok());
        assert!(protocol.tick(at(1 + T / 4)).is_err());
    }

    /// review/zk.md 4: an error in the reply to a beat fails it.
    #[test]
    fn a_beat_that_was_answered_with_an_error_does_not_count() {
        let mut protocol = protocol();
        served(&mut protocol, 0);
        protocol.received(&ok(1, 0), at(2)).unwrap();
        let before = protocol.alive_until();
        let mut left = None;
        for beat in 1..12 {
            let now = at(1 + beat * T / 24);
            if protocol.tick(now).is_err() {
                left = Some(now);
                break;
            }
            protocol.take_output();
            protocol
                .received(&ok(1 + beat as i32, -127), now + Duration::from_millis(1))
                .unwrap();
        }
        assert_eq!(protocol.alive_until(), before);
        assert!(left.is_some(), "the server counts as silent");
    }

    /// The first beat of a connection is what lets reads over it be trusted.
    #[test]
    fn a_connection_whose_first_beat_fails_is_left() {
        let mut protocol = protocol();
        served(&mut protocol, 0);
        assert!(protocol.received(&ok(1, -127), at(2)).is_err());
    }

    /// review/zk.md 5: a server that does not keep a watch is noticed.
    #[test]
    fn a_watch_that_the_server_refuses_is_known_to_be_refused() {
        let mut protocol = protocol();
        served(&mut protocol, 0);
        protocol.received(&ok(1, 0), at(2)).unwrap();
        let wake = Arc::new(crate::parker::Parker::new().unparker());
        for (xid, code) in [(2, -127), (3, -101)] {
            let watch = Watch::new(&wake);
            protocol.watch("/simba/m/n", &watch);
            assert!(watch.is_due());
            protocol.received(&ok(xid, code), at(3)).unwrap();
            assert_eq!(
                (watch.is_refused(), watch.is_gone()),
                (code == -127, code == -101)
            );
        }
    }

    /// review/zk.md 2: one list at a time, and the next one for all that came meanwhile.
    #[test]
    fn many_that_ask_for_one_list_get_two() {
        let mut protocol = protocol();
        served(&mut protocol, 0);
        protocol.received(&ok(1, 0), at(2)).unwrap();
        for call in 0..1_000 {
            protocol.ask(call, vec![Ask::line("/simba/m")]);
        }
        assert_eq!(requests(&protocol.take_output()), [(2, 8)]);
        let names = |xid: i32| {
            let mut out = Encoder::default();
            out.texts(["_c_x-latch-0000000001"].into_iter());
            reply(xid, 9, 0, &out.take())
        };
        protocol.received(&names(2), at(3)).unwrap();
        assert_eq!(std::iter::from_fn(|| protocol.next_answer()).count(), 1);
        assert_eq!(requests(&protocol.take_output()), [(3, 8)]);
        protocol.received(&names(3), at(4)).unwrap();
        assert_eq!(std::iter::from_fn(|| protocol.next_answer()).count(), 999);
        assert!(!protocol.has_output());
    }

    /// Whatever a server sends, at whatever stage: an error or nothing, never a panic.
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
            if protocol.phase().is_over() {
                protocol = self::protocol();
            }
            if !protocol.is_connected() {
                protocol.disconnected();
                if dice.random_bool(0.9) {
                    if protocol.id() == 0 || protocol.id() == SESSION {
                        served(&mut protocol, now);
                    }
                } else {
                    protocol.begin(at(now), Duration::from_millis(T), 1);
                }
            }
            if protocol.is_connected() {
                let call = u64::from(dice.random::<u32>());
                protocol.ask(call, vec![Ask::line("/m"), Ask::delete("/m/n")]);
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
                protocol.disconnected();
            }
            while protocol.next_answer().is_some() {}
        }
    }

    /// Whatever the server has against it: the session keeps the node alive, so nobody else removes it.
    #[test]
    fn what_a_server_refuses_to_clean_up_is_asked_for_again_at_every_beat() {
        for code in [-102, -127, -1] {
            let mut protocol = protocol();
            served(&mut protocol, 0);
            protocol.received(&ok(1, 0), at(2)).unwrap();
            // A caller's deletion, one that nobody waits for, and a look for a node that may be there.
            protocol.ask(1, vec![Ask::delete("/simba/m/n")]);
            protocol.abandon("/simba/m/o".into());
            protocol.abandon_creation("/simba/m/p-");
            let mut sent = requests(&protocol.take_output());
            let mut now = 2;
            for _ in 0..3 {
                let mut ops: Vec<i32> = sent.iter().map(|(_, op)| *op).collect();
                ops.sort_unstable();
                assert_eq!(ops, [2, 2, 8], "code {code}");
                for (xid, _) in sent {
                    protocol.received(&ok(xid, code), at(now)).unwrap();
                }
                assert!(!protocol.has_output(), "not before the next beat");
                now += T / 24;
                protocol.tick(at(now)).unwrap();
                sent = requests(&protocol.take_output());
                let (beat, op) = sent.remove(0);
                let body = if op == 14 { committed() } else { Vec::new() };
                let beaten = reply(beat, 9, 0, &body);
                protocol.received(&beaten, at(now)).unwrap();
            }
            // Gone by itself, or allowed by now.
            for (xid, op) in sent {
                let code = if op == 2 { 0 } else { -101 };
                protocol.received(&ok(xid, code), at(now)).unwrap();
            }
            protocol.tick(at(now + T / 24)).unwrap();
            assert_eq!(requests(&protocol.take_output()).len(), 1, "only the beat");
        }
    }

    /// Servers of other kinds that speak first, or answer what they do not understand.
    #[test]
    fn a_server_of_another_kind_is_known_by_its_first_bytes() {
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
            protocol.begin(at(0), Duration::from_millis(T / 4), 1);
            protocol.take_output();
            let error = protocol.received(&bytes[..4], at(1)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Protocol);
            let text = error.to_string();
            assert!(text.contains("is this a ZooKeeper server?"), "{text}");
        }
    }
}
