//! A look at who leads, from outside the line.
//!
//! It watches the leading node only: whoever joins or leaves behind it wakes no observer. While there
//! is no leader it watches the mutex for the first child, and while there is no mutex, for that.

use std::sync::Arc;

use super::message::{Code, Reply, Request};
use super::path::{line_up, mutex_path};
use super::session::{Session, unexpected};
use super::watches::{Alarm, Sentinel};
use super::{Core, owner};
use crate::backend::{Sight, Watch};
use crate::bell::Waker;
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::owner::MutexOwner;

/// How often a look starts over because the leader left between two reads.
const ROUNDS: usize = 16;

pub(super) struct Observer {
    core: Arc<Core>,
    mutex_path: String,
    alarm: Arc<Alarm>,
    /// Kept for as long as it is to ring.
    sentinel: Option<Arc<Sentinel>>,
}

impl Observer {
    pub(super) fn new(core: Arc<Core>, mutex: &str) -> Observer {
        Observer {
            mutex_path: mutex_path(&core.config.chroot, mutex),
            core,
            alarm: Arc::default(),
            sentinel: None,
        }
    }

    fn look(&mut self, session: &Session, by: Moment) -> Result<MutexOwner> {
        let lease = self.core.config.lease()?;
        let mut watch_children = false;
        for _ in 0..ROUNDS {
            let request = Request::Children {
                path: self.mutex_path.clone(),
                watch: watch_children,
            };
            let members = match self.ask(session, &self.mutex_path.clone(), request, by)? {
                Ok(Reply::Children(names)) => line_up(names),
                Ok(_) => return Err(unexpected()),
                Err(Code::NO_NODE) => {
                    let request = Request::Exists {
                        path: self.mutex_path.clone(),
                        watch: true,
                    };
                    match self.ask(session, &self.mutex_path.clone(), request, by)? {
                        Err(Code::NO_NODE) => return Ok(MutexOwner::NONE),
                        Err(code) => return Err(code.error(&self.mutex_path)),
                        Ok(_) => continue,
                    }
                }
                Err(code) => return Err(code.error(&self.mutex_path)),
            };
            let Some(first) = members.first() else {
                if watch_children {
                    return Ok(MutexOwner::NONE);
                }
                watch_children = true;
                continue;
            };
            let path = format!("{}/{}", self.mutex_path, first.name);
            let request = Request::Data {
                path: path.clone(),
                watch: true,
            };
            match self.ask(session, &path, request, by)? {
                Ok(Reply::Data(id, stat)) => {
                    return Ok(owner(
                        session,
                        &String::from_utf8_lossy(&id),
                        Some(stat.ctime),
                        stat.czxid,
                        (lease.ttl(), lease.total()),
                    ));
                }
                Ok(_) => return Err(unexpected()),
                Err(Code::NO_NODE) => {}
                Err(code) => return Err(code.error(&path)),
            }
        }
        Err(Error::new(
            ErrorKind::Unavailable,
            "leaders come and go faster than they can be read",
        ))
    }

    /// Asks, and watches if the request says so; the watch before is forgotten then.
    fn ask(
        &mut self,
        session: &Session,
        path: &str,
        request: Request,
        by: Moment,
    ) -> Result<Result<Reply, Code>> {
        let sentinel = Sentinel::new(&self.alarm);
        let lookout = (path.to_owned(), Arc::clone(&sentinel));
        let watches = matches!(
            request,
            Request::Children { watch: true, .. }
                | Request::Data { watch: true, .. }
                | Request::Exists { watch: true, .. }
        );
        let outcome = session
            .call(vec![(request, watches.then_some(&lookout))], by)?
            .next()?;
        if watches {
            self.sentinel = Some(sentinel);
        }
        Ok(outcome)
    }
}

impl Watch for Observer {
    fn listen(&mut self, waker: &Waker, _by: Moment) -> Result<()> {
        // The watch is set by `observe`, together with the look that it guards.
        self.alarm.set(Some(waker));
        Ok(())
    }

    fn observe(&mut self, by: Moment) -> Result<Sight> {
        let session = self.core.session()?;
        let owner = self.look(&session, by).inspect_err(|_| {
            session.ring_later(&self.alarm);
        })?;
        Ok(Sight {
            owner,
            again_in: self.core.config.session_timeout,
        })
    }
}
