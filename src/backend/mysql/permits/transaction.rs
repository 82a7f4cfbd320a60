//! One transaction for any number of releases and acquires on the same semaphores.
//!
//! Two round trips. The first locks the semaphores and reads what must be known; the second writes and
//! commits. In between, the decision is made here, with the rows locked: releases first, then each
//! acquire in its turn, so that one that finds too little leaves room for the next.
//!
//! The semaphores are locked before any request is looked at. So a retry after a lost reply waits here until its
//! earlier try has committed or is gone, and then sees which.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use super::MysqlPermits;
use super::request_row::RequestRow;
use super::sql::{
    Answer, COMMIT, Statements, answer, fill, list, quote, quote_all, quote_option, rows,
};
use crate::backend::mysql::connection::Connection;
use crate::backend::permit_store::{Grant, GrantId, Outcome, Permit, Recognised, Request};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};

/// What became of each acquire and release, in the order given.
#[derive(Debug)]
pub(super) struct Answers {
    pub(super) released: Vec<Result<Freed>>,
    pub(super) acquired: Vec<Result<Outcome>>,
}

/// What became of a release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Freed {
    Yes,
    /// It was not held by that grant.
    No,
    /// Another transaction has the request locked.
    Busy,
}

/// The transaction of one lane.
#[derive(Clone, Copy, Debug)]
pub(super) struct Transaction<'a> {
    pub(super) store: &'a MysqlPermits,
    /// The semaphores of all jobs, sorted.
    pub(super) names: &'a [Arc<str>],
    pub(super) releases: &'a [Arc<GrantId>],
    pub(super) requests: &'a [Arc<Request>],
}

/// What will be written about an acquire.
#[derive(Debug)]
enum Plan {
    Insert,
    TakeOver {
        request_id: u64,
    },
    /// Nothing.
    Decided(Result<Outcome>),
}

#[derive(Debug)]
struct Semaphore {
    id: u64,
    capacity: u32,
    used: i64,
}

/// What the first round trip told.
struct Locked {
    semaphores: HashMap<Arc<str>, Semaphore>,
    /// Between the ids of one INSERT.
    step: u64,
    changes: BTreeMap<u64, i64>,
    released: Vec<Freed>,
    to_release: Vec<u64>,
    plans: Vec<Plan>,
}

impl Transaction<'_> {
    /// Carries the jobs out.
    ///
    /// # Errors
    /// Nothing was written. Once something was sent that writes, only what it would have written is unknown: the
    /// rest is decided.
    pub(super) fn run(self, connection: &mut Connection) -> Result<Answers> {
        let outcome = self.read(connection).map(|locked| {
            if locked.writes() {
                self.write(connection, locked)
            } else {
                self.store.roll_back(connection);
                self.outcome(locked, 0, Moment::now())
            }
        });
        if outcome.is_err() {
            // A lock wait timeout leaves the transaction open.
            self.store.roll_back(connection);
        }
        outcome
    }

    /// The first round trip, and what it leads to.
    fn read(self, connection: &mut Connection) -> Result<Locked> {
        let names = quote_all(self.names);
        let statements = &self.store.statements;
        let mut script = vec![
            statements.begin.clone(),
            fill(&statements.lock, &[("{names}", &names)]),
        ];
        if !self.releases.is_empty() {
            let ids = quote_all(self.releases.iter().map(|grant| &grant.external_id));
            let requests = format!("r.external_id IN ({ids})");
            script.push(fill(
                &statements.release_lock,
                &[("{requests}", &requests), ("{which}", "TRUE")],
            ));
        }
        let take_over = self
            .requests
            .iter()
            .filter(|it| it.take_over && !it.generated);
        let take_over: Vec<&Arc<str>> = take_over.map(|it| &it.external_id).collect();
        if !take_over.is_empty() {
            let ids = quote_all(take_over.iter());
            script.push(fill(
                &statements.take_over_lock,
                &[("{external_ids}", &ids)],
            ));
        }
        if !self.requests.is_empty() {
            let ids = self.requests.iter().map(|request| &request.external_id);
            script.push(RequestRow::statement(statements, ids));
        }
        let sent = Moment::now();
        let mut answers = self
            .store
            .request(connection, &script.join(";\n"))
            // It would have written nothing.
            .map_err(|error| self.store.statements.failure(error).not_sent())?;
        // SET, SET and BEGIN come first.
        let mut place = 3;
        let mut next = || {
            place += 1;
            answer(&mut answers, place - 1)
        };
        let mut locked = Locked::new(next()?)?;
        if !self.releases.is_empty() {
            let (requests, permits) = (next()?, next()?);
            locked.release(self.releases, requests, permits)?;
        }
        let mut ours = Vec::new();
        if !take_over.is_empty() {
            ours = rows::<(u64,)>(next()?)?;
        }
        if !self.requests.is_empty() {
            let records = RequestRow::parse(next()?)?;
            for request in self.requests {
                let id = &request.external_id;
                let plan = match records.iter().find(|record| record.external_id == *id) {
                    Some(record) => {
                        let is_locked = ours.contains(&(record.request_id,));
                        let plan = locked.recognise(request, record, is_locked, sent);
                        plan.unwrap_or_else(|error| Plan::Decided(Err(error)))
                    }
                    None => locked.decide(request),
                };
                locked.plans.push(plan);
            }
        }
        Ok(locked)
    }

    /// The second round trip.
    fn write(self, connection: &mut Connection, locked: Locked) -> Answers {
        let script = self.script(&locked);
        let sent = Moment::now();
        match self.store.request(connection, &script) {
            Ok(answers) => {
                let mut ids = answers
                    .iter()
                    .map(|answer| answer.last_insert_id)
                    .filter(|id| *id != 0);
                let inserts = locked.plans.iter().any(|plan| matches!(plan, Plan::Insert));
                if inserts {
                    ids.next();
                }
                let permit = ids.next();
                self.outcome(locked, permit.unwrap_or(0), sent)
            }
            Err(error) => {
                let error = self.store.statements.failure(error);
                // A duplicate key leaves the transaction open.
                self.store.roll_back(connection);
                Answers {
                    released: locked
                        .released
                        .into_iter()
                        .map(|freed| match freed {
                            Freed::Yes => Err(error.clone()),
                            freed => Ok(freed),
                        })
                        .collect(),
                    acquired: locked
                        .plans
                        .into_iter()
                        .map(|plan| match plan {
                            Plan::Decided(decision) => decision,
                            Plan::Insert | Plan::TakeOver { .. } => Err(error.clone()),
                        })
                        .collect(),
                }
            }
        }
    }

    fn script(self, locked: &Locked) -> String {
        let statements = &self.store.statements;
        let mut script = Vec::new();
        if !locked.to_release.is_empty() {
            let ids = list(locked.to_release.iter().copied());
            script.push(fill(&statements.release_locked, &[("{ids}", &ids)]));
        }
        let mut requests = Vec::new();
        let mut permits = Vec::new();
        for (request, plan) in self.requests.iter().zip(&locked.plans) {
            let request_id = match plan {
                Plan::Decided(_) => continue,
                Plan::Insert => {
                    let offset = locked.step * requests.len() as u64;
                    requests.push(request_row(request));
                    format!("@first + {offset}")
                }
                Plan::TakeOver { request_id } => {
                    script.push(take_over(statements, request, *request_id));
                    request_id.to_string()
                }
            };
            for (name, count) in &request.permits {
                if let Some(semaphore) = locked.semaphores.get(name) {
                    let id = semaphore.id;
                    permits.push(format!("({id}, {request_id}, {count}, 'ACQUIRED')"));
                }
            }
        }
        if !requests.is_empty() {
            let rows = requests.join(", ");
            script.push(fill(&statements.insert_requests, &[("{rows}", &rows)]));
            script.push("SET @first = LAST_INSERT_ID()".to_owned());
        }
        if !permits.is_empty() {
            let rows = permits.join(", ");
            script.push(fill(&statements.insert_permits, &[("{rows}", &rows)]));
        }
        let changes = locked.changes.iter().filter(|(_, change)| **change != 0);
        script.extend(count(
            statements,
            changes.map(|(id, change)| (*id, *change)),
        ));
        script.push(COMMIT.to_owned());
        script.join(";\n")
    }

    /// Deals the fences out, in the order in which the rows were sent.
    fn outcome(self, mut locked: Locked, mut fence: u64, sent: Moment) -> Answers {
        let mut acquired = Vec::with_capacity(self.requests.len());
        let (step, plans) = (locked.step, std::mem::take(&mut locked.plans));
        for (request, plan) in self.requests.iter().zip(plans) {
            if let Plan::Decided(outcome) = plan {
                acquired.push(outcome);
                continue;
            }
            let mut permits = Vec::with_capacity(request.permits.len());
            for (name, count) in &request.permits {
                permits.push(Permit {
                    semaphore: Arc::clone(name),
                    count: *count,
                    fence,
                });
                fence += step;
            }
            acquired.push(Ok(Outcome::Granted(Grant {
                permits,
                sent,
                remaining: request.ttl,
                free: request.free(|name| locked.semaphore(name)),
            })));
        }
        Answers {
            released: locked.released.into_iter().map(Ok).collect(),
            acquired,
        }
    }
}

impl Locked {
    fn new(answer: Answer) -> Result<Locked> {
        let mut locked = Locked {
            semaphores: HashMap::new(),
            step: 1,
            changes: BTreeMap::new(),
            released: Vec::new(),
            to_release: Vec::new(),
            plans: Vec::new(),
        };
        for (id, name, capacity, used, step) in rows::<(u64, String, u32, i64, u64)>(answer)? {
            locked.step = step.max(1);
            let semaphore = Semaphore { id, capacity, used };
            locked.semaphores.insert(Arc::from(name), semaphore);
        }
        Ok(locked)
    }

    /// The capacity of a semaphore, and what is held of it.
    fn semaphore(&self, name: &str) -> Option<(u32, i64)> {
        let semaphore = self.semaphores.get(name);
        semaphore.map(|semaphore| (semaphore.capacity, semaphore.used))
    }

    fn writes(&self) -> bool {
        !self.to_release.is_empty()
            || self
                .plans
                .iter()
                .any(|plan| !matches!(plan, Plan::Decided(_)))
    }

    fn release(
        &mut self,
        releases: &[Arc<GrantId>],
        requests: Answer,
        permits: Answer,
    ) -> Result<()> {
        let locked = rows::<(u64, u64, String, Option<String>)>(requests)?;
        let permits = rows::<(String, u64, u64, String, u32)>(permits)?;
        for grant in releases {
            let own = permits.iter().filter(|(id, ..)| **id == *grant.external_id);
            let found = locked
                .iter()
                .find(|(_, _, id, _)| **id == *grant.external_id);
            match found {
                Some((id, token, ..)) if grant.names(*token) => {
                    self.released.push(Freed::Yes);
                    self.to_release.push(*id);
                    for (_, _, semaphore, name, count) in own {
                        *self.changes.entry(*semaphore).or_default() -= i64::from(*count);
                        if let Some(semaphore) = self.semaphores.get_mut(name.as_str()) {
                            semaphore.used -= i64::from(*count);
                        }
                    }
                }
                // Where it is not locked by us and still has permits, another transaction has it locked.
                None if own.count() > 0 => self.released.push(Freed::Busy),
                _ => self.released.push(Freed::No),
            }
        }
        Ok(())
    }

    /// The external id is there already.
    fn recognise(
        &self,
        request: &Request,
        record: &RequestRow,
        is_locked: bool,
        sent: Moment,
    ) -> Result<Plan> {
        let outcome = match request.recognise(record.token, record.status())? {
            Recognised::Known(status) => Outcome::Known(status),
            Recognised::Own => Outcome::Granted(Grant {
                permits: record.permits.clone(),
                sent,
                remaining: record.expires_in,
                free: request.free(|name| self.semaphore(name)),
            }),
            Recognised::TakeOver if is_locked => {
                return Ok(Plan::TakeOver {
                    request_id: record.request_id,
                });
            }
            Recognised::TakeOver => {
                return Err(Error::new(
                    ErrorKind::Unavailable,
                    "it cannot be taken over while another transaction has it locked; try again",
                ));
            }
        };
        Ok(Plan::Decided(Ok(outcome)))
    }

    /// Takes what the request wants, if all of it is there.
    fn decide(&mut self, request: &Request) -> Plan {
        match request.shortage(|name| self.semaphore(name)) {
            Err(error) => return Plan::Decided(Err(error)),
            Ok(Some(exhausted)) => return Plan::Decided(Ok(Outcome::Exhausted(exhausted))),
            Ok(None) => {}
        }
        for (name, count) in &request.permits {
            if let Some(semaphore) = self.semaphores.get_mut(name) {
                semaphore.used += i64::from(*count);
                *self.changes.entry(semaphore.id).or_default() += i64::from(*count);
            }
        }
        Plan::Insert
    }
}

/// The statement that changes counters, if any do.
pub(super) fn count(
    statements: &Statements,
    changes: impl Iterator<Item = (u64, i64)>,
) -> Option<String> {
    let changes: Vec<(u64, i64)> = changes.collect();
    let cases: Vec<String> = changes
        .iter()
        .map(|(id, change)| format!("WHEN {id} THEN {change}"))
        .collect();
    let ids = list(changes.iter().map(|(id, _)| *id));
    let values = [("{changes}", &*cases.join(" ")), ("{ids}", &*ids)];
    (!changes.is_empty()).then(|| fill(&statements.change_counters, &values))
}

fn request_row(request: &Request) -> String {
    let (ttl, expires_at, reclaim_at) = times(request.ttl);
    format!(
        "({}, {}, {}, 'ACQUIRED', {ttl}, {expires_at}, {reclaim_at})",
        quote(&request.external_id),
        request.token,
        quote_option(request.owner.as_deref()),
    )
}

fn take_over(statements: &Statements, request: &Request, request_id: u64) -> String {
    let (ttl, expires_at, reclaim_at) = times(request.ttl);
    fill(
        &statements.take_over,
        &[
            ("{id}", &request_id.to_string()),
            ("{token}", &request.token.to_string()),
            ("{ttl}", &ttl),
            ("{expires_at}", &expires_at),
            ("{reclaim_at}", &reclaim_at),
        ],
    )
}

/// A ttl, its end, and when its permits can be taken back, as SQL.
fn times(ttl: Option<Duration>) -> (String, String, String) {
    let null = || "NULL".to_owned();
    let Some(ttl) = ttl else {
        return (null(), null(), null());
    };
    let seconds = format!("{}.{:03}", ttl.as_secs(), ttl.subsec_millis());
    let expires_at = format!("SYSDATE(6) + INTERVAL {seconds} SECOND");
    let reclaim_at = format!("SYSDATE(6) + INTERVAL {seconds} * 1.25 SECOND");
    (seconds, expires_at, reclaim_at)
}
