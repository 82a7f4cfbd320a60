//! One connection: how it is opened, and how it is kept from outlasting a deadline.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ::redis::io::tcp::TcpSettings;
use ::redis::{
    Client, Cmd, ConnectionAddr, ConnectionInfo, ErrorKind as Kind, IntoConnectionInfo,
    ProtocolVersion, RedisConnectionInfo, RedisResult, ServerErrorKind, Value, cmd,
};

use super::error::read;
use super::sentinel::Sentinels;
use super::server::ServerSettings;
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::pool::{Connect, Pooled};
use crate::tls::Certificates;
use crate::url::Login;

/// The longest pause between two attempts to connect to a server that refuses the log-in: nothing changes by itself
/// there, and it may log each attempt.
const REFUSED: Duration = Duration::from_secs(5);

/// The longest pause between two attempts to connect to a server that cannot be reached.
const UNREACHABLE: Duration = Duration::from_millis(250);

/// No call is made with less time.
pub(super) const LEAST: Duration = Duration::from_millis(1);

/// Where a server is.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Address {
    Tcp(String, u16),
    Unix(PathBuf),
}

impl Address {
    /// Another node of the cluster of which this one is a part, by the host that this one gave. A host
    /// that is unknown to it, or a wildcard, stands for its own.
    pub(super) fn neighbour(&self, host: &str, port: u16) -> Address {
        let host = host.trim_start_matches('[').trim_end_matches(']');
        match self {
            Address::Tcp(own, _) if matches!(host, "" | "?" | "0.0.0.0" | "::" | "*") => {
                Address::Tcp(own.clone(), port)
            }
            _ => Address::Tcp(host.to_owned(), port),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Tcp(host, port) if host.contains(':') => write!(f, "[{host}]:{port}"),
            Address::Tcp(host, port) => write!(f, "{host}:{port}"),
            Address::Unix(path) => write!(f, "{}", path.display()),
        }
    }
}

/// Everything but the address that opening a connection takes. Shows no credential.
pub(super) struct Connector {
    pub(super) login: Login,
    pub(super) database: u32,
    pub(super) tls: Option<Certificates>,
    pub(super) timeout: Duration,
}

impl Connector {
    /// Opens a connection. Takes up to the timeout, so it is for threads that may wait.
    pub(super) fn open(
        &self,
        address: &Address,
        protocol: ProtocolVersion,
    ) -> Result<::redis::Connection> {
        let login = self.login.credentials();
        let login = login.map_err(|error| error.context(format_args!("redis at {address}")))?;
        self.try_open(address, protocol, &login).map_err(|error| {
            let error = read(&error, address, self.timeout);
            match &login {
                (Some(user), _) if error.kind() == ErrorKind::Denied && !user.is_empty() => {
                    error.context(format_args!("user {user:?}"))
                }
                _ => error,
            }
        })
    }

    fn try_open(
        &self,
        address: &Address,
        protocol: ProtocolVersion,
        (user, password): &(Option<String>, Option<String>),
    ) -> RedisResult<::redis::Connection> {
        // Without a name for the connection: it would take a further right.
        let mut settings = RedisConnectionInfo::default()
            .set_skip_set_lib_name()
            .set_db(i64::from(self.database))
            .set_protocol(protocol);
        // An empty user is the default one.
        if let Some(user) = user.as_ref().filter(|user| !user.is_empty()) {
            settings = settings.set_username(user);
        }
        if user.is_some() || password.is_some() {
            settings = settings.set_password(password.as_deref().unwrap_or(""));
        }
        let target = match address {
            Address::Unix(path) => ConnectionAddr::Unix(path.clone()),
            Address::Tcp(host, port) if self.tls.is_some() => ConnectionAddr::TcpTls {
                host: host.clone(),
                port: *port,
                insecure: false,
                tls_params: None,
            },
            Address::Tcp(host, port) => ConnectionAddr::Tcp(host.clone(), *port),
        };
        // Without TCP_NODELAY a request may wait for the acknowledgement of the one before.
        let info = target
            .into_connection_info()?
            .set_redis_settings(settings)
            .set_tcp_settings(TcpSettings::default().set_nodelay(true));
        let client = self.client(info)?;
        let connection = client.get_connection_with_timeout(self.timeout)?;
        // A paused server answers nothing: no call without an end.
        connection.set_read_timeout(Some(self.timeout))?;
        connection.set_write_timeout(Some(self.timeout))?;
        Ok(connection)
    }

    fn client(&self, info: ConnectionInfo) -> RedisResult<Client> {
        #[cfg(feature = "tls")]
        if let Some(tls) = &self.tls {
            let own = |(client_cert, client_key)| ::redis::ClientTlsConfig {
                client_cert,
                client_key,
            };
            let certificates = ::redis::TlsCertificates {
                client_tls: tls.own.clone().map(own),
                root_cert: tls.ca.clone(),
            };
            return Client::build_with_tls(info, certificates);
        }
        Client::open(info)
    }
}

/// Which server to connect to.
pub(super) enum Target {
    /// Always this one.
    At(Address),
    /// Whichever the sentinels call the master.
    Master(Sentinels),
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Target::At(address) => address.fmt(f),
            Target::Master(Sentinels {
                name, addresses, ..
            }) => {
                let hosts: Vec<_> = addresses.iter().map(Address::to_string).collect();
                write!(f, "{name:?} (by sentinels at {})", hosts.join(","))
            }
        }
    }
}

/// Opens the connections to one server, for its pool and for messages.
pub(super) struct Opener {
    pub(super) settings: Arc<ServerSettings>,
    pub(super) target: Target,
    /// A warning that the server may evict locks was logged.
    pub(super) warned: AtomicBool,
}

impl Opener {
    /// Opens a connection, and checks that the master of the sentinels knows that it is one.
    pub(super) fn open(&self, protocol: ProtocolVersion) -> Result<(Address, ::redis::Connection)> {
        let connector = &self.settings.connector;
        match &self.target {
            Target::At(address) => {
                let connection = connector.open(address, protocol)?;
                Ok((address.clone(), connection))
            }
            Target::Master(sentinels) => sentinels.open_master(connector, protocol),
        }
    }

    /// Warns once of a server that may throw a lease away while it runs.
    fn warn_of_eviction(&self, info: &[u8], address: &Address) {
        let info = String::from_utf8_lossy(info);
        let policy = (info.lines()).find_map(|line| line.strip_prefix("maxmemory_policy:"));
        if let Some(policy) = policy
            && policy != "noeviction"
            && !self.warned.swap(true, Ordering::Relaxed)
        {
            log::warn!(
                "redis at {address} may evict locks: its maxmemory-policy is {policy}, and should be noeviction"
            );
        }
    }
}

impl Connect for Arc<Opener> {
    type Connection = Connection;

    fn connect(&self) -> Result<Connection> {
        let (address, driver) = self.open(ProtocolVersion::RESP2)?;
        let opened_at = Moment::now();
        let mut connection = Connection {
            driver,
            address,
            timeout: self.settings.connector.timeout,
            last_reply_at: opened_at,
            broken: false,
        };
        // A server without room, or of another kind, shows itself at the first command.
        let by = opened_at + self.settings.connector.timeout;
        match connection.ask(cmd("INFO").arg("memory"), by) {
            Ok(Value::BulkString(info)) => self.warn_of_eviction(&info, &connection.address),
            Ok(_) => {}
            // Where an ACL denies the question, that is an answer, too.
            Err(error) if error.kind() == Kind::Server(ServerErrorKind::NoPerm) => {}
            Err(error) => {
                let waited = Moment::now() - opened_at;
                return Err(read(&error, &connection.address, waited));
            }
        }
        Ok(connection)
    }

    fn longest_pause(&self, error: &Error) -> Duration {
        match error.kind() {
            ErrorKind::Denied | ErrorKind::Misconfigured => REFUSED,
            _ => UNREACHABLE,
        }
    }

    fn server(&self) -> String {
        format!("redis at {}", self.target)
    }
}

/// A connection for commands.
pub(super) struct Connection {
    driver: ::redis::Connection,
    pub(super) address: Address,
    /// What the timeout for reading is set to.
    timeout: Duration,
    /// When the last reply was read, or it was opened.
    last_reply_at: Moment,
    /// A reply was not read, which would be taken for that of the next request; or the server is not what it was.
    pub(super) broken: bool,
}

impl Pooled for Connection {
    fn is_broken(&self) -> bool {
        self.broken
    }

    fn last_reply_at(&self) -> Moment {
        self.last_reply_at
    }
}

impl Connection {
    /// Sends a command and reads its reply before `by`.
    pub(super) fn ask(&mut self, command: &Cmd, by: Moment) -> RedisResult<Value> {
        self.send(&command.get_packed_command())?;
        self.receive(by)
    }

    /// Sends one packed command. Does not wait on a connection without a pending reply: all that was sent before has
    /// arrived, so there is room for a command in the socket.
    pub(super) fn send(&mut self, command: &[u8]) -> RedisResult<()> {
        self.broken = true;
        self.driver.send_packed_command(command)
    }

    /// Reads the reply to what was sent, before `by`. An error of the server comes back as an error.
    ///
    /// After any other error the connection is off by one reply, or worse, and is not used again.
    pub(super) fn receive(&mut self, by: Moment) -> RedisResult<Value> {
        let left = by.remaining();
        if left < LEAST {
            return Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into());
        }
        // Below `by`, as the kernel's timers end up to an eighth late. Set anew only when far off: it is a system call.
        if self.timeout > left - left / 8 || self.timeout < left - left / 4 {
            self.timeout = (left - left / 6).max(LEAST);
            self.driver.set_read_timeout(Some(self.timeout))?;
        }
        // No script returns an error inside of an array.
        let reply = match self.driver.recv_response() {
            Ok(Value::ServerError(error)) => Err(error.into()),
            reply => reply,
        };
        if let Err(error) = &reply
            && (error.is_io_error() || error.kind() == Kind::Parse)
        {
            return reply;
        }
        self.broken = false;
        self.last_reply_at = Moment::now();
        reply
    }
}
