//! Wake-ups: what they save, what they cost, and that they never decide anything.

#![cfg(feature = "mysql")]

mod conformance;
mod mysql_ground;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use conformance::{PATIENCE, next, started, wait_for_owner};
use contend::backend::{Attempt, Entry, Hold, Place, Seat};
use contend::{Bell, EventKind, Factory, Moment};
use ground::{wait_until, within};
use mysql::prelude::Queryable;
use mysql_ground::{HANG, database, is_free, ms, operator, waiting, wake_name};

/// Leases and polls so long that only a wake-up can be quick.
fn slow(url: &str) -> Factory {
    contend::connect(&format!("{url}?ttl=60s&transition=30s&poll_interval=30s")).unwrap()
}

#[test]
fn a_clean_stop_hands_over_at_once_whatever_the_lease() {
    within(HANG, || {
        let url = database();
        let factories = [slow(&url), slow(&url)];
        let first = started(&factories[0], "m", "a");
        next(&first.1, EventKind::Acquired);
        let services = [first, started(&factories[1], "m", "b")];
        let mut slowest = Duration::ZERO;
        for turn in 0..20 {
            let (owner, waiter) = (&services[turn % 2], &services[(turn + 1) % 2]);
            wait_for_owner(&waiter.0, owner.0.id());
            let stopped = Instant::now();
            owner.0.stop().unwrap();
            next(&waiter.1, EventKind::Acquired);
            slowest = slowest.max(stopped.elapsed());
            next(&owner.1, EventKind::Released);
            owner.0.start().unwrap();
        }
        // Polling would take up to 30 s, the lease 90 s.
        assert!(slowest < Duration::from_secs(5), "{slowest:?}");
    });
}

#[test]
fn a_waiter_blocks_on_the_server_and_leaves_nothing_behind_when_it_stops() {
    within(HANG, || {
        let url = database();
        let mut conn = operator(&url);
        let name = wake_name(&url, "m");
        let factory = slow(&url);
        let (a, events) = started(&factory, "m", "a");
        next(&events, EventKind::Acquired);
        wait_until(PATIENCE, "the leader holds the name", || {
            !is_free(&mut conn, &name)
        });
        let (b, _events) = started(&factory, "m", "b");
        wait_for_owner(&b, "a");
        wait_until(PATIENCE, "the waiter waits on the server", || {
            waiting(&mut conn, &url) == 1
        });
        for _ in 0..5 {
            b.stop().unwrap();
            wait_until(PATIENCE, "its wait on the server has ended", || {
                waiting(&mut conn, &url) == 0
            });
            b.start().unwrap();
            wait_until(PATIENCE, "it waits again", || waiting(&mut conn, &url) == 1);
        }
        b.stop().unwrap();
        a.stop().unwrap();
        wait_until(PATIENCE, "nobody holds the name", || {
            is_free(&mut conn, &name)
        });
    });
}

/// The row decides: whoever holds the name without it holds nothing, and stops nobody for long.
#[test]
fn a_name_that_is_stuck_costs_a_second_and_not_the_mutex() {
    within(HANG, || {
        let url = database();
        let mut conn = operator(&url);
        let name = wake_name(&url, "m");
        let held: Option<i64> = conn.exec_first("SELECT GET_LOCK(?, 0)", (name,)).unwrap();
        assert_eq!(held, Some(1));
        let began = Instant::now();
        let (a, events) = started(&slow(&url), "m", "a");
        next(&events, EventKind::Acquired);
        assert!(began.elapsed() < Duration::from_secs(10));
        let (b, others) = started(&slow(&url), "m", "b");
        wait_for_owner(&b, "a");
        a.stop().unwrap();
        conn.query_drop("DO RELEASE_ALL_LOCKS()").unwrap();
        next(&others, EventKind::Acquired);
    });
}

#[test]
fn contenders_beyond_the_limit_of_connections_poll_and_have_their_turn() {
    within(HANG, || {
        let url = database();
        let factory = contend::connect(&format!(
            "{url}?ttl=20s&transition=10s&poll_interval=100ms&max_wake_connections=3"
        ))
        .unwrap();
        let mut conn = operator(&url);
        let (first, events) = started(&factory, "m", "first");
        next(&events, EventKind::Acquired);
        let mut others: Vec<_> = (0..5)
            .map(|number| {
                let other = started(&factory, "m", &format!("other-{number}"));
                wait_for_owner(&other.0, "first");
                other
            })
            .collect();
        wait_until(PATIENCE, "two of them wait on the server", || {
            waiting(&mut conn, &url) == 2
        });
        first.stop().unwrap();
        while !others.is_empty() {
            wait_until(PATIENCE, "one of them owns", || {
                others.iter().any(|(service, _)| service.is_owner())
            });
            let owner = others.iter().position(|(service, _)| service.is_owner());
            let (owner, _) = others.swap_remove(owner.unwrap());
            owner.stop().unwrap();
        }
    });
}

#[test]
fn the_same_name_on_another_database_or_table_is_another_mutex() {
    within(HANG, || {
        let (one, two) = (database(), database());
        let factories = [
            slow(&one),
            slow(&two),
            contend::connect(&format!("{one}?table=other&create_table=true")).unwrap(),
        ];
        let services: Vec<_> = factories
            .iter()
            .map(|factory| started(factory, "m", "a"))
            .collect();
        for (_, events) in &services {
            next(events, EventKind::Acquired);
        }
        assert!(services.iter().all(|(service, _)| service.is_owner()));
    });
}

/// A contender that waits reads, and a read takes no lock and waits for none.
#[test]
fn waiting_locks_nothing_and_waits_for_no_lock() {
    within(HANG, || {
        let url = database();
        let factory = contend::connect(&format!(
            "{url}?ttl=2s&transition=1s&wakeups=off&poll_interval=20ms"
        ))
        .unwrap();
        let mut conn = operator(&url);
        conn.query_drop(
            "INSERT INTO simba_mutex VALUES \
             ('m', 1, 99999999999999, 99999999999999, 'somebody', 1)",
        )
        .unwrap();
        let (service, _events) = started(&factory, "m", "a");
        wait_for_owner(&service, "somebody");
        conn.query_drop("BEGIN").unwrap();
        let began = Instant::now();
        let mut looks = operator(&url);
        let selects = |looks: &mut mysql::Conn| -> u64 {
            let row: Option<(String, u64)> = looks
                .query_first("SHOW GLOBAL STATUS LIKE 'Com_select'")
                .unwrap();
            row.unwrap().1
        };
        let before = selects(&mut looks);
        // Held while it looks: an UPDATE of the waiter would hang, and a lock of its own stop this.
        conn.query_drop("SELECT * FROM simba_mutex WHERE mutex = 'm' FOR UPDATE")
            .unwrap();
        assert!(began.elapsed() < ms(5_000));
        wait_until(PATIENCE, "it has looked many times", || {
            selects(&mut looks) > before + 50
        });
        assert!(service.last_error().is_none(), "{:?}", service.last_error());
        let database = url.rsplit('/').next().unwrap();
        let waits: Vec<String> = looks
            .exec(
                "SELECT info FROM information_schema.processlist WHERE db = ? AND info LIKE 'UPDATE%'",
                (database,),
            )
            .unwrap();
        assert!(waits.is_empty(), "{waits:?}");
        conn.query_drop("COMMIT").unwrap();
    });
}

/// What a Locker does with a seat.
fn lock(seat: &mut dyn Seat, bell: &Bell, budget: Duration) -> u64 {
    let mut entry = Entry::Try;
    loop {
        match seat.acquire(entry, Moment::now() + budget) {
            Ok(Attempt::Granted(grant)) => return grant.owner.fence(),
            Ok(Attempt::Refused(refusal)) => {
                if entry == Entry::Try {
                    seat.listen(&bell.waker(), Moment::now() + budget).unwrap();
                    entry = Entry::Queue;
                    continue;
                }
                bell.wait(Moment::now() + refusal.retry_in);
            }
            // A busy machine may cost an answer.
            Err(error) => assert!(error.is_transient(), "{error}"),
        }
    }
}

/// Short holds take no name: the first waiter looks for all, and from then on it is handed on.
#[test]
fn short_holds_under_contention_are_handed_on_and_exclude_each_other() {
    within(HANG, || {
        const THREADS: usize = 6;
        const TURNS: usize = 25;
        let url = database();
        let inside = Arc::new(AtomicUsize::new(0));
        let last = Arc::new(AtomicUsize::new(0));
        let began = Instant::now();
        let threads: Vec<_> = (0..THREADS)
            .map(|number| {
                let factory = slow(&url);
                let (inside, last) = (Arc::clone(&inside), Arc::clone(&last));
                thread::spawn(move || {
                    let place = Place {
                        mutex: "m".into(),
                        id: format!("locker-{number}").into(),
                        lease: factory.lease(),
                        hold: Hold::Short,
                    };
                    let mut seat = factory.backend().unwrap().seat(&place).unwrap();
                    let budget = factory.lease().call_budget();
                    for _ in 0..TURNS {
                        let bell = Bell::new();
                        let fence = lock(&mut *seat, &bell, budget);
                        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                        let before = last.swap(fence as usize, Ordering::SeqCst);
                        assert!(before < fence as usize);
                        thread::sleep(ms(1));
                        assert_eq!(inside.fetch_sub(1, Ordering::SeqCst), 1);
                        assert!(seat.release(fence, Moment::now() + budget).unwrap());
                    }
                })
            })
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
        // By the lease alone one turn would take 90 s.
        assert!(
            began.elapsed() < Duration::from_secs(60),
            "{:?}",
            began.elapsed()
        );
    });
}
