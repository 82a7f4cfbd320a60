//! Which node has which slot, and the thread that finds out.
//!
//! The driver has a cluster client, but it opens connections, sleeps and asks every node in the
//! thread of its caller, so that no call through it keeps to its deadline; and it cannot subscribe. A
//! mutex needs no more than the master of one slot.

use std::collections::HashMap;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use ::redis::{ConnectionLike, ProtocolVersion, Value};
use parking_lot::{Condvar, Mutex};

use super::link::{Address, Connector, late};
use super::node::Node;
use super::pool::spawn;
use super::script::command;
use super::trouble::trouble;
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::fork::Origin;

/// The least time between two looks at the slots: while a node fails, everybody asks for one.
const PAUSE: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub(super) struct Cluster {
    shared: Arc<Shared>,
    mapper: Option<JoinHandle<()>>,
    origin: Origin,
}

struct Shared {
    state: Mutex<State>,
    /// The mapper has something to do.
    work: Condvar,
    /// There is a new map, or none to be had.
    mapped: Condvar,
    connector: Arc<Connector>,
    seeds: Vec<Address>,
    size: usize,
    prefix: String,
}

#[derive(Default)]
struct State {
    /// First slot, last slot, master.
    ranges: Vec<(u16, u16, Arc<Node>)>,
    /// Former masters that somebody still listens to.
    retired: Vec<Arc<Node>>,
    wanted: bool,
    /// How often somebody looked, and what went wrong the last time.
    looks: u64,
    failure: Option<Error>,
    closed: bool,
}

impl Cluster {
    pub(super) fn new(
        connector: &Arc<Connector>,
        seeds: Vec<Address>,
        size: usize,
        prefix: &str,
    ) -> Result<Cluster> {
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                wanted: true,
                ..State::default()
            }),
            work: Condvar::new(),
            mapped: Condvar::new(),
            connector: Arc::clone(connector),
            seeds,
            size,
            prefix: prefix.to_owned(),
        });
        let mapper = {
            let shared = Arc::clone(&shared);
            spawn("contend-redis-map", move || Shared::map_on_demand(&shared))?
        };
        Ok(Cluster {
            shared,
            mapper: Some(mapper),
            origin: Origin::here(),
        })
    }

    /// The master of a slot, as far as known; waits for the first map.
    pub(super) fn node(&self, slot: u16, by: Moment) -> Result<Arc<Node>> {
        let mut state = self.shared.state.lock();
        let seen = state.looks;
        loop {
            let covers =
                |(first, last, _): &&(u16, u16, Arc<Node>)| (*first..=*last).contains(&slot);
            if let Some((_, _, node)) = state.ranges.iter().find(covers) {
                return Ok(Arc::clone(node));
            }
            if state.looks != seen {
                return Err(state.failure.clone().unwrap_or_else(|| {
                    Error::new(
                        ErrorKind::Unavailable,
                        format!("redis cluster: no master has slot {slot}"),
                    )
                }));
            }
            self.shared.want(&mut state);
            self.shared.wait(&mut state, by)?;
        }
    }

    /// Looks at the slots again and waits until that was done.
    pub(super) fn look_again(&self, by: Moment) -> Result<()> {
        let mut state = self.shared.state.lock();
        let seen = state.looks;
        while state.looks == seen {
            self.shared.want(&mut state);
            self.shared.wait(&mut state, by)?;
        }
        Ok(())
    }

    /// Looks at the slots again, some time soon.
    pub(super) fn suspect(&self) {
        self.shared.want(&mut self.shared.state.lock());
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if !self.origin.is_here() {
            return;
        }
        self.shared.state.lock().closed = true;
        self.shared.work.notify_one();
        if let Some(mapper) = self.mapper.take() {
            let _ = mapper.join();
        }
        // The nodes know this (to say that they are in trouble): let go of them by hand.
        let (ranges, retired) = {
            let mut state = self.shared.state.lock();
            (
                std::mem::take(&mut state.ranges),
                std::mem::take(&mut state.retired),
            )
        };
        drop((ranges, retired));
    }
}

impl Shared {
    fn want(&self, state: &mut State) {
        state.wanted = true;
        self.work.notify_one();
    }

    fn wait(&self, state: &mut parking_lot::MutexGuard<'_, State>, by: Moment) -> Result<()> {
        let left = by.remaining();
        if left.is_zero() {
            let place = self.seeds.first().cloned();
            return Err(place.map_or_else(
                || Error::new(ErrorKind::Timeout, "redis cluster: no answer in time"),
                |place| late("asking for the cluster's slots", &place),
            ));
        }
        self.mapped.wait_for(state, left);
        Ok(())
    }

    fn map_on_demand(shared: &Arc<Shared>) {
        loop {
            let mut state = shared.state.lock();
            while !state.closed && !state.wanted {
                shared.work.wait(&mut state);
            }
            if state.closed {
                return;
            }
            state.wanted = false;
            let mut places: Vec<Address> = state
                .ranges
                .iter()
                .map(|(_, _, node)| node.address.clone())
                .chain(shared.seeds.iter().cloned())
                .collect();
            drop(state);
            places.dedup();
            let map = shared.look(&places);
            let nodes = shared.apply(map);
            for node in nodes {
                node.wake_all();
            }
            let until = Moment::now() + PAUSE;
            let mut state = shared.state.lock();
            while !state.closed && !until.remaining().is_zero() {
                shared.work.wait_for(&mut state, until.remaining());
            }
            let (gone, kept) = std::mem::take(&mut state.retired)
                .into_iter()
                .partition::<Vec<_>, _>(|node| Arc::strong_count(node) == 1);
            state.retired = kept;
            drop(state);
            // Joined here, where nobody waits for it.
            drop(gone);
        }
    }

    /// The first answer to `CLUSTER SLOTS`.
    fn look(&self, places: &[Address]) -> Result<Vec<(u16, u16, Address)>> {
        let mut failure = None;
        for place in places {
            let answer =
                self.connector
                    .open(place, ProtocolVersion::RESP2)
                    .and_then(|mut connection| {
                        connection
                            .req_packed_command(&command(&[b"CLUSTER", b"SLOTS"]))
                            .and_then(Value::extract_error)
                            .map_err(|error| trouble(error, &place.to_string()))
                    });
            match answer.map(|value| ranges(&value, place)) {
                Ok(ranges) if !ranges.is_empty() => return Ok(ranges),
                Ok(_) => {
                    failure = Some(Error::new(
                        ErrorKind::Unavailable,
                        format!("redis at {place}: the cluster has no slots yet"),
                    ));
                }
                Err(error) => failure = Some(error),
            }
        }
        Err(failure.unwrap_or_else(|| Error::invalid("a cluster needs at least one address")))
    }

    /// Puts a new map in place. Returns all nodes if somebody has to look again.
    fn apply(self: &Arc<Self>, map: Result<Vec<(u16, u16, Address)>>) -> Vec<Arc<Node>> {
        let mut state = self.state.lock();
        let mut known: HashMap<Address, Arc<Node>> = state
            .ranges
            .iter()
            .map(|(_, _, node)| (node.address.clone(), Arc::clone(node)))
            .collect();
        let before: Vec<_> = state
            .ranges
            .iter()
            .map(|(first, last, node)| (*first, *last, node.address.clone()))
            .collect();
        let made = map.and_then(|mut map| {
            map.sort();
            if map == before {
                return Ok(None);
            }
            let mut ranges = Vec::new();
            for (first, last, address) in map {
                let node = match known.get(&address) {
                    Some(node) => Arc::clone(node),
                    None => {
                        let shared = Arc::downgrade(self);
                        let alarm = move || {
                            if let Some(shared) = shared.upgrade() {
                                shared.want(&mut shared.state.lock());
                            }
                        };
                        let node = Arc::new(Node::new(
                            &self.connector,
                            &address,
                            self.size,
                            &self.prefix,
                            Box::new(alarm),
                        )?);
                        known.insert(address, Arc::clone(&node));
                        node
                    }
                };
                ranges.push((first, last, node));
            }
            Ok(Some(ranges))
        });
        state.looks += 1;
        let changed = match made {
            Ok(Some(ranges)) => {
                state.ranges = ranges;
                let used = |node: &Arc<Node>| {
                    let same = |(_, _, other): &(u16, u16, Arc<Node>)| Arc::ptr_eq(node, other);
                    state.ranges.iter().any(same)
                };
                let retired: Vec<_> = known.values().filter(|node| !used(node)).cloned().collect();
                state.retired.extend(retired);
                state.failure = None;
                known.into_values().collect()
            }
            Ok(None) => {
                state.failure = None;
                Vec::new()
            }
            Err(error) => {
                state.failure = Some(error);
                Vec::new()
            }
        };
        self.mapped.notify_all();
        changed
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(&self.seeds).finish()
    }
}

/// Reads `[[first, last, [host, port, ...], replica, ...], ...]`. An empty host is the one asked.
fn ranges(value: &Value, asked: &Address) -> Vec<(u16, u16, Address)> {
    let Value::Array(rows) = value else {
        return Vec::new();
    };
    rows.iter()
        .filter_map(|row| {
            let Value::Array(row) = row else { return None };
            let [
                Value::Int(first),
                Value::Int(last),
                Value::Array(master),
                ..,
            ] = row.as_slice()
            else {
                return None;
            };
            let [host, Value::Int(port), ..] = master.as_slice() else {
                return None;
            };
            let host = match host {
                Value::BulkString(host) if !host.is_empty() => {
                    String::from_utf8(host.clone()).ok()?
                }
                _ => asked.host.clone(),
            };
            Some((
                u16::try_from(*first).ok()?,
                u16::try_from(*last).ok()?,
                Address {
                    host,
                    port: u16::try_from(*port).ok()?,
                },
            ))
        })
        .collect()
}
