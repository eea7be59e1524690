//! Settings of the transport and the store.

use std::path::PathBuf;

use mooncake_core::alloc::{BuiltinAllocator, SegmentAllocator};
use mooncake_core::evict::{BuiltinPolicy, EvictionPolicy};
use mooncake_core::{Error, Result};

use crate::fault::Faults;
use crate::layout::BLOCK;

/// I/O engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineKind {
    /// io_uring, or threads if the kernel refuses it.
    #[default]
    Auto,
    /// io_uring, or an error.
    Uring,
    /// Threads that call pread and pwrite.
    Threads,
}

/// Settings of a [`DiskTransport`](crate::DiskTransport). None of them is read from the
/// environment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskConfig {
    /// I/O engine to use.
    pub engine: EngineKind,
    /// Maximum number of requests that io_uring processes at a time.
    pub depth: usize,
    /// Number of I/O threads, if threads do the I/O.
    pub threads: usize,
    /// Longest request to the kernel in bytes, a multiple of 4096. Longer operations are split.
    pub piece_bytes: usize,
    /// True if aligned operations read and write the memory of the caller without a copy. The
    /// kernel then holds that memory until the request is complete, so a disk that never answers
    /// also holds the share of the completion. Without this, at the price of one copy, a share is
    /// completed by its deadline whatever the disk does.
    pub zero_copy: bool,
    /// True if I/O bypasses the page cache (`O_DIRECT`) if the file system supports it.
    pub direct: bool,
    /// Faults that a test injects.
    pub faults: Faults,
}

impl Default for DiskConfig {
    fn default() -> Self {
        Self {
            engine: EngineKind::Auto,
            depth: 32,
            threads: 8,
            piece_bytes: 1 << 20,
            zero_copy: false,
            direct: true,
            faults: Faults::default(),
        }
    }
}

impl DiskConfig {
    pub(crate) fn check(&self) -> Result<()> {
        let is_block_multiple = self.piece_bytes.is_multiple_of(BLOCK as usize);
        if self.piece_bytes == 0 || !is_block_multiple || self.piece_bytes > 1 << 30 {
            return Err(Error::invalid(format!(
                "invalid piece_bytes {}: it must be a multiple of {BLOCK}, at most 1 GiB",
                self.piece_bytes
            )));
        }
        if !(1..=4096).contains(&self.depth) || !(1..=1024).contains(&self.threads) {
            return Err(Error::invalid(format!(
                "invalid depth {} or threads {}: they must be 1 to 4096 and 1 to 1024",
                self.depth, self.threads
            )));
        }
        Ok(())
    }
}

/// Settings of a [`FileStore`](crate::FileStore).
#[derive(Clone, Debug)]
pub struct StoreConfig<A: SegmentAllocator = BuiltinAllocator, E: EvictionPolicy = BuiltinPolicy> {
    /// Directory of the files of the store, created if missing. Only one process at a time uses it.
    pub dir: PathBuf,
    /// Path of the objects: a block device, or a file elsewhere. `None` stands for a file in `dir`.
    pub data: Option<PathBuf>,
    /// Bytes for objects, a multiple of 4096. A store that is reopened with less drops the objects
    /// beyond.
    pub capacity: u64,
    /// Maximum number of objects.
    pub max_objects: usize,
    /// Fraction of `capacity` above which [`FileStore::trim`](crate::FileStore::trim) evicts.
    pub high_watermark: f64,
    /// Fraction of `capacity` down to which it evicts.
    pub low_watermark: f64,
    /// Options of the allocator.
    pub allocator: A::Config,
    /// Options of the eviction policy.
    pub eviction: E::Config,
}

impl StoreConfig {
    /// Creates the settings of a store in `dir` with `capacity` bytes.
    pub fn new(dir: impl Into<PathBuf>, capacity: u64) -> Self {
        Self {
            dir: dir.into(),
            data: None,
            capacity,
            max_objects: 10_000_000,
            high_watermark: 0.9,
            low_watermark: 0.8,
            allocator: Default::default(),
            eviction: Default::default(),
        }
    }
}

impl<A: SegmentAllocator, E: EvictionPolicy> StoreConfig<A, E> {
    pub(crate) fn check(&self) -> Result<()> {
        if self.capacity == 0 || !self.capacity.is_multiple_of(BLOCK) || self.capacity > 1 << 50 {
            return Err(Error::invalid(format!(
                "invalid capacity of {} bytes: it must be a multiple of {BLOCK}, at most 2^50",
                self.capacity
            )));
        }
        let (low, high) = (self.low_watermark, self.high_watermark);
        if !(0.0 < low && low <= high && high <= 1.0) {
            return Err(Error::invalid(format!(
                "invalid watermarks {low} and {high}: 0 < low <= high <= 1 must hold"
            )));
        }
        Ok(())
    }
}
