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
mod pending;
mod pulse;
mod session;
mod session_state;
mod setback;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::{Entry, Hold};
    use crate::bell::Bell;
    use crate::error::ErrorKind;

    /// Rule 12: in a child the thread that held a lock at the fork will never give it back.
    #[test]
    fn a_child_process_is_refused_and_waits_for_nobody() {
        let builder = Builder::new("127.0.0.1:1");
        let mut session = builder.session().unwrap();
        let shared = session.seen_from_a_child();
        let zk = Zk {
            core: Arc::new(Core {
                config: Arc::clone(&shared.config),
                session: Mutex::new(Arc::new(session)),
                origin: Origin::elsewhere(),
            }),
        };
        let place = Place {
            mutex: "m".into(),
            id: "a".into(),
            lease: shared.config.lease().unwrap(),
            hold: Hold::Long,
        };
        let (dropped, done) = crossbeam_channel::bounded(1);
        std::thread::spawn(move || {
            let held = shared.state.lock();
            let session = Arc::clone(&zk.core.session.lock());
            std::mem::forget(zk.core.session.lock());
            let (bell, by) = (Bell::new(), Moment::now() + Duration::from_secs(60));
            let mut seat = zk.seat(&place).unwrap();
            let mut watch = zk.watch(&place.mutex).unwrap();
            let refusals = [
                seat.listen(&bell.waker(), by).unwrap_err(),
                seat.acquire(Entry::Queue, by).unwrap_err(),
                seat.renew(1, by).unwrap_err(),
                seat.release(1, by).unwrap_err(),
                seat.withdraw(by).unwrap_err(),
                watch.listen(&bell.waker(), by).unwrap_err(),
                watch.observe(by).unwrap_err(),
                session.sync(by).unwrap_err(),
            ];
            assert!(refusals.iter().all(|e| e.kind() == ErrorKind::Forked));
            assert_eq!(session.state(), SessionState::Closed);
            assert_eq!((session.id(), session.alive_until()), (0, None));
            session.close();
            drop((seat, watch, session, zk));
            // The parent's thread is one of this process after all.
            drop(held);
            shared.state.lock().closing = true;
            shared.changed.notify_all();
            dropped.send(())
        });
        done.recv_timeout(Duration::from_secs(30)).unwrap();
    }
}
