//! One server: its connections for commands and the one for messages. And the one loop for a request: it finds the
//! server that has the slot, follows it while it moves, and repeats what an idle connection lost.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::Duration;

use ::redis::{RedisError, RedisResult, Value, cmd};

use super::cluster::Cluster;
use super::connection::{Connection, Connector, LEAST, Opener, Target};
use super::error::{Failure, unavailable};
use super::script::{Command, integer};
use super::subscriber::{Channel, Recipient, Subscriber};
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

/// How many redirections and repetitions one call follows.
const ROUNDS: u32 = 16;

/// What all servers of a factory have in common.
#[derive(Clone)]
pub(super) struct ServerSettings {
    pub(super) connector: Arc<Connector>,
    pub(super) pool_size: u32,
    pub(super) prefix: String,
    pub(super) probe: Probed,
}

/// One server: a pool, and a subscriber.
pub(super) struct Server {
    target: Arc<Target>,
    pub(super) subscriber: Arc<Subscriber>,
    pub(super) pool: Pool<Opener>,
    /// Wakes the thread that reads messages: it has something to send.
    wake_reader: Command,
    /// The server's clock less the local one, in milliseconds; `i64::MIN` until a reply told.
    skew: AtomicI64,
}

/// What a server replied.
pub(super) struct Answer {
    pub(super) value: Value,
    /// How many replicas have the grant, if the request asks for some and was granted.
    pub(super) replicas: Option<u32>,
    /// The error of an earlier try of unknown outcome, if there was one.
    pub(super) doubt: Option<Error>,
}

/// A request that was sent, and its reply not read yet. One that is dropped takes its connection along.
pub(super) struct Pending {
    server: Arc<Server>,
    connection: Checkout<Opener>,
    request: Command,
    pub(super) sent: Moment,
}

impl Server {
    /// `map_stale` is set when another server may have taken the place of this one.
    pub(super) fn new(
        settings: &ServerSettings,
        target: Target,
        map_stale: &Arc<AtomicBool>,
    ) -> Result<Server> {
        let target = Arc::new(target);
        // Without a brace, so no mutex has it; random, so no other factory has it.
        let control = format!(
            "{}:!control:{:032x}",
            settings.prefix,
            rand::random::<u128>()
        );
        let opener = Opener {
            connector: Arc::clone(&settings.connector),
            target: Arc::clone(&target),
            warned: AtomicBool::new(false),
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
            wake_reader: Command::plain(0, &[b"PUBLISH", control.as_bytes(), b""]),
            subscriber: Subscriber::new(&settings.connector, &target, &control, map_stale),
            target,
            pool,
            skew: AtomicI64::new(i64::MIN),
        })
    }

    /// Sends a request once and reads the reply before `by`. `asking`: its slot is on its way here.
    fn send(
        &self,
        request: &Command,
        lane: Lane,
        asking: bool,
        by: Moment,
    ) -> Result<Answer, Failure> {
        let mut connection = self.pool.checkout(lane, by).map_err(Failure::Other)?;
        let sent = Moment::now();
        if by - sent < LEAST {
            let message = format!("redis at {}: no time was left to ask", self.target);
            let error = Error::new(ErrorKind::Timeout, message);
            return Err(Failure::Other(error.not_sent()));
        }
        let exchange = |connection: &mut Connection| {
            if asking {
                connection.ask(&cmd("ASKING"), by)?;
            }
            connection.send(&request.packed(self.server_ms(by)))?;
            self.read(connection, request, asking, sent, by)
        };
        exchange(&mut connection).map_err(|error| self.failed(&mut connection, &error, sent))
    }

    /// Sends a plain command, once more if the first connection turns out to be closed.
    pub(super) fn command(&self, request: &Command, by: Moment) -> Result<Value> {
        let answer = match self.send(request, Lane::Other, false, by) {
            Err(Failure::Closed(_)) => self.send(request, Lane::Other, false, by),
            answer => answer,
        };
        answer
            .map(|answer| answer.value)
            .map_err(Failure::into_error)
    }

    /// Sends a request on an idle connection, or not at all. Never waits. The server does nothing after `not_after`.
    pub(super) fn begin(self: Arc<Self>, request: Command, not_after: Moment) -> Option<Pending> {
        let sent = Moment::now();
        let mut connection = self.pool.try_checkout(Lane::Other)?;
        if let Err(error) = connection.send(&request.packed(self.server_ms(not_after))) {
            self.failed(&mut connection, &error, sent);
            return None;
        }
        Some(Pending {
            server: self,
            connection,
            request,
            sent,
        })
    }

    /// Reads the reply to what was sent at `sent`.
    fn read(
        &self,
        connection: &mut Connection,
        request: &Command,
        asking: bool,
        sent: Moment,
        by: Moment,
    ) -> RedisResult<Answer> {
        let mut reply = connection.receive(by);
        if reply.as_ref().is_err_and(is_unknown_script)
            && let Some(request) = request.with_text()
        {
            if asking {
                connection.ask(&cmd("ASKING"), by)?;
            }
            connection.send(&request.packed(self.server_ms(by)))?;
            reply = connection.receive(by);
        }
        let value = reply?;
        self.learn(&value, sent);
        let mut replicas = None;
        if request.replicas > 0 && is_grant(&value) {
            // The server counts the writes of this connection.
            let left = by.remaining();
            let wait = (left - left / 4).as_millis().max(1) as u64;
            let count = connection.ask(cmd("WAIT").arg(request.replicas).arg(wait), by)?;
            replicas = integer(Some(&count))
                .ok()
                .and_then(|it| u32::try_from(it).ok());
        }
        Ok(Answer {
            value,
            replicas,
            doubt: None,
        })
    }

    /// Reads an error, and does what it means for the connections.
    fn failed(&self, connection: &mut Connection, error: &RedisError, sent: Moment) -> Failure {
        let waited = Moment::now() - sent;
        let failure = Failure::new(error, &connection.address, waited);
        match &failure {
            Failure::Closed(error) => {
                connection.poison();
                self.pool.lost(error);
                // The idle ones were closed with it more often than not.
                self.pool.discard_idle(sent);
            }
            Failure::ReadOnly(error) => {
                connection.poison();
                self.pool.lost(error);
                self.pool.discard_idle(Moment::now());
                self.subscriber.reconnect();
            }
            Failure::Other(error) => match error.kind() {
                ErrorKind::Timeout => {
                    self.pool.lost(error);
                    if self.is_watched() && waited >= SILENT {
                        // The next connection asks the sentinels.
                        self.pool.discard_idle(sent);
                        self.subscriber.reconnect();
                    }
                }
                // The next connection logs in anew, or is another server's.
                ErrorKind::Denied | ErrorKind::Misconfigured | ErrorKind::Protocol => {
                    connection.poison();
                }
                _ => {}
            },
            _ => {}
        }
        failure
    }

    /// Subscribes, and returns once the server has acknowledged it.
    pub(super) fn subscribe(
        &self,
        channels: &[(Vec<u8>, Channel)],
        recipient: &Arc<Recipient>,
        by: Moment,
    ) -> Result<()> {
        if self.subscriber.add(channels, recipient)? {
            self.command(&self.wake_reader, by)?;
        }
        self.subscriber.wait(channels, by)
    }

    /// Returns `true` if sentinels say which server this is.
    fn is_watched(&self) -> bool {
        matches!(*self.target, Target::Master(_))
    }

    /// Returns the server's clock at `at`, in milliseconds; 0 while it is not known.
    fn server_ms(&self, at: Moment) -> u64 {
        match self.skew.load(Ordering::Relaxed) {
            i64::MIN => 0,
            skew => u64::try_from(local_ms(at).saturating_add(skew)).unwrap_or(0),
        }
    }

    /// Learns the server's clock from a reply that has its time, in µs, in the second place. Counted from before the
    /// request, so that deadlines err to the later side.
    fn learn(&self, reply: &Value, sent: Moment) {
        if let Value::Array(fields) = reply
            && let Some(Value::Int(micros)) = fields.get(1)
        {
            let skew = (micros / 1000).saturating_sub(local_ms(sent));
            self.skew.store(skew, Ordering::Relaxed);
        }
    }

    /// Tells the reader to end.
    fn close(&self) {
        if self.subscriber.close() {
            // Without it, the reader ends at its next heartbeat. The reply is of no interest.
            if let Some(mut connection) = self.pool.try_checkout(Lane::Owner) {
                let _ = connection.send(&self.wake_reader.packed(0));
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.close();
    }
}

impl Pending {
    /// Reads the reply before `by`.
    pub(super) fn finish(mut self, by: Moment) -> Result<Answer, Failure> {
        let Pending {
            server,
            connection,
            request,
            sent,
        } = &mut self;
        let answer = server.read(connection, request, false, *sent, by);
        answer.map_err(|error| server.failed(connection, &error, *sent))
    }
}

/// Where the mutexes of a factory are.
pub(super) enum Deployment {
    /// On one server, perhaps one that sentinels name.
    One(Arc<Server>),
    /// On the masters of a cluster.
    Cluster(Box<Cluster>),
}

impl Deployment {
    /// Runs a script, or a plain command, on the server that has its slot. The reply is waited for until `by`.
    ///
    /// # Errors
    /// Any; the outcome is unknown, unless the error [`is_not_sent`](Error::is_not_sent).
    pub(super) fn call(&self, lane: Lane, by: Moment, request: &Command) -> Result<Value> {
        self.ask(lane, by, request).map(|answer| answer.value)
    }

    /// As [`Deployment::call`], with all that is known of the answer.
    pub(super) fn ask(&self, lane: Lane, by: Moment, request: &Command) -> Result<Answer> {
        let mut server = self.server(request.slot, by)?;
        let mut request = Cow::Borrowed(request);
        let (mut asking, mut repeated, mut rounds) = (false, false, 0);
        let mut doubt: Option<Error> = None;
        let outcome = loop {
            let failure = match server.send(&request, lane, asking, by) {
                Ok(answer) => break Ok(answer),
                Err(failure) => failure,
            };
            asking = false;
            rounds += 1;
            let next = match (failure, self) {
                // An idle connection was closed. Acquire is idempotent, renew and release name their fence.
                (Failure::Closed(error), _) if !repeated => {
                    repeated = true;
                    doubt = Some(error);
                    Ok(server)
                }
                // The sentinels may know a new master by now.
                (Failure::ReadOnly(_), _) if !repeated && server.is_watched() => {
                    repeated = true;
                    Ok(server)
                }
                (Failure::Moved(Some(to)), Deployment::Cluster(cluster)) => {
                    cluster.set_master(request.slot, to)
                }
                (Failure::Moved(None), Deployment::Cluster(cluster)) => {
                    cluster.mark_stale();
                    cluster.server(request.slot, by)
                }
                (Failure::Ask(to), Deployment::Cluster(cluster)) => {
                    asking = true;
                    cluster.at(to)
                }
                (Failure::TryAgain(error), Deployment::Cluster(cluster)) => {
                    rounds = 0;
                    if let Some(shorter) = request.without_queue() {
                        request = Cow::Owned(shorter);
                    } else if by.remaining() >= TRY_AGAIN * 2 {
                        std::thread::sleep(TRY_AGAIN);
                    } else {
                        break Err(error);
                    }
                    cluster.server(request.slot, by)
                }
                (failure, _) => {
                    self.note(&failure);
                    break Err(failure.into_error());
                }
            };
            match next {
                Ok(next) if rounds < ROUNDS => server = next,
                Ok(_) => {
                    break Err(unavailable(
                        "redis cluster: the nodes do not agree on which of them has the mutex",
                    ));
                }
                Err(error) => break Err(error),
            }
        };
        match outcome {
            Ok(answer) => Ok(Answer { doubt, ..answer }),
            // The last try was not sent; the one before it was.
            Err(error) if doubt.is_some() => Err(error.perhaps_sent()),
            Err(error) => Err(error),
        }
    }

    /// In a cluster, another node may have taken over: the next call looks.
    pub(super) fn note(&self, failure: &Failure) {
        if let Deployment::Cluster(cluster) = self
            && failure.suggests_new_map()
        {
            cluster.mark_stale();
        }
    }

    /// The server that has the slot.
    pub(super) fn server(&self, slot: u16, by: Moment) -> Result<Arc<Server>> {
        match self {
            Deployment::One(server) => Ok(Arc::clone(server)),
            Deployment::Cluster(cluster) => cluster.server(slot, by),
        }
    }

    /// The servers that have mutexes.
    pub(super) fn masters(&self, by: Moment) -> Result<Vec<Arc<Server>>> {
        match self {
            Deployment::One(server) => Ok(vec![Arc::clone(server)]),
            Deployment::Cluster(cluster) => cluster.masters(by),
        }
    }

    /// The servers that were met so far.
    pub(super) fn known(&self) -> Vec<Arc<Server>> {
        match self {
            Deployment::One(server) => vec![Arc::clone(server)],
            Deployment::Cluster(cluster) => cluster.known(),
        }
    }
}

impl Drop for Deployment {
    fn drop(&mut self) {
        let servers = self.known();
        servers.iter().for_each(|server| server.close());
        let deadline = Moment::now() + FAREWELL;
        for server in servers {
            server.subscriber.join(deadline);
        }
    }
}

fn is_unknown_script(error: &RedisError) -> bool {
    error.kind() == ::redis::ErrorKind::Server(::redis::ServerErrorKind::NoScript)
}

/// Reads the reply to an acquire.
fn is_grant(value: &Value) -> bool {
    matches!(value, Value::Array(fields) if matches!(fields.first(), Some(Value::Int(fence)) if *fence > 0))
}

fn local_ms(at: Moment) -> i64 {
    i64::try_from(at.since_origin().as_millis()).unwrap_or(i64::MAX)
}
