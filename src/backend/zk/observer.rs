//! A look at who leads, from outside the line.
//!
//! It watches the leading node only: contenders that join or leave behind it wake no observer. While there
//! is no leader it watches the mutex for the first child, and while there is no mutex, for that.

use std::sync::Arc;

use super::message::Request;
use super::protocol::Ask;
use super::session::{Leader, Session, Sessions};
use super::watches::Watch;
use crate::backend::{RawObserver, View};
use crate::clock::Moment;
use crate::error::Result;
use crate::parker::Unparker;

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
        // Each round asks the server, which ends with `by`.
        loop {
            let watch = Watch::new(&self.wake);
            let leader = session.leader(&self.mutex_path, Some(&watch), by)?;
            if leader.is_some() || self.is_free(session, &watch, by)? {
                self.watch = Some(watch);
                return Ok(leader);
            }
        }
    }

    /// Watches the mutex for the first child, or for its creation. Returns `false` if there is a child.
    fn is_free(&self, session: &Session, watch: &Arc<Watch>, by: Moment) -> Result<bool> {
        let mutex = self.mutex_path.to_string();
        let children = Ask::new(Request::Children(mutex.clone()), Some(watch));
        if let Some(reply) = session.find(children, by)? {
            return Ok(reply.line.members.is_empty());
        }
        let exists = Ask::new(Request::Exists(mutex), Some(watch));
        Ok(session.find(exists, by)?.is_none())
    }
}

impl RawObserver for ZkObserver {
    fn observe(&mut self, by: Moment) -> Result<View> {
        let session = self.sessions.session()?;
        let leader = self.look(&session, by).inspect_err(|_| {
            session.wake_when_serving(&self.wake);
        })?;
        Ok(View {
            owner: session.owner_of(leader, self.sessions.config.lease)?,
            look_in: self.sessions.config.session_timeout,
        })
    }
}
