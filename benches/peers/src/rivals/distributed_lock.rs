//! distributed-lock, on Redis: asynchronous, polls.

use std::sync::Arc;

use distributed_lock::{
    DistributedLock, LockHandle, LockProvider, RedisDistributedLock, RedisLockHandle,
    RedisLockProvider,
};
use tokio::runtime::Runtime;

use super::{Contender, Rival, TTL};

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
        // A lock of its own for each acquisition: its id is the lock's.
        let lock: RedisDistributedLock = self.provider.create_lock(&self.mutex);
        self.handle = Some(self.runtime.block_on(lock.acquire(None)).unwrap());
    }

    fn unlock(&mut self) {
        let handle = self.handle.take().unwrap();
        self.runtime.block_on(handle.release()).unwrap();
    }
}
