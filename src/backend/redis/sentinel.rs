//! Sentinel: who the master is, asked whenever a connection is opened.
//!
//! A failover loses what the old master acknowledged and did not replicate, so a second owner is possible
//! and only a checked fence keeps the two apart. `min-replicas-to-write 1` on the servers makes an isolated
//! master stop granting.

use std::sync::atomic::{AtomicUsize, Ordering};

use ::redis::{ConnectionLike, ProtocolVersion, Value, cmd};

use super::connection::{Address, Connector};
use super::error::{not_understood, read, unavailable};
use crate::error::{Error, ErrorKind, Result};

/// The sentinels that watch one master.
pub(super) struct Sentinels {
    /// What they call the master.
    pub(super) name: String,
    pub(super) addresses: Vec<Address>,
    /// How to log in to them.
    pub(super) connector: Connector,
    /// The one that answered last: it is asked first.
    pub(super) first: AtomicUsize,
}

impl Sentinels {
    /// Opens a connection to the master, which must say that it is one: for a while after a failover
    /// a sentinel may name the old one.
    pub(super) fn open_master(
        &self,
        connector: &Connector,
        protocol: ProtocolVersion,
    ) -> Result<(Address, ::redis::Connection)> {
        let first = self.first.load(Ordering::Relaxed);
        let all = self.addresses.iter().enumerate().cycle().skip(first);
        let (mut failure, mut tried) = (None, Vec::new());
        for (index, sentinel) in all.take(self.addresses.len()) {
            match self.ask(sentinel) {
                Ok(master) if tried.contains(&master) => {}
                Ok(master) => match open(connector, &master, protocol) {
                    Ok(connection) => {
                        self.first.store(index, Ordering::Relaxed);
                        return Ok((master, connection));
                    }
                    // What the master says is more than that a sentinel is away.
                    Err(error) => {
                        failure = Some(error);
                        tried.push(master);
                    }
                },
                Err(error) => failure = failure.or(Some(error)),
            }
        }
        Err(failure.unwrap_or_else(|| Error::invalid("redis+sentinel needs at least one sentinel")))
    }

    fn ask(&self, sentinel: &Address) -> Result<Address> {
        let mut connection = self.connector.open(sentinel, ProtocolVersion::RESP2)?;
        let answer = connection
            .req_command(
                cmd("SENTINEL")
                    .arg("GET-MASTER-ADDR-BY-NAME")
                    .arg(&self.name),
            )
            .and_then(Value::extract_error)
            .map_err(|error| read(&error, sentinel, self.connector.timeout))?;
        let fields: Vec<String> = ::redis::from_redis_value(answer).unwrap_or_default();
        if let [host, port] = fields.as_slice() {
            let port = port.parse().map_err(|_| not_understood())?;
            return Ok(sentinel.neighbour(host, port));
        }
        let message = format!(
            "the sentinel at {sentinel} knows no master called {:?}; check the path of the URL",
            self.name
        );
        Err(Error::new(ErrorKind::Misconfigured, message))
    }
}

fn open(
    connector: &Connector,
    master: &Address,
    protocol: ProtocolVersion,
) -> Result<::redis::Connection> {
    let mut connection = connector.open(master, protocol)?;
    let role = connection
        .req_command(&cmd("ROLE"))
        .and_then(Value::extract_error)
        .map_err(|error| read(&error, master, connector.timeout))?;
    if let Value::Array(fields) = role
        && matches!(fields.first(), Some(Value::BulkString(role)) if role == b"master")
    {
        return Ok(connection);
    }
    Err(unavailable(format!(
        "redis at {master}: the sentinels call it the master, but it is a replica; a failover may be under way"
    )))
}
