//! A request as it stands in the tables.

use std::sync::Arc;
use std::time::Duration;

use super::answer::{Acquisition, Permit, RequestStatus};
use super::request::Wish;
use super::store::{Answer, Store, columns, fill, first, quote_all};
use crate::error::{Error, ErrorKind, Result};

const READ: &str = include_str!("../../sql/permit-read.sql");

/// A request and its permits.
#[derive(Clone, Debug)]
pub(super) struct Record {
    pub(super) external_id: Arc<str>,
    pub(super) request_id: u64,
    /// Whether its state is ACQUIRED.
    pub(super) held: bool,
    owner: Option<Arc<str>>,
    ttl: Option<Duration>,
    expires_in: Option<Duration>,
    /// In the order of the names; each with the id of its semaphore.
    pub(super) permits: Vec<(Permit, u64)>,
}

/// What the statement reads: the request, then the permit, if there is one.
type Columns = (
    String,
    u64,
    String,
    Option<String>,
    Option<f64>,
    Option<i64>,
    Option<u64>,
    Option<u64>,
    Option<String>,
    Option<u32>,
);

impl Record {
    /// The statement that reads these requests.
    pub(super) fn statement<T: AsRef<str>>(external_ids: impl IntoIterator<Item = T>) -> String {
        fill(READ, &[("{external_ids}", &quote_all(external_ids))])
    }

    /// What that statement answered.
    pub(super) fn parse(answer: Answer) -> Result<Vec<Record>> {
        let mut records: Vec<Record> = Vec::new();
        for row in answer.rows {
            let (
                external_id,
                request_id,
                state,
                owner,
                ttl,
                expires,
                permit,
                semaphore,
                name,
                count,
            ) = columns::<Columns>(row)?;
            if records
                .last()
                .is_none_or(|last| last.request_id != request_id)
            {
                records.push(Record {
                    external_id: Arc::from(external_id),
                    request_id,
                    held: state == "ACQUIRED",
                    owner: owner.map(Arc::from),
                    ttl: ttl.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()),
                    expires_in: expires
                        .map(|micros| Duration::from_micros(u64::try_from(micros).unwrap_or(0))),
                    permits: Vec::new(),
                });
            }
            // A permit without a semaphore was released, and the semaphore deleted since.
            if let (Some(record), Some(fence), Some(semaphore_id), Some(name), Some(count)) =
                (records.last_mut(), permit, semaphore, name, count)
            {
                let permit = Permit {
                    semaphore: Arc::from(name),
                    count,
                    fence,
                };
                record.permits.push((permit, semaphore_id));
            }
        }
        Ok(records)
    }

    /// The request with this external id, if there is one.
    pub(super) fn read(store: &Store, external_id: &str) -> Result<Option<Record>> {
        let answers = store.send_alone(&Record::statement([external_id]))?;
        Ok(Record::parse(first(answers)?)?.pop())
    }

    /// What this record means to who asks for `wish` under its external id. `ours`: an earlier try of
    /// the same call may have made it.
    pub(super) fn answer(&self, wish: &Wish, ours: bool) -> Result<Acquisition> {
        if !self.held {
            return Ok(Acquisition::AlreadyReleased);
        }
        let mut granted: Vec<(&str, u32)> = self
            .permits
            .iter()
            .map(|(permit, _)| (&*permit.semaphore, permit.count))
            .collect();
        granted.sort_unstable();
        let same = granted
            .into_iter()
            .eq(wish.permits.iter().map(|(name, count)| (&**name, *count)))
            && self.owner == wish.owner;
        if !same {
            return Err(Error::new(
                ErrorKind::Conflict,
                format!(
                    "external id {:?} is in use for {}; another wish needs an external id of its own",
                    self.external_id,
                    self.describe()
                ),
            ));
        }
        Ok(if ours {
            Acquisition::Acquired(self.permits())
        } else {
            Acquisition::AlreadyAcquired(self.permits())
        })
    }

    pub(super) fn permits(&self) -> Vec<Permit> {
        self.permits
            .iter()
            .map(|(permit, _)| permit.clone())
            .collect()
    }

    pub(super) fn status(&self) -> RequestStatus {
        RequestStatus {
            held: self.held,
            permits: self.permits(),
            owner: self.owner.clone(),
            ttl: self.ttl,
            expires_in: self.expires_in,
        }
    }

    fn describe(&self) -> String {
        let mut parts: Vec<String> = self
            .permits
            .iter()
            .map(|(permit, _)| format!("{} of {:?}", permit.count, permit.semaphore))
            .collect();
        if let Some(owner) = &self.owner {
            parts.push(format!("owner {owner:?}"));
        }
        parts.join(", ")
    }
}
