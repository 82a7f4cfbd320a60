//! `Factory`: where services, observers and lockers on one backend come from.

use std::sync::Arc;

use crate::backend::Backend;
use crate::contender::{MutexContender, MutexRetriever};
use crate::error::Result;
use crate::fork::Origin;
use crate::lease::Lease;
use crate::service::{ContendBuilder, ObserveBuilder};

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

    /// Begins a service that contends for `mutex`.
    pub fn contend(&self, mutex: &str) -> ContendBuilder {
        ContendBuilder::new(self.clone(), mutex)
    }

    /// Begins a service that contends as a type of one's own, which brings the mutex and the id.
    pub fn contend_as(&self, contender: impl MutexContender + 'static) -> ContendBuilder {
        ContendBuilder::contender(self.clone(), contender)
    }

    /// Begins a service that follows who owns `mutex`, without contending.
    pub fn observe(&self, mutex: &str) -> ObserveBuilder {
        ObserveBuilder::new(self.clone(), mutex)
    }

    /// Begins a service that tells a type of one's own, which brings the mutex, who owns it.
    pub fn observe_as(&self, retriever: impl MutexRetriever + 'static) -> ObserveBuilder {
        ObserveBuilder::retriever(self.clone(), retriever)
    }

    /// The backend, for who wraps one or drives a seat by hand.
    ///
    /// # Errors
    /// `Forked` in a child process that inherited this factory.
    pub fn backend(&self) -> Result<&Arc<dyn Backend>> {
        self.origin.check()?;
        Ok(&self.backend)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    /// Rule 12. A real `fork` needs `unsafe`; what a child sees is another process id.
    #[test]
    fn a_child_process_is_refused_and_waits_for_nobody() {
        let mut factory = crate::memory::factory("fork", Lease::default());
        factory.origin = Origin::elsewhere();
        for error in [
            factory.backend().unwrap_err(),
            factory.contend("m").build().unwrap_err(),
            factory.observe("m").build().unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::Forked);
            assert!(error.to_string().contains("connect again"), "{error}");
        }
    }
}
