//! A backend's side of a contender for one row.

use std::sync::Arc;
use std::time::Duration;

use super::Database;
use super::rows::{Call, Whose};
use super::token::Token;
use crate::backend::{
    Attempt, CLAIM_TIME, Contender, Grant, OnRefusal, RawContender, Refusal, Renewal, Wakeups,
};
use crate::clock::Moment;
use crate::error::{Error, Result};
use crate::owner::MutexOwner;
use crate::parker::Unparker;
use crate::pool::Lane;

/// How often one call tries. Each try but the last may find no row and make it, find the row free, or find that the
/// server's clock was set.
const ROUNDS: usize = 3;

/// The shortest pause before another look.
const SOON: Duration = Duration::from_millis(20);

/// How soon a contender looks again that poked, because its KILL may have come before the WAIT that it was meant for;
/// or for which the waiting connections are being opened.
const POKED: Duration = Duration::from_millis(50);

pub(super) struct MysqlContender {
    database: Arc<Database>,
    contender: Contender,
    unparker: Unparker,
    /// What may stand in the row for it; [`Token::NONE`] where it has no place.
    token: Token,
    /// There was no row, and perhaps no time to make it.
    missing: bool,
    /// When this ownership began, on the server's clock.
    acquired_at: u64,
}

impl MysqlContender {
    pub(super) fn new(database: &Arc<Database>, who: &Contender, wake: &Unparker) -> Self {
        MysqlContender {
            database: Arc::clone(database),
            contender: who.clone(),
            unparker: wake.clone(),
            token: Token::NONE,
            missing: false,
            acquired_at: 0,
        }
    }

    /// One attempt: an UPDATE, and for a loser a look at who won.
    fn attempt(&mut self, call: &mut Call<'_>, on_refusal: OnRefusal) -> Result<Attempt> {
        let waiting = Arc::clone(&self.database.waiting);
        let queues = on_refusal == OnRefusal::Enqueue;
        if !queues {
            // It may be leaving, unsure whether it owns. Its place goes whatever comes of that.
            waiting.leave(self.take_token());
        } else if self.token == Token::NONE {
            self.token = waiting.take_over(&self.contender, &self.unparker);
        }
        if self.missing {
            self.insert(call).map_err(Error::not_sent)?;
        }
        for _ in 0..ROUNDS {
            if let Some(owner) = call.acquire(&self.contender, self.token)? {
                waiting.forget(self.take_token());
                self.acquired_at = owner.acquired_at();
                return Ok(Attempt::Granted(Grant { owner, until: None }));
            }
            // It does not own, that is known: a failure here leaves nothing unsure.
            if let Some(refusal) = self.look(call, queues).map_err(Error::not_sent)? {
                return Ok(Attempt::Refused(refusal));
            }
        }
        Ok(Attempt::Refused(refused(MutexOwner::NONE, SOON)))
    }

    /// What a contender does that was refused: it registers, if it wants to wait, and reads the row. `None`: it
    /// should try once more.
    fn look(&mut self, call: &mut Call<'_>, queues: bool) -> Result<Option<Refusal>> {
        let waiting = Arc::clone(&self.database.waiting);
        let Contender { mutex, id, .. } = &self.contender;
        // First the named lock is held, then the token registered: otherwise it would count as dead.
        if queues && self.token == Token::NONE {
            self.token = waiting.join(&self.contender, &self.unparker);
            if self.token != Token::NONE {
                call.register(mutex, self.token)?;
            }
        }
        let Some(row) = call.look_for(mutex, id, self.token)? else {
            self.insert(call)?;
            return Ok(None);
        };
        if row.takeable {
            call.expect_time()?;
            return Ok(None);
        }
        let poll = self.database.poll_interval.max(SOON);
        let mut retry_in = row.left.clamp(SOON, poll);
        match (waiting.wakeups(), row.position(self.token)) {
            (Wakeups::Working, Some(place)) => {
                // Those before it have the claim time.
                retry_in = row.left + CLAIM_TIME.min(CLAIM_TIME * place);
                if waiting.sleeps(call, self.token, row.fence) {
                    retry_in = retry_in.min(POKED);
                }
            }
            (Wakeups::Working, None) if self.token != Token::NONE && row.has_room() => {
                // Another process took this one for dead.
                call.register(mutex, self.token)?;
                call.expect_time()?;
                return Ok(None);
            }
            (Wakeups::Untried, _) if queues => {
                waiting.start();
                retry_in = retry_in.min(POKED);
            }
            _ => {}
        }
        Ok(Some(refused(row.owner(), retry_in)))
    }

    /// Makes the row; with the next attempt where this one has no time for it.
    fn insert(&mut self, call: &mut Call<'_>) -> Result<()> {
        self.missing = true;
        call.insert(&self.contender.mutex)?;
        self.missing = false;
        call.expect_time()
    }

    fn take_token(&mut self) -> Token {
        std::mem::replace(&mut self.token, Token::NONE)
    }
}

fn refused(owner: MutexOwner, retry_in: Duration) -> Refusal {
    Refusal { owner, retry_in }
}

impl RawContender for MysqlContender {
    /// However late an answer comes, the server grants nothing after `by`.
    fn acquire(&mut self, on_refusal: OnRefusal, by: Moment) -> Result<Attempt> {
        let rows = Arc::clone(&self.database.rows);
        let had_place = self.token != Token::NONE;
        let outcome = self.attempt(&mut rows.call(Lane::Other, by)?, on_refusal);
        outcome.map_err(|error| match self.token != Token::NONE && !had_place {
            // There is a place to give up, whatever failed after it was taken.
            true => error.perhaps_sent(),
            false => error,
        })
    }

    fn renew(&mut self, fence: u64, by: Moment) -> Result<Renewal> {
        let mut call = self.database.rows.call(Lane::Owner, by)?;
        if let Some(owner) = call.renew(&self.contender, self.acquired_at, fence)? {
            return Ok(Renewal::Renewed(Grant { owner, until: None }));
        }
        // Lost, that is known: to whom is worth a look, but not an error.
        let owner = call.owner(&self.contender.mutex);
        Ok(Renewal::Lost(owner.unwrap_or(MutexOwner::NONE)))
    }

    fn release(&mut self, fence: u64, by: Moment) -> Result<bool> {
        let Contender { mutex, id, .. } = &self.contender;
        self.database.release(mutex, Whose::Owner(id, fence), by)
    }

    fn withdraw(&mut self, by: Moment) -> Result<()> {
        let token = self.take_token();
        self.database.waiting.withdraw(token, by)
    }
}

impl Drop for MysqlContender {
    fn drop(&mut self) {
        self.database.waiting.leave(self.token);
    }
}
