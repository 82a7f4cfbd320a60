//! ZooKeeper, an ensemble of three.

use std::fs;

use crate::port::Port;
use crate::proxy::{Direction, Proxy};
use crate::server::{PATIENCE, Server, StartFailure, on_free_ports};
use crate::temp_dir::TempDir;
use crate::wait::wait_until;
use crate::zookeeper::{self, ZooKeeperServer};

const NODES: usize = 3;

/// A throw-away ensemble of three. Nodes are told apart by their index, 0 to 2.
///
/// A follower that hears nothing from its leader gives up after 5 s (25 ticks of 200 ms).
#[derive(Debug)]
pub struct ZooKeeperEnsemble {
    nodes: Vec<ZooKeeperServer>,
    /// `links[from][to]`: through which `from` reaches the quorum port of `to`.
    links: Vec<Vec<Option<Proxy>>>,
}

impl ZooKeeperEnsemble {
    /// Starts one and waits until it has a leader and two followers.
    pub fn start() -> Self {
        Self::start_with(false, &[], &[])
    }

    /// Starts one whose nodes reach each other's quorum ports through proxies: see [`cut_off`](Self::cut_off).
    ///
    /// Elections do not pass through them, so that a node cut off from its leader still knows who
    /// that is, as in the fault that is to be shown: cut off, but not thrown into a new election.
    /// (A proxy before an election port would not help: a node connects back to the address that the other
    /// one announces, which is its own.)
    pub fn start_proxied() -> Self {
        Self::start_with(true, &[], &[])
    }

    /// Starts one with further lines in every `zoo.cfg` and further arguments to every Java machine.
    pub fn start_with(proxied: bool, config: &[&str], jvm: &[&str]) -> Self {
        let ensemble = on_free_ports(|| Self::nodes_up(proxied, config, jvm));
        ensemble.wait_whole();
        ensemble
    }

    /// All nodes, as in `127.0.0.1:P1,127.0.0.1:P2,127.0.0.1:P3`.
    pub fn addresses(&self) -> Vec<String> {
        self.nodes
            .iter()
            .map(|node| node.addr().to_string())
            .collect()
    }

    /// `zk://` with all nodes.
    pub fn url(&self) -> String {
        format!("zk://{}", self.addresses().join(","))
    }

    /// All nodes.
    pub fn nodes(&self) -> &[ZooKeeperServer] {
        &self.nodes
    }

    /// One node, to be killed, paused, restarted or asked.
    ///
    /// `restart` waits until it serves, which takes a quorum; the others must be up.
    pub fn node(&self, index: usize) -> &ZooKeeperServer {
        &self.nodes[index]
    }

    /// The node that leads at this moment, by its own account.
    pub fn leader(&self) -> Option<usize> {
        self.find("leader").first().copied()
    }

    /// The nodes that follow at this moment, by their own account: one that is cut off from its
    /// leader thinks so until it gives up.
    pub fn followers(&self) -> Vec<usize> {
        self.find("follower")
    }

    /// Waits until there is a leader, and returns it.
    pub fn wait_leader(&self) -> usize {
        let mut leader = None;
        wait_until(PATIENCE, "the ensemble has a leader", || {
            leader = self.leader();
            leader.is_some()
        });
        leader.expect("just seen")
    }

    /// Waits until there is a leader and all other nodes follow.
    pub fn wait_whole(&self) {
        wait_until(
            PATIENCE,
            "the ensemble has a leader and two followers",
            || self.leader().is_some() && self.followers().len() == NODES - 1,
        );
    }

    /// Cuts a node off from the other nodes, leader or not: nothing passes, nothing is closed, and
    /// its clients stay connected.
    ///
    /// # Panics
    /// When the ensemble was not started with proxies.
    pub fn cut_off(&self, index: usize) {
        assert!(
            self.links_of(index).count() > 0,
            "an ensemble of `start_proxied`"
        );
        self.links_of(index)
            .for_each(|link| link.black_hole(Direction::Both));
    }

    /// Undoes [`cut_off`](Self::cut_off); what was held on the way arrives.
    pub fn heal(&self, index: usize) {
        self.links_of(index).for_each(Proxy::pass);
    }

    /// The proxies from and to a node.
    fn links_of(&self, index: usize) -> impl Iterator<Item = &Proxy> {
        (0..NODES)
            .flat_map(move |other| [&self.links[index][other], &self.links[other][index]])
            .flatten()
    }

    fn nodes_up(proxied: bool, config: &[&str], jvm: &[&str]) -> Result<Self, StartFailure> {
        // For clients, quorum and election.
        let ports: Vec<[Port; 3]> = (0..NODES)
            .map(|_| [Port::free(), Port::free(), Port::free()])
            .collect();
        let links: Vec<Vec<Option<Proxy>>> = (0..NODES)
            .map(|from| {
                (0..NODES)
                    .map(|to| (proxied && from != to).then(|| Proxy::to(ports[to][1].addr())))
                    .collect()
            })
            .collect();
        let peers: Vec<Vec<String>> = links
            .iter()
            .map(|links| {
                (0..NODES)
                    .map(|to| {
                        let quorum = links[to]
                            .as_ref()
                            .map_or(ports[to][1].number(), Proxy::port);
                        let election = ports[to][2].number();
                        format!("server.{}=127.0.0.1:{quorum}:{election}", to + 1)
                    })
                    .collect()
            })
            .collect();
        let nodes: Vec<ZooKeeperServer> = ports
            .into_iter()
            .zip(peers)
            .enumerate()
            .map(|(index, (ports, peers))| node(index, ports, &peers, config, jvm))
            .collect();
        nodes.iter().for_each(|node| node.spawn());
        nodes.iter().try_for_each(|node| node.wait_ready())?;
        Ok(Self { nodes, links })
    }

    fn find(&self, mode: &str) -> Vec<usize> {
        (0..NODES)
            .filter(|&index| self.nodes[index].mode().as_deref() == Some(mode))
            .collect()
    }
}

/// A node, not started.
fn node(
    index: usize,
    ports: [Port; 3],
    peers: &[String],
    config: &[&str],
    jvm: &[&str],
) -> ZooKeeperServer {
    let folder = TempDir::new();
    let mut lines = vec!["initLimit=50", "syncLimit=25"];
    lines.extend(peers.iter().map(String::as_str));
    lines.extend(config);
    let command = zookeeper::command(&folder, ports[0].number(), &lines, jvm);
    let id = folder.path().join("data/myid");
    fs::write(&id, (index + 1).to_string())
        .unwrap_or_else(|error| panic!("cannot write {id:?}: {error}"));
    let ports = Vec::from(ports);
    ZooKeeperServer::of(Server::new(
        "zookeeper (ensemble)",
        folder,
        ports,
        command,
        zookeeper::serves,
    ))
}
