//! Ourselves: a locker on a factory of its own.

use contend::{Guard, Locker};

use super::{Contender, Rival};

pub struct Ours {
    pub backend: String,
    pub url: String,
}

struct Ourselves {
    locker: Locker,
    guard: Option<Guard>,
}

impl Rival for Ours {
    fn setting(&self) -> &'static str {
        match self.backend.as_str() {
            "mysql" => "defaults: the release ends the waiter's statement",
            "zk" => "defaults: watches the node before its own",
            _ => "defaults: woken by a message of the release",
        }
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
