//! One transaction for any number of releases and acquires on the same semaphores.
//!
//! Two round trips. The first locks the semaphores and reads what must be known; the second writes and commits. In
//! between, the decision is made here, with the rows locked: releases first, then each acquire in its turn, so that
//! one that finds too little leaves room for the next.
//!
//! The semaphores are locked before a request is looked at. So a retry after a lost reply waits here until its earlier
//! try has committed or is gone, and then sees which. And no other writer can commit a change of the state or token of
//! a request that is read here: it would have to change a counter.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use super::Session;
use super::sql::{
    Answer, BEGIN, COMMIT, RequestRow, Statements, answer, fill, list, quote, quote_all,
    quote_option, requests, rows,
};
use crate::backend::permit_store::{Grant, Outcome, Permit, Recognised, Request};
use crate::clock::Moment;
use crate::error::{Error, Result};

/// The transaction of one lane, or of a sweep.
pub(super) struct Transaction<'a> {
    /// The semaphores of all that it acquires and releases, sorted.
    pub(super) names: &'a [Arc<str>],
    /// Which held requests to release: a condition on `r`.
    pub(super) release: Option<String>,
    pub(super) requests: &'a [Arc<Request>],
}

/// What it came to.
pub(super) struct Done {
    /// What it found held and has released. It passes over what another transaction has locked.
    pub(super) released: Vec<RequestRow>,
    /// For each request.
    pub(super) acquired: Vec<Result<Outcome>>,
}

struct Semaphore {
    id: u64,
    capacity: u32,
    used: i64,
    /// How much of `used` this transaction adds.
    change: i64,
}

/// What the first round trip showed, and what the second will write.
struct Plan<'a> {
    statements: &'a Statements,
    semaphores: HashMap<Arc<str>, Semaphore>,
    /// Between the ids of one INSERT.
    step: u64,
    released: Vec<RequestRow>,
    /// For each request; `None` where the second round trip grants it.
    decided: Vec<Option<Result<Outcome>>>,
    take_overs: Vec<String>,
    /// Rows of new requests and permits.
    requests: Vec<String>,
    permits: Vec<String>,
}

impl Transaction<'_> {
    /// Carries it out.
    ///
    /// # Errors
    /// All of it failed; the outcome is unknown only if the second message was sent.
    pub(super) fn run(&self, session: &mut Session<'_>) -> Result<Done> {
        let plan = self.read(session);
        let done = plan.and_then(|plan| self.write(session, plan));
        session.or_roll_back(done)
    }

    /// The first round trip, and what it leads to.
    fn read<'s>(&self, session: &mut Session<'s>) -> Result<Plan<'s>> {
        let statements = &session.store.statements;
        let names = quote_all(self.names);
        let mut script = vec![
            statements.begin.clone(),
            fill(&statements.lock, &[("{names}", &names)]),
        ];
        if let Some(which) = &self.release {
            script.push(fill(&statements.lock_held, &[("{which}", which)]));
        }
        if !self.requests.is_empty() {
            let ids = quote_all(self.requests.iter().map(|request| &request.external_id));
            script.push(fill(&statements.read, &[("{external_ids}", &ids)]));
        }
        let sent = Moment::now();
        // It would have written nothing.
        let answers = session.ask(&script.join(";\n")).map_err(Error::not_sent)?;
        let mut answers = answers.into_iter().skip(BEGIN);
        let mut plan = Plan::new(statements, answer(answers.next())?)?;
        if self.release.is_some() {
            plan.release(requests(answer(answers.next())?)?);
        }
        if !self.requests.is_empty() {
            let found = requests(answer(answers.next())?)?;
            for request in self.requests {
                let mut found = found.iter();
                let row = found.find(|row| row.external_id == request.external_id);
                let decided = plan.decide(request, row, sent);
                plan.decided.push(decided.transpose());
            }
        }
        Ok(plan)
    }

    /// The second round trip, if there is something to write.
    fn write(&self, session: &mut Session<'_>, plan: Plan<'_>) -> Result<Done> {
        let script = plan.script();
        if script.is_empty() {
            session.roll_back();
            return Ok(self.done(plan, 0, Moment::now()));
        }
        let sent = Moment::now();
        let answers = session.ask(&format!("{};\n{COMMIT}", script.join(";\n")))?;
        // The permits are the last that is inserted.
        let mut ids = answers.iter().map(|answer| answer.last_insert_id);
        let first = ids.rfind(|id| *id != 0).unwrap_or(0);
        Ok(self.done(plan, first, sent))
    }

    /// Deals the fences out, in the order in which the rows were sent.
    fn done(&self, mut plan: Plan<'_>, mut fence: u64, sent: Moment) -> Done {
        let decided = std::mem::take(&mut plan.decided);
        let mut grant = |request: &Request| {
            let permits = request.permits.iter().map(|(name, count)| {
                let permit = Permit {
                    semaphore: Arc::clone(name),
                    count: *count,
                    fence,
                };
                fence += plan.step;
                permit
            });
            Outcome::Granted(Grant {
                permits: permits.collect(),
                sent,
                remaining: request.ttl,
                free: request.free(|name| plan.semaphore(name)),
            })
        };
        let requests = self.requests.iter().zip(decided);
        Done {
            acquired: requests
                .map(|(request, decided)| decided.unwrap_or_else(|| Ok(grant(request))))
                .collect(),
            released: plan.released,
        }
    }
}

impl<'a> Plan<'a> {
    fn new(statements: &'a Statements, locked: Answer) -> Result<Plan<'a>> {
        let mut plan = Plan {
            statements,
            semaphores: HashMap::new(),
            step: 1,
            released: Vec::new(),
            decided: Vec::new(),
            take_overs: Vec::new(),
            requests: Vec::new(),
            permits: Vec::new(),
        };
        for (id, name, capacity, used, step) in rows::<(u64, String, u32, i64, u64)>(locked)? {
            plan.step = step.max(1);
            let semaphore = Semaphore {
                id,
                capacity,
                used,
                change: 0,
            };
            plan.semaphores.insert(Arc::from(name), semaphore);
        }
        Ok(plan)
    }

    /// The capacity of a semaphore, and what is held of it.
    fn semaphore(&self, name: &str) -> Option<(u32, i64)> {
        let semaphore = self.semaphores.get(name);
        semaphore.map(|semaphore| (semaphore.capacity, semaphore.used))
    }

    fn count(&mut self, name: &str, change: i64) {
        if let Some(semaphore) = self.semaphores.get_mut(name) {
            semaphore.used += change;
            semaphore.change += change;
        }
    }

    /// Releases those of which all semaphores are locked.
    fn release(&mut self, found: Vec<RequestRow>) {
        for row in found {
            let permits = &row.status.permits;
            let mut names = permits.iter().map(|permit| &permit.semaphore);
            if names.all(|name| self.semaphores.contains_key(name)) {
                for permit in permits {
                    self.count(&permit.semaphore, -i64::from(permit.count));
                }
                self.released.push(row);
            }
        }
    }

    /// Decides about a request, given the row that has its external id. `None`: it will be granted.
    fn decide(
        &mut self,
        request: &Request,
        row: Option<&RequestRow>,
        sent: Moment,
    ) -> Result<Option<Outcome>> {
        // The server counts from the moment of the statement.
        let ttl = request.ttl.map_or("NULL".to_owned(), seconds);
        let token = request.token.to_string();
        let Some(row) = row else {
            if let Some(exhausted) = request.shortage(|name| self.semaphore(name))? {
                return Ok(Some(Outcome::Exhausted(exhausted)));
            }
            for (name, count) in &request.permits {
                self.count(name, i64::from(*count));
            }
            // The id of the first one, until the permits are inserted.
            let own = self.step * self.requests.len() as u64;
            let (id, owner) = (
                quote(&request.external_id),
                quote_option(request.owner.as_deref()),
            );
            self.requests.push(format!(
                "({id}, {token}, {owner}, 'ACQUIRED', {ttl}, SYSDATE(6) + INTERVAL {ttl} SECOND, \
                 SYSDATE(6) + INTERVAL {ttl} * 1.25 SECOND)"
            ));
            self.grant(request, &format!("LAST_INSERT_ID() + {own}"));
            return Ok(None);
        };
        match request.recognise(row.token, row.status.clone())? {
            Recognised::Known(status) => Ok(Some(Outcome::Known(status))),
            Recognised::Own => Ok(Some(Outcome::Granted(Grant {
                permits: row.status.permits.clone(),
                sent,
                remaining: row.status.expires_in,
                free: request.free(|name| self.semaphore(name)),
            }))),
            Recognised::TakeOver => {
                let id = row.id.to_string();
                let values = [("{id}", &*id), ("{token}", &token), ("{ttl}", &ttl)];
                let take_over = fill(&self.statements.take_over, &values);
                self.take_overs.push(take_over);
                self.grant(request, &id);
                Ok(None)
            }
        }
    }

    /// Has permits inserted, for the request with this id.
    fn grant(&mut self, request: &Request, id: &str) {
        for (name, count) in &request.permits {
            if let Some(semaphore) = self.semaphores.get(name) {
                let row = format!("({}, {id}, {count}, 'ACQUIRED')", semaphore.id);
                self.permits.push(row);
            }
        }
    }

    /// What the second round trip writes, if anything.
    fn script(&self) -> Vec<String> {
        let statements = self.statements;
        let mut script = self.take_overs.clone();
        if !self.released.is_empty() {
            let ids = list(self.released.iter().map(|row| row.id));
            script.push(fill(&statements.release_locked, &[("{ids}", &ids)]));
        }
        for (statement, rows) in [
            (&statements.insert_requests, &self.requests),
            (&statements.insert_permits, &self.permits),
        ] {
            if !rows.is_empty() {
                script.push(fill(statement, &[("{rows}", &rows.join(", "))]));
            }
        }
        for semaphore in self.semaphores.values().filter(|it| it.change != 0) {
            let (id, change) = (semaphore.id.to_string(), semaphore.change.to_string());
            let values = [("{id}", &*id), ("{change}", &*change)];
            script.push(fill(&statements.change_counter, &values));
        }
        script
    }
}

/// A ttl as SQL.
fn seconds(ttl: Duration) -> String {
    format!("{}.{:03}", ttl.as_secs(), ttl.subsec_millis())
}
