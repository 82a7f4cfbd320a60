//! Exit codes, those of `sysexits.h`, and the failures that they stand for.

use std::io;

use contend::{Error, ErrorKind};

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

/// Why the program did not do what it was asked to.
pub struct Failure {
    pub code: u8,
    pub kind: String,
    /// Empty where a signal has ended it.
    pub message: String,
}

impl Failure {
    fn new(code: u8, kind: impl ToString, message: impl Into<String>) -> Failure {
        Failure {
            code,
            kind: kind.to_string(),
            message: message.into(),
        }
    }

    /// The words on the command line contradict each other.
    pub fn usage(message: &str) -> Failure {
        Failure::new(USAGE, "usage", message)
    }

    /// The command could not be started.
    pub fn command(program: &str, error: &io::Error) -> Failure {
        let not_found = error.kind() == io::ErrorKind::NotFound;
        let code = if not_found { NOT_FOUND } else { NOT_EXECUTABLE };
        Failure::new(code, "command", format!("cannot run {program:?}: {error}"))
    }

    /// Standard output cannot be written to: its reader has gone away, or a disk is full.
    pub fn output(error: &io::Error) -> Failure {
        if error.kind() == io::ErrorKind::BrokenPipe {
            return Failure::signal(13);
        }
        let message = format!("cannot write the output: {error}");
        Failure::new(OUTPUT, "output", message)
    }

    /// A signal has ended it, or as good as that: there is nothing to say.
    pub fn signal(signal: i32) -> Failure {
        Failure::new(by_signal(signal), "signal", "")
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        let mut message = error.to_string();
        if error.kind() == ErrorKind::Unreachable {
            message += "; check the URL, and that the server runs";
        }
        Failure::new(code(error.kind()), error.kind(), message)
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
