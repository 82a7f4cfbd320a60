//! A backend's side of an observer.

use std::sync::Arc;
use std::time::Duration;

use super::Common;
use super::contender::TICK;
use super::keys::Keys;
use super::subscriber::Subscription;
use crate::backend::{RawObserver, View};
use crate::clock::Moment;
use crate::error::Result;
use crate::parker::Unparker;

/// The longest between two looks of an observer that hears nothing.
const IDLE: Duration = Duration::from_secs(60);

pub(super) struct RedisObserver {
    common: Arc<Common>,
    keys: Keys,
    subscription: Subscription,
}

impl RedisObserver {
    pub(super) fn new(common: &Arc<Common>, mutex: &str, wake: &Unparker) -> RedisObserver {
        let keys = common.keys(mutex);
        let channels = keys.channels(None);
        let wake = wake.clone();
        RedisObserver {
            subscription: Subscription::new("", move |_| wake.unpark(), channels, keys.slot),
            common: Arc::clone(common),
            keys,
        }
    }
}

impl RawObserver for RedisObserver {
    fn observe(&mut self, by: Moment) -> Result<View> {
        self.subscription.ensure(&self.common, by)?;
        let reply = self.common.look(&self.keys, by)?;
        Ok(View {
            owner: reply.owner(self.common.lease),
            look_in: reply.left().map_or(IDLE, |left| left.min(IDLE) + TICK),
        })
    }
}
