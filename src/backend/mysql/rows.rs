//! The statements on a mutex's row, one function each ([`Call`]), and the row as it is read ([`Row`]).

use std::sync::Arc;
use std::time::Duration;

use mysql::prelude::{FromRow, Queryable};
use mysql::{Binary, Conn, Params, QueryResult, params};

use super::connection::{Connector, MysqlPool};
use super::error::RequestError;
use super::table::{ROOM, Statements, Table, WAKE, WakeupsOff, strip};
use super::token::Token;
use crate::backend::Contender;
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::lease::Lease;
use crate::owner::MutexOwner;
use crate::pool::{Checkout, Lane};

/// The table, and the pool through which it is reached.
pub(super) struct Rows {
    pub(super) pool: MysqlPool,
    pub(super) table: Arc<Table>,
}

/// Makes the requests of one call to the backend, on one connection of the pool and until `by`.
pub(super) struct Call<'c> {
    rows: &'c Rows,
    sql: &'c Statements,
    connection: Checkout<Connector>,
    by: Moment,
    pub(super) wakeups_off: WakeupsOff,
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
    /// What was handed over to this token; and the process that is dead with it, or 0.
    Handed(Token, u64),
}

/// A row as it was read.
pub(super) struct Row {
    /// The owner that the row names, its lease over or not.
    pub(super) last_owner: MutexOwner,
    /// Its id, or `~` and the token that the mutex is handed over to, or was last.
    pub(super) owner_id: String,
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
    /// Begins a call, and checks that the table is as it must be, unless that is known.
    ///
    /// # Errors
    /// There was no connection, or the table does not fit.
    pub(super) fn call(&self, lane: Lane, by: Moment) -> Result<Call<'_>> {
        let mut connection = self.pool.checkout(lane, by)?;
        let checked = self.table.check(&mut connection, by);
        Ok(Call {
            rows: self,
            sql: &self.table.sql,
            wakeups_off: checked.map_err(Error::not_sent)?,
            connection,
            by,
        })
    }

    /// Makes the table if it is not there.
    pub(super) fn create_table(&self, by: Moment) -> Result<()> {
        let sql = self.table.create_statement();
        let mut connection = self.pool.checkout(Lane::Owner, by)?;
        let created = connection.run(by, |conn| conn.query_drop(sql));
        created.map_err(|error| self.table.explain(error))
    }

    /// Returns the longest that an answer may take.
    pub(super) fn request_limit(&self) -> Duration {
        self.pool.connector().request_limit
    }
}

impl Call<'_> {
    /// Tries to make a contender the owner, with its token or [`Token::NONE`].
    pub(super) fn acquire(&mut self, who: &Contender, token: Token) -> Result<Option<MutexOwner>> {
        let (ttl, transition) = millis(who.lease);
        let clock = Arc::clone(&self.rows.pool.connector().clock);
        let (mutex, id, not_after) = (&*who.mutex, &*who.id, clock.millis_at(self.by));
        let sent = Moment::now();
        let params = params! { mutex, id, ttl, transition, token, not_after };
        let fence = self.update(&self.sql.acquire, params)?;
        Ok(fence.map(|fence| {
            let now = clock.millis_at(sent);
            // The fence is the server's time in microseconds, as a rule.
            let at = Some(fence / 1_000).filter(|at| at.abs_diff(now) < 60_000);
            let at = at.unwrap_or(now);
            owner(who, at, at, fence, sent)
        }))
    }

    /// Sets the lease of an owner anew, who acquired at `acquired_at`. `None`: it is lost.
    pub(super) fn renew(
        &mut self,
        who: &Contender,
        acquired_at: u64,
        fence: u64,
    ) -> Result<Option<MutexOwner>> {
        let (ttl, transition) = millis(who.lease);
        let (mutex, id, sent) = (&*who.mutex, &*who.id, Moment::now());
        let params = params! { mutex, id, fence, ttl, transition };
        let ttl_at = self.update(&self.sql.renew, params)?;
        let owner = |ttl_at: u64| owner(who, acquired_at, ttl_at.saturating_sub(ttl), fence, sent);
        Ok(ttl_at.map(owner))
    }

    /// Ends an ownership or a hand-over. Returns the token that the mutex was handed over to, which may be
    /// [`Token::NONE`]; `None` if it was not so.
    pub(super) fn release(&mut self, mutex: &str, whose: Whose<'_>) -> Result<Option<Token>> {
        let (id, fence, dead) = match whose {
            Whose::Owner(id, fence) => (Some(id.to_owned()), Some(fence), 0),
            Whose::Id(id) => (Some(id.to_owned()), None, 0),
            Whose::Fence(fence) => (None, Some(fence), 0),
            Whose::Handed(token, dead) => (Some(format!("~{token}")), None, dead),
        };
        let next = match whose {
            Whose::Owner(..) => self.update(&self.sql.release, params! { mutex, id, fence }),
            _ => self.update(&self.sql.release_any, params! { mutex, id, fence, dead }),
        };
        Ok(next?.map(Token))
    }

    /// Puts a token at the end of the list, unless it is there or there is no room.
    pub(super) fn register(&mut self, mutex: &str, token: Token) -> Result<()> {
        self.expect_time()?;
        let params = params! { mutex, token };
        self.update(&self.sql.register, params).map(drop)
    }

    /// Takes a token out of the list. Returns `false` if it was not there.
    pub(super) fn unregister(&mut self, mutex: &str, token: Token) -> Result<bool> {
        let matched = self.update(&self.sql.unregister, params! { mutex, token })?;
        Ok(matched.is_some())
    }

    /// Records a run. Returns `false` if no owner has this fence.
    pub(super) fn record_run(&mut self, mutex: &str, fence: u64) -> Result<bool> {
        let recorded = self.update(&self.sql.record_run, params! { mutex, fence })?;
        Ok(recorded.is_some())
    }

    /// Makes the row of a mutex. Returns `false` if it is there already.
    pub(super) fn insert(&mut self, mutex: &str) -> Result<bool> {
        self.expect_time()?;
        let inserted = self.update(&self.sql.insert, params! { mutex })?;
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

    /// Reads who owns; `NONE` while the mutex is free or handed over.
    pub(super) fn owner(&mut self, mutex: &str) -> Result<MutexOwner> {
        let row = self.look(mutex)?;
        Ok(row.map_or(MutexOwner::NONE, Row::owner))
    }

    /// Reads a row.
    pub(super) fn look(&mut self, mutex: &str) -> Result<Option<Row>> {
        self.look_for(mutex, "", Token::NONE)
    }

    /// Reads a row, and whether this contender could acquire it.
    pub(super) fn look_for(&mut self, mutex: &str, id: &str, token: Token) -> Result<Option<Row>> {
        self.expect_time()?;
        let (params, sent) = (params! { mutex, id, token }, Moment::now());
        let found = self.exec(&self.sql.look, params, |mut rows| rows.next().transpose())?;
        let row = found.map(|row| Row::read(row, sent)).transpose()?;
        if let Some(row) = &row {
            self.rows.pool.connector().clock.learn(row.now, sent);
        }
        Ok(row)
    }

    /// Reads the names of the mutexes that have an owner or a waiter.
    pub(super) fn list(&mut self) -> Result<Vec<Arc<str>>> {
        let list = &self.sql.list;
        let answer = self.connection.run(self.by, |conn| conn.query(list));
        answer.map_err(|error| self.failed(error))
    }

    /// Refuses a follow-up request whose answer would come too late: sent all the same, it would only cost the
    /// connection.
    pub(super) fn expect_time(&self) -> Result<()> {
        if self.by.remaining() < self.connection.round_trip {
            return Err(RequestError::no_time_left().into());
        }
        Ok(())
    }

    /// Runs one prepared statement that changes a row. Returns the last insert id it set, or `None` if no row matched.
    fn update(&mut self, sql: &str, params: Params) -> Result<Option<u64>> {
        self.exec(sql, params, |result| {
            let matched = result.affected_rows() > 0;
            Ok(matched.then(|| result.last_insert_id().unwrap_or(0)))
        })
    }

    /// Makes one request with a prepared statement; one more before it, to prepare the statement, the first time.
    fn exec<T>(
        &mut self,
        sql: &str,
        params: Params,
        read: impl FnOnce(QueryResult<'_, '_, '_, Binary>) -> mysql::Result<T>,
    ) -> Result<T> {
        let prepared = self.connection.prepare(self.by, sql);
        let answer = prepared.and_then(|statement| {
            let work = |conn: &mut Conn| read(conn.exec_iter(statement, params)?);
            self.connection.run(self.by, work)
        });
        answer.map_err(|error| self.failed(error))
    }

    /// Discards idle connections, after one broke, that were not heard of since its request was sent: otherwise
    /// each of them would fail a call after a restart of the server.
    fn failed(&self, error: RequestError) -> Error {
        let poison = error.poisoned;
        let error = self.rows.table.explain(error);
        if poison {
            self.rows.pool.lost(&error);
            self.rows.pool.discard_idle(self.connection.sent);
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
        let (owner_id, acquired_at, ttl_at, end, fence, ..) = &columns;
        let last_owner = match owner_id.is_empty() || owner_id.starts_with('~') {
            true => MutexOwner::NONE,
            false => MutexOwner::new(owner_id.as_str(), *acquired_at, *ttl_at, *end, *fence)
                .observed_at(columns.9, sent),
        };
        let left = end.saturating_add(1).saturating_sub(columns.9);
        let (owner_id, _, _, _, fence, waiters, version, run_at, takeable, now) = columns;
        Ok(Row {
            last_owner,
            owner_id,
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
        let place = self.tokens().position(|other| other == token)?;
        u32::try_from(place).ok()
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

/// The snapshot of an owner whose lease is full at `now` on the server's clock.
fn owner(who: &Contender, acquired_at: u64, now: u64, fence: u64, sent: Moment) -> MutexOwner {
    let (ttl, transition) = millis(who.lease);
    let (ttl_at, end) = (
        now.saturating_add(ttl),
        now.saturating_add(ttl + transition),
    );
    let owner = MutexOwner::new(Arc::clone(&who.id), acquired_at, ttl_at, end, fence);
    owner.observed_at(now, sent)
}

/// Returns ttl and transition in milliseconds.
fn millis(lease: Lease) -> (u64, u64) {
    let millis = |duration: Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    (millis(lease.ttl()), millis(lease.transition()))
}
