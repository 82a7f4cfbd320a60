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

use super::session::Session;
use super::sql::{
    Answer, BEGIN, COMMIT, RequestRow, answer, fill, list, quote, quote_all, quote_option,
    requests, rows,
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

/// What will be written about a request.
enum Plan {
    Insert,
    /// Its row has this id.
    TakeOver(u64),
    /// Nothing.
    Decided(Result<Outcome>),
}

struct Semaphore {
    id: u64,
    capacity: u32,
    used: i64,
    /// How much of `used` this transaction adds.
    change: i64,
}

/// What the first round trip showed, and what the second will write.
struct Locked {
    semaphores: HashMap<Arc<str>, Semaphore>,
    /// Between the ids of one INSERT.
    step: u64,
    released: Vec<RequestRow>,
    plans: Vec<Plan>,
}

impl Transaction<'_> {
    /// Carries it out.
    ///
    /// # Errors
    /// All of it failed; the outcome is unknown only if the second message was sent.
    pub(super) fn run(&self, session: &mut Session<'_>) -> Result<Done> {
        let outcome = self
            .read(session)
            .and_then(|locked| self.write(session, locked));
        session.or_roll_back(outcome)
    }

    /// The first round trip, and what it leads to.
    fn read(&self, session: &mut Session<'_>) -> Result<Locked> {
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
        let mut answers = session.ask(&script.join(";\n")).map_err(Error::not_sent)?;
        let mut locked = Locked::new(answer(&mut answers, BEGIN)?)?;
        let mut next = BEGIN + 1;
        if self.release.is_some() {
            locked.release(requests(answer(&mut answers, next)?)?);
            next += 1;
        }
        if !self.requests.is_empty() {
            let found = requests(answer(&mut answers, next)?)?;
            for request in self.requests {
                let row = found
                    .iter()
                    .find(|row| row.external_id == request.external_id);
                let plan = match row {
                    Some(row) => locked.recognise(request, row, sent),
                    None => locked.take(request),
                };
                locked
                    .plans
                    .push(plan.unwrap_or_else(|error| Plan::Decided(Err(error))));
            }
        }
        Ok(locked)
    }

    /// The second round trip, if there is something to write.
    fn write(&self, session: &mut Session<'_>, locked: Locked) -> Result<Done> {
        let script = self.script(session, &locked);
        if script.is_empty() {
            session.roll_back();
            return Ok(self.done(locked, 0, Moment::now()));
        }
        let sent = Moment::now();
        let answers = session.ask(&format!("{};\n{COMMIT}", script.join(";\n")))?;
        // The permits are the last that is inserted.
        let mut ids = answers.iter().map(|answer| answer.last_insert_id);
        let first = ids.rfind(|id| *id != 0).unwrap_or(0);
        Ok(self.done(locked, first, sent))
    }

    fn script(&self, session: &Session<'_>, locked: &Locked) -> Vec<String> {
        let statements = &session.store.statements;
        let mut script = Vec::new();
        if !locked.released.is_empty() {
            let ids = list(locked.released.iter().map(|row| row.id));
            script.push(fill(&statements.release_locked, &[("{ids}", &ids)]));
        }
        let (mut inserts, mut permits) = (Vec::new(), Vec::new());
        for (request, plan) in self.requests.iter().zip(&locked.plans) {
            let (ttl, expires_at, reclaim_at) = times(request.ttl);
            let request_id = match plan {
                Plan::Decided(_) => continue,
                Plan::Insert => {
                    let (id, token) = (quote(&request.external_id), request.token);
                    let owner = quote_option(request.owner.as_deref());
                    // The id of the first one, until the permits are inserted.
                    let own = locked.step * inserts.len() as u64;
                    inserts.push(format!(
                        "({id}, {token}, {owner}, 'ACQUIRED', {ttl}, {expires_at}, {reclaim_at})"
                    ));
                    format!("LAST_INSERT_ID() + {own}")
                }
                Plan::TakeOver(id) => {
                    let (id, token) = (id.to_string(), request.token.to_string());
                    script.push(fill(
                        &statements.take_over,
                        &[
                            ("{id}", &id),
                            ("{token}", &token),
                            ("{ttl}", &ttl),
                            ("{expires_at}", &expires_at),
                            ("{reclaim_at}", &reclaim_at),
                        ],
                    ));
                    id
                }
            };
            for (name, count) in &request.permits {
                if let Some(semaphore) = locked.semaphores.get(name) {
                    let id = semaphore.id;
                    permits.push(format!("({id}, {request_id}, {count}, 'ACQUIRED')"));
                }
            }
        }
        for (statement, rows) in [
            (&statements.insert_requests, inserts),
            (&statements.insert_permits, permits),
        ] {
            if !rows.is_empty() {
                script.push(fill(statement, &[("{rows}", &rows.join(", "))]));
            }
        }
        let semaphores = locked.semaphores.values();
        let changed: Vec<&Semaphore> = semaphores.filter(|it| it.change != 0).collect();
        if !changed.is_empty() {
            let cases = changed
                .iter()
                .map(|it| format!("WHEN {} THEN {}", it.id, it.change));
            let cases: Vec<String> = cases.collect();
            let ids = list(changed.iter().map(|it| it.id));
            let values = [("{changes}", &*cases.join(" ")), ("{ids}", &*ids)];
            script.push(fill(&statements.change_counters, &values));
        }
        script
    }

    /// Deals the fences out, in the order in which the rows were sent.
    fn done(&self, mut locked: Locked, mut fence: u64, sent: Moment) -> Done {
        let mut acquired = Vec::with_capacity(self.requests.len());
        let plans = std::mem::take(&mut locked.plans);
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
                fence += locked.step;
            }
            acquired.push(Ok(Outcome::Granted(Grant {
                permits,
                sent,
                remaining: request.ttl,
                free: request.free(|name| locked.semaphore(name)),
            })));
        }
        Done {
            released: locked.released,
            acquired,
        }
    }
}

impl Locked {
    fn new(answer: Answer) -> Result<Locked> {
        let mut locked = Locked {
            semaphores: HashMap::new(),
            step: 1,
            released: Vec::new(),
            plans: Vec::new(),
        };
        for (id, name, capacity, used, step) in rows::<(u64, String, u32, i64, u64)>(answer)? {
            locked.step = step.max(1);
            let semaphore = Semaphore {
                id,
                capacity,
                used,
                change: 0,
            };
            locked.semaphores.insert(Arc::from(name), semaphore);
        }
        Ok(locked)
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
            if permits
                .iter()
                .all(|it| self.semaphores.contains_key(&it.semaphore))
            {
                for permit in permits {
                    self.count(&permit.semaphore, -i64::from(permit.count));
                }
                self.released.push(row);
            }
        }
    }

    /// The external id is there already.
    fn recognise(&self, request: &Request, row: &RequestRow, sent: Moment) -> Result<Plan> {
        Ok(match request.recognise(row.token, row.status.clone())? {
            Recognised::Known(status) => Plan::Decided(Ok(Outcome::Known(status))),
            Recognised::TakeOver => Plan::TakeOver(row.id),
            Recognised::Own => Plan::Decided(Ok(Outcome::Granted(Grant {
                permits: row.status.permits.clone(),
                sent,
                remaining: row.status.expires_in,
                free: request.free(|name| self.semaphore(name)),
            }))),
        })
    }

    /// Takes what the request wants, if all of it is there.
    fn take(&mut self, request: &Request) -> Result<Plan> {
        if let Some(exhausted) = request.shortage(|name| self.semaphore(name))? {
            return Ok(Plan::Decided(Ok(Outcome::Exhausted(exhausted))));
        }
        for (name, count) in &request.permits {
            self.count(name, i64::from(*count));
        }
        Ok(Plan::Insert)
    }
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
