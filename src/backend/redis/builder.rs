//! How a factory on Redis is set up, by hand or by URL.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::time::Duration;

use super::Common;
use super::cluster::Cluster;
use super::connection::{Address, Connector, Target};
use super::sentinel::Sentinels;
use super::server::{Deployment, Server, ServerSettings};
use crate::error::{Error, Result};
use crate::factory::Factory;
use crate::lease::Lease;
use crate::pool;
use crate::probe::Probed;
use crate::tls::Tls;
use crate::url::{Login, Url, address, addresses, ensure, host_list, options, setters};

const PORT: u16 = 6379;
const SENTINEL_PORT: u16 = 26379;

const NO_HOST: &str = "a redis URL names a host: redis://host:6379, redis+cluster://host1,host2";
const NOT_ONE: &str = "a unix socket is one server's: redis:///0?socket=/path/of/its.sock";
const NO_MASTER: &str = "a redis+sentinel URL names the master: redis+sentinel://host/mymaster";

/// Builds a factory on Redis. Its `Debug` output shows no password.
#[derive(Clone)]
#[must_use]
pub struct Builder {
    /// Read at once, complained about by `build`.
    at: Result<At>,
    login: Login,
    sentinel_login: Login,
    database: u32,
    prefix: String,
    ttl: Duration,
    transition: Duration,
    initial_delay: Duration,
    pool_size: u32,
    connect_timeout: Duration,
    tls: Tls,
    simba: bool,
    replicas: u32,
}

/// Where the server, or the servers, are.
#[derive(Clone, Debug)]
enum At {
    One(Address),
    Cluster(Vec<(String, u16)>),
    Sentinel(Vec<(String, u16)>, String),
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
            login: Login::default(),
            sentinel_login: Login::default(),
            database: 0,
            prefix: "simba".to_owned(),
            ttl: Lease::default().ttl(),
            transition: Lease::default().transition(),
            initial_delay: Duration::ZERO,
            pool_size: 8,
            connect_timeout: Duration::from_secs(2),
            tls: Tls::default(),
            simba: false,
            replicas: 0,
        }
    }

    setters! {
        /// Sets the ACL user. Defaults to the server's `default` user.
        fn user(user: impl Into<String>) { self.login.user = Some(user.into()) }

        /// Sets the password. Defaults to none.
        fn password(password: impl Into<String>) { self.login.password = Some(password.into()) }

        /// Sets the number of the database; a cluster has only database 0. Defaults to 0.
        fn database(database: u32) { self.database = database }

        /// Sets a function that returns user (empty for the default one) and password, for passwords that
        /// rotate. It is called by the factory's threads whenever a connection is opened; if it panics, that
        /// connection is not opened, and the next one calls it again. Defaults to the fixed user and password.
        fn credentials(ask: impl Fn() -> (String, String) + Send + Sync + 'static) {
            self.login.ask = Some(Arc::new(ask))
        }
    }

    options! {
        /// Sets how long an owner may believe that it owns without a renewal. Defaults to 10 s.
        fn ttl(ttl: Duration) { self.ttl = ttl }

        /// Sets how long after the ttl no other contender can own: the time to wind down work. Defaults to 6 s.
        fn transition(transition: Duration) { self.transition = transition }

        /// Sets the delay before a service's first attempt. Defaults to zero.
        fn initial_delay(initial_delay: Duration) { self.initial_delay = initial_delay }

        /// Sets the prefix of all keys and channels. Defaults to `simba`, as in Simba.
        fn prefix(prefix: impl Into<String>) { self.prefix = prefix.into() }

        /// Sets the maximum number of connections for commands, for each master of a cluster; a quarter of
        /// them, at least one, is reserved for owners. One more is for messages. Defaults to 8.
        fn pool_size(size: u32) { self.pool_size = size }

        /// Sets how long opening a connection may take. It happens in the background: no call waits longer
        /// than its lease allows. Defaults to 2 s.
        fn connect_timeout(timeout: Duration) { self.connect_timeout = timeout }

        /// Sets whether connections are encrypted and the server's certificate and host name are checked;
        /// needs the Cargo feature `tls`. Defaults to `false`.
        fn tls(tls: bool) { self.tls.on = tls }

        /// Sets the PEM file with the certificates of the authorities to trust. Defaults to those that the
        /// system trusts.
        fn tls_ca(file: impl Into<PathBuf>) { self.tls.ca = Some(file.into()) }

        /// Sets the PEM file with the client's certificate chain, for servers that ask for one. Needs
        /// [`tls_key`](Builder::tls_key). Defaults to none.
        fn tls_cert(file: impl Into<PathBuf>) { self.tls.cert = Some(file.into()) }

        /// Sets the PEM file with the key of the client's certificate. Defaults to none.
        fn tls_key(file: impl Into<PathBuf>) { self.tls.key = Some(file.into()) }

        /// Sets the user to log in to sentinels as. Defaults to none.
        fn sentinel_user(user: impl Into<String>) { self.sentinel_login.user = Some(user.into()) }

        /// Sets the password to log in to sentinels with. Defaults to none.
        fn sentinel_password(password: impl Into<String>) {
            self.sentinel_login.password = Some(password.into())
        }

        /// Sets whether Simba contenders of version 3.2 or later share the mutexes. If so, the last fence never
        /// expires, because Simba 4 would count from 1 again. And every 8th release is left to contenders that do
        /// not queue: they would get nothing while those of this library wait. Mutual exclusion holds without it.
        /// Defaults to `false`.
        fn simba(simba: bool) { self.simba = simba }

        /// Sets how many replicas must have a grant before it counts. After each grant the server is asked with
        /// `WAIT`, in the time of the same request; with fewer acknowledgements the grant is released, counts as a
        /// refusal, and a warning is logged. This narrows the window in which a failover loses a grant; it does not
        /// close it, as another replica may be promoted. Defaults to 0, which asks nothing.
        fn replicas(replicas: u32) { self.replicas = replicas }
    }

    /// Builds the factory. Validates all settings and returns without blocking. Connects in the background,
    /// so the server need not be reachable yet.
    ///
    /// # Errors
    /// `InvalidInput` for an address or setting that cannot work or a certificate that cannot be read,
    /// `FeatureDisabled` for TLS without the Cargo feature `tls`.
    pub fn build(self) -> Result<Factory> {
        let lease = Lease::new(self.ttl, self.transition)?;
        let realm = self.realm()?;
        let is_odd = |c: char| "{}!".contains(c) || c.is_control();
        ensure(
            !self.prefix.is_empty() && !self.prefix.contains(is_odd),
            "a redis prefix is not empty and contains no brace, no ! and no control character",
        )?;
        pool::check_size(self.pool_size)?;
        let has_time = !self.connect_timeout.is_zero();
        ensure(has_time, "connect_timeout must not be zero")?;
        let tls = self.tls.certificates()?;
        let connector = |login, database| Connector {
            login,
            database,
            tls: tls.clone(),
            timeout: self.connect_timeout,
        };
        let settings = Arc::new(ServerSettings {
            connector: connector(self.login, self.database),
            pool_size: self.pool_size,
            prefix: self.prefix,
            probe: Probed::default(),
            map_stale: AtomicBool::new(true),
        });
        let one = |target| -> Result<Deployment> {
            let server = Server::new(&settings, target)?;
            Ok(Deployment::One(Arc::new(server)))
        };
        let tcp = |(host, port)| Address::Tcp(host, port);
        let deployment = match self.at? {
            At::One(address) => one(Target::At(address))?,
            At::Cluster(seeds) => {
                let seeds = seeds.into_iter().map(tcp).collect();
                Deployment::Cluster(Box::new(Cluster::new(Arc::clone(&settings), seeds)))
            }
            At::Sentinel(sentinels, name) => one(Target::Master(Sentinels {
                name,
                addresses: sentinels.into_iter().map(tcp).collect(),
                connector: connector(self.sentinel_login, 0),
                first: AtomicUsize::new(0),
            }))?,
        };
        let common = Arc::new(Common {
            realm,
            deployment,
            settings,
            lease,
            simba: self.simba,
            replicas: self.replicas,
        });
        let factory = Factory::over(Arc::new(common), lease);
        Ok(factory.with_initial_delay(self.initial_delay))
    }

    /// Where the mutexes are. Refuses what does not exist there.
    fn realm(&self) -> Result<String> {
        let place = match self.at.as_ref().map_err(Clone::clone)? {
            At::One(address @ Address::Unix(_)) => {
                ensure(!self.tls.on, "tls=true: a unix socket is not encrypted")?;
                format!("redis+unix://{address}")
            }
            At::One(address) if self.tls.on => format!("rediss://{address}"),
            At::One(address) => format!("redis://{address}"),
            At::Cluster(hosts) => {
                ensure(!hosts.is_empty(), NO_HOST)?;
                ensure(self.database == 0, "a redis cluster has only database 0")?;
                format!("redis+cluster://{}", host_list(hosts))
            }
            At::Sentinel(hosts, name) => {
                ensure(!hosts.is_empty(), NO_HOST)?;
                ensure(!name.is_empty(), NO_MASTER)?;
                format!("redis+sentinel://{}/{name}", host_list(hosts))
            }
        };
        Ok(format!("{place}/{}?prefix={}", self.database, self.prefix))
    }
}

/// Without the passwords.
impl fmt::Debug for Builder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Builder({:?}, prefix {:?})", self.at, self.prefix)
    }
}

/// `redis://`, `rediss://`, `redis+cluster://` and `redis+sentinel://`.
pub(crate) fn connect(url: &Url) -> Result<Factory> {
    let mut path = url.path.as_str();
    let (socket, hosts) = (url.text("socket"), url.hosts.as_slice());
    let mut builder = match (url.scheme.as_str(), socket, hosts) {
        ("redis" | "rediss", Some(socket), _) => Builder::socket(socket),
        ("redis" | "rediss", None, [host]) => Builder::new(host),
        ("redis+cluster", None, _) => Builder::cluster(hosts),
        ("redis+sentinel", None, _) => {
            let (master, database) = path.split_once('/').unwrap_or((path, ""));
            path = database;
            Builder::sentinel(hosts, master)
        }
        (_, None, _) => return Err(Error::invalid(NO_HOST)),
        (_, Some(_), _) => return Err(Error::invalid(NOT_ONE)),
    };
    builder.read_options(url)?;
    builder.tls.on |= url.scheme == "rediss";
    // Rather a password without its colon, which must not be shown as a user.
    ensure(
        url.login.user.is_none() || url.login.password.is_some(),
        "a redis URL with a user and no password: write redis://user:password@host, or redis://:password@host",
    )?;
    builder.login = url.login.clone();
    if !path.is_empty() {
        let message = format!("the path of a redis URL is the number of a database, not {path:?}");
        builder.database = path.parse().map_err(|_| Error::invalid(message))?;
    }
    builder.build()
}
