//! Redis, a cluster of three masters and three replicas.

use std::net::SocketAddr;

use crate::binary;
use crate::port::Port;
use crate::redis::{self, RedisServer};
use crate::server::{PATIENCE, Server, StartFailure, on_free_ports};
use crate::temp_dir::TempDir;
use crate::wait::wait_until;

const NODES: usize = 6;
const MASTERS: usize = 3;

/// A throw-away cluster. Nodes are told apart by their index, 0 to 5; which of them are masters
/// changes with every failover.
#[derive(Debug)]
pub struct RedisCluster {
    nodes: Vec<RedisServer>,
}

impl RedisCluster {
    /// Starts one and waits until every node sees it whole and every replica follows its master.
    pub fn start() -> Self {
        Self::start_with(&[])
    }

    /// Starts one whose nodes all get further arguments.
    pub fn start_with(args: &[&str]) -> Self {
        let cluster = on_free_ports(|| Self::nodes_up(args));
        let mut create = vec!["--cluster".to_owned(), "create".to_owned()];
        create.extend(cluster.addresses());
        create.extend(["--cluster-replicas", "1", "--cluster-yes"].map(str::to_owned));
        binary::run(&binary::find("redis-cli", "redis-tools"), create);
        cluster.wait_whole();
        cluster
    }

    /// All nodes, masters and replicas, as `127.0.0.1:PORT`.
    pub fn addresses(&self) -> Vec<String> {
        self.nodes
            .iter()
            .map(|node| node.addr().to_string())
            .collect()
    }

    /// `redis+cluster://` with all nodes.
    pub fn url(&self) -> String {
        format!("redis+cluster://{}", self.addresses().join(","))
    }

    /// All nodes.
    pub fn nodes(&self) -> &[RedisServer] {
        &self.nodes
    }

    /// One node, to be killed, paused, restarted or asked.
    pub fn node(&self, index: usize) -> &RedisServer {
        &self.nodes[index]
    }

    /// The running nodes that call themselves master.
    ///
    /// A paused node does not answer: do not ask while one is.
    pub fn masters(&self) -> Vec<usize> {
        (0..NODES)
            .filter(|&index| self.is_up(index) && self.role(index) == "master")
            .collect()
    }

    /// The running nodes that call themselves replica.
    pub fn replicas(&self) -> Vec<usize> {
        (0..NODES)
            .filter(|&index| self.is_up(index) && self.role(index) == "slave")
            .collect()
    }

    /// The master that has `key`, as the node `asked` sees it.
    ///
    /// # Panics
    /// When no node has the key's slot in its eyes.
    pub fn master_of(&self, key: &str, asked: usize) -> usize {
        let node = &self.nodes[asked];
        let slot: u32 = node
            .cli(&["CLUSTER", "KEYSLOT", key])
            .parse()
            .expect("the number of a slot");
        let map = node.cli(&["CLUSTER", "NODES"]);
        let addr = map
            .lines()
            .map(|line| line.split(' ').collect::<Vec<_>>())
            .filter(|fields| fields.len() > 8 && fields[2].contains("master"))
            .find(|fields| fields[8..].iter().any(|range| covers(range, slot)))
            .and_then(|fields| fields[1].split('@').next()?.parse::<SocketAddr>().ok())
            .unwrap_or_else(|| panic!("no master has slot {slot}:\n{map}"));
        self.nodes
            .iter()
            .position(|node| node.addr() == addr)
            .expect("one of our nodes")
    }

    /// Waits until every running node reports `cluster_state:ok`: after a kill, a failover is done.
    pub fn wait_ok(&self) {
        for index in (0..NODES).filter(|&index| self.is_up(index)) {
            wait_until(PATIENCE, "every node reports cluster_state:ok", || {
                self.cli(index, &["CLUSTER", "INFO"])
                    .contains("cluster_state:ok")
            });
        }
    }

    /// Waits until all six nodes run, agree, and every replica follows its master: any master may be
    /// killed now.
    pub fn wait_whole(&self) {
        self.wait_ok();
        wait_until(PATIENCE, "every node knows all others as healthy", || {
            (0..NODES).all(|index| {
                let map = self.cli(index, &["CLUSTER", "NODES"]);
                let healthy = |line: &&str| !line.contains("fail") && !line.contains("handshake");
                map.lines().filter(healthy).count() == NODES
                    && map.lines().filter(|line| line.contains("master")).count() == MASTERS
            })
        });
        wait_until(PATIENCE, "every replica follows its master", || {
            self.masters().len() == MASTERS
                && self.replicas().iter().all(|&index| {
                    let info = self.cli(index, &["INFO", "replication"]);
                    info.contains("master_link_status:up")
                })
        });
    }

    /// Moves the slot of `key` from its master to `to`. Calls `between` when the slot is on its way with all keys at
    /// the old master, and after each lot of keys that has moved.
    pub fn move_slot(&self, key: &str, to: usize, mut between: impl FnMut()) {
        let from = self.master_of(key, 0);
        let slot = self.cli(0, &["CLUSTER", "KEYSLOT", key]);
        let [from_id, to_id] = [from, to].map(|node| self.cli(node, &["CLUSTER", "MYID"]));
        let set = |node, state, id: &str| {
            self.cli(node, &["CLUSTER", "SETSLOT", &slot, state, id]);
        };
        set(to, "IMPORTING", &from_id);
        set(from, "MIGRATING", &to_id);
        between();
        let port = self.nodes[to].port().to_string();
        for _ in 0..20 {
            let keys = self.cli(from, &["CLUSTER", "GETKEYSINSLOT", &slot, "100"]);
            let keys: Vec<&str> = keys.lines().filter(|key| !key.is_empty()).collect();
            if keys.is_empty() {
                break;
            }
            let mut migrate = vec!["MIGRATE", "127.0.0.1", &port, "", "0", "5000", "KEYS"];
            migrate.extend(&keys);
            self.cli(from, &migrate);
            between();
        }
        // First the two. A replica refuses, and learns it from its master.
        for node in [to, from].into_iter().chain(0..NODES) {
            set(node, "NODE", &to_id);
        }
    }

    fn nodes_up(args: &[&str]) -> Result<Self, StartFailure> {
        let nodes: Vec<RedisServer> = (0..NODES).map(|_| RedisServer::of(node(args))).collect();
        // All at once, then wait: six starts take hardly longer than one.
        nodes.iter().for_each(|node| node.spawn());
        nodes.iter().try_for_each(|node| node.wait_ready())?;
        Ok(Self { nodes })
    }

    fn role(&self, index: usize) -> String {
        let role = self.cli(index, &["ROLE"]);
        role.lines().next().unwrap_or_default().to_owned()
    }

    fn is_up(&self, index: usize) -> bool {
        self.nodes[index].is_running()
    }

    fn cli(&self, index: usize, args: &[&str]) -> String {
        self.nodes[index].cli(args)
    }
}

/// A node of a cluster, not started.
fn node(args: &[&str]) -> Server {
    let (port, bus) = (Port::free(), Port::free());
    let folder = TempDir::new();
    let mut command = redis::command(&port, &folder);
    let own = "--cluster-enabled yes --cluster-config-file nodes.conf --cluster-node-timeout 2000 \
               --repl-diskless-sync-delay 0 --cluster-port";
    command
        .args(own.split_whitespace())
        .arg(bus.number().to_string());
    command.args(args);
    Server::new(
        "redis-server (cluster)",
        folder,
        vec![port, bus],
        command,
        redis::answers,
    )
}

/// Whether `100-200` or `100` covers the slot.
fn covers(range: &str, slot: u32) -> bool {
    let (first, last) = range.split_once('-').unwrap_or((range, range));
    match (first.parse::<u32>(), last.parse::<u32>()) {
        (Ok(first), Ok(last)) => (first..=last).contains(&slot),
        // `[93-<-node]`: a slot on the move.
        _ => false,
    }
}
