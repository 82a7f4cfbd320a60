//! The mistakes that a first user made (review/user.md 3, 8, 9, 10, 13), on every backend, and what a person
//! reads now. `cargo test --all-features --test cli -- mistakes --nocapture` prints the transcripts.

use std::fmt::Write as _;
use std::sync::LazyLock;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use contend::{Cancel, Error, ErrorKind};
use mysql::prelude::Queryable;
use testbed::{Direction, Proxy, RedisServer, wait_until, within};

use crate::advice;
use crate::backends::{Backend, HANG, mysql, redis, zk};
use crate::mysql_ground;
use crate::program::{PATIENCE, Program, field, run};

/// What a person typed and read, printed as a whole: tests run side by side.
struct Transcript(String, Vec<String>);

impl Transcript {
    fn new(backend: &str) -> Transcript {
        Transcript(format!("\n=== {backend}\n"), Vec::new())
    }

    fn mistake(&mut self, number: u32, what: &str) {
        writeln!(self.0, "\n{number}. {what}").unwrap();
    }

    /// What a call of the library returned.
    fn read(&mut self, call: &str, message: &str, says: &[&str]) {
        writeln!(self.0, "  {call}\n  > {message}").unwrap();
        self.1.extend(is_clear(call, message, says));
    }

    /// Runs `contend`, which exits with this code and says so.
    fn shell(&mut self, url: &str, args: &[&str], code: i32, says: &[&str]) {
        let (exit, out, err) = run(url, args);
        let line = args.join(" ");
        let said = err.trim_end().replace('\n', "\n  > ");
        writeln!(self.0, "  $ contend {line}\n  > {said}\n  exit code {exit}").unwrap();
        if exit != code {
            self.1
                .push(format!("{line}: exit code {exit}, not {code}: {out}{err}"));
        }
        let last = err.lines().last().unwrap_or_default();
        self.1.extend(is_clear(&line, last, says));
    }
}

/// One line, that names each cause once, and nothing of the pool, the driver or the system that a person
/// cannot use. Returns what is wrong with it.
fn is_clear(what: &str, message: &str, says: &[&str]) -> Vec<String> {
    let lacks = says.iter().filter(|text| !message.contains(**text));
    let mut wrong: Vec<String> = lacks
        .map(|text| format!("{what}: no {text:?} in: {message}"))
        .collect();
    let refused = message.matches("refused").count();
    if refused > 1 {
        wrong.push(format!("{what}: the cause {refused} times: {message}"));
    }
    for text in ["\n", "pool_size", "os error 11)", "Error {", "Some("] {
        if message.contains(text) {
            wrong.push(format!("{what}: {text:?} in: {message}"));
        }
    }
    wrong
}

/// How one backend is used wrongly.
struct Ways {
    backend: &'static Backend,
    name: &'static str,
    /// The address of a server of another kind, and what to say then.
    other_kind: &'static Backend,
    is_this: &'static str,
    /// What `contend` exits with then: 78 where the answer shows what the server is not.
    other_code: i32,
    /// A URL with a wrong password, and what is said of it.
    wrong_password: String,
    denied: &'static [&'static str],
    /// A URL of somebody without a privilege that is needed, and what is said of it.
    unprivileged: String,
    lacks: &'static [&'static str],
    /// Whether two processes may have one id.
    ids_do_not_matter: bool,
}

#[test]
fn on_redis_each_mistake_is_explained() {
    static SERVER: LazyLock<RedisServer> = LazyLock::new(RedisServer::start);
    within(HANG, || {
        // May do everything but listen.
        let rules = [
            "ACL",
            "SETUSER",
            "deaf",
            "on",
            ">pw",
            "~*",
            "resetchannels",
            "+@all",
        ];
        SERVER.cli(&rules);
        make_mistakes(&Ways {
            backend: redis(),
            name: "redis",
            other_kind: mysql(),
            is_this: "is this a Redis server?",
            other_code: 78,
            wrong_password: format!("redis://bob:wrong@{}", redis().addr),
            denied: &[
                "user \"bob\"",
                "refused the log-in; check user and password",
            ],
            unprivileged: format!("redis://deaf:pw@{}", SERVER.addr()),
            lacks: &["channel"],
            ids_do_not_matter: false,
        });
    });
}

#[test]
fn on_mysql_each_mistake_is_explained() {
    within(HANG, || {
        let backend = mysql();
        let url = (backend.url)(backend.addr);
        let (_, rest) = url.split_once('@').unwrap();
        let mut operator = mysql_ground::operator(&url);
        operator
            .query_drop("CREATE USER IF NOT EXISTS reader IDENTIFIED BY 'pw'")
            .unwrap();
        let (_, database) = rest.split_once('/').unwrap();
        operator
            .query_drop(format!("GRANT SELECT ON {database}.* TO reader"))
            .unwrap();
        make_mistakes(&Ways {
            backend,
            name: "mysql",
            other_kind: redis(),
            is_this: "is not a MySQL server",
            other_code: 69,
            wrong_password: format!("mysql://reader:wrong@{rest}"),
            denied: &[
                "mysql://",
                "refused user \"reader\" or its password; check both",
            ],
            unprivileged: format!("mysql://reader:pw@{rest}"),
            lacks: &["denied"],
            ids_do_not_matter: false,
        });
    });
}

#[test]
fn on_zookeeper_each_mistake_is_explained() {
    within(HANG, || {
        let backend = zk();
        // A digest is never wrong by itself: it is another user, to whom the nodes do not belong.
        let owner = format!("zk://alice:pw@{}/mine?acl=creator_all", backend.addr);
        assert_eq!(run(&owner, &["lock", "--mutex", "m", "--", "true"]).0, 0);
        let stranger = format!("zk://alice:wrong@{}/mine?acl=creator_all", backend.addr);
        make_mistakes(&Ways {
            backend,
            name: "zk",
            other_kind: redis(),
            is_this: "is not a ZooKeeper server",
            other_code: 69,
            wrong_password: stranger.clone(),
            denied: &["ACL"],
            unprivileged: stranger,
            lacks: &["ACL"],
            ids_do_not_matter: true,
        });
    });
}

fn make_mistakes(ways: &Ways) {
    let mut told = Transcript::new(ways.name);
    let url = ways.backend.url();
    let lock = ["lock", "--mutex", "m", "--timeout", "2s", "--", "true"];
    shared_id(ways, &mut told);

    told.mistake(2, "the server is down");
    let proxy = Proxy::to(ways.backend.addr);
    proxy.refuse();
    told.shell(
        &ways.backend.through(&proxy),
        &lock,
        69,
        &["m: ", "refused"],
    );

    told.mistake(3, "the URL names another kind of server");
    let other = format!(
        "{}?{}",
        (ways.backend.url)(ways.other_kind.addr),
        ways.backend.lease
    );
    told.shell(&other, &lock, ways.other_code, &[ways.is_this]);

    told.mistake(4, "the server hangs");
    let proxy = Proxy::to(ways.backend.addr);
    proxy.black_hole(Direction::Both);
    told.shell(
        &ways.backend.through(&proxy),
        &lock,
        69,
        &["no answer within"],
    );

    told.mistake(5, "a privilege is missing");
    told.shell(&ways.unprivileged, &lock, 77, ways.lacks);

    told.mistake(6, "the password is wrong");
    told.shell(&ways.wrong_password, &lock, 77, ways.denied);

    told.mistake(7, "a ttl of 1 ms");
    let short = ["lock", "--mutex", "m", "--ttl", "1ms", "--", "true"];
    told.shell(&url, &short, 64, &["ttl 1ms", "at least"]);

    in_one_process(&url, &mut told);

    told.mistake(
        11,
        "\"fine\" before anything was tried, with a wrong password",
    );
    let factory = contend::connect(&ways.wrong_password).unwrap();
    let health = factory.health().to_json();
    told.read("factory.health()", &health, &["untried"]);
    let error = factory.ping(Duration::from_secs(5));
    // Pinging ZooKeeper needs no node: there the password shows with the first mutex.
    if let Err(error) = error {
        assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
        told.read("factory.ping(5 s)", &error.to_string(), ways.denied);
        let health = factory.health().to_json();
        told.read("factory.health()", &health, &["failing"]);
    } else {
        assert!(ways.ids_do_not_matter, "a wrong password went unnoticed");
    }

    waits_in_silence(ways, &mut told);

    told.mistake(
        13,
        "elect and schedule on a dead server, schedule on no URL",
    );
    let proxy = Proxy::to(ways.backend.addr);
    proxy.refuse();
    let dead = ways.backend.through(&proxy);
    told.shell(
        &dead,
        &["elect", "--for", "1s"],
        69,
        &["warn demo: ", "refused"],
    );
    let mut schedule = Program::start(&dead, &["schedule", "--mutex", "m", "--every", "1s"]);
    let line = schedule.says("warn m: ");
    told.1.extend(is_clear("schedule", &line, &["refused"]));
    let (code, lines) = schedule.terminate();
    let said = lines.join("\n  > ");
    writeln!(
        told.0,
        "  $ contend schedule --mutex m --every 1s\n  > {said}\n  exit code {code}"
    )
    .unwrap();
    if code != 69 {
        told.1
            .push(format!("schedule on a dead server: exit code {code}"));
    }
    told.shell("x", &["schedule", "--every", "1s"], 64, &["scheme://"]);
    println!("{}", told.0);
    assert!(told.1.is_empty(), "{:#?}", told.1);
}

/// Two processes with one id: neither leads beside the other for long, and one of them says why at once.
fn shared_id(ways: &Ways, told: &mut Transcript) {
    told.mistake(1, "two processes are given one id");
    let elect = ["elect", "--mutex", "twice", "--id", "host-1"];
    let mut first = Program::start(&ways.backend.url(), &elect);
    first.says("leads");
    let mut second = Program::start(&ways.backend.url(), &elect);
    let look = Duration::from_millis(50);
    if ways.ids_do_not_matter {
        second.says("started");
        assert_eq!(second.says_within(10 * look, "leads"), None);
        assert_eq!(first.terminate().0, 0);
        second.says("leads");
        assert_eq!(second.terminate().0, 0);
        writeln!(
            told.0,
            "  the second waits, and leads when the first has ended"
        )
        .unwrap();
        return;
    }
    let double = "does another process use this id?";
    let mut said = None;
    wait_until(PATIENCE, "one of them speaks of the other", || {
        let mut programs = [&mut first, &mut second].into_iter();
        said = programs.find_map(|program| program.says_within(look, double));
        said.is_some()
    });
    let line = said.unwrap();
    let line = line.split_once("error ").map_or(&*line, |(_, line)| line);
    told.read(
        "$ contend elect --mutex twice --id host-1 (twice)",
        line,
        &[double],
    );
}

/// What can go wrong between the threads of one process.
fn in_one_process(url: &str, told: &mut Transcript) {
    let factory = contend::connect(url).unwrap();
    told.mistake(8, "two helper functions of one thread lock the same mutex");
    let locker = factory.locker("mine").build().unwrap();
    let guard = locker.lock().unwrap();
    let again = factory.locker("mine").build().unwrap().lock();
    let error = again.err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Reentrant, "{error}");
    told.read(
        "second.lock()",
        &error.to_string(),
        &["mine: ", "this thread"],
    );

    told.mistake(9, "another thread of this process holds it");
    let error = thread::scope(|scope| {
        let other = factory.locker("mine").build().unwrap();
        let tried = scope.spawn(move || other.try_lock_for(Duration::from_secs(1)).err());
        tried.join().unwrap().unwrap()
    });
    assert_eq!(error.kind(), ErrorKind::Held, "{error}");
    let call = "other.try_lock_for(1 s)";
    told.read(call, &error.to_string(), &["mine: held by"]);

    told.mistake(10, "the process shall end while lock() waits");
    let cancel = Cancel::new();
    let waiter = factory.locker("mine").cancel(&cancel).build().unwrap();
    let (error, took) = thread::scope(|scope| {
        let waiting = scope.spawn(move || waiter.lock().err().unwrap());
        // Time for it to stand in the queue; it may come later just as well.
        thread::sleep(Duration::from_millis(200));
        let began = Instant::now();
        cancel.cancel();
        (waiting.join().unwrap(), began.elapsed())
    });
    assert_eq!(error.kind(), ErrorKind::Cancelled, "{error}");
    let call = format!("lock(), cancelled: returns after {took:.1?}");
    told.read(&call, &error.to_string(), &["mine: "]);
    drop(guard);
}

/// A lock that waits for a dead server says so, and again when it is back.
fn waits_in_silence(ways: &Ways, told: &mut Transcript) {
    told.mistake(12, "lock waits for a dead server");
    let proxy = Proxy::to(ways.backend.addr);
    proxy.refuse();
    let args = ["lock", "--mutex", "silent", "--", "echo", "mine"];
    let mut waiting = Program::start(&ways.backend.through(&proxy), &args);
    let line = waiting.says("still waiting, but ");
    told.read(
        "$ contend lock --mutex silent -- echo mine",
        &line,
        &["silent: "],
    );
    proxy.pass();
    waiting.says("mine");
    let (code, lines) = waiting.ends();
    assert_eq!(code, 0, "{lines:?}");
    let said = lines[1..].join("\n  > ");
    writeln!(told.0, "  > {said}\n  exit code 0").unwrap();
    let once = lines.iter().filter(|line| line.contains("still waiting"));
    assert!(once.count() <= 2, "{lines:#?}");
    wait_until(PATIENCE, "its server is left alone", || proxy.live() == 0);
}

/// Rights to lock are not rights to look: the message names the one that is missing.
#[test]
fn without_the_right_to_list_redis_says_which_one_is_missing() {
    let server = RedisServer::start();
    let page = include_str!("../../src/operations.md");
    let (_, rights) = page.split_once("```text\n").unwrap();
    let (rights, _) = rights.split_once("```").unwrap();
    let rights = rights.split_whitespace();
    let user: Vec<&str> = ["ACL", "SETUSER", "locker", "on", ">pw"]
        .into_iter()
        .chain(rights)
        .collect();
    server.cli(&user);
    let url = format!("redis://locker:pw@{}", server.addr());
    assert_eq!(run(&url, &["lock", "m", "--", "true"]).0, 0);
    let mut told = Transcript::new("redis");
    told.mistake(16, "the rights to list and to look are missing");
    told.shell(&url, &["list"], 77, &["'scan'", "SCAN and ZRANGE"]);
    told.shell(&url, &["status", "m"], 77, &["'zrange'", "SCAN and ZRANGE"]);
    println!("{}", told.0);
    assert!(told.1.is_empty(), "{:#?}", told.1);
}

/// On ZooKeeper two may have one id: there the name of the owner can be that of the contender that waits.
#[test]
fn a_lock_never_says_that_it_waits_for_itself() {
    within(HANG, || {
        let url = zk().url();
        let lock = ["lock", "mirror", "--id", "me", "--"];
        let args = |command: &[&'static str]| [&lock[..], command].concat();
        let mut first = Program::start(&url, &args(&["sh", "-c", "echo mine; exec sleep 60"]));
        first.says("mine");
        let mut second = Program::start(&url, &args(&["echo", "ours"]));
        let mut third = Program::start(&url, &["lock", "mirror", "--", "echo", "theirs"]);
        let itself = "held by \"me\"";
        third.says(itself);
        assert_eq!(second.says_within(Duration::from_secs(1), itself), None);
        drop(first);
        let (code, lines) = second.ends();
        assert_eq!(code, 0, "{lines:#?}");
        assert!(
            !lines.iter().any(|line| line.contains(itself)),
            "{lines:#?}"
        );
        assert_eq!(third.ends().0, 0);
    });
}

/// A readiness check asks once, and is told of a missing table or grant before anybody locks.
#[test]
fn ping_on_mysql_looks_at_the_table_of_mutexes() {
    within(HANG, || {
        let url = mysql_ground::empty_database();
        let mut told = Transcript::new("mysql");
        told.mistake(14, "the table is missing");
        told.shell(
            &url,
            &["ping"],
            78,
            &["simba_mutex", "sql/init-mutex.sql", "create_table=true"],
        );
        let (_, health, _) = run(&url, &["--json", "ping"]);
        assert!(
            health.contains(r#""kind":"misconfigured","code":78"#),
            "{health}"
        );

        let creating = format!("{url}?create_table=true");
        assert_eq!(run(&creating, &["ping"]).0, 0);
        assert_eq!(run(&url, &["ping"]).0, 0, "the ping before has made it");

        told.mistake(15, "the grant of SELECT is missing");
        let (_, rest) = url.split_once('@').unwrap();
        let (_, database) = rest.split_once('/').unwrap();
        let mut operator = mysql_ground::operator(&url);
        for statement in [
            "CREATE USER IF NOT EXISTS writer IDENTIFIED BY 'pw'".to_owned(),
            format!("GRANT INSERT, UPDATE ON {database}.simba_mutex TO writer"),
        ] {
            operator.query_drop(statement).unwrap();
        }
        let writer = format!("mysql://writer:pw@{rest}");
        let grant = "grant SELECT, INSERT and UPDATE";
        told.shell(
            &writer,
            &["ping"],
            77,
            &["SELECT command denied", "simba_mutex", grant],
        );
        println!("{}", told.0);
        assert!(told.1.is_empty(), "{:#?}", told.1);

        // Of a table that was there once, too; who may make it makes it again.
        let factory = contend::connect(&url).unwrap();
        factory.ping(PATIENCE).unwrap();
        let drop_table = format!("DROP TABLE {database}.simba_mutex");
        operator.query_drop(&drop_table).unwrap();
        let error = factory.ping(PATIENCE).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Misconfigured, "{error}");
        assert!(factory.health().to_json().contains("init-mutex.sql"));
        let creating = contend::connect(&creating).unwrap();
        creating.ping(PATIENCE).unwrap();
        factory.ping(PATIENCE).unwrap();
        operator.query_drop(&drop_table).unwrap();
        wait_until(PATIENCE, "it was made again", || {
            creating.ping(PATIENCE).is_ok()
        });
        factory.ping(PATIENCE).unwrap();
    });
}

/// A busy disk makes a table more slowly than an answer may come: a ping that makes it has all of its time.
#[test]
fn ping_on_mysql_waits_for_the_table_to_be_made() {
    within(HANG, || {
        let server = mysql_ground::start();
        let url = server.create_database("slow");
        let mut operator = mysql_ground::operator(&url);
        // Under this lock tables can be read, and none can be made.
        operator.query_drop("FLUSH TABLES WITH READ LOCK").unwrap();
        let factory = contend::connect(&format!("{url}?create_table=true")).unwrap();
        thread::scope(|scope| {
            let ping = scope.spawn(|| factory.ping(PATIENCE));
            // Several times what an answer may take.
            let end = Instant::now() + Duration::from_secs(8);
            wait_until(PATIENCE, "it was locked for long", || {
                Instant::now() > end || ping.is_finished()
            });
            operator.query_drop("UNLOCK TABLES").unwrap();
            ping.join().unwrap().unwrap();
        });
    });
}

/// What a retry cannot fix ends `elect` and `schedule` at once: a supervisor would see a healthy process.
#[test]
fn what_the_server_refuses_for_good_ends_elect_and_schedule() {
    within(HANG, || {
        let no_table = mysql_ground::empty_database();
        let server = RedisServer::start();
        let stranger = server.url().replace("redis://", "redis://nobody:wrong@");
        for (url, expected) in [(&no_table, 78), (&stranger, 77)] {
            for args in [
                &["elect", "m"][..],
                &["elect", "m", "--", "true"],
                &["schedule", "m", "--every", "1h"],
                &["schedule", "m", "--every", "1h", "--", "true"],
            ] {
                let (code, out, err) = run(url, args);
                assert_eq!(code, expected, "{args:?}: {out}{err}");
                // By the log, or by the command itself.
                assert!(err.contains("m: ") || err.contains("contend: "), "{err}");
            }
        }
    });
}

/// Each would lead in its own memory, and run what only one may run.
#[test]
fn a_command_without_a_server_is_not_run() {
    within(HANG, || {
        for args in [
            &["elect", "m", "--", "echo", "ran"][..],
            &["schedule", "m", "--every", "1s", "--", "echo", "ran"],
            &["lock", "m", "--", "echo", "ran"],
        ] {
            let (code, out, err) = run("", args);
            assert_eq!((code, &*out), (64, ""), "{args:?}: {err}");
            assert!(err.contains("no server: give --url"), "{args:?}: {err}");
        }
        // Told to use memory, it is a leader like any other: it does not resign, nor end by itself.
        let args = ["elect", "m", "--", "sh", "-c", "sleep 3; echo led on"];
        let mut elect = Program::start("memory://", &args);
        elect.says("led on");
        assert_eq!(elect.ends().0, 0);
    });
}

/// Two jobs without a name would share a default one, and one of them would never run.
#[test]
fn a_command_without_a_mutex_is_not_run() {
    within(HANG, || {
        for args in [
            &["schedule", "--every", "1s", "--", "echo", "ran"][..],
            &["elect", "--", "echo", "ran"],
            &["lock", "--", "echo", "ran"],
        ] {
            let mut program = Program::start("memory://", args);
            // Whichever comes first.
            let line = program.says("n");
            assert!(line.contains("no mutex: give its name"), "{args:?}: {line}");
            let (code, lines) = program.ends();
            assert_eq!(code, 64, "{args:?}: {lines:#?}");
            assert!(!lines.iter().any(|line| line == "ran"), "{lines:#?}");
        }
        // To look at, they need no name.
        let mut schedule = Program::start("memory://", &["schedule"]);
        schedule.says("runs with fence");
        assert_eq!(schedule.terminate().0, 0);
        let (code, out, err) = run("memory://", &["elect", "--for", "100ms"]);
        assert_eq!(code, 0, "{out}{err}");
    });
}

/// A default pace would run a backup every second.
#[test]
fn a_command_without_a_pace_is_not_run() {
    within(HANG, || {
        for json in [&[][..], &["--json"]] {
            let args = [json, &["schedule", "report", "--", "echo", "ran"]].concat();
            let mut program = Program::start("memory://", &args);
            // Whichever comes first.
            let line = program.says("n");
            for says in [
                "--every",
                "--delay",
                "--daily-at",
                "schedule report --every 1h -- ",
            ] {
                assert!(line.contains(says), "{says}: {line}");
            }
            let (code, lines) = program.ends();
            assert_eq!(code, 64, "{lines:#?}");
            assert_eq!(lines.len(), 1, "{lines:#?}");
        }
        // To look at, it needs none.
        let mut demo = Program::start("memory://", &["schedule"]);
        for _ in 0..2 {
            demo.says("runs with fence");
        }
        assert_eq!(demo.terminate().0, 0);
    });
}

#[test]
fn a_schedule_runs_on_its_days_alone() {
    within(HANG, || {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        // Long enough for two programs to start on a busy machine.
        let soon = now.as_secs() + 8;
        let second = soon % 86_400;
        let time = format!(
            "{:02}:{:02}:{:02}",
            second / 3600,
            second / 60 % 60,
            second % 60
        );
        // 1970-01-01 was a Thursday.
        let mut days = ["thu", "fri", "sat", "sun", "mon", "tue", "wed"];
        days.rotate_left(usize::try_from(soon / 86_400 % 7).unwrap());
        let start = |mutex, days: &[&str]| {
            let days = days.join(",");
            let args = ["schedule", mutex, "--daily-at", &time, "--days", &days];
            Program::start("memory://", &args)
        };
        let mut others = start("others", &days[1..]);
        others.says("started");
        start("today", &days[..1]).says("runs with fence");
        let (code, lines) = others.terminate();
        assert_eq!(code, 0, "{lines:#?}");
        assert!(!lines.concat().contains("runs with"), "{lines:#?}");
    });
}

/// As `elect` does, and as `status` shows it: a process id says nothing on another machine.
#[test]
fn a_schedule_names_itself_by_its_contender() {
    within(HANG, || {
        let start = |args: &[&str]| {
            let schedule = ["schedule", "m", "--every", "1h"];
            Program::start("memory://", &[&schedule[..], args].concat())
        };
        for command in [&[][..], &["--", "true"]] {
            let mut schedule = start(&[&["--id", "me"], command].concat());
            schedule.says("me runs with fence ");
            let (code, lines) = schedule.terminate();
            assert_eq!(code, 0, "{lines:#?}");
            for line in ["me started; ", "me stopped"] {
                assert!(lines.iter().any(|it| it.contains(line)), "{lines:#?}");
            }
        }
        let mut schedule = start(&["--json"]);
        let started = schedule.says("\"started\"");
        let id = field(&started, "contender").to_owned();
        assert_eq!(field(&schedule.says("\"run\""), "contender"), id);
        let (_, lines) = schedule.terminate();
        assert_eq!(field(lines.last().unwrap(), "contender"), id);
        assert_eq!(field(lines.last().unwrap(), "event"), "stopped");
    });
}

/// The command of these tests has all features: the messages are those of the library without them.
#[test]
fn what_was_not_built_in_is_installed_and_not_written_into_a_manifest() {
    for (text, says) in [
        (
            "a zk:// URL needs the Cargo feature \"zk\": contend = { version = \"0.1.0\", features = [\"zk\"] }",
            "a zk:// URL needs a contend that was built for it: `cargo install contend --features \
             cli,redis,mysql,zk",
        ),
        (
            "a rediss:// URL needs the Cargo features \"redis\", \"tls\": contend = { version = \"0.1.0\", \
             features = [\"redis\", \"tls\"] }",
            "a rediss:// URL needs a contend that was built for it: `cargo install contend --features \
             cli,redis,mysql,zk,tls",
        ),
        (
            "TLS needs the Cargo feature \"tls\"",
            "TLS needs a contend that was built for it: `cargo install contend --features \
             cli,redis,mysql,zk,tls",
        ),
        (
            "the time zone \"Mars\" needs the Cargo feature \"timezones\"; without it, write UTC",
            "timezones`; without it, write UTC",
        ),
    ] {
        let error = Error::new(ErrorKind::FeatureDisabled, text);
        let message = advice::message(&error);
        assert!(message.contains(says), "{message}");
        assert!(!message.contains("version"), "{message}");
    }
}

#[test]
fn a_scheduled_command_that_fails_is_reported_once() {
    within(HANG, || {
        for (command, failure) in [("false", "ended with code 1"), ("/none", "/none")] {
            let args = ["schedule", "m", "--every", "1h", "--", command];
            let mut schedule = Program::start("memory://", &args);
            schedule.says(failure);
            let (_, lines) = schedule.terminate();
            let said = lines.iter().filter(|line| line.contains(failure));
            assert_eq!(said.count(), 1, "{lines:#?}");
        }
    });
}
