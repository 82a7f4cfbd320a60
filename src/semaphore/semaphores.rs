//! `Semaphores`: the front, and how a request is carried out, with its retries and its wait.

use std::collections::HashMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{SendError, bounded};
use parking_lot::Mutex;

use super::guard::{OnlyGuard, PermitGuard, RETRY};
use super::maintenance::MaintenanceBuilder;
use super::outcome::{Acquisition, Liveness, exhausted_error, used_up};
use super::renewals::{Keep, Renewals};
use super::request::{MAX_TEXT, PermitRequest, Wait, check_ttl, lease_of};
use super::wait::{Advice, Place, WaitList};
use crate::backend::permit_store::{
    Call, CapacityChange, Decision, Discrepancy, Exhausted, Failure, Grant, Held, Holder, Look,
    OnHeld, PermitRenewal, PermitStore, Release, RequestStatus, Sweep, Swept, Usage, Wish,
    no_such_semaphore, reclaim_after,
};
use crate::background::{CleanUp, Cleaned};
use crate::cancel::{Cancel, cancelled};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::factory::Inner;
use crate::name::check_text;
use crate::parker::Parker;
use crate::probe::Probed;
use crate::thread::{self, Local};
use crate::url::Url;

/// The ttl of a guard whose request names none.
const DEFAULT_TTL: Duration = Duration::from_secs(30);

/// The longest that one call takes.
const CALL: Duration = Duration::from_secs(5);

/// The longest that one step of a sweep or a removal takes.
const LONG_CALL: Duration = Duration::from_secs(20);

/// Tries of one call, the first included.
const MAX_TRIES: u32 = 3;

/// The first pause between two looks of a waiting request.
const FIRST_POLL: Duration = Duration::from_millis(50);

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
    core: Local<Arc<Core>>,
    default_ttl: Duration,
}

/// What all handles of a factory share.
pub(super) struct Core {
    pub(super) renewals: Arc<Renewals>,
    waiting: WaitList,
    unsettled: Arc<Unsettled>,
    probe: Probed,
    pub(super) store: Arc<dyn PermitStore>,
    factory: Arc<Inner>,
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.store.realm())
    }
}

impl Semaphores {
    /// Connects to the semaphores that a URL names: as [`contend::connect`](crate::connect), for a program
    /// that uses nothing else. `ttl` is that of its guards. Does no I/O.
    ///
    /// # Errors
    /// `InvalidInput` for a URL that is not understood, with a parameter that is unknown or means nothing
    /// to semaphores; `Unsupported` for a backend without semaphores.
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
        let ttl = url.duration("ttl")?;
        let semaphores = crate::backend::connect_url(&url)?.semaphores()?;
        match ttl {
            Some(ttl) => semaphores.with_ttl(ttl),
            None => Ok(semaphores),
        }
    }

    pub(crate) fn new(factory: &Arc<Inner>) -> Result<Semaphores> {
        let store = factory.backend.permits()?;
        let core = Core {
            renewals: Arc::new(Renewals::new(Arc::clone(&store))),
            waiting: WaitList::default(),
            unsettled: Arc::default(),
            probe: factory.probe(),
            store,
            factory: Arc::clone(factory),
        };
        Ok(Semaphores {
            core: Local::new(Arc::new(core)),
            default_ttl: DEFAULT_TTL,
        })
    }

    /// Sets the ttl of guards whose request names none. Defaults to 30 s.
    ///
    /// # Errors
    /// `InvalidInput` for one that is too short to renew in, or too long.
    pub fn with_ttl(mut self, ttl: Duration) -> Result<Semaphores> {
        check_ttl(ttl, self.store()?.min_ttl())?;
        self.default_ttl = ttl;
        Ok(self)
    }

    /// Returns where the semaphores are, without credentials.
    ///
    /// # Errors
    /// `Forked` in a child process.
    pub fn realm(&self) -> Result<&str> {
        Ok(self.store()?.realm())
    }

    /// Makes the tables where they are missing; on memory there is nothing to make.
    ///
    /// # Errors
    /// `Misconfigured` where tables of the same names are somebody else's or of another version; `Denied`
    /// where the user may not; `Unreachable` and the like.
    pub fn create_tables(&self) -> Result<()> {
        let store = self.store()?;
        retried(|| store.create_tables(within(LONG_CALL)))
    }

    /// Makes a semaphore. Returns `false` if there is one already; it keeps its capacity, which
    /// [`set_capacity`](Semaphores::set_capacity) changes.
    ///
    /// # Errors
    /// `InvalidInput` for a name or capacity that is not allowed; `Misconfigured` without tables;
    /// `Unreachable` and the like.
    pub fn create(&self, name: &str, capacity: u32) -> Result<bool> {
        check_name(name)?;
        check_capacity(capacity)?;
        self.store()?.create(name, capacity, within(CALL))
    }

    /// Changes a capacity, and records by whom. Returns the capacity before. Lowered below what is held,
    /// it takes nothing away, but grants nothing until enough is released.
    ///
    /// # Errors
    /// `NotFound`; otherwise as [`create`](Semaphores::create).
    pub fn set_capacity(&self, name: &str, capacity: u32, changed_by: Option<&str>) -> Result<u32> {
        check_name(name)?;
        check_capacity(capacity)?;
        if let Some(changed_by) = changed_by {
            check_text("changed_by", changed_by, MAX_TEXT)?;
        }
        let core = self.core.get()?;
        let before = core
            .store
            .set_capacity(name, capacity, changed_by, within(CALL))?;
        match capacity.checked_sub(before) {
            Some(more) if more > 0 => core.waiting.released([(name, more)]),
            _ => core.waiting.changed(name),
        }
        Ok(before)
    }

    /// Returns the changes of a capacity, oldest first.
    ///
    /// # Errors
    /// As [`create`](Semaphores::create).
    pub fn history(&self, name: &str) -> Result<Vec<CapacityChange>> {
        check_name(name)?;
        self.store()?.history(name, within(CALL))
    }

    /// Deletes a semaphore that nobody holds. Returns `false` if there is none.
    ///
    /// # Errors
    /// `InvalidState` while it is in use; otherwise as [`create`](Semaphores::create).
    pub fn delete(&self, name: &str) -> Result<bool> {
        check_name(name)?;
        self.store()?.delete(name, within(CALL))
    }

    /// Returns all semaphores by name, and how full they are.
    ///
    /// # Errors
    /// `Misconfigured` without tables; `Unreachable` and the like.
    pub fn list(&self) -> Result<Vec<Usage>> {
        self.store()?.usage(None, within(CALL))
    }

    /// Returns how full a semaphore is.
    ///
    /// # Errors
    /// `NotFound`; otherwise as [`create`](Semaphores::create).
    pub fn usage(&self, name: &str) -> Result<Usage> {
        check_name(name)?;
        let mut found = self.store()?.usage(Some(name), within(CALL))?;
        found.pop().ok_or_else(|| no_such_semaphore(name))
    }

    /// Returns who holds permits of a semaphore, oldest grant first.
    ///
    /// # Errors
    /// `NotFound`; otherwise as [`create`](Semaphores::create).
    pub fn holders(&self, name: &str) -> Result<Vec<Holder>> {
        check_name(name)?;
        self.store()?.holders(name, within(CALL))
    }

    /// Takes the permits, all of them or none, and fails fast where there are not enough.
    ///
    /// Nothing renews them, and only [`release`](Semaphores::release) or maintenance gives them back: for
    /// operations that outlive the process. Otherwise use a [`guard`](Semaphores::guard).
    ///
    /// Repeating it with the same request is safe. A deadlock, a lost connection or a wait for a lock that
    /// took too long is tried again, three times in all. If the outcome cannot be learned even then, the
    /// external id is used up as soon as the server answers, so that nothing can be acquired under it.
    ///
    /// # Errors
    /// `InvalidInput` for a request that makes no sense; `NotFound`; `Conflict` where the external id holds
    /// something else; `Timeout`, `Unreachable` and the like.
    pub fn acquire(&self, request: &PermitRequest) -> Result<Acquisition> {
        self.acquire_for(request, Duration::ZERO)
    }

    /// As [`acquire`](Semaphores::acquire), but waits for what is exhausted, also while the server is away.
    ///
    /// # Errors
    /// As [`acquire`](Semaphores::acquire); `Cancelled`.
    pub fn acquire_for(
        &self,
        request: &PermitRequest,
        wait: impl Into<Wait>,
    ) -> Result<Acquisition> {
        let core = self.core.get()?;
        let wish = request.plain(core.store.min_ttl())?;
        let decision = core.decide(wish, OnHeld::Report, &wait.into())?;
        Ok(match decision {
            Decision::Granted(grant) => Acquisition::Acquired(grant.held.to_permits()),
            Decision::Known(status) if !status.held => Acquisition::AlreadyReleased,
            Decision::Known(status) => Acquisition::AlreadyAcquired {
                permits: status.permits,
                expires_in: status.expires_in,
            },
            Decision::Exhausted(exhausted) => Acquisition::Exhausted(exhausted),
            Decision::Refused(error) => return Err(error),
        })
    }

    /// Waits for the permits and holds them until the guard is dropped, renewed in the background.
    ///
    /// What an earlier call holds under the same external id, in this process or another one, is taken
    /// over: in one transaction its permits are released and as many new ones granted, with higher fences.
    /// Another live guard of the request in this process is never taken over.
    ///
    /// # Errors
    /// `Exhausted` after the timeout; `Conflict` for an external id that was released or holds something
    /// else; `DuplicateContender` for one with a live guard in this process; `Cancelled`; otherwise as
    /// [`acquire`](Semaphores::acquire).
    pub fn guard(&self, request: &PermitRequest, wait: impl Into<Wait>) -> Result<PermitGuard> {
        let core = self.core.get()?;
        let wish = request.guarded(self.default_ttl, core.store.min_ttl())?;
        let lease = lease_of(wish.ttl.unwrap_or(self.default_ttl))?;
        let only = OnlyGuard::new(core.store.realm(), &wish.external_id)?;
        let id = Arc::clone(&wish.external_id);
        let named = |error: Error| error.context(format_args!("request {id:?}"));
        let grant = match core.decide(wish, OnHeld::TakeOver, &wait.into())? {
            Decision::Granted(grant) => grant,
            Decision::Known(_) => return Err(named(used_up())),
            Decision::Exhausted(exhausted) => return Err(named(exhausted_error(&exhausted))),
            Decision::Refused(error) => return Err(error),
        };
        let remaining = grant.remaining.unwrap_or(Duration::ZERO);
        let until = grant.sent + remaining.min(lease.belief());
        let keep = Arc::new(Keep::new(grant.held, lease, until));
        if keep.valid_for().is_zero() {
            // A reply after its deadline changes nothing.
            core.give_up(&keep.held(), lease.ttl());
            return Err(named(Error::new(
                ErrorKind::Timeout,
                "the permits were granted too late to be held; they are given back",
            )));
        }
        match core.renewals.add(&keep, &core.factory.background) {
            Ok(number) => Ok(PermitGuard::new(core, keep, number, only)),
            Err(error) => {
                core.give_up(&keep.held(), lease.ttl());
                Err(named(error))
            }
        }
    }

    /// Gives back whatever is held under an external id. Safe to repeat, from any process. A guard that
    /// held it learns of it at its next renewal.
    ///
    /// # Errors
    /// `InvalidInput` for an external id that is not allowed; `Unreachable` and the like.
    pub fn release(&self, external_id: &str) -> Result<Release> {
        check_text("external id", external_id, MAX_TEXT)?;
        let core = self.core.get()?;
        // What it held is known only before: those who wait for it must be woken.
        let held = core.waiting_names(external_id);
        let mut tries = 1;
        let released = loop {
            match core.store.release_request(external_id, within(CALL)) {
                Err(error) if error.is_transient() && tries < MAX_TRIES => {
                    tries += 1;
                    pause_after(&error, tries);
                }
                // A try whose answer was lost may have done it.
                Ok(Release::AlreadyReleased) if tries > 1 => break Release::Released,
                outcome => break outcome?,
            }
        };
        if released == Release::Released {
            core.given_back(held.iter().map(|(name, count)| (&**name, *count)));
        }
        Ok(released)
    }

    /// Lets the ttl of whatever is held under an external id begin anew, also after it ran out, if nobody
    /// took it back. Without a ttl, it keeps the request from becoming stale.
    ///
    /// # Errors
    /// As [`release`](Semaphores::release).
    pub fn renew(&self, external_id: &str) -> Result<PermitRenewal> {
        check_text("external id", external_id, MAX_TEXT)?;
        let store = self.store()?;
        retried(|| store.renew_request(external_id, within(CALL)))
    }

    /// Returns what the store knows about a request; `None` if there is none, or it was deleted for its
    /// age.
    ///
    /// # Errors
    /// As [`release`](Semaphores::release).
    pub fn status(&self, external_id: &str) -> Result<Option<RequestStatus>> {
        check_text("external id", external_id, MAX_TEXT)?;
        self.store()?.status(external_id, within(CALL))
    }

    /// Takes back all permits whose ttl, and a quarter of it, has passed on the store's clock. An acquire
    /// that finds a semaphore exhausted does this for its own semaphores.
    ///
    /// # Errors
    /// `Misconfigured` without tables; `Unreachable` and the like. What was released stays released.
    pub fn sweep_expired(&self) -> Result<Vec<Swept>> {
        self.core.get()?.sweep(&Sweep::Expired)
    }

    /// Asks `liveness` about each owner of held permits, and takes back those of the dead. What an owner
    /// acquires or renews after the question was asked is left alone; a question that panics counts as
    /// [`Liveness::Unknown`].
    ///
    /// # Errors
    /// As [`sweep_expired`](Semaphores::sweep_expired).
    pub fn sweep_dead(&self, mut liveness: impl FnMut(&str) -> Liveness) -> Result<Vec<Swept>> {
        self.core.get()?.sweep_dead(&mut liveness)
    }

    /// Takes back all permits that were acquired and last renewed longer ago than `age`.
    ///
    /// # Errors
    /// As [`sweep_expired`](Semaphores::sweep_expired).
    pub fn sweep_stale(&self, age: Duration) -> Result<Vec<Swept>> {
        self.core.get()?.sweep(&Sweep::Stale(age))
    }

    /// Deletes requests that were released longer ago than `age`, `batch` at a time. Returns how many.
    /// With its request an external id is forgotten.
    ///
    /// # Errors
    /// `InvalidInput` for a batch of zero; otherwise as [`sweep_expired`](Semaphores::sweep_expired).
    pub fn delete_requests(&self, age: Duration, batch: usize) -> Result<u64> {
        check_batch(batch)?;
        let store = self.store()?;
        batches(batch, || true, |by| store.delete_requests(age, batch, by))
    }

    /// Deletes changes of capacities older than `age`, `batch` at a time. Returns how many.
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
    /// This finds what was done to the tables by hand. It reads every held permit.
    ///
    /// # Errors
    /// As [`sweep_expired`](Semaphores::sweep_expired).
    pub fn check(&self) -> Result<Vec<Discrepancy>> {
        self.store()?.check(within(LONG_CALL))
    }

    /// Corrects wrong counters. Returns those that were wrong.
    ///
    /// # Errors
    /// As [`sweep_expired`](Semaphores::sweep_expired).
    pub fn repair(&self) -> Result<Vec<Discrepancy>> {
        self.store()?.repair(within(LONG_CALL))
    }

    /// Begins maintenance in the background: sweeps and removals, by one process at a time.
    pub fn maintenance(&self) -> MaintenanceBuilder {
        MaintenanceBuilder::new(self.clone())
    }

    fn store(&self) -> Result<&Arc<dyn PermitStore>> {
        Ok(&self.core.get()?.store)
    }

    pub(super) fn core(&self) -> Result<&Arc<Core>> {
        self.core.get()
    }
}

impl Core {
    /// Carries a request out: three tries, or as many as the wait allows.
    fn decide(&self, wish: Wish, on_held: OnHeld, wait: &Wait) -> Result<Decision> {
        let mut attempts = Attempts::new(self, wish, on_held);
        let decision = if wait.is_zero() {
            attempts.tries(Moment::now() + CALL)
        } else {
            attempts.wait(wait)
        };
        if let Ok(Decision::Granted(grant)) = &decision {
            self.granted(&attempts.call.wish, grant);
        }
        decision
    }

    fn granted(&self, wish: &Wish, grant: &Grant) {
        for (name, count) in &wish.permits {
            self.probe
                .tell(|probe| probe.permits(name, i64::from(*count)));
        }
        let names = wish.permits.iter().map(|(name, _)| &**name);
        self.waiting.left(names.zip(grant.free.iter().copied()));
        log::debug!(
            "acquired {:?}: {:?}",
            wish.external_id,
            grant.held.to_permits()
        );
    }

    /// Permits were given back by this process: whoever can be served now is woken.
    pub(super) fn given_back<'a>(&self, permits: impl IntoIterator<Item = (&'a str, u32)>) {
        let permits: Vec<(&str, u32)> = permits.into_iter().collect();
        for (name, count) in &permits {
            self.probe
                .tell(|probe| probe.permits(name, -i64::from(*count)));
        }
        self.waiting.released(permits);
    }

    /// Makes a call that ends by `by` for its caller, whatever the server does: where the store itself
    /// could take longer, on a thread of its own. `late` hears of an answer that nobody waits for.
    fn bounded<T: Send + 'static>(
        &self,
        by: Moment,
        call: impl FnOnce(&dyn PermitStore) -> T + Send + 'static,
        late: impl FnOnce(&dyn PermitStore, T) + Send + 'static,
    ) -> Option<T> {
        if by.remaining() >= self.store.patience() {
            return Some(call(&*self.store));
        }
        // A channel of no length: what is sent was received, or comes back.
        let (send, receive) = bounded::<T>(0);
        let store = Arc::clone(&self.store);
        let started = thread::start("contend-permits", move || {
            if let Err(SendError(outcome)) = send.send(call(&*store)) {
                late(&*store, outcome);
            }
        });
        match started {
            Ok(_) => receive.recv_timeout(by.remaining()).ok(),
            Err(error) => {
                log::debug!("no thread for a call of little time: {error}");
                None
            }
        }
    }

    /// What is held under an external id, if anybody could be waiting for it.
    fn waiting_names(&self, external_id: &str) -> Vec<(Arc<str>, u32)> {
        if self.waiting.is_empty() && !self.probe.is_some() {
            return Vec::new();
        }
        let status = self.store.status(external_id, within(CALL));
        let Ok(Some(status)) = status else {
            return Vec::new();
        };
        let permits = status.permits.into_iter().filter(|_| status.held);
        permits.map(|it| (it.semaphore, it.count)).collect()
    }

    /// Releases what nobody will hold, in the background.
    fn give_up(&self, held: &Arc<Held>, ttl: Duration) {
        let again = GiveUp {
            store: Arc::clone(&self.store),
            held: Arc::clone(held),
        };
        self.clean_up(Box::new(again), ttl);
    }

    /// Tries until it is done, or until what is left was taken back for its age.
    pub(super) fn clean_up(&self, job: Box<dyn CleanUp>, ttl: Duration) {
        let until = Moment::now() + reclaim_after(ttl) + CALL;
        self.factory.background.clean_up(job, CALL, until);
    }

    pub(super) fn sweep(&self, sweep: &Sweep) -> Result<Vec<Swept>> {
        let swept = self.store.sweep(sweep, within(LONG_CALL))?;
        for one in &swept {
            let permits = one.permits.iter();
            self.given_back(permits.map(|it| (&*it.semaphore, it.count)));
        }
        Ok(swept)
    }

    pub(super) fn sweep_dead(
        &self,
        liveness: &mut dyn FnMut(&str) -> Liveness,
    ) -> Result<Vec<Swept>> {
        let mut swept = Vec::new();
        // Whatever is acquired or renewed after this is a sign of life that the answer may not know of.
        let (owners, asked) = self.store.owners(within(LONG_CALL))?;
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
}

/// One call to acquire with its retries. Dropped with an outcome that is not known, it leaves that to
/// the background.
struct Attempts<'a> {
    core: &'a Core,
    call: Arc<Call>,
    /// The permits may have been granted, or may yet be.
    unknown: bool,
}

impl Attempts<'_> {
    fn new(core: &Core, wish: Wish, on_held: OnHeld) -> Attempts<'_> {
        // An earlier call under this id may have left something: this one takes over what it left.
        let left = core.unsettled.take(&wish.external_id);
        Attempts {
            core,
            unknown: left.is_some(),
            call: Arc::new(Call {
                wish,
                token: left.unwrap_or_else(|| rand::random::<u64>() >> 1),
                on_held,
            }),
        }
    }

    /// One try.
    fn once(&mut self, by: Moment) -> Result<Decision, Failure> {
        match self.acquire(by) {
            // The semaphores were locked for it: what an earlier try left has come or gone by now.
            Ok(decision) => {
                self.unknown = matches!(&decision, Decision::Refused(_)) && self.unknown;
                if let Decision::Exhausted(exhausted) = &decision {
                    let name = &exhausted.semaphore;
                    self.core.probe.tell(|probe| probe.exhausted(name));
                }
                Ok(decision)
            }
            Err(failure) => {
                self.unknown |= failure.unknown;
                Err(failure)
            }
        }
    }

    fn acquire(&self, by: Moment) -> Result<Decision, Failure> {
        let call = Arc::clone(&self.call);
        let late = Arc::clone(&self.call);
        self.core
            .bounded(
                by,
                move |store| store.acquire(&call, by),
                move |store, outcome| give_back_late(store, &late, outcome),
            )
            .unwrap_or_else(|| Err(Failure::known(no_answer())))
    }

    /// At most three tries.
    fn tries(&mut self, by: Moment) -> Result<Decision> {
        let mut tries = 1;
        loop {
            match self.once(by) {
                Ok(decision) => return Ok(decision),
                Err(failure) if failure.retry && tries < MAX_TRIES && !by.remaining().is_zero() => {
                    tries += 1;
                    pause_after(&failure.error, tries);
                }
                Err(failure) => return Err(self.explain(failure.error, tries)),
            }
        }
    }

    /// Tries whenever there is a chance, until the wait ends.
    fn wait(&mut self, wait: &Wait) -> Result<Decision> {
        let deadline = wait.deadline();
        let parker = Parker::new();
        let dropped = self.core.factory.waits();
        let cancels = || wait.cancelled_by().into_iter().chain([&dropped]);
        let watched: Vec<_> = cancels().map(|it| it.watch(&parker.unparker())).collect();
        let mut last = Last::Nothing;
        // Those who wait already come first; but what this id holds already needs no turn.
        if !self.core.waiting.is_claimed(&self.call.wish) || self.is_known(deadline) {
            match self.attempt(deadline)? {
                Step::Done(decision) => return Ok(decision),
                Step::Not(outcome) => last = outcome,
            }
        }
        let list = &self.core.waiting;
        let call = Arc::clone(&self.call);
        let place = list.join(&call.wish, &parker);
        if let Last::Short(exhausted) = &last {
            place.short_of(exhausted);
        }
        let mut poll = Poll::new(self.core.store.poll_interval());
        loop {
            if cancels().any(Cancel::is_cancelled) {
                drop(watched);
                return Err(cancelled(format_args!(
                    "request {:?}",
                    call.wish.external_id
                )));
            }
            if deadline.remaining().is_zero() {
                return self.timed_out(last, &place);
            }
            let advice = place.advice();
            let outcome = match advice {
                Advice::Try => Some(self.attempt(deadline)?),
                Advice::Look => Some(self.look(deadline, &mut poll)?),
                Advice::Poll | Advice::Stay if poll.is_due() && place.is_first() => {
                    Some(self.look(deadline, &mut poll)?)
                }
                Advice::Poll => {
                    poll.restart();
                    None
                }
                Advice::Stay => None,
            };
            match outcome {
                Some(Step::Done(decision)) => return Ok(decision),
                Some(Step::Not(outcome)) => {
                    if let Last::Short(exhausted) = &outcome {
                        place.short_of(exhausted);
                    }
                    last = outcome;
                    poll.next();
                }
                None => {}
            }
            parker.park(deadline.min(poll.at_if(place.is_first())));
        }
    }

    /// A try within a wait: what passes by itself does not end it.
    fn attempt(&mut self, deadline: Moment) -> Result<Step> {
        match self.once(deadline.min(within(CALL))) {
            Ok(Decision::Exhausted(exhausted)) => Ok(Step::Not(Last::Short(exhausted))),
            Ok(decision) => Ok(Step::Done(decision)),
            Err(failure) if failure.retry => Ok(Step::Not(Last::Failed(failure.error))),
            Err(failure) => Err(self.explain(failure.error, 1)),
        }
    }

    /// A look, and a try if there is a chance.
    fn look(&mut self, deadline: Moment, poll: &mut Poll) -> Result<Step> {
        let (by, call) = (deadline.min(within(CALL)), Arc::clone(&self.call));
        let looked = self
            .core
            .bounded(by, move |store| store.look(&call.wish, by), |_, _| {});
        match looked.unwrap_or_else(|| Err(no_answer())) {
            Ok(Look::Try) => self.attempt(deadline),
            Ok(Look::Short {
                exhausted,
                next_reclaim,
            }) => {
                poll.reclaim(next_reclaim);
                Ok(Step::Not(Last::Short(exhausted)))
            }
            Err(error) if error.is_transient() => Ok(Step::Not(Last::Failed(error))),
            Err(error) => Err(self.explain(error, 1)),
        }
    }

    /// Whether something is known under the external id, as far as a look can tell.
    fn is_known(&self, deadline: Moment) -> bool {
        let (by, call) = (deadline.min(within(CALL)), Arc::clone(&self.call));
        let ask = move |store: &dyn PermitStore| store.status(&call.wish.external_id, by);
        matches!(self.core.bounded(by, ask, |_, _| {}), Some(Ok(Some(_))))
    }

    fn timed_out(&self, last: Last, place: &Place<'_>) -> Result<Decision> {
        let seen = || place.seen(&self.call.wish);
        match last {
            Last::Short(exhausted) => Ok(Decision::Exhausted(exhausted)),
            Last::Failed(error) => Err(self.explain(error, 1)),
            Last::Nothing => match seen() {
                Some(exhausted) => Ok(Decision::Exhausted(exhausted)),
                None => Err(Error::new(
                    ErrorKind::Timeout,
                    format!(
                        "request {:?} had no turn in time: others of this process wait for the same \
                         semaphores",
                        self.call.wish.external_id
                    ),
                )),
            },
        }
    }

    fn explain(&self, error: Error, tries: u32) -> Error {
        let id = &self.call.wish.external_id;
        let error = match tries {
            1 => error.context(format_args!("request {id:?}")),
            _ => error.context(format_args!("request {id:?}, after {tries} tries")),
        };
        if !self.unknown {
            return error;
        }
        error.context(
            "the outcome is not known; whatever was acquired is released as soon as the server answers, \
             and the external id is used up",
        )
    }
}

impl Drop for Attempts<'_> {
    fn drop(&mut self) {
        if self.unknown {
            let core = self.core;
            core.unsettled.add(&self.call);
            let bury = Bury {
                store: Arc::clone(&core.store),
                unsettled: Arc::clone(&core.unsettled),
                call: Arc::clone(&self.call),
            };
            // Without a ttl nothing else would ever take it back.
            let until = match self.call.wish.ttl {
                Some(ttl) => Moment::now() + reclaim_after(ttl) + CALL,
                None => Moment::FAR,
            };
            core.factory
                .background
                .clean_up(Box::new(bury), CALL, until);
        }
    }
}

/// An acquire was answered after its caller had given up: nobody will hold what it got.
fn give_back_late(store: &dyn PermitStore, call: &Call, outcome: Result<Decision, Failure>) {
    let ended = match outcome {
        Ok(Decision::Granted(grant)) => {
            store.release(&Arc::new(grant.held), within(CALL)).map(drop)
        }
        Err(failure) if failure.unknown => store.bury(call, within(CALL)),
        _ => Ok(()),
    };
    if let Err(error) = ended {
        log::warn!(
            "request {:?} was answered too late, and could not be released: {error}",
            call.wish.external_id
        );
    }
}

fn no_answer() -> Error {
    Error::new(
        ErrorKind::Timeout,
        "the store did not answer in time; what it grants after this is given back",
    )
}

/// What a step of a wait came to.
enum Step {
    Done(Decision),
    Not(Last),
}

/// Why a waiting request does not have its permits yet.
enum Last {
    Nothing,
    Short(Exhausted),
    Failed(Error),
}

/// When a waiting request that comes first looks next.
struct Poll {
    at: Moment,
    interval: Duration,
    longest: Duration,
    reclaim: Moment,
}

impl Poll {
    fn new(longest: Duration) -> Poll {
        let interval = FIRST_POLL.min(longest);
        Poll {
            at: Moment::now() + interval,
            interval,
            longest,
            reclaim: Moment::FAR,
        }
    }

    fn is_due(&self) -> bool {
        self.at_if(true).remaining().is_zero()
    }

    fn at_if(&self, first: bool) -> Moment {
        match first {
            true => self.at.min(self.reclaim),
            false => Moment::FAR,
        }
    }

    fn restart(&mut self) {
        self.interval = FIRST_POLL.min(self.longest);
        self.at = Moment::now() + self.interval;
    }

    /// Something can be taken back this long from now: the time to look.
    fn reclaim(&mut self, after: Option<Duration>) {
        let after = after.map(|after| after.max(FIRST_POLL) + Duration::from_millis(2));
        self.reclaim = after.map_or(Moment::FAR, |after| Moment::now() + after);
    }

    fn next(&mut self) {
        if self.reclaim.remaining().is_zero() {
            self.reclaim = Moment::FAR;
        }
        let jitter = 0.75 + rand::random::<f64>() / 2.0;
        self.at = Moment::now() + self.interval.mul_f64(jitter);
        self.interval = (self.interval * 2).min(self.longest);
    }
}

/// Calls of unknown outcome that the background has yet to end, by external id.
#[derive(Debug, Default)]
struct Unsettled {
    tokens: Mutex<HashMap<Arc<str>, u64>>,
}

impl Unsettled {
    fn add(&self, call: &Call) {
        let id = Arc::clone(&call.wish.external_id);
        self.tokens.lock().insert(id, call.token);
    }

    fn take(&self, external_id: &str) -> Option<u64> {
        self.tokens.lock().remove(external_id)
    }

    /// Takes it if it is still the same call.
    fn claim(&self, call: &Call) -> bool {
        let mut tokens = self.tokens.lock();
        let same = tokens.get(&call.wish.external_id) == Some(&call.token);
        if same {
            tokens.remove(&call.wish.external_id);
        }
        same
    }
}

/// Makes an end of a call of unknown outcome, unless a later call under the same id took it over.
struct Bury {
    store: Arc<dyn PermitStore>,
    unsettled: Arc<Unsettled>,
    call: Arc<Call>,
}

impl CleanUp for Bury {
    fn label(&self) -> String {
        format!(
            "request {:?} of unknown outcome",
            self.call.wish.external_id
        )
    }

    fn attempt(&mut self, by: Moment) -> Cleaned {
        if !self.unsettled.claim(&self.call) {
            return Cleaned::Done;
        }
        match self.store.bury(&self.call, by) {
            Ok(()) => Cleaned::Done,
            Err(error) if error.is_transient() => {
                self.unsettled.add(&self.call);
                Cleaned::Again(RETRY)
            }
            Err(error) => {
                log::warn!("cannot end {}: {error}", self.label());
                Cleaned::Done
            }
        }
    }
}

/// Releases permits that were granted too late, or that nothing could renew.
struct GiveUp {
    store: Arc<dyn PermitStore>,
    held: Arc<Held>,
}

impl CleanUp for GiveUp {
    fn label(&self) -> String {
        format!("release of {:?}", self.held.external_id)
    }

    fn attempt(&mut self, by: Moment) -> Cleaned {
        match self.store.release(&self.held, by) {
            Err(error) if error.is_transient() => Cleaned::Again(RETRY),
            _ => Cleaned::Done,
        }
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
        let done = step(within(LONG_CALL))?;
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

/// A short random pause, longer with every try: two that met in a deadlock must not meet again.
fn pause(tries: u32) {
    let most = 5_000 * u64::from(tries.min(10));
    std::thread::sleep(Duration::from_micros(rand::random::<u64>() % most + 500));
}

/// As [`pause`], but a connection that could not be had needs time to come back.
fn pause_after(error: &Error, tries: u32) {
    if error.asked_nothing() {
        std::thread::sleep(FIRST_POLL * tries);
    }
    pause(tries);
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
