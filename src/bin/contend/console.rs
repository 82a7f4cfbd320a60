//! What people and programs read: records on standard output, messages and the library's log on standard error.

use std::io::{self, Write};
use std::time::Duration;

use crossbeam_channel::Sender;
use jiff::{SignedDuration, Timestamp};
use log::{LevelFilter, Log, Metadata, Record};
use serde_json::Value;

use crate::exit::Failure;

#[derive(Clone, Copy)]
pub struct Console {
    json: bool,
    /// Standard output belongs to a command that runs beside this program.
    has_command: bool,
}

impl Console {
    pub fn new(json: bool) -> Console {
        Console {
            json,
            has_command: false,
        }
    }

    /// The console of a program that runs this command, if there is one: records go to standard error.
    pub fn beside(self, command: &[String]) -> Console {
        Console {
            has_command: !command.is_empty(),
            ..self
        }
    }

    pub fn is_json(self) -> bool {
        self.json
    }

    /// Writes a record: an object with `--json`, and `name=value` otherwise, without what is null.
    pub fn record(self, fields: &[(&str, Value)]) -> Result<(), Failure> {
        if self.json {
            return self.line(&object(fields));
        }
        let fields = fields.iter().filter(|(_, value)| !value.is_null());
        let words = fields.map(|(name, value)| match (*name, value) {
            ("at_ms", at) => date(at.as_u64().unwrap_or_default()),
            (name, Value::String(text)) => format!("{name}={text}"),
            (name, value) => format!("{name}={value}"),
        });
        self.line(&words.collect::<Vec<String>>().join("  "))
    }

    /// Writes text, and flushes it: the reader of a pipe sees it at once.
    pub fn line(self, text: &str) -> Result<(), Failure> {
        if self.has_command {
            write_error(text);
            return Ok(());
        }
        let mut out = io::stdout().lock();
        let written = out.write_all(format!("{text}\n").as_bytes());
        written.and_then(|()| out.flush()).map_err(Failure::Output)
    }

    /// Says why the program ends.
    pub fn failure(self, failure: &Failure) {
        let (error, code) = (failure.to_string(), failure.code());
        if self.json {
            let (error, kind) = (error.into(), failure.kind().into());
            write_error(&object(&[
                ("error", error),
                ("kind", kind),
                ("code", code.into()),
            ]));
        } else if !failure.is_silent() {
            message(&error);
        }
    }
}

/// Tells what becomes of one contender.
#[derive(Clone)]
pub struct Reporter {
    pub console: Console,
    pub mutex: String,
    pub id: String,
    /// Hears that what is told cannot be written: then there is nothing to contend for.
    pub unread: Sender<Failure>,
}

impl Reporter {
    pub fn tell(&self, event: &str, details: &[(&str, Value)]) {
        let (mutex, id) = (self.mutex.as_str().into(), self.id.as_str().into());
        let mut fields = vec![
            ("at_ms", now_ms().into()),
            ("mutex", mutex),
            ("contender", id),
        ];
        fields.push(("event", event.into()));
        fields.extend_from_slice(details);
        if let Err(failure) = self.console.record(&fields) {
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

/// In the order given, which `serde_json` does not keep.
fn object(fields: &[(&str, Value)]) -> String {
    let fields = fields.iter();
    let fields: Vec<String> = fields
        .map(|(name, value)| format!("\"{name}\":{value}"))
        .collect();
    format!("{{{}}}", fields.join(","))
}

struct Logger;

/// Shows the library's log: warnings, or more.
pub fn show_log(verbose: u8) {
    let level = match verbose {
        0 => LevelFilter::Warn,
        1 => LevelFilter::Info,
        2 => LevelFilter::Debug,
        _ => LevelFilter::Trace,
    };
    // Fails only where there is a logger already, and there is none.
    if log::set_logger(&Logger).is_ok() {
        log::set_max_level(level);
    }
}

impl Log for Logger {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        // The drivers' own logs say what they do, not what it means.
        metadata.target().starts_with("contend")
    }

    fn log(&self, record: &Record<'_>) {
        if self.enabled(record.metadata()) {
            let level = record.level().as_str().to_lowercase();
            message(&format!("{} {level} {}", date(now_ms()), record.args()));
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

/// A duration such as `4s 200ms` or `3m 20s`.
pub fn span(duration: Duration) -> String {
    let shown = match duration.as_secs() {
        0..10 => Duration::from_millis(100 * (duration.as_millis() / 100) as u64),
        seconds => Duration::from_secs(seconds),
    };
    format!("{:#}", SignedDuration::try_from(shown).unwrap_or_default())
}
