//! `Session`: a synchronous client of one ZooKeeper session, as its callers see it; and `Sessions`: one, and
//! the next when that is over.
//!
//! Callers write their requests themselves and wait for the answer, each up to its own deadline; one
//! thread reads, beats and reconnects (`connection.rs`). The session survives every loss of a
//! connection: it is resumed with its id and password, on whichever server answers, with its watches
//! and its authentication. Only a server can say that it has expired; then it is over for good. A panic
//! in the thread counts as that.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::{Condvar, Mutex};

use super::builder::Config;
use super::connection::{self, Wake, Writer};
use super::message::{Code, Mode, Outcome, Permissions, Reply, Request, Stat};
use super::path::Line;
use super::protocol::{Answer, Ask, Protocol, SessionState};
use crate::backend::Wakeups;
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::lease::Lease;
use crate::owner::MutexOwner;
use crate::parker::Unparker;
use crate::probe::Probed;
use crate::thread::{self, Thread};

/// How long a session that ends waits for the server's goodbye, and then for its thread.
const GOODBYE: Duration = Duration::from_millis(500);

/// How many mutexes a session remembers something about.
const KNOWN: usize = 1024;

/// A session with a ZooKeeper ensemble: the client on which the mutexes are built.
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
    thread: Mutex<Thread>,
}

/// What the contenders of one factory share: a session, and another one when that is over.
#[derive(Debug)]
pub(super) struct Sessions {
    pub(super) config: Arc<Config>,
    pub(super) probe: Probed,
    current: Mutex<Arc<Session>>,
}

impl Sessions {
    pub(super) fn open(config: Config) -> Result<Sessions> {
        let config = Arc::new(config);
        let probe = Probed::default();
        let session = Session::open(&config, probe.clone())?;
        Ok(Sessions {
            config,
            probe,
            current: Mutex::new(Arc::new(session)),
        })
    }

    /// The session; a new one if a server, or a panic in its thread, has ended the last.
    pub(super) fn session(&self) -> Result<Arc<Session>> {
        let mut current = self.current.lock();
        if current.state() == SessionState::Expired {
            let session = Arc::new(Session::open(&self.config, self.probe.clone())?);
            let expired = mem::replace(&mut *current, Arc::clone(&session));
            // Closing joins a thread: not while every contender waits for this lock.
            drop(current);
            drop(expired);
            return Ok(session);
        }
        Ok(Arc::clone(&current))
    }

    /// Why no server can be used, if every address was tried in vain; or whether one has served us.
    pub(super) fn wakeups(&self) -> Wakeups {
        let session = Arc::clone(&self.current.lock());
        let state = session.shared.state.lock();
        match &state.trouble {
            Some(trouble) => Wakeups::Polling(trouble.to_string().into()),
            None if state.protocol.epoch() > 0 => Wakeups::Working,
            None => Wakeups::Untried,
        }
    }
}

/// What the session's thread and its callers share.
pub(super) struct Shared {
    config: Arc<Config>,
    state: Mutex<State>,
    /// The phase has changed, or the trouble, or somebody wants to end.
    changed: Condvar,
    probe: Probed,
}

struct State {
    protocol: Protocol,
    writer: Option<Writer>,
    calls: HashMap<u64, Arc<Call>>,
    next_call: u64,
    /// Why nobody is connected, once every address has been tried in vain.
    trouble: Option<Error>,
    /// The owner wants to end: nothing may be started any more.
    closing: bool,
    /// Woken when there is something new to say to those who were told "unknown".
    waiting_for_news: HashMap<usize, Weak<Unparker>>,
    /// An epoch time of the leader's clock that we were told, and when we asked.
    leader_clock: Option<(u64, Moment)>,
    known: HashMap<Arc<str>, Known>,
}

/// What a session last saw of a mutex, for all its contenders.
#[derive(Clone, Debug)]
pub(super) enum Known {
    /// Nobody stood there, or only a contender of ours.
    Free,
    /// This node led.
    Led(Leader),
}

/// A node that leads.
#[derive(Clone, Debug)]
pub(super) struct Leader {
    pub(super) name: String,
    pub(super) id: Arc<str>,
    pub(super) stat: Stat,
    /// When it was last seen to be there.
    pub(super) seen: Moment,
}

impl Leader {
    /// `data`: of the node, which is the contender's id.
    pub(super) fn new(name: &str, data: &[u8], stat: Stat) -> Leader {
        Leader {
            name: name.to_owned(),
            id: String::from_utf8_lossy(data).as_ref().into(),
            stat,
            seen: Moment::now(),
        }
    }
}

/// What was asked in one go.
#[derive(Debug)]
pub(super) struct Call {
    number: u64,
    /// The connection over which it was asked.
    pub(super) epoch: u64,
    /// When it was asked.
    pub(super) sent: Moment,
    progress: Mutex<Progress>,
    changed: Condvar,
}

#[derive(Debug)]
struct Progress {
    answers: Vec<Option<Answer>>,
    missing: usize,
    failure: Option<Error>,
}

impl Call {
    fn new(number: u64, count: usize, epoch: u64, sent: Moment) -> Call {
        Call {
            number,
            epoch,
            sent,
            progress: Mutex::new(Progress {
                answers: vec![None; count],
                missing: count,
                failure: None,
            }),
            changed: Condvar::new(),
        }
    }

    /// Returns `true` if it was the last answer.
    fn answer(&self, index: usize, answer: Answer, why: Option<&Error>) -> bool {
        let mut progress = self.progress.lock();
        if matches!(answer, Answer::Lost { .. }) && progress.failure.is_none() {
            progress.failure = why.cloned();
        }
        if let Some(place @ None) = progress.answers.get_mut(index) {
            *place = Some(answer);
            progress.missing -= 1;
        }
        if progress.missing == 0 {
            self.changed.notify_all();
        }
        progress.missing == 0
    }

    /// What is known of the answer with this index.
    pub(super) fn answer_to(&self, index: usize) -> Option<Answer> {
        self.progress.lock().answers.get(index).cloned().flatten()
    }

    pub(super) fn is_due(&self) -> bool {
        self.progress.lock().missing > 0
    }

    /// All answers, in the order of the requests; `Ok(None)` if they are not there in time.
    fn wait(&self, by: Moment) -> Result<Option<Vec<Outcome>>> {
        let mut progress = self.progress.lock();
        while progress.missing > 0 {
            let left = by.remaining();
            if left.is_zero() {
                return Ok(None);
            }
            self.changed
                .wait_for(&mut progress, left.min(Duration::from_secs(3600)));
        }
        let mut replies = Vec::with_capacity(progress.answers.len());
        let (mut lost, mut handed) = (false, false);
        for answer in progress.answers.iter().flatten() {
            match answer {
                Answer::Replied(outcome) => {
                    handed = true;
                    replies.push(outcome.clone());
                }
                Answer::Lost { handed: this } => {
                    lost = true;
                    handed |= this;
                }
            }
        }
        if !lost {
            return Ok(Some(replies));
        }
        let failure = progress
            .failure
            .clone()
            .unwrap_or_else(|| Error::new(ErrorKind::Unreachable, "the connection was lost"));
        Err(if handed { failure } else { failure.not_sent() })
    }
}

/// The answers to a call.
pub(super) struct Answers {
    list: std::vec::IntoIter<Outcome>,
}

impl Answers {
    /// The next one. There are as many as requests.
    pub(super) fn next(&mut self) -> Result<Outcome> {
        self.list.next().ok_or_else(unexpected)
    }
}

/// The protocol has matched every reply with the shape of its request, so this does not happen.
pub(super) fn unexpected() -> Error {
    Error::new(ErrorKind::Protocol, "an answer of the wrong kind")
}

impl Session {
    pub(super) fn open(config: &Arc<Config>, probe: Probed) -> Result<Session> {
        Session::open_with(config, probe, connection::run)
    }

    /// `run`: what the thread does.
    fn open_with(
        config: &Arc<Config>,
        probe: Probed,
        run: impl FnOnce(&Shared) + Send + 'static,
    ) -> Result<Session> {
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                protocol: Protocol::new(Arc::clone(config)),
                writer: None,
                calls: HashMap::new(),
                next_call: 0,
                trouble: None,
                closing: false,
                waiting_for_news: HashMap::new(),
                leader_clock: None,
                known: HashMap::new(),
            }),
            changed: Condvar::new(),
            probe,
            config: Arc::clone(config),
        });
        let thread = thread::start("contend-zk", {
            let shared = Arc::clone(&shared);
            move || {
                if catch_unwind(AssertUnwindSafe(|| run(&shared))).is_err() {
                    shared.panicked();
                }
            }
        })?;
        Ok(Session {
            shared,
            thread: Mutex::new(thread),
        })
    }

    /// Returns how the session stands.
    #[must_use]
    pub fn state(&self) -> SessionState {
        self.look(Protocol::phase)
    }

    /// Returns the session's number at the server; zero before a server has answered.
    #[must_use]
    pub fn id(&self) -> i64 {
        self.look(Protocol::id)
    }

    /// Returns the session timeout: the negotiated one, once there is one.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        self.look(Protocol::timeout)
    }

    /// Returns the moment up to which the ensemble keeps the session, by the heartbeats that it
    /// acknowledged and less what clocks may drift. `None` before a server has answered, and once the
    /// session is over.
    #[must_use]
    pub fn alive_until(&self) -> Option<Moment> {
        self.look(Protocol::alive_until)
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
            permissions: Permissions::Of(self.shared.config.acl),
        };
        match self.done(request, by)? {
            Reply::Created(full, stat) => {
                let path = full.strip_prefix(self.shared.config.chroot.as_str());
                Ok((path.unwrap_or(&full).to_owned(), stat))
            }
            _ => Err(unexpected()),
        }
    }

    /// Deletes a node.
    ///
    /// # Errors
    /// `NotFound` if it is not there, `Conflict` if it has children, and what the network can do.
    pub fn delete(&self, path: &str, by: Moment) -> Result<()> {
        self.done(Request::Delete(self.full(path)), by).map(drop)
    }

    /// Returns what the server keeps about a node; `None` if it is not there.
    ///
    /// # Errors
    /// What the network can do.
    pub fn exists(&self, path: &str, by: Moment) -> Result<Option<Stat>> {
        let request = Request::Exists(self.full(path));
        match self.one(request, by)? {
            Ok(Reply::Stat(stat)) => Ok(Some(stat)),
            Ok(_) => Err(unexpected()),
            Err(Code::NO_NODE) => Ok(None),
            Err(code) => Err(code.error(path)),
        }
    }

    /// Returns the data of a node.
    ///
    /// # Errors
    /// `NotFound` if it is not there, and what the network can do.
    pub fn get_data(&self, path: &str, by: Moment) -> Result<(Vec<u8>, Stat)> {
        match self.done(Request::Data(self.full(path)), by)? {
            Reply::Data(data, stat) => Ok((data, stat)),
            _ => Err(unexpected()),
        }
    }

    /// Returns the names of a node's children, in no particular order.
    ///
    /// # Errors
    /// `NotFound` if it is not there, and what the network can do.
    pub fn get_children(&self, path: &str, by: Moment) -> Result<Vec<String>> {
        match self.done(Request::Children(self.full(path)), by)? {
            Reply::Children(names) => Ok(names),
            _ => Err(unexpected()),
        }
    }

    /// Lets the server that we talk to catch up with the leader: what is read after it is not older.
    ///
    /// # Errors
    /// What the network can do.
    pub fn sync(&self, by: Moment) -> Result<()> {
        self.done(Request::Sync, by).map(drop)
    }

    /// Ends the session, and with it its nodes. Waits for the server's answer, but not long for a dead
    /// one: by then nothing of ours keeps the session alive any more.
    pub fn close(&self) {
        let deadline = Moment::now() + GOODBYE;
        let mut state = self.shared.state.lock();
        state.closing = true;
        let number = state.next_number();
        let call = Arc::new(Call::new(number, 1, state.protocol.epoch(), Moment::now()));
        if state.protocol.close(number) {
            state.calls.insert(number, Arc::clone(&call));
            state.settle();
            drop(state);
            let _ = call.wait(deadline);
            state = self.shared.state.lock();
        }
        self.shared.changed.notify_all();
        // A server that is letting us in would keep the session: the thread says goodbye to it.
        while state.protocol.is_entering() && !deadline.remaining().is_zero() {
            self.shared
                .changed
                .wait_for(&mut state, deadline.remaining());
        }
        state.end(SessionState::Closed);
        self.shared.changed.notify_all();
        drop(state);
        // A thread that still waits for a server to accept a connection ends when that does.
        self.thread.lock().join(deadline);
    }

    /// The path from the true root.
    fn full(&self, path: &str) -> String {
        format!("{}{path}", self.shared.config.chroot)
    }

    /// Asks in one go and waits for all the answers: one round trip. The server works on the requests in
    /// this order, so a later one sees what an earlier one did.
    pub(super) fn call(&self, asks: Vec<Ask>, by: Moment) -> Result<Answers> {
        let call = self.ask(asks, by)?;
        self.finish(&call, by)
    }

    /// Asks in one go, once a server is there.
    pub(super) fn ask(&self, asks: Vec<Ask>, by: Moment) -> Result<Arc<Call>> {
        let mut state = self.shared.connected(by).map_err(Error::not_sent)?;
        let number = state.next_number();
        let epoch = state.protocol.epoch();
        let call = Arc::new(Call::new(number, asks.len(), epoch, Moment::now()));
        state.calls.insert(number, Arc::clone(&call));
        state.protocol.ask(number, asks);
        state.settle();
        Ok(call)
    }

    /// Asks one thing and waits for the answer.
    pub(super) fn one(&self, ask: impl Into<Ask>, by: Moment) -> Result<Outcome> {
        self.call(vec![ask.into()], by)?.next()
    }

    /// As [`one`](Session::one), for what must not be refused.
    fn done(&self, request: Request, by: Moment) -> Result<Reply> {
        let path = request.path().to_owned();
        let outcome = self.one(request, by)?;
        outcome.map_err(|code| code.error(&path))
    }

    /// Reads the contenders for a mutex. `None`: not even the mutex is there.
    pub(super) fn line(&self, mutex_path: &str, by: Moment) -> Result<Option<Arc<Line>>> {
        match self.one(Ask::line(mutex_path), by)? {
            Ok(Reply::Line(line)) => Ok(Some(line)),
            Ok(_) => Err(unexpected()),
            Err(Code::NO_NODE) => Ok(None),
            Err(code) => Err(code.error(mutex_path)),
        }
    }

    /// Reads who leads now.
    pub(super) fn leader(&self, mutex_path: &str, by: Moment) -> Result<Option<Leader>> {
        loop {
            let line = self.line(mutex_path, by)?.unwrap_or_default();
            let Some(first) = line.first() else {
                return Ok(None);
            };
            // Gone between the two reads otherwise. Each round asks the server, which ends with `by`.
            if let Some(leader) = self.node(mutex_path, &first.name, by)? {
                return Ok(Some(leader));
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
        let leader = self.leader(mutex_path, by)?;
        Ok(leader
            .filter(|leader| u64::try_from(leader.stat.czxid) == Ok(fence))
            .map(|leader| format!("{mutex_path}/{}", leader.name)))
    }

    /// Reads the node with this name. `None`: it is gone.
    pub(super) fn node(&self, mutex_path: &str, name: &str, by: Moment) -> Result<Option<Leader>> {
        let path = format!("{mutex_path}/{name}");
        match self.one(Request::Data(path.clone()), by)? {
            Ok(Reply::Data(id, stat)) => Ok(Some(Leader::new(name, &id, stat))),
            Ok(_) => Err(unexpected()),
            Err(Code::NO_NODE) => Ok(None),
            Err(code) => Err(code.error(&path)),
        }
    }

    /// Waits for all the answers to a call. After a `Timeout` they are still due, and may be waited for
    /// again.
    pub(super) fn finish(&self, call: &Call, by: Moment) -> Result<Answers> {
        match call.wait(by)? {
            Some(list) => Ok(Answers {
                list: list.into_iter(),
            }),
            None => Err(self.shared.timeout("the server did not answer in time")),
        }
    }

    /// Nobody wants the node any more that the request with this index of `call` asked for as `path`.
    pub(super) fn cancel_creation(&self, call: &Call, index: usize, path: &str) {
        let mut state = self.shared.state.lock();
        match call.answer_to(index) {
            None => state.protocol.cancel(call.number),
            Some(Answer::Replied(Ok(Reply::Created(path, _)))) => state.protocol.abandon(path),
            Some(Answer::Lost { handed: true }) => state.protocol.abandon_creation(path),
            Some(_) => {}
        }
        state.settle();
    }

    /// Changes something in the protocol without waiting, and sends what follows from it.
    pub(super) fn act<T>(&self, act: impl FnOnce(&mut Protocol) -> T) -> T {
        let mut state = self.shared.state.lock();
        let result = act(&mut state.protocol);
        state.settle();
        result
    }

    /// Unparks `wake` when there is something new to say to a caller that was told "unknown".
    pub(super) fn wake_on_news(&self, wake: &Arc<Unparker>) {
        let weak = Arc::downgrade(wake);
        let key = weak.as_ptr() as usize;
        self.shared.state.lock().waiting_for_news.insert(key, weak);
    }

    /// Looks at the protocol, at several things at once.
    pub(super) fn look<T>(&self, look: impl FnOnce(&Protocol) -> T) -> T {
        look(&self.shared.state.lock().protocol)
    }

    /// What the session last saw of a mutex.
    pub(super) fn known(&self, mutex_path: &str) -> Option<Known> {
        self.shared.state.lock().known.get(mutex_path).cloned()
    }

    /// The leader that the session last saw, if it saw one.
    pub(super) fn known_leader(&self, mutex_path: &str) -> Option<Leader> {
        match self.known(mutex_path) {
            Some(Known::Led(leader)) => Some(leader),
            _ => None,
        }
    }

    /// Remembers what was seen of a mutex.
    pub(super) fn learn(&self, mutex_path: &Arc<str>, known: Known) {
        let mut state = self.shared.state.lock();
        if state.known.len() >= KNOWN && !state.known.contains_key(mutex_path) {
            state.known.clear();
        }
        state.known.insert(Arc::clone(mutex_path), known);
    }

    /// The leader told its time: `ms` in a reply to what was sent at `sent`.
    pub(super) fn learn_clock(&self, ms: i64, sent: Moment) {
        if let Ok(ms) = u64::try_from(ms) {
            self.shared.state.lock().leader_clock = Some((ms, sent));
        }
    }

    /// The time by the leader's clock, in epoch milliseconds. A session that has created nothing was not told,
    /// and takes its own.
    pub(super) fn leader_ms(&self) -> u64 {
        let clock = self.shared.state.lock().leader_clock;
        let (told, since) = clock.map_or_else(
            || {
                (
                    0,
                    SystemTime::now()
                        .duration_since(UNIX_EPOCH)
                        .unwrap_or_default(),
                )
            },
            |(told, sent)| (told, Moment::now() - sent),
        );
        told.saturating_add(ms(since))
    }

    /// A leader of another contender, for display: how long it goes on nobody knows.
    pub(super) fn owner_of(&self, leader: Option<&Leader>, lease: Lease) -> MutexOwner {
        leader.map_or(MutexOwner::NONE, |leader| {
            let left = (lease.ttl(), lease.total());
            let Stat { ctime, czxid, .. } = leader.stat;
            self.owner(&leader.id, Some(ctime), czxid, left)
        })
    }

    /// A snapshot for display. `ttl` and `total` are what is left, as far as one can know.
    pub(super) fn owner(
        &self,
        id: &Arc<str>,
        acquired_at: Option<i64>,
        fence: i64,
        (ttl, total): (Duration, Duration),
    ) -> MutexOwner {
        let now = Moment::now();
        // A node's creation time is the leader's clock, too.
        let now_ms = self.leader_ms();
        let acquired_at = acquired_at.and_then(|at| u64::try_from(at).ok());
        MutexOwner::new(
            Arc::clone(id),
            acquired_at.unwrap_or(now_ms),
            now_ms.saturating_add(ms(ttl)),
            now_ms.saturating_add(ms(total)),
            u64::try_from(fence).unwrap_or(0),
        )
        .observed_at(now_ms, now)
    }
}

fn ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

impl State {
    fn next_number(&mut self) -> u64 {
        self.next_call += 1;
        self.next_call
    }

    /// Hands out what the protocol has to say, to the server and to the callers.
    fn settle(&mut self) {
        if self.protocol.has_output() {
            let bytes = self.protocol.take_output();
            if let Some(writer) = &mut self.writer
                && let Err(error) = writer.send(bytes)
            {
                self.broken(&error);
            }
        }
        self.deliver(None);
    }

    /// The thread notices by its own read that the connection is gone.
    fn broken(&mut self, error: &io::Error) {
        let error = Error::new(
            ErrorKind::Unreachable,
            format!("cannot write to the server: {error}"),
        );
        self.disconnect(&error);
    }

    fn disconnect(&mut self, why: &Error) {
        if let Some(mut writer) = self.writer.take() {
            if self.protocol.has_output() {
                let _ = writer.send(self.protocol.take_output());
            }
            writer.close();
        }
        self.protocol.disconnected();
        self.deliver(Some(why));
    }

    /// Closes the socket, too: the thread may be in a read that nothing else would end.
    fn end(&mut self, phase: SessionState) {
        self.protocol.end(phase);
        if let Some(mut writer) = self.writer.take() {
            writer.close();
        }
        let why = self.protocol.over_error();
        self.deliver(Some(&why));
    }

    fn deliver(&mut self, why: Option<&Error>) {
        let over = self.protocol.phase().is_over();
        let over = over.then(|| self.protocol.over_error());
        while let Some(answered) = self.protocol.next_answer() {
            if let Some(call) = self.calls.get(&answered.call)
                && call.answer(answered.index, answered.answer, over.as_ref().or(why))
            {
                self.calls.remove(&answered.call);
            }
        }
        if self.protocol.take_news() {
            let waiting = mem::take(&mut self.waiting_for_news);
            for wake in waiting.into_values().filter_map(|it| it.upgrade()) {
                wake.unpark();
            }
        }
    }
}

/// For the session's thread.
impl Shared {
    pub(super) fn config(&self) -> &Config {
        &self.config
    }

    pub(super) fn is_closing(&self) -> bool {
        let state = self.state.lock();
        state.closing || state.protocol.phase().is_over()
    }

    pub(super) fn epoch(&self) -> u64 {
        self.state.lock().protocol.epoch()
    }

    pub(super) fn is_entering(&self) -> bool {
        self.state.lock().protocol.is_entering()
    }

    pub(super) fn patience(&self, now: Moment) -> Duration {
        self.state.lock().protocol.patience(now)
    }

    /// A connection was opened.
    pub(super) fn begin(
        &self,
        writer: Writer,
        patience: Duration,
        addresses: usize,
    ) -> io::Result<()> {
        let mut state = self.state.lock();
        if state.closing {
            // Nobody is to be let in any more: `tick` ends the thread.
            return Ok(());
        }
        state.protocol.begin(Moment::now(), patience, addresses);
        let hello = state.protocol.take_output();
        let writer = state.writer.insert(writer);
        writer.send(hello)
    }

    /// Does what is due; `None` if the session is over.
    pub(super) fn tick(&self, now: Moment) -> Result<Option<Wake>> {
        let mut state = self.state.lock();
        if state.protocol.phase().is_over() || (state.closing && state.writer.is_none()) {
            return Ok(None);
        }
        state.protocol.tick(now)?;
        if let Some(writer) = &mut state.writer
            && let Err(error) = writer.flush()
        {
            state.broken(&error);
        }
        state.settle();
        let Some(writer) = &state.writer else {
            return Err(Error::new(ErrorKind::Unreachable, "the connection broke"));
        };
        Ok(Some(Wake {
            blocked: writer.is_blocked(),
            at: state.protocol.wake_at(),
        }))
    }

    /// The server sent something.
    pub(super) fn received(&self, bytes: Vec<u8>) -> Result<()> {
        let mut state = self.state.lock();
        let Some(writer) = &mut state.writer else {
            return Ok(());
        };
        let plain = writer.open(bytes).map_err(|error| {
            Error::new(ErrorKind::Unreachable, format!("TLS: {error}")).with_source(error)
        })?;
        let before = state.protocol.phase();
        let result = state.protocol.received(&plain, Moment::now());
        state.settle();
        let after = state.protocol.phase();
        if after.is_over()
            && let Some(mut writer) = state.writer.take()
        {
            writer.close();
        }
        if before != after {
            if after == SessionState::Connected {
                state.trouble = None;
            }
            self.changed.notify_all();
            drop(state);
            if after == SessionState::Connected {
                // The end of what "connection lost" began is said as loudly.
                let level = match before {
                    SessionState::Suspended => log::Level::Info,
                    _ => log::Level::Debug,
                };
                log::log!(level, "{}: connected", self.config.realm);
                self.probe.tell(|probe| probe.connected());
            }
        }
        result
    }

    /// The server ended the connection. Returns `true` if that is what it was asked to do.
    pub(super) fn closed_by_server(&self) -> bool {
        let mut state = self.state.lock();
        state.protocol.refused();
        state.closing || state.protocol.phase().is_over()
    }

    /// The connection is lost, or could not be opened.
    pub(super) fn lost(&self, error: &Error) {
        let mut state = self.state.lock();
        state.disconnect(error);
        self.changed.notify_all();
        let silent = state.closing;
        drop(state);
        if !silent {
            self.probe.tell(|probe| probe.disconnected(error));
        }
    }

    /// Every address was tried in vain.
    pub(super) fn in_trouble(&self, error: Error) {
        let mut state = self.state.lock();
        if state.trouble.is_none() && !state.closing {
            log::warn!("{}: no server can be used: {error}", self.config.realm);
        }
        state.trouble = Some(error);
        self.changed.notify_all();
    }

    pub(super) fn pause(&self, pause: Duration) {
        let until = Moment::now() + pause;
        let mut state = self.state.lock();
        while !state.closing && !until.remaining().is_zero() {
            self.changed.wait_for(&mut state, until.remaining());
        }
    }

    /// The thread panicked: nobody reads, beats or reconnects any more. Owners step down, and the next call
    /// opens another session. There is no goodbye: the nodes stay until the server ends the session, so that
    /// owners have the time to wind down in.
    fn panicked(&self) {
        log::error!(
            "{}: the thread of the session panicked; the session is given up for a new one",
            self.config.realm
        );
        let mut state = self.state.lock();
        state.end(SessionState::Expired);
        self.changed.notify_all();
    }

    pub(super) fn thread_ends(&self) {
        let mut state = self.state.lock();
        state.end(SessionState::Closed);
        self.changed.notify_all();
    }

    /// The state, once a server is there. Fails at once where every server has been tried in vain: who
    /// tries again later is woken when there is one.
    fn connected(&self, by: Moment) -> Result<parking_lot::MutexGuard<'_, State>> {
        let mut state = self.state.lock();
        loop {
            if state.protocol.phase().is_over() || state.closing {
                return Err(state.protocol.over_error());
            }
            // Before the time is looked at: it says more than that the time is over. There is none while
            // connected.
            if let Some(trouble) = &state.trouble {
                return Err(trouble.clone());
            }
            let left = by.remaining();
            if left.is_zero() {
                // A server of another kind that waits for its client to say more is known by nothing else.
                return Err(self.timeout(if state.protocol.is_entering() {
                    "no answer to the handshake in time; the server hangs, or is not a ZooKeeper server"
                } else {
                    "no server was there in time"
                }));
            }
            if state.protocol.is_connected() {
                return Ok(state);
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

#[cfg(test)]
mod tests {
    use super::super::builder::Builder;
    use super::*;

    /// Owners must step down and callers be told: nobody else would ever answer them.
    #[test]
    fn a_panic_in_the_thread_of_a_session_ends_it_and_the_next_call_opens_another() {
        let config = Arc::new(Builder::new("127.0.0.1:1").config().unwrap());
        let none = || Probed::default();
        let broken = Session::open_with(&config, none(), |shared| {
            let _state = shared.state.lock();
            panic!("on request");
        });
        let broken = Arc::new(broken.unwrap());
        let by = Moment::now() + Duration::from_secs(40);
        let error = broken.sync(by).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
        assert_eq!(broken.state(), SessionState::Expired);
        let sessions = Sessions {
            config,
            probe: Probed::default(),
            current: Mutex::new(Arc::clone(&broken)),
        };
        let next = sessions.session().unwrap();
        assert!(!Arc::ptr_eq(&next, &broken));
        assert_eq!(next.state(), SessionState::Connecting);
    }
}
