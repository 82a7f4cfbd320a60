//! What people and programs read: records on standard output, messages and the library's log on standard error.

use std::io::{self, Write};

use contend::Error;
use crossbeam_channel::{Receiver, Sender, bounded};
use jiff::Timestamp;
use log::{LevelFilter, Log, Metadata, Record};
use serde_json::{Value, json};

use crate::exit::Failure;

#[derive(Clone, Copy, Default)]
pub struct Console {
    pub json: bool,
    /// Standard output belongs to a command that runs beside this program.
    pub has_command: bool,
}

impl Console {
    /// Writes a record: the object with `--json`, and the text otherwise.
    pub fn record(self, json: &Value, text: impl FnOnce() -> String) -> Result<(), Failure> {
        self.line(&if self.json { json.to_string() } else { text() })
    }

    /// Writes text, and flushes it: the reader of a pipe sees it at once.
    pub fn line(self, text: &str) -> Result<(), Failure> {
        if self.has_command {
            write_error(text);
            return Ok(());
        }
        let mut out = io::stdout().lock();
        let written = out.write_all(format!("{text}\n").as_bytes());
        let written = written.and_then(|()| out.flush());
        written.map_err(|error| Failure::output(&error))
    }

    /// Says why the program ends.
    pub fn failure(
        self,
        Failure {
            code,
            kind,
            message,
        }: &Failure,
    ) {
        let json = json!({"error": message, "kind": kind, "code": code});
        match self.json {
            _ if message.is_empty() => {}
            true => write_error(&json.to_string()),
            false => self::message(message),
        }
    }
}

/// Tells what becomes of one contender.
#[derive(Clone)]
pub struct Reporter {
    console: Console,
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
        let has_command = !command.is_empty();
        let reporter = Reporter {
            console: Console {
                has_command,
                ..console
            },
            mutex: mutex.to_owned(),
            id: id.to_owned(),
            unread,
        };
        (reporter, no_reader)
    }

    pub fn tell(&self, event: &str, mut json: Value) {
        let (mutex, id, at) = (&self.mutex, &self.id, now_ms());
        let mut text = format!("{} {mutex}: {id} {event}", date(at));
        for (name, value) in json.as_object().into_iter().flatten() {
            if !value.is_null() {
                text += &format!(", {name} {value}");
            }
        }
        json["at_ms"] = at.into();
        json["mutex"] = mutex.as_str().into();
        json["contender"] = id.as_str().into();
        json["event"] = event.into();
        if let Err(failure) = self.console.record(&json, || text) {
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

/// Says for what the program waits. From here on, it shows warnings too.
pub fn waiting(error: &Error) {
    message(&format!("waiting: {error}"));
    log::set_max_level(log::max_level().max(LevelFilter::Warn));
}

struct Logger;

/// Shows the library's log: errors, warnings of what runs for long, or more.
pub fn show_log(verbose: u8, runs_for_long: bool) {
    let level = match verbose {
        0 if !runs_for_long => LevelFilter::Error,
        0 => LevelFilter::Warn,
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
