//! Who is rung when a message comes, and the subscription that lasts as long as somebody holds it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::Core;
use super::node::Node;
use crate::bell::Waker;
use crate::clock::Moment;
use crate::error::Result;

/// What a channel is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// `released@@ID`: it is this contender's turn.
    Turn,
    /// Milliseconds: somebody else's turn, and this contender's after that time.
    Next,
    /// Whatever it says, the owner may have changed.
    Change,
}

/// One seat or watch, as the subscriber sees it.
#[derive(Debug)]
pub(super) struct Listener {
    waker: Waker,
    /// When to ring if the one before us has not claimed by then: nanoseconds of the boot-time
    /// clock, 0 for never.
    alarm: AtomicU64,
    /// Whoever waits for the acknowledgement of its subscription waits here.
    pub(super) settled: Condvar,
    /// Who said last that it released the mutex.
    released_by: Mutex<Option<Vec<u8>>>,
}

impl Listener {
    pub(super) fn new(waker: &Waker) -> Listener {
        Listener {
            waker: waker.clone(),
            alarm: AtomicU64::new(0),
            settled: Condvar::new(),
            released_by: Mutex::new(None),
        }
    }

    pub(super) fn wake(&self) {
        self.waker.wake();
    }

    /// Takes a message. Returns when to call [`Listener::ring_alarm`], if it is to be called.
    pub(super) fn take(&self, purpose: Purpose, payload: &[u8]) -> Option<Moment> {
        match purpose {
            Purpose::Turn => {
                if let Some(id) = payload.strip_prefix(b"released@@") {
                    *self.released_by.lock() = Some(id.to_vec());
                }
                self.calm();
                self.wake();
                None
            }
            Purpose::Next => {
                let ms = std::str::from_utf8(payload).ok()?.parse().ok()?;
                // A little later than the claim ends, so that the look finds it ended.
                let at = Moment::now() + Duration::from_millis(ms) + Duration::from_millis(5);
                self.alarm.store(nanos(at), Ordering::Relaxed);
                Some(at)
            }
            Purpose::Change => {
                self.wake();
                None
            }
        }
    }

    /// Rings if the alarm for that moment still stands.
    pub(super) fn ring_alarm(&self, at: Moment) {
        let due = nanos(at);
        if self
            .alarm
            .compare_exchange(due, 0, Ordering::Relaxed, Ordering::Relaxed)
            .is_ok()
        {
            self.wake();
        }
    }

    /// Forgets the alarm: the turn has come, or is past.
    pub(super) fn calm(&self) {
        self.alarm.store(0, Ordering::Relaxed);
    }

    /// Who said last that it released the mutex, once.
    pub(super) fn take_released_by(&self) -> Option<Vec<u8>> {
        self.released_by.lock().take()
    }
}

/// How a seat or watch listens: its channels, and the subscription while there is one.
pub(super) struct Ear {
    channels: [(Vec<u8>, Purpose); 2],
    slot: u16,
    subscription: Option<Subscription>,
}

impl Ear {
    pub(super) fn new(channels: [(Vec<u8>, Purpose); 2], slot: u16) -> Ear {
        Ear {
            channels,
            slot,
            subscription: None,
        }
    }

    /// Returns once `waker` rings for every message.
    pub(super) fn listen(&mut self, core: &Core, waker: &Waker, by: Moment) -> Result<()> {
        if self.listener().is_some_and(|known| known.waker.same(waker)) {
            return self.follow(core, by);
        }
        self.subscription = None;
        let listener = Arc::new(Listener::new(waker));
        let node = core.node(self.slot, by)?;
        self.subscription = Some(node.subscribe(&self.channels, &listener, by)?);
        Ok(())
    }

    /// Listens on the node that has the mutex now, which in a cluster may not be the one it was.
    pub(super) fn follow(&mut self, core: &Core, by: Moment) -> Result<()> {
        if let Some(subscription) = &self.subscription
            && core.is_cluster()
        {
            let node = core.node(self.slot, by)?;
            if !Arc::ptr_eq(&node, &subscription.node) {
                let listener = Arc::clone(&subscription.listener);
                self.subscription = Some(node.subscribe(&self.channels, &listener, by)?);
            }
        }
        Ok(())
    }

    pub(super) fn listener(&self) -> Option<&Listener> {
        let subscription = self.subscription.as_ref();
        subscription.map(|subscription| &*subscription.listener)
    }

    pub(super) fn close(&mut self) {
        self.subscription = None;
    }
}

/// Channels of one listener on one node; ends with this value, without waiting.
#[derive(Debug)]
pub(super) struct Subscription {
    node: Arc<Node>,
    listener: Arc<Listener>,
    channels: [Vec<u8>; 2],
}

impl Subscription {
    pub(super) fn new(
        node: &Arc<Node>,
        listener: &Arc<Listener>,
        channels: [Vec<u8>; 2],
    ) -> Subscription {
        Subscription {
            node: Arc::clone(node),
            listener: Arc::clone(listener),
            channels,
        }
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.node.unsubscribe(&self.channels, &self.listener);
    }
}

fn nanos(at: Moment) -> u64 {
    u64::try_from(at.since_origin().as_nanos()).unwrap_or(u64::MAX)
}
