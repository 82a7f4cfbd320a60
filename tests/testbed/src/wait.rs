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

/// Waits until `condition` holds; the time up to a moment at which `does_not_count` is not counted.
///
/// # Panics
/// When it still does not hold `deadline` after that, with `what` was waited for.
#[track_caller]
pub(crate) fn wait_counted(
    deadline: Duration,
    what: &str,
    mut condition: impl FnMut() -> bool,
    mut does_not_count: impl FnMut() -> bool,
) {
    let look = deadline.min(Duration::from_secs(1));
    let mut counts_from = Instant::now();
    while !holds_within(look, &mut condition) {
        if does_not_count() {
            counts_from = Instant::now();
        }
        assert!(
            counts_from.elapsed() < deadline,
            "waited {deadline:?} in vain until {what}"
        );
    }
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

    const SHORT: Duration = Duration::from_millis(20);

    #[test]
    fn uncounted_time_prolongs_a_wait() {
        let start = Instant::now();
        let is_late = || start.elapsed() > 5 * SHORT;
        wait_counted(SHORT, "it is late", is_late, || !is_late());
        assert!(is_late());
    }

    #[test]
    #[should_panic(expected = "waited 20ms in vain until pigs fly")]
    fn uncounted_time_ends() {
        let mut looks = 0..3;
        wait_counted(SHORT, "pigs fly", || false, || looks.next().is_some());
    }
}
