//! The library's log on standard error.

use log::{Level, LevelFilter, Log, Metadata, Record};

use crate::console::{Console, date, now, wall_ms};

struct Logger {
    console: Console,
}

/// Shows the log: errors, or what `verbose` asks for.
pub fn install(console: &Console, verbose: u8, warnings: bool) {
    let level = match verbose {
        0 if warnings => LevelFilter::Warn,
        0 => LevelFilter::Error,
        1 => LevelFilter::Info,
        2 => LevelFilter::Debug,
        _ => LevelFilter::Trace,
    };
    // Fails only where there is a logger already, and there is none.
    if log::set_boxed_logger(Box::new(Logger { console: *console })).is_ok() {
        log::set_max_level(level);
    }
}

impl Log for Logger {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        // The drivers' own logs say what they do, not what it means.
        metadata.target().starts_with("contend")
    }

    fn log(&self, record: &Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        let (level, message) = (word(record.level()), record.args().to_string());
        let event = now()
            .with("event", "log")
            .with("level", level)
            .with("target", record.target())
            .with("message", &message);
        self.console
            .message(event, &format!("{} {level} {message}", date(wall_ms())));
    }

    fn flush(&self) {}
}

fn word(level: Level) -> &'static str {
    match level {
        Level::Error => "error",
        Level::Warn => "warn",
        Level::Info => "info",
        Level::Debug => "debug",
        Level::Trace => "trace",
    }
}
