//! Each failure of the seed's summary table: how it breaks in the naive way, and that it does not here.
//! And what else a network, a server and neighbours can do.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use crate::ground::{
    SHORT, acquired, addr_of, connect, exhausted, logged, number, semaphores, through, want,
};
use crate::mysql_ground::{HANG, ms, operator, status};
use contend::semaphore::{Acquisition, PermitRequest, Release, Semaphores};
use contend::{Contact, ErrorKind, Moment};
use mysql::prelude::Queryable;
use testbed::{Direction, MariaDbServer, Proxy, wait_until, within};

const PATIENCE: Duration = Duration::from_secs(30);

/// Naive: everybody reads how much is held, everybody sees room, everybody inserts.
/// Here: the semaphore's row is locked before it is read.
#[test]
fn concurrent_clients_do_not_all_see_the_last_free_permit() {
    within(HANG, || {
        let (first, url) = semaphores(&[("a", 10)]);
        let clients: Vec<Semaphores> = (0..8).map(|_| connect(&url)).collect();
        let start = Barrier::new(16);
        let granted: usize = thread::scope(|scope| {
            let threads: Vec<_> = (0..16)
                .map(|thread| {
                    let (client, start) = (&clients[thread % 8], &start);
                    scope.spawn(move || {
                        start.wait();
                        (0..3)
                            .map(|round| {
                                client.acquire(&want(&format!("{thread}-{round}"), "a", 1))
                            })
                            .filter(|it| matches!(it, Ok(Acquisition::Acquired(_))))
                            .count()
                    })
                })
                .collect();
            threads.into_iter().map(|t| t.join().unwrap()).sum()
        });
        assert_eq!(granted, 10);
        assert_eq!(first.usage("a").unwrap().held, 10);
        assert_eq!(first.check().unwrap(), []);
    });
}

/// Naive: one locks x and waits for y, the other locks y and waits for x.
/// Here: both lock in the order of the names, whatever the order of ids or of the wish.
#[test]
fn opposite_wishes_do_not_lock_each_other_out() {
    within(HANG, || {
        // A server of its own: it counts the deadlocks of everybody.
        let server = MariaDbServer::start();
        let url = server.create_database("order");
        let clients = [&url; 2].map(|url| connect(url));
        clients[0].create_tables().unwrap();
        // The ids run against the names.
        for name in ["z", "y", "x"] {
            clients[0].create(name, 1_000).unwrap();
        }
        thread::scope(|scope| {
            for (number, client) in clients.iter().enumerate() {
                scope.spawn(move || {
                    for round in 0..100 {
                        let id = format!("{number}-{round}");
                        let names = if number == 0 {
                            ["x", "y", "z"]
                        } else {
                            ["z", "y", "x"]
                        };
                        let request = names
                            .iter()
                            .fold(PermitRequest::new(&*id), |it, name| it.permits(*name, 1));
                        acquired(client.acquire(&request).unwrap());
                        assert_eq!(client.release(&id).unwrap(), Release::Released);
                    }
                });
            }
        });
        // Not a status variable of MySQL.
        let deadlocks =
            "SELECT count FROM information_schema.innodb_metrics WHERE name = 'lock_deadlocks'";
        assert_eq!(number(&url, deadlocks), 0);
        assert_eq!(clients[0].check().unwrap(), []);
    });
}

/// Naive: the answer to COMMIT is lost, the client asks again, and holds two permits.
/// Here: the external id is found, and the grant is the one that there is.
#[test]
fn a_lost_reply_to_the_commit_and_the_retry_are_one_grant() {
    within(HANG, || {
        let (direct, url) = semaphores(&[("a", 1)]);
        let proxy = Proxy::to(addr_of(&url));
        let client = connect(&through(&url, proxy.addr()));
        client.usage("a").unwrap();
        // Slow enough to be caught in the act: from here on the server's answers do not arrive.
        let mut conn = operator(&url);
        conn.query_drop(
            "CREATE TRIGGER slow BEFORE INSERT ON contend_permit_request FOR EACH ROW \
             SET NEW.owner = IF(SLEEP(0.7), NULL, NEW.owner)",
        )
        .unwrap();
        let permits = thread::scope(|scope| {
            let ask = || client.acquire(&want("job", "a", 1));
            let asking = scope.spawn(ask);
            wait_until(PATIENCE, "the transaction is being written", || {
                number(&url, WRITING) > 0
            });
            proxy.black_hole(Direction::ToClient);
            wait_until(PATIENCE, "it is committed", || {
                direct.usage("a").unwrap().held == 1
            });
            proxy.cut();
            proxy.pass();
            // The library's retry may have met the cut; the caller's then has the answer.
            acquired(asking.join().unwrap().or_else(|_| ask()).unwrap())
        });
        conn.query_drop("DROP TRIGGER slow").unwrap();
        assert_eq!(number(&url, "SELECT COUNT(*) FROM contend_permit"), 1);
        let fence = number(&url, "SELECT id FROM contend_permit");
        assert_eq!(permits[0].fence, fence as u64);
        assert_eq!(direct.usage("a").unwrap().held, 1);
        // And the release, which is one statement.
        proxy.lose_reply_to(b"UPDATE `contend_permit_request`");
        assert_eq!(client.release("job").unwrap(), Release::Released);
        assert_eq!(proxy.lost_replies(), 1);
        assert_eq!(number(&url, "SELECT used FROM contend_semaphore"), 0);
        assert_eq!(direct.check().unwrap(), []);
    });
}

const WRITING: &str = "SELECT COUNT(*) FROM information_schema.processlist \
     WHERE info LIKE 'INSERT INTO `contend_permit_request`%'";

/// Naive: permits are inserted one by one, and the second fails: the first stays.
/// Here: one transaction, all or nothing.
#[test]
fn a_failure_in_the_middle_leaves_nothing_behind() {
    within(HANG, || {
        let (semaphores, url) = semaphores(&[("a", 5), ("b", 5)]);
        let mut conn = operator(&url);
        conn.query_drop(
            "CREATE TRIGGER broken BEFORE INSERT ON contend_permit FOR EACH ROW IF NEW.count = 2 THEN \
             SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'no room on disk'; END IF",
        )
        .unwrap();
        let request = want("job", "a", 1).permits("b", 2);
        let error = semaphores.acquire(&request).unwrap_err();
        assert!(error.to_string().contains("no room on disk"), "{error}");
        assert!(error.to_string().contains("\"job\""), "{error}");
        for table in ["contend_permit", "contend_permit_request"] {
            assert_eq!(number(&url, &format!("SELECT COUNT(*) FROM {table}")), 0);
        }
        assert_eq!(number(&url, "SELECT SUM(used) FROM contend_semaphore"), 0);
        conn.query_drop("DROP TRIGGER broken").unwrap();
        acquired(semaphores.acquire(&request).unwrap());
    });
}

/// Naive: a client crashes, and its permit is gone for good.
/// Here: its ttl runs out by the server's clock, and a sweep, or whoever needs it, takes it back, once.
#[test]
fn what_a_crashed_client_held_comes_back() {
    within(HANG, || {
        let (semaphores, url) = semaphores(&[("a", 1)]);
        let crashed = connect(&url);
        acquired(crashed.acquire(&want("job", "a", 1).ttl(SHORT)).unwrap());
        drop(crashed);
        exhausted(semaphores.acquire(&want("next", "a", 1)).unwrap());
        let mut swept = Vec::new();
        wait_until(PATIENCE, "the sweep finds it", || {
            swept.extend(semaphores.sweep_expired().unwrap());
            !swept.is_empty()
        });
        assert_eq!(&*swept[0].external_id, "job");
        let next = want("crashed too", "a", 1).ttl(SHORT);
        acquired(semaphores.acquire(&next).unwrap());
        wait_until(PATIENCE, "an acquire takes it back", || {
            let answer = semaphores.acquire(&want("last", "a", 1)).unwrap();
            matches!(answer, Acquisition::Acquired(_))
        });
        let logged = logged("the permits of \"crashed too\" back: Expired");
        assert_eq!(logged.len(), 1);
        assert_eq!(logged[0].0, "contend::semaphore");
    });
}

/// Naive: a holder that slept through its ttl goes on writing beside the next one.
/// Here: its fence is smaller than the next one's, and what they write to can tell.
#[test]
fn a_stale_holder_has_the_smaller_fence() {
    within(HANG, || {
        let (semaphores, _) = semaphores(&[("a", 1)]);
        let stale = acquired(semaphores.acquire(&want("one", "a", 1).ttl(SHORT)).unwrap());
        wait_until(PATIENCE, "it is swept", || {
            !semaphores.sweep_expired().unwrap().is_empty()
        });
        let fresh = acquired(semaphores.acquire(&want("two", "a", 1)).unwrap());
        let mut highest = 0;
        let mut write = |fence: u64| {
            highest = highest.max(fence);
            fence == highest
        };
        assert!(write(fresh[0].fence));
        assert!(!write(stale[0].fence));
    });
}

/// Naive: every request that waits for the row holds a connection, and the pool is empty.
/// Here: those of one process wait in memory and share a transaction.
#[test]
fn many_threads_on_one_semaphore_need_few_connections() {
    within(HANG, || {
        let (direct, url) = semaphores(&[("a", 1_000), ("other", 1)]);
        let proxy = Proxy::to(addr_of(&url));
        let url = format!("{}?pool_size=3", through(&url, proxy.addr()));
        let client = connect(&url);
        let mut blocker = operator(&url.replace("?pool_size=3", ""));
        let before = proxy.live();
        blocker.query_drop("BEGIN").unwrap();
        blocker
            .query_drop("SELECT * FROM contend_semaphore WHERE name = 'a' FOR UPDATE")
            .unwrap();
        thread::scope(|scope| {
            let waiting: Vec<_> = (0..64)
                .map(|thread| {
                    let client = &client;
                    scope.spawn(move || client.acquire(&want(&format!("{thread}"), "a", 1)))
                })
                .collect();
            thread::sleep(ms(500)); // so that they do wait
            // Another semaphore is not held up.
            let start = Instant::now();
            acquired(client.acquire(&want("elsewhere", "other", 1)).unwrap());
            assert!(start.elapsed() < ms(10_000), "{:?}", start.elapsed());
            assert!(proxy.live() <= before + 3, "{} connections", proxy.live());
            blocker.query_drop("COMMIT").unwrap();
            for thread in waiting {
                acquired(thread.join().unwrap().unwrap());
            }
        });
        assert_eq!(direct.usage("a").unwrap().held, 64);
        assert_eq!(direct.check().unwrap(), []);
    });
}

/// Naive: the connection is reset, and the operation fails.
/// Here: it is tried again, which the external id makes safe.
#[test]
fn a_lost_connection_and_a_lock_held_for_long_are_tried_again() {
    within(HANG, || {
        let (direct, url) = semaphores(&[("a", 100)]);
        let proxy = Proxy::to(addr_of(&url));
        let client = connect(&through(&url, proxy.addr()));
        let mut at_once = 0;
        for round in 0..6 {
            wait_until(PATIENCE, "it is connected", || client.usage("a").is_ok());
            if round % 2 == 0 {
                proxy.cut()
            } else {
                proxy.reset()
            }
            let id = format!("{round}");
            // On a busy machine the cut may have hit connections that were just being opened, and with
            // them all three tries: then the caller repeats it.
            let mut calls = 0;
            wait_until(PATIENCE, "it is acquired", || {
                calls += 1;
                let answer = client.acquire(&want(&id, "a", 1));
                answer.is_ok_and(|it| it.into_permits().is_ok())
            });
            at_once += usize::from(calls == 1);
            proxy.cut();
            wait_until(PATIENCE, "it is released", || client.release(&id).is_ok());
            assert_eq!(client.release(&id).unwrap(), Release::AlreadyReleased);
        }
        assert!(
            at_once >= 3,
            "{at_once} of 6 were tried again by themselves"
        );
        // Longer than a lock wait, shorter than three.
        let mut blocker = operator(&url);
        blocker.query_drop("BEGIN").unwrap();
        blocker
            .query_drop("SELECT * FROM contend_semaphore WHERE name = 'a' FOR UPDATE")
            .unwrap();
        thread::scope(|scope| {
            let waiting = scope.spawn(|| client.acquire(&want("slow", "a", 1)));
            thread::sleep(ms(1_600)); // a lock wait that runs out is the subject
            blocker.query_drop("COMMIT").unwrap();
            acquired(waiting.join().unwrap().unwrap());
        });
        assert_eq!(direct.usage("a").unwrap().held, 1);
        assert_eq!(direct.check().unwrap(), []);
    });
}

#[test]
fn a_lock_that_is_never_given_up_ends_in_a_clear_error() {
    within(HANG, || {
        let (direct, url) = semaphores(&[("a", 1)]);
        let client = connect(&url);
        let mut blocker = operator(&url);
        blocker.query_drop("BEGIN").unwrap();
        blocker
            .query_drop("SELECT * FROM contend_semaphore WHERE name = 'a' FOR UPDATE")
            .unwrap();
        let start = Moment::now();
        let error = client.acquire(&want("job", "a", 1)).unwrap_err();
        // Bug 3 of the second edition: the connection was given up before the server gave up the wait.
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
        assert!(error.to_string().contains("1205"), "{error}");
        assert!(
            !error.to_string().contains("may have been granted"),
            "{error}"
        );
        assert!(error.to_string().contains("\"job\""), "{error}");
        assert!(Moment::now() - start < Duration::from_secs(20));
        blocker.query_drop("COMMIT").unwrap();
        // Nothing was written, the id is still good.
        acquired(direct.acquire(&want("job", "a", 1)).unwrap());
    });
}

#[test]
fn a_guard_dropped_while_the_server_is_away_is_released_when_it_is_back() {
    within(HANG, || {
        let (direct, url) = semaphores(&[("a", 1)]);
        let proxy = Proxy::to(addr_of(&url));
        let client = connect(&through(&url, proxy.addr()));
        let guard = client.guard(&want("job", "a", 1), ms(0)).unwrap();
        proxy.refuse();
        proxy.cut();
        drop(guard);
        assert_eq!(direct.usage("a").unwrap().held, 1);
        proxy.pass();
        wait_until(PATIENCE, "it is released", || {
            direct.usage("a").unwrap().held == 0
        });
    });
}

/// An external id that somebody else is just inserting blocks whoever wants it, and with it the
/// transaction that it shares with its neighbours.
#[test]
fn one_request_that_blocks_does_not_fail_its_neighbours() {
    within(HANG, || {
        let (direct, url) = semaphores(&[("a", 1_000)]);
        let client = connect(&url);
        let mut blocker = operator(&url);
        blocker.query_drop("BEGIN").unwrap();
        blocker
            .query_drop(
                "INSERT INTO contend_permit_request (external_id, token, state) VALUES ('bad', 1, 'RELEASED')",
            )
            .unwrap();
        thread::scope(|scope| {
            let bad = scope.spawn(|| client.acquire(&want("bad", "a", 1)));
            let neighbours: Vec<_> = (0..16)
                .map(|number| {
                    let client = &client;
                    let request = want(&format!("good-{number}"), "a", 1);
                    scope.spawn(move || client.acquire_for(&request, PATIENCE))
                })
                .collect();
            for neighbour in neighbours {
                acquired(neighbour.join().unwrap().unwrap());
            }
            blocker.query_drop("COMMIT").unwrap();
            match bad.join().unwrap() {
                Ok(answer) => assert_eq!(answer, Acquisition::AlreadyReleased),
                Err(error) => assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}"),
            }
        });
        assert_eq!(direct.usage("a").unwrap().held, 16);
        assert_eq!(direct.check().unwrap(), []);
    });
}

#[test]
fn an_uncontended_acquire_and_release_need_few_statements() {
    within(HANG, || {
        let server = MariaDbServer::start();
        let url = server.create_database("statements");
        let client = connect(&url);
        client.create_tables().unwrap();
        client.create("a", 100).unwrap();
        let mut conn = operator(&url);
        let names = [
            "begin",
            "commit",
            "insert",
            "rollback",
            "select",
            "set_option",
            "update",
            "update_multi",
        ];
        let mut counts = || names.map(|name| status(&mut conn, &format!("Com_{name}")));
        let mut difference = |work: &dyn Fn()| -> Vec<(&str, u64)> {
            let before = counts();
            work();
            let spent = counts().into_iter().zip(before);
            let spent = names
                .into_iter()
                .zip(spent.map(|(after, before)| after - before));
            spent.filter(|(_, count)| *count != 0).collect()
        };
        client.usage("a").unwrap();
        let spent = difference(&|| drop(acquired(client.acquire(&want("job", "a", 1)).unwrap())));
        println!("acquire: {spent:?}");
        let expected = [
            ("begin", 1),
            ("commit", 1),
            ("insert", 2),
            ("select", 2),
            ("set_option", 4),
            ("update", 1),
        ];
        assert_eq!(spent, expected);
        let spent = difference(&|| {
            client.release("job").unwrap();
        });
        println!("release: {spent:?}");
        assert_eq!(
            spent,
            [("select", 1), ("set_option", 1), ("update_multi", 1)]
        );
    });
}

#[test]
fn an_uncontended_acquire_takes_two_round_trips_and_a_release_one() {
    within(HANG, || {
        let (_, url) = semaphores(&[("a", 100)]);
        let (addr, requests) = count_requests(addr_of(&url));
        let client = connect(&format!("{}?pool_size=1", through(&url, addr)));
        let guard = || client.guard(&PermitRequest::generated().permits("a", 1), ms(0));
        drop(guard().unwrap()); // connected, and the first renewal is ten seconds away
        let counts = || requests.load(Ordering::SeqCst);
        let before = counts();
        let held = guard().unwrap();
        let acquired = counts();
        held.release().unwrap();
        println!(
            "round trips: {} to acquire, {} to release",
            acquired - before,
            counts() - acquired
        );
        assert_eq!((acquired - before, counts() - acquired), (2, 1));
    });
}

/// An address that leads to `to`, and how many requests came over it: bytes of a client after bytes of the
/// server, or the first ones.
pub fn count_requests(to: SocketAddr) -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    let requests = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&requests);
    thread::spawn(move || {
        for client in listener.incoming() {
            let (client, server) = (client.unwrap(), TcpStream::connect(to).unwrap());
            for stream in [&client, &server] {
                stream.set_nodelay(true).unwrap();
            }
            let asked = Arc::new(AtomicBool::new(false));
            let pump = |mut from: TcpStream, mut to: TcpStream, on_bytes: Box<dyn Fn() + Send>| {
                thread::spawn(move || {
                    let mut bytes = [0; 65_536];
                    while let Ok(length @ 1..) = from.read(&mut bytes) {
                        on_bytes();
                        if to.write_all(&bytes[..length]).is_err() {
                            return;
                        }
                    }
                });
            };
            let (count, asks) = (Arc::clone(&count), Arc::clone(&asked));
            pump(
                client.try_clone().unwrap(),
                server.try_clone().unwrap(),
                Box::new(move || {
                    if !asks.swap(true, Ordering::SeqCst) {
                        count.fetch_add(1, Ordering::SeqCst);
                    }
                }),
            );
            pump(
                server,
                client,
                Box::new(move || asked.store(false, Ordering::SeqCst)),
            );
        }
    });
    (addr, requests)
}

/// A program that only uses semaphores was told that all is fine while its server was dead: failed calls did not count.
#[test]
fn a_server_that_hangs_shows_in_the_health_of_a_program_that_only_uses_semaphores() {
    within(HANG, || {
        let (_, url) = semaphores(&[("a", 1)]);
        let proxy = Proxy::to(addr_of(&url));
        let factory = contend::connect(&through(&url, proxy.addr())).unwrap();
        let here = factory.semaphores().unwrap();
        let is_fine = || assert!(factory.health().is_fine(), "{:?}", factory.health());
        let guard = here.guard(&want("held", "a", 1).ttl(SHORT), ms(0)).unwrap();
        is_fine();
        // What was answered is no trouble.
        exhausted(here.acquire(&want("other", "a", 1)).unwrap());
        is_fine();
        let missing = here.holders("none").unwrap_err();
        assert_eq!(missing.kind(), ErrorKind::NotFound);
        is_fine();
        let in_use = here.delete("a").unwrap_err();
        assert_eq!(in_use.kind(), ErrorKind::InvalidState);
        is_fine();

        proxy.black_hole(Direction::ToClient);
        // By a renewal: nobody else asks.
        wait_until(PATIENCE, "it fails", || {
            let health = factory.health();
            let Contact::Failing { lasting, .. } = health.contact else {
                return false;
            };
            assert!(lasting >= ms(100), "a call that hung: {health:?}");
            assert!(Some(lasting) <= health.last_contact, "{health:?}");
            true
        });
        proxy.pass();
        wait_until(PATIENCE, "it is fine again", || {
            here.usage("a").is_ok() && factory.health().is_fine()
        });
        drop(guard);
    });
}
