//! Mutexes and semaphores on Redis 6.2 or newer, or Valkey: one server, a master watched by sentinels, or a cluster.
//!
//! ```no_run
//! use contend::redis;
//! use std::time::Duration;
//!
//! let factory = redis::Builder::new("cache.internal:6379")
//!     .password("secret")
//!     .database(2)
//!     .build()?;
//! // The same by URL:
//! let factory = contend::connect("redis://:secret@cache.internal:6379/2")?;
//! // A cluster, and a master that sentinels watch:
//! let factory = contend::connect("redis+cluster://n1:6379,n2:6379,n3:6379")?;
//! let factory = contend::connect("redis+sentinel://app:secret@s1:26379,s2,s3/mymaster/0")?;
//! # Ok::<(), contend::Error>(())
//! ```
//!
//! # How a mutex changes hands
//!
//! ```text
//!  A                        Redis                                         B
//!  acquire ───────────────► free: A owns, fence 7
//!                           owned: B is queued ◄──────── subscribe, acquire
//!  release 7 ─────────────► handed to B for 500 ms
//!                           message to B ──────────────────────────► wakes
//!                           B owns, fence 8 ◄────────────────────── acquire
//! ```
//!
//! Acquire, renew and release are one script and one round trip each (`lua/`). A release writes the contender that has
//! waited longest into the place of the owner, for the claim time. Meanwhile no other contender can acquire, so the
//! order is strict. A waiter whose message reaches no subscriber is passed over. The thread that reads the message
//! sends the acquire of the waiter, which reads the answer.
//!
//! | key | holds |
//! |---|---|
//! | `simba:{NAME}` | the owner's id; expires with the lease |
//! | `simba:{NAME}:token` | the fence of this ownership, or `0` for a hand-over |
//! | `simba:{NAME}:fence` | the last fence, kept for an hour |
//! | `simba:{NAME}:contender` | the waiters, by the time at which they came |
//!
//! Keys, channels and messages are those of Simba, so contenders of both libraries take turns on one mutex. An acquire
//! says until when it is wanted, on the server's clock, so one that arrives late does nothing.
//!
//! # URL parameters
//! `ttl`, `transition`, `initial_delay`, `prefix`, `pool_size`, `connect_timeout`, `tls` (`true`, or write
//! `rediss://`), `tls_ca`, `tls_cert`, `tls_key` (PEM files), `socket` (the path of a unix socket),
//! `sentinel_user`, `sentinel_password`, `simba` (see [`Builder::simba`]), `replicas` (see [`Builder::replicas`]).
//!
//! # Rights
//! An ACL user needs the keys and channels under the prefix and these commands:
//!
//! ```text
//! ACL SETUSER app on >secret ~simba:* resetchannels &simba:* +eval +evalsha +publish
//!     +subscribe +unsubscribe +hello +ping +time +mget +get +set +psetex +del +exists
//!     +pttl +pexpire +zadd +zrem +zpopmin
//! ```
//!
//! and `+select` for a database other than 0, `+cluster|slots` for a cluster, `+role` with Sentinel, `+wait` with
//! `replicas`, `+info` for the warning about a `maxmemory-policy` that may evict locks, `+scan` and `+zrange` to
//! list mutexes and their waiters. Semaphores need these, too:
//!
//! ```text
//! +hget +hmget +hset +hsetnx +hdel +hkeys +zscore +zcard +zrange +zrangebyscore
//!     +zrangebylex +zscan +persist +xadd +xrange +xdel
//! ```
//!
//! # What it assumes
//! The server must keep what it acknowledged. Otherwise a second owner may get in, and only a checked fence keeps the
//! two apart. That can happen when the server is flushed, restarts empty or evicts (set `maxmemory-policy noeviction`),
//! and when it fails over to a replica that missed the last write.
//!
//! [`Builder::replicas`] narrows the window of a failover. `min-replicas-to-write 1` and a small `min-replicas-max-lag`
//! make an isolated master stop granting. Fences are the server's time in microseconds unless the last one was higher.
//! So they keep growing after a loss of data, as long as the server's clock does.
//!
//! # Semaphores
//! All semaphores of a prefix have their keys under one hash tag: one script takes permits of several of them, or
//! none. In a cluster they lie in one slot, on one master; another prefix is another slot. After a failover to a
//! replica that missed the last writes, permits may be granted twice until the ttl of the first holder has passed.
//! Processes that wait for permits take turns, and a release tells the next one. `replicas` is for mutexes alone.
//!
//! # Resources
//! A factory has two threads and at most nine connections (for each master of a cluster), however many
//! services it serves. A mutex that was used leaves one key of about 100 bytes for an hour.

mod builder;
mod cluster;
mod connection;
mod contender;
mod error;
mod keys;
mod observer;
mod permits;
mod script;
mod sentinel;
mod server;
mod subscriber;

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

pub use self::builder::Builder;
pub(super) use self::builder::connect;
use self::contender::RedisContender;
use self::keys::Keys;
use self::observer::RedisObserver;
use self::permits::{RedisPermits, read};
use self::script::{Command, OBSERVE, Queue, RECORD_RUN, RELEASE, Reply, ms};
use self::server::{Deployment, ServerSettings};
use super::{
    Backend, CLAIM_TIME, Condition, Contender, Participant, PermitStore, PoolUse, RawContender,
    RawObserver, Wakeups,
};
use crate::clock::Moment;
use crate::error::Result;
use crate::lease::Lease;
use crate::owner::MutexOwner;
use crate::parker::Unparker;
use crate::pool::Lane;
use crate::probe::Probe;

/// What a factory and its contenders share.
struct Common {
    realm: String,
    deployment: Deployment,
    settings: Arc<ServerSettings>,
    /// What is assumed of an owner that does not tell its lease.
    lease: Lease,
    /// Simba contenders of 3.2 or later share the mutexes.
    simba: bool,
    /// How many replicas must have a grant.
    replicas: u32,
}

impl Common {
    /// There, a slot may move, and PUBLISH does not count every receiver.
    fn is_cluster(&self) -> bool {
        matches!(self.deployment, Deployment::Cluster(_))
    }

    fn keys(&self, mutex: &str) -> Keys {
        Keys::of(&self.settings.prefix, mutex)
    }

    /// Reads who owns a mutex.
    fn look(&self, keys: &Keys, by: Moment) -> Result<Reply> {
        let request = Command::script(&OBSERVE, keys.slot, &[&keys.mutex, &keys.token]);
        Reply::read(self.deployment.ask(Lane::Other, by, &request)?)
    }

    /// Ends the ownership with this fence; 0 for an owner that has none (Simba before 4).
    fn release(&self, keys: &Keys, id: &str, fence: u64, by: Moment) -> Result<bool> {
        let names = [&keys.mutex, &keys.token, &keys.queue];
        let fence = Some(fence).filter(|fence| *fence > 0);
        let fence = fence.map_or_else(String::new, |fence| fence.to_string());
        let arguments = (id, ms(CLAIM_TIME), !self.is_cluster(), self.simba, fence);
        let mut request = Command::script(&RELEASE, keys.slot, &names).arg(arguments);
        request.queue = Queue::Optional;
        let answer = self.deployment.ask(Lane::Owner, by, &request)?;
        let released: bool = read(answer.value)?;
        match answer.doubt {
            // The first of two requests may have released it.
            Some(cause) if !released => {
                Err(cause.context("whether the mutex was released is not known"))
            }
            _ => Ok(released),
        }
    }
}

impl Backend for Arc<Common> {
    fn realm(&self) -> &str {
        &self.realm
    }

    fn contender(&self, contender: &Contender, wake: &Unparker) -> Result<Box<dyn RawContender>> {
        Ok(Box::new(RedisContender::new(self, contender, wake)))
    }

    fn observer(&self, mutex: &Arc<str>, wake: &Unparker) -> Result<Box<dyn RawObserver>> {
        Ok(Box::new(RedisObserver::new(self, mutex, wake)))
    }

    fn ping(&self, by: Moment) -> Result<()> {
        // What every lock needs, and so no further right.
        let question = Command::plain(0, &[b"EVAL", b"return 1", b"0"]);
        for server in self.deployment.masters(by)? {
            server.command(&question, by)?;
        }
        Ok(())
    }

    fn owner(&self, mutex: &Arc<str>, by: Moment) -> Result<MutexOwner> {
        let reply = self.look(&self.keys(mutex), by)?;
        Ok(reply.owner(self.lease))
    }

    fn participants(&self, mutex: &Arc<str>, by: Moment) -> Result<Vec<Participant>> {
        let keys = self.keys(mutex);
        let question = Command::plain(keys.slot, &[b"ZRANGE"]);
        let question = question.arg((keys.queue, 0, -1, "WITHSCORES"));
        let waiters: Vec<_> = read(self.deployment.call(Lane::Other, by, &question)?)?;
        let participant = |(id, since): (Vec<u8>, f64)| {
            // Seconds since 1970 as Simba counts: far below what a float holds.
            Participant::new(String::from_utf8_lossy(&id), Some((since * 1000.0) as u64))
        };
        Ok(waiters.into_iter().map(participant).collect())
    }

    fn list(&self, by: Moment) -> Result<Vec<Arc<str>>> {
        let prefix = &self.settings.prefix;
        // Any letter in the place of a wildcard: the keys that come are compared with the prefix.
        let pattern = prefix.replace(['*', '?', '[', '\\'], "?") + ":{*}*";
        let mut found = BTreeSet::new();
        for server in self.deployment.masters(by)? {
            let mut cursor = "0".to_owned();
            loop {
                let question = Command::plain(0, &[b"SCAN"]);
                let question = question.arg((&cursor, "MATCH", &pattern, "COUNT", 1000));
                let (next, keys): (_, Vec<Vec<u8>>) = read(server.command(&question, by)?)?;
                for key in &keys {
                    let key = String::from_utf8_lossy(key);
                    found.extend(Keys::mutex_of(prefix, &key).map(Arc::<str>::from));
                }
                cursor = next;
                if cursor == "0" {
                    break;
                }
            }
        }
        Ok(found.into_iter().collect())
    }

    fn revoke(&self, mutex: &Arc<str>, fence: u64, by: Moment) -> Result<bool> {
        let owner = self.owner(mutex, by)?;
        if !owner.has_owner() || owner.fence() != fence {
            return Ok(false);
        }
        self.release(&self.keys(mutex), owner.owner_id(), fence, by)
    }

    fn last_run(&self, mutex: &Arc<str>, by: Moment) -> Result<Option<Duration>> {
        let keys = self.keys(mutex);
        let request = Command::script(&RECORD_RUN, keys.slot, &[&keys.run]);
        let age: i64 = read(self.deployment.call(Lane::Owner, by, &request)?)?;
        Ok(u64::try_from(age).ok().map(Duration::from_millis))
    }

    fn record_run(&self, mutex: &Arc<str>, fence: u64, keep: Duration, by: Moment) -> Result<bool> {
        let keys = self.keys(mutex);
        let request = Command::script(&RECORD_RUN, keys.slot, &[&keys.run, &keys.token]);
        let request = request.arg((fence, ms(keep)));
        read(self.deployment.call(Lane::Owner, by, &request)?)
    }

    fn permits(&self) -> Result<Arc<dyn PermitStore>> {
        Ok(Arc::new(RedisPermits::new(self)))
    }

    fn condition(&self) -> Condition {
        let mut condition = Condition::default();
        let mut pool = PoolUse::default();
        for server in self.deployment.known() {
            let usage = server.pool.usage();
            pool.open += usage.open;
            pool.idle += usage.idle;
            pool.size += usage.size;
            let wakeups = server.subscriber.condition();
            if condition.wakeups == Wakeups::Untried || matches!(wakeups, Wakeups::Polling(_)) {
                condition.wakeups = wakeups;
            }
        }
        condition.pool = Some(pool);
        condition
    }

    fn set_probe(&self, probe: Arc<dyn Probe>) {
        self.settings.probe.set(probe);
    }
}

impl fmt::Debug for Common {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Redis({})", self.realm)
    }
}
