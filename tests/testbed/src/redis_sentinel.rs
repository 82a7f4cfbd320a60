//! Redis, a master and two replicas watched by three sentinels.

use std::fs;
use std::process::Command;

use crate::binary;
use crate::port::Port;
use crate::redis::{self, RedisServer};
use crate::server::{PATIENCE, Server, StartFailure, on_free_ports};
use crate::temp_dir::TempDir;
use crate::wait::wait_counted;

const SERVERS: usize = 3;
const SENTINELS: usize = 3;

/// What the sentinels call the master.
const NAME: &str = "mymaster";

/// A throw-away master with two replicas and three sentinels, which take a master that has not answered
/// for a second for dead. Servers are told apart by their index, 0 to 2; which of them is the master
/// changes with every failover.
#[derive(Debug)]
pub struct RedisSentinel {
    servers: Vec<RedisServer>,
    sentinels: Vec<RedisServer>,
}

impl RedisSentinel {
    /// Starts them and waits until all know each other.
    pub fn start() -> Self {
        Self::start_with(&[])
    }

    /// Starts them; the servers, not the sentinels, get further arguments.
    pub fn start_with(args: &[&str]) -> Self {
        let servers = on_free_ports(|| Self::servers_up(args));
        let master = servers[0].port();
        let sentinels = on_free_ports(|| {
            let sentinels: Vec<RedisServer> = (0..SENTINELS)
                .map(|_| RedisServer::of(sentinel(master)))
                .collect();
            sentinels.iter().for_each(|sentinel| sentinel.spawn());
            sentinels
                .iter()
                .try_for_each(|sentinel| sentinel.wait_ready())?;
            Ok(sentinels)
        });
        for sentinel in &sentinels {
            // Instead of 30 s, where the server is new enough (7.0); see `wait_until`.
            sentinel.cli(&["SENTINEL", "DEBUG", "TILT-PERIOD", "3000"]);
        }
        let whole = Self { servers, sentinels };
        whole.wait_whole();
        whole
    }

    /// `redis+sentinel://` with all sentinels and the master's name.
    pub fn url(&self) -> String {
        let addresses: Vec<String> = self
            .sentinels
            .iter()
            .map(|sentinel| sentinel.addr().to_string())
            .collect();
        format!("redis+sentinel://{}/{NAME}", addresses.join(","))
    }

    /// One of the servers, to be killed, paused, restarted or asked.
    pub fn server(&self, index: usize) -> &RedisServer {
        &self.servers[index]
    }

    /// All servers.
    pub fn servers(&self) -> &[RedisServer] {
        &self.servers
    }

    /// All sentinels.
    pub fn sentinels(&self) -> &[RedisServer] {
        &self.sentinels
    }

    /// The master, as the first sentinel that runs sees it.
    ///
    /// # Panics
    /// When no sentinel runs.
    pub fn master(&self) -> usize {
        let sentinel = self.sentinels.iter().find(|sentinel| sentinel.is_running());
        self.master_by(sentinel.expect("a sentinel that runs"))
    }

    /// The master, if all sentinels that run agree on it.
    pub fn agreed_master(&self) -> Option<usize> {
        let running = self
            .sentinels
            .iter()
            .filter(|sentinel| sentinel.is_running());
        let mut named = running.map(|sentinel| self.master_by(sentinel));
        let first = named.next()?;
        named.all(|other| other == first).then_some(first)
    }

    fn master_by(&self, sentinel: &RedisServer) -> usize {
        let answer = sentinel.cli(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", NAME]);
        let port = answer.lines().nth(1).unwrap_or_default().to_owned();
        self.servers
            .iter()
            .position(|server| server.port().to_string() == port)
            .unwrap_or_else(|| panic!("who is {answer:?}?"))
    }

    /// Tells the sentinels to make another server the master, and waits until they have.
    pub fn fail_over(&self) {
        let before = self.master();
        // Asked again each time: on a busy machine a sentinel gives an attempt up, or its votes come too late.
        self.wait_until("another server is the master", || {
            let over = self.master() != before;
            if !over {
                self.sentinels[0].cli(&["SENTINEL", "FAILOVER", NAME]);
            }
            over
        });
    }

    /// Waits until all servers run, one is the master, the others follow it, and all sentinels know.
    pub fn wait_whole(&self) {
        self.wait_until("all sentinels see a master and two replicas", || {
            self.sentinels.iter().all(|sentinel| {
                let answer = sentinel.cli(&["SENTINEL", "MASTER", NAME]);
                let lines: Vec<&str> = answer.lines().collect();
                let field = |name: &str| {
                    let at = lines.iter().position(|line| *line == name)?;
                    lines.get(at + 1).copied()
                };
                field("flags") == Some("master")
                    && field("num-slaves") == Some("2")
                    && field("num-other-sentinels") == Some("2")
            })
        });
        self.wait_until("the replicas follow the master", || {
            let info = self.servers[self.master()].cli(&["INFO", "replication"]);
            info.contains("role:master") && info.matches("state=online").count() == SERVERS - 1
        });
    }

    /// Waits for what the sentinels are to bring about. The time in which one of them is in TILT does not count: for
    /// a while after its machine stood still a sentinel looks and does nothing.
    ///
    /// # Panics
    /// When they do not, with `what` was waited for.
    #[track_caller]
    pub fn wait_until(&self, what: &str, condition: impl FnMut() -> bool) {
        wait_counted(PATIENCE, what, condition, || {
            self.sentinels.iter().any(|sentinel| {
                let info = sentinel.cli(&["INFO", "sentinel"]);
                info.lines().any(|line| line.trim() == "sentinel_tilt:1")
            })
        });
    }

    fn servers_up(args: &[&str]) -> Result<Vec<RedisServer>, StartFailure> {
        let own = ["--repl-diskless-sync-delay", "0", "--repl-timeout", "10"];
        let mut servers: Vec<RedisServer> = Vec::new();
        for _ in 0..SERVERS {
            let mut args: Vec<&str> = own.iter().chain(args).copied().collect();
            let master = servers.first().map(|master| master.port().to_string());
            if let Some(port) = &master {
                args.extend(["--replicaof", "127.0.0.1", port]);
            }
            let server = redis::server(&args);
            server.try_start()?;
            servers.push(RedisServer::of(server));
        }
        Ok(servers)
    }
}

/// A sentinel, not started.
fn sentinel(master: u16) -> Server {
    let port = Port::free();
    let folder = TempDir::new();
    let file = folder.path().join("sentinel.conf");
    // It writes what it learns into its own configuration.
    let text = format!(
        "port {}\nbind 127.0.0.1\ndir {}\n\
         sentinel monitor {NAME} 127.0.0.1 {master} 2\n\
         sentinel down-after-milliseconds {NAME} 1000\n\
         sentinel failover-timeout {NAME} 3000\n",
        port.number(),
        folder.path().display(),
    );
    fs::write(&file, text).unwrap_or_else(|error| panic!("cannot write {file:?}: {error}"));
    let mut command = Command::new(binary::find("redis-server", "redis-server"));
    command.arg(file).arg("--sentinel");
    Server::new(
        "redis-server (sentinel)",
        folder,
        vec![port],
        command,
        redis::answers,
    )
}
