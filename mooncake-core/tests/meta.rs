//! The metadata conformance suite on the in-memory backend.

use std::sync::Arc;

use mooncake_core::clock::ManualClock;
use mooncake_core::meta::MemoryMetadata;
use mooncake_core::testkit;

#[test]
fn memory_metadata_conforms() {
    futures::executor::block_on(testkit::meta::check(Arc::new(MemoryMetadata::new())));
}

#[test]
fn keys_held_in_memory_conform() {
    let clock = Arc::new(ManualClock::new());
    let directory = MemoryMetadata::with_clock(clock.clone());
    futures::executor::block_on(testkit::lease::check(&directory, &*clock, async |span| {
        clock.advance(span);
        directory.expire();
    }));
}
