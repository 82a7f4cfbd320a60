//! A backend's side of an observer of one row: it looks, at the poll interval and when a lease ends.

use std::sync::Arc;
use std::time::Duration;

use super::Database;
use crate::backend::{RawObserver, View};
use crate::clock::Moment;
use crate::error::Result;
use crate::owner::MutexOwner;

pub(super) struct MysqlObserver {
    pub(super) database: Arc<Database>,
    pub(super) mutex: Arc<str>,
}

impl RawObserver for MysqlObserver {
    fn observe(&mut self, by: Moment) -> Result<View> {
        let row = self.database.call(by)?.look(&self.mutex)?;
        let left = row.as_ref().map(|row| row.left);
        let left = left.filter(|left| !left.is_zero());
        let poll = self.database.poll_interval;
        Ok(View {
            owner: row.map_or(MutexOwner::NONE, |row| row.owner()),
            look_in: left.map_or(poll, |left| poll.min(left + Duration::from_millis(1))),
        })
    }
}
