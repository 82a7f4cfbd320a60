//! The connections for commands to one server.
//!
//! A pool of our own, because of what the contract asks for: whoever waits for a connection hears at
//! once, and by its kind, why there is none; acquisitions cannot use up what renewals need; and the
//! thread that opens connections is joined when the pool goes.

use std::sync::Arc;
use std::sync::atomic::AtomicI64;
use std::thread::JoinHandle;
use std::time::Duration;

use ::redis::{ProtocolVersion, RedisError, Value};
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::lent::Lent;
use super::link::{Address, Connector, Link, late};
use super::script::{Call, command};
use super::trouble::trouble;
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::fork::Origin;

/// A connection that was idle for longer is not trusted: servers, firewalls and address translators
/// drop idle connections in silence, and a new one costs less than a failed request.
const IDLE: Duration = Duration::from_secs(30);

/// Pauses between failed attempts to connect.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));

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

/// What the pool, its thread and the connections that are lent share.
pub(super) struct Shared {
    pub(super) state: Mutex<State>,
    /// A connection came back, or there was an answer to the question whether there will be one.
    ready: Condvar,
    /// The same, for owners.
    ready_owner: Condvar,
    /// The opener has something to do.
    pub(super) work: Condvar,
    connector: Arc<Connector>,
    pub(super) address: Address,
    /// The most connections at a time, and how many of them are for owners only.
    size: usize,
    kept: usize,
    /// The command that wakes the subscriber.
    pub(super) poke: Vec<u8>,
    /// The server's clock less ours, in milliseconds; `i64::MIN` until a reply told.
    pub(super) skew: AtomicI64,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) idle: Vec<Link>,
    /// Idle and lent.
    pub(super) open: usize,
    pub(super) lent: usize,
    waiting: usize,
    waiting_owners: usize,
    /// How often opening failed so far, and how the last time.
    failures: u64,
    failure: Option<Error>,
    pub(super) closed: bool,
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
            skew: AtomicI64::new(i64::MIN),
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

    /// Runs a script; the reply is waited for until `by`, and the server is told so.
    pub(super) fn call(
        &self,
        call: &mut Call,
        lane: Lane,
        by: Moment,
    ) -> std::result::Result<Value, Failure> {
        let mut lent = self.checkout(lane, by).map_err(Failure::Other)?;
        lent.send(call, by, by)
            .map_err(|error| lent.failure(error))?;
        lent.receive(call, by)
    }

    /// Wakes the subscriber: it has something to send.
    pub(super) fn poke(&self, by: Moment) -> Result<()> {
        self.checkout(Lane::Other, by)?.poke(by)
    }

    /// A connection for one who does not wait for it: only if there is one to spare.
    pub(super) fn spare(&self) -> Spare {
        Spare {
            shared: Arc::clone(&self.shared),
            origin: self.origin,
        }
    }

    fn checkout(&self, lane: Lane, by: Moment) -> Result<Lent> {
        self.origin.check()?;
        let link = self.shared.checkout(lane, by)?;
        Ok(Lent::new(&self.shared, link, self.origin))
    }
}

/// The way to a connection for a thread that must not wait, and that may outlive the pool.
#[derive(Clone, Debug)]
pub(super) struct Spare {
    shared: Arc<Shared>,
    origin: Origin,
}

impl Spare {
    /// A connection that nobody waits for, if there is one.
    pub(super) fn take(&self) -> Option<Lent> {
        let mut state = self.shared.state.lock();
        if state.closed || state.waiting + state.waiting_owners > 0 {
            return None;
        }
        let link = self.shared.idle(&mut state, Lane::Other)?;
        drop(state);
        Some(Lent::new(&self.shared, link, self.origin))
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
            if let Some(link) = self.idle(&mut state, lane) {
                return Ok(link);
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

    /// An idle connection that may be used, if there is one.
    fn idle(&self, state: &mut State, lane: Lane) -> Option<Link> {
        if lane == Lane::Owner || state.lent < self.size - self.kept {
            while let Some(link) = state.idle.pop() {
                if Moment::now() - link.idle_since < IDLE {
                    state.lent += 1;
                    return Some(link);
                }
                state.open -= 1;
            }
        }
        None
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
    pub(super) fn wants_more(&self, state: &State) -> bool {
        let others = state
            .waiting
            .min((self.size - self.kept).saturating_sub(state.lent));
        state.open < self.size && state.waiting_owners + others > state.idle.len()
    }

    /// Lets one in who may use the connection that was just given back or opened.
    pub(super) fn let_in(&self, state: &State) {
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
            while !state.closed && !ahead && !self.wants_more(&state) {
                self.work.wait(&mut state);
            }
            if state.closed {
                // Connections that are lent are closed when they come back.
                state.idle.clear();
                return;
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

    /// Warns of a server that may throw a lease away while it runs. An error: the connection is bad.
    fn look_at_policy(&self, link: &mut Link) -> std::result::Result<(), RedisError> {
        let by = Moment::now() + self.connector.timeout;
        link.send(&command(&[b"INFO", b"memory"]), by)?;
        let info = link.receive(by)?;
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
