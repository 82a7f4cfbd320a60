//! Redis, a cluster of three masters and three replicas: the conformance suite.

#![cfg(feature = "redis")]

mod conformance;

use std::sync::LazyLock;

use conformance::{Subject, lease};
use contend::redis::Builder;
use ground::RedisCluster;

/// Shared by all tests of this file; dies with the process.
static CLUSTER: LazyLock<RedisCluster> = LazyLock::new(RedisCluster::start);

conformance!(Subject {
    factory: Box::new(|| {
        Builder::cluster(CLUSTER.addresses())
            .lease(lease())
            .build()
            .unwrap()
    }),
    ordered: true,
});
