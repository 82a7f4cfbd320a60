//! What is granted, what is refused, and what is given back.

use std::sync::Barrier;
use std::thread;
use std::time::Instant;

use crate::ground::{HOUR, acquired, already_acquired, everywhere, exhausted, want};
use crate::mysql_ground::ms;
use contend::ErrorKind;
use contend::semaphore::{Acquisition, PermitRenewal, PermitRequest, Release};

#[test]
fn permit_is_taken_shown_and_given_back() {
    everywhere(&[("backup", 2)], |here, _| {
        let permits = acquired(here.acquire(&want("job-1", "backup", 1)).unwrap());
        assert_eq!(permits.len(), 1);
        assert_eq!((&*permits[0].semaphore, permits[0].count), ("backup", 1));
        let usage = here.usage("backup").unwrap();
        assert_eq!((usage.capacity, usage.held), (2, 1));
        assert_eq!((usage.free, usage.requests), (1, 1));
        assert_eq!(here.release("job-1").unwrap(), Release::Released);
        assert_eq!(here.release("job-1").unwrap(), Release::AlreadyReleased);
        assert_eq!(here.release("none").unwrap(), Release::Unknown);
        assert_eq!(here.usage("backup").unwrap().held, 0);
        let used_up = here.acquire(&want("job-1", "backup", 1)).unwrap();
        assert_eq!(used_up, Acquisition::AlreadyReleased);
    });
}

#[test]
fn exhausted_request_takes_nothing() {
    everywhere(&[("a", 5), ("b", 2), ("c", 5)], |here, _| {
        acquired(here.acquire(&want("one", "b", 2)).unwrap());
        let request = want("two", "c", 1).permits("b", 1).permits("a", 3);
        let found = exhausted(here.acquire(&request).unwrap());
        assert_eq!(
            found.to_string(),
            "the semaphore \"b\" is exhausted: 2 of 2 permits are held, 1 wanted"
        );
        assert_eq!((found.capacity, found.held, found.wanted), (2, 2, 1));
        let held: Vec<u64> = here.list().unwrap().iter().map(|it| it.held).collect();
        assert_eq!(held, [0, 2, 0]);
        // The external id is not used up.
        here.release("one").unwrap();
        let permits = acquired(here.acquire(&request).unwrap());
        let names: Vec<&str> = permits.iter().map(|it| &*it.semaphore).collect();
        assert_eq!(names, ["a", "b", "c"]);
    });
}

#[test]
fn same_id_gets_the_same_permits() {
    everywhere(&[("a", 1), ("b", 3)], |here, elsewhere| {
        let request = want("job", "a", 1).owner("me");
        let permits = acquired(here.acquire(&request).unwrap());
        // The semaphore is full; that is not the answer.
        for again in [&here, &elsewhere] {
            let told = already_acquired(again.acquire(&request).unwrap());
            assert_eq!(told, permits);
        }
        for other in [
            want("job", "a", 1),
            want("job", "b", 1).owner("me"),
            want("job", "a", 1).owner("me").permits("b", 1),
        ] {
            let error = here.acquire(&other).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Conflict, "{error}");
            assert!(error.to_string().contains("1 of \"a\""), "{error}");
        }
        assert_eq!(here.usage("a").unwrap().requests, 1);
        assert_eq!(elsewhere.release("job").unwrap(), Release::Released);
        assert_eq!(here.release("job").unwrap(), Release::AlreadyReleased);
    });
}

#[test]
fn names_and_ids_are_compared_exactly() {
    let odd = "'; DROP TABLE permit; --";
    everywhere(&[("Lock", 1), ("lock", 1), (odd, 1)], |here, _| {
        acquired(here.acquire(&want("Id", "Lock", 1)).unwrap());
        acquired(here.acquire(&want("id", "lock", 1)).unwrap());
        let id = "x' OR '1'='1\\";
        acquired(here.acquire(&want(id, odd, 1).owner("{\"ü\"}")).unwrap());
        assert_eq!(here.release(id).unwrap(), Release::Released);
        let status = here.status(id).unwrap().unwrap();
        assert!(!status.held);
        assert_eq!(status.owner.as_deref(), Some("{\"ü\"}"));
        assert_eq!(here.usage("Lock").unwrap().held, 1);
    });
}

#[test]
fn invalid_request_writes_nothing() {
    everywhere(&[("a", 2)], |here, _| {
        for request in [
            want("id", "a", 0),
            PermitRequest::generated().permits("a", 1),
        ] {
            let error = here.acquire(&request).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
        }
        let error = here.acquire(&want("id", "none", 1)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert!(error.to_string().contains("\"none\""), "{error}");
        assert!(here.create("", 1).is_err() && here.create("b", u32::MAX).is_err());
        assert_eq!(here.status("id").unwrap(), None);
        assert_eq!(here.list().unwrap().len(), 1);
        assert_eq!(here.usage("a").unwrap().held, 0);
    });
}

#[test]
fn lowered_capacity_waits_for_releases() {
    everywhere(&[("a", 3)], |here, _| {
        for id in ["1", "2", "3"] {
            acquired(here.acquire(&want(id, "a", 1)).unwrap());
        }
        assert_eq!(here.set_capacity("a", 1, Some("ops")).unwrap(), 3);
        let usage = here.usage("a").unwrap();
        assert_eq!((usage.capacity, usage.held, usage.free), (1, 3, 0));
        here.release("1").unwrap();
        here.release("2").unwrap();
        let short = exhausted(here.acquire(&want("4", "a", 1)).unwrap());
        assert_eq!(short.held, 1);
        here.release("3").unwrap();
        acquired(here.acquire(&want("4", "a", 1)).unwrap());

        assert_eq!(here.set_capacity("a", 1, None).unwrap(), 1);
        here.set_capacity("a", 2, None).unwrap();
        let history = here.history("a").unwrap();
        let changes: Vec<_> = history
            .iter()
            .map(|change| (change.changed_by.as_deref(), change.from, change.to))
            .collect();
        assert_eq!(changes, [(Some("ops"), 3, 1), (None, 1, 2)]);
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let now = now.unwrap().as_millis() as u64;
        for change in &history {
            assert!(change.changed_at.abs_diff(now) < 60_000, "{change:?}");
        }
        let error = here.set_capacity("none", 1, None).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert!(!here.create("a", 9).unwrap());
        assert_eq!(here.usage("a").unwrap().capacity, 2);
        assert_eq!(here.delete_history(HOUR, 10).unwrap(), 0);
        thread::sleep(ms(10)); // an age is the subject
        assert_eq!(here.delete_history(ms(1), 1).unwrap(), 2);
        assert_eq!(here.history("a").unwrap(), []);
    });
}

#[test]
fn semaphore_in_use_is_not_deleted() {
    everywhere(&[("a", 1)], |here, _| {
        let first = acquired(here.acquire(&want("1", "a", 1)).unwrap())[0].fence;
        let error = here.delete("a").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidState);
        here.release("1").unwrap();
        assert!(here.delete("a").unwrap() && !here.delete("a").unwrap());
        let error = here.acquire(&want("2", "a", 1)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        here.create("a", 1).unwrap();
        let second = acquired(here.acquire(&want("2", "a", 1)).unwrap())[0].fence;
        assert!(second > first);
    });
}

#[test]
fn renewal_restarts_the_ttl() {
    everywhere(&[("a", 1)], |here, _| {
        let request = want("job", "a", 1).ttl(HOUR).owner("me");
        acquired(here.acquire(&request).unwrap());
        let left = || here.status("job").unwrap().unwrap().expires_in.unwrap();
        thread::sleep(ms(50)); // what has passed of the ttl is the subject
        let before = left();
        assert!(before <= HOUR - ms(50) && before > HOUR / 2, "{before:?}");
        let renewing = Instant::now();
        assert_eq!(here.renew("job").unwrap(), PermitRenewal::Renewed);
        // As much is left as there was at first, but for the time since; a clock may count whole milliseconds.
        let after = left();
        assert!(after + renewing.elapsed() + ms(5) >= HOUR, "{after:?}");
        assert_eq!(here.status("job").unwrap().unwrap().ttl, Some(HOUR));
        here.release("job").unwrap();
        let renewed = here.renew("job").unwrap();
        assert_eq!(renewed, PermitRenewal::AlreadyReleased);
        assert_eq!(here.renew("none").unwrap(), PermitRenewal::Unknown);
        assert_eq!(here.status("none").unwrap(), None);
    });
}

/// The seed's part 7: requests of one process share transactions, and each permit goes to one of them.
#[test]
fn combined_requests_fill_the_capacity_exactly() {
    everywhere(&[("a", 20)], |here, elsewhere| {
        let (here, elsewhere, start) = (&here, &elsewhere, &Barrier::new(32));
        let granted: Vec<String> = thread::scope(|scope| {
            let ask = |thread: usize| {
                let from = [here, elsewhere][thread % 4 / 3];
                start.wait();
                let ids = (0..4).map(|round| format!("{thread}-{round}"));
                ids.filter(|id| match from.acquire(&want(id, "a", 1)).unwrap() {
                    Acquisition::Acquired(_) => true,
                    other => exhausted(other).held != 20,
                })
                .collect::<Vec<_>>()
            };
            let threads: Vec<_> = (0..32).map(|it| scope.spawn(move || ask(it))).collect();
            let all = threads.into_iter().map(|it| it.join().unwrap());
            all.flatten().collect()
        });
        assert_eq!(granted.len(), 20);
        assert_eq!(elsewhere.usage("a").unwrap().requests, 20);
        assert_eq!(here.check().unwrap(), []);
        thread::scope(|scope| {
            for id in &granted {
                scope.spawn(move || {
                    assert_eq!(here.release(id).unwrap(), Release::Released);
                });
            }
        });
        assert_eq!(here.usage("a").unwrap().held, 0);
        assert_eq!(here.check().unwrap(), []);
    });
}

/// Calls under one external id are one after the other, and one of them is granted it.
#[test]
fn calls_with_one_id_get_one_grant() {
    everywhere(&[("a", 8)], |here, _| {
        let answers: Vec<Acquisition> = thread::scope(|scope| {
            let here = &here;
            let calls: Vec<_> = (0..8)
                .map(|_| scope.spawn(move || here.acquire(&want("job", "a", 1)).unwrap()))
                .collect();
            calls.into_iter().map(|it| it.join().unwrap()).collect()
        });
        let first = |it: &&Acquisition| matches!(it, Acquisition::Acquired(_));
        assert_eq!(answers.iter().filter(first).count(), 1, "{answers:?}");
        let mut fences: Vec<u64> = answers
            .into_iter()
            .map(|it| it.into_permits().unwrap()[0].fence)
            .collect();
        fences.dedup();
        assert_eq!(fences.len(), 1, "{fences:?}");
        assert_eq!(here.usage("a").unwrap().held, 1);
    });
}
