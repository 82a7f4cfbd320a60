//! All that a session knows, behind one lock: what was asked and not answered, who watches what, and
//! what has to be cleaned up.
//!
//! Callers write their requests here themselves; the session's thread reads what comes back. Replies
//! carry the number of their request and come in order, so one that nobody waits for any more is
//! dropped without harm: a call that timed out does not cost the others their connection.

use std::collections::{HashMap, VecDeque};
use std::io::Write;
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Weak};

use super::config::Config;
use super::message::{
    Code, Event, Head, Reply, Request, Shape, XID_AUTH, XID_EVENT, XID_PING, XID_SET_WATCHES,
    encode_auth, encode_set_watches,
};
use super::orphan::Orphan;
use super::pending::{Lookout, Pending, To};
use super::pulse::Pulse;
use super::session_state::SessionState;
use super::watches::{Alarm, Kind, Watches};
use super::wire::{Decoder, Encoder, Malformed};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};

/// The most bytes of paths in one `SetWatches`: a server takes a frame of 1 MiB by default.
const WATCHES_BYTES: usize = 128 << 10;

pub(super) struct State {
    pub(super) config: Arc<Config>,
    pub(super) phase: SessionState,
    /// Zero until the session is opened.
    pub(super) id: i64,
    pub(super) password: Vec<u8>,
    pub(super) pulse: Pulse,
    /// Counts connections: what was read over an earlier one may be behind.
    pub(super) epoch: u64,
    /// Why nobody is connected, once every host has been tried in vain.
    pub(super) trouble: Option<Error>,
    /// The owner wants to end: nothing may be started any more.
    pub(super) closing: bool,
    /// The thread is at its end.
    pub(super) thread_over: bool,
    /// An epoch time of the leader's clock that we were told, and when we asked.
    pub(super) leader_clock: Option<(u64, Moment)>,
    pub(super) last_zxid: i64,
    /// How many servers in a row ended the connection instead of answering the handshake.
    pub(super) refusals: usize,
    xid: i32,
    writer: Option<TcpStream>,
    pending: VecDeque<Pending>,
    pub(super) watches: Watches,
    /// Nodes that must go, but for which nobody waits any more.
    pub(super) orphans: Vec<Orphan>,
    /// The nodes with which we own, and when each lease is over unless it is renewed: the session alone
    /// would keep the node of an owner that renews no more.
    pub(super) leases: HashMap<String, Moment>,
    /// Rung when there is something new to say to those who were told "unknown".
    hurt: Vec<Weak<Alarm>>,
}

impl State {
    pub(super) fn new(config: Arc<Config>) -> State {
        State {
            pulse: Pulse::new(config.session_timeout),
            config,
            phase: SessionState::Connecting,
            id: 0,
            password: Vec::new(),
            epoch: 0,
            trouble: None,
            closing: false,
            thread_over: false,
            leader_clock: None,
            last_zxid: 0,
            refusals: 0,
            xid: 0,
            writer: None,
            pending: VecDeque::new(),
            watches: Watches::default(),
            orphans: Vec::new(),
            leases: HashMap::new(),
            hurt: Vec::new(),
        }
    }

    pub(super) fn is_connected(&self) -> bool {
        self.phase == SessionState::Connected
    }

    /// A connection stands: authenticates it, brings the watches back, and cleans up.
    pub(super) fn connected(&mut self, writer: TcpStream) -> Result<()> {
        self.writer = Some(writer);
        self.phase = SessionState::Connected;
        self.trouble = None;
        self.epoch += 1;
        let mut out = Encoder::default();
        if let Some(digest) = &self.config.digest {
            encode_auth(&mut out, "digest", digest);
        }
        self.encode_watches(&mut out);
        if !out.is_empty() {
            self.write(out.as_bytes())?;
        }
        for orphan in std::mem::take(&mut self.orphans) {
            self.sweep(orphan);
        }
        self.ring_hurt();
        Ok(())
    }

    fn encode_watches(&mut self, out: &mut Encoder) {
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
                encode_set_watches(out, last_zxid, &data, &exists, &children);
                bytes = 0;
                data.clear();
                exists.clear();
                children.clear();
            }
        }
        if bytes > 0 {
            encode_set_watches(out, last_zxid, &data, &exists, &children);
        }
    }

    /// The connection is gone, or has to go. What was asked over it has an unknown outcome.
    pub(super) fn disconnect(&mut self, why: &Error) {
        if let Some(writer) = self.writer.take() {
            // The thread reads from the same socket, and notices.
            let _ = writer.shutdown(Shutdown::Both);
        }
        if self.is_connected() {
            self.phase = SessionState::Suspended;
        }
        self.pulse.disconnected();
        for pending in std::mem::take(&mut self.pending) {
            match pending.to {
                To::Caller(slot, _) => slot.fail(why),
                To::Deleted(orphan) | To::Found(orphan) => self.orphans.push(orphan),
                // Not confirmed: the next server is told of it with the others, and tells at once if
                // the node is gone.
                To::Lookout => pending
                    .lookout
                    .into_iter()
                    .for_each(|lookout| self.keep(lookout)),
                To::Pulse | To::Nobody => {}
            }
        }
    }

    /// Keeps a look-out at a node that we believe to exist, for the next connection.
    pub(super) fn keep(&mut self, lookout: Lookout) {
        self.watches
            .add(Kind::Data, lookout.path, &lookout.sentinel);
    }

    /// The session is over: by a server's word (`Expired`) or its owner's (`Closed`).
    pub(super) fn end(&mut self, phase: SessionState) {
        self.phase = phase;
        let why = self.over_error();
        self.disconnect(&why);
        self.orphans.clear();
        self.watches.end();
        self.ring_hurt();
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

    /// Somebody was told "unknown": ring when that may have changed.
    pub(super) fn ring_later(&mut self, alarm: &Arc<Alarm>) {
        let alarm = Arc::downgrade(alarm);
        if !self.hurt.iter().any(|known| known.ptr_eq(&alarm)) {
            self.hurt.push(alarm);
        }
    }

    fn ring_hurt(&mut self) {
        for alarm in std::mem::take(&mut self.hurt) {
            if let Some(alarm) = alarm.upgrade() {
                alarm.ring();
            }
        }
    }

    /// Sends requests that are answered in this order, in one go.
    pub(super) fn send(
        &mut self,
        requests: impl IntoIterator<Item = (Request, Option<Lookout>, To)>,
    ) -> Result<()> {
        let mut out = Encoder::default();
        for (request, lookout, to) in requests {
            self.xid = self.xid.checked_add(1).unwrap_or(1);
            request.encode(self.xid, &mut out);
            self.pending.push_back(Pending {
                xid: self.xid,
                shape: request.shape(),
                lookout,
                to,
            });
        }
        self.write(out.as_bytes())
    }

    pub(super) fn beat(&mut self) -> Result<()> {
        self.pulse.sent(Moment::now());
        self.send([(Request::Sync, None, To::Pulse)])
    }

    /// Deletes the nodes of leases that have run out.
    pub(super) fn end_leases(&mut self, now: Moment) {
        let over = self.leases.extract_if(|_, end| *end <= now);
        for (path, _) in over.collect::<Vec<_>>() {
            self.sweep(Orphan::Node(path));
        }
    }

    /// Deletes a node for which nobody waits, now or as soon as a server is there.
    pub(super) fn sweep(&mut self, orphan: Orphan) {
        if self.phase.is_over() {
            return;
        }
        if !self.is_connected() {
            self.orphans.push(orphan);
            return;
        }
        // On failure the connection is gone, and the orphan is back in the list.
        let _ = match &orphan {
            Orphan::Node(path) => {
                let path = path.clone();
                self.send([(Request::Delete { path }, None, To::Deleted(orphan))])
            }
            Orphan::Protected { mutex_path, .. } => {
                let path = mutex_path.clone();
                let watch = false;
                self.send([
                    (Request::Sync, None, To::Nobody),
                    (Request::Children { path, watch }, None, To::Found(orphan)),
                ])
            }
        };
    }

    /// A short write or a full buffer leaves half a frame behind: the connection is of no use then.
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let result = match &mut self.writer {
            Some(writer) => writer.write_all(bytes),
            None => Err(std::io::ErrorKind::NotConnected.into()),
        };
        result.map_err(|error| {
            let error = Error::new(
                ErrorKind::Unreachable,
                format!("{}: cannot write to the server", self.config.realm),
            )
            .with_source(error);
            self.disconnect(&error);
            error
        })
    }

    /// Takes a frame from the server. An error means that the connection has to go.
    pub(super) fn receive(&mut self, frame: &[u8]) -> Result<()> {
        let malformed = |what: Malformed| {
            Error::new(
                ErrorKind::Protocol,
                "the server sent what a ZooKeeper server would not",
            )
            .with_source(what)
        };
        let mut body = Decoder::new(frame);
        let head = Head::decode(&mut body).map_err(malformed)?;
        match head.xid {
            XID_EVENT => {
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
        let pending = match self.pending.front() {
            Some(pending) if pending.xid == head.xid => self.pending.pop_front(),
            _ => None,
        };
        let Some(pending) = pending else {
            return Err(malformed(Malformed("a reply to something not asked")));
        };
        self.last_zxid = self.last_zxid.max(head.zxid);
        let outcome = match head.code {
            Code::OK => match pending.shape.decode(body) {
                Ok(reply) => Ok(reply),
                Err(what) => {
                    // Not answered: whoever waits learns of the broken connection with the others.
                    self.pending.push_front(pending);
                    return Err(malformed(what));
                }
            },
            code @ (Code::SESSION_EXPIRED | Code::SESSION_MOVED) => {
                // The next handshake tells which, and for certain.
                self.pending.push_front(pending);
                return Err(code.error("a request"));
            }
            code => Err(code),
        };
        self.complete(pending, outcome);
        Ok(())
    }

    fn complete(&mut self, pending: Pending, outcome: Result<Reply, Code>) {
        if let Some(Lookout { path, sentinel }) = &pending.lookout {
            let kind = match (pending.shape, &outcome) {
                (Shape::Data | Shape::Stat, Ok(_)) => Some(Kind::Data),
                (Shape::Stat, Err(Code::NO_NODE)) => Some(Kind::Exists),
                (Shape::Children, Ok(_)) => Some(Kind::Children),
                _ => None,
            };
            if let Some(kind) = kind {
                self.watches.add(kind, path.clone(), sentinel);
            }
        }
        match pending.to {
            To::Caller(slot, index) => slot.answer(index, outcome),
            To::Pulse => {
                self.pulse.acknowledged(Moment::now());
                self.ring_hurt();
            }
            To::Deleted(orphan) => match outcome {
                Ok(_) | Err(Code::NO_NODE) => {}
                Err(code) => log::warn!("{}: {}", self.config.realm, code.error(orphan.path())),
            },
            To::Found(orphan) => {
                if let (Orphan::Protected { mutex_path, .. }, Ok(Reply::Children(names))) =
                    (&orphan, outcome)
                    && let Some(name) = names.iter().find(|name| orphan.is(name))
                {
                    self.sweep(Orphan::Node(format!("{mutex_path}/{name}")));
                }
            }
            To::Lookout => {
                if outcome == Err(Code::NO_NODE)
                    && let Some(lookout) = pending.lookout
                    && let Some(sentinel) = lookout.sentinel.upgrade()
                {
                    sentinel.fire(true);
                }
            }
            To::Nobody => {}
        }
    }
}
