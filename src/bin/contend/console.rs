//! What people and programs read: records on standard output, messages and the library's log on standard error.

use std::io::{self, Write};

use crossbeam_channel::{Receiver, Sender, bounded};
use jiff::Timestamp;
use log::{LevelFilter, Log, Metadata, Record};
use serde_json::{Value, json};

use crate::exit::Failure;

#[derive(Clone, Copy)]
pub struct Console {
    pub json: bool,
}

impl Console {
    /// Writes a record: the object with `--json`, and otherwise its fields, names first, without what is null.
    /// Returns the exit code of what is done with it.
    pub fn record(self, json: &Value) -> Result<u8, Failure> {
        line(&self.render(json))
    }

    fn render(self, json: &Value) -> String {
        if self.json {
            return json.to_string();
        }
        let fields = json.as_object().into_iter().flatten();
        let fields = fields.filter(|(name, value)| *name != "at_ms" && !value.is_null());
        let (mut names, numbers): (Vec<_>, Vec<_>) = fields.partition(|(_, it)| it.is_string());
        names.extend(numbers);
        let words = names.iter().map(|(name, value)| format!("{name} {value}"));
        let at = json["at_ms"].as_u64().map(|at| format!("{}  ", date(at)));
        at.unwrap_or_default() + &words.collect::<Vec<_>>().join(", ")
    }

    /// Says why the program ends.
    pub fn failure(self, failure: &Failure) {
        let message = &failure.message;
        let json = json!({"error": message, "kind": failure.kind, "code": failure.code});
        match self.json {
            _ if message.is_empty() => {}
            true => write_error(&json.to_string()),
            false => self::message(message),
        }
    }
}

/// Writes text, and flushes it: the reader of a pipe sees it at once.
pub fn line(text: &str) -> Result<u8, Failure> {
    let mut out = io::stdout().lock();
    let written = out.write_all(format!("{text}\n").as_bytes());
    let written = written.and_then(|()| out.flush());
    written.map_or_else(|error| Err(Failure::output(&error)), |()| Ok(0))
}

/// Tells what becomes of one contender.
#[derive(Clone)]
pub struct Reporter {
    console: Console,
    has_command: bool,
    mutex: String,
    id: String,
    unread: Sender<Failure>,
}

impl Reporter {
    /// Returns what hears, too, that its records cannot be written: then there is nothing to contend for. Beside a
    /// command, to which standard output belongs, they go to standard error.
    pub fn new(
        console: Console,
        mutex: &str,
        id: &str,
        command: &[String],
    ) -> (Reporter, Receiver<Failure>) {
        let (unread, no_reader) = bounded(1);
        let reporter = Reporter {
            console,
            has_command: !command.is_empty(),
            mutex: mutex.to_owned(),
            id: id.to_owned(),
            unread,
        };
        (reporter, no_reader)
    }

    pub fn tell(&self, event: &str, mut json: Value) {
        json["at_ms"] = now_ms().into();
        json["mutex"] = self.mutex.as_str().into();
        json["contender"] = self.id.as_str().into();
        json["event"] = event.into();
        let text = self.console.render(&json);
        if self.has_command {
            write_error(&text);
        } else if let Err(failure) = line(&text) {
            // Full is fine: the first failure counts.
            let _ = self.unread.try_send(failure);
        }
    }
}

/// Writes something worth knowing to standard error.
pub fn message(text: &str) {
    write_error(&format!("contend: {text}"));
}

/// In one piece: a command may write to the same stream. A reader that has gone away is no reason to stop.
fn write_error(line: &str) {
    let _ = io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// Shows warnings of the library from here on: of what no call returns.
pub fn show_warnings() {
    log::set_max_level(log::max_level().max(LevelFilter::Warn));
}

struct Logger;

/// Shows the library's log: errors, or more.
pub fn show_log(verbose: u8) {
    let level = match verbose {
        0 => LevelFilter::Error,
        1 => LevelFilter::Info,
        2 => LevelFilter::Debug,
        _ => LevelFilter::Trace,
    };
    // Fails only where there is a logger already, and there is none.
    let _ = log::set_logger(&Logger);
    log::set_max_level(level);
}

impl Log for Logger {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        // The drivers' own logs say what they do, not what it means.
        metadata.target().starts_with("contend")
    }

    fn log(&self, record: &Record<'_>) {
        if self.enabled(record.metadata()) {
            let (at, level, text) = (date(now_ms()), record.level(), record.args());
            message(&format!("{at} {level} {text}"));
        }
    }

    fn flush(&self) {}
}

/// The wall clock in epoch milliseconds: to be shown, never for a decision.
pub fn now_ms() -> u64 {
    u64::try_from(Timestamp::now().as_millisecond()).unwrap_or_default()
}

/// Epoch milliseconds as `2026-11-17 03:10:03 UTC`.
pub fn date(epoch_ms: u64) -> String {
    let ms = i64::try_from(epoch_ms).unwrap_or(i64::MAX);
    let timestamp = Timestamp::from_millisecond(ms).unwrap_or(Timestamp::MAX);
    timestamp.strftime("%F %T UTC").to_string()
}
