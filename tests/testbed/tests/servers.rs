//! Servers come, answer, go and come back.

use std::thread;
use std::time::Duration;

use testbed::{
    MariaDbServer, RedisServer, Server, ZooKeeperServer, is_alive, rss_kib, threads, wait_until,
    within,
};

const LIMIT: Duration = Duration::from_secs(60);

/// Killed, shut down and restarted: `keeps` asserts that its data is there.
fn comes_back_on_its_port(server: &Server, keeps: impl Fn()) {
    keeps();
    let (pid, port) = (server.pid(), server.port());
    assert!(rss_kib(pid) > 1_000 && threads(pid) > 0);
    server.kill();
    assert!(!server.is_running() && !is_alive(pid));
    server.start();
    assert_eq!(server.port(), port);
    assert_ne!(server.pid(), pid);
    keeps();
    server.pause();
    server.resume();
    server.terminate();
    assert!(!server.is_running());
    server.restart();
    keeps();
}

#[test]
fn redis_comes_back() {
    within(3 * LIMIT, || {
        let redis = RedisServer::start_with(&["--appendonly", "yes", "--appendfsync", "always"]);
        assert_eq!(redis.cli(&["SET", "key", "value"]), "OK");
        comes_back_on_its_port(&redis, || assert_eq!(redis.cli(&["GET", "key"]), "value"));
    });
}

#[test]
fn mariadb_comes_back() {
    within(3 * LIMIT, || {
        let mariadb = MariaDbServer::start_with(&["--innodb-lock-wait-timeout=3"]);
        mariadb.create_database("first");
        mariadb.sql("CREATE TABLE first.t (a INT, b TEXT)");
        mariadb.sql("INSERT INTO first.t VALUES (1, 'x'), (2, 'y')");
        comes_back_on_its_port(&mariadb, || {
            let rows = mariadb.sql("SELECT * FROM first.t ORDER BY a");
            assert_eq!(rows, "1\tx\n2\ty");
            assert_eq!(mariadb.sql("SELECT @@innodb_lock_wait_timeout"), "3");
        });
    });
}

#[test]
fn zookeeper_comes_back() {
    within(3 * LIMIT, || {
        let zookeeper = ZooKeeperServer::start();
        comes_back_on_its_port(&zookeeper, || {
            // A slow answer counts as none, so that it is asked again.
            wait_until(LIMIT, "it says what it is", || {
                zookeeper.mode().as_deref() == Some("standalone")
            });
            let settings = zookeeper.four_letter("conf").unwrap();
            assert!(settings.contains("minSessionTimeout=400"));
        });
    });
}

#[test]
fn paused_redis_does_not_answer() {
    within(3 * LIMIT, || {
        let redis = RedisServer::start();
        redis.pause();
        thread::scope(|scope| {
            let asked = scope.spawn(|| redis.cli(&["PING"]));
            // Far longer than an answer takes.
            thread::sleep(Duration::from_millis(200));
            assert!(!asked.is_finished(), "it waits");
            assert_eq!(redis.role(Duration::from_millis(20)), None);
            redis.resume();
            assert_eq!(asked.join().unwrap(), "PONG");
        });
        wait_until(LIMIT, "it says what it is", || {
            redis.role(Duration::from_secs(1)).as_deref() == Some("master")
        });
    });
}
