//! Statistics of a transport.

use std::sync::atomic::{AtomicU64, Ordering};

/// Requests to the kernel since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskStats {
    /// Number of successful reads.
    pub reads: u64,
    /// Bytes requested by successful reads.
    pub read_bytes: u64,
    /// Number of successful writes.
    pub writes: u64,
    /// Bytes of successful writes.
    pub written_bytes: u64,
    /// Number of failed reads.
    pub read_errors: u64,
    /// Number of failed writes, those for want of space included.
    pub write_errors: u64,
    /// Number of writes that failed because the file system is full.
    pub no_space: u64,
    /// Number of transfers that missed their deadline.
    pub timeouts: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) reads: AtomicU64,
    pub(crate) read_bytes: AtomicU64,
    pub(crate) writes: AtomicU64,
    pub(crate) written_bytes: AtomicU64,
    pub(crate) read_errors: AtomicU64,
    pub(crate) write_errors: AtomicU64,
    pub(crate) no_space: AtomicU64,
    pub(crate) timeouts: AtomicU64,
}

impl Counters {
    pub(crate) fn stats(&self) -> DiskStats {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        DiskStats {
            reads: of(&self.reads),
            read_bytes: of(&self.read_bytes),
            writes: of(&self.writes),
            written_bytes: of(&self.written_bytes),
            read_errors: of(&self.read_errors),
            write_errors: of(&self.write_errors),
            no_space: of(&self.no_space),
            timeouts: of(&self.timeouts),
        }
    }
}

/// Adds to a counter.
pub(crate) fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}
