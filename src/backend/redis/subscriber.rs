//! The one connection to a server on which messages arrive, and the thread that reads it.
//!
//! The driver lets nobody send on a connection while another thread reads from it. So what there is
//! to subscribe is queued here, and the reader is woken by a message on a channel of its own.

use std::collections::HashMap;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use ::redis::ProtocolVersion;
use parking_lot::{Condvar, Mutex};

use super::link::{Address, Connector, late};
use super::listener::{Listener, Purpose};
use super::pool::spawn;
use super::session::Session;
use super::trouble::trouble;
use crate::clock::Moment;
use crate::error::Result;
use crate::fork::Origin;

/// Pauses between failed attempts to connect.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));

#[derive(Debug)]
pub(super) struct Subscriber {
    shared: Arc<Shared>,
    /// Started by the first who listens: many factories never wait.
    reader: Mutex<Option<JoinHandle<()>>>,
    origin: Origin,
}

pub(super) struct Shared {
    pub(super) state: Mutex<State>,
    /// The end has come.
    pub(super) closing: Condvar,
    pub(super) connector: Arc<Connector>,
    pub(super) address: Address,
    /// The channel that wakes the reader.
    pub(super) control: String,
    /// Told of trouble: in a cluster, the node may have been replaced.
    pub(super) on_trouble: Box<dyn Fn() + Send + Sync>,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) routes: HashMap<Vec<u8>, Route>,
    /// Channels to subscribe and to unsubscribe, not sent yet.
    pub(super) fresh: Vec<Vec<u8>>,
    pub(super) stale: Vec<Vec<u8>>,
    /// Whether the reader is about to look at those by itself.
    pub(super) poked: bool,
    /// Whether the reader has a connection.
    pub(super) live: bool,
    /// Somebody waited in vain for an acknowledgement: the connection is not what it seems.
    pub(super) suspect: bool,
    /// How often there was trouble, and which was the last.
    pub(super) troubles: u64,
    pub(super) trouble: Option<crate::error::Error>,
    pub(super) closed: bool,
}

/// Who listens to one channel.
pub(super) struct Route {
    pub(super) purpose: Purpose,
    pub(super) listeners: Vec<Arc<Listener>>,
    /// On the present connection.
    pub(super) acknowledged: bool,
    /// On an earlier one: messages may have been missed since.
    pub(super) interrupted: bool,
}

/// What the caller of [`Subscriber::add`] does next.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Wake the reader, then wait.
    Poke,
    /// Wait.
    Wait,
}

impl Subscriber {
    pub(super) fn new(
        connector: &Arc<Connector>,
        address: &Address,
        control: String,
        on_trouble: Box<dyn Fn() + Send + Sync>,
    ) -> Subscriber {
        Subscriber {
            shared: Arc::new(Shared {
                state: Mutex::default(),
                closing: Condvar::new(),
                connector: Arc::clone(connector),
                address: address.clone(),
                control,
                on_trouble,
            }),
            reader: Mutex::new(None),
            origin: Origin::here(),
        }
    }

    /// Queues the channels for subscription.
    pub(super) fn add(
        &self,
        channels: &[(Vec<u8>, Purpose); 2],
        listener: &Arc<Listener>,
    ) -> Result<Next> {
        self.origin.check()?;
        let mut reader = self.reader.lock();
        if reader.is_none() {
            let shared = Arc::clone(&self.shared);
            *reader = Some(spawn("contend-redis-sub", move || shared.read_for_ever())?);
        }
        drop(reader);
        let mut state = self.shared.state.lock();
        for (channel, purpose) in channels {
            if let Some(route) = state.routes.get_mut(channel) {
                route.listeners.push(Arc::clone(listener));
                continue;
            }
            state.routes.insert(
                channel.clone(),
                Route {
                    purpose: *purpose,
                    listeners: vec![Arc::clone(listener)],
                    acknowledged: false,
                    interrupted: false,
                },
            );
            state.fresh.push(channel.clone());
        }
        Ok(state.next())
    }

    /// The reader could not be woken.
    pub(super) fn not_poked(&self) {
        self.shared.state.lock().poked = false;
    }

    /// Waits until the server has acknowledged all channels: from then on nothing is missed.
    pub(super) fn acknowledged(
        &self,
        channels: &[(Vec<u8>, Purpose); 2],
        listener: &Listener,
        by: Moment,
    ) -> Result<()> {
        let mut state = self.shared.state.lock();
        let seen = state.troubles;
        loop {
            let done = channels
                .iter()
                .all(|(channel, _)| state.routes.get(channel).is_some_and(|r| r.acknowledged));
            if done {
                return Ok(());
            }
            if state.troubles != seen
                && let Some(trouble) = &state.trouble
            {
                return Err(trouble.clone());
            }
            let left = by.remaining();
            if left.is_zero() {
                // A refusal that the driver swallowed, or a dead connection: a new one tells.
                state.suspect = true;
                return Err(late("subscribing", &self.shared.address));
            }
            listener.settled.wait_for(&mut state, left);
        }
    }

    /// Ends what [`Subscriber::add`] began. The server hears of it with the next message or heartbeat:
    /// who leaves on purpose stands in no queue, and a hand-off has better things to do at that moment.
    pub(super) fn remove(&self, channels: &[Vec<u8>; 2], listener: &Arc<Listener>) {
        if !self.origin.is_here() {
            return;
        }
        let mut state = self.shared.state.lock();
        for channel in channels {
            let Some(route) = state.routes.get_mut(channel) else {
                continue;
            };
            route
                .listeners
                .retain(|known| !Arc::ptr_eq(known, listener));
            if route.listeners.is_empty() {
                state.routes.remove(channel);
                state.stale.push(channel.clone());
            }
        }
    }

    /// Rings everybody: look again.
    pub(super) fn wake_all(&self) {
        let state = self.shared.state.lock();
        for route in state.routes.values() {
            route.wake();
        }
    }

    /// Tells the reader to end. It does so at the next message, or within a heartbeat.
    /// Returns whether there is one to be waited for.
    pub(super) fn close(&self) -> bool {
        if !self.origin.is_here() {
            return false;
        }
        self.shared.state.lock().closed = true;
        self.shared.closing.notify_all();
        self.reader.lock().is_some()
    }
}

impl Drop for Subscriber {
    fn drop(&mut self) {
        if !self.close() {
            return;
        }
        if let Some(reader) = self.reader.lock().take() {
            let _ = reader.join();
        }
    }
}

impl State {
    fn next(&mut self) -> Next {
        if !self.fresh.is_empty() && self.live && !self.poked {
            self.poked = true;
            Next::Poke
        } else {
            Next::Wait
        }
    }
}

impl Route {
    pub(super) fn wake(&self) {
        for listener in &self.listeners {
            listener.wake();
        }
    }
}

impl Shared {
    fn read_for_ever(&self) {
        let mut pause = BACKOFF.0;
        loop {
            let mut heard = false;
            let ended = self
                .connector
                .open(&self.address, ProtocolVersion::RESP3)
                .and_then(|connection| {
                    Session::new(self, connection)
                        .run(&mut heard)
                        .map_err(|error| trouble(error, &self.address.to_string()))
                });
            let mut state = self.state.lock();
            state.live = false;
            for route in state.routes.values_mut() {
                route.interrupted |= route.acknowledged;
                route.acknowledged = false;
            }
            if state.closed {
                return;
            }
            if let Err(error) = ended {
                log::debug!("redis subscriber: {error}");
                state.troubles += 1;
                state.trouble = Some(error);
                for listener in state.routes.values().flat_map(|route| &route.listeners) {
                    listener.settled.notify_one();
                }
            }
            // A connection that worked is replaced at once.
            pause = if heard {
                BACKOFF.0
            } else {
                (pause * 2).min(BACKOFF.1)
            };
            let until = Moment::now() + pause;
            while !state.closed && !until.remaining().is_zero() {
                self.closing.wait_for(&mut state, until.remaining());
            }
            drop(state);
            (self.on_trouble)();
        }
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.address)
    }
}
