//! What is measured of everybody, and what comes out of it.

use std::time::Duration;

/// Somebody who has two or eight contenders for one lock.
pub trait Subject {
    /// Locks and unlocks so often, alone; the time of each.
    fn cycles(&mut self, count: usize) -> Vec<Duration>;

    /// Unlocks while somebody else waits, so often; the time from there to the other's lock.
    fn hand_offs(&mut self, count: usize) -> Vec<Duration>;

    /// Eight lock and unlock as fast as they can; how often each did.
    fn eight(&mut self, span: Duration) -> Vec<u64>;
}

/// How long an owner holds before it hands over: no multiple of anybody's pause between two looks, so
/// that over several hand-offs the waiter is met at any point of it.
pub fn hold(number: usize) -> Duration {
    Duration::from_micros(20_000 + 13_700 * (number as u64 % 17))
}

#[derive(Debug, Default)]
pub struct Outcome {
    pub cycles: Vec<Duration>,
    pub hand_offs: Vec<Duration>,
    eight: Vec<u64>,
    span: f64,
    pub failed: bool,
}

impl Outcome {
    pub fn add_eight(&mut self, counts: &[u64], seconds: f64) {
        self.eight.resize(counts.len(), 0);
        for (all, one) in self.eight.iter_mut().zip(counts) {
            *all += one;
        }
        self.span += seconds;
    }

    pub fn json(&mut self) -> String {
        let sum: u64 = self.eight.iter().sum();
        let least = self.eight.iter().min().copied().unwrap_or(0);
        let most = self.eight.iter().max().copied().unwrap_or(0);
        format!(
            "\"cycle_us\": {:.1}, \"handoff_us\": {:.1}, \"handoff_p99_us\": {:.1}, \
             \"eight_per_s\": {:.1}, \"eight_least\": {least}, \"eight_most\": {most}",
            percentile(&mut self.cycles, 50),
            percentile(&mut self.hand_offs, 50),
            percentile(&mut self.hand_offs, 99),
            sum as f64 / self.span,
        )
    }
}

fn percentile(samples: &mut [Duration], part: usize) -> f64 {
    samples.sort();
    let index = (samples.len() * part / 100).min(samples.len().saturating_sub(1));
    samples
        .get(index)
        .map_or(0.0, |sample| sample.as_secs_f64() * 1e6)
}
