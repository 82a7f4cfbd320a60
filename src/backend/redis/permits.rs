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

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use ::redis::{FromRedisValue, ParsingError, Value, from_redis_value};
use parking_lot::Mutex;

use super::Common;
use super::error::not_understood;
use super::script::{Command, PERMITS, ms};
use super::subscriber::Subscription;
use crate::backend::permit_store::{
    CapacityChange, Counts, Discrepancy, Exhausted, Grant, GrantId, Holder, OnTurn, Outcome,
    Permit, PermitRenewal, PermitStore, Purge, Reason, Release, Request, RequestStatus, Standing,
    StoreTime, Sweep, Swept, Usage, free, log_swept, no_such_semaphore, semaphore_in_use,
};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::pool::Lane;

/// One script: the first argument of a call says which part of it runs.
pub(super) const SCRIPT: &str = concat!(
    include_str!("../../../lua/permits-prelude.lua"),
    include_str!("../../../lua/permits-acquire.lua"),
    include_str!("../../../lua/permits-leave.lua"),
    include_str!("../../../lua/permits-release.lua"),
    include_str!("../../../lua/permits-renew.lua"),
    include_str!("../../../lua/permits-semaphore.lua"),
    include_str!("../../../lua/permits-look.lua"),
    include_str!("../../../lua/permits-sweep.lua"),
    include_str!("../../../lua/permits-purge.lua"),
    include_str!("../../../lua/permits-audit.lua"),
);

/// The semaphores of one prefix.
pub(super) struct RedisPermits {
    common: Arc<Common>,
    /// The script with its keys; a call appends its arguments.
    script: Command,
    /// What the keys and channels of the prefix begin with.
    tagged: String,
    slot: u16,
    /// This factory, in the lines of the semaphores.
    process: String,
    /// To the channel on which it hears that its turn has come.
    subscription: Mutex<Option<Subscription>>,
}

fn flag(set: bool) -> &'static str {
    if set { "1" } else { "0" }
}

/// Appends what names a grant.
fn named(command: Command, grant: &GrantId) -> Command {
    let token = grant.token.map(|token| token.to_string());
    (command.arg(&*grant.external_id)).arg(token.unwrap_or_default())
}

impl RedisPermits {
    pub(super) fn new(common: &Arc<Common>) -> RedisPermits {
        let prefix = &common.settings.prefix;
        let tagged = format!("{prefix}:permits:{{{prefix}}}");
        let slot = common.keys(prefix).slot;
        let keys = ["counts", "requests", "held", "released", "queue", "history"];
        let keys = keys.map(|name| format!("{tagged}:{name}"));
        RedisPermits {
            script: Command::script(&PERMITS, slot, &keys.each_ref()),
            tagged,
            slot,
            process: format!("{:032x}", rand::random::<u128>()),
            subscription: Mutex::new(None),
            common: Arc::clone(common),
        }
    }

    /// A call of one part of the script.
    fn part(&self, name: &str) -> Command {
        self.script.clone().arg(name)
    }

    /// Makes a call whose reply begins with a code. Returns that, and what follows the server's time.
    fn ask(&self, lane: Lane, by: Moment, command: &Command) -> Result<(i64, Value)> {
        let value = self.common.deployment.call(lane, by, command)?;
        let ((code, _), rest): ((i64, Value), _) = head(value, 2)?;
        Ok((code, rest))
    }

    /// Makes a call page by page; its last argument is the cursor. Returns the server's time of the first page; `None`
    /// if there is no such semaphore.
    fn pages<T: FromRedisValue>(
        &self,
        by: Moment,
        command: &Command,
        mut each: impl FnMut(T) -> Result<()>,
    ) -> Result<Option<StoreTime>> {
        let (mut cursor, mut began) = (Text(Arc::from("0")), None);
        loop {
            let command = command.clone().arg(&*cursor.0);
            let value = self.common.deployment.call(Lane::Other, by, &command)?;
            let ((next, now), rest): ((Text, StoreTime), _) = head(value, 2)?;
            let began = *began.get_or_insert(now);
            read::<Vec<T>>(rest)?.into_iter().try_for_each(&mut each)?;
            match &*next.0 {
                "" => return Ok(None),
                "0" => return Ok(Some(began)),
                _ => cursor = next,
            }
        }
    }
}

impl PermitStore for RedisPermits {
    fn realm(&self) -> &str {
        &self.common.realm
    }

    fn create(&self, name: &str, capacity: u32, by: Moment) -> Result<bool> {
        let command = self.part("semaphore").arg("create").arg(name);
        let (code, _) = self.ask(Lane::Other, by, &command.arg(capacity))?;
        Ok(code == 1)
    }

    fn set_capacity(&self, name: &str, to: u32, who: Option<&str>, by: Moment) -> Result<u32> {
        let command = self.part("semaphore").arg("set").arg(name);
        let command = command.arg(to).arg(who.unwrap_or_default());
        match self.ask(Lane::Other, by, &command)? {
            (1, rest) => read::<(u32,)>(rest).map(|(before,)| before),
            _ => Err(no_such_semaphore(name)),
        }
    }

    fn history(&self, name: &str, by: Moment) -> Result<Vec<CapacityChange>> {
        let command = self.part("look").arg("history").arg(name);
        let mut history = Vec::new();
        self.pages(by, &command, |(changed_at, changed_by, from, to)| {
            history.push(CapacityChange {
                semaphore: Arc::from(name),
                changed_by: Text::some(changed_by),
                changed_at,
                from,
                to,
            });
            Ok(())
        })?;
        Ok(history)
    }

    fn delete(&self, name: &str, by: Moment) -> Result<bool> {
        let command = self.part("semaphore").arg("delete").arg(name);
        match self.ask(Lane::Other, by, &command)? {
            (0, rest) => {
                let (capacity, held) = read(rest)?;
                Err(semaphore_in_use(name, held, capacity))
            }
            (code, _) => Ok(code == 1),
        }
    }

    fn usage(&self, name: Option<&str>, by: Moment) -> Result<Vec<Usage>> {
        type Row = (Text, u32, i64, u64, u64);
        let command = self.part("look").arg("usage");
        let command = command.arg(name.unwrap_or_default());
        let (_, rest) = self.ask(Lane::Other, by, &command)?;
        let usage = |(semaphore, capacity, held, requests, expired): Row| Usage {
            semaphore: semaphore.0,
            capacity,
            held: u64::try_from(held).unwrap_or(0),
            requests,
            expired,
            free: free(capacity, held),
        };
        let mut found: Vec<Usage> = read::<Vec<Row>>(rest)?.into_iter().map(usage).collect();
        found.sort_by(|one, two| one.semaphore.cmp(&two.semaphore));
        Ok(found)
    }

    fn holders(&self, name: &str, by: Moment) -> Result<Vec<Holder>> {
        let command = self.part("look").arg("held").arg(name);
        // A request may be on two pages.
        let mut holders = BTreeMap::new();
        let known = self.pages(by, &command, |record| {
            let holder = Record::of(record)?.holder(name);
            holders.extend(holder.map(|it| (it.fence, it)));
            Ok(())
        })?;
        known.ok_or_else(|| no_such_semaphore(name))?;
        Ok(holders.into_values().collect())
    }

    fn status(&self, external_id: &str, by: Moment) -> Result<Option<RequestStatus>> {
        let command = self.part("look").arg("status").arg(external_id);
        match self.ask(Lane::Other, by, &command)? {
            (0, _) => Ok(None),
            (_, rest) => Ok(Some(Record::read(rest)?.status)),
        }
    }

    fn acquire(
        &self,
        request: &Arc<Request>,
        place: Option<&Standing>,
        by: Moment,
    ) -> Result<Outcome> {
        // Before it tries, so that no turn is missed. A process that cannot subscribe polls.
        if let (Some(_), Some(mut subscription)) = (place, self.subscription.try_lock())
            && let Some(subscription) = &mut *subscription
        {
            let _ = subscription.ensure(&self.common, by);
        }
        let mut command = self
            .part("acquire")
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
        loop {
            let sent = Moment::now();
            let answer = self.common.deployment.ask(Lane::Other, by, &command)?;
            let ((code, _, taken), rest): ((i64, Value, Vec<Text>), _) = head(answer.value, 3)?;
            log_swept(taken.iter().map(|id| &id.0), Reason::Expired);
            match code {
                1 => {
                    let (fence, left, free) = read(rest)?;
                    let permits = request.permits.iter().map(|(name, count)| Permit {
                        semaphore: Arc::clone(name),
                        count: *count,
                        fence,
                    });
                    return Ok(Outcome::Granted(Grant {
                        permits: permits.collect(),
                        sent,
                        remaining: duration(left),
                        free,
                    }));
                }
                0 => {
                    let (semaphore, capacity, held, wanted): (Text, _, _, _) = read(rest)?;
                    return Ok(Outcome::Exhausted(Exhausted {
                        semaphore: semaphore.0,
                        capacity,
                        held,
                        wanted,
                    }));
                }
                2 => return Ok(Outcome::Known(Record::read(rest)?.status)),
                // There is more to take back than one script takes.
                3 => {}
                // Also where the server's clock was set: the next request knows.
                -1 => {
                    let late = Error::new(ErrorKind::Timeout, "redis: the request came too late");
                    return Err(answer.doubt.unwrap_or(late.not_sent()));
                }
                -2 => return Err(no_such_semaphore(&read::<(Text,)>(rest)?.0.0)),
                _ => {
                    let status = Record::read(rest)?.status;
                    return Err(status.conflict(&request.external_id));
                }
            }
        }
    }

    fn renew(&self, grants: &[GrantId], by: Moment) -> Result<Vec<Option<PermitRenewal>>> {
        let command = grants.iter().fold(self.part("renew"), named);
        let (_, rest) = self.ask(Lane::Owner, by, &command)?;
        let renewed = read::<Vec<i64>>(rest)?.into_iter().map(|code| match code {
            1 => Some(PermitRenewal::Renewed),
            0 => Some(PermitRenewal::AlreadyReleased),
            _ => Some(PermitRenewal::Unknown),
        });
        Ok(renewed.collect())
    }

    fn release(&self, grant: &GrantId, by: Moment) -> Result<(Release, Counts)> {
        let command = named(self.part("release"), grant);
        let answer = self.common.deployment.ask(Lane::Owner, by, &command)?;
        let ((code, _), rest): ((i64, Value), _) = head(answer.value, 2)?;
        match (code, answer.doubt) {
            (1, _) => Ok((Release::Released, counts(read(rest)?))),
            // The first of two requests may have released them.
            (_, Some(error)) => Err(error),
            (0, None) => Ok((Release::AlreadyReleased, Vec::new())),
            _ => Ok((Release::Unknown, Vec::new())),
        }
    }

    fn sweep(&self, sweep: &Sweep, by: Moment) -> Result<Vec<Swept>> {
        let (what, since, owner) = match sweep {
            Sweep::Expired => ("expired", 0, ""),
            Sweep::Stale(age) => {
                let age = u64::try_from(age.as_micros()).unwrap_or(u64::MAX);
                ("stale", age, "")
            }
            Sweep::Owner(owner, before) => ("owner", *before, &**owner),
        };
        let command = self.part("sweep").arg(what).arg(since).arg(owner);
        let mut swept = Vec::new();
        let all = self.pages(by, &command, |record| {
            swept.push(Record::of(record)?.swept(sweep.reason()));
            Ok(())
        });
        match all {
            Err(error) if swept.is_empty() => Err(error),
            _ => Ok(swept),
        }
    }

    fn owners(&self, by: Moment) -> Result<(Vec<Arc<str>>, StoreTime)> {
        let command = self.part("look").arg("held").arg("");
        let mut owners = BTreeSet::new();
        let began = self.pages(by, &command, |record| {
            owners.extend(Record::of(record)?.status.owner);
            Ok(())
        })?;
        Ok((owners.into_iter().collect(), began.unwrap_or(0)))
    }

    fn purge(&self, what: Purge, age: Duration, batch: usize, by: Moment) -> Result<u64> {
        let what = match what {
            Purge::Requests => "requests",
            Purge::History => "history",
        };
        let command = self.part("purge").arg(what).arg(ms(age));
        let (purged, _) = self.ask(Lane::Other, by, &command.arg(batch))?;
        Ok(u64::try_from(purged).unwrap_or(0))
    }

    fn audit(&self, repair: bool, by: Moment) -> Result<Vec<Discrepancy>> {
        let command = self.part("audit").arg(flag(repair));
        let (_, rest) = self.ask(Lane::Other, by, &command)?;
        let wrong = |(semaphore, counter, permits): (Text, i64, i64)| Discrepancy {
            semaphore: semaphore.0,
            counter,
            permits,
        };
        Ok(read::<Vec<_>>(rest)?.into_iter().map(wrong).collect())
    }

    fn on_turn(&self, turn: OnTurn) -> bool {
        let channel = format!("{}:turn:{}", self.tagged, self.process);
        let subscription = Subscription::of_permits(&channel, self.slot, turn);
        *self.subscription.lock() = Some(subscription);
        true
    }

    fn leave(&self, semaphore: &str, by: Moment) -> Result<()> {
        let command = self.part("leave").arg(semaphore);
        self.ask(Lane::Other, by, &command.arg(&*self.process))?;
        Ok(())
    }
}

/// Reads a value; of a list, each row in turn.
pub(super) fn read<T: FromRedisValue>(value: Value) -> Result<T> {
    from_redis_value(value).map_err(|_| not_understood())
}

/// Reads the first fields of a reply, so many, and returns the others with them.
fn head<T: FromRedisValue>(value: Value, count: usize) -> Result<(T, Value)> {
    let mut fields = read::<Vec<Value>>(value)?;
    let rest = fields.split_off(fields.len().min(count));
    Ok((read(Value::Array(fields))?, Value::Array(rest)))
}

/// Milliseconds; less than none stands for nothing.
fn duration(ms: i64) -> Option<Duration> {
    u64::try_from(ms).ok().map(Duration::from_millis)
}

/// A text. Another program may have written it: what is not UTF-8 is replaced.
struct Text(Arc<str>);

impl Text {
    /// An empty one stands for none.
    fn some(self) -> Option<Arc<str>> {
        Some(self.0).filter(|text| !text.is_empty())
    }
}

fn counts(pairs: Vec<(Text, u32)>) -> Counts {
    let pairs = pairs.into_iter().map(|(name, count)| (name.0, count));
    pairs.collect()
}

impl FromRedisValue for Text {
    fn from_redis_value(value: Value) -> Result<Text, ParsingError> {
        let bytes: Vec<u8> = from_redis_value(value)?;
        Ok(Text(String::from_utf8_lossy(&bytes).into()))
    }
}

/// A request as the server knows it.
struct Record {
    external_id: Arc<str>,
    held_for: Duration,
    status: RequestStatus,
}

impl Record {
    /// Reads a record inside of a reply.
    fn of(value: Value) -> Result<Record> {
        let (_, rest): ((Value, Value), _) = head(value, 2)?;
        Record::read(rest)
    }

    /// Reads what follows code and time.
    fn read(rest: Value) -> Result<Record> {
        type Pairs = Vec<(Text, u32)>;
        type Columns = (Text, bool, u64, Text, i64, i64, i64, Pairs);
        let columns: Columns = read(rest)?;
        let (external_id, held, fence, owner, ttl, left, age, permits) = columns;
        let permits = permits.into_iter().map(|(semaphore, count)| Permit {
            semaphore: semaphore.0,
            count,
            fence,
        });
        let status = RequestStatus {
            held,
            permits: permits.collect(),
            owner: owner.some(),
            ttl: duration(ttl).filter(|ttl| !ttl.is_zero()),
            expires_in: duration(left),
        };
        Ok(Record {
            external_id: external_id.0,
            held_for: duration(age).unwrap_or_default(),
            status,
        })
    }

    fn holder(&self, semaphore: &str) -> Option<Holder> {
        let mut permits = self.status.permits.iter();
        let permit = permits.find(|it| *it.semaphore == *semaphore)?;
        Some(Holder {
            external_id: Arc::clone(&self.external_id),
            owner: self.status.owner.clone(),
            count: permit.count,
            fence: permit.fence,
            held_for: self.held_for,
            expires_in: self.status.expires_in,
        })
    }

    fn swept(self, reason: Reason) -> Swept {
        Swept {
            external_id: self.external_id,
            owner: self.status.owner,
            permits: self.status.permits,
            reason,
        }
    }
}
