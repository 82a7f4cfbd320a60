//! One connection: set up so that every server behaves alike, and given up at the first doubt; and what
//! the pool opens connections with.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use mysql::prelude::Queryable;
use mysql::{Conn, Statement};

use super::error::RequestError;
use super::server::Server;
use super::table::Table;
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::pool;

/// How long the server lets a statement wait for a row or table lock.
pub(crate) const LOCK_WAIT: Duration = Duration::from_secs(1);

/// How long a statement that waits for wake-ups takes at most: it may wait for a table lock first.
const LONGEST_WAIT: Duration = Duration::from_secs(2);

/// A time limit for statements would end waits. A half-open connection must let go of its named lock.
const WAITING_SESSION: &str = "SET /*M!100100 max_statement_time = 0, */ /*!80000 max_execution_time = 0, */ \
    wait_timeout = 10";

/// The longest pause between two attempts to connect to a server that lets handshakes time out.
const MAX_KNOCK: Duration = Duration::from_secs(15);

/// Opens the connections of a factory.
#[derive(Clone)]
pub(crate) struct Connector {
    pub(crate) server: Server,
    /// The longest wait for the TCP connection, and for each answer until the connection is ready.
    pub(crate) connect_timeout: Duration,
    /// The longest wait for an answer from then on.
    pub(crate) request_limit: Duration,
    /// Learns the server's time from every connection.
    pub(crate) clock: Arc<ServerClock>,
    /// The table that pooled connections are for.
    pub(super) table: Arc<Table>,
}

/// A pool of connections to a MySQL server.
pub(crate) type MysqlPool = pool::Pool<Connector>;

impl Connector {
    /// Opens a connection that holds a named lock and waits.
    pub(super) fn open_for_waiting(&self) -> Result<Connection> {
        self.open(self.request_limit + LONGEST_WAIT, |connection| {
            let set = connection.run(Moment::FAR, |conn| conn.query_drop(WAITING_SESSION));
            Ok(set?)
        })
    }

    /// Opens a connection and prepares it for its use, with the time limits of a log-in.
    fn open(
        &self,
        patience: Duration,
        prepare: impl FnOnce(&mut Connection) -> Result<()>,
    ) -> Result<Connection> {
        let opened = self.log_in().and_then(|mut connection| {
            match prepare(&mut connection) {
                Err(error) if connection.poisoned => return Err(RequestError::poison(error)),
                // The first real request reports it.
                _ => connection.patience = patience,
            }
            Ok(connection)
        });
        opened.map_err(|error| {
            let error = Error::from(error);
            let message = format!("cannot connect to {}: {error}", self.server);
            Error::new(error.kind(), message).not_sent()
        })
    }

    fn log_in(&self) -> Result<Connection, RequestError> {
        // Log-in runs on a pool thread, so it has its own timeout. Elsewhere than on Unix the driver shows no socket,
        // and how long an answer is waited for is fixed when a connection is opened.
        let limit = match cfg!(unix) {
            true => self.connect_timeout,
            false => self.request_limit,
        };
        let options = self.server.options(self.connect_timeout, limit);
        let options = options.map_err(RequestError::poison)?;
        caught(limit, || {
            let mut conn = Conn::new(options)?;
            conn.query_drop(SESSION)?;
            let sent = Moment::now();
            let millis: Option<u64> =
                conn.query_first("SELECT CAST(UNIX_TIMESTAMP(SYSDATE(3)) * 1000 AS UNSIGNED)")?;
            self.clock.learn(millis.unwrap_or(0), sent);
            Ok(Connection {
                conn,
                patience: limit,
                round_trip: Moment::now() - sent,
                poisoned: false,
                sent,
                prepared: Vec::new(),
            })
        })
    }
}

impl pool::Connect for Connector {
    type Connection = Connection;

    /// Prepares what cycles need: a call that had to prepare it first might not fit in its time.
    fn connect(&self) -> Result<Connection> {
        self.open(self.request_limit, |connection| {
            self.table.prepare(connection)
        })
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

/// A connection to a server whose session is in UTC, strict and in autocommit mode.
pub(crate) struct Connection {
    conn: Conn,
    /// The longest that one request can take.
    patience: Duration,
    /// The shortest that one has taken: no answer comes sooner than after the round trip.
    pub(super) round_trip: Duration,
    /// It was given up, and is not used again.
    pub(super) poisoned: bool,
    /// When the last request was sent.
    pub(super) sent: Moment,
    /// What was prepared on it, by its text: the driver would read the text anew for every request.
    prepared: Vec<(String, Statement)>,
}

impl Connection {
    /// Makes one request: `work` sends one statement and reads its answer, for which it waits until `by`
    /// and never longer than its patience. What leaves the outcome unknown leaves the connection unusable: a late
    /// answer would be taken for that of the next request.
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
            return Err(RequestError::closed());
        }
        let left = by.remaining();
        if left < SHORTEST {
            return Err(RequestError::no_time_left());
        }
        // The kernel's timers end up to an eighth late. But an answer from far away must not be given up just before
        // it comes: that would cost the connection, and with it several round trips.
        let answer = (self.round_trip + self.round_trip / 4).min(left);
        let limit = (left - left / 8).max(answer).min(patience);
        let conn = &mut self.conn;
        self.sent = Moment::now();
        let outcome = caught(limit, || {
            #[cfg(unix)]
            {
                let socket = socket2::SockRef::from(&*conn);
                socket.set_read_timeout(Some(limit))?;
                socket.set_write_timeout(Some(limit))?;
            }
            work(conn)
        });
        match &outcome {
            Ok(_) => self.round_trip = self.round_trip.min(Moment::now() - self.sent),
            Err(error) => self.poisoned |= error.poisoned,
        }
        outcome
    }

    /// Prepares a statement, unless it is. A request of its own: together with the execution it would have
    /// the time of one answer for two.
    pub(super) fn prepare(&mut self, by: Moment, sql: &str) -> Result<Statement, RequestError> {
        if let Some((_, statement)) = self.prepared.iter().find(|(text, _)| text == sql) {
            return Ok(statement.clone());
        }
        let prepared = self.run(by, |conn| conn.prep(sql));
        let statement = prepared.map_err(RequestError::not_sent)?;
        self.prepared.push((sql.to_owned(), statement.clone()));
        Ok(statement)
    }
}

impl pool::Pooled for Connection {
    fn is_broken(&self) -> bool {
        self.poisoned
    }

    /// No earlier than its request, if there was one.
    fn last_reply_at(&self) -> Moment {
        self.sent
    }
}

/// A socket cannot wait for less.
const SHORTEST: Duration = Duration::from_millis(1);

/// The session, in one statement.
///
/// utf8mb4, because a server may disregard what the handshake says. UTC, because
/// `UNIX_TIMESTAMP(NOW())` is an hour wrong in the autumn fold of a local time zone. Strict, because a
/// server that is not cuts an id to the column's width and never finds it again. REPEATABLE READ, because
/// under `binlog_format=STATEMENT` the other one refuses every write. The lock waits are [`LOCK_WAIT`]. The server
/// would close an idle connection after `wait_timeout`; the pool does that sooner.
const SESSION: &str = "SET NAMES utf8mb4, time_zone = '+00:00', \
    sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION', autocommit = 1, \
    /*M!100100 tx_isolation = 'REPEATABLE-READ', */ \
    /*!80000 transaction_isolation = 'REPEATABLE-READ', */ \
    innodb_lock_wait_timeout = 1, lock_wait_timeout = 1, wait_timeout = 86400";

/// The driver indexes into packets that a broken server may have sent empty. A panic there counts as an
/// answer that is not understood.
fn caught<T>(
    patience: Duration,
    work: impl FnOnce() -> mysql::Result<T>,
) -> Result<T, RequestError> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(outcome) => outcome.map_err(|error| RequestError::new(error, patience)),
        Err(_) => {
            let message = "the driver could not read the answer; is this a MySQL server?";
            let error = Error::new(ErrorKind::Protocol, message);
            Err(RequestError::poison(error))
        }
    }
}

/// The server's clock, carried on by the local boot-time clock.
///
/// For what is shown of an owner that just won and read nothing back, and for the "not after" of an
/// acquire. Expiry is decided by the server's own clock, and belief counts locally from the send.
#[derive(Default)]
pub(crate) struct ServerClock {
    /// What it showed when the local clock began, in epoch milliseconds; zero before the first connection.
    at_origin: AtomicU64,
}

impl ServerClock {
    /// The server's clock showed `millis`, in epoch milliseconds, after `sent`.
    pub(crate) fn learn(&self, millis: u64, sent: Moment) {
        let at_origin = millis.saturating_sub(since_origin(sent));
        self.at_origin.store(at_origin, Ordering::Relaxed);
    }

    /// Returns the server's epoch milliseconds at `local`, unless a clock was set.
    pub(crate) fn millis_at(&self, local: Moment) -> u64 {
        let at_origin = self.at_origin.load(Ordering::Relaxed);
        at_origin.saturating_add(since_origin(local))
    }
}

fn since_origin(local: Moment) -> u64 {
    u64::try_from(local.since_origin().as_millis()).unwrap_or(u64::MAX)
}
