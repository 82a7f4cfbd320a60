//! Plays schedules on all cores.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use crate::monitor::Violation;
use crate::plant::Plant;
use crate::stage::{Pool, Stage};
use crate::tally::Tally;
use crate::world::World;

/// How many seeds a thread takes at a time.
const BATCH: u64 = 16;

/// Plays the seeds from `first` up to `end`, and returns the lowest one that breaks a rule, if any does.
pub fn run(plant: Plant, first: u64, end: u64) -> (Option<(u64, Violation)>, Tally) {
    let next = AtomicU64::new(first);
    // Seeds from here on need not be played: a lower one is broken already.
    let limit = AtomicU64::new(end);
    let total = Mutex::new((None::<(u64, Violation)>, Tally::default()));
    let play = || {
        let mut tally = Tally::default();
        let mut pool = Pool::new();
        loop {
            let first = next.fetch_add(BATCH, Ordering::Relaxed);
            if first >= limit.load(Ordering::Relaxed) {
                break;
            }
            for seed in first..(first + BATCH).min(end) {
                let (violation, _, one) = play_one(seed, plant, &mut pool, false);
                tally.add(&one);
                if let Some(violation) = violation {
                    limit.fetch_min(seed, Ordering::Relaxed);
                    let mut total = total.lock().unwrap();
                    if total.0.as_ref().is_none_or(|(lowest, _)| seed < *lowest) {
                        total.0 = Some((seed, violation));
                    }
                    break;
                }
            }
        }
        total.lock().unwrap().1.add(&tally);
    };
    let threads = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(play);
        }
    });
    total.into_inner().unwrap()
}

/// Plays one seed, and tells what happened in it.
pub fn replay(seed: u64, plant: Plant) -> (Option<Violation>, Vec<String>, Tally) {
    play_one(seed, plant, &mut Pool::new(), true)
}

fn play_one(
    seed: u64,
    plant: Plant,
    pool: &mut Arc<Pool>,
    traced: bool,
) -> (Option<Violation>, Vec<String>, Tally) {
    let stage = Stage::new(World::new(seed, plant, traced), pool);
    stage.play();
    let mut world = stage.lock();
    world.tally.schedules += 1;
    let played = (world.take_violation(), world.lines(), world.tally);
    if world.stuck {
        // Its threads never end: they keep their pool.
        std::mem::forget(std::mem::replace(pool, Pool::new()));
    }
    played
}

/// Plays with a bug planted until a rule is broken.
pub fn hunt(plant: Plant, schedules: u64) {
    let found = run(plant, 0, schedules).0;
    let (seed, Violation { rule, what }) =
        found.unwrap_or_else(|| panic!("{plant:?} went unnoticed over {schedules} schedules"));
    println!("{plant:?}: caught by seed {seed}, rule {rule:?}: {what}");
    let again = replay(seed, plant).0.map(|violation| violation.rule);
    assert_eq!(again, Some(rule), "the seed replays");
    let clean = replay(seed, Plant::None).0;
    assert!(
        clean.is_none(),
        "without the bug, seed {seed} is clean: {clean:?}"
    );
}
