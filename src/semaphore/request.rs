//! `PermitRequest`: what a caller wants, and the checks that it must pass before anything is sent.

use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::name::check_text;

/// Longest name, external id and owner, in bytes.
pub(super) const MAX_TEXT: usize = 255;

/// The longest ttl: ten years, safe in every arithmetic on the server.
const MAX_TTL: Duration = Duration::from_secs(3660 * 24 * 3600);

/// More semaphores than this in one request are a mistake.
const MAX_SEMAPHORES: usize = 64;

/// A wish for permits of one or more semaphores, all of them or none.
///
/// The external id is the caller's own name for the operation, such as the id of its job. Whoever
/// repeats a request under the same external id gets the same permits and not more, so that an answer
/// that was lost does no harm. One external id stands for one operation: it is used up by its release.
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
    pub(super) external_id: Arc<str>,
    owner: Option<Arc<str>>,
    ttl: Option<Duration>,
    permits: Vec<(Arc<str>, u32)>,
}

impl PermitRequest {
    /// A request under `external_id`, for nothing yet.
    pub fn new(external_id: impl Into<Arc<str>>) -> PermitRequest {
        PermitRequest {
            external_id: external_id.into(),
            owner: None,
            ttl: None,
            permits: Vec::new(),
        }
    }

    /// Adds `count` permits of `semaphore`, which must not be among those wanted already.
    pub fn permits(mut self, semaphore: impl Into<Arc<str>>, count: u32) -> PermitRequest {
        self.permits.push((semaphore.into(), count));
        self
    }

    /// Who holds the permits: what the liveness check asks about. Default: nobody that can be asked.
    pub fn owner(mut self, owner: impl Into<Arc<str>>) -> PermitRequest {
        self.owner = Some(owner.into());
        self
    }

    /// How long the permits last without a renewal before a sweep may take them back.
    /// Default: until they are stale.
    pub fn ttl(mut self, ttl: Duration) -> PermitRequest {
        self.ttl = Some(ttl);
        self
    }

    /// The request in the form in which it is carried out.
    pub(super) fn check(&self) -> Result<Wish> {
        check_text("external id", &self.external_id, MAX_TEXT)?;
        if let Some(owner) = &self.owner {
            check_text("owner", owner, MAX_TEXT)?;
        }
        if let Some(ttl) = self.ttl {
            let whole = ttl.subsec_nanos().is_multiple_of(1_000_000);
            if ttl.is_zero() || ttl > MAX_TTL || !whole {
                return Err(Error::invalid(format!(
                    "a ttl of {ttl:?} is not allowed; it must be whole milliseconds, above zero and at \
                     most ten years"
                )));
            }
        }
        if self.permits.is_empty() || self.permits.len() > MAX_SEMAPHORES {
            return Err(Error::invalid(format!(
                "request {:?} names {} semaphores; it must name 1 to {MAX_SEMAPHORES}",
                self.external_id,
                self.permits.len()
            )));
        }
        for (semaphore, count) in &self.permits {
            check_text("semaphore name", semaphore, MAX_TEXT)?;
            if *count == 0 || i32::try_from(*count).is_err() {
                return Err(Error::invalid(format!(
                    "request {:?} wants {count} permits of the semaphore {semaphore:?}; it must want 1 \
                     to {}",
                    self.external_id,
                    i32::MAX
                )));
            }
        }
        let mut permits = self.permits.clone();
        permits.sort();
        let neighbours = permits.iter().zip(permits.iter().skip(1));
        if let Some(((name, _), _)) = neighbours.into_iter().find(|(one, two)| one.0 == two.0) {
            return Err(Error::invalid(format!(
                "request {:?} names the semaphore {name:?} twice; add the counts up",
                self.external_id
            )));
        }
        Ok(Wish {
            external_id: Arc::clone(&self.external_id),
            owner: self.owner.clone(),
            ttl: self.ttl,
            permits,
        })
    }
}

/// A request that passed the checks, sorted by name.
#[derive(Clone, Debug)]
pub(super) struct Wish {
    pub(super) external_id: Arc<str>,
    pub(super) owner: Option<Arc<str>>,
    pub(super) ttl: Option<Duration>,
    pub(super) permits: Vec<(Arc<str>, u32)>,
}

impl Wish {
    pub(super) fn names(&self) -> Vec<Arc<str>> {
        self.permits
            .iter()
            .map(|(name, _)| Arc::clone(name))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn what_makes_no_sense_is_refused_before_anything_is_sent() {
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
            (base().ttl(Duration::ZERO), "ttl"),
            (base().ttl(Duration::from_nanos(1)), "ttl"),
            (base().ttl(Duration::MAX), "ttl"),
        ] {
            let error = request.check().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{request:?}");
            assert!(error.to_string().contains(says), "{error}");
        }
    }

    #[test]
    fn a_wish_is_sorted_by_name() {
        let wish = PermitRequest::new("{id}")
            .permits("b", 2)
            .permits("a", 1)
            .check()
            .unwrap();
        let names: Vec<&str> = wish.permits.iter().map(|(name, _)| &**name).collect();
        assert_eq!(names, ["a", "b"]);
    }
}
