//! Lockers of one factory that wait for the same mutex stand in one line.
//!
//! A release that goes through this factory rings the first of the line at its reply: no poll, and no
//! round trip but the two that the row costs. Only the first has somebody look out for it on the server,
//! and what was found out for it (the wake name) is passed on with the turn, so that many lockers of a
//! process need one wake connection for each mutex, and a newcomer who would only be refused asks
//! nobody.
//!
//! Order is that of arrival in the line. Between processes it is that of the server's queue for the
//! name: a line that has had the name for longer than [`TURN`] goes to the end of that queue, so that
//! nobody waits for more than a turn, and the hold that it ends in, of each process before it. Without
//! the name (wake-ups off, or more mutexes waited for than there may be wake connections) there is no
//! order between processes: others get in when they find the row free between two holds.
//!
//! A ring says "look now" and never more; the row decides.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use super::wake::Post;
use crate::bell::Waker;
use crate::fork::Origin;
use crate::owner::MutexOwner;

/// How long a line keeps the name from the waiters of other processes. Long against what it costs to
/// queue for the name again, which is paid once in a turn.
const TURN: Duration = Duration::from_millis(25);

/// The lines of one factory.
#[derive(Debug, Default)]
pub(super) struct Lines {
    lines: Mutex<HashMap<Arc<str>, Line>>,
    origin: Origin,
}

/// Who is in the line, in all lines of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Number(u64);

/// One mutex. There is a line as long as somebody of this factory owns it or waits for it.
#[derive(Debug, Default)]
struct Line {
    /// The longest wait first.
    waiting: VecDeque<Waiter>,
    /// Who of us owns, and under which id.
    owner: Option<(Number, String)>,
    /// The last owner seen, of us or not.
    seen: Option<MutexOwner>,
    /// Looks out for the first, and keeps the name for the owner.
    post: Option<Arc<Post>>,
}

#[derive(Debug)]
struct Waiter {
    number: Number,
    waker: Waker,
    /// An owner of this process has released.
    rung: bool,
}

/// What one who is about to try may assume.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Standing {
    /// The name is its own: nobody else who waits will try now.
    pub(super) named: bool,
    /// It is the first of all who wait.
    pub(super) first: bool,
    /// The mutex was released a moment ago: no look is needed before the attempt.
    pub(super) rung: bool,
}

/// A post that the line needs no longer, to be dismissed.
type Spare = Option<Arc<Post>>;

impl Number {
    pub(super) fn new() -> Number {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Number(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

impl Lines {
    /// Stands behind those who wait already, and says who owns as far as they know. `None`: nobody
    /// waits, or it is for this one that they do, and whoever comes tries for itself.
    pub(super) fn join_behind(
        &self,
        mutex: &str,
        id: &str,
        number: Number,
        waker: &Waker,
    ) -> Option<MutexOwner> {
        let mut lines = self.lock()?;
        let line = lines.get_mut(mutex)?;
        line.waiting.front()?;
        if line.seen.as_ref().is_some_and(|seen| seen.is_owner(id)) {
            return None;
        }
        line.enter(number, waker);
        Some(line.seen.clone().unwrap_or(MutexOwner::NONE))
    }

    /// Stands in the line after a refusal. `true`: nobody looks out for it, and it is the first.
    pub(super) fn refused(
        &self,
        mutex: &Arc<str>,
        number: Number,
        waker: &Waker,
        owner: Option<MutexOwner>,
    ) -> bool {
        let Some(mut lines) = self.lock() else {
            return false;
        };
        let line = lines.entry(Arc::clone(mutex)).or_default();
        line.enter(number, waker);
        line.seen = owner;
        if !line.is_first(number) {
            return false;
        }
        match &line.post {
            // Came before the release that it was rung for, and will be rung again.
            Some(post) if line.is_ours() && post.is_kept() => false,
            Some(post) => {
                post.lost();
                false
            }
            None => true,
        }
    }

    /// Gives the line somebody who looks out for its first, if it is still this one.
    pub(super) fn look_out(&self, mutex: &str, number: Number, post: &Arc<Post>) -> bool {
        let Some(mut lines) = self.lock() else {
            return false;
        };
        match lines.get_mut(mutex) {
            Some(line) if line.post.is_none() && line.is_first(number) => {
                line.post = Some(Arc::clone(post));
                true
            }
            _ => false,
        }
    }

    /// What this one may assume in the attempt that it makes now.
    pub(super) fn standing(&self, mutex: &str, number: Number) -> Standing {
        let standing = self.lock().and_then(|mut lines| {
            let line = lines.get_mut(mutex)?;
            let first = line.waiting.front_mut()?;
            (first.number == number).then(|| Standing {
                rung: std::mem::take(&mut first.rung),
                named: line.post.as_ref().is_some_and(|post| post.has_name()),
                first: line.post.as_ref().is_some_and(|post| post.is_first()),
            })
        });
        standing.unwrap_or_default()
    }

    /// Owns from now on.
    pub(super) fn won(&self, mutex: &Arc<str>, number: Number, owner: &MutexOwner) -> Spare {
        let mut lines = self.lock()?;
        let line = lines.entry(Arc::clone(mutex)).or_default();
        line.waiting.retain(|waiter| waiter.number != number);
        line.owner = Some((number, owner.owner_id().to_owned()));
        line.seen = Some(owner.clone());
        match &line.post {
            Some(post) if post.has_name() => {
                post.won();
                None
            }
            _ => line.look_out_for_first(),
        }
    }

    /// The attempt of the first failed: those who wait elsewhere shall not wait for its next one.
    pub(super) fn failed(&self, mutex: &str, number: Number) {
        if let Some(lines) = self.lock()
            && let Some(line) = lines.get(mutex)
            && line.is_first(number)
            && let Some(post) = &line.post
        {
            post.let_go();
        }
    }

    /// Is about to send its release. The first of the line comes at once: while its request is on the
    /// way the release is done, or holds the row lock that it then waits for. Should it come too early,
    /// it is refused, and rung again at the reply.
    pub(super) fn releasing(&self, mutex: &str, number: Number) {
        if let Some(mut lines) = self.lock()
            && let Some(line) = lines.get_mut(mutex)
            && line.is_owner(number)
            && !line
                .post
                .as_ref()
                .is_some_and(|post| post.turn_is_over(TURN))
            && let Some(first) = line.waiting.front_mut()
        {
            first.rung = true;
            first.waker.wake();
        }
    }

    /// Owns no longer, without having released.
    pub(super) fn lost(&self, mutex: &str, number: Number) -> Spare {
        self.end(mutex, number, false)
    }

    /// Owns and waits no longer: it is the next one's turn.
    pub(super) fn leave(&self, mutex: &str, number: Number) -> Spare {
        self.end(mutex, number, true)
    }

    fn end(&self, mutex: &str, number: Number, free: bool) -> Spare {
        let mut lines = self.lock()?;
        let line = lines.get_mut(mutex)?;
        let first = line.waiting.front();
        let left_first = first.filter(|first| first.number == number);
        let rung = left_first.map(|first| first.rung);
        line.waiting.retain(|waiter| waiter.number != number);
        let spare = match rung {
            _ if line.is_owner(number) => {
                line.owner = None;
                line.next_turn(free)
            }
            Some(rung) => line.pass_on(rung),
            None => None,
        };
        if line.waiting.is_empty() && line.owner.is_none() {
            let line = lines.remove(mutex)?;
            return spare.or(line.post);
        }
        spare
    }

    /// `None` in a forked child, where a thread that is not there may have locked it.
    fn lock(&self) -> Option<MutexGuard<'_, HashMap<Arc<str>, Line>>> {
        self.origin.is_here().then(|| self.lines.lock())
    }
}

impl Line {
    fn enter(&mut self, number: Number, waker: &Waker) {
        if self.waiting.iter().all(|waiter| waiter.number != number) {
            self.waiting.push_back(Waiter {
                number,
                waker: waker.clone(),
                rung: false,
            });
        }
    }

    fn is_owner(&self, number: Number) -> bool {
        self.owner.as_ref().is_some_and(|owner| owner.0 == number)
    }

    /// One of us owns; not only thinks so, like a guard that was held for longer than its lease.
    fn is_ours(&self) -> bool {
        let stranger = |id: &str| self.seen.as_ref().is_some_and(|seen| !seen.is_owner(id));
        self.owner.as_ref().is_some_and(|(_, id)| !stranger(id))
    }

    fn is_first(&self, number: Number) -> bool {
        self.waiting
            .front()
            .is_some_and(|first| first.number == number)
    }

    /// The owner, one of us, is gone; `free`: it has released.
    fn next_turn(&mut self, free: bool) -> Spare {
        if let Some(post) = &self.post
            && let Some(first) = self.waiting.front()
        {
            if !free {
                post.let_go();
            } else if post.has_name() && post.go_behind(&first.waker, TURN) {
                // Rung when its turn has come.
                return None;
            }
        }
        self.pass_on(free)
    }

    /// Rings the first: it tries, and if it is refused it has somebody look out for it.
    fn pass_on(&mut self, rung: bool) -> Spare {
        if let Some(first) = self.waiting.front_mut() {
            first.rung = rung;
            first.waker.wake();
        }
        self.look_out_for_first()
    }

    /// The post rings whoever is the first now. It is to spare where nobody is.
    fn look_out_for_first(&mut self) -> Spare {
        match (&self.post, self.waiting.front()) {
            (Some(post), Some(first)) => {
                post.ring_for(&first.waker);
                None
            }
            _ => self.post.take(),
        }
    }
}

#[cfg(test)]
#[path = "line_tests.rs"]
mod tests;
