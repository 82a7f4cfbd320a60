//! An observer's place at a row.

use std::sync::Arc;
use std::time::Duration;

use super::Database;
use super::poller::Ticket;
use crate::backend::{Sight, Watch};
use crate::bell::Waker;
use crate::clock::Moment;
use crate::error::Result;
use crate::owner::MutexOwner;

/// How long an observer of a free mutex looks away: the poller rings when there is news.
const IDLE: Duration = Duration::from_secs(60);

pub(super) struct MysqlWatch {
    database: Arc<Database>,
    mutex: Arc<str>,
    listening: Option<(Waker, Ticket)>,
}

impl MysqlWatch {
    pub(super) fn new(database: &Arc<Database>, mutex: &Arc<str>) -> MysqlWatch {
        MysqlWatch {
            database: Arc::clone(database),
            mutex: Arc::clone(mutex),
            listening: None,
        }
    }
}

impl Watch for MysqlWatch {
    fn listen(&mut self, waker: &Waker, _by: Moment) -> Result<()> {
        if !matches!(&self.listening, Some((known, _)) if known.same(waker)) {
            let ticket = self.database.poller.observe(&self.mutex, waker)?;
            self.listening = Some((waker.clone(), ticket));
        }
        Ok(())
    }

    fn observe(&mut self, by: Moment) -> Result<Sight> {
        let store = &self.database.store;
        let mut link = store.pool.checkout_as_waiter(by)?;
        let row = store.read(&mut link, &self.mutex, by)?;
        if let Some((_, ticket)) = &self.listening {
            ticket.saw(row.as_ref().map_or((0, false), |row| row.seen()));
        }
        Ok(match row {
            Some(row) if !row.is_free() => Sight {
                again_in: Duration::from_millis(row.transition_at.saturating_sub(row.now_ms) + 1),
                owner: row.owner(),
            },
            _ => Sight {
                owner: MutexOwner::NONE,
                again_in: IDLE,
            },
        })
    }
}
