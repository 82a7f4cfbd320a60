//! Builds a `Locker`.

use std::sync::Arc;
use std::time::Duration;

use super::lock::Locker;
use crate::backend::Hold;
use crate::error::{Error, Result};
use crate::factory::Factory;
use crate::id::ContenderIdGenerator;
use crate::service::Terms;

/// Builds a [`Locker`]. Everything is checked at the end, before anything happens.
///
/// ```
/// use std::time::Duration;
///
/// let factory = contend::connect("memory://locker-builder-doc")?;
/// let locker = factory
///     .locker("reports")
///     .ttl(Duration::from_secs(5))
///     .transition(Duration::from_secs(2))
///     .max_hold(Duration::from_secs(600))
///     .build()?;
/// assert_eq!(locker.mutex(), "reports");
/// # Ok::<(), contend::Error>(())
/// ```
#[derive(Debug)]
#[must_use]
pub struct LockerBuilder {
    terms: Terms,
    max_hold: Option<Duration>,
}

impl LockerBuilder {
    pub(crate) fn new(factory: Factory, mutex: &str) -> LockerBuilder {
        LockerBuilder {
            terms: Terms::new(factory, mutex),
            max_hold: None,
        }
    }

    /// The id to contend under. Default: a generated one. No other contender of the mutex, in any
    /// process, may have it.
    pub fn id(mut self, id: &str) -> LockerBuilder {
        self.terms.id = Some(Arc::from(id));
        self
    }

    /// How to generate an id. Default: [`ContenderIdGenerator::Host`].
    pub fn id_generator(mut self, ids: ContenderIdGenerator) -> LockerBuilder {
        self.terms.ids = ids;
        self
    }

    /// How long a guard is valid without a renewal. Default: the factory's, 10 s.
    pub fn ttl(mut self, ttl: Duration) -> LockerBuilder {
        self.terms.ttl = ttl;
        self
    }

    /// How long after the ttl nobody else can lock. Default: the factory's, 6 s.
    pub fn transition(mut self, transition: Duration) -> LockerBuilder {
        self.terms.transition = transition;
        self
    }

    /// How long after a grant the lease is renewed. Default: a third of the ttl.
    pub fn renew_after(mut self, renew_after: Duration) -> LockerBuilder {
        self.terms.renew_after = Some(renew_after);
        self
    }

    /// Over how long contenders spread their attempts when a lease has ended. Default: a twentieth of
    /// the ttl, at most 50 ms.
    pub fn jitter(mut self, jitter: Duration) -> LockerBuilder {
        self.terms.jitter = Some(jitter);
        self
    }

    /// How long a guard is renewed. After that its lease runs out, and it is [lost](super::Guard::lost)
    /// at the end of the ttl: a stuck holder does not block the world for ever. Default: as long as the
    /// guard lives.
    pub fn max_hold(mut self, max_hold: Duration) -> LockerBuilder {
        self.max_hold = Some(max_hold);
        self
    }

    /// The locker. Does no I/O.
    ///
    /// # Errors
    /// `InvalidInput` for a name, id or duration that is not allowed, `DuplicateContender` for an id
    /// that this process contends under already, `Forked` in a child process.
    pub fn build(self) -> Result<Locker> {
        if self.max_hold.is_some_and(|max_hold| max_hold.is_zero()) {
            return Err(Error::invalid(
                "a max_hold of zero is not possible; leave it out to hold for as long as the guard lives",
            ));
        }
        let factory = self.terms.factory.clone();
        let settled = self.terms.settle(Hold::Short)?;
        Locker::new(factory, settled, self.max_hold)
    }
}
