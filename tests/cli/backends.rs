//! What every command does, on every backend: the same facts, on real servers.

use std::sync::LazyLock;
use std::time::Instant;

use rustix::process::Signal;
use testbed::{Proxy, RedisServer, ZooKeeperServer, is_alive, wait_until};

use crate::mysql_ground;
use crate::program::{PATIENCE, Program, field, number, run, run_script};

/// One kind of server, shared by the tests of this process.
pub struct Backend {
    /// Its URL, without parameters.
    pub plain: String,
    /// Parameters for a lease that ends soon enough for a test.
    lease: &'static str,
}

impl Backend {
    fn new(plain: String, lease: &'static str) -> Backend {
        Backend { plain, lease }
    }

    /// Its URL, with a lease.
    pub fn url(&self) -> String {
        format!("{}?{}", self.plain, self.lease)
    }
}

pub fn redis() -> &'static Backend {
    static SERVER: LazyLock<RedisServer> = LazyLock::new(RedisServer::start);
    static BACKEND: LazyLock<Backend> =
        LazyLock::new(|| Backend::new(SERVER.url(), "ttl=4s&transition=1s"));
    &BACKEND
}

pub fn mysql() -> &'static Backend {
    static BACKEND: LazyLock<Backend> =
        LazyLock::new(|| Backend::new(mysql_ground::database(), "ttl=4s&transition=1s"));
    &BACKEND
}

pub fn zk() -> &'static Backend {
    static SERVER: LazyLock<ZooKeeperServer> = LazyLock::new(ZooKeeperServer::start);
    static BACKEND: LazyLock<Backend> =
        LazyLock::new(|| Backend::new(SERVER.url(), "session_timeout=4s"));
    &BACKEND
}

macro_rules! on_every_backend {
    ($($fact:ident),* $(,)?) => {
        on_every_backend!(@on redis, $($fact),*);
        on_every_backend!(@on mysql, $($fact),*);
        on_every_backend!(@on zk, $($fact),*);
    };
    (@on $backend:ident, $($fact:ident),*) => {
        mod $backend {
            use testbed::within;
            $(
                #[test]
                fn $fact() {
                    let backend = super::$backend();
                    within(crate::program::HANG, || super::$fact(backend));
                }
            )*
        }
    };
}

on_every_backend!(
    unreachable_server_has_its_code,
    operator_sees_and_revokes,
    observer_follows_owners,
    waiting_lock_names_the_holder,
    several_mutexes_are_locked_together,
    scheduled_command_fails_over,
    elected_leader_runs_its_command,
    killed_parent_ends_command,
);

fn elect(url: &str, mutex: &str, id: &str) -> Program {
    Program::start(url, &format!("elect --json {mutex} --id {id}"))
}

/// What `status --json` says of a mutex.
fn status(url: &str, mutex: &str) -> String {
    let (code, out, err) = run(url, &format!("status {mutex} --json"));
    assert_eq!(code, 0, "{err}");
    out
}

fn has_waiter(url: &str, mutex: &str) -> bool {
    !status(url, mutex).contains("\"waiting\":[]")
}

fn revoke(url: &str, mutex: &str, fence: u64) -> (i32, String) {
    let (code, _, err) = run(url, &format!("revoke {mutex} --fence {fence}"));
    (code, err)
}

fn unreachable_server_has_its_code(backend: &Backend) {
    let (code, out, _) = run(&backend.url(), "ping --json");
    assert_eq!((code, field(&out, "reachable")), (0, "true"), "{out}");
    let gone = Proxy::before(&backend.plain);
    gone.refuse();
    let url = gone.url(&backend.url());
    let (code, out, _) = run(&url, "ping --json --timeout 1s");
    let said = ["reachable", "code"].map(|name| field(&out, name));
    assert_eq!((code, said), (69, ["false", "69"]), "{out}");
    let (code, _, err) = run(&url, "status --json");
    assert_eq!((code, field(&err, "code")), (69, "69"), "{err}");
    for line in [
        "ping --timeout 1s",
        "status m",
        "revoke m --fence 1",
        "lock m --timeout 1s -- true",
        "lock m --no-wait -- true",
    ] {
        let (code, out, err) = run(&url, line);
        assert_eq!((code, err.is_empty()), (69, false), "{line}: {out}{err}");
    }
    // What may pass does not end what runs until it is stopped: the log says so.
    let mut elect = Program::start(&url, "elect m");
    elect.says("WARN m: ");
    assert_eq!(elect.terminate().0, 0);
}

fn operator_sees_and_revokes(backend: &Backend) {
    let url = backend.url();
    assert_eq!(field(&status(&url, "seen"), "owner"), "null");
    let mut first = elect(&url, "seen", "first");
    let fence = number(&first.says("\"acquired\""), "fence");
    let mut second = elect(&url, "seen", "second");
    wait_until(PATIENCE, "the second waits", || has_waiter(&url, "seen"));
    let seen = status(&url, "seen");
    let said = (field(&seen, "owner"), number(&seen, "fence"));
    assert_eq!(said, ("first", fence), "{seen}");
    // Without a name, all.
    let (_, table, _) = run(&url, "status");
    assert!(table.starts_with("MUTEX "), "{table}");
    let row = table.lines().find(|line| line.starts_with("seen "));
    assert!(row.unwrap().contains(" first "), "{table}");

    let (code, err) = revoke(&url, "seen", 1);
    assert_eq!(code, 66, "{err}");
    assert!(err.contains("seen: no owner has the fence 1"), "{err}");
    assert_eq!(revoke(&url, "seen", fence).0, 0);
    assert_eq!(number(&first.says("\"released\""), "fence"), fence);
    assert!(number(&second.says("\"acquired\""), "fence") > fence);
}

fn observer_follows_owners(backend: &Backend) {
    let url = backend.url();
    let mut observer = Program::start(&url, "observe followed --json");
    let mut text = Program::start(&url, "observe followed");
    assert_eq!(field(&observer.says("followed"), "owner"), "null");
    text.says("owner \"(free)\"");
    let mut first = elect(&url, "followed", "first");
    let fence = number(&first.says("\"acquired\""), "fence");
    let seen = observer.says("\"owner\":\"first\"");
    assert_eq!(number(&seen, "fence"), fence);
    text.says(&format!("owner \"first\", fence {fence}"));
    let mut second = elect(&url, "followed", "second");
    second.says("\"started\"");
    assert_eq!(first.terminate().0, 0);
    observer.says("\"owner\":\"second\"");
    assert_eq!(second.terminate().0, 0);
    observer.says("\"owner\":null");
    for program in [observer, text] {
        let (code, lines) = program.terminate();
        assert_eq!(code, 0, "{lines:#?}");
    }
}

fn waiting_lock_names_the_holder(backend: &Backend) {
    // A lease whose request limit has room for the first connection on a busy machine.
    let url = &*backend.plain;
    let holding = "lock waited --id the-holder";
    let mut holder = Program::start_script(url, holding, "echo in; exec sleep 600");
    holder.says("in");
    let mut waiting = Program::start(url, "lock waited -- echo mine");
    waiting.says("waiting: waited: held by \"the-holder\"");
    // A signal ends the wait at once, and nothing is held.
    let mut cancelled = Program::start(url, "lock waited -- echo never");
    cancelled.says("waiting");
    let (code, lines) = cancelled.terminate();
    assert_eq!(code, 128 + 15, "{lines:#?}");
    assert_eq!(holder.terminate().0, 128 + 15);
    waiting.says("mine");
    assert_eq!(waiting.ends().0, 0);
}

fn several_mutexes_are_locked_together(backend: &Backend) {
    let url = backend.url();
    let script = "echo fences $CONTEND_FENCE of $CONTEND_MUTEX; exec sleep 600";
    let mut holder = Program::start_script(&url, "lock b a --timeout 30s", script);
    let line = holder.says("fences ");
    assert!(line.ends_with(" of b,a"), "{line}");
    assert_eq!(line.split(',').count(), 3, "{line}");
    for mutex in ["a", "b"] {
        // A busy server may not answer in time.
        wait_until(PATIENCE, "it is held", || {
            let (code, _, err) = run(&url, &format!("lock {mutex} --no-wait -- true"));
            assert!(code == 69 || err.contains("held by"), "{code}: {err}");
            code == 75
        });
    }
    holder.terminate();
    assert_eq!(run(&url, "lock b a --timeout 30s -- true").0, 0);
}

fn scheduled_command_fails_over(backend: &Backend) {
    let url = backend.url();
    let script = "echo run by $PPID of $CONTEND_MUTEX with $CONTEND_FENCE";
    let start = || {
        let mut program = Program::start_script(&url, "schedule jobs --every 100ms", script);
        program.says("started");
        let runs = format!("run by {} of jobs with ", program.pid());
        (program, runs)
    };
    let (mut first, runs) = start();
    let fence = first.says_number(&runs);
    assert_eq!(first.says_number(&runs), fence);
    let (mut second, runs) = start();
    let (code, lines) = first.terminate();
    assert_eq!(code, 0, "{lines:#?}");
    assert!(second.says_number(&runs) > fence);
    assert_eq!(second.terminate().0, 0);
}

/// It runs on the leader only, is ended with the leadership and starts again with the next.
fn elected_leader_runs_its_command(backend: &Backend) {
    let url = backend.url();
    let script = "echo runs with $CONTEND_FENCE; exec sleep 600";
    let start = |id| Program::start_script(&url, &format!("elect elected --id {id}"), script);
    let mut first = start("first");
    let fence = first.says_number("runs with ");
    let mut second = start("second");
    wait_until(PATIENCE, "the second waits", || has_waiter(&url, "elected"));
    assert_eq!(revoke(&url, "elected", fence).0, 0);
    first.says("no longer the leader; ending the command");
    let next = second.says_number("runs with ");
    assert!(next > fence);
    // Told to end, the second passes the signal on, and the first leads again.
    assert_eq!(second.terminate().0, 128 + 15);
    assert!(first.says_number("runs with ") > next);
    assert_eq!(first.terminate().0, 128 + 15);
    // A command that ends by itself ends the leadership, and its code is that of contend.
    let (code, out, err) = run_script(&url, "elect elected", "echo out; exit 7");
    assert_eq!((code, &*out), (7, "out\n"), "{err}");
    assert_eq!(field(&status(&url, "elected"), "owner"), "null");
}

/// The guardian's work, for all that run a command: one that is deaf to SIGTERM, and its children.
fn killed_parent_ends_command(backend: &Backend) {
    // A lease that is not lost on a busy machine, which would end the command too.
    let url = &*backend.plain;
    let script =
        "trap '' TERM; sh -c 'trap \"\" TERM; echo pid $$; while :; do sleep 1; done'; true";
    for line in ["lock g1", "elect g2", "schedule g3 --every 1s"] {
        let mut parent = Program::start_script(url, line, script);
        let child = u32::try_from(parent.says_number("pid ")).unwrap();
        assert!(is_alive(child));
        let killed = Instant::now();
        parent.signal(Signal::KILL);
        wait_until(PATIENCE, "the command was ended too", || !is_alive(child));
        println!("{line}: gone {:?} after kill -9", killed.elapsed());
    }
}
