//! The one connection to a server on which messages arrive, and the thread that reads it.
//!
//! The driver lets nobody send on a connection while another thread reads from it. So what there is
//! to subscribe is queued here, and the reader is woken by a message on a channel of its own.

use std::collections::HashMap;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use ::redis::{Connection, ProtocolVersion, PushKind, RedisError, Value};
use parking_lot::{Condvar, Mutex};

use super::link::{Address, Connector, late};
use super::listener::{Listener, Purpose};
use super::pool::spawn;
use super::script::command;
use super::trouble::{is_timeout, trouble};
use crate::clock::Moment;
use crate::error::Result;
use crate::fork::Origin;

/// After this much silence the connection is asked for a sign of life, and after twice as much
/// without one it is given up.
const HEARTBEAT: Duration = Duration::from_secs(1);

/// Pauses between failed attempts to connect.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));

#[derive(Debug)]
pub(super) struct Subscriber {
    shared: Arc<Shared>,
    /// Started by the first who listens: many factories never wait.
    reader: Mutex<Option<JoinHandle<()>>>,
    origin: Origin,
}

struct Shared {
    state: Mutex<State>,
    /// A subscription was acknowledged, trouble came, or the end.
    changed: Condvar,
    connector: Arc<Connector>,
    address: Address,
    /// The channel that wakes the reader.
    control: String,
    /// Told of trouble: in a cluster, the node may have been replaced.
    on_trouble: Box<dyn Fn() + Send + Sync>,
}

#[derive(Default)]
struct State {
    routes: HashMap<Vec<u8>, Route>,
    /// Channels to subscribe and to unsubscribe, not sent yet.
    fresh: Vec<Vec<u8>>,
    stale: Vec<Vec<u8>>,
    /// Whether the reader is about to look at those by itself.
    poked: bool,
    /// Whether the reader has a connection.
    live: bool,
    /// Somebody waited in vain for an acknowledgement: the connection is not what it seems.
    suspect: bool,
    /// How often there was trouble, and which was the last.
    troubles: u64,
    trouble: Option<crate::error::Error>,
    closed: bool,
}

/// Who listens to one channel.
struct Route {
    purpose: Purpose,
    listeners: Vec<Arc<Listener>>,
    /// On the present connection.
    acknowledged: bool,
    /// On an earlier one: messages may have been missed since.
    interrupted: bool,
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
                changed: Condvar::new(),
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
            self.shared.changed.wait_for(&mut state, left);
        }
    }

    /// Ends what [`Subscriber::add`] began. `Next::Poke`: the server does not know yet.
    pub(super) fn remove(&self, channels: &[Vec<u8>; 2], listener: &Arc<Listener>) -> Next {
        if !self.origin.is_here() {
            return Next::Wait;
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
        state.next()
    }

    /// Rings everybody: look again.
    pub(super) fn wake_all(&self) {
        let state = self.shared.state.lock();
        for route in state.routes.values() {
            route.wake();
        }
    }

    /// Tells the reader to end. It does so at the next message, or within a heartbeat.
    pub(super) fn close(&self) {
        self.shared.state.lock().closed = true;
        self.shared.changed.notify_all();
    }

    pub(super) fn is_started(&self) -> bool {
        self.reader.lock().is_some()
    }
}

impl Drop for Subscriber {
    fn drop(&mut self) {
        if !self.origin.is_here() {
            return;
        }
        self.close();
        if let Some(reader) = self.reader.lock().take() {
            let _ = reader.join();
        }
    }
}

impl State {
    fn next(&mut self) -> Next {
        let news = !self.fresh.is_empty() || !self.stale.is_empty();
        if news && self.live && !self.poked {
            self.poked = true;
            Next::Poke
        } else {
            Next::Wait
        }
    }
}

impl Route {
    fn wake(&self) {
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
                self.changed.notify_all();
            }
            // A connection that worked is replaced at once.
            pause = if heard {
                BACKOFF.0
            } else {
                (pause * 2).min(BACKOFF.1)
            };
            let until = Moment::now() + pause;
            while !state.closed && !until.remaining().is_zero() {
                self.changed.wait_for(&mut state, until.remaining());
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

/// The life of one connection.
struct Session<'a> {
    shared: &'a Shared,
    connection: Connection,
    /// Who is to be rung when, unless it came to something before.
    alarms: Vec<(Moment, Arc<Listener>)>,
    heard_at: Moment,
    asked_at: Moment,
}

impl Session<'_> {
    fn new(shared: &Shared, connection: Connection) -> Session<'_> {
        let now = Moment::now();
        Session {
            shared,
            connection,
            alarms: Vec::new(),
            heard_at: now,
            asked_at: now,
        }
    }

    /// Reads until the end of the connection or of the factory. `heard`: the server answered.
    fn run(mut self, heard: &mut bool) -> std::result::Result<(), RedisError> {
        {
            let mut state = self.shared.state.lock();
            state.live = true;
            state.suspect = false;
            state.stale.clear();
            state.fresh = state.routes.keys().cloned().collect();
        }
        self.ask()?;
        loop {
            if !self.send_news()? {
                return Ok(());
            }
            let wait = self.ring_alarms().max(Duration::from_millis(1));
            self.connection.set_read_timeout(Some(wait))?;
            match self.connection.recv_response() {
                Ok(Value::Push { kind, data }) => {
                    *heard = true;
                    self.heard_at = Moment::now();
                    self.take(&kind, &data);
                }
                Ok(Value::ServerError(error)) => return Err(error.into()),
                Ok(_) => {}
                Err(error) if is_timeout(&error) => self.listen_for_life()?,
                Err(error) => return Err(error),
            }
        }
    }

    /// Sends what was queued. `false`: this connection is to end.
    fn send_news(&mut self) -> std::result::Result<bool, RedisError> {
        let (fresh, stale) = {
            let mut state = self.shared.state.lock();
            if state.closed || state.suspect {
                return Ok(false);
            }
            state.poked = false;
            if state.fresh.is_empty() && state.stale.is_empty() {
                return Ok(true);
            }
            let mut fresh = std::mem::take(&mut state.fresh);
            let stale = std::mem::take(&mut state.stale);
            // Who came and went, or went and came, before we looked.
            fresh.retain(|channel| state.routes.contains_key(channel));
            (fresh, stale)
        };
        self.send(b"UNSUBSCRIBE", &stale)?;
        self.send(b"SUBSCRIBE", &fresh)?;
        Ok(true)
    }

    fn send(&mut self, verb: &[u8], channels: &[Vec<u8>]) -> std::result::Result<(), RedisError> {
        for some in channels.chunks(500) {
            let mut arguments = vec![verb];
            arguments.extend(some.iter().map(Vec::as_slice));
            self.connection.send_packed_command(&command(&arguments))?;
        }
        Ok(())
    }

    /// Rings whose time has come, and says for how long there is nothing to do.
    fn ring_alarms(&mut self) -> Duration {
        let now = Moment::now();
        let mut next = self.heard_at.max(self.asked_at) + HEARTBEAT;
        if !self.alarms.is_empty() {
            self.alarms.retain(|(at, listener)| {
                let due = *at <= now;
                if due {
                    listener.ring_alarm(*at);
                } else {
                    next = next.min(*at);
                }
                !due
            });
        }
        next - now
    }

    /// After a silence: asks for a sign of life, or gives up if one was asked for in vain.
    fn listen_for_life(&mut self) -> std::result::Result<(), RedisError> {
        let now = Moment::now();
        if self.asked_at > self.heard_at {
            if now - self.asked_at >= HEARTBEAT {
                return Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into());
            }
        } else if now - self.heard_at >= HEARTBEAT {
            self.ask()?;
        }
        Ok(())
    }

    /// Subscribes (again) to the control channel. Not PING: its reply is no push, and the driver
    /// swallows replies of which it thinks that nobody waits for them any more.
    fn ask(&mut self) -> std::result::Result<(), RedisError> {
        self.asked_at = Moment::now();
        let control = self.shared.control.as_bytes();
        self.connection
            .send_packed_command(&command(&[b"SUBSCRIBE", control]))
    }

    fn take(&mut self, kind: &PushKind, data: &[Value]) {
        let Some(Value::BulkString(channel)) = data.first() else {
            return;
        };
        let mut state = self.shared.state.lock();
        let Some(route) = state.routes.get_mut(channel) else {
            return;
        };
        match (kind, data.get(1)) {
            (PushKind::Message, Some(Value::BulkString(payload))) => {
                for listener in &route.listeners {
                    if let Some(at) = listener.take(route.purpose, payload) {
                        self.alarms.push((at, Arc::clone(listener)));
                    }
                }
            }
            (PushKind::Subscribe, _) => {
                route.acknowledged = true;
                if std::mem::take(&mut route.interrupted) {
                    route.wake();
                }
                self.shared.changed.notify_all();
            }
            _ => {}
        }
    }
}
