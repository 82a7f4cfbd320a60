//! The server that the tests of one binary share: a throw-away MariaDB, or MySQL proper with
//! `CONTEND_TEST_MYSQLD=/path/of/mysqld`.

#![allow(dead_code)]

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use contend::backend::{Contender, Purpose, RawContender};
use contend::{Factory, Parker};
use mysql::prelude::Queryable;
use mysql::{Conn, Opts};
use testbed::{MariaDbServer, Proxy};

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

/// The table as Simba's script makes it.
pub const SEEDS_TABLE: &str = "CREATE TABLE simba_mutex (
    mutex         VARCHAR(66)     NOT NULL PRIMARY KEY COMMENT 'mutex name',
    acquired_at   BIGINT UNSIGNED NOT NULL,
    ttl_at        BIGINT UNSIGNED NOT NULL,
    transition_at BIGINT UNSIGNED NOT NULL,
    owner_id      CHAR(32)        NOT NULL,
    version       INT UNSIGNED    NOT NULL
)";

/// A server of its own with our table, and the URL of its database `app`.
pub fn own_server(args: &[&str]) -> (MariaDbServer, String) {
    let server = if args.is_empty() {
        start()
    } else {
        MariaDbServer::start_with(args)
    };
    let url = server.create_database("app");
    operator(&url).query_drop(contend::mysql::INIT_SQL).unwrap();
    (server, url)
}

/// Users `one` and `two` of a server of its own, with the password `pw`.
pub fn create_users(url: &str) {
    let mut root = operator(url);
    for user in ["one", "two"] {
        root.query_drop(format!("CREATE USER {user} IDENTIFIED BY 'pw'"))
            .unwrap();
        root.query_drop(format!("GRANT ALL ON app.* TO {user}"))
            .unwrap();
    }
}

/// The URL of the same database through a proxy.
pub fn through(proxy: &Proxy, url: &str) -> String {
    let (scheme, rest) = url.split_once('@').unwrap();
    let (_, database) = rest.split_once('/').unwrap();
    format!("{scheme}@{}/{database}", proxy.addr())
}

pub fn contender(factory: &Factory, mutex: &str, id: &str) -> Box<dyn RawContender> {
    let place = Contender {
        mutex: mutex.into(),
        id: id.into(),
        lease: factory.lease(),
        purpose: Purpose::Lock,
    };
    factory
        .backend()
        .unwrap()
        .contender(&place, &Parker::new().unparker())
        .unwrap()
}

pub const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}
