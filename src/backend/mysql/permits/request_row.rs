//! `RequestRow`: a request and its permits, as they are read from the tables.

use std::sync::Arc;
use std::time::Duration;

use super::sql::{Answer, Statements, columns, duration, fill, quote_all};
use crate::backend::permit_store::{Permit, RequestStatus};
use crate::error::Result;

/// A row of the requests' table, with its permits.
#[derive(Clone, Debug)]
pub(super) struct RequestRow {
    pub(super) external_id: Arc<str>,
    pub(super) request_id: u64,
    pub(super) token: u64,
    /// Whether its state is ACQUIRED.
    pub(super) held: bool,
    owner: Option<Arc<str>>,
    ttl: Option<Duration>,
    pub(super) expires_in: Option<Duration>,
    /// In the order of the semaphores' names.
    pub(super) permits: Vec<Permit>,
}

/// What the statement reads: the request, then the permit, if there is one.
type Columns = (
    String,
    u64,
    u64,
    String,
    Option<String>,
    Option<f64>,
    Option<i64>,
    Option<u64>,
    Option<String>,
    Option<u32>,
);

impl RequestRow {
    /// The statement that reads these requests.
    pub(super) fn statement<T: AsRef<str>>(
        statements: &Statements,
        external_ids: impl IntoIterator<Item = T>,
    ) -> String {
        let ids = quote_all(external_ids);
        fill(&statements.read, &[("{external_ids}", &ids)])
    }

    /// What that statement answered.
    pub(super) fn parse(answer: Answer) -> Result<Vec<RequestRow>> {
        let mut found: Vec<RequestRow> = Vec::new();
        for row in answer.rows {
            let row = columns::<Columns>(row)?;
            let (external_id, request_id, token, state, owner, ttl, expires, ..) = &row;
            if found
                .last()
                .is_none_or(|last| last.request_id != *request_id)
            {
                found.push(RequestRow {
                    external_id: Arc::from(external_id.as_str()),
                    request_id: *request_id,
                    token: *token,
                    held: state == "ACQUIRED",
                    owner: owner.as_deref().map(Arc::from),
                    ttl: ttl.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()),
                    expires_in: duration(*expires),
                    permits: Vec::new(),
                });
            }
            // A permit without a semaphore was released, and the semaphore deleted since.
            if let (Some(found_row), (.., Some(fence), Some(name), Some(count))) =
                (found.last_mut(), row)
            {
                let permit = Permit {
                    semaphore: Arc::from(name),
                    count,
                    fence,
                };
                match found_row.permits.last_mut() {
                    // Superseded by a take-over.
                    Some(last) if last.semaphore == permit.semaphore => *last = permit,
                    _ => found_row.permits.push(permit),
                }
            }
        }
        Ok(found)
    }

    pub(super) fn status(&self) -> RequestStatus {
        RequestStatus {
            held: self.held,
            permits: self.permits.clone(),
            owner: self.owner.clone(),
            ttl: self.ttl,
            expires_in: self.expires_in,
        }
    }
}
