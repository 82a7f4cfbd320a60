//! The contract between the semaphores and what keeps their permits.
//!
//! # What a store may assume
//! - Names, ids, counts, capacities and ttls were checked, and the permits of a [`Request`] are sorted by
//!   the names of their semaphores.
//! - A call of unknown outcome is repeated with the same token, or not at all: what it was granted then ends
//!   with its ttl, or by release, liveness or age.
//!
//! # What a store must never do
//! - Grant more than a capacity, or a part of a request.
//! - Grant a permit whose fence is not above that of every permit granted before on the semaphore.
//! - Touch another grant than a renewal or release names. No two grants have one token, so a delayed or
//!   repeated call cannot touch what a later one acquired under the same external id.
//! - Take a permit back before its end plus a quarter of its ttl, unless it is told to.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};

/// What keeps semaphores, requests and permits; shared by all handles of a factory.
///
/// Every call may fail with any error of the store; named below is what else a failure says. All but `create` and
/// `set_capacity` are safe to repeat.
pub trait PermitStore: Send + Sync {
    /// Where the semaphores are, without credentials.
    fn realm(&self) -> &str;

    /// Makes what the store needs, where it is missing. Defaults to nothing.
    ///
    /// # Errors
    /// `Misconfigured` beside other tables of the same names; any.
    fn create_tables(&self, _by: Moment) -> Result<()> {
        Ok(())
    }

    /// Makes a semaphore. Returns `false` if there is one already, which is not changed.
    fn create(&self, name: &str, capacity: u32, by: Moment) -> Result<bool>;

    /// Sets a capacity and records the change. Returns the capacity before.
    ///
    /// # Errors
    /// `NotFound`; any.
    fn set_capacity(&self, name: &str, to: u32, who: Option<&str>, by: Moment) -> Result<u32>;

    /// Reads the changes of a capacity, oldest first.
    fn history(&self, name: &str, by: Moment) -> Result<Vec<CapacityChange>>;

    /// Deletes a semaphore of which no permits are held. Returns `false` if there is none.
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

    /// Takes all permits of the request, or none. Where a semaphore is exhausted, takes back what has
    /// expired there and tries once more. `place` is that of a request that waits: a server with lines keeps one for
    /// its process, and grants it nothing for which another process has waited longer.
    ///
    /// # Errors
    /// `NotFound` for a semaphore; `Conflict` where the external id is in use for something else; any. The outcome
    /// counts as unknown, unless the error [`is_not_sent`](Error::is_not_sent) or says that the server refused.
    fn acquire(
        &self,
        request: &Arc<Request>,
        place: Option<&Standing>,
        by: Moment,
    ) -> Result<Outcome>;

    /// Restarts the ttl of each of these, never to an earlier end. Tells of each what became of it; `None` if another
    /// transaction has it locked, which does not hold up the others: try again soon.
    ///
    /// # Errors
    /// Any; belief runs on to its old end.
    fn renew(&self, grants: &[GrantId], by: Moment) -> Result<Vec<Option<PermitRenewal>>>;

    /// Gives the permits back. Returns with that what is free again now.
    fn release(&self, grant: &GrantId, by: Moment) -> Result<(Release, Counts)>;

    /// Takes permits back, each rechecked in the statement that releases it. One that is locked by another
    /// transaction does not hold up the others.
    ///
    /// # Errors
    /// Any, if nothing was released; otherwise what was is returned, to wake those who wait for it.
    fn sweep(&self, sweep: &Sweep, by: Moment) -> Result<Vec<Swept>>;

    /// Reads the owners of held permits, and the store's time of reading.
    fn owners(&self, by: Moment) -> Result<(Vec<Arc<str>>, StoreTime)>;

    /// Deletes at most `batch` rows older than `age`. Returns how many.
    fn purge(&self, what: Purge, age: Duration, batch: usize, by: Moment) -> Result<u64>;

    /// Compares what each semaphore counts as held with its permits, and corrects it if `repair` is set. Returns
    /// those that differed. Defaults to none.
    fn audit(&self, _repair: bool, _by: Moment) -> Result<Vec<Discrepancy>> {
        Ok(Vec::new())
    }

    /// Takes what is called with the name of a semaphore, and how many permits of it are free, when this process is the
    /// first in its line and permits came back. Called once, before the first request. Returns `false` where the server
    /// has no lines: waiting requests poll. Defaults to that.
    fn on_turn(&self, _turn: OnTurn) -> bool {
        false
    }

    /// Leaves the line of a semaphore, in which no request of this process waits any more.
    ///
    /// # Errors
    /// Any; the place is lost by itself in time.
    fn leave(&self, _semaphore: &str, _by: Moment) -> Result<()> {
        Ok(())
    }
}

/// What hears that it is the turn of this process.
pub type OnTurn = Arc<dyn Fn(&str, u64) + Send + Sync>;

/// Where a request stands among those of its process.
#[derive(Clone, Debug, Default)]
pub struct Standing {
    /// The semaphore in whose line it stands; `None` where it has not been found short of one.
    pub line: Option<Arc<str>>,
    /// Other requests of the process stand there.
    pub others: bool,
}

/// Microseconds since the epoch on the store's clock.
pub type StoreTime = u64;

/// Semaphores, and how many permits of each.
pub type Counts = Vec<(Arc<str>, u32)>;

/// A request for permits that passed the checks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The caller's name for the operation.
    pub external_id: Arc<str>,
    /// Who can be asked whether it is alive.
    pub owner: Option<Arc<str>>,
    /// How long the permits last without a renewal.
    pub ttl: Option<Duration>,
    /// Semaphores and counts, sorted by name, each name once.
    pub permits: Counts,
    /// Random; kept with the grant. A retry whose first reply was lost recognises its own grant by it.
    pub token: u64,
    /// Releases what another call holds under the external id, and grants as many new permits, in one transaction.
    /// The count does not change, the fences grow, and the earlier holder learns of it at its next renewal.
    pub take_over: bool,
    /// The external id was made for this request: no earlier call can have used it.
    pub generated: bool,
}

impl Request {
    /// Names what it was granted, or may have been.
    #[must_use]
    pub fn grant_id(&self) -> GrantId {
        GrantId {
            external_id: Arc::clone(&self.external_id),
            token: Some(self.token),
            permits: self.permits.clone(),
        }
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

    /// Returns how much each semaphore has left, in the order of the request.
    #[must_use]
    pub fn free(&self, semaphore: impl Fn(&str) -> Option<(u32, i64)>) -> Vec<u64> {
        let left = |(name, _): &(Arc<str>, u32)| semaphore(name).map_or(0, |(c, h)| free(c, h));
        self.permits.iter().map(left).collect()
    }

    /// Decides about what stands under the external id, granted to `token`.
    ///
    /// # Errors
    /// `Conflict` if it is held for something else.
    pub fn recognise(&self, token: u64, status: RequestStatus) -> Result<Recognised> {
        if !status.held {
            Ok(Recognised::Known(status))
        } else if !status.matches(self) {
            Err(status.conflict(&self.external_id))
        } else if token == self.token {
            Ok(Recognised::Own)
        } else if self.take_over {
            Ok(Recognised::TakeOver)
        } else {
            Ok(Recognised::Known(status))
        }
    }
}

/// Returns what a capacity leaves beside what is held of it.
pub(crate) fn free(capacity: u32, held: i64) -> u64 {
    u64::try_from(i64::from(capacity).saturating_sub(held)).unwrap_or(0)
}

/// What a request finds under its external id.
#[derive(Clone, Debug)]
pub enum Recognised {
    /// The grant of an earlier try of the same call, whose reply was lost.
    Own,
    /// Permits to release in the transaction that grants as many new ones.
    TakeOver,
    /// What another call acquired: nothing to write.
    Known(RequestStatus),
}

/// Names one grant of a request, or whatever the request holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GrantId {
    /// The request's external id.
    pub external_id: Arc<str>,
    /// That of the call that was granted; `None` for whatever the request holds.
    pub token: Option<u64>,
    /// Its semaphores and counts, sorted by name; empty where it has no token.
    pub permits: Counts,
}

impl GrantId {
    /// Names whatever a request holds.
    #[must_use]
    pub fn any(external_id: &str) -> GrantId {
        GrantId {
            external_id: Arc::from(external_id),
            token: None,
            permits: Vec::new(),
        }
    }

    /// Returns `true` if it names the grant with this token.
    #[must_use]
    pub fn names(&self, token: u64) -> bool {
        self.token.is_none_or(|own| own == token)
    }
}

/// What became of a request.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// The permits are held: granted now, or by an earlier try of the same call.
    Granted(Grant),
    /// Another call acquired something under the external id before.
    Known(RequestStatus),
    /// Not enough is left; nothing was written.
    Exhausted(Exhausted),
}

/// Permits, fresh from the store.
#[derive(Clone, Debug)]
pub struct Grant {
    /// Sorted by the names of the semaphores.
    pub permits: Vec<Permit>,
    /// When the request that granted, or that read the grant, was sent.
    pub sent: Moment,
    /// How much of the ttl was left on the store's clock at a time not before `sent`.
    pub remaining: Option<Duration>,
    /// How much each semaphore has left, in the order of the request.
    pub free: Vec<u64>,
}

/// What a purge deletes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purge {
    /// Requests, by the time of their release.
    Requests,
    /// Changes of capacities.
    History,
}

/// Which permits to take back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sweep {
    /// Those whose end plus a quarter of their ttl has passed.
    Expired,
    /// Those acquired and last renewed longer ago than this, unless their ttl, or the quarter after it, still runs: a
    /// holder may believe in them.
    Stale(Duration),
    /// Those of an owner that were acquired and last renewed before a time.
    Owner(Arc<str>, StoreTime),
}

impl Sweep {
    /// What is said of permits that it takes back.
    #[must_use]
    pub fn reason(&self) -> Reason {
        match self {
            Sweep::Expired => Reason::Expired,
            Sweep::Stale(_) => Reason::Stale,
            Sweep::Owner(..) => Reason::OwnerDead,
        }
    }
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
    /// resource that you protect, and reject any write whose fence is lower than the highest seen. A holder
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
    /// Returns `true` if the request cannot be fulfilled before the capacity grows.
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
    /// Returns `true` if this is what `request` asks for.
    fn matches(&self, request: &Request) -> bool {
        let mut granted = counts(&self.permits);
        granted.sort_unstable();
        granted == request.permits && self.owner == request.owner
    }

    /// The refusal of a request that is not what the external id is in use for.
    pub(crate) fn conflict(&self, external_id: &str) -> Error {
        let permits = self.permits.iter();
        let permits = permits.map(|it| format!("{} of {:?}", it.count, it.semaphore));
        let owner = self.owner.iter().map(|it| format!("owner {it:?}"));
        let parts: Vec<String> = permits.chain(owner).collect();
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

/// The semaphores and counts of these permits.
pub(crate) fn counts(permits: &[Permit]) -> Counts {
    let pair = |permit: &Permit| (Arc::clone(&permit.semaphore), permit.count);
    permits.iter().map(pair).collect()
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

/// Logs that permits were taken back, as what a semaphore does, whichever store it is in.
pub(crate) fn log_swept<'a>(ids: impl IntoIterator<Item = &'a Arc<str>>, reason: Reason) {
    for id in ids {
        log::info!(target: "contend::semaphore", "took the permits of {id:?} back: {reason:?}");
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

/// The error for a semaphore that is not there.
pub(crate) fn no_such_semaphore(name: &str) -> Error {
    Error::new(
        ErrorKind::NotFound,
        format!("there is no semaphore {name:?}; create it first"),
    )
}

/// The error of deleting a semaphore that is held.
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
