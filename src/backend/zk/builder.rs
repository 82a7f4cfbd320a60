//! Where the ensemble is and how to talk to it.

use std::fmt;
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
use crate::tls::{Tls, tls_setters};
use crate::url::Url;

/// What a `zk://` URL may say.
const PARAMETERS: &[&str] = &[
    "ttl",
    "transition",
    "session_timeout",
    "connect_timeout",
    "initial_delay",
    "acl",
    "tls",
    "tls_ca",
    "tls_cert",
    "tls_key",
];

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

    /// Sets how long an owner may believe that it owns without a renewal. Defaults to 10 s, or to what
    /// [`session_timeout`](Builder::session_timeout) leaves after the transition.
    pub fn ttl(mut self, ttl: Duration) -> Builder {
        self.ttl = Some(ttl);
        self
    }

    /// Sets how long after the ttl no other contender can acquire. Defaults to 6 s, or to a sixth of
    /// [`session_timeout`](Builder::session_timeout) if that is set. An owner whose session cannot be kept
    /// alive stops believing that it owns at least a sixth of the session timeout before the session ends,
    /// whatever is set here.
    pub fn transition(mut self, transition: Duration) -> Builder {
        self.transition = Some(transition);
        self
    }

    /// Sets how long the ensemble keeps the factory's nodes without hearing from it. Defaults to ttl +
    /// transition. A server grants 2 to 20 of its ticks unless configured otherwise (`minSessionTimeout`,
    /// `maxSessionTimeout`, the same on every server). If it grants less than is requested, the factory's
    /// calls fail with an error that says so. Heartbeats need at least two ticks: do not set less, even
    /// if the server's `minSessionTimeout` allows it.
    pub fn session_timeout(mut self, timeout: Duration) -> Builder {
        self.session_timeout = Some(timeout);
        self
    }

    /// Sets how long one server may take to accept a connection. Defaults to 1 s. It then has a quarter of the
    /// session timeout to answer the handshake, or this time if it is longer and no ownership depends on the
    /// session.
    pub fn connect_timeout(mut self, timeout: Duration) -> Builder {
        self.connect_timeout = timeout;
        self
    }

    /// Sets the delay before a service's first attempt. Defaults to zero.
    pub fn initial_delay(mut self, initial_delay: Duration) -> Builder {
        self.initial_delay = initial_delay;
        self
    }

    /// Authenticates every connection with ZooKeeper's `digest` scheme, which sends the password in clear
    /// unless [`tls`](Builder::tls) is on. Defaults to no authentication.
    pub fn digest(mut self, user: impl Into<String>, password: impl Into<String>) -> Builder {
        self.digest = Some((user.into(), password.into()));
        self
    }

    /// Sets the ACL of the nodes that the factory creates below `/simba`. Defaults to [`Acl::CreatorAll`]
    /// with authentication, [`Acl::Open`] without. With `CreatorAll`, every user can still read `/simba` itself
    /// and create nodes in it.
    pub fn acl(mut self, acl: Acl) -> Builder {
        self.acl = Some(acl);
        self
    }

    tls_setters!(tls);

    /// Builds the factory. Its session is opened in the background.
    ///
    /// # Errors
    /// `InvalidInput` for hosts, a chroot, times or certificates that cannot work; `FeatureDisabled` for
    /// TLS without the Cargo feature.
    pub fn build(self) -> Result<Factory> {
        let config = self.config()?;
        let (lease, initial_delay) = (config.lease, self.initial_delay);
        let sessions = Arc::new(Sessions::open(config)?);
        Ok(Factory::new(Arc::new(Zk { sessions }), lease).with_initial_delay(initial_delay))
    }

    /// Opens a session of its own, for what the factory does not do: the client without the mutexes.
    ///
    /// # Errors
    /// As [`Builder::build`].
    pub fn session(self) -> Result<Session> {
        Session::open(
            &Arc::new(self.config()?),
            Probed::default(),
            connection::run,
        )
    }

    /// `zk://user:password@h1:2181,h2:2181/chroot?ttl=10s&transition=6s&tls=true`.
    pub(super) fn from_url(url: &Url) -> Result<Builder> {
        url.expect_parameters(PARAMETERS)?;
        let mut builder = Builder::new(url.hosts.join(","));
        if !url.path.is_empty() {
            builder = builder.chroot(format!("/{}", url.path));
        }
        url.set("ttl", &mut builder.ttl)?;
        url.set("transition", &mut builder.transition)?;
        url.set("session_timeout", &mut builder.session_timeout)?;
        url.set("connect_timeout", &mut builder.connect_timeout)?;
        url.set("initial_delay", &mut builder.initial_delay)?;
        builder.tls = Tls::from_url(url)?;
        match (&url.user, &url.password) {
            (Some(user), Some(password)) => builder = builder.digest(user, password),
            (None, None) => {}
            _ => {
                return Err(Error::invalid(
                    "a zk:// URL needs both, a user and a password, or neither",
                ));
            }
        }
        match url.text("acl") {
            Some("open") => builder = builder.acl(Acl::Open),
            Some("creator_all") => builder = builder.acl(Acl::CreatorAll),
            Some(other) => {
                return Err(Error::invalid(format!(
                    "URL parameter acl: {other:?} is not understood; known are: open, creator_all"
                )));
            }
            None => {}
        }
        Ok(builder)
    }

    pub(super) fn config(&self) -> Result<Config> {
        if self.hosts.contains(['@', '/', '?']) {
            // Not repeated: what stands before an @ may be a password.
            return Err(Error::invalid(
                "hosts are given as host:port,host:port; a chroot and a user have setters of their own",
            ));
        }
        let mut hosts = Url::parse(&format!("zk://{}", self.hosts))?.addresses(2181)?;
        hosts.sort();
        hosts.dedup();
        if hosts.is_empty() {
            return Err(Error::invalid("no host given; write zk://host:2181"));
        }
        let chroot = self.chroot.trim_end_matches('/');
        let bad_part = |part: &str| part.is_empty() || part == "." || part == "..";
        if !chroot.is_empty()
            && (!chroot.starts_with('/')
                || chroot.chars().any(char::is_control)
                || chroot.split('/').skip(1).any(bad_part))
        {
            return Err(Error::invalid(format!(
                "chroot {chroot:?} is not a path such as /app/locks"
            )));
        }
        let (lease, session_timeout) = self.lease()?;
        let (shortest, longest) = (Duration::from_millis(120), Duration::from_secs(24 * 3600));
        if !(shortest..=longest).contains(&session_timeout)
            || !session_timeout.subsec_nanos().is_multiple_of(1_000_000)
        {
            return Err(Error::invalid(format!(
                "session_timeout {session_timeout:?} is out of bounds; allowed are whole milliseconds from \
                 {shortest:?} to 24 hours",
            )));
        }
        let bad_user = |(user, _): &(String, String)| user.is_empty() || user.contains(':');
        for (is_bad, what) in [
            (
                self.connect_timeout.is_zero(),
                "connect_timeout must not be zero",
            ),
            (
                self.digest.as_ref().is_some_and(bad_user),
                "a digest user is not empty and contains no colon",
            ),
            (
                self.acl == Some(Acl::CreatorAll) && self.digest.is_none(),
                "acl creator_all needs a user and a password: without them there is no creator",
            ),
        ] {
            if is_bad {
                return Err(Error::invalid(what));
            }
        }
        let default_acl = match self.digest {
            Some(_) => Acl::CreatorAll,
            None => Acl::Open,
        };
        let address = |(host, port): &(String, u16)| {
            if host.contains(':') {
                format!("[{host}]:{port}")
            } else {
                format!("{host}:{port}")
            }
        };
        let list = hosts.iter().map(address).collect::<Vec<_>>().join(",");
        Ok(Config {
            realm: format!("zk://{list}{chroot}"),
            hosts,
            chroot: chroot.to_owned(),
            lease,
            session_timeout,
            connect_timeout: self.connect_timeout,
            digest: self
                .digest
                .as_ref()
                .map(|(user, it)| format!("{user}:{it}")),
            acl: self.acl.unwrap_or(default_acl),
            tls: self.tls_config()?,
        })
    }

    /// The lease, and the session timeout that keeps it.
    fn lease(&self) -> Result<(Lease, Duration)> {
        let whole = |duration: Duration| {
            Duration::from_millis(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX))
        };
        let Some(timeout) = self.session_timeout else {
            let default = Lease::default();
            let ttl = self.ttl.unwrap_or(default.ttl());
            let transition = self.transition.unwrap_or(default.transition());
            let lease = Lease::new(ttl, transition)?;
            // So that a sixth of it is left where a shorter transition is asked for.
            let timeout = lease.total().max(whole(ttl * 6 / 5));
            return Ok((lease, timeout));
        };
        let transition = self.transition.unwrap_or(whole(timeout / 6).min(timeout));
        let ttl = self.ttl.unwrap_or(timeout.saturating_sub(transition));
        let lease = Lease::new(ttl, transition)?;
        check_fit(lease, timeout)?;
        Ok((lease, timeout))
    }

    #[cfg(not(feature = "tls"))]
    fn tls_config(&self) -> Result<()> {
        self.tls.certificates().map(drop)
    }

    #[cfg(feature = "tls")]
    fn tls_config(&self) -> Result<Option<Arc<rustls::ClientConfig>>> {
        use rustls::pki_types::pem::PemObject;
        use rustls::pki_types::{CertificateDer, PrivateKeyDer};

        let Some(files) = self.tls.certificates()? else {
            return Ok(None);
        };
        let invalid =
            |option: &str, what: &dyn fmt::Display| Error::invalid(format!("{option}: {what}"));
        let certificates = |option: &str, pem: &[u8]| -> Result<Vec<CertificateDer<'static>>> {
            let list: Vec<_> = CertificateDer::pem_slice_iter(pem)
                .collect::<Result<_, _>>()
                .map_err(|error| invalid(option, &error))?;
            if list.is_empty() {
                return Err(invalid(option, &"the file contains no certificate"));
            }
            Ok(list)
        };
        let mut roots = rustls::RootCertStore::empty();
        if let Some(pem) = &files.ca {
            for certificate in certificates("tls_ca", pem)? {
                roots
                    .add(certificate)
                    .map_err(|error| invalid("tls_ca", &error))?;
            }
        } else {
            let found = rustls_native_certs::load_native_certs();
            roots.add_parsable_certificates(found.certs);
            if roots.is_empty() {
                return Err(Error::invalid(
                    "the system has no certificates of authorities to trust; give tls_ca",
                ));
            }
        }
        let builder = rustls::ClientConfig::builder().with_root_certificates(roots);
        let config = match &files.own {
            None => builder.with_no_client_auth(),
            Some((cert, key)) => {
                // The error may not quote the key.
                let key = PrivateKeyDer::from_pem_slice(key)
                    .map_err(|_| invalid("tls_key", &"the file contains no PEM private key"))?;
                builder
                    .with_client_auth_cert(certificates("tls_cert", cert)?, key)
                    .map_err(|error| invalid("tls_cert", &error))?
            }
        };
        Ok(Some(Arc::new(config)))
    }
}

/// Refuses a lease that a session of `timeout` cannot keep.
pub(super) fn check_fit(lease: Lease, timeout: Duration) -> Result<()> {
    if lease.total() > timeout || lease.transition() > timeout / 2 {
        return Err(Error::invalid(format!(
            "a lease of {:?} + {:?} does not fit into a session of {timeout:?}: ttl and transition together \
             may be as long as the session timeout, the transition half of it; raise session_timeout",
            lease.ttl(),
            lease.transition(),
        )));
    }
    Ok(())
}

/// Without the password.
impl fmt::Debug for Builder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder")
            .field("chroot", &self.chroot)
            .field("session_timeout", &self.session_timeout)
            .finish_non_exhaustive()
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
    #[cfg(feature = "tls")]
    tls: Option<Arc<rustls::ClientConfig>>,
    #[cfg(not(feature = "tls"))]
    #[allow(dead_code)]
    tls: (),
}

impl Config {
    pub(super) fn timeout_ms(&self) -> i32 {
        i32::try_from(self.session_timeout.as_millis()).unwrap_or(i32::MAX)
    }

    #[cfg(feature = "tls")]
    pub(super) fn tls(&self) -> Option<Arc<rustls::ClientConfig>> {
        self.tls.clone()
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
                "session_timeout 100ms is out of bounds; allowed are whole milliseconds from 120ms to 24 hours",
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
