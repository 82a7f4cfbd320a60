//! What is asked in one go, and what comes back.

use std::sync::Arc;

use super::message::Request;
use super::pending::Lookout;
use super::slot::Outcome;
use super::watches::Sentinel;
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};

/// A request, and the watch that comes with it.
pub(super) struct Ask {
    pub(super) request: Request,
    pub(super) lookout: Option<Lookout>,
}

impl Ask {
    pub(super) fn new(request: Request, path: &str, sentinel: &Arc<Sentinel>) -> Ask {
        Ask {
            request,
            lookout: Some(Lookout {
                path: path.to_owned(),
                sentinel: Arc::downgrade(sentinel),
            }),
        }
    }

    /// Reads a node and watches it. Not `exists`, which leaves a watch behind where there is no node.
    pub(super) fn watch(path: &str, sentinel: &Arc<Sentinel>) -> Ask {
        let request = Request::Data {
            path: path.to_owned(),
            watch: true,
        };
        Ask::new(request, path, sentinel)
    }
}

impl From<Request> for Ask {
    fn from(request: Request) -> Ask {
        Ask {
            request,
            lookout: None,
        }
    }
}

/// The answers to a batch of requests.
pub(super) struct Answers {
    /// The connection over which they came.
    pub(super) epoch: u64,
    /// When the requests were sent.
    pub(super) sent: Moment,
    pub(super) list: std::vec::IntoIter<Outcome>,
}

impl Answers {
    /// The next one. There are as many as requests.
    pub(super) fn next(&mut self) -> Result<Outcome> {
        self.list.next().ok_or_else(unexpected)
    }
}

/// The reader has matched every reply with the shape of its request, so this does not happen.
pub(super) fn unexpected() -> Error {
    Error::new(ErrorKind::Protocol, "an answer of the wrong kind")
}
