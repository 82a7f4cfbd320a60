//! A `fork` copies memory but neither threads nor the right to use a connection: what was made by the
//! parent must be refused in the child.

use crate::error::{Error, ErrorKind, Result};

/// The process in which something was made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Origin {
    pid: u32,
}

impl Default for Origin {
    fn default() -> Origin {
        Origin::here()
    }
}

impl Origin {
    pub(crate) fn here() -> Origin {
        Origin {
            pid: std::process::id(),
        }
    }

    #[cfg(test)]
    pub(crate) fn elsewhere() -> Origin {
        Origin {
            pid: std::process::id().wrapping_add(1),
        }
    }

    /// Whether this is still that process. Where it is not, threads made there do not exist here:
    /// whoever joins one waits for ever.
    pub(crate) fn is_here(self) -> bool {
        self.pid == std::process::id()
    }

    pub(crate) fn check(self) -> Result<()> {
        if self.is_here() {
            Ok(())
        } else {
            Err(Error::new(
                ErrorKind::Forked,
                "this factory was made by the parent process; connect again after a fork",
            ))
        }
    }
}
