//! Redis, one server: the conformance suite.

#![cfg(feature = "redis")]

mod conformance;

use std::sync::LazyLock;

use conformance::{Subject, lease};
use contend::redis::Builder;
use ground::RedisServer;

/// Shared by all tests of this file; dies with the process.
static SERVER: LazyLock<RedisServer> = LazyLock::new(RedisServer::start);

conformance!(Subject {
    factory: Box::new(|| {
        Builder::new(SERVER.addr().to_string())
            .lease(lease())
            .build()
            .unwrap()
    }),
    ordered: true,
});
