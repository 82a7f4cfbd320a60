//! Calls whose outcome their caller did not learn: in the end each id is held as its callers were told, or
//! not held.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::ground::{
    SHORT, acquired, addr_of, connect, logged, semaphores, through, wait_for_log, want,
};
use crate::mysql_ground::{HANG, ms, operator};
use contend::Error;
use contend::semaphore::{Acquisition, PermitRequest, Release, Semaphores};
use mysql::prelude::Queryable;
use testbed::{Direction, Proxy, wait_until, within};

const PATIENCE: Duration = Duration::from_secs(60);

/// A semaphore of one permit, a client behind a proxy, and one beside it.
struct Stage {
    direct: Semaphores,
    url: String,
    proxy: Proxy,
    client: Semaphores,
}

impl Stage {
    fn new() -> Stage {
        let (direct, url) = semaphores(&[("a", 1)]);
        let proxy = Proxy::to(addr_of(&url));
        let client = connect(&format!("{}?pool_size=1", through(&url, proxy.addr())));
        wait_until(PATIENCE, "it is connected", || client.usage("a").is_ok());
        Stage {
            direct,
            url,
            proxy,
            client,
        }
    }

    fn held(&self) -> u64 {
        self.direct.usage("a").unwrap().held
    }

    /// Has the client acquire what it never hears of; from there on the server is away.
    fn leave_in_doubt(&self, request: &PermitRequest) -> Error {
        // Its one connection lives on until that answer.
        self.proxy.refuse();
        self.proxy.lose_reply_to(b"INSERT INTO");
        let error = self.client.acquire(request).unwrap_err();
        assert_eq!(self.proxy.lost_replies(), 1);
        wait_until(PATIENCE, "it is committed", || self.held() == 1);
        assert!(error.is_transient(), "{error}");
        assert!(
            error.to_string().contains("outcome is not known"),
            "{error}"
        );
        error
    }
}

#[test]
fn an_outcome_that_stays_unknown_leaks_nothing() {
    within(HANG, || {
        let stage = Stage::new();
        stage.leave_in_doubt(&want("job", "a", 1));
        assert_eq!(stage.held(), 1);
        stage.proxy.pass();
        wait_until(PATIENCE, "it is released", || stage.held() == 0);
        let again = stage.client.acquire(&want("job", "a", 1)).unwrap();
        assert_eq!(again, Acquisition::AlreadyReleased);
        assert_eq!(stage.direct.check().unwrap(), []);
    });
}

/// Review B5: a retry of an id whose outcome is in doubt takes the clean-up over, and if it fails too,
/// nothing leaks.
#[test]
fn a_retry_that_fails_too_leaks_nothing() {
    within(HANG, || {
        let stage = Stage::new();
        stage.leave_in_doubt(&want("job", "a", 1));
        let error = stage.client.acquire(&want("job", "a", 1)).unwrap_err();
        assert!(
            error.to_string().contains("outcome is not known"),
            "{error}"
        );
        stage.proxy.pass();
        wait_until(PATIENCE, "it is released", || stage.held() == 0);
        assert_eq!(
            stage.direct.release("job").unwrap(),
            Release::AlreadyReleased
        );
        assert_eq!(stage.direct.check().unwrap(), []);
    });
}

/// Rule "every claim carries its fence": a guard that takes over what a call of unknown outcome left has
/// its own ttl and a higher fence, so that a delayed release of that call finds nothing.
#[test]
fn what_a_call_in_doubt_left_is_taken_over_with_a_new_fence_and_the_full_ttl() {
    within(HANG, || {
        let stage = Stage::new();
        let direct = &stage.direct;
        let error = stage.leave_in_doubt(&want("job", "a", 1).ttl(SHORT * 4));
        assert!(
            error.to_string().contains("it ends with its ttl"),
            "{error}"
        );
        let before = direct.holders("a").unwrap()[0].fence;
        thread::scope(|scope| {
            let guard = scope.spawn(|| {
                let request = want("job", "a", 1).ttl(ms(60_000));
                stage.client.guard(&request, PATIENCE)
            });
            thread::sleep(ms(100)); // it has the id, whatever the background wants
            stage.proxy.pass();
            let guard = guard.join().unwrap().unwrap();
            assert!(guard.fence("a").unwrap() > before);
            let status = direct.status("job").unwrap().unwrap();
            assert_eq!(status.ttl, Some(ms(60_000)));
            assert_eq!(stage.held(), 1);
            guard.release().unwrap();
        });
        assert_eq!(stage.held(), 0);
        assert_eq!(direct.check().unwrap(), []);
    });
}

/// What a clean-up cannot mend may be mended by somebody: it was given up for good.
#[test]
fn a_clean_up_that_the_server_refuses_is_repeated() {
    within(HANG, || {
        let stage = Stage::new();
        stage.leave_in_doubt(&want("refused", "a", 1));
        let mut operator = operator(&stage.url);
        let rename = |from: &str, to: &str| format!("RENAME TABLE {from} TO {to}");
        let table = "contend_permit_request";
        operator.query_drop(rename(table, "away")).unwrap();
        stage.proxy.pass();
        wait_for_log("contend::semaphore", "release of request \"refused\"");
        operator.query_drop(rename("away", table)).unwrap();
        wait_until(PATIENCE, "it is released", || stage.held() == 0);
    });
}

/// Nobody can release what a server does not answer for; the error and the log say so, and what helps.
#[test]
fn a_factory_that_ends_before_the_server_answers_says_what_it_leaves() {
    within(HANG, || {
        let stage = Stage::new();
        let error = stage.leave_in_doubt(&want("left behind", "a", 1));
        assert!(
            error
                .to_string()
                .contains("if the factory ends first, it stays held until it is released"),
            "{error}"
        );
        assert_eq!(logged("\"left behind\"").len(), 0);
        drop(stage.client);
        wait_for_log(
            "contend::semaphore",
            "request \"left behind\": its factory ended",
        );
        stage.proxy.pass();
        assert_eq!(
            stage.direct.release("left behind").unwrap(),
            Release::Released
        );
        assert_eq!(stage.direct.usage("a").unwrap().held, 0);
    });
}

/// The tokens went with the last factory of a store: the next one took what a call in doubt had been granted for
/// somebody else's, and then that call's delayed release took it back.
#[test]
fn what_a_dropped_factory_left_in_doubt_is_taken_over_by_the_next() {
    within(HANG, || {
        let stage = Stage::new();
        let request = want("handed down", "a", 1);
        stage.leave_in_doubt(&request);
        let Stage {
            direct,
            url,
            proxy,
            client,
        } = stage;
        let before = direct.holders("a").unwrap()[0].fence;
        let mut operator = operator(&url);
        let token = "SELECT token FROM contend_permit_request";
        let token: u64 = operator.query_first(token).unwrap().unwrap();
        drop(client);
        wait_for_log("contend::semaphore", "\"handed down\": its factory ended");
        proxy.pass();
        let next = connect(&through(&url, proxy.addr()));
        let permits = acquired(next.acquire(&request).unwrap());
        assert!(permits[0].fence > before);
        // As the release that the factory before sent, and the network held back.
        let release = "UPDATE contend_permit_request SET state = 'RELEASED' WHERE token = ?";
        operator.exec_drop(release, (token,)).unwrap();
        assert!(direct.status("handed down").unwrap().unwrap().held);
    });
}

/// A number below `most`; the same ones for the same seed.
fn below(state: &mut u64, most: u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state % most
}

/// Delays, loses and holds back replies, and cuts connections, until it is told to stop.
fn misbehave(proxy: &Proxy, over: &AtomicBool, mut seed: u64) {
    while !over.load(Ordering::SeqCst) {
        match below(&mut seed, 8) {
            0 => proxy.lose_reply_to(b"COMMIT"),
            1 => proxy.lose_reply_to(b"INSERT"),
            2 => proxy.cut(),
            3 => proxy.black_hole(Direction::ToClient),
            4 => proxy.black_hole(Direction::ToServer),
            5 | 6 => proxy.delay_replies(ms(50 + below(&mut seed, 300))),
            _ => proxy.pass(),
        }
        thread::sleep(ms(50 + below(&mut seed, 250)));
    }
    proxy.pass();
}

/// Short waits without a ttl, each id several times, from two factories; what their callers were told.
fn calls(clients: &[Semaphores], round: u64, told: &Mutex<HashMap<String, bool>>) {
    thread::scope(|scope| {
        for worker in 0..6 {
            scope.spawn(move || {
                let mut seed = (round * 6 + worker) * 7_919 + 1;
                for _ in 0..4 {
                    let id = format!("{round}-{}", below(&mut seed, 5));
                    let client = &clients[below(&mut seed, clients.len() as u64) as usize];
                    let wait = ms(60 + below(&mut seed, 200));
                    let answer = client.acquire_for(&want(&id, "a", 1), wait);
                    let held = matches!(
                        answer,
                        Ok(Acquisition::Acquired(_) | Acquisition::AlreadyAcquired { .. })
                    );
                    *told.lock().unwrap().entry(id).or_default() |= held;
                }
            });
        }
    });
}

/// `CONTEND_DOUBT_SECONDS` sets how long it lasts.
#[test]
fn in_the_end_an_id_is_held_exactly_if_a_caller_was_told_so() {
    let seconds = std::env::var("CONTEND_DOUBT_SECONDS").map_or(8, |text| text.parse().unwrap());
    let length = Duration::from_secs(seconds);
    within(length + PATIENCE * 2, || {
        let (direct, url) = semaphores(&[("a", 1_000_000)]);
        let proxy = Proxy::to(addr_of(&url));
        let many: usize = std::env::var("CONTEND_F").map_or(2, |t| t.parse().unwrap());
        let clients: Vec<_> = (0..many)
            .map(|_| connect(&through(&url, proxy.addr())))
            .collect();
        let start = Instant::now();
        let (mut ids, mut held, mut round) = (0, 0, u64::from(std::process::id()) << 20);
        while start.elapsed() < length {
            round += 1;
            let told = Mutex::default();
            let over = AtomicBool::new(false);
            thread::scope(|scope| {
                scope.spawn(|| misbehave(&proxy, &over, round * 31 + 7));
                calls(&clients, round, &told);
                over.store(true, Ordering::SeqCst);
            });
            for (id, told) in told.into_inner().unwrap() {
                wait_until(PATIENCE, &format!("{id} is held: {told}"), || {
                    let status = direct.status(&id).unwrap();
                    status.is_some_and(|it| it.held) == told
                });
                ids += 1;
                held += u64::from(told);
            }
        }
        // Whatever was still under way would have changed it by now.
        wait_until(PATIENCE, "all that is held was told", || {
            direct.usage("a").unwrap().held == held
        });
        println!("{ids} ids, {held} held");
    });
}

/// Calls under one id whose answers come while their factory is dropped, or after it, are ended: by its
/// clean-ups, or by those who wait for the answer. Only what is warned of is left.
#[test]
fn late_answers_to_a_factory_that_is_dropped_leave_nothing_behind() {
    let seconds = std::env::var("CONTEND_DOUBT_SECONDS").map_or(8, |text| text.parse().unwrap());
    let length = Duration::from_secs(seconds);
    within(length + PATIENCE * 2, || {
        let (direct, url) = semaphores(&[("a", 1_000_000)]);
        let proxy = Proxy::to(addr_of(&url));
        let start = Instant::now();
        let mut seed = u64::from(std::process::id()) + 1;
        let (mut ids, mut granted, mut warned) = (0, 0, 0);
        for round in 0.. {
            if start.elapsed() >= length {
                break;
            }
            let client = connect(&through(&url, proxy.addr()));
            client.usage("a").unwrap();
            let id = |number| format!("dropped-{round}-{number}");
            proxy.delay_replies(ms(60 + below(&mut seed, 300)));
            let told: Vec<bool> = thread::scope(|scope| {
                let calls: Vec<_> = (0..4)
                    .map(|number| {
                        let (client, waits) =
                            (&client, [0; 2].map(|_| ms(80 + below(&mut seed, 300))));
                        scope.spawn(move || {
                            let request = want(&id(number), "a", 1);
                            let answers = waits.map(|wait| client.acquire_for(&request, wait));
                            answers
                                .into_iter()
                                .any(|it| it.is_ok_and(|it| it.into_permits().is_ok()))
                        })
                    })
                    .collect();
                calls.into_iter().map(|it| it.join().unwrap()).collect()
            });
            thread::scope(|scope| {
                scope.spawn(|| drop(client));
                thread::sleep(ms(below(&mut seed, 500)));
                proxy.pass();
            });
            for (number, told) in told.into_iter().enumerate() {
                let id = id(number);
                let warning = format!("{id:?}: its factory ended");
                let held = || direct.status(&id).unwrap().is_some_and(|it| it.held);
                wait_until(PATIENCE, &format!("{id} is held: {told}"), || {
                    held() == told || !logged(&warning).is_empty()
                });
                warned += u64::from(!logged(&warning).is_empty());
                granted += u64::from(
                    direct
                        .status(&id)
                        .unwrap()
                        .is_some_and(|it| !it.permits.is_empty()),
                );
                ids += 1;
            }
        }
        println!("{ids} ids, {granted} granted, {warned} given up with a warning");
        assert!(granted > 0);
    });
}
