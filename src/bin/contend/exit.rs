//! Exit codes, those of `sysexits.h`, and the failures that they stand for.

use std::{fmt, io};

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
pub enum Failure {
    /// The library says why.
    Library(Error),
    /// The words on the command line contradict each other.
    Usage(String),
    /// The command could not be started.
    Command { program: String, error: io::Error },
    /// Standard output cannot be written to: its reader has gone away, or a disk is full.
    Output(io::Error),
}

impl Failure {
    pub fn code(&self) -> u8 {
        match self {
            Failure::Library(error) => code(error.kind()),
            Failure::Usage(_) => USAGE,
            Failure::Command { error, .. } if error.kind() == io::ErrorKind::NotFound => NOT_FOUND,
            Failure::Command { .. } => NOT_EXECUTABLE,
            Failure::Output(_) if self.is_silent() => SIGNAL + 13,
            Failure::Output(_) => OUTPUT,
        }
    }

    pub fn kind(&self) -> String {
        match self {
            Failure::Library(error) => error.kind().to_string(),
            Failure::Usage(_) => "usage".to_owned(),
            Failure::Command { .. } => "command".to_owned(),
            Failure::Output(_) => "output".to_owned(),
        }
    }

    /// Whether to end as if SIGPIPE had ended the program.
    pub fn is_silent(&self) -> bool {
        matches!(self, Failure::Output(error) if error.kind() == io::ErrorKind::BrokenPipe)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Library(error) => error.fmt(f),
            Failure::Usage(message) => message.fmt(f),
            Failure::Command { program, error } => write!(f, "cannot run {program:?}: {error}"),
            Failure::Output(error) => write!(f, "cannot write the output: {error}"),
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Library(error)
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
