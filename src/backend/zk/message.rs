//! What is said in the frames: requests, replies, events, and the server's error codes.

use std::sync::Arc;

use super::path::Line;
use super::wire::{Decoder, Encoder, Malformed};
use crate::error::{Error, ErrorKind};

/// Reserved transaction ids.
pub(super) const XID_EVENT: i32 = -1;
pub(super) const XID_PING: i32 = -2;
pub(super) const XID_AUTH: i32 = -4;
pub(super) const XID_SET_WATCHES: i32 = -8;

const SET_DATA: i32 = 5;
const CHECK: i32 = 13;
const MULTI: i32 = 14;

/// What a node is, and when it goes away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Mode {
    /// Stays until it is deleted.
    Persistent,
    /// Deleted by the server some time after its last child went.
    Container,
    /// Ends with the session; the server appends a number that grows per parent.
    EphemeralSequential,
}

/// The access rights to the nodes that a factory creates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Acl {
    /// Everybody may do anything.
    Open,
    /// Only clients that have authenticated as the same user may do anything.
    CreatorAll,
}

/// The permissions that a node is created with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Permissions {
    Of(Acl),
    /// Everybody may read and create below; the rest is for the user that created the node. What
    /// `/simba` and the nodes above it get, so that they do not belong to the first user alone.
    Shared,
}

const READ: i32 = 1;
const CREATE: i32 = 4;
const ALL: i32 = 31;

impl Permissions {
    /// Of a node above the mutexes, where the mutexes have this ACL.
    pub(super) fn above(acl: Acl) -> Permissions {
        match acl {
            Acl::Open => Permissions::Of(Acl::Open),
            Acl::CreatorAll => Permissions::Shared,
        }
    }

    fn entries(self) -> &'static [(i32, &'static str, &'static str)] {
        match self {
            Permissions::Of(Acl::Open) => &[(ALL, "world", "anyone")],
            Permissions::Of(Acl::CreatorAll) => &[(ALL, "auth", "")],
            Permissions::Shared => &[(READ | CREATE, "world", "anyone"), (ALL, "auth", "")],
        }
    }
}

/// What the server keeps about a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stat {
    /// The transaction that created the node: grows over all nodes of an ensemble.
    pub czxid: i64,
    /// When the node was created, in epoch milliseconds on the leader's clock.
    pub ctime: i64,
    /// When its data was written last, in epoch milliseconds on the leader's clock.
    pub mtime: i64,
    /// The session with which the node ends; zero for nodes that stay.
    pub ephemeral_owner: i64,
    /// How many children it has.
    pub children: i32,
}

#[derive(Clone, Debug)]
pub(super) enum Request {
    Create {
        path: String,
        data: Vec<u8>,
        mode: Mode,
        permissions: Permissions,
    },
    Delete(String),
    Exists(String),
    Data(String),
    Children(String),
    /// Writes `data` to the node at `path`, if the node at `check` exists.
    CheckedWrite {
        check: String,
        path: String,
        data: Vec<u8>,
    },
    Sync,
    /// Changes nothing, but is answered only after a quorum has written it down.
    Commit,
    Close,
}

/// The server's answer to a request: what was asked for, or why not.
pub(super) type Outcome = Result<Reply, Code>;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Reply {
    Created(String, Stat),
    Stat(Stat),
    Data(Vec<u8>, Stat),
    Children(Vec<String>),
    /// The contenders among the children, read once for all that asked.
    Line(Arc<Line>),
    Nothing,
}

impl Request {
    /// The node that it is about.
    pub(super) fn path(&self) -> &str {
        match self {
            Request::Create { path, .. } | Request::CheckedWrite { path, .. } => path,
            Request::Delete(path)
            | Request::Exists(path)
            | Request::Data(path)
            | Request::Children(path) => path,
            Request::Sync | Request::Commit | Request::Close => "/",
        }
    }

    /// `watch`: the server is to tell what happens to the node next. Only for reads.
    pub(super) fn encode(&self, xid: i32, watch: bool, out: &mut Encoder) {
        let read = |out: &mut Encoder, op: i32, path: &str| {
            out.int(op);
            out.text(path);
            out.bool(watch);
        };
        out.begin();
        out.int(xid);
        match self {
            Request::Create {
                path,
                data,
                mode,
                permissions,
            } => {
                // create2 and createContainer bring the node's stat back, and with it the fence:
                // plain create would cost one more read.
                let (op, flags) = match mode {
                    Mode::Persistent => (15, 0),
                    Mode::Container => (19, 4),
                    Mode::EphemeralSequential => (15, 3),
                };
                out.int(op);
                out.text(path);
                out.buffer(data);
                let entries = permissions.entries();
                out.count(entries.len());
                for (bits, scheme, id) in entries {
                    out.int(*bits);
                    out.text(scheme);
                    out.text(id);
                }
                out.int(flags);
            }
            Request::Delete(path) => {
                out.int(2);
                out.text(path);
                out.int(-1);
            }
            Request::Exists(path) => read(out, 3, path),
            Request::Data(path) => read(out, 4, path),
            Request::Children(path) => read(out, 8, path),
            Request::CheckedWrite { check, path, data } => {
                out.int(MULTI);
                operation(out, CHECK, check);
                out.int(-1);
                operation(out, SET_DATA, path);
                out.buffer(data);
                out.int(-1);
                end_of_operations(out);
            }
            Request::Sync => {
                out.int(9);
                out.text("/");
            }
            Request::Commit => {
                out.int(MULTI);
                operation(out, CHECK, "/");
                out.int(-1);
                end_of_operations(out);
            }
            Request::Close => out.int(-11),
        }
        out.end();
    }

    /// Decodes the body of the reply to this request.
    pub(super) fn decode(&self, mut body: Decoder<'_>) -> Result<Outcome, Malformed> {
        Ok(Ok(match self {
            Request::Create { .. } => Reply::Created(body.text()?, stat(&mut body)?),
            Request::Exists(_) => Reply::Stat(stat(&mut body)?),
            Request::Data(_) => Reply::Data(body.buffer()?.to_vec(), stat(&mut body)?),
            Request::Children(_) => Reply::Children(body.texts()?),
            Request::CheckedWrite { .. } | Request::Commit => return operations(&mut body),
            Request::Delete(_) | Request::Sync | Request::Close => Reply::Nothing,
        }))
    }
}

/// Begins one of the operations of a `multi`.
fn operation(out: &mut Encoder, op: i32, path: &str) {
    out.int(op);
    out.bool(false);
    out.int(-1);
    out.text(path);
}

fn end_of_operations(out: &mut Encoder) {
    out.int(-1);
    out.bool(true);
    out.int(-1);
}

/// The results of the operations of a `multi`. Where one failed, none was done: the one at fault has
/// its own code, the others have `OK` or `RUNTIME_INCONSISTENCY`.
fn operations(body: &mut Decoder<'_>) -> Result<Outcome, Malformed> {
    let mut failed = false;
    let mut fault = None;
    loop {
        let op = body.int()?;
        let done = body.bool()?;
        let _code = body.int()?;
        match op {
            _ if done => break,
            CHECK => {}
            SET_DATA => {
                stat(body)?;
            }
            -1 => {
                failed = true;
                let code = Code(body.int()?);
                if code != Code::OK && code != Code::RUNTIME_INCONSISTENCY {
                    fault.get_or_insert(code);
                }
            }
            _ => return Err(Malformed("a result of an operation that was not asked for")),
        }
    }
    Ok(match fault {
        Some(code) => Err(code),
        None if failed => Err(Code::RUNTIME_INCONSISTENCY),
        None => Ok(Reply::Nothing),
    })
}

fn stat(body: &mut Decoder<'_>) -> Result<Stat, Malformed> {
    let czxid = body.long()?;
    let _mzxid = body.long()?;
    let ctime = body.long()?;
    let mtime = body.long()?;
    for _version in 0..3 {
        body.int()?;
    }
    let ephemeral_owner = body.long()?;
    let _data_length = body.int()?;
    let children = body.int()?;
    let _pzxid = body.long()?;
    Ok(Stat {
        czxid,
        ctime,
        mtime,
        ephemeral_owner,
        children,
    })
}

/// The head of every frame but the handshake's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) xid: i32,
    pub(super) zxid: i64,
    pub(super) code: Code,
}

impl Head {
    pub(super) fn decode(frame: &mut Decoder<'_>) -> Result<Head, Malformed> {
        Ok(Head {
            xid: frame.int()?,
            zxid: frame.long()?,
            code: Code(frame.int()?),
        })
    }
}

/// Something happened to a watched node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Event {
    pub(super) change: Change,
    pub(super) path: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    Created,
    Deleted,
    Data,
    Children,
    /// About the session, or unknown to us: the connection itself tells what matters.
    Other,
}

impl Event {
    pub(super) fn decode(mut body: Decoder<'_>) -> Result<Event, Malformed> {
        let change = match body.int()? {
            1 => Change::Created,
            2 => Change::Deleted,
            3 => Change::Data,
            4 => Change::Children,
            _ => Change::Other,
        };
        let _state = body.int()?;
        let path = body.text()?;
        Ok(Event { change, path })
    }
}

/// The first frame of a connection: opens a session (`id` zero) or resumes one.
pub(super) fn encode_hello(
    out: &mut Encoder,
    last_zxid: i64,
    timeout_ms: i32,
    id: i64,
    password: &[u8],
) {
    out.begin();
    out.int(0);
    out.long(last_zxid);
    out.int(timeout_ms);
    out.long(id);
    out.buffer(password);
    // Not on a server that has lost its quorum: it could not keep a lock.
    out.bool(false);
    out.end();
}

/// The server's answer to the first frame.
pub(super) struct Welcome {
    /// Zero or less: the session has expired.
    pub(super) timeout_ms: i32,
    pub(super) id: i64,
    pub(super) password: Vec<u8>,
    pub(super) read_only: bool,
}

impl Welcome {
    pub(super) fn decode(frame: &[u8]) -> Result<Welcome, Malformed> {
        let mut body = Decoder::new(frame);
        let _version = body.int()?;
        let timeout_ms = body.int()?;
        let id = body.long()?;
        let password = body.buffer()?;
        if password.len() > 64 {
            return Err(Malformed("session password too long"));
        }
        Ok(Welcome {
            timeout_ms,
            id,
            password: password.to_vec(),
            // Servers before 3.4 do not send it.
            read_only: !body.is_empty() && body.bool()?,
        })
    }
}

pub(super) fn encode_auth(out: &mut Encoder, scheme: &str, auth: &[u8]) {
    out.begin();
    out.int(XID_AUTH);
    out.int(100);
    out.int(0);
    out.text(scheme);
    out.buffer(auth);
    out.end();
}

/// Asks a server that has not heard of our watches to keep them from now on, and to tell at once what
/// happened to their nodes since `last_zxid`.
pub(super) fn encode_set_watches(
    out: &mut Encoder,
    last_zxid: i64,
    data: &[&str],
    exists: &[&str],
    children: &[&str],
) {
    out.begin();
    out.int(XID_SET_WATCHES);
    out.int(101);
    out.long(last_zxid);
    for paths in [data, exists, children] {
        out.texts(paths.iter().copied());
    }
    out.end();
}

/// What the server says about a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Code(pub(super) i32);

impl Code {
    pub(super) const OK: Code = Code(0);
    pub(super) const RUNTIME_INCONSISTENCY: Code = Code(-2);
    pub(super) const THROTTLED: Code = Code(-127);
    /// Not the server's: its reply was too large to be taken.
    pub(super) const OVERSIZED: Code = Code(i32::MIN);
    pub(super) const NO_NODE: Code = Code(-101);
    pub(super) const NO_AUTH: Code = Code(-102);
    pub(super) const NODE_EXISTS: Code = Code(-110);
    pub(super) const SESSION_EXPIRED: Code = Code(-112);
    pub(super) const SESSION_MOVED: Code = Code(-118);

    pub(super) fn error(self, path: &str) -> Error {
        let (kind, what) = match self.0 {
            -101 => (ErrorKind::NotFound, "there is no such node"),
            -110 => (ErrorKind::Conflict, "the node exists already"),
            -111 => (ErrorKind::Conflict, "the node has children"),
            -102 => (
                ErrorKind::Denied,
                "the node's ACL denies access; authenticate as the user that created it, or change the ACL",
            ),
            -114 => (
                ErrorKind::Misconfigured,
                "the server does not take our ACL; `creator_all` needs a user and a password",
            ),
            -115 | -124 => (ErrorKind::Denied, "the server refuses our authentication"),
            i32::MIN => (
                ErrorKind::Unavailable,
                "the reply is larger than 64 MiB; too many contenders stand here",
            ),
            -127 => (
                ErrorKind::Unavailable,
                "the server is overloaded and has thrown the request out",
            ),
            -6 => (
                ErrorKind::Misconfigured,
                "the server does not know the request; ZooKeeper 3.5 or later is needed",
            ),
            -112 | -118 => (
                ErrorKind::Unreachable,
                "the server does not serve our session any more",
            ),
            _ => (
                ErrorKind::Unavailable,
                "the server cannot serve the request now",
            ),
        };
        Error::new(kind, format!("{path}: {what} (ZooKeeper error {})", self.0))
    }
}
