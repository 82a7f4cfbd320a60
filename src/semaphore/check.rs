//! Comparing the counters with the permits they count, and mending them.
//!
//! A counter changes in the transaction that changes the permits, so no crash of a client or a server
//! can part them. What can is somebody who writes to the tables by hand, or a bug.

use std::sync::Arc;

use super::catalogue::locked;
use super::store::{Store, columns, fill, first};
use crate::error::{ErrorKind, Result};

const CHECK: &str = include_str!("../../sql/semaphore-check.sql");

/// A counter that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Discrepancy {
    /// The semaphore.
    pub semaphore: Arc<str>,
    /// What its counter says.
    pub counter: i64,
    /// What its permits add up to.
    pub permits: i64,
}

/// The counters that are wrong now.
pub(super) fn check(store: &Store) -> Result<Vec<Discrepancy>> {
    let answer = first(store.send_alone(&fill(CHECK, &[]))?)?;
    answer
        .rows
        .into_iter()
        .map(|row| {
            let (_, name, counter, permits): (u64, String, i64, i64) = columns(row)?;
            Ok(Discrepancy {
                semaphore: Arc::from(name),
                counter,
                permits,
            })
        })
        .collect()
}

/// Sets wrong counters right; which they were.
pub(super) fn repair(store: &Store) -> Result<Vec<Discrepancy>> {
    let mut mended = Vec::new();
    for wrong in check(store)? {
        let outcome = store.transaction(|send| {
            let (id, _, counter) = locked(send, &wrong.semaphore)?;
            // Counted anew under the lock: permits come and go while nobody holds it.
            let answer = first(send(&format!(
                "SELECT COALESCE(SUM(count), 0) FROM permit \
                 WHERE semaphore_id = {id} AND state = 'ACQUIRED'"
            ))?)?;
            let mut permits = 0;
            for row in answer.rows {
                permits = columns::<(i64,)>(row)?.0;
            }
            if counter != permits {
                send(&format!(
                    "UPDATE semaphore SET used = {permits} WHERE id = {id}"
                ))?;
            }
            Ok((counter, permits))
        });
        match outcome {
            Ok((counter, permits)) if counter != permits => {
                log::warn!(
                    "the counter of the semaphore {:?} said {counter}, its permits add up to {permits}: \
                     mended",
                    wrong.semaphore
                );
                mended.push(Discrepancy {
                    counter,
                    permits,
                    ..wrong
                });
            }
            Ok(_) => {}
            // Deleted meanwhile.
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(mended)
}
