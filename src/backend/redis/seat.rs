//! A contender's place at a mutex.

use std::sync::Arc;
use std::time::Duration;

use super::Core;
use super::keys::Keys;
use super::listener::{Ear, Listener, Purpose};
use super::pool::Lane;
use super::reply::{Reply, is_done, ms};
use super::script::Call;
use crate::backend::{Attempt, Entry, Grant, Place, Refusal, Renewal, Seat};
use crate::bell::Waker;
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};

/// The least time until the next attempt: what the scripts count is whole milliseconds.
pub(super) const TICK: Duration = Duration::from_millis(1);

/// The outcome of an attempt to which the server came when nobody waited for it any more.
const TOO_LATE: i64 = 2;

pub(super) struct RedisSeat {
    core: Arc<Core>,
    place: Place,
    keys: Keys,
    /// Packed once; see [`Call`].
    try_acquire: Call,
    queue_acquire: Call,
    renew: Call,
    release: Call,
    ear: Ear,
    /// Where we stood in the queue, to stand there again if we were taken out of it.
    queued_at: Vec<u8>,
    /// Whether the server may have us in the queue.
    traced: bool,
}

impl RedisSeat {
    pub(super) fn new(core: &Arc<Core>, place: &Place) -> RedisSeat {
        let keys = Keys::of(&core.prefix, &place.mutex);
        let id = place.id.as_bytes();
        let total = ms(place.lease.total()).to_string();
        let transition = ms(place.lease.transition()).to_string();
        let claim = ms(core.claim).to_string();
        let (total, transition, claim) =
            (total.as_bytes(), transition.as_bytes(), claim.as_bytes());
        let acquire = |entry: &[u8]| {
            let first = [id, total, transition, claim, entry];
            Call::new(&core.scripts.acquire, &keys, &first, 3)
        };
        let mut try_acquire = acquire(b"try");
        try_acquire.set(&[b"", b""]);
        RedisSeat {
            try_acquire,
            queue_acquire: acquire(b"queue"),
            renew: Call::new(&core.scripts.renew, &keys, &[id, total], 2),
            release: Call::new(&core.scripts.release, &keys, &[id, claim], 2),
            ear: Ear::new(
                [
                    (keys.turn(&place.id), Purpose::Turn),
                    (keys.next(&place.id), Purpose::Next),
                ],
                keys.slot,
            ),
            keys,
            core: Arc::clone(core),
            place: place.clone(),
            queued_at: Vec::new(),
            traced: false,
        }
    }

    /// Asks to become the owner. With the reply: until when to believe it, where that does not count from
    /// this call.
    fn ask(&mut self, entry: Entry, by: Moment) -> Result<(Reply, Option<Moment>)> {
        let released_by = self.ear.listener().and_then(Listener::take_released_by);
        if let Some(start) = self.ear.head_start() {
            let until = start.until;
            if let Some(value) = self.core.finish(start, by)? {
                let reply = Reply::read(value)?;
                if reply.outcome != TOO_LATE {
                    return Ok((reply, Some(until)));
                }
            }
        }
        let call = match entry {
            Entry::Try => &mut self.try_acquire,
            Entry::Queue => {
                self.ear.follow(&self.core, by)?;
                self.traced = true;
                let released_by = released_by.unwrap_or_default();
                self.queue_acquire.set(&[&self.queued_at, &released_by])
            }
        };
        let mut ask = || Reply::read(self.core.call(self.keys.slot, call, Lane::Other, by)?);
        let mut reply = ask()?;
        if reply.outcome == TOO_LATE {
            // The server's clock was set: the reply told, and the next request knows.
            reply = ask()?;
        }
        Ok((reply, None))
    }

    fn refused(&mut self, entry: Entry, reply: &mut Reply) -> Result<Attempt> {
        if entry == Entry::Queue {
            if self.queued_at.is_empty() {
                self.queued_at = reply.place()?;
            }
            let lease = self.place.lease;
            self.ear.order(&self.queue_acquire, &self.queued_at, lease);
        }
        let left = reply.left()?.unwrap_or(self.place.lease.total());
        Ok(Attempt::Refused(Refusal {
            owner: reply.owner(self.place.lease)?,
            retry_in: left + TICK,
        }))
    }

    /// Whoever leaves just when its turn has come may own without knowing it.
    fn give_up_turn(&mut self, by: Moment) -> Result<()> {
        if !self.ear.cancel() {
            return Ok(());
        }
        // Without an answer in half the time, it is asked once more: what there is of it is adopted.
        let attempt = self.acquire(Entry::Try, by - by.remaining() / 2);
        let attempt = attempt.or_else(|_| self.acquire(Entry::Try, by));
        if let Attempt::Granted(grant) = attempt? {
            self.release(grant.owner.fence(), by)?;
        }
        Ok(())
    }

    fn about(&self, error: Error) -> Error {
        error.context(format_args!("mutex {:?}", self.place.mutex))
    }
}

impl Seat for RedisSeat {
    fn listen(&mut self, waker: &Waker, by: Moment) -> Result<()> {
        self.ear
            .listen(&self.core, waker, by)
            .map_err(|error| self.about(error))
    }

    fn acquire(&mut self, entry: Entry, by: Moment) -> Result<Attempt> {
        let mut attempt = || {
            let (mut reply, until) = self.ask(entry, by)?;
            match reply.outcome {
                1 => {
                    if let Some(listener) = self.ear.listener() {
                        listener.calm();
                    }
                    self.queued_at.clear();
                    self.traced = false;
                    Ok(Attempt::Granted(Grant {
                        owner: reply.granted(&self.place.id, self.place.lease)?,
                        until,
                    }))
                }
                0 => self.refused(entry, &mut reply),
                _ => Err(Error::new(
                    ErrorKind::Timeout,
                    "redis: the request came too late",
                )),
            }
        };
        attempt().map_err(|error| self.about(error))
    }

    fn renew(&mut self, fence: u64, by: Moment) -> Result<Renewal> {
        self.renew.set(&[fence.to_string().as_bytes()]);
        let half = by - by.remaining() / 2;
        let mut renew = || {
            let value = self
                .core
                .call(self.keys.slot, &mut self.renew, Lane::Owner, by)?;
            let reply = Reply::read(value)?;
            let owner = reply.owner(self.place.lease)?;
            if reply.outcome != 1 {
                return Ok(Renewal::Lost(owner));
            }
            // An owner has no need to hear anything now: it may fail, and must not use up the time in
            // which the renewal counts.
            if Moment::now() < half {
                let _ = self.ear.follow(&self.core, half);
            }
            Ok(Renewal::Renewed(Grant { owner, until: None }))
        };
        renew().map_err(|error| self.about(error))
    }

    fn release(&mut self, fence: u64, by: Moment) -> Result<bool> {
        self.release.set(&[fence.to_string().as_bytes()]);
        self.core
            .call(self.keys.slot, &mut self.release, Lane::Owner, by)
            .and_then(|value| is_done(&value))
            .map_err(|error| self.about(error))
    }

    fn withdraw(&mut self, by: Moment) -> Result<()> {
        let settled = self.give_up_turn(by);
        let node = self.ear.close();
        self.queued_at.clear();
        if !self.traced {
            return settled;
        }
        self.release.set(&[b""]);
        self.core
            .call(self.keys.slot, &mut self.release, Lane::Other, by)
            .map_err(|error| self.about(error))?;
        self.traced = false;
        // Who waited in vain hands over to nobody, so there is time to leave no subscription either.
        if let Some(node) = node {
            node.hurry();
        }
        settled
    }
}
