//! What the processes of a test write: a line for each run, and one for each warning.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A run, as its process wrote it.
#[derive(Clone, Copy, Debug)]
pub struct Run {
    /// On the clock that all processes of the machine share.
    pub began: Duration,
    pub fence: u64,
    pub pid: u32,
}

pub fn runs(path: &Path) -> Vec<Run> {
    let runs = lines(path, "run ").into_iter();
    runs.map(|line| {
        let words: Vec<u64> = line.split(' ').map(|word| word.parse().unwrap()).collect();
        Run {
            began: Duration::from_micros(words[0]),
            fence: words[1],
            pid: u32::try_from(words[2]).unwrap(),
        }
    })
    .collect()
}

pub fn warnings(path: &Path) -> Vec<String> {
    lines(path, "log ")
}

/// The lines that begin so, without that.
fn lines(path: &Path, prefix: &str) -> Vec<String> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    // The last line may be half written.
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
    let lines = whole.lines().filter_map(|line| line.strip_prefix(prefix));
    lines.map(str::to_owned).collect()
}

pub fn write_run(path: &Path, fence: u64) {
    let now = contend::Moment::now().since_origin().as_micros();
    append(path, &format!("run {now} {fence} {}", std::process::id()));
}

/// Sends warnings and errors of this process into the journal.
pub fn log_to(path: &Path) {
    let logger: &'static Logger = Box::leak(Box::new(Logger(path.to_owned())));
    log::set_logger(logger).unwrap();
    log::set_max_level(log::LevelFilter::Warn);
}

struct Logger(PathBuf);

impl log::Log for Logger {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        let text = record.args().to_string().replace('\n', " ");
        append(&self.0, &format!("log {} {text}", record.level()));
    }

    fn flush(&self) {}
}

/// One write for one line, so that lines of two processes do not mix.
fn append(path: &Path, line: &str) {
    let file = OpenOptions::new().create(true).append(true).open(path);
    let mut file: File = file.unwrap();
    file.write_all(format!("{line}\n").as_bytes()).unwrap();
}
