//! ZooKeeper comes, answers, goes and comes back.

use std::time::Duration;

use testbed::{Watchdog, ZooKeeperEnsemble, ZooKeeperServer, is_alive, wait_until};

const LIMIT: Duration = Duration::from_secs(60);

#[test]
fn a_zookeeper_is_killed_and_comes_back_on_its_port() {
    let _watchdog = Watchdog::start(3 * LIMIT);
    let zookeeper = ZooKeeperServer::start_with(&[], &["-Dznode.container.checkIntervalMs=500"]);
    assert_eq!(zookeeper.four_letter("ruok").unwrap(), "imok");
    // Here and below: a slow answer counts as none, so that it is asked again.
    wait_until(LIMIT, "it says what it is", || {
        zookeeper.mode().as_deref() == Some("standalone")
    });
    assert!(
        zookeeper
            .four_letter("conf")
            .unwrap()
            .contains("minSessionTimeout=400")
    );
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
    wait_until(LIMIT, "it answers again", || zookeeper.mode().is_some());
}

#[test]
fn an_ensemble_elects_another_leader_and_takes_the_old_one_back() {
    let _watchdog = Watchdog::start(5 * LIMIT);
    let ensemble = ZooKeeperEnsemble::start();
    let old = ensemble.wait_leader();
    wait_until(LIMIT, "two follow", || ensemble.followers().len() == 2);
    ensemble.node(old).kill();
    wait_until(LIMIT, "there is another leader", || {
        ensemble.leader().is_some_and(|leader| leader != old)
    });
    ensemble.node(old).start();
    ensemble.wait_whole();
    wait_until(LIMIT, "the old leader follows", || {
        ensemble.followers().contains(&old)
    });
}

#[test]
fn a_follower_is_cut_off_from_its_leader_and_gives_up_only_later() {
    let _watchdog = Watchdog::start(5 * LIMIT);
    let ensemble = ZooKeeperEnsemble::start_proxied();
    let leader = ensemble.wait_leader();
    let mut follower = None;
    wait_until(LIMIT, "somebody follows", || {
        follower = ensemble.followers().first().copied();
        follower.is_some()
    });
    let follower = follower.expect("just seen");
    let link = ensemble.link(follower, leader);
    assert_eq!(link.live(), 1, "it is through the proxy that it follows");
    ensemble.cut_off(follower);
    let (pid, before) = (ensemble.node(follower).pid(), link.bytes_to_server());
    std::thread::sleep(Duration::from_secs(1));
    wait_until(Duration::from_secs(3), "the follower still serves", || {
        ensemble.followers().contains(&follower)
    });
    assert_eq!(link.bytes_to_server(), before);
    wait_until(LIMIT, "the follower gave up", || {
        ensemble.node(follower).mode().is_none()
    });
    wait_until(LIMIT, "the leader leads on", || {
        ensemble.leader() == Some(leader)
    });
    assert_eq!(ensemble.node(follower).pid(), pid, "it never died");
    ensemble.heal(follower);
    ensemble.wait_whole();
    assert!(ensemble.leader() != Some(follower));
}
