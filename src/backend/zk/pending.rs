//! What was asked and not answered yet, and what becomes of the answer.

use std::sync::{Arc, Weak};

use super::message::Shape;
use super::orphan::Orphan;
use super::slot::Slot;
use super::watches::Sentinel;

/// A request without an answer.
#[derive(Debug)]
pub(super) struct Pending {
    pub(super) xid: i32,
    pub(super) shape: Shape,
    pub(super) lookout: Option<Lookout>,
    pub(super) to: To,
}

/// A watch that counts from the reply on. Registered by the reader itself, because the event may be
/// in the next frame.
#[derive(Debug)]
pub(super) struct Lookout {
    pub(super) path: String,
    pub(super) sentinel: Weak<Sentinel>,
}

/// What becomes of a reply.
#[derive(Debug)]
pub(super) enum To {
    /// A caller waits for it, as the answer with this number.
    Caller(Arc<Slot>, usize),
    /// The heartbeat.
    Pulse,
    /// The deletion of an orphan.
    Deleted(Orphan),
    /// The list in which an orphan may be found.
    Found(Orphan),
    /// Only the watch matters: the sentinel fires if the node is gone already.
    Lookout,
    /// Nobody cares.
    Nobody,
}
