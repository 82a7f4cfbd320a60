//! `Semaphores`: the front.

use std::sync::Arc;
use std::time::Duration;

use super::answer::{
    Acquisition, CapacityChange, PermitRenewal, Release, RequestStatus, Usage, used_up,
};
use super::builder::SemaphoresBuilder;
use super::check::{self, Discrepancy};
use super::cleanup;
use super::core::Core;
use super::guard::PermitGuard;
use super::maintenance::MaintenanceBuilder;
use super::record::Record;
use super::request::{MAX_TEXT, PermitRequest};
use super::store::Store;
use super::sweep::{Liveness, Swept};
use super::{catalogue, request::Wish};
use crate::clock::Moment;
use crate::error::{Error, Result};
use crate::name::check_text;

/// The counting semaphores in one database. Cheap to clone; what it holds ends with the last clone and
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
/// let request = PermitRequest::new("job-123").permits("backup", 1).ttl(Duration::from_secs(60));
/// let guard = semaphores.guard(&request, Duration::from_secs(5))?; // waits up to five seconds
/// println!("working with fence {:?}", guard.fence("backup"));
/// drop(guard); // released
/// # Ok::<(), contend::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Semaphores {
    core: Arc<Core>,
}

impl Semaphores {
    /// Connects to the database that a `mysql://` URL names; in the background, the server may be away.
    ///
    /// # Errors
    /// `InvalidInput` for a URL that is not understood.
    pub fn connect(url: &str) -> Result<Semaphores> {
        SemaphoresBuilder::new(url)?.build()
    }

    /// Begins a connection with other settings than the defaults.
    ///
    /// # Errors
    /// As [`connect`](Semaphores::connect).
    pub fn builder(url: &str) -> Result<SemaphoresBuilder> {
        SemaphoresBuilder::new(url)
    }

    pub(super) fn new(store: Arc<Store>) -> Semaphores {
        Semaphores {
            core: Arc::new(Core::new(store)),
        }
    }

    /// Makes the tables where they are missing: the same as applying `sql/init-semaphore.sql`.
    ///
    /// # Errors
    /// `Denied` where the user may not; `Unreachable` and the like.
    pub fn create_tables(&self) -> Result<()> {
        self.core.store.create_tables()
    }

    /// Makes a semaphore; `false` where it is there already, which keeps its capacity.
    ///
    /// # Errors
    /// `InvalidInput` for a name or capacity that is not allowed; `Misconfigured` without tables;
    /// `Unreachable` and the like.
    pub fn create(&self, name: &str, capacity: u32) -> Result<bool> {
        catalogue::create(&self.core.store, name, capacity)
    }

    /// Changes a capacity, and writes down by whom; the capacity before. Lowered below what is held, it
    /// takes nothing away, but grants nothing until enough is released.
    ///
    /// # Errors
    /// `NotFound`; otherwise as [`create`](Semaphores::create).
    pub fn set_capacity(&self, name: &str, capacity: u32, changed_by: Option<&str>) -> Result<u32> {
        catalogue::set_capacity(&self.core.store, name, capacity, changed_by)
    }

    /// The changes of a capacity, oldest first.
    ///
    /// # Errors
    /// As [`create`](Semaphores::create).
    pub fn history(&self, name: &str) -> Result<Vec<CapacityChange>> {
        catalogue::history(&self.core.store, name)
    }

    /// Deletes a semaphore that nobody holds; `false` where there is none.
    ///
    /// # Errors
    /// `InvalidState` while it is in use; otherwise as [`create`](Semaphores::create).
    pub fn delete(&self, name: &str) -> Result<bool> {
        catalogue::delete(&self.core.store, name)
    }

    /// All semaphores by name, and how full they are.
    ///
    /// # Errors
    /// `Misconfigured` without tables; `Unreachable` and the like.
    pub fn list(&self) -> Result<Vec<Usage>> {
        catalogue::usage(&self.core.store, None)
    }

    /// How full a semaphore is.
    ///
    /// # Errors
    /// `NotFound`; otherwise as [`create`](Semaphores::create).
    pub fn usage(&self, name: &str) -> Result<Usage> {
        let mut found = catalogue::usage(&self.core.store, Some(name))?;
        found.pop().ok_or_else(|| catalogue::no_such(name))
    }

    /// Takes the permits, all of them or none, and fails fast where there are not enough.
    ///
    /// Repeating it with the same request is safe. A deadlock, a lost connection or a wait for a lock
    /// that took too long is tried again, three times in all. Where the outcome cannot be learned even
    /// then, the external id is used up, so that nothing can be acquired under it any more.
    ///
    /// # Errors
    /// `InvalidInput` for a request that makes no sense, or wants more than a capacity; `NotFound`;
    /// `Conflict` where the external id holds something else; `Timeout`, `Unreachable` and the like.
    pub fn acquire(&self, request: &PermitRequest) -> Result<Acquisition> {
        self.core.acquire(&Arc::new(request.check()?))
    }

    /// As [`acquire`](Semaphores::acquire), but waits up to `timeout` for what is exhausted. Of those
    /// in this process who wait for the same semaphore, the first to come is served first.
    ///
    /// # Errors
    /// As [`acquire`](Semaphores::acquire).
    pub fn acquire_timeout(
        &self,
        request: &PermitRequest,
        timeout: Duration,
    ) -> Result<Acquisition> {
        self.core
            .acquire_timeout(&Arc::new(request.check()?), timeout)
    }

    /// Waits up to `timeout` for the permits, and holds them until the guard is dropped: renewed, if
    /// they have a ttl, and then released. What an earlier process acquired under the same external id
    /// is taken over.
    ///
    /// # Errors
    /// `Exhausted` after the timeout, `Conflict` for an external id that was released; otherwise as
    /// [`acquire`](Semaphores::acquire).
    pub fn guard(&self, request: &PermitRequest, timeout: Duration) -> Result<PermitGuard> {
        let wish: Arc<Wish> = Arc::new(request.check()?);
        let id = &wish.external_id;
        let mut sent = Moment::now();
        let answer = self.core.acquire_timeout(&wish, timeout)?;
        let adopted = matches!(answer, Acquisition::AlreadyAcquired(_));
        let named = |error: Error| error.context(format_args!("request {id:?}"));
        let permits = answer.into_permits().map_err(named)?;
        // The ttl counts from a grant before or long after `sent`: renewed, it counts from here.
        let waited = |ttl: Duration| Moment::now() - sent > ttl / 10;
        if adopted || wish.ttl.is_some_and(waited) {
            sent = Moment::now();
            match self.core.renew(id) {
                Ok(PermitRenewal::Renewed) => {}
                // A sweep was faster.
                Ok(_) => return Err(named(used_up())),
                Err(error) => {
                    self.core.keeper.bury(id);
                    return Err(error);
                }
            }
        }
        PermitGuard::new(&self.core, &wish, permits, sent)
    }

    /// Gives the permits of a request back. Safe to repeat, from any process.
    ///
    /// # Errors
    /// `InvalidInput` for an external id that is not allowed; `Unreachable` and the like.
    pub fn release(&self, external_id: &str) -> Result<Release> {
        check_text("external id", external_id, MAX_TEXT)?;
        self.core.release(external_id)
    }

    /// Lets the ttl of a request begin anew, also after it ran out, if no sweep was faster. Without a
    /// ttl, it keeps the request from becoming stale.
    ///
    /// # Errors
    /// As [`release`](Semaphores::release).
    pub fn renew(&self, external_id: &str) -> Result<PermitRenewal> {
        check_text("external id", external_id, MAX_TEXT)?;
        self.core.renew(external_id)
    }

    /// What the server knows about a request; `None` where there is none, or it was deleted for its age.
    ///
    /// # Errors
    /// As [`release`](Semaphores::release).
    pub fn status(&self, external_id: &str) -> Result<Option<RequestStatus>> {
        check_text("external id", external_id, MAX_TEXT)?;
        let record = Record::read(&self.core.store, external_id)?;
        Ok(record.map(|record| record.status()))
    }

    /// Releases all permits whose ttl has run out by the server's clock.
    ///
    /// # Errors
    /// `Misconfigured` without tables; `Unreachable` and the like. What was released stays released.
    pub fn sweep_expired(&self) -> Result<Vec<Swept>> {
        self.core.sweep_expired()
    }

    /// Asks `liveness` about each owner of held permits, and releases those of the dead. What an owner
    /// acquires or renews after the question was asked is left alone.
    ///
    /// # Errors
    /// As [`sweep_expired`](Semaphores::sweep_expired).
    pub fn sweep_dead(&self, mut liveness: impl FnMut(&str) -> Liveness) -> Result<Vec<Swept>> {
        self.core.sweep_dead(&mut liveness)
    }

    /// Releases all permits that were acquired and last renewed longer ago than `age`.
    ///
    /// # Errors
    /// As [`sweep_expired`](Semaphores::sweep_expired).
    pub fn sweep_stale(&self, age: Duration) -> Result<Vec<Swept>> {
        self.core.sweep_stale(age)
    }

    /// Deletes requests that were released longer ago than `age`, `batch` at a time; how many.
    ///
    /// # Errors
    /// `InvalidInput` for a batch of zero; otherwise as [`sweep_expired`](Semaphores::sweep_expired).
    pub fn delete_requests(&self, age: Duration, batch: usize) -> Result<u64> {
        check_batch(batch)?;
        cleanup::old_requests(&self.core.store, age, batch, &mut || true)
    }

    /// Deletes changes of capacities older than `age`, `batch` at a time; how many.
    ///
    /// # Errors
    /// As [`delete_requests`](Semaphores::delete_requests).
    pub fn delete_history(&self, age: Duration, batch: usize) -> Result<u64> {
        check_batch(batch)?;
        cleanup::old_history(&self.core.store, age, batch, &mut || true)
    }

    /// Compares the counter of every semaphore with its permits; those that are wrong.
    ///
    /// A counter is changed in the transaction that changes the permits, so a crash leaves both or
    /// neither. This finds what was done to the tables by hand. It reads every held permit.
    ///
    /// # Errors
    /// As [`sweep_expired`](Semaphores::sweep_expired).
    pub fn check(&self) -> Result<Vec<Discrepancy>> {
        check::check(&self.core.store)
    }

    /// Sets wrong counters right; those that were wrong.
    ///
    /// # Errors
    /// As [`sweep_expired`](Semaphores::sweep_expired).
    pub fn repair(&self) -> Result<Vec<Discrepancy>> {
        check::repair(&self.core.store)
    }

    /// Begins maintenance in the background: all of the above, by one process at a time.
    pub fn maintenance(&self) -> MaintenanceBuilder {
        MaintenanceBuilder::new(&self.core)
    }
}

fn check_batch(batch: usize) -> Result<()> {
    if batch == 0 {
        return Err(Error::invalid("a batch of no rows would never end"));
    }
    Ok(())
}
