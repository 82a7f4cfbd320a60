//! Where the ensemble is and how to talk to it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::Zk;
use super::message::Acl;
use super::session::Session;
use crate::error::{Error, Result};
use crate::factory::Factory;
use crate::lease::Lease;
use crate::url::Url;

/// A factory on a ZooKeeper ensemble, in the making.
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
#[derive(Clone)]
pub struct Builder {
    hosts: String,
    chroot: String,
    session_timeout: Duration,
    connect_timeout: Duration,
    digest: Option<(String, String)>,
    acl: Option<Acl>,
}

impl Builder {
    /// Servers of one ensemble, as `host:port` separated by commas; the port is 2181 unless given.
    #[must_use]
    pub fn new(hosts: impl Into<String>) -> Builder {
        Builder {
            hosts: hosts.into(),
            chroot: String::new(),
            session_timeout: Duration::from_secs(10),
            connect_timeout: Duration::from_secs(1),
            digest: None,
            acl: None,
        }
    }

    /// The node below which everything happens, such as `/app`. Created where it is missing.
    /// Default: the root.
    #[must_use]
    pub fn chroot(mut self, path: impl Into<String>) -> Builder {
        self.chroot = path.into();
        self
    }

    /// How long the ensemble keeps our nodes without hearing from us: the lease of every service of
    /// the factory, its transition included. The server may answer with another one (by default it
    /// grants 2 to 20 of its ticks); then that one counts. What we call certain needs two ticks at
    /// least: on a server whose `minSessionTimeout` allows less, do not ask for less. Default: 10 s.
    #[must_use]
    pub fn session_timeout(mut self, timeout: Duration) -> Builder {
        self.session_timeout = timeout;
        self
    }

    /// How long one server gets to accept a connection, and again to answer the handshake; never more
    /// than a third of the session timeout. Default: 1 s.
    #[must_use]
    pub fn connect_timeout(mut self, timeout: Duration) -> Builder {
        self.connect_timeout = timeout;
        self
    }

    /// Authenticates every connection with ZooKeeper's `digest` scheme. Default: no authentication.
    #[must_use]
    pub fn digest(mut self, user: impl Into<String>, password: impl Into<String>) -> Builder {
        self.digest = Some((user.into(), password.into()));
        self
    }

    /// The ACL of the nodes that we create. Default: [`Acl::CreatorAll`] with authentication,
    /// [`Acl::Open`] without.
    #[must_use]
    pub fn acl(mut self, acl: Acl) -> Builder {
        self.acl = Some(acl);
        self
    }

    /// The factory. Its session is opened in the background.
    ///
    /// # Errors
    /// `InvalidInput` for hosts, a chroot or times that cannot work.
    pub fn build(&self) -> Result<Factory> {
        let config = self.config()?;
        let lease = config.lease()?;
        Ok(Factory::new(Arc::new(Zk::open(config)?), lease))
    }

    /// A session of its own, for what the factory does not do: the client without the latch.
    ///
    /// # Errors
    /// As [`Builder::build`].
    pub fn session(&self) -> Result<Session> {
        Session::open(Arc::new(self.config()?))
    }

    /// `zk://user:password@h1:2181,h2:2181/chroot?session_timeout=10s&connect_timeout=1s&acl=open`.
    pub(super) fn from_url(url: &Url) -> Result<Builder> {
        url.expect_parameters(&["session_timeout", "connect_timeout", "acl"])?;
        let mut builder = Builder::new(url.hosts.join(","));
        if !url.path.is_empty() {
            builder = builder.chroot(format!("/{}", url.path));
        }
        if let Some(timeout) = url.duration("session_timeout")? {
            builder = builder.session_timeout(timeout);
        }
        if let Some(timeout) = url.duration("connect_timeout")? {
            builder = builder.connect_timeout(timeout);
        }
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

    fn config(&self) -> Result<Config> {
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
        let (shortest, longest) = (Duration::from_millis(120), Duration::from_secs(24 * 3600));
        if !(shortest..=longest).contains(&self.session_timeout)
            || !self
                .session_timeout
                .subsec_nanos()
                .is_multiple_of(1_000_000)
        {
            return Err(Error::invalid(format!(
                "session_timeout {:?} is out of bounds; allowed are whole milliseconds from \
                 {shortest:?} to 24 hours",
                self.session_timeout
            )));
        }
        if self.connect_timeout.is_zero() {
            return Err(Error::invalid("connect_timeout must not be zero"));
        }
        if let Some((user, _)) = &self.digest
            && (user.is_empty() || user.contains(':'))
        {
            return Err(Error::invalid(
                "a digest user is not empty and contains no colon",
            ));
        }
        let acl = match (self.acl, &self.digest) {
            (Some(Acl::CreatorAll), None) => {
                return Err(Error::invalid(
                    "acl creator_all needs a user and a password: without them there is no creator",
                ));
            }
            (Some(acl), _) => acl,
            (None, Some(_)) => Acl::CreatorAll,
            (None, None) => Acl::Open,
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
            session_timeout: self.session_timeout,
            connect_timeout: self.connect_timeout.min(self.session_timeout / 3),
            digest: self
                .digest
                .as_ref()
                .map(|(user, password)| format!("{user}:{password}").into_bytes()),
            acl,
        })
    }
}

/// Without the password.
impl fmt::Debug for Builder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder")
            .field("chroot", &self.chroot)
            .field("session_timeout", &self.session_timeout)
            .field("connect_timeout", &self.connect_timeout)
            .field("authenticated", &self.digest.is_some())
            .field("acl", &self.acl)
            .finish_non_exhaustive()
    }
}

/// What a [`Builder`] asked for, checked.
pub(super) struct Config {
    pub(super) realm: String,
    pub(super) hosts: Vec<(String, u16)>,
    /// Empty, or with a leading and without a trailing slash.
    pub(super) chroot: String,
    pub(super) session_timeout: Duration,
    pub(super) connect_timeout: Duration,
    /// `user:password`.
    pub(super) digest: Option<Vec<u8>>,
    pub(super) acl: Acl,
}

impl Config {
    /// One sixth of the session timeout to wind down in, the rest to believe in.
    pub(super) fn lease(&self) -> Result<Lease> {
        let transition = self.session_timeout.as_millis() / 6;
        let transition = Duration::from_millis(u64::try_from(transition).unwrap_or(u64::MAX));
        Lease::new(self.session_timeout.saturating_sub(transition), transition)
    }

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
            "zk://me:s3c%40ret@b:2182,a,[::1]:7/app/x/?session_timeout=6s&connect_timeout=200ms&acl=open",
        )
        .unwrap();
        assert_eq!(config.realm, "zk://[::1]:7,a:2181,b:2182/app/x");
        assert_eq!(config.chroot, "/app/x");
        assert_eq!(config.timeout_ms(), 6000);
        assert_eq!(config.connect_timeout, Duration::from_millis(200));
        assert_eq!(config.digest.as_deref(), Some(&b"me:s3c@ret"[..]));
        assert_eq!(config.acl, Acl::Open);
        let lease = config.lease().unwrap();
        assert_eq!(lease.transition(), Duration::from_secs(1));
        assert_eq!(lease.total(), Duration::from_secs(6));
    }

    #[test]
    fn the_acl_follows_the_authentication() {
        assert_eq!(config("zk://a").unwrap().acl, Acl::Open);
        assert_eq!(config("zk://u:p@a").unwrap().acl, Acl::CreatorAll);
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
                "zk://a?session_timeout=1ms",
                "session_timeout 1ms is out of bounds; allowed are whole milliseconds from 120ms to 24 hours",
            ),
            (
                "zk://a?ttl=1s",
                "unknown parameter \"ttl\" in a zk:// URL; known are: session_timeout, connect_timeout, acl",
            ),
        ] {
            assert_eq!(config(url).unwrap_err().to_string(), what);
        }
        let builder = Builder::new("me:s3cret@a").digest("u", "s3cret");
        let shown = format!("{builder:?} {}", builder.config().unwrap_err());
        assert!(!shown.contains("s3cret"), "{shown}");
    }
}
