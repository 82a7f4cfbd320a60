//! A master that sentinels watch, and its failover.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use contend::{ErrorKind, EventKind, Lease, connect};
use testbed::{RedisSentinel, RedisServer, wait_until, within};

use crate::conformance::{next, started, wait_for_owner};
use crate::driven::{Driven, HANG, PATIENCE, ms, soon};

fn url(sentinel: &RedisSentinel) -> String {
    format!("{}/0?ttl=3s&transition=2s", sentinel.url())
}

/// Replication is asynchronous: only the fence is sure, and it must grow.
#[test]
fn a_failover_needs_no_restart_and_fences_grow() {
    within(HANG, || {
        let sentinel = RedisSentinel::start();
        let factory = connect(&url(&sentinel)).unwrap();
        let (leader, events) = started(&factory, "m", "leader");
        let first = next(&events, EventKind::Acquired).fence().unwrap();
        let (waiter, waiting) = started(&factory, "m", "waiter");
        wait_for_owner(&waiter, "leader");
        let stop = Arc::new(AtomicBool::new(false));
        let load = {
            let (stop, factory) = (Arc::clone(&stop), factory.clone());
            thread::spawn(move || {
                let mut fences = Vec::new();
                let mut failed = 0;
                let mut longest = ms(0);
                let mut last = Instant::now();
                let lease = Lease::new(ms(3_000), ms(2_000)).unwrap();
                let mut one = Driven::with(&factory, "load", "load", lease);
                while !stop.load(Ordering::Relaxed) {
                    let by = contend::Moment::now() + ms(750);
                    match one.raw.acquire(contend::backend::OnRefusal::Leave, by) {
                        Ok(contend::backend::Attempt::Granted(grant)) => {
                            let fence = grant.owner.fence();
                            longest = longest.max(last.elapsed());
                            last = Instant::now();
                            fences.push(fence);
                            let _ = one.raw.release(fence, by);
                        }
                        _ => {
                            failed += 1;
                            thread::sleep(ms(20));
                        }
                    }
                }
                (fences, failed, longest)
            })
        };
        let before = sentinel.master();
        sentinel.server(before).kill();
        wait_until(PATIENCE, "another server is the master", || {
            sentinel.master() != before
        });
        let began = Instant::now();
        wait_until(PATIENCE, "one of them leads", || {
            leader.is_owner() || waiter.is_owner()
        });
        println!("{:?} after the failover somebody leads", began.elapsed());
        let owner = if leader.is_owner() { &leader } else { &waiter };
        let fence = owner.fence().unwrap();
        assert!(fence >= first, "{fence} after {first}");
        thread::sleep(ms(500));
        stop.store(true, Ordering::Relaxed);
        let (fences, failed, longest) = load.join().unwrap();
        println!(
            "load: {} locks, {failed} failed calls, longest time without a lock {longest:?}",
            fences.len()
        );
        assert!(
            fences.windows(2).all(|pair| pair[0] < pair[1]),
            "fences grow"
        );
        drop(waiting);

        // By command, with the old master alive: what says READONLY is dropped.
        wait_until(PATIENCE, "the old master is back", || {
            if !sentinel.server(before).is_running() {
                sentinel.server(before).start();
            }
            true
        });
        sentinel.wait_whole();
        sentinel.fail_over();
        // The old one takes writes until it is told, and what it acknowledged until then is lost.
        let mut one = Driven::at(&factory, "after", "one");
        wait_until(PATIENCE, "it serves on the new master", || {
            let by = contend::Moment::now() + ms(750);
            let attempt = one.raw.acquire(contend::backend::OnRefusal::Leave, by);
            let master = sentinel.server(sentinel.master());
            matches!(attempt, Ok(contend::backend::Attempt::Granted(_)))
                && master.cli(&["GET", "simba:{after}"]).trim() == "one"
        });
    });
}

/// A master that dies in silence, as with its machine, closes no connection. One call in vain is enough to
/// know that the idle ones are of no use: each of them would cost another one.
#[test]
fn a_master_that_died_in_silence_costs_one_call_and_not_one_for_each_connection() {
    within(HANG, || {
        let sentinel = RedisSentinel::start();
        let factory = connect(&url(&sentinel)).unwrap();
        let idle = || factory.backend().unwrap().condition().pool.unwrap().idle;
        wait_until(PATIENCE, "four connections are idle", || {
            thread::scope(|scope| {
                for number in 0..6 {
                    let mut one = Driven::at(&factory, &format!("m{number}"), "a");
                    scope.spawn(move || {
                        let fence = one.own();
                        one.release(fence);
                    });
                }
            });
            idle() >= 4
        });
        let before = sentinel.master();
        sentinel.server(before).pause();
        sentinel.wait_until("another server is the master", || {
            sentinel.agreed_master().is_some_and(|now| now != before)
        });
        assert!(idle() >= 4, "{}", idle());
        let mut one = Driven::at(&factory, "m", "a");
        let mut in_vain = 0;
        wait_until(PATIENCE, "it is served by the new master", || {
            let by = contend::Moment::now() + ms(1_000);
            let Err(error) = one.raw.acquire(contend::backend::OnRefusal::Leave, by) else {
                return true;
            };
            // What was not sent says why there was no connection.
            in_vain += u32::from(!error.is_not_sent());
            false
        });
        assert_eq!(in_vain, 1);
    });
}

#[test]
fn what_is_wrong_with_sentinels_is_said() {
    within(HANG, || {
        let server = RedisServer::start();
        let error = |url: String| {
            let factory = connect(&url).unwrap();
            factory.backend().unwrap().ping(soon()).unwrap_err()
        };
        let not_one = error(format!("redis+sentinel://{}/mymaster", server.addr()));
        assert_eq!(not_one.kind(), ErrorKind::Misconfigured, "{not_one:?}");
        assert!(
            not_one.to_string().contains("is not a sentinel"),
            "{not_one}"
        );
        server.kill();
        let away = error(format!("redis+sentinel://{}/mymaster", server.addr()));
        assert_eq!(away.kind(), ErrorKind::Unreachable, "{away:?}");
        let sentinel = RedisSentinel::start();
        let address = sentinel.sentinels()[0].addr();
        let unknown = error(format!("redis+sentinel://{address}/nobody"));
        assert_eq!(unknown.kind(), ErrorKind::Misconfigured, "{unknown:?}");
        assert!(unknown.to_string().contains("\"nobody\""), "{unknown}");
        // One of them is away: the others know.
        sentinel.sentinels()[0].kill();
        let factory = connect(&sentinel.url()).unwrap();
        factory.backend().unwrap().ping(soon()).unwrap();
    });
}
