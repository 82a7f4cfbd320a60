//! Redis comes, answers, goes and comes back.

use std::time::Duration;

use testbed::{RedisCluster, RedisSentinel, RedisServer, Watchdog, is_alive, threads, wait_until};

const LIMIT: Duration = Duration::from_secs(60);

#[test]
fn a_redis_is_killed_and_comes_back_on_its_port() {
    let _watchdog = Watchdog::start(3 * LIMIT);
    let redis = RedisServer::start();
    let port = redis.port();
    assert_eq!(redis.cli(&["SET", "key", "value"]), "OK");
    let pid = redis.pid();
    redis.kill();
    assert!(!redis.is_running());
    assert!(!is_alive(pid));
    redis.start();
    assert_eq!(redis.port(), port);
    assert_ne!(redis.pid(), pid);
    assert_eq!(redis.cli(&["GET", "key"]), "");
    assert!(threads(redis.pid()) > 0);
    assert!(redis.terminate().success());
    redis.restart();
    assert_eq!(redis.cli(&["PING"]), "PONG");
    assert_eq!(redis.url(), format!("redis://127.0.0.1:{port}"));
}

#[test]
fn a_paused_redis_does_not_answer_until_it_is_resumed() {
    let _watchdog = Watchdog::start(3 * LIMIT);
    let redis = RedisServer::start();
    redis.pause();
    let mut asked = std::process::Command::new("redis-cli")
        .args(["-p", &redis.port().to_string(), "PING"])
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    std::thread::sleep(Duration::from_millis(100));
    assert!(asked.try_wait().unwrap().is_none(), "it waits");
    assert_eq!(redis.role(Duration::from_millis(20)), None);
    redis.resume();
    assert!(asked.wait().unwrap().success());
    wait_until(LIMIT, "it says what it is", || {
        redis.role(Duration::from_secs(1)).as_deref() == Some("master")
    });
}

#[test]
fn a_redis_takes_further_arguments() {
    let _watchdog = Watchdog::start(3 * LIMIT);
    let args = [
        "--requirepass",
        "secret",
        "--maxmemory-policy",
        "allkeys-lru",
        "--user",
        "app",
        "on",
        ">word",
        "~simba:*",
        "&*",
        "+@all",
        "-publish",
    ];
    let redis = RedisServer::start_with(&args);
    assert!(redis.cli(&["GET", "key"]).starts_with("NOAUTH"));
    let policy = redis.cli(&["-a", "secret", "CONFIG", "GET", "maxmemory-policy"]);
    assert_eq!(policy, "maxmemory-policy\nallkeys-lru");
    let denied = redis.cli(&["--user", "app", "--pass", "word", "PUBLISH", "c", "m"]);
    assert!(denied.starts_with("NOPERM"), "{denied}");
}

#[test]
fn servers_side_by_side_do_not_meet() {
    let _watchdog = Watchdog::start(3 * LIMIT);
    let servers: Vec<RedisServer> = (0..5).map(|_| RedisServer::start()).collect();
    for (index, server) in servers.iter().enumerate() {
        server.cli(&["SET", "me", &index.to_string()]);
    }
    for (index, server) in servers.iter().enumerate() {
        assert_eq!(server.cli(&["GET", "me"]), index.to_string());
    }
}

#[test]
fn a_cluster_survives_the_death_of_a_master() {
    let _watchdog = Watchdog::start(5 * LIMIT);
    let cluster = RedisCluster::start();
    assert_eq!(cluster.addresses().len(), 6);
    assert_eq!(cluster.masters().len(), 3);
    assert_eq!(cluster.replicas().len(), 3);
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
}

#[test]
fn sentinels_name_another_master_when_the_first_is_killed_or_told_to_go() {
    let _watchdog = Watchdog::start(5 * LIMIT);
    let redis = RedisSentinel::start();
    let first = redis.master();
    assert_eq!(redis.server(first).cli(&["SET", "key", "value"]), "OK");
    redis.server(first).kill();
    wait_until(LIMIT, "another server is the master", || {
        redis.master() != first
    });
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
}
