//! What a probe is told of permits, added up as `contend_permits_held` does: what this process holds.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::ground::{OPTIONS, acquired, addr_of, semaphores, through, want};
use crate::mysql_ground::{HANG, ms};
use contend::semaphore::{Liveness, Release, Semaphores};
use contend::{ErrorKind, Lease, Probe, memory};
use testbed::{Proxy, wait_until, within};

const PATIENCE: Duration = Duration::from_secs(60);

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
        let mut guard = here.guard(&want("guard", "a", 3), ms(0)).unwrap();
        acquired(here.acquire(&want("plain", "a", 2)).unwrap());
        assert_eq!(held.of("a"), 5);
        guard.release_part("a", 1).unwrap();
        assert_eq!(held.of("a"), 4);
        guard.release().unwrap();
        assert_eq!(held.of("a"), 2);
        assert_eq!(here.release("plain").unwrap(), Release::Released);
        assert_eq!(here.release("plain").unwrap(), Release::AlreadyReleased);
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

/// What this process acquired without a guard and finds gone, it holds no more.
#[test]
fn plain_permits_are_counted_until_their_end_is_known() {
    within(HANG, || {
        let (held, here, elsewhere) = stage("counted-plain");
        let request = want("swept", "a", 2).owner("dead");
        acquired(here.acquire(&request).unwrap());
        assert_eq!(here.sweep_dead(|_| Liveness::Dead).unwrap().len(), 1);
        assert_eq!(held.of("a"), 0, "swept");
        let request = want("elsewhere", "a", 2);
        acquired(here.acquire(&request).unwrap());
        elsewhere.release("elsewhere").unwrap();
        here.acquire(&request).unwrap();
        assert_eq!(held.of("a"), 0, "a replay finds them released");
        acquired(here.acquire(&want("twice", "a", 2)).unwrap());
        elsewhere.release("twice").unwrap();
        assert_eq!(here.release("twice").unwrap(), Release::AlreadyReleased);
        assert_eq!(held.of("a"), 0, "a release finds them released");
    });
}

/// It was counted twice.
#[test]
fn a_request_that_a_guard_takes_over_is_counted_once() {
    within(HANG, || {
        let (held, here, _) = stage("counted-once");
        let request = want("job", "a", 2);
        acquired(here.acquire(&request).unwrap());
        let guard = here.guard(&request, ms(0)).unwrap();
        assert_eq!(held.of("a"), 2);
        drop(guard);
        assert_eq!(held.of("a"), 0);
    });
}

/// Whoever gives a part back does not hold it any more, also while the server is away: it stayed counted for
/// the life of the process.
#[test]
fn a_part_that_is_given_back_later_is_not_counted() {
    within(HANG, || {
        let (held, here, elsewhere) = stage("counted-parts");
        let handle = memory::handle("counted-parts");
        let mut guard = here.guard(&want("job", "a", 3), ms(0)).unwrap();
        handle.set_unreachable(true);
        assert!(guard.release_part("a", 2).is_err());
        handle.set_unreachable(false);
        wait_until(PATIENCE, "it is given back", || {
            elsewhere.usage("a").unwrap().held == 1
        });
        assert_eq!(held.of("a"), 1);
        drop(guard);
        assert_eq!(held.of("a"), 0);
    });
}

/// Ending it subtracted what had never been added.
#[test]
fn what_a_call_in_doubt_was_granted_is_not_counted() {
    within(HANG, || {
        let (direct, url) = semaphores(&[("a", 1)]);
        let proxy = Proxy::to(addr_of(&url));
        let url = format!("{}?pool_size=1&{OPTIONS}", through(&url, proxy.addr()));
        let held = Arc::new(Held::default());
        let factory = contend::connect(&url).unwrap();
        let factory = factory.with_probe(Arc::clone(&held) as Arc<dyn Probe>);
        let client = factory.semaphores().unwrap();
        wait_until(PATIENCE, "it is connected", || client.usage("a").is_ok());
        proxy.refuse();
        proxy.lose_reply_to(b"INSERT INTO");
        client.acquire(&want("job", "a", 1)).unwrap_err();
        let in_use = || direct.usage("a").unwrap().held;
        wait_until(PATIENCE, "it is committed", || in_use() == 1);
        assert_eq!(held.of("a"), 0);
        proxy.pass();
        wait_until(PATIENCE, "it is released", || in_use() == 0);
        // Its end is told after the server's answer: the factory waits for that.
        drop((client, factory));
        assert_eq!(held.of("a"), 0);
    });
}
