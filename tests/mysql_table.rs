//! The table: ours and the seeds' own, what its columns can and cannot hold, and the repository on it.
//! Facts about hazards carry their number in `FACTS.md`.

#![cfg(feature = "mysql")]

mod conformance;
mod mysql_ground;

use std::thread;
use std::time::{Duration, Instant};

use conformance::{PATIENCE, next, started, wait_for_owner};
use contend::backend::{Attempt, Entry, Hold, Place, Renewal, Seat};
use contend::mysql::{Builder, Repository};
use contend::{Error, ErrorKind, EventKind, Factory, Lease, Moment};
use ground::{wait_until, within};
use mysql::prelude::Queryable;
use mysql_ground::{HANG, database, empty_database, lease, ms, operator};

/// The table as Simba's script makes it.
const SEEDS_TABLE: &str = "CREATE TABLE simba_mutex (
    mutex         VARCHAR(66)     NOT NULL PRIMARY KEY COMMENT 'mutex name',
    acquired_at   BIGINT UNSIGNED NOT NULL,
    ttl_at        BIGINT UNSIGNED NOT NULL,
    transition_at BIGINT UNSIGNED NOT NULL,
    owner_id      CHAR(32)        NOT NULL,
    version       INT UNSIGNED    NOT NULL
)";

/// What Simba's repository sends, as the seeds describe it.
const SEEDS_NOW: &str = "CAST(UNIX_TIMESTAMP(NOW(3)) * 1000 AS UNSIGNED)";

fn seeds_acquire(conn: &mut mysql::Conn, mutex: &str, id: &str, ttl: u64, transition: u64) -> bool {
    let sql = format!(
        "UPDATE simba_mutex SET acquired_at = {SEEDS_NOW}, ttl_at = {SEEDS_NOW} + ?, \
         transition_at = {SEEDS_NOW} + ?, owner_id = ?, version = version + 1 WHERE mutex = ? AND \
         (transition_at < {SEEDS_NOW} OR (owner_id = ? AND transition_at > {SEEDS_NOW}))"
    );
    conn.exec_drop(sql, (ttl, ttl + transition, id, mutex, id))
        .unwrap();
    conn.affected_rows() > 0
}

fn seeds_release(conn: &mut mysql::Conn, mutex: &str, id: &str) -> bool {
    conn.exec_drop(
        "UPDATE simba_mutex SET acquired_at = 0, ttl_at = 0, transition_at = 0, owner_id = '', \
         version = version + 1 WHERE mutex = ? AND owner_id = ?",
        (mutex, id),
    )
    .unwrap();
    conn.affected_rows() > 0
}

fn seeds_database() -> String {
    let url = empty_database();
    operator(&url).query_drop(SEEDS_TABLE).unwrap();
    url
}

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

fn seat(factory: &Factory, mutex: &str, id: &str) -> Box<dyn Seat> {
    let place = Place {
        mutex: mutex.into(),
        id: id.into(),
        lease: factory.lease(),
        hold: Hold::Short,
    };
    factory.backend().unwrap().seat(&place).unwrap()
}

fn by(factory: &Factory) -> Moment {
    Moment::now() + factory.lease().call_budget()
}

fn acquire(factory: &Factory, mutex: &str, id: &str) -> Result<u64, Error> {
    match seat(factory, mutex, id).acquire(Entry::Try, by(factory))? {
        Attempt::Granted(grant) => Ok(grant.owner.fence()),
        Attempt::Refused(refusal) => panic!("{refusal:?}"),
    }
}

#[test]
fn the_repository_does_what_that_of_the_seeds_does() {
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
        assert_eq!(
            (
                seen.version,
                seen.owner.ttl_at(),
                seen.owner.transition_at()
            ),
            (
                first.version,
                first.owner.ttl_at(),
                first.owner.transition_at()
            ),
            "what the winner is told without reading is what the row says"
        );
        assert!(!repository.release("m", "b").unwrap());
        assert!(repository.release("m", "a").unwrap());
        assert!(!repository.release("m", "a").unwrap());
        let next = repository.acquire_and_get_owner("m", "b", lease).unwrap();
        assert!(next.version > first.version);

        assert!(!repository.ensure_owner("new").unwrap().owner.has_owner());
        let threads: Vec<_> = (0..8)
            .map(|_| {
                let repository = repository.clone();
                thread::spawn(move || repository.ensure_owner("raced").unwrap())
            })
            .collect();
        for thread in threads {
            assert_eq!(thread.join().unwrap().version, 0);
        }
    });
}

#[test]
fn a_missing_table_is_an_error_that_names_the_file_and_can_be_made() {
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
fn a_delayed_renewal_never_moves_a_lease_backwards() {
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
                        let sent = Moment::now();
                        let renewed = seat(&factory, "m", "a").renew(fence, by(&factory)).unwrap();
                        let Renewal::Renewed(grant) = renewed else {
                            panic!("{renewed:?}");
                        };
                        (sent, grant.owner)
                    });
                    // Time is the subject: the later ones carry a later NOW().
                    thread::sleep(ms(60));
                    renewal
                })
                .collect();
            lock.query_drop("UNLOCK TABLES").unwrap();
            let promised = renewals
                .into_iter()
                .map(|renewal| renewal.join().unwrap().1.transition_at())
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
fn a_renewal_that_waited_beyond_the_end_of_the_lease_revives_nothing() {
    within(HANG, || {
        let url = database();
        let factory = contend::connect(&format!("{url}?ttl=3s&transition=0s")).unwrap();
        let fence = acquire(&factory, "m", "a").unwrap();
        let mut lock = operator(&url);
        let end = repository(&url)
            .get_owner("m")
            .unwrap()
            .owner
            .transition_at();
        let now = |conn: &mut mysql::Conn| -> u64 {
            let now: Option<u64> = conn.query_first(format!("SELECT {SEEDS_NOW}")).unwrap();
            now.unwrap()
        };
        let left = end.saturating_sub(now(&mut lock));
        thread::sleep(ms(left.saturating_sub(250)));
        lock.query_drop("LOCK TABLES simba_mutex WRITE").unwrap();
        // It gives up before there is an answer; the server does not.
        assert!(seat(&factory, "m", "a").renew(fence, by(&factory)).is_err());
        wait_until(PATIENCE, "the lease has run out", || {
            now(&mut lock) > end + 50
        });
        lock.query_drop("UNLOCK TABLES").unwrap();
        wait_until(PATIENCE, "the renewal is through", || {
            let database = url.rsplit('/').next().unwrap();
            let left: Option<u64> = lock
                .exec_first(
                    "SELECT COUNT(*) FROM information_schema.processlist \
                     WHERE db = ? AND info LIKE 'UPDATE%'",
                    (database,),
                )
                .unwrap();
            left == Some(0)
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
        // A trigger runs in the session of whoever updates: it sees what we have set.
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
fn a_grant_that_waited_for_a_lock_is_not_believed_for_longer_than_the_row_says() {
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
                assert!(
                    row.owner.is_owner("a") && row.owner.transition_at() >= row.current_db_at,
                    "{row:?}"
                );
            }
        }
    });
}

/// Hazard 3: in the seeds' statement nobody can have the mutex at `transition_at = now`.
#[test]
fn an_owner_acquires_again_at_the_very_end_of_its_lease() {
    within(HANG, || {
        let url = database();
        let repository = repository(&url);
        let lease = lease(20, 100);
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
    });
}

/// At that edge nobody else can, as in the seeds.
#[test]
fn nobody_else_acquires_before_the_transition_has_passed() {
    within(HANG, || {
        let url = database();
        let repository = repository(&url);
        let lease = lease(20, 100);
        repository.init_mutex("m").unwrap();
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

/// Hazard 5, on our table: the version is the server's microseconds, far beyond 2^32.
#[test]
fn fences_are_server_time_and_grow_over_a_deleted_row() {
    within(HANG, || {
        let url = database();
        let factory = contend::connect(&url).unwrap();
        let mut last = 0;
        for _ in 0..3 {
            let fence = acquire(&factory, "m", "a").unwrap();
            assert!(fence > last && fence > u64::from(u32::MAX));
            last = fence;
            operator(&url)
                .query_drop("DELETE FROM simba_mutex WHERE mutex = 'm'")
                .unwrap();
        }
        // A version that is ahead of the clock, as after a step back: it still grows.
        operator(&url)
            .query_drop("UPDATE simba_mutex SET version = 9000000000000000000")
            .unwrap();
        acquire(&factory, "m", "b").unwrap();
        operator(&url)
            .query_drop("UPDATE simba_mutex SET version = 9000000000000000000")
            .unwrap();
        let mut seat = seat(&factory, "m", "b");
        let Attempt::Granted(grant) = seat.acquire(Entry::Try, by(&factory)).unwrap() else {
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

/// Hazard 5, on the seeds' table.
#[test]
fn a_version_that_has_run_out_is_an_error_that_says_what_to_do() {
    within(HANG, || {
        let url = seeds_database();
        let factory = contend::connect(&url).unwrap();
        let fence = acquire(&factory, "m", "a").unwrap();
        assert!(fence <= u64::from(u32::MAX), "{fence}");
        let mut conn = operator(&url);
        conn.query_drop("UPDATE simba_mutex SET version = 4294967295")
            .unwrap();
        let error = acquire(&factory, "m", "a").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Misconfigured);
        assert!(error.to_string().contains("BIGINT UNSIGNED"), "{error}");
        conn.query_drop("ALTER TABLE simba_mutex MODIFY version BIGINT UNSIGNED NOT NULL")
            .unwrap();
        // As it says, and for the same factory.
        let fence = acquire(&factory, "m", "a").unwrap();
        assert!(fence > u64::from(u32::MAX), "{fence}");
    });
}

/// Hazard 6.
#[test]
fn what_the_seeds_table_would_cut_or_mix_up_is_an_error() {
    within(HANG, || {
        let url = seeds_database();
        let factory = contend::connect(&url).unwrap();
        let long = "i".repeat(33);
        let error = acquire(&factory, "m", &long).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        assert!(error.to_string().contains("holds 32"), "{error}");
        // Known by now, it is refused before anything is sent.
        let place = Place {
            mutex: "m".into(),
            id: long.into(),
            lease: factory.lease(),
            hold: Hold::Long,
        };
        let error = factory.backend().unwrap().seat(&place).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);

        acquire(&factory, "Lock", "a").unwrap();
        for confused in ["lock", "LOCK"] {
            let error = acquire(&factory, confused, "b").unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Misconfigured, "{error}");
            assert!(error.to_string().contains("\"Lock\""), "{error}");
            assert!(!error.is_transient());
        }
        // Ids that the collation takes for one are still two.
        let mut other = seat(&factory, "Lock", "A");
        let attempt = other.acquire(Entry::Try, by(&factory)).unwrap();
        let Attempt::Refused(refusal) = attempt else {
            panic!("{attempt:?}");
        };
        assert!(refusal.owner.is_owner("a"));
    });
}

#[test]
fn names_of_any_script_work_on_a_table_of_any_character_set() {
    within(HANG, || {
        for charset in ["latin1", "utf8mb4"] {
            let url = empty_database();
            let mut conn = operator(&url);
            conn.query_drop(format!("{SEEDS_TABLE} DEFAULT CHARACTER SET {charset}"))
                .unwrap();
            let factory = contend::connect(&url).unwrap();
            let first = acquire(&factory, "köln", "ä").unwrap();
            assert!(acquire(&factory, "köln", "ä").unwrap() > first);
            let mut other = seat(&factory, "köln", "b");
            let attempt = other.acquire(Entry::Try, by(&factory)).unwrap();
            assert!(matches!(attempt, Attempt::Refused(_)));
            // What the character set cannot hold is refused, not mangled.
            let name = acquire(&factory, "日本", "a");
            assert_eq!(name.is_ok(), charset == "utf8mb4", "{name:?}");
        }
    });
}

#[test]
fn a_peer_of_the_seeds_and_a_service_take_turns_on_the_seeds_table() {
    within(HANG, || {
        let url = seeds_database();
        let mut peer = operator(&url);
        let factory = contend::connect(&format!("{url}?ttl=2s&transition=1s&poll_interval=50ms"));
        let factory = factory.unwrap();
        let (ours, events) = started(&factory, "m", "ours");
        next(&events, EventKind::Acquired);
        for round in 0..3 {
            assert!(!seeds_acquire(&mut peer, "m", "theirs", 1_000, 500));
            assert!(ours.is_owner());
            ours.stop().unwrap();
            next(&events, EventKind::Released);
            assert!(seeds_acquire(&mut peer, "m", "theirs", 60_000, 1_000));
            ours.start().unwrap();
            wait_for_owner(&ours, "theirs");
            assert!(seeds_acquire(&mut peer, "m", "theirs", 60_000, 1_000));
            assert!(!ours.is_owner());
            let freed = Instant::now();
            if round % 2 == 0 {
                assert!(seeds_release(&mut peer, "m", "theirs"));
            } else {
                peer.query_drop(format!(
                    "UPDATE simba_mutex SET transition_at = {SEEDS_NOW} + 100"
                ))
                .unwrap();
            }
            next(&events, EventKind::Acquired);
            // The peer wakes nobody: the poll interval and the lease are what it takes.
            assert!(freed.elapsed() < Duration::from_secs(10));
        }
    });
}

#[test]
fn the_initial_delay_of_a_url_is_that_of_its_services_unless_they_have_their_own() {
    within(HANG, || {
        let url = database();
        let patient = contend::connect(&format!("{url}?initial_delay=1500ms")).unwrap();
        assert_eq!(patient.initial_delay(), ms(1_500));
        let began = Instant::now();
        let (_service, events) = started(&patient, "m", "a");
        next(&events, EventKind::Acquired);
        assert!(began.elapsed() >= ms(1_500), "{:?}", began.elapsed());

        let asleep = contend::connect(&format!("{url}?initial_delay=1h")).unwrap();
        let hasty = asleep.contend("n").initial_delay(ms(0));
        let (service, events) = hasty.channel().unwrap();
        service.start().unwrap();
        next(&events, EventKind::Acquired);
    });
}

#[test]
fn urls_and_builders_that_are_wrong_are_refused_with_what_is_right() {
    for (url, kind, says) in [
        (
            "mysql://h/d?tll=2s",
            ErrorKind::InvalidInput,
            "known are: ttl, transition, initial_delay, table, create_table, pool_size",
        ),
        ("mysql://h", ErrorKind::InvalidInput, "database"),
        ("mysql://h/a/b", ErrorKind::InvalidInput, "database name"),
        ("mysql://a,b/d", ErrorKind::InvalidInput, "one server"),
        ("mysql:///d", ErrorKind::InvalidInput, "one server"),
        ("mysql://h:x/d", ErrorKind::InvalidInput, "host:port"),
        (
            "mysql://h/d?table=a%60b",
            ErrorKind::InvalidInput,
            "table name",
        ),
        (
            "mysql://h/d?pool_size=0",
            ErrorKind::InvalidInput,
            "no connections",
        ),
        (
            "mysql://h/d?wakeups=maybe",
            ErrorKind::InvalidInput,
            "neither on nor off",
        ),
        (
            "mysql://h/d?poll_interval=0s",
            ErrorKind::InvalidInput,
            "never rest",
        ),
        (
            "mysql://h/d?ttl=1s&read_timeout=300ms",
            ErrorKind::InvalidInput,
            "a fifth of the ttl",
        ),
        (
            "mysql://h/d?tls=maybe",
            ErrorKind::InvalidInput,
            "neither off nor required",
        ),
        (
            "mysql://h/d?tls_ca=x",
            ErrorKind::InvalidInput,
            "tls=required",
        ),
    ] {
        let error = contend::connect(url).unwrap_err();
        assert_eq!(error.kind(), kind, "{url}");
        assert!(error.to_string().contains(says), "{url}: {error}");
    }
    #[cfg(not(feature = "tls"))]
    {
        let error = contend::connect("mysql://h/d?tls=required").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::FeatureDisabled);
    }
}

/// A call must be able to end within a quarter of the lease that it is for: connections that wait for
/// longer are not for it.
#[test]
fn a_lease_shorter_than_the_factorys_is_kept_as_well() {
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
fn a_refused_log_in_is_an_error_at_once_that_shows_no_credential() {
    within(HANG, || {
        let url = database();
        let url = url.replace("root@", "nobody:s3cret@");
        let factory = contend::connect(&url).unwrap();
        // Not the timeout that the call would end in.
        let error = acquire(&factory, "m", "a").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
        assert!(!error.is_transient());
        let builder = builder(&url);
        for shown in [
            format!("{error} {error:?}"),
            format!("{factory:?} {}", factory.realm()),
            format!("{builder:?} {:?}", builder.clone().repository().unwrap()),
        ] {
            assert!(!shown.contains("s3cret"), "{shown}");
            assert!(!shown.contains("nobody"), "{shown}");
        }
    });
}
