//! Plays schedules on all cores.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use crate::monitor::Violation;
use crate::plant::Plant;
use crate::tally::Tally;
use crate::world::World;

/// How many seeds a thread takes at a time.
const BATCH: u64 = 64;

/// Plays seeds 0 up to `schedules`, and returns the lowest one that breaks a rule, if any does.
pub fn run(
    plant: Plant,
    only: Option<&'static str>,
    schedules: u64,
) -> (Option<(u64, Violation)>, Tally) {
    let next = AtomicU64::new(0);
    // Seeds from here on need not be played: a lower one is broken already.
    let limit = AtomicU64::new(schedules);
    let total = Mutex::new((None::<(u64, Violation)>, Tally::default()));
    let play = || {
        let mut tally = Tally::default();
        loop {
            let first = next.fetch_add(BATCH, Ordering::Relaxed);
            if first >= limit.load(Ordering::Relaxed) {
                break;
            }
            for seed in first..(first + BATCH).min(schedules) {
                if let Some(violation) = play_one(seed, plant, only, &mut tally) {
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

fn play_one(
    seed: u64,
    plant: Plant,
    only: Option<&'static str>,
    tally: &mut Tally,
) -> Option<Violation> {
    let mut world = World::new(seed, plant, only, false);
    let violation = guarded(&mut world);
    tally.add(&world.tally);
    violation
}

/// Plays one seed, and tells what happened in it.
pub fn replay(seed: u64, plant: Plant) -> (Option<Violation>, Vec<String>, Tally) {
    let mut world = World::new(seed, plant, None, true);
    let violation = guarded(&mut world);
    let tally = world.tally.clone();
    (violation, world.lines(), tally)
}

/// A panic is a violation like others: its seed and what led to it are wanted.
fn guarded(world: &mut World) -> Option<Violation> {
    catch_unwind(AssertUnwindSafe(|| world.run())).unwrap_or_else(|_| {
        Some(Violation {
            rule: "nothing panics",
            what: "see above".to_owned(),
        })
    })
}

/// Plays with a bug planted until a rule is broken.
pub fn hunt(plant: Plant, schedules: u64) {
    let found = run(plant, None, schedules).0;
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

/// Plays with a bug planted, and no rule but one, until that is broken: the damage that the bug does
/// in the end, where nothing stops it on the way.
pub fn hunt_damage(plant: Plant, only: &'static str, schedules: u64) {
    let found = run(plant, Some(only), schedules).0;
    let (seed, Violation { what, .. }) =
        found.unwrap_or_else(|| panic!("{plant:?} did no damage over {schedules} schedules"));
    println!("{plant:?}: damage done by seed {seed}, rule {only:?}: {what}");
}
