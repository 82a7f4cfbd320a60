//! Redis, one server: the conformance suite.

use std::sync::LazyLock;

use crate::conformance::{Subject, lease};
use contend::redis::Builder;
use testbed::RedisServer;

/// Shared by all tests of this file; dies with the process.
static SERVER: LazyLock<RedisServer> = LazyLock::new(RedisServer::start);

conformance!(Subject {
    factory: Box::new(|| {
        Builder::new(SERVER.addr().to_string())
            .ttl(lease().ttl())
            .transition(lease().transition())
            .build()
            .unwrap()
    }),
    ordered: true,
});
