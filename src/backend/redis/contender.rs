//! A backend's side of a contender.

use std::sync::Arc;
use std::time::Duration;

use super::Common;
use super::keys::Keys;
use super::script::{ACQUIRE, Command, RENEW, Reply, WITHDRAW, ms};
use super::subscriber::{Role, Subscription};
use crate::backend::{
    Attempt, CLAIM_TIME, Contender, Grant, OnRefusal, Purpose, RawContender, Refusal, Renewal,
};
use crate::clock::Moment;
use crate::error::Result;
use crate::owner::MutexOwner;
use crate::parker::Unparker;
use crate::pool::Lane;

/// The least time until the next attempt: what the scripts count is whole milliseconds.
pub(super) const TICK: Duration = Duration::from_millis(1);

/// How long the last fence is remembered after the lease. After that the server's time in microseconds is
/// the floor, which lies above every earlier fence unless the clock was set back by more.
const REMEMBERED: Duration = Duration::from_secs(3600);

/// What `acquire.lua` is told by a contender that does not queue, or that has no place yet.
const NO_QUEUE: &[u8] = b"";
const NO_PLACE: &[u8] = b"0";

pub(super) struct RedisContender {
    common: Arc<Common>,
    contender: Contender,
    keys: Keys,
    subscription: Subscription,
    /// The place in the queue, to stand there again after having been taken out.
    place: Vec<u8>,
}

impl RedisContender {
    pub(super) fn new(
        common: &Arc<Common>,
        contender: &Contender,
        wake: &Unparker,
    ) -> RedisContender {
        let keys = common.keys(&contender.mutex);
        let (id, wake) = (&*contender.id, wake.clone());
        let channels = keys.channels(Some(id));
        RedisContender {
            subscription: Subscription::new(id, move |_| wake.unpark(), channels, keys.slot),
            common: Arc::clone(common),
            contender: contender.clone(),
            keys,
            place: NO_PLACE.to_vec(),
        }
    }

    fn acquire_request(&self, place: &[u8]) -> Command {
        let (common, keys) = (&self.common, &self.keys);
        let names = [&keys.mutex, &keys.token, &keys.fence, &keys.queue];
        let total = ms(self.contender.lease.total());
        let mut request = Command::script(&ACQUIRE, keys.slot, &names)
            .arg((&*self.contender.id, total, ms(CLAIM_TIME)))
            .arg((self.keep(), !common.is_cluster(), place))
            .not_after();
        request.replicas = common.replicas;
        request
    }

    /// How long the last fence is kept, in milliseconds, or `` for ever: Simba 4 counts on from it.
    fn keep(&self) -> String {
        if self.common.simba {
            return String::new();
        }
        ms(self.contender.lease.total() + REMEMBERED).to_string()
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
            let reply = Reply::read(self.common.deployment.ask(Lane::Other, by, request)?)?;
            if !reply.is_unfinished() || by.remaining() <= TICK {
                return Ok(reply);
            }
        }
    }

    fn granted(&mut self, reply: &Reply, until: Option<Moment>, by: Moment) -> Result<Attempt> {
        self.place = NO_PLACE.to_vec();
        let (fence, lease) = (reply.outcome, self.contender.lease);
        let wanted = self.common.replicas;
        if let Some(replicas) = reply.replicas
            && replicas < i64::from(wanted)
        {
            let Contender { mutex, id, .. } = &self.contender;
            log::warn!(
                "{mutex}: {id}: refused: {replicas} of {wanted} replicas have the grant in time; see Builder::replicas"
            );
            // A failover could lose it.
            let released = self.common.release(&self.keys, id, fence, by);
            released.map_err(|error| error.perhaps_sent())?;
            return Ok(Attempt::Refused(Refusal {
                owner: MutexOwner::NONE,
                retry_in: lease.request_limit(),
            }));
        }
        self.subscription.set_role(Role::Owning);
        let owner = reply.granted(&self.contender.id, fence, lease);
        Ok(Attempt::Granted(Grant { owner, until }))
    }

    fn refused(&mut self, on_refusal: OnRefusal, reply: Reply) -> Refusal {
        let lease = self.contender.lease;
        let refusal = Refusal {
            owner: reply.owner(lease),
            retry_in: reply.left().unwrap_or(lease.total()) + TICK,
        };
        if on_refusal == OnRefusal::Enqueue {
            self.place = reply.place;
            let next = self.acquire_request(&self.place);
            self.subscription
                .prepare(next, lease.request_limit() * 2 / 3);
        }
        refusal
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
                let mut place = NO_QUEUE;
                if on_refusal == OnRefusal::Enqueue {
                    let _ = self.subscription.ensure(&self.common, by);
                    is_deaf = self.subscription.is_deaf();
                    place = &self.place;
                }
                (self.ask(&self.acquire_request(place), by)?, None)
            }
        };
        if reply.outcome > 0 {
            return self.granted(&reply, until, by);
        }
        let mut refusal = self.refused(on_refusal, reply);
        if is_deaf {
            let limit = self.contender.lease.request_limit();
            refusal.retry_in = refusal.retry_in.min(limit);
        }
        Ok(Attempt::Refused(refusal))
    }

    fn renew(&mut self, fence: u64, by: Moment) -> Result<Renewal> {
        let (common, keys, lease) = (&self.common, &self.keys, self.contender.lease);
        let request = Command::script(&RENEW, keys.slot, &[&keys.mutex, &keys.token, &keys.fence]);
        let request = request.arg((&*self.contender.id, ms(lease.total()), self.keep(), fence));
        let reply = Reply::read(common.deployment.ask(Lane::Owner, by, &request)?)?;
        if reply.outcome == 0 {
            self.subscription.set_role(Role::Waiting);
            return Ok(Renewal::Lost(reply.owner(lease)));
        }
        self.subscription.set_role(Role::Owning);
        if self.contender.purpose == Purpose::Lead {
            // To hear of a revocation at once. The next renewal tries again.
            let _ = self.subscription.ensure(common, by);
        }
        let owner = reply.granted(&self.contender.id, fence, lease);
        Ok(Renewal::Renewed(Grant { owner, until: None }))
    }

    fn release(&mut self, fence: u64, by: Moment) -> Result<bool> {
        self.subscription.set_role(Role::Idle);
        (self.common).release(&self.keys, &self.contender.id, fence, by)
    }

    fn withdraw(&mut self, by: Moment) -> Result<()> {
        let early = self.early(by - by.remaining() / 2);
        self.subscription.set_role(Role::Idle);
        self.subscription.close();
        self.place = NO_PLACE.to_vec();
        let (common, keys, id) = (&self.common, &self.keys, &*self.contender.id);
        if let Ok(Some((reply, _))) = early
            && reply.outcome > 0
        {
            // The turn had just come. If this fails, the lease runs out.
            let _ = common.release(keys, id, reply.outcome, by);
        }
        let names = [&keys.mutex, &keys.token, &keys.queue];
        let request = Command::script(&WITHDRAW, keys.slot, &names);
        let request = request.arg((id, ms(CLAIM_TIME), !common.is_cluster()));
        common.deployment.call(Lane::Other, by, &request).map(drop)
    }
}
