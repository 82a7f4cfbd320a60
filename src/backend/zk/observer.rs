//! A look at who leads, from outside the line.
//!
//! It watches the leading node only: whoever joins or leaves behind it wakes no observer. While there
//! is no leader it watches the mutex for the first child, and while there is no mutex, for that.

use std::sync::Arc;

use super::message::{Code, Outcome, Reply, Request};
use super::path::Line;
use super::protocol::Ask;
use super::session::{Known, Leader, Session, Sessions, unexpected};
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
    seen: Option<Seen>,
}

/// What was seen, and the watch that fires when it changes.
struct Seen {
    session: Arc<Session>,
    epoch: u64,
    watch: Arc<Watch>,
    leader: Option<Leader>,
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
            seen: None,
        }
    }

    fn look(&mut self, session: &Arc<Session>, by: Moment) -> Result<Option<Leader>> {
        if let Some(leader) = self.unchanged(session, by)? {
            return Ok(Some(leader));
        }
        let mutex_path = Arc::clone(&self.mutex_path);
        let mut empty = false;
        for _ in 0..ROUNDS {
            let line = if empty {
                let children = Request::Children(mutex_path.to_string());
                self.watch(session, children, None, by)?
            } else {
                session.one(Ask::line(&mutex_path), by)?
            };
            let line = match line {
                Ok(Reply::Line(line)) => line,
                Ok(Reply::Children(names)) => Arc::new(Line::new(names)),
                Ok(_) => return Err(unexpected()),
                Err(Code::NO_NODE) => {
                    let exists = Request::Exists(mutex_path.to_string());
                    match self.watch(session, exists, None, by)? {
                        Err(Code::NO_NODE) => {
                            session.learn(&mutex_path, Known::Free);
                            return Ok(None);
                        }
                        Err(code) => return Err(code.error(&mutex_path)),
                        Ok(_) => continue,
                    }
                }
                Err(code) => return Err(code.error(&mutex_path)),
            };
            let Some(first) = line.first() else {
                if empty {
                    session.learn(&mutex_path, Known::Free);
                    return Ok(None);
                }
                empty = true;
                continue;
            };
            let path = format!("{mutex_path}/{}", first.name);
            let data = Request::Data(path.clone());
            match self.watch(session, data, Some(&first.name), by)? {
                Ok(_) => {
                    let leader = self.seen.as_ref().and_then(|seen| seen.leader.clone());
                    if let Some(leader) = &leader {
                        session.learn(&mutex_path, Known::Led(leader.clone()));
                    }
                    return Ok(leader);
                }
                Err(Code::NO_NODE) => {}
                Err(code) => return Err(code.error(&path)),
            }
        }
        Err(Error::new(
            ErrorKind::Unavailable,
            "leaders come and go faster than they can be read",
        ))
    }

    /// With a confirmed watch one small question does: is the leader still there?
    fn unchanged(&mut self, session: &Arc<Session>, by: Moment) -> Result<Option<Leader>> {
        let Some(seen) = &self.seen else {
            return Ok(None);
        };
        let same = Arc::ptr_eq(&seen.session, session)
            && seen.watch.is_confirmed()
            && session.look(|protocol| protocol.epoch()) == seen.epoch;
        let Some(leader) = seen.leader.clone().filter(|_| same) else {
            return Ok(None);
        };
        let path = format!("{}/{}", self.mutex_path, leader.name);
        let exists = Ask::from(Request::Exists(path));
        let there = session.one(exists, by)?.is_ok();
        Ok(Some(leader).filter(|_| there))
    }

    /// Asks and watches; the watch before is forgotten then. `leader`: whose data is asked for.
    fn watch(
        &mut self,
        session: &Arc<Session>,
        request: Request,
        leader: Option<&str>,
        by: Moment,
    ) -> Result<Outcome> {
        let watch = Watch::new(&self.wake);
        let call = session.ask(vec![Ask::watching(request, &watch)], by)?;
        let outcome = session.finish(&call, by)?.next()?;
        let leader = match (&outcome, leader) {
            (Ok(Reply::Data(id, stat)), Some(name)) => Some(Leader::new(name, id, *stat)),
            _ => None,
        };
        self.seen = Some(Seen {
            session: Arc::clone(session),
            epoch: call.epoch,
            watch,
            leader,
        });
        Ok(outcome)
    }
}

impl RawObserver for ZkObserver {
    fn observe(&mut self, by: Moment) -> Result<View> {
        let session = self.sessions.session()?;
        let leader = self.look(&session, by).inspect_err(|_| {
            session.wake_on_news(&self.wake);
        })?;
        Ok(View {
            owner: session.owner_of(leader.as_ref(), self.sessions.config.lease),
            look_in: self.sessions.config.session_timeout,
        })
    }
}
