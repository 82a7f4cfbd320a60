//! Deleting what nobody will ask for any more, in batches that lock little and not for long.

use std::time::Duration;

use super::store::{Store, columns, first, list};
use super::sweep::micros;
use crate::error::Result;

/// Deletes requests that were released longer ago than `age`, and their permits; how many requests.
///
/// With its request an external id is forgotten: whoever comes back with it later asks for the first time.
pub(super) fn old_requests(
    store: &Store,
    age: Duration,
    batch: usize,
    go_on: &mut dyn FnMut() -> bool,
) -> Result<u64> {
    let mut deleted = 0;
    while go_on() {
        let answer = first(store.send_alone(&format!(
            "SELECT id FROM permit_request WHERE state = 'RELEASED' \
             AND updated_at <= NOW(6) - INTERVAL {} MICROSECOND ORDER BY updated_at LIMIT {batch}",
            micros(age)
        ))?)?;
        let mut ids = Vec::with_capacity(answer.rows.len());
        for row in answer.rows {
            ids.push(columns::<(u64,)>(row)?.0);
        }
        if ids.is_empty() {
            break;
        }
        let (count, ids) = (ids.len(), list(ids));
        // One message: both or neither, and no time in between in which somebody waits for us.
        deleted += store.transaction(|send| {
            let answers = send(&format!(
                "DELETE FROM permit WHERE permit_request_id IN ({ids});\
                 DELETE FROM permit_request WHERE id IN ({ids}) AND state = 'RELEASED'"
            ))?;
            Ok(answers.last().map_or(0, |answer| answer.matched))
        })?;
        if count < batch {
            break;
        }
    }
    Ok(deleted)
}

/// Deletes the history of capacities beyond `age`; how many entries.
pub(super) fn old_history(
    store: &Store,
    age: Duration,
    batch: usize,
    go_on: &mut dyn FnMut() -> bool,
) -> Result<u64> {
    let mut deleted = 0;
    while go_on() {
        let answer = first(store.send_alone(&format!(
            "DELETE FROM semaphore_capacity_change \
             WHERE changed_at <= NOW(6) - INTERVAL {} MICROSECOND ORDER BY changed_at LIMIT {batch}",
            micros(age)
        ))?)?;
        deleted += answer.matched;
        if answer.matched < batch as u64 {
            break;
        }
    }
    Ok(deleted)
}
