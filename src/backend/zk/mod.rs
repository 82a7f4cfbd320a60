//! Mutexes on ZooKeeper, in the layout of Curator's LeaderLatch, so that a Curator peer takes turns
//! with us (Cargo feature `zk`).
//!
//! Each mutex is a container node `/simba/{mutex}`, each contender an ephemeral sequential child of it
//! that holds the contender's id. The lowest sequence leads, and each of the others watches the one
//! before it, so a release wakes one waiter. The fence is the node's `czxid`.
//!
//! A factory has one session with the ensemble, shared by all its services, and opens another one
//! when the server says that it has expired. Ownership lives as long as the session does: an owner
//! believes up to the moment before which the ensemble cannot have expired the session (`pulse.rs`),
//! less the transition.
//!
//! The client is our own ([`Session`]), on `std::net` and one thread.

mod ask;
mod config;
mod latch;
mod link;
mod message;
mod observer;
mod orphan;
mod path;
mod pulse;
mod session;
mod session_state;
mod slot;
mod spot;
mod state;
mod watches;
mod wire;

#[cfg(test)]
mod decoder_tests;

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;

pub use self::config::Builder;
pub use self::message::{Acl, Mode, Stat};
pub use self::session::Session;
pub use self::session_state::SessionState;

use self::config::Config;
use self::latch::Latch;
use self::observer::Observer;
use super::{Backend, Place, Seat, Watch};
use crate::clock::Moment;
use crate::error::{Error, Result};
use crate::factory::Factory;
use crate::fork::Origin;
use crate::owner::MutexOwner;
use crate::url::Url;

pub(super) fn connect(url: &Url) -> Result<Factory> {
    Builder::from_url(url)?.build()
}

/// The backend: a session, and another one when that is over.
#[derive(Debug)]
struct Zk {
    core: Arc<Core>,
}

/// What the seats of one factory share.
#[derive(Debug)]
struct Core {
    config: Arc<Config>,
    session: Mutex<Arc<Session>>,
    origin: Origin,
}

impl Zk {
    fn open(config: Config) -> Result<Zk> {
        let config = Arc::new(config);
        Ok(Zk {
            core: Arc::new(Core {
                session: Mutex::new(Arc::new(Session::open(Arc::clone(&config))?)),
                config,
                origin: Origin::here(),
            }),
        })
    }
}

impl Backend for Zk {
    fn realm(&self) -> &str {
        &self.core.config.realm
    }

    fn seat(&self, place: &Place) -> Result<Box<dyn Seat>> {
        let (lease, timeout) = (place.lease, self.core.config.session_timeout);
        if lease.total() > timeout || lease.transition() > timeout / 3 {
            return Err(Error::invalid(format!(
                "{}: a lease of {:?} + {:?} does not fit into a session of {timeout:?}: ttl and \
                 transition together may be as long as the session timeout, the transition a third \
                 of it; raise session_timeout",
                place.mutex,
                lease.ttl(),
                lease.transition(),
            )));
        }
        Ok(Box::new(Latch::new(Arc::clone(&self.core), place)))
    }

    fn watch(&self, mutex: &Arc<str>) -> Result<Box<dyn Watch>> {
        Ok(Box::new(Observer::new(Arc::clone(&self.core), mutex)))
    }
}

impl Core {
    /// The session; a new one if a server has ended the last.
    fn session(&self) -> Result<Arc<Session>> {
        self.origin.check()?;
        let mut session = self.session.lock();
        if session.state() == SessionState::Expired {
            let new = Arc::new(Session::open(Arc::clone(&self.config))?);
            *session = new;
        }
        Ok(Arc::clone(&session))
    }
}

/// A snapshot for display. `ttl` and `total` are what is left, as far as one can know.
fn owner(
    session: &Session,
    id: &str,
    acquired_at: Option<i64>,
    fence: i64,
    (ttl, total): (Duration, Duration),
) -> MutexOwner {
    let now = Moment::now();
    let ms = |duration: Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    // A node's creation time is the leader's clock. Who has created nothing has not seen it, and
    // takes its own.
    let now_ms = session.look(|state| state.leader_clock).map_or_else(
        || {
            ms(SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .unwrap_or_default())
        },
        |(leader_ms, sent)| leader_ms.saturating_add(ms(now - sent)),
    );
    let acquired_at = acquired_at.and_then(|at| u64::try_from(at).ok());
    MutexOwner::new(
        id,
        acquired_at.unwrap_or(now_ms),
        now_ms.saturating_add(ms(ttl)),
        now_ms.saturating_add(ms(total)),
        u64::try_from(fence).unwrap_or(0),
    )
    .observed_at(now_ms, now)
}
