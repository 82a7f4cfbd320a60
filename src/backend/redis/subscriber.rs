//! The one connection to a server on which messages arrive, and the thread that reads it.
//!
//! The driver lets nobody send on a connection while another thread reads from it. So what there is
//! to subscribe is queued here, and the reader is woken by a message on a channel of its own.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use ::redis::{ProtocolVersion, PushKind, RedisResult, Value};
use parking_lot::{Condvar, Mutex};

use super::connection::{Connector, REFUSED, Target, is_refusal, late};
use super::error::{is_timeout, read};
use super::script::command;
use super::subscription::{Channel, Recipient};
use crate::backend::{CLAIM_TIME, Wakeups};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::thread::{self, Thread};

/// Pauses between failed attempts to connect; up to [`REFUSED`] where the server refuses us.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));

/// After this much silence the connection is asked for a sign of life; see [`Reader::patience`].
const HEARTBEAT: Duration = Duration::from_secs(1);

/// How long ours leave a free mutex to Simba contenders that do not queue.
const YIELD: Duration = Duration::from_millis(20);

/// A look at a hand-over that was not claimed comes this much after its end, so that it finds it ended.
const TOO_EARLY: Duration = Duration::from_millis(5);

pub(super) struct Subscriber {
    reader: Arc<Reader>,
    /// Started by the first subscription: many factories never wait.
    thread: Mutex<Option<Thread>>,
}

/// What the thread that reads messages shares with those that subscribe.
struct Reader {
    routes: Mutex<Routes>,
    /// The end has come.
    closing: Condvar,
    connector: Arc<Connector>,
    target: Arc<Target>,
    /// The channel that wakes the reader.
    control: Vec<u8>,
    /// Called when a connection has failed: in a cluster, the server may have been replaced.
    on_error: Box<dyn Fn() + Send + Sync>,
}

#[derive(Default)]
struct Routes {
    by_channel: HashMap<Vec<u8>, Route>,
    /// Channels to subscribe and to unsubscribe, not sent yet. Only while there is a connection: a new one
    /// begins with all channels that there are, and nobody else would empty these.
    fresh: Vec<Vec<u8>>,
    stale: Vec<Vec<u8>>,
    /// Whether the reader is about to look at those by itself.
    woken: bool,
    /// Whether the reader has a connection.
    live: bool,
    /// The connection is to be replaced: the server is a replica now.
    outdated: bool,
    /// Why there is no connection; not where one has just ended and the next was not tried.
    error: Option<Error>,
    closed: bool,
}

/// To whom the messages of one channel go.
struct Route {
    channel: Channel,
    recipients: Vec<Arc<Recipient>>,
    /// On the present connection.
    acknowledged: bool,
    /// On an earlier one: messages may have been missed since.
    interrupted: bool,
}

impl Subscriber {
    pub(super) fn new(
        connector: &Arc<Connector>,
        target: &Arc<Target>,
        control: &str,
        on_error: Box<dyn Fn() + Send + Sync>,
    ) -> Subscriber {
        Subscriber {
            reader: Arc::new(Reader {
                routes: Mutex::default(),
                closing: Condvar::new(),
                connector: Arc::clone(connector),
                target: Arc::clone(target),
                control: control.as_bytes().to_vec(),
                on_error,
            }),
            thread: Mutex::new(None),
        }
    }

    /// Queues the channels for subscription. Returns `true` if the caller is to wake the reader.
    pub(super) fn add(
        &self,
        channels: &[(Vec<u8>, Channel)],
        recipient: &Arc<Recipient>,
    ) -> Result<bool> {
        let mut thread = self.thread.lock();
        if thread.is_none() {
            let reader = Arc::clone(&self.reader);
            *thread = Some(thread::start("contend-redis-sub", move || {
                reader.read_for_ever();
            })?);
        }
        drop(thread);
        let mut routes = self.reader.routes.lock();
        for (name, channel) in channels {
            if let Some(route) = routes.by_channel.get_mut(name) {
                route.recipients.push(Arc::clone(recipient));
                continue;
            }
            let route = Route {
                channel: *channel,
                recipients: vec![Arc::clone(recipient)],
                acknowledged: false,
                interrupted: false,
            };
            routes.by_channel.insert(name.clone(), route);
            if routes.live {
                routes.fresh.push(name.clone());
            }
        }
        let wake = !routes.fresh.is_empty() && routes.live && !routes.woken;
        routes.woken |= wake;
        Ok(wake)
    }

    /// The reader could not be woken.
    pub(super) fn not_woken(&self) {
        self.reader.routes.lock().woken = false;
    }

    /// Waits until the server has acknowledged all channels: from then on nothing is missed.
    pub(super) fn acknowledged(
        &self,
        channels: &[(Vec<u8>, Channel)],
        recipient: &Recipient,
        by: Moment,
    ) -> Result<()> {
        let mut routes = self.reader.routes.lock();
        loop {
            let is_acknowledged = |(name, _): &(Vec<u8>, Channel)| {
                (routes.by_channel.get(name)).is_some_and(|route| route.acknowledged)
            };
            if channels.iter().all(is_acknowledged) {
                return Ok(());
            }
            if let (false, Some(error)) = (routes.live, &routes.error) {
                return Err(error.clone());
            }
            let left = by.remaining();
            if left.is_zero() {
                return Err(late("subscribing", &self.reader.target));
            }
            recipient.acknowledged.wait_for(&mut routes, left);
        }
    }

    /// Ends what [`Subscriber::add`] began. The server hears of it with the next message or heartbeat:
    /// a contender that leaves on purpose stands in no queue, and a hand-off has better things to do at that
    /// moment.
    pub(super) fn remove(&self, channels: &[(Vec<u8>, Channel)], recipient: &Arc<Recipient>) {
        let mut routes = self.reader.routes.lock();
        for (name, _) in channels {
            let Some(route) = routes.by_channel.get_mut(name) else {
                continue;
            };
            // Only once: a recipient that moves between servers may come back to this one.
            let at = (route.recipients.iter()).position(|known| Arc::ptr_eq(known, recipient));
            if let Some(at) = at {
                route.recipients.swap_remove(at);
            }
            if route.recipients.is_empty() {
                routes.by_channel.remove(name);
                if routes.live {
                    routes.stale.push(name.clone());
                }
            }
        }
    }

    /// Has everybody look again.
    pub(super) fn wake_all(&self) {
        let routes = self.reader.routes.lock();
        routes.by_channel.values().for_each(Route::interrupted);
    }

    /// Has the reader open another connection, soon: the server is not what it was.
    pub(super) fn reconnect(&self) {
        self.reader.routes.lock().outdated = true;
    }

    /// Returns how wake-ups work: not tried, working, or why not.
    pub(super) fn condition(&self) -> Wakeups {
        let routes = self.reader.routes.lock();
        match &routes.error {
            _ if routes.live => Wakeups::Working,
            Some(error) => Wakeups::Polling(error.to_string().into()),
            None => Wakeups::Untried,
        }
    }

    /// Tells the reader to end. It does so at the next message, or within a heartbeat.
    /// Returns whether there is one to be waited for.
    pub(super) fn close(&self) -> bool {
        self.reader.routes.lock().closed = true;
        self.reader.closing.notify_all();
        let thread = self.thread.lock();
        thread.as_ref().is_some_and(|thread| !thread.is_over())
    }

    /// Waits until the reader has ended.
    pub(super) fn join(&self, deadline: Moment) {
        if let Some(mut thread) = self.thread.lock().take() {
            thread.join(deadline);
        }
    }
}

impl Route {
    fn interrupted(&self) {
        for recipient in &self.recipients {
            recipient.interrupted();
        }
    }
}

impl Reader {
    /// Whatever happens to one connection, there is a next one: nobody starts this thread again.
    fn read_for_ever(&self) {
        let mut pause = BACKOFF.0;
        loop {
            let mut heard = false;
            let ended = catch_unwind(AssertUnwindSafe(|| self.read(&mut heard)));
            let ended = ended.unwrap_or_else(|_| {
                // As after a connection that never worked: what panics each time is not tried without a pause.
                heard = false;
                Err(Error::new(
                    ErrorKind::Panicked,
                    format!("redis at {}: reading messages panicked", self.target),
                ))
            });
            let mut routes = self.routes.lock();
            routes.live = false;
            for route in routes.by_channel.values_mut() {
                if std::mem::take(&mut route.acknowledged) {
                    // Now, so that waiters learn of an outage; and once more when the next connection is subscribed.
                    route.interrupted();
                    route.interrupted = true;
                }
            }
            if routes.closed {
                return;
            }
            let mut longest = BACKOFF.1;
            if let Err(error) = ended {
                if is_refusal(&error) {
                    longest = REFUSED;
                }
                log::debug!("redis subscriber: {error}");
                // A connection that worked is replaced at once, and whoever waits for an acknowledgement
                // waits for the next one.
                if !heard || !error.is_transient() {
                    routes.error = Some(error);
                    for recipient in routes.by_channel.values().flat_map(|it| &it.recipients) {
                        recipient.acknowledged.notify_one();
                    }
                }
            }
            pause = if heard {
                BACKOFF.0
            } else {
                (pause * 2).min(longest)
            };
            let until = Moment::now() + pause;
            while !routes.closed && !until.remaining().is_zero() {
                self.closing.wait_for(&mut routes, until.remaining());
            }
            if routes.closed {
                return;
            }
            drop(routes);
            (self.on_error)();
        }
    }

    /// Opens a connection and reads until its end, or that of the factory. `heard`: the server acknowledged.
    fn read(&self, heard: &mut bool) -> Result<()> {
        let (address, connection) = (self.target).open(&self.connector, ProtocolVersion::RESP3)?;
        let ended = PushConnection::new(self, connection).run(heard);
        ended.map_err(|error| read(&error, &address, self.patience()))
    }

    /// How long a sign of life is waited for. As long as any other answer: a round trip may take longer than
    /// a heartbeat.
    fn patience(&self) -> Duration {
        HEARTBEAT.max(self.connector.timeout)
    }
}

/// One connection on which messages arrive.
struct PushConnection<'a> {
    reader: &'a Reader,
    driver: ::redis::Connection,
    alarms: Alarms,
    heard_at: Moment,
    asked_at: Moment,
    /// What was subscribed since the control channel was subscribed before, for each time that this was
    /// done and not acknowledged yet. Acknowledgements come in order: what has none by then was refused.
    asked: VecDeque<Vec<Vec<u8>>>,
    /// How often each channel was unsubscribed without an acknowledgement yet. Until then one of its
    /// subscription is that of the last time.
    leaving: HashMap<Vec<u8>, u32>,
    /// What the socket's timeout is set to.
    timeout: Duration,
}

impl PushConnection<'_> {
    fn new(reader: &Reader, driver: ::redis::Connection) -> PushConnection<'_> {
        let now = Moment::now();
        PushConnection {
            reader,
            driver,
            alarms: Alarms::default(),
            heard_at: now,
            asked_at: now,
            asked: VecDeque::new(),
            leaving: HashMap::new(),
            timeout: Duration::ZERO,
        }
    }

    /// Reads until the end of the connection or of the factory; `heard` as in [`Reader::read`].
    fn run(&mut self, heard: &mut bool) -> RedisResult<()> {
        {
            let mut routes = self.reader.routes.lock();
            routes.live = true;
            routes.outdated = false;
            routes.stale.clear();
            routes.fresh = routes.by_channel.keys().cloned().collect();
        }
        self.ask(Vec::new())?;
        while self.send_news()? {
            let wait = self.ring_alarms().max(Duration::from_millis(1));
            // A system call, and with every message the wait begins anew: to wake a little early is
            // cheaper than to set the clock each time.
            if self.timeout > wait || self.timeout < wait / 2 {
                self.driver.set_read_timeout(Some(wait))?;
                self.timeout = wait;
            }
            match self.driver.recv_response() {
                Ok(Value::Push { kind, data }) => {
                    self.heard_at = Moment::now();
                    *heard |= kind == PushKind::Subscribe;
                    if !self.take(&kind, &data) {
                        return Ok(());
                    }
                }
                Ok(Value::ServerError(error)) => return Err(error.into()),
                Ok(_) => {}
                Err(error) if is_timeout(&error) => self.listen_for_life()?,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Sends what was queued. `false`: this connection is to end.
    fn send_news(&mut self) -> RedisResult<bool> {
        let (fresh, stale) = {
            let mut routes = self.reader.routes.lock();
            if routes.closed || routes.outdated {
                return Ok(false);
            }
            routes.woken = false;
            if routes.fresh.is_empty() && routes.stale.is_empty() {
                return Ok(true);
            }
            let mut fresh = std::mem::take(&mut routes.fresh);
            let stale = std::mem::take(&mut routes.stale);
            // Who came and went, or went and came, before we looked.
            fresh.retain(|channel| routes.by_channel.contains_key(channel));
            (fresh, stale)
        };
        self.send(b"UNSUBSCRIBE", &stale)?;
        for channel in stale {
            *self.leaving.entry(channel).or_default() += 1;
        }
        if !fresh.is_empty() {
            self.send(b"SUBSCRIBE", &fresh)?;
            self.ask(fresh)?;
        }
        Ok(true)
    }

    fn send(&mut self, verb: &[u8], channels: &[Vec<u8>]) -> RedisResult<()> {
        for some in channels.chunks(500) {
            let mut arguments = vec![verb];
            arguments.extend(some.iter().map(Vec::as_slice));
            self.driver.send_packed_command(&command(&arguments))?;
        }
        Ok(())
    }

    /// Wakes one waiter of each mutex whose time has come, and says for how long there is nothing to do.
    fn ring_alarms(&mut self) -> Duration {
        let now = Moment::now();
        while let Some(mutex) = self.alarms.due(now) {
            let routes = self.reader.routes.lock();
            let Some(route) = routes.by_channel.get(&mutex) else {
                continue;
            };
            let mut waiting = route.recipients.iter().filter(|it| it.is_waiting());
            let parked = waiting.clone().find(|it| it.is_parked());
            if let Some(recipient) = parked.or_else(|| waiting.next()) {
                recipient.wake();
            }
        }
        let beat = if self.is_asked() {
            // Not in one go: with every heartbeat it is looked what there is to send.
            (self.asked_at + self.reader.patience()).min(now + HEARTBEAT)
        } else {
            self.heard_at + HEARTBEAT
        };
        self.alarms.next().map_or(beat, |at| at.min(beat)) - now
    }

    /// After a silence: asks for a sign of life, or gives up if one was asked for in vain.
    fn listen_for_life(&mut self) -> RedisResult<()> {
        let now = Moment::now();
        if self.is_asked() {
            if now - self.asked_at >= self.reader.patience() {
                return Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into());
            }
        } else if now - self.heard_at >= HEARTBEAT {
            self.ask(Vec::new())?;
        }
        Ok(())
    }

    /// Returns `true` if a sign of life was asked for and nothing was heard since.
    fn is_asked(&self) -> bool {
        self.asked_at > self.heard_at
    }

    /// Subscribes (again) to the control channel, after `fresh`. Not PING: its reply is no push, and the
    /// driver swallows replies, refusals too, of which it thinks that nobody waits for them any more.
    fn ask(&mut self, fresh: Vec<Vec<u8>>) -> RedisResult<()> {
        self.asked_at = Moment::now();
        self.asked.push_back(fresh);
        self.driver
            .send_packed_command(&command(&[b"SUBSCRIBE", &self.reader.control]))
    }

    /// Takes what has arrived. `false`: a subscription was refused, and a new connection is told why.
    fn take(&mut self, kind: &PushKind, data: &[Value]) -> bool {
        let Some(Value::BulkString(name)) = data.first() else {
            return true;
        };
        let mut routes = self.reader.routes.lock();
        match (kind, data.get(1)) {
            (PushKind::Subscribe, _) if *name == self.reader.control => {
                routes.error = None;
                let asked = self.asked.pop_front().unwrap_or_default();
                let refused = |name: &Vec<u8>| {
                    let route = routes.by_channel.get(name);
                    !self.leaving.contains_key(name) && route.is_some_and(|it| !it.acknowledged)
                };
                return !asked.iter().any(refused);
            }
            (PushKind::Subscribe, _) if !self.leaving.contains_key(name) => {
                let Some(route) = routes.by_channel.get_mut(name) else {
                    return true;
                };
                route.acknowledged = true;
                if std::mem::take(&mut route.interrupted) {
                    route.interrupted();
                }
                // Each on its own: a thousand that start together must not wake each other.
                for recipient in &route.recipients {
                    recipient.acknowledged.notify_one();
                }
            }
            (PushKind::Unsubscribe, _) => {
                if let Some(times) = self.leaving.get_mut(name) {
                    *times -= 1;
                    if *times == 0 {
                        self.leaving.remove(name);
                    }
                }
            }
            (PushKind::Message, Some(Value::BulkString(said))) => {
                let Some(route) = routes.by_channel.get(name) else {
                    return true;
                };
                let channel = route.channel;
                if let (Channel::Turn, [recipient]) = (channel, route.recipients.as_slice()) {
                    let recipient = Arc::clone(recipient);
                    drop(routes);
                    recipient.turn();
                } else {
                    let recipients = route.recipients.clone();
                    drop(routes);
                    self.deliver(channel, name, said, &recipients);
                }
            }
            _ => {}
        }
        true
    }

    fn deliver(&mut self, channel: Channel, name: &[u8], said: &[u8], to: &[Arc<Recipient>]) {
        match channel {
            Channel::Turn => to.iter().for_each(|it| it.turn()),
            Channel::Changes => {
                if let Some(id) = said.strip_prefix(b"acquired@@") {
                    self.alarms.cancel(name);
                    to.iter().for_each(|it| it.acquired_by(id));
                } else if said == b"released@@!" {
                    // First those that do not queue; then one of ours sees to it that it goes on.
                    self.alarms.set(name, Moment::now() + YIELD);
                    for recipient in to.iter().filter(|it| !it.is_waiting()) {
                        recipient.released_by(b"!");
                    }
                } else if let Some(id) = said.strip_prefix(b"released@@") {
                    self.alarms.cancel(name);
                    to.iter().for_each(|it| it.released_by(id));
                }
            }
            Channel::Handed => {
                // The claim time in the message is for readers of other languages: it is a constant.
                if let Some(mutex) = name.strip_suffix(b"!handed") {
                    (self.alarms).set(mutex, Moment::now() + CLAIM_TIME + TOO_EARLY);
                }
                to.iter().for_each(|it| it.handed());
            }
            Channel::Permits => to.iter().for_each(|it| it.permits(said)),
        }
    }
}

/// When one waiter of a mutex looks again although no message came.
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
        write!(f, "Subscriber({})", self.reader.target)
    }
}

#[cfg(test)]
mod tests {
    use std::net::{SocketAddr, TcpListener};

    use super::super::connection::Address;
    use super::super::subscription::Role;
    use super::*;
    use crate::parker::Parker;

    fn subscriber(server: SocketAddr) -> Subscriber {
        let connector = Arc::new(Connector {
            login: Default::default(),
            database: 0,
            tls: None,
            timeout: Duration::from_millis(100),
        });
        let target = Target::At(Address::Tcp(server.ip().to_string(), server.port()));
        Subscriber::new(&connector, &Arc::new(target), "control", Box::new(|| {}))
    }

    fn recipient() -> Arc<Recipient> {
        let parker = Parker::new();
        Arc::new(Recipient::new(b"a", &parker.unparker(), Role::Waiting))
    }

    fn wait_until(condition: impl Fn() -> bool) {
        let end = Moment::now() + Duration::from_secs(30);
        while !condition() {
            assert!(!end.remaining().is_zero(), "not in time");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Nobody would ever take it out again: who tries on and on while the server is away would fill the memory.
    #[test]
    fn nothing_is_queued_while_there_is_no_connection() {
        let nobody = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = nobody.local_addr().unwrap();
        drop(nobody);
        let subscriber = subscriber(address);
        let recipient = recipient();
        for number in 0..1_000 {
            let channels = [(format!("m{number}").into_bytes(), Channel::Turn)];
            subscriber.add(&channels, &recipient).unwrap();
            subscriber.remove(&channels, &recipient);
        }
        let queued = {
            let routes = subscriber.reader.routes.lock();
            (routes.fresh.len(), routes.stale.len())
        };
        assert_eq!(queued, (0, 0));
        subscriber.close();
        subscriber.join(Moment::now() + Duration::from_secs(30));
    }

    /// A factory that is gone asks for no connection any more.
    #[test]
    fn a_reader_that_is_closed_in_a_pause_does_not_connect_again() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let subscriber = subscriber(listener.local_addr().unwrap());
        let channels = [(b"m".to_vec(), Channel::Turn)];
        subscriber.add(&channels, &recipient()).unwrap();
        // Closes what it accepts: each attempt fails.
        let accepted = || std::iter::from_fn(|| listener.accept().ok()).count();
        let attempts = std::cell::Cell::new(0);
        // Its pauses are long by then.
        wait_until(|| {
            attempts.set(attempts.get() + accepted());
            attempts.get() >= 5
        });
        let reader = &subscriber.reader;
        reader.routes.lock().error = None;
        wait_until(|| {
            accepted();
            // Under the lock: an attempt has just failed, and it pauses until it is told.
            let mut routes = reader.routes.lock();
            routes.closed = routes.error.is_some();
            routes.closed
        });
        accepted();
        reader.closing.notify_all();
        subscriber.join(Moment::now() + Duration::from_secs(30));
        assert_eq!(accepted(), 0);
    }

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
