//! A backend's side of an observer.

use std::sync::Arc;
use std::time::Duration;

use super::Common;
use super::contender::TICK;
use super::keys::Keys;
use super::script::{Call, Reply};
use super::subscription::Subscription;
use crate::backend::{RawObserver, View};
use crate::clock::Moment;
use crate::error::Result;
use crate::owner::MutexOwner;
use crate::parker::Unparker;
use crate::pool::Lane;

/// How long an observer of a free mutex looks away if nobody unparks it.
const IDLE: Duration = Duration::from_secs(60);

pub(super) struct RedisObserver {
    common: Arc<Common>,
    slot: u16,
    look: Call,
    subscription: Subscription,
}

impl RedisObserver {
    pub(super) fn new(common: &Arc<Common>, mutex: &str) -> RedisObserver {
        let keys = Keys::of(&common.settings.prefix, mutex);
        RedisObserver {
            common: Arc::clone(common),
            slot: keys.slot,
            look: Call::new(&common.scripts.observe, &[&keys.mutex, &keys.token], &[], 0),
            subscription: Subscription::of_observer(&keys),
        }
    }

    /// Reads who owns, and for how long at most that can stay so unnoticed.
    pub(super) fn look(&mut self, by: Moment) -> Result<(MutexOwner, Option<Duration>)> {
        let deployment = &self.common.deployment;
        let value = deployment.call(self.slot, &mut self.look, Lane::Other, by)?;
        let reply = Reply::observed(value)?;
        Ok((reply.owner(self.common.lease)?, reply.left()?))
    }
}

impl RawObserver for RedisObserver {
    fn listen(&mut self, unparker: &Unparker, by: Moment) -> Result<()> {
        self.subscription.listen(&self.common, unparker, by)
    }

    fn observe(&mut self, by: Moment) -> Result<View> {
        // First, so that what changes after this look is heard.
        self.subscription.follow(&self.common, by)?;
        let (owner, left) = self.look(by)?;
        Ok(View {
            owner,
            look_in: left.map_or(IDLE, |left| left.min(IDLE) + TICK),
        })
    }
}
