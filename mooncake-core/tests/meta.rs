//! The metadata conformance suite on the in-memory backend.

use std::sync::Arc;

use mooncake_core::meta::MemoryMetadata;
use mooncake_core::testkit;

#[test]
fn memory_metadata_conforms() {
    futures::executor::block_on(testkit::meta::check(Arc::new(MemoryMetadata::new())));
}
