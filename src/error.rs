//! The one error type of the crate.

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;

/// The result of a fallible call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a call failed: a stable [`ErrorKind`], a message that says what to do, and the cause.
///
/// No message, `Debug` output or cause ever contains a credential.
///
/// ```
/// use contend::ErrorKind;
///
/// let error = contend::connect("memory://?tll=5s").unwrap_err();
/// assert_eq!(error.kind(), ErrorKind::InvalidInput);
/// assert!(!error.is_transient()); // a retry cannot help
/// println!("{error}"); // names the parameter, and the valid ones
/// ```
#[derive(Clone)]
pub struct Error {
    kind: ErrorKind,
    message: Box<str>,
    source: Option<Arc<dyn StdError + Send + Sync>>,
    /// Nothing was sent to the server, so nothing can have happened there.
    not_sent: bool,
}

/// The kinds of [`Error`], for code that must distinguish them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A name, id, duration, URL or option that is not allowed; nothing was done.
    InvalidInput,
    /// The URL names a backend whose Cargo feature is off.
    FeatureDisabled,
    /// Another live service or locker of this factory contends for the same mutex under the same id.
    DuplicateContender,
    /// The call is not allowed in the current state, such as starting a running service.
    InvalidState,
    /// The backend cannot be reached, or the connection broke; the outcome may be unknown.
    Unreachable,
    /// The backend, or a peer in this process, did not answer in time; the outcome may be unknown.
    Timeout,
    /// The backend answers, but cannot serve now: loading, failing over, read-only, too many connections.
    Unavailable,
    /// The backend refuses access: wrong password, missing privilege. Retrying will not help.
    Denied,
    /// The backend is not set up for contend: missing table, wrong server version. Retrying will not
    /// help.
    Misconfigured,
    /// The backend sent an answer that could not be understood.
    Protocol,
    /// Another contender or thread holds the lock.
    Held,
    /// This thread already holds the lock.
    Reentrant,
    /// Ownership ended before the call could do its work.
    Lost,
    /// A semaphore does not have enough free permits.
    Exhausted,
    /// No such mutex row, semaphore or request.
    NotFound,
    /// The request contradicts an earlier one with the same external id.
    Conflict,
    /// The factory belongs to the parent process: connect again after a `fork`.
    Forked,
    /// The session with the backend was closed, because its factory was dropped.
    Closed,
    /// The wait was ended by a [`Cancel`](crate::Cancel).
    Cancelled,
    /// This backend does not support the operation.
    Unsupported,
    /// The backend panicked: a bug in it.
    Panicked,
}

impl Error {
    /// Creates an error of `kind`, for backends.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Error {
        Error {
            kind,
            message: message.into().into_boxed_str(),
            source: None,
            not_sent: false,
        }
    }

    /// Marks that nothing was sent to the server: the outcome is known, nothing happened there.
    #[must_use]
    pub fn not_sent(mut self) -> Error {
        self.not_sent = true;
        self
    }

    /// Takes that back: an earlier request of the same call was sent, or left something on the server.
    #[must_use]
    #[cfg(any(feature = "mysql", feature = "redis", feature = "zk"))]
    pub(crate) fn perhaps_sent(mut self) -> Error {
        self.not_sent = false;
        self
    }

    /// Returns `true` if the call failed before anything was sent to the server.
    #[must_use]
    pub fn is_not_sent(&self) -> bool {
        self.not_sent
    }

    /// Returns the same error with its cause. The caller guarantees that the cause shows no credential.
    #[must_use]
    pub fn with_source(mut self, source: impl StdError + Send + Sync + 'static) -> Error {
        self.source = Some(Arc::new(source));
        self
    }

    /// Returns the same error with its message prefixed by `what`, such as the mutex that it is about.
    ///
    /// ```
    /// use contend::{Error, ErrorKind};
    ///
    /// let error = Error::new(ErrorKind::Timeout, "no answer within 2s").context("reports");
    /// assert_eq!(error.to_string(), "reports: no answer within 2s");
    /// ```
    #[must_use]
    pub fn context(mut self, what: impl fmt::Display) -> Error {
        self.message = format!("{what}: {}", self.message).into_boxed_str();
        self
    }

    /// Returns the kind of this error.
    ///
    /// ```
    /// use contend::ErrorKind;
    ///
    /// let factory = contend::connect("memory://kind-doc")?;
    /// let guard = factory.locker("reports").build()?.lock()?.detach();
    /// match factory.locker("reports").build()?.try_lock() {
    ///     Ok(_) => println!("locked"),
    ///     Err(error) if error.kind() == ErrorKind::Held => println!("{error}"),
    ///     Err(error) => return Err(error),
    /// }
    /// # drop(guard);
    /// # Ok::<(), contend::Error>(())
    /// ```
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// Returns `true` if the same call may succeed later without any change of program, server or settings.
    ///
    /// ```
    /// use contend::{Error, ErrorKind};
    ///
    /// assert!(Error::new(ErrorKind::Unreachable, "connection refused").is_transient());
    /// assert!(!Error::new(ErrorKind::Denied, "wrong password").is_transient());
    /// ```
    #[must_use]
    pub fn is_transient(&self) -> bool {
        matches!(
            self.kind,
            ErrorKind::Unreachable
                | ErrorKind::Timeout
                | ErrorKind::Unavailable
                | ErrorKind::Held
                | ErrorKind::Lost
                | ErrorKind::Exhausted
                | ErrorKind::Panicked
        )
    }

    pub(crate) fn invalid(message: impl Into<String>) -> Error {
        Error::new(ErrorKind::InvalidInput, message)
    }
}

impl fmt::Display for ErrorKind {
    /// The kind in words, such as "misconfigured".
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ErrorKind::InvalidInput => "invalid input",
            ErrorKind::FeatureDisabled => "feature disabled",
            ErrorKind::DuplicateContender => "duplicate contender",
            ErrorKind::InvalidState => "invalid state",
            ErrorKind::Unreachable => "unreachable",
            ErrorKind::Timeout => "timeout",
            ErrorKind::Unavailable => "unavailable",
            ErrorKind::Denied => "denied",
            ErrorKind::Misconfigured => "misconfigured",
            ErrorKind::Protocol => "protocol error",
            ErrorKind::Held => "held",
            ErrorKind::Reentrant => "reentrant",
            ErrorKind::Lost => "lost",
            ErrorKind::Exhausted => "exhausted",
            ErrorKind::NotFound => "not found",
            ErrorKind::Conflict => "conflict",
            ErrorKind::Forked => "forked",
            ErrorKind::Closed => "closed",
            ErrorKind::Cancelled => "cancelled",
            ErrorKind::Unsupported => "unsupported",
            ErrorKind::Panicked => "panicked",
        })
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = f.debug_struct("Error");
        out.field("kind", &self.kind)
            .field("message", &self.message);
        if let Some(source) = &self.source {
            out.field("source", &source.to_string());
        }
        out.finish()
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.source
            .as_ref()
            .map(|source| &**source as &(dyn StdError + 'static))
    }
}
