//! How one request is carried out: its tries, its wait, and what becomes of an outcome in doubt.
//!
//! A call that nobody waits for any more, or whose outcome is not known, keeps its external id: the next
//! call under the id waits for it and takes over what it left, or the background ends it.

use std::collections::HashMap;
use std::marker::PhantomData;
use std::ops::ControlFlow::{self, Break, Continue};
use std::sync::{Arc, Weak};
use std::time::Duration;

use crossbeam_channel::{SendError, bounded};
use parking_lot::{Condvar, Mutex};

use super::request::Wait;
use super::semaphores::{CALL, MAX_TRIES, SharedSemaphores, pause_after};
use super::wait_list::{Advice, Turn};
use crate::backend::permit_store::{
    Call, Decision, Exhausted, Failure, Held, OnHeld, PermitStore, Wish, reclaim_after,
};
use crate::background::{CleanUp, Cleaned};
use crate::cancel::{Cancel, cancelled};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::parker::Parker;
use crate::thread;

/// The first pause between two tries of a waiting request.
pub(super) const FIRST_POLL: Duration = Duration::from_millis(50);

/// What a call needs at least, on a row that others lock too, to be made without a thread of its own.
const ROOM: Duration = Duration::from_secs(1);

/// The pause between two attempts to clean up.
pub(super) const RETRY: Duration = Duration::from_millis(250);

/// One call to acquire with its retries. Keeps its external id until it is dropped.
pub(super) struct Attempts<'a> {
    shared: &'a Arc<SharedSemaphores>,
    pub(super) call: Arc<Call>,
    /// The permits may have been granted, or may yet be.
    unknown: bool,
    /// A call goes on without us, and keeps the external id until it ends.
    late: bool,
    /// The probe was told that a semaphore is exhausted.
    told: bool,
}

impl<'a> Attempts<'a> {
    /// Waits until `by` for a call of this process under the same external id, and takes over what it left.
    ///
    /// # Errors
    /// `Timeout`; `Cancelled`.
    pub(super) fn new(
        shared: &'a Arc<SharedSemaphores>,
        wish: Wish,
        on_held: OnHeld,
        wait: &Wait,
        by: Moment,
    ) -> Result<Attempts<'a>> {
        let former = shared.doubts.begin(&wish.external_id, by, wait)?;
        Ok(Attempts {
            shared,
            unknown: !former.is_empty(),
            late: false,
            told: false,
            call: Arc::new(Call {
                wish,
                token: rand::random::<u64>() >> 1,
                former,
                on_held,
            }),
        })
    }

    /// At most three tries, none of which begins after `by`.
    pub(super) fn tries(&mut self, by: Moment) -> Result<Decision> {
        let mut tries = 1;
        loop {
            match self.once(Moment::FAR) {
                Ok(decision) => return Ok(decision),
                Err(failure) if failure.retry && tries < MAX_TRIES && !by.remaining().is_zero() => {
                    tries += 1;
                    pause_after(&failure.error, tries);
                }
                Err(failure) => return Err(self.explain(failure.error, tries)),
            }
        }
    }

    /// Tries whenever there is a chance, until `deadline`, or until the wait is cancelled.
    pub(super) fn wait(&mut self, wait: &Wait, deadline: Moment) -> Result<Decision> {
        let parker = Parker::new();
        let dropped = self.shared.factory.waits();
        let cancels = || wait.cancelled_by().into_iter().chain([&dropped]);
        let _watched: Vec<_> = cancels().map(|it| it.watch(&parker.unparker())).collect();
        let mut poll = Poll::new(self.shared.store.poll_interval());
        let mut last = Last::Nothing;
        // Those who wait already come first; but what this id holds already needs no turn.
        if !self.shared.waiting.is_claimed(&self.call.wish) || self.is_known(deadline) {
            last = match self.attempt(deadline)? {
                Break(decision) => return Ok(decision),
                Continue(outcome) => outcome,
            };
        }
        let (waiting, call) = (&self.shared.waiting, Arc::clone(&self.call));
        let turn = waiting.join(&call.wish, &parker);
        poll.after(&last, &turn);
        loop {
            if cancels().any(Cancel::is_cancelled) {
                let id = &call.wish.external_id;
                return Err(cancelled(format_args!("request {id:?}")));
            }
            if deadline.remaining().is_zero() {
                return self.timed_out(last, &turn);
            }
            let advice = turn.advice();
            // A try that could not be answered in time any more would leave its outcome in doubt.
            let due = |poll: &Poll| match turn.is_first() && poll.at + FIRST_POLL <= deadline {
                true => poll.at,
                false => Moment::FAR,
            };
            // Not a mere look: whoever waits for the row's lock is served between two others.
            if advice == Advice::Try || due(&poll).remaining().is_zero() {
                last = match self.attempt(deadline)? {
                    Break(decision) => return Ok(decision),
                    Continue(outcome) => outcome,
                };
                poll.after(&last, &turn);
            } else if advice == Advice::Poll {
                poll.restart();
            }
            parker.park(deadline.min(due(&poll)));
        }
    }

    /// One try, which ends by `deadline` for its caller.
    fn once(&mut self, deadline: Moment) -> Result<Decision, Failure> {
        let (call, late) = (Arc::clone(&self.call), self.late_handler());
        let outcome = ask(
            &self.shared.store,
            deadline,
            move |store, by| store.acquire(&call, by),
            late,
        );
        match outcome {
            // The semaphores were locked for it: what an earlier try left has come or gone by now.
            Some(Ok(decision)) => {
                self.unknown = matches!(&decision, Decision::Refused(_)) && self.unknown;
                if let Decision::Exhausted { exhausted, .. } = &decision
                    && !std::mem::replace(&mut self.told, true)
                {
                    let name = &exhausted.semaphore;
                    self.shared.probe.tell(|probe| probe.exhausted(name));
                }
                Ok(decision)
            }
            Some(Err(failure)) => {
                self.unknown |= failure.unknown;
                Err(failure)
            }
            None => {
                self.late = true;
                Err(Failure {
                    retry: false,
                    ..Failure::known(no_answer())
                })
            }
        }
    }

    /// What to do with an answer that comes after its caller has given up. Does not keep the factory, whose
    /// drop waits for the clean-up, and so for this answer.
    fn late_handler(&self) -> impl FnOnce(Option<Result<Decision, Failure>>) + Send + use<> {
        let (shared, call) = (Arc::downgrade(self.shared), Arc::clone(&self.call));
        let (doubts, store) = (
            Arc::clone(&self.shared.doubts),
            Arc::clone(&self.shared.store),
        );
        let unknown = self.unknown;
        move |outcome| {
            let in_doubt = match outcome {
                Some(Ok(Decision::Granted(_))) | None => true,
                Some(Ok(Decision::Refused(_))) => unknown,
                Some(Ok(_)) => false,
                Some(Err(failure)) => unknown || failure.unknown,
            };
            doubts.end(&call, in_doubt);
            if in_doubt && shared.strong_count() == 0 {
                // The factory did not wait so long, and its clean-ups are gone.
                EndCalls {
                    shared,
                    doubts,
                    store,
                    external_id: Arc::clone(&call.wish.external_id),
                    tokens: tokens(&call),
                    permits: Vec::new(),
                }
                .attempt(Moment::now() + CALL);
            }
        }
    }

    /// A try within a wait: what passes by itself does not end it.
    fn attempt(&mut self, deadline: Moment) -> Result<ControlFlow<Decision, Last>> {
        match self.once(deadline) {
            Ok(Decision::Exhausted {
                exhausted,
                next_reclaim,
                newest,
            }) => Ok(Continue(Last::Short(exhausted, next_reclaim, newest))),
            Ok(decision) => Ok(Break(decision)),
            Err(failure) if failure.retry => Ok(Continue(Last::Failed(failure.error))),
            Err(failure) => Err(self.explain(failure.error, 1)),
        }
    }

    /// Whether something is known under the external id, as far as a look can tell.
    fn is_known(&self, deadline: Moment) -> bool {
        let call = Arc::clone(&self.call);
        let status = move |store: &dyn PermitStore, by| store.status(&call.wish.external_id, by);
        let known = ask(&self.shared.store, deadline, status, drop);
        matches!(known, Some(Ok(Some(_))))
    }

    fn timed_out(&self, last: Last, turn: &Turn<'_>) -> Result<Decision> {
        match (last, turn.seen(&self.call.wish)) {
            (Last::Short(exhausted, ..), _) | (Last::Nothing, Some(exhausted)) => {
                Ok(Decision::Exhausted {
                    exhausted,
                    next_reclaim: None,
                    newest: None,
                })
            }
            (Last::Failed(error), _) => Err(self.explain(error, 1)),
            (Last::Nothing, None) => Err(Error::new(
                ErrorKind::Timeout,
                format!(
                    "request {:?} had no turn in time: others of this process wait for the same \
                     semaphores",
                    self.call.wish.external_id
                ),
            )),
        }
    }

    fn explain(&self, error: Error, tries: u32) -> Error {
        let id = &self.call.wish.external_id;
        let error = match tries {
            1 => error.context(format_args!("request {id:?}")),
            _ => error.context(format_args!("request {id:?}, after {tries} tries")),
        };
        if !self.unknown {
            return error;
        }
        error.context(
            "the outcome is not known; whatever was acquired is released as soon as the server answers, \
             unless the same request takes it over before",
        )
    }
}

impl Drop for Attempts<'_> {
    fn drop(&mut self) {
        if !self.late {
            self.shared.doubts.end(&self.call, self.unknown);
        }
        if self.late || self.unknown {
            self.shared.end_call(&self.call);
        }
    }
}

/// Makes a call that ends by `deadline` for its caller, whatever the server does: where that is near, on a
/// thread of its own. `late` hears of an answer that nobody waits for, or that there will be none.
fn ask<T: Send + 'static>(
    store: &Arc<dyn PermitStore>,
    deadline: Moment,
    call: impl FnOnce(&dyn PermitStore, Moment) -> T + Send + 'static,
    late: impl FnOnce(Option<T>) + Send + 'static,
) -> Option<T> {
    let patience = store.patience();
    let now = Moment::now();
    let by = now + CALL.max(patience);
    if patience.is_zero() {
        return Some(call(&**store, by));
    }
    // It may last for its patience longer than it is asked to.
    let inline = by.min(deadline - patience);
    if inline >= now + ROOM {
        return Some(call(&**store, inline));
    }
    // A channel of no length: what is sent was received, or comes back.
    let (send, receive) = bounded::<T>(0);
    let (store, by) = (Arc::clone(store), by.min(deadline));
    let mut late = Late(Some(late), PhantomData);
    let started = thread::start("contend-permits", move || {
        let unheard = send.send(call(&*store, by));
        if let Some(late) = late.0.take()
            && let Err(SendError(answer)) = unheard
        {
            late(Some(answer));
        }
    });
    match started {
        Ok(_) => receive.recv_timeout(deadline.remaining()).ok(),
        Err(error) => {
            log::debug!("no thread for a call of little time: {error}");
            None
        }
    }
}

/// Hears of an answer that nobody waits for; dropped before, that there will be none.
struct Late<T, F: FnOnce(Option<T>)>(Option<F>, PhantomData<fn(T)>);

impl<T, F: FnOnce(Option<T>)> Drop for Late<T, F> {
    fn drop(&mut self) {
        if let Some(late) = self.0.take() {
            late(None);
        }
    }
}

fn no_answer() -> Error {
    Error::new(
        ErrorKind::Timeout,
        "the store did not answer in time; what it grants after this is given back, unless the same \
         request takes it over before",
    )
}

/// Why a waiting request does not have its permits yet.
enum Last {
    Nothing,
    /// Of this semaphore; when something can be taken back next; a recent grant on it.
    Short(Exhausted, Option<Duration>, Option<u64>),
    Failed(Error),
}

/// When a waiting request that comes first tries next: after 50 ms, and for as long as no grant elsewhere
/// shows that permits change hands, after longer and longer.
struct Poll {
    at: Moment,
    interval: Duration,
    longest: Duration,
    newest: Option<u64>,
}

impl Poll {
    fn new(longest: Duration) -> Poll {
        let mut poll = Poll {
            at: Moment::FAR,
            interval: longest,
            longest,
            newest: None,
        };
        poll.restart();
        poll
    }

    fn restart(&mut self) {
        self.interval = FIRST_POLL.min(self.longest);
        self.at = Moment::now() + self.interval;
    }

    /// Sets the time of the next try after one that came to this.
    fn after(&mut self, last: &Last, turn: &Turn<'_>) {
        let mut reclaim = None;
        if let Last::Short(exhausted, next_reclaim, newest) = last {
            turn.short_of(exhausted);
            reclaim = *next_reclaim;
            if std::mem::replace(&mut self.newest, *newest) != *newest {
                self.interval = FIRST_POLL.min(self.longest);
            }
        }
        let jitter = 0.75 + rand::random::<f64>() / 2.0;
        let mut pause = self.interval.mul_f64(jitter);
        if let Some(reclaim) = reclaim {
            pause = pause.min(reclaim.max(FIRST_POLL) + Duration::from_millis(2));
        }
        self.at = Moment::now() + pause;
        self.interval = (self.interval * 2).min(self.longest);
    }
}

/// The external ids that calls of this factory have in hand, or have left in doubt.
#[derive(Debug, Default)]
pub(super) struct Doubts {
    ids: Mutex<HashMap<Arc<str>, Doubt>>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Doubt {
    /// A call, or the end of one, is under way.
    busy: bool,
    /// Calls with these tokens may have been granted something, which nobody holds.
    left: Vec<u64>,
}

impl Doubts {
    /// Takes an external id for a call. Returns the tokens of calls in doubt.
    fn begin(&self, external_id: &Arc<str>, by: Moment, wait: &Wait) -> Result<Vec<u64>> {
        let mut ids = self.ids.lock();
        loop {
            let doubt = ids.entry(Arc::clone(external_id)).or_default();
            if !std::mem::replace(&mut doubt.busy, true) {
                return Ok(std::mem::take(&mut doubt.left));
            }
            if wait.cancelled_by().is_some_and(Cancel::is_cancelled) {
                return Err(cancelled(format_args!("request {external_id:?}")));
            }
            if by.remaining().is_zero() {
                let message = format!(
                    "request {external_id:?}: another call of this process under the same external id \
                     has not ended yet"
                );
                return Err(Error::new(ErrorKind::Timeout, message).before_asking());
            }
            // Not for long: nobody notifies of a cancelled wait here.
            let most = by.remaining().min(FIRST_POLL);
            self.changed.wait_for(&mut ids, most);
        }
    }

    /// A call that had taken its id is over. In doubt, it leaves its tokens.
    fn end(&self, call: &Call, in_doubt: bool) {
        let left = if in_doubt { tokens(call) } else { Vec::new() };
        self.give_up(&call.wish.external_id, &left);
    }

    /// Gives an id up that was taken, with what is left in doubt.
    fn give_up(&self, external_id: &Arc<str>, left: &[u64]) {
        let mut ids = self.ids.lock();
        if let Some(doubt) = ids.get_mut(external_id) {
            doubt.busy = false;
            doubt.left.extend(left);
            if doubt.left.is_empty() {
                ids.remove(external_id);
            }
        }
        self.changed.notify_all();
    }

    /// Leaves something in doubt under an id, whoever has it.
    fn add(&self, external_id: &Arc<str>, token: u64) {
        let mut ids = self.ids.lock();
        let doubt = ids.entry(Arc::clone(external_id)).or_default();
        doubt.left.push(token);
    }

    /// Takes an id to end these calls, if one of them is still in doubt, and nobody has it.
    fn claim(&self, external_id: &Arc<str>, tokens: &[u64]) -> Claim {
        let mut ids = self.ids.lock();
        match ids.get_mut(external_id) {
            Some(doubt) if doubt.busy => Claim::Later,
            // Of those that it has taken over, an earlier clean-up may have ended some.
            Some(doubt) if tokens.iter().any(|token| doubt.left.contains(token)) => {
                doubt.busy = true;
                doubt.left.retain(|token| !tokens.contains(token));
                Claim::Ours
            }
            _ => Claim::Gone,
        }
    }
}

/// The tokens of a call and of those that it has taken over.
fn tokens(call: &Call) -> Vec<u64> {
    let former = call.former.iter().copied();
    former.chain([call.token]).collect()
}

/// What became of a claim to end calls in doubt.
#[derive(Debug, PartialEq, Eq)]
enum Claim {
    Ours,
    /// A call has the id: one of these, which nobody waits for, or one that takes them over or not.
    Later,
    /// They are not in doubt any more: answered, or taken over by a later call.
    Gone,
}

impl SharedSemaphores {
    /// Ends, in the background, a call that is in doubt, or will be when it is over.
    fn end_call(self: &Arc<SharedSemaphores>, call: &Call) {
        let wish = &call.wish;
        let permits = wish.permits.clone();
        self.end_calls(&wish.external_id, tokens(call), permits, wish.ttl);
    }

    /// Releases, in the background, what nobody will hold.
    pub(super) fn end_held(self: &Arc<SharedSemaphores>, held: &Held, ttl: Duration) {
        let permits = held.permits.iter();
        let permits = permits.map(|it| (Arc::clone(&it.semaphore), it.count));
        self.doubts.add(&held.external_id, held.token);
        let tokens = vec![held.token];
        self.end_calls(&held.external_id, tokens, permits.collect(), Some(ttl));
    }

    fn end_calls(
        self: &Arc<SharedSemaphores>,
        external_id: &Arc<str>,
        tokens: Vec<u64>,
        permits: Vec<(Arc<str>, u32)>,
        ttl: Option<Duration>,
    ) {
        let end = EndCalls {
            shared: Arc::downgrade(self),
            doubts: Arc::clone(&self.doubts),
            store: Arc::clone(&self.store),
            external_id: Arc::clone(external_id),
            tokens,
            permits,
        };
        // Without a ttl nothing else would ever take it back.
        let until = ttl.map_or(Moment::FAR, |ttl| Moment::now() + reclaim_after(ttl) + CALL);
        let background = &self.factory.background;
        background.clean_up(Box::new(end), CALL, until);
    }
}

/// Ends calls in doubt, unless a later call under the same id takes them over.
struct EndCalls {
    shared: Weak<SharedSemaphores>,
    doubts: Arc<Doubts>,
    store: Arc<dyn PermitStore>,
    external_id: Arc<str>,
    tokens: Vec<u64>,
    permits: Vec<(Arc<str>, u32)>,
}

impl CleanUp for EndCalls {
    fn label(&self) -> String {
        format!("release of request {:?}", self.external_id)
    }

    fn attempt(&mut self, by: Moment) -> Cleaned {
        match self.doubts.claim(&self.external_id, &self.tokens) {
            Claim::Ours => {}
            Claim::Later => return Cleaned::NotYet(RETRY),
            Claim::Gone => return Cleaned::Done,
        }
        match self.store.bury(&self.external_id, &self.tokens, by) {
            Err(error) if error.is_transient() => {
                self.doubts.give_up(&self.external_id, &self.tokens);
                return Cleaned::Again(RETRY);
            }
            Err(error) => log::warn!("cannot end the {}: {error}", self.label()),
            Ok(released) => {
                if let Some(shared) = self.shared.upgrade()
                    && released
                {
                    let permits = self.permits.iter();
                    shared.given_back(permits.map(|(name, count)| (&**name, *count)));
                }
            }
        }
        self.doubts.give_up(&self.external_id, &[]);
        Cleaned::Done
    }
}

impl Drop for EndCalls {
    fn drop(&mut self) {
        // Given up: what it holds has run out by now.
        if self.doubts.claim(&self.external_id, &self.tokens) == Claim::Ours {
            self.doubts.give_up(&self.external_id, &[]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::wait_list::WaitList;
    use super::*;

    /// An attack: the clean-up of the first call left the second, which had taken it over, to nobody.
    #[test]
    fn of_two_calls_in_doubt_under_one_id_both_are_ended() {
        let (doubts, id) = (Doubts::default(), Arc::from("id"));
        let wait = Wait::from(Duration::ZERO);
        let begin = || doubts.begin(&id, Moment::FAR, &wait).unwrap();
        assert!(begin().is_empty());
        doubts.give_up(&id, &[1]);
        assert_eq!(begin(), [1]);
        assert_eq!(doubts.claim(&id, &[1]), Claim::Later);
        doubts.give_up(&id, &[1, 2]);
        for tokens in [&[1][..], &[1, 2]] {
            assert_eq!(doubts.claim(&id, tokens), Claim::Ours);
            doubts.give_up(&id, &[]);
        }
        assert_eq!(doubts.claim(&id, &[1, 2]), Claim::Gone);
    }

    #[test]
    fn the_pause_between_two_tries_grows_only_while_nothing_changes_hands() {
        let list = WaitList::default();
        let wish = Wish {
            external_id: Arc::from("id"),
            owner: None,
            ttl: None,
            permits: vec![(Arc::from("a"), 1)],
        };
        let turn = list.join(&wish, &Parker::new());
        let short = |newest| {
            let semaphore = Arc::from("a");
            let (capacity, held, wanted) = (1, 1, 1);
            let exhausted = Exhausted {
                semaphore,
                capacity,
                held,
                wanted,
            };
            Last::Short(exhausted, None, Some(newest))
        };
        let mut poll = Poll::new(Duration::from_secs(1));
        let mut pauses = |newest: [u64; 8]| {
            newest.map(|newest| {
                poll.after(&short(newest), &turn);
                poll.at.remaining()
            })
        };
        let hot = pauses([1, 2, 3, 4, 5, 6, 7, 8]);
        assert!(hot.iter().all(|it| *it < FIRST_POLL * 2), "{hot:?}");
        let cold = pauses([8; 8]);
        assert!(cold[7] > Duration::from_millis(700), "{cold:?}");
    }
}
