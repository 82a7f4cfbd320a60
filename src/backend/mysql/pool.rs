//! Connections shared by all of one factory. Theirs is no ping: a connection is good until a request
//! on it fails, and then it is thrown away, with those that idled beside it.
//!
//! Owners, who have something to lose, may use every connection; those who wait leave some for them. A
//! row that an operator has locked would else hang as many waiters as there are connections, and the
//! renewals of every other mutex with them.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use r2d2::{ManageConnection, NopErrorHandler, PooledConnection};
use scheduled_thread_pool::{OnPoolDropBehavior, ScheduledThreadPool};

use super::clock::ServerClock;
use super::fault::Fault;
use super::gate::{Gate, Pass};
use super::link::{Link, LinkOptions};
use super::server::Server;
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::fork::Origin;

/// Threads that open connections: two, so that one slow log-in does not hold up the rest.
const OPENERS: usize = 2;

/// How often a checkout that waits looks whether connecting failed.
const LOOK: Duration = Duration::from_millis(10);

/// The longest pause between two attempts to connect.
const MAX_BACKOFF: Duration = Duration::from_millis(500);

/// An idle connection is closed after this long.
const IDLE: Duration = Duration::from_secs(600);

/// A pool of [`Link`]s.
pub(crate) struct Pool {
    /// `None` only while dropping.
    inner: Option<r2d2::Pool<Manager>>,
    shared: Arc<Shared>,
    /// What everybody but owners passes.
    gate: Arc<Gate>,
    size: u32,
    origin: Origin,
}

/// A link on loan; goes back, or away if it was poisoned, when dropped.
pub(crate) type Checkout = PooledConnection<Manager>;

/// A link on loan to one who waits. Dropped from top to bottom: the link is back before the next one
/// comes for it.
pub(super) struct WaiterCheckout {
    link: Checkout,
    _pass: Pass,
}

/// What opens the connections of a pool.
pub(crate) struct Manager {
    shared: Arc<Shared>,
}

struct Shared {
    server: Server,
    options: LinkOptions,
    clock: ServerClock,
    /// When the last request that broke its connection was sent. Connections not heard of since then
    /// are suspect: a restarted server would otherwise be met as many times as there were idle ones,
    /// a failed call each. One that was heard of since is not: the trouble was not the server's.
    suspect: Mutex<Moment>,
    /// How the last attempt to connect failed, and when.
    trouble: Mutex<Option<(Moment, Error)>>,
}

impl Pool {
    /// A pool of at most `size` connections. Connects in the background: the server may be away.
    pub(crate) fn new(server: Server, options: LinkOptions, size: u32) -> Pool {
        let shared = Arc::new(Shared {
            server,
            options,
            clock: ServerClock::default(),
            suspect: Mutex::new(Moment::from_origin(Duration::ZERO)),
            trouble: Mutex::new(None),
        });
        let openers = ScheduledThreadPool::builder()
            .num_threads(OPENERS)
            .thread_name_pattern("contend-mysql-{}")
            // Else a dropped pool's threads would live on until its next sweep for idle connections.
            .on_drop_behavior(OnPoolDropBehavior::DiscardPendingScheduled)
            .build();
        let backoff = shared.patience().min(MAX_BACKOFF).max(LOOK);
        let inner = r2d2::Pool::builder()
            .max_size(size.max(1))
            .min_idle(Some(1))
            .test_on_check_out(false)
            .idle_timeout(Some(IDLE))
            // Its only use here: r2d2 pauses for up to half of it between attempts to connect.
            .connection_timeout(backoff * 2)
            .error_handler(Box::new(NopErrorHandler))
            .thread_pool(Arc::new(openers))
            .build_unchecked(Manager {
                shared: Arc::clone(&shared),
            });
        Pool {
            inner: Some(inner),
            shared,
            gate: Gate::for_pool(size),
            size,
            origin: Origin::here(),
        }
    }

    /// A pool like this one whose connections wait for an answer no longer than `patience`: how long
    /// they wait is fixed when they are opened.
    pub(crate) fn less_patient(&self, patience: Duration) -> Pool {
        let mut options = self.shared.options.clone();
        options.read_timeout = Some(patience);
        options.connect_timeout = options.connect_timeout.min(patience);
        options.lock_wait = patience;
        Pool::new(self.shared.server.clone(), options, self.size)
    }

    /// A connection, with time enough left until `by` for one request on it. While the server cannot
    /// be reached at all, the reason comes back as soon as it is known.
    pub(crate) fn checkout(&self, by: Moment) -> Result<Checkout> {
        self.await_in_turn(by, |pool, limit| {
            let mut link = pool.get_timeout(limit).ok()?;
            if self.shared.is_suspect(&link) {
                // Makes room for another.
                link.poison();
                return None;
            }
            Some(link)
        })
    }

    /// The same for one who owns nothing yet, and leaves some connections for those who do.
    pub(super) fn checkout_as_waiter(&self, by: Moment) -> Result<WaiterCheckout> {
        let pass = self.await_in_turn(by, |_, limit| self.gate.enter(limit))?;
        Ok(WaiterCheckout {
            link: self.checkout(by)?,
            _pass: pass,
        })
    }

    /// Waits with `take`, which tries for so long, until there is a connection or no hope of one.
    fn await_in_turn<T>(
        &self,
        by: Moment,
        mut take: impl FnMut(&r2d2::Pool<Manager>, Duration) -> Option<T>,
    ) -> Result<T> {
        self.origin.check()?;
        let Some(pool) = &self.inner else {
            return Err(Error::new(ErrorKind::Closed, "the MySQL pool is closed"));
        };
        let start = Moment::now();
        let deadline = by - self.shared.patience();
        loop {
            let left = deadline.remaining();
            if left.is_zero() {
                return Err(self.shared.why_not(start));
            }
            if let Some(taken) = take(pool, left.min(LOOK)) {
                return Ok(taken);
            }
            // With connections in use one of them will come back: wait for it. With none, how
            // connecting failed is all that there is to know.
            if pool.state().connections == 0
                && let Some(error) = self.shared.trouble_since(start)
            {
                return Err(error);
            }
        }
    }

    /// One request on a connection of its own; see [`Link::run`].
    pub(crate) fn run<T>(
        &self,
        by: Moment,
        work: impl FnOnce(&mut mysql::Conn) -> mysql::Result<T>,
    ) -> Result<T> {
        Ok(self.checkout(by)?.run(by, work)?)
    }

    /// A connection outside the pool, for what occupies one for long. Blocks while it connects.
    pub(crate) fn open_apart(&self, options: &LinkOptions) -> Result<Link, Fault> {
        Link::open(&self.shared.server, options, &self.shared.clock)
    }

    /// The server's clock as far as it is known.
    pub(crate) fn clock(&self) -> &ServerClock {
        &self.shared.clock
    }

    /// The longest that one request can take.
    pub(crate) fn patience(&self) -> Duration {
        self.shared.patience()
    }

    /// How its connections are opened.
    pub(crate) fn options(&self) -> &LinkOptions {
        &self.shared.options
    }
}

impl Deref for WaiterCheckout {
    type Target = Link;

    fn deref(&self) -> &Link {
        &self.link
    }
}

impl DerefMut for WaiterCheckout {
    fn deref_mut(&mut self) -> &mut Link {
        &mut self.link
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if let Some(inner) = self.inner.take()
            && !self.origin.is_here()
        {
            // In a forked child the sockets are the parent's: closing would say goodbye for it.
            std::mem::forget(inner);
        }
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool")
            .field("server", &self.shared.server)
            .finish_non_exhaustive()
    }
}

impl ManageConnection for Manager {
    type Connection = Link;
    type Error = Error;

    fn connect(&self) -> Result<Link> {
        match Link::open(
            &self.shared.server,
            &self.shared.options,
            &self.shared.clock,
        ) {
            Ok(link) => {
                self.shared.trouble.lock().take();
                Ok(link)
            }
            Err(fault) => {
                let error = fault
                    .into_error()
                    .context(format_args!("cannot connect to {}", self.shared.server));
                *self.shared.trouble.lock() = Some((Moment::now(), error.clone()));
                Err(error)
            }
        }
    }

    fn is_valid(&self, _link: &mut Link) -> Result<()> {
        Ok(())
    }

    fn has_broken(&self, link: &mut Link) -> bool {
        if self.shared.is_suspect(link) {
            return true;
        }
        if link.is_poisoned() {
            let (sent, _) = link.last_heard();
            let mut suspect = self.shared.suspect.lock();
            *suspect = suspect.max(sent);
            return true;
        }
        false
    }
}

impl fmt::Debug for Manager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Manager")
    }
}

impl Shared {
    fn patience(&self) -> Duration {
        self.options.read_timeout.unwrap_or_default()
    }

    /// Whether a connection broke with a request sent after the last one that this one answered.
    fn is_suspect(&self, link: &Link) -> bool {
        let (_, answered) = link.last_heard();
        answered < *self.suspect.lock()
    }

    fn trouble_since(&self, start: Moment) -> Option<Error> {
        self.trouble
            .lock()
            .as_ref()
            .filter(|(at, _)| *at >= start)
            .map(|(_, error)| error.clone())
    }

    /// Why there was no connection in time.
    fn why_not(&self, start: Moment) -> Error {
        self.trouble_since(start).unwrap_or_else(|| {
            Error::new(
                ErrorKind::Timeout,
                format!(
                    "no connection to {} became free in time; if this happens while the server is \
                     well, raise pool_size",
                    self.server
                ),
            )
        })
    }
}
