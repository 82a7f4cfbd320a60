//! Faults for the backend in memory, which has no network: at its contract.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use contend::{Error, ErrorKind, Factory, Lease};
use parking_lot::Mutex;

use crate::hooked::{self, When};

/// What happens to the calls of one "process".
#[derive(Clone, Debug, Default)]
struct Settings {
    unreachable: bool,
    before: Duration,
    after: Duration,
    lose_reply: bool,
}

/// A factory whose calls can be delayed and lost, on a registry that others share.
pub struct MemoryWeather {
    factory: Factory,
    plain: Factory,
    settings: Arc<Mutex<Settings>>,
}

impl MemoryWeather {
    /// A factory on the registry `name`.
    pub fn around(name: &str, lease: Lease) -> MemoryWeather {
        let settings: Arc<Mutex<Settings>> = Arc::default();
        let shared = Arc::clone(&settings);
        let memory = contend::memory::factory(name, lease);
        let factory = hooked::around(&memory, move |when, _, _, by| {
            let now = shared.lock().clone();
            if now.unreachable {
                thread::sleep(by.remaining());
                return Err(Error::new(ErrorKind::Timeout, "on request"));
            }
            let delay = match when {
                When::Before => now.before,
                When::After => now.after,
            };
            if delay > by.remaining() {
                thread::sleep(by.remaining());
                return Err(Error::new(ErrorKind::Timeout, "on request"));
            }
            thread::sleep(delay);
            if when == When::After && now.lose_reply {
                shared.lock().lose_reply = false;
                return Err(Error::new(ErrorKind::Unreachable, "on request"));
            }
            Ok(())
        });
        MemoryWeather {
            factory,
            plain: memory,
            settings,
        }
    }

    /// The factory.
    pub fn factory(&self) -> Factory {
        self.factory.clone()
    }

    /// The same registry without faults.
    pub fn plain(&self) -> Factory {
        self.plain.clone()
    }

    /// From now on, no call succeeds; some take effect all the same.
    pub fn unreachable(&self) {
        self.settings.lock().unreachable = true;
    }

    /// From now on, calls take twice this.
    pub fn delay(&self, each_way: Duration) {
        let mut settings = self.settings.lock();
        settings.before = each_way;
        settings.after = each_way;
    }

    /// From now on, replies take this long.
    pub fn delay_replies(&self, delay: Duration) {
        self.settings.lock().after = delay;
    }

    /// The next call takes effect and fails.
    pub fn lose_next_reply(&self) {
        self.settings.lock().lose_reply = true;
    }

    /// Behaves.
    pub fn pass(&self) {
        *self.settings.lock() = Settings::default();
    }
}
