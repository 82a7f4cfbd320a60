//! Mutexes in a table of a MySQL or MariaDB server.
//!
//! One row per mutex (`sql/init-mutex.sql`), the same columns as Simba's, so that its contenders and
//! ours take turns. The server's clock decides when a lease has run out; how long an owner may believe
//! is counted locally, from before it asked.
//!
//! Round trips: one to acquire a free mutex (the fence comes back with the UPDATE), one to renew, one
//! to release. A loser pays one more to learn who owns. A contender that waits reads, which locks
//! nothing, and only if it cannot be woken.
//!
//! # Wake-ups
//! A service that leads holds a lock with a name on the server (`GET_LOCK`), on a connection that all
//! leaders of a factory share. Whoever waits has a connection of its own, on which it first waits to be
//! the first of all who wait (a second name), and then for that name: so it is woken within a
//! millisecond by the release or the death of the owner's process. Beyond
//! [`max_wake_connections`](Builder::max_wake_connections) contenders are served by one polling thread
//! per factory, with one statement for all of them.
//!
//! Lockers of one factory that wait for the same mutex stand in one line, of which only the first waits
//! on the server. A release through the same factory rings it as soon as it is sent: that costs neither
//! a poll nor a round trip beside the two of the row. A locker's short hold takes no name: where it is
//! in another process, the first of those that wait gets the name, looks at the row every 1 to 10 ms on
//! behalf of all, and keeps the name when it wins, so that under contention the mutex is handed on and
//! nobody polls.
//!
//! # Order
//! Services that have a wake connection own in the order in which they came, over all processes.
//! Lockers do within a factory; factories that contend for the same mutex take turns in that order, of
//! 25 ms, or of one hold where that is longer, so that none starves. Without wake-ups there is no order,
//! and who gets in between the short holds of others is a matter of chance.
//!
//! # What it does not protect from
//! Asynchronous replication can lose an acknowledged row with its primary, and then two may believe:
//! check the fence where it matters. On a table with Simba's `INT` version the fence counts seconds
//! (or acquisitions, where there is more than one per second); deleting a row there may bring an old
//! fence back.

pub(crate) mod builder;
mod clock;
pub(crate) mod fault;
mod gate;
mod line;
pub(crate) mod link;
mod poller;
pub(crate) mod pool;
mod repository;
mod seat;
pub(crate) mod server;
mod store;
pub(crate) mod table;
mod wake;
mod watch;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use self::builder::{check_read_timeout, default_read_timeout};
use self::line::Lines;
use self::poller::Poller;
use self::seat::MysqlSeat;
use self::store::Store;
use self::wake::{Hub, WakeName};
use self::watch::MysqlWatch;
use super::{Backend, Place, Seat, Watch};
use crate::error::Result;
use crate::factory::Factory;
use crate::lease::Lease;
use crate::url::Url;

pub use self::builder::Builder;
pub use self::repository::{MutexRow, Repository};
pub use self::server::Tls;
pub use self::table::INIT_SQL;

pub(super) fn connect(url: &Url) -> Result<Factory> {
    Builder::from_url(url)?.build()
}

#[derive(Debug)]
pub(crate) struct Mysql {
    realm: String,
    database: Arc<Database>,
}

/// What the seats of one factory share. Dropped from top to bottom: first who waits, last the pool.
#[derive(Debug)]
struct Database {
    lines: Lines,
    hub: Hub,
    poller: Poller,
    store: Arc<Store>,
    /// For leases too short for the patience of that one's connections, by how patient theirs are.
    hasty: Mutex<HashMap<Duration, Arc<Store>>>,
    name: String,
}

impl Database {
    fn new(
        store: Arc<Store>,
        name: String,
        lease: Lease,
        poll_interval: Duration,
        wake_connections: usize,
    ) -> Database {
        // A name outlives the lease of an owner that froze by about as long as the lease.
        let silence = lease
            .total()
            .clamp(Duration::from_secs(6), Duration::from_secs(60));
        Database {
            lines: Lines::default(),
            hub: Hub::new(Arc::clone(&store), poll_interval, silence, wake_connections),
            poller: Poller::new(Arc::clone(&store), poll_interval),
            store,
            hasty: Mutex::default(),
            name,
        }
    }

    /// What a contender with this lease calls through: an answer that takes longer than a fifth of its
    /// ttl must not be waited for.
    fn store_for(&self, lease: Lease) -> Arc<Store> {
        if check_read_timeout(self.store.pool.patience(), lease).is_ok() {
            return Arc::clone(&self.store);
        }
        // By powers of two, so that many leases need few pools.
        let millis = default_read_timeout(lease).as_millis().max(1).ilog2();
        let patience = Duration::from_millis(1 << millis);
        let mut hasty = self.hasty.lock();
        let store = hasty
            .entry(patience)
            .or_insert_with(|| Arc::new(self.store.less_patient(patience)));
        Arc::clone(store)
    }

    fn wake_name(&self, mutex: &str) -> WakeName {
        WakeName::new(&self.name, self.store.table.name(), mutex)
    }
}

impl Mysql {
    fn new(realm: String, database: Database) -> Mysql {
        Mysql {
            realm,
            database: Arc::new(database),
        }
    }
}

impl Backend for Mysql {
    fn realm(&self) -> &str {
        &self.realm
    }

    fn seat(&self, place: &Place) -> Result<Box<dyn Seat>> {
        let store = self.database.store_for(place.lease);
        if let Some(statements) = store.table.known() {
            store.check_id(&place.id, statements.max_id)?;
        }
        Ok(Box::new(MysqlSeat::new(&self.database, store, place)))
    }

    fn watch(&self, mutex: &Arc<str>) -> Result<Box<dyn Watch>> {
        Ok(Box::new(MysqlWatch::new(&self.database, mutex)))
    }
}
