//! Semaphores in the tables of a MySQL or MariaDB server (`sql/init-semaphore.sql`).
//!
//! - The rows of the semaphores are locked, in the order of their names, before anything is decided.
//! - What is held is counted in the semaphore's own row, in the transaction that changes the permits: an
//!   acquire costs the same with ten permits held as with a hundred thousand, and a crash leaves both or
//!   neither.
//! - A request goes from acquired to released and never back; a counter is lowered by whoever made that
//!   change, and nobody else.
//! - A grant has the token of the call that it was made for. A retry recognises its own grant by it, and a
//!   renewal or release that names another grant does nothing.
//! - Calls of one factory for the same semaphores share a transaction, see `combiner.rs`.
//!
//! Round trips: two for an acquire and one for a release, if nobody else wants the semaphore; two for all
//! that is combined; two for a batch of renewals.

mod combiner;
mod reclaim;
mod request_row;
mod schema;
mod sql;
mod transaction;

use std::sync::Arc;
use std::time::Duration;

use mysql::prelude::Queryable;

use self::combiner::{Combiner, Job, Verdict};
use self::reclaim::Reclaimed;
use self::request_row::RequestRow;
pub(super) use self::sql::DEFAULT_PREFIX;
use self::sql::{
    Answer, COMMIT, ROLLBACK, Statements, answer, columns, duration, fill, list, micros, quote,
    quote_option, rows,
};
use self::transaction::{Freed, Outcome, Transaction};
use super::connection::Connection;
use super::error::RequestError;
use super::rows::Rows;
use crate::backend::permit_store::{
    Call, CapacityChange, Decision, Discrepancy, Failure, Held, HeldPermit, Holder, PermitRenewal,
    PermitStore, Release, Renewed, RequestStatus, StoreTime, Sweep, Swept, Usage, free,
    no_such_semaphore, semaphore_in_use,
};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::pool::Lane;

/// How a factory's semaphores are set up.
#[derive(Clone, Debug)]
pub(super) struct PermitSettings {
    pub(super) prefix: String,
    pub(super) poll_interval: Duration,
}

impl PermitSettings {
    /// # Errors
    /// `InvalidInput` for a prefix that is not allowed.
    pub(super) fn check(&self) -> Result<()> {
        Statements::new(&self.prefix).map(drop)
    }
}

/// The semaphores in one database, for one factory.
#[derive(Debug)]
pub(super) struct MysqlPermits {
    realm: String,
    poll_interval: Duration,
    statements: Statements,
    combiner: Combiner,
    rows: Arc<Rows>,
    /// The longest wait for one answer.
    patience: Duration,
}

impl MysqlPermits {
    /// Permits that use the connections of `rows`.
    ///
    /// # Errors
    /// `InvalidInput` for a prefix that is not allowed.
    pub(super) fn new(settings: &PermitSettings, rows: &Arc<Rows>) -> Result<MysqlPermits> {
        let (server, prefix) = (&rows.pool.connector().server, &settings.prefix);
        Ok(MysqlPermits {
            realm: format!("{server}?table_prefix={prefix}"),
            poll_interval: settings.poll_interval,
            statements: Statements::new(prefix)?,
            combiner: Combiner::default(),
            patience: rows.patience(),
            rows: Arc::clone(rows),
        })
    }

    /// One transaction for these jobs.
    fn transaction(
        &self,
        connection: &mut Connection,
        names: &[Arc<str>],
        releases: &[Arc<Held>],
        calls: &[Arc<Call>],
    ) -> Result<Outcome, Failure> {
        let transaction = Transaction {
            store: self,
            names,
            releases,
            calls,
        };
        transaction.run(connection)
    }

    /// One acquire: shared with others if they come at the same time, alone if that failed.
    fn acquire_once(&self, call: &Arc<Call>, by: Moment) -> Result<Decision, Failure> {
        let names: Vec<Arc<str>> = call
            .wish
            .permits
            .iter()
            .map(|(name, _)| Arc::clone(name))
            .collect();
        let lane = self.combiner.lane(names.clone());
        let job = Job::Acquire(Arc::clone(call));
        let (failure, shared) = match lane.submit(self, job, by) {
            Verdict::Acquired(decision) => return Ok(decision),
            Verdict::Released(_) => (Failure::known(mixed_up()), false),
            Verdict::Failed { failure, shared } => (failure, shared),
        };
        if !shared || !failure.retry || by.remaining().is_zero() {
            return Err(failure);
        }
        let alone = self
            .rows
            .pool
            .checkout(Lane::Other, by)
            .map_err(Failure::known)
            .and_then(|mut connection| {
                let calls = [Arc::clone(call)];
                self.transaction(&mut connection, &names, &[], &calls)
            });
        match alone.map(|outcome| outcome.acquired.into_iter().next()) {
            Ok(Some(Ok(decision))) => Ok(decision),
            Ok(None) => Err(failure),
            // What the first try left is still not known.
            Ok(Some(Err(next))) | Err(next) => Err(Failure {
                unknown: next.unknown || failure.unknown,
                ..next
            }),
        }
    }

    /// Releases what one grant holds: one statement, one try.
    fn release_on(&self, connection: &mut Connection, held: &Held) -> Result<Freed, Failure> {
        let which = format!("r.id = {} AND r.token = {}", held.request_id, held.token);
        let sql = fill(&self.statements.release, &[("{which}", &which)]);
        let mut answers = self
            .request(connection, &sql)
            .map_err(|error| self.statements.failure(error, true))?;
        let matched = answer(&mut answers, 1).map_err(Failure::known)?.matched;
        Ok(if matched > 0 { Freed::Yes } else { Freed::No })
    }

    /// Releases whatever `which` names: a condition on r.
    fn release_where(&self, which: &str, by: Moment) -> Result<bool> {
        let sql = fill(&self.statements.release, &[("{which}", which)]);
        let mut answers = self.ask(&sql, by)?;
        Ok(answer(&mut answers, 1)?.matched > 0)
    }

    fn record(&self, external_id: &str, by: Moment) -> Result<Option<RequestRow>> {
        let found = self.one(&RequestRow::statement(&self.statements, [external_id]), by)?;
        Ok(RequestRow::parse(found)?.pop())
    }

    /// One statement that commits by itself.
    fn one(&self, sql: &str, by: Moment) -> Result<Answer> {
        answer(&mut self.ask(sql, by)?, 0)
    }

    /// Sends statements in one message and reads all their answers.
    fn request(&self, connection: &mut Connection, sql: &str) -> Result<Vec<Answer>, RequestError> {
        // Far enough to be sent: how long an answer may take is the connection's patience.
        let by = Moment::now() + self.patience * 2;
        let outcome = connection.run(by, |conn| {
            let mut result = conn.query_iter(sql)?;
            let mut answers = Vec::new();
            while let Some(set) = result.iter() {
                let mut answer = Answer {
                    rows: Vec::new(),
                    matched: set.affected_rows(),
                    last_insert_id: set.last_insert_id().unwrap_or(0),
                };
                for row in set {
                    answer.rows.push(row?);
                }
                answers.push(answer);
            }
            Ok(answers)
        });
        if let Err(error) = &outcome
            && error.is_poison()
        {
            let sent = connection.sent();
            self.rows.pool.lost(&error.clone().into_error());
            self.rows.pool.discard_idle(sent);
        }
        outcome
    }

    /// As [`request`](MysqlPermits::request), with an error for the caller.
    fn send(&self, connection: &mut Connection, sql: &str) -> Result<Vec<Answer>> {
        let answers = self.request(connection, sql);
        answers.map_err(|error| self.statements.explain(error))
    }

    /// Sends statements that commit by themselves, on a connection of their own.
    fn ask(&self, sql: &str, by: Moment) -> Result<Vec<Answer>> {
        self.send(&mut *self.rows.pool.checkout(Lane::Other, by)?, sql)
    }

    /// Runs `work` with a semaphore locked: its id, capacity and counter.
    fn with_locked<T>(
        &self,
        name: &str,
        by: Moment,
        work: impl FnOnce(u64, u32, i64, &mut Connection) -> Result<T>,
    ) -> Result<T> {
        let mut connection = self.rows.pool.checkout(Lane::Other, by)?;
        let lock = fill(&self.statements.lock, &[("{names}", &quote(name))]);
        let script = format!("{};\n{lock}", self.statements.begin);
        let outcome = self
            .send(&mut connection, &script)
            .and_then(|mut answers| answer(&mut answers, 3))
            .and_then(|found: Answer| {
                let row = found.rows.into_iter().next();
                let row = row.ok_or_else(|| no_such_semaphore(name))?;
                columns::<(u64, String, u32, i64, u64)>(row)
            })
            .and_then(|(id, _, capacity, used, _)| work(id, capacity, used, &mut connection))
            .and_then(|value| {
                self.send(&mut connection, COMMIT)?;
                Ok(value)
            });
        if outcome.is_err() {
            self.roll_back(&mut connection);
        }
        outcome
    }

    /// Ends a transaction without a trace; gives the connection up where that is not sure.
    fn roll_back(&self, connection: &mut Connection) {
        if !connection.is_poisoned() && self.request(connection, ROLLBACK).is_err() {
            connection.poison();
        }
    }
}

impl PermitStore for MysqlPermits {
    fn realm(&self) -> &str {
        &self.realm
    }

    fn patience(&self) -> Duration {
        // Two round trips, and a third to roll back.
        self.patience * 2
    }

    fn min_ttl(&self) -> Duration {
        self.patience * 4
    }

    fn poll_interval(&self) -> Duration {
        self.poll_interval
    }

    fn create_tables(&self, by: Moment) -> Result<()> {
        // Where they are there, no right to make them is needed.
        if self.check_tables(by)? {
            return Ok(());
        }
        // One by one: each may take as long as an answer may.
        for statement in self.statements.init() {
            self.ask(&statement, by)?;
        }
        self.check_tables(by).map(drop)
    }

    fn create(&self, name: &str, capacity: u32, by: Moment) -> Result<bool> {
        let sql = self.statements.tables(&format!(
            "INSERT INTO {{semaphore}} (name, capacity) VALUES ({}, {capacity})",
            quote(name)
        ));
        let mut connection = self.rows.pool.checkout(Lane::Other, by)?;
        match self.request(&mut connection, &sql) {
            Ok(_) => Ok(true),
            Err(error) if error.is_duplicate() => Ok(false),
            Err(error) => Err(self.statements.explain(error)),
        }
    }

    fn set_capacity(
        &self,
        name: &str,
        capacity: u32,
        changed_by: Option<&str>,
        by: Moment,
    ) -> Result<u32> {
        self.with_locked(name, by, |id, old, _, connection| {
            if old != capacity {
                let sql = self.statements.tables(&format!(
                    "UPDATE {{semaphore}} SET capacity = {capacity}, updated_at = SYSDATE(6) \
                     WHERE id = {id};\
                     INSERT INTO {{history}} \
                     (semaphore_id, semaphore_name, changed_by, old_capacity, new_capacity) \
                     VALUES ({id}, {}, {}, {old}, {capacity})",
                    quote(name),
                    quote_option(changed_by)
                ));
                self.send(connection, &sql)?;
            }
            Ok(old)
        })
    }

    fn history(&self, name: &str, by: Moment) -> Result<Vec<CapacityChange>> {
        type Columns = (String, Option<String>, u64, u32, u32);
        let sql = self.statements.tables(&format!(
            "SELECT semaphore_name, changed_by, \
             CAST(UNIX_TIMESTAMP(changed_at) * 1000 AS UNSIGNED), old_capacity, new_capacity \
             FROM {{history}} WHERE semaphore_name = {} ORDER BY id",
            quote(name)
        ));
        let found = rows::<Columns>(self.one(&sql, by)?)?;
        let change = |(name, changed_by, changed_at, from, to): Columns| CapacityChange {
            semaphore: Arc::from(name),
            changed_by: changed_by.map(Arc::from),
            changed_at,
            from,
            to,
        };
        Ok(found.into_iter().map(change).collect())
    }

    fn delete(&self, name: &str, by: Moment) -> Result<bool> {
        let outcome = self.with_locked(name, by, |id, capacity, used, connection| {
            // Not the counter alone: this is the one decision that no repair could correct.
            let look = self.statements.tables(&format!(
                "SELECT 1 FROM {{permit}} WHERE semaphore_id = {id} AND state = 'ACQUIRED' LIMIT 1"
            ));
            let held = answer(&mut self.send(connection, &look)?, 0)?;
            if used != 0 || !held.rows.is_empty() {
                return Err(semaphore_in_use(name, used, capacity));
            }
            let sql = format!("DELETE FROM {{semaphore}} WHERE id = {id}");
            self.send(connection, &self.statements.tables(&sql))?;
            Ok(true)
        });
        match outcome {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            outcome => outcome,
        }
    }

    fn usage(&self, name: Option<&str>, by: Moment) -> Result<Vec<Usage>> {
        type Columns = (String, u32, i64, u64, u64);
        let which = match name {
            Some(name) => format!("s.name = {}", quote(name)),
            None => "TRUE".to_owned(),
        };
        let found = self.one(&fill(&self.statements.usage, &[("{which}", &which)]), by)?;
        let found = rows::<Columns>(found)?;
        let usage = |(name, capacity, held, requests, expired): Columns| Usage {
            semaphore: Arc::from(name),
            capacity,
            held: u64::try_from(held).unwrap_or(0),
            expired,
            free: free(capacity, held),
            requests,
        };
        Ok(found.into_iter().map(usage).collect())
    }

    fn holders(&self, name: &str, by: Moment) -> Result<Vec<Holder>> {
        type Columns = (
            u64,
            Option<String>,
            Option<String>,
            Option<u32>,
            Option<u64>,
            Option<i64>,
            Option<i64>,
        );
        let sql = fill(&self.statements.holders, &[("{name}", &quote(name))]);
        let found = rows::<Columns>(self.one(&sql, by)?)?;
        if found.is_empty() {
            return Err(no_such_semaphore(name));
        }
        let holder = |(_, id, owner, count, fence, age, left): Columns| {
            Some(Holder {
                external_id: Arc::from(id?),
                owner: owner.map(Arc::from),
                count: count?,
                fence: fence?,
                held_for: duration(age).unwrap_or_default(),
                expires_in: duration(left),
            })
        };
        Ok(found.into_iter().filter_map(holder).collect())
    }

    fn status(&self, external_id: &str, by: Moment) -> Result<Option<RequestStatus>> {
        let record = self.record(external_id, by)?;
        Ok(record.map(|record| record.status()))
    }

    fn acquire(&self, call: &Arc<Call>, by: Moment) -> Result<Decision, Failure> {
        let exhausted = match self.acquire_once(call, by)? {
            Decision::Exhausted { exhausted, .. } => exhausted,
            decision => return Ok(decision),
        };
        let (next_reclaim, newest) = match self.reclaim(&call.wish, &exhausted, by) {
            Ok(Reclaimed::Some) => return self.acquire_once(call, by),
            Ok(Reclaimed::Nothing { next, newest }) => (next, newest),
            Err(error) => {
                log::debug!("could not take back what has expired: {error}");
                (None, None)
            }
        };
        Ok(Decision::Exhausted {
            exhausted,
            next_reclaim,
            newest,
        })
    }

    fn renew(&self, held: &[Arc<Held>], by: Moment) -> Result<Vec<Renewed>> {
        let mut connection = self.rows.pool.checkout(Lane::Owner, by)?;
        let ids = list(held.iter().map(|held| held.request_id));
        let lock = fill(&self.statements.renew_lock, &[("{ids}", &ids)]);
        let outcome = self.send(&mut connection, &lock).and_then(|mut answers| {
            let free = rows::<(u64, u64)>(answer(&mut answers, 3)?)?;
            let held_now = rows::<(u64, u64)>(answer(&mut answers, 4)?)?;
            let renewed: Vec<Renewed> = held
                .iter()
                .map(|held| {
                    let grant = (held.request_id, held.token);
                    match (free.contains(&grant), held_now.contains(&grant)) {
                        (true, _) => Renewed::Yes,
                        (false, true) => Renewed::Busy,
                        (false, false) => Renewed::Lost,
                    }
                })
                .collect();
            let ours = held.iter().zip(&renewed);
            let ours = ours.filter(|(_, renewed)| **renewed == Renewed::Yes);
            let ours: Vec<u64> = ours.map(|(held, _)| held.request_id).collect();
            if ours.is_empty() {
                self.roll_back(&mut connection);
            } else {
                let which = format!("id IN ({})", list(ours));
                let renew = fill(&self.statements.renew, &[("{which}", &which)]);
                self.send(&mut connection, &format!("{renew};\n{COMMIT}"))?;
            }
            Ok(renewed)
        });
        if outcome.is_err() {
            self.roll_back(&mut connection);
        }
        outcome
    }

    fn release(&self, held: &Arc<Held>, by: Moment) -> Result<bool> {
        let names = held.permits.iter().map(|it| Arc::clone(&it.semaphore));
        let lane = self.combiner.lane(names.collect());
        let mut unsure = false;
        match lane.submit(self, Job::Release(Arc::clone(held)), by) {
            Verdict::Released(Freed::Yes) => return Ok(true),
            Verdict::Released(Freed::No) => return Ok(false),
            Verdict::Released(Freed::Busy) | Verdict::Acquired(_) => {}
            Verdict::Failed { failure, .. } if !failure.retry || by.remaining().is_zero() => {
                return Err(failure.error);
            }
            Verdict::Failed { failure, .. } => unsure = failure.unknown,
        }
        let mut connection = self.rows.pool.checkout(Lane::Other, by)?;
        match self.release_on(&mut connection, held) {
            // A try whose answer was lost may have done it.
            Ok(freed) => Ok(freed == Freed::Yes || unsure),
            Err(failure) => Err(failure.error),
        }
    }

    fn release_part(
        &self,
        held: &Held,
        permit: &HeldPermit,
        left: u32,
        by: Moment,
    ) -> Result<bool> {
        let sql = fill(
            &self.statements.release_part,
            &[
                ("{id}", &permit.id.to_string()),
                ("{semaphore_id}", &permit.semaphore_id.to_string()),
                ("{request_id}", &held.request_id.to_string()),
                ("{token}", &held.token.to_string()),
                ("{left}", &left.to_string()),
            ],
        );
        let mut connection = self.rows.pool.checkout(Lane::Other, by)?;
        let outcome = self.send(&mut connection, &format!("{sql};\n{COMMIT}"));
        if outcome.is_err() {
            self.roll_back(&mut connection);
        }
        // SET, SET, BEGIN, SET and the semaphore come before the permit.
        Ok(answer(&mut outcome?, 6)?.matched > 0)
    }

    fn release_request(&self, external_id: &str, by: Moment) -> Result<Release> {
        if self.release_where(&format!("r.external_id = {}", quote(external_id)), by)? {
            return Ok(Release::Released);
        }
        Ok(match self.record(external_id, by)? {
            Some(_) => Release::AlreadyReleased,
            None => Release::Unknown,
        })
    }

    fn renew_request(&self, external_id: &str, by: Moment) -> Result<PermitRenewal> {
        let which = format!("external_id = {}", quote(external_id));
        let renew = fill(&self.statements.renew, &[("{which}", &which)]);
        if self.one(&renew, by)?.matched > 0 {
            return Ok(PermitRenewal::Renewed);
        }
        Ok(match self.record(external_id, by)? {
            Some(_) => PermitRenewal::AlreadyReleased,
            None => PermitRenewal::Unknown,
        })
    }

    fn bury(&self, external_id: &str, tokens: &[u64], by: Moment) -> Result<bool> {
        let token = tokens.last().copied().unwrap_or(0).to_string();
        let id = quote(external_id);
        let values = [("{external_id}", &*id), ("{token}", &*token)];
        let tombstone = fill(&self.statements.tombstone, &values);
        let mut connection = self.rows.pool.checkout(Lane::Other, by)?;
        match self.request(&mut connection, &tombstone) {
            Ok(_) => return Ok(false),
            Err(error) if error.is_duplicate() => {}
            Err(error) => return Err(self.statements.explain(error)),
        }
        drop(connection);
        // The duplicate key was waited for: whatever the calls were about to write has come or gone.
        let tokens = list(tokens.iter().copied());
        self.release_where(
            &format!("r.external_id = {id} AND r.token IN ({tokens})"),
            by,
        )
    }

    fn sweep(&self, sweep: &Sweep, by: Moment) -> Result<Vec<Swept>> {
        self.sweep_all(sweep, by)
    }

    fn owners(&self, by: Moment) -> Result<(Vec<Arc<str>>, StoreTime)> {
        let sql = self.statements.tables(
            "SELECT TIMESTAMPDIFF(MICROSECOND, CAST('1970-01-01' AS DATETIME(6)), SYSDATE(6));\
             SELECT DISTINCT owner FROM {request} WHERE state = 'ACQUIRED' AND owner IS NOT NULL",
        );
        let mut answers = self.ask(&sql, by)?;
        let now = rows::<(u64,)>(answer(&mut answers, 0)?)?;
        let owners = rows::<(String,)>(answer(&mut answers, 1)?)?;
        let owners = owners.into_iter().map(|(owner,)| Arc::from(owner));
        Ok((owners.collect(), now.first().map_or(0, |(now,)| *now)))
    }

    fn delete_requests(&self, age: Duration, batch: usize, by: Moment) -> Result<u64> {
        let look = self.statements.tables(&format!(
            "SELECT id FROM {{request}} WHERE state = 'RELEASED' \
             AND updated_at <= NOW(6) - INTERVAL {} MICROSECOND ORDER BY updated_at LIMIT {batch}",
            micros(age)
        ));
        let ids = rows::<(u64,)>(self.one(&look, by)?)?;
        if ids.is_empty() {
            return Ok(0);
        }
        let ids = list(ids.into_iter().map(|(id,)| id));
        // One message: both or neither, and no time in between in which somebody waits for us.
        let script = self.statements.tables(&format!(
            "SET TRANSACTION ISOLATION LEVEL READ COMMITTED;BEGIN;\
             DELETE FROM {{permit}} WHERE permit_request_id IN ({ids}) AND state = 'RELEASED';\
             DELETE FROM {{request}} WHERE id IN ({ids}) AND state = 'RELEASED';COMMIT"
        ));
        let mut connection = self.rows.pool.checkout(Lane::Other, by)?;
        match self.send(&mut connection, &script) {
            Ok(mut answers) => Ok(answer(&mut answers, 3)?.matched),
            Err(error) => {
                self.roll_back(&mut connection);
                Err(error)
            }
        }
    }

    fn delete_history(&self, age: Duration, batch: usize, by: Moment) -> Result<u64> {
        let sql = self.statements.tables(&format!(
            "DELETE FROM {{history}} WHERE changed_at <= NOW(6) - INTERVAL {} MICROSECOND \
             ORDER BY changed_at LIMIT {batch}",
            micros(age)
        ));
        Ok(self.one(&sql, by)?.matched)
    }

    fn check(&self, by: Moment) -> Result<Vec<Discrepancy>> {
        let found = rows::<(String, i64, i64)>(self.one(&self.statements.audit, by)?)?;
        let wrong = |(name, counter, permits): (String, i64, i64)| Discrepancy {
            semaphore: Arc::from(name),
            counter,
            permits,
        };
        Ok(found.into_iter().map(wrong).collect())
    }

    fn repair(&self, by: Moment) -> Result<Vec<Discrepancy>> {
        let mut corrected = Vec::new();
        for wrong in self.check(by)? {
            let name = &wrong.semaphore;
            let outcome = self.with_locked(name, by, |id, _, counter, connection| {
                // Counted anew under the lock: permits come and go while nobody holds it.
                let sum = self.statements.tables(&format!(
                    "SELECT CAST(COALESCE(SUM(count), 0) AS SIGNED) FROM {{permit}} \
                     WHERE semaphore_id = {id} AND state = 'ACQUIRED'"
                ));
                let sum = rows::<(i64,)>(answer(&mut self.send(connection, &sum)?, 0)?)?;
                let permits = sum.first().map_or(0, |(sum,)| *sum);
                if counter != permits {
                    let sql = format!("UPDATE {{semaphore}} SET used = {permits} WHERE id = {id}");
                    self.send(connection, &self.statements.tables(&sql))?;
                }
                Ok((counter, permits))
            });
            match outcome {
                Ok((counter, permits)) if counter != permits => {
                    log::warn!(
                        "the counter of the semaphore {name:?} was {counter}, its permits add up to \
                         {permits}: corrected"
                    );
                    corrected.push(Discrepancy {
                        semaphore: Arc::clone(name),
                        counter,
                        permits,
                    });
                }
                Ok(_) => {}
                // Deleted meanwhile.
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(corrected)
    }
}

fn mixed_up() -> Error {
    Error::new(ErrorKind::Protocol, "an acquire was answered as a release")
}
