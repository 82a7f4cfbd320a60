//! How one request is carried out: its tries and its wait.

use std::sync::Arc;
use std::time::Duration;

use super::queue::{Place, Turn};
use super::request::Wait;
use super::semaphores::{MAX_TRIES, REQUEST_LIMIT, SharedSemaphores};
use crate::backend::permit_store::{Exhausted, Outcome, Request};
use crate::cancel::{Cancel, cancelled};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::parker::Parker;

/// The first pause between two tries.
const FIRST_POLL: Duration = Duration::from_millis(50);

/// The longest, however seldom the store is to be asked.
const MAX_POLL: Duration = Duration::from_millis(250);

impl SharedSemaphores {
    /// Tries until the request is granted or refused, or its wait is over. Transient failures are tried again: three
    /// times in all without a wait, until its end with one.
    ///
    /// # Errors
    /// The outcome may be unknown. The same request again finds its grant; a guard's is released by one attempt
    /// in the background.
    pub(super) fn acquire(
        self: &Arc<SharedSemaphores>,
        request: &Arc<Request>,
        wait: &Wait,
    ) -> Result<Outcome> {
        let parker = Parker::new();
        let mut place = (!wait.is_zero()).then(|| self.queue.join(request, &parker));
        let (mut is_unknown, deadline) = (false, wait.deadline());
        let outcome = self.tries(request, wait, &parker, &mut place, &mut is_unknown);
        // Otherwise a release would call this process for a while. A last try without an answer took all the time that
        // this call had.
        if let Some(name) = place.and_then(Place::give_up)
            && let Some(lines) = self.store.lines()
            && !is_unknown
        {
            let cancelled_at = wait.cancelled_by().iter().filter_map(Cancel::cancelled_at);
            let end = cancelled_at.fold(deadline.min(Moment::now()), Moment::min);
            let left = lines.leave(&name, end + REQUEST_LIMIT);
            left.unwrap_or_else(|error| log::debug!("cannot leave the line of {name:?}: {error}"));
        }
        outcome.map_err(|error| {
            let id = &request.external_id;
            if !is_unknown {
                return error.context(format_args!("request {id:?}"));
            }
            if request.take_over {
                self.release_later(request.grant_id(), request.ttl.unwrap_or_default());
                return error.context(format_args!("request {id:?}, which may have been granted"));
            }
            error.context(format_args!(
                "request {id:?} may have been granted; repeat it under the same external id, or release it"
            ))
        })
    }

    /// `is_unknown` says after an error whether something may have been granted.
    fn tries(
        &self,
        request: &Arc<Request>,
        wait: &Wait,
        parker: &Parker,
        place: &mut Option<Place<'_>>,
        is_unknown: &mut bool,
    ) -> Result<Outcome> {
        let (waits, deadline) = (!wait.is_zero(), wait.deadline());
        // Without a wait, no try begins after the time of one request.
        let last_try = Moment::now() + REQUEST_LIMIT;
        let cancels = wait.cancelled_by();
        let unparkers = cancels.iter().map(|it| it.watch(&parker.unparker()));
        let _watched: Vec<_> = unparkers.collect();
        // What an earlier call holds under the id needs no turn.
        let mut replay =
            place.as_ref().is_some_and(Place::waits) && self.is_known(request, deadline);
        let mut poll = Poll::new(self.store.poll_interval().min(MAX_POLL));
        let mut last: Option<Result<Exhausted>> = None;
        let mut tries = 0;
        loop {
            if cancels.iter().any(Cancel::is_cancelled) {
                return Err(match *is_unknown {
                    true => Error::new(ErrorKind::Cancelled, "the wait was cancelled"),
                    false => cancelled("nothing was granted"),
                });
            }
            let turn = place.as_ref().map_or(Turn::Poll, Place::turn);
            let is_over = waits && deadline.remaining().is_zero();
            // A request that never came first asks once at its end, as one that does not wait.
            let asks_at_end = is_over && last.is_none();
            if std::mem::take(&mut replay) || asks_at_end || poll.is_due(turn) {
                tries += 1;
                let standing = place.as_ref().map(Place::standing);
                let outcome = self.call(REQUEST_LIMIT, |store, by| {
                    match (store.lines(), &standing) {
                        (Some(lines), Some(standing)) => lines.acquire(request, standing, by),
                        _ => store.acquire(request, by),
                    }
                });
                match outcome {
                    Ok(Outcome::Exhausted(short)) => {
                        // The semaphores were locked for it: an earlier try has come or gone by now.
                        *is_unknown = false;
                        if !matches!(last, Some(Ok(_))) {
                            self.found_exhausted(request, &short, waits);
                        }
                        match place {
                            Some(place) => place.move_to(&short),
                            None => return Ok(Outcome::Exhausted(short)),
                        }
                        poll.later();
                        last = Some(Ok(short));
                    }
                    Ok(outcome) => {
                        if let (Outcome::Granted(grant), Some(place)) = (&outcome, place.take()) {
                            // One that came since the call has none.
                            let others = standing.is_some_and(|it| it.others);
                            place.granted(&grant.free, others || self.store.lines().is_none());
                        }
                        return Ok(outcome);
                    }
                    Err(error) => {
                        *is_unknown |= may_have_been_granted(&error);
                        let again = waits || tries < MAX_TRIES && !last_try.remaining().is_zero();
                        if !error.is_transient() || !again {
                            return Err(error);
                        }
                        poll = Poll::new(poll.longest);
                        poll.later();
                        last = Some(Err(error));
                    }
                }
            } else if let Some(last) = last.take_if(|_| is_over) {
                return last.map(Outcome::Exhausted);
            }
            let next = poll.at.unwrap_or(Moment::FAR);
            parker.park(if waits { deadline.min(next) } else { next });
        }
    }

    fn found_exhausted(&self, request: &Request, short: &Exhausted, waits: bool) {
        let name = &short.semaphore;
        self.probe.tell(|probe| probe.exhausted(name));
        if waits && short.is_beyond_capacity() {
            log::warn!("request {:?} waits: {short}", request.external_id);
        }
    }

    /// Whether the store knows something under the external id, as far as one look can tell.
    fn is_known(&self, request: &Request, deadline: Moment) -> bool {
        let id = &request.external_id;
        let limit = REQUEST_LIMIT.min(deadline.remaining());
        let look = || self.call(limit, |store, by| store.status(id, by));
        !request.generated && look().is_ok_and(|status| status.is_some())
    }
}

/// An error of the server is an answer: it granted nothing.
fn may_have_been_granted(error: &Error) -> bool {
    let unanswered = [
        ErrorKind::Unreachable,
        ErrorKind::Timeout,
        ErrorKind::Protocol,
        ErrorKind::Panicked,
    ];
    !error.is_not_sent() && unanswered.contains(&error.kind())
}

/// When a request that is the first of its line, or in none, tries next.
struct Poll {
    /// `None` while others come first.
    at: Option<Moment>,
    pause: Duration,
    longest: Duration,
}

impl Poll {
    /// Polls at once.
    fn new(longest: Duration) -> Poll {
        Poll {
            at: Some(Moment::now()),
            pause: FIRST_POLL.min(longest),
            longest,
        }
    }

    fn is_due(&mut self, turn: Turn) -> bool {
        if turn == Turn::Stay {
            self.at = None;
        } else if turn == Turn::Poll && self.at.is_none() {
            *self = Poll::new(self.longest);
            self.later();
        }
        turn == Turn::Try || self.at.is_some_and(|at| at.remaining().is_zero())
    }

    /// Polls after a pause, which grows.
    fn later(&mut self) {
        let jitter = 0.75 + rand::random::<f64>() / 2.0;
        self.at = Some(Moment::now() + self.pause.mul_f64(jitter));
        self.pause = (self.pause * 2).min(self.longest);
    }
}
