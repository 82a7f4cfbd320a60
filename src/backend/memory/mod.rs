//! Mutexes and semaphores in the memory of one process, for tests, development and a first run.
//!
//! ```
//! let factory = contend::connect("memory://memory-doc?ttl=5s&transition=1s")?;
//! let guard = factory.locker("invoices").build()?.lock()?;
//! println!("alone in this process, with fence {}", guard.fence());
//! # Ok::<(), contend::Error>(())
//! ```
//!
//! `memory://` is one registry for the whole process, `memory://NAME` another one. A registry lives
//! as long as a factory, service, locker or [`Handle`] uses it. The URL parameters are `ttl` and `transition`.
//!
//! # How a mutex changes hands
//!
//! ```text
//!  A                        registry                                      B
//!  acquire ───────────────► free: A owns, fence 7
//!                           owned: B is queued ◄─────────────────── acquire
//!  release 7 ─────────────► handed to B for 500 ms ──────────────────► wakes
//!                           B owns, fence 8 ◄────────────────────── acquire
//! ```
//!
//! A release hands the mutex to the contender that has waited longest. For the claim time only that one can take it.
//!
//! # In your own tests
//! A [`Handle`] takes a lock away from its owner, or makes the registry unreachable, so that a test can
//! see what your code does then:
//!
//! ```
//! use contend::{EventKind, Lease, memory};
//!
//! let factory = memory::factory("handle-doc", Lease::default());
//! let (service, events) = factory.contend("demo").channel()?;
//! service.start()?;
//! assert_eq!(events.recv().unwrap().kind, EventKind::Acquired);
//!
//! let handle = memory::handle("handle-doc");
//! assert!(handle.revoke("demo")); // as an operator does
//! assert_eq!(events.recv().unwrap().kind, EventKind::Released);
//! assert_eq!(events.recv().unwrap().kind, EventKind::Acquired); // it contends again
//!
//! let ttl = std::time::Duration::from_millis(100);
//! let guard = factory.locker("other").ttl(ttl).build()?.lock()?;
//! assert!(handle.revoke("other"));
//! assert!(guard.lost().recv().is_err()); // closed when its next renewal has failed
//! assert!(!guard.is_valid());
//!
//! handle.set_unreachable(true); // from here on every call fails
//! assert!(factory.locker("other").build()?.try_lock().is_err());
//! # Ok::<(), contend::Error>(())
//! ```

mod mutexes;
mod permits;

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;

use self::mutexes::{MemoryContender, MemoryObserver, Registry};
use self::permits::MemoryPermits;
use super::{
    Backend, Condition, Contender, Participant, PermitStore, RawContender, RawObserver, Wakeups,
};
use crate::clock::Moment;
use crate::error::{Error, Result};
use crate::factory::Factory;
use crate::lease::Lease;
use crate::owner::MutexOwner;
use crate::parker::Unparker;
use crate::url::Url;

/// The registries in use, by name.
static REGISTRIES: Mutex<Option<HashMap<String, Weak<Registry>>>> = Mutex::new(None);

/// Returns a factory on the registry called `name` (the empty name is that of `memory://`).
///
/// ```
/// use contend::{Lease, memory};
///
/// let factory = memory::factory("doc", Lease::default());
/// let service = factory.contend("demo").build()?;
/// # Ok::<(), contend::Error>(())
/// ```
#[must_use]
pub fn factory(name: &str, lease: Lease) -> Factory {
    let backend = Memory {
        realm: format!("memory://{name}"),
        registry: registry(name),
    };
    Factory::over(Arc::new(backend), lease)
}

/// Returns a handle on the registry called `name`, for tests.
///
/// ```
/// use contend::memory;
///
/// let factory = contend::connect("memory://handle-fn-doc")?;
/// let guard = factory.locker("invoices").build()?.lock()?;
/// assert!(memory::handle("handle-fn-doc").revoke("invoices"));
/// assert!(guard.unlock().is_err()); // lost
/// # Ok::<(), contend::Error>(())
/// ```
#[must_use]
pub fn handle(name: &str) -> Handle {
    Handle {
        registry: registry(name),
    }
}

/// Makes a registry misbehave on request, for tests; see the [module](self).
#[derive(Clone, Debug)]
pub struct Handle {
    registry: Arc<Registry>,
}

impl Handle {
    /// Takes `mutex` away from its owner, as an operator's revoke does, and the next waiter becomes the owner.
    /// Returns `false` if it has no owner.
    ///
    /// A service is notified and steps down at once. A guard learns of it at its next renewal, after a third of
    /// its ttl: in a test, give its locker a short one and wait for [`Guard::lost`](crate::Guard::lost).
    ///
    /// ```
    /// let factory = contend::connect("memory://handle-revoke-doc?ttl=300ms")?;
    /// let guard = factory.locker("invoices").build()?.lock()?;
    /// let handle = contend::memory::handle("handle-revoke-doc");
    /// assert!(handle.revoke("invoices"));
    /// assert!(!handle.revoke("invoices")); // free by now
    /// assert!(guard.lost().recv().is_err());
    /// # Ok::<(), contend::Error>(())
    /// ```
    #[must_use]
    pub fn revoke(&self, mutex: &str) -> bool {
        let revoke = self.registry.look(&mutex.into(), |entry, now| {
            entry.revoke(entry.owner(now).fence(), now)
        });
        revoke.unwrap_or(false)
    }

    /// Makes every call to the registry fail as [`Unreachable`](crate::ErrorKind::Unreachable), or makes
    /// them work again. Leases run on meanwhile, as on a server that cannot be reached.
    ///
    /// ```
    /// let factory = contend::connect("memory://set-unreachable-doc")?;
    /// let locker = factory.locker("invoices").build()?;
    /// let handle = contend::memory::handle("set-unreachable-doc");
    /// handle.set_unreachable(true);
    /// assert!(locker.try_lock().is_err());
    /// handle.set_unreachable(false);
    /// assert!(locker.try_lock().is_ok());
    /// # Ok::<(), contend::Error>(())
    /// ```
    pub fn set_unreachable(&self, unreachable: bool) {
        self.registry.set_unreachable(unreachable);
    }
}

pub(super) fn connect(url: &Url) -> Result<Factory> {
    let has_login = url.login.user.is_some() || url.login.password.is_some();
    if has_login || url.hosts.len() > 1 || !url.path.is_empty() {
        return Err(Error::invalid(
            "a memory URL is memory:// or memory://NAME, with ttl and transition as parameters",
        ));
    }
    let name = url.hosts.first().map_or("", String::as_str);
    Ok(factory(name, url.lease()?))
}

fn registry(name: &str) -> Arc<Registry> {
    let mut registries = REGISTRIES.lock();
    let registries = registries.get_or_insert_default();
    registries.retain(|_, registry| registry.strong_count() > 0);
    let registry = registries
        .get(name)
        .and_then(Weak::upgrade)
        .unwrap_or_default();
    registries.insert(name.to_owned(), Arc::downgrade(&registry));
    registry
}

#[derive(Debug)]
struct Memory {
    realm: String,
    registry: Arc<Registry>,
}

impl Backend for Memory {
    fn realm(&self) -> &str {
        &self.realm
    }

    fn permits(&self) -> Result<Arc<dyn PermitStore>> {
        let registry = Arc::clone(&self.registry);
        Ok(Arc::new(MemoryPermits::new(self.realm.clone(), registry)))
    }

    fn contender(&self, contender: &Contender, wake: &Unparker) -> Result<Box<dyn RawContender>> {
        Ok(Box::new(MemoryContender {
            registry: Arc::clone(&self.registry),
            contender: contender.clone(),
            unparker: wake.clone(),
        }))
    }

    fn observer(&self, mutex: &Arc<str>, wake: &Unparker) -> Result<Box<dyn RawObserver>> {
        Ok(Box::new(MemoryObserver {
            registry: Arc::clone(&self.registry),
            mutex: Arc::clone(mutex),
            unparker: wake.clone(),
        }))
    }

    fn ping(&self, _by: Moment) -> Result<()> {
        self.registry.reach().map(drop)
    }

    fn owner(&self, mutex: &Arc<str>, _by: Moment) -> Result<MutexOwner> {
        self.registry.look(mutex, |entry, now| entry.owner(now))
    }

    fn participants(&self, mutex: &Arc<str>, _by: Moment) -> Result<Vec<Participant>> {
        self.registry.look(mutex, |entry, _| entry.participants())
    }

    fn list(&self, _by: Moment) -> Result<Vec<Arc<str>>> {
        Ok(self.registry.reach()?.names())
    }

    fn revoke(&self, mutex: &Arc<str>, fence: u64, _by: Moment) -> Result<bool> {
        self.registry
            .look(mutex, |entry, now| entry.revoke(fence, now))
    }

    fn last_run(&self, mutex: &Arc<str>, _by: Moment) -> Result<Option<Duration>> {
        self.registry.look(mutex, |entry, now| entry.last_run(now))
    }

    fn record_run(
        &self,
        mutex: &Arc<str>,
        fence: u64,
        keep: Duration,
        _by: Moment,
    ) -> Result<bool> {
        self.registry
            .look(mutex, |entry, now| entry.record_run(fence, keep, now))
    }

    fn condition(&self) -> Condition {
        Condition {
            wakeups: Wakeups::Working,
            ..Condition::default()
        }
    }
}
