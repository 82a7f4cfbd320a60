//! The address of a server: host or socket, database, credentials, TLS; and how the driver is told to open a
//! connection there.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use mysql::consts::CapabilityFlags;
use mysql::{Conn, OptsBuilder, SslOpts};

use crate::error::{Error, ErrorKind, Result};
use crate::tls::Tls;
use crate::url::Url;

/// The server's port unless another one is given.
const DEFAULT_PORT: u16 = 3306;

/// Far above any statement of ours; given, it saves a round trip per connection.
const MAX_PACKET: usize = 4 << 20;

/// Far above the number of statements that one connection sees.
const STATEMENT_CACHE: usize = 64;

/// A peer that is gone is noticed after 2 s without traffic and 3 probes, one a second.
const KEEPALIVE_IDLE_MS: u32 = 2_000;
const KEEPALIVE_INTERVAL_S: u32 = 1;
const KEEPALIVE_PROBES: u32 = 3;

/// The same for a peer that does not acknowledge what it was sent.
const USER_TIMEOUT_MS: u32 = 5_000;

/// A MySQL or MariaDB server and the database on it. Its `Debug` shows no credential.
#[derive(Clone)]
pub(crate) struct Server {
    pub(crate) address: Address,
    pub(crate) credentials: Credentials,
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

/// A user and a password.
pub(super) type LogIn = (Option<String>, Option<String>);

/// Who logs in.
#[derive(Clone)]
pub(crate) enum Credentials {
    /// The same user and password for every connection.
    Fixed(Option<String>, Option<String>),
    /// Asked for every connection that is opened: user and password.
    Asked(Arc<dyn Fn() -> (String, String) + Send + Sync>),
}

impl Server {
    /// The parameters that [`Server::from_url`] reads, for the list of known ones.
    pub(crate) const PARAMETERS: [&'static str; 5] =
        ["tls", "tls_ca", "tls_cert", "tls_key", "socket"];

    pub(crate) fn from_url(url: &Url) -> Result<Server> {
        let mut addresses = url.addresses(DEFAULT_PORT)?.into_iter();
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
        let server = Server {
            address,
            credentials: Credentials::Fixed(url.user.clone(), url.password.clone()),
            database: url.path.clone(),
            tls: Tls::from_url(url)?,
        };
        server.check()?;
        Ok(server)
    }

    /// A server at the default port, without TLS.
    pub(crate) fn new(host: &str, database: &str) -> Server {
        Server {
            address: Address::Tcp(host.to_owned(), DEFAULT_PORT),
            credentials: Credentials::Fixed(None, None),
            database: database.to_owned(),
            tls: Tls::default(),
        }
    }

    pub(super) fn set_user(&mut self, name: String) {
        let password = match &mut self.credentials {
            Credentials::Fixed(_, password) => password.take(),
            Credentials::Asked(_) => None,
        };
        self.credentials = Credentials::Fixed(Some(name), password);
    }

    pub(super) fn set_password(&mut self, secret: String) {
        let user = match &mut self.credentials {
            Credentials::Fixed(user, _) => user.take(),
            Credentials::Asked(_) => None,
        };
        self.credentials = Credentials::Fixed(user, Some(secret));
    }

    /// Refuses what could not work, before a connection is tried.
    pub(crate) fn check(&self) -> Result<()> {
        if matches!(&self.address, Address::Tcp(name, _) | Address::Socket(name) if name.is_empty())
        {
            return Err(Error::invalid("the MySQL server has no host name"));
        }
        // A slash would be a table or nothing at all; a backtick or NUL is in nobody's database name.
        if self.database.is_empty() || self.database.contains(['/', '`', '\0']) {
            return Err(Error::invalid(format!(
                "{:?} is not a database name; a URL is mysql://user:password@host:port/database",
                self.database
            )));
        }
        if self.tls.on && matches!(self.address, Address::Socket(_)) {
            return Err(Error::invalid(
                "a unix socket needs no TLS: leave tls or socket away",
            ));
        }
        // The driver reads the files again for every connection.
        self.tls.certificates()?;
        Ok(())
    }

    /// Returns the user and the password to log in with.
    ///
    /// # Errors
    /// `Unavailable` where the callback that is asked for them panicked: it may be better the next time.
    pub(super) fn log_in(&self) -> Result<LogIn> {
        match &self.credentials {
            Credentials::Fixed(user, password) => Ok((user.clone(), password.clone())),
            Credentials::Asked(ask) => match catch_unwind(AssertUnwindSafe(|| ask())) {
                Ok((user, password)) => Ok((Some(user), Some(password))),
                Err(_) => Err(Error::new(
                    ErrorKind::Unavailable,
                    "the credentials callback panicked",
                )),
            },
        }
    }

    /// Opens a connection and does nothing else with it.
    pub(super) fn open(
        &self,
        (user, password): LogIn,
        connect: Duration,
        read: Duration,
    ) -> mysql::Result<Conn> {
        let options = OptsBuilder::new()
            .user(user)
            .pass(password)
            .db_name(Some(self.database.clone()))
            .read_timeout(Some(read))
            .write_timeout(Some(read))
            // Else the driver looks for a unix socket and connects a second time.
            .prefer_socket(false)
            .max_allowed_packet(Some(MAX_PACKET))
            .stmt_cache_size(STATEMENT_CACHE)
            // "Affected" counts the rows that matched: a renewal in the same millisecond as the one
            // before changes nothing, and is a success all the same.
            .additional_capabilities(CapabilityFlags::CLIENT_FOUND_ROWS)
            .ssl_opts(self.ssl_opts());
        let options = match &self.address {
            Address::Socket(path) => options.socket(Some(path.clone())),
            Address::Tcp(host, port) => {
                let options = options
                    .ip_or_hostname(Some(bracketed(host)))
                    .tcp_port(*port)
                    .tcp_connect_timeout(Some(connect))
                    .tcp_nodelay(true)
                    .tcp_keepalive_time_ms(Some(KEEPALIVE_IDLE_MS));
                #[cfg(any(target_os = "linux", target_os = "macos"))]
                let options = options
                    .tcp_keepalive_probe_interval_secs(Some(KEEPALIVE_INTERVAL_S))
                    .tcp_keepalive_probe_count(Some(KEEPALIVE_PROBES));
                #[cfg(target_os = "linux")]
                let options = options.tcp_user_timeout_ms(Some(USER_TIMEOUT_MS));
                options
            }
        };
        Conn::new(options)
    }

    fn ssl_opts(&self) -> Option<SslOpts> {
        if !self.tls.on {
            return None;
        }
        let options = SslOpts::default().with_root_cert_path(self.tls.ca.clone());
        #[cfg(feature = "tls")]
        let options = options.with_client_identity(
            self.tls
                .cert
                .clone()
                .zip(self.tls.key.clone())
                .map(|(cert, key)| mysql::ClientIdentity::new(cert, key)),
        );
        Some(options)
    }
}

/// Both the driver and a URL write a v6 address in brackets.
fn bracketed(host: &str) -> String {
    if host.contains(':') {
        format!("[{host}]")
    } else {
        host.to_owned()
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

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
