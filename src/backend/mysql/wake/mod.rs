//! Wake-ups: how a waiting contender learns at once that the owner is gone.
//!
//! Beside the row there is a *name*, a lock on the server that belongs to a connection (`GET_LOCK`).
//! Whoever leads holds it; the first of those who wait blocks on it, and the server grants it when its
//! holder frees it or dies. It is a hint and never more: a granted name says "look now", and the row
//! decides.
//!
//! To be the first is a name as well, for which the others wait: the server grants it first come, first
//! served. Their order does not depend on who gets the wake name when: a leader that had not taken it
//! yet, or a locker that takes none, lets a waiter have it in vain; such a waiter gives it up for a
//! while, but not its place.
//!
//! - [`keeper`] holds the names of services that lead without having waited, all on one connection.
//! - [`lookout`] blocks on a name for one waiting contender, on a connection and a thread of its own.
//!   It keeps the name for a contender that wins, so that the others sleep on.
//! - [`post`] is what a contender and its lookout share.
//!
//! Nothing here is on anybody's critical path: a seat leaves a message and goes on.

mod keeper;
mod lookout;
mod name;
mod post;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};
use parking_lot::Mutex;

use self::keeper::{Keeper, Order};
use super::fault::Fault;
use super::link::LinkOptions;
use super::store::Store;
use crate::bell::Waker;
use crate::fork::Origin;

pub(super) use self::name::WakeName;
pub(super) use self::post::Post;

/// How long dropping waits for the threads in here: they end in milliseconds unless the server hangs.
const FAREWELL: Duration = Duration::from_secs(2);

/// The wake-ups of one factory.
pub(super) struct Hub {
    shared: Arc<Shared>,
    /// Orders to the keeper's thread, which starts with the first.
    keeper: Mutex<Option<Sender<Order>>>,
    /// To a lookout with a connection but nothing to look out for: without a buffer, so that it takes
    /// a post only where one waits for it.
    posts: Option<Sender<Arc<Post>>>,
    /// Disconnected once every thread has ended.
    ended: Receiver<()>,
    origin: Origin,
}

/// What the threads know.
struct Shared {
    store: Arc<Store>,
    /// The longest time between two looks at a row that nobody can wake us for.
    poll_interval: Duration,
    /// How long the server lets a silent connection keep its names.
    silence: Duration,
    /// Connections in use here, the keeper's included.
    connections: Mutex<usize>,
    max_connections: usize,
    /// The server does not do named locks: everybody polls.
    refused: AtomicBool,
    /// Where lookouts wait for work.
    posts: Receiver<Arc<Post>>,
    /// Held by every thread for as long as it lives; `None` once the hub is dropped.
    alive: Mutex<Option<Sender<()>>>,
}

impl Hub {
    /// Starts nothing yet. `max_connections` of zero switches wake-ups off.
    pub(super) fn new(
        store: Arc<Store>,
        poll_interval: Duration,
        silence: Duration,
        max_connections: usize,
    ) -> Hub {
        let (alive, ended) = crossbeam_channel::bounded(0);
        let (posts, work) = crossbeam_channel::bounded(0);
        Hub {
            shared: Arc::new(Shared {
                store,
                poll_interval,
                silence,
                connections: Mutex::new(0),
                max_connections,
                refused: AtomicBool::new(false),
                posts: work,
                alive: Mutex::new(Some(alive)),
            }),
            keeper: Mutex::new(None),
            posts: Some(posts),
            ended,
            origin: Origin::here(),
        }
    }

    /// Whether names mean anything here.
    pub(super) fn is_on(&self) -> bool {
        self.shared.max_connections > 0 && !self.shared.is_refused()
    }

    /// Opens the keeper's connection, so that a service that is about to lead need not wait for it.
    pub(super) fn warm_up(&self) {
        self.order(Order::Connect);
    }

    /// Holds `name` for somebody who leads, as soon as it is free.
    pub(super) fn hold(&self, name: &WakeName) {
        self.order(Order::Hold(name.clone()));
    }

    /// Holds `name` no longer, once for every [`hold`](Hub::hold).
    pub(super) fn free(&self, name: &WakeName) {
        self.order(Order::Free(name.clone()));
    }

    /// Posts a lookout that rings `waker` when the owner may be gone. `None`: there are as many as
    /// there may be.
    pub(super) fn look_out(
        &self,
        mutex: &Arc<str>,
        name: &WakeName,
        waker: &Waker,
    ) -> Option<Arc<Post>> {
        if !self.is_on() {
            return None;
        }
        let post = Arc::new(Post::new(mutex, name, waker));
        if let Some(posts) = &self.posts
            && posts.try_send(Arc::clone(&post)).is_ok()
        {
            return Some(post);
        }
        // The keeper comes first: it ends the waits of the others.
        self.warm_up();
        lookout::spawn(&self.shared, &post).then_some(post)
    }

    /// Ends a lookout's duty, whatever it is doing: blocked on the server, it is woken by a `KILL`.
    pub(super) fn dismiss(&self, post: Arc<Post>) {
        if !self.origin.is_here() {
            // The lookout is the parent's, and may have held the lock of the post at the fork.
            return;
        }
        if post.dismiss() {
            self.order(Order::Wake(post));
        }
    }

    /// The same, and waits for so long until nothing is left of it on the server.
    pub(super) fn withdraw(&self, post: Arc<Post>, limit: Duration) {
        if self.origin.is_here() {
            self.dismiss(Arc::clone(&post));
            post.wait_gone(limit);
        }
    }

    fn order(&self, order: Order) {
        if !self.is_on() || !self.origin.is_here() {
            return;
        }
        let mut keeper = self.keeper.lock();
        if keeper.is_none() {
            *keeper = Keeper::spawn(&self.shared);
        }
        if let Some(orders) = &*keeper
            && orders.send(order).is_err()
        {
            *keeper = None;
        }
    }
}

impl Shared {
    /// How connections for names are opened: with the pool's timeouts, but for the wait itself.
    fn link_options(&self, read_timeout: Option<Duration>) -> LinkOptions {
        let pooled = self.store.pool.options();
        LinkOptions {
            connect_timeout: pooled.connect_timeout,
            read_timeout: read_timeout.or(pooled.read_timeout),
            lock_wait: pooled.lock_wait,
            // A client that is frozen or cut off must not keep a name for hours.
            init: vec![format!(
                "SET wait_timeout = {}",
                self.silence.as_secs().max(2)
            )],
            prepare: None,
        }
    }

    /// One connection more, if there may be.
    fn reserve(&self) -> bool {
        let mut connections = self.connections.lock();
        let free = *connections < self.max_connections;
        *connections += usize::from(free);
        free
    }

    fn give_up_reservation(&self) {
        let mut connections = self.connections.lock();
        *connections = connections.saturating_sub(1);
    }

    /// What a thread holds while it lives; `None` if no thread may start any more.
    fn sign_of_life(&self) -> Option<Sender<()>> {
        self.alive.lock().clone()
    }

    /// A server that does not know `GET_LOCK` is not asked again: from now on everybody polls. Any
    /// other trouble passes.
    fn heed(&self, fault: &Fault) {
        if fault.is_unsupported() && !self.refused.swap(true, Ordering::Relaxed) {
            let why = fault.clone().into_error();
            log::warn!("the MySQL server refuses named locks, contenders poll instead: {why}");
        }
    }

    fn is_refused(&self) -> bool {
        self.refused.load(Ordering::Relaxed)
    }

    /// How often a connection that holds names must be heard of.
    fn heartbeat(&self) -> Duration {
        self.silence / 3
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        if !self.origin.is_here() {
            // A forked child has neither the threads nor the right to end them. Nothing of theirs may
            // be touched: they may have held any lock at the fork, those inside the channels included.
            std::mem::forget(std::mem::replace(&mut self.keeper, Mutex::new(None)));
            std::mem::forget(self.posts.take());
            std::mem::forget(self.ended.clone());
            std::mem::forget(Arc::clone(&self.shared));
            return;
        }
        self.shared.alive.lock().take();
        self.keeper.lock().take();
        self.posts.take();
        match self.ended.recv_timeout(FAREWELL) {
            Ok(()) | Err(RecvTimeoutError::Disconnected) => {}
            Err(RecvTimeoutError::Timeout) => log::warn!(
                "a connection that waits for a wake-up has not ended; it does when the server answers"
            ),
        }
    }
}

impl fmt::Debug for Hub {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hub")
            .field("connections", &*self.shared.connections.lock())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::mysql::store::unreachable;
    use crate::bell::Bell;

    /// Rule 12: in a child the threads that held a lock at the fork will never give it back.
    #[test]
    fn a_child_process_drops_a_hub_whatever_was_locked_at_the_fork() {
        let bell = Bell::new();
        let second = Duration::from_secs(1);
        let mut hub = Hub::new(Arc::new(unreachable()), second, second, 1);
        let name = WakeName::new("d", "t", "m");
        let post = Arc::new(Post::new(&"m".into(), &name, &bell.waker()));
        hub.origin = Origin::elsewhere();
        let (dropped, done) = crossbeam_channel::bounded(1);
        std::thread::spawn(move || {
            std::mem::forget(hub.keeper.lock());
            std::mem::forget(hub.shared.alive.lock());
            std::mem::forget(hub.shared.connections.lock());
            std::mem::forget(post.state());
            hub.dismiss(post);
            hub.free(&name);
            drop(hub);
            dropped.send(())
        });
        done.recv_timeout(Duration::from_secs(30)).unwrap();
    }
}
