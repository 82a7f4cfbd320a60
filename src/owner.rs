//! `MutexOwner`: who owned a mutex, and until when, at the moment of looking; and `MutexState`, one
//! change of ownership as a before and an after.

use std::fmt;
use std::sync::Arc;

use crate::clock::Moment;

/// An immutable snapshot of the ownership of one mutex.
///
/// All times are epoch milliseconds on the *backend's* clock. The predicates without a `now` carry
/// that clock forward from the moment of looking with the local boot-time clock; the local wall
/// clock is never read. Those with `_at` take the backend's time as an argument.
///
/// ```
/// use contend::MutexOwner;
///
/// assert!(!MutexOwner::NONE.has_owner());
///
/// let owner = MutexOwner::new("a", 1_000, 11_000, 17_000, 42);
/// assert!(owner.is_owner("a"));
/// assert!(owner.is_in_ttl_at(10_999) && !owner.is_in_ttl_at(11_000));
/// assert!(owner.is_in_transition_at(17_000) && !owner.is_in_transition_at(17_001));
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct MutexOwner {
    /// `None` without an owner, so that `NONE` can be a constant.
    id: Option<Arc<str>>,
    acquired_at: u64,
    ttl_at: u64,
    transition_at: u64,
    fence: u64,
    observed: Option<Observed>,
}

/// When a snapshot was taken, on both clocks.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Observed {
    backend_ms: u64,
    local: Moment,
}

impl MutexOwner {
    /// No owner.
    pub const NONE: MutexOwner = MutexOwner {
        id: None,
        acquired_at: 0,
        ttl_at: 0,
        transition_at: 0,
        fence: 0,
        observed: None,
    };

    /// Creates a snapshot that was not read from a backend: the predicates without a `now` use the time of
    /// acquisition as the current time.
    #[must_use]
    pub fn new(
        owner_id: impl Into<Arc<str>>,
        acquired_at: u64,
        ttl_at: u64,
        transition_at: u64,
        fence: u64,
    ) -> MutexOwner {
        let id: Arc<str> = owner_id.into();
        MutexOwner {
            id: (!id.is_empty()).then_some(id),
            acquired_at,
            ttl_at,
            transition_at,
            fence,
            observed: None,
        }
    }

    /// Returns the same snapshot, taken when the backend's clock showed `backend_ms` and the local one `local`.
    // Of a type that only `unstable` shows.
    #[cfg_attr(not(feature = "unstable"), doc(hidden))]
    #[must_use]
    pub fn observed_at(mut self, backend_ms: u64, local: Moment) -> MutexOwner {
        self.observed = Some(Observed { backend_ms, local });
        self
    }

    /// Returns the owner's contender id; empty without an owner.
    ///
    /// ```
    /// use contend::MutexOwner;
    ///
    /// assert_eq!(MutexOwner::new("a", 1_000, 11_000, 17_000, 42).owner_id(), "a");
    /// assert_eq!(MutexOwner::NONE.owner_id(), "");
    /// ```
    #[must_use]
    pub fn owner_id(&self) -> &str {
        self.id.as_deref().unwrap_or("")
    }

    /// Returns when the mutex was acquired.
    ///
    /// ```
    /// let factory = contend::connect("memory://acquired-at-doc")?;
    /// let guard = factory.locker("invoices").build()?.lock()?;
    /// let owner = factory.owner("invoices")?;
    /// println!("owned for {} ms", owner.backend_now() - owner.acquired_at());
    /// # drop(guard);
    /// # Ok::<(), contend::Error>(())
    /// ```
    #[must_use]
    pub fn acquired_at(&self) -> u64 {
        self.acquired_at
    }

    /// Returns when the owner's ttl ends unless it is renewed.
    #[must_use]
    pub fn ttl_at(&self) -> u64 {
        self.ttl_at
    }

    /// Returns the time until which no other contender can acquire.
    #[must_use]
    pub fn transition_at(&self) -> u64 {
        self.transition_at
    }

    /// Returns the fence of this ownership: larger than that of every earlier one of the same mutex.
    #[must_use]
    pub fn fence(&self) -> u64 {
        self.fence
    }

    /// Returns the backend's clock now: as read with this snapshot, carried forward by the local boot-time clock.
    #[must_use]
    pub fn backend_now(&self) -> u64 {
        match self.observed {
            Some(observed) => {
                let since = (Moment::now() - observed.local).as_millis();
                observed
                    .backend_ms
                    .saturating_add(u64::try_from(since).unwrap_or(u64::MAX))
            }
            None => self.acquired_at,
        }
    }

    /// Returns `true` if the ttl is still running.
    #[must_use]
    pub fn is_in_ttl(&self) -> bool {
        self.is_in_ttl_at(self.backend_now())
    }

    /// Returns `true` if the ttl is still running at `now_ms`.
    ///
    /// ```
    /// use contend::MutexOwner;
    ///
    /// let owner = MutexOwner::new("a", 1_000, 11_000, 17_000, 42);
    /// assert!(owner.is_in_ttl_at(10_999) && !owner.is_in_ttl_at(11_000));
    /// ```
    #[must_use]
    pub fn is_in_ttl_at(&self, now_ms: u64) -> bool {
        self.ttl_at > now_ms
    }

    /// Returns `true` if the ttl or the transition is still running.
    #[must_use]
    pub fn is_in_transition(&self) -> bool {
        self.is_in_transition_at(self.backend_now())
    }

    /// Returns `true` if the ttl or the transition is still running at `now_ms`.
    ///
    /// ```
    /// use contend::MutexOwner;
    ///
    /// let owner = MutexOwner::new("a", 1_000, 11_000, 17_000, 42);
    /// assert!(owner.is_in_transition_at(17_000) && !owner.is_in_transition_at(17_001));
    /// ```
    #[must_use]
    pub fn is_in_transition_at(&self, now_ms: u64) -> bool {
        self.id.is_some() && self.transition_at >= now_ms
    }

    /// Returns `true` if the mutex has an owner. It still has one during the transition.
    ///
    /// ```
    /// let factory = contend::connect("memory://has-owner-doc")?;
    /// assert!(!factory.owner("invoices")?.has_owner());
    /// let guard = factory.locker("invoices").build()?.lock()?;
    /// assert!(factory.owner("invoices")?.has_owner());
    /// # drop(guard);
    /// # Ok::<(), contend::Error>(())
    /// ```
    #[must_use]
    pub fn has_owner(&self) -> bool {
        self.is_in_transition()
    }

    /// Returns `true` if `id` is named as the owner, whether or not its lease has ended.
    ///
    /// ```
    /// use contend::MutexOwner;
    ///
    /// let owner = MutexOwner::new("a", 1_000, 11_000, 17_000, 42);
    /// assert!(owner.is_owner("a") && !owner.is_owner("b"));
    /// ```
    #[must_use]
    pub fn is_owner(&self, id: &str) -> bool {
        self.id.as_deref() == Some(id)
    }

    /// Returns `true` if `id` is the owner and its ttl is still running.
    #[must_use]
    pub fn is_in_ttl_of(&self, id: &str) -> bool {
        self.is_owner(id) && self.is_in_ttl()
    }

    /// Returns `true` if `id` is the owner and its ttl or transition is still running.
    #[must_use]
    pub fn is_in_transition_of(&self, id: &str) -> bool {
        self.is_owner(id) && self.is_in_transition()
    }
}

impl Default for MutexOwner {
    fn default() -> MutexOwner {
        MutexOwner::NONE
    }
}

impl fmt::Debug for MutexOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.id.is_none() {
            return f.write_str("MutexOwner::NONE");
        }
        f.debug_struct("MutexOwner")
            .field("owner_id", &self.owner_id())
            .field("acquired_at", &self.acquired_at)
            .field("ttl_at", &self.ttl_at)
            .field("transition_at", &self.transition_at)
            .field("fence", &self.fence)
            .finish_non_exhaustive()
    }
}

/// A change of ownership: the owner before and the owner after.
///
/// ```
/// use contend::{MutexOwner, MutexState};
///
/// let a = MutexOwner::new("a", 0, 10_000, 16_000, 1);
/// let taken = MutexState::new(MutexOwner::NONE, a.clone());
/// assert!(taken.is_changed() && taken.is_acquired("a") && !taken.is_released("a"));
///
/// let renewed = MutexState::new(a.clone(), a);
/// assert!(!renewed.is_changed() && !renewed.is_acquired("a") && renewed.is_owner("a"));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MutexState {
    before: MutexOwner,
    after: MutexOwner,
}

impl MutexState {
    /// No owner before, no owner after.
    pub const NONE: MutexState = MutexState {
        before: MutexOwner::NONE,
        after: MutexOwner::NONE,
    };

    /// Creates the change from `before` to `after`.
    #[must_use]
    pub fn new(before: MutexOwner, after: MutexOwner) -> MutexState {
        MutexState { before, after }
    }

    /// Returns the owner before the change.
    #[must_use]
    pub fn before(&self) -> &MutexOwner {
        &self.before
    }

    /// Returns the owner after the change.
    #[must_use]
    pub fn after(&self) -> &MutexOwner {
        &self.after
    }

    /// Returns `true` if the owner's id changed; a renewal changes nothing.
    ///
    /// ```
    /// use contend::{MutexOwner, MutexState};
    ///
    /// let a = MutexOwner::new("a", 1_000, 11_000, 17_000, 42);
    /// let renewed = MutexOwner::new("a", 1_000, 14_000, 20_000, 42);
    /// assert!(MutexState::new(MutexOwner::NONE, a.clone()).is_changed());
    /// assert!(!MutexState::new(a, renewed).is_changed());
    /// ```
    #[must_use]
    pub fn is_changed(&self) -> bool {
        self.before.owner_id() != self.after.owner_id()
    }

    /// Returns `true` if `id` became the owner.
    ///
    /// ```
    /// use contend::{MutexOwner, MutexState};
    ///
    /// let (a, b) = (MutexOwner::new("a", 1_000, 11_000, 17_000, 42), MutexOwner::NONE);
    /// let change = MutexState::new(b, a);
    /// assert!(change.is_acquired("a") && !change.is_released("a"));
    /// ```
    #[must_use]
    pub fn is_acquired(&self, id: &str) -> bool {
        self.is_changed() && self.after.is_owner(id)
    }

    /// Returns `true` if `id` stopped being the owner.
    #[must_use]
    pub fn is_released(&self, id: &str) -> bool {
        self.is_changed() && self.before.is_owner(id)
    }

    /// Returns `true` if `id` is the owner now.
    #[must_use]
    pub fn is_owner(&self, id: &str) -> bool {
        self.after.is_owner(id)
    }

    /// Returns `true` if `id` is the owner now and its ttl is still running.
    #[must_use]
    pub fn is_in_ttl(&self, id: &str) -> bool {
        self.after.is_in_ttl_of(id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn owner_ages_on_the_boot_clock() {
        let looked = Moment::now() - Duration::from_secs(5);
        let owner = MutexOwner::new("a", 0, 10_000, 16_000, 1).observed_at(6_000, looked);
        // 6 s on the backend's clock when looked at, 5 s ago: now 11 s.
        assert!((11_000..12_000).contains(&owner.backend_now()));
        assert!(!owner.is_in_ttl());
        assert!(owner.is_in_transition_of("a"));
        assert!(!owner.is_in_transition_of("b"));
    }

    #[test]
    fn the_edges_are_those_of_the_seeds() {
        let owner = MutexOwner::new("a", 0, 10, 16, 1);
        assert!(owner.is_in_ttl_at(9) && !owner.is_in_ttl_at(10));
        assert!(owner.is_in_transition_at(16) && !owner.is_in_transition_at(17));
        assert!(!MutexOwner::NONE.is_in_transition_at(0));
        assert!(!MutexOwner::NONE.is_owner(""));
    }
}
