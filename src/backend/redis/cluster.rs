//! Which server has which slot, and the thread that finds out.
//!
//! The driver has a cluster client, but it opens connections, sleeps and asks every node in the
//! thread of its caller, so that no call through it keeps to its deadline; and it cannot subscribe. A
//! mutex needs no more than the master of one slot.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};
use std::time::Duration;

use ::redis::{ConnectionLike, ProtocolVersion, Value};
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::connection::{Address, Target};
use super::error::{CallError, CallResult, read_opening};
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
    map: Arc<SlotMap>,
    mapper: Option<Thread>,
}

/// What the thread that finds out shares with those that call.
struct SlotMap {
    slots: Mutex<Slots>,
    /// The mapper has something to do.
    work: Condvar,
    /// There is a new map, or none to be had.
    mapped: Condvar,
    settings: ServerSettings,
    seeds: Vec<Address>,
}

struct Slots {
    /// The master of each slot, as far as it was ever known.
    masters: Vec<Option<Arc<Server>>>,
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
struct SlotsReply {
    ranges: Vec<(u16, u16, Address)>,
    /// Masters and replicas.
    nodes: Vec<Address>,
    /// Whether the node says that the cluster is well.
    ok: bool,
}

impl SlotsReply {
    /// Whether it names a master for every slot, and is from a node that says that the cluster is well.
    fn is_whole(&self) -> bool {
        self.ok && self.covered() == usize::from(SLOTS)
    }

    fn covered(&self) -> usize {
        self.ranges
            .iter()
            .map(|(first, last, _)| usize::from(last.saturating_sub(*first)) + 1)
            .sum()
    }
}

impl Cluster {
    pub(super) fn new(settings: ServerSettings, seeds: Vec<Address>) -> Result<Cluster> {
        let map = SlotMap::new(settings, seeds);
        let mapper = {
            let map = Arc::clone(&map);
            thread::start("contend-redis-map", move || map.look_on_demand())?
        };
        Ok(Cluster {
            map,
            mapper: Some(mapper),
        })
    }

    /// The master of a slot, as far as known; waits for the first map.
    pub(super) fn server(&self, slot: u16, by: Moment) -> Result<Arc<Server>> {
        let mut slots = self.map.slots.lock();
        let seen = slots.looks;
        loop {
            if let Some(Some(server)) = slots.masters.get(usize::from(slot)) {
                return Ok(Arc::clone(server));
            }
            if slots.looks != seen {
                return Err(slots.failure.clone().unwrap_or_else(|| {
                    unavailable(format!("redis cluster: no master has slot {slot}"))
                }));
            }
            self.map.want(&mut slots);
            self.map.wait(&mut slots, by)?;
        }
    }

    /// The masters; waits for the first map.
    pub(super) fn servers(&self, by: Moment) -> Result<Vec<Arc<Server>>> {
        let slots = self.map.slots.lock();
        let mut servers = slots.masters();
        if servers.is_empty() {
            drop(slots);
            servers.push(self.server(0, by)?);
            servers = self.map.slots.lock().masters();
        }
        Ok(servers)
    }

    /// Runs a script where the slot is, following redirections; `doubt` as in [`Server::call`].
    pub(super) fn call(
        &self,
        slot: u16,
        call: &mut Call,
        lane: Lane,
        by: Moment,
        doubt: &mut Option<Error>,
    ) -> CallResult<Value> {
        let mut server = self.server(slot, by).map_err(CallError::Other)?;
        let mut asking = false;
        for _ in 0..HOPS {
            match server.call(call, lane, asking, by, doubt) {
                // Nothing was done there: it is safe to ask elsewhere.
                Err(CallError::Moved(to)) => {
                    asking = false;
                    server = match to {
                        Some(address) => self.map.moved(slot, address),
                        None => self.look_again(by).and_then(|()| self.server(slot, by)),
                    }
                    .map_err(CallError::Other)?;
                }
                Err(CallError::Ask(address)) => {
                    asking = true;
                    server = self.map.at(address).map_err(CallError::Other)?;
                }
                Err(CallError::ClusterDown(error)) => {
                    self.suspect(Some(&server));
                    return Err(CallError::ClusterDown(error));
                }
                Err(
                    failure @ (CallError::Closed(_) | CallError::ReadOnly(_) | CallError::Other(_)),
                ) => {
                    // The node may have been replaced.
                    self.suspect(None);
                    return Err(failure);
                }
                reply => return reply,
            }
        }
        Err(CallError::Other(unavailable(
            "redis cluster: the nodes do not agree on which of them has the mutex",
        )))
    }

    /// Looks at the slots again, some time soon; `down` is asked last.
    pub(super) fn suspect(&self, down: Option<&Arc<Server>>) {
        let mut slots = self.map.slots.lock();
        if let Some(down) = down {
            let address = (slots.servers.iter())
                .find(|(_, known)| Arc::ptr_eq(&known.server, down))
                .map(|(address, _)| address.clone());
            if let Some(address) = address {
                slots.avoided.insert(address, Moment::now() + AVOIDED);
            }
        }
        self.map.want(&mut slots);
    }

    /// Looks at the slots again and waits until that was done.
    fn look_again(&self, by: Moment) -> Result<()> {
        let mut slots = self.map.slots.lock();
        let seen = slots.looks;
        while slots.looks == seen {
            self.map.want(&mut slots);
            self.map.wait(&mut slots, by)?;
        }
        Ok(())
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let deadline = Moment::now() + FAREWELL;
        self.map.slots.lock().closed = true;
        self.map.work.notify_one();
        let servers: Vec<Arc<Server>> = {
            let mut slots = self.map.slots.lock();
            slots.masters.clear();
            let known = std::mem::take(&mut slots.servers);
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

impl Slots {
    fn masters(&self) -> Vec<Arc<Server>> {
        let mut servers: Vec<Arc<Server>> = Vec::new();
        for server in self.masters.iter().flatten() {
            if !servers.iter().any(|known| Arc::ptr_eq(known, server)) {
                servers.push(Arc::clone(server));
            }
        }
        servers
    }

    fn set(&mut self, slot: u16, server: &Arc<Server>) {
        if let Some(known) = self.masters.get_mut(usize::from(slot))
            && !known.as_ref().is_some_and(|it| Arc::ptr_eq(it, server))
        {
            *known = Some(Arc::clone(server));
            self.changed = true;
        }
    }
}

impl SlotMap {
    fn new(settings: ServerSettings, seeds: Vec<Address>) -> Arc<SlotMap> {
        Arc::new(SlotMap {
            slots: Mutex::new(Slots {
                masters: vec![None; usize::from(SLOTS)],
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
        })
    }

    fn want(&self, slots: &mut Slots) {
        slots.wanted = true;
        self.work.notify_one();
    }

    fn wait(&self, slots: &mut MutexGuard<'_, Slots>, by: Moment) -> Result<()> {
        let left = by.remaining();
        if left.is_zero() {
            return Err(slots.failure.clone().unwrap_or_else(|| {
                Error::new(
                    ErrorKind::Timeout,
                    format!(
                        "redis cluster: no node of {} answered in time",
                        self.names()
                    ),
                )
                .not_sent()
            }));
        }
        self.mapped.wait_for(slots, left);
        Ok(())
    }

    fn names(&self) -> String {
        let names: Vec<_> = self.seeds.iter().map(Address::to_string).collect();
        names.join(",")
    }

    /// The server at `address`, whether or not it has slots.
    fn at(self: &Arc<Self>, address: Address) -> Result<Arc<Server>> {
        self.server_at(&mut self.slots.lock(), address)
    }

    fn server_at(self: &Arc<Self>, slots: &mut Slots, address: Address) -> Result<Arc<Server>> {
        let now = Moment::now();
        if let Some(known) = slots.servers.get_mut(&address) {
            known.used_at = now;
            return Ok(Arc::clone(&known.server));
        }
        if slots.closed {
            return Err(Error::new(ErrorKind::Closed, "the factory was closed").not_sent());
        }
        let weak: Weak<SlotMap> = Arc::downgrade(self);
        let alarm = move || {
            if let Some(map) = weak.upgrade() {
                map.want(&mut map.slots.lock());
            }
        };
        let target = Target::At(address.clone());
        let server = Arc::new(Server::new(&self.settings, target, Box::new(alarm))?);
        let known = Known {
            server: Arc::clone(&server),
            used_at: now,
        };
        slots.servers.insert(address, known);
        Ok(server)
    }

    /// A node said where the slot is: that is newer than any map.
    fn moved(self: &Arc<Self>, slot: u16, address: Address) -> Result<Arc<Server>> {
        let mut slots = self.slots.lock();
        let server = self.server_at(&mut slots, address)?;
        slots.set(slot, &server);
        self.want(&mut slots);
        Ok(server)
    }

    fn look_on_demand(self: Arc<Self>) {
        loop {
            let mut slots = self.slots.lock();
            while !slots.closed && !slots.wanted {
                self.work.wait(&mut slots);
            }
            if slots.closed {
                return;
            }
            slots.wanted = false;
            let nodes = SlotMap::whom_to_ask(&mut slots);
            drop(slots);
            let map = self.look(&nodes);
            let (wake, gone) = self.apply(map);
            for server in wake {
                server.wake_all();
            }
            // Joined here, where nobody waits for it.
            drop(gone);
            let until = Moment::now() + PAUSE;
            let mut slots = self.slots.lock();
            while !slots.closed && !until.remaining().is_zero() {
                self.work.wait_for(&mut slots, until.remaining());
            }
        }
    }

    /// All nodes, beginning with another one each time, and those that said CLUSTERDOWN at the end.
    fn whom_to_ask(slots: &mut Slots) -> Vec<Address> {
        let mut nodes = slots.nodes.clone();
        if !nodes.is_empty() {
            let turn = slots.turn % nodes.len();
            nodes.rotate_left(turn);
            slots.turn = slots.turn.wrapping_add(1);
        }
        slots
            .avoided
            .retain(|_, until| !until.remaining().is_zero());
        nodes.sort_by_key(|node| slots.avoided.contains_key(node));
        nodes
    }

    /// The first map that is whole and from a node that says that the cluster is well; else the best.
    fn look(&self, nodes: &[Address]) -> Result<SlotsReply> {
        let mut best: Option<SlotsReply> = None;
        let mut failure = None;
        for node in nodes {
            if self.slots.lock().closed {
                break;
            }
            // A panic is that node's failure: nobody starts this thread again.
            let asked = catch_unwind(AssertUnwindSafe(|| self.ask(node)));
            let asked = asked.unwrap_or_else(|_| {
                Err(Error::new(
                    ErrorKind::Panicked,
                    format!("redis at {node}: asking for the slots panicked"),
                ))
            });
            match asked {
                Ok(map) if map.is_whole() => return Ok(map),
                Ok(map) if map.ranges.is_empty() => {
                    failure = Some(unavailable(format!(
                        "redis at {node}: the cluster has no slots yet"
                    )));
                }
                Ok(map) => {
                    let rank = |map: &SlotsReply| (map.ok, map.covered());
                    if best.as_ref().is_none_or(|best| rank(best) < rank(&map)) {
                        best = Some(map);
                    }
                }
                Err(error) => failure = Some(error.not_sent()),
            }
        }
        match (best, failure) {
            (Some(best), _) => Ok(best),
            (None, Some(failure)) => Err(failure),
            (None, None) => Err(Error::invalid("a cluster needs at least one address")),
        }
    }

    fn ask(&self, node: &Address) -> Result<SlotsReply> {
        let connector = &self.settings.connector;
        let mut connection = connector.open(node, ProtocolVersion::RESP2)?;
        let slots = connection
            .req_packed_command(&command(&[b"CLUSTER", b"SLOTS"]))
            .and_then(Value::extract_error)
            .map_err(|error| read_opening(&error, node, connector.timeout))?;
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
    fn apply(self: &Arc<Self>, map: Result<SlotsReply>) -> (Vec<Arc<Server>>, Vec<Known>) {
        let mut slots = self.slots.lock();
        slots.looks += 1;
        let made = map.and_then(|map| {
            for (first, last, address) in &map.ranges {
                let server = self.server_at(&mut slots, address.clone())?;
                for slot in *first..=*last {
                    slots.set(slot, &server);
                }
            }
            // Whoever has left a cluster that is whole is asked no more: nodes come and go.
            let mut nodes = if map.is_whole() {
                self.seeds.clone()
            } else {
                std::mem::take(&mut slots.nodes)
            };
            for node in map.nodes {
                if !nodes.contains(&node) {
                    nodes.push(node);
                }
            }
            slots.nodes = nodes;
            Ok(())
        });
        slots.failure = made.err();
        self.mapped.notify_all();
        let masters = slots.masters();
        let mut gone = Vec::new();
        let unused: Vec<Address> = (slots.servers.iter())
            .filter(|(_, known)| {
                !masters.iter().any(|it| Arc::ptr_eq(it, &known.server))
                    && Moment::now() - known.used_at > UNUSED
                    && Arc::strong_count(&known.server) == 1
            })
            .map(|(address, _)| address.clone())
            .collect();
        for address in unused {
            gone.extend(slots.servers.remove(&address));
        }
        // Also those without a slot: the last one may have been seen to move before this look.
        let wake = if std::mem::take(&mut slots.changed) {
            let known = slots.servers.values();
            known.map(|known| Arc::clone(&known.server)).collect()
        } else {
            Vec::new()
        };
        (wake, gone)
    }
}

impl std::fmt::Debug for Cluster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(&self.map.seeds).finish()
    }
}

/// Reads `[[first, last, [host, port, ...], replica, ...], ...]`.
fn read_slots(value: &Value, asked: &Address) -> SlotsReply {
    let mut map = SlotsReply {
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

    fn slot_map() -> Arc<SlotMap> {
        let connector = Arc::new(super::super::connection::Connector {
            login: Default::default(),
            database: 0,
            tls: None,
            timeout: Duration::from_millis(100),
        });
        let settings = ServerSettings {
            connector,
            pool_size: 1,
            prefix: "simba".into(),
            probe: Default::default(),
        };
        SlotMap::new(settings, vec![tcp("127.0.0.1", 1)])
    }

    fn reply(ranges: &[(u16, u16, u16)], ok: bool) -> SlotsReply {
        let ranges: Vec<_> = (ranges.iter())
            .map(|(first, last, port)| (*first, *last, tcp("127.0.0.1", *port)))
            .collect();
        SlotsReply {
            nodes: ranges.iter().map(|(_, _, node)| node.clone()).collect(),
            ranges,
            ok,
        }
    }

    /// Nodes come and go: those that are gone would each cost a timeout whenever the slots are looked at.
    #[test]
    fn a_node_that_left_a_whole_cluster_is_asked_no_more() {
        let map = slot_map();
        let ports = || -> Vec<u16> {
            let slots = map.slots.lock();
            let port = |node: &Address| match node {
                Address::Tcp(_, port) => *port,
                Address::Unix(_) => 0,
            };
            slots.nodes.iter().map(port).collect()
        };
        map.apply(Ok(reply(&[(0, 8_000, 2), (8_001, 16_383, 3)], true)));
        assert_eq!(ports(), [1, 2, 3]);
        // Not whole, or not well: it may have forgotten some.
        map.apply(Ok(reply(&[(0, 16_383, 4)], false)));
        map.apply(Ok(reply(&[(0, 8_000, 4)], true)));
        assert_eq!(ports(), [1, 2, 3, 4]);
        map.apply(Ok(reply(&[(0, 16_383, 5)], true)));
        assert_eq!(ports(), [1, 5]);
    }

    /// Those who listen on the node that the last slot has left must look again, whoever saw it move.
    #[test]
    fn all_are_woken_when_a_redirection_took_the_last_slot_of_a_node() {
        let map = slot_map();
        map.apply(Ok(reply(&[(0, 0, 2), (1, 16_383, 3)], true)));
        let old = Arc::clone(map.slots.lock().masters.first().unwrap().as_ref().unwrap());
        map.moved(0, tcp("127.0.0.1", 3)).unwrap();
        let (wake, _) = map.apply(Ok(reply(&[(0, 16_383, 3)], true)));
        assert!(wake.iter().any(|server| Arc::ptr_eq(server, &old)));
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
