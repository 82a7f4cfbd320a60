//! How often, and after which pause, something is tried again.

use std::thread;
use std::time::Duration;

/// Tries of one call, the first included.
pub(super) const MAX_TRIES: u32 = 3;

/// A short random pause, longer with every try: two that met in a deadlock must not meet again.
pub(super) fn pause(tries: u32) {
    let most = 5_000 * u64::from(tries.min(10));
    thread::sleep(Duration::from_micros(rand::random::<u64>() % most + 500));
}
