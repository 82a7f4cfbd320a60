//! `SessionState`: what is known about a session.

/// How a session stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SessionState {
    /// Not opened yet: no server has answered so far.
    Connecting,
    /// A server answers.
    Connected,
    /// The connection is lost. The session may be alive or not; only a server can tell.
    Suspended,
    /// A server said so: the session is over, with all its nodes and watches. Final.
    Expired,
    /// Closed by its owner. Final.
    Closed,
}

impl SessionState {
    pub(super) fn is_over(self) -> bool {
        matches!(self, SessionState::Expired | SessionState::Closed)
    }
}
