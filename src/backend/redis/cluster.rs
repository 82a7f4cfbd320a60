//! Which server has which slot.
//!
//! The driver has a cluster client, but it opens connections, sleeps and asks every node in the thread of its caller, so
//! no call through it keeps to its deadline; and it cannot subscribe. A mutex needs no more than the master of one slot.
//! The caller that finds the map stale asks for a new one, through the same pools as every request.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ::redis::Value;
use parking_lot::Mutex;
use rand::seq::SliceRandom;

use super::connection::{Address, Target};
use super::error::unavailable;
use super::keys::SLOTS;
use super::script::Command;
use super::server::{Server, ServerSettings};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};

/// The least time between two looks: while a node fails, every call asks for one.
const PAUSE: Duration = Duration::from_millis(100);

/// How long one node is asked for the slots.
const NODE_LIMIT: Duration = Duration::from_millis(500);

pub(super) struct Cluster {
    settings: Arc<ServerSettings>,
    /// The nodes that the user named.
    seeds: Vec<Address>,
    map: Mutex<Map>,
    /// The last look. Locked while a caller looks.
    look: Mutex<Look>,
}

struct Map {
    /// The master of each slot, as far as it was ever known.
    masters: Vec<Option<Arc<Server>>>,
    servers: HashMap<Address, Arc<Server>>,
}

#[derive(Default)]
struct Look {
    at: Option<Moment>,
    failure: Option<Error>,
}

/// The first slot, the last slot, their master.
type Range = (u16, u16, Address);

impl Cluster {
    pub(super) fn new(settings: Arc<ServerSettings>, seeds: Vec<Address>) -> Cluster {
        Cluster {
            settings,
            seeds,
            map: Mutex::new(Map {
                masters: vec![None; usize::from(SLOTS)],
                servers: HashMap::new(),
            }),
            look: Mutex::default(),
        }
    }

    /// The master of a slot, as far as known.
    pub(super) fn server(&self, slot: u16, by: Moment) -> Result<Arc<Server>> {
        self.refresh(by)?;
        let master = self.map.lock().masters.get(usize::from(slot)).cloned();
        master.flatten().ok_or_else(|| {
            self.settings.map_stale.store(true, Ordering::Relaxed);
            unavailable(format!("redis cluster: no master has slot {slot}"))
        })
    }

    /// The masters, as far as known.
    pub(super) fn masters(&self, by: Moment) -> Result<Vec<Arc<Server>>> {
        self.refresh(by)?;
        let map = self.map.lock();
        let is_master = |server: &&Arc<Server>| {
            let mut masters = map.masters.iter().flatten();
            masters.any(|master| Arc::ptr_eq(master, server))
        };
        Ok(map.servers.values().filter(is_master).cloned().collect())
    }

    /// The servers that were met so far. Asks none.
    pub(super) fn known(&self) -> Vec<Arc<Server>> {
        self.map.lock().servers.values().cloned().collect()
    }

    /// The server at `address`, whether or not it has slots.
    pub(super) fn at(&self, address: Address) -> Result<Arc<Server>> {
        self.server_at(&mut self.map.lock(), address)
    }

    /// A node said which server has the slot: that is newer than any map.
    pub(super) fn set_master(&self, slot: u16, address: Address) -> Result<Arc<Server>> {
        let mut map = self.map.lock();
        let server = self.server_at(&mut map, address)?;
        map.set(slot, &server);
        Ok(server)
    }

    fn server_at(&self, map: &mut Map, address: Address) -> Result<Arc<Server>> {
        if let Some(known) = map.servers.get(&address) {
            return Ok(Arc::clone(known));
        }
        let server = Arc::new(Server::new(&self.settings, Target::At(address.clone()))?);
        map.servers.insert(address, Arc::clone(&server));
        Ok(server)
    }

    /// Looks at the slots if the map is stale. One caller does at a time; the others go on with the map that they have,
    /// or wait for the first one.
    ///
    /// # Errors
    /// Any, while there is no map at all.
    fn refresh(&self, by: Moment) -> Result<()> {
        let is_stale = &self.settings.map_stale;
        if !is_stale.load(Ordering::Relaxed) {
            return Ok(());
        }
        let has_map = self.map.lock().masters.iter().any(Option::is_some);
        let look = match has_map {
            true => self.look.try_lock(),
            false => self.look.try_lock_for(by.remaining()),
        };
        let mut look = match look {
            Some(look) => look,
            None if has_map => return Ok(()),
            None => {
                let message = "redis cluster: no node answered in time";
                return Err(Error::new(ErrorKind::Timeout, message).not_sent());
            }
        };
        let is_due = look.at.is_none_or(|at| Moment::now() - at >= PAUSE);
        if is_stale.load(Ordering::Relaxed) && is_due {
            look.failure = self.ask_nodes(by).err();
            // Not before: a node that does not answer this says no more.
            is_stale.store(look.failure.is_some(), Ordering::Relaxed);
            look.at = Some(Moment::now());
        }
        match &look.failure {
            Some(failure) if !has_map => Err(failure.clone()),
            _ => Ok(()),
        }
    }

    /// Asks for the slots: the known servers in any order, then the nodes that the user named, up to one that names a
    /// master for every slot. A slot that no node names stays where it was, so a node that forgot the others does no
    /// harm.
    fn ask_nodes(&self, by: Moment) -> Result<()> {
        let mut nodes: Vec<Address> = self.map.lock().servers.keys().cloned().collect();
        nodes.shuffle(&mut rand::rng());
        let named = (self.seeds.iter()).filter(|seed| !nodes.contains(seed));
        nodes.extend(named.cloned().collect::<Vec<_>>());
        let question = Command::plain(0, &[b"CLUSTER", b"SLOTS"]);
        let (mut best, mut failure) = (Vec::new(), None);
        for address in nodes {
            // What one node may take leaves time for another.
            let limit = NODE_LIMIT.min(by.remaining() / 2);
            let node = self.at(address.clone())?;
            match node.command(&question, Moment::now() + limit) {
                Ok(slots) => {
                    let ranges = read_slots(&slots, &address);
                    if covered(&ranges) > covered(&best) {
                        best = ranges;
                    }
                }
                Err(error) => failure = Some(error.not_sent()),
            }
            if covered(&best) == usize::from(SLOTS) {
                break;
            }
        }
        if best.is_empty() {
            let none = || unavailable("redis cluster: no node has slots yet");
            return Err(failure.unwrap_or_else(none));
        }
        let mut map = self.map.lock();
        for (first, last, address) in best {
            let server = self.server_at(&mut map, address)?;
            (first..=last).for_each(|slot| map.set(slot, &server));
        }
        // A master is in use for its slots.
        map.servers
            .retain(|_, server| Arc::strong_count(server) > 1);
        Ok(())
    }
}

impl Map {
    fn set(&mut self, slot: u16, server: &Arc<Server>) {
        if let Some(master) = self.masters.get_mut(usize::from(slot)) {
            *master = Some(Arc::clone(server));
        }
    }
}

fn covered(ranges: &[Range]) -> usize {
    let slots = ranges.iter().map(|(first, last, _)| last - first + 1);
    slots.map(usize::from).sum()
}

/// Reads `[[first, last, [host, port, ...], replica, ...], ...]`.
fn read_slots(value: &Value, asked: &Address) -> Vec<Range> {
    let Value::Array(rows) = value else {
        return Vec::new();
    };
    let range = |row: &Value| {
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
            Value::BulkString(host) => std::str::from_utf8(host).ok()?,
            // Nil: the one that was asked.
            _ => "",
        };
        let (first, last) = (u16::try_from(*first).ok()?, u16::try_from(*last).ok()?);
        let master = asked.neighbour(host, u16::try_from(*port).ok()?);
        (first <= last && last < SLOTS).then_some((first, last, master))
    };
    rows.iter().filter_map(range).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tcp(host: &str, port: u16) -> Address {
        Address::Tcp(host.into(), port)
    }

    #[test]
    fn unknown_host_and_wildcard_are_the_node_that_was_asked() {
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
            let ranges = read_slots(&Value::Array(vec![Value::Array(row)]), &asked);
            assert_eq!(ranges, [(0, 5, tcp("10.0.0.9", 7000))]);
            assert_eq!(covered(&ranges), 6);
        }
    }
}
