//! A follower that is cut off from its leader while its clients stay connected: the fault for which
//! belief is not founded on pings. The follower goes on answering them, while the leader expires the
//! sessions.

use std::sync::{LazyLock, Mutex, MutexGuard};
use std::time::Duration;

use crate::zk_support::{HANG, PATIENCE, Rivals, factory, name, session, soon};
use contend::zk::Mode;
use contend::{Factory, Moment};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use testbed::{ZooKeeperEnsemble, wait_until, within};

const T: Duration = Duration::from_secs(2);
const TICK: Duration = Duration::from_millis(200);
/// For a machine that has other things to do.
const SLACK: Duration = Duration::from_secs(15);

static ENSEMBLE: LazyLock<Mutex<ZooKeeperEnsemble>> =
    LazyLock::new(|| Mutex::new(ZooKeeperEnsemble::start_proxied()));

fn ensemble() -> MutexGuard<'static, ZooKeeperEnsemble> {
    let ensemble = ENSEMBLE
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner());
    // What a test that failed has left behind.
    (0..3).for_each(|index| ensemble.heal(index));
    ensemble.wait_whole();
    ensemble
}

fn only(ensemble: &ZooKeeperEnsemble, index: usize) -> Factory {
    factory(ensemble.node(index).addr(), T)
}

#[track_caller]
fn assert_within(what: &str, took: Duration, bound: Duration) {
    println!("{what}: {took:?} (bound {bound:?})");
    assert!(took < bound + SLACK, "{what}: {took:?}, bound {bound:?}");
}

#[test]
fn a_client_of_a_follower_that_is_cut_off_steps_down_before_another_leads() {
    within(HANG, || {
        let ensemble = ensemble();
        for age in [0, 100, 700, 2_500] {
            let leader = ensemble.wait_leader();
            let follower = ensemble.followers()[0];
            // The first rival leads, and knows the follower only.
            let rivals = Rivals::start(
                &[only(&ensemble, follower), only(&ensemble, leader)],
                "cut-off",
            );
            wait_until(PATIENCE, "the first leads", || {
                match rivals.leader() {
                    // A busy machine took it away.
                    Some(1) => {
                        rivals.services[1].stop().unwrap();
                        rivals.services[1].start().unwrap();
                        false
                    }
                    leader => leader == Some(0),
                }
            });
            std::thread::sleep(Duration::from_millis(age));
            ensemble.cut_off(follower);
            let (next, took) = rivals.wait_for_leader(|next| next == 1);
            assert_within(&format!("replaced at age {age} ms"), took, T + TICK);
            assert_eq!(next, 1);
            ensemble.heal(follower);
            ensemble.wait_whole();
            rivals.judge();
        }
    });
}

/// The founding of belief: what a handshake, and a `sync` followed by another, are worth. The leader
/// must not have expired the session before the moment up to which we call it certainly alive.
#[test]
fn no_session_of_a_cut_off_follower_ends_before_it_is_said_to() {
    within(HANG, || {
        let ensemble = ensemble();
        for age in [0, 350, 1_200] {
            let leader = ensemble.wait_leader();
            let follower = ensemble.followers()[0];
            let watcher = session(ensemble.node(leader).addr(), Duration::from_secs(30));
            let root = format!("/{}", name("founding"));
            watcher
                .create(&root, b"", Mode::Persistent, soon())
                .unwrap();
            let sessions: Vec<_> = (0..8)
                .map(|number| {
                    let session = session(ensemble.node(follower).addr(), T);
                    let (path, _) = session
                        .create(
                            &format!("{root}/n-"),
                            b"",
                            Mode::EphemeralSequential,
                            soon(),
                        )
                        .unwrap();
                    // Spread over a tick: how far the leader's view lags depends on it.
                    std::thread::sleep(Duration::from_millis(age / 8 + 13 * (number % 3)));
                    (session, path, None::<Duration>)
                })
                .collect();
            ensemble.cut_off(follower);
            let mut sessions = sessions;
            wait_until(PATIENCE, "all sessions are gone", || {
                let asked = Moment::now();
                let names = watcher.get_children(&root, soon()).unwrap();
                for (session, path, gone) in &mut sessions {
                    if gone.is_none() && !names.iter().any(|name| path.ends_with(name)) {
                        // Gone by the answer at the latest: the answer must not come in its lifetime.
                        let now = Moment::now();
                        // Without one, a server has told it: it says no more that it is alive.
                        let certain = session.alive_until().unwrap_or(now);
                        assert!(
                            certain <= now,
                            "age {age}: gone {:?} before the end, asked {asked:?}",
                            certain - now
                        );
                        *gone = Some(now - certain);
                    }
                }
                sessions.iter().all(|(_, _, gone)| gone.is_some())
            });
            let early: Vec<_> = sessions.iter().filter_map(|(_, _, gone)| *gone).collect();
            println!("age {age} ms: gone {early:?} after the certain end");
            ensemble.heal(follower);
            ensemble.wait_whole();
        }
    });
}

/// Followers are cut off and come back by dice, each with a client that knows nobody else.
/// `CONTEND_SEED` repeats a run, `CONTEND_STORM_SECONDS` makes it longer.
#[test]
fn followers_that_come_and_go_make_no_two_leaders() {
    let number = |name: &str, default: u64| {
        std::env::var(name).map_or(default, |text| text.parse().expect("a number"))
    };
    let seed = number("CONTEND_SEED", rand::random());
    let span = Duration::from_secs(number("CONTEND_STORM_SECONDS", 8));
    println!("CONTEND_SEED={seed}");
    within(HANG + span, || {
        let mut dice = StdRng::seed_from_u64(seed);
        let ensemble = ensemble();
        let followers = ensemble.followers();
        let factories = [0, 1, 2].map(|index| only(&ensemble, index));
        let rivals = Rivals::start(&factories, "come-and-go");
        let (over, mut cut, mut turns) = (Moment::now() + span, None, Vec::new());
        while !over.remaining().is_zero() {
            // Never both at once: that is an ensemble without a quorum.
            if let Some(follower) = cut.take() {
                ensemble.heal(follower);
            } else {
                let follower = followers[dice.random_range(0..followers.len())];
                ensemble.cut_off(follower);
                cut = Some(follower);
            }
            std::thread::sleep(Duration::from_millis(dice.random_range(100..3_000)));
            if let Some(leader) = rivals.leader()
                && turns.last() != Some(&leader)
            {
                turns.push(leader);
                if !followers.contains(&leader) {
                    // Its server is never cut off: back to the end of the line.
                    rivals.services[leader].stop().unwrap();
                    rivals.services[leader].start().unwrap();
                }
            }
        }
        (0..3).for_each(|index| ensemble.heal(index));
        let (leader, took) = rivals.wait_for_leader(|_| true);
        println!("turns {turns:?}; {leader} leads {took:?} after the storm");
        rivals.judge();
    });
}
