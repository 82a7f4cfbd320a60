//! The semaphores from a shell: what the command prints, and its exit codes.

use crate::CONTEND;

use std::process::Command;

use crate::mysql_ground::{HANG, empty_database, operator};
use crate::program::{PATIENCE, Program, field, run};
use mysql::prelude::Queryable;
use rustix::process::Signal;
use testbed::{Direction, Proxy, TempDir, is_alive, wait_until, within};

struct Shell {
    url: String,
}

impl Shell {
    /// Its exit code and what it printed.
    fn run(&self, args: &[&str]) -> (i32, String) {
        let output = Command::new(CONTEND)
            .args(["semaphore", "--url", &self.url, "--json"])
            .args(args)
            .output()
            .unwrap();
        let printed = String::from_utf8(output.stdout).unwrap();
        let code = output.status.code().unwrap();
        (code, printed.trim_end().to_owned())
    }

    #[track_caller]
    fn says(&self, args: &[&str], code: i32, printed: &str) {
        assert_eq!(self.run(args), (code, printed.to_owned()), "{args:?}");
    }
}

#[test]
fn a_shell_creates_acquires_runs_and_releases() {
    within(HANG, || {
        let shell = Shell {
            url: empty_database(),
        };
        shell.says(
            &["create", "backup", "2"],
            0,
            r#"{"semaphore":"backup","capacity":2,"held":0,"expired":0,"free":2,"requests":0}"#,
        );
        shell.says(
            &["acquire", "job-1", "backup"],
            0,
            r#"{"result":"acquired","permits":[{"semaphore":"backup","count":1,"fence":1}]}"#,
        );
        shell.says(
            &["acquire", "job-1", "backup:1"],
            0,
            r#"{"result":"already_acquired","permits":[{"semaphore":"backup","count":1,"fence":1}]}"#,
        );
        shell.says(
            &["usage", "backup"],
            0,
            r#"{"semaphore":"backup","capacity":2,"held":1,"expired":0,"free":1,"requests":1}"#,
        );
        shell.says(
            &["acquire", "job-2", "backup:2", "--timeout", "300ms"],
            75,
            r#"{"result":"exhausted","semaphore":"backup","capacity":2,"held":1,"wanted":2}"#,
        );
        let (code, holders) = shell.run(&["holders", "backup"]);
        assert_eq!(code, 0);
        assert!(
            holders.starts_with(r#"{"external_id":"job-1","owner":null,"count":1,"#),
            "{holders}"
        );
        shell.says(&["renew", "job-1"], 0, r#"{"result":"renewed"}"#);
        shell.says(&["release", "job-1"], 0, r#"{"result":"released"}"#);
        shell.says(&["release", "job-1"], 0, r#"{"result":"already_released"}"#);
        shell.says(
            &["acquire", "job-1", "backup"],
            73,
            r#"{"result":"already_released"}"#,
        );
        shell.says(&["release", "nobody"], 66, r#"{"result":"unknown"}"#);
        shell.says(&["renew", "nobody"], 66, r#"{"result":"unknown"}"#);
        shell.says(&["sweep"], 0, r#"{"result":"swept","requests":[]}"#);
        // While a command runs its permit is held, and its exit code is ours.
        let inner = format!(
            "{CONTEND} semaphore --url {} --json usage; exit 7",
            shell.url
        );
        shell.says(
            &["run", "backup:2", "--", "sh", "-c", &inner],
            7,
            r#"{"semaphore":"backup","capacity":2,"held":2,"expired":0,"free":0,"requests":1}"#,
        );
        shell.says(
            &["usage"],
            0,
            r#"{"semaphore":"backup","capacity":2,"held":0,"expired":0,"free":2,"requests":0}"#,
        );
        // More than the capacity is exhausted for now: it may grow (review C15).
        shell.says(
            &["acquire", "x", "backup:3"],
            75,
            r#"{"result":"exhausted","semaphore":"backup","capacity":2,"held":0,"wanted":3}"#,
        );
        for (args, code) in [
            (&["usage", "none"][..], 66),
            (&["acquire", "x", "none"], 66),
            (&["acquire", "x", "backup:0"], 64),
            (&["acquire", "x", "backup:many"], 64),
            (&["acquire", "x"], 64),
            (&["acquire", "x", "backup", "--ttl", "-1s"], 64),
            (&["acquire", "x", "backup", "backup"], 64),
            (&["create", "backup", "-1"], 64),
            (&["run", "backup"], 64),
            (&["nonsense"], 64),
            (&[], 64),
        ] {
            assert_eq!(shell.run(args), (code, String::new()), "{args:?}");
        }
    });
}

#[test]
fn usage_shows_what_has_expired() {
    within(HANG, || {
        let url = empty_database();
        let shell = Shell { url: url.clone() };
        assert_eq!(shell.run(&["create", "gpu", "2"]).0, 0);
        assert_eq!(shell.run(&["acquire", "job", "gpu", "--ttl", "1h"]).0, 0);
        let age = "UPDATE contend_permit_request SET reclaim_at = reclaim_at - INTERVAL 2 HOUR";
        operator(&url).query_drop(age).unwrap();
        shell.says(
            &["usage", "gpu"],
            0,
            r#"{"semaphore":"gpu","capacity":2,"held":1,"expired":1,"free":1,"requests":1}"#,
        );
        let text = Command::new(CONTEND)
            .args(["semaphore", "--url", &url, "usage", "gpu"])
            .output()
            .unwrap();
        let text = String::from_utf8(text.stdout).unwrap();
        assert!(text.contains("1 expired"), "{text}");
    });
}

/// The guardian's work: a command does not outlive a parent that was killed, and finds its fence.
#[test]
fn a_command_under_permits_ends_with_a_killed_parent() {
    within(HANG, || {
        let url = empty_database();
        let shell = Shell { url: url.clone() };
        assert_eq!(shell.run(&["create", "gpu", "1"]).0, 0);
        let script = "sh -c 'echo fence $CONTEND_FENCE pid $$ as $CONTEND_EXTERNAL_ID; exec sleep 600'; true";
        let run = ["semaphore", "run", "gpu", "--", "sh", "-c", script];
        let mut parent = Program::start(&url, &run);
        let line = parent.says("fence ");
        let words: Vec<&str> = line.split(' ').collect();
        assert!(words[1].parse::<u64>().is_ok(), "{line}");
        let sleeper: u32 = words[3].parse().unwrap();
        assert!(is_alive(sleeper));
        let (_, holders) = shell.run(&["holders", "gpu"]);
        assert!(holders.contains(words[5]), "{line}: {holders}");
        assert_eq!(shell.run(&["run", "gpu", "--no-wait", "--", "true"]).0, 75);
        // By default it waits, and says for what; a signal ends the wait at once, and nothing is held.
        let mut waiting = Program::start(&url, &["semaphore", "run", "gpu", "--", "true"]);
        waiting.says("waiting for gpu: 1 of 1 permits held by 1 request");
        assert_eq!(waiting.terminate().0, 128 + 15);
        parent.signal(Signal::KILL);
        wait_until(PATIENCE, "the command was ended too", || !is_alive(sleeper));
    });
}

/// As with a lock: the permits were held to the command's end, and that is what its code is about.
#[test]
fn a_server_that_hangs_at_the_release_does_not_change_the_commands_code() {
    within(HANG, || {
        let url = empty_database();
        let shell = Shell { url: url.clone() };
        assert_eq!(shell.run(&["create", "gpu", "1"]).0, 0);
        let (before, rest) = url.split_once('@').unwrap();
        let (addr, database) = rest.split_once('/').unwrap();
        let proxy = Proxy::to(addr.replace("localhost", "127.0.0.1").parse().unwrap());
        let through = format!("{before}@{}/{database}", proxy.addr());
        let folder = TempDir::new();
        let end = folder.path().join("end");
        let script = "echo in; until [ -e \"$0\" ]; do sleep 0.05; done; exit 7";
        let run = ["semaphore", "run", "gpu", "--", "sh", "-c", script];
        let mut program = Program::start(&through, &[&run[..], &[end.to_str().unwrap()]].concat());
        program.says("in");
        proxy.black_hole(Direction::Both);
        std::fs::write(&end, "").unwrap();
        program.says("released without an answer");
        assert_eq!(program.ends().0, 7);
    });
}

/// As the library's: 30 s, unless the URL says otherwise.
#[test]
fn permits_of_a_command_have_the_ttl_of_the_library() {
    within(HANG, || {
        let url = empty_database();
        let shell = Shell { url: url.clone() };
        assert_eq!(shell.run(&["create", "gpu", "1"]).0, 0);
        let inner = format!("{CONTEND} semaphore --url {url} --json holders gpu");
        let run = ["run", "gpu", "--", "sh", "-c", &inner];
        let expires_in = |shell: &Shell, args: &[&str]| -> u64 {
            let (code, holders) = shell.run(args);
            assert_eq!(code, 0, "{holders}");
            field(&holders, "expires_in_ms").parse().unwrap()
        };
        let by_default = expires_in(&shell, &run);
        assert!((1..=30_000).contains(&by_default), "{by_default} ms");
        let asked = expires_in(&shell, &[&["run", "--ttl", "10m"], &run[1..]].concat());
        assert!((30_001..=600_000).contains(&asked), "{asked} ms");
        let shell = Shell {
            url: format!("{url}?ttl=9m"),
        };
        let by_url = expires_in(&shell, &run);
        assert!((30_001..=540_000).contains(&by_url), "{by_url} ms");
    });
}

/// One CONTEND_URL serves all commands, that of the README too.
#[test]
fn a_url_with_parameters_for_mutexes_serves_semaphores_too() {
    within(HANG, || {
        let url = empty_database();
        for parameters in [
            "create_table=true",
            "transition=1s",
            "ttl=2s",
            "create_table=true&ttl=2s&transition=1s&initial_delay=0s&table=other",
        ] {
            let url = format!("{url}?{parameters}");
            for args in [
                &["semaphore", "create", "gpu", "1"][..],
                &["semaphore", "usage"],
                &["semaphore", "acquire", parameters, "gpu"],
                &["semaphore", "release", parameters],
                &["semaphore", "run", "gpu", "--", "true"],
            ] {
                let (code, out, err) = run(&url, args);
                assert_eq!(code, 0, "{parameters}: {args:?}: {out}{err}");
            }
        }
        for parameters in ["creat_table=true", "ttl=soon", "create_table=perhaps"] {
            let (code, _, err) = run(&format!("{url}?{parameters}"), &["semaphore", "usage"]);
            assert_eq!(code, 64, "{parameters}: {err}");
        }
    });
}

/// A script that creates what it needs must not undo what an operator has set.
#[test]
fn a_capacity_is_changed_only_by_who_says_so() {
    within(HANG, || {
        let url = empty_database();
        let shell = Shell { url: url.clone() };
        let usage =
            r#"{"semaphore":"gpu","capacity":3,"held":0,"expired":0,"free":3,"requests":0}"#;
        shell.says(&["create", "gpu", "3"], 0, usage);
        shell.says(&["create", "gpu", "3"], 0, usage);
        shell.says(&["create", "gpu", "5"], 65, "");
        let (code, out, err) = run(&url, &["semaphore", "create", "gpu", "5"]);
        assert_eq!((code, &*out), (65, ""), "{err}");
        assert!(
            err.contains(
                "gpu: exists with capacity 3; `contend semaphore set-capacity gpu 5` changes it"
            ),
            "{err}"
        );
        shell.says(&["usage", "gpu"], 0, usage);

        let (code, out, err) = run(&url, &["semaphore", "set-capacity", "gpu", "5"]);
        assert_eq!((code, &*out), (0, "gpu: capacity 3 -> 5\n"), "{err}");
        shell.says(
            &["set-capacity", "gpu", "4"],
            0,
            r#"{"semaphore":"gpu","before":5,"capacity":4}"#,
        );
        shell.says(&["set-capacity", "none", "4"], 66, "");
        shell.says(&["set-capacity", "gpu", "-1"], 64, "");
    });
}

/// Whoever types commands cannot call functions.
#[test]
fn what_to_do_is_a_command_and_not_a_call() {
    within(HANG, || {
        let url = empty_database();
        let contend = |args: &[&str]| run(&url, &[&["semaphore"], args].concat());
        let (code, _, err) = contend(&["usage"]);
        assert_eq!(code, 78, "{err}");
        assert!(err.contains("`contend semaphore create NAME N`"), "{err}");
        assert!(!err.contains("create_tables"), "{err}");

        assert_eq!(contend(&["create", "gpu", "1"]).0, 0);
        let raise = "`contend semaphore set-capacity gpu 2` raises it";
        for args in [
            &["acquire", "x", "gpu:2"][..],
            &["run", "gpu:2", "--no-wait", "--", "true"],
            &["run", "gpu:2", "--no-wait", "--json", "--", "true"],
        ] {
            let (code, out, err) = contend(args);
            assert_eq!(code, 75, "{args:?}: {out}{err}");
            let said = format!("{out}{err}");
            assert!(said.contains(raise), "{args:?}: {said}");
            assert!(!said.contains("set_capacity"), "{args:?}: {said}");
        }
        let mut waiting = Program::start(&url, &["semaphore", "run", "gpu:2", "--", "true"]);
        waiting.says(raise);
        assert_eq!(waiting.terminate().0, 128 + 15);
    });
}

/// As with a table of mutexes: who may not is told what to grant.
#[test]
fn a_user_without_a_grant_is_told_which_one_is_missing() {
    within(HANG, || {
        let url = empty_database();
        let (before, rest) = url.split_once('@').unwrap();
        let (_, database) = rest.split_once('/').unwrap();
        let user = format!("sem_{database}");
        let theirs = format!("{}://{user}:pw@{rest}", before.split_once("://").unwrap().0);
        let mut operator = operator(&url);
        let mut does = |sql: String| operator.query_drop(sql).unwrap();
        does(format!("CREATE USER {user} IDENTIFIED BY 'pw'"));
        // To log in with.
        does(format!("CREATE TABLE {database}.other (id INT)"));
        does(format!("GRANT SELECT ON {database}.other TO {user}"));
        let contend = |args: &[&str]| run(&theirs, &[&["semaphore"], args].concat());
        let tables = [
            "contend_semaphore",
            "contend_permit_request",
            "contend_permit",
            "contend_semaphore_capacity_change",
        ];
        let grant = "grant SELECT, INSERT, UPDATE and DELETE on contend_semaphore, \
                     contend_permit_request, contend_permit, contend_semaphore_capacity_change";
        let is_told = |args: &[&str], says: &[&str]| {
            let (code, out, err) = contend(args);
            assert_eq!(code, 77, "{args:?}: {out}{err}");
            for text in says.iter().chain(&["denied", grant]) {
                assert!(err.contains(text), "{args:?}: no {text:?} in {err}");
            }
            assert!(!err.contains(&user), "{args:?}: {err}");
        };
        // Whether or not they are there: this user cannot see it.
        is_told(
            &["create", "gpu", "1"],
            &["CREATE", "sql/init-semaphore.sql"],
        );
        assert_eq!(run(&url, &["semaphore", "create", "gpu", "1"]).0, 0);
        is_told(
            &["create", "gpu", "1"],
            &["CREATE", "sql/init-semaphore.sql"],
        );
        for args in [
            &["usage"][..],
            &["acquire", "x", "gpu"],
            &["run", "gpu", "--", "true"],
        ] {
            is_told(args, &[]);
        }
        for table in tables {
            does(format!("GRANT SELECT ON {database}.{table} TO {user}"));
        }
        assert_eq!(contend(&["usage", "gpu"]).0, 0);
        for args in [&["acquire", "x", "gpu"][..], &["set-capacity", "gpu", "2"]] {
            is_told(args, &[]);
        }
        for table in tables {
            let rights = "INSERT, UPDATE, DELETE";
            does(format!("GRANT {rights} ON {database}.{table} TO {user}"));
        }
        assert_eq!(contend(&["run", "gpu", "--", "true"]).0, 0);
    });
}

/// As `lock` does: what the command exits with, 143 if it died of the signal.
#[test]
fn a_signal_is_passed_on_and_the_commands_code_comes_back() {
    within(HANG, || {
        let url = empty_database();
        assert_eq!(run(&url, &["semaphore", "create", "gpu", "1"]).0, 0);
        for (script, code) in [
            ("echo in; exec sleep 60", 128 + 15),
            (
                "trap 'exit 7' TERM; echo in; while :; do sleep 0.05; done",
                7,
            ),
            (
                "trap 'exit 0' TERM; echo in; while :; do sleep 0.05; done",
                0,
            ),
        ] {
            for run in [&["semaphore", "run", "gpu"][..], &["lock", "m"]] {
                let on = match run[0] {
                    "lock" => format!("{url}?create_table=true"),
                    _ => url.clone(),
                };
                let mut program = Program::start(&on, &[run, &["--", "sh", "-c", script]].concat());
                program.says("in");
                let (ended, lines) = program.terminate();
                assert_eq!(ended, code, "{run:?} {script}: {lines:#?}");
            }
            let (code, usage, _) = run(&url, &["semaphore", "--json", "usage", "gpu"]);
            assert_eq!((code, field(&usage, "held")), (0, "0"), "{usage}");
        }
    });
}

#[test]
fn one_of_a_thing_is_no_plural() {
    within(HANG, || {
        let url = empty_database();
        let contend = |args: &[&str]| run(&url, &[&["semaphore"], args].concat());
        assert_eq!(contend(&["create", "gpu", "2"]).0, 0);
        let ttl = ["acquire", "x", "gpu", "--ttl", "1h"];
        assert_eq!(contend(&ttl).0, 0);
        let usage = contend(&["usage", "gpu"]).1;
        assert!(usage.contains("by 1 request, "), "{usage}");
        let mut waiting = Program::start(&url, &["semaphore", "run", "gpu:2", "--", "true"]);
        waiting.says("waiting for gpu: 1 of 2 permits held by 1 request");
        assert_eq!(waiting.terminate().0, 128 + 15);
        assert_eq!(contend(&["acquire", "y", "gpu", "--ttl", "1h"]).0, 0);
        let usage = contend(&["usage", "gpu"]).1;
        assert!(usage.contains("by 2 requests, "), "{usage}");
        for id in ["x", "y"] {
            assert_eq!(contend(&["release", id]).0, 0);
        }
        let brief = ["acquire", "z", "gpu", "--ttl", "8s"];
        assert_eq!(contend(&brief).0, 0);
        wait_until(PATIENCE, "it was swept", || {
            let (code, swept, _) = contend(&["sweep"]);
            assert_eq!(code, 0, "{swept}");
            match swept.contains("z: expired") {
                true => assert!(swept.ends_with("\n1 request swept\n"), "{swept}"),
                false => assert_eq!(swept, "0 requests swept\n"),
            }
            swept.contains("z: expired")
        });
    });
}
