//! What a network, a MySQL server and its other users can do to a guard.

use std::thread;
use std::time::{Duration, Instant};

use crate::ground::{HOUR, PATIENCE, SHORT, connect, locked, on_mysql, want};
use crate::mysql_ground::ms;
use contend::ErrorKind;
use testbed::{Direction, Proxy, wait_until};

/// A permit is granted to another holder only after the first one, which could not renew it, has stopped believing and
/// had a quarter of the ttl to stop in.
#[test]
fn unrenewed_holder_stops_believing_first() {
    on_mysql(&[("a", 1)], |here, url| {
        let proxy = Proxy::before(&url);
        let cut_off = connect(&proxy.url(&url));
        let guard = cut_off.guard(&want("job", "a", 1).ttl(SHORT), ms(0));
        let guard = guard.unwrap();
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

/// A locked request, acquires on a locked semaphore and a release that hangs: none of them holds up a renewal.
#[test]
fn locked_rows_hold_up_no_other_renewal() {
    on_mysql(&[("a", 10), ("b", 10)], |here, url| {
        let hold = |id, name| here.guard(&want(id, name, 1).ttl(SHORT), ms(0)).unwrap();
        let (healthy, stuck) = (hold("healthy", "a"), hold("stuck", "a"));
        let dropped = hold("dropped", "b");
        let request = locked(&url, "permit_request", "external_id = 'stuck'");
        let semaphore = locked(&url, "semaphore", "name = 'b'");
        thread::scope(|scope| {
            scope.spawn(move || drop(dropped));
            for number in 0..24 {
                let request = want(&format!("b{number}"), "b", 1);
                scope.spawn(|| drop(here.acquire_for(&{ request }, SHORT)));
            }
            let start = Instant::now();
            while start.elapsed() < SHORT * 2 {
                assert!(healthy.is_valid(), "lost after {:?}", start.elapsed());
                thread::sleep(ms(50));
            }
            assert!(!stuck.is_valid(), "it could not be renewed");
            drop((request, semaphore));
        });
        assert!(healthy.is_valid());
        healthy.release().unwrap();
    });
}

#[test]
fn dropped_guard_is_released_later() {
    on_mysql(&[("a", 1)], |here, url| {
        let guard = here.guard(&want("job", "a", 1).ttl(HOUR), ms(0)).unwrap();
        let row = locked(&url, "semaphore", "TRUE");
        let start = Instant::now();
        drop(guard);
        let took = start.elapsed();
        // A request limit, and what a busy machine adds. Without a bound it waits for the row.
        assert!(took < ms(2_000 + 1_500), "{took:?}");
        drop(row);
        wait_until(PATIENCE, "it is released", || {
            here.usage("a").unwrap().held == 0
        });
        assert_eq!(here.check().unwrap(), []);
    });
}

/// Releases that cannot be made are tried again in the background, where renewals are made, too.
#[test]
fn waiting_releases_delay_no_renewal() {
    on_mysql(&[("a", 300), ("b", 1)], |_, url| {
        let here = connect(&format!("{url}?ttl=3s&transition=1s"));
        let other = here.guard(&want("other", "b", 1).ttl(ms(3_000)), ms(0));
        let other = other.unwrap();
        let guards = (0..300).map(|number| want(&format!("job-{number}"), "a", 1).ttl(HOUR));
        let guards: Vec<_> = guards.map(|it| here.guard(&it, ms(0)).unwrap()).collect();
        let row = locked(&url, "semaphore", "name = 'a'");
        thread::scope(|scope| {
            for guard in guards {
                scope.spawn(|| drop(guard));
            }
            let end = Instant::now() + ms(8_000);
            while Instant::now() < end {
                assert!(
                    other.is_valid(),
                    "lost {:?} before the end",
                    end - Instant::now()
                );
                thread::sleep(ms(10));
            }
        });
        drop(row);
    });
}

/// A client that vanishes between the two round trips of an acquire, with its connection still open, keeps the
/// semaphore locked for seconds.
#[test]
fn vanished_client_holds_locks_for_seconds() {
    on_mysql(&[("a", 2)], |direct, url| {
        let proxy = Proxy::before(&url);
        let client = connect(&proxy.url(&url));
        client.usage("a").unwrap();
        let row = locked(&url, "semaphore", "TRUE");
        thread::scope(|scope| {
            let vanishing = scope.spawn(|| client.acquire(&want("vanishing", "a", 1)));
            thread::sleep(ms(300)); // its first round trip waits for the row
            proxy.black_hole(Direction::ToServer);
            drop(row);
            let start = Instant::now();
            let guard = direct.guard(&want("next", "a", 2), PATIENCE).unwrap();
            let took = start.elapsed();
            assert!(took < Duration::from_secs(30));
            drop(guard);
            proxy.pass();
            proxy.cut();
            drop(vanishing.join().unwrap());
        });
    });
}

/// Belief that ended does not come back with a late reply.
#[test]
fn late_renewal_does_not_revive_a_guard() {
    on_mysql(&[("a", 1)], |here, url| {
        let proxy = Proxy::before(&url);
        let client = connect(&proxy.url(&url));
        let guard = client.guard(&want("job", "a", 1).ttl(SHORT), ms(0));
        let guard = guard.unwrap();
        proxy.black_hole(Direction::ToClient);
        wait_until(PATIENCE, "its belief ends", || !guard.is_valid());
        proxy.pass();
        // Some of its renewals came through.
        assert!(here.status("job").unwrap().unwrap().held);
        assert!(!guard.is_valid());
        assert_eq!(guard.release().unwrap_err().kind(), ErrorKind::Lost);
        wait_until(PATIENCE, "it is released", || {
            here.usage("a").unwrap().held == 0
        });
    });
}
