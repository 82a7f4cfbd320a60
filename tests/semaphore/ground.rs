//! Where the semaphores of these tests are: on every backend that has them.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use contend::Moment;
use contend::backend::permit_store::{Grant, Outcome, Request};
use contend::semaphore::{Acquisition, Exhausted, Permit, PermitRequest, Semaphores, Swept};
use mysql::prelude::Queryable;
use testbed::{RedisServer, within};

use crate::mysql_ground::{HANG, empty_database, operator};

/// The shortest ttl that can be renewed on every backend.
pub const SHORT: Duration = Duration::from_secs(3);

/// Of what is not to end during a test.
pub const HOUR: Duration = Duration::from_secs(3600);

pub const PATIENCE: Duration = Duration::from_secs(60);

/// Every backend with semaphores: makes an empty place for them and returns its URL.
pub const PLACES: [fn() -> String; 3] = [memory, database, redis];

fn memory() -> String {
    static COUNTER: AtomicU32 = AtomicU32::new(0);
    let number = COUNTER.fetch_add(1, Ordering::Relaxed);
    format!("memory://semaphores-{number}")
}

/// A new prefix on a Redis server that the tests of this binary share.
fn redis() -> String {
    static SERVER: LazyLock<RedisServer> = LazyLock::new(RedisServer::start);
    static COUNTER: AtomicU32 = AtomicU32::new(0);
    let number = COUNTER.fetch_add(1, Ordering::Relaxed);
    format!("{}/0?prefix=semaphores-{number}", SERVER.url())
}

/// A new database with the tables in it; its URL.
pub fn database() -> String {
    let url = empty_database();
    let semaphores = connect(&url);
    // A busy disk makes tables slowly.
    testbed::wait_until(PATIENCE, "there are tables", || {
        semaphores.create_tables().is_ok()
    });
    url
}

/// A factory of its own, as another process has.
pub fn connect(url: &str) -> Semaphores {
    let factory = contend::connect(url).unwrap();
    // On a busy machine the first connection may take longer than a call may. The table of mutexes is not there.
    testbed::wait_until(PATIENCE, "the server answers", || {
        let answer = factory.ping(Duration::from_secs(5));
        !answer.is_err_and(|error| error.is_transient())
    });
    let semaphores = factory.semaphores().unwrap();
    semaphores.with_ttl(Duration::from_secs(7)).unwrap()
}

/// Runs a test on each backend in turn, with the same semaphores as two processes would see them.
#[track_caller]
pub fn everywhere(capacities: &[(&str, u32)], test: impl Fn(Semaphores, Semaphores)) {
    within(HANG, || {
        for place in PLACES {
            let url = place();
            println!("on {url}"); // shown where a test fails
            let (here, elsewhere) = (connect(&url), connect(&url));
            for (name, capacity) in capacities {
                assert!(here.create(name, *capacity).unwrap());
            }
            test(here, elsewhere);
        }
    });
}

/// Semaphores in a new database, and its URL.
pub fn semaphores(capacities: &[(&str, u32)]) -> (Semaphores, String) {
    let url = database();
    let semaphores = connect(&url);
    for (name, capacity) in capacities {
        assert!(semaphores.create(name, *capacity).unwrap());
    }
    (semaphores, url)
}

/// Runs a test with semaphores in a new database, and its URL.
#[track_caller]
pub fn on_mysql(capacities: &[(&str, u32)], test: impl FnOnce(Semaphores, String)) {
    within(HANG, || {
        let (semaphores, url) = semaphores(capacities);
        test(semaphores, url);
    });
}

pub fn want(external_id: &str, semaphore: &str, count: u32) -> PermitRequest {
    PermitRequest::new(external_id).permits(semaphore, count)
}

#[track_caller]
pub fn acquired(answer: Acquisition) -> Vec<Permit> {
    match answer {
        Acquisition::Acquired(permits) => permits,
        other => panic!("{other:?} is not Acquired"),
    }
}

#[track_caller]
pub fn already_acquired(answer: Acquisition) -> Vec<Permit> {
    match answer {
        Acquisition::AlreadyAcquired { permits, .. } => permits,
        other => panic!("{other:?} is not AlreadyAcquired"),
    }
}

#[track_caller]
pub fn exhausted(answer: Acquisition) -> Exhausted {
    match answer {
        Acquisition::Exhausted(exhausted) => exhausted,
        other => panic!("{other:?} is not Exhausted"),
    }
}

/// For the store's own contract: what a call of the front would send.
pub fn request(external_id: &str, token: u64, permits: &[(&str, u32)]) -> Request {
    Request {
        external_id: Arc::from(external_id),
        owner: None,
        ttl: None,
        permits: permits.iter().map(|(n, c)| (Arc::from(*n), *c)).collect(),
        token,
        take_over: false,
        generated: false,
    }
}

#[track_caller]
pub fn granted(outcome: Outcome) -> Grant {
    match outcome {
        Outcome::Granted(grant) => grant,
        other => panic!("{other:?} is not Granted"),
    }
}

/// Until when a call to a store may take.
pub fn by() -> Moment {
    Moment::now() + Duration::from_secs(30)
}

/// The external ids of what was taken back.
pub fn ids(swept: Vec<Swept>) -> Vec<String> {
    let ids = swept.iter().map(|one| one.external_id.to_string());
    ids.collect()
}

/// One number, as an operator would look it up.
pub fn number(url: &str, sql: &str) -> i64 {
    operator(url).query_first(sql).unwrap().unwrap()
}

/// Locks rows as another program would, until it is dropped.
pub fn locked(url: &str, table: &str, which: &str) -> mysql::Conn {
    let mut conn = operator(url);
    conn.query_drop("BEGIN").unwrap();
    let lock = format!("SELECT * FROM contend_{table} WHERE {which} FOR UPDATE");
    conn.query_drop(lock).unwrap();
    conn
}
