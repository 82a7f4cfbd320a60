//! `PermitGuard`: permits that are renewed, and given back when it goes out of scope.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::Receiver;

use super::holds::{Hold, Holds};
use super::semaphores::SharedSemaphores;
use crate::backend::permit_store::{Permit, Release};
use crate::error::{Error, ErrorKind, Result};
use crate::id::LiveId;
use crate::thread::Local;
use crate::timer::TaskId;

/// Holds permits for as long as it lives.
///
/// They are renewed in the background after every third of the ttl, and released when the guard is
/// dropped. If the server cannot be reached then, the release is sent once as soon as it can be; otherwise they
/// end with their ttl.
///
/// ```
/// use contend::semaphore::PermitRequest;
/// use std::time::Duration;
///
/// let semaphores = contend::connect("memory://permit-guard-doc")?.semaphores()?;
/// semaphores.create("downloads", 3)?;
/// let request = PermitRequest::generated().permits("downloads", 2);
/// let guard = semaphores.guard(&request, Duration::ZERO)?;
///
/// let lost = guard.lost();
/// for file in 0..3 {
///     if !guard.is_valid() {
///         break; // a quarter of the ttl is left to stop in
///     }
///     // write the file; the fence says in a log under which grant
///     let _ = (file, guard.fence("downloads"), &lost);
/// }
/// guard.release()?; // `Lost` if the permits were not held to the end
/// # Ok::<(), contend::Error>(())
/// ```
#[must_use = "an unused guard gives the permits back at once; bind it to a name: `let _guard = ..`"]
pub struct PermitGuard {
    /// With the external id, which has one guard at a time.
    shared: Local<(Arc<SharedSemaphores>, LiveId)>,
    hold: Arc<Hold>,
    /// It renews it, and ends belief in it. `None` once the guard has ended.
    task: Option<TaskId>,
}

impl PermitGuard {
    /// Holds what was granted.
    ///
    /// # Errors
    /// As [`Holds::add`].
    pub(super) fn new(
        shared: &Arc<SharedSemaphores>,
        hold: Arc<Hold>,
        id: LiveId,
    ) -> Result<PermitGuard> {
        let task = Some(Holds::add(shared, &hold)?);
        shared.count(&hold.permits, 1);
        let shared = Local::new((Arc::clone(shared), id));
        Ok(PermitGuard { shared, hold, task })
    }

    /// Returns the permits, in the order of the semaphores' names.
    ///
    /// ```
    /// use contend::semaphore::PermitRequest;
    /// use std::time::Duration;
    ///
    /// let semaphores = contend::connect("memory://guard-permits-doc")?.semaphores()?;
    /// semaphores.create("downloads", 5)?;
    /// let request = PermitRequest::generated().permits("downloads", 2);
    /// let guard = semaphores.guard(&request, Duration::ZERO)?;
    /// assert_eq!(guard.permits()[0].count, 2);
    /// # Ok::<(), contend::Error>(())
    /// ```
    #[must_use]
    pub fn permits(&self) -> Vec<Permit> {
        self.hold.permits.clone()
    }

    /// Returns the fence of a semaphore's permit: larger than that of every earlier grant of that semaphore.
    ///
    /// With a capacity of 1, reject any write whose fence is lower than the highest seen, as with a lock.
    /// With a larger capacity that check would reject valid holders, whose fences differ: there a fence only
    /// identifies the grant.
    ///
    /// ```
    /// use contend::semaphore::PermitRequest;
    /// use std::time::Duration;
    ///
    /// let semaphores = contend::connect("memory://permit-fence-doc")?.semaphores()?;
    /// semaphores.create("downloads", 5)?;
    /// let request = PermitRequest::generated().permits("downloads", 2);
    /// let guard = semaphores.guard(&request, Duration::ZERO)?;
    /// assert!(guard.fence("downloads").is_some() && guard.fence("network").is_none());
    /// # Ok::<(), contend::Error>(())
    /// ```
    #[must_use]
    pub fn fence(&self, semaphore: &str) -> Option<u64> {
        let mut permits = self.hold.permits.iter();
        let permit = permits.find(|it| &*it.semaphore == semaphore);
        permit.map(|permit| permit.fence)
    }

    /// Returns the external id that the permits are held under.
    #[must_use]
    pub fn external_id(&self) -> Arc<str> {
        Arc::clone(&self.hold.grant.external_id)
    }

    /// Returns `true` if the permits are certainly held at the moment of the call. This is correct even
    /// while renewal is blocked or the server is unreachable, and after the machine was suspended. Once
    /// `false`, it stays `false`.
    ///
    /// ```
    /// use contend::semaphore::PermitRequest;
    /// use std::time::Duration;
    ///
    /// let semaphores = contend::connect("memory://permit-is-valid-doc")?.semaphores()?;
    /// semaphores.create("downloads", 5)?;
    /// let request = PermitRequest::generated().permits("downloads", 2);
    /// let guard = semaphores.guard(&request, Duration::ZERO)?;
    /// for file in 0..3 {
    ///     if !guard.is_valid() {
    ///         break; // they were lost: a quarter of the ttl is left to stop in
    ///     }
    ///     println!("file {file}");
    /// }
    /// # Ok::<(), contend::Error>(())
    /// ```
    #[must_use]
    pub fn is_valid(&self) -> bool {
        !self.valid_for().is_zero()
    }

    /// Returns how long the permits are certainly held without another renewal; zero once they are not.
    #[must_use]
    pub fn valid_for(&self) -> Duration {
        match self.shared.here().is_some() {
            true => self.hold.valid_for(),
            false => Duration::ZERO,
        }
    }

    /// Returns a receiver that is disconnected when the permits are lost: at the end of the ttl if renewal
    /// failed, or as soon as the server reports that they were released or taken over. In the first case,
    /// a quarter of the ttl is left to stop. No message is ever sent. All receivers are disconnected, also
    /// when the guard ends.
    ///
    /// ```
    /// use contend::semaphore::PermitRequest;
    /// use std::time::Duration;
    ///
    /// let semaphores = contend::connect("memory://permit-lost-doc")?.semaphores()?;
    /// semaphores.create("downloads", 5)?;
    /// let request = PermitRequest::generated().permits("downloads", 2);
    /// let guard = semaphores.guard(&request, Duration::ZERO)?;
    /// semaphores.release(&guard.external_id())?; // as an operator does
    /// assert!(guard.lost().recv().is_err()); // disconnected
    /// # Ok::<(), contend::Error>(())
    /// ```
    #[must_use]
    pub fn lost(&self) -> Receiver<()> {
        self.hold.lost()
    }

    /// Gives the permits back.
    ///
    /// ```
    /// use contend::semaphore::PermitRequest;
    /// use std::time::Duration;
    ///
    /// let semaphores = contend::connect("memory://permit-release-doc")?.semaphores()?;
    /// semaphores.create("downloads", 5)?;
    /// let request = PermitRequest::generated().permits("downloads", 2);
    /// let guard = semaphores.guard(&request, Duration::ZERO)?;
    /// match guard.release() {
    ///     Ok(()) => println!("held to the end"),
    ///     Err(error) => println!("perhaps not: {error}"),
    /// }
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Lost` if they were not held to the end, so that more holders than the capacity allows may have
    /// worked at once. Otherwise the server could not be reached: the release is sent once as soon as it can be,
    /// or they end with their ttl.
    pub fn release(mut self) -> Result<()> {
        self.end()
    }

    fn end(&mut self) -> Result<()> {
        let Some(task) = self.task.take() else {
            return Ok(());
        };
        // In a child process the permits are still the parent's.
        let (shared, _) = self.shared.get()?;
        let (hold, id) = (&self.hold, &self.hold.grant.external_id);
        shared.holds.remove(task, &shared.core.timer);
        let was_valid = hold.end();
        shared.count(&hold.permits, -1);
        log::debug!("releases the permits of {id:?}");
        let later = || shared.release_later(hold.grant.clone(), hold.lease.ttl());
        if !was_valid {
            // The server may hang still.
            later();
            return Err(lost(id));
        }
        match shared.give_back(&hold.grant) {
            Ok(Release::Released) => Ok(()),
            Ok(_) => Err(lost(id)),
            Err(error) => {
                later();
                Err(error.context(format_args!(
                    "request {id:?} is not released; it is tried once more, else its permits end with their ttl"
                )))
            }
        }
    }
}

fn lost(external_id: &str) -> Error {
    let message = format!("the permits of {external_id:?} were lost before they were given back");
    Error::new(ErrorKind::Lost, message)
}

impl Drop for PermitGuard {
    fn drop(&mut self) {
        match self.end() {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::Forked => {}
            Err(error) => log::warn!("{error}"),
        }
    }
}

impl fmt::Debug for PermitGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PermitGuard")
            .field("external_id", &self.external_id())
            .field("permits", &self.permits())
            .field("valid_for", &self.valid_for())
            .finish()
    }
}
