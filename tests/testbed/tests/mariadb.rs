//! MariaDB comes, answers, goes and comes back.

use std::time::Duration;

use testbed::{MariaDbServer, Watchdog, is_alive, rss_kib};

const LIMIT: Duration = Duration::from_secs(60);

#[test]
fn a_mariadb_is_killed_and_comes_back_with_its_data() {
    let _watchdog = Watchdog::start(3 * LIMIT);
    let mariadb = MariaDbServer::start();
    let url = mariadb.create_database("first");
    assert_eq!(
        url,
        format!("mysql://root@127.0.0.1:{}/first", mariadb.port())
    );
    mariadb
        .sql("CREATE TABLE first.t (a INT, b TEXT); INSERT INTO first.t VALUES (1, 'x'), (2, 'y')");
    let pid = mariadb.pid();
    assert!(rss_kib(pid) > 10_000);
    mariadb.kill();
    assert!(!is_alive(pid));
    mariadb.start();
    assert_eq!(
        mariadb.sql("SELECT * FROM first.t ORDER BY a"),
        "1\tx\n2\ty"
    );
    mariadb.pause();
    mariadb.resume();
    assert!(mariadb.terminate().success());
    mariadb.restart();
    assert_eq!(mariadb.sql("SELECT COUNT(*) FROM first.t"), "2");
}

#[test]
fn two_at_once_are_two() {
    let _watchdog = Watchdog::start(3 * LIMIT);
    let one = MariaDbServer::start();
    let two = MariaDbServer::start_with(&["--innodb-lock-wait-timeout=3"]);
    one.create_database("only_here");
    assert!(!two.sql("SHOW DATABASES").contains("only_here"));
    assert_eq!(two.sql("SELECT @@innodb_lock_wait_timeout"), "3");
}

#[test]
#[should_panic(expected = "You have an error in your SQL syntax")]
fn an_sql_error_is_shown() {
    MariaDbServer::start().sql("SELEKT 1");
}
