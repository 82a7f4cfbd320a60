//! Ourselves: a locker on a factory of its own.

use contend::{Guard, Locker};

use super::{Contender, Rival};

pub struct Ours {
    pub url: String,
}

struct Ourselves {
    locker: Locker,
    guard: Option<Guard>,
}

impl Rival for Ours {
    fn setting(&self) -> &'static str {
        "defaults: woken by the release; one connection subscribes for all of a process"
    }

    fn contender(&self, mutex: &str) -> Box<dyn Contender> {
        let factory = contend::connect(&self.url).unwrap();
        Box::new(Ourselves {
            locker: factory.locker(mutex).build().unwrap(),
            guard: None,
        })
    }
}

impl Contender for Ourselves {
    fn lock(&mut self) {
        self.guard = Some(self.locker.lock().unwrap());
    }

    fn unlock(&mut self) {
        self.guard.take().unwrap().unlock().unwrap();
    }
}
