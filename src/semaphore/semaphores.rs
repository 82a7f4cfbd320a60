//! `Semaphores`: the front.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::guard::PermitGuard;
use super::holds::{Hold, Holds, ReleaseOnce};
use super::maintenance::MaintenanceBuilder;
use super::queue::WaitQueue;
use super::request::{
    Acquisition, Liveness, MAX_TEXT, PermitRequest, Wait, exhausted_error, lease_of, used_up,
};
use crate::backend::permit_store::{
    CapacityChange, Counts, Discrepancy, GrantId, Holder, Outcome, Permit, PermitRenewal,
    PermitStore, Purge, Release, RequestStatus, Sweep, Swept, Usage, counts, no_such_semaphore,
};
use crate::clock::Moment;
use crate::error::ErrorKind::{Conflict, InvalidState, NotFound};
use crate::error::{Error, ErrorKind, Result};
use crate::factory::Core;
use crate::id::LiveId;
use crate::name::check_text;
use crate::probe::Probed;
use crate::thread::Local;
use crate::timer::Next;

/// The ttl of a guard whose request names none.
const DEFAULT_TTL: Duration = Duration::from_secs(30);

/// The longest that one request takes.
pub(super) const REQUEST_LIMIT: Duration = Duration::from_secs(2);

/// The longest that one step of a sweep or a removal takes.
pub(super) const SWEEP_LIMIT: Duration = Duration::from_secs(20);

/// The pause before the second attempt to release what a guard may hold, and before the next if the server could not be
/// reached.
pub(super) const RELEASE_PAUSE: Duration = Duration::from_millis(250);

/// Tries of one call, the first included.
pub(super) const MAX_TRIES: u32 = 3;

/// The counting semaphores of one factory. Cheap to clone; what it holds ends with the last clone and
/// the last guard.
///
/// ```no_run
/// use contend::semaphore::PermitRequest;
/// use std::time::Duration;
///
/// let factory = contend::connect("mysql://worker:secret@db.internal/jobs")?;
/// let semaphores = factory.semaphores()?;
/// semaphores.create_tables()?;
/// semaphores.create("backup", 2)?;
///
/// let request = PermitRequest::new("job-123").permits("backup", 1);
/// let guard = semaphores.guard(&request, Duration::from_secs(5))?; // waits for up to 5 s
/// println!("working with fence {:?}", guard.fence("backup"));
/// drop(guard); // released
/// # Ok::<(), contend::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Semaphores {
    pub(super) shared: Local<Arc<SharedSemaphores>>,
    default_ttl: Duration,
}

/// What all handles of a factory share.
pub(crate) struct SharedSemaphores {
    pub(super) holds: Holds,
    pub(super) queue: Arc<WaitQueue>,
    /// The server tells which process is next; otherwise each wakes its own requests.
    has_lines: bool,
    /// Held while a release is tried again.
    pub(super) releasing: Mutex<()>,
    pub(super) probe: Probed,
    pub(super) store: Arc<dyn PermitStore>,
    pub(super) core: Arc<Core>,
}

impl fmt::Debug for SharedSemaphores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.store.realm())
    }
}

impl Semaphores {
    pub(crate) fn new(shared: Arc<SharedSemaphores>) -> Semaphores {
        Semaphores {
            shared: Local::new(shared),
            default_ttl: DEFAULT_TTL,
        }
    }

    /// Sets the ttl of guards whose request sets none. Defaults to 30 s.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// let semaphores = contend::connect("memory://with-ttl-doc")?.semaphores()?;
    /// let semaphores = semaphores.with_ttl(Duration::from_secs(8))?; // free 10 s after a crash
    /// semaphores.create("downloads", 5)?;
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// # Errors
    /// `InvalidInput` if it is too short to be renewed, or too long.
    pub fn with_ttl(mut self, ttl: Duration) -> Result<Semaphores> {
        lease_of(ttl)?;
        self.default_ttl = ttl;
        Ok(self)
    }

    /// Returns the location of the semaphores, without credentials.
    ///
    /// # Errors
    /// `Forked` in a child process.
    pub fn realm(&self) -> Result<&str> {
        Ok(self.shared.get()?.store.realm())
    }

    /// Creates the tables if they are missing. Does nothing on memory and Redis.
    ///
    /// ```
    /// let semaphores = contend::connect("memory://create-tables-doc")?.semaphores()?;
    /// semaphores.create_tables()?; // does nothing if they are there
    /// semaphores.create("downloads", 5)?;
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Misconfigured` if tables of the same names exist that are not contend's or are of another
    /// version; `Denied` if the user may not create tables; `Unreachable` and the like.
    pub fn create_tables(&self) -> Result<()> {
        let shared = self.shared.get()?;
        shared.retried(SWEEP_LIMIT, |store, by| store.create_tables(by))
    }

    /// Creates a semaphore if there is none of that name. Returns `true` if it was created, and `false` if
    /// it already exists. An existing semaphore **keeps its capacity**, whatever is requested here: only
    /// [`set_capacity`](Semaphores::set_capacity) changes it. So every process may call this when it starts.
    ///
    /// ```
    /// let semaphores = contend::connect("memory://semaphores-create-doc")?.semaphores()?;
    /// assert!(semaphores.create("downloads", 5)?);
    /// assert!(!semaphores.create("downloads", 9)?); // it is there, and stays as it is
    /// assert_eq!(semaphores.usage("downloads")?.capacity, 5);
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// # Errors
    /// `InvalidInput` for a name or capacity that is not allowed; `Misconfigured` if the tables are
    /// missing; `Unreachable` and the like.
    pub fn create(&self, name: &str, capacity: u32) -> Result<bool> {
        check_name(name)?;
        check_capacity(capacity)?;
        let shared = self.shared.get()?;
        shared.call(REQUEST_LIMIT, |store, by| store.create(name, capacity, by))
    }

    /// Changes the capacity of a semaphore and records who changed it. Returns the previous capacity. If
    /// it is lowered below what is held, nothing is taken away, but nothing is granted until enough is
    /// released.
    ///
    /// ```
    /// let semaphores = contend::connect("memory://set-capacity-doc")?.semaphores()?;
    /// semaphores.create("downloads", 5)?;
    /// assert_eq!(semaphores.set_capacity("downloads", 9, Some("anna"))?, 5);
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// # Errors
    /// `NotFound`; otherwise as [`create`](Semaphores::create).
    pub fn set_capacity(&self, name: &str, capacity: u32, changed_by: Option<&str>) -> Result<u32> {
        check_name(name)?;
        check_capacity(capacity)?;
        if let Some(changed_by) = changed_by {
            check_text("changed_by", changed_by, MAX_TEXT)?;
        }
        let shared = self.shared.get()?;
        let before = shared.call(REQUEST_LIMIT, |store, by| {
            store.set_capacity(name, capacity, changed_by, by)
        })?;
        let more = capacity.saturating_sub(before);
        shared.queue.released(name, u64::from(more));
        Ok(before)
    }

    /// Returns the capacity changes of a semaphore, oldest first.
    ///
    /// ```
    /// let semaphores = contend::connect("memory://history-doc")?.semaphores()?;
    /// semaphores.create("downloads", 5)?;
    /// semaphores.set_capacity("downloads", 9, Some("anna"))?;
    /// for change in semaphores.history("downloads")? {
    ///     println!("{:?}: from {} to {}", change.changed_by, change.from, change.to);
    /// }
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`create`](Semaphores::create).
    pub fn history(&self, name: &str) -> Result<Vec<CapacityChange>> {
        check_name(name)?;
        self.ask(|store, by| store.history(name, by))
    }

    /// Deletes a semaphore of which no permits are held. Returns `false` if it does not exist. Permits that have
    /// expired count as held until [`sweep_expired`](Semaphores::sweep_expired) takes them back.
    ///
    /// ```
    /// let semaphores = contend::connect("memory://semaphores-delete-doc")?.semaphores()?;
    /// semaphores.create("downloads", 5)?;
    /// assert!(semaphores.delete("downloads")?);
    /// assert!(!semaphores.delete("downloads")?); // it is gone
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// # Errors
    /// `InvalidState` while it is in use; otherwise as [`create`](Semaphores::create).
    pub fn delete(&self, name: &str) -> Result<bool> {
        check_name(name)?;
        let shared = self.shared.get()?;
        shared.call(REQUEST_LIMIT, |store, by| store.delete(name, by))
    }

    /// Returns all semaphores by name, and how full they are.
    ///
    /// ```
    /// let semaphores = contend::connect("memory://semaphores-list-doc")?.semaphores()?;
    /// semaphores.create("downloads", 5)?;
    /// for usage in semaphores.list()? {
    ///     println!("{}: {} of {} held", usage.semaphore, usage.held, usage.capacity);
    /// }
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Misconfigured` without tables; `Unreachable` and the like.
    pub fn list(&self) -> Result<Vec<Usage>> {
        self.ask(|store, by| store.usage(None, by))
    }

    /// Returns how full a semaphore is.
    ///
    /// ```
    /// use contend::semaphore::PermitRequest;
    /// use std::time::Duration;
    ///
    /// let semaphores = contend::connect("memory://usage-doc")?.semaphores()?;
    /// semaphores.create("downloads", 5)?;
    /// let request = PermitRequest::generated().permits("downloads", 2);
    /// let guard = semaphores.guard(&request, Duration::ZERO)?;
    /// let usage = semaphores.usage("downloads")?;
    /// assert_eq!((usage.held, usage.free), (2, 3));
    /// # drop(guard);
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// # Errors
    /// `NotFound`; otherwise as [`create`](Semaphores::create).
    pub fn usage(&self, name: &str) -> Result<Usage> {
        check_name(name)?;
        let mut found = self.ask(|store, by| store.usage(Some(name), by))?;
        found.pop().ok_or_else(|| no_such_semaphore(name))
    }

    /// Returns who holds permits of a semaphore, oldest grant first.
    ///
    /// ```
    /// use contend::semaphore::PermitRequest;
    ///
    /// let semaphores = contend::connect("memory://holders-doc")?.semaphores()?;
    /// semaphores.create("downloads", 5)?;
    /// semaphores.acquire(&PermitRequest::new("job-123").permits("downloads", 2))?;
    /// let holders = semaphores.holders("downloads")?;
    /// assert_eq!((&*holders[0].external_id, holders[0].count), ("job-123", 2));
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// # Errors
    /// `NotFound`; otherwise as [`create`](Semaphores::create).
    pub fn holders(&self, name: &str) -> Result<Vec<Holder>> {
        check_name(name)?;
        self.ask(|store, by| store.holders(name, by))
    }

    /// Acquires the permits, all of them or none, and does not wait if there are not enough.
    ///
    /// Nothing renews them, and nothing releases them when the process ends. They are held until
    /// [`release`](Semaphores::release), or until maintenance takes them back. If the request has a ttl, they end
    /// when that and a quarter of it have passed. Use this for operations that outlive the process, and a
    /// [`guard`](Semaphores::guard) otherwise.
    ///
    /// Repeating the call with the same request is safe, from any process: it gets the same permits and no more.
    /// After a deadlock, a lost connection or a lock wait timeout, it is tried again, up to three times in all. An
    /// error may leave the outcome unknown. Repeat the request: it finds its grant. What is not asked for again ends
    /// with its ttl; without one it stays held until it is [released](Semaphores::release), or until
    /// [`sweep_dead`](Semaphores::sweep_dead), [`sweep_stale`](Semaphores::sweep_stale) or
    /// [`maintenance`](Semaphores::maintenance) takes it back.
    ///
    /// ```
    /// use contend::semaphore::{PermitRequest, Release};
    ///
    /// let semaphores = contend::connect("memory://acquire-doc")?.semaphores()?;
    /// semaphores.create("downloads", 5)?;
    /// let request = PermitRequest::new("job-123").permits("downloads", 2);
    /// let permits = semaphores.acquire(&request)?.into_permits()?;
    ///
    /// // Another process may repeat the request: it has the same permits.
    /// assert_eq!(semaphores.acquire(&request)?.into_permits()?, permits);
    /// assert_eq!(semaphores.release("job-123")?, Release::Released);
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// # Errors
    /// `InvalidInput` for an invalid request; `NotFound`; `Conflict` if the external id holds something
    /// else; `Timeout`, `Unreachable` and the like.
    pub fn acquire(&self, request: &PermitRequest) -> Result<Acquisition> {
        self.acquire_for(request, Duration::ZERO)
    }

    /// As [`acquire`](Semaphores::acquire), but waits while a semaphore is exhausted, also while the server is
    /// unreachable or a capacity is smaller than what is requested; the latter is logged once, as a warning.
    ///
    /// ```
    /// use contend::semaphore::{Acquisition, PermitRequest};
    /// use std::time::Duration;
    ///
    /// let semaphores = contend::connect("memory://acquire-for-doc")?.semaphores()?;
    /// semaphores.create("downloads", 1)?;
    /// let request = PermitRequest::new("job-123").permits("downloads", 1);
    /// semaphores.acquire(&request)?;
    ///
    /// let other = PermitRequest::new("job-124").permits("downloads", 1);
    /// match semaphores.acquire_for(&other, Duration::from_millis(10))? {
    ///     Acquisition::Exhausted(short) => println!("{short}"),
    ///     acquired => println!("{acquired:?}"),
    /// }
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`acquire`](Semaphores::acquire); `Cancelled`.
    pub fn acquire_for(
        &self,
        request: &PermitRequest,
        wait: impl Into<Wait>,
    ) -> Result<Acquisition> {
        let shared = self.shared.get()?;
        let request = Arc::new(request.check(None)?);
        Ok(match shared.acquire(&request, &wait.into())? {
            // An earlier try got them, and its answer came after their end.
            Outcome::Granted(grant) if grant.remaining == Some(Duration::ZERO) => {
                Acquisition::AlreadyAcquired {
                    permits: grant.permits,
                    expires_in: grant.remaining,
                }
            }
            Outcome::Granted(grant) => Acquisition::Acquired(grant.permits),
            Outcome::Known(status) if !status.held => Acquisition::AlreadyReleased,
            Outcome::Known(status) => Acquisition::AlreadyAcquired {
                permits: status.permits,
                expires_in: status.expires_in,
            },
            Outcome::Exhausted(exhausted) => Acquisition::Exhausted(exhausted),
        })
    }

    /// Waits for the permits and holds them until the guard is dropped, renewed in the background.
    ///
    /// Permits that an earlier call holds under the same external id, in this process or another one, are
    /// taken over: one transaction releases them and grants as many new ones, with higher fences. Another
    /// live guard of the request in this factory is never taken over.
    ///
    /// ```
    /// use contend::semaphore::PermitRequest;
    /// use std::time::Duration;
    ///
    /// let semaphores = contend::connect("memory://semaphores-guard-doc")?.semaphores()?;
    /// semaphores.create("downloads", 1)?;
    /// let request = PermitRequest::generated().permits("downloads", 1);
    /// let guard = semaphores.guard(&request, Duration::from_secs(5))?; // waits for up to 5 s
    ///
    /// let error = semaphores.guard(&request, Duration::ZERO).unwrap_err(); // does not wait
    /// assert_eq!(error.kind(), contend::ErrorKind::Exhausted);
    /// # drop(guard);
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Exhausted` after the timeout; `Conflict` for an external id that was released or holds something
    /// else; `DuplicateContender` for one with a live guard of this factory; `Cancelled`; otherwise as
    /// [`acquire`](Semaphores::acquire).
    pub fn guard(&self, request: &PermitRequest, wait: impl Into<Wait>) -> Result<PermitGuard> {
        let shared = self.shared.get()?;
        let request = Arc::new(request.check(Some(self.default_ttl))?);
        let lease = lease_of(request.ttl.unwrap_or(self.default_ttl))?;
        let id = live_id(shared, &request.external_id)?;
        let named = |error: Error| error.context(format_args!("request {:?}", request.external_id));
        let grant = match shared.acquire(&request, &wait.into())? {
            Outcome::Granted(grant) => grant,
            Outcome::Known(_) => return Err(named(used_up())),
            Outcome::Exhausted(exhausted) => return Err(named(exhausted_error(&exhausted))),
        };
        let hold = Arc::new(Hold::new(&request, grant, lease));
        PermitGuard::new(shared, hold, id).map_err(|error| {
            shared.release_later(request.grant_id(), lease.ttl());
            named(error)
        })
    }

    /// Gives back the permits held under an external id. Safe to repeat, from any process. A guard that
    /// holds them is lost: at once in this factory, at its next renewal in another one.
    ///
    /// ```
    /// use contend::semaphore::{PermitRequest, Release};
    ///
    /// let semaphores = contend::connect("memory://semaphores-release-doc")?.semaphores()?;
    /// semaphores.create("downloads", 5)?;
    /// semaphores.acquire(&PermitRequest::new("job-123").permits("downloads", 2))?;
    /// assert_eq!(semaphores.release("job-123")?, Release::Released);
    /// assert_eq!(semaphores.release("job-123")?, Release::AlreadyReleased);
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// # Errors
    /// `InvalidInput` for an external id that is not allowed; `Unreachable` and the like.
    pub fn release(&self, external_id: &str) -> Result<Release> {
        check_text("external id", external_id, MAX_TEXT)?;
        let shared = self.shared.get()?;
        // A guard of this factory stops believing before its permits are given back.
        shared
            .holds
            .end(|hold| *hold.grant.external_id == *external_id);
        let grant = GrantId::any(external_id);
        let mut tries = 0;
        let (release, freed) = shared.retried(REQUEST_LIMIT, |store, by| {
            tries += 1;
            store.release(&grant, by)
        })?;
        shared.wake(&freed);
        Ok(match release {
            // A try whose answer was lost may have done it.
            Release::AlreadyReleased if tries > 1 => Release::Released,
            release => release,
        })
    }

    /// Restarts the ttl of the permits held under an external id, even after it has ended, if they were
    /// not taken back. Without a ttl, this keeps the request from becoming stale.
    ///
    /// ```
    /// use contend::semaphore::{PermitRenewal, PermitRequest};
    /// use std::time::Duration;
    ///
    /// let semaphores = contend::connect("memory://semaphores-renew-doc")?.semaphores()?;
    /// semaphores.create("downloads", 5)?;
    /// let request = PermitRequest::new("job-123").permits("downloads", 2);
    /// semaphores.acquire(&request.ttl(Duration::from_secs(60)))?;
    /// assert_eq!(semaphores.renew("job-123")?, PermitRenewal::Renewed); // 60 s more from now
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`release`](Semaphores::release).
    pub fn renew(&self, external_id: &str) -> Result<PermitRenewal> {
        check_text("external id", external_id, MAX_TEXT)?;
        let grant = [GrantId::any(external_id)];
        self.ask(|store, by| {
            store.renew(&grant, by)?.pop().flatten().ok_or_else(|| {
                let text = "is locked by another transaction; try again";
                Error::new(
                    ErrorKind::Unavailable,
                    format!("request {external_id:?} {text}"),
                )
            })
        })
    }

    /// Returns the status of a request; `None` if it does not exist, or was deleted because of its age.
    ///
    /// ```
    /// use contend::semaphore::PermitRequest;
    ///
    /// let semaphores = contend::connect("memory://semaphores-status-doc")?.semaphores()?;
    /// semaphores.create("downloads", 5)?;
    /// semaphores.acquire(&PermitRequest::new("job-123").permits("downloads", 2))?;
    /// assert!(semaphores.status("job-123")?.is_some_and(|status| status.held));
    /// assert!(semaphores.status("job-124")?.is_none());
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`release`](Semaphores::release).
    pub fn status(&self, external_id: &str) -> Result<Option<RequestStatus>> {
        check_text("external id", external_id, MAX_TEXT)?;
        self.ask(|store, by| store.status(external_id, by))
    }

    /// Takes back all permits whose ttl plus a quarter has passed on the store's clock. An acquire that
    /// finds a semaphore exhausted does this for its own semaphores.
    ///
    /// ```
    /// let semaphores = contend::connect("memory://sweep-expired-doc")?.semaphores()?;
    /// for swept in semaphores.sweep_expired()? {
    ///     println!("{:?}: {:?}", swept.external_id, swept.reason);
    /// }
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Misconfigured` if the tables are missing; `Unreachable` and the like. If an error occurs after
    /// something was taken back, it is logged, and what was taken back is returned: the rest is left to the
    /// next sweep.
    pub fn sweep_expired(&self) -> Result<Vec<Swept>> {
        self.shared.get()?.sweep(&Sweep::Expired)
    }

    /// Calls `liveness` for each owner of held permits, and takes back those of dead owners. What an owner
    /// acquires or renews after that call is left alone; a call that panics counts as [`Liveness::Unknown`]. A
    /// guard of a dead owner is lost with its permits if it is of this factory, and at its next renewal otherwise.
    ///
    /// ```
    /// use contend::semaphore::{Liveness, PermitRequest};
    ///
    /// let semaphores = contend::connect("memory://sweep-dead-doc")?.semaphores()?;
    /// semaphores.create("downloads", 5)?;
    /// let request = PermitRequest::new("job-123").permits("downloads", 2).owner("host-7");
    /// semaphores.acquire(&request)?;
    /// let swept = semaphores.sweep_dead(|owner| match owner {
    ///     "host-7" => Liveness::Dead, // as the inventory says
    ///     _ => Liveness::Unknown,
    /// })?;
    /// assert_eq!(&*swept[0].external_id, "job-123");
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`sweep_expired`](Semaphores::sweep_expired).
    pub fn sweep_dead(&self, mut liveness: impl FnMut(&str) -> Liveness) -> Result<Vec<Swept>> {
        self.shared.get()?.sweep_dead(&mut liveness)
    }

    /// Takes back all permits that were acquired and last renewed longer ago than `age`, except those whose ttl
    /// plus a quarter has not passed yet: their holder may still believe that it has them.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// let semaphores = contend::connect("memory://sweep-stale-doc")?.semaphores()?;
    /// let day = Duration::from_secs(24 * 3600);
    /// assert!(semaphores.sweep_stale(day)?.is_empty());
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`sweep_expired`](Semaphores::sweep_expired).
    pub fn sweep_stale(&self, age: Duration) -> Result<Vec<Swept>> {
        self.shared.get()?.sweep(&Sweep::Stale(age))
    }

    /// Deletes requests that were released longer ago than `age`, `batch` at a time. Returns how many
    /// were deleted. The external id of a deleted request is forgotten.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// let semaphores = contend::connect("memory://delete-requests-doc")?.semaphores()?;
    /// let week = Duration::from_secs(7 * 24 * 3600);
    /// println!("{} requests deleted", semaphores.delete_requests(week, 800)?);
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// # Errors
    /// `InvalidInput` for a batch of zero; otherwise as [`sweep_expired`](Semaphores::sweep_expired).
    pub fn delete_requests(&self, age: Duration, batch: usize) -> Result<u64> {
        (self.shared.get()?).purge(Purge::Requests, age, batch, || true)
    }

    /// Deletes capacity changes older than `age`, `batch` at a time. Returns how many were deleted.
    ///
    /// # Errors
    /// As [`delete_requests`](Semaphores::delete_requests).
    pub fn delete_history(&self, age: Duration, batch: usize) -> Result<u64> {
        (self.shared.get()?).purge(Purge::History, age, batch, || true)
    }

    /// Compares the counter of every semaphore with its permits. Returns those that are wrong.
    ///
    /// A counter changes in the transaction that changes the permits, so a crash leaves both or neither.
    /// This finds changes made to the tables by hand. It reads every held permit.
    ///
    /// ```
    /// let semaphores = contend::connect("memory://check-doc")?.semaphores()?;
    /// semaphores.create("downloads", 5)?;
    /// assert!(semaphores.check()?.is_empty());
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`sweep_expired`](Semaphores::sweep_expired).
    pub fn check(&self) -> Result<Vec<Discrepancy>> {
        (self.shared.get()?).retried(SWEEP_LIMIT, |store, by| store.audit(false, by))
    }

    /// Corrects wrong counters. Returns those that were wrong.
    ///
    /// # Errors
    /// As [`sweep_expired`](Semaphores::sweep_expired).
    pub fn repair(&self) -> Result<Vec<Discrepancy>> {
        (self.shared.get()?).retried(SWEEP_LIMIT, |store, by| store.audit(true, by))
    }

    /// Returns a builder for maintenance in the background: sweeps and removals, by one process at a
    /// time.
    ///
    /// ```
    /// let factory = contend::connect("memory://maintenance-doc")?;
    /// let maintenance = factory.semaphores()?.maintenance().start(&factory)?;
    /// // It works for as long as `maintenance` lives.
    /// # drop(maintenance);
    /// # Ok::<(), contend::Error>(())
    /// ```
    pub fn maintenance(&self) -> MaintenanceBuilder {
        MaintenanceBuilder::new(self.clone())
    }

    /// Makes a request that is safe to repeat.
    fn ask<T>(&self, call: impl FnMut(&dyn PermitStore, Moment) -> Result<T>) -> Result<T> {
        self.shared.get()?.retried(REQUEST_LIMIT, call)
    }
}

impl SharedSemaphores {
    pub(crate) fn new(core: &Arc<Core>) -> Result<Arc<SharedSemaphores>> {
        let (store, queue) = (core.backend.permits()?, Arc::<WaitQueue>::default());
        let on_turn = Arc::clone(&queue);
        let on_turn = move |name: &str, free| on_turn.released(name, free);
        Ok(Arc::new(SharedSemaphores {
            holds: Holds::default(),
            queue,
            has_lines: store.on_turn(Arc::new(on_turn)),
            releasing: Mutex::new(()),
            probe: core.probe.clone(),
            store,
            core: Arc::clone(core),
        }))
    }

    /// Calls the store, and notes whether it answered.
    pub(super) fn call<T>(
        &self,
        limit: Duration,
        call: impl FnOnce(&dyn PermitStore, Moment) -> Result<T>,
    ) -> Result<T> {
        let sent = Moment::now();
        let outcome = call(&*self.store, sent + limit);
        let is_answer = |kind| matches!(kind, NotFound | Conflict | InvalidState);
        let failed = (outcome.as_ref().err()).filter(|error| !is_answer(error.kind()));
        self.core.link.lock().note(sent, Moment::now(), failed);
        outcome
    }

    /// Three tries of what is safe to repeat.
    pub(super) fn retried<T>(
        &self,
        limit: Duration,
        mut call: impl FnMut(&dyn PermitStore, Moment) -> Result<T>,
    ) -> Result<T> {
        // No try begins after the time of one.
        let by = Moment::now() + limit;
        let mut tries = 1;
        loop {
            match self.call(limit, &mut call) {
                Err(error)
                    if error.is_transient() && tries < MAX_TRIES && !by.remaining().is_zero() =>
                {
                    tries += 1;
                    // Two that met in a deadlock must not meet again.
                    let pause = rand::random::<u64>() % 15_000 + 5_000;
                    std::thread::sleep(Duration::from_micros(pause));
                }
                outcome => return outcome,
            }
        }
    }

    /// Releases a grant, and calls requests that wait for its permits.
    pub(super) fn give_back(&self, grant: &GrantId) -> Result<Release> {
        let (release, freed) = self.call(REQUEST_LIMIT, |store, by| store.release(grant, by))?;
        self.wake(&freed);
        Ok(release)
    }

    /// Makes one attempt in the background to release what a guard may hold, for a ttl at most. A retry by a guard
    /// has another token, which this does not touch.
    pub(super) fn release_later(self: &Arc<SharedSemaphores>, grant: GrantId, ttl: Duration) {
        let release = Arc::new(ReleaseOnce {
            shared: Arc::clone(self),
            grant,
            until: Moment::now() + ttl,
        });
        let next = Next::at(Moment::now() + RELEASE_PAUSE);
        // Else they end with their ttl.
        drop(self.core.timer.add(release, next));
    }

    /// Permits were given back: requests that they suffice for are called, unless the server calls the process whose
    /// turn it is.
    fn wake(&self, permits: &Counts) {
        for (name, count) in permits.iter().filter(|_| !self.has_lines) {
            self.queue.released(name, u64::from(*count));
        }
    }

    /// Guards of this process hold these permits (`sign` 1), or do not any more (-1).
    pub(super) fn count(&self, permits: &[Permit], sign: i64) {
        for permit in permits {
            let change = sign * i64::from(permit.count);
            self.probe
                .tell(|probe| probe.permits(&permit.semaphore, change));
        }
    }

    pub(super) fn sweep(&self, sweep: &Sweep) -> Result<Vec<Swept>> {
        let swept = self.retried(SWEEP_LIMIT, |store, by| store.sweep(sweep, by))?;
        for one in &swept {
            self.holds.end(|hold| hold.permits == one.permits);
            self.wake(&counts(&one.permits));
        }
        Ok(swept)
    }

    pub(super) fn sweep_dead(
        &self,
        liveness: &mut dyn FnMut(&str) -> Liveness,
    ) -> Result<Vec<Swept>> {
        let mut swept = Vec::new();
        let (owners, asked) = self.retried(SWEEP_LIMIT, |store, by| store.owners(by))?;
        for owner in owners {
            let answer = catch_unwind(AssertUnwindSafe(|| liveness(&owner)));
            let answer = answer.unwrap_or_else(|_| {
                log::error!("the liveness check of {owner:?} panicked: its permits are left alone");
                Liveness::Unknown
            });
            if answer == Liveness::Dead {
                swept.extend(self.sweep(&Sweep::Owner(owner, asked))?);
            }
        }
        Ok(swept)
    }

    /// Deletes what is older than `age`, a batch at a time, while `go_on` says so. Returns how much.
    pub(super) fn purge(
        &self,
        what: Purge,
        age: Duration,
        batch: usize,
        go_on: impl Fn() -> bool,
    ) -> Result<u64> {
        if batch == 0 {
            return Err(Error::invalid("a batch of no rows would never end"));
        }
        let mut sum = 0;
        while go_on() {
            let done = self.retried(SWEEP_LIMIT, |store, by| store.purge(what, age, batch, by))?;
            sum += done;
            if done < batch as u64 {
                break;
            }
        }
        Ok(sum)
    }
}

/// The right to the only guard of a request in its factory.
fn live_id(shared: &SharedSemaphores, external_id: &Arc<str>) -> Result<LiveId> {
    // No mutex has an empty name.
    LiveId::new(&shared.core.registry, &Arc::from(""), external_id).map_err(|_| {
        Error::new(
            ErrorKind::DuplicateContender,
            format!(
                "request {external_id:?} has a live guard of this factory, or is being acquired; drop that one \
                 first, or use an external id of its own for each operation"
            ),
        )
    })
}

fn check_name(name: &str) -> Result<()> {
    check_text("semaphore name", name, MAX_TEXT)
}

fn check_capacity(capacity: u32) -> Result<()> {
    if i32::try_from(capacity).is_ok() {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "a capacity of {capacity} is too much; at most {} is possible",
        i32::MAX
    )))
}
