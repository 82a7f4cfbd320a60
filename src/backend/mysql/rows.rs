//! The statements on a mutex's row, one function each ([`Call`]), and the row as it is read ([`Row`]).

use std::sync::Arc;
use std::time::Duration;

use mysql::prelude::{FromRow, Queryable};
use mysql::{Binary, Params, QueryResult, params};

use super::connection::{Connection, MysqlPool};
use super::error::RequestError;
use super::table::{ROOM, Statements, Table, WAKE, WakeupsOff, strip};
use super::token::Token;
use crate::backend::Contender;
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::lease::Lease;
use crate::owner::MutexOwner;
use crate::pool::Lane;

/// The table, and the pool through which it is reached.
#[derive(Debug)]
pub(super) struct Rows {
    pub(super) pool: MysqlPool,
    pub(super) table: Arc<Table>,
}

/// Makes the requests of one call to the backend, on one connection and until `by`.
pub(super) struct Call<'c> {
    rows: &'c Rows,
    connection: &'c mut Connection,
    by: Moment,
}

/// Which ownership or hand-over a release ends.
#[derive(Clone, Copy)]
pub(super) enum Whose<'a> {
    /// That of this id, with this fence.
    Owner(&'a str, u64),
    /// That of this id, whatever its fence.
    Id(&'a str),
    /// That with this fence, whatever its id.
    Fence(u64),
    /// What was handed over to this token.
    Handed(Token),
    /// The same, and the process of that token is dead.
    Dead(Token),
}

/// A row as it was read.
pub(super) struct Row {
    /// The owner that the row names, its lease over or not.
    pub(super) last_owner: MutexOwner,
    /// The token that the mutex is handed over to, or was last.
    pub(super) handed_to: Option<String>,
    waiters: String,
    pub(super) fence: u64,
    pub(super) version: u64,
    pub(super) run_at: u64,
    /// How long the lease or the hand-over lasts; zero once it is over.
    pub(super) left: Duration,
    /// The contender that asked could acquire.
    pub(super) takeable: bool,
    /// The server's clock when it was read.
    pub(super) now: u64,
}

impl Rows {
    /// Does `work` on a connection of the pool.
    pub(super) fn call<T>(
        &self,
        lane: Lane,
        by: Moment,
        work: impl FnOnce(&mut Call<'_>) -> Result<T>,
    ) -> Result<T> {
        work(&mut self.on(&mut *self.pool.checkout(lane, by)?, by))
    }

    /// Returns a call on this connection.
    pub(super) fn on<'c>(&'c self, connection: &'c mut Connection, by: Moment) -> Call<'c> {
        Call {
            rows: self,
            connection,
            by,
        }
    }

    /// Returns the longest that an answer may take.
    pub(super) fn request_limit(&self) -> Duration {
        self.pool.connector().request_limit
    }
}

impl<'c> Call<'c> {
    fn sql(&self) -> &'c Statements {
        &self.rows.table.sql
    }

    /// Tries to make `contender` the owner, with its token or [`Token::NONE`].
    pub(super) fn acquire(&mut self, who: &Contender, token: Token) -> Result<Option<MutexOwner>> {
        let (ttl, total) = millis(who.lease);
        let clock = Arc::clone(&self.rows.pool.connector().clock);
        let (mutex, id, not_after) = (&*who.mutex, &*who.id, clock.millis_at(self.by));
        let sent = Moment::now();
        let params = params! { mutex, id, ttl, total, token, not_after };
        let fence = self.update(&self.sql().acquire, params)?;
        Ok(fence.map(|fence| {
            let now = clock.millis_at(sent);
            // The fence is the server's time in microseconds, as a rule.
            let at = Some(fence / 1_000).filter(|at| at.abs_diff(now) < 60_000);
            let at = at.unwrap_or(now);
            let owner = MutexOwner::new(Arc::clone(&who.id), at, at + ttl, at + total, fence);
            owner.observed_at(at, sent)
        }))
    }

    /// Sets the lease of an owner anew. Returns its `ttl_at`, or `None` if it is lost.
    pub(super) fn renew(&mut self, who: &Contender, fence: u64) -> Result<Option<u64>> {
        let (ttl, total) = millis(who.lease);
        let (mutex, id) = (&*who.mutex, &*who.id);
        let params = params! { mutex, id, fence, ttl, total };
        self.update(&self.sql().renew, params)
    }

    /// Ends an ownership or a hand-over. Returns the token that the mutex was handed over to, which may be
    /// [`Token::NONE`]; `None` if it was not so.
    pub(super) fn release(&mut self, mutex: &str, whose: Whose<'_>) -> Result<Option<Token>> {
        let sql = self.sql();
        let next = match whose {
            Whose::Owner(id, fence) => self.update(&sql.release, params! { mutex, id, fence }),
            Whose::Id(id) => self.update(&sql.release_any, params! { mutex, id }),
            Whose::Fence(fence) => self.update(&sql.revoke, params! { mutex, fence }),
            Whose::Handed(token) => self.update(&sql.pass_on, params! { mutex, token }),
            Whose::Dead(token) => self.update(&sql.pass_on_from_dead, params! { mutex, token }),
        };
        Ok(next?.map(Token))
    }

    /// Puts a token at the end of the list, unless it is there or there is no room.
    pub(super) fn register(&mut self, mutex: &str, token: Token) -> Result<()> {
        self.expect_time()?;
        let registered = self.update(&self.sql().register, params! { mutex, token });
        registered.map(drop)
    }

    /// Takes a token out of the list. Returns `false` if it was not there.
    pub(super) fn unregister(&mut self, mutex: &str, token: Token) -> Result<bool> {
        let matched = self.update(&self.sql().unregister, params! { mutex, token })?;
        Ok(matched.is_some())
    }

    /// Records a run. Returns `false` if no owner has this fence.
    pub(super) fn record_run(&mut self, mutex: &str, fence: u64) -> Result<bool> {
        let recorded = self.update(&self.sql().record_run, params! { mutex, fence })?;
        Ok(recorded.is_some())
    }

    /// Makes the row of a mutex. Returns `false` if it is there already.
    pub(super) fn insert(&mut self, mutex: &str) -> Result<bool> {
        self.expect_time()?;
        let inserted = self.update(&self.sql().insert, params! { mutex })?;
        Ok(inserted.is_some())
    }

    /// Ends the wait of a process. Returns `false` if it is dead. One that is another account's, which the server
    /// refuses to wake, looks by itself within a second, as any does if the KILL is lost.
    pub(super) fn kill(&mut self, process: u64) -> bool {
        if self.expect_time().is_err() {
            return true;
        }
        let sql = strip(WAKE).replace("{process}", &process.to_string());
        match self.connection.run(self.by, |conn| conn.query_drop(sql)) {
            Err(error) if error.code == Some(1094) => false,
            Err(error) => {
                self.failed(error);
                true
            }
            Ok(()) => true,
        }
    }

    /// Reads a row.
    pub(super) fn look(&mut self, mutex: &str) -> Result<Option<Row>> {
        self.look_for(mutex, "", Token::NONE)
    }

    /// Reads a row, and whether this contender could acquire it.
    pub(super) fn look_for(&mut self, mutex: &str, id: &str, token: Token) -> Result<Option<Row>> {
        self.expect_time()?;
        self.check()?;
        let (sql, params, sent) = (self.sql(), params! { mutex, id, token }, Moment::now());
        let first = |mut rows: QueryResult<'_, '_, '_, Binary>| rows.next().transpose();
        let found = self.connection.exec(self.by, &sql.look, params, first);
        let Some(found) = found.map_err(|error| self.failed(error))? else {
            return Ok(None);
        };
        let row = Row::read(found, sent)?;
        self.rows.pool.connector().clock.learn(row.now, sent);
        Ok(Some(row))
    }

    /// Reads the names of the mutexes that have an owner or a waiter.
    pub(super) fn list(&mut self) -> Result<Vec<Arc<str>>> {
        self.check()?;
        let sql = self.sql();
        let names: Vec<String> = self.ask(|conn| conn.query(&sql.list))?;
        Ok(names.into_iter().map(Arc::from).collect())
    }

    /// Asks the server one question: whether this user may read the table, and not what is in it.
    pub(super) fn ping(&mut self) -> Result<()> {
        self.check()?;
        let sql = self.sql();
        self.ask(|conn| conn.query_drop(&sql.ping))
    }

    /// Makes the table if it is not there.
    pub(super) fn create_table(&mut self) -> Result<()> {
        let sql = self.rows.table.create_statement();
        self.ask(|conn| conn.query_drop(sql))?;
        self.rows.table.forget();
        Ok(())
    }

    /// Checks that the table is as it must be, unless that is known.
    pub(super) fn check(&mut self) -> Result<WakeupsOff> {
        let checked = self.rows.table.check(self.connection, self.by);
        checked.map_err(Error::not_sent)
    }

    /// Refuses a follow-up request whose answer would come too late: sent all the same, it would only cost the
    /// connection.
    pub(super) fn expect_time(&self) -> Result<()> {
        if self.by.remaining() < self.connection.round_trip() {
            return Err(RequestError::no_time_left().into());
        }
        Ok(())
    }

    /// Makes one request that is sent as text.
    pub(super) fn ask<T>(
        &mut self,
        work: impl FnOnce(&mut mysql::Conn) -> mysql::Result<T>,
    ) -> Result<T> {
        let answer = self.connection.run(self.by, work);
        answer.map_err(|error| self.failed(error))
    }

    /// Runs one prepared statement that changes a row. Returns the last insert id it set, or `None` if no row matched.
    fn update(&mut self, sql: &str, params: Params) -> Result<Option<u64>> {
        self.check()?;
        let answer = self.connection.exec(self.by, sql, params, |result| {
            let matched = result.affected_rows() > 0;
            Ok(matched.then(|| result.last_insert_id().unwrap_or(0)))
        });
        answer.map_err(|error| self.failed(error))
    }

    /// Discards idle connections, after one broke, that were not heard of since its request was sent: otherwise
    /// each of them would fail a call after a restart of the server.
    fn failed(&self, error: RequestError) -> Error {
        let poison = error.is_poison();
        let error = self.rows.table.explain(error);
        if poison {
            self.rows.pool.lost(&error);
            self.rows.pool.discard_idle(self.connection.sent());
        }
        error
    }
}

impl Row {
    /// Reads the columns of `sql/mutex-look.sql`.
    fn read(row: mysql::Row, sent: Moment) -> Result<Row> {
        type Columns = (String, u64, u64, u64, u64, String, u64, u64, bool, u64);
        let columns = Columns::from_row_opt(row).map_err(|_| {
            let message =
                "a column of the table of mutexes is not of the type in sql/init-mutex.sql";
            Error::new(ErrorKind::Misconfigured, message)
        })?;
        let (id, acquired_at, ttl_at, transition_at, fence, ..) = &columns;
        let handed_to = id.strip_prefix('~').map(str::to_owned);
        let last_owner = match id.is_empty() || handed_to.is_some() {
            true => MutexOwner::NONE,
            false => MutexOwner::new(id.as_str(), *acquired_at, *ttl_at, *transition_at, *fence)
                .observed_at(columns.9, sent),
        };
        let left = transition_at.saturating_add(1).saturating_sub(columns.9);
        let (.., fence, waiters, version, run_at, takeable, now) = columns;
        Ok(Row {
            last_owner,
            handed_to,
            waiters,
            fence,
            version,
            run_at,
            left: Duration::from_millis(left),
            takeable,
            now,
        })
    }

    /// Returns the tokens of the contenders that wait, first come first.
    pub(super) fn tokens(&self) -> impl Iterator<Item = &str> {
        self.waiters.split(':').skip(1)
    }

    /// Returns the place of a token in the list, the first one being 0.
    pub(super) fn position(&self, token: Token) -> Option<u32> {
        let token = token.to_string();
        (0..)
            .zip(self.tokens())
            .find(|(_, other)| *other == token)
            .map(|(place, _)| place)
    }

    /// Returns `true` if the list has room for one more token.
    pub(super) fn has_room(&self) -> bool {
        self.waiters.len() <= ROOM
    }

    /// Returns the owner; `NONE` while the mutex is free or handed over.
    pub(super) fn owner(self) -> MutexOwner {
        match self.left.is_zero() {
            true => MutexOwner::NONE,
            false => self.last_owner,
        }
    }
}

/// Returns ttl, and ttl + transition, in milliseconds.
pub(super) fn millis(lease: Lease) -> (u64, u64) {
    let millis = |duration: Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    (millis(lease.ttl()), millis(lease.total()))
}
