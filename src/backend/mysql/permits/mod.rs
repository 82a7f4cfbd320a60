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

mod audit;
mod combiner;
mod definitions;
mod reclaim;
mod request_row;
mod sql;
mod transaction;

use std::sync::Arc;
use std::time::Duration;

use self::combiner::{Combiner, Job, Verdict};
use self::reclaim::Reclaimed;
use self::request_row::RequestRow;
use self::sql::{Answer, COMMIT, Connections, Statements, answer, fill, list, quote, rows};
use self::transaction::{Freed, Outcome, Transaction};
use super::connection::Connection;
use super::rows::Rows;
use crate::backend::permit_store::{
    Call, CapacityChange, Decision, Discrepancy, Failure, Held, HeldPermit, Holder, PermitRenewal,
    PermitStore, Release, Renewed, RequestStatus, StoreTime, Sweep, Swept, Usage,
};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::pool::Lane;

/// What the tables' names begin with unless told otherwise.
pub(super) const DEFAULT_PREFIX: &str = "contend_";

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
    connections: Connections,
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
            connections: Connections::new(Arc::clone(rows)),
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
            statements: &self.statements,
            connections: &self.connections,
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
            .connections
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
        match self.connections.send(connection, &sql) {
            Ok(mut answers) => {
                let matched = answer(&mut answers, 1).map_err(Failure::known)?.matched;
                Ok(if matched > 0 { Freed::Yes } else { Freed::No })
            }
            Err(error) => {
                let unknown = error.is_outcome_unknown();
                let error = self.statements.explain(error);
                Err(Failure {
                    retry: error.is_transient(),
                    unknown,
                    error,
                })
            }
        }
    }

    /// Releases whatever `which` names: a condition on r.
    fn release_where(&self, which: &str, by: Moment) -> Result<bool> {
        let sql = fill(&self.statements.release, &[("{which}", which)]);
        let mut answers = self.connections.ask(&self.statements, &sql, by)?;
        Ok(answer(&mut answers, 1)?.matched > 0)
    }

    fn record(&self, external_id: &str, by: Moment) -> Result<Option<RequestRow>> {
        let found = self.one(&RequestRow::statement(&self.statements, [external_id]), by)?;
        Ok(RequestRow::parse(found)?.pop())
    }

    /// One statement that commits by itself.
    fn one(&self, sql: &str, by: Moment) -> Result<Answer> {
        answer(&mut self.connections.ask(&self.statements, sql, by)?, 0)
    }

    fn send(&self, connection: &mut Connection, sql: &str) -> Result<Vec<Answer>> {
        self.connections
            .send(connection, sql)
            .map_err(|error| self.statements.explain(error))
    }
}

impl PermitStore for MysqlPermits {
    fn realm(&self) -> &str {
        &self.realm
    }

    fn patience(&self) -> Duration {
        // Two round trips, and a third to roll back.
        self.connections.patience() * 2
    }

    fn min_ttl(&self) -> Duration {
        self.connections.patience() * 4
    }

    fn poll_interval(&self) -> Duration {
        self.poll_interval
    }

    fn create_tables(&self, by: Moment) -> Result<()> {
        self.make_tables(by)
    }

    fn create(&self, name: &str, capacity: u32, by: Moment) -> Result<bool> {
        self.define(name, capacity, by)
    }

    fn set_capacity(
        &self,
        name: &str,
        capacity: u32,
        changed_by: Option<&str>,
        by: Moment,
    ) -> Result<u32> {
        self.change_capacity(name, capacity, changed_by, by)
    }

    fn history(&self, name: &str, by: Moment) -> Result<Vec<CapacityChange>> {
        self.read_history(name, by)
    }

    fn delete(&self, name: &str, by: Moment) -> Result<bool> {
        self.undefine(name, by)
    }

    fn usage(&self, name: Option<&str>, by: Moment) -> Result<Vec<Usage>> {
        self.read_usage(name, by)
    }

    fn holders(&self, name: &str, by: Moment) -> Result<Vec<Holder>> {
        self.read_holders(name, by)
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
        let mut connection = self.connections.checkout(Lane::Owner, by)?;
        let ids = list(held.iter().map(|held| held.request_id));
        let gate = fill(&self.statements.renew_gate, &[("{ids}", &ids)]);
        let outcome = self.send(&mut connection, &gate).and_then(|mut answers| {
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
                self.connections.roll_back(&mut connection);
            } else {
                let which = format!("id IN ({})", list(ours));
                let renew = fill(&self.statements.renew, &[("{which}", &which)]);
                self.send(&mut connection, &format!("{renew};\n{COMMIT}"))?;
            }
            Ok(renewed)
        });
        if outcome.is_err() {
            self.connections.roll_back(&mut connection);
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
        let mut connection = self.connections.checkout(Lane::Other, by)?;
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
        let mut connection = self.connections.checkout(Lane::Other, by)?;
        let outcome = self.send(&mut connection, &format!("{sql};\n{COMMIT}"));
        if outcome.is_err() {
            self.connections.roll_back(&mut connection);
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
        let mut connection = self.connections.checkout(Lane::Other, by)?;
        match self.connections.send(&mut connection, &tombstone) {
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
        self.all_owners(by)
    }

    fn delete_requests(&self, age: Duration, batch: usize, by: Moment) -> Result<u64> {
        self.delete_old_requests(age, batch, by)
    }

    fn delete_history(&self, age: Duration, batch: usize, by: Moment) -> Result<u64> {
        self.delete_old_history(age, batch, by)
    }

    fn check(&self, by: Moment) -> Result<Vec<Discrepancy>> {
        self.wrong_counters(by)
    }

    fn repair(&self, by: Moment) -> Result<Vec<Discrepancy>> {
        self.correct_counters(by)
    }
}

fn mixed_up() -> Error {
    Error::new(ErrorKind::Protocol, "an acquire was answered as a release")
}
