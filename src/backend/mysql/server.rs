//! The address of a server: host or socket, database, credentials, TLS; and how the driver is told to open a
//! connection there.

use std::fmt;
use std::time::Duration;

use mysql::consts::CapabilityFlags;
use mysql::{OptsBuilder, SslOpts};

use crate::error::{Error, Result};
use crate::tls::Tls;
use crate::url::{Login, Url, addresses};

/// The server's port unless another one is given.
pub(super) const DEFAULT_PORT: u16 = 3306;

/// Above the longest statement, which waits for [many mutexes](super::waiting); given, it saves a round trip per
/// connection.
pub(super) const MAX_PACKET: usize = 4 << 20;

/// A MySQL or MariaDB server and the database on it.
#[derive(Clone)]
pub(crate) struct Server {
    pub(crate) address: Address,
    pub(crate) login: Login,
    pub(crate) database: String,
    pub(crate) tls: Tls,
}

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Address {
    /// A TCP port.
    Tcp(String, u16),
    /// A unix socket.
    Socket(String),
}

impl Server {
    pub(crate) fn from_url(url: &Url) -> Result<Server> {
        let mut addresses = addresses(&url.hosts, DEFAULT_PORT)?.into_iter();
        let address = match (addresses.next(), addresses.next(), url.text("socket")) {
            (Some((host, port)), None, None) => Address::Tcp(host, port),
            (None, None, Some(path)) => Address::Socket(path.to_owned()),
            _ => {
                return Err(Error::invalid(
                    "a mysql:// URL names one server: mysql://user:password@host:port/database, or \
                     mysql://user:password@/database?socket=/path/of/its.sock",
                ));
            }
        };
        Ok(Server {
            login: url.login.clone(),
            ..Server::new(address, &url.path)
        })
    }

    /// A server without TLS and credentials.
    pub(crate) fn new(address: Address, database: &str) -> Server {
        Server {
            address,
            login: Login::default(),
            database: database.to_owned(),
            tls: Tls::default(),
        }
    }

    /// Refuses what could not work, before a connection is tried.
    pub(crate) fn check(&self) -> Result<()> {
        let is_named = match &self.address {
            Address::Tcp(host, _) => !host.is_empty() && !host.contains('@'),
            Address::Socket(path) => !path.is_empty(),
        };
        // With a slash it would be a table or nothing at all.
        let is_database = !self.database.is_empty() && !self.database.contains(['/', '`', '\0']);
        let why = if !is_named {
            // Not repeated: what stands before an '@' may be a password.
            "the MySQL server has no host name, or one with an '@'".to_owned()
        } else if !is_database {
            let right = "a URL is mysql://user:password@host:port/database";
            format!("{:?} is not a database name; {right}", self.database)
        } else if self.tls.on && matches!(self.address, Address::Socket(_)) {
            "a unix socket needs no TLS: leave tls or socket away".to_owned()
        } else {
            // The driver reads the files again for every connection.
            return self.tls.certificates().map(drop);
        };
        Err(Error::invalid(why))
    }

    /// Returns what the driver opens a connection with.
    ///
    /// # Errors
    /// `Unavailable` where the credentials callback panicked: it may be better the next time.
    pub(super) fn options(&self, connect: Duration, read: Duration) -> Result<OptsBuilder> {
        let (user, password) = self.login.credentials()?;
        let options = OptsBuilder::new()
            .user(user)
            .pass(password)
            .db_name(Some(self.database.clone()))
            .read_timeout(Some(read))
            .write_timeout(Some(read))
            // Else the driver looks for a unix socket and connects a second time.
            .prefer_socket(false)
            .max_allowed_packet(Some(MAX_PACKET))
            // "Affected" counts the rows that matched: a renewal in the same millisecond as the one
            // before changes nothing, and is a success all the same.
            .additional_capabilities(CapabilityFlags::CLIENT_FOUND_ROWS)
            .ssl_opts(self.ssl_opts());
        Ok(match &self.address {
            Address::Socket(path) => options.socket(Some(path.clone())),
            Address::Tcp(host, port) => options
                .ip_or_hostname(Some(bracketed(host)))
                .tcp_port(*port)
                .tcp_connect_timeout(Some(connect))
                .tcp_nodelay(true),
        })
    }

    fn ssl_opts(&self) -> Option<SslOpts> {
        if !self.tls.on {
            return None;
        }
        let options = SslOpts::default().with_root_cert_path(self.tls.ca.clone());
        #[cfg(feature = "tls")]
        let options = {
            let own = self.tls.cert.clone().zip(self.tls.key.clone());
            options
                .with_client_identity(own.map(|(cert, key)| mysql::ClientIdentity::new(cert, key)))
        };
        Some(options)
    }
}

/// Both the driver and a URL write a v6 address in brackets.
fn bracketed(host: &str) -> String {
    match host.contains(':') {
        true => format!("[{host}]"),
        false => host.to_owned(),
    }
}

/// Enough to know the place by.
impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.address {
            Address::Tcp(host, port) => {
                write!(f, "mysql://{}:{port}/{}", bracketed(host), self.database)
            }
            Address::Socket(path) => write!(f, "mysql:///{}?socket={path}", self.database),
        }
    }
}
