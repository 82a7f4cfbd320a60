//! Who is rung when a message comes, and the subscription that lasts as long as somebody holds it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::Core;
use super::head_start::{HeadStart, Order};
use super::node::Node;
use super::script::Call;
use crate::bell::Waker;
use crate::clock::Moment;
use crate::error::Result;
use crate::lease::Lease;

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
    start: Mutex<Start>,
}

/// What there is of a head start. Locked while it is sent: whoever wakes up by itself in that moment
/// must find it, or it would own without knowing.
#[derive(Debug, Default)]
enum Start {
    #[default]
    None,
    Ordered(Order),
    Sent(HeadStart),
}

impl Listener {
    pub(super) fn new(waker: &Waker) -> Listener {
        Listener {
            waker: waker.clone(),
            alarm: AtomicU64::new(0),
            settled: Condvar::new(),
            released_by: Mutex::new(None),
            start: Mutex::default(),
        }
    }

    pub(super) fn wake(&self) {
        self.waker.wake();
    }

    /// Takes a message. Returns when to call [`Listener::ring_alarm`], if it is to be called.
    pub(super) fn take(&self, purpose: Purpose, payload: &[u8]) -> Option<Moment> {
        match purpose {
            Purpose::Turn => {
                let released_by = payload.strip_prefix(b"released@@");
                if let Some(id) = released_by {
                    *self.released_by.lock() = Some(id.to_vec());
                }
                self.calm();
                self.start(released_by.unwrap_or_default());
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

    /// Sends what the waiter ordered, if it is there to come for the reply.
    fn start(&self, released_by: &[u8]) {
        let mut start = self.start.lock();
        if matches!(*start, Start::Ordered(_))
            && self.waker.is_awaited()
            && let Start::Ordered(order) = std::mem::take(&mut *start)
            && let Some(sent) = order.send(released_by)
        {
            *start = Start::Sent(sent);
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

    /// Has the next attempt sent as soon as the turn comes.
    pub(super) fn order(&self, call: &Call, queued_at: &[u8], lease: Lease) {
        if let Some(subscription) = &self.subscription {
            *subscription.listener.start.lock() = Start::Ordered(Order {
                spare: subscription.node.spare(),
                call: call.clone(),
                queued_at: queued_at.to_vec(),
                lease,
            });
        }
    }

    /// Cancels the order. `true`: it was sent already, and somebody must come for the reply.
    pub(super) fn cancel(&self) -> bool {
        let Some(listener) = self.listener() else {
            return false;
        };
        let mut start = listener.start.lock();
        if let Start::Ordered(_) = *start {
            *start = Start::None;
        }
        matches!(*start, Start::Sent(_))
    }

    /// What was sent in the meantime; from now on nothing is.
    pub(super) fn head_start(&self) -> Option<HeadStart> {
        match std::mem::take(&mut *self.listener()?.start.lock()) {
            Start::Sent(sent) => Some(sent),
            Start::None | Start::Ordered(_) => None,
        }
    }

    pub(super) fn listener(&self) -> Option<&Listener> {
        let subscription = self.subscription.as_ref();
        subscription.map(|subscription| &*subscription.listener)
    }

    /// Ends the subscription. Returns the node that has yet to tell its server.
    pub(super) fn close(&mut self) -> Option<Arc<Node>> {
        let subscription = self.subscription.take()?;
        Some(Arc::clone(&subscription.node))
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
