//! One transaction for any number of releases and acquires on the same semaphores.
//!
//! Two round trips. The first locks the semaphores and reads what must be known; the second writes and
//! commits. In between, the decision is made here, with the rows locked: releases first, then each
//! acquire in its turn, so that one that finds too little leaves room for the next.
//!
//! The semaphores are locked before any request is looked at. So whoever comes back after a lost reply
//! waits here until its own ghost has committed or is gone, and then sees which.

use std::collections::HashMap;
use std::sync::Arc;

use super::answer::{Exhausted, Permit};
use super::catalogue::no_such;
use super::record::Record;
use super::request::Wish;
use super::store::{Answer, Store, columns, explain, fill, list, quote, quote_all, quote_option};
use crate::backend::mysql::fault::Fault;
use crate::backend::mysql::link::Link;
use crate::error::Error;

const LOCK: &str = include_str!("../../sql/semaphore-lock.sql");
const FREE: &str = include_str!("../../sql/permit-request-free.sql");
const GATE: &str = include_str!("../../sql/permit-release-gate.sql");
const RELEASE: &str = include_str!("../../sql/permit-release-many.sql");
const INSERT_REQUESTS: &str = include_str!("../../sql/permit-request-insert.sql");
const INSERT_PERMITS: &str = include_str!("../../sql/permit-insert.sql");
const COUNT: &str = include_str!("../../sql/semaphore-count.sql");

/// A request that this process acquired: what a release needs to know, which never changes.
#[derive(Clone, Debug)]
pub(super) struct Held {
    pub(super) request_id: u64,
    /// Sorted.
    pub(super) names: Vec<Arc<str>>,
    /// Semaphore ids and counts.
    pub(super) counts: Vec<(u64, u32)>,
}

/// What the transaction did about one acquire.
#[derive(Clone, Debug)]
pub(super) enum Decision {
    /// Committed.
    Granted { permits: Vec<Permit>, held: Held },
    /// The external id was there already.
    Known(Record),
    /// Not enough left.
    Exhausted(Exhausted),
    /// No such semaphore, or more than it can ever have.
    Refused(Error),
}

/// What became of all of it.
#[derive(Debug)]
pub(super) struct Outcome {
    /// Which releases changed something, in the order given.
    pub(super) released: Vec<bool>,
    pub(super) decisions: Vec<Decision>,
}

/// The transaction did not come to its end, or nobody knows.
#[derive(Clone, Debug)]
pub(super) struct Setback {
    pub(super) error: Error,
    /// It may have been committed, or may yet be.
    pub(super) unknown: bool,
    /// Another transaction took one of the external ids.
    pub(super) duplicate: bool,
    /// Another transaction holds what we need; perhaps it is about to take one of the external ids.
    pub(super) blocked: bool,
}

impl Setback {
    pub(super) fn known(error: Error) -> Setback {
        Setback {
            error,
            unknown: false,
            duplicate: false,
            blocked: false,
        }
    }

    pub(super) fn of(fault: Fault, writing: bool) -> Setback {
        Setback {
            unknown: writing && fault.is_outcome_unknown(),
            duplicate: fault.is_duplicate(),
            blocked: fault.is_lock_wait(),
            error: explain(fault),
        }
    }

    /// Whether another try may do better.
    pub(super) fn is_worth_a_retry(&self) -> bool {
        self.duplicate || self.error.is_transient()
    }
}

struct Semaphore {
    id: u64,
    capacity: u32,
    used: i64,
}

/// Carries the jobs out in one transaction; their semaphores are among `names`, which are sorted.
pub(super) fn run(
    store: &Store,
    link: &mut Link,
    names: &[Arc<str>],
    releases: &[Arc<Held>],
    wishes: &[Arc<Wish>],
) -> Result<Outcome, Setback> {
    let outcome = begin(store, link, names, releases, wishes)
        .and_then(|plan| plan.finish(store, link, wishes));
    if outcome.is_err() {
        // A lock wait timeout and a duplicate key leave the transaction open.
        store.roll_back(link);
    }
    outcome
}

/// The first round trip, and what it leads to.
fn begin(
    store: &Store,
    link: &mut Link,
    names: &[Arc<str>],
    releases: &[Arc<Held>],
    wishes: &[Arc<Wish>],
) -> Result<Plan, Setback> {
    let mut script = format!("BEGIN;\n{}", fill(LOCK, &[("{names}", &quote_all(names))]));
    if !releases.is_empty() {
        let ids = list(releases.iter().map(|held| held.request_id));
        script = format!("{script};\n{}", fill(GATE, &[("{ids}", &ids)]));
    }
    if !wishes.is_empty() {
        let ids = || wishes.iter().map(|wish| &wish.external_id);
        let free = fill(FREE, &[("{external_ids}", &quote_all(ids()))]);
        script = format!("{script};\n{free};\n{}", Record::statement(ids()));
    }
    let answers = store
        .send(link, &script)
        .map_err(|fault| Setback::of(fault, false))?;
    let mut answers = answers.into_iter().skip(1);
    let mut plan = Plan::new(answers.next()).map_err(Setback::known)?;
    if !releases.is_empty() {
        plan.release(releases, answers.next())
            .map_err(Setback::known)?;
    }
    if !wishes.is_empty() {
        plan.acquire(wishes, answers.nth(1))
            .map_err(Setback::known)?;
    }
    Ok(plan)
}

/// What is to be written.
struct Plan {
    semaphores: HashMap<Arc<str>, Semaphore>,
    /// Between the ids of one INSERT.
    step: u64,
    changes: HashMap<u64, i64>,
    released: Vec<bool>,
    to_release: Vec<u64>,
    decisions: Vec<Option<Decision>>,
}

impl Plan {
    fn new(locked: Option<Answer>) -> Result<Plan, Error> {
        let mut plan = Plan {
            semaphores: HashMap::new(),
            step: 1,
            changes: HashMap::new(),
            released: Vec::new(),
            to_release: Vec::new(),
            decisions: Vec::new(),
        };
        for row in locked.into_iter().flat_map(|answer| answer.rows) {
            let (id, name, capacity, used, step): (u64, String, u32, i64, u64) = columns(row)?;
            plan.step = step.max(1);
            let semaphore = Semaphore { id, capacity, used };
            plan.semaphores.insert(Arc::from(name), semaphore);
        }
        Ok(plan)
    }

    fn release(&mut self, releases: &[Arc<Held>], gate: Option<Answer>) -> Result<(), Error> {
        for row in gate.into_iter().flat_map(|answer| answer.rows) {
            self.to_release.push(columns::<(u64,)>(row)?.0);
        }
        for held in releases {
            let passed = self.to_release.contains(&held.request_id);
            self.released.push(passed);
            if !passed {
                continue;
            }
            for (id, count) in &held.counts {
                *self.changes.entry(*id).or_default() -= i64::from(*count);
                let semaphore = self.semaphores.values_mut().find(|other| other.id == *id);
                if let Some(semaphore) = semaphore {
                    semaphore.used -= i64::from(*count);
                }
            }
        }
        Ok(())
    }

    fn acquire(&mut self, wishes: &[Arc<Wish>], known: Option<Answer>) -> Result<(), Error> {
        let records = known.map(Record::parse).transpose()?.unwrap_or_default();
        for wish in wishes {
            let record = records
                .iter()
                .find(|record| record.external_id == wish.external_id);
            let decision = match record {
                Some(record) => Some(Decision::Known(record.clone())),
                None => self.decide(wish),
            };
            self.decisions.push(decision);
        }
        Ok(())
    }

    /// Takes what the wish wants, if all of it is there: `None` is a yes.
    fn decide(&mut self, wish: &Wish) -> Option<Decision> {
        for (name, count) in &wish.permits {
            let Some(semaphore) = self.semaphores.get(name) else {
                return Some(Decision::Refused(no_such(name)));
            };
            if *count > semaphore.capacity {
                return Some(Decision::Refused(Error::invalid(format!(
                    "request {:?} wants {count} permits of the semaphore {name:?}, whose capacity is {}",
                    wish.external_id, semaphore.capacity
                ))));
            }
            if semaphore.used.saturating_add(i64::from(*count)) > i64::from(semaphore.capacity) {
                return Some(Decision::Exhausted(Exhausted {
                    semaphore: Arc::clone(name),
                    capacity: semaphore.capacity,
                    held: u64::try_from(semaphore.used).unwrap_or(0),
                    wanted: *count,
                }));
            }
        }
        for (name, count) in &wish.permits {
            if let Some(semaphore) = self.semaphores.get_mut(name) {
                semaphore.used += i64::from(*count);
                *self.changes.entry(semaphore.id).or_default() += i64::from(*count);
            }
        }
        None
    }

    /// The second round trip.
    fn finish(
        self,
        store: &Store,
        link: &mut Link,
        wishes: &[Arc<Wish>],
    ) -> Result<Outcome, Setback> {
        let granted: Vec<&Wish> = wishes
            .iter()
            .zip(&self.decisions)
            .filter(|(_, decision)| decision.is_none())
            .map(|(wish, _)| &**wish)
            .collect();
        if granted.is_empty() && self.to_release.is_empty() {
            store.roll_back(link);
            return Ok(self.outcome(wishes, 0, 0));
        }
        let script = self.script(&granted);
        let answers = store
            .send(link, &script)
            .map_err(|fault| Setback::of(fault, true))?;
        let mut ids = answers
            .iter()
            .map(|answer| answer.last_insert_id)
            .filter(|id| *id != 0);
        let (request, permit) = (ids.next().unwrap_or(0), ids.next().unwrap_or(0));
        Ok(self.outcome(wishes, request, permit))
    }

    fn script(&self, granted: &[&Wish]) -> String {
        let mut script = Vec::new();
        if !self.to_release.is_empty() {
            let ids = list(self.to_release.iter().copied());
            script.push(fill(RELEASE, &[("{ids}", &ids)]));
        }
        if !granted.is_empty() {
            let requests: Vec<String> = granted.iter().map(|wish| request_row(wish)).collect();
            script.push(fill(INSERT_REQUESTS, &[("{rows}", &requests.join(", "))]));
            let mut permits = Vec::new();
            for (offset, wish) in (0..).step_by(to_usize(self.step)).zip(granted) {
                for (name, count) in &wish.permits {
                    if let Some(semaphore) = self.semaphores.get(name) {
                        let id = semaphore.id;
                        permits.push(format!(
                            "({id}, LAST_INSERT_ID() + {offset}, {count}, 'ACQUIRED')"
                        ));
                    }
                }
            }
            script.push(fill(INSERT_PERMITS, &[("{rows}", &permits.join(", "))]));
        }
        let changes: Vec<(u64, i64)> = self
            .changes
            .iter()
            .filter(|(_, change)| **change != 0)
            .map(|(id, change)| (*id, *change))
            .collect();
        if !changes.is_empty() {
            let cases: Vec<String> = changes
                .iter()
                .map(|(id, change)| format!("WHEN {id} THEN {change}"))
                .collect();
            let ids = list(changes.iter().map(|(id, _)| *id));
            script.push(fill(
                COUNT,
                &[("{changes}", &cases.join(" ")), ("{ids}", &ids)],
            ));
        }
        script.push("COMMIT".to_owned());
        script.join(";\n")
    }

    /// Deals the ids out, in the order in which the rows were sent.
    fn outcome(self, wishes: &[Arc<Wish>], mut request_id: u64, mut fence: u64) -> Outcome {
        let mut decisions = Vec::with_capacity(wishes.len());
        for (wish, decision) in wishes.iter().zip(self.decisions) {
            if let Some(decision) = decision {
                decisions.push(decision);
                continue;
            }
            let mut held = Held {
                request_id,
                names: wish.names(),
                counts: Vec::with_capacity(wish.permits.len()),
            };
            let mut permits = Vec::with_capacity(wish.permits.len());
            for (name, count) in &wish.permits {
                permits.push(Permit {
                    semaphore: Arc::clone(name),
                    count: *count,
                    fence,
                });
                fence += self.step;
                if let Some(semaphore) = self.semaphores.get(name) {
                    held.counts.push((semaphore.id, *count));
                }
            }
            request_id += self.step;
            decisions.push(Decision::Granted { permits, held });
        }
        Outcome {
            released: self.released,
            decisions,
        }
    }
}

fn request_row(wish: &Wish) -> String {
    let (ttl, expires_at) = match wish.ttl {
        None => ("NULL".to_owned(), "NULL".to_owned()),
        Some(ttl) => {
            let seconds = format!("{}.{:03}", ttl.as_secs(), ttl.subsec_millis());
            let expires_at = format!("NOW(6) + INTERVAL {seconds} SECOND");
            (seconds, expires_at)
        }
    };
    format!(
        "({}, {}, 'ACQUIRED', {ttl}, {expires_at})",
        quote(&wish.external_id),
        quote_option(wish.owner.as_deref()),
    )
}

fn to_usize(step: u64) -> usize {
    usize::try_from(step).unwrap_or(1).max(1)
}
