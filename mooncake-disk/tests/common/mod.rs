//! Where the files of tests go, and disks that misbehave.

#![allow(dead_code, unreachable_pub, reason = "each test takes what it needs")]

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use futures::executor::block_on;
use mooncake_core::Result;
use mooncake_disk::{DiskConfig, EngineKind, FileStore, IoFault, IoFaults, IoRequest, Recovery, StoreConfig};
use tempfile::TempDir;

/// Beside the test's program, so on an ordinary disk and not in a temporary file system.
pub fn dir() -> TempDir {
    let exe = std::env::current_exe().unwrap();
    tempfile::Builder::new().prefix("mooncake-disk-").tempdir_in(exe.parent().unwrap()).unwrap()
}

pub fn engines() -> [DiskConfig; 3] {
    let with = |engine| DiskConfig { engine, ..DiskConfig::default() };
    let cached = DiskConfig { direct: false, ..with(EngineKind::Threads) };
    [with(EngineKind::Auto), with(EngineKind::Threads), cached]
}

/// Deals out what it is told to.
#[derive(Debug)]
pub struct Told {
    pub decide: fn(u64, IoRequest) -> IoFault,
    pub seen: AtomicU64,
}

impl Told {
    pub fn new(decide: fn(u64, IoRequest) -> IoFault) -> std::sync::Arc<Self> {
        std::sync::Arc::new(Self { decide, seen: AtomicU64::new(0) })
    }
}

impl IoFaults for Told {
    fn fault(&self, request: IoRequest) -> IoFault {
        (self.decide)(self.seen.fetch_add(1, Ordering::SeqCst), request)
    }
}

/// A store that opens in `dir`.
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

/// Bytes that tell their value and place.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|i| ((i ^ (seed << 20)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}
