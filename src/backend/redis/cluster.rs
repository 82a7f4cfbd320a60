//! Which server has which slot, and the thread that finds out.
//!
//! The driver has a cluster client, but it opens connections, sleeps and asks every node in the
//! thread of its caller, so that no call through it keeps to its deadline; and it cannot subscribe. A
//! mutex needs no more than the master of one slot.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use ::redis::{ConnectionLike, ProtocolVersion, Value};
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::connection::{Address, Target};
use super::error::{Failure, read};
use super::keys::SLOTS;
use super::script::{Call, command};
use super::server::{Server, ServerSettings, unavailable};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::pool::Lane;
use crate::thread::{self, Thread};

/// The least time between two looks at the slots: while a node fails, everybody asks for one.
const PAUSE: Duration = Duration::from_millis(100);

/// How many redirections one call follows.
const HOPS: usize = 8;

/// How long a node that said CLUSTERDOWN is asked last.
const AVOIDED: Duration = Duration::from_secs(10);

/// How long a server without slots is kept, in case that a slot is on its way to it.
const UNUSED: Duration = Duration::from_secs(30);

/// How long dropping waits for the servers.
const FAREWELL: Duration = Duration::from_millis(600);

pub(super) struct Cluster {
    inner: Arc<Inner>,
    mapper: Option<Thread>,
}

struct Inner {
    state: Mutex<State>,
    /// The mapper has something to do.
    work: Condvar,
    /// There is a new map, or none to be had.
    mapped: Condvar,
    settings: ServerSettings,
    seeds: Vec<Address>,
}

struct State {
    /// The master of each slot, as far as it was ever known.
    slots: Vec<Option<Arc<Server>>>,
    servers: HashMap<Address, Known>,
    /// Everybody that was ever named, to be asked for the slots.
    nodes: Vec<Address>,
    /// Who said CLUSTERDOWN, and until when it is asked last.
    avoided: HashMap<Address, Moment>,
    /// Whom to ask first: another one each time.
    turn: usize,
    /// A redirection changed a slot since everybody looked.
    changed: bool,
    wanted: bool,
    /// How often somebody looked, and what went wrong the last time.
    looks: u64,
    failure: Option<Error>,
    closed: bool,
}

struct Known {
    server: Arc<Server>,
    used_at: Moment,
}

/// What a node said about the cluster.
struct Map {
    ranges: Vec<(u16, u16, Address)>,
    /// Masters and replicas.
    nodes: Vec<Address>,
    /// Whether the node says that the cluster is well.
    ok: bool,
}

impl Map {
    fn covered(&self) -> usize {
        self.ranges
            .iter()
            .map(|(first, last, _)| usize::from(last.saturating_sub(*first)) + 1)
            .sum()
    }
}

impl Cluster {
    pub(super) fn new(settings: ServerSettings, seeds: Vec<Address>) -> Result<Cluster> {
        let inner = Arc::new(Inner {
            state: Mutex::new(State {
                slots: vec![None; usize::from(SLOTS)],
                servers: HashMap::new(),
                nodes: seeds.clone(),
                avoided: HashMap::new(),
                turn: 0,
                changed: false,
                wanted: true,
                looks: 0,
                failure: None,
                closed: false,
            }),
            work: Condvar::new(),
            mapped: Condvar::new(),
            settings,
            seeds,
        });
        let mapper = {
            let inner = Arc::clone(&inner);
            thread::start("contend-redis-map", move || inner.map_on_demand())?
        };
        Ok(Cluster {
            inner,
            mapper: Some(mapper),
        })
    }

    /// The master of a slot, as far as known; waits for the first map.
    pub(super) fn server(&self, slot: u16, by: Moment) -> Result<Arc<Server>> {
        let mut state = self.inner.state.lock();
        let seen = state.looks;
        loop {
            if let Some(Some(server)) = state.slots.get(usize::from(slot)) {
                return Ok(Arc::clone(server));
            }
            if state.looks != seen {
                return Err(state.failure.clone().unwrap_or_else(|| {
                    unavailable(format!("redis cluster: no master has slot {slot}"))
                }));
            }
            self.inner.want(&mut state);
            self.inner.wait(&mut state, by)?;
        }
    }

    /// The masters; waits for the first map.
    pub(super) fn servers(&self, by: Moment) -> Result<Vec<Arc<Server>>> {
        let state = self.inner.state.lock();
        let mut servers = state.masters();
        if servers.is_empty() {
            drop(state);
            servers.push(self.server(0, by)?);
            servers = self.inner.state.lock().masters();
        }
        Ok(servers)
    }

    /// Runs a script where the slot is, following redirections.
    pub(super) fn call(
        &self,
        slot: u16,
        call: &mut Call,
        lane: Lane,
        by: Moment,
    ) -> std::result::Result<(Value, bool), Failure> {
        let mut server = self.server(slot, by).map_err(Failure::Other)?;
        let mut asking = false;
        for _ in 0..HOPS {
            match server.call(call, lane, asking, by) {
                // Nothing was done there: it is safe to ask elsewhere.
                Err(Failure::Moved(to)) => {
                    asking = false;
                    server = match to {
                        Some(address) => self.inner.moved(slot, address),
                        None => self.look_again(by).and_then(|()| self.server(slot, by)),
                    }
                    .map_err(Failure::Other)?;
                }
                Err(Failure::Ask(address)) => {
                    asking = true;
                    server = self.inner.at(address).map_err(Failure::Other)?;
                }
                Err(Failure::ClusterDown(error)) => {
                    self.suspect(Some(&server));
                    return Err(Failure::ClusterDown(error));
                }
                Err(failure @ (Failure::Closed(_) | Failure::ReadOnly(_) | Failure::Other(_))) => {
                    // The node may have been replaced.
                    self.suspect(None);
                    return Err(failure);
                }
                reply => return reply,
            }
        }
        Err(Failure::Other(unavailable(
            "redis cluster: the nodes do not agree on which of them has the mutex",
        )))
    }

    /// Looks at the slots again, some time soon; `down` is asked last.
    pub(super) fn suspect(&self, down: Option<&Arc<Server>>) {
        let mut state = self.inner.state.lock();
        if let Some(down) = down {
            let address = (state.servers.iter())
                .find(|(_, known)| Arc::ptr_eq(&known.server, down))
                .map(|(address, _)| address.clone());
            if let Some(address) = address {
                state.avoided.insert(address, Moment::now() + AVOIDED);
            }
        }
        self.inner.want(&mut state);
    }

    /// Looks at the slots again and waits until that was done.
    fn look_again(&self, by: Moment) -> Result<()> {
        let mut state = self.inner.state.lock();
        let seen = state.looks;
        while state.looks == seen {
            self.inner.want(&mut state);
            self.inner.wait(&mut state, by)?;
        }
        Ok(())
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let deadline = Moment::now() + FAREWELL;
        self.inner.state.lock().closed = true;
        self.inner.work.notify_one();
        let servers: Vec<Arc<Server>> = {
            let mut state = self.inner.state.lock();
            state.slots.clear();
            let known = std::mem::take(&mut state.servers);
            known.into_values().map(|known| known.server).collect()
        };
        // All at once: each of them may be paused, and is waited for.
        let mut farewells: Vec<Thread> = servers
            .into_iter()
            .filter_map(|server| thread::start("contend-redis-end", move || drop(server)).ok())
            .collect();
        farewells.extend(self.mapper.take());
        for farewell in &mut farewells {
            farewell.join(deadline);
        }
    }
}

impl State {
    fn masters(&self) -> Vec<Arc<Server>> {
        let mut servers: Vec<Arc<Server>> = Vec::new();
        for server in self.slots.iter().flatten() {
            if !servers.iter().any(|known| Arc::ptr_eq(known, server)) {
                servers.push(Arc::clone(server));
            }
        }
        servers
    }

    fn set(&mut self, slot: u16, server: &Arc<Server>) {
        if let Some(known) = self.slots.get_mut(usize::from(slot))
            && !known.as_ref().is_some_and(|it| Arc::ptr_eq(it, server))
        {
            *known = Some(Arc::clone(server));
            self.changed = true;
        }
    }
}

impl Inner {
    fn want(&self, state: &mut State) {
        state.wanted = true;
        self.work.notify_one();
    }

    fn wait(&self, state: &mut MutexGuard<'_, State>, by: Moment) -> Result<()> {
        let left = by.remaining();
        if left.is_zero() {
            return Err(state.failure.clone().unwrap_or_else(|| {
                Error::new(
                    ErrorKind::Timeout,
                    format!(
                        "redis cluster: no node of {} answered in time",
                        self.names()
                    ),
                )
                .before_asking()
            }));
        }
        self.mapped.wait_for(state, left);
        Ok(())
    }

    fn names(&self) -> String {
        let names: Vec<_> = self.seeds.iter().map(Address::to_string).collect();
        names.join(",")
    }

    /// The server at `address`, whether or not it has slots.
    fn at(self: &Arc<Self>, address: Address) -> Result<Arc<Server>> {
        self.server_at(&mut self.state.lock(), address)
    }

    fn server_at(self: &Arc<Self>, state: &mut State, address: Address) -> Result<Arc<Server>> {
        let now = Moment::now();
        if let Some(known) = state.servers.get_mut(&address) {
            known.used_at = now;
            return Ok(Arc::clone(&known.server));
        }
        if state.closed {
            return Err(Error::new(ErrorKind::Closed, "the factory was closed").before_asking());
        }
        let weak: Weak<Inner> = Arc::downgrade(self);
        let alarm = move || {
            if let Some(inner) = weak.upgrade() {
                inner.want(&mut inner.state.lock());
            }
        };
        let target = Target::At(address.clone());
        let server = Arc::new(Server::new(&self.settings, target, Box::new(alarm))?);
        let known = Known {
            server: Arc::clone(&server),
            used_at: now,
        };
        state.servers.insert(address, known);
        Ok(server)
    }

    /// A node said where the slot is: that is newer than any map.
    fn moved(self: &Arc<Self>, slot: u16, address: Address) -> Result<Arc<Server>> {
        let mut state = self.state.lock();
        let server = self.server_at(&mut state, address)?;
        state.set(slot, &server);
        self.want(&mut state);
        Ok(server)
    }

    fn map_on_demand(self: Arc<Self>) {
        loop {
            let mut state = self.state.lock();
            while !state.closed && !state.wanted {
                self.work.wait(&mut state);
            }
            if state.closed {
                return;
            }
            state.wanted = false;
            let nodes = Inner::whom_to_ask(&mut state);
            drop(state);
            let map = self.look(&nodes);
            let (wake, gone) = self.apply(map);
            for server in wake {
                server.wake_all();
            }
            // Joined here, where nobody waits for it.
            drop(gone);
            let until = Moment::now() + PAUSE;
            let mut state = self.state.lock();
            while !state.closed && !until.remaining().is_zero() {
                self.work.wait_for(&mut state, until.remaining());
            }
        }
    }

    /// All nodes, beginning with another one each time, and those that said CLUSTERDOWN at the end.
    fn whom_to_ask(state: &mut State) -> Vec<Address> {
        let mut nodes = state.nodes.clone();
        if !nodes.is_empty() {
            let turn = state.turn % nodes.len();
            nodes.rotate_left(turn);
            state.turn = state.turn.wrapping_add(1);
        }
        state
            .avoided
            .retain(|_, until| !until.remaining().is_zero());
        nodes.sort_by_key(|node| state.avoided.contains_key(node));
        nodes
    }

    /// The first map that is whole and from a node that says that the cluster is well; else the best.
    fn look(&self, nodes: &[Address]) -> Result<Map> {
        let mut best: Option<Map> = None;
        let mut failure = None;
        for node in nodes {
            if self.state.lock().closed {
                break;
            }
            match self.ask(node) {
                Ok(map) if map.ok && map.covered() == usize::from(SLOTS) => return Ok(map),
                Ok(map) if map.ranges.is_empty() => {
                    failure = Some(unavailable(format!(
                        "redis at {node}: the cluster has no slots yet"
                    )));
                }
                Ok(map) => {
                    let rank = |map: &Map| (map.ok, map.covered());
                    if best.as_ref().is_none_or(|best| rank(best) < rank(&map)) {
                        best = Some(map);
                    }
                }
                Err(error) => failure = Some(error.before_asking()),
            }
        }
        match (best, failure) {
            (Some(best), _) => Ok(best),
            (None, Some(failure)) => Err(failure),
            (None, None) => Err(Error::invalid("a cluster needs at least one address")),
        }
    }

    fn ask(&self, node: &Address) -> Result<Map> {
        let connector = &self.settings.connector;
        let mut connection = connector.open(node, ProtocolVersion::RESP2)?;
        let slots = connection
            .req_packed_command(&command(&[b"CLUSTER", b"SLOTS"]))
            .and_then(Value::extract_error)
            .map_err(|error| read(&error, node, connector.timeout))?;
        let info = connection
            .req_packed_command(&command(&[b"CLUSTER", b"INFO"]))
            .and_then(Value::extract_error);
        let mut map = read_slots(&slots, node);
        // Where an ACL denies it, the slots must do.
        map.ok = match info {
            Ok(Value::BulkString(info)) => {
                String::from_utf8_lossy(&info).contains("cluster_state:ok")
            }
            _ => true,
        };
        Ok(map)
    }

    /// Puts a map in place. A slot that it does not cover stays where it was: a node that forgot the
    /// others takes nobody down. Returns who has to look again, and what is not used any more.
    fn apply(self: &Arc<Self>, map: Result<Map>) -> (Vec<Arc<Server>>, Vec<Known>) {
        let mut state = self.state.lock();
        state.looks += 1;
        let before = state.masters();
        let made = map.and_then(|map| {
            for (first, last, address) in &map.ranges {
                let server = self.server_at(&mut state, address.clone())?;
                for slot in *first..=*last {
                    state.set(slot, &server);
                }
            }
            for node in map.nodes {
                if !state.nodes.contains(&node) {
                    state.nodes.push(node);
                }
            }
            Ok(())
        });
        state.failure = made.err();
        self.mapped.notify_all();
        let masters = state.masters();
        let mut gone = Vec::new();
        let unused: Vec<Address> = (state.servers.iter())
            .filter(|(_, known)| {
                !masters.iter().any(|it| Arc::ptr_eq(it, &known.server))
                    && Moment::now() - known.used_at > UNUSED
                    && Arc::strong_count(&known.server) == 1
            })
            .map(|(address, _)| address.clone())
            .collect();
        for address in unused {
            gone.extend(state.servers.remove(&address));
        }
        let wake = if std::mem::take(&mut state.changed) {
            before
        } else {
            Vec::new()
        };
        (wake, gone)
    }
}

impl std::fmt::Debug for Cluster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(&self.inner.seeds).finish()
    }
}

/// Reads `[[first, last, [host, port, ...], replica, ...], ...]`.
fn read_slots(value: &Value, asked: &Address) -> Map {
    let mut map = Map {
        ranges: Vec::new(),
        nodes: Vec::new(),
        ok: false,
    };
    let Value::Array(rows) = value else {
        return map;
    };
    for row in rows {
        let Value::Array(row) = row else { continue };
        let [Value::Int(first), Value::Int(last), servers @ ..] = row.as_slice() else {
            continue;
        };
        let mut addresses = servers.iter().filter_map(|server| {
            let Value::Array(server) = server else {
                return None;
            };
            let [host, Value::Int(port), ..] = server.as_slice() else {
                return None;
            };
            let host = match host {
                Value::BulkString(host) => std::str::from_utf8(host).ok()?,
                // Nil: the one that was asked.
                _ => "",
            };
            Some(asked.neighbour(host, u16::try_from(*port).ok()?))
        });
        let (Ok(first), Ok(last), Some(master)) = (
            u16::try_from(*first),
            u16::try_from(*last),
            addresses.next(),
        ) else {
            continue;
        };
        map.nodes.push(master.clone());
        map.nodes.extend(addresses);
        if first <= last && last < SLOTS {
            map.ranges.push((first, last, master));
        }
    }
    map
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tcp(host: &str, port: u16) -> Address {
        Address::Tcp(host.into(), port)
    }

    /// Review M5.
    #[test]
    fn an_unknown_host_and_a_wildcard_are_the_one_that_was_asked() {
        let node = |host: Value| Value::Array(vec![host, Value::Int(7000)]);
        let text = |text: &str| Value::BulkString(text.as_bytes().to_vec());
        let asked = tcp("10.0.0.9", 6379);
        for host in [Value::Nil, text(""), text("?"), text("0.0.0.0"), text("::")] {
            let row = vec![
                Value::Int(0),
                Value::Int(5),
                node(host),
                node(text("10.0.0.8")),
            ];
            let map = read_slots(&Value::Array(vec![Value::Array(row)]), &asked);
            assert_eq!(map.ranges, [(0, 5, tcp("10.0.0.9", 7000))]);
            assert_eq!(map.nodes, [tcp("10.0.0.9", 7000), tcp("10.0.0.8", 7000)]);
            assert_eq!(map.covered(), 6);
        }
    }
}
