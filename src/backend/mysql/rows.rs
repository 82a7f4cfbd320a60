//! The statements on a mutex's row, one function each ([`Call`]), and the row as it is read ([`Row`]).

use std::sync::Arc;
use std::time::Duration;

use mysql::prelude::Queryable;
use mysql::{Binary, Params, QueryResult, params};

use super::builder::default_read_timeout;
use super::connection::{Connection, Connector, MysqlPool, ServerClock, least};
use super::error::RequestError;
use super::table::{Statements, Table, column, kill};
use crate::backend::{CLAIM_TIME, Contender};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::lease::Lease;
use crate::owner::MutexOwner;
use crate::pool::{Checkout, Lane};

/// The token of one that has not registered: no process has it.
pub(super) const NO_TOKEN: &str = "0";

/// The least time that the statements of a call get: less than the 200 ms by which `try_lock_for` may
/// overrun its timeout.
const LATE: Duration = Duration::from_millis(150);

/// The table, and the pool through which it is reached.
#[derive(Debug)]
pub(super) struct Rows {
    pub(super) pool: MysqlPool,
    pub(super) table: Arc<Table>,
    pub(super) clock: Arc<ServerClock>,
}

/// Makes the requests of one call to the backend, on one connection and until `by`.
pub(super) struct Call<'c> {
    pub(super) rows: &'c Rows,
    pub(super) connection: &'c mut Connection,
    pub(super) by: Moment,
}

/// A row as it was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Row {
    pub(super) owner_id: String,
    pub(super) acquired_at: u64,
    pub(super) ttl_at: u64,
    pub(super) transition_at: u64,
    pub(super) fence: u64,
    pub(super) waiters: String,
    pub(super) version: u64,
    pub(super) run_at: u64,
    /// The server's clock when it was read.
    pub(super) now: u64,
    /// When the request was sent.
    pub(super) sent: Moment,
}

/// The outcome of waking a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Woken {
    /// It was told, or nobody knows.
    Told,
    /// Nobody holds its name: it is dead.
    Dead,
    /// It belongs to another account, which we may not wake.
    Foreign,
}

impl Rows {
    /// Returns a connection on which an owner's request can be answered until `by`, because belief ends
    /// before a call that outlasts it. With less time than a slow answer may take nothing is asked:
    /// giving up the connection would cost the owner the next renewal too.
    pub(super) fn checkout_for(&self, lease: Lease, by: Moment) -> Result<Checkout<Connector>> {
        let patience = self.patience().min(default_read_timeout(lease));
        let connection = self.pool.checkout(Lane::Owner, by - patience)?;
        if by.remaining() < patience {
            return Err(RequestError::too_late().into());
        }
        Ok(connection)
    }

    /// Returns a connection that came free before `by`, and until when requests on it may take: a caller
    /// with hardly any time is served all the same, and has its answer a little late only where the
    /// server hangs.
    pub(super) fn checkout_late(
        &self,
        lane: Lane,
        by: Moment,
    ) -> Result<(Checkout<Connector>, Moment)> {
        let connection = self.pool.checkout(lane, by)?;
        let late = LATE.max(least(self.patience()) * 4);
        Ok((connection, by.max(Moment::now() + late)))
    }

    /// Does `work`, which ends an ownership, as [`call`](Rows::call). It has at least the time of an answer: on
    /// a server that is far away, a caller that unlocks would else break its connection every time.
    pub(super) fn call_to_end<T>(
        &self,
        by: Moment,
        work: impl FnOnce(&mut Call<'_>) -> Result<T>,
    ) -> Result<T> {
        let (mut connection, by) = self.checkout_late(Lane::Owner, by)?;
        let round_trip = connection.round_trip();
        let answer = (round_trip + round_trip / 4).min(connection.patience());
        work(&mut self.on(&mut connection, by.max(Moment::now() + answer)))
    }

    /// Does `work` on a connection that came free before `by`, as [`checkout_late`](Rows::checkout_late).
    pub(super) fn call<T, E: From<Error>>(
        &self,
        lane: Lane,
        by: Moment,
        work: impl FnOnce(&mut Call<'_>) -> Result<T, E>,
    ) -> Result<T, E> {
        let (mut connection, by) = self.checkout_late(lane, by)?;
        work(&mut self.on(&mut connection, by))
    }

    /// Returns a call on this connection.
    pub(super) fn on<'c>(&'c self, connection: &'c mut Connection, by: Moment) -> Call<'c> {
        Call {
            rows: self,
            connection,
            by,
        }
    }

    /// Returns the longest that one request can take.
    pub(super) fn patience(&self) -> Duration {
        self.pool.connector().options.read_timeout
    }
}

impl Call<'_> {
    /// Tries to make `contender` the owner: with the token of its process, where that stands in the row,
    /// and saying whether more of its process wait. Returns the owner's snapshot, or `None`.
    pub(super) fn acquire(
        &mut self,
        contender: &Contender,
        token: &str,
        more: bool,
        not_after: Moment,
    ) -> Result<Option<MutexOwner>, Failed> {
        let (ttl, total) = millis(contender.lease);
        let clock = &self.rows.clock;
        let not_after = match not_after {
            Moment::FAR => u64::MAX >> 1,
            moment => clock.millis_at(moment),
        };
        let sent = Moment::now();
        let fence = self.update(|statements| {
            let params = params! {
                "mutex" => &*contender.mutex, "id" => &*contender.id, token, more, not_after, ttl, total,
            };
            (&statements.acquire, params)
        })?;
        Ok(fence.map(|fence| {
            let now = clock.millis_at(sent);
            // The fence is the server's time in microseconds, as a rule.
            let at = Some(fence / 1_000)
                .filter(|at| at.abs_diff(now) < 60_000)
                .unwrap_or(now);
            MutexOwner::new(Arc::clone(&contender.id), at, at + ttl, at + total, fence)
                .observed_at(at, sent)
        }))
    }

    /// Sets the lease of an owner anew. Returns its `ttl_at`, or `None` if it is lost.
    pub(super) fn renew(
        &mut self,
        contender: &Contender,
        fence: u64,
    ) -> Result<Option<u64>, Failed> {
        let (ttl, total) = millis(contender.lease);
        self.update(|statements| {
            let (mutex, id) = (&*contender.mutex, &*contender.id);
            (&statements.renew, params! { mutex, id, fence, ttl, total })
        })
    }

    /// Ends an ownership. Returns the token that the mutex was handed over to, zero for none, or `None` if
    /// there was no such ownership.
    pub(super) fn release(&mut self, mutex: &str, whose: Whose<'_>) -> Result<Option<u64>, Failed> {
        self.update(|statements| match whose {
            Whose::Owner(id, fence) => (&statements.release, params! { mutex, id, fence }),
            Whose::Id(id) => (&statements.release_any, params! { mutex, id }),
            Whose::Fence(fence) => (&statements.revoke, params! { mutex, fence }),
        })
    }

    /// Puts a token at the end of the list, unless it is there or there is no room.
    pub(super) fn register(&mut self, mutex: &str, token: &str) -> Result<(), Failed> {
        self.expect_time()?;
        self.update(|statements| (&statements.register, params! { mutex, token }))?;
        Ok(())
    }

    /// Takes a token out of the row. Returns the token that the mutex was handed on to, zero for none.
    pub(super) fn withdraw(&mut self, mutex: &str, token: &str) -> Result<u64, Failed> {
        let next = self.update(|statements| (&statements.withdraw, params! { mutex, token }))?;
        Ok(next.unwrap_or(0))
    }

    /// Frees a mutex that was handed over to `token`.
    pub(super) fn undo_hand_over(&mut self, mutex: &str, token: &str) -> Result<(), Failed> {
        self.update(|statements| (&statements.undo_hand_over, params! { mutex, token }))?;
        Ok(())
    }

    /// Records a run. Returns `false` if the owner has not this fence any more.
    pub(super) fn record_run(&mut self, mutex: &str, fence: u64) -> Result<bool> {
        let recorded =
            self.update(|statements| (&statements.record_run, params! { mutex, fence }))?;
        Ok(recorded.is_some())
    }

    /// Wakes the process that has `token`.
    pub(super) fn wake(&mut self, token: &str) -> Woken {
        if self.expect_time().is_err() {
            // It looks by itself at the poll interval.
            return Woken::Told;
        }
        let killed = self
            .connection
            .run(self.by, |conn| conn.query_drop(kill(token)));
        match killed.as_ref().err().and_then(RequestError::code) {
            Some(1094) => Woken::Dead,
            Some(1095) => Woken::Foreign,
            _ => {
                if let Err(error) = killed {
                    self.note(&error.into());
                }
                Woken::Told
            }
        }
    }

    /// Reads a row, and the server's clock.
    pub(super) fn look(&mut self, mutex: &str) -> Result<Option<Row>> {
        self.expect_time()?;
        let statements = self.statements()?;
        let sent = Moment::now();
        let row: Option<mysql::Row> =
            self.exec(&statements.look, params! { mutex }, |mut result| {
                result.next().transpose()
            })?;
        let Some(mut row) = row else {
            return Ok(None);
        };
        let row = Row::read(&mut row, 0, sent).ok_or_else(|| {
            Error::new(
                ErrorKind::Misconfigured,
                "a column of the table of mutexes is not of the type in sql/init-mutex.sql",
            )
        })?;
        self.rows.clock.learn(row.now, sent);
        Ok(Some(row))
    }

    /// Makes the row of a mutex. Returns `false` if it is there already.
    pub(super) fn insert(&mut self, mutex: &str) -> Result<bool> {
        self.expect_time()?;
        let statements = self.statements()?;
        let (sql, params) = (&statements.insert, params! { mutex });
        let inserted = self.connection.exec(self.by, sql, params, |_| Ok(()));
        match inserted {
            Ok(()) => Ok(true),
            Err(error) if error.is_duplicate() => Ok(false),
            Err(error) => Err(self.failed(error).error),
        }
    }

    /// Reads the names of the mutexes that have an owner or a waiter.
    pub(super) fn list(&mut self) -> Result<Vec<Arc<str>>> {
        let statements = self.statements()?;
        let names: Vec<String> = self.ask(|conn| conn.query(&statements.list))?;
        Ok(names.into_iter().map(Arc::from).collect())
    }

    /// Asks the server one question: whether this user may read the table, and not what is in it.
    pub(super) fn ping(&mut self) -> Result<()> {
        let statements = self.statements()?;
        self.ask(|conn| conn.query_drop(&statements.ping))
    }

    /// Makes the table if it is not there.
    pub(super) fn create_table(&mut self) -> Result<()> {
        let sql = self.rows.table.create_statement();
        self.ask(|conn| conn.query_drop(sql))?;
        self.rows.table.forget();
        Ok(())
    }

    /// Returns the statements for the table as it is.
    pub(super) fn statements(&mut self) -> Result<Arc<Statements>> {
        let statements = self.rows.table.statements(self.connection, self.by);
        statements.map_err(|error| {
            self.note(&error);
            error.not_sent()
        })
    }

    /// Refuses a request whose answer would come too late: nothing is asked, and no connection lost. Not for
    /// what must be tried whatever was measured: to acquire, to renew and to release.
    pub(super) fn expect_time(&self) -> Result<()> {
        if self.by.remaining() < self.connection.round_trip() {
            return Err(RequestError::too_late().into());
        }
        Ok(())
    }

    /// Runs one UPDATE. Returns the last insert id it set, or `None` if no row matched.
    fn update(
        &mut self,
        statement: impl for<'s> FnOnce(&'s Statements) -> (&'s String, Params),
    ) -> Result<Option<u64>, Failed> {
        let statements = self.statements()?;
        let (sql, params) = statement(&statements);
        self.exec(sql, params, |result| {
            let matched = result.affected_rows() > 0;
            Ok(matched.then(|| result.last_insert_id().unwrap_or(0)))
        })
    }

    /// Makes one request with a prepared statement.
    fn exec<T>(
        &mut self,
        sql: &str,
        params: Params,
        read: impl FnOnce(QueryResult<'_, '_, '_, Binary>) -> mysql::Result<T>,
    ) -> Result<T, Failed> {
        let answer = self.connection.exec(self.by, sql, params, read);
        answer.map_err(|error| self.failed(error))
    }

    /// Makes one request that changes nothing if it fails.
    fn ask<T>(&mut self, work: impl FnOnce(&mut mysql::Conn) -> mysql::Result<T>) -> Result<T> {
        let answer = self.connection.run(self.by, work);
        answer.map_err(|error| self.failed(error).error)
    }

    fn failed(&self, error: RequestError) -> Failed {
        let unknown = error.is_outcome_unknown();
        let error = self.rows.table.explain(error);
        self.note(&error);
        Failed { unknown, error }
    }

    /// Discards idle connections, after one broke, that were not heard of since its request was sent: else
    /// each of them would fail a call after a restart of the server.
    fn note(&self, error: &Error) {
        if self.connection.is_poisoned() {
            self.rows.pool.lost(error);
            self.rows.pool.discard_idle(self.connection.sent());
        }
    }
}

/// A statement that failed, and whether it may have done something all the same.
#[derive(Debug)]
pub(super) struct Failed {
    pub(super) unknown: bool,
    pub(super) error: Error,
}

impl From<Error> for Failed {
    /// Converts an error that came before the statement was sent.
    fn from(error: Error) -> Failed {
        Failed {
            unknown: false,
            error,
        }
    }
}

impl From<Failed> for Error {
    fn from(failed: Failed) -> Error {
        failed.error
    }
}

/// Whose ownership a release ends.
#[derive(Clone, Copy, Debug)]
pub(super) enum Whose<'a> {
    /// That of this id, with this fence.
    Owner(&'a str, u64),
    /// That of this id, whatever its fence.
    Id(&'a str),
    /// That with this fence, whoever has it.
    Fence(u64),
}

impl Row {
    /// Reads the columns of `sql/mutex-look.sql`, which begin at `first`.
    fn read(row: &mut mysql::Row, first: usize, sent: Moment) -> Option<Row> {
        Some(Row {
            owner_id: column(row, first)?,
            acquired_at: column(row, first + 1)?,
            ttl_at: column(row, first + 2)?,
            transition_at: column(row, first + 3)?,
            fence: column(row, first + 4)?,
            waiters: column(row, first + 5)?,
            version: column(row, first + 6)?,
            run_at: column(row, first + 7)?,
            now: column(row, first + 8)?,
            sent,
        })
    }

    /// Reads what [`Statements::look_many`] returns: the mutex, whether it is quiet, and the row.
    pub(super) fn read_which(mut row: mysql::Row, sent: Moment) -> Option<(String, bool, Row)> {
        let (mutex, quiet) = (column(&mut row, 0)?, column(&mut row, 1)?);
        Some((mutex, quiet, Row::read(&mut row, 2, sent)?))
    }

    /// Returns the token of the process that the mutex is handed over to.
    pub(super) fn handed_to(&self) -> Option<&str> {
        self.owner_id.strip_prefix('~')
    }

    /// Returns the tokens of the processes that wait, first come first.
    pub(super) fn tokens(&self) -> impl Iterator<Item = &str> {
        self.waiters.split(':').skip(1)
    }

    /// Returns how long the lease or the hand-over lasts; zero once it has run out.
    pub(super) fn left(&self) -> Duration {
        Duration::from_millis(
            self.transition_at
                .saturating_add(1)
                .saturating_sub(self.now),
        )
    }

    /// Returns `true` if the lease or the hand-over has run out.
    pub(super) fn is_over(&self) -> bool {
        self.transition_at < self.now
    }

    /// Returns `true` if `id`, of a process with `token`, could acquire.
    pub(super) fn is_for(&self, id: &str, token: &str) -> bool {
        let claim = u64::try_from(CLAIM_TIME.as_millis()).unwrap_or(u64::MAX);
        self.owner_id == id
            || self.handed_to() == Some(token)
            || (self.is_over()
                && (self.waiters.is_empty()
                    || self.tokens().next() == Some(token)
                    || self.transition_at.saturating_add(claim) < self.now))
            || (self.handed_to().is_some() && self.transition_at > self.now.saturating_add(claim))
    }

    /// Returns `true` if a contender of Simba's owns: our fences are at least the time of acquisition in
    /// microseconds, Simba's count.
    pub(super) fn is_simbas(&self) -> bool {
        self.fence < self.acquired_at.saturating_mul(1_000)
    }

    /// Returns the owner; `NONE` while the mutex is free or handed over.
    pub(super) fn owner(&self) -> MutexOwner {
        if self.is_over() {
            return MutexOwner::NONE;
        }
        self.last_owner()
    }

    /// Returns the owner that the row names, its lease run out or not.
    pub(super) fn last_owner(&self) -> MutexOwner {
        if self.owner_id.is_empty() || self.handed_to().is_some() {
            return MutexOwner::NONE;
        }
        MutexOwner::new(
            self.owner_id.as_str(),
            self.acquired_at,
            self.ttl_at,
            self.transition_at,
            self.fence,
        )
        .observed_at(self.now, self.sent)
    }
}

/// Returns ttl, and ttl + transition, in milliseconds.
pub(super) fn millis(lease: Lease) -> (u64, u64) {
    let millis = |duration: Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    (millis(lease.ttl()), millis(lease.total()))
}
