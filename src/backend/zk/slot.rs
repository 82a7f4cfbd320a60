//! Where a caller waits for the answers to what it asked.

use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::message::{Code, Reply};
use crate::clock::Moment;
use crate::error::{Error, Result};

/// The server's answer: what was asked for, or why not.
pub(super) type Outcome = Result<Reply, Code>;

/// Room for the answers to the requests of one call.
#[derive(Debug)]
pub(super) struct Slot {
    progress: Mutex<Progress>,
    changed: Condvar,
}

#[derive(Debug)]
struct Progress {
    answers: Vec<Option<Outcome>>,
    missing: usize,
    failure: Option<Error>,
}

impl Slot {
    pub(super) fn new(count: usize) -> Slot {
        Slot {
            progress: Mutex::new(Progress {
                answers: vec![None; count],
                missing: count,
                failure: None,
            }),
            changed: Condvar::new(),
        }
    }

    pub(super) fn answer(&self, index: usize, outcome: Outcome) {
        let mut progress = self.progress.lock();
        if let Some(place @ None) = progress.answers.get_mut(index) {
            *place = Some(outcome);
            progress.missing -= 1;
            if progress.missing == 0 {
                self.changed.notify_all();
            }
        }
    }

    /// The connection broke: what is not answered yet never will be.
    pub(super) fn fail(&self, why: &Error) {
        let mut progress = self.progress.lock();
        if progress.missing > 0 && progress.failure.is_none() {
            progress.failure = Some(why.clone());
            self.changed.notify_all();
        }
    }

    /// All answers, in the order of the requests; `Ok(None)` if they are not there in time.
    pub(super) fn wait(&self, by: Moment) -> Result<Option<Vec<Outcome>>> {
        let mut progress = self.progress.lock();
        loop {
            if progress.missing == 0 {
                let answers = std::mem::take(&mut progress.answers);
                return Ok(Some(answers.into_iter().flatten().collect()));
            }
            if let Some(failure) = progress.failure.take() {
                return Err(failure);
            }
            let left = by.remaining();
            if left.is_zero() {
                return Ok(None);
            }
            self.changed
                .wait_for(&mut progress, left.min(Duration::from_secs(3600)));
        }
    }
}
