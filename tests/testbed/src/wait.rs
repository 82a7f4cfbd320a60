//! Waiting for a condition.

use std::thread;
use std::time::{Duration, Instant};

/// Pause between two looks: short beside anything a test waits for, long beside the look itself.
const PAUSE: Duration = Duration::from_millis(5);

/// Waits until `condition` holds, and looks one last time when `deadline` has passed.
///
/// # Panics
/// When it still does not hold then, with `what` was waited for.
#[track_caller]
pub fn wait_until(deadline: Duration, what: &str, mut condition: impl FnMut() -> bool) {
    assert!(
        holds_within(deadline, &mut condition),
        "waited {deadline:?} in vain until {what}"
    );
}

/// Whether `condition` came to hold before `deadline` had passed.
pub(crate) fn holds_within(deadline: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    loop {
        let last = start.elapsed() >= deadline;
        if condition() {
            return true;
        }
        if last {
            return false;
        }
        thread::sleep(PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_returns_as_soon_as_the_condition_holds() {
        let mut looks = 0;
        wait_until(Duration::from_secs(60), "three looks were taken", || {
            looks += 1;
            looks == 3
        });
        assert_eq!(looks, 3);
    }

    #[test]
    #[should_panic(expected = "waited 20ms in vain until pigs fly")]
    fn it_says_what_it_waited_for() {
        wait_until(Duration::from_millis(20), "pigs fly", || false);
    }

    #[test]
    fn it_looks_at_least_once() {
        wait_until(Duration::ZERO, "now", || true);
    }
}
