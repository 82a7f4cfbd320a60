//! Counting semaphores: what an acquire and a release cost beside the same statements on one plain
//! connection, and with more and more held; how many pairs of them a second go through one semaphore,
//! beside the seed's statements as they are written there; hand-offs between many waiters.
//!
//! `cargo bench --features mysql --bench semaphore`. Reported are times; of `pairs`, the time of one
//! round in which every thread acquires and releases once.

mod common;

use std::hint::black_box;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::{Tape, beside, in_turns};
use contend::semaphore::{PermitRequest, Semaphores};
use criterion::Criterion;
use mysql::prelude::Queryable;
use mysql::{Conn, Opts};
use testbed::MariaDbServer;

/// How many operations of one side before it is the other's turn.
const BLOCK: usize = 20;

/// And of many threads, about how long.
const TURN: Duration = Duration::from_millis(250);

/// Far more than is ever held.
const CAPACITY: u32 = 100_000_000;

fn main() {
    let mut criterion = common::criterion();
    uncontended(&mut criterion);
    held(&mut criterion);
    pairs(&mut criterion);
    waiters();
    criterion.final_summary();
}

fn fresh_id() -> String {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    format!("bench-{}", COUNTER.fetch_add(1, Ordering::Relaxed))
}

fn connect(url: &str) -> Conn {
    let url = format!("{url}?prefer_socket=false");
    let mut conn = Conn::new(Opts::from_url(&url).unwrap()).unwrap();
    // As a deployment that keeps the default would run it, and as ours does.
    conn.query_drop("SET time_zone = '+00:00'").unwrap();
    conn
}

/// The seed's acquire and release, statement by statement.
struct AsWritten {
    conn: Conn,
}

impl AsWritten {
    fn acquire(&mut self, id: &str) -> u64 {
        let conn = &mut self.conn;
        let found: Option<(u64, String)> = conn
            .exec_first(
                "SELECT id, state FROM contend_permit_request WHERE external_id = ?",
                (id,),
            )
            .unwrap();
        assert!(found.is_none());
        conn.query_drop("START TRANSACTION").unwrap();
        conn.query_drop("SET SESSION innodb_lock_wait_timeout = 50")
            .unwrap();
        let (semaphore, capacity): (u64, u64) = conn
            .exec_first(
                "SELECT id, capacity FROM contend_semaphore WHERE name = ? FOR UPDATE",
                ("s",),
            )
            .unwrap()
            .unwrap();
        let used: Option<u64> = conn
            .exec_first(
                "SELECT CAST(COALESCE(SUM(count), 0) AS UNSIGNED) FROM contend_permit \
                 WHERE semaphore_id = ? AND state = 'ACQUIRED'",
                (semaphore,),
            )
            .unwrap();
        assert!(used.unwrap_or(0) < capacity);
        conn.exec_drop(
            "INSERT INTO contend_permit_request (external_id, state) VALUES (?, 'ACQUIRED')",
            (id,),
        )
        .unwrap();
        let request = conn.last_insert_id();
        conn.exec_drop(
            "INSERT INTO contend_permit (semaphore_id, permit_request_id, count, state) \
             VALUES (?, ?, 1, 'ACQUIRED')",
            (semaphore, request),
        )
        .unwrap();
        let permit = conn.last_insert_id();
        conn.query_drop("COMMIT").unwrap();
        permit
    }

    fn release(&mut self, id: &str) {
        let conn = &mut self.conn;
        let (request, _): (u64, String) = conn
            .exec_first(
                "SELECT id, state FROM contend_permit_request WHERE external_id = ?",
                (id,),
            )
            .unwrap()
            .unwrap();
        conn.exec_drop(
            "UPDATE contend_permit SET state = 'RELEASED' \
             WHERE permit_request_id = ? AND state != 'RELEASED'",
            (request,),
        )
        .unwrap();
        conn.exec_drop(
            "UPDATE contend_permit_request SET state = 'RELEASED' WHERE id = ?",
            (request,),
        )
        .unwrap();
    }
}

/// A database with one semaphore of which `held` permits are held.
fn ground(server: &MariaDbServer, name: &str, held: u64) -> (Semaphores, String) {
    let url = server.create_database(name);
    let semaphores = contend::connect(&url).unwrap().semaphores().unwrap();
    semaphores.create_tables().unwrap();
    semaphores.create("s", CAPACITY).unwrap();
    let mut conn = connect(&url);
    for start in (0..held).step_by(5_000) {
        let ids: Vec<u64> = (start + 1..=(start + 5_000).min(held)).collect();
        let requests: Vec<String> = ids
            .iter()
            .map(|n| format!("({n}, 'held-{n}', 'ACQUIRED')"))
            .collect();
        let permits: Vec<String> = ids
            .iter()
            .map(|n| format!("(1, {n}, 1, 'ACQUIRED')"))
            .collect();
        conn.query_drop(format!(
            "INSERT INTO contend_permit_request (id, external_id, state) VALUES {}",
            requests.join(",")
        ))
        .unwrap();
        conn.query_drop(format!(
            "INSERT INTO contend_permit (semaphore_id, permit_request_id, count, state) VALUES {}",
            permits.join(",")
        ))
        .unwrap();
    }
    semaphores.repair().unwrap();
    (semaphores, url)
}

fn request(id: &str) -> PermitRequest {
    PermitRequest::new(id).permits("s", 1)
}

fn guarded() -> PermitRequest {
    PermitRequest::generated().permits("s", 1)
}

/// Our statements, as the library sends them, on one plain connection: two messages and one.
struct Bare {
    conn: Conn,
}

impl Bare {
    fn send(&mut self, script: &str) -> u64 {
        let mut result = self.conn.query_iter(script).unwrap();
        let mut last = 0;
        while let Some(set) = result.iter() {
            last = set.last_insert_id().filter(|id| *id != 0).unwrap_or(last);
            set.for_each(|row| drop(black_box(row.unwrap())));
        }
        last
    }

    fn pair(&mut self, id: &str) {
        let script = |files: &[&str]| {
            let names = [
                ("{semaphore}", "contend_semaphore"),
                ("{request}", "contend_permit_request"),
                ("{permit}", "contend_permit"),
                ("{names}", "'s'"),
                ("{external_ids}", &format!("'{id}'")),
                ("{which}", &format!("r.external_id = '{id}'")),
                ("{change}", "1"),
                ("{id}", "1"),
            ];
            let comment = |line: &&str| !line.starts_with("--");
            let mut text: Vec<String> = files
                .iter()
                .map(|file| file.lines().filter(comment).collect::<Vec<_>>().join("\n"))
                .collect();
            for part in &mut text {
                for (name, value) in names {
                    *part = part.replace(name, value);
                }
            }
            text
        };
        let first = script(&[
            include_str!("../sql/semaphore-begin.sql"),
            include_str!("../sql/semaphore-lock.sql"),
            include_str!("../sql/request-read.sql"),
        ]);
        self.send(&first.join(";"));
        let second = script(&[
            include_str!("../sql/request-insert.sql"),
            include_str!("../sql/permit-insert.sql"),
            include_str!("../sql/semaphore-change-counter.sql"),
            "COMMIT;SET wait_timeout = 86400",
        ]);
        let times = "30, SYSDATE(6) + INTERVAL 30 SECOND, SYSDATE(6) + INTERVAL 30 * 1.25 SECOND";
        let request = format!("('{id}', 1, NULL, 'ACQUIRED', {times})");
        let second = [
            second[0].replace("{rows}", &request),
            second[1].replace("{rows}", "(1, LAST_INSERT_ID(), 1, 'ACQUIRED')"),
            second[2].clone(),
            second[3].clone(),
        ];
        self.send(&second.join(";"));
        let release = script(&[include_str!("../sql/request-release.sql")]);
        self.send(&release.join(";"));
    }
}

/// One pair without contention, beside the same statements on one plain connection.
fn uncontended(criterion: &mut Criterion) {
    let sides = ["bare", "contend"];
    beside(criterion, "semaphore", "uncontended", sides, |budget| {
        let server = MariaDbServer::start();
        let (_, url) = ground(&server, "bare", 0);
        let (semaphores, _) = ground(&server, "ours", 0);
        let mut bare = Bare {
            conn: connect(&url),
        };
        let timed = |work: &mut dyn FnMut()| {
            let start = Instant::now();
            work();
            start.elapsed()
        };
        in_turns(
            budget,
            BLOCK,
            [&mut || timed(&mut || bare.pair(&fresh_id())), &mut || {
                timed(&mut || {
                    let guard = semaphores.guard(&guarded(), Duration::from_secs(60));
                    guard.unwrap().release().unwrap();
                })
            }],
        )
    });
}

/// Few held, more, and many, in turns.
fn held(criterion: &mut Criterion) {
    let mut database = None;
    for acquires in [true, false] {
        let operation = if acquires { "acquire" } else { "release" };
        let sides = ["held_10", "held_1000", "held_100000"];
        beside(criterion, "semaphore", operation, sides, |budget| {
            let (_, [few, more, many]) = database.get_or_insert_with(|| {
                let server = MariaDbServer::start();
                let held = sides.map(|side| {
                    let held: u64 = side["held_".len()..].parse().unwrap();
                    // To see whether it works, few do.
                    let held = if budget.smoke { held.min(10) } else { held };
                    ground(&server, side, held).0
                });
                (server, held)
            });
            let once = |semaphores: &Semaphores| {
                let id = fresh_id();
                let start = Instant::now();
                black_box(semaphores.acquire(&request(&id)).unwrap());
                let middle = Instant::now();
                black_box(semaphores.release(&id).unwrap());
                if acquires {
                    middle - start
                } else {
                    middle.elapsed()
                }
            };
            in_turns(
                budget,
                BLOCK,
                [&mut || once(few), &mut || once(more), &mut || once(many)],
            )
        });
    }
}

/// The seed's statements and ours, each with as many threads, in turns.
fn pairs(criterion: &mut Criterion) {
    let mut server = None;
    for threads in [1_usize, 8, 32, 128] {
        let sides = ["as_written", "contend"];
        let operation = threads.to_string();
        beside(criterion, "semaphore/pairs", &operation, sides, |budget| {
            let server = server.get_or_insert_with(MariaDbServer::start);
            let (_, url) = ground(server, &format!("as_written_{threads}"), 0);
            let (semaphores, _) = ground(server, &format!("contend_{threads}"), 0);
            let mut as_written: Vec<_> = (0..threads)
                .map(|_| {
                    let mut seed = AsWritten {
                        conn: connect(&url),
                    };
                    move || {
                        let id = fresh_id();
                        black_box(seed.acquire(&id));
                        seed.release(&id);
                    }
                })
                .collect();
            let mut ours: Vec<_> = (0..threads)
                .map(|_| {
                    || {
                        let guard = semaphores.guard(&guarded(), Duration::from_secs(60));
                        guard.unwrap().release().unwrap();
                    }
                })
                .collect();
            let mut tapes = [Tape::default(), Tape::default()];
            // The first turns open connections, and show how many rounds fit into one.
            let rounds = |took: Duration| (TURN.as_nanos() / took.as_nanos().max(1)).max(1) as u64;
            let warm_up = if budget.smoke { 1 } else { 5 };
            together(warm_up, &mut as_written);
            together(warm_up, &mut ours);
            let theirs = rounds(together(warm_up, &mut as_written) / warm_up as u32);
            let our = rounds(together(warm_up, &mut ours) / warm_up as u32);
            let began = Instant::now();
            loop {
                tapes[0].push(theirs, together(theirs, &mut as_written));
                tapes[1].push(our, together(our, &mut ours));
                if !budget.lasts(began) {
                    return tapes;
                }
            }
        });
    }
}

/// Many threads of one process that wait for one permit, each of which holds it once.
fn waiters() {
    let server = MariaDbServer::start();
    let url = server.create_database("waiters");
    let semaphores = contend::connect(&url).unwrap().semaphores().unwrap();
    semaphores.create_tables().unwrap();
    semaphores.create("s", 1).unwrap();
    for count in [100, 1_000] {
        let first = semaphores.guard(&guarded(), Duration::ZERO).unwrap();
        let before = cpu();
        let took = thread::scope(|scope| {
            let threads: Vec<_> = (0..count)
                .map(|_| {
                    let semaphores = &semaphores;
                    scope.spawn(move || {
                        let guard = semaphores.guard(&guarded(), Duration::from_secs(600));
                        drop(guard.unwrap());
                    })
                })
                .collect();
            // So that all of them wait.
            thread::sleep(Duration::from_millis(500));
            let start = Instant::now();
            drop(first);
            threads
                .into_iter()
                .for_each(|thread| thread.join().unwrap());
            start.elapsed()
        });
        println!(
            "semaphore/waiters/{count}: {:.0} hand-offs/s, {:.2} s of CPU",
            f64::from(count) / took.as_secs_f64(),
            cpu() - before
        );
    }
}

/// Seconds of CPU that this process has used.
fn cpu() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or("").split(' ').collect();
    let ticks = |at: usize| -> f64 { fields.get(at).and_then(|it| it.parse().ok()).unwrap_or(0.0) };
    (ticks(12) + ticks(13)) / 100.0
}

/// Every worker works so many rounds, on a thread of its own; how long it took.
fn together(rounds: u64, workers: &mut [impl FnMut() + Send]) -> Duration {
    let start = Barrier::new(workers.len() + 1);
    thread::scope(|scope| {
        let threads: Vec<_> = workers
            .iter_mut()
            .map(|work| {
                let start = &start;
                scope.spawn(move || {
                    start.wait();
                    (0..rounds).for_each(|_| work());
                })
            })
            .collect();
        start.wait();
        let begin = Instant::now();
        threads
            .into_iter()
            .for_each(|thread| thread.join().unwrap());
        begin.elapsed()
    })
}
