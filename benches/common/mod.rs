//! Ours beside others, in turns.
//!
//! Criterion measures one function after the other, and on a machine that does other things too the
//! second one meets another machine than the first. So each group is recorded first, a few operations
//! of the one, a few of the other, and so on; then criterion is given the recordings, sample by sample,
//! and does its statistics on them. What one side suffers from outside, the others suffer as well: the
//! ratio holds where the times do not.

#![allow(dead_code)]

pub mod eight;
pub mod hand_off;

use std::cell::{Cell, OnceCell};
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, SamplingMode};

/// A criterion that draws nothing.
pub fn criterion() -> Criterion {
    Criterion::default().without_plots().configure_from_args()
}

/// How long to record.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    /// All sides of one group together.
    pub time: Duration,
    /// Only whether it works: `cargo test --benches`, `cargo bench -- --test`.
    pub smoke: bool,
}

impl Budget {
    /// `CONTEND_BENCH_SECONDS` for each side, by default two.
    fn of(sides: usize) -> Budget {
        let smoke = std::env::args().any(|argument| argument == "--test")
            || !std::env::args().any(|argument| argument == "--bench");
        let seconds = std::env::var("CONTEND_BENCH_SECONDS")
            .ok()
            .and_then(|text| text.parse().ok())
            .unwrap_or(2.0);
        let time = if smoke {
            Duration::ZERO
        } else {
            Duration::from_secs_f64(seconds) * u32::try_from(sides).unwrap_or(1)
        };
        Budget { time, smoke }
    }

    /// Whether to go on with what began then. At least one round is made.
    pub fn lasts(&self, began: Instant) -> bool {
        began.elapsed() < self.time
    }
}

/// What was recorded of one side: so many operations took so long.
#[derive(Clone, Debug, Default)]
pub struct Tape {
    /// Sums up to here: operations, nanoseconds.
    marks: Vec<(f64, f64)>,
}

impl Tape {
    pub fn push(&mut self, operations: u64, took: Duration) {
        let (before, nanos) = self.length();
        self.marks
            .push((before + operations as f64, nanos + took.as_nanos() as f64));
    }

    /// How long the operation took that so many of all, from 0 to 1, did not outlast, in microseconds.
    pub fn quantile(&self, part: f64) -> f64 {
        let starts = std::iter::once(&(0.0, 0.0)).chain(&self.marks);
        let mut took: Vec<f64> = (starts.zip(&self.marks))
            .map(|(start, end)| (end.1 - start.1) / (end.0 - start.0).max(1.0) / 1000.0)
            .collect();
        took.sort_by(f64::total_cmp);
        let at = (part * took.len() as f64) as usize;
        took.get(at.min(took.len().saturating_sub(1)))
            .copied()
            .unwrap_or_default()
    }

    fn length(&self) -> (f64, f64) {
        self.marks.last().copied().unwrap_or_default()
    }

    /// Keeps the distribution of single operations for the report, where each was recorded for itself.
    fn keep_quantiles(&self, id: &str) {
        let mut before = (0.0, 0.0);
        let mut times = Vec::with_capacity(self.marks.len());
        for mark in &self.marks {
            if mark.0 - before.0 > 1.5 {
                return;
            }
            times.push((mark.1 - before.1).max(0.0) as u64);
            before = *mark;
        }
        times.sort_unstable();
        let Some(last) = times.len().checked_sub(1) else {
            return;
        };
        let curve: Vec<String> = QUANTILES
            .iter()
            .map(|quantile| format!("[{quantile}, {}]", times[(last as f64 * quantile) as usize]))
            .collect();
        fact(
            &format!("{}.quantiles", id.replace('/', "-")),
            format_args!(
                "{{\"id\": \"{id}\", \"count\": {}, \"ns\": [{}]}}",
                times.len(),
                curve.join(", ")
            ),
        );
    }

    /// How long the operations from `start` to `end` took; from the start again after the end.
    fn play(&self, start: u64, end: u64) -> Duration {
        Duration::from_nanos((self.nanos_at(end) - self.nanos_at(start)).max(0.0) as u64)
    }

    fn nanos_at(&self, operation: u64) -> f64 {
        let (operations, nanos) = self.length();
        let rounds = (operation as f64 / operations).floor();
        let rest = operation as f64 - rounds * operations;
        let index = self.marks.partition_point(|(sum, _)| *sum <= rest);
        let before = index.checked_sub(1).map_or((0.0, 0.0), |i| self.marks[i]);
        let after = self.marks.get(index).copied().unwrap_or(before);
        let part = (rest - before.0) / (after.0 - before.0).max(1.0);
        rounds * nanos + before.1 + part * (after.1 - before.1)
    }
}

/// What is kept of a distribution.
const QUANTILES: [f64; 24] = [
    0.0, 0.01, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75,
    0.8, 0.85, 0.9, 0.95, 0.99, 0.999, 1.0,
];

/// How many samples criterion gets of a side.
const SAMPLES: usize = 60;

/// How long criterion believes that it measures; the recording takes as long as the budget says.
const NOMINAL: Duration = Duration::from_secs(1);

/// Measures `{backend}/{operation}/{side}` for each side. Nothing is recorded where a filter leaves
/// all of them out.
pub fn beside<const N: usize>(
    criterion: &mut Criterion,
    backend: &str,
    operation: &str,
    sides: [&str; N],
    record: impl FnOnce(Budget) -> [Tape; N],
) {
    at_its_id(backend);
    let record = Cell::new(Some(record));
    let tapes: OnceCell<[Tape; N]> = OnceCell::new();
    let mut group = criterion.benchmark_group(backend);
    group.sampling_mode(SamplingMode::Flat);
    group.sample_size(SAMPLES);
    group.measurement_time(NOMINAL);
    // One call.
    group.warm_up_time(Duration::from_nanos(1));
    for (number, side) in sides.into_iter().enumerate() {
        let (warm, position) = (Cell::new(false), Cell::new(0));
        group.bench_function(BenchmarkId::new(operation, side), |bencher| {
            let tapes = tapes.get_or_init(|| {
                let record = record.take().expect("recorded once");
                let tapes = record(Budget::of(N));
                // Criterion shows means; a ratio of medians holds on a busy machine too.
                let first = tapes[0].quantile(0.5);
                for (side, tape) in sides.iter().zip(&tapes) {
                    tape.keep_quantiles(&format!("{backend}/{operation}/{side}"));
                    let (p50, p99) = (tape.quantile(0.5), tape.quantile(0.99));
                    println!(
                        "{backend}/{operation}/{side}: p50 {p50:.1} p99 {p99:.1} us, {:.2} of {}",
                        p50 / first,
                        sides[0]
                    );
                }
                tapes
            });
            let tape = &tapes[number];
            bencher.iter_custom(|iterations| {
                if !warm.replace(true) {
                    // From the length of this call criterion takes the number of iterations in a
                    // sample. So long, and all samples together are the tape, once.
                    let (operations, _) = tape.length();
                    let began = Instant::now();
                    while began.elapsed().as_secs_f64() < NOMINAL.as_secs_f64() / operations {
                        std::hint::spin_loop();
                    }
                    return tape.play(0, iterations);
                }
                let start = position.get();
                position.set(start + iterations);
                tape.play(start, start + iterations)
            });
        });
    }
    group.finish();
}

/// Criterion keeps the results of a group `a/b` in a folder `a_b`, and an id of four parts has no other
/// way to be one: a link leads from there to `a/b`, so that every result lies where its id says.
fn at_its_id(group: &str) {
    if !group.contains('/') {
        return;
    }
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("criterion");
    let home = std::env::var_os("CRITERION_HOME").map_or(target, Into::into);
    let (folder, link) = (home.join(group), home.join(group.replace('/', "_")));
    let linked = fs::create_dir_all(folder).and_then(|()| {
        if link.is_symlink() {
            return Ok(());
        }
        #[cfg(unix)]
        return std::os::unix::fs::symlink(group, &link);
        #[cfg(not(unix))]
        Err(std::io::ErrorKind::Unsupported.into())
    });
    if let Err(error) = linked {
        eprintln!("the results of {group} are in {}: {error}", link.display());
    }
}

/// A side: does one operation and says how long it took.
pub type Side<'a> = &'a mut dyn FnMut() -> Duration;

/// Records sides in turns, `block` operations each time.
pub fn in_turns<const N: usize>(budget: Budget, block: usize, sides: [Side<'_>; N]) -> [Tape; N] {
    let mut tapes: [Tape; N] = std::array::from_fn(|_| Tape::default());
    let block = if budget.smoke { 1 } else { block };
    let warm_up = Budget {
        time: budget.time / 10,
        ..budget
    };
    let began = Instant::now();
    let mut sides = sides;
    while warm_up.lasts(began) {
        for side in &mut sides {
            for _ in 0..block {
                side();
            }
        }
    }
    let began = Instant::now();
    loop {
        for (side, tape) in sides.iter_mut().zip(&mut tapes) {
            for _ in 0..block {
                tape.push(1, side());
            }
        }
        if !budget.lasts(began) {
            return tapes;
        }
    }
}

/// Prints the median and the 99th percentile of each side, and the ratio of the medians to that of `base`.
pub fn print_beside<const N: usize>(
    operation: &str,
    sides: [&str; N],
    tapes: &[Tape; N],
    base: usize,
) {
    let least = tapes[base].quantile(0.5).max(f64::MIN_POSITIVE);
    for (side, tape) in sides.iter().zip(tapes) {
        let (p50, p99) = (tape.quantile(0.5), tape.quantile(0.99));
        println!(
            "{operation}: {side:<8} p50 {p50:7.1} us  p99 {p99:7.1} us  {:.2} of {}",
            p50 / least,
            sides[base]
        );
    }
}

/// Times one call.
pub fn timed(work: impl FnOnce()) -> Duration {
    let began = Instant::now();
    work();
    began.elapsed()
}

/// Keeps a number that is no time, for the report: `target/tmp/facts/NAME`.
pub fn fact(name: &str, value: impl std::fmt::Display) {
    println!("{name}: {value}");
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("facts");
    let written = fs::create_dir_all(&folder)
        .and_then(|()| fs::write(folder.join(name), format!("{value}\n")));
    if let Err(error) = written {
        eprintln!("{name} was not kept: {error}");
    }
}
