//! The contract between the semaphores and what keeps their permits.
//!
//! # What a store may assume
//! - Names, ids, counts, capacities and ttls were checked, and the permits of a [`Wish`] are sorted by
//!   the names of their semaphores.
//! - Whoever calls [`PermitStore::acquire`] repeats a call of unknown outcome with the same token, takes
//!   it over with the next call ([`Call::former`]), or ends it with [`PermitStore::bury`].
//!
//! # What a store must never do
//! - Grant more than a capacity, or a part of a wish.
//! - Grant a permit whose id is not above that of every permit granted before: the id is the fence.
//! - Touch another grant than a renewal or release names. A [`Held`] names its grant by a token that no
//!   other grant has, so a delayed or repeated call cannot touch what a later one acquired under the same
//!   external id.
//! - Take a permit back before its end plus a quarter of its ttl, unless it is told to.
//! - Outlast `by` by more than its [`patience`](PermitStore::patience).
//! - Say that an outcome is known if the statement that would have written it was not answered.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};

/// What keeps semaphores, requests and permits; shared by all handles of a factory.
///
/// Every call may fail with any error of the store; named below is what else a failure says.
pub trait PermitStore: fmt::Debug + Send + Sync {
    /// Where the semaphores are: the same text for two stores exactly if they share their semaphores.
    /// Contains no credential.
    fn realm(&self) -> &str;

    /// Returns how long a call may go on after its `by`, if the server does not answer.
    fn patience(&self) -> Duration;

    /// Returns the shortest ttl whose renewals, with a retry, have room in it.
    fn min_ttl(&self) -> Duration;

    /// Returns the longest pause between two looks of a waiting request.
    fn poll_interval(&self) -> Duration;

    /// Makes what the store needs, where it is missing. Defaults to nothing.
    ///
    /// # Errors
    /// `Misconfigured` beside tables of the same names that are not ours; any.
    fn create_tables(&self, _by: Moment) -> Result<()> {
        Ok(())
    }

    /// Makes a semaphore. Returns `false` if there is one already, which is not changed.
    fn create(&self, name: &str, capacity: u32, by: Moment) -> Result<bool>;

    /// Sets a capacity and records the change. Returns the capacity before.
    ///
    /// # Errors
    /// `NotFound`; any.
    fn set_capacity(
        &self,
        name: &str,
        capacity: u32,
        changed_by: Option<&str>,
        by: Moment,
    ) -> Result<u32>;

    /// Reads the changes of a capacity, oldest first.
    fn history(&self, name: &str, by: Moment) -> Result<Vec<CapacityChange>>;

    /// Deletes a semaphore that nobody holds. Returns `false` if there is none.
    ///
    /// # Errors
    /// `InvalidState` while it is held; any.
    fn delete(&self, name: &str, by: Moment) -> Result<bool>;

    /// Reads how full one semaphore is, or all of them, by name.
    fn usage(&self, name: Option<&str>, by: Moment) -> Result<Vec<Usage>>;

    /// Reads who holds permits of a semaphore, oldest grant first.
    ///
    /// # Errors
    /// `NotFound`; any.
    fn holders(&self, name: &str, by: Moment) -> Result<Vec<Holder>>;

    /// Reads a request.
    fn status(&self, external_id: &str, by: Moment) -> Result<Option<RequestStatus>>;

    /// Takes all permits of the wish, or none. Where a semaphore is exhausted, takes back what has
    /// expired there and tries once more.
    ///
    /// # Errors
    /// A [`Failure`], which says whether the outcome is known.
    fn acquire(&self, call: &Arc<Call>, by: Moment) -> Result<Decision, Failure>;

    /// Restarts the ttl of each of these, never to an earlier end. One that is locked by somebody
    /// else does not hold up the others.
    ///
    /// # Errors
    /// Any; the outcome counts as unknown, and belief runs on to its old end.
    fn renew(&self, held: &[Arc<Held>], by: Moment) -> Result<Vec<Renewed>>;

    /// Gives the permits back. Returns `false` if they were not held any more.
    ///
    /// # Errors
    /// Any; the outcome counts as unknown, and repeating the call is safe.
    fn release(&self, held: &Arc<Held>, by: Moment) -> Result<bool>;

    /// Lowers the count of one permit of a grant to `left`. Returns `false` if it was that low, or not
    /// held any more.
    ///
    /// # Errors
    /// As [`release`](PermitStore::release).
    fn release_part(&self, held: &Held, permit: &HeldPermit, left: u32, by: Moment)
    -> Result<bool>;

    /// Gives back whatever is held under an external id.
    /// Repeating the call is safe.
    fn release_request(&self, external_id: &str, by: Moment) -> Result<Release>;

    /// Restarts the ttl of whatever is held under an external id.
    fn renew_request(&self, external_id: &str, by: Moment) -> Result<PermitRenewal>;

    /// Makes an end of calls under an external id: releases what one of these tokens was granted, or makes
    /// sure that it is granted nothing any more. Touches nothing that another call acquired. Returns `true`
    /// if it released something.
    /// Repeating the call is safe.
    fn bury(&self, external_id: &str, tokens: &[u64], by: Moment) -> Result<bool>;

    /// Takes permits back, each rechecked in the statement that releases it. One that is locked by
    /// somebody else does not hold up the others.
    ///
    /// # Errors
    /// Any, if nothing was released; otherwise what was is returned, for those who must hear of it.
    fn sweep(&self, sweep: &Sweep, by: Moment) -> Result<Vec<Swept>>;

    /// Reads the owners of held permits, and the store's time of reading.
    fn owners(&self, by: Moment) -> Result<(Vec<Arc<str>>, StoreTime)>;

    /// Deletes at most `batch` requests that were released longer ago than `age`. Returns how many.
    fn delete_requests(&self, age: Duration, batch: usize, by: Moment) -> Result<u64>;

    /// Deletes at most `batch` changes of capacities older than `age`. Returns how many.
    fn delete_history(&self, age: Duration, batch: usize, by: Moment) -> Result<u64>;

    /// Compares what each semaphore counts as held with its permits. Returns those that differ. Defaults
    /// to none.
    fn check(&self, _by: Moment) -> Result<Vec<Discrepancy>> {
        Ok(Vec::new())
    }

    /// Corrects the counts that differ. Returns those that did. Defaults to none.
    fn repair(&self, _by: Moment) -> Result<Vec<Discrepancy>> {
        Ok(Vec::new())
    }
}

/// Microseconds since the epoch on the store's clock.
pub type StoreTime = u64;

/// A request for permits that passed the checks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wish {
    /// The caller's name for the operation.
    pub external_id: Arc<str>,
    /// Who can be asked whether it is alive.
    pub owner: Option<Arc<str>>,
    /// How long the permits last without a renewal.
    pub ttl: Option<Duration>,
    /// Semaphores and counts, sorted by name, each name once.
    pub permits: Vec<(Arc<str>, u32)>,
}

impl Wish {
    /// Returns `true` if permits of `name` are among those wanted.
    #[must_use]
    pub fn wants(&self, name: &str) -> bool {
        self.permits.iter().any(|(wanted, _)| **wanted == *name)
    }

    /// Returns the first semaphore that has too little, given the capacity of each and what is held of it.
    ///
    /// # Errors
    /// `NotFound` if one does not exist.
    pub fn shortage(
        &self,
        semaphore: impl Fn(&str) -> Option<(u32, i64)>,
    ) -> Result<Option<Exhausted>> {
        let mut short = None;
        for (name, wanted) in &self.permits {
            let (capacity, held) = semaphore(name).ok_or_else(|| no_such_semaphore(name))?;
            if short.is_none() && free(capacity, held) < u64::from(*wanted) {
                short = Some(Exhausted {
                    semaphore: Arc::clone(name),
                    capacity,
                    held: u64::try_from(held).unwrap_or(0),
                    wanted: *wanted,
                });
            }
        }
        Ok(short)
    }

    /// Returns how much each semaphore has left, in the order of the wish.
    #[must_use]
    pub fn free(&self, semaphore: impl Fn(&str) -> Option<(u32, i64)>) -> Vec<u64> {
        let left = |(name, _): &(Arc<str>, u32)| semaphore(name).map_or(0, |(c, h)| free(c, h));
        self.permits.iter().map(left).collect()
    }
}

/// Returns what a capacity leaves beside what is held of it.
pub(crate) fn free(capacity: u32, held: i64) -> u64 {
    u64::try_from(i64::from(capacity).saturating_sub(held)).unwrap_or(0)
}

/// One call to acquire, with its retries.
#[derive(Clone, Debug)]
pub struct Call {
    /// What is wanted.
    pub wish: Wish,
    /// Random; kept with the request that it makes. So a retry whose first reply was lost tells its own
    /// grant from one that another process made under the same external id.
    pub token: u64,
    /// The tokens of earlier calls of unknown outcome, which this one takes over. What one of them was
    /// granted gets this call's token, new permits and the full ttl, so that whatever the earlier call
    /// sent, and is delayed, finds nothing.
    pub former: Vec<u64>,
    /// What to do about permits that another call holds under the external id.
    pub on_held: OnHeld,
}

impl Call {
    /// Decides about a request that stands under the external id, granted to `token`.
    #[must_use]
    pub fn recognise(&self, token: u64, status: RequestStatus) -> Recognised {
        if !status.held {
            Recognised::Decided(Decision::Known(status))
        } else if !status.matches(&self.wish) {
            Recognised::Decided(Decision::Refused(status.conflict(&self.wish.external_id)))
        } else if token == self.token {
            Recognised::Ours
        } else if self.on_held == OnHeld::TakeOver || self.former.contains(&token) {
            Recognised::TakeOver
        } else {
            Recognised::Decided(Decision::Known(status))
        }
    }
}

/// What a call finds under its external id.
#[derive(Clone, Debug)]
pub enum Recognised {
    /// The grant of an earlier try of the same call, whose reply was lost.
    Ours,
    /// Permits to release in the transaction that grants as many new ones.
    TakeOver,
    /// Nothing to write.
    Decided(Decision),
}

/// What to do about permits that another call holds under the external id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnHeld {
    /// Report them, and change nothing.
    Report,
    /// Release them and grant as many new ones, in one transaction: the count does not change, the
    /// fences grow, and whoever held them learns of it at its next renewal.
    TakeOver,
}

/// What became of a call to acquire.
#[derive(Clone, Debug)]
pub enum Decision {
    /// The permits are held: granted now, or by an earlier try of the same call.
    Granted(Grant),
    /// Another call acquired something under the external id before.
    Known(RequestStatus),
    /// Not enough is left; nothing was written.
    Exhausted {
        /// The first semaphore that has too little.
        exhausted: Exhausted,
        /// When something held on this store can be taken back next, as far as the store can tell
        /// cheaply.
        next_reclaim: Option<Duration>,
        /// The fence of a recent grant on it: another one at the next try shows that permits change hands.
        newest: Option<u64>,
    },
    /// No such semaphore, or the external id is in use for something else; nothing was written.
    Refused(Error),
}

/// Permits, fresh from the store.
#[derive(Clone, Debug)]
pub struct Grant {
    /// What a renewal and a release name.
    pub held: Held,
    /// When the request that granted, or that read the grant, was sent.
    pub sent: Moment,
    /// How much of the ttl was left on the store's clock at a time not before `sent`.
    pub remaining: Option<Duration>,
    /// How much each semaphore has left, in the order of the wish.
    pub free: Vec<u64>,
}

/// Permits that were granted: what a renewal and a release name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// The request's external id.
    pub external_id: Arc<str>,
    /// The store's number of the request.
    pub request_id: u64,
    /// The token of the call that was granted: another grant of the same request has another one.
    pub token: u64,
    /// Sorted by the names of the semaphores.
    pub permits: Vec<HeldPermit>,
}

impl Held {
    /// The permits as callers see them.
    #[must_use]
    pub fn to_permits(&self) -> Vec<Permit> {
        self.permits.iter().map(HeldPermit::to_permit).collect()
    }
}

/// One permit of a [`Held`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldPermit {
    /// The permit's number, which is its fence.
    pub id: u64,
    /// The store's number of the semaphore.
    pub semaphore_id: u64,
    /// The semaphore.
    pub semaphore: Arc<str>,
    /// How much of its capacity.
    pub count: u32,
}

impl HeldPermit {
    /// The permit as callers see it.
    #[must_use]
    pub fn to_permit(&self) -> Permit {
        Permit {
            semaphore: Arc::clone(&self.semaphore),
            count: self.count,
            fence: self.id,
        }
    }
}

/// Why a call to acquire came to no decision.
#[derive(Clone, Debug)]
pub struct Failure {
    /// What went wrong.
    pub error: Error,
    /// The permits may have been granted, or may yet be.
    pub unknown: bool,
    /// The same call may succeed at once, also where the error itself is not transient.
    pub retry: bool,
}

impl Failure {
    /// A failure that left nothing behind.
    #[must_use]
    pub fn known(error: Error) -> Failure {
        Failure {
            retry: error.is_transient(),
            error,
            unknown: false,
        }
    }
}

/// What became of one renewal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Renewed {
    /// The ttl was restarted.
    Yes,
    /// The permits are held, but somebody has their request locked: try again soon.
    Busy,
    /// The permits are not held any more.
    Lost,
}

/// Which permits to take back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sweep {
    /// Those whose end plus a quarter of their ttl has passed.
    Expired,
    /// Those acquired and last renewed longer ago than this, unless their ttl, or the quarter after it, still runs: somebody may
    /// believe in them.
    Stale(Duration),
    /// Those of an owner that were acquired and last renewed before a time.
    Owner(Arc<str>, StoreTime),
}

/// A share of one semaphore.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Permit {
    /// The semaphore.
    pub semaphore: Arc<str>,
    /// How many of its permits.
    pub count: u32,
    /// Larger than that of every earlier grant of the same semaphore. With a capacity of 1, pass it to the
    /// resource that you protect, and reject any write whose fence is lower than the highest seen: a holder
    /// whose ttl ran out may not know it yet. With a larger capacity that check would reject valid holders,
    /// whose fences differ: there it only identifies the grant.
    pub fence: u64,
}

/// Describes a semaphore that does not have enough free permits.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Exhausted {
    /// The first semaphore, by name, that had too little left.
    pub semaphore: Arc<str>,
    /// Its capacity.
    pub capacity: u32,
    /// How many permits are held; more than the capacity after it was lowered.
    pub held: u64,
    /// How many permits were requested.
    pub wanted: u32,
}

impl Exhausted {
    /// Returns `true` if the wish cannot be fulfilled before the capacity grows.
    pub(crate) fn is_beyond_capacity(&self) -> bool {
        self.wanted > self.capacity
    }
}

impl fmt::Display for Exhausted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the semaphore {:?} is exhausted: {} of {} permits are held, {} wanted",
            self.semaphore, self.held, self.capacity, self.wanted
        )?;
        match self.is_beyond_capacity() {
            true => f.write_str(", which is more than the capacity: set_capacity raises it"),
            false => Ok(()),
        }
    }
}

/// The outcome of a release by external id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Release {
    /// The permits are free again.
    Released,
    /// The permits were already free.
    AlreadyReleased,
    /// There is no request with this external id.
    Unknown,
}

/// The outcome of a renewal by external id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PermitRenewal {
    /// The ttl was restarted.
    Renewed,
    /// Too late: the permits were released, by their holder or by a sweep.
    AlreadyReleased,
    /// There is no request with this external id.
    Unknown,
}

/// A request as the store knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RequestStatus {
    /// Whether its permits are held, even if their ttl has passed and they were not taken back yet.
    pub held: bool,
    /// The permits it holds, or held last.
    pub permits: Vec<Permit>,
    /// The owner that the request named.
    pub owner: Option<Arc<str>>,
    /// How long they last without a renewal.
    pub ttl: Option<Duration>,
    /// How much of that is left. `None` without a ttl, or if released.
    pub expires_in: Option<Duration>,
}

impl RequestStatus {
    /// Returns `true` if this is what `wish` asks for.
    #[must_use]
    pub fn matches(&self, wish: &Wish) -> bool {
        let mut granted: Vec<(&str, u32)> = self
            .permits
            .iter()
            .map(|permit| (&*permit.semaphore, permit.count))
            .collect();
        granted.sort_unstable();
        let wanted = wish.permits.iter().map(|(name, count)| (&**name, *count));
        granted.into_iter().eq(wanted) && self.owner == wish.owner
    }

    /// The refusal of a wish that is not what the external id is in use for.
    #[must_use]
    pub fn conflict(&self, external_id: &str) -> Error {
        let mut parts: Vec<String> = self
            .permits
            .iter()
            .map(|permit| format!("{} of {:?}", permit.count, permit.semaphore))
            .collect();
        if let Some(owner) = &self.owner {
            parts.push(format!("owner {owner:?}"));
        }
        Error::new(
            ErrorKind::Conflict,
            format!(
                "external id {external_id:?} is in use for {}; a different request needs an external \
                 id of its own",
                parts.join(", ")
            ),
        )
    }
}

/// A request that holds permits of a semaphore.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Holder {
    /// The request's external id.
    pub external_id: Arc<str>,
    /// Its owner.
    pub owner: Option<Arc<str>>,
    /// How many permits of the semaphore it holds.
    pub count: u32,
    /// The fence of its permit.
    pub fence: u64,
    /// How long ago the request was first acquired.
    pub held_for: Duration,
    /// How much of its ttl is left; zero once it has passed. `None` without a ttl.
    pub expires_in: Option<Duration>,
}

/// The usage of a semaphore.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Usage {
    /// The semaphore.
    pub semaphore: Arc<str>,
    /// Its capacity.
    pub capacity: u32,
    /// How many permits are held; of these, `expired` go to the next request.
    pub held: u64,
    /// How many of the held permits have passed their ttl plus a quarter: an acquire that would find the semaphore
    /// exhausted takes them back, and so does a sweep.
    pub expired: u64,
    /// How many permits are free; zero if more are held than the capacity after it was lowered.
    pub free: u64,
    /// How many requests hold permits.
    pub requests: u64,
}

/// A capacity change, from the history.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CapacityChange {
    /// The semaphore.
    pub semaphore: Arc<str>,
    /// Who changed it, as the caller said.
    pub changed_by: Option<Arc<str>>,
    /// When it was changed, in epoch milliseconds on the store's clock.
    pub changed_at: u64,
    /// The capacity before the change.
    pub from: u32,
    /// The capacity after the change.
    pub to: u32,
}

/// Why permits were taken back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reason {
    /// Their ttl plus a quarter had passed on the store's clock.
    Expired,
    /// Their owner is dead.
    OwnerDead,
    /// They were not renewed for a long time.
    Stale,
}

/// A request whose permits were taken back.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Swept {
    /// Its external id.
    pub external_id: Arc<str>,
    /// Its owner.
    pub owner: Option<Arc<str>>,
    /// The permits.
    pub permits: Vec<Permit>,
    /// Why they were taken back.
    pub reason: Reason,
}

impl Swept {
    /// Logs it, as what a semaphore does, whichever store it is in.
    pub(crate) fn log(&self) {
        log::info!(
            target: "contend::semaphore",
            "took the permits of {:?} back: {:?}",
            self.external_id,
            self.reason
        );
    }
}

/// A semaphore whose counter differs from the sum of its held permits.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Discrepancy {
    /// The semaphore.
    pub semaphore: Arc<str>,
    /// The value of its counter.
    pub counter: i64,
    /// The sum of its held permits.
    pub permits: i64,
}

/// The error of whoever asks for a semaphore that is not there.
pub(crate) fn no_such_semaphore(name: &str) -> Error {
    Error::new(
        ErrorKind::NotFound,
        format!("there is no semaphore {name:?}; create it first"),
    )
}

/// The error of whoever deletes a semaphore that is held.
pub(crate) fn semaphore_in_use(name: &str, held: i64, capacity: u32) -> Error {
    Error::new(
        ErrorKind::InvalidState,
        format!(
            "the semaphore {name:?} is in use: {held} of {capacity} permits are held; set its capacity \
             to 0 and delete it when they are released"
        ),
    )
}

/// When permits whose ttl is this are taken back, counted from their last renewal: their holder has a
/// quarter of the ttl to stop in.
pub(crate) fn reclaim_after(ttl: Duration) -> Duration {
    ttl + ttl / 4
}
