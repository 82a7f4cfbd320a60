//! A backend's side of a contender for one row.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::Database;
use super::queue::{Entry, Registered, Turn, WaiterState};
use super::rows::{Call, NO_TOKEN, Row, Rows, Whose, millis};
use super::table::{TOKEN, WAITERS};
use super::waiter::Waiter;
use crate::backend::{
    Attempt, CLAIM_TIME, Contender, Grant, OnRefusal, Purpose, RawContender, Refusal, Renewal,
};
use crate::clock::Moment;
use crate::error::{Error, Result};
use crate::owner::MutexOwner;
use crate::parker::Unparker;
use crate::pool::Lane;

/// How often one call tries: the first time it may find no row and make it, the second time it may find
/// the row free, or that the server's clock was set.
const ROUNDS: usize = 3;

/// How soon to look again after a look that failed.
const SOON: Duration = Duration::from_millis(20);

pub(super) struct MysqlContender {
    database: Arc<Database>,
    rows: Arc<Rows>,
    contender: Contender,
    /// What the queue of this process knows this contender by.
    number: u64,
    unparker: Unparker,
    /// May stand in the queue of this process.
    queued: bool,
    /// The row may be ours: it was granted and not released, or a reply was lost.
    may_own: bool,
    /// There was no row, and no time to make it.
    missing: bool,
    /// When this ownership began, on the server's clock.
    acquired_at: u64,
}

impl MysqlContender {
    pub(super) fn new(
        database: &Arc<Database>,
        contender: &Contender,
        wake: &Unparker,
    ) -> Result<MysqlContender> {
        static NUMBERS: AtomicU64 = AtomicU64::new(0);
        database.check_lease(contender.lease)?;
        Ok(MysqlContender {
            rows: Arc::clone(&database.rows),
            database: Arc::clone(database),
            contender: contender.clone(),
            number: NUMBERS.fetch_add(1, Ordering::Relaxed),
            unparker: wake.clone(),
            queued: false,
            may_own: false,
            missing: false,
            acquired_at: 0,
        })
    }

    fn waiter(&self) -> &Arc<Waiter> {
        &self.database.waiter
    }

    fn mutex(&self) -> &Arc<str> {
        &self.contender.mutex
    }

    /// This contender as the queue keeps it, if it wants to wait.
    fn entry(&self, on_refusal: OnRefusal) -> Option<Entry> {
        (on_refusal == OnRefusal::Enqueue).then(|| Entry {
            number: self.number,
            unparker: self.unparker.clone(),
            leads: self.contender.purpose == Purpose::Lead,
        })
    }

    /// One attempt: an UPDATE, and for a loser a look at who won. A head that is not registered registers
    /// before it looks, so that nothing falls in between.
    fn attempt(
        &mut self,
        call: &mut Call<'_>,
        entry: Option<&Entry>,
        mut turn: Turn,
        not_after: Moment,
    ) -> Result<Attempt> {
        let mut asked = std::mem::take(&mut self.missing);
        if asked {
            self.insert(call).map_err(Error::not_sent)?;
        }
        for _ in 0..ROUNDS {
            // The first request is made whatever time is left; a later one would only cost the connection.
            if std::mem::replace(&mut asked, true) {
                call.expect_time()?;
            }
            let (token, more) = match turn {
                Turn::Head {
                    registered: true,
                    more,
                } => (Some(self.waiter().token.clone()), more),
                _ => (None, false),
            };
            let name = token.as_deref().unwrap_or(NO_TOKEN);
            let sent = Moment::now();
            match call.acquire(&self.contender, name, more, not_after) {
                Ok(Some(owner)) => return Ok(self.won(call, owner, token.map(|_| more), sent)),
                Ok(None) => self.may_own = false,
                Err(failed) => {
                    self.may_own |= failed.unknown;
                    return Err(failed.error);
                }
            }
            // We surely do not own it: a failure here must not report an unknown outcome.
            let looked = self.look(call, entry, &mut turn);
            if let Some(attempt) = looked.map_err(Error::not_sent)? {
                return Ok(attempt);
            }
        }
        let pause = match turn {
            Turn::Head { .. } => {
                let waiter = self.waiter();
                let pause = waiter.poll_interval;
                waiter.queues.quarrelled(self.mutex(), self.number, pause)
            }
            _ => SOON,
        };
        Ok(refused(MutexOwner::NONE, pause))
    }

    /// What a contender does that was refused: it enters the queue if it wants to wait, registers there if
    /// it is the head, and reads the row. `None`: it should try once more.
    fn look(
        &mut self,
        call: &mut Call<'_>,
        entry: Option<&Entry>,
        turn: &mut Turn,
    ) -> Result<Option<Attempt>> {
        if let (Some(entry), Turn::Alone) = (entry, &*turn) {
            *turn = self.waiter().queues.join(self.mutex(), entry);
            self.queued = true;
            if let Turn::Wait(owner, retry_in) = turn {
                return Ok(Some(refused(owner.clone(), *retry_in)));
            }
        }
        let mut row = None;
        if self.waiter().queues.waiter_state() == WaiterState::Untried {
            row = call.look(self.mutex())?;
            if row.is_none() {
                // The first that waits opens two connections: not for a row that is only missing.
                self.insert(call)?;
                return Ok(None);
            }
        }
        if let Turn::Head { registered, .. } = turn
            && !*registered
        {
            // Not into the time that the requests after it take.
            let rest = (call.by.remaining() / 2).max(call.connection.round_trip() * 2);
            if self.waiter().is_up(call.by - rest) {
                self.waiter().step(call, self.mutex())?;
                *registered = true;
                // What was read before may have changed before the token stood there.
                row = None;
            }
        }
        if row.is_none() {
            row = call.look(self.mutex())?;
        }
        let Some(row) = row else {
            self.insert(call)?;
            return Ok(None);
        };
        let own = match turn {
            Turn::Head {
                registered: true, ..
            } => self.waiter().token.as_str(),
            _ => NO_TOKEN,
        };
        if row.is_for(&self.contender.id, own) {
            return Ok(None);
        }
        let (owner, queues) = (row.owner(), &self.waiter().queues);
        let Turn::Head { registered, .. } = turn else {
            let longest = self.waiter().poll_interval.max(SOON);
            return Ok(Some(refused(owner, row.left().clamp(SOON, longest))));
        };
        if *registered && !row.tokens().any(|token| token == own) {
            queues.set_registered(self.mutex(), Registered::No);
            *registered = false;
            if row.waiters.len() <= WAITERS - TOKEN {
                // Somebody took this process for dead: it queues again.
                return Ok(None);
            }
        }
        let retry_in = self.time_to_look(&row, *registered);
        queues.looked(self.mutex(), self.number, &owner, row.sent + retry_in);
        if *registered {
            self.waiter().watch(call, self.mutex());
        }
        Ok(Some(refused(owner, retry_in)))
    }

    /// Makes the row; with the next attempt where this one has no time for it.
    fn insert(&mut self, call: &mut Call<'_>) -> Result<()> {
        self.missing = true;
        call.insert(self.mutex())?;
        self.missing = false;
        Ok(())
    }

    /// When the head looks if nobody tells it to: at the end of the lease or hand-over that it read, and of
    /// the claim time of whoever is before it; or, where nobody will tell it, at the poll interval. An owner
    /// of Simba's tells nobody.
    fn time_to_look(&self, row: &Row, registered: bool) -> Duration {
        let waiter = self.waiter();
        let left = row.left() + Duration::from_millis(1);
        if !registered || row.is_simbas() || waiter.queues.waiter_state() != WaiterState::Up {
            return left.clamp(SOON, waiter.poll_interval.max(SOON));
        }
        if row.tokens().next() == Some(&waiter.token) {
            left
        } else {
            left + CLAIM_TIME
        }
    }

    fn won(
        &mut self,
        call: &mut Call<'_>,
        owner: MutexOwner,
        token: Option<bool>,
        sent: Moment,
    ) -> Attempt {
        self.may_own = true;
        self.queued = false;
        self.acquired_at = owner.acquired_at();
        let gone_at = sent + self.contender.lease.total() + Duration::from_millis(1);
        let queues = &self.waiter().queues;
        if queues.granted(self.mutex(), self.number, token, &owner, gone_at) {
            // Fails only where the waiting thread sees to it.
            let _ = self.waiter().step(call, self.mutex());
        }
        Attempt::Granted(Grant { owner, until: None })
    }

    fn leave(&mut self) -> bool {
        std::mem::take(&mut self.queued) && self.waiter().queues.leave(self.mutex(), self.number)
    }
}

fn refused(owner: MutexOwner, retry_in: Duration) -> Attempt {
    Attempt::Refused(Refusal {
        owner,
        retry_in,
        asked: true,
    })
}

impl RawContender for MysqlContender {
    fn acquire(&mut self, on_refusal: OnRefusal, by: Moment) -> Result<Attempt> {
        let entry = self.entry(on_refusal);
        let was_queued = self.queued;
        let turn = match &entry {
            Some(entry) if !self.may_own => self.waiter().queues.turn(self.mutex(), entry),
            _ => Turn::Alone,
        };
        self.queued |= turn != Turn::Alone;
        if let Turn::Wait(owner, retry_in) = turn {
            return Ok(Attempt::Refused(Refusal {
                owner,
                retry_in,
                asked: false,
            }));
        }
        // However late an answer comes, the server grants nothing after `by`.
        let rows = Arc::clone(&self.rows);
        let outcome = rows.call(Lane::Other, by, |call| {
            self.attempt(call, entry.as_ref(), turn, by)
        });
        outcome.map_err(|error| {
            if self.queued {
                self.waiter().queues.failed(self.mutex(), self.number);
            }
            if self.queued && !was_queued {
                // Something was sent, whatever failed last: the caller has a place to give up.
                return Error::new(error.kind(), error.to_string());
            }
            error
        })
    }

    fn renew(&mut self, fence: u64, by: Moment) -> Result<Renewal> {
        let mut connection = self.rows.checkout_for(self.contender.lease, by)?;
        let mut call = self.rows.on(&mut connection, by);
        let sent = Moment::now();
        if let Some(ttl_at) = call.renew(&self.contender, fence)? {
            let (ttl, total) = millis(self.contender.lease);
            let now = ttl_at.saturating_sub(ttl);
            let owner = MutexOwner::new(
                Arc::clone(&self.contender.id),
                self.acquired_at,
                ttl_at,
                now.saturating_add(total),
                fence,
            );
            return Ok(Renewal::Renewed(Grant {
                owner: owner.observed_at(now, sent),
                until: None,
            }));
        }
        self.may_own = false;
        // Lost, that is known: to whom is worth a look, but not an error.
        let row = call.look(self.mutex()).ok().flatten();
        Ok(Renewal::Lost(
            row.map_or(MutexOwner::NONE, |row| row.owner()),
        ))
    }

    fn release(&mut self, fence: u64, by: Moment) -> Result<bool> {
        let rows = Arc::clone(&self.rows);
        rows.call_to_end(by, |call| {
            let whose = Whose::Owner(&self.contender.id, fence);
            let released = call.release(self.mutex(), whose)?;
            self.may_own = false;
            let token = match released {
                Some(token) => Some(token),
                // Perhaps a release whose answer was lost: whoever it was handed over to was not told.
                None => {
                    let row = call.look(self.mutex()).ok().flatten();
                    row.and_then(|row| row.handed_to()?.parse().ok())
                }
            };
            if let Some(token) = token {
                self.waiter().hand_on(call, self.mutex(), token);
            }
            Ok(released.is_some())
        })
    }

    fn withdraw(&mut self, by: Moment) -> Result<()> {
        if !self.leave() {
            return Ok(());
        }
        // Not a moment beyond `by`, which is past the caller's timeout as it is: where this fails the
        // waiting thread tries again.
        let mut connection = self.rows.pool.checkout(Lane::Other, by)?;
        let call = &mut self.rows.on(&mut connection, by);
        self.waiter().step(call, self.mutex())
    }
}

impl Drop for MysqlContender {
    fn drop(&mut self) {
        // The waiting thread withdraws the token if this was the last that waited.
        self.leave();
    }
}
