//! What a probe is told of permits, added up as `contend_permits_held` does: what the guards of this process hold.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use crate::ground::{acquired, want};
use crate::mysql_ground::{HANG, ms};
use contend::semaphore::{Liveness, Release, Semaphores};
use contend::{ErrorKind, Lease, Probe, memory};
use testbed::within;

/// Adds up what it is told.
#[derive(Default)]
struct Held(Mutex<BTreeMap<String, i64>>);

impl Held {
    fn of(&self, semaphore: &str) -> i64 {
        self.0.lock().unwrap().get(semaphore).copied().unwrap_or(0)
    }
}

impl Probe for Held {
    fn permits(&self, semaphore: &str, count: i64) {
        *self.0.lock().unwrap().entry(semaphore.into()).or_default() += count;
    }
}

/// Semaphores on memory with a probe; the same without one, as another process would have them.
fn stage(name: &str) -> (Arc<Held>, Semaphores, Semaphores) {
    let held = Arc::new(Held::default());
    let factory = || memory::factory(name, Lease::default());
    let here = factory().with_probe(Arc::clone(&held) as Arc<dyn Probe>);
    let here = here.semaphores().unwrap();
    here.create("a", 10).unwrap();
    (held, here, factory().semaphores().unwrap())
}

#[test]
fn permits_are_counted_from_the_grant_to_their_end() {
    within(HANG, || {
        let (held, here, _) = stage("counted");
        let guard = here.guard(&want("guard", "a", 3), ms(0)).unwrap();
        acquired(here.acquire(&want("plain", "a", 2)).unwrap());
        assert_eq!(held.of("a"), 3, "guards only");
        guard.release().unwrap();
        assert_eq!(here.release("plain").unwrap(), Release::Released);
        assert_eq!(held.of("a"), 0);
    });
}

/// It stayed counted for the life of the process.
#[test]
fn a_lost_guard_is_counted_until_it_ends() {
    within(HANG, || {
        let (held, here, elsewhere) = stage("counted-lost");
        let guard = here.guard(&want("job", "a", 3), ms(0)).unwrap();
        assert_eq!(elsewhere.release("job").unwrap(), Release::Released);
        assert_eq!(guard.release().unwrap_err().kind(), ErrorKind::Lost);
        assert_eq!(held.of("a"), 0);
        let guard = here.guard(&want("other", "a", 3), ms(0)).unwrap();
        assert_eq!(here.release("other").unwrap(), Release::Released);
        drop(guard);
        assert_eq!(held.of("a"), 0);
    });
}

/// The sum fell below zero.
#[test]
fn what_others_hold_is_not_subtracted() {
    within(HANG, || {
        let (held, here, elsewhere) = stage("counted-others");
        acquired(elsewhere.acquire(&want("released", "a", 1)).unwrap());
        acquired(
            elsewhere
                .acquire(&want("swept", "a", 1).owner("dead"))
                .unwrap(),
        );
        assert_eq!(here.release("released").unwrap(), Release::Released);
        assert_eq!(held.of("a"), 0, "released");
        assert_eq!(here.sweep_dead(|_| Liveness::Dead).unwrap().len(), 1);
        assert_eq!(held.of("a"), 0, "swept");
    });
}
