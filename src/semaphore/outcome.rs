//! What a caller is told about its request.

use std::time::Duration;

use crate::backend::permit_store::{Exhausted, Permit};
use crate::error::{Error, ErrorKind};

/// The outcome of a request for permits.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Acquisition {
    /// All permits were acquired.
    Acquired(Vec<Permit>),
    /// An earlier call with the same external id holds these permits; nothing was changed.
    #[non_exhaustive]
    AlreadyAcquired {
        /// The permits.
        permits: Vec<Permit>,
        /// How much of their ttl is left; zero once they may be taken back. `None` without a ttl.
        expires_in: Option<Duration>,
    },
    /// The external id is used up: what was acquired under it has been released, or nothing ever was
    /// acquired.
    AlreadyReleased,
    /// A semaphore does not have enough free permits; nothing was taken from any.
    Exhausted(Exhausted),
}

impl Acquisition {
    /// Returns the permits if they are held, whether this call or an earlier one acquired them.
    ///
    /// # Errors
    /// `Exhausted`; `Conflict` if the external id is used up; `Lost` if the ttl of what an earlier call
    /// acquired has passed.
    pub fn into_permits(self) -> Result<Vec<Permit>, Error> {
        match self {
            Acquisition::AlreadyAcquired {
                expires_in: Some(Duration::ZERO),
                ..
            } => Err(Error::new(
                ErrorKind::Lost,
                "the ttl of the permits that an earlier call acquired under this external id has passed; \
                 renew them before it does, or hold them with a guard",
            )),
            Acquisition::Acquired(permits) | Acquisition::AlreadyAcquired { permits, .. } => {
                Ok(permits)
            }
            Acquisition::AlreadyReleased => Err(used_up()),
            Acquisition::Exhausted(exhausted) => Err(exhausted_error(&exhausted)),
        }
    }
}

/// Whether the owner of a permit is alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Liveness {
    /// It is alive: its permits are left alone.
    Alive,
    /// It is gone for good: its permits are released.
    Dead,
    /// It is not known: its permits are left alone.
    Unknown,
}

/// The error of a request that was released before.
pub(super) fn used_up() -> Error {
    Error::new(
        ErrorKind::Conflict,
        "the permits of this external id were released; ask again under a new one",
    )
}

pub(super) fn exhausted_error(exhausted: &Exhausted) -> Error {
    Error::new(ErrorKind::Exhausted, exhausted.to_string())
}
