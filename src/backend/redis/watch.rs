//! An observer's place at a mutex.

use std::sync::Arc;
use std::time::Duration;

use super::Core;
use super::keys::Keys;
use super::listener::{Listener, Purpose, Subscription};
use super::pool::Lane;
use super::reply::Reply;
use super::script::Call;
use super::seat::TICK;
use crate::backend::{Sight, Watch};
use crate::bell::Waker;
use crate::clock::Moment;
use crate::error::{Error, Result};

/// How long an observer of a free mutex looks away if nobody rings.
const IDLE: Duration = Duration::from_secs(60);

pub(super) struct RedisWatch {
    core: Arc<Core>,
    mutex: Arc<str>,
    slot: u16,
    look: Call,
    channels: [(Vec<u8>, Purpose); 2],
    subscription: Option<Subscription>,
}

impl RedisWatch {
    pub(super) fn new(core: &Arc<Core>, mutex: &Arc<str>) -> RedisWatch {
        let keys = Keys::of(&core.prefix, mutex);
        let mut look = Call::new(&core.scripts.renew, &keys, &[b"", b"0"], 2);
        look.set(&[b""]);
        RedisWatch {
            core: Arc::clone(core),
            mutex: Arc::clone(mutex),
            slot: keys.slot,
            look,
            channels: [
                (keys.acquired(), Purpose::Change),
                (keys.released(), Purpose::Change),
            ],
            subscription: None,
        }
    }

    fn about(&self, error: Error) -> Error {
        error.context(format_args!("mutex {:?}", self.mutex))
    }
}

impl Watch for RedisWatch {
    fn listen(&mut self, waker: &Waker, by: Moment) -> Result<()> {
        let node = self.core.node(self.slot, by);
        let node = node.map_err(|error| self.about(error))?;
        let known = self.subscription.as_ref();
        if known.is_some_and(|known| known.listener.rings(waker) && Arc::ptr_eq(&known.node, &node))
        {
            return Ok(());
        }
        self.subscription = None;
        let listener = Arc::new(Listener::new(waker));
        let subscribed = node.subscribe(&self.channels, &listener, by);
        self.subscription = Some(subscribed.map_err(|error| self.about(error))?);
        Ok(())
    }

    fn observe(&mut self, by: Moment) -> Result<Sight> {
        let mut observe = || {
            let value = self.core.call(self.slot, &mut self.look, Lane::Other, by)?;
            let reply = Reply::read(value)?;
            let owner = reply.owner(self.core.lease)?;
            let again_in = if owner.has_owner() {
                reply.left()?.unwrap_or(IDLE).min(IDLE) + TICK
            } else {
                IDLE
            };
            Ok(Sight { owner, again_in })
        };
        observe().map_err(|error| self.about(error))
    }
}
