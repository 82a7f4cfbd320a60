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

use self::reply::{Fields, Record, some};
use super::Common;
use super::keys::Keys;
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

/// The keys that most scripts take; the history comes last.
const KEYS: usize = 5;
const KEYS_WITH_HISTORY: usize = 6;

/// The semaphores of one prefix.
pub(super) struct RedisPermits {
    common: Arc<Common>,
    scripts: Scripts,
    keys: [String; KEYS_WITH_HISTORY],
    slot: u16,
    /// This factory, in the lines of the semaphores.
    process: String,
    /// To the channel on which it hears that its turn has come, once a request waits.
    subscription: Mutex<Option<Subscription>>,
}

#[derive(Debug)]
struct Scripts {
    acquire: Arc<Script>,
    leave: Arc<Script>,
    release: Arc<Script>,
    renew: Arc<Script>,
    semaphore: Arc<Script>,
    look: Arc<Script>,
    sweep: Arc<Script>,
    purge: Arc<Script>,
    audit: Arc<Script>,
}

impl Scripts {
    fn new() -> Scripts {
        let script = |text: &str| {
            let prelude = include_str!("../../../../lua/permits-prelude.lua");
            Script::new(format!("{prelude}{text}"))
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

impl RedisPermits {
    pub(super) fn new(common: &Arc<Common>) -> RedisPermits {
        let prefix = &common.settings.prefix;
        let key = |name| format!("{prefix}:permits:{{{prefix}}}:{name}");
        RedisPermits {
            scripts: Scripts::new(),
            keys: ["counts", "requests", "held", "released", "queue", "history"].map(key),
            slot: Keys::of(prefix, prefix).slot,
            process: format!("{:032x}", rand::random::<u128>()),
            subscription: Mutex::new(None),
            common: Arc::clone(common),
        }
    }

    fn run(
        &self,
        script: &Arc<Script>,
        keys: usize,
        arguments: &[&str],
        lane: Lane,
        by: Moment,
    ) -> Result<Fields> {
        let keys: Vec<&str> = self.keys.iter().take(keys).map(String::as_str).collect();
        let command = Command::script(script, self.slot, &keys).arg(arguments);
        Fields::of((self.common.deployment).call(lane, by, &command)?)
    }

    /// Runs a script whose reply begins with a code and the server's time. Returns the code.
    fn ask(
        &self,
        script: &Arc<Script>,
        keys: usize,
        arguments: &[&str],
        by: Moment,
    ) -> Result<(i64, Fields)> {
        let mut fields = self.run(script, keys, arguments, Lane::Other, by)?;
        let (code, _now): (i64, i64) = (fields.number()?, fields.number()?);
        Ok((code, fields))
    }

    /// Reads all pages of `what`. Returns the server's time of the first one.
    fn pages(
        &self,
        what: &str,
        name: &str,
        by: Moment,
        mut each: impl FnMut(&mut Fields) -> Result<()>,
    ) -> Result<StoreTime> {
        let keys = if what == "history" {
            KEYS_WITH_HISTORY
        } else {
            KEYS
        };
        let (mut cursor, mut began): (Arc<str>, _) = (Arc::from("0"), None);
        loop {
            let arguments = [what, name, &cursor];
            let mut page = self.run(&self.scripts.look, keys, &arguments, Lane::Other, by)?;
            cursor = page.text()?;
            if cursor.is_empty() {
                return Err(no_such_semaphore(name));
            }
            let now = page.number()?;
            let began = *began.get_or_insert(now);
            while !page.is_empty() {
                each(&mut page)?;
            }
            if &*cursor == "0" {
                return Ok(began);
            }
        }
    }

    /// Makes one attempt; `place` for a request that waits.
    fn attempt(&self, request: &Request, place: Option<&Standing>, by: Moment) -> Result<Outcome> {
        let flag = |set| if set { "1" } else { "0" };
        let token = request.token.to_string();
        let ttl = request.ttl.map_or(0, ms).to_string();
        let counts = request.permits.iter().map(|(_, count)| count.to_string());
        let counts: Vec<String> = counts.collect();
        let mut arguments = vec![
            &*request.external_id,
            &*token,
            request.owner.as_deref().unwrap_or_default(),
            &*ttl,
            flag(request.take_over),
            flag(!request.generated),
        ];
        for ((name, _), count) in request.permits.iter().zip(&counts) {
            arguments.extend([&**name, &**count]);
        }
        arguments.extend([
            place.map_or("", |_| &*self.process),
            place.and_then(|it| it.line.as_deref()).unwrap_or_default(),
            flag(place.is_some_and(|it| it.others)),
        ]);
        let keys: Vec<&str> = self.keys.iter().take(KEYS).map(String::as_str).collect();
        let command = Command::script(&self.scripts.acquire, self.slot, &keys);
        let command = command.arg(&arguments).not_after();
        let mut late = false;
        loop {
            let sent = Moment::now();
            let deployment = &self.common.deployment;
            let mut reply = Fields::of(deployment.call(Lane::Other, by, &command)?)?;
            let (code, _now): (i64, i64) = (reply.number()?, reply.number()?);
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
                    return Err(Error::new(ErrorKind::Timeout, message));
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

fn token_of(grant: &GrantId) -> String {
    grant.token.map(|it| it.to_string()).unwrap_or_default()
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
        let capacity = capacity.to_string();
        let arguments = ["create", name, &capacity];
        let (code, _) = self.ask(&self.scripts.semaphore, KEYS, &arguments, by)?;
        Ok(code == 1)
    }

    fn set_capacity(
        &self,
        name: &str,
        capacity: u32,
        changed_by: Option<&str>,
        by: Moment,
    ) -> Result<u32> {
        let capacity = capacity.to_string();
        let arguments = ["set", name, &capacity, changed_by.unwrap_or_default()];
        let script = &self.scripts.semaphore;
        let (code, mut reply) = self.ask(script, KEYS_WITH_HISTORY, &arguments, by)?;
        match code {
            1 => reply.number(),
            _ => Err(no_such_semaphore(name)),
        }
    }

    fn history(&self, name: &str, by: Moment) -> Result<Vec<CapacityChange>> {
        let mut history = Vec::new();
        self.pages("history", name, by, |page| {
            history.push(CapacityChange {
                semaphore: Arc::from(name),
                changed_at: page.number()?,
                changed_by: some(page.text()?),
                from: page.number()?,
                to: page.number()?,
            });
            Ok(())
        })?;
        Ok(history)
    }

    fn delete(&self, name: &str, by: Moment) -> Result<bool> {
        let script = &self.scripts.semaphore;
        match self.ask(script, KEYS, &["delete", name], by)? {
            (0, mut reply) => {
                let (capacity, held) = (reply.number()?, reply.number()?);
                Err(semaphore_in_use(name, held, capacity))
            }
            (code, _) => Ok(code == 1),
        }
    }

    fn usage(&self, name: Option<&str>, by: Moment) -> Result<Vec<Usage>> {
        let arguments = ["usage", name.unwrap_or_default()];
        let (_, mut reply) = self.ask(&self.scripts.look, KEYS, &arguments, by)?;
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
        // A request may be on two pages.
        let mut holders = BTreeMap::new();
        self.pages("held", name, by, |page| {
            let holder = page.record()?.holder(name);
            holders.extend(holder.map(|it| (it.fence, it)));
            Ok(())
        })?;
        Ok(holders.into_values().collect())
    }

    fn status(&self, external_id: &str, by: Moment) -> Result<Option<RequestStatus>> {
        match self.ask(&self.scripts.look, KEYS, &["status", external_id], by)? {
            (0, _) => Ok(None),
            (_, reply) => Ok(Some(Record::read(reply)?.status)),
        }
    }

    fn acquire(&self, request: &Arc<Request>, by: Moment) -> Result<Outcome> {
        self.attempt(request, None, by)
    }

    fn renew(&self, grants: &[GrantId], by: Moment) -> Result<Vec<Renewed>> {
        let tokens: Vec<String> = grants.iter().map(token_of).collect();
        let named = grants.iter().zip(&tokens);
        let arguments: Vec<&str> = named
            .flat_map(|(grant, token)| [&*grant.external_id, &**token])
            .collect();
        // These keys exist while something is held, so a slot that is being moved answers.
        let mut reply = self.run(&self.scripts.renew, KEYS, &arguments, Lane::Owner, by)?;
        let (_code, _now): (i64, i64) = (reply.number()?, reply.number()?);
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
        let token = token_of(grant);
        let arguments = [&*grant.external_id, &*token];
        let mut reply = self.run(&self.scripts.release, KEYS, &arguments, Lane::Owner, by)?;
        let (code, _now): (i64, i64) = (reply.number()?, reply.number()?);
        Ok(match code {
            1 => Released::Permits(reply.permits(|name, count| (name, count))?),
            0 => Released::AlreadyReleased,
            _ => Released::Unknown,
        })
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
        let since = since.to_string();
        let mut cursor: Arc<str> = Arc::from("0");
        let mut swept = Vec::new();
        loop {
            let arguments = [&*cursor, what, &since, owner];
            let page = self.run(&self.scripts.sweep, KEYS, &arguments, Lane::Other, by);
            let mut page = match page {
                Err(_) if !swept.is_empty() => return Ok(swept),
                page => page?,
            };
            cursor = page.text()?;
            let _now: i64 = page.number()?;
            while !page.is_empty() {
                swept.push(page.record()?.swept(reason));
            }
            if &*cursor == "0" {
                return Ok(swept);
            }
        }
    }

    fn owners(&self, by: Moment) -> Result<(Vec<Arc<str>>, StoreTime)> {
        let mut owners = BTreeSet::new();
        let began = self.pages("held", "", by, |page| {
            owners.extend(page.record()?.status.owner);
            Ok(())
        })?;
        Ok((owners.into_iter().collect(), began))
    }

    fn purge(&self, what: Purge, age: Duration, batch: usize, by: Moment) -> Result<u64> {
        let (what, keys) = match what {
            Purge::Requests => ("requests", KEYS),
            Purge::History => ("history", KEYS_WITH_HISTORY),
        };
        let arguments = [what, &ms(age).to_string(), &batch.to_string()];
        let (purged, _) = self.ask(&self.scripts.purge, keys, &arguments, by)?;
        Ok(u64::try_from(purged).unwrap_or(0))
    }

    fn audit(&self, repair: bool, by: Moment) -> Result<Vec<Discrepancy>> {
        let repair = if repair { "1" } else { "0" };
        let (_, mut reply) = self.ask(&self.scripts.audit, KEYS, &[repair], by)?;
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
        let channel = format!("{prefix}:permits:{{{prefix}}}:turn:{}", self.process);
        let subscription = Subscription::of_permits(&channel, self.slot, turn);
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
        let arguments = [semaphore, &*self.process];
        self.ask(&self.scripts.leave, KEYS, &arguments, by)
            .map(drop)
    }
}

impl fmt::Debug for RedisPermits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RedisPermits({})", self.common.realm)
    }
}
