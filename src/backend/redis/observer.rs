//! A backend's side of an observer.

use std::sync::Arc;
use std::time::Duration;

use super::Common;
use super::contender::TICK;
use super::keys::Keys;
use super::script::{Command, Reply};
use super::subscriber::{Channel, Role, Subscription, Wake};
use crate::backend::{RawObserver, View};
use crate::clock::Moment;
use crate::error::Result;
use crate::owner::MutexOwner;
use crate::parker::Unparker;
use crate::pool::Lane;

/// The longest between two looks of an observer that hears nothing.
const IDLE: Duration = Duration::from_secs(60);

/// The question who owns a mutex.
pub(super) fn owner_request(common: &Common, keys: &Keys) -> Command {
    let names = [&*keys.mutex, &*keys.token];
    Command::script(&common.scripts.observe, keys.slot, &names)
}

/// Reads who owns, and for how long at most that can stay so unnoticed.
pub(super) fn owner(
    common: &Common,
    request: &Command,
    by: Moment,
) -> Result<(MutexOwner, Option<Duration>)> {
    let reply = Reply::read(common.deployment.ask(Lane::Other, by, request)?)?;
    Ok((reply.owner(common.lease), reply.left()))
}

pub(super) struct RedisObserver {
    common: Arc<Common>,
    request: Command,
    subscription: Subscription,
}

impl RedisObserver {
    pub(super) fn new(common: &Arc<Common>, mutex: &str, wake: &Unparker) -> RedisObserver {
        let keys = Keys::of(&common.settings.prefix, mutex);
        let channels = vec![
            (keys.changes(), Channel::Changes),
            (keys.handed(), Channel::Handed),
        ];
        let wake = Wake::Contender(wake.clone());
        RedisObserver {
            request: owner_request(common, &keys),
            subscription: Subscription::new("", wake, Role::Observing, channels, keys.slot),
            common: Arc::clone(common),
        }
    }
}

impl RawObserver for RedisObserver {
    fn observe(&mut self, by: Moment) -> Result<View> {
        self.subscription.ensure(&self.common, by)?;
        let (owner, left) = owner(&self.common, &self.request, by)?;
        Ok(View {
            owner,
            look_in: left.map_or(IDLE, |left| left.min(IDLE) + TICK),
        })
    }
}
