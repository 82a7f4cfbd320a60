//! What every command does, on every backend: the same facts, on real servers.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::Stdio;
use std::sync::LazyLock;
use std::thread;
use std::time::Duration;

use contend::Contact;
use rustix::process::{Pid, Signal, kill_process};
use testbed::{Proxy, RedisServer, TempDir, ZooKeeperServer, is_alive, wait_until, within};

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
    a_server_that_answers_and_one_that_does_not_are_told_apart,
    health_tells_not_tried_yet_from_fine_and_from_failing,
    an_operator_sees_who_owns_and_who_waits_and_takes_a_mutex_away,
    status_shows_a_hand_off_and_an_outage_while_it_watches,
    status_of_all_mutexes_tells_when_one_is_free,
    a_lock_that_waits_says_for_whom_and_that_the_server_is_away,
    several_mutexes_are_locked_together,
    a_leader_runs_its_command_and_the_next_one_goes_on,
    an_elected_leader_runs_its_command_while_it_leads,
    a_command_does_not_outlive_a_killed_parent,
);

fn a_server_that_answers_and_one_that_does_not_are_told_apart(backend: &Backend) {
    let (code, out, _) = run(&backend.url(), &["ping", "--json"]);
    assert_eq!((code, field(&out, "reachable")), (0, "true"), "{out}");
    // Nobody listens there any more.
    let gone = Proxy::to(backend.addr);
    gone.refuse();
    let url = backend.through(&gone);
    let (code, out, _) = run(&url, &["ping", "--json", "--timeout", "1s"]);
    let said = ["reachable", "code"].map(|name| field(&out, name));
    assert_eq!((code, said), (69, ["false", "69"]), "{out}");
    assert!(!field(&out, "kind").is_empty(), "{out}");
    for args in [&["list", "--json"][..], &["status", "m", "--json"]] {
        let (code, _, err) = run(&url, args);
        assert_eq!((code, field(&err, "code")), (69, "69"), "{err}");
        assert!(
            field(&err, "error").len() > field(&err, "kind").len(),
            "{err}"
        );
    }
    for args in [
        &["ping", "--timeout", "1s"][..],
        &["list"],
        &["status"],
        &["status", "m"],
        &["revoke", "m", "--fence", "1"],
        &["lock", "--mutex", "m", "--timeout", "1s", "--", "true"],
        &["elect", "--for", "1s"],
    ] {
        let (code, out, err) = run(&url, args);
        assert_eq!((code, err.is_empty()), (69, false), "{args:?}: {out}{err}");
    }
}

fn health_tells_not_tried_yet_from_fine_and_from_failing(backend: &Backend) {
    let proxy = Proxy::to(backend.addr);
    proxy.refuse();
    let factory = contend::connect(&backend.through(&proxy)).unwrap();
    let health = factory.health();
    assert!(
        matches!(health.contact, Contact::Untried) && !health.is_fine(),
        "{health:?}"
    );
    factory.ping(Duration::from_millis(500)).unwrap_err();
    let health = factory.health();
    assert!(
        matches!(health.contact, Contact::Failing { .. }),
        "{health:?}"
    );
    assert!(
        health.to_json().contains("\"contact\":\"failing\""),
        "{}",
        health.to_json()
    );

    proxy.pass();
    wait_until(PATIENCE, "it answers", || {
        factory.ping(Duration::from_secs(1)).is_ok()
    });
    assert!(factory.health().is_fine(), "{:?}", factory.health());
    let service = factory.contend("health").build().unwrap();
    service.start().unwrap();
    wait_until(PATIENCE, "it leads", || service.is_owner());
    proxy.refuse();
    proxy.cut();
    wait_until(PATIENCE, "the outage is seen", || {
        !factory.health().is_fine()
    });
    proxy.pass();
    wait_until(PATIENCE, "its end is seen", || factory.health().is_fine());
    println!("{}", factory.health().to_json());
}

fn an_operator_sees_who_owns_and_who_waits_and_takes_a_mutex_away(backend: &Backend) {
    let url = backend.url();
    let elect = |id| Program::start(&url, &["elect", "--json", "--mutex", "seen", "--id", id]);
    let (code, out, _) = run(&url, &["status", "seen", "--json"]);
    assert_eq!((code, field(&out, "owner")), (0, "null"), "{out}");

    let mut first = elect("first");
    let fence = first.says("\"acquired\"");
    let fence = field(&fence, "fence");
    let mut second = elect("second");
    second.says("\"owner\":\"first\"");
    wait_until(PATIENCE, "the second waits", || {
        let (_, out, _) = run(&url, &["status", "seen", "--json"]);
        assert_eq!(field(&out, "owner"), "first", "{out}");
        assert_eq!(field(&out, "fence"), fence, "{out}");
        !out.contains("\"waiting\":[]")
    });
    let (_, table, _) = run(&url, &["status"]);
    assert!(table.contains("MUTEX") && table.contains("seen"), "{table}");
    let (_, list, _) = run(&url, &["list"]);
    assert!(list.lines().any(|name| name == "seen"), "{list}");

    // Without the fence, nothing happens but an explanation; with another one, nothing at all.
    let (code, _, err) = run(&url, &["revoke", "seen"]);
    assert_eq!(code, 64);
    assert!(err.contains(&format!("give --fence {fence}")), "{err}");
    let (code, _, _) = run(&url, &["revoke", "seen", "--fence", "1"]);
    assert_eq!(code, 66);
    let (code, _, err) = run(&url, &["revoke", "nobodys"]);
    assert_eq!(code, 66, "{err}");
    assert!(err.contains("nobodys: nobody owns it"), "{err}");
    assert_eq!(run(&url, &["revoke", "seen", "--fence", fence]).0, 0);
    let released = first.says("\"released\"");
    assert_eq!(field(&released, "fence"), fence);
    let acquired = second.says("\"acquired\"");
    let next: u64 = field(&acquired, "fence").parse().unwrap();
    assert!(next > fence.parse().unwrap(), "{acquired}");
}

/// `cargo test --all-features --test cli -- status_shows --nocapture` prints what a person sees.
fn status_shows_a_hand_off_and_an_outage_while_it_watches(backend: &Backend) {
    let url = backend.url();
    let hold = |id| Program::start(&url, &["elect", "--json", "--mutex", "watched", "--id", id]);
    let watch = ["status", "watched", "--watch", "--interval", "50ms"];
    let proxy = Proxy::to(backend.addr);
    let through = backend.through(&proxy);
    let mut table = Program::start(&through, &watch);
    let mut status = Program::start(&through, &[&watch[..], &["--json"]].concat());
    assert_eq!(field(&status.says("watched"), "owner"), "null");
    table.says("(free)");
    let mut first = hold("first");
    first.says("\"acquired\"");
    status.says("\"owner\":\"first\"");
    table.says("first");
    let mut second = hold("second");
    wait_until(PATIENCE, "the second waits", || {
        let (_, out, _) = run(&url, &["status", "watched", "--json"]);
        !out.contains("\"waiting\":[]")
    });
    assert_eq!(first.terminate().0, 0);
    second.says("\"acquired\"");
    status.says("\"owner\":\"second\"");
    table.says("  second");

    proxy.refuse();
    proxy.cut();
    let line = status.says("\"error\":\"");
    assert!(line.contains("\"realm\":"), "{line}");
    table.says("NO ANSWER for ");
    table.says("as it was before:");
    proxy.pass();
    // Nothing else has changed: that alone is said.
    status.says("\"error\":null");
    table.says("answered in ");
    assert_eq!(second.terminate().0, 0);
    status.says("\"owner\":null");
    table.says("(free)");
    assert_eq!(status.terminate().0, 0);
    let (code, lines) = table.terminate();
    assert_eq!(code, 0);
    println!("$ contend status watched --watch\n{}", lines.join("\n"));
}

/// A mutex that is not listed any more is a change too.
fn status_of_all_mutexes_tells_when_one_is_free(backend: &Backend) {
    let url = backend.url();
    let watch = ["status", "--watch", "--json", "--interval", "50ms"];
    let mut status = Program::start(&url, &watch);
    let elect = ["elect", "--json", "--mutex", "listed", "--id", "first"];
    let mut first = Program::start(&url, &elect);
    first.says("\"acquired\"");
    status.says("\"mutex\":\"listed\",\"owner\":\"first\"");
    assert_eq!(first.terminate().0, 0);
    status.says("\"mutex\":\"listed\",\"owner\":null");
    assert_eq!(status.terminate().0, 0);
}

fn a_lock_that_waits_says_for_whom_and_that_the_server_is_away(backend: &Backend) {
    let hold = ["lock", "--mutex", "waited", "--id", "the-holder", "--"];
    let holding = [&hold[..], &["sh", "-c", "echo in; exec sleep 600"]].concat();
    let mut holder = Program::start(&backend.url(), &holding);
    holder.says("in");
    let proxy = Proxy::to(backend.addr);
    let wait = ["lock", "--mutex", "waited", "--", "echo", "mine"];
    let mut waiting = Program::start(&backend.through(&proxy), &wait);
    let line = waiting.says("waiting for waited: held by \"the-holder\"");
    assert!(line.contains(", fence "), "{line}");
    proxy.refuse();
    proxy.cut();
    waiting.says("still waiting, but ");
    proxy.pass();
    waiting.says("answers again");
    let (code, _) = holder.terminate();
    assert_eq!(code, 128 + 15);
    waiting.says("mine");
    assert_eq!(waiting.ends().0, 0);
}

fn several_mutexes_are_locked_together(backend: &Backend) {
    let url = backend.url();
    let lock = [
        "lock",
        "--mutex",
        "b",
        "--mutex",
        "a",
        "--timeout",
        "30s",
        "--",
    ];
    let script = "echo fences $CONTEND_FENCE; exec sleep 600";
    let mut holder = Program::start(&url, &[&lock[..], &["sh", "-c", script]].concat());
    let line = holder.says("fences ");
    assert_eq!(line.split(',').count(), 2, "{line}");
    for mutex in ["a", "b"] {
        let one = ["lock", "--mutex", mutex, "--timeout", "10s", "--", "true"];
        assert_eq!(run(&url, &one).0, 75);
        // A plain name is the same, and so is not waiting at all; a busy server may not answer in time.
        wait_until(PATIENCE, "it is held", || {
            let (code, _, err) = run(&url, &["lock", mutex, "--no-wait", "--", "true"]);
            assert!(code == 69 || err.contains("held by"), "{code}: {err}");
            code == 75
        });
    }
    holder.terminate();
    assert_eq!(run(&url, &[&lock[..], &["true"]].concat()).0, 0);
}

fn a_leader_runs_its_command_and_the_next_one_goes_on(backend: &Backend) {
    let url = backend.url();
    let args = ["schedule", "--mutex", "jobs", "--every", "100ms", "--"];
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
    // Standard output is the command's own.
    let mut alone = contend(&url, &args[..]);
    let mut alone = alone
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let mut out = BufReader::new(alone.stdout.take().unwrap());
    out.read_line(&mut line).unwrap();
    kill_process(Pid::from_child(&alone), Signal::TERM).unwrap();
    assert!(line.starts_with("run by "), "{line}");
    assert!(alone.wait().unwrap().success());
}

/// `elect -- COMMAND`: it runs on the leader only, is ended with the leadership and starts again with the next.
fn an_elected_leader_runs_its_command_while_it_leads(backend: &Backend) {
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
        let (_, out, _) = run(&url, &["status", "--mutex", "elected", "--json"]);
        !out.contains("\"waiting\":[]")
    });
    let revoke = ["revoke", "--mutex", "elected", "--fence"];
    assert_eq!(
        run(&url, &[&revoke[..], &[&fence.to_string()]].concat()).0,
        0
    );
    first.says("no longer the leader; ending the command");
    let next = fence_in(&second.says("runs with "));
    assert!(next > fence);
    // Told to end, the second passes the signal on, and the first leads again.
    assert_eq!(second.terminate().0, 128 + 15);
    assert!(fence_in(&first.says("runs with ")) > next);
    assert_eq!(first.terminate().0, 128 + 15);
    // A command that ends by itself ends the leadership, and its code is ours.
    let (code, out, err) = run(
        &url,
        &["elect", "elected", "--", "sh", "-c", "echo out; exit 7"],
    );
    assert_eq!((code, &*out), (7, "out\n"), "{err}");
    let (_, out, _) = run(&url, &["status", "elected", "--json"]);
    assert_eq!(field(&out, "owner"), "null", "{out}");
}

/// The guardian's work, for all that run a command.
fn a_command_does_not_outlive_a_killed_parent(backend: &Backend) {
    // A lease that is not lost on a busy machine, which would end the command too.
    let url = (backend.url)(backend.addr);
    let script = [
        "--",
        "sh",
        "-c",
        "sh -c 'echo pid $$; exec sleep 600'; true",
    ];
    for args in [
        &["lock", "--mutex", "guarded"][..],
        &["elect", "guarded-leader"],
        &["schedule", "--mutex", "guarded-too", "--every", "1s"],
    ] {
        let mut parent = Program::start(&url, &[args, &script].concat());
        let line = parent.says("pid ");
        let sleeper: u32 = line.trim_start_matches("pid ").parse().unwrap();
        assert!(is_alive(sleeper));
        parent.signal(Signal::KILL);
        wait_until(PATIENCE, "the command was ended too", || !is_alive(sleeper));
    }
}

/// Who reads only the beginning gets it, and nobody panics.
#[test]
fn a_reader_that_goes_away_is_no_reason_to_panic() {
    within(HANG, || {
        let folder = TempDir::new();
        let errors = folder.path().join("errors");
        let url = redis().url();
        let contend = crate::CONTEND;
        for args in ["--help", "list", "status", "elect --for 300ms", "ping"] {
            let script = format!("{contend} {args} 2>{} | true", errors.to_string_lossy());
            let status = std::process::Command::new("sh")
                .args(["-c", &script])
                .env("CONTEND_URL", &url)
                .status()
                .unwrap();
            assert!(status.success());
            // The pipeline ends with its last command.
            thread::sleep(Duration::from_millis(300));
            let errors = std::fs::read_to_string(&errors).unwrap();
            assert!(!errors.contains("panicked"), "{args}: {errors}");
        }
    });
}

/// A leader whose lines nobody reads any more steps down, in order.
#[test]
fn an_election_that_nobody_reads_ends() {
    within(HANG, || {
        let url = redis().url();
        let script = format!(
            "{} elect --lead 50ms --mutex unread | head -n 3",
            crate::CONTEND
        );
        let mut shell = std::process::Command::new("sh")
            .args(["-c", &script])
            .env("CONTEND_URL", &url)
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        // The shell waits for both sides of the pipe.
        assert!(shell.wait().unwrap().success());
        let (_, out, _) = run(&url, &["status", "unread", "--json"]);
        assert_eq!(field(&out, "owner"), "null", "{out}");
    });
}

#[test]
fn output_that_cannot_be_written_is_said() {
    let full = std::fs::File::options()
        .write(true)
        .open("/dev/full")
        .unwrap();
    let output = crate::program::contend("memory://", &["ping"])
        .stdout(full)
        .output()
        .unwrap();
    let err = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(74), "{err}");
    assert!(
        err.starts_with("contend: cannot write the output: "),
        "{err}"
    );
}

#[test]
fn what_is_not_understood_is_a_usage_error() {
    for args in [
        &[][..],
        &["nonsense"],
        &["lock", "--", "true"],
        &["lock", "--mutex", "m"],
        &["lock", "--mutex", "m", "--mutex", "m", "--", "true"],
        &["lock", "--mutex", "m", "--timeout", "soon", "--", "true"],
        &["revoke"],
        &["elect", "--contenders", "0"],
        &["schedule", "--every", "1s", "--delay", "1s"],
        &["schedule", "--daily-at", "25:00"],
        &["schedule", "--daily-at", "02:30", "--zone", "nowhere"],
        &["schedule", "--daily-at", "02:30", "--days", "mon,funday"],
        &["schedule", "--every", "1h", "--days", "mon"],
        &["status", "--interval"],
    ] {
        let (code, out, err) = run("memory://", args);
        assert_eq!((code, &*out), (64, ""), "{args:?}: {err}");
    }
    // With --json, what is wrong is an object too.
    let (code, _, err) = run("memory://", &["--json", "lock", "--mutx", "m"]);
    assert_eq!(code, 64);
    assert!(
        err.starts_with("{\"error\":\"unexpected argument") && err.lines().count() == 1,
        "{err}"
    );
    // A command without `--` before it is the mistake of everybody who knows flock.
    for args in [
        &["lock", "m", "echo", "hi"][..],
        &["lock", "m", "./backup.sh", "--fast"],
        &["elect", "m", "echo"],
        &["elect", "m", "./consume.sh", "--fast"],
        &["schedule", "m", "echo"],
        &["semaphore", "run", "m", "echo"],
    ] {
        let (code, out, err) = run("memory://", args);
        assert_eq!((code, &*out), (64, ""), "{args:?}: {err}");
        assert!(err.contains("put -- before "), "{args:?}: {err}");
        assert!(!err.contains("as a value"), "{args:?}: {err}");
    }
    // Where it stands there, something else is wrong.
    let (code, _, err) = run("memory://", &["lock", "m", "--wait", "2s", "--", "true"]);
    assert_eq!(code, 64);
    assert!(!err.contains("tip"), "{err}");
    // Others run none.
    let (_, _, err) = run("memory://", &["status", "m", "--fast"]);
    assert!(!err.contains("before the command"), "{err}");
    let (_, _, err) = run("memory://", &["revoke", "m", "n"]);
    assert!(!err.contains("--"), "{err}");
    // A bad name is one for ever: there is nothing to watch.
    let (code, _, err) = run("memory://", &["status", "--watch", ""]);
    assert_eq!(code, 64, "{err}");
    // An URL is data too.
    let (code, _, err) = run("nowhere", &["ping"]);
    assert_eq!(code, 64, "{err}");
    // No server at all.
    let (code, _, err) = run("", &["list"]);
    assert_eq!(code, 64);
    assert!(err.contains("CONTEND_URL"), "{err}");
}

/// A stranger: whoever looked with another transition than the owner's read that a healthy lease had ended.
#[test]
fn a_lease_that_runs_is_not_said_to_have_ended() {
    let server = testbed::RedisServer::start();
    let url = server.url();
    let lock = ["lock", "m", "--ttl", "3s", "--transition", "1s", "--"];
    let mut owner = Program::start(
        &url,
        &[&lock[..], &["sh", "-c", "echo held; sleep 60"]].concat(),
    );
    owner.says("held");
    let (code, out, err) = run(&url, &["status", "m"]);
    assert_eq!(code, 0, "{err}");
    let row = out.lines().last().unwrap_or_default();
    let left = row.split_whitespace().rev().take(3).collect::<Vec<_>>();
    assert!(!out.contains("ended"), "{out}");
    // Seconds, and nobody waits.
    assert_eq!((left[0], left[1]), ("-", "s"), "{out}");
    owner.terminate();
}

#[test]
fn a_command_that_cannot_be_run_has_the_code_of_a_shell() {
    let lock = |program| run("memory://", &["lock", "--mutex", "m", "--", program]);
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
