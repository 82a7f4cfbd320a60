//! What every contender is built from: for which mutex, under which id, with which lease.

use std::sync::Arc;
use std::time::Duration;

use super::claim::Claim;
use crate::backend::{Backend, Hold, Place};
use crate::error::Result;
use crate::factory::Factory;
use crate::id::ContenderIdGenerator;
use crate::lease::Lease;
use crate::name::{check_id, check_mutex};
use crate::period::ContendPeriod;

/// What a builder has been told, unchecked.
#[derive(Debug)]
pub(crate) struct Terms {
    pub(crate) factory: Factory,
    pub(crate) mutex: Arc<str>,
    pub(crate) id: Option<Arc<str>>,
    pub(crate) ids: ContenderIdGenerator,
    pub(crate) ttl: Duration,
    pub(crate) transition: Duration,
    pub(crate) renew_after: Option<Duration>,
    pub(crate) jitter: Option<Duration>,
}

/// The same, checked; the id is this contender's alone for as long as it keeps the claim.
pub(crate) struct Settled {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) place: Place,
    pub(crate) period: ContendPeriod,
    pub(crate) claim: Claim,
}

impl Terms {
    pub(crate) fn new(factory: Factory, mutex: &str) -> Terms {
        let lease = factory.lease();
        Terms {
            factory,
            mutex: Arc::from(mutex),
            id: None,
            ids: ContenderIdGenerator::default(),
            ttl: lease.ttl(),
            transition: lease.transition(),
            renew_after: None,
            jitter: None,
        }
    }

    pub(crate) fn settle(self, hold: Hold) -> Result<Settled> {
        let backend = Arc::clone(self.factory.backend()?);
        check_mutex(&self.mutex)?;
        let id = self.id.unwrap_or_else(|| Arc::from(self.ids.generate()));
        check_id(&id)?;
        let lease = Lease::new(self.ttl, self.transition)?;
        let mut period = ContendPeriod::new(lease);
        if let Some(renew_after) = self.renew_after {
            period = period.renew_after(renew_after)?;
        }
        if let Some(jitter) = self.jitter {
            period = period.jitter(jitter);
        }
        let place = Place {
            mutex: self.mutex,
            id,
            lease,
            hold,
        };
        let claim = Claim::new(backend.realm(), &place.mutex, &place.id)?;
        Ok(Settled {
            backend,
            place,
            period,
            claim,
        })
    }
}
