//! Mutexes on ZooKeeper, in the layout of Curator's `LeaderLatch`, so that contenders of both take turns.
//!
//! ```no_run
//! use contend::zk;
//! use std::time::Duration;
//!
//! let factory = contend::connect("zk://a:2181,b:2181,c:2181/jobs?session_timeout=20s")?;
//! // The same with a builder:
//! let factory = zk::Builder::new("a:2181,b:2181,c:2181")
//!     .chroot("/jobs")
//!     .session_timeout(Duration::from_secs(20))
//!     .build()?;
//! let guard = factory.locker("invoices").build()?.lock()?;
//! # Ok::<(), contend::Error>(())
//! ```
//!
//! # How a mutex changes hands
//!
//! ```text
//!  /simba/invoices                           a container
//!    _c_…-latch-0000000007   A               the lowest: owns, its fence is the node's czxid
//!    _c_…-latch-0000000008   B               watches 7
//!    _c_…-latch-0000000009   C               watches 8
//!
//!  A                        ensemble                                      B
//!  create, list ──────────► node 7 is the lowest: A owns
//!                           node 8 ◄───────────────────────── create, list
//!                           a watch on 7 ◄──────────────────────────── read
//!  delete 7 ──────────────► the watch fires ──────► B owns, asking nothing
//! ```
//!
//! A contender is an ephemeral sequential node that holds its id. A `/` in the name of a mutex nests. Each waiter
//! watches the node before its own, so a release wakes one waiter. An attempt and a release are one round trip each; a
//! renewal asks nothing, because the session's heartbeats renew all ownerships of a factory.
//!
//! # The session
//! A factory has one session with the ensemble, and opens another one when the server says that it has expired. An
//! owner believes until the earliest moment at which the ensemble can have expired the session, less the transition.
//! The transition is at least a sixth of the session timeout. Heartbeats prove how long that is: `heartbeat.rs` says
//! which answers count, and why.
//!
//! A node that a lost reply left behind is found by its session's prefix and deleted, with the next heartbeats.
//!
//! The client is part of this crate, on `std::net` and one thread.
//!
//! # URL parameters
//! Those of [`Builder`], by name: `ttl`, `transition`, `session_timeout`, `connect_timeout`, `initial_delay`, `acl`
//! (`open`, `creator_all`), `tls`, `tls_ca`, `tls_cert`, `tls_key`.
//!
//! # Sharing a mutex with Curator
//! Curator counts every child of the mutex as a contender, and sorts the sequence as text. So do not nest a mutex below
//! one that Curator contends for if its name sorts before digits. Expect a wrong order while the 31-bit sequence wraps
//! around.

mod builder;
mod connection;
mod contender;
mod heartbeat;
mod message;
mod observer;
mod path;
mod protocol;
mod session;
mod watches;
mod wire;

use std::sync::Arc;
use std::time::Duration;

pub use self::builder::Builder;
pub use self::message::Acl;
#[cfg(feature = "unstable")]
pub use self::{
    message::{Code, Mode, Outcome, Reply, Request, Stat},
    protocol::{Ask, SessionState},
    session::Session,
};

use self::builder::check_fit;
use self::contender::ZkContender;
use self::message::found;
use self::observer::ZkObserver;
use self::path::{ROOT, mutex_path};
use self::session::Sessions;
#[cfg(not(feature = "unstable"))]
use self::{message::Request, session::Session};
use super::{Backend, Condition, Contender, Participant, RawContender, RawObserver};
use crate::clock::Moment;
use crate::error::Result;
use crate::factory::Factory;
use crate::owner::MutexOwner;
use crate::parker::Unparker;
use crate::probe::Probe;
use crate::url::Url;

pub(super) fn connect(url: &Url) -> Result<Factory> {
    Builder::from_url(url)?.build()
}

#[derive(Debug)]
struct Zk {
    sessions: Arc<Sessions>,
}

impl Zk {
    fn path(&self, mutex: &str) -> Result<Arc<str>> {
        mutex_path(&self.sessions.config.chroot, mutex)
    }

    fn at(&self, mutex: &str) -> Result<(Arc<Session>, Arc<str>)> {
        Ok((self.sessions.session()?, self.path(mutex)?))
    }
}

impl Backend for Zk {
    fn realm(&self) -> &str {
        &self.sessions.config.realm
    }

    fn contender(&self, contender: &Contender, wake: &Unparker) -> Result<Box<dyn RawContender>> {
        check_fit(contender.lease, self.sessions.config.session_timeout)
            .map_err(|error| error.context(&contender.mutex))?;
        let path = self.path(&contender.mutex)?;
        let sessions = Arc::clone(&self.sessions);
        Ok(Box::new(ZkContender::new(sessions, contender, path, wake)))
    }

    fn observer(&self, mutex: &Arc<str>, wake: &Unparker) -> Result<Box<dyn RawObserver>> {
        let path = self.path(mutex)?;
        let sessions = Arc::clone(&self.sessions);
        Ok(Box::new(ZkObserver::new(sessions, path, wake)))
    }

    fn ping(&self, by: Moment) -> Result<()> {
        self.sessions.session()?.find(Request::Sync, by).map(drop)
    }

    fn owner(&self, mutex: &Arc<str>, by: Moment) -> Result<MutexOwner> {
        let (session, path) = self.at(mutex)?;
        let leader = session.leader(&path, None, by)?;
        session.owner_of(leader, self.sessions.config.lease)
    }

    fn participants(&self, mutex: &Arc<str>, by: Moment) -> Result<Vec<Participant>> {
        let (session, path) = self.at(mutex)?;
        let line = session.line(&path, by)?;
        let waiting = line.members.iter().skip(1);
        let reads = waiting.map(|name| Request::Data(format!("{path}/{name}")).into());
        let mut participants = Vec::new();
        for outcome in session.call_all(reads.collect(), by)? {
            // Otherwise it has left meanwhile.
            if let Some(reply) = found(outcome, &path)? {
                let id = String::from_utf8_lossy(&reply.data);
                participants.push(Participant::new(id, Some(reply.stat.ctime)));
            }
        }
        Ok(participants)
    }

    fn list(&self, by: Moment) -> Result<Vec<Arc<str>>> {
        let session = self.sessions.session()?;
        let root = format!("{}{ROOT}", self.sessions.config.chroot);
        let mut mutexes: Vec<Arc<str>> = Vec::new();
        // Names nest: one round trip per level.
        let mut level = vec![root.clone()];
        while !level.is_empty() {
            let reads = level
                .iter()
                .map(|path| Request::Children(path.clone()).into());
            let answers = session.call_all(reads.collect(), by)?;
            let mut below = Vec::new();
            for (path, outcome) in level.iter().zip(answers) {
                let line = found(outcome, path)?.unwrap_or_default().line;
                below.extend(line.others.iter().map(|name| format!("{path}/{name}")));
                if !line.members.is_empty()
                    && let Some(mutex) = path.get(root.len() + 1..)
                {
                    mutexes.push(mutex.into());
                }
            }
            level = below;
        }
        mutexes.sort();
        Ok(mutexes)
    }

    fn revoke(&self, mutex: &Arc<str>, fence: u64, by: Moment) -> Result<bool> {
        let (session, path) = self.at(mutex)?;
        let Some(node) = session.leader_with(&path, fence, by)? else {
            return Ok(false);
        };
        Ok(session.find(Request::Delete(node), by)?.is_some())
    }

    fn last_run(&self, mutex: &Arc<str>, by: Moment) -> Result<Option<Duration>> {
        let (session, path) = self.at(mutex)?;
        let read = session.find(Request::Data(path.to_string()), by)?;
        let run = read.filter(|reply| !reply.data.is_empty());
        let age = run.map(|run| session.servers_ms().saturating_sub(run.stat.mtime));
        Ok(age.map(Duration::from_millis))
    }

    fn record_run(
        &self,
        mutex: &Arc<str>,
        fence: u64,
        _keep: Duration,
        by: Moment,
    ) -> Result<bool> {
        let (session, path) = self.at(mutex)?;
        let Some(check) = session.leader_with(&path, fence, by)? else {
            return Ok(false);
        };
        // The server notes the time of the write by itself.
        let write = Some((path.to_string(), b"run".to_vec()));
        Ok(session.find(Request::Multi { check, write }, by)?.is_some())
    }

    fn condition(&self) -> Condition {
        Condition {
            wakeups: self.sessions.wakeups(),
            ..Condition::default()
        }
    }

    fn set_probe(&self, probe: Arc<dyn Probe>) {
        self.sessions.config.probe.set(probe);
    }
}
