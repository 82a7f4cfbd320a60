//! Permits that are not given back, rows that are not needed any more, and maintenance.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use crate::ground::{
    HOUR, PATIENCE, PLACES, SHORT, acquired, connect, everywhere, exhausted, ids, want,
};
use crate::mysql_ground::{HANG, ms};
use contend::semaphore::{Acquisition, Liveness, PermitRenewal, Reason, Release, Usage};
use testbed::{wait_until, within};

/// Part 6 of the seed: expiry, liveness and staleness.
#[test]
fn each_sweep_says_why() {
    everywhere(&[("a", 10), ("b", 10)], |here, elsewhere| {
        for (id, owner, ttl) in [
            ("expired", "x", SHORT),
            ("dead", "gone", HOUR),
            ("alive", "here", HOUR),
            ("asked", "who", HOUR),
        ] {
            let request = want(id, "a", 1).permits("b", 2).owner(owner).ttl(ttl);
            acquired(here.acquire(&request).unwrap());
        }
        acquired(here.acquire(&want("endless", "a", 1)).unwrap());

        let mut swept = Vec::new();
        wait_until(PATIENCE, "it has expired", || {
            swept = elsewhere.sweep_expired().unwrap();
            !swept.is_empty()
        });
        assert_eq!(swept[0].reason, Reason::Expired);
        assert_eq!(swept[0].owner.as_deref(), Some("x"));
        let counts: Vec<u32> = swept[0].permits.iter().map(|it| it.count).collect();
        assert_eq!(counts, [1, 2]);
        assert_eq!(ids(swept), ["expired"]);

        let asked = Mutex::new(Vec::new());
        let swept = here.sweep_dead(|owner| {
            asked.lock().unwrap().push(owner.to_owned());
            match owner {
                "gone" => Liveness::Dead,
                "here" => Liveness::Alive,
                // A check that panics counts as unknown.
                _ => std::panic::resume_unwind(Box::new(())),
            }
        });
        let swept = swept.unwrap();
        assert_eq!(swept[0].reason, Reason::OwnerDead);
        assert_eq!(ids(swept), ["dead"]);
        let mut asked = asked.into_inner().unwrap();
        asked.sort();
        assert_eq!(asked, ["gone", "here", "who"]);

        // A holder may believe in a permit until its ttl ends, however long ago it was renewed.
        assert_eq!(here.sweep_stale(HOUR).unwrap(), []);
        let swept = here.sweep_stale(SHORT).unwrap();
        assert_eq!(swept[0].reason, Reason::Stale);
        assert_eq!(ids(swept), ["endless"]);

        let held = |name| here.usage(name).unwrap().held;
        assert_eq!((held("a"), held("b")), (2, 4));
        assert_eq!(here.check().unwrap(), []);
        assert_eq!(here.release("dead").unwrap(), Release::AlreadyReleased);
        let renewed = here.renew("endless").unwrap();
        assert_eq!(renewed, PermitRenewal::AlreadyReleased);
    });
}

/// A client crashes; its permits come back by a sweep, or to the request that needs them.
#[test]
fn crashed_clients_permits_come_back() {
    everywhere(&[("a", 1)], |here, crashed| {
        acquired(crashed.acquire(&want("job", "a", 1).ttl(SHORT)).unwrap());
        drop(crashed);
        exhausted(here.acquire(&want("next", "a", 1)).unwrap());
        wait_until(PATIENCE, "a sweep finds it", || {
            ids(here.sweep_expired().unwrap()) == ["job"]
        });
        let stale = acquired(here.acquire(&want("stale", "a", 1).ttl(SHORT)).unwrap());
        let mut fresh = Vec::new();
        wait_until(PATIENCE, "an acquire takes it back", || {
            let answer = here.acquire(&want("last", "a", 1)).unwrap();
            if let Acquisition::Acquired(permits) = answer {
                fresh = permits;
            }
            !fresh.is_empty()
        });
        // The fence tells the resource which of the two is late.
        assert!(stale[0].fence < fresh[0].fence);
    });
}

#[test]
fn expired_permit_can_be_renewed() {
    everywhere(&[("a", 10), ("b", 10)], |here, elsewhere| {
        let soon = want("soon", "a", 2).permits("b", 1).ttl(SHORT);
        acquired(here.acquire(&soon).unwrap());
        acquired(here.acquire(&want("later", "a", 3).ttl(HOUR)).unwrap());
        acquired(here.acquire(&want("never", "a", 1)).unwrap());
        let usage = here.usage("a").unwrap();
        assert_eq!((usage.held, usage.expired), (6, 0));
        wait_until(PATIENCE, "it has expired", || {
            here.usage("a").unwrap().expired > 0
        });
        let told = |it: &Usage| (it.held, it.expired, it.free, it.requests);
        let usage: Vec<_> = here.list().unwrap().iter().map(told).collect();
        assert_eq!(usage, [(6, 2, 4, 3), (1, 1, 9, 1)]);
        // It is its holder's still, and comes back by a renewal.
        let status = || elsewhere.status("soon").unwrap().unwrap();
        assert_eq!((status().held, status().expires_in), (true, Some(ms(0))));
        assert_eq!(here.renew("soon").unwrap(), PermitRenewal::Renewed);
        assert_eq!(here.sweep_expired().unwrap(), []);
        assert!(status().expires_in > Some(SHORT / 2));
        wait_until(PATIENCE, "it has expired again", || {
            here.usage("a").unwrap().expired > 0
        });
        acquired(elsewhere.acquire(&want("wide", "a", 6)).unwrap());
        let usage: Vec<_> = here.list().unwrap().iter().map(told).collect();
        assert_eq!(usage, [(10, 0, 0, 3), (0, 0, 10, 0)]);
    });
}

#[test]
fn old_requests_are_deleted_in_batches() {
    everywhere(&[("a", 100)], |here, _| {
        for number in 0..25 {
            let id = number.to_string();
            acquired(here.acquire(&want(&id, "a", 2)).unwrap());
            here.release(&id).unwrap();
        }
        acquired(here.acquire(&want("held", "a", 5)).unwrap());
        assert_eq!(here.delete_requests(HOUR, 10).unwrap(), 0);
        thread::sleep(ms(10)); // an age is the subject
        assert_eq!(here.delete_requests(ms(1), 10).unwrap(), 25);
        assert_eq!(here.status("7").unwrap(), None);
        assert_eq!(here.status("held").unwrap().unwrap().permits.len(), 1);
        assert_eq!(here.check().unwrap(), []);
        // The external id is forgotten, and good again.
        acquired(here.acquire(&want("7", "a", 2)).unwrap());
        assert!(here.delete_requests(HOUR, 0).is_err());
    });
}

#[test]
fn maintenance_is_done_by_the_leader() {
    within(HANG, || {
        for place in PLACES {
            let url = place();
            let semaphores = connect(&url);
            semaphores.create("a", 10).unwrap();
            // Long enough to lead through a busy moment; dropping it hands it over at once.
            let url = match url.starts_with("mysql") {
                true => format!("{url}?ttl=20s&transition=1s&create_table=true"),
                false => url,
            };
            let factory = contend::connect(&url).unwrap();
            let asked = [Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0))];
            let mut both: Vec<_> = asked
                .iter()
                .map(|asked| {
                    let asked = Arc::clone(asked);
                    let maintenance = semaphores.maintenance().orphan_interval(ms(50));
                    let maintenance = maintenance.request_age(ms(1)).liveness(move |_| {
                        asked.fetch_add(1, Ordering::SeqCst);
                        Liveness::Alive
                    });
                    maintenance.start(&factory).unwrap()
                })
                .collect();
            acquired(semaphores.acquire(&want("1", "a", 1).owner("me")).unwrap());
            acquired(semaphores.acquire(&want("2", "a", 1).ttl(SHORT)).unwrap());
            wait_until(PATIENCE, "the leader sweeps", || {
                semaphores.usage("a").unwrap().held == 1
            });
            let counts = || asked.each_ref().map(|asked| asked.load(Ordering::SeqCst));
            wait_until(PATIENCE, "the leader asks again and again", || {
                counts().into_iter().max() > Some(3)
            });
            let leader = both.iter().position(|it| it.is_leader()).unwrap();
            assert_eq!(counts()[1 - leader], 0, "the other one does nothing");
            // The next leader may be there at once, and an age is its subject.
            thread::sleep(ms(50));
            drop(both.remove(leader));
            let others = counts();
            wait_until(PATIENCE, "the other one takes over", || {
                counts()[1 - leader] > others[1 - leader] + 2
            });
            assert_eq!(counts()[leader], others[leader]);
            // A new leader does everything once.
            assert_eq!(semaphores.status("2").unwrap(), None);
            drop(both);
            let never = semaphores.maintenance().orphan_interval(Duration::ZERO);
            let error = never.start(&factory).unwrap_err();
            assert_eq!(error.kind(), contend::ErrorKind::InvalidInput, "{error}");
        }
    });
}

/// More than one transaction or script takes back.
#[test]
fn all_expired_permits_are_taken_back() {
    everywhere(&[("a", 350)], |here, elsewhere| {
        for swept in [true, false] {
            thread::scope(|scope| {
                for thread in 0..7 {
                    let here = &here;
                    scope.spawn(move || {
                        for round in 0..50 {
                            let id = format!("{swept}-{thread}-{round}");
                            acquired(here.acquire(&want(&id, "a", 1).ttl(SHORT)).unwrap());
                        }
                    });
                }
            });
            wait_until(PATIENCE, "all has expired", || {
                here.usage("a").unwrap().expired == 350
            });
            if swept {
                assert_eq!(elsewhere.sweep_expired().unwrap().len(), 350);
            }
            let all = format!("{swept}-all");
            acquired(elsewhere.acquire(&want(&all, "a", 350)).unwrap());
            elsewhere.release(&all).unwrap();
            assert_eq!(here.check().unwrap(), []);
        }
    });
}
