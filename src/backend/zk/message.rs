//! What is said in the frames: requests, replies, events, and the server's error codes.

use std::sync::Arc;

use super::path::Line;
use super::watches::Kind;
use super::wire::{Decoder, Encoder};
use crate::error::{Error, ErrorKind, Result};

/// Reserved transaction ids.
pub(super) const XID_EVENT: i32 = -1;
pub(super) const XID_AUTH: i32 = -4;
pub(super) const XID_SET_WATCHES: i32 = -8;

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
    /// Every client may do anything.
    Open,
    /// Only clients that have authenticated as the same user may do anything.
    CreatorAll,
}

/// What the scheme `.1` and the id `.2` may do, as bits.
type Permission = (i32, &'static str, &'static str);

const READ: i32 = 1;
const CREATE: i32 = 4;
const ALL: i32 = 31;

const CREATOR: Permission = (ALL, "auth", "");

impl Acl {
    pub(super) fn permissions(self) -> &'static [Permission] {
        match self {
            Acl::Open => &[(ALL, "world", "anyone")],
            Acl::CreatorAll => &[CREATOR],
        }
    }

    /// The permissions of `/simba` and the nodes above it: they do not belong to the first user alone.
    pub(super) fn permissions_above(self) -> &'static [Permission] {
        match self {
            Acl::Open => self.permissions(),
            Acl::CreatorAll => &[(READ | CREATE, "world", "anyone"), CREATOR],
        }
    }
}

/// What the server keeps about a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stat {
    /// The transaction that created the node: grows over all nodes of an ensemble.
    pub czxid: u64,
    /// When the node was created, in epoch milliseconds on the leader's clock.
    pub ctime: u64,
    /// When its data was written last, in epoch milliseconds on the leader's clock.
    pub mtime: u64,
    /// The session with which the node ends; zero for nodes that stay.
    pub ephemeral_owner: i64,
}

/// A request to a server. Paths are full ones, with the chroot.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Request {
    /// Creates a node.
    Create {
        /// Where. The server appends a number if `mode` is sequential.
        path: String,
        /// The node's data.
        data: Vec<u8>,
        /// What it is.
        mode: Mode,
        /// Who may do what with it.
        permissions: &'static [Permission],
    },
    /// Deletes a node.
    Delete(String),
    /// Reads what the server keeps about a node.
    Exists(String),
    /// Reads the data of a node.
    Data(String),
    /// Reads the names of a node's children.
    Children(String),
    /// Writes data to a node if the node at `check` exists. Even without a write it is answered only after a quorum
    /// has written it down.
    Multi {
        /// The node that must exist.
        check: String,
        /// The node to be written to, and what.
        write: Option<(String, Vec<u8>)>,
    },
    /// Lets the server drop all of the session's watches on a node.
    Unwatch(String),
    /// Lets the server catch up with the leader.
    Sync,
    /// Ends the session.
    Close,
}

/// The server's answer to a request: what was asked for, or why not.
pub type Outcome = std::result::Result<Reply, Code>;

/// What was asked for. What the request did not ask for is empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Reply {
    /// The path of the node that was created.
    pub path: String,
    /// The node's data.
    pub data: Vec<u8>,
    /// What the server keeps about the node.
    pub stat: Stat,
    /// The node's children. Shared by all callers that asked for them together.
    pub line: Arc<Line>,
}

/// What was asked for; `None` if the node at `path` is not there.
pub(super) fn found(outcome: Outcome, path: &str) -> Result<Option<Reply>> {
    match outcome {
        Ok(reply) => Ok(Some(reply)),
        Err(Code::NO_NODE) => Ok(None),
        Err(code) => Err(code.error(path)),
    }
}

impl Request {
    /// Returns a request to create a node.
    #[must_use]
    pub fn create(path: &str, data: &[u8], mode: Mode, acl: &'static [Permission]) -> Request {
        Request::Create {
            path: path.to_owned(),
            data: data.to_vec(),
            mode,
            permissions: acl,
        }
    }

    /// The node that it is about.
    pub(super) fn path(&self) -> &str {
        match self {
            Request::Create { path, .. }
            | Request::Multi { check: path, .. }
            | Request::Delete(path)
            | Request::Exists(path)
            | Request::Data(path)
            | Request::Children(path)
            | Request::Unwatch(path) => path,
            Request::Sync | Request::Close => "/",
        }
    }

    /// `watch`: the server is to tell what happens to the node next. Only for reads.
    pub(super) fn encode(&self, xid: i32, watch: bool, out: &mut Encoder) {
        out.frame(|out| {
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
                    out.int(op).text(path).buffer(data);
                    out.count(permissions.len());
                    for (bits, scheme, id) in *permissions {
                        out.int(*bits).text(scheme).text(id);
                    }
                    out.int(flags)
                }
                Request::Delete(path) => out.int(2).text(path).int(-1),
                Request::Exists(path) => out.int(3).text(path).bool(watch),
                Request::Data(path) => out.int(4).text(path).bool(watch),
                Request::Children(path) => out.int(8).text(path).bool(watch),
                Request::Multi { check, write } => {
                    // Before each operation and at the end: which it is, whether that was the last one, and no error.
                    // After it: any version.
                    out.int(14);
                    out.int(13).bool(false).int(-1).text(check).int(-1);
                    if let Some((path, data)) = write {
                        out.int(5).bool(false).int(-1).text(path).buffer(data);
                        out.int(-1);
                    }
                    out.int(-1).bool(true).int(-1)
                }
                Request::Unwatch(path) => out.int(18).text(path).int(3),
                Request::Sync => out.int(9).text("/"),
                Request::Close => out.int(-11),
            };
        });
    }

    /// Decodes the body of the reply to this request.
    pub(super) fn decode(&self, mut body: Decoder<'_>) -> Result<Outcome> {
        let mut reply = Reply::default();
        match self {
            Request::Create { .. } => {
                reply.path = body.text()?;
                reply.stat = stat(&mut body)?;
            }
            Request::Exists(_) => reply.stat = stat(&mut body)?,
            Request::Data(_) => {
                reply.data = body.buffer()?.to_vec();
                reply.stat = stat(&mut body)?;
            }
            Request::Children(_) => reply.line = Arc::new(Line::new(body.texts()?)),
            Request::Multi { .. } => return operations(&mut body),
            Request::Delete(_) | Request::Unwatch(_) | Request::Sync | Request::Close => {}
        }
        Ok(Ok(reply))
    }
}

/// The results of the operations of a `multi`. Where one failed, none was done: the one at fault has
/// its own code, the others have `OK` or `RUNTIME_INCONSISTENCY`.
fn operations(body: &mut Decoder<'_>) -> Result<Outcome> {
    let mut outcome = Ok(Reply::default());
    while let (-1, false, _code) = (body.int()?, body.bool()?, body.int()?) {
        match Code(body.int()?) {
            Code::OK | Code::RUNTIME_INCONSISTENCY => outcome = Err(Code::RUNTIME_INCONSISTENCY),
            code => return Ok(Err(code)),
        }
    }
    Ok(outcome)
}

fn stat(body: &mut Decoder<'_>) -> Result<Stat> {
    let mut number = || body.long().map(i64::cast_unsigned);
    let (czxid, _mzxid, ctime, mtime) = (number()?, number()?, number()?, number()?);
    let _versions = [body.int()?, body.int()?, body.int()?];
    let ephemeral_owner = body.long()?;
    let _data_length_and_children = [body.int()?, body.int()?];
    let _pzxid = body.long()?;
    Ok(Stat {
        czxid,
        ctime,
        mtime,
        ephemeral_owner,
    })
}

/// Decodes the head of every frame but the handshake's: the xid, the zxid, and the code.
pub(super) fn decode_head(frame: &mut Decoder<'_>) -> Result<(i32, i64, Code)> {
    Ok((frame.int()?, frame.long()?, Code(frame.int()?)))
}

/// Decodes that something happened to a watched node: its path, and whether it was deleted. The path is empty if it is
/// about the session.
pub(super) fn decode_event(mut body: Decoder<'_>) -> Result<(String, bool)> {
    let (change, _state) = (body.int()?, body.int()?);
    Ok((body.text()?, change == 2))
}

/// By which a server knows a session.
#[derive(Default)]
pub(super) struct Pass {
    pub(super) id: i64,
    password: Vec<u8>,
}

impl Pass {
    /// The first frame of a connection: resumes the session, or opens one if the id is zero. Not on a server that has
    /// lost its quorum: it could not keep a lock.
    pub(super) fn encode(&self, last_zxid: i64, timeout_ms: i32, out: &mut Encoder) {
        out.frame(|out| {
            out.int(0).long(last_zxid).int(timeout_ms);
            out.long(self.id).buffer(&self.password).bool(false);
        });
    }

    /// The server's answer to the first frame, with the session timeout: zero or less if the session has expired.
    pub(super) fn decode(frame: &[u8]) -> Result<(i32, Pass)> {
        let mut body = Decoder::new(frame);
        let (_version, timeout_ms) = (body.int()?, body.int()?);
        let (id, password) = (body.long()?, body.buffer()?.to_vec());
        Ok((timeout_ms, Pass { id, password }))
    }
}

/// Authenticates the connection with `user:password`.
pub(super) fn encode_digest(out: &mut Encoder, digest: &str) {
    out.frame(|out| {
        out.int(XID_AUTH).int(100);
        out.int(0).text("digest").text(digest);
    });
}

/// Asks a server that does not know this session's watches to keep them from now on, and to tell at once what
/// happened to their nodes since `last_zxid`.
pub(super) fn encode_set_watches(out: &mut Encoder, last_zxid: i64, watches: &[(Kind, &str)]) {
    out.frame(|out| {
        out.int(XID_SET_WATCHES).int(101).long(last_zxid);
        for kind in [Kind::Data, Kind::Exists, Kind::Children] {
            let paths = watches.iter().filter(|(of, _)| *of == kind);
            out.count(paths.clone().count());
            paths.for_each(|(_, path)| _ = out.text(path));
        }
    });
}

/// What the server says about a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Code(pub(super) i32);

impl Code {
    pub(super) const OK: Code = Code(0);
    pub(super) const RUNTIME_INCONSISTENCY: Code = Code(-2);
    pub(super) const NO_NODE: Code = Code(-101);
    pub(super) const NO_AUTH: Code = Code(-102);
    pub(super) const NODE_EXISTS: Code = Code(-110);
    pub(super) const SESSION_EXPIRED: Code = Code(-112);
    pub(super) const SESSION_MOVED: Code = Code(-118);

    /// Returns the error that this is for a request about the node at `path`.
    #[must_use]
    pub fn error(self, path: &str) -> Error {
        use ErrorKind::{Denied, Misconfigured, NotFound, Unavailable, Unreachable};
        let (kind, what) = match self.0 {
            -101 => (NotFound, "there is no such node"),
            -102 => (
                Denied,
                "the node's ACL denies access; authenticate as the user that created it, or change the ACL",
            ),
            -114 => (
                Misconfigured,
                "the server does not take our ACL; `creator_all` needs a user and a password",
            ),
            -115 | -124 => (Denied, "the server refuses our authentication"),
            -127 => (
                Unavailable,
                "the server is overloaded and has thrown the request out",
            ),
            -6 => (
                Misconfigured,
                "the server does not know the request; ZooKeeper 3.5 or later is needed",
            ),
            -112 | -118 => (
                Unreachable,
                "the server does not serve our session any more",
            ),
            _ => (Unavailable, "the server cannot serve the request now"),
        };
        Error::new(kind, format!("{path}: {what} (ZooKeeper error {})", self.0))
    }
}
