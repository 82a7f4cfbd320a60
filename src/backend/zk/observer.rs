//! A look at who leads, from outside the line.
//!
//! It watches the leading node only: whoever joins or leaves behind it wakes no observer. While there
//! is no leader it watches the mutex for the first child, and while there is no mutex, for that.

use std::sync::Arc;

use super::ask::{Ask, unexpected};
use super::message::{Code, Reply, Request};
use super::path::{line_up, mutex_path};
use super::session::Session;
use super::slot::Outcome;
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
        let mutex_path = self.mutex_path.clone();
        let mut empty = false;
        for _ in 0..ROUNDS {
            let children = Request::Children {
                path: mutex_path.clone(),
                watch: empty,
            };
            let outcome = if empty {
                self.watch(session, children, &mutex_path, by)?
            } else {
                session.call(vec![children.into()], by)?.next()?
            };
            let members = match outcome {
                Ok(Reply::Children(names)) => line_up(names),
                Ok(_) => return Err(unexpected()),
                Err(Code::NO_NODE) => {
                    let exists = Request::Exists {
                        path: mutex_path.clone(),
                        watch: true,
                    };
                    match self.watch(session, exists, &mutex_path, by)? {
                        Err(Code::NO_NODE) => return Ok(MutexOwner::NONE),
                        Err(code) => return Err(code.error(&mutex_path)),
                        Ok(_) => continue,
                    }
                }
                Err(code) => return Err(code.error(&mutex_path)),
            };
            let Some(first) = members.first() else {
                if empty {
                    return Ok(MutexOwner::NONE);
                }
                empty = true;
                continue;
            };
            let path = format!("{mutex_path}/{}", first.name);
            let data = Request::Data {
                path: path.clone(),
                watch: true,
            };
            match self.watch(session, data, &path, by)? {
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

    /// Asks and watches; the watch before is forgotten then.
    fn watch(
        &mut self,
        session: &Session,
        request: Request,
        path: &str,
        by: Moment,
    ) -> Result<Outcome> {
        let sentinel = Sentinel::new(&self.alarm);
        let ask = Ask::new(request, path, &sentinel);
        let outcome = session.call(vec![ask], by)?.next()?;
        self.sentinel = Some(sentinel);
        Ok(outcome)
    }
}

impl Watch for Observer {
    fn listen(&mut self, waker: &Waker, _by: Moment) -> Result<()> {
        self.core.origin.check()?;
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
