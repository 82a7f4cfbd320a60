//! Mistakes in the URL, the password, the tables and the command line: exit codes, and one line that says what is
//! wrong.

use mysql::prelude::Queryable;
use testbed::{Direction, Proxy, RedisServer, within};

use crate::backends::{Backend, mysql, redis, zk};
use crate::mysql_ground::{empty_database, operator};
use crate::program::{HANG, field, run};

/// Asserts that a URL is refused with this code, by a line that contains these words.
fn fails(url: &str, code: i32, says: &str) {
    fails_with(url, &[code], says);
}

fn fails_with(url: &str, codes: &[i32], says: &str) {
    let (exit, out, err) = run(url, "lock m --no-wait -- true");
    assert!(codes.contains(&exit), "{url}: {exit}: {out}{err}");
    assert!(err.starts_with("contend: "), "{err}");
    assert!(err.contains(says), "{url}: no {says:?} in {err}");
    assert_eq!(err.lines().count(), 1, "{err}");
}

/// Mistakes that are the same everywhere. `other` is a server of another kind.
fn make_mistakes(backend: &Backend, other: &Backend, codes_of_other: &[i32]) {
    let proxy = Proxy::before(&backend.plain);
    proxy.refuse();
    fails(&proxy.url(&backend.url()), 69, "refused");
    proxy.pass();
    proxy.black_hole(Direction::Both);
    fails(&proxy.url(&backend.url()), 69, "not locked");
    let proxy = Proxy::before(&other.plain);
    fails_with(&proxy.url(&backend.plain), codes_of_other, "not locked");
    let (code, _, err) = run(&backend.url(), "lock m --ttl 1ms -- true");
    assert_eq!(code, 64, "{err}");
    assert!(err.contains("at least"), "{err}");
}

#[test]
fn mistakes_on_redis() {
    within(HANG, || {
        // It greets, or closes the connection before its greeting was read.
        make_mistakes(redis(), mysql(), &[78, 69]);
        let wrong = redis().plain.replace("://", "://bob:wrong@");
        fails(&wrong, 77, "\"bob\"");
        let server = RedisServer::start();
        // May do everything but listen.
        let rules = "ACL SETUSER deaf on >pw ~* resetchannels +@all";
        server.cli(&rules.split(' ').collect::<Vec<_>>());
        let deaf = format!("redis://deaf:pw@{}", server.addr());
        fails(&deaf, 77, "channel");
    });
}

#[test]
fn mistakes_on_mysql() {
    within(HANG, || {
        make_mistakes(mysql(), redis(), &[69]);
        let url = &mysql().plain;
        let (_, rest) = url.split_once('@').unwrap();
        let (_, database) = rest.split_once('/').unwrap();
        let create = "CREATE USER IF NOT EXISTS reader IDENTIFIED BY 'pw'";
        let grant = format!("GRANT SELECT ON {database}.* TO reader");
        let mut operator = operator(url);
        operator.query_drop(create).unwrap();
        operator.query_drop(grant).unwrap();
        fails(&format!("mysql://reader:wrong@{rest}"), 77, "'reader'");
        fails(&format!("mysql://reader:pw@{rest}"), 77, "denied");
    });
}

#[test]
fn mistakes_on_zookeeper() {
    within(HANG, || {
        make_mistakes(zk(), redis(), &[69]);
        // A digest is never wrong by itself: it is another user, to whom the nodes do not belong.
        let url = |password| {
            let alice = zk().plain.replace("://", &format!("://alice:{password}@"));
            format!("{alice}/mine?acl=creator_all")
        };
        assert_eq!(run(&url("pw"), "lock m -- true").0, 0);
        fails(&url("wrong"), 77, "ACL");
    });
}

/// What a retry cannot fix ends `elect`, `schedule` and `observe` at once: a supervisor would see a healthy process.
#[test]
fn permanent_errors_end_long_runs() {
    within(HANG, || {
        let no_table = empty_database();
        let stranger = redis().plain.replace("://", "://stranger:wrong@");
        for (url, expected, kind) in [(&no_table, 78, "misconfigured"), (&stranger, 77, "denied")] {
            for line in [
                "elect m",
                "schedule m --every 1h -- true",
                "observe m",
                "ping",
            ] {
                let (code, out, err) = run(url, line);
                assert_eq!(code, expected, "{line}: {out}{err}");
                let (_, out, err) = run(url, &format!("--json {line}"));
                let last = format!("{out}{err}");
                assert_eq!(field(&last, "kind"), kind, "{line}: {last}");
            }
        }
        assert_eq!(run(&format!("{no_table}?create_table=true"), "ping").0, 0);
        let (code, _, err) = run(&no_table, "ping");
        assert_eq!(code, 0, "the ping before has made it: {err}");
    });
}

/// Each would lead in its own memory, and run what only one may run.
#[test]
fn no_command_runs_without_server() {
    for line in [
        "elect m -- echo ran",
        "schedule m --every 1s -- echo ran",
        "lock m -- echo ran",
        "semaphore run m -- echo ran",
        "status",
    ] {
        let (code, out, err) = run("", line);
        assert_eq!((code, &*out), (64, ""), "{line}: {err}");
        assert!(err.contains("no server: give --url"), "{line}: {err}");
    }
}

#[test]
fn mistaken_command_line_is_a_usage_error() {
    for line in [
        "",
        "nonsense",
        "lock -- true",
        "lock m",
        "lock m echo hi",
        "lock m --timeout soon -- true",
        "lock m --no-wait --timeout 1s -- true",
        "revoke m",
        "elect",
        "schedule m -- true",
        "schedule m --every 1s --delay 1s",
        "schedule m --delay 1s --skip-missed",
        "schedule m --daily-at 25:00",
        "schedule m --daily-at 02:30 --zone nowhere",
        "schedule m --daily-at 02:30 --days mon,funday",
        "schedule m --every 1h --days mon",
        "status {}",
    ] {
        let (code, out, err) = run("memory://", line);
        assert_eq!((code, &*out), (64, ""), "{line}: {err}");
    }
    let (code, _, err) = run("nowhere", "ping");
    assert_eq!(code, 64, "{err}");
}

#[test]
fn no_password_is_shown() {
    let url = "redis://user:open-sesame@127.0.0.1:1";
    for line in ["ping --timeout 300ms", "--help", "status --help"] {
        let (_, out, err) = run(url, line);
        assert!(!format!("{out}{err}").contains("open-sesame"), "{out}{err}");
    }
}
