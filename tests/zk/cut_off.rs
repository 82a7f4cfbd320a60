//! A server that is cut off from the others while its clients stay connected: the fault for which belief
//! is not founded on pings. A follower goes on answering them, while the leader expires the sessions; a
//! leader goes on until it notices that it has no quorum.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{LazyLock, Mutex, MutexGuard};
use std::thread::sleep;
use std::time::Duration;

use crate::support::{HANG, PATIENCE, Rivals, Verbs, factory, name, session, soon};
use contend::zk::Mode;
use contend::{Factory, Moment};
use testbed::{ZooKeeperEnsemble, wait_until, within};

const T: Duration = Duration::from_secs(2);

/// One would keep three of four test threads waiting.
static ENSEMBLES: [LazyLock<Mutex<ZooKeeperEnsemble>>; 2] =
    [const { LazyLock::new(|| Mutex::new(ZooKeeperEnsemble::start_proxied())) }; 2];

fn ensemble() -> MutexGuard<'static, ZooKeeperEnsemble> {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let next = NEXT.fetch_add(1, Ordering::Relaxed) % ENSEMBLES.len();
    let ensemble = ENSEMBLES[next]
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner());
    // What a test that failed has left behind.
    for (index, node) in ensemble.nodes().iter().enumerate() {
        ensemble.heal(index);
        if !node.is_running() {
            node.start();
        }
    }
    ensemble.wait_whole();
    ensemble
}

fn only(ensemble: &ZooKeeperEnsemble, index: usize) -> Factory {
    factory(ensemble.node(index).addr(), T)
}

const AT_ONCE: u64 = 8;

/// Opens sessions on one server, cuts it off, and waits until `others` have seen all of them expire. Returns how many
/// could be judged: one that a server told of its end says no more until when it was alive.
///
/// An owner believes until T/6, the transition, before the moment up to which its session calls itself
/// alive.
fn expire(
    ensemble: &ZooKeeperEnsemble,
    server: usize,
    others: &str,
    age: u64,
    fault: impl Fn() + Sync,
) -> usize {
    let node = ensemble.node(server);
    let leads = ensemble.wait_leader() == server;
    // What must be left of the transition when a session expires.
    let cushion = if leads { Duration::ZERO } else { T / 6 };
    let watcher = session(others, Duration::from_secs(30));
    let root = format!("/{}", name("founding"));
    watcher
        .create(&root, b"", Mode::Persistent, soon())
        .unwrap();
    let mut sessions: Vec<_> = (0..AT_ONCE)
        .map(|number| {
            // Spread over a tick: how far the leader's view lags depends on it.
            sleep(Duration::from_millis(age / 8 + 13 * (number % 3)));
            loop {
                let session = session(node.addr(), T);
                let path = format!("{root}/n-");
                match session.create(&path, b"", Mode::EphemeralSequential, soon()) {
                    Ok((path, _)) => break (session, path),
                    // A busy machine let it expire.
                    Err(error) => println!("{error}"),
                }
            }
        })
        .collect();
    // A follower that lags behind would not have all of the nodes yet.
    wait_until(PATIENCE, "the watcher's server has caught up", || {
        watcher.sync(soon()).is_ok()
    });
    ensemble.cut_off(server);
    // From the end of an owner's belief to a moment at which the session was not over yet.
    let mut rests = Vec::new();
    std::thread::scope(|scope| {
        scope.spawn(&fault);
        if leads {
            // Once it has noticed, and closed its clients' connections, it would be elected again, and
            // no server could follow it.
            scope.spawn(|| {
                wait_until(PATIENCE, "the leader has noticed", || {
                    node.mode().as_deref() != Some("leader")
                });
                node.kill();
            });
        }
        let mut seen = Moment::now();
        wait_until(PATIENCE, "all sessions are gone", || {
            let asked = Moment::now();
            // While they elect another leader there is no answer.
            let Ok(names) = watcher.get_children(&root, soon()) else {
                return false;
            };
            // Gone by the answer at the latest, and not before the last question whose answer had it.
            let answered = Moment::now();
            sessions.retain(|(session, path)| {
                if names.iter().any(|name| path.ends_with(name)) {
                    return true;
                }
                let Some(alive_until) = session.alive_until() else {
                    return false;
                };
                let must = alive_until - T / 6 + cushion;
                assert!(
                    must <= answered,
                    "age {age}: gone {:?} too early",
                    must - answered
                );
                rests.push(seen - (alive_until - T / 6));
                false
            });
            seen = asked;
            sessions.is_empty()
        });
    });
    ensemble.heal(server);
    if !node.is_running() {
        node.start();
    }
    ensemble.wait_whole();
    println!("rests of a transition of {:?}: {rests:?}", T / 6);
    rests.len()
}

/// The founding of belief: what a handshake, and a `sync` followed by another, are worth. The leader
/// must not have expired the session before the moment up to which we call it certainly alive. An owner's
/// belief ends a sixth of T before that.
#[test]
fn session_of_a_cut_off_follower_ends_after_belief() {
    within(HANG, || {
        let ensemble = ensemble();
        let mut judged = 0;
        for age in [0, 350] {
            // A busy ensemble may have elected anew.
            ensemble.wait_whole();
            let leader = ensemble.wait_leader();
            let follower = ensemble.followers()[0];
            // The first rival leads, and knows the follower only.
            let factories = [follower, leader].map(|server| only(&ensemble, server));
            let rivals = Rivals::start(&factories, "cut-off");
            let watch_at = ensemble.node(leader).addr().to_string();
            judged += expire(&ensemble, follower, &watch_at, age, || {
                rivals.wait_for_leader(|next| next == 1);
            });
            rivals.judge();
        }
        assert!(judged > 0);
    });
}

/// A leader without its quorum acknowledges every `sync` until it notices. Those who elect another one
/// notice at about the same time, and the new leader counts every session's timeout anew: belief must end
/// before that is over, with whatever is left of the transition.
#[test]
fn session_of_a_leader_without_quorum_ends_after_belief() {
    within(HANG * 2, || {
        // The others may vote for the old leader until it is gone, and wait for it for that long.
        let ensemble = ZooKeeperEnsemble::start_with(true, &["initLimit=5"], &[]);
        let mut judged = 0;
        let leader = ensemble.wait_leader();
        let others = ensemble.followers().into_iter();
        let others: Vec<String> = others
            .map(|index| ensemble.node(index).addr().to_string())
            .collect();
        let others = others.join(",");
        // The first rival leads, and knows the cut-off leader only.
        let factories = [only(&ensemble, leader), factory(&others, T)];
        let rivals = Rivals::start(&factories, "no-quorum");
        judged += expire(&ensemble, leader, &others, 350, || {});
        rivals.wait_for_leader(|_| true);
        rivals.judge();
        assert!(judged > 0);
    });
}

/// A leader without its quorum acknowledges every `sync` for `syncLimit` ticks. Followers that restart meanwhile elect
/// another one long before, which counts every session's timeout anew: only what a quorum has written down counts.
#[test]
fn session_of_a_leader_ends_after_belief_though_its_followers_restart() {
    within(HANG * 2, || {
        let config = ["initLimit=5", "syncLimit=50"];
        let ensemble = ZooKeeperEnsemble::start_with(true, &config, &[]);
        let mut judged = 0;
        for age in [0, 700] {
            let leader = ensemble.wait_leader();
            let followers = ensemble.followers();
            let others = followers.iter().map(|index| ensemble.node(*index).addr());
            let others: Vec<String> = others.map(|addr| addr.to_string()).collect();
            let restart = || {
                followers
                    .iter()
                    .for_each(|index| ensemble.node(*index).kill());
                std::thread::scope(|scope| {
                    for index in &followers {
                        scope.spawn(|| ensemble.node(*index).start());
                    }
                });
            };
            judged += expire(&ensemble, leader, &others.join(","), age, restart);
        }
        assert!(judged > 0);
    });
}
