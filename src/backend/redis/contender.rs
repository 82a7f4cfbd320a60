//! A backend's side of a contender.

use std::sync::Arc;
use std::time::Duration;

use super::Common;
use super::keys::Keys;
use super::script::{Call, Reply, integer, ms};
use super::subscription::{Role, Subscription};
use crate::backend::{
    Attempt, Contender, Grant, OnRefusal, Purpose, RawContender, Refusal, Renewal,
};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::parker::Unparker;
use crate::pool::Lane;

/// The least time until the next attempt: what the scripts count is whole milliseconds.
pub(super) const TICK: Duration = Duration::from_millis(1);

pub(super) struct RedisContender {
    common: Arc<Common>,
    contender: Contender,
    keys: Keys,
    /// Packed once; see [`Call`].
    acquire_once: Call,
    acquire_or_queue: Call,
    renew: Call,
    release: Release,
    withdraw: Call,
    subscription: Subscription,
    /// Where we stood in the queue, to stand there again if we were taken out of it; `0` for nowhere.
    place: Vec<u8>,
    /// Whether the server may have us in the queue.
    queued: bool,
    /// An early acquire was sent, and what became of it is not known: we may own.
    unsettled: bool,
    /// No wake-up comes: the subscription failed.
    deaf: bool,
}

impl RedisContender {
    pub(super) fn new(
        common: &Arc<Common>,
        contender: &Contender,
        wake: &Unparker,
    ) -> RedisContender {
        let keys = Keys::of(&common.settings.prefix, &contender.mutex);
        let scripts = &common.scripts;
        let id = &*contender.id;
        let total = ms(contender.lease.total()).to_string();
        let keep = common.keep(contender.lease);
        let (claim, counts_all) = (common.claim.as_str(), common.counts_all());
        let (mutex, token, queue) = (&*keys.mutex, &*keys.token, &*keys.queue);
        let acquire = Call::with_deadline(
            &scripts.acquire,
            &[mutex, token, &keys.fence, queue],
            &[id, &total, claim, &keep, counts_all],
            1,
        );
        let mut acquire_once = acquire.clone();
        acquire_once.set(&[b""]);
        let renew = Call::new(
            &scripts.renew,
            &[mutex, token, &keys.fence],
            &[id, &total, &keep],
            1,
        );
        RedisContender {
            acquire_once,
            acquire_or_queue: acquire,
            renew,
            release: Release::new(common, &keys, id),
            withdraw: Call::with_deadline(
                &scripts.withdraw,
                &[mutex, token, queue],
                &[id, claim, counts_all],
                0,
            ),
            subscription: Subscription::of_contender(&keys, id, wake),
            place: b"0".to_vec(),
            queued: false,
            unsettled: false,
            deaf: false,
            common: Arc::clone(common),
            contender: contender.clone(),
            keys,
        }
    }

    /// Asks to become the owner. With the reply: until when to believe it, where that does not count from
    /// this call.
    fn ask(&mut self, on_refusal: OnRefusal, by: Moment) -> Result<(Reply, Option<Moment>)> {
        if let Some(early) = self.subscription.take_early() {
            self.unsettled = true;
            let until = early.until;
            let reply = early.finish(by);
            if let Some(value) = self.common.deployment.settle(reply)? {
                let reply = Reply::read(value)?;
                if reply.outcome >= 0 {
                    return Ok((reply, Some(until)));
                }
            }
        }
        let mut was_queued = self.queued;
        let call = match on_refusal {
            OnRefusal::Leave => &mut self.acquire_once,
            OnRefusal::Enqueue => {
                self.deaf = self.subscription.ensure(&self.common, by).is_err();
                self.queued = true;
                self.acquire_or_queue.set(&[&self.place])
            }
        };
        let (mut told, mut doubt) = (false, false);
        loop {
            let deployment = &self.common.deployment;
            let called = deployment.call_or(self.keys.slot, call, None, Lane::Other, by);
            // Of two requests, the first may have been granted.
            let called = called.map_err(|error| match doubt {
                true => error.perhaps_sent(),
                false => error,
            });
            if called.as_ref().is_err_and(Error::is_not_sent) {
                // Nothing was sent: there is no place to withdraw from, and no clean-up to wait for.
                self.queued = was_queued;
            }
            let (value, again) = called?;
            was_queued = self.queued;
            doubt |= again.is_some();
            let reply = Reply::read(value)?;
            match reply.outcome {
                // The server's clock was set: the reply told, and the next request knows.
                -1 if !told => told = true,
                // It has looked at as many dead waiters as it does in one go: there may be more.
                0 if reply.left()? == Some(Duration::ZERO)
                    && !reply.owner(self.contender.lease)?.is_in_transition_at(0)
                    && by.remaining() > TICK => {}
                _ => return Ok((reply, None)),
            }
        }
    }

    fn refused(&mut self, on_refusal: OnRefusal, reply: &mut Reply) -> Result<Attempt> {
        if on_refusal == OnRefusal::Enqueue {
            let place = reply.place()?;
            if !place.is_empty() {
                self.place = place;
            }
            self.acquire_or_queue.set(&[&self.place]);
            (self.subscription).prepare(&self.acquire_or_queue, self.contender.lease);
        }
        let lease = self.contender.lease;
        let mut retry_in = reply.left()?.unwrap_or(lease.total()) + TICK;
        if self.deaf {
            retry_in = retry_in.min(lease.request_limit());
        }
        Ok(Attempt::Refused(Refusal {
            owner: reply.owner(lease)?,
            retry_in,
            asked: true,
        }))
    }

    /// Whoever leaves just when its turn has come may own without knowing it.
    fn give_up_turn(&mut self, by: Moment) -> Result<()> {
        self.unsettled |= self.subscription.is_sent();
        if !self.unsettled {
            return Ok(());
        }
        // Without an answer in half the time, it is asked once more: what there is of it is adopted.
        let attempt = self.acquire(OnRefusal::Leave, by - by.remaining() / 2);
        let attempt = attempt.or_else(|_| self.acquire(OnRefusal::Leave, by));
        if let Attempt::Granted(grant) = attempt? {
            self.unsettled = true;
            self.release(grant.owner.fence(), by)?;
            self.unsettled = false;
        }
        Ok(())
    }
}

impl RawContender for RedisContender {
    fn acquire(&mut self, on_refusal: OnRefusal, by: Moment) -> Result<Attempt> {
        // From here on, and not from the refusal on: a message may come in between.
        self.subscription.set_role(Role::Waiting);
        let (mut reply, until) = self.ask(on_refusal, by)?;
        self.unsettled = false;
        match u64::try_from(reply.outcome) {
            Ok(0) => self.refused(on_refusal, &mut reply),
            Ok(fence) => {
                self.subscription.set_role(Role::Owning);
                self.place.clear();
                self.place.push(b'0');
                self.queued = false;
                Ok(Attempt::Granted(Grant {
                    owner: reply.granted(&self.contender.id, fence, self.contender.lease),
                    until,
                }))
            }
            Err(_) => Err(too_late()),
        }
    }

    fn renew(&mut self, fence: u64, by: Moment) -> Result<Renewal> {
        self.renew.set_fence(fence);
        let deployment = &self.common.deployment;
        let value = deployment.call(self.keys.slot, &mut self.renew, Lane::Owner, by)?;
        let reply = Reply::read(value)?;
        if reply.outcome != 1 {
            self.subscription.set_role(Role::Waiting);
            return Ok(Renewal::Lost(reply.owner(self.contender.lease)?));
        }
        self.subscription.set_role(Role::Owning);
        if self.contender.purpose == Purpose::Lead {
            // To hear of a revocation at once. The next renewal tries again.
            let _ = self.subscription.ensure(&self.common, by);
        }
        let owner = reply.granted(&self.contender.id, fence, self.contender.lease);
        Ok(Renewal::Renewed(Grant { owner, until: None }))
    }

    fn release(&mut self, fence: u64, by: Moment) -> Result<bool> {
        self.subscription.set_role(Role::Idle);
        self.release.run(&self.common, Some(fence), by)
    }

    fn withdraw(&mut self, by: Moment) -> Result<()> {
        let settled = self.give_up_turn(by);
        self.subscription.set_role(Role::Idle);
        self.subscription.close();
        self.place = b"0".to_vec();
        if !self.queued {
            return settled;
        }
        let deployment = &self.common.deployment;
        let call = self.withdraw.set(&[]);
        let mut withdraw = || -> Result<bool> {
            let value = deployment.call(self.keys.slot, call, Lane::Other, by)?;
            Ok(Reply::read(value)?.outcome == 1)
        };
        // Too late: the server's clock was set, the reply told, and the next request knows.
        if !withdraw()? && !withdraw()? {
            return Err(too_late());
        }
        self.queued = false;
        settled
    }
}

fn too_late() -> Error {
    Error::new(ErrorKind::Timeout, "redis: the request came too late")
}

/// The release of one owner's ownership.
pub(super) struct Release {
    slot: u16,
    hand_over: Call,
    /// Names only keys that exist: for a slot of a cluster that is on its way, where a queue that does not
    /// exist would keep the mutex from being released. Everybody is told instead of the next one.
    free: Call,
}

impl Release {
    pub(super) fn new(common: &Common, keys: &Keys, id: &str) -> Release {
        let simba = if common.simba { "1" } else { "0" };
        let first = [id, &common.claim, common.counts_all(), simba];
        let call = |keys: &[&str]| Call::new(&common.scripts.release, keys, &first, 1);
        Release {
            slot: keys.slot,
            hand_over: call(&[&keys.mutex, &keys.token, &keys.queue]),
            free: call(&[&keys.mutex, &keys.token]),
        }
    }

    /// Ends the ownership with this fence; `None` for an owner that has none.
    pub(super) fn run(&mut self, common: &Common, fence: Option<u64>, by: Moment) -> Result<bool> {
        let set = |call: &mut Call| {
            match fence {
                Some(fence) => call.set_fence(fence),
                None => call.set(&[b""]),
            };
        };
        let Release {
            slot,
            hand_over,
            free,
        } = self;
        set(hand_over);
        let free = common.is_cluster().then(|| {
            set(free);
            free
        });
        let deployment = &common.deployment;
        let (value, doubt) = deployment.call_or(*slot, hand_over, free, Lane::Owner, by)?;
        let released = integer(Some(&value))? == 1;
        match doubt {
            Some(cause) if !released => Err(Error::new(
                ErrorKind::Unreachable,
                format!(
                    "{cause} while the mutex was released; whether it was released then, or had been lost before, \
                     is not known"
                ),
            )),
            _ => Ok(released),
        }
    }
}
