//! The operations on single rows, for who wants to drive them by hand; those of Simba's repository.

use std::sync::Arc;

use super::store::{Row, Store};
use crate::backend::Hold;
use crate::backend::Place;
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::lease::Lease;
use crate::name;
use crate::owner::MutexOwner;

/// A mutex row by row: no waiting, no renewing, no events. Each call is bounded by a quarter of the
/// factory's ttl, and none holds a connection beyond its end.
///
/// Made by [`Builder::repository`](super::Builder::repository).
#[derive(Clone, Debug)]
pub struct Repository {
    store: Arc<Store>,
    lease: Lease,
}

/// A row of the table: the owner that it names, if any, and what only the row knows.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MutexRow {
    /// The mutex.
    pub mutex: String,
    /// The owner it names, its lease run out or not; `NONE` in a row that was released.
    pub owner: MutexOwner,
    /// The fence of that owner, or of the release after it.
    pub version: u64,
    /// The server's clock when the row was read, in epoch milliseconds.
    pub current_db_at: u64,
}

impl Repository {
    pub(super) fn new(store: Arc<Store>, lease: Lease) -> Repository {
        Repository { store, lease }
    }

    /// Makes the table if it is not there: applies `sql/init-mutex.sql`.
    ///
    /// # Errors
    /// `Denied` without the privilege to create tables, and those of every request.
    pub fn create_table(&self) -> Result<()> {
        self.store.create_table(self.by())
    }

    /// Makes the row of a mutex.
    ///
    /// # Errors
    /// `Conflict` where it is there already.
    pub fn init_mutex(&self, mutex: &str) -> Result<()> {
        name::check_mutex(mutex)?;
        let by = self.by();
        let mut link = self.store.pool.checkout(by)?;
        if self.store.insert(&mut link, mutex, by)? {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Conflict,
            format!("the mutex {mutex:?} has its row already"),
        ))
    }

    /// Makes the row of a mutex; `false` on any error.
    #[must_use]
    pub fn try_init_mutex(&self, mutex: &str) -> bool {
        self.init_mutex(mutex).is_ok()
    }

    /// Reads the row of a mutex; locks nothing.
    ///
    /// # Errors
    /// `NotFound` where there is no row.
    pub fn get_owner(&self, mutex: &str) -> Result<MutexRow> {
        name::check_mutex(mutex)?;
        let by = self.by();
        let mut link = self.store.pool.checkout(by)?;
        self.store
            .read(&mut link, mutex, by)?
            .map(|row| MutexRow::new(mutex, &row))
            .ok_or_else(|| no_row(mutex))
    }

    /// Takes the mutex for `id`, or takes it anew where `id` has it. `false`: somebody else has it.
    ///
    /// # Errors
    /// `NotFound` where there is no row.
    pub fn acquire(&self, mutex: &str, id: &str, lease: Lease) -> Result<bool> {
        Ok(self.attempt(mutex, id, lease)?.0)
    }

    /// [`acquire`](Repository::acquire), and who owns it then. One round trip for the winner, whose
    /// row comes back with the UPDATE itself; a loser pays a second one to read it.
    ///
    /// # Errors
    /// `NotFound` where there is no row.
    pub fn acquire_and_get_owner(&self, mutex: &str, id: &str, lease: Lease) -> Result<MutexRow> {
        Ok(self.attempt(mutex, id, lease)?.1)
    }

    /// Whether it was acquired, and the row then.
    fn attempt(&self, mutex: &str, id: &str, lease: Lease) -> Result<(bool, MutexRow)> {
        name::check_mutex(mutex)?;
        name::check_id(id)?;
        let place = Place {
            mutex: mutex.into(),
            id: id.into(),
            lease,
            hold: Hold::Short,
        };
        let by = self.by();
        let mut link = self.store.pool.checkout(by)?;
        loop {
            if let Some(owner) = self.store.acquire(&mut link, &place, None, by)? {
                let row = MutexRow {
                    mutex: mutex.to_owned(),
                    version: owner.fence(),
                    current_db_at: owner.acquired_at(),
                    owner,
                };
                return Ok((true, row));
            }
            let row = self.store.read(&mut link, mutex, by)?;
            let row = row.ok_or_else(|| no_row(mutex))?;
            // Free now, but not a moment ago: try once more rather than report an owner of none.
            if !row.is_free() {
                return Ok((false, MutexRow::new(mutex, &row)));
            }
        }
    }

    /// Gives the mutex up for `id`, whatever its fence. `false`: it was not its.
    ///
    /// # Errors
    /// Those of every request.
    pub fn release(&self, mutex: &str, id: &str) -> Result<bool> {
        name::check_mutex(mutex)?;
        name::check_id(id)?;
        let by = self.by();
        let mut link = self.store.pool.checkout(by)?;
        self.store.release(&mut link, mutex, id, None, by)
    }

    /// Reads the row of a mutex, and makes it first if need be. Two that do so at once both succeed.
    ///
    /// # Errors
    /// Those of every request.
    pub fn ensure_owner(&self, mutex: &str) -> Result<MutexRow> {
        name::check_mutex(mutex)?;
        let by = self.by();
        let mut link = self.store.pool.checkout(by)?;
        if let Some(row) = self.store.read(&mut link, mutex, by)? {
            return Ok(MutexRow::new(mutex, &row));
        }
        self.store.insert(&mut link, mutex, by)?;
        self.store
            .read(&mut link, mutex, by)?
            .map(|row| MutexRow::new(mutex, &row))
            .ok_or_else(|| no_row(mutex))
    }

    fn by(&self) -> Moment {
        Moment::now() + self.lease.call_budget()
    }
}

impl MutexRow {
    fn new(mutex: &str, row: &Row) -> MutexRow {
        MutexRow {
            mutex: mutex.to_owned(),
            owner: row.last_owner(),
            version: row.version,
            current_db_at: row.now_ms,
        }
    }
}

fn no_row(mutex: &str) -> Error {
    Error::new(
        ErrorKind::NotFound,
        format!("there is no row for the mutex {mutex:?}; init_mutex or ensure_owner makes it"),
    )
}
