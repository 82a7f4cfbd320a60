//! Semaphores in the tables of a MySQL or MariaDB server (`sql/init-semaphore.sql`).
//!
//! - The rows of the semaphores are locked, in the order of their names, before anything is decided.
//! - What is held is counted in the semaphore's own row, in the transaction that changes the permits. So an acquire
//!   costs the same with ten permits held as with a hundred thousand, and a crash leaves both or neither.
//! - A request goes from acquired to released and never back. The transaction that makes this change lowers the
//!   counters, no other.
//! - A grant has the token of the call that it was made for. A retry recognises its own grant by it, and a renewal or
//!   release that names another grant does nothing.
//! - Calls of one factory for the same semaphores share a transaction, see `lane.rs`.
//!
//! Round trips: two for an acquire and one for a release without contention; two for all that is combined; two for a
//! batch of renewals.

mod lane;
mod sql;
mod sweep;
mod transaction;

use std::sync::Arc;
use std::time::Duration;

use mysql::prelude::{FromRow, Queryable};

use self::lane::{Job, Lanes, Reply, no_reply};
use self::sql::{
    Answer, BEGIN, COMMIT, ROLLBACK, answer, duration, fill, list, micros, quote, quote_all,
    quote_option, requests, rows, which,
};
pub(super) use self::sql::{DEFAULT_PREFIX, Statements};
use super::connection::{Connector, LOCK_WAIT};
use super::error::RequestError;
use super::rows::Rows;
use crate::backend::permit_store::{
    CapacityChange, Counts, Discrepancy, GrantId, Holder, Outcome, PermitRenewal, PermitStore,
    Purge, Release, Request, RequestStatus, Standing, StoreTime, Sweep, Swept, Usage, counts, free,
    no_such_semaphore, semaphore_in_use,
};
use crate::clock::Moment;
use crate::error::Result;
use crate::pool::{Checkout, Lane as PoolLane};

/// What an answer may take beyond the longest wait for a lock.
const BEYOND_LOCK_WAIT: Duration = Duration::from_millis(250);

/// The semaphores in one database, for one factory.
pub(super) struct MysqlPermits {
    realm: String,
    statements: Arc<Statements>,
    lanes: Lanes,
    rows: Arc<Rows>,
    /// The longest wait for an answer: a wait for a lock ends before it, and not with the connection.
    patience: Duration,
}

impl MysqlPermits {
    /// Permits that use the connections of `rows`.
    pub(super) fn new(statements: &Arc<Statements>, rows: &Arc<Rows>) -> MysqlPermits {
        let server = &rows.pool.connector().server;
        MysqlPermits {
            realm: format!("{server}?table_prefix={}", statements.prefix),
            statements: Arc::clone(statements),
            lanes: Lanes::default(),
            rows: Arc::clone(rows),
            patience: rows.request_limit().max(LOCK_WAIT + BEYOND_LOCK_WAIT),
        }
    }

    /// A connection that came free by `by`. Each message on it may take as long as a wait for a lock.
    fn session(&self, by: Moment) -> Result<Session<'_>> {
        self.session_of(PoolLane::Other, by)
    }

    fn session_of(&self, lane: PoolLane, by: Moment) -> Result<Session<'_>> {
        Ok(Session {
            store: self,
            connection: self.rows.pool.checkout(lane, by)?,
            by: Moment::FAR,
        })
    }

    /// One statement that commits by itself.
    fn one(&self, sql: &str, by: Moment) -> Result<Answer> {
        self.session(by)?.ask_last(sql)
    }

    /// Reads with one statement; `each` makes something of the columns of a row.
    fn read<C: FromRow, T>(&self, sql: &str, by: Moment, each: impl Fn(C) -> T) -> Result<Vec<T>> {
        let found = rows(self.one(sql, by)?)?;
        Ok(found.into_iter().map(each).collect())
    }

    /// Has a job carried out, together with others that come at the same time; alone if that failed.
    fn carry_out(&self, job: Job, by: Moment) -> Result<Reply> {
        let shared = self.lanes.of(job.permits());
        let error = match shared.submit(self, job.clone(), by) {
            (Err(error), true) if error.is_transient() && !by.remaining().is_zero() => error,
            (reply, _) => return reply,
        };
        let alone = std::slice::from_ref(&job);
        let replies = self.session(by).and_then(|mut it| it.carry_out(alone));
        let reply = replies.and_then(|mut it| it.pop().unwrap_or_else(|| Err(no_reply())));
        // What the shared transaction left is not known yet.
        let is_unsure = !error.is_not_sent();
        match (reply, job) {
            (Err(next), _) if is_unsure && next.is_not_sent() => Err(error),
            (Ok(Reply::Released(Release::AlreadyReleased, _)), Job::Release(it)) if is_unsure => {
                Ok(Reply::Released(Release::Released, it.permits.clone()))
            }
            (reply, _) => reply,
        }
    }

    fn acquire_once(&self, request: &Arc<Request>, by: Moment) -> Result<Outcome> {
        match self.carry_out(Job::Acquire(Arc::clone(request)), by)? {
            Reply::Acquired(outcome) => Ok(outcome),
            Reply::Released(..) => Err(no_reply()),
        }
    }
}

/// A connection on loan, and until when its requests may take.
struct Session<'s> {
    store: &'s MysqlPermits,
    connection: Checkout<Connector>,
    by: Moment,
}

impl Session<'_> {
    /// Sends statements in one message and reads their answers.
    fn send(&mut self, sql: &str) -> Result<Vec<Answer>, RequestError> {
        let outcome = self
            .connection
            .run_within(self.store.patience, self.by, |conn| {
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
            && error.poisoned
        {
            let pool = &self.store.rows.pool;
            pool.lost(&error.clone().into());
            pool.discard_idle(self.connection.sent);
        }
        outcome
    }

    /// As [`send`](Session::send), with an error for the caller.
    fn ask(&mut self, sql: &str) -> Result<Vec<Answer>> {
        self.send(sql)
            .map_err(|error| self.store.statements.explain(error))
    }

    /// As [`ask`](Session::ask), for the answer to the last statement.
    fn ask_last(&mut self, sql: &str) -> Result<Answer> {
        answer(self.ask(sql)?.pop())
    }

    /// Sends a whole transaction in one message. What `sql` answers comes after what BEGIN does.
    fn commit(&mut self, sql: &str) -> Result<Vec<Answer>> {
        let begin = &self.store.statements.begin;
        let outcome = self.ask(&format!("{begin};\n{sql};\n{COMMIT}"));
        self.or_roll_back(outcome)
    }

    /// Ends the transaction if it failed: a lock wait timeout or a duplicate key leaves it open.
    fn or_roll_back<T>(&mut self, outcome: Result<T>) -> Result<T> {
        if outcome.is_err() {
            self.roll_back();
        }
        outcome
    }

    /// Ends a transaction without a trace; gives the connection up where that is not sure.
    fn roll_back(&mut self) {
        self.by = Moment::FAR;
        if !self.connection.poisoned && self.send(ROLLBACK).is_err() {
            self.connection.poisoned = true;
        }
    }

    /// Releases a grant, or whatever its request holds: one message, one try.
    fn release(&mut self, grant: &GrantId) -> Result<(Release, Counts)> {
        let statements = &self.store.statements;
        let release = fill(&statements.release, &[("{which}", &which(grant))]);
        if grant.token.is_some() {
            return Ok(match self.ask_last(&release)?.matched {
                0 => (Release::AlreadyReleased, Vec::new()),
                _ => (Release::Released, grant.permits.clone()),
            });
        }
        // What it holds is read first, to wake those who wait for it.
        let ids = quote(&grant.external_id);
        let read = fill(&statements.read, &[("{external_ids}", &ids)]);
        let mut answers = self.ask(&format!("{read};\n{release}"))?.into_iter();
        let known = requests(answer(answers.next())?)?.pop();
        let is_released = answer(answers.last())?.matched > 0;
        Ok(match known {
            Some(row) if is_released => (Release::Released, counts(&row.status.permits)),
            Some(_) => (Release::AlreadyReleased, Vec::new()),
            // Granted between the two.
            None if is_released => (Release::Released, Vec::new()),
            None => (Release::Unknown, Vec::new()),
        })
    }

    /// Locks those of these grants that are held and that no other transaction has locked, and restarts their ttl.
    fn renew(&mut self, grants: &[GrantId]) -> Result<Vec<Option<PermitRenewal>>> {
        let statements = &self.store.statements;
        let ids = quote_all(grants.iter().map(|grant| &grant.external_id));
        let lock = fill(&statements.renew_lock, &[("{external_ids}", &ids)]);
        let mut answers = self.ask(&lock)?.into_iter().skip(BEGIN);
        let locked = rows::<(String, u64)>(answer(answers.next())?)?;
        let known = rows::<(String, u64, bool)>(answer(answers.next())?)?;
        let mut renewed = Vec::with_capacity(grants.len());
        let mut ours = Vec::new();
        for grant in grants {
            let id = &*grant.external_id;
            let is_ours = |(other, token): &(String, u64)| other == id && grant.names(*token);
            renewed.push(match known.iter().find(|(other, ..)| other == id) {
                _ if locked.iter().any(is_ours) => {
                    ours.push(id);
                    Some(PermitRenewal::Renewed)
                }
                Some((_, token, true)) if grant.names(*token) => None,
                Some(_) => Some(PermitRenewal::AlreadyReleased),
                None => Some(PermitRenewal::Unknown),
            });
        }
        if ours.is_empty() {
            self.roll_back();
        } else {
            let ours = quote_all(ours);
            let renew = fill(&statements.renew, &[("{external_ids}", &ours)]);
            self.ask(&format!("{renew};\n{COMMIT}"))?;
        }
        Ok(renewed)
    }
}

impl PermitStore for MysqlPermits {
    fn realm(&self) -> &str {
        &self.realm
    }

    fn create_tables(&self, by: Moment) -> Result<()> {
        let (statements, mut session) = (&self.statements, self.session(by)?);
        // Where the tables are, no right to make them is needed.
        match session.send(&statements.check_tables) {
            Err(error) if error.is_missing_table() => {
                session.ask(&statements.create_tables())?;
                session.ask(&statements.check_tables).map(drop)
            }
            checked => checked.map(drop).map_err(|error| statements.explain(error)),
        }
    }

    fn create(&self, name: &str, capacity: u32, by: Moment) -> Result<bool> {
        let sql = self.statements.tables(&format!(
            "INSERT IGNORE INTO {{semaphore}} (name, capacity) VALUES ({}, {capacity})",
            quote(name)
        ));
        Ok(self.one(&sql, by)?.matched > 0)
    }

    fn set_capacity(&self, name: &str, to: u32, who: Option<&str>, by: Moment) -> Result<u32> {
        let (id, new, who) = (quote(name), to.to_string(), quote_option(who));
        let values = [
            ("{name}", &*id),
            ("{capacity}", &new),
            ("{changed_by}", &who),
        ];
        let sql = fill(&self.statements.set_capacity, &values);
        let answers = self.session(by)?.commit(&sql)?;
        let before = rows::<(u32,)>(answer(answers.into_iter().nth(BEGIN))?)?.pop();
        let (before,) = before.ok_or_else(|| no_such_semaphore(name))?;
        Ok(before)
    }

    fn history(&self, name: &str, by: Moment) -> Result<Vec<CapacityChange>> {
        type Columns = (String, Option<String>, u64, u32, u32);
        let sql = self.statements.tables(&format!(
            "SELECT semaphore_name, changed_by, \
             CAST(UNIX_TIMESTAMP(changed_at) * 1000 AS UNSIGNED), old_capacity, new_capacity \
             FROM {{history}} WHERE semaphore_name = {} ORDER BY id",
            quote(name)
        ));
        let change = |(name, changed_by, changed_at, from, to): Columns| CapacityChange {
            semaphore: Arc::from(name),
            changed_by: changed_by.map(Arc::from),
            changed_at,
            from,
            to,
        };
        self.read(&sql, by, change)
    }

    fn delete(&self, name: &str, by: Moment) -> Result<bool> {
        let sql = fill(&self.statements.delete, &[("{name}", &quote(name))]);
        if self.session(by)?.ask_last(&sql)?.matched > 0 {
            return Ok(true);
        }
        match self.usage(Some(name), by)?.pop() {
            Some(usage) => {
                let held = i64::try_from(usage.held).unwrap_or(i64::MAX);
                Err(semaphore_in_use(name, held, usage.capacity))
            }
            None => Ok(false),
        }
    }

    fn usage(&self, name: Option<&str>, by: Moment) -> Result<Vec<Usage>> {
        type Columns = (String, u32, i64, u64, u64);
        let which = match name {
            Some(name) => format!("s.name = {}", quote(name)),
            None => "TRUE".to_owned(),
        };
        let sql = fill(&self.statements.usage, &[("{which}", &which)]);
        let usage = |(name, capacity, held, requests, expired): Columns| Usage {
            semaphore: Arc::from(name),
            capacity,
            held: u64::try_from(held).unwrap_or(0),
            expired,
            free: free(capacity, held),
            requests,
        };
        self.read(&sql, by, usage)
    }

    fn holders(&self, name: &str, by: Moment) -> Result<Vec<Holder>> {
        type Columns = (String, Option<String>, u32, u64, i64, Option<i64>);
        let sql = fill(&self.statements.holders, &[("{name}", &quote(name))]);
        let holder = |(id, owner, count, fence, age, left): Columns| Holder {
            external_id: Arc::from(id),
            owner: owner.map(Arc::from),
            count,
            fence,
            held_for: duration(age),
            expires_in: left.map(duration),
        };
        let found = self.read(&sql, by, holder)?;
        if found.is_empty() && self.usage(Some(name), by)?.is_empty() {
            return Err(no_such_semaphore(name));
        }
        Ok(found)
    }

    fn status(&self, external_id: &str, by: Moment) -> Result<Option<RequestStatus>> {
        let id = quote(external_id);
        let found = self.one(&fill(&self.statements.read, &[("{external_ids}", &id)]), by)?;
        Ok(requests(found)?.pop().map(|row| row.status))
    }

    fn acquire(
        &self,
        request: &Arc<Request>,
        _place: Option<&Standing>,
        by: Moment,
    ) -> Result<Outcome> {
        let outcome = self.acquire_once(request, by)?;
        if !matches!(outcome, Outcome::Exhausted(_)) {
            return Ok(outcome);
        }
        match self.reclaim(request, by) {
            Ok(true) => return self.acquire_once(request, by),
            Ok(false) => {}
            Err(error) => log::debug!("could not take back what has expired: {error}"),
        }
        Ok(outcome)
    }

    fn renew(&self, grants: &[GrantId], by: Moment) -> Result<Vec<Option<PermitRenewal>>> {
        let mut session = self.session_of(PoolLane::Owner, by)?;
        // Belief does not wait for a late reply.
        session.by = by;
        let renewed = session.renew(grants);
        session.or_roll_back(renewed)
    }

    fn release(&self, grant: &GrantId, by: Moment) -> Result<(Release, Counts)> {
        if grant.token.is_none() {
            return self.session(by)?.release(grant);
        }
        match self.carry_out(Job::Release(Arc::new(grant.clone())), by)? {
            Reply::Released(release, freed) => Ok((release, freed)),
            Reply::Acquired(_) => Err(no_reply()),
        }
    }

    fn sweep(&self, sweep: &Sweep, by: Moment) -> Result<Vec<Swept>> {
        self.sweep_all(sweep, by)
    }

    fn owners(&self, by: Moment) -> Result<(Vec<Arc<str>>, StoreTime)> {
        let sql = self.statements.tables(
            "SELECT TIMESTAMPDIFF(MICROSECOND, CAST('1970-01-01' AS DATETIME(6)), SYSDATE(6));\
             SELECT DISTINCT owner FROM {request} WHERE state = 'ACQUIRED' AND owner IS NOT NULL",
        );
        let mut answers = self.session(by)?.ask(&sql)?.into_iter();
        let now = rows::<(u64,)>(answer(answers.next())?)?;
        let owners = rows::<(String,)>(answer(answers.next())?)?;
        let owners = owners.into_iter().map(|(owner,)| Arc::from(owner));
        Ok((owners.collect(), now.first().map_or(0, |(now,)| *now)))
    }

    fn purge(&self, what: Purge, age: Duration, batch: usize, by: Moment) -> Result<u64> {
        let age = micros(age);
        if what == Purge::History {
            let sql = self.statements.tables(&format!(
                "DELETE FROM {{history}} WHERE changed_at <= NOW(6) - INTERVAL {age} MICROSECOND \
                 ORDER BY changed_at LIMIT {batch}"
            ));
            return Ok(self.one(&sql, by)?.matched);
        }
        let look = self.statements.tables(&format!(
            "SELECT id FROM {{request}} WHERE state = 'RELEASED' \
             AND updated_at <= NOW(6) - INTERVAL {age} MICROSECOND ORDER BY updated_at LIMIT {batch}"
        ));
        let ids = self.read(&look, by, |(id,)| id)?;
        if ids.is_empty() {
            return Ok(0);
        }
        let ids = list(ids);
        let sql = fill(&self.statements.purge, &[("{ids}", &ids)]);
        let answers = self.session(by)?.commit(&sql)?;
        Ok(answer(answers.into_iter().nth(BEGIN + 1))?.matched)
    }

    fn audit(&self, repair: bool, by: Moment) -> Result<Vec<Discrepancy>> {
        let wrong = |(name, counter, permits): (String, i64, i64)| Discrepancy {
            semaphore: Arc::from(name),
            counter,
            permits,
        };
        let found = self.read(&self.statements.audit, by, wrong)?;
        if repair && !found.is_empty() {
            let names = quote_all(found.iter().map(|wrong| &wrong.semaphore));
            let values = [("{names}", &*names)];
            let lock = fill(&self.statements.lock, &values);
            let repair = fill(&self.statements.repair, &values);
            self.session(by)?.commit(&format!("{lock};\n{repair}"))?;
            log::warn!(
                "counters of semaphores that differed from their permits, corrected: {found:?}"
            );
        }
        Ok(found)
    }
}
