//! The one connection to a server on which messages arrive, and the thread that reads it.
//!
//! The driver lets nobody send on a connection while another thread reads from it. So what there is
//! to subscribe is queued here, and the reader is woken by a message on a channel of its own.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use ::redis::{ProtocolVersion, PushKind, RedisError, Value};
use parking_lot::{Condvar, Mutex};

use super::connection::{Address, Connector, Target, late};
use super::error::{is_timeout, read};
use super::script::command;
use super::subscription::{Channel, Listener};
use crate::clock::Moment;
use crate::error::{Error, Result};
use crate::thread::{self, Thread};

/// Pauses between failed attempts to connect.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));

/// After this much silence the connection is asked for a sign of life, and after as much again
/// without one it is given up.
const HEARTBEAT: Duration = Duration::from_secs(1);

/// How long ours leave a free mutex to Simba contenders that do not queue.
const YIELD: Duration = Duration::from_millis(20);

/// A look at a hand-over that was not claimed comes this much after its end, so that it finds it ended.
const TOO_EARLY: Duration = Duration::from_millis(5);

pub(super) struct Subscriber {
    inner: Arc<Inner>,
    /// Started by the first who listens: many factories never wait.
    reader: Mutex<Option<Thread>>,
}

struct Inner {
    state: Mutex<State>,
    /// The end has come.
    closing: Condvar,
    connector: Arc<Connector>,
    target: Arc<Target>,
    /// The channel that wakes the reader.
    control: String,
    /// Told of trouble: in a cluster, the server may have been replaced.
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
    /// The connection is not what it seems: a subscription was not acknowledged, or the server is a
    /// replica now.
    suspect: bool,
    /// Why there is no connection; not where one has just ended and the next was not tried.
    trouble: Option<Error>,
    closed: bool,
}

/// Who listens to one channel.
struct Route {
    channel: Channel,
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
        target: &Arc<Target>,
        control: String,
        on_trouble: Box<dyn Fn() + Send + Sync>,
    ) -> Subscriber {
        Subscriber {
            inner: Arc::new(Inner {
                state: Mutex::default(),
                closing: Condvar::new(),
                connector: Arc::clone(connector),
                target: Arc::clone(target),
                control,
                on_trouble,
            }),
            reader: Mutex::new(None),
        }
    }

    /// Queues the channels for subscription.
    pub(super) fn add(
        &self,
        channels: &[(Vec<u8>, Channel)],
        listener: &Arc<Listener>,
    ) -> Result<Next> {
        let mut reader = self.reader.lock();
        if reader.is_none() {
            let inner = Arc::clone(&self.inner);
            *reader = Some(thread::start("contend-redis-sub", move || {
                inner.read_for_ever();
            })?);
        }
        drop(reader);
        let mut state = self.inner.state.lock();
        for (name, channel) in channels {
            if let Some(route) = state.routes.get_mut(name) {
                route.listeners.push(Arc::clone(listener));
                continue;
            }
            state.routes.insert(
                name.clone(),
                Route {
                    channel: *channel,
                    listeners: vec![Arc::clone(listener)],
                    acknowledged: false,
                    interrupted: false,
                },
            );
            state.fresh.push(name.clone());
        }
        Ok(state.next())
    }

    /// The reader could not be woken.
    pub(super) fn not_poked(&self) {
        self.inner.state.lock().poked = false;
    }

    /// Waits until the server has acknowledged all channels: from then on nothing is missed.
    pub(super) fn acknowledged(
        &self,
        channels: &[(Vec<u8>, Channel)],
        listener: &Listener,
        by: Moment,
    ) -> Result<()> {
        let mut state = self.inner.state.lock();
        loop {
            let done = channels
                .iter()
                .all(|(name, _)| state.routes.get(name).is_some_and(|r| r.acknowledged));
            if done {
                return Ok(());
            }
            if !state.live
                && let Some(trouble) = &state.trouble
            {
                return Err(trouble.clone());
            }
            let left = by.remaining();
            if left.is_zero() {
                // A refusal that the driver swallowed, or a dead connection: a new one tells.
                state.suspect = true;
                return Err(late("subscribing", &self.inner.target));
            }
            listener.settled.wait_for(&mut state, left);
        }
    }

    /// Ends what [`Subscriber::add`] began. The server hears of it with the next message or heartbeat:
    /// who leaves on purpose stands in no queue, and a hand-off has better things to do at that moment.
    pub(super) fn remove(&self, channels: &[(Vec<u8>, Channel)], listener: &Arc<Listener>) {
        let mut state = self.inner.state.lock();
        for (name, _) in channels {
            let Some(route) = state.routes.get_mut(name) else {
                continue;
            };
            // Only once: a listener that moves between servers may come back to this one.
            if let Some(at) =
                (route.listeners.iter()).position(|known| Arc::ptr_eq(known, listener))
            {
                route.listeners.swap_remove(at);
            }
            if route.listeners.is_empty() {
                state.routes.remove(name);
                state.stale.push(name.clone());
            }
        }
    }

    /// Has everybody look again.
    pub(super) fn wake_all(&self) {
        let state = self.inner.state.lock();
        for route in state.routes.values() {
            route.interrupted();
        }
    }

    /// Has the reader open another connection, soon: the server is not what it was.
    pub(super) fn reconnect(&self) {
        self.inner.state.lock().suspect = true;
    }

    /// Returns how wake-ups work: not tried, working, or why not.
    pub(super) fn condition(&self) -> crate::backend::Wakeups {
        let state = self.inner.state.lock();
        if state.live {
            crate::backend::Wakeups::Working
        } else if let Some(trouble) = &state.trouble {
            crate::backend::Wakeups::Polling(trouble.to_string().into())
        } else {
            crate::backend::Wakeups::Untried
        }
    }

    /// Tells the reader to end. It does so at the next message, or within a heartbeat.
    /// Returns whether there is one to be waited for.
    pub(super) fn close(&self) -> bool {
        self.inner.state.lock().closed = true;
        self.inner.closing.notify_all();
        self.reader
            .lock()
            .as_ref()
            .is_some_and(|reader| !reader.is_over())
    }

    /// Waits until the reader has ended.
    pub(super) fn join(&self, deadline: Moment) {
        if let Some(mut reader) = self.reader.lock().take() {
            reader.join(deadline);
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
    fn interrupted(&self) {
        for listener in &self.listeners {
            listener.interrupted();
        }
    }
}

impl Inner {
    fn read_for_ever(&self) {
        let mut pause = BACKOFF.0;
        loop {
            let mut heard = false;
            let ended = self
                .target
                .open(&self.connector, ProtocolVersion::RESP3)
                .and_then(|(address, connection)| {
                    let mut session = Session::new(self, address, connection);
                    let ended = session.run(&mut heard);
                    ended.map_err(|error| read(&error, &session.address, HEARTBEAT))
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
            match ended {
                // A connection that worked is replaced at once, and whoever waits for an
                // acknowledgement waits for the next one.
                Err(error) if heard && error.is_transient() => {
                    log::debug!("redis subscriber: {error}");
                }
                Err(error) => {
                    log::debug!("redis subscriber: {error}");
                    state.trouble = Some(error);
                    for listener in state.routes.values().flat_map(|route| &route.listeners) {
                        listener.settled.notify_one();
                    }
                }
                Ok(()) => {}
            }
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

/// The life of one connection on which messages arrive.
struct Session<'a> {
    inner: &'a Inner,
    address: Address,
    connection: ::redis::Connection,
    alarms: Alarms,
    heard_at: Moment,
    asked_at: Moment,
    /// What the socket's timeout is set to.
    timeout: Duration,
}

impl Session<'_> {
    fn new(inner: &Inner, address: Address, connection: ::redis::Connection) -> Session<'_> {
        let now = Moment::now();
        Session {
            inner,
            address,
            connection,
            alarms: Alarms::default(),
            heard_at: now,
            asked_at: now,
            timeout: Duration::ZERO,
        }
    }

    /// Reads until the end of the connection or of the factory. `heard`: the server acknowledged.
    fn run(&mut self, heard: &mut bool) -> std::result::Result<(), RedisError> {
        {
            let mut state = self.inner.state.lock();
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
            // A system call, and with every message the wait begins anew: to wake a little early is
            // cheaper than to set the clock each time.
            if self.timeout > wait || self.timeout < wait / 2 {
                self.connection.set_read_timeout(Some(wait))?;
                self.timeout = wait;
            }
            match self.connection.recv_response() {
                Ok(Value::Push { kind, data }) => {
                    self.heard_at = Moment::now();
                    *heard |= kind == PushKind::Subscribe;
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
            let mut state = self.inner.state.lock();
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

    /// Wakes one waiter of each mutex whose time has come, and says for how long there is nothing to do.
    fn ring_alarms(&mut self) -> Duration {
        let now = Moment::now();
        while let Some(mutex) = self.alarms.due(now) {
            let state = self.inner.state.lock();
            let Some(route) = state.routes.get(&mutex) else {
                continue;
            };
            let mut waiting = route.listeners.iter().filter(|it| it.is_waiting());
            let parked = waiting.clone().find(|it| it.is_parked());
            if let Some(listener) = parked.or_else(|| waiting.next()) {
                listener.wake();
            }
        }
        let beat = self.heard_at.max(self.asked_at) + HEARTBEAT;
        self.alarms.next().map_or(beat, |at| at.min(beat)) - now
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
        let control = self.inner.control.as_bytes();
        self.connection
            .send_packed_command(&command(&[b"SUBSCRIBE", control]))
    }

    fn take(&mut self, kind: &PushKind, data: &[Value]) {
        let Some(Value::BulkString(name)) = data.first() else {
            return;
        };
        let mut state = self.inner.state.lock();
        let Some(route) = state.routes.get_mut(name) else {
            if *kind == PushKind::Subscribe {
                // The control channel: the server lets us subscribe.
                state.trouble = None;
            }
            return;
        };
        match (kind, data.get(1)) {
            (PushKind::Message, Some(Value::BulkString(said))) => {
                let channel = route.channel;
                if let (Channel::Turn, [listener]) = (channel, route.listeners.as_slice()) {
                    let listener = Arc::clone(listener);
                    drop(state);
                    listener.turn();
                    return;
                }
                let listeners = route.listeners.clone();
                drop(state);
                self.deliver(channel, name, said, &listeners);
            }
            (PushKind::Subscribe, _) => {
                route.acknowledged = true;
                if std::mem::take(&mut route.interrupted) {
                    route.interrupted();
                }
                // Each on its own: a thousand that start together must not wake each other.
                for listener in &route.listeners {
                    listener.settled.notify_one();
                }
            }
            _ => {}
        }
    }

    fn deliver(&mut self, channel: Channel, name: &[u8], said: &[u8], to: &[Arc<Listener>]) {
        match channel {
            Channel::Turn => to.iter().for_each(|it| it.turn()),
            Channel::Changes => {
                if let Some(id) = said.strip_prefix(b"acquired@@") {
                    self.alarms.cancel(name);
                    to.iter().for_each(|it| it.acquired(id));
                } else if said == b"released@@!" {
                    // First those that do not queue; then one of ours sees to it that it goes on.
                    self.alarms.set(name, Moment::now() + YIELD);
                    for listener in to.iter().filter(|it| !it.is_waiting()) {
                        listener.released(b"!");
                    }
                } else if let Some(id) = said.strip_prefix(b"released@@") {
                    self.alarms.cancel(name);
                    to.iter().for_each(|it| it.released(id));
                }
            }
            Channel::Handed => {
                let claim = said.split(|byte| *byte == b'@').next().unwrap_or_default();
                let claim = std::str::from_utf8(claim)
                    .ok()
                    .and_then(|it| it.parse().ok());
                let claim = claim.map_or(crate::backend::CLAIM_TIME, Duration::from_millis);
                if let Some(mutex) = name.strip_suffix(b"!handed") {
                    self.alarms.set(mutex, Moment::now() + claim + TOO_EARLY);
                }
                to.iter().for_each(|it| it.handed());
            }
        }
    }
}

/// When one waiter of a mutex looks again although nobody told it to.
#[derive(Default)]
struct Alarms {
    at: HashMap<Vec<u8>, Moment>,
    in_order: BTreeSet<(Moment, Vec<u8>)>,
}

impl Alarms {
    fn set(&mut self, mutex: &[u8], at: Moment) {
        self.cancel(mutex);
        self.at.insert(mutex.to_vec(), at);
        self.in_order.insert((at, mutex.to_vec()));
    }

    fn cancel(&mut self, mutex: &[u8]) {
        if let Some(at) = self.at.remove(mutex) {
            self.in_order.remove(&(at, mutex.to_vec()));
        }
    }

    fn next(&self) -> Option<Moment> {
        self.in_order.first().map(|(at, _)| *at)
    }

    /// Takes out one that is due.
    fn due(&mut self, now: Moment) -> Option<Vec<u8>> {
        if self.next()? > now {
            return None;
        }
        let (_, mutex) = self.in_order.pop_first()?;
        self.at.remove(&mutex);
        Some(mutex)
    }
}

impl std::fmt::Debug for Subscriber {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Subscriber({})", self.inner.target)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_alarm_rings_once_and_the_last_one_counts() {
        let at = |ms| Moment::from_origin(Duration::from_millis(ms));
        let mut alarms = Alarms::default();
        alarms.set(b"a", at(10));
        alarms.set(b"b", at(20));
        alarms.set(b"a", at(30));
        alarms.set(b"c", at(40));
        alarms.cancel(b"c");
        assert_eq!(alarms.next(), Some(at(20)));
        assert_eq!(alarms.due(at(19)), None);
        assert_eq!(alarms.due(at(50)), Some(b"b".to_vec()));
        assert_eq!(alarms.due(at(50)), Some(b"a".to_vec()));
        assert_eq!(alarms.due(at(50)), None);
        assert!(alarms.at.is_empty());
    }
}
