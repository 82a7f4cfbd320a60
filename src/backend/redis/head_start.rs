//! The head start of a contender whose turn has come.
//!
//! Between the message that says so and the acquisition lies the way from the thread that reads messages
//! to the one that waits. So the first one sends the acquisition itself, at once, and the second one,
//! when it is up, only has to read the reply. This is done only for somebody who sleeps on its bell at
//! that moment: what is sent here, it must come for soon, to own it or to give it back.

use std::time::Duration;

use ::redis::Value;

use super::lent::Lent;
use super::pool::{Failure, Spare};
use super::script::Call;
use crate::clock::Moment;
use crate::lease::Lease;

/// How long the server may take to come to it. Every waiter waits for a reply longer than that, so it
/// never becomes an owner that nobody knows.
const PATIENCE: Duration = Duration::from_millis(350);

/// What a waiter leaves with its listener: all that its next attempt takes.
#[derive(Debug)]
pub(super) struct Order {
    pub(super) spare: Spare,
    pub(super) call: Call,
    /// Where it stands in the queue.
    pub(super) queued_at: Vec<u8>,
    pub(super) lease: Lease,
}

impl Order {
    /// Sends the attempt. Never waits: `None` if there is no connection to spare, or it is broken.
    pub(super) fn send(mut self, released_by: &[u8]) -> Option<HeadStart> {
        let mut lent = self.spare.take()?;
        let sent = Moment::now();
        let budget = self.lease.call_budget();
        let call = self.call.set(&[&self.queued_at, released_by]);
        match lent.send(call, sent + PATIENCE.min(budget * 2 / 3), sent + budget) {
            Ok(()) => Some(HeadStart {
                lent,
                call: self.call,
                until: sent + self.lease.belief(),
            }),
            Err(error) => {
                lent.failure(error);
                None
            }
        }
    }
}

/// An attempt that was sent, and its reply not read yet. One that is dropped takes its connection along.
pub(super) struct HeadStart {
    lent: Lent,
    call: Call,
    /// The end of belief, should it be granted: counted from before it was sent.
    pub(super) until: Moment,
}

impl HeadStart {
    pub(super) fn finish(mut self, by: Moment) -> Result<Value, Failure> {
        self.lent.receive(&self.call, by)
    }
}

impl std::fmt::Debug for HeadStart {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "HeadStart({:?})", self.until)
    }
}
