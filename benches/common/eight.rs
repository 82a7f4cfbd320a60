//! Eight contenders that cycle one lock, each as fast as it can.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use contend::Factory;

use super::{Budget, Tape, fact};

/// How long one side goes on before it is the other's turn.
const TURN: Duration = Duration::from_millis(250);

/// One cycle of one contender.
pub type Cycle = Box<dyn FnMut() + Send>;

/// Makes the contender of this number for a mutex.
pub type Make<'a> = &'a dyn Fn(&str, usize) -> Cycle;

/// Our own contenders: lockers of one factory.
pub fn lockers(factory: Factory) -> impl Fn(&str, usize) -> Cycle {
    move |mutex, _| {
        let locker = factory.locker(mutex).build().unwrap();
        Box::new(move || {
            locker.lock().unwrap().unlock().unwrap();
        })
    }
}

/// Records sides of eight contenders each, or of one where a side is `alone`, in turns. The fact
/// `{backend}-contended_8-max-min` is the ratio of what the luckiest and the unluckiest had on the last
/// side, which is ours.
pub fn contended_8<const N: usize>(
    backend: &str,
    budget: Budget,
    sides: [(usize, Make<'_>); N],
) -> [Tape; N] {
    let mut tapes: [Tape; N] = std::array::from_fn(|_| Tape::default());
    let turn = if budget.smoke {
        Duration::from_millis(20)
    } else {
        TURN
    };
    let mut had = [0; 8];
    let began = Instant::now();
    let mut round = 0;
    loop {
        for (number, ((count, make), tape)) in sides.iter().zip(&mut tapes).enumerate() {
            let mutex = format!("eight-{number}-{round}");
            let (counts, took) = together(*count, *make, &mutex, turn);
            tape.push(counts.iter().sum::<u64>().max(1), took);
            if number + 1 == N {
                for (all, one) in had.iter_mut().zip(counts) {
                    *all += one;
                }
            }
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
    tapes
}

/// Lets `count` contenders cycle for `turn`, and returns how often each of them did, and in what time.
pub fn together(count: usize, make: Make<'_>, mutex: &str, turn: Duration) -> (Vec<u64>, Duration) {
    let counting = Arc::new(AtomicBool::new(false));
    let over = Arc::new(AtomicBool::new(false));
    let start = Arc::new(Barrier::new(count + 1));
    let threads: Vec<_> = (0..count)
        .map(|number| {
            let mut cycle = make(mutex, number);
            let (over, start) = (Arc::clone(&over), Arc::clone(&start));
            let counting = Arc::clone(&counting);
            std::thread::spawn(move || {
                let mut cycles = 0;
                start.wait();
                while !over.load(Ordering::Relaxed) {
                    cycle();
                    cycles += u64::from(counting.load(Ordering::Relaxed));
                }
                cycles
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
    let counts = threads.into_iter().map(|thread| thread.join().unwrap());
    (counts.collect(), took)
}
