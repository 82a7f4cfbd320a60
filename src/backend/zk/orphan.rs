//! Nodes that nobody holds any more. The session lives on, so unlike those of a dead process they
//! would stand in the line for ever.

/// A node of the present session that must go.
#[derive(Clone, Debug)]
pub(super) enum Orphan {
    /// It is there, unless a deletion whose answer was lost got through.
    Node(String),
    /// It may be there: its creation was not answered. Looked for by its protection, after a `sync`,
    /// because the server that we talk to now may not have heard of it yet. Only the session's own
    /// nodes begin like this.
    Protected {
        mutex_path: String,
        protection: String,
    },
}

impl Orphan {
    pub(super) fn is(&self, name: &str) -> bool {
        matches!(self, Orphan::Protected { protection, .. } if name.starts_with(protection))
    }

    pub(super) fn path(&self) -> &str {
        match self {
            Orphan::Node(path) => path,
            Orphan::Protected { mutex_path, .. } => mutex_path,
        }
    }
}
