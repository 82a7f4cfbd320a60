//! A backend that can be made to fail on request, around a real one.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use contend::{Error, ErrorKind, Factory};

use super::hooked::{self, Call, When};

pub struct Faulty;

impl Faulty {
    /// The same factory, whose calls all fail while the switch is on; only leaving works.
    pub fn around(factory: &Factory) -> (Factory, Arc<AtomicBool>) {
        let broken = Arc::new(AtomicBool::new(false));
        let switch = Arc::clone(&broken);
        let faulty = hooked::around(factory, move |when, call, _, _| {
            if when == When::Before && call != Call::Withdraw && switch.load(Ordering::SeqCst) {
                return Err(Error::new(ErrorKind::Unreachable, "broken on request"));
            }
            Ok(())
        });
        (faulty, broken)
    }
}
