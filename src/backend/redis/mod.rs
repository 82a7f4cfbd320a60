//! Mutexes on Redis 6.2 or newer, or Valkey: one server, or a cluster.
//!
//! The keys, channels and messages are Simba's, so that its contenders and ours take turns on one
//! mutex; what we add lies beside them (`lua/mutex.lua`). Acquire, renew and release are one script
//! and one round trip each. A release wakes the contender that waits longest and keeps the mutex for
//! it, so the order is strict.
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
//! # Ok::<(), contend::Error>(())
//! ```
//!
//! # Rights
//! An ACL user needs the keys and channels under the prefix and these commands:
//!
//! ```text
//! ACL SETUSER app on >secret ~simba:* &simba:* +eval +evalsha +publish +subscribe +unsubscribe +hello
//!     +time +get +set +del +pttl +pexpire +hmget +hset +zadd +zrem +zrange +zpopmin
//! ```
//!
//! and `+select` for a database other than 0, `+cluster|slots` for a cluster, `+info` to be warned of
//! a `maxmemory-policy` that may evict locks.
//!
//! # What it assumes
//! That the server keeps what it acknowledged. One that is flushed, restarts empty, evicts (set
//! `maxmemory-policy noeviction`) or fails over to a replica that missed the last write may let a second
//! owner in, and then only a checked fence keeps the two apart. `min-replicas-to-write 1` and a small
//! `min-replicas-max-lag` make an isolated master stop granting. Fences are the server's microseconds
//! unless the last one was higher: they grow over a lost memory as long as its clock does.
//!
//! # What it takes
//! A factory has two threads and at most nine connections (for each master of a cluster), however
//! many services it serves.

mod builder;
mod cluster;
mod head_start;
mod keys;
mod lent;
mod link;
mod listener;
mod node;
mod pool;
mod reply;
mod script;
mod seat;
mod session;
mod subscriber;
mod trouble;
mod watch;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use ::redis::Value;

pub use self::builder::Builder;
pub(super) use self::builder::connect;
use self::cluster::Cluster;
use self::head_start::HeadStart;
use self::node::Node;
use self::pool::{Failure, Lane};
use self::script::{Call, Scripts};
use self::seat::RedisSeat;
use self::watch::RedisWatch;
use super::{Backend, Place, Seat, Watch};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::lease::Lease;

/// How often a call follows a mutex that moves from node to node.
const MOVES: usize = 3;

struct Redis {
    core: Arc<Core>,
}

/// What a factory and its seats share.
struct Core {
    realm: String,
    servers: Servers,
    scripts: Scripts,
    prefix: String,
    /// How long a freed mutex is kept for whoever comes next.
    claim: Duration,
    /// What is assumed of an owner that does not tell its lease.
    lease: Lease,
}

enum Servers {
    One(Arc<Node>),
    Cluster(Cluster),
}

impl Core {
    fn is_cluster(&self) -> bool {
        matches!(self.servers, Servers::Cluster(_))
    }

    /// The server that has the slot.
    fn node(&self, slot: u16, by: Moment) -> Result<Arc<Node>> {
        match &self.servers {
            Servers::One(node) => Ok(Arc::clone(node)),
            Servers::Cluster(cluster) => cluster.node(slot, by),
        }
    }

    /// Runs a script where the slot is.
    fn call(&self, slot: u16, call: &mut Call, lane: Lane, by: Moment) -> Result<Value> {
        let cluster = match &self.servers {
            Servers::One(node) => {
                return node.call(call, lane, by).map_err(|failure| match failure {
                    Failure::Other(error) => error,
                    Failure::Moved => {
                        moved("; this server is part of a cluster: use redis+cluster://")
                    }
                });
            }
            Servers::Cluster(cluster) => cluster,
        };
        for _ in 0..MOVES {
            match cluster.node(slot, by)?.call(call, lane, by) {
                Ok(value) => return Ok(value),
                // Nothing was done there: it is safe to ask again elsewhere.
                Err(Failure::Moved) => cluster.look_again(by)?,
                Err(Failure::Other(error)) => {
                    // The node may have been replaced.
                    cluster.suspect();
                    return Err(error);
                }
            }
        }
        Err(moved(""))
    }

    /// What became of an attempt that was sent ahead. `None`: nothing was done there.
    fn finish(&self, start: HeadStart, by: Moment) -> Result<Option<Value>> {
        match start.finish(by) {
            Ok(value) => Ok(Some(value)),
            Err(Failure::Moved) => Ok(None),
            Err(Failure::Other(error)) => {
                if let Servers::Cluster(cluster) = &self.servers {
                    cluster.suspect();
                }
                Err(error)
            }
        }
    }
}

fn moved(advice: &str) -> Error {
    let kind = if advice.is_empty() {
        ErrorKind::Unavailable
    } else {
        ErrorKind::Misconfigured
    };
    Error::new(
        kind,
        format!("redis: the mutex lives on another node{advice}"),
    )
}

impl Backend for Redis {
    fn realm(&self) -> &str {
        &self.core.realm
    }

    fn seat(&self, place: &Place) -> Result<Box<dyn Seat>> {
        Ok(Box::new(RedisSeat::new(&self.core, place)))
    }

    fn watch(&self, mutex: &Arc<str>) -> Result<Box<dyn Watch>> {
        Ok(Box::new(RedisWatch::new(&self.core, mutex)))
    }
}

impl fmt::Debug for Redis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Redis({})", self.core.realm)
    }
}
