//! How a factory on MySQL is set up: by hand, or by URL.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::connection::Connector;
use super::permits::{DEFAULT_PREFIX, Statements};
use super::repository::Repository;
use super::server::{Address, DEFAULT_PORT, Server};
use super::table::{DEFAULT_NAME, Table};
use super::{Database, Mysql};
use crate::error::{Error, Result};
use crate::factory::Factory;
use crate::lease::Lease;
use crate::pool;
use crate::tls::tls_setters;
use crate::url::Url;

/// The shortest and the longest poll interval.
const POLL_INTERVALS: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(60));

/// The URL parameters.
const PARAMETERS: &str = "ttl transition initial_delay table create_table table_prefix pool_size connect_timeout \
    wakeups poll_interval tls tls_ca tls_cert tls_key socket";

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
    wakeups: bool,
    poll_interval: Duration,
    table_prefix: String,
}

impl Builder {
    /// Creates a builder for the database `database` on the server `host`.
    pub fn new(host: &str, database: &str) -> Builder {
        Builder::on(Server::new(
            Address::Tcp(host.to_owned(), DEFAULT_PORT),
            database,
        ))
    }

    pub(super) fn from_url(url: &Url) -> Result<Builder> {
        let known: Vec<&str> = PARAMETERS.split_whitespace().collect();
        url.expect_parameters(&known)?;
        let mut builder = Builder::on(Server::from_url(url)?);
        url.set("ttl", &mut builder.ttl)?;
        url.set("transition", &mut builder.transition)?;
        url.set("connect_timeout", &mut builder.connect_timeout)?;
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
            // Not bound to the lease: the pool's thread logs in.
            connect_timeout: Duration::from_secs(3),
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
        self.server.user = Some(user.into());
        self
    }

    /// Sets the user's password. Defaults to none.
    pub fn password(mut self, password: impl Into<String>) -> Builder {
        self.server.password = Some(password.into());
        self
    }

    /// Sets a function that returns user and password, for passwords that rotate. It is called by threads
    /// of the factory whenever a connection is opened, in the place of the fixed user and password. Defaults
    /// to none.
    pub fn credentials(
        mut self,
        ask: impl Fn() -> (String, String) + Send + Sync + 'static,
    ) -> Builder {
        self.server.credentials = Some(Arc::new(ask));
        self
    }

    tls_setters!(server.tls);

    /// Sets how long an owner may believe that it owns without a renewal. Defaults to 10 s.
    pub fn ttl(mut self, ttl: Duration) -> Builder {
        self.ttl = ttl;
        self
    }

    /// Sets how long after the ttl no other contender can own: the time to wind down work. Defaults to 6 s.
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
    /// that no owner loses a mutex because others wait. Two more connections are used while contenders
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

    /// Sets whether waiting contenders are woken; otherwise they poll. Defaults to `true`.
    pub fn wakeups(mut self, wakeups: bool) -> Builder {
        self.wakeups = wakeups;
        self
    }

    /// Sets how often observers, and contenders that cannot be woken, poll. From 20 ms to 60 s. Defaults to
    /// 1 s.
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
        let statements = Arc::new(Statements::new(&self.table_prefix)?);
        let backend = Mysql {
            realm,
            database: Arc::new(self.database(lease)?),
            statements,
        };
        Ok(Factory::new(Arc::new(backend), lease).with_initial_delay(delay))
    }

    /// Builds a [`Repository`] for operations on single rows, with its own pool.
    ///
    /// # Errors
    /// As [`build`](Builder::build).
    pub fn repository(self) -> Result<Repository> {
        let lease = self.lease()?;
        let database = Arc::new(self.database(lease)?);
        Ok(Repository { database, lease })
    }

    fn lease(&self) -> Result<Lease> {
        Lease::new(self.ttl, self.transition)
    }

    fn database(self, lease: Lease) -> Result<Database> {
        self.server.check()?;
        let (interval, (shortest, longest)) = (self.poll_interval, POLL_INTERVALS);
        if !(shortest..=longest).contains(&interval) {
            let limits = format!("it must be from {shortest:?} to {longest:?}");
            let message = format!("a poll interval of {interval:?} is not possible; {limits}");
            return Err(Error::invalid(message));
        }
        pool::check_size(self.pool_size)?;
        if self.connect_timeout.is_zero() {
            return Err(Error::invalid("connect_timeout must not be zero"));
        }
        let connector = Connector {
            table: Arc::new(Table::new(&self.table, self.create_table)?),
            server: self.server,
            connect_timeout: self.connect_timeout,
            request_limit: lease.request_limit(),
            clock: Arc::default(),
        };
        Database::new(connector, self.pool_size, self.poll_interval, self.wakeups)
    }
}

impl fmt::Debug for Builder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Builder({}, table {})", self.server, self.table)
    }
}
