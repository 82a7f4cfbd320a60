//! Redis, a cluster of three masters and three replicas: the conformance suite.

use std::sync::LazyLock;

use crate::conformance::{Subject, lease};
use contend::redis::Builder;
use testbed::RedisCluster;

/// Shared by all tests of this file; dies with the process.
static CLUSTER: LazyLock<RedisCluster> = LazyLock::new(RedisCluster::start);

conformance!(Subject {
    factory: Box::new(|| {
        Builder::cluster(CLUSTER.addresses())
            .ttl(lease().ttl())
            .transition(lease().transition())
            .build()
            .unwrap()
    }),
    ordered: true,
});
