//! One connection: how it is opened, and how it is kept from outlasting a deadline.

use std::fmt;
use std::time::Duration;

use ::redis::io::tcp::TcpSettings;
use ::redis::{
    Client, Connection, ConnectionAddr, IntoConnectionInfo, ProtocolVersion, RedisConnectionInfo,
    RedisError, Value,
};

use super::trouble::trouble;
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};

/// No call waits longer, whatever it was allowed.
const LONGEST: Duration = Duration::from_secs(3600);

/// A server's address.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Address {
    pub(super) host: String,
    pub(super) port: u16,
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

/// Everything but the address that opening a connection takes. Shows no credential.
pub(super) struct Connector {
    pub(super) settings: RedisConnectionInfo,
    pub(super) tls: bool,
    pub(super) timeout: Duration,
}

impl Connector {
    /// Opens a connection. Takes up to the timeout, so it is for threads that may wait.
    pub(super) fn open(&self, address: &Address, protocol: ProtocolVersion) -> Result<Connection> {
        let connect = || {
            let settings = self.settings.clone().set_protocol(protocol);
            let target = if self.tls {
                ConnectionAddr::TcpTls {
                    host: address.host.clone(),
                    port: address.port,
                    insecure: false,
                    tls_params: None,
                }
            } else {
                ConnectionAddr::Tcp(address.host.clone(), address.port)
            };
            // Without TCP_NODELAY a request may wait for the acknowledgement of the one before.
            let info = target
                .into_connection_info()?
                .set_redis_settings(settings)
                .set_tcp_settings(TcpSettings::default().set_nodelay(true));
            let connection = Client::open(info)?.get_connection_with_timeout(self.timeout)?;
            // A paused server answers nothing: no call without an end.
            connection.set_read_timeout(Some(self.timeout))?;
            connection.set_write_timeout(Some(self.timeout))?;
            Ok(connection)
        };
        connect().map_err(|error: RedisError| trouble(error, &address.to_string()))
    }
}

impl fmt::Debug for Connector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connector")
            .field("tls", &self.tls)
            .field("timeout", &self.timeout)
            .finish_non_exhaustive()
    }
}

/// A connection for commands.
pub(super) struct Link {
    connection: Connection,
    /// What both socket timeouts are set to.
    timeout: Duration,
    /// When it was last given back.
    pub(super) idle_since: Moment,
}

impl Link {
    pub(super) fn new(connection: Connection, timeout: Duration) -> Link {
        Link {
            connection,
            timeout,
            idle_since: Moment::now(),
        }
    }

    /// Sends one packed command before `by`. On a connection that owes no reply it does not even wait:
    /// all that was sent before has arrived, so there is room for a command in the socket.
    ///
    /// After an `Err`, here or in [`Link::receive`], the connection is off by one reply, or worse: it
    /// must be thrown away.
    pub(super) fn send(
        &mut self,
        command: &[u8],
        by: Moment,
    ) -> std::result::Result<(), RedisError> {
        self.limit(by)?;
        self.connection.send_packed_command(command)
    }

    /// Reads the reply to what was sent, before `by`.
    pub(super) fn receive(&mut self, by: Moment) -> std::result::Result<Value, RedisError> {
        self.limit(by)?;
        self.connection.recv_response()
    }

    fn limit(&mut self, by: Moment) -> std::result::Result<(), RedisError> {
        let left = by.remaining().min(LONGEST);
        // Setting a timeout is a system call, and most calls have the same budget as the one before:
        // what is set may stay as long as it is not beyond `by` and not far below it.
        if self.timeout > left || self.timeout < left / 4 * 3 {
            let timeout = left / 8 * 7;
            if timeout < Duration::from_millis(1) {
                return Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into());
            }
            self.connection.set_read_timeout(Some(timeout))?;
            self.connection.set_write_timeout(Some(timeout))?;
            self.timeout = timeout;
        }
        Ok(())
    }
}

/// The error of a wait for something of ours that took too long.
pub(super) fn late(what: &str, place: &Address) -> Error {
    Error::new(
        ErrorKind::Timeout,
        format!("redis at {place}: {what} took too long"),
    )
}
