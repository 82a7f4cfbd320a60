//! `contend status`: who owns what, since when, and who waits.

use clap::Args;
use contend::{MutexOwner, Participant};
use jiff::SignedDuration;
use serde_json::{Value, json};

use crate::console::{self, Console, now_ms};
use crate::exit::Failure;
use crate::options::Connection;

/// Shows who owns which mutex, since when, with which fence, and who waits.
///
/// Without names, it shows all mutexes that have an owner or a waiter. It changes nothing. To follow one mutex, use
/// `contend observe`.
#[derive(Args)]
#[command(after_long_help = include_str!("help/status.txt"))]
pub struct Status {
    /// The names of the mutexes [default: all].
    #[arg(value_name = "MUTEX")]
    mutexes: Vec<String>,
}

/// One mutex as the server knows it.
struct Row {
    mutex: String,
    owner: MutexOwner,
    waiting: Vec<Participant>,
}

impl Status {
    pub fn run(&self, connection: &Connection, console: Console) -> Result<u8, Failure> {
        let factory = connection.factory()?;
        let names = match &self.mutexes[..] {
            [] => factory.list()?.iter().map(ToString::to_string).collect(),
            names => names.to_vec(),
        };
        let mut rows = Vec::new();
        for mutex in names {
            rows.push(Row {
                owner: factory.owner(&mutex)?,
                waiting: factory.participants(&mutex)?,
                mutex,
            });
        }
        match &rows[..] {
            rows if console.json => rows
                .iter()
                .try_fold(0, |_, row| console.record(&row.json())),
            [] => console::line("no mutex has an owner or a waiter"),
            rows => console::line(&table(rows)),
        }
    }
}

impl Row {
    fn json(&self) -> Value {
        let owner = Some(&self.owner).filter(|owner| owner.has_owner());
        let left = |end: u64| end.saturating_sub(self.owner.backend_now());
        let waiting = self.waiting.iter();
        let waiting = waiting.map(|one| json!({"id": *one.id, "since_ms": one.since}));
        json!({
            "at_ms": now_ms(), "mutex": self.mutex,
            "owner": owner.map(MutexOwner::owner_id), "fence": owner.map(MutexOwner::fence),
            "since_ms": owner.map(MutexOwner::acquired_at),
            "ttl_left_ms": owner.map(|owner| left(owner.ttl_at())),
            "transition_left_ms": owner.map(|owner| left(owner.transition_at())),
            "waiting": waiting.collect::<Value>(),
        })
    }

    fn cells(&self) -> [String; 6] {
        let (mutex, owner) = (self.mutex.clone(), &self.owner);
        let waiting = match &self.waiting[..] {
            [] => "-".to_owned(),
            [first] => format!("1: {}", first.id),
            [first, ..] => format!("{}: {}, ...", self.waiting.len(), first.id),
        };
        if !owner.has_owner() {
            let [free, fence, held, left] = ["(free)", "-", "-", "-"].map(str::to_owned);
            return [mutex, free, fence, held, left, waiting];
        }
        let now = owner.backend_now();
        let shown = |ms: u64| format!("{:#}", SignedDuration::from_millis(ms as i64));
        let held = shown(now.saturating_sub(owner.acquired_at()));
        // Not the end of the ttl: Redis does not know how long it is.
        let left = shown(owner.transition_at().saturating_sub(now));
        let (id, fence) = (owner.owner_id().to_owned(), owner.fence().to_string());
        [mutex, id, fence, held, left, waiting]
    }
}

fn table(rows: &[Row]) -> String {
    let head = ["MUTEX", "OWNER", "FENCE", "HELD", "LEASE LEFT", "WAITING"];
    let mut lines = vec![head.map(str::to_owned)];
    lines.extend(rows.iter().map(Row::cells));
    let width = |column: usize| {
        let cells = lines.iter().map(|line| line[column].chars().count());
        cells.max().unwrap_or(0)
    };
    let widths = [0, 1, 2, 3, 4, 5].map(width);
    let lines = lines.iter().map(|line| {
        let cells = line.iter().zip(widths);
        let cells = cells.map(|(cell, width)| format!("{cell:<width$}  "));
        cells.collect::<String>().trim_end().to_owned()
    });
    lines.collect::<Vec<String>>().join("\n")
}
