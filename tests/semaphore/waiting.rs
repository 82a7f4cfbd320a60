//! Waiting: in order, only whom there is room for, through faults, and no longer than was asked for.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::ground::{
    acquired, addr_of, already_acquired, connect, exhausted, logged, pair, semaphores, through,
    wait_for_log, want,
};
use crate::mysql_ground::{HANG, ms, operator};
use contend::semaphore::{Acquisition, PermitRequest, Wait};
use contend::{Cancel, ErrorKind, Lease, Probe, memory};
use mysql::prelude::Queryable;
use testbed::{Proxy, wait_until, within};

const PATIENCE: Duration = Duration::from_secs(60);

/// Of requests that may be left to run out.
const TTL: Duration = Duration::from_secs(10);

/// Review C12: a waiter on (a, b) that is blocked by a does not keep b's takers out.
#[test]
fn a_waiter_for_two_semaphores_keeps_nobody_from_the_one_that_is_free() {
    within(HANG, || {
        for (here, _) in pair("head-of-line", &[("a", 1), ("b", 1)]) {
            let a = here.guard(&want("a", "a", 1), ms(0)).unwrap();
            thread::scope(|scope| {
                let here = &here;
                let both = scope.spawn(move || {
                    let request = want("both", "a", 1).permits("b", 1);
                    here.guard(&request, PATIENCE).unwrap()
                });
                thread::sleep(ms(300)); // it waits
                for round in 0..5 {
                    let start = Instant::now();
                    let guard = here.guard(&want(&format!("b{round}"), "b", 1), ms(20_000));
                    drop(guard.unwrap());
                    assert!(start.elapsed() < ms(10_000));
                }
                assert!(!both.is_finished());
                drop(a);
                drop(both.join().unwrap());
            });
        }
    });
}

/// Review B6: a replay is no new wish, and needs no turn.
#[test]
fn a_replay_behind_a_waiter_gets_what_it_holds() {
    within(HANG, || {
        for (here, _) in pair("replay-behind", &[("a", 1)]) {
            let permits = acquired(here.acquire(&want("job", "a", 1)).unwrap());
            thread::scope(|scope| {
                let here = &here;
                let cancel = Cancel::new();
                let wait = Wait::forever().cancel(&cancel);
                let waiting = scope.spawn(move || here.guard(&want("waits", "a", 1), wait));
                thread::sleep(ms(300)); // it waits
                let replay = here.acquire_for(&want("job", "a", 1), ms(5_000)).unwrap();
                assert_eq!(already_acquired(replay), permits);
                cancel.cancel();
                assert_eq!(
                    waiting.join().unwrap().unwrap_err().kind(),
                    ErrorKind::Cancelled
                );
            });
        }
    });
}

/// Review C13: the wait goes on while the server is away, and ends with what it waited for.
#[test]
fn waiting_survives_a_server_that_goes_away_and_comes_back() {
    within(HANG, || {
        let (direct, url) = semaphores(&[("a", 1)]);
        let held = direct.guard(&want("held", "a", 1), ms(0)).unwrap();
        let proxy = Proxy::to(addr_of(&url));
        let client = connect(&through(&url, proxy.addr()));
        thread::scope(|scope| {
            let waiting = scope.spawn(|| client.guard(&want("waits", "a", 1), PATIENCE));
            thread::sleep(ms(300)); // it waits
            proxy.refuse();
            proxy.cut();
            thread::sleep(ms(1_500)); // the server is away
            assert!(!waiting.is_finished());
            drop(held);
            proxy.pass();
            assert!(waiting.join().unwrap().unwrap().is_valid());
        });
        // And one that ends while the server is away says so, in time.
        let _held = direct.guard(&want("held-again", "a", 1), ms(0)).unwrap();
        proxy.refuse();
        proxy.cut();
        let start = Instant::now();
        let error = client.guard(&want("late", "a", 1), ms(500)).unwrap_err();
        assert!(error.is_transient(), "{error}");
        assert!(
            start.elapsed() >= ms(490) && start.elapsed() < ms(3_000),
            "{:?}",
            start.elapsed()
        );
    });
}

/// Review C14: a timeout is kept, whatever is locked; before, 15 s for 100 ms.
#[test]
fn a_timeout_is_kept_on_a_locked_row() {
    within(HANG, || {
        let (here, url) = semaphores(&[("a", 1)]);
        here.usage("a").unwrap();
        let mut operator = operator(&url);
        operator.query_drop("BEGIN").unwrap();
        operator
            .query_drop("SELECT * FROM contend_semaphore FOR UPDATE")
            .unwrap();
        let mut late = Vec::new();
        for round in 0..5 {
            let start = Instant::now();
            let request = want(&format!("job-{round}"), "a", 1);
            assert!(here.acquire_for(&request, ms(100)).is_err());
            late.push(start.elapsed().saturating_sub(ms(100)));
        }
        late.sort();
        println!("late by {late:?}");
        assert!(late[2] < ms(2_500), "{late:?}");
        operator.query_drop("COMMIT").unwrap();
        wait_until(PATIENCE, "nothing is left of them", || {
            here.usage("a").unwrap().held == 0
        });
        wait_until(PATIENCE, "the row is free", || {
            here.acquire(&want("next", "a", 1)).is_ok()
        });
    });
}

/// A timeout that is long enough for a call in the caller's own thread is kept as well, on a locked row and on a
/// server that does not answer.
#[test]
fn a_timeout_of_seconds_is_kept_too() {
    within(HANG, || {
        let (_, url) = semaphores(&[("a", 1)]);
        let proxy = Proxy::to(addr_of(&url));
        let here = connect(&through(&url, proxy.addr()));
        here.usage("a").unwrap();
        let mut operator = operator(&url);
        operator.query_drop("BEGIN").unwrap();
        operator
            .query_drop("SELECT * FROM contend_semaphore FOR UPDATE")
            .unwrap();
        let late = |id: &str| {
            let start = Instant::now();
            assert!(here.acquire_for(&want(id, "a", 1), ms(3_000)).is_err());
            start.elapsed().saturating_sub(ms(3_000))
        };
        let locked = late("locked");
        proxy.black_hole(testbed::Direction::Both);
        let silent = late("silent");
        println!("late by {locked:?} on a locked row, by {silent:?} on a silent server");
        assert!(locked.max(silent) < ms(2_500), "{locked:?}, {silent:?}");
    });
}

/// Review C15: a capacity below the wish is exhausted for now; it may grow.
#[test]
fn a_wish_beyond_the_capacity_waits_for_it_to_grow() {
    within(HANG, || {
        for (here, _) in pair("grow", &[("a", 0)]) {
            let seen = exhausted(here.acquire(&want("one", "a", 2)).unwrap());
            assert_eq!((seen.capacity, seen.wanted), (0, 2));
            let error = here.guard(&want("one", "a", 2), ms(50)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Exhausted);
            let says = "2 wanted, which is more than the capacity: set_capacity raises it";
            assert!(error.to_string().ends_with(says), "{error}");
            let id = contend::ContenderIdGenerator::Uuid.generate();
            thread::scope(|scope| {
                let (here, id) = (&here, &id);
                let waiting = scope.spawn(move || here.guard(&want(id, "a", 2), PATIENCE));
                wait_for_log(
                    "contend::semaphore",
                    &format!("{id:?} waits: the semaphore \"a\""),
                );
                thread::sleep(ms(200)); // it tries more than once
                assert_eq!(here.set_capacity("a", 2, Some("ops")).unwrap(), 0);
                assert!(waiting.join().unwrap().unwrap().is_valid());
                assert_eq!(logged(&format!("{id:?} waits")).len(), 1);
            });
        }
    });
}

/// A cancelled wait keeps nothing, and the next one in line goes on.
#[test]
fn a_wait_that_is_cancelled_leaves_the_line() {
    within(HANG, || {
        for (here, _) in pair("cancel", &[("a", 1)]) {
            let held = here.guard(&want("held", "a", 1), ms(0)).unwrap();
            let cancel = Cancel::new();
            thread::scope(|scope| {
                let here = &here;
                let wait = Wait::at_most(PATIENCE).cancel(&cancel);
                let first = scope.spawn(move || here.guard(&want("first", "a", 1), wait));
                thread::sleep(ms(200)); // it waits
                let second = scope.spawn(move || here.guard(&want("second", "a", 1), PATIENCE));
                thread::sleep(ms(100));
                cancel.cancel();
                let error = first.join().unwrap().unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Cancelled);
                drop(held);
                drop(second.join().unwrap().unwrap());
            });
            assert_eq!(here.usage("a").unwrap().held, 0);
            assert!(here.status("first").unwrap().is_none_or(|it| !it.held));
        }
    });
}

/// Hears that a wait has begun.
#[derive(Default)]
struct Waits(AtomicBool);

impl Probe for Waits {
    fn exhausted(&self, _: &str) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// A `Cancel` replaced the one that the wait had before.
#[test]
fn every_cancel_of_a_wait_ends_it() {
    within(HANG, || {
        for which in 0..2 {
            let waits = Arc::new(Waits::default());
            let factory = memory::factory("cancels", Lease::default());
            let factory = factory.with_probe(Arc::clone(&waits) as Arc<dyn Probe>);
            let semaphores = factory.semaphores().unwrap();
            semaphores.create("a", 1).unwrap();
            let request = PermitRequest::generated().permits("a", 1);
            let _held = semaphores.guard(&request, ms(0)).unwrap();
            let cancels = [Cancel::new(), Cancel::new()];
            let wait = Wait::at_most(ms(5_000));
            let wait = wait.cancel(&cancels[0]).cancel(&cancels[1]);
            thread::scope(|scope| {
                let waiting = scope.spawn(|| semaphores.guard(&request, wait).map(drop));
                wait_until(PATIENCE, "it waits", || waits.0.load(Ordering::SeqCst));
                cancels[which].cancel();
                let error = waiting.join().unwrap().unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Cancelled, "{which}: {error}");
            });
        }
    });
}

/// What the text of `Cancel` says: without waiting, and whether or not there is room.
#[test]
fn a_call_with_a_cancel_that_is_cancelled_already_gets_nothing() {
    within(HANG, || {
        for (here, _) in pair("cancelled-before", &[("a", 1)]) {
            let cancel = Cancel::new();
            cancel.cancel();
            for timeout in [ms(0), PATIENCE] {
                let wait = Wait::at_most(timeout).cancel(&cancel);
                let guard = here.guard(&want("guard", "a", 1), wait.clone()).map(drop);
                let plain = here.acquire_for(&want("plain", "a", 1), wait).map(drop);
                for outcome in [guard, plain] {
                    let error = outcome.expect_err("cancelled before");
                    assert_eq!(error.kind(), ErrorKind::Cancelled, "{timeout:?}: {error}");
                }
                assert!(here.status("plain").unwrap().is_none());
            }
        }
    });
}

/// A call that nobody waits for any more is granted something: what the next call under its id was told it
/// holds is not given back behind its back.
#[test]
fn a_retry_after_a_timeout_holds_what_it_was_told_it_holds() {
    within(HANG, || {
        let (here, url) = semaphores(&[("a", 1)]);
        here.usage("a").unwrap();
        // Another factory of this process is the same contender, as far as the server knows.
        let beside = connect(&url);
        wait_until(PATIENCE, "it is connected", || beside.usage("a").is_ok());
        let mut operator = operator(&url);
        operator
            .query_drop(
                "CREATE TRIGGER slow BEFORE INSERT ON contend_permit_request FOR EACH ROW \
                 SET NEW.owner = IF(SLEEP(2), NULL, NEW.owner)",
            )
            .unwrap();
        for round in 0..2 {
            let request = want(&format!("job-{round}"), "a", 1);
            let error = here.acquire_for(&request, ms(100)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
            let next = if round % 2 == 0 { &here } else { &beside };
            let again = next.acquire_for(&request, ms(20_000)).unwrap();
            thread::sleep(ms(700)); // whatever comes late has come
            let held = here.holders("a").unwrap();
            let permits = again.into_permits().unwrap();
            assert_eq!(held.len(), 1, "released behind its back");
            assert_eq!(held[0].fence, permits[0].fence);
            here.release(&format!("job-{round}")).unwrap();
        }
        assert_eq!(here.check().unwrap(), []);
    });
}

/// Calls of one process under one external id are one after the other, and one of them is granted it.
#[test]
fn calls_under_one_external_id_at_once_get_one_grant() {
    within(HANG, || {
        for (here, _) in pair("at-once", &[("a", 8)]) {
            let answers: Vec<Acquisition> = thread::scope(|scope| {
                let here = &here;
                let calls: Vec<_> = (0..8)
                    .map(|_| scope.spawn(move || here.acquire(&want("job", "a", 1)).unwrap()))
                    .collect();
                calls.into_iter().map(|it| it.join().unwrap()).collect()
            });
            let first = |it: &&Acquisition| matches!(it, Acquisition::Acquired(_));
            assert_eq!(answers.iter().filter(first).count(), 1, "{answers:?}");
            let fences: Vec<u64> = answers
                .into_iter()
                .map(|it| it.into_permits().unwrap()[0].fence)
                .collect();
            assert!(fences.iter().all(|fence| *fence == fences[0]), "{fences:?}");
            assert_eq!(here.usage("a").unwrap().held, 1);
        }
    });
}

/// How many threads of each of two processes wait for one permit, and for how long this goes on.
fn sharing() -> (usize, Duration) {
    let number = |name: &str, default: u64| -> u64 {
        std::env::var(name).map_or(default, |text| text.parse().unwrap())
    };
    let seconds = Duration::from_secs(number("CONTEND_SHARING_SECONDS", 2));
    (number("CONTEND_SHARING_WAITERS", 5) as usize, seconds)
}

#[test]
#[ignore = "run by the test below, in processes of its own"]
fn sharing_worker() {
    let Ok(url) = std::env::var("CONTEND_SHARING_URL") else {
        return;
    };
    let (waiters, length) = sharing();
    let semaphores = connect(&url);
    let start = Instant::now();
    let waits: Vec<Duration> = thread::scope(|scope| {
        let threads: Vec<_> = (0..waiters)
            .map(|_| {
                scope.spawn(|| {
                    let mut waits = Vec::new();
                    while start.elapsed() < length {
                        let asked = Instant::now();
                        let request = PermitRequest::generated().permits("a", 1).ttl(TTL);
                        let left = length.saturating_sub(start.elapsed()).max(ms(1));
                        if let Ok(guard) = semaphores.guard(&request, left) {
                            waits.push(asked.elapsed());
                            thread::sleep(ms(1));
                            drop(guard);
                        } else {
                            waits.push(asked.elapsed());
                        }
                    }
                    waits
                })
            })
            .collect();
        threads
            .into_iter()
            .flat_map(|it| it.join().unwrap())
            .collect()
    });
    println!(
        "waits: {}, the longest {:?}",
        waits.len(),
        waits.iter().max().unwrap()
    );
}

/// Two processes that want one permit all the time. Between processes there is no order: they poll.
/// `CONTEND_SHARING_WAITERS` sets how many threads each has, `CONTEND_SHARING_SECONDS` how long it lasts.
#[test]
fn waiters_of_two_processes_share_one_permit() {
    let (waiters, length) = sharing();
    within(length + Duration::from_secs(120), || {
        let (here, url) = semaphores(&[("a", 1)]);
        let folder = testbed::TempDir::new();
        let processes: Vec<_> = (0..2)
            .map(|number| {
                let mut command = std::process::Command::new(std::env::current_exe().unwrap());
                command
                    .args([
                        "--exact",
                        "waiting::sharing_worker",
                        "--ignored",
                        "--nocapture",
                    ])
                    .env("CONTEND_SHARING_URL", &url);
                let log = folder.path().join(format!("log-{number}"));
                let process = testbed::Process::spawn(&command, &testbed::Output::Log(log.clone()));
                (process.unwrap(), log)
            })
            .collect();
        for (process, log) in processes {
            let status = process.wait(length + Duration::from_secs(60));
            let log = std::fs::read_to_string(log).unwrap();
            assert!(status.is_some_and(|it| it.success()), "{log}");
            let says = log.lines().find(|line| line.contains("waits: ")).unwrap();
            println!("2 processes x {waiters}, {length:?}: {says}");
        }
        // A call of the last moments that a starved machine kept from being ended runs out by itself.
        println!("held at the end: {}", here.usage("a").unwrap().held);
        wait_until(TTL * 2 + PATIENCE, "all permits are back", || {
            here.sweep_expired().unwrap();
            here.usage("a").unwrap().held == 0
        });
        assert_eq!(here.check().unwrap(), []);
    });
}
