//! `Session`: a synchronous client of one ZooKeeper session, as its callers see it; and `Sessions`: one, and
//! the next when that is over.
//!
//! Callers write their requests themselves and wait for the answers, each up to its own deadline; one
//! thread reads, beats and reconnects (`connection.rs`). The session survives every loss of a
//! connection: it is resumed with its id and password, on whichever server answers, with its watches
//! and its authentication. Only a server can say that it has expired; then it is over for good. A panic
//! in the thread counts as that.

use std::collections::HashMap;
use std::fmt;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::{Condvar, MappedMutexGuard, Mutex, MutexGuard};

use super::builder::Config;
use super::connection::{self, Writer};
use super::message::{Code, Outcome, Reply, Request, found};
use super::path::Line;
use super::protocol::{Ask, Caller, Protocol, SessionState};
use super::watches::Watch;
use crate::backend::Wakeups;
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::lease::Lease;
use crate::owner::MutexOwner;
use crate::parker::{SLICE, Unparker};
use crate::thread::{self, Thread};

/// How long a session that ends waits for the server's goodbye, and then for its thread.
const GOODBYE: Duration = Duration::from_millis(500);

/// A session with a ZooKeeper ensemble: the client on which the mutexes are built.
///
/// Every call takes the moment by which it must be over; an error of the kind `Timeout` or `Unreachable` leaves the
/// outcome unknown. Dropping the session closes it.
pub struct Session {
    shared: Arc<Shared>,
    thread: Thread,
}

/// What the contenders of one factory share: a session, and another one when that is over.
#[derive(Debug)]
pub(super) struct Sessions {
    pub(super) config: Arc<Config>,
    current: Mutex<Arc<Session>>,
}

impl Sessions {
    pub(super) fn open(config: Config) -> Result<Sessions> {
        let config = Arc::new(config);
        let session = Arc::new(Session::open(&config, connection::run)?);
        let current = Mutex::new(session);
        Ok(Sessions { config, current })
    }

    /// The session; a new one if the last has expired.
    pub(super) fn session(&self) -> Result<Arc<Session>> {
        let mut current = self.current.lock();
        if current.state() == SessionState::Expired {
            let session = Arc::new(Session::open(&self.config, connection::run)?);
            let expired = mem::replace(&mut *current, Arc::clone(&session));
            // Closing joins a thread: not while every contender waits for this lock.
            drop(current);
            drop(expired);
            return Ok(session);
        }
        Ok(Arc::clone(&current))
    }

    /// Why no server can be used, if every address was tried in vain; or whether one has served this session.
    pub(super) fn wakeups(&self) -> Wakeups {
        let session = Arc::clone(&self.current.lock());
        let state = session.shared.state.lock();
        match &state.trouble {
            Some(trouble) => Wakeups::Polling(trouble.to_string().into()),
            None if state.protocol.connections_served > 0 => Wakeups::Working,
            None => Wakeups::Untried,
        }
    }
}

/// What the session's thread and its callers share.
pub(super) struct Shared {
    pub(super) config: Arc<Config>,
    pub(super) state: Mutex<State>,
    /// The session's state has changed, or the trouble, or the owner ends the session.
    pub(super) changed: Condvar,
}

pub(super) struct State {
    pub(super) protocol: Protocol<Ticket>,
    pub(super) writer: Option<Writer>,
    /// Why no server serves the session, once every address has been tried in vain.
    pub(super) trouble: Option<Error>,
    /// Unparked when the session serves again, or is over.
    told_unknown: HashMap<usize, Weak<Unparker>>,
    /// An epoch time of the leader's clock, and when it was asked for. This machine's clock until the leader has told.
    servers_clock: (u64, Moment),
}

impl State {
    /// Sends what the protocol has to say.
    pub(super) fn send(&mut self) {
        let bytes = self.protocol.take_output();
        if let Some(writer) = &mut self.writer
            && let Err(error) = writer.send(&bytes)
        {
            let what = format!("cannot write to the server: {error}");
            self.disconnect(&Error::new(ErrorKind::Unreachable, what));
        }
    }

    /// Closes the socket, too: the thread may be in a read that nothing else would end.
    pub(super) fn disconnect(&mut self, why: &Error) {
        if let Some(writer) = self.writer.take() {
            writer.close();
        }
        self.protocol.disconnected(why);
    }

    pub(super) fn end(&mut self, how: SessionState) {
        self.protocol.end(how);
        self.disconnect(&self.protocol.over_error());
        self.wake();
    }

    /// Wakes those that were told "unknown": there is more to say now.
    pub(super) fn wake(&mut self) {
        for wake in mem::take(&mut self.told_unknown).into_values() {
            if let Some(wake) = wake.upgrade() {
                wake.unpark();
            }
        }
    }
}

/// Requests that were asked in one go, for the caller that waits for the answers.
///
/// A call that is dropped without them has given up: no answer is wanted any more, nor the contender's node that a
/// request makes.
pub(super) struct Call {
    shared: Arc<Shared>,
    progress: Arc<Progress>,
    /// The caller has its answers.
    done: bool,
    pub(super) sent: Moment,
}

/// How far a call of so many requests has come. Dropped with the call; that is how its tickets know that it has given
/// up. A channel would do, but its receivers spin before they sleep.
#[derive(Default)]
struct Progress {
    requests: usize,
    /// Each with the place of its request.
    answers: Mutex<Vec<(usize, Result<Outcome>)>>,
    complete: Condvar,
}

/// One request of a call.
pub(super) struct Ticket {
    call: Weak<Progress>,
    place: usize,
}

impl Caller for Ticket {
    fn waits(&self) -> bool {
        self.call.strong_count() > 0
    }

    fn answer(&self, answer: Result<Outcome>) {
        let Some(call) = self.call.upgrade() else {
            return;
        };
        let mut answers = call.answers.lock();
        answers.push((self.place, answer));
        if answers.len() == call.requests {
            call.complete.notify_all();
        }
    }
}

impl Call {
    pub(super) fn is_of(&self, session: &Session) -> bool {
        Arc::ptr_eq(&self.shared, &session.shared)
    }

    /// All answers, in the order of the requests. `None`: they are not there in time, and may be waited for again.
    pub(super) fn wait(&mut self, by: Moment) -> Result<Option<Vec<Outcome>>> {
        let mut answers = self.progress.answers.lock();
        while answers.len() < self.progress.requests {
            let left = by.remaining();
            if left.is_zero() {
                return Ok(None);
            }
            let complete = &self.progress.complete;
            complete.wait_for(&mut answers, left.min(SLICE));
        }
        // Callers that share a list may get it before an earlier answer.
        answers.sort_by_key(|(place, _)| *place);
        // Where one failed, the others go with the call.
        let outcomes = answers.iter().map(|(_, answer)| answer.clone());
        let outcomes = outcomes.collect::<Result<_>>()?;
        self.done = true;
        Ok(Some(outcomes))
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        if self.done {
            return;
        }
        // Answers come in under this lock, and the protocol sees under it that the call waits no more.
        let mut state = self.shared.state.lock();
        let progress = mem::take(&mut self.progress);
        for (_, answer) in progress.answers.lock().drain(..) {
            if let Ok(Ok(reply)) = answer {
                state.protocol.discard(&reply.path);
            }
        }
        drop(progress);
        state.send();
    }
}

/// A node that leads.
#[derive(Debug)]
pub(super) struct Leader {
    path: String,
    /// Its data; `NO_AUTH` if its ACL forbids to read it.
    read: Outcome,
}

impl Leader {
    /// `read`: the outcome of reading the node's data. `None`: it is gone.
    pub(super) fn new(path: String, read: Outcome) -> Result<Option<Leader>> {
        match read {
            Err(Code::NO_NODE) => Ok(None),
            Ok(_) | Err(Code::NO_AUTH) => Ok(Some(Leader { path, read })),
            Err(code) => Err(code.error(&path)),
        }
    }
}

impl Session {
    /// `run`: what the thread does, but for tests [`connection::run`].
    pub(super) fn open(
        config: &Arc<Config>,
        run: impl FnOnce(&Shared) + Send + 'static,
    ) -> Result<Session> {
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH);
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                protocol: Protocol::new(Arc::clone(config)),
                writer: None,
                trouble: None,
                told_unknown: HashMap::new(),
                servers_clock: (ms(since_epoch.unwrap_or_default()), Moment::now()),
            }),
            changed: Condvar::new(),
            config: Arc::clone(config),
        });
        let thread = thread::start("contend-zk", {
            let shared = Arc::clone(&shared);
            move || {
                let end = match catch_unwind(AssertUnwindSafe(|| run(&shared))) {
                    Ok(()) => SessionState::Closed,
                    // There is no goodbye: the nodes stay until the server ends the session, so that owners have the
                    // time to wind down in.
                    Err(_) => {
                        let realm = &shared.config.realm;
                        log::error!("{realm}: the thread of the session panicked; opening another");
                        SessionState::Expired
                    }
                };
                shared.state.lock().end(end);
                shared.changed.notify_all();
            }
        })?;
        Ok(Session { shared, thread })
    }

    /// Returns how the session stands.
    #[must_use]
    pub fn state(&self) -> SessionState {
        self.protocol().state()
    }

    /// Returns the moment up to which the ensemble keeps the session, by the heartbeats that it
    /// acknowledged and less what clocks may drift. `None` before a server has answered, and once the
    /// session is over.
    #[must_use]
    pub fn alive_until(&self) -> Option<Moment> {
        self.protocol().alive_until()
    }

    /// Asks the server one thing: what it answered, or its code.
    ///
    /// # Errors
    /// What the network can do.
    pub fn ask(&self, ask: impl Into<Ask>, by: Moment) -> Result<Outcome> {
        let [outcome] = self.call([ask.into()], by)?;
        Ok(outcome)
    }

    /// Asks in one go and waits for all the answers: one round trip. The server works on the requests in
    /// this order, so a later one sees what an earlier one did.
    pub(super) fn call_all(&self, asks: Vec<Ask>, by: Moment) -> Result<Vec<Outcome>> {
        self.start(asks, by)?.wait(by)?.ok_or_else(|| self.late())
    }

    /// The same, of so many requests.
    pub(super) fn call<const N: usize>(&self, asks: [Ask; N], by: Moment) -> Result<[Outcome; N]> {
        let outcomes = self.call_all(asks.into(), by)?;
        outcomes.try_into().map_err(|_| self.late())
    }

    /// Asks in one go, once a server is there.
    pub(super) fn start(&self, asks: Vec<Ask>, by: Moment) -> Result<Call> {
        let mut state = self.connected(by).map_err(Error::not_sent)?;
        let call = Call {
            shared: Arc::clone(&self.shared),
            progress: Arc::new(Progress {
                requests: asks.len(),
                ..Progress::default()
            }),
            done: false,
            sent: Moment::now(),
        };
        for (place, ask) in asks.into_iter().enumerate() {
            let call = Arc::downgrade(&call.progress);
            state.protocol.ask(ask, Ticket { call, place });
        }
        state.send();
        Ok(call)
    }

    pub(super) fn late(&self) -> Error {
        self.timeout("the server did not answer in time")
    }

    /// Asks one thing about a node. `None` if it is not there.
    pub(super) fn find(&self, ask: impl Into<Ask>, by: Moment) -> Result<Option<Reply>> {
        let ask = ask.into();
        let path = ask.path().to_owned();
        found(self.ask(ask, by)?, &path)
    }

    /// Reads the contenders for a mutex. The line is empty if not even the mutex is there.
    pub(super) fn line(&self, mutex_path: &str, by: Moment) -> Result<Arc<Line>> {
        let read = self.find(Request::Children(mutex_path.to_owned()), by)?;
        Ok(read.unwrap_or_default().line)
    }

    /// Reads a node that leads, and sets `watch` on it. `None` if it is gone.
    pub(super) fn read(
        &self,
        path: String,
        watch: Option<&Arc<Watch>>,
        by: Moment,
    ) -> Result<Option<Leader>> {
        let read = Ask::new(Request::Data(path.clone()), watch);
        Leader::new(path, self.ask(read, by)?)
    }

    /// Reads who leads now, and sets `watch` on that node.
    pub(super) fn leader(
        &self,
        mutex_path: &str,
        watch: Option<&Arc<Watch>>,
        by: Moment,
    ) -> Result<Option<Leader>> {
        loop {
            let line = self.line(mutex_path, by)?;
            let Some(first) = line.members.first() else {
                return Ok(None);
            };
            // Gone between the two reads otherwise. Each round asks the server, which ends with `by`.
            let leader = self.read(format!("{mutex_path}/{first}"), watch, by)?;
            if leader.is_some() {
                return Ok(leader);
            }
        }
    }

    /// Reads the path of the node that leads, if it has this fence.
    pub(super) fn leader_with(
        &self,
        mutex_path: &str,
        fence: u64,
        by: Moment,
    ) -> Result<Option<String>> {
        let leader = self.leader(mutex_path, None, by)?;
        let has_fence = |read: Outcome| read.is_ok_and(|reply| reply.stat.czxid == fence);
        Ok(leader.and_then(|Leader { path, read }| has_fence(read).then_some(path)))
    }

    /// The protocol, for what needs no answer.
    pub(super) fn protocol(&self) -> MappedMutexGuard<'_, Protocol<Ticket>> {
        MutexGuard::map(self.shared.state.lock(), |state| &mut state.protocol)
    }

    /// Deletes a node of this session, as soon as a server is there.
    pub(super) fn discard(&self, path: &str) {
        let mut state = self.shared.state.lock();
        state.protocol.discard(path);
        state.send();
    }

    /// Unparks `wake` when the session serves again, or is over: for a caller that was told "unknown".
    pub(super) fn wake_when_serving(&self, wake: &Arc<Unparker>) {
        let weak = Arc::downgrade(wake);
        let key = weak.as_ptr() as usize;
        self.shared.state.lock().told_unknown.insert(key, weak);
    }

    /// The leader told its time: `ms` in a reply to what was sent at `sent`.
    pub(super) fn learn_clock(&self, ms: u64, sent: Moment) {
        self.shared.state.lock().servers_clock = (ms, sent);
    }

    /// The time by the leader's clock, in epoch milliseconds.
    pub(super) fn servers_ms(&self) -> u64 {
        let (told, sent) = self.shared.state.lock().servers_clock;
        told.saturating_add(ms(Moment::now() - sent))
    }

    /// A leader of another contender, for display: how long it goes on is not known. An error if it may not be read.
    pub(super) fn owner_of(&self, leader: Option<Leader>, lease: Lease) -> Result<MutexOwner> {
        let Some(Leader { path, read }) = leader else {
            return Ok(MutexOwner::NONE);
        };
        let Reply { data, stat, .. } = read.map_err(|code| code.error(&path))?;
        let id = String::from_utf8_lossy(&data).into();
        let left = (lease.ttl(), lease.total());
        Ok(self.owner(id, stat.ctime, stat.czxid, left))
    }

    /// A snapshot for display. `ttl` and `total` are what is left, as far as one can know.
    pub(super) fn owner(
        &self,
        id: Arc<str>,
        acquired_at: u64,
        fence: u64,
        (ttl, total): (Duration, Duration),
    ) -> MutexOwner {
        let (now, now_ms) = (Moment::now(), self.servers_ms());
        let at = |left: Duration| now_ms.saturating_add(ms(left));
        MutexOwner::new(id, acquired_at, at(ttl), at(total), fence).observed_at(now_ms, now)
    }

    /// The state, once a server is there. Fails at once where every server has been tried in vain: a caller
    /// that tries again later is woken when there is one.
    pub(super) fn connected(&self, by: Moment) -> Result<MutexGuard<'_, State>> {
        let mut state = self.shared.state.lock();
        loop {
            if state.protocol.is_over() {
                return Err(state.protocol.over_error());
            }
            if state.protocol.is_serving() {
                return Ok(state);
            }
            // Before the time is looked at: it says more than that the time is over.
            if let Some(trouble) = &state.trouble {
                return Err(trouble.clone());
            }
            let left = by.remaining();
            if left.is_zero() {
                let what = "no server was there in time; if one is, the server hangs, or is not a ZooKeeper server";
                return Err(self.timeout(what));
            }
            self.shared.changed.wait_for(&mut state, left.min(SLICE));
        }
    }

    fn timeout(&self, what: &str) -> Error {
        let realm = &self.shared.config.realm;
        Error::new(ErrorKind::Timeout, format!("{realm}: {what}"))
    }
}

fn ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

impl Drop for Session {
    /// Ends the session, and with it its nodes. Waits for the server's answer, but not long for a dead one: by then this
    /// client does not keep the session alive any more.
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        let said = state.protocol.say_goodbye();
        state.send();
        state.protocol.end(SessionState::Closed);
        drop(state);
        self.shared.changed.notify_all();
        // A server that has ended the session ends the connection, and the thread is over.
        if !said || !self.thread.join(Moment::now() + GOODBYE) {
            self.shared.state.lock().end(SessionState::Closed);
            // A thread that still waits for a server to accept a connection ends when that does.
            self.thread.join(Moment::now() + GOODBYE);
        }
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a session with {}", self.shared.config.realm)
    }
}

#[cfg(test)]
mod tests {
    use super::super::builder::Builder;
    use super::*;

    /// Owners must step down and callers be told: no other thread would ever answer them.
    #[test]
    fn panic_in_the_thread_ends_the_session() {
        let config = Arc::new(Builder::new("127.0.0.1:1").config().unwrap());
        let broken = Session::open(&config, |shared| {
            let _state = shared.state.lock();
            panic!("on request");
        });
        let broken = Arc::new(broken.unwrap());
        let by = Moment::now() + Duration::from_secs(40);
        let error = broken.ask(Request::Sync, by).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
        assert_eq!(broken.state(), SessionState::Expired);
        let current = Mutex::new(Arc::clone(&broken));
        let sessions = Sessions { config, current };
        let next = sessions.session().unwrap();
        assert!(!Arc::ptr_eq(&next, &broken));
        assert_eq!(next.state(), SessionState::Connecting);
    }
}
