//! Backends with a bug in them, to show that the checker would see it: wrapped around the real ones at
//! the backend's own contract, so that the same four bugs stand in each of them.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crate::checker::Rule;
use crate::ground::Fault;
use crate::hooked;
use contend::backend::{Attempt, Backend, Contender, Grant, OnRefusal, RawContender, Renewal};
use contend::{Factory, Lease, Moment, MutexOwner, Result};

/// A bug that a lock might have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// Belief counts from the reply, not from before the request.
    LeaseFromReply,
    /// A release frees any owner.
    ReleaseUnchecked,
    /// Two ownerships get the same fence.
    FenceRepeats,
    /// A waiter that is woken believes before it has claimed.
    HandOverUnclaimed,
}

impl Bug {
    /// All of them.
    pub const ALL: [Bug; 4] = [
        Bug::LeaseFromReply,
        Bug::ReleaseUnchecked,
        Bug::FenceRepeats,
        Bug::HandOverUnclaimed,
    ];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Bug::LeaseFromReply => "lease-from-reply",
            Bug::ReleaseUnchecked => "release-unchecked",
            Bug::FenceRepeats => "fence-repeats",
            Bug::HandOverUnclaimed => "hand-over-unclaimed",
        }
    }

    /// The fault that brings it to light soonest.
    pub fn provoked_by(self) -> Option<Fault> {
        (self == Bug::LeaseFromReply).then_some(Fault::Fade)
    }

    /// Whether this bug breaks that rule.
    pub fn breaks(self, rule: Rule) -> bool {
        let overlaps = self != Bug::FenceRepeats && rule == Rule::NoOverlap;
        overlaps || matches!(rule, Rule::FenceGrows | Rule::FenceIsUnique)
    }

    /// The bug of this name.
    pub fn named(name: &str) -> Option<Bug> {
        Bug::ALL.into_iter().find(|bug| bug.name() == name)
    }
}

/// The same factory with a bug.
pub fn plant(factory: &Factory, bug: Bug) -> Factory {
    let backend = factory.backend().expect("a factory of this process");
    hooked::wrapping(factory, move |inner, contender| {
        Box::new(PlantedContender {
            inner,
            backend: Arc::clone(&backend),
            contender: contender.clone(),
            bug,
            real_fence: 0,
            by_reply: None,
            refused_by: None,
        })
    })
}

struct PlantedContender {
    inner: Box<dyn RawContender>,
    backend: Arc<dyn Backend>,
    contender: Contender,
    bug: Bug,
    /// The fence that the backend knows, where another one was told.
    real_fence: u64,
    /// The last grant, where something else than the lease keeps an ownership alive (a session), and until
    /// when it is believed on account of the reply alone.
    by_reply: Option<(Grant, Moment)>,
    /// The fence of the owner that the last attempt was refused for.
    refused_by: Option<u64>,
}

impl PlantedContender {
    fn lease(&self) -> Lease {
        self.contender.lease
    }

    /// What the front is told of a grant.
    fn bend(&mut self, mut grant: Grant) -> Grant {
        self.real_fence = grant.owner.fence();
        match self.bug {
            Bug::LeaseFromReply => {
                let until = Moment::now() + self.lease().belief();
                self.by_reply = grant.until.map(|_| (grant.clone(), until));
                grant.until = Some(until);
            }
            Bug::FenceRepeats => grant.owner = with_fence(&grant.owner, 7),
            Bug::ReleaseUnchecked | Bug::HandOverUnclaimed => {}
        }
        grant
    }

    fn real(&self, fence: u64) -> u64 {
        match self.bug {
            Bug::FenceRepeats => self.real_fence,
            _ => fence,
        }
    }
}

fn with_fence(owner: &MutexOwner, fence: u64) -> MutexOwner {
    MutexOwner::new(
        owner.owner_id(),
        owner.acquired_at(),
        owner.ttl_at(),
        owner.transition_at(),
        fence,
    )
}

impl RawContender for PlantedContender {
    fn acquire(&mut self, on_refusal: OnRefusal, by: Moment) -> Result<Attempt> {
        if let (Bug::HandOverUnclaimed, Some(fence)) = (self.bug, self.refused_by.take()) {
            let fence = fence + 1;
            let id = Arc::clone(&self.contender.id);
            return Ok(Attempt::Granted(Grant {
                owner: MutexOwner::new(id, 0, u64::MAX / 2, u64::MAX / 2, fence),
                until: Some(Moment::now() + self.lease().belief() / 4),
            }));
        }
        Ok(match self.inner.acquire(on_refusal, by)? {
            Attempt::Granted(grant) => Attempt::Granted(self.bend(grant)),
            Attempt::Refused(refusal) => {
                if on_refusal == OnRefusal::Enqueue && refusal.owner.has_owner() {
                    self.refused_by = Some(refusal.owner.fence());
                }
                Attempt::Refused(refusal)
            }
        })
    }

    fn renew(&mut self, fence: u64, by: Moment) -> Result<Renewal> {
        match self.inner.renew(self.real(fence), by) {
            Ok(Renewal::Renewed(grant)) => Ok(Renewal::Renewed(self.bend(grant))),
            other => match &self.by_reply {
                // It does not ask its session: a reply was enough.
                Some((grant, until)) if grant.owner.fence() == fence && *until > Moment::now() => {
                    Ok(Renewal::Renewed(Grant {
                        owner: grant.owner.clone(),
                        until: Some(*until),
                    }))
                }
                _ => other,
            },
        }
    }

    fn release(&mut self, fence: u64, by: Moment) -> Result<bool> {
        if self.bug == Bug::ReleaseUnchecked {
            let outcome = self.inner.release(fence, by);
            // Repeated a little later, it frees whichever contender owns by then.
            thread::sleep(Duration::from_millis(2));
            let by = Moment::now() + self.lease().request_limit();
            let owner = self.backend.owner(&self.contender.mutex, by)?;
            self.backend
                .revoke(&self.contender.mutex, owner.fence(), by)?;
            return outcome;
        }
        self.inner.release(self.real(fence), by)
    }

    fn withdraw(&mut self, by: Moment) -> Result<()> {
        self.inner.withdraw(by)
    }
}
