//! The scripts' replies, read.

use std::sync::Arc;
use std::time::Duration;

use ::redis::Value;

use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::lease::Lease;
use crate::owner::MutexOwner;

/// `{outcome, now, ...}`, as `acquire.lua` and `renew.lua` return it.
pub(super) struct Reply {
    fields: Vec<Value>,
    pub(super) outcome: i64,
    /// The server's time, in milliseconds.
    pub(super) now: u64,
    received: Moment,
}

impl Reply {
    pub(super) fn read(value: Value) -> Result<Reply> {
        let received = Moment::now();
        let Value::Array(fields) = value else {
            return Err(not_understood());
        };
        Ok(Reply {
            outcome: integer(fields.first())?,
            now: unsigned(fields.get(1))?,
            fields,
            received,
        })
    }

    /// The owner that we became, with the third field as its fence.
    pub(super) fn granted(&self, id: &Arc<str>, lease: Lease) -> Result<MutexOwner> {
        Ok(MutexOwner::new(
            Arc::clone(id),
            self.now,
            self.now + ms(lease.ttl()),
            self.now + ms(lease.total()),
            unsigned(self.fields.get(2))?,
        )
        .observed_at(self.now, self.received))
    }

    /// The owner that the script saw. `lease` stands in for what a Simba peer does not tell.
    pub(super) fn owner(&self, lease: Lease) -> Result<MutexOwner> {
        let Some(Value::BulkString(id)) = self.fields.get(2) else {
            return Err(not_understood());
        };
        if id.is_empty() {
            return Ok(MutexOwner::NONE);
        }
        let id: Arc<str> = String::from_utf8_lossy(id).into();
        let left = self.left()?.unwrap_or(lease.total());
        let transition_at = self.now + ms(left);
        let transition = integer(self.fields.get(5))?;
        let transition = u64::try_from(transition).unwrap_or(ms(lease.transition()));
        let acquired_at = match unsigned(self.fields.get(4))? {
            0 => transition_at.saturating_sub(ms(lease.total())),
            at => at,
        };
        Ok(MutexOwner::new(
            id,
            acquired_at.min(self.now),
            transition_at.saturating_sub(transition),
            transition_at,
            unsigned(self.fields.get(3))?,
        )
        .observed_at(self.now, self.received))
    }

    /// How long the lease or reservation lasts; `None` if it has no end (an operator's doing).
    pub(super) fn left(&self) -> Result<Option<Duration>> {
        let left = integer(self.fields.get(6))?;
        Ok(u64::try_from(left).ok().map(Duration::from_millis))
    }

    /// The place in the queue.
    pub(super) fn place(&mut self) -> Result<Vec<u8>> {
        match self.fields.get_mut(7) {
            Some(Value::BulkString(place)) => Ok(std::mem::take(place)),
            _ => Err(not_understood()),
        }
    }
}

/// The reply of `release.lua`.
pub(super) fn is_done(value: &Value) -> Result<bool> {
    integer(Some(value)).map(|done| done == 1)
}

fn integer(value: Option<&Value>) -> Result<i64> {
    match value {
        Some(Value::Int(number)) => Ok(*number),
        Some(Value::BulkString(text)) => std::str::from_utf8(text)
            .ok()
            .and_then(|text| text.parse().ok())
            .ok_or_else(not_understood),
        _ => Err(not_understood()),
    }
}

fn unsigned(value: Option<&Value>) -> Result<u64> {
    u64::try_from(integer(value)?).map_err(|_| not_understood())
}

fn not_understood() -> Error {
    Error::new(
        ErrorKind::Protocol,
        "redis: a reply that no script of this library gives; does something else use these keys?",
    )
}

pub(super) fn ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
