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

/// The question who owns a mutex.
pub(super) struct Look {
    common: Arc<Common>,
    slot: u16,
    call: Call,
}

impl Look {
    pub(super) fn new(common: &Arc<Common>, mutex: &str) -> Look {
        let keys = Keys::of(&common.settings.prefix, mutex);
        Look {
            common: Arc::clone(common),
            slot: keys.slot,
            call: Call::new(&common.scripts.observe, &[&keys.mutex, &keys.token], &[], 0),
        }
    }

    /// Reads who owns, and for how long at most that can stay so unnoticed.
    pub(super) fn run(&mut self, by: Moment) -> Result<(MutexOwner, Option<Duration>)> {
        let deployment = &self.common.deployment;
        let value = deployment.call(self.slot, &mut self.call, Lane::Other, by)?;
        let reply = Reply::observed(value)?;
        Ok((reply.owner(self.common.lease)?, reply.left()?))
    }
}

pub(super) struct RedisObserver {
    look: Look,
    subscription: Subscription,
}

impl RedisObserver {
    pub(super) fn new(look: Look, mutex: &str, wake: &Unparker) -> RedisObserver {
        let keys = Keys::of(&look.common.settings.prefix, mutex);
        RedisObserver {
            subscription: Subscription::of_observer(&keys, wake),
            look,
        }
    }
}

impl RawObserver for RedisObserver {
    fn observe(&mut self, by: Moment) -> Result<View> {
        self.subscription.ensure(&self.look.common, by)?;
        let (owner, left) = self.look.run(by)?;
        Ok(View {
            owner,
            look_in: left.map_or(IDLE, |left| left.min(IDLE) + TICK),
        })
    }
}
