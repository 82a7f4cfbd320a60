//! `Session`: a synchronous client of one ZooKeeper session.
//!
//! One thread reads, beats and reconnects (`link.rs`); callers write their requests themselves and
//! wait for the answer, each up to its own deadline. It survives every loss of a connection: the
//! session is resumed with its id and password, on whichever server answers, with its watches and its
//! authentication. Only a server can say that it has expired; then it is over for good.

use std::fmt;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::ask::{Answers, Ask, unexpected};
use super::config::Config;
use super::link;
use super::message::{Code, Mode, Reply, Request, Stat};
use super::orphan::Orphan;
use super::pending::To;
use super::session_state::SessionState;
use super::slot::{Outcome, Slot};
use super::state::State;
use super::watches::{Alarm, Sentinel};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::fork::Origin;

/// How long a session that ends waits for the server's goodbye, and then for its thread.
const GOODBYE: Duration = Duration::from_secs(1);

/// A session with a ZooKeeper ensemble: the client on which the latch is built.
///
/// Paths are relative to the chroot. Every call takes the moment by which it must be over; an error of
/// the kind `Timeout` or `Unreachable` leaves the outcome unknown. Dropping the session closes it.
///
/// ```no_run
/// use contend::{Moment, zk};
/// use std::time::Duration;
///
/// let session = zk::Builder::new("127.0.0.1:2181").session()?;
/// let by = Moment::now() + Duration::from_secs(3);
/// session.create("/demo", b"hello", zk::Mode::Persistent, by)?;
/// assert_eq!(session.get_data("/demo", by)?.0, b"hello");
/// # Ok::<(), contend::Error>(())
/// ```
pub struct Session {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
    origin: Origin,
}

/// What the session's thread and its callers share.
pub(super) struct Shared {
    pub(super) config: Arc<Config>,
    pub(super) state: Mutex<State>,
    /// The phase has changed, or the trouble, or somebody wants to end.
    pub(super) changed: Condvar,
}

impl Session {
    pub(super) fn open(config: Arc<Config>) -> Result<Session> {
        let shared = Arc::new(Shared {
            state: Mutex::new(State::new(Arc::clone(&config))),
            changed: Condvar::new(),
            config,
        });
        let thread = std::thread::Builder::new()
            .name("contend-zk".to_owned())
            .stack_size(256 << 10)
            .spawn({
                let shared = Arc::clone(&shared);
                move || link::run(&shared)
            })
            .map_err(|error| {
                Error::new(
                    ErrorKind::Unavailable,
                    "cannot start a thread for the session",
                )
                .with_source(error)
            })?;
        Ok(Session {
            shared,
            thread: Mutex::new(Some(thread)),
            origin: Origin::here(),
        })
    }

    /// How the session stands.
    #[must_use]
    pub fn state(&self) -> SessionState {
        self.see(SessionState::Closed, |state| state.phase)
    }

    /// The session's number at the server; zero before a server has answered.
    #[must_use]
    pub fn id(&self) -> i64 {
        self.see(0, |state| state.id)
    }

    /// The session timeout: the negotiated one, once there is one.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        let asked_for = self.shared.config.session_timeout;
        self.see(asked_for, |state| state.pulse.timeout())
    }

    /// The moment before which the ensemble cannot have expired the session, whatever happens, on a
    /// clock that runs like the leader's. `None` before a server has answered.
    #[must_use]
    pub fn alive_until(&self) -> Option<Moment> {
        self.see(None, |state| {
            state.pulse.alive_until().filter(|_| !state.phase.is_over())
        })
    }

    /// Creates a node and returns its path, which ends in a number if `mode` is sequential.
    ///
    /// # Errors
    /// `Conflict` if it exists, `NotFound` if its parent does not, and what the network can do.
    pub fn create(
        &self,
        path: &str,
        data: &[u8],
        mode: Mode,
        by: Moment,
    ) -> Result<(String, Stat)> {
        let request = Request::Create {
            path: self.full(path),
            data: data.to_vec(),
            mode,
            acl: self.shared.config.acl,
        };
        match self.ask(request, by)? {
            Ok(Reply::Created(full, stat)) => {
                let path = full.strip_prefix(self.shared.config.chroot.as_str());
                Ok((path.unwrap_or(&full).to_owned(), stat))
            }
            Ok(_) => Err(unexpected()),
            Err(code) => Err(code.error(path)),
        }
    }

    /// Deletes a node.
    ///
    /// # Errors
    /// `NotFound` if it is not there, `Conflict` if it has children, and what the network can do.
    pub fn delete(&self, path: &str, by: Moment) -> Result<()> {
        let request = Request::Delete {
            path: self.full(path),
        };
        match self.ask(request, by)? {
            Ok(_) => Ok(()),
            Err(code) => Err(code.error(path)),
        }
    }

    /// What the server keeps about a node; `None` if it is not there.
    ///
    /// # Errors
    /// What the network can do.
    pub fn exists(&self, path: &str, by: Moment) -> Result<Option<Stat>> {
        let request = Request::Exists {
            path: self.full(path),
            watch: false,
        };
        match self.ask(request, by)? {
            Ok(Reply::Stat(stat)) => Ok(Some(stat)),
            Ok(_) => Err(unexpected()),
            Err(Code::NO_NODE) => Ok(None),
            Err(code) => Err(code.error(path)),
        }
    }

    /// The data of a node.
    ///
    /// # Errors
    /// `NotFound` if it is not there, and what the network can do.
    pub fn get_data(&self, path: &str, by: Moment) -> Result<(Vec<u8>, Stat)> {
        let request = Request::Data {
            path: self.full(path),
            watch: false,
        };
        match self.ask(request, by)? {
            Ok(Reply::Data(data, stat)) => Ok((data, stat)),
            Ok(_) => Err(unexpected()),
            Err(code) => Err(code.error(path)),
        }
    }

    /// The names of a node's children, in no particular order.
    ///
    /// # Errors
    /// `NotFound` if it is not there, and what the network can do.
    pub fn get_children(&self, path: &str, by: Moment) -> Result<Vec<String>> {
        let request = Request::Children {
            path: self.full(path),
            watch: false,
        };
        match self.ask(request, by)? {
            Ok(Reply::Children(names)) => Ok(names),
            Ok(_) => Err(unexpected()),
            Err(code) => Err(code.error(path)),
        }
    }

    /// Lets the server that we talk to catch up with the leader: what is read after it is not older.
    ///
    /// # Errors
    /// What the network can do.
    pub fn sync(&self, by: Moment) -> Result<()> {
        self.ask(Request::Sync, by)?
            .map(drop)
            .map_err(|code| code.error("/"))
    }

    /// Ends the session, and with it its nodes. Waits for the server's word, but not long for a dead
    /// one: by then nothing of ours keeps the session alive any more.
    pub fn close(&self) {
        if !self.origin.is_here() {
            // The thread is the parent's, and so is the connection: a word from here would end it.
            return;
        }
        let deadline = Moment::now() + GOODBYE;
        let goodbye = {
            let mut state = self.shared.state.lock();
            let slot = Arc::new(Slot::new(1));
            let first = !std::mem::replace(&mut state.closing, true);
            self.shared.changed.notify_all();
            let request = (Request::Close, None, To::Caller(Arc::clone(&slot), 0));
            (first && state.is_connected() && state.send([request]).is_ok()).then_some(slot)
        };
        if let Some(slot) = goodbye {
            let _ = slot.wait(deadline);
        }
        let mut state = self.shared.state.lock();
        if !state.phase.is_over() {
            state.end(SessionState::Closed);
        }
        self.shared.changed.notify_all();
        while !state.thread_over && !deadline.remaining().is_zero() {
            self.shared
                .changed
                .wait_for(&mut state, deadline.remaining());
        }
        let over = state.thread_over;
        drop(state);
        // A thread that still waits for a server to accept a connection ends when that does.
        if over && let Some(thread) = self.thread.lock().take() {
            let _ = thread.join();
        }
    }

    /// The path from the true root.
    pub(super) fn full(&self, path: &str) -> String {
        format!("{}{path}", self.shared.config.chroot)
    }

    fn ask(&self, request: Request, by: Moment) -> Result<Outcome> {
        self.call(vec![request.into()], by)?.next()
    }

    /// Sends requests together and waits for all the answers: one round trip. The server works on
    /// them in this order, so a later one sees what an earlier one did.
    pub(super) fn call(&self, asks: Vec<Ask>, by: Moment) -> Result<Answers> {
        self.origin.check()?;
        let slot = Arc::new(Slot::new(asks.len()));
        let mut state = self.shared.connected(by)?;
        let (epoch, sent) = (state.epoch, Moment::now());
        let requests = asks.into_iter().enumerate().map(|(index, ask)| {
            let to = To::Caller(Arc::clone(&slot), index);
            (ask.request, ask.lookout, to)
        });
        state.send(requests)?;
        drop(state);
        match slot.wait(by)? {
            Some(list) => Ok(Answers {
                epoch,
                sent,
                list: list.into_iter(),
            }),
            None => Err(self.shared.timeout("the server did not answer in time")),
        }
    }

    /// Looks out for the end of a node that we believe to exist, without waiting: the sentinel fires
    /// if it is gone by now, too.
    pub(super) fn look_out(&self, path: &str, sentinel: &Arc<Sentinel>) {
        let mut state = self.shared.state.lock();
        let Ask { request, lookout } = Ask::watch(path, sentinel);
        if state.is_connected() {
            // On failure the look-out is kept, and set with the others on the next connection.
            let _ = state.send([(request, lookout, To::Lookout)]);
        } else {
            lookout.into_iter().for_each(|lookout| state.keep(lookout));
        }
    }

    /// Deletes a node for which nobody waits, now or after the next reconnect.
    pub(super) fn abandon(&self, orphan: Orphan) {
        if self.origin.is_here() {
            self.shared.state.lock().sweep(orphan);
        }
    }

    /// The node goes at `end` unless its lease is renewed before.
    pub(super) fn begin_lease(&self, path: &str, end: Moment) {
        self.shared.state.lock().leases.insert(path.to_owned(), end);
    }

    /// `false`: the lease is over, and its node is gone or going.
    pub(super) fn renew_lease(&self, path: &str, end: Moment) -> bool {
        let mut state = self.shared.state.lock();
        let lease = state.leases.get_mut(path);
        lease.map(|known| *known = end.max(*known)).is_some()
    }

    pub(super) fn end_lease(&self, path: &str) {
        self.shared.state.lock().leases.remove(path);
    }

    /// Rings when there is something new to say to somebody who was told "unknown".
    pub(super) fn ring_later(&self, alarm: &Arc<Alarm>) {
        self.shared.state.lock().ring_later(alarm);
    }

    /// A look by somebody who may be in a child process, where the session is over and its lock may be
    /// one that the parent's thread held.
    fn see<T>(&self, in_a_child: T, look: impl FnOnce(&State) -> T) -> T {
        if self.origin.is_here() {
            self.look(look)
        } else {
            in_a_child
        }
    }

    /// A look under the lock, at several things at once.
    pub(super) fn look<T>(&self, look: impl FnOnce(&State) -> T) -> T {
        look(&self.shared.state.lock())
    }

    /// The leader told its time: `ms` in a reply to what was sent at `sent`.
    pub(super) fn learn_clock(&self, ms: i64, sent: Moment) {
        if let Ok(ms) = u64::try_from(ms) {
            self.shared.state.lock().leader_clock = Some((ms, sent));
        }
    }
}

#[cfg(test)]
impl Session {
    /// As if this were a child process; what the thread of the parent still works on.
    pub(super) fn seen_from_a_child(&mut self) -> Arc<Shared> {
        self.origin = Origin::elsewhere();
        Arc::clone(&self.shared)
    }
}

impl Shared {
    /// The state, once a server is there. Fails at once where every server has been tried in vain:
    /// who tries again later is rung when there is one.
    fn connected(&self, by: Moment) -> Result<parking_lot::MutexGuard<'_, State>> {
        let mut state = self.state.lock();
        loop {
            if state.phase.is_over() || state.closing {
                return Err(state.over_error());
            }
            let left = by.remaining();
            if left.is_zero() {
                return Err(self.timeout("no server was there in time"));
            }
            if state.is_connected() {
                return Ok(state);
            }
            if let Some(trouble) = &state.trouble {
                return Err(trouble.clone());
            }
            self.changed
                .wait_for(&mut state, left.min(Duration::from_secs(3600)));
        }
    }

    fn timeout(&self, what: &str) -> Error {
        Error::new(ErrorKind::Timeout, format!("{}: {what}", self.config.realm))
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.close();
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session")
            .field("realm", &self.shared.config.realm)
            .finish_non_exhaustive()
    }
}
