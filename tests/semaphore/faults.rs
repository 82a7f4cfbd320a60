//! What a network, a MySQL server and its other users can do to an acquire. The first five are rows of the seed's
//! summary: how each breaks in the naive way, and that it does not here.

use std::thread;
use std::time::{Duration, Instant};

use crate::ground::{
    PATIENCE, SHORT, acquired, connect, exhausted, locked, number, on_mysql, want,
};
use crate::mysql_ground::{HANG, ms, operator, status};
use contend::semaphore::{Acquisition, PermitRequest, Release};
use contend::{Contact, ErrorKind};
use mysql::prelude::Queryable;
use testbed::{Direction, MariaDbServer, Proxy, wait_until, within};

/// Naive: one locks x and waits for y, the other locks y and waits for x.
/// Here: both lock in the order of the names, whatever the order of ids or of the request.
#[test]
fn opposite_requests_do_not_deadlock() {
    within(HANG, || {
        // A server of its own: it counts the deadlocks of all.
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
                        let names = [["x", "y", "z"], ["z", "y", "x"]][number];
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
fn lost_commit_reply_grants_once() {
    on_mysql(&[("a", 1)], |direct, url| {
        let proxy = Proxy::before(&url);
        let client = connect(&proxy.url(&url));
        client.usage("a").unwrap();
        proxy.lose_reply_to(b"INSERT INTO `contend_permit_request`");
        // The library's own retry finds the grant.
        let granted = client.acquire_for(&want("job", "a", 1), PATIENCE);
        let permits = granted.unwrap().into_permits().unwrap();
        assert_eq!(proxy.lost_replies(), 1);
        assert_eq!(number(&url, "SELECT COUNT(*) FROM contend_permit"), 1);
        let fence = number(&url, "SELECT id FROM contend_permit");
        assert_eq!(permits[0].fence, fence as u64);
        // And the release, which is one statement.
        proxy.lose_reply_to(b"UPDATE `contend_permit_request`");
        assert_eq!(client.release("job").unwrap(), Release::Released);
        assert_eq!(proxy.lost_replies(), 2);
        assert_eq!(direct.usage("a").unwrap().held, 0);
        assert_eq!(direct.check().unwrap(), []);
    });
}

/// Naive: permits are inserted one by one, and the second fails: the first stays.
/// Here: one transaction, all or nothing.
#[test]
fn failure_in_the_middle_leaves_nothing() {
    on_mysql(&[("a", 5), ("b", 5)], |semaphores, url| {
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

/// Naive: each request that waits for the row holds a connection, and the pool is empty.
/// Here: those of one process wait in memory and share a transaction.
#[test]
fn many_threads_need_few_connections() {
    on_mysql(&[("a", 1_000), ("other", 1)], |direct, url| {
        let proxy = Proxy::before(&url);
        let client = connect(&format!("{}?pool_size=3", proxy.url(&url)));
        let row = locked(&url, "semaphore", "name = 'a'");
        thread::scope(|scope| {
            let waiting: Vec<_> = (0..64)
                .map(|thread| {
                    let request = want(&thread.to_string(), "a", 1);
                    let client = &client;
                    scope.spawn(move || client.acquire_for(&request, PATIENCE))
                })
                .collect();
            thread::sleep(ms(500)); // so that they do wait
            // Another semaphore is not held up.
            let start = Instant::now();
            let elsewhere = want("elsewhere", "other", 1);
            acquired(client.acquire_for(&elsewhere, PATIENCE).unwrap());
            assert!(start.elapsed() < ms(10_000), "{:?}", start.elapsed());
            assert!(proxy.live() <= 3, "{} connections", proxy.live());
            drop(row);
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
fn lost_connections_are_tried_again() {
    on_mysql(&[("a", 100)], |direct, url| {
        let proxy = Proxy::before(&url);
        let client = connect(&proxy.url(&url));
        for round in 0..6 {
            match round % 2 {
                0 => proxy.cut(),
                _ => proxy.reset(),
            }
            let id = round.to_string();
            let answer = client.acquire_for(&want(&id, "a", 1), PATIENCE);
            answer.unwrap().into_permits().unwrap();
            proxy.cut();
            wait_until(PATIENCE, "it is released", || client.release(&id).is_ok());
        }
        let row = locked(&url, "semaphore", "name = 'a'");
        thread::scope(|scope| {
            let waiting = scope.spawn(|| client.acquire_for(&want("slow", "a", 1), PATIENCE));
            thread::sleep(ms(1_600)); // longer than a lock wait
            drop(row);
            acquired(waiting.join().unwrap().unwrap());
        });
        assert_eq!(direct.usage("a").unwrap().held, 1);
        assert_eq!(direct.check().unwrap(), []);
    });
}

/// A connection on which a call waits for a row is not given up before the server gives up the wait.
#[test]
fn locked_row_is_a_clear_error() {
    on_mysql(&[("a", 1)], |direct, url| {
        let proxy = Proxy::before(&url);
        let client = connect(&format!("{}?pool_size=1", proxy.url(&url)));
        client.usage("a").unwrap();
        let opened = proxy.accepted();
        let row = locked(&url, "semaphore", "name = 'a'");
        for (round, timeout) in [0, 100, 3_000].into_iter().enumerate() {
            let start = Instant::now();
            let request = want(&format!("job-{round}"), "a", 1);
            let error = client.acquire_for(&request, ms(timeout)).unwrap_err();
            let late = start.elapsed().saturating_sub(ms(timeout));
            // A request limit (two lock waits at most), and what a busy machine adds: the row is never free.
            assert!(late < ms(4_500), "{late:?}");
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
            let text = error.to_string();
            assert!(text.contains("1205") && text.contains("\"job-"), "{text}");
            assert!(!text.contains("may have been granted"), "{text}");
        }
        // A busy machine may lose one; each of the six waits lost its own.
        assert!(proxy.accepted() <= opened + 2, "connections are given up");
        drop(row);
        // Nothing was written, the ids are still good.
        acquired(direct.acquire(&want("job-0", "a", 1)).unwrap());
    });
}

/// A call that its caller gave up is granted something: what the next call under its id was told it holds stays held.
#[test]
fn retry_keeps_what_it_was_told() {
    on_mysql(&[("a", 1)], |here, url| {
        let beside = connect(&url);
        operator(&url)
            .query_drop(
                "CREATE TRIGGER slow BEFORE INSERT ON contend_permit_request FOR EACH ROW \
                 SET NEW.owner = IF(SLEEP(3), NULL, NEW.owner)",
            )
            .unwrap();
        for (round, next) in [&here, &beside].into_iter().enumerate() {
            let request = want(&format!("job-{round}"), "a", 1);
            let error = here.acquire_for(&request, ms(100)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
            let again = next.acquire_for(&request, PATIENCE).unwrap();
            thread::sleep(ms(700)); // what comes late has come
            let held = here.holders("a").unwrap();
            assert_eq!(held.len(), 1);
            assert_eq!(held[0].fence, again.into_permits().unwrap()[0].fence);
            here.release(&format!("job-{round}")).unwrap();
        }
        assert_eq!(here.check().unwrap(), []);
    });
}

/// An external id that another program is just inserting blocks the request that wants it, and with it the
/// transaction that it shares with its neighbours.
#[test]
fn blocked_request_fails_no_neighbour() {
    on_mysql(&[("a", 1_000)], |direct, url| {
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
fn acquire_and_release_need_few_statements() {
    within(HANG, || {
        let server = MariaDbServer::start();
        let url = server.create_database("statements");
        // One, so that no other is being opened.
        let client = connect(&format!("{url}?pool_size=1"));
        client.create_tables().unwrap();
        client.create("a", 100).unwrap();
        let mut conn = operator(&url);
        let names = "begin commit insert rollback select set_option update update_multi";
        let mut spent = |work: &dyn Fn()| {
            let mut count = |name| status(&mut conn, &format!("Com_{name}"));
            let before: Vec<u64> = names.split(' ').map(&mut count).collect();
            work();
            let after = names.split(' ').map(|name| (name, count(name)));
            let spent = after.zip(before);
            let spent = spent.map(|((name, after), before)| (name, after - before));
            spent.filter(|(_, count)| *count != 0).collect::<Vec<_>>()
        };
        client.usage("a").unwrap();
        let acquire = spent(&|| drop(acquired(client.acquire(&want("job", "a", 1)).unwrap())));
        let expected = [
            ("begin", 1),
            ("commit", 1),
            ("insert", 2),
            ("select", 2),
            ("set_option", 3),
            ("update", 1),
        ];
        assert_eq!(acquire, expected);
        let release = spent(&|| assert_eq!(client.release("job").unwrap(), Release::Released));
        let expected = [("select", 1), ("set_option", 1), ("update_multi", 1)];
        assert_eq!(release, expected);
        // A try in vain is three SELECTs. Behind another request, only an id that may be known is looked up first.
        acquired(client.acquire(&want("all", "a", 100)).unwrap());
        let generated = PermitRequest::generated().permits("a", 1);
        for (request, looks) in [(&generated, 0), (&want("named", "a", 1), 1)] {
            let spent = spent(&|| {
                thread::scope(|scope| {
                    scope.spawn(|| client.guard(&generated, ms(700)).unwrap_err());
                    thread::sleep(ms(350)); // it waits
                    client.guard(request, ms(50)).unwrap_err();
                });
            });
            let count = |of| spent.iter().find(|(name, _)| *name == of).unwrap().1;
            assert_eq!(count("select") - 3 * count("begin"), looks, "{spent:?}");
        }
    });
}

/// A program that only uses semaphores sees in its health that the server hangs.
#[test]
fn hanging_server_shows_in_health() {
    on_mysql(&[("a", 1)], |_, url| {
        let proxy = Proxy::before(&url);
        let factory = contend::connect(&proxy.url(&url)).unwrap();
        let here = factory.semaphores().unwrap();
        let is_fine = || assert!(factory.health().is_fine(), "{:?}", factory.health());
        let guard = here.guard(&want("held", "a", 1).ttl(SHORT), ms(0)).unwrap();
        is_fine();
        // What was answered is no trouble.
        exhausted(here.acquire(&want("other", "a", 1)).unwrap());
        let missing = here.holders("none").unwrap_err();
        assert_eq!(missing.kind(), ErrorKind::NotFound);
        let in_use = here.delete("a").unwrap_err();
        assert_eq!(in_use.kind(), ErrorKind::InvalidState);
        is_fine();

        proxy.black_hole(Direction::ToClient);
        // By a renewal, the only call.
        wait_until(PATIENCE, "it fails", || {
            matches!(factory.health().contact, Contact::Failing { lasting, .. }
                if lasting >= Duration::from_millis(100))
        });
        proxy.pass();
        wait_until(PATIENCE, "it is fine again", || {
            here.usage("a").is_ok() && factory.health().is_fine()
        });
        drop(guard);
    });
}
