//! The keeper: one connection that holds the names of all services of a factory that lead, and a
//! thread that does what nobody should wait for.

use std::collections::HashMap;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};
use mysql::prelude::Queryable;

use super::Shared;
use super::name::WakeName;
use super::post::{Phase, Post};
use crate::backend::mysql::link::Link;
use crate::clock::Moment;

/// How soon a name that somebody else still holds is tried again: a waiter that came in between gives
/// it up once it has seen that the owner is there to stay. Then ever more seldom.
const AGAIN: Duration = Duration::from_millis(50);
const LAST_AGAIN: Duration = Duration::from_secs(2);

/// Half of the first pause between two attempts to connect, and the longest.
const FIRST_BACKOFF: Duration = Duration::from_millis(50);
const MAX_BACKOFF: Duration = Duration::from_secs(2);

/// What the keeper is asked to do.
#[derive(Debug)]
pub(super) enum Order {
    /// Have a connection ready.
    Connect,
    /// Hold this name.
    Hold(WakeName),
    /// Hold it no longer.
    Free(WakeName),
    /// Wake this lookout, which is blocked on the server.
    Wake(Arc<Post>),
}

pub(super) struct Keeper {
    shared: Arc<Shared>,
    link: Option<Link>,
    names: HashMap<WakeName, Name>,
    /// When to connect again.
    connect_at: Moment,
    failures: u32,
    last_heard: Moment,
    /// Lookouts that could not be woken yet.
    sleepers: Vec<Arc<Post>>,
}

#[derive(Debug)]
struct Name {
    /// How many owners in this process want it held: at times two, when one takes over from the other.
    wanted: usize,
    held: bool,
    /// When to try again, and how long to pause after that.
    try_at: Moment,
    pause: Duration,
}

impl Name {
    fn new() -> Name {
        Name {
            wanted: 0,
            held: false,
            try_at: Moment::now(),
            pause: AGAIN,
        }
    }
}

impl Keeper {
    /// Starts the thread; `None` where it may not or cannot.
    pub(super) fn spawn(shared: &Arc<Shared>) -> Option<Sender<Order>> {
        let alive = shared.sign_of_life()?;
        if !shared.reserve() {
            return None;
        }
        let (orders, received) = crossbeam_channel::unbounded();
        let mut keeper = Keeper {
            shared: Arc::clone(shared),
            link: None,
            names: HashMap::new(),
            connect_at: Moment::now(),
            failures: 0,
            last_heard: Moment::now(),
            sleepers: Vec::new(),
        };
        let spawned = thread::Builder::new()
            .name("contend-mysql-keeper".to_owned())
            .spawn(move || {
                keeper.serve(&received);
                keeper.shared.give_up_reservation();
                drop(keeper);
                drop(alive);
            });
        if let Err(error) = spawned {
            shared.give_up_reservation();
            log::warn!("no thread for wake-ups, contenders poll: {error}");
            return None;
        }
        Some(orders)
    }

    fn serve(&mut self, orders: &Receiver<Order>) {
        loop {
            let order = match orders.recv_timeout(self.pause()) {
                Ok(order) => Some(order),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => return,
            };
            match order {
                Some(Order::Connect) | None => {}
                Some(Order::Hold(name)) => {
                    self.names.entry(name).or_insert_with(Name::new).wanted += 1
                }
                Some(Order::Free(name)) => self.free(&name),
                Some(Order::Wake(post)) => self.sleepers.push(post),
            }
            self.wake();
            if self.shared.is_refused() {
                self.link = None;
                self.names.clear();
                self.connect_at = Moment::FAR;
                continue;
            }
            self.connect();
            self.hold();
            self.heartbeat();
        }
    }

    /// How long to wait for an order.
    fn pause(&self) -> Duration {
        let mut until = match self.link {
            Some(_) => self.last_heard + self.shared.heartbeat(),
            None => self.connect_at,
        };
        if self.link.is_some() {
            let missing = self.names.values().filter(|name| !name.held);
            until = missing.map(|name| name.try_at).fold(until, Moment::min);
        }
        if !self.sleepers.is_empty() {
            until = until.min(Moment::now() + AGAIN);
        }
        until.remaining().max(Duration::from_millis(1))
    }

    fn connect(&mut self) {
        if self.link.is_some() || !self.connect_at.remaining().is_zero() {
            return;
        }
        let options = self.shared.link_options(None);
        match self.shared.store.pool.open_apart(&options) {
            Ok(link) => {
                self.link = Some(link);
                self.last_heard = Moment::now();
            }
            Err(fault) => {
                log::debug!("no connection for wake-ups: {}", fault.into_error());
                self.failures = self.failures.saturating_add(1);
                self.connect_at = Moment::now() + self.backoff();
            }
        }
    }

    /// How long to stay away after the last failure.
    fn backoff(&self) -> Duration {
        (FIRST_BACKOFF * 2u32.pow(self.failures.min(10))).min(MAX_BACKOFF)
    }

    /// Takes what is wanted and free.
    fn hold(&mut self) {
        let missing: Vec<WakeName> = self
            .names
            .iter()
            .filter(|(_, name)| !name.held && name.try_at.remaining().is_zero())
            .map(|(name, _)| name.clone())
            .collect();
        for name in missing {
            let Some(held) = self.query("SELECT GET_LOCK(?, 0)", &name) else {
                return;
            };
            if let Some(entry) = self.names.get_mut(&name) {
                entry.held = held == Some(1);
                entry.try_at = Moment::now() + entry.pause;
                entry.pause = (entry.pause * 2).min(LAST_AGAIN);
            }
        }
    }

    fn free(&mut self, name: &WakeName) {
        let Some(entry) = self.names.get_mut(name) else {
            return;
        };
        entry.wanted = entry.wanted.saturating_sub(1);
        if entry.wanted > 0 {
            return;
        }
        if let Some(entry) = self.names.remove(name)
            && entry.held
        {
            self.query("SELECT RELEASE_LOCK(?)", name);
        }
    }

    /// Lets the server hear of us, lest it takes us for dead.
    fn heartbeat(&mut self) {
        if (self.last_heard + self.shared.heartbeat())
            .remaining()
            .is_zero()
        {
            self.query("SELECT ? IS NULL", &WakeName::new("", "", ""));
        }
    }

    /// One statement with a name in it; `None` if the connection is gone, and the names with it.
    fn query(&mut self, sql: &str, name: &WakeName) -> Option<Option<i64>> {
        let link = self.link.as_mut()?;
        let by = Moment::FAR;
        match link.run(by, |conn| {
            conn.exec_first::<Option<i64>, _, _>(sql, (name.as_str(),))
        }) {
            Ok(answer) => {
                self.last_heard = Moment::now();
                self.failures = 0;
                Some(answer.flatten())
            }
            Err(fault) => {
                self.shared.heed(&fault);
                log::debug!("names are held no longer: {}", fault.into_error());
                self.link = None;
                // One connection may break by itself: the next is opened at once. If that one is no
                // better, it is the server that has to be given time; only an answer, not the log-in,
                // says that it is well again.
                let pause = match self.failures {
                    0 => Duration::ZERO,
                    _ => self.backoff(),
                };
                self.connect_at = Moment::now() + pause;
                self.failures = self.failures.saturating_add(1);
                for entry in self.names.values_mut() {
                    entry.held = false;
                    entry.try_at = Moment::now();
                    entry.pause = AGAIN;
                }
                None
            }
        }
    }

    /// Ends the waits of lookouts that are not needed any more. Under the lock of each, so that it
    /// cannot go on to another statement, which would be the one to die; and by a name that only its
    /// connection holds, so that the number of a stranger's connection can never be meant (a restarted
    /// server counts from one again).
    fn wake(&mut self) {
        let pool = &self.shared.store.pool;
        self.sleepers.retain(|post| {
            let mut state = post.state();
            let Phase::Blocked(connection) = &state.phase else {
                return false;
            };
            let by = Moment::now() + pool.patience() * 2;
            // As text: of hex digits, and not every server prepares a KILL.
            let kill = format!("KILL QUERY IS_USED_LOCK('{}')", connection.as_str());
            // As an owner would: it waits for no lock, and those who lead wait for this thread.
            let killed = pool.run(by, |conn| conn.query_drop(kill));
            state.killed = true;
            if let Err(error) = killed {
                log::debug!("a waiting connection could not be woken: {error}");
                return true;
            }
            false
        });
    }
}
