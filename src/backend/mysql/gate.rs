//! How many of those who wait may use connections at once, so that owners always find one.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

/// A counting gate in front of a pool.
#[derive(Debug)]
pub(super) struct Gate {
    free: Mutex<usize>,
    freed: Condvar,
}

/// A place inside, given back when dropped.
#[derive(Debug)]
pub(super) struct Pass {
    gate: Arc<Gate>,
}

impl Gate {
    /// The gate of a pool of `size` connections: a quarter of them, and at least one, is kept for
    /// owners. A pool of one connection has none to keep: there everybody shares it.
    pub(super) fn for_pool(size: u32) -> Arc<Gate> {
        let size = usize::try_from(size).unwrap_or(usize::MAX).max(1);
        let kept = size.div_ceil(4).min(size - 1);
        Arc::new(Gate {
            free: Mutex::new(size - kept),
            freed: Condvar::new(),
        })
    }

    /// Goes in within `limit`, or not at all.
    pub(super) fn enter(self: &Arc<Gate>, limit: Duration) -> Option<Pass> {
        let mut free = self.free.lock();
        // Looked at again after a wait that ended late: whoever was notified must take the place.
        self.freed
            .wait_while_for(&mut free, |free| *free == 0, limit);
        *free = free.checked_sub(1)?;
        Some(Pass {
            gate: Arc::clone(self),
        })
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        *self.gate.free.lock() += 1;
        self.gate.freed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quarter_of_the_connections_but_at_least_one_is_kept_for_owners() {
        for (size, inside) in [(1, 1), (2, 1), (3, 2), (4, 3), (5, 3), (8, 6), (100, 75)] {
            let gate = Gate::for_pool(size);
            let passes: Vec<Pass> = std::iter::from_fn(|| gate.enter(Duration::ZERO)).collect();
            assert_eq!(passes.len(), inside, "of {size}");
            drop(passes);
            assert!(gate.enter(Duration::ZERO).is_some());
        }
    }

    #[test]
    fn whoever_waits_goes_in_when_another_leaves() {
        let gate = Gate::for_pool(1);
        let pass = gate.enter(Duration::ZERO);
        let waits = {
            let gate = Arc::clone(&gate);
            std::thread::spawn(move || gate.enter(Duration::from_secs(30)).is_some())
        };
        drop(pass);
        assert!(waits.join().unwrap());
    }
}
