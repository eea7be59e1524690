//! Directories for the files of tests, and disks with injected faults.

#![allow(dead_code, unreachable_pub, reason = "each test file uses a part of the module")]

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures::executor::block_on;
use mooncake_core::Result;
use mooncake_disk::{
    DiskConfig, EngineKind, Faults, FileStore, IoFault, IoFaults, IoRequest, Recovery, StoreConfig,
};
use tempfile::TempDir;

/// Creates a directory beside the test program, so on an ordinary disk and not in a temporary file
/// system.
pub fn dir() -> TempDir {
    let exe = std::env::current_exe().unwrap();
    tempfile::Builder::new().prefix("mooncake-disk-").tempdir_in(exe.parent().unwrap()).unwrap()
}

pub fn engines() -> [DiskConfig; 3] {
    let with = |engine| DiskConfig { engine, ..DiskConfig::default() };
    let cached = DiskConfig { direct: false, ..with(EngineKind::Threads) };
    [with(EngineKind::Auto), with(EngineKind::Threads), cached]
}

/// Fake faults, decided by a function of the test.
#[derive(Debug)]
struct FakeFaults {
    decide: fn(u64, IoRequest) -> IoFault,
    seen: AtomicU64,
}

/// Returns faults that `decide` chooses, by the number of the request.
pub fn fake_faults(decide: fn(u64, IoRequest) -> IoFault) -> Faults {
    Faults::new(Arc::new(FakeFaults { decide, seen: AtomicU64::new(0) }))
}

impl IoFaults for FakeFaults {
    fn fault(&self, request: IoRequest) -> IoFault {
        (self.decide)(self.seen.fetch_add(1, Ordering::SeqCst), request)
    }
}

/// Opens a store in `dir`.
pub fn open(disk: &DiskConfig, dir: &Path, capacity: u64) -> (FileStore, Recovery) {
    FileStore::open(disk.clone(), StoreConfig::new(dir, capacity)).unwrap()
}

pub fn put(store: &FileStore, key: &[u8], value: &[u8]) -> Result<()> {
    let mut put = store.value(key, value.len())?;
    put.value().copy_from_slice(value);
    block_on(store.put(put))
}

pub fn get(store: &FileStore, key: &[u8]) -> Result<Option<Vec<u8>>> {
    let Some(len) = store.value_len(key) else { return Ok(None) };
    let (result, value) = block_on(store.read(key, vec![0; len as usize]));
    result.map(|()| Some(value))
}

/// Returns bytes that are specific to their value and position.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|i| ((i ^ (seed << 20)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}
