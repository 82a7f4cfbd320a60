//! A lock that a panicking test cannot poison.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks and ignores poison: a failed test must still be able to kill its servers while it unwinds.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
