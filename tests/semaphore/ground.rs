//! Semaphores on the server that the tests of one file share.

#![allow(dead_code)]

use std::net::SocketAddr;
use std::sync::Once;
use std::time::Duration;

use contend::semaphore::{Acquisition, Exhausted, Permit, PermitRequest, Semaphores};
use mysql::prelude::Queryable;
use parking_lot::Mutex;

use crate::mysql_ground::{empty_database, operator};

/// The shortest ttl that can be renewed with the default read timeout.
pub const SHORT: Duration = Duration::from_secs(3);

/// A new database with the tables in it; its URL.
pub fn database() -> String {
    static START: Once = Once::new();
    START.call_once(|| {
        log::set_logger(&Logger).unwrap();
        log::set_max_level(log::LevelFilter::Info);
    });
    let url = empty_database();
    let semaphores = connect(&url);
    // A busy disk makes tables slowly.
    testbed::wait_until(Duration::from_secs(60), "there are tables", || {
        semaphores.create_tables().is_ok()
    });
    url
}

/// A factory of its own, as another process has.
pub fn connect(url: &str) -> Semaphores {
    let semaphores = contend::connect(url).unwrap().semaphores().unwrap();
    semaphores.with_ttl(Duration::from_secs(7)).unwrap()
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

/// One number, as an operator would look it up.
pub fn number(url: &str, sql: &str) -> i64 {
    operator(url).query_first(sql).unwrap().unwrap()
}

/// The same URL through another address, such as a proxy's.
pub fn through(url: &str, addr: SocketAddr) -> String {
    let (head, rest) = url.split_once("://").unwrap();
    let (authority, path) = rest.split_once('/').unwrap();
    match authority.rsplit_once('@') {
        Some((user, _)) => format!("{head}://{user}@{addr}/{path}"),
        None => format!("{head}://{addr}/{path}"),
    }
}

/// Where the server of a URL is.
pub fn addr_of(url: &str) -> SocketAddr {
    let rest = url.split_once("://").unwrap().1;
    let authority = rest.split('/').next().unwrap();
    authority.rsplit('@').next().unwrap().parse().unwrap()
}

/// The same semaphores as two processes would see them, on memory and on MySQL.
pub fn pair(name: &str, capacities: &[(&str, u32)]) -> [(Semaphores, Semaphores); 2] {
    let memory = || contend::memory::factory(name, contend::Lease::default());
    let memory = [memory(), memory()].map(|factory| factory.semaphores().unwrap());
    for (name, capacity) in capacities {
        assert!(memory[0].create(name, *capacity).unwrap());
    }
    let (mysql, url) = semaphores(capacities);
    let [here, elsewhere] = memory;
    [(here, elsewhere), (mysql, connect(&url))]
}

/// What this process logged, with its target: from info on, since its first database.
static LOGGED: Mutex<Vec<(String, String)>> = Mutex::new(Vec::new());

struct Logger;

impl log::Log for Logger {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        metadata.target().starts_with("contend")
    }

    fn log(&self, record: &log::Record<'_>) {
        if self.enabled(record.metadata()) {
            let line = (record.target().to_owned(), record.args().to_string());
            LOGGED.lock().push(line);
        }
    }

    fn flush(&self) {}
}

/// The lines that contain `what`, with their targets.
pub fn logged(what: &str) -> Vec<(String, String)> {
    let logged = LOGGED.lock();
    let lines = logged.iter().filter(|(_, line)| line.contains(what));
    lines.cloned().collect()
}

/// Waits for a line with `what` in it, of this target or one below.
pub fn wait_for_log(target: &str, what: &str) {
    testbed::wait_until(Duration::from_secs(60), what, || {
        logged(what).iter().any(|(of, _)| of.starts_with(target))
    });
}
