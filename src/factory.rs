//! `Factory`: where services, observers and lockers on one backend come from.

use std::sync::Arc;

use crate::backend::Backend;
use crate::error::Result;
use crate::fork::Origin;
use crate::lease::Lease;

/// A backend and the lease that its contenders ask for. Cheap to clone; shared by any number of
/// services, and alive for as long as one of them is.
#[derive(Clone, Debug)]
pub struct Factory {
    backend: Arc<dyn Backend>,
    lease: Lease,
    origin: Origin,
}

impl Factory {
    /// A factory on `backend`, for backends of one's own; those of this crate have builders.
    #[must_use]
    pub fn new(backend: Arc<dyn Backend>, lease: Lease) -> Factory {
        Factory {
            backend,
            lease,
            origin: Origin::here(),
        }
    }

    /// Where the mutexes are, without credentials.
    #[must_use]
    pub fn realm(&self) -> &str {
        self.backend.realm()
    }

    /// The lease that services of this factory ask for unless told otherwise.
    #[must_use]
    pub fn lease(&self) -> Lease {
        self.lease
    }

    /// The backend, or an error in a child process that inherited this factory through `fork`.
    pub(crate) fn backend(&self) -> Result<&Arc<dyn Backend>> {
        self.origin.check()?;
        Ok(&self.backend)
    }
}
