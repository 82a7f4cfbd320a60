//! How a factory on Redis is set up, by hand or by URL.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use ::redis::RedisConnectionInfo;

use super::cluster::Cluster;
use super::link::{Address, Connector};
use super::node::Node;
use super::script::Scripts;
use super::{Core, Redis, Servers};
use crate::error::{Error, Result};
use crate::factory::Factory;
use crate::lease::Lease;
use crate::url::{Url, address};

const PORT: u16 = 6379;

const PARAMETERS: &[&str] = &[
    "ttl",
    "transition",
    "prefix",
    "pool",
    "claim",
    "connect_timeout",
    "tls",
];

/// Sets up a factory on Redis. Its `Debug` output shows no password.
#[derive(Clone)]
#[must_use]
pub struct Builder {
    /// Read at once, complained about by `build`.
    addresses: Result<Vec<(String, u16)>>,
    cluster: bool,
    tls: bool,
    user: Option<String>,
    password: Option<String>,
    database: u32,
    prefix: String,
    lease: Lease,
    pool: usize,
    claim: Duration,
    connect_timeout: Duration,
}

impl Builder {
    /// One server, as `host` or `host:port`. The default port is 6379.
    pub fn new(host: impl AsRef<str>) -> Builder {
        Builder::at(address(host.as_ref(), PORT).map(|address| vec![address]))
    }

    /// A cluster; the other nodes are found through those named here.
    pub fn cluster<H: AsRef<str>>(hosts: impl IntoIterator<Item = H>) -> Builder {
        let addresses = hosts
            .into_iter()
            .map(|host| address(host.as_ref(), PORT))
            .collect();
        Builder {
            cluster: true,
            ..Builder::at(addresses)
        }
    }

    fn at(addresses: Result<Vec<(String, u16)>>) -> Builder {
        Builder {
            addresses,
            cluster: false,
            tls: false,
            user: None,
            password: None,
            database: 0,
            prefix: "simba".to_owned(),
            lease: Lease::default(),
            pool: 8,
            claim: Duration::from_secs(1),
            connect_timeout: Duration::from_secs(2),
        }
    }

    /// Encrypts the connections; needs the Cargo feature `tls`. Default: off.
    pub fn tls(mut self, tls: bool) -> Builder {
        self.tls = tls;
        self
    }

    /// The ACL user. Default: the server's `default` user.
    pub fn user(mut self, user: impl Into<String>) -> Builder {
        self.user = Some(user.into());
        self
    }

    /// The password. Default: none.
    pub fn password(mut self, password: impl Into<String>) -> Builder {
        self.password = Some(password.into());
        self
    }

    /// The number of the database; a cluster has only 0. Default: 0.
    pub fn database(mut self, database: u32) -> Builder {
        self.database = database;
        self
    }

    /// What every key and channel begins with. Default: `simba`, as Simba has it.
    pub fn prefix(mut self, prefix: impl Into<String>) -> Builder {
        self.prefix = prefix.into();
        self
    }

    /// The lease that services and lockers ask for. Default: ttl 10 s, transition 6 s.
    pub fn lease(mut self, lease: Lease) -> Builder {
        self.lease = lease;
        self
    }

    /// The most connections for commands, for each master of a cluster; a quarter of them is left to
    /// owners. One more is for messages. Default: 8.
    pub fn pool(mut self, connections: usize) -> Builder {
        self.pool = connections;
        self
    }

    /// How long a freed mutex is kept for the contender whose turn it is. One that was told and died
    /// costs the next one this time; one that is slower than this loses its turn. Default: 1 s.
    pub fn claim(mut self, claim: Duration) -> Builder {
        self.claim = claim;
        self
    }

    /// How long opening a connection may take. It happens in the background: no call waits longer
    /// than its lease allows. Dropping the factory waits for what is just being opened: up to this
    /// long, and for the system's resolver, which has a timeout of its own. Default: 2 s.
    pub fn connect_timeout(mut self, timeout: Duration) -> Builder {
        self.connect_timeout = timeout;
        self
    }

    /// Starts the factory. It connects in the background, so this works while the server is away.
    ///
    /// # Errors
    /// `InvalidInput` for an address or setting that cannot work, `FeatureDisabled` for TLS without
    /// the Cargo feature `tls`.
    pub fn build(self) -> Result<Factory> {
        self.check()?;
        let mut addresses: Vec<Address> = self
            .addresses
            .clone()?
            .into_iter()
            .map(|(host, port)| Address { host, port })
            .collect();
        if addresses.is_empty() {
            return Err(Error::invalid(
                "a redis URL names a host: redis://host:6379",
            ));
        }
        addresses.sort();
        addresses.dedup();
        let connector = Arc::new(Connector {
            settings: self.settings(),
            tls: self.tls,
            timeout: self.connect_timeout,
        });
        let realm = self.realm(&addresses);
        let servers = match addresses.first() {
            Some(address) if !self.cluster => {
                let nobody = Box::new(|| {});
                let node = Node::new(&connector, address, self.pool, &self.prefix, nobody)?;
                Servers::One(Arc::new(node))
            }
            _ => Servers::Cluster(Cluster::new(
                &connector,
                addresses,
                self.pool,
                &self.prefix,
            )?),
        };
        let core = Arc::new(Core {
            realm,
            servers,
            scripts: Scripts::new(),
            prefix: self.prefix,
            claim: self.claim,
            lease: self.lease,
        });
        Ok(Factory::new(Arc::new(Redis { core }), self.lease))
    }

    fn check(&self) -> Result<()> {
        let wrong = |message: &str| Err(Error::invalid(message));
        if self.cluster && self.database != 0 {
            return wrong("a redis cluster has only database 0");
        }
        if self.prefix.is_empty()
            || self.prefix.contains(['{', '}', '!'])
            || self.prefix.contains(char::is_control)
        {
            return wrong(
                "a redis prefix is not empty and contains no brace, no ! and no control character",
            );
        }
        if self.pool == 0 {
            return wrong("a redis pool needs at least one connection");
        }
        let whole = |duration: Duration| {
            !duration.is_zero() && duration.subsec_nanos().is_multiple_of(1_000_000)
        };
        if !whole(self.claim) || self.claim > Duration::from_secs(60) {
            return wrong("the claim time is at most 60 s, in whole milliseconds, and not zero");
        }
        if self.connect_timeout.is_zero() {
            return wrong("the connect timeout may not be zero");
        }
        self.check_tls()
    }

    #[cfg(feature = "tls")]
    fn check_tls(&self) -> Result<()> {
        if self.tls {
            // An error means that the program has chosen a provider already.
            let _ = rustls::crypto::ring::default_provider().install_default();
        }
        Ok(())
    }

    #[cfg(not(feature = "tls"))]
    fn check_tls(&self) -> Result<()> {
        if self.tls {
            return Err(Error::new(
                crate::error::ErrorKind::FeatureDisabled,
                "TLS to redis needs the Cargo feature \"tls\"",
            ));
        }
        Ok(())
    }

    fn settings(&self) -> RedisConnectionInfo {
        // Without a name for the connection: it would take a further right.
        let mut settings = RedisConnectionInfo::default()
            .set_skip_set_lib_name()
            .set_db(i64::from(self.database));
        if let Some(user) = &self.user {
            settings = settings.set_username(user);
        }
        if let Some(password) = &self.password {
            settings = settings.set_password(password);
        }
        settings
    }

    fn realm(&self, addresses: &[Address]) -> String {
        let scheme = match (self.cluster, self.tls) {
            (true, _) => "redis+cluster",
            (false, true) => "rediss",
            (false, false) => "redis",
        };
        let hosts: Vec<_> = addresses.iter().map(Address::to_string).collect();
        format!(
            "{scheme}://{}/{}?prefix={}",
            hosts.join(","),
            self.database,
            self.prefix
        )
    }
}

impl fmt::Debug for Builder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder")
            .field("addresses", &self.addresses)
            .field("cluster", &self.cluster)
            .field("tls", &self.tls)
            .field("database", &self.database)
            .field("prefix", &self.prefix)
            .field("lease", &self.lease)
            .field("pool", &self.pool)
            .field("claim", &self.claim)
            .field("connect_timeout", &self.connect_timeout)
            .finish_non_exhaustive()
    }
}

/// `redis://`, `rediss://` and `redis+cluster://`.
pub(crate) fn connect(url: &Url) -> Result<Factory> {
    url.expect_parameters(PARAMETERS)?;
    let cluster = url.scheme == "redis+cluster";
    if !cluster && url.hosts.len() > 1 {
        return Err(Error::invalid(
            "a redis:// URL names one server; for a cluster write redis+cluster://host1,host2",
        ));
    }
    let mut builder = Builder::at(url.addresses(PORT)).lease(url.lease()?);
    builder.cluster = cluster;
    builder.tls = url.scheme == "rediss" || url.value("tls")?.unwrap_or(false);
    builder.user.clone_from(&url.user);
    builder.password.clone_from(&url.password);
    if !url.path.is_empty() {
        builder.database = url.path.parse().map_err(|_| {
            Error::invalid(format!(
                "the path of a redis URL is the number of a database, not {:?}",
                url.path
            ))
        })?;
    }
    if let Some(prefix) = url.text("prefix") {
        builder = builder.prefix(prefix);
    }
    if let Some(pool) = url.value("pool")? {
        builder = builder.pool(pool);
    }
    if let Some(claim) = url.duration("claim")? {
        builder = builder.claim(claim);
    }
    if let Some(timeout) = url.duration("connect_timeout")? {
        builder = builder.connect_timeout(timeout);
    }
    builder.build()
}
