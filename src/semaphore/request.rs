//! `PermitRequest`: what a caller wants, `Acquisition`: what it gets, and `Wait`: for how long it waits.

use std::sync::Arc;
use std::time::Duration;

use crate::backend::permit_store::{Exhausted, Permit, Request};
use crate::cancel::{Cancel, Watched};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::id::ContenderIdGenerator;
use crate::lease::Lease;
use crate::name::check_text;
use crate::parker::Unparker;

/// Longest name, external id and owner, in bytes.
pub(super) const MAX_TEXT: usize = 255;

/// More semaphores than this in one request are a mistake.
const MAX_SEMAPHORES: usize = 64;

/// The shortest ttl: a renewal has a quarter of it.
const MIN_TTL: Duration = Duration::from_millis(100);

/// A request for permits of one or more semaphores, all of them or none.
///
/// The external id is the caller's name for the operation, such as the id of its job. Repeating a request
/// under the same external id gets the same permits and no more, so that a lost answer does no harm. One
/// external id stands for one operation: it is used up when the permits are released. A request that is
/// only used with guards does not need one: see [`generated`](PermitRequest::generated).
///
/// ```
/// use contend::semaphore::PermitRequest;
/// use std::time::Duration;
///
/// let request = PermitRequest::new("job-123")
///     .permits("backup", 1)
///     .permits("network", 2)
///     .owner("worker-7")
///     .ttl(Duration::from_secs(60));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub struct PermitRequest {
    /// `None`: every guard has one of its own.
    external_id: Option<Arc<str>>,
    owner: Option<Arc<str>>,
    ttl: Option<Duration>,
    permits: Vec<(Arc<str>, u32)>,
}

impl PermitRequest {
    /// Creates a request under `external_id`, without any permits yet.
    ///
    /// ```
    /// use contend::semaphore::PermitRequest;
    ///
    /// let request = PermitRequest::new("job-123").permits("backup", 1);
    /// assert_eq!(request.external_id(), Some("job-123"));
    /// ```
    pub fn new(external_id: impl Into<Arc<str>>) -> PermitRequest {
        PermitRequest {
            external_id: Some(external_id.into()),
            owner: None,
            ttl: None,
            permits: Vec::new(),
        }
    }

    /// Creates a request for guards only, each of which gets its own external id.
    ///
    /// ```
    /// use contend::semaphore::PermitRequest;
    ///
    /// let request = PermitRequest::generated().permits("backup", 1);
    /// assert_eq!(request.external_id(), None);
    /// ```
    pub fn generated() -> PermitRequest {
        PermitRequest {
            external_id: None,
            ..PermitRequest::new("")
        }
    }

    /// Adds `count` permits of `semaphore`, which must not have been added before.
    ///
    /// ```
    /// use contend::semaphore::PermitRequest;
    ///
    /// // One slot and two shares of the network, or neither.
    /// let request = PermitRequest::generated().permits("backup", 1).permits("network", 2);
    /// ```
    pub fn permits(mut self, semaphore: impl Into<Arc<str>>, count: u32) -> PermitRequest {
        self.permits.push((semaphore.into(), count));
        self
    }

    /// Sets the owner of the permits, which liveness checks are called with. Defaults to none.
    ///
    /// ```
    /// use contend::semaphore::PermitRequest;
    ///
    /// let request = PermitRequest::new("job-123").permits("backup", 1).owner("host-7");
    /// ```
    pub fn owner(mut self, owner: impl Into<Arc<str>>) -> PermitRequest {
        self.owner = Some(owner.into());
        self
    }

    /// Sets how long the permits last without a renewal. Defaults to 30 s for a guard, which renews them;
    /// without a guard they do not expire by default, and only maintenance takes them back after a crash.
    ///
    /// ```
    /// use contend::semaphore::PermitRequest;
    /// use std::time::Duration;
    ///
    /// let request = PermitRequest::new("job-123").permits("backup", 1);
    /// let request = request.ttl(Duration::from_secs(60)); // free 75 s after the last renewal
    /// ```
    pub fn ttl(mut self, ttl: Duration) -> PermitRequest {
        self.ttl = Some(ttl);
        self
    }

    /// Returns the external id; `None` if every guard gets its own.
    #[must_use]
    pub fn external_id(&self) -> Option<&str> {
        self.external_id.as_deref()
    }

    /// The request as it is carried out: by a guard, with the ttl that it has by default, or without one.
    pub(super) fn check(&self, guard: Option<Duration>) -> Result<Request> {
        let external_id = match &self.external_id {
            Some(id) => Arc::clone(id),
            None if guard.is_some() => Arc::from(ContenderIdGenerator::Host.generate()),
            None => {
                return Err(Error::invalid(
                    "without a guard a request needs an external id, which its release names: \
                     PermitRequest::new(id)",
                ));
            }
        };
        check_text("external id", &external_id, MAX_TEXT)?;
        if let Some(owner) = &self.owner {
            check_text("owner", owner, MAX_TEXT)?;
        }
        let ttl = self.ttl.or(guard);
        if let Some(ttl) = ttl {
            lease_of(ttl)?;
        }
        let refused = |text: String| Err(Error::invalid(format!("request {external_id:?} {text}")));
        let mut permits = self.permits.clone();
        permits.sort();
        if permits.is_empty() || permits.len() > MAX_SEMAPHORES {
            let count = permits.len();
            return refused(format!(
                "names {count} semaphores; it must name 1 to {MAX_SEMAPHORES}"
            ));
        }
        for (at, (semaphore, count)) in permits.iter().enumerate() {
            check_text("semaphore name", semaphore, MAX_TEXT)?;
            if *count == 0 || i32::try_from(*count).is_err() {
                return refused(format!(
                    "wants {count} permits of the semaphore {semaphore:?}; it must want 1 to {}",
                    i32::MAX
                ));
            }
            if permits
                .iter()
                .skip(at + 1)
                .any(|(other, _)| other == semaphore)
            {
                return refused(format!(
                    "names the semaphore {semaphore:?} twice; add the counts up"
                ));
            }
        }
        Ok(Request {
            external_id,
            owner: self.owner.clone(),
            ttl,
            permits,
            token: rand::random::<u64>() >> 1,
            take_over: guard.is_some(),
            generated: self.external_id.is_none(),
        })
    }
}

/// A ttl and the quarter of it in which the permits are not taken back.
///
/// # Errors
/// `InvalidInput` for a ttl that could not be renewed in time, or that a server cannot count.
pub(super) fn lease_of(ttl: Duration) -> Result<Lease> {
    if ttl < MIN_TTL {
        return Err(Error::invalid(format!(
            "a ttl of {ttl:?} is too short to renew in; at least {MIN_TTL:?} is needed"
        )));
    }
    let quarter = Duration::from_millis(u64::try_from((ttl / 4).as_millis()).unwrap_or(u64::MAX));
    Lease::new(ttl, quarter)
}

/// The outcome of a request for permits.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Acquisition {
    /// All permits were acquired.
    Acquired(Vec<Permit>),
    /// An earlier call with the same external id holds these permits; nothing was changed.
    #[non_exhaustive]
    AlreadyAcquired {
        /// The permits.
        permits: Vec<Permit>,
        /// How much of their ttl is left; zero once they may be taken back. `None` without a ttl.
        expires_in: Option<Duration>,
    },
    /// The external id is used up: what was acquired under it has been released, or nothing ever was
    /// acquired.
    AlreadyReleased,
    /// A semaphore does not have enough free permits; nothing was taken from any.
    Exhausted(Exhausted),
}

impl Acquisition {
    /// Returns the permits if they are held, whether this call or an earlier one acquired them.
    ///
    /// ```
    /// use contend::semaphore::PermitRequest;
    ///
    /// let semaphores = contend::connect("memory://into-permits-doc")?.semaphores()?;
    /// semaphores.create("backup", 2)?;
    /// let request = PermitRequest::new("job-123").permits("backup", 1);
    /// for permit in semaphores.acquire(&request)?.into_permits()? {
    ///     println!("{} of {}, fence {}", permit.count, permit.semaphore, permit.fence);
    /// }
    /// # Ok::<(), contend::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Exhausted`; `Conflict` if the external id is used up; `Lost` if the ttl of what an earlier call
    /// acquired has passed.
    pub fn into_permits(self) -> Result<Vec<Permit>> {
        match self {
            Acquisition::AlreadyAcquired {
                expires_in: Some(Duration::ZERO),
                ..
            } => Err(Error::new(
                ErrorKind::Lost,
                "the ttl of the permits that an earlier call acquired under this external id has passed; \
                 renew them before it does, or hold them with a guard",
            )),
            Acquisition::Acquired(permits) | Acquisition::AlreadyAcquired { permits, .. } => {
                Ok(permits)
            }
            Acquisition::AlreadyReleased => Err(used_up()),
            Acquisition::Exhausted(exhausted) => Err(exhausted_error(&exhausted)),
        }
    }
}

/// Whether the owner of a permit is alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Liveness {
    /// It is alive: its permits are left alone.
    Alive,
    /// It is gone for good: its permits are released.
    Dead,
    /// It is not known: its permits are left alone.
    Unknown,
}

/// The error of a request that was released before.
pub(super) fn used_up() -> Error {
    Error::new(
        ErrorKind::Conflict,
        "the permits of this external id were released; ask again under a new one",
    )
}

pub(super) fn exhausted_error(exhausted: &Exhausted) -> Error {
    Error::new(ErrorKind::Exhausted, exhausted.to_string())
}

/// How long a request waits for permits, and what ends the wait.
///
/// A [`Duration`] converts into one.
///
/// ```
/// use contend::Cancel;
/// use contend::semaphore::Wait;
/// use std::time::Duration;
///
/// let cancel = Cancel::new(); // given to the thread that handles SIGTERM
/// let wait = Wait::at_most(Duration::from_secs(60)).cancel(&cancel);
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct Wait {
    /// `None`: for as long as it takes.
    timeout: Option<Duration>,
    cancels: Vec<Cancel>,
}

impl Wait {
    /// Waits for as long as it takes.
    ///
    /// ```
    /// use contend::Cancel;
    /// use contend::semaphore::Wait;
    ///
    /// let stopping = Cancel::new();
    /// let wait = Wait::forever().cancel(&stopping);
    /// ```
    pub fn forever() -> Wait {
        Wait {
            timeout: None,
            cancels: Vec::new(),
        }
    }

    /// Waits for at most `timeout`. Zero does not wait for permits: it makes one request, which may take 4 s,
    /// retries included, if the server does not answer.
    ///
    /// ```
    /// use contend::semaphore::Wait;
    /// use std::time::Duration;
    ///
    /// let wait = Wait::at_most(Duration::from_secs(60));
    /// let same: Wait = Duration::from_secs(60).into();
    /// # drop((wait, same));
    /// ```
    pub fn at_most(timeout: Duration) -> Wait {
        Wait {
            timeout: Some(timeout),
            ..Wait::forever()
        }
    }

    /// Ends the wait with [`ErrorKind::Cancelled`](crate::ErrorKind) when `cancel` is cancelled. If several are
    /// given, each of them ends it.
    pub fn cancel(mut self, cancel: &Cancel) -> Wait {
        self.cancels.push(cancel.clone());
        self
    }

    pub(super) fn deadline(&self) -> Moment {
        self.timeout
            .map_or(Moment::FAR, |timeout| Moment::now() + timeout)
    }

    pub(super) fn is_zero(&self) -> bool {
        self.timeout.is_some_and(|timeout| timeout.is_zero())
    }

    /// Unparks `unparker` when the wait is cancelled.
    pub(super) fn watch(&self, unparker: &Unparker) -> Vec<Watched> {
        let cancels = self.cancels.iter();
        cancels.map(|cancel| cancel.watch(unparker)).collect()
    }

    pub(super) fn cancelled_at(&self) -> Option<Moment> {
        self.cancels.iter().filter_map(Cancel::cancelled_at).min()
    }
}

impl From<Duration> for Wait {
    fn from(timeout: Duration) -> Wait {
        Wait::at_most(timeout)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn senseless_request_is_not_sent() {
        let long = "x".repeat(256);
        let base = || PermitRequest::new("id").permits("a", 1);
        for (request, says) in [
            (PermitRequest::new("id"), "names 0 semaphores"),
            (PermitRequest::new("").permits("a", 1), "is empty"),
            (PermitRequest::new(&*long).permits("a", 1), "is too long"),
            (PermitRequest::new("id ").permits("a", 1), "white space"),
            (PermitRequest::new("id").permits("a", 0), "wants 0 permits"),
            (PermitRequest::new("id").permits("a", u32::MAX), "wants"),
            (PermitRequest::new("id").permits("", 1), "is empty"),
            (PermitRequest::new("id").permits(&*long, 1), "is too long"),
            (base().permits("b", 1).permits("a", 2), "twice"),
            (base().owner(""), "owner"),
            (base().ttl(Duration::ZERO), "at least 100ms"),
            (base().ttl(Duration::from_millis(99)), "at least 100ms"),
            (base().ttl(Duration::from_nanos(500_000_001)), "ttl"),
            (base().ttl(Duration::MAX), "ttl"),
            (
                PermitRequest::generated().permits("a", 1),
                "needs an external id",
            ),
        ] {
            let error = request.check(None).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{request:?}");
            assert!(error.to_string().contains(says), "{error}");
        }
    }

    #[test]
    fn request_is_sorted_and_completed() {
        let request = PermitRequest::generated().permits("b", 2).permits("a", 1);
        let default = Duration::from_secs(30);
        let checked = request.check(Some(default)).unwrap();
        let names: Vec<&str> = checked.permits.iter().map(|(name, _)| &**name).collect();
        assert_eq!(names, ["a", "b"]);
        assert_eq!(checked.ttl, Some(default));
        let other = request.check(Some(default)).unwrap();
        assert_ne!(checked.external_id, other.external_id);
    }
}
