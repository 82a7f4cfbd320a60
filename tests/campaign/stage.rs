//! The servers of a campaign, the proxies in front of them, and what can be done to both.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::thread;
use std::time::Duration;

use contend::semaphore::PermitRequest;
use contend::{Factory, Lease};
use rand::RngExt;
use rand::rngs::StdRng;
use testbed::{
    Direction, MariaDbServer, Proxy, RedisCluster, RedisSentinel, RedisServer, ZooKeeperEnsemble,
    ZooKeeperServer,
};

use crate::contender::{LED, LOCKED, PERMIT_TTL, SECOND, SEMAPHORES};
use crate::memory_weather::MemoryWeather;

/// What a campaign runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ground {
    Memory,
    Redis,
    RedisCluster,
    RedisSentinel,
    MySql,
    MySqlPolling,
    Zk,
    ZkEnsemble,
}

impl Ground {
    /// All of them.
    pub const ALL: [Ground; 8] = [
        Ground::Memory,
        Ground::Redis,
        Ground::RedisCluster,
        Ground::RedisSentinel,
        Ground::MySql,
        Ground::MySqlPolling,
        Ground::Zk,
        Ground::ZkEnsemble,
    ];

    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Ground::Memory => "memory",
            Ground::Redis => "redis",
            Ground::RedisCluster => "redis-cluster",
            Ground::RedisSentinel => "redis-sentinel",
            Ground::MySql => "mysql",
            Ground::MySqlPolling => "mysql-polling",
            Ground::Zk => "zk",
            Ground::ZkEnsemble => "zk-ensemble",
        }
    }

    /// A lease that is short enough for many losses in a minute, and whose transition is shorter than
    /// what one call may take: a belief that counts from the wrong moment outlasts it.
    pub fn lease(self) -> Lease {
        let ms = Duration::from_millis;
        match self {
            // The session timeout is 2 s, of which a sixth is the transition.
            Ground::Zk | Ground::ZkEnsemble => Lease::new(ms(1_667), ms(333)),
            _ => Lease::new(ms(1_200), ms(50)),
        }
        .expect("a lease")
    }

    /// The faults that make sense here, and how often each.
    pub fn faults(self) -> &'static [(Fault, u32)] {
        const NETWORK: &[(Fault, u32)] = &[
            (Fault::Cut, 3),
            (Fault::Reset, 2),
            (Fault::BlackHole(Way::ToServer), 3),
            (Fault::BlackHole(Way::ToClient), 3),
            (Fault::BlackHole(Way::Both), 2),
            (Fault::Delay, 3),
            (Fault::Fade, 3),
            (Fault::LoseReply, 4),
        ];
        match self {
            Ground::Memory => &[
                (Fault::BlackHole(Way::ToServer), 3),
                (Fault::Delay, 3),
                (Fault::Fade, 3),
                (Fault::LoseReply, 4),
                (Fault::Revoke, 3),
            ],
            Ground::Redis => concat(&[
                NETWORK,
                &[
                    (Fault::ServerKill, 2),
                    (Fault::ServerPause, 2),
                    (Fault::FlushScripts, 2),
                    (Fault::KillSubscribers, 2),
                    (Fault::OperatorDelete, 2),
                    (Fault::Wipe, 1),
                    (Fault::Revoke, 2),
                ],
            ]),
            Ground::RedisCluster => &[
                (Fault::MemberPause, 3),
                (Fault::MemberKill, 2),
                (Fault::FlushScripts, 2),
                (Fault::KillSubscribers, 3),
                (Fault::Cut, 3),
                (Fault::Reshard, 3),
                (Fault::OperatorDelete, 1),
                (Fault::Revoke, 1),
            ],
            Ground::RedisSentinel => &[
                (Fault::MemberPause, 3),
                (Fault::MemberKill, 2),
                (Fault::FailOver, 2),
                (Fault::FlushScripts, 2),
                (Fault::KillSubscribers, 3),
                (Fault::Cut, 3),
                (Fault::OperatorDelete, 1),
                (Fault::Revoke, 1),
            ],
            Ground::MySql | Ground::MySqlPolling => concat(&[
                NETWORK,
                &[
                    (Fault::ServerKill, 1),
                    (Fault::ServerPause, 2),
                    (Fault::KillConnections, 2),
                    (Fault::OperatorDelete, 2),
                    (Fault::Revoke, 2),
                ],
            ]),
            Ground::Zk => concat(&[
                NETWORK,
                &[
                    (Fault::ServerKill, 1),
                    (Fault::ServerPause, 2),
                    // Deletes the node, as an operator would.
                    (Fault::Revoke, 2),
                ],
            ]),
            Ground::ZkEnsemble => concat(&[
                NETWORK,
                &[
                    (Fault::MemberKill, 2),
                    (Fault::MemberPause, 3),
                    (Fault::MemberCutOff, 3),
                    (Fault::Revoke, 2),
                ],
            ]),
        }
    }
}

impl fmt::Display for Ground {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Ground {
    type Err = String;

    fn from_str(text: &str) -> Result<Ground, String> {
        let found = Ground::ALL.into_iter().find(|ground| ground.name() == text);
        found.ok_or_else(|| {
            let names = Ground::ALL.map(Ground::name).join(", ");
            format!("unknown backend {text:?}; known are: {names}")
        })
    }
}

/// The faults of the servers and the network. Those of processes are the nemesis's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Connections are closed.
    Cut,
    /// Connections are reset.
    Reset,
    /// Connections stay open and nothing passes that way.
    BlackHole(Way),
    /// Everything takes longer.
    Delay,
    /// Everything takes longer, and then nothing passes.
    Fade,
    /// The reply to a request is lost.
    LoseReply,
    /// The server is killed and started again on its data.
    ServerKill,
    /// The server stands still.
    ServerPause,
    /// One of several servers is killed and started again.
    MemberKill,
    /// One of several servers stands still.
    MemberPause,
    /// One of several servers does not reach the others.
    MemberCutOff,
    /// Another server becomes the master on request.
    FailOver,
    /// Redis forgets its scripts.
    FlushScripts,
    /// Redis closes the connections of its subscribers.
    KillSubscribers,
    /// MySQL closes connections.
    KillConnections,
    /// Slots move to another member.
    Reshard,
    /// An operator deletes the key, row or node.
    OperatorDelete,
    /// An operator revokes.
    Revoke,
    /// The server loses all its data.
    Wipe,
}

/// What a fault hit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hit {
    /// Any of the mutexes.
    All,
    /// This one, and no other.
    Mutex(&'static str),
}

/// Which way nothing passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    ToServer,
    ToClient,
    Both,
}

impl Fault {
    /// Whether only a checked fence protects against it. So it does against a change of masters, which
    /// [`Watch`](crate::masters::Watch) writes down: a kill or a pause may bring one about, or not.
    pub fn is_fence_only(self) -> bool {
        matches!(self, Fault::OperatorDelete | Fault::Revoke | Fault::Wipe)
    }

    /// Its name in the last line.
    pub fn name(self) -> &'static str {
        match self {
            Fault::Cut => "cut",
            Fault::Reset => "reset",
            Fault::BlackHole(Way::ToServer) => "black-hole-to-server",
            Fault::BlackHole(Way::ToClient) => "black-hole-to-client",
            Fault::BlackHole(Way::Both) => "black-hole-both",
            Fault::Delay => "delay",
            Fault::Fade => "fade",
            Fault::LoseReply => "lose-reply",
            Fault::ServerKill => "server-kill",
            Fault::ServerPause => "server-pause",
            Fault::MemberKill => "member-kill",
            Fault::MemberPause => "member-pause",
            Fault::MemberCutOff => "member-cut-off",
            Fault::FailOver => "fail-over",
            Fault::FlushScripts => "flush-scripts",
            Fault::KillSubscribers => "kill-subscribers",
            Fault::KillConnections => "kill-connections",
            Fault::Reshard => "reshard",
            Fault::OperatorDelete => "operator-delete",
            Fault::Revoke => "revoke",
            Fault::Wipe => "wipe",
        }
    }
}

fn concat(lists: &[&[(Fault, u32)]]) -> &'static [(Fault, u32)] {
    // A few entries for each campaign.
    Box::leak(lists.concat().into_boxed_slice())
}

/// The servers and the proxies.
pub struct Stage {
    ground: Ground,
    servers: Servers,
    /// For each process, its way to each server.
    proxies: Vec<Vec<Proxy>>,
    /// What an operator has, without a proxy in between.
    operator: Option<Factory>,
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

impl Stage {
    /// Starts the servers, and a proxy for each process and server.
    pub fn start(ground: Ground, processes: usize) -> Stage {
        let servers = match ground {
            Ground::Memory => {
                let name = format!("campaign-{}", crate::history::now());
                let weather = |_| MemoryWeather::around(&name, ground.lease());
                Servers::Memory((0..processes).map(weather).collect())
            }
            // What it acknowledged is on the disk: a restart is no loss.
            Ground::Redis => Servers::Redis(RedisServer::start_with(&[
                "--appendonly",
                "yes",
                "--appendfsync",
                "always",
            ])),
            Ground::RedisCluster => Servers::RedisCluster(RedisCluster::start_with(&[
                "--appendonly",
                "yes",
                "--appendfsync",
                "always",
            ])),
            Ground::RedisSentinel => Servers::RedisSentinel(RedisSentinel::start_with(&[
                "--appendonly",
                "yes",
                "--appendfsync",
                "always",
            ])),
            Ground::MySql | Ground::MySqlPolling => {
                let server = MariaDbServer::start_with(&["--innodb-flush-log-at-trx-commit=2"]);
                server.create_database("campaign");
                Servers::MySql(server)
            }
            Ground::Zk => Servers::Zk(ZooKeeperServer::start()),
            Ground::ZkEnsemble => Servers::ZkEnsemble(ZooKeeperEnsemble::start_proxied()),
        };
        let targets = match &servers {
            // Clients go where the members or the sentinels say that they are.
            Servers::Memory(_) | Servers::RedisCluster(_) | Servers::RedisSentinel(_) => vec![],
            Servers::Redis(server) => vec![server.addr()],
            Servers::MySql(server) => vec![server.addr()],
            Servers::Zk(server) => vec![server.addr()],
            Servers::ZkEnsemble(ensemble) => {
                ensemble.nodes().iter().map(|node| node.addr()).collect()
            }
        };
        let proxies = (0..processes)
            .map(|_| targets.iter().map(|addr| Proxy::to(*addr)).collect())
            .collect();
        let direct = match &servers {
            Servers::Memory(weather) => Ok(weather[0].plain()),
            Servers::Redis(server) => contend::connect(&server.url()),
            Servers::RedisCluster(cluster) => contend::connect(&cluster.url()),
            Servers::RedisSentinel(redis) => contend::connect(&redis.url()),
            Servers::MySql(server) => contend::connect(&server.url("campaign")),
            Servers::Zk(server) => contend::connect(&server.url()),
            Servers::ZkEnsemble(ensemble) => contend::connect(&ensemble.url()),
        };
        let operator = direct.expect("a URL of the testbed");
        if let Ok(semaphores) = operator.semaphores() {
            semaphores.create_tables().expect("the tables can be made");
            for (name, capacity) in SEMAPHORES {
                semaphores.create(name, capacity).expect("a new semaphore");
            }
        }
        Stage {
            ground,
            servers,
            proxies,
            operator: Some(operator),
        }
    }

    /// The URL through the proxies of a process, with the lease of a campaign.
    pub fn url(&self, process: usize) -> String {
        let lease = self.ground.lease();
        let lease = format!(
            "ttl={}ms&transition={}ms",
            lease.ttl().as_millis(),
            lease.transition().as_millis()
        );
        self.url_with(process, &lease)
    }

    /// The URL through the proxies of a process, with this lease where the backend takes one.
    pub fn url_with(&self, process: usize, lease: &str) -> String {
        let hosts: Vec<String> = self.proxies[process]
            .iter()
            .map(|proxy| proxy.addr().to_string())
            .collect();
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

    /// Does it, for as long as it takes, and undoes it. `aim` is the process that most likely owns.
    /// Returns what it hit; `None` if it surely had no effect.
    pub fn suffer(&self, fault: Fault, aim: Option<usize>, random: &mut StdRng) -> Option<Hit> {
        let lease = self.ground.lease();
        let ms = |random: &mut StdRng, from: u64, to: u64| {
            Duration::from_millis(random.random_range(from..to))
        };
        let total = u64::try_from(lease.total().as_millis()).unwrap_or(u64::MAX);
        match fault {
            Fault::Cut if matches!(self.ground, Ground::RedisCluster | Ground::RedisSentinel) => {
                self.on_redis(&["CLIENT", "KILL", "TYPE", "normal"]);
            }
            Fault::Cut => self.each_proxy(aim, random, Proxy::cut),
            Fault::Reset => self.each_proxy(aim, random, Proxy::reset),
            Fault::BlackHole(way) => {
                let chosen = self.choose(aim, random);
                self.black_hole(&chosen, way);
                thread::sleep(ms(random, 100, total * 3 / 2));
                self.pass(&chosen);
            }
            Fault::Delay => {
                let chosen = self.choose(aim, random);
                let each_way = ms(random, 5, 150);
                self.delay(&chosen, each_way);
                thread::sleep(ms(random, 300, total));
                self.pass(&chosen);
            }
            Fault::Fade => {
                // One: who is to take its place must not be hindered.
                let chosen = vec![aim.unwrap_or(0)];
                // Requests arrive at once: the lease runs there while its owner still waits for the reply.
                // Less than a sixth of the ttl, after which MySQL connections give up.
                self.delay_replies(&chosen, lease.ttl() / 8);
                thread::sleep(lease.ttl() / 2 + ms(random, 0, total / 2));
                self.black_hole(&chosen, Way::ToServer);
                thread::sleep(lease.total() + ms(random, 100, 500));
                self.pass(&chosen);
            }
            Fault::LoseReply => {
                let chosen = self.choose(aim, random);
                for _ in 0..random.random_range(1..20) {
                    for &process in &chosen {
                        match &self.servers {
                            Servers::Memory(weather) => weather[process].lose_next_reply(),
                            _ => self.proxies[process]
                                .iter()
                                .for_each(Proxy::lose_next_reply),
                        }
                    }
                    thread::sleep(ms(random, 10, 60));
                }
                self.pass(&chosen);
            }
            Fault::ServerKill => self.server(|server| {
                server.kill();
                thread::sleep(ms(random, 0, total));
                server.start();
            }),
            Fault::ServerPause => self.server(|server| {
                server.pause();
                thread::sleep(ms(random, 50, total * 3 / 2));
                server.resume();
            }),
            Fault::MemberKill => self.kill_member(random),
            Fault::MemberPause => {
                let most = match self.ground {
                    // Longer, and the others take its place: that is a failover.
                    Ground::RedisCluster => 1_200,
                    Ground::RedisSentinel => 600,
                    _ => total * 3 / 2,
                };
                let pause = ms(random, 50, most);
                self.member(random.random_range(0..100), |server| {
                    server.pause();
                    thread::sleep(pause);
                    server.resume();
                });
            }
            Fault::MemberCutOff => {
                if let Servers::ZkEnsemble(ensemble) = &self.servers {
                    let node = random.random_range(0..3);
                    ensemble.cut_off(node);
                    thread::sleep(ms(random, 500, 5_000));
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
                return Some(Hit::Mutex(mutex));
            }
            Fault::Revoke => {
                let mutex = [LED, LOCKED, SECOND][random.random_range(0..3)];
                return self.revoke(mutex).then_some(Hit::Mutex(mutex));
            }
            Fault::Wipe => self.on_redis(&["FLUSHALL"]),
        }
        Some(Hit::All)
    }

    /// What there is on the server: queue entries, tokens, rows, nodes, subscriptions, connections.
    pub fn leftovers(&self) -> Vec<(String, f64)> {
        let number = |text: &str| text.trim().parse::<f64>().unwrap_or(0.0);
        let named = |facts: &[(&str, f64)]| {
            let facts = facts.iter();
            facts
                .map(|(name, value)| ((*name).to_owned(), *value))
                .collect()
        };
        match &self.servers {
            Servers::Redis(server) => {
                let keys = server.cli(&["KEYS", "*"]);
                let queues = keys.lines().filter(|key| key.ends_with(":contender"));
                let queued = queues.map(|key| number(&server.cli(&["ZCARD", key]))).sum();
                let connections = server.cli(&["CLIENT", "LIST"]).lines().count();
                let channels = server.cli(&["PUBSUB", "CHANNELS"]).lines().count();
                named(&[
                    ("keys", keys.lines().count() as f64),
                    ("queue entries", queued),
                    ("channels", channels as f64),
                    ("connections", connections as f64),
                ])
            }
            Servers::MySql(server) => {
                let one = |sql: &str| number(&server.sql(sql));
                named(&[
                    ("rows", one("SELECT COUNT(*) FROM campaign.simba_mutex")),
                    (
                        "bytes in rows",
                        one("SELECT COALESCE(SUM(LENGTH(owner_id)), 0) FROM campaign.simba_mutex"),
                    ),
                    (
                        "connections",
                        one(
                            "SELECT COUNT(*) FROM information_schema.processlist WHERE db = 'campaign'",
                        ),
                    ),
                    (
                        "waiting connections",
                        one("SELECT COUNT(*) FROM information_schema.processlist \
                             WHERE db = 'campaign' AND state = 'User lock'"),
                    ),
                ])
            }
            Servers::Zk(server) => {
                let facts = server.four_letter("mntr").unwrap_or_default();
                let fact = |name: &str| {
                    let line = facts.lines().find(|line| line.starts_with(name));
                    line.and_then(|line| line.split_whitespace().nth(1))
                        .map_or(0.0, number)
                };
                named(&[
                    ("nodes", fact("zk_znode_count")),
                    ("ephemeral nodes", fact("zk_ephemerals_count")),
                    ("watches", fact("zk_watch_count")),
                    ("connections", fact("zk_num_alive_connections")),
                ])
            }
            _ => vec![],
        }
    }

    /// Takes all permits of all semaphores, when nobody holds any: what was leaked comes back by its ttl and
    /// a quarter of it. Returns what is wrong.
    pub fn permits_are_back(&self) -> Result<(), String> {
        let Some(Ok(semaphores)) = self.operator.as_ref().map(Factory::semaphores) else {
            return Ok(());
        };
        let all = SEMAPHORES
            .iter()
            .fold(PermitRequest::generated(), |request, (name, capacity)| {
                request.permits(*name, *capacity)
            })
            .ttl(Duration::from_secs(10));
        let within = PERMIT_TTL + PERMIT_TTL / 4 + Duration::from_secs(4);
        match semaphores.guard(&all, within) {
            Ok(_) => Ok(()),
            Err(error) => Err(format!("permits leaked: {error}")),
        }
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

    fn each_proxy(&self, aim: Option<usize>, random: &mut StdRng, act: impl Fn(&Proxy)) {
        for process in self.choose(aim, random) {
            self.proxies[process].iter().for_each(&act);
        }
    }

    fn black_hole(&self, processes: &[usize], way: Way) {
        let direction = match way {
            Way::ToServer => Direction::ToServer,
            Way::ToClient => Direction::ToClient,
            Way::Both => Direction::Both,
        };
        for &process in processes {
            if let Servers::Memory(weather) = &self.servers {
                weather[process].unreachable();
            }
            for proxy in &self.proxies[process] {
                proxy.black_hole(direction);
            }
        }
    }

    fn delay(&self, processes: &[usize], each_way: Duration) {
        for &process in processes {
            if let Servers::Memory(weather) = &self.servers {
                weather[process].delay(each_way);
            }
            for proxy in &self.proxies[process] {
                proxy.delay(each_way);
            }
        }
    }

    fn delay_replies(&self, processes: &[usize], delay: Duration) {
        for &process in processes {
            if let Servers::Memory(weather) = &self.servers {
                weather[process].delay_replies(delay);
            }
            for proxy in &self.proxies[process] {
                proxy.delay_replies(delay);
            }
        }
    }

    fn pass(&self, processes: &[usize]) {
        for &process in processes {
            if let Servers::Memory(weather) = &self.servers {
                weather[process].pass();
            }
            self.proxies[process].iter().for_each(Proxy::pass);
        }
    }

    /// The one server.
    fn server(&self, act: impl FnOnce(&testbed::Server)) {
        match &self.servers {
            Servers::Redis(server) => act(server),
            Servers::MySql(server) => act(server),
            Servers::Zk(server) => act(server),
            _ => {}
        }
    }

    /// One of several, by a number that may be too large.
    fn member(&self, number: usize, act: impl FnOnce(&testbed::Server)) {
        match &self.servers {
            Servers::RedisCluster(cluster) => {
                // Masters are of interest: the one that has the keys.
                let masters = cluster.masters();
                act(cluster.node(masters[number % masters.len()]));
            }
            Servers::RedisSentinel(redis) => act(redis.server(redis.master())),
            Servers::ZkEnsemble(ensemble) => act(ensemble.node(number % 3)),
            _ => {}
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
        let logs = match &self.servers {
            Servers::RedisCluster(cluster) => vec![("node", cluster.nodes())],
            Servers::RedisSentinel(redis) => {
                vec![("server", redis.servers()), ("sentinel", redis.sentinels())]
            }
            _ => vec![],
        };
        for (kind, servers) in logs {
            for server in servers {
                // Not `.log`: those are the journals.
                let file = folder.join(format!("{kind}-{}.txt", server.port()));
                // What is missing is missed by a reader only.
                let _ = std::fs::write(file, server.log());
            }
        }
    }

    fn kill_member(&self, random: &mut StdRng) {
        let number = random.random_range(0..100);
        let down = Duration::from_millis(random.random_range(0..4_000));
        match &self.servers {
            Servers::RedisCluster(cluster) => {
                cluster.wait_whole();
                let key = format!("simba:{{{}}}", [LED, LOCKED][number % 2]);
                let master = cluster.master_of(&key, 0);
                cluster.kill(master);
                cluster.wait_ok();
                thread::sleep(down);
                cluster.node(master).start();
                cluster.wait_whole();
            }
            Servers::RedisSentinel(redis) => {
                settle(redis, random);
                let master = redis.master();
                redis.server(master).kill();
                redis.wait_until("there is another master", || redis.master() != master);
                thread::sleep(down);
                redis.server(master).start();
                settle(redis, random);
            }
            Servers::ZkEnsemble(ensemble) => {
                let node = ensemble.node(number % 3);
                node.kill();
                thread::sleep(down);
                node.start();
                ensemble.wait_whole();
            }
            _ => {}
        }
    }

    /// Runs a command on every Redis that runs.
    fn on_redis(&self, command: &[&str]) {
        match &self.servers {
            Servers::Redis(server) => {
                server.cli(command);
            }
            Servers::RedisCluster(cluster) => {
                for index in 0..cluster.nodes().len() {
                    cluster.node(index).cli(command);
                }
            }
            Servers::RedisSentinel(redis) => {
                for server in redis.servers() {
                    server.cli(command);
                }
            }
            _ => {}
        }
    }

    fn kill_connections(&self, random: &mut StdRng) {
        let Servers::MySql(server) = &self.servers else {
            return;
        };
        let ids = server.sql(
            "SELECT id FROM information_schema.processlist WHERE id <> CONNECTION_ID() AND db = 'campaign'",
        );
        let kills: Vec<String> = ids
            .lines()
            .filter(|_| random.random_range(0..3) == 0)
            .map(|id| format!("KILL {id};"))
            .collect();
        // One that is gone by now is no reason to stop.
        server.sql(&format!(
            "DELIMITER //\nBEGIN NOT ATOMIC DECLARE CONTINUE HANDLER FOR SQLEXCEPTION BEGIN END; {} END//",
            kills.join(" ")
        ));
    }

    fn delete(&self, mutex: &str) {
        match &self.servers {
            Servers::Redis(server) => {
                server.cli(&["DEL", &format!("simba:{{{mutex}}}")]);
            }
            Servers::RedisCluster(cluster) => {
                cluster
                    .node(0)
                    .cli(&["-c", "DEL", &format!("simba:{{{mutex}}}")]);
            }
            Servers::RedisSentinel(redis) => {
                let master = redis.server(redis.master());
                master.cli(&["DEL", &format!("simba:{{{mutex}}}")]);
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
        let Some(factory) = &self.operator else {
            return false;
        };
        let Ok(owner) = factory.owner(mutex) else {
            return false;
        };
        // An error leaves it open whether it took effect.
        owner.has_owner() && factory.revoke(mutex, owner.fence()).unwrap_or(true)
    }

    /// Moves the slot of a mutex to another master, with a pause in the middle.
    fn reshard(&self, random: &mut StdRng) {
        let Servers::RedisCluster(cluster) = &self.servers else {
            return;
        };
        cluster.wait_whole();
        let key = format!("simba:{{{}}}", [LED, LOCKED][random.random_range(0..2)]);
        let slot = cluster.node(0).cli(&["CLUSTER", "KEYSLOT", &key]);
        let from = cluster.master_of(&key, 0);
        let masters = cluster.masters();
        let others: Vec<usize> = masters.into_iter().filter(|node| *node != from).collect();
        let to = others[random.random_range(0..others.len())];
        let id = |node: usize| cluster.node(node).cli(&["CLUSTER", "MYID"]);
        let (from_id, to_id) = (id(from), id(to));
        let on = |node: usize, args: &[&str]| cluster.node(node).cli(args);
        on(to, &["CLUSTER", "SETSLOT", &slot, "IMPORTING", &from_id]);
        on(from, &["CLUSTER", "SETSLOT", &slot, "MIGRATING", &to_id]);
        thread::sleep(Duration::from_millis(random.random_range(50..800)));
        let port = cluster.node(to).port().to_string();
        for _ in 0..20 {
            let keys = on(from, &["CLUSTER", "GETKEYSINSLOT", &slot, "100"]);
            let keys: Vec<&str> = keys.lines().filter(|key| !key.is_empty()).collect();
            if keys.is_empty() {
                break;
            }
            let mut migrate = vec!["MIGRATE", "127.0.0.1", &port, "", "0", "2000", "KEYS"];
            migrate.extend(&keys);
            on(from, &migrate);
            thread::sleep(Duration::from_millis(random.random_range(0..100)));
        }
        for node in [to, from] {
            on(node, &["CLUSTER", "SETSLOT", &slot, "NODE", &to_id]);
        }
        for index in 0..cluster.nodes().len() {
            // A replica refuses, and learns it from its master.
            on(index, &["CLUSTER", "SETSLOT", &slot, "NODE", &to_id]);
        }
    }
}

/// Waits until all servers have their places. Mostly it makes a replica of a master that was replaced: Sentinel does so
/// after 8 s and more, in which two masters grant. If the nemesis always waited for that, most of a campaign would be
/// left to the fence and prove nothing else.
fn settle(redis: &RedisSentinel, random: &mut StdRng) {
    let both = Duration::from_millis(random.random_range(0..2_000));
    let waits = random.random_range(0..4) == 0;
    let says_master = |server: usize| {
        let role = redis.server(server).role(Duration::from_secs(1));
        role.as_deref() == Some("master")
    };
    let masters = || (0..redis.servers().len()).filter(|server| says_master(*server));
    if !waits && masters().count() > 1 {
        thread::sleep(both);
        // While sentinels do not agree, one of them may be about to promote whom this would demote.
        if let Some(master) = redis.agreed_master().filter(|master| says_master(*master)) {
            let port = redis.server(master).port().to_string();
            for old in masters().filter(|server| *server != master) {
                redis.server(old).cli(&["REPLICAOF", "127.0.0.1", &port]);
            }
        }
    }
    redis.wait_whole();
}

/// The library that shows a process another wall clock, and the real monotonic one.
pub fn libfaketime() -> PathBuf {
    let mut found = std::fs::read_dir("/usr/lib")
        .expect("/usr/lib is readable")
        .flatten()
        .map(|entry| entry.path().join("faketime/libfaketimeMT.so.1"));
    found.find(|path| path.exists()).expect(
        "libfaketime is missing: install the Debian package libfaketime, or run ./tests/run",
    )
}
