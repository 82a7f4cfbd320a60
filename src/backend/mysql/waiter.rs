//! How a process waits: two connections for any number of mutexes, and the steps that keep its token in
//! the rows that it waits for.
//!
//! The *waiter* holds the name `contend:TOKEN` and runs one statement that looks at all rows waited for
//! and blocks (`sql/mutex-wait.sql`) for a name that the *blocker* holds. Whoever hands a mutex over to
//! this process kills that statement. Nothing that matters runs on the waiter, so a late KILL hits
//! nothing; and a process that dies takes its blocker along, so that its waiter ends within milliseconds.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use mysql::prelude::Queryable;
use parking_lot::Mutex;

use super::connection::{Connection, ConnectionOptions};
use super::error::RequestError;
use super::queue::{Plan, Queues, Registered, WaiterState};
use super::rows::{Call, Row, Rows, Woken};
use super::table::kill;
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::pool::Lane;
use crate::thread::{self, Thread};

/// How long a head that was told to look has before the waiter waits again.
const LOOK: Duration = Duration::from_millis(20);

/// How often idle connections are used, so that a dead one is noticed.
const BEAT: Duration = Duration::from_secs(3);

/// How long the server keeps the names of a connection that it does not hear of.
const WAIT_TIMEOUT_S: u64 = 10;

/// How much longer than a wait its answer may take.
const ANSWER: Duration = Duration::from_secs(2);

/// The longest wait: a statement that waits keeps a read view and a metadata lock.
const MAX_WAIT_S: u64 = 2;

/// How many dead processes one release passes over.
const MAX_DEAD: usize = 16;

/// The shortest and the longest pause before the connections are opened again.
const SHORTEST_PAUSE: Duration = Duration::from_millis(50);
const MAX_PAUSE: Duration = Duration::from_secs(2);

/// How long a contender waits for the connections to come up for the first time.
const START: Duration = Duration::from_secs(1);

/// Waits for all contenders of a process, and wakes other processes.
#[derive(Debug)]
pub(super) struct Waiter {
    /// 18 digits that no other process has.
    pub(super) token: String,
    pub(super) queues: Queues,
    pub(super) poll_interval: Duration,
    rows: Arc<Rows>,
    /// Held here, so that dropping it ends a wait from outside.
    blocker: Mutex<Option<Connection>>,
    /// The thread that waits, from the first wait on.
    thread: Mutex<Option<Thread>>,
    /// Said once that another account's processes cannot be woken.
    foreign: AtomicBool,
}

impl Waiter {
    pub(super) fn new(rows: Arc<Rows>, poll_interval: Duration, wakeups: bool) -> Waiter {
        let token = rand::random_range(100_000_000_000_000_000_u64..1_000_000_000_000_000_000);
        let state = if wakeups {
            WaiterState::Untried
        } else {
            WaiterState::Polling("wakeups=off".into())
        };
        Waiter {
            token: token.to_string(),
            queues: Queues::new(state),
            poll_interval,
            rows,
            blocker: Mutex::new(None),
            thread: Mutex::new(None),
            foreign: AtomicBool::new(false),
        }
    }

    /// Starts the thread if it does not run, and gives it a moment to open its connections. Returns `true`
    /// if a process that registers will be woken.
    pub(super) fn is_up(self: &Arc<Waiter>, by: Moment) -> bool {
        if self.queues.start_waiter() {
            let waiter = Arc::clone(self);
            match thread::start("contend-mysql-wait", move || waiter.run()) {
                Ok(thread) => *self.thread.lock() = Some(thread),
                Err(error) => {
                    log::warn!("contenders poll: {error}");
                    let why = error.to_string().into();
                    self.queues.set_waiter(WaiterState::Polling(why));
                }
            }
        }
        self.queues.await_start(by.min(Moment::now() + START));
        self.queues.waiter_state() == WaiterState::Up
    }

    /// Ends the wait and the thread.
    pub(super) fn stop(&self) {
        self.queues.stop();
        // Without its blocker a wait ends, and closing asks the server nothing.
        if let Some(mut blocker) = self.blocker.try_lock_for(Duration::from_millis(200)) {
            drop(blocker.take());
        }
        if let Some(thread) = &mut *self.thread.lock() {
            thread.join(Moment::now() + Duration::from_millis(800));
        }
    }

    /// Registers or withdraws the token of this process, if the queue of `mutex` asks for it.
    pub(super) fn step(&self, call: &mut Call<'_>, mutex: &Arc<str>) -> Result<()> {
        let Some(step) = self.queues.step(mutex) else {
            return Ok(());
        };
        let Some(held) = step.try_lock_for(call.by.remaining()) else {
            return Err(Error::new(
                ErrorKind::Timeout,
                "another contender of this process did not finish in time",
            ));
        };
        let outcome = match self.queues.plan(mutex) {
            Plan::Nothing => Ok(()),
            Plan::Register => {
                let outcome = call.register(mutex, &self.token);
                let registered = match &outcome {
                    Ok(()) => Registered::Yes,
                    Err(failed) if failed.unknown => Registered::Unknown,
                    Err(_) => Registered::No,
                };
                self.queues.set_registered(mutex, registered);
                outcome
            }
            Plan::Withdraw => {
                let outcome = call.withdraw(mutex, &self.token);
                match &outcome {
                    Ok(next) => self.hand_on(call, mutex, *next),
                    Err(_) => self.queues.set_registered(mutex, Registered::Unknown),
                }
                outcome.map(drop)
            }
        };
        drop(held);
        self.queues.step_over(mutex, step);
        Ok(outcome?)
    }

    /// Wakes the process that a mutex was handed over to, passing over dead ones. A token of zero means that
    /// it was handed over to nobody: a contender that waits here without being registered may try.
    pub(super) fn hand_on(&self, call: &mut Call<'_>, mutex: &Arc<str>, mut token: u64) {
        for _ in 0..MAX_DEAD {
            let name = token.to_string();
            if token == 0 || name == self.token {
                if self.queues.tell(mutex) || token == 0 {
                    return;
                }
            } else {
                match call.wake(&name) {
                    Woken::Told => return,
                    Woken::Dead => {}
                    Woken::Foreign => {
                        self.say_foreign();
                        let _ = call.undo_hand_over(mutex, &name);
                        self.queues.tell(mutex);
                        return;
                    }
                }
            }
            match call.withdraw(mutex, &name) {
                Ok(next) => token = next,
                Err(_) => return,
            }
        }
    }

    /// Makes sure that the waiter waits for `mutex` too: its wait is ended until it does. A KILL may come
    /// before the wait that it is meant for, so it is repeated.
    pub(super) fn watch(&self, call: &mut Call<'_>, mutex: &str) {
        for _ in 0..40 {
            if !self.queues.is_unwatched(mutex) || call.expect_time().is_err() {
                return;
            }
            call.wake(&self.token);
            self.queues.await_change(Duration::from_millis(5));
        }
    }

    /// Warns once that processes of another account cannot be woken.
    fn say_foreign(&self) {
        if !self.foreign.swap(true, Ordering::Relaxed) {
            log::warn!(
                "{}: a contender of another MySQL account waits for the same mutex, and cannot be woken: \
                 wake-ups need one account for all; those contenders poll",
                self.rows.pool.connector().server
            );
        }
    }

    // The thread.

    /// Waits for all, until it is stopped or nobody can be woken here.
    fn run(&self) {
        let mut pause = SHORTEST_PAUSE;
        let mut tested = false;
        let server = &self.rows.pool.connector().server;
        while !self.queues.is_stopped() {
            // A panic (a logger's, say) must not end the thread: nobody would be woken here any more.
            let served = catch_unwind(AssertUnwindSafe(|| {
                let waiter = self.open(&mut tested)?;
                pause = SHORTEST_PAUSE;
                self.queues.set_waiter(WaiterState::Up);
                Ok(self.serve(waiter)?)
            }));
            let broken = match served {
                Ok(Ok(())) => break,
                Ok(Err(NotOpened::Never(why))) => {
                    self.queues
                        .set_waiter(WaiterState::Polling(why.as_str().into()));
                    log::warn!(
                        "{server}: contenders poll every {:?}: {why}",
                        self.poll_interval
                    );
                    break;
                }
                Ok(Err(NotOpened::Now(error))) => error,
                Err(_) => Error::new(ErrorKind::Panicked, "its thread panicked"),
            };
            let _ = catch_unwind(AssertUnwindSafe(|| {
                log::debug!("{server}: the waiting connection: {broken}");
            }));
            self.queues
                .set_waiter(WaiterState::Down(broken.to_string().into()));
            self.blocker.lock().take();
            self.queues
                .pause(pause.mul_f64(rand::random_range(0.75..1.25)));
            pause = (pause * 2).min(MAX_PAUSE);
        }
        self.blocker.lock().take();
    }

    /// Opens both connections. Not before the pool has reached the server: it knows how often one may knock.
    fn open(&self, tested: &mut bool) -> std::result::Result<Connection, NotOpened> {
        let rows = &*self.rows;
        let by = Moment::now() + rows.patience() * 2;
        let mut reached = rows.pool.checkout(Lane::Other, by)?;
        let by = Moment::now() + reached.patience() * 2;
        let mut call = rows.on(&mut reached, by);
        call.ping()?;
        if let Some(why) = call.statements()?.no_wakeups {
            return Err(NotOpened::Never(why.to_owned()));
        }
        let connector = rows.pool.connector();
        let options = ConnectionOptions {
            read_timeout: Duration::from_secs(self.wait_seconds()) + ANSWER,
            // A time limit for statements would end waits; a half-open connection must let go of its name.
            init: format!(
                "SET /*M!100100 max_statement_time = 0, */ /*!80000 max_execution_time = 0, */ \
                 wait_timeout = {WAIT_TIMEOUT_S}"
            ),
            ..connector.options.clone()
        };
        // A log-in takes its time, and a factory that is dropped meanwhile waits for no more than one.
        self.expect_wanted()?;
        let mut blocker = connector.open(&options, None)?;
        self.expect_wanted()?;
        hold(&mut blocker, &format!("contend:wait:{}", self.token))?;
        self.expect_wanted()?;
        let mut waiter = connector.open(&options, None)?;
        self.expect_wanted()?;
        hold(&mut waiter, &format!("contend:{}", self.token))?;
        self.expect_wanted()?;
        if !*tested {
            self.test(&mut waiter, &mut reached)?;
            *tested = true;
        }
        *self.blocker.lock() = Some(blocker);
        Ok(waiter)
    }

    /// Refuses to go on for a factory that was dropped.
    fn expect_wanted(&self) -> Result<()> {
        if self.queues.is_stopped() {
            return Err(Error::new(ErrorKind::Closed, "the factory was closed"));
        }
        Ok(())
    }

    /// Kills one wait of our own through a connection of the pool, as others will.
    fn test(
        &self,
        waiter: &mut Connection,
        other: &mut Connection,
    ) -> std::result::Result<(), NotOpened> {
        let over = AtomicBool::new(false);
        let sql = format!("SELECT GET_LOCK('contend:wait:{}', 2)", self.token);
        let (waited, killed) = std::thread::scope(|scope| {
            let killer = std::thread::Builder::new().spawn_scoped(scope, || {
                // Longer than the wait lasts: the statement may come late to the server.
                let by = Moment::now() + Duration::from_secs(10);
                while !over.load(Ordering::Relaxed) && !by.remaining().is_zero() {
                    other.run(Moment::FAR, |conn| conn.query_drop(kill(&self.token)))?;
                    std::thread::sleep(Duration::from_millis(5));
                }
                Ok(())
            });
            let waited = wait(waiter, &sql);
            over.store(true, Ordering::Relaxed);
            let killed = match killer {
                Ok(killer) => killer
                    .join()
                    .unwrap_or_else(|_| Err(RequestError::panicked())),
                Err(_) => Ok(()),
            };
            (waited, killed)
        });
        if let Err(error) = killed {
            return Err(NotOpened::refused("KILL QUERY", error));
        }
        match waited {
            Ok(Waited::Woken) => Ok(()),
            Ok(Waited::TimedOut) => Err(NotOpened::Never(
                "KILL QUERY did not end a wait; is there a proxy before the server?".to_owned(),
            )),
            Ok(Waited::Unblocked) => Err(NotOpened::Never(
                "a name held by one connection was granted to another; is there a proxy before the \
                 server?"
                    .to_owned(),
            )),
            Err(error) => Err(NotOpened::refused("GET_LOCK", error)),
        }
    }

    /// Waits for the heads of all queues. Returns an error where a connection broke.
    fn serve(&self, mut waiter: Connection) -> Result<()> {
        let by = || Moment::now() + Duration::from_secs(60);
        let mut beat = Moment::now();
        while !self.queues.is_stopped() {
            self.withdraw_spare_tokens()?;
            if Moment::now() - beat >= BEAT {
                beat = Moment::now();
                match waiter.run(by(), |conn| conn.query_drop("DO 1")) {
                    Err(error) if !is_interrupted(&error) => return Err(error.into()),
                    _ => {}
                }
                self.with_blocker(
                    |blocker| Ok(blocker.run(by(), |conn| conn.query_drop("DO 1"))?),
                )?;
            }
            let mutexes = self.queues.watch();
            if mutexes.is_empty() {
                self.queues
                    .await_work(BEAT.saturating_sub(Moment::now() - beat));
                continue;
            }
            let statements = self.rows.on(&mut waiter, by()).statements()?;
            let sql = statements.wait(&self.token, &mutexes, self.wait_seconds());
            let waited = wait(&mut waiter, &sql);
            self.queues.unwatch();
            let due = match waited? {
                Waited::Unblocked => {
                    return Err(Error::new(
                        ErrorKind::Unreachable,
                        "its second connection is gone",
                    ));
                }
                Waited::Woken if mutexes.len() == 1 => mutexes,
                Waited::Woken | Waited::TimedOut => {
                    let sql = statements.look_many(&self.token, &mutexes);
                    self.look_many(&mut waiter, &sql, mutexes)?
                }
            };
            for mutex in &due {
                self.queues.tell(mutex);
            }
            self.queues.await_looks(&due, LOOK);
        }
        Ok(())
    }

    /// Returns those of `mutexes` that are worth a look.
    fn look_many(
        &self,
        waiter: &mut Connection,
        sql: &str,
        mut mutexes: Vec<Arc<str>>,
    ) -> Result<Vec<Arc<str>>> {
        let sent = Moment::now();
        let rows = waiter.run(sent + Duration::from_secs(60), |conn| conn.query(sql));
        let rows: Vec<mysql::Row> = match rows {
            Ok(rows) => rows,
            // Woken once more: the next wait looks at the rows itself.
            Err(error) if is_interrupted(&error) => return Ok(Vec::new()),
            Err(error) => return Err(error.into()),
        };
        for row in rows {
            if let Some((mutex, true, row)) = Row::read_which(row, sent) {
                self.queues.saw_quiet(&mutex, &row);
                mutexes.retain(|other| **other != *mutex);
            }
        }
        Ok(mutexes)
    }

    /// Withdraws what a contender that was dropped, or whose withdrawal failed, has left behind.
    fn withdraw_spare_tokens(&self) -> Result<()> {
        for mutex in self.queues.spare_tokens() {
            self.with_blocker(|blocker| {
                let by = Moment::now() + blocker.patience() * 2;
                match self.step(&mut self.rows.on(blocker, by), &mutex) {
                    Err(error) if blocker.is_poisoned() => Err(error),
                    // A row that an operator has locked, say: later.
                    Err(_) => {
                        self.queues.pause(LOOK);
                        Ok(())
                    }
                    Ok(()) => Ok(()),
                }
            })?;
        }
        Ok(())
    }

    fn with_blocker<T>(&self, work: impl FnOnce(&mut Connection) -> Result<T>) -> Result<T> {
        match &mut *self.blocker.lock() {
            Some(blocker) => work(blocker),
            None => Err(Error::new(
                ErrorKind::Closed,
                "its second connection was closed",
            )),
        }
    }

    /// Returns the poll interval in whole seconds, because MySQL rounds; at most two.
    fn wait_seconds(&self) -> u64 {
        let whole = self.poll_interval.as_secs() + u64::from(self.poll_interval.subsec_nanos() > 0);
        whole.clamp(1, MAX_WAIT_S)
    }
}

/// Why the connections are not open.
enum NotOpened {
    /// It may work later.
    Now(Error),
    /// It cannot work on this server.
    Never(String),
}

impl NotOpened {
    /// Maps a refusal: final, unless the connection broke or the server is busy.
    fn refused(what: &str, error: RequestError) -> NotOpened {
        let code = error.code();
        let error = error.into_error();
        match code {
            Some(1094) => NotOpened::Never(
                "a name held by one connection is unknown to another; is there a proxy before the \
                 server?"
                    .to_owned(),
            ),
            Some(1040 | 1053 | 1205 | 1213 | 1317 | 1927 | 2006 | 2013) | None => {
                NotOpened::Now(error)
            }
            Some(_) => NotOpened::Never(format!("the server refuses {what}: {error}")),
        }
    }
}

impl From<Error> for NotOpened {
    fn from(error: Error) -> NotOpened {
        NotOpened::Now(error)
    }
}

/// How a wait ended.
enum Waited {
    Woken,
    /// The time was up, or a row needed a look at once.
    TimedOut,
    /// Nobody holds the name that was waited for.
    Unblocked,
}

fn wait(connection: &mut Connection, sql: &str) -> std::result::Result<Waited, RequestError> {
    let answer = connection.run(Moment::FAR, |conn| conn.query_first::<Option<i64>, _>(sql));
    match answer {
        Ok(Some(Some(0))) => Ok(Waited::TimedOut),
        Ok(Some(Some(_))) => Ok(Waited::Unblocked),
        Ok(Some(None) | None) => Ok(Waited::Woken),
        Err(error) if is_interrupted(&error) => Ok(Waited::Woken),
        Err(error) => Err(error),
    }
}

/// Returns `true` if a statement was ended by `KILL QUERY` or by a time limit.
fn is_interrupted(error: &RequestError) -> bool {
    matches!(error.code(), Some(1317 | 1969 | 3024))
}

/// Acquires a name. Ends a half-open predecessor of ours that holds it, by the name and never by its
/// connection number, which another connection may have by now.
fn hold(connection: &mut Connection, name: &str) -> std::result::Result<(), NotOpened> {
    for _ in 0..20 {
        let sql = format!("SELECT GET_LOCK('{name}', 0)");
        match wait(connection, &sql) {
            Ok(Waited::Unblocked) => return Ok(()),
            Ok(_) => {}
            Err(error) => return Err(NotOpened::refused("GET_LOCK", error)),
        }
        let sql = format!("KILL CONNECTION IS_USED_LOCK('{name}')");
        let killed = connection.run(Moment::FAR, |conn| conn.query_drop(sql));
        if let Err(error) = killed
            && error.is_poison()
        {
            return Err(NotOpened::Now(error.into()));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Err(NotOpened::Now(Error::new(
        ErrorKind::Unavailable,
        "another connection holds the name that wakes this process",
    )))
}
