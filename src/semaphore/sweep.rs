//! Taking back what nobody gives back.
//!
//! A sweep first looks, without locking anything, and then releases one request after the other, each
//! in a statement that checks the reason again: a renewal that came in between wins.

use std::sync::Arc;
use std::time::Duration;

use super::core::Core;
use super::release::{Freed, release_where};
use super::store::{columns, first, quote};
use crate::error::Result;

/// So many are looked for at once.
const BATCH: usize = 800;

/// What the owner of a permit is found to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Liveness {
    /// It works: its permits are left alone.
    Alive,
    /// It is gone for good: its permits are released.
    Dead,
    /// Nobody knows: its permits are left alone.
    Unknown,
}

/// Why permits were taken back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// Their ttl ran out, by the server's clock.
    Expired,
    /// Their owner is dead.
    OwnerDead,
    /// Nobody renewed them for very long.
    Stale,
}

/// A request whose permits were taken back.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Swept {
    /// Its external id.
    pub external_id: Arc<str>,
    /// Its owner.
    pub owner: Option<Arc<str>>,
    /// Why.
    pub reason: Reason,
}

impl Core {
    pub(super) fn sweep_expired(&self) -> Result<Vec<Swept>> {
        self.sweep(Reason::Expired, "r.expires_at <= NOW(6)", "expires_at")
    }

    pub(super) fn sweep_stale(&self, age: Duration) -> Result<Vec<Swept>> {
        let which = format!(
            "r.updated_at <= NOW(6) - INTERVAL {} MICROSECOND",
            micros(age)
        );
        self.sweep(Reason::Stale, &which, "updated_at")
    }

    pub(super) fn sweep_dead(
        &self,
        liveness: &mut dyn FnMut(&str) -> Liveness,
    ) -> Result<Vec<Swept>> {
        let answers = self.store.send_alone(
            "SELECT DISTINCT owner FROM permit_request \
             WHERE state = 'ACQUIRED' AND owner IS NOT NULL",
        )?;
        let mut swept = Vec::new();
        for row in first(answers)?.rows {
            let (owner,): (String,) = columns(row)?;
            // Whatever is acquired or renewed from here on is a sign of life that the answer may
            // not know of.
            let mut asked = String::new();
            for row in first(self.store.send_alone("SELECT CAST(NOW(6) AS CHAR)")?)?.rows {
                (asked,) = columns(row)?;
            }
            if liveness(&owner) != Liveness::Dead {
                continue;
            }
            let which = format!(
                "r.owner = {} AND r.updated_at <= CAST({} AS DATETIME(6))",
                quote(&owner),
                quote(&asked)
            );
            swept.extend(self.sweep(Reason::OwnerDead, &which, "updated_at")?);
        }
        Ok(swept)
    }

    /// Releases all that is held and meets the condition, oldest first.
    fn sweep(&self, reason: Reason, which: &str, order: &str) -> Result<Vec<Swept>> {
        let mut swept = Vec::new();
        loop {
            let answer = first(self.store.send_alone(&format!(
                "SELECT r.id, r.external_id, r.owner FROM permit_request r \
                 WHERE {which} AND r.state = 'ACQUIRED' ORDER BY r.{order} LIMIT {BATCH}"
            ))?)?;
            let found = answer.rows.len();
            let mut progress = false;
            for row in answer.rows {
                let (id, external_id, owner): (u64, String, Option<String>) = columns(row)?;
                let freed = release_where(&self.store, &format!("r.id = {id} AND {which}"))?;
                progress |= freed != Freed::No;
                if freed == Freed::No {
                    continue;
                }
                if let Some(held) = self.holdings.get(&external_id) {
                    self.waiting.wake(&held.names);
                    self.holdings.remove(&external_id);
                }
                swept.push(Swept {
                    external_id: Arc::from(external_id),
                    owner: owner.map(Arc::from),
                    reason,
                });
            }
            // A batch in which everything was renewed or released by others is no reason to go on.
            if found < BATCH || !progress {
                return Ok(swept);
            }
        }
    }
}

pub(super) fn micros(age: Duration) -> u64 {
    // Far enough in the past to match nothing, and near enough for the server's arithmetic.
    u64::try_from(age.as_micros())
        .unwrap_or(u64::MAX)
        .min(1_000 * 366 * 24 * 3_600 * 1_000_000)
}
