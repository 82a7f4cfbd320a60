//! Leadership on an ensemble under faults: never two leaders at any instant, by each one's own belief.
//!
//! One ensemble, one fault at a time: each test begins and ends with all three servers in place.

use std::sync::{LazyLock, Mutex, MutexGuard};
use std::time::Duration;

use crate::support::{
    HANG, PATIENCE, Rivals, Verbs, assert_within, factory, session, soon, wait_for,
};
use contend::zk::SessionState;
use contend::{Factory, Moment};
use testbed::{ZooKeeperEnsemble, wait_until, within};

const T: Duration = Duration::from_secs(2);
const TICK: Duration = Duration::from_millis(200);
const ELECTION: Duration = Duration::from_secs(5);

static ENSEMBLE: LazyLock<Mutex<ZooKeeperEnsemble>> =
    LazyLock::new(|| Mutex::new(ZooKeeperEnsemble::start()));

fn ensemble() -> MutexGuard<'static, ZooKeeperEnsemble> {
    let ensemble = ENSEMBLE
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner());
    // What a test that failed has left behind.
    for node in ensemble.nodes() {
        if node.is_running() {
            node.resume();
        } else {
            node.start();
        }
    }
    ensemble.wait_whole();
    ensemble
}

fn all(ensemble: &ZooKeeperEnsemble) -> Factory {
    factory(ensemble.addresses().join(","), T)
}

/// Waits until the rivals are in line again.
fn settle(rivals: &Rivals) {
    wait_until(PATIENCE, "no service is in trouble", || {
        rivals.leader().is_some()
            && rivals
                .services
                .iter()
                .all(|service| service.last_error().is_none())
    });
}

#[test]
fn a_killed_or_paused_member_costs_no_safety_and_no_leadership_for_long() {
    within(HANG, || {
        let ensemble = ensemble();
        let rivals = Rivals::start(&[all(&ensemble), all(&ensemble), all(&ensemble)], "member");
        for leader in [false, true] {
            for pause in [false, true] {
                settle(&rivals);
                let index = if leader {
                    ensemble.wait_leader()
                } else {
                    ensemble.followers()[0]
                };
                let what = if pause { "paused" } else { "killed" };
                let who = if leader { "leader" } else { "follower" };
                if pause {
                    ensemble.node(index).pause();
                } else {
                    ensemble.node(index).kill();
                }
                let began = Moment::now();
                if leader {
                    wait_until(PATIENCE, "the ensemble has elected another leader", || {
                        ensemble.nodes().iter().enumerate().any(|(other, node)| {
                            other != index && node.mode().as_deref() == Some("leader")
                        })
                    });
                }
                let election = Moment::now() - began;
                // Long enough for sessions to be lost, where they are.
                std::thread::sleep(T);
                let (_, took) = rivals.wait_for_leader(|_| true);
                assert_within(
                    &format!("{who} {what} (election {election:?}, then {T:?})"),
                    took,
                    TICK + T / 6 + ELECTION,
                );
                if pause {
                    ensemble.node(index).resume();
                } else {
                    ensemble.node(index).start();
                }
                ensemble.wait_whole();
            }
        }
        settle(&rivals);
        rivals.judge();
    });
}

#[test]
fn a_client_moves_to_another_server_within_its_session() {
    within(HANG, || {
        let ensemble = ensemble();
        let session = session(ensemble.addresses().join(","), Duration::from_secs(30));
        let id = session.id();
        for index in 0..3 {
            ensemble.node(index).kill();
            wait_until(PATIENCE, "calls go through", || {
                session.sync(soon()).is_ok()
            });
            ensemble.node(index).start();
            ensemble.wait_whole();
        }
        wait_for(&session, SessionState::Connected);
        assert_eq!(session.id(), id);
    });
}
