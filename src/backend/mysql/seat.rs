//! A contender's place at a row.

use std::sync::Arc;
use std::time::Duration;

use super::Database;
use super::link::Link;
use super::poller::Ticket;
use super::store::{Row, Store, millis};
use super::wake::{Post, WakeName};
use crate::backend::{Attempt, Entry, Grant, Hold, Place, Refusal, Renewal, Seat};
use crate::bell::Waker;
use crate::clock::Moment;
use crate::error::Result;
use crate::owner::MutexOwner;

/// How long a released mutex is left to the waiter that was woken for it.
const CLAIM: Duration = Duration::from_secs(1);

/// How long a contender that is refused waits for its place in the queue.
const ENQUEUE: Duration = Duration::from_millis(200);

/// How soon to try again what was free a moment ago.
const AGAIN: Duration = Duration::from_millis(2);

pub(super) struct MysqlSeat {
    database: Arc<Database>,
    store: Arc<Store>,
    place: Place,
    name: WakeName,
    waker: Option<Waker>,
    /// Who looks out for this seat while it waits, and holds the name for it while it owns.
    post: Option<Arc<Post>>,
    /// The same without a connection of its own: a place in the poller's list.
    ticket: Option<Ticket>,
    /// The keeper holds the name for this seat.
    kept: bool,
    /// Was refused, and waits: a look comes before the next attempt, unless somebody rang.
    waiting: bool,
    /// Since when the mutex has been free, but somebody else's to take.
    reserved_since: Option<Moment>,
    /// When this ownership began, on the server's clock, as the grant said.
    acquired_at: u64,
}

impl MysqlSeat {
    pub(super) fn new(database: &Arc<Database>, store: Arc<Store>, place: &Place) -> MysqlSeat {
        MysqlSeat {
            store,
            name: database.wake_name(&place.mutex),
            database: Arc::clone(database),
            place: place.clone(),
            waker: None,
            post: None,
            ticket: None,
            kept: false,
            waiting: false,
            reserved_since: None,
            acquired_at: 0,
        }
    }

    /// One attempt: an UPDATE if there is hope, then, for a loser, a look at who won.
    fn attempt(&mut self, by: Moment) -> Result<Outcome> {
        let store = &self.store;
        let link = &mut *store.pool.checkout_as_waiter(by)?;
        let woken = self.post.as_ref().is_some_and(|post| post.has_name());
        // A waiting look locks nothing; an UPDATE would lock the row against its owner's renewal.
        if self.waiting && !woken {
            match store.read(link, &self.place.mutex, by)? {
                Some(row) if !row.is_free() && row.owner_id != *self.place.id => {
                    return Ok(Outcome::Owned(row));
                }
                Some(_) => {}
                None => {
                    store.insert(link, &self.place.mutex, by)?;
                }
            }
        }
        // Two rounds: the first may find no row, and make it.
        for _ in 0..2 {
            if let Some(owner) = store.acquire(link, &self.place, self.polite(woken), by)? {
                return Ok(Outcome::Won(owner));
            }
            match self.look(link, by) {
                Ok(Some(row)) if row.is_free() => return Ok(Outcome::Reserved),
                Ok(Some(row)) => return Ok(Outcome::Owned(row)),
                Ok(None) => {
                    store.insert(link, &self.place.mutex, by)?;
                }
                // Not ours, that is known; whose, is not worth an unknown outcome.
                Err(error) if error.is_transient() => return Ok(Outcome::Reserved),
                Err(error) => return Err(error),
            }
        }
        Ok(Outcome::Reserved)
    }

    fn look(&self, link: &mut Link, by: Moment) -> Result<Option<Row>> {
        self.store.read(link, &self.place.mutex, by)
    }

    /// The name to heed: a released mutex is for the waiter that holds it. Not for ever: its process
    /// may be stopped.
    fn polite(&self, woken: bool) -> Option<&str> {
        let overdue = self
            .reserved_since
            .is_some_and(|since| Moment::now() - since > CLAIM);
        (self.database.hub.is_on() && !woken && !overdue).then_some(self.name.as_str())
    }

    fn won(&mut self, owner: MutexOwner) -> Attempt {
        self.waiting = false;
        self.reserved_since = None;
        self.ticket = None;
        self.acquired_at = owner.acquired_at();
        let long = self.place.hold == Hold::Long;
        match self.post.take() {
            // It keeps the name that it has, or gets it in its turn.
            Some(post) if long || post.has_name() => {
                post.won();
                self.post = Some(post);
            }
            Some(post) => self.database.hub.dismiss(post),
            None if long && !self.kept && self.database.hub.is_on() => {
                self.database.hub.hold(&self.name);
                self.kept = true;
            }
            None => {}
        }
        self.database.poller.touch(&self.place.mutex);
        Attempt::Granted(Grant { owner, until: None })
    }

    fn refused(&mut self, entry: Entry, row: Option<Row>, by: Moment) -> Attempt {
        if entry == Entry::Queue {
            self.wait(by);
        }
        let (owner, retry_in) = match &row {
            Some(row) => {
                self.reserved_since = None;
                let left = row.transition_at.saturating_sub(row.now_ms);
                (row.owner(), Duration::from_millis(left + 1))
            }
            None => {
                let since = *self.reserved_since.get_or_insert_with(Moment::now);
                let left = CLAIM.saturating_sub(Moment::now() - since);
                (MutexOwner::NONE, left.max(AGAIN))
            }
        };
        Attempt::Refused(Refusal { owner, retry_in })
    }

    /// Has somebody look out for this seat: a lookout while there is one, else the poller.
    fn wait(&mut self, by: Moment) {
        self.waiting = true;
        self.let_name_go();
        if let Some(post) = &self.post {
            post.lost();
            return;
        }
        let Some(waker) = &self.waker else {
            return;
        };
        let (hub, poller) = (&self.database.hub, &self.database.poller);
        self.post = hub.look_out(&self.place.mutex, &self.name, waker);
        if let Some(post) = &self.post {
            self.ticket = None;
            // Whoever says that it waits has its place in the server's queue: those who come later
            // come after it.
            post.wait_posted(by.remaining().min(ENQUEUE));
        } else if self.ticket.is_none() {
            self.ticket = poller.wait_free(&self.place.mutex, waker).ok();
        }
    }

    /// Neither owns nor waits any more. Leaves messages only.
    fn leave(&mut self) {
        self.waiting = false;
        self.reserved_since = None;
        self.ticket = None;
        if let Some(post) = self.post.take() {
            self.database.hub.dismiss(post);
        }
        self.let_name_go();
    }

    fn let_name_go(&mut self) {
        if std::mem::take(&mut self.kept) {
            self.database.hub.free(&self.name);
        }
    }
}

/// What an attempt came to.
enum Outcome {
    Won(MutexOwner),
    Owned(Row),
    /// Free, but somebody else's to take; or somebody else's, and nobody knows whose.
    Reserved,
}

impl Seat for MysqlSeat {
    fn listen(&mut self, waker: &Waker, _by: Moment) -> Result<()> {
        if self.waker.as_ref().is_some_and(|known| known.same(waker)) {
            return Ok(());
        }
        self.leave();
        self.waker = Some(waker.clone());
        // The wait itself begins with the first refusal: a name that was freed before it was waited
        // for is granted at once, so that nothing can be missed.
        if self.place.hold == Hold::Long {
            self.database.hub.warm_up();
        }
        Ok(())
    }

    fn acquire(&mut self, entry: Entry, by: Moment) -> Result<Attempt> {
        let outcome = self
            .attempt(by)
            .map_err(|error| error.context(format_args!("mutex {:?}", self.place.mutex)))?;
        Ok(match outcome {
            Outcome::Won(owner) => self.won(owner),
            Outcome::Owned(row) => self.refused(entry, Some(row), by),
            Outcome::Reserved => self.refused(entry, None, by),
        })
    }

    fn renew(&mut self, fence: u64, by: Moment) -> Result<Renewal> {
        let store = &self.store;
        let link = &mut *store.pool.checkout(by)?;
        let sent = Moment::now();
        if let Some(ttl_at) = store.renew(link, &self.place, fence, by)? {
            let (ttl, total) = millis(self.place.lease);
            let now_ms = ttl_at.saturating_sub(ttl);
            let owner = MutexOwner::new(
                self.place.id.clone(),
                self.acquired_at,
                ttl_at,
                now_ms.saturating_add(total),
                fence,
            );
            return Ok(Renewal::Renewed(Grant {
                owner: owner.observed_at(now_ms, sent),
                until: None,
            }));
        }
        // Lost, that is known: by whom is worth a look, but not an error.
        let row = self.look(link, by).ok().flatten();
        let owner = row.map_or(MutexOwner::NONE, |row| row.owner());
        if let Some(post) = &self.post {
            post.lost();
        }
        self.let_name_go();
        Ok(Renewal::Lost(owner))
    }

    fn release(&mut self, fence: u64, by: Moment) -> Result<bool> {
        let store = &self.store;
        let Place { mutex, id, .. } = &self.place;
        let released = store
            .pool
            .checkout(by)
            .and_then(|mut link| store.release(&mut link, mutex, id, Some(fence), by));
        // The row first, then the name: whoever is woken by it finds the mutex free.
        self.leave();
        self.database.poller.touch(&self.place.mutex);
        released
    }

    fn withdraw(&mut self, _by: Moment) -> Result<()> {
        self.leave();
        self.waker = None;
        Ok(())
    }
}

impl Drop for MysqlSeat {
    fn drop(&mut self) {
        self.leave();
    }
}
