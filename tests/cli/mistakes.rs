//! Mistakes in the URL, the password, the tables and the command line: exit codes, and one line that says what is
//! wrong.

use mysql::prelude::Queryable;
use testbed::{Direction, Proxy, RedisServer, within};

use crate::backends::{Backend, HANG, mysql, redis, zk};
use crate::mysql_ground;
use crate::program::{field, run};

/// How one backend is used wrongly.
struct Ways {
    backend: &'static Backend,
    /// A server of another kind, and the exit code for it.
    other_kind: &'static Backend,
    other_code: i32,
    /// A URL with a wrong password, and what is said of it.
    wrong_password: String,
    denied: &'static str,
    /// A URL of a user without a privilege that is needed, and what is said of it.
    unprivileged: String,
    lacks: &'static str,
}

#[test]
fn mistakes_on_redis() {
    within(HANG, || {
        let server = RedisServer::start();
        // May do everything but listen.
        let rules = "ACL SETUSER deaf on >pw ~* resetchannels +@all";
        server.cli(&rules.split(' ').collect::<Vec<_>>());
        make_mistakes(&Ways {
            backend: redis(),
            other_kind: mysql(),
            other_code: 78,
            wrong_password: format!("redis://bob:wrong@{}", redis().addr),
            denied: "\"bob\"",
            unprivileged: format!("redis://deaf:pw@{}", server.addr()),
            lacks: "channel",
        });
    });
}

#[test]
fn mistakes_on_mysql() {
    within(HANG, || {
        let backend = mysql();
        let url = (backend.url)(backend.addr);
        let (_, rest) = url.split_once('@').unwrap();
        let (_, database) = rest.split_once('/').unwrap();
        let mut operator = mysql_ground::operator(&url);
        for statement in [
            "CREATE USER IF NOT EXISTS reader IDENTIFIED BY 'pw'".to_owned(),
            format!("GRANT SELECT ON {database}.* TO reader"),
        ] {
            operator.query_drop(statement).unwrap();
        }
        make_mistakes(&Ways {
            backend,
            other_kind: redis(),
            other_code: 69,
            wrong_password: format!("mysql://reader:wrong@{rest}"),
            denied: "'reader'",
            unprivileged: format!("mysql://reader:pw@{rest}"),
            lacks: "denied",
        });
    });
}

#[test]
fn mistakes_on_zookeeper() {
    within(HANG, || {
        let backend = zk();
        // A digest is never wrong by itself: it is another user, to whom the nodes do not belong.
        let owner = format!("zk://alice:pw@{}/mine?acl=creator_all", backend.addr);
        assert_eq!(run(&owner, &["lock", "m", "--", "true"]).0, 0);
        let stranger = format!("zk://alice:wrong@{}/mine?acl=creator_all", backend.addr);
        make_mistakes(&Ways {
            backend,
            other_kind: redis(),
            other_code: 69,
            wrong_password: stranger.clone(),
            denied: "ACL",
            unprivileged: stranger,
            lacks: "ACL",
        });
    });
}

fn make_mistakes(ways: &Ways) {
    let backend = ways.backend;
    let fails = |url: &str, code: i32, says: &str| {
        let (exit, out, err) = run(url, &["lock", "m", "--no-wait", "--", "true"]);
        assert_eq!(exit, code, "{url}: {out}{err}");
        assert!(err.starts_with("contend: "), "{err}");
        assert!(err.contains(says), "{url}: no {says:?} in {err}");
        assert_eq!(err.lines().count(), 1, "{err}");
    };
    let proxy = Proxy::to(backend.addr);
    proxy.refuse();
    fails(&backend.through(&proxy), 69, "refused");
    let other = (backend.url)(ways.other_kind.addr);
    fails(&other, ways.other_code, "not locked");
    let proxy = Proxy::to(backend.addr);
    proxy.black_hole(Direction::Both);
    fails(&backend.through(&proxy), 69, "not locked");
    fails(&ways.unprivileged, 77, ways.lacks);
    fails(&ways.wrong_password, 77, ways.denied);
    let short = ["lock", "m", "--ttl", "1ms", "--", "true"];
    let (code, _, err) = run(&backend.url(), &short);
    assert_eq!(code, 64, "{err}");
    assert!(err.contains("at least"), "{err}");
}

/// What a retry cannot fix ends `elect`, `schedule` and `observe` at once: a supervisor would see a healthy process.
#[test]
fn refusal_for_good_ends_what_runs_for_long() {
    within(HANG, || {
        let no_table = mysql_ground::empty_database();
        let server = RedisServer::start();
        let stranger = server.url().replace("redis://", "redis://nobody:wrong@");
        for (url, expected, kind) in [(&no_table, 78, "misconfigured"), (&stranger, 77, "denied")] {
            for args in [
                &["elect", "m"][..],
                &["schedule", "m", "--every", "1h", "--", "true"],
                &["observe", "m"],
                &["ping"],
            ] {
                let (code, out, err) = run(url, args);
                assert_eq!(code, expected, "{args:?}: {out}{err}");
                let (_, out, err) = run(url, &[&["--json"][..], args].concat());
                let last = format!("{out}{err}");
                assert_eq!(field(&last, "kind"), kind, "{args:?}: {last}");
            }
        }
        let creating = format!("{no_table}?create_table=true");
        assert_eq!(run(&creating, &["ping"]).0, 0);
        assert_eq!(
            run(&no_table, &["ping"]).0,
            0,
            "the ping before has made it"
        );
    });
}

/// Each would lead in its own memory, and run what only one may run.
#[test]
fn no_command_runs_without_server() {
    for args in [
        &["elect", "m", "--", "echo", "ran"][..],
        &["schedule", "m", "--every", "1s", "--", "echo", "ran"],
        &["lock", "m", "--", "echo", "ran"],
        &["semaphore", "run", "m", "--", "echo", "ran"],
        &["status"],
    ] {
        let (code, out, err) = run("", args);
        assert_eq!((code, &*out), (64, ""), "{args:?}: {err}");
        assert!(err.contains("no server: give --url"), "{args:?}: {err}");
    }
}

#[test]
fn mistaken_command_line_is_a_usage_error() {
    for args in [
        &[][..],
        &["nonsense"],
        &["lock", "--", "true"],
        &["lock", "m"],
        &["lock", "m", "echo", "hi"],
        &["lock", "m", "--timeout", "soon", "--", "true"],
        &["lock", "m", "--no-wait", "--timeout", "1s", "--", "true"],
        &["revoke", "m"],
        &["elect"],
        &["schedule", "m", "--", "true"],
        &["schedule", "m", "--every", "1s", "--delay", "1s"],
        &["schedule", "m", "--daily-at", "25:00"],
        &["schedule", "m", "--daily-at", "02:30", "--zone", "nowhere"],
        &[
            "schedule",
            "m",
            "--daily-at",
            "02:30",
            "--days",
            "mon,funday",
        ],
        &["schedule", "m", "--every", "1h", "--days", "mon"],
        &["status", ""],
    ] {
        let (code, out, err) = run("memory://", args);
        assert_eq!((code, &*out), (64, ""), "{args:?}: {err}");
    }
    let (code, _, err) = run("nowhere", &["ping"]);
    assert_eq!(code, 64, "{err}");
}
