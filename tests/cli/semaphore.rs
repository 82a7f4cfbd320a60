//! The semaphores from a shell: what the command prints, and its exit codes.

use std::time::Instant;

use mysql::prelude::Queryable;
use rustix::process::Signal;
use testbed::{Direction, Proxy, TempDir, is_alive, wait_until, within};

use crate::mysql_ground::{empty_database, operator};
use crate::program::{HANG, PATIENCE, Program, field, run, run_script};

struct Shell {
    url: String,
}

impl Shell {
    /// With a semaphore of this capacity.
    fn new(semaphore: &str) -> Shell {
        let url = empty_database();
        let shell = Shell { url };
        shell.says(&format!("create {semaphore}"), 0, "");
        shell
    }

    /// Checks the exit code, and that each of these `name=value` is printed.
    #[track_caller]
    fn says(&self, line: &str, code: i32, fields: &str) {
        let (exit, out, err) = run(&self.url, &format!("semaphore --json {line}"));
        assert_eq!(exit, code, "{line}: {out}{err}");
        for (name, value) in fields.split(' ').filter_map(|field| field.split_once('=')) {
            assert_eq!(field(&out, name), value, "{line}: {out}");
        }
    }
}

#[test]
fn shell_creates_acquires_runs_and_releases() {
    within(HANG, || {
        let shell = Shell {
            url: empty_database(),
        };
        shell.says("usage", 78, "");
        shell.says("create backup 2", 0, "capacity=2 held=0 free=2");
        shell.says("acquire job-1 backup", 0, "result=acquired");
        let again = "result=already_acquired semaphore=backup fence=1";
        shell.says("acquire job-1 backup:1", 0, again);
        shell.says("usage backup", 0, "capacity=2 held=1 free=1");
        let waits = "acquire job-2 backup:2 --timeout 300ms";
        shell.says(waits, 75, "result=exhausted held=1 wanted=2");
        let holder = "external_id=job-1 owner=null expires_in_ms=null";
        shell.says("holders backup", 0, holder);
        shell.says("release job-1", 0, "result=released");
        shell.says("release job-1", 0, "result=already_released");
        shell.says("acquire job-1 backup", 73, "result=already_released");
        shell.says("release unknown", 66, "result=unknown");
        shell.says("sweep", 0, "");
        // While a command runs its permit is held, and its exit code is that of contend.
        let inner = format!("{} semaphore --json usage; exit 7", crate::CONTEND);
        let (code, out, _) = run_script(&shell.url, "semaphore run backup:2", &inner);
        assert_eq!((code, field(&out, "held")), (7, "2"), "{out}");
        shell.says("usage", 0, "capacity=2 held=0 free=2");
        for (line, code) in [
            ("usage none", 66),
            ("acquire x none", 66),
            ("set-capacity none 4", 66),
            ("acquire x backup:0", 64),
            ("acquire x backup:many", 64),
            ("acquire x", 64),
            ("acquire x backup --ttl -1s", 64),
            ("acquire x backup backup", 64),
            ("create backup -1", 64),
            ("run backup", 64),
            ("", 64),
        ] {
            shell.says(line, code, "");
        }
    });
}

#[test]
fn expired_permits_are_shown_and_swept() {
    within(HANG, || {
        let shell = Shell::new("gpu 2");
        shell.says("acquire job gpu --ttl 1h", 0, "");
        let age = "UPDATE contend_permit_request SET reclaim_at = reclaim_at - INTERVAL 2 HOUR";
        operator(&shell.url).query_drop(age).unwrap();
        shell.says("usage gpu", 0, "held=1 expired=1");
        shell.says("sweep", 0, "external_id=job reason=expired");
        shell.says("usage gpu", 0, "held=0 expired=0");
    });
}

/// The guardian's work: a command does not outlive a parent that was killed, and finds its fence.
#[test]
fn killed_parent_ends_command_under_permits() {
    within(HANG, || {
        let shell = Shell::new("gpu 1");
        let script = "trap '' TERM; \
                      sh -c 'echo pid $$ fence $CONTEND_FENCE as $CONTEND_EXTERNAL_ID; exec sleep 600'; true";
        let mut parent = Program::start_script(&shell.url, "semaphore run gpu", script);
        let line = parent.says("pid ");
        let [_, sleeper, _, fence, _, id] = line.split(' ').collect::<Vec<_>>()[..] else {
            panic!("{line}")
        };
        assert!(fence.parse::<u64>().is_ok(), "{line}");
        let sleeper: u32 = sleeper.parse().unwrap();
        assert!(is_alive(sleeper));
        shell.says("holders gpu", 0, &format!("external_id={id}"));
        shell.says("run gpu --no-wait -- true", 75, "");
        // By default it waits, and says for what; a signal ends the wait at once, and nothing is held.
        let mut waiting = Program::start(&shell.url, "semaphore run gpu -- true");
        waiting.says("\"gpu\" is exhausted: 1 of 1 permits are held, 1 wanted");
        assert_eq!(waiting.terminate().0, 128 + 15);
        let killed = Instant::now();
        parent.signal(Signal::KILL);
        wait_until(PATIENCE, "the command was ended too", || !is_alive(sleeper));
        println!("semaphore run: gone {:?} after kill -9", killed.elapsed());
    });
}

/// As with a lock: the permits were held to the command's end, and that is what its code is about.
#[test]
fn hanging_server_at_release_keeps_exit_code() {
    within(HANG, || {
        let shell = Shell::new("gpu 1");
        let proxy = Proxy::before(&shell.url);
        let through = proxy.url(&shell.url);
        let folder = TempDir::new();
        let end = folder.path().join("end");
        let script = "echo in; until [ -e END ]; do sleep 0.05; done; exit 7";
        let script = script.replace("END", end.to_str().unwrap());
        let mut program = Program::start_script(&through, "semaphore run gpu", &script);
        program.says("in");
        proxy.black_hole(Direction::Both);
        std::fs::write(&end, "").unwrap();
        program.says("released without an answer");
        assert_eq!(program.ends().0, 7);
    });
}

/// One CONTEND_URL serves all commands: what it says about mutexes is ignored.
#[test]
fn url_for_mutexes_serves_semaphores() {
    within(HANG, || {
        let url = Shell::new("gpu 1").url;
        let url = format!("{url}?create_table=true&ttl=2s&transition=1s&table=other");
        for line in ["acquire job gpu", "release job", "run gpu -- true"] {
            let (code, out, err) = run(&url, &format!("semaphore {line}"));
            assert_eq!(code, 0, "{line}: {out}{err}");
        }
    });
}

/// A script that creates what it needs must not undo what an operator has set.
#[test]
fn create_keeps_capacity() {
    within(HANG, || {
        let shell = Shell::new("gpu 3");
        shell.says("create gpu 3", 0, "capacity=3");
        let (code, _, err) = run(&shell.url, "semaphore create gpu 5");
        let help = "gpu: exists with capacity 3; `contend semaphore set-capacity gpu 5` changes it";
        assert!(code == 65 && err.contains(help), "{code}: {err}");
        shell.says("usage gpu", 0, "capacity=3");
        shell.says("set-capacity gpu 5", 0, "before=3 capacity=5");
    });
}

/// As `lock` does: what the command exits with, 143 if it died of the signal.
#[test]
fn signal_is_passed_on_to_the_command() {
    within(HANG, || {
        let shell = Shell::new("gpu 1");
        let traps = "trap 'exit 7' TERM; echo in; while :; do sleep 0.05; done";
        for (script, code) in [("echo in; exec sleep 60", 128 + 15), (traps, 7)] {
            let mut program = Program::start_script(&shell.url, "semaphore run gpu", script);
            program.says("in");
            let (ended, lines) = program.terminate();
            assert_eq!(ended, code, "{script}: {lines:#?}");
            shell.says("usage gpu", 0, "held=0");
        }
    });
}
