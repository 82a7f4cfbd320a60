//! What a probe costs: a lock and unlock on the memory backend with none, with one that counts, and with the
//! bridge to the `metrics` facade into a recorder for Prometheus' text.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use contend::{Factory, Lease, LossReason, Probe, memory};
use criterion::{Criterion, criterion_group, criterion_main};

/// Counts ownerships.
#[derive(Default)]
struct Counts {
    gained: AtomicU64,
    lost: AtomicU64,
}

impl Probe for Counts {
    fn gained(&self, _: &str, _: &str, _: u64) {
        self.gained.fetch_add(1, Ordering::Relaxed);
    }

    fn lost(&self, _: &str, _: &str, _: u64, _: Duration, _: LossReason) {
        self.lost.fetch_add(1, Ordering::Relaxed);
    }
}

fn probe(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("probe");
    let mut measure = |name: &str, with: &dyn Fn(Factory) -> Factory| {
        let factory = with(memory::factory(
            &format!("bench-probe-{name}"),
            Lease::default(),
        ));
        let locker = factory.locker("m").build().expect("a locker");
        group.bench_function(name, |bencher| {
            bencher.iter(|| drop(locker.lock().expect("it is free")));
        });
    };
    measure("none", &|factory| factory);
    measure("counting", &|factory| {
        factory.with_probe(Arc::new(Counts::default()))
    });
    #[cfg(feature = "metrics")]
    {
        let recorder = recorder::Recorder;
        metrics::set_global_recorder(recorder).expect("the first");
        measure("bridge", &|factory| {
            factory.with_probe(Arc::new(contend::MetricsProbe::new()))
        });
    }
    group.finish();
}

/// As an exporter keeps them: an atomic for each counter and gauge, a locked list for each histogram.
#[cfg(feature = "metrics")]
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

criterion_group!(benches, probe);
criterion_main!(benches);
