//! `MetricsProbe`: the bridge from a [`Probe`] to the `metrics` facade.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use ::metrics::{counter, gauge, histogram};
use parking_lot::RwLock;

use crate::error::Error;
use crate::probe::{AcquireOutcome, LossReason, Probe, RenewOutcome, RunOutcomeKind};

/// The label of all names beyond the limit.
const OTHERS: &str = "(others)";

/// Reports to the [`metrics`](https://docs.rs/metrics) facade, and so to Prometheus, StatsD and others.
///
/// Install the recorder first: what happens before that is not recorded.
///
/// ```
/// use std::sync::Arc;
///
/// // metrics_exporter_prometheus::PrometheusBuilder::new().install_recorder()?;
/// let probe = contend::MetricsProbe::new().most_labels(50);
/// let probe: Arc<dyn contend::Probe> = Arc::new(probe);
/// ```
///
/// # Names
/// Every metric is labelled by `mutex` alone, or by `semaphore`, or not at all. The first 200 names
/// ([`most_labels`](MetricsProbe::most_labels)) get their own label; all others share `(others)`.
///
/// | name | type, unit | label | |
/// |---|---|---|---|
/// | `contend_owner` | gauge | mutex | how many contenders of this process own it; summed over all processes, 1 while one leads |
/// | `contend_gained_total` | counter | mutex | ownerships that began |
/// | `contend_lost_released_total` | counter | mutex | ownerships given up on purpose |
/// | `contend_lost_expired_total` | counter | mutex | leases that ended without a renewal |
/// | `contend_lost_taken_away_total` | counter | mutex | ownerships revoked, deleted or found to be another contender's |
/// | `contend_lost_panicked_total` | counter | mutex | ownerships ended by a panic in the backend |
/// | `contend_held_seconds` | histogram, s | mutex | how long an ownership lasted |
/// | `contend_acquire_granted_total` | counter | mutex | attempts that were granted |
/// | `contend_acquire_refused_total` | counter | mutex | attempts that found another owner |
/// | `contend_acquire_failed_total` | counter | mutex | attempts without an answer |
/// | `contend_acquire_seconds` | histogram, s | mutex | how long an attempt took |
/// | `contend_renew_renewed_total` | counter | mutex | renewals |
/// | `contend_renew_lost_total` | counter | mutex | renewals that found the ownership gone |
/// | `contend_renew_failed_total` | counter | mutex | renewals without an answer |
/// | `contend_renew_seconds` | histogram, s | mutex | how long a renewal took |
/// | `contend_hand_off_seconds` | histogram, s | mutex | from the wake-up of a contender to its ownership |
/// | `contend_lock_wait_seconds` | histogram, s | mutex | how long a call of `lock` took |
/// | `contend_lock_failed_total` | counter | mutex | calls of `lock` that returned without the lock |
/// | `contend_run_ok_total` | counter | mutex | scheduled runs that returned `Ok` |
/// | `contend_run_failed_total` | counter | mutex | scheduled runs that returned an error |
/// | `contend_run_panicked_total` | counter | mutex | scheduled runs that panicked |
/// | `contend_run_cancelled_total` | counter | mutex | scheduled runs during which the scheduler was stopped |
/// | `contend_run_lost_total` | counter | mutex | scheduled runs during which leadership was lost |
/// | `contend_run_seconds` | histogram, s | mutex | how long a scheduled run took |
/// | `contend_run_late_seconds` | histogram, s | mutex | how long after its time a run began |
/// | `contend_permits_held` | gauge | semaphore | permits held by guards of this process |
/// | `contend_exhausted_total` | counter | semaphore | requests that found it exhausted |
/// | `contend_connections_opened_total` | counter | | connections to the backend that were opened |
/// | `contend_connections_lost_total` | counter | | connections that were lost or could not be opened |
///
/// `examples/service/alerts.yml` in the repository has alert rules for Prometheus.
pub struct MetricsProbe {
    mutexes: Labels,
    semaphores: Labels,
    most_labels: usize,
}

/// The names that have a label of their own.
type Labels = RwLock<HashSet<Arc<str>>>;

impl MetricsProbe {
    /// Creates a probe.
    #[must_use]
    pub fn new() -> MetricsProbe {
        MetricsProbe {
            mutexes: Labels::default(),
            semaphores: Labels::default(),
            most_labels: 200,
        }
    }

    /// Sets how many mutexes, and how many semaphores, get their own label. Defaults to 200.
    #[must_use]
    pub fn most_labels(mut self, most: usize) -> MetricsProbe {
        self.most_labels = most;
        self
    }

    fn mutex(&self, name: &str) -> Arc<str> {
        self.label(&self.mutexes, name)
    }

    fn label(&self, labels: &Labels, name: &str) -> Arc<str> {
        if let Some(label) = labels.read().get(name) {
            return Arc::clone(label);
        }
        let mut labels = labels.write();
        if labels.len() >= self.most_labels && !labels.contains(name) {
            return OTHERS.into();
        }
        labels.insert(name.into());
        name.into()
    }
}

impl Default for MetricsProbe {
    fn default() -> MetricsProbe {
        MetricsProbe::new()
    }
}

impl fmt::Debug for MetricsProbe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MetricsProbe")
            .field("mutexes", &self.mutexes.read().len())
            .field("semaphores", &self.semaphores.read().len())
            .finish_non_exhaustive()
    }
}

impl Probe for MetricsProbe {
    fn acquire(&self, mutex: &str, outcome: AcquireOutcome<'_>, took: Duration) {
        let mutex = self.mutex(mutex);
        let name = match outcome {
            AcquireOutcome::Granted => "contend_acquire_granted_total",
            AcquireOutcome::Refused => "contend_acquire_refused_total",
            AcquireOutcome::Failed(_) => "contend_acquire_failed_total",
        };
        counter!(name, "mutex" => Arc::clone(&mutex)).increment(1);
        histogram!("contend_acquire_seconds", "mutex" => mutex).record(took);
    }

    fn renew(&self, mutex: &str, outcome: RenewOutcome<'_>, took: Duration) {
        let mutex = self.mutex(mutex);
        let name = match outcome {
            RenewOutcome::Renewed => "contend_renew_renewed_total",
            RenewOutcome::Lost => "contend_renew_lost_total",
            RenewOutcome::Failed(_) => "contend_renew_failed_total",
        };
        counter!(name, "mutex" => Arc::clone(&mutex)).increment(1);
        histogram!("contend_renew_seconds", "mutex" => mutex).record(took);
    }

    fn gained(&self, mutex: &str, _id: &str, _fence: u64) {
        let mutex = self.mutex(mutex);
        gauge!("contend_owner", "mutex" => Arc::clone(&mutex)).increment(1.0);
        counter!("contend_gained_total", "mutex" => mutex).increment(1);
    }

    fn lost(&self, mutex: &str, _id: &str, _fence: u64, held: Duration, reason: LossReason) {
        let mutex = self.mutex(mutex);
        gauge!("contend_owner", "mutex" => Arc::clone(&mutex)).decrement(1.0);
        let name = match reason {
            LossReason::Released => "contend_lost_released_total",
            LossReason::Expired => "contend_lost_expired_total",
            LossReason::TakenAway => "contend_lost_taken_away_total",
            LossReason::Panicked => "contend_lost_panicked_total",
        };
        counter!(name, "mutex" => Arc::clone(&mutex)).increment(1);
        histogram!("contend_held_seconds", "mutex" => mutex).record(held);
    }

    fn waited(&self, mutex: &str, waited: Duration, locked: bool) {
        let mutex = self.mutex(mutex);
        histogram!("contend_lock_wait_seconds", "mutex" => Arc::clone(&mutex)).record(waited);
        // Also where it stays zero, for rates from the start.
        counter!("contend_lock_failed_total", "mutex" => mutex).increment(u64::from(!locked));
    }

    fn handed_off(&self, mutex: &str, took: Duration) {
        let mutex = self.mutex(mutex);
        histogram!("contend_hand_off_seconds", "mutex" => mutex).record(took);
    }

    fn connected(&self) {
        counter!("contend_connections_opened_total").increment(1);
    }

    fn disconnected(&self, _error: &Error) {
        counter!("contend_connections_lost_total").increment(1);
    }

    fn scheduled_run(&self, mutex: &str, outcome: RunOutcomeKind, late: Duration, took: Duration) {
        let mutex = self.mutex(mutex);
        let name = match outcome {
            RunOutcomeKind::Ok => "contend_run_ok_total",
            RunOutcomeKind::Failed => "contend_run_failed_total",
            RunOutcomeKind::Panicked => "contend_run_panicked_total",
            RunOutcomeKind::Cancelled => "contend_run_cancelled_total",
            RunOutcomeKind::Lost => "contend_run_lost_total",
        };
        counter!(name, "mutex" => Arc::clone(&mutex)).increment(1);
        histogram!("contend_run_late_seconds", "mutex" => Arc::clone(&mutex)).record(late);
        histogram!("contend_run_seconds", "mutex" => mutex).record(took);
    }

    fn permits(&self, semaphore: &str, count: i64) {
        let semaphore = self.label(&self.semaphores, semaphore);
        // Permits are counted in u32: an f64 holds them exactly.
        gauge!("contend_permits_held", "semaphore" => semaphore).increment(count as f64);
    }

    fn exhausted(&self, semaphore: &str) {
        let semaphore = self.label(&self.semaphores, semaphore);
        counter!("contend_exhausted_total", "semaphore" => semaphore).increment(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;
    use ::metrics::{
        Counter, CounterFn, Gauge, GaugeFn, Histogram, HistogramFn, Key, KeyName, Metadata,
        Recorder, SharedString, Unit, with_local_recorder,
    };
    use parking_lot::Mutex;
    use std::collections::BTreeMap;

    /// Adds everything up, by name and label.
    #[derive(Clone, Default)]
    struct Sums(Arc<Mutex<BTreeMap<String, f64>>>);

    struct Sum(Sums, String);

    impl Sum {
        fn add(&self, value: f64) {
            *self.0.0.lock().entry(self.1.clone()).or_default() += value;
        }
    }

    impl CounterFn for Sum {
        fn increment(&self, value: u64) {
            self.add(value as f64);
        }
        fn absolute(&self, _: u64) {}
    }

    impl GaugeFn for Sum {
        fn increment(&self, value: f64) {
            self.add(value);
        }
        fn decrement(&self, value: f64) {
            self.add(-value);
        }
        fn set(&self, _: f64) {}
    }

    impl HistogramFn for Sum {
        fn record(&self, value: f64) {
            self.add(value);
        }
    }

    impl Sums {
        fn sum(&self, key: &Key) -> Arc<Sum> {
            let labels: Vec<String> = key
                .labels()
                .map(|label| format!("{}={}", label.key(), label.value()))
                .collect();
            let name = format!("{} {}", key.name(), labels.join(","));
            Arc::new(Sum(self.clone(), name.trim_end().to_owned()))
        }

        fn get(&self, name: &str) -> f64 {
            self.0.lock().get(name).copied().unwrap_or(0.0)
        }
    }

    impl Recorder for Sums {
        fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
        fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
        fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
        fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
            Counter::from_arc(self.sum(key))
        }
        fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
            Gauge::from_arc(self.sum(key))
        }
        fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
            Histogram::from_arc(self.sum(key))
        }
    }

    #[test]
    fn probe_calls_are_counted_by_mutex() {
        let sums = Sums::default();
        with_local_recorder(&sums, || {
            let probe = MetricsProbe::new();
            let error = Error::new(ErrorKind::Timeout, "too late");
            let second = Duration::from_secs(1);
            probe.acquire("m", AcquireOutcome::Refused, second);
            probe.acquire("m", AcquireOutcome::Failed(&error), second);
            probe.acquire("m", AcquireOutcome::Granted, second);
            probe.gained("m", "a", 7);
            probe.handed_off("m", second);
            probe.renew("m", RenewOutcome::Renewed, second);
            probe.renew("m", RenewOutcome::Failed(&error), second);
            assert_eq!(sums.get("contend_owner mutex=m"), 1.0);
            probe.lost("m", "a", 7, second, LossReason::Expired);
            probe.waited("m", second, false);
            probe.scheduled_run("m", RunOutcomeKind::Panicked, second, second * 2);
            probe.permits("s", 3);
            probe.permits("s", -1);
            probe.exhausted("s");
            probe.connected();
            probe.disconnected(&error);
        });
        let expected = [
            ("contend_acquire_refused_total mutex=m", 1.0),
            ("contend_acquire_failed_total mutex=m", 1.0),
            ("contend_acquire_granted_total mutex=m", 1.0),
            ("contend_acquire_seconds mutex=m", 3.0),
            ("contend_gained_total mutex=m", 1.0),
            ("contend_owner mutex=m", 0.0),
            ("contend_hand_off_seconds mutex=m", 1.0),
            ("contend_renew_renewed_total mutex=m", 1.0),
            ("contend_renew_failed_total mutex=m", 1.0),
            ("contend_renew_seconds mutex=m", 2.0),
            ("contend_lost_expired_total mutex=m", 1.0),
            ("contend_held_seconds mutex=m", 1.0),
            ("contend_lock_wait_seconds mutex=m", 1.0),
            ("contend_lock_failed_total mutex=m", 1.0),
            ("contend_run_panicked_total mutex=m", 1.0),
            ("contend_run_late_seconds mutex=m", 1.0),
            ("contend_run_seconds mutex=m", 2.0),
            ("contend_permits_held semaphore=s", 2.0),
            ("contend_exhausted_total semaphore=s", 1.0),
            ("contend_connections_opened_total", 1.0),
            ("contend_connections_lost_total", 1.0),
        ];
        for (name, value) in expected {
            assert_eq!(sums.get(name), value, "{name}");
        }
        assert_eq!(sums.0.lock().len(), expected.len(), "{:?}", sums.0.lock());
    }

    #[test]
    fn names_beyond_the_bound_share_one_label() {
        let sums = Sums::default();
        with_local_recorder(&sums, || {
            let probe = MetricsProbe::new().most_labels(2);
            for name in ["a", "b", "c", "d", "a", "c"] {
                probe.gained(name, "id", 1);
            }
        });
        let of = |mutex: &str| sums.get(&format!("contend_gained_total mutex={mutex}"));
        assert_eq!([of("a"), of("b"), of("(others)")], [2.0, 1.0, 3.0]);
        assert_eq!([of("c"), of("d")], [0.0, 0.0]);
    }
}
