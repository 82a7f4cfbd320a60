//! What the driver and the server say, as errors of this crate.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use ::redis::{ErrorKind as Kind, RedisError, ServerErrorKind as Code};

use super::connection::Address;
use crate::error::{Error, ErrorKind};

const RIGHTS: &str =
    "the user needs the rights that the documentation of contend::redis lists under \"Rights\"";
const DATABASE: &str = "there is no such database, or the user may not SELECT it";
const CLOSED: &str = "the server closed the connection: did it restart? is it a Redis server?";
const SERVER: &str = "is this a Redis server, 6.2 or newer, with all commands enabled?";

/// What the server or the driver says, what it means, and what to do. The first line that matches counts.
#[rustfmt::skip]
const MEANINGS: &[(&[&str], ErrorKind, &str)] = &[
    (&["ertificate", "fatal alert"], ErrorKind::Misconfigured, "check tls, tls_ca, tls_cert and tls_key"),
    // A server that restarts closes a connection in its handshake, too: that is transient.
    (&["handshake", "corrupt message"], ErrorKind::Unreachable, "does this port speak TLS?"),
    (&["unexpected end of file", "roken pipe", "reset by peer"], ErrorKind::Unreachable, CLOSED),
    (&["answer is not Redis's"], ErrorKind::Misconfigured, "is this a Redis server?"),
    // Redis 6.2 wraps what a script's command says into a sentence of its own.
    (&["READONLY"], ErrorKind::Unavailable, "this server is a read-only replica: connect to the master"),
    (&["MASTERDOWN"], ErrorKind::Unavailable, "this server is a replica without its master: connect to the master"),
    // The first command of a connection without a password is too long for an unauthenticated one.
    (&["refused the log-in", "NOAUTH", "password", "unauthenticated"], ErrorKind::Denied, "check user and password"),
    (&["NOPERM", "ACL failure", "user executing the script can't"], ErrorKind::Denied, RIGHTS),
    (&["max number of clients"], ErrorKind::Unavailable, "raise maxclients on the server, or lower pool_size"),
    (&["OOM"], ErrorKind::Unavailable, "raise maxmemory on the server, or free some"),
    (&["NOREPLICAS"], ErrorKind::Unavailable, "fewer replicas are connected than min-replicas-to-write asks for"),
    (&["BUSY "], ErrorKind::Unavailable, "a script blocks the server"),
    (&["MISCONF"], ErrorKind::Unavailable, "the server cannot write to its disk"),
    (&["LOADING", "TRYAGAIN", "CLUSTERDOWN"], ErrorKind::Unavailable, "try again later"),
    (&["refused to switch database", "DB index is out of range"], ErrorKind::Misconfigured, DATABASE),
    (&["cluster support disabled"], ErrorKind::Misconfigured, "this server is alone: use redis://, not redis+cluster://"),
    (&["WRONGTYPE"], ErrorKind::Misconfigured, "something else uses this key: set another prefix"),
    (&["SENTINEL"], ErrorKind::Misconfigured, "this is not a sentinel; for one server write redis://"),
    (&["unknown command", "RESP3"], ErrorKind::Misconfigured, SERVER),
    (&["MOVED ", "ASK "], ErrorKind::Misconfigured, "this server is part of a cluster: use redis+cluster://"),
];

/// Why a request failed.
pub(super) struct Failure {
    pub(super) error: Error,
    pub(super) reason: Reason,
}

/// What a caller can do about a failure.
pub(super) enum Reason {
    /// The slot lives elsewhere.
    Moved(Address),
    /// The slot is on its way there: ask there, this once.
    Ask(Address),
    /// The slot is on its way, and its keys are on both sides.
    TryAgain,
    /// The connection was closed before an answer came.
    Closed,
    /// The server has become a replica.
    ReadOnly,
    /// The node does not serve its slots now; another one may.
    NotServing,
    /// Anything else.
    Other,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        let reason = Reason::Other;
        Failure { error, reason }
    }
}

impl Failure {
    /// Reads an error of the request that was sent to `server` `waited` ago.
    pub(super) fn new(error: &RedisError, server: &Address, waited: Duration) -> Failure {
        let to =
            |reason: fn(Address) -> Reason| redirected(error, server).map_or(Reason::Other, reason);
        let reason = match error.kind() {
            Kind::Server(Code::Moved) => to(Reason::Moved),
            Kind::Server(Code::Ask) => to(Reason::Ask),
            Kind::Server(Code::TryAgain) => Reason::TryAgain,
            Kind::Server(Code::ClusterDown | Code::MasterDown | Code::BusyLoading) => {
                Reason::NotServing
            }
            Kind::Io if !is_timeout(error) => Reason::Closed,
            _ if said(error, waited).contains("READONLY") => Reason::ReadOnly,
            _ => Reason::Other,
        };
        let error = match reason {
            Reason::Closed | Reason::Other => read(error, server, waited),
            // The server did nothing, which is as good.
            _ => read(error, server, waited).not_sent(),
        };
        Failure { error, reason }
    }
}

/// Where a redirection points. A node that does not know its own name leaves the host out.
fn redirected(error: &RedisError, asked: &Address) -> Option<Address> {
    let (address, _) = error.redirect_node()?;
    let (host, port) = address.rsplit_once(':')?;
    Some(asked.neighbour(host, port.parse().ok()?))
}

/// Reads an error of `server`; `waited` is how long an answer was waited for.
pub(super) fn read(error: &RedisError, server: &Address, waited: Duration) -> Error {
    let text = said(error, waited);
    let says = |needles: &[&str]| needles.iter().any(|needle| text.contains(needle));
    let known = MEANINGS.iter().find(|(needles, ..)| says(needles));
    let (kind, advice) = match (known, error.kind()) {
        (Some((_, kind, advice)), _) => (*kind, *advice),
        (None, _) if is_timeout(error) => (ErrorKind::Timeout, ""),
        (None, Kind::Io) => (ErrorKind::Unreachable, ""),
        (None, Kind::InvalidClientConfig) => (ErrorKind::InvalidInput, ""),
        (None, _) => (ErrorKind::Protocol, ""),
    };
    let link = if advice.is_empty() { "" } else { "; " };
    // Neither the driver nor the server repeats a password in an error.
    Error::new(kind, format!("redis at {server}: {text}{link}{advice}"))
}

/// Returns `true` for a timeout, or for the interruption that a paused and resumed process sees in its stead.
pub(super) fn is_timeout(error: &RedisError) -> bool {
    let cause = std::error::Error::source(error)
        .and_then(|source| source.downcast_ref::<Arc<dyn std::error::Error + Send + Sync>>())
        .and_then(|source| source.downcast_ref::<io::Error>());
    error.is_timeout() || cause.is_some_and(|it| it.kind() == io::ErrorKind::Interrupted)
}

/// The cause in one line and once.
fn said(error: &RedisError, waited: Duration) -> String {
    let text = match (error.kind(), error.code(), error.detail()) {
        _ if is_timeout(error) => format!("no answer within {} ms", waited.as_millis()),
        (Kind::Server(_) | Kind::Extension, Some(code), Some(detail)) => format!("{code} {detail}"),
        // The driver's words say it twice.
        (Kind::AuthenticationFailed, ..) => "refused the log-in".to_owned(),
        (Kind::Parse, ..) => "the answer is not Redis's".to_owned(),
        _ => error.to_string(),
    };
    // Without the arguments, in which any word may stand, and without the place in a script.
    let text = text.split(", with args beginning").next();
    let text = text.unwrap_or_default();
    let text = text.rsplit_once(" script: ").map_or(text, |(said, _)| said);
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The error of a reply that no script of this crate gives.
pub(super) fn not_understood() -> Error {
    let message = "redis: no script of this library replies so; do others use these keys?";
    Error::new(ErrorKind::Protocol, message)
}

/// An error of which nothing was sent, and that may pass.
pub(super) fn unavailable(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Unavailable, message).not_sent()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The error of a server that replied `line`.
    fn reply(line: &str) -> Error {
        let reply = ::redis::parse_redis_value(format!("-{line}\r\n").as_bytes()).unwrap();
        let error = reply.extract_error().unwrap_err();
        let server = Address::Tcp("h".to_owned(), 1);
        read(&error, &server, Duration::ZERO)
    }

    /// In the words of Redis 7.0 and of 7.2.
    #[test]
    fn denied_user_is_told_what_was_refused() {
        let place = "script: ad9f05ca, on @user_script:1.";
        for says in [
            "The user executing the script can't publish to the channel mentioned in the command",
            "ACL failure in script: User app has no permissions to run the 'publish' command",
        ] {
            let error = reply(&format!("ERR {says} {place}"));
            assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
            let says = format!("redis at h:1: ERR {says}; {RIGHTS}");
            assert_eq!(error.to_string(), says);
        }
    }

    /// Arguments are not the server's words.
    #[test]
    fn unknown_command_is_named_without_its_arguments() {
        let error = reply("ERR unknown command 'EVAL', with args beginning with: 'OOM script: '");
        let says = format!("redis at h:1: ERR unknown command 'EVAL'; {SERVER}");
        assert_eq!(error.to_string(), says);
    }
}
