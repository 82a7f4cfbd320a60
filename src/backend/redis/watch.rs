//! An observer's place at a mutex.

use std::sync::Arc;
use std::time::Duration;

use super::Core;
use super::keys::Keys;
use super::listener::{Ear, Purpose};
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
    ear: Ear,
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
            ear: Ear::new(
                [
                    (keys.acquired(), Purpose::Change),
                    (keys.released(), Purpose::Change),
                ],
                keys.slot,
            ),
        }
    }

    fn about(&self, error: Error) -> Error {
        error.context(format_args!("mutex {:?}", self.mutex))
    }
}

impl Watch for RedisWatch {
    fn listen(&mut self, waker: &Waker, by: Moment) -> Result<()> {
        self.ear
            .listen(&self.core, waker, by)
            .map_err(|error| self.about(error))
    }

    fn observe(&mut self, by: Moment) -> Result<Sight> {
        let mut observe = || {
            // First, so that what changes after this look is heard.
            self.ear.follow(&self.core, by)?;
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
