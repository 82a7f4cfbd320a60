//! distributed-lock, on Redis: asynchronous. On one server its `acquire` does not wait (0.2.0), whatever
//! timeout it is given: whoever wants to wait tries again after a pause of their own, here 10 ms.

use std::time::Duration;

use distributed_lock_core::traits::{DistributedLock, LockHandle, LockProvider};
use distributed_lock_redis::{RedisDistributedLock, RedisLockHandle, RedisLockProvider};
use tokio::runtime::Runtime;

use super::{Contender, Rival, TTL, runtime};

const PAUSE: Duration = Duration::from_millis(10);

pub struct Distributed {
    pub url: String,
}

struct One {
    provider: RedisLockProvider,
    mutex: String,
    handle: Option<RedisLockHandle>,
    runtime: Runtime,
}

impl Rival for Distributed {
    fn setting(&self) -> &'static str {
        "looks again every 10 ms (our choice); on one server it has no wait of its own; asynchronous, called with block_on on a runtime in the thread that waits (our choice)"
    }

    fn contender(&self, mutex: &str) -> Box<dyn Contender> {
        // Nine tenths, as its default is of its default expiry: with more than the expiry it gives every
        // attempt no time at all, and what the server grants is lost until it expires.
        let provider = RedisLockProvider::builder()
            .url(&self.url)
            .expiry(TTL)
            .min_validity(TTL * 9 / 10);
        let runtime = runtime();
        Box::new(One {
            provider: runtime.block_on(provider.build()).unwrap(),
            mutex: mutex.to_owned(),
            handle: None,
            runtime,
        })
    }
}

impl Contender for One {
    fn lock(&mut self) {
        // A lock of its own for each acquisition: its id is the lock's.
        let lock: RedisDistributedLock = self.provider.create_lock(&self.mutex);
        while self.handle.is_none() {
            self.handle = self.runtime.block_on(lock.try_acquire()).unwrap();
            if self.handle.is_none() {
                std::thread::sleep(PAUSE);
            }
        }
    }

    fn unlock(&mut self) {
        let handle = self.handle.take().unwrap();
        self.runtime.block_on(handle.release()).unwrap();
    }
}
