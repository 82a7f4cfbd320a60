//! `PermitGuard`: permits that are given back when it goes out of scope.

use std::fmt;
use std::sync::Arc;

use super::answer::{Permit, Release};
use super::core::Core;
use super::keeper::Belief;
use super::request::Wish;
use crate::clock::Moment;
use crate::error::Result;

/// Holds permits for as long as it lives.
///
/// Permits with a ttl are renewed at a third of it, in the background. Dropping the guard releases them;
/// if the server cannot be reached then, that is done as soon as it can, for as long as a handle on the
/// semaphores is left.
#[must_use = "dropping the guard releases the permits"]
pub struct PermitGuard {
    core: Arc<Core>,
    external_id: Arc<str>,
    permits: Vec<Permit>,
    belief: Arc<Belief>,
    /// The keeper's number for it, if it is renewed.
    renewal: Option<u64>,
    released: bool,
}

impl PermitGuard {
    /// A guard of permits for which we asked at `sent`.
    pub(super) fn new(
        core: &Arc<Core>,
        wish: &Wish,
        permits: Vec<Permit>,
        sent: Moment,
    ) -> Result<PermitGuard> {
        let mut guard = PermitGuard {
            core: Arc::clone(core),
            external_id: Arc::clone(&wish.external_id),
            permits,
            belief: Arc::new(Belief::new(wish.ttl, sent)),
            renewal: None,
            released: false,
        };
        if let Some(ttl) = wish.ttl {
            // Where there is no thread to renew, dropping the half-made guard gives the permits back.
            let renewal = core.keeper.keep(&guard.external_id, ttl, &guard.belief)?;
            guard.renewal = Some(renewal);
        }
        Ok(guard)
    }

    /// The permits, in the order of the semaphores' names.
    #[must_use]
    pub fn permits(&self) -> &[Permit] {
        &self.permits
    }

    /// The fence of a semaphore's permit.
    #[must_use]
    pub fn fence(&self, semaphore: &str) -> Option<u64> {
        let permit = self.permits.iter().find(|it| &*it.semaphore == semaphore);
        permit.map(|permit| permit.fence)
    }

    /// The external id that they are held under.
    #[must_use]
    pub fn external_id(&self) -> &str {
        &self.external_id
    }

    /// Whether the permits are surely still ours: renewed within the ttl, counted on the local
    /// boot-time clock from before the request was sent, and not found released. Once `false`, it stays
    /// so. Without a ttl there is nothing that could run out, and it stays `true`.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.belief.holds()
    }

    /// Gives the permits back, and tells what became of it.
    ///
    /// # Errors
    /// The server could not be reached: the permits are released as soon as it can be.
    pub fn release(mut self) -> Result<Release> {
        self.give_back()
    }

    fn give_back(&mut self) -> Result<Release> {
        self.released = true;
        if let Some(number) = self.renewal.take() {
            self.core.keeper.forget(number);
        }
        let outcome = self.core.release(&self.external_id);
        if let Err(error) = &outcome
            && error.is_transient()
        {
            self.core.keeper.bury(&self.external_id);
        }
        outcome
    }
}

impl Drop for PermitGuard {
    fn drop(&mut self) {
        if !self.released
            && let Err(error) = self.give_back()
        {
            log::warn!(
                "cannot release the permits of {:?}: {error}",
                self.external_id
            );
        }
    }
}

impl fmt::Debug for PermitGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PermitGuard")
            .field("external_id", &self.external_id)
            .field("permits", &self.permits)
            .field("is_held", &self.is_held())
            .finish_non_exhaustive()
    }
}
