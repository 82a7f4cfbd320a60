//! How the semaphores are connected.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::semaphores::Semaphores;
use super::store::Store;
use crate::backend::mysql::builder::PARAMETERS;
use crate::backend::mysql::server::Server;
use crate::error::{Error, Result};
use crate::url::Url;

/// Sets [`Semaphores`] up.
///
/// The URL is that of the mutexes, so that one setting serves both:
/// `mysql://user:password@host:port/database`, with the parameters `pool_size`, `connect_timeout`,
/// `lock_wait`, `tls`, `tls_ca` and `tls_verify`; those that are about mutexes only are left to them.
#[must_use]
pub struct SemaphoresBuilder {
    server: Server,
    pool_size: u32,
    connect_timeout: Duration,
    lock_wait: Duration,
}

impl SemaphoresBuilder {
    pub(super) fn new(text: &str) -> Result<SemaphoresBuilder> {
        let url = Url::parse(text)?;
        if url.scheme != "mysql" {
            return Err(Error::invalid(format!(
                "semaphores need a mysql:// URL, not {}://",
                url.scheme
            )));
        }
        let mut known: Vec<&str> = PARAMETERS.into_iter().chain(Server::PARAMETERS).collect();
        known.push("lock_wait");
        url.expect_parameters(&known)?;
        let mut builder = SemaphoresBuilder {
            server: Server::from_url(&url)?,
            pool_size: 8,
            connect_timeout: Duration::from_secs(5),
            lock_wait: Duration::from_secs(5),
        };
        if let Some(size) = url.value("pool_size")? {
            builder.pool_size = size;
        }
        if let Some(timeout) = url.duration("connect_timeout")? {
            builder.connect_timeout = timeout;
        }
        if let Some(wait) = url.duration("lock_wait")? {
            builder.lock_wait = wait;
        }
        Ok(builder)
    }

    /// How many connections are opened at most. Default: 8. Threads that want permits of the same
    /// semaphores share them.
    pub fn pool_size(mut self, size: u32) -> SemaphoresBuilder {
        self.pool_size = size;
        self
    }

    /// The longest wait for a connection to open. Default: 5 s.
    pub fn connect_timeout(mut self, timeout: Duration) -> SemaphoresBuilder {
        self.connect_timeout = timeout;
        self
    }

    /// The longest wait for a lock on the server, for a turn in this process, and for a free
    /// connection; whole seconds. Default: 5 s.
    pub fn lock_wait(mut self, wait: Duration) -> SemaphoresBuilder {
        self.lock_wait = wait;
        self
    }

    /// The semaphores. Connects in the background: the server may be away.
    ///
    /// # Errors
    /// `InvalidInput` for what could not work, `FeatureDisabled` for TLS without its feature.
    pub fn build(self) -> Result<Semaphores> {
        self.server.check()?;
        if self.pool_size == 0 {
            return Err(Error::invalid("a pool of no connections cannot work"));
        }
        let whole = self.lock_wait.subsec_nanos() == 0;
        if !whole || self.lock_wait.is_zero() || self.lock_wait > Duration::from_secs(3600) {
            return Err(Error::invalid(format!(
                "a lock wait of {:?} is not possible; it must be whole seconds, 1 s to 1 h",
                self.lock_wait
            )));
        }
        if self.connect_timeout.is_zero() {
            return Err(Error::invalid("a connect timeout of zero cannot work"));
        }
        Ok(Semaphores::new(Arc::new(Store::new(
            self.server,
            self.pool_size,
            self.connect_timeout,
            self.lock_wait,
        ))))
    }
}

impl fmt::Debug for SemaphoresBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SemaphoresBuilder")
            .field("server", &self.server)
            .field("pool_size", &self.pool_size)
            .finish_non_exhaustive()
    }
}
