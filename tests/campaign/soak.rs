//! A long run with light faults: 100 services and 20 lockers in one process, watched from outside. What
//! grows there or on the server leaks.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use contend::Factory;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use testbed::{Output, Process};

use crate::stage::{Fault, Ground, Stage, Way};

const SERVICES: usize = 100;
const LOCKERS: usize = 20;
/// Each mutex has this many contenders.
const PER_MUTEX: usize = 4;

/// How often is looked.
const EVERY: Duration = Duration::from_secs(5);

/// The variables of the environment of the process that is watched: the URL, and the seed.
const URL: &str = "CONTEND_SOAK_URL";
const SEED: &str = "CONTEND_SOAK_SEED";

/// What is watched over time: a name, and a value for each look.
#[derive(Clone, Debug)]
pub struct Series {
    pub name: String,
    pub values: Vec<f64>,
}

/// What a soak showed.
#[derive(Debug)]
pub struct Soaked {
    pub ground: Ground,
    /// When each look was taken.
    pub seconds: Vec<f64>,
    pub series: Vec<Series>,
    pub faults: usize,
}

/// Runs a soak for `lasts`.
pub fn run(ground: Ground, lasts: Duration, seed: u64) -> Soaked {
    let stage = Stage::start(ground, 1);
    let mut command = Command::new(std::env::current_exe().expect("a test knows itself"));
    let lease = "ttl=5000ms&transition=2000ms";
    command
        .args(["--exact", "soaked", "--ignored", "--nocapture"])
        .env(URL, stage.url_with(0, lease))
        .env(SEED, seed.to_string());
    let process = Process::spawn(&command, &Output::Pipe).expect("a process to watch");
    if let Some(mut output) = process.take_stdout() {
        thread::spawn(move || std::io::copy(&mut output, &mut std::io::sink()));
    }
    let input = process.take_stdin();
    let over = AtomicBool::new(false);
    let mut soaked = Soaked {
        ground,
        seconds: Vec::new(),
        series: Vec::new(),
        faults: 0,
    };
    thread::scope(|scope| {
        let faults = scope.spawn(|| light_faults(&stage, seed, &over));
        let began = Instant::now();
        // Until everybody has found its place, everything grows.
        thread::sleep(Duration::from_secs(15).min(lasts / 4));
        while began.elapsed() < lasts {
            assert!(
                process.is_running(),
                "the process that is watched has ended"
            );
            let mut look = process_facts(process.pid());
            // A server that is paused at this moment answers when it is not.
            look.extend(stage.leftovers());
            soaked.seconds.push(began.elapsed().as_secs_f64());
            for (index, (name, value)) in look.into_iter().enumerate() {
                if soaked.series.len() <= index {
                    soaked.series.push(Series {
                        name,
                        values: Vec::new(),
                    });
                }
                soaked.series[index].values.push(value);
            }
            thread::sleep(EVERY.min(lasts / 20));
        }
        over.store(true, Ordering::SeqCst);
        soaked.faults = faults.join().expect("the faults");
    });
    drop(input);
    let status = process.wait(Duration::from_secs(60));
    assert!(
        status.is_some_and(|status| status.success()),
        "the process that was watched ended with {status:?}"
    );
    soaked
}

fn light_faults(stage: &Stage, seed: u64, over: &AtomicBool) -> usize {
    let mut random = StdRng::seed_from_u64(seed);
    let mut count = 0;
    while !over.load(Ordering::SeqCst) {
        let pause = Duration::from_millis(random.random_range(2_000..8_000));
        let until = Instant::now() + pause;
        while Instant::now() < until && !over.load(Ordering::SeqCst) {
            thread::sleep(Duration::from_millis(50));
        }
        let fault = [
            Fault::Cut,
            Fault::Reset,
            Fault::Delay,
            Fault::LoseReply,
            Fault::BlackHole(Way::ToClient),
            Fault::FlushScripts,
            Fault::KillSubscribers,
        ][random.random_range(0..7)];
        stage.suffer(fault, Some(0), &mut random);
        count += 1;
    }
    stage.heal();
    count
}

/// Threads, files and memory of a process.
fn process_facts(pid: u32) -> Vec<(String, f64)> {
    let files = fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count);
    vec![
        ("threads".to_owned(), testbed::threads(pid) as f64),
        ("fds".to_owned(), files as f64),
        ("RSS MiB".to_owned(), testbed::rss_kib(pid) as f64 / 1024.0),
    ]
}

/// The process that is watched. It ends with its standard input.
pub fn main() {
    let url = std::env::var(URL).expect("a URL");
    let seed = std::env::var(SEED).ok().and_then(|seed| seed.parse().ok());
    let stop: &'static AtomicBool = Box::leak(Box::default());
    thread::spawn(|| {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        stop.store(true, Ordering::SeqCst);
    });
    let factory = contend::connect(&url).expect("a URL of the soak");
    thread::scope(|scope| {
        scope.spawn(|| serve(&factory, seed.unwrap_or(0), stop));
        for number in 0..LOCKERS {
            let factory = &factory;
            scope.spawn(move || lock(factory, number, stop));
        }
    });
}

/// Services that lead, and are stopped and started one after the other.
fn serve(factory: &Factory, seed: u64, stop: &AtomicBool) {
    let mut random = StdRng::seed_from_u64(seed);
    let services: Vec<_> = (0..SERVICES)
        .map(|number| {
            let mutex = format!("service-{}", number / PER_MUTEX);
            let (service, events) = factory.contend(&mutex).channel().expect("a service");
            service.start().expect("a new service starts");
            (service, events)
        })
        .collect();
    while !stop.load(Ordering::SeqCst) {
        for (_, events) in &services {
            while events.try_recv().is_ok() {}
        }
        if random.random_range(0..20) == 0 {
            let (service, _) = &services[random.random_range(0..SERVICES)];
            let _ = service.stop();
            let _ = service.start();
        }
        thread::sleep(Duration::from_millis(50));
    }
}

fn lock(factory: &Factory, number: usize, stop: &AtomicBool) {
    let mut random = StdRng::seed_from_u64(number as u64);
    let mutex = format!("locker-{}", number / PER_MUTEX);
    let locker = factory.locker(&mutex).build().expect("a locker");
    while !stop.load(Ordering::SeqCst) {
        if let Ok(guard) = locker.try_lock_for(Duration::from_secs(2)) {
            thread::sleep(Duration::from_millis(random.random_range(0..10)));
            drop(guard);
        }
        thread::sleep(Duration::from_millis(random.random_range(10..100)));
    }
}

impl Soaked {
    /// The series that grew: the average of the last third lies above that of the first by more than a
    /// tenth and by more than what comes and goes.
    pub fn grown(&self) -> Vec<String> {
        self.series
            .iter()
            .filter(|series| {
                let third = (series.values.len() / 3).max(1);
                let first = average(&series.values[..third]);
                let last = average(&series.values[series.values.len() - third..]);
                last > first * 1.1 + self.comes_and_goes(series)
            })
            .map(|series| series.name.clone())
            .collect()
    }

    /// By how much a series may rise without having grown.
    fn comes_and_goes(&self, series: &Series) -> f64 {
        let connections = self.series.iter().find(|it| it.name == "connections");
        match (self.ground, connections) {
            // The MySQL driver reads through a buffer of 4 MiB per connection from its beginning to its end
            // before it uses it again: memory comes to that, slowly, and not beyond.
            (Ground::MySql, Some(connections)) if series.name == "RSS MiB" => {
                4.0 * connections.values.iter().copied().fold(0.0, f64::max)
            }
            _ => 3.0,
        }
    }

    /// A table: each series at the beginning, in the middle, at the end, and its bounds.
    pub fn table(&self) -> String {
        let mut text = format!(
            "soak {}: {} services, {} lockers, {:.0} s, {} faults\n\
             | | first third | last third | least | most |\n|---|---|---|---|---|\n",
            self.ground,
            SERVICES,
            LOCKERS,
            self.seconds.last().unwrap_or(&0.0),
            self.faults,
        );
        for series in &self.series {
            let third = (series.values.len() / 3).max(1);
            let first = average(&series.values[..third]);
            let last = average(&series.values[series.values.len() - third..]);
            let least = series.values.iter().copied().fold(f64::MAX, f64::min);
            let most = series.values.iter().copied().fold(f64::MIN, f64::max);
            let _ = writeln!(
                text,
                "| {} | {first:.1} | {last:.1} | {least:.1} | {most:.1} |",
                series.name
            );
        }
        text
    }

    /// A picture: one strip for each series, from zero.
    pub fn write_svg(&self, path: &Path) -> std::io::Result<PathBuf> {
        const WIDTH: f64 = 720.0;
        const STRIP: f64 = 64.0;
        const LEFT: f64 = 150.0;
        let height = STRIP * self.series.len() as f64 + 30.0;
        let last = self.seconds.last().copied().unwrap_or(1.0).max(1.0);
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {height}\" \
             font-family=\"sans-serif\" font-size=\"12\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
             <text x=\"8\" y=\"18\">soak {}: {SERVICES} services, {LOCKERS} lockers, {last:.0} s, {} faults</text>\n",
            LEFT + WIDTH + 90.0,
            self.ground,
            self.faults,
        );
        for (index, series) in self.series.iter().enumerate() {
            let top = 30.0 + STRIP * index as f64;
            let most = series.values.iter().copied().fold(1.0, f64::max);
            let mut points = String::new();
            for (second, value) in self.seconds.iter().zip(&series.values) {
                let x = LEFT + second / last * WIDTH;
                let y = top + STRIP - 8.0 - value / most * (STRIP - 16.0);
                let _ = write!(points, "{x:.1},{y:.1} ");
            }
            let base = top + STRIP - 8.0;
            let _ = writeln!(
                svg,
                "<text x=\"8\" y=\"{:.0}\">{}</text>\
                 <line x1=\"{LEFT}\" y1=\"{base}\" x2=\"{}\" y2=\"{base}\" stroke=\"#ccc\"/>\
                 <polyline points=\"{points}\" fill=\"none\" stroke=\"#2563eb\" stroke-width=\"1.2\"/>\
                 <text x=\"{}\" y=\"{:.0}\">{:.0}</text>",
                top + STRIP / 2.0,
                series.name,
                LEFT + WIDTH,
                LEFT + WIDTH + 8.0,
                top + 14.0,
                most,
            );
        }
        svg.push_str("</svg>\n");
        fs::write(path, svg)?;
        Ok(path.to_owned())
    }
}

fn average(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn soaked(values: Vec<f64>) -> Soaked {
        Soaked {
            ground: Ground::Memory,
            seconds: (0..values.len()).map(|second| second as f64).collect(),
            series: vec![Series {
                name: "threads".to_owned(),
                values,
            }],
            faults: 0,
        }
    }

    #[test]
    fn what_grows_is_seen_and_what_comes_and_goes_is_not() {
        let leak = soaked((0..60).map(|look| 100.0 + f64::from(look)).collect());
        assert_eq!(leak.grown(), ["threads"]);
        let flat = soaked((0..60).map(|look| 100.0 + f64::from(look % 7)).collect());
        assert!(flat.grown().is_empty());
        assert!(flat.table().contains("| threads | 10"));
    }
}
