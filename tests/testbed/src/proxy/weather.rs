//! What the connections of a proxy obey, share and count.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::connection::Ends;
use crate::sync::lock;

/// What a test has asked for.
#[derive(Debug, Default)]
pub(super) struct Settings {
    pub(super) hold_to_server: bool,
    pub(super) hold_to_client: bool,
    pub(super) delay_to_server: Duration,
    pub(super) delay_to_client: Duration,
    /// The reply to the next request that contains this is lost.
    pub(super) lose_reply_to: Option<Vec<u8>>,
    /// What replies are garbled with.
    pub(super) garble: Option<Garble>,
}

/// Changes bytes, repeatably.
#[derive(Debug, Clone)]
pub(super) struct Garble {
    /// Of a thousand pieces, how many are changed.
    pub(super) per_mille: u64,
    /// The state of the generator; not 0.
    pub(super) state: u64,
}

impl Garble {
    /// Changes, inserts, repeats or drops some of `bytes`, or leaves them alone.
    pub(super) fn apply(&mut self, bytes: &mut Vec<u8>) {
        if self.next() % 1_000 >= self.per_mille || bytes.is_empty() {
            return;
        }
        for _ in 0..=self.next() % 3 {
            let at = self.below(bytes.len());
            match self.next() % 6 {
                0 => bytes[at] ^= 1 << (self.next() % 8),
                1 => bytes[at] = self.next() as u8,
                2 => bytes[at] = [0, 0x7f, 0x80, 0xff, b'9', b'-'][self.below(6)],
                3 => bytes.insert(at, self.next() as u8),
                4 if bytes.len() > 1 => {
                    bytes.remove(at);
                }
                _ => {
                    let end = (at + 1 + self.below(16)).min(bytes.len());
                    let copy = bytes[at..end].to_vec();
                    bytes.splice(at..at, copy);
                }
            }
        }
    }

    fn below(&mut self, length: usize) -> usize {
        usize::try_from(self.next() % length.max(1) as u64).unwrap_or(0)
    }

    /// Xorshift: good enough to hit every byte.
    fn next(&mut self) -> u64 {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        self.state
    }
}

impl Settings {
    pub(super) fn reset(&mut self) {
        *self = Self::default();
    }
}

/// What has happened.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Counters {
    pub(super) accepted: usize,
    pub(super) lost_replies: usize,
    pub(super) bytes_to_server: u64,
    pub(super) bytes_to_client: u64,
}

/// Settings, counters and the live connections of one proxy.
#[derive(Debug, Default)]
pub(super) struct Weather {
    settings: Mutex<Settings>,
    /// Told when settings change or a connection is closed. Belongs to `settings`.
    changed: Condvar,
    counters: Mutex<Counters>,
    live: Mutex<HashMap<usize, Arc<Ends>>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Weather {
    pub(super) fn change(&self, change: impl FnOnce(&mut Settings)) {
        change(&mut lock(&self.settings));
        self.changed.notify_all();
    }

    /// Looks at the settings, and may change them.
    pub(super) fn settings<T>(&self, look: impl FnOnce(&mut Settings) -> T) -> T {
        look(&mut lock(&self.settings))
    }

    /// Blocks until `due` has come and `held` is false, or the connection is closed.
    pub(super) fn wait(&self, ends: &Ends, due: Instant, held: impl Fn(&Settings) -> bool) {
        let mut settings = lock(&self.settings);
        while !ends.is_closed() {
            let left = due.saturating_duration_since(Instant::now());
            settings = if !left.is_zero() {
                let waited = self.changed.wait_timeout(settings, left);
                waited.unwrap_or_else(PoisonError::into_inner).0
            } else if held(&settings) {
                let waited = self.changed.wait(settings);
                waited.unwrap_or_else(PoisonError::into_inner)
            } else {
                return;
            };
        }
    }

    pub(super) fn count(&self, count: impl FnOnce(&mut Counters)) {
        count(&mut lock(&self.counters));
    }

    pub(super) fn counters(&self) -> Counters {
        *lock(&self.counters)
    }

    pub(super) fn live(&self) -> usize {
        lock(&self.live).len()
    }

    pub(super) fn enter(&self, number: usize, ends: Arc<Ends>) {
        lock(&self.live).insert(number, ends);
    }

    pub(super) fn leave(&self, number: usize) {
        lock(&self.live).remove(&number);
    }

    /// Remembers a connection's thread, and forgets those that have ended.
    pub(super) fn keep(&self, thread: JoinHandle<()>) {
        let mut threads = lock(&self.threads);
        threads.retain(|thread| !thread.is_finished());
        threads.push(thread);
    }

    /// Closes all connections; they count as live no more.
    pub(super) fn close_all(&self) {
        self.end_all(Ends::close);
    }

    /// Closes all connections with a reset; they count as live no more.
    pub(super) fn reset_all(&self) {
        self.end_all(Ends::reset);
    }

    pub(super) fn join_all(&self) {
        let threads = std::mem::take(&mut *lock(&self.threads));
        for thread in threads {
            let _ = thread.join();
        }
    }

    /// Closes one connection.
    pub(super) fn close(&self, ends: &Ends) {
        ends.close();
        self.wake();
    }

    fn end_all(&self, end: impl Fn(&Ends)) {
        let live = std::mem::take(&mut *lock(&self.live));
        live.values().for_each(|ends| end(ends));
        self.wake();
    }

    /// The lock is taken so that no thread is between its look and its sleep.
    fn wake(&self) {
        drop(lock(&self.settings));
        self.changed.notify_all();
    }
}
