//! The connections for commands to one server.
//!
//! A pool of our own, because of what the contract asks for: whoever waits for a connection hears at
//! once, and by its kind, why there is none; acquisitions cannot use up what renewals need; and the
//! thread that opens connections is joined when the pool goes.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use ::redis::{ProtocolVersion, RedisError, Value};
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::link::{Address, Connector, Link, late};
use super::script::{Call, command};
use super::trouble::{is_moved, trouble};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::fork::Origin;

/// A connection that was idle for longer is not trusted: servers, firewalls and address translators
/// drop idle connections in silence, and a new one costs less than a failed request.
const IDLE: Duration = Duration::from_secs(30);

/// Pauses between failed attempts to connect.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));

/// How long an errand may keep the thread that others wait for to open a connection.
const ERRAND: Duration = Duration::from_millis(250);

/// Who asks for a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lane {
    /// An owner, who has something to lose: may use every connection.
    Owner,
    /// Everybody else: leaves some for owners.
    Other,
}

/// Why a call failed.
pub(super) enum Failure {
    /// The mutex lives on another node now, and nothing was done here.
    Moved,
    Other(Error),
}

#[derive(Debug)]
pub(super) struct Pool {
    shared: Arc<Shared>,
    opener: Option<JoinHandle<()>>,
    origin: Origin,
}

struct Shared {
    state: Mutex<State>,
    /// A connection came back, or there was an answer to the question whether there will be one.
    ready: Condvar,
    /// The same, for owners.
    ready_owner: Condvar,
    /// The opener has something to do.
    work: Condvar,
    connector: Arc<Connector>,
    address: Address,
    /// The most connections at a time, and how many of them are for owners only.
    size: usize,
    kept: usize,
    /// The command that wakes the subscriber.
    poke: Vec<u8>,
}

#[derive(Default)]
struct State {
    idle: Vec<Link>,
    /// Idle and lent.
    open: usize,
    lent: usize,
    waiting: usize,
    waiting_owners: usize,
    /// How often opening failed so far, and how the last time.
    failures: u64,
    failure: Option<Error>,
    /// Somebody wants the subscriber woken, and cannot wait for it.
    poke: bool,
    closed: bool,
}

impl Pool {
    /// Starts to open a first connection at once, so that the first call finds one.
    pub(super) fn new(
        connector: &Arc<Connector>,
        address: &Address,
        size: usize,
        control: &str,
    ) -> Result<Pool> {
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            ready: Condvar::new(),
            ready_owner: Condvar::new(),
            work: Condvar::new(),
            connector: Arc::clone(connector),
            address: address.clone(),
            size: size.max(1),
            kept: size / 4,
            poke: command(&[b"PUBLISH", control.as_bytes(), b""]),
        });
        let opener = {
            let shared = Arc::clone(&shared);
            spawn("contend-redis-open", move || shared.open_on_demand())?
        };
        Ok(Pool {
            shared,
            opener: Some(opener),
            origin: Origin::here(),
        })
    }

    /// Runs a script.
    pub(super) fn call(
        &self,
        call: &Call,
        lane: Lane,
        by: Moment,
    ) -> std::result::Result<Value, Failure> {
        let mut lent = self.checkout(lane, by).map_err(Failure::Other)?;
        let reply = match lent.request(call.by_hash(), by) {
            Err(error) if is_unknown_script(&error) => lent.request(&call.by_text(), by),
            reply => reply,
        };
        reply.map_err(|error| {
            if is_moved(&error) {
                return Failure::Moved;
            }
            lent.discard(&error);
            Failure::Other(trouble(error, &self.shared.address.to_string()))
        })
    }

    /// Wakes the subscriber: it has something to send.
    pub(super) fn poke(&self, by: Moment) -> Result<()> {
        let mut lent = self.checkout(Lane::Other, by)?;
        lent.request(&self.shared.poke, by).map_err(|error| {
            lent.discard(&error);
            trouble(error, &self.shared.address.to_string())
        })?;
        Ok(())
    }

    /// As [`Pool::poke`], soon, for one who must not wait.
    pub(super) fn poke_soon(&self) {
        self.shared.state.lock().poke = true;
        self.shared.work.notify_one();
    }

    fn checkout(&self, lane: Lane, by: Moment) -> Result<Lent<'_>> {
        self.origin.check()?;
        let link = self.shared.checkout(lane, by)?;
        Ok(Lent {
            shared: &self.shared,
            link: Some(link),
        })
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if !self.origin.is_here() {
            return;
        }
        self.shared.state.lock().closed = true;
        self.shared.work.notify_one();
        if let Some(opener) = self.opener.take() {
            let _ = opener.join();
        }
    }
}

impl Shared {
    fn checkout(&self, lane: Lane, by: Moment) -> Result<Link> {
        let mut state = self.state.lock();
        let seen = state.failures;
        loop {
            if state.closed {
                return Err(Error::new(ErrorKind::Closed, "the factory was closed"));
            }
            if lane == Lane::Owner || state.lent < self.size - self.kept {
                while let Some(link) = state.idle.pop() {
                    if Moment::now() - link.idle_since < IDLE {
                        state.lent += 1;
                        return Ok(link);
                    }
                    state.open -= 1;
                }
            }
            if state.failures != seen
                && let Some(failure) = &state.failure
            {
                return Err(failure.clone());
            }
            let left = by.remaining();
            if left.is_zero() {
                return Err(late("getting a connection", &self.address));
            }
            self.wait(&mut state, lane, left);
        }
    }

    fn wait(&self, state: &mut MutexGuard<'_, State>, lane: Lane, left: Duration) {
        match lane {
            Lane::Owner => state.waiting_owners += 1,
            Lane::Other => state.waiting += 1,
        }
        if self.wants_more(state) {
            self.work.notify_one();
        }
        match lane {
            Lane::Owner => {
                self.ready_owner.wait_for(state, left);
                state.waiting_owners -= 1;
            }
            Lane::Other => {
                self.ready.wait_for(state, left);
                state.waiting -= 1;
            }
        }
    }

    /// Whether a further connection would serve somebody now.
    fn wants_more(&self, state: &State) -> bool {
        let others = state
            .waiting
            .min((self.size - self.kept).saturating_sub(state.lent));
        let wanted = state.waiting_owners + others + usize::from(state.poke);
        state.open < self.size && wanted > state.idle.len()
    }

    /// Lets one in who may use the connection that was just given back or opened.
    fn let_in(&self, state: &State) {
        if state.waiting_owners > 0 {
            self.ready_owner.notify_one();
        } else if state.waiting > 0 && state.lent < self.size - self.kept {
            self.ready.notify_one();
        }
    }

    fn open_on_demand(&self) {
        let mut pause = BACKOFF.0;
        // One connection is opened before anybody asks, so that the first call finds it.
        let mut ahead = true;
        let mut looked = false;
        loop {
            let mut state = self.state.lock();
            let errand = |state: &State| state.poke && !state.idle.is_empty();
            while !state.closed && !errand(&state) && !ahead && !self.wants_more(&state) {
                self.work.wait(&mut state);
            }
            if state.closed {
                // Connections that are lent are closed when they come back.
                state.idle.clear();
                return;
            }
            if state.poke
                && let Some(link) = state.idle.pop()
            {
                state.poke = false;
                state.lent += 1;
                drop(state);
                self.run_errand(link);
                continue;
            }
            drop(state);
            ahead = false;
            let mut opened = self
                .connector
                .open(&self.address, ProtocolVersion::RESP2)
                .map(|connection| Link::new(connection, self.connector.timeout));
            if let Ok(link) = &mut opened
                && !looked
            {
                looked = true;
                if let Err(error) = self.look_at_policy(link) {
                    opened = Err(trouble(error, &self.address.to_string()));
                }
            }
            let mut state = self.state.lock();
            match opened {
                Ok(link) => {
                    state.idle.push(link);
                    state.open += 1;
                    pause = BACKOFF.0;
                    self.let_in(&state);
                }
                Err(error) => {
                    state.failures += 1;
                    state.failure = Some(error);
                    self.ready.notify_all();
                    self.ready_owner.notify_all();
                    let until = Moment::now() + pause;
                    while !state.closed && !until.remaining().is_zero() {
                        self.work.wait_for(&mut state, until.remaining());
                    }
                    pause = (pause * 2).min(BACKOFF.1);
                }
            }
        }
    }

    fn run_errand(&self, link: Link) {
        let mut lent = Lent {
            shared: self,
            link: Some(link),
        };
        if let Err(error) = lent.request(&self.poke, Moment::now() + ERRAND) {
            // The subscriber's heartbeat does the same a little later.
            lent.discard(&error);
        }
    }

    /// Warns of a server that may throw a lease away while it runs. An error: the connection is bad.
    fn look_at_policy(&self, link: &mut Link) -> std::result::Result<(), RedisError> {
        let by = Moment::now() + self.connector.timeout;
        let info = link.request(&command(&[b"INFO", b"memory"]), by)?;
        // Where an ACL denies it, we cannot know.
        if let Value::BulkString(info) = info {
            let info = String::from_utf8_lossy(&info);
            let policy = info
                .lines()
                .find_map(|line| line.strip_prefix("maxmemory_policy:"))
                .unwrap_or("noeviction");
            if policy != "noeviction" {
                log::warn!(
                    "redis at {} may evict locks: its maxmemory-policy is {policy}, and should be noeviction",
                    self.address
                );
            }
        }
        Ok(())
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.address)
    }
}

/// A connection in use.
struct Lent<'a> {
    shared: &'a Shared,
    link: Option<Link>,
}

impl Lent<'_> {
    /// An error of the server comes back as an error, too.
    fn request(&mut self, command: &[u8], by: Moment) -> std::result::Result<Value, RedisError> {
        let Some(link) = &mut self.link else {
            return Err(std::io::Error::from(std::io::ErrorKind::NotConnected).into());
        };
        match link.request(command, by)? {
            Value::ServerError(error) => Err(error.into()),
            value => Ok(value),
        }
    }

    /// Throws the connection away: its outcome is unknown, or the server refuses us on it. Where the
    /// connection itself broke, the idle ones broke with it more often than not.
    fn discard(&mut self, error: &RedisError) {
        self.link = None;
        let mut state = self.shared.state.lock();
        state.open -= 1;
        if error.is_io_error() {
            state.open -= state.idle.len();
            state.idle.clear();
        }
    }
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        state.lent -= 1;
        if let Some(mut link) = self.link.take() {
            if state.closed {
                state.open -= 1;
            } else {
                link.idle_since = Moment::now();
                state.idle.push(link);
            }
        }
        if state.poke || self.shared.wants_more(&state) {
            self.shared.work.notify_one();
        }
        self.shared.let_in(&state);
    }
}

fn is_unknown_script(error: &RedisError) -> bool {
    error.kind() == ::redis::ErrorKind::Server(::redis::ServerErrorKind::NoScript)
}

/// Starts a thread, or says that there are too many.
pub(super) fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    std::thread::Builder::new()
        .name(name.to_owned())
        .spawn(body)
        .map_err(|error| {
            Error::new(
                ErrorKind::Unavailable,
                format!("cannot start a thread for redis: {error}"),
            )
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rule 12: the threads of the parent do not exist in a child, so joining one would never end.
    #[test]
    fn a_child_process_is_refused_and_waits_for_nobody() {
        let connector = Arc::new(Connector {
            settings: ::redis::RedisConnectionInfo::default(),
            tls: false,
            timeout: Duration::from_secs(1),
        });
        let address = Address {
            host: "127.0.0.1".into(),
            port: 1,
        };
        let mut pool = Pool::new(&connector, &address, 1, "control").unwrap();
        pool.origin = Origin::elsewhere();
        let error = pool.poke(Moment::now()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Forked);
        // As if another thread had held it at the moment of the fork.
        let shared = Arc::clone(&pool.shared);
        let _held = shared.state.lock();
        drop(pool);
    }
}
