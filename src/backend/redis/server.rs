//! One server: its connections for commands and the one for messages. And the one loop for a request: it finds the
//! server that has the slot, follows it while it moves, and repeats what an idle connection lost.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::Duration;

use ::redis::{ErrorKind as Kind, RedisError, RedisResult, ServerErrorKind, Value, cmd};

use super::cluster::Cluster;
use super::connection::{Connector, LEAST, Opener, Target};
use super::error::{Failure, Reason, unavailable};
use super::permits::read;
use super::script::Command;
use super::subscriber::Subscriber;
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::pool::{Checkout, Connect, Lane, Pool};
use crate::probe::Probed;

/// A connection that was idle for longer is not trusted: servers, firewalls and address translators
/// drop idle connections in silence, and a new one costs less than a failed request.
const IDLE: Duration = Duration::from_secs(30);

/// A master of sentinels that has not answered for as long may be dead, with its machine or its network, and
/// another one in its place: nothing closes the connections to it. A shorter call says only that the server is
/// slow. (Of the second that a wait which can be cancelled gives each of its calls, a server has three quarters
/// at the least: see `Connection::receive`.)
const SILENT: Duration = Duration::from_millis(700);

/// How long the end of a factory waits for its threads.
const FAREWELL: Duration = Duration::from_millis(400);

/// The pause before a slot of a cluster that is on its way is asked again.
const TRY_AGAIN: Duration = Duration::from_millis(10);

/// How many redirections and repetitions one call follows.
const ROUNDS: u32 = 16;

/// The server does not know the script yet.
const UNKNOWN_SCRIPT: Kind = Kind::Server(ServerErrorKind::NoScript);

/// What all servers of a factory have in common.
pub(super) struct ServerSettings {
    pub(super) connector: Connector,
    pub(super) pool_size: u32,
    pub(super) prefix: String,
    pub(super) probe: Probed,
    /// In a cluster: another server may have taken the place of one.
    pub(super) map_stale: AtomicBool,
}

/// One server: a pool, and a subscriber.
pub(super) struct Server {
    pub(super) subscriber: Arc<Subscriber>,
    pub(super) pool: Pool<Arc<Opener>>,
    /// The server's clock less the local one, in milliseconds; 0 until a reply told.
    skew: AtomicI64,
}

/// What a server replied.
pub(super) struct Answer {
    pub(super) value: Value,
    /// How many replicas have the grant, if the request asks for some and was granted.
    pub(super) replicas: Option<i64>,
    /// The error of an earlier try of unknown outcome, if there was one.
    pub(super) doubt: Option<Error>,
}

/// A request that was sent, and its reply not read yet. One that is dropped takes its connection along.
pub(super) struct Pending<'a> {
    server: Arc<Server>,
    connection: Checkout<Arc<Opener>>,
    request: Cow<'a, Command>,
    /// Its slot is on its way here.
    asking: bool,
    pub(super) sent: Moment,
}

impl Server {
    pub(super) fn new(settings: &Arc<ServerSettings>, target: Target) -> Result<Server> {
        let opener = Arc::new(Opener {
            settings: Arc::clone(settings),
            target,
            warned: AtomicBool::new(false),
        });
        let (size, probe) = (settings.pool_size, settings.probe.clone());
        Ok(Server {
            subscriber: Subscriber::new(&opener),
            pool: Pool::new(opener, "contend-redis", size, IDLE, probe)?,
            skew: AtomicI64::default(),
        })
    }

    /// Sends a plain command to this server.
    pub(super) fn command(self: &Arc<Self>, request: &Command, by: Moment) -> Result<Value> {
        let answer = self.ask(None, Lane::Other, by, request)?;
        Ok(answer.value)
    }

    /// Sends a request, again where that helps, and in `cluster` to the server that has the slot.
    fn ask(
        self: &Arc<Self>,
        cluster: Option<&Cluster>,
        lane: Lane,
        by: Moment,
        request: &Command,
    ) -> Result<Answer> {
        let (mut server, mut request) = (Arc::clone(self), Cow::Borrowed(request));
        let (mut doubt, mut asking, mut rounds) = (None, false, 0);
        let error = loop {
            let Failure { error, reason } = match server.send(&request, lane, asking, by) {
                Ok(answer) => return Ok(Answer { doubt, ..answer }),
                Err(failure) => failure,
            };
            rounds += 1;
            if rounds == ROUNDS {
                break unavailable("redis cluster: the nodes do not agree on who has the mutex");
            }
            asking = matches!(reason, Reason::Ask(_));
            let next = match (reason, cluster) {
                // An idle connection was closed. Acquire is idempotent, renew and release name their fence.
                (Reason::Closed, _) if doubt.is_none() => {
                    doubt = Some(error);
                    continue;
                }
                // The sentinels may know a new master by now.
                (Reason::ReadOnly, _) if rounds == 1 && server.is_watched() => continue,
                (Reason::Moved(to), Some(cluster)) => cluster.set_master(request.slot, to),
                (Reason::Ask(to), Some(cluster)) => cluster.at(to),
                (Reason::TryAgain, Some(cluster)) if by.remaining() > TRY_AGAIN * 2 => {
                    rounds = 0;
                    match request.without_queue() {
                        Some(shorter) => request = Cow::Owned(shorter),
                        None => std::thread::sleep(TRY_AGAIN),
                    }
                    cluster.server(request.slot, by)
                }
                _ => break error,
            };
            match next {
                Ok(next) => server = next,
                Err(error) => break error,
            }
        };
        // The last try was perhaps not sent; the one before it was.
        Err(match doubt {
            Some(_) => error.perhaps_sent(),
            None => error,
        })
    }

    /// Sends a request once and reads the reply before `by`. `asking`: its slot is on its way here.
    fn send(
        self: &Arc<Self>,
        request: &Command,
        lane: Lane,
        asking: bool,
        by: Moment,
    ) -> Result<Answer, Failure> {
        let connection = self.pool.checkout(lane, by);
        let connection = connection.map_err(|error| self.noted(error.into()))?;
        if by.remaining() < LEAST {
            let message = format!(
                "{}: no time was left to ask",
                self.pool.connector().server()
            );
            return Err(Error::new(ErrorKind::Timeout, message).not_sent().into());
        }
        let request = Cow::Borrowed(request);
        Pending::send(self, connection, request, asking, by)?.finish(by)
    }

    /// Sends a request on an idle connection, or not at all. Never waits. The server does nothing after `not_after`.
    pub(super) fn begin(
        self: &Arc<Self>,
        request: Command,
        not_after: Moment,
    ) -> Option<Pending<'static>> {
        let connection = self.pool.try_checkout(Lane::Other)?;
        Pending::send(self, connection, Cow::Owned(request), false, not_after).ok()
    }

    /// Has the next call look at the slots, if another node may serve them by now.
    fn noted(&self, failure: Failure) -> Failure {
        let kind = failure.error.kind();
        if matches!(kind, ErrorKind::Unreachable | ErrorKind::Timeout)
            || matches!(failure.reason, Reason::ReadOnly | Reason::NotServing)
        {
            let settings = &self.pool.connector().settings;
            settings.map_stale.store(true, Ordering::Relaxed);
        }
        failure
    }

    /// Returns `true` if sentinels say which server this is.
    fn is_watched(&self) -> bool {
        matches!(self.pool.connector().target, Target::Master(_))
    }

    /// Returns the server's clock at `at`, in milliseconds; 0 while it is not known.
    fn server_ms(&self, at: Moment) -> i64 {
        match self.skew.load(Ordering::Relaxed) {
            0 => 0,
            skew => local_ms(at).saturating_add(skew),
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
}

impl Drop for Server {
    fn drop(&mut self) {
        self.subscriber.close();
    }
}

impl<'a> Pending<'a> {
    fn send(
        server: &Arc<Server>,
        connection: Checkout<Arc<Opener>>,
        request: Cow<'a, Command>,
        asking: bool,
        by: Moment,
    ) -> Result<Pending<'a>, Failure> {
        let mut pending = Pending {
            server: Arc::clone(server),
            connection,
            request,
            asking,
            sent: Moment::now(),
        };
        let written = pending.write(false, by);
        written.map_err(|error| pending.failed(&error))?;
        Ok(pending)
    }

    /// Reads the reply before `by`.
    pub(super) fn finish(mut self, by: Moment) -> Result<Answer, Failure> {
        self.read(by).map_err(|error| self.failed(&error))
    }

    fn write(&mut self, as_text: bool, by: Moment) -> RedisResult<()> {
        if self.asking {
            self.connection.ask(&cmd("ASKING"), by)?;
        }
        let not_after = self.server.server_ms(by);
        let request = self.request.packed(as_text, not_after);
        self.connection.send(&request)
    }

    fn read(&mut self, by: Moment) -> RedisResult<Answer> {
        let mut reply = self.connection.receive(by);
        if matches!(&reply, Err(error) if error.kind() == UNKNOWN_SCRIPT) {
            self.write(true, by)?;
            reply = self.connection.receive(by);
        }
        let value = reply?;
        self.server.learn(&value, self.sent);
        let is_grant =
            matches!(&value, Value::Array(fields) if matches!(fields[..], [Value::Int(1..), ..]));
        let mut replicas = None;
        if self.request.replicas > 0 && is_grant {
            // The server counts the writes of this connection. A release may have to follow.
            let wait = (by.remaining() / 2).as_millis().max(1) as u64;
            let question = cmd("WAIT").arg(self.request.replicas).arg(wait).to_owned();
            // Without an answer it is given back: a failover could lose it.
            let count = self.connection.ask(&question, by).ok();
            replicas = Some(count.map_or(Ok(0), read::<i64>).unwrap_or(0));
        }
        Ok(Answer {
            value,
            replicas,
            doubt: None,
        })
    }

    /// Reads an error, and does what it means for the connections.
    fn failed(&mut self, error: &RedisError) -> Failure {
        let (server, waited) = (&self.server, Moment::now() - self.sent);
        let failure = Failure::new(error, &self.connection.address, waited);
        let is_timeout = failure.error.kind() == ErrorKind::Timeout;
        let is_silent = is_timeout && server.is_watched() && waited >= SILENT;
        // The next connection asks the sentinels, or leads to another server of that name.
        let is_replaced = is_silent || matches!(failure.reason, Reason::ReadOnly);
        let is_gone = is_replaced || matches!(failure.reason, Reason::Closed);
        if is_replaced {
            server.subscriber.reconnect();
        }
        if is_gone {
            // The idle ones are as it is, more often than not.
            server.pool.discard_idle(self.sent);
        }
        if is_gone || is_timeout {
            server.pool.lost(&failure.error);
        }
        // The next connection logs in anew, or is another server's.
        let is_refused = matches!(failure.reason, Reason::Other) && !failure.error.is_transient();
        if is_gone || is_refused {
            self.connection.broken = true;
        }
        server.noted(failure)
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
        let cluster = match self {
            Deployment::One(_) => None,
            Deployment::Cluster(cluster) => Some(&**cluster),
        };
        let server = self.server(request.slot, by)?;
        server.ask(cluster, lane, by, request)
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
        for server in &servers {
            if server.subscriber.close() {
                // Otherwise the reader ends at its next heartbeat. The reply is of no interest.
                drop(server.begin(server.subscriber.wake.clone(), Moment::now()));
            }
        }
        let deadline = Moment::now() + FAREWELL;
        for server in servers {
            server.subscriber.join(deadline);
        }
    }
}

fn local_ms(at: Moment) -> i64 {
    i64::try_from(at.since_origin().as_millis()).unwrap_or(i64::MAX)
}
