//! What went wrong, in the words of this crate.

use std::sync::Arc;

use ::redis::{ErrorKind as Kind, RedisError, ServerErrorKind};

use crate::error::{Error, ErrorKind};

const RIGHTS: &str = "; the user needs the commands EVAL, EVALSHA, PUBLISH, SUBSCRIBE, UNSUBSCRIBE, \
     HELLO, TIME, GET, SET, DEL, PTTL, PEXPIRE, HMGET, HSET, ZADD, ZREM, ZRANGE and ZPOPMIN (in a cluster also \
     CLUSTER SLOTS), and the keys and channels under the prefix";

/// An error of the driver or the server. `place` is the server's address.
pub(super) fn trouble(error: RedisError, place: &str) -> Error {
    let (kind, advice) = judge(&error);
    // Neither the driver nor the server repeats a password in an error.
    Error::new(kind, format!("redis at {place}: {error}{advice}")).with_source(error)
}

/// The server redirected us: the slot lives elsewhere, and nothing was done.
pub(super) fn is_moved(error: &RedisError) -> bool {
    error.kind() == Kind::Server(ServerErrorKind::Moved)
}

/// A timeout, or the interruption that a paused and resumed process sees in its stead.
pub(super) fn is_timeout(error: &RedisError) -> bool {
    error.is_timeout()
        || std::error::Error::source(error)
            .and_then(|source| source.downcast_ref::<Arc<dyn std::error::Error + Send + Sync>>())
            .and_then(|source| source.downcast_ref::<std::io::Error>())
            .is_some_and(|error| error.kind() == std::io::ErrorKind::Interrupted)
}

fn judge(error: &RedisError) -> (ErrorKind, &'static str) {
    if is_timeout(error) {
        return (ErrorKind::Timeout, "");
    }
    if error.is_io_error() {
        return (ErrorKind::Unreachable, "");
    }
    let text = error.to_string();
    let says = |word: &str| text.contains(word);
    match error.kind() {
        // Redis 6.2 wraps what a script's command says into a sentence of its own: hence the words.
        kind if kind == Kind::Server(ServerErrorKind::ReadOnly) || says("READONLY") => (
            ErrorKind::Unavailable,
            "; this server is a read-only replica: connect to the master",
        ),
        Kind::Server(
            ServerErrorKind::BusyLoading
            | ServerErrorKind::TryAgain
            | ServerErrorKind::ClusterDown
            | ServerErrorKind::MasterDown
            | ServerErrorKind::Moved
            | ServerErrorKind::Ask,
        ) => (ErrorKind::Unavailable, ""),
        Kind::AuthenticationFailed => (ErrorKind::Denied, "; check user and password"),
        // The last one: the first command of a connection without a password is too long for a stranger.
        _ if says("WRONGPASS")
            || says("NOAUTH")
            || says("invalid password")
            || says("unauthenticated") =>
        {
            (ErrorKind::Denied, "; check user and password")
        }
        Kind::Server(ServerErrorKind::NoPerm) => (ErrorKind::Denied, RIGHTS),
        _ if says("NOPERM") || says("ACL failure") || says("can't run this command") => {
            (ErrorKind::Denied, RIGHTS)
        }
        Kind::RESP3NotSupported => (
            ErrorKind::Misconfigured,
            "; Redis 6.2 or newer (or Valkey) is needed",
        ),
        _ if says("refused to switch database") => (
            ErrorKind::Misconfigured,
            "; there is no such database, or the user may not SELECT it",
        ),
        _ if says("cluster support disabled") => (
            ErrorKind::Misconfigured,
            "; this server is no cluster: use redis:// instead of redis+cluster://",
        ),
        _ if says("maxclients")
            || says("OOM")
            || says("MISCONF")
            || says("NOREPLICAS")
            || says("BUSY") =>
        {
            (ErrorKind::Unavailable, "")
        }
        Kind::InvalidClientConfig => (ErrorKind::InvalidInput, ""),
        Kind::Io => (ErrorKind::Unreachable, ""),
        _ => (ErrorKind::Protocol, ""),
    }
}
