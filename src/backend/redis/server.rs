//! One server, with its connections for commands and the one for messages; and how a call finds the server
//! that has the mutex: there is one, or a cluster of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use ::redis::{RedisError, RedisResult, Value};
use parking_lot::Mutex;

use super::cluster::Cluster;
use super::connection::{Connection, Connector, LEAST, Opener, Target, no_time};
use super::error::{CallError, CallResult};
use super::script::{Call, command, server_ms};
use super::subscriber::Subscriber;
use super::subscription::{Channel, Recipient};
use crate::backend::{PoolUse, Wakeups};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::pool::{Checkout, Lane, Pool, PoolSettings};
use crate::probe::Probed;

/// A connection that was idle for longer is not trusted: servers, firewalls and address translators
/// drop idle connections in silence, and a new one costs less than a failed request.
const IDLE: Duration = Duration::from_secs(30);

/// A master of sentinels that has not answered for as long may be dead, with its machine or its network, and
/// another one in its place: nothing closes the connections to it. A shorter call says only that the server is
/// slow. (Of the second that a wait which can be cancelled gives each of its calls, a server has three quarters
/// at the least: see [`Connection::receive`].)
const SILENT: Duration = Duration::from_millis(700);

/// How long the end of a factory waits for its threads.
const FAREWELL: Duration = Duration::from_millis(400);

/// The pause before a slot of a cluster that is on its way is asked again.
const TRY_AGAIN: Duration = Duration::from_millis(10);

/// What all servers of a factory have in common.
#[derive(Clone, Debug)]
pub(super) struct ServerSettings {
    pub(super) connector: Arc<Connector>,
    pub(super) pool_size: u32,
    pub(super) prefix: String,
    pub(super) probe: Probed,
}

/// One server: a pool, and a subscriber.
#[derive(Debug)]
pub(super) struct Server {
    target: Arc<Target>,
    // Ended in this order: the reader is woken through the pool.
    subscriber: Subscriber,
    pool: Pool<Opener>,
    /// The command that wakes the thread that reads messages: it has something to send.
    wake_reader: Vec<u8>,
    /// The server's clock less ours, in milliseconds; `i64::MIN` until a reply told.
    skew: AtomicI64,
}

impl Server {
    pub(super) fn new(
        settings: &ServerSettings,
        target: Target,
        on_error: Box<dyn Fn() + Send + Sync>,
    ) -> Result<Server> {
        let target = Arc::new(target);
        // No brace in it, so it is nobody else's; random, so it is no other factory's.
        let control = format!(
            "{}:!control:{:032x}",
            settings.prefix,
            rand::random::<u128>()
        );
        let opener = Opener {
            connector: Arc::clone(&settings.connector),
            target: Arc::clone(&target),
            looked: Mutex::default(),
        };
        let pool = Pool::new(
            opener,
            PoolSettings {
                name: "contend-redis",
                size: settings.pool_size,
                idle_timeout: IDLE,
                probe: settings.probe.clone(),
            },
        )?;
        Ok(Server {
            wake_reader: command(&[b"PUBLISH", control.as_bytes(), b""]),
            subscriber: Subscriber::new(&settings.connector, &target, &control, on_error),
            target,
            pool,
            skew: AtomicI64::new(i64::MIN),
        })
    }

    /// Runs a script; the reply is waited for until `by`, and the server is told so. Where an idle
    /// connection turns out to be closed, it is sent once more on another: acquire is idempotent, and
    /// renew and release name their fence. `doubt` says then how the first try ended.
    pub(super) fn call(
        &self,
        call: &mut Call,
        lane: Lane,
        asking: bool,
        by: Moment,
        doubt: &mut Option<Error>,
    ) -> CallResult<Value> {
        self.set_deadline(call, by);
        self.retried(lane, by, doubt, |connection, sent| {
            let asked = |connection: &mut Connection| {
                if asking {
                    connection.send(&command(&[b"ASKING"]), sent, by)?;
                    connection.receive(by)?;
                }
                Ok::<(), RedisError>(())
            };
            asked(connection)?;
            connection.send(call.by_hash(), sent, by)?;
            match connection.receive(by) {
                Err(error) if is_unknown_script(&error) => {
                    asked(connection)?;
                    connection.send(&call.by_text(), Moment::now(), by)?;
                    connection.receive(by)
                }
                reply => reply,
            }
            .inspect(|value| self.learn(value, sent))
        })
    }

    /// Sends a plain command that may be sent twice.
    pub(super) fn command(&self, words: &[&[u8]], by: Moment) -> CallResult<Value> {
        self.packed(&command(words), by)
    }

    fn packed(&self, packed: &[u8], by: Moment) -> CallResult<Value> {
        let request = |connection: &mut Connection, sent| {
            connection.send(packed, sent, by)?;
            connection.receive(by)
        };
        self.retried(Lane::Other, by, &mut None, request)
    }

    fn retried(
        &self,
        lane: Lane,
        by: Moment,
        doubt: &mut Option<Error>,
        mut request: impl FnMut(&mut Connection, Moment) -> RedisResult<Value>,
    ) -> CallResult<Value> {
        let mut retried = false;
        loop {
            let asked_at = Moment::now();
            let mut connection = self.pool.checkout(lane, by).map_err(CallError::Other)?;
            let fresh = connection.is_opened_since(asked_at);
            let sent = Moment::now();
            if by - sent < LEAST {
                // Said here, because what the connection says of it is read as an answer that did not come.
                return Err(CallError::Other(no_time(connection.address())));
            }
            match request(&mut connection, sent) {
                Ok(value) => return Ok(value),
                Err(error) => match self.failed(&mut connection, error, sent) {
                    CallError::Closed(error) if !fresh && !retried => {
                        retried = true;
                        doubt.get_or_insert(error);
                    }
                    failure => return Err(failure),
                },
            }
        }
    }

    /// Reads an error, and does what it means for the connections.
    fn failed(&self, connection: &mut Connection, error: RedisError, sent: Moment) -> CallError {
        let waited = Moment::now() - sent;
        let failure = CallError::new(error, connection.address(), waited);
        match &failure {
            CallError::Closed(error) => {
                connection.poison();
                self.pool.lost(error);
                // The idle ones were closed with it more often than not.
                self.pool.discard_idle(sent);
            }
            CallError::ReadOnly(error) => {
                connection.poison();
                self.pool.lost(error);
                self.pool.discard_idle(Moment::now());
                self.subscriber.reconnect();
            }
            CallError::Other(error) => match error.kind() {
                ErrorKind::Timeout => {
                    self.pool.lost(error);
                    if matches!(*self.target, Target::Master(_)) && waited >= SILENT {
                        // Else each of them would cost a call. The next one asks the sentinels.
                        self.pool.discard_idle(sent);
                        self.subscriber.reconnect();
                    }
                }
                // The next one logs in anew, or is another server's.
                ErrorKind::Denied | ErrorKind::Misconfigured | ErrorKind::Protocol => {
                    connection.poison();
                }
                _ => {}
            },
            _ => {}
        }
        failure
    }

    /// An idle connection for who does not wait for one.
    pub(super) fn spare(&self) -> Option<Checkout<Opener>> {
        self.pool.try_checkout(Lane::Other)
    }

    /// Sends a call and leaves the reply for [`Server::finish_early`].
    pub(super) fn send_early(
        &self,
        connection: &mut Connection,
        call: &mut Call,
        deadline: Moment,
        by: Moment,
    ) -> CallResult<()> {
        self.set_deadline(call, deadline);
        let sent = Moment::now();
        connection
            .send(call.by_hash(), sent, by)
            .map_err(|error| self.failed(connection, error, sent))
    }

    /// Reads the reply to a call that was sent at `sent`.
    pub(super) fn finish_early(
        &self,
        connection: &mut Connection,
        call: &Call,
        sent: Moment,
        by: Moment,
    ) -> CallResult<Value> {
        let reply = match connection.receive(by) {
            Err(error) if is_unknown_script(&error) => connection
                .send(&call.by_text(), Moment::now(), by)
                .and_then(|()| connection.receive(by)),
            reply => reply,
        };
        let reply = reply.map_err(|error| self.failed(connection, error, sent))?;
        self.learn(&reply, sent);
        Ok(reply)
    }

    /// Subscribes, and returns once the server has acknowledged it.
    pub(super) fn subscribe(
        &self,
        channels: &[(Vec<u8>, Channel)],
        recipient: &Arc<Recipient>,
        by: Moment,
    ) -> Result<()> {
        if self.subscriber.add(channels, recipient)? {
            self.packed(&self.wake_reader, by).map_err(|error| {
                self.subscriber.not_woken();
                error.into_error()
            })?;
        }
        self.subscriber.acknowledged(channels, recipient, by)
    }

    pub(super) fn unsubscribe(&self, channels: &[(Vec<u8>, Channel)], recipient: &Arc<Recipient>) {
        self.subscriber.remove(channels, recipient);
    }

    pub(super) fn wake_all(&self) {
        self.subscriber.wake_all();
    }

    pub(super) fn usage(&self) -> PoolUse {
        self.pool.usage()
    }

    pub(super) fn wakeups(&self) -> Wakeups {
        self.subscriber.condition()
    }

    fn set_deadline(&self, call: &mut Call, deadline: Moment) {
        if call.has_deadline() {
            let skew = self.skew.load(Ordering::Relaxed);
            call.set_deadline(if skew == i64::MIN {
                0
            } else {
                u64::try_from(local_ms(deadline).saturating_add(skew)).unwrap_or(0)
            });
        }
    }

    /// Learns the server's clock. Counted from before the request, so that deadlines err to the later side.
    fn learn(&self, reply: &Value, sent: Moment) {
        if let Some(now) = server_ms(reply) {
            let skew = now.saturating_sub(local_ms(sent));
            self.skew.store(skew, Ordering::Relaxed);
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let deadline = Moment::now() + FAREWELL;
        if self.subscriber.close() {
            // Without it, the reader ends at its next heartbeat. The reply is of no interest.
            if let Some(mut connection) = self.pool.try_checkout(Lane::Owner) {
                let _ = connection.send(&self.wake_reader, Moment::now(), deadline);
            }
            self.subscriber.join(deadline);
        }
    }
}

/// Where the mutexes of a factory are.
#[derive(Debug)]
pub(super) enum Deployment {
    /// On one server, perhaps one that sentinels name.
    One(Arc<Server>),
    /// On the masters of a cluster.
    Cluster(Cluster),
}

impl Deployment {
    /// The server that has the slot.
    pub(super) fn server(&self, slot: u16, by: Moment) -> Result<Arc<Server>> {
        match self {
            Deployment::One(server) => Ok(Arc::clone(server)),
            Deployment::Cluster(cluster) => cluster.server(slot, by),
        }
    }

    /// All servers that are known.
    pub(super) fn servers(&self, by: Moment) -> Result<Vec<Arc<Server>>> {
        match self {
            Deployment::One(server) => Ok(vec![Arc::clone(server)]),
            Deployment::Cluster(cluster) => cluster.servers(by),
        }
    }

    /// Runs a script where the slot is. While the slot is on its way and its keys are on both sides, it
    /// is tried again until `by`.
    pub(super) fn call(&self, slot: u16, call: &mut Call, lane: Lane, by: Moment) -> Result<Value> {
        let called = self.call_or(slot, call, None, lane, by);
        called.map(|(value, _)| value)
    }

    /// As [`Deployment::call`], but where the keys are on both sides, it goes on with `instead`. The second
    /// result is the error of an earlier try of unknown outcome, if there was one.
    pub(super) fn call_or<'a>(
        &self,
        slot: u16,
        mut call: &'a mut Call,
        mut instead: Option<&'a mut Call>,
        lane: Lane,
        by: Moment,
    ) -> Result<(Value, Option<Error>)> {
        let mut doubt = None;
        loop {
            let failure = match self.call_once(slot, call, lane, by, &mut doubt) {
                Ok(value) => return Ok((value, doubt)),
                Err(failure) => failure,
            };
            let on_its_way = matches!(failure, CallError::TryAgain(_));
            if on_its_way && let Some(instead) = instead.take() {
                call = instead;
            } else if on_its_way && by.remaining() >= TRY_AGAIN * 2 {
                std::thread::sleep(TRY_AGAIN);
            } else if doubt.is_some() {
                // The last try was not sent; the one before it was.
                return Err(failure.into_error().perhaps_sent());
            } else {
                return Err(failure.into_error());
            }
        }
    }

    fn call_once(
        &self,
        slot: u16,
        call: &mut Call,
        lane: Lane,
        by: Moment,
        doubt: &mut Option<Error>,
    ) -> CallResult<Value> {
        match self {
            Deployment::One(server) => match server.call(call, lane, false, by, doubt) {
                // The sentinels may know a new master by now, and nothing was done on the old one.
                Err(CallError::ReadOnly(_)) if matches!(*server.target, Target::Master(_)) => {
                    server.call(call, lane, false, by, doubt)
                }
                reply => reply,
            },
            Deployment::Cluster(cluster) => cluster.call(slot, call, lane, by, doubt),
        }
    }

    /// Reads what became of an early acquire. `None`: nothing was done there.
    pub(super) fn settle(&self, reply: CallResult<Value>) -> Result<Option<Value>> {
        match reply {
            Ok(value) => Ok(Some(value)),
            Err(
                CallError::Moved(_)
                | CallError::Ask(_)
                | CallError::TryAgain(_)
                | CallError::ReadOnly(_)
                | CallError::ClusterDown(_),
            ) => Ok(None),
            Err(failure) => {
                if let Deployment::Cluster(cluster) = self {
                    cluster.suspect(None);
                }
                Err(failure.into_error())
            }
        }
    }
}

pub(super) fn unavailable(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Unavailable, message).not_sent()
}

fn is_unknown_script(error: &RedisError) -> bool {
    error.kind() == ::redis::ErrorKind::Server(::redis::ServerErrorKind::NoScript)
}

fn local_ms(at: Moment) -> i64 {
    i64::try_from(at.since_origin().as_millis()).unwrap_or(i64::MAX)
}
