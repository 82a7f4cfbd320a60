//! `Repository`: the operations of Simba's repository on one mutex's row, public, for callers that wait, renew
//! and retry by themselves.

use std::sync::Arc;

use super::Database;
use super::rows::{Call, Whose};
use super::token::Token;
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
    pub(super) database: Arc<Database>,
    pub(super) lease: Lease,
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
    /// Creates the table if it is missing: applies `sql/init-mutex.sql`.
    ///
    /// # Errors
    /// `Denied` without the privilege to create tables, and the errors of every request.
    pub fn create_table(&self) -> Result<()> {
        self.database.rows.create_table(self.by())
    }

    /// Creates the row of a mutex.
    ///
    /// # Errors
    /// `Conflict` if it already exists.
    pub fn init_mutex(&self, mutex: &str) -> Result<()> {
        if !self.call(mutex)?.insert(mutex)? {
            let message = format!("the mutex {mutex:?} has its row already");
            return Err(Error::new(ErrorKind::Conflict, message));
        }
        Ok(())
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
        read(&mut self.call(mutex)?, mutex)
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
        name::check_id(id)?;
        let contender = Contender {
            mutex: mutex.into(),
            id: id.into(),
            lease,
            purpose: Purpose::Lock,
        };
        let mut call = self.call(mutex)?;
        call.acquire(&contender, Token::NONE)?;
        read(&mut call, mutex)
    }

    /// Releases the mutex for `id`, whatever its fence. Returns `false` if `id` did not own it.
    ///
    /// # Errors
    /// The errors of every request.
    pub fn release(&self, mutex: &str, id: &str) -> Result<bool> {
        name::check_mutex(mutex)?;
        name::check_id(id)?;
        self.database.release(mutex, Whose::Id(id), self.by())
    }

    /// Reads the row of a mutex, and creates it first if necessary. Two concurrent calls both succeed.
    ///
    /// # Errors
    /// The errors of every request.
    pub fn ensure_owner(&self, mutex: &str) -> Result<MutexRow> {
        let mut call = self.call(mutex)?;
        call.insert(mutex)?;
        read(&mut call, mutex)
    }

    fn call(&self, mutex: &str) -> Result<Call<'_>> {
        name::check_mutex(mutex)?;
        self.database.rows.call(Lane::Owner, self.by())
    }

    fn by(&self) -> Moment {
        Moment::now() + self.lease.request_limit()
    }
}

fn read(call: &mut Call<'_>, mutex: &str) -> Result<MutexRow> {
    let row = call.look(mutex)?.ok_or_else(|| {
        let advice = "init_mutex or ensure_owner makes it";
        let message = format!("there is no row for the mutex {mutex:?}; {advice}");
        Error::new(ErrorKind::NotFound, message)
    })?;
    Ok(MutexRow {
        mutex: mutex.to_owned(),
        owner: row.last_owner,
        version: row.version,
        current_db_at: row.now,
    })
}
