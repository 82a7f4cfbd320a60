//! `Semaphores`: the front.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use super::acquire::{Attempts, FIRST_POLL};
use super::doubts::Doubts;
use super::guard::{OnlyGuard, PermitGuard, end_guards};
use super::maintenance::MaintenanceBuilder;
use super::noted_store::NotedStore;
use super::outcome::{Acquisition, Liveness, exhausted_error, used_up};
use super::renewals::{Keep, Renewals};
use super::request::{MAX_TEXT, PermitRequest, Wait, check_ttl, lease_of};
use super::wait_list::WaitList;
use crate::backend::permit_store::{
    CapacityChange, Decision, Discrepancy, Grant, Held, Holder, OnHeld, PermitRenewal, PermitStore,
    Release, RequestStatus, Sweep, Swept, Usage, Wish, no_such_semaphore,
};
use crate::cancel::{Cancel, cancelled};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::factory::Inner;
use crate::name::check_text;
use crate::probe::Probed;
use crate::snapshot::Snapshot;
use crate::thread::Local;
use crate::url::Url;

/// The ttl of a guard whose request names none.
const DEFAULT_TTL: Duration = Duration::from_secs(30);

/// The longest that one call takes.
pub(super) const CALL: Duration = Duration::from_secs(5);

/// The longest that one step of a sweep or a removal takes.
const LONG_CALL: Duration = Duration::from_secs(20);

/// Tries of one call, the first included.
pub(super) const MAX_TRIES: u32 = 3;

/// The counting semaphores of one factory. Cheap to clone; what it holds ends with the last clone and
/// the last guard.
///
/// ```no_run
/// use contend::semaphore::{PermitRequest, Semaphores};
/// use std::time::Duration;
///
/// let semaphores = Semaphores::connect("mysql://worker:secret@db.internal/jobs")?;
/// semaphores.create_tables()?;
/// semaphores.create("backup", 2)?;
///
/// let request = PermitRequest::new("job-123").permits("backup", 1);
/// let guard = semaphores.guard(&request, Duration::from_secs(5))?; // waits up to five seconds
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
pub(super) struct SharedSemaphores {
    pub(super) renewals: Arc<Renewals>,
    pub(super) waiting: WaitList,
    pub(super) doubts: Arc<Doubts>,
    pub(super) probe: Probed,
    pub(super) store: Arc<dyn PermitStore>,
    pub(super) factory: Arc<Inner>,
}

impl fmt::Debug for SharedSemaphores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.store.realm())
    }
}

impl Semaphores {
    /// Connects to the semaphores at `url`, as [`contend::connect`](crate::connect) does, for a program
    /// that uses nothing else. The URL parameter `ttl` sets the ttl of guards. Does no I/O.
    ///
    /// # Errors
    /// `InvalidInput` for an invalid URL, or one with a parameter that is unknown or does not apply to
    /// semaphores; `Unsupported` for a backend without semaphores.
    pub fn connect(url: &str) -> Result<Semaphores> {
        let url = Url::parse(url)?;
        for key in [
            "transition",
            "initial_delay",
            "table",
            "create_table",
            "wakeups",
        ] {
            if url.text(key).is_some() {
                return Err(Error::invalid(format!(
                    "URL parameter {key} is about mutexes and means nothing to semaphores; connect a \
                     factory and call semaphores() to use both"
                )));
            }
        }
        let mut ttl = None;
        url.set("ttl", &mut ttl)?;
        let semaphores = crate::backend::connect_url(&url)?.semaphores()?;
        match ttl {
            Some(ttl) => semaphores.with_ttl(ttl),
            None => Ok(semaphores),
        }
    }

    pub(crate) fn new(factory: &Arc<Inner>) -> Result<Semaphores> {
        let snapshot = Arc::<Snapshot>::default();
        factory.registry.count(&snapshot);
        let store: Arc<dyn PermitStore> = Arc::new(NotedStore {
            store: factory.backend.permits()?,
            snapshot,
        });
        let shared = SharedSemaphores {
            renewals: Arc::new(Renewals::new(Arc::clone(&store))),
            waiting: WaitList::default(),
            doubts: Doubts::of(store.realm()),
            probe: factory.probe(),
            store,
            factory: Arc::clone(factory),
        };
        Ok(Semaphores {
            shared: Local::new(Arc::new(shared)),
            default_ttl: DEFAULT_TTL,
        })
    }

    /// Sets the ttl of guards whose request sets none. Defaults to 30 s.
    ///
    /// # Errors
    /// `InvalidInput` if it is too short to be renewed, or too long.
    pub fn with_ttl(mut self, ttl: Duration) -> Result<Semaphores> {
        check_ttl(ttl, self.store()?.min_ttl())?;
        self.default_ttl = ttl;
        Ok(self)
    }

    /// Returns the location of the semaphores, without credentials.
    ///
    /// # Errors
    /// `Forked` in a child process.
    pub fn realm(&self) -> Result<&str> {
        Ok(self.store()?.realm())
    }

    /// Creates the tables if they are missing. Does nothing on memory.
    ///
    /// # Errors
    /// `Misconfigured` if tables of the same names exist that are not contend's or are of another
    /// version; `Denied` if the user may not create tables; `Unreachable` and the like.
    pub fn create_tables(&self) -> Result<()> {
        let store = self.store()?;
        retried(|| store.create_tables(within(LONG_CALL)))
    }

    /// Creates a semaphore if there is none of that name. Returns `true` if it was created, and `false` if
    /// it already exists. An existing semaphore **keeps its capacity**, whatever is requested here: only
    /// [`set_capacity`](Semaphores::set_capacity) changes it. So every process may call this when it starts.
    ///
    /// # Errors
    /// `InvalidInput` for a name or capacity that is not allowed; `Misconfigured` if the tables are
    /// missing; `Unreachable` and the like.
    pub fn create(&self, name: &str, capacity: u32) -> Result<bool> {
        check_name(name)?;
        check_capacity(capacity)?;
        self.store()?.create(name, capacity, within(CALL))
    }

    /// Changes the capacity of a semaphore and records who changed it. Returns the previous capacity. If
    /// it is lowered below what is held, nothing is taken away, but nothing is granted until enough is
    /// released.
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
        let before = shared
            .store
            .set_capacity(name, capacity, changed_by, within(CALL))?;
        match capacity.checked_sub(before) {
            Some(more) if more > 0 => shared.waiting.released([(name, more)]),
            _ => shared.waiting.changed(name),
        }
        Ok(before)
    }

    /// Returns the capacity changes of a semaphore, oldest first.
    ///
    /// # Errors
    /// As [`create`](Semaphores::create).
    pub fn history(&self, name: &str) -> Result<Vec<CapacityChange>> {
        check_name(name)?;
        let store = self.store()?;
        retried(|| store.history(name, within(CALL)))
    }

    /// Deletes a semaphore of which no permits are held. Returns `false` if it does not exist. If permits are
    /// held, those that have expired are taken back first, as by [`sweep_expired`](Semaphores::sweep_expired).
    ///
    /// # Errors
    /// `InvalidState` while it is in use; otherwise as [`create`](Semaphores::create).
    pub fn delete(&self, name: &str) -> Result<bool> {
        check_name(name)?;
        let shared = self.shared.get()?;
        match shared.store.delete(name, within(CALL)) {
            Err(error) if error.kind() == ErrorKind::InvalidState => {
                let swept = shared.sweep(&Sweep::Expired)?;
                swept.iter().for_each(Swept::log);
                match swept.is_empty() {
                    true => Err(error),
                    false => shared.store.delete(name, within(CALL)),
                }
            }
            outcome => outcome,
        }
    }

    /// Returns all semaphores by name, and how full they are.
    ///
    /// # Errors
    /// `Misconfigured` without tables; `Unreachable` and the like.
    pub fn list(&self) -> Result<Vec<Usage>> {
        let store = self.store()?;
        retried(|| store.usage(None, within(CALL)))
    }

    /// Returns how full a semaphore is.
    ///
    /// # Errors
    /// `NotFound`; otherwise as [`create`](Semaphores::create).
    pub fn usage(&self, name: &str) -> Result<Usage> {
        check_name(name)?;
        let store = self.store()?;
        let mut found = retried(|| store.usage(Some(name), within(CALL)))?;
        found.pop().ok_or_else(|| no_such_semaphore(name))
    }

    /// Returns who holds permits of a semaphore, oldest grant first.
    ///
    /// # Errors
    /// `NotFound`; otherwise as [`create`](Semaphores::create).
    pub fn holders(&self, name: &str) -> Result<Vec<Holder>> {
        check_name(name)?;
        let store = self.store()?;
        retried(|| store.holders(name, within(CALL)))
    }

    /// Acquires the permits, all of them or none, and does not wait if there are not enough.
    ///
    /// Nothing renews them, and nothing releases them when the process ends: they are held until
    /// [`release`](Semaphores::release), until their ttl and a quarter of it have passed, if the request has one,
    /// or until maintenance takes them back. Use this for operations that outlive the process, and a
    /// [`guard`](Semaphores::guard) otherwise.
    ///
    /// Repeating the call with the same request is safe. After a deadlock, a lost connection or a lock wait
    /// timeout, it is tried again, up to three times in all. If the outcome is unknown even then, the external
    /// id is used up as soon as the server answers, so that nothing can be acquired under it, unless this
    /// process repeats the request before that. This requires a live factory: if the factory or the process
    /// ends before the server answers, permits with a ttl end with their ttl, and those without one stay held
    /// until somebody calls [`release`](Semaphores::release) with their id, or
    /// [`sweep_stale`](Semaphores::sweep_stale) or [`maintenance`](Semaphores::maintenance) takes them back
    /// because of their age. A warning names each such request when it is given up: when its factory is
    /// dropped, or when a call that was still running then has ended. If the process exits before that, nothing
    /// is logged.
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
    /// # Errors
    /// As [`acquire`](Semaphores::acquire); `Cancelled`.
    pub fn acquire_for(
        &self,
        request: &PermitRequest,
        wait: impl Into<Wait>,
    ) -> Result<Acquisition> {
        let shared = self.shared.get()?;
        let wish = request.plain(shared.store.min_ttl())?;
        let id = Arc::clone(&wish.external_id);
        let decision = shared.decide(wish, OnHeld::Report, &wait.into())?;
        Ok(match decision {
            Decision::Granted(grant) => {
                shared.count_plain(&grant.held);
                let permits = grant.held.to_permits();
                match grant.remaining {
                    // An earlier try got them, and its answer came after their end.
                    Some(Duration::ZERO) => Acquisition::AlreadyAcquired {
                        permits,
                        expires_in: grant.remaining,
                    },
                    _ => Acquisition::Acquired(permits),
                }
            }
            Decision::Known(status) if !status.held => {
                shared.uncount_plain(&id);
                Acquisition::AlreadyReleased
            }
            Decision::Known(status) => Acquisition::AlreadyAcquired {
                permits: status.permits,
                expires_in: status.expires_in,
            },
            Decision::Exhausted { exhausted, .. } => Acquisition::Exhausted(exhausted),
            Decision::Refused(error) => return Err(error),
        })
    }

    /// Waits for the permits and holds them until the guard is dropped, renewed in the background.
    ///
    /// Permits that an earlier call holds under the same external id, in this process or another one, are
    /// taken over: one transaction releases them and grants as many new ones, with higher fences. Another
    /// live guard of the request in this process is never taken over.
    ///
    /// # Errors
    /// `Exhausted` after the timeout; `Conflict` for an external id that was released or holds something
    /// else; `DuplicateContender` for one with a live guard in this process; `Cancelled`; otherwise as
    /// [`acquire`](Semaphores::acquire).
    pub fn guard(&self, request: &PermitRequest, wait: impl Into<Wait>) -> Result<PermitGuard> {
        let shared = self.shared.get()?;
        let wish = request.guarded(self.default_ttl, shared.store.min_ttl())?;
        let lease = lease_of(wish.ttl.unwrap_or(self.default_ttl))?;
        let only = OnlyGuard::new(shared.store.realm(), &wish.external_id)?;
        let (id, owner) = (Arc::clone(&wish.external_id), wish.owner.clone());
        let named = |error: Error| error.context(format_args!("request {id:?}"));
        let grant = match shared.decide(wish, OnHeld::TakeOver, &wait.into())? {
            Decision::Granted(grant) => {
                // They were taken over, or have ended before.
                shared.uncount_plain(&id);
                grant
            }
            Decision::Known(_) => {
                shared.uncount_plain(&id);
                return Err(named(used_up()));
            }
            Decision::Exhausted { exhausted, .. } => {
                return Err(named(exhausted_error(&exhausted)));
            }
            Decision::Refused(error) => return Err(error),
        };
        let remaining = grant.remaining.unwrap_or(Duration::ZERO);
        let until = grant.sent + remaining.min(lease.belief());
        let keep = Arc::new(Keep::new(grant.held, owner, lease, until));
        if keep.valid_for().is_zero() {
            // A reply after its deadline changes nothing.
            shared.end_held(&keep.held(), lease.ttl());
            return Err(named(Error::new(
                ErrorKind::Timeout,
                "the permits were granted too late to be held; they are given back",
            )));
        }
        match shared.renewals.add(&keep, &shared.factory.background) {
            Ok(number) => {
                only.holds(&keep);
                shared.count_held(&keep.held(), 1);
                Ok(PermitGuard::new(shared, keep, number, only))
            }
            Err(error) => {
                shared.end_held(&keep.held(), lease.ttl());
                Err(named(error))
            }
        }
    }

    /// Gives back the permits held under an external id. Safe to repeat, from any process. A guard that
    /// holds them is lost: at once in this process, at its next renewal in another one.
    ///
    /// # Errors
    /// `InvalidInput` for an external id that is not allowed; `Unreachable` and the like.
    pub fn release(&self, external_id: &str) -> Result<Release> {
        check_text("external id", external_id, MAX_TEXT)?;
        let shared = self.shared.get()?;
        // What it held is known only before: those who wait for it must be woken.
        let held = shared.waiting_names(external_id);
        // A guard of this process stops believing before it is given back.
        end_guards(shared.store.realm(), |keep| {
            *keep.held().external_id == *external_id
        });
        let mut tries = 0;
        let mut released = retried(|| {
            tries += 1;
            shared.store.release_request(external_id, within(CALL))
        })?;
        if released == Release::AlreadyReleased && tries > 1 {
            // A try whose answer was lost may have done it.
            released = Release::Released;
        }
        // Whatever the answer, it is not held any more.
        shared.uncount_plain(&Arc::from(external_id));
        if released == Release::Released {
            shared.wake(held.iter().map(|(name, count)| (&**name, *count)));
        }
        Ok(released)
    }

    /// Restarts the ttl of the permits held under an external id, even after it has ended, if they were
    /// not taken back. Without a ttl, this keeps the request from becoming stale.
    ///
    /// # Errors
    /// As [`release`](Semaphores::release).
    pub fn renew(&self, external_id: &str) -> Result<PermitRenewal> {
        check_text("external id", external_id, MAX_TEXT)?;
        let store = self.store()?;
        retried(|| store.renew_request(external_id, within(CALL)))
    }

    /// Returns the status of a request; `None` if it does not exist, or was deleted because of its age.
    ///
    /// # Errors
    /// As [`release`](Semaphores::release).
    pub fn status(&self, external_id: &str) -> Result<Option<RequestStatus>> {
        check_text("external id", external_id, MAX_TEXT)?;
        let store = self.store()?;
        retried(|| store.status(external_id, within(CALL)))
    }

    /// Takes back all permits whose ttl plus a quarter has passed on the store's clock. An acquire that
    /// finds a semaphore exhausted does this for its own semaphores.
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
    /// guard of a dead owner is lost before its permits are taken back if it is in this process, and at its next
    /// renewal if it is in another one.
    ///
    /// # Errors
    /// As [`sweep_expired`](Semaphores::sweep_expired).
    pub fn sweep_dead(&self, mut liveness: impl FnMut(&str) -> Liveness) -> Result<Vec<Swept>> {
        self.shared.get()?.sweep_dead(&mut liveness)
    }

    /// Takes back all permits that were acquired and last renewed longer ago than `age`, except those whose ttl
    /// plus a quarter has not passed yet: their holder may still believe that it has them.
    ///
    /// # Errors
    /// As [`sweep_expired`](Semaphores::sweep_expired).
    pub fn sweep_stale(&self, age: Duration) -> Result<Vec<Swept>> {
        self.shared.get()?.sweep(&Sweep::Stale(age))
    }

    /// Deletes requests that were released longer ago than `age`, `batch` at a time. Returns how many
    /// were deleted. The external id of a deleted request is forgotten.
    ///
    /// # Errors
    /// `InvalidInput` for a batch of zero; otherwise as [`sweep_expired`](Semaphores::sweep_expired).
    pub fn delete_requests(&self, age: Duration, batch: usize) -> Result<u64> {
        check_batch(batch)?;
        let store = self.store()?;
        batches(batch, || true, |by| store.delete_requests(age, batch, by))
    }

    /// Deletes capacity changes older than `age`, `batch` at a time. Returns how many were deleted.
    ///
    /// # Errors
    /// As [`delete_requests`](Semaphores::delete_requests).
    pub fn delete_history(&self, age: Duration, batch: usize) -> Result<u64> {
        check_batch(batch)?;
        let store = self.store()?;
        batches(batch, || true, |by| store.delete_history(age, batch, by))
    }

    /// Compares the counter of every semaphore with its permits. Returns those that are wrong.
    ///
    /// A counter changes in the transaction that changes the permits, so a crash leaves both or neither.
    /// This finds changes made to the tables by hand. It reads every held permit.
    ///
    /// # Errors
    /// As [`sweep_expired`](Semaphores::sweep_expired).
    pub fn check(&self) -> Result<Vec<Discrepancy>> {
        let store = self.store()?;
        retried(|| store.check(within(LONG_CALL)))
    }

    /// Corrects wrong counters. Returns those that were wrong.
    ///
    /// # Errors
    /// As [`sweep_expired`](Semaphores::sweep_expired).
    pub fn repair(&self) -> Result<Vec<Discrepancy>> {
        let store = self.store()?;
        retried(|| store.repair(within(LONG_CALL)))
    }

    /// Returns a builder for maintenance in the background: sweeps and removals, by one process at a
    /// time.
    pub fn maintenance(&self) -> MaintenanceBuilder {
        MaintenanceBuilder::new(self.clone())
    }

    fn store(&self) -> Result<&Arc<dyn PermitStore>> {
        Ok(&self.shared.get()?.store)
    }
}

impl SharedSemaphores {
    /// Carries a request out: three tries, or as many as the wait allows.
    fn decide(
        self: &Arc<SharedSemaphores>,
        wish: Wish,
        on_held: OnHeld,
        wait: &Wait,
    ) -> Result<Decision> {
        if wait.cancelled_by().iter().any(Cancel::is_cancelled) {
            return Err(cancelled(format_args!("request {:?}", wish.external_id)));
        }
        // One deadline for all of it: waiting for another call under the same id counts, too.
        let by = match wait.is_zero() {
            true => within(CALL),
            false => wait.deadline(),
        };
        let mut attempts = Attempts::new(self, wish, on_held, wait, by)?;
        let decision = match wait.is_zero() {
            true => attempts.tries(by),
            false => attempts.wait(wait, by),
        };
        if let Ok(Decision::Granted(grant)) = &decision {
            self.granted(&attempts.call.wish, grant);
        }
        decision
    }

    fn granted(&self, wish: &Wish, grant: &Grant) {
        let names = wish.permits.iter().map(|(name, _)| &**name);
        self.waiting.left(names.zip(grant.free.iter().copied()));
        log::debug!(
            "acquired {:?}: {:?}",
            wish.external_id,
            grant.held.to_permits()
        );
    }

    /// Permits were given back, whoever held them: whoever can be served now is woken.
    pub(super) fn wake<'a>(&self, permits: impl IntoIterator<Item = (&'a str, u32)>) {
        self.waiting.released(permits);
    }

    /// Guards of this process hold so much more of a semaphore, or less: each grant is added once and taken off
    /// once, whatever the server says.
    pub(super) fn count(&self, semaphore: &str, change: i64) {
        self.probe.tell(|probe| probe.permits(semaphore, change));
    }

    /// Counts what a guard holds (`sign` 1), or does not hold any more (-1).
    pub(super) fn count_held(&self, held: &Held, sign: i64) {
        for permit in &held.permits {
            self.count(&permit.semaphore, sign * i64::from(permit.count));
        }
    }

    /// What is held under an external id, if anybody could be waiting for it.
    fn waiting_names(&self, external_id: &str) -> Vec<(Arc<str>, u32)> {
        if self.waiting.is_empty() {
            return Vec::new();
        }
        let status = self.store.status(external_id, within(CALL));
        let Ok(Some(status)) = status else {
            return Vec::new();
        };
        let permits = status.permits.into_iter().filter(|_| status.held);
        permits.map(|it| (it.semaphore, it.count)).collect()
    }

    pub(super) fn sweep(&self, sweep: &Sweep) -> Result<Vec<Swept>> {
        let swept = retried(|| self.store.sweep(sweep, within(LONG_CALL)))?;
        for one in &swept {
            let fences = |fence| one.permits.iter().any(|it| it.fence == fence);
            let swept = |keep: &Keep| keep.held().permits.iter().any(|it| fences(it.id));
            end_guards(self.store.realm(), swept);
            self.uncount_plain(&one.external_id);
            let permits = one.permits.iter();
            self.wake(permits.map(|it| (&*it.semaphore, it.count)));
        }
        Ok(swept)
    }

    pub(super) fn sweep_dead(
        &self,
        liveness: &mut dyn FnMut(&str) -> Liveness,
    ) -> Result<Vec<Swept>> {
        let mut swept = Vec::new();
        // Whatever is acquired or renewed after this is a sign of life that the answer may not know of.
        let (owners, asked) = retried(|| self.store.owners(within(LONG_CALL)))?;
        let answered = Moment::now();
        for owner in owners {
            let answer = catch_unwind(AssertUnwindSafe(|| liveness(&owner)));
            let answer = answer.unwrap_or_else(|_| {
                log::error!("the liveness check of {owner:?} panicked: its permits are left alone");
                Liveness::Unknown
            });
            if answer == Liveness::Dead {
                // A guard of this process stops believing before it is given back; not one whose belief shows
                // that it was acquired or renewed after the question.
                end_guards(self.store.realm(), |keep| {
                    keep.owner.as_ref() == Some(&owner)
                        && keep.until() <= answered + keep.lease.belief()
                });
                swept.extend(self.sweep(&Sweep::Owner(owner, asked))?);
            }
        }
        Ok(swept)
    }
}

/// Repeats `step` until it did less than a whole batch; the sum.
pub(super) fn batches(
    batch: usize,
    mut go_on: impl FnMut() -> bool,
    mut step: impl FnMut(Moment) -> Result<u64>,
) -> Result<u64> {
    let mut sum = 0;
    while go_on() {
        let done = retried(|| step(within(LONG_CALL)))?;
        sum += done;
        if done < batch as u64 {
            break;
        }
    }
    Ok(sum)
}

/// Three tries of what is safe to repeat.
fn retried<T>(mut call: impl FnMut() -> Result<T>) -> Result<T> {
    let mut tries = 1;
    loop {
        match call() {
            Err(error) if error.is_transient() && tries < MAX_TRIES => {
                tries += 1;
                pause_after(&error, tries);
            }
            outcome => return outcome,
        }
    }
}

/// Pauses for a short random time, longer with every try: two that met in a deadlock must not meet again,
/// and a connection that could not be had needs time to come back.
pub(super) fn pause_after(error: &Error, tries: u32) {
    let most = 5_000 * u64::from(tries);
    let mut pause = Duration::from_micros(rand::random::<u64>() % most + 500);
    if error.asked_nothing() {
        pause += FIRST_POLL * tries;
    }
    std::thread::sleep(pause);
}

fn within(call: Duration) -> Moment {
    Moment::now() + call
}

fn check_batch(batch: usize) -> Result<()> {
    if batch == 0 {
        return Err(Error::invalid("a batch of no rows would never end"));
    }
    Ok(())
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
