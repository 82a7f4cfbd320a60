//! Taking back what was not given back.
//!
//! A sweep first looks, without locking anything. Then it releases in transactions that lock the semaphores in order
//! and check the reason again: a renewal that came in between wins, and a request that another transaction has locked
//! is left for the next time.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::MysqlPermits;
use super::sql::{RequestRow, fill, list, micros, quote, quote_all, rows};
use super::transaction::Transaction;
use crate::backend::permit_store::{Reason, Request, Sweep, Swept, log_swept};
use crate::clock::Moment;
use crate::error::Result;

/// So many are released in one transaction.
const BATCH: usize = 100;

const EXPIRED: &str = "r.reclaim_at <= SYSDATE(6)";

impl MysqlPermits {
    /// Takes back what has expired among the holders of these semaphores, all of it. Returns `true` if that was
    /// something.
    pub(super) fn reclaim(&self, request: &Request, by: Moment) -> Result<bool> {
        let names = quote_all(request.permits.iter().map(|(name, _)| name));
        let limit = BATCH.to_string();
        let look = [("{names}", &*names), ("{limit}", &*limit)];
        let look = fill(&self.statements.expired, &look);
        let swept = self.release_all(&look, EXPIRED, Reason::Expired, by)?;
        log_swept(swept.iter().map(|it| &it.external_id), Reason::Expired);
        Ok(!swept.is_empty())
    }

    pub(super) fn sweep_all(&self, sweep: &Sweep, by: Moment) -> Result<Vec<Swept>> {
        let (which, order) = match sweep {
            Sweep::Expired => (EXPIRED.to_owned(), "reclaim_at"),
            Sweep::Stale(age) => {
                let age = micros(*age);
                let which = format!(
                    "r.updated_at <= SYSDATE(6) - INTERVAL {age} MICROSECOND \
                     AND (r.reclaim_at IS NULL OR {EXPIRED})"
                );
                (which, "updated_at")
            }
            Sweep::Owner(owner, before) => {
                let owner = quote(owner);
                let which = format!(
                    "r.owner = {owner} AND r.updated_at <= \
                     CAST('1970-01-01' AS DATETIME(6)) + INTERVAL {before} MICROSECOND"
                );
                (which, "updated_at")
            }
        };
        let look = self.statements.tables(&format!(
            "SELECT r.id FROM {{request}} r WHERE {which} AND r.state = 'ACQUIRED' \
             ORDER BY r.{order} LIMIT {BATCH}"
        ));
        // With SYSDATE no index would be used for a range; the release asks again, with SYSDATE.
        let look = look.replace("SYSDATE", "NOW");
        self.release_all(&look, &which, sweep.reason(), by)
    }

    /// Releases what `look` finds, in transactions of a batch each.
    ///
    /// # Errors
    /// Any, if nothing was released. Otherwise what was is returned: guards and waiting requests must hear of it.
    fn release_all(
        &self,
        look: &str,
        which: &str,
        reason: Reason,
        by: Moment,
    ) -> Result<Vec<Swept>> {
        let mut swept = Vec::new();
        loop {
            let (found, released) = match self.release_batch(look, which, by) {
                Err(error) if !swept.is_empty() => {
                    log::warn!(
                        target: "contend::semaphore",
                        "a sweep ended after {} requests, the rest is for the next time: {error}",
                        swept.len()
                    );
                    return Ok(swept);
                }
                batch => batch?,
            };
            // A batch in which all was renewed, or is locked, is no reason to go on.
            let is_last = found < BATCH || released.is_empty() || by.remaining().is_zero();
            swept.extend(released.into_iter().map(|row| Swept {
                external_id: row.external_id,
                owner: row.status.owner,
                permits: row.status.permits,
                reason,
            }));
            if is_last {
                return Ok(swept);
            }
        }
    }

    /// Releases a batch. Returns how many were found, and what was released.
    fn release_batch(
        &self,
        look: &str,
        which: &str,
        by: Moment,
    ) -> Result<(usize, Vec<RequestRow>)> {
        let mut session = self.session(by)?;
        let look = fill(&self.statements.semaphores, &[("{look}", look)]);
        let found = rows::<(u64, String)>(session.ask_last(&look)?)?;
        if found.is_empty() {
            return Ok((0, Vec::new()));
        }
        let (ids, names): (BTreeSet<u64>, BTreeSet<String>) = found.into_iter().unzip();
        let names: Vec<Arc<str>> = names.into_iter().map(Arc::from).collect();
        let (count, ids) = (ids.len(), list(ids));
        let transaction = Transaction {
            names: &names,
            release: Some(format!("r.id IN ({ids}) AND {which}")),
            requests: &[],
        };
        Ok((count, transaction.run(&mut session)?.released))
    }
}
