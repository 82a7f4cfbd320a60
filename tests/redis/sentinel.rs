//! A master that sentinels watch. (Failovers under load: the campaign.)

use std::thread;

use contend::backend::OnRefusal;
use contend::{ErrorKind, Moment, connect};
use testbed::{RedisSentinel, RedisServer, wait_until, within};

use crate::driven::{Driven, HANG, PATIENCE, ms, soon};

/// A master that dies in silence, as with its machine, closes no connection. One call in vain is enough to
/// know that the idle ones are of no use: each of them would cost another one.
#[test]
fn silent_death_of_a_master_costs_one_call() {
    within(HANG, || {
        let sentinel = RedisSentinel::start();
        let factory = connect(&format!("{}/0?ttl=3s&transition=2s", sentinel.url())).unwrap();
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
            let by = Moment::now() + ms(1_000);
            let Err(error) = one.raw.acquire(OnRefusal::Leave, by) else {
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
fn wrong_sentinels_are_named() {
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
