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
    protocol::SessionState,
    session::Session,
};

use self::builder::check_fit;
use self::contender::ZkContender;
use self::observer::ZkObserver;
use self::path::{Member, ROOT, mutex_path};
use self::session::{Leader, Sessions, unexpected};
#[cfg(not(feature = "unstable"))]
use self::{
    message::{Code, Reply, Request},
    session::Session,
};
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
        let outcome = self.sessions.session()?.one(Request::Sync, by)?;
        outcome.map(drop).map_err(|code| code.error("/"))
    }

    fn owner(&self, mutex: &Arc<str>, by: Moment) -> Result<MutexOwner> {
        let (session, path) = self.at(mutex)?;
        let leader = session.leader(&path, by)?;
        if let Some(Leader { path, id: None, .. }) = &leader {
            return Err(Code::NO_AUTH.error(path));
        }
        Ok(session.owner_of(leader.as_ref(), self.sessions.config.lease))
    }

    fn participants(&self, mutex: &Arc<str>, by: Moment) -> Result<Vec<Participant>> {
        let (session, path) = self.at(mutex)?;
        let line = session.line(&path, by)?;
        let waiting = line.members().get(1..).unwrap_or_default();
        let data = |member: &Member| Request::Data(format!("{path}/{}", member.name)).into();
        let mut found = Vec::new();
        for outcome in session.call_all(waiting.iter().map(data).collect(), by)? {
            match outcome {
                Ok(Reply::Data(id, stat)) => found.push(Participant::new(
                    String::from_utf8_lossy(&id).as_ref(),
                    u64::try_from(stat.ctime).ok(),
                )),
                Ok(_) => return Err(unexpected()),
                // It has left meanwhile.
                Err(Code::NO_NODE) => {}
                Err(code) => return Err(code.error(&path)),
            }
        }
        Ok(found)
    }

    fn list(&self, by: Moment) -> Result<Vec<Arc<str>>> {
        let session = self.sessions.session()?;
        let root = format!("{}{ROOT}", self.sessions.config.chroot);
        let mut found: Vec<Arc<str>> = Vec::new();
        // Names nest: one round trip per level.
        let mut level = vec![root.clone()];
        while !level.is_empty() {
            let children = |path: &String| Request::Children(path.clone()).into();
            let answers = session.call_all(level.iter().map(children).collect(), by)?;
            let mut below = Vec::new();
            for (path, outcome) in level.iter().zip(answers) {
                let names = match outcome {
                    Ok(Reply::Children(names)) => names,
                    Ok(_) => return Err(unexpected()),
                    Err(Code::NO_NODE) => continue,
                    Err(code) => return Err(code.error(path)),
                };
                let mut contended = false;
                for name in names {
                    match Member::read(name.clone()) {
                        Some(_) => contended = true,
                        None => below.push(format!("{path}/{name}")),
                    }
                }
                if contended && let Some(mutex) = path.get(root.len() + 1..) {
                    found.push(mutex.into());
                }
            }
            level = below;
        }
        found.sort();
        Ok(found)
    }

    fn revoke(&self, mutex: &Arc<str>, fence: u64, by: Moment) -> Result<bool> {
        let (session, path) = self.at(mutex)?;
        let Some(path) = session.leader_with(&path, fence, by)? else {
            return Ok(false);
        };
        match session.one(Request::Delete(path.clone()), by)? {
            Ok(_) => Ok(true),
            Err(Code::NO_NODE) => Ok(false),
            Err(code) => Err(code.error(&path)),
        }
    }

    fn last_run(&self, mutex: &Arc<str>, by: Moment) -> Result<Option<Duration>> {
        let (session, path) = self.at(mutex)?;
        match session.one(Request::Data(path.to_string()), by)? {
            Ok(Reply::Data(data, _)) if data.is_empty() => Ok(None),
            Ok(Reply::Data(_, stat)) => {
                let written = u64::try_from(stat.mtime).unwrap_or(0);
                let age = session.servers_ms().saturating_sub(written);
                Ok(Some(Duration::from_millis(age)))
            }
            Ok(_) => Err(unexpected()),
            Err(Code::NO_NODE) => Ok(None),
            Err(code) => Err(code.error(&path)),
        }
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
        let write = Request::Multi {
            check,
            write: Some((path.to_string(), b"run".to_vec())),
        };
        match session.one(write, by)? {
            Ok(_) => Ok(true),
            Err(Code::NO_NODE) => Ok(false),
            Err(code) => Err(code.error(&path)),
        }
    }

    fn condition(&self) -> Condition {
        Condition {
            wakeups: self.sessions.wakeups(),
            ..Condition::default()
        }
    }

    fn set_probe(&self, probe: Arc<dyn Probe>) {
        self.sessions.probe.set(probe);
    }
}
