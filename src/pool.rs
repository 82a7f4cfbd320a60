//! One pool of connections on r2d2, for Redis and MySQL.
//!
//! r2d2 opens connections in its own threads, never in the caller's. What is added here: a part of the
//! connections is kept for owners, the reason why there is no connection is known at once, a server that
//! cannot be reached is asked ever more slowly and by one thread at a time, and dropping the pool is
//! bounded. No connection is pinged: one is good until a request on it fails.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};
use r2d2::{ManageConnection, NopErrorHandler, PooledConnection};
use scheduled_thread_pool::{OnPoolDropBehavior, ScheduledThreadPool};

use crate::backend::PoolUse;
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::probe::Probed;

/// Threads that open connections: two, so that one slow log-in does not hold up the rest.
const OPENERS: usize = 2;

/// The largest pool: r2d2 makes room for all of its connections at once.
const LARGEST: u32 = 1_000;

/// How soon a checkout that waits looks again although nothing was heard, for the first time: twice as long after
/// each time, because where thousands wait, their looks would take the time that those served need.
const FIRST_LOOK: Duration = Duration::from_millis(10);

/// The longest between two such looks.
const LOOK: Duration = Duration::from_millis(320);

/// A new connection is announced before r2d2 lists it as idle: how long to wait for that before asking for
/// another.
const GRACE: Duration = Duration::from_millis(1);

/// How often r2d2 asks again for a connection that could not be opened; [`Connect::backoff`] decides
/// whether that becomes an attempt.
const RETRY: Duration = Duration::from_millis(50);

/// Where no call has come back in order for as long, they hang: the pool is not too small.
const HANGS: Duration = Duration::from_millis(100);

/// How long dropping a pool waits for a connection that is just being opened.
const FAREWELL: Duration = Duration::from_millis(200);

/// What a pool must know about a technology.
pub(crate) trait Connect: Send + Sync + 'static {
    /// A connection that is ready for requests.
    type Connection: Send + 'static;

    /// Opens a connection. Called by the pool's own threads, so it may block, but not for ever.
    ///
    /// # Errors
    /// Any, with the server's name in the message.
    fn connect(&self) -> Result<Self::Connection>;

    /// Returns `true` if the connection must not be used again: a request on it has no known outcome,
    /// or it says that it is read-only. Asked when it comes back.
    fn is_broken(&self, connection: &mut Self::Connection) -> bool;

    /// Returns when the server last answered on the connection: when it was opened, or later.
    fn heard_at(&self, connection: &Self::Connection) -> Moment;

    /// Returns the server's name for messages, without a credential.
    fn server(&self) -> String;

    /// Returns what to say where nothing was heard for `waited` of a connection that is being opened.
    fn unanswered(&self, waited: Duration) -> String;

    /// Returns how attempts to connect are spaced after this error. Failures with equal ones count as a
    /// row. After a failure, one thread at a time tries.
    fn backoff(&self, error: &Error) -> Backoff;
}

/// A pause that doubles with each failure in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Backoff {
    pub(crate) first: Duration,
    pub(crate) longest: Duration,
}

impl Backoff {
    /// Returns the pause after the `failures`th failure in a row.
    fn pause(self, failures: u32) -> Duration {
        let doubled = 2_u32.pow(failures.saturating_sub(1).min(16));
        (self.first * doubled).min(self.longest)
    }
}

/// Who asks for a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lane {
    /// An owner, who has something to lose: may use every connection.
    Owner,
    /// Everybody else: leaves a quarter of the connections, at least one, for owners.
    Other,
}

/// How a pool is set up.
#[derive(Clone, Debug)]
pub(crate) struct PoolSettings {
    /// What the pool's threads are called.
    pub(crate) name: &'static str,
    /// The most connections.
    pub(crate) size: u32,
    /// An idle connection is closed after this long.
    pub(crate) idle_timeout: Duration,
    /// Hears of connections.
    pub(crate) probe: Probed,
}

/// A pool of connections to one server.
pub(crate) struct Pool<C: Connect> {
    /// `None` only while dropping.
    inner: Option<r2d2::Pool<Manager<C>>>,
    shared: Arc<Shared<C>>,
}

/// A connection on loan; goes back, or away if it is broken, when dropped.
///
/// Dropped from top to bottom: the connection is back before the next one comes for it.
pub(crate) struct Checkout<C: Connect> {
    connection: PooledConnection<Manager<C>>,
    asked_at: Moment,
    _pass: Pass,
}

/// What r2d2 opens connections with.
struct Manager<C> {
    shared: Arc<Shared<C>>,
}

/// A connection and what the pool remembers about it.
pub(crate) struct Pooled<T> {
    connection: T,
    /// When it was looked at to be lent last.
    came_at: Moment,
}

struct Shared<C> {
    connect: C,
    settings: PoolSettings,
    door: Mutex<Door>,
    /// An attempt to connect ended.
    settled: Condvar,
    lanes: Arc<Lanes>,
    /// Connections not heard of since then are not used again; nanoseconds of the boot-time clock.
    suspect_before: AtomicU64,
    /// When the server last answered on a connection that came back in order, or let one be opened; 0 for never.
    last_contact: AtomicU64,
}

/// Who may try to connect.
#[derive(Default)]
struct Door {
    /// How the last attempt failed, if it did.
    failed: Option<FailedConnect>,
    /// How many attempts are under way.
    connecting: usize,
    /// Since when there is one.
    connecting_since: Option<Moment>,
    /// When a connection broke last, and how.
    broke: Option<(Moment, Error)>,
    closed: bool,
}

struct FailedConnect {
    error: Error,
    backoff: Backoff,
    /// Failures in a row with this backoff: those of another kind, after which it was tried more often, do not
    /// make this one last.
    failures: u32,
    /// Nobody tries before.
    until: Moment,
    /// Whether somebody tries at the moment.
    retrying: bool,
}

impl<C: Connect> Pool<C> {
    /// Makes a pool and starts to open a first connection. The server may be away.
    ///
    /// # Errors
    /// `Unavailable` where the system allows no more threads.
    pub(crate) fn new(connect: C, settings: PoolSettings) -> Result<Pool<C>> {
        let size = settings.size.max(1);
        let idle_timeout = settings.idle_timeout;
        let threads = format!("{}-{{}}", settings.name);
        let shared = Arc::new(Shared {
            connect,
            settings,
            door: Mutex::default(),
            settled: Condvar::new(),
            lanes: Arc::new(Lanes::new(size)),
            suspect_before: AtomicU64::new(0),
            last_contact: AtomicU64::new(0),
        });
        let build = || {
            let openers = ScheduledThreadPool::builder()
                .num_threads(OPENERS)
                .thread_name_pattern(&threads)
                // Else a dropped pool's threads would live on until r2d2's next look at idle connections.
                .on_drop_behavior(OnPoolDropBehavior::DiscardPendingScheduled)
                .build();
            r2d2::Pool::builder()
                .max_size(size)
                .min_idle(Some(0))
                // Not a request: see `is_valid`.
                .test_on_check_out(true)
                .idle_timeout(Some(idle_timeout))
                // Its only use here: r2d2 pauses for half of it between attempts to connect.
                .connection_timeout(RETRY * 2)
                .error_handler(Box::new(NopErrorHandler))
                .thread_pool(Arc::new(openers))
                .build_unchecked(Manager {
                    shared: Arc::clone(&shared),
                })
        };
        // scheduled-thread-pool panics where no thread can be started.
        let inner = catch_unwind(AssertUnwindSafe(build)).map_err(|_| {
            Error::new(
                ErrorKind::Unavailable,
                "cannot start a thread for connections; the system allows no more of them",
            )
            .not_sent()
        })?;
        // So that the first call finds a connection.
        drop(inner.get_timeout(Duration::ZERO));
        Ok(Pool {
            inner: Some(inner),
            shared,
        })
    }

    /// Returns a connection as soon as there is one for `lane`. While the server cannot be reached at
    /// all, returns the reason as soon as it is known.
    ///
    /// # Errors
    /// Any, before anything was asked.
    pub(crate) fn checkout(&self, lane: Lane, by: Moment) -> Result<Checkout<C>> {
        let Some(inner) = &self.inner else {
            return Err(closed());
        };
        let lanes = &self.shared.lanes;
        let mut room = lanes.room.lock();
        let mut ask = Ask::Now;
        let mut look = FIRST_LOOK;
        let mut waits_since = None;
        loop {
            if room.admits(lane) {
                // With the lock held, so that nothing comes back between this look and the wait.
                let mut found = inner.try_get();
                // While connecting fails, r2d2 goes on trying what it was asked for before. Asked by every call of
                // an outage, it would open all that the pool may have when that is over. Whoever does wait asks:
                // else another could take the connection that it waits for, and nobody would open a further one.
                let away =
                    || inner.state().connections == 0 && self.shared.connect_error().is_some();
                if found.is_none() && ask == Ask::Now && !away() {
                    // Has r2d2 open one more, if there may be one more.
                    found = inner.get_timeout(Duration::ZERO).ok();
                    ask = Ask::Done;
                }
                if let Some(connection) = found {
                    room.enter(lane);
                    return Ok(Checkout {
                        asked_at: waits_since.unwrap_or(connection.came_at),
                        connection,
                        _pass: Pass::new(lanes, lane),
                    });
                }
            }
            let now = Moment::now();
            let since = *waits_since.get_or_insert(now);
            // With connections in use one of them will come back: wait for it. With none, how
            // connecting failed is all that there is to know.
            let open = inner.state().connections;
            if open == 0
                && let Some(error) = self.shared.connect_error()
            {
                return Err(error);
            }
            let left = by - now;
            if left.is_zero() {
                let full = open >= inner.max_size() || !room.admits(lane);
                return Err(self.why_not(open, full, since));
            }
            let limit = if ask == Ask::Soon { GRACE } else { look };
            let heard = lanes.wait(&mut room, lane, limit.min(left));
            // Notified in vain, it does not look soon again: it would only take the connection from the next one that
            // is notified.
            if ask != Ask::Soon && !heard {
                look = LOOK.min(look * 2);
            }
            ask = match ask {
                Ask::Soon => Ask::Now,
                _ if heard => Ask::Soon,
                ask => ask,
            };
        }
    }

    /// Returns an idle connection that `lane` may use now, or nothing. Never waits.
    pub(crate) fn try_checkout(&self, lane: Lane) -> Option<Checkout<C>> {
        let lanes = &self.shared.lanes;
        let mut room = lanes.room.lock();
        if !room.admits(lane) {
            return None;
        }
        let connection = self.inner.as_ref()?.try_get()?;
        room.enter(lane);
        Some(Checkout {
            asked_at: connection.came_at,
            connection,
            _pass: Pass::new(lanes, lane),
        })
    }

    /// Closes the idle connections that were not heard of since `since`: the server restarted, closed
    /// them, or has become read-only. Without this, each of them would fail a call.
    pub(crate) fn discard_idle(&self, since: Moment) {
        self.shared
            .suspect_before
            .fetch_max(nanos(since), Ordering::Relaxed);
        if let Some(inner) = &self.inner {
            // Taking one out throws away all suspects before it.
            drop(inner.try_get());
        }
    }

    /// Notes that a connection broke, and tells the probe.
    pub(crate) fn lost(&self, error: &Error) {
        self.shared.door.lock().broke = Some((Moment::now(), error.clone()));
        let probe = &self.shared.settings.probe;
        probe.tell(|probe| probe.disconnected(error));
    }

    /// Returns how the connections are used.
    pub(crate) fn usage(&self) -> PoolUse {
        let Some(inner) = &self.inner else {
            return PoolUse::default();
        };
        let state = inner.state();
        PoolUse::new(state.connections, state.idle_connections, inner.max_size())
    }

    /// Returns when the server last answered on a connection that came back in order, or let one be opened.
    pub(crate) fn last_contact(&self) -> Option<Moment> {
        match self.shared.last_contact.load(Ordering::Relaxed) {
            0 => None,
            at => Some(Moment::from_origin(Duration::from_nanos(at))),
        }
    }

    /// What opens the connections.
    pub(crate) fn connector(&self) -> &C {
        &self.shared.connect
    }

    /// Why no connection came in time to a checkout that waits since `since`, with `open` of them, and no more
    /// allowed if it is `full`.
    fn why_not(&self, open: u32, full: bool, since: Moment) -> Error {
        if let Some(error) = self.shared.connect_error() {
            return error;
        }
        let now = Moment::now();
        let waited = now - since;
        let server = self.shared.connect.server();
        let door = self.shared.door.lock();
        let connecting = door.connecting_since;
        let connecting = connecting.map_or(Duration::ZERO, |since| now - since);
        // Nothing was heard since: whatever ended the last connection keeps the next one from opening too.
        let broke = door.broke.clone();
        let broke = broke.filter(|(at, _)| self.last_contact() < Some(*at));
        drop(door);
        let late = |message| Error::new(ErrorKind::Timeout, message).not_sent();
        if open > 0 && waited >= HANGS && self.last_contact() < Some(since) {
            let waited = waited.as_secs_f64();
            late(format!(
                "{server}: no answer for {waited:.1} s to the calls under way"
            ))
        } else if full {
            late(format!(
                "{server}: all connections were in use; if this happens often, raise pool_size ({})",
                self.shared.settings.size
            ))
            .not_sent()
        } else if connecting >= HANGS {
            late(self.shared.connect.unanswered(connecting))
        } else if let Some((_, error)) = broke {
            error.not_sent()
        } else {
            late(format!("{server}: no connection could be opened in time")).not_sent()
        }
    }
}

impl<C: Connect> Drop for Pool<C> {
    fn drop(&mut self) {
        self.shared.door.lock().closed = true;
        self.inner = None;
        let by = Moment::now() + FAREWELL;
        let mut door = self.shared.door.lock();
        while door.connecting > 0 && !by.remaining().is_zero() {
            self.shared.settled.wait_for(&mut door, by.remaining());
        }
    }
}

impl<C: Connect> fmt::Debug for Pool<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool")
            .field("server", &self.shared.connect.server())
            .field("usage", &self.usage())
            .finish_non_exhaustive()
    }
}

impl<C: Connect> Checkout<C> {
    /// When it was asked for.
    pub(crate) fn asked_at(&self) -> Moment {
        self.asked_at
    }

    /// When it came: just now, without another look at the clock.
    pub(crate) fn came_at(&self) -> Moment {
        self.connection.came_at
    }
}

impl<C: Connect> Deref for Checkout<C> {
    type Target = C::Connection;

    fn deref(&self) -> &C::Connection {
        &self.connection.connection
    }
}

impl<C: Connect> DerefMut for Checkout<C> {
    fn deref_mut(&mut self) -> &mut C::Connection {
        &mut self.connection.connection
    }
}

impl<C: Connect> fmt::Debug for Checkout<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Checkout")
    }
}

impl<C: Connect> ManageConnection for Manager<C> {
    type Connection = Pooled<C::Connection>;
    type Error = Error;

    fn connect(&self) -> Result<Pooled<C::Connection>> {
        self.shared.connect()
    }

    /// Asks the server nothing: a suspect connection, and one that idled for too long, is replaced.
    fn is_valid(&self, pooled: &mut Pooled<C::Connection>) -> Result<()> {
        let now = Moment::now();
        let heard_at = self.shared.connect.heard_at(&pooled.connection);
        if self.shared.is_suspect(heard_at) || now - heard_at >= self.shared.settings.idle_timeout {
            return Err(closed());
        }
        pooled.came_at = now;
        Ok(())
    }

    fn has_broken(&self, pooled: &mut Pooled<C::Connection>) -> bool {
        let broken = self.shared.connect.is_broken(&mut pooled.connection);
        if !broken {
            self.shared.heard(&pooled.connection);
        }
        broken
    }
}

impl<C: Connect> Shared<C> {
    fn connect(&self) -> Result<Pooled<C::Connection>> {
        self.enter()?;
        let opened = catch_unwind(AssertUnwindSafe(|| self.connect.connect()));
        let opened = opened.unwrap_or_else(|_| {
            Err(Error::new(
                ErrorKind::Panicked,
                format!("{}: connecting panicked", self.connect.server()),
            ))
        });
        let mut door = self.door.lock();
        door.connecting -= 1;
        if door.connecting == 0 {
            door.connecting_since = None;
        } else if opened.is_ok() {
            // The server answers: what else is under way has waited since then at the most.
            door.connecting_since = Some(Moment::now());
        }
        let opened = match opened {
            Ok(connection) => {
                door.failed = None;
                self.heard(&connection);
                Ok(Pooled {
                    connection,
                    came_at: Moment::now(),
                })
            }
            Err(error) => {
                // A connect that fails has done nothing that anybody could miss.
                let error = error.not_sent();
                let backoff = self.connect.backoff(&error);
                let earlier = door.failed.as_ref();
                let earlier = earlier.filter(|failed| failed.backoff == backoff);
                let failures = earlier.map_or(0, |failed| failed.failures) + 1;
                door.failed = Some(FailedConnect {
                    error: error.clone(),
                    backoff,
                    failures,
                    until: Moment::now() + backoff.pause(failures),
                    retrying: false,
                });
                Err(error)
            }
        };
        let closed = door.closed;
        drop(door);
        if !closed {
            self.settings.probe.tell(|probe| match &opened {
                Ok(_) => probe.connected(),
                Err(error) => probe.disconnected(error),
            });
        }
        self.settled.notify_all();
        match &opened {
            Ok(_) => self.lanes.notify_one(),
            Err(_) => self.lanes.notify_all(),
        }
        opened
    }

    /// Begins an attempt to connect. An error: not now, and that is how the last one failed.
    fn enter(&self) -> Result<()> {
        let mut door = self.door.lock();
        if door.closed {
            return Err(closed());
        }
        if let Some(failed) = &mut door.failed {
            if failed.retrying || !failed.until.remaining().is_zero() {
                return Err(failed.error.clone());
            }
            failed.retrying = true;
        }
        door.connecting += 1;
        door.connecting_since.get_or_insert_with(Moment::now);
        Ok(())
    }

    fn connect_error(&self) -> Option<Error> {
        let door = self.door.lock();
        door.failed.as_ref().map(|failed| failed.error.clone())
    }

    /// Notes when the server answered on this connection, which may be long ago: it may not have been used.
    fn heard(&self, connection: &C::Connection) {
        let at = nanos(self.connect.heard_at(connection));
        self.last_contact.fetch_max(at, Ordering::Relaxed);
    }

    fn is_suspect(&self, heard_at: Moment) -> bool {
        nanos(heard_at) < self.suspect_before.load(Ordering::Relaxed)
    }
}

fn closed() -> Error {
    Error::new(ErrorKind::Closed, "the factory was closed").not_sent()
}

fn nanos(at: Moment) -> u64 {
    u64::try_from(at.since_origin().as_nanos()).unwrap_or(u64::MAX)
}

/// Whether a checkout that waits asks for a further connection: once at first, and again when it was
/// notified and somebody else was faster.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ask {
    Now,
    Soon,
    Done,
}

/// Where those who want a connection wait, owners first.
#[derive(Debug)]
struct Lanes {
    room: Mutex<Room>,
    owners: Condvar,
    others: Condvar,
}

#[derive(Debug)]
struct Room {
    /// How many more of those who are no owners may use a connection.
    others: u32,
    waiting_owners: u32,
}

/// The right to use a connection, given back when dropped.
#[derive(Debug)]
struct Pass {
    lanes: Arc<Lanes>,
    lane: Lane,
}

impl Lanes {
    /// Makes the lanes of a pool of `size` connections. A pool of one connection has none to keep.
    fn new(size: u32) -> Lanes {
        let kept = size.div_ceil(4).min(size - 1);
        Lanes {
            room: Mutex::new(Room {
                others: size - kept,
                waiting_owners: 0,
            }),
            owners: Condvar::new(),
            others: Condvar::new(),
        }
    }

    /// Waits until notified, which it returns, or for `limit`.
    fn wait(&self, room: &mut MutexGuard<'_, Room>, lane: Lane, limit: Duration) -> bool {
        let wait = match lane {
            Lane::Owner => {
                room.waiting_owners += 1;
                let wait = self.owners.wait_for(room, limit);
                room.waiting_owners -= 1;
                wait
            }
            Lane::Other => self.others.wait_for(room, limit),
        };
        !wait.timed_out()
    }

    /// A connection came back, or there is a new one.
    fn notify_one(&self) {
        let room = self.room.lock();
        self.notify(&room);
    }

    fn notify(&self, room: &Room) {
        if room.waiting_owners > 0 {
            self.owners.notify_one();
        } else {
            self.others.notify_one();
        }
    }

    /// There is something to know for everybody.
    fn notify_all(&self) {
        let _room = self.room.lock();
        self.owners.notify_all();
        self.others.notify_all();
    }
}

impl Room {
    fn admits(&self, lane: Lane) -> bool {
        lane == Lane::Owner || self.others > 0
    }

    fn enter(&mut self, lane: Lane) {
        if lane == Lane::Other {
            self.others -= 1;
        }
    }
}

impl Pass {
    fn new(lanes: &Arc<Lanes>, lane: Lane) -> Pass {
        Pass {
            lanes: Arc::clone(lanes),
            lane,
        }
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        let mut room = self.lanes.room.lock();
        if self.lane == Lane::Other {
            room.others += 1;
        }
        self.lanes.notify(&room);
    }
}

/// Refuses a size that cannot work.
///
/// # Errors
/// `InvalidInput`, with the limits.
pub(crate) fn check_size(size: u32) -> Result<()> {
    if (1..=LARGEST).contains(&size) {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "a pool_size of {size} is not possible; it must be from 1 to {LARGEST}"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, AtomicUsize};
    use std::thread;

    /// A server that can be away, slow, or break what it gave out.
    #[derive(Clone, Default)]
    struct Fake(Arc<FakeServer>);

    #[derive(Default)]
    struct FakeServer {
        away: AtomicBool,
        /// Whether log-ins time out; attempts are spaced in another way then.
        silent: AtomicBool,
        panics: AtomicBool,
        hangs: Mutex<Duration>,
        attempts: AtomicUsize,
        at_once: AtomicUsize,
        most_at_once: AtomicUsize,
        pause: Mutex<Option<Duration>>,
    }

    struct FakeConnection {
        number: usize,
        broken: bool,
        heard_at: Moment,
    }

    impl FakeConnection {
        fn is_answered(&mut self) {
            self.heard_at = Moment::now();
        }
    }

    impl Connect for Fake {
        type Connection = FakeConnection;

        fn connect(&self) -> Result<FakeConnection> {
            let server = &self.0;
            let number = server.attempts.fetch_add(1, Ordering::SeqCst);
            let at_once = server.at_once.fetch_add(1, Ordering::SeqCst) + 1;
            server.most_at_once.fetch_max(at_once, Ordering::SeqCst);
            let hangs = *server.hangs.lock();
            thread::sleep(hangs);
            server.at_once.fetch_sub(1, Ordering::SeqCst);
            assert!(!server.panics.load(Ordering::SeqCst), "a bug");
            if server.silent.load(Ordering::SeqCst) {
                return Err(Error::new(ErrorKind::Timeout, "fake: no log-in"));
            }
            if server.away.load(Ordering::SeqCst) {
                return Err(Error::new(
                    ErrorKind::Unreachable,
                    "fake: connection refused",
                ));
            }
            Ok(FakeConnection {
                number,
                broken: false,
                heard_at: Moment::now(),
            })
        }

        fn is_broken(&self, connection: &mut FakeConnection) -> bool {
            connection.broken
        }

        fn heard_at(&self, connection: &FakeConnection) -> Moment {
            connection.heard_at
        }

        fn server(&self) -> String {
            "fake".to_owned()
        }

        fn unanswered(&self, waited: Duration) -> String {
            format!("fake: no log-in within {} ms", waited.as_millis())
        }

        fn backoff(&self, error: &Error) -> Backoff {
            let (first, longest) = match (error.kind(), *self.0.pause.lock()) {
                (ErrorKind::Timeout, _) => (Duration::from_millis(50), Duration::from_secs(600)),
                (_, Some(pause)) => (pause, pause * 10),
                (_, None) => (Duration::from_millis(20), Duration::from_millis(20)),
            };
            Backoff { first, longest }
        }
    }

    fn pool(fake: &Fake, size: u32) -> Pool<Fake> {
        let settings = PoolSettings {
            name: "fake",
            size,
            idle_timeout: Duration::from_secs(600),
            probe: Probed::default(),
        };
        Pool::new(fake.clone(), settings).unwrap()
    }

    fn soon() -> Moment {
        Moment::now() + Duration::from_secs(30)
    }

    #[test]
    fn a_quarter_of_the_connections_but_at_least_one_is_kept_for_owners() {
        for (size, inside) in [(1, 1), (2, 1), (3, 2), (4, 3), (5, 3), (8, 6), (100, 75)] {
            assert_eq!(Lanes::new(size).room.lock().others, inside, "of {size}");
        }
        let pool = pool(&Fake::default(), 4);
        let others: Vec<_> = (0..3)
            .map(|_| pool.checkout(Lane::Other, soon()).unwrap())
            .collect();
        let error = pool.checkout(Lane::Other, Moment::now()).unwrap_err();
        assert!(error.to_string().contains("raise pool_size (4)"), "{error}");
        assert!(error.is_not_sent());
        drop(pool.checkout(Lane::Owner, soon()).unwrap());
        assert!(pool.try_checkout(Lane::Other).is_none());
        assert!(pool.try_checkout(Lane::Owner).is_some());
        drop(others);
        assert!(pool.try_checkout(Lane::Other).is_some());
    }

    /// What panics once need not panic the next time: `lock()` must not give up on that.
    #[test]
    fn a_panic_while_connecting_is_transient() {
        let fake = Fake::default();
        fake.0.panics.store(true, Ordering::SeqCst);
        let pool = pool(&fake, 4);
        let error = pool.checkout(Lane::Other, soon()).unwrap_err();
        assert_eq!(error.to_string(), "fake: connecting panicked");
        assert!(error.is_transient() && error.is_not_sent(), "{error:?}");
        fake.0.panics.store(false, Ordering::SeqCst);
        let end = soon();
        while pool.checkout(Lane::Other, end).is_err() {
            assert!(!end.remaining().is_zero(), "it does not come back");
            thread::yield_now();
        }
    }

    /// Rule "trouble is visible": the true cause, and not "raise pool_size".
    #[test]
    fn a_server_that_is_away_is_known_at_once_and_by_its_error() {
        let fake = Fake::default();
        fake.0.away.store(true, Ordering::SeqCst);
        let pool = pool(&fake, 4);
        let start = Moment::now();
        for _ in 0..20 {
            let error = pool.checkout(Lane::Other, soon()).unwrap_err();
            assert_eq!(error.to_string(), "fake: connection refused");
            assert_eq!(error.kind(), ErrorKind::Unreachable);
            assert!(error.is_not_sent());
        }
        assert!(Moment::now() - start < Duration::from_secs(10));
        fake.0.away.store(false, Ordering::SeqCst);
        let by = soon();
        while pool.checkout(Lane::Other, soon()).is_err() {
            assert!(!by.remaining().is_zero(), "never came back");
            thread::sleep(Duration::from_millis(1));
        }
        assert!(pool.last_contact().is_some());
    }

    /// Rule "trouble is visible": a call that comes just after another one hung has the same cause.
    #[test]
    fn a_connection_that_broke_tells_why_the_next_one_is_not_open_yet() {
        let fake = Fake::default();
        let pool = pool(&fake, 1);
        let mut first = pool.checkout(Lane::Other, soon()).unwrap();
        *fake.0.hangs.lock() = Duration::from_millis(500);
        first.broken = true;
        pool.lost(&Error::new(ErrorKind::Timeout, "fake: no answer in 1 s"));
        drop(first);
        let error = pool.checkout(Lane::Other, Moment::now()).unwrap_err();
        assert_eq!(error.to_string(), "fake: no answer in 1 s");
        assert!(error.is_not_sent());
        // Once the server has answered, that is over.
        drop(pool.checkout(Lane::Other, soon()).unwrap());
        pool.discard_idle(Moment::now());
        let error = pool.checkout(Lane::Other, Moment::now()).unwrap_err();
        let says = "fake: no connection could be opened in time";
        assert_eq!(error.to_string(), says);
    }

    /// Rule "trouble is visible": where nothing comes back, a larger pool would only hang with more calls.
    #[test]
    fn calls_that_hang_are_told_from_a_pool_that_is_too_small() {
        let pool = pool(&Fake::default(), 4);
        let held: Vec<_> = (0..3)
            .map(|_| pool.checkout(Lane::Other, soon()).unwrap())
            .collect();
        drop(pool.checkout(Lane::Owner, soon()).unwrap());
        let wait = || {
            let by = Moment::now() + Duration::from_millis(300);
            let error = pool.checkout(Lane::Other, by).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Timeout);
            assert!(error.is_not_sent());
            error.to_string()
        };
        let hangs = wait();
        assert!(hangs.starts_with("fake: no answer for 0."), "{hangs}");
        assert!(hangs.ends_with(" s to the calls under way"), "{hangs}");
        // An owner's calls come back all the while.
        let over = AtomicBool::new(false);
        let small = thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::SeqCst) {
                    pool.checkout(Lane::Owner, soon()).unwrap().is_answered();
                    thread::sleep(Duration::from_millis(1));
                }
            });
            let small = wait();
            over.store(true, Ordering::SeqCst);
            small
        });
        assert!(small.contains("raise pool_size (4)"), "{small}");
        drop(held);
    }

    /// Rule "trouble is visible": with one of eight open, a larger pool would not help.
    #[test]
    fn a_pool_that_may_grow_is_not_called_too_small() {
        let fake = Fake::default();
        let end = soon();
        let pool = pool(&fake, 8);
        let mut held = vec![pool.checkout(Lane::Owner, end).unwrap()];
        *fake.0.hangs.lock() = Duration::from_secs(5);
        let wait = |time| pool.checkout(Lane::Owner, Moment::now() + time);
        // What was under way before that may still come.
        while let Ok(other) = wait(HANGS * 2) {
            held.push(other);
        }
        // The calls under way are answered.
        held[0].is_answered();
        drop(held.swap_remove(0));
        held.push(pool.checkout(Lane::Owner, end).unwrap());
        let hung = wait(Duration::from_millis(20)).unwrap_err();
        assert_eq!(hung.kind(), ErrorKind::Timeout);
        let text = hung.to_string();
        assert!(text.starts_with("fake: no log-in within "), "{text}");
    }

    /// Rule "trouble is visible": the server said nothing to whoever asked it nothing.
    #[test]
    fn a_connection_that_comes_back_unused_is_no_contact() {
        let pool = pool(&Fake::default(), 1);
        let mut used = pool.checkout(Lane::Owner, soon()).unwrap();
        let opened = pool.last_contact();
        used.is_answered();
        drop(used);
        let answered = pool.last_contact();
        assert!(answered > opened);
        drop(pool.checkout(Lane::Owner, soon()).unwrap());
        drop(pool.try_checkout(Lane::Owner).unwrap());
        assert_eq!(pool.last_contact(), answered);
    }

    /// Attempts that were refused every 20 ms made the first log-in that timed out the tenth in a row, and the
    /// pause after it the longest.
    #[test]
    fn failures_of_another_kind_do_not_lengthen_the_pause() {
        let fake = Fake::default();
        fake.0.away.store(true, Ordering::SeqCst);
        let pool = pool(&fake, 1);
        let end = soon();
        let attempt = |more| {
            let before = fake.0.attempts.load(Ordering::SeqCst);
            while fake.0.attempts.load(Ordering::SeqCst) < before + more {
                assert!(!end.remaining().is_zero(), "nobody tries");
                assert!(pool.checkout(Lane::Other, end).is_err());
                thread::sleep(Duration::from_millis(1));
            }
        };
        attempt(10);
        fake.0.silent.store(true, Ordering::SeqCst);
        let late = || pool.checkout(Lane::Other, end).unwrap_err().kind() == ErrorKind::Timeout;
        while !late() {
            attempt(1);
        }
        fake.0.silent.store(false, Ordering::SeqCst);
        fake.0.away.store(false, Ordering::SeqCst);
        // 50 ms, or a few times that; it was 50 ms * 2^10.
        while pool.checkout(Lane::Other, end).is_err() {
            assert!(!end.remaining().is_zero(), "the pause does not end");
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// A server that counts abandoned handshakes locks the host out.
    #[test]
    fn after_a_failure_one_thread_at_a_time_tries_and_ever_more_slowly() {
        let fake = Fake::default();
        fake.0.away.store(true, Ordering::SeqCst);
        *fake.0.pause.lock() = Some(Duration::from_millis(100));
        let pool = Arc::new(pool(&fake, 8));
        // Connections for all are wanted, so r2d2 has up to eight attempts pending.
        let callers: Vec<_> = (0..8)
            .map(|_| {
                let pool = Arc::clone(&pool);
                thread::spawn(move || {
                    let by = Moment::now() + Duration::from_millis(1_000);
                    while !by.remaining().is_zero() {
                        assert!(pool.checkout(Lane::Owner, by).is_err());
                        thread::sleep(Duration::from_millis(1));
                    }
                })
            })
            .collect();
        *fake.0.hangs.lock() = Duration::from_millis(20);
        for caller in callers {
            caller.join().unwrap();
        }
        // Pauses of 100, 200, 400, ... ms: four or five attempts, and the two of the beginning.
        let attempts = fake.0.attempts.load(Ordering::SeqCst);
        assert!((2..=8).contains(&attempts), "{attempts} attempts in 1 s");
        assert!(fake.0.most_at_once.load(Ordering::SeqCst) <= 2);
    }

    /// One waiter, one connection, however long opening it takes.
    #[test]
    fn a_slow_server_is_not_asked_for_more_connections_than_are_wanted() {
        let fake = Fake::default();
        *fake.0.hangs.lock() = Duration::from_millis(150);
        let pool = pool(&fake, 8);
        for _ in 0..20 {
            drop(pool.checkout(Lane::Other, soon()).unwrap());
        }
        // The one that was opened ahead, one that the first caller asked for, and on a loaded machine one for
        // whoever was notified before the connection was in the list; without the rule all eight.
        assert!(fake.0.attempts.load(Ordering::SeqCst) <= 4);
    }

    /// Every call of an outage asked for one more, and all of them were opened at its end, each with a log-in.
    #[test]
    fn after_an_outage_no_more_connections_are_opened_than_are_wanted() {
        let fake = Fake::default();
        fake.0.away.store(true, Ordering::SeqCst);
        let pool = pool(&fake, 8);
        for _ in 0..50 {
            assert!(pool.checkout(Lane::Owner, soon()).is_err());
        }
        fake.0.away.store(false, Ordering::SeqCst);
        let end = soon();
        while pool.checkout(Lane::Owner, end).is_err() {
            assert!(!end.remaining().is_zero(), "it does not come back");
            thread::yield_now();
        }
        // r2d2 looks every 50 ms at what it could not open yet.
        thread::sleep(RETRY * 6);
        // The one that was opened ahead, the one that the first caller asked for, and one for whoever looked
        // before the first was in the list; without the rule all eight.
        let open = pool.usage().open;
        assert!((1..=3).contains(&open), "{open} connections for one caller");
        // Whoever wants more gets more.
        let all: Vec<_> = (0..8)
            .map(|_| pool.checkout(Lane::Owner, end).unwrap())
            .collect();
        assert_eq!(all.len(), 8);
    }

    /// The same where a connection is left: one that came while connecting failed must not wait for its return.
    #[test]
    fn whoever_came_while_connecting_failed_gets_a_connection_when_that_succeeds() {
        let fake = Fake::default();
        let pool = Arc::new(pool(&fake, 8));
        let held = pool.checkout(Lane::Owner, soon()).unwrap();
        // The one that was opened ahead may be there, too.
        thread::sleep(Duration::from_millis(50));
        let other = pool.try_checkout(Lane::Owner);
        fake.0.away.store(true, Ordering::SeqCst);
        let callers: Vec<_> = (0..4)
            .map(|_| {
                let pool = Arc::clone(&pool);
                thread::spawn(move || {
                    let connection = pool.checkout(Lane::Owner, soon()).unwrap();
                    // Nobody gives back before all have one.
                    thread::sleep(Duration::from_millis(500));
                    drop(connection);
                })
            })
            .collect();
        thread::sleep(Duration::from_millis(200));
        fake.0.away.store(false, Ordering::SeqCst);
        let end = Moment::now() + Duration::from_secs(20);
        let busy = || {
            let usage = pool.usage();
            usage.open - usage.idle
        };
        let before = 1 + u32::from(other.is_some());
        while busy() < before + 4 {
            assert!(!end.remaining().is_zero(), "{:?}", pool.usage());
            thread::sleep(Duration::from_millis(1));
        }
        for caller in callers {
            caller.join().unwrap();
        }
        drop((held, other));
    }

    /// Review M2: an `Other` slept beside idle connections until an owner's call ended.
    #[test]
    fn whoever_waits_gets_the_connection_that_comes_back() {
        let pool = Arc::new(pool(&Fake::default(), 4));
        for _ in 0..200 {
            let held: Vec<_> = (0..3)
                .map(|_| pool.checkout(Lane::Other, soon()).unwrap())
                .collect();
            let owner = pool.checkout(Lane::Owner, soon()).unwrap();
            let waits: Vec<_> = (0..3)
                .map(|_| {
                    let pool = Arc::clone(&pool);
                    thread::spawn(move || drop(pool.checkout(Lane::Other, soon()).unwrap()))
                })
                .collect();
            drop(held);
            // The owner keeps its connection all the while.
            for waits in waits {
                waits.join().unwrap();
            }
            drop(owner);
        }
    }

    #[test]
    fn a_broken_connection_is_not_used_again_and_suspects_go_with_it() {
        let pool = pool(&Fake::default(), 4);
        let mut three: Vec<_> = (0..3)
            .map(|_| pool.checkout(Lane::Owner, soon()).unwrap())
            .collect();
        let number = three[0].number;
        three[0].broken = true;
        drop(three);
        let mut kept = pool.checkout(Lane::Owner, soon()).unwrap();
        assert_ne!(kept.number, number);
        let kept_number = kept.number;
        let since = Moment::now();
        kept.is_answered();
        drop(kept);
        pool.discard_idle(since);
        let good = pool.checkout(Lane::Owner, soon()).unwrap();
        assert_eq!(good.number, kept_number, "heard of since");
        drop(good);
        let opened = pool.shared.connect.0.attempts.load(Ordering::SeqCst);
        pool.discard_idle(Moment::now());
        assert!(pool.checkout(Lane::Owner, soon()).unwrap().number >= opened);
    }

    /// Rule "dropping is stopping".
    #[test]
    fn dropping_waits_for_a_connect_under_way_but_not_for_ever() {
        let fake = Fake::default();
        *fake.0.hangs.lock() = Duration::from_secs(20);
        let pool = pool(&fake, 4);
        while fake.0.at_once.load(Ordering::SeqCst) == 0 {
            thread::sleep(Duration::from_millis(1));
        }
        let start = Moment::now();
        drop(pool);
        let took = Moment::now() - start;
        assert!(took >= FAREWELL, "{took:?}");
        assert!(took < Duration::from_secs(10), "{took:?}");
    }

    /// Many that ask for a short time, connections that break, and outages in which connecting hangs or fails.
    #[test]
    fn nobody_starves_after_an_outage() {
        let roll = |end: u64| rand::random::<u64>() % end;
        for size in [1, 2, 8] {
            let fake = Fake::default();
            let pool = pool(&fake, size);
            let stop = AtomicBool::new(false);
            let asks = |lane| {
                while !stop.load(Ordering::SeqCst) {
                    let by = Moment::now() + Duration::from_millis(roll(20));
                    if let Ok(mut connection) = pool.checkout(lane, by) {
                        connection.broken = roll(3) == 0;
                        thread::sleep(Duration::from_micros(roll(3000)));
                    }
                    thread::sleep(Duration::from_micros(roll(500)));
                }
            };
            thread::scope(|scope| {
                for _ in 0..3 {
                    scope.spawn(|| asks(Lane::Owner));
                    scope.spawn(|| asks(Lane::Other));
                }
                let starved = (0..20).any(|_| {
                    fake.0.away.store(true, Ordering::SeqCst);
                    *fake.0.hangs.lock() = Duration::from_micros(roll(8000));
                    thread::sleep(Duration::from_millis(roll(120)));
                    fake.0.away.store(false, Ordering::SeqCst);
                    *fake.0.hangs.lock() = Duration::ZERO;
                    let end = Moment::now() + Duration::from_secs(10);
                    while pool.checkout(Lane::Owner, end).is_err() && !end.remaining().is_zero() {
                        thread::sleep(Duration::from_millis(1));
                    }
                    end.remaining().is_zero()
                });
                stop.store(true, Ordering::SeqCst);
                assert!(!starved, "{:?}", pool.usage());
            });
        }
    }
}
