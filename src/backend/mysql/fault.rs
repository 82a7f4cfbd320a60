//! What went wrong in one request: whether the connection survived it, and what it means for the caller.

use std::error::Error as _;
use std::io;

use mysql::DriverError;

use crate::error::{Error, ErrorKind};

/// A failed request. Becomes an [`Error`] with `?`; callers that retry look at it first.
#[derive(Clone, Debug)]
pub(crate) struct Fault {
    /// The server's error number; `None` where the server did not answer.
    code: Option<u16>,
    /// The connection must not be used again: its outcome is unknown, or it is read-only.
    poisoned: bool,
    /// The server will never do this.
    unsupported: bool,
    error: Error,
}

impl Fault {
    /// Sorts a driver error. Never repeats what the server says about a log-in, which names the user.
    pub(super) fn of(error: mysql::Error) -> Fault {
        match error {
            mysql::Error::MySqlError(answer) => Fault::answered(answer),
            mysql::Error::IoError(error) => Fault::unheard(&error),
            // Most of what goes wrong on the wire comes wrapped like this.
            mysql::Error::CodecError(error) => {
                match error.source().and_then(|source| source.downcast_ref()) {
                    Some(error) => Fault::unheard(error),
                    None => {
                        Fault::poison(Error::new(ErrorKind::Protocol, format!("MySQL: {error}")))
                    }
                }
            }
            mysql::Error::DriverError(error) => {
                let kind = match &error {
                    DriverError::ConnectTimeout | DriverError::Timeout => ErrorKind::Timeout,
                    DriverError::CouldNotConnect(_) => ErrorKind::Unreachable,
                    DriverError::UnknownAuthPlugin(_)
                    | DriverError::OldMysqlPasswordDisabled
                    | DriverError::CleartextPluginDisabled => ErrorKind::Denied,
                    DriverError::TlsNotSupported => ErrorKind::Misconfigured,
                    _ => ErrorKind::Protocol,
                };
                Fault::poison(Error::new(kind, format!("MySQL: {error}")).with_source(error))
            }
            #[cfg(feature = "tls")]
            mysql::Error::TlsError(error) => Fault::insecure(&error),
            error => Fault::poison(Error::new(
                ErrorKind::Protocol,
                format!("the MySQL server answered something unexpected: {error}"),
            )),
        }
    }

    /// The server said no. Nothing of the request remains, unless the connection is gone with it.
    fn answered(answer: mysql::MySqlError) -> Fault {
        let code = answer.code;
        let kind = kind_of(code);
        let message = match code {
            1045 | 1698 => "the MySQL server refused user or password".to_owned(),
            1290 | 1792 | 1836 => format!("the MySQL server is read-only ({code})"),
            _ => format!("MySQL error {code}: {}", answer.message),
        };
        let error = Error::new(kind, message);
        Fault {
            code: Some(code),
            unsupported: is_unsupported(code, &answer.message),
            // The rest is the server, or a proxy before it, ending the connection, or having lost a
            // part of what we sent.
            poisoned: is_elsewhere(code)
                || matches!(
                    code,
                    1053 | 1079 | 1152
                        ..=1161 | 1184 | 1927 | 2006 | 2013 | 2055 | 3032 | 3168 | 3169 | 4031
                ),
            error: match code {
                1045 | 1698 => error,
                _ => error.with_source(answer),
            },
        }
    }

    /// The connection broke, or nothing came in time.
    fn unheard(error: &io::Error) -> Fault {
        #[cfg(feature = "tls")]
        if error
            .get_ref()
            .is_some_and(|inner| inner.is::<rustls::Error>())
        {
            return Fault::insecure(error);
        }
        let kind = match error.kind() {
            // The own process stopped and continued: `Interrupted`, and just as unknown.
            io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => {
                ErrorKind::Timeout
            }
            _ => ErrorKind::Unreachable,
        };
        let what = match kind {
            ErrorKind::Timeout => "the MySQL server did not answer in time",
            _ => "the connection to the MySQL server broke",
        };
        Fault::poison(Error::new(kind, format!("{what}: {error}")))
    }

    /// A certificate that nobody vouches for, or no common ground: waiting does not mend it.
    #[cfg(feature = "tls")]
    fn insecure(error: &dyn std::fmt::Display) -> Fault {
        Fault::poison(Error::new(
            ErrorKind::Misconfigured,
            format!("TLS to the MySQL server failed: {error}; see tls, tls_ca and tls_verify"),
        ))
    }

    pub(super) fn poison(error: Error) -> Fault {
        Fault {
            code: None,
            poisoned: true,
            unsupported: false,
            error,
        }
    }

    /// The driver panicked on what it read.
    pub(super) fn panicked() -> Fault {
        Fault::poison(Error::new(
            ErrorKind::Protocol,
            "the MySQL driver could not read the server's answer",
        ))
    }

    /// Nothing was sent, because the answer might have come too late.
    pub(super) fn too_late() -> Fault {
        Fault {
            code: None,
            poisoned: false,
            unsupported: false,
            error: Error::new(
                ErrorKind::Timeout,
                "not enough time was left to wait for an answer of the MySQL server",
            ),
        }
    }

    /// Of a connection that was given up already.
    pub(super) fn given_up() -> Fault {
        Fault::poison(Error::new(
            ErrorKind::Unreachable,
            "the connection to the MySQL server was given up",
        ))
    }

    /// Whether the connection must be thrown away.
    pub(crate) fn is_poison(&self) -> bool {
        self.poisoned
    }

    /// Whether the server may have done what was asked, or may do it yet. `false`: surely not.
    pub(crate) fn is_outcome_unknown(&self) -> bool {
        self.poisoned && !self.code.is_some_and(is_elsewhere)
    }

    /// Lock wait timeout, or a lock that was not to be waited for: the statement did nothing, but its
    /// transaction is still open.
    pub(crate) fn is_lock_wait(&self) -> bool {
        matches!(self.code, Some(1205 | 3572))
    }

    /// Duplicate key.
    pub(crate) fn is_duplicate(&self) -> bool {
        self.code == Some(1062)
    }

    /// The statement was ended by `KILL QUERY`, or ran into a time limit.
    pub(crate) fn is_interrupted(&self) -> bool {
        matches!(self.code, Some(1317 | 1969 | 3024))
    }

    /// The server has no such function, or has it switched off: it will say the same next time.
    pub(crate) fn is_unsupported(&self) -> bool {
        self.unsupported
    }

    /// The table is not there.
    pub(crate) fn is_missing_table(&self) -> bool {
        self.code == Some(1146)
    }

    /// A number does not fit its column.
    pub(crate) fn is_out_of_range(&self) -> bool {
        self.code == Some(1264)
    }

    /// The table or a column is not what the statement was made for.
    pub(crate) fn is_schema(&self) -> bool {
        matches!(self.code, Some(1054 | 1146 | 1264 | 1366 | 1406 | 1412))
    }

    /// The error without the connection's fate.
    pub(crate) fn into_error(self) -> Error {
        self.error
    }
}

impl From<Fault> for Error {
    fn from(fault: Fault) -> Error {
        fault.error
    }
}

/// This server does not write now, but another behind the same address may: read-only, where after a
/// failover the old primary keeps old connections; or a Galera node outside of its cluster. It surely
/// did nothing.
fn is_elsewhere(code: u16) -> bool {
    matches!(code, 1047 | 1290 | 1792 | 1836)
}

/// Unknown function or syntax, not supported, disabled, not allowed to execute.
fn is_unsupported(code: u16, message: &str) -> bool {
    match code {
        1064 | 1128 | 1149 | 1235 | 1289 | 1305 | 1370 | 1630 => true,
        // "Unknown error": Percona's cluster and Vitess say in words what they do not do.
        1105 => message.contains("prohibits") || message.contains("unsupported"),
        _ => false,
    }
}

fn kind_of(code: u16) -> ErrorKind {
    match code {
        1044 | 1045 | 1130 | 1142 | 1143 | 1227 | 1251 | 1370 | 1698 | 1820 | 1862 => {
            ErrorKind::Denied
        }
        // No such database, table, column, function; syntax; not possible in this binlog format.
        1046 | 1049 | 1054 | 1064 | 1146 | 1305 | 1419 | 1665 => ErrorKind::Misconfigured,
        // Too long, wrong character set, out of range.
        1264 | 1366 | 1406 => ErrorKind::InvalidInput,
        1062 => ErrorKind::Conflict,
        // Shutting down, killed, interrupted, full, at a limit, out of memory or threads, locked,
        // read-only, out of its cluster.
        1021
        | 1023
        | 1030
        | 1037
        | 1038
        | 1040
        | 1041
        | 1047
        | 1053
        | 1079
        | 1114
        | 1129
        | 1135
        | 1152..=1161
        | 1180
        | 1184
        | 1203
        | 1205
        | 1206
        | 1213
        | 1223
        | 1226
        | 1290
        | 1317
        | 1412
        | 1461
        | 1614
        | 1615
        | 1637
        | 1792
        | 1836
        | 1927
        | 1969
        | 3024
        | 3032
        | 3058
        | 3100
        | 3101
        | 3168
        | 3169
        | 3572
        | 4031 => ErrorKind::Unavailable,
        // The client library's "cannot connect" and "gone away", as a proxy passes them on, and
        // ProxySQL's own "no server to be had in time".
        2002 | 2003 | 2006 | 2013 | 2055 | 9001 => ErrorKind::Unavailable,
        _ => ErrorKind::Protocol,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(code: u16) -> Fault {
        Fault::of(mysql::Error::MySqlError(mysql::MySqlError {
            state: "HY000".to_owned(),
            message: "Access denied for user 'root'".to_owned(),
            code,
        }))
    }

    #[test]
    fn a_read_only_server_poisons_its_connection_but_did_surely_nothing() {
        for code in [1290, 1836] {
            let fault = answer(code);
            assert!(fault.is_poison() && !fault.is_outcome_unknown());
            assert_eq!(fault.into_error().kind(), ErrorKind::Unavailable);
        }
    }

    #[test]
    fn what_passes_by_itself_is_transient() {
        for code in [
            1040, 1047, 1053, 1129, 1203, 1205, 1213, 1226, 1317, 1461, 1615, 2006, 2013, 3032,
            3058, 3100, 3101, 3168, 9001,
        ] {
            let error = answer(code).into_error();
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{code}");
            assert!(error.is_transient(), "{code}");
        }
    }

    #[test]
    fn a_connection_that_a_proxy_lost_leaves_the_outcome_unknown_and_a_node_that_waits_does_not() {
        for code in [2006, 2013] {
            assert!(answer(code).is_poison() && answer(code).is_outcome_unknown());
        }
        assert!(answer(1047).is_poison() && !answer(1047).is_outcome_unknown());
    }

    #[test]
    fn only_what_the_server_can_never_do_is_unsupported() {
        for code in [1128, 1235, 1305, 1370] {
            assert!(answer(code).is_unsupported(), "{code}");
        }
        for code in [1040, 1047, 1105, 1205, 1290, 1317, 1461, 2013] {
            assert!(!answer(code).is_unsupported(), "{code}");
        }
    }

    #[test]
    fn what_the_server_answers_leaves_the_connection_alone() {
        for code in [1062, 1205, 1213, 1146, 1317] {
            assert!(!answer(code).is_poison(), "{code}");
        }
        assert!(answer(1205).is_lock_wait() && answer(1062).is_duplicate());
        assert!(answer(1317).is_interrupted());
    }

    #[test]
    fn a_refused_log_in_says_nothing_of_the_user() {
        let error = answer(1045).into_error();
        assert_eq!(error.kind(), ErrorKind::Denied);
        assert!(!format!("{error:?}").contains("root"));
    }

    #[test]
    fn silence_and_interruption_leave_the_outcome_unknown() {
        for kind in [
            io::ErrorKind::WouldBlock,
            io::ErrorKind::Interrupted,
            io::ErrorKind::BrokenPipe,
        ] {
            let fault = Fault::of(mysql::Error::IoError(io::Error::from(kind)));
            assert!(fault.is_poison() && fault.is_outcome_unknown());
        }
        assert!(!Fault::too_late().is_poison());
    }
}
