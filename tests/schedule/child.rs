//! One process of a fleet: runs a schedule until its standard input is closed.

use std::io::Read;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use contend::Schedule;

use crate::journal;

pub const URL: &str = "CONTEND_TEST_URL";
pub const MUTEX: &str = "CONTEND_TEST_MUTEX";
pub const PERIOD_MS: &str = "CONTEND_TEST_PERIOD_MS";
pub const TAKES_MS: &str = "CONTEND_TEST_TAKES_MS";
pub const JOURNAL: &str = "CONTEND_TEST_JOURNAL";

/// Does nothing where it is one test among others.
#[test]
fn child() {
    let Ok(url) = std::env::var(URL) else {
        return;
    };
    let text = |name: &str| std::env::var(name).unwrap();
    let duration = |name: &str| Duration::from_millis(text(name).parse().unwrap());
    let path = PathBuf::from(text(JOURNAL));
    journal::log_to(&path);
    let takes = duration(TAKES_MS);
    let schedule = Schedule::every(duration(PERIOD_MS));
    let factory = contend::connect(&url).unwrap();
    let scheduler = factory
        .scheduler(text(MUTEX))
        .start(schedule, move |context| {
            journal::write_run(&path, context.fence());
            thread::sleep(takes);
        })
        .unwrap();
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
    scheduler.stop().unwrap();
}
