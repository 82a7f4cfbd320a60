//! Which server, which database, as whom: what every connection has in common.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use mysql::consts::CapabilityFlags;
use mysql::{Conn, OptsBuilder, SslOpts};

use crate::error::{Error, ErrorKind, Result};
use crate::url::Url;

/// The server's port unless told otherwise.
const DEFAULT_PORT: u16 = 3306;

/// Far above any statement of ours; given, it saves a round trip per connection.
const MAX_PACKET: usize = 4 << 20;

/// Far above the number of statements that one connection sees.
const STATEMENT_CACHE: usize = 64;

/// A MySQL or MariaDB server and the database on it. Its `Debug` shows no credential.
#[derive(Clone)]
pub(crate) struct Server {
    pub(crate) host: String,
    pub(crate) port: u16,
    pub(crate) user: Option<String>,
    pub(crate) password: Option<String>,
    pub(crate) database: String,
    pub(crate) tls: Tls,
}

/// Whether and how a connection is encrypted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Tls {
    /// Plain TCP.
    #[default]
    Off,
    /// Encrypted, or no connection at all. Needs the Cargo feature `tls`.
    Required {
        /// A PEM file of certificates to trust beside the public ones.
        ca: Option<PathBuf>,
        /// `false` accepts every certificate: encryption without authentication.
        verify: bool,
    },
}

impl Server {
    /// The parameters that [`Server::from_url`] reads, for the list of known ones.
    pub(crate) const PARAMETERS: [&'static str; 3] = ["tls", "tls_ca", "tls_verify"];

    pub(crate) fn from_url(url: &Url) -> Result<Server> {
        let mut addresses = url.addresses(DEFAULT_PORT)?.into_iter();
        let (Some((host, port)), None) = (addresses.next(), addresses.next()) else {
            return Err(Error::invalid(
                "a mysql:// URL names one server: mysql://user:password@host:port/database",
            ));
        };
        let verify = url.value("tls_verify")?;
        let ca = url.text("tls_ca").map(PathBuf::from);
        let tls = match url.text("tls") {
            Some("required") => Tls::Required {
                ca,
                verify: verify.unwrap_or(true),
            },
            None | Some("off") if ca.is_none() && verify.is_none() => Tls::Off,
            None | Some("off") => {
                return Err(Error::invalid(
                    "tls_ca and tls_verify have a meaning only with tls=required",
                ));
            }
            Some(other) => {
                return Err(Error::invalid(format!(
                    "URL parameter tls: {other:?} is neither off nor required"
                )));
            }
        };
        let server = Server {
            host,
            port,
            user: url.user.clone(),
            password: url.password.clone(),
            database: url.path.clone(),
            tls,
        };
        server.check()?;
        Ok(server)
    }

    /// A server at the default port, without TLS.
    pub(crate) fn new(host: &str, database: &str) -> Server {
        Server {
            host: host.to_owned(),
            port: DEFAULT_PORT,
            user: None,
            password: None,
            database: database.to_owned(),
            tls: Tls::Off,
        }
    }

    /// Refuses what could not work, before a connection is tried.
    pub(crate) fn check(&self) -> Result<()> {
        if self.host.is_empty() {
            return Err(Error::invalid("the MySQL server has no host name"));
        }
        // A slash would be a table or nothing at all; a backtick or NUL is in nobody's database name.
        if self.database.is_empty() || self.database.contains(['/', '`', '\0']) {
            return Err(Error::invalid(format!(
                "{:?} is not a database name; a URL is mysql://user:password@host:port/database",
                self.database
            )));
        }
        if self.tls != Tls::Off && cfg!(not(feature = "tls")) {
            return Err(Error::new(
                ErrorKind::FeatureDisabled,
                "TLS to MySQL needs the Cargo feature \"tls\"",
            ));
        }
        Ok(())
    }

    /// Opens a connection and does nothing else with it. `read` is `None` for a connection that waits
    /// on the server for as long as it takes, and is ended by other means.
    pub(super) fn open(&self, connect: Duration, read: Option<Duration>) -> mysql::Result<Conn> {
        // The driver reads a v6 address only in brackets.
        let host = if self.host.contains(':') {
            format!("[{}]", self.host)
        } else {
            self.host.clone()
        };
        let options = OptsBuilder::new()
            .ip_or_hostname(Some(host))
            .tcp_port(self.port)
            .user(self.user.clone())
            .pass(self.password.clone())
            .db_name(Some(self.database.clone()))
            .tcp_connect_timeout(Some(connect))
            .read_timeout(read)
            .write_timeout(Some(connect))
            .tcp_nodelay(true)
            .tcp_keepalive_time_ms(Some(10_000))
            // Else the driver looks for a unix socket and connects a second time.
            .prefer_socket(false)
            .max_allowed_packet(Some(MAX_PACKET))
            .stmt_cache_size(STATEMENT_CACHE)
            // "Affected" counts the rows that matched: a renewal in the same millisecond as the one
            // before changes nothing, and is a success all the same.
            .additional_capabilities(CapabilityFlags::CLIENT_FOUND_ROWS)
            .ssl_opts(self.ssl_opts());
        Conn::new(options)
    }

    fn ssl_opts(&self) -> Option<SslOpts> {
        let Tls::Required { ca, verify } = &self.tls else {
            return None;
        };
        // Chosen by hand: with two providers compiled in, rustls panics instead of choosing.
        #[cfg(feature = "tls")]
        drop(rustls::crypto::ring::default_provider().install_default());
        Some(
            SslOpts::default()
                .with_root_cert_path(ca.clone())
                .with_danger_accept_invalid_certs(!verify)
                .with_danger_skip_domain_validation(!verify),
        )
    }
}

/// Enough to know the place by.
impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (host, port, database) = (&self.host, self.port, &self.database);
        if host.contains(':') {
            write!(f, "mysql://[{host}]:{port}/{database}")
        } else {
            write!(f, "mysql://{host}:{port}/{database}")
        }
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
