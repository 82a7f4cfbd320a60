//! What a probe costs: a lock and unlock on the memory backend with none, with one that counts, and with the
//! bridge to the `metrics` facade into a recorder for Prometheus' text. The three take turns, so that a busy
//! machine is busy for all of them.
//!
//! `cargo bench --all-features --bench probe`
#![allow(missing_docs)]
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use contend::{AcquireOutcome, Factory, Lease, Locker, LossReason, Probe, RenewOutcome, memory};

/// Counts the calls of a cycle.
#[derive(Default)]
struct Counts(AtomicU64);

impl Counts {
    fn count(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

impl Probe for Counts {
    fn acquire(&self, _: &str, _: AcquireOutcome<'_>, _: Duration) {
        self.count();
    }

    fn renew(&self, _: &str, _: RenewOutcome<'_>, _: Duration) {
        self.count();
    }

    fn gained(&self, _: &str, _: &str, _: u64) {
        self.count();
    }

    fn lost(&self, _: &str, _: &str, _: u64, _: Duration, _: LossReason) {
        self.count();
    }

    fn waited(&self, _: &str, _: Duration, _: bool) {
        self.count();
    }

    fn handed_off(&self, _: &str, _: Duration) {
        self.count();
    }
}

fn main() {
    let is_bench = std::env::args().any(|argument| argument == "--bench");
    let (rounds, cycles) = if is_bench { (400, 500) } else { (5, 20) };
    let counts = Arc::new(Counts::default());
    metrics::set_global_recorder(recorder::Recorder).expect("the first");
    let bridge = Arc::new(contend::MetricsProbe::new());
    let lockers = [
        ("none", locker("none", |factory| factory)),
        (
            "one that counts",
            locker("counts", |factory| factory.with_probe(counts.clone())),
        ),
        (
            "metrics bridge",
            locker("bridge", |factory| factory.with_probe(bridge)),
        ),
    ];
    let mut times: Vec<Vec<f64>> = vec![Vec::new(); lockers.len()];
    for _ in 0..rounds {
        for ((_, locker), times) in lockers.iter().zip(&mut times) {
            let began = Instant::now();
            for _ in 0..cycles {
                drop(locker.lock().expect("it is free"));
            }
            times.push(began.elapsed().as_secs_f64() * 1e9 / f64::from(cycles));
        }
    }
    let median = |times: &[f64]| {
        let mut sorted = times.to_vec();
        sorted.sort_by(f64::total_cmp);
        sorted[sorted.len() / 2]
    };
    let none = median(&times[0]);
    println!("| probe | lock and unlock | more than none |\n|---|--:|--:|");
    for ((name, _), times) in lockers.iter().zip(&times) {
        let with = median(times);
        println!("| {name} | {with:.0} ns | {:+.0} ns |", with - none);
    }
    let calls = counts.0.load(Ordering::Relaxed) as f64 / f64::from(rounds * cycles);
    let branch = branch();
    println!(
        "without a probe, {calls:.1} branches a cycle of {branch:.2} ns: {:.2} % of it",
        100.0 * calls * branch / none
    );
}

fn locker(name: &str, with: impl FnOnce(Factory) -> Factory) -> Locker {
    let factory = memory::factory(&format!("bench-probe-{name}"), Lease::default());
    with(factory).locker("m").build().expect("a locker")
}

/// What it costs to see that there is no probe, in nanoseconds.
fn branch() -> f64 {
    const TIMES: u32 = 10_000_000;
    let probe: Option<Arc<dyn Probe>> = None;
    let began = Instant::now();
    for _ in 0..TIMES {
        if let Some(probe) = black_box(&probe) {
            probe.connected();
        }
    }
    began.elapsed().as_secs_f64() * 1e9 / f64::from(TIMES)
}

/// As an exporter keeps them: an atomic for each counter and gauge, a locked list for each histogram.
mod recorder {
    use std::sync::Arc;
    use std::sync::atomic::AtomicU64;

    use metrics::{
        Counter, Gauge, Histogram, HistogramFn, Key, KeyName, Metadata, SharedString, Unit,
    };
    use parking_lot::Mutex;

    #[derive(Default)]
    pub struct Recorder;

    struct Samples(Mutex<Vec<f64>>);

    impl HistogramFn for Samples {
        fn record(&self, value: f64) {
            let mut samples = self.0.lock();
            if samples.len() == 4096 {
                samples.clear();
            }
            samples.push(value);
        }
    }

    impl metrics::Recorder for Recorder {
        fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
        fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
        fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
        fn register_counter(&self, _: &Key, _: &Metadata<'_>) -> Counter {
            Counter::from_arc(Arc::new(AtomicU64::new(0)))
        }
        fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
            Gauge::from_arc(Arc::new(AtomicU64::new(0)))
        }
        fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
            Histogram::from_arc(Arc::new(Samples(Mutex::default())))
        }
    }
}
