//! One connection: set up so that every server behaves alike, and given up at the first doubt.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use mysql::prelude::Queryable;
use mysql::{Conn, Value};

use super::clock::ServerClock;
use super::fault::Fault;
use super::server::Server;
use crate::clock::Moment;
use crate::error::Error;

/// How connections are opened.
#[derive(Clone)]
pub(crate) struct LinkOptions {
    /// The longest wait for the TCP connection, and for the write of a request.
    pub(crate) connect_timeout: Duration,
    /// The longest wait for an answer. `None`: for as long as it takes.
    pub(crate) read_timeout: Option<Duration>,
    /// How long the server lets a statement wait for a row or table lock; whole seconds, at least one.
    pub(crate) lock_wait: Duration,
    /// More statements to set the session up with, such as an isolation level.
    pub(crate) init: Vec<String>,
    /// What else to do with a new connection before anybody waits for it, such as to prepare
    /// statements: a call that had to do that first might not fit in its time. It may fail, as long as
    /// the connection is fit for use.
    pub(crate) prepare: Option<Prepare>,
}

/// Makes a new connection ready.
pub(crate) type Prepare = Arc<dyn Fn(&mut Link) -> Result<(), Error> + Send + Sync>;

impl fmt::Debug for LinkOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LinkOptions")
            .field("connect_timeout", &self.connect_timeout)
            .field("read_timeout", &self.read_timeout)
            .field("lock_wait", &self.lock_wait)
            .finish_non_exhaustive()
    }
}

/// A connection to a server whose session is in UTC, strict and in autocommit mode.
pub(crate) struct Link {
    conn: Conn,
    /// The longest that one request can take.
    patience: Duration,
    poisoned: bool,
    /// When the last request was sent.
    sent: Moment,
    /// When the last request that the server answered was sent.
    answered: Moment,
}

impl Link {
    /// Connects and sets the session up: two round trips beyond the log-in, on the thread of whoever
    /// may wait for them. Also tells `clock` what time it is there.
    pub(super) fn open(
        server: &Server,
        options: &LinkOptions,
        clock: &ServerClock,
    ) -> Result<Link, Fault> {
        let mut link = caught(|| {
            let mut conn = server.open(options.connect_timeout, options.read_timeout)?;
            conn.query_drop(session(options))?;
            for statement in &options.init {
                conn.query_drop(statement)?;
            }
            let sent = Moment::now();
            let micros: Option<Value> =
                conn.query_first("SELECT CAST(UNIX_TIMESTAMP(NOW(6)) * 1000000 AS UNSIGNED)")?;
            if let Some(Ok(micros)) = micros.map(mysql::from_value_opt::<u64>) {
                clock.learn(micros, sent, Moment::now());
            }
            Ok(Link {
                conn,
                patience: options.read_timeout.unwrap_or_default(),
                poisoned: false,
                sent,
                answered: sent,
            })
        })?;
        if let Some(prepare) = &options.prepare {
            let prepared = prepare(&mut link);
            if let Err(error) = prepared
                && link.poisoned
            {
                return Err(Fault::poison(error));
            }
        }
        Ok(link)
    }

    /// One request: `work` sends one statement and reads its answer. Not sent at all where the answer
    /// might come after `by`. Whatever leaves the outcome unknown leaves the connection unusable: a
    /// late answer would be taken for that of the next request.
    pub(crate) fn run<T>(
        &mut self,
        by: Moment,
        work: impl FnOnce(&mut Conn) -> mysql::Result<T>,
    ) -> Result<T, Fault> {
        if self.poisoned {
            return Err(Fault::given_up());
        }
        if by.remaining() < self.patience {
            return Err(Fault::too_late());
        }
        let conn = &mut self.conn;
        self.sent = Moment::now();
        let outcome = caught(|| work(conn));
        match &outcome {
            Err(fault) if fault.is_poison() => self.poisoned = true,
            _ => self.answered = self.sent,
        }
        outcome
    }

    /// Runs `work` in a transaction: committed if it is fine, rolled back if it is not, so that the
    /// connection never goes back with one open (a lock wait timeout leaves it open; only a deadlock
    /// does not). A fault of the COMMIT itself leaves the outcome unknown and the connection given up.
    pub(crate) fn transaction<T, E: From<Fault>>(
        &mut self,
        by: Moment,
        work: impl FnOnce(&mut Link) -> Result<T, E>,
    ) -> Result<T, E> {
        self.run(by, |conn| conn.query_drop("BEGIN"))?;
        let outcome = work(self);
        match outcome {
            Ok(value) => {
                let committed = self.run(by, |conn| conn.query_drop("COMMIT"));
                if committed.is_err() {
                    // Also where it was not sent: the transaction is open, and closing ends it.
                    self.poisoned = true;
                }
                committed?;
                Ok(value)
            }
            Err(error) => {
                if self.run(by, |conn| conn.query_drop("ROLLBACK")).is_err() {
                    self.poisoned = true;
                }
                Err(error)
            }
        }
    }

    /// When the last request was sent, and the last one that was answered.
    pub(super) fn last_heard(&self) -> (Moment, Moment) {
        (self.sent, self.answered)
    }

    /// Whether it was given up.
    pub(crate) fn is_poisoned(&self) -> bool {
        self.poisoned
    }

    /// Gives it up.
    pub(crate) fn poison(&mut self) {
        self.poisoned = true;
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link")
            .field("id", &self.conn.connection_id())
            .field("poisoned", &self.poisoned)
            .finish_non_exhaustive()
    }
}

/// The session, in one statement.
///
/// UTC, because `UNIX_TIMESTAMP(NOW())` is an hour wrong in the autumn fold of a local time zone.
/// Strict, because a server that is not cuts an id to the column's width and never finds it again.
/// The server would close an idle connection after `wait_timeout`; the pool does that sooner.
fn session(options: &LinkOptions) -> String {
    let lock_wait = options.lock_wait.as_secs().max(1);
    format!(
        "SET time_zone = '+00:00', sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION', \
         autocommit = 1, innodb_lock_wait_timeout = {lock_wait}, lock_wait_timeout = {lock_wait}, \
         wait_timeout = 86400"
    )
}

/// The driver indexes into packets that a broken server may have sent empty: a panic there is an
/// answer that we do not understand, and nothing more.
fn caught<T>(work: impl FnOnce() -> mysql::Result<T>) -> Result<T, Fault> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(outcome) => outcome.map_err(Fault::of),
        Err(_) => Err(Fault::panicked()),
    }
}
