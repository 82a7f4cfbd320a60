//! What the semaphores answer.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, ErrorKind};

/// What became of a request for permits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Acquisition {
    /// The permits are ours, all of them.
    Acquired(Vec<Permit>),
    /// An earlier request with the same external id holds these permits; nothing was added.
    AlreadyAcquired(Vec<Permit>),
    /// The external id is used up: what was acquired under it is released, or never was.
    AlreadyReleased,
    /// A semaphore has not enough free permits; nothing was taken from any.
    Exhausted(Exhausted),
}

impl Acquisition {
    /// The permits, if we hold them: for code to which it is the same whether an earlier try got them.
    ///
    /// # Errors
    /// `Exhausted`, or `Conflict` where the external id is used up.
    pub fn into_permits(self) -> Result<Vec<Permit>, Error> {
        match self {
            Acquisition::Acquired(permits) | Acquisition::AlreadyAcquired(permits) => Ok(permits),
            Acquisition::AlreadyReleased => Err(used_up()),
            Acquisition::Exhausted(exhausted) => {
                Err(Error::new(ErrorKind::Exhausted, exhausted.to_string()))
            }
        }
    }
}

/// The error of who comes back after a release.
pub(super) fn used_up() -> Error {
    Error::new(
        ErrorKind::Conflict,
        "the permits of this external id were released; ask again under a new one",
    )
}

/// A share of one semaphore.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Permit {
    /// The semaphore.
    pub semaphore: Arc<str>,
    /// How much of its capacity.
    pub count: u32,
    /// Larger than that of every grant before on the same semaphore. Pass it to what you protect, and
    /// let that refuse a smaller one than it has seen: a holder whose ttl ran out may not know it yet.
    pub fence: u64,
}

/// Why there were no permits.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Exhausted {
    /// The first semaphore, by name, that had too little left.
    pub semaphore: Arc<str>,
    /// How much it has.
    pub capacity: u32,
    /// How much of that is held; more than the capacity after it was lowered.
    pub held: u64,
    /// How much was asked for.
    pub wanted: u32,
}

impl fmt::Display for Exhausted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the semaphore {:?} is exhausted: {} of {} permits are held, {} wanted",
            self.semaphore, self.held, self.capacity, self.wanted
        )
    }
}

/// What became of a release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Release {
    /// The permits are free again.
    Released,
    /// They were before.
    AlreadyReleased,
    /// There is no request with this external id.
    Unknown,
}

/// What became of a renewal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PermitRenewal {
    /// The ttl begins anew.
    Renewed,
    /// Too late: the permits were released, by their holder or by a sweep.
    AlreadyReleased,
    /// There is no request with this external id.
    Unknown,
}

/// A request as the server knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RequestStatus {
    /// Whether its permits are held, also where their ttl has passed and no sweep came by yet.
    pub held: bool,
    /// The permits it has, or had.
    pub permits: Vec<Permit>,
    /// Who holds them.
    pub owner: Option<Arc<str>>,
    /// How long they last without a renewal.
    pub ttl: Option<Duration>,
    /// How much of that is left; zero once a sweep may take them. `None` without a ttl, or if released.
    pub expires_in: Option<Duration>,
}

/// How full a semaphore is.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Usage {
    /// The semaphore.
    pub semaphore: Arc<str>,
    /// How much it has.
    pub capacity: u32,
    /// How much of that is held.
    pub held: u64,
    /// How much is left; zero where more is held than the capacity since it was lowered.
    pub free: u64,
    /// By how many requests it is held.
    pub requests: u64,
}

/// A change of a capacity, from the history.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CapacityChange {
    /// The semaphore.
    pub semaphore: Arc<str>,
    /// Who changed it, as the caller said.
    pub changed_by: Option<Arc<str>>,
    /// When, in epoch milliseconds on the server's clock.
    pub changed_at: u64,
    /// The capacity before.
    pub from: u32,
    /// The capacity since.
    pub to: u32,
}
