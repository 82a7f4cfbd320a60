//! Semaphores on Redis: every call is one script, and atomic on the server.
//!
//! All semaphores of a prefix have their keys under one hash tag, so one script takes permits of several of them, or
//! none. What has expired is taken back by the acquire that needs it. Fences are the server's time in microseconds
//! unless the last one was higher. `lua/permits-prelude.lua` describes the keys.
//!
//! A process that waits stands in a line on the server. A release tells the process that is first there; it loses its
//! place if it has not tried for half a second.
//!
//! # Limits
//! - The semaphores of one prefix lie in one slot: in a cluster, on one master. Another prefix is another slot.
//! - Redis replicates asynchronously. After a failover to a replica that missed the last writes, permits may be granted
//!   twice, until the ttl of the first holder has passed.
//! - `usage` counts what has expired in the first thousand requests that have.

mod reply;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use self::reply::{Fields, Record};
use super::Common;
use super::script::{Command, Script, ms};
use super::subscriber::Subscription;
use crate::backend::permit_store::{
    CapacityChange, Discrepancy, Exhausted, Grant, GrantId, Holder, OnTurn, Outcome, Permit,
    PermitStore, Purge, Reason, Released, Renewed, Request, RequestStatus, ServerLines, Standing,
    StoreTime, Sweep, Swept, Usage, free, log_swept, no_such_semaphore, semaphore_in_use,
};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::pool::Lane;

/// How often a waiting request tries without being told to: more often than its process would lose its place.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// The semaphores of one prefix.
pub(super) struct RedisPermits {
    common: Arc<Common>,
    scripts: Scripts,
    /// This factory, in the lines of the semaphores.
    process: String,
    /// To the channel on which it hears that its turn has come.
    subscription: Mutex<Option<Subscription>>,
}

/// The scripts with their keys; a call appends its arguments.
struct Scripts {
    acquire: Command,
    leave: Command,
    release: Command,
    renew: Command,
    semaphore: Command,
    look: Command,
    sweep: Command,
    purge: Command,
    audit: Command,
}

impl Scripts {
    fn new(prefix: &str, slot: u16) -> Scripts {
        let keys = ["counts", "requests", "held", "released", "queue", "history"];
        let keys = keys.map(|name| format!("{}:{name}", tagged(prefix)));
        let keys = keys.each_ref().map(String::as_str);
        let script = |text: &str| {
            let prelude = include_str!("../../../../lua/permits-prelude.lua");
            Command::script(&Script::new(format!("{prelude}{text}")), slot, &keys)
        };
        Scripts {
            acquire: script(include_str!("../../../../lua/permits-acquire.lua")),
            leave: script(include_str!("../../../../lua/permits-leave.lua")),
            release: script(include_str!("../../../../lua/permits-release.lua")),
            renew: script(include_str!("../../../../lua/permits-renew.lua")),
            semaphore: script(include_str!("../../../../lua/permits-semaphore.lua")),
            look: script(include_str!("../../../../lua/permits-look.lua")),
            sweep: script(include_str!("../../../../lua/permits-sweep.lua")),
            purge: script(include_str!("../../../../lua/permits-purge.lua")),
            audit: script(include_str!("../../../../lua/permits-audit.lua")),
        }
    }
}

/// What the keys and channels of a prefix begin with.
fn tagged(prefix: &str) -> String {
    format!("{prefix}:permits:{{{prefix}}}")
}

fn flag(set: bool) -> &'static str {
    if set { "1" } else { "0" }
}

impl RedisPermits {
    pub(super) fn new(common: &Arc<Common>) -> RedisPermits {
        let prefix = &common.settings.prefix;
        RedisPermits {
            scripts: Scripts::new(prefix, common.keys(prefix).slot),
            process: format!("{:032x}", rand::random::<u128>()),
            subscription: Mutex::new(None),
            common: Arc::clone(common),
        }
    }

    /// Runs a script whose reply begins with a code, which is returned.
    fn ask(&self, lane: Lane, by: Moment, command: Command) -> Result<(i64, Fields)> {
        let value = self.common.deployment.call(lane, by, &command)?;
        let mut fields = Fields::of(value)?;
        Ok((fields.code()?, fields))
    }

    /// Runs a script page by page; its last argument is the cursor. Returns the server's time of the first page;
    /// `None` if the script knows no such semaphore.
    fn pages(
        &self,
        by: Moment,
        command: &Command,
        mut each: impl FnMut(&mut Fields) -> Result<()>,
    ) -> Result<Option<StoreTime>> {
        let (mut cursor, mut began): (Arc<str>, _) = (Arc::from("0"), None);
        loop {
            let command = command.clone().arg(&*cursor);
            let value = self.common.deployment.call(Lane::Other, by, &command)?;
            let mut page = Fields::of(value)?;
            cursor = page.text()?;
            let now = page.number()?;
            let began = *began.get_or_insert(now);
            while !page.is_empty() {
                each(&mut page)?;
            }
            match &*cursor {
                "" => return Ok(None),
                "0" => return Ok(Some(began)),
                _ => {}
            }
        }
    }

    /// Makes one attempt; `place` for a request that waits.
    fn attempt(&self, request: &Request, place: Option<&Standing>, by: Moment) -> Result<Outcome> {
        let mut command = (self.scripts.acquire.clone())
            .arg(&*request.external_id)
            .arg(request.token)
            .arg(request.owner.as_deref().unwrap_or_default())
            .arg(request.ttl.map_or(0, ms))
            .arg(flag(request.take_over))
            .arg(flag(!request.generated));
        for (name, count) in &request.permits {
            command = command.arg(&**name).arg(*count);
        }
        let command = command
            .arg(place.map_or("", |_| &*self.process))
            .arg(place.and_then(|it| it.line.as_deref()).unwrap_or_default())
            .arg(flag(place.is_some_and(|it| it.others)))
            .not_after();
        let mut late = false;
        loop {
            let sent = Moment::now();
            let (code, mut reply) = self.ask(Lane::Other, by, command.clone())?;
            let outcome = match code {
                1 => Some(Outcome::Granted(granted(request, sent, &mut reply)?)),
                0 => Some(Outcome::Exhausted(Exhausted {
                    semaphore: reply.text()?,
                    capacity: reply.number()?,
                    held: reply.number()?,
                    wanted: reply.number()?,
                })),
                2 => return Ok(Outcome::Known(Record::read(reply)?.status)),
                // There is more to take back than one script takes.
                3 => None,
                // The server's clock was set: the reply told, and the next request knows.
                -1 if !late => {
                    late = true;
                    None
                }
                -1 => {
                    let message = "redis: the request came too late";
                    return Err(Error::new(ErrorKind::Timeout, message).not_sent());
                }
                -2 => return Err(no_such_semaphore(&reply.text()?)),
                _ => {
                    let status = Record::read(reply)?.status;
                    return Err(status.conflict(&request.external_id));
                }
            };
            while !reply.is_empty() {
                log_swept(&reply.text()?, Reason::Expired);
            }
            if let Some(outcome) = outcome {
                return Ok(outcome);
            }
        }
    }
}

fn granted(request: &Request, sent: Moment, reply: &mut Fields) -> Result<Grant> {
    let fence = reply.number()?;
    let remaining = reply.ms()?;
    let (mut permits, mut free) = (Vec::new(), Vec::new());
    for (name, count) in &request.permits {
        permits.push(Permit {
            semaphore: Arc::clone(name),
            count: *count,
            fence,
        });
        free.push(reply.number()?);
    }
    Ok(Grant {
        permits,
        sent,
        remaining,
        free,
    })
}

/// Appends what names a grant.
fn named(command: Command, grant: &GrantId) -> Command {
    let token = grant.token.map(|token| token.to_string());
    let command = command.arg(&*grant.external_id);
    command.arg(token.unwrap_or_default())
}

impl PermitStore for RedisPermits {
    fn realm(&self) -> &str {
        &self.common.realm
    }

    fn min_ttl(&self) -> Duration {
        Duration::from_millis(100)
    }

    fn poll_interval(&self) -> Duration {
        POLL_INTERVAL
    }

    fn create(&self, name: &str, capacity: u32, by: Moment) -> Result<bool> {
        let command = self.scripts.semaphore.clone().arg("create").arg(name);
        let (code, _) = self.ask(Lane::Other, by, command.arg(capacity))?;
        Ok(code == 1)
    }

    fn set_capacity(
        &self,
        name: &str,
        capacity: u32,
        changed_by: Option<&str>,
        by: Moment,
    ) -> Result<u32> {
        let command = self.scripts.semaphore.clone().arg("set").arg(name);
        let command = command.arg(capacity).arg(changed_by.unwrap_or_default());
        match self.ask(Lane::Other, by, command)? {
            (1, mut reply) => reply.number(),
            _ => Err(no_such_semaphore(name)),
        }
    }

    fn history(&self, name: &str, by: Moment) -> Result<Vec<CapacityChange>> {
        let command = self.scripts.look.clone().arg("history").arg(name);
        let mut history = Vec::new();
        self.pages(by, &command, |page| {
            history.push(CapacityChange {
                semaphore: Arc::from(name),
                changed_at: page.number()?,
                changed_by: page.some_text()?,
                from: page.number()?,
                to: page.number()?,
            });
            Ok(())
        })?;
        Ok(history)
    }

    fn delete(&self, name: &str, by: Moment) -> Result<bool> {
        let command = self.scripts.semaphore.clone().arg("delete").arg(name);
        match self.ask(Lane::Other, by, command)? {
            (0, mut reply) => {
                let (capacity, held) = (reply.number()?, reply.number()?);
                Err(semaphore_in_use(name, held, capacity))
            }
            (code, _) => Ok(code == 1),
        }
    }

    fn usage(&self, name: Option<&str>, by: Moment) -> Result<Vec<Usage>> {
        let command = self.scripts.look.clone().arg("usage");
        let command = command.arg(name.unwrap_or_default());
        let (_, mut reply) = self.ask(Lane::Other, by, command)?;
        let mut found = Vec::new();
        while !reply.is_empty() {
            let semaphore = reply.text()?;
            let (capacity, held): (u32, i64) = (reply.number()?, reply.number()?);
            found.push(Usage {
                semaphore,
                capacity,
                held: u64::try_from(held).unwrap_or(0),
                requests: reply.number()?,
                expired: reply.number()?,
                free: free(capacity, held),
            });
        }
        found.sort_by(|one, two| one.semaphore.cmp(&two.semaphore));
        Ok(found)
    }

    fn holders(&self, name: &str, by: Moment) -> Result<Vec<Holder>> {
        let command = self.scripts.look.clone().arg("held").arg(name);
        // A request may be on two pages.
        let mut holders = BTreeMap::new();
        let known = self.pages(by, &command, |page| {
            let holder = page.record()?.holder(name);
            holders.extend(holder.map(|it| (it.fence, it)));
            Ok(())
        })?;
        known.ok_or_else(|| no_such_semaphore(name))?;
        Ok(holders.into_values().collect())
    }

    fn status(&self, external_id: &str, by: Moment) -> Result<Option<RequestStatus>> {
        let command = self.scripts.look.clone().arg("status").arg(external_id);
        match self.ask(Lane::Other, by, command)? {
            (0, _) => Ok(None),
            (_, reply) => Ok(Some(Record::read(reply)?.status)),
        }
    }

    fn acquire(&self, request: &Arc<Request>, by: Moment) -> Result<Outcome> {
        self.attempt(request, None, by)
    }

    fn renew(&self, grants: &[GrantId], by: Moment) -> Result<Vec<Renewed>> {
        let command = grants.iter().fold(self.scripts.renew.clone(), named);
        let (_, mut reply) = self.ask(Lane::Owner, by, command)?;
        let mut renewed = Vec::with_capacity(grants.len());
        while !reply.is_empty() {
            renewed.push(match reply.number::<i64>()? {
                1 => Renewed::Yes,
                0 => Renewed::Lost,
                _ => Renewed::Unknown,
            });
        }
        Ok(renewed)
    }

    fn release(&self, grant: &GrantId, by: Moment) -> Result<Released> {
        let command = named(self.scripts.release.clone(), grant);
        let answer = self.common.deployment.ask(Lane::Owner, by, &command)?;
        let mut reply = Fields::of(answer.value)?;
        match (reply.code()?, answer.doubt) {
            (1, _) => Ok(Released::Permits(reply.counts()?)),
            // The first of two requests may have released them.
            (_, Some(error)) => Err(error),
            (0, None) => Ok(Released::AlreadyReleased),
            _ => Ok(Released::Unknown),
        }
    }

    fn sweep(&self, sweep: &Sweep, by: Moment) -> Result<Vec<Swept>> {
        let (what, since, owner, reason) = match sweep {
            Sweep::Expired => ("expired", 0, "", Reason::Expired),
            Sweep::Stale(age) => {
                let age = u64::try_from(age.as_micros()).unwrap_or(u64::MAX);
                ("stale", age, "", Reason::Stale)
            }
            Sweep::Owner(owner, before) => ("owner", *before, &**owner, Reason::OwnerDead),
        };
        let command = self.scripts.sweep.clone().arg(what).arg(since).arg(owner);
        let mut swept = Vec::new();
        let all = self.pages(by, &command, |page| {
            swept.push(page.record()?.swept(reason));
            Ok(())
        });
        match all {
            Err(error) if swept.is_empty() => Err(error),
            _ => Ok(swept),
        }
    }

    fn owners(&self, by: Moment) -> Result<(Vec<Arc<str>>, StoreTime)> {
        let command = self.scripts.look.clone().arg("held").arg("");
        let mut owners = BTreeSet::new();
        let began = self.pages(by, &command, |page| {
            owners.extend(page.record()?.status.owner);
            Ok(())
        })?;
        Ok((owners.into_iter().collect(), began.unwrap_or(0)))
    }

    fn purge(&self, what: Purge, age: Duration, batch: usize, by: Moment) -> Result<u64> {
        let what = match what {
            Purge::Requests => "requests",
            Purge::History => "history",
        };
        let command = self.scripts.purge.clone().arg(what).arg(ms(age));
        let (purged, _) = self.ask(Lane::Other, by, command.arg(batch))?;
        Ok(u64::try_from(purged).unwrap_or(0))
    }

    fn audit(&self, repair: bool, by: Moment) -> Result<Vec<Discrepancy>> {
        let command = self.scripts.audit.clone().arg(flag(repair));
        let (_, mut reply) = self.ask(Lane::Other, by, command)?;
        let mut found = Vec::new();
        while !reply.is_empty() {
            found.push(Discrepancy {
                semaphore: reply.text()?,
                counter: reply.number()?,
                permits: reply.number()?,
            });
        }
        Ok(found)
    }

    fn lines(&self) -> Option<&dyn ServerLines> {
        Some(self)
    }
}

impl ServerLines for RedisPermits {
    fn on_turn(&self, turn: OnTurn) {
        let prefix = &self.common.settings.prefix;
        let channel = format!("{}:turn:{}", tagged(prefix), self.process);
        let slot = self.common.keys(prefix).slot;
        let subscription = Subscription::of_permits(&channel, slot, turn);
        *self.subscription.lock() = Some(subscription);
    }

    fn acquire(&self, request: &Arc<Request>, place: &Standing, by: Moment) -> Result<Outcome> {
        // Before it tries, so that no turn is missed. A process that cannot subscribe polls.
        if let Some(mut subscription) = self.subscription.try_lock()
            && let Some(subscription) = &mut *subscription
        {
            let _ = subscription.ensure(&self.common, by);
        }
        self.attempt(request, Some(place), by)
    }

    fn leave(&self, semaphore: &str, by: Moment) -> Result<()> {
        let command = self.scripts.leave.clone().arg(semaphore);
        self.ask(Lane::Other, by, command.arg(&*self.process))?;
        Ok(())
    }
}

impl fmt::Debug for RedisPermits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RedisPermits({})", self.common.realm)
    }
}
