//! Guards: what they say is so.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Instant;

use crate::ground::{
    HOUR, PATIENCE, SHORT, acquired, already_acquired, connect, everywhere, exhausted, want,
};
use crate::mysql_ground::{HANG, ms};
use contend::semaphore::{Acquisition, Liveness, Release};
use contend::{ErrorKind, Lease, Probe, memory};
use testbed::{wait_until, within};

#[test]
fn guard_renews_and_releases_on_drop() {
    everywhere(&[("a", 1)], |here, elsewhere| {
        let request = want("job", "a", 1).ttl(SHORT);
        let guard = here.guard(&request, ms(0)).unwrap();
        assert_eq!(guard.fence("a"), Some(guard.permits()[0].fence));
        let start = Instant::now();
        while start.elapsed() < SHORT * 2 {
            assert_eq!(elsewhere.sweep_expired().unwrap(), []);
            assert!(guard.is_valid());
            thread::sleep(ms(100));
        }
        drop(guard);
        assert_eq!(here.usage("a").unwrap().held, 0);
        let error = here.guard(&request, ms(0)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Conflict);
    });
}

/// The new guard has new permits with higher fences and its own ttl, and the count does not change. The one before
/// learns of it, and can end nothing.
#[test]
fn taken_over_request_changes_guards() {
    everywhere(&[("a", 3), ("b", 1)], |here, elsewhere| {
        let request = want("job", "a", 2).permits("b", 1);
        let short = request.clone().ttl(SHORT);
        let plain = acquired(here.acquire(&short).unwrap())[0].fence;
        let old = here.guard(&short, ms(0)).unwrap();
        assert!(old.fence("a").unwrap() > plain);
        let lost = [old.lost(), old.lost()];

        let long = request.ttl(HOUR);
        let new = elsewhere.guard(&long, ms(0)).unwrap();
        assert!(new.fence("a") > old.fence("a"));
        assert!(new.valid_for() > HOUR / 2 && new.valid_for() <= HOUR);
        let status = here.status("job").unwrap().unwrap();
        assert_eq!(status.ttl, Some(HOUR));
        for lost in lost {
            assert!(lost.recv_timeout(PATIENCE).is_err(), "no message");
        }
        assert!(!old.is_valid());
        assert_eq!(old.release().unwrap_err().kind(), ErrorKind::Lost);
        assert_eq!(here.usage("a").unwrap().held, 2, "the other one's");

        let error = elsewhere.guard(&long, ms(0)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::DuplicateContender, "{error}");
        let replay = already_acquired(here.acquire(&long).unwrap());
        assert_eq!(replay, new.permits());
        new.release().unwrap();
        assert_eq!(here.usage("a").unwrap().held, 0);
        assert_eq!(here.check().unwrap(), []);
    });
}

#[test]
fn guard_learns_of_a_release_elsewhere() {
    everywhere(&[("a", 1)], |here, elsewhere| {
        let guard = here.guard(&want("job", "a", 1).ttl(SHORT), ms(0)).unwrap();
        elsewhere.release("job").unwrap();
        wait_until(PATIENCE, "the guard knows", || !guard.is_valid());
        assert_eq!(guard.release().unwrap_err().kind(), ErrorKind::Lost);
    });
}

#[test]
fn release_and_sweep_end_guards() {
    everywhere(&[("a", 3)], |here, _| {
        let guard = |id: &str, owner: &str| {
            let request = want(id, "a", 1).owner(owner).ttl(HOUR);
            here.guard(&request, ms(0)).unwrap()
        };
        let (released, swept) = (guard("released", "x"), guard("swept", "dead"));
        assert_eq!(here.release("released").unwrap(), Release::Released);
        assert!(!released.is_valid() && swept.is_valid());
        let mut after = None;
        let found = here.sweep_dead(|owner| {
            // What is acquired after the question is left alone.
            after.get_or_insert_with(|| guard("after", "dead"));
            match owner {
                "dead" => Liveness::Dead,
                _ => Liveness::Alive,
            }
        });
        assert_eq!(found.unwrap().len(), 1);
        assert!(!swept.is_valid() && after.unwrap().is_valid());
        for guard in [released, swept] {
            assert!(guard.lost().recv_timeout(ms(0)).is_err());
            assert_eq!(guard.release().unwrap_err().kind(), ErrorKind::Lost);
        }
    });
}

#[test]
fn guard_without_a_ttl_has_thirty_seconds() {
    within(HANG, || {
        for place in crate::ground::PLACES {
            let url = place();
            let semaphores = contend::connect(&url).unwrap().semaphores().unwrap();
            semaphores.create("a", 1).unwrap();
            let guard = semaphores.guard(&want("job", "a", 1), ms(0)).unwrap();
            assert!(guard.valid_for() > ms(20_000) && guard.valid_for() <= ms(30_000));
            let status = connect(&url).status("job").unwrap().unwrap();
            assert_eq!(status.ttl, Some(ms(30_000)));
            let tiny = want("x", "a", 1).ttl(ms(50));
            let error = semaphores.guard(&tiny, ms(0)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput);
            assert!(error.to_string().contains("at least"), "{error}");
        }
    });
}

#[test]
fn holders_are_listed() {
    everywhere(&[("a", 4), ("b", 1)], |here, elsewhere| {
        let request = want("job", "a", 3).owner("me").ttl(SHORT);
        let guard = here.guard(&request, ms(0)).unwrap();
        thread::sleep(SHORT / 2); // a renewal is not a grant
        let holders = elsewhere.holders("a").unwrap();
        assert_eq!(holders.len(), 1);
        assert_eq!((&*holders[0].external_id, holders[0].count), ("job", 3));
        assert_eq!(holders[0].owner.as_deref(), Some("me"));
        assert_eq!(Some(holders[0].fence), guard.fence("a"));
        assert!(holders[0].expires_in.unwrap() <= SHORT);
        assert!(holders[0].held_for >= SHORT / 2 - ms(50));
        assert_eq!(elsewhere.holders("b").unwrap(), []);
        let error = elsewhere.holders("c").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        guard.release().unwrap();
        assert_eq!(elsewhere.holders("a").unwrap(), []);
    });
}

/// A replay of what has expired says so.
#[test]
fn replay_after_the_ttl_is_lost() {
    everywhere(&[("a", 1)], |here, _| {
        let request = want("job", "a", 1).ttl(SHORT);
        acquired(here.acquire(&request).unwrap());
        wait_until(PATIENCE, "it has expired", || {
            match &here.acquire(&request).unwrap() {
                Acquisition::AlreadyAcquired { expires_in, .. } => *expires_in == Some(ms(0)),
                other => panic!("{other:?}"),
            }
        });
        let error = here.acquire(&request).unwrap().into_permits().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Lost);
    });
}

/// A test of a caller's code can make memory lose permits, as a server that cannot be reached does.
#[test]
fn memory_can_lose_permits() {
    within(HANG, || {
        let factory = memory::factory("losing-permits", Lease::default());
        let semaphores = factory.semaphores().unwrap();
        semaphores.create("a", 1).unwrap();
        let guard = semaphores.guard(&want("job", "a", 1).ttl(ms(300)), ms(0));
        let guard = guard.unwrap();
        let handle = memory::handle("losing-permits");
        handle.set_unreachable(true);
        assert!(guard.lost().recv_timeout(PATIENCE).is_err());
        let error = semaphores.usage("a").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unreachable);
        handle.set_unreachable(false);
        assert_eq!(guard.release().unwrap_err().kind(), ErrorKind::Lost);
        wait_until(PATIENCE, "it heals by itself", || {
            let answer = semaphores.acquire(&want("next", "a", 1)).unwrap();
            matches!(answer, Acquisition::Acquired(_))
        });
        exhausted(semaphores.acquire(&want("third", "a", 1)).unwrap());
    });
}

#[test]
fn backends_without_semaphores_say_so() {
    let factory = contend::connect("zk://localhost:2181").unwrap();
    let error = factory.semaphores().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    assert!(error.to_string().contains("mysql://"), "{error}");
}

/// Adds up what it is told, as `contend_permits_held` does.
#[derive(Default)]
struct Held(Mutex<BTreeMap<String, i64>>);

impl Probe for Held {
    fn permits(&self, semaphore: &str, count: i64) {
        *self.0.lock().unwrap().entry(semaphore.into()).or_default() += count;
    }
}

#[test]
fn guards_permits_are_counted() {
    within(HANG, || {
        let probe = Arc::new(Held::default());
        let factory = || memory::factory("counted", Lease::default());
        let here = factory().with_probe(Arc::clone(&probe) as Arc<dyn Probe>);
        let (here, elsewhere) = (here.semaphores().unwrap(), factory().semaphores().unwrap());
        here.create("a", 10).unwrap();
        let held = || probe.0.lock().unwrap().get("a").copied();
        let guard = here.guard(&want("guard", "a", 3), ms(0)).unwrap();
        acquired(here.acquire(&want("plain", "a", 2)).unwrap());
        assert_eq!(held(), Some(3), "guards only");
        guard.release().unwrap();
        assert_eq!(here.release("plain").unwrap(), Release::Released);
        assert_eq!(held(), Some(0));
        // One that is lost counts until it ends.
        let guard = here.guard(&want("lost", "a", 3), ms(0)).unwrap();
        assert_eq!(elsewhere.release("lost").unwrap(), Release::Released);
        assert_eq!(held(), Some(3));
        assert_eq!(guard.release().unwrap_err().kind(), ErrorKind::Lost);
        assert_eq!(held(), Some(0));
    });
}
