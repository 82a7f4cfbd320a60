//! Servers come, answer, go and come back.

use std::thread;
use std::time::Duration;

use testbed::{
    MariaDbServer, RedisCluster, RedisSentinel, RedisServer, ZooKeeperEnsemble, ZooKeeperServer,
    is_alive, rss_kib, threads, wait_until, within,
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
fn redis_servers_do_not_meet_and_take_arguments() {
    within(3 * LIMIT, || {
        let args = ["--requirepass", "secret"];
        let user = [
            "--user", "app", "on", ">word", "~simba:*", "&*", "+@all", "-publish",
        ];
        let private = RedisServer::start_with(&[&args[..], &user].concat());
        let other = RedisServer::start();
        assert!(private.cli(&["GET", "key"]).starts_with("NOAUTH"));
        assert_eq!(private.cli(&["-a", "secret", "SET", "me", "1"]), "OK");
        assert_eq!(other.cli(&["GET", "me"]), "");
        let denied = private.cli(&["--user", "app", "--pass", "word", "PUBLISH", "c", "m"]);
        assert!(denied.starts_with("NOPERM"), "{denied}");
    });
}

#[test]
fn cluster_survives_the_death_of_a_master() {
    within(5 * LIMIT, || {
        let cluster = RedisCluster::start();
        assert_eq!((cluster.masters().len(), cluster.replicas().len()), (3, 3));
        assert_eq!(cluster.node(0).cli(&["-c", "SET", "{mutex}", "1"]), "OK");

        let victim = cluster.master_of("{mutex}", 0);
        assert!(cluster.masters().contains(&victim));
        let witness = (victim + 1) % 6;
        cluster.kill(victim);
        wait_until(LIMIT, "another master has the key", || {
            cluster.master_of("{mutex}", witness) != victim
        });
        cluster.wait_ok();
        assert_eq!(cluster.node(witness).cli(&["-c", "GET", "{mutex}"]), "1");

        cluster.node(victim).start();
        cluster.wait_whole();
        assert!(cluster.replicas().contains(&victim));
    });
}

#[test]
fn sentinels_name_another_master_when_the_first_dies_or_is_told_to_go() {
    within(5 * LIMIT, || {
        let redis = RedisSentinel::start();
        let first = redis.master();
        assert_eq!(redis.server(first).cli(&["SET", "key", "value"]), "OK");
        redis.server(first).kill();
        let is_replaced = || redis.master() != first;
        wait_until(LIMIT, "another server is the master", is_replaced);
        redis.server(first).start();
        redis.wait_whole();
        let second = redis.master();
        wait_until(LIMIT, "the sentinels agree, and so do the servers", || {
            redis.agreed_master().is_some_and(|master| {
                (0..3).all(|server| {
                    let role = if server == master { "master" } else { "slave" };
                    redis.server(server).role(Duration::from_secs(1)).as_deref() == Some(role)
                })
            })
        });
        assert_eq!(redis.server(second).cli(&["GET", "key"]), "value");
        redis.fail_over();
        redis.wait_whole();
        assert_ne!(redis.master(), second);
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
#[should_panic(expected = "You have an error in your SQL syntax")]
fn sql_error_is_shown() {
    MariaDbServer::start().sql("SELEKT 1");
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
fn ensemble_elects_another_leader_and_takes_the_old_one_back() {
    within(5 * LIMIT, || {
        let ensemble = ZooKeeperEnsemble::start();
        let old = ensemble.wait_leader();
        wait_until(LIMIT, "two follow", || ensemble.followers().len() == 2);
        ensemble.node(old).kill();
        wait_until(LIMIT, "there is another leader", || {
            ensemble.leader().is_some_and(|leader| leader != old)
        });
        ensemble.node(old).start();
        ensemble.wait_whole();
        let follows = || ensemble.followers().contains(&old);
        wait_until(LIMIT, "the old leader follows", follows);
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
