//! Dropping is stopping: no thread is left.

use std::time::{Duration, Instant};

use crate::conformance::{PATIENCE, next, started, wait_for_owner};
use crate::mysql_ground::{HANG, database};
use contend::EventKind;
use testbed::{wait_until, within};

alone! {
    fn a_dropped_factory_leaves_no_thread() {
        within(HANG, || {
            let url = database();
            let threads = || testbed::threads(std::process::id());
            let before = threads();
            for parameters in ["", "&wakeups=off"] {
                let factory = contend::connect(&format!("{url}?ttl=5s{parameters}")).unwrap();
                let (owner, events) = started(&factory, "m", "owner");
                next(&events, EventKind::Acquired);
                let waiters: Vec<_> = (0..5)
                    .map(|number| started(&factory, "m", &format!("waiter-{number}")))
                    .collect();
                for (waiter, _) in &waiters {
                    wait_for_owner(waiter, "owner");
                }
                let observer = factory.observe("m").build().unwrap();
                observer.start().unwrap();
                // Seven services and the thread that opens connections.
                assert!(threads() >= before + 8);
                let began = Instant::now();
                drop((observer, waiters, owner, factory));
                assert!(began.elapsed() < Duration::from_secs(15));
                wait_until(PATIENCE, "its threads have ended", || threads() <= before);
            }
            // One whose server never answered.
            drop(contend::connect("mysql://127.0.0.1:1/d").unwrap());
            wait_until(PATIENCE, "its threads have ended", || threads() <= before);
        });
    }
}
