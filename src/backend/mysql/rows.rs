//! The rows: one function per statement.

use std::sync::Arc;
use std::time::Duration;

use mysql::prelude::Queryable;
use mysql::{Params, params};

use super::connection::{Connection, MysqlPool, ServerClock};
use super::error::RequestError;
use super::table::{Statements, Table, column, kill};
use crate::backend::{CLAIM_TIME, Contender};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::lease::Lease;
use crate::owner::MutexOwner;
use crate::pool::{Checkout, Lane};

/// A connection of a factory's pool.
pub(super) type Borrowed = Checkout<super::connection::Connector>;

/// The table, and the pool through which it is reached.
#[derive(Debug)]
pub(super) struct Rows {
    pub(super) pool: MysqlPool,
    pub(super) table: Arc<Table>,
    pub(super) clock: Arc<ServerClock>,
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

/// What became of waking a process.
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
    /// Returns a connection on which one request can be answered until `by`: for owners, whose belief no
    /// call may outlast.
    pub(super) fn checkout(&self, lane: Lane, by: Moment) -> Result<Borrowed> {
        self.pool.checkout(lane, by - self.patience())
    }

    /// Returns a connection that came free before `by`, and until when requests on it may take. How long
    /// an answer is waited for is fixed when a connection is opened: a caller with less time than that is
    /// served all the same, and has its answer late only where the server hangs.
    pub(super) fn checkout_late(&self, lane: Lane, by: Moment) -> Result<(Borrowed, Moment)> {
        let connection = self.pool.checkout(lane, by)?;
        Ok((connection, by.max(Moment::now() + self.patience() * 4)))
    }

    /// The longest that one request can take.
    pub(super) fn patience(&self) -> Duration {
        self.pool.connector().options.read_timeout
    }

    /// Tries to make `contender` the owner: with the token of its process, where that stands in the row,
    /// and saying whether more of its process wait. Returns the owner's snapshot, or `None`.
    pub(super) fn acquire(
        &self,
        connection: &mut Connection,
        contender: &Contender,
        token: &str,
        more: bool,
        not_after: Moment,
        by: Moment,
    ) -> Result<Option<MutexOwner>, Failed> {
        let (ttl, total) = millis(contender.lease);
        let not_after = match not_after {
            Moment::FAR => u64::MAX >> 1,
            moment => self.clock.millis_at(moment),
        };
        let sent = Moment::now();
        let fence = self.update(connection, by, |statements| {
            (
                statements.acquire.as_str(),
                params! {
                    "mutex" => &*contender.mutex,
                    "id" => &*contender.id,
                    "token" => token,
                    "more" => more,
                    "not_after" => not_after,
                    ttl,
                    total,
                },
            )
        })?;
        Ok(fence.map(|fence| {
            let now = self.clock.millis_at(sent);
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
        &self,
        connection: &mut Connection,
        contender: &Contender,
        fence: u64,
        by: Moment,
    ) -> Result<Option<u64>, Failed> {
        let (ttl, total) = millis(contender.lease);
        self.update(connection, by, |statements| {
            (
                statements.renew.as_str(),
                params! {
                    "mutex" => &*contender.mutex, "id" => &*contender.id, fence, ttl, total,
                },
            )
        })
    }

    /// Ends an ownership. Returns the token that the mutex was handed over to, zero for none, or `None` if
    /// there was no such ownership.
    pub(super) fn release(
        &self,
        connection: &mut Connection,
        mutex: &str,
        whose: Whose<'_>,
        by: Moment,
    ) -> Result<Option<u64>, Failed> {
        self.update(connection, by, |statements| match whose {
            Whose::Owner(id, fence) => (statements.release.as_str(), params! { mutex, id, fence }),
            Whose::Id(id) => (statements.release_any.as_str(), params! { mutex, id }),
            Whose::Fence(fence) => (statements.revoke.as_str(), params! { mutex, fence }),
        })
    }

    /// Puts a token at the end of the list, unless it is there or there is no room.
    pub(super) fn register(
        &self,
        connection: &mut Connection,
        mutex: &str,
        token: &str,
        by: Moment,
    ) -> Result<(), Failed> {
        self.update(connection, by, |statements| {
            (statements.register.as_str(), params! { mutex, token })
        })?;
        Ok(())
    }

    /// Takes a token out of the row. Returns the token that the mutex was handed on to, zero for none.
    pub(super) fn withdraw(
        &self,
        connection: &mut Connection,
        mutex: &str,
        token: &str,
        by: Moment,
    ) -> Result<u64, Failed> {
        let next = self.update(connection, by, |statements| {
            (statements.withdraw.as_str(), params! { mutex, token })
        })?;
        Ok(next.unwrap_or(0))
    }

    /// Frees a mutex that was handed over to `token`.
    pub(super) fn free(
        &self,
        connection: &mut Connection,
        mutex: &str,
        token: &str,
        by: Moment,
    ) -> Result<(), Failed> {
        self.update(connection, by, |statements| {
            (statements.free.as_str(), params! { mutex, token })
        })?;
        Ok(())
    }

    /// Wakes the process that has `token`.
    pub(super) fn wake(&self, connection: &mut Connection, token: &str, by: Moment) -> Woken {
        let killed = connection.run(by, |conn| conn.query_drop(kill(token)));
        match killed.as_ref().err().and_then(RequestError::code) {
            Some(1094) => Woken::Dead,
            Some(1095) => Woken::Foreign,
            _ => {
                if let Err(error) = killed {
                    self.note(connection, &error.into());
                }
                Woken::Told
            }
        }
    }

    /// Reads a row, and the server's clock.
    pub(super) fn look(
        &self,
        connection: &mut Connection,
        mutex: &str,
        by: Moment,
    ) -> Result<Option<Row>> {
        let statements = self.statements(connection, by)?;
        let sent = Moment::now();
        let row: Option<mysql::Row> = connection
            .run(by, |conn| {
                conn.exec_first(&statements.look, params! { mutex })
            })
            .map_err(|error| self.failed(connection, error).error)?;
        let Some(row) = row else {
            return Ok(None);
        };
        let row = Row::read(row, sent).ok_or_else(|| {
            Error::new(
                ErrorKind::Misconfigured,
                "a column of the table of mutexes is not of the type in sql/init-mutex.sql",
            )
        })?;
        self.clock.learn(row.now, sent);
        Ok(Some(row))
    }

    /// Makes the row of a mutex. Returns `false` if it is there already.
    pub(super) fn insert(
        &self,
        connection: &mut Connection,
        mutex: &str,
        by: Moment,
    ) -> Result<bool> {
        let statements = self.statements(connection, by)?;
        let inserted = connection.run(by, |conn| {
            conn.exec_drop(&statements.insert, params! { mutex })
        });
        match inserted {
            Ok(()) => Ok(true),
            Err(error) if error.is_duplicate() => Ok(false),
            Err(error) => Err(self.failed(connection, error).error),
        }
    }

    /// Records a run. Returns `false` if the owner has not this fence any more.
    pub(super) fn record_run(
        &self,
        connection: &mut Connection,
        contender: &Contender,
        fence: u64,
        by: Moment,
    ) -> Result<bool> {
        let recorded = self.update(connection, by, |statements| {
            (
                statements.record_run.as_str(),
                params! { "mutex" => &*contender.mutex, "id" => &*contender.id, fence },
            )
        })?;
        Ok(recorded.is_some())
    }

    /// Reads the names of the mutexes that have an owner or a waiter.
    pub(super) fn list(&self, connection: &mut Connection, by: Moment) -> Result<Vec<Arc<str>>> {
        let statements = self.statements(connection, by)?;
        let names: Vec<String> = connection
            .run(by, |conn| conn.query(&statements.list))
            .map_err(|error| self.failed(connection, error).error)?;
        Ok(names.into_iter().map(Arc::from).collect())
    }

    /// Asks the server one question.
    pub(super) fn ping(&self, connection: &mut Connection, by: Moment) -> Result<()> {
        connection
            .run(by, |conn| conn.query_drop("DO 1"))
            .map_err(|error| self.failed(connection, error).error)
    }

    /// Makes the table if it is not there.
    pub(super) fn create_table(&self, connection: &mut Connection, by: Moment) -> Result<()> {
        let sql = self.table.create_statement();
        connection
            .run(by, |conn| conn.query_drop(sql))
            .map_err(|error| self.failed(connection, error).error)?;
        self.table.forget();
        Ok(())
    }

    /// The statements for the table as it is.
    pub(super) fn statements(
        &self,
        connection: &mut Connection,
        by: Moment,
    ) -> Result<Arc<Statements>> {
        let statements = self.table.statements(connection, by);
        statements.map_err(|error| {
            self.note(connection, &error);
            error.before_asking()
        })
    }

    /// One UPDATE: the last insert id it set, or `None` where no row matched.
    fn update(
        &self,
        connection: &mut Connection,
        by: Moment,
        statement: impl for<'s> FnOnce(&'s Statements) -> (&'s str, Params),
    ) -> Result<Option<u64>, Failed> {
        let statements = self.statements(connection, by)?;
        let (sql, params) = statement(&statements);
        connection
            .run(by, |conn| {
                let result = conn.exec_iter(sql, params)?;
                let matched = result.affected_rows() > 0;
                Ok(matched.then(|| result.last_insert_id().unwrap_or(0)))
            })
            .map_err(|error| self.failed(connection, error))
    }

    fn failed(&self, connection: &Connection, error: RequestError) -> Failed {
        let unknown = error.is_outcome_unknown();
        let error = self.table.explain(error);
        self.note(connection, &error);
        Failed { unknown, error }
    }

    /// After a connection broke, those not heard of since its request was sent are suspect: a restarted
    /// server would otherwise be met as many times as there are idle ones, a failed call each.
    fn note(&self, connection: &Connection, error: &Error) {
        if connection.is_poisoned() {
            self.pool.lost(error);
            self.pool.discard_idle(connection.sent());
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
    /// Of an error that came before the statement was sent.
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
    fn read(mut row: mysql::Row, sent: Moment) -> Option<Row> {
        Some(Row {
            owner_id: column(&mut row, 0)?,
            acquired_at: column(&mut row, 1)?,
            ttl_at: column(&mut row, 2)?,
            transition_at: column(&mut row, 3)?,
            fence: column(&mut row, 4)?,
            waiters: column(&mut row, 5)?,
            version: column(&mut row, 6)?,
            run_at: column(&mut row, 7)?,
            now: column(&mut row, 8)?,
            sent,
        })
    }

    /// Reads what [`Statements::which`] answers: the mutex, whether it is quiet, and the row without its
    /// list.
    pub(super) fn read_which(mut row: mysql::Row, sent: Moment) -> Option<(String, bool, Row)> {
        Some((
            column(&mut row, 0)?,
            column(&mut row, 1)?,
            Row {
                owner_id: column(&mut row, 2)?,
                acquired_at: column(&mut row, 3)?,
                ttl_at: column(&mut row, 4)?,
                transition_at: column(&mut row, 5)?,
                fence: column(&mut row, 6)?,
                waiters: String::new(),
                version: 0,
                run_at: 0,
                now: column(&mut row, 7)?,
                sent,
            },
        ))
    }

    /// The token of the process that the mutex is handed over to.
    pub(super) fn handed_to(&self) -> Option<&str> {
        self.owner_id.strip_prefix('~')
    }

    /// The tokens of the processes that wait, first come first.
    pub(super) fn tokens(&self) -> impl Iterator<Item = &str> {
        self.waiters.split(':').skip(1)
    }

    /// How long the lease or the hand-over lasts; zero once it has run out.
    pub(super) fn left(&self) -> Duration {
        Duration::from_millis((self.transition_at + 1).saturating_sub(self.now))
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
                    || self.transition_at + claim < self.now))
            || (self.handed_to().is_some() && self.transition_at > self.now + claim)
    }

    /// Returns `true` if a contender of Simba's owns: our fences are at least the time of acquisition in
    /// microseconds, Simba's count.
    pub(super) fn is_simbas(&self) -> bool {
        self.fence < self.acquired_at.saturating_mul(1_000)
    }

    /// Who owns; `NONE` while the mutex is free or handed over.
    pub(super) fn owner(&self) -> MutexOwner {
        if self.is_over() {
            return MutexOwner::NONE;
        }
        self.last_owner()
    }

    /// The owner that the row names, its lease run out or not.
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

/// ttl and the sum of ttl and transition.
pub(super) fn millis(lease: Lease) -> (u64, u64) {
    let millis = |duration: Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    (millis(lease.ttl()), millis(lease.total()))
}
