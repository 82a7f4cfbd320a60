//! A follower that is cut off from its leader while its clients stay connected: the fault for which
//! belief is not founded on pings. The follower goes on answering them, while the leader expires the
//! sessions.
//!
//! `CONTEND_EXPIRIES` says how many sessions are let expire (24 by default).

use std::sync::{LazyLock, Mutex, MutexGuard};
use std::thread::sleep;
use std::time::Duration;

use crate::zk_support::{HANG, PATIENCE, Rivals, factory, name, number, session, soon};
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
            sleep(Duration::from_millis(age));
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
/// must not have expired the session before the moment up to which we call it certainly alive. An owner's
/// belief ends a sixth of T before that.
#[test]
fn no_session_of_a_cut_off_follower_ends_before_it_is_said_to() {
    const AT_ONCE: u64 = 8;
    let expiries = number("CONTEND_EXPIRIES", 24);
    let rounds = expiries.div_ceil(AT_ONCE);
    within(
        HANG + Duration::from_secs(15) * u32::try_from(rounds).unwrap(),
        || {
            let ensemble = ensemble();
            let mut rests = Vec::new();
            for round in 0..rounds {
                let age = [0, 350, 1_200][usize::try_from(round % 3).unwrap()];
                let leader = ensemble.wait_leader();
                let follower = ensemble.followers()[0];
                let watcher = session(ensemble.node(leader).addr(), Duration::from_secs(30));
                let root = format!("/{}", name("founding"));
                watcher
                    .create(&root, b"", Mode::Persistent, soon())
                    .unwrap();
                let mut sessions: Vec<_> = (0..AT_ONCE)
                    .map(|number| {
                        // Spread over a tick: how far the leader's view lags depends on it.
                        sleep(Duration::from_millis(age / 8 + 13 * (number % 3)));
                        loop {
                            let session = session(ensemble.node(follower).addr(), T);
                            let node = format!("{root}/n-");
                            match session.create(&node, b"", Mode::EphemeralSequential, soon()) {
                                Ok((path, _)) => break (session, path),
                                // A busy machine let it expire.
                                Err(error) => println!("{error}"),
                            }
                        }
                    })
                    .collect();
                ensemble.cut_off(follower);
                wait_until(PATIENCE, "all sessions are gone", || {
                    let names = watcher.get_children(&root, soon()).unwrap();
                    sessions.retain(|(session, path)| {
                        if names.iter().any(|name| path.ends_with(name)) {
                            return true;
                        }
                        // Gone by the answer at the latest: the answer must not come in its lifetime.
                        let now = Moment::now();
                        // Without one, a server has told it: it says no more that it is alive.
                        let certain = session.alive_until().unwrap_or(now);
                        assert!(
                            certain <= now,
                            "age {age}: gone {:?} before the end",
                            certain - now
                        );
                        rests.push(now - certain + T / 6);
                        false
                    });
                    sessions.is_empty()
                });
                ensemble.heal(follower);
                ensemble.wait_whole();
            }
            println!(
                "T = {T:?}, follower cut off from its leader: 0 of {} sessions expired before belief ended; the \
                 smallest rest of the transition of {:?} was {:?}",
                rests.len(),
                T / 6,
                rests.iter().min().unwrap().min(&(T / 6)),
            );
        },
    );
}

/// Followers are cut off and come back by dice, each with a client that knows nobody else.
/// `CONTEND_SEED` repeats a run, `CONTEND_STORM_SECONDS` makes it longer.
#[test]
fn followers_that_come_and_go_make_no_two_leaders() {
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
            sleep(Duration::from_millis(dice.random_range(100..3_000)));
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
