//! What a campaign runs on, and what can be done to it.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use contend::Lease;

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

    /// A lease that is short enough for many losses in a minute, and whose transition is shorter than what one call
    /// may take: a belief that counts from the wrong moment outlasts it.
    pub fn lease(self) -> Lease {
        let (ttl, transition) = match self {
            // The session timeout is 2 s, of which a sixth is the transition.
            Ground::Zk | Ground::ZkEnsemble => (1_667, 333),
            _ => (1_200, 50),
        };
        let ms = Duration::from_millis;
        Lease::new(ms(ttl), ms(transition)).expect("a lease")
    }

    /// The faults that make sense here, and how often each.
    pub fn faults(self) -> Vec<(Fault, u32)> {
        use Fault::*;
        const NETWORK: &[(Fault, u32)] = &[
            (Cut, 3),
            (Reset, 2),
            (HoleToServer, 3),
            (HoleToClient, 3),
            (HoleBothWays, 2),
            (Delay, 3),
            (Fade, 3),
            (LoseReply, 4),
        ];
        // Clients go to the members themselves, so no proxy stands between.
        const MEMBERS: &[(Fault, u32)] = &[(Cut, 3), (KillSubscribers, 3), (FlushScripts, 2)];
        let (network, own): (&[_], &[_]) = match self {
            Ground::Memory => (
                &[(HoleToServer, 3), (Delay, 3), (Fade, 3), (LoseReply, 4)],
                &[(Revoke, 3)],
            ),
            Ground::Redis => (
                NETWORK,
                &[
                    (Kill, 2),
                    (Pause, 2),
                    (FlushScripts, 2),
                    (KillSubscribers, 2),
                    (OperatorDelete, 2),
                    (Wipe, 1),
                    (Revoke, 2),
                ],
            ),
            Ground::RedisCluster => (
                MEMBERS,
                &[
                    (Pause, 3),
                    (Kill, 2),
                    (Reshard, 3),
                    (OperatorDelete, 1),
                    (Revoke, 1),
                ],
            ),
            Ground::RedisSentinel => (
                MEMBERS,
                &[
                    (Pause, 3),
                    (Kill, 2),
                    (FailOver, 2),
                    (OperatorDelete, 1),
                    (Revoke, 1),
                ],
            ),
            Ground::MySql | Ground::MySqlPolling => (
                NETWORK,
                &[
                    (Kill, 1),
                    (Pause, 2),
                    (KillConnections, 2),
                    (OperatorDelete, 2),
                    (Revoke, 2),
                ],
            ),
            // There, to revoke is to delete the node, as an operator would.
            Ground::Zk => (NETWORK, &[(Kill, 1), (Pause, 2), (Revoke, 2)]),
            Ground::ZkEnsemble => (
                NETWORK,
                &[(Kill, 2), (Pause, 3), (MemberCutOff, 3), (Revoke, 2)],
            ),
        };
        [network, own].concat()
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
    /// Connections stay open, and nothing passes that way.
    HoleToServer,
    HoleToClient,
    HoleBothWays,
    /// Everything takes longer.
    Delay,
    /// Everything takes longer, and then nothing passes.
    Fade,
    /// The reply to a request is lost.
    LoseReply,
    /// A server is killed and started again on its data.
    Kill,
    /// A server stands still.
    Pause,
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

impl Fault {
    /// Whether only a checked fence protects against it. So it does against a change of masters, which
    /// [`Watch`](crate::masters::Watch) writes down: a kill or a pause may bring one about, or not.
    pub fn is_fence_only(self) -> bool {
        matches!(self, Fault::OperatorDelete | Fault::Revoke | Fault::Wipe)
    }

    /// Its name in the records.
    pub fn name(self) -> String {
        format!("{self:?}")
    }
}
