//! Messages: the one connection to a server on which they arrive, the thread that reads it, and what each contender or
//! observer makes of them.
//!
//! The driver lets no thread send on a connection while another one reads from it. So channels to subscribe are queued
//! here, and the reader is woken by a message on a channel of its own.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ::redis::{ProtocolVersion, PushKind, RedisResult, Value, cmd};
use parking_lot::{Condvar, Mutex};

use super::Common;
use super::connection::Opener;
use super::error::{is_timeout, read};
use super::script::Command;
use super::server::{Pending, Server};
use crate::backend::permit_store::OnTurn;
use crate::backend::{CLAIM_TIME, Wakeups};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::pool::Connect;
use crate::thread::{self, Thread};

/// The pause before a lost connection is replaced.
const PAUSE: Duration = Duration::from_millis(20);

/// After this much silence the server is asked for a sign of life.
const HEARTBEAT: Duration = Duration::from_secs(1);

/// How long waiters leave a free mutex to Simba contenders that do not queue.
const YIELD: Duration = Duration::from_millis(20);

/// A look at a hand-over that was not claimed comes this much after its end, so that it finds it ended.
const TOO_EARLY: Duration = Duration::from_millis(5);

/// How long the server may take to come to an early acquire. A waiter waits for its reply longer than that.
const EARLY_LIMIT: Duration = Duration::from_millis(350);

/// What a channel carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Channel {
    /// `released@@ID`: the turn of the contender whose channel this is.
    Turn,
    /// `acquired@@ID` and `released@@ID`, to all; `released@@!` while waiters leave a free mutex to others.
    Changes,
    /// `CLAIM@@ID`: the mutex was handed to ID, which has CLAIM ms to acquire it.
    Handed,
    /// `FREE@@NAME`: this process comes first in the line of a semaphore.
    Permits,
}

/// What a recipient listens for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// Nothing: it has released, and does not contend yet.
    Idle,
    /// Its turn, or a free mutex.
    Waiting,
    /// Any sign that it does not own any more.
    Owning,
    /// Every change.
    Observing,
}

/// Returns `true` if a recipient with this role and id should look again.
fn concerns(role: Role, id: &[u8], channel: Channel, said: &[u8]) -> bool {
    match (role, channel) {
        (Role::Idle, _) => false,
        (Role::Waiting, Channel::Turn) => true,
        (Role::Waiting, Channel::Changes) => said
            .strip_prefix(b"released@@")
            .is_some_and(|by| by != id && by != b"!"),
        (Role::Waiting, _) => false,
        // An owner that hears of its own release was revoked.
        (Role::Owning, Channel::Changes) => said.strip_prefix(b"acquired@@") != Some(id),
        (Role::Owning | Role::Observing, _) => true,
    }
}

/// One contender or observer, or the semaphores of a factory, as the subscriber sees it.
pub(super) struct Recipient {
    /// The contender's id; empty for others.
    id: Vec<u8>,
    channels: Vec<(Vec<u8>, Channel)>,
    /// Takes what was said; nothing where it is to look again although no message came.
    wake: Box<dyn Fn(&[u8]) + Send + Sync>,
    role: Mutex<Role>,
    early: Mutex<Early>,
}

/// An early acquire, between the message that a waiter's turn has come and the waiter's own attempt. The thread that
/// reads messages sends it, so the waiter only has to read the reply when it is up.
///
/// Locked while it is sent: a waiter that wakes up by itself in that moment must find it, or it would own without
/// knowing.
#[derive(Default)]
enum Early {
    #[default]
    None,
    /// What the waiter's next attempt sends, and how long the server may take to come to it.
    Prepared(Arc<Server>, Command, Duration),
    Sent(Box<Pending<'static>>),
}

impl Recipient {
    fn hear(&self, channel: Channel, said: &[u8]) {
        if concerns(*self.role.lock(), &self.id, channel, said) {
            if channel == Channel::Turn {
                self.send_early();
            }
            (self.wake)(said);
        }
    }

    /// Has it look again, although no message came.
    fn look(&self) {
        if *self.role.lock() != Role::Idle {
            (self.wake)(b"");
        }
    }

    /// Sends what was prepared, if there is a connection to spare. Never waits.
    fn send_early(&self) {
        let mut early = self.early.lock();
        if let Early::Prepared(server, request, limit) = &*early {
            let sent = server.begin(request.clone(), Moment::now() + *limit);
            *early = sent.map_or(Early::None, |pending| Early::Sent(Box::new(pending)));
        }
    }
}

/// A contender's or observer's subscription.
pub(super) struct Subscription {
    recipient: Arc<Recipient>,
    slot: u16,
    /// Where it is subscribed.
    server: Option<Arc<Server>>,
}

impl Subscription {
    /// A subscription that [`Subscription::ensure`] begins. `id` is empty where there is no contender.
    pub(super) fn new(
        id: &str,
        wake: impl Fn(&[u8]) + Send + Sync + 'static,
        channels: Vec<(Vec<u8>, Channel)>,
        slot: u16,
    ) -> Subscription {
        let recipient = Recipient {
            id: id.as_bytes().to_vec(),
            channels,
            wake: Box::new(wake),
            role: Mutex::new(Role::Observing),
            early: Mutex::default(),
        };
        Subscription {
            recipient: Arc::new(recipient),
            slot,
            server: None,
        }
    }

    /// A subscription to the turns of this process in the lines of the semaphores.
    pub(super) fn of_permits(channel: &str, slot: u16, on_turn: OnTurn) -> Subscription {
        let wake = move |said: &[u8]| {
            let said = std::str::from_utf8(said).unwrap_or_default();
            if let Some((free, semaphore)) = said.split_once("@@") {
                on_turn(semaphore, free.parse().unwrap_or(0));
            }
        };
        let channels = vec![(channel.as_bytes().to_vec(), Channel::Permits)];
        Subscription::new("", wake, channels, slot)
    }

    /// Subscribes on the server that has the slot now, which in a cluster may change. Takes at most half of the
    /// time: the rest is for the request that follows.
    pub(super) fn ensure(&mut self, common: &Common, by: Moment) -> Result<()> {
        let server = common.deployment.server(self.slot, by)?;
        if (self.server.as_ref()).is_some_and(|present| Arc::ptr_eq(present, &server)) {
            return Ok(());
        }
        self.close();
        let by = by - by.remaining() / 2;
        let subscriber = &server.subscriber;
        let subscribed = subscriber.add(&self.recipient).and_then(|(batch, wakes)| {
            if wakes {
                server.command(&subscriber.wake, by)?;
            }
            subscriber.wait(batch, by)
        });
        self.server = Some(Arc::clone(&server));
        if subscribed.is_err() {
            self.close();
        }
        subscribed
    }

    /// Returns `true` while no message can come.
    pub(super) fn is_deaf(&self) -> bool {
        let server = self.server.as_ref();
        server.is_none_or(|server| matches!(server.subscriber.condition(), Wakeups::Polling(_)))
    }

    /// Says what is listened for from now on.
    pub(super) fn set_role(&self, role: Role) {
        *self.recipient.role.lock() = role;
    }

    /// Has `request`, the next attempt, sent as soon as the turn comes. `longest` is how long the server may take to
    /// come to it.
    pub(super) fn prepare(&self, request: Command, longest: Duration) {
        if let Some(server) = &self.server {
            let limit = EARLY_LIMIT.min(longest);
            *self.recipient.early.lock() = Early::Prepared(Arc::clone(server), request, limit);
        }
    }

    /// Takes what was sent in the meantime; from now on nothing is.
    pub(super) fn take_early(&self) -> Option<Box<Pending<'static>>> {
        match std::mem::take(&mut *self.recipient.early.lock()) {
            Early::Sent(pending) => Some(pending),
            Early::None | Early::Prepared(..) => None,
        }
    }

    /// Ends the subscription.
    pub(super) fn close(&mut self) {
        if let Some(server) = self.server.take() {
            server.subscriber.remove(&self.recipient);
        }
        drop(self.take_early());
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.close();
    }
}

/// The messages of one server, shared by those that subscribe and the thread that reads.
pub(super) struct Subscriber {
    opener: Arc<Opener>,
    /// Wakes the thread that reads: it has something to send.
    pub(super) wake: Command,
    /// The channel of that. It lies under the same prefix, so a missing right shows at once.
    control: Vec<u8>,
    state: Mutex<State>,
    /// Channels were acknowledged, the connection ended, or the end has come.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    routes: HashMap<Vec<u8>, Route>,
    /// Channels to subscribe, or to unsubscribe if they have no route. Only while there is a connection: a new one
    /// begins with all routes.
    unsent: Vec<Vec<u8>>,
    /// The last batch of channels that was sent, on this connection or an earlier one.
    sent: u64,
    /// How many batches of this connection the server has not acknowledged. It answers in order.
    pending: u64,
    /// The last batch that was acknowledged.
    acknowledged: u64,
    /// This connection has acknowledged something.
    works: bool,
    /// Messages were missed: all look again once the next connection is subscribed.
    interrupted: bool,
    wakeups: Wakeups,
    /// Why a connection could not be opened. None while one that worked is being replaced.
    failure: Option<Error>,
    /// The server is not the master any more: another connection is to be opened.
    outdated: bool,
    closed: bool,
    /// Started by the first subscription: many factories never wait.
    thread: Option<Thread>,
}

/// Where the messages of one channel go.
struct Route {
    channel: Channel,
    recipients: Vec<Arc<Recipient>>,
}

impl Subscriber {
    pub(super) fn new(opener: &Arc<Opener>) -> Arc<Subscriber> {
        // Without a brace, so no mutex has it; random, so no other factory has it.
        let prefix = &opener.settings.prefix;
        let control = format!("{prefix}:!control:{:032x}", rand::random::<u128>());
        Arc::new(Subscriber {
            opener: Arc::clone(opener),
            wake: Command::plain(0, &[b"PUBLISH", control.as_bytes(), b""]),
            control: control.into_bytes(),
            state: Mutex::default(),
            changed: Condvar::new(),
        })
    }

    /// Queues the channels for subscription. Returns the batch with which they are subscribed, and whether the caller
    /// is to wake the reader for it.
    pub(super) fn add(self: &Arc<Self>, recipient: &Arc<Recipient>) -> Result<(u64, bool)> {
        let mut state = self.state.lock();
        if state.thread.is_none() {
            let reader = Arc::clone(self);
            let read = move || reader.read_for_ever();
            state.thread = Some(thread::start("contend-redis-sub", read)?);
        }
        for (name, channel) in &recipient.channels {
            let route = state.routes.entry(name.clone()).or_insert_with(|| Route {
                channel: *channel,
                recipients: Vec::new(),
            });
            route.recipients.push(Arc::clone(recipient));
            if route.recipients.len() == 1 {
                state.queue(name);
            }
        }
        let is_queued = !state.unsent.is_empty();
        let is_sent = state.wakeups == Wakeups::Working && !is_queued;
        let batch = if is_sent { state.sent } else { state.sent + 1 };
        Ok((batch, is_queued))
    }

    /// Waits until the server has acknowledged the batch: from then on no message is missed.
    pub(super) fn wait(&self, batch: u64, by: Moment) -> Result<()> {
        let mut state = self.state.lock();
        let is_pending = |state: &mut State| state.acknowledged < batch && state.failure.is_none();
        (self.changed).wait_while_for(&mut state, is_pending, by.remaining());
        match &state.failure {
            _ if state.acknowledged >= batch => Ok(()),
            Some(failure) => Err(failure.clone()),
            None => {
                let server = &self.opener.target;
                let message = format!("redis at {server}: no answer while subscribing");
                Err(Error::new(ErrorKind::Timeout, message).not_sent())
            }
        }
    }

    /// Ends what [`Subscriber::add`] began. The server hears of it with the next message or heartbeat:
    /// a contender that leaves on purpose stands in no queue, and a hand-off has better things to do at that
    /// moment.
    pub(super) fn remove(&self, recipient: &Arc<Recipient>) {
        let mut state = self.state.lock();
        for (name, _) in &recipient.channels {
            if let Some(route) = state.routes.get_mut(name) {
                let recipients = &mut route.recipients;
                recipients.retain(|known| !Arc::ptr_eq(known, recipient));
                if recipients.is_empty() {
                    state.routes.remove(name);
                    state.queue(name);
                }
            }
        }
    }

    /// Has the reader open another connection, soon: the server is not what it was.
    pub(super) fn reconnect(&self) {
        self.state.lock().outdated = true;
    }

    /// Returns how wake-ups work: not tried, working, or why not.
    pub(super) fn condition(&self) -> Wakeups {
        self.state.lock().wakeups.clone()
    }

    /// Tells the reader to end. It does so at the next message, or within a heartbeat.
    /// Returns whether there is one to be waited for.
    pub(super) fn close(&self) -> bool {
        let mut state = self.state.lock();
        state.closed = true;
        self.changed.notify_all();
        state.thread.is_some()
    }

    /// Waits until the reader has ended.
    pub(super) fn join(&self, deadline: Moment) {
        let thread = self.state.lock().thread.take();
        if let Some(mut thread) = thread {
            thread.join(deadline);
        }
    }
}

impl State {
    /// Has the server told whether the channel has a route.
    fn queue(&mut self, name: &[u8]) {
        if self.wakeups == Wakeups::Working {
            self.unsent.push(name.to_vec());
        }
    }

    /// A connection begins, with all routes.
    fn begin(&mut self) {
        self.wakeups = Wakeups::Working;
        self.failure = None;
        self.outdated = false;
        self.unsent = self.routes.keys().cloned().collect();
    }

    /// The connection has ended, or could not be opened. Waiters hear of it now, and once more when the next one is
    /// subscribed. Returns `true` if the server acknowledged a subscription.
    fn end(&mut self, error: Error) -> bool {
        let worked = std::mem::take(&mut self.works);
        if worked {
            self.interrupted = true;
            self.look();
        }
        self.wakeups = Wakeups::Polling(error.to_string().into());
        self.failure = (!worked || !error.is_transient()).then_some(error);
        self.unsent.clear();
        self.pending = 0;
        worked
    }

    /// Has all recipients look again.
    fn look(&self) {
        let recipients = self.routes.values().flat_map(|route| &route.recipients);
        recipients.for_each(|it| it.look());
    }
}

impl Subscriber {
    /// Replaces each connection that ends by a next one.
    fn read_for_ever(&self) {
        loop {
            let ended = catch_unwind(AssertUnwindSafe(|| self.read()));
            let ended = ended.unwrap_or_else(|_| {
                let message = format!("redis at {}: reading messages panicked", self.opener.target);
                Err(Error::new(ErrorKind::Panicked, message))
            });
            let Err(error) = ended else { return };
            log::debug!("redis subscriber: {error}");
            let settings = &self.opener.settings;
            settings.map_stale.store(true, Ordering::Relaxed);
            let longest_pause = self.opener.longest_pause(&error);
            let mut state = self.state.lock();
            let worked = state.end(error);
            self.changed.notify_all();
            let is_open = |state: &mut State| !state.closed;
            let pause = if worked { PAUSE } else { longest_pause };
            self.changed.wait_while_for(&mut state, is_open, pause);
            if state.closed {
                return;
            }
        }
    }

    /// Opens a connection and reads until the end of the factory, or until it fails.
    fn read(&self) -> Result<()> {
        let (address, driver) = self.opener.open(ProtocolVersion::RESP3)?;
        self.state.lock().begin();
        let mut connection = PushConnection {
            reader: self,
            driver,
            heard_at: Moment::now(),
            looks: HashMap::new(),
            timeout: Duration::ZERO,
        };
        let ended = connection.run();
        ended.map_err(|error| read(&error, &address, self.longest_silence()))
    }

    /// How long a connection may be silent. A sign of life is waited for as long as any other answer: a round trip may
    /// take longer than a heartbeat.
    fn longest_silence(&self) -> Duration {
        HEARTBEAT + HEARTBEAT.max(self.opener.settings.connector.timeout)
    }
}

/// One connection on which messages arrive.
struct PushConnection<'a> {
    reader: &'a Subscriber,
    driver: ::redis::Connection,
    heard_at: Moment,
    /// When one waiter of a mutex looks again although no message came; by the channel of its changes.
    looks: HashMap<Vec<u8>, Moment>,
    /// What the socket's timeout is set to.
    timeout: Duration,
}

impl PushConnection<'_> {
    /// Reads until the factory has ended.
    fn run(&mut self) -> RedisResult<()> {
        self.send_batch()?;
        loop {
            let state = self.reader.state.lock();
            if state.outdated {
                return Err(std::io::Error::other("not the master any more").into());
            }
            let (is_closed, has_unsent) = (state.closed, !state.unsent.is_empty());
            drop(state);
            if is_closed {
                return Ok(());
            }
            if has_unsent {
                self.send_batch()?;
            }
            let wait = self.wake_one_of_each().max(Duration::from_millis(1));
            // A system call, and with every message the wait begins anew: to wake a little early is
            // cheaper than to set the clock each time.
            if self.timeout > wait || self.timeout < wait / 2 {
                self.driver.set_read_timeout(Some(wait))?;
                self.timeout = wait;
            }
            match self.driver.recv_response() {
                Ok(Value::Push { kind, data }) => {
                    self.heard_at = Moment::now();
                    self.take(&kind, &data);
                }
                Ok(Value::ServerError(error)) => return Err(error.into()),
                Ok(_) => {}
                Err(error) => {
                    let silence = Moment::now() - self.heard_at;
                    if !is_timeout(&error) || silence >= self.reader.longest_silence() {
                        return Err(error);
                    }
                    let is_asked = self.reader.state.lock().pending > 0;
                    if silence >= HEARTBEAT && !is_asked {
                        self.send_batch()?;
                    }
                }
            }
        }
    }

    /// Sends what was queued. A batch may be empty: its last channel is the control channel, so its acknowledgement is a
    /// sign of life, too. Not PING: its reply is no push, and after a timeout the driver swallows a reply that is none.
    fn send_batch(&mut self) -> RedisResult<()> {
        let mut state = self.reader.state.lock();
        state.sent += 1;
        state.pending += 1;
        let unsent = std::mem::take(&mut state.unsent);
        let (mut subscribe, unsubscribe): (Vec<_>, Vec<_>) =
            (unsent.into_iter()).partition(|name| state.routes.contains_key(name));
        drop(state);
        if !unsubscribe.is_empty() {
            let command = cmd("UNSUBSCRIBE").arg(unsubscribe).get_packed_command();
            self.driver.send_packed_command(&command)?;
        }
        subscribe.push(self.reader.control.clone());
        let command = cmd("SUBSCRIBE").arg(subscribe).get_packed_command();
        self.driver.send_packed_command(&command)
    }

    /// Wakes one waiter of each mutex whose time has come, and says for how long to wait for a message.
    fn wake_one_of_each(&mut self) -> Duration {
        let now = Moment::now();
        let due = self.looks.extract_if(|_, at| *at <= now);
        for (name, _) in due {
            let state = self.reader.state.lock();
            let route = state.routes.get(&name);
            let mut recipients = route.iter().flat_map(|route| &route.recipients);
            if let Some(waiter) = recipients.find(|it| *it.role.lock() == Role::Waiting) {
                waiter.look();
            }
        }
        let next = self.looks.values().min();
        next.map_or(HEARTBEAT, |at| (*at - now).min(HEARTBEAT))
    }

    /// Takes what has arrived.
    fn take(&mut self, kind: &PushKind, data: &[Value]) {
        let Some(Value::BulkString(name)) = data.first() else {
            return;
        };
        let mut state = self.reader.state.lock();
        match (kind, data.get(1)) {
            (PushKind::Subscribe, _) if *name == self.reader.control => {
                state.works = true;
                state.pending = state.pending.saturating_sub(1);
                state.acknowledged = state.sent - state.pending;
                if std::mem::take(&mut state.interrupted) {
                    state.look();
                }
                // Once for a batch: a thousand that start together must not wake each other.
                self.reader.changed.notify_all();
            }
            (PushKind::Message, Some(Value::BulkString(said))) => {
                let Some(route) = state.routes.get(name) else {
                    return;
                };
                let (channel, recipients) = (route.channel, route.recipients.clone());
                drop(state);
                self.plan_look(channel, name, said);
                recipients.iter().for_each(|it| it.hear(channel, said));
            }
            _ => {}
        }
    }

    /// Notes when one waiter of the mutex looks again: a hand-over may not be claimed, a free mutex not taken.
    fn plan_look(&mut self, channel: Channel, name: &[u8], said: &[u8]) {
        let (mutex, after) = match channel {
            Channel::Changes if said == b"released@@!" => (name, YIELD),
            Channel::Changes => {
                self.looks.remove(name);
                return;
            }
            // The claim time in the message is for readers of other languages: it is a constant.
            Channel::Handed => (
                name.strip_suffix(b"!handed").unwrap_or(name),
                CLAIM_TIME + TOO_EARLY,
            ),
            Channel::Turn | Channel::Permits => return,
        };
        self.looks.insert(mutex.to_vec(), self.heard_at + after);
    }
}

#[cfg(test)]
mod tests {
    use std::net::{SocketAddr, TcpListener};
    use std::sync::atomic::AtomicBool;

    use super::super::connection::{Address, Connector, Target};
    use super::super::error::unavailable;
    use super::super::server::ServerSettings;
    use super::*;

    fn subscriber(server: SocketAddr) -> Arc<Subscriber> {
        let connector = Connector {
            login: Default::default(),
            database: 0,
            tls: None,
            timeout: Duration::from_millis(100),
        };
        let settings = ServerSettings {
            connector,
            pool_size: 1,
            prefix: "simba".to_owned(),
            probe: Default::default(),
            map_stale: AtomicBool::new(false),
        };
        let opener = Opener {
            settings: Arc::new(settings),
            target: Target::At(Address::Tcp(server.ip().to_string(), server.port())),
            warned: AtomicBool::new(false),
        };
        Subscriber::new(&Arc::new(opener))
    }

    fn recipient(channel: &str) -> Arc<Recipient> {
        let channels = vec![(channel.as_bytes().to_vec(), Channel::Turn)];
        let subscription = Subscription::new("a", |_| {}, channels, 0);
        Arc::clone(&subscription.recipient)
    }

    fn wait_until(condition: impl Fn() -> bool) {
        let end = Moment::now() + Duration::from_secs(30);
        while !condition() {
            assert!(!end.remaining().is_zero(), "not in time");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// A contender that tries on and on while the server is away would fill the memory.
    #[test]
    fn channels_are_forgotten_while_there_is_no_connection() {
        let nobody = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = nobody.local_addr().unwrap();
        drop(nobody);
        let subscriber = subscriber(address);
        for number in 0..1_000 {
            let recipient = recipient(&format!("m{number}"));
            subscriber.add(&recipient).unwrap();
            subscriber.remove(&recipient);
        }
        let queued = {
            let state = subscriber.state.lock();
            (state.unsent.len(), state.routes.len())
        };
        assert_eq!(queued, (0, 0));
        subscriber.close();
        subscriber.join(Moment::now() + Duration::from_secs(30));
    }

    /// A factory that is gone asks for no connection any more.
    #[test]
    fn reader_closed_in_a_pause_does_not_connect_again() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let subscriber = subscriber(listener.local_addr().unwrap());
        subscriber.add(&recipient("m")).unwrap();
        // Closes what it accepts: each attempt fails.
        let accepted = || std::iter::from_fn(|| listener.accept().ok()).count();
        let attempts = std::cell::Cell::new(0);
        // Its pauses are long by then.
        wait_until(|| {
            attempts.set(attempts.get() + accepted());
            attempts.get() >= 5
        });
        let reader = &subscriber;
        reader.state.lock().failure = None;
        wait_until(|| {
            accepted();
            // Under the lock: an attempt has just failed, and it pauses until it is told.
            let mut state = reader.state.lock();
            state.closed = state.failure.is_some();
            state.closed
        });
        accepted();
        reader.changed.notify_all();
        subscriber.join(Moment::now() + Duration::from_secs(30));
        assert_eq!(accepted(), 0);
    }

    /// Health must not say "not tried yet" until the next connection has failed, too.
    #[test]
    fn lost_connection_shows_at_once() {
        let mut state = State::default();
        assert_eq!(state.wakeups, Wakeups::Untried);
        state.begin();
        state.works = true;
        state.end(unavailable("closed"));
        assert_eq!(state.wakeups, Wakeups::Polling("closed".into()));
        // A subscription waits for the next one, which is under way.
        assert!(state.failure.is_none());
        state.end(unavailable("refused"));
        assert!(state.failure.is_some());
    }

    #[test]
    fn recipient_hears_what_concerns_its_role() {
        let change = |role, id: &[u8], said: &[u8]| concerns(role, id, Channel::Changes, said);
        assert!(change(Role::Owning, b"a", b"released@@a"), "revoked");
        assert!(!change(Role::Waiting, b"a", b"released@@a"));
        assert!(change(Role::Waiting, b"b", b"released@@a"));
        assert!(!change(Role::Owning, b"a", b"acquired@@a"));
        assert!(change(Role::Owning, b"b", b"acquired@@a"));
        assert!(!change(Role::Waiting, b"b", b"acquired@@a"));
        assert!(change(Role::Observing, b"", b"acquired@@a"));
        assert!(!change(Role::Waiting, b"b", b"released@@!"));
        assert!(change(Role::Observing, b"", b"released@@!"));
        assert!(!concerns(Role::Waiting, b"b", Channel::Handed, b"500@@a"));
        assert!(concerns(Role::Waiting, b"a", Channel::Turn, b"released@@b"));
        assert!(!concerns(Role::Idle, b"a", Channel::Turn, b"released@@b"));
    }
}
