//! redlock: synchronous, a connection for each call, tries again after up to 200 ms.

use redlock::{Lock, RedLock};

use super::{Contender, Rival, TTL};

pub struct Red {
    pub url: String,
}

struct One {
    /// Never freed: its locks borrow it.
    manager: &'static RedLock,
    mutex: String,
    lock: Option<Lock<'static>>,
}

impl Rival for Red {
    fn setting(&self) -> &'static str {
        "defaults: looks again within 200 ms, at random; a connection for each call"
    }

    fn contender(&self, mutex: &str) -> Box<dyn Contender> {
        Box::new(One {
            manager: Box::leak(Box::new(RedLock::new(vec![self.url.as_str()]))),
            mutex: format!("redlock-{mutex}"),
            lock: None,
        })
    }
}

impl Contender for One {
    fn lock(&mut self) {
        // As its `acquire` does.
        while self.lock.is_none() {
            let ttl = TTL.as_millis() as usize;
            self.lock = self.manager.lock(self.mutex.as_bytes(), ttl).unwrap();
        }
    }

    fn unlock(&mut self) {
        let lock = self.lock.take().unwrap();
        self.manager.unlock(&lock);
    }
}
