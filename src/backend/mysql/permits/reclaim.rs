//! Taking back what was not given back.
//!
//! A sweep first looks, without locking anything, and then releases in transactions that lock the
//! semaphores in order and check the reason again: a renewal that came in between wins, and a request
//! that is locked by another transaction is left for the next time.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::MysqlPermits;
use super::sql::{COMMIT, answer, fill, list, micros, quote, quote_all, rows};
use super::transaction::count;
use crate::backend::permit_store::{Permit, Reason, Request, Sweep, Swept};
use crate::clock::Moment;
use crate::error::Result;
use crate::pool::Lane;

/// So many are looked for at once.
const LOOK: usize = 800;

/// So many are released in one transaction.
const BATCH: usize = 100;

const EXPIRED: &str = "r.reclaim_at <= SYSDATE(6)";

impl MysqlPermits {
    /// Takes back what has expired among the holders of these semaphores, all of it. Returns `true` if that was
    /// something.
    pub(super) fn reclaim(&self, request: &Request, by: Moment) -> Result<bool> {
        let names = quote_all(request.permits.iter().map(|(name, _)| name));
        let limit = LOOK.to_string();
        let look = fill(
            &self.statements.expired,
            &[("{names}", &names), ("{limit}", &limit)],
        );
        let mut swept = Vec::new();
        let outcome = self.release_all(&look, EXPIRED, Reason::Expired, by, &mut swept);
        swept.iter().for_each(Swept::log);
        match outcome {
            Err(error) if swept.is_empty() => Err(error),
            _ => Ok(!swept.is_empty()),
        }
    }

    pub(super) fn sweep_all(&self, sweep: &Sweep, by: Moment) -> Result<Vec<Swept>> {
        let (reason, which, order) = match sweep {
            Sweep::Expired => (Reason::Expired, EXPIRED.to_owned(), "reclaim_at"),
            Sweep::Stale(age) => (
                Reason::Stale,
                format!(
                    "r.updated_at <= SYSDATE(6) - INTERVAL {} MICROSECOND \
                     AND (r.reclaim_at IS NULL OR {EXPIRED})",
                    micros(*age)
                ),
                "updated_at",
            ),
            Sweep::Owner(owner, before) => (
                Reason::OwnerDead,
                format!(
                    "r.owner = {} AND r.updated_at <= \
                     CAST('1970-01-01' AS DATETIME(6)) + INTERVAL {before} MICROSECOND",
                    quote(owner)
                ),
                "updated_at",
            ),
        };
        let look = self.statements.tables(&format!(
            "SELECT r.id FROM {{request}} r WHERE {which} AND r.state = 'ACQUIRED' \
             ORDER BY r.{order} LIMIT {LOOK}"
        ));
        // With SYSDATE no index would be used for a range; the release asks again, with SYSDATE.
        let look = look.replace("SYSDATE", "NOW");
        let mut swept = Vec::new();
        match self.release_all(&look, &which, reason, by, &mut swept) {
            // Guards, and requests that wait, must hear of what was released.
            Err(error) if !swept.is_empty() => log::warn!(
                target: "contend::semaphore",
                "a sweep ended after {} requests, the rest is for the next time: {error}",
                swept.len()
            ),
            outcome => outcome?,
        }
        Ok(swept)
    }

    /// Releases what `look` finds, in transactions of a batch each, into `swept`.
    fn release_all(
        &self,
        look: &str,
        which: &str,
        reason: Reason,
        by: Moment,
        swept: &mut Vec<Swept>,
    ) -> Result<()> {
        loop {
            let found = rows::<(u64,)>(self.one(look, by)?)?;
            let ids: Vec<u64> = found.into_iter().map(|(id,)| id).collect();
            let before = swept.len();
            for ids in ids.chunks(BATCH) {
                swept.extend(self.release_many(ids, which, reason, by)?);
            }
            // A batch in which everything was renewed, or is locked, is no reason to go on.
            if ids.len() < LOOK || swept.len() == before {
                return Ok(());
            }
        }
    }

    /// Releases those of these requests of which `which` is still true, in one transaction.
    fn release_many(
        &self,
        ids: &[u64],
        which: &str,
        reason: Reason,
        by: Moment,
    ) -> Result<Vec<Swept>> {
        let ids = list(ids.iter().copied());
        let look = fill(&self.statements.semaphores, &[("{ids}", &ids)]);
        let names = rows::<(String,)>(self.one(&look, by)?)?;
        let mut connection = self.rows.pool.checkout(Lane::Other, by)?;
        let mut script = vec![self.statements.begin.clone()];
        let mut place = 3;
        if !names.is_empty() {
            let names = quote_all(names.iter().map(|(name,)| name));
            script.push(fill(&self.statements.lock, &[("{names}", &names)]));
            place += 1;
        }
        let requests = format!("r.id IN ({ids})");
        script.push(fill(
            &self.statements.release_lock,
            &[("{requests}", &requests), ("{which}", which)],
        ));
        let outcome = self
            .send(&mut connection, &script.join(";\n"))
            .and_then(|mut answers| {
                let locked =
                    rows::<(u64, u64, String, Option<String>)>(answer(&mut answers, place)?)?;
                let permits = answer(&mut answers, place + 1)?;
                let permits = rows::<(String, u64, u64, String, u32)>(permits)?;
                if locked.is_empty() {
                    self.roll_back(&mut connection);
                    return Ok(Vec::new());
                }
                let mut changes: BTreeMap<u64, i64> = BTreeMap::new();
                let mut swept = Vec::new();
                for (_, _, external_id, owner) in &locked {
                    let mut released = Vec::new();
                    for (request, fence, semaphore, name, count) in &permits {
                        if request == external_id {
                            *changes.entry(*semaphore).or_default() -= i64::from(*count);
                            released.push(Permit {
                                semaphore: Arc::from(name.as_str()),
                                count: *count,
                                fence: *fence,
                            });
                        }
                    }
                    swept.push(Swept {
                        external_id: Arc::from(external_id.as_str()),
                        owner: owner.as_deref().map(Arc::from),
                        permits: released,
                        reason,
                    });
                }
                let ids = list(locked.iter().map(|(id, ..)| *id));
                let mut script = vec![fill(&self.statements.release_locked, &[("{ids}", &ids)])];
                script.extend(count(&self.statements, changes.into_iter()));
                script.push(COMMIT.to_owned());
                self.send(&mut connection, &script.join(";\n"))?;
                Ok(swept)
            });
        if outcome.is_err() {
            self.roll_back(&mut connection);
        }
        match outcome {
            // A semaphore is locked, or two met in a deadlock: what is left is for the next time.
            Err(error) if error.kind() == crate::error::ErrorKind::Unavailable => {
                log::debug!("could not take permits back now: {error}");
                Ok(Vec::new())
            }
            outcome => outcome,
        }
    }
}
