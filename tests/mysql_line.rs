//! Lockers of one factory that wait for the same mutex: they stand in one line, hand on to each other,
//! and leave others their turn.

#![cfg(feature = "mysql")]

mod conformance;
mod mysql_ground;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use conformance::PATIENCE;
use contend::backend::{Attempt, Entry, Hold, Place, Seat};
use contend::{Bell, Factory, Lease, Moment};
use ground::{wait_until, within};
use mysql_ground::{HANG, database, is_free, lease, operator, waiting, wake_name};
use parking_lot::Mutex;

/// Two processes, four lockers each, that lock as fast as they can, until each has had its share.
fn both_make_progress(factories: [Factory; 2], share: u64) {
    let had = [AtomicU64::new(0), AtomicU64::new(0)];
    let inside = AtomicU64::new(0);
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        for (factory, had) in factories.iter().zip(&had) {
            for _ in 0..4 {
                let locker = factory.locker("m").build().unwrap();
                let (inside, over) = (&inside, &over);
                scope.spawn(move || {
                    while !over.load(Ordering::SeqCst) {
                        let guard = locker.lock().unwrap();
                        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                        had.fetch_add(1, Ordering::SeqCst);
                        assert_eq!(inside.fetch_sub(1, Ordering::SeqCst), 1);
                        assert!(guard.unlock().unwrap());
                    }
                });
            }
        }
        wait_until(PATIENCE, "each has had its share", || {
            had.iter().all(|had| had.load(Ordering::SeqCst) >= share)
        });
        over.store(true, Ordering::SeqCst);
    });
    println!("{had:?}");
}

/// The name goes round: a line that has had its turn goes behind those who wait elsewhere.
#[test]
fn the_lockers_of_two_processes_take_turns() {
    within(HANG, || {
        let url = database();
        let factory = || contend::connect(&format!("{url}?ttl=60s&poll_interval=30s")).unwrap();
        both_make_progress([factory(), factory()], 200);
    });
}

/// Without names there is no order between processes, but chance is kind.
#[test]
fn the_lockers_of_two_processes_that_poll_all_get_in() {
    within(HANG, || {
        let url = database();
        let factory = || contend::connect(&format!("{url}?ttl=60s&wakeups=off")).unwrap();
        both_make_progress([factory(), factory()], 20);
    });
}

#[test]
fn a_locker_of_a_process_that_polls_gets_in_between_those_that_are_woken() {
    within(HANG, || {
        let url = database();
        let woken = contend::connect(&format!("{url}?ttl=60s")).unwrap();
        let polls = contend::connect(&format!("{url}?ttl=60s&wakeups=off")).unwrap();
        both_make_progress([woken, polls], 20);
    });
}

#[test]
fn many_lockers_of_a_process_wait_on_one_connection_and_leave_nothing_behind() {
    within(HANG, || {
        let url = database();
        let mut conn = operator(&url);
        let name = wake_name(&url, "m");
        let factory = || contend::connect(&format!("{url}?ttl=60s&transition=30s")).unwrap();
        // Whoever leads holds the name: the lockers wait for it on the server.
        let leader = factory().contend("m").id("leader").build().unwrap();
        leader.start().unwrap();
        wait_until(PATIENCE, "it leads and has the name", || {
            leader.is_owner() && !is_free(&mut conn, &name)
        });
        let lockers = factory();
        let (entered, gave_up) = (AtomicU64::new(0), Mutex::new(Vec::new()));
        thread::scope(|scope| {
            for number in 0..6 {
                let locker = lockers.locker("m").build().unwrap();
                let (entered, gave_up) = (&entered, &gave_up);
                scope.spawn(move || {
                    if number % 2 == 0 {
                        drop(locker.lock().unwrap());
                        entered.fetch_add(1, Ordering::SeqCst);
                    } else {
                        // Gives up in the line: the others are not held up by it.
                        let answer = locker.try_lock_for(Duration::from_secs(2));
                        gave_up.lock().push(answer.map(drop));
                    }
                });
            }
            wait_until(PATIENCE, "those who give up have", || {
                gave_up.lock().len() == 3
            });
            wait_until(PATIENCE, "one waits on the server", || {
                waiting(&mut conn, &url) == 1
            });
            leader.stop().unwrap();
            wait_until(PATIENCE, "the others had the lock", || {
                entered.load(Ordering::SeqCst) == 3
            });
        });
        for answer in gave_up.into_inner() {
            let error = answer.unwrap_err();
            // On a busy machine it may have been refused for want of an answer.
            let says = error.is_transient() || error.to_string().contains("leader");
            assert!(says, "{error:?}");
        }
        wait_until(PATIENCE, "nobody holds the name", || {
            is_free(&mut conn, &name)
        });
    });
}

/// One attempt after the other, as a locker makes them, until it is granted.
fn lock(seat: &mut dyn Seat, bell: &Bell, lease: Lease) -> u64 {
    seat.listen(&bell.waker(), Moment::now() + lease.call_budget())
        .unwrap();
    loop {
        match seat.acquire(Entry::Queue, Moment::now() + lease.call_budget()) {
            Ok(Attempt::Granted(grant)) => return grant.owner.fence(),
            Ok(Attempt::Refused(refusal)) => {
                bell.wait(Moment::now() + refusal.retry_in);
            }
            // A busy machine may cost an answer.
            Err(error) => assert!(error.is_transient(), "{error}"),
        }
    }
}

/// Rule 2: a lease that is not renewed ends, whatever its holder, who is in the same line, does.
#[test]
fn a_holder_that_neither_renews_nor_releases_does_not_block_its_line() {
    within(HANG, || {
        let url = database();
        let lease = lease(1_000, 500);
        let factory = contend::connect(&format!("{url}?ttl=1s&transition=500ms")).unwrap();
        let seat = |id: &str| {
            let place = Place {
                mutex: "m".into(),
                id: id.into(),
                lease,
                hold: Hold::Short,
            };
            factory.backend().unwrap().seat(&place).unwrap()
        };
        let (mut warm, mut held, bell) = (seat("warm"), seat("held"), Bell::new());
        let fence = lock(&mut *warm, &bell, lease);
        let (seats, order) = (["b", "c", "d"].map(seat), AtomicU64::new(0));
        thread::scope(|scope| {
            // It gets the lock, and the name with it, from a line; and is not heard of again.
            let stuck = scope.spawn(|| {
                let fence = lock(&mut *held, &Bell::new(), lease);
                (held, fence)
            });
            assert!(
                warm.release(fence, Moment::now() + lease.call_budget())
                    .is_ok()
            );
            let (mut held, stuck_fence) = stuck.join().unwrap();
            for mut seat in seats {
                let order = &order;
                scope.spawn(move || {
                    let fence = lock(&mut *seat, &Bell::new(), lease);
                    assert!(fence > stuck_fence);
                    let _ = seat.release(fence, Moment::now() + lease.call_budget());
                    order.fetch_add(1, Ordering::SeqCst);
                });
            }
            wait_until(PATIENCE, "all the others had it", || {
                order.load(Ordering::SeqCst) == 3
            });
            let late = held.release(stuck_fence, Moment::now() + lease.call_budget());
            assert!(!late.unwrap(), "it was not its own any more");
        });
    });
}
