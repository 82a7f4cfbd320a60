//! Mutexes in a table of a MySQL or MariaDB server.
//!
//! ```no_run
//! use contend::mysql;
//!
//! let factory = contend::connect("mysql://app:secret@db.internal/jobs?create_table=true")?;
//! // The same with a builder:
//! let factory = mysql::Builder::new("db.internal", "jobs")
//!     .user("app")
//!     .password("secret")
//!     .create_table(true)
//!     .build()?;
//! let guard = factory.locker("invoices").build()?.lock()?;
//! # Ok::<(), contend::Error>(())
//! ```
//!
//! # How a mutex changes hands
//!
//! ```text
//!  A                        row of the mutex                              B
//!  UPDATE acquire ────────► A owns, fence 7
//!                           B's token is queued ◄──────── UPDATE register
//!                                                         WAIT (it blocks)
//!  UPDATE release 7 ──────► handed to B's token for 500 ms
//!  KILL QUERY ──────────────────────────────────────────► WAIT ends: wakes
//!                           B owns, fence 8 ◄───────────── UPDATE acquire
//! ```
//!
//! A mutex is one row (`sql/init-mutex.sql`), with the columns of Simba 4, so contenders of both libraries take turns.
//! An acquire of a free mutex, a renewal and a release are one round trip each. A refused attempt takes one more, to
//! learn who owns. Each statement is a file in `sql/`, which begins with the invariant that it keeps.
//!
//! The server's clock decides when a lease has ended. An acquire says until when it is wanted, so one that arrives late
//! does nothing.
//!
//! # Waiting
//! The column `waiters` lists the waiting contenders by their tokens. Two connections of a process wait for all of its
//! mutexes:
//!
//! ```text
//!  blocker   idle, holds the named lock contend:wait:PROCESS
//!  waiter    holds the named lock contend:PROCESS, and runs WAIT
//!  releaser  KILL QUERY IS_USED_LOCK('contend:PROCESS') ends the WAIT
//! ```
//!
//! WAIT looks at the rows and then blocks on the lock of the blocker. It finds a hand-over that came before it. If the
//! process dies, the server notices the end of the idle connection at once, and with it ends the WAIT.
//! Lockers of one process and mutex pass one at a time, so only one of them stands in the row.
//!
//! Contenders poll where they cannot be woken: on a Galera cluster, with multi-primary replication, behind a proxy that
//! shares connections, on a server that refuses `GET_LOCK`, and with `wakeups=off`. This is logged, and
//! `Factory::health` says why.
//!
//! # URL parameters
//! Those of [`Builder`], by name: `ttl`, `transition`, `initial_delay`, `socket`, `table`, `create_table`,
//! `table_prefix`, `pool_size`, `connect_timeout`, `wakeups` (`on`, `off`), `poll_interval`, `tls`, `tls_ca`,
//! `tls_cert`, `tls_key`.
//!
//! # Order
//! First come, first served within a process; processes take turns. Without wake-ups there is no order
//! between processes.
//!
//! # What it does not protect against
//! Asynchronous replication can lose an acknowledged row with its primary. Two contenders may then believe that they
//! own: check the fence where it matters. All processes that share a mutex should use one MySQL account. Those of
//! another account cannot be woken, and look once a second.

pub(crate) mod builder;
pub(crate) mod connection;
mod contender;
pub(crate) mod error;
mod observer;
mod permits;
mod repository;
mod rows;
pub(crate) mod server;
pub(crate) mod table;
mod token;
mod waiting;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use self::connection::{Connector, MysqlPool};
use self::contender::MysqlContender;
use self::observer::MysqlObserver;
use self::permits::{MysqlPermits, Statements};
use self::rows::{Call, Rows, Whose};
use self::waiting::Waiting;
use super::{
    Backend, Condition, Contender, Participant, PermitStore, RawContender, RawObserver, Wakeups,
};
use crate::clock::Moment;
use crate::error::Result;
use crate::factory::Factory;
use crate::owner::MutexOwner;
use crate::parker::Unparker;
use crate::pool::Lane;
use crate::probe::{Probe, Probed};
use crate::url::Url;

pub use self::builder::Builder;
pub use self::repository::{MutexRow, Repository};
pub use self::table::{INIT_SQL, UPGRADE_SQL};

/// An idle connection is closed after this long.
const IDLE: Duration = Duration::from_secs(600);

pub(super) fn connect(url: &Url) -> Result<Factory> {
    Builder::from_url(url)?.build()
}

/// The mutexes of one table.
#[derive(Debug)]
pub(crate) struct Mysql {
    realm: String,
    database: Arc<Database>,
    /// Of the permits, which use the connections of the mutexes.
    statements: Arc<Statements>,
}

/// What the contenders of one factory share.
struct Database {
    rows: Arc<Rows>,
    waiting: Arc<Waiting>,
    poll_interval: Duration,
    probe: Probed,
}

impl Database {
    fn new(
        connector: Connector,
        pool_size: u32,
        poll_interval: Duration,
        wakeups: bool,
    ) -> Result<Database> {
        let probe = Probed::default();
        let rows = Arc::new(Rows {
            table: Arc::clone(&connector.table),
            pool: MysqlPool::new(connector, "contend-mysql", pool_size, IDLE, probe.clone())?,
        });
        let wakeups = match wakeups {
            true => Wakeups::Untried,
            false => Wakeups::Polling("wakeups=off".into()),
        };
        Ok(Database {
            waiting: Arc::new(Waiting::new(Arc::clone(&rows), wakeups)),
            rows,
            poll_interval,
            probe,
        })
    }

    /// Begins a call that loses nothing if it waits.
    fn call(&self, by: Moment) -> Result<Call<'_>> {
        self.rows.call(Lane::Other, by)
    }

    /// Ends an ownership and wakes the next contender. Returns `false` if there was none.
    fn release(&self, mutex: &str, whose: Whose<'_>, by: Moment) -> Result<bool> {
        let mut call = self.rows.call(Lane::Owner, by)?;
        let next = call.release(mutex, whose)?;
        if let Some(next) = next {
            self.waiting.wake(&mut call, mutex, next);
        }
        Ok(next.is_some())
    }
}

impl fmt::Debug for Database {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Database({})", self.rows.pool.connector().server)
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        self.waiting.stop();
    }
}

impl Backend for Mysql {
    fn realm(&self) -> &str {
        &self.realm
    }

    fn one_per_process(&self) -> bool {
        true
    }

    fn permits(&self) -> Result<Arc<dyn PermitStore>> {
        let store = MysqlPermits::new(&self.statements, &self.database.rows);
        Ok(Arc::new(store))
    }

    fn contender(&self, contender: &Contender, wake: &Unparker) -> Result<Box<dyn RawContender>> {
        let contender = MysqlContender::new(&self.database, contender, wake);
        Ok(Box::new(contender))
    }

    /// No observer is woken: its view says when to look again.
    fn observer(&self, mutex: &Arc<str>, _wake: &Unparker) -> Result<Box<dyn RawObserver>> {
        Ok(Box::new(MysqlObserver {
            database: Arc::clone(&self.database),
            mutex: Arc::clone(mutex),
        }))
    }

    fn ping(&self, by: Moment) -> Result<()> {
        self.database.call(by)?.look("").map(drop)
    }

    fn owner(&self, mutex: &Arc<str>, by: Moment) -> Result<MutexOwner> {
        self.database.call(by)?.owner(mutex)
    }

    /// The tokens of the contenders that wait; first the one that the mutex is handed over to.
    fn participants(&self, mutex: &Arc<str>, by: Moment) -> Result<Vec<Participant>> {
        let Some(row) = self.database.call(by)?.look(mutex)? else {
            return Ok(Vec::new());
        };
        let handed = row.owner_id.strip_prefix('~');
        let handed = handed.filter(|_| !row.left.is_zero());
        let tokens = handed.into_iter().chain(row.tokens());
        Ok(tokens.map(|token| Participant::new(token, None)).collect())
    }

    fn list(&self, by: Moment) -> Result<Vec<Arc<str>>> {
        self.database.call(by)?.list()
    }

    /// The owner learns of it with its next renewal: owning needs no connection that could be woken.
    fn revoke(&self, mutex: &Arc<str>, fence: u64, by: Moment) -> Result<bool> {
        self.database.release(mutex, Whose::Fence(fence), by)
    }

    fn last_run(&self, mutex: &Arc<str>, by: Moment) -> Result<Option<Duration>> {
        let row = self.database.call(by)?.look(mutex)?;
        let row = row.filter(|row| row.run_at > 0);
        Ok(row.map(|row| Duration::from_millis(row.now.saturating_sub(row.run_at))))
    }

    fn record_run(
        &self,
        mutex: &Arc<str>,
        fence: u64,
        _keep: Duration,
        by: Moment,
    ) -> Result<bool> {
        let mut call = self.database.rows.call(Lane::Owner, by)?;
        call.record_run(mutex, fence)
    }

    fn condition(&self) -> Condition {
        Condition {
            wakeups: self.database.waiting.wakeups(),
            pool: Some(self.database.rows.pool.usage()),
        }
    }

    fn set_probe(&self, probe: Arc<dyn Probe>) {
        self.database.probe.set(probe);
    }
}
