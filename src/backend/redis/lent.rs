//! A connection in use.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use ::redis::{RedisError, Value};

use super::link::Link;
use super::pool::{Failure, Shared};
use super::script::Call;
use super::trouble::{is_moved, trouble};
use crate::clock::Moment;
use crate::error::Error;
use crate::fork::Origin;

/// A connection in use; goes back to its pool on drop, unless it is good for nothing any more.
pub(super) struct Lent {
    shared: Arc<Shared>,
    link: Option<Link>,
    origin: Origin,
    /// When the request was sent whose reply has not been read.
    sent: Option<Moment>,
}

impl Lent {
    pub(super) fn new(shared: &Arc<Shared>, link: Link, origin: Origin) -> Lent {
        Lent {
            shared: Arc::clone(shared),
            link: Some(link),
            origin,
            sent: None,
        }
    }

    /// Sends a call. The server is told that nobody is interested after `deadline`; the sending itself
    /// is over before `by`.
    pub(super) fn send(
        &mut self,
        call: &mut Call,
        deadline: Moment,
        by: Moment,
    ) -> Result<(), RedisError> {
        let skew = self.shared.skew.load(Ordering::Relaxed);
        call.until(if skew == i64::MIN {
            0
        } else {
            u64::try_from(local_ms(deadline).saturating_add(skew)).unwrap_or(0)
        });
        self.send_packed(call.by_hash(), by)
    }

    /// Reads the reply to the call that was sent.
    pub(super) fn receive(&mut self, call: &Call, by: Moment) -> Result<Value, Failure> {
        let sent = self.sent;
        let reply = match self.receive_packed(by) {
            Err(error) if is_unknown_script(&error) => self
                .send_packed(&call.by_text(), by)
                .and_then(|()| self.receive_packed(by)),
            reply => reply,
        };
        let value = reply.map_err(|error| self.failure(error))?;
        // Counted from before the request, so that the deadline errs to the later side.
        if let Value::Array(fields) = &value
            && let Some(Value::Int(now)) = fields.get(1)
            && let Some(sent) = sent
        {
            let skew = now.saturating_sub(local_ms(sent));
            self.shared.skew.store(skew, Ordering::Relaxed);
        }
        Ok(value)
    }

    /// Wakes the subscriber.
    pub(super) fn poke(&mut self, by: Moment) -> Result<(), Error> {
        let poke = Arc::clone(&self.shared);
        self.send_packed(&poke.poke, by)
            .and_then(|()| self.receive_packed(by))
            .map(|_| ())
            .map_err(|error| self.discard(error))
    }

    /// What an error of this connection means.
    pub(super) fn failure(&mut self, error: RedisError) -> Failure {
        if is_moved(&error) {
            return Failure::Moved;
        }
        Failure::Other(self.discard(error))
    }

    fn send_packed(&mut self, command: &[u8], by: Moment) -> Result<(), RedisError> {
        let Some(link) = &mut self.link else {
            return Err(std::io::Error::from(std::io::ErrorKind::NotConnected).into());
        };
        self.sent = Some(Moment::now());
        link.send(command, by)
    }

    /// An error of the server comes back as an error, too.
    fn receive_packed(&mut self, by: Moment) -> Result<Value, RedisError> {
        let Some(link) = &mut self.link else {
            return Err(std::io::Error::from(std::io::ErrorKind::NotConnected).into());
        };
        let value = link.receive(by)?;
        self.sent = None;
        match value {
            Value::ServerError(error) => Err(error.into()),
            value => Ok(value),
        }
    }

    /// Throws the connection away: its outcome is unknown, or the server refuses us on it. Where the
    /// connection itself broke, the idle ones broke with it more often than not.
    fn discard(&mut self, error: RedisError) -> Error {
        self.link = None;
        let mut state = self.shared.state.lock();
        state.open -= 1;
        if error.is_io_error() {
            state.open -= state.idle.len();
            state.idle.clear();
        }
        drop(state);
        trouble(error, &self.shared.address.to_string())
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        // A reply that nobody came for would be taken for that of the next request.
        let owes = self.sent.is_some();
        if owes && !self.origin.is_here() {
            return;
        }
        let mut state = self.shared.state.lock();
        state.lent -= 1;
        if let Some(mut link) = self.link.take() {
            if state.closed || owes {
                state.open -= 1;
            } else {
                link.idle_since = Moment::now();
                state.idle.push(link);
            }
        }
        if self.shared.wants_more(&state) {
            self.shared.work.notify_one();
        }
        self.shared.let_in(&state);
    }
}

fn is_unknown_script(error: &RedisError) -> bool {
    error.kind() == ::redis::ErrorKind::Server(::redis::ServerErrorKind::NoScript)
}

fn local_ms(at: Moment) -> i64 {
    i64::try_from(at.since_origin().as_millis()).unwrap_or(i64::MAX)
}
