//! Counting semaphores: what is granted, what is refused, and what is given back.

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use crate::ground::{acquired, already_acquired, connect, exhausted, number, semaphores, want};
use crate::mysql_ground::{HANG, empty_database, ms, operator, status};
use contend::ErrorKind;
use contend::semaphore::{Acquisition, PermitRenewal, PermitRequest, Release, Semaphores};
use mysql::prelude::Queryable;
use testbed::{MariaDbServer, wait_until, within};

const PATIENCE: Duration = Duration::from_secs(30);

#[test]
fn a_permit_is_taken_seen_and_given_back() {
    within(HANG, || {
        let (semaphores, _) = semaphores(&[("backup", 2)]);
        let permits = acquired(semaphores.acquire(&want("job-1", "backup", 1)).unwrap());
        assert_eq!(permits.len(), 1);
        assert_eq!((&*permits[0].semaphore, permits[0].count), ("backup", 1));
        let usage = semaphores.usage("backup").unwrap();
        assert_eq!(
            (usage.capacity, usage.held, usage.free, usage.requests),
            (2, 1, 1, 1)
        );
        assert_eq!(semaphores.release("job-1").unwrap(), Release::Released);
        assert_eq!(
            semaphores.release("job-1").unwrap(),
            Release::AlreadyReleased
        );
        assert_eq!(semaphores.release("nobody").unwrap(), Release::Unknown);
        assert_eq!(semaphores.usage("backup").unwrap().held, 0);
        assert_eq!(
            semaphores.acquire(&want("job-1", "backup", 1)).unwrap(),
            Acquisition::AlreadyReleased
        );
    });
}

#[test]
fn an_exhausted_semaphore_says_which_and_how_full_and_takes_nothing_from_the_others() {
    within(HANG, || {
        let (semaphores, _) = semaphores(&[("a", 5), ("b", 2), ("c", 5)]);
        acquired(semaphores.acquire(&want("one", "b", 2)).unwrap());
        let request = PermitRequest::new("two")
            .permits("c", 1)
            .permits("b", 1)
            .permits("a", 3);
        let found = exhausted(semaphores.acquire(&request).unwrap());
        assert_eq!(
            (&*found.semaphore, found.capacity, found.held, found.wanted),
            ("b", 2, 2, 1)
        );
        assert_eq!(
            found.to_string(),
            "the semaphore \"b\" is exhausted: 2 of 2 permits are held, 1 wanted"
        );
        let held: Vec<u64> = semaphores.list().unwrap().iter().map(|u| u.held).collect();
        assert_eq!(held, [0, 2, 0]);
        // Nothing of it is left: the same external id is still good.
        semaphores.release("one").unwrap();
        let permits = acquired(semaphores.acquire(&request).unwrap());
        let names: Vec<&str> = permits.iter().map(|p| &*p.semaphore).collect();
        assert_eq!(names, ["a", "b", "c"]);
        assert!(permits.windows(2).all(|pair| pair[0].fence < pair[1].fence));
    });
}

#[test]
fn the_same_external_id_gets_the_same_permits_and_another_wish_is_a_conflict() {
    within(HANG, || {
        let (semaphores, url) = semaphores(&[("a", 1), ("b", 3)]);
        let request = want("job", "a", 1).owner("me");
        let permits = acquired(semaphores.acquire(&request).unwrap());
        // The semaphore is full, and yet the answer is not that it is exhausted.
        assert_eq!(
            already_acquired(semaphores.acquire(&request).unwrap()),
            permits
        );
        let elsewhere = connect(&url);
        assert_eq!(
            already_acquired(elsewhere.acquire(&request).unwrap()),
            permits
        );
        for other in [
            want("job", "a", 1),
            want("job", "b", 1).owner("me"),
            want("job", "a", 1).owner("me").permits("b", 1),
        ] {
            let error = semaphores.acquire(&other).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Conflict, "{error}");
            assert!(error.to_string().contains("1 of \"a\""), "{error}");
        }
        assert_eq!(number(&url, "SELECT COUNT(*) FROM contend_permit"), 1);
        // Whoever did not acquire it may release it.
        assert_eq!(elsewhere.release("job").unwrap(), Release::Released);
        assert_eq!(semaphores.release("job").unwrap(), Release::AlreadyReleased);
    });
}

#[test]
fn names_and_ids_are_compared_exactly_and_can_not_become_sql() {
    within(HANG, || {
        let (semaphores, _) = semaphores(
            &[("Lock", 1), ("lock", 1), ("'; DROP TABLE permit; -- ", 1)]
                .map(|(n, c)| (n.trim(), c)),
        );
        acquired(semaphores.acquire(&want("Id", "Lock", 1)).unwrap());
        acquired(semaphores.acquire(&want("id", "lock", 1)).unwrap());
        let bad = "x' OR '1'='1\\";
        acquired(
            semaphores
                .acquire(&want(bad, "'; DROP TABLE permit; --", 1).owner("{\"ü\"}"))
                .unwrap(),
        );
        assert_eq!(semaphores.release(bad).unwrap(), Release::Released);
        let status = semaphores.status(bad).unwrap().unwrap();
        assert!(!status.held);
        assert_eq!(status.owner.as_deref(), Some("{\"ü\"}"));
        assert_eq!(semaphores.usage("Lock").unwrap().held, 1);
    });
}

#[test]
fn what_makes_no_sense_writes_nothing() {
    within(HANG, || {
        let (semaphores, url) = semaphores(&[("a", 2)]);
        for request in [
            want("id", "a", 0),
            want("id", "a", 1).permits("a", 1),
            want(&"x".repeat(256), "a", 1),
            want("", "a", 1),
            want("id", "a", 1).ttl(Duration::ZERO),
            PermitRequest::new("id"),
        ] {
            let error = semaphores.acquire(&request).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
        }
        let error = semaphores.acquire(&want("id", "none", 1)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert!(
            error.to_string().contains("no semaphore \"none\""),
            "{error}"
        );
        assert!(semaphores.create("", 1).is_err() && semaphores.create("b", u32::MAX).is_err());
        assert_eq!(
            number(&url, "SELECT COUNT(*) FROM contend_permit_request"),
            0
        );
        assert_eq!(semaphores.usage("a").unwrap().held, 0);
        for url in [
            "mysql://h",
            "mysql://h/db?nonsense=1",
            "mysql://h/db?ttl=1ms",
            "mysql://h/db?table_prefix=a%20b",
            "memory://x?pool_size=1",
        ] {
            let error = contend::connect(url).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{url}");
        }
        let bare = connect(&empty_database());
        let error = bare.acquire(&want("id", "a", 1)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Misconfigured);
        assert!(error.to_string().contains("init-semaphore.sql"), "{error}");
    });
}

#[test]
fn a_lowered_capacity_grants_nothing_until_enough_is_released_and_is_in_the_history() {
    within(HANG, || {
        let (semaphores, _) = semaphores(&[("a", 3)]);
        for id in ["1", "2", "3"] {
            acquired(semaphores.acquire(&want(id, "a", 1)).unwrap());
        }
        assert_eq!(semaphores.set_capacity("a", 1, Some("ops")).unwrap(), 3);
        let usage = semaphores.usage("a").unwrap();
        assert_eq!((usage.capacity, usage.held, usage.free), (1, 3, 0));
        semaphores.release("1").unwrap();
        semaphores.release("2").unwrap();
        assert_eq!(
            exhausted(semaphores.acquire(&want("4", "a", 1)).unwrap()).held,
            1
        );
        semaphores.release("3").unwrap();
        acquired(semaphores.acquire(&want("4", "a", 1)).unwrap());
        semaphores.set_capacity("a", 1, None).unwrap();
        semaphores.set_capacity("a", 2, None).unwrap();
        let history = semaphores.history("a").unwrap();
        let changes: Vec<_> = history
            .iter()
            .map(|change| (change.changed_by.as_deref(), change.from, change.to))
            .collect();
        assert_eq!(changes, [(Some("ops"), 3, 1), (None, 1, 2)]);
        let now = number_now();
        assert!(
            history
                .iter()
                .all(|change| change.changed_at.abs_diff(now) < 60_000)
        );
        let error = semaphores.set_capacity("none", 1, None).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert!(!semaphores.create("a", 9).unwrap());
        assert_eq!(semaphores.usage("a").unwrap().capacity, 2);
    });
}

fn number_now() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.unwrap().as_millis() as u64
}

#[test]
fn a_semaphore_in_use_is_not_deleted_and_one_made_anew_is_another() {
    within(HANG, || {
        let (semaphores, _) = semaphores(&[("a", 1)]);
        let first = acquired(semaphores.acquire(&want("1", "a", 1)).unwrap())[0].fence;
        let error = semaphores.delete("a").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidState);
        semaphores.release("1").unwrap();
        assert!(semaphores.delete("a").unwrap() && !semaphores.delete("a").unwrap());
        assert_eq!(
            semaphores.acquire(&want("2", "a", 1)).unwrap_err().kind(),
            ErrorKind::NotFound
        );
        semaphores.create("a", 1).unwrap();
        let second = acquired(semaphores.acquire(&want("2", "a", 1)).unwrap())[0].fence;
        assert!(second > first);
        assert_eq!(semaphores.status("1").unwrap().unwrap().permits, []);
    });
}

#[test]
fn a_waiter_gets_what_is_released_here_or_in_another_process() {
    within(HANG, || {
        let (semaphores, url) = semaphores(&[("a", 1)]);
        let elsewhere = connect(&url);
        for (round, releaser) in [&semaphores, &elsewhere].into_iter().enumerate() {
            let (holder, waiter) = (format!("h{round}"), format!("w{round}"));
            acquired(releaser.acquire(&want(&holder, "a", 1)).unwrap());
            let permits = thread::scope(|scope| {
                let request = want(&waiter, "a", 1);
                let semaphores = &semaphores;
                let waiting = scope.spawn(move || semaphores.acquire_for(&request, PATIENCE));
                thread::sleep(ms(300)); // time to be found waiting is the subject
                assert!(!waiting.is_finished());
                releaser.release(&holder).unwrap();
                waiting.join().unwrap().unwrap()
            });
            acquired(permits);
            semaphores.release(&waiter).unwrap();
        }
        acquired(semaphores.acquire(&want("h", "a", 1)).unwrap());
        let start = Instant::now();
        let answer = semaphores.acquire_for(&want("w", "a", 1), ms(400)).unwrap();
        assert_eq!(exhausted(answer).held, 1);
        assert!(start.elapsed() >= ms(400) && start.elapsed() < ms(20_000));
    });
}

#[test]
fn waiters_are_served_in_the_order_in_which_they_came_and_do_not_hammer() {
    within(HANG, || {
        // A server of its own: the statements of other tests would be counted.
        let server = MariaDbServer::start();
        let url = server.create_database("waiters");
        let semaphores = connect(&url);
        semaphores.create_tables().unwrap();
        semaphores.create("a", 1).unwrap();
        semaphores.create("b", 1).unwrap();
        acquired(semaphores.acquire(&want("holder", "a", 1)).unwrap());
        let order = std::sync::Mutex::new(Vec::new());
        thread::scope(|scope| {
            for number in 0..8 {
                let (semaphores, order) = (&semaphores, &order);
                let (here, there) = std::sync::mpsc::channel();
                scope.spawn(move || {
                    here.send(()).unwrap();
                    let id = format!("w{number}");
                    // Every other one wants b too: it must not be overtaken by those who do not.
                    let mut request = want(&id, "a", 1);
                    if number % 2 == 1 {
                        request = request.permits("b", 1);
                    }
                    acquired(semaphores.acquire_for(&request, PATIENCE).unwrap());
                    order.lock().unwrap().push(number);
                    semaphores.release(&id).unwrap();
                });
                there.recv().unwrap();
                thread::sleep(ms(200)); // the order in which they come is the subject
            }
            // Only the first of the line polls: every 250 ms, and a random quarter of that sooner or later. Each of
            // its tries begins one transaction. If all eight polled, there would be eight times as many.
            let mut conn = operator(&url);
            let mut tries = || status(&mut conn, "Com_begin");
            let start = Instant::now();
            let before = tries();
            thread::sleep(ms(1_500));
            let tried = tries() - before;
            let most = 1 + start.elapsed().as_millis() as u64 / 187;
            assert!(
                (1..=most).contains(&tried),
                "{tried} tries of 8 waiters, at most {most} expected"
            );
            semaphores.release("holder").unwrap();
        });
        assert_eq!(*order.lock().unwrap(), (0..8).collect::<Vec<_>>());
    });
}

#[test]
fn a_guard_renews_what_it_holds_and_releases_it_on_drop() {
    within(HANG, || {
        let (semaphores, url) = semaphores(&[("a", 1)]);
        let request = want("job", "a", 1).ttl(ms(5_500));
        let guard = semaphores.guard(&request, Duration::ZERO).unwrap();
        assert_eq!(guard.fence("a"), Some(guard.permits()[0].fence));
        let start = Instant::now();
        while start.elapsed() < ms(9_000) {
            assert_eq!(semaphores.sweep_expired().unwrap(), []);
            assert!(guard.is_valid());
            thread::sleep(ms(100));
        }
        drop(guard);
        assert_eq!(semaphores.usage("a").unwrap().held, 0);
        assert_eq!(number(&url, "SELECT used FROM contend_semaphore"), 0);
        let error = semaphores.guard(&request, Duration::ZERO).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Conflict);
    });
}

#[test]
fn a_guard_whose_permits_were_released_knows_it() {
    within(HANG, || {
        let (semaphores, url) = semaphores(&[("a", 1)]);
        let request = want("job", "a", 1).ttl(ms(5_500));
        let guard = semaphores.guard(&request, Duration::ZERO).unwrap();
        let elsewhere = connect(&url);
        elsewhere.release("job").unwrap();
        wait_until(PATIENCE, "the guard knows", || !guard.is_valid());
        assert_eq!(guard.release().unwrap_err().kind(), ErrorKind::Lost);
        let error = exhausted_error(&semaphores);
        assert!(error.to_string().contains("request \"late\""), "{error}");
    });
}

fn exhausted_error(semaphores: &Semaphores) -> contend::Error {
    acquired(semaphores.acquire(&want("holder", "a", 1)).unwrap());
    // Long enough for a busy machine to answer.
    let request = want("late", "a", 1);
    let error = semaphores.guard(&request, ms(2_000)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Exhausted);
    error
}

#[test]
fn a_renewal_begins_the_ttl_anew_and_can_be_looked_at() {
    within(HANG, || {
        let (semaphores, _) = semaphores(&[("a", 1)]);
        let request = want("job", "a", 1).ttl(Duration::from_secs(60)).owner("me");
        acquired(semaphores.acquire(&request).unwrap());
        let status = semaphores.status("job").unwrap().unwrap();
        assert!(status.held && status.ttl == Some(Duration::from_secs(60)));
        let left = status.expires_in.unwrap();
        assert!(left > Duration::from_secs(30) && left <= Duration::from_secs(60));
        thread::sleep(ms(50));
        assert_eq!(semaphores.renew("job").unwrap(), PermitRenewal::Renewed);
        semaphores.release("job").unwrap();
        assert_eq!(
            semaphores.renew("job").unwrap(),
            PermitRenewal::AlreadyReleased
        );
        assert_eq!(semaphores.renew("none").unwrap(), PermitRenewal::Unknown);
        assert_eq!(semaphores.status("none").unwrap(), None);
    });
}

#[test]
fn a_planted_error_in_a_counter_is_found_and_mended() {
    within(HANG, || {
        let (semaphores, url) = semaphores(&[("a", 5), ("b", 5), ("c", 5)]);
        let request = want("job", "a", 2).permits("b", 1);
        acquired(semaphores.acquire(&request).unwrap());
        assert_eq!(semaphores.check().unwrap(), []);
        operator(&url)
            .query_drop("UPDATE contend_semaphore SET used = used + 1 WHERE name IN ('b', 'c')")
            .unwrap();
        let found: Vec<_> = semaphores
            .check()
            .unwrap()
            .iter()
            .map(|wrong| (wrong.semaphore.to_string(), wrong.counter, wrong.permits))
            .collect();
        assert_eq!(found, [("b".to_owned(), 2, 1), ("c".to_owned(), 1, 0)]);
        assert_eq!(semaphores.repair().unwrap().len(), 2);
        assert_eq!(semaphores.check().unwrap(), []);
        assert_eq!(semaphores.repair().unwrap(), []);
        semaphores.release("job").unwrap();
        assert_eq!(number(&url, "SELECT SUM(used) FROM contend_semaphore"), 0);
    });
}

/// Threads of one process: their requests share transactions, and every permit goes to one of them.
#[test]
fn combined_requests_are_all_granted_up_to_the_capacity_and_not_beyond() {
    within(HANG, || {
        let (semaphores, url) = semaphores(&[("a", 20)]);
        let start = Barrier::new(32);
        let granted: usize = thread::scope(|scope| {
            let threads: Vec<_> = (0..32)
                .map(|thread| {
                    let (semaphores, start) = (&semaphores, &start);
                    scope.spawn(move || {
                        start.wait();
                        let mut granted = 0;
                        for round in 0..4 {
                            let id = format!("{thread}-{round}");
                            match semaphores.acquire(&want(&id, "a", 1)).unwrap() {
                                Acquisition::Acquired(_) => granted += 1,
                                other => assert_eq!(exhausted(other).held, 20),
                            }
                        }
                        granted
                    })
                })
                .collect();
            threads.into_iter().map(|t| t.join().unwrap()).sum()
        });
        assert_eq!(granted, 20);
        assert_eq!(semaphores.usage("a").unwrap().requests, 20);
        assert_eq!(semaphores.check().unwrap(), []);
        let ids: Vec<String> = operator(&url)
            .query("SELECT external_id FROM contend_permit_request")
            .unwrap();
        thread::scope(|scope| {
            for id in &ids {
                let semaphores = &semaphores;
                scope.spawn(move || {
                    assert_eq!(semaphores.release(id).unwrap(), Release::Released);
                });
            }
        });
        assert_eq!(number(&url, "SELECT used FROM contend_semaphore"), 0);
        assert_eq!(semaphores.check().unwrap(), []);
    });
}
