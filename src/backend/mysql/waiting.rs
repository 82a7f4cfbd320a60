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
//!   one withdraws its token itself; if it cannot, this thread does within a second, as soon as a connection of the
//!   pool is free. No WAIT begins while tokens are left.
//! - A busy place (woken, or talking to the server) is in no WAIT: its row may be its to take, and WAIT would end at
//!   once, again and again.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use mysql::prelude::Queryable;
use parking_lot::{Condvar, Mutex};

use super::connection::Connection;
use super::rows::{Call, Rows, Whose};
use super::table::Listed;
use super::token::Token;
use crate::backend::{Contender, Purpose, Wakeups};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::parker::Unparker;
use crate::pool::Lane;
use crate::thread::{self, Thread};

/// How often an idle connection is used, so that a dead one is noticed.
const BEAT: Duration = Duration::from_secs(3);

/// The shortest and the longest pause before the connections are opened again.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));

/// How much later a token is withdrawn whose row is locked.
const LOCKED_ROW: Duration = Duration::from_secs(5);

/// How many dead waiters one release passes over.
const MAX_DEAD: usize = 16;

/// How many contenders WAIT can name within the driver's 4 MiB; further ones poll.
pub(super) const MAX_PLACES: usize = 4_000;

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
    /// Of every contender whose token may stand in a row.
    places: BTreeMap<Token, Place>,
    left: Vec<Left>,
    /// The number of the last token.
    number: u64,
    /// The tokens that the WAIT under way knows.
    known: Option<BTreeSet<Token>>,
    /// A contender pokes that WAIT.
    poked: bool,
    /// Started by the first contender that waits.
    thread: Option<Thread>,
    stopped: bool,
}

/// Where one contender waits.
struct Place {
    mutex: Arc<str>,
    unparker: Unparker,
    /// Neither woken nor talking to the server.
    asleep: bool,
    /// A service, which is told when the owner changes.
    leads: bool,
    /// The fence that it saw last.
    fence: u64,
}

/// A token whose contender is gone. Another contender for the mutex may take it over, until it is withdrawn.
struct Left {
    token: Token,
    mutex: Arc<str>,
    /// Not withdrawn before then.
    at: Moment,
}

/// A row, as a look at many reads it: name, tokens, fence, whether the lease or hand-over is over, and the claim time
/// after it too.
type Seen = (String, String, u64, bool, bool);

impl Waiting {
    pub(super) fn new(rows: Arc<Rows>, wakeups: Wakeups) -> Waiting {
        let state = State {
            wakeups,
            ..State::default()
        };
        Waiting {
            process: rand::random_range(100_000_000_000..1_000_000_000_000),
            rows,
            state: Mutex::new(state),
            changed: Condvar::new(),
        }
    }

    /// Returns how waiting contenders learn of a release.
    pub(super) fn wakeups(&self) -> Wakeups {
        self.state.lock().wakeups.clone()
    }

    // The contender's side.

    /// Takes over the token that another contender for the mutex has left, if there is one.
    pub(super) fn take_over(&self, who: &Contender, unparker: &Unparker) -> Token {
        let mut state = self.state.lock();
        let left = state.left.iter().position(|it| it.mutex == who.mutex);
        left.map_or(Token::NONE, |left| {
            let token = state.left.swap_remove(left).token;
            state.places.insert(token, Place::new(who, unparker));
            token
        })
    }

    /// Starts the thread, with the first contender that waits.
    pub(super) fn start(self: &Arc<Waiting>) {
        let mut state = self.state.lock();
        if state.thread.is_none() {
            let waiting = Arc::clone(self);
            match thread::start("contend-mysql-wait", move || waiting.run()) {
                Ok(thread) => state.thread = Some(thread),
                Err(error) => state.wakeups = Wakeups::Polling(error.to_string().into()),
            }
        }
    }

    /// Takes a place, for a contender that is going to register. [`Token::NONE`]: it will not be woken.
    pub(super) fn join(&self, who: &Contender, unparker: &Unparker) -> Token {
        let mut state = self.state.lock();
        if state.wakeups != Wakeups::Working || state.places.len() >= MAX_PLACES {
            return Token::NONE;
        }
        // A number that is in use is not given out again.
        let mut token = Token::NONE;
        while token == Token::NONE || state.is_in_use(token) {
            state.number += 1;
            token = Token::new(self.process, state.number);
        }
        state.places.insert(token, Place::new(who, unparker));
        token
    }

    /// The contender sleeps from here on. Returns `true` if it poked, because the WAIT under way does not know it.
    pub(super) fn sleeps(&self, call: &mut Call<'_>, token: Token, fence: u64) -> bool {
        {
            let mut state = self.state.lock();
            if let Some(place) = state.places.get_mut(&token) {
                (place.asleep, place.fence) = (true, fence);
            }
            self.changed.notify_all();
            if state.is_known(token) {
                return false;
            }
            state.poked = true;
        }
        call.kill(self.process);
        true
    }

    /// Leaves the queue.
    pub(super) fn withdraw(&self, token: Token, by: Moment) -> Result<()> {
        let mutex = {
            let mut state = self.state.lock();
            let Some(place) = state.places.get(&token) else {
                return Ok(());
            };
            if place.asleep && state.is_known(token) {
                // A KILL for it reaches the thread.
                state.leave(token);
                self.changed.notify_all();
                return Ok(());
            }
            Arc::clone(&place.mutex)
        };
        let call = self.rows.call(Lane::Other, by);
        let withdrawn = call.and_then(|call| self.take_out(call, &mutex, token));
        match withdrawn {
            Ok(()) => self.forget(token),
            Err(_) => self.leave(token),
        }
        withdrawn
    }

    /// Has the thread withdraw a token when it can.
    pub(super) fn leave(&self, token: Token) {
        if token != Token::NONE {
            self.state.lock().leave(token);
            self.changed.notify_all();
        }
    }

    /// Gives up a token that does not stand in the row.
    pub(super) fn forget(&self, token: Token) {
        self.state.lock().places.remove(&token);
    }

    /// Takes a token out of the row. What was handed over to it is passed on.
    fn take_out(&self, mut call: Call<'_>, mutex: &str, token: Token) -> Result<()> {
        if !call.unregister(mutex, token)?
            && let Some(next) = call.release(mutex, Whose::Handed(token, 0))?
        {
            self.wake(&mut call, mutex, next);
        }
        Ok(())
    }

    /// Wakes the contender that `mutex` was handed over to, and passes on what a dead or left one was handed.
    pub(super) fn wake(&self, call: &mut Call<'_>, mutex: &str, mut token: Token) {
        for _ in 0..MAX_DEAD {
            let is_ours = token.process() == self.process;
            let is_awake = if is_ours {
                self.tell(token)
            } else {
                token == Token::NONE || call.kill(token.process())
            };
            if is_awake || call.expect_time().is_err() {
                return;
            }
            // Of a process that is dead, all tokens leave the list.
            let dead = if is_ours { 0 } else { token.process() };
            match call.release(mutex, Whose::Handed(token, dead)) {
                Ok(Some(next)) => token = next,
                _ => return,
            }
        }
    }

    /// Wakes a contender of this process. Returns `false` if it is gone.
    fn tell(&self, token: Token) -> bool {
        let mut state = self.state.lock();
        state.places.get_mut(&token).map(Place::tell).is_some()
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
        let by = Moment::now() + Duration::from_millis(200);
        if let Ok(mut call) = self.rows.call(Lane::Owner, by) {
            call.kill(self.process);
        }
        thread.join(Moment::now() + Duration::from_millis(700));
    }

    // The thread's side.

    /// The limit of a request of the thread, and of a wait for a connection before it.
    fn soon(&self) -> Moment {
        Moment::now() + self.rows.request_limit() * 2
    }

    fn run(&self) {
        let mut pause = PAUSES.0;
        while !self.state.lock().stopped {
            let served = catch_unwind(AssertUnwindSafe(|| self.serve()));
            let error = match served {
                Ok(Ok(())) => return,
                Ok(Err(error)) => error,
                Err(_) => Error::new(ErrorKind::Panicked, "the wait for wake-ups panicked"),
            };
            let before = self.set_wakeups(Wakeups::Polling(error.to_string().into()));
            if !matches!(before, Wakeups::Polling(_)) {
                let server = &self.rows.pool.connector().server;
                log::warn!("{server}: contenders poll until this is over: {error}");
                pause = PAUSES.0;
            }
            let mut state = self.state.lock();
            if !state.stopped {
                self.changed.wait_for(&mut state, pause);
            }
            pause = (pause * 2).min(PAUSES.1);
        }
    }

    /// Waits for all contenders, until it is stopped or a connection breaks.
    fn serve(&self) -> Result<()> {
        let (mut waiter, mut blocker) = self.open()?;
        self.set_wakeups(Wakeups::Working);
        while !self.state.lock().stopped {
            self.withdraw_left();
            for connection in [&mut waiter, &mut blocker] {
                if Moment::now() - connection.sent >= BEAT {
                    connection.run(Moment::FAR, |conn| conn.query_drop("DO 1"))?;
                }
            }
            let Some(listed) = self.begin_wait() else {
                continue;
            };
            let killed = self.wait(&mut waiter, &listed);
            let poked = {
                let mut state = self.state.lock();
                state.known = None;
                state.poked
            };
            let mut tokens = listed.values().flatten();
            match (killed?, tokens.next(), tokens.next()) {
                // By another process, and there is only one place that it can be for.
                (true, Some(token), None) if !poked => drop(self.tell(*token)),
                _ => self.look_many(&mut waiter, &listed)?,
            }
        }
        Ok(())
    }

    /// Opens both connections, after the pool has reached the server: it knows how often one may knock.
    fn open(&self) -> Result<(Connection, Connection)> {
        let call = || self.rows.call(Lane::Other, self.soon());
        call()?.look("")?;
        if let Some(why) = call()?.wakeups_off {
            return Err(Error::new(ErrorKind::Unsupported, why));
        }
        let blocker = self.hold(&format!("contend:wait:{}", self.process))?;
        let waiter = self.hold(&format!("contend:{}", self.process))?;
        if !call()?.kill(self.process) {
            let why = "one connection does not see what another has locked; is there a proxy?";
            return Err(Error::new(ErrorKind::Unsupported, why));
        }
        Ok((waiter, blocker))
    }

    /// Opens a connection that holds a named lock. A half-open connection of this process that still holds it is ended:
    /// by the name, never by its number, which another connection may have by now.
    fn hold(&self, name: &str) -> Result<Connection> {
        let mut connection = self.rows.pool.connector().open_for_waiting()?;
        let sql = format!("KILL CONNECTION IS_USED_LOCK('{name}')");
        // Refused where there is none.
        drop(connection.run(Moment::FAR, |conn| conn.query_drop(sql)));
        let sql = format!("SELECT GET_LOCK('{name}', 1)");
        let held: Option<Option<i64>> =
            connection.run(Moment::FAR, |conn| conn.query_first(sql))?;
        match held.flatten() {
            Some(1) => Ok(connection),
            _ => {
                let message = "another connection holds the named lock that wakes this process";
                Err(Error::new(ErrorKind::Unavailable, message))
            }
        }
    }

    /// Withdraws the tokens of contenders that have left.
    fn withdraw_left(&self) {
        loop {
            // Taken out, so that no contender takes it over any more.
            let left = {
                let mut state = self.state.lock();
                let left = state.next_left();
                left.map(|left| state.left.swap_remove(left))
            };
            let Some(Left { token, mutex, .. }) = left else {
                return;
            };
            let call = self.rows.call(Lane::Owner, self.soon());
            let taken_out = call.and_then(|call| self.take_out(call, &mutex, token));
            if taken_out.is_err() {
                // Perhaps an operator has locked the row.
                let at = Moment::now() + LOCKED_ROW;
                self.state.lock().left.push(Left { token, mutex, at });
                return;
            }
        }
    }

    /// Returns what to wait for. `None`: after a pause there may be something to do.
    fn begin_wait(&self) -> Option<Listed> {
        let mut state = self.state.lock();
        if state.stopped || state.next_left().is_some() {
            return None;
        }
        let mut listed = Listed::new();
        for (token, place) in &state.places {
            if place.asleep {
                let tokens = listed.entry(Arc::clone(&place.mutex)).or_default();
                tokens.push(*token);
            }
        }
        if listed.is_empty() {
            self.changed.wait_for(&mut state, BEAT);
            return None;
        }
        state.known = Some(listed.values().flatten().copied().collect());
        state.poked = false;
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

    /// Wakes those that were waited for and have something to do.
    fn look_many(&self, waiter: &mut Connection, listed: &Listed) -> Result<()> {
        let sql = self.rows.table.sql.look_many(listed);
        let rows: Vec<Seen> = match waiter.run(Moment::FAR, |conn| conn.query(sql)) {
            Ok(rows) => rows,
            Err(error) if error.poisoned => return Err(error.into()),
            // Interrupted, or the table is locked: the next WAIT looks at the rows itself.
            Err(_) => return Ok(()),
        };
        let mut state = self.state.lock();
        for (token, place) in &mut state.places {
            let row = rows.iter().find(|(mutex, ..)| **mutex == *place.mutex);
            let is_due = row.is_none_or(|row| place.is_due(*token, row));
            if place.asleep && listed.contains_key(&place.mutex) && is_due {
                place.tell();
            }
        }
        Ok(())
    }

    /// Says how contenders learn of a release, and has all of them look: they missed what happened. Returns what was
    /// said before.
    fn set_wakeups(&self, wakeups: Wakeups) -> Wakeups {
        let mut state = self.state.lock();
        for place in state.places.values_mut() {
            place.tell();
        }
        std::mem::replace(&mut state.wakeups, wakeups)
    }
}

impl State {
    /// Returns `false` if the WAIT under way does not know the token.
    fn is_known(&self, token: Token) -> bool {
        let known = self.known.as_ref();
        known.is_none_or(|known| known.contains(&token))
    }

    /// Returns `true` if a new contender cannot have the token.
    fn is_in_use(&self, token: Token) -> bool {
        self.places.contains_key(&token) || self.left.iter().any(|left| left.token == token)
    }

    fn leave(&mut self, token: Token) {
        if let Some(Place { mutex, .. }) = self.places.remove(&token) {
            let at = Moment::now();
            self.left.push(Left { token, mutex, at });
        }
    }

    /// Which token is to be withdrawn now.
    fn next_left(&self) -> Option<usize> {
        let now = Moment::now();
        self.left.iter().position(|left| left.at <= now)
    }
}

impl Place {
    fn new(who: &Contender, unparker: &Unparker) -> Place {
        Place {
            mutex: Arc::clone(&who.mutex),
            unparker: unparker.clone(),
            asleep: false,
            leads: who.purpose == Purpose::Lead,
            fence: 0,
        }
    }

    fn tell(&mut self) {
        self.asleep = false;
        self.unparker.unpark();
    }

    /// Whether a contender that sleeps under `token` has something to do: what `sql/mutex-wait.sql` calls not quiet.
    fn is_due(&self, token: Token, (_, waiters, fence, over, unclaimed): &Seen) -> bool {
        let token = format!(":{token}");
        let is_gone = !waiters.contains(&token);
        let may_take = *over && (waiters.starts_with(&token) || *unclaimed);
        is_gone || may_take || (self.leads && *fence != self.fence)
    }
}
