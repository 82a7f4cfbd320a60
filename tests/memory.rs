//! The memory backend: the conformance suite, and what only it promises.

mod conformance;

use conformance::{Subject, lease};

conformance!(Subject {
    factory: Box::new(|| contend::memory::factory("conformance", lease())),
    ordered: true,
});
