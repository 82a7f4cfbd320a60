//! What the MySQL backend costs, by the server's own counters; and, ignored by default, how long it
//! takes: `cargo test --release --features mysql --test mysql_cost -- --ignored --nocapture`.

#![cfg(feature = "mysql")]

mod conformance;
mod example;
mod mysql_ground;

use std::path::Path;
use std::process::Command;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use conformance::{PATIENCE, next, started, wait_for_owner};
use contend::backend::{Attempt, Entry, Hold, Place, Renewal};
use contend::{EventKind, Factory, Moment, MutexContendService};
use ground::{MariaDbServer, Output, Process, wait_until, within};
use mysql::prelude::Queryable;
use mysql::{Conn, Opts};
use mysql_ground::{HANG, ms, operator};

/// How long a waiter waits before it is handed the mutex.
const SETTLE: Duration = ms(10);

const MEASURE: Duration = Duration::from_secs(900);

/// A server of its own: its counters count nobody else.
fn own_server() -> (MariaDbServer, String) {
    prepared(mysql_ground::start())
}

fn prepared(server: MariaDbServer) -> (MariaDbServer, String) {
    let url = server.create_database("cost");
    operator(&url).query_drop(contend::mysql::INIT_SQL).unwrap();
    (server, url)
}

/// Statements that the server was sent so far, of whatever kind, this one not counted.
fn questions(conn: &mut Conn) -> u64 {
    let rows: Vec<(String, u64)> = conn
        .query("SHOW GLOBAL STATUS WHERE Variable_name IN ('Questions', 'Com_stmt_prepare')")
        .unwrap();
    let value = |name: &str| rows.iter().find(|row| row.0 == name).unwrap().1;
    // MariaDB counts neither the preparation nor the closing of a statement as a question.
    value("Questions") + value("Com_stmt_prepare")
}

/// What `work` costs.
fn cost<T>(conn: &mut Conn, work: impl FnOnce() -> T) -> (u64, T) {
    let before = questions(conn);
    let value = work();
    // The first look is in the second.
    (questions(conn) - before - 1, value)
}

/// Waits until nobody but this sends anything for a while; how many looks that took.
fn settled(conn: &mut Conn) -> u64 {
    let (mut looks, mut last) = (1, questions(conn));
    wait_until(PATIENCE, "nothing more is sent", || {
        thread::sleep(ms(500));
        looks += 1;
        let now = questions(conn);
        std::mem::replace(&mut last, now) + 1 == now
    });
    looks
}

fn connect(url: &str, parameters: &str) -> Factory {
    contend::connect(&format!("{url}?{parameters}")).unwrap()
}

fn place(factory: &Factory, id: &str, hold: Hold) -> Place {
    Place {
        mutex: "m".into(),
        id: id.into(),
        lease: factory.lease(),
        hold,
    }
}

#[test]
fn one_round_trip_to_acquire_one_to_renew_one_to_release_and_one_more_to_lose() {
    within(HANG, || {
        let (_server, url) = own_server();
        let mut conn = operator(&url);
        let factory = connect(&url, "ttl=20s&wakeups=off&pool_size=1");
        let backend = factory.backend().unwrap();
        let mut a = backend.seat(&place(&factory, "a", Hold::Long)).unwrap();
        let mut b = backend.seat(&place(&factory, "b", Hold::Long)).unwrap();
        let by = || Moment::now() + factory.lease().call_budget();
        for round in 0..3 {
            let (acquire, granted) = cost(&mut conn, || a.acquire(Entry::Queue, by()).unwrap());
            let Attempt::Granted(grant) = granted else {
                panic!("{granted:?}");
            };
            let fence = grant.owner.fence();
            let (renew, renewed) = cost(&mut conn, || a.renew(fence, by()).unwrap());
            assert!(matches!(renewed, Renewal::Renewed(_)));
            let (lose, lost) = cost(&mut conn, || b.acquire(Entry::Try, by()).unwrap());
            assert!(matches!(lost, Attempt::Refused(_)));
            let (release, released) = cost(&mut conn, || a.release(fence, by()).unwrap());
            assert!(released);
            // The first round opens the connection, looks at the table, makes the row and prepares.
            if round > 0 {
                assert_eq!((acquire, renew, lose, release), (1, 1, 2, 1));
            }
        }
    });
}

/// A leading service adds one statement to take the name and one to free it, off its own path.
#[test]
fn wakeups_add_one_statement_to_lead_and_one_to_stop() {
    within(HANG, || {
        let (_server, url) = own_server();
        let mut conn = operator(&url);
        let factory = connect(&url, "ttl=60s&transition=60s&pool_size=1");
        let service = factory.contend("m").id("a").build().unwrap();
        let lead = || {
            service.start().unwrap();
            wait_until(PATIENCE, "it owns", || service.is_owner());
        };
        lead();
        service.stop().unwrap();
        // Both connections are open and all is prepared; one more round to be sure of it.
        for _ in 0..2 {
            lead();
            service.stop().unwrap();
        }
        settled(&mut conn);
        let before = questions(&mut conn);
        lead();
        // Time is the subject: whatever else it sends would be counted.
        thread::sleep(ms(500));
        service.stop().unwrap();
        let looks = settled(&mut conn);
        let spent = questions(&mut conn) - before - looks - 1;
        assert_eq!(spent, 4, "acquire, GET_LOCK, release, RELEASE_LOCK");
    });
}

fn percentile(sorted: &[Duration], share: f64) -> Duration {
    let index = (sorted.len() as f64 * share) as usize;
    sorted[index.min(sorted.len() - 1)]
}

fn report(what: &str, mut times: Vec<Duration>) -> Duration {
    times.sort();
    let p50 = percentile(&times, 0.5);
    println!(
        "{what}: n={} p50={:?} p90={:?} p99={:?} max={:?}",
        times.len(),
        p50,
        percentile(&times, 0.9),
        percentile(&times, 0.99),
        times[times.len() - 1]
    );
    p50
}

/// The bare driver: release UPDATE, RELEASE_LOCK; GET_LOCK wakes; acquire UPDATE. Two threads, two
/// connections each (row, name), prepared.
struct Bare {
    rows: [Conn; 2],
    names: [Option<Conn>; 2],
    turn: usize,
}

impl Bare {
    const ACQUIRE: &'static str = "UPDATE bare SET version = LAST_INSERT_ID(GREATEST(version + 1, \
        CAST(UNIX_TIMESTAMP(NOW(6)) * 1000000 AS UNSIGNED))), owner_id = ?, \
        transition_at = CAST(UNIX_TIMESTAMP(NOW(3)) * 1000 AS UNSIGNED) + 16000 \
        WHERE mutex = 'm' AND transition_at < CAST(UNIX_TIMESTAMP(NOW(3)) * 1000 AS UNSIGNED)";
    const RELEASE: &'static str = "UPDATE bare SET owner_id = '', transition_at = 0, version = version + 1 \
        WHERE mutex = 'm' AND owner_id = ?";

    fn new(url: &str) -> Bare {
        let mut conn = plain(url);
        conn.query_drop("CREATE TABLE IF NOT EXISTS bare LIKE simba_mutex")
            .unwrap();
        conn.query_drop("REPLACE INTO bare VALUES ('m', 0, 0, 0, '', 0)")
            .unwrap();
        let mut bare = Bare {
            rows: [plain(url), plain(url)],
            names: [Some(plain(url)), Some(plain(url))],
            turn: 0,
        };
        bare.rows[0].exec_drop(Bare::ACQUIRE, ("0",)).unwrap();
        let name = bare.names[0].as_mut().unwrap();
        name.exec_drop("DO GET_LOCK('bare', 10)", ()).unwrap();
        bare
    }

    /// Hands over `turns` times, and returns how long each took.
    fn run(&mut self, turns: usize) -> Vec<Duration> {
        let mut times = Vec::new();
        for _ in 0..turns {
            let (owner, waiter) = (self.turn % 2, (self.turn + 1) % 2);
            self.turn += 1;
            let mut name = self.names[waiter].take().unwrap();
            let (blocked, ready) = mpsc::channel();
            let waiting = thread::spawn(move || {
                blocked.send(()).unwrap();
                name.exec_drop("DO GET_LOCK('bare', 10)", ()).unwrap();
                name
            });
            ready.recv().unwrap();
            // As long as the services below: an idle server is slower at first.
            thread::sleep(SETTLE);
            let began = Instant::now();
            self.rows[owner]
                .exec_drop(Bare::RELEASE, (owner.to_string(),))
                .unwrap();
            let held = self.names[owner].as_mut().unwrap();
            held.exec_drop("DO RELEASE_LOCK('bare')", ()).unwrap();
            let name = waiting.join().unwrap();
            self.rows[waiter]
                .exec_drop(Bare::ACQUIRE, (waiter.to_string(),))
                .unwrap();
            assert_eq!(self.rows[waiter].affected_rows(), 1);
            times.push(began.elapsed());
            self.names[waiter] = Some(name);
        }
        times
    }
}

fn plain(url: &str) -> Conn {
    Conn::new(Opts::from_url(&format!("{url}?prefer_socket=false")).unwrap()).unwrap()
}

/// Two services of two factories hand over to each other.
struct Pair {
    services: [(
        MutexContendService,
        crossbeam_channel::Receiver<contend::Event>,
    ); 2],
    turn: usize,
}

impl Pair {
    fn new(factories: &[Factory; 2], mutex: &str) -> Pair {
        let [a, b] = factories;
        let services = [started(a, mutex, "a"), started(b, mutex, "b")];
        wait_until(PATIENCE, "one owns", || {
            services.iter().any(|(service, _)| service.is_owner())
        });
        let turn = usize::from(services[1].0.is_owner());
        Pair { services, turn }
    }

    fn run(&mut self, turns: usize, settle: Duration) -> Vec<Duration> {
        let mut times = Vec::new();
        for _ in 0..turns {
            let (owner, waiter) = (
                &self.services[self.turn % 2],
                &self.services[(self.turn + 1) % 2],
            );
            wait_for_owner(&waiter.0, owner.0.id());
            // Time is the subject: the waiter waits.
            thread::sleep(settle);
            waiter.1.try_iter().for_each(drop);
            let began = Instant::now();
            owner.0.stop().unwrap();
            let acquired = next(&waiter.1, EventKind::Acquired);
            drop(acquired);
            times.push(began.elapsed());
            owner.1.try_iter().for_each(drop);
            owner.0.start().unwrap();
            self.turn += 1;
        }
        times
    }
}

#[test]
#[ignore = "a measurement"]
fn measure_hand_off() {
    within(MEASURE, || {
        let (_server, url) = prepared(MariaDbServer::start());
        let mut bare = Bare::new(&url);
        let factories = ["a", "b"].map(|_| connect(&url, "ttl=10s&transition=6s"));
        let mut woken = Pair::new(&factories, "woken");
        bare.run(20);
        woken.run(20, SETTLE);
        let (mut bares, mut wakes) = (Vec::new(), Vec::new());
        // Turn by turn, so that whatever else the machine does falls on both.
        for _ in 0..500 {
            bares.extend(bare.run(1));
            wakes.extend(woken.run(1, SETTLE));
        }
        let bare = report("bare hand-off", bares);
        let woken = report("hand-off with wake-ups", wakes);
        println!(
            "ratio of p50: {:.2}",
            woken.as_secs_f64() / bare.as_secs_f64()
        );
    });
}

/// The default interval, and a tenth of it. Fifty mutexes at once, ten turns each: a waiter first looks
/// often, and once in an interval only after about three of them; 500 such waits one after the other
/// would take half an hour. One statement looks at all of them, as it does in use.
#[test]
#[ignore = "a measurement"]
fn measure_hand_off_by_polling() {
    within(MEASURE, || {
        let (_server, url) = prepared(MariaDbServer::start());
        for interval in [1_000, 100] {
            let parameters =
                format!("ttl=10s&transition=6s&wakeups=off&poll_interval={interval}ms");
            let factories = ["a", "b"].map(|_| connect(&url, &parameters));
            let (out, times) = mpsc::channel();
            thread::scope(|scope| {
                for number in 0..50 {
                    let (factories, out) = (&factories, out.clone());
                    scope.spawn(move || {
                        let mut pair = Pair::new(factories, &format!("polled-{interval}-{number}"));
                        for _ in 0..10 {
                            let settle = rand::random_range(interval * 3..interval * 4);
                            out.send(pair.run(1, ms(settle))).unwrap();
                        }
                    });
                }
            });
            drop(out);
            report(
                &format!("hand-off with polling only, poll_interval={interval}ms"),
                times.iter().flatten().collect(),
            );
        }
    });
}

#[test]
#[ignore = "a measurement"]
fn measure_two_hundred_services() {
    within(MEASURE, || {
        let (_server, url) = own_server();
        let mut conn = operator(&url);
        for (what, parameters) in [("with wake-ups", ""), ("polling", "wakeups=off")] {
            let pid = std::process::id();
            let threads_before = ground::threads(pid);
            let leaders = connect(&url, parameters);
            let services: Vec<_> = (0..200)
                .map(|number| started(&leaders, &format!("{what}-{number}"), "leader"))
                .collect();
            wait_until(PATIENCE, "all lead", || {
                services.iter().all(|(service, _)| service.is_owner())
            });
            measure_idle(&mut conn, &format!("200 leading, {what}"), threads_before);
            let waiters = connect(&url, parameters);
            let waiting: Vec<_> = (0..200)
                .map(|number| started(&waiters, &format!("{what}-{number}"), "waiter"))
                .collect();
            for (service, _) in &waiting {
                wait_for_owner(service, "leader");
            }
            measure_idle(
                &mut conn,
                &format!("200 leading and 200 waiting, {what}"),
                threads_before,
            );
        }
    });
}

fn measure_idle(conn: &mut Conn, what: &str, threads_before: usize) {
    // Past the first looks, which are frequent.
    thread::sleep(Duration::from_secs(8));
    let pid = std::process::id();
    let (cpu, began) = (ground::cpu_time(pid), Instant::now());
    let (spent, ()) = cost(conn, || thread::sleep(Duration::from_secs(10)));
    let elapsed = began.elapsed().as_secs_f64();
    let connections: Option<usize> = conn
        .query_first("SELECT COUNT(*) - 1 FROM information_schema.processlist WHERE db = 'cost'")
        .unwrap();
    println!(
        "{what}: {} connections, {:.1} statements/s, {:.2}% of one processor, {} threads",
        connections.unwrap(),
        spent as f64 / elapsed,
        (ground::cpu_time(pid) - cpu).as_secs_f64() / elapsed * 100.0,
        ground::threads(pid) - threads_before,
    );
}

/// The row of a mutex: who, since when, until when; on the server's clock.
fn row(conn: &mut Conn, mutex: &str) -> (String, u64, u64) {
    conn.exec_first(
        "SELECT owner_id, acquired_at, transition_at FROM simba_mutex WHERE mutex = ?",
        (mutex,),
    )
    .unwrap()
    .unwrap_or_default()
}

/// DESIGN 3.2: the dead owner's lease runs out on the server, to the millisecond, and not before.
fn next_owner_after_a_kill(program: &Path, rounds: usize, at_once: usize) -> Vec<Duration> {
    let (_server, url) = own_server();
    let factory = connect(&url, "ttl=1s&transition=500ms");
    let mut conn = operator(&url);
    let mut delays = Vec::new();
    for round in 0..rounds {
        let mutexes: Vec<String> = (0..at_once).map(|n| format!("kill-{round}-{n}")).collect();
        let owners: Vec<Process> = mutexes
            .iter()
            .map(|mutex| {
                let mut command = Command::new(program);
                command.args(["--url", &format!("{url}?ttl=1s&transition=500ms")]);
                command.args(["--mutex", mutex, "--id", "victim"]);
                Process::spawn(&command, &Output::Log("/dev/null".into())).unwrap()
            })
            .collect();
        let heirs: Vec<_> = mutexes
            .iter()
            .map(|mutex| {
                wait_until(PATIENCE, "the victim owns", || {
                    row(&mut conn, mutex).0 == "victim"
                });
                let heir = started(&factory, mutex, "heir");
                wait_for_owner(&heir.0, "victim");
                heir
            })
            .collect();
        for ((owner, mutex), (heir, events)) in owners.iter().zip(&mutexes).zip(&heirs) {
            owner.kill();
            let (id, _, end) = row(&mut conn, mutex);
            assert_eq!(id, "victim");
            next(events, EventKind::Acquired);
            let (id, acquired_at, _) = row(&mut conn, mutex);
            assert_eq!(id, "heir");
            assert!(heir.is_owner());
            assert!(acquired_at > end, "acquired {acquired_at} before {end}");
            delays.push(Duration::from_millis(acquired_at - end));
        }
    }
    delays
}

#[test]
fn a_killed_owner_is_succeeded_when_its_lease_has_run_out_and_not_before() {
    // Outside the limit: a build may be slow.
    let program = example::path("elect");
    within(HANG, || {
        let delays = next_owner_after_a_kill(&program, 1, 5);
        assert!(delays.iter().all(|delay| *delay < ms(2_000)), "{delays:?}");
    });
}

#[test]
#[ignore = "a measurement"]
fn measure_fifty_killed_owners() {
    let program = example::path("elect");
    within(MEASURE, || {
        let delays = next_owner_after_a_kill(&program, 5, 10);
        let late = delays.iter().filter(|delay| **delay > ms(250)).count();
        report("after the end of the dead owner's lease", delays);
        println!("later than 250 ms: {late}");
        assert_eq!(late, 0);
    });
}
