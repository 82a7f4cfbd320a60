//! Eight contenders that cycle one lock, each as fast as it can.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use contend::Factory;

use super::{Budget, Tape, fact};

/// How long one side goes on before it is the other's turn.
const TURN: Duration = Duration::from_millis(250);

/// Records `contended_8`: one uncontended bare loop, then the eight, and so on. The fact
/// `{backend}-contended_8-max-min` is the ratio of what the luckiest and the unluckiest had.
pub fn contended_8(
    backend: &str,
    factory: &Factory,
    budget: Budget,
    mut bare: impl FnMut(),
) -> [Tape; 2] {
    const COUNT: usize = 8;
    let [mut of_bare, mut of_ours] = [Tape::default(), Tape::default()];
    let turn = if budget.smoke {
        Duration::from_millis(20)
    } else {
        TURN
    };
    let mut had = [0; COUNT];
    let began = Instant::now();
    let mut round = 0;
    loop {
        let (mut cycles, start) = (0, Instant::now());
        while start.elapsed() < turn {
            bare();
            cycles += 1;
        }
        of_bare.push(cycles, start.elapsed());
        let (counts, took) = eight::<COUNT>(factory, &format!("eight-{round}"), turn);
        of_ours.push(counts.iter().sum::<u64>().max(1), took);
        for (all, one) in had.iter_mut().zip(counts) {
            *all += one;
        }
        round += 1;
        if !budget.lasts(began) {
            break;
        }
    }
    let (least, most) = (had.iter().min(), had.iter().max());
    if let (Some(least), Some(most)) = (least, most) {
        fact(
            &format!("{backend}-contended_8-max-min"),
            format_args!("{:.3}", *most as f64 / (*least).max(1) as f64),
        );
    }
    [of_bare, of_ours]
}

fn eight<const COUNT: usize>(
    factory: &Factory,
    mutex: &str,
    turn: Duration,
) -> ([u64; COUNT], Duration) {
    let counting = Arc::new(AtomicBool::new(false));
    let over = Arc::new(AtomicBool::new(false));
    let start = Arc::new(Barrier::new(COUNT + 1));
    let counts: [Arc<AtomicU64>; COUNT] = std::array::from_fn(|_| Arc::default());
    let threads: Vec<_> = (0..COUNT)
        .map(|number| {
            let locker = factory.locker(mutex).build().unwrap();
            let count = Arc::clone(&counts[number]);
            let (over, start) = (Arc::clone(&over), Arc::clone(&start));
            let counting = Arc::clone(&counting);
            std::thread::spawn(move || {
                start.wait();
                while !over.load(Ordering::Relaxed) {
                    let guard = locker.lock().unwrap();
                    if counting.load(Ordering::Relaxed) {
                        count.fetch_add(1, Ordering::Relaxed);
                    }
                    guard.unlock().unwrap();
                }
            })
        })
        .collect();
    start.wait();
    // Until all have subscribed and stand in line.
    std::thread::sleep(turn / 4);
    let began = Instant::now();
    counting.store(true, Ordering::Relaxed);
    std::thread::sleep(turn);
    counting.store(false, Ordering::Relaxed);
    let took = began.elapsed();
    over.store(true, Ordering::Relaxed);
    for thread in threads {
        thread.join().unwrap();
    }
    (counts.map(|count| count.load(Ordering::Relaxed)), took)
}
