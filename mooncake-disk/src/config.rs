//! Settings.

use std::path::PathBuf;

use mooncake_core::alloc::{BuiltinAllocator, SegmentAllocator};
use mooncake_core::evict::{BuiltinPolicy, EvictionPolicy};
use mooncake_core::{Error, Result};

use crate::layout::BLOCK;

/// How reads and writes reach the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineKind {
    /// io_uring, or threads where the kernel refuses it.
    #[default]
    Auto,
    /// io_uring, or an error.
    Uring,
    /// Threads that call pread and pwrite.
    Threads,
}

/// Settings of a [`DiskTransport`](crate::DiskTransport). Nothing here is read from the environment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskConfig {
    /// How I/O is done.
    pub engine: EngineKind,
    /// Requests that io_uring has under way at a time.
    pub depth: usize,
    /// Threads, where I/O is done by threads.
    pub threads: usize,
    /// Longest request to the kernel in bytes, a multiple of 4096; longer operations are cut.
    pub piece_bytes: usize,
    /// Read and write aligned operations straight from the caller's memory. The kernel then holds that memory until the request is over, so a disk that
    /// never answers holds the share of the completion too; without it (the price is one copy), a share is finished by its deadline whatever the disk does.
    pub zero_copy: bool,
    /// Go past the page cache (`O_DIRECT`) where the file system can.
    pub direct: bool,
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
        }
    }
}

impl DiskConfig {
    pub(crate) fn check(&self) -> Result<()> {
        let whole = self.piece_bytes.is_multiple_of(BLOCK as usize);
        if self.piece_bytes == 0 || !whole || self.piece_bytes > 1 << 30 {
            return Err(Error::invalid(format!(
                "piece_bytes is {}; it must be a multiple of {BLOCK}, at most 1 GiB",
                self.piece_bytes
            )));
        }
        if !(1..=4096).contains(&self.depth) || !(1..=1024).contains(&self.threads) {
            return Err(Error::invalid(format!(
                "depth is {} and threads {}; 1 to 4096 and 1 to 1024 are possible",
                self.depth, self.threads
            )));
        }
        Ok(())
    }
}

/// Settings of a [`FileStore`](crate::FileStore).
#[derive(Clone, Debug)]
pub struct StoreConfig<A: SegmentAllocator = BuiltinAllocator, E: EvictionPolicy = BuiltinPolicy> {
    /// Directory of the store's files; it is made if need be. One process at a time.
    pub dir: PathBuf,
    /// Where the objects lie: a block device, or a file elsewhere. `None` for a file in `dir`.
    pub data: Option<PathBuf>,
    /// Bytes for objects, a multiple of 4096. A store that is opened again with less drops what lies beyond.
    pub capacity: u64,
    /// Most objects.
    pub max_objects: usize,
    /// Fill, as a part of `capacity`, above which [`FileStore::trim`](crate::FileStore::trim) evicts.
    pub high_watermark: f64,
    /// Fill down to which it evicts.
    pub low_watermark: f64,
    /// How space is divided.
    pub allocator: A::Config,
    /// What goes first.
    pub eviction: E::Config,
}

impl StoreConfig {
    /// A store in `dir` of `capacity` bytes.
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
                "a capacity of {} bytes; it must be a multiple of {BLOCK}, at most 2^50",
                self.capacity
            )));
        }
        let (low, high) = (self.low_watermark, self.high_watermark);
        if !(0.0 < low && low <= high && high <= 1.0) {
            return Err(Error::invalid(format!(
                "watermarks {low} and {high}: 0 < low <= high <= 1 is needed"
            )));
        }
        Ok(())
    }
}
