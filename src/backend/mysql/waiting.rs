//! Waiting: one thread and two connections wait for all contenders of a factory.
//!
//! The *waiter* holds the named lock `contend:PROCESS` and runs WAIT (`sql/mutex-wait.sql`). The *blocker* holds
//! `contend:wait:PROCESS`, which WAIT blocks on: it is idle, so the server notices at once that this process died.
//! A process that hands a mutex to a token of this one ends WAIT with `KILL QUERY`. Nothing that matters runs on the
//! waiter, so a late KILL hits nothing.
//!
//! No wake-up is lost, by these rules:
//! - WAIT looks at the rows before it blocks, so it sees a hand-over whose KILL came before it.
//! - A contender that falls asleep while a WAIT runs that does not know it ends that WAIT (a *poke*), and looks again
//!   soon: the KILL may come before the WAIT that it is meant for.
//! - A WAIT that was ended while poked wakes no contender by itself: a look at all rows says which.
//! - A contender that sleeps in a WAIT that knows it leaves by the list: a KILL for it reaches this thread. Any other
//!   one withdraws its token itself; if it cannot, this thread does within a second. No WAIT begins while tokens are
//!   left.
//! - A busy place (woken, or talking to the server) is in no WAIT: its row may be its to take, and WAIT would end at
//!   once, again and again.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use mysql::prelude::Queryable;
use parking_lot::{Condvar, Mutex};

use super::connection::Connection;
use super::error::RequestError;
use super::rows::{Call, Rows, Whose};
use super::token::Token;
use crate::backend::{Contender, Purpose, Wakeups};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::parker::Unparker;
use crate::pool::Lane;
use crate::thread::{self, Thread};

/// How often idle connections are used, so that a dead one is noticed.
const BEAT: Duration = Duration::from_secs(3);

/// The shortest and the longest pause before the connections are opened again.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));

/// How much later a token is withdrawn whose row is locked.
const LOCKED_ROW: Duration = Duration::from_secs(5);

/// How many dead waiters one release passes over.
const MAX_DEAD: usize = 16;

/// How many contenders WAIT can name within the driver's 4 MiB; further ones poll.
const MAX_PLACES: usize = 4_000;

pub(super) struct Waiting {
    /// 12 digits that no other process has.
    process: u64,
    rows: Arc<Rows>,
    state: Mutex<State>,
    /// Notified when the thread should look at the state again.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    wakeups: Wakeups,
    places: BTreeMap<Token, Place>,
    /// The number of the last token.
    number: u64,
    /// A WAIT is under way, for the places that are `listed`.
    in_wait: bool,
    /// A contender pokes the WAIT under way.
    poked: bool,
    /// Started with the first wait.
    thread: Option<Thread>,
    stopped: bool,
}

/// Where one contender waits.
struct Place {
    mutex: Arc<str>,
    unparker: Unparker,
    doing: Doing,
    /// The WAIT under way knows it.
    listed: bool,
    /// A service, which is told when the owner changes.
    leads: bool,
    /// The fence that it saw last.
    fence: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Doing {
    /// Woken, or talking to the server.
    Busy,
    Asleep,
    /// Its contender is gone. The token is to be withdrawn, not before then; until that, another contender may take
    /// the place over.
    Left(Moment),
}

/// The tokens that a WAIT is for.
type Listed = BTreeMap<Arc<str>, Vec<Token>>;

/// A row, as a look at many reads it: name, tokens, fence, whether the lease or hand-over is over, and the claim time
/// after it too.
type Seen = (String, String, u64, bool, bool);

impl Waiting {
    pub(super) fn new(rows: Arc<Rows>, wakeups: bool) -> Waiting {
        let wakeups = match wakeups {
            true => Wakeups::Untried,
            false => Wakeups::Polling("wakeups=off".into()),
        };
        Waiting {
            process: rand::random_range(100_000_000_000..1_000_000_000_000),
            rows,
            state: Mutex::new(State {
                wakeups,
                ..State::default()
            }),
            changed: Condvar::new(),
        }
    }

    /// Returns how waiting contenders learn of a release.
    pub(super) fn wakeups(&self) -> Wakeups {
        self.state.lock().wakeups.clone()
    }

    // The contender's side.

    /// Takes over the place that another contender for the mutex has left.
    pub(super) fn take_over(&self, who: &Contender, unparker: &Unparker) -> Option<Token> {
        let mut state = self.state.lock();
        let is_left = |place: &Place| matches!(place.doing, Doing::Left(_));
        let mut places = state.places.iter_mut();
        let (token, place) =
            places.find(|(_, place)| is_left(place) && place.mutex == who.mutex)?;
        place.unparker = unparker.clone();
        place.doing = Doing::Busy;
        place.leads = who.purpose == Purpose::Lead;
        Some(*token)
    }

    /// Takes a place, if `token` has none, and starts the thread with the first. The place is busy until
    /// [`sleeps`](Waiting::sleeps). Returns `true` if the contender will be woken.
    pub(super) fn join(
        self: &Arc<Waiting>,
        token: &mut Token,
        who: &Contender,
        unparker: &Unparker,
    ) -> bool {
        let mut state = self.state.lock();
        if *token == Token::NONE {
            if state.places.len() >= MAX_PLACES {
                return false;
            }
            // A number that is in use is not given out again.
            while *token == Token::NONE || state.places.contains_key(token) {
                state.number += 1;
                *token = Token::new(self.process, state.number);
            }
            let place = Place {
                mutex: Arc::clone(&who.mutex),
                unparker: unparker.clone(),
                doing: Doing::Busy,
                listed: false,
                leads: who.purpose == Purpose::Lead,
                fence: 0,
            };
            state.places.insert(*token, place);
        } else if let Some(place) = state.places.get_mut(token) {
            place.doing = Doing::Busy;
        }
        if state.wakeups == Wakeups::Untried && state.thread.is_none() && !state.stopped {
            let waiting = Arc::clone(self);
            match thread::start("contend-mysql-wait", move || waiting.run()) {
                Ok(thread) => state.thread = Some(thread),
                Err(error) => state.wakeups = Wakeups::Polling(error.to_string().into()),
            }
        }
        state.wakeups == Wakeups::Working
    }

    /// The contender sleeps from here on. Returns `true` if the WAIT under way does not know it: the caller then
    /// [pokes](Waiting::poke).
    pub(super) fn sleeps(&self, token: Token, fence: u64) -> bool {
        let mut state = self.state.lock();
        let in_wait = state.in_wait;
        let Some(place) = state.places.get_mut(&token) else {
            return false;
        };
        (place.doing, place.fence) = (Doing::Asleep, fence);
        let unseen = in_wait && !place.listed;
        state.poked |= unseen;
        self.changed.notify_all();
        unseen
    }

    /// Ends the WAIT under way.
    pub(super) fn poke(&self, call: &mut Call<'_>) {
        call.kill(self.process);
    }

    /// Gives up a place whose token may stand in the row. Returns `true` if the caller has to withdraw it; the place
    /// stays until then.
    pub(super) fn leave(&self, token: Token) -> bool {
        let mut state = self.state.lock();
        let in_wait = state.in_wait;
        let Some(place) = state.places.get_mut(&token) else {
            return false;
        };
        // A KILL for it reaches the thread.
        let is_known = place.doing == Doing::Asleep && (place.listed || !in_wait);
        if is_known {
            place.doing = Doing::Left(Moment::now());
            self.changed.notify_all();
        }
        !is_known
    }

    /// Has the thread withdraw a token when it can.
    pub(super) fn leave_to_thread(&self, token: Token) {
        if let Some(place) = self.state.lock().places.get_mut(&token) {
            place.doing = Doing::Left(Moment::now());
        }
        self.changed.notify_all();
    }

    /// Gives up a place whose token does not stand in the row.
    pub(super) fn remove(&self, token: Token) {
        self.state.lock().places.remove(&token);
    }

    /// Takes a token out of the row. What was handed over to it is passed on.
    pub(super) fn withdraw(&self, call: &mut Call<'_>, mutex: &str, token: Token) -> Result<()> {
        if !call.unregister(mutex, token)?
            && let Some(next) = call.release(mutex, Whose::Handed(token))?
        {
            self.wake(call, mutex, next);
        }
        Ok(())
    }

    /// Wakes the contender that `mutex` was handed over to, and passes on what a dead or left one was handed.
    pub(super) fn wake(&self, call: &mut Call<'_>, mutex: &str, mut token: Token) {
        for _ in 0..MAX_DEAD {
            let is_ours = token.process() == self.process;
            if token == Token::NONE || (is_ours && self.tell(token)) {
                return;
            }
            if !is_ours && call.kill(token.process()) {
                return;
            }
            let whose = match is_ours {
                true => Whose::Handed(token),
                false => Whose::Dead(token),
            };
            match call.expect_time().and_then(|()| call.release(mutex, whose)) {
                Ok(Some(next)) => token = next,
                _ => return,
            }
        }
    }

    /// Wakes a contender of this process. Returns `false` if it is gone.
    fn tell(&self, token: Token) -> bool {
        let mut state = self.state.lock();
        let place = state.places.get_mut(&token);
        place.is_some_and(Place::tell)
    }

    /// Ends the wait and the thread.
    pub(super) fn stop(&self) {
        let thread = {
            let mut state = self.state.lock();
            state.stopped = true;
            state.thread.take()
        };
        self.changed.notify_all();
        let Some(mut thread) = thread else { return };
        if let Some(mut connection) = self.rows.pool.try_checkout(Lane::Owner) {
            let by = Moment::now() + Duration::from_millis(200);
            self.poke(&mut self.rows.on(&mut connection, by));
        }
        thread.join(Moment::now() + Duration::from_millis(700));
    }

    // The thread's side.

    fn run(&self) {
        let _ended = Ended(self);
        let server = &self.rows.pool.connector().server;
        let mut pause = PAUSES.0;
        loop {
            let served = self.open().and_then(|(waiter, blocker)| {
                pause = PAUSES.0;
                self.set_wakeups(Wakeups::Working);
                self.serve(waiter, blocker)
            });
            let Err(error) = served else { return };
            if self.set_wakeups(Wakeups::Polling(error.to_string().into())) {
                log::warn!("{server}: contenders poll until this is over: {error}");
            }
            let mut state = self.state.lock();
            if !state.stopped {
                self.changed.wait_for(&mut state, pause);
            }
            if state.stopped {
                return;
            }
            pause = (pause * 2).min(PAUSES.1);
        }
    }

    /// Opens both connections, after the pool has reached the server: it knows how often one may knock.
    fn open(&self) -> Result<(Connection, Connection)> {
        let soon = || Moment::now() + self.rows.request_limit() * 2;
        let wakeups_off = self.rows.call(Lane::Other, soon(), |call| {
            call.ping()?;
            call.check()
        })?;
        if let Some(why) = wakeups_off {
            return Err(Error::new(ErrorKind::Unsupported, why));
        }
        let connector = self.rows.pool.connector();
        let mut blocker = connector.open_for_waiting()?;
        hold(&mut blocker, &format!("contend:wait:{}", self.process))?;
        let mut waiter = connector.open_for_waiting()?;
        let name = format!("contend:{}", self.process);
        hold(&mut waiter, &name)?;
        let seen: Option<Option<u64>> = self.rows.call(Lane::Other, soon(), |call| {
            call.ask(|conn| conn.query_first(format!("SELECT IS_USED_LOCK('{name}')")))
        })?;
        if seen.flatten().is_none() {
            let why = "one connection does not see what another has locked; is there a proxy?";
            return Err(Error::new(ErrorKind::Unsupported, why));
        }
        Ok((waiter, blocker))
    }

    fn serve(&self, mut waiter: Connection, mut blocker: Connection) -> Result<()> {
        let mut beat = Moment::now();
        while !self.state.lock().stopped {
            self.withdraw_left(&mut blocker)?;
            if Moment::now() - beat >= BEAT {
                beat = Moment::now();
                ask(&mut blocker, "DO 1")?;
                ask(&mut waiter, "DO 1")?;
            }
            let Some(listed) = self.begin_wait() else {
                continue;
            };
            let killed = self.wait(&mut waiter, &listed);
            let poked = self.end_wait();
            let mut tokens = listed.values().flatten();
            match (killed?, tokens.next(), tokens.next()) {
                // By another process, and there is only one place that it can be for.
                (true, Some(token), None) if !poked => drop(self.tell(*token)),
                _ => self.look_many(&mut waiter)?,
            }
        }
        Ok(())
    }

    /// Withdraws the tokens of contenders that have left.
    fn withdraw_left(&self, blocker: &mut Connection) -> Result<()> {
        loop {
            let left = self.state.lock().take_left();
            let Some((token, mut place)) = left else {
                return Ok(());
            };
            let by = Moment::now() + blocker.patience();
            let call = &mut self.rows.on(blocker, by);
            if let Err(error) = self.withdraw(call, &place.mutex, token) {
                // Perhaps an operator has locked the row.
                place.doing = Doing::Left(Moment::now() + LOCKED_ROW);
                self.state.lock().places.insert(token, place);
                if blocker.is_poisoned() {
                    return Err(error);
                }
            }
        }
    }

    /// Returns what to wait for. `None`: after a pause there may be something to do.
    fn begin_wait(&self) -> Option<Listed> {
        let mut state = self.state.lock();
        if state.stopped || state.left().is_some() {
            return None;
        }
        let mut listed = Listed::new();
        for (token, place) in &mut state.places {
            if place.doing == Doing::Asleep {
                place.listed = true;
                let tokens = listed.entry(Arc::clone(&place.mutex)).or_default();
                tokens.push(*token);
            }
        }
        if listed.is_empty() {
            self.changed.wait_for(&mut state, BEAT);
            return None;
        }
        (state.in_wait, state.poked) = (true, false);
        Some(listed)
    }

    /// Returns `true` if a KILL ended it. Else its time was up, a row needed a look at once, or the table was locked.
    fn wait(&self, waiter: &mut Connection, listed: &Listed) -> Result<bool> {
        let sql = self.rows.table.sql.wait(self.process, listed);
        let waited = waiter.run(Moment::FAR, |conn| conn.query_first::<Option<i64>, _>(sql));
        match waited.map(Option::flatten) {
            Ok(Some(1)) => {
                let message = "the connection that blocks waits is gone";
                Err(Error::new(ErrorKind::Unreachable, message))
            }
            Ok(answer) => Ok(answer.is_none()),
            Err(error) if error.is_interrupted() => Ok(true),
            Err(error) if error.code == Some(1205) => Ok(false),
            Err(error) => Err(self.rows.table.explain(error)),
        }
    }

    /// Returns whether a contender poked.
    fn end_wait(&self) -> bool {
        let mut state = self.state.lock();
        state.in_wait = false;
        let places = state.places.values_mut();
        places.for_each(|place| place.listed = false);
        state.poked
    }

    /// Wakes every contender that has something to do.
    fn look_many(&self, waiter: &mut Connection) -> Result<()> {
        let mutexes: Vec<Arc<str>> = {
            let state = self.state.lock();
            let asleep = state.places.values().filter(|it| it.doing == Doing::Asleep);
            asleep.map(|place| Arc::clone(&place.mutex)).collect()
        };
        if mutexes.is_empty() {
            return Ok(());
        }
        let sql = self.rows.table.sql.look_many(&mutexes);
        let rows: Vec<Seen> = match waiter.run(Moment::FAR, |conn| conn.query(sql)) {
            Ok(rows) => rows,
            Err(error) if error.is_poison() => return Err(error.into()),
            // Interrupted, or the table is locked: the next WAIT looks at the rows itself.
            Err(_) => return Ok(()),
        };
        let mut state = self.state.lock();
        for (token, place) in &mut state.places {
            let row = rows.iter().find(|(mutex, ..)| **mutex == *place.mutex);
            let is_due = row.is_none_or(|row| place.is_due(*token, row));
            if place.doing == Doing::Asleep && mutexes.contains(&place.mutex) && is_due {
                place.tell();
            }
        }
        Ok(())
    }

    /// Says how contenders learn of a release, and has all of them look: they missed what happened. Returns `true` if
    /// that changed.
    fn set_wakeups(&self, wakeups: Wakeups) -> bool {
        let mut state = self.state.lock();
        let before = std::mem::replace(&mut state.wakeups, wakeups);
        for place in state.places.values_mut() {
            place.tell();
        }
        before != state.wakeups
    }
}

impl State {
    /// A token to be withdrawn now.
    fn left(&self) -> Option<Token> {
        let now = Moment::now();
        let is_left = |place: &Place| matches!(place.doing, Doing::Left(at) if at <= now);
        let mut places = self.places.iter();
        places
            .find(|(_, place)| is_left(place))
            .map(|(token, _)| *token)
    }

    /// Takes its place out, so that no contender takes it over any more.
    fn take_left(&mut self) -> Option<(Token, Place)> {
        let token = self.left()?;
        self.places.remove_entry(&token)
    }
}

impl Place {
    /// Wakes the contender. Returns `false` if it has left.
    fn tell(&mut self) -> bool {
        if matches!(self.doing, Doing::Left(_)) {
            return false;
        }
        self.doing = Doing::Busy;
        self.unparker.unpark();
        true
    }

    /// Whether a contender that sleeps under `token` has something to do: what `sql/mutex-wait.sql` calls not quiet.
    fn is_due(&self, token: Token, (_, waiters, fence, over, unclaimed): &Seen) -> bool {
        let token = format!(":{token}");
        let is_gone = !waiters.contains(&token);
        let may_take = *over && (waiters.starts_with(&token) || *unclaimed);
        is_gone || may_take || (self.leads && *fence != self.fence)
    }
}

/// Says that contenders poll once the thread is over, even if it panicked.
struct Ended<'a>(&'a Waiting);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        let why = "the thread that waits for wake-ups is over";
        self.0.set_wakeups(Wakeups::Polling(why.into()));
    }
}

/// Acquires a named lock. A half-open connection of this process that still holds it is ended: by the name, never by its
/// number, which another connection may have by now.
fn hold(connection: &mut Connection, name: &str) -> Result<()> {
    ask(
        connection,
        &format!("KILL CONNECTION IS_USED_LOCK('{name}')"),
    )?;
    let sql = format!("SELECT GET_LOCK('{name}', 1)");
    let held: Option<Option<i64>> = connection.run(Moment::FAR, |conn| conn.query_first(sql))?;
    if held.flatten() != Some(1) {
        let message = "another connection holds the named lock that wakes this process";
        return Err(Error::new(ErrorKind::Unavailable, message));
    }
    Ok(())
}

/// Makes a request that the server may refuse.
fn ask(connection: &mut Connection, sql: &str) -> Result<(), RequestError> {
    match connection.run(Moment::FAR, |conn| conn.query_drop(sql)) {
        Err(error) if error.is_poison() => Err(error),
        _ => Ok(()),
    }
}
