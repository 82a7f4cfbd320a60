//! The semaphores themselves: their names, their capacities, and how full they are.

use std::sync::Arc;

use super::answer::{CapacityChange, Usage};
use super::request::MAX_TEXT;
use super::store::{Answer, Store, columns, explain, fill, first, quote, quote_option};
use crate::error::{Error, ErrorKind, Result};
use crate::name::check_text;

const USAGE: &str = include_str!("../../sql/semaphore-usage.sql");

/// Makes the semaphore; `false` where it is there already, whatever its capacity.
pub(super) fn create(store: &Store, name: &str, capacity: u32) -> Result<bool> {
    check_name(name)?;
    check_capacity(capacity)?;
    let statement = format!(
        "INSERT INTO semaphore (name, capacity) VALUES ({}, {capacity})",
        quote(name)
    );
    let mut link = store.checkout()?;
    match store.send(&mut link, &statement) {
        Ok(_) => Ok(true),
        Err(fault) if fault.is_duplicate() => Ok(false),
        Err(fault) => Err(explain(fault)),
    }
}

/// Sets the capacity and writes the change down; the capacity before.
pub(super) fn set_capacity(
    store: &Store,
    name: &str,
    capacity: u32,
    changed_by: Option<&str>,
) -> Result<u32> {
    check_name(name)?;
    check_capacity(capacity)?;
    if let Some(changed_by) = changed_by {
        check_text("changed_by", changed_by, MAX_TEXT)?;
    }
    store.transaction(|send| {
        let (id, old, _) = locked(send, name)?;
        if old != capacity {
            send(&format!(
                "UPDATE semaphore SET capacity = {capacity}, updated_at = NOW(6) WHERE id = {id};\
                 INSERT INTO semaphore_capacity_change \
                 (semaphore_id, semaphore_name, changed_by, old_capacity, new_capacity) \
                 VALUES ({id}, {}, {}, {old}, {capacity})",
                quote(name),
                quote_option(changed_by)
            ))?;
        }
        Ok(old)
    })
}

/// Deletes a semaphore that nobody holds; `false` where there is none.
pub(super) fn delete(store: &Store, name: &str) -> Result<bool> {
    check_name(name)?;
    store.transaction(|send| {
        let (id, capacity, used) = match locked(send, name) {
            Ok(found) => found,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
            Err(error) => return Err(error),
        };
        // Not the counter alone: this is the one decision that no repair could mend.
        let held = first(send(&format!(
            "SELECT 1 FROM permit WHERE semaphore_id = {id} AND state = 'ACQUIRED' LIMIT 1"
        ))?)?;
        if used != 0 || !held.rows.is_empty() {
            return Err(Error::new(
                ErrorKind::InvalidState,
                format!(
                    "the semaphore {name:?} is in use: {used} of {capacity} permits are held; set its \
                     capacity to 0 and delete it when they are released"
                ),
            ));
        }
        send(&format!("DELETE FROM semaphore WHERE id = {id}"))?;
        Ok(true)
    })
}

/// All of them, by name; or one.
pub(super) fn usage(store: &Store, name: Option<&str>) -> Result<Vec<Usage>> {
    let which = match name {
        Some(name) => {
            check_name(name)?;
            format!("s.name = {}", quote(name))
        }
        None => "TRUE".to_owned(),
    };
    let answer = first(store.send_alone(&fill(USAGE, &[("{which}", &which)]))?)?;
    answer
        .rows
        .into_iter()
        .map(|row| {
            let (name, capacity, held, requests): (String, u32, i64, u64) = columns(row)?;
            let held = u64::try_from(held).unwrap_or(0);
            Ok(Usage {
                semaphore: Arc::from(name),
                capacity,
                held,
                free: u64::from(capacity).saturating_sub(held),
                requests,
            })
        })
        .collect()
}

/// The changes of a capacity, oldest first.
pub(super) fn history(store: &Store, name: &str) -> Result<Vec<CapacityChange>> {
    check_name(name)?;
    let answer = first(store.send_alone(&format!(
        "SELECT semaphore_name, changed_by, CAST(UNIX_TIMESTAMP(changed_at) * 1000 AS UNSIGNED), \
         old_capacity, new_capacity FROM semaphore_capacity_change WHERE semaphore_name = {} ORDER BY id",
        quote(name)
    ))?)?;
    answer
        .rows
        .into_iter()
        .map(|row| {
            let (name, by, changed_at, from, to): (String, Option<String>, u64, u32, u32) =
                columns(row)?;
            Ok(CapacityChange {
                semaphore: Arc::from(name),
                changed_by: by.map(Arc::from),
                changed_at,
                from,
                to,
            })
        })
        .collect()
}

/// The error of who asks for a semaphore that is not there.
pub(super) fn no_such(name: &str) -> Error {
    Error::new(
        ErrorKind::NotFound,
        format!("there is no semaphore {name:?}"),
    )
}

/// Locks a semaphore: its id, capacity and counter.
pub(super) fn locked(
    send: &mut dyn FnMut(&str) -> Result<Vec<Answer>>,
    name: &str,
) -> Result<(u64, u32, i64)> {
    let answer = first(send(&format!(
        "SELECT id, capacity, used FROM semaphore WHERE name = {} FOR UPDATE",
        quote(name)
    ))?)?;
    let row = answer.rows.into_iter().next();
    columns(row.ok_or_else(|| no_such(name))?)
}

fn check_name(name: &str) -> Result<()> {
    check_text("semaphore name", name, MAX_TEXT)
}

fn check_capacity(capacity: u32) -> Result<()> {
    if i32::try_from(capacity).is_ok() {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "a capacity of {capacity} is too much; at most {} is possible",
        i32::MAX
    )))
}
