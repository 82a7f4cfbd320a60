//! The servers of a campaign, the proxies in front of them, and how to torment both.

use std::path::Path;
use std::thread;
use std::time::Duration;

use contend::Factory;
use contend::semaphore::PermitRequest;
use rand::RngExt;
use rand::rngs::StdRng;
use testbed::{
    Direction, MariaDbServer, Proxy, RedisCluster, RedisSentinel, RedisServer, ZooKeeperEnsemble,
    ZooKeeperServer,
};

use crate::contender::{LED, LOCKED, PERMIT_TTL, SECOND, SEMAPHORES};
use crate::ground::{Fault, Ground};
use crate::history::{ALL, now};
use crate::memory_weather::MemoryWeather;

/// The servers and the proxies.
pub struct Stage {
    ground: Ground,
    servers: Servers,
    /// For each process, its way to each server.
    proxies: Vec<Vec<Proxy>>,
    /// What an operator has, without a proxy in between.
    operator: Factory,
}

enum Servers {
    Memory(Vec<MemoryWeather>),
    Redis(RedisServer),
    RedisCluster(RedisCluster),
    RedisSentinel(RedisSentinel),
    MySql(MariaDbServer),
    Zk(ZooKeeperServer),
    ZkEnsemble(ZooKeeperEnsemble),
}

impl Servers {
    fn start(ground: Ground, processes: usize) -> Servers {
        // What it acknowledged is on the disk: a restart is no loss.
        const DURABLE: &[&str] = &["--appendonly", "yes", "--appendfsync", "always"];
        match ground {
            Ground::Memory => {
                let name = format!("campaign-{}", now());
                let weather = |_| MemoryWeather::around(&name, ground.lease());
                Servers::Memory((0..processes).map(weather).collect())
            }
            Ground::Redis => Servers::Redis(RedisServer::start_with(DURABLE)),
            Ground::RedisCluster => Servers::RedisCluster(RedisCluster::start_with(DURABLE)),
            Ground::RedisSentinel => Servers::RedisSentinel(RedisSentinel::start_with(DURABLE)),
            Ground::MySql | Ground::MySqlPolling => {
                let server = MariaDbServer::start_with(&["--innodb-flush-log-at-trx-commit=2"]);
                server.create_database("campaign");
                Servers::MySql(server)
            }
            Ground::Zk => Servers::Zk(ZooKeeperServer::start()),
            Ground::ZkEnsemble => Servers::ZkEnsemble(ZooKeeperEnsemble::start_proxied()),
        }
    }

    /// What an operator uses, and the addresses that proxies stand before. Clients of a cluster or of sentinels go
    /// where those say that the members are, so there are none.
    fn direct(&self) -> (Factory, Vec<std::net::SocketAddr>) {
        let (url, targets) = match self {
            Servers::Memory(weather) => return (weather[0].plain(), vec![]),
            Servers::Redis(server) => (server.url(), vec![server.addr()]),
            Servers::RedisCluster(cluster) => (cluster.url(), vec![]),
            Servers::RedisSentinel(redis) => (redis.url(), vec![]),
            Servers::MySql(server) => (server.url("campaign"), vec![server.addr()]),
            Servers::Zk(server) => (server.url(), vec![server.addr()]),
            Servers::ZkEnsemble(ensemble) => {
                let nodes = ensemble.nodes().iter();
                (ensemble.url(), nodes.map(|node| node.addr()).collect())
            }
        };
        (
            contend::connect(&url).expect("a URL of the testbed"),
            targets,
        )
    }
}

impl Stage {
    /// Starts the servers, and a proxy for each process and server.
    pub fn start(ground: Ground, processes: usize) -> Stage {
        let servers = Servers::start(ground, processes);
        let (operator, targets) = servers.direct();
        make_semaphores(&operator);
        let proxies = || targets.iter().map(|addr| Proxy::to(*addr)).collect();
        Stage {
            ground,
            servers,
            proxies: std::iter::repeat_with(proxies).take(processes).collect(),
            operator,
        }
    }

    /// The URL through the proxies of a process, with the lease of a campaign.
    pub fn url(&self, process: usize) -> String {
        let lease = self.ground.lease();
        let (ttl, transition) = (lease.ttl().as_millis(), lease.transition().as_millis());
        let lease = format!("ttl={ttl}ms&transition={transition}ms");
        let proxies = self.proxies[process].iter();
        let hosts: Vec<String> = proxies.map(|proxy| proxy.addr().to_string()).collect();
        let hosts = hosts.join(",");
        match &self.servers {
            Servers::Memory(_) => format!("memory://campaign?{lease}"),
            Servers::Redis(_) => format!("redis://{hosts}?{lease}"),
            Servers::RedisCluster(cluster) => format!("{}?{lease}", cluster.url()),
            Servers::RedisSentinel(redis) => format!("{}?{lease}", redis.url()),
            Servers::MySql(_) => {
                let polling = match self.ground {
                    Ground::MySqlPolling => "&wakeups=off&poll_interval=200ms",
                    _ => "",
                };
                format!("mysql://root@{hosts}/campaign?{lease}&create_table=true{polling}")
            }
            Servers::Zk(_) | Servers::ZkEnsemble(_) => format!("zk://{hosts}?session_timeout=2s"),
        }
    }

    /// The factory of a "process" that is threads of this one.
    pub fn memory_factory(&self, process: usize) -> Option<Factory> {
        match &self.servers {
            Servers::Memory(weather) => Some(weather[process].factory()),
            _ => None,
        }
    }

    /// Does it, for as long as it takes, and undoes it. `aim` is the process that most likely owns. Returns the mutex
    /// that it hit, or [`ALL`]; `None` if it surely had no effect.
    pub fn suffer(
        &self,
        fault: Fault,
        aim: Option<usize>,
        random: &mut StdRng,
    ) -> Option<&'static str> {
        let lease = self.ground.lease();
        let total = millis(lease.total());
        match fault {
            Fault::Cut if self.proxies[0].is_empty() => {
                self.on_redis(&["CLIENT", "KILL", "TYPE", "normal"]);
            }
            Fault::Cut => self.each_proxy(&self.choose(aim, random), Proxy::cut),
            Fault::Reset => self.each_proxy(&self.choose(aim, random), Proxy::reset),
            Fault::HoleToServer | Fault::HoleToClient | Fault::HoleBothWays => {
                let chosen = self.choose(aim, random);
                self.black_hole(
                    &chosen,
                    match fault {
                        Fault::HoleToServer => Direction::ToServer,
                        Fault::HoleToClient => Direction::ToClient,
                        _ => Direction::Both,
                    },
                );
                nap(random, 100, total * 3 / 2);
                self.pass(&chosen);
            }
            Fault::Delay => {
                let chosen = self.choose(aim, random);
                let each_way = Duration::from_millis(random.random_range(5..150));
                self.each_weather(&chosen, |weather| weather.delay(each_way));
                self.each_proxy(&chosen, |proxy| proxy.delay(each_way));
                nap(random, 300, total);
                self.pass(&chosen);
            }
            Fault::Fade => {
                // One: the process that is to take its place must not be hindered.
                let chosen = [aim.unwrap_or(0)];
                // Requests arrive at once: the lease runs there while its owner still waits for the reply.
                // Less than a sixth of the ttl, after which MySQL connections give up.
                let delay = lease.ttl() / 8;
                self.each_weather(&chosen, |weather| weather.delay_replies(delay));
                self.each_proxy(&chosen, |proxy| proxy.delay_replies(delay));
                // Long enough for its lease to be renewed by a late reply.
                thread::sleep(lease.ttl() / 2);
                nap(random, 0, total / 2);
                self.black_hole(&chosen, Direction::ToServer);
                thread::sleep(lease.total());
                nap(random, 100, 500);
                self.pass(&chosen);
            }
            Fault::LoseReply => {
                let chosen = self.choose(aim, random);
                for _ in 0..random.random_range(1..20) {
                    self.each_weather(&chosen, MemoryWeather::lose_next_reply);
                    self.each_proxy(&chosen, Proxy::lose_next_reply);
                    nap(random, 10, 60);
                }
                self.pass(&chosen);
            }
            Fault::Kill => self.kill(random),
            Fault::Pause => {
                let most = match self.ground {
                    // Longer, and the others take its place: that is a failover.
                    Ground::RedisCluster => 1_200,
                    Ground::RedisSentinel => 600,
                    _ => total * 3 / 2,
                };
                self.server(random.random_range(0..100), |server| {
                    server.pause();
                    nap(random, 50, most);
                    server.resume();
                });
            }
            Fault::MemberCutOff => {
                if let Servers::ZkEnsemble(ensemble) = &self.servers {
                    let node = random.random_range(0..3);
                    ensemble.cut_off(node);
                    nap(random, 500, 5_000);
                    ensemble.heal(node);
                }
            }
            Fault::FailOver => {
                if let Servers::RedisSentinel(redis) = &self.servers {
                    settle(redis, random);
                    redis.fail_over();
                    settle(redis, random);
                }
            }
            Fault::FlushScripts => self.on_redis(&["SCRIPT", "FLUSH"]),
            Fault::KillSubscribers => self.on_redis(&["CLIENT", "KILL", "TYPE", "pubsub"]),
            Fault::KillConnections => self.kill_connections(random),
            Fault::Reshard => self.reshard(random),
            Fault::OperatorDelete => {
                let mutex = [LED, LOCKED][random.random_range(0..2)];
                self.delete(mutex);
                return Some(mutex);
            }
            Fault::Revoke => {
                let mutex = [LED, LOCKED, SECOND][random.random_range(0..3)];
                return self.revoke(mutex).then_some(mutex);
            }
            Fault::Wipe => {
                self.on_redis(&["FLUSHALL"]);
                make_semaphores(&self.operator);
            }
        }
        Some(ALL)
    }

    /// Asks the server whether it is there.
    pub fn ping(&self, timeout: Duration) {
        let _ = self.operator.ping(timeout);
    }

    /// Takes all permits of all semaphores, when no process holds any: what was leaked comes back by its ttl and a
    /// quarter of it. Returns what is wrong.
    pub fn permits_are_back(&self) -> Result<(), String> {
        let Ok(semaphores) = self.operator.semaphores() else {
            return Ok(());
        };
        let none = PermitRequest::generated().ttl(Duration::from_secs(10));
        let all = SEMAPHORES.iter().fold(none, |request, (name, capacity)| {
            request.permits(*name, *capacity)
        });
        let within = PERMIT_TTL + PERMIT_TTL / 4 + Duration::from_secs(4);
        let taken = semaphores.guard(&all, within).map(drop);
        if let Ok(found) = semaphores.check()
            && !found.is_empty()
        {
            return Err(format!("{found:?}"));
        }
        taken.map_err(|error| format!("permits leaked: {error}"))
    }

    /// Undoes everything, and waits until the servers serve.
    pub fn heal(&self) {
        let all: Vec<usize> = (0..self.proxies.len()).collect();
        self.pass(&all);
        match &self.servers {
            Servers::RedisCluster(cluster) => cluster.wait_ok(),
            Servers::RedisSentinel(redis) => redis.wait_whole(),
            Servers::ZkEnsemble(ensemble) => ensemble.wait_whole(),
            _ => {}
        }
    }

    /// The owner's process, any process, or all of them.
    fn choose(&self, aim: Option<usize>, random: &mut StdRng) -> Vec<usize> {
        let count = self.proxies.len();
        match random.random_range(0..8) {
            0 | 1 => (0..count).collect(),
            2..5 => vec![random.random_range(0..count)],
            _ => vec![aim.unwrap_or(0)],
        }
    }

    fn each_proxy(&self, processes: &[usize], act: impl Fn(&Proxy)) {
        for &process in processes {
            self.proxies[process].iter().for_each(&act);
        }
    }

    fn each_weather(&self, processes: &[usize], act: impl Fn(&MemoryWeather)) {
        if let Servers::Memory(weather) = &self.servers {
            processes.iter().for_each(|&process| act(&weather[process]));
        }
    }

    fn black_hole(&self, processes: &[usize], direction: Direction) {
        self.each_weather(processes, MemoryWeather::unreachable);
        self.each_proxy(processes, |proxy| proxy.black_hole(direction));
    }

    fn pass(&self, processes: &[usize]) {
        self.each_weather(processes, MemoryWeather::pass);
        self.each_proxy(processes, Proxy::pass);
    }

    /// The server, or one of several, by a number that may be too large.
    fn server(&self, number: usize, act: impl FnOnce(&testbed::Server)) {
        match &self.servers {
            Servers::Memory(_) => {}
            Servers::Redis(server) => act(server),
            Servers::MySql(server) => act(server),
            Servers::Zk(server) => act(server),
            Servers::RedisCluster(cluster) => {
                // Masters are of interest: the one that has the keys.
                let masters = cluster.masters();
                act(cluster.node(masters[number % masters.len()]));
            }
            Servers::RedisSentinel(redis) => act(redis.server(redis.master())),
            Servers::ZkEnsemble(ensemble) => act(ensemble.node(number % 3)),
        }
    }

    /// The servers that may take each other's place, and how many of them are masters at rest.
    pub fn replicated(&self) -> (&[RedisServer], usize) {
        match &self.servers {
            Servers::RedisCluster(cluster) => (cluster.nodes(), 3),
            Servers::RedisSentinel(redis) => (redis.servers(), 1),
            _ => (&[], 0),
        }
    }

    /// Copies the logs of servers that choose a master among themselves, which say why they did.
    pub fn keep_logs(&self, folder: &Path) {
        let sentinels = match &self.servers {
            Servers::RedisSentinel(redis) => redis.sentinels(),
            _ => &[],
        };
        for server in self.replicated().0.iter().chain(sentinels) {
            // Not `.log`: those are the journals.
            let file = folder.join(format!("server-{}.txt", server.port()));
            // What is missing is missed by a reader only.
            let _ = std::fs::write(file, server.log());
        }
    }

    fn kill(&self, random: &mut StdRng) {
        let number = random.random_range(0..100);
        match &self.servers {
            Servers::RedisCluster(cluster) => {
                cluster.wait_whole();
                let master = cluster.master_of(&key([LED, LOCKED][number % 2]), 0);
                cluster.node(master).kill();
                cluster.wait_ok();
                nap(random, 0, 4_000);
                cluster.node(master).start();
                cluster.wait_whole();
            }
            Servers::RedisSentinel(redis) => {
                settle(redis, random);
                let master = redis.master();
                redis.server(master).kill();
                redis.wait_until("there is another master", || redis.master() != master);
                nap(random, 0, 4_000);
                redis.server(master).start();
                settle(redis, random);
            }
            Servers::ZkEnsemble(ensemble) => {
                let node = ensemble.node(number % 3);
                node.kill();
                nap(random, 0, 4_000);
                node.start();
                ensemble.wait_whole();
            }
            _ => self.server(number, |server| {
                server.kill();
                nap(random, 0, millis(self.ground.lease().total()));
                server.start();
            }),
        }
    }

    /// Runs a command on every Redis that runs.
    fn on_redis(&self, command: &[&str]) {
        let servers = match &self.servers {
            Servers::Redis(server) => std::slice::from_ref(server),
            _ => self.replicated().0,
        };
        for server in servers {
            server.cli(command);
        }
    }

    fn kill_connections(&self, random: &mut StdRng) {
        let Servers::MySql(server) = &self.servers else {
            return;
        };
        let ids = server.sql(
            "SELECT id FROM information_schema.processlist WHERE id <> CONNECTION_ID() AND db = 'campaign'",
        );
        let chosen = ids.lines().filter(|_| random.random_range(0..3) == 0);
        let kills: Vec<String> = chosen.map(|id| format!("KILL {id};")).collect();
        // One that is gone by now is no reason to stop.
        server.sql(&format!(
            "DELIMITER //\nBEGIN NOT ATOMIC DECLARE CONTINUE HANDLER FOR SQLEXCEPTION BEGIN END; {} END//",
            kills.join(" ")
        ));
    }

    fn delete(&self, mutex: &str) {
        let key = key(mutex);
        match &self.servers {
            Servers::Redis(server) => drop(server.cli(&["DEL", &key])),
            Servers::RedisCluster(cluster) => drop(cluster.node(0).cli(&["-c", "DEL", &key])),
            Servers::RedisSentinel(redis) => {
                redis.server(redis.master()).cli(&["DEL", &key]);
            }
            Servers::MySql(server) => {
                let sql = format!("DELETE FROM campaign.simba_mutex WHERE mutex = '{mutex}'");
                server.sql(&sql);
            }
            Servers::Memory(_) | Servers::Zk(_) | Servers::ZkEnsemble(_) => {}
        }
    }

    /// As an operator does with the command `revoke`. Returns `false` if nothing was revoked.
    fn revoke(&self, mutex: &str) -> bool {
        let Ok(owner) = self.operator.owner(mutex) else {
            return false;
        };
        // An error leaves it open whether it took effect.
        let revoke = || self.operator.revoke(mutex, owner.fence());
        owner.has_owner() && revoke().unwrap_or(true)
    }

    /// Moves the slot of a mutex to another master, with pauses in the middle.
    fn reshard(&self, random: &mut StdRng) {
        let Servers::RedisCluster(cluster) = &self.servers else {
            return;
        };
        cluster.wait_whole();
        let key = key([LED, LOCKED][random.random_range(0..2)]);
        let from = cluster.master_of(&key, 0);
        let mut others = cluster.masters();
        others.retain(|node| *node != from);
        let to = others[random.random_range(0..others.len())];
        cluster.move_slot(&key, to, || nap(random, 0, 400));
    }
}

/// Where the backend has semaphores.
fn make_semaphores(operator: &Factory) {
    if let Ok(semaphores) = operator.semaphores() {
        semaphores.create_tables().expect("the tables can be made");
        for (name, capacity) in SEMAPHORES {
            semaphores.create(name, capacity).expect("a new semaphore");
        }
    }
}

/// The key of a mutex on Redis.
fn key(mutex: &str) -> String {
    format!("simba:{{{mutex}}}")
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// How long a fault lasts: from `least` up to `most` milliseconds.
fn nap(random: &mut StdRng, least: u64, most: u64) {
    thread::sleep(Duration::from_millis(random.random_range(least..most)));
}

/// Waits until all servers have their places. Mostly it makes a replica of a master that was replaced: Sentinel does so
/// after 8 s and more, in which two masters grant. If the nemesis always waited for that, most of a campaign would be
/// left to the fence and prove nothing else.
fn settle(redis: &RedisSentinel, random: &mut StdRng) {
    let waits = random.random_range(0..4) == 0;
    let says_master = |server: usize| {
        let role = redis.server(server).role(Duration::from_secs(1));
        role.as_deref() == Some("master")
    };
    let masters = || (0..redis.servers().len()).filter(|server| says_master(*server));
    if !waits && masters().count() > 1 {
        // In this time both grant.
        nap(random, 0, 2_000);
        // While sentinels do not agree, one of them may be about to promote the one that this would demote.
        if let Some(master) = redis.agreed_master().filter(|master| says_master(*master)) {
            let port = redis.server(master).port().to_string();
            for old in masters().filter(|server| *server != master) {
                let args = ["REPLICAOF", "127.0.0.1", &port];
                redis.server(old).cli(&args);
            }
        }
    }
    redis.wait_whole();
}
