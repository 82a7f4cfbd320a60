//! A look at who leads, from outside the line.
//!
//! It watches the leading node only: contenders that join or leave behind it wake no observer. While there
//! is no leader it watches the mutex for the first child, and while there is no mutex, for that.

use std::sync::Arc;

use super::message::{Reply, Request};
use super::protocol::Ask;
use super::session::{Leader, Session, Sessions};
use super::watches::Watch;
use crate::backend::{RawObserver, View};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::parker::Unparker;

/// How often a look starts over because the leader left between two reads.
const ROUNDS: usize = 16;

pub(super) struct ZkObserver {
    sessions: Arc<Sessions>,
    mutex_path: Arc<str>,
    wake: Arc<Unparker>,
    /// Fires when something changes of what was seen last.
    watch: Option<Arc<Watch>>,
}

impl ZkObserver {
    pub(super) fn new(
        sessions: Arc<Sessions>,
        mutex_path: Arc<str>,
        wake: &Unparker,
    ) -> ZkObserver {
        ZkObserver {
            mutex_path,
            sessions,
            wake: Arc::new(wake.clone()),
            watch: None,
        }
    }

    fn look(&mut self, session: &Session, by: Moment) -> Result<Option<Leader>> {
        let mutex = self.mutex_path.to_string();
        for _ in 0..ROUNDS {
            let line = session.line(&mutex, by)?;
            if let Some(first) = line.members.first() {
                let path = format!("{mutex}/{first}");
                let read = self.watch(session, Request::Data(path.clone()), by)?;
                if let Some(reply) = read {
                    return Ok(Some(Leader::new(path, reply)));
                }
                continue;
            }
            let children = self.watch(session, Request::Children(mutex.clone()), by)?;
            let is_free = match children {
                Some(reply) => reply.line.members.is_empty(),
                None => {
                    let exists = Request::Exists(mutex.clone());
                    self.watch(session, exists, by)?.is_none()
                }
            };
            if is_free {
                return Ok(None);
            }
        }
        Err(Error::new(
            ErrorKind::Unavailable,
            "leaders come and go faster than they can be read",
        ))
    }

    /// Asks and watches; the watch before is forgotten then. `None`: there is no such node.
    fn watch(&mut self, session: &Session, request: Request, by: Moment) -> Result<Option<Reply>> {
        let watch = Watch::new(&self.wake);
        let reply = session.find(Ask::watch(request, &watch), by)?;
        self.watch = Some(watch);
        Ok(reply)
    }
}

impl RawObserver for ZkObserver {
    fn observe(&mut self, by: Moment) -> Result<View> {
        let session = self.sessions.session()?;
        let leader = self.look(&session, by).inspect_err(|_| {
            session.wake_when_serving(&self.wake);
        })?;
        Ok(View {
            owner: session.owner_of(leader, self.sessions.config.lease),
            look_in: self.sessions.config.session_timeout,
        })
    }
}
