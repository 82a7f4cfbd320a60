//! Guards: what they say is so, on memory and on MySQL.

use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use crate::ground::{
    SHORT, acquired, addr_of, connect, database, exhausted, pair, semaphores, through, want,
};
use crate::mysql_ground::{HANG, ms, operator};
use contend::semaphore::{Acquisition, PermitRequest, Release};
use contend::{ErrorKind, memory};
use mysql::prelude::Queryable;
use testbed::{Direction, Output, Process, Proxy, TempDir, wait_until, within};

const PATIENCE: Duration = Duration::from_secs(60);

/// Review A1, A4, E22 and rules "every claim carries its fence", "one id, one contender": whoever takes a
/// request over has new permits with higher fences and its own ttl, the count does not change, and the
/// guard before knows, and can end nothing any more.
#[test]
fn a_request_that_is_taken_over_belongs_to_the_new_guard_alone() {
    within(HANG, || {
        for (here, elsewhere) in pair("take-over", &[("a", 3), ("b", 1)]) {
            let request = want("job", "a", 2).permits("b", 1).ttl(SHORT);
            acquired(here.acquire(&request).unwrap());
            // The row has a short ttl; the guard's own is what counts from here on.
            let long = want("job", "a", 2).permits("b", 1).ttl(ms(60_000));
            let old = here.guard(&long, ms(0)).unwrap();
            let status = here.status("job").unwrap().unwrap();
            assert_eq!(status.ttl, Some(ms(60_000)));
            assert!(old.valid_for() > ms(30_000) && old.valid_for() <= ms(60_000));
            let error = here.guard(&long, ms(0)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::DuplicateContender, "{error}");

            // A plain call replays unchanged.
            let replay = elsewhere.acquire(&long).unwrap();
            assert!(
                matches!(&replay, Acquisition::AlreadyAcquired { .. }),
                "{replay:?}"
            );
            assert_eq!(replay.into_permits().unwrap(), old.permits());
            assert_eq!(here.usage("a").unwrap().held, 2);
            let fence = old.fence("a").unwrap();
            assert!(old.fence("b").unwrap() > fence && old.fence("c").is_none());
            old.release().unwrap();
            assert_eq!(here.usage("a").unwrap().held, 0);
            assert_eq!(here.check().unwrap(), []);
            let error = here.guard(&long, ms(0)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Conflict);
            let next = here.guard(&want("next", "a", 3), ms(0)).unwrap();
            assert!(next.fence("a").unwrap() > fence);
        }
    });
}

/// Review A4 over two processes: the second one takes over, the first one is told.
#[test]
fn a_guard_that_is_taken_over_by_another_process_is_lost_and_frees_nothing() {
    within(HANG, || {
        let (here, url) = semaphores(&[("a", 1)]);
        let folder = TempDir::new();
        let guard = here.guard(&want("job", "a", 1).ttl(SHORT), ms(0)).unwrap();
        let (lost, too) = (guard.lost(), guard.lost());
        let other = hold(&url, "job", &folder);
        assert!(lost.recv_timeout(PATIENCE).is_err(), "no message");
        assert!(too.recv_timeout(PATIENCE).is_err(), "every receiver hears");
        assert!(!guard.is_valid() && guard.valid_for().is_zero());
        let holders = here.holders("a").unwrap();
        assert_eq!(holders.len(), 1);
        assert!(holders[0].fence > guard.fence("a").unwrap());
        assert_eq!(guard.release().unwrap_err().kind(), ErrorKind::Lost);
        assert_eq!(here.usage("a").unwrap().held, 1, "still the other one's");
        assert_eq!(here.check().unwrap(), []);
        drop(other);
    });
}

/// A process of its own that holds a permit until it is killed.
#[test]
#[ignore = "run by tests in this file, in a process of its own"]
fn holder() {
    let Ok(url) = std::env::var("CONTEND_HOLDER_URL") else {
        return;
    };
    let id = std::env::var("CONTEND_HOLDER_ID").unwrap();
    let guard = match as_in_readme() {
        true => {
            let semaphores = contend::connect(&url).unwrap().semaphores().unwrap();
            semaphores.guard(&want(&id, "a", 1), PATIENCE).unwrap()
        }
        false => {
            let request = want(&id, "a", 1).ttl(SHORT);
            connect(&url).guard(&request, PATIENCE).unwrap()
        }
    };
    std::fs::write(std::env::var("CONTEND_HOLDER_FILE").unwrap(), "held").unwrap();
    loop {
        thread::sleep(ms(1_000));
        assert!(guard.is_valid());
    }
}

/// Starts one, and waits until it holds.
fn hold(url: &str, id: &str, folder: &TempDir) -> Process {
    let file = folder.path().join(format!("held-{id}"));
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "guards::holder", "--ignored", "--nocapture"])
        .env("CONTEND_HOLDER_URL", url)
        .env("CONTEND_HOLDER_ID", id)
        .env("CONTEND_HOLDER_FILE", &file);
    let log = Output::Log(folder.path().join(format!("log-{id}")));
    let process = Process::spawn(&command, &log).unwrap();
    wait_until(PATIENCE, "the other process holds", || file.exists());
    process
}

/// Whether `CONTEND_KILLED_README` asks for the README's program, whose guard has the default ttl of 30 s.
fn as_in_readme() -> bool {
    std::env::var("CONTEND_KILLED_README").is_ok()
}

/// Review E23, user 1: `kill -9` heals with nothing else set up.
#[test]
fn what_a_killed_process_held_goes_to_who_waits_after_ttl_and_a_quarter() {
    within(HANG, || {
        let (here, url) = semaphores(&[("a", 1)]);
        let folder = TempDir::new();
        let process = hold(&url, "doomed", &folder);
        process.kill();
        let start = Instant::now();
        let guard = here.guard(&PermitRequest::generated().permits("a", 1), PATIENCE);
        let waited = start.elapsed();
        assert!(guard.unwrap().is_valid());
        let ttl = if as_in_readme() { ms(30_000) } else { SHORT };
        println!("after kill -9 held again after {waited:?}, ttl {ttl:?}");
        assert!(waited < ttl + ttl / 4 + ms(6_000), "{waited:?}");
        assert_eq!(here.check().unwrap(), []);
        let status = here.status("doomed").unwrap().unwrap();
        assert!(!status.held);
    });
}

/// Rule "belief ends on the local boot-time clock": nobody is granted a permit before its holder, who
/// could not renew it, has stopped believing and had a quarter of the ttl to stop in.
#[test]
fn a_holder_that_cannot_renew_stops_believing_before_anybody_else_holds() {
    within(HANG, || {
        let (here, url) = semaphores(&[("a", 1)]);
        let proxy = Proxy::to(addr_of(&url));
        let cut_off = connect(&through(&url, proxy.addr()));
        let guard = cut_off
            .guard(&want("job", "a", 1).ttl(SHORT), ms(0))
            .unwrap();
        let lost = guard.lost();
        proxy.black_hole(Direction::ToServer);
        let seen = thread::scope(|scope| {
            let guard = &guard;
            // Read off the guard: on a busy machine a thread is told much later.
            let believed = scope.spawn(move || {
                let mut end = Instant::now();
                while guard.is_valid() {
                    end = Instant::now() + guard.valid_for();
                    thread::sleep(ms(10));
                }
                assert!(lost.recv_timeout(PATIENCE).is_err());
                end
            });
            let next = here.guard(&want("next", "a", 1), PATIENCE).unwrap();
            let granted = Instant::now();
            assert!(next.fence("a") > guard.fence("a"));
            granted - believed.join().unwrap()
        });
        assert!(seen > SHORT / 8, "only {seen:?} to stop in");
        proxy.pass();
    });
}

/// Review A2: the README's own example, without a ttl, is renewed.
#[test]
fn a_guard_without_a_ttl_of_its_own_has_thirty_seconds() {
    within(HANG, || {
        let url = database();
        let semaphores = contend::connect(&url).unwrap().semaphores().unwrap();
        semaphores.create("a", 1).unwrap();
        let guard = semaphores.guard(&want("job", "a", 1), ms(0)).unwrap();
        assert!(guard.valid_for() > ms(20_000) && guard.valid_for() <= ms(30_000));
        let status = semaphores.status("job").unwrap().unwrap();
        assert_eq!(status.ttl, Some(ms(30_000)));
        // Review D20: one that could not be renewed in time is refused, and the error names the least.
        let error = semaphores
            .guard(&want("x", "a", 1).ttl(ms(500)), ms(0))
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        assert!(error.to_string().contains("at least 3s"), "{error}");
    });
}

/// Review D17: one locked request row stops no other renewal; and D18: acquires on a locked semaphore
/// leave connections for renewals; D19: nor does a release that hangs.
#[test]
fn locked_rows_hold_up_no_other_renewal() {
    within(HANG, || {
        let (here, url) = semaphores(&[("a", 10), ("b", 10)]);
        let healthy = here
            .guard(&want("healthy", "a", 1).ttl(SHORT), ms(0))
            .unwrap();
        let stuck = here
            .guard(&want("stuck", "a", 1).ttl(SHORT), ms(0))
            .unwrap();
        let dropped = here
            .guard(&want("dropped", "b", 1).ttl(SHORT), ms(0))
            .unwrap();
        let mut operator = operator(&url);
        operator.query_drop("BEGIN").unwrap();
        operator
            .query_drop(
                "SELECT * FROM contend_permit_request WHERE external_id = 'stuck' FOR UPDATE",
            )
            .unwrap();
        operator
            .query_drop("SELECT * FROM contend_semaphore WHERE name = 'b' FOR UPDATE")
            .unwrap();
        thread::scope(|scope| {
            let here = &here;
            scope.spawn(move || drop(dropped));
            for number in 0..24 {
                scope.spawn(move || {
                    let request = want(&format!("b{number}"), "b", 1);
                    drop(here.acquire_for(&request, SHORT));
                });
            }
            let start = Instant::now();
            while start.elapsed() < SHORT * 2 {
                assert!(healthy.is_valid(), "lost after {:?}", start.elapsed());
                thread::sleep(ms(50));
            }
            assert!(!stuck.is_valid(), "nobody could renew it");
            operator.query_drop("COMMIT").unwrap();
        });
        assert!(healthy.is_valid());
        healthy.release().unwrap();
    });
}

/// Review C14: a guard dropped on a locked row does not block its thread for long, and is released later.
#[test]
fn dropping_a_guard_is_bounded_and_its_permits_come_back() {
    within(HANG, || {
        let (here, url) = semaphores(&[("a", 1)]);
        let guard = here
            .guard(&want("job", "a", 1).ttl(ms(60_000)), ms(0))
            .unwrap();
        let mut operator = operator(&url);
        operator.query_drop("BEGIN").unwrap();
        operator
            .query_drop("SELECT * FROM contend_semaphore FOR UPDATE")
            .unwrap();
        let start = Instant::now();
        drop(guard);
        let took = start.elapsed();
        assert!(took < ms(10_000), "{took:?}");
        operator.query_drop("COMMIT").unwrap();
        wait_until(PATIENCE, "it is released", || {
            here.usage("a").unwrap().held == 0
        });
        assert_eq!(here.check().unwrap(), []);
    });
}

#[test]
fn holders_are_listed() {
    within(HANG, || {
        for (here, elsewhere) in pair("holders", &[("a", 4), ("b", 1)]) {
            let request = want("job", "a", 3).owner("me").ttl(SHORT);
            let guard = here.guard(&request, ms(0)).unwrap();
            thread::sleep(SHORT / 2); // it was renewed
            assert!(guard.is_valid());
            let holders = elsewhere.holders("a").unwrap();
            assert_eq!(holders.len(), 1);
            assert_eq!((&*holders[0].external_id, holders[0].count), ("job", 3));
            assert_eq!(holders[0].owner.as_deref(), Some("me"));
            assert_eq!(Some(holders[0].fence), guard.fence("a"));
            assert!(holders[0].expires_in.unwrap() <= SHORT);
            assert!(holders[0].held_for >= SHORT / 2);
            assert_eq!(elsewhere.holders("b").unwrap(), []);
            let error = elsewhere.holders("c").unwrap_err();
            assert_eq!(error.kind(), ErrorKind::NotFound);
            guard.release().unwrap();
            assert_eq!(elsewhere.holders("a").unwrap(), []);
        }
    });
}

/// Every guard of a generated request has an id of its own.
#[test]
fn a_generated_request_can_be_held_many_times() {
    within(HANG, || {
        for (here, _) in pair("generated", &[("a", 2)]) {
            let request = PermitRequest::generated().permits("a", 1);
            let (one, two) = (here.guard(&request, ms(0)), here.guard(&request, ms(0)));
            assert_ne!(one.unwrap().external_id(), two.unwrap().external_id());
            drop(here.guard(&request, ms(0)).unwrap());
            assert!(
                here.acquire(&request)
                    .unwrap_err()
                    .to_string()
                    .contains("external id")
            );
        }
    });
}

/// Review B10: a replay of what has expired says so.
#[test]
fn a_replay_after_the_ttl_has_no_time_left_and_is_lost() {
    within(HANG, || {
        for (here, _) in pair("replay", &[("a", 1)]) {
            let request = want("job", "a", 1).ttl(SHORT);
            acquired(here.acquire(&request).unwrap());
            wait_until(PATIENCE, "it has expired", || {
                let replay = here.acquire(&request).unwrap();
                match &replay {
                    Acquisition::AlreadyAcquired { expires_in, .. } => {
                        *expires_in == Some(Duration::ZERO)
                    }
                    other => panic!("{other:?}"),
                }
            });
            let error = here.acquire(&request).unwrap().into_permits().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Lost);
        }
    });
}

/// Review A3: a lost reply leaves in doubt only what that statement wrote. Another process's live permits,
/// which a call of the same transaction merely asked about, are not touched.
#[test]
fn a_lost_reply_does_not_touch_what_others_of_the_batch_only_asked_about() {
    within(HANG, || {
        let (elsewhere, url) = semaphores(&[("a", 10)]);
        let live = elsewhere.guard(&want("live", "a", 1), ms(0)).unwrap();
        let proxy = Proxy::to(addr_of(&url));
        let client = connect(&through(&url, proxy.addr()));
        client.usage("a").unwrap();
        let mut operator = operator(&url);
        operator.query_drop("BEGIN").unwrap();
        operator
            .query_drop("SELECT * FROM contend_semaphore FOR UPDATE")
            .unwrap();
        proxy.lose_reply_to(b"INSERT INTO `contend_permit_request`");
        thread::scope(|scope| {
            // The first one waits for the row alone; the others come meanwhile and share the next one.
            let first = scope.spawn(|| client.acquire(&want("first", "a", 1)));
            thread::sleep(ms(200));
            let asked = scope.spawn(|| client.acquire(&want("live", "a", 1)));
            let wrote = scope.spawn(|| client.acquire(&want("wrote", "a", 1)));
            thread::sleep(ms(200));
            operator.query_drop("COMMIT").unwrap();
            first.join().unwrap().unwrap().into_permits().unwrap();
            let asked = asked.join().unwrap().unwrap();
            assert!(
                matches!(&asked, Acquisition::AlreadyAcquired { .. }),
                "{asked:?}"
            );
            wrote.join().unwrap().unwrap().into_permits().unwrap();
        });
        assert_eq!(proxy.lost_replies(), 1);
        assert!(live.is_valid());
        assert_eq!(elsewhere.usage("a").unwrap().held, 3);
        live.release().unwrap();
        assert_eq!(elsewhere.check().unwrap(), []);
    });
}

/// Belief ends before the permits are given back, also where somebody else of the process gives them.
#[test]
fn a_guard_whose_request_is_released_or_swept_in_its_process_is_lost_at_once() {
    within(HANG, || {
        for (here, _) in pair("released-under-it", &[("a", 2)]) {
            let released = here.guard(&want("released", "a", 1), ms(0)).unwrap();
            let swept = here
                .guard(&want("swept", "a", 1).owner("dead"), ms(0))
                .unwrap();
            assert_eq!(here.release("released").unwrap(), Release::Released);
            assert!(!released.is_valid() && swept.is_valid());
            let found = here.sweep_dead(|_| contend::semaphore::Liveness::Dead);
            assert_eq!(found.unwrap().len(), 1);
            assert!(!swept.is_valid());
            for guard in [released, swept] {
                assert!(guard.lost().recv_timeout(ms(0)).is_err());
                assert_eq!(guard.release().unwrap_err().kind(), ErrorKind::Lost);
            }
            assert_eq!(here.usage("a").unwrap().held, 0);
        }
    });
}

/// Review D21: a client that vanishes between the two round trips of an acquire, with its connection still
/// open, keeps the semaphore locked for seconds.
#[test]
fn a_client_that_vanishes_inside_a_transaction_holds_its_locks_for_seconds_only() {
    within(HANG, || {
        let (direct, url) = semaphores(&[("a", 2)]);
        let proxy = Proxy::to(addr_of(&url));
        let client = connect(&through(&url, proxy.addr()));
        client.usage("a").unwrap();
        let mut operator = operator(&url);
        operator.query_drop("BEGIN").unwrap();
        operator
            .query_drop("SELECT * FROM contend_semaphore FOR UPDATE")
            .unwrap();
        thread::scope(|scope| {
            let vanishing = scope.spawn(|| client.acquire(&want("vanishing", "a", 1)));
            thread::sleep(ms(300)); // its first round trip waits for the row
            proxy.black_hole(Direction::ToServer);
            operator.query_drop("COMMIT").unwrap();
            let start = Instant::now();
            let guard = direct.guard(&want("next", "a", 2), PATIENCE).unwrap();
            println!(
                "the locks of a vanished client went after {:?}",
                start.elapsed()
            );
            assert!(start.elapsed() < ms(30_000));
            drop(guard);
            proxy.pass();
            proxy.cut();
            drop(vanishing.join().unwrap());
        });
    });
}

/// A test of one's own code can make memory lose permits, as a server that cannot be reached does.
#[test]
fn memory_can_be_told_to_lose_permits() {
    within(HANG, || {
        let factory = memory::factory("losing-permits", contend::Lease::default());
        let semaphores = factory.semaphores().unwrap();
        semaphores.create("a", 1).unwrap();
        let guard = semaphores
            .guard(&want("job", "a", 1).ttl(ms(300)), ms(0))
            .unwrap();
        let handle = memory::handle("losing-permits");
        handle.set_unreachable(true);
        assert!(guard.lost().recv_timeout(PATIENCE).is_err());
        assert!(!guard.is_valid());
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

/// Review 26, and the backends without semaphores say so.
#[test]
fn semaphores_come_from_the_factory() {
    let factory = contend::connect("memory://from-the-factory").unwrap();
    let (one, two) = (factory.semaphores().unwrap(), factory.semaphores().unwrap());
    assert!(one.create("a", 1).unwrap() && !two.create("a", 1).unwrap());
    for url in ["redis://localhost", "zk://localhost:2181"] {
        // Without its feature there is no such backend.
        let Ok(factory) = contend::connect(url) else {
            continue;
        };
        let error = factory.semaphores().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert!(error.to_string().contains("mysql://"), "{error}");
    }
}

/// Review C14: the time spent behind another call under the same id counts, too.
#[test]
fn a_timeout_is_one_for_the_wait_behind_the_same_id_and_for_the_permits() {
    within(HANG, || {
        let factory = contend::connect("memory://one-timeout").unwrap();
        let semaphores = factory.semaphores().unwrap();
        semaphores.create("a", 1).unwrap();
        let _full = semaphores.guard(&want("full", "a", 1), ms(0)).unwrap();
        let wait = |timeout: u64| {
            let began = Instant::now();
            let outcome = semaphores.acquire_for(&want("job", "a", 1), ms(timeout));
            (outcome, began.elapsed())
        };
        thread::scope(|scope| {
            let first = scope.spawn(|| wait(700));
            wait_until(PATIENCE, "the first waits", || {
                semaphores.usage("a").unwrap().held == 1 && !first.is_finished()
            });
            let (_, took) = scope.spawn(|| wait(1_000)).join().unwrap();
            // A loaded machine may add something to the 200 ms; the two waits together are 1.7 s.
            assert!(took < ms(1_500), "{took:?}");
        });
    });
}
