//! A driver's error, mapped to this crate's: whether the connection survived it, and what it means for the caller.

use std::error::Error as _;
use std::io;
use std::time::Duration;

use mysql::DriverError;

use crate::error::{Error, ErrorKind};

/// A failed request. Becomes an [`Error`] with `?`; callers that retry look at it first.
#[derive(Clone, Debug)]
pub(crate) struct RequestError {
    /// The server's error number; `None` where the server did not answer.
    pub(crate) code: Option<u16>,
    /// The connection must not be used again: its outcome is unknown, or it is read-only.
    pub(crate) poisoned: bool,
    error: Error,
}

impl RequestError {
    /// Maps a driver error of a request that was given `patience` to be answered in.
    pub(super) fn new(error: mysql::Error, patience: Duration) -> RequestError {
        let error = match error {
            mysql::Error::MySqlError(answer) => return RequestError::answered(&answer),
            mysql::Error::IoError(error) => from_io(&error, patience),
            // Most of what goes wrong on the wire comes wrapped like this.
            mysql::Error::CodecError(error) => {
                match error.source().and_then(|source| source.downcast_ref()) {
                    Some(error) => from_io(error, patience),
                    None => not_understood(&error),
                }
            }
            mysql::Error::DriverError(error) => from_driver(error, patience),
            #[cfg(feature = "tls")]
            mysql::Error::TlsError(error) => insecure(&error),
            error => not_understood(&error),
        };
        RequestError::poison(error)
    }

    /// The server said no.
    fn answered(answer: &mysql::MySqlError) -> RequestError {
        let code = answer.code;
        let message = format!("MySQL error {code}: {}", answer.message);
        RequestError {
            code: Some(code),
            poisoned: !leaves_connection_alone(code),
            error: Error::new(kind_of(code), message),
        }
    }

    pub(super) fn poison(error: Error) -> RequestError {
        RequestError {
            code: None,
            poisoned: true,
            error,
        }
    }

    /// Nothing was sent, because the answer might have come too late.
    pub(super) fn no_time_left() -> RequestError {
        let message = "no time was left to wait for an answer of the MySQL server";
        RequestError {
            code: None,
            poisoned: false,
            error: Error::new(ErrorKind::Timeout, message).not_sent(),
        }
    }

    /// Of a connection that was given up before.
    pub(super) fn closed() -> RequestError {
        let message = "the connection to the MySQL server was given up";
        RequestError::poison(Error::new(ErrorKind::Unreachable, message).not_sent())
    }

    /// Marks a request that only prepared the one that matters.
    pub(super) fn not_sent(mut self) -> RequestError {
        self.error = self.error.not_sent();
        self
    }

    /// Returns `true` for a duplicate key.
    pub(crate) fn is_duplicate(&self) -> bool {
        self.code == Some(1062)
    }

    /// Returns `true` if the statement was ended by `KILL QUERY` or by a time limit.
    pub(super) fn is_interrupted(&self) -> bool {
        matches!(self.code, Some(1317 | 1969 | 3024))
    }

    /// Returns `true` if the table is not there.
    pub(crate) fn is_missing_table(&self) -> bool {
        self.code == Some(1146)
    }

    /// Returns `true` if the user may not use the table in this way.
    pub(crate) fn is_missing_grant(&self) -> bool {
        self.code == Some(1142)
    }

    /// Returns `true` if the table or a column is not what the statement was made for.
    pub(crate) fn is_schema(&self) -> bool {
        self.code.is_some_and(is_schema)
    }
}

impl From<RequestError> for Error {
    fn from(error: RequestError) -> Error {
        error.error
    }
}

/// The connection broke, or nothing came in time.
fn from_io(error: &io::Error, patience: Duration) -> Error {
    #[cfg(feature = "tls")]
    if let Some(inner) = error.get_ref()
        && inner.is::<rustls::Error>()
    {
        return insecure(error);
    }
    match error.kind() {
        // This process was stopped and continued: `Interrupted`, and just as unknown.
        io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => {
            no_answer(patience)
        }
        _ => {
            let message = format!("the connection to the MySQL server broke: {error}");
            Error::new(ErrorKind::Unreachable, message)
        }
    }
}

fn from_driver(error: DriverError, patience: Duration) -> Error {
    let kind = match &error {
        DriverError::ConnectTimeout | DriverError::Timeout => return no_answer(patience),
        DriverError::CouldNotConnect(_) => ErrorKind::Unreachable,
        // MySQL 9 asks a user that it does not know for a plugin that the driver does not have.
        DriverError::UnknownAuthPlugin(_) => ErrorKind::Denied,
        DriverError::TlsNotSupported => ErrorKind::Misconfigured,
        _ => ErrorKind::Protocol,
    };
    Error::new(kind, format!("MySQL driver: {error}"))
}

/// No certificate that can be checked, or no common ground: a retry cannot fix it.
#[cfg(feature = "tls")]
fn insecure(error: &dyn std::fmt::Display) -> Error {
    let advice = "see tls, tls_ca, tls_cert and tls_key";
    let message = format!("TLS to the MySQL server failed: {error}; {advice}");
    Error::new(ErrorKind::Misconfigured, message)
}

fn not_understood(error: &dyn std::fmt::Display) -> Error {
    let message = format!("not understood: {error}; is this a MySQL server?");
    Error::new(ErrorKind::Protocol, message)
}

fn no_answer(patience: Duration) -> Error {
    let ms = patience.as_millis();
    let message = format!("the MySQL server gave no answer within {ms} ms");
    Error::new(ErrorKind::Timeout, message)
}

/// The server answered the statement by an error, and nothing of it remains. Any other number may come from a server,
/// or a proxy before it, that ends the connection or has lost a part of what was sent; or from one that is read-only,
/// while after a failover another one behind the same address is not.
fn leaves_connection_alone(code: u16) -> bool {
    // There already: table, column, key; KILL without its aim; missing grant; locked, deadlock; interrupted; too many
    // prepared statements.
    let there = matches!(code, 1050 | 1060 | 1062 | 1068);
    let refused = matches!(code, 1094 | 1095 | 1142 | 1143 | 1227 | 1370);
    let passing = matches!(code, 1205 | 1213 | 1317 | 1461 | 1969 | 3024);
    kind_of(code) == ErrorKind::Misconfigured || there || refused || passing || is_schema(code)
}

fn is_schema(code: u16) -> bool {
    matches!(code, 1054 | 1146 | 1264 | 1292 | 1364 | 1366 | 1406 | 1412)
}

/// What a retry cannot fix is known; every other number may pass by itself.
fn kind_of(code: u16) -> ErrorKind {
    match code {
        1044 | 1045 | 1130 | 1142 | 1143 | 1227 | 1251 | 1370 | 1698 | 1820 | 1862 | 3118
        | 3159 | 3879 | 3955 | 4151 => ErrorKind::Denied,
        // No such database, table, column, function; syntax; not possible with this table or binlog
        // format; a value that a column cannot hold.
        1046 | 1049 | 1054 | 1064 | 1128 | 1146 | 1149 | 1235 | 1264 | 1267 | 1292 | 1305
        | 1364 | 1366 | 1406 | 1419 | 1665 | 1690 => ErrorKind::Misconfigured,
        1062 => ErrorKind::Conflict,
        // Interrupted, perhaps in a COMMIT: what it was to do may be done.
        1317 | 1969 | 3024 => ErrorKind::Timeout,
        _ => ErrorKind::Unavailable,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(code: u16) -> RequestError {
        let error = mysql::Error::MySqlError(mysql::MySqlError {
            state: "HY000".to_owned(),
            message: "no".to_owned(),
            code,
        });
        RequestError::new(error, Duration::from_secs(1))
    }

    #[test]
    fn unknown_code_is_transient_and_poisons_its_connection() {
        for code in [
            1040, 1047, 1053, 1105, 1129, 1226, 1290, 1836, 2006, 2013, 3032, 9001,
        ] {
            let error = answer(code);
            assert!(error.poisoned, "{code}");
            assert_eq!(Error::from(error).kind(), ErrorKind::Unavailable, "{code}");
        }
        for code in [1044, 1045, 1049, 1142, 1146] {
            assert!(!Error::from(answer(code)).is_transient(), "{code}");
        }
    }

    #[test]
    fn answer_to_a_statement_leaves_the_connection_alone() {
        for code in [1060, 1062, 1094, 1142, 1146, 1205, 1213, 1317, 1461] {
            assert!(!answer(code).poisoned, "{code}");
        }
    }

    #[test]
    fn silence_poisons_its_connection_and_says_how_long() {
        for kind in [io::ErrorKind::WouldBlock, io::ErrorKind::BrokenPipe] {
            let error = mysql::Error::IoError(io::Error::from(kind));
            let error = RequestError::new(error, Duration::from_millis(750));
            assert!(error.poisoned);
            if kind == io::ErrorKind::WouldBlock {
                let text = Error::from(error).to_string();
                assert!(text.ends_with("no answer within 750 ms"), "{text}");
            }
        }
    }
}
