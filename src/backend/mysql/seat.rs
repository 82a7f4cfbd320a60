//! A contender's place at a row.

use std::sync::Arc;
use std::time::Duration;

use super::Database;
use super::line::{Lines, Number, Standing};
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

/// How long one that gives up waits until nothing is left of its wait on the server.
const WITHDRAW: Duration = Duration::from_secs(1);

/// How soon to try again what was free a moment ago.
const AGAIN: Duration = Duration::from_millis(2);

pub(super) struct MysqlSeat {
    database: Arc<Database>,
    store: Arc<Store>,
    place: Place,
    name: WakeName,
    /// The name of the first place in the queue for that one.
    queue: WakeName,
    waker: Option<Waker>,
    /// A locker's place in the line with the others of this factory.
    number: Number,
    /// Who looks out for a service while it waits, and holds the name for it while it owns.
    post: Option<Arc<Post>>,
    /// The same without a connection of its own: a place in the poller's list.
    ticket: Option<Ticket>,
    /// The keeper holds the name for this seat.
    kept: bool,
    /// Was refused, and waits: a look comes before the next attempt, unless somebody rang.
    waiting: bool,
    /// The last attempt or release had no answer: the row may be ours.
    unsure: bool,
    /// Since when the mutex has been free, but somebody else's to take.
    reserved_since: Option<Moment>,
    /// When this ownership began, on the server's clock, as the grant said.
    acquired_at: u64,
}

impl MysqlSeat {
    pub(super) fn new(database: &Arc<Database>, store: Arc<Store>, place: &Place) -> MysqlSeat {
        let name = database.wake_name(&place.mutex);
        MysqlSeat {
            store,
            queue: name.queue(),
            name,
            database: Arc::clone(database),
            place: place.clone(),
            waker: None,
            number: Number::new(),
            post: None,
            ticket: None,
            kept: false,
            waiting: false,
            unsure: false,
            reserved_since: None,
            acquired_at: 0,
        }
    }

    /// One attempt: an UPDATE if there is hope, then, for a loser, a look at who won.
    fn attempt(&mut self, by: Moment) -> Result<Outcome> {
        let store = &self.store;
        let link = &mut *store.pool.checkout_as_waiter(by)?;
        let Standing { named, rung, first } = self.standing();
        // A waiting look locks nothing; an UPDATE would lock the row against its owner's renewal.
        if self.waiting && !named && !rung {
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
            if let Some(owner) = store.acquire(link, &self.place, self.polite(named, first), by)? {
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

    fn standing(&self) -> Standing {
        match self.place.hold {
            Hold::Short => self.lines().standing(&self.place.mutex, self.number),
            Hold::Long => Standing {
                named: self.post.as_ref().is_some_and(|post| post.has_name()),
                rung: false,
                first: self.post.as_ref().is_some_and(|post| post.is_first()),
            },
        }
    }

    fn lines(&self) -> &Lines {
        &self.database.lines
    }

    fn look(&self, link: &mut Link, by: Moment) -> Result<Option<Row>> {
        self.store.read(link, &self.place.mutex, by)
    }

    /// The names to heed: a released mutex is for the waiter that holds one of them. Not for ever: its
    /// process may be stopped.
    fn polite(&self, named: bool, first: bool) -> Option<[&str; 2]> {
        let overdue = self
            .reserved_since
            .is_some_and(|since| Moment::now() - since > CLAIM);
        // Where our own lookout holds the first place, only the other name can be somebody else's.
        let queue = if first { &self.name } else { &self.queue };
        (self.database.hub.is_on() && !named && !overdue)
            .then_some([self.name.as_str(), queue.as_str()])
    }

    fn won(&mut self, owner: MutexOwner) -> Attempt {
        self.waiting = false;
        self.reserved_since = None;
        self.ticket = None;
        self.acquired_at = owner.acquired_at();
        match self.post.take() {
            _ if self.place.hold == Hold::Short => {
                let spare = self.lines().won(&self.place.mutex, self.number, &owner);
                self.dismiss(spare);
            }
            // It keeps the name that it has.
            Some(post) if post.has_name() => {
                post.won();
                self.post = Some(post);
            }
            spare => {
                self.dismiss(spare);
                if !self.kept && self.database.hub.is_on() {
                    self.database.hub.hold(&self.name);
                    self.kept = true;
                }
            }
        }
        self.database.poller.touch(&self.place.mutex);
        Attempt::Granted(Grant { owner, until: None })
    }

    fn refused(&mut self, entry: Entry, row: Option<Row>, by: Moment) -> Attempt {
        let placed = entry == Entry::Try || self.wait(row.as_ref(), by);
        let (owner, retry_in) = match &row {
            // Whoever says whom it waits for has its place: those who come later come after it. A locker
            // must be able to say so at once, for its caller may wait no longer.
            Some(_) if !placed && self.place.hold == Hold::Long => (MutexOwner::NONE, ENQUEUE / 10),
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

    /// Joins the others of this factory who wait already: they have been refused, and so would this
    /// one be.
    fn join_line(&mut self) -> Option<Refusal> {
        if self.place.hold == Hold::Long || self.waiting || self.unsure {
            return None;
        }
        let waker = self.waker.as_ref()?;
        let Place { mutex, id, .. } = &self.place;
        let owner = self.lines().join_behind(mutex, id, self.number, waker)?;
        self.waiting = true;
        let left = owner.transition_at().saturating_sub(owner.backend_now());
        Some(Refusal {
            owner,
            retry_in: Duration::from_millis(left + 1).max(CLAIM),
        })
    }

    /// Has somebody look out for this seat: a lookout while there is one, else the poller. `false`: it
    /// has no place in the server's queue yet.
    fn wait(&mut self, row: Option<&Row>, by: Moment) -> bool {
        self.waiting = true;
        self.let_name_go();
        let Some(waker) = &self.waker else {
            return true;
        };
        let limit = by.remaining().min(ENQUEUE);
        let Database { hub, poller, .. } = &*self.database;
        let Place { mutex, hold, .. } = &self.place;
        let post = match (hold, &self.post) {
            (Hold::Long, Some(post)) => {
                post.lost();
                return post.wait_posted(limit);
            }
            (Hold::Long, None) => {
                self.post = hub.look_out(mutex, &self.name, waker);
                self.post.clone()
            }
            (Hold::Short, _) => {
                let owner = row.map(Row::owner);
                if !self.lines().refused(mutex, self.number, waker, owner) {
                    return true;
                }
                let post = hub.look_out(mutex, &self.name, waker);
                if let Some(post) = &post
                    && !self.lines().look_out(mutex, self.number, post)
                {
                    hub.dismiss(Arc::clone(post));
                    return true;
                }
                post
            }
        };
        match post {
            Some(post) => {
                self.ticket = None;
                post.wait_posted(limit)
            }
            None => {
                if self.ticket.is_none() {
                    self.ticket = poller.wait_free(mutex, waker).ok();
                }
                true
            }
        }
    }

    /// Neither owns nor waits any more. Leaves messages only.
    fn leave(&mut self) {
        let spare = self.get_up();
        self.dismiss(spare);
    }

    /// The same, but for who looked out for it, and is to be dismissed.
    fn get_up(&mut self) -> Option<Arc<Post>> {
        self.waiting = false;
        self.reserved_since = None;
        self.ticket = None;
        self.let_name_go();
        match self.place.hold {
            Hold::Short => self.lines().leave(&self.place.mutex, self.number),
            Hold::Long => self.post.take(),
        }
    }

    fn dismiss(&self, spare: Option<Arc<Post>>) {
        if let Some(post) = spare {
            self.database.hub.dismiss(post);
        }
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
        if entry == Entry::Queue
            && let Some(refusal) = self.join_line()
        {
            return Ok(Attempt::Refused(refusal));
        }
        // How long a connection waits for an answer is fixed when it is opened: for a caller with less
        // time than that nothing could be sent at all. It has an answer a little late instead, and only
        // where the server hangs.
        let by = by.max(Moment::now() + self.place.lease.call_budget());
        let outcome = self.attempt(by);
        self.unsure = outcome.is_err();
        let outcome = outcome.map_err(|error| {
            let mutex = &self.place.mutex;
            self.lines().failed(mutex, self.number);
            error.context(format_args!("mutex {mutex:?}"))
        })?;
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
        let spare = self.lines().lost(&self.place.mutex, self.number);
        self.dismiss(spare);
        self.let_name_go();
        Ok(Renewal::Lost(owner))
    }

    fn release(&mut self, fence: u64, by: Moment) -> Result<bool> {
        let store = &self.store;
        let Place { mutex, id, .. } = &self.place;
        let released = store.pool.checkout(by).and_then(|mut link| {
            self.lines().releasing(mutex, self.number);
            store.release(&mut link, mutex, id, Some(fence), by)
        });
        self.unsure = released.is_err();
        // The row first, then the name: whoever is woken by it finds the mutex free.
        self.leave();
        self.database.poller.touch(&self.place.mutex);
        released
    }

    fn withdraw(&mut self, by: Moment) -> Result<()> {
        if let Some(post) = self.get_up() {
            // Who comes next would leave the mutex to one that does not wait any more.
            let limit = by.remaining().min(WITHDRAW);
            self.database.hub.withdraw(post, limit);
        }
        self.waker = None;
        Ok(())
    }
}

impl Drop for MysqlSeat {
    fn drop(&mut self) {
        self.leave();
    }
}
