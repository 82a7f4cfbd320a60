//! Calls whose outcome their caller did not learn. A retry with the same external id is the answer.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::ground::{
    PATIENCE, SHORT, addr_of, already_acquired, connect, semaphores, through, want,
};
use crate::mysql_ground::{HANG, ms};
use contend::Error;
use contend::semaphore::{PermitRequest, Release, Semaphores};
use testbed::{Direction, Proxy, wait_until, within};

/// A semaphore of one permit, a client behind a proxy, and one beside it.
struct Stage {
    direct: Semaphores,
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
            proxy,
            client,
        }
    }

    fn held(&self) -> u64 {
        self.direct.usage("a").unwrap().held
    }

    /// Has the client acquire what it never hears of; from there on the server is away.
    fn lose_reply(&self, acquire: impl FnOnce(&Semaphores) -> Result<(), Error>) -> Error {
        // Its one connection lives on until that answer.
        self.proxy.refuse();
        self.proxy.lose_reply_to(b"INSERT INTO");
        let error = acquire(&self.client).unwrap_err();
        assert_eq!(self.proxy.lost_replies(), 1);
        wait_until(PATIENCE, "it is committed", || self.held() == 1);
        assert!(error.is_transient(), "{error}");
        assert!(
            error.to_string().contains("may have been granted"),
            "{error}"
        );
        error
    }

    fn lose_reply_to(&self, request: &PermitRequest) -> Error {
        self.lose_reply(|client| client.acquire(request).map(drop))
    }
}

/// Bug 1 of the second edition: the process whose call was not answered released what another process was told that it
/// holds.
#[test]
fn retry_in_another_process_holds_what_it_was_told() {
    within(HANG, || {
        let stage = Stage::new();
        let request = want("job", "a", 1);
        let error = stage.lose_reply_to(&request);
        assert!(error.to_string().contains("repeat it"), "{error}");
        let told = already_acquired(stage.direct.acquire(&request).unwrap());
        stage.proxy.pass();
        thread::sleep(ms(1_500)); // what the first process would do
        assert_eq!(stage.held(), 1);
        let mut again = None;
        wait_until(PATIENCE, "it is connected again", || {
            again = stage.client.acquire(&request).ok();
            again.is_some()
        });
        assert_eq!(already_acquired(again.unwrap()), told);
        assert_eq!(stage.direct.release("job").unwrap(), Release::Released);
        assert_eq!(stage.direct.check().unwrap(), []);
    });
}

/// A guard has no id to repeat: one attempt in the background gives back what it may have been granted.
#[test]
fn unheard_grant_of_a_guard_is_given_back() {
    within(HANG, || {
        let stage = Stage::new();
        let request = PermitRequest::generated().permits("a", 1).ttl(ms(600_000));
        stage.lose_reply(|client| client.guard(&request, ms(0)).map(drop));
        stage.proxy.pass();
        wait_until(PATIENCE, "it is released", || stage.held() == 0);
        assert_eq!(stage.direct.check().unwrap(), []);
    });
}

/// Rule "every claim carries its fence": a guard that takes over what an unanswered call left has its own ttl and a
/// higher fence, so that a delayed release of that call finds nothing.
#[test]
fn unanswered_grant_is_taken_over_with_a_new_fence() {
    within(HANG, || {
        let stage = Stage::new();
        let direct = &stage.direct;
        stage.lose_reply_to(&want("job", "a", 1).ttl(SHORT * 4));
        let before = direct.holders("a").unwrap()[0].fence;
        stage.proxy.pass();
        let request = want("job", "a", 1).ttl(ms(60_000));
        let guard = stage.client.guard(&request, PATIENCE).unwrap();
        assert!(guard.fence("a").unwrap() > before);
        let status = direct.status("job").unwrap().unwrap();
        assert_eq!(status.ttl, Some(ms(60_000)));
        assert_eq!(stage.held(), 1);
        guard.release().unwrap();
        assert_eq!(stage.held(), 0);
        // Bug 5 of the second edition: it listed the permits that were superseded, too.
        let status = direct.status("job").unwrap().unwrap();
        assert_eq!((status.held, status.permits.len()), (false, 1));
        assert_eq!(direct.check().unwrap(), []);
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

/// The fence that the callers of an id were told of.
type Told = Mutex<HashMap<String, Option<u64>>>;

/// Short waits without a ttl, each id several times, from several factories.
fn calls(clients: &[Semaphores], round: u64, told: &Told) {
    thread::scope(|scope| {
        for worker in 0..6 {
            scope.spawn(move || {
                let mut seed = (round * 6 + worker) * 7_919 + 1;
                for _ in 0..4 {
                    let id = format!("{round}-{}", below(&mut seed, 5));
                    let client = &clients[below(&mut seed, clients.len() as u64) as usize];
                    let wait = ms(60 + below(&mut seed, 200));
                    let answer = client.acquire_for(&want(&id, "a", 1), wait);
                    let permits = answer.and_then(|it| it.into_permits());
                    let fence = permits.ok().map(|permits| permits[0].fence);
                    let mut told = told.lock().unwrap();
                    let known = told.entry(id.clone()).or_default();
                    assert!(
                        fence.is_none() || known.is_none() || *known == fence,
                        "{id}"
                    );
                    *known = known.or(fence);
                }
            });
        }
    });
}

/// `CONTEND_DOUBT_SECONDS` sets how long it lasts.
#[test]
fn what_was_told_is_held_and_repeating_tells() {
    let seconds = std::env::var("CONTEND_DOUBT_SECONDS").map_or(8, |text| text.parse().unwrap());
    let length = Duration::from_secs(seconds);
    within(length + PATIENCE * 2, || {
        let (direct, url) = semaphores(&[("a", 1_000_000)]);
        let proxy = Proxy::to(addr_of(&url));
        let clients = [(); 2].map(|()| connect(&through(&url, proxy.addr())));
        let start = Instant::now();
        let (mut ids, mut heard, mut round) = (0, 0, u64::from(std::process::id()) << 20);
        while start.elapsed() < length {
            round += 1;
            let told = Told::default();
            let over = AtomicBool::new(false);
            thread::scope(|scope| {
                scope.spawn(|| misbehave(&proxy, &over, round * 31 + 7));
                calls(&clients, round, &told);
                over.store(true, Ordering::SeqCst);
            });
            for (id, told) in told.into_inner().unwrap() {
                let again = direct.acquire_for(&want(&id, "a", 1), PATIENCE).unwrap();
                let fence = again.into_permits().unwrap()[0].fence;
                assert!(
                    told.is_none_or(|told| told == fence),
                    "{id}: {told:?}, {fence}"
                );
                ids += 1;
                heard += u64::from(told.is_some());
            }
        }
        assert_eq!(direct.usage("a").unwrap().held, ids);
        assert_eq!(direct.check().unwrap(), []);
        println!("{ids} ids, {heard} told at once");
    });
}
