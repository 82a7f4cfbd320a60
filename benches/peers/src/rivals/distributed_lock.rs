//! distributed-lock, on Redis: asynchronous, polls.

use std::sync::Arc;
use std::time::Duration;

use distributed_lock_core::traits::{DistributedLock, LockHandle, LockProvider};
use distributed_lock_redis::{RedisDistributedLock, RedisLockHandle, RedisLockProvider};
use tokio::runtime::Runtime;

use super::{Contender, Rival, TTL};

const PATIENCE: Duration = Duration::from_secs(60);

pub struct Distributed {
    pub url: String,
    pub runtime: Arc<Runtime>,
}

struct One {
    provider: RedisLockProvider,
    mutex: String,
    handle: Option<RedisLockHandle>,
    runtime: Arc<Runtime>,
}

impl Rival for Distributed {
    fn contender(&self, mutex: &str) -> Box<dyn Contender> {
        let provider = RedisLockProvider::builder().url(&self.url).expiry(TTL);
        Box::new(One {
            provider: self.runtime.block_on(provider.build()).unwrap(),
            mutex: mutex.to_owned(),
            handle: None,
            runtime: Arc::clone(&self.runtime),
        })
    }
}

impl Contender for One {
    fn lock(&mut self) {
        // A lock of its own for each acquisition: its id is the lock's. Without a limit it gives up at
        // once (0.2.0).
        let lock: RedisDistributedLock = self.provider.create_lock(&self.mutex);
        let acquired = lock.acquire(Some(PATIENCE));
        self.handle = Some(self.runtime.block_on(acquired).unwrap());
    }

    fn unlock(&mut self) {
        let handle = self.handle.take().unwrap();
        self.runtime.block_on(handle.release()).unwrap();
    }
}
