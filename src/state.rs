//! `MutexState`: one change of ownership, as a before and an after.

use crate::owner::MutexOwner;

/// Who owned before, and who owns after.
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
    /// Nobody before, nobody after.
    pub const NONE: MutexState = MutexState {
        before: MutexOwner::NONE,
        after: MutexOwner::NONE,
    };

    /// The change from `before` to `after`.
    #[must_use]
    pub fn new(before: MutexOwner, after: MutexOwner) -> MutexState {
        MutexState { before, after }
    }

    /// The owner before the change.
    #[must_use]
    pub fn before(&self) -> &MutexOwner {
        &self.before
    }

    /// The owner after the change.
    #[must_use]
    pub fn after(&self) -> &MutexOwner {
        &self.after
    }

    /// Whether the owner's id changed; a renewal changes nothing.
    #[must_use]
    pub fn is_changed(&self) -> bool {
        self.before.owner_id() != self.after.owner_id()
    }

    /// Whether `id` became the owner.
    #[must_use]
    pub fn is_acquired(&self, id: &str) -> bool {
        self.is_changed() && self.after.is_owner(id)
    }

    /// Whether `id` ceased to be the owner.
    #[must_use]
    pub fn is_released(&self, id: &str) -> bool {
        self.is_changed() && self.before.is_owner(id)
    }

    /// Whether `id` is the owner now.
    #[must_use]
    pub fn is_owner(&self, id: &str) -> bool {
        self.after.is_owner(id)
    }

    /// Whether `id` is the owner now and its ttl runs still.
    #[must_use]
    pub fn is_in_ttl(&self, id: &str) -> bool {
        self.after.is_in_ttl_of(id)
    }
}
