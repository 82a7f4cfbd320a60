//! Exit codes, those of `sysexits.h`, and the failures that they stand for.

use std::io;
use std::thread;
use std::time::Duration;

use contend::{Contact, Error, ErrorKind, Factory};
use crossbeam_channel::{Receiver, bounded};

use crate::advice;
use crate::console::Console;
use crate::json::Json;

/// The command line is not understood (`EX_USAGE`).
pub const USAGE: u8 = 64;
/// No such mutex, semaphore or request (`EX_NOINPUT`).
pub const NO_SUCH: u8 = 66;
/// The external id was released already (`EX_CANTCREAT`).
pub const ALREADY_RELEASED: u8 = 73;
/// Held by another contender, or exhausted (`EX_TEMPFAIL`).
pub const HELD: u8 = 75;
/// What was held was lost (`EX_PROTOCOL`: the agreement did not hold).
pub const LOST: u8 = 76;

/// The request contradicts an earlier one, or what there is (`EX_DATAERR`).
const CONFLICT: u8 = 65;
/// The server cannot be used now (`EX_UNAVAILABLE`).
const UNAVAILABLE: u8 = 69;
/// An error inside contend (`EX_SOFTWARE`).
const SOFTWARE: u8 = 70;
/// The output cannot be written (`EX_IOERR`).
const OUTPUT: u8 = 74;
/// The server denied access (`EX_NOPERM`).
const DENIED: u8 = 77;
/// The server is not set up for this (`EX_CONFIG`).
const MISCONFIGURED: u8 = 78;
/// As shells have it.
const NOT_EXECUTABLE: u8 = 126;
const NOT_FOUND: u8 = 127;
/// What ended by signal n exits with this + n.
const SIGNAL: u8 = 128;

/// How long a server has to refuse its first call.
const FIRST_ANSWER: Duration = Duration::from_secs(5);

/// Why the tool did not do what it was asked to.
pub enum Failure {
    /// The library says why.
    Library(Error),
    /// The words on the command line contradict each other.
    Usage(String),
    /// The command could not be started.
    Command { program: String, error: io::Error },
    /// Standard output cannot be written to: whoever read it has gone away, or a disk is full.
    Output(io::Error),
}

impl Failure {
    pub fn code(&self) -> u8 {
        match self {
            Failure::Library(error) => code(error.kind()),
            Failure::Usage(_) => USAGE,
            Failure::Command { error, .. } if error.kind() == io::ErrorKind::NotFound => NOT_FOUND,
            Failure::Command { .. } => NOT_EXECUTABLE,
            // As if SIGPIPE had ended us.
            Failure::Output(error) if error.kind() == io::ErrorKind::BrokenPipe => SIGNAL + 13,
            Failure::Output(_) => OUTPUT,
        }
    }

    pub fn show(&self, console: &Console) {
        let (message, kind) = match self {
            Failure::Library(error) => (advice::message(error), error.kind().to_string()),
            Failure::Usage(message) => (message.clone(), "usage".to_owned()),
            Failure::Command { program, error } => {
                let message = format!("cannot run {program:?}: {error}");
                (message, "command".to_owned())
            }
            Failure::Output(error) if error.kind() == io::ErrorKind::BrokenPipe => return,
            Failure::Output(error) => {
                let message = format!("cannot write the output: {error}");
                (message, "output".to_owned())
            }
        };
        console.message(details(Json::new(), &message, &kind, self.code()), &message);
    }
}

/// Adds what `--json` says of an error, wherever one is printed.
pub fn with_error(json: Json, error: &Error) -> Json {
    let kind = error.kind();
    details(json, &advice::message(error), &kind.to_string(), code(kind))
}

fn details(json: Json, message: &str, kind: &str, code: u8) -> Json {
    json.with("error", message)
        .with("kind", kind)
        .with("code", u32::from(code))
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Library(error)
    }
}

/// Hears of an error that a retry cannot fix, if the server has one for the first call: a wrong password, a missing
/// table. Whoever waits for a signal should not wait beside that; a server that is only away comes back.
pub fn refused(factory: &Factory) -> Receiver<Error> {
    let (refused, receiver) = bounded(1);
    let factory = factory.clone();
    thread::spawn(move || match factory.ping(FIRST_ANSWER) {
        Err(error) if matches!(code(error.kind()), DENIED | MISCONFIGURED) => {
            let _ = refused.send(error);
        }
        // Left open: a channel that is closed would wake whoever selects on it, again and again.
        _ => std::mem::forget(refused),
    });
    receiver
}

/// The exit code of a program that ran until it was told to end, or was [`refused`], to be asked for when its
/// services have stopped: that of their last error before that, if the server never answered or a retry cannot help.
///
/// Their own errors: the factory's contact is fine as soon as the server answers anything, even where every
/// call for a mutex fails.
///
/// # Errors
/// The log has shown the errors before the stop. If there was none because the first call was still under way, or
/// not sent yet, and no answer came during the stop either, that is returned as a failure, to be shown.
pub fn at_the_end(
    factory: &Factory,
    error: Option<&Error>,
    refusal: Option<Error>,
) -> Result<u8, Failure> {
    if let Some(refusal) = refusal {
        let kind = refusal.kind();
        let is_logged = error.map(Error::kind) == Some(kind);
        return if is_logged {
            Ok(code(kind))
        } else {
            Err(refusal.into())
        };
    }
    let health = factory.health();
    match (error.map(|error| code(error.kind())), health.last_contact) {
        (Some(UNAVAILABLE) | None, Some(_)) => Ok(0),
        (Some(code), _) => Ok(code),
        (None, None) => Err(match health.contact {
            Contact::Failing { error, .. } => error.into(),
            _ => {
                let message = format!("{}: stopped before the server answered", health.realm);
                Error::new(ErrorKind::Timeout, message).into()
            }
        }),
    }
}

/// The exit code of what a signal has ended.
pub fn by_signal(signal: i32) -> u8 {
    u8::try_from(i32::from(SIGNAL) + signal).unwrap_or(u8::MAX)
}

/// The exit code for an error of this kind.
pub fn code(kind: ErrorKind) -> u8 {
    match kind {
        ErrorKind::InvalidInput | ErrorKind::DuplicateContender => USAGE,
        ErrorKind::Conflict => CONFLICT,
        ErrorKind::NotFound => NO_SUCH,
        ErrorKind::Unreachable
        | ErrorKind::Timeout
        | ErrorKind::Unavailable
        | ErrorKind::Protocol => UNAVAILABLE,
        ErrorKind::Held | ErrorKind::Exhausted => HELD,
        ErrorKind::Lost => LOST,
        ErrorKind::Denied => DENIED,
        ErrorKind::Misconfigured | ErrorKind::FeatureDisabled | ErrorKind::Unsupported => {
            MISCONFIGURED
        }
        _ => SOFTWARE,
    }
}
