//! The metadata conformance suite on the in-memory backend.

use std::sync::Arc;

use mooncake_core::ErrorCode;
use mooncake_core::clock::ManualClock;
use mooncake_core::meta::{Expect, Leases, MemoryLimits, MemoryMetadata, MetadataBackend};
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

#[test]
fn a_full_directory_refuses_by_name() {
    let directory = MemoryMetadata::with_limits(MemoryLimits { entries: 2, bytes: 20 });
    let put = |key: &str, len: usize| {
        futures::executor::block_on(directory.put(key, vec![7; len].into(), Expect::Any))
            .map_err(|error| (error.code(), error.to_string()))
    };
    let refused = |outcome: Result<u64, (ErrorCode, String)>| {
        let (code, text) = outcome.unwrap_err();
        assert!(code == ErrorCode::NoAvailableHandle && text.contains("the directory is full"), "{text}");
    };
    put("a", 9).unwrap();
    refused(put("b", 10));
    put("b", 9).unwrap();
    refused(put("c", 0));
    let held = futures::executor::block_on(directory.take("c", "".into(), std::time::Duration::from_secs(1)));
    assert_eq!(held.unwrap_err().code(), ErrorCode::NoAvailableHandle);
    // A present key keeps its space, and returns the space that it does not need any more.
    put("a", 9).unwrap();
    refused(put("a", 10));
    put("a", 4).unwrap();
    put("b", 14).unwrap();
    assert!(futures::executor::block_on(directory.delete("b")).unwrap());
    put("c", 14).unwrap();
}
