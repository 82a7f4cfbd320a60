//! The ZooKeeper backend on an ensemble of three: the conformance suite.

use std::sync::LazyLock;
use std::time::Duration;

use crate::conformance::Subject;
use testbed::ZooKeeperEnsemble;

static ENSEMBLE: LazyLock<ZooKeeperEnsemble> = LazyLock::new(ZooKeeperEnsemble::start);

conformance!(Subject {
    factory: Box::new(|| {
        contend::zk::Builder::new(ENSEMBLE.addresses().join(","))
            // One call may take a quarter of the ttl, a fifth of this: a busy machine needs it.
            .session_timeout(Duration::from_secs(5))
            .build()
            .unwrap()
    }),
    ordered: true,
});
