//! How a factory on MySQL is set up: by hand, or by URL.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::connection::{ConnectionOptions, Connector};
use super::permits::{DEFAULT_PREFIX, PermitSettings};
use super::repository::Repository;
use super::server::{Address, Credentials, Server};
use super::table::{DEFAULT_NAME, Table};
use super::{Database, Mysql};
use crate::error::{Error, Result};
use crate::factory::Factory;
use crate::lease::Lease;
use crate::pool;
use crate::tls::tls_setters;
use crate::url::Url;

/// The longest read timeout that is chosen by itself, however long the lease: who unlocks does not wait
/// for longer than this for a server that is near and hangs.
const MAX_READ_TIMEOUT: Duration = Duration::from_millis(750);

/// How long a log-in may take; not bound to the lease, because the pool's threads log in.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);

/// The shortest and the longest poll interval.
const POLL_INTERVALS: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(60));

/// The URL parameters beside those of the server.
pub(crate) const PARAMETERS: [&str; 11] = [
    "ttl",
    "transition",
    "initial_delay",
    "table",
    "create_table",
    "table_prefix",
    "pool_size",
    "connect_timeout",
    "read_timeout",
    "wakeups",
    "poll_interval",
];

/// Builds a factory on a MySQL (8.0 or later) or MariaDB (10.6 or later) server.
///
/// ```no_run
/// use contend::mysql;
///
/// let factory = mysql::Builder::new("db.internal", "simba_db")
///     .user("worker")
///     .password("secret")
///     .create_table(true)
///     .build()?;
/// # Ok::<(), contend::Error>(())
/// ```
///
/// The same as a URL, for [`contend::connect`](crate::connect):
/// `mysql://worker:secret@db.internal/simba_db?create_table=true`. Its parameters are named after the
/// setters here; boolean ones take `true`, `on`, `yes`, `false`, `off` and `no`, and durations are
/// written `500ms` or `2s`.
#[derive(Clone)]
#[must_use]
pub struct Builder {
    server: Server,
    ttl: Duration,
    transition: Duration,
    initial_delay: Duration,
    table: String,
    create_table: bool,
    pool_size: u32,
    connect_timeout: Duration,
    read_timeout: Option<Duration>,
    wakeups: bool,
    poll_interval: Duration,
    table_prefix: String,
}

impl Builder {
    /// Creates a builder for the database `database` on the server `host`.
    pub fn new(host: &str, database: &str) -> Builder {
        Builder::on(Server::new(host, database))
    }

    pub(super) fn from_url(url: &Url) -> Result<Builder> {
        let known: Vec<&str> = PARAMETERS.into_iter().chain(Server::PARAMETERS).collect();
        url.expect_parameters(&known)?;
        let mut builder = Builder::on(Server::from_url(url)?);
        url.set("ttl", &mut builder.ttl)?;
        url.set("transition", &mut builder.transition)?;
        url.set("connect_timeout", &mut builder.connect_timeout)?;
        url.set("read_timeout", &mut builder.read_timeout)?;
        url.set("initial_delay", &mut builder.initial_delay)?;
        url.set("table", &mut builder.table)?;
        url.set("create_table", &mut builder.create_table)?;
        url.set("table_prefix", &mut builder.table_prefix)?;
        url.set("pool_size", &mut builder.pool_size)?;
        url.set("wakeups", &mut builder.wakeups)?;
        url.set("poll_interval", &mut builder.poll_interval)?;
        Ok(builder)
    }

    fn on(server: Server) -> Builder {
        Builder {
            server,
            ttl: Lease::default().ttl(),
            transition: Lease::default().transition(),
            initial_delay: Duration::ZERO,
            table: DEFAULT_NAME.to_owned(),
            create_table: false,
            pool_size: 8,
            connect_timeout: CONNECT_TIMEOUT,
            read_timeout: None,
            wakeups: true,
            poll_interval: Duration::from_secs(1),
            table_prefix: DEFAULT_PREFIX.to_owned(),
        }
    }

    /// Sets the server's port. Defaults to 3306.
    pub fn port(mut self, port: u16) -> Builder {
        if let Address::Tcp(_, known) = &mut self.server.address {
            *known = port;
        }
        self
    }

    /// Sets the path of the server's unix socket, to use instead of host and port. Defaults to none.
    pub fn socket(mut self, path: impl Into<String>) -> Builder {
        self.server.address = Address::Socket(path.into());
        self
    }

    /// Sets the user to log in as. Defaults to none.
    pub fn user(mut self, user: impl Into<String>) -> Builder {
        self.server.set_user(user.into());
        self
    }

    /// Sets the user's password. Defaults to none.
    pub fn password(mut self, password: impl Into<String>) -> Builder {
        self.server.set_password(password.into());
        self
    }

    /// Sets a function that returns user and password, for passwords that rotate. It is called by threads
    /// of the factory whenever a connection is opened. Defaults to the fixed user and password.
    pub fn credentials(
        mut self,
        ask: impl Fn() -> (String, String) + Send + Sync + 'static,
    ) -> Builder {
        self.server.credentials = Credentials::Asked(Arc::new(ask));
        self
    }

    tls_setters!(server.tls);

    /// Sets how long an owner may believe that it owns without a renewal. Defaults to 10 s.
    pub fn ttl(mut self, ttl: Duration) -> Builder {
        self.ttl = ttl;
        self
    }

    /// Sets how long after the ttl nobody else can own: the time to wind down work. Defaults to 6 s.
    pub fn transition(mut self, transition: Duration) -> Builder {
        self.transition = transition;
        self
    }

    /// Sets the delay before a service's first attempt. Defaults to zero.
    pub fn initial_delay(mut self, initial_delay: Duration) -> Builder {
        self.initial_delay = initial_delay;
        self
    }

    /// Sets the name of the table. Defaults to `simba_mutex`.
    pub fn table(mut self, table: impl Into<String>) -> Builder {
        self.table = table.into();
        self
    }

    /// Sets whether the first request creates the table if it is missing, and adds or changes the columns
    /// of a table created by Simba. Defaults to `false`: apply `sql/init-mutex.sql` or
    /// `sql/upgrade-mutex.sql`.
    pub fn create_table(mut self, create: bool) -> Builder {
        self.create_table = create;
        self
    }

    /// Sets the prefix of the names of the semaphore tables. Defaults to `contend_`.
    pub fn table_prefix(mut self, prefix: impl Into<String>) -> Builder {
        self.table_prefix = prefix.into();
        self
    }

    /// Sets the maximum number of connections for requests, whatever the number of contenders: each is in
    /// use for the duration of one request. A quarter of them, at least one, is reserved for owners, so
    /// that nobody loses a mutex because others wait. Two more connections are used while contenders
    /// wait. Defaults to 8.
    pub fn pool_size(mut self, size: u32) -> Builder {
        self.pool_size = size;
        self
    }

    /// Sets the longest wait for a TCP connection, and for each answer of the server during the log-in.
    /// Connections are opened in the background: no lease waits for one. Defaults to 3 s.
    pub fn connect_timeout(mut self, timeout: Duration) -> Builder {
        self.connect_timeout = timeout;
        self
    }

    /// Sets the longest wait for an answer; the server does not let a statement wait longer for a lock
    /// either (whole seconds, at least one). At most a fifth of the ttl, so that no call uses up the
    /// lease. Defaults to a sixth of the ttl, at most 750 ms. Contenders with a shorter ttl than the
    /// factory's wait for no longer than a quarter of theirs (on Unix; elsewhere they are refused). A
    /// connection whose round trip, measured when it is opened, is longer than half of this waits for two
    /// round trips, at most a fifth of the ttl (on Unix).
    pub fn read_timeout(mut self, timeout: Duration) -> Builder {
        self.read_timeout = Some(timeout);
        self
    }

    /// Sets whether waiting contenders are woken; otherwise they poll. Defaults to `true`.
    pub fn wakeups(mut self, wakeups: bool) -> Builder {
        self.wakeups = wakeups;
        self
    }

    /// Sets how often observers, and contenders that cannot be woken, poll. Also sets after how long a
    /// contender looks if a wake-up was lost, rounded up to whole seconds and at most 2. From 20 ms to 60
    /// s. Defaults to 1 s.
    pub fn poll_interval(mut self, interval: Duration) -> Builder {
        self.poll_interval = interval;
        self
    }

    /// Builds the factory. Connects in the background, so the server need not be reachable yet.
    ///
    /// # Errors
    /// `InvalidInput` for settings that cannot work, `FeatureDisabled` for TLS without its feature.
    pub fn build(self) -> Result<Factory> {
        let (lease, delay) = (self.lease()?, self.initial_delay);
        let realm = format!("{}?table={}", self.server, self.table);
        let permits = PermitSettings {
            prefix: self.table_prefix.clone(),
            poll_interval: self.poll_interval,
        };
        permits.check()?;
        let backend = Mysql::new(realm, self.database(lease)?, permits);
        Ok(Factory::new(Arc::new(backend), lease).with_initial_delay(delay))
    }

    /// Builds a [`Repository`] for operations on single rows, with its own pool.
    ///
    /// # Errors
    /// As [`build`](Builder::build).
    pub fn repository(self) -> Result<Repository> {
        let lease = self.lease()?;
        Ok(Repository::new(Arc::new(self.database(lease)?), lease))
    }

    fn lease(&self) -> Result<Lease> {
        Lease::new(self.ttl, self.transition)
    }

    fn database(self, lease: Lease) -> Result<Database> {
        self.server.check()?;
        let (shortest, longest) = POLL_INTERVALS;
        if !(shortest..=longest).contains(&self.poll_interval) {
            return Err(Error::invalid(format!(
                "a poll interval of {:?} is not possible; it must be from {shortest:?} to {longest:?}",
                self.poll_interval
            )));
        }
        pool::check_size(self.pool_size)?;
        let read_timeout = self
            .read_timeout
            .unwrap_or_else(|| default_read_timeout(lease));
        check_read_timeout(read_timeout, lease)?;
        if self.connect_timeout.is_zero() {
            return Err(Error::invalid("connect_timeout must not be zero"));
        }
        let table = Arc::new(Table::new(&self.table, self.create_table)?);
        let connector = Connector {
            server: self.server,
            options: ConnectionOptions {
                connect_timeout: self.connect_timeout,
                read_timeout,
                longest: longest_read_timeout(lease),
                lock_wait: read_timeout,
                init: String::new(),
            },
            clock: Arc::default(),
            table: Arc::clone(&table),
        };
        Database::new(
            connector,
            table,
            self.pool_size,
            self.poll_interval,
            self.wakeups,
        )
    }
}

/// Leaves the rest of a call's budget, a quarter of the ttl, to wait for a connection in; and several
/// renewals fit in a lease.
pub(super) fn default_read_timeout(lease: Lease) -> Duration {
    (lease.ttl() / 6).min(MAX_READ_TIMEOUT)
}

/// A call is at most a quarter of the ttl long, and an answer must be able to come within it.
fn longest_read_timeout(lease: Lease) -> Duration {
    lease.ttl() / 5
}

pub(super) fn check_read_timeout(read_timeout: Duration, lease: Lease) -> Result<()> {
    if !read_timeout.is_zero() && read_timeout <= longest_read_timeout(lease) {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "a read timeout of {read_timeout:?} does not go with a ttl of {:?}; it must be above zero and at \
         most a fifth of the ttl",
        lease.ttl()
    )))
}

impl fmt::Debug for Builder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder")
            .field("server", &self.server)
            .field("table", &self.table)
            .field("ttl", &self.ttl)
            .field("transition", &self.transition)
            .finish_non_exhaustive()
    }
}
