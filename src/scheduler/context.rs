//! `Context`: what scheduled work is told.

use std::sync::Arc;

use crate::bell::Bell;
use crate::service::Board;

/// What a run of scheduled work can ask about the leadership that it runs in.
///
/// Long work looks at [`cancelled`](Context::cancelled) between its steps, and passes
/// [`fence`](Context::fence) to what it writes to. A clone may go to threads that help with the work.
///
/// ```
/// use contend::{Context, ScheduleConfig};
/// use std::time::Duration;
///
/// fn clean_up(context: &Context) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
///     for table in ["a", "b", "c"] {
///         if context.cancelled() {
///             break; // somebody else goes on
///         }
///         println!("cleaning up {table} with fence {}", context.fence());
///     }
///     Ok(())
/// }
///
/// let factory = contend::connect("memory://context-doc")?;
/// let hourly = ScheduleConfig::rate(Duration::ZERO, Duration::from_secs(3600));
/// factory.scheduler("clean-up").build(hourly, clean_up)?.start()?;
/// # Ok::<(), contend::Error>(())
/// ```
#[derive(Clone)]
pub struct Context {
    pub(super) fence: u64,
    pub(super) board: Arc<Board>,
    pub(super) bell: Bell,
}

impl Context {
    /// The fence of the leadership that this run began in: larger than that of every earlier leader.
    #[must_use]
    pub fn fence(&self) -> u64 {
        self.fence
    }

    /// Whether this process leads still, in the leadership that this run began in: right at the moment of
    /// the call, and false from the end of the ttl on where the backend could not be reached. The
    /// transition is left to stop in.
    #[must_use]
    pub fn is_leader(&self) -> bool {
        self.board.fence() == Some(self.fence)
    }

    /// Whether to stop: leadership is gone, or the scheduler was told to stop and waits for this run.
    #[must_use]
    pub fn cancelled(&self) -> bool {
        self.bell.is_stopped() || !self.is_leader()
    }
}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Context")
            .field("fence", &self.fence)
            .field("is_leader", &self.is_leader())
            .field("cancelled", &self.cancelled())
            .finish()
    }
}
