//! How one request is carried out: its tries, its wait, and what becomes of an outcome in doubt.
//!
//! A call that nobody waits for any more, or whose outcome is not known, keeps its external id: the next
//! call under the id waits for it and takes over what it left, or the background ends it.

use std::marker::PhantomData;
use std::ops::ControlFlow::{self, Break, Continue};
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{SendError, bounded};

use super::request::Wait;
use super::semaphores::{CALL, MAX_TRIES, SharedSemaphores, pause_after};
use super::wait_list::{Advice, Turn};
use crate::backend::permit_store::{Call, Decision, Exhausted, Failure, OnHeld, PermitStore, Wish};
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
    /// Its factory was dropped.
    dropped: Cancel,
    /// The permits may have been granted, or may yet be.
    unknown: bool,
    /// A call goes on without us, and keeps the external id until it ends.
    late: bool,
    /// The probe was told that a semaphore is exhausted.
    told: bool,
    /// It was logged that the wish exceeds a capacity.
    warned: bool,
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
        let dropped = shared.factory.waits();
        let cancelled_by = wait.cancelled_by();
        let former = shared.doubts.begin(&wish, by, || {
            dropped.is_cancelled() || cancelled_by.iter().any(Cancel::is_cancelled)
        })?;
        Ok(Attempts {
            shared,
            dropped,
            unknown: !former.is_empty(),
            late: false,
            told: false,
            warned: false,
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
        let dropped = self.dropped.clone();
        let cancels = || wait.cancelled_by().iter().chain([&dropped]);
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
                return Err(match self.unknown {
                    true => {
                        let message = "the wait was cancelled";
                        self.explain(Error::new(ErrorKind::Cancelled, message), 1)
                    }
                    false => cancelled(format_args!("request {id:?}")),
                });
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
        // Until it returns: it may panic.
        let unknown = std::mem::replace(&mut self.unknown, true);
        let outcome = ask(
            &self.shared.store,
            deadline,
            move |store, by| store.acquire(&call, by),
            late,
        );
        self.unknown = unknown;
        match outcome.map_err(Failure::known)? {
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
        let (factory, call) = (Arc::downgrade(&self.shared.factory), Arc::clone(&self.call));
        let (doubts, store) = (
            Arc::clone(&self.shared.doubts),
            Arc::clone(&self.shared.store),
        );
        let unknown = self.unknown;
        move |outcome| {
            let mut taken = doubts.taken(&call);
            let in_doubt = match &outcome {
                Some(Ok(Decision::Granted(_))) | None => true,
                Some(Ok(Decision::Refused(_))) => unknown,
                Some(Ok(_)) => false,
                Some(Err(failure)) => unknown || failure.unknown,
            };
            // While the factory lives, a clean-up waits for this.
            let alive = factory.upgrade();
            taken.last = alive.is_none();
            if !in_doubt {
                taken.left.clear();
            } else if taken.last
                && let Some(Ok(_)) = outcome
                && let Err(error) = taken.bury(&*store, Moment::now() + CALL)
            {
                log::debug!("request {:?}: {error}", call.wish.external_id);
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
            }) => {
                if exhausted.is_beyond_capacity() && !std::mem::replace(&mut self.warned, true) {
                    log::warn!(
                        "request {:?} waits: {exhausted}",
                        self.call.wish.external_id
                    );
                }
                Ok(Continue(Last::Short(exhausted, next_reclaim, newest)))
            }
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
        matches!(known, Ok(Some(Ok(Some(_)))))
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
        if !self.unknown && !self.late {
            return error;
        }
        let otherwise = match self.call.wish.ttl {
            Some(_) => "it ends with its ttl",
            None => "it stays held until it is released by its id or swept by age",
        };
        error.context(format_args!(
            "the outcome is not known; whatever was acquired is released as soon as the server answers, \
             unless the same request takes it over before; if the factory ends first, {otherwise}"
        ))
    }
}

impl Drop for Attempts<'_> {
    fn drop(&mut self) {
        let end = (self.late || self.unknown).then(|| self.shared.end_of_call(&self.call));
        if !self.late {
            let mut taken = self.shared.doubts.taken(&self.call);
            if !self.unknown {
                taken.left.clear();
            }
        }
        if let Some(end) = end {
            self.shared.end(end);
        }
    }
}

/// Makes a call that ends by `deadline` for its caller, whatever the server does: where that is near, on a
/// thread of its own. `late` hears of an answer that nobody waits for, or that there will be none. `None` if
/// there was no answer in time.
///
/// # Errors
/// `Unavailable` where the system allows no more threads: nothing was asked.
fn ask<T: Send + 'static>(
    store: &Arc<dyn PermitStore>,
    deadline: Moment,
    call: impl FnOnce(&dyn PermitStore, Moment) -> T + Send + 'static,
    late: impl FnOnce(Option<T>) + Send + 'static,
) -> Result<Option<T>> {
    let patience = store.patience();
    let now = Moment::now();
    let by = now + CALL.max(patience);
    if patience.is_zero() {
        return Ok(Some(call(&**store, by)));
    }
    // It may last for its patience longer than it is asked to.
    let inline = by.min(deadline - patience);
    if inline >= now + ROOM {
        return Ok(Some(call(&**store, inline)));
    }
    // A channel of no length: what is sent was received, or comes back.
    let (send, receive) = bounded::<T>(0);
    let (store, by) = (Arc::clone(store), by.min(deadline));
    thread::start("contend-permits", move || {
        let mut late = Late(Some(late), PhantomData);
        let unheard = send.send(call(&*store, by));
        if let Some(late) = late.0.take()
            && let Err(SendError(answer)) = unheard
        {
            late(Some(answer));
        }
    })
    .map_err(Error::before_asking)?;
    Ok(receive.recv_timeout(deadline.remaining()).ok())
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
    Error::new(ErrorKind::Timeout, "the store did not answer in time")
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

#[cfg(test)]
mod tests {
    use super::super::wait_list::WaitList;
    use super::*;

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
