//! A backend's side of an observer of one row: it looks, at the poll interval and when a lease ends.

use std::sync::Arc;
use std::time::Duration;

use super::Database;
use crate::backend::{RawObserver, View};
use crate::clock::Moment;
use crate::error::Result;
use crate::owner::MutexOwner;
use crate::pool::Lane;

pub(super) struct MysqlObserver {
    database: Arc<Database>,
    mutex: Arc<str>,
}

impl MysqlObserver {
    pub(super) fn new(database: &Arc<Database>, mutex: &Arc<str>) -> MysqlObserver {
        MysqlObserver {
            database: Arc::clone(database),
            mutex: Arc::clone(mutex),
        }
    }
}

impl RawObserver for MysqlObserver {
    fn observe(&mut self, by: Moment) -> Result<View> {
        let rows = &self.database.rows;
        let row = rows.call(Lane::Other, by, |call| call.look(&self.mutex))?;
        let look_in = self.database.waiter.poll_interval;
        Ok(match row {
            Some(row) if !row.is_over() => View {
                owner: row.owner(),
                look_in: look_in.min(row.left() + Duration::from_millis(1)),
            },
            _ => View {
                owner: MutexOwner::NONE,
                look_in,
            },
        })
    }
}
