//! The server that the tests of one binary share: a throw-away MariaDB, or MySQL proper with
//! `CONTEND_TEST_MYSQLD=/path/of/mysqld`.

#![allow(dead_code)]

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use contend::Lease;
use mysql::prelude::Queryable;
use mysql::{Conn, Opts};
use testbed::MariaDbServer;

/// When a hung test is ended.
pub const HANG: Duration = Duration::from_secs(120);

/// The shared server's URL without a database.
pub fn server() -> &'static str {
    static SERVER: OnceLock<(MariaDbServer, String)> = OnceLock::new();
    let (_, url) = SERVER.get_or_init(|| {
        let server = start();
        let url = server.url("").trim_end_matches('/').to_owned();
        (server, url)
    });
    url
}

/// A throw-away server that keeps what it committed when it is killed, but not over a power failure:
/// a busy disk would otherwise decide how long a statement takes.
pub fn start() -> MariaDbServer {
    MariaDbServer::start_with(&["--innodb-flush-log-at-trx-commit=2"])
}

/// A plain connection, for what an operator or a peer would do.
pub fn operator(url: &str) -> Conn {
    Conn::new(Opts::from_url(&format!("{url}?prefer_socket=false")).unwrap()).unwrap()
}

/// A counter of the whole server. Only `SHOW` finds it on both: MariaDB has its table in
/// `information_schema`, MySQL in `performance_schema`. No `Com_select` is counted for it.
pub fn status(conn: &mut Conn, name: &str) -> u64 {
    let row: Option<(String, u64)> = conn
        .query_first(format!("SHOW GLOBAL STATUS LIKE '{name}'"))
        .unwrap();
    row.unwrap_or_else(|| panic!("the server counts no {name}"))
        .1
}

/// How many connections of this database wait for a name.
pub fn waiting(conn: &mut Conn, url: &str) -> usize {
    let database = url.rsplit('/').next().unwrap();
    let count: Option<usize> = conn
        .exec_first(
            "SELECT COUNT(*) FROM information_schema.processlist WHERE db = ? AND state = 'User lock'",
            (database,),
        )
        .unwrap();
    count.unwrap()
}

/// A new database with our table in it; its URL.
pub fn database() -> String {
    let url = empty_database();
    operator(&url).query_drop(contend::mysql::INIT_SQL).unwrap();
    url
}

/// A new database; its URL.
pub fn empty_database() -> String {
    static COUNTER: AtomicU32 = AtomicU32::new(0);
    let number = COUNTER.fetch_add(1, Ordering::Relaxed);
    let name = format!("contend_{}_{number}", std::process::id());
    let mut conn = operator(server());
    conn.query_drop(format!("DROP DATABASE IF EXISTS {name}"))
        .unwrap();
    conn.query_drop(format!("CREATE DATABASE {name}")).unwrap();
    format!("{}/{name}", server())
}

pub fn lease(ttl_ms: u64, transition_ms: u64) -> Lease {
    Lease::new(
        Duration::from_millis(ttl_ms),
        Duration::from_millis(transition_ms),
    )
    .unwrap()
}

pub const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}
