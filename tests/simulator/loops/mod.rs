//! The real loops: services, lockers, observers and their background threads run unchanged, each of their
//! threads a real one, over a simulated backend, clock and scheduler.

mod backend;
mod monitor;
mod process;
mod rules;
mod stage;
mod tally;
mod world;

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

pub use monitor::Violation;
use stage::{Pool, Stage};
use tally::Tally;
use world::World;

/// How many seeds a thread takes at a time.
const BATCH: u64 = 64;

/// Plays the seeds from `first` up to `end`, and returns the lowest one that breaks a rule, if any does.
pub fn run(first: u64, end: u64) -> (Option<(u64, Violation)>, Tally) {
    let next = AtomicU64::new(first);
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
                let (violation, _, one) = play_one(seed, &mut pool, false);
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
pub fn replay(seed: u64) -> (Option<Violation>, Vec<String>, Tally) {
    play_one(seed, &mut Pool::new(), true)
}

fn play_one(
    seed: u64,
    pool: &mut std::sync::Arc<Pool>,
    traced: bool,
) -> (Option<Violation>, Vec<String>, Tally) {
    let stage = Stage::new(World::new(seed, traced), pool);
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
