//! Servers come, answer, go and come back.

use std::thread;
use std::time::Duration;

use testbed::{
    MariaDbServer, RedisServer, ZooKeeperEnsemble, ZooKeeperServer, is_alive, rss_kib, threads,
    wait_until, within,
};

const LIMIT: Duration = Duration::from_secs(60);

#[test]
fn redis_is_killed_and_comes_back_on_its_port() {
    within(3 * LIMIT, || {
        let redis = RedisServer::start();
        let port = redis.port();
        assert_eq!(redis.cli(&["SET", "key", "value"]), "OK");
        let pid = redis.pid();
        redis.kill();
        assert!(!redis.is_running() && !is_alive(pid));
        redis.start();
        assert_eq!(redis.port(), port);
        assert_ne!(redis.pid(), pid);
        assert_eq!(redis.cli(&["GET", "key"]), "");
        assert!(threads(redis.pid()) > 0);
        assert!(redis.terminate().success());
        redis.restart();
        assert_eq!(redis.cli(&["PING"]), "PONG");
        assert_eq!(redis.url(), format!("redis://127.0.0.1:{port}"));
    });
}

#[test]
fn paused_redis_does_not_answer_until_it_is_resumed() {
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

#[test]
fn mariadb_is_killed_and_comes_back_with_its_data() {
    within(3 * LIMIT, || {
        let mariadb = MariaDbServer::start();
        let url = mariadb.create_database("first");
        let port = mariadb.port();
        assert_eq!(url, format!("mysql://root@127.0.0.1:{port}/first"));
        mariadb.sql("CREATE TABLE first.t (a INT, b TEXT)");
        mariadb.sql("INSERT INTO first.t VALUES (1, 'x'), (2, 'y')");
        let pid = mariadb.pid();
        assert!(rss_kib(pid) > 10_000);
        mariadb.kill();
        assert!(!is_alive(pid));
        mariadb.start();
        let rows = mariadb.sql("SELECT * FROM first.t ORDER BY a");
        assert_eq!(rows, "1\tx\n2\ty");
        mariadb.pause();
        mariadb.resume();
        assert!(mariadb.terminate().success());
        mariadb.restart();
        assert_eq!(mariadb.sql("SELECT COUNT(*) FROM first.t"), "2");

        let other = MariaDbServer::start_with(&["--innodb-lock-wait-timeout=3"]);
        assert!(!other.sql("SHOW DATABASES").contains("first"));
        assert_eq!(other.sql("SELECT @@innodb_lock_wait_timeout"), "3");
    });
}

#[test]
fn zookeeper_is_killed_and_comes_back_on_its_port() {
    within(3 * LIMIT, || {
        let jvm = ["-Dznode.container.checkIntervalMs=500"];
        let zookeeper = ZooKeeperServer::start_with(&[], &jvm);
        assert_eq!(zookeeper.four_letter("ruok").unwrap(), "imok");
        // Here and below: a slow answer counts as none, so that it is asked again.
        wait_until(LIMIT, "it says what it is", || {
            zookeeper.mode().as_deref() == Some("standalone")
        });
        let settings = zookeeper.four_letter("conf").unwrap();
        assert!(settings.contains("minSessionTimeout=400"));
        let (pid, port) = (zookeeper.pid(), zookeeper.port());
        zookeeper.kill();
        assert!(!is_alive(pid));
        assert!(zookeeper.four_letter("ruok").is_err());
        zookeeper.start();
        assert_eq!(zookeeper.port(), port);
        assert_eq!(zookeeper.four_letter("ruok").unwrap(), "imok");
        zookeeper.pause();
        assert_eq!(zookeeper.mode(), None);
        zookeeper.resume();
        let answers = || zookeeper.mode().is_some();
        wait_until(LIMIT, "it answers again", answers);
    });
}

#[test]
fn follower_that_is_cut_off_serves_for_a_while() {
    within(5 * LIMIT, || {
        let ensemble = ZooKeeperEnsemble::start_proxied();
        let leader = ensemble.wait_leader();
        let mut follower = None;
        wait_until(LIMIT, "one follows", || {
            follower = ensemble.followers().first().copied();
            follower.is_some()
        });
        let follower = follower.expect("just seen");
        let link = ensemble.link(follower, leader);
        assert_eq!(link.live(), 1, "it is through the proxy that it follows");
        ensemble.cut_off(follower);
        let (pid, before) = (ensemble.node(follower).pid(), link.bytes_to_server());
        // It gives up after 5 s.
        thread::sleep(Duration::from_secs(1));
        wait_until(Duration::from_secs(3), "the follower still serves", || {
            ensemble.followers().contains(&follower)
        });
        assert_eq!(link.bytes_to_server(), before);
        let gave_up = || ensemble.node(follower).mode().is_none();
        wait_until(LIMIT, "the follower gave up", gave_up);
        let leads_on = || ensemble.leader() == Some(leader);
        wait_until(LIMIT, "the leader leads on", leads_on);
        assert_eq!(ensemble.node(follower).pid(), pid, "it never died");
        ensemble.heal(follower);
        ensemble.wait_whole();
        assert!(ensemble.leader() != Some(follower));
    });
}
