//! Counting semaphores: what an acquire and a release cost with more and more held, and how many pairs
//! of them a second go through one semaphore, beside the seed's statements as they are written there.
//!
//! `cargo bench --features mysql --bench semaphore`. Reported are times; of `pairs`, the time of one
//! round in which every thread acquires and releases once.

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use contend::semaphore::{PermitRequest, Semaphores};
use criterion::{
    BenchmarkId, Criterion, SamplingMode, Throughput, criterion_group, criterion_main,
};
use ground::MariaDbServer;
use mysql::prelude::Queryable;
use mysql::{Conn, Opts};

/// Far more than is ever held.
const CAPACITY: u32 = 100_000_000;

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
                "SELECT id, state FROM permit_request WHERE external_id = ?",
                (id,),
            )
            .unwrap();
        assert!(found.is_none());
        conn.query_drop("START TRANSACTION").unwrap();
        conn.query_drop("SET SESSION innodb_lock_wait_timeout = 50")
            .unwrap();
        let (semaphore, capacity): (u64, u64) = conn
            .exec_first(
                "SELECT id, capacity FROM semaphore WHERE name = ? FOR UPDATE",
                ("s",),
            )
            .unwrap()
            .unwrap();
        let used: Option<u64> = conn
            .exec_first(
                "SELECT CAST(COALESCE(SUM(count), 0) AS UNSIGNED) FROM permit \
                 WHERE semaphore_id = ? AND state = 'ACQUIRED'",
                (semaphore,),
            )
            .unwrap();
        assert!(used.unwrap_or(0) < capacity);
        conn.exec_drop(
            "INSERT INTO permit_request (external_id, state) VALUES (?, 'ACQUIRED')",
            (id,),
        )
        .unwrap();
        let request = conn.last_insert_id();
        conn.exec_drop(
            "INSERT INTO permit (semaphore_id, permit_request_id, count, state) \
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
                "SELECT id, state FROM permit_request WHERE external_id = ?",
                (id,),
            )
            .unwrap()
            .unwrap();
        conn.exec_drop(
            "UPDATE permit SET state = 'RELEASED' \
             WHERE permit_request_id = ? AND state != 'RELEASED'",
            (request,),
        )
        .unwrap();
        conn.exec_drop(
            "UPDATE permit_request SET state = 'RELEASED' WHERE id = ?",
            (request,),
        )
        .unwrap();
    }
}

/// A database with one semaphore of which `held` permits are held.
fn ground(server: &MariaDbServer, name: &str, held: u64) -> (Semaphores, String) {
    let url = server.create_database(name);
    let semaphores = Semaphores::connect(&url).unwrap();
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
            "INSERT INTO permit_request (id, external_id, state) VALUES {}",
            requests.join(",")
        ))
        .unwrap();
        conn.query_drop(format!(
            "INSERT INTO permit (semaphore_id, permit_request_id, count, state) VALUES {}",
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

fn held(criterion: &mut Criterion) {
    let server = MariaDbServer::start();
    let grounds: Vec<(u64, Semaphores)> = [10, 1_000, 100_000]
        .into_iter()
        .map(|held| (held, ground(&server, &format!("held_{held}"), held).0))
        .collect();
    for acquires in [true, false] {
        let name = if acquires { "acquire" } else { "release" };
        let mut group = criterion.benchmark_group("semaphore");
        for (held, semaphores) in &grounds {
            let id = BenchmarkId::new(name, format!("held_{held}"));
            group.bench_function(id, |bencher| {
                bencher.iter_custom(|rounds| {
                    let mut spent = Duration::ZERO;
                    for _ in 0..rounds {
                        let id = fresh_id();
                        let start = Instant::now();
                        black_box(semaphores.acquire(&request(&id)).unwrap());
                        let middle = Instant::now();
                        black_box(semaphores.release(&id).unwrap());
                        spent += if acquires {
                            middle - start
                        } else {
                            middle.elapsed()
                        };
                    }
                    spent
                });
            });
        }
        group.finish();
    }
}

/// Runs `rounds` rounds on every thread; how long it took.
fn together<W: FnMut(u64) + Send>(rounds: u64, workers: Vec<W>) -> Duration {
    let start = Arc::new(std::sync::Barrier::new(workers.len() + 1));
    thread::scope(|scope| {
        let threads: Vec<_> = workers
            .into_iter()
            .map(|mut work| {
                let start = Arc::clone(&start);
                scope.spawn(move || {
                    start.wait();
                    work(rounds);
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

fn pairs(criterion: &mut Criterion) {
    let server = MariaDbServer::start();
    for threads in [1usize, 8, 32] {
        let mut group = criterion.benchmark_group(format!("semaphore/pairs/{threads}"));
        group.sampling_mode(SamplingMode::Flat);
        group.throughput(Throughput::Elements(threads as u64));
        let (_, url) = ground(&server, &format!("as_written_{threads}"), 0);
        group.bench_function("as_written", |bencher| {
            bencher.iter_custom(|rounds| {
                let workers = (0..threads).map(|_| {
                    let mut seed = AsWritten {
                        conn: connect(&url),
                    };
                    move |rounds| {
                        for _ in 0..rounds {
                            let id = fresh_id();
                            black_box(seed.acquire(&id));
                            seed.release(&id);
                        }
                    }
                });
                together(rounds, workers.collect())
            });
        });
        let (semaphores, _) = ground(&server, &format!("contend_{threads}"), 0);
        group.bench_function("contend", |bencher| {
            bencher.iter_custom(|rounds| {
                let workers = (0..threads).map(|_| {
                    let semaphores = &semaphores;
                    move |rounds| {
                        for _ in 0..rounds {
                            let id = fresh_id();
                            black_box(semaphores.acquire(&request(&id)).unwrap());
                            black_box(semaphores.release(&id).unwrap());
                        }
                    }
                });
                together(rounds, workers.collect())
            });
        });
        group.finish();
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(4));
    targets = held, pairs
}
criterion_main!(benches);
