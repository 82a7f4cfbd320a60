//! The ZooKeeper backend on one server: the conformance suite.

use std::sync::LazyLock;
use std::time::Duration;

use crate::conformance::Subject;
use testbed::ZooKeeperServer;

static SERVER: LazyLock<ZooKeeperServer> = LazyLock::new(ZooKeeperServer::start);

conformance!(Subject {
    factory: Box::new(|| {
        contend::zk::Builder::new(SERVER.addr().to_string())
            // One call may take a quarter of the ttl, a fifth of this: a busy machine needs it.
            .session_timeout(Duration::from_secs(5))
            .build()
            .unwrap()
    }),
    ordered: true,
});
