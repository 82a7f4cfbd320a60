//! What the driver and the server say, as errors of this crate.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use ::redis::{ErrorKind as Kind, RedisError, ServerErrorKind};

use super::connection::Address;
use crate::error::{Error, ErrorKind};

const RIGHTS: &str = "; the user needs the commands EVAL, EVALSHA, PUBLISH, SUBSCRIBE, UNSUBSCRIBE, HELLO, PING, TIME, \
     MGET, GET, SET, PSETEX, DEL, EXISTS, PTTL, PEXPIRE, ZADD, ZREM and ZPOPMIN (and to list and \
     inspect mutexes SCAN and ZRANGE, in a cluster CLUSTER SLOTS, with Sentinel ROLE), and the keys and channels under the prefix";

/// Why a call failed, as far as the caller acts on it.
pub(super) enum CallError {
    /// The slot lives elsewhere, and nothing was done here.
    Moved(Option<Address>),
    /// The slot is on its way there: ask there, this once.
    Ask(Address),
    /// The slot is on its way, and its keys are on both sides. Nothing was done.
    TryAgain(Error),
    /// The connection was closed before an answer came: the outcome is unknown.
    Closed(Error),
    /// The server has become a replica. Nothing was done.
    ReadOnly(Error),
    /// The node cannot speak for its cluster. Nothing was done.
    ClusterDown(Error),
    /// Anything else.
    Other(Error),
}

pub(super) type CallResult<T> = std::result::Result<T, CallError>;

impl CallError {
    /// Reads an error of the request that was sent to `server` `waited` ago.
    pub(super) fn new(error: RedisError, server: &Address, waited: Duration) -> CallError {
        let text = said(&error);
        match error.kind() {
            Kind::Server(ServerErrorKind::Moved) => {
                return CallError::Moved(redirected(&error, server));
            }
            Kind::Server(ServerErrorKind::Ask) => {
                if let Some(address) = redirected(&error, server) {
                    return CallError::Ask(address);
                }
            }
            _ => {}
        }
        let closed = error.is_io_error() && !is_timeout(&error);
        let kind = error.kind();
        let error = read(&error, server, waited);
        match kind {
            _ if closed => CallError::Closed(error),
            Kind::Server(ServerErrorKind::TryAgain) => CallError::TryAgain(error),
            Kind::Server(ServerErrorKind::ClusterDown) => CallError::ClusterDown(error),
            // Redis 6.2 wraps what a script's command says into a sentence of its own: hence the words.
            Kind::Server(ServerErrorKind::ReadOnly) => CallError::ReadOnly(error),
            _ if text.contains("READONLY") => CallError::ReadOnly(error),
            _ => CallError::Other(error),
        }
    }

    pub(super) fn into_error(self) -> Error {
        match self {
            CallError::TryAgain(error)
            | CallError::Closed(error)
            | CallError::ReadOnly(error)
            | CallError::ClusterDown(error)
            | CallError::Other(error) => error,
            CallError::Moved(_) | CallError::Ask(_) => Error::new(
                ErrorKind::Misconfigured,
                "redis: the mutex lives on another node; this server is part of a cluster: use \
                 redis+cluster://",
            ),
        }
    }
}

/// Where a redirection points. A node that does not know its own name leaves the host out.
fn redirected(error: &RedisError, asked: &Address) -> Option<Address> {
    let (host, port) = error.redirect_node().and_then(|(address, _)| {
        let (host, port) = address.rsplit_once(':')?;
        Some((host, port.parse().ok()?))
    })?;
    Some(asked.neighbour(host, port))
}

/// Reads an error of `server`; `waited` is how long an answer was waited for.
pub(super) fn read(error: &RedisError, server: &Address, waited: Duration) -> Error {
    if is_timeout(error) {
        return Error::new(
            ErrorKind::Timeout,
            format!(
                "redis at {server}: no answer within {} ms",
                waited.as_millis()
            ),
        );
    }
    let text = said(error);
    let (kind, advice) = judge(error, &text);
    // Neither the driver nor the server repeats a password in an error.
    Error::new(kind, format!("redis at {server}: {text}{advice}"))
}

/// Reads an error of `server` to which a connection is being opened.
pub(super) fn read_opening(error: &RedisError, server: &Address, waited: Duration) -> Error {
    let closed = io_error(error).is_some_and(|error| {
        matches!(
            error.kind(),
            io::ErrorKind::UnexpectedEof
                | io::ErrorKind::ConnectionReset
                | io::ErrorKind::ConnectionAborted
                | io::ErrorKind::BrokenPipe
        )
    });
    let error = read(error, server, waited);
    // What is said of TLS says more.
    if !closed || error.kind() != ErrorKind::Unreachable || error.to_string().contains("TLS") {
        return error;
    }
    // As servers of other kinds do. One that restarts does so, too: it may pass.
    Error::new(
        ErrorKind::Unreachable,
        format!(
            "redis at {server}: closed the connection without an answer; is this a Redis server?"
        ),
    )
}

/// Returns `true` for a timeout, or for the interruption that a paused and resumed process sees in its stead.
pub(super) fn is_timeout(error: &RedisError) -> bool {
    let interrupted = |error: &io::Error| error.kind() == io::ErrorKind::Interrupted;
    error.is_timeout() || io_error(error).is_some_and(interrupted)
}

fn io_error(error: &RedisError) -> Option<&io::Error> {
    std::error::Error::source(error)
        .and_then(|source| source.downcast_ref::<Arc<dyn std::error::Error + Send + Sync>>())
        .and_then(|source| source.downcast_ref())
}

/// The cause in one line and once.
fn said(error: &RedisError) -> String {
    let text = match (error.kind(), error.code(), error.detail()) {
        (Kind::Server(_) | Kind::Extension, Some(code), Some(detail)) => format!("{code} {detail}"),
        // The driver's words say it twice.
        (Kind::AuthenticationFailed, ..) => "refused the log-in".to_owned(),
        (Kind::Parse, ..) => "the answer is not Redis's".to_owned(),
        _ => error.to_string(),
    };
    // What follows names a place inside a script, or repeats the arguments, where any word may stand.
    let text = text.split(" script: ").next().unwrap_or_default();
    let text = text
        .split(", with args beginning")
        .next()
        .unwrap_or_default();
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn judge(error: &RedisError, text: &str) -> (ErrorKind, &'static str) {
    let says = |word: &str| text.contains(word);
    match error.kind() {
        Kind::Io if says("certificate") || says("Certificate") || says("fatal alert") => (
            ErrorKind::Misconfigured,
            "; check tls, tls_ca, tls_cert and tls_key",
        ),
        // A server that restarts closes a connection in its handshake, too.
        Kind::Io if says("handshake") || says("corrupt message") => {
            (ErrorKind::Unreachable, "; does this port speak TLS?")
        }
        Kind::Io => (ErrorKind::Unreachable, ""),
        kind if kind == Kind::Server(ServerErrorKind::ReadOnly) || says("READONLY") => (
            ErrorKind::Unavailable,
            "; this server is a read-only replica: connect to the master",
        ),
        Kind::Parse => (ErrorKind::Misconfigured, "; is this a Redis server?"),
        // The last one: the first command of a connection without a password is too long for a stranger.
        _ if says("WRONGPASS")
            || says("NOAUTH")
            || says("invalid password")
            || says("without any password")
            || says("unauthenticated") =>
        {
            (ErrorKind::Denied, "; check user and password")
        }
        Kind::AuthenticationFailed => (ErrorKind::Denied, "; check user and password"),
        _ if says("NOPERM")
            || says("ACL failure")
            || says("user executing the script can't")
            || says("can't run this command") =>
        {
            (ErrorKind::Denied, RIGHTS)
        }
        _ if says("max number of clients") => (
            ErrorKind::Unavailable,
            "; raise maxclients on the server, or lower pool_size",
        ),
        _ if says("OOM") => (
            ErrorKind::Unavailable,
            "; raise maxmemory on the server, or free some",
        ),
        _ if says("NOREPLICAS") => (
            ErrorKind::Unavailable,
            "; fewer replicas are connected than min-replicas-to-write asks for",
        ),
        _ if says("BUSY ") => (ErrorKind::Unavailable, "; a script blocks the server"),
        _ if says("LOADING") => (ErrorKind::Unavailable, "; try again when it is done"),
        _ if says("MASTERDOWN") => (
            ErrorKind::Unavailable,
            "; this server is a replica without its master: connect to the master",
        ),
        _ if says("MISCONF") => (
            ErrorKind::Unavailable,
            "; the server cannot write to its disk",
        ),
        Kind::Server(
            ServerErrorKind::TryAgain
            | ServerErrorKind::ClusterDown
            | ServerErrorKind::Moved
            | ServerErrorKind::Ask,
        ) => (ErrorKind::Unavailable, ""),
        Kind::RESP3NotSupported => (
            ErrorKind::Misconfigured,
            "; Redis 6.2 or newer (or Valkey) is needed",
        ),
        _ if says("refused to switch database") || says("DB index is out of range") => (
            ErrorKind::Misconfigured,
            "; there is no such database, or the user may not SELECT it",
        ),
        _ if says("cluster support disabled") => (
            ErrorKind::Misconfigured,
            "; this server is not part of a cluster: use redis:// instead of redis+cluster://",
        ),
        _ if says("WRONGTYPE") => (
            ErrorKind::Misconfigured,
            "; something else uses this key: set another prefix",
        ),
        _ if says("unknown command") => (
            ErrorKind::Misconfigured,
            "; is this a Redis server, 6.2 or newer, with all commands enabled?",
        ),
        Kind::InvalidClientConfig => (ErrorKind::InvalidInput, ""),
        _ => (ErrorKind::Protocol, ""),
    }
}

/// The error of a reply that none of our scripts gives.
pub(super) fn not_understood() -> Error {
    Error::new(
        ErrorKind::Protocol,
        "redis: a reply that no script of this library gives; does something else use these keys?",
    )
}
