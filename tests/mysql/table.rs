//! The table: ours and the seeds' own, what its columns can and cannot hold, and the repository on it.
//! Facts about hazards carry their number in `FACTS.md`.

use std::thread;
use std::time::Instant;

use crate::conformance::{PATIENCE, next, started};
use crate::server::{HANG, SEEDS_TABLE, contender, database, empty_database, ms, operator};
use contend::backend::{Attempt, OnRefusal, Renewal};
use contend::mysql::{Builder, MutexRow, Repository};
use contend::{Error, ErrorKind, EventKind, Factory, Lease, Moment};
use mysql::prelude::Queryable;
use testbed::{wait_until, within};

/// What Simba's repository sends, as the seeds describe it.
const SEEDS_NOW: &str = "CAST(UNIX_TIMESTAMP(NOW(3)) * 1000 AS UNSIGNED)";

fn repository(url: &str) -> Repository {
    builder(url).repository().unwrap()
}

/// A builder for a URL of the ground, which has no password.
fn builder(url: &str) -> Builder {
    let opts = mysql::Opts::from_url(url).unwrap();
    let mut builder = Builder::new(&opts.get_ip_or_hostname(), opts.get_db_name().unwrap())
        .port(opts.get_tcp_port())
        .user(opts.get_user().unwrap_or("root"));
    if let Some(password) = opts.get_pass() {
        builder = builder.password(password);
    }
    builder
}

fn by(factory: &Factory) -> Moment {
    Moment::now() + factory.lease().request_limit()
}

fn acquire(factory: &Factory, mutex: &str, id: &str) -> Result<u64, Error> {
    match contender(factory, mutex, id).acquire(OnRefusal::Leave, by(factory))? {
        Attempt::Granted(grant) => Ok(grant.owner.fence()),
        Attempt::Refused(refusal) => panic!("{refusal:?}"),
    }
}

#[test]
fn repository_does_what_that_of_the_seeds_does() {
    within(HANG, || {
        let repository = repository(&database());
        let lease = Lease::default();
        let error = repository.get_owner("m").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert!(error.to_string().contains("init_mutex"), "{error}");
        let error = repository.acquire("m", "a", lease).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);

        repository.init_mutex("m").unwrap();
        let error = repository.init_mutex("m").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Conflict);
        assert!(!repository.try_init_mutex("m"));
        assert!(repository.try_init_mutex("n"));
        let row = repository.get_owner("m").unwrap();
        assert!(!row.owner.has_owner() && row.version == 0 && row.current_db_at > 0);

        assert!(repository.acquire("m", "a", lease).unwrap());
        assert!(!repository.acquire("m", "b", lease).unwrap());
        let first = repository.acquire_and_get_owner("m", "a", lease).unwrap();
        assert!(first.owner.is_in_ttl_of("a"));
        let seen = repository.acquire_and_get_owner("m", "b", lease).unwrap();
        let ends = |row: &MutexRow| (row.version, row.owner.ttl_at(), row.owner.transition_at());
        assert_eq!(ends(&seen), ends(&first), "the row is as the winner saw it");
        assert!(!repository.release("m", "b").unwrap());
        assert!(repository.release("m", "a").unwrap());
        assert!(!repository.release("m", "a").unwrap());
        let next = repository.acquire_and_get_owner("m", "b", lease).unwrap();
        assert!(next.version > first.version);

        assert!(!repository.ensure_owner("new").unwrap().owner.has_owner());
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| assert_eq!(repository.ensure_owner("raced").unwrap().version, 0));
            }
        });
    });
}

#[test]
fn missing_table_is_named_and_can_be_made() {
    within(HANG, || {
        let url = empty_database();
        let factory = contend::connect(&url).unwrap();
        let error = acquire(&factory, "m", "a").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Misconfigured);
        assert!(error.to_string().contains("sql/init-mutex.sql"), "{error}");
        assert!(!error.is_transient());

        let other = format!("{url}?table=other_mutex&create_table=true");
        acquire(&contend::connect(&other).unwrap(), "m", "a").unwrap();
        let error = acquire(&factory, "m", "a").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Misconfigured);

        repository(&url).create_table().unwrap();
        repository(&url).create_table().unwrap();
        acquire(&factory, "m", "a").unwrap();

        operator(&url)
            .query_drop("CREATE TABLE wrong (mutex INT, version INT)")
            .unwrap();
        let factory = contend::connect(&format!("{url}?table=wrong")).unwrap();
        let error = acquire(&factory, "m", "a").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Misconfigured);
        assert!(error.to_string().contains("owner_id"), "{error}");
    });
}

/// Hazard 0: renewals that wait behind a lock can commit in reverse order.
#[test]
fn delayed_renewal_moves_no_lease_backwards() {
    within(HANG, || {
        let url = database();
        let factory = contend::connect(&format!("{url}?ttl=40s&transition=5s")).unwrap();
        let fence = acquire(&factory, "m", "a").unwrap();
        let mut lock = operator(&url);
        for _ in 0..4 {
            lock.query_drop("LOCK TABLES simba_mutex WRITE").unwrap();
            let renewals: Vec<_> = (0..4)
                .map(|_| {
                    let factory = factory.clone();
                    let renewal = thread::spawn(move || {
                        let mut contender = contender(&factory, "m", "a");
                        match contender.renew(fence, by(&factory)).unwrap() {
                            Renewal::Renewed(grant) => grant.owner,
                            lost => panic!("{lost:?}"),
                        }
                    });
                    // Time is the subject: the later ones carry a later NOW().
                    thread::sleep(ms(60));
                    renewal
                })
                .collect();
            lock.query_drop("UNLOCK TABLES").unwrap();
            let promised = renewals
                .into_iter()
                .map(|renewal| renewal.join().unwrap().transition_at())
                .max();
            let (is,): (Option<u64>,) = operator(&url)
                .query_first("SELECT transition_at FROM simba_mutex WHERE mutex = 'm'")
                .unwrap()
                .unwrap();
            assert!(is >= promised, "{is:?} is before {promised:?}");
        }
    });
}

/// Hazard 2: a renewal that waits for a lock beyond the end of the lease must not bring it back with
/// the NOW() of its start.
#[test]
fn renewal_after_the_end_revives_no_lease() {
    within(HANG, || {
        let url = database();
        let factory = contend::connect(&format!("{url}?ttl=3s&transition=0s")).unwrap();
        let fence = acquire(&factory, "m", "a").unwrap();
        let mut lock = operator(&url);
        let row = repository(&url).get_owner("m").unwrap();
        let end = row.owner.transition_at();
        let now = |conn: &mut mysql::Conn| -> u64 {
            let now: Option<u64> = conn.query_first(format!("SELECT {SEEDS_NOW}")).unwrap();
            now.unwrap()
        };
        let left = end.saturating_sub(now(&mut lock));
        thread::sleep(ms(left.saturating_sub(250)));
        lock.query_drop("LOCK TABLES simba_mutex WRITE").unwrap();
        // It gives up before there is an answer; the server does not.
        let renewed = contender(&factory, "m", "a").renew(fence, by(&factory));
        assert!(renewed.is_err());
        wait_until(PATIENCE, "the lease has run out", || {
            now(&mut lock) > end + 50
        });
        lock.query_drop("UNLOCK TABLES").unwrap();
        wait_until(PATIENCE, "the renewal is through", || {
            let sql = "SELECT COUNT(*) FROM information_schema.processlist \
                       WHERE db = ? AND info LIKE 'UPDATE%'";
            let left = lock.exec_first(sql, (url.rsplit('/').next().unwrap(),));
            left.unwrap() == Some(0)
        });
        let row = repository(&url).get_owner("m").unwrap();
        assert_eq!(row.owner.transition_at(), end, "{row:?}");
    });
}

/// Hazards 1 and 6: whatever the server's defaults, our sessions are in UTC and strict.
#[test]
fn sessions_are_in_utc_strict_and_in_autocommit() {
    within(HANG, || {
        let url = database();
        let mut conn = operator(&url);
        conn.query_drop("CREATE TABLE sessions (zone TEXT, mode TEXT, auto INT)")
            .unwrap();
        // A trigger runs in the session that updates: it sees what we have set.
        conn.query_drop(
            "CREATE TRIGGER spy BEFORE UPDATE ON simba_mutex FOR EACH ROW INSERT INTO sessions \
             VALUES (@@session.time_zone, @@session.sql_mode, @@session.autocommit)",
        )
        .unwrap();
        acquire(&contend::connect(&url).unwrap(), "m", "a").unwrap();
        let seen: Vec<(String, i64)> = conn
            .query("SELECT DISTINCT zone, auto FROM sessions")
            .unwrap();
        assert_eq!(seen, [("+00:00".to_owned(), 1)]);
        let mode: Option<String> = conn.query_first("SELECT mode FROM sessions").unwrap();
        // The mode inside a trigger is that of its creation on some servers: look for the worst only.
        assert!(!mode.unwrap().contains("PAD_CHAR_TO_FULL_LENGTH"));
    });
}

/// Hazard 2: NOW() stands still while a statement waits for a row lock.
#[test]
fn grant_that_waited_is_believed_for_as_long_as_the_row_says() {
    within(HANG, || {
        let url = database();
        repository(&url).init_mutex("m").unwrap();
        let mut lock = operator(&url);
        lock.query_drop("BEGIN").unwrap();
        lock.query_drop("SELECT * FROM simba_mutex WHERE mutex = 'm' FOR UPDATE")
            .unwrap();
        let factory = contend::connect(&format!("{url}?ttl=2s&transition=1s")).unwrap();
        let (service, events) = started(&factory, "m", "a");
        wait_until(PATIENCE, "an attempt has failed", || {
            service.last_error().is_some()
        });
        assert!(!service.is_owner());
        // Longer than a whole ttl: what was sent first is stale by now.
        thread::sleep(ms(2_200));
        lock.query_drop("COMMIT").unwrap();
        let fence = next(&events, EventKind::Acquired).fence().unwrap();
        for _ in 0..100 {
            let before = service.is_owner() && service.fence() == Some(fence);
            let row = repository(&url).get_owner("m").unwrap();
            if before && service.is_owner() && service.fence() == Some(fence) {
                let owns = row.owner.is_owner("a");
                assert!(
                    owns && row.owner.transition_at() >= row.current_db_at,
                    "{row:?}"
                );
            }
        }
    });
}

/// At the last millisecond of a transition, as in the seeds: its owner acquires again, and others after it.
#[test]
fn last_millisecond_is_the_owners() {
    within(HANG, || {
        let url = database();
        let repository = repository(&url);
        let lease = Lease::new(ms(20), ms(100)).unwrap();
        repository.init_mutex("m").unwrap();
        assert!(repository.acquire("m", "a", lease).unwrap());
        let mut conn = operator(&url);
        for round in 0..300 {
            conn.query_drop(format!(
                "UPDATE simba_mutex SET transition_at = {SEEDS_NOW} + {} WHERE mutex = 'm'",
                round % 2
            ))
            .unwrap();
            assert!(repository.acquire("m", "a", lease).unwrap(), "{round}");
        }
        for _ in 0..10 {
            let first = repository.acquire_and_get_owner("m", "a", lease).unwrap();
            let end = first.owner.transition_at();
            let next = loop {
                let next = repository.acquire_and_get_owner("m", "b", lease).unwrap();
                if next.owner.is_owner("b") {
                    break next;
                }
            };
            assert!(next.owner.acquired_at() > end, "{next:?} after {end}");
            assert!(repository.release("m", "b").unwrap());
        }
    });
}

/// Fences grow beyond the server's clock.
#[test]
fn fences_grow_over_a_clock_that_was_set_back() {
    within(HANG, || {
        let url = database();
        let factory = contend::connect(&url).unwrap();
        acquire(&factory, "m", "b").unwrap();
        operator(&url)
            .query_drop("UPDATE simba_mutex SET fencing_token = 9000000000000000000")
            .unwrap();
        let mut contender = contender(&factory, "m", "b");
        let Attempt::Granted(grant) = contender.acquire(OnRefusal::Leave, by(&factory)).unwrap()
        else {
            panic!("refused");
        };
        assert_eq!(grant.owner.fence(), 9_000_000_000_000_000_001);
        let row = repository(&url).get_owner("m").unwrap();
        assert!(
            grant.owner.acquired_at().abs_diff(row.owner.acquired_at()) < 1_000,
            "{grant:?} {row:?}"
        );
    });
}

/// Hazard 5: Simba reads the version as a signed INT.
#[test]
fn version_wraps_below_the_largest_int() {
    within(HANG, || {
        let url = database();
        let factory = contend::connect(&url).unwrap();
        acquire(&factory, "m", "a").unwrap();
        for (before, after) in [
            (2_147_483_646, 2_147_483_647),
            (2_147_483_647, 1),
            (4_294_967_295_u64, 2),
        ] {
            operator(&url)
                .query_drop(format!("UPDATE simba_mutex SET version = {before}"))
                .unwrap();
            acquire(&factory, "m", "a").unwrap();
            assert_eq!(repository(&url).get_owner("m").unwrap().version, after);
        }
    });
}

/// What the table cannot keep is refused, with what to change; and `create_table=true` changes it.
#[test]
fn unfit_table_is_refused_with_its_remedy() {
    within(HANG, || {
        let ours = contend::mysql::INIT_SQL;
        for (create, says) in [
            (SEEDS_TABLE.to_owned(), "ADD COLUMN waiters VARCHAR(3990)"),
            (ours.replace(" PRIMARY KEY", ""), "ADD PRIMARY KEY (mutex)"),
            (
                ours.replace("COLLATE utf8mb4_bin;", "COLLATE utf8mb4_general_ci;"),
                "MODIFY COLUMN mutex VARCHAR(66) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL",
            ),
        ] {
            let url = empty_database();
            operator(&url).query_drop(&create).unwrap();
            let factory = contend::connect(&url).unwrap();
            let error = acquire(&factory, "m", "a").unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Misconfigured, "{error}");
            assert!(!error.is_transient());
            assert!(error.to_string().contains(says), "{error}");
            assert!(error.to_string().contains("create_table=true"), "{error}");
            let mends = contend::connect(&format!("{url}?create_table=true")).unwrap();
            let mut outcome = acquire(&mends, "m", "a");
            // On a busy server the ALTER may take longer than an answer may.
            wait_until(PATIENCE, "there is an answer", || {
                let slow = matches!(&outcome, Err(error) if error.is_transient());
                if slow {
                    outcome = acquire(&mends, "m", "a");
                }
                !slow
            });
            assert!(outcome.is_ok(), "{create}: {outcome:?}");
            // And the same factory finds it mended.
            acquire(&factory, "m", "a").unwrap();
        }
    });
}

/// The slower ALTER of two found its columns there, which the caller got as an error.
#[test]
fn processes_upgrade_a_table_at_once() {
    within(HANG, || {
        let url = empty_database();
        operator(&url).query_drop(SEEDS_TABLE).unwrap();
        let url = format!("{url}?create_table=true");
        thread::scope(|scope| {
            for _ in 0..6 {
                let factory = contend::connect(&url).unwrap();
                scope.spawn(move || factory.ping(PATIENCE).unwrap());
            }
        });
    });
}

#[test]
fn frozen_sysdate_is_refused() {
    within(HANG, || {
        let server = testbed::MariaDbServer::start_with(&["--sysdate-is-now"]);
        let url = server.create_database("frozen");
        operator(&url).query_drop(contend::mysql::INIT_SQL).unwrap();
        let error = acquire(&contend::connect(&url).unwrap(), "m", "a").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Misconfigured, "{error}");
        assert!(error.to_string().contains("--sysdate-is-now"), "{error}");
    });
}

/// A server that disregards the handshake's character set stored names double-encoded.
#[test]
fn names_of_any_script_arrive_as_they_are() {
    within(HANG, || {
        let mut args = vec!["--character-set-server=latin1"];
        // MySQL 9 has no such option any more.
        if !testbed::is_mysql() {
            args.push("--skip-character-set-client-handshake");
        }
        let server = testbed::MariaDbServer::start_with(&args);
        let url = server.create_database("names");
        operator(&url).query_drop(contend::mysql::INIT_SQL).unwrap();
        acquire(&contend::connect(&url).unwrap(), "日本", "köln").unwrap();
        let hex: Option<(String, String)> = operator(&url)
            .query_first("SELECT HEX(mutex), HEX(owner_id) FROM simba_mutex")
            .unwrap();
        let right = ("E697A5E69CAC".to_owned(), "6BC3B66C6E".to_owned());
        assert_eq!(hex, Some(right));
    });
}

#[test]
fn wrong_urls_are_refused_with_what_is_right() {
    for (url, says) in [
        (
            "h/d?tll=2s",
            "known are: socket, ttl, transition, initial_delay, table, create_table, table_prefix, pool_size",
        ),
        ("h", "database"),
        ("h/a/b", "database name"),
        ("a,b/d", "one server"),
        ("/d", "one server"),
        ("h:x/d", "host:port"),
        ("h/d?table=a%60b", "table name"),
        ("h/d?pool_size=0", "from 1 to 1000"),
        ("h/d?wakeups=maybe", "neither true"),
        ("h/d?poll_interval=0s", "from 20ms"),
    ] {
        let error = contend::connect(&format!("mysql://{url}")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{url}");
        assert!(error.to_string().contains(says), "{url}: {error}");
    }
    let builder = contend::mysql::Builder::new("root:s3cret@h", "d");
    let shown = format!("{builder:?} {:?}", builder.clone().build());
    assert!(!shown.contains("s3cret"), "{shown}");
}

/// A call must be able to end within a quarter of the lease that it is for: connections that wait for
/// longer are not for it.
#[test]
fn short_lease_ends_in_time_beside_a_long_one() {
    within(HANG, || {
        let url = database();
        let factory = contend::connect(&format!("{url}?ttl=60s&transition=10s")).unwrap();
        let mut lock = operator(&url);
        let short = factory.contend("m").id("a").ttl(ms(1_000));
        let (service, events) = short.transition(ms(500)).channel().unwrap();
        service.start().unwrap();
        next(&events, EventKind::Acquired);
        lock.query_drop("LOCK TABLES simba_mutex WRITE").unwrap();
        let locked = Instant::now();
        next(&events, EventKind::Released);
        // The factory's own connections would wait for five seconds.
        assert!(locked.elapsed() < ms(4_500), "{:?}", locked.elapsed());
        lock.query_drop("UNLOCK TABLES").unwrap();
        next(&events, EventKind::Acquired);
    });
}

#[test]
fn refused_log_in_is_an_error_at_once() {
    within(HANG, || {
        let url = database();
        let url = url.replace("root@", "intruder:s3cret@");
        let factory = contend::connect(&url).unwrap();
        // Not the timeout that the call would end in.
        let error = acquire(&factory, "m", "a").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
        assert!(!error.is_transient());
        // MySQL refuses a user that it does not know without a word of it.
        let text = error.to_string();
        assert!(text.contains("intruder") || testbed::is_mysql(), "{text}");
        let builder = builder(&url);
        let shown = format!("{builder:?} {:?}", builder.clone().repository().unwrap());
        assert!(
            !shown.contains("s3cret") && !shown.contains("intruder"),
            "{shown}"
        );
    });
}
