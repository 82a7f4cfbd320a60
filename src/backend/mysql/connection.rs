//! One connection: set up so that every server behaves alike, and given up at the first doubt; and what
//! the pool opens connections with.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use mysql::prelude::Queryable;
use mysql::{Binary, Conn, Params, QueryResult, Statement, Value};
use parking_lot::Mutex;

use super::error::RequestError;
use super::server::Server;
use super::table::Table;
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::pool;

/// The longest pause between two attempts to connect to a server that lets handshakes time out.
const MAX_KNOCK: Duration = Duration::from_secs(15);

/// How connections are opened.
#[derive(Clone, Debug)]
pub(crate) struct ConnectionOptions {
    /// The longest wait for the TCP connection, and for each answer until the connection is ready.
    pub(crate) connect_timeout: Duration,
    /// The longest wait for an answer from then on, of a server that is near.
    pub(crate) read_timeout: Duration,
    /// The longest wait for an answer of a server that is far away.
    pub(crate) longest: Duration,
    /// How long the server lets a statement wait for a row or table lock; whole seconds, at least one.
    pub(crate) lock_wait: Duration,
    /// One more statement to set the session up with, or nothing.
    pub(crate) init: String,
}

/// Opens the connections of a pool.
#[derive(Clone, Debug)]
pub(crate) struct Connector {
    pub(crate) server: Server,
    pub(crate) options: ConnectionOptions,
    /// Learns the server's time from every connection.
    pub(crate) clock: Arc<ServerClock>,
    /// The table that pooled connections are for.
    pub(super) table: Arc<Table>,
}

/// A pool of connections to a MySQL server.
pub(crate) type MysqlPool = pool::Pool<Connector>;

impl Connector {
    /// Opens a connection, ready for the statements on `table`.
    pub(super) fn open(
        &self,
        options: &ConnectionOptions,
        table: Option<&Table>,
    ) -> Result<Connection> {
        Connection::open(&self.server, options, &self.clock, table).map_err(|error| {
            let closed = error.is_closed();
            let error = error.into_error();
            let hint = match error.kind() {
                ErrorKind::Timeout => "; it hangs, or is not a MySQL server",
                _ if closed => "; it is starting or stopping, or is not a MySQL server",
                _ => "",
            };
            Error::new(
                error.kind(),
                format!("cannot connect to {}: {error}{hint}", self.server),
            )
            .not_sent()
        })
    }
}

impl pool::Connect for Connector {
    type Connection = Connection;

    fn connect(&self) -> Result<Connection> {
        self.open(&self.options, Some(&self.table))
    }

    /// A server counts the handshakes that were begun and given up, and locks the host out (1129) at
    /// `max_connect_errors`, 100 by default: with these pauses that takes 25 minutes.
    fn longest_pause(&self, error: &Error) -> Duration {
        match error.kind() {
            ErrorKind::Timeout | ErrorKind::Protocol | ErrorKind::Denied => MAX_KNOCK,
            _ => Duration::from_millis(250),
        }
    }

    fn server(&self) -> String {
        self.server.to_string()
    }
}

impl pool::Pooled for Connection {
    fn is_broken(&self) -> bool {
        self.is_poisoned()
    }

    fn last_reply_at(&self) -> Moment {
        self.heard_at
    }
}

/// A connection to a server whose session is in UTC, strict and in autocommit mode.
pub(crate) struct Connection {
    conn: Conn,
    /// The longest that one request can take.
    patience: Duration,
    /// The shortest that one has taken: no answer comes sooner than after the round trip.
    round_trip: Duration,
    /// How long its socket waits at the moment; a request with less time shortens it.
    socket_timeout: Duration,
    poisoned: bool,
    /// When the last request was sent.
    sent: Moment,
    /// When the last answer came.
    heard_at: Moment,
    /// What was prepared on it, by its text: the driver would read the text anew for every request.
    prepared: Vec<(String, Statement)>,
}

impl Connection {
    fn open(
        server: &Server,
        options: &ConnectionOptions,
        clock: &ServerClock,
        table: Option<&Table>,
    ) -> Result<Connection, RequestError> {
        // Nobody's lease waits for a log-in: on a busy machine it may take far longer than an answer may.
        let limit = if cfg!(unix) {
            options.connect_timeout
        } else {
            options.read_timeout
        };
        let log_in = server.log_in().map_err(RequestError::poison)?;
        let mut connection = caught(limit, || {
            let mut conn = server.open(log_in, options.connect_timeout, limit)?;
            conn.query_drop(session(options))?;
            if !options.init.is_empty() {
                conn.query_drop(&options.init)?;
            }
            let sent = Moment::now();
            let millis: Option<Value> =
                conn.query_first("SELECT CAST(UNIX_TIMESTAMP(SYSDATE(3)) * 1000 AS UNSIGNED)")?;
            if let Some(Ok(millis)) = millis.map(mysql::from_value_opt::<u64>) {
                clock.learn(millis, sent);
            }
            let heard_at = Moment::now();
            Ok(Connection {
                conn,
                patience: limit,
                round_trip: heard_at - sent,
                socket_timeout: limit,
                poisoned: false,
                sent,
                heard_at,
                prepared: Vec::new(),
            })
        })?;
        // Before anybody waits for it: a call that had to prepare first might not fit in its time. What
        // fails here fails again where somebody hears of it.
        if let Some(table) = table
            && let Err(error) = table.prepare(&mut connection)
            && connection.poisoned
        {
            return Err(RequestError::poison(error));
        }
        connection.patience = patience(options, connection.round_trip);
        connection.set_socket_timeout(connection.patience)?;
        Ok(connection)
    }

    fn set_socket_timeout(&mut self, timeout: Duration) -> Result<(), RequestError> {
        if timeout == self.socket_timeout {
            return Ok(());
        }
        #[cfg(unix)]
        caught(timeout, || {
            let socket = socket2::SockRef::from(&self.conn);
            socket.set_read_timeout(Some(timeout))?;
            Ok(socket.set_write_timeout(Some(timeout))?)
        })?;
        self.socket_timeout = timeout;
        Ok(())
    }

    /// Makes one request: `work` sends one statement and reads its answer, for which it waits until `by`
    /// and never longer than its patience. (Where a round trip takes most of the time left, up to an eighth of
    /// that longer: belief does not wait for it.) Nothing is sent where hardly any time is left. Whatever
    /// leaves the outcome unknown leaves the connection unusable: a late answer would be taken for that of
    /// the next request.
    pub(crate) fn run<T>(
        &mut self,
        by: Moment,
        work: impl FnOnce(&mut Conn) -> mysql::Result<T>,
    ) -> Result<T, RequestError> {
        self.run_within(self.patience, by, work)
    }

    /// As [`run`](Connection::run), with another patience: a statement that waits for a row lock needs more.
    pub(crate) fn run_within<T>(
        &mut self,
        patience: Duration,
        by: Moment,
        work: impl FnOnce(&mut Conn) -> mysql::Result<T>,
    ) -> Result<T, RequestError> {
        if self.poisoned {
            return Err(RequestError::given_up());
        }
        let left = by.remaining();
        if left < least(patience) {
            return Err(RequestError::too_late());
        }
        // The kernel's timers end up to an eighth late. But an answer from far away must not be given up just before
        // it comes: that would cost the connection, and with it several round trips.
        let answer = (self.round_trip + self.round_trip / 4).min(left);
        let limit = (left - left / 8).max(answer).min(patience);
        if let Err(error) = self.set_socket_timeout(limit) {
            self.poisoned = true;
            return Err(error);
        }
        let conn = &mut self.conn;
        self.sent = Moment::now();
        let outcome = caught(limit, || work(conn));
        let now = Moment::now();
        match &outcome {
            Ok(_) => self.round_trip = self.round_trip.min(now - self.sent),
            Err(error) => self.poisoned |= error.is_poison(),
        }
        if !self.poisoned {
            self.heard_at = now;
        }
        outcome
    }

    /// Makes one request with a prepared statement, as [`run`](Connection::run); one more before it, to
    /// prepare the statement, the first time.
    pub(super) fn exec<T>(
        &mut self,
        by: Moment,
        sql: &str,
        params: impl Into<Params>,
        read: impl FnOnce(QueryResult<'_, '_, '_, Binary>) -> mysql::Result<T>,
    ) -> Result<T, RequestError> {
        let statement = self.prepare(by, sql)?;
        self.run(by, |conn| read(conn.exec_iter(statement, params)?))
    }

    /// Prepares a statement, unless it is. A request of its own: together with the execution it would have
    /// the time of one answer for two.
    pub(super) fn prepare(&mut self, by: Moment, sql: &str) -> Result<Statement, RequestError> {
        if let Some((_, statement)) = self.prepared.iter().find(|(text, _)| text == sql) {
            return Ok(statement.clone());
        }
        let statement = self
            .run(by, |conn| conn.prep(sql))
            .map_err(RequestError::not_sent)?;
        self.prepared.push((sql.to_owned(), statement.clone()));
        Ok(statement)
    }

    /// The longest that one request can take.
    pub(crate) fn patience(&self) -> Duration {
        self.patience
    }

    /// The shortest that a request has taken.
    pub(super) fn round_trip(&self) -> Duration {
        self.round_trip
    }

    /// When the last request was sent.
    pub(crate) fn sent(&self) -> Moment {
        self.sent
    }

    /// Returns `true` if it was given up.
    pub(crate) fn is_poisoned(&self) -> bool {
        self.poisoned
    }

    /// Gives it up.
    pub(crate) fn poison(&mut self) {
        self.poisoned = true;
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection")
            .field("id", &self.conn.connection_id())
            .field("poisoned", &self.poisoned)
            .finish_non_exhaustive()
    }
}

/// The least time in which a request is made at all. Elsewhere than on Unix the driver shows no socket, and
/// how long an answer is waited for is fixed when a connection is opened.
pub(super) fn least(patience: Duration) -> Duration {
    if cfg!(unix) {
        patience.min(Duration::from_millis(10))
    } else {
        patience
    }
}

/// How long an answer is waited for. A server that is far away gets more: where no answer came in time, every
/// attempt would break its connection, and leave a lease in the row that keeps the mutex from everybody.
/// Elsewhere than on Unix that is fixed before the round trip is known.
fn patience(options: &ConnectionOptions, round_trip: Duration) -> Duration {
    let far = if cfg!(unix) {
        (round_trip * 2).min(options.longest)
    } else {
        Duration::ZERO
    };
    options.read_timeout.max(far)
}

/// The session, in one statement.
///
/// utf8mb4, because a server may disregard what the handshake says. UTC, because
/// `UNIX_TIMESTAMP(NOW())` is an hour wrong in the autumn fold of a local time zone. Strict, because a
/// server that is not cuts an id to the column's width and never finds it again. REPEATABLE READ, because
/// under `binlog_format=STATEMENT` the other one refuses every write. The server would close an idle
/// connection after `wait_timeout`; the pool does that sooner.
fn session(options: &ConnectionOptions) -> String {
    let lock_wait = options.lock_wait.as_secs().max(1);
    format!(
        "SET NAMES utf8mb4, time_zone = '+00:00', \
         sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION', autocommit = 1, \
         /*M!100100 tx_isolation = 'REPEATABLE-READ', */ \
         /*!80000 transaction_isolation = 'REPEATABLE-READ', */ \
         innodb_lock_wait_timeout = {lock_wait}, lock_wait_timeout = {lock_wait}, \
         wait_timeout = 86400"
    )
}

/// The driver indexes into packets that a broken server may have sent empty: a panic there is an
/// answer that we do not understand, and nothing more.
fn caught<T>(
    patience: Duration,
    work: impl FnOnce() -> mysql::Result<T>,
) -> Result<T, RequestError> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(outcome) => outcome.map_err(|error| RequestError::new(error, patience)),
        Err(_) => Err(RequestError::panicked()),
    }
}

/// The server's clock, carried on by the local boot-time clock.
///
/// For what is shown of an owner that just won and read nothing back, and for the "not after" of an
/// acquire. Expiry is decided by the server's own clock, and belief counts locally from the send.
#[derive(Debug, Default)]
pub(crate) struct ServerClock {
    last: Mutex<Option<(u64, Moment)>>,
}

impl ServerClock {
    /// The server's clock showed `millis`, in epoch milliseconds, after `sent`.
    pub(crate) fn learn(&self, millis: u64, sent: Moment) {
        *self.last.lock() = Some((millis, sent));
    }

    /// Returns the server's epoch milliseconds at `local`, never too early while nobody sets a clock;
    /// zero before the first connection.
    pub(crate) fn millis_at(&self, local: Moment) -> u64 {
        let millis = |duration: Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
        match *self.last.lock() {
            Some((at, sent)) if local >= sent => at.saturating_add(millis(local - sent)),
            Some((at, sent)) => at.saturating_sub(millis(sent - local)),
            None => 0,
        }
    }
}
