//! What a waiting contender and its lookout share.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::name::WakeName;
use crate::bell::Waker;

/// One contender's wait for one mutex: from the first refusal to the release, or to giving up.
#[derive(Debug)]
pub(in crate::backend::mysql) struct Post {
    pub(super) mutex: Arc<str>,
    pub(super) name: WakeName,
    waker: Waker,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) phase: Phase,
    /// What the contender said since it was last rung.
    pub(super) verdict: Option<Verdict>,
    /// The contender owns, and wants the name for as long as it does.
    pub(super) owns: bool,
    /// The contender needs nothing more.
    pub(super) dismissed: bool,
    /// The lookout has reached the server once, or failed to.
    pub(super) posted: bool,
    /// The lookout's statement was killed.
    pub(super) killed: bool,
}

/// Where the lookout is.
#[derive(Clone, Debug)]
pub(super) enum Phase {
    /// Not on the server.
    Away,
    /// Blocked on the server in a connection that is known by this name.
    Blocked(WakeName),
    /// Holds the name.
    Named,
}

/// What became of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Won,
    Lost,
}

impl Post {
    pub(super) fn new(mutex: &Arc<str>, name: &WakeName, waker: &Waker) -> Post {
        Post {
            mutex: Arc::clone(mutex),
            name: name.clone(),
            waker: waker.clone(),
            state: Mutex::new(State {
                phase: Phase::Away,
                verdict: None,
                owns: false,
                dismissed: false,
                posted: false,
                killed: false,
            }),
            changed: Condvar::new(),
        }
    }

    /// Waits until the lookout waits on the server, or has tried to in vain.
    pub(in crate::backend::mysql) fn wait_posted(&self, limit: Duration) {
        let mut state = self.state.lock();
        self.changed
            .wait_while_for(&mut state, |state| !state.posted, limit);
    }

    /// The lookout has done what it could for a place in the queue.
    pub(super) fn posted(&self) {
        self.state.lock().posted = true;
        self.changed.notify_all();
    }

    /// Whether the lookout holds the name: nobody else who waits will try now.
    pub(in crate::backend::mysql) fn has_name(&self) -> bool {
        matches!(self.state.lock().phase, Phase::Named)
    }

    /// The contender owns the mutex now.
    pub(in crate::backend::mysql) fn won(&self) {
        let mut state = self.state.lock();
        state.owns = true;
        state.verdict = Some(Verdict::Won);
        self.changed.notify_all();
    }

    /// The contender tried and was refused.
    pub(in crate::backend::mysql) fn lost(&self) {
        let mut state = self.state.lock();
        state.owns = false;
        state.verdict = Some(Verdict::Lost);
        self.changed.notify_all();
    }

    /// The contender needs nothing more. Whether the lookout must be woken on the server.
    pub(super) fn dismiss(&self) -> bool {
        let mut state = self.state.lock();
        state.dismissed = true;
        self.changed.notify_all();
        matches!(state.phase, Phase::Blocked(_))
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Moves on; `false` once the contender needs nothing more.
    pub(super) fn enter(&self, phase: Phase) -> bool {
        let mut state = self.state.lock();
        state.posted |= matches!(phase, Phase::Blocked(_));
        state.phase = phase;
        self.changed.notify_all();
        !state.dismissed
    }

    /// Rings the contender and forgets what it said before, unless it owns already.
    pub(super) fn ring(&self) {
        let mut state = self.state.lock();
        if !state.dismissed && !state.owns {
            state.verdict = None;
            self.waker.wake();
        }
    }

    /// Waits until the contender has said something, or for so long.
    pub(super) fn wait(&self, limit: Duration, said: impl Fn(&State) -> bool) -> bool {
        let mut state = self.state.lock();
        if !said(&state) && !state.dismissed {
            self.changed.wait_while_for(
                &mut state,
                |state| !said(state) && !state.dismissed,
                limit,
            );
        }
        !state.dismissed
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Phase::Away => "away",
            Phase::Blocked(_) => "blocked",
            Phase::Named => "named",
        })
    }
}
