//! Where the ensemble is and how to talk to it.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::Zk;
use super::connection;
use super::message::Acl;
use super::session::{Session, Sessions};
use crate::error::{Error, Result};
use crate::factory::Factory;
use crate::lease::Lease;
use crate::probe::Probed;
use crate::tls::Tls;
use crate::url::{Parameter, Url, addresses, ensure, host_list, options};

/// Builds a factory on a ZooKeeper ensemble.
///
/// ```
/// use contend::zk;
/// use std::time::Duration;
///
/// // Connects in the background: this works while no server is there.
/// let factory = zk::Builder::new("127.0.0.1:2181,127.0.0.1:2182")
///     .chroot("/app")
///     .session_timeout(Duration::from_secs(6))
///     .build()?;
/// assert_eq!(factory.realm(), "zk://127.0.0.1:2181,127.0.0.1:2182/app");
/// // The lease follows from the session: five sixths to believe in, one sixth to wind down in.
/// assert_eq!(factory.lease().ttl(), Duration::from_secs(5));
/// # Ok::<(), contend::Error>(())
/// ```
///
/// Authentication is ZooKeeper's `digest`; SASL (Kerberos) is not supported. `digest` sends the password
/// in clear: use it with [`tls`](Builder::tls).
#[derive(Clone)]
#[must_use]
pub struct Builder {
    hosts: String,
    chroot: String,
    ttl: Option<Duration>,
    transition: Option<Duration>,
    session_timeout: Option<Duration>,
    connect_timeout: Duration,
    initial_delay: Duration,
    digest: Option<(String, String)>,
    acl: Option<Acl>,
    tls: Tls,
}

impl Builder {
    /// Creates a builder for the servers of one ensemble, given as `host:port` separated by commas; the
    /// default port is 2181. Every address of a host name is tried, in random order.
    pub fn new(hosts: impl Into<String>) -> Builder {
        Builder {
            hosts: hosts.into(),
            chroot: String::new(),
            ttl: None,
            transition: None,
            session_timeout: None,
            connect_timeout: Duration::from_secs(1),
            initial_delay: Duration::ZERO,
            digest: None,
            acl: None,
            tls: Tls::default(),
        }
    }

    /// Sets the node below which all other nodes are, such as `/app`. It is created if it is missing.
    /// Defaults to the root.
    pub fn chroot(mut self, path: impl Into<String>) -> Builder {
        self.chroot = path.into();
        self
    }

    /// Authenticates every connection with ZooKeeper's `digest` scheme, which sends the password in clear
    /// unless [`tls`](Builder::tls) is on. Defaults to no authentication.
    pub fn digest(mut self, user: impl Into<String>, password: impl Into<String>) -> Builder {
        self.digest = Some((user.into(), password.into()));
        self
    }

    options! {
        /// Sets how long an owner may believe that it owns without a renewal. Defaults to 10 s, or to what
        /// [`session_timeout`](Builder::session_timeout) leaves after the transition.
        fn ttl(ttl: Duration) { self.ttl = Some(ttl) }

        /// Sets how long after the ttl no other contender can acquire. Defaults to 6 s, or to a sixth of
        /// [`session_timeout`](Builder::session_timeout) if that is set. An owner whose session cannot be kept
        /// alive stops believing that it owns at least a sixth of the session timeout before the session ends,
        /// whatever is set here.
        fn transition(transition: Duration) { self.transition = Some(transition) }

        /// Sets how long the ensemble keeps the factory's nodes without hearing from it. Defaults to ttl +
        /// transition. A server grants 2 to 20 of its ticks unless configured otherwise (`minSessionTimeout`,
        /// `maxSessionTimeout`, the same on every server). If it grants less than is requested, the factory's
        /// calls fail with an error that says so. Heartbeats need at least two ticks: do not set less, even
        /// if the server's `minSessionTimeout` allows it.
        fn session_timeout(timeout: Duration) { self.session_timeout = Some(timeout) }

        /// Sets how long one server may take to accept a connection. Defaults to 1 s. It then has a quarter of the
        /// session timeout to answer the handshake, or this time if it is longer and no ownership depends on the
        /// session.
        fn connect_timeout(timeout: Duration) { self.connect_timeout = timeout }

        /// Sets the delay before a service's first attempt. Defaults to zero.
        fn initial_delay(initial_delay: Duration) { self.initial_delay = initial_delay }

        /// Sets the ACL of the nodes that the factory creates below `/simba`. Defaults to [`Acl::CreatorAll`]
        /// with authentication, [`Acl::Open`] without. With `CreatorAll`, every user can still read `/simba`
        /// itself and create nodes in it.
        fn acl(acl: Acl) { self.acl = Some(acl) }

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
    }

    /// Builds the factory. Its session is opened in the background.
    ///
    /// # Errors
    /// `InvalidInput` for hosts, a chroot, times or certificates that cannot work; `FeatureDisabled` for
    /// TLS without the Cargo feature.
    pub fn build(self) -> Result<Factory> {
        let config = self.config()?;
        let (lease, initial_delay) = (config.lease, self.initial_delay);
        let sessions = Arc::new(Sessions::open(config)?);
        Ok(Factory::over(Arc::new(Zk { sessions }), lease).with_initial_delay(initial_delay))
    }

    /// Opens a session of its own, for what the factory does not do: the client without the mutexes.
    ///
    /// # Errors
    /// As [`Builder::build`].
    pub fn session(self) -> Result<Session> {
        let config = Arc::new(self.config()?);
        Session::open(&config, connection::run)
    }

    /// `zk://user:password@h1:2181,h2:2181/chroot?ttl=10s&transition=6s&tls=true`.
    pub(super) fn from_url(url: &Url) -> Result<Builder> {
        let mut builder = Builder::new(url.hosts.join(","));
        if !url.path.is_empty() {
            builder.chroot = format!("/{}", url.path);
        }
        builder.read_options(url)?;
        ensure(
            url.login.user.is_some() == url.login.password.is_some(),
            "a zk:// URL needs both, a user and a password, or neither",
        )?;
        builder.digest = url.login.user.clone().zip(url.login.password.clone());
        Ok(builder)
    }

    pub(super) fn config(&self) -> Result<Config> {
        let hosts = addresses(self.hosts.split(','), 2181)?;
        ensure(!hosts.is_empty(), "no host given; write zk://host:2181")?;
        let chroot = self.chroot.trim_end_matches('/');
        let is_path = (chroot.split('/').skip(1)).all(|part| !matches!(part, "" | "." | ".."));
        ensure(
            chroot.is_empty()
                || chroot.starts_with('/') && is_path && !chroot.contains(char::is_control),
            &format!("chroot {chroot:?} is not a path such as /app/locks"),
        )?;
        let (lease, session_timeout) = self.lease()?;
        let has_time = !self.connect_timeout.is_zero();
        ensure(has_time, "connect_timeout must not be zero")?;
        let digest = self.digest.as_ref();
        let is_user = digest.is_none_or(|(user, _)| !user.is_empty() && !user.contains(':'));
        ensure(is_user, "a digest user is not empty and contains no colon")?;
        let acl = digest.map_or(Acl::Open, |_| Acl::CreatorAll);
        let acl = self.acl.unwrap_or(acl);
        ensure(
            acl == Acl::Open || digest.is_some(),
            "acl creator_all needs a user and a password: without them there is no creator",
        )?;
        #[cfg(not(feature = "tls"))]
        self.tls.certificates()?;
        Ok(Config {
            realm: format!("zk://{}{chroot}", host_list(&hosts)),
            hosts,
            chroot: chroot.to_owned(),
            lease,
            session_timeout,
            connect_timeout: self.connect_timeout,
            digest: digest.map(|(user, password)| format!("{user}:{password}")),
            acl,
            probe: Probed::default(),
            #[cfg(feature = "tls")]
            tls: self.tls.client_config()?,
        })
    }

    /// The lease, and the session timeout that keeps it.
    fn lease(&self) -> Result<(Lease, Duration)> {
        let whole = |duration: Duration| Duration::from_millis(duration.as_millis() as u64);
        let (given, default) = (self.session_timeout, Lease::default());
        let transition = given.map_or(default.transition(), |timeout| whole(timeout / 6));
        let transition = self.transition.unwrap_or(transition);
        let ttl = given.map_or(default.ttl(), |timeout| timeout.saturating_sub(transition));
        let lease = Lease::new(self.ttl.unwrap_or(ttl), transition)?;
        // So that a sixth of it is left where a shorter transition is asked for.
        let least = lease.total().max(whole(lease.ttl() * 6 / 5));
        let timeout = given.unwrap_or(least);
        let bounds = Duration::from_millis(120)..=Duration::from_secs(24 * 3600);
        ensure(
            bounds.contains(&timeout) && timeout == whole(timeout),
            &format!(
                "session_timeout must be whole milliseconds from 120ms to 24h, not {timeout:?}"
            ),
        )?;
        check_fit(lease, timeout)?;
        Ok((lease, timeout))
    }
}

impl Parameter for Acl {
    fn read(text: &str) -> Result<Acl> {
        match text {
            "open" => Ok(Acl::Open),
            "creator_all" => Ok(Acl::CreatorAll),
            _ => Err(Error::invalid(format!(
                "{text:?} is not understood; known are: open, creator_all"
            ))),
        }
    }
}

/// Refuses a lease that a session of `timeout` cannot keep.
pub(super) fn check_fit(lease: Lease, timeout: Duration) -> Result<()> {
    ensure(
        lease.total() <= timeout && lease.transition() <= timeout / 2,
        &format!(
            "a lease of {lease} does not fit into a session of {timeout:?}: ttl and transition together may \
             be as long as the session timeout, the transition half of it; raise session_timeout"
        ),
    )
}

/// Without the password.
impl fmt::Debug for Builder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Builder(chroot {:?})", self.chroot)
    }
}

/// What a [`Builder`] asked for, checked.
pub(super) struct Config {
    pub(super) realm: String,
    pub(super) hosts: Vec<(String, u16)>,
    /// Empty, or with a leading and without a trailing slash.
    pub(super) chroot: String,
    /// What contenders ask for unless told otherwise.
    pub(super) lease: Lease,
    pub(super) session_timeout: Duration,
    pub(super) connect_timeout: Duration,
    /// `user:password`.
    pub(super) digest: Option<String>,
    pub(super) acl: Acl,
    pub(super) probe: Probed,
    /// `None`: connections are not encrypted.
    #[cfg(feature = "tls")]
    pub(super) tls: Option<Arc<rustls::ClientConfig>>,
}

impl Config {
    pub(super) fn timeout_ms(&self) -> i32 {
        i32::try_from(self.session_timeout.as_millis()).unwrap_or(i32::MAX)
    }
}

impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.realm)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(url: &str) -> Result<Config> {
        Builder::from_url(&Url::parse(url)?)?.config()
    }

    #[test]
    fn a_url_says_everything_the_builder_can() {
        let config = config(
            "zk://me:s3c%40ret@b:2182,a,[::1]:7/app/x/?session_timeout=6s&connect_timeout=200ms&acl=open\
             &initial_delay=1s&tls=off",
        )
        .unwrap();
        assert_eq!(config.realm, "zk://[::1]:7,a:2181,b:2182/app/x");
        assert_eq!(config.chroot, "/app/x");
        assert_eq!(config.timeout_ms(), 6000);
        assert_eq!(config.connect_timeout, Duration::from_millis(200));
        assert_eq!(config.digest.as_deref(), Some("me:s3c@ret"));
        assert_eq!(config.acl, Acl::Open);
        assert_eq!(config.lease.transition(), Duration::from_secs(1));
        assert_eq!(config.lease.total(), Duration::from_secs(6));
    }

    #[test]
    fn the_session_timeout_follows_from_ttl_and_transition() {
        for (url, ttl, transition, timeout) in [
            ("zk://a", 10_000, 6_000, 16_000),
            ("zk://a?ttl=5s&transition=2s", 5_000, 2_000, 7_000),
            ("zk://a?ttl=5s&transition=0s", 5_000, 0, 6_000),
            ("zk://a?session_timeout=1500ms", 1_250, 250, 1_500),
            (
                "zk://a?session_timeout=9s&ttl=2s&transition=1s",
                2_000,
                1_000,
                9_000,
            ),
        ] {
            let config = config(url).unwrap();
            let ms = Duration::from_millis;
            assert_eq!(config.lease.ttl(), ms(ttl), "{url}");
            assert_eq!(config.lease.transition(), ms(transition), "{url}");
            assert_eq!(config.session_timeout, ms(timeout), "{url}");
        }
    }

    #[test]
    fn the_acl_follows_the_authentication() {
        assert_eq!(config("zk://a").unwrap().acl, Acl::Open);
        assert_eq!(config("zk://u:p@a").unwrap().acl, Acl::CreatorAll);
    }

    /// An `@` in a chroot is part of the chroot, not the end of a user's name.
    #[test]
    fn an_at_sign_after_the_hosts_is_no_credential() {
        let config = config("zk://h:2181/app%40prod").unwrap();
        assert_eq!(config.realm, "zk://h:2181/app@prod");
        assert_eq!((config.chroot.as_str(), config.digest), ("/app@prod", None));
    }

    #[test]
    fn what_cannot_work_is_refused_in_words_that_show_no_password() {
        for (url, what) in [
            ("zk://", "no host given; write zk://host:2181"),
            (
                "zk://s3cret@a",
                "a zk:// URL needs both, a user and a password, or neither",
            ),
            (
                "zk://a?acl=creator_all",
                "acl creator_all needs a user and a password: without them there is no creator",
            ),
            (
                "zk://a?acl=x",
                "URL parameter acl: \"x\" is not understood; known are: open, creator_all",
            ),
            (
                "zk://u:s3cret@a?acl=x",
                "URL parameter acl: \"x\" is not understood; known are: open, creator_all",
            ),
            (
                "zk://a/x//y",
                "chroot \"/x//y\" is not a path such as /app/locks",
            ),
            (
                "zk://a/x/../y",
                "chroot \"/x/../y\" is not a path such as /app/locks",
            ),
            (
                "zk://a?session_timeout=100ms",
                "session_timeout must be whole milliseconds from 120ms to 24h, not 100ms",
            ),
            (
                "zk://a?tls=maybe",
                "URL parameter tls: \"maybe\" is neither true nor false",
            ),
            (
                "zk://a?tls=false&tls_ca=x",
                "tls_ca, tls_cert and tls_key need tls=true",
            ),
            (
                "zk://a?timeout=1s",
                "unknown parameter \"timeout\" in a zk:// URL; known are: ttl, transition, session_timeout, \
                 connect_timeout, initial_delay, acl, tls, tls_ca, tls_cert, tls_key",
            ),
        ] {
            assert_eq!(config(url).unwrap_err().to_string(), what);
        }
        let error = config("zk://a?session_timeout=3s&ttl=3s&transition=1s").unwrap_err();
        assert!(
            error.to_string().contains("raise session_timeout"),
            "{error}"
        );
        let builder = Builder::new("me:s3cret@a").digest("u", "s3cret");
        let shown = format!("{builder:?} {}", builder.config().unwrap_err());
        assert!(!shown.contains("s3cret"), "{shown}");
    }
}
