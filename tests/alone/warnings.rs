//! What is logged: a process has one logger.

use std::thread;
use std::time::Duration;

use contend::{ErrorKind, Lease};
use parking_lot::Mutex;
use testbed::wait_until;

use crate::conformance::hooked::as_another_process;
use crate::conformance::{PATIENCE, closed, elsewhere};

static WARNINGS: Mutex<Vec<String>> = Mutex::new(Vec::new());

struct Warnings;

impl log::Log for Warnings {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        metadata.level() <= log::Level::Warn
    }

    fn log(&self, record: &log::Record<'_>) {
        if self.enabled(record.metadata()) {
            WARNINGS.lock().push(record.args().to_string());
        }
    }

    fn flush(&self) {}
}

alone! {
    /// Where no renewal came to notice it, a lock that was taken away under its own id was lost without a word.
    fn a_lock_that_was_taken_away_under_its_own_id_is_warned_of() {
        log::set_logger(&Warnings).unwrap();
        log::set_max_level(log::LevelFilter::Warn);
        let here = contend::memory::factory("warnings", Lease::default());
        let there = as_another_process(&here);
        let ours = here.locker("m").id("host-1").build().unwrap();
        let theirs = there.locker("m").id("host-1").build().unwrap();
        let guard = ours.lock().unwrap();
        let fence = guard.fence();
        let _taken = elsewhere(|| theirs.lock().unwrap());
        assert_eq!(guard.unlock().unwrap_err().kind(), ErrorKind::Lost);
        let warnings = WARNINGS.lock();
        let told = format!("m: host-1: fence {fence} was taken away before it was released");
        let told = warnings.iter().filter(|line| line.starts_with(&told));
        assert_eq!(told.count(), 1, "{warnings:?}");
    }

    /// Rule "one id, one contender": it was told when the guard ended, hours later maybe, and not when it was met.
    fn a_locker_that_meets_its_double_says_so_while_its_guard_lives() {
        log::set_logger(&Warnings).unwrap();
        log::set_max_level(log::LevelFilter::Warn);
        let lease = Lease::new(Duration::from_secs(2), Duration::from_secs(1)).unwrap();
        let here = contend::memory::factory("doubles", lease);
        let there = as_another_process(&here);
        let ours = here.locker("m").id("host-1").build().unwrap();
        let theirs = there.locker("m").id("host-1").build().unwrap();
        let guard = ours.lock().unwrap();
        // Later than a repeated request of our own could be.
        thread::sleep(lease.call_budget() + Duration::from_millis(50));
        let _taken = elsewhere(|| theirs.lock().unwrap());
        closed(&guard.lost());
        let told = "m: another process contends as \"host-1\" too";
        wait_until(PATIENCE, "it is told", || {
            WARNINGS.lock().iter().any(|line| line.starts_with(told))
        });
        drop(guard);
    }
}
