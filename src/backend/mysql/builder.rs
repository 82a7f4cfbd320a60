//! How a factory on MySQL is set up: by hand, or by URL.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::Database;
use super::link::LinkOptions;
use super::pool::Pool;
use super::repository::Repository;
use super::server::{Server, Tls};
use super::store::Store;
use super::table::{DEFAULT_NAME, Table};
use crate::error::{Error, Result};
use crate::factory::Factory;
use crate::lease::Lease;
use crate::url::Url;

/// The longest read timeout that is chosen by itself, however long the lease.
const MAX_READ_TIMEOUT: Duration = Duration::from_secs(5);

/// The URL parameters beside those of the server.
pub(crate) const PARAMETERS: [&str; 11] = [
    "ttl",
    "transition",
    "initial_delay",
    "table",
    "create_table",
    "pool_size",
    "connect_timeout",
    "read_timeout",
    "wakeups",
    "max_wake_connections",
    "poll_interval",
];

/// Sets up mutexes in a table of a MySQL (8.0 or later) or MariaDB (10.6 or later) server.
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
/// `mysql://worker:secret@db.internal/simba_db?create_table=true`. Its parameters are `ttl`,
/// `transition`, `initial_delay`, `table`, `create_table`, `pool_size`, `connect_timeout`,
/// `read_timeout`, `wakeups` (`on`, `off`), `max_wake_connections`, `poll_interval`, `tls` (`off`,
/// `required`), `tls_ca` and `tls_verify`.
#[derive(Clone)]
#[must_use]
pub struct Builder {
    server: Server,
    lease: Lease,
    initial_delay: Duration,
    table: String,
    create_table: bool,
    pool_size: u32,
    connect_timeout: Option<Duration>,
    read_timeout: Option<Duration>,
    wakeups: bool,
    max_wake_connections: usize,
    poll_interval: Duration,
}

impl Builder {
    /// The database `database` on the server `host`.
    pub fn new(host: &str, database: &str) -> Builder {
        Builder::on(Server::new(host, database))
    }

    pub(super) fn from_url(url: &Url) -> Result<Builder> {
        let known: Vec<&str> = PARAMETERS.into_iter().chain(Server::PARAMETERS).collect();
        url.expect_parameters(&known)?;
        let mut builder = Builder::on(Server::from_url(url)?).lease(url.lease()?);
        if let Some(delay) = url.duration("initial_delay")? {
            builder = builder.initial_delay(delay);
        }
        builder.connect_timeout = url.duration("connect_timeout")?;
        builder.read_timeout = url.duration("read_timeout")?;
        if let Some(table) = url.text("table") {
            builder = builder.table(table);
        }
        if let Some(create) = url.value("create_table")? {
            builder = builder.create_table(create);
        }
        if let Some(size) = url.value("pool_size")? {
            builder = builder.pool_size(size);
        }
        match url.text("wakeups") {
            None | Some("on") => {}
            Some("off") => builder = builder.wakeups(false),
            Some(other) => {
                return Err(Error::invalid(format!(
                    "URL parameter wakeups: {other:?} is neither on nor off"
                )));
            }
        }
        if let Some(max) = url.value("max_wake_connections")? {
            builder = builder.max_wake_connections(max);
        }
        if let Some(interval) = url.duration("poll_interval")? {
            builder = builder.poll_interval(interval);
        }
        Ok(builder)
    }

    fn on(server: Server) -> Builder {
        Builder {
            server,
            lease: Lease::default(),
            initial_delay: Duration::ZERO,
            table: DEFAULT_NAME.to_owned(),
            create_table: false,
            pool_size: 8,
            connect_timeout: None,
            read_timeout: None,
            wakeups: true,
            max_wake_connections: 16,
            poll_interval: Duration::from_secs(1),
        }
    }

    /// The server's port. Default: 3306.
    pub fn port(mut self, port: u16) -> Builder {
        self.server.port = port;
        self
    }

    /// The user to log in as. Default: none.
    pub fn user(mut self, user: impl Into<String>) -> Builder {
        self.server.user = Some(user.into());
        self
    }

    /// The user's password. Default: none.
    pub fn password(mut self, password: impl Into<String>) -> Builder {
        self.server.password = Some(password.into());
        self
    }

    /// Encryption; needs the Cargo feature `tls`. Default: [`Tls::Off`].
    pub fn tls(mut self, tls: Tls) -> Builder {
        self.server.tls = tls;
        self
    }

    /// The lease that services ask for unless told otherwise. Default: ttl 10 s, transition 6 s.
    pub fn lease(mut self, lease: Lease) -> Builder {
        self.lease = lease;
        self
    }

    /// How long after its start a service makes its first attempt, unless told otherwise. Default: none.
    pub fn initial_delay(mut self, initial_delay: Duration) -> Builder {
        self.initial_delay = initial_delay;
        self
    }

    /// The table. Default: `simba_mutex`.
    pub fn table(mut self, table: impl Into<String>) -> Builder {
        self.table = table.into();
        self
    }

    /// Whether the first request makes the table if it is not there. Default: `false`: apply
    /// `sql/init-mutex.sql`.
    pub fn create_table(mut self, create: bool) -> Builder {
        self.create_table = create;
        self
    }

    /// The most connections for requests, whatever the number of services: each is in use for the
    /// length of one request. A quarter of them, and at least one, is kept for those who own, so that
    /// nobody loses a mutex because others wait for one. Of a single connection nothing can be kept: it
    /// is enough for one contender, but where several share it an attempt that hangs (on a row that an
    /// operator has locked, say) delays a renewal by the read timeout. Default: 8.
    pub fn pool_size(mut self, size: u32) -> Builder {
        self.pool_size = size;
        self
    }

    /// The longest wait for a TCP connection. Default: the read timeout.
    pub fn connect_timeout(mut self, timeout: Duration) -> Builder {
        self.connect_timeout = Some(timeout);
        self
    }

    /// The longest wait for an answer; the server does not let a statement wait longer for a lock
    /// either (whole seconds, at least one). At most a fifth of the ttl, so that no call eats the lease.
    /// Default: a sixth of the ttl, at most 5 s. Services with a shorter ttl than the factory's get
    /// connections of their own, with about a sixth of theirs.
    pub fn read_timeout(mut self, timeout: Duration) -> Builder {
        self.read_timeout = Some(timeout);
        self
    }

    /// Whether waiting contenders are woken by the server (`GET_LOCK`), or poll. Default: `true`.
    pub fn wakeups(mut self, wakeups: bool) -> Builder {
        self.wakeups = wakeups;
        self
    }

    /// The most connections for wake-ups: one for all services that lead, one for each that waits.
    /// Contenders beyond that number poll. Default: 16.
    pub fn max_wake_connections(mut self, max: usize) -> Builder {
        self.max_wake_connections = max;
        self
    }

    /// The longest pause between two looks at a mutex that cannot be waited for. A row that changed
    /// lately is looked at more often; one statement looks for all contenders of the factory.
    /// Default: 1 s.
    pub fn poll_interval(mut self, interval: Duration) -> Builder {
        self.poll_interval = interval;
        self
    }

    /// The factory. Connects in the background: the server may be away.
    ///
    /// # Errors
    /// `InvalidInput` for what could not work, `FeatureDisabled` for TLS without its feature.
    pub fn build(self) -> Result<Factory> {
        let (lease, delay) = (self.lease, self.initial_delay);
        Ok(Factory::new(Arc::new(self.database()?), lease).with_initial_delay(delay))
    }

    /// The operations on single rows, with a pool of their own.
    ///
    /// # Errors
    /// As [`build`](Builder::build).
    pub fn repository(self) -> Result<Repository> {
        let lease = self.lease;
        Ok(Repository::new(self.store()?, lease))
    }

    fn database(self) -> Result<super::Mysql> {
        if self.poll_interval.is_zero() {
            return Err(Error::invalid("a poll interval of zero would never rest"));
        }
        let realm = format!("{}?table={}", self.server, self.table);
        let wake_connections = if self.wakeups {
            self.max_wake_connections
        } else {
            0
        };
        let database = self.server.database.clone();
        let (interval, lease) = (self.poll_interval, self.lease);
        let store = self.store()?;
        Ok(super::Mysql::new(
            realm,
            Database::new(store, database, lease, interval, wake_connections),
        ))
    }

    fn store(self) -> Result<Arc<Store>> {
        self.server.check()?;
        let table = Table::new(&self.table, self.create_table)?;
        if self.pool_size == 0 {
            return Err(Error::invalid("a pool of no connections cannot work"));
        }
        let read_timeout = self
            .read_timeout
            .unwrap_or_else(|| default_read_timeout(self.lease));
        check_read_timeout(read_timeout, self.lease)?;
        let connect_timeout = self.connect_timeout.unwrap_or(read_timeout);
        if connect_timeout.is_zero() || connect_timeout > self.lease.ttl() {
            return Err(Error::invalid(format!(
                "a connect timeout of {connect_timeout:?} does not go with a ttl of {:?}; it must be \
                 above zero and at most the ttl",
                self.lease.ttl()
            )));
        }
        let table = Arc::new(table);
        let prepared = Arc::clone(&table);
        let options = LinkOptions {
            connect_timeout,
            read_timeout: Some(read_timeout),
            lock_wait: read_timeout,
            init: Vec::new(),
            prepare: Some(Arc::new(move |link| prepared.prepare(link))),
        };
        let pool = Pool::new(self.server, options, self.pool_size);
        Ok(Arc::new(Store { pool, table }))
    }
}

/// Leaves a third of a call's budget, a quarter of the ttl, to wait for a connection in; and several
/// renewals fit in a lease.
pub(super) fn default_read_timeout(lease: Lease) -> Duration {
    (lease.ttl() / 6).min(MAX_READ_TIMEOUT)
}

/// A call is at most a quarter of the ttl long, and an answer must be able to come within it.
pub(super) fn check_read_timeout(read_timeout: Duration, lease: Lease) -> Result<()> {
    if !read_timeout.is_zero() && read_timeout <= lease.ttl() / 5 {
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
            .field("lease", &self.lease)
            .finish_non_exhaustive()
    }
}
