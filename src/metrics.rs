//! `MetricsProbe`: the bridge from a [`Probe`] to the `metrics` facade.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use ::metrics::{
    Counter, Gauge, Histogram, Unit, counter, describe_counter, describe_gauge, describe_histogram,
    gauge, histogram,
};
use parking_lot::RwLock;

use crate::error::Error;
use crate::probe::{AcquireOutcome, LossReason, Probe, RenewOutcome, RunOutcomeKind};

/// How many names of mutexes, and of semaphores, get a label of their own.
const DEFAULT_MOST_LABELS: usize = 200;

const OPENED: &str = "contend_connections_opened_total";
const LOST: &str = "contend_connections_lost_total";

/// The label of all names beyond that number.
const OTHERS: &str = "(others)";

/// Reports to the [`metrics`](https://docs.rs/metrics) facade, and so to Prometheus, StatsD and others.
///
/// Install the recorder first: a metric that is registered before the recorder is not recorded, for as long
/// as the probe lives.
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
/// | `contend_owner` | gauge | mutex | how many contenders of this process own it; summed over all processes, 1 while somebody leads |
/// | `contend_gained_total` | counter | mutex | ownerships that began |
/// | `contend_lost_released_total` | counter | mutex | ownerships given up on purpose |
/// | `contend_lost_expired_total` | counter | mutex | leases that ended without a renewal |
/// | `contend_lost_taken_away_total` | counter | mutex | ownerships revoked, deleted or found to be somebody else's |
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
/// | `contend_permits_held` | gauge | semaphore | permits held by guards of this process, and those acquired without a guard until it learns of their end (for at most 10 000 requests) |
/// | `contend_exhausted_total` | counter | semaphore | requests that found it exhausted |
/// | `contend_connections_opened_total` | counter | | connections to the backend that were opened |
/// | `contend_connections_lost_total` | counter | | connections that were lost or could not be opened |
///
/// `examples/service/alerts.yml` in the repository has alert rules for Prometheus.
pub struct MetricsProbe {
    mutexes: Labels<MutexMetrics>,
    /// Apart, because a leader's mutex has no locks, and most have no runs.
    locks: Labels<LockMetrics>,
    runs: Labels<RunMetrics>,
    semaphores: Labels<SemaphoreMetrics>,
    connections: OnceLock<Connections>,
}

impl MetricsProbe {
    /// Creates a probe and describes its metrics to the recorder.
    #[must_use]
    pub fn new() -> MetricsProbe {
        describe_counter!(
            OPENED,
            Unit::Count,
            "Connections to the backend that were opened"
        );
        let lost = "Connections to the backend that were lost or could not be opened";
        describe_counter!(LOST, Unit::Count, lost);
        MetricsProbe {
            mutexes: Labels::new(),
            locks: Labels::new(),
            runs: Labels::new(),
            semaphores: Labels::new(),
            connections: OnceLock::new(),
        }
    }

    /// Sets how many mutexes, and how many semaphores, get their own label. Defaults to 200.
    #[must_use]
    pub fn most_labels(mut self, most: usize) -> MetricsProbe {
        self.mutexes.most = most;
        self.locks.most = most;
        self.runs.most = most;
        self.semaphores.most = most;
        self
    }

    fn connections(&self) -> &Connections {
        self.connections.get_or_init(|| Connections {
            opened: counter!(OPENED),
            lost: counter!(LOST),
        })
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
            .field("mutexes", &self.mutexes.known.read().len())
            .field("semaphores", &self.semaphores.known.read().len())
            .finish_non_exhaustive()
    }
}

impl Probe for MetricsProbe {
    fn acquire(&self, mutex: &str, outcome: AcquireOutcome<'_>, took: Duration) {
        let metrics = self.mutexes.of(mutex);
        let counter = match outcome {
            AcquireOutcome::Granted => &metrics.acquire_granted,
            AcquireOutcome::Refused => &metrics.acquire_refused,
            AcquireOutcome::Failed(_) => &metrics.acquire_failed,
        };
        counter.increment(1);
        metrics.acquire_seconds.record(took);
    }

    fn renew(&self, mutex: &str, outcome: RenewOutcome<'_>, took: Duration) {
        let metrics = self.mutexes.of(mutex);
        let counter = match outcome {
            RenewOutcome::Renewed => &metrics.renew_renewed,
            RenewOutcome::Lost => &metrics.renew_lost,
            RenewOutcome::Failed(_) => &metrics.renew_failed,
        };
        counter.increment(1);
        metrics.renew_seconds.record(took);
    }

    fn gained(&self, mutex: &str, _id: &str, _fence: u64) {
        let metrics = self.mutexes.of(mutex);
        metrics.owner.increment(1.0);
        metrics.gained.increment(1);
    }

    fn lost(&self, mutex: &str, _id: &str, _fence: u64, held: Duration, reason: LossReason) {
        let metrics = self.mutexes.of(mutex);
        metrics.owner.decrement(1.0);
        let counter = match reason {
            LossReason::Released => &metrics.lost_released,
            LossReason::Expired => &metrics.lost_expired,
            LossReason::TakenAway => &metrics.lost_taken_away,
            LossReason::Panicked => &metrics.lost_panicked,
        };
        counter.increment(1);
        metrics.held_seconds.record(held);
    }

    fn waited(&self, mutex: &str, waited: Duration, locked: bool) {
        let lock = self.locks.of(mutex);
        lock.wait_seconds.record(waited);
        if !locked {
            lock.failed.increment(1);
        }
    }

    fn handed_off(&self, mutex: &str, took: Duration) {
        self.mutexes.of(mutex).hand_off_seconds.record(took);
    }

    fn connected(&self) {
        self.connections().opened.increment(1);
    }

    fn disconnected(&self, _error: &Error) {
        self.connections().lost.increment(1);
    }

    fn scheduled_run(&self, mutex: &str, outcome: RunOutcomeKind, late: Duration, took: Duration) {
        let run = self.runs.of(mutex);
        let counter = match outcome {
            RunOutcomeKind::Ok => &run.ok,
            RunOutcomeKind::Failed => &run.failed,
            RunOutcomeKind::Panicked => &run.panicked,
            RunOutcomeKind::Cancelled => &run.cancelled,
            RunOutcomeKind::Lost => &run.lost,
        };
        counter.increment(1);
        run.late_seconds.record(late);
        run.seconds.record(took);
    }

    fn permits(&self, semaphore: &str, count: i64) {
        // Permits are counted in u32: an f64 holds them exactly.
        self.semaphores.of(semaphore).held.increment(count as f64);
    }

    fn exhausted(&self, semaphore: &str) {
        self.semaphores.of(semaphore).exhausted.increment(1);
    }
}

/// The metrics of each label. Registered once, because a recorder's look-up costs more than the count.
struct Labels<M> {
    known: RwLock<HashMap<Box<str>, Arc<M>>>,
    others: OnceLock<Arc<M>>,
    most: usize,
}

/// Metrics that carry one label.
trait Labelled {
    /// Tells the recorder what they mean.
    fn describe();
    fn register(label: &str) -> Self;
}

impl<M: Labelled> Labels<M> {
    fn new() -> Labels<M> {
        M::describe();
        Labels {
            known: RwLock::default(),
            others: OnceLock::new(),
            most: DEFAULT_MOST_LABELS,
        }
    }

    fn of(&self, name: &str) -> Arc<M> {
        {
            let known = self.known.read();
            if let Some(metrics) = known.get(name) {
                return Arc::clone(metrics);
            }
            // None is ever removed.
            if known.len() >= self.most {
                return self.others();
            }
        }
        let mut known = self.known.write();
        if let Some(metrics) = known.get(name) {
            return Arc::clone(metrics);
        }
        if known.len() >= self.most {
            return self.others();
        }
        let metrics = Arc::new(M::register(name));
        known.insert(name.into(), Arc::clone(&metrics));
        metrics
    }

    fn others(&self) -> Arc<M> {
        Arc::clone(self.others.get_or_init(|| Arc::new(M::register(OTHERS))))
    }
}

/// Declares metrics that carry a label: field, type, name and meaning.
macro_rules! labelled {
    ($metrics:ident, $label:literal, {
        $($field:ident: $kind:ident = $name:literal, $text:literal;)*
    }) => {
        struct $metrics {
            $($field: $kind,)*
        }

        impl Labelled for $metrics {
            fn describe() {
                $(labelled!(describe $kind, $name, $text);)*
            }

            fn register(label: &str) -> $metrics {
                $metrics {
                    $($field: labelled!(register $kind, $name, $label, label),)*
                }
            }
        }
    };
    (describe Counter, $name:literal, $text:literal) => {
        describe_counter!($name, Unit::Count, $text)
    };
    (describe Gauge, $name:literal, $text:literal) => {
        describe_gauge!($name, Unit::Count, $text)
    };
    (describe Histogram, $name:literal, $text:literal) => {
        describe_histogram!($name, Unit::Seconds, $text)
    };
    (register Counter, $name:literal, $key:literal, $label:ident) => {
        counter!($name, $key => $label.to_owned())
    };
    (register Gauge, $name:literal, $key:literal, $label:ident) => {
        gauge!($name, $key => $label.to_owned())
    };
    (register Histogram, $name:literal, $key:literal, $label:ident) => {
        histogram!($name, $key => $label.to_owned())
    };
}

labelled!(MutexMetrics, "mutex", {
    owner: Gauge = "contend_owner", "Contenders of this process that own the mutex";
    gained: Counter = "contend_gained_total", "Ownerships that began";
    lost_released: Counter = "contend_lost_released_total", "Ownerships given up on purpose";
    lost_expired: Counter = "contend_lost_expired_total", "Leases that ended without a renewal";
    lost_taken_away: Counter = "contend_lost_taken_away_total", "Ownerships revoked, deleted or found to be somebody else's";
    lost_panicked: Counter = "contend_lost_panicked_total", "Ownerships ended by a panic in the backend";
    held_seconds: Histogram = "contend_held_seconds", "How long an ownership lasted";
    acquire_granted: Counter = "contend_acquire_granted_total", "Attempts to acquire that were granted";
    acquire_refused: Counter = "contend_acquire_refused_total", "Attempts to acquire that found another owner";
    acquire_failed: Counter = "contend_acquire_failed_total", "Attempts to acquire without an answer";
    acquire_seconds: Histogram = "contend_acquire_seconds", "How long an attempt to acquire took";
    renew_renewed: Counter = "contend_renew_renewed_total", "Renewals";
    renew_lost: Counter = "contend_renew_lost_total", "Renewals that found the ownership gone";
    renew_failed: Counter = "contend_renew_failed_total", "Renewals without an answer";
    renew_seconds: Histogram = "contend_renew_seconds", "How long a renewal took";
    hand_off_seconds: Histogram = "contend_hand_off_seconds", "From the wake-up of a contender to its ownership";
});

labelled!(LockMetrics, "mutex", {
    wait_seconds: Histogram = "contend_lock_wait_seconds", "How long a call of lock took";
    failed: Counter = "contend_lock_failed_total", "Calls of lock that returned without the lock";
});

labelled!(RunMetrics, "mutex", {
    ok: Counter = "contend_run_ok_total", "Scheduled runs that returned Ok";
    failed: Counter = "contend_run_failed_total", "Scheduled runs that returned an error";
    panicked: Counter = "contend_run_panicked_total", "Scheduled runs that panicked";
    cancelled: Counter = "contend_run_cancelled_total", "Scheduled runs during which the scheduler was stopped";
    lost: Counter = "contend_run_lost_total", "Scheduled runs during which leadership was lost";
    seconds: Histogram = "contend_run_seconds", "How long a scheduled run took";
    late_seconds: Histogram = "contend_run_late_seconds", "How long after its time a scheduled run began";
});

labelled!(SemaphoreMetrics, "semaphore", {
    held: Gauge = "contend_permits_held", "Permits that guards of this process hold until they end, or that it acquired without one, until it learns of their end";
    exhausted: Counter = "contend_exhausted_total", "Requests that found the semaphore exhausted";
});

/// Metrics without a label.
struct Connections {
    opened: Counter,
    lost: Counter,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;
    use ::metrics::{
        CounterFn, GaugeFn, HistogramFn, Key, KeyName, Metadata, Recorder, SharedString,
        with_local_recorder,
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
    fn each_call_of_the_probe_is_counted_under_its_name_and_mutex() {
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
