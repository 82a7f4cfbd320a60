//! `Repository`: the operations of Simba's repository on one mutex's row, public, for callers that wait, renew
//! and retry by themselves. Nothing in the crate uses it.

use std::sync::Arc;

use super::Database;
use super::rows::{Call, NO_TOKEN, Row, Whose};
use crate::backend::{Contender, Purpose};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::lease::Lease;
use crate::name;
use crate::owner::MutexOwner;
use crate::pool::Lane;

/// Operations on single rows of the mutex table: no waiting, no renewing, no events. Each call is bounded
/// by a quarter of the ttl, and none holds a connection beyond its end. Built by
/// [`Builder::repository`](super::Builder::repository).
#[derive(Clone, Debug)]
pub struct Repository {
    database: Arc<Database>,
    lease: Lease,
}

/// A row of the mutex table: the owner that it names, if any, and its version.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MutexRow {
    /// The mutex.
    pub mutex: String,
    /// The owner that the row names, whether or not its lease has ended; `NONE` if the mutex was
    /// released.
    pub owner: MutexOwner,
    /// How often the row has changed; wraps below 2^31.
    pub version: u64,
    /// The server's clock when the row was read, in epoch milliseconds.
    pub current_db_at: u64,
}

impl Repository {
    pub(super) fn new(database: Arc<Database>, lease: Lease) -> Repository {
        Repository { database, lease }
    }

    /// Creates the table if it is missing: applies `sql/init-mutex.sql`.
    ///
    /// # Errors
    /// `Denied` without the privilege to create tables, and the errors of every request.
    pub fn create_table(&self) -> Result<()> {
        self.call(|call| call.create_table())
    }

    /// Creates the row of a mutex.
    ///
    /// # Errors
    /// `Conflict` if it already exists.
    pub fn init_mutex(&self, mutex: &str) -> Result<()> {
        name::check_mutex(mutex)?;
        if self.call(|call| call.insert(mutex))? {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Conflict,
            format!("the mutex {mutex:?} has its row already"),
        ))
    }

    /// Creates the row of a mutex. Returns `false` on any error.
    #[must_use]
    pub fn try_init_mutex(&self, mutex: &str) -> bool {
        self.init_mutex(mutex).is_ok()
    }

    /// Reads the row of a mutex, without locking it.
    ///
    /// # Errors
    /// `NotFound` if there is no row.
    pub fn get_owner(&self, mutex: &str) -> Result<MutexRow> {
        name::check_mutex(mutex)?;
        self.call(|call| read(call, mutex))?
            .ok_or_else(|| no_row(mutex))
    }

    /// Acquires the mutex for `id`, again if `id` already owns it. Returns `false` if another contender
    /// owns it, or waits for it and comes first.
    ///
    /// # Errors
    /// `NotFound` if there is no row.
    pub fn acquire(&self, mutex: &str, id: &str, lease: Lease) -> Result<bool> {
        let row = self.acquire_and_get_owner(mutex, id, lease)?;
        Ok(row.owner.is_owner(id))
    }

    /// Acquires the mutex as [`acquire`](Repository::acquire) does, and returns the row after that.
    ///
    /// # Errors
    /// `NotFound` if there is no row.
    pub fn acquire_and_get_owner(&self, mutex: &str, id: &str, lease: Lease) -> Result<MutexRow> {
        name::check_mutex(mutex)?;
        name::check_id(id)?;
        let contender = Contender {
            mutex: mutex.into(),
            id: id.into(),
            lease,
            purpose: Purpose::Lock,
        };
        self.call(|call| {
            // The server's clock may have been set since it was last read: the look reads it anew.
            let granted = call.acquire(&contender, NO_TOKEN, false, call.by)?;
            let row = call.look(mutex)?.ok_or_else(|| no_row(mutex))?;
            if granted.is_some() || !row.is_for(id, NO_TOKEN) {
                return Ok(MutexRow::new(mutex, &row));
            }
            call.acquire(&contender, NO_TOKEN, false, call.by)?;
            read(call, mutex)?.ok_or_else(|| no_row(mutex))
        })
    }

    /// Releases the mutex for `id`, whatever its fence. Returns `false` if `id` did not own it.
    ///
    /// # Errors
    /// The errors of every request.
    pub fn release(&self, mutex: &str, id: &str) -> Result<bool> {
        name::check_mutex(mutex)?;
        name::check_id(id)?;
        self.call(|call| {
            let Some(token) = call.release(mutex, Whose::Id(id))? else {
                return Ok(false);
            };
            let waiter = &self.database.waiter;
            waiter.hand_on(call, &mutex.into(), token);
            Ok(true)
        })
    }

    /// Reads the row of a mutex, and creates it first if necessary. Two concurrent calls both succeed.
    ///
    /// # Errors
    /// The errors of every request.
    pub fn ensure_owner(&self, mutex: &str) -> Result<MutexRow> {
        name::check_mutex(mutex)?;
        self.call(|call| {
            if let Some(row) = read(call, mutex)? {
                return Ok(row);
            }
            call.insert(mutex)?;
            read(call, mutex)?.ok_or_else(|| no_row(mutex))
        })
    }

    fn call<T>(&self, work: impl FnOnce(&mut Call<'_>) -> Result<T>) -> Result<T> {
        let by = Moment::now() + self.lease.request_limit();
        self.database.rows.call(Lane::Owner, by, work)
    }
}

fn read(call: &mut Call<'_>, mutex: &str) -> Result<Option<MutexRow>> {
    let row = call.look(mutex)?;
    Ok(row.map(|row| MutexRow::new(mutex, &row)))
}

impl MutexRow {
    fn new(mutex: &str, row: &Row) -> MutexRow {
        MutexRow {
            mutex: mutex.to_owned(),
            owner: row.last_owner(),
            version: row.version,
            current_db_at: row.now,
        }
    }
}

fn no_row(mutex: &str) -> Error {
    Error::new(
        ErrorKind::NotFound,
        format!("there is no row for the mutex {mutex:?}; init_mutex or ensure_owner makes it"),
    )
}
