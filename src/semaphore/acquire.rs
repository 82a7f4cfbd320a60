//! How one request is carried out: its tries and its wait.

use std::sync::Arc;
use std::time::Duration;

use super::queue::{Place, Turn};
use super::request::Wait;
use super::semaphores::{MAX_TRIES, REQUEST_LIMIT, SharedSemaphores};
use crate::backend::permit_store::{Exhausted, Outcome, Request};
use crate::clock::Moment;
use crate::error::ErrorKind::{Cancelled, Panicked, Protocol, Timeout, Unreachable};
use crate::error::{Error, Result};
use crate::parker::Parker;

/// The first pause between two tries.
const FIRST_POLL: Duration = Duration::from_millis(50);

/// The longest, give or take a quarter. On Redis, a process that has not tried for half a second loses its place.
const MAX_POLL: Duration = Duration::from_millis(200);

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
        let (parker, waits, deadline) = (Parker::new(), !wait.is_zero(), wait.deadline());
        let _watched = wait.watch(&parker.unparker());
        // Without a wait, no try begins after the time of one request.
        let grace = if waits { Duration::ZERO } else { REQUEST_LIMIT };
        let end = deadline + grace;
        let mut place = waits.then(|| self.queue.join(request, &parker));
        let is_behind = place.as_ref().is_some_and(|it| it.turn() == Turn::Stay);
        // What an earlier call holds under the id needs no turn.
        let mut is_due = !is_behind || self.is_known(request, deadline);
        let mut poll: Option<Poll> = None;
        let (mut last, mut tries, mut is_unknown) = (None, 0, false);
        let outcome = loop {
            if wait.cancelled_at().is_some() {
                break Err(Error::new(Cancelled, "the wait was cancelled"));
            }
            is_due = is_due
                || match place.as_ref().map_or(Turn::Poll, Place::turn) {
                    Turn::Try => true,
                    Turn::Poll => {
                        let poll = poll.get_or_insert_with(|| Poll::after(FIRST_POLL));
                        poll.at.remaining().is_zero()
                    }
                    Turn::Stay => {
                        poll = None;
                        false
                    }
                };
            // A request that never came first asks once at its end, as one that does not wait.
            if is_due || last.is_none() && end.remaining().is_zero() {
                is_due = false;
                tries += 1;
                let standing = place.as_ref().map(Place::standing);
                let tried = self.call(REQUEST_LIMIT, |store, by| {
                    store.acquire(request, standing.as_ref(), by)
                });
                is_unknown |= tried.as_ref().is_err_and(may_have_been_granted);
                match tried {
                    Ok(Outcome::Exhausted(short)) => {
                        // The semaphores were locked for it: an earlier try has come or gone by now.
                        is_unknown = false;
                        if !matches!(last, Some(Ok(_))) {
                            self.found_exhausted(request, &short, waits);
                        }
                        if let Some(place) = &mut place {
                            place.move_to(&short.semaphore);
                        }
                        poll = Some(Poll::after(poll.map_or(FIRST_POLL, |it| it.pause)));
                        last = Some(Ok(Outcome::Exhausted(short)));
                    }
                    Err(error) if error.is_transient() => {
                        poll = Some(Poll::after(FIRST_POLL));
                        last = Some(Err(error));
                    }
                    tried => break tried,
                }
            }
            let is_over = end.remaining().is_zero()
                || !waits && (tries == MAX_TRIES || matches!(last, Some(Ok(_))));
            if let Some(last) = last.take_if(|_| is_over) {
                break last;
            }
            parker.park(end.min(poll.map_or(Moment::FAR, |it| it.at)));
        };
        match (&outcome, place) {
            (Ok(Outcome::Granted(grant)), Some(place)) => place.granted(&grant.free),
            (_, Some(place)) => self.leave(place, wait, deadline, is_unknown),
            _ => {}
        }
        outcome.map_err(|error| self.explain(request, error, is_unknown))
    }

    fn found_exhausted(&self, request: &Request, short: &Exhausted, waits: bool) {
        (self.probe).tell(|probe| probe.exhausted(&short.semaphore));
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

    /// Gives a place up, on the server too if this was the last request there: otherwise a release would call this
    /// process for a while. A last try without an answer took all the time that this call had.
    fn leave(&self, place: Place<'_>, wait: &Wait, deadline: Moment, is_unknown: bool) {
        let end = wait.cancelled_at().unwrap_or(Moment::FAR);
        let end = end.min(deadline).min(Moment::now());
        if let Some(name) = place.give_up().filter(|_| !is_unknown)
            && let Err(error) = self.store.leave(&name, end + REQUEST_LIMIT)
        {
            log::debug!("cannot leave the line of {name:?}: {error}");
        }
    }

    fn explain(self: &Arc<Self>, request: &Request, error: Error, is_unknown: bool) -> Error {
        let id = &request.external_id;
        if !is_unknown {
            return error.context(format_args!("request {id:?}"));
        }
        if request.take_over {
            self.release_later(request.grant_id(), request.ttl.unwrap_or_default());
        }
        error.context(format_args!(
            "request {id:?} may have been granted; repeat it under the same external id, or release it"
        ))
    }
}

/// An error of the server is an answer: it granted nothing.
fn may_have_been_granted(error: &Error) -> bool {
    let is_unanswered = matches!(error.kind(), Unreachable | Timeout | Protocol | Panicked);
    is_unanswered && !error.is_not_sent()
}

/// When a request that is the first of its line, or in none, tries next.
#[derive(Clone, Copy)]
struct Poll {
    at: Moment,
    /// What follows that try.
    pause: Duration,
}

impl Poll {
    fn after(pause: Duration) -> Poll {
        let jitter = 0.75 + rand::random::<f64>() / 2.0;
        Poll {
            at: Moment::now() + pause.mul_f64(jitter),
            pause: (pause * 2).min(MAX_POLL),
        }
    }
}
