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
use self::request_row::RequestRow;
pub(super) use self::sql::DEFAULT_PREFIX;
use self::sql::{
    Answer, COMMIT, ROLLBACK, Statements, answer, columns, duration, fill, list, micros, quote,
    quote_all, quote_option, rows,
};
use self::transaction::{Answers, Freed, Transaction};
use super::connection::{Connection, LOCK_WAIT};
use super::error::RequestError;
use super::rows::Rows;
use crate::backend::permit_store::{
    CapacityChange, Discrepancy, GrantId, Holder, Outcome, PermitStore, Purge, Released, Renewed,
    Request, RequestStatus, StoreTime, Sweep, Swept, Usage, free, no_such_semaphore,
    semaphore_in_use,
};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::pool::Lane;

/// What an answer may take beyond the longest wait for a lock.
const BEYOND_LOCK_WAIT: Duration = Duration::from_millis(250);

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
    /// The longest wait for an answer to statements that lock nothing.
    read_timeout: Duration,
    /// The longest wait for any answer: a wait for a lock ends before it, and not with the connection.
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
            read_timeout: rows.request_limit(),
            patience: rows.request_limit().max(LOCK_WAIT + BEYOND_LOCK_WAIT),
            rows: Arc::clone(rows),
        })
    }

    /// One transaction for these jobs.
    fn transaction(
        &self,
        connection: &mut Connection,
        names: &[Arc<str>],
        releases: &[Arc<GrantId>],
        requests: &[Arc<Request>],
    ) -> Result<Answers> {
        let transaction = Transaction {
            store: self,
            names,
            releases,
            requests,
        };
        transaction.run(connection)
    }

    /// One acquire: shared with others if they come at the same time, alone if that failed.
    fn acquire_once(&self, request: &Arc<Request>, by: Moment) -> Result<Outcome> {
        let names: Vec<Arc<str>> = names(&request.permits);
        let lane = self.combiner.lane(names.clone());
        let job = Job::Acquire(Arc::clone(request));
        let error = match lane.submit(self, job, by) {
            Verdict::Acquired(outcome) => return Ok(outcome),
            Verdict::Failed {
                error,
                shared: true,
            } if error.is_transient() && !by.remaining().is_zero() => error,
            Verdict::Failed { error, .. } => return Err(error),
            Verdict::Released(_) => return Err(mixed_up()),
        };
        let mut connection = self.rows.pool.checkout(Lane::Other, by)?;
        let requests = [Arc::clone(request)];
        let alone = self.transaction(&mut connection, &names, &[], &requests);
        match alone.map(|answers| answers.acquired.into_iter().next()) {
            Ok(Some(Ok(outcome))) => Ok(outcome),
            // What the first try left is still not known.
            Ok(Some(Err(next))) | Err(next) if next.is_not_sent() && !error.is_not_sent() => {
                log::debug!("alone: {next}");
                Err(error)
            }
            Ok(Some(Err(next))) | Err(next) => Err(next),
            Ok(None) => Err(error),
        }
    }

    /// Releases a grant, or whatever its request holds: one message, one try.
    fn release_on(&self, connection: &mut Connection, grant: &GrantId) -> Result<Released> {
        let id = quote(&grant.external_id);
        let Some(token) = grant.token else {
            // What it holds is read first, to wake those who wait for it.
            let read = RequestRow::statement(&self.statements, [&grant.external_id]);
            let which = format!("r.external_id = {id}");
            let release = fill(&self.statements.release, &[("{which}", &which)]);
            let mut answers = self.send(connection, &format!("{read};\n{release}"))?;
            let record = RequestRow::parse(answer(&mut answers, 0)?)?.pop();
            return Ok(match (answer(&mut answers, 2)?.matched, record) {
                (1.., record) => {
                    let counts = record.map(|record| record.status().counts());
                    Released::Permits(counts.unwrap_or_default())
                }
                (0, Some(_)) => Released::AlreadyReleased,
                (0, None) => Released::Unknown,
            });
        };
        let which = format!("r.external_id = {id} AND r.token = {token}");
        let release = fill(&self.statements.release, &[("{which}", &which)]);
        let mut answers = self.send(connection, &release)?;
        Ok(match answer(&mut answers, 1)?.matched {
            0 => Released::AlreadyReleased,
            _ => Released::Permits(grant.permits.clone()),
        })
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
        self.request_within(self.patience, connection, sql)
    }

    fn request_within(
        &self,
        patience: Duration,
        connection: &mut Connection,
        sql: &str,
    ) -> Result<Vec<Answer>, RequestError> {
        // Far enough to be sent: the patience decides.
        let by = Moment::now() + patience * 2;
        let outcome = connection.run_within(patience, by, |conn| {
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

    fn min_ttl(&self) -> Duration {
        self.read_timeout * 4
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

    fn acquire(&self, request: &Arc<Request>, by: Moment) -> Result<Outcome> {
        let outcome = self.acquire_once(request, by)?;
        if !matches!(outcome, Outcome::Exhausted(_)) {
            return Ok(outcome);
        }
        match self.reclaim(request, by) {
            Ok(true) => self.acquire_once(request, by),
            Ok(false) => Ok(outcome),
            Err(error) => {
                log::debug!("could not take back what has expired: {error}");
                Ok(outcome)
            }
        }
    }

    fn renew(&self, grants: &[GrantId], by: Moment) -> Result<Vec<Renewed>> {
        let mut connection = self.rows.pool.checkout(Lane::Owner, by)?;
        let ids = quote_all(grants.iter().map(|grant| &grant.external_id));
        let lock = fill(&self.statements.renew_lock, &[("{external_ids}", &ids)]);
        // No statement here waits for a lock.
        let send = |connection: &mut Connection, sql: &str| {
            let answers = self.request_within(self.read_timeout, connection, sql);
            answers.map_err(|error| self.statements.explain(error))
        };
        let outcome = send(&mut connection, &lock).and_then(|mut answers| {
            let locked = rows::<(String, u64)>(answer(&mut answers, 3)?)?;
            let known = rows::<(String, u64, String)>(answer(&mut answers, 4)?)?;
            let renewed: Vec<Renewed> = grants
                .iter()
                .map(|grant| {
                    let id = &*grant.external_id;
                    let own = |(other, token): &(String, u64)| other == id && grant.names(*token);
                    match known.iter().find(|(other, ..)| other == id) {
                        _ if locked.iter().any(own) => Renewed::Yes,
                        Some((_, token, state)) if grant.names(*token) && state == "ACQUIRED" => {
                            Renewed::Busy
                        }
                        Some(_) => Renewed::Lost,
                        None => Renewed::Unknown,
                    }
                })
                .collect();
            let ours = grants.iter().zip(&renewed);
            let ours = ours.filter(|(_, renewed)| **renewed == Renewed::Yes);
            let ours: Vec<&Arc<str>> = ours.map(|(grant, _)| &grant.external_id).collect();
            if ours.is_empty() {
                self.roll_back(&mut connection);
            } else {
                let ids = quote_all(ours);
                let renew = fill(&self.statements.renew, &[("{external_ids}", &ids)]);
                send(&mut connection, &format!("{renew};\n{COMMIT}"))?;
            }
            Ok(renewed)
        });
        if outcome.is_err() {
            self.roll_back(&mut connection);
        }
        outcome
    }

    fn release(&self, grant: &GrantId, by: Moment) -> Result<Released> {
        let mut unsure = false;
        if grant.token.is_some() {
            let lane = self.combiner.lane(names(&grant.permits));
            match lane.submit(self, Job::Release(Arc::new(grant.clone())), by) {
                Verdict::Released(Freed::Yes) => {
                    return Ok(Released::Permits(grant.permits.clone()));
                }
                Verdict::Released(Freed::No) => return Ok(Released::AlreadyReleased),
                Verdict::Released(Freed::Busy) | Verdict::Acquired(_) => {}
                Verdict::Failed { error, .. }
                    if !error.is_transient() || by.remaining().is_zero() =>
                {
                    return Err(error);
                }
                Verdict::Failed { error, .. } => unsure = !error.is_not_sent(),
            }
        }
        let mut connection = self.rows.pool.checkout(Lane::Other, by)?;
        let released = self.release_on(&mut connection, grant)?;
        Ok(match released {
            // A try whose answer was lost may have done it.
            Released::AlreadyReleased if unsure => Released::Permits(grant.permits.clone()),
            released => released,
        })
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

    fn purge(&self, what: Purge, age: Duration, batch: usize, by: Moment) -> Result<u64> {
        if what == Purge::History {
            let sql = self.statements.tables(&format!(
                "DELETE FROM {{history}} WHERE changed_at <= NOW(6) - INTERVAL {} MICROSECOND \
                 ORDER BY changed_at LIMIT {batch}",
                micros(age)
            ));
            return Ok(self.one(&sql, by)?.matched);
        }
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
        // One message: both or neither, and no time in between in which others wait.
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

    fn audit(&self, repair: bool, by: Moment) -> Result<Vec<Discrepancy>> {
        let found = rows::<(String, i64, i64)>(self.one(&self.statements.audit, by)?)?;
        let wrong = |(name, counter, permits): (String, i64, i64)| Discrepancy {
            semaphore: Arc::from(name),
            counter,
            permits,
        };
        let found: Vec<Discrepancy> = found.into_iter().map(wrong).collect();
        if !repair {
            return Ok(found);
        }
        let mut corrected = Vec::new();
        for wrong in found {
            let name = &wrong.semaphore;
            let outcome = self.with_locked(name, by, |id, _, counter, connection| {
                // Counted anew under the lock: permits come and go without it.
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

fn names(permits: &[(Arc<str>, u32)]) -> Vec<Arc<str>> {
    permits.iter().map(|(name, _)| Arc::clone(name)).collect()
}

fn mixed_up() -> Error {
    Error::new(ErrorKind::Protocol, "an acquire was answered as a release")
}
