//! What is measured of everybody, and what comes out of it.

use std::fmt::Write as _;
use std::time::Duration;

/// Somebody who has two or eight contenders for one lock. An error says why not.
pub trait Subject {
    /// Locks and unlocks so often, alone; the microseconds of each.
    fn cycles(&mut self, count: usize) -> Result<Vec<f64>, String>;

    /// For each of these times: holds so long while somebody else waits, and unlocks; the microseconds
    /// from there to the other's lock.
    fn hand_offs(&mut self, holds: &[Duration]) -> Result<Vec<f64>, String>;

    /// Eight lock and unlock as fast as they can; how often each did in `span`, after `settle`.
    fn eight(&mut self, settle: Duration, span: Duration) -> Result<Vec<u64>, String>;
}

/// How much is measured in one round.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub turns: usize,
    pub cycles: usize,
    pub hand_offs: usize,
    pub settle: Duration,
    pub span: Duration,
}

impl Plan {
    pub fn new(quick: bool) -> Plan {
        let ms = Duration::from_millis;
        if quick {
            Plan {
                turns: 1,
                cycles: 20,
                hand_offs: 2,
                settle: ms(100),
                span: ms(400),
            }
        } else {
            Plan {
                turns: 5,
                cycles: 60,
                hand_offs: 6,
                settle: ms(250),
                span: ms(2_000),
            }
        }
    }
}

/// How long an owner holds before it hands over: no multiple of anybody's pause between two looks, so
/// that over several hand-offs the waiter is met at any point of it.
pub fn hold(number: usize) -> Duration {
    Duration::from_micros(20_000 + 13_700 * (number as u64 % 17))
}

/// What somebody says of itself before it is measured.
#[derive(Debug, Default)]
pub struct Introduction {
    pub version: String,
    pub setting: String,
    /// Whether it can wait for a lock at all.
    pub waits: bool,
}

/// What one round has of one of them.
#[derive(Debug, Default)]
pub struct Outcome {
    pub backend: String,
    pub name: String,
    pub place: usize,
    pub failed: Option<String>,
    pub cycles: Vec<f64>,
    pub hand_offs: Vec<f64>,
    pub eight: Vec<u64>,
    pub seconds: f64,
    pub introduction: Introduction,
}

impl Outcome {
    pub fn new(backend: &str, name: &str, place: usize, introduction: Introduction) -> Outcome {
        Outcome {
            backend: backend.to_owned(),
            name: name.to_owned(),
            place,
            introduction,
            ..Outcome::default()
        }
    }

    pub fn missing(backend: &str, name: &str, place: usize, reason: String) -> Outcome {
        eprintln!("{name} does not run: {reason}");
        let mut outcome = Outcome::new(backend, name, place, Introduction::default());
        outcome.failed = Some(reason);
        outcome
    }

    pub fn json(&self) -> String {
        let (backend, name) = (text(&self.backend), text(&self.name));
        let mut json = format!("  {{\"backend\": {backend}, \"name\": {name}");
        let mut field = |key: &str, value: String| {
            let _ = write!(json, ", \"{key}\": {value}");
        };
        if let Some(reason) = &self.failed {
            field("failed", text(reason));
        } else {
            field("version", text(&self.introduction.version));
            field("setting", text(&self.introduction.setting));
            field("cycles_us", list(&self.cycles));
            field("handoffs_us", list(&self.hand_offs));
            field("eight", format!("{:?}", self.eight));
            field("eight_s", self.seconds.to_string());
        }
        json.push('}');
        json
    }
}

fn list(numbers: &[f64]) -> String {
    let numbers: Vec<String> = numbers.iter().map(|n| format!("{n:.1}")).collect();
    format!("[{}]", numbers.join(", "))
}

fn text(text: &str) -> String {
    let mut quoted = String::from("\"");
    for character in text.chars() {
        match character {
            '"' | '\\' => quoted.extend(['\\', character]),
            control if control.is_control() => quoted.push(' '),
            other => quoted.push(other),
        }
    }
    quoted.push('"');
    quoted
}
