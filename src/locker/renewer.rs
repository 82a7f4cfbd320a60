//! One thread per factory renews for all its guards. It starts with the first guard, ends with the
//! factory, and sleeps through cycles that are over before their first renewal.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::holding::Holding;
use super::rota::{Due, Rota};
use crate::bell::{Bell, Ring};
use crate::clock::Moment;
use crate::error::{ErrorKind, Result};
use crate::service::Lifecycle;

/// How long dropping a factory waits for the thread. No guard is left then, so no call is under way.
const JOIN: Duration = Duration::from_secs(5);

pub(crate) struct Renewer {
    rota: Arc<Mutex<Rota>>,
    lifecycle: Lifecycle,
}

impl Renewer {
    pub(crate) fn new() -> Renewer {
        Renewer {
            rota: Arc::new(Mutex::new(Rota::new())),
            lifecycle: Lifecycle::new(),
        }
    }

    /// Takes care of a guard from now on.
    pub(super) fn insert(&self, holding: &Arc<Holding>, due: Due) -> Result<()> {
        let mut rota = self.rota.lock();
        if !rota.started {
            let shared = Arc::clone(&self.rota);
            self.lifecycle.start("lock renewal".to_owned(), || {
                Ok((move |bell: Bell| run(&shared, &bell), 0))
            })?;
            rota.started = true;
        }
        rota.insert(holding, due);
        Ok(())
    }

    pub(super) fn remove(&self, number: u64, due: Due) {
        self.rota.lock().remove(number, due);
    }
}

impl Drop for Renewer {
    fn drop(&mut self) {
        if let Err(error) = self.lifecycle.stop("lock renewal", Moment::now() + JOIN)
            && error.kind() != ErrorKind::Forked
        {
            log::warn!("a factory was dropped without a clean end: {error}");
        }
    }
}

impl fmt::Debug for Renewer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Renewer({:?})", self.lifecycle)
    }
}

fn run(rota: &Mutex<Rota>, bell: &Bell) {
    rota.lock().waker = Some(bell.waker());
    loop {
        let (due, until) = {
            let mut rota = rota.lock();
            // Nobody needs to ring while this thread is awake: it looks again before it sleeps.
            let now = Moment::now();
            rota.sleeps_until = now;
            let due = rota.pop(now);
            if due.is_none() {
                rota.sleeps_until = rota.next();
            }
            (due, rota.sleeps_until)
        };
        match due {
            Some((holding, others)) => {
                // A backend of the caller's own that panics costs its guard, not everybody's renewal.
                let tended = AssertUnwindSafe(|| holding.tend(rota, others));
                if catch_unwind(tended).is_err() {
                    log::error!("{}: renewal panicked", holding.place().mutex);
                    holding.loss().tell();
                }
            }
            None if bell.wait(until) == Ring::Stop => return,
            None => {}
        }
    }
}
