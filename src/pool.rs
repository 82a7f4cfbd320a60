//! One pool of connections on r2d2, for Redis and MySQL.
//!
//! r2d2 opens connections in a thread of its own, never in the caller's. Added here:
//! - Some connections are kept for owners.
//! - A server that cannot be reached is known at once, and asked ever more slowly.
//! - A request that finds a connection closed has the other idle ones discarded.
//!
//! No connection is pinged: it is good until a request on it fails.

use std::ops::{Deref, DerefMut};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded};
use parking_lot::Mutex;
use r2d2::{ManageConnection, NopErrorHandler, PooledConnection};
use scheduled_thread_pool::{OnPoolDropBehavior, ScheduledThreadPool};

use crate::backend::PoolUse;
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::probe::Probed;
use crate::url::ensure;

/// The largest pool: r2d2 makes room for all of its connections at once.
const LARGEST: u32 = 1_000;

/// r2d2 tells a waiting caller neither of a failed connect nor of a broken connection that came back, so the caller
/// looks again: after this long at first, then after four times as long each time. With each look r2d2 opens one more
/// connection, so fast looks would open many on a slow network.
const FIRST_LOOK: Duration = Duration::from_millis(10);

/// The longest between two such looks.
const LAST_LOOK: Duration = Duration::from_millis(320);

/// How often r2d2 asks again for a connection that could not be opened. [`Connect::longest_pause`] decides whether
/// that becomes an attempt.
const RETRY: Duration = Duration::from_millis(50);

/// The pause after a first failed attempt to connect; it doubles with each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(40);

/// How connections to one technology are opened.
pub(crate) trait Connect: Send + Sync + 'static {
    /// A connection that is ready for requests.
    type Connection: Pooled;

    /// Opens a connection. Runs in the pool's thread, so it may block, but not for ever.
    ///
    /// # Errors
    /// Any, with the server's name in the message.
    fn connect(&self) -> Result<Self::Connection>;

    /// Returns the longest pause between attempts to connect while they fail with this error.
    fn longest_pause(&self, error: &Error) -> Duration;

    /// Returns the server's name for messages, without a credential.
    fn server(&self) -> String;
}

/// What a pool must know about a connection.
pub(crate) trait Pooled: Send + 'static {
    /// Returns `true` if the connection must not be used again: a request on it has no known outcome, or it says that
    /// it is read-only.
    fn is_broken(&self) -> bool;

    /// Returns when the server last answered on it: when it was opened, or later.
    fn last_reply_at(&self) -> Moment;
}

/// Which connections a request may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lane {
    /// An owner's request: all connections.
    Owner,
    /// Any other request: a quarter of the connections, at least one, is left to owners.
    Other,
}

/// A pool of connections to one server.
pub(crate) struct Pool<C: Connect> {
    inner: r2d2::Pool<Manager<C>>,
    shared: Arc<Shared<C>>,
    /// One message for each connection that callers without an ownership may still take.
    free: Receiver<()>,
    freed: Sender<()>,
}

/// A connection on loan; goes back when dropped, or is closed if it is broken.
pub(crate) struct Checkout<C: Connect> {
    // Dropped first: the connection is back before the next caller is let in.
    connection: PooledConnection<Manager<C>>,
    _permit: Permit,
}

/// r2d2's side of a pool.
struct Manager<C>(Arc<Shared<C>>);

struct Shared<C> {
    connect: C,
    probe: Probed,
    /// How the last attempt to connect failed, if it did.
    failure: Mutex<Option<Failure>>,
    /// A connection without an answer since then is not used again; nanoseconds of the boot-time clock.
    stale_before: AtomicU64,
}

#[derive(Clone)]
struct Failure {
    error: Error,
    pause: Duration,
    next_attempt_at: Moment,
}

/// The right to use a connection. That of a caller without an ownership goes back when dropped.
struct Permit(Option<Sender<()>>);

impl<C: Connect> Pool<C> {
    /// Makes a pool and starts to open a first connection. The server may be away. `thread` is the name of the thread
    /// that opens connections, `size` the most of them. An idle one is closed after `idle_timeout`, or up to 30 s
    /// later.
    ///
    /// # Errors
    /// `Unavailable` where the system allows no more threads.
    pub(crate) fn new(
        connect: C,
        thread: &str,
        size: u32,
        idle_timeout: Duration,
        probe: Probed,
    ) -> Result<Pool<C>> {
        let size = size.max(1);
        let shared = Arc::new(Shared {
            connect,
            probe,
            failure: Mutex::default(),
            stale_before: AtomicU64::new(0),
        });
        let others = size - size.div_ceil(4).min(size - 1);
        let (freed, free) = bounded(others as usize);
        (0..others).for_each(|_| drop(Permit(Some(freed.clone()))));
        let build = || {
            let opener = ScheduledThreadPool::builder()
                // One, so that there is one attempt to connect at a time.
                .num_threads(1)
                .thread_name_pattern(thread)
                // Otherwise the thread of a dropped pool lives on until r2d2's next look at idle connections.
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
                .thread_pool(Arc::new(opener))
                .build_unchecked(Manager(Arc::clone(&shared)))
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
            inner,
            shared,
            free,
            freed,
        })
    }

    /// Returns a connection as soon as there is one for `lane`. While there is none at all because connecting fails,
    /// returns that error at once.
    ///
    /// # Errors
    /// Any; nothing was sent.
    pub(crate) fn checkout(&self, lane: Lane, by: Moment) -> Result<Checkout<C>> {
        match self.try_checkout(lane) {
            Some(idle) => Ok(idle),
            None => self.wait(lane, by),
        }
    }

    /// Returns an idle connection that `lane` may use now, or nothing. Never waits.
    pub(crate) fn try_checkout(&self, lane: Lane) -> Option<Checkout<C>> {
        Some(Checkout {
            _permit: self.permit(lane, Duration::ZERO)?,
            connection: self.inner.try_get()?,
        })
    }

    /// Has the idle connections without an answer since `since` closed: the server restarted, closed them, or became
    /// read-only. Without this, each of them would fail a call.
    pub(crate) fn discard_idle(&self, since: Moment) {
        let stale_before = &self.shared.stale_before;
        stale_before.fetch_max(nanos(since), Ordering::Relaxed);
    }

    /// Tells the probe that a connection broke.
    pub(crate) fn lost(&self, error: &Error) {
        self.shared.probe.tell(|probe| probe.disconnected(error));
    }

    /// Returns how the connections are used.
    pub(crate) fn usage(&self) -> PoolUse {
        let state = self.inner.state();
        PoolUse::new(
            state.connections,
            state.idle_connections,
            self.inner.max_size(),
        )
    }

    /// What opens the connections.
    pub(crate) fn connector(&self) -> &C {
        &self.shared.connect
    }

    /// Waits for a connection that comes back or is opened, and has one more opened if there may be more.
    fn wait(&self, lane: Lane, by: Moment) -> Result<Checkout<C>> {
        let since = Moment::now();
        let permit = self.permit(lane, by - since);
        let permit = permit.ok_or_else(|| self.exhausted(since))?;
        let mut look = Duration::ZERO;
        loop {
            if let Ok(connection) = self.inner.get_timeout(look) {
                return Ok(Checkout {
                    connection,
                    _permit: permit,
                });
            }
            // With connections in use, one of them will come back.
            if self.inner.state().connections == 0
                && let Some(error) = self.shared.connect_error()
            {
                return Err(error);
            }
            let left = by.remaining();
            if left.is_zero() {
                return Err(self.exhausted(since));
            }
            look = (look * 4).clamp(FIRST_LOOK, LAST_LOOK).min(left);
        }
    }

    /// Waits for the right to use a connection.
    fn permit(&self, lane: Lane, wait: Duration) -> Option<Permit> {
        if lane == Lane::Owner {
            return Some(Permit(None));
        }
        // With one in reserve, the clock is not read.
        (self.free.try_recv().ok()).or_else(|| self.free.recv_timeout(wait).ok())?;
        Some(Permit(Some(self.freed.clone())))
    }

    /// Why no connection came since `since`.
    fn exhausted(&self, since: Moment) -> Error {
        self.shared.connect_error().unwrap_or_else(|| {
            let waited = (Moment::now() - since).as_secs_f64();
            let PoolUse { open, idle, size } = self.usage();
            Error::new(
                ErrorKind::Timeout,
                format!(
                    "{}: no connection came free in {waited:.1} s ({open} open, {} in use); the server is slow, or \
                     pool_size ({size}) too small",
                    self.shared.connect.server(),
                    open.saturating_sub(idle),
                ),
            )
            .not_sent()
        })
    }
}

impl<C: Connect> Deref for Checkout<C> {
    type Target = C::Connection;

    fn deref(&self) -> &C::Connection {
        &self.connection
    }
}

impl<C: Connect> DerefMut for Checkout<C> {
    fn deref_mut(&mut self) -> &mut C::Connection {
        &mut self.connection
    }
}

impl<C: Connect> ManageConnection for Manager<C> {
    type Connection = C::Connection;
    type Error = Error;

    /// Opens a connection; in the pause after a failure, returns that instead.
    fn connect(&self) -> Result<C::Connection> {
        let shared = &*self.0;
        let earlier = shared.failure.lock().clone();
        if let Some(failure) = &earlier
            && !failure.next_attempt_at.remaining().is_zero()
        {
            return Err(failure.error.clone());
        }
        // r2d2 would never again count the connection on which a panic came.
        let opened = catch_unwind(AssertUnwindSafe(|| shared.connect.connect()));
        let opened = opened.unwrap_or_else(|_| {
            let message = format!("{}: connecting panicked", shared.connect.server());
            Err(Error::new(ErrorKind::Panicked, message))
        });
        let opened = opened.map_err(Error::not_sent);
        *shared.failure.lock() = opened.as_ref().err().map(|error| {
            let doubled = earlier.map_or(FIRST_PAUSE, |earlier| earlier.pause * 2);
            let pause = doubled.min(shared.connect.longest_pause(error));
            Failure {
                error: error.clone(),
                pause,
                next_attempt_at: Moment::now() + pause,
            }
        });
        shared.probe.tell(|probe| match &opened {
            Ok(_) => probe.connected(),
            Err(error) => probe.disconnected(error),
        });
        opened
    }

    /// Asks the server nothing.
    fn is_valid(&self, connection: &mut C::Connection) -> Result<()> {
        if nanos(connection.last_reply_at()) < self.0.stale_before.load(Ordering::Relaxed) {
            return Err(Error::new(ErrorKind::Closed, "stale"));
        }
        Ok(())
    }

    fn has_broken(&self, connection: &mut C::Connection) -> bool {
        connection.is_broken()
    }
}

impl<C: Connect> Shared<C> {
    fn connect_error(&self) -> Option<Error> {
        let failure = self.failure.lock();
        failure.as_ref().map(|failure| failure.error.clone())
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        // There is room for all.
        let _ = self.0.take().map(|freed| freed.try_send(()));
    }
}

/// Refuses a size that cannot work.
///
/// # Errors
/// `InvalidInput`, with the limits.
pub(crate) fn check_size(size: u32) -> Result<()> {
    let is_possible = (1..=LARGEST).contains(&size);
    ensure(is_possible, "a pool_size must be from 1 to 1000")
}

fn nanos(at: Moment) -> u64 {
    u64::try_from(at.since_origin().as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, AtomicUsize};
    use std::thread;

    /// A server that can be away, slow, or panic.
    #[derive(Clone, Default)]
    struct Fake(Arc<FakeServer>);

    #[derive(Default)]
    struct FakeServer {
        away: AtomicBool,
        panics: AtomicBool,
        hangs: Mutex<Duration>,
        attempts: AtomicUsize,
        at_once: AtomicUsize,
        most_at_once: AtomicUsize,
        longest_pause: Mutex<Duration>,
    }

    struct FakeConnection {
        number: usize,
        broken: bool,
        last_reply_at: Moment,
    }

    impl Pooled for FakeConnection {
        fn is_broken(&self) -> bool {
            self.broken
        }

        fn last_reply_at(&self) -> Moment {
            self.last_reply_at
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
            if server.away.load(Ordering::SeqCst) {
                return Err(Error::new(
                    ErrorKind::Unreachable,
                    "fake: connection refused",
                ));
            }
            Ok(FakeConnection {
                number,
                broken: false,
                last_reply_at: Moment::now(),
            })
        }

        fn longest_pause(&self, _: &Error) -> Duration {
            (*self.0.longest_pause.lock()).max(Duration::from_millis(20))
        }

        fn server(&self) -> String {
            "fake".to_owned()
        }
    }

    fn pool(fake: &Fake, size: u32) -> Pool<Fake> {
        let idle_timeout = Duration::from_secs(600);
        Pool::new(fake.clone(), "fake", size, idle_timeout, Probed::default()).unwrap()
    }

    fn soon() -> Moment {
        Moment::now() + Duration::from_secs(30)
    }

    #[test]
    fn quarter_of_connections_is_kept_for_owners() {
        let fake = Fake::default();
        for (size, inside) in [(1, 1), (2, 1), (3, 2), (4, 3), (5, 3), (8, 6), (100, 75)] {
            assert_eq!(pool(&fake, size).free.len(), inside, "of {size}");
        }
        let pool = pool(&fake, 4);
        let others: Vec<_> = (0..3)
            .map(|_| pool.checkout(Lane::Other, soon()).unwrap())
            .collect();
        drop(pool.checkout(Lane::Owner, soon()).unwrap());
        let error = pool.checkout(Lane::Other, Moment::now()).err().unwrap();
        let says = "fake: no connection came free in 0.0 s (4 open, 3 in use); the server is slow, or pool_size (4) \
                    too small";
        assert_eq!(error.to_string(), says);
        assert!(error.is_not_sent());
        assert!(pool.try_checkout(Lane::Other).is_none());
        assert!(pool.try_checkout(Lane::Owner).is_some());
        drop(others);
        assert!(pool.try_checkout(Lane::Other).is_some());
    }

    /// What panics once need not panic the next time: `lock()` must not give up on that.
    #[test]
    fn panic_while_connecting_is_transient() {
        let fake = Fake::default();
        fake.0.panics.store(true, Ordering::SeqCst);
        let pool = pool(&fake, 4);
        let error = pool.checkout(Lane::Other, soon()).err().unwrap();
        assert_eq!(error.to_string(), "fake: connecting panicked");
        assert!(error.is_transient() && error.is_not_sent(), "{error:?}");
        fake.0.panics.store(false, Ordering::SeqCst);
        let end = soon();
        while pool.checkout(Lane::Other, end).is_err() {
            assert!(!end.remaining().is_zero(), "it does not come back");
            thread::yield_now();
        }
    }

    #[test]
    fn absent_server_is_known_at_once_and_by_its_error() {
        let fake = Fake::default();
        fake.0.away.store(true, Ordering::SeqCst);
        let pool = pool(&fake, 4);
        let start = Moment::now();
        for _ in 0..20 {
            let error = pool.checkout(Lane::Other, soon()).err().unwrap();
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
    }

    /// A server that counts abandoned handshakes locks the host out.
    #[test]
    fn failing_server_is_asked_one_at_a_time_and_ever_more_slowly() {
        let fake = Fake::default();
        fake.0.away.store(true, Ordering::SeqCst);
        *fake.0.longest_pause.lock() = Duration::from_secs(60);
        *fake.0.hangs.lock() = Duration::from_millis(20);
        let pool = pool(&fake, 8);
        thread::scope(|scope| {
            // Connections for all are wanted, so r2d2 has up to eight attempts pending.
            for _ in 0..8 {
                scope.spawn(|| {
                    let by = Moment::now() + Duration::from_millis(1_000);
                    while !by.remaining().is_zero() {
                        assert!(pool.checkout(Lane::Owner, by).is_err());
                        thread::sleep(Duration::from_millis(1));
                    }
                });
            }
        });
        // Pauses of 40, 80, 160, 320, 640 ms: at most six attempts.
        let attempts = fake.0.attempts.load(Ordering::SeqCst);
        assert!((2..=6).contains(&attempts), "{attempts} attempts in 1 s");
        assert_eq!(fake.0.most_at_once.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn connection_that_comes_back_serves_a_waiter() {
        let pool = pool(&Fake::default(), 4);
        for _ in 0..200 {
            let held: Vec<_> = (0..3)
                .map(|_| pool.checkout(Lane::Other, soon()).unwrap())
                .collect();
            // The owner keeps its connection all the while.
            let _owner = pool.checkout(Lane::Owner, soon()).unwrap();
            thread::scope(|scope| {
                for _ in 0..3 {
                    scope.spawn(|| drop(pool.checkout(Lane::Other, soon()).unwrap()));
                }
                drop(held);
            });
        }
    }

    /// A broken connection that comes back wakes no caller in r2d2.
    #[test]
    fn waiters_are_served_after_all_connections_broke() {
        let pool = pool(&Fake::default(), 4);
        let mut held: Vec<_> = (0..4)
            .map(|_| pool.checkout(Lane::Owner, soon()).unwrap())
            .collect();
        thread::scope(|scope| {
            let waiters: Vec<_> = (0..8)
                .map(|number| {
                    let lane = [Lane::Owner, Lane::Other][number % 2];
                    let pool = &pool;
                    scope.spawn(move || pool.checkout(lane, soon()).map(drop))
                })
                .collect();
            // Long enough for them to wait in r2d2.
            thread::sleep(Duration::from_millis(50));
            held.iter_mut()
                .for_each(|connection| connection.broken = true);
            drop(held);
            for waiter in waiters {
                waiter.join().unwrap().unwrap();
            }
        });
    }

    #[test]
    fn broken_and_stale_connections_are_not_used_again() {
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
        kept.last_reply_at = Moment::now();
        drop(kept);
        pool.discard_idle(since);
        let good = pool.checkout(Lane::Owner, soon()).unwrap();
        assert_eq!(good.number, kept_number, "it answered since");
        drop(good);
        let opened = pool.connector().0.attempts.load(Ordering::SeqCst);
        pool.discard_idle(Moment::now());
        assert!(pool.checkout(Lane::Owner, soon()).unwrap().number >= opened);
    }

    /// Many that ask for a short time, connections that break, and outages in which connecting hangs or fails.
    #[test]
    fn no_lane_starves_after_an_outage() {
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
                let starved = (0..20).any(|round| {
                    fake.0.away.store(true, Ordering::SeqCst);
                    *fake.0.hangs.lock() = Duration::from_micros(roll(8000));
                    thread::sleep(Duration::from_millis(roll(120)));
                    fake.0.away.store(false, Ordering::SeqCst);
                    *fake.0.hangs.lock() = Duration::ZERO;
                    let lane = [Lane::Owner, Lane::Other][round % 2];
                    let end = Moment::now() + Duration::from_secs(10);
                    while pool.checkout(lane, end).is_err() && !end.remaining().is_zero() {
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
