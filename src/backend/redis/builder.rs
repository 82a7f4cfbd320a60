//! How a factory on Redis is set up, by hand or by URL.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use super::cluster::Cluster;
use super::connection::{Address, Connector, Login, Target};
use super::script::{Scripts, ms};
use super::sentinel::Sentinels;
use super::server::{Deployment, Server, ServerSettings};
use super::{Common, Redis};
use crate::backend::CLAIM_TIME;
use crate::error::{Error, Result};
use crate::factory::Factory;
use crate::lease::Lease;
use crate::pool;
use crate::probe::Probed;
use crate::tls::{Tls, tls_setters};
use crate::url::{Url, address};

const PORT: u16 = 6379;
const SENTINEL_PORT: u16 = 26379;

const PARAMETERS: &[&str] = &[
    "ttl",
    "transition",
    "initial_delay",
    "prefix",
    "pool_size",
    "connect_timeout",
    "tls",
    "tls_ca",
    "tls_cert",
    "tls_key",
    "socket",
    "sentinel_user",
    "sentinel_password",
    "simba",
    "replicas",
];

/// Builds a factory on Redis. Its `Debug` output shows no password.
#[derive(Clone, Debug)]
#[must_use]
pub struct Builder {
    /// Read at once, complained about by `build`.
    at: Result<At>,
    tls: Tls,
    login: Login,
    sentinel_login: Login,
    database: u32,
    prefix: String,
    ttl: Duration,
    transition: Duration,
    initial_delay: Duration,
    pool_size: u32,
    connect_timeout: Duration,
    simba: bool,
    replicas: u32,
}

/// Where the server, or the servers, are.
#[derive(Clone, Debug)]
enum At {
    One(Address),
    Cluster(Vec<Address>),
    Sentinel(Vec<Address>, String),
}

impl Builder {
    /// Creates a builder for one server, given as `host` or `host:port`. The default port is 6379.
    pub fn new(host: impl AsRef<str>) -> Builder {
        let at = address(host.as_ref(), PORT);
        Builder::at(at.map(|(host, port)| At::One(Address::Tcp(host, port))))
    }

    /// Creates a builder for a server on this machine, given by the path of its unix socket.
    pub fn socket(path: impl AsRef<Path>) -> Builder {
        Builder::at(Ok(At::One(Address::Unix(path.as_ref().to_owned()))))
    }

    /// Creates a builder for a cluster. Other nodes are discovered through those given here.
    pub fn cluster<H: AsRef<str>>(hosts: impl IntoIterator<Item = H>) -> Builder {
        Builder::at(addresses(hosts, PORT).map(At::Cluster))
    }

    /// Creates a builder for the master that the sentinels at `hosts` call `name`. Their default port is
    /// 26379.
    ///
    /// Replication is asynchronous: a failover can lose an acquisition that was acknowledged, so that two
    /// contenders own for the rest of a lease and only a checked fence keeps them apart.
    pub fn sentinel<H: AsRef<str>>(
        hosts: impl IntoIterator<Item = H>,
        name: impl Into<String>,
    ) -> Builder {
        let name = name.into();
        Builder::at(addresses(hosts, SENTINEL_PORT).map(|hosts| At::Sentinel(hosts, name)))
    }

    fn at(at: Result<At>) -> Builder {
        Builder {
            at,
            tls: Tls::default(),
            login: Login::default(),
            sentinel_login: Login::default(),
            database: 0,
            prefix: "simba".to_owned(),
            ttl: Lease::default().ttl(),
            transition: Lease::default().transition(),
            initial_delay: Duration::ZERO,
            pool_size: 8,
            connect_timeout: Duration::from_secs(2),
            simba: false,
            replicas: 0,
        }
    }

    tls_setters!(tls);

    /// Sets the ACL user. Defaults to the server's `default` user.
    pub fn user(mut self, user: impl Into<String>) -> Builder {
        self.login.set_user(user.into());
        self
    }

    /// Sets the password. Defaults to none.
    pub fn password(mut self, password: impl Into<String>) -> Builder {
        self.login.set_password(password.into());
        self
    }

    /// Sets a function that returns user (empty for the default one) and password, for passwords that
    /// rotate. It is called by the factory's threads whenever a connection is opened; if it panics, that
    /// connection is not opened, and the next one calls it again. Defaults to the fixed user and password.
    pub fn credentials(
        mut self,
        ask: impl Fn() -> (String, String) + Send + Sync + 'static,
    ) -> Builder {
        self.login = Login::Asked(Arc::new(ask));
        self
    }

    /// Sets the user to log in to sentinels as. Defaults to none.
    pub fn sentinel_user(mut self, user: impl Into<String>) -> Builder {
        self.sentinel_login.set_user(user.into());
        self
    }

    /// Sets the password to log in to sentinels with. Defaults to none.
    pub fn sentinel_password(mut self, password: impl Into<String>) -> Builder {
        self.sentinel_login.set_password(password.into());
        self
    }

    /// Sets the number of the database; a cluster has only database 0. Defaults to 0.
    pub fn database(mut self, database: u32) -> Builder {
        self.database = database;
        self
    }

    /// Sets the prefix of all keys and channels. Defaults to `simba`, as in Simba.
    pub fn prefix(mut self, prefix: impl Into<String>) -> Builder {
        self.prefix = prefix.into();
        self
    }

    /// Sets how long an owner may believe that it owns without a renewal. Defaults to 10 s.
    pub fn ttl(mut self, ttl: Duration) -> Builder {
        self.ttl = ttl;
        self
    }

    /// Sets how long after the ttl no other contender can own: the time to wind down work. Defaults to 6 s.
    pub fn transition(mut self, transition: Duration) -> Builder {
        self.transition = transition;
        self
    }

    /// Sets the delay before a service's first attempt. Defaults to zero.
    pub fn initial_delay(mut self, initial_delay: Duration) -> Builder {
        self.initial_delay = initial_delay;
        self
    }

    /// Sets the maximum number of connections for commands, for each master of a cluster; a quarter of
    /// them, at least one, is reserved for owners. One more is for messages. Defaults to 8.
    pub fn pool_size(mut self, size: u32) -> Builder {
        self.pool_size = size;
        self
    }

    /// Sets how long opening a connection may take. It happens in the background: no call waits longer
    /// than its lease allows. Defaults to 2 s.
    pub fn connect_timeout(mut self, timeout: Duration) -> Builder {
        self.connect_timeout = timeout;
        self
    }

    /// Sets whether Simba contenders of version 3.2 or later share the mutexes. If so, the last fence never
    /// expires, because Simba 4 would count from 1 again. And every 8th release is left to contenders that do
    /// not queue: they would get nothing while those of this library wait. Mutual exclusion holds without it.
    /// Defaults to `false`.
    pub fn simba(mut self, simba: bool) -> Builder {
        self.simba = simba;
        self
    }

    /// Sets how many replicas must have a grant before it counts. After each grant the server is asked with `WAIT`, in
    /// the time of the same request; with fewer acknowledgements the grant is released, counts as a refusal, and a
    /// warning is logged. This narrows the window in which a failover loses a grant; it does not close it, as another
    /// replica may be promoted. Defaults to 0, which asks nothing.
    pub fn replicas(mut self, replicas: u32) -> Builder {
        self.replicas = replicas;
        self
    }

    /// Builds the factory. Validates all settings and returns without blocking. Connects in the background,
    /// so the server need not be reachable yet.
    ///
    /// # Errors
    /// `InvalidInput` for an address or setting that cannot work or a certificate that cannot be read,
    /// `FeatureDisabled` for TLS without the Cargo feature `tls`.
    pub fn build(self) -> Result<Factory> {
        let lease = Lease::new(self.ttl, self.transition)?;
        let at = self.checked()?;
        let tls = self.tls.certificates()?;
        let realm = self.realm(&at);
        let settings = ServerSettings {
            connector: Arc::new(Connector {
                login: self.login.clone(),
                database: self.database,
                tls: tls.clone(),
                timeout: self.connect_timeout,
            }),
            pool_size: self.pool_size,
            prefix: self.prefix.clone(),
            probe: Probed::default(),
        };
        let one = |target| -> Result<Deployment> {
            let server = Server::new(&settings, target, &Arc::default())?;
            Ok(Deployment::One(Arc::new(server)))
        };
        let deployment = match at {
            At::One(address) => one(Target::At(address))?,
            At::Sentinel(addresses, name) => one(Target::Master(Sentinels {
                name,
                addresses,
                connector: Connector {
                    login: self.sentinel_login.clone(),
                    database: 0,
                    tls,
                    timeout: self.connect_timeout,
                },
                first: AtomicUsize::new(0),
            }))?,
            At::Cluster(seeds) => {
                Deployment::Cluster(Box::new(Cluster::new(settings.clone(), seeds)?))
            }
        };
        let common = Arc::new(Common {
            realm,
            deployment,
            settings,
            scripts: Scripts::new(),
            lease,
            claim: ms(CLAIM_TIME).to_string(),
            simba: self.simba,
            replicas: self.replicas,
        });
        let factory = Factory::new(Arc::new(Redis { common }), lease);
        Ok(factory.with_initial_delay(self.initial_delay))
    }

    fn checked(&self) -> Result<At> {
        let wrong = |message: &str| Err(Error::invalid(message));
        let mut at = self.at.clone()?;
        if let At::Cluster(hosts) | At::Sentinel(hosts, _) = &mut at {
            hosts.sort();
            hosts.dedup();
            if hosts.is_empty() {
                return wrong("a redis URL names a host: redis+cluster://host:6379");
            }
        }
        match &at {
            At::Cluster(_) if self.database != 0 => {
                return wrong("a redis cluster has only database 0");
            }
            At::Sentinel(_, name) if name.is_empty() => {
                return wrong(
                    "a redis+sentinel URL names the master: redis+sentinel://host:26379/mymaster",
                );
            }
            At::One(Address::Unix(_)) if self.tls.on => {
                return wrong("a unix socket is not encrypted: leave tls out");
            }
            _ => {}
        }
        if self.prefix.is_empty()
            || self.prefix.contains(['{', '}', '!'])
            || self.prefix.contains(char::is_control)
        {
            return wrong(
                "a redis prefix is not empty and contains no brace, no ! and no control character",
            );
        }
        pool::check_size(self.pool_size)?;
        if self.connect_timeout.is_zero() {
            return wrong("the connect timeout may not be zero");
        }
        Ok(at)
    }

    fn realm(&self, at: &At) -> String {
        let join = |hosts: &[Address]| {
            let hosts: Vec<_> = hosts.iter().map(Address::to_string).collect();
            hosts.join(",")
        };
        let place = match at {
            At::One(address @ Address::Unix(_)) => format!("redis+unix://{address}"),
            At::One(address) if self.tls.on => format!("rediss://{address}"),
            At::One(address) => format!("redis://{address}"),
            At::Cluster(hosts) => format!("redis+cluster://{}", join(hosts)),
            At::Sentinel(hosts, name) => format!("redis+sentinel://{}/{name}", join(hosts)),
        };
        format!("{place}/{}?prefix={}", self.database, self.prefix)
    }
}

fn addresses<H: AsRef<str>>(hosts: impl IntoIterator<Item = H>, port: u16) -> Result<Vec<Address>> {
    hosts
        .into_iter()
        .map(|host| address(host.as_ref(), port).map(|(host, port)| Address::Tcp(host, port)))
        .collect()
}

/// `redis://`, `rediss://`, `redis+cluster://` and `redis+sentinel://`.
pub(crate) fn connect(url: &Url) -> Result<Factory> {
    url.expect_parameters(PARAMETERS)?;
    let sentinel = url.scheme == "redis+sentinel";
    let hosts = || addresses(&url.hosts, if sentinel { SENTINEL_PORT } else { PORT });
    let (mut path, mut builder) = (
        url.path.as_str(),
        match url.text("socket") {
            Some(_) if sentinel || url.scheme == "redis+cluster" => {
                return Err(Error::invalid(
                    "socket: a unix socket is one server's; write redis://",
                ));
            }
            Some(socket) => Builder::socket(socket),
            None if url.scheme == "redis+cluster" => Builder::at(hosts().map(At::Cluster)),
            None if sentinel => {
                Builder::at(hosts().map(|hosts| At::Sentinel(hosts, String::new())))
            }
            None => match url.hosts.as_slice() {
                [host] => Builder::new(host),
                [] => {
                    return Err(Error::invalid(
                        "a redis URL names a host: redis://host:6379",
                    ));
                }
                _ => {
                    return Err(Error::invalid(
                        "a redis:// URL names one server; for a cluster write redis+cluster://host1,host2",
                    ));
                }
            },
        },
    );
    if let Ok(At::Sentinel(_, name)) = &mut builder.at {
        let (master, database) = path.split_once('/').unwrap_or((path, ""));
        master.clone_into(name);
        path = database;
    }
    url.set("ttl", &mut builder.ttl)?;
    url.set("transition", &mut builder.transition)?;
    builder.tls = Tls::from_url(url)?;
    builder.tls.on |= url.scheme == "rediss";
    if url.user.is_some() && url.password.is_none() {
        // Rather a password without its colon, which must not be shown as a user.
        return Err(Error::invalid(
            "a redis URL with a user and no password: write redis://user:password@host, or redis://:password@host",
        ));
    }
    let text = |key| url.text(key).map(str::to_owned);
    builder.login = Login::fixed(url.user.clone(), url.password.clone());
    builder.sentinel_login = Login::fixed(text("sentinel_user"), text("sentinel_password"));
    url.set("simba", &mut builder.simba)?;
    url.set("replicas", &mut builder.replicas)?;
    url.set("initial_delay", &mut builder.initial_delay)?;
    url.set("prefix", &mut builder.prefix)?;
    url.set("pool_size", &mut builder.pool_size)?;
    url.set("connect_timeout", &mut builder.connect_timeout)?;
    if !path.is_empty() {
        builder.database = path.parse().map_err(|_| {
            Error::invalid(format!(
                "the path of a redis URL is the number of a database, not {path:?}"
            ))
        })?;
    }
    builder.build()
}
