//! What a waiting contender and its lookout share.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::name::WakeName;
use crate::bell::Waker;
use crate::clock::Moment;

/// A wait for one mutex, from the first refusal to the release, or to giving up: one contender's, or
/// that of a line of lockers.
#[derive(Debug)]
pub(in crate::backend::mysql) struct Post {
    pub(super) mutex: Arc<str>,
    pub(super) name: WakeName,
    /// The name of the place that comes first.
    pub(super) queue: WakeName,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
pub(super) struct State {
    /// Whom to ring.
    waker: Waker,
    pub(super) phase: Phase,
    /// What the contender said since it was last rung.
    pub(super) verdict: Option<Verdict>,
    /// The contender owns, and wants the name for as long as it does; or another one of its line is
    /// about to.
    pub(super) owns: bool,
    /// When the first one to own with this name did.
    turn_since: Option<Moment>,
    /// The name shall go to whoever waits for it elsewhere, and then be waited for again.
    behind: bool,
    /// The contender needs nothing more.
    pub(super) dismissed: bool,
    /// The lookout has reached the server once, or failed to.
    pub(super) posted: bool,
    /// The lookout's statement was killed.
    pub(super) killed: bool,
    /// The lookout holds the place of the first.
    pub(super) first: bool,
    /// The lookout has left, and holds nothing for this any more.
    gone: bool,
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
    pub(in crate::backend::mysql) fn new(mutex: &Arc<str>, name: &WakeName, waker: &Waker) -> Post {
        Post {
            mutex: Arc::clone(mutex),
            name: name.clone(),
            queue: name.queue(),
            state: Mutex::new(State {
                waker: waker.clone(),
                phase: Phase::Away,
                verdict: None,
                owns: false,
                turn_since: None,
                behind: false,
                dismissed: false,
                posted: false,
                killed: false,
                first: false,
                gone: false,
            }),
            changed: Condvar::new(),
        }
    }

    /// Waits until the lookout waits on the server, or has tried to in vain. `false`: not in time.
    pub(in crate::backend::mysql) fn wait_posted(&self, limit: Duration) -> bool {
        let mut state = self.state.lock();
        self.changed
            .wait_while_for(&mut state, |state| !state.posted, limit);
        state.posted
    }

    /// The lookout has done what it could for a place in the queue.
    pub(super) fn posted(&self) {
        self.state.lock().posted = true;
        self.changed.notify_all();
    }

    /// Whether the lookout holds the name: nobody else who waits will try now.
    pub(in crate::backend::mysql) fn has_name(&self) -> bool {
        let state = self.state.lock();
        matches!(state.phase, Phase::Named) && !state.behind
    }

    /// Whether the lookout holds the place of the first who waits.
    pub(in crate::backend::mysql) fn is_first(&self) -> bool {
        self.state.lock().first
    }

    /// Whether the name is held for an owner.
    pub(in crate::backend::mysql) fn is_kept(&self) -> bool {
        self.state.lock().owns
    }

    /// The contender owns the mutex now.
    pub(in crate::backend::mysql) fn won(&self) {
        let mut state = self.state.lock();
        state.turn_since.get_or_insert_with(Moment::now);
        state.verdict = Some(Verdict::Won);
        // Passed on within a line, the name is held already: the lookout sleeps on.
        if !std::mem::replace(&mut state.owns, true) {
            self.changed.notify_all();
        }
    }

    /// The contender tried and was refused.
    pub(in crate::backend::mysql) fn lost(&self) {
        let mut state = self.state.lock();
        state.owns = false;
        state.verdict = Some(Verdict::Lost);
        self.changed.notify_all();
    }

    /// The contender does not need the name now.
    pub(in crate::backend::mysql) fn let_go(&self) {
        self.state.lock().owns = false;
        self.changed.notify_all();
    }

    /// Whom to ring from now on.
    pub(in crate::backend::mysql) fn ring_for(&self, waker: &Waker) {
        self.state.lock().waker.clone_from(waker);
    }

    /// Whether the name has been used for so long.
    pub(in crate::backend::mysql) fn turn_is_over(&self, turn: Duration) -> bool {
        self.state.lock().turn_is_over(turn)
    }

    /// After a `turn` with the name, leaves it to those who wait for it elsewhere, waits for it again
    /// and rings `next` then. `false`: the turn has not lasted that long.
    pub(in crate::backend::mysql) fn go_behind(&self, next: &Waker, turn: Duration) -> bool {
        let mut state = self.state.lock();
        if !state.turn_is_over(turn) {
            return false;
        }
        state.waker.clone_from(next);
        state.owns = false;
        state.behind = true;
        self.changed.notify_all();
        true
    }

    /// Whether the name was given up only to be waited for again.
    pub(super) fn take_behind(&self) -> bool {
        std::mem::take(&mut self.state.lock().behind)
    }

    /// The contender needs nothing more. Whether the lookout must be woken on the server.
    pub(super) fn dismiss(&self) -> bool {
        let mut state = self.state.lock();
        state.dismissed = true;
        self.changed.notify_all();
        matches!(state.phase, Phase::Blocked(_))
    }

    /// The lookout holds nothing for this any more.
    pub(super) fn leave(&self) {
        self.state.lock().gone = true;
        self.changed.notify_all();
    }

    /// Waits until the lookout has left.
    pub(super) fn wait_gone(&self, limit: Duration) {
        let mut state = self.state.lock();
        self.changed
            .wait_while_for(&mut state, |state| !state.gone, limit);
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
    pub(in crate::backend::mysql) fn ring(&self) {
        let mut state = self.state.lock();
        if !state.dismissed && !state.owns {
            state.verdict = None;
            state.waker.wake();
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

#[cfg(test)]
impl Post {
    /// As if the server had granted the name to its lookout.
    pub(in crate::backend::mysql) fn granted(&self) {
        let mut state = self.state.lock();
        state.behind = false;
        state.named();
    }
}

impl State {
    fn turn_is_over(&self, turn: Duration) -> bool {
        let since = self.turn_since;
        self.owns && since.is_some_and(|since| Moment::now() - since > turn)
    }

    /// The name was granted.
    pub(super) fn named(&mut self) {
        self.phase = Phase::Named;
        self.turn_since = None;
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
