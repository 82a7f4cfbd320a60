//! What the scripts of permits answer.

use std::sync::Arc;
use std::time::Duration;

use ::redis::{FromRedisValue, ParsingError, Value, from_redis_value};

use crate::backend::permit_store::{Counts, Holder, Permit, Reason, RequestStatus, Swept};
use crate::backend::redis::error::not_understood;
use crate::error::Result;

/// Reads a value; of a list, each row in turn.
pub(super) fn read<T: FromRedisValue>(value: Value) -> Result<T> {
    from_redis_value(value).map_err(|_| not_understood())
}

/// Reads the first field of a reply and the server's time, and returns the others with them.
pub(super) fn head<T: FromRedisValue>(value: Value) -> Result<(T, u64, Value)> {
    let mut fields = read::<Vec<Value>>(value)?;
    let rest = fields.split_off(fields.len().min(2));
    let (first, now) = read(Value::Array(fields))?;
    Ok((first, now, Value::Array(rest)))
}

/// Milliseconds; less than none stands for nothing.
pub(super) fn duration(ms: i64) -> Option<Duration> {
    u64::try_from(ms).ok().map(Duration::from_millis)
}

/// A text. Another program may have written it: what is not UTF-8 is replaced.
pub(super) struct Text(pub(super) Arc<str>);

impl Text {
    /// An empty one stands for none.
    pub(super) fn some(self) -> Option<Arc<str>> {
        Some(self.0).filter(|text| !text.is_empty())
    }
}

pub(super) fn counts(pairs: Vec<(Text, u32)>) -> Counts {
    let pairs = pairs.into_iter().map(|(name, count)| (name.0, count));
    pairs.collect()
}

impl FromRedisValue for Text {
    fn from_redis_value(value: Value) -> Result<Text, ParsingError> {
        let bytes: Vec<u8> = from_redis_value(value)?;
        Ok(Text(String::from_utf8_lossy(&bytes).into()))
    }
}

/// A request as the server knows it.
pub(super) struct Record {
    external_id: Arc<str>,
    held_for: Duration,
    pub(super) status: RequestStatus,
}

impl Record {
    /// Reads a record inside of a reply.
    pub(super) fn of(value: Value) -> Result<Record> {
        let (_, _, rest): (Value, _, _) = head(value)?;
        Record::read(rest)
    }

    /// Reads what follows code and time.
    pub(super) fn read(rest: Value) -> Result<Record> {
        type Pairs = Vec<(Text, u32)>;
        type Columns = (Text, bool, u64, Text, i64, i64, i64, Pairs);
        let columns: Columns = read(rest)?;
        let (external_id, held, fence, owner, ttl, left, age, permits) = columns;
        let permits = permits.into_iter().map(|(semaphore, count)| Permit {
            semaphore: semaphore.0,
            count,
            fence,
        });
        let status = RequestStatus {
            held,
            permits: permits.collect(),
            owner: owner.some(),
            ttl: duration(ttl).filter(|ttl| !ttl.is_zero()),
            expires_in: duration(left),
        };
        Ok(Record {
            external_id: external_id.0,
            held_for: duration(age).unwrap_or_default(),
            status,
        })
    }

    pub(super) fn holder(&self, semaphore: &str) -> Option<Holder> {
        let mut permits = self.status.permits.iter();
        let permit = permits.find(|it| *it.semaphore == *semaphore)?;
        Some(Holder {
            external_id: Arc::clone(&self.external_id),
            owner: self.status.owner.clone(),
            count: permit.count,
            fence: permit.fence,
            held_for: self.held_for,
            expires_in: self.status.expires_in,
        })
    }

    pub(super) fn swept(self, reason: Reason) -> Swept {
        Swept {
            external_id: self.external_id,
            owner: self.status.owner,
            permits: self.status.permits,
            reason,
        }
    }
}
