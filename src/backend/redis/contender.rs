//! A backend's side of a contender.

use std::sync::Arc;
use std::time::Duration;

use super::Common;
use super::keys::Keys;
use super::script::{Command, Reply, integer, ms};
use super::subscriber::{Channel, Role, Subscription, Wake};
use crate::backend::{
    Attempt, Contender, Grant, OnRefusal, Purpose, RawContender, Refusal, Renewal,
};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::owner::MutexOwner;
use crate::parker::Unparker;
use crate::pool::Lane;

/// The least time until the next attempt: what the scripts count is whole milliseconds.
pub(super) const TICK: Duration = Duration::from_millis(1);

pub(super) struct RedisContender {
    common: Arc<Common>,
    contender: Contender,
    /// Without the place in the queue.
    acquire: Command,
    /// Without the fence.
    renew: Command,
    release: Command,
    withdraw: Command,
    subscription: Subscription,
    /// The place in the queue, to stand there again after having been taken out; `0` for none.
    place: Vec<u8>,
}

impl RedisContender {
    pub(super) fn new(
        common: &Arc<Common>,
        contender: &Contender,
        wake: &Unparker,
    ) -> RedisContender {
        let keys = Keys::of(&common.settings.prefix, &contender.mutex);
        let (scripts, slot, id) = (&common.scripts, keys.slot, &*contender.id);
        let total = ms(contender.lease.total());
        let keep = common.keep(contender.lease);
        let (claim, counts_all) = (&*common.claim, common.counts_all());
        let (mutex, token, queue) = (&*keys.mutex, &*keys.token, &*keys.queue);
        let mut acquire =
            Command::script(&scripts.acquire, slot, &[mutex, token, &keys.fence, queue])
                .arg(id)
                .arg(total)
                .arg(&[claim, &keep, counts_all])
                .not_after();
        acquire.replicas = common.replicas;
        let channels = vec![
            (keys.turn(id), Channel::Turn),
            (keys.changes(), Channel::Changes),
            (keys.handed(), Channel::Handed),
        ];
        RedisContender {
            acquire,
            renew: Command::script(&scripts.renew, slot, &[mutex, token, &keys.fence])
                .arg(id)
                .arg(total)
                .arg(keep),
            release: release_request(common, &keys, id),
            withdraw: Command::script(&scripts.withdraw, slot, &[mutex, token, queue])
                .arg(&[id, claim, counts_all]),
            subscription: Subscription::new(
                id,
                Wake::Contender(wake.clone()),
                Role::Waiting,
                channels,
                slot,
            ),
            place: b"0".to_vec(),
            common: Arc::clone(common),
            contender: contender.clone(),
        }
    }

    /// Reads what the early acquire came to, and until when it may be believed. `None`: there was none, or the server
    /// did nothing.
    fn early(&mut self, by: Moment) -> Result<Option<(Reply, Option<Moment>)>> {
        let Some(pending) = self.subscription.take_early() else {
            return Ok(None);
        };
        let until = pending.sent + self.contender.lease.belief();
        let answer = pending.finish(by).map_err(|failure| failure.error);
        match answer.and_then(Reply::read) {
            Ok(reply) => Ok(Some((reply, Some(until)))),
            Err(error) if error.is_not_sent() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Makes one attempt, as often as the script meets more dead waiters than it looks at in one go.
    fn ask(&self, request: &Command, by: Moment) -> Result<Reply> {
        loop {
            let answer = self.common.deployment.ask(Lane::Other, by, request)?;
            let reply = Reply::read(answer)?;
            if !reply.is_unfinished() || by.remaining() <= TICK {
                return Ok(reply);
            }
        }
    }

    fn granted(
        &mut self,
        fence: u64,
        reply: &Reply,
        until: Option<Moment>,
        by: Moment,
    ) -> Result<Attempt> {
        self.place = b"0".to_vec();
        let wanted = self.common.replicas;
        if let Some(replicas) = reply.replicas
            && replicas < i64::from(wanted)
        {
            // A failover could lose it.
            log::warn!(
                "{}: {}: refused: {replicas} of {wanted} replicas have the grant in time; see Builder::replicas",
                self.contender.mutex,
                self.contender.id,
            );
            release(&self.common, &self.release, Some(fence), by)?;
            return Ok(Attempt::Refused(Refusal {
                owner: MutexOwner::NONE,
                retry_in: self.contender.lease.request_limit(),
                asked: true,
            }));
        }
        self.subscription.set_role(Role::Owning);
        let owner = reply.granted(&self.contender.id, fence, self.contender.lease);
        Ok(Attempt::Granted(Grant { owner, until }))
    }

    fn refused(&mut self, on_refusal: OnRefusal, reply: Reply, is_deaf: bool) -> Refusal {
        let lease = self.contender.lease;
        let owner = reply.owner(lease);
        let mut retry_in = reply.left().unwrap_or(lease.total()) + TICK;
        if is_deaf {
            retry_in = retry_in.min(lease.request_limit());
        }
        if on_refusal == OnRefusal::Enqueue {
            if !reply.place.is_empty() {
                self.place = reply.place;
            }
            let next = self.acquire.clone().arg(&self.place[..]);
            let longest = lease.request_limit() * 2 / 3;
            self.subscription.prepare(next, longest);
        }
        Refusal {
            owner,
            retry_in,
            asked: true,
        }
    }
}

impl RawContender for RedisContender {
    fn acquire(&mut self, on_refusal: OnRefusal, by: Moment) -> Result<Attempt> {
        // From here on, and not from the refusal on: a message may come in between.
        self.subscription.set_role(Role::Waiting);
        let mut is_deaf = false;
        let (reply, until) = match self.early(by)? {
            Some(early) => early,
            None => {
                let mut place = &b""[..];
                if on_refusal == OnRefusal::Enqueue {
                    is_deaf = self.subscription.ensure(&self.common, by).is_err();
                    place = &self.place;
                }
                let request = self.acquire.clone().arg(place);
                (self.ask(&request, by)?, None)
            }
        };
        match reply.outcome {
            0 => Ok(Attempt::Refused(self.refused(on_refusal, reply, is_deaf))),
            fence => self.granted(fence, &reply, until, by),
        }
    }

    fn renew(&mut self, fence: u64, by: Moment) -> Result<Renewal> {
        let request = self.renew.clone().arg(fence);
        let reply = Reply::read((self.common.deployment).ask(Lane::Owner, by, &request)?)?;
        if reply.outcome != 1 {
            self.subscription.set_role(Role::Waiting);
            return Ok(Renewal::Lost(reply.owner(self.contender.lease)));
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
        release(&self.common, &self.release, Some(fence), by)
    }

    fn withdraw(&mut self, by: Moment) -> Result<()> {
        // The turn may just have come: what was acquired is released. If that fails, its lease runs out.
        if let Ok(Some((reply, _))) = self.early(by - by.remaining() / 2)
            && reply.outcome > 0
        {
            let _ = release(&self.common, &self.release, Some(reply.outcome), by);
        }
        self.subscription.set_role(Role::Idle);
        self.subscription.close();
        self.place = b"0".to_vec();
        let withdrawn = (self.common.deployment).call(Lane::Other, by, &self.withdraw);
        withdrawn.map(drop)
    }
}

/// The release of one owner's ownership, without the fence.
pub(super) fn release_request(common: &Common, keys: &Keys, id: &str) -> Command {
    let names = [&*keys.mutex, &*keys.token, &*keys.queue];
    let simba = if common.simba { "1" } else { "0" };
    Command::script(&common.scripts.release, keys.slot, &names)
        .arg(&[id, &common.claim, common.counts_all(), simba])
        .optional_queue()
}

/// Ends the ownership with this fence; `None` for an owner that has none.
pub(super) fn release(
    common: &Common,
    request: &Command,
    fence: Option<u64>,
    by: Moment,
) -> Result<bool> {
    let fence = fence.map_or_else(String::new, |fence| fence.to_string());
    let answer = (common.deployment).ask(Lane::Owner, by, &request.clone().arg(fence))?;
    let released = integer(Some(&answer.value))? == 1;
    match answer.doubt {
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
