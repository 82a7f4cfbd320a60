//! What grows in a campaign of light faults, in its processes or on its server, leaks.

use std::fmt::{self, Write as _};
use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use crate::fleet::Fleet;
use crate::ground::Ground;
use crate::stage::{Servers, Stage};

/// How often is looked.
const EVERY: Duration = Duration::from_secs(5);

/// What is watched over time: a name, and a value for each look.
#[derive(Clone, Debug)]
struct Series {
    name: &'static str,
    values: Vec<f64>,
}

impl Series {
    /// The averages over the first and the last third.
    fn thirds(&self) -> (f64, f64) {
        let average = |values: &[f64]| values.iter().sum::<f64>() / values.len().max(1) as f64;
        let third = (self.values.len() / 3).max(1);
        let last = &self.values[self.values.len() - third..];
        (average(&self.values[..third]), average(last))
    }

    fn most(&self) -> f64 {
        self.values.iter().copied().fold(f64::MIN, f64::max)
    }
}

/// What a soak showed; nothing after any other campaign.
#[derive(Debug, Default)]
pub struct Soaked {
    series: Vec<Series>,
}

impl Soaked {
    /// Looks at the processes and the server until `end`.
    pub fn watch(stage: &Stage, fleet: &Fleet<'_>, end: Instant) -> Soaked {
        let mut series: Vec<Series> = Vec::new();
        let lasts = end.saturating_duration_since(Instant::now());
        // Until all have found their places, everything grows.
        thread::sleep(Duration::from_secs(15).min(lasts / 4));
        while Instant::now() < end {
            let mut look = process_facts(&fleet.pids());
            // A server that is paused at this moment answers when it is not.
            look.extend(leftovers(&stage.servers));
            for (index, (name, value)) in look.into_iter().enumerate() {
                if series.len() <= index {
                    let values = Vec::new();
                    series.push(Series { name, values });
                }
                series[index].values.push(value);
            }
            thread::sleep(EVERY.min(lasts / 20));
        }
        Soaked { series }
    }

    /// The series that grew: the average of the last third lies above that of the first by more than a tenth and by
    /// more than what comes and goes.
    pub fn grown(&self, ground: Ground) -> Vec<&'static str> {
        let grew = |series: &&Series| {
            let (first, last) = series.thirds();
            last > first * 1.1 + self.comes_and_goes(ground, series)
        };
        self.series.iter().filter(grew).map(|it| it.name).collect()
    }

    /// By how much a series may rise without having grown.
    fn comes_and_goes(&self, ground: Ground, series: &Series) -> f64 {
        let connections = self.series.iter().find(|it| it.name == "connections");
        match (ground, connections) {
            // The MySQL driver reads through a buffer of 4 MiB per connection from its beginning to its end before it
            // uses it again: memory comes to that, slowly, and not beyond.
            (Ground::MySql, Some(connections)) if series.name == "RSS MiB" => {
                4.0 * connections.most()
            }
            _ => 3.0,
        }
    }
}

/// A table: each series at the beginning and at the end, and its bounds.
impl fmt::Display for Soaked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("| | first third | last third | least | most |\n|---|---|---|---|---|")?;
        for series in &self.series {
            let (first, last) = series.thirds();
            let least = series.values.iter().copied().fold(f64::MAX, f64::min);
            let (name, most) = (series.name, series.most());
            f.write_char('\n')?;
            write!(
                f,
                "| {name} | {first:.1} | {last:.1} | {least:.1} | {most:.1} |"
            )?;
        }
        Ok(())
    }
}

/// Threads, files and memory of the processes, all together.
fn process_facts(pids: &[u32]) -> Vec<(&'static str, f64)> {
    let sum = |fact: fn(u32) -> usize| pids.iter().map(|pid| fact(*pid)).sum::<usize>() as f64;
    let files = |pid| fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count);
    vec![
        ("threads", sum(testbed::threads)),
        ("fds", sum(files)),
        ("RSS MiB", sum(testbed::rss_kib) / 1024.0),
    ]
}

/// What there is on the server: queue entries, rows, nodes, subscriptions, connections.
fn leftovers(servers: &Servers) -> Vec<(&'static str, f64)> {
    let number = |text: &str| text.trim().parse::<f64>().unwrap_or(0.0);
    match servers {
        Servers::Redis(server) => {
            let count = |args: &[&str]| server.cli(args).lines().count() as f64;
            let keys = server.cli(&["KEYS", "*:contender"]);
            let queues = keys.lines().map(|key| number(&server.cli(&["ZCARD", key])));
            vec![
                ("keys", count(&["KEYS", "*"])),
                ("queue entries", queues.sum()),
                ("channels", count(&["PUBSUB", "CHANNELS"])),
                ("connections", count(&["CLIENT", "LIST"])),
            ]
        }
        Servers::MySql(server) => {
            let one = |sql: &str| number(&server.sql(&format!("SELECT {sql}")));
            let connected = "COUNT(*) FROM information_schema.processlist WHERE db = 'campaign'";
            let bytes = "COALESCE(SUM(LENGTH(owner_id)), 0) FROM campaign.simba_mutex";
            vec![
                ("rows", one("COUNT(*) FROM campaign.simba_mutex")),
                ("bytes in rows", one(bytes)),
                ("connections", one(connected)),
                (
                    "waiting connections",
                    one(&format!("{connected} AND state = 'User lock'")),
                ),
            ]
        }
        Servers::Zk(server) => {
            let facts = server.four_letter("mntr").unwrap_or_default();
            let fact = |name: &str| {
                let mut lines = facts.lines().filter_map(|line| line.strip_prefix(name));
                lines.next().map_or(0.0, number)
            };
            vec![
                ("nodes", fact("zk_znode_count")),
                ("ephemeral nodes", fact("zk_ephemerals_count")),
                ("watches", fact("zk_watch_count")),
                ("connections", fact("zk_num_alive_connections")),
            ]
        }
        _ => vec![],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_alone_is_reported() {
        let soaked = |value: fn(u32) -> u32| Soaked {
            series: vec![Series {
                name: "threads",
                values: (0..60).map(|look| f64::from(100 + value(look))).collect(),
            }],
        };
        assert_eq!(soaked(|look| look).grown(Ground::Memory), ["threads"]);
        let flat = soaked(|look| look % 7);
        assert!(flat.grown(Ground::Memory).is_empty());
        assert!(flat.to_string().contains("| threads | 10"));
    }
}
