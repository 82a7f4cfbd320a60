//! The loop that runs the work: one thread, from start to stop.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use parking_lot::Mutex;

use super::config::ScheduleConfig;
use super::context::Context;
use super::term::Term;
use crate::bell::{Bell, Ring};
use crate::clock::Moment;
use crate::service::MutexContendService;

/// Scheduled work: an error is logged, and the schedule goes on.
pub(super) type Work = Box<
    dyn FnMut(&Context) -> std::result::Result<(), Box<dyn std::error::Error + Send + Sync>> + Send,
>;

/// One run from start to stop. Dropping it stops the service, even where no thread could be started.
pub(super) struct Rounds {
    pub(super) service: Arc<MutexContendService>,
    pub(super) term: Arc<Term>,
    pub(super) config: ScheduleConfig,
    pub(super) work: Arc<Mutex<Work>>,
}

impl Rounds {
    pub(super) fn run(self, bell: &Bell) {
        self.term.open(bell.waker());
        while !bell.is_stopped() {
            match self.term.fence() {
                Some(fence) => self.lead(fence, bell),
                None => {
                    bell.wait(Moment::FAR);
                }
            }
        }
    }

    /// From the beginning of one leadership to its end, or to the stop.
    fn lead(&self, fence: u64, bell: &Bell) {
        let context = Context {
            fence,
            board: Arc::clone(self.service.board()),
            bell: bell.clone(),
        };
        let mut due = self.config.first(Moment::now());
        while self.term.fence() == Some(fence) {
            match bell.wait(due) {
                Ring::Stop => return,
                // Leadership may have changed.
                Ring::Wake => continue,
                Ring::Silence => {}
            }
            if !context.is_leader() {
                // The ttl is over, and the callback that says so is on its way.
                bell.wait(Moment::FAR);
                continue;
            }
            let Some(running) = self.term.run(fence) else {
                return;
            };
            self.work(&context);
            drop(running);
            due = self.config.next(due, Moment::now());
        }
    }

    fn work(&self, context: &Context) {
        let mutex = self.service.mutex();
        let mut work = self.work.lock();
        match catch_unwind(AssertUnwindSafe(|| work(context))) {
            Ok(Ok(())) => {}
            Ok(Err(error)) => log::error!("{mutex}: scheduled work failed: {error}"),
            Err(_) => log::error!("{mutex}: scheduled work panicked; the schedule goes on"),
        }
    }
}

impl Drop for Rounds {
    fn drop(&mut self) {
        if let Err(error) = self.service.stop() {
            log::warn!("{}: {error}", self.service.mutex());
        }
    }
}
