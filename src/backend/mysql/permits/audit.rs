//! Comparing the counters with the permits that they count.
//!
//! A counter changes in the transaction that changes the permits, so a crash leaves both or neither. This
//! finds what was done to the tables by hand.

use std::sync::Arc;

use super::MysqlPermits;
use super::sql::{answer, rows};
use crate::backend::permit_store::Discrepancy;
use crate::clock::Moment;
use crate::error::{ErrorKind, Result};

impl MysqlPermits {
    /// The counters that are wrong now.
    pub(super) fn wrong_counters(&self, by: Moment) -> Result<Vec<Discrepancy>> {
        let found = rows::<(String, i64, i64)>(self.one(&self.statements.check, by)?)?;
        let wrong = |(name, counter, permits): (String, i64, i64)| Discrepancy {
            semaphore: Arc::from(name),
            counter,
            permits,
        };
        Ok(found.into_iter().map(wrong).collect())
    }

    /// Corrects the counters that are wrong; which they were.
    pub(super) fn correct_counters(&self, by: Moment) -> Result<Vec<Discrepancy>> {
        let mut corrected = Vec::new();
        for wrong in self.wrong_counters(by)? {
            let name = &wrong.semaphore;
            let outcome = self.with_locked(name, by, |id, _, counter, connection| {
                // Counted anew under the lock: permits come and go while nobody holds it.
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
