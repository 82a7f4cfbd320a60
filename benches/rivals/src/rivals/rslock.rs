//! rslock: asynchronous, tries again after up to 200 ms.

use rslock::{Lock, LockManager};
use tokio::runtime::Runtime;

use super::{Contender, Rival, TTL, runtime};

pub struct RsLock {
    pub url: String,
}

struct One {
    manager: LockManager,
    mutex: String,
    lock: Option<Lock>,
    runtime: Runtime,
}

impl Rival for RsLock {
    fn setting(&self) -> &'static str {
        "defaults: looks again within 200 ms, at random; asynchronous, called with block_on on a runtime in the thread that waits (our choice)"
    }

    fn contender(&self, mutex: &str) -> Box<dyn Contender> {
        Box::new(One {
            manager: LockManager::new(vec![self.url.as_str()]),
            mutex: format!("rslock-{mutex}"),
            lock: None,
            runtime: runtime(),
        })
    }
}

impl Contender for One {
    fn lock(&mut self) {
        let lock = self
            .runtime
            .block_on(self.manager.acquire_no_guard(self.mutex.as_str(), TTL));
        self.lock = Some(lock.unwrap());
    }

    fn unlock(&mut self) {
        let lock = self.lock.take().unwrap();
        self.runtime.block_on(self.manager.unlock(&lock));
    }
}
