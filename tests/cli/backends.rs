//! What every command does, on every backend: the same facts, on real servers.

use std::net::SocketAddr;
use std::process::Command;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use testbed::{Proxy, RedisServer, ZooKeeperServer, is_alive, wait_until, within};

use crate::mysql_ground;
use crate::program::{PATIENCE, Program, contend, field, run};

pub const HANG: Duration = Duration::from_secs(240);

/// One kind of server, shared by the tests of this process.
pub struct Backend {
    pub addr: SocketAddr,
    /// Parameters for a lease that ends soon enough for a test.
    pub lease: &'static str,
    /// The URL of a server at this address.
    pub url: Box<dyn Fn(SocketAddr) -> String + Send + Sync>,
}

impl Backend {
    /// Its URL, with a lease.
    pub fn url(&self) -> String {
        format!("{}?{}", (self.url)(self.addr), self.lease)
    }

    /// Its URL through a proxy.
    pub fn through(&self, proxy: &Proxy) -> String {
        format!("{}?{}", (self.url)(proxy.addr()), self.lease)
    }
}

pub fn redis() -> &'static Backend {
    static SERVER: LazyLock<RedisServer> = LazyLock::new(RedisServer::start);
    static BACKEND: LazyLock<Backend> = LazyLock::new(|| Backend {
        addr: SERVER.addr(),
        lease: "ttl=2s&transition=1s",
        url: Box::new(|addr| format!("redis://{addr}")),
    });
    &BACKEND
}

pub fn mysql() -> &'static Backend {
    static BACKEND: LazyLock<Backend> = LazyLock::new(|| {
        let url = mysql_ground::database();
        let (before, rest) = url.split_once('@').expect("a user");
        let (addr, database) = rest.split_once('/').expect("a database");
        let (before, database) = (before.to_owned(), database.to_owned());
        let addr = addr.replace("localhost", "127.0.0.1");
        Backend {
            addr: addr.parse().expect("an address"),
            lease: "ttl=2s&transition=1s",
            url: Box::new(move |addr| format!("{before}@{addr}/{database}")),
        }
    });
    &BACKEND
}

pub fn zk() -> &'static Backend {
    static SERVER: LazyLock<ZooKeeperServer> = LazyLock::new(ZooKeeperServer::start);
    static BACKEND: LazyLock<Backend> = LazyLock::new(|| Backend {
        addr: SERVER.addr(),
        lease: "session_timeout=4s",
        url: Box::new(|addr| format!("zk://{addr}")),
    });
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
                    within(super::HANG, || super::$fact(backend));
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

fn unreachable_server_has_its_code(backend: &Backend) {
    let (code, out, _) = run(&backend.url(), &["ping", "--json"]);
    assert_eq!((code, field(&out, "reachable")), (0, "true"), "{out}");
    let gone = Proxy::to(backend.addr);
    gone.refuse();
    let url = backend.through(&gone);
    let (code, out, _) = run(&url, &["ping", "--json", "--timeout", "1s"]);
    let said = ["reachable", "code"].map(|name| field(&out, name));
    assert_eq!((code, said), (69, ["false", "69"]), "{out}");
    let (code, _, err) = run(&url, &["status", "--json"]);
    assert_eq!((code, field(&err, "code")), (69, "69"), "{err}");
    for args in [
        &["ping", "--timeout", "1s"][..],
        &["status", "m"],
        &["revoke", "m", "--fence", "1"],
        &["lock", "m", "--timeout", "1s", "--", "true"],
        &["lock", "m", "--no-wait", "--", "true"],
    ] {
        let (code, out, err) = run(&url, args);
        assert_eq!((code, err.is_empty()), (69, false), "{args:?}: {out}{err}");
    }
    // What may pass does not end what runs until it is stopped: the log says so.
    let mut elect = Program::start(&url, &["elect", "m"]);
    elect.says("WARN m: ");
    assert_eq!(elect.terminate().0, 0);
}

fn operator_sees_and_revokes(backend: &Backend) {
    let url = backend.url();
    let elect = |id| Program::start(&url, &["elect", "--json", "seen", "--id", id]);
    let (code, out, _) = run(&url, &["status", "seen", "--json"]);
    assert_eq!((code, field(&out, "owner")), (0, "null"), "{out}");
    let mut first = elect("first");
    let fence = first.says("\"acquired\"");
    let fence = field(&fence, "fence");
    let mut second = elect("second");
    wait_until(PATIENCE, "the second waits", || {
        let (_, out, _) = run(&url, &["status", "seen", "--json"]);
        assert_eq!(field(&out, "owner"), "first", "{out}");
        assert_eq!(field(&out, "fence"), fence, "{out}");
        !out.contains("\"waiting\":[]")
    });
    // Without a name, all.
    let (_, table, _) = run(&url, &["status"]);
    assert!(table.starts_with("MUTEX "), "{table}");
    let row = table.lines().find(|line| line.starts_with("seen "));
    assert!(row.unwrap().contains(" first "), "{table}");

    assert_eq!(run(&url, &["revoke", "seen"]).0, 64);
    let (code, _, err) = run(&url, &["revoke", "seen", "--fence", "1"]);
    assert_eq!(code, 66, "{err}");
    assert!(err.contains("seen: no owner has the fence 1"), "{err}");
    assert_eq!(run(&url, &["revoke", "seen", "--fence", fence]).0, 0);
    let released = first.says("\"released\"");
    assert_eq!(field(&released, "fence"), fence);
    let acquired = second.says("\"acquired\"");
    let next: u64 = field(&acquired, "fence").parse().unwrap();
    assert!(next > fence.parse().unwrap(), "{acquired}");
}

fn observer_follows_owners(backend: &Backend) {
    let url = backend.url();
    let elect = |id| Program::start(&url, &["elect", "--json", "followed", "--id", id]);
    let mut observer = Program::start(&url, &["observe", "followed", "--json"]);
    let mut text = Program::start(&url, &["observe", "followed"]);
    assert_eq!(field(&observer.says("followed"), "owner"), "null");
    text.says("mutex \"followed\"");
    let mut first = elect("first");
    let fence = first.says("\"acquired\"");
    let fence = field(&fence, "fence");
    let seen = observer.says("\"owner\":\"first\"");
    assert_eq!(field(&seen, "fence"), fence);
    text.says(&format!("owner \"first\", fence {fence}"));
    let mut second = elect("second");
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
    let url = (backend.url)(backend.addr);
    let holding = [
        "lock",
        "waited",
        "--id",
        "the-holder",
        "--",
        "sh",
        "-c",
        "echo in; exec sleep 600",
    ];
    let mut holder = Program::start(&url, &holding);
    holder.says("in");
    let mut waiting = Program::start(&url, &["lock", "waited", "--", "echo", "mine"]);
    waiting.says("waiting: waited: held by \"the-holder\"");
    // A signal ends the wait at once, and nothing is held.
    let cancelled = Program::start(&url, &["lock", "waited", "--", "echo", "never"]);
    let (code, lines) = cancelled.terminate();
    assert_eq!(code, 128 + 15, "{lines:#?}");
    assert_eq!(holder.terminate().0, 128 + 15);
    waiting.says("mine");
    assert_eq!(waiting.ends().0, 0);
}

fn several_mutexes_are_locked_together(backend: &Backend) {
    let url = backend.url();
    let lock = ["lock", "b", "a", "--timeout", "30s", "--"];
    let script = "echo fences $CONTEND_FENCE of $CONTEND_MUTEX; exec sleep 600";
    let mut holder = Program::start(&url, &[&lock[..], &["sh", "-c", script]].concat());
    let line = holder.says("fences ");
    assert!(line.ends_with(" of b,a"), "{line}");
    assert_eq!(line.split(',').count(), 3, "{line}");
    for mutex in ["a", "b"] {
        // A busy server may not answer in time.
        wait_until(PATIENCE, "it is held", || {
            let (code, _, err) = run(&url, &["lock", mutex, "--no-wait", "--", "true"]);
            assert!(code == 69 || err.contains("held by"), "{code}: {err}");
            code == 75
        });
    }
    holder.terminate();
    assert_eq!(run(&url, &[&lock[..], &["true"]].concat()).0, 0);
}

fn scheduled_command_fails_over(backend: &Backend) {
    let url = backend.url();
    let args = ["schedule", "jobs", "--every", "100ms", "--"];
    let script = "echo run by $PPID of $CONTEND_MUTEX with $CONTEND_FENCE";
    let args = [&args[..], &["sh", "-c", script]].concat();
    let mut first = Program::start(&url, &args);
    let fence_in = |line: &str| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap();
    let runs = format!("run by {} of jobs with ", first.pid());
    let fence = fence_in(&first.says(&runs));
    assert_eq!(fence_in(&first.says(&runs)), fence);
    let mut second = Program::start(&url, &args);
    second.says("started");
    let (code, lines) = first.terminate();
    assert_eq!(code, 0, "{lines:#?}");
    let runs = format!("run by {} of jobs with ", second.pid());
    assert!(fence_in(&second.says(&runs)) > fence);
    assert_eq!(second.terminate().0, 0);
}

/// It runs on the leader only, is ended with the leadership and starts again with the next.
fn elected_leader_runs_its_command(backend: &Backend) {
    let url = backend.url();
    let script = "echo runs with $CONTEND_FENCE; exec sleep 600";
    let start = |id| {
        let args = ["elect", "elected", "--id", id, "--", "sh", "-c", script];
        Program::start(&url, &args)
    };
    let fence_in = |line: &str| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap();
    let mut first = start("first");
    let fence = fence_in(&first.says("runs with "));
    let mut second = start("second");
    wait_until(PATIENCE, "the second waits", || {
        let (_, out, _) = run(&url, &["status", "elected", "--json"]);
        !out.contains("\"waiting\":[]")
    });
    let revoke = ["revoke", "elected", "--fence", &fence.to_string()];
    assert_eq!(run(&url, &revoke).0, 0);
    first.says("no longer the leader; ending the command");
    let next = fence_in(&second.says("runs with "));
    assert!(next > fence);
    // Told to end, the second passes the signal on, and the first leads again.
    assert_eq!(second.terminate().0, 128 + 15);
    assert!(fence_in(&first.says("runs with ")) > next);
    assert_eq!(first.terminate().0, 128 + 15);
    // A command that ends by itself ends the leadership, and its code is that of contend.
    let command = ["elect", "elected", "--", "sh", "-c", "echo out; exit 7"];
    let (code, out, err) = run(&url, &command);
    assert_eq!((code, &*out), (7, "out\n"), "{err}");
    let (_, out, _) = run(&url, &["status", "elected", "--json"]);
    assert_eq!(field(&out, "owner"), "null", "{out}");
}

/// The guardian's work, for all that run a command: one that is deaf to SIGTERM, and its children.
fn killed_parent_ends_command(backend: &Backend) {
    // A lease that is not lost on a busy machine, which would end the command too.
    let url = (backend.url)(backend.addr);
    let script =
        "trap '' TERM; sh -c 'trap \"\" TERM; echo pid $$; while :; do sleep 1; done'; true";
    for args in [
        &["lock", "guarded"][..],
        &["elect", "guarded-leader"],
        &["schedule", "guarded-too", "--every", "1s"],
    ] {
        let mut parent = Program::start(&url, &[args, &["--", "sh", "-c", script]].concat());
        let line = parent.says("pid ");
        let child: u32 = line.trim_start_matches("pid ").parse().unwrap();
        assert!(is_alive(child));
        let killed = Instant::now();
        parent.signal(Signal::KILL);
        wait_until(PATIENCE, "the command was ended too", || !is_alive(child));
        println!("{}: gone {:?} after kill -9", args[0], killed.elapsed());
    }
}

#[test]
fn absent_reader_causes_no_panic() {
    within(HANG, || {
        let url = redis().url();
        for args in ["--help", "status", "ping"] {
            let script = format!("{} {args} 2>&1 >/dev/full | cat", crate::CONTEND);
            let mut shell = Command::new("sh");
            let output = shell
                .args(["-c", &script])
                .env("CONTEND_URL", &url)
                .output();
            let errors = String::from_utf8(output.unwrap().stdout).unwrap();
            assert!(!errors.contains("panicked"), "{args}: {errors}");
        }
    });
}

#[test]
fn unwritable_output_has_its_code() {
    let full = std::fs::File::options()
        .write(true)
        .open("/dev/full")
        .unwrap();
    let output = contend("memory://", &["ping"]).stdout(full).output();
    let output = output.unwrap();
    let err = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(74), "{err}");
    assert!(
        err.starts_with("contend: cannot write the output: "),
        "{err}"
    );
}

#[test]
fn command_that_cannot_run_has_the_code_of_a_shell() {
    let lock = |program| run("memory://", &["lock", "m", "--", program]);
    let (code, _, err) = lock("/no/such/program");
    assert_eq!(code, 127, "{err}");
    let (code, _, err) = lock("/etc/passwd");
    assert_eq!(code, 126, "{err}");
    assert_eq!(lock("true").0, 0);
}

#[test]
fn no_password_is_shown() {
    let url = "redis://user:open-sesame@127.0.0.1:1";
    for args in [
        &["ping", "--timeout", "300ms"][..],
        &["--help"],
        &["status", "--help"],
    ] {
        let (_, out, err) = run(url, args);
        assert!(
            !out.contains("open-sesame") && !err.contains("open-sesame"),
            "{out}{err}"
        );
    }
}
