//! What people and programs read: lines on standard output, messages on standard error, as text or JSON.

use std::io::{self, IsTerminal, Write};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crossbeam_channel::{Sender, bounded};

use crate::exit::Failure;
use crate::json::Json;

/// How many messages wait for a standard error that is not read; what comes then is dropped.
const BACKLOG: usize = 1024;

/// How long the end of the program waits for its messages to be written.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// The two streams, and how to write to them.
///
/// Messages on standard error are written by a thread that nobody waits for: where nobody reads it, a write
/// blocks forever, and no lock, command or signal may depend on that. Lines on standard output do block:
/// they are what the program is for. None is written beside a command, see `beside`.
#[derive(Clone, Copy)]
pub struct Console {
    json: bool,
    /// Standard output belongs to a command that runs beside us.
    has_command: bool,
}

impl Console {
    pub fn new(json: bool) -> Console {
        Console {
            json,
            has_command: false,
        }
    }

    /// The console of a program that runs this command, if there is one: what would go to standard output
    /// goes to standard error.
    pub fn beside(self, command: &[String]) -> Console {
        Console {
            has_command: !command.is_empty(),
            ..self
        }
    }

    pub fn is_json(&self) -> bool {
        self.json
    }

    /// Whether a person looks at standard output.
    pub fn is_terminal(&self) -> bool {
        !self.json && io::stdout().is_terminal()
    }

    /// Writes a line, and flushes it: whoever reads a pipe sees it at once.
    pub fn line(&self, text: &str) -> Result<(), Failure> {
        if self.has_command {
            self.write_message(text);
            return Ok(());
        }
        self.text(&format!("{text}\n"))
    }

    /// Writes text as it is, and flushes it.
    pub fn text(&self, text: &str) -> Result<(), Failure> {
        let mut out = io::stdout().lock();
        let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
        written.map_err(Failure::Output)
    }

    /// Writes the object with `--json`, and the text otherwise.
    pub fn either(
        &self,
        json: impl FnOnce() -> Json,
        text: impl FnOnce() -> String,
    ) -> Result<(), Failure> {
        self.line(&if self.json { json().end() } else { text() })
    }

    /// Has a message written to standard error. Never blocks; a reader that has gone away is no reason to
    /// stop.
    pub fn message(&self, event: Json, text: &str) {
        if self.json {
            self.write_message(&event.end());
        } else {
            self.write_message(text);
        }
    }

    fn write_message(&self, text: &str) {
        let messages = Messages::get();
        let dropped = messages.dropped.swap(0, Ordering::Relaxed);
        if dropped > 0 {
            let dropped_messages = count(dropped, "message");
            let text = format!("{dropped_messages} dropped: standard error was not read");
            let event = now().with("event", "log").with("message", &text);
            if !messages.send(self.message_line(&if self.json { event.end() } else { text })) {
                messages.dropped.fetch_add(dropped, Ordering::Relaxed);
            }
        }
        if !messages.send(self.message_line(text)) {
            messages.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn message_line(&self, text: &str) -> String {
        let speaker = if self.json { "" } else { "contend: " };
        format!("{speaker}{text}\n")
    }

    /// Has something worth knowing written to standard error.
    pub fn log(&self, text: &str) {
        self.message(now().with("event", "log").with("message", text), text);
    }
}

static MESSAGES: OnceLock<Messages> = OnceLock::new();

/// Messages on their way to standard error.
struct Messages {
    sender: Sender<Message>,
    dropped: AtomicU64,
}

enum Message {
    Line(String),
    /// Answered when everything before it has been written.
    Mark(Sender<()>),
}

impl Messages {
    fn get() -> &'static Messages {
        MESSAGES.get_or_init(Messages::start)
    }

    fn start() -> Messages {
        let (sender, messages) = bounded(BACKLOG);
        // Without a thread there are no messages; the lock matters more.
        let _ = thread::Builder::new().spawn(move || {
            for message in messages {
                // A reader that has gone away may come back, as one that opens a named pipe does.
                let _ = match message {
                    // In one piece: the command may write to the same stream.
                    Message::Line(line) => io::stderr().write_all(line.as_bytes()).ok(),
                    Message::Mark(written) => written.send(()).ok(),
                };
            }
        });
        Messages {
            sender,
            dropped: AtomicU64::new(0),
        }
    }

    /// Returns whether there was room.
    fn send(&self, line: String) -> bool {
        self.sender.try_send(Message::Line(line)).is_ok()
    }
}

/// Waits until the messages have been written, for a short time: to be called when nothing is held any more.
pub fn flush_messages() {
    let Some(messages) = MESSAGES.get() else {
        return;
    };
    let end = Instant::now() + LAST_WORDS;
    let (mark, written) = bounded(1);
    let sent = messages.sender.send_deadline(Message::Mark(mark), end);
    if sent.is_ok() {
        let _ = written.recv_deadline(end);
    }
}

/// Begins an object with the wall clock's time, as every event does.
pub fn now() -> Json {
    Json::new().with("at_ms", wall_ms())
}

/// The wall clock in epoch milliseconds: for people, never for a decision.
pub fn wall_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    u64::try_from(now.unwrap_or_default().as_millis()).unwrap_or(u64::MAX)
}

/// Epoch milliseconds as `2026-11-17 03:10:03 UTC`.
pub fn date(epoch_ms: u64) -> String {
    let seconds = epoch_ms / 1000;
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // Howard Hinnant's days_from_civil, turned around: years begin in March.
    let shifted = days + 719_468;
    let era = shifted / 146_097;
    let day_of_era = shifted % 146_097;
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 {
        month_from_march + 3
    } else {
        month_from_march - 9
    };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
    format!("{year}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02} UTC")
}

/// So many of a thing whose plural is regular: `1 request`, `2 requests`.
pub fn count(number: impl TryInto<u64>, thing: &str) -> String {
    let number = number.try_into().unwrap_or(u64::MAX);
    let plural = if number == 1 { "" } else { "s" };
    format!("{number} {thing}{plural}")
}

/// A duration as a person says it: `340 ms`, `4.2 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`.
pub fn span(duration: Duration) -> String {
    let ms = duration.as_millis();
    let seconds = duration.as_secs();
    match seconds {
        0 => format!("{ms} ms"),
        1..60 => format!("{:.1} s", duration.as_secs_f64()),
        60..3600 => format!("{} min {} s", seconds / 60, seconds % 60),
        3600..86_400 => format!("{} h {} min", seconds / 3600, seconds / 60 % 60),
        _ => format!("{} d {} h", seconds / 86_400, seconds / 3600 % 24),
    }
}
