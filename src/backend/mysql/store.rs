//! The statements on the table, one function each: what goes in, one round trip, what came out.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use mysql::prelude::Queryable;
use mysql::{Params, Value, params};

use super::fault::Fault;
use super::link::Link;
use super::pool::Pool;
use super::table::Table;
use crate::backend::Place;
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::lease::Lease;
use crate::owner::MutexOwner;

/// How far a fence may lie beyond the server's clock as we know it and still be that clock's reading.
const CLOCK_SLACK_MICROS: u64 = 1_000_000;

/// The pool and the table on it.
#[derive(Debug)]
pub(super) struct Store {
    pub(super) pool: Pool,
    pub(super) table: Arc<Table>,
}

/// A row as it was read.
#[derive(Clone, Debug)]
pub(super) struct Row {
    pub(super) owner_id: String,
    pub(super) acquired_at: u64,
    pub(super) ttl_at: u64,
    pub(super) transition_at: u64,
    pub(super) version: u64,
    /// The server's clock when it was read, and ours just before.
    pub(super) now_ms: u64,
    pub(super) local: Moment,
}

impl Row {
    /// The owner, `NONE` where the lease has run out.
    pub(super) fn owner(&self) -> MutexOwner {
        if self.is_free() {
            return MutexOwner::NONE;
        }
        self.last_owner()
    }

    /// Whoever the row names.
    pub(super) fn last_owner(&self) -> MutexOwner {
        MutexOwner::new(
            self.owner_id.as_str(),
            self.acquired_at,
            self.ttl_at,
            self.transition_at,
            self.version,
        )
        .observed_at(self.now_ms, self.local)
    }

    /// What tells this state of the row from another.
    pub(super) fn seen(&self) -> (u64, bool) {
        (self.version, !self.is_free())
    }

    /// Whether anybody may take it: the same edge as in the statement.
    pub(super) fn is_free(&self) -> bool {
        self.owner_id.is_empty() || self.transition_at < self.now_ms
    }
}

impl Store {
    /// The same table through a pool of its own, whose connections wait at most `patience`.
    pub(super) fn less_patient(&self, patience: Duration) -> Store {
        Store {
            pool: self.pool.less_patient(patience),
            table: Arc::clone(&self.table),
        }
    }

    /// Tries to take the mutex; `None` where somebody else has it, or there is no row. With
    /// `names`, leaves a released mutex to the waiter that holds one of them.
    pub(super) fn acquire(
        &self,
        link: &mut Link,
        place: &Place,
        names: Option<[&str; 2]>,
        by: Moment,
    ) -> Result<Option<MutexOwner>> {
        let statements = self.table.statements(link, by)?;
        self.check_id(&place.id, statements.max_id)?;
        let (ttl, total) = millis(place.lease);
        let (sql, params) = match names {
            Some([wake_name, queue_name]) => (
                &statements.acquire_politely,
                params! { "mutex" => &*place.mutex, "id" => &*place.id, "ttl" => ttl, "total" => total, "wake_name" => wake_name, "queue_name" => queue_name },
            ),
            None => (
                &statements.acquire,
                params! { "mutex" => &*place.mutex, "id" => &*place.id, "ttl" => ttl, "total" => total },
            ),
        };
        let sent = Moment::now();
        let Some(fence) = self.update(link, sql, params, by)? else {
            return Ok(None);
        };
        let received = Moment::now();
        let clock = self.pool.clock();
        // The fence is the server's clock, unless that one was set back: then what we knew of it.
        let known = clock.micros_at(received).saturating_add(CLOCK_SLACK_MICROS);
        let now_ms = if statements.fence_in_micros && fence <= known {
            clock.learn(fence, sent, received);
            fence / 1_000
        } else {
            clock.micros_at(sent) / 1_000
        };
        Ok(Some(
            MutexOwner::new(
                place.id.clone(),
                now_ms,
                now_ms.saturating_add(ttl),
                now_ms.saturating_add(total),
                fence,
            )
            .observed_at(now_ms, sent),
        ))
    }

    /// Sets the lease anew; the ttl's new end, or `None` where the lease is not ours any more.
    pub(super) fn renew(
        &self,
        link: &mut Link,
        place: &Place,
        fence: u64,
        by: Moment,
    ) -> Result<Option<u64>> {
        let statements = self.table.statements(link, by)?;
        let (ttl, total) = millis(place.lease);
        let params = params! { "mutex" => &*place.mutex, "id" => &*place.id, "fence" => fence, "ttl" => ttl, "total" => total };
        self.update(link, &statements.renew, params, by)
    }

    /// Ends the ownership with this fence, or with any; `false` where there was none.
    pub(super) fn release(
        &self,
        link: &mut Link,
        mutex: &str,
        id: &str,
        fence: Option<u64>,
        by: Moment,
    ) -> Result<bool> {
        let statements = self.table.statements(link, by)?;
        let (sql, params) = match fence {
            Some(fence) => (
                &statements.release,
                params! { "mutex" => mutex, "id" => id, "fence" => fence },
            ),
            None => (
                &statements.release_any,
                params! { "mutex" => mutex, "id" => id },
            ),
        };
        Ok(self.update(link, sql, params, by)?.is_some())
    }

    /// Reads the row; locks nothing. `None`: there is no such row.
    pub(super) fn read(&self, link: &mut Link, mutex: &str, by: Moment) -> Result<Option<Row>> {
        let statements = self.table.statements(link, by)?;
        let params = params! { "mutex" => mutex };
        let rows = self.select(link, &statements.read, params, by)?;
        let Some((name, row)) = rows.into_iter().next() else {
            return Ok(None);
        };
        if name != mutex {
            return Err(Error::new(
                ErrorKind::Misconfigured,
                format!(
                    "the table {} takes the mutex {mutex:?} for the mutex {name:?}: its collation does \
                     not tell them apart; choose another name, or a table as sql/init-mutex.sql makes it",
                    self.table.name()
                ),
            ));
        }
        Ok(Some(row))
    }

    /// Reads many rows at once; locks nothing. What is not there is not in the answer.
    pub(super) fn read_many(
        &self,
        link: &mut Link,
        mutexes: &[Arc<str>],
        by: Moment,
    ) -> Result<HashMap<String, Row>> {
        let Some(last) = mutexes.last() else {
            return Ok(HashMap::new());
        };
        let statements = self.table.statements(link, by)?;
        // Few lengths, so that few statements are prepared: the rest is filled with the last name.
        let length = mutexes.len().next_power_of_two();
        let names = mutexes.iter().chain(std::iter::repeat(last)).take(length);
        let params: Vec<Value> = names.map(|name| Value::from(&**name)).collect();
        let rows = self.select(link, &statements.read_many(length), params.into(), by)?;
        Ok(rows.into_iter().collect())
    }

    fn select(
        &self,
        link: &mut Link,
        sql: &str,
        params: Params,
        by: Moment,
    ) -> Result<Vec<(String, Row)>> {
        type Columns = (String, String, u64, u64, u64, u64, u64);
        let sent = Moment::now();
        let rows = link
            .run(by, |conn| {
                conn.exec_iter(sql, params)?
                    .map(|row| Ok(mysql::from_row_opt::<Columns>(row?)?))
                    .collect::<mysql::Result<Vec<Columns>>>()
            })
            .map_err(|fault| self.explain(fault))?;
        if let Some((.., now_ms)) = rows.first() {
            let clock = self.pool.clock();
            clock.learn_millis(*now_ms, sent, Moment::now());
        }
        let row = |(name, owner_id, acquired_at, ttl_at, transition_at, version, now_ms)| {
            let row = Row {
                owner_id,
                acquired_at,
                ttl_at,
                transition_at,
                version,
                now_ms,
                local: sent,
            };
            (name, row)
        };
        Ok(rows.into_iter().map(row).collect())
    }

    /// Makes the row; `false` where it is there already.
    pub(super) fn insert(&self, link: &mut Link, mutex: &str, by: Moment) -> Result<bool> {
        let statements = self.table.statements(link, by)?;
        let inserted = link.run(by, |conn| {
            conn.exec_drop(&statements.insert, params! { "mutex" => mutex })
        });
        match inserted {
            Ok(()) => Ok(true),
            Err(fault) if fault.is_duplicate() => Ok(false),
            Err(fault) => Err(self.explain(fault)),
        }
    }

    /// Makes the table if it is not there.
    pub(super) fn create_table(&self, by: Moment) -> Result<()> {
        let sql = self.table.create();
        self.pool.run(by, |conn| conn.query_drop(sql))?;
        self.table.forget();
        Ok(())
    }

    /// Refuses an id that the table could not hold: cut, it would never be found again.
    pub(super) fn check_id(&self, id: &str, max: usize) -> Result<()> {
        if id.len() <= max {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "contender id {id:?} has {} bytes, but the column owner_id of {} holds {max}",
            id.len(),
            self.table.name(),
        )))
    }

    /// One UPDATE: the last insert id it set, or `None` where no row matched.
    fn update(
        &self,
        link: &mut Link,
        sql: &str,
        params: Params,
        by: Moment,
    ) -> Result<Option<u64>> {
        link.run(by, |conn| {
            let result = conn.exec_iter(sql, params)?;
            let matched = result.affected_rows() > 0;
            Ok(matched.then(|| result.last_insert_id().unwrap_or(0)))
        })
        .map_err(|fault| self.explain(fault))
    }

    fn explain(&self, fault: Fault) -> Error {
        if fault.is_schema() {
            self.table.forget();
        }
        if fault.is_missing_table() {
            return self.table.missing();
        }
        if fault.is_out_of_range() {
            return Error::new(
                ErrorKind::Misconfigured,
                format!(
                    "the column version of {} has run out: ALTER TABLE {} MODIFY version BIGINT \
                     UNSIGNED NOT NULL",
                    self.table.name(),
                    self.table.name()
                ),
            );
        }
        fault.into_error()
    }
}

/// ttl and the sum of ttl and transition.
pub(super) fn millis(lease: Lease) -> (u64, u64) {
    let ms =
        |duration: std::time::Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    (ms(lease.ttl()), ms(lease.total()))
}

/// A store whose server nobody reaches, for what needs none.
#[cfg(test)]
pub(super) fn unreachable() -> Store {
    use super::link::LinkOptions;
    use super::server::Server;
    let second = Duration::from_secs(1);
    let mut server = Server::new("127.0.0.1", "d");
    server.port = 1;
    let options = LinkOptions {
        connect_timeout: second,
        read_timeout: Some(second),
        lock_wait: second,
        init: Vec::new(),
        prepare: None,
    };
    Store {
        pool: Pool::new(server, options, 1),
        table: Arc::new(Table::new("t", false).unwrap()),
    }
}
