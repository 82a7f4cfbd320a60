//! How a factory on MySQL is set up: by hand, or by URL.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::connection::Connector;
use super::permits::{DEFAULT_PREFIX, Statements};
use super::repository::Repository;
use super::server::{Address, DEFAULT_PORT, Server};
use super::table::{DEFAULT_NAME, Table};
use super::{Database, Mysql};
use crate::error::Result;
use crate::factory::Factory;
use crate::lease::Lease;
use crate::pool;
use crate::url::{Url, ensure, options, setters};

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
        Builder {
            server: Server::new(Address::Tcp(host.to_owned(), DEFAULT_PORT), database),
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

    pub(super) fn from_url(url: &Url) -> Result<Builder> {
        let mut builder = Builder::new("", "");
        builder.server = Server::from_url(url)?;
        builder.read_options(url)?;
        Ok(builder)
    }

    /// Sets the server's port. Defaults to 3306.
    pub fn port(mut self, port: u16) -> Builder {
        if let Address::Tcp(_, known) = &mut self.server.address {
            *known = port;
        }
        self
    }

    setters! {
        /// Sets the path of the server's unix socket, to use instead of host and port. Defaults to none.
        fn socket(path: impl Into<String>) { self.server.address = Address::Socket(path.into()) }

        /// Sets the user to log in as. Defaults to none.
        fn user(user: impl Into<String>) { self.server.login.user = Some(user.into()) }

        /// Sets the user's password. Defaults to none.
        fn password(password: impl Into<String>) { self.server.login.password = Some(password.into()) }

        /// Sets a function that returns user and password, for passwords that rotate. It is called by threads
        /// of the factory whenever a connection is opened, in the place of the fixed user and password. Defaults
        /// to none.
        fn credentials(ask: impl Fn() -> (String, String) + Send + Sync + 'static) {
            self.server.login.ask = Some(Arc::new(ask))
        }
    }

    options! {
        /// Sets how long an owner may believe that it owns without a renewal. Defaults to 10 s.
        fn ttl(ttl: Duration) { self.ttl = ttl }

        /// Sets how long after the ttl no other contender can own: the time to wind down work. Defaults to 6 s.
        fn transition(transition: Duration) { self.transition = transition }

        /// Sets the delay before a service's first attempt. Defaults to zero.
        fn initial_delay(initial_delay: Duration) { self.initial_delay = initial_delay }

        /// Sets the name of the table. Defaults to `simba_mutex`.
        fn table(table: impl Into<String>) { self.table = table.into() }

        /// Sets whether the first request creates the table if it is missing, and adds or changes the columns
        /// of a table created by Simba. Defaults to `false`: apply `sql/init-mutex.sql` or
        /// `sql/upgrade-mutex.sql`.
        fn create_table(create: bool) { self.create_table = create }

        /// Sets the prefix of the names of the semaphore tables. Defaults to `contend_`.
        fn table_prefix(prefix: impl Into<String>) { self.table_prefix = prefix.into() }

        /// Sets the maximum number of connections for requests, whatever the number of contenders: each is in
        /// use for the duration of one request. A quarter of them, at least one, is reserved for owners, so
        /// that no owner loses a mutex because others wait. Two more connections are used while contenders
        /// wait. Defaults to 8.
        fn pool_size(size: u32) { self.pool_size = size }

        /// Sets the longest wait for a TCP connection, and for each answer of the server during the log-in.
        /// Connections are opened in the background: no lease waits for one. Defaults to 3 s.
        fn connect_timeout(timeout: Duration) { self.connect_timeout = timeout }

        /// Sets whether waiting contenders are woken; otherwise they poll. Defaults to `true`.
        fn wakeups(wakeups: bool) { self.wakeups = wakeups }

        /// Sets how often observers, and contenders that cannot be woken, poll. From 20 ms to 60 s. Defaults to
        /// 1 s.
        fn poll_interval(interval: Duration) { self.poll_interval = interval }

        /// Sets whether connections are encrypted and the server's certificate and host name are checked;
        /// needs the Cargo feature `tls`. Defaults to `false`.
        fn tls(tls: bool) { self.server.tls.on = tls }

        /// Sets the PEM file with the certificates of the authorities to trust. Defaults to the public ones.
        fn tls_ca(file: impl Into<PathBuf>) { self.server.tls.ca = Some(file.into()) }

        /// Sets the PEM file with the client's certificate chain, for servers that ask for one. Needs
        /// [`tls_key`](Builder::tls_key). Defaults to none.
        fn tls_cert(file: impl Into<PathBuf>) { self.server.tls.cert = Some(file.into()) }

        /// Sets the PEM file with the key of the client's certificate. Defaults to none.
        fn tls_key(file: impl Into<PathBuf>) { self.server.tls.key = Some(file.into()) }
    }

    /// Builds the factory. Connects in the background, so the server need not be reachable yet.
    ///
    /// # Errors
    /// `InvalidInput` for settings that cannot work, `FeatureDisabled` for TLS without its feature.
    pub fn build(self) -> Result<Factory> {
        let lease = Lease::new(self.ttl, self.transition)?;
        let delay = self.initial_delay;
        let realm = format!("{}?table={}", self.server, self.table);
        let statements = Arc::new(Statements::new(&self.table_prefix)?);
        let backend = Mysql {
            realm,
            database: Arc::new(self.database(lease)?),
            statements,
        };
        Ok(Factory::over(Arc::new(backend), lease).with_initial_delay(delay))
    }

    /// Builds a [`Repository`] for operations on single rows, with its own pool.
    ///
    /// # Errors
    /// As [`build`](Builder::build).
    pub fn repository(self) -> Result<Repository> {
        let lease = Lease::new(self.ttl, self.transition)?;
        let database = Arc::new(self.database(lease)?);
        Ok(Repository { database, lease })
    }

    fn database(self, lease: Lease) -> Result<Database> {
        self.server.check()?;
        let polls =
            (Duration::from_millis(20)..=Duration::from_secs(60)).contains(&self.poll_interval);
        ensure(polls, "poll_interval must be from 20ms to 60s")?;
        pool::check_size(self.pool_size)?;
        let has_time = !self.connect_timeout.is_zero();
        ensure(has_time, "connect_timeout must not be zero")?;
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

/// Without the server: what was given as its host may contain a password.
impl fmt::Debug for Builder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Builder(table {})", self.table)
    }
}
