//! What is special about semaphores on Redis: scripts that answer as memory does, requests that come too late, the
//! lines in which processes wait.

use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use contend::backend::permit_store::{
    GrantId, Outcome, Permit, PermitStore, Purge, RequestStatus, Standing, Sweep,
};
use contend::semaphore::{Acquisition, Holder, PermitRequest};
use contend::{ErrorKind, Factory, Moment};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use testbed::{Proxy, RedisServer, wait_until, within};

use crate::ground::{PATIENCE, acquired, by, connect, granted, request, want};
use crate::mysql_ground::{HANG, ms};

fn factory(server: &RedisServer) -> Factory {
    contend::connect(&server.url()).unwrap()
}

fn store(server: &RedisServer) -> Arc<dyn PermitStore> {
    factory(server).backend().unwrap().permits().unwrap()
}

/// Memory decides what is right: random calls are answered alike. Fences and times are compared by what is promised.
#[test]
fn scripts_answer_as_memory_does() {
    within(HANG, || {
        let server = RedisServer::start();
        for seed in 0..4 {
            let url = format!("{}?prefix=model-{seed}", server.url());
            let redis = contend::connect(&url).unwrap();
            let memory = contend::connect(&format!("memory://model-{seed}")).unwrap();
            let stores = [memory, redis].map(|it| it.backend().unwrap().permits().unwrap());
            let mut dice = StdRng::seed_from_u64(seed);
            let mut fences = [0, 0];
            for step in 0..800 {
                let call = dice.random();
                let ask = |at: usize, fence| random_call(call, &*stores[at], fence);
                let [left, right] = &mut fences;
                assert_eq!(ask(0, left), ask(1, right), "seed {seed}, step {step}");
            }
            assert_eq!(stores[1].audit(false, by()).unwrap(), []);
        }
    });
}

const NAMES: [&str; 4] = ["a", "b", "a b: c", "日本"];

/// Makes the call that `seed` stands for. Returns what it was answered, without what differs between two servers.
fn random_call(seed: u64, store: &dyn PermitStore, last_fence: &mut u64) -> String {
    let dice = &mut StdRng::seed_from_u64(seed);
    let failed = |error: contend::Error| format!("{:?}", error.kind());
    let id = format!("id {}", dice.random_range(0..8));
    let token = dice.random_range(1..4);
    let name = *NAMES.choose(dice).unwrap();
    let owner = *["owner", "{\"ü\"}"].choose(dice).unwrap();
    let grant = GrantId {
        token: Some(token).filter(|token| *token != 3),
        ..GrantId::any(&id)
    };
    match dice.random_range(0..100) {
        0..=44 => {
            // Few combinations, so that the same one comes again.
            let names = NAMES.into_iter().filter(|_| dice.random_range(0..3) == 0);
            let mut names: Vec<&str> = names.collect();
            if names.is_empty() {
                names.push(name);
            }
            names.sort_unstable();
            let permits: Vec<_> = (names.into_iter())
                .map(|name| (name, dice.random_range(1..3)))
                .collect();
            let mut request = request(&id, token, &permits);
            request.owner = Some(Arc::from(owner)).filter(|_| dice.random());
            request.ttl = Some(Duration::from_secs(3600)).filter(|_| dice.random());
            request.take_over = dice.random_range(0..3) == 0;
            match store.acquire(&Arc::new(request), None, by()) {
                Ok(Outcome::Granted(grant)) => {
                    let fences = grant.permits.iter().map(|it| it.fence);
                    // A retry finds the fences of its grant.
                    let fresh = fences.clone().all(|fence| fence > *last_fence);
                    *last_fence = fences.fold(*last_fence, u64::max);
                    let counts = counts(&grant.permits);
                    format!("granted {counts} {fresh} {:?}", grant.free)
                }
                Ok(Outcome::Known(known)) => status(known),
                Ok(Outcome::Exhausted(short)) => short.to_string(),
                Err(error) => failed(error),
            }
        }
        45..=64 => format!("{:?}", store.release(&grant, by()).unwrap()),
        65..=74 => {
            let grants = [grant, GrantId::any("none")];
            format!("{:?}", store.renew(&grants, by()).unwrap())
        }
        75..=79 => {
            let made = store.create(name, dice.random_range(1..9), by());
            format!("made {}", made.unwrap())
        }
        80..=83 => {
            let before = store.set_capacity(name, dice.random_range(0..9), Some("ops"), by());
            before.map_or_else(failed, |before| format!("set {before}"))
        }
        84..=85 => {
            let deleted = store.delete(name, by());
            deleted.map_or_else(failed, |deleted| format!("deleted {deleted}"))
        }
        86..=87 => swept(store, &Sweep::Stale(Duration::ZERO)),
        88..=89 => {
            let (owners, now) = store.owners(by()).unwrap();
            let swept = swept(store, &Sweep::Owner(Arc::from(owner), now));
            format!("{owners:?} {swept}")
        }
        90..=91 => {
            let purged = store.purge(Purge::Requests, Duration::ZERO, 1_000, by());
            format!("purged {}", purged.unwrap())
        }
        _ => {
            let known = store.status(&id, by()).unwrap().map(status);
            let usage = store.usage(None, by()).unwrap();
            let holder = |it: &Holder| format!("{} {:?} {}", it.external_id, it.owner, it.count);
            let holders = NAMES.map(|name| match store.holders(name, by()) {
                Ok(all) => format!("{:?}", all.iter().map(holder).collect::<Vec<_>>()),
                Err(error) => failed(error),
            });
            let history = NAMES.map(|name| {
                let changes = store.history(name, by()).unwrap().into_iter();
                let changes = changes.map(|it| (it.changed_by, it.from, it.to));
                changes.collect::<Vec<_>>()
            });
            format!("{known:?} {usage:?} {holders:?} {history:?}")
        }
    }
}

fn counts(permits: &[Permit]) -> String {
    let counts = permits
        .iter()
        .map(|it| format!("{} of {:?}", it.count, it.semaphore));
    counts.collect::<Vec<_>>().join(", ")
}

fn status(known: RequestStatus) -> String {
    let RequestStatus {
        held,
        permits,
        owner,
        ttl,
        expires_in,
        ..
    } = known;
    format!(
        "held {held}: {} {owner:?} {ttl:?} {}",
        counts(&permits),
        expires_in.is_some()
    )
}

fn swept(store: &dyn PermitStore, sweep: &Sweep) -> String {
    let swept = store.sweep(sweep, by()).unwrap();
    let mut swept: Vec<String> = swept
        .iter()
        .map(|it| {
            format!(
                "{} {:?} {} {:?}",
                it.external_id,
                it.owner,
                counts(&it.permits),
                it.reason
            )
        })
        .collect();
    swept.sort();
    swept.join("; ")
}

/// A request that was given up grants nothing when the server wakes up.
#[test]
fn request_that_comes_too_late_grants_nothing() {
    within(HANG, || {
        let server = RedisServer::start();
        let store = store(&server);
        assert!(store.create("a", 50, by()).unwrap());
        let call = Arc::new(request("late", 1, &[("a", 1)]));
        // Connections are open, and the server's clock is known.
        store.usage(None, by()).unwrap();
        server.pause();
        let late = store.acquire(&call, None, Moment::now() + ms(250));
        assert_eq!(late.unwrap_err().kind(), ErrorKind::Timeout);
        // Past its end, by the server's clock too.
        thread::sleep(ms(100));
        server.resume();
        wait_until(PATIENCE, "the server answers", || {
            store.usage(Some("a"), by()).is_ok()
        });
        assert_eq!(store.status("late", by()).unwrap(), None);
        assert_eq!(store.usage(Some("a"), by()).unwrap()[0].held, 0);
    });
}

/// Fences are at least the server's time, and grow where its clock was set back or the counter was broken.
#[test]
fn fences_grow_over_lost_data() {
    within(HANG, || {
        let server = RedisServer::start();
        let store = store(&server);
        store.create("a", 9, by()).unwrap();
        let counts = "simba:permits:{simba}:counts";
        let mut number = 0;
        let mut fence = || {
            number += 1;
            let request = Arc::new(request(&number.to_string(), 1, &[("a", 1)]));
            granted(store.acquire(&request, None, by()).unwrap()).permits[0].fence
        };
        let first = fence();
        let ahead = first + 1_000_000_000_000;
        server.cli(&["HSET", counts, "fence", &ahead.to_string()]);
        assert_eq!((fence(), fence()), (ahead + 1, ahead + 2));
        for broken in ["9007199254740992", "1e30", "nonsense", "-5", "nan"] {
            server.cli(&["HSET", counts, "fence", broken]);
            assert!(fence() > first, "{broken}");
        }
        server.cli(&["FLUSHALL"]);
        let gone = Arc::new(request("gone", 1, &[("a", 1)]));
        let gone = store.acquire(&gone, None, by());
        assert_eq!(gone.unwrap_err().kind(), ErrorKind::NotFound);
        store.create("a", 9, by()).unwrap();
        assert!(fence() > first);
    });
}

/// A record of another program stops nothing, and a counter that is off is found and mended.
#[test]
fn broken_record_does_not_stop_a_sweep() {
    within(HANG, || {
        let server = RedisServer::start();
        let here = connect(&server.url());
        here.create("a", 9).unwrap();
        for (number, junk) in ["{{{", "5", "[]", "{}", "null", ""].into_iter().enumerate() {
            let id = number.to_string();
            acquired(here.acquire(&want(&id, "a", 1).ttl(ms(100))).unwrap());
            server.cli(&["HSET", "simba:permits:{simba}:requests", &id, junk]);
        }
        acquired(here.acquire(&want("good", "a", 1).ttl(ms(100))).unwrap());
        thread::sleep(ms(150)); // past the end and a quarter of the ttl
        assert_eq!(here.sweep_expired().unwrap().len(), 7);
        // What the broken ones held is not known: the counter is off until it is mended.
        let found = here.check().unwrap();
        assert_eq!((found[0].counter, found[0].permits), (6, 0));
        assert_eq!(here.repair().unwrap().len(), 1);
        assert_eq!(
            (here.check().unwrap(), here.usage("a").unwrap().held),
            (vec![], 0)
        );
    });
}

/// A renewal and a release are served where memory is full.
#[test]
fn full_memory_refuses_acquires_alone() {
    within(HANG, || {
        let server = RedisServer::start();
        let here = connect(&server.url());
        here.create("a", 2).unwrap();
        let guard = here.guard(&want("held", "a", 1), ms(0)).unwrap();
        server.cli(&["CONFIG", "SET", "maxmemory", "1"]);
        let error = here.acquire(&want("more", "a", 1)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        here.renew("held").unwrap();
        guard.release().unwrap();
        server.cli(&["CONFIG", "SET", "maxmemory", "0"]);
        assert_eq!(here.usage("a").unwrap().held, 0);
    });
}

/// The reply to a grant is lost: the same request finds it, from another process too; a guard's is released.
#[test]
fn lost_reply_is_found_by_a_retry() {
    within(HANG, || {
        let server = RedisServer::start();
        let direct = connect(&server.url());
        direct.create("a", 2).unwrap();
        let proxy = Proxy::before(&server.url());
        let here = connect(&proxy.url(&server.url()));
        for round in 0..3 {
            let request = want(&format!("job-{round}"), "a", 1);
            here.usage("a").unwrap();
            proxy.lose_reply_to(request.external_id().unwrap().as_bytes());
            // Its own tries find the grant.
            let told = here.acquire_for(&request, PATIENCE).unwrap();
            let again = direct.acquire(&request).unwrap();
            assert!(
                matches!(again, Acquisition::AlreadyAcquired { .. }),
                "{again:?}"
            );
            assert_eq!(told.into_permits().unwrap(), again.into_permits().unwrap());
            assert_eq!(direct.usage("a").unwrap().held, 1);
            direct.release(request.external_id().unwrap()).unwrap();
        }
        assert!(proxy.lost_replies() > 0);
    });
}

/// How many places processes have in the lines of the semaphores.
fn lines(server: &RedisServer) -> u64 {
    let members = server.cli(&["ZCARD", "simba:permits:{simba}:queue"]);
    members.trim().parse::<u64>().unwrap() - 1
}

/// Two processes of three waiters each: the turn alternates, and a release reaches the process whose turn it is.
#[test]
fn processes_take_turns() {
    within(HANG, || {
        let server = RedisServer::start();
        let processes = [connect(&server.url()), connect(&server.url())];
        processes[0].create("a", 1).unwrap();
        let held = processes[0].guard(&want("held", "a", 1), ms(0)).unwrap();
        let (told, grants) = mpsc::channel();
        let grants: Vec<(usize, Instant)> = thread::scope(|scope| {
            for (number, process) in processes.iter().enumerate() {
                for _ in 0..3 {
                    let told = told.clone();
                    scope.spawn(move || {
                        for _ in 0..20 {
                            let request = PermitRequest::generated().permits("a", 1);
                            let guard = process.guard(&request, PATIENCE).unwrap();
                            told.send((number, Instant::now())).unwrap();
                            thread::sleep(ms(1)); // the others of its process wait by then
                            drop(guard);
                        }
                    });
                }
            }
            // Both stand in line.
            wait_until(PATIENCE, "both processes wait", || lines(&server) == 2);
            drop(held);
            (0..120).map(|_| grants.recv().unwrap()).collect()
        });
        let changes = grants[..40].windows(2).filter(|it| it[0].0 != it[1].0);
        assert!(changes.count() > 30, "{grants:?}");
        // Without messages each would wait for a poll, 100 ms on average. Twenty in a row are a matter of 20 ms, which a
        // busy machine has now and then.
        let quickest = grants.windows(20).map(|it| it[19].1 - it[0].1).min();
        assert!(quickest.unwrap() < ms(1_000), "{quickest:?}");
        wait_until(PATIENCE, "nothing is left of the lines", || {
            lines(&server) == 0
        });
    });
}

/// A process that stands in line and does not try any more loses its place after half a second.
#[test]
fn silent_process_loses_its_place() {
    within(HANG, || {
        let server = RedisServer::start();
        let (silent, here) = (store(&server), connect(&server.url()));
        here.create("a", 1).unwrap();
        acquired(here.acquire(&want("held", "a", 1)).unwrap());
        let waits = Arc::new(request("silent", 1, &[("a", 1)]));
        let (place, stands) = (Standing::default(), Instant::now());
        let outcome = silent.acquire(&waits, Some(&place), by()).unwrap();
        assert!(matches!(outcome, Outcome::Exhausted(_)), "{outcome:?}");
        here.release("held").unwrap();
        // A call that does not wait may overtake; one that waits may not.
        acquired(here.acquire(&want("quick", "a", 1)).unwrap());
        here.release("quick").unwrap();
        acquired(here.acquire_for(&want("next", "a", 1), PATIENCE).unwrap());
        let took = stands.elapsed();
        assert!(took > ms(450) && took < ms(10_000), "{took:?}");
    });
}

/// A call returns within its own timeout and one request limit, leaving the line included.
#[test]
fn giving_up_is_bounded() {
    within(HANG, || {
        let server = RedisServer::start();
        let here = connect(&server.url());
        here.create("a", 1).unwrap();
        acquired(here.acquire(&want("held", "a", 1)).unwrap());
        let began = Instant::now();
        let took = thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                let late = here.acquire_for(&want("late", "a", 1), ms(1_000));
                (late, began.elapsed())
            });
            wait_until(PATIENCE, "it waits", || lines(&server) == 1);
            server.pause();
            let (late, took) = waiting.join().unwrap();
            assert!(late.is_err(), "{late:?}");
            took
        });
        server.resume();
        // Leaving the line without a bound would take another limit of 2 s.
        assert!(took < ms(1_000 + 2_000 + 1_500), "{took:?}");
    });
}

/// What `contend::redis` lists is enough, for waiting processes too.
#[test]
fn listed_rights_suffice() {
    within(HANG, || {
        let server = RedisServer::start();
        let mut user = vec!["ACL", "SETUSER", "app", "on", ">pw", "resetchannels"];
        let rights = "~simba:* &simba:* +eval +evalsha +publish +subscribe +unsubscribe +hello +ping +time +mget +get +set \
             +psetex +del +exists +pttl +pexpire +zadd +zrem +zpopmin +hget +hmget +hset +hsetnx +hdel +hkeys +zscore \
             +zcard +zrange +zrangebyscore +zrangebylex +zscan +persist +xadd +xrange +xdel";
        user.extend(rights.split_whitespace());
        assert_eq!(server.cli(&user).trim(), "OK");
        let url = format!("redis://app:pw@{}/0", server.addr());
        let (here, elsewhere) = (connect(&url), connect(&url));
        here.create("a", 1).unwrap();
        here.set_capacity("a", 2, Some("ops")).unwrap();
        here.set_capacity("a", 1, None).unwrap();
        let held = here.guard(&want("held", "a", 1), ms(0)).unwrap();
        here.renew("held").unwrap();
        thread::scope(|scope| {
            let waiting = scope.spawn(|| elsewhere.guard(&want("next", "a", 1), PATIENCE).unwrap());
            wait_until(PATIENCE, "it waits", || lines(&server) == 1);
            drop(held);
            drop(waiting.join().unwrap());
        });
        let late = here.acquire_for(&want("late", "a", 1), ms(10)).unwrap();
        drop(late);
        here.release("late").unwrap();
        here.sweep_expired().unwrap();
        here.sweep_stale(Duration::from_secs(3600)).unwrap();
        here.repair().unwrap();
        assert_eq!(here.history("a").unwrap().len(), 2);
        assert_eq!(here.delete_history(Duration::ZERO, 10).unwrap(), 2);
        assert_eq!(here.delete_requests(Duration::ZERO, 10).unwrap(), 3);
        assert_eq!(
            (here.holders("a").unwrap(), here.list().unwrap().len()),
            (vec![], 1)
        );
        assert!(here.delete("a").unwrap());
    });
}
