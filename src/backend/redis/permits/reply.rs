//! What the scripts of permits answer.

use std::sync::Arc;
use std::time::Duration;

use ::redis::Value;

use crate::backend::permit_store::{Holder, Permit, Reason, RequestStatus, Swept};
use crate::backend::redis::error::not_understood;
use crate::backend::redis::script::integer;
use crate::error::Result;

/// The fields of a reply, read one after the other.
pub(super) struct Fields(std::vec::IntoIter<Value>);

impl Fields {
    pub(super) fn of(value: Value) -> Result<Fields> {
        match value {
            Value::Array(fields) => Ok(Fields(fields.into_iter())),
            _ => Err(not_understood()),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.len() == 0
    }

    pub(super) fn text(&mut self) -> Result<Arc<str>> {
        match self.0.next() {
            Some(Value::BulkString(text)) => Ok(String::from_utf8_lossy(&text).into()),
            _ => Err(not_understood()),
        }
    }

    /// Reads a text; an empty one stands for none.
    pub(super) fn some_text(&mut self) -> Result<Option<Arc<str>>> {
        Ok(Some(self.text()?).filter(|text| !text.is_empty()))
    }

    /// Reads a number, which may be written as text.
    pub(super) fn number<T: TryFrom<i64>>(&mut self) -> Result<T> {
        T::try_from(integer(self.0.next().as_ref())?).map_err(|_| not_understood())
    }

    /// Reads milliseconds; `None` for -1.
    pub(super) fn ms(&mut self) -> Result<Option<Duration>> {
        let ms: i64 = self.number()?;
        Ok(u64::try_from(ms).ok().map(Duration::from_millis))
    }

    /// Reads the code that a reply begins with, and passes over the server's time.
    pub(super) fn code(&mut self) -> Result<i64> {
        let code = self.number();
        self.0.next();
        code
    }

    /// Reads names and counts up to the end.
    pub(super) fn counts(&mut self) -> Result<Vec<(Arc<str>, u32)>> {
        let mut counts = Vec::new();
        while !self.is_empty() {
            counts.push((self.text()?, self.number()?));
        }
        Ok(counts)
    }

    /// Reads a record inside of this reply.
    pub(super) fn record(&mut self) -> Result<Record> {
        let mut record = Fields::of(self.0.next().unwrap_or(Value::Nil))?;
        record.code()?;
        Record::read(record)
    }
}

/// A request as the server knows it.
pub(super) struct Record {
    external_id: Arc<str>,
    held_for: Duration,
    pub(super) status: RequestStatus,
}

impl Record {
    /// Reads what follows code and time.
    pub(super) fn read(mut fields: Fields) -> Result<Record> {
        let external_id = fields.text()?;
        let held = fields.number::<i64>()? == 1;
        let _token = fields.text()?;
        let fence = fields.number()?;
        let owner = fields.some_text()?;
        let ttl = fields.ms()?.filter(|ttl| !ttl.is_zero());
        let expires_in = fields.ms()?;
        let held_for = fields.ms()?.unwrap_or_default();
        let permits = fields.counts()?.into_iter();
        let permits = permits.map(|(semaphore, count)| Permit {
            semaphore,
            count,
            fence,
        });
        let status = RequestStatus {
            held,
            permits: permits.collect(),
            owner,
            ttl,
            expires_in,
        };
        Ok(Record {
            external_id,
            held_for,
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
